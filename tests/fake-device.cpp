// The fake GPU device: the CPU backend on memory that is reported as the device's own.
#include "fake-device.h"

#include "ggml-abi.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int max_devices = 2;
constexpr size_t alignment_bytes = 64;

struct device_state {
    std::string name;
    std::mutex mutex;  // guards all below
    uint64_t limit_bytes = uint64_t(100) << 20;
    uint64_t delay_us = 0;
    int64_t offload_tokens = 0;
    std::string refused_type;
    std::string refused_cast;
    fake_device_stats stats = {};
    std::vector<fake_device_interval> intervals;
    ggml_backend_device device = {};
    ggml_backend_buffer_type buffer_type = {};
};

// Never freed: buffers and backends may outlive every static destructor of this library.
device_state * state_of(int i_device) {
    static device_state * states = new device_state[max_devices];
    GGML_ASSERT(i_device >= 0 && i_device < max_devices);
    return &states[i_device];
}

device_state * state_of(ggml_backend_dev_t device) { return static_cast<device_state *>(device->context); }
device_state * state_of(ggml_backend_buffer_type_t buffer_type) { return static_cast<device_state *>(buffer_type->context); }
device_state * state_of(ggml_backend_buffer_t buffer) { return state_of(buffer->buft); }

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// --- buffers ---

void buffer_free(ggml_backend_buffer_t buffer) {
    device_state * self = state_of(buffer);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->stats.used_bytes -= buffer->size;
    std::free(buffer->context);
}

void * buffer_base(ggml_backend_buffer_t buffer) { return buffer->context; }

void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    std::memset(static_cast<uint8_t *>(tensor->data) + offset, value, size);
}

void buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    std::memcpy(static_cast<uint8_t *>(tensor->data) + offset, data, size);
    device_state * self = state_of(buffer);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->stats.set_bytes += size;
}

void buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    std::memcpy(data, static_cast<const uint8_t *>(tensor->data) + offset, size);
    device_state * self = state_of(buffer);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->stats.get_bytes += size;
}

// Within one device only: between two of them ggml copies through the host.
bool buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    const ggml_backend_buffer_t src_buffer = src->view_src ? src->view_src->buffer : src->buffer;
    if (src_buffer->buft != buffer->buft) {
        return false;
    }
    std::memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) { std::memset(buffer->context, value, buffer->size); }

const char * buffer_type_name(ggml_backend_buffer_type_t buffer_type) { return state_of(buffer_type)->name.c_str(); }

ggml_backend_buffer_t buffer_type_alloc(ggml_backend_buffer_type_t buffer_type, size_t size) {
    device_state * self = state_of(buffer_type);
    std::lock_guard<std::mutex> lock(self->mutex);
    if (self->stats.used_bytes + size > self->limit_bytes) {
        return nullptr;
    }
    void * memory = nullptr;
    if (posix_memalign(&memory, alignment_bytes, size) != 0) {
        return nullptr;
    }
    self->stats.used_bytes += size;
    self->stats.peak_bytes = std::max(self->stats.peak_bytes, self->stats.used_bytes);
    ggml_backend_buffer_i iface = {};
    iface.free_buffer = buffer_free;
    iface.get_base = buffer_base;
    iface.memset_tensor = buffer_memset_tensor;
    iface.set_tensor = buffer_set_tensor;
    iface.get_tensor = buffer_get_tensor;
    iface.cpy_tensor = buffer_cpy_tensor;
    iface.clear = buffer_clear;
    return ggml_backend_buffer_init(buffer_type, iface, memory, size);
}

size_t buffer_type_alignment(ggml_backend_buffer_type_t) { return alignment_bytes; }
bool buffer_type_is_host(ggml_backend_buffer_type_t) { return false; }

// --- backend ---

const char * backend_name(ggml_backend_t backend) { return state_of(backend->device)->name.c_str(); }

ggml_backend_t cpu_of(ggml_backend_t backend) { return static_cast<ggml_backend_t>(backend->context); }

void backend_free(ggml_backend_t backend) {
    ggml_backend_free(cpu_of(backend));
    delete backend;
}

enum ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    device_state * self = state_of(backend->device);
    fake_device_interval interval = {now_s(), 0.0};
    uint64_t delay_us;
    {
        std::lock_guard<std::mutex> lock(self->mutex);
        delay_us = self->delay_us;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    const enum ggml_status result = ggml_backend_graph_compute(cpu_of(backend), graph);
    interval.end_s = now_s();
    std::lock_guard<std::mutex> lock(self->mutex);
    self->stats.n_graphs += 1;
    self->intervals.push_back(interval);
    return result;
}

// --- device ---

ggml_backend_dev_t cpu_device() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

const char * device_name(ggml_backend_dev_t device) { return state_of(device)->name.c_str(); }
const char * device_description(ggml_backend_dev_t) { return "fake device for tests"; }
enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; }

void device_memory(ggml_backend_dev_t device, size_t * free, size_t * total) {
    device_state * self = state_of(device);
    std::lock_guard<std::mutex> lock(self->mutex);
    *total = self->limit_bytes;
    *free = self->limit_bytes - std::min(self->limit_bytes, self->stats.used_bytes);
}

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    *props = {};
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = device_type(device);
    device_memory(device, &props->memory_free, &props->memory_total);
}

ggml_backend_t device_init_backend(ggml_backend_dev_t device, const char *) {
    static ggml_guid guid = {0x70, 0x6f, 0x77, 0x65, 0x72, 0x69, 0x6e, 0x66, 0x65, 0x72, 0x2d, 0x66, 0x61, 0x6b, 0x65, 0x01};
    ggml_backend_t cpu = ggml_backend_dev_init(cpu_device(), nullptr);
    if (cpu == nullptr) {
        return nullptr;
    }
    const auto set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()), "ggml_backend_set_n_threads"));
    set_n_threads(cpu, 1);
    ggml_backend * backend = new ggml_backend();
    backend->guid = &guid;
    backend->iface.get_name = backend_name;
    backend->iface.free = backend_free;
    backend->iface.graph_compute = backend_graph_compute;
    backend->device = device;
    backend->context = cpu;
    return backend;
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device) { return &state_of(device)->buffer_type; }

bool device_supports_op(ggml_backend_dev_t device, const ggml_tensor * op) {
    device_state * self = state_of(device);
    if (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_CPY) {
        std::lock_guard<std::mutex> lock(self->mutex);
        if ((op->op == GGML_OP_CPY ? self->refused_cast : self->refused_type) == ggml_type_name(op->src[0]->type)) {
            return false;
        }
    }
    return ggml_backend_dev_supports_op(cpu_device(), op);
}

bool device_offload_op(ggml_backend_dev_t device, const ggml_tensor * op) {
    device_state * self = state_of(device);
    std::lock_guard<std::mutex> lock(self->mutex);
    return op->op == GGML_OP_MUL_MAT && self->offload_tokens > 0 && op->ne[1] >= self->offload_tokens;
}

bool device_supports_buffer_type(ggml_backend_dev_t device, ggml_backend_buffer_type_t buffer_type) {
    return buffer_type == &state_of(device)->buffer_type;
}

// --- registration ---

int n_registered = 0;

const char * reg_name(ggml_backend_reg_t) { return "FAKE"; }
size_t reg_device_count(ggml_backend_reg_t) { return n_registered; }
ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t i_device) { return &state_of(static_cast<int>(i_device))->device; }
void * reg_proc_address(ggml_backend_reg_t, const char *) { return nullptr; }

void device_fill(int i_device, ggml_backend_reg_t reg) {
    device_state * self = state_of(i_device);
    if (self->name.empty()) {
        self->name = "FAKE" + std::to_string(i_device);
    }

    ggml_backend_device & device = self->device;
    device.iface.get_name = device_name;
    device.iface.get_description = device_description;
    device.iface.get_memory = device_memory;
    device.iface.get_type = device_type;
    device.iface.get_props = device_props;
    device.iface.init_backend = device_init_backend;
    device.iface.get_buffer_type = device_buffer_type;
    device.iface.supports_op = device_supports_op;
    device.iface.supports_buft = device_supports_buffer_type;
    device.iface.offload_op = device_offload_op;
    device.reg = reg;
    device.context = self;

    ggml_backend_buffer_type & buffer_type = self->buffer_type;
    buffer_type.iface.get_name = buffer_type_name;
    buffer_type.iface.alloc_buffer = buffer_type_alloc;
    buffer_type.iface.get_alignment = buffer_type_alignment;
    buffer_type.iface.is_host = buffer_type_is_host;
    buffer_type.device = &device;
    buffer_type.context = self;
}

// For programs that know nothing of this library: LD_PRELOAD, and FAKE_DEVICES=<n>, FAKE_DEVICE_MEMORY=<bytes of each>.
__attribute__((constructor)) void register_as_told() {
    const char * n_devices = std::getenv("FAKE_DEVICES");
    const char * limit_bytes = std::getenv("FAKE_DEVICE_MEMORY");
    if (n_devices == nullptr) {
        return;
    }
    for (int i = 0; limit_bytes != nullptr && i < max_devices; ++i) {
        fake_device_set_memory(i, std::strtoull(limit_bytes, nullptr, 10));
    }
    fake_device_register(std::atoi(n_devices));
}

}  // namespace

bool fake_device_register(int n_devices) {
    static ggml_backend_reg reg = {ggml_abi_api_version, {reg_name, reg_device_count, reg_device, reg_proc_address}, nullptr};
    if (n_registered != 0 || n_devices < 1 || n_devices > max_devices) {
        return false;
    }
    n_registered = n_devices;
    for (int i = 0; i < n_devices; ++i) {
        device_fill(i, &reg);
    }
    ggml_backend_register(&reg);
    return true;
}

void fake_device_set_name(int i_device, const char * name) { state_of(i_device)->name = name; }

void fake_device_set_memory(int i_device, uint64_t limit_bytes) {
    device_state * self = state_of(i_device);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->limit_bytes = limit_bytes;
}

void fake_device_set_delay(int i_device, uint64_t delay_us) {
    device_state * self = state_of(i_device);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->delay_us = delay_us;
}

void fake_device_refuse_type(int i_device, const char * type_name) {
    device_state * self = state_of(i_device);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->refused_type = type_name ? type_name : "";
}

void fake_device_refuse_cast(int i_device, const char * type_name) {
    device_state * self = state_of(i_device);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->refused_cast = type_name ? type_name : "";
}

void fake_device_set_offload(int i_device, int64_t n_tokens) {
    device_state * self = state_of(i_device);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->offload_tokens = n_tokens;
}

void fake_device_get_stats(int i_device, fake_device_stats * stats) {
    device_state * self = state_of(i_device);
    std::lock_guard<std::mutex> lock(self->mutex);
    *stats = self->stats;
}

size_t fake_device_get_intervals(int i_device, fake_device_interval * intervals, size_t n) {
    device_state * self = state_of(i_device);
    std::lock_guard<std::mutex> lock(self->mutex);
    std::copy_n(self->intervals.begin(), std::min(n, self->intervals.size()), intervals);
    return self->intervals.size();
}

void fake_device_reset_stats(int i_device) {
    device_state * self = state_of(i_device);
    std::lock_guard<std::mutex> lock(self->mutex);
    const uint64_t used_bytes = self->stats.used_bytes;
    self->stats = {};
    self->stats.used_bytes = self->stats.peak_bytes = used_bytes;
    self->intervals.clear();
}
