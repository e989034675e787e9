// FFN blocks against a plain double-precision reference: every mode, activation and form, biases, order, any batch size.
#include "check.h"

#include "ffn.h"
#include "ggml-abi.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

using namespace powerinfer;

namespace {

// F32 sums of up to 1000 terms of size 1 against double: about 1000 * 2^-24 * sqrt(1000).
constexpr double f32_tolerance = 2e-4;
// A value this near a threshold may fall on either side of it, by summation order.
constexpr double threshold_margin = 1e-5;
// Rows and x rounded to 4 or 8 bits: the direction of y must hold (BUG_CASES 17).
constexpr double quantized_cosine = 0.999;

struct model {
    plan data;
    std::vector<float> gate;       // (n_ff, n_embd), base order, as the rows unpack
    std::vector<float> up;         // (n_ff, n_embd)
    std::vector<float> down;       // (n_embd, n_ff)
    std::vector<float> gate_bias;  // (n_ff)
    std::vector<float> up_bias;
    std::vector<float> down_bias;  // (n_embd)
};

std::mt19937 & rng() {
    static std::mt19937 instance(7);
    return instance;
}

std::vector<float> random_values(size_t n, float scale, bool integers = false) {
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    std::vector<float> values(n);
    for (float & v : values) {
        v = integers ? std::round(3.0f * uniform(rng())) : scale * uniform(rng());
    }
    return values;
}

// Rows in a ggml type, and the values that they stand for.
std::vector<uint8_t> to_type(int type, std::vector<float> & values, int64_t n) {
    const int64_t n_rows = values.size() / n;
    const size_t row_bytes = row_size_bytes(type, n);
    std::vector<uint8_t> bytes(row_bytes * n_rows);
    for (int64_t i = 0; i < n_rows; ++i) {
        if (type == GGML_TYPE_F32) {
            std::memcpy(&bytes[i * row_bytes], &values[i * n], n * sizeof(float));
        } else {
            ggml_quantize_chunk(static_cast<ggml_type>(type), &values[i * n], &bytes[i * row_bytes], 0, 1, n, nullptr);
        }
        row_to_float(type, &bytes[i * row_bytes], &values[i * n], n);
    }
    return bytes;
}

struct shape {
    int64_t n_embd = 64;
    int64_t n_ff = 96;
    int type = GGML_TYPE_F32;
    bool gated = true;
    bool biases = false;
    bool shuffled = true;
    bool integers = false;
    activation_kind activation = activation_kind::relu;
    float param = 0.0f;
};

struct built {
    model m;
    std::unique_ptr<ffn_store> store;
};

void build(const shape & s, const kernel_table * kernels, built & out) {
    model & m = out.m;
    m.data.n_layer = 1;
    m.data.n_embd = s.n_embd;
    m.data.gated = s.gated;
    m.data.activation = s.activation;
    m.data.path = "test.powerinfer.gguf";
    m.data.layers.resize(1);
    plan_layer & layer = m.data.layers[0];
    layer.n_ff = s.n_ff;
    layer.activation_param = s.param;
    if (s.shuffled) {
        layer.neuron_order.resize(s.n_ff);
        std::iota(layer.neuron_order.begin(), layer.neuron_order.end(), 0);
        std::shuffle(layer.neuron_order.begin(), layer.neuron_order.end(), rng());
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.n_embd));
    m.gate = random_values(s.n_ff * s.n_embd, 2.0f * scale, s.integers);
    m.up = random_values(s.n_ff * s.n_embd, 2.0f * scale, s.integers);
    m.down = random_values(s.n_ff * s.n_embd, 1.0f / std::sqrt(static_cast<float>(s.n_ff)), s.integers);
    const std::vector<uint8_t> gate = to_type(s.type, m.gate, s.n_embd);
    const std::vector<uint8_t> up = to_type(s.type, m.up, s.n_embd);
    const std::vector<uint8_t> down = to_type(s.type, m.down, s.n_ff);
    if (s.biases) {
        m.gate_bias = random_values(s.n_ff, 1.0f);
        m.up_bias = std::vector<float>(s.n_ff, 1.0f);
        m.down_bias = random_values(s.n_embd, 1.0f);
    }

    std::vector<digest_tensor> parts;
    auto part = [&](const char * name, int64_t ne0, int64_t ne1, const std::vector<uint8_t> & bytes) {
        parts.push_back({name, ggml_type_name(static_cast<ggml_type>(s.type)), ne0, ne1, bytes.data(), std::min<size_t>(4096, bytes.size())});
    };
    if (s.gated) {
        part("blk.0.ffn_gate.weight", s.n_embd, s.n_ff, gate);
    }
    part("blk.0.ffn_up.weight", s.n_embd, s.n_ff, up);
    part("blk.0.ffn_down.weight", s.n_ff, s.n_embd, down);
    layer.digest = plan_digest(parts);

    out.store.reset(new ffn_store(m.data, 0, kernels, false, false));
    auto announce = [&](ffn_role role, int type, int64_t ne0, int64_t ne1) {
        ffn_tensor_info info;
        info.row_type = type;
        info.ne0 = ne0;
        info.ne1 = ne1;
        const status result = out.store->announce(role, info);
        CHECK(result.ok());
    };
    auto set = [&](ffn_role role, const void * data) {
        const status result = out.store->set(role, data, nullptr);
        if (!CHECK(result.ok())) {
            std::fprintf(stderr, "%s\n", result.text().c_str());
        }
    };
    if (s.gated) {
        announce(ffn_role::gate, s.type, s.n_embd, s.n_ff);
    }
    announce(ffn_role::up, s.type, s.n_embd, s.n_ff);
    announce(ffn_role::down, s.type, s.n_ff, s.n_embd);
    if (s.biases) {
        if (s.gated) {
            announce(ffn_role::gate_bias, GGML_TYPE_F32, s.n_ff, 1);
        }
        announce(ffn_role::up_bias, GGML_TYPE_F32, s.n_ff, 1);
        announce(ffn_role::down_bias, GGML_TYPE_F32, s.n_embd, 1);
    }
    set(ffn_role::down, down.data());  // any order of arrival
    set(ffn_role::up, up.data());
    if (s.gated) {
        set(ffn_role::gate, gate.data());
    }
    if (s.biases) {
        if (s.gated) {
            set(ffn_role::gate_bias, m.gate_bias.data());
        }
        set(ffn_role::up_bias, m.up_bias.data());
        set(ffn_role::down_bias, m.down_bias.data());
    }
    CHECK(out.store->is_complete());
}

double activate(ffn_activation activation, double param, double v) {
    switch (activation) {
        case ffn_activation::relu:
        case ffn_activation::drelu:    return v > param ? v : 0.0;
        case ffn_activation::relu_sqr: return v > param ? v * v : 0.0;
        case ffn_activation::silu:     return v / (1.0 + std::exp(-v));
        case ffn_activation::gelu: {
            // Upstream's CPU gelu rounds its input and result to F16.
            const double h = ggml_fp16_to_fp32(ggml_fp32_to_fp16(static_cast<float>(v)));
            const double r = 0.5 * h * (1.0 + std::tanh(0.79788456080286536 * h * (1.0 + 0.044715 * h * h)));
            return ggml_fp16_to_fp32(ggml_fp32_to_fp16(static_cast<float>(r)));
        }
        case ffn_activation::gelu_erf:   return 0.5 * v * (1.0 + std::erf(v * 0.70710678118654752));
        case ffn_activation::gelu_quick: return v / (1.0 + std::exp(-1.702 * v));
    }
    return 0.0;
}

// (n_embd) of one token; also the number of neurons used. Empty when a value lies on a threshold.
std::vector<double> reference(const model & m, const shape & s, ffn_activation activation, const float * x, double threshold,
                              double product_threshold, int64_t & n_active, const std::vector<uint8_t> * mask) {
    auto on = [](double value, double limit) { return limit > 0.0 && std::fabs(std::fabs(value) - limit) < threshold_margin; };
    std::vector<double> y(s.n_embd, 0.0);
    n_active = 0;
    for (int64_t i = 0; i < s.n_ff; ++i) {
        if (mask != nullptr && !(*mask)[i]) {
            continue;
        }
        double g = 0.0;
        double u = 0.0;
        double norm = 0.0;
        for (int64_t j = 0; j < s.n_embd; ++j) {
            g += static_cast<double>(m.gate[i * s.n_embd + j]) * x[j];
            u += static_cast<double>(m.up[i * s.n_embd + j]) * x[j];
            norm += static_cast<double>(m.down[j * s.n_ff + i]) * m.down[j * s.n_ff + i];
        }
        if (s.biases) {
            g += m.gate_bias[i];
            u += m.up_bias[i];
        }
        const double a = activate(activation, s.param, s.gated ? g : u);
        if (on(a, threshold)) {
            return {};
        }
        if (a == 0.0 || std::fabs(a) < threshold) {
            continue;
        }
        double h = a;
        if (s.gated) {
            h *= activation == ffn_activation::drelu ? std::max(u, 0.0) : u;
        }
        if (on(h * std::sqrt(norm), product_threshold)) {
            return {};
        }
        if (h == 0.0 || std::fabs(h) * std::sqrt(norm) < product_threshold) {
            continue;
        }
        ++n_active;
        for (int64_t j = 0; j < s.n_embd; ++j) {
            y[j] += h * m.down[j * s.n_ff + i];
        }
    }
    for (int64_t j = 0; j < s.n_embd && s.biases; ++j) {
        y[j] += m.down_bias[j];
    }
    return y;
}

void compare(const std::vector<double> & expected, const float * y, bool exact_type) {
    if (exact_type) {
        for (size_t j = 0; j < expected.size(); ++j) {
            CHECK_NEAR(y[j], expected[j], f32_tolerance);
        }
        return;
    }
    double dot = 0.0;
    double ee = 0.0;
    double yy = 0.0;
    for (size_t j = 0; j < expected.size(); ++j) {
        dot += expected[j] * y[j];
        ee += expected[j] * expected[j];
        yy += static_cast<double>(y[j]) * y[j];
    }
    CHECK(expected.empty() || dot > quantized_cosine * std::sqrt(ee * yy));
}

ffn_activation kind_of(activation_kind activation) {
    switch (activation) {
        case activation_kind::relu_sqr: return ffn_activation::relu_sqr;
        case activation_kind::drelu:    return ffn_activation::drelu;
        case activation_kind::silu:     return ffn_activation::silu;
        case activation_kind::gelu:     return ffn_activation::gelu;
        default:                        return ffn_activation::relu;
    }
}

std::vector<float> forward(const built & b, const ffn_options & options, const kernel_table * kernels, int n_threads, int64_t n_tokens,
                           const std::vector<float> & x, ffn_result & result, ffn_workspace & workspace) {
    const int64_t n_embd = b.m.data.n_embd;
    std::vector<float> y(std::max<int64_t>(n_tokens, 1) * n_embd, std::numeric_limits<float>::quiet_NaN());
    ffn_forward(b.store->layer(), options, kernels, n_threads, n_tokens, x.data(), n_embd, y.data(), n_embd, workspace, result);
    return y;
}

// Outputs and counts of a call against the reference.
void check_batch(const built & b, const shape & s, const ffn_options & options, bool exact_type, int64_t n_tokens,
                 const std::vector<float> & x, const std::vector<float> & y, const ffn_result & result) {
    int64_t n_active = 0;
    bool certain = true;
    for (int64_t t = 0; t < n_tokens; ++t) {
        int64_t n = 0;
        const std::vector<double> expected = reference(b.m, s, options.activation, &x[t * s.n_embd], options.threshold,
                                                       options.product_threshold, n, nullptr);
        compare(expected, &y[t * s.n_embd], exact_type);
        certain = certain && !expected.empty();
        n_active += n;
    }
    CHECK(result.n_tokens == static_cast<uint64_t>(n_tokens));
    CHECK(result.n_candidates == static_cast<uint64_t>(n_tokens * s.n_ff));
    if (options.mode == ffn_mode::dense) {
        CHECK(result.n_active == static_cast<uint64_t>(n_tokens * s.n_ff));
    } else if (exact_type && certain) {
        CHECK(result.n_active == static_cast<uint64_t>(n_active));
    }
}

void test_shape(const shape & s, const kernel_table * kernels) {
    built b;
    build(s, kernels, b);
    const bool exact_type = s.type == GGML_TYPE_F32 || s.type == GGML_TYPE_F16 || s.type == GGML_TYPE_BF16;
    ffn_workspace workspace;
    for (const int64_t n_tokens : {1, 2, 3, 4, 17, 70}) {
        const std::vector<float> x = random_values(n_tokens * s.n_embd, 1.0f, s.integers);
        for (const ffn_mode mode : {ffn_mode::dense, ffn_mode::exact, ffn_mode::threshold}) {
            ffn_options options;
            options.mode = mode;
            options.activation = kind_of(s.activation);
            options.add_biases = s.biases;
            options.count = true;
            const bool thresholds = mode == ffn_mode::threshold && exact_type;
            options.threshold = thresholds ? 0.11f : 0.0f;
            options.product_threshold = thresholds ? 0.05f : 0.0f;
            std::vector<float> last;
            for (const int n_threads : {1, 2, 3}) {
                ffn_result result;
                const std::vector<float> y = forward(b, options, kernels, n_threads, n_tokens, x, result, workspace);
                check_batch(b, s, options, exact_type, n_tokens, x, y, result);
                uint64_t counted = 0;
                for (const uint32_t n : result.active) {
                    counted += n;
                }
                CHECK(counted == result.n_active);
                if (mode == ffn_mode::dense) {
                    uint64_t gates = 0;
                    uint64_t products = 0;
                    for (int i = 0; i < ffn_n_bins; ++i) {
                        gates += result.gate_histogram[i];
                        products += result.product_histogram[i];
                    }
                    CHECK(gates == static_cast<uint64_t>(n_tokens * s.n_ff));
                    CHECK(products == static_cast<uint64_t>(n_tokens * s.n_ff));
                }
                ffn_result again;
                CHECK(forward(b, options, kernels, n_threads, n_tokens, x, again, workspace) == y);  // same threads, same bits
                if (s.integers && !last.empty()) {
                    CHECK(y == last);  // exact sums: any thread count
                }
                last = y;
            }
        }
    }
}

// 2 to 16 tokens as a server decodes them: right, read once for all, and independent of each other.
void test_few_tokens(const shape & s, const kernel_table * kernels) {
    built b;
    build(s, kernels, b);
    const bool exact_type = s.type == GGML_TYPE_F32 || s.type == GGML_TYPE_F16 || s.type == GGML_TYPE_BF16;
    ffn_workspace workspace;
    for (const ffn_mode mode : {ffn_mode::dense, ffn_mode::exact, ffn_mode::threshold}) {
        ffn_options options;
        options.mode = mode;
        options.activation = kind_of(s.activation);
        options.add_biases = s.biases;
        options.threshold = mode == ffn_mode::threshold && exact_type ? 0.11f : 0.0f;
        options.product_threshold = mode == ffn_mode::threshold && exact_type ? 0.05f : 0.0f;
        for (const int64_t n_tokens : {int64_t(2), int64_t(5), ffn_few_tokens_dense, ffn_few_tokens}) {
            const std::vector<float> x = random_values(n_tokens * s.n_embd, 1.0f, s.integers);
            for (const int n_threads : {1, 2, 3}) {
                ffn_result result;
                const std::vector<float> y = forward(b, options, kernels, n_threads, n_tokens, x, result, workspace);
                check_batch(b, s, options, exact_type, n_tokens, x, y, result);
                CHECK(mode != ffn_mode::dense || result.read_bytes == result.dense_bytes);

                // Other neighbours, same bits.
                std::vector<float> others = random_values(n_tokens * s.n_embd, 1.0f, s.integers);
                std::copy_n(&x[s.n_embd], s.n_embd, &others[s.n_embd]);
                ffn_result again;
                const std::vector<float> z = forward(b, options, kernels, n_threads, n_tokens, others, again, workspace);
                CHECK(std::memcmp(&y[s.n_embd], &z[s.n_embd], s.n_embd * sizeof(float)) == 0);

                // The same token several times reads what one of it reads.
                std::vector<float> same;
                for (int64_t t = 0; t < n_tokens; ++t) {
                    same.insert(same.end(), x.begin(), x.begin() + s.n_embd);
                }
                ffn_result one;
                ffn_result many;
                forward(b, options, kernels, n_threads, 1, same, one, workspace);
                forward(b, options, kernels, n_threads, n_tokens, same, many, workspace);
                CHECK(many.read_bytes == one.read_bytes);
            }
        }
    }
}

// The middle of the widest gap between values that are near `wanted`.
float wide_gap(std::vector<double> values, double wanted) {
    std::sort(values.begin(), values.end());
    double middle = wanted;
    double widest = 0.0;
    for (size_t i = 1; i < values.size(); ++i) {
        const bool near = std::fabs(values[i] - wanted) < 0.1 && std::fabs(values[i - 1] - wanted) < 0.1;
        if (near && values[i] - values[i - 1] > widest) {
            widest = values[i] - values[i - 1];
            middle = (values[i] + values[i - 1]) / 2.0;
        }
    }
    return static_cast<float>(middle);
}

// A predictor whose fc1 is the identity and whose fc2 are the gate rows in position order: its score is what the gate value
// would be for the predictor's input, which is x or something else.
void test_predicted(const kernel_table * kernels, bool gated, bool mlp, int type, bool reads_x) {
    shape s;
    s.gated = gated;
    s.type = type;
    s.biases = !reads_x;
    built b;
    build(s, kernels, b);
    plan_layer & layer = b.m.data.layers[0];
    std::vector<float> fc1(s.n_embd * s.n_embd, 0.0f);
    for (int64_t i = 0; i < s.n_embd; ++i) {
        fc1[i * s.n_embd + i] = 1.0f;
    }
    const std::vector<float> & first = gated ? b.m.gate : b.m.up;
    std::vector<float> fc2(s.n_ff * s.n_embd);
    for (int64_t i = 0; i < s.n_ff; ++i) {
        std::copy_n(&first[layer.neuron_order[i] * s.n_embd], s.n_embd, &fc2[i * s.n_embd]);
    }
    ffn_layer with = b.store->layer();
    auto matrix = [&](const std::vector<float> & values, int64_t n, int64_t n_rows) {
        row_matrix m;
        m.rows = reinterpret_cast<const uint8_t *>(values.data());
        m.stride_bytes = m.row_bytes = n * sizeof(float);
        m.n = n;
        m.n_rows = n_rows;
        m.row_type = GGML_TYPE_F32;
        m.kernels = kernel_table_find(kernels, GGML_TYPE_F32);
        return m;
    };
    fc1.resize(fc1.size() + row_tail_bytes);
    fc2.resize(fc2.size() + row_tail_bytes);
    with.fc1 = matrix(fc1, s.n_embd, s.n_embd);
    with.fc2 = matrix(fc2, s.n_embd, s.n_ff);
    with.predictor_relu = mlp;

    ffn_options options;
    options.mode = ffn_mode::predicted;
    options.activation = ffn_activation::relu;
    options.add_biases = s.biases;
    ffn_workspace workspace;
    for (const int64_t n_tokens : {1, 3, 16, 20, 530}) {
        std::vector<float> x = random_values(n_tokens * s.n_embd, 1.0f);
        // Rows of r lie further apart than those of x.
        const int64_t ld_r = reads_x ? s.n_embd : s.n_embd + 12;
        std::vector<float> apart = random_values(n_tokens * ld_r, 1.0f);
        std::vector<float> & r = reads_x ? x : apart;
        if (mlp) {
            for (float & v : r) {
                v = std::fabs(v);  // the ReLU between fc1 and fc2 then changes nothing
            }
        }
        std::vector<double> scores(n_tokens * s.n_ff);
        for (int64_t t = 0; t < n_tokens; ++t) {
            for (int64_t i = 0; i < s.n_ff; ++i) {
                for (int64_t j = 0; j < s.n_embd; ++j) {
                    scores[t * s.n_ff + i] += static_cast<double>(first[i * s.n_embd + j]) * r[t * ld_r + j];
                }
            }
        }
        auto run = [&](const ffn_layer & l, const ffn_options & o, ffn_result & result) {
            std::vector<float> y(n_tokens * s.n_embd, NAN);
            ffn_forward(l, o, kernels, 2, n_tokens, x.data(), s.n_embd, y.data(), s.n_embd, workspace, result,
                        reads_x ? nullptr : r.data(), ld_r);
            return y;
        };
        const float low = -std::numeric_limits<float>::infinity();
        for (const float threshold : {low, wide_gap(scores, 0.2), std::numeric_limits<float>::infinity()}) {
            with.predictor_threshold = threshold;
            ffn_result result;
            const std::vector<float> y = run(with, options, result);
            uint64_t n_candidates = 0;
            for (int64_t t = 0; t < n_tokens; ++t) {
                // Each token uses its own candidates only, whatever else is in the batch.
                std::vector<uint8_t> mask(s.n_ff);
                for (int64_t i = 0; i < s.n_ff; ++i) {
                    mask[i] = !(scores[t * s.n_ff + i] < threshold);
                    n_candidates += mask[i];
                }
                int64_t n = 0;
                compare(reference(b.m, s, options.activation, &x[t * s.n_embd], 0.0, 0.0, n, &mask), &y[t * s.n_embd], true);
            }
            CHECK(result.n_candidates == n_candidates);
            if (threshold == low) {
                // All candidates: equals exact.
                ffn_options exact = options;
                exact.mode = ffn_mode::exact;
                ffn_result other;
                run(with, exact, other);
                CHECK(other.n_active == result.n_active);
                CHECK(other.read_bytes < result.read_bytes || n_tokens > ffn_few_tokens);
            }
        }
        // A NaN score is computed, never skipped.
        std::vector<float> broken = fc2;
        std::fill_n(broken.begin(), 5 * s.n_embd, NAN);
        ffn_layer nan_layer = with;
        nan_layer.fc2.rows = reinterpret_cast<const uint8_t *>(broken.data());
        nan_layer.predictor_threshold = std::numeric_limits<float>::infinity();
        ffn_result result;
        run(nan_layer, options, result);
        CHECK(result.n_candidates == static_cast<uint64_t>(5 * n_tokens));
        if (reads_x) {
            continue;
        }
        // One token's NaN in the predictor's input alone: all of its neurons are computed, and of the others none.
        r[(n_tokens - 1) * ld_r + 3] = NAN;
        with.predictor_threshold = std::numeric_limits<float>::infinity();
        ffn_result one;
        const std::vector<float> y = run(with, options, one);
        CHECK(one.n_candidates == static_cast<uint64_t>(s.n_ff));
        const std::vector<uint8_t> nobody(s.n_ff, 0);
        for (int64_t t = 0; t < n_tokens; ++t) {
            int64_t n = 0;
            compare(reference(b.m, s, options.activation, &x[t * s.n_embd], 0.0, 0.0, n, t < n_tokens - 1 ? &nobody : nullptr),
                    &y[t * s.n_embd], true);
        }
    }
}

void test_edges(const kernel_table * kernels) {
    shape s;
    built b;
    build(s, kernels, b);
    ffn_workspace workspace;
    ffn_options options;
    options.mode = ffn_mode::exact;
    options.activation = ffn_activation::relu;
    ffn_result none;
    std::vector<float> x = random_values(40 * s.n_embd, 1.0f);
    forward(b, options, kernels, 2, 0, x, none, workspace);
    CHECK(none.n_tokens == 0);

    // y written over x, as ggml's allocator may place it: shifted by half a row too.
    for (const int64_t n_tokens : {1, 2, 40}) {
        for (const int64_t shift : {int64_t(0), s.n_embd / 2, s.n_embd}) {
            ffn_result result;
            const std::vector<float> y = forward(b, options, kernels, 2, n_tokens, x, result, workspace);
            std::vector<float> memory(41 * s.n_embd, 0.0f);
            std::copy_n(x.begin(), n_tokens * s.n_embd, memory.begin() + shift);
            ffn_forward(b.store->layer(), options, kernels, 2, n_tokens, memory.data() + shift, s.n_embd, memory.data(), s.n_embd, workspace, result);
            CHECK(std::equal(y.begin(), y.begin() + n_tokens * s.n_embd, memory.begin()));
        }
    }
    // More threads than rows, and a NaN input that must come out as NaN.
    ffn_result result;
    forward(b, options, kernels, 500, 1, x, result, workspace);
    x[3] = NAN;
    const std::vector<float> y = forward(b, options, kernels, 2, 1, x, result, workspace);
    CHECK(std::isnan(y[0]));

    // Overlap: the same token twice uses the same neurons.
    ffn_result twice;
    x[3] = 0.0f;
    forward(b, options, kernels, 2, 1, x, twice, workspace);
    ffn_result second;
    forward(b, options, kernels, 2, 1, x, second, workspace);
    CHECK(second.n_overlaps == 1);
    CHECK_NEAR(second.overlap_sum, 1.0, 0.0);

    // Weights of another model are refused, with the layer named.
    built other;
    build(s, kernels, other);
    other.m.data.layers[0].digest = b.m.data.layers[0].digest;
    ffn_store store(other.m.data, 0, kernels, false, false);
    ffn_tensor_info info;
    info.row_type = GGML_TYPE_F32;
    info.ne0 = s.n_embd;
    info.ne1 = s.n_ff;
    CHECK(store.announce(ffn_role::gate, info).ok());
    CHECK(store.announce(ffn_role::up, info).ok());
    std::swap(info.ne0, info.ne1);
    CHECK(!store.announce(ffn_role::up, info).ok());
    CHECK(store.announce(ffn_role::down, info).ok());
    CHECK(store.set(ffn_role::gate, other.m.gate.data(), nullptr).ok());
    CHECK(store.set(ffn_role::up, other.m.up.data(), nullptr).ok());
    const status refused = store.set(ffn_role::down, other.m.down.data(), nullptr);
    CHECK(!refused.ok() && refused.text().find("layer 0") != std::string::npos);
}

// Whole products of the op-by-op path give base order, whatever the stored order is.
void test_by_op(const kernel_table * kernels) {
    shape s;
    s.n_ff = 100;
    built b;
    build(s, kernels, b);
    const ffn_layer & layer = b.store->layer();
    ffn_workspace workspace;
    for (const int64_t n_tokens : {1, 5}) {
        ffn_result result;
        const std::vector<float> x = random_values(n_tokens * s.n_embd, 1.0f);
        std::vector<float> gate(n_tokens * s.n_ff);
        ffn_matmul_rows(layer.first, layer.order, kernels, 2, n_tokens, x.data(), s.n_embd, gate.data(), s.n_ff, workspace, result);
        std::vector<float> y(n_tokens * s.n_embd);
        ffn_matmul_columns(layer.down, layer.order, kernels, 2, n_tokens, gate.data(), s.n_ff, y.data(), s.n_embd, workspace, result);
        for (int64_t t = 0; t < n_tokens; ++t) {
            for (int64_t i = 0; i < s.n_ff; ++i) {
                double sum = 0.0;
                for (int64_t j = 0; j < s.n_embd; ++j) {
                    sum += static_cast<double>(b.m.gate[i * s.n_embd + j]) * x[t * s.n_embd + j];
                }
                CHECK_NEAR(gate[t * s.n_ff + i], sum, f32_tolerance);
            }
            for (int64_t j = 0; j < s.n_embd; ++j) {
                double sum = 0.0;
                for (int64_t i = 0; i < s.n_ff; ++i) {
                    sum += static_cast<double>(b.m.down[j * s.n_ff + i]) * gate[t * s.n_ff + i];
                }
                CHECK_NEAR(y[t * s.n_embd + j], sum, f32_tolerance);
            }
        }
    }
}

}  // namespace

int main() {
    const char * name = std::getenv("POWERINFER_KERNELS");
    const kernel_table * kernels = kernel_table_select(name);
    if (kernels == nullptr) {
        std::fprintf(stderr, "this CPU doesn't run the kernel set '%s'\n", name ? name : "");
        return 77;
    }
    CHECK(name == nullptr || *name == '\0' || std::strcmp(kernels->name, name) == 0);

    CHECK(ggml_abi_check(ggml_abi_version()).ok());
    const status other = ggml_abi_check("0.0.1");
    CHECK(!other.ok() && other.text().find("needs exactly 0.0.1; install") != std::string::npos);

    for (const activation_kind activation : {activation_kind::relu, activation_kind::relu_sqr, activation_kind::drelu,
                                             activation_kind::silu, activation_kind::gelu}) {
        for (const bool gated : {true, false}) {
            for (const bool biases : {false, true}) {
                if (activation == activation_kind::drelu && !gated) {
                    continue;
                }
                shape s;
                s.activation = activation;
                s.gated = gated;
                s.biases = biases;
                test_shape(s, kernels);
                test_few_tokens(s, kernels);
            }
        }
    }
    for (const auto & size : {std::pair<int64_t, int64_t>{68, 1000}, {100, 300}, {576, 31}, {64, 1}, {96, 768}}) {
        shape s;
        s.n_embd = size.first;
        s.n_ff = size.second;
        test_shape(s, kernels);
        test_few_tokens(s, kernels);
    }
    for (const int type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1,
                           GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL, GGML_TYPE_Q3_K, GGML_TYPE_MXFP4}) {
        shape s;
        s.type = type;
        s.n_embd = 256;
        s.n_ff = 512;
        test_shape(s, kernels);
        test_few_tokens(s, kernels);
    }
    shape cut;
    cut.param = 0.3f;  // FATReLU
    test_shape(cut, kernels);
    shape integers;
    integers.integers = true;
    test_shape(integers, kernels);
    for (const bool gated : {true, false}) {
        for (const bool mlp : {false, true}) {
            for (const int type : {GGML_TYPE_F32, GGML_TYPE_BF16}) {  // BF16: batches on the tile unit, where the CPU has one
                test_predicted(kernels, gated, mlp, type, true);
                test_predicted(kernels, gated, mlp, type, false);
            }
        }
    }
    test_edges(kernels);
    test_by_op(kernels);
    return check_result();
}
