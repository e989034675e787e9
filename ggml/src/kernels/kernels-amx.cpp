// Products of whole batches on the AMX tile unit, in bf16 with f32 sums. The rest of the set "amx" is AVX-512's.
// The tile configuration belongs to a thread and others (ggml's CPU backend) load theirs once: it is put back after use.
#include "kernel-table.h"

#include <cstddef>
#include <cstdint>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms inside GCC 12's intrinsics (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

namespace powerinfer {

namespace {

// The instructions are spelt out: GCC's intrinsics don't say that they read memory, and its ldtilecfg reads 8 of 64 bytes.
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(static_cast<const void *>(p)), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(t, p, stride) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(static_cast<void *>(p)), "r"(int64_t(stride)) : "memory")
#define TILE_MULTIPLY(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

struct alignas(64) tile_config {
    uint8_t palette_id = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t n_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// All eight tiles are 16 rows of 64 bytes while it lives.
class tile_session {
public:
    tile_session() {
        __asm__ volatile("sttilecfg %0" : "=m"(*reinterpret_cast<char(*)[64]>(&saved_)));
        const tile_config own;
        __asm__ volatile("ldtilecfg %0" ::"m"(*reinterpret_cast<const char(*)[64]>(&own)));
    }
    ~tile_session() { __asm__ volatile("ldtilecfg %0" ::"m"(*reinterpret_cast<const char(*)[64]>(&saved_))); }
    tile_session(const tile_session &) = delete;
    tile_session & operator=(const tile_session &) = delete;

private:
    tile_config saved_;
};

constexpr int64_t unit = 16;       // rows of a tile, columns of a sum
constexpr int64_t step = 32;       // values of n that one product takes
constexpr int64_t tile_bytes = 1024;

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

__mmask16 first_lanes(int64_t count) {
    return count >= 16 ? 0xffff : count <= 0 ? 0 : __mmask16((1u << count) - 1);
}

// What rounding to bf16 left of v; `rounded` holds the 16 bf16.
__m512 rest_of(__m512 v, __m256i rounded) {
    return _mm512_sub_ps(v, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
}

// 32 values of p, of which `count` exist, as bf16; i_part 1: what rounding left of them.
__m512i load_bf16(const float * p, int64_t count, int i_part) {
    const __m512 lo = _mm512_maskz_loadu_ps(first_lanes(count), p);
    const __m512 hi = _mm512_maskz_loadu_ps(first_lanes(count - 16), p + 16);
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(hi, lo);
    if (i_part == 0) {
        return rounded;
    }
    return (__m512i)_mm512_cvtne2ps_pbh(rest_of(hi, _mm512_extracti64x4_epi64(rounded, 1)), rest_of(lo, _mm512_castsi512_si256(rounded)));
}

size_t operand_bytes(int64_t n_outer, int64_t n, int n_parts) {
    return size_t(n_parts) * size_t(round_up(n_outer, unit) * round_up(n, step)) * 2;
}

// Left operand: rows of bf16, one after the other.
void pack_left(int64_t n_rows, int64_t n, const float * rows, int64_t ld, int n_parts, void * packed, size_t row_bytes,
               size_t part_bytes) {
    for (int i_part = 0; i_part < n_parts; ++i_part) {
        for (int64_t i = 0; i < round_up(n_rows, unit); ++i) {
            uint8_t * out = static_cast<uint8_t *>(packed) + i_part * part_bytes + i * row_bytes;
            for (int64_t k = 0; k < n; k += step, out += 64) {
                _mm512_storeu_si512(out, i < n_rows ? load_bf16(rows + i * ld + k, n - k, i_part) : _mm512_setzero_si512());
            }
        }
    }
}

// Right operand: per 16 columns, per 32 values of n one tile: 16 rows of (16 columns, 2 values) bf16.

// 16 x 16 words of 32 bits, transposed.
void transpose(__m512i * r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 4) {
        const __m512i ab_lo = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        const __m512i ab_hi = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        const __m512i cd_lo = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]);
        const __m512i cd_hi = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
        t[i] = _mm512_unpacklo_epi64(ab_lo, cd_lo);
        t[i + 1] = _mm512_unpackhi_epi64(ab_lo, cd_lo);
        t[i + 2] = _mm512_unpacklo_epi64(ab_hi, cd_hi);
        t[i + 3] = _mm512_unpackhi_epi64(ab_hi, cd_hi);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i a = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x44);
        const __m512i b = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x44);
        const __m512i c = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xee);
        const __m512i d = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xee);
        r[i] = _mm512_shuffle_i32x4(a, b, 0x88);
        r[4 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
        r[8 + i] = _mm512_shuffle_i32x4(c, d, 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
}

void pack_right_transposed(int64_t n_columns, int64_t n, const float * rows, int64_t ld, int n_parts, void * packed,
                           size_t part_bytes) {
    for (int i_part = 0; i_part < n_parts; ++i_part) {
        uint8_t * out = static_cast<uint8_t *>(packed) + i_part * part_bytes;
        for (int64_t k = 0; k < n; k += step, out += tile_bytes) {
            __m512i words[16];
            for (int64_t i = 0; i < unit; ++i) {
                words[i] = i < n_columns ? load_bf16(rows + i * ld + k, n - k, i_part) : _mm512_setzero_si512();
            }
            transpose(words);
            for (int i = 0; i < 16; ++i) {
                _mm512_storeu_si512(out + 64 * i, words[i]);
            }
        }
    }
}

void pack_right_pair(int64_t n_columns, int64_t n, int64_t k, const float * row0, const float * row1, int n_parts, void * packed,
                     size_t part_bytes) {
    // Words (0, 16), (1, 17), ...: both rows' values of a column side by side.
    alignas(64) static constexpr struct table {
        uint16_t index[32];
        constexpr table() : index() {
            for (int i = 0; i < 32; ++i) {
                index[i] = uint16_t(i / 2 + i % 2 * 16);
            }
        }
    } t;
    const __m512i interleaved = _mm512_load_si512(t.index);
    const int64_t block_bytes = unit * round_up(n, step) * 2;
    uint8_t * out = static_cast<uint8_t *>(packed) + k / 2 * 64;
    for (int64_t j = 0; j < n_columns; j += unit, out += block_bytes) {
        const __mmask16 lanes = first_lanes(n_columns - j);
        const __m512 a = row0 ? _mm512_maskz_loadu_ps(lanes, row0 + j) : _mm512_setzero_ps();
        const __m512 b = row1 ? _mm512_maskz_loadu_ps(lanes, row1 + j) : _mm512_setzero_ps();
        const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(interleaved, words));
        if (n_parts > 1) {
            const __m512i rest = (__m512i)_mm512_cvtne2ps_pbh(rest_of(b, _mm512_extracti64x4_epi64(words, 1)),
                                                              rest_of(a, _mm512_castsi512_si256(words)));
            _mm512_storeu_si512(out + part_bytes, _mm512_permutexvar_epi16(interleaved, rest));
        }
    }
}

// Two tiles of rows by two of columns, or fewer; tiles 0 .. 3 are the sums, 4 and 5 left, 6 and 7 right.
struct block {
    const uint8_t * left;   // (two) tiles of rows, `row_bytes` apart within, `left_step` from the first to the second
    const uint8_t * right;
    int64_t row_bytes;
    int64_t left_step;
    int64_t right_step;
    int64_t n_steps;
};

template <int R, int C>
void multiply_block(const block & b) {
    const uint8_t * left = b.left;
    const uint8_t * right = b.right;
    for (int64_t s = 0; s < b.n_steps; ++s, left += 64, right += tile_bytes) {
        TILE_LOAD(4, left, b.row_bytes);
        TILE_LOAD(6, right, 64);
        TILE_MULTIPLY(0, 4, 6);
        if constexpr (C == 2) {
            TILE_LOAD(7, right + b.right_step, 64);
            TILE_MULTIPLY(1, 4, 7);
        }
        if constexpr (R == 2) {
            TILE_LOAD(5, left + b.left_step, b.row_bytes);
            TILE_MULTIPLY(2, 5, 6);
            if constexpr (C == 2) {
                TILE_MULTIPLY(3, 5, 7);
            }
        }
    }
}

template <int R, int C>
void multiply_sums(const block & b, size_t left_part_bytes, size_t right_part_bytes, bool accumulate, float * sum, int64_t ld) {
    float * const sum2 = sum + unit * ld;
    const int64_t row_bytes = ld * 4;
    if (accumulate) {
        TILE_LOAD(0, sum, row_bytes);
        if constexpr (C == 2) TILE_LOAD(1, sum + unit, row_bytes);
        if constexpr (R == 2) TILE_LOAD(2, sum2, row_bytes);
        if constexpr (R == 2 && C == 2) TILE_LOAD(3, sum2 + unit, row_bytes);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    multiply_block<R, C>(b);
    if (right_part_bytes > 0) {
        block part = b;
        part.right += right_part_bytes;
        multiply_block<R, C>(part);
    }
    if (left_part_bytes > 0) {  // the product of both second parts is below what f32 keeps
        block part = b;
        part.left += left_part_bytes;
        multiply_block<R, C>(part);
    }
    TILE_STORE(0, sum, row_bytes);
    if constexpr (C == 2) TILE_STORE(1, sum + unit, row_bytes);
    if constexpr (R == 2) TILE_STORE(2, sum2, row_bytes);
    if constexpr (R == 2 && C == 2) TILE_STORE(3, sum2 + unit, row_bytes);
}

void multiply(int64_t n_rows, int64_t n_columns, int64_t n, const void * left, size_t left_row_bytes, size_t left_part,
              const void * right, size_t right_part, bool accumulate, float * out, int64_t ld_out) {
    const tile_session session;
    const int64_t n_padded = round_up(n, step);
    block b;
    b.row_bytes = int64_t(left_row_bytes);
    b.left_step = unit * b.row_bytes;
    b.right_step = unit * n_padded * 2;
    b.n_steps = n_padded / step;
    for (int64_t i = 0; i < n_rows; i += 2 * unit) {
        for (int64_t j = 0; j < n_columns; j += 2 * unit) {
            b.left = static_cast<const uint8_t *>(left) + i / unit * b.left_step;
            b.right = static_cast<const uint8_t *>(right) + j / unit * b.right_step;
            float * sum = out + i * ld_out + j;
            const bool two_rows = i + unit < n_rows;
            const bool two_columns = j + unit < n_columns;
            if (two_rows && two_columns) {
                multiply_sums<2, 2>(b, left_part, right_part, accumulate, sum, ld_out);
            } else if (two_rows) {
                multiply_sums<2, 1>(b, left_part, right_part, accumulate, sum, ld_out);
            } else if (two_columns) {
                multiply_sums<1, 2>(b, left_part, right_part, accumulate, sum, ld_out);
            } else {
                multiply_sums<1, 1>(b, left_part, right_part, accumulate, sum, ld_out);
            }
        }
    }
}

}  // namespace

const tile_kernels tiles_amx = {operand_bytes, pack_left, pack_right_transposed, pack_right_pair, multiply};

}  // namespace powerinfer
