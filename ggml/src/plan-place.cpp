// Fills the devices with the neurons that are active most often per byte.
#include "plan-place.h"

#include "device.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>

namespace powerinfer {

namespace {

double frequency_sum(const plan_layer & layer, int64_t begin, int64_t end) {
    const std::vector<float> & f = layer.neuron_frequency;
    return f.empty() ? double(end - begin) : std::accumulate(f.begin() + begin, f.begin() + end, 0.0);
}

}  // namespace

status plan_place(ggml_backend_powerinfer_plan_t handle, const place_request & request, place_result & result) {
    const plan & data = reinterpret_cast<const opened_plan *>(handle)->data;
    result = place_result{};
    result.n_hot.assign(data.layers.size(), 0);
    std::vector<uint64_t> left = request.capacity_bytes;

    // The next group of each layer: expected activations per byte, layer (the lower one first among equals).
    std::priority_queue<std::tuple<double, int>> next;
    auto offer = [&](int i_layer) {
        const plan_layer & layer = data.layers[i_layer];
        const int64_t begin = result.n_hot[i_layer];
        const int64_t end = std::min(begin + place_group, layer.n_ff);
        if (begin < end && request.neuron_bytes[i_layer] > 0) {
            next.emplace(frequency_sum(layer, begin, end) / double((end - begin) * request.neuron_bytes[i_layer]), -i_layer);
        }
    };
    for (size_t i = 0; i < data.layers.size(); ++i) {
        offer(int(i));
    }
    while (!next.empty()) {
        const int i_layer = -std::get<1>(next.top());
        next.pop();
        const int64_t n = std::min(place_group, data.layers[i_layer].n_ff - result.n_hot[i_layer]);
        const uint64_t n_bytes = uint64_t(n) * request.neuron_bytes[i_layer];
        uint64_t & room = left[request.i_device[i_layer]];
        if (n_bytes <= room) {
            room -= n_bytes;
            result.n_hot[i_layer] += n;
            offer(i_layer);
        }
    }

    int64_t n_ff = 0;
    int64_t n_hot = 0;
    double active = 0.0;
    double active_hot = 0.0;
    for (size_t i = 0; i < data.layers.size(); ++i) {
        const plan_layer & layer = data.layers[i];
        n_ff += layer.n_ff;
        n_hot += result.n_hot[i];
        active += frequency_sum(layer, 0, layer.n_ff);
        active_hot += frequency_sum(layer, 0, result.n_hot[i]);
        result.has_statistics |= !layer.neuron_frequency.empty();
        result.predictor_bytes += layer.fc1.size_bytes + layer.fc2.size_bytes;
    }
    result.share_neurons = n_ff > 0 ? double(n_hot) / double(n_ff) : 0.0;
    result.share_activations = active > 0.0 ? active_hot / active : 0.0;
    return {};
}

}  // namespace powerinfer
