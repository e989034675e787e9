// libFuzzer: the plan reader on any bytes. They are opened as an extended GGUF with the base model given, with its own one, and as a
// base model; what is accepted is read to the end. Expected of all of them: a status.
#include "plan.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

using namespace powerinfer;

namespace {

// A file in memory, by a path that can be opened again.
class memory_file {
public:
    memory_file() : fd_(memfd_create("input", 0)) {
        if (fd_ < 0) {
            std::perror("memfd_create");
            std::abort();
        }
    }
    ~memory_file() { close(fd_); }

    std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

    void set(const uint8_t * data, size_t size_bytes) const {
        if (ftruncate(fd_, 0) != 0 || pwrite(fd_, data, size_bytes, 0) != ssize_t(size_bytes)) {
            std::perror("pwrite");
            std::abort();
        }
    }

private:
    int fd_;
};

uint64_t sum_of_bytes(const plan_tensor & tensor) {
    uint64_t sum = 0;
    for (size_t i = 0; i < tensor.size_bytes; ++i) {
        sum += tensor.data[i];
    }
    return sum;
}

// Everything that a plan says lies in memory that belongs to it.
void use(const plan & p) {
    volatile uint64_t sum = 0;
    for (const plan_layer & layer : p.layers) {
        if (!layer.neuron_order.empty() && layer.neuron_order.size() != size_t(layer.n_ff)) {
            std::abort();
        }
        for (const int32_t row : layer.neuron_order) {
            if (row < 0 || row >= layer.n_ff) {
                std::abort();
            }
        }
        sum = sum + sum_of_bytes(layer.ffn_down_t) + sum_of_bytes(layer.fc1) + sum_of_bytes(layer.fc2);
    }
    for (const saved_placement & saved : p.placements) {
        plan_find_placement(p, saved.hot_bytes);
    }
    plan_model_hash(p);
    plan_statistics_hash(p);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size_bytes) {
    static const memory_file file;
    file.set(data, size_bytes);
    const std::string path = file.path();
    model_file_kind kind;
    if (!model_file_kind_of(path, kind).ok()) {
        return 0;
    }
    for (const std::string & base : {std::string(POWERINFER_FUZZ_BASE), std::string()}) {
        plan p;
        if (plan_read(path, base, p).ok()) {
            use(p);
        }
    }
    plan bare;
    if (plan_from_base(path, bare).ok()) {
        use(bare);
    }
    return 0;
}
