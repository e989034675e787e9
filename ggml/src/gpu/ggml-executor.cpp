// The hot part on any ggml device, through ggml's own operators: two mat-muls, the activation, one mat-mul. The device must
// keep the order of what it is given (every ggml backend does).
#include "gpu-executor.h"

#include "../ggml-abi.h"

#include "ggml-alloc.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <omp.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace powerinfer {

namespace {

constexpr int64_t part_tokens = 128;               // tokens that the hot part computes at once: bounds its scratch memory
constexpr size_t stage_bytes = 32u << 20;          // cold rows that one upload brings, about
constexpr size_t group_floats_bytes = 64u << 20;   // down rows of such a group as floats
constexpr size_t group_values_bytes = 16u << 20;   // one value per neuron of such a group and token
constexpr int64_t multiply_neurons = 256;         // down rows that `multiply` transposes at once
constexpr int64_t column_slab = 256;               // columns of down that are transposed at once
constexpr size_t alignment_bytes = 256;            // room for a tensor's alignment, more than any device asks for
constexpr int max_tensors = 48;                    // of one graph

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Rows are whole blocks of Q8_0, which transposed down rows may be; the neurons behind n_hot have zero rows.
int64_t padded_neurons(int64_t n) { return round_up(n, ggml_blck_size(GGML_TYPE_Q8_0)); }

ggml_type transposed_type(int down_type) {
    const ggml_type type = static_cast<ggml_type>(down_type);
    return ggml_is_quantized(type) ? GGML_TYPE_Q8_0 : type;
}

ggml_context_ptr make_context() {
    const ggml_init_params params = {max_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(max_tensors, false), nullptr, true};
    return ggml_context_ptr(ggml_init(params));
}

// --- graphs ---

// a * 0 where |a| * norm < limit. NaN stays.
ggml_tensor * skip_below(ggml_context * ctx, ggml_tensor * a, ggml_tensor * norm, float limit) {
    ggml_tensor * size = ggml_abs(ctx, a);
    if (norm != nullptr) {
        size = ggml_mul_inplace(ctx, size, norm);
    }
    ggml_tensor * is_below = ggml_step_inplace(ctx, ggml_scale_bias_inplace(ctx, size, -1.0f, limit));
    return ggml_mul_inplace(ctx, a, ggml_scale_bias_inplace(ctx, is_below, -1.0f, 1.0f));
}

ggml_tensor * activate(ggml_context * ctx, ffn_activation activation, float param, ggml_tensor * a) {
    switch (activation) {
        case ffn_activation::silu:       return ggml_silu_inplace(ctx, a);
        case ffn_activation::gelu:       return ggml_gelu_inplace(ctx, a);
        case ffn_activation::gelu_erf:   return ggml_gelu_erf_inplace(ctx, a);
        case ffn_activation::gelu_quick: return ggml_gelu_quick_inplace(ctx, a);
        default: break;
    }
    a = ggml_relu_inplace(ctx, a);
    if (param > 0.0f) {
        a = ggml_mul_inplace(ctx, a, ggml_step_inplace(ctx, ggml_scale_bias(ctx, a, 1.0f, -param)));
    }
    return activation == ffn_activation::relu_sqr ? ggml_sqr_inplace(ctx, a) : a;
}

// act(gate) * up for the neurons of w, skipped ones 0. x [n_embd, n_tokens], hidden [rank, n_tokens] or nullptr. Returns [n, n_tokens].
ggml_tensor * neuron_values(ggml_context * ctx, const gpu_tensors & w, bool gated, const ffn_options & options, float param,
                            float predictor_threshold, ggml_tensor * x, ggml_tensor * hidden) {
    ggml_tensor * a = ggml_mul_mat(ctx, w.first, x);
    if (options.add_biases && w.first_bias != nullptr) {
        a = ggml_add_inplace(ctx, a, w.first_bias);
    }
    a = activate(ctx, options.activation, param, a);
    if (options.gate_limit() > 0.0f) {
        a = skip_below(ctx, a, nullptr, options.gate_limit());
    }
    if (gated) {
        ggml_tensor * up = ggml_mul_mat(ctx, w.second, x);
        if (options.add_biases && w.second_bias != nullptr) {
            up = ggml_add_inplace(ctx, up, w.second_bias);
        }
        if (options.activation == ffn_activation::drelu) {
            up = ggml_relu_inplace(ctx, up);
        }
        a = ggml_mul_inplace(ctx, a, up);
    }
    if (options.product_limit() > 0.0f) {
        a = skip_below(ctx, a, w.down_norm, options.product_limit());
    }
    if (hidden != nullptr) {
        // Skipped only where score < threshold: a NaN is computed.
        ggml_tensor * score = ggml_mul_mat(ctx, w.fc2, hidden);
        ggml_tensor * is_skipped = ggml_step_inplace(ctx, ggml_scale_bias_inplace(ctx, score, -1.0f, predictor_threshold));
        a = ggml_mul_inplace(ctx, a, ggml_scale_bias_inplace(ctx, is_skipped, -1.0f, 1.0f));
    }
    return a;
}

// A buffer that tensors are laid out in, one behind the other.
class arena {
public:
    explicit arena(ggml_backend_buffer_t buffer) : tallocr_(ggml_tallocr_new(buffer)) {}

    // Places what isn't placed yet. An error when the room doesn't suffice.
    status place(ggml_tensor * tensor) {
        if (tensor->view_src != nullptr) {
            return tensor->buffer != nullptr || ggml_backend_view_init(tensor) == GGML_STATUS_SUCCESS
                       ? status()
                       : status::error("GPU scratch: a view could not be made; this is an error in powerinfer.");
        }
        if (tensor->buffer != nullptr) {
            return {};
        }
        const size_t size = ggml_backend_buffer_get_size(tallocr_.buffer);
        const size_t left = size - std::min(tallocr_.offset, size);
        const size_t wanted = ggml_backend_buft_get_alloc_size(ggml_backend_buffer_get_type(tallocr_.buffer), tensor) + alignment_bytes;
        if (wanted > left || ggml_tallocr_alloc(&tallocr_, tensor) != GGML_STATUS_SUCCESS) {
            return status::error("GPU scratch: " + std::to_string(left) + " bytes are left; " + std::to_string(wanted) +
                                 " are needed; this is an error in powerinfer.");
        }
        return {};
    }

    status place_all(ggml_context * ctx) {
        for (ggml_tensor * tensor = ggml_get_first_tensor(ctx); tensor != nullptr; tensor = ggml_get_next_tensor(ctx, tensor)) {
            const status result = place(tensor);
            if (!result.ok()) {
                return result;
            }
        }
        return {};
    }

private:
    ggml_tallocr tallocr_;
};

// --- store ---

ggml_type type_of(int number) { return static_cast<ggml_type>(number); }

// How cold down rows are brought to the device: as they are, or as F16 where the device can't convert them to floats.
ggml_type staged_down_type(ggml_backend_dev_t device, const gpu_layer_shape & shape) {
    const ggml_type type = type_of(shape.down_type);
    ggml_context_ptr ctx(make_context());
    ggml_tensor * rows = ggml_new_tensor_2d(ctx.get(), type, shape.n_embd, 64);
    const bool converts = !ggml_is_quantized(type) || ggml_backend_dev_supports_op(device, ggml_cast(ctx.get(), rows, GGML_TYPE_F32));
    return converts ? type : GGML_TYPE_F16;
}

// Down rows [n_embd, n] as floats [n, n_embd].
ggml_tensor * transposed_floats(ggml_context * ctx, ggml_tensor * rows) {
    if (!ggml_is_quantized(rows->type)) {
        return ggml_cast(ctx, ggml_transpose(ctx, rows), rows->type);
    }
    return ggml_cast(ctx, ggml_transpose(ctx, ggml_cast(ctx, rows, GGML_TYPE_F32)), GGML_TYPE_F16);
}

// Bytes that it makes of one row.
size_t transposed_row_bytes(ggml_type type, int64_t n_embd) {
    return n_embd * (ggml_is_quantized(type) ? sizeof(float) + sizeof(ggml_fp16_t) : ggml_type_size(type));
}

struct device_layer {
    gpu_layer_shape shape;
    bool gated = true;
    float activation_param = 0.0f;
    ggml_type staged_down = GGML_TYPE_F32;
    uint64_t hot_bytes = 0;  // that one pass over the hot rows reads
    gpu_tensors hot;         // with padded_neurons(n_hot) neurons; first == nullptr: none are hot
    ggml_context_ptr context;
    ggml_backend_buffer_ptr buffer;
};

// keeps_rows: down neuron-major, and the predictor.
gpu_tensors make_hot_tensors(ggml_context * ctx, const gpu_layer_shape & shape, bool keeps_rows) {
    const int64_t n = padded_neurons(shape.n_hot);
    const auto rows = [&](int type, int64_t width) { return ggml_new_tensor_2d(ctx, type_of(type), width, n); };
    gpu_tensors hot;
    hot.first = rows(shape.first_type, shape.n_embd);
    hot.second = shape.second_type >= 0 ? rows(shape.second_type, shape.n_embd) : nullptr;
    hot.down = keeps_rows ? rows(shape.down_type, shape.n_embd)
                          : ggml_new_tensor_2d(ctx, transposed_type(shape.down_type), n, shape.n_embd);
    hot.first_bias = shape.has_first_bias ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n) : nullptr;
    hot.second_bias = shape.has_second_bias ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n) : nullptr;
    hot.down_norm = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n);
    if (keeps_rows && shape.rank > 0) {
        hot.fc1 = ggml_new_tensor_2d(ctx, type_of(shape.fc1_type), shape.n_embd, shape.rank);
        hot.fc2 = rows(shape.fc2_type, shape.rank);
    }
    return hot;
}

// Neurons first .. first + n - 1 of `all`.
gpu_tensors slice_neurons(ggml_context * ctx, const gpu_tensors & all, int64_t first, int64_t n) {
    const auto rows = [&](ggml_tensor * m) {
        return m != nullptr ? ggml_view_2d(ctx, m, m->ne[0], n, m->nb[1], first * m->nb[1]) : nullptr;
    };
    const auto floats = [&](ggml_tensor * v) { return v != nullptr ? ggml_view_1d(ctx, v, n, first * sizeof(float)) : nullptr; };
    gpu_tensors part;
    part.first = rows(all.first);
    part.second = rows(all.second);
    part.down = rows(all.down);
    part.first_bias = floats(all.first_bias);
    part.second_bias = floats(all.second_bias);
    part.down_norm = floats(all.down_norm);
    part.fc2 = rows(all.fc2);
    return part;
}

// Bytes of a cold neuron's rows on their way; the predictor's with at most 4 bytes per value.
size_t staged_neuron_bytes(const gpu_layer_shape & shape, ggml_type staged_down) {
    return ggml_row_size(type_of(shape.first_type), shape.n_embd) +
           (shape.second_type >= 0 ? ggml_row_size(type_of(shape.second_type), shape.n_embd) : 0) +
           ggml_row_size(staged_down, shape.n_embd) + shape.rank * sizeof(float);
}

// Neurons of a group of cold rows.
int64_t group_neurons(const gpu_layer_shape & shape, ggml_type staged_down, int64_t n_tokens) {
    const int64_t by_stage = stage_bytes / staged_neuron_bytes(shape, staged_down);
    const int64_t by_floats = group_floats_bytes / transposed_row_bytes(staged_down, shape.n_embd);
    const int64_t by_values = group_values_bytes / (n_tokens * sizeof(float));
    return std::max<int64_t>(64, std::min({by_stage, by_floats, by_values}) / 64 * 64);
}

class ggml_store : public gpu_row_store {
public:
    ggml_store(ggml_backend_dev_t device, bool keeps_rows) : device_(device), keeps_rows_(keeps_rows) {}

    status check_layer(int i_layer, const gpu_layer_shape & shape) const override;
    size_t neuron_bytes(const gpu_layer_shape & shape) const override;
    size_t rows_bytes(const gpu_layer_shape & shape) const override;
    size_t scratch_bytes(const std::vector<gpu_layer_shape> & shapes, int64_t max_tokens) const override;
    status add_layer(int i_layer, const ffn_layer & layer, const gpu_layer_shape & shape, const kernel_table * kernels) override;
    size_t memory_bytes() const override { return memory_bytes_; }
    status make_executor(int64_t max_tokens, std::unique_ptr<gpu_executor> & out) override;

    const gpu_tensors & tensors(int i_layer) const override { return layers_.at(i_layer).hot; }

    ggml_backend_dev_t device() const { return device_; }
    bool keeps_rows() const { return keeps_rows_; }
    const device_layer & layer(int i_layer) const { return layers_.at(i_layer); }
    const std::map<int, device_layer> & layers() const { return layers_; }

private:
    ggml_backend_dev_t device_;
    bool keeps_rows_;  // down neuron-major, and the predictor
    std::map<int, device_layer> layers_;
    size_t memory_bytes_ = 0;
};

std::string where_text(ggml_backend_dev_t device, int i_layer) {
    return std::string(ggml_backend_dev_name(device)) + ": layer " + std::to_string(i_layer);
}

status ggml_store::check_layer(int i_layer, const gpu_layer_shape & shape) const {
    ggml_context_ptr ctx = make_context();
    const std::pair<int, int64_t> products[] = {{shape.first_type, shape.n_embd}, {shape.second_type, shape.n_embd},
                                                {shape.streams ? shape.fc1_type : -1, shape.n_embd}, {shape.streams ? shape.fc2_type : -1, shape.rank}};
    for (const auto & [type, n] : products) {
        if (type < 0) {
            continue;
        }
        ggml_tensor * rows = ggml_new_tensor_2d(ctx.get(), type_of(type), n, 64);
        ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n, 1);
        if (!ggml_backend_dev_supports_op(device_, ggml_mul_mat(ctx.get(), rows, x))) {
            return status::error(where_text(device_, i_layer) + ": rows are " + ggml_type_name(type_of(type)) +
                                 "; expected a type that the device multiplies; convert the model to q4_0, q8_0 or f16.");
        }
    }
    const ggml_type brought = staged_down_type(device_, shape);
    ggml_tensor * down = transposed_floats(ctx.get(), ggml_new_tensor_2d(ctx.get(), brought, shape.n_embd, 64));
    if (keeps_rows_ && brought != type_of(shape.down_type)) {
        return status::error(where_text(device_, i_layer) + ": down rows are " + ggml_type_name(type_of(shape.down_type)) +
                             "; expected a type that the device converts to floats; store ffn_down_t as q4_0, q8_0 or f16.");
    }
    if ((shape.streams || keeps_rows_) && !ggml_backend_dev_supports_op(device_, down)) {
        return status::error(where_text(device_, i_layer) + ": down rows of type " + ggml_type_name(type_of(shape.down_type)) +
                             " can't be transposed there; expected a device that converts " + ggml_type_name(brought) + " to " +
                             ggml_type_name(down->type) + "; turn op_offload off.");
    }
    return {};
}

// Rows of positions 0 .. n - 1, without gaps, in pieces of about 8 MiB.
void upload_rows(const row_matrix & m, int64_t n, ggml_tensor * to) {
    const int64_t step = std::max<int64_t>(1, (8 << 20) / static_cast<int64_t>(m.row_bytes));
    std::vector<uint8_t> piece;
    for (int64_t from = 0; from < n; from += step) {
        const int64_t count = std::min(step, n - from);
        piece.resize(count * m.row_bytes);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = m.row_of ? m.row_of[from + i] : from + i;
            std::memcpy(piece.data() + i * m.row_bytes, m.rows + row * m.stride_bytes, m.row_bytes);
        }
        ggml_backend_tensor_set(to, piece.data(), from * m.row_bytes, piece.size());
    }
}

void upload_floats(const std::vector<float> & from, int64_t n, ggml_tensor * to) {
    ggml_backend_tensor_set(to, from.data(), 0, n * sizeof(float));
}

// to [n_padded, n_embd] = down rows of positions 0 .. n - 1, transposed.
void upload_transposed(const row_matrix & down, int64_t n, const kernel_table * kernels, ggml_tensor * to) {
    const int64_t n_padded = to->ne[0];
    const row_reader reader(down, kernels);
    const size_t row_bytes = ggml_row_size(to->type, n_padded);
    ggml_quantize_init(to->type);
    std::vector<float> slab(column_slab * n_padded);
    std::vector<uint8_t> rows(column_slab * row_bytes);
    for (int64_t from = 0; from < down.n; from += column_slab) {
        const int64_t width = std::min(column_slab, down.n - from);
#pragma omp parallel
        {
            std::vector<float> part(width + row_tail_bytes / sizeof(float));
#pragma omp for schedule(static)
            for (int64_t i = 0; i < n; ++i) {
                reader.unpack_part(i, from, width, part.data());
                for (int64_t j = 0; j < width; ++j) {
                    slab[j * n_padded + i] = part[j];
                }
            }
#pragma omp for schedule(static)
            for (int64_t j = 0; j < width; ++j) {
                ggml_quantize_chunk(to->type, &slab[j * n_padded], rows.data() + j * row_bytes, 0, 1, n_padded, nullptr);
            }
        }
        ggml_backend_tensor_set(to, rows.data(), from * row_bytes, width * row_bytes);
    }
}

status ggml_store::add_layer(int i_layer, const ffn_layer & layer, const gpu_layer_shape & shape, const kernel_table * kernels) {
    const int64_t n_hot = shape.n_hot;
    device_layer self;
    self.shape = shape;
    self.gated = layer.gated;
    self.activation_param = layer.activation_param;
    self.staged_down = staged_down_type(device_, self.shape);
    if (n_hot == 0) {
        layers_[i_layer] = std::move(self);
        return {};
    }
    self.context = make_context();
    ggml_context * ctx = self.context.get();
    self.hot = make_hot_tensors(ctx, self.shape, keeps_rows_);
    const gpu_tensors & hot = self.hot;
    for (const ggml_tensor * rows : {hot.first, hot.second, hot.down}) {
        self.hot_bytes += rows ? ggml_nbytes(rows) : 0;
    }
    const ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device_);
    self.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, type));
    if (self.buffer == nullptr) {
        return status::error(where_text(device_, i_layer) + ": " + std::to_string(ggml_backend_alloc_ctx_tensors_from_buft_size(ctx, type)) +
                             " bytes for hot neurons could not be allocated; expected that much free GPU memory; give a smaller VRAM budget.");
    }
    ggml_backend_buffer_set_usage(self.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_buffer_clear(self.buffer.get(), 0);
    memory_bytes_ += ggml_backend_buffer_get_size(self.buffer.get());
    upload_rows(layer.first, n_hot, hot.first);
    if (layer.gated) {
        upload_rows(layer.second, n_hot, hot.second);
    }
    if (keeps_rows_) {
        upload_rows(layer.down, n_hot, hot.down);
    } else {
        upload_transposed(layer.down, n_hot, kernels, hot.down);
    }
    upload_floats(layer.down_norm, n_hot, hot.down_norm);
    if (hot.first_bias != nullptr) {
        upload_floats(layer.first_bias, n_hot, hot.first_bias);
    }
    if (hot.second_bias != nullptr) {
        upload_floats(layer.second_bias, n_hot, hot.second_bias);
    }
    if (hot.fc1 != nullptr) {
        upload_rows(layer.fc1, layer.fc1.n_rows, hot.fc1);
        upload_rows(layer.fc2, n_hot, hot.fc2);
    }
    layers_[i_layer] = std::move(self);
    return {};
}

// --- executor ---

// Runs one job at a time in a thread of its own: for devices that compute within the call.
class worker {
public:
    ~worker() {
        if (thread_.joinable()) {
            post(nullptr);
            thread_.join();
        }
    }

    void post(std::function<void()> job) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!thread_.joinable()) {
            thread_ = std::thread([this] { run(); });
        }
        job_ = std::move(job);
        has_job_ = true;
        changed_.notify_all();
    }

    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !has_job_; });
    }

private:
    void run() {
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] { return has_job_; });
            if (job_ == nullptr) {
                return;
            }
            lock.unlock();
            job_();
            lock.lock();
            has_job_ = false;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> job_;
    bool has_job_ = false;
    std::thread thread_;
};

// Memory that the device copies from and to fast, where it has such memory.
class host_block {
public:
    status allocate(ggml_backend_dev_t device, size_t size_bytes) {
        ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(device);
        if (type == nullptr) {
            type = ggml_backend_cpu_buffer_type();
        }
        buffer_.reset(ggml_backend_buft_alloc_buffer(type, size_bytes));
        if (buffer_ == nullptr) {
            return status::error(std::string(ggml_backend_dev_name(device)) + ": " + std::to_string(size_bytes) +
                                 " bytes of host memory for copies could not be allocated; close other programs.");
        }
        data_ = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer_.get()));
        return {};
    }
    uint8_t * data() const { return data_; }
    template <class T> T * as() const { return reinterpret_cast<T *>(data_); }

private:
    ggml_backend_buffer_ptr buffer_;
    uint8_t * data_ = nullptr;
};

// A graph for one layer and number of tokens.
struct block_graph {
    ggml_context_ptr context;
    ggml_cgraph * graph = nullptr;
    ffn_options options;
    int64_t n_tokens = 0;
    ggml_tensor * x = nullptr;  // [n_embd, n_tokens]
    ggml_tensor * y = nullptr;  // [n_embd, n_tokens]
    ggml_tensor * n_active = nullptr;  // [1, n_tokens] when they are counted

    bool fits(const ffn_options & wanted, int64_t wanted_tokens) const {
        return context != nullptr && n_tokens == wanted_tokens && options.activation == wanted.activation &&
               options.add_biases == wanted.add_biases && options.gate_limit() == wanted.gate_limit() &&
               options.product_limit() == wanted.product_limit() && options.count_hot == wanted.count_hot;
    }
};

class ggml_executor : public gpu_executor {
public:
    ggml_executor(const ggml_store & store, int64_t max_tokens) : store_(store), max_tokens_(max_tokens) {}
    ~ggml_executor() override {
        worker_.wait();
        if (backend_ != nullptr) {
            ggml_backend_synchronize(backend_.get());
        }
    }

    status create();
    status start(int i_layer, const ffn_options & options, int64_t n_tokens, const float * x, int64_t ld_x, const float * r,
                 int64_t ld_r) override;
    status finish(float * y, int64_t ld_y, gpu_result & result) override;
    status stream(int i_layer, const ffn_layer & cold, const ffn_options & options, int64_t n_tokens, const float * x, int64_t ld_x,
                  const float * r, int64_t ld_r, float * y, int64_t ld_y, gpu_result & result) override;
    status multiply(int i_layer, ffn_role role, int64_t n_tokens, const float * x, int64_t ld_x, float * out, int64_t ld_out) override;
    size_t memory_bytes() const override { return ggml_backend_buffer_get_size(scratch_.get()); }

private:
    status build_hot(const device_layer & layer, const ffn_options & options, int64_t n_tokens, block_graph & out);
    status run_hot(int i_layer, const ffn_options & options, int64_t n_tokens);
    status run(ggml_cgraph * graph);
    void put(ggml_tensor * tensor, const void * from, size_t size_bytes);
    void take(const ggml_tensor * tensor, void * to, size_t size_bytes);
    status stage_group(const ffn_layer & cold, int64_t first, const gpu_tensors & w);

    const ggml_store & store_;
    const int64_t max_tokens_;
    ggml_backend_ptr backend_;
    bool queues_ = false;       // the device computes after the call has returned
    ggml_backend_buffer_ptr scratch_;        // on the device
    host_block in_;             // x of one call (max_tokens, n_embd), and what the predictor reads
    host_block out_;            // y of one call (max_tokens, n_embd)
    host_block counts_;         // active neurons of each token (max_tokens)
    host_block stages_[2];      // cold rows on their way
    size_t stage_room_bytes_ = 0;  // of one
    ggml_backend_event_ptr staged_[2];  // the device has read stages_[i]
    bool is_staged_[2] = {};            // ... was recorded
    int i_stage_ = 0;
    std::map<int, block_graph> single_;  // per layer, one token
    std::vector<block_graph> several_;   // of the running call
    worker worker_;

    // between start and finish
    int64_t n_tokens_ = 0;
    int64_t n_embd_ = 0;
    bool counts_hot_ = false;
    gpu_result result_;
    status error_;
};

status ggml_executor::create() {
    const ggml_backend_dev_t device = store_.device();
    backend_.reset(ggml_backend_dev_init(device, nullptr));
    if (backend_ == nullptr) {
        return status::error(std::string(ggml_backend_dev_name(device)) + ": the device could not be opened; expected a working GPU; check its driver, or load without a VRAM budget.");
    }
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(device, &props);
    queues_ = props.caps.async && backend_->iface.set_tensor_async != nullptr && backend_->iface.get_tensor_async != nullptr;
    std::vector<gpu_layer_shape> shapes;
    for (const auto & [i_layer, layer] : store_.layers()) {
        shapes.push_back(layer.shape);
    }
    const size_t size = store_.scratch_bytes(shapes, max_tokens_);
    scratch_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), size));
    if (scratch_ == nullptr) {
        return status::error(std::string(ggml_backend_dev_name(device)) + ": " + std::to_string(size) +
                             " bytes of scratch memory could not be allocated; expected that much free GPU memory; give a smaller VRAM budget or a smaller ubatch.");
    }
    ggml_backend_buffer_set_usage(scratch_.get(), GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    int64_t n_embd = 0;
    for (const auto & [i_layer, layer] : store_.layers()) {
        n_embd = std::max(n_embd, layer.shape.n_embd);
        stage_room_bytes_ = std::max(stage_room_bytes_, group_neurons(layer.shape, layer.staged_down, max_tokens_) *
                                                            staged_neuron_bytes(layer.shape, layer.staged_down));
    }
    status result = in_.allocate(device, 2 * max_tokens_ * n_embd * sizeof(float));
    if (result.ok()) {
        result = out_.allocate(device, max_tokens_ * n_embd * sizeof(float));
    }
    if (result.ok()) {
        result = counts_.allocate(device, max_tokens_ * sizeof(float));
    }
    for (int i = 0; i < 2 && props.caps.events; ++i) {
        staged_[i].reset(ggml_backend_event_new(device));
    }
    return result;
}

status ggml_executor::run(ggml_cgraph * graph) {
    const auto compute = queues_ ? ggml_backend_graph_compute_async : ggml_backend_graph_compute;
    return compute(backend_.get(), graph) == GGML_STATUS_SUCCESS
               ? status()
               : status::error(std::string(ggml_backend_dev_name(store_.device())) + ": the device failed to compute; expected a working GPU; its log says why.");
}

void ggml_executor::put(ggml_tensor * tensor, const void * from, size_t size_bytes) {
    const double begin = omp_get_wtime();
    if (queues_) {
        ggml_backend_tensor_set_async(backend_.get(), tensor, from, 0, size_bytes);
    } else {
        ggml_backend_tensor_set(tensor, from, 0, size_bytes);
    }
    result_.copied_bytes += size_bytes;
    result_.copy_s += omp_get_wtime() - begin;
}

void ggml_executor::take(const ggml_tensor * tensor, void * to, size_t size_bytes) {
    const double begin = omp_get_wtime();
    if (queues_) {
        ggml_backend_tensor_get_async(backend_.get(), tensor, to, 0, size_bytes);
    } else {
        ggml_backend_tensor_get(tensor, to, 0, size_bytes);
    }
    result_.copied_bytes += size_bytes;
    result_.copy_s += omp_get_wtime() - begin;
}

status ggml_executor::build_hot(const device_layer & layer, const ffn_options & options, int64_t n_tokens, block_graph & out) {
    out = {};
    out.context = make_context();
    out.options = options;
    out.n_tokens = n_tokens;
    ggml_context * ctx = out.context.get();
    out.x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, layer.shape.n_embd, n_tokens);
    out.graph = ggml_new_graph_custom(ctx, max_tensors, false);
    ggml_tensor * values = neuron_values(ctx, layer.hot, layer.gated, options, layer.activation_param, 0.0f, out.x, nullptr);
    out.y = ggml_mul_mat(ctx, layer.hot.down, values);
    ggml_build_forward_expand(out.graph, out.y);
    if (options.count_hot) {
        out.n_active = ggml_sum_rows(ctx, ggml_step_inplace(ctx, ggml_abs_inplace(ctx, values)));
        ggml_build_forward_expand(out.graph, out.n_active);
    }
    return arena(scratch_.get()).place_all(ctx);
}

// in_ -> out_, in parts of part_tokens. The graphs live until finish.
status ggml_executor::run_hot(int i_layer, const ffn_options & options, int64_t n_tokens) {
    const device_layer & layer = store_.layer(i_layer);
    const int64_t row = layer.shape.n_embd;
    for (int64_t from = 0; from < n_tokens; from += part_tokens) {
        const int64_t n = std::min(part_tokens, n_tokens - from);
        block_graph * graph = n == 1 ? &single_[i_layer] : several_.empty() ? nullptr : &several_.back();
        if (graph == nullptr || !graph->fits(options, n)) {
            if (n > 1) {
                several_.emplace_back();
                graph = &several_.back();
            }
            const status result = build_hot(layer, options, n, *graph);
            if (!result.ok()) {
                return result;
            }
        }
        put(graph->x, in_.as<float>() + from * row, n * row * sizeof(float));
        const status result = run(graph->graph);
        if (!result.ok()) {
            return result;
        }
        take(graph->y, out_.as<float>() + from * row, n * row * sizeof(float));
        if (options.count_hot) {
            take(graph->n_active, counts_.as<float>() + from, n * sizeof(float));
        }
    }
    return {};
}

// (n_tokens, n) without gaps.
void pack_rows(const float * from, int64_t ld, int64_t n, int64_t n_tokens, float * to) {
    for (int64_t t = 0; t < n_tokens; ++t) {
        std::memcpy(to + t * n, from + t * ld, n * sizeof(float));
    }
}

status ggml_executor::start(int i_layer, const ffn_options & options, int64_t n_tokens, const float * x, int64_t ld_x, const float *, int64_t) {
    const device_layer & layer = store_.layer(i_layer);
    GGML_ASSERT(n_tokens <= max_tokens_ && layer.shape.n_hot > 0 && !store_.keeps_rows());
    several_.clear();
    n_tokens_ = n_tokens;
    n_embd_ = layer.shape.n_embd;
    counts_hot_ = options.count_hot;
    result_ = {};
    result_.n_candidates = result_.n_used = n_tokens * layer.shape.n_hot;
    result_.read_bytes = layer.hot_bytes;
    pack_rows(x, ld_x, n_embd_, n_tokens, in_.as<float>());
    if (queues_) {
        result_.begin_s = omp_get_wtime();
        error_ = run_hot(i_layer, options, n_tokens);
        return error_;
    }
    worker_.post([this, i_layer, options, n_tokens] {
        result_.begin_s = omp_get_wtime();
        error_ = run_hot(i_layer, options, n_tokens);
        result_.end_s = omp_get_wtime();
    });
    return {};
}

status ggml_executor::finish(float * y, int64_t ld_y, gpu_result & result) {
    if (queues_) {
        ggml_backend_synchronize(backend_.get());
        result_.end_s = omp_get_wtime();
    } else {
        worker_.wait();
    }
    if (!error_.ok()) {
        return error_;
    }
    const float * sum = out_.as<float>();
    for (int64_t t = 0; t < n_tokens_; ++t) {
        result_.n_active += counts_hot_ ? static_cast<uint64_t>(counts_.as<float>()[t]) : 0;
        for (int64_t i = 0; i < n_embd_; ++i) {
            y[t * ld_y + i] += sum[t * n_embd_ + i];
        }
    }
    result = result_;
    return {};
}

// Brings rows first, first + 1, ... of each matrix to the tensors of w.
status ggml_executor::stage_group(const ffn_layer & cold, int64_t first, const gpu_tensors & w) {
    const int i = i_stage_;
    i_stage_ = 1 - i_stage_;
    if (stages_[i].data() == nullptr) {
        const status result = stages_[i].allocate(store_.device(), stage_room_bytes_);
        if (!result.ok()) {
            return result;
        }
    }
    if (is_staged_[i]) {
        ggml_backend_event_synchronize(staged_[i].get());
    } else if (queues_) {
        ggml_backend_synchronize(backend_.get());
    }
    uint8_t * at = stages_[i].data();
    const std::pair<const row_matrix *, ggml_tensor *> matrices[] = {{&cold.first, w.first}, {&cold.second, w.second}, {&cold.down, w.down}, {&cold.fc2, w.fc2}};
    for (const auto & pair : matrices) {
        const row_matrix * const m = pair.first;
        ggml_tensor * const tensor = pair.second;
        if (tensor == nullptr) {
            continue;
        }
        const int64_t n = tensor->ne[1];
        const size_t row_bytes = ggml_row_size(tensor->type, tensor->ne[0]);
        GGML_ASSERT(at + n * row_bytes <= stages_[i].data() + stage_room_bytes_);
        if (static_cast<int>(tensor->type) == m->row_type) {
#pragma omp parallel for schedule(static)
            for (int64_t k = 0; k < n; ++k) {
                const int64_t row = m->row_of ? m->row_of[first + k] : first + k;
                std::memcpy(at + k * row_bytes, m->rows + row * m->stride_bytes, row_bytes);
            }
        } else {
            // F16 in place of rows that the device can't convert.
#pragma omp parallel
            {
                std::vector<float> values(m->n);
#pragma omp for schedule(static)
                for (int64_t k = 0; k < n; ++k) {
                    const int64_t row = m->row_of ? m->row_of[first + k] : first + k;
                    row_to_float(m->row_type, m->rows + row * m->stride_bytes, values.data(), m->n);
                    ggml_fp32_to_fp16_row(values.data(), reinterpret_cast<ggml_fp16_t *>(at + k * row_bytes), m->n);
                }
            }
        }
        put(tensor, at, n * row_bytes);
        at += n * row_bytes;
    }
    if (staged_[i] != nullptr) {
        ggml_backend_event_record(staged_[i].get(), backend_.get());
        is_staged_[i] = true;
    }
    return {};
}

status ggml_executor::stream(int i_layer, const ffn_layer & cold, const ffn_options & options, int64_t n_tokens, const float * x,
                             int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y, gpu_result & result) {
    const device_layer & layer = store_.layer(i_layer);
    GGML_ASSERT(n_tokens <= max_tokens_);
    const int64_t n_embd = layer.shape.n_embd;
    const size_t values_bytes = n_tokens * n_embd * sizeof(float);
    const bool predicted = options.mode == ffn_mode::predicted;
    const bool has_own_r = predicted && r != x;
    result_ = {};
    result_.begin_s = omp_get_wtime();
    result_.n_candidates = result_.n_used = n_tokens * layer.shape.n_ff;
    result_.read_bytes = layer.hot_bytes + cold.matrix_bytes();
    std::vector<ggml_context_ptr> contexts;  // of graphs that may still run

    // What stays for the whole call.
    ggml_context_ptr kept = make_context();
    ggml_tensor * x_in = ggml_new_tensor_2d(kept.get(), GGML_TYPE_F32, n_embd, n_tokens);
    ggml_tensor * y_sum = ggml_new_tensor_2d(kept.get(), GGML_TYPE_F32, n_embd, n_tokens);
    ggml_tensor * r_in = has_own_r ? ggml_new_tensor_2d(kept.get(), GGML_TYPE_F32, n_embd, n_tokens) : x_in;
    ggml_tensor * hidden = nullptr;  // [rank, n_tokens]
    ggml_cgraph * predictor = nullptr;
    ggml_tensor * fc1 = nullptr;
    if (predicted) {
        fc1 = layer.hot.fc1 != nullptr ? layer.hot.fc1
                                       : ggml_new_tensor_2d(kept.get(), type_of(cold.fc1.row_type), n_embd, layer.shape.rank);
        hidden = ggml_mul_mat(kept.get(), fc1, r_in);
        hidden = cold.predictor_relu ? ggml_relu_inplace(kept.get(), hidden) : hidden;
        predictor = ggml_new_graph_custom(kept.get(), max_tensors, false);
        ggml_build_forward_expand(predictor, hidden);
    }
    arena space(scratch_.get());
    status error = space.place_all(kept.get());
    if (!error.ok()) {
        return error;
    }
    pack_rows(x, ld_x, n_embd, n_tokens, in_.as<float>());
    put(x_in, in_.data(), values_bytes);
    if (has_own_r) {
        float * packed = in_.as<float>() + n_tokens * n_embd;
        pack_rows(r, ld_r, n_embd, n_tokens, packed);
        put(r_in, packed, values_bytes);
    }
    if (predicted) {
        if (fc1 != layer.hot.fc1) {
            GGML_ASSERT(cold.fc1.stride_bytes == cold.fc1.row_bytes);
            put(fc1, cold.fc1.rows, cold.fc1.row_bytes * cold.fc1.n_rows);
        }
        error = run(predictor);
    }

    // One graph: `sum` gives values for the tokens of `to`; they are added to it, or begin it.
    const auto add_to = [&](ggml_context_ptr ctx, ggml_tensor * sum, ggml_tensor * to, bool begins, const std::function<status()> & bring) -> status {
        ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), max_tensors, false);
        ggml_build_forward_expand(graph, begins ? ggml_cpy(ctx.get(), sum, to) : ggml_add_inplace(ctx.get(), to, sum));
        arena room = space;
        status placed = room.place_all(ctx.get());
        if (placed.ok()) {
            placed = bring();
        }
        contexts.push_back(std::move(ctx));
        return placed.ok() ? run(graph) : placed;
    };

    // A group of neurons for all tokens. down is transposed on the device: as many bytes cross the bus as the rows have.
    const auto add_group = [&](ggml_context_ptr ctx, const gpu_tensors & w, bool begins, const std::function<status()> & bring) {
        ggml_tensor * down = transposed_floats(ctx.get(), w.down);
        ggml_tensor * values = neuron_values(ctx.get(), w, layer.gated, options, layer.activation_param, cold.predictor_threshold, x_in, hidden);
        ggml_tensor * sum = ggml_mul_mat(ctx.get(), down, values);
        return add_to(std::move(ctx), sum, y_sum, begins, bring);
    };
    const auto no_copy = [] { return status(); };

    const int64_t step = group_neurons(layer.shape, layer.staged_down, max_tokens_);
    const int64_t n_rows = store_.keeps_rows() ? padded_neurons(layer.shape.n_hot) : 0;  // that are hot, and taken as cold ones are
    for (int64_t first = 0; first < n_rows && error.ok(); first += step) {
        ggml_context_ptr ctx = make_context();
        const gpu_tensors w = slice_neurons(ctx.get(), layer.hot, first, std::min(step, n_rows - first));
        error = add_group(std::move(ctx), w, first == 0, no_copy);
    }
    const int64_t n_part_tokens = !store_.keeps_rows() && layer.shape.n_hot > 0 ? n_tokens : 0;  // with down transposed already
    for (int64_t from = 0; from < n_part_tokens && error.ok(); from += part_tokens) {
        ggml_context_ptr ctx = make_context();
        const int64_t n = std::min(part_tokens, n_tokens - from);
        const auto part = [&](ggml_tensor * all) { return ggml_view_2d(ctx.get(), all, n_embd, n, all->nb[1], from * all->nb[1]); };
        ggml_tensor * x_part = part(x_in);
        ggml_tensor * y_part = part(y_sum);
        ggml_tensor * values = neuron_values(ctx.get(), layer.hot, layer.gated, options, layer.activation_param, 0.0f, x_part, nullptr);
        ggml_tensor * sum = ggml_mul_mat(ctx.get(), layer.hot.down, values);
        error = add_to(std::move(ctx), sum, y_part, true, no_copy);
    }
    for (int64_t first = 0; first < cold.n_ff && error.ok(); first += step) {
        ggml_context_ptr ctx = make_context();
        const int64_t n = std::min(step, cold.n_ff - first);
        const auto rows = [&](int type, int64_t width) { return ggml_new_tensor_2d(ctx.get(), type_of(type), width, n); };
        const auto floats = [&] { return ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n); };
        gpu_tensors w;
        w.first = rows(layer.shape.first_type, n_embd);
        w.second = layer.gated ? rows(layer.shape.second_type, n_embd) : nullptr;
        w.down = rows(layer.staged_down, n_embd);
        w.fc2 = predicted ? rows(cold.fc2.row_type, layer.shape.rank) : nullptr;
        w.first_bias = options.add_biases && !cold.first_bias.empty() ? floats() : nullptr;
        w.second_bias = options.add_biases && !cold.second_bias.empty() ? floats() : nullptr;
        w.down_norm = options.product_limit() > 0.0f ? floats() : nullptr;
        error = add_group(std::move(ctx), w, first == 0 && layer.shape.n_hot == 0, [&]() -> status {
            const std::pair<ggml_tensor *, const std::vector<float> *> vectors[] = {{w.first_bias, &cold.first_bias}, {w.second_bias, &cold.second_bias}, {w.down_norm, &cold.down_norm}};
            for (const auto & [tensor, values_of] : vectors) {
                if (tensor != nullptr) {
                    put(tensor, values_of->data() + first, n * sizeof(float));
                }
            }
            return stage_group(cold, first, w);
        });
    }
    if (error.ok()) {
        take(y_sum, out_.data(), values_bytes);
    }
    ggml_backend_synchronize(backend_.get());
    for (int64_t t = 0; t < n_tokens && error.ok(); ++t) {
        std::memcpy(y + t * ld_y, out_.as<float>() + t * n_embd, n_embd * sizeof(float));
    }
    result_.end_s = omp_get_wtime();
    result = result_;
    return error;
}

status ggml_executor::multiply(int i_layer, ffn_role role, int64_t n_tokens, const float * x, int64_t ld_x, float * out, int64_t ld_out) {
    const device_layer & layer = store_.layer(i_layer);
    const bool is_down = role == ffn_role::down;
    const bool is_first = role == ffn_role::gate || !layer.gated;
    ggml_tensor * matrix = is_down ? layer.hot.down : is_first ? layer.hot.first : layer.hot.second;
    const bool has_rows = is_down && store_.keeps_rows();  // neurons are rows: transposed here, a slice at a time
    const int64_t n_in = matrix->ne[has_rows ? 1 : 0];
    const int64_t n_sums = matrix->ne[has_rows ? 0 : 1];
    const int64_t n_used = is_down ? layer.shape.n_hot : layer.shape.n_embd;  // the rest of n_in is padding
    const int64_t n_out = is_down ? layer.shape.n_embd : layer.shape.n_hot;
    const int64_t step = has_rows ? multiply_neurons : n_in;
    std::vector<float> in(std::min(part_tokens, n_tokens) * std::min(step, n_in));
    std::vector<float> sums(std::min(part_tokens, n_tokens) * n_sums);
    for (int64_t from = 0; from < n_tokens; from += part_tokens) {
        const int64_t n = std::min(part_tokens, n_tokens - from);
        for (int64_t first = 0; first < n_in; first += step) {
            const int64_t width = std::min(step, n_in - first);
            const int64_t n_values = std::min(width, n_used - first);
            ggml_context_ptr ctx = make_context();
            ggml_tensor * input = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, width, n);
            ggml_tensor * weights = has_rows ? transposed_floats(ctx.get(), slice_neurons(ctx.get(), layer.hot, first, width).down) : matrix;
            ggml_tensor * product = ggml_mul_mat(ctx.get(), weights, input);
            ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), max_tensors, false);
            ggml_build_forward_expand(graph, product);
            status result = arena(scratch_.get()).place_all(ctx.get());
            for (int64_t t = 0; t < n; ++t) {
                std::memcpy(&in[t * width], x + (from + t) * ld_x + first, n_values * sizeof(float));
                std::fill_n(&in[t * width + n_values], width - n_values, 0.0f);
            }
            if (result.ok()) {
                ggml_backend_tensor_set(input, in.data(), 0, n * width * sizeof(float));
                result = run(graph);
            }
            ggml_backend_synchronize(backend_.get());
            if (!result.ok()) {
                return result;
            }
            ggml_backend_tensor_get(product, sums.data(), 0, ggml_nbytes(product));
            for (int64_t t = 0; t < n; ++t) {
                float * to = out + (from + t) * ld_out;
                for (int64_t i = 0; i < n_out; ++i) {
                    to[i] = sums[t * n_sums + i] + (first > 0 ? to[i] : 0.0f);
                }
            }
        }
    }
    return {};
}

}  // namespace

status ggml_store::make_executor(int64_t max_tokens, std::unique_ptr<gpu_executor> & out) {
    std::unique_ptr<ggml_executor> made(new ggml_executor(*this, max_tokens));
    const status result = made->create();
    if (result.ok()) {
        out = std::move(made);
    }
    return result;
}

std::unique_ptr<gpu_store> ggml_store_create(ggml_backend_dev_t device) {
    return std::unique_ptr<gpu_store>(new ggml_store(device, false));
}

std::unique_ptr<gpu_row_store> ggml_row_store_create(ggml_backend_dev_t device) {
    return std::unique_ptr<gpu_row_store>(new ggml_store(device, true));
}

gpu_layer_shape::gpu_layer_shape(const ffn_layer & layer, int64_t n_hot, bool streams)
    : n_embd(layer.n_embd), n_ff(layer.n_ff), n_hot(n_hot), rank(layer.fc1.n_rows), first_type(layer.first.row_type),
      second_type(layer.gated ? layer.second.row_type : -1), down_type(layer.down.row_type),
      fc1_type(layer.fc1.row_type), fc2_type(layer.fc2.row_type), has_first_bias(!layer.first_bias.empty()),
      has_second_bias(!layer.second_bias.empty()), streams(streams) {}

size_t ggml_store::neuron_bytes(const gpu_layer_shape & shape) const {
    size_t bytes = sizeof(float) * (1 + shape.has_first_bias + shape.has_second_bias);
    for (const int type : {shape.first_type, shape.second_type}) {
        bytes += type >= 0 ? ggml_row_size(type_of(type), shape.n_embd) : 0;
    }
    if (keeps_rows_) {
        return bytes + ggml_row_size(type_of(shape.down_type), shape.n_embd) +
               (shape.rank > 0 ? ggml_row_size(type_of(shape.fc2_type), shape.rank) : 0);
    }
    // A transposed row holds whole blocks of neurons: the share of one.
    const ggml_type down = transposed_type(shape.down_type);
    return bytes + shape.n_embd * ggml_type_size(down) / ggml_blck_size(down);
}

size_t ggml_store::rows_bytes(const gpu_layer_shape & shape) const {
    if (shape.n_hot == 0) {
        return 0;
    }
    ggml_context_ptr ctx = make_context();
    make_hot_tensors(ctx.get(), shape, keeps_rows_);
    return ggml_backend_alloc_ctx_tensors_from_buft_size(ctx.get(), ggml_backend_dev_buffer_type(device_));
}

// The largest graph of a call: inputs and output, then the hot part's values or a group's rows and values.
size_t ggml_store::scratch_bytes(const std::vector<gpu_layer_shape> & shapes, int64_t max_tokens) const {
    const size_t part_bytes = std::min(max_tokens, part_tokens) * sizeof(float);  // of one value for every token of a part
    const size_t token_bytes = max_tokens * sizeof(float);                        // ... of a call
    size_t bytes = 0;
    for (const gpu_layer_shape & shape : shapes) {
        const int64_t n_hot = padded_neurons(shape.n_hot);
        const ggml_type staged_down = staged_down_type(device_, shape);
        const size_t floats_bytes = transposed_row_bytes(staged_down, shape.n_embd);
        const size_t kept = 3 * shape.n_embd * token_bytes;
        const size_t hot = keeps_rows_ ? 0 : 4 * n_hot * part_bytes + shape.n_embd * token_bytes;
        const size_t multiply = (shape.n_embd + n_hot) * part_bytes + std::min(multiply_neurons, n_hot) * floats_bytes;
        bytes = std::max(bytes, keeps_rows_ ? multiply : kept + hot);
        if (shape.streams) {
            const int64_t n = std::min(group_neurons(shape, staged_down, max_tokens), round_up(shape.n_ff, 64));
            const size_t rows = n * (staged_neuron_bytes(shape, staged_down) + floats_bytes + 3 * sizeof(float));
            const size_t group = rows + 5 * n * token_bytes + shape.n_embd * token_bytes;
            const size_t predictor = shape.rank * (shape.n_embd * sizeof(float) + token_bytes);
            bytes = std::max(bytes, kept + predictor + std::max(hot, group));
        }
    }
    return bytes + max_tensors * 2 * alignment_bytes;
}

}  // namespace powerinfer
