// The NEON set (AArch64 with dot products of bytes, FEAT_DotProd).
// Includes nothing but the table, the body and intrinsics: see STYLE.md, "Who may include what".
#include "kernel-table.h"
#include "row-types.h"

#include <arm_neon.h>
#include <cstddef>
#include <cstdint>

namespace powerinfer {

namespace {

using vf = float32x4_t;
constexpr int64_t vf_n = 4;
constexpr int matmul_v = 8;    // 2 x 8 sums
constexpr int matmul_n_x = 5;  // 5 x 4 sums, 4 rows of w and 5 of x, which GCC loads at once: 29 of 32 registers

// A vector at any address.
template <class V>
V load_as(const void * p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
}

vf vf_zero() { return vdupq_n_f32(0.0f); }
vf vf_set(float value) { return vdupq_n_f32(value); }
vf vf_load(const float * p) { return load_as<vf>(p); }
void vf_store(float * p, vf v) { __builtin_memcpy(p, &v, sizeof(v)); }
vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
vf vf_fma(vf a, vf b, vf c) { return c + a * b; }  // the intrinsic is an opaque call to GCC 12, which then keeps sums in memory
vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
vf vf_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
vf vf_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
vf vf_round(vf a) { return vrndnq_f32(a); }

vf vf_load_part(const float * p, int64_t count) {
    if (count >= vf_n) {
        return vf_load(p);
    }
    float v[vf_n] = {};
    for (int64_t i = 0; i < count; ++i) {
        v[i] = p[i];
    }
    return vf_load(v);
}

void vf_store_part(float * p, vf v, int64_t count) {
    float all[vf_n];
    vf_store(all, v);
    for (int64_t i = 0; i < count && i < vf_n; ++i) {
        p[i] = all[i];
    }
}

vf vf_first(vf v, int64_t count) {
    const int32x4_t lane = {0, 1, 2, 3};
    const uint32x4_t kept = vcltq_s32(lane, vdupq_n_s32(count > vf_n ? int(vf_n) : int(count)));
    return vreinterpretq_f32_u32(vandq_u32(kept, vreinterpretq_u32_f32(v)));
}

uint32_t vf_nonzero(vf a) {
    const uint32x4_t bit = {1, 2, 4, 8};
    return vaddvq_u32(vbicq_u32(bit, vceqzq_f32(a)));
}

// a * 2^n for whole n in [-252, 254], in two factors: 2^n alone may lie outside the float range.
vf vf_scale2(vf a, vf n) {
    const int32x4_t whole = vcvtq_s32_f32(n);
    const int32x4_t half = vshrq_n_s32(whole, 1);
    const int32x4_t bias = vdupq_n_s32(127);
    const int32x4_t f0 = vshlq_n_s32(vaddq_s32(half, bias), 23);
    const int32x4_t f1 = vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23);
    return vmulq_f32(vmulq_f32(a, vreinterpretq_f32_s32(f0)), vreinterpretq_f32_s32(f1));
}

// total: (4) the sums of a, b, c and d.
void vf_sum4(vf a, vf b, vf c, vf d, float * total) {
    vf_store(total, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

vf vf_load_f16(const uint8_t * p) {
    return vcvt_f32_f16(load_as<float16x4_t>(p));
}

vf vf_load_bf16(const uint8_t * p) {
    return vreinterpretq_f32_u32(vshll_n_u16(load_as<uint16x4_t>(p), 16));
}

// How a block of x is quantized: q = round(x * inverse), x ~ q * d. See kernels-scalar.cpp.
struct block_scale {
    float d;
    float inverse;
};

block_scale block_scale_of(const float * x) {
    vf largest = vf_zero();
    for (int j = 0; j < 32; j += 4) {
        largest = vmaxq_f32(largest, vabsq_f32(vf_load(x + j)));  // NaN when either is
    }
    const float x_max = vmaxvq_f32(largest);
    if (!(x_max <= __FLT_MAX__)) {
        return {__builtin_nanf(""), 0.0f};
    }
    return x_max >= 0x1p-100f ? block_scale{x_max / 127.0f, 127.0f / x_max} : block_scale{0.0f, 0.0f};
}

// 32 values, one per byte.
struct bytes_32 {
    int8x16_t lo;
    int8x16_t hi;
};

bytes_32 load_32(const void * p) {
    return {load_as<int8x16_t>(p), load_as<int8x16_t>(static_cast<const uint8_t *>(p) + 16)};
}

// 16 values of x as int8.
int8x16_t quantize_16(const float * x, float inverse) {
    int16x4_t q[4];
    for (int j = 0; j < 4; ++j) {
        q[j] = vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vf_load(x + 4 * j), inverse)));
    }
    return vcombine_s8(vmovn_s16(vcombine_s16(q[0], q[1])), vmovn_s16(vcombine_s16(q[2], q[3])));
}

// 32 values of x as int8; all zero when inverse is 0, whatever x is.
bytes_32 quantize_32(const float * x, float inverse) {
    if (inverse == 0.0f) {
        return {vdupq_n_s8(0), vdupq_n_s8(0)};
    }
    return {quantize_16(x, inverse), quantize_16(x + 16, inverse)};
}

// Four sums of products of int8, together the sum of all 32.
int32x4_t dot_bytes(bytes_32 a, bytes_32 b) {
    return vdotq_s32(vdotq_s32(vdupq_n_s32(0), a.lo, b.lo), a.hi, b.hi);
}

// 32 int8 as eight vectors of floats.
void convert_32(bytes_32 q, vf * out) {
    const int16x8_t wide[4] = {vmovl_s8(vget_low_s8(q.lo)), vmovl_high_s8(q.lo), vmovl_s8(vget_low_s8(q.hi)),
                               vmovl_high_s8(q.hi)};
    for (int j = 0; j < 4; ++j) {
        out[2 * j] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide[j])));
        out[2 * j + 1] = vcvtq_f32_s32(vmovl_high_s16(wide[j]));
    }
}

float half_at(const uint8_t * p) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(load_as<uint16_t>(p)))), 0);
}

// The codes of a 4-bit block in the order of its values.
bytes_32 load_nibbles(const uint8_t * p) {
    const uint8x16_t bytes = load_as<uint8x16_t>(p);
    return {vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15))), vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4))};
}

constexpr int group_size = 4;  // blocks per group of a type whose blocks hold 32 values

// Half i_half of each block of a group at w. Past the end of a row they are whatever lies there.
template <class Block, int i_half>
vf load_scales(const uint8_t * w) {
    const auto half = [&](int k) { return load_as<uint16_t>(w + k * sizeof(Block) + 2 * i_half); };
    const uint16x4_t halves = {half(0), half(1), half(2), half(3)};
    return vcvt_f32_f16(vreinterpret_f16_u16(halves));
}

// Half i_half of each block of a group, times the scale of its row, for R rows: out[4 * r + k].
template <class Block, int i_half, int R>
void load_row_scales(const uint8_t * const * w, const float * scale, float * out) {
    for (int r = 0; r < R; ++r) {
        vf_store(out + 4 * r, vmulq_n_f32(load_scales<Block, i_half>(w[r]), scale[r]));
    }
}

// y (32) += the rows' codes, each times its c[4 * r].
template <class Codes, int R>
void add_codes(const uint8_t * const * w, const float * c, vf * sum) {
    for (int r = 0; r < R; ++r) {
        vf v[8];
        convert_32(Codes::load(w[r]), v);
        for (int j = 0; j < 8; ++j) {
            sum[j] = vf_fma(vf_set(c[4 * r]), v[j], sum[j]);
        }
    }
}

// Codes: a block of 32 values as int8, whose halves are d or d and m.

struct codes_q4_0 {
    static constexpr int row_type = row_type_q4_0;
    using block = block_q4_0;
    static bytes_32 load(const uint8_t * w) {
        const bytes_32 q = load_nibbles(w + 2);
        return {vsubq_s8(q.lo, vdupq_n_s8(8)), vsubq_s8(q.hi, vdupq_n_s8(8))};
    }
};

struct codes_q4_1 {
    static constexpr int row_type = row_type_q4_1;
    using block = block_q4_1;
    static bytes_32 load(const uint8_t * w) { return load_nibbles(w + 4); }
};

struct codes_q8_0 {
    static constexpr int row_type = row_type_q8_0;
    using block = block_q8_0;
    static bytes_32 load(const uint8_t * w) { return load_32(w + 2); }
};

struct x_blocks {
    int8_t q[group_size][32];
    float d[group_size];
};

// What all types of 32-value blocks share.
template <class Codes>
struct blocks_of {
    static constexpr int row_type = Codes::row_type;
    using block = typename Codes::block;
    static constexpr int group_blocks = group_size;
    static constexpr size_t group_bytes = group_size * sizeof(block);

    static void pack_block(x_blocks & g, int k, const float * x, block_scale s) {
        const bytes_32 q = quantize_32(x, s.inverse);
        vst1q_s8(g.q[k], q.lo);
        vst1q_s8(g.q[k] + 16, q.hi);
        g.d[k] = s.d;
    }
    static void pack_zero(x_blocks & g, int k) {
        __builtin_memset(g.q[k], 0, sizeof(g.q[k]));
        g.d[k] = 0.0f;
    }

    // sum + the blocks' dot products, each times its lane of d.
    template <bool part>
    static vf dot_codes(const uint8_t * w, const x_blocks & x, vf d, vf sum, int64_t n_left) {
        const auto dot = [&](int k) { return vcvtq_f32_s32(dot_bytes(Codes::load(w + k * sizeof(block)), load_32(x.q[k]))); };
        sum = vf_fma(dot(0), vdupq_laneq_f32(d, 0), sum);
        if (!part || n_left > 1) {
            sum = vf_fma(dot(1), vdupq_laneq_f32(d, 1), sum);
        }
        if (!part || n_left > 2) {
            sum = vf_fma(dot(2), vdupq_laneq_f32(d, 2), sum);
        }
        if (!part) {
            sum = vf_fma(dot(3), vdupq_laneq_f32(d, 3), sum);
        }
        return sum;
    }

    // The blocks k of R rows.
    template <int R>
    static void block_rows(const uint8_t * const * w, int k, const uint8_t ** out) {
        for (int r = 0; r < R; ++r) {
            out[r] = w[r] + k * sizeof(block);
        }
    }
};

// value = d * code
template <class Codes>
struct blocks_scaled : blocks_of<Codes> {
    using typename blocks_of<Codes>::block;
    using x_group = x_blocks;

    static void pack_sums(x_group &) {}

    template <bool part>
    static vf dot(const uint8_t * w, const x_group & x, vf sum, int64_t n_left) {
        const vf d = vmulq_f32(load_scales<block, 0>(w), vf_load(x.d));
        return blocks_of<Codes>::template dot_codes<part>(w, x, d, sum, n_left);
    }

    template <int R>
    struct scales {
        float d[4 * R];  // [4 * r + k]
    };

    template <int R>
    struct row_scales {
        const float * scale;
        explicit row_scales(const float * s) : scale(s) {}
        scales<R> of_group(const uint8_t * const * w) const {
            scales<R> c;
            load_row_scales<block, 0, R>(w, scale, c.d);
            return c;
        }
    };

    template <int R>
    static void add(const uint8_t * const * w, int k, const scales<R> & c, float * y) {
        const uint8_t * at[R];
        blocks_of<Codes>::template block_rows<R>(w, k, at);
        vf sum[8];
        for (int j = 0; j < 8; ++j) {
            sum[j] = vf_load(y + 4 * j);
        }
        add_codes<Codes, R>(at, c.d + k, sum);
        for (int j = 0; j < 8; ++j) {
            vf_store(y + 4 * j, sum[j]);
        }
    }

    static void unpack(const uint8_t * w, float * out) {
        vf v[8];
        convert_32(Codes::load(w), v);
        for (int j = 0; j < 8; ++j) {
            vf_store(out + 4 * j, vmulq_n_f32(v[j], half_at(w)));
        }
    }
};

// value = d * code + m
template <class Codes>
struct blocks_shifted : blocks_of<Codes> {
    using typename blocks_of<Codes>::block;

    struct x_group : x_blocks {
        float sum[group_size];  // d * sum of q
    };

    static void pack_sums(x_group & g) {
        const int8x16_t one = vdupq_n_s8(1);
        for (int k = 0; k < group_size; ++k) {
            g.sum[k] = g.d[k] * float(vaddvq_s32(dot_bytes(load_32(g.q[k]), {one, one})));
        }
    }

    template <bool part>
    static vf dot(const uint8_t * w, const x_group & x, vf sum, int64_t n_left) {
        const vf d = vmulq_f32(load_scales<block, 0>(w), vf_load(x.d));
        const vf m = load_scales<block, 1>(w);
        sum = vf_fma(part ? vf_first(m, n_left) : m, vf_load(x.sum), sum);
        return blocks_of<Codes>::template dot_codes<part>(w, x, d, sum, n_left);
    }

    template <int R>
    struct scales_and_minima {
        float d[4 * R];     // [4 * r + k]
        float m[group_size];  // per block, summed over the rows
    };

    template <int R>
    struct row_scales {
        const float * scale;
        explicit row_scales(const float * s) : scale(s) {}
        scales_and_minima<R> of_group(const uint8_t * const * w) const {
            scales_and_minima<R> c;
            load_row_scales<block, 0, R>(w, scale, c.d);
            vf m = vf_zero();
            for (int r = 0; r < R; ++r) {
                m = vf_fma(vf_set(scale[r]), load_scales<block, 1>(w[r]), m);
            }
            vf_store(c.m, m);
            return c;
        }
    };

    template <int R>
    static void add(const uint8_t * const * w, int k, const scales_and_minima<R> & c, float * y) {
        const uint8_t * at[R];
        blocks_of<Codes>::template block_rows<R>(w, k, at);
        vf sum[8];
        for (int j = 0; j < 8; ++j) {
            sum[j] = vf_add(vf_load(y + 4 * j), vf_set(c.m[k]));
        }
        add_codes<Codes, R>(at, c.d + k, sum);
        for (int j = 0; j < 8; ++j) {
            vf_store(y + 4 * j, sum[j]);
        }
    }

    static void unpack(const uint8_t * w, float * out) {
        vf v[8];
        convert_32(Codes::load(w), v);
        for (int j = 0; j < 8; ++j) {
            vf_store(out + 4 * j, vf_fma(vf_set(half_at(w)), v[j], vf_set(half_at(w + 2))));
        }
    }
};

#include "kernel-body.inl"

constexpr row_kernels rows[] = {
    kernels_values<values_f32>,
    kernels_values<values_f16>,
    kernels_values<values_bf16>,
    kernels_blocks<blocks_scaled<codes_q4_0>>,
    kernels_blocks<blocks_shifted<codes_q4_1>>,
    kernels_blocks<blocks_scaled<codes_q8_0>>,
};

}  // namespace

const kernel_table kernels_neon = {
    "neon", cpu_has_neon, rows, sizeof(rows) / sizeof(rows[0]), matmul_nt, matmul_nn_add, add, silu,
};

}  // namespace powerinfer
