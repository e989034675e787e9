// Which neurons go to a device: the cost of one decoded token as hot neurons are added, and a greedy choice of how many
// per layer. The maths stand in tools/placement.py, whose MILP this stays within 1 % of. Knows no ggml.
#pragma once

#include "status.h"

#include <cstdint>
#include <vector>

namespace powerinfer {

constexpr int64_t placement_group = 64;  // neurons that move together (SOSP'24, 6.3.3)

// Seconds that reading one neuron's rows takes.
struct row_seconds {
    double first = 0.0;      // gate; up when ungated
    double second = 0.0;     // up; 0 when ungated
    double down = 0.0;
    double predictor = 0.0;  // its share of fc1 and fc2
};

// Seconds per neuron, active or not, and per active neuron.
struct neuron_cost {
    double neuron_s = 0.0;
    double active_s = 0.0;
};

// candidate_ratio: candidates per active neuron; 0: no predictor, so all first rows are read.
// reads_all: the device computes every neuron that it has.
POWERINFER_EXPORT neuron_cost placement_neuron_cost(const row_seconds & rows, double candidate_ratio, bool reads_all);

struct placement_layer {
    int64_t n_ff = 0;                   // 0: nothing to place
    const float * frequency = nullptr;  // (n_ff) share of tokens in which a neuron is active, hot first; nullptr: all equal
    double mean_frequency = 1.0;        // of every neuron, when frequency is nullptr
    uint64_t neuron_bytes = 0;          // that one hot neuron takes on its device
    neuron_cost cpu;
    neuron_cost gpu;
    double sync_s = 0.0;                // of a layer that has hot neurons
    int64_t min_hot = 0;                // hot neurons are 0 or at least so many
    int32_t i_device = 0;
};

struct placement_problem {
    std::vector<placement_layer> layers;   // (n_layer)
    std::vector<uint64_t> capacity_bytes;  // (n_devices) for hot neurons
};

struct placement_result {
    std::vector<int64_t> n_hot;  // (n_layer) whole groups, or n_ff
    double token_s = 0.0;        // of one token's FFNs
    double saved_s = 0.0;        // against no hot neuron
    double gap = 0.0;            // token_s is at most this share above the least possible
};

// The least number of hot neurons whose CPU time is as much as the synchronisation they need: a whole number of groups,
// or n_ff. n_ff + 1 when all of them aren't worth it.
POWERINFER_EXPORT int64_t placement_min_hot(const placement_layer & layer);

// Chooses n_hot of every layer. Memory that is left is filled as long as no layer gets slower.
POWERINFER_EXPORT status place_greedy(const placement_problem & problem, placement_result & out);

}  // namespace powerinfer
