// FFN blocks on two processors, with a fake GPU: every split, mode, activation, type and batch size against the CPU alone, in F32
// against the double-precision reference too; matrices alone; both parts run at the same time; memory runs out.
#include "check.h"
#include "fake-device.h"
#include "ffn-blocks.h"
#include "ffn-hybrid.h"

#include "ggml-backend.h"

#include <omp.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>

using namespace powerinfer;

namespace {

// Error of the sum of squares. The fake device rounds x to the weights' type, for quantized ones to 8 bits as our kernels do, and
// their down rows to Q8_0 along the neurons.
constexpr double f32_nmse = 1e-9;
constexpr double rounded_nmse = 1e-3;
constexpr double clock_slack_s = 1e-3;  // of reading two clocks one after the other
constexpr int64_t max_tokens = 48;
constexpr int64_t stream_tokens = 32;

ggml_backend_dev_t fake() { return ggml_backend_dev_by_name("FAKE0"); }

std::unique_ptr<gpu_store> make_store(bool keeps_rows) {
    return keeps_rows ? ggml_row_store_create(fake()) : ggml_store_create(fake());
}

// A split block and the same block whole on the CPU.
struct split_block {
    built b;
    std::unique_ptr<gpu_store> store;
    std::unique_ptr<hybrid_layer> layer;
    std::unique_ptr<gpu_executor> gpu;
    bool keeps_rows;  // every batch is streamed then

    split_block(const shape & s, int64_t n_hot, bool streams, const kernel_table * kernels, bool keeps_rows = false) : keeps_rows(keeps_rows) {
        build(s, kernels, b);
        split(n_hot, streams, kernels);
    }

    void split(int64_t n_hot, bool streams, const kernel_table * kernels) {
        gpu.reset();
        store = make_store(keeps_rows);
        const ffn_layer & whole = b.store->layer();
        CHECK(store->check_layer(0, gpu_layer_shape(whole, n_hot, streams)).ok());
        CHECK(store->add_layer(0, whole, gpu_layer_shape(whole, n_hot, streams), kernels).ok());
        CHECK(store->memory_bytes() == store->rows_bytes(gpu_layer_shape(whole, n_hot, streams)));
        layer.reset(new hybrid_layer(0, whole, n_hot, store.get(), keeps_rows ? 1 : streams ? stream_tokens : 0));
        CHECK(store->make_executor(max_tokens, gpu).ok());
    }

    status forward(const ffn_options & options, const kernel_table * kernels, int64_t n_tokens, const float * x, float * y,
                   ffn_result & result, hybrid_times & times, const float * r = nullptr) {
        ffn_workspace workspace;
        const int64_t n = b.m.data.n_embd;
        return ffn_forward_hybrid(*layer, *gpu, max_tokens, options, kernels, 2, n_tokens, x, n, y, n, workspace, result, times, r, n);
    }
};

void test_splits(const shape & s, const kernel_table * kernels, bool keeps_rows = false) {
    const bool exact_type = s.type == GGML_TYPE_F32;
    for (const bool streams : {false, true}) {
        if (keeps_rows && !streams) {
            continue;
        }
        split_block block(s, 0, streams, kernels, keeps_rows);
        for (const int64_t n_hot : {int64_t(0), int64_t(1), int64_t(64), s.n_ff / 2 + 1, s.n_ff - 1, s.n_ff}) {
            block.split(n_hot, streams, kernels);
            for (const int64_t n_tokens : {1, 3, 40, 110}) {
                std::vector<float> x = random_values(n_tokens * s.n_embd, 1.0f);
                for (const ffn_mode mode : {ffn_mode::dense, ffn_mode::exact, ffn_mode::threshold}) {
                    ffn_options options;
                    options.mode = mode;
                    options.activation = kind_of(s.activation);
                    options.add_biases = s.biases;
                    const bool thresholds = mode == ffn_mode::threshold && exact_type;
                    options.threshold = thresholds ? 0.11f : 0.0f;
                    options.product_threshold = thresholds ? 0.05f : 0.0f;
                    ffn_workspace workspace;
                    ffn_result whole_result;
                    std::vector<float> expected(x.size());
                    ffn_forward(block.b.store->layer(), options, kernels, 2, n_tokens, x.data(), s.n_embd, expected.data(), s.n_embd, workspace,
                                whole_result);
                    std::vector<float> y(x.size(), std::numeric_limits<float>::quiet_NaN());
                    ffn_result result;
                    hybrid_times times;
                    const status done = block.forward(options, kernels, n_tokens, x.data(), y.data(), result, times);
                    if (!CHECK(done.ok())) {
                        std::fprintf(stderr, "%s\n", done.text().c_str());
                        return;
                    }
                    for (int64_t t = 0; t < n_tokens && exact_type; ++t) {
                        int64_t n_active = 0;
                        compare(reference(block.b.m, s, options.activation, &x[t * s.n_embd], options.threshold, options.product_threshold,
                                          n_active, nullptr), &y[t * s.n_embd], true);
                    }
                    check_nmse(expected, y, exact_type && !thresholds ? f32_nmse : rounded_nmse);
                    CHECK(result.n_tokens == static_cast<uint64_t>(n_tokens));
                    CHECK(result.dense_bytes > 0 && result.read_bytes > 0);
                    const bool streamed = keeps_rows || (streams && n_tokens >= stream_tokens);
                    CHECK(times.gpu_neurons >= static_cast<uint64_t>(n_tokens * n_hot));
                    if (!streamed) {
                        CHECK(times.gpu_neurons == static_cast<uint64_t>(n_tokens * n_hot));
                        CHECK(times.copied_bytes == (n_hot > 0 ? 2 * n_tokens * s.n_embd * sizeof(float) : 0));  // x there, y back
                    }
                }
            }
        }
    }
}

// In batches the device decides as the CPU does: only candidates count, whatever else is in the batch.
void test_predicted_stream(const kernel_table * kernels, bool mlp, bool own_r, int64_t n_hot) {
    shape s;
    s.n_ff = 200;
    split_block block(s, 0, true, kernels);
    const int64_t rank = s.n_embd;
    std::vector<float> fc1 = random_values(rank * s.n_embd + row_tail_bytes, 0.2f);
    std::vector<float> fc2 = random_values(s.n_ff * rank + row_tail_bytes, 0.2f);
    ffn_layer with = block.b.store->layer();
    with.fc1 = f32_matrix(fc1, s.n_embd, rank, kernels);
    with.fc2 = f32_matrix(fc2, rank, s.n_ff, kernels);
    with.predictor_relu = mlp;
    with.predictor_threshold = 0.05f;
    for (const int64_t n_tokens : {33, 100}) {
        block.gpu.reset();
        block.store = make_store(n_hot > 0);  // where all hot neurons are candidates unless rows are kept
        CHECK(block.store->add_layer(0, with, gpu_layer_shape(with, n_hot, true), kernels).ok());
        CHECK(block.store->memory_bytes() == block.store->rows_bytes(gpu_layer_shape(with, n_hot, true)));
        CHECK(block.store->memory_bytes() >= n_hot * block.store->neuron_bytes(gpu_layer_shape(with, n_hot, true)));
        block.layer.reset(new hybrid_layer(0, with, n_hot, block.store.get(), n_hot > 0 ? 1 : stream_tokens));
        CHECK(block.store->make_executor(max_tokens, block.gpu).ok());
        const std::vector<float> x = random_values(n_tokens * s.n_embd, 1.0f);
        const std::vector<float> r = random_values(n_tokens * s.n_embd, 1.0f);
        ffn_options options;
        options.mode = ffn_mode::predicted;
        options.activation = ffn_activation::relu;
        std::vector<float> expected(x.size());
        std::vector<float> y(x.size());
        ffn_workspace workspace;
        ffn_result whole_result;
        ffn_forward(with, options, kernels, 2, n_tokens, x.data(), s.n_embd, expected.data(), s.n_embd, workspace, whole_result,
                    own_r ? r.data() : nullptr, s.n_embd);
        CHECK(whole_result.n_candidates < static_cast<uint64_t>(n_tokens * s.n_ff));
        ffn_result result;
        hybrid_times times;
        CHECK(block.forward(options, kernels, n_tokens, x.data(), y.data(), result, times, own_r ? r.data() : nullptr).ok());
        check_nmse(expected, y, 1e-4);  // a score may fall on the other side of the threshold
    }
}

// gate, up and down alone, hot and cold rows together.
void test_matmul(const kernel_table * kernels, bool shuffled, bool streams, bool keeps_rows) {
    shape s;
    s.shuffled = shuffled;
    s.n_ff = 700;
    split_block block(s, 555, streams, kernels, keeps_rows);
    const int64_t n_tokens = 130;
    const ffn_layer & whole = block.b.store->layer();
    ffn_workspace workspace;
    ffn_result result;
    for (const ffn_role role : {ffn_role::gate, ffn_role::up, ffn_role::down}) {
        const bool is_down = role == ffn_role::down;
        const int64_t n_in = is_down ? s.n_ff : s.n_embd;
        const int64_t n_out = is_down ? s.n_embd : s.n_ff;
        const std::vector<float> x = random_values(n_tokens * n_in, 1.0f);
        std::vector<float> expected(n_tokens * n_out);
        std::vector<float> y(n_tokens * n_out);
        const row_matrix & matrix = is_down ? whole.down : role == ffn_role::gate ? whole.first : whole.second;
        (is_down ? ffn_matmul_columns : ffn_matmul_rows)(matrix, whole.order, kernels, 2, n_tokens, x.data(), n_in, expected.data(), n_out,
                                                         workspace, result);
        CHECK(hybrid_matmul(*block.layer, *block.gpu, max_tokens, role, whole.order, kernels, 2, n_tokens, x.data(), n_in, y.data(), n_out,
                            workspace, result).ok());
        for (size_t i = 0; i < y.size(); ++i) {
            CHECK_NEAR(y[i], expected[i], f32_tolerance);
        }
    }
}

// More kept rows than a group: the executor is made for so many tokens that their values limit it.
void test_several_groups(const kernel_table * kernels) {
    shape s;
    s.n_ff = 700;
    split_block block(s, 600, true, kernels, true);
    fake_device_set_memory(0, 200 << 20);
    CHECK(block.store->make_executor(16384, block.gpu).ok());
    const int64_t n_tokens = 3;
    const std::vector<float> x = random_values(n_tokens * s.n_embd, 1.0f);
    std::vector<float> expected(x.size());
    std::vector<float> y(x.size());
    ffn_options options;
    options.activation = ffn_activation::relu;
    ffn_workspace workspace;
    ffn_result result;
    hybrid_times times;
    ffn_forward(block.b.store->layer(), options, kernels, 2, n_tokens, x.data(), s.n_embd, expected.data(), s.n_embd, workspace, result);
    fake_device_reset_stats(0);
    CHECK(block.forward(options, kernels, n_tokens, x.data(), y.data(), result, times).ok());
    fake_device_stats stats;
    fake_device_get_stats(0, &stats);
    CHECK(stats.n_graphs == 3 + 1);  // 256, 256 and 96 that are hot with the padding, the cold ones
    check_nmse(expected, y, f32_nmse);
    block.gpu.reset();
    fake_device_set_memory(0, 100 << 20);
}

// The rows of hot neurons are no longer needed here, and what they took is given back.
void test_release(const kernel_table * kernels) {
    shape s;
    s.n_embd = 256;
    s.n_ff = 4096;
    s.type = GGML_TYPE_F16;
    split_block block(s, 3000, false, kernels);
    const std::vector<float> x = random_values(s.n_embd, 1.0f);
    ffn_options options;
    options.activation = ffn_activation::relu;
    std::vector<float> before(s.n_embd);
    std::vector<float> after(s.n_embd);
    ffn_result result;
    hybrid_times times;
    CHECK(block.forward(options, kernels, 1, x.data(), before.data(), result, times).ok());
    const size_t held = block.b.store->memory_bytes();
    block.b.store->release_hot(3000);
    const size_t freed = held - block.b.store->memory_bytes();
    const size_t hot_bytes = 3000 * 3 * s.n_embd * sizeof(uint16_t);
    CHECK(freed <= hot_bytes && freed > hot_bytes - 4 * 65536);  // whole pages
    CHECK(block.forward(options, kernels, 1, x.data(), after.data(), result, times).ok());
    CHECK(before == after);
}

// A slow device: the CPU computes its part meanwhile. Its thread may wake late on a busy machine: one of several tries shows it.
void test_overlap(const kernel_table * kernels) {
    shape s;
    s.n_embd = 256;
    s.n_ff = 8192;
    split_block block(s, 64, false, kernels);
    fake_device_set_delay(0, 30000);
    const std::vector<float> x = random_values(s.n_embd, 1.0f);
    std::vector<float> y(s.n_embd);
    ffn_options options;
    options.activation = ffn_activation::relu;
    // OpenMP's clock may be another than the device's (LLVM's is the time of day).
    const double offset_s = omp_get_wtime() - std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    bool at_once = false;
    for (int i_try = 0; i_try < 20 && !at_once; ++i_try) {
        fake_device_reset_stats(0);
        ffn_result result;
        hybrid_times times;
        CHECK(block.forward(options, kernels, 1, x.data(), y.data(), result, times).ok());
        fake_device_interval device;
        CHECK(fake_device_get_intervals(0, &device, 1) == 1);
        CHECK(device.end_s - device.begin_s >= 0.03);
        device.begin_s += offset_s;
        device.end_s += offset_s;
        CHECK(times.gpu_begin_s <= device.begin_s + clock_slack_s && device.end_s <= times.gpu_end_s + clock_slack_s);
        at_once = times.cpu_begin_s < device.end_s && device.begin_s < times.cpu_end_s && times.wait_s > 0.0 && times.wait_s < times.gpu_s();
    }
    CHECK(at_once);
    fake_device_set_delay(0, 0);
}

void test_out_of_memory(const kernel_table * kernels) {
    shape s;
    s.n_embd = 256;
    s.n_ff = 2048;
    built b;
    build(s, kernels, b);
    fake_device_set_memory(0, 1 << 20);
    std::unique_ptr<gpu_store> store = ggml_store_create(fake());
    const status refused = store->add_layer(0, b.store->layer(), gpu_layer_shape(b.store->layer(), s.n_ff, true), kernels);
    CHECK(!refused.ok() && refused.text().find("FAKE0: layer 0: ") == 0 && refused.text().find("VRAM budget") != std::string::npos);
    CHECK(store->memory_bytes() == 0);
    fake_device_set_memory(0, 2 << 20);
    store = ggml_store_create(fake());
    CHECK(store->add_layer(0, b.store->layer(), gpu_layer_shape(b.store->layer(), 64, true), kernels).ok());
    std::unique_ptr<gpu_executor> gpu;
    const status no_scratch = store->make_executor(4096, gpu);
    CHECK(!no_scratch.ok() && gpu == nullptr && no_scratch.text().find("scratch") != std::string::npos);
    fake_device_set_memory(0, 100 << 20);
}

void test_unsupported_type(const kernel_table * kernels) {
    shape s;
    s.type = GGML_TYPE_Q4_0;
    built b;
    build(s, kernels, b);
    fake_device_refuse_type(0, "q4_0");
    const status refused = ggml_store_create(fake())->check_layer(0, gpu_layer_shape(b.store->layer(), 64, true));
    CHECK(!refused.ok() && refused.text().find("q4_0") != std::string::npos);
    fake_device_refuse_type(0, nullptr);
    fake_device_refuse_cast(0, "q8_0");  // what down is derived as
    const gpu_layer_shape kept(b.store->layer(), 64, false);
    CHECK(ggml_store_create(fake())->check_layer(0, kept).ok());
    const status no_floats = ggml_row_store_create(fake())->check_layer(0, kept);
    CHECK(!no_floats.ok() && no_floats.text().find("FAKE0: layer 0: down rows are q8_0; expected a type that the device converts") == 0);
    fake_device_refuse_cast(0, nullptr);
}

}  // namespace

int main() {
    const kernel_table * kernels = kernel_table_select(std::getenv("POWERINFER_KERNELS"));
    if (!fake_device_register(1) || fake() == nullptr) {
        std::fprintf(stderr, "the fake device could not be registered\n");
        return 1;
    }
    for (const bool gated : {true, false}) {
        for (const activation_kind activation : {activation_kind::relu, activation_kind::relu_sqr, activation_kind::drelu, activation_kind::silu, activation_kind::gelu}) {
            shape s;
            s.gated = gated;
            s.biases = true;
            s.n_ff = 100;
            s.activation = activation;
            test_splits(s, kernels);
            test_splits(s, kernels, true);
        }
    }
    shape fat;
    fat.param = 0.2f;
    test_splits(fat, kernels);
    for (const int type : {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K}) {
        shape s;
        s.type = type;
        s.n_embd = 256;
        s.n_ff = 512;
        test_splits(s, kernels);
        test_splits(s, kernels, true);
    }
    // Cold down rows come as F16 where the device can't convert them.
    shape staged;
    staged.type = GGML_TYPE_Q4_0;
    fake_device_refuse_cast(0, "q8_0");
    test_splits(staged, kernels);
    fake_device_refuse_cast(0, nullptr);
    shape unordered;
    unordered.shuffled = false;
    test_splits(unordered, kernels);
    for (const bool flag : {false, true}) {
        for (const int64_t n_hot : {0, 70}) {
            test_predicted_stream(kernels, flag, false, n_hot);
            test_predicted_stream(kernels, flag, true, n_hot);
        }
        for (const bool keeps_rows : {false, true}) {
            test_matmul(kernels, flag, true, keeps_rows);
            test_matmul(kernels, flag, false, keeps_rows);
        }
    }
    test_several_groups(kernels);
    test_release(kernels);
    test_overlap(kernels);
    test_out_of_memory(kernels);
    test_unsupported_type(kernels);
    return check_result();
}
