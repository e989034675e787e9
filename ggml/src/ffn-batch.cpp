// The blocked path for batches: rows are unpacked once per tile and used for all tokens. Each token uses its own set of
// neurons, whatever else is in the batch. Also the whole-matrix products of the op-by-op path.
#include "ffn-batch.h"

#include "ggml.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace powerinfer {

// --- element-wise stages ---

batch_stages::batch_stages(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int64_t n_tokens,
                           int64_t ld, const uint8_t * marks, ffn_result & result)
    : layer(layer), options(options), kernels(kernels), n_tokens(n_tokens), ld(ld), marks(marks), result(result) {
    if (options.count && options.mode == ffn_mode::dense) {
        gate_histogram.resize(ffn_n_bins, 0);
        product_histogram.resize(ffn_n_bins, 0);
    }
}

uint64_t batch_stages::finish_gate(int64_t n_rows, const int32_t * ids, float * gate) {
    const float threshold = options.gate_limit();
    const bool add_bias = options.add_biases && !layer.first_bias.empty();
    uint64_t n_candidates = 0;
    for (int64_t t = 0; t < n_tokens; ++t, gate += ld) {
        if (add_bias) {
            for (int64_t i = 0; i < n_rows; ++i) {
                gate[i] += layer.first_bias[ids[i]];
            }
        }
        ffn_activate(options.activation, layer.activation_param, kernels, n_rows, gate);
        if (marks != nullptr) {
            const uint8_t * mark = marks + t * layer.n_ff;
            for (int64_t i = 0; i < n_rows; ++i) {
                n_candidates += mark[ids[i]];
                gate[i] = mark[ids[i]] ? gate[i] : 0.0f;
            }
        }
        if (threshold > 0.0f) {
            for (int64_t i = 0; i < n_rows; ++i) {
                gate[i] = std::fabs(gate[i]) < threshold ? 0.0f : gate[i];
            }
        }
        if (!gate_histogram.empty()) {
            for (int64_t i = 0; i < n_rows; ++i) {
                gate_histogram[ffn_histogram_bin(gate[i])] += 1;
                result.gate_abs_sum[ids[i]] += std::fabs(gate[i]);
            }
        }
    }
    return marks != nullptr ? n_candidates : static_cast<uint64_t>(n_tokens * n_rows);
}

void batch_stages::finish_up(int64_t n_rows, const int32_t * ids, float * gate, float * up) const {
    const bool add_bias = options.add_biases && !layer.second_bias.empty();
    const bool dense = options.mode == ffn_mode::dense;
    for (int64_t t = 0; t < n_tokens; ++t, gate += ld, up += ld) {
        if (add_bias) {
            for (int64_t i = 0; i < n_rows; ++i) {
                up[i] += layer.second_bias[ids[i]];
            }
        }
        if (options.activation == ffn_activation::drelu) {
            ffn_activate(ffn_activation::relu, 0.0f, kernels, n_rows, up);
        }
        for (int64_t i = 0; i < n_rows; ++i) {
            const float product = gate[i] * up[i];
            gate[i] = (dense || gate[i] != 0.0f) ? product : 0.0f;
        }
    }
}

uint64_t batch_stages::finish_products(int64_t n_rows, const int32_t * ids, float * products) {
    const bool dense = options.mode == ffn_mode::dense;
    const float threshold = options.product_limit();
    uint64_t n_active = 0;
    for (int64_t t = 0; t < n_tokens; ++t, products += ld) {
        if (threshold > 0.0f) {
            for (int64_t i = 0; i < n_rows; ++i) {
                products[i] = std::fabs(products[i]) * layer.down_norm[ids[i]] < threshold ? 0.0f : products[i];
            }
        }
        uint32_t n_used = 0;
        for (int64_t i = 0; i < n_rows; ++i) {
            n_used += products[i] != 0.0f;
        }
        n_active += dense ? static_cast<uint64_t>(n_rows) : n_used;
        if (options.count) {
            for (int64_t i = 0; i < n_rows; ++i) {
                result.active[ids[i]] += dense || products[i] != 0.0f;
            }
        }
        if (!product_histogram.empty()) {
            for (int64_t i = 0; i < n_rows; ++i) {
                product_histogram[ffn_histogram_bin(products[i] * layer.down_norm[ids[i]])] += 1;
            }
        }
    }
    return n_active;
}

int64_t batch_stages::keep_used(int64_t n_rows, int32_t * ids, float * v) const {
    int64_t kept = 0;
    for (int64_t i = 0; i < n_rows; ++i) {
        bool used = false;
        for (int64_t t = 0; t < n_tokens && !used; ++t) {
            used = v[t * ld + i] != 0.0f;
        }
        if (!used) {
            continue;
        }
        if (kept != i) {
            for (int64_t t = 0; t < n_tokens; ++t) {
                v[t * ld + kept] = v[t * ld + i];
            }
            ids[kept] = ids[i];
        }
        ++kept;
    }
    return kept;
}

void batch_stages::add_histograms() const {
    for (size_t i = 0; i < gate_histogram.size(); ++i) {
        result.gate_histogram[i] += gate_histogram[i];
        result.product_histogram[i] += product_histogram[i];
    }
}

void batch_mark(const ffn_layer & layer, int64_t n_tokens, int64_t first, int64_t n_rows, const float * scores, int64_t ld,
                uint8_t * marks, uint8_t * any) {
    std::memset(any + first, 0, n_rows);
    for (int64_t t = 0; t < n_tokens; ++t) {
        uint8_t * mark = marks + t * layer.n_ff + first;
        for (int64_t i = 0; i < n_rows; ++i) {
            const bool skip = scores[t * ld + i] < layer.predictor_threshold;  // NaN computes
            mark[i] = skip ? 0 : 1;
            any[first + i] |= mark[i];
        }
    }
}

int64_t batch_candidates(int64_t n_ff, const uint8_t * any, int32_t * ids) {
    int64_t n = 0;
    for (int64_t i = 0; i < n_ff; ++i) {
        ids[n] = static_cast<int32_t>(i);
        n += any[i];
    }
    return n;
}

namespace {

enum slot { slot_thread = 16, slot_hidden, slot_marks, slot_any, slot_union, slot_sums };

constexpr int64_t tile_rows = 64;      // unpacked rows per tile
constexpr int64_t step_tokens = 128;   // tokens per product with a tile: more would push the tile out of the L2 cache

struct thread_memory {
    float * weights;  // (tile_rows, max n)
    float * gate;     // (n_tokens, tile_rows)
    float * up;       // (n_tokens, tile_rows)
    int32_t * rows;   // (tile_rows)

    static size_t bytes(int64_t n, int64_t n_tokens) {
        return (tile_rows * n + 2 * n_tokens * tile_rows + 2 * tile_rows) * sizeof(float) + 256;
    }

    thread_memory(uint8_t * block, int64_t n, int64_t n_tokens) {
        weights = reinterpret_cast<float *>(block);
        gate = weights + tile_rows * n;
        up = gate + n_tokens * tile_rows;
        rows = reinterpret_cast<int32_t *>(up + n_tokens * tile_rows);
    }
};

// out (n_x, tile_rows) = x (n_x, n) times the tile's rows.
void multiply_tile(const kernel_table * kernels, int64_t n_x, int64_t n_w, int64_t n, const float * x, int64_t ld_x,
                   const float * weights, float * out, int64_t ld_out) {
    for (int64_t t = 0; t < n_x; t += step_tokens) {
        kernels->matmul_nt(std::min(step_tokens, n_x - t), n_w, n, x + t * ld_x, ld_x, weights, n, out + t * ld_out, ld_out);
    }
}

// y (n_x, n) += a (n_x, tile_rows) times the tile's rows.
void add_tile(const kernel_table * kernels, int64_t n_x, int64_t n_w, int64_t n, const float * a, const float * weights, float * y) {
    for (int64_t t = 0; t < n_x; t += step_tokens) {
        kernels->matmul_nn_add(std::min(step_tokens, n_x - t), n_w, n, a + t * tile_rows, tile_rows, weights, n, y + t * n, n);
    }
}

uint64_t unpack_tile(const row_reader & reader, const int32_t * ids, int64_t n_rows, int64_t n, float * weights) {
    uint64_t n_slow = 0;
    for (int64_t i = 0; i < n_rows; ++i) {
        n_slow += reader.unpack(ids[i], weights + i * n);
    }
    return n_slow;
}

void forward_chunk(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int n_threads,
                   int64_t n_tokens, const float * x, int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y,
                   ffn_workspace & workspace, ffn_result & result) {
    const int64_t n_embd = layer.n_embd;
    const int64_t n_ff = layer.n_ff;
    const bool predicted = options.mode == ffn_mode::predicted;
    const bool dense = options.mode == ffn_mode::dense;
    const int64_t rank = layer.fc1.n_rows;

    const int64_t widest = std::max(n_embd, rank);
    const size_t thread_bytes = (thread_memory::bytes(widest, n_tokens) + 4095) / 4096 * 4096;
    uint8_t * memory = static_cast<uint8_t *>(workspace.get(slot_thread, thread_bytes * n_threads));
    float * hidden = workspace.array<float>(slot_hidden, n_tokens * std::max<int64_t>(rank, 1));
    uint8_t * marks = predicted ? workspace.array<uint8_t>(slot_marks, n_tokens * n_ff) : nullptr;  // (n_tokens, n_ff)
    uint8_t * any = predicted ? workspace.array<uint8_t>(slot_any, n_ff) : nullptr;
    int32_t * candidates = workspace.array<int32_t>(slot_union, n_ff);
    float * sums = workspace.array<float>(slot_sums, n_threads * n_tokens * n_embd);  // (n_threads, n_tokens, n_embd)
    int64_t n_union = n_ff;

    ffn_tally tally;

#pragma omp parallel num_threads(n_threads) reduction(+ : tally)
    {
        const int i_thread = omp_get_thread_num();
        const int team = omp_get_num_threads();
        const double start = omp_get_wtime();
        thread_memory own(memory + i_thread * thread_bytes, widest, n_tokens);
        const row_reader first(layer.first, kernels);
        const row_reader second(layer.second, kernels);
        const row_reader down(layer.down, kernels);
        batch_stages stages(layer, options, kernels, n_tokens, tile_rows, marks, result);

        if (predicted) {
            const row_reader fc1(layer.fc1, kernels);
            const row_reader fc2(layer.fc2, kernels);
            for (int64_t begin = i_thread * tile_rows; begin < rank; begin += team * tile_rows) {
                const int64_t n_rows = std::min(tile_rows, rank - begin);
                for (int64_t i = 0; i < n_rows; ++i) {
                    tally.n_slow_rows += fc1.unpack(begin + i, own.weights + i * n_embd);
                }
                multiply_tile(kernels, n_tokens, n_rows, n_embd, r, ld_r, own.weights, hidden + begin, rank);
                if (layer.predictor_relu) {
                    for (int64_t t = 0; t < n_tokens; ++t) {
                        ffn_activate(ffn_activation::relu, 0.0f, kernels, n_rows, hidden + t * rank + begin);
                    }
                }
            }
#pragma omp barrier
            for (int64_t begin = i_thread * tile_rows; begin < n_ff; begin += team * tile_rows) {
                const int64_t n_rows = std::min(tile_rows, n_ff - begin);
                for (int64_t i = 0; i < n_rows; ++i) {
                    tally.n_slow_rows += fc2.unpack(begin + i, own.weights + i * rank);
                }
                multiply_tile(kernels, n_tokens, n_rows, rank, hidden, rank, own.weights, own.gate, tile_rows);
                batch_mark(layer, n_tokens, begin, n_rows, own.gate, tile_rows, marks, any);
            }
#pragma omp barrier
#pragma omp single
            n_union = batch_candidates(n_ff, any, candidates);
            if (i_thread == 0) {
                tally.predictor_s = omp_get_wtime() - start;
            }
        }

        float * sum = sums + i_thread * n_tokens * n_embd;
        std::memset(sum, 0, n_tokens * n_embd * sizeof(float));
        for (int64_t begin = i_thread * tile_rows; begin < n_union; begin += team * tile_rows) {
            int64_t n_rows = std::min(tile_rows, n_union - begin);
            for (int64_t i = 0; i < n_rows; ++i) {
                own.rows[i] = predicted ? candidates[begin + i] : static_cast<int32_t>(begin + i);
            }
            // act(gate) of every token; a neuron that a token doesn't use is exactly 0 from here on.
            tally.n_slow_rows += unpack_tile(first, own.rows, n_rows, n_embd, own.weights);
            tally.n_gate_rows += n_rows;
            multiply_tile(kernels, n_tokens, n_rows, n_embd, x, ld_x, own.weights, own.gate, tile_rows);
            tally.n_candidates += stages.finish_gate(n_rows, own.rows, own.gate);
            if (!dense) {
                n_rows = stages.keep_used(n_rows, own.rows, own.gate);
            }
            if (layer.gated && n_rows > 0) {
                tally.n_slow_rows += unpack_tile(second, own.rows, n_rows, n_embd, own.weights);
                tally.n_up_rows += n_rows;
                multiply_tile(kernels, n_tokens, n_rows, n_embd, x, ld_x, own.weights, own.up, tile_rows);
                stages.finish_up(n_rows, own.rows, own.gate, own.up);
            }
            tally.n_active += stages.finish_products(n_rows, own.rows, own.gate);
            if (!dense) {
                n_rows = stages.keep_used(n_rows, own.rows, own.gate);
            }
            if (n_rows > 0) {
                tally.n_slow_rows += unpack_tile(down, own.rows, n_rows, n_embd, own.weights);
                tally.n_down_rows += n_rows;
                add_tile(kernels, n_tokens, n_rows, n_embd, own.gate, own.weights, sum);
            }
        }
#pragma omp barrier
        // Join in thread order; y is written only here, after the last read of x.
        for (int64_t t = i_thread; t < n_tokens; t += team) {
            ffn_join_sums(layer, options, kernels, team, sums + t * n_embd, n_tokens * n_embd, 0, n_embd, y + t * ld_y);
        }
        if (options.count) {
#pragma omp critical(powerinfer_batch_histograms)
            stages.add_histograms();
        }
        if (i_thread == 0) {
            tally.up_down_s = omp_get_wtime() - start - tally.predictor_s;  // gate, up and down take turns tile by tile: told as one
        }
    }
    result.add(layer, options, n_tokens, tally);
}

}  // namespace

void ffn_forward_batch(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int n_threads,
                       int64_t n_tokens, const float * x, int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y,
                       ffn_workspace & workspace, ffn_result & result) {
    // F32 rows keep their 24 bits: they stay with the f32 products.
    const bool is_f32 = layer.first.row_type == GGML_TYPE_F32 || layer.second.row_type == GGML_TYPE_F32 ||
                        layer.down.row_type == GGML_TYPE_F32;
    const auto forward = kernels->tiles != nullptr && !is_f32 ? ffn_forward_tiles : forward_chunk;
    for (int64_t t = 0; t < n_tokens; t += batch_chunk_tokens) {
        forward(layer, options, kernels, std::max(n_threads, 1), std::min(batch_chunk_tokens, n_tokens - t),
                x + t * ld_x, ld_x, r + t * ld_r, ld_r, y + t * ld_y, ld_y, workspace, result);
    }
}

// --- whole matrices, op by op ---

void ffn_matmul_rows(const row_matrix & matrix, const int32_t * order, const kernel_table * kernels, int n_threads,
                     int64_t n_tokens, const float * x, int64_t ld_x, float * out, int64_t ld_out,
                     ffn_workspace & workspace, ffn_result & result) {
    const int64_t n = matrix.n;
    n_threads = std::max(n_threads, 1);
    const size_t thread_bytes = (thread_memory::bytes(n, n_tokens) + 4095) / 4096 * 4096;
    uint8_t * memory = static_cast<uint8_t *>(workspace.get(slot_thread, thread_bytes * n_threads));
    uint64_t n_slow = 0;
#pragma omp parallel num_threads(n_threads) reduction(+ : n_slow)
    {
        const int i_thread = omp_get_thread_num();
        const int team = omp_get_num_threads();
        const row_reader reader(matrix, kernels);
        thread_memory own(memory + i_thread * thread_bytes, n, n_tokens);
        for (int64_t begin = i_thread * tile_rows; begin < matrix.n_rows; begin += team * tile_rows) {
            const int64_t n_rows = std::min(tile_rows, matrix.n_rows - begin);
            for (int64_t i = 0; i < n_rows; ++i) {
                n_slow += reader.unpack(begin + i, own.weights + i * n);
            }
            multiply_tile(kernels, n_tokens, n_rows, n, x, ld_x, own.weights, own.gate, tile_rows);
            for (int64_t t = 0; t < n_tokens; ++t) {
                for (int64_t i = 0; i < n_rows; ++i) {
                    out[t * ld_out + (order ? order[begin + i] : begin + i)] = own.gate[t * tile_rows + i];
                }
            }
        }
    }
    result.n_slow_rows += n_slow;
    result.read_bytes += matrix.row_bytes * matrix.n_rows;
}

void ffn_matmul_columns(const row_matrix & matrix, const int32_t * order, const kernel_table * kernels, int n_threads,
                        int64_t n_tokens, const float * a, int64_t ld_a, float * y, int64_t ld_y,
                        ffn_workspace & workspace, ffn_result & result) {
    const int64_t n = matrix.n;
    n_threads = std::max(n_threads, 1);
    const size_t thread_bytes = (thread_memory::bytes(n, n_tokens) + 4095) / 4096 * 4096;
    uint8_t * memory = static_cast<uint8_t *>(workspace.get(slot_thread, thread_bytes * n_threads));
    float * sums = workspace.array<float>(slot_sums, n_threads * n_tokens * n);
    uint64_t n_slow = 0;
#pragma omp parallel num_threads(n_threads) reduction(+ : n_slow)
    {
        const int i_thread = omp_get_thread_num();
        const int team = omp_get_num_threads();
        const row_reader reader(matrix, kernels);
        thread_memory own(memory + i_thread * thread_bytes, n, n_tokens);
        float * sum = sums + i_thread * n_tokens * n;
        std::memset(sum, 0, n_tokens * n * sizeof(float));
        for (int64_t begin = i_thread * tile_rows; begin < matrix.n_rows; begin += team * tile_rows) {
            const int64_t n_rows = std::min(tile_rows, matrix.n_rows - begin);
            for (int64_t i = 0; i < n_rows; ++i) {
                n_slow += reader.unpack(begin + i, own.weights + i * n);
            }
            for (int64_t t = 0; t < n_tokens; ++t) {
                for (int64_t i = 0; i < n_rows; ++i) {
                    own.gate[t * tile_rows + i] = a[t * ld_a + (order ? order[begin + i] : begin + i)];
                }
            }
            add_tile(kernels, n_tokens, n_rows, n, own.gate, own.weights, sum);
        }
#pragma omp barrier
        for (int64_t t = i_thread; t < n_tokens; t += team) {
            std::memset(y + t * ld_y, 0, n * sizeof(float));
            for (int i = 0; i < team; ++i) {
                kernels->add(n, sums + (i * n_tokens + t) * n, y + t * ld_y);
            }
        }
    }
    result.n_slow_rows += n_slow;
    result.read_bytes += matrix.row_bytes * matrix.n_rows;
}

}  // namespace powerinfer
