// The placement problem of an opened plan. Rates are fixed ones of a desktop with a GPU: what is measured changes from start
// to start, and with it the split; `powerinfer place --save` takes measured ones.
#include "plan-place.h"

#include "device.h"

#include <numeric>

namespace powerinfer {

namespace {

// Data sheets: two channels of DDR5, a GPU with 16 GB. The synchronisation is an assumption.
constexpr double cpu_bytes_s = 7e10;
constexpr double gpu_bytes_s = 7e11;
constexpr double sync_s = 2e-5;

double frequency_sum(const plan_layer & layer, int64_t n) {
    const std::vector<float> & f = layer.neuron_frequency;
    const double mean = layer.profile_density > 0.0f ? layer.profile_density : 1.0;
    return f.empty() ? mean * double(n) : std::accumulate(f.begin(), f.begin() + n, 0.0);
}

row_seconds seconds_at(double bytes_s, const plan & data, const plan_layer & layer) {
    auto row = [&](int type) { return type < 0 ? 0.0 : double(ggml_row_size(static_cast<ggml_type>(type), data.n_embd)) / bytes_s; };
    row_seconds rows;
    rows.first = row(data.gated ? layer.gate_type : layer.up_type);
    rows.second = data.gated ? row(layer.up_type) : 0.0;
    rows.down = row(layer.ffn_down_t.data ? layer.ffn_down_t.row_type : derived_row_type(layer.down_type, data.n_embd));
    rows.predictor = double(layer.fc1.size_bytes + layer.fc2.size_bytes) / double(layer.n_ff) / bytes_s;
    return rows;
}

placement_layer problem_layer(const plan & data, int i_layer, ffn_mode mode, const hot_neuron & hot, int32_t i_device) {
    const plan_layer & layer = data.layers[i_layer];
    placement_layer out;
    if (layer.n_ff == 0) {
        return out;
    }
    const double mean = frequency_sum(layer, layer.n_ff) / double(layer.n_ff);
    out.n_ff = layer.n_ff;
    out.frequency = layer.neuron_frequency.empty() ? nullptr : layer.neuron_frequency.data();
    out.mean_frequency = mean;
    out.neuron_bytes = hot.bytes;
    out.i_device = i_device;
    out.sync_s = sync_s;
    double candidate_ratio = 0.0;
    if (mode == ffn_mode::predicted) {
        candidate_ratio = layer.predictor_density > 0.0f && mean > 0.0 ? layer.predictor_density / mean : 1.0;
    }
    out.cpu = placement_neuron_cost(seconds_at(cpu_bytes_s, data, layer), candidate_ratio, mode == ffn_mode::dense);
    out.gpu = placement_neuron_cost(seconds_at(gpu_bytes_s, data, layer), candidate_ratio, !hot.skips_inactive || mode == ffn_mode::dense);
    out.min_hot = placement_min_hot(out);
    return out;
}

}  // namespace

status plan_place(ggml_backend_powerinfer_plan_t handle, const place_request & request, place_result & result) {
    opened_plan * self = reinterpret_cast<opened_plan *>(handle);
    const plan & data = self->data;
    const int n_layer = static_cast<int>(data.n_layer);
    result = place_result{};
    result.i_device = request.i_device;
    const saved_placement * saved = request.reset_index ? nullptr : plan_find_placement(data, request.capacity_bytes);
    if (saved != nullptr) {
        result.is_saved = true;
        result.n_hot.assign(saved->n_hot.begin(), saved->n_hot.end());
        result.i_device.assign(saved->i_device.begin(), saved->i_device.end());
    } else {
        placement_problem problem;
        problem.capacity_bytes = request.capacity_bytes;
        std::vector<std::vector<hot_neuron>> hot;  // (n_devices, n_layer)
        for (const ggml_backend_dev_t device : request.devices) {
            hot.push_back(hot_neurons(data, device));
        }
        {
            std::lock_guard<std::mutex> lock(self->mutex);
            for (int i = 0; i < n_layer; ++i) {
                const int32_t i_device = request.i_device[i];
                problem.layers.push_back(problem_layer(data, i, self->layers[i].mode, hot[i_device][i], i_device));
            }
        }
        placement_result placed;
        if (status done = place_greedy(problem, placed); !done.ok()) {
            return done;
        }
        result.n_hot = placed.n_hot;
    }

    int64_t n_ff = 0;
    int64_t n_hot = 0;
    double active = 0.0;
    double active_hot = 0.0;
    for (int i = 0; i < n_layer; ++i) {
        const plan_layer & layer = data.layers[i];
        n_ff += layer.n_ff;
        n_hot += result.n_hot[i];
        active += frequency_sum(layer, layer.n_ff);
        active_hot += frequency_sum(layer, result.n_hot[i]);
        result.has_statistics |= !layer.neuron_frequency.empty();
        result.predictor_bytes += layer.fc1.size_bytes + layer.fc2.size_bytes;
    }
    result.share_neurons = n_ff > 0 ? double(n_hot) / double(n_ff) : 0.0;
    result.share_activations = active > 0.0 ? active_hot / active : 0.0;
    return {};
}

}  // namespace powerinfer
