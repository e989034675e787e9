// One FFN block on two processors: hot neurons on a device, cold ones on the CPU at the same time.
#pragma once

#include "ffn.h"
#include "gpu/gpu-executor.h"

#include <memory>

namespace powerinfer {

// When the parts of a block ran, omp_get_wtime. A part that there wasn't has begin == end == 0.
struct hybrid_times {
    double cpu_begin_s = 0.0;
    double cpu_end_s = 0.0;
    double gpu_begin_s = 0.0;
    double gpu_end_s = 0.0;
    double wait_s = 0.0;           // the CPU had nothing to do but wait for the device
    double copy_s = 0.0;           // the host spent in copies
    uint64_t copied_bytes = 0;     // between host and device
    uint64_t gpu_read_bytes = 0;
    uint64_t gpu_neurons = 0;      // computed by the device, summed over tokens
    uint64_t gpu_active = 0;       // of these not 0, when counted (ffn_options::count_hot)
    uint64_t cpu_active = 0;       // neurons that the CPU used

    double cpu_s() const { return cpu_end_s - cpu_begin_s; }
    double gpu_s() const { return gpu_end_s - gpu_begin_s; }
};

// A layer whose positions 0 .. n_hot - 1 are in `store`.
struct hybrid_layer {
    int i_layer = -1;
    int64_t n_hot = 0;
    gpu_store * store = nullptr;
    int64_t stream_tokens = 0;  // batches of so many tokens and more are computed by the device alone; 0: none
    ffn_layer cold;             // the rest, in host memory

    hybrid_layer(int i_layer, const ffn_layer & layer, int64_t n_hot, gpu_store * store, int64_t stream_tokens)
        : i_layer(i_layer), n_hot(n_hot), store(store), stream_tokens(stream_tokens), cold(ffn_without_hot(layer, n_hot)) {}
};

// As ffn_forward. max_tokens: what `gpu` was made for. A batch that is cut into parts must not have y over x.
status ffn_forward_hybrid(const hybrid_layer & layer, gpu_executor & gpu, int64_t max_tokens, const ffn_options & options,
                          const kernel_table * kernels, int n_threads, int64_t n_tokens, const float * x, int64_t ld_x, float * y,
                          int64_t ld_y, ffn_workspace & workspace, ffn_result & result, hybrid_times & times, const float * r, int64_t ld_r);

// Whole matrices, for blocks that run op by op: as ffn_matmul_rows and ffn_matmul_columns. order (n_ff): of all positions.
status hybrid_matmul(const hybrid_layer & layer, gpu_executor & gpu, int64_t max_tokens, ffn_role role, const int32_t * order,
                     const kernel_table * kernels, int n_threads, int64_t n_tokens, const float * x, int64_t ld_x, float * out,
                     int64_t ld_out, ffn_workspace & workspace, ffn_result & result);

}  // namespace powerinfer
