// Which neurons of an opened plan go to which device, for given capacities: a saved placement that matches, else a new one.
// Exported from the module for vram-budget.cpp; knows nothing of libllama.
#pragma once

#include "ggml-powerinfer.h"
#include "status.h"

#include <cstdint>
#include <vector>

namespace powerinfer {

struct place_request {
    std::vector<int32_t> i_device;         // (n_layer) device of each layer's hot neurons
    std::vector<uint64_t> capacity_bytes;  // (n_devices) for rows of hot neurons
    std::vector<uint64_t> neuron_bytes;    // (n_layer) on the device; 0: the layer isn't covered
};

struct place_result {
    std::vector<int64_t> n_hot;       // (n_layer)
    double share_neurons = 0.0;       // of the covered layers' neurons, on a device
    double share_activations = 0.0;   // of the expected activations; equal to share_neurons without statistics
    bool has_statistics = false;
    uint64_t predictor_bytes = 0;     // of all layers
};

constexpr int64_t place_group = 64;  // neurons that are placed together

__attribute__((visibility("default"))) status plan_place(
    ggml_backend_powerinfer_plan_t plan, const place_request & request, place_result & result);

}  // namespace powerinfer
