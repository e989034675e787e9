// Starts the device, runs the CPU, joins: the only file that knows both.
#include "ffn-hybrid.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace powerinfer {

namespace {

enum slot { slot_input = 72 };  // of the workspace, behind those of the CPU's paths

// y = the down bias where it is added here, else 0.
void begin_output(const ffn_layer & layer, const ffn_options & options, int64_t n_tokens, float * y, int64_t ld_y) {
    for (int64_t t = 0; t < n_tokens; ++t) {
        ffn_join_sums(layer, options, nullptr, 0, nullptr, 0, 0, layer.n_embd, y + t * ld_y);
    }
}

// At most max_tokens tokens.
status forward_part(const hybrid_layer & layer, gpu_executor & gpu, const ffn_options & options, const kernel_table * kernels,
                    int n_threads, int64_t n_tokens, const float * x, int64_t ld_x, float * y, int64_t ld_y,
                    ffn_workspace & workspace, ffn_result & result, gpu_result & done, hybrid_times & times, const float * r, int64_t ld_r) {
    const ffn_layer & cold = layer.cold;
    if (layer.stream_tokens > 0 && n_tokens >= layer.stream_tokens) {
        const double begin = omp_get_wtime();
        const status streamed = gpu.stream(layer.i_layer, cold, options, n_tokens, x, ld_x, r, ld_r, y, ld_y, done);
        if (!streamed.ok()) {
            return streamed;
        }
        if (options.add_biases && !cold.down_bias.empty()) {
            for (int64_t t = 0; t < n_tokens; ++t) {
                kernels->add(cold.n_embd, cold.down_bias.data(), y + t * ld_y);
            }
        }
        result.n_tokens += n_tokens;
        result.dense_bytes += cold.matrix_bytes();
        times.wait_s += omp_get_wtime() - begin;
        return {};
    }
    if (layer.n_hot > 0) {
        const status started = gpu.start(layer.i_layer, options, n_tokens, x, ld_x, r, ld_r);
        if (!started.ok()) {
            return started;
        }
    }
    const double cpu_begin = omp_get_wtime();
    if (cold.n_ff > 0) {
        ffn_forward(cold, options, kernels, n_threads, n_tokens, x, ld_x, y, ld_y, workspace, result, r, ld_r);
    } else {
        begin_output(cold, options, n_tokens, y, ld_y);
        result.n_tokens += n_tokens;
    }
    times.cpu_end_s = omp_get_wtime();
    times.cpu_begin_s = times.cpu_begin_s > 0.0 ? times.cpu_begin_s : cpu_begin;
    if (layer.n_hot > 0) {
        const status finished = gpu.finish(y, ld_y, done);
        if (!finished.ok()) {
            return finished;
        }
        times.wait_s += omp_get_wtime() - times.cpu_end_s;
    }
    return {};
}

}  // namespace

status ffn_forward_hybrid(const hybrid_layer & layer, gpu_executor & gpu, int64_t max_tokens, const ffn_options & options,
                          const kernel_table * kernels, int n_threads, int64_t n_tokens, const float * x, int64_t ld_x, float * y,
                          int64_t ld_y, ffn_workspace & workspace, ffn_result & result, hybrid_times & times, const float * r, int64_t ld_r) {
    if (n_tokens > max_tokens) {
        // A part's y may lie over the next part's x.
        float * copy = workspace.array<float>(slot_input, n_tokens * layer.cold.n_embd);
        for (int64_t t = 0; t < n_tokens; ++t) {
            std::memcpy(copy + t * layer.cold.n_embd, x + t * ld_x, layer.cold.n_embd * sizeof(float));
        }
        x = copy;
        ld_x = layer.cold.n_embd;
    }
    if (r == nullptr) {
        r = x;
        ld_r = ld_x;
    }
    const ffn_layer & cold = layer.cold;
    const uint64_t hot_dense_bytes = layer.n_hot * (cold.first.row_bytes + cold.second.row_bytes + cold.down.row_bytes);
    for (int64_t from = 0; from < n_tokens; from += max_tokens) {
        const int64_t n = std::min(max_tokens, n_tokens - from);
        gpu_result done;
        const uint64_t n_active_before = result.n_active;
        const status part = forward_part(layer, gpu, options, kernels, n_threads, n, x + from * ld_x, ld_x, y + from * ld_y, ld_y,
                                         workspace, result, done, times, r + from * ld_r, ld_r);
        if (!part.ok()) {
            return part;
        }
        times.gpu_begin_s = times.gpu_begin_s > 0.0 ? times.gpu_begin_s : done.begin_s;
        times.gpu_end_s = std::max(times.gpu_end_s, done.end_s);
        times.copied_bytes += done.copied_bytes;
        times.gpu_read_bytes += done.read_bytes;
        times.gpu_neurons += done.n_candidates;
        times.gpu_active += done.n_active;
        times.copy_s += done.copy_s;
        result.n_candidates += done.n_candidates;
        times.cpu_active += result.n_active - n_active_before;
        result.n_active += done.n_used;
        result.read_bytes += done.read_bytes;
        result.dense_bytes += hot_dense_bytes;
    }
    return {};
}

status hybrid_matmul(const hybrid_layer & layer, gpu_executor & gpu, int64_t max_tokens, ffn_role role, const int32_t * order,
                     const kernel_table * kernels, int n_threads, int64_t n_tokens, const float * x, int64_t ld_x, float * out,
                     int64_t ld_out, ffn_workspace & workspace, ffn_result & result) {
    const ffn_layer & cold = layer.cold;
    const bool is_down = role == ffn_role::down;
    const bool is_first = role == ffn_role::gate || !cold.gated;
    const int64_t n_hot = layer.n_hot;
    // Without an order, positions are neurons: the cold ones begin behind the hot ones.
    const int64_t cold_begin = order == nullptr ? n_hot : 0;
    if (is_down) {
        ffn_matmul_columns(cold.down, cold.order, kernels, n_threads, n_tokens, x + cold_begin, ld_x, out, ld_out, workspace, result);
    } else {
        ffn_matmul_rows(is_first ? cold.first : cold.second, cold.order, kernels, n_threads, n_tokens, x, ld_x, out + cold_begin, ld_out,
                        workspace, result);
    }
    std::vector<float> hot(std::min(n_tokens, max_tokens) * n_hot);       // (n, n_hot)
    std::vector<float> sums(is_down ? std::min(n_tokens, max_tokens) * cold.n_embd : 0);  // (n, n_embd)
    for (int64_t from = 0; from < n_tokens && n_hot > 0; from += max_tokens) {
        const int64_t n = std::min(max_tokens, n_tokens - from);
        for (int64_t t = 0; t < n && is_down; ++t) {
            for (int64_t i = 0; i < n_hot; ++i) {
                hot[t * n_hot + i] = x[(from + t) * ld_x + (order ? order[i] : i)];
            }
        }
        const status done = is_down ? gpu.multiply(layer.i_layer, role, n, hot.data(), n_hot, sums.data(), cold.n_embd)
                                    : gpu.multiply(layer.i_layer, role, n, x + from * ld_x, ld_x, hot.data(), n_hot);
        if (!done.ok()) {
            return done;
        }
        for (int64_t t = 0; t < n; ++t) {
            float * row = out + (from + t) * ld_out;
            if (is_down) {
                kernels->add(cold.n_embd, &sums[t * cold.n_embd], row);
                continue;
            }
            for (int64_t i = 0; i < n_hot; ++i) {
                row[order ? order[i] : i] = hot[t * n_hot + i];
            }
        }
    }
    return {};
}

}  // namespace powerinfer
