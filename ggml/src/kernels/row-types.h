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
constexpr int row_type_q8_0 = 8;
constexpr int row_type_bf16 = 30;

constexpr int64_t block_values = 32;  // values per block of every quantized type below

// d, m: IEEE half. Byte i of a 4-bit block holds value i in its low and value 16 + i in its high half.
struct block_q4_0 { uint16_t d; uint8_t q[16]; };              // value = d * (q - 8)
struct block_q4_1 { uint16_t d; uint16_t m; uint8_t q[16]; };  // value = d * q + m
struct block_q8_0 { uint16_t d; int8_t q[32]; };               // value = d * q

static_assert(sizeof(block_q4_0) == 18 && sizeof(block_q4_1) == 20 && sizeof(block_q8_0) == 34, "ggml's block sizes");
static_assert(alignof(block_q4_0) == 2 && alignof(block_q4_1) == 2 && alignof(block_q8_0) == 2, "rows start at any even address");

}  // namespace powerinfer
