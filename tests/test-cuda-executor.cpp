// The CUDA executor against ffn_forward: hot part, streamed blocks, single matrices, any split, errors. Built twice, as
// test-cuda-kernels: on the CPU the fake GPU is ggml's side of the device, and our stream runs early or late, as the test asks.
#include "check.h"
#include "ffn.h"
#include "ggml-abi.h"
#include "gpu/gpu-executor.h"

#ifdef POWERINFER_CUDA_SHIM
#include "fake-device.h"
#else
#include <cuda_runtime.h>
#endif

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

using namespace powerinfer;

namespace {

// Both sides do the same integer sums and add up to 1000 floats of size 1 in another order.
constexpr double tolerance = 5e-5;
// A gelu value may round to the neighbouring F16; 96 of them meet weights of size 0.1.
constexpr double gelu_tolerance = 2e-3;

// Error of the sum of squares, of what ggml's operators computed. They round x to the weights' type, quantized down rows to F16,
// on CUDA F32 to TF32.
constexpr double f32_nmse = 1e-9;
constexpr double rounded_nmse = 1e-3;
// By summation order a value may fall on the other side of a threshold (seen: a product of 0.0200000003), by rounding a few.
constexpr double f32_threshold_nmse = 1e-4;
constexpr double rounded_threshold_nmse = 2e-2;
#ifdef POWERINFER_CUDA_SHIM
constexpr bool rounds_f32 = false;
#else
constexpr bool rounds_f32 = true;
#endif

std::mt19937 & rng() {
    static std::mt19937 instance(5);
    return instance;
}

std::vector<float> random_values(size_t n, float scale) {
    std::uniform_real_distribution<float> uniform(-scale, scale);
    std::vector<float> values(n);
    for (float & v : values) {
        v = uniform(rng());
    }
    return values;
}

struct layer_case {
    int64_t n_embd = 64;
    int64_t n_ff = 96;
    int type = GGML_TYPE_F32;
    bool gated = true;
    bool biases = false;
    int64_t rank = 0;
    bool is_mapped = false;  // rows lie in another order
    ffn_activation activation = ffn_activation::relu;
};

struct built {
    std::vector<std::vector<uint8_t>> blocks;
    std::vector<int32_t> order;
    ffn_layer layer;

    void add(row_matrix & m, int type, int64_t n_rows, int64_t n, float scale, size_t gap_bytes = 6) {
        const std::vector<float> values = random_values(n_rows * n, scale);
        m.n = n;
        m.n_rows = n_rows;
        m.row_type = type;
        m.row_bytes = row_size_bytes(type, n);
        m.stride_bytes = m.row_bytes + gap_bytes;  // none is needed, nor alignment
        m.kernels = kernel_table_find(&kernels_scalar, type);
        blocks.emplace_back(m.stride_bytes * n_rows + row_tail_bytes);
        for (int64_t i = 0; i < n_rows; ++i) {
            if (type == GGML_TYPE_F32) {
                std::memcpy(&blocks.back()[i * m.stride_bytes], &values[i * n], m.row_bytes);
            } else {
                ggml_quantize_chunk(static_cast<ggml_type>(type), &values[i * n], &blocks.back()[i * m.stride_bytes], 0, 1, n,
                                    nullptr);
            }
        }
        m.rows = blocks.back().data();
    }

    explicit built(const layer_case & c) {
        const float scale = 2.0f / std::sqrt(static_cast<float>(c.n_embd));
        layer.n_embd = c.n_embd;
        layer.n_ff = c.n_ff;
        layer.gated = c.gated;
        layer.activation_param = c.biases ? 0.1f : 0.0f;
        blocks.reserve(5);
        add(layer.first, c.type, c.n_ff, c.n_embd, scale);
        if (c.gated) {
            add(layer.second, c.type, c.n_ff, c.n_embd, scale);
        }
        add(layer.down, c.type, c.n_ff, c.n_embd, 1.0f / std::sqrt(static_cast<float>(c.n_ff)));
        if (c.rank > 0) {
            add(layer.fc1, c.type, c.rank, c.n_embd, scale, 0);  // goes to the device as one piece
            add(layer.fc2, c.type == GGML_TYPE_Q4_K ? GGML_TYPE_Q8_0 : c.type, c.n_ff, c.rank, 1.0f);
            layer.predictor_relu = true;
            layer.predictor_threshold = 0.3f;
        }
        if (c.biases) {
            layer.first_bias = random_values(c.n_ff, 1.0f);
            layer.second_bias = c.gated ? std::vector<float>(c.n_ff, 1.0f) : std::vector<float>();
            layer.down_bias = random_values(c.n_embd, 1.0f);
        }
        if (c.is_mapped) {
            order.resize(c.n_ff);
            for (int64_t i = 0; i < c.n_ff; ++i) {
                order[i] = static_cast<int32_t>((7 * i + 3) % c.n_ff);  // n_ff: no multiple of 7
            }
            layer.first.row_of = order.data();
            layer.second.row_of = c.gated ? order.data() : nullptr;
        }
        const row_reader reader(layer.down, &kernels_scalar);
        std::vector<float> row(c.n_embd + row_tail_bytes);
        for (int64_t i = 0; i < c.n_ff; ++i) {
            reader.unpack(i, row.data());
            double sum = 0.0;
            for (int64_t j = 0; j < c.n_embd; ++j) {
                sum += static_cast<double>(row[j]) * row[j];
            }
            layer.down_norm.push_back(static_cast<float>(std::sqrt(sum)));
        }
    }
};

// A device with nothing but a name.
struct named_device {
    const char * name;
    const char * id;
    ggml_backend_device device = {};

    named_device(const char * name, const char * id) : name(name), id(id) {
        device.iface.get_name = [](ggml_backend_dev_t d) { return static_cast<named_device *>(d->context)->name; };
        device.iface.get_props = [](ggml_backend_dev_t d, ggml_backend_dev_props * props) {
            props->device_id = static_cast<named_device *>(d->context)->id;
        };
        device.context = this;
    }
};

bool is_ok(const status & result) {
    if (!CHECK(result.ok())) {
        std::fprintf(stderr, "%s\n", result.text().c_str());
    }
    return result.ok();
}

ffn_options options_of(const layer_case & c, ffn_mode mode) {
    ffn_options options;
    options.mode = mode;
    options.activation = c.activation;
    options.add_biases = c.biases;
    options.threshold = mode == ffn_mode::dense ? 0.0f : 0.06f;
    options.product_threshold = mode == ffn_mode::dense ? 0.0f : 0.02f;
    return options;
}

void compare(const std::vector<float> & expected, const std::vector<float> & y, double limit) {
    for (size_t i = 0; i < expected.size(); ++i) {
        CHECK_NEAR(y[i], expected[i], limit);
    }
}

double nmse_limit(const layer_case & c, ffn_mode mode) {
    const bool has_threshold = mode == ffn_mode::threshold || mode == ffn_mode::predicted;
    if (c.type == GGML_TYPE_F32 && !rounds_f32 && c.activation != ffn_activation::gelu) {
        return has_threshold ? f32_threshold_nmse : f32_nmse;
    }
    return has_threshold ? rounded_threshold_nmse : rounded_nmse;
}

// Token by token: batches of quantized rows don't quantize x on the CPU.
void forward(const ffn_layer & layer, const ffn_options & options, int64_t n_tokens, const float * x, const float * r, int64_t ld,
             float * y, ffn_workspace & workspace, ffn_result & result) {
    for (int64_t t = 0; t < n_tokens; ++t) {
        ffn_forward(layer, options, &kernels_scalar, 1, 1, x + t * ld, ld, y + t * ld, ld, workspace, result, r + t * ld, ld);
    }
}

// n_tokens of one layer, n_hot of its neurons on the device.
void test_split(const layer_case & c, ggml_backend_dev_t device, int64_t n_hot, const std::vector<int64_t> & batches,
                const std::vector<ffn_mode> & modes) {
    const built b(c);
    const ffn_layer cold = ffn_without_hot(b.layer, n_hot);
    const gpu_layer_shape shape(b.layer, n_hot, true);
    const double limit = c.activation == ffn_activation::gelu ? gelu_tolerance : tolerance;
    std::unique_ptr<gpu_store> store = cuda_store_create(device);
    std::unique_ptr<gpu_executor> gpu;
    const int64_t max_tokens = *std::max_element(batches.begin(), batches.end());
    if (!is_ok(store->check_layer(3, shape)) || !is_ok(store->add_layer(3, b.layer, shape, &kernels_scalar)) ||
        !is_ok(store->make_executor(max_tokens, gpu))) {
        return;
    }
    CHECK(store->memory_bytes() == store->rows_bytes(shape));
    CHECK(store->memory_bytes() >= n_hot * store->neuron_bytes(shape));
    CHECK(gpu->memory_bytes() == store->scratch_bytes({shape}, max_tokens));
    const uint64_t neuron_bytes = b.layer.first.row_bytes + (c.gated ? b.layer.second.row_bytes : 0) + b.layer.down.row_bytes;
    ffn_workspace workspace;
    for (const int64_t n_tokens : batches) {
        for (const ffn_mode mode : modes) {
            ffn_options options = options_of(c, mode);
            options.count_hot = true;
            const int64_t ld = c.n_embd + 5;
            const std::vector<float> x = random_values(n_tokens * ld, 1.0f);
            const std::vector<float> r = n_tokens % 2 == 0 ? random_values(n_tokens * ld, 1.0f) : x;
            ffn_result whole;
            std::vector<float> expected(n_tokens * ld, 0.5f);
            forward(b.layer, options, n_tokens, x.data(), r.data(), ld, expected.data(), workspace, whole);
            std::vector<float> y(n_tokens * ld, 0.5f);
            gpu_result done;
            ffn_result rest;
            if (n_hot > 0) {
                std::vector<float> x_copy = x;  // may be overwritten as soon as start returns
                if (!is_ok(
                        gpu->start(3, options, n_tokens, x_copy.data(), ld, n_tokens % 2 == 0 ? r.data() : x_copy.data(), ld))) {
                    return;
                }
                std::fill(x_copy.begin(), x_copy.end(), std::numeric_limits<float>::quiet_NaN());
                if (cold.n_ff > 0) {
                    forward(cold, options, n_tokens, x.data(), r.data(), ld, y.data(), workspace, rest);
                } else {
                    for (int64_t t = 0; t < n_tokens; ++t) {
                        ffn_join_sums(b.layer, options, &kernels_scalar, 0, nullptr, 0, 0, c.n_embd, &y[t * ld]);
                    }
                }
                if (!is_ok(gpu->finish(y.data(), ld, done))) {
                    return;
                }
                compare(expected, y, limit);
                CHECK(done.n_candidates + rest.n_candidates == whole.n_candidates);
                CHECK(done.n_used + rest.n_active == whole.n_active);
                CHECK(mode == ffn_mode::dense ? done.n_active <= done.n_used : done.n_active == done.n_used);
                CHECK(done.begin_s > 0.0 && done.end_s >= done.begin_s);
                CHECK(done.copied_bytes >= 2 * n_tokens * c.n_embd * sizeof(float));
                if (mode == ffn_mode::dense) {
                    CHECK(done.read_bytes == n_tokens * n_hot * neuron_bytes);
                }
            }
            options.count_hot = false;
            gpu_result streamed;
            std::fill(y.begin(), y.end(), 0.5f);
            if (!is_ok(gpu->stream(3, cold, options, n_tokens, x.data(), ld, n_tokens % 2 == 0 ? r.data() : x.data(), ld,
                                   y.data(), ld, streamed))) {
                return;
            }
            for (int64_t t = 0; t < n_tokens && c.biases; ++t) {
                kernels_scalar.add(c.n_embd, b.layer.down_bias.data(), &y[t * ld]);
            }
            check_nmse(expected, y, nmse_limit(c, mode));
            CHECK(streamed.n_candidates == static_cast<uint64_t>(n_tokens * c.n_ff));
            CHECK(streamed.copied_bytes >= cold.n_ff * neuron_bytes);
        }
    }
}

// One matrix alone against plain sums.
void test_multiply(const layer_case & c, ggml_backend_dev_t device, int64_t n_tokens) {
    const built b(c);
    const int64_t n_hot = 45;
    std::unique_ptr<gpu_store> store = cuda_store_create(device);
    std::unique_ptr<gpu_executor> gpu;
    if (!is_ok(store->add_layer(0, b.layer, gpu_layer_shape(b.layer, n_hot, false), &kernels_scalar)) ||
        !is_ok(store->make_executor(n_tokens, gpu))) {
        return;
    }
    const std::vector<float> x = random_values(n_tokens * c.n_embd, 1.0f);
    for (const ffn_role role : {ffn_role::gate, ffn_role::up}) {
        const row_matrix & m = role == ffn_role::gate || !c.gated ? b.layer.first : b.layer.second;
        const row_reader reader(m, &kernels_scalar);
        std::vector<uint8_t> scratch(reader.scratch_bytes());
        std::vector<int32_t> remapped(n_hot);
        std::vector<float> expected(n_tokens * n_hot);
        for (int64_t t = 0; t < n_tokens; ++t) {
            reader.pack(&x[t * c.n_embd], scratch.data());
            reader.dot(nullptr, 0, n_hot, scratch.data(), &expected[t * n_hot], remapped.data());
        }
        std::vector<float> y(n_tokens * n_hot);
        is_ok(gpu->multiply(0, role, n_tokens, x.data(), c.n_embd, y.data(), n_hot));
        check_nmse(expected, y, nmse_limit(c, ffn_mode::dense));
    }
    std::vector<float> values = random_values(n_tokens * n_hot, 1.0f);
    values[1] = 0.0f;
    std::vector<float> expected(n_tokens * c.n_embd, 0.0f);
    const row_reader reader(b.layer.down, &kernels_scalar);
    std::vector<uint8_t> scratch(reader.scratch_bytes());
    for (int64_t t = 0; t < n_tokens; ++t) {
        reader.add(nullptr, 0, n_hot, &values[t * n_hot], scratch.data(), &expected[t * c.n_embd], nullptr);
    }
    std::vector<float> y(n_tokens * c.n_embd);
    is_ok(gpu->multiply(0, ffn_role::down, n_tokens, values.data(), n_hot, y.data(), c.n_embd));
    check_nmse(expected, y, nmse_limit(c, ffn_mode::dense));
}

bool has(const status & result, const char * text) { return !result.ok() && result.text().find(text) != std::string::npos; }

void test_errors(ggml_backend_dev_t device) {
    layer_case c;
    c.type = GGML_TYPE_Q5_0;
    const built slow(c);
    std::unique_ptr<gpu_store> store = cuda_store_create(device);
    CHECK(has(store->check_layer(3, gpu_layer_shape(slow.layer, 8, true)),
              "CUDA0: layer 3: gate rows are q5_0; the CUDA kernels read"));
    CHECK(has(store->add_layer(3, slow.layer, gpu_layer_shape(slow.layer, 8, true), &kernels_scalar), "gate rows are q5_0"));
    CHECK(store->memory_bytes() == 0);
    c.type = GGML_TYPE_F16;
    c.n_embd = 68;
    const built uneven(c);
    CHECK(has(store->check_layer(3, gpu_layer_shape(uneven.layer, 8, true)),
              "CUDA0: layer 3: gate rows have 68 values; the CUDA kernels read multiples of 8"));
    c.n_embd = 64;

    named_device other("Vulkan0", nullptr);
    std::unique_ptr<gpu_store> wrong = cuda_store_create(&other.device);
    CHECK(has(wrong->check_layer(0, gpu_layer_shape(slow.layer, 8, true)), "Vulkan0: not a device of ggml's CUDA backend"));
    CHECK(has(wrong->add_layer(0, slow.layer, gpu_layer_shape(slow.layer, 8, true), &kernels_scalar), "Vulkan0: not a device"));

#ifdef POWERINFER_CUDA_SHIM
    named_device missing("CUDA7", nullptr);
    CHECK(has(cuda_store_create(&missing.device)->check_layer(0, gpu_layer_shape(slow.layer, 8, true)),
              "CUDA7: choosing the device: no CUDA-capable"));
    named_device elsewhere("CUDA0", "0000:ff:00.0");
    CHECK(has(cuda_store_create(&elsewhere.device)->check_layer(0, gpu_layer_shape(slow.layer, 8, true)),
              "CUDA0: device 0000:ff:00.0: invalid argument"));

    const built b(c);
    fake_device_set_memory(0, 1000);
    CHECK(has(store->add_layer(3, b.layer, gpu_layer_shape(b.layer, 8, true), &kernels_scalar), "CUDA0: layer 3: "));
    fake_device_set_memory(0, 200 << 20);
    is_ok(store->add_layer(3, b.layer, gpu_layer_shape(b.layer, 8, true), &kernels_scalar));
    std::unique_ptr<gpu_executor> gpu;
    cuda_shim::memory_left_bytes = 1000;
    CHECK(has(store->make_executor(4, gpu), "CUDA0: scratch: "));
    CHECK(gpu == nullptr);
    cuda_shim::memory_left_bytes = SIZE_MAX;
    fake_device_set_memory(0, 20000);  // the rows are there already
    CHECK(has(store->make_executor(4, gpu), "bytes of scratch memory could not be allocated"));
    CHECK(gpu == nullptr);
    fake_device_set_memory(0, 200 << 20);
    is_ok(store->make_executor(4, gpu));
    const std::vector<float> x = random_values(c.n_embd, 1.0f);
    std::vector<float> y(c.n_embd);
    gpu_result done;
    is_ok(gpu->start(3, options_of(c, ffn_mode::exact), 1, x.data(), c.n_embd, x.data(), c.n_embd));
    cuda_shim::broken = cudaErrorLaunchFailure;
    CHECK(has(gpu->finish(y.data(), c.n_embd, done),
              "CUDA0: layer 3: computing hot neurons: unspecified launch failure; expected success"));
    cuda_shim::broken = 0;
#endif
}

}  // namespace

int main() {
    int n_devices = 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        std::fprintf(stderr, "no CUDA device\n");
        return 77;
    }
#ifdef POWERINFER_CUDA_SHIM
    fake_device_set_name(0, "CUDA0");
    fake_device_set_memory(0, 200 << 20);
    fake_device_register(1);
#else
    ggml_backend_load_all();
#endif
    ggml_backend_dev_t device = ggml_backend_dev_by_name("CUDA0");
    if (device == nullptr) {
        std::fprintf(stderr, "ggml has no CUDA device\n");
        return 77;
    }
    const std::vector<ffn_mode> all_modes = {ffn_mode::dense, ffn_mode::exact, ffn_mode::threshold};
    test_errors(device);

    layer_case c;
    for (const int64_t n_hot : {0, 1, 31, 64, 95, 96}) {
        test_split(c, device, n_hot, {1, 2, 19}, all_modes);
    }
    for (const ffn_activation activation : {ffn_activation::relu, ffn_activation::relu_sqr, ffn_activation::drelu,
                                            ffn_activation::silu, ffn_activation::gelu, ffn_activation::gelu_erf}) {
        for (const bool gated : {true, false}) {
            for (const bool biases : {true, false}) {
                c = {};
                c.activation = activation;
                c.gated = gated;
                c.biases = biases;
                c.is_mapped = biases;
                c.n_embd = 72;
                c.n_ff = 97;
                test_split(c, device, 40, {1, 3},
                           activation == ffn_activation::gelu ? std::vector<ffn_mode>{ffn_mode::dense} : all_modes);
            }
        }
    }
    for (const int type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_K}) {
        c = {};
        c.type = type;
        c.n_embd = 256;
        c.n_ff = 160;
        c.rank = 32;
        test_split(c, device, 70, {1, 2, 18}, {ffn_mode::exact, ffn_mode::predicted});
        test_split(c, device, 0, {2}, {ffn_mode::predicted});
        test_multiply(c, device, 1);
        test_multiply(c, device, 19);
    }
    c = {};
    c.gated = false;
    test_multiply(c, device, 2);

    // Our stream runs at once, or when something waits for it. Hot neurons are more than one launch of down joins.
    c = {};
    c.n_ff = 1700;
#ifdef POWERINFER_CUDA_SHIM
    for (const bool eager : {true, false}) {
        cuda_shim::eager_streams = eager;
        test_split(c, device, 1100, {1, 3}, {ffn_mode::exact});
    }
    cuda_shim::eager_streams = true;
    CHECK(cuda_shim::n_allocations == 0);
    fake_device_stats stats;
    fake_device_get_stats(0, &stats);
    CHECK(stats.used_bytes == 0);
#else
    test_split(c, device, 1100, {1, 40}, {ffn_mode::exact});
#endif
    return check_result();
}
