// The hot part on a CUDA device with our kernels: each token reads the rows of its own active neurons. The rows belong to a
// store of ggml's tensors, whose executor computes long batches and single matrices with ggml's own mat-muls.
#include "cuda-kernels.cuh"
#include "gpu-executor.h"

#include "ggml.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace powerinfer {

namespace {

constexpr int64_t step_tokens = 16;      // of one launch: bounds the lists and sums
constexpr size_t part_alignment = 256;   // of each part of the scratch memory
constexpr int n_totals = cuda_n_totals;  // counters in front of y

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// A status for what a CUDA call returned; ok when it succeeded.
status check(cudaError_t code, const std::string & where, const std::string & what) {
    if (code == cudaSuccess) {
        return {};
    }
    cudaGetLastError();  // one that isn't fatal must not be reported again
    const char * advice = "expected success; the system's log may hold the driver's message; start the program again.";
    if (code == cudaErrorMemoryAllocation) {
        advice = "expected that much free memory; give a smaller VRAM budget.";
    } else if (code == cudaErrorNoKernelImageForDevice) {
        advice = "expected code for this GPU; build with -DCMAKE_CUDA_ARCHITECTURES=native on this machine.";
    }
    return status::error(where + ": " + what + ": " + cudaGetErrorString(code) + "; " + advice);
}

std::string mib_text(size_t bytes) { return std::to_string((bytes >> 20) + 1) + " MiB"; }

// Memory on the device, or pinned on the host.
class cuda_memory {
public:
    explicit cuda_memory(bool on_host = false) : on_host_(on_host) {}
    ~cuda_memory() { release(); }
    cuda_memory(const cuda_memory &) = delete;
    cuda_memory & operator=(const cuda_memory &) = delete;

    status allocate(size_t size_bytes, const std::string & where) {
        release();
        void * p = nullptr;
        const cudaError_t code = on_host_ ? cudaMallocHost(&p, size_bytes) : cudaMalloc(&p, size_bytes);
        data_ = static_cast<uint8_t *>(code == cudaSuccess ? p : nullptr);
        return check(code, where, mib_text(size_bytes) + (on_host_ ? " of pinned host memory" : " of GPU memory"));
    }
    uint8_t * data() const { return data_; }

private:
    void release() {
        if (data_ != nullptr) {
            on_host_ ? cudaFreeHost(data_) : cudaFree(data_);
            data_ = nullptr;
        }
    }

    bool on_host_;
    uint8_t * data_ = nullptr;
};

struct destroy_stream {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
struct destroy_event {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using stream_ptr = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, destroy_stream>;
using event_ptr = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, destroy_event>;

cuda_activation activation_of(ffn_activation activation) {
    switch (activation) {
        case ffn_activation::relu:       return cuda_activation::relu;
        case ffn_activation::relu_sqr:   return cuda_activation::relu_sqr;
        case ffn_activation::drelu:      return cuda_activation::drelu;
        case ffn_activation::silu:       return cuda_activation::silu;
        case ffn_activation::gelu:       return cuda_activation::gelu;
        case ffn_activation::gelu_erf:   return cuda_activation::gelu_erf;
        case ffn_activation::gelu_quick: return cuda_activation::gelu_quick;
    }
    return cuda_activation::silu;
}

// --- store ---

cuda_matrix matrix_of(const ggml_tensor * rows) {
    cuda_matrix out;
    if (rows != nullptr) {
        out.rows = static_cast<const uint8_t *>(rows->data);
        out.stride_bytes = static_cast<int64_t>(rows->nb[1]);
        out.row_type = rows->type;
        out.n = static_cast<int>(rows->ne[0]);
    }
    return out;
}

const float * floats_of(const ggml_tensor * vector) {
    return vector != nullptr ? static_cast<const float *>(vector->data) : nullptr;
}

struct device_layer {
    gpu_layer_shape shape;
    float activation_param = 0.0f;
    float predictor_threshold = 0.0f;
    bool predictor_relu = false;
    cuda_neurons hot;
    cuda_matrix fc1;
};

class cuda_store : public gpu_store {
public:
    explicit cuda_store(ggml_backend_dev_t device) : name_(ggml_backend_dev_name(device)), rows_(ggml_row_store_create(device)) {
        opened_ = open(device);
    }

    status check_layer(int i_layer, const gpu_layer_shape & shape) const override;
    size_t neuron_bytes(const gpu_layer_shape & shape) const override { return rows_->neuron_bytes(shape); }
    size_t rows_bytes(const gpu_layer_shape & shape) const override { return rows_->rows_bytes(shape); }
    size_t scratch_bytes(const std::vector<gpu_layer_shape> & shapes, int64_t max_tokens) const override;
    status add_layer(int i_layer, const ffn_layer & layer, const gpu_layer_shape & shape, const kernel_table * kernels) override;
    size_t memory_bytes() const override { return rows_->memory_bytes(); }
    status make_executor(int64_t max_tokens, std::unique_ptr<gpu_executor> & out) override;

    // Makes the device this thread's.
    status use() const { return opened_.ok() ? check(cudaSetDevice(device_), name_, "choosing the device") : opened_; }
    std::string where(int i_layer) const { return name_ + ": layer " + std::to_string(i_layer); }
    const std::string & name() const { return name_; }
    const device_layer & layer(int i_layer) const { return layers_.at(i_layer); }

private:
    status open(ggml_backend_dev_t device);
    status check_rows(int i_layer, const char * part, int row_type, int64_t n) const;

    std::string name_;
    std::unique_ptr<gpu_row_store> rows_;
    int device_ = 0;
    status opened_;
    std::map<int, device_layer> layers_;
};

status cuda_store::open(ggml_backend_dev_t device) {
    if (name_.compare(0, 4, "CUDA") != 0) {
        return status::error(name_ +
                             ": not a device of ggml's CUDA backend; expected CUDA0, CUDA1, ...; it runs ggml's own operators.");
    }
    ggml_backend_dev_props props = {};
    ggml_backend_dev_get_props(device, &props);
    if (props.device_id != nullptr) {
        const status found =
            check(cudaDeviceGetByPCIBusId(&device_, props.device_id), name_, std::string("device ") + props.device_id);
        if (!found.ok()) {
            return found;
        }
    } else {
        device_ = std::atoi(name_.c_str() + 4);
    }
    const status chosen = check(cudaSetDevice(device_), name_, "choosing the device");
    return chosen.ok() ? check(cuda_check_kernels(), name_, "its kernels") : chosen;
}

status cuda_store::check_rows(int i_layer, const char * part, int row_type, int64_t n) const {
    if (row_type < 0) {
        return {};
    }
    if (!cuda_supports(row_type)) {
        return status::error(where(i_layer) + ": " + part + " rows are " + ggml_type_name(static_cast<ggml_type>(row_type)) +
                             "; the CUDA kernels read f32, f16, bf16, q8_0, q4_0 and q4_K; convert the model to one of them.");
    }
    if (n % cuda_row_values_unit != 0) {
        return status::error(where(i_layer) + ": " + part + " rows have " + std::to_string(n) +
                             " values; the CUDA kernels read multiples of " + std::to_string(cuda_row_values_unit) +
                             "; it runs ggml's own operators.");
    }
    return {};
}

status cuda_store::check_layer(int i_layer, const gpu_layer_shape & shape) const {
    if (!opened_.ok()) {
        return opened_;
    }
    const std::tuple<const char *, int, int64_t> parts[] = {
        {shape.second_type >= 0 ? "gate" : "up", shape.first_type, shape.n_embd},
        {"up", shape.second_type, shape.n_embd},
        {"down", shape.down_type, shape.n_embd},
        {"predictor", shape.fc1_type, shape.n_embd},
        {"predictor", shape.fc2_type, shape.rank}};
    for (const auto & [part, type, n] : parts) {
        const status result = check_rows(i_layer, part, type, n);
        if (!result.ok()) {
            return result;
        }
    }
    return rows_->check_layer(i_layer, shape);
}

status cuda_store::add_layer(int i_layer, const ffn_layer & layer, const gpu_layer_shape & shape, const kernel_table * kernels) {
    status result = check_layer(i_layer, shape);
    if (result.ok()) {
        result = rows_->add_layer(i_layer, layer, shape, kernels);
    }
    if (!result.ok()) {
        return result;
    }
    // Device pointers: ggml's buffers of this type are cudaMalloc's, and a set tensor is there when the call has returned.
    const gpu_tensors & rows = rows_->tensors(i_layer);
    device_layer self;
    self.shape = shape;
    self.activation_param = layer.activation_param;
    self.predictor_threshold = layer.predictor_threshold;
    self.predictor_relu = layer.predictor_relu;
    self.hot.n = static_cast<int>(shape.n_hot);
    self.hot.first = matrix_of(rows.first);
    self.hot.second = matrix_of(rows.second);
    self.hot.down = matrix_of(rows.down);
    self.hot.fc2 = matrix_of(rows.fc2);
    self.hot.first_bias = floats_of(rows.first_bias);
    self.hot.second_bias = floats_of(rows.second_bias);
    self.hot.down_norm = floats_of(rows.down_norm);
    self.fc1 = matrix_of(rows.fc1);
    layers_[i_layer] = self;
    return {};
}

// --- executor ---

// What scratch memory must suffice for.
struct scratch_needs {
    int64_t max_tokens = 0;
    int64_t n_embd = 0;
    int64_t rank = 0;
    int64_t n_neurons = 0;  // of a layer

    void add(const gpu_layer_shape & shape) {
        n_embd = std::max(n_embd, shape.n_embd);
        rank = std::max(rank, shape.rank);
        n_neurons = std::max(n_neurons, shape.n_hot);
    }
};

// Where the parts of an executor's device memory lie. ld: floats of a row of x and y, ld_hidden: of the predictor's.
struct scratch_layout {
    int64_t ld, ld_hidden, n_tiles;
    size_t x, packed, hidden, packed_hidden, ids, values, n_ids, sums, out;
    size_t bytes = 0;

    explicit scratch_layout(const scratch_needs & needs) {
        ld = round_up(needs.n_embd, cuda_input_unit);
        ld_hidden = round_up(needs.rank, cuda_input_unit);
        n_tiles = cuda_n_tiles(needs.n_neurons);
        x = take(2 * needs.max_tokens * ld * sizeof(float));  // x, then the predictor's input
        packed = take(needs.max_tokens * ld / block_values * sizeof(cuda_block_x));
        hidden = take(needs.max_tokens * ld_hidden * sizeof(float));
        packed_hidden = take(needs.max_tokens * ld_hidden / block_values * sizeof(cuda_block_x));
        ids = take(step_tokens * n_tiles * cuda_tile_neurons * sizeof(int32_t));
        values = take(step_tokens * n_tiles * cuda_tile_neurons * sizeof(float));
        n_ids = take(step_tokens * n_tiles * sizeof(int32_t));
        sums = take(step_tokens * cuda_n_splits(needs.n_neurons) * ld * sizeof(float));
        out = take(out_bytes(needs.max_tokens));
    }

    size_t out_bytes(int64_t n_tokens) const { return n_totals * sizeof(unsigned long long) + n_tokens * ld * sizeof(float); }

private:
    size_t take(size_t part_bytes) {
        const size_t at = bytes;
        bytes += round_up(part_bytes, part_alignment);
        return at;
    }
};

// Streams: start queues on a stream of its own, and finish waits for it; the executor of the rows waits for its own work before
// it returns. Calls come one at a time, so neither ever runs beside the other, and what they share is only read.
class cuda_executor : public gpu_executor {
public:
    cuda_executor(const cuda_store & store, const scratch_needs & needs, std::unique_ptr<gpu_executor> rows)
        : store_(store), rows_(std::move(rows)), max_tokens_(needs.max_tokens), at_(needs) {}

    status create();
    status start(int i_layer, const ffn_options & options, int64_t n_tokens, const float * x, int64_t ld_x, const float * r,
                 int64_t ld_r) override;
    status finish(float * y, int64_t ld_y, gpu_result & result) override;
    status stream(int i_layer, const ffn_layer & cold, const ffn_options & options, int64_t n_tokens, const float * x,
                  int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y, gpu_result & result) override {
        return rows_->stream(i_layer, cold, options, n_tokens, x, ld_x, r, ld_r, y, ld_y, result);
    }
    status multiply(int i_layer, ffn_role role, int64_t n_tokens, const float * x, int64_t ld_x, float * out,
                    int64_t ld_out) override {
        return rows_->multiply(i_layer, role, n_tokens, x, ld_x, out, ld_out);
    }
    size_t memory_bytes() const override { return at_.bytes + rows_->memory_bytes(); }

private:
    template <class T>
    T * scratch(size_t offset) const {
        return reinterpret_cast<T *>(memory_.data() + offset);
    }
    float * y() const { return scratch<float>(at_.out + n_totals * sizeof(unsigned long long)); }
    const float * host_y() const {
        return reinterpret_cast<const float *>(host_out_.data() + n_totals * sizeof(unsigned long long));
    }

    cuda_list list() const;
    status begin(int i_layer, const ffn_options & options, int64_t n_tokens, const float * x, int64_t ld_x, const float * r,
                 int64_t ld_r);
    status add_neurons();
    status end();
    void read_totals();

    const cuda_store & store_;
    std::unique_ptr<gpu_executor> rows_;
    const int64_t max_tokens_;
    const scratch_layout at_;
    cuda_memory memory_;
    cuda_memory host_x_{true};    // x, then the predictor's input where that is another one, without a gap
    cuda_memory host_out_{true};  // totals, y
    stream_ptr stream_;
    event_ptr done_;
    unsigned long long last_totals_[n_totals] = {};

    // The block that runs.
    std::string where_;
    const device_layer * layer_ = nullptr;
    cuda_rule rule_;
    int64_t n_tokens_ = 0;
    bool counts_active_ = false;
    gpu_result result_;
};

status cuda_executor::create() {
    const std::string & where = store_.name();
    status result = store_.use();
    auto next = [&](auto && make) {
        if (result.ok()) {
            result = make();
        }
    };
    next([&] { return memory_.allocate(at_.bytes, where + ": scratch"); });
    next([&] { return host_x_.allocate(2 * max_tokens_ * at_.ld * sizeof(float), where + ": scratch"); });
    next([&] { return host_out_.allocate(at_.out_bytes(max_tokens_), where + ": scratch"); });
    next([&] { return check(cudaMemset(scratch<void>(at_.out), 0, at_.out_bytes(0)), where, "clearing counters"); });
    next([&] {
        cudaStream_t made = nullptr;
        const status code = check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), where, "making a stream");
        stream_.reset(made);
        return code;
    });
    next([&] {
        cudaEvent_t made = nullptr;
        const status code = check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), where, "making an event");
        done_.reset(made);
        return code;
    });
    return result;
}

cuda_list cuda_executor::list() const {
    cuda_list out;
    out.ids = scratch<int32_t>(at_.ids);
    out.values = scratch<float>(at_.values);
    out.n_ids = scratch<int32_t>(at_.n_ids);
    out.totals = scratch<unsigned long long>(at_.out);
    return out;
}

// (n_tokens, n) rows of floats, `ld` apart, to rows `ld_to` apart, zeros behind them.
void copy_rows(int64_t n_tokens, int64_t n, const float * from, int64_t ld, float * to, int64_t ld_to) {
    for (int64_t t = 0; t < n_tokens; ++t) {
        std::memcpy(to + t * ld_to, from + t * ld, n * sizeof(float));
        std::fill_n(to + t * ld_to + n, ld_to - n, 0.0f);
    }
}

// Brings the inputs, and computes the predictor's hidden values.
status cuda_executor::begin(int i_layer, const ffn_options & options, int64_t n_tokens, const float * x, int64_t ld_x,
                            const float * r, int64_t ld_r) {
    status result = store_.use();
    if (!result.ok()) {
        return result;
    }
    where_ = store_.where(i_layer);
    layer_ = &store_.layer(i_layer);
    n_tokens_ = n_tokens;
    counts_active_ = options.count_hot;
    result_ = {};
    result_.begin_s = omp_get_wtime();
    rule_ = {};
    rule_.activation = activation_of(options.activation);
    rule_.activation_param = layer_->activation_param;
    rule_.is_dense = options.mode == ffn_mode::dense;
    rule_.is_predicted = options.mode == ffn_mode::predicted && layer_->shape.rank > 0;
    rule_.predictor_threshold = layer_->predictor_threshold;
    rule_.gate_limit = options.gate_limit();
    rule_.product_limit = options.product_limit();
    rule_.add_biases = options.add_biases;

    const int64_t ld = at_.ld;
    float * host_x = reinterpret_cast<float *>(host_x_.data());
    const bool has_r = rule_.is_predicted && r != x;
    copy_rows(n_tokens, layer_->shape.n_embd, x, ld_x, host_x, ld);
    if (has_r) {
        copy_rows(n_tokens, layer_->shape.n_embd, r, ld_r, host_x + n_tokens * ld, ld);
    }
    const size_t x_bytes = n_tokens * ld * sizeof(float) * (has_r ? 2 : 1);
    result_.copied_bytes += x_bytes;
    const cudaStream_t stream = stream_.get();
    float * device_x = scratch<float>(at_.x);
    cuda_block_x * packed = scratch<cuda_block_x>(at_.packed);
    const int n = static_cast<int>(n_tokens);
    auto next = [&](cudaError_t code, const char * what) {
        if (result.ok()) {
            result = check(code, where_, what);
        }
    };
    next(cudaMemcpyAsync(device_x, host_x, x_bytes, cudaMemcpyHostToDevice, stream), "copying the input");
    if (rule_.is_predicted) {
        cuda_input input;
        input.values = has_r ? device_x + n_tokens * ld : device_x;
        input.packed = packed;
        input.ld = ld;
        const int n_rank = static_cast<int>(layer_->shape.rank);
        float * hidden = scratch<float>(at_.hidden);
        next(cuda_pack(n, input.values, ld, packed, stream), "packing the predictor's input");
        next(cuda_dot_rows(n, layer_->fc1, n_rank, input, layer_->predictor_relu, hidden, at_.ld_hidden, stream),
             "starting the predictor");
        next(cuda_pack(n, hidden, at_.ld_hidden, scratch<cuda_block_x>(at_.packed_hidden), stream),
             "packing the predictor's values");
        result_.read_bytes += n_tokens * layer_->shape.rank * layer_->fc1.stride_bytes;
    }
    if (!rule_.is_predicted || has_r) {
        next(cuda_pack(n, device_x, ld, packed, stream), "packing the input");
    }
    return result;
}

// y = what the hot neurons give, for all tokens.
status cuda_executor::add_neurons() {
    const cuda_neurons & neurons = layer_->hot;
    status result;
    for (int64_t t = 0; t < n_tokens_ && result.ok(); t += step_tokens) {
        const int n = static_cast<int>(std::min(step_tokens, n_tokens_ - t));
        cuda_input x;
        x.values = scratch<float>(at_.x) + t * at_.ld;
        x.packed = scratch<cuda_block_x>(at_.packed) + t * (at_.ld / block_values);
        x.ld = at_.ld;
        cuda_input hidden;
        hidden.values = scratch<float>(at_.hidden) + t * at_.ld_hidden;
        hidden.packed = scratch<cuda_block_x>(at_.packed_hidden) + t * (at_.ld_hidden / block_values);
        hidden.ld = at_.ld_hidden;
        result = check(cuda_select(n, neurons, rule_, x, hidden, list(), stream_.get()), where_, "starting gate and up");
        if (result.ok()) {
            result = check(cuda_sum_down(n, neurons.n, neurons.down, list(), scratch<float>(at_.sums), y() + t * at_.ld, at_.ld,
                                         stream_.get()),
                           where_, "starting down");
        }
    }
    if (rule_.is_predicted) {
        result_.read_bytes += n_tokens_ * neurons.n * neurons.fc2.stride_bytes;
    }
    return result;
}

// Lets the results come back; done_ tells when they are here.
status cuda_executor::end() {
    const size_t out_bytes = at_.out_bytes(n_tokens_);
    result_.copied_bytes += out_bytes;
    const status result =
        check(cudaMemcpyAsync(host_out_.data(), scratch<void>(at_.out), out_bytes, cudaMemcpyDeviceToHost, stream_.get()),
              where_, "copying the result");
    return result.ok() ? check(cudaEventRecord(done_.get(), stream_.get()), where_, "recording an event") : result;
}

void cuda_executor::read_totals() {
    const unsigned long long * totals = reinterpret_cast<const unsigned long long *>(host_out_.data());
    uint64_t counts[n_totals];
    for (int i = 0; i < n_totals; ++i) {
        counts[i] = totals[i] - last_totals_[i];
        last_totals_[i] = totals[i];
    }
    result_.end_s = omp_get_wtime();
    result_.n_candidates = counts[0];
    result_.n_used = counts[2];
    result_.n_active = counts_active_ ? counts[3] : 0;
    const cuda_neurons & hot = layer_->hot;
    result_.read_bytes +=
        counts[0] * hot.first.stride_bytes + counts[1] * hot.second.stride_bytes + counts[2] * hot.down.stride_bytes;
}

status cuda_executor::start(int i_layer, const ffn_options & options, int64_t n_tokens, const float * x, int64_t ld_x,
                            const float * r, int64_t ld_r) {
    status result = begin(i_layer, options, n_tokens, x, ld_x, r, ld_r);
    if (result.ok()) {
        result = add_neurons();
    }
    return result.ok() ? end() : result;
}

status cuda_executor::finish(float * y, int64_t ld_y, gpu_result & result) {
    const status done = check(cudaEventSynchronize(done_.get()), where_, "computing hot neurons");
    if (!done.ok()) {
        return done;
    }
    for (int64_t t = 0; t < n_tokens_; ++t) {
        const float * from = host_y() + t * at_.ld;
        for (int64_t j = 0; j < layer_->shape.n_embd; ++j) {
            y[t * ld_y + j] += from[j];
        }
    }
    read_totals();
    result = result_;
    return {};
}

status cuda_store::make_executor(int64_t max_tokens, std::unique_ptr<gpu_executor> & out) {
    scratch_needs needs;
    needs.max_tokens = max_tokens;
    for (const auto & [i_layer, layer] : layers_) {
        needs.add(layer.shape);
    }
    std::unique_ptr<gpu_executor> rows;
    status result = rows_->make_executor(max_tokens, rows);
    if (!result.ok()) {
        return result;
    }
    std::unique_ptr<cuda_executor> made(new cuda_executor(*this, needs, std::move(rows)));
    result = made->create();
    if (result.ok()) {
        out = std::move(made);
    }
    return result;
}

}  // namespace

std::unique_ptr<gpu_store> cuda_store_create(ggml_backend_dev_t device) {
    return std::unique_ptr<gpu_store>(new cuda_store(device));
}

size_t cuda_store::scratch_bytes(const std::vector<gpu_layer_shape> & shapes, int64_t max_tokens) const {
    scratch_needs needs;
    needs.max_tokens = max_tokens;
    for (const gpu_layer_shape & shape : shapes) {
        needs.add(shape);
    }
    return scratch_layout(needs).bytes + rows_->scratch_bytes(shapes, max_tokens);
}

}  // namespace powerinfer
