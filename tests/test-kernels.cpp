// Every kernel of the set named by POWERINFER_KERNELS against a reference in double, against the scalar set, and
// its promises: any n, any stride, row results that don't depend on the list, no read past row_tail_bytes.
#include "check.h"
#include "kernels/kernel-table.h"
#include "kernels/row-types.h"

#ifndef POWERINFER_WITHOUT_GGML  // emulated: there is no ggml for that machine
#include "ggml.h"
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace powerinfer;

namespace {

// A sum of n float products carries a relative error of at most n * 2^-24 of the sum of magnitudes; random signs
// make it far smaller. 2e-6 holds for all n here and is 1000 times below what one wrong value does.
constexpr double float_sum_tolerance = 2e-6;
// Same integer arithmetic, so two sets differ by float rounding only.
constexpr double set_tolerance = 2e-6;
// What the header promises for silu.
constexpr double silu_tolerance = 1e-6;
// silu below this input is smaller than the smallest normal float.
constexpr float silu_zero_input = -88.0f;

// An unpacked value is one product or sum of floats, rounded once.
constexpr double unpack_tolerance = 0x1p-24;

constexpr int all_types[] = {row_type_f32,  row_type_f16,  row_type_bf16, row_type_q4_0, row_type_q4_1, row_type_q5_0,
                             row_type_q5_1, row_type_q8_0, row_type_q4_k, row_type_q5_k, row_type_q6_k, row_type_iq4_nl};

bool is_float_type(int type) {
    return type == row_type_f32 || type == row_type_f16 || type == row_type_bf16;
}

bool has_minimum(int type) {
    return type == row_type_q4_1 || type == row_type_q5_1 || type == row_type_q4_k || type == row_type_q5_k;
}

int64_t values_per_block(int type) {
    const bool super = type == row_type_q4_k || type == row_type_q5_k || type == row_type_q6_k;
    return is_float_type(type) ? 1 : super ? super_values : block_values;
}

std::vector<int64_t> lengths_of(int type) {
    if (is_float_type(type)) {
        return {1, 15, 17, 32, 33, 64, 68, 96, 100, 576, 1000, 2048, 4096 + 32, 4100};
    }
    if (values_per_block(type) == super_values) {
        return {256, 512, 768, 1280, 2048, 4096 + 256};
    }
    return {32, 64, 96, 128, 160, 576, 2048, 4096 + 32};
}

// n rounded up to whole blocks.
int64_t whole_blocks(int type, int64_t n) {
    const int64_t per_block = values_per_block(type);
    return (n + per_block - 1) / per_block * per_block;
}

size_t block_bytes_of(int type) {
    switch (type) {
        case row_type_f32: return 4;
        case row_type_f16:
        case row_type_bf16: return 2;
        case row_type_q4_0: return sizeof(block_q4_0);
        case row_type_q4_1: return sizeof(block_q4_1);
        case row_type_q5_0: return sizeof(block_q5_0);
        case row_type_q5_1: return sizeof(block_q5_1);
        case row_type_q8_0: return sizeof(block_q8_0);
        case row_type_q4_k: return sizeof(block_q4_k);
        case row_type_q5_k: return sizeof(block_q5_k);
        case row_type_q6_k: return sizeof(block_q6_k);
        default: return sizeof(block_iq4_nl);
    }
}

size_t row_bytes_of(int type, int64_t n) {
    return size_t(n / values_per_block(type)) * block_bytes_of(type);
}

// Where the halves of a block lie, counted in bytes.
size_t scale_at(int type) {
    return type == row_type_q6_k ? offsetof(block_q6_k, d) : 0;
}

constexpr size_t minimum_at = 2;

// IEEE half to double by its definition.
double half_to_double(uint16_t h) {
    const double sign = h & 0x8000 ? -1.0 : 1.0;
    const int exponent = (h >> 10) & 31;
    const double mantissa = h & 1023;
    if (exponent == 31) {
        return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
    }
    return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

double bf16_to_double(uint16_t h) {
    const uint32_t bits = uint32_t(h) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

template <class T>
T read_at(const uint8_t * p) {
    T value;
    std::memcpy(&value, p, sizeof(value));
    return value;
}

// Row as doubles, decoded plainly.
struct row_values {
    std::vector<double> value;
    std::vector<double> size;  // what a value is summed from, in magnitudes: a kernel may add offset and minimum apart

    void put(double scale, int code, int offset, double minimum) {
        value.push_back(scale * (code - offset) + minimum);
        size.push_back(std::fabs(scale) * (std::abs(code) + offset) + std::fabs(minimum));
    }
};

// Value k of a block with a scale and a minimum per 32 values.
template <class Block>
void put_part_value(const Block & b, int k, int code, row_values & v) {
    const int p = k / 32;
    int scale, minimum;
    if (p < 4) {
        scale = b.scales[p] & 63;
        minimum = b.scales[p + 4] & 63;
    } else {
        scale = (b.scales[p + 4] & 15) + (b.scales[p - 4] >> 6) * 16;
        minimum = (b.scales[p + 4] >> 4) + (b.scales[p] >> 6) * 16;
    }
    v.put(half_to_double(b.d) * scale, code, 0, -half_to_double(b.m) * minimum);
}

row_values decode(int type, int64_t n, const uint8_t * row) {
    row_values v;
    for (int64_t j = 0; j < n; ++j) {
        const uint8_t * at = row + size_t(j / values_per_block(type)) * block_bytes_of(type);
        const int k = int(j % values_per_block(type));  // place in the block
        const auto half = [&](const uint8_t * q, int i, bool high) { return high ? q[i] >> 4 : q[i] & 15; };
        const auto bit = [&](const uint8_t * h, int i) { return h[i / 8] >> (i % 8) & 1; };
        if (type == row_type_f32) {
            v.put(read_at<float>(at), 1, 0, 0.0);
        } else if (type == row_type_f16) {
            v.put(half_to_double(read_at<uint16_t>(at)), 1, 0, 0.0);
        } else if (type == row_type_bf16) {
            v.put(bf16_to_double(read_at<uint16_t>(at)), 1, 0, 0.0);
        } else if (type == row_type_q4_0) {
            const block_q4_0 b = read_at<block_q4_0>(at);
            v.put(half_to_double(b.d), half(b.q, k % 16, k >= 16), 8, 0.0);
        } else if (type == row_type_q4_1) {
            const block_q4_1 b = read_at<block_q4_1>(at);
            v.put(half_to_double(b.d), half(b.q, k % 16, k >= 16), 0, half_to_double(b.m));
        } else if (type == row_type_q5_0) {
            const block_q5_0 b = read_at<block_q5_0>(at);
            v.put(half_to_double(b.d), half(b.q, k % 16, k >= 16) + 16 * bit(b.h, k), 16, 0.0);
        } else if (type == row_type_q5_1) {
            const block_q5_1 b = read_at<block_q5_1>(at);
            v.put(half_to_double(b.d), half(b.q, k % 16, k >= 16) + 16 * bit(b.h, k), 0, half_to_double(b.m));
        } else if (type == row_type_q8_0) {
            const block_q8_0 b = read_at<block_q8_0>(at);
            v.put(half_to_double(b.d), b.q[k], 0, 0.0);
        } else if (type == row_type_iq4_nl) {
            const block_iq4_nl b = read_at<block_iq4_nl>(at);
            v.put(half_to_double(b.d), iq4_nl_values[half(b.q, k % 16, k >= 16)] + 128, 128, 0.0);
        } else if (type == row_type_q4_k) {
            const block_q4_k b = read_at<block_q4_k>(at);
            put_part_value(b, k, half(b.q, k / 64 * 32 + k % 32, k % 64 >= 32), v);
        } else if (type == row_type_q5_k) {
            const block_q5_k b = read_at<block_q5_k>(at);
            put_part_value(b, k, half(b.q, k / 64 * 32 + k % 32, k % 64 >= 32) + 16 * (b.h[k % 32] >> (k / 32) & 1), v);
        } else {
            const block_q6_k b = read_at<block_q6_k>(at);
            const int low = half(b.q, k / 128 * 64 + k % 64, k % 128 >= 64);
            const int high = b.h[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3;
            v.put(half_to_double(b.d) * b.scales[k / 16], low + 16 * high, 32, 0.0);
        }
    }
    return v;
}

// x as the dot of this type sees it: quantized per 32 values for quantized rows.
std::vector<double> seen_x(int type, const std::vector<float> & x) {
    std::vector<double> v(x.begin(), x.end());
    for (size_t j = 0; !is_float_type(type) && j < x.size(); j += block_values) {
        float x_max = 0.0f;
        for (int k = 0; k < block_values; ++k) {
            x_max = std::max(x_max, std::fabs(x[j + k]));
        }
        const float d = x_max / 127.0f;
        const float inverse = x_max > 0.0f ? 127.0f / x_max : 0.0f;
        for (int k = 0; k < block_values; ++k) {
            v[j + k] = double(d) * std::nearbyint(x[j + k] * inverse);
        }
    }
    return v;
}

std::mt19937 rng(7);

float normal() {
    return std::normal_distribution<float>()(rng);
}

uint16_t half_between(int exponent_lo, int exponent_hi) {  // biased exponents, random sign and mantissa
    const int exponent = exponent_lo + int(rng() % unsigned(exponent_hi - exponent_lo + 1));
    return uint16_t((rng() & 0x83ff) | unsigned(exponent) << 10);
}

// n_rows rows in a buffer that ends exactly row_tail_bytes after the last row, so that a sanitizer sees one byte more.
// Gaps and tail hold 0xff, which is NaN in every float type.
struct matrix {
    int type;
    int64_t n;
    int64_t n_rows;
    size_t row_bytes;
    size_t stride_bytes;
    size_t n_bytes;
    std::unique_ptr<uint8_t[]> bytes;

    matrix(int type_, int64_t n_, int64_t n_rows_, size_t gap_bytes)
        : type(type_), n(n_), n_rows(n_rows_), row_bytes(row_bytes_of(type_, n_)), stride_bytes(row_bytes + gap_bytes),
          n_bytes((n_rows_ - 1) * stride_bytes + row_bytes + row_tail_bytes), bytes(new uint8_t[n_bytes]) {
        std::memset(bytes.get(), 0xff, n_bytes);
        for (int64_t i = 0; i < n_rows; ++i) {
            for (size_t b = 0; b < row_bytes; ++b) {
                row(i)[b] = uint8_t(rng());
            }
            fill_floats(row(i));
        }
    }

    uint8_t * row(int64_t i) { return bytes.get() + size_t(i) * stride_bytes; }
    const uint8_t * row(int64_t i) const { return bytes.get() + size_t(i) * stride_bytes; }

private:
    // Random bits make wild floats: give the floating parts sane sizes, subnormal halves among them.
    void fill_floats(uint8_t * p) {
        const auto put_half = [&](size_t at, uint16_t h) { std::memcpy(p + at, &h, sizeof(h)); };
        if (type == row_type_f32) {
            for (int64_t j = 0; j < n; ++j) {
                const float v = normal();
                std::memcpy(p + 4 * j, &v, sizeof(v));
            }
        } else if (type == row_type_f16) {
            for (int64_t j = 0; j < n; ++j) {
                put_half(2 * j, half_between(0, 16));
            }
        } else if (type == row_type_bf16) {
            for (int64_t j = 0; j < n; ++j) {
                put_half(2 * j, uint16_t((rng() & 0x807f) | (118 + rng() % 10) << 7));
            }
        } else {
            for (size_t at = 0; at < row_bytes; at += block_bytes_of(type)) {
                put_half(at + scale_at(type), half_between(0, 12));
                if (has_minimum(type)) {
                    put_half(at + minimum_at, half_between(0, 13));
                }
            }
        }
    }
};

std::vector<float> random_x(int64_t n) {
    std::vector<float> x(n);
    for (float & v : x) {
        v = normal();
    }
    return x;
}

std::vector<uint8_t> pack(const row_kernels & k, const std::vector<float> & x) {
    std::vector<uint8_t> packed(k.packed_x_bytes(int64_t(x.size())));
    k.pack_x(int64_t(x.size()), x.data(), packed.data());
    return packed;
}

std::vector<float> dot(const row_kernels & k, const matrix & m, const std::vector<float> & x, const int32_t * ids,
                       int64_t n_ids) {
    std::vector<float> out(n_ids, -1.0f);
    k.dot_rows(m.n, m.bytes.get(), m.stride_bytes, ids, n_ids, n_ids, pack(k, x).data(), out.data());
    return out;
}

std::vector<float> add(const row_kernels & k, const matrix & m, const int32_t * ids, const std::vector<float> & scale,
                       std::vector<float> y) {
    k.add_rows(m.n, m.bytes.get(), m.stride_bytes, ids, int64_t(scale.size()), int64_t(scale.size()), scale.data(), y.data());
    return y;
}

bool same_bits(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

std::vector<int32_t> random_ids(int64_t n_ids, int64_t n_rows) {  // ascending, without repeats
    std::vector<int32_t> ids(n_rows);
    for (int64_t i = 0; i < n_rows; ++i) {
        ids[i] = int32_t(i);
    }
    std::shuffle(ids.begin(), ids.end(), rng);
    ids.resize(n_ids);
    std::sort(ids.begin(), ids.end());
    return ids;
}

// dot_rows and add_rows of one matrix and list against the double reference and the scalar set.
void check_list(const row_kernels & k, const row_kernels & scalar, const matrix & m,
                const std::vector<row_values> & rows, const int32_t * ids, int64_t n_ids) {
    const std::vector<float> x = random_x(m.n);
    const std::vector<double> x_seen = seen_x(m.type, x);
    const std::vector<float> out = dot(k, m, x, ids, n_ids);
    const std::vector<float> out_scalar = dot(scalar, m, x, ids, n_ids);
    for (int64_t i = 0; i < n_ids; ++i) {
        const row_values & row = rows[ids ? ids[i] : i];
        double sum = 0.0, magnitude = 0.0;
        for (int64_t j = 0; j < m.n; ++j) {
            sum += row.value[j] * x_seen[j];
            magnitude += row.size[j] * std::fabs(x_seen[j]);
        }
        CHECK_NEAR(out[i], sum, float_sum_tolerance * magnitude);
        CHECK_NEAR(out[i], out_scalar[i], set_tolerance * magnitude);
    }

    std::vector<float> scale(n_ids);
    for (float & s : scale) {
        s = normal();
    }
    const std::vector<float> y = random_x(m.n);
    const std::vector<float> sum = add(k, m, ids, scale, y);
    const std::vector<float> sum_scalar = add(scalar, m, ids, scale, y);
    for (int64_t j = 0; j < m.n; ++j) {
        double want = y[j], magnitude = std::fabs(y[j]);
        for (int64_t i = 0; i < n_ids; ++i) {
            const row_values & row = rows[ids ? ids[i] : i];
            want += scale[i] * row.value[j];
            magnitude += std::fabs(scale[i]) * (has_minimum(m.type) ? row.size[j] : std::fabs(row.value[j]));
        }
        CHECK_NEAR(sum[j], want, float_sum_tolerance * magnitude);
        CHECK_NEAR(sum[j], sum_scalar[j], set_tolerance * magnitude);
    }
}

void test_rows_against_reference(const kernel_table & table, int type) {
    const row_kernels * k = kernel_table_find(&table, type);
    const row_kernels * scalar = kernel_table_find(kernel_table_select("scalar"), type);
    if (!CHECK(k != nullptr) || !CHECK(scalar != nullptr)) {
        return;
    }
    CHECK(k->row_type == type);
    for (const int64_t n : lengths_of(type)) {
        // An odd stride isn't possible for 2-byte aligned rows: the oddest are row + 2 and row + 66.
        for (const size_t gap_bytes : {size_t(0), size_t(2), size_t(66)}) {
            const int64_t n_rows = n > 2000 ? 70 : 150;
            const matrix m(type, n, n_rows, gap_bytes);
            std::vector<row_values> rows;
            for (int64_t i = 0; i < n_rows; ++i) {
                rows.push_back(decode(type, n, m.row(i)));
            }
            for (const int64_t n_ids : {0, 1, 2, 3, 5, 7, 8, 9, 63}) {
                check_list(*k, *scalar, m, rows, random_ids(n_ids, n_rows).data(), n_ids);
            }
            check_list(*k, *scalar, m, rows, nullptr, n_rows);

            const int64_t last = n_rows - 1;  // ends exactly row_tail_bytes before the end of the buffer
            std::unique_ptr<float[]> out(new float[n]);
            k->unpack_row(n, m.row(last), out.get());
            for (int64_t j = 0; j < n; ++j) {
                CHECK_NEAR(out[j], rows[last].value[j], unpack_tolerance * std::fabs(rows[last].value[j]));
            }
        }
    }
}

// The bits that the scalar set and ggml's own conversion give, for every byte that a row can hold.
void test_unpack_is_exact(const kernel_table & table, int type) {
    const row_kernels & k = *kernel_table_find(&table, type);
    const row_kernels & scalar = *kernel_table_find(kernel_table_select("scalar"), type);
    const int64_t n = whole_blocks(type, 4096 + 32);
    const matrix m(type, n, 20, 2);
    for (int64_t i = 0; i < m.n_rows; ++i) {
        std::vector<float> ours(n), theirs(n);
        k.unpack_row(n, m.row(i), ours.data());
        scalar.unpack_row(n, m.row(i), theirs.data());
        CHECK(same_bits(ours, theirs));
#ifndef POWERINFER_WITHOUT_GGML
        if (const ggml_to_float_t to_float = ggml_get_type_traits(ggml_type(type))->to_float) {
            to_float(m.row(i), theirs.data(), n);
            CHECK(same_bits(ours, theirs));
        }
#endif
    }
#ifndef POWERINFER_WITHOUT_GGML
    CHECK(ggml_type_name(ggml_type(type))[0] != '\0' && ggml_blck_size(ggml_type(type)) == values_per_block(type));
    CHECK(ggml_type_size(ggml_type(type)) == block_bytes_of(type));
#endif
}

// BUG_CASES 18, 19: what a row gives depends on nothing but the row; sums are taken in the order of the list.
void test_row_result_is_independent_of_the_list(const kernel_table & table, int type) {
    const row_kernels & k = *kernel_table_find(&table, type);
    for (const int64_t n_about : {96, 576, 4128}) {
        const int64_t n = whole_blocks(type, n_about);
        const matrix m(type, n, 80, 2);
        const std::vector<float> x = random_x(n);
        const std::vector<float> all = dot(k, m, x, nullptr, 80);
        for (const int64_t n_ids : {1, 2, 3, 5, 7, 63}) {
            const std::vector<int32_t> ids = random_ids(n_ids, 80);
            const std::vector<float> some = dot(k, m, x, ids.data(), n_ids);
            for (int64_t i = 0; i < n_ids; ++i) {
                CHECK(std::memcmp(&some[i], &all[ids[i]], sizeof(float)) == 0);
            }
            const std::vector<float> scale = random_x(n_ids);
            std::vector<float> one_by_one = random_x(n);
            const std::vector<float> at_once = add(k, m, ids.data(), scale, one_by_one);
            for (int64_t i = 0; i < n_ids; ++i) {
                one_by_one = add(k, m, &ids[i], {scale[i]}, one_by_one);
            }
            if (has_minimum(type)) {  // a pass sums the minima of its rows first
                std::vector<double> magnitude(one_by_one.begin(), one_by_one.end());
                for (int64_t i = 0; i < n_ids; ++i) {
                    const row_values row = decode(type, n, m.row(ids[i]));
                    for (int64_t j = 0; j < n; ++j) {
                        magnitude[j] = std::fabs(magnitude[j]) + std::fabs(scale[i]) * row.size[j];
                    }
                }
                for (int64_t j = 0; j < n; ++j) {
                    CHECK_NEAR(at_once[j], one_by_one[j], set_tolerance * magnitude[j]);
                }
            } else {
                CHECK(same_bits(at_once, one_by_one));
            }
        }
    }
}

// Weights, x and scales that are small whole numbers: every sum is exact, so any set gives the same bits.
void test_whole_numbers_are_exact(const kernel_table & table, int type) {
    const row_kernels & k = *kernel_table_find(&table, type);
    const row_kernels & scalar = *kernel_table_find(kernel_table_select("scalar"), type);
    constexpr uint16_t half_one = 0x3c00, half_minus_two = 0xc000;
    for (const int64_t n_about : {64, 576, 4128}) {
        const int64_t n = whole_blocks(type, n_about);
        matrix m(type, n, 40, 2);
        for (int64_t i = 0; i < 40; ++i) {
            uint8_t * p = m.row(i);
            for (int64_t j = 0; is_float_type(type) && j < n; ++j) {
                const float v = float(int(rng() % 15) - 7);
                const uint16_t halves[] = {0, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700};  // 0 .. 7
                uint32_t bits;
                std::memcpy(&bits, &v, sizeof(bits));
                const uint16_t bf16 = uint16_t(bits >> 16);
                const uint16_t f16 = uint16_t(halves[int(std::fabs(v))] | (v < 0 ? 0x8000 : 0));
                if (type == row_type_f32) {
                    std::memcpy(p + 4 * j, &v, 4);
                } else {
                    std::memcpy(p + 2 * j, type == row_type_f16 ? &f16 : &bf16, 2);
                }
            }
            for (size_t at = 0; !is_float_type(type) && at < m.row_bytes; at += block_bytes_of(type)) {
                std::memcpy(p + at + scale_at(type), &half_one, 2);
                if (has_minimum(type)) {
                    std::memcpy(p + at + minimum_at, &half_minus_two, 2);
                }
                for (int b = 2; type == row_type_q8_0 && b < int(sizeof(block_q8_0)); ++b) {
                    p[at + b] = uint8_t(int8_t(int(p[at + b] % 31) - 15));
                }
            }
        }
        std::vector<float> x(n), y(n), scale(40);
        for (int64_t j = 0; j < n; ++j) {
            x[j] = j % block_values == 0 ? 127.0f : float(int(rng() % 9) - 4);  // largest 127: the scale of x is 1
            y[j] = float(int(rng() % 9) - 4);
        }
        for (float & s : scale) {
            s = float(int(rng() % 7) - 3);
        }
        CHECK(same_bits(dot(k, m, x, nullptr, 40), dot(scalar, m, x, nullptr, 40)));
        CHECK(same_bits(add(k, m, nullptr, scale, y), add(scalar, m, nullptr, scale, y)));
        const std::vector<int32_t> forward = random_ids(20, 40);
        const std::vector<int32_t> backward(forward.rbegin(), forward.rend());
        const std::vector<float> ones(20, 1.0f);
        CHECK(same_bits(add(k, m, forward.data(), ones, y), add(k, m, backward.data(), ones, y)));
    }
}

void test_nan_and_infinity_propagate(const kernel_table & table, int type) {
    const row_kernels & k = *kernel_table_find(&table, type);
    const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
    const int64_t n_block = is_float_type(type) ? 32 : values_per_block(type), n = 5 * n_block;
    const matrix clean(type, n, 6, 2);
    for (const float bad : {nan, infinity, -infinity}) {
        for (const int64_t at : {int64_t(0), int64_t(31), int64_t(95), n - 1}) {
            std::vector<float> x = random_x(n);
            x[at] = bad;
            for (const float v : dot(k, clean, x, nullptr, 6)) {
                CHECK(!std::isfinite(v));
            }
        }
        const std::vector<float> y = add(k, clean, nullptr, {1, 1, bad, 1, 1, 1}, random_x(n));
        CHECK(std::none_of(y.begin(), y.end(), [](float v) { return std::isfinite(v); }));
    }
    // A bad weight (for blocks: a bad scale) spoils its own row and columns, nobody else's.
    matrix m(type, n, 6, 2);
    const uint16_t half_nan = 0x7e00, bf16_nan = 0x7fc0;
    const int64_t at = n - 31;  // in the last block
    int64_t first = n - n_block, last = n - 1;
    if (is_float_type(type)) {
        first = last = at;
        const size_t value_bytes = row_bytes_of(type, 1);
        const void * bad = type == row_type_f32 ? static_cast<const void *>(&nan) : type == row_type_f16 ? &half_nan : &bf16_nan;
        std::memcpy(m.row(3) + at * value_bytes, bad, value_bytes);
    } else {
        std::memcpy(m.row(3) + 4 * block_bytes_of(type) + scale_at(type), &half_nan, 2);
    }
    const std::vector<float> out = dot(k, m, random_x(n), nullptr, 6);
    const std::vector<float> y = add(k, m, nullptr, std::vector<float>(6, 0.5f), random_x(n));
    for (int64_t i = 0; i < 6; ++i) {
        CHECK(std::isnan(out[i]) == (i == 3));
    }
    for (int64_t j = 0; j < n; ++j) {
        CHECK(std::isnan(y[j]) == (j >= first && j <= last));
    }
}

void test_x_of_zeros_and_extremes(const kernel_table & table, int type) {
    const row_kernels & k = *kernel_table_find(&table, type);
    const row_kernels & scalar = *kernel_table_find(kernel_table_select("scalar"), type);
    const int64_t n = whole_blocks(type, 160);
    const matrix m(type, n, 6, 2);
    const auto size_of_row = [&](int64_t i) {
        double sum = 0.0;
        for (const double size : decode(type, n, m.row(i)).size) {
            sum += size;
        }
        return sum;
    };
    for (const float v : dot(k, m, std::vector<float>(n, 0.0f), nullptr, 6)) {
        CHECK(v == 0.0f);
    }
    for (const float size : {1e-44f, 1e-38f, 1e-20f, 1e20f, 1e34f}) {
        std::vector<float> x = random_x(n);
        double largest = 0.0;
        for (float & v : x) {
            v *= size;
            largest = std::max(largest, double(std::fabs(v)));
        }
        const std::vector<float> a = dot(k, m, x, nullptr, 6), b = dot(scalar, m, x, nullptr, 6);
        for (int i = 0; i < 6; ++i) {
            CHECK(std::isfinite(a[i]));
            CHECK_NEAR(a[i], b[i], set_tolerance * largest * size_of_row(i) + 1e-42);
        }
    }
}

void test_matmul(const kernel_table & table) {
    const kernel_table & scalar = *kernel_table_select("scalar");
    struct shape { int64_t n_x, n_w, n; };
    for (const shape s : {shape{1, 1, 1}, {1, 4, 68}, {2, 3, 100}, {5, 32, 576}, {7, 33, 1000}, {17, 64, 2048}, {13, 70, 4100},
                          {6, 130, 129}, {0, 4, 64}, {4, 0, 64}}) {
        const int64_t ld_x = s.n + 3, ld_w = s.n + 5, ld_out = s.n_w + 1, ld_a = s.n_w + 2, ld_y = s.n + 1;
        // Exactly sized: what lies past the last value belongs to a sanitizer.
        const auto exact = [](int64_t n_rows, int64_t ld, int64_t n) { return size_t(n_rows > 0 ? (n_rows - 1) * ld + n : 0); };
        const std::vector<float> x = random_x(int64_t(exact(s.n_x, ld_x, s.n)));
        const std::vector<float> w = random_x(int64_t(exact(s.n_w, ld_w, s.n)));
        std::vector<float> out(exact(s.n_x, ld_out, s.n_w), 7.0f), out_scalar = out;
        table.matmul_nt(s.n_x, s.n_w, s.n, x.data(), ld_x, w.data(), ld_w, out.data(), ld_out);
        scalar.matmul_nt(s.n_x, s.n_w, s.n, x.data(), ld_x, w.data(), ld_w, out_scalar.data(), ld_out);
        for (int64_t t = 0; t < s.n_x; ++t) {
            for (int64_t i = 0; i < s.n_w; ++i) {
                double want = 0.0, magnitude = 0.0;
                for (int64_t j = 0; j < s.n; ++j) {
                    const double part = double(x[t * ld_x + j]) * w[i * ld_w + j];
                    want += part;
                    magnitude += std::fabs(part);
                }
                CHECK_NEAR(out[t * ld_out + i], want, float_sum_tolerance * magnitude);
                CHECK_NEAR(out[t * ld_out + i], out_scalar[t * ld_out + i], set_tolerance * magnitude);
            }
            if (t > 0 && s.n_w > 0) {
                CHECK(out[t * ld_out - 1] == 7.0f);  // between rows: untouched
            }
        }
        // One token's result doesn't depend on the tokens beside it.
        for (int64_t t = 0; t < s.n_x && s.n_w > 0; ++t) {
            std::vector<float> alone(s.n_w);
            table.matmul_nt(1, s.n_w, s.n, x.data() + t * ld_x, ld_x, w.data(), ld_w, alone.data(), s.n_w);
            CHECK(std::memcmp(alone.data(), out.data() + t * ld_out, s.n_w * sizeof(float)) == 0);
        }

        for (const double density : {0.0, 0.1, 0.7, 1.0}) {
            std::vector<float> a = random_x(int64_t(exact(s.n_x, ld_a, s.n_w)));
            for (float & v : a) {
                v = std::uniform_real_distribution<double>()(rng) < density ? v : 0.0f;
            }
            const std::vector<float> y = random_x(int64_t(exact(s.n_x, ld_y, s.n)));
            std::vector<float> sum = y;
            table.matmul_nn_add(s.n_x, s.n_w, s.n, a.data(), ld_a, w.data(), ld_w, sum.data(), ld_y);
            for (int64_t t = 0; t < s.n_x; ++t) {
                for (int64_t j = 0; j < s.n; ++j) {
                    double want = y[t * ld_y + j], magnitude = std::fabs(want);
                    for (int64_t i = 0; i < s.n_w; ++i) {
                        const double part = double(a[t * ld_a + i]) * w[i * ld_w + j];
                        want += part;
                        magnitude += std::fabs(part);
                    }
                    CHECK_NEAR(sum[t * ld_y + j], want, float_sum_tolerance * magnitude);
                }
                if (t > 0) {
                    CHECK(sum[t * ld_y - 1] == y[t * ld_y - 1]);
                }
            }
            for (int64_t t = 0; t < s.n_x && s.n_w > 0; ++t) {
                std::vector<float> alone(y.begin() + t * ld_y, y.begin() + t * ld_y + s.n);
                table.matmul_nn_add(1, s.n_w, s.n, a.data() + t * ld_a, ld_a, w.data(), ld_w, alone.data(), ld_y);
                CHECK(std::memcmp(alone.data(), sum.data() + t * ld_y, s.n * sizeof(float)) == 0);
            }
        }
    }
}

// A row of w that one token doesn't use may hold NaN: the token beside it that does use it gets NaN, it doesn't.
void test_matmul_skips_zeros(const kernel_table & table) {
    const int64_t n_x = 4, n_w = 40, n = 129;
    std::vector<float> a = random_x(n_x * n_w), w = random_x(n_w * n), y(n_x * n);
    std::fill(w.begin() + 7 * n, w.begin() + 8 * n, std::nanf(""));
    a[0 * n_w + 7] = 0.0f;
    a[2 * n_w + 7] = -0.0f;
    table.matmul_nn_add(n_x, n_w, n, a.data(), n_w, w.data(), n, y.data(), n);
    for (int64_t i = 0; i < n_x * n; ++i) {
        CHECK(std::isnan(y[i]) == (i / n % 2 == 1));
    }
}

void test_add(const kernel_table & table) {
    for (const int64_t n : {0, 1, 7, 16, 33, 100, 4100}) {
        const std::vector<float> x = random_x(n), y = random_x(n);
        std::vector<float> sum = y;
        table.add(n, x.data(), sum.data());
        for (int64_t j = 0; j < n; ++j) {
            CHECK(sum[j] == x[j] + y[j]);
        }
    }
}

void test_silu(const kernel_table & table) {
    std::vector<float> v;
    for (int i = -88 * 64; i <= 200 * 64; ++i) {
        v.push_back(float(i) / 64.0f + 0.3e-3f);
    }
    for (float size = 1e-45f; size < 1.0f; size *= 3.0f) {
        v.push_back(size);
        v.push_back(-size);
    }
    std::vector<float> out = v;
    table.silu(int64_t(out.size()), out.data());
    for (size_t i = 0; i < v.size(); ++i) {
        const double want = v[i] / (1.0 + std::exp(-double(v[i])));
        // A subnormal result has fewer digits than the tolerance asks for.
        CHECK_NEAR(out[i], want, silu_tolerance * std::fabs(want) + std::numeric_limits<float>::denorm_min());
    }
    const float infinity = std::numeric_limits<float>::infinity();
    const float largest = std::numeric_limits<float>::max();
    std::vector<float> edges = {std::nanf(""), infinity, -infinity, largest, -largest, 0.0f, -0.0f, -1000.0f, -104.0f, -90.0f};
    table.silu(int64_t(edges.size()), edges.data());
    CHECK(std::isnan(edges[0]));
    CHECK(edges[1] == infinity);
    CHECK(edges[2] == 0.0f);
    CHECK(edges[3] == largest);
    CHECK(edges[4] == 0.0f);
    CHECK(edges[5] == 0.0f && edges[6] == 0.0f);
    CHECK(edges[7] == 0.0f);
    CHECK(edges[8] <= 0.0f && edges[8] > silu_zero_input * 1e-38f);
    CHECK(edges[9] <= 0.0f && edges[9] > silu_zero_input * 1e-38f);
    for (const int64_t n : {0, 1, 5, 17}) {  // nothing past n is touched
        std::vector<float> some(n + 1, 2.0f);
        table.silu(n, some.data());
        CHECK(some[n] == 2.0f);
        CHECK(n == 0 || some[n - 1] != 2.0f);
    }
}

void test_selection(const kernel_table & table) {
    const kernel_table * const * tables;
    const int n_tables = kernel_table_list(&tables);
    const kernel_table * best = nullptr;
    for (int i = 0; i < n_tables; ++i) {
        CHECK(kernel_table_select(tables[i]->name) == (tables[i]->is_supported() ? tables[i] : nullptr));
        if (best == nullptr && tables[i]->is_supported()) {
            best = tables[i];
        }
    }
    CHECK(kernel_table_select(nullptr) == best);
    CHECK(kernel_table_select("") == best);
    CHECK(kernel_table_select("avx") == nullptr);
    CHECK(kernel_table_select("AVX2") == nullptr);
    CHECK(std::strcmp(tables[n_tables - 1]->name, "scalar") == 0);
    CHECK(kernel_table_find(&table, 10) == nullptr);  // Q2_K: a slow row type
    CHECK(kernel_table_find(&table, -1) == nullptr);
    CHECK(table.n_rows == int(std::size(all_types)));
}

}  // namespace

int main() {
    const char * name = std::getenv("POWERINFER_KERNELS");
    const kernel_table * table = kernel_table_select(name);
    if (table == nullptr) {
        const kernel_table * const * tables;
        const int n_tables = kernel_table_list(&tables);
        for (int i = 0; i < n_tables; ++i) {
            if (std::strcmp(tables[i]->name, name) == 0) {
                std::fprintf(stderr, "this CPU does not have %s\n", name);
                return 77;
            }
        }
        std::fprintf(stderr, "POWERINFER_KERNELS is %s; expected a set of this build\n", name);
        return 1;
    }
    CHECK(name == nullptr || name[0] == '\0' || std::strcmp(table->name, name) == 0);
    std::fprintf(stderr, "kernel set %s\n", table->name);

    test_selection(*table);
    for (const int type : all_types) {
        test_rows_against_reference(*table, type);
        test_unpack_is_exact(*table, type);
        test_row_result_is_independent_of_the_list(*table, type);
        test_whole_numbers_are_exact(*table, type);
        test_nan_and_infinity_propagate(*table, type);
        test_x_of_zeros_and_extremes(*table, type);
    }
    test_matmul(*table);
    test_matmul_skips_zeros(*table);
    test_add(*table);
    test_silu(*table);
    return check_result();
}
