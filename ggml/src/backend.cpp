// One backend instance per llama context: runs the nodes of a split, FFN blocks whole where they are whole.
#include "graph-match.h"

#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace powerinfer {

namespace {

struct backend_state {
    int n_threads = 1;
    ffn_workspace workspace;
    // The last activation that this instance computed per layer: a down projection checks that its input is that.
    std::vector<std::pair<const opened_plan *, std::vector<const ggml_tensor *>>> products;

    const ggml_tensor *& product_of(const opened_plan * owner, int i_layer) {
        for (auto & entry : products) {
            if (entry.first == owner) {
                return entry.second[i_layer];
            }
        }
        products.emplace_back(owner, std::vector<const ggml_tensor *>(owner->data.layers.size(), nullptr));
        return products.back().second[i_layer];
    }
};

backend_state * state_of(ggml_backend_t backend) { return static_cast<backend_state *>(backend->context); }

const char * backend_name(ggml_backend_t) { return "POWERINFER"; }

void backend_free(ggml_backend_t backend) {
    delete state_of(backend);
    delete backend;
}

// --- whole blocks ---

// Adds what a call did to the plan's figures.
void record(opened_plan * owner, int i_layer, const ffn_layer & layer, const ffn_options & options, const ffn_result & result,
            double total_s) {
    std::lock_guard<std::mutex> lock(owner->mutex);
    ggml_backend_powerinfer_stats & stats = owner->stats;
    stats.n_tokens += result.n_tokens;
    stats.n_blocks_whole += 1;
    stats.n_slow_rows += result.n_slow_rows;
    stats.n_neurons += result.n_tokens * layer.n_ff;
    stats.n_candidates += result.n_candidates;
    stats.n_active += result.n_active;
    stats.read_bytes += result.read_bytes;
    stats.dense_bytes += result.dense_bytes;
    stats.predictor_us += result.predictor_us;
    stats.gate_us += result.gate_us;
    stats.up_down_us += result.up_down_us;
    stats.total_us += static_cast<uint64_t>(total_s * 1e6 + 0.5);
    stats.overlap_sum += result.overlap_sum;
    stats.n_overlaps += result.n_overlaps;
    layer_state & state = owner->layers[i_layer];
    state.n_tokens += result.n_tokens;
    state.n_candidates += result.n_candidates;
    state.n_active += result.n_active;
    if (!options.count || result.active.empty()) {
        return;
    }
    state.count_tokens += result.n_tokens;
    auto add = [](auto & sum, const auto & values) {
        sum.resize(values.size());
        for (size_t i = 0; i < values.size(); ++i) {
            sum[i] += values[i];
        }
    };
    add(state.active, result.active);
    add(state.gate_abs_sum, result.gate_abs_sum);
    add(state.gate_histogram, result.gate_histogram);
    add(state.product_histogram, result.product_histogram);
}

void capture_input(opened_plan * owner, int i_layer, const ggml_tensor * x) {
    ggml_backend_powerinfer_capture_t capture;
    void * user_data;
    {
        std::lock_guard<std::mutex> lock(owner->mutex);
        capture = owner->capture;
        user_data = owner->capture_user_data;
    }
    if (capture == nullptr || x->ne[1] == 0) {
        return;
    }
    if (x->nb[1] == x->ne[0] * sizeof(float)) {
        capture(i_layer, x->ne[1], x->ne[0], static_cast<const float *>(x->data), user_data);
        return;
    }
    std::vector<float> rows(x->ne[0] * x->ne[1]);
    for (int64_t t = 0; t < x->ne[1]; ++t) {
        std::memcpy(&rows[t * x->ne[0]], static_cast<const uint8_t *>(x->data) + t * x->nb[1], x->ne[0] * sizeof(float));
    }
    capture(i_layer, x->ne[1], x->ne[0], rows.data(), user_data);
}

void run_block(backend_state & state, const ffn_block & block) {
    opened_plan * owner = block.owner;
    const ffn_layer & layer = block.store->layer();
    ffn_options options;
    {
        std::lock_guard<std::mutex> lock(owner->mutex);
        const layer_state & chosen = owner->layers[block.i_layer];
        options.mode = chosen.mode;
        options.threshold = chosen.threshold;
        options.product_threshold = chosen.product_threshold;
    }
    options.activation = block.activation;
    options.add_biases = block.has_biases;
    options.count = owner->options.count;
    capture_input(owner, block.i_layer, block.x);
    const double start = omp_get_wtime();
    ffn_result result;
    ffn_forward(layer, options, owner->kernels, state.n_threads, block.x->ne[1], static_cast<const float *>(block.x->data),
                block.x->nb[1] / sizeof(float), static_cast<float *>(block.out->data), block.out->nb[1] / sizeof(float),
                state.workspace, result);
    record(owner, block.i_layer, layer, options, result, omp_get_wtime() - start);
}

// --- op by op ---

// A view of a tensor's rows: row (i1, i2, i3) begins at data + i1*nb1 + i2*nb2 + i3*nb3.
float * row_at(const ggml_tensor * tensor, int64_t i1, int64_t i2, int64_t i3) {
    return reinterpret_cast<float *>(static_cast<uint8_t *>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] + i3 * tensor->nb[3]);
}

// Calls f(out row, left row, right row, right length) for every row; the right operand is broadcast.
template <class F> void for_rows(ggml_tensor * node, const ggml_tensor * left, const ggml_tensor * right, F f) {
    for (int64_t i3 = 0; i3 < node->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < node->ne[2]; ++i2) {
            for (int64_t i1 = 0; i1 < node->ne[1]; ++i1) {
                const float * r = right ? row_at(right, i1 % right->ne[1], i2 % right->ne[2], i3 % right->ne[3]) : nullptr;
                f(row_at(node, i1, i2, i3), row_at(left, i1, i2, i3), r, right ? right->ne[0] : 0);
            }
        }
    }
}

template <class F> void binary_rows(ggml_tensor * node, F f) {
    for_rows(node, node->src[0], node->src[1], [&](float * out, const float * a, const float * b, int64_t n_b) {
        for (int64_t i = 0; i < node->ne[0]; ++i) {
            out[i] = f(a[i], b[i % n_b]);
        }
    });
}

status run_matmul(backend_state & state, ggml_tensor * node) {
    const ggml_tensor * weights = node->src[0];
    const ggml_tensor * x = node->src[1];
    const weight_ref weight = weight_of(weights);
    opened_plan * owner = weight.owner;
    if (owner == nullptr) {
        return status::error(std::string("powerinfer: ") + node->name + ": its weights aren't in a buffer of ours; this is an error in powerinfer.");
    }
    ffn_result result;
    if (weight.kind == weight_kind::lora) {
        row_matrix plain;
        plain.rows = static_cast<const uint8_t *>(weights->data);
        plain.stride_bytes = weights->nb[1];
        plain.row_bytes = weights->nb[1];
        plain.n = weights->ne[0];
        plain.n_rows = weights->ne[1];
        plain.row_type = weights->type;
        plain.kernels = kernel_table_find(owner->kernels, weights->type);
        for (int64_t i3 = 0; i3 < x->ne[3]; ++i3) {
            for (int64_t i2 = 0; i2 < x->ne[2]; ++i2) {
                ffn_matmul_rows(plain, nullptr, owner->kernels, state.n_threads, x->ne[1], row_at(x, 0, i2, i3), x->nb[1] / sizeof(float),
                                row_at(node, 0, i2, i3), node->nb[1] / sizeof(float), state.workspace, result);
            }
        }
        return {};
    }
    const ffn_store * store = store_of(weights);
    if (store == nullptr || !store->is_complete()) {
        return status::error(std::string(weights->name) + ": its data never arrived; this is an error in powerinfer.");
    }
    const ffn_layer & layer = store->layer();
    const bool is_down = weight.kind == weight_kind::down;
    if (is_down) {
        // The input must be what the plan's activation gives: ours, or upstream's of the same kind.
        const ggml_tensor * computed = state.product_of(owner, weight.i_layer);
        ffn_activation found;
        ffn_activation wanted;
        const bool same = graph_activation(x, found) && block_activation(*owner, x, wanted) && found == wanted && layer.activation_param == 0.0f;
        if (x != computed && !same) {
            return status::error(owner->data.path + ": layer " + std::to_string(weight.i_layer) +
                                 ": the activation was computed outside of the block and isn't the plan's; run this model without the "
                                 "changes to its FFN (adapters, hooks), or without the plan.");
        }
        state.product_of(owner, weight.i_layer) = nullptr;
    }
    const bool is_first = weight.kind == weight_kind::gate || (weight.kind == weight_kind::up && !layer.gated);
    const row_matrix & matrix = is_down ? layer.down : is_first ? layer.first : layer.second;
    const double start = omp_get_wtime();
    for (int64_t i3 = 0; i3 < x->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < x->ne[2]; ++i2) {
            const auto multiply = is_down ? ffn_matmul_columns : ffn_matmul_rows;
            multiply(matrix, layer.order, owner->kernels, state.n_threads, x->ne[1], row_at(x, 0, i2, i3), x->nb[1] / sizeof(float),
                     row_at(node, 0, i2, i3), node->nb[1] / sizeof(float), state.workspace, result);
        }
    }
    if (is_first) {
        capture_input(owner, weight.i_layer, x);
        result.n_tokens = ggml_nrows(x);
        result.n_candidates = result.n_tokens * layer.n_ff;
    }
    if (is_down) {
        result.n_active = ggml_nrows(x) * layer.n_ff;
    }
    std::lock_guard<std::mutex> lock(owner->mutex);
    ggml_backend_powerinfer_stats & stats = owner->stats;
    stats.n_blocks_by_op += is_down ? 1 : 0;
    stats.n_tokens += result.n_tokens;
    stats.n_neurons += result.n_tokens * layer.n_ff;
    stats.n_candidates += result.n_candidates;
    stats.n_active += result.n_active;
    stats.n_slow_rows += result.n_slow_rows;
    stats.read_bytes += result.read_bytes;
    stats.dense_bytes += result.read_bytes;
    stats.total_us += static_cast<uint64_t>((omp_get_wtime() - start) * 1e6 + 0.5);
    return {};
}

status run_node(backend_state & state, ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE: return {};
        case GGML_OP_MUL_MAT: return run_matmul(state, node);
        case GGML_OP_ADD: binary_rows(node, [](float a, float b) { return a + b; }); return {};
        case GGML_OP_SCALE: {
            float params[2];
            std::memcpy(params, node->op_params, sizeof(params));
            for_rows(node, node->src[0], nullptr, [&](float * out, const float * a, const float *, int64_t) {
                for (int64_t i = 0; i < node->ne[0]; ++i) {
                    out[i] = a[i] * params[0] + params[1];
                }
            });
            return {};
        }
        default: break;
    }

    // What is left belongs to an activation: the plan's, whatever the graph says.
    const node_match found = match_node(node);
    const std::string where = std::string("powerinfer: ") + node->name + " (" + ggml_op_desc(node) + ")";
    if (found.owner == nullptr) {
        return status::error(where + ": not part of a known FFN block; run this model without the plan.");
    }
    opened_plan * owner = found.owner;
    const float param = owner->data.layers[found.i_layer].activation_param;
    ffn_activation activation = ffn_activation::relu;
    const bool by_graph = owner->data.activation == activation_kind::graph;
    if (found.role == node_role::activated || found.role == node_role::product) {
        if (node->op != GGML_OP_DIV && !block_activation(*owner, node, activation)) {
            return status::error(where + ": an activation that this version doesn't know; run this model without the plan.");
        }
        state.product_of(owner, found.i_layer) = node;
    }
    switch (node->op) {
        case GGML_OP_MUL:
            if (found.role == node_role::product) {
                const bool left = match_node(node->src[0]).role == node_role::activated;
                const bool drelu = activation == ffn_activation::drelu;
                binary_rows(node, [=](float a, float b) {
                    float & up = left ? b : a;
                    up = drelu && up <= 0.0f ? 0.0f : up;
                    return a * b;
                });
            } else {
                binary_rows(node, [](float a, float b) { return a * b; });
            }
            return {};
        case GGML_OP_DIV: binary_rows(node, [](float a, float b) { return a / b; }); return {};
        case GGML_OP_UNARY:
            for_rows(node, node->src[0], nullptr, [&](float * out, const float * a, const float *, int64_t) {
                std::memmove(out, a, node->ne[0] * sizeof(float));
                ffn_activate(activation, param, owner->kernels, node->ne[0], out);
            });
            return {};
        case GGML_OP_SQR:
            // With a plan the unary node before it did all of the plan's activation.
            for_rows(node, node->src[0], nullptr, [&](float * out, const float * a, const float *, int64_t) {
                for (int64_t i = 0; i < node->ne[0]; ++i) {
                    out[i] = by_graph ? a[i] * a[i] : a[i];
                }
            });
            return {};
        case GGML_OP_GLU:
            for_rows(node, node->src[0], node->src[1], [&](float * out, const float * gate, const float * up, int64_t) {
                std::vector<float> product(gate, gate + node->ne[0]);
                ffn_activate(activation, param, owner->kernels, node->ne[0], product.data());
                const bool drelu = activation == ffn_activation::drelu;
                for (int64_t i = 0; i < node->ne[0]; ++i) {
                    out[i] = product[i] * (drelu && up[i] <= 0.0f ? 0.0f : up[i]);
                }
            });
            return {};
        default: return status::error(where + ": unknown operation; this is an error in powerinfer.");
    }
}

enum ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    backend_state & state = *state_of(backend);
    const int n_nodes = ggml_graph_n_nodes(graph);
    std::vector<ggml_tensor *> nodes;
    nodes.reserve(n_nodes);
    for (int i = 0; i < n_nodes; ++i) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->flags & GGML_TENSOR_FLAG_COMPUTE) {
            nodes.push_back(node);
        }
    }
    const std::vector<ffn_block> blocks = match_blocks(nodes);
    std::vector<const ffn_block *> block_at(nodes.size(), nullptr);  // the block that ends at a node
    std::vector<bool> in_block(nodes.size(), false);
    for (const ffn_block & block : blocks) {
        block_at[block.nodes.back()] = &block;
        for (const int i : block.nodes) {
            in_block[i] = true;
        }
    }
    for (size_t i = 0; i < nodes.size(); ++i) {
        opened_plan * owner = block_at[i] ? block_at[i]->owner : nullptr;
        if (owner == nullptr && nodes[i]->src[0] != nullptr) {
            owner = plan_of(nodes[i]->src[0]);
        }
        status result;
        if (owner != nullptr && owner->has_error) {
            std::lock_guard<std::mutex> lock(owner->mutex);
            result = status::error(owner->error);
        } else if (block_at[i] != nullptr) {
            run_block(state, *block_at[i]);
        } else if (!in_block[i]) {
            result = run_node(state, nodes[i]);
        }
        if (!result.ok()) {
            std::fprintf(stderr, "powerinfer: %s\n", result.text().c_str());
            return GGML_STATUS_FAILED;
        }
    }
    return GGML_STATUS_SUCCESS;
}

ggml_guid_t backend_guid() {
    static ggml_guid guid = {0x70, 0x6f, 0x77, 0x65, 0x72, 0x69, 0x6e, 0x66, 0x65, 0x72, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x01};
    return &guid;
}

}  // namespace

ggml_backend_t backend_create() {
    ggml_backend * backend = new ggml_backend();
    backend->guid = backend_guid();
    backend->iface = {};
    backend->iface.get_name = backend_name;
    backend->iface.free = backend_free;
    backend->iface.graph_compute = backend_graph_compute;
    backend->device = powerinfer_device();
    backend->context = new backend_state();
    return backend;
}

void backend_set_n_threads(ggml_backend_t backend, int n_threads) { state_of(backend)->n_threads = std::max(n_threads, 1); }

}  // namespace powerinfer
