// Which neurons of an opened plan go to which device, for given capacities: a saved placement that matches, else the greedy
// one. Exported from the module for vram-budget.cpp.
#pragma once

#include "ggml-powerinfer.h"
#include "placement.h"
#include "status.h"

#include <cstdint>
#include <vector>

namespace powerinfer {

struct place_request {
    std::vector<ggml_backend_dev_t> devices;
    std::vector<int32_t> i_device;         // (n_layer) device of each layer's hot neurons
    std::vector<uint64_t> capacity_bytes;  // (n_devices) for rows of hot neurons
    bool reset_index = false;              // a saved placement isn't used
};

struct place_result {
    std::vector<int64_t> n_hot;       // (n_layer)
    std::vector<int32_t> i_device;    // (n_layer) as asked for, or as saved
    bool is_saved = false;
    bool has_statistics = false;
    double share_neurons = 0.0;       // of the covered layers' neurons, on a device
    double share_activations = 0.0;   // of the expected activations
    uint64_t predictor_bytes = 0;     // of all layers
};

POWERINFER_EXPORT status plan_place(ggml_backend_powerinfer_plan_t plan, const place_request & request, place_result & result);

}  // namespace powerinfer
