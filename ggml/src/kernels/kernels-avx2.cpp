// The AVX2 set (AVX2, FMA, F16C, BMI).
// Includes nothing but the table, the body and intrinsics: see STYLE.md, "Who may include what".
#include "kernel-table.h"
#include "row-types.h"

#include <cstddef>
#include <cstdint>
#include <immintrin.h>

namespace powerinfer {

namespace {

using vf = __m256;
constexpr int64_t vf_n = 8;
constexpr int matmul_v = 4;    // 2 x 4 sums
constexpr int matmul_n_x = 2;  // 2 x 4 sums, 4 rows of w and one of x: 13 of 16 registers

__m256i first_lanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count > 8 ? 8 : int(count)), _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0));
}

vf vf_zero() { return _mm256_setzero_ps(); }
vf vf_set(float value) { return _mm256_set1_ps(value); }
vf vf_load(const float * p) { return _mm256_loadu_ps(p); }
vf vf_load_part(const float * p, int64_t count) { return _mm256_maskload_ps(p, first_lanes(count)); }
void vf_store(float * p, vf v) { _mm256_storeu_ps(p, v); }
void vf_store_part(float * p, vf v, int64_t count) { _mm256_maskstore_ps(p, first_lanes(count), v); }
vf vf_first(vf v, int64_t count) { return _mm256_and_ps(v, _mm256_castsi256_ps(first_lanes(count))); }
vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
uint32_t vf_nonzero(vf a) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ))); }

vf vf_set2(float even, float odd) { return _mm256_blend_ps(vf_set(even), vf_set(odd), 0xaa); }

vf vf_permute(vf v, const int32_t * index) {
    return _mm256_permutevar8x32_ps(v, _mm256_load_si256(reinterpret_cast<const __m256i *>(index)));
}

vf vf_add_odd(vf sum, vf v) {
    return _mm256_add_ps(sum, _mm256_blend_ps(vf_zero(), v, 0xaa));
}

using vi = __m256i;
constexpr int vi_bytes = 32;

vi vi_zero() { return _mm256_setzero_si256(); }
vi vi_load(const void * p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
void vi_store(void * p, vi v) { _mm256_storeu_si256(static_cast<__m256i *>(p), v); }
vi vi_negative(vi v) { return _mm256_sub_epi32(vi_zero(), v); }
vi vi_set_bytes(int value) { return _mm256_set1_epi8(char(value)); }
vf vf_of_ints(vi v) { return _mm256_cvtepi32_ps(v); }

vf vf_of_bytes(const int8_t * p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}

// a * 2^n for whole n in [-252, 254], in two factors: 2^n alone may lie outside the float range.
vf vf_scale2(vf a, vf n) {
    const __m256i whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256i f0 = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    const __m256i f1 = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(a, _mm256_castsi256_ps(f0)), _mm256_castsi256_ps(f1));
}

// total: (4) the sums of a, b, c and d.
void vf_sum4(vf a, vf b, vf c, vf d, float * total) {
    const vf abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(total, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

__m128i load_16(const uint8_t * p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}

vf vf_load_f16(const uint8_t * p) {
    return _mm256_cvtph_ps(load_16(p));
}

vf vf_load_bf16(const uint8_t * p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(p)), 16));
}

// How a block of x is quantized: q = round(x * inverse), x ~ q * d. See kernels-scalar.cpp.
struct block_scale {
    float d;
    float inverse;
};

block_scale block_scale_of(const float * x) {
    const vf sign = vf_set(-0.0f);
    vf largest = vf_zero();
    vf finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    for (int j = 0; j < 32; j += 8) {
        const vf magnitude = _mm256_andnot_ps(sign, vf_load(x + j));
        finite = _mm256_and_ps(finite, _mm256_cmp_ps(magnitude, vf_set(__FLT_MAX__), _CMP_LE_OQ));
        largest = vf_max(largest, magnitude);
    }
    if (_mm256_movemask_ps(finite) != 0xff) {
        return {__builtin_nanf(""), 0.0f};
    }
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_movehdup_ps(m));
    const float x_max = _mm_cvtss_f32(m);
    return x_max >= 0x1p-100f ? block_scale{x_max / 127.0f, 127.0f / x_max} : block_scale{0.0f, 0.0f};
}

// 32 values of x as int8; all zero when inverse is 0, whatever x is.
__m256i quantize_32(const float * x, float inverse) {
    if (inverse == 0.0f) {
        return _mm256_setzero_si256();
    }
    __m256i q[4];
    for (int j = 0; j < 4; ++j) {
        q[j] = _mm256_cvtps_epi32(_mm256_mul_ps(vf_load(x + 8 * j), vf_set(inverse)));
    }
    // Packing works per 128-bit lane; the permutation puts the fours of bytes back in order.
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));
}

void store_quantized(const float * x, float inverse, int8_t * q0, int8_t * q1) {
    const __m256i q = quantize_32(x, inverse);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(q0), _mm256_castsi256_si128(q));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(q1), _mm256_extracti128_si256(q, 1));
}

// Sums of neighbouring fours of u * s: u (32) uint8, s (32) int8, the sum of two products within int16.
__m256i dot_bytes(__m256i u, __m256i s) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
}

#include "kernel-body.inl"

constexpr int group_size = 4;  // blocks per group of Q8_0

// One number per block of a group, for up to 4 rows: c[4 * r + k].
struct group_scales {
    alignas(16) float c[16];
};

// d of each block of a group at w, times scale.
void load_scales(const uint8_t * w, __m128 scale, float * out) {
    uint16_t h[group_size];
    for (int k = 0; k < group_size; ++k) {
        __builtin_memcpy(&h[k], w + k * sizeof(block_q8_0), sizeof(h[k]));
    }
    const __m128i halves = _mm_set_epi16(0, 0, 0, 0, short(h[3]), short(h[2]), short(h[1]), short(h[0]));
    _mm_store_ps(out, _mm_mul_ps(scale, _mm_cvtph_ps(halves)));
}

// 32 int8 as four vectors of floats.
void convert_32(__m256i bytes, vf * out) {
    const __m128i lo = _mm256_castsi256_si128(bytes);
    const __m128i hi = _mm256_extracti128_si256(bytes, 1);
    out[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(lo));
    out[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(lo, lo)));
    out[2] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(hi));
    out[3] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(hi, hi)));
}

struct blocks_q8_0 {
    static constexpr int row_type = row_type_q8_0;
    using block = block_q8_0;
    static constexpr int64_t block_n = block_values;
    static constexpr int group_blocks = group_size;
    static constexpr size_t group_bytes = group_size * sizeof(block);

    struct x_group {
        int8_t q[group_size][32];
        float d[group_size];
    };

    static void pack_block(x_group & g, int k, const float * x, block_scale s) {
        vi_store(g.q[k], quantize_32(x, s.inverse));
        g.d[k] = s.d;
    }
    static void pack_zero(x_group & g, int k) {
        vi_store(g.q[k], _mm256_setzero_si256());
        g.d[k] = 0.0f;
    }
    static void pack_sums(x_group &) {}

    template <bool part>
    static vf dot(const uint8_t * w, const x_group & x, vf sum, int64_t n_left) {
        group_scales d;
        load_scales(w, _mm_loadu_ps(x.d), d.c);
        for (int k = 0; k < (part ? int(n_left) : group_size); ++k) {
            // |w| * (x with the sign of w): 2 * 128 * 127 fits an int16.
            const __m256i q = vi_load(w + k * sizeof(block) + 2);
            const __m256i i = dot_bytes(_mm256_sign_epi8(q, q), _mm256_sign_epi8(vi_load(x.q[k]), q));
            sum = vf_fma(vf_set(d.c[k]), _mm256_cvtepi32_ps(i), sum);
        }
        return sum;
    }

    template <int R>
    struct row_scales {
        const float * scale;
        explicit row_scales(const float * s) : scale(s) {}
        group_scales of_group(const uint8_t * const * w) const {
            group_scales c;
            for (int r = 0; r < R; ++r) {
                load_scales(w[r], _mm_set1_ps(scale[r]), c.c + 4 * r);
            }
            return c;
        }
    };

    template <int R, bool fresh>
    static void add(const uint8_t * const * w, int k, const group_scales & c, float * y_group) {
        float * y = y_group + k * block_values;
        vf sum[4] = {load_y<fresh>(y), load_y<fresh>(y + 8), load_y<fresh>(y + 16), load_y<fresh>(y + 24)};
        for (int r = 0; r < R; ++r) {
            vf v[4];
            convert_32(vi_load(w[r] + k * sizeof(block) + 2), v);
            const vf cr = vf_set(c.c[4 * r + k]);
            for (int j = 0; j < 4; ++j) {
                sum[j] = vf_fma(cr, v[j], sum[j]);
            }
        }
        for (int j = 0; j < 4; ++j) {
            vf_store(y + 8 * j, sum[j]);
        }
    }
};

// Decoders for code_blocks: see kernel-body.inl. Codes are in the order of the values, one block of 32 per vector.

uint16_t load_u16(const uint8_t * p) {
    uint16_t value;
    __builtin_memcpy(&value, p, sizeof(value));
    return value;
}

uint32_t load_u32(const uint8_t * p) {
    uint32_t value;
    __builtin_memcpy(&value, p, sizeof(value));
    return value;
}

// The 32 codes of a 4-bit block in the order of its values.
__m256i load_codes(const uint8_t * q) {
    const __m128i bytes = load_16(q);
    const __m256i wide = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1);
    return _mm256_and_si256(wide, _mm256_set1_epi8(15));
}

struct codes_base {
    static constexpr int panel_vectors = 1;
    static constexpr int chunk(int i) { return i; }
    static vi dot(vi sum, vi codes, const int8_t * x) { return _mm256_add_epi32(sum, dot_bytes(codes, vi_load(x))); }
};

template <class Block>
struct codes_of_4 : codes_base {
    using block = Block;
    static constexpr int64_t block_n = block_values;
    static constexpr int group_blocks = 4;
    static constexpr size_t group_bytes = 4 * sizeof(Block);
    static constexpr int part_chunks = 2;

    // All ones in the bytes whose bit of h is set.
    static vi spread_bits(const uint8_t * h) {
        const vi byte_of = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
        const vi bit_of = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
        const vi bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(int(load_u32(h))), byte_of);
        return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
    }
    static constexpr int part_coefs = 2;
    // d of each block, and what follows it: m, or no number at all. Loading the halves one by one is slower.
    static coef_lanes coefs(const uint8_t * w) {
        const auto pair = [&](int k) { return int(load_u32(w + k * sizeof(Block))); };
        return {{_mm256_cvtph_ps(_mm_set_epi32(pair(3), pair(2), pair(1), pair(0))), vf_zero()}};
    }
};

struct codes_q4_0 : codes_of_4<block_q4_0> {
    static constexpr int row_type = row_type_q4_0;
    static constexpr int offset = 8;
    static constexpr bool has_minimum = false;
    static constexpr int minimum_sign = 1;
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        for (int k = 0; k < 4; ++k) {
            const vi code = load_codes(w + k * sizeof(block) + 2);
            q[k] = is_signed ? _mm256_sub_epi8(code, vi_set_bytes(offset)) : code;
        }
    }
};

struct codes_q4_1 : codes_of_4<block_q4_1> {
    static constexpr int row_type = row_type_q4_1;
    static constexpr int offset = 0;
    static constexpr bool has_minimum = true;
    static constexpr int minimum_sign = 1;
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        for (int k = 0; k < 4; ++k) {
            q[k] = load_codes(w + k * sizeof(block) + 4);
        }
    }
};

struct codes_q5_0 : codes_of_4<block_q5_0> {
    static constexpr int row_type = row_type_q5_0;
    static constexpr int offset = 16;
    static constexpr bool has_minimum = false;
    static constexpr int minimum_sign = 1;
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        for (int k = 0; k < 4; ++k, w += sizeof(block)) {
            const vi low = load_codes(w + 6);
            const vi set = spread_bits(w + 2);
            const vi high = is_signed ? _mm256_andnot_si256(set, vi_set_bytes(-16)) : _mm256_and_si256(set, vi_set_bytes(16));
            q[k] = _mm256_or_si256(low, high);
        }
    }
};

struct codes_q5_1 : codes_of_4<block_q5_1> {
    static constexpr int row_type = row_type_q5_1;
    static constexpr int offset = 0;
    static constexpr bool has_minimum = true;
    static constexpr int minimum_sign = 1;
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        for (int k = 0; k < 4; ++k, w += sizeof(block)) {
            q[k] = _mm256_or_si256(load_codes(w + 8), _mm256_and_si256(spread_bits(w + 4), vi_set_bytes(16)));
        }
    }
};

// The values themselves are the codes: as uint8, with an offset of 128, sums of two products wouldn't fit an int16.
struct codes_iq4_nl : codes_of_4<block_iq4_nl> {
    static constexpr int row_type = row_type_iq4_nl;
    static constexpr int offset = 0;
    static constexpr bool has_minimum = false;
    static constexpr int minimum_sign = 1;
    static vi dot(vi sum, vi codes, const int8_t * x) {
        return _mm256_add_epi32(sum, dot_bytes(_mm256_abs_epi8(codes), _mm256_sign_epi8(vi_load(x), codes)));
    }
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        const vi values = _mm256_broadcastsi128_si256(load_16(reinterpret_cast<const uint8_t *>(iq4_nl_values)));
        for (int k = 0; k < 4; ++k) {
            q[k] = _mm256_shuffle_epi8(values, load_codes(w + k * sizeof(block) + 2));
        }
    }
};

template <class Block>
struct codes_of_parts : codes_base {
    using block = Block;
    static constexpr int64_t block_n = super_values;
    static constexpr int group_blocks = 8;
    static constexpr size_t group_bytes = sizeof(Block);
    static constexpr int part_chunks = 2;
    static constexpr int offset = 0;
    static constexpr bool has_minimum = true;
    static constexpr int part_coefs = 2;
    static constexpr int minimum_sign = -1;

    static void load_nibbles(const uint8_t * bytes, vi * q) {
        const vi low = vi_set_bytes(15);
        for (int k = 0; k < 4; ++k) {
            const vi both = vi_load(bytes + 32 * k);
            q[2 * k] = _mm256_and_si256(both, low);
            q[2 * k + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
    }
    static coef_lanes coefs(const uint8_t * w) {
        const uint32_t s_lo = load_u32(w + 4), b_lo = load_u32(w + 8), both = load_u32(w + 12);
        const uint32_t s_hi = (both & 0x0f0f0f0f) | (s_lo >> 2 & 0x30303030);
        const uint32_t b_hi = (both >> 4 & 0x0f0f0f0f) | (b_lo >> 2 & 0x30303030);
        const __m128i s = _mm_cvtsi64_si128(static_cast<long long>((s_lo & 0x3f3f3f3f) | uint64_t(s_hi) << 32));
        const __m128i b = _mm_cvtsi64_si128(static_cast<long long>((b_lo & 0x3f3f3f3f) | uint64_t(b_hi) << 32));
        const __m128i pairs = _mm_unpacklo_epi8(s, b);
        const vf d_m = _mm256_cvtph_ps(_mm_set1_epi32(int(load_u32(w))));
        return {{_mm256_mul_ps(d_m, vf_of_ints(_mm256_cvtepu8_epi32(pairs))),
                 _mm256_mul_ps(d_m, vf_of_ints(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(pairs, pairs))))}};
    }
};

struct codes_q4_k : codes_of_parts<block_q4_k> {
    static constexpr int row_type = row_type_q4_k;
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        load_nibbles(w + 16, q);
    }
};

struct codes_q5_k : codes_of_parts<block_q5_k> {
    static constexpr int row_type = row_type_q5_k;
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        const vi h = vi_load(w + 16);
        load_nibbles(w + 48, q);
        for (int p = 0; p < 8; ++p) {
            const vi at_4 = p < 4 ? _mm256_slli_epi16(h, 4 - p) : _mm256_srli_epi16(h, p - 4);
            q[p] = _mm256_or_si256(q[p], _mm256_and_si256(at_4, vi_set_bytes(16)));
        }
    }
};

struct codes_q6_k : codes_base {
    static constexpr int row_type = row_type_q6_k;
    using block = block_q6_k;
    static constexpr int64_t block_n = super_values;
    static constexpr int group_blocks = 8;
    static constexpr size_t group_bytes = sizeof(block);
    static constexpr int part_chunks = 1;
    static constexpr int offset = 32;
    static constexpr bool has_minimum = false;
    static constexpr int part_coefs = 1;
    static constexpr int minimum_sign = 1;

    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        const vi low = vi_set_bytes(15);
        const vi high = vi_set_bytes(48);
        for (int k = 0; k < 2; ++k, q += 4) {
            const vi q0 = vi_load(w + 64 * k);
            const vi q1 = vi_load(w + 64 * k + 32);
            const vi h = vi_load(w + 128 + 32 * k);
            const vi low_bits[4] = {q0, q1, _mm256_srli_epi16(q0, 4), _mm256_srli_epi16(q1, 4)};
            const vi high_bits[4] = {_mm256_slli_epi16(h, 4), _mm256_slli_epi16(h, 2), h, _mm256_srli_epi16(h, 2)};
            for (int c = 0; c < 4; ++c) {
                q[c] = _mm256_or_si256(_mm256_and_si256(low_bits[c], low), _mm256_and_si256(high_bits[c], high));
                if (is_signed) {
                    q[c] = _mm256_sub_epi8(q[c], vi_set_bytes(offset));
                }
            }
        }
    }
    static coef_lanes coefs(const uint8_t * w) {
        const vf d = vf_set(_cvtsh_ss(load_u16(w + 208)));
        const __m128i s = load_16(w + 192);
        return {{_mm256_mul_ps(d, vf_of_ints(_mm256_cvtepi8_epi32(s))),
                 _mm256_mul_ps(d, vf_of_ints(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(s, s))))}};
    }
};

constexpr row_kernels rows[] = {
    kernels_values<values_f32>,
    kernels_values<values_f16>,
    kernels_values<values_bf16>,
    kernels_blocks<code_blocks<codes_q4_0>>,
    kernels_blocks<code_blocks<codes_q4_1>>,
    kernels_blocks<code_blocks<codes_q5_0>>,
    kernels_blocks<code_blocks<codes_q5_1>>,
    kernels_blocks<blocks_q8_0>,
    kernels_blocks<code_blocks<codes_q4_k>>,
    kernels_blocks<code_blocks<codes_q5_k>>,
    kernels_blocks<code_blocks<codes_q6_k>>,
    kernels_blocks<code_blocks<codes_iq4_nl>>,
};

}  // namespace

const kernel_table kernels_avx2 = {
    "avx2", cpu_has_avx2, rows, sizeof(rows) / sizeof(rows[0]), matmul_nt, matmul_nn_add, add, silu, nullptr,
};

}  // namespace powerinfer
