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

// Values 0 .. 3 and 4 .. 7 of 8 bytes.
struct floats_8 {
    vf lo;
    vf hi;
};

floats_8 convert_8(uint8x8_t bytes) {
    const uint16x8_t wide = vmovl_u8(bytes);
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_high_u16(wide))};
}

vf half_at(const uint8_t * p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(load_as<uint16_t>(p))));
}

bytes_32 and_32(bytes_32 a, int bits) {
    return {vandq_s8(a.lo, vdupq_n_s8(int8_t(bits))), vandq_s8(a.hi, vdupq_n_s8(int8_t(bits)))};
}

bytes_32 or_32(bytes_32 a, bytes_32 b) {
    return {vorrq_s8(a.lo, b.lo), vorrq_s8(a.hi, b.hi)};
}

bytes_32 sub_32(bytes_32 a, int value) {
    return {vsubq_s8(a.lo, vdupq_n_s8(int8_t(value))), vsubq_s8(a.hi, vdupq_n_s8(int8_t(value)))};
}

// Bytes shifted left by n bits, right by -n: zeros come in from both sides.
int8x16_t shift_16(int8x16_t a, int n) {
    return vreinterpretq_s8_u8(vshlq_u8(vreinterpretq_u8_s8(a), vdupq_n_s8(int8_t(n))));
}

bytes_32 shift_32(bytes_32 a, int n) {
    return {shift_16(a.lo, n), shift_16(a.hi, n)};
}

// The low halves of 16 bytes, then the high ones.
bytes_32 load_nibbles(const uint8_t * p) {
    const int8x16_t bytes = load_as<int8x16_t>(p);
    return {vandq_s8(bytes, vdupq_n_s8(15)), shift_16(bytes, -4)};
}

// 16 in byte i where bit i of two bytes is set, else 0.
int8x16_t fifth_bits_16(const uint8_t * h) {
    const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t set = vtstq_u8(vcombine_u8(vdup_n_u8(h[0]), vdup_n_u8(h[1])), bit);
    return vreinterpretq_s8_u8(vandq_u8(set, vdupq_n_u8(16)));
}

bytes_32 load_nibbles_and_fifth_bits(const uint8_t * q, const uint8_t * h) {
    return or_32(load_nibbles(q), {fifth_bits_16(h), fifth_bits_16(h + 2)});
}

// Decoders. A group is 128 or 256 values of a row, from w on. codes(w, k): its values 32 k .. 32 k + 31 as int8; coefs(w, d, m):
// value = d * code + m, one m and n_parts d for each 32 values. Past the end of a row d and m are whatever lies there.

template <int row_type_, class Block, bool has_minimum_>
struct groups_of_4 {
    static constexpr int row_type = row_type_;
    using block = Block;
    static constexpr int64_t block_n = block_values;
    static constexpr int group_blocks = 4;
    static constexpr size_t group_bytes = 4 * sizeof(Block);
    static constexpr int n_parts = 1;
    static constexpr bool has_minimum = has_minimum_;

    static const uint8_t * block_at(const uint8_t * w, int k) { return w + k * sizeof(Block); }

    static vf halves_at(const uint8_t * w, size_t offset) {
        const auto half = [&](int k) { return load_as<uint16_t>(block_at(w, k) + offset); };
        const uint16x4_t halves = {half(0), half(1), half(2), half(3)};
        return vcvt_f32_f16(vreinterpret_f16_u16(halves));
    }
    static void coefs(const uint8_t * w, vf * d, vf * m) {
        d[0] = halves_at(w, 0);
        m[0] = has_minimum ? halves_at(w, 2) : vf_zero();
    }
};

struct codes_q4_0 : groups_of_4<row_type_q4_0, block_q4_0, false> {
    static bytes_32 codes(const uint8_t * w, int k) { return sub_32(load_nibbles(block_at(w, k) + 2), 8); }
};

struct codes_q4_1 : groups_of_4<row_type_q4_1, block_q4_1, true> {
    static bytes_32 codes(const uint8_t * w, int k) { return load_nibbles(block_at(w, k) + 4); }
};

struct codes_q5_0 : groups_of_4<row_type_q5_0, block_q5_0, false> {
    static bytes_32 codes(const uint8_t * w, int k) {
        const uint8_t * b = block_at(w, k);
        return sub_32(load_nibbles_and_fifth_bits(b + 6, b + 2), 16);
    }
};

struct codes_q5_1 : groups_of_4<row_type_q5_1, block_q5_1, true> {
    static bytes_32 codes(const uint8_t * w, int k) {
        const uint8_t * b = block_at(w, k);
        return load_nibbles_and_fifth_bits(b + 8, b + 4);
    }
};

struct codes_q8_0 : groups_of_4<row_type_q8_0, block_q8_0, false> {
    static bytes_32 codes(const uint8_t * w, int k) { return load_32(block_at(w, k) + 2); }
};

struct codes_iq4_nl : groups_of_4<row_type_iq4_nl, block_iq4_nl, false> {
    static bytes_32 codes(const uint8_t * w, int k) {
        const bytes_32 q = load_nibbles(block_at(w, k) + 2);
        const int8x16_t values = load_as<int8x16_t>(iq4_nl_values);
        return {vqtbl1q_s8(values, vreinterpretq_u8_s8(q.lo)), vqtbl1q_s8(values, vreinterpretq_u8_s8(q.hi))};
    }
};

template <int row_type_, class Block, int n_parts_, bool has_minimum_>
struct group_of_256 {
    static constexpr int row_type = row_type_;
    using block = Block;
    static constexpr int64_t block_n = super_values;
    static constexpr int group_blocks = 8;
    static constexpr size_t group_bytes = sizeof(Block);
    static constexpr int n_parts = n_parts_;
    static constexpr bool has_minimum = has_minimum_;
};

// Q4_K and Q5_K.
template <int row_type_, class Block>
struct group_with_6_bit_scales : group_of_256<row_type_, Block, 1, true> {
    static void coefs(const uint8_t * w, vf * d, vf * m) {
        const uint32_t a = load_as<uint32_t>(w + 4), b = load_as<uint32_t>(w + 8), c = load_as<uint32_t>(w + 12);
        const auto six = [](uint32_t low, uint32_t high) {
            return convert_8(vcreate_u8((low & 0x3f3f3f3f) | uint64_t((high & 0x0f0f0f0f) | (low >> 2 & 0x30303030)) << 32));
        };
        const floats_8 scale = six(a, c), minimum = six(b, c >> 4);
        const vf all_d = half_at(w), all_m = vnegq_f32(half_at(w + 2));
        d[0] = vmulq_f32(all_d, scale.lo);
        d[1] = vmulq_f32(all_d, scale.hi);
        m[0] = vmulq_f32(all_m, minimum.lo);
        m[1] = vmulq_f32(all_m, minimum.hi);
    }
    static bytes_32 nibbles(const uint8_t * q, int k) {
        return and_32(shift_32(load_32(q + 32 * (k / 2)), k % 2 * -4), 15);
    }
};

struct codes_q4_k : group_with_6_bit_scales<row_type_q4_k, block_q4_k> {
    static bytes_32 codes(const uint8_t * w, int k) { return nibbles(w + 16, k); }
};

struct codes_q5_k : group_with_6_bit_scales<row_type_q5_k, block_q5_k> {
    static bytes_32 codes(const uint8_t * w, int k) {
        return or_32(nibbles(w + 48, k), and_32(shift_32(load_32(w + 16), 4 - k), 16));
    }
};

struct codes_q6_k : group_of_256<row_type_q6_k, block_q6_k, 2, false> {
    static bytes_32 codes(const uint8_t * w, int k) {
        const int quarter = k % 4;
        const bytes_32 low = shift_32(load_32(w + 64 * (k / 4) + 32 * (quarter % 2)), quarter / 2 * -4);
        const bytes_32 high = shift_32(load_32(w + 128 + 32 * (k / 4)), 4 - 2 * quarter);
        return sub_32(or_32(and_32(low, 15), and_32(high, 48)), 32);
    }
    static void coefs(const uint8_t * w, vf * d, vf *) {
        const vf all = half_at(w + 208);
        const int8x16_t scales = load_as<int8x16_t>(w + 192);
        const int16x8_t wide[2] = {vmovl_s8(vget_low_s8(scales)), vmovl_high_s8(scales)};
        for (int i = 0; i < 2; ++i) {
            d[2 * i] = vmulq_f32(all, vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide[i]))));
            d[2 * i + 1] = vmulq_f32(all, vcvtq_f32_s32(vmovl_high_s16(wide[i])));
        }
    }
};

#define KERNEL_BODY_WITHOUT_CODE_BLOCKS
#include "kernel-body.inl"

// Rows of blocks by their decoder D: the form that kernel-body.inl asks for.
template <class D>
struct blocks_of {
    static constexpr int row_type = D::row_type;
    using block = typename D::block;
    static constexpr int64_t block_n = D::block_n;
    static constexpr int group_blocks = D::group_blocks;
    static constexpr size_t group_bytes = D::group_bytes;
    static constexpr int n_d = group_blocks * D::n_parts;

    struct x_group {
        int8_t q[group_blocks][32];
        float d[group_blocks];
        float sum[group_blocks];  // d * sum of q
    };

    static void pack_block(x_group & g, int k, const float * x, block_scale s) {
        const bytes_32 q = quantize_32(x, s.inverse);
        const int8x16_t one = vdupq_n_s8(1);
        vst1q_s8(g.q[k], q.lo);
        vst1q_s8(g.q[k] + 16, q.hi);
        g.d[k] = s.d;
        g.sum[k] = s.d * float(vaddvq_s32(dot_bytes(q, {one, one})));
    }
    static void pack_zero(x_group & g, int k) {
        __builtin_memset(g.q[k], 0, sizeof(g.q[k]));
        g.d[k] = g.sum[k] = 0.0f;
    }
    static void pack_sums(x_group &) {}

    template <bool part>
    static vf dot(const uint8_t * w, const x_group & x, vf sum, int64_t n_left) {
        vf d[n_d / 4], m[group_blocks / 4];
        D::coefs(w, d, m);
        for (int i = 0; D::has_minimum && i < group_blocks / 4; ++i) {
            sum = vf_fma(part ? vf_first(m[i], n_left - 4 * i) : m[i], vf_load(x.sum + 4 * i), sum);
        }
        for (int i = 0; i < group_blocks / 4; ++i) {
            const vf x_d = vf_load(x.d + 4 * i);
            if constexpr (D::n_parts == 1) {
                d[i] = vmulq_f32(d[i], x_d);
            } else {
                d[2 * i] = vmulq_f32(d[2 * i], vzip1q_f32(x_d, x_d));
                d[2 * i + 1] = vmulq_f32(d[2 * i + 1], vzip2q_f32(x_d, x_d));
            }
        }
        for (int k = 0; k < (part ? int(n_left) : group_blocks); ++k) {
            const bytes_32 q = D::codes(w, k), x_q = load_32(x.q[k]);
            if constexpr (D::n_parts == 1) {
                sum = vf_fma(vf_set(d[k / 4][k % 4]), vcvtq_f32_s32(dot_bytes(q, x_q)), sum);
            } else {
                const int32x4_t zero = vdupq_n_s32(0);
                sum = vf_fma(vf_set(d[k / 2][k % 2 * 2]), vcvtq_f32_s32(vdotq_s32(zero, q.lo, x_q.lo)), sum);
                sum = vf_fma(vf_set(d[k / 2][k % 2 * 2 + 1]), vcvtq_f32_s32(vdotq_s32(zero, q.hi, x_q.hi)), sum);
            }
        }
        return sum;
    }

    // Coefficients of a group of R rows, times the scale of the row; minima summed over the rows.
    template <int R>
    struct row_coefs {
        float d[R][n_d];
        float m[group_blocks];
    };

    template <int R>
    struct row_scales {
        const float * scale;
        explicit row_scales(const float * s) : scale(s) {}
        row_coefs<R> of_group(const uint8_t * const * w) const {
            row_coefs<R> c;
            vf all_m[group_blocks / 4];
            for (int r = 0; r < R; ++r) {
                const vf s = vf_set(scale[r]);
                vf d[n_d / 4], m[group_blocks / 4];
                D::coefs(w[r], d, m);
                for (int i = 0; i < n_d / 4; ++i) {
                    vf_store(c.d[r] + 4 * i, vmulq_f32(s, d[i]));
                }
                for (int i = 0; D::has_minimum && i < group_blocks / 4; ++i) {
                    all_m[i] = r == 0 ? vmulq_f32(s, m[i]) : vf_fma(s, m[i], all_m[i]);
                }
            }
            for (int i = 0; D::has_minimum && i < group_blocks / 4; ++i) {
                vf_store(c.m + 4 * i, all_m[i]);
            }
            return c;
        }
    };

    template <int R, bool fresh>
    static void add(const uint8_t * const * w, int k, const row_coefs<R> & c, float * y) {
        y += 32 * k;
        vf sum[8];
        for (int j = 0; j < 8; ++j) {
            sum[j] = load_y<fresh>(y + 4 * j);
            sum[j] = D::has_minimum ? vf_add(sum[j], vf_set(c.m[k])) : sum[j];
        }
        for (int r = 0; r < R; ++r) {
            vf v[8];
            convert_32(D::codes(w[r], k), v);
            for (int j = 0; j < 8; ++j) {
                sum[j] = vf_fma(vf_set(c.d[r][k * D::n_parts + j * D::n_parts / 8]), v[j], sum[j]);
            }
        }
        for (int j = 0; j < 8; ++j) {
            vf_store(y + 4 * j, sum[j]);
        }
    }
};

constexpr row_kernels rows[] = {
    kernels_values<values_f32>,
    kernels_values<values_f16>,
    kernels_values<values_bf16>,
    kernels_blocks<blocks_of<codes_q4_0>>,
    kernels_blocks<blocks_of<codes_q4_1>>,
    kernels_blocks<blocks_of<codes_q5_0>>,
    kernels_blocks<blocks_of<codes_q5_1>>,
    kernels_blocks<blocks_of<codes_q8_0>>,
    kernels_blocks<blocks_of<codes_q4_k>>,
    kernels_blocks<blocks_of<codes_q5_k>>,
    kernels_blocks<blocks_of<codes_q6_k>>,
    kernels_blocks<blocks_of<codes_iq4_nl>>,
};

}  // namespace

const kernel_table kernels_neon = {
    "neon", cpu_has_neon, rows, sizeof(rows) / sizeof(rows[0]), matmul_nt, matmul_nn_add, add, silu, nullptr,
};

}  // namespace powerinfer
