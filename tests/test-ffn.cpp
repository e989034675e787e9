// FFN blocks against a plain double-precision reference: every mode, activation and form, biases, order, any batch size.
#include "check.h"
#include "ffn-blocks.h"

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
    fc1.resize(fc1.size() + row_tail_bytes);
    fc2.resize(fc2.size() + row_tail_bytes);
    with.fc1 = f32_matrix(fc1, s.n_embd, s.n_embd, kernels);
    with.fc2 = f32_matrix(fc2, s.n_embd, s.n_ff, kernels);
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
