// A ggml device of type GPU for tests: memory of its own that isn't the host's, a memory limit, an adjustable delay, a log.
// It computes with one CPU thread, synchronously. Settings hold for the whole process.
#pragma once

#include <cstddef>
#include <cstdint>

#define FAKE_DEVICE_API __attribute__((visibility("default")))

extern "C" {

struct fake_device_stats {
    uint64_t used_bytes;  // allocated now
    uint64_t peak_bytes;  // the most that was allocated at once
    uint64_t set_bytes;   // host to device
    uint64_t get_bytes;   // device to host
    uint64_t n_graphs;    // computed
};

// One graph_compute, in seconds of CLOCK_MONOTONIC (omp_get_wtime, Python's time.monotonic).
struct fake_device_interval {
    double begin_s;
    double end_s;
};

// The device's name instead of FAKE<i_device>; before registration.
FAKE_DEVICE_API void fake_device_set_name(int i_device, const char * name);

// Registers FAKE0 .. FAKE<n_devices - 1>, n_devices 1 or 2. false: registered before, or another count.
FAKE_DEVICE_API bool fake_device_register(int n_devices);

// i_device: 0 or 1, also before registration. An allocation beyond the limit returns NULL; default 100 MiB.
FAKE_DEVICE_API void fake_device_set_memory(int i_device, uint64_t limit_bytes);

// Every graph takes this much longer; default 0.
FAKE_DEVICE_API void fake_device_set_delay(int i_device, uint64_t delay_us);

// supports_op refuses MUL_MAT with weights of this type ("q4_0"); NULL, the default: as the CPU device does.
FAKE_DEVICE_API void fake_device_refuse_type(int i_device, const char * type_name);

// supports_op refuses to convert values of this type; NULL, the default: as the CPU device does.
FAKE_DEVICE_API void fake_device_refuse_cast(int i_device, const char * type_name);

// As CUDA does from 32 tokens on: matrix products of at least n_tokens whose weights are in host memory are computed here
// all the same, on a copy made each time (op_offload). 0, the default: never.
FAKE_DEVICE_API void fake_device_set_offload(int i_device, int64_t n_tokens);

FAKE_DEVICE_API void fake_device_get_stats(int i_device, struct fake_device_stats * stats);

// Copies the first n intervals since the start or the last reset, oldest first. Returns how many there are.
FAKE_DEVICE_API size_t fake_device_get_intervals(int i_device, struct fake_device_interval * intervals, size_t n);

// Clears the log and every figure but used_bytes; peak_bytes starts again from it.
FAKE_DEVICE_API void fake_device_reset_stats(int i_device);

}  // extern "C"
