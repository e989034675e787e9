// Weight row types that have kernels of our own: ggml's type numbers and block layouts, one line each.
// Data only, no function: an inline function here could be linked from a file compiled with wider flags.
#pragma once

#include <cstddef>
#include <cstdint>

namespace powerinfer {

// ggml_type numbers.
constexpr int row_type_f32 = 0;
constexpr int row_type_f16 = 1;
constexpr int row_type_q4_0 = 2;
constexpr int row_type_q4_1 = 3;
constexpr int row_type_q5_0 = 6;
constexpr int row_type_q5_1 = 7;
constexpr int row_type_q8_0 = 8;
constexpr int row_type_q4_k = 12;
constexpr int row_type_q5_k = 13;
constexpr int row_type_q6_k = 14;
constexpr int row_type_iq4_nl = 20;
constexpr int row_type_bf16 = 30;

constexpr int64_t block_values = 32;   // values per block of the types without _k, and of x
constexpr int64_t super_values = 256;  // values per block of the types with _k

// d, m: IEEE half. Byte i of a 4-bit block holds value i in its low and value 16 + i in its high half; bit i of h, read
// as a little-endian number, is bit 4 of value i.
struct block_q4_0 { uint16_t d; uint8_t q[16]; };                            // value = d * (q - 8)
struct block_q4_1 { uint16_t d; uint16_t m; uint8_t q[16]; };                // value = d * q + m
struct block_q5_0 { uint16_t d; uint8_t h[4]; uint8_t q[16]; };              // value = d * (q - 16)
struct block_q5_1 { uint16_t d; uint16_t m; uint8_t h[4]; uint8_t q[16]; };  // value = d * q + m
struct block_q8_0 { uint16_t d; int8_t q[32]; };                             // value = d * q
struct block_iq4_nl { uint16_t d; uint8_t q[16]; };                          // value = d * iq4_nl_values[q]

constexpr int8_t iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Part p, 32 values, has a scale s and a minimum b of 6 bits: value = d * s * q - m * b.
// q: byte 32 * k + i holds value i of part 2 * k in its low and of part 2 * k + 1 in its high half; bit p of h[i] is bit 4 of
// value i of part p. scales: for p < 4, s is the low 6 bits of byte p, b those of byte 4 + p; for p >= 4 the low and the high
// half of byte 4 + p are the low 4 bits of s and b, and the top 2 bits of bytes p - 4 and p are their high ones.
struct block_q4_k { uint16_t d; uint16_t m; uint8_t scales[12]; uint8_t q[128]; };
struct block_q5_k { uint16_t d; uint16_t m; uint8_t scales[12]; uint8_t h[32]; uint8_t q[128]; };

// Part p, 16 values, has a scale s: value = d * s * (q - 32). Half k of the block is 4 quarters of 32 values: value i of
// quarter c takes its low 4 bits from the low (c < 2) or high (c >= 2) half of byte 64 * k + 32 * (c % 2) + i of q, bits 4
// and 5 from bits 2 * c and 2 * c + 1 of h[32 * k + i].
struct block_q6_k { uint8_t q[128]; uint8_t h[64]; int8_t scales[16]; uint16_t d; };

static_assert(sizeof(block_q4_0) == 18 && sizeof(block_q4_1) == 20 && sizeof(block_q8_0) == 34, "ggml's block sizes");
static_assert(sizeof(block_q5_0) == 22 && sizeof(block_q5_1) == 24 && sizeof(block_iq4_nl) == 18, "ggml's block sizes");
static_assert(sizeof(block_q4_k) == 144 && sizeof(block_q5_k) == 176 && sizeof(block_q6_k) == 210, "ggml's block sizes");
static_assert(alignof(block_q4_0) == 2 && alignof(block_q4_1) == 2 && alignof(block_q8_0) == 2, "rows start at any even address");
static_assert(alignof(block_q5_0) == 2 && alignof(block_q5_1) == 2 && alignof(block_iq4_nl) == 2, "rows start at any even address");
static_assert(alignof(block_q4_k) == 2 && alignof(block_q5_k) == 2 && alignof(block_q6_k) == 2, "rows start at any even address");

}  // namespace powerinfer
