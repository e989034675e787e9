// A few tokens at once, as a server decodes them: rows are read for the union of the tokens' sets, each token uses its own.
// Neurons go to threads by position, so a token's sums never depend on the other tokens.
#include "ffn.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace powerinfer {

namespace {

enum slot { slot_thread = 48, slot_hidden, slot_marks, slot_sums };

// Neurons per step: their rows stay in the L2 cache while all tokens use them. One bit each in a mask.
constexpr int64_t step_rows = 32;

int n_bits(uint32_t mask) { return __builtin_popcount(mask); }

// The packed x of all tokens for one matrix.
class packed_tokens {
public:
    packed_tokens(const row_reader & reader, uint8_t * memory) : reader_(reader), memory_(memory), token_bytes_(bytes_per_token(reader)) {}

    static size_t bytes_per_token(const row_reader & reader) { return (reader.scratch_bytes() + 63) / 64 * 64; }

    void pack(int64_t n_tokens, const float * x, int64_t ld) const {
        for (int64_t t = 0; t < n_tokens; ++t) {
            reader_.pack(x + t * ld, at(t));
        }
    }
    uint8_t * at(int64_t t) const { return memory_ + t * token_bytes_; }

private:
    const row_reader & reader_;
    uint8_t * memory_;
    size_t token_bytes_;
};

// The neurons of one step that one token uses, and their values.
struct token_list {
    int64_t n = 0;
    int32_t ids[step_rows];
    float values[step_rows];

    template <class Keep>
    void keep(const Keep & wanted) {
        int64_t kept = 0;
        for (int64_t i = 0; i < n; ++i) {
            const bool k = wanted(ids[i], values[i]);
            ids[kept] = ids[i];
            values[kept] = values[i];
            kept += k ? 1 : 0;
        }
        n = kept;
    }
    uint32_t mask(int64_t begin) const {
        uint32_t bits = 0;
        for (int64_t i = 0; i < n; ++i) {
            bits |= 1u << (ids[i] - begin);
        }
        return bits;
    }
    void add_bias(const std::vector<float> & bias, bool wanted, float * v) const {
        for (int64_t i = 0; wanted && !bias.empty() && i < n; ++i) {
            v[i] += bias[ids[i]];
        }
    }
};

}  // namespace

void ffn_forward_few(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int n_threads,
                     int64_t n_tokens, const float * x, int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y,
                     ffn_workspace & workspace, ffn_result & result) {
    const int64_t n_embd = layer.n_embd;
    const int64_t n_ff = layer.n_ff;
    const int64_t rank = layer.fc1.n_rows;
    const int64_t n_steps = (n_ff + step_rows - 1) / step_rows;
    const bool predicted = options.mode == ffn_mode::predicted;
    const bool dense = options.mode == ffn_mode::dense;
    const float gate_limit = options.gate_limit();
    const float product_limit = options.product_limit();

    const row_reader first(layer.first, kernels);
    const row_reader second(layer.second, kernels);
    const row_reader down(layer.down, kernels);
    const row_reader fc1(layer.fc1, kernels);
    const row_reader fc2(layer.fc2, kernels);
    // x for the first matrix (and before it for the predictor's), x for the second one, scratch of the down rows.
    size_t first_bytes = packed_tokens::bytes_per_token(first);
    if (predicted) {
        first_bytes = std::max({first_bytes, packed_tokens::bytes_per_token(fc1), packed_tokens::bytes_per_token(fc2)});
    }
    const size_t second_bytes = layer.gated ? packed_tokens::bytes_per_token(second) : 0;
    const size_t thread_bytes = (first_bytes + second_bytes) * n_tokens + packed_tokens::bytes_per_token(down);
    uint8_t * memory = static_cast<uint8_t *>(workspace.get(slot_thread, thread_bytes * n_threads));
    float * hidden = workspace.array<float>(slot_hidden, n_tokens * std::max<int64_t>(rank, 1));
    uint32_t * marks = predicted ? workspace.array<uint32_t>(slot_marks, n_tokens * n_steps) : nullptr;  // (n_tokens, n_steps) bits
    float * sums = workspace.array<float>(slot_sums, n_threads * n_tokens * n_embd);                     // (n_threads, n_tokens, n_embd)

    ffn_tally tally;

#pragma omp parallel num_threads(n_threads) reduction(+ : tally)
    {
        const int i_thread = omp_get_thread_num();
        const int team = omp_get_num_threads();
        const double start = omp_get_wtime();
        uint8_t * own = memory + i_thread * thread_bytes;
        uint8_t * down_scratch = own + (first_bytes + second_bytes) * n_tokens;
        int32_t remapped[step_rows];
        float values[step_rows];

        if (predicted) {
            const packed_tokens x_fc1(fc1, own);
            x_fc1.pack(n_tokens, r, ld_r);
            for (int64_t begin = i_thread * step_rows; begin < rank; begin += team * step_rows) {
                const int64_t n_rows = std::min(step_rows, rank - begin);
                for (int64_t t = 0; t < n_tokens; ++t) {
                    float * out = hidden + t * rank + begin;
                    tally.n_slow_rows += fc1.dot(nullptr, begin, n_rows, x_fc1.at(t), out, remapped);
                    if (layer.predictor_relu) {
                        ffn_activate(ffn_activation::relu, 0.0f, kernels, n_rows, out);
                    }
                }
            }
#pragma omp barrier
            const packed_tokens x_fc2(fc2, own);
            x_fc2.pack(n_tokens, hidden, rank);
            for (int64_t s = i_thread; s < n_steps; s += team) {
                const int64_t begin = s * step_rows;
                const int64_t n_rows = std::min(step_rows, n_ff - begin);
                for (int64_t t = 0; t < n_tokens; ++t) {
                    tally.n_slow_rows += fc2.dot(nullptr, begin, n_rows, x_fc2.at(t), values, remapped);
                    uint32_t bits = 0;
                    for (int64_t i = 0; i < n_rows; ++i) {
                        bits |= values[i] < layer.predictor_threshold ? 0u : 1u << i;  // NaN computes
                    }
                    marks[t * n_steps + s] = bits;
                }
            }
            if (i_thread == 0) {
                tally.predictor_s = omp_get_wtime() - start;
            }
            // No barrier: the steps below are those whose marks this thread made.
        }

        const packed_tokens x_first(first, own);
        const packed_tokens x_second(second, own + first_bytes * n_tokens);
        x_first.pack(n_tokens, x, ld_x);
        if (layer.gated) {
            x_second.pack(n_tokens, x, ld_x);
        }
        float * sum = sums + i_thread * n_tokens * n_embd;
        std::memset(sum, 0, n_tokens * n_embd * sizeof(float));
        for (int64_t s = i_thread; s < n_steps; s += team) {
            const int64_t begin = s * step_rows;
            const int64_t n_rows = std::min(step_rows, n_ff - begin);
            token_list lists[ffn_few_tokens];
            uint32_t gate_mask = 0;
            uint32_t up_mask = 0;
            uint32_t down_mask = 0;
            for (int64_t t = 0; t < n_tokens; ++t) {
                token_list & list = lists[t];
                for (int64_t i = 0; i < n_rows; ++i) {
                    list.ids[list.n] = static_cast<int32_t>(begin + i);
                    list.n += predicted ? marks[t * n_steps + s] >> i & 1 : 1;
                }
                gate_mask |= list.mask(begin);
                tally.n_candidates += list.n;
                tally.n_slow_rows += first.dot(list.ids, 0, list.n, x_first.at(t), list.values, remapped);
                list.add_bias(layer.first_bias, options.add_biases, list.values);
                ffn_activate(options.activation, layer.activation_param, kernels, list.n, list.values);
                if (!dense) {
                    list.keep([&](int32_t, float a) { return a != 0.0f && !(std::fabs(a) < gate_limit); });
                }
            }
            for (int64_t t = 0; t < n_tokens && layer.gated; ++t) {
                token_list & list = lists[t];
                up_mask |= list.mask(begin);
                tally.n_slow_rows += second.dot(list.ids, 0, list.n, x_second.at(t), values, remapped);
                list.add_bias(layer.second_bias, options.add_biases, values);
                if (options.activation == ffn_activation::drelu) {
                    ffn_activate(ffn_activation::relu, 0.0f, kernels, list.n, values);
                }
                for (int64_t i = 0; i < list.n; ++i) {
                    list.values[i] *= values[i];
                }
            }
            for (int64_t t = 0; t < n_tokens; ++t) {
                token_list & list = lists[t];
                if (!dense) {
                    list.keep([&](int32_t id, float h) {
                        return h != 0.0f && !(std::fabs(h) * layer.down_norm[id] < product_limit);
                    });
                }
                down_mask |= list.mask(begin);
                tally.n_active += list.n;
                tally.n_slow_rows += down.add(list.ids, 0, list.n, list.values, down_scratch, sum + t * n_embd, remapped);
            }
            tally.n_gate_rows += n_bits(gate_mask);
            tally.n_up_rows += n_bits(up_mask);
            tally.n_down_rows += n_bits(down_mask);
        }
#pragma omp barrier
        // Join in thread order; y is written only here, after the last read of x.
        const int64_t from = n_embd * i_thread / team;
        const int64_t width = n_embd * (i_thread + 1) / team - from;
        for (int64_t t = 0; t < n_tokens; ++t) {
            float * out = y + t * ld_y + from;
            ffn_join_sums(layer, options, kernels, team, sums + t * n_embd + from, n_tokens * n_embd, from, width, out);
        }
        if (i_thread == 0) {
            tally.up_down_s = omp_get_wtime() - start - tally.predictor_s;  // gate, up and down take turns step by step: told as one
        }
    }
    result.add(layer, options, n_tokens, tally);
}

}  // namespace powerinfer
