// The tile unit's products of the set named by POWERINFER_KERNELS against a reference in double; and that the caller's tile
// configuration survives them.
#include "check.h"
#include "kernels/kernel-table.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

using namespace powerinfer;

namespace {

// Relative to the sum of magnitudes. One part: both operands are rounded to bf16, 2^-8 each. Two parts: 2^-16 each is left.
constexpr double tolerance[] = {0.0, 0x1p-7, 0x1p-15};

std::mt19937 rng(11);

std::vector<float> random_values(int64_t n) {
    std::vector<float> v(n);
    for (float & value : v) {
        value = std::normal_distribution<float>()(rng);
    }
    return v;
}

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

struct free_bytes { void operator()(uint8_t * p) const { std::free(p); } };
using packed = std::unique_ptr<uint8_t, free_bytes>;

packed allocate(size_t n) { return packed(static_cast<uint8_t *>(std::aligned_alloc(64, round_up(int64_t(n), 64)))); }

struct operands {
    const tile_kernels & tiles;
    int64_t n_rows;
    int64_t n_columns;
    int64_t n;
    int n_parts;
    size_t row_bytes = tiles.operand_bytes(1, n, 1) / 16;
    size_t left_part = tiles.operand_bytes(n_rows, n, 1);
    size_t right_part = tiles.operand_bytes(n_columns, n, 1);
    packed left = allocate(tiles.operand_bytes(n_rows, n, n_parts));
    packed right = allocate(tiles.operand_bytes(n_columns, n, n_parts));

    std::vector<float> multiply(bool accumulate, std::vector<float> out) const {
        tiles.multiply(n_rows, n_columns, n, left.get(), row_bytes, n_parts > 1 ? left_part : 0, right.get(),
                       n_parts > 1 ? right_part : 0, accumulate, out.data(), round_up(n_columns, 16));
        return out;
    }
};

void test_products(const tile_kernels & tiles, int64_t n_rows, int64_t n_columns, int64_t n, int n_parts) {
    const std::vector<float> a = random_values(n_rows * n);
    const std::vector<float> b = random_values(n_columns * n);  // (n_columns, n)
    const int64_t ld = round_up(n_columns, 16);
    const std::vector<float> nan(round_up(n_rows, 16) * ld, std::nanf(""));
    const operands o{tiles, n_rows, n_columns, n, n_parts};
    tiles.pack_left(n_rows, n, a.data(), n, n_parts, o.left.get(), o.row_bytes, o.left_part);
    for (int64_t j = 0; j < n_columns; j += 16) {
        uint8_t * piece = o.right.get() + (j > 0 ? tiles.operand_bytes(j, n, 1) : 0);
        tiles.pack_right_transposed(std::min<int64_t>(16, n_columns - j), n, &b[j * n], n, n_parts, piece, o.right_part);
    }
    const std::vector<float> by_rows = o.multiply(false, nan);

    // The same right operand, given by pairs of its rows.
    std::vector<float> bt(n * n_columns);
    for (int64_t j = 0; j < n_columns; ++j) {
        for (int64_t k = 0; k < n; ++k) {
            bt[k * n_columns + j] = b[j * n + k];
        }
    }
    std::memset(o.right.get(), 0xff, tiles.operand_bytes(n_columns, n, n_parts));
    for (int64_t k = 0; k < round_up(n, 32); k += 2) {
        tiles.pack_right_pair(n_columns, n, k, k < n ? &bt[k * n_columns] : nullptr, k + 1 < n ? &bt[(k + 1) * n_columns] : nullptr,
                              n_parts, o.right.get(), o.right_part);
    }
    const std::vector<float> by_pairs = o.multiply(false, nan);
    const std::vector<float> twice = o.multiply(true, by_pairs);
    for (int64_t i = 0; i < n_rows; ++i) {
        for (int64_t j = 0; j < n_columns; ++j) {
            double sum = 0.0, magnitude = 0.0;
            for (int64_t k = 0; k < n; ++k) {
                const double part = double(a[i * n + k]) * b[j * n + k];
                sum += part;
                magnitude += std::fabs(part);
            }
            CHECK_NEAR(by_rows[i * ld + j], sum, tolerance[n_parts] * magnitude);
            CHECK(std::memcmp(&by_rows[i * ld + j], &by_pairs[i * ld + j], sizeof(float)) == 0);
            CHECK_NEAR(twice[i * ld + j], 2.0 * sum, 2.0 * tolerance[n_parts] * magnitude);
        }
    }
}

// A row with NaN or infinity spoils its own results only.
void test_bad_rows_stay_alone(const tile_kernels & tiles) {
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
        std::vector<float> a = random_values(20 * 64);
        const std::vector<float> b = random_values(16 * 64);
        a[7 * 64 + 40] = bad;
        const operands o{tiles, 20, 16, 64, 2};
        tiles.pack_left(20, 64, a.data(), 64, 2, o.left.get(), o.row_bytes, o.left_part);
        tiles.pack_right_transposed(16, 64, b.data(), 64, 2, o.right.get(), o.right_part);
        const std::vector<float> out = o.multiply(false, std::vector<float>(32 * 16));
        for (int64_t i = 0; i < 20; ++i) {
            for (int64_t j = 0; j < 16; ++j) {
                CHECK(std::isfinite(out[i * 16 + j]) == (i != 7));
            }
        }
    }
}

#if defined(__x86_64__)
// ggml's CPU backend configures its tiles once per thread.
void test_tile_configuration_is_restored(const tile_kernels & tiles) {
    struct alignas(64) config { uint8_t bytes[64]; };
    config theirs = {{1}};
    theirs.bytes[16] = 32;  // bytes per row of tile 0
    theirs.bytes[48] = 8;   // its rows
    __asm__ volatile("ldtilecfg %0" ::"m"(theirs));
    test_products(tiles, 16, 16, 32, 1);
    config after = {};
    __asm__ volatile("sttilecfg %0" : "=m"(after));
    __asm__ volatile("tilerelease");
    CHECK(std::memcmp(&theirs, &after, sizeof(config)) == 0);
}
#endif

}  // namespace

int main() {
    const kernel_table * table = kernel_table_select(std::getenv("POWERINFER_KERNELS"));
    if (table == nullptr || table->tiles == nullptr) {
        std::fprintf(stderr, "this CPU or this kernel set has no tile unit\n");
        return 77;
    }
    for (const int n_parts : {1, 2}) {
        for (const int64_t n_rows : {1, 5, 16, 33, 64}) {
            for (const int64_t n_columns : {1, 16, 30, 130}) {
                for (const int64_t n : {1, 31, 32, 100, 576}) {
                    test_products(*table->tiles, n_rows, n_columns, n, n_parts);
                }
            }
        }
    }
    test_bad_rows_stay_alone(*table->tiles);
#if defined(__x86_64__)
    test_tile_configuration_is_restored(*table->tiles);
#endif
    return check_result();
}
