// The decode path: one token at a time, one parallel region per block, work lists split evenly between threads.
// Partial sums are joined in thread order: same thread count, same bits.
#include "ffn.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace powerinfer {

namespace {

// Workspace slots of this file; ffn-batch.cpp uses those from 16 on.
enum slot { slot_thread, slot_scores, slot_ids, slot_values, slot_sums, slot_counts, slot_input, slot_hidden, slot_products };

int64_t share_begin(int64_t total, int i_thread, int n_threads) { return total * i_thread / n_threads; }

// Everything that threads share while one token is computed.
struct token_job {
    const ffn_layer & layer;
    const ffn_options & options;
    const kernel_table * kernels;
    const float * x = nullptr;     // (n_embd)
    const float * r = nullptr;     // (n_embd) the predictor's input
    float * y = nullptr;           // (n_embd)
    float * hidden = nullptr;      // (rank)
    float * scores = nullptr;      // (n_ff), also the gate values
    int32_t * ids = nullptr;       // (n_ff) work list, each thread fills the segment of its range
    float * values = nullptr;      // (n_ff) act(gate) of the work list
    int64_t * counts = nullptr;    // (n_threads) entries in each thread's segment
    int64_t * costs = nullptr;     // (n_threads) what their rows cost, see row_cost
    float * sums = nullptr;        // (n_threads, n_embd) partial results
    int64_t * n_active = nullptr;  // (n_threads) down rows that each thread used; its own_ids begin with them
    int64_t * n_up = nullptr;      // (n_threads) up rows that each thread read
    float * products = nullptr;    // (n_ff) act(gate) * up by position; nullptr when not counting
    uint8_t * thread_memory = nullptr;  // (n_threads, thread_bytes); each part begins with its thread's list of used neurons
    size_t thread_bytes = 0;

    token_job(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels)
        : layer(layer), options(options), kernels(kernels) {}

    const int32_t * used_ids(int i_thread) const {
        return reinterpret_cast<const int32_t *>(thread_memory + i_thread * thread_bytes);
    }
};

// What reading the row of ids[i] costs: 64, and more where the row before it is far away, up to 96 from 32 KiB on, which is
// what one cache line of a page table covers. On a virtual machine rows of rare neurons took 2 to 4 times as
// long as neighbours (1000 and 230 ns): an even split by number left one of two threads waiting a third of the time.
int64_t row_cost(const int32_t * ids, int64_t i, size_t stride_bytes) {
    const int64_t gap_bytes = i > 0 ? (ids[i] - ids[i - 1]) * static_cast<int64_t>(stride_bytes) : 0;
    return 64 + std::min<int64_t>(32, gap_bytes >> 10);
}

// Counts this thread's segment of the work list and what its rows cost.
void close_segment(token_job & job, int i_thread, const int32_t * ids, int64_t n, size_t stride_bytes) {
    int64_t cost = 0;
    for (int64_t i = 0; i < n; ++i) {
        cost += row_cost(ids, i, stride_bytes);
    }
    job.counts[i_thread] = n;
    job.costs[i_thread] = cost;
}

// Where the i_split'th of n_threads shares of the list begins: the shares cost the same.
int64_t split_position(const token_job & job, int64_t n_ff, int i_split, int n_threads, size_t stride_bytes) {
    int64_t total = 0;
    for (int i = 0; i < n_threads; ++i) {
        total += job.costs[i];
    }
    int64_t left = share_begin(total, i_split, n_threads);
    int64_t at = 0;
    for (int i = 0; i < n_threads; ++i) {
        if (left >= job.costs[i]) {
            left -= job.costs[i];
            at += job.counts[i];
            continue;
        }
        const int32_t * ids = job.ids + share_begin(n_ff, i, n_threads);
        for (int64_t k = 0; left > 0; ++k, ++at) {
            left -= row_cost(ids, k, stride_bytes);
        }
        return at;
    }
    return at;
}

// The part [begin, end) of the list that all threads' segments form together, copied to `ids` and `values`.
int64_t take_share(const token_job & job, int64_t n_ff, int i_thread, int n_threads, size_t stride_bytes, int32_t * ids, float * values) {
    const int64_t begin = split_position(job, n_ff, i_thread, n_threads, stride_bytes);
    const int64_t end = split_position(job, n_ff, i_thread + 1, n_threads, stride_bytes);
    int64_t at = 0;
    int64_t n = 0;
    for (int i = 0; i < n_threads && at < end; ++i) {
        const int64_t segment = share_begin(n_ff, i, n_threads);
        const int64_t from = std::max(begin, at);
        const int64_t to = std::min(end, at + job.counts[i]);
        if (from < to) {
            std::memcpy(ids + n, job.ids + segment + (from - at), (to - from) * sizeof(int32_t));
            if (values != nullptr) {
                std::memcpy(values + n, job.values + segment + (from - at), (to - from) * sizeof(float));
            }
            n += to - from;
        }
        at += job.counts[i];
    }
    return n;
}

// Keeps the neurons whose activation is not skipped. ids == nullptr: positions first, first + 1, ...
int64_t keep_active(const ffn_options & options, const int32_t * ids, int64_t first, int64_t n, const float * activated,
                    int32_t * kept_ids, float * kept_values) {
    const float limit = options.gate_limit();
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
        const float a = activated[i];
        const bool skip = a == 0.0f || std::fabs(a) < limit;
        kept_ids[kept] = ids ? ids[i] : static_cast<int32_t>(first + i);
        kept_values[kept] = a;
        kept += skip ? 0 : 1;
    }
    return kept;
}

void add_bias(const std::vector<float> & bias, bool wanted, const int32_t * ids, int64_t first, int64_t n, float * v) {
    if (!wanted || bias.empty()) {
        return;
    }
    for (int64_t i = 0; i < n; ++i) {
        v[i] += bias[ids ? ids[i] : first + i];
    }
}

class token_thread {
public:
    token_thread(token_job & job, int i_thread, int n_threads)
        : job_(job), i_(i_thread), n_(n_threads), first_(job.layer.first, job.kernels), second_(job.layer.second, job.kernels),
          down_(job.layer.down, job.kernels) {
        const int64_t n_ff = job.layer.n_ff;
        uint8_t * at = job.thread_memory + i_thread * job.thread_bytes;
        auto take = [&](size_t bytes) {
            uint8_t * block = at;
            at += (bytes + 63) / 64 * 64;
            return block;
        };
        own_ids_ = reinterpret_cast<int32_t *>(take(n_ff * sizeof(int32_t)));
        own_values_ = reinterpret_cast<float *>(take(n_ff * sizeof(float)));
        up_values_ = reinterpret_cast<float *>(take(n_ff * sizeof(float)));
        remapped_ = reinterpret_cast<int32_t *>(take(n_ff * sizeof(int32_t)));
        scratch_ = take(scratch_bytes(job.layer, job.kernels));
        down_scratch_ = take(row_reader(job.layer.down, job.kernels).scratch_bytes());
    }

    static size_t scratch_bytes(const ffn_layer & layer, const kernel_table * kernels) {
        size_t bytes = row_reader(layer.first, kernels).scratch_bytes();
        for (const row_matrix * m : {&layer.second, &layer.down, &layer.fc1, &layer.fc2}) {
            if (m->n > 0) {
                bytes = std::max(bytes, row_reader(*m, kernels).scratch_bytes());
            }
        }
        return bytes;
    }

    static size_t memory_bytes(const ffn_layer & layer, const kernel_table * kernels) {
        const size_t line = 64;
        return 4 * (layer.n_ff * sizeof(float) + line) + scratch_bytes(layer, kernels) +
               row_reader(layer.down, kernels).scratch_bytes() + 2 * line;
    }

    // Runs inside the parallel region; contains its barriers.
    void run(ffn_tally & tally) {
        const double start = omp_get_wtime();
        if (job_.options.mode == ffn_mode::predicted) {
            predict(tally);
        }
        const double predicted = omp_get_wtime();
        gate(tally);
        const double gated = omp_get_wtime();
        up_and_down(tally);
        tally.predictor_s = predicted - start;
        tally.gate_s = gated - predicted;
        tally.up_down_s = omp_get_wtime() - gated;
    }

private:
    int64_t begin(int64_t total) const { return share_begin(total, i_, n_); }
    int64_t end(int64_t total) const { return share_begin(total, i_ + 1, n_); }

    // Fills this thread's segment of the work list with the neurons that the predictor doesn't rule out.
    void predict(ffn_tally & tally) {
        const ffn_layer & layer = job_.layer;
        const int64_t rank = layer.fc1.n_rows;
        row_reader fc1(layer.fc1, job_.kernels);
        row_reader fc2(layer.fc2, job_.kernels);
        fc1.pack(job_.r, scratch_);
        tally.n_slow_rows += fc1.dot(nullptr, begin(rank), end(rank) - begin(rank), scratch_, job_.hidden + begin(rank), remapped_);
        if (layer.predictor_relu) {
            ffn_activate(ffn_activation::relu, 0.0f, job_.kernels, end(rank) - begin(rank), job_.hidden + begin(rank));
        }
#pragma omp barrier
        const int64_t from = begin(layer.n_ff);
        const int64_t to = end(layer.n_ff);
        fc2.pack(job_.hidden, scratch_);
        tally.n_slow_rows += fc2.dot(nullptr, from, to - from, scratch_, job_.scores + from, remapped_);
        const float threshold = layer.predictor_threshold;
        int32_t * ids = job_.ids + from;
        int64_t n = 0;
        for (int64_t i = from; i < to; ++i) {
            ids[n] = static_cast<int32_t>(i);
            n += job_.scores[i] < threshold ? 0 : 1;  // NaN computes
        }
        close_segment(job_, i_, ids, n, layer.first.stride_bytes);
#pragma omp barrier
    }

    // Computes act(gate) for this thread's neurons and leaves the active ones, with their values, in own_ids_ / own_values_.
    void gate(ffn_tally & tally) {
        const ffn_layer & layer = job_.layer;
        const ffn_options & options = job_.options;
        first_.pack(job_.x, scratch_);
        if (options.mode == ffn_mode::predicted) {
            const int64_t n = take_share(job_, layer.n_ff, i_, n_, layer.first.stride_bytes, own_ids_, nullptr);
            tally.n_slow_rows += first_.dot(own_ids_, 0, n, scratch_, up_values_, remapped_);
            add_bias(layer.first_bias, options.add_biases, own_ids_, 0, n, up_values_);
            ffn_activate(options.activation, layer.activation_param, job_.kernels, n, up_values_);
            n_own_ = keep_active(options, own_ids_, 0, n, up_values_, own_ids_, own_values_);
            return;
        }
        const int64_t from = begin(layer.n_ff);
        const int64_t n = end(layer.n_ff) - from;
        float * values = job_.scores + from;
        tally.n_slow_rows += first_.dot(nullptr, from, n, scratch_, values, remapped_);
        add_bias(layer.first_bias, options.add_biases, nullptr, from, n, values);
        ffn_activate(options.activation, layer.activation_param, job_.kernels, n, values);
        if (options.mode == ffn_mode::dense) {
            for (int64_t i = 0; i < n; ++i) {
                own_ids_[i] = static_cast<int32_t>(from + i);
            }
            std::memcpy(own_values_, values, n * sizeof(float));
            n_own_ = n;
            return;
        }
        const int64_t n_kept = keep_active(options, nullptr, from, n, values, job_.ids + from, job_.values + from);
        close_segment(job_, i_, job_.ids + from, n_kept, layer.down.stride_bytes);
#pragma omp barrier
        n_own_ = take_share(job_, layer.n_ff, i_, n_, layer.down.stride_bytes, own_ids_, own_values_);
    }

    void up_and_down(ffn_tally & tally) {
        const ffn_layer & layer = job_.layer;
        const ffn_options & options = job_.options;
        const float limit = options.product_limit();
        job_.n_up[i_] = layer.gated ? n_own_ : 0;
        if (layer.gated) {
            second_.pack(job_.x, scratch_);
        }
        float * sum = job_.sums + i_ * layer.n_embd;
        std::memset(sum, 0, layer.n_embd * sizeof(float));
        // Step by step, so that a neuron's up and down rows, side by side in memory, are read together.
        const int64_t step = ffn_step_neurons(layer.down.row_bytes);
        int64_t n_active = 0;
        for (int64_t i = 0; i < n_own_; i += step) {
            const int64_t n = std::min(step, n_own_ - i);
            const int64_t n_ahead = std::min(2 * step, n_own_ - i);
            const int32_t * ids = own_ids_ + i;
            float * values = own_values_ + i;
            if (layer.gated) {
                tally.n_slow_rows += second_.dot(ids, 0, n, scratch_, up_values_, remapped_, n_ahead);
                add_bias(layer.second_bias, options.add_biases, ids, 0, n, up_values_);
                if (options.activation == ffn_activation::drelu) {
                    ffn_activate(ffn_activation::relu, 0.0f, job_.kernels, n, up_values_);
                }
                for (int64_t k = 0; k < n; ++k) {
                    values[k] *= up_values_[k];
                }
            }
            if (job_.products != nullptr) {
                for (int64_t k = 0; k < n; ++k) {
                    job_.products[ids[k]] = values[k];
                }
            }
            // The neurons whose down row is used, and behind them those of the next step.
            int32_t used_ids[16];
            float used_values[8];
            int64_t n_used = 0;
            for (int64_t k = 0; k < n; ++k) {
                const float h = values[k];
                const bool skip = options.mode != ffn_mode::dense && (h == 0.0f || std::fabs(h) * layer.down_norm[ids[k]] < limit);
                used_ids[n_used] = ids[k];
                used_values[n_used] = h;
                n_used += skip ? 0 : 1;
            }
            std::copy_n(ids + n, n_ahead - n, used_ids + n_used);
            tally.n_slow_rows += down_.add(used_ids, 0, n_used, used_values, down_scratch_, sum, remapped_, n_used + n_ahead - n);
            std::copy_n(used_ids, n_used, own_ids_ + n_active);
            n_active += n_used;
        }
        job_.n_active[i_] = n_active;
#pragma omp barrier
        // Join, in thread order.
        const int64_t from = begin(layer.n_embd);
        const int64_t width = end(layer.n_embd) - from;
        ffn_join_sums(layer, options, job_.kernels, n_, job_.sums + from, layer.n_embd, from, width, job_.y + from);
    }

    token_job & job_;
    const int i_;
    const int n_;
    row_reader first_;
    row_reader second_;
    row_reader down_;
    int32_t * own_ids_;
    float * own_values_;
    float * up_values_;
    int32_t * remapped_;
    void * scratch_;
    void * down_scratch_;
    int64_t n_own_ = 0;
};

void count_values(const ffn_layer & layer, const float * activated, const float * products, ffn_result & result) {
    for (int64_t i = 0; i < layer.n_ff; ++i) {
        result.gate_abs_sum[i] += std::fabs(activated[i]);
        result.gate_histogram[ffn_histogram_bin(activated[i])] += 1;
        result.product_histogram[ffn_histogram_bin(products[i] * layer.down_norm[i])] += 1;
    }
}

// Jaccard overlap of this token's used neurons with the last token's.
void count_overlap(const token_job & job, int n_threads, int64_t n_active, active_set & last, ffn_result & result) {
    last.flags.resize(job.layer.n_ff, 0);
    int64_t n_common = 0;
    for (int i = 0; i < n_threads; ++i) {
        const int32_t * ids = job.used_ids(i);
        for (int64_t k = 0; k < job.n_active[i]; ++k) {
            n_common += last.flags[ids[k]];
        }
    }
    const int64_t n_either = n_active + static_cast<int64_t>(last.ids.size()) - n_common;
    if (last.is_set && n_either > 0) {
        result.overlap_sum += static_cast<double>(n_common) / static_cast<double>(n_either);
        result.n_overlaps += 1;
    }
    for (const int32_t id : last.ids) {
        last.flags[id] = 0;
    }
    last.ids.clear();
    for (int i = 0; i < n_threads; ++i) {
        const int32_t * ids = job.used_ids(i);
        last.ids.insert(last.ids.end(), ids, ids + job.n_active[i]);
    }
    for (const int32_t id : last.ids) {
        last.flags[id] = 1;
    }
    last.is_set = true;
}

}  // namespace

void ffn_result::add(const ffn_layer & layer, const ffn_options & options, int64_t n_added_tokens, const ffn_tally & tally) {
    auto to_us = [](double seconds) { return static_cast<uint64_t>(seconds * 1e6 + 0.5); };
    n_tokens += n_added_tokens;
    n_candidates += tally.n_candidates;
    n_active += tally.n_active;
    n_slow_rows += tally.n_slow_rows;
    dense_bytes += layer.matrix_bytes();
    read_bytes += tally.n_gate_rows * layer.first.row_bytes + tally.n_up_rows * layer.second.row_bytes +
                  tally.n_down_rows * layer.down.row_bytes;
    if (options.mode == ffn_mode::predicted) {
        read_bytes += layer.predictor_bytes();
    }
    predictor_us += to_us(tally.predictor_s);
    gate_us += to_us(tally.gate_s);
    up_down_us += to_us(tally.up_down_s);
}

void ffn_join_sums(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int n_sums, const float * sums,
                   int64_t stride, int64_t from, int64_t width, float * out) {
    if (options.add_biases && !layer.down_bias.empty()) {
        std::memcpy(out, layer.down_bias.data() + from, width * sizeof(float));
    } else {
        std::memset(out, 0, width * sizeof(float));
    }
    for (int i = 0; i < n_sums; ++i) {
        kernels->add(width, sums + i * stride, out);
    }
}

void ffn_forward(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int n_threads,
                 int64_t n_tokens, const float * x, int64_t ld_x, float * y, int64_t ld_y,
                 ffn_workspace & workspace, ffn_result & result, const float * r, int64_t ld_r) {
    if (n_tokens == 0) {
        return;
    }
    const int64_t n_embd = layer.n_embd;
    const int64_t n_ff = layer.n_ff;
    // ggml may place y over x, whose last reader is this block.
    const float * x_end = x + (n_tokens - 1) * ld_x + n_embd;
    const float * y_end = y + (n_tokens - 1) * ld_y + n_embd;
    if (n_tokens > 1 && x < y_end && y < x_end) {
        float * copy = workspace.array<float>(slot_input, n_tokens * n_embd);
        for (int64_t t = 0; t < n_tokens; ++t) {
            std::memcpy(copy + t * n_embd, x + t * ld_x, n_embd * sizeof(float));
        }
        x = copy;
        ld_x = n_embd;
    }
    if (r == nullptr) {
        r = x;
        ld_r = ld_x;
    }
    if (options.count) {
        result.active.resize(n_ff, 0);
        result.gate_abs_sum.resize(n_ff, 0.0);
        result.gate_histogram.resize(ffn_n_bins, 0);
        result.product_histogram.resize(ffn_n_bins, 0);
    }
    // The blocked path unpacks a row once for all tokens, which costs as much as about ten dots with it.
    if (n_tokens > (options.mode == ffn_mode::dense ? ffn_few_tokens_dense : ffn_few_tokens)) {
        ffn_forward_batch(layer, options, kernels, n_threads, n_tokens, x, ld_x, r, ld_r, y, ld_y, workspace, result);
        return;
    }
    if (n_tokens > 1 && !options.count) {
        ffn_forward_few(layer, options, kernels, std::max(n_threads, 1), n_tokens, x, ld_x, r, ld_r, y, ld_y, workspace, result);
        return;
    }

    n_threads = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(n_threads, n_ff)));
    const size_t thread_bytes = token_thread::memory_bytes(layer, kernels);
    token_job job(layer, options, kernels);
    job.thread_bytes = thread_bytes;
    job.thread_memory = static_cast<uint8_t *>(workspace.get(slot_thread, thread_bytes * n_threads));
    job.hidden = workspace.array<float>(slot_hidden, layer.fc1.n_rows + 16);
    job.scores = workspace.array<float>(slot_scores, n_ff);
    job.values = workspace.array<float>(slot_values, n_ff);
    job.ids = workspace.array<int32_t>(slot_ids, n_ff);
    job.sums = workspace.array<float>(slot_sums, n_threads * n_embd);
    job.counts = workspace.array<int64_t>(slot_counts, 4 * n_threads);
    job.n_active = job.counts + n_threads;
    job.n_up = job.n_active + n_threads;
    job.costs = job.n_up + n_threads;
    job.products = options.count ? workspace.array<float>(slot_products, n_ff) : nullptr;

    for (int64_t t = 0; t < n_tokens; ++t) {
        job.x = x + t * ld_x;
        job.r = r + t * ld_r;
        job.y = y + t * ld_y;
        ffn_tally tally;
        uint64_t n_slow = 0;
        int team = n_threads;
#pragma omp parallel num_threads(n_threads) reduction(+ : n_slow)
        {
            const int i = omp_get_thread_num();
            ffn_tally own;
            token_thread(job, i, omp_get_num_threads()).run(own);
            n_slow += own.n_slow_rows;
            if (i == 0) {
                tally = own;
                team = omp_get_num_threads();
            }
        }

        tally.n_slow_rows = n_slow;
        for (int i = 0; i < team; ++i) {
            tally.n_active += job.n_active[i];
            tally.n_up_rows += job.n_up[i];
            tally.n_candidates += options.mode == ffn_mode::predicted ? job.counts[i] : 0;
        }
        if (options.mode != ffn_mode::predicted) {
            tally.n_candidates = n_ff;
        }
        tally.n_gate_rows = tally.n_candidates;
        tally.n_down_rows = tally.n_active;
        result.add(layer, options, 1, tally);

        if (options.count) {
            for (int i = 0; i < team; ++i) {
                for (int64_t k = 0; k < job.n_active[i]; ++k) {
                    result.active[job.used_ids(i)[k]] += 1;
                }
            }
            if (options.mode == ffn_mode::dense) {
                count_values(layer, job.scores, job.products, result);
            }
        }
        if (n_tokens == 1 && options.mode != ffn_mode::dense) {
            count_overlap(job, team, static_cast<int64_t>(tally.n_active), workspace.last_active(&layer), result);
        }
    }
}

}  // namespace powerinfer
