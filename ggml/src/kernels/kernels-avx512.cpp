// The AVX-512 set (F, BW, DQ, VL, VNNI).
// Includes nothing but the table, the body and intrinsics: see STYLE.md, "Who may include what".
#include "kernel-table.h"
#include "row-types.h"

#include <cstddef>
#include <cstdint>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside GCC 12's intrinsics (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

namespace powerinfer {

namespace {

using vf = __m512;
constexpr int64_t vf_n = 16;
constexpr int matmul_v = 8;    // 2 x 8 sums
constexpr int matmul_n_x = 6;  // 6 x 4 sums, 4 rows of w and one of x: 29 of 32 registers

__mmask16 first_lanes(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1);
}

vf vf_zero() { return _mm512_setzero_ps(); }
vf vf_set(float value) { return _mm512_set1_ps(value); }
vf vf_load(const float * p) { return _mm512_loadu_ps(p); }
vf vf_load_part(const float * p, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }
void vf_store(float * p, vf v) { _mm512_storeu_ps(p, v); }
void vf_store_part(float * p, vf v, int64_t count) { _mm512_mask_storeu_ps(p, first_lanes(count), v); }
vf vf_first(vf v, int64_t count) { return _mm512_maskz_mov_ps(first_lanes(count), v); }
vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
vf vf_scale2(vf a, vf n) { return _mm512_scalef_ps(a, n); }

// GCC 12 may spill a mask that is widened to 64 bits as its 16 bits only, the rest of the slot being anything (seen with
// -O3 -fsanitize=address): the move to a general register is spelt out.
uint32_t vf_nonzero(vf a) {
    const __mmask16 mask = _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    uint32_t bits;
    __asm__("kmovw %1, %0" : "=r"(bits) : "k"(mask));
    return bits;
}

vf vf_load_f16(const uint8_t * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

vf vf_load_bf16(const uint8_t * p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

vf vf_set2(float even, float odd) {
    return _mm512_mask_mov_ps(vf_set(even), 0xaaaa, vf_set(odd));
}

vf vf_permute(vf v, const int32_t * index) {
    return _mm512_permutexvar_ps(_mm512_load_si512(index), v);
}

vf vf_add_odd(vf sum, vf v) {
    return _mm512_mask_add_ps(sum, 0xaaaa, sum, v);
}

using vi = __m512i;
constexpr int vi_bytes = 64;

vi vi_zero() { return _mm512_setzero_si512(); }
vi vi_load(const void * p) { return _mm512_loadu_si512(p); }
void vi_store(void * p, vi v) { _mm512_storeu_si512(p, v); }
vi vi_negative(vi v) { return _mm512_sub_epi32(vi_zero(), v); }
vi vi_set_bytes(int value) { return _mm512_set1_epi8(char(value)); }
vf vf_of_ints(vi v) { return _mm512_cvtepi32_ps(v); }

vf vf_of_bytes(const int8_t * p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}

// total: (4) the sums of a, b, c and d.
void vf_sum4(vf a, vf b, vf c, vf d, float * total) {
    const vf ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const vf cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d ab_d = _mm512_castps_pd(ab);
    const __m512d cd_d = _mm512_castps_pd(cd);
    const vf abcd = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab_d, cd_d)),
                                  _mm512_castpd_ps(_mm512_unpackhi_pd(ab_d, cd_d)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    _mm_storeu_ps(total, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

// How a block of x is quantized: q = round(x * inverse), x ~ q * d. See kernels-scalar.cpp.
struct block_scale {
    float d;
    float inverse;
};

block_scale block_scale_of(const float * x) {
    const vf magnitude = _mm512_max_ps(_mm512_abs_ps(vf_load(x)), _mm512_abs_ps(vf_load(x + 16)));
    const vf largest = vf_set(__FLT_MAX__);
    const bool finite = (_mm512_cmp_ps_mask(_mm512_abs_ps(vf_load(x)), largest, _CMP_LE_OQ) &
                         _mm512_cmp_ps_mask(_mm512_abs_ps(vf_load(x + 16)), largest, _CMP_LE_OQ)) == 0xffff;
    if (!finite) {
        return {__builtin_nanf(""), 0.0f};
    }
    const float x_max = _mm512_reduce_max_ps(magnitude);
    return x_max >= 0x1p-100f ? block_scale{x_max / 127.0f, 127.0f / x_max} : block_scale{0.0f, 0.0f};
}

// 16 values of x as int8; all zero when inverse is 0, whatever x is.
__m128i quantize_16(const float * x, float inverse) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(vf_load(x), vf_set(inverse)));
    return _mm512_cvtepi32_epi8(_mm512_maskz_mov_epi32(inverse != 0.0f ? 0xffff : 0, q));
}

void store_quantized(const float * x, float inverse, int8_t * q0, int8_t * q1) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(q0), quantize_16(x, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(q1), quantize_16(x + 16, inverse));
}

// Sums of 4 neighbouring int8.
__m512i sum_bytes(const int8_t * q) {
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), _mm512_loadu_si512(q));
}

void store_16(void * p, __m128i v) {
    _mm_storeu_si128(static_cast<__m128i *>(p), v);
}

__m128i load_16(const uint8_t * p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}

#include "kernel-body.inl"

// The nibble bytes of 4 blocks, whose first 16 lie at p.
template <class Block>
__m512i load_4x16(const uint8_t * p) {
    __m512i v = _mm512_castsi128_si512(load_16(p));
    v = _mm512_mask_broadcast_i32x4(v, 0x00f0, load_16(p + sizeof(Block)));
    v = _mm512_mask_broadcast_i32x4(v, 0x0f00, load_16(p + 2 * sizeof(Block)));
    return _mm512_mask_broadcast_i32x4(v, 0xf000, load_16(p + 3 * sizeof(Block)));
}

// Half i_half of each block of a group as f32, spread over the lanes of a dot: 16 / n_blocks lanes per block.
template <class Block, int n_blocks, int i_half>
vf load_scales(const uint8_t * w, __mmask16 lanes) {
    alignas(64) static constexpr struct table {
        uint16_t index[32];
        constexpr table() : index() {
            for (int i = 0; i < 16; ++i) {
                index[i] = uint16_t(i * n_blocks / 16 * (sizeof(Block) / 2) + i_half);
            }
        }
    } t;
    const __m512i words = _mm512_permutexvar_epi16(_mm512_load_si512(t.index), _mm512_loadu_si512(w));
    return _mm512_maskz_cvtph_ps(lanes, _mm512_castsi512_si256(words));
}

// Lanes of a dot that belong to the first n_left of n_blocks blocks.
template <bool part, int n_blocks>
__mmask16 block_lanes(int64_t n_left) {
    return part ? first_lanes(n_left * 16 / n_blocks) : 0xffff;
}

// Coefficients of one group of blocks for R rows: c[4 * r + k] = scale[r] * half i_half of block k of row r.
struct group_scales {
    alignas(64) float c[16];
};

template <class Block, int n_blocks, int R, int i_half>
void group_scales_of(const uint8_t * const * w, vf scale, group_scales & out) {
    alignas(64) static constexpr struct table {
        uint16_t index[32];
        constexpr table() : index() {
            for (int i = 0; i < 16; ++i) {
                index[i] = uint16_t(i % n_blocks * (sizeof(Block) / 2) + i_half);
            }
        }
    } t;
    const __m512i index = _mm512_load_si512(t.index);
    __m512i words = _mm512_permutexvar_epi16(index, _mm512_loadu_si512(w[0]));
    for (int r = 1; r < R; ++r) {
        words = _mm512_mask_permutexvar_epi16(words, 0xfu << 4 * r, index, _mm512_loadu_si512(w[r]));
    }
    _mm512_store_ps(out.c, _mm512_mul_ps(scale, _mm512_cvtph_ps(_mm512_castsi512_si256(words))));
    // Broadcasting from memory is free; without this the compiler keeps c in a register and shuffles each one out,
    // on the one port that the lookups of `add` need (11 instead of 16 GB/s in cache).
    __asm__("" : "+m"(out));
}

// scale[r] in lanes 4 r .. 4 r + 3.
template <int R>
vf spread_scales(const float * scale) {
    const vf s = vf_load_part(scale, R);
    return _mm512_permutexvar_ps(_mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0), s);
}

// Values of a 4-bit code, for a lookup that reads only the low 4 bits of its index.
vf code_values(float first) {
    return _mm512_add_ps(vf_set(first), _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
}

struct blocks_q4_0 {
    static constexpr int row_type = row_type_q4_0;
    using block = block_q4_0;
    static constexpr int64_t block_n = block_values;
    static constexpr int group_blocks = 4;
    static constexpr size_t group_bytes = group_blocks * sizeof(block);

    struct x_group {
        int8_t lo[64];       // values 0 .. 15 of each block
        int8_t hi[64];       // values 16 .. 31
        int32_t offset[16];  // -8 * sum of the lane's q
        float d[16];
    };

    static void pack_block(x_group & g, int k, const float * x, block_scale s) {
        store_16(g.lo + 16 * k, quantize_16(x, s.inverse));
        store_16(g.hi + 16 * k, quantize_16(x + 16, s.inverse));
        _mm_storeu_ps(g.d + 4 * k, _mm_set1_ps(s.d));
    }
    static void pack_zero(x_group & g, int k) {
        store_16(g.lo + 16 * k, _mm_setzero_si128());
        store_16(g.hi + 16 * k, _mm_setzero_si128());
        _mm_storeu_ps(g.d + 4 * k, _mm_setzero_ps());
    }
    static void pack_sums(x_group & g) {
        const __m512i sum = _mm512_add_epi32(sum_bytes(g.lo), sum_bytes(g.hi));
        _mm512_storeu_si512(g.offset, _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), sum), 3));
    }

    template <bool part>
    static vf dot(const uint8_t * w, const x_group & x, vf sum, int64_t n_left) {
        const __m512i low = _mm512_set1_epi8(15);
        const __m512i q = load_4x16<block>(w + 2);
        __m512i i = _mm512_dpbusd_epi32(_mm512_loadu_si512(x.offset), _mm512_and_si512(q, low), _mm512_loadu_si512(x.lo));
        i = _mm512_dpbusd_epi32(i, _mm512_and_si512(_mm512_srli_epi16(q, 4), low), _mm512_loadu_si512(x.hi));
        const vf d = load_scales<block, group_blocks, 0>(w, block_lanes<part, group_blocks>(n_left));
        return vf_fma(d, _mm512_mul_ps(vf_load(x.d), _mm512_cvtepi32_ps(i)), sum);
    }

    template <int R>
    struct row_scales {
        vf scale;
        explicit row_scales(const float * s) : scale(spread_scales<R>(s)) {}
        group_scales of_group(const uint8_t * const * w) const {
            group_scales c;
            group_scales_of<block, group_blocks, R, 0>(w, scale, c);
            return c;
        }
    };

    template <int R, bool fresh>
    static void add(const uint8_t * const * w, int k, const group_scales & c, float * y_group) {
        const vf values = code_values(-8.0f);
        float * y = y_group + k * block_values;
        vf y0 = load_y<fresh>(y);
        vf y1 = load_y<fresh>(y + 16);
        for (int r = 0; r < R; ++r) {
            const __m512i q = _mm512_cvtepu8_epi32(load_16(w[r] + k * sizeof(block) + 2));
            const vf cr = vf_set(c.c[4 * r + k]);
            y0 = vf_fma(cr, _mm512_permutexvar_ps(q, values), y0);
            y1 = vf_fma(cr, _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), values), y1);
        }
        vf_store(y, y0);
        vf_store(y + 16, y1);
    }
};

struct blocks_q4_1 {
    static constexpr int row_type = row_type_q4_1;
    using block = block_q4_1;
    static constexpr int64_t block_n = block_values;
    static constexpr int group_blocks = 4;
    static constexpr size_t group_bytes = group_blocks * sizeof(block);

    struct x_group {
        int8_t lo[64];
        int8_t hi[64];
        float sum[16];  // d * sum of the lane's q
        float d[16];
    };

    static void pack_block(x_group & g, int k, const float * x, block_scale s) {
        store_16(g.lo + 16 * k, quantize_16(x, s.inverse));
        store_16(g.hi + 16 * k, quantize_16(x + 16, s.inverse));
        _mm_storeu_ps(g.d + 4 * k, _mm_set1_ps(s.d));
    }
    static void pack_zero(x_group & g, int k) {
        store_16(g.lo + 16 * k, _mm_setzero_si128());
        store_16(g.hi + 16 * k, _mm_setzero_si128());
        _mm_storeu_ps(g.d + 4 * k, _mm_setzero_ps());
    }
    static void pack_sums(x_group & g) {
        const __m512i sum = _mm512_add_epi32(sum_bytes(g.lo), sum_bytes(g.hi));
        vf_store(g.sum, _mm512_mul_ps(vf_load(g.d), _mm512_cvtepi32_ps(sum)));
    }

    template <bool part>
    static vf dot(const uint8_t * w, const x_group & x, vf sum, int64_t n_left) {
        const __m512i low = _mm512_set1_epi8(15);
        const __mmask16 lanes = block_lanes<part, group_blocks>(n_left);
        const __m512i q = load_4x16<block>(w + 4);
        __m512i i = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_and_si512(q, low), _mm512_loadu_si512(x.lo));
        i = _mm512_dpbusd_epi32(i, _mm512_and_si512(_mm512_srli_epi16(q, 4), low), _mm512_loadu_si512(x.hi));
        const vf d = load_scales<block, group_blocks, 0>(w, lanes);
        const vf m = load_scales<block, group_blocks, 1>(w, lanes);
        sum = vf_fma(m, vf_load(x.sum), sum);
        return vf_fma(d, _mm512_mul_ps(vf_load(x.d), _mm512_cvtepi32_ps(i)), sum);
    }

    struct scales_and_minima {
        group_scales d;
        alignas(16) float m[4];  // per block, summed over the rows
    };

    template <int R>
    struct row_scales {
        vf scale;
        explicit row_scales(const float * s) : scale(spread_scales<R>(s)) {}
        scales_and_minima of_group(const uint8_t * const * w) const {
            scales_and_minima c;
            group_scales_of<block, group_blocks, R, 0>(w, scale, c.d);
            group_scales m;
            group_scales_of<block, group_blocks, R, 1>(w, scale, m);
            __m128 sum = _mm_load_ps(m.c);
            for (int r = 1; r < R; ++r) {
                sum = _mm_add_ps(sum, _mm_load_ps(m.c + 4 * r));
            }
            _mm_store_ps(c.m, sum);
            return c;
        }
    };

    template <int R, bool fresh>
    static void add(const uint8_t * const * w, int k, const scales_and_minima & c, float * y_group) {
        const vf values = code_values(0.0f);
        float * y = y_group + k * block_values;
        vf y0 = vf_add(load_y<fresh>(y), vf_set(c.m[k]));
        vf y1 = vf_add(load_y<fresh>(y + 16), vf_set(c.m[k]));
        for (int r = 0; r < R; ++r) {
            const __m512i q = _mm512_cvtepu8_epi32(load_16(w[r] + k * sizeof(block) + 4));
            const vf d = vf_set(c.d.c[4 * r + k]);
            y0 = vf_fma(d, _mm512_permutexvar_ps(q, values), y0);
            y1 = vf_fma(d, _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), values), y1);
        }
        vf_store(y, y0);
        vf_store(y + 16, y1);
    }
};

struct blocks_q8_0 {
    static constexpr int row_type = row_type_q8_0;
    using block = block_q8_0;
    static constexpr int64_t block_n = block_values;
    static constexpr int group_blocks = 2;
    static constexpr size_t group_bytes = group_blocks * sizeof(block);

    struct x_group {
        int8_t q[64];
        int32_t offset[16];  // -128 * sum of the lane's q: w goes into the dot as w + 128
        float d[16];
    };

    static void pack_block(x_group & g, int k, const float * x, block_scale s) {
        store_16(g.q + 32 * k, quantize_16(x, s.inverse));
        store_16(g.q + 32 * k + 16, quantize_16(x + 16, s.inverse));
        _mm256_storeu_ps(g.d + 8 * k, _mm256_set1_ps(s.d));
    }
    static void pack_zero(x_group & g, int k) {
        store_16(g.q + 32 * k, _mm_setzero_si128());
        store_16(g.q + 32 * k + 16, _mm_setzero_si128());
        _mm256_storeu_ps(g.d + 8 * k, _mm256_setzero_ps());
    }
    static void pack_sums(x_group & g) {
        _mm512_storeu_si512(g.offset, _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), sum_bytes(g.q)), 7));
    }

    template <bool part>
    static vf dot(const uint8_t * w, const x_group & x, vf sum, int64_t n_left) {
        const __m256i q0 = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w + 2));
        const __m256i q1 = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w + 2 + sizeof(block)));
        const __m512i q = _mm512_inserti64x4(_mm512_castsi256_si512(q0), q1, 1);
        const __m512i u = _mm512_xor_si512(q, _mm512_set1_epi8(-128));
        const __m512i i = _mm512_dpbusd_epi32(_mm512_loadu_si512(x.offset), u, _mm512_loadu_si512(x.q));
        const vf d = load_scales<block, group_blocks, 0>(w, block_lanes<part, group_blocks>(n_left));
        return vf_fma(d, _mm512_mul_ps(vf_load(x.d), _mm512_cvtepi32_ps(i)), sum);
    }

    template <int R>
    struct row_scales {
        vf scale;
        explicit row_scales(const float * s) : scale(spread_scales<R>(s)) {}
        group_scales of_group(const uint8_t * const * w) const {
            group_scales c;
            group_scales_of<block, group_blocks, R, 0>(w, scale, c);
            return c;
        }
    };

    template <int R, bool fresh>
    static void add(const uint8_t * const * w, int k, const group_scales & c, float * y_group) {
        float * y = y_group + k * block_values;
        vf y0 = load_y<fresh>(y);
        vf y1 = load_y<fresh>(y + 16);
        for (int r = 0; r < R; ++r) {
            const uint8_t * q = w[r] + k * sizeof(block) + 2;
            const vf cr = vf_set(c.c[4 * r + k]);
            y0 = vf_fma(cr, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(q))), y0);
            y1 = vf_fma(cr, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(q + 16))), y1);
        }
        vf_store(y, y0);
        vf_store(y + 16, y1);
    }
};

// Decoders for code_blocks: see kernel-body.inl.

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

struct codes_base {
    static vi dot(vi sum, vi codes, const int8_t * x) { return _mm512_dpbusd_epi32(sum, codes, vi_load(x)); }
};

// 4 blocks of 32 values: values 0 .. 15 of each, then values 16 .. 31.
template <class Block>
struct codes_of_4 : codes_base {
    using block = Block;
    static constexpr int64_t block_n = block_values;
    static constexpr int group_blocks = 4;
    static constexpr size_t group_bytes = 4 * sizeof(Block);
    static constexpr int part_chunks = 2;
    static constexpr int panel_vectors = 2;
    static constexpr int chunk(int i) { return i % 4 * 2 + i / 4; }

    static void load_nibbles(const uint8_t * q, vi * out) {
        const vi low = _mm512_set1_epi8(15);
        const vi bytes = load_4x16<Block>(q);
        out[0] = _mm512_and_si512(bytes, low);
        out[1] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
    }
};

// The same, in the order of the values: the fifth bits of two blocks are then one mask.
template <class Block>
struct codes_of_4_in_order : codes_of_4<Block> {
    static constexpr int panel_vectors = 1;
    static constexpr int chunk(int i) { return i; }

    // Codes from the nibbles at w + q_at and the fifth bits at w + h_at; minus 16 where is_signed.
    template <int h_at, int q_at, bool is_signed>
    static void load_codes(const uint8_t * w, vi * q) {
        const vi low = _mm512_set1_epi8(15);
        const vi bit = _mm512_set1_epi8(16);
        const vi right = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0);
        for (int v = 0; v < 2; ++v, w += 2 * sizeof(Block)) {
            const vi first = _mm512_broadcast_i32x4(load_16(w + q_at));
            const vi bytes = _mm512_mask_broadcast_i32x4(first, 0xff00, load_16(w + sizeof(Block) + q_at));
            const uint64_t bits = load_u32(w + h_at) | uint64_t(load_u32(w + sizeof(Block) + h_at)) << 32;
            q[v] = _mm512_and_si512(_mm512_srlv_epi64(bytes, right), low);
            q[v] = is_signed ? _mm512_mask_sub_epi8(q[v], ~bits, q[v], bit) : _mm512_mask_add_epi8(q[v], bits, q[v], bit);
        }
    }
};

struct codes_q5_0 : codes_of_4_in_order<block_q5_0> {
    static constexpr int row_type = row_type_q5_0;
    static constexpr int offset = 16;
    static constexpr bool has_minimum = false;
    static constexpr int part_coefs = 1;
    static constexpr int minimum_sign = 1;
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        load_codes<2, 6, is_signed>(w, q);
    }
    static coef_lanes coefs(const uint8_t * w) {
        uint64_t halves = 0;
        for (int k = 0; k < 4; ++k) {
            halves |= uint64_t(load_u16(w + k * sizeof(block))) << 16 * k;
        }
        return {{_mm512_zextps128_ps512(_mm_cvtph_ps(_mm_cvtsi64_si128(static_cast<long long>(halves))))}};
    }
};

struct codes_q5_1 : codes_of_4_in_order<block_q5_1> {
    static constexpr int row_type = row_type_q5_1;
    static constexpr int offset = 0;
    static constexpr bool has_minimum = true;
    static constexpr int part_coefs = 2;
    static constexpr int minimum_sign = 1;
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        load_codes<4, 8, false>(w, q);
    }
    static coef_lanes coefs(const uint8_t * w) {
        const vi index = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16 + 18 - 8, 12, 6, 0);
        const vi pairs = _mm512_permutex2var_epi32(vi_load(w), index, vi_load(w + 32));
        return {{_mm512_zextps256_ps512(_mm256_cvtph_ps(_mm512_castsi512_si128(pairs)))}};
    }
};

struct codes_iq4_nl : codes_of_4<block_iq4_nl> {
    static constexpr int row_type = row_type_iq4_nl;
    static constexpr int offset = 128;
    static constexpr bool has_minimum = false;
    static constexpr int part_coefs = 1;
    static constexpr int minimum_sign = 1;
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        const vi values = _mm512_broadcast_i32x4(load_16(reinterpret_cast<const uint8_t *>(iq4_nl_values)));
        const vi table = is_signed ? values : _mm512_xor_si512(values, _mm512_set1_epi8(-128));
        load_nibbles(w + 2, q);
        q[0] = _mm512_shuffle_epi8(table, q[0]);
        q[1] = _mm512_shuffle_epi8(table, q[1]);
    }
    static coef_lanes coefs(const uint8_t * w) {
        const vi index = _mm512_castsi128_si512(_mm_set_epi16(0, 0, 0, 0, 27, 18, 9, 0));
        const __m128i halves = _mm512_castsi512_si128(_mm512_permutexvar_epi16(index, vi_load(w)));
        return {{_mm512_zextps128_ps512(_mm_cvtph_ps(halves))}};
    }
    static constexpr size_t nibbles(int k) { return size_t(k) * sizeof(block) + 2; }
    static constexpr int low_chunk(int k) { return 2 * k; }
    static constexpr int high_chunk(int k) { return 2 * k + 1; }
    static vf values() {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(reinterpret_cast<const uint8_t *>(iq4_nl_values))));
    }
};

// Q4_K and Q5_K: the first halves of the even parts, their second halves, then those of the odd parts.
template <class Block>
struct codes_of_parts : codes_base {
    using block = Block;
    static constexpr int64_t block_n = super_values;
    static constexpr int group_blocks = 8;
    static constexpr size_t group_bytes = sizeof(Block);
    static constexpr int part_chunks = 2;
    static constexpr int panel_vectors = 2;
    static constexpr int offset = 0;
    static constexpr bool has_minimum = true;
    static constexpr int part_coefs = 2;
    static constexpr int minimum_sign = -1;
    static constexpr int chunk(int i) { return i % 4 * 4 + i / 4; }

    // bytes[h]: half h of the 4 runs of 32 bytes at q.
    static void load_runs(const uint8_t * q, vi * bytes) {
        const vi q0 = vi_load(q);
        const vi q1 = vi_load(q + 64);
        bytes[0] = _mm512_shuffle_i32x4(q0, q1, _MM_SHUFFLE(2, 0, 2, 0));
        bytes[1] = _mm512_shuffle_i32x4(q0, q1, _MM_SHUFFLE(3, 1, 3, 1));
    }

    static coef_lanes coefs(const uint8_t * w) {
        alignas(64) static constexpr struct table {
            uint8_t bytes[64];   // of d, m and scales: the one with the low bits, then the one with the high bits or none
            uint32_t shift[16];  // of the low bits
            uint32_t low[16];    // mask of the low bits
            constexpr table() : bytes(), shift(), low() {
                for (int i = 0; i < 16; ++i) {
                    const int p = i / 2;
                    const bool minimum = i % 2 == 1;
                    bytes[4 * i] = uint8_t(4 + p + (p >= 4 || minimum ? 4 : 0));
                    bytes[4 * i + 1] = uint8_t(p < 4 ? 0x80 : minimum ? 4 + p : p);
                    bytes[4 * i + 2] = bytes[4 * i + 3] = 0x80;
                    shift[i] = p >= 4 && minimum ? 4 : 0;
                    low[i] = p >= 4 ? 15 : 63;
                }
            }
        } t;
        const vi head = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_16(w)), vi_load(t.bytes));
        const vi low = _mm512_srlv_epi32(head, vi_load(t.shift));
        const vi both = _mm512_ternarylogic_epi32(low, _mm512_srli_epi32(head, 10), vi_load(t.low), 0xe4);  // low ? 1st : 2nd
        const vf d_m = _mm512_cvtph_ps(_mm256_set1_epi32(int(load_u32(w))));
        return {{_mm512_mul_ps(d_m, _mm512_cvtepi32_ps(both))}};
    }
};

struct codes_q4_k : codes_of_parts<block_q4_k> {
    static constexpr int row_type = row_type_q4_k;
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        const vi low = _mm512_set1_epi8(15);
        vi bytes[2];
        load_runs(w + 16, bytes);
        for (int h = 0; h < 2; ++h) {
            q[h] = _mm512_and_si512(bytes[h], low);
            q[2 + h] = _mm512_and_si512(_mm512_srli_epi16(bytes[h], 4), low);
        }
    }
    static constexpr size_t nibbles(int k) { return 16 + 16 * size_t(k); }
    static constexpr int low_chunk(int k) { return k / 2 * 4 + k % 2; }
    static constexpr int high_chunk(int k) { return low_chunk(k) + 2; }
    static vf values() { return code_values(0.0f); }
};

struct codes_q5_k : codes_of_parts<block_q5_k> {
    static constexpr int row_type = row_type_q5_k;
    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        const vi low = _mm512_set1_epi8(15);
        const vi five = _mm512_set1_epi8(31);
        // Bits 2 k and 2 k + 1 to bits 4 and 5, for run k.
        const vi left = _mm512_set_epi32(30, 30, 30, 30, 0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4);
        vi bytes[2];
        load_runs(w + 48, bytes);
        for (int h = 0; h < 2; ++h) {
            const vi bits = _mm512_rolv_epi32(_mm512_broadcast_i32x4(load_16(w + 16 + 16 * h)), left);
            q[h] = _mm512_and_si512(_mm512_ternarylogic_epi32(bytes[h], bits, low, 0xe4), five);
            q[2 + h] = _mm512_and_si512(
                _mm512_ternarylogic_epi32(_mm512_srli_epi16(bytes[h], 4), _mm512_srli_epi16(bits, 1), low, 0xe4), five);
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
    static constexpr int panel_vectors = 1;
    static constexpr int offset = 32;
    static constexpr bool has_minimum = false;
    static constexpr int part_coefs = 1;
    static constexpr int minimum_sign = 1;
    static constexpr int chunk(int i) { return i; }

    template <bool is_signed>
    static void codes(const uint8_t * w, vi * q) {
        const vi low = _mm512_set1_epi8(15);
        const vi pairs = _mm512_set1_epi8(0x33);
        const vi right = _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0);
        for (int k = 0; k < 2; ++k) {
            const vi bytes = vi_load(w + 64 * k);
            const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w + 128 + 32 * k));
            // Two high bits of the low halves in bits 0 and 1, of the high halves in bits 4 and 5.
            const vi bits = _mm512_and_si512(_mm512_srlv_epi64(_mm512_broadcast_i64x4(h), right), pairs);
            q[2 * k] = _mm512_ternarylogic_epi32(bytes, _mm512_slli_epi16(bits, 4), low, 0xe4);
            q[2 * k + 1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(bytes, 4), bits, low, 0xe4);
        }
        for (int v = 0; is_signed && v < 4; ++v) {
            q[v] = _mm512_sub_epi8(q[v], vi_set_bytes(offset));
        }
    }
    static coef_lanes coefs(const uint8_t * w) {
        const vf d_all = _mm512_cvtph_ps(_mm256_set1_epi16(short(load_u16(w + 208))));
        return {{_mm512_mul_ps(d_all, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(w + 192))))}};
    }
};

// code_blocks whose codes are 4 bits: add looks the values up by the bytes of the row. D adds nibbles(k), where in the group
// 16 bytes are whose low halves are the codes of chunk low_chunk(k) and whose high halves those of high_chunk(k); values().
template <class D>
struct nibble_blocks : code_blocks<D> {
    using base = code_blocks<D>;
    template <int R>
    using group = typename base::template group_coefs<R>;

    template <int R>
    struct row_scales : base::template row_scales<R> {
        using base::template row_scales<R>::row_scales;
        group<R> of_group(const uint8_t * const * w) const {
            group<R> g;
            this->coefs_of_group(w, g);
            return g;
        }
    };

    template <int R, bool fresh>
    static void add(const uint8_t * const * w, int k, const group<R> & g, float * y) {
        const vf values = D::values();
        const int lo = D::low_chunk(k), hi = D::high_chunk(k);
        vf y0 = base::template load_y_and_minimum<R, fresh>(g, lo, y + 16 * lo);
        vf y1 = base::template load_y_and_minimum<R, fresh>(g, hi, y + 16 * hi);
        for (int r = 0; r < R; ++r) {
            const vi q = _mm512_cvtepu8_epi32(load_16(w[r] + D::nibbles(k)));
            const vf c0 = vf_set(g.c[r][base::layout::lane_of_chunk(lo)]);
            const vf c1 = vf_set(g.c[r][base::layout::lane_of_chunk(hi)]);
            y0 = vf_fma(c0, _mm512_permutexvar_ps(q, values), y0);
            y1 = vf_fma(c1, _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), values), y1);
        }
        vf_store(y + 16 * lo, y0);
        vf_store(y + 16 * hi, y1);
    }
};

constexpr row_kernels rows[] = {
    kernels_values<values_f32>,
    kernels_values<values_f16>,
    kernels_values<values_bf16>,
    kernels_blocks<blocks_q4_0>,
    kernels_blocks<blocks_q4_1>,
    kernels_blocks<code_blocks<codes_q5_0>>,
    kernels_blocks<code_blocks<codes_q5_1>>,
    kernels_blocks<blocks_q8_0>,
    kernels_blocks<nibble_blocks<codes_q4_k>>,
    kernels_blocks<code_blocks<codes_q5_k>>,
    kernels_blocks<code_blocks<codes_q6_k>>,
    kernels_blocks<nibble_blocks<codes_iq4_nl>>,
};

}  // namespace

const kernel_table kernels_avx512 = {
    "avx512", cpu_has_avx512, rows, sizeof(rows) / sizeof(rows[0]), matmul_nt, matmul_nn_add, add, silu, nullptr,
};

#if defined(POWERINFER_AMX)
const kernel_table kernels_amx = {
    "amx", cpu_has_amx, rows, sizeof(rows) / sizeof(rows[0]), matmul_nt, matmul_nn_add, add, silu, &tiles_amx,
};
#endif

}  // namespace powerinfer
