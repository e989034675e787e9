// One backend instance per llama context: runs the nodes of a split, FFN blocks whole where they are whole.
#include "graph-match.h"

#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

namespace powerinfer {

namespace {

enum slot { slot_residual = 64, slot_output };  // of the workspace, behind those of the FFN's paths

// A layer whose residual arrives in a later split than its FFN (with attention beside the FFN, whose output projection lies
// between): the block then only keeps x and writes zeros, and all of it is computed where the residual is added.
struct late_residual {
    const ggml_cgraph * graph = nullptr;  // the block's split; an observed one runs as other objects, and nothing waits then
    const ggml_tensor * add = nullptr;    // the residual's addition, in a split of ours too; nullptr: it isn't
};

// A block that waits for its residual.
struct waiting_block {
    const ggml_tensor * add = nullptr;  // nullptr: nothing waits
    ffn_block block;
    ffn_options options;
    std::vector<float> x;  // (n_tokens, n_embd)
};

struct backend_state {
    int n_threads = 1;
    ffn_workspace workspace;
    std::map<std::pair<const opened_plan *, int>, late_residual> late;  // by plan and layer, of the graph that was split last
    waiting_block waiting;
    std::map<const gpu_store *, std::unique_ptr<gpu_executor>> executors;
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

    status executor_of(const hybrid_layer & layer, int64_t max_tokens, gpu_executor *& out) {
        std::unique_ptr<gpu_executor> & made = executors[layer.store];
        const status result = made == nullptr ? layer.store->make_executor(max_tokens, made) : status();
        out = made.get();
        return result;
    }

    // The later addition of the residual of a block that runs in `graph`; nullptr: there is none.
    const ggml_tensor * late_add(const ffn_block & block, const ggml_cgraph * graph) const {
        const auto found = late.find({block.owner, block.i_layer});
        return found != late.end() && found->second.graph == graph ? found->second.add : nullptr;
    }
};

backend_state * state_of(ggml_backend_t backend) { return static_cast<backend_state *>(backend->context); }

const char * backend_name(ggml_backend_t) { return "POWERINFER"; }

void backend_free(ggml_backend_t backend) {
    delete state_of(backend);
    delete backend;
}

// --- rows of tensors ---

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

// --- whole blocks ---

uint64_t to_us(double seconds) { return static_cast<uint64_t>(seconds * 1e6 + 0.5); }

// Adds what a call did to the plan's figures.
void record(opened_plan * owner, int i_layer, const ffn_layer & layer, const ffn_options & options, const ffn_result & result,
            const hybrid_times & times, double total_s) {
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
    stats.total_us += to_us(total_s);
    stats.n_gpu_neurons += times.gpu_neurons;
    stats.cpu_us += to_us(times.cpu_s());
    stats.gpu_us += to_us(times.gpu_s());
    stats.wait_us += to_us(times.wait_s);
    stats.copy_us += to_us(times.copy_s);
    stats.copied_bytes += times.copied_bytes;
    stats.n_gpu_active += times.gpu_active;
    stats.n_cpu_active += times.cpu_active;
    stats.gpu_read_bytes += times.gpu_read_bytes;
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

// y += rows. rows: (n_tokens, n_embd) without gaps.
void add_rows(const backend_state & state, const kernel_table * kernels, ggml_tensor * y, const float * rows) {
#pragma omp parallel for num_threads(state.n_threads) if (y->ne[1] > 1) schedule(static)
    for (int64_t t = 0; t < y->ne[1]; ++t) {
        kernels->add(y->ne[0], rows + t * y->ne[0], row_at(y, t, 0, 0));
    }
}

// (n_tokens, n_embd) without gaps.
void copy_rows(const ggml_tensor * from, float * to) {
    for (int64_t t = 0; t < from->ne[1]; ++t) {
        std::memcpy(to + t * from->ne[0], row_at(from, t, 0, 0), from->ne[0] * sizeof(float));
    }
}

// How the layer runs this time: as chosen, or `exact` when its predictor's input doesn't arrive. An error when that is refused.
status block_options(const ffn_block & block, bool has_residual, ffn_options & options) {
    opened_plan * owner = block.owner;
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
    options.count_hot = block.hybrid != nullptr && owner->counts_hot;
    if (options.mode != ffn_mode::predicted || !owner->data.predictor_reads_residual || has_residual) {
        return {};
    }
    const std::string text = owner->data.path + ": the predictors read the residual stream, which this graph doesn't deliver (its FFN's "
        "output isn't added to what its norm reads, or an observer or another device has the addition); `exact` is used; use a plan "
        "with predictors that read the FFN input, or another mode.";
    if (owner->options.strict) {
        owner->fail(text);
        return status::error(text);
    }
    owner->note(text);
    options.mode = ffn_mode::exact;
    return {};
}

void trace_block(opened_plan * owner, int i_layer, int64_t n_tokens, double begin_s, const hybrid_times & times) {
    if (!owner->counts_hot) {
        return;
    }
    ggml_backend_powerinfer_trace_t trace;
    void * user_data;
    {
        std::lock_guard<std::mutex> lock(owner->mutex);
        trace = owner->trace;
        user_data = owner->trace_user_data;
    }
    if (trace != nullptr) {
        const ggml_backend_powerinfer_block_times all = {i_layer, n_tokens, begin_s, omp_get_wtime(), times.cpu_begin_s, times.cpu_end_s,
                                                         times.gpu_begin_s, times.gpu_end_s};
        trace(&all, user_data);
    }
}

// r: what the predictor reads, apart from y; nullptr: x.
status compute_block(backend_state & state, const ffn_block & block, const ffn_options & options, int64_t n_tokens, const float * x,
                     int64_t ld_x, float * y, int64_t ld_y, const float * r, int64_t ld_r) {
    const ffn_layer & layer = block.store->layer();
    opened_plan * owner = block.owner;
    const double start = omp_get_wtime();
    ffn_result result;
    hybrid_times times;
    if (block.hybrid != nullptr && n_tokens > 0) {
        gpu_executor * gpu = nullptr;
        status done = state.executor_of(*block.hybrid, owner->split.max_tokens, gpu);
        if (done.ok()) {
            done = ffn_forward_hybrid(*block.hybrid, *gpu, owner->split.max_tokens, options, owner->kernels, state.n_threads, n_tokens, x, ld_x,
                                      y, ld_y, state.workspace, result, times, r, ld_r);
        }
        if (!done.ok()) {
            return done;
        }
    } else {
        ffn_forward(layer, options, owner->kernels, state.n_threads, n_tokens, x, ld_x, y, ld_y, state.workspace, result, r, ld_r);
        times.cpu_begin_s = start;
        times.cpu_end_s = omp_get_wtime();
        times.cpu_active = result.n_active;
    }
    record(owner, block.i_layer, layer, options, result, times, omp_get_wtime() - start);
    trace_block(owner, block.i_layer, n_tokens, start, times);
    return {};
}

status run_block(backend_state & state, const ffn_block & block, const ggml_cgraph * graph) {
    opened_plan * owner = block.owner;
    const ffn_layer & layer = block.store->layer();
    const ggml_tensor * x = block.x;
    ggml_tensor * y = block.out;
    const int64_t n_tokens = x->ne[1];
    const ggml_tensor * late_add = block.residual ? nullptr : state.late_add(block, graph);
    state.waiting.add = nullptr;
    ffn_options options;
    const status result = block_options(block, block.residual != nullptr || late_add != nullptr, options);
    if (!result.ok()) {
        return result;
    }
    capture_input(owner, block.i_layer, x);
    if (late_add != nullptr && options.mode == ffn_mode::predicted) {
        state.waiting.add = late_add;
        state.waiting.block = block;
        state.waiting.options = options;
        state.waiting.x.resize(n_tokens * layer.n_embd);
        copy_rows(x, state.waiting.x.data());
        for (int64_t t = 0; t < n_tokens; ++t) {
            std::memset(row_at(y, t, 0, 0), 0, layer.n_embd * sizeof(float));
        }
        return {};
    }
    const float * r = nullptr;
    if (block.residual != nullptr) {
        // y may lie over it.
        float * copy = state.workspace.array<float>(slot_residual, n_tokens * layer.n_embd);
        copy_rows(block.residual, copy);
        r = copy;
    }
    const status done = compute_block(state, block, options, n_tokens, static_cast<const float *>(x->data), x->nb[1] / sizeof(float),
                                      static_cast<float *>(y->data), y->nb[1] / sizeof(float),
                                      options.mode == ffn_mode::predicted ? r : nullptr, layer.n_embd);
    if (done.ok() && r != nullptr) {
        add_rows(state, owner->kernels, y, r);
    }
    return done;
}

// The addition of a late residual: `node` = what was computed without the block + residual, then + the block.
status run_waiting_block(backend_state & state, ggml_tensor * node) {
    const ffn_block & block = state.waiting.block;
    const ggml_tensor * residual = node->src[1];
    const int64_t n_embd = block.store->layer().n_embd;
    GGML_ASSERT(static_cast<int64_t>(state.waiting.x.size()) == ggml_nelements(node) && "the residual has the rows of the FFN's input");
    float * y = state.workspace.array<float>(slot_output, node->ne[1] * n_embd);
    const status done = compute_block(state, block, state.waiting.options, node->ne[1], state.waiting.x.data(), n_embd, y, n_embd,
                                      static_cast<const float *>(residual->data), residual->nb[1] / sizeof(float));
    binary_rows(node, [](float a, float b) { return a + b; });
    add_rows(state, block.owner->kernels, node, y);
    state.waiting.add = nullptr;
    return done;
}

// --- op by op ---

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
    const hybrid_layer * hybrid = hybrid_of(weights);
    const ffn_role role = is_down ? ffn_role::down : weight.kind == weight_kind::gate ? ffn_role::gate : ffn_role::up;
    gpu_executor * gpu = nullptr;
    if (hybrid != nullptr) {
        const status made = state.executor_of(*hybrid, owner->split.max_tokens, gpu);
        if (!made.ok()) {
            return made;
        }
    }
    for (int64_t i3 = 0; i3 < x->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < x->ne[2]; ++i2) {
            if (hybrid != nullptr) {
                const status done = hybrid_matmul(*hybrid, *gpu, owner->split.max_tokens, role, layer.order, owner->kernels, state.n_threads,
                                                  x->ne[1], row_at(x, 0, i2, i3), x->nb[1] / sizeof(float), row_at(node, 0, i2, i3),
                                                  node->nb[1] / sizeof(float), state.workspace, result);
                if (!done.ok()) {
                    return done;
                }
                continue;
            }
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
    stats.total_us += to_us(omp_get_wtime() - start);
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
            result = run_block(state, *block_at[i], graph);
        } else if (nodes[i] == state.waiting.add) {
            result = run_waiting_block(state, nodes[i]);
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

// Called for every split of a new graph, in order, once nodes are assigned: which residuals come later than their blocks?
void backend_graph_optimize(ggml_backend_t backend, ggml_cgraph * graph, ggml_backend_graph_optimize_params *) {
    backend_state & state = *state_of(backend);
    state.waiting.add = nullptr;
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        const node_match found = node->op == GGML_OP_MUL_MAT ? match_node(node) : node_match();
        if (found.role == node_role::down && found.owner->data.predictor_reads_residual) {
            state.late[{found.owner, found.i_layer}] = {graph, nullptr};
        }
        const residual_add add = match_residual_add(node);
        if (add.owner != nullptr && add.is_apart) {
            state.late[{add.owner, add.i_layer}].add = node;
        }
    }
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
    backend->iface.graph_optimize = backend_graph_optimize;
    backend->device = powerinfer_device();
    backend->context = new backend_state();
    return backend;
}

void backend_set_n_threads(ggml_backend_t backend, int n_threads) { state_of(backend)->n_threads = std::max(n_threads, 1); }

}  // namespace powerinfer
