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

    template <int R>
    static void add(const uint8_t * const * w, int k, const group_scales & c, float * y) {
        const vf values = code_values(-8.0f);
        vf y0 = vf_load(y);
        vf y1 = vf_load(y + 16);
        for (int r = 0; r < R; ++r) {
            const __m512i q = _mm512_cvtepu8_epi32(load_16(w[r] + k * sizeof(block) + 2));
            const vf cr = vf_set(c.c[4 * r + k]);
            y0 = vf_fma(cr, _mm512_permutexvar_ps(q, values), y0);
            y1 = vf_fma(cr, _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), values), y1);
        }
        vf_store(y, y0);
        vf_store(y + 16, y1);
    }

    static void unpack(const uint8_t * w, float * out) {
        const vf d = vf_set(_cvtsh_ss(reinterpret_cast<const block *>(w)->d));
        const __m512i q = _mm512_cvtepu8_epi32(load_16(w + 2));
        const vf values = code_values(-8.0f);
        vf_store(out, _mm512_mul_ps(d, _mm512_permutexvar_ps(q, values)));
        vf_store(out + 16, _mm512_mul_ps(d, _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), values)));
    }
};

struct blocks_q4_1 {
    static constexpr int row_type = row_type_q4_1;
    using block = block_q4_1;
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

    template <int R>
    static void add(const uint8_t * const * w, int k, const scales_and_minima & c, float * y) {
        const vf values = code_values(0.0f);
        vf y0 = vf_add(vf_load(y), vf_set(c.m[k]));
        vf y1 = vf_add(vf_load(y + 16), vf_set(c.m[k]));
        for (int r = 0; r < R; ++r) {
            const __m512i q = _mm512_cvtepu8_epi32(load_16(w[r] + k * sizeof(block) + 4));
            const vf d = vf_set(c.d.c[4 * r + k]);
            y0 = vf_fma(d, _mm512_permutexvar_ps(q, values), y0);
            y1 = vf_fma(d, _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), values), y1);
        }
        vf_store(y, y0);
        vf_store(y + 16, y1);
    }

    static void unpack(const uint8_t * w, float * out) {
        const vf d = vf_set(_cvtsh_ss(reinterpret_cast<const block *>(w)->d));
        const vf m = vf_set(_cvtsh_ss(reinterpret_cast<const block *>(w)->m));
        const __m512i q = _mm512_cvtepu8_epi32(load_16(w + 4));
        const vf values = code_values(0.0f);
        vf_store(out, vf_fma(d, _mm512_permutexvar_ps(q, values), m));
        vf_store(out + 16, vf_fma(d, _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), values), m));
    }
};

struct blocks_q8_0 {
    static constexpr int row_type = row_type_q8_0;
    using block = block_q8_0;
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

    template <int R>
    static void add(const uint8_t * const * w, int k, const group_scales & c, float * y) {
        vf y0 = vf_load(y);
        vf y1 = vf_load(y + 16);
        for (int r = 0; r < R; ++r) {
            const uint8_t * q = w[r] + k * sizeof(block) + 2;
            const vf cr = vf_set(c.c[4 * r + k]);
            y0 = vf_fma(cr, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(q))), y0);
            y1 = vf_fma(cr, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(q + 16))), y1);
        }
        vf_store(y, y0);
        vf_store(y + 16, y1);
    }

    static void unpack(const uint8_t * w, float * out) {
        const vf d = vf_set(_cvtsh_ss(reinterpret_cast<const block *>(w)->d));
        vf_store(out, _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(w + 2)))));
        vf_store(out + 16, _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(w + 18)))));
    }
};

#include "kernel-body.inl"

constexpr row_kernels rows[] = {
    kernels_values<values_f32>,  kernels_values<values_f16>,  kernels_values<values_bf16>,
    kernels_blocks<blocks_q4_0>, kernels_blocks<blocks_q4_1>, kernels_blocks<blocks_q8_0>,
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
