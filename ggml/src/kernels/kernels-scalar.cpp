// The scalar set: plain C++ for any CPU. It defines the result of every kernel.
// Other sets do the same integer arithmetic; their float sums differ by order and fused rounding only.
#include "kernel-table.h"
#include "row-types.h"

#include <cstddef>
#include <cstdint>

namespace powerinfer {

namespace {

float float_from_bits(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}

float float_from_f16(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16;
    const uint32_t exponent = (h >> 10) & 0x1f;
    const uint32_t mantissa = h & 0x3ff;
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
        const float magnitude = float(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    if (exponent == 31) {  // infinity or NaN
        return float_from_bits(sign | 0x7f800000 | mantissa << 13);
    }
    return float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

// One value type or block per struct: how a row decodes, and how it meets x.

struct values_f32 {
    static constexpr int row_type = row_type_f32;
    static constexpr size_t value_bytes = 4;
    static float load(const uint8_t * p) {
        float value;  // a row may start at any even address
        __builtin_memcpy(&value, p, sizeof(value));
        return value;
    }
};

struct values_f16 {
    static constexpr int row_type = row_type_f16;
    static constexpr size_t value_bytes = 2;
    static float load(const uint8_t * p) {
        uint16_t h;
        __builtin_memcpy(&h, p, sizeof(h));
        return float_from_f16(h);
    }
};

struct values_bf16 {
    static constexpr int row_type = row_type_bf16;
    static constexpr size_t value_bytes = 2;
    static float load(const uint8_t * p) {
        uint16_t h;
        __builtin_memcpy(&h, p, sizeof(h));
        return float_from_bits(uint32_t(h) << 16);
    }
};

// 32 values of x for quantized rows: x = d * q.
struct block_x {
    float d;
    int32_t sum;  // of q
    int8_t q[block_values];
};

// Blocks: value i = scale[i / part_values] * code[i], plus minimum[i / part_values] where the type has minima.
template <int row_type_, class Block, int n_values_, int part_values_, bool has_minimum_>
struct block_type {
    static constexpr int row_type = row_type_;
    using block = Block;
    static constexpr int n_values = n_values_;
    static constexpr int part_values = part_values_;
    static constexpr bool has_minimum = has_minimum_;
};

// n bytes as 2 n codes: the low halves, then the high ones.
void split_halves(int n, const uint8_t * q, int8_t * code) {
    for (int i = 0; i < n; ++i) {
        code[i] = int8_t(q[i] & 15);
        code[n + i] = int8_t(q[i] >> 4);
    }
}

void add_to_codes(int n, int value, int8_t * code) {
    for (int i = 0; i < n; ++i) {
        code[i] = int8_t(code[i] + value);
    }
}

// Bit 4 of 32 codes: bit i of h.
void add_fifth_bits(const uint8_t * h, int8_t * code) {
    for (int i = 0; i < 32; ++i) {
        code[i] = int8_t(code[i] | (h[i / 8] >> i % 8 & 1) << 4);
    }
}

// The 6-bit scales and minima of the 8 parts of a Q4_K or Q5_K block.
template <class Block>
void load_part_scales(const Block & b, float * scale, float * minimum) {
    const float d = float_from_f16(b.d);
    const float m = float_from_f16(b.m);
    for (int p = 0; p < 4; ++p) {
        const int s_lo = b.scales[p], b_lo = b.scales[4 + p], both = b.scales[8 + p];
        scale[p] = d * float(s_lo & 63);
        minimum[p] = -m * float(b_lo & 63);
        scale[4 + p] = d * float((both & 15) | s_lo >> 6 << 4);
        minimum[4 + p] = -m * float(both >> 4 | b_lo >> 6 << 4);
    }
}

struct blocks_q4_0 : block_type<row_type_q4_0, block_q4_0, 32, 32, false> {
    static void decode(const block & b, int8_t * code, float * scale, float *) {
        split_halves(16, b.q, code);
        add_to_codes(32, -8, code);
        *scale = float_from_f16(b.d);
    }
};

struct blocks_q4_1 : block_type<row_type_q4_1, block_q4_1, 32, 32, true> {
    static void decode(const block & b, int8_t * code, float * scale, float * minimum) {
        split_halves(16, b.q, code);
        *scale = float_from_f16(b.d);
        *minimum = float_from_f16(b.m);
    }
};

struct blocks_q5_0 : block_type<row_type_q5_0, block_q5_0, 32, 32, false> {
    static void decode(const block & b, int8_t * code, float * scale, float *) {
        split_halves(16, b.q, code);
        add_fifth_bits(b.h, code);
        add_to_codes(32, -16, code);
        *scale = float_from_f16(b.d);
    }
};

struct blocks_q5_1 : block_type<row_type_q5_1, block_q5_1, 32, 32, true> {
    static void decode(const block & b, int8_t * code, float * scale, float * minimum) {
        split_halves(16, b.q, code);
        add_fifth_bits(b.h, code);
        *scale = float_from_f16(b.d);
        *minimum = float_from_f16(b.m);
    }
};

struct blocks_q8_0 : block_type<row_type_q8_0, block_q8_0, 32, 32, false> {
    static void decode(const block & b, int8_t * code, float * scale, float *) {
        __builtin_memcpy(code, b.q, 32);
        *scale = float_from_f16(b.d);
    }
};

struct blocks_iq4_nl : block_type<row_type_iq4_nl, block_iq4_nl, 32, 32, false> {
    static void decode(const block & b, int8_t * code, float * scale, float *) {
        split_halves(16, b.q, code);
        for (int i = 0; i < 32; ++i) {
            code[i] = iq4_nl_values[code[i]];
        }
        *scale = float_from_f16(b.d);
    }
};

struct blocks_q4_k : block_type<row_type_q4_k, block_q4_k, 256, 32, true> {
    static void decode(const block & b, int8_t * code, float * scale, float * minimum) {
        for (int k = 0; k < 4; ++k) {
            split_halves(32, b.q + 32 * k, code + 64 * k);
        }
        load_part_scales(b, scale, minimum);
    }
};

struct blocks_q5_k : block_type<row_type_q5_k, block_q5_k, 256, 32, true> {
    static void decode(const block & b, int8_t * code, float * scale, float * minimum) {
        for (int k = 0; k < 4; ++k) {
            split_halves(32, b.q + 32 * k, code + 64 * k);
        }
        for (int i = 0; i < 256; ++i) {
            code[i] = int8_t(code[i] | (b.h[i % 32] >> i / 32 & 1) << 4);
        }
        load_part_scales(b, scale, minimum);
    }
};

struct blocks_q6_k : block_type<row_type_q6_k, block_q6_k, 256, 16, false> {
    static void decode(const block & b, int8_t * code, float * scale, float *) {
        for (int k = 0; k < 2; ++k) {
            split_halves(64, b.q + 64 * k, code + 128 * k);
            for (int i = 0; i < 128; ++i) {
                int8_t & c = code[128 * k + i];
                c = int8_t(c | (b.h[32 * k + i % 32] >> i / 32 * 2 & 3) << 4);
            }
        }
        add_to_codes(256, -32, code);
        const float d = float_from_f16(b.d);
        for (int p = 0; p < 16; ++p) {
            scale[p] = d * float(b.scales[p]);
        }
    }
};

// A block of type T, decoded.
template <class T>
struct decoded {
    int8_t code[T::n_values];
    float scale[T::n_values / T::part_values];
    float minimum[T::n_values / T::part_values];

    explicit decoded(const typename T::block & b) { T::decode(b, code, scale, minimum); }

    // values: (n_values) times factor.
    void unpack(float factor, float * values) const {
        for (int p = 0; p < T::n_values / T::part_values; ++p) {
            const float d = factor * scale[p];
            for (int i = p * T::part_values; i < (p + 1) * T::part_values; ++i) {
                values[i] = d * float(code[i]);
                if (T::has_minimum) {
                    values[i] += factor * minimum[p];
                }
            }
        }
    }

    // x: (n_values / 32). The sum over each 32 values is complete before it joins `total`.
    float dot(const block_x * x, float total) const {
        constexpr int n_parts = block_values / T::part_values;  // per block of x
        for (int p = 0; p < T::n_values / T::part_values; p += n_parts, ++x) {
            float sum = 0.0f;
            for (int k = 0; k < n_parts; ++k) {
                int32_t part = 0;
                for (int i = 0; i < T::part_values; ++i) {
                    part += code[(p + k) * T::part_values + i] * x->q[k * T::part_values + i];
                }
                sum += scale[p + k] * (x->d * float(part));
            }
            if (T::has_minimum) {
                sum += minimum[p] * (x->d * float(x->sum));
            }
            total += sum;
        }
        return total;
    }
};

const uint8_t * row_at(const void * rows, size_t stride_bytes, const int32_t * ids, int64_t i) {
    return static_cast<const uint8_t *>(rows) + size_t(ids ? ids[i] : i) * stride_bytes;
}

// Rows of plain values: x stays f32.

size_t packed_x_bytes_values(int64_t n) {
    return size_t(n) * sizeof(float);
}

void pack_x_values(int64_t n, const float * x, void * packed) {
    __builtin_memcpy(packed, x, size_t(n) * sizeof(float));
}

template <class T>
void dot_rows_values(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids, int64_t,
                     const void * packed_x, float * out) {
    const float * x = static_cast<const float *>(packed_x);
    for (int64_t i = 0; i < n_ids; ++i) {
        const uint8_t * row = row_at(rows, stride_bytes, ids, i);
        float sum = 0.0f;
        for (int64_t j = 0; j < n; ++j) {
            sum += T::load(row + j * T::value_bytes) * x[j];
        }
        out[i] = sum;
    }
}

template <class T>
void add_rows_values(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids, int64_t,
                     const float * scale, float * y) {
    for (int64_t i = 0; i < n_ids; ++i) {
        const uint8_t * row = row_at(rows, stride_bytes, ids, i);
        for (int64_t j = 0; j < n; ++j) {
            y[j] += scale[i] * T::load(row + j * T::value_bytes);
        }
    }
}

template <class T>
void unpack_row_values(int64_t n, const void * row, float * out) {
    for (int64_t j = 0; j < n; ++j) {
        out[j] = T::load(static_cast<const uint8_t *>(row) + j * T::value_bytes);
    }
}

// Rows of blocks: x is quantized to int8 per 32 values.

size_t packed_x_bytes_blocks(int64_t n) {
    return size_t(n / block_values) * sizeof(block_x);
}

void pack_x_blocks(int64_t n, const float * x, void * packed) {
    block_x * out = static_cast<block_x *>(packed);
    for (int64_t i = 0; i < n / block_values; ++i, x += block_values) {
        float x_max = 0.0f;
        bool finite = true;
        for (int j = 0; j < block_values; ++j) {
            const float magnitude = x[j] < 0.0f ? -x[j] : x[j];
            finite = finite && magnitude <= __FLT_MAX__;
            x_max = magnitude > x_max ? magnitude : x_max;
        }
        // A block of zeros (or of values whose inverse isn't finite) is all zero; NaN or infinity makes the dot NaN.
        const bool quantized = finite && x_max >= 0x1p-100f;
        const float inverse = quantized ? 127.0f / x_max : 0.0f;
        block_x & b = out[i];
        b.d = !finite ? __builtin_nanf("") : quantized ? x_max / 127.0f : 0.0f;
        b.sum = 0;
        for (int j = 0; j < block_values; ++j) {
            // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
            b.q[j] = quantized ? int8_t((x[j] * inverse + 0x1.8p23f) - 0x1.8p23f) : int8_t(0);
            b.sum += b.q[j];
        }
    }
}

template <class T>
void dot_rows_blocks(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids, int64_t,
                     const void * packed_x, float * out) {
    const block_x * x = static_cast<const block_x *>(packed_x);
    for (int64_t i = 0; i < n_ids; ++i) {
        const auto * row = reinterpret_cast<const typename T::block *>(row_at(rows, stride_bytes, ids, i));
        float sum = 0.0f;
        for (int64_t j = 0; j < n / T::n_values; ++j) {
            sum = decoded<T>(row[j]).dot(x + j * (T::n_values / block_values), sum);
        }
        out[i] = sum;
    }
}

template <class T>
void add_rows_blocks(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids, int64_t,
                     const float * scale, float * y) {
    for (int64_t i = 0; i < n_ids; ++i) {
        const auto * row = reinterpret_cast<const typename T::block *>(row_at(rows, stride_bytes, ids, i));
        for (int64_t j = 0; j < n / T::n_values; ++j) {
            float v[T::n_values];
            decoded<T>(row[j]).unpack(scale[i], v);
            for (int k = 0; k < T::n_values; ++k) {
                y[j * T::n_values + k] += v[k];
            }
        }
    }
}

template <class T>
void unpack_row_blocks(int64_t n, const void * row, float * out) {
    for (int64_t j = 0; j < n / T::n_values; ++j) {
        decoded<T>(static_cast<const typename T::block *>(row)[j]).unpack(1.0f, out + j * T::n_values);
    }
}

void matmul_nt(int64_t n_x, int64_t n_w, int64_t n, const float * x, int64_t ld_x, const float * w, int64_t ld_w,
               float * out, int64_t ld_out) {
    for (int64_t t = 0; t < n_x; ++t) {
        for (int64_t i = 0; i < n_w; ++i) {
            float sum = 0.0f;
            for (int64_t j = 0; j < n; ++j) {
                sum += w[i * ld_w + j] * x[t * ld_x + j];
            }
            out[t * ld_out + i] = sum;
        }
    }
}

void matmul_nn_add(int64_t n_x, int64_t n_w, int64_t n, const float * a, int64_t ld_a, const float * w, int64_t ld_w,
                   float * y, int64_t ld_y) {
    for (int64_t t = 0; t < n_x; ++t) {
        for (int64_t i = 0; i < n_w; ++i) {
            const float scale = a[t * ld_a + i];
            if (scale != 0.0f) {
                for (int64_t j = 0; j < n; ++j) {
                    y[t * ld_y + j] += scale * w[i * ld_w + j];
                }
            }
        }
    }
}

void add(int64_t n, const float * x, float * y) {
    for (int64_t j = 0; j < n; ++j) {
        y[j] += x[j];
    }
}

void silu(int64_t n, float * v) {
    for (int64_t i = 0; i < n; ++i) {
        // Below -104 exp(-v) is infinite and the result 0; the clamp keeps -inf / inf from being NaN.
        const float x = v[i] < -104.0f ? -104.0f : v[i];
        v[i] = x / (1.0f + __builtin_expf(-x));
    }
}

bool always_supported() {
    return true;
}

template <class T>
constexpr row_kernels kernels_values = {T::row_type,        packed_x_bytes_values, pack_x_values,
                                        dot_rows_values<T>, add_rows_values<T>,    unpack_row_values<T>};

template <class T>
constexpr row_kernels kernels_blocks = {T::row_type,        packed_x_bytes_blocks, pack_x_blocks,
                                        dot_rows_blocks<T>, add_rows_blocks<T>,    unpack_row_blocks<T>};

constexpr row_kernels rows[] = {
    kernels_values<values_f32>,  kernels_values<values_f16>,  kernels_values<values_bf16>,   kernels_blocks<blocks_q4_0>,
    kernels_blocks<blocks_q4_1>, kernels_blocks<blocks_q5_0>, kernels_blocks<blocks_q5_1>,   kernels_blocks<blocks_q8_0>,
    kernels_blocks<blocks_q4_k>, kernels_blocks<blocks_q5_k>, kernels_blocks<blocks_q6_k>,   kernels_blocks<blocks_iq4_nl>,
};

}  // namespace

const kernel_table kernels_scalar = {
    "scalar", always_supported, rows, sizeof(rows) / sizeof(rows[0]), matmul_nt, matmul_nn_add, add, silu, nullptr,
};

}  // namespace powerinfer
