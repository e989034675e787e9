// What the two blocked paths (f32 products, tile unit) share: the element-wise stages between the products.
// Blocks of values are (n_tokens, n_rows) f32, `ld` floats per token.
#pragma once

#include "ffn.h"

namespace powerinfer {

constexpr int64_t batch_chunk_tokens = 512;  // tokens per pass, bounds the scratch memory

struct batch_stages {
    const ffn_layer & layer;
    const ffn_options & options;
    const kernel_table * kernels;
    int64_t n_tokens;
    int64_t ld;
    const uint8_t * marks;  // (n_tokens, n_ff) 1: a candidate of the token's; nullptr: all are
    ffn_result & result;    // counting arrays: a neuron's entries are written by the thread that has its rows

    // Histograms of this thread, (ffn_n_bins) each, only when counting in dense mode.
    std::vector<uint64_t> gate_histogram;
    std::vector<uint64_t> product_histogram;

    batch_stages(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int64_t n_tokens, int64_t ld,
                 const uint8_t * marks, ffn_result & result);

    // gate = act(gate); exactly 0 where the token doesn't use the neuron. ids (n_rows). Returns the candidate pairs.
    uint64_t finish_gate(int64_t n_rows, const int32_t * ids, float * gate);
    // gate *= up, after up's bias and activation; a 0 stays exactly 0 whatever up is.
    void finish_up(int64_t n_rows, const int32_t * ids, float * gate, float * up) const;
    // Applies the threshold on the product. Returns the active pairs.
    uint64_t finish_products(int64_t n_rows, const int32_t * ids, float * products);
    // Packs the columns of v that any token uses to the left, and their ids with them. Returns their number.
    int64_t keep_used(int64_t n_rows, int32_t * ids, float * v) const;
    // Adds the histograms to the result's. Called by one thread at a time.
    void add_histograms() const;
};

// The predictor's decision of one tile: marks of ids first .. first + n_rows - 1 from scores, and whether any token has it.
void batch_mark(const ffn_layer & layer, int64_t n_tokens, int64_t first, int64_t n_rows, const float * scores, int64_t ld,
                uint8_t * marks, uint8_t * any);

// Positions whose `any` is set, ascending. Returns their number.
int64_t batch_candidates(int64_t n_ff, const uint8_t * any, int32_t * ids);

// At most batch_chunk_tokens tokens through the tile unit; x and y as in ffn_forward. kernels->tiles isn't nullptr.
void ffn_forward_tiles(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int n_threads,
                       int64_t n_tokens, const float * x, int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y,
                       ffn_workspace & workspace, ffn_result & result);

}  // namespace powerinfer
