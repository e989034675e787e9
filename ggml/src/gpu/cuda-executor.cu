// The hot part on a CUDA device with our kernels. Rows stay as they are stored; each token reads those of its own active
// neurons. Batches run token by token through the same kernels: right for tens of tokens, slower than mat-muls for hundreds.
#include "cuda-kernels.cuh"
#include "gpu-executor.h"

#include "ggml.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

namespace powerinfer {

namespace {

constexpr int64_t step_tokens = 16;        // of one launch: bounds the lists and sums
constexpr size_t stage_bytes = 16u << 20;  // cold rows that one upload brings, about; two are on their way at once
constexpr size_t part_alignment = 256;     // of each matrix and vector in a block of device memory
constexpr int n_totals = cuda_n_totals;    // counters in front of y

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
    cuda_memory(cuda_memory && other) noexcept : on_host_(other.on_host_) { std::swap(data_, other.data_); }
    cuda_memory & operator=(cuda_memory && other) noexcept {
        std::swap(on_host_, other.on_host_);
        std::swap(data_, other.data_);
        return *this;
    }

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

// --- neurons in device memory ---

// Bytes of one neuron's rows as the device stores them; 0: the block has no such matrix.
struct neuron_rows {
    size_t first = 0;
    size_t second = 0;
    size_t down = 0;
    size_t fc2 = 0;
    bool has_first_bias = false;
    bool has_second_bias = false;

    static size_t stride(size_t row_bytes) { return round_up(row_bytes, cuda_row_bytes_unit); }
    static size_t stride_of(int type, int64_t n) { return type >= 0 ? stride(row_size_bytes(type, n)) : 0; }

    neuron_rows() = default;
    explicit neuron_rows(const gpu_layer_shape & shape)
        : first(stride_of(shape.first_type, shape.n_embd)),
          second(stride_of(shape.second_type, shape.n_embd)),
          down(stride_of(shape.down_type, shape.n_embd)),
          fc2(stride_of(shape.fc2_type, shape.rank)),
          has_first_bias(shape.has_first_bias),
          has_second_bias(shape.has_second_bias) {}

    size_t bytes() const { return first + second + down + fc2 + sizeof(float) * (1 + has_first_bias + has_second_bias); }
};

// Where the parts of n neurons lie in a block of memory.
struct group_layout {
    size_t first, second, down, fc2, first_bias, second_bias, down_norm;
    size_t bytes = 0;

    group_layout(const neuron_rows & rows, int64_t n) {
        first = take(rows.first * n);
        second = take(rows.second * n);
        down = take(rows.down * n);
        fc2 = take(rows.fc2 * n);
        first_bias = take(rows.has_first_bias ? n * sizeof(float) : 0);
        second_bias = take(rows.has_second_bias ? n * sizeof(float) : 0);
        down_norm = take(n * sizeof(float));
    }

private:
    size_t take(size_t part_bytes) {
        const size_t at = bytes;
        bytes += round_up(part_bytes, part_alignment);
        return at;
    }
};

// Neurons of a cold group of a layer.
int64_t group_neurons(const neuron_rows & rows, int64_t n_ff) {
    const int64_t n = std::min<int64_t>(stage_bytes / rows.bytes(), n_ff);
    return std::max<int64_t>(cuda_tile_neurons, n / cuda_tile_neurons * cuda_tile_neurons);
}

// Rows of positions from .. from + n - 1, `stride` apart with zeros between.
void gather_rows(const row_matrix & m, int64_t from, int64_t n, size_t stride, uint8_t * to) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        const int64_t row = m.row_of ? m.row_of[from + i] : from + i;
        std::memcpy(to + i * stride, m.rows + row * m.stride_bytes, m.row_bytes);
        std::memset(to + i * stride + m.row_bytes, 0, stride - m.row_bytes);
    }
}

cuda_matrix matrix_at(const uint8_t * rows, const row_matrix & m, size_t stride) {
    cuda_matrix out;
    if (stride > 0) {
        out.rows = rows;
        out.stride_bytes = static_cast<int64_t>(stride);
        out.row_type = m.row_type;
        out.n = static_cast<int>(m.n);
    }
    return out;
}

// n neurons that lie at `base`, of a layer's types.
cuda_neurons neurons_at(const uint8_t * base, const group_layout & at, const neuron_rows & rows, const ffn_layer & layer,
                        int64_t n) {
    auto floats = [&](size_t offset, bool is_there) {
        return is_there ? reinterpret_cast<const float *>(base + offset) : nullptr;
    };
    cuda_neurons out;
    out.n = static_cast<int>(n);
    out.first = matrix_at(base + at.first, layer.first, rows.first);
    out.second = matrix_at(base + at.second, layer.second, rows.second);
    out.down = matrix_at(base + at.down, layer.down, rows.down);
    out.fc2 = matrix_at(base + at.fc2, layer.fc2, rows.fc2);
    out.first_bias = floats(at.first_bias, rows.has_first_bias);
    out.second_bias = floats(at.second_bias, rows.has_second_bias);
    out.down_norm = floats(at.down_norm, true);
    return out;
}

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

struct device_layer {
    gpu_layer_shape shape;
    neuron_rows rows;
    int64_t n_embd = 0;
    int64_t n_hot = 0;
    int64_t rank = 0;
    int64_t n_group = 0;  // cold neurons that one upload brings
    float activation_param = 0.0f;
    float predictor_threshold = 0.0f;
    bool predictor_relu = false;
    cuda_neurons hot;
    cuda_matrix fc1;
    uint64_t first_row_bytes = 0;  // that reading a row reads
    uint64_t second_row_bytes = 0;
    uint64_t down_row_bytes = 0;
    uint64_t fc1_bytes = 0;
    uint64_t fc2_row_bytes = 0;
    cuda_memory memory;
};

class cuda_store : public gpu_store {
public:
    explicit cuda_store(ggml_backend_dev_t device) : name_(ggml_backend_dev_name(device)) { opened_ = open(device); }

    status check_layer(int i_layer, const gpu_layer_shape & shape) const override;
    size_t neuron_bytes(const gpu_layer_shape & shape) const override;
    size_t rows_bytes(const gpu_layer_shape & shape) const override;
    size_t scratch_bytes(const std::vector<gpu_layer_shape> & shapes, int64_t max_tokens) const override;
    status add_layer(int i_layer, const ffn_layer & layer, const gpu_layer_shape & shape, const kernel_table * kernels) override;
    size_t memory_bytes() const override { return memory_bytes_; }
    status make_executor(int64_t max_tokens, std::unique_ptr<gpu_executor> & out) override;

    // Makes the device this thread's.
    status use() const { return opened_.ok() ? check(cudaSetDevice(device_), name_, "choosing the device") : opened_; }
    std::string where(int i_layer) const { return name_ + ": layer " + std::to_string(i_layer); }
    const std::string & name() const { return name_; }
    const device_layer & layer(int i_layer) const { return layers_.at(i_layer); }

private:
    status open(ggml_backend_dev_t device);
    status check_type(int i_layer, const char * part, int row_type) const;

    std::string name_;
    int device_ = 0;
    status opened_;
    std::map<int, device_layer> layers_;
    size_t memory_bytes_ = 0;
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

status cuda_store::check_type(int i_layer, const char * part, int row_type) const {
    if (row_type < 0 || cuda_supports(row_type)) {
        return {};
    }
    return status::error(where(i_layer) + ": " + part + " rows are " + ggml_type_name(static_cast<ggml_type>(row_type)) +
                         "; the CUDA kernels read f32, f16, bf16, q8_0, q4_0 and q4_K; convert the model to one of them.");
}

status cuda_store::check_layer(int i_layer, const gpu_layer_shape & shape) const {
    if (!opened_.ok()) {
        return opened_;
    }
    const std::pair<const char *, int> parts[] = {{shape.second_type >= 0 ? "gate" : "up", shape.first_type},
                                                  {"up", shape.second_type},
                                                  {"down", shape.down_type},
                                                  {"predictor", shape.fc1_type},
                                                  {"predictor", shape.fc2_type}};
    for (const auto & [part, type] : parts) {
        const status result = check_type(i_layer, part, type);
        if (!result.ok()) {
            return result;
        }
    }
    return {};
}

status cuda_store::add_layer(int i_layer, const ffn_layer & layer, const gpu_layer_shape & shape, const kernel_table *) {
    status result = check_layer(i_layer, shape);
    if (result.ok()) {
        result = use();
    }
    if (!result.ok()) {
        return result;
    }
    const int64_t n_hot = shape.n_hot;
    const neuron_rows rows(shape);
    const group_layout at(rows, n_hot);
    const size_t fc1_stride = neuron_rows::stride_of(shape.fc1_type, shape.n_embd);
    const size_t bytes = at.bytes + fc1_stride * layer.fc1.n_rows;

    device_layer self;
    self.n_embd = layer.n_embd;
    self.n_hot = n_hot;
    self.rank = layer.fc1.n_rows;
    self.shape = shape;
    self.rows = rows;
    self.n_group = group_neurons(rows, layer.n_ff);
    self.activation_param = layer.activation_param;
    self.predictor_threshold = layer.predictor_threshold;
    self.predictor_relu = layer.predictor_relu;
    self.first_row_bytes = layer.first.row_bytes;
    self.second_row_bytes = layer.gated ? layer.second.row_bytes : 0;
    self.down_row_bytes = layer.down.row_bytes;
    self.fc1_bytes = layer.fc1.row_bytes * layer.fc1.n_rows;
    self.fc2_row_bytes = layer.fc2.row_bytes;
    cuda_memory staging(true);
    if (bytes > 0) {
        result = self.memory.allocate(bytes, where(i_layer));
        if (result.ok()) {
            result = staging.allocate(stage_bytes, where(i_layer));
        }
        if (!result.ok()) {
            return result;
        }
    }
    auto put = [&](const void * from, size_t size_bytes, uint8_t * to) {
        return check(cudaMemcpy(to, from, size_bytes, cudaMemcpyHostToDevice), where(i_layer), "copying " + mib_text(size_bytes));
    };
    auto put_rows = [&](const row_matrix & m, int64_t n_rows, size_t stride, uint8_t * to) {
        const int64_t step = stride > 0 ? stage_bytes / stride : 1;
        for (int64_t from = 0; from < n_rows && stride > 0 && result.ok(); from += step) {
            const int64_t n = std::min(step, n_rows - from);
            gather_rows(m, from, n, stride, staging.data());
            result = put(staging.data(), n * stride, to + from * stride);
        }
    };
    uint8_t * base = self.memory.data();
    put_rows(layer.first, n_hot, rows.first, base + at.first);
    put_rows(layer.second, n_hot, rows.second, base + at.second);
    put_rows(layer.down, n_hot, rows.down, base + at.down);
    put_rows(layer.fc2, n_hot, rows.fc2, base + at.fc2);
    put_rows(layer.fc1, layer.fc1.n_rows, fc1_stride, base + at.bytes);
    const std::pair<const std::vector<float> *, size_t> vectors[] = {
        {&layer.first_bias, at.first_bias}, {&layer.second_bias, at.second_bias}, {&layer.down_norm, at.down_norm}};
    for (const auto & [values, offset] : vectors) {
        if (result.ok() && n_hot > 0 && !values->empty()) {
            result = put(values->data(), n_hot * sizeof(float), base + offset);
        }
    }
    if (!result.ok()) {
        return result;
    }
    self.hot = neurons_at(base, at, rows, layer, n_hot);
    self.fc1 = matrix_at(base + at.bytes, layer.fc1, fc1_stride);
    memory_bytes_ += bytes;
    layers_[i_layer] = std::move(self);
    return {};
}

// --- executor ---

// What scratch memory must suffice for.
struct scratch_needs {
    int64_t max_tokens = 0;
    int64_t n_embd = 0;
    int64_t rank = 0;
    int64_t n_neurons = 0;  // of a launch
    size_t group_bytes = 0;

    void add(const gpu_layer_shape & shape) {
        const neuron_rows rows(shape);
        const int64_t n_group = shape.streams ? group_neurons(rows, shape.n_ff) : 0;
        n_embd = std::max(n_embd, shape.n_embd);
        rank = std::max(rank, shape.rank);
        n_neurons = std::max({n_neurons, shape.n_hot, n_group});
        // `multiply` brings one value per hot neuron and token through the same room.
        group_bytes = std::max({group_bytes, group_layout(rows, n_group).bytes, step_tokens * shape.n_hot * sizeof(float)});
    }
};

// Where the parts of an executor's device memory lie. ld: floats of a row of x and y, ld_hidden: of the predictor's.
struct scratch_layout {
    int64_t ld, ld_hidden, n_tiles;
    size_t x, packed, hidden, packed_hidden, ids, values, n_ids, sums, out, stages[2];
    size_t stage_bytes = 0;
    size_t bytes = 0;

    explicit scratch_layout(const scratch_needs & needs) {
        ld = round_up(needs.n_embd, cuda_input_unit);
        ld_hidden = round_up(needs.rank, cuda_input_unit);
        n_tiles = cuda_n_tiles(needs.n_neurons);
        stage_bytes = round_up(needs.group_bytes, part_alignment);
        x = take(2 * needs.max_tokens * ld * sizeof(float));  // x, then the predictor's input
        packed = take(needs.max_tokens * ld / block_values * sizeof(cuda_block_x));
        hidden = take(needs.max_tokens * ld_hidden * sizeof(float));
        packed_hidden = take(needs.max_tokens * ld_hidden / block_values * sizeof(cuda_block_x));
        ids = take(step_tokens * n_tiles * cuda_tile_neurons * sizeof(int32_t));
        values = take(step_tokens * n_tiles * cuda_tile_neurons * sizeof(float));
        n_ids = take(step_tokens * n_tiles * sizeof(int32_t));
        sums = take(step_tokens * cuda_n_splits(needs.n_neurons) * ld * sizeof(float));
        out = take(out_bytes(needs.max_tokens));
        stages[0] = take(stage_bytes);
        stages[1] = take(stage_bytes);
    }

    size_t out_bytes(int64_t n_tokens) const { return n_totals * sizeof(unsigned long long) + n_tokens * ld * sizeof(float); }

private:
    size_t take(size_t part_bytes) {
        const size_t at = bytes;
        bytes += round_up(part_bytes, part_alignment);
        return at;
    }
};

class cuda_executor : public gpu_executor {
public:
    cuda_executor(const cuda_store & store, const scratch_needs & needs)
        : store_(store), max_tokens_(needs.max_tokens), at_(needs) {}

    status create();
    status start(int i_layer, const ffn_options & options, int64_t n_tokens, const float * x, int64_t ld_x, const float * r,
                 int64_t ld_r) override;
    status finish(float * y, int64_t ld_y, gpu_result & result) override;
    status stream(int i_layer, const ffn_layer & cold, const ffn_options & options, int64_t n_tokens, const float * x,
                  int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y, gpu_result & result) override;
    status multiply(int i_layer, ffn_role role, int64_t n_tokens, const float * x, int64_t ld_x, float * out,
                    int64_t ld_out) override;
    size_t memory_bytes() const override { return at_.bytes; }

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
    status add_neurons(const cuda_neurons & neurons);
    status bring_group(const ffn_layer & cold, int64_t from, int64_t n, int i_stage);
    status end();
    void read_totals();

    const cuda_store & store_;
    const int64_t max_tokens_;
    const scratch_layout at_;
    cuda_memory memory_;
    cuda_memory host_x_{true};    // x, then the predictor's input where that is another one, without a gap
    cuda_memory host_out_{true};  // totals, y
    cuda_memory host_stages_[2] = {cuda_memory(true), cuda_memory(true)};
    stream_ptr compute_;
    stream_ptr copy_;  // brings cold rows
    event_ptr done_;
    event_ptr is_copied_[2];  // a stage's rows are on the device
    event_ptr is_used_[2];    // a stage's rows are no longer needed there
    unsigned long long last_totals_[n_totals] = {};

    // The block that runs.
    std::string where_;
    const device_layer * layer_ = nullptr;
    cuda_rule rule_;
    int64_t n_tokens_ = 0;
    bool is_begun_ = false;  // y holds a part already
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
    for (const int i : {0, 1}) {
        next([&] { return host_stages_[i].allocate(at_.stage_bytes, where + ": scratch"); });
    }
    for (stream_ptr * to : {&compute_, &copy_}) {
        next([&] {
            cudaStream_t made = nullptr;
            const status code = check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), where, "making a stream");
            to->reset(made);
            return code;
        });
    }
    for (event_ptr * to : {&done_, &is_copied_[0], &is_copied_[1], &is_used_[0], &is_used_[1]}) {
        next([&] {
            cudaEvent_t made = nullptr;
            const status code = check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), where, "making an event");
            to->reset(made);
            return code;
        });
    }
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
    is_begun_ = false;
    counts_active_ = options.count_hot;
    result_ = {};
    result_.begin_s = omp_get_wtime();
    rule_ = {};
    rule_.activation = activation_of(options.activation);
    rule_.activation_param = layer_->activation_param;
    rule_.is_dense = options.mode == ffn_mode::dense;
    rule_.is_predicted = options.mode == ffn_mode::predicted && layer_->rank > 0;
    rule_.predictor_threshold = layer_->predictor_threshold;
    rule_.gate_limit = options.gate_limit();
    rule_.product_limit = options.product_limit();
    rule_.add_biases = options.add_biases;

    const int64_t ld = at_.ld;
    float * host_x = reinterpret_cast<float *>(host_x_.data());
    const bool has_r = rule_.is_predicted && r != x;
    copy_rows(n_tokens, layer_->n_embd, x, ld_x, host_x, ld);
    if (has_r) {
        copy_rows(n_tokens, layer_->n_embd, r, ld_r, host_x + n_tokens * ld, ld);
    }
    const size_t x_bytes = n_tokens * ld * sizeof(float) * (has_r ? 2 : 1);
    result_.copied_bytes += x_bytes;
    const cudaStream_t stream = compute_.get();
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
        const int n_rank = static_cast<int>(layer_->rank);
        float * hidden = scratch<float>(at_.hidden);
        next(cuda_pack(n, input.values, ld, packed, stream), "packing the predictor's input");
        next(cuda_dot_rows(n, layer_->fc1, n_rank, input, layer_->predictor_relu, hidden, at_.ld_hidden, stream),
             "starting the predictor");
        next(cuda_pack(n, hidden, at_.ld_hidden, scratch<cuda_block_x>(at_.packed_hidden), stream),
             "packing the predictor's values");
        result_.read_bytes += n_tokens * layer_->fc1_bytes;
    }
    if (!rule_.is_predicted || has_r) {
        next(cuda_pack(n, device_x, ld, packed, stream), "packing the input");
    }
    return result;
}

// y (+)= what the neurons give, for all tokens.
status cuda_executor::add_neurons(const cuda_neurons & neurons) {
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
        result = check(cuda_select(n, neurons, rule_, x, hidden, list(), compute_.get()), where_, "starting gate and up");
        if (result.ok()) {
            result = check(cuda_add_down(n, neurons.n, neurons.down, list(), is_begun_, scratch<float>(at_.sums),
                                         y() + t * at_.ld, at_.ld, compute_.get()),
                           where_, "starting down");
        }
    }
    is_begun_ = true;
    if (rule_.is_predicted) {
        result_.read_bytes += n_tokens_ * neurons.n * layer_->fc2_row_bytes;
    }
    return result;
}

// Lets the results come back; done_ tells when they are here.
status cuda_executor::end() {
    const size_t out_bytes = at_.out_bytes(n_tokens_);
    result_.copied_bytes += out_bytes;
    const status result =
        check(cudaMemcpyAsync(host_out_.data(), scratch<void>(at_.out), out_bytes, cudaMemcpyDeviceToHost, compute_.get()),
              where_, "copying the result");
    return result.ok() ? check(cudaEventRecord(done_.get(), compute_.get()), where_, "recording an event") : result;
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
    result_.read_bytes +=
        counts[0] * layer_->first_row_bytes + counts[1] * layer_->second_row_bytes + counts[2] * layer_->down_row_bytes;
}

status cuda_executor::start(int i_layer, const ffn_options & options, int64_t n_tokens, const float * x, int64_t ld_x,
                            const float * r, int64_t ld_r) {
    status result = begin(i_layer, options, n_tokens, x, ld_x, r, ld_r);
    if (result.ok()) {
        result = add_neurons(layer_->hot);
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
        for (int64_t j = 0; j < layer_->n_embd; ++j) {
            y[t * ld_y + j] += from[j];
        }
    }
    read_totals();
    result = result_;
    return {};
}

// Cold neurons from .. from + n - 1 into a stage on the device; is_copied_ tells when.
status cuda_executor::bring_group(const ffn_layer & cold, int64_t from, int64_t n, int i_stage) {
    const neuron_rows & rows = layer_->rows;
    // The host's stage is free once its last copy is done.
    status result = check(cudaEventSynchronize(is_copied_[i_stage].get()), where_, "bringing cold rows");
    if (!result.ok()) {
        return result;
    }
    const group_layout at(rows, n);
    uint8_t * to = host_stages_[i_stage].data();
    gather_rows(cold.first, from, n, rows.first, to + at.first);
    if (rows.second > 0) {
        gather_rows(cold.second, from, n, rows.second, to + at.second);
    }
    gather_rows(cold.down, from, n, rows.down, to + at.down);
    if (rows.fc2 > 0) {
        gather_rows(cold.fc2, from, n, rows.fc2, to + at.fc2);
    }
    const std::pair<const std::vector<float> *, size_t> vectors[] = {
        {&cold.first_bias, at.first_bias}, {&cold.second_bias, at.second_bias}, {&cold.down_norm, at.down_norm}};
    for (const auto & [values, offset] : vectors) {
        if (!values->empty()) {
            std::memcpy(to + offset, values->data() + from, n * sizeof(float));
        }
    }
    result_.copied_bytes += at.bytes;
    const cudaStream_t stream = copy_.get();
    cudaError_t code = cudaStreamWaitEvent(stream, is_used_[i_stage].get(), 0);
    if (code == cudaSuccess) {
        code = cudaMemcpyAsync(scratch<void>(at_.stages[i_stage]), to, at.bytes, cudaMemcpyHostToDevice, stream);
    }
    if (code == cudaSuccess) {
        code = cudaEventRecord(is_copied_[i_stage].get(), stream);
    }
    return check(code, where_, "bringing cold rows");
}

status cuda_executor::stream(int i_layer, const ffn_layer & cold, const ffn_options & options, int64_t n_tokens, const float * x,
                             int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y, gpu_result & result) {
    status code = begin(i_layer, options, n_tokens, x, ld_x, r, ld_r);
    if (code.ok() && layer_->n_hot > 0) {
        code = add_neurons(layer_->hot);
    }
    int i_stage = 0;
    for (int64_t from = 0; from < cold.n_ff && code.ok(); from += layer_->n_group, i_stage = 1 - i_stage) {
        const int64_t n = std::min(layer_->n_group, cold.n_ff - from);
        code = bring_group(cold, from, n, i_stage);
        if (code.ok()) {
            code = check(cudaStreamWaitEvent(compute_.get(), is_copied_[i_stage].get(), 0), where_, "waiting for cold rows");
        }
        if (code.ok()) {
            const neuron_rows & rows = layer_->rows;
            code = add_neurons(neurons_at(scratch<uint8_t>(at_.stages[i_stage]), group_layout(rows, n), rows, cold, n));
        }
        if (code.ok()) {
            code = check(cudaEventRecord(is_used_[i_stage].get(), compute_.get()), where_, "recording an event");
        }
    }
    if (code.ok()) {
        code = end();
    }
    if (code.ok()) {
        code = check(cudaEventSynchronize(done_.get()), where_, "computing a block");
    }
    if (!code.ok()) {
        return code;
    }
    for (int64_t t = 0; t < n_tokens; ++t) {
        std::memcpy(y + t * ld_y, host_y() + t * at_.ld, layer_->n_embd * sizeof(float));
    }
    read_totals();
    result = result_;
    return {};
}

status cuda_executor::multiply(int i_layer, ffn_role role, int64_t n_tokens, const float * x, int64_t ld_x, float * out,
                               int64_t ld_out) {
    status result = store_.use();
    if (!result.ok()) {
        return result;
    }
    const std::string where = store_.where(i_layer);
    const device_layer & layer = store_.layer(i_layer);
    const cuda_neurons & hot = layer.hot;
    const bool is_down = role == ffn_role::down;
    const cuda_matrix & matrix = is_down                                                ? hot.down
                                 : role == ffn_role::gate || hot.second.rows == nullptr ? hot.first
                                                                                        : hot.second;
    const int64_t n_in = is_down ? layer.n_hot : layer.n_embd;
    const int64_t n_out = is_down ? layer.n_embd : layer.n_hot;
    const int64_t ld_in = is_down ? layer.n_hot : at_.ld;
    const int64_t ld_sums = is_down ? at_.ld : static_cast<int64_t>(round_up(layer.n_hot, cuda_input_unit));
    const cudaStream_t stream = compute_.get();
    float * device_in = scratch<float>(is_down ? at_.stages[0] : at_.x);
    float * device_out = is_down ? y() : scratch<float>(at_.values);
    std::vector<float> in(step_tokens * ld_in);
    std::vector<float> sums(step_tokens * ld_sums);
    auto next = [&](cudaError_t code) {
        if (result.ok()) {
            result = check(code, where, "multiplying one matrix");
        }
    };
    for (int64_t t = 0; t < n_tokens && result.ok(); t += step_tokens) {
        const int n = static_cast<int>(std::min({step_tokens, max_tokens_, n_tokens - t}));
        copy_rows(n, n_in, x + t * ld_x, ld_x, in.data(), ld_in);
        next(cudaMemcpyAsync(device_in, in.data(), n * ld_in * sizeof(float), cudaMemcpyHostToDevice, stream));
        if (is_down) {
            next(cuda_select_values(n, hot.n, device_in, ld_in, list(), stream));
            next(cuda_add_down(n, hot.n, matrix, list(), false, scratch<float>(at_.sums), device_out, at_.ld, stream));
        } else {
            cuda_input input;
            input.values = device_in;
            input.packed = scratch<cuda_block_x>(at_.packed);
            input.ld = at_.ld;
            next(cuda_pack(n, device_in, at_.ld, scratch<cuda_block_x>(at_.packed), stream));
            next(cuda_dot_rows(n, matrix, hot.n, input, false, device_out, ld_sums, stream));
        }
        next(cudaMemcpyAsync(sums.data(), device_out, n * ld_sums * sizeof(float), cudaMemcpyDeviceToHost, stream));
        next(cudaStreamSynchronize(stream));
        for (int64_t i = 0; i < n && result.ok(); ++i) {
            std::memcpy(out + (t + i) * ld_out, &sums[i * ld_sums], n_out * sizeof(float));
        }
    }
    return result;
}

status cuda_store::make_executor(int64_t max_tokens, std::unique_ptr<gpu_executor> & out) {
    scratch_needs needs;
    needs.max_tokens = max_tokens;
    for (const auto & [i_layer, layer] : layers_) {
        needs.add(layer.shape);
    }
    std::unique_ptr<cuda_executor> made(new cuda_executor(*this, needs));
    const status result = made->create();
    if (result.ok()) {
        out = std::move(made);
    }
    return result;
}

}  // namespace

std::unique_ptr<gpu_store> cuda_store_create(ggml_backend_dev_t device) {
    return std::unique_ptr<gpu_store>(new cuda_store(device));
}

size_t cuda_store::neuron_bytes(const gpu_layer_shape & shape) const { return neuron_rows(shape).bytes(); }

// The predictor's first matrix too.
size_t cuda_store::rows_bytes(const gpu_layer_shape & shape) const {
    return group_layout(neuron_rows(shape), shape.n_hot).bytes +
           shape.rank * neuron_rows::stride_of(shape.fc1_type, shape.n_embd);
}

size_t cuda_store::scratch_bytes(const std::vector<gpu_layer_shape> & shapes, int64_t max_tokens) const {
    scratch_needs needs;
    needs.max_tokens = max_tokens;
    for (const gpu_layer_shape & shape : shapes) {
        needs.add(shape);
    }
    return scratch_layout(needs).bytes;
}

}  // namespace powerinfer
