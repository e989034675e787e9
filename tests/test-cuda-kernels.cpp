// Every CUDA kernel against the scalar set and sums in double: all types, lengths and lists. Built twice: with cuda-shim.h,
// where it runs on the CPU and the shim's own checks are tested too, and with nvcc, where it needs a GPU (else exit code 77).
#include "check.h"
#include "gpu/cuda-kernels.cuh"
#include "kernels/kernel-table.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#ifdef POWERINFER_CUDA_SHIM
#include <csignal>
#include <cstdlib>

#include <sys/wait.h>
#include <unistd.h>
#endif

using namespace powerinfer;

namespace {

// A float sum of n terms errs by n * 2^-24 of the sum of magnitudes at most; random signs make it far smaller. 1000 times
// below what one wrong value does.
constexpr double sum_tolerance = 2e-6;
// act(gate) * up of values of size 1: two sums and an activation, whose functions differ by a few last bits between libraries.
constexpr double value_tolerance = 2e-5;
// gelu's results are rounded to F16: a last bit of the input may flip the last bit of the result.
constexpr double half_tolerance = 0x1p-10;
// A value this near a limit may fall on either side of it.
constexpr double limit_margin = 2e-5;

constexpr int all_types[] = {row_type_f32, row_type_f16, row_type_bf16, row_type_q8_0, row_type_q4_0, row_type_q4_k};

std::mt19937 & rng() {
    static std::mt19937 instance(11);
    return instance;
}

std::vector<float> random_values(size_t n, float scale = 1.0f) {
    std::uniform_real_distribution<float> uniform(-scale, scale);
    std::vector<float> values(n);
    for (float & v : values) {
        v = uniform(rng());
    }
    return values;
}

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// A copy of host values on the device.
template <class T>
class on_device {
public:
    explicit on_device(const std::vector<T> & values) : n_(values.size()) {
        CHECK(cudaMalloc(reinterpret_cast<void **>(&data_), std::max<size_t>(n_, 1) * sizeof(T)) == cudaSuccess);
        CHECK(cudaMemcpy(data_, values.data(), n_ * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
    }
    on_device(size_t n, T value) : on_device(std::vector<T>(n, value)) {}
    ~on_device() { cudaFree(data_); }
    on_device(const on_device &) = delete;
    on_device & operator=(const on_device &) = delete;

    T * data() const { return data_; }
    std::vector<T> read() const {
        std::vector<T> values(n_);
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        CHECK(cudaMemcpy(values.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
        return values;
    }

private:
    T * data_ = nullptr;
    size_t n_ = 0;
};

const float nan_value = std::numeric_limits<float>::quiet_NaN();

// Rows as both sides store them.
struct matrix {
    int64_t n = 0;
    int64_t n_rows = 0;
    size_t row_bytes = 0;
    const row_kernels * scalar = nullptr;
    std::vector<uint8_t> rows;  // (n_rows, row_bytes), and the tail that kernels may read
    std::vector<float> values;  // (n_rows, n) that they stand for
    std::unique_ptr<on_device<uint8_t>> copy;
    cuda_matrix device;

    matrix(int type, int64_t n_rows, int64_t n, std::vector<float> from) : n(n), n_rows(n_rows), values(std::move(from)) {
        scalar = kernel_table_find(&kernels_scalar, type);
        row_bytes = ggml_row_size(static_cast<ggml_type>(type), n);
        rows.resize(n_rows * row_bytes + row_tail_bytes);
        for (int64_t i = 0; i < n_rows; ++i) {
            if (type == GGML_TYPE_F32) {
                std::memcpy(&rows[i * row_bytes], &values[i * n], row_bytes);
            } else {
                ggml_quantize_chunk(static_cast<ggml_type>(type), &values[i * n], &rows[i * row_bytes], 0, 1, n, nullptr);
            }
            scalar->unpack_row(n, &rows[i * row_bytes], &values[i * n]);
        }
        copy.reset(new on_device<uint8_t>(std::vector<uint8_t>(rows.begin(), rows.begin() + n_rows * row_bytes)));
        device.rows = copy->data();
        device.stride_bytes = static_cast<int64_t>(row_bytes);
        device.row_type = type;
        device.n = static_cast<int>(n);
    }
    matrix(int type, int64_t n_rows, int64_t n, float scale = 1.0f) : matrix(type, n_rows, n, random_values(n_rows * n, scale)) {}

    std::vector<float> dots(const float * x) const {
        std::vector<float> packed(scalar->packed_x_bytes(n) / sizeof(float) + 1);
        std::vector<float> out(n_rows);
        scalar->pack_x(n, x, packed.data());
        scalar->dot_rows(n, rows.data(), row_bytes, nullptr, n_rows, n_rows, packed.data(), out.data());
        return out;
    }
};

// Inputs (n_tokens, n) on the device, packed there.
struct input {
    int64_t ld;
    on_device<float> values;
    on_device<cuda_block_x> packed;
    cuda_input device;

    static std::vector<float> padded(const std::vector<float> & x, int64_t n_tokens, int64_t n) {
        const int64_t ld = round_up(n, cuda_input_unit);
        std::vector<float> rows(n_tokens * ld, 0.0f);
        for (int64_t t = 0; t < n_tokens; ++t) {
            std::copy_n(&x[t * n], n, &rows[t * ld]);
        }
        return rows;
    }

    input(const std::vector<float> & x, int64_t n_tokens, int64_t n)
        : ld(round_up(n, cuda_input_unit)),
          values(padded(x, n_tokens, n)),
          packed(n_tokens * ld / block_values, cuda_block_x{nan_value, 7, {}}) {
        CHECK(cuda_pack(static_cast<int>(n_tokens), values.data(), ld, packed.data(), nullptr) == cudaSuccess);
        device.values = values.data();
        device.packed = packed.data();
        device.ld = ld;
    }
};

std::vector<int64_t> lengths_of(int type) {
    if (!cuda_reads_packed(type)) {
        return {8, 24, 32, 72, 104, 576, 1000, 2048, 4104, 4160};
    }
    return type == row_type_q4_k ? std::vector<int64_t>{256, 768, 2048, 4352}
                                 : std::vector<int64_t>{32, 64, 160, 576, 2048, 4128, 4160};
}

void test_pack() {
    std::vector<float> x = random_values(8 * block_values);
    std::fill_n(&x[block_values], block_values, 0.0f);
    std::fill_n(&x[2 * block_values], block_values, 1e-38f);
    x[3 * block_values + 5] = nan_value;
    x[4 * block_values + 31] = std::numeric_limits<float>::infinity();
    x[5 * block_values] = -1e30f;
    x[6 * block_values + 1] = 0.5f * 127.0f;  // ties round to even
    x[6 * block_values + 2] = 127.0f;
    const input in(x, 2, 4 * block_values);
    const std::vector<cuda_block_x> packed = in.packed.read();
    const row_kernels * scalar = kernel_table_find(&kernels_scalar, row_type_q8_0);
    CHECK(scalar->packed_x_bytes(8 * block_values) == packed.size() * sizeof(cuda_block_x));
    std::vector<cuda_block_x> expected(packed.size());
    scalar->pack_x(8 * block_values, x.data(), expected.data());
    for (size_t i = 0; i < packed.size(); ++i) {
        CHECK_NEAR(packed[i].d, expected[i].d, 0.0);
        CHECK(packed[i].sum == expected[i].sum);
        CHECK(std::memcmp(packed[i].q, expected[i].q, block_values) == 0);
    }
}

void test_dot_rows(int type, int64_t n, int64_t n_rows, int64_t n_tokens, bool relu) {
    const matrix m(type, n_rows, n);
    std::vector<float> x = random_values(n_tokens * n);
    const input in(x, n_tokens, n);
    const int64_t ld = round_up(n_rows, cuda_input_unit);
    on_device<float> out(n_tokens * ld, nan_value);
    CHECK(cuda_dot_rows(n_tokens, m.device, n_rows, in.device, relu, out.data(), ld, nullptr) == cudaSuccess);
    const std::vector<float> y = out.read();
    for (int64_t t = 0; t < n_tokens; ++t) {
        const std::vector<float> expected = m.dots(&x[t * n]);
        for (int64_t i = 0; i < n_rows; ++i) {
            double magnitude = 0.0;
            for (int64_t j = 0; j < n; ++j) {
                magnitude += std::fabs(m.values[i * n + j] * x[t * n + j]);
            }
            CHECK_NEAR(y[t * ld + i], relu ? std::max(expected[i], 0.0f) : expected[i], sum_tolerance * magnitude + 1e-30);
        }
        for (int64_t i = n_rows; i < ld; ++i) {
            CHECK(y[t * ld + i] == 0.0f);
        }
    }
}

// A NaN in x reaches every result, relu or not.
void test_nan_input(int type) {
    const matrix m(type, 3, 256);
    std::vector<float> x = random_values(256);
    x[77] = nan_value;
    const input in(x, 1, 256);
    on_device<float> out(32, 0.0f);
    CHECK(cuda_dot_rows(1, m.device, 3, in.device, true, out.data(), 32, nullptr) == cudaSuccess);
    const std::vector<float> y = out.read();
    CHECK(std::isnan(y[0]) && std::isnan(y[1]) && std::isnan(y[2]));
}

// A token's list, read back.
struct entries {
    std::vector<int32_t> ids;
    std::vector<float> values;
};

struct lists {
    int n_tiles;
    on_device<int32_t> ids;
    on_device<float> values;
    on_device<int32_t> n_ids;
    on_device<unsigned long long> totals;
    cuda_list device;

    lists(int64_t n_tokens, int64_t n)
        : n_tiles(cuda_n_tiles(n)),
          ids(n_tokens * n_tiles * cuda_tile_neurons, -1),
          values(n_tokens * n_tiles * cuda_tile_neurons, nan_value),
          n_ids(n_tokens * n_tiles, -1),
          totals(cuda_n_totals, 100) {
        device.ids = ids.data();
        device.values = values.data();
        device.n_ids = n_ids.data();
        device.totals = totals.data();
    }

    std::vector<entries> read() const {
        const std::vector<int32_t> all_ids = ids.read();
        const std::vector<float> all_values = values.read();
        const std::vector<int32_t> counts = n_ids.read();
        std::vector<entries> out(counts.size() / n_tiles);
        for (size_t i = 0; i < counts.size(); ++i) {
            if (!CHECK(counts[i] >= 0 && counts[i] <= cuda_tile_neurons)) {
                continue;
            }
            entries & e = out[i / n_tiles];
            e.ids.insert(e.ids.end(), &all_ids[i * cuda_tile_neurons], &all_ids[i * cuda_tile_neurons] + counts[i]);
            e.values.insert(e.values.end(), &all_values[i * cuda_tile_neurons], &all_values[i * cuda_tile_neurons] + counts[i]);
        }
        return out;
    }
};

double activate(cuda_activation activation, double param, double v) {
    auto half = [](double value) { return static_cast<double>(ggml_fp16_to_fp32(ggml_fp32_to_fp16(static_cast<float>(value)))); };
    switch (activation) {
        case cuda_activation::relu:
        case cuda_activation::drelu:    return v <= param ? 0.0 : v;
        case cuda_activation::relu_sqr: return v <= param ? 0.0 : v * v;
        case cuda_activation::silu:     return v / (1.0 + std::exp(-v));
        case cuda_activation::gelu:     {
            const double h = half(v);
            return half(0.5 * h * (1.0 + std::tanh(0.79788456080286536 * h * (1.0 + 0.044715 * h * h))));
        }
        case cuda_activation::gelu_erf:   return 0.5 * v * (1.0 + std::erf(v * 0.70710678118654752));
        case cuda_activation::gelu_quick: return half(half(v) / (1.0 + std::exp(-1.702 * half(v))));
    }
    return 0.0;
}

struct block_case {
    int type = row_type_f32;
    int64_t n_embd = 64;
    int64_t n = 64;
    int64_t n_tokens = 1;
    bool gated = true;
    bool nan_scores = false;
    int scores = 0;  // when predicted: 0 none, 1 one, 2 all, 3 odd ones, 4 every third
    cuda_rule rule;
};

// Which neurons a block uses, with what values; then its down rows.
void test_block(const block_case & c) {
    const double size = 1.0 / std::sqrt(static_cast<double>(c.n_embd));
    const matrix first(c.type, c.n, c.n_embd, 3.0f * size);
    const matrix second(c.type, c.n, c.n_embd, 3.0f * size);
    const matrix down(c.type, c.n, c.n_embd);
    const int64_t rank = 32;
    std::vector<float> fc2_values(c.n * rank, 0.0f);
    const float threshold = 0.25f;
    std::vector<bool> wanted(c.n, true);
    for (int64_t i = 0; i < c.n && c.rule.is_predicted; ++i) {
        wanted[i] =
            c.scores == 2 || (c.scores == 1 && i == c.n / 2) || (c.scores == 3 && i % 2 == 1) || (c.scores == 4 && i % 3 == 0);
        fc2_values[i * rank] = wanted[i] ? (c.nan_scores ? nan_value : threshold) : 0.249f;  // at the threshold: computed
    }
    const matrix fc2(row_type_f32, c.n, rank, fc2_values);
    std::vector<float> hidden(c.n_tokens * rank, 0.0f);
    for (int64_t t = 0; t < c.n_tokens; ++t) {
        hidden[t * rank] = 1.0f;
    }
    const std::vector<float> x = random_values(c.n_tokens * c.n_embd);
    const input in(x, c.n_tokens, c.n_embd);
    const input in_hidden(hidden, c.n_tokens, rank);
    const std::vector<float> first_bias = random_values(c.n);
    const std::vector<float> second_bias = random_values(c.n);
    std::vector<float> norm(c.n);
    for (int64_t i = 0; i < c.n; ++i) {
        norm[i] = 0.5f + 0.01f * (i % 50);
    }
    const on_device<float> first_bias_copy(first_bias);
    const on_device<float> second_bias_copy(second_bias);
    const on_device<float> norm_copy(norm);

    cuda_neurons neurons;
    neurons.n = static_cast<int>(c.n);
    neurons.first = first.device;
    neurons.second = c.gated ? second.device : cuda_matrix();
    neurons.down = down.device;
    neurons.fc2 = c.rule.is_predicted ? fc2.device : cuda_matrix();
    neurons.first_bias = first_bias_copy.data();
    neurons.second_bias = second_bias_copy.data();
    neurons.down_norm = norm_copy.data();
    cuda_rule rule = c.rule;
    rule.predictor_threshold = threshold;

    const lists list(c.n_tokens, c.n);
    CHECK(cuda_select(static_cast<int>(c.n_tokens), neurons, rule, in.device, in_hidden.device, list.device, nullptr) ==
          cudaSuccess);
    const std::vector<entries> found = list.read();
    const int64_t ld = in.ld;
    on_device<float> sums(c.n_tokens * cuda_n_splits(c.n) * ld, nan_value);
    on_device<float> y(c.n_tokens * ld, nan_value);
    CHECK(cuda_sum_down(static_cast<int>(c.n_tokens), neurons.n, down.device, list.device, sums.data(), y.data(), ld, nullptr) ==
          cudaSuccess);
    const std::vector<float> out = y.read();

    const bool is_half = rule.activation == cuda_activation::gelu || rule.activation == cuda_activation::gelu_quick;
    const double tolerance = is_half ? half_tolerance : value_tolerance;
    const double margin = is_half ? half_tolerance : limit_margin;
    uint64_t totals[cuda_n_totals] = {};
    bool certain = true;
    for (int64_t t = 0; t < c.n_tokens; ++t) {
        const std::vector<float> gate = first.dots(&x[t * c.n_embd]);
        const std::vector<float> up = second.dots(&x[t * c.n_embd]);
        const entries & e = found[t];
        CHECK(std::is_sorted(e.ids.begin(), e.ids.end()));
        size_t at = 0;
        for (int64_t i = 0; i < c.n; ++i) {
            const bool is_found = at < e.ids.size() && e.ids[at] == i;
            if (!wanted[i]) {
                CHECK(!is_found);
                continue;
            }
            ++totals[0];
            const double a = activate(rule.activation, rule.activation_param, gate[i] + (rule.add_biases ? first_bias[i] : 0.0));
            auto near = [&](double v, double limit) { return limit > 0.0 && std::fabs(std::fabs(v) - limit) < margin; };
            certain = certain && !near(a, rule.gate_limit);
            bool keep = rule.is_dense || !(a == 0.0 || std::fabs(a) < rule.gate_limit);
            totals[1] += keep && c.gated;
            double h = a;
            if (c.gated) {
                double u = up[i] + (rule.add_biases ? second_bias[i] : 0.0);
                u = rule.activation == cuda_activation::drelu ? std::max(u, 0.0) : u;
                h *= u;
            }
            certain = certain && !near(h * norm[i], rule.product_limit);
            keep = keep && (rule.is_dense || !(h == 0.0 || std::fabs(h) * norm[i] < rule.product_limit));
            totals[2] += keep;
            totals[3] += keep && h != 0.0;
            if (!near(a, rule.gate_limit) && !near(h * norm[i], rule.product_limit)) {
                CHECK(is_found == keep);
            }
            if (is_found) {
                CHECK_NEAR(e.values[at], h, tolerance * std::max(1.0, std::fabs(h)));
            }
            at += is_found;
        }
        CHECK(at == e.ids.size());
        for (int64_t j = 0; j < c.n_embd; ++j) {
            double sum = 0.0;
            double magnitude = 0.0;
            for (size_t k = 0; k < e.ids.size(); ++k) {
                const double term = static_cast<double>(e.values[k]) * down.values[e.ids[k] * c.n_embd + j];
                sum += term;
                // A Q4_K value is a difference, which may be far smaller than what it is the difference of (at most 1 here).
                magnitude += c.type == row_type_q4_k ? std::fabs(e.values[k]) : std::fabs(term);
            }
            CHECK_NEAR(out[t * ld + j], sum, sum_tolerance * magnitude + 1e-30);
        }
    }
    const std::vector<unsigned long long> counted = list.totals.read();
    for (int i = 0; i < cuda_n_totals && certain; ++i) {
        CHECK(counted[i] == 100 + totals[i]);
    }
#ifdef POWERINFER_CUDA_SHIM
    // Threads in another order: no result may depend on it, nor on what memory held before.
    cuda_shim::reverse_order = true;
    const lists again(c.n_tokens, c.n);
    CHECK(cuda_select(static_cast<int>(c.n_tokens), neurons, rule, in.device, in_hidden.device, again.device, nullptr) ==
          cudaSuccess);
    CHECK(cuda_sum_down(static_cast<int>(c.n_tokens), neurons.n, down.device, again.device, sums.data(), y.data(), ld, nullptr) ==
          cudaSuccess);
    cuda_shim::reverse_order = false;
    const std::vector<entries> found_again = again.read();
    for (int64_t t = 0; t < c.n_tokens; ++t) {
        CHECK(found[t].ids == found_again[t].ids);
        CHECK(found[t].values.empty() ||
              std::memcmp(found[t].values.data(), found_again[t].values.data(), found[t].values.size() * sizeof(float)) == 0);
    }
    const std::vector<float> out_again = y.read();
    CHECK(std::memcmp(out.data(), out_again.data(), out.size() * sizeof(float)) == 0);
#endif
}

void test_blocks() {
    using act = cuda_activation;
    for (const act activation : {act::relu, act::relu_sqr, act::drelu, act::silu, act::gelu, act::gelu_erf, act::gelu_quick}) {
        for (const bool gated : {true, false}) {
            for (const bool biases : {true, false}) {
                for (const int mode : {0, 1, 2, 3}) {  // dense, exact, threshold, predicted
                    block_case c;
                    c.n = 31;
                    c.gated = gated;
                    c.rule.activation = activation;
                    c.rule.activation_param = activation == act::relu && biases ? 0.3f : 0.0f;
                    c.rule.add_biases = biases;
                    c.rule.is_dense = mode == 0;
                    c.rule.is_predicted = mode == 3;
                    c.rule.gate_limit = mode >= 2 ? 0.11f : 0.0f;
                    c.rule.product_limit = mode >= 2 ? 0.05f : 0.0f;
                    c.scores = 4;
                    test_block(c);
                }
            }
        }
    }
    block_case c;
    c.rule.activation = act::relu;
    for (const int type : all_types) {
        c.type = type;
        for (const int64_t n : {1, 31, 64, 1000}) {
            c.n = n;
            c.n_embd = type == row_type_q4_k ? 256 : n == 1000 ? 64 : 576;
            c.n_tokens = n == 1000 ? 1 : 3;
            c.rule.is_predicted = false;
            test_block(c);
            c.rule.is_predicted = true;
            for (const int scores : {0, 1, 2, 3}) {
                c.scores = scores;
                c.nan_scores = scores == 3;
                test_block(c);
            }
        }
        for (const int64_t n_embd : lengths_of(type)) {
            c.n_embd = n_embd;
            c.n = 33;
            c.n_tokens = 2;
            c.rule.is_predicted = false;
            test_block(c);
        }
    }
}

#ifdef POWERINFER_CUDA_SHIM

// --- does the shim see what a GPU would get wrong? ---

struct words {
    int values[64];
};

void sync_in_a_branch(int * out) {
    if (threadIdx.x < 32) {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}

void sync_in_two_branches(int * out) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 1;
}

void shuffle_of_half_a_warp(int * out) { out[threadIdx.x] = threadIdx.x % 2 == 0 ? __shfl_xor_sync(0xffffffffu, 1, 2) : 0; }

void write_behind_shared(int * out) {
    CUDA_SHARED(words, s);
    s.values[threadIdx.x + 1] = 1;
    out[threadIdx.x] = 1;
}

void write_before_shared(int * out) {
    CUDA_SHARED(words, s);
    s.values[static_cast<int>(threadIdx.x) - 1] = 1;
    out[threadIdx.x] = 1;
}

void load_misaligned(int * out) { out[0] = static_cast<int>(__ldg(reinterpret_cast<const uint4 *>(out + 1)).x); }

// Needs a __syncthreads between its lines.
void neighbour_without_sync(int * out) {
    CUDA_SHARED(words, s);
    s.values[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = s.values[63 - threadIdx.x];
}

void healthy(int * out) {
    CUDA_SHARED(words, s);
    s.values[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = s.values[63 - threadIdx.x];
}

// Does a run in a child process end by a signal, or by a sanitizer's exit?
bool is_caught(void (*kernel)(int *), size_t shared_bytes) {
    const pid_t child = fork();
    if (child == 0) {
        std::signal(SIGSEGV, SIG_DFL);
        if (std::freopen("/dev/null", "w", stderr) == nullptr) {
            _exit(0);
        }
        int out[64];
        int * const to = out;
        CUDA_LAUNCH(kernel, dim3(1), dim3(64), shared_bytes, nullptr, to);
        _exit(0);
    }
    int status = 0;
    return waitpid(child, &status, 0) == child && !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void test_shim() {
    CHECK(!is_caught(healthy, sizeof(words)));
    CHECK(is_caught(sync_in_a_branch, 0));
    CHECK(is_caught(sync_in_two_branches, 0));
    CHECK(is_caught(shuffle_of_half_a_warp, 0));
    CHECK(is_caught(write_behind_shared, sizeof(words)));
    CHECK(is_caught(write_before_shared, sizeof(words)));
    CHECK(is_caught(write_before_shared, sizeof(words) - 16));
    CHECK(is_caught(load_misaligned, 0));
    int out[2][64];
    for (const bool reverse : {false, true}) {
        cuda_shim::reverse_order = reverse;
        int * const to = out[reverse];
        CUDA_LAUNCH(neighbour_without_sync, dim3(1), dim3(64), sizeof(words), nullptr, to);
    }
    cuda_shim::reverse_order = false;
    CHECK(std::memcmp(out[0], out[1], sizeof(out[0])) != 0);
}

#else

void test_shim() {}

#endif

}  // namespace

int main() {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        std::fprintf(stderr, "no CUDA device\n");
        return 77;
    }
    CHECK(cuda_check_kernels() == cudaSuccess);
    test_shim();
    test_pack();
    for (const int type : all_types) {
        for (const int64_t n : lengths_of(type)) {
            test_dot_rows(type, n, 9, 1, false);
        }
        test_dot_rows(type, 256, 1, 1, true);
        test_dot_rows(type, 256, 31, 3, true);
        test_dot_rows(type, 512, 64, 2, false);
        test_nan_input(type);
    }
    test_blocks();
    return check_result();
}
