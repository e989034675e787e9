// Measures a device of any ggml backend: copies, a round trip, and how fast it reads weight rows. For `powerinfer
// measure-hardware`: the engine calls nothing here.
#pragma once

#include "../status.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace powerinfer {

struct device_measure_options {
    std::vector<std::string> types;  // ggml type names; empty: all that have kernels of ours
    int64_t n_embd = 4096;           // values per row; floats of the round trip
    size_t max_bytes = size_t(256) << 20;  // rows of a type, far more than caches hold; half of the free memory at most
    double repeat_s = 0.05;          // seconds per figure, about
    std::function<bool(const std::string &)> progress;  // called with what comes next; false: stop
};

struct device_row_rate {
    std::string type;
    double bytes_s = 0.0;  // 0: the device can't multiply rows of this type
};

// Bytes per second, seconds.
struct device_rates {
    double bandwidth_bytes_s = 0.0;  // the best of the row rates, f32 among them
    double to_device_bytes_s = 0.0;
    double to_host_bytes_s = 0.0;
    double round_trip_s = 0.0;       // n_embd floats up, a feed-forward block of 8 f32 neurons, n_embd floats back: median
    bool pinned = false;             // copies were from and to the device's own kind of host memory
    std::vector<device_row_rate> rows;  // in the order of the types
};

// Memory that can't be had, a type that doesn't exist: a status, never an abort.
POWERINFER_EXPORT status measure_device(const std::string & name, const device_measure_options & options, device_rates & result);

}  // namespace powerinfer
