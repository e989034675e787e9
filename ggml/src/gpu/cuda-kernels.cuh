// CUDA kernels on neurons of one FFN block: predictor, gathered gate and up, down without transposing. Rows stay as ggml
// stores them, one neuron each; only those of active neurons are read. Device pointers; every sum has a fixed order.
#pragma once

#include "../kernels/row-types.h"

#ifndef POWERINFER_CUDA_SHIM  // tests run this code on the CPU, with types of their own
#include <cuda_runtime.h>
#endif

#include <cstddef>
#include <cstdint>

namespace powerinfer {

constexpr int cuda_tile_neurons = 32;    // neurons of one thread block: one lane of a warp each
constexpr int cuda_split_neurons = 512;  // neurons whose down rows one thread block adds up
constexpr int cuda_row_values_unit = 8;  // a row has a multiple of it: without gaps, F32 and 16-bit rows start at multiples of 16 bytes
constexpr int cuda_input_unit = 32;      // an input's values, rounded up to it with zeros
constexpr int cuda_n_totals = 4;         // counters: gate, up and down rows used, values other than 0

// 32 values of an input for quantized rows: x = d * q. As in kernels-scalar.cpp.
struct alignas(8) cuda_block_x {
    float d;
    int32_t sum;  // of q
    int8_t q[block_values];
};

// A matrix with one neuron per row.
struct cuda_matrix {
    const uint8_t * rows = nullptr;  // nullptr: none
    int64_t stride_bytes = 0;        // of a row, without a gap
    int row_type = -1;               // ggml_type
    int n = 0;                       // values per row, a multiple of cuda_row_values_unit
};

// Vectors that rows are multiplied with, one per token.
struct cuda_input {
    const float * values = nullptr;         // (n_tokens, ld), zeros behind the last one
    const cuda_block_x * packed = nullptr;  // (n_tokens, ld / 32); read for quantized rows only
    int64_t ld = 0;                         // a multiple of cuda_input_unit
};

// Neurons of a block: the hot ones, or a group of cold ones.
struct cuda_neurons {
    int n = 0;
    cuda_matrix first;   // gate, or up when ungated
    cuda_matrix second;  // up when gated
    cuda_matrix down;
    cuda_matrix fc2;                      // the predictor's second matrix
    const float * first_bias = nullptr;   // (n); nullptr: none
    const float * second_bias = nullptr;  // (n)
    const float * down_norm = nullptr;    // (n)
};

enum class cuda_activation : int { relu, relu_sqr, drelu, silu, gelu, gelu_erf, gelu_quick };

// Which neurons count, and what is applied to them. A NaN is never skipped.
struct cuda_rule {
    cuda_activation activation = cuda_activation::silu;
    float activation_param = 0.0f;
    bool is_dense = false;      // every neuron, zeros too
    bool is_predicted = false;  // only neurons whose score isn't below predictor_threshold
    float predictor_threshold = 0.0f;
    float gate_limit = 0.0f;     // on |act(gate)|
    float product_limit = 0.0f;  // on |act(gate) * up| * down_norm
    bool add_biases = false;
};

// Active neurons: a token's tiles one behind the other, each with room for cuda_tile_neurons entries.
struct cuda_list {
    int32_t * ids = nullptr;                // (n_tokens, n_tiles, cuda_tile_neurons) ascending
    float * values = nullptr;               // as ids: act(gate) * up
    int32_t * n_ids = nullptr;              // (n_tokens, n_tiles)
    unsigned long long * totals = nullptr;  // (cuda_n_totals) every launch of cuda_select adds to them
};

constexpr int cuda_n_tiles(int64_t n) { return static_cast<int>((n + cuda_tile_neurons - 1) / cuda_tile_neurons); }
constexpr int cuda_n_splits(int64_t n) { return static_cast<int>((n + cuda_split_neurons - 1) / cuda_split_neurons); }

// Has the type kernels here?
constexpr bool cuda_supports(int row_type) {
    return row_type == row_type_f32 || row_type == row_type_f16 || row_type == row_type_bf16 || row_type == row_type_q8_0 ||
           row_type == row_type_q4_0 || row_type == row_type_q4_k;
}
constexpr bool cuda_reads_packed(int row_type) {
    return row_type == row_type_q8_0 || row_type == row_type_q4_0 || row_type == row_type_q4_k;
}

// packed (n_tokens, ld / 32) = values (n_tokens, ld), quantized.
cudaError_t cuda_pack(int n_tokens, const float * values, int64_t ld, cuda_block_x * packed, cudaStream_t stream);

// out[t][i] = dot(row i, x[t]), i < n_rows, up to ld_out zeros. relu: NaN stays.
cudaError_t cuda_dot_rows(int n_tokens, const cuda_matrix & matrix, int n_rows, const cuda_input & x, bool relu, float * out,
                          int64_t ld_out, cudaStream_t stream);

// list = the active neurons of every token. hidden: relu(fc1 x), read when the rule is predicted.
cudaError_t cuda_select(int n_tokens, const cuda_neurons & neurons, const cuda_rule & rule, const cuda_input & x,
                        const cuda_input & hidden, const cuda_list & list, cudaStream_t stream);

// y[t] = the list's values times down rows. y (n_tokens, ld_y), ld_y a multiple of cuda_input_unit.
// sums: scratch (n_tokens, cuda_n_splits(n), ld_y).
cudaError_t cuda_sum_down(int n_tokens, int n, const cuda_matrix & down, const cuda_list & list, float * sums, float * y,
                          int64_t ld_y, cudaStream_t stream);

// Does the current device run what this file was compiled for?
cudaError_t cuda_check_kernels();

}  // namespace powerinfer
