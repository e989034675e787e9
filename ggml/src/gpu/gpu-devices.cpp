// Lists devices and adds RPC servers. The first message of upstream's RPC protocol is written out here: its number never
// changes, and its answer carries the version.
#include "gpu-devices.h"

#include "ggml-backend.h"
#include "ggml-rpc.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace powerinfer {

namespace {

constexpr int answer_wait_s = 5;
constexpr uint8_t hello_command = 14;
constexpr uint64_t hello_caps_bytes = 24;  // what the transport can do; zeros: TCP
constexpr uint64_t hello_answer_bytes = 4 + hello_caps_bytes;  // major, minor, patch, padding first

const char * type_name(enum ggml_backend_dev_type type) {
    switch (type) {
        case GGML_BACKEND_DEVICE_TYPE_CPU:   return "cpu";
        case GGML_BACKEND_DEVICE_TYPE_GPU:   return "gpu";
        case GGML_BACKEND_DEVICE_TYPE_IGPU:  return "igpu";
        case GGML_BACKEND_DEVICE_TYPE_ACCEL: return "accel";
        case GGML_BACKEND_DEVICE_TYPE_META:  return "meta";
    }
    return "";
}

// A TCP connection that gives up after answer_wait_s.
class connection {
public:
    ~connection() {
        if (socket_ >= 0) {
            close(socket_);
        }
    }

    // The reason why not, or "".
    std::string open(const std::string & host, const std::string & port) {
        addrinfo hints = {};
        hints.ai_family = AF_INET;  // all that upstream's client takes
        hints.ai_socktype = SOCK_STREAM;
        addrinfo * found = nullptr;
        const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
        if (error != 0) {
            return gai_strerror(error);
        }
        socket_ = socket(found->ai_family, found->ai_socktype | SOCK_CLOEXEC, found->ai_protocol);
        const timeval wait = {answer_wait_s, 0};
        setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));  // of connect too
        setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait));
        const bool is_open = socket_ >= 0 && connect(socket_, found->ai_addr, found->ai_addrlen) == 0;
        const int reason = errno == EINPROGRESS ? ETIMEDOUT : errno;
        freeaddrinfo(found);
        return is_open ? "" : std::strerror(reason);
    }

    bool send_all(const uint8_t * data, size_t n) { return send(socket_, data, n, MSG_NOSIGNAL) == static_cast<ssize_t>(n); }

    bool receive_all(uint8_t * data, size_t n) { return recv(socket_, data, n, MSG_WAITALL) == static_cast<ssize_t>(n); }

private:
    int socket_ = -1;
};

// What keeps a server from being used, or "".
std::string ask_server(const std::string & host, const std::string & port) {
    connection server;
    const std::string reason = server.open(host, port);
    if (!reason.empty()) {
        return "nothing answers there (" + reason + ")";
    }
    uint8_t request[1 + sizeof(uint64_t) + hello_caps_bytes] = {hello_command};
    std::memcpy(request + 1, &hello_caps_bytes, sizeof(hello_caps_bytes));
    uint64_t n_answer = 0;
    uint8_t answer[hello_answer_bytes];
    errno = 0;
    if (!server.send_all(request, sizeof(request)) || !server.receive_all(reinterpret_cast<uint8_t *>(&n_answer), sizeof(n_answer))) {
        return errno == EAGAIN ? "it is silent for " + std::to_string(answer_wait_s) + " s: no RPC server, or one with another client"
                               : "it hangs up: no RPC server, or one of another version";
    }
    if (n_answer != hello_answer_bytes || !server.receive_all(answer, sizeof(answer))) {
        return "it isn't an RPC server";
    }
    if (answer[0] != RPC_PROTO_MAJOR_VERSION || answer[1] > RPC_PROTO_MINOR_VERSION) {
        return "its protocol is " + std::to_string(answer[0]) + "." + std::to_string(answer[1]);
    }
    return "";
}

}  // namespace

std::vector<device_info> list_devices() {
    std::vector<device_info> devices;
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        ggml_backend_dev_props properties = {};
        ggml_backend_dev_get_props(ggml_backend_dev_get(i), &properties);
        device_info info;
        info.name = properties.name;
        info.description = properties.description;
        info.type = type_name(properties.type);
        info.memory_free = properties.memory_free;
        info.memory_total = properties.memory_total;
        info.async = properties.caps.async;
        devices.push_back(std::move(info));
    }
    return devices;
}

status add_rpc_server(const std::string & address, std::vector<std::string> & names) {
    using add_server = ggml_backend_reg_t (*)(const char *);
    const size_t colon = address.find(':');
    const std::string host = address.substr(0, colon);
    const std::string port = colon == std::string::npos ? "" : address.substr(colon + 1);
    const bool is_number = !port.empty() && port.size() <= 5 && std::all_of(port.begin(), port.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (host.empty() || !is_number || std::stoi(port) < 1 || std::stoi(port) > 65535) {
        return status::error("rpc: '" + address + "'; expected host:port, such as 127.0.0.1:50052; pass that.");
    }
    const ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    const auto add = rpc == nullptr ? nullptr
                                    : reinterpret_cast<add_server>(ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server"));
    if (add == nullptr) {
        return status::error("rpc: the installed llama.cpp has no RPC backend; expected one to reach " + address +
                             "; build llama-cpp-python again with CMAKE_ARGS=-DGGML_RPC=ON in the environment.");
    }
    const std::string reason = ask_server(host, port);
    const std::string advice = "; expected an RPC server of protocol " + std::to_string(RPC_PROTO_MAJOR_VERSION) + "." +
                               std::to_string(RPC_PROTO_MINOR_VERSION) + "; start llama.cpp's rpc-server there, or pass another address.";
    if (!reason.empty()) {
        return status::error("rpc: " + address + ": " + reason + advice);
    }
    const ggml_backend_reg_t server = add(address.c_str());
    if (server == nullptr) {
        return status::error("rpc: " + address + ": it has no devices" + advice);
    }
    ggml_backend_register(server);
    names.clear();
    for (size_t i = 0; i < ggml_backend_reg_dev_count(server); ++i) {
        names.push_back(ggml_backend_dev_name(ggml_backend_reg_dev_get(server, i)));
    }
    return {};
}

}  // namespace powerinfer
