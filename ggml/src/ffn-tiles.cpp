// The blocked path on a matrix unit (kernel_table::tiles): first act(gate) * up of all neurons and tokens, then the down
// projection by columns, each sum in one thread. Each token uses its own set of neurons, whatever else is in the batch.
#include "ffn-batch.h"

#include "ggml.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

namespace powerinfer {

namespace {

enum slot { slot_thread = 32, slot_x, slot_r, slot_hidden, slot_hidden_packed, slot_marks, slot_any, slot_union, slot_products, slot_rows };

constexpr int64_t unit = 16;           // rows and columns come in units of it
constexpr int64_t tile_rows = 128;     // neurons per tile: at n_embd 2048 half of a 1-MiB L2 cache
constexpr int64_t slice_columns = 512; // of the down projection, per pass
constexpr int64_t slice_rows = 1024;   // neurons per product of the down projection

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// How many bf16 parts x and the rows of a matrix are given: F16 rows lose nothing by two, BF16 rows are one as they are;
// for quantized rows upstream rounds x to 8 bits, and one part keeps as many of both.
struct part_counts {
    int x;
    int rows;
};

part_counts parts_of(const row_matrix & m) {
    if (ggml_is_quantized(static_cast<ggml_type>(m.row_type))) {
        return {1, 1};
    }
    return {2, m.row_type == GGML_TYPE_BF16 ? 1 : 2};
}

// A left operand that all threads read.
struct left_operand {
    uint8_t * data = nullptr;
    size_t row_bytes = 0;
    size_t part_bytes = 0;
    int n_parts = 0;

    left_operand(const tile_kernels & tiles, ffn_workspace & workspace, int slot, int64_t n_rows, int64_t n, int n_parts)
        : row_bytes(tiles.operand_bytes(1, n, 1) / unit), part_bytes(tiles.operand_bytes(n_rows, n, 1)), n_parts(n_parts) {
        data = static_cast<uint8_t *>(workspace.get(slot, tiles.operand_bytes(n_rows, n, n_parts)));
    }

    uint8_t * at(int64_t i_row, int64_t k) const { return data + i_row * row_bytes + k * 2; }

    // This thread's share of the rows.
    void pack(const tile_kernels & tiles, int i_thread, int team, int64_t n_rows, int64_t n, const float * rows, int64_t ld) const {
        for (int64_t i = i_thread * unit; i < n_rows; i += team * unit) {
            tiles.pack_left(std::min(unit, n_rows - i), n, rows + i * ld, ld, n_parts, at(i, 0), row_bytes, part_bytes);
        }
    }
};

// One thread's scratch memory. The first product's parts and the second's share it.
struct thread_memory {
    float * gate;      // (n_tokens up to 16, tile_rows)
    float * up;        // same
    float * values;    // (16, n) unpacked rows
    uint8_t * right;   // right operand
    float * sums;      // (n_tokens up to 16, slice_columns)

    static size_t bytes(const tile_kernels & tiles, int64_t n, int64_t n_tokens) {
        const size_t products = 2 * round_up(n_tokens, unit) * tile_rows * sizeof(float) + tiles.operand_bytes(tile_rows, n, 2);
        const size_t columns = round_up(n_tokens, unit) * slice_columns * sizeof(float) + tiles.operand_bytes(slice_columns, slice_rows, 2);
        return unit * (n + unit) * sizeof(float) + std::max(products, columns) + 4096;
    }

    thread_memory(uint8_t * block, int64_t n, int64_t n_tokens) {
        values = reinterpret_cast<float *>(block);
        gate = reinterpret_cast<float *>(block + round_up(unit * (n + unit) * sizeof(float), 64));
        up = gate + round_up(n_tokens, unit) * tile_rows;
        right = reinterpret_cast<uint8_t *>(up + round_up(n_tokens, unit) * tile_rows);
        sums = gate;
    }
    uint8_t * columns_right(int64_t n_tokens) const {
        return reinterpret_cast<uint8_t *>(sums + round_up(n_tokens, unit) * slice_columns);
    }
};

// out (n_tokens, n_rows) = left times the rows of `ids`. Returns the slow rows.
uint64_t multiply_rows(const tile_kernels & tiles, const row_reader & reader, int64_t n, int64_t n_tokens, const left_operand & left,
                       part_counts parts, const int32_t * ids, int64_t first, int64_t n_rows, const thread_memory & own, float * out,
                       int64_t ld_out) {
    const size_t part_bytes = tiles.operand_bytes(n_rows, n, 1);
    uint64_t n_slow = 0;
    for (int64_t i = 0; i < n_rows; i += unit) {
        const int64_t count = std::min(unit, n_rows - i);
        for (int64_t k = 0; k < count; ++k) {
            n_slow += reader.unpack(ids ? ids[i + k] : first + i + k, own.values + k * n);
        }
        uint8_t * right = own.right + (i > 0 ? tiles.operand_bytes(i, n, 1) : 0);
        tiles.pack_right_transposed(count, n, own.values, n, parts.rows, right, part_bytes);
    }
    tiles.multiply(n_tokens, n_rows, n, left.data, left.row_bytes, parts.x > 1 ? left.part_bytes : 0, own.right,
                   parts.rows > 1 ? part_bytes : 0, false, out, ld_out);
    return n_slow;
}

// Columns per slice of the down projection: whole blocks of the row type, and as many slices as keep all threads busy.
int64_t slice_width(const row_matrix & down, int team) {
    const int64_t block = ggml_blck_size(static_cast<ggml_type>(down.row_type));
    const int64_t rounds = (down.n + slice_columns * team - 1) / (slice_columns * team);
    const int64_t width = (down.n + rounds * team - 1) / (rounds * team);
    return std::min(slice_columns, round_up(width, std::max(block, unit)));
}

}  // namespace

void ffn_forward_tiles(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int n_threads,
                       int64_t n_tokens, const float * x, int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y,
                       ffn_workspace & workspace, ffn_result & result) {
    const tile_kernels & tiles = *kernels->tiles;
    const int64_t n_embd = layer.n_embd;
    const int64_t n_ff = layer.n_ff;
    const int64_t rank = layer.fc1.n_rows;
    const bool predicted = options.mode == ffn_mode::predicted;
    const bool dense = options.mode == ffn_mode::dense;
    const part_counts first_parts = parts_of(layer.first);
    const part_counts second_parts = layer.gated ? parts_of(layer.second) : part_counts{1, 1};
    const part_counts down_parts = parts_of(layer.down);
    const part_counts fc1_parts = predicted ? parts_of(layer.fc1) : part_counts{1, 1};
    const part_counts fc2_parts = predicted ? parts_of(layer.fc2) : part_counts{1, 1};

    const int64_t widest = std::max(n_embd, rank);
    const size_t thread_bytes = round_up(thread_memory::bytes(tiles, widest, n_tokens), 4096);
    uint8_t * memory = static_cast<uint8_t *>(workspace.get(slot_thread, thread_bytes * n_threads));
    const left_operand packed_x(tiles, workspace, slot_x, n_tokens, n_embd, std::max({first_parts.x, second_parts.x, fc1_parts.x}));
    const bool reads_x = r == x;  // the predictor does
    const left_operand packed_r(tiles, workspace, reads_x ? slot_x : slot_r, n_tokens, n_embd, reads_x ? packed_x.n_parts : fc1_parts.x);
    const left_operand packed_hidden(tiles, workspace, slot_hidden_packed, n_tokens, std::max<int64_t>(rank, 1), fc2_parts.x);
    const int64_t ld_hidden = round_up(std::max<int64_t>(rank, 1), unit);
    float * hidden = workspace.array<float>(slot_hidden, round_up(n_tokens, unit) * ld_hidden);
    uint8_t * marks = predicted ? workspace.array<uint8_t>(slot_marks, n_tokens * n_ff) : nullptr;  // (n_tokens, n_ff)
    uint8_t * any = predicted ? workspace.array<uint8_t>(slot_any, n_ff) : nullptr;
    int32_t * candidates = workspace.array<int32_t>(slot_union, n_ff);
    // The products of tile i are values i * tile_rows and up of each token; rows: their neurons, -1 behind the last used one.
    const int64_t n_places = round_up(n_ff, tile_rows);
    const left_operand products(tiles, workspace, slot_products, n_tokens, n_places, down_parts.x);
    int32_t * rows = workspace.array<int32_t>(slot_rows, n_places);
    int64_t n_union = n_ff;

    ffn_tally tally;

#pragma omp parallel num_threads(n_threads) reduction(+ : tally)
    {
        const int i_thread = omp_get_thread_num();
        const int team = omp_get_num_threads();
        const double start = omp_get_wtime();
        const thread_memory own(memory + i_thread * thread_bytes, widest, n_tokens);
        batch_stages stages(layer, options, kernels, n_tokens, tile_rows, marks, result);

        packed_x.pack(tiles, i_thread, team, n_tokens, n_embd, x, ld_x);
        if (predicted && !reads_x) {
            packed_r.pack(tiles, i_thread, team, n_tokens, n_embd, r, ld_r);
        }
#pragma omp barrier
        if (predicted) {
            const row_reader fc1(layer.fc1, kernels);
            const row_reader fc2(layer.fc2, kernels);
            const int64_t share = std::min(tile_rows, round_up((rank + team - 1) / team, unit));
            for (int64_t begin = i_thread * share; begin < rank; begin += team * share) {
                const int64_t n_rows = std::min(share, rank - begin);
                tally.n_slow_rows += multiply_rows(tiles, fc1, n_embd, n_tokens, packed_r, fc1_parts, nullptr, begin, n_rows, own,
                                                   hidden + begin, ld_hidden);
                for (int64_t t = 0; t < n_tokens && layer.predictor_relu; ++t) {
                    ffn_activate(ffn_activation::relu, 0.0f, kernels, n_rows, hidden + t * ld_hidden + begin);
                }
            }
#pragma omp barrier
            packed_hidden.pack(tiles, i_thread, team, n_tokens, rank, hidden, ld_hidden);
#pragma omp barrier
            for (int64_t begin = i_thread * tile_rows; begin < n_ff; begin += team * tile_rows) {
                const int64_t n_rows = std::min(tile_rows, n_ff - begin);
                tally.n_slow_rows += multiply_rows(tiles, fc2, rank, n_tokens, packed_hidden, fc2_parts, nullptr, begin, n_rows,
                                                   own, own.gate, tile_rows);
                batch_mark(layer, n_tokens, begin, n_rows, own.gate, tile_rows, marks, any);
            }
#pragma omp barrier
#pragma omp single
            n_union = batch_candidates(n_ff, any, candidates);
            if (i_thread == 0) {
                tally.predictor_s = omp_get_wtime() - start;
            }
        }

        const row_reader first(layer.first, kernels);
        const row_reader second(layer.second, kernels);
        const row_reader down(layer.down, kernels);
        for (int64_t begin = i_thread * tile_rows; begin < n_union; begin += team * tile_rows) {
            int32_t * ids = rows + begin;
            int64_t n_rows = std::min(tile_rows, n_union - begin);
            for (int64_t i = 0; i < n_rows; ++i) {
                ids[i] = predicted ? candidates[begin + i] : static_cast<int32_t>(begin + i);
            }
            tally.n_slow_rows += multiply_rows(tiles, first, n_embd, n_tokens, packed_x, first_parts, ids, 0, n_rows, own,
                                               own.gate, tile_rows);
            tally.n_gate_rows += n_rows;
            tally.n_candidates += stages.finish_gate(n_rows, ids, own.gate);
            if (!dense) {
                n_rows = stages.keep_used(n_rows, ids, own.gate);
            }
            if (layer.gated && n_rows > 0) {
                tally.n_slow_rows += multiply_rows(tiles, second, n_embd, n_tokens, packed_x, second_parts, ids, 0, n_rows,
                                                   own, own.up, tile_rows);
                tally.n_up_rows += n_rows;
                stages.finish_up(n_rows, ids, own.gate, own.up);
            }
            tally.n_active += stages.finish_products(n_rows, ids, own.gate);
            if (!dense) {
                n_rows = stages.keep_used(n_rows, ids, own.gate);
            }
            tally.n_down_rows += n_rows;
            for (int64_t i = n_rows; i < tile_rows; ++i) {
                ids[i] = -1;
                for (int64_t t = 0; t < n_tokens; ++t) {
                    own.gate[t * tile_rows + i] = 0.0f;
                }
            }
            tiles.pack_left(n_tokens, tile_rows, own.gate, tile_rows, down_parts.x, products.at(0, begin), products.row_bytes,
                            products.part_bytes);
        }
#pragma omp barrier
        // From here on x isn't read any more: y may lie over it.
        const int64_t n_used = round_up(n_union, tile_rows);
        const int64_t width = slice_width(layer.down, team);
        const int64_t n_slices = (n_embd + width - 1) / width;
        const int64_t n_groups = std::min((n_tokens + unit - 1) / unit, (team + n_slices - 1) / n_slices);  // of tokens
        const int64_t group = round_up((n_tokens + n_groups - 1) / n_groups, unit);
        uint8_t * right = own.columns_right(n_tokens);
        for (int64_t item = i_thread; item < n_slices * n_groups; item += team) {
            const int64_t j = item % n_slices * width;
            const int64_t n_columns = std::min(width, n_embd - j);
            const int64_t t0 = item / n_slices * group;
            const int64_t count = std::min(group, n_tokens - t0);
            if (count <= 0) {
                continue;
            }
            for (int64_t k0 = 0; k0 < n_used; k0 += slice_rows) {
                const int64_t n_rows = std::min(slice_rows, n_used - k0);
                const size_t part_bytes = tiles.operand_bytes(n_columns, n_rows, 1);
                for (int64_t k = 0; k < n_rows; k += 2) {
                    const float * row[2] = {nullptr, nullptr};
                    for (int i = 0; i < 2; ++i) {
                        if (rows[k0 + k + i] >= 0) {
                            tally.n_slow_rows += down.unpack_part(rows[k0 + k + i], j, n_columns, own.values + i * n_columns);
                            row[i] = own.values + i * n_columns;
                        }
                    }
                    tiles.pack_right_pair(n_columns, n_rows, k, row[0], row[1], down_parts.rows, right, part_bytes);
                }
                tiles.multiply(count, n_columns, n_rows, products.at(t0, k0), products.row_bytes,
                               down_parts.x > 1 ? products.part_bytes : 0, right, down_parts.rows > 1 ? part_bytes : 0, k0 > 0,
                               own.sums, slice_columns);
            }
            for (int64_t t = 0; t < count; ++t) {
                float * out = y + (t0 + t) * ld_y + j;
                ffn_join_sums(layer, options, kernels, n_used > 0 ? 1 : 0, own.sums + t * slice_columns, 0, j, n_columns, out);
            }
        }
        if (options.count) {
#pragma omp critical(powerinfer_batch_histograms)
            stages.add_histograms();
        }
        if (i_thread == 0) {
            tally.up_down_s = omp_get_wtime() - start - tally.predictor_s;  // gate and up take turns tile by tile: all is told as one
        }
    }
    result.add(layer, options, n_tokens, tally);
}

}  // namespace powerinfer
