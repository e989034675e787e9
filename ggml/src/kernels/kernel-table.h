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

    // out[i] = dot(row ids[i], x), i < n_ids. ids == nullptr means rows 0 .. n_ids - 1.
    // The result of one row never depends on which other rows are in the list.
    void (*dot_rows)(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids,
                     const void * packed_x, float * out);  // out: (n_ids)

    // y[j] += sum over i, in order of i, of scale[i] * row(ids[i])[j]. ids as above. A y aligned to 64 bytes is faster.
    void (*add_rows)(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids,
                     const float * scale, float * y);  // scale: (n_ids), y: (n)

    // out[j] = row[j] as f32.
    void (*unpack_row)(int64_t n, const void * row, float * out);  // out: (n)
};

constexpr size_t row_tail_bytes = 128;

struct kernel_table {
    const char * name;                     // "scalar", "avx2", "avx512", "neon"
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
bool cpu_has_avx2();
bool cpu_has_avx512();
#elif defined(__aarch64__)
extern const kernel_table kernels_neon;
bool cpu_has_neon();
#endif

}  // namespace powerinfer
