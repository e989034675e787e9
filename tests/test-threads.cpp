// Every parallel path of an FFN block once, with several threads and with a device beside them: the same call twice gives the same
// bits. Short, so that ThreadSanitizer can watch it; it doesn't look at accesses of more than 16 bytes, so use the scalar kernels.
#include "check.h"
#include "fake-device.h"
#include "ffn-blocks.h"
#include "ffn-hybrid.h"

#include "ggml-backend.h"

#include <cstdio>
#include <cstdlib>

using namespace powerinfer;

namespace {

constexpr int64_t max_tokens = 48;
constexpr int64_t batches[] = {1, 3, 20, 140};  // alone, a few, one tile, several

// A predictor of random rows.
struct predictor {
    std::vector<float> fc1;  // (n_embd, n_embd)
    std::vector<float> fc2;  // (n_ff, n_embd)

    explicit predictor(const shape & s)
        : fc1(random_values(s.n_embd * s.n_embd + row_tail_bytes, 0.2f)), fc2(random_values(s.n_ff * s.n_embd + row_tail_bytes, 0.2f)) {}

    void add_to(ffn_layer & layer, const shape & s, const kernel_table * kernels) const {
        layer.fc1 = f32_matrix(fc1, s.n_embd, s.n_embd, kernels);
        layer.fc2 = f32_matrix(fc2, s.n_embd, s.n_ff, kernels);
        layer.predictor_relu = true;
    }
};

ffn_options options_of(ffn_mode mode, bool count) {
    ffn_options options;
    options.mode = mode;
    options.activation = ffn_activation::relu;
    options.count = count;  // tokens one by one
    options.threshold = mode == ffn_mode::threshold ? 0.11f : 0.0f;
    return options;
}

void test_by_op(const ffn_layer & layer, const shape & s, const kernel_table * kernels, int n_threads, int64_t n_tokens,
                const std::vector<float> & x, ffn_workspace & workspace) {
    std::vector<float> first(n_tokens * s.n_ff);
    std::vector<float> y[2] = {std::vector<float>(x.size()), std::vector<float>(x.size())};
    for (std::vector<float> & out : y) {
        ffn_result result;
        ffn_matmul_rows(layer.first, layer.order, kernels, n_threads, n_tokens, x.data(), s.n_embd, first.data(), s.n_ff, workspace, result);
        ffn_matmul_columns(layer.down, layer.order, kernels, n_threads, n_tokens, first.data(), s.n_ff, out.data(), s.n_embd, workspace,
                           result);
    }
    CHECK(y[0] == y[1]);
}

void test_cpu(const shape & s, const kernel_table * kernels) {
    built b;
    build(s, kernels, b);
    const predictor own(s);
    ffn_layer layer = b.store->layer();
    own.add_to(layer, s, kernels);
    ffn_workspace workspace;
    for (const int n_threads : {2, 3}) {
        for (const int64_t n_tokens : batches) {
            const std::vector<float> x = random_values(n_tokens * s.n_embd, 1.0f);
            for (const ffn_mode mode : {ffn_mode::dense, ffn_mode::exact, ffn_mode::threshold, ffn_mode::predicted}) {
                for (const bool count : {false, true}) {
                    std::vector<float> y[2] = {std::vector<float>(x.size()), std::vector<float>(x.size())};
                    for (std::vector<float> & out : y) {
                        ffn_result result;
                        ffn_forward(layer, options_of(mode, count), kernels, n_threads, n_tokens, x.data(), s.n_embd, out.data(), s.n_embd,
                                    workspace, result);
                    }
                    CHECK(y[0] == y[1]);
                }
            }
            test_by_op(b.store->layer(), s, kernels, n_threads, n_tokens, x, workspace);
        }
    }
}

void test_with_device(const shape & s, const kernel_table * kernels, bool streams) {
    built b;
    build(s, kernels, b);
    const int64_t n_hot = 40;
    const gpu_layer_shape hot(b.store->layer(), n_hot, streams);
    const std::unique_ptr<gpu_store> store = ggml_store_create(ggml_backend_dev_by_name("FAKE0"));
    CHECK(store->add_layer(0, b.store->layer(), hot, kernels).ok());
    hybrid_layer layer(0, b.store->layer(), n_hot, store.get(), streams ? 16 : 0);
    std::unique_ptr<gpu_executor> gpu;
    CHECK(store->make_executor(max_tokens, gpu).ok());
    ffn_workspace workspace;
    for (const int64_t n_tokens : batches) {
        const std::vector<float> x = random_values(n_tokens * s.n_embd, 1.0f);
        for (const ffn_mode mode : {ffn_mode::dense, ffn_mode::exact}) {
            std::vector<float> y[2] = {std::vector<float>(x.size()), std::vector<float>(x.size())};
            for (std::vector<float> & out : y) {
                ffn_result result;
                hybrid_times times;
                CHECK(ffn_forward_hybrid(layer, *gpu, max_tokens, options_of(mode, false), kernels, 2, n_tokens, x.data(), s.n_embd, out.data(),
                                         s.n_embd, workspace, result, times, nullptr, s.n_embd)
                          .ok());
            }
            CHECK(y[0] == y[1]);
        }
    }
}

}  // namespace

int main() {
    const kernel_table * kernels = kernel_table_select(std::getenv("POWERINFER_KERNELS"));
    if (kernels == nullptr || !fake_device_register(1)) {
        std::fprintf(stderr, "no such kernel set, or no fake device\n");
        return 77;
    }
    for (const bool gated : {true, false}) {
        for (const int type : {GGML_TYPE_F32, GGML_TYPE_Q4_0, GGML_TYPE_BF16}) {
            shape s;
            s.gated = gated;
            s.type = type;
            s.n_ff = 160;
            test_cpu(s, kernels);
            test_with_device(s, kernels, false);
            test_with_device(s, kernels, true);
        }
    }
    return check_result();
}
