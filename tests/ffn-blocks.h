// Random FFN blocks for tests, and the plain double-precision reference that they are compared with.
#pragma once

#include "check.h"

#include "ffn.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace powerinfer {

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

inline std::mt19937 & rng() {
    static std::mt19937 instance(7);
    return instance;
}

inline std::vector<float> random_values(size_t n, float scale, bool integers = false) {
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    std::vector<float> values(n);
    for (float & v : values) {
        v = integers ? std::round(3.0f * uniform(rng())) : scale * uniform(rng());
    }
    return values;
}

// (n_rows, n) F32 rows; padding behind them may stand in values.
inline row_matrix f32_matrix(const std::vector<float> & values, int64_t n, int64_t n_rows, const kernel_table * kernels) {
    row_matrix m;
    m.rows = reinterpret_cast<const uint8_t *>(values.data());
    m.stride_bytes = m.row_bytes = n * sizeof(float);
    m.n = n;
    m.n_rows = n_rows;
    m.row_type = GGML_TYPE_F32;
    m.kernels = kernel_table_find(kernels, GGML_TYPE_F32);
    return m;
}

// Rows in a ggml type, and the values that they stand for.
inline std::vector<uint8_t> to_type(int type, std::vector<float> & values, int64_t n) {
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

inline void build(const shape & s, const kernel_table * kernels, built & out) {
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

inline double activate(ffn_activation activation, double param, double v) {
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
inline std::vector<double> reference(const model & m, const shape & s, ffn_activation activation, const float * x, double threshold,
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

inline void compare(const std::vector<double> & expected, const float * y, bool exact_type) {
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

inline ffn_activation kind_of(activation_kind activation) {
    switch (activation) {
        case activation_kind::relu_sqr: return ffn_activation::relu_sqr;
        case activation_kind::drelu:    return ffn_activation::drelu;
        case activation_kind::silu:     return ffn_activation::silu;
        case activation_kind::gelu:     return ffn_activation::gelu;
        default:                        return ffn_activation::relu;
    }
}

}  // namespace powerinfer
