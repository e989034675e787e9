// Stands in for the split's C interface until device.cpp has it; goes away with the merge.
#include "device.h"

#include <algorithm>

using namespace powerinfer;

bool ggml_backend_powerinfer_plan_set_split(ggml_backend_powerinfer_plan_t, const ggml_backend_powerinfer_split *, char *, size_t) {
    return true;
}

uint64_t ggml_backend_powerinfer_plan_neuron_bytes(ggml_backend_powerinfer_plan_t handle, int i_layer) {
    const plan & data = reinterpret_cast<const opened_plan *>(handle)->data;
    const plan_layer & layer = data.layers[i_layer];
    const auto type = layer.ffn_down_t.data != nullptr ? static_cast<ggml_type>(layer.ffn_down_t.row_type) : GGML_TYPE_F32;
    return layer.n_ff > 0 ? (data.gated ? 3 : 2) * ggml_row_size(type, data.n_embd) : 0;
}

bool ggml_backend_powerinfer_plan_split_bytes(ggml_backend_powerinfer_plan_t handle, const ggml_backend_powerinfer_split * split,
                                              uint64_t * row_bytes, uint64_t * scratch_bytes, char *, size_t) {
    const plan & data = reinterpret_cast<const opened_plan *>(handle)->data;
    for (int i = 0; i < data.n_layer; ++i) {
        const uint64_t n_hot = static_cast<uint64_t>(split->n_hot[i]);
        const int i_device = split->i_device ? split->i_device[i] : 0;
        row_bytes[i_device] += n_hot * ggml_backend_powerinfer_plan_neuron_bytes(handle, i);
        if (n_hot > 0) {
            scratch_bytes[i_device] = std::max<uint64_t>(
                scratch_bytes[i_device], static_cast<uint64_t>(split->max_tokens) * (2 * static_cast<uint64_t>(data.n_embd) + 3 * n_hot) * sizeof(float));
        }
    }
    return true;
}
