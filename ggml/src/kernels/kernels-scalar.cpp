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

struct blocks_q4_0 {
    static constexpr int row_type = row_type_q4_0;
    using block = block_q4_0;
    static void unpack(const block & b, float scale, float * v) {
        const float d = scale * float_from_f16(b.d);
        for (int i = 0; i < 16; ++i) {
            v[i] = d * float((b.q[i] & 15) - 8);
            v[16 + i] = d * float((b.q[i] >> 4) - 8);
        }
    }
    static float dot(const block & b, const block_x & x) {
        int32_t sum = -8 * x.sum;
        for (int i = 0; i < 16; ++i) {
            sum += (b.q[i] & 15) * x.q[i] + (b.q[i] >> 4) * x.q[16 + i];
        }
        return float_from_f16(b.d) * (x.d * float(sum));
    }
};

struct blocks_q4_1 {
    static constexpr int row_type = row_type_q4_1;
    using block = block_q4_1;
    static void unpack(const block & b, float scale, float * v) {
        const float d = scale * float_from_f16(b.d);
        const float m = scale * float_from_f16(b.m);
        for (int i = 0; i < 16; ++i) {
            v[i] = d * float(b.q[i] & 15) + m;
            v[16 + i] = d * float(b.q[i] >> 4) + m;
        }
    }
    static float dot(const block & b, const block_x & x) {
        int32_t sum = 0;
        for (int i = 0; i < 16; ++i) {
            sum += (b.q[i] & 15) * x.q[i] + (b.q[i] >> 4) * x.q[16 + i];
        }
        return float_from_f16(b.d) * (x.d * float(sum)) + float_from_f16(b.m) * (x.d * float(x.sum));
    }
};

struct blocks_q8_0 {
    static constexpr int row_type = row_type_q8_0;
    using block = block_q8_0;
    static void unpack(const block & b, float scale, float * v) {
        const float d = scale * float_from_f16(b.d);
        for (int i = 0; i < 32; ++i) {
            v[i] = d * float(b.q[i]);
        }
    }
    static float dot(const block & b, const block_x & x) {
        int32_t sum = 0;
        for (int i = 0; i < 32; ++i) {
            sum += b.q[i] * x.q[i];
        }
        return float_from_f16(b.d) * (x.d * float(sum));
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
void dot_rows_values(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids,
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
void add_rows_values(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids,
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
void dot_rows_blocks(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids,
                     const void * packed_x, float * out) {
    const block_x * x = static_cast<const block_x *>(packed_x);
    for (int64_t i = 0; i < n_ids; ++i) {
        const auto * row = reinterpret_cast<const typename T::block *>(row_at(rows, stride_bytes, ids, i));
        float sum = 0.0f;
        for (int64_t j = 0; j < n / block_values; ++j) {
            sum += T::dot(row[j], x[j]);
        }
        out[i] = sum;
    }
}

template <class T>
void add_rows_blocks(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids,
                     const float * scale, float * y) {
    for (int64_t i = 0; i < n_ids; ++i) {
        const auto * row = reinterpret_cast<const typename T::block *>(row_at(rows, stride_bytes, ids, i));
        for (int64_t j = 0; j < n / block_values; ++j) {
            float v[block_values];
            T::unpack(row[j], scale[i], v);
            for (int k = 0; k < block_values; ++k) {
                y[j * block_values + k] += v[k];
            }
        }
    }
}

template <class T>
void unpack_row_blocks(int64_t n, const void * row, float * out) {
    for (int64_t j = 0; j < n / block_values; ++j) {
        T::unpack(static_cast<const typename T::block *>(row)[j], 1.0f, out + j * block_values);
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
    kernels_values<values_f32>,  kernels_values<values_f16>,  kernels_values<values_bf16>,
    kernels_blocks<blocks_q4_0>, kernels_blocks<blocks_q4_1>, kernels_blocks<blocks_q8_0>,
};

}  // namespace

const kernel_table kernels_scalar = {
    "scalar", always_supported, rows, sizeof(rows) / sizeof(rows[0]), matmul_nt, matmul_nn_add, add, silu, nullptr,
};

}  // namespace powerinfer
