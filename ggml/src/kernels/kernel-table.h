// One table of kernels per instruction set, and the choice between them at run time.
// Raw pointers only: no ggml, no allocation, no threads. The scalar set defines the result.
#pragma once

#include <cstddef>
#include <cstdint>

namespace powerinfer {

// Kernels for weight rows of one type. A row holds n values; n is a multiple of the type's block.
// Rows are ggml's own row format, `stride_bytes` apart, with no alignment beyond 2 bytes.
// Every row may be read up to `row_tail_bytes` past its end (buffers are padded for it).
struct row_kernels {
    int row_type;  // ggml_type number

    // Bytes that `pack_x` writes for n values.
    size_t (*packed_x_bytes)(int64_t n);

    // x: (n) f32 -> packed: the form that this set's dot_rows reads (f32 copy, or blocks of 32 int8 with scale and sum).
    // packed is aligned as a float; 64 bytes are faster.
    void (*pack_x)(int64_t n, const float * x, void * packed);

    // out[i] = dot(row ids[i], x), i < n_ids. ids == nullptr means rows 0, 1, ... The list goes on to n_ahead >= n_ids: those
    // rows are fetched into the cache on the way, for the next call.
    // The result of one row never depends on which other rows are in the list.
    void (*dot_rows)(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids, int64_t n_ahead,
                     const void * packed_x, float * out);  // out: (n_ids)

    // y[j] += sum over i, in order of i, of scale[i] * row(ids[i])[j]. ids as above. A y aligned to 64 bytes is faster.
    void (*add_rows)(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids, int64_t n_ahead,
                     const float * scale, float * y);  // scale: (n_ids), y: (n)

    // out[j] = row[j] as f32.
    void (*unpack_row)(int64_t n, const void * row, float * out);  // out: (n)
};

constexpr size_t row_tail_bytes = 128;

// Products of whole batches on a matrix unit: out (n_rows, n_columns) = left (n_rows, n) times right (n, n_columns), f32 sums.
// Values become n_parts bf16 numbers: 1 rounds them (relative error 2^-8 at most), 2 leave 2^-16.
// A row's result depends on its own values only. Packed operands are aligned to 64 bytes.
struct tile_kernels {
    // Bytes of an operand: n_outer rows (left) or columns (right) of n values. Its parts lie part_bytes apart, the bytes of
    // the whole operand with n_parts 1. Pieces of 16 k rows or columns lie where the bytes of those before them end.
    size_t (*operand_bytes)(int64_t n_outer, int64_t n, int n_parts);

    // Rows (n_rows, n) f32, ld apart; zeros follow up to 16 rows and 32 values. Packed rows are row_bytes apart:
    // operand_bytes(1, all values of the operand's rows, 1) / 16; value k of a row (k % 32 == 0) is 2 k bytes into it.
    void (*pack_left)(int64_t n_rows, int64_t n, const float * rows, int64_t ld, int n_parts, void * packed, size_t row_bytes,
                      size_t part_bytes);

    // Up to 16 columns, given as rows (n_columns, n) f32.
    void (*pack_right_transposed)(int64_t n_columns, int64_t n, const float * rows, int64_t ld, int n_parts, void * packed,
                                  size_t part_bytes);

    // Values k and k + 1 (k even) of all n_columns columns: row0, row1 (n_columns) f32 or nullptr for zeros. All pairs up to
    // n rounded up to 32 must be given.
    void (*pack_right_pair)(int64_t n_columns, int64_t n, int64_t k, const float * row0, const float * row1, int n_parts,
                            void * packed, size_t part_bytes);

    // accumulate: out += instead of =. out has room for n_rows rounded up to 16 and, in ld_out, for n_columns rounded up to
    // 16: all of it is written. Part bytes of 0: only the first part of that operand is used.
    void (*multiply)(int64_t n_rows, int64_t n_columns, int64_t n, const void * left, size_t left_row_bytes, size_t left_part_bytes,
                     const void * right, size_t right_part_bytes, bool accumulate, float * out,
                     int64_t ld_out);
};

struct kernel_table {
    const char * name;                     // "scalar", "avx2", "avx512", "amx", "neon"
    bool (*is_supported)();                // can this CPU (and operating system) run the set
    const row_kernels * rows;              // one entry per fast row type
    int n_rows;

    // out[t][i] = dot(w[i], x[t]): w (n_w, n) f32 with row distance ld_w, x (n_x, n) with ld_x, out (n_x, n_w) with ld_out.
    void (*matmul_nt)(int64_t n_x, int64_t n_w, int64_t n, const float * x, int64_t ld_x, const float * w, int64_t ld_w,
                      float * out, int64_t ld_out);

    // y[t][j] += sum over i of a[t][i] * w[i][j]; rows of w whose a is zero are skipped. a (n_x, n_w), w (n_w, n), y (n_x, n).
    void (*matmul_nn_add)(int64_t n_x, int64_t n_w, int64_t n, const float * a, int64_t ld_a, const float * w, int64_t ld_w,
                          float * y, int64_t ld_y);

    // y[j] += x[j], j < n.
    void (*add)(int64_t n, const float * x, float * y);

    // v[i] = v[i] / (1 + exp(-v[i])), i < n; relative error below 1e-6 (0 for -inf side, NaN stays NaN).
    void (*silu)(int64_t n, float * v);

    const tile_kernels * tiles;            // nullptr: the set has no matrix unit
};

// Kernels of `table` for a ggml type, or nullptr when the type has none (a slow row type).
const row_kernels * kernel_table_find(const kernel_table * table, int row_type);

// The best set that this CPU runs when `name` is nullptr or empty; the named one otherwise.
// nullptr when the name is unknown or the CPU can't run it.
const kernel_table * kernel_table_select(const char * name);

// All sets that were compiled in, widest first, supported or not. Returns their number.
int kernel_table_list(const kernel_table * const ** tables);

// The sets themselves and their CPU checks, for kernel-table.cpp and kernels-<set>.cpp only.
extern const kernel_table kernels_scalar;
#if defined(__x86_64__)
extern const kernel_table kernels_avx2;
extern const kernel_table kernels_avx512;
extern const kernel_table kernels_amx;
extern const tile_kernels tiles_amx;
bool cpu_has_avx2();
bool cpu_has_avx512();
bool cpu_has_amx();  // asks the operating system for the tile registers
#elif defined(__aarch64__)
extern const kernel_table kernels_neon;
bool cpu_has_neon();
#endif

}  // namespace powerinfer
