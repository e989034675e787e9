// Times one device with small graphs on its own backend. Work is queued and waited for once per batch of runs, so that a
// slow way to the device counts only where it is meant to.
#include "gpu-measure.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <random>

namespace powerinfer {

namespace {

constexpr ggml_type row_types[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
                                   GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL};
constexpr int64_t max_rows = 11008;       // per matrix: a 7B model's
constexpr int64_t n_pool_rows = 251;      // different rows, repeated
constexpr int64_t n_hot = 8;              // neurons of the round trip's block: launches count, not reading
constexpr int n_batches = 5;              // of a figure
constexpr int n_copies = 8;               // queued at once
constexpr size_t copy_bytes = size_t(8) << 20;
constexpr int n_most_round_trips = 1000;
constexpr int n_least_round_trips = 20;

// Tensors on the device, and the graph that uses them.
struct device_graph {
    ggml_context_ptr context;
    ggml_backend_buffer_ptr buffer;
    ggml_cgraph * graph = nullptr;

    explicit device_graph(size_t n_tensors) {
        const ggml_init_params parameters = {n_tensors * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true};
        context.reset(ggml_init(parameters));
        graph = ggml_new_graph(context.get());
    }
};

class device_bench {
public:
    device_bench(const device_measure_options & options, device_rates & result) : options_(options), result_(result) {}

    status open(const std::string & name) {
        name_ = name;
        device_ = ggml_backend_dev_by_name(name.c_str());
        if (device_ == nullptr) {
            std::string known;
            for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
                known += (i > 0 ? ", " : "") + std::string(ggml_backend_dev_name(ggml_backend_dev_get(i)));
            }
            return status::error("device: " + name + "; expected one of " + known + "; pass one of them.");
        }
        backend_.reset(ggml_backend_dev_init(device_, nullptr));
        if (backend_ == nullptr) {
            return status::error("device: " + name + " can't be started; expected a device that works; see what its driver says.");
        }
        size_t free = 0;
        size_t total = 0;
        ggml_backend_dev_memory(device_, &free, &total);
        max_bytes_ = total == 0 ? options_.max_bytes : std::min(options_.max_bytes, free / 2);
        return {};
    }

    // Copies of max_bytes_ / 4 at most, to and from the kind of host memory that the device likes best.
    status measure_copies() {
        const size_t n_bytes = std::min(copy_bytes, max_bytes_ / 4 / n_copies) * n_copies;
        if (n_bytes == 0) {
            return no_memory(n_copies);
        }
        device_graph on_device(1);
        ggml_tensor * tensor = ggml_new_tensor_1d(on_device.context.get(), GGML_TYPE_I8, static_cast<int64_t>(n_bytes));
        status done = allocate(on_device);
        if (!done.ok()) {
            return done;
        }
        uint8_t * host = host_memory(n_bytes);
        const size_t part = n_bytes / n_copies;
        const double up_s = seconds_per_run(tensor, [&] {
            for (int i = 0; i < n_copies; ++i) {
                ggml_backend_tensor_set_async(backend_.get(), tensor, host + i * part, i * part, part);
            }
        });
        const double down_s = seconds_per_run(tensor, [&] {
            for (int i = 0; i < n_copies; ++i) {
                ggml_backend_tensor_get_async(backend_.get(), tensor, host + i * part, i * part, part);
            }
        });
        result_.to_device_bytes_s = static_cast<double>(n_bytes) / up_s;
        result_.to_host_bytes_s = static_cast<double>(n_bytes) / down_s;
        return {};
    }

    // What a layer's hot part costs beside reading rows.
    status measure_round_trip() {
        const int64_t n_embd = options_.n_embd;
        device_graph block(16);
        ggml_context * context = block.context.get();
        ggml_tensor * gate = ggml_new_tensor_2d(context, GGML_TYPE_F32, n_embd, n_hot);
        ggml_tensor * up = ggml_new_tensor_2d(context, GGML_TYPE_F32, n_embd, n_hot);
        ggml_tensor * down = ggml_new_tensor_2d(context, GGML_TYPE_F32, n_hot, n_embd);
        ggml_tensor * x = ggml_new_tensor_2d(context, GGML_TYPE_F32, n_embd, 1);
        ggml_tensor * hidden = ggml_mul(context, ggml_relu(context, ggml_mul_mat(context, gate, x)), ggml_mul_mat(context, up, x));
        ggml_tensor * y = ggml_mul_mat(context, down, hidden);
        ggml_build_forward_expand(block.graph, y);
        status done = allocate(block);
        if (!done.ok()) {
            return done;
        }
        const std::vector<uint8_t> rows = random_rows(GGML_TYPE_F32, n_hot);
        for (ggml_tensor * weight : {gate, up, down}) {
            ggml_backend_tensor_set(weight, rows.data(), 0, rows.size());
        }
        const size_t n_bytes = ggml_nbytes(x);
        uint8_t * host = host_memory(2 * n_bytes);
        std::memcpy(host, rows.data(), n_bytes);
        std::vector<double> times;
        bool computed = true;
        const double end = omp_get_wtime() + options_.repeat_s * n_batches;
        for (int i = 0; i < n_most_round_trips && (i < n_least_round_trips || omp_get_wtime() < end); ++i) {
            const double start = omp_get_wtime();
            ggml_backend_tensor_set_async(backend_.get(), x, host, 0, n_bytes);
            computed = compute(block) && computed;
            ggml_backend_tensor_get_async(backend_.get(), y, host + n_bytes, 0, n_bytes);
            ggml_backend_synchronize(backend_.get());
            times.push_back(omp_get_wtime() - start);
        }
        std::sort(times.begin(), times.end());
        result_.round_trip_s = times[times.size() / 2];
        return computed ? status() : failed();
    }

    // Products of matrices with one vector, one after the other. bytes_s: 0 when the device can't.
    status measure_rows(ggml_type type, double & bytes_s) {
        const size_t row_bytes = ggml_row_size(type, options_.n_embd);
        const int64_t n_all = static_cast<int64_t>(max_bytes_ / row_bytes);
        const int64_t n_rows = std::min(max_rows, n_all);
        if (n_rows == 0) {
            return no_memory(row_bytes);
        }
        const int64_t n_matrices = n_all / n_rows;
        const int64_t n_most = static_cast<int64_t>(GGML_DEFAULT_GRAPH_SIZE) / 2;
        device_graph products(2 * n_most + 1);
        ggml_context * context = products.context.get();
        ggml_tensor * x = ggml_new_tensor_2d(context, GGML_TYPE_F32, options_.n_embd, 1);
        std::vector<ggml_tensor *> matrices;
        for (int64_t i = 0; i < std::min(n_matrices, n_most); ++i) {
            matrices.push_back(ggml_new_tensor_2d(context, type, options_.n_embd, n_rows));
            ggml_build_forward_expand(products.graph, ggml_mul_mat(context, matrices.back(), x));
        }
        bytes_s = 0.0;
        if (!ggml_backend_dev_supports_op(device_, ggml_graph_node(products.graph, 0))) {
            return {};
        }
        status done = allocate(products);
        if (!done.ok()) {
            return done;
        }
        const std::vector<uint8_t> pool = random_rows(type, std::min(n_pool_rows, n_rows));
        std::vector<uint8_t> rows(n_rows * row_bytes);
        for (size_t at = 0; at < rows.size(); at += pool.size()) {
            std::memcpy(rows.data() + at, pool.data(), std::min(pool.size(), rows.size() - at));
        }
        for (ggml_tensor * matrix : matrices) {
            ggml_backend_tensor_set(matrix, rows.data(), 0, rows.size());
        }
        ggml_backend_tensor_set(x, random_rows(GGML_TYPE_F32, 1).data(), 0, ggml_nbytes(x));
        bool computed = true;
        const double run_s = seconds_per_run(ggml_graph_node(products.graph, -1), [&] { computed = compute(products) && computed; });
        bytes_s = static_cast<double>(rows.size() * matrices.size()) / run_s;
        return computed ? status() : failed();
    }

private:
    status allocate(device_graph & tensors) const {
        const ggml_backend_buffer_type_t type = ggml_backend_get_default_buffer_type(backend_.get());
        const size_t n_bytes = ggml_backend_alloc_ctx_tensors_from_buft_size(tensors.context.get(), type);
        tensors.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(tensors.context.get(), type));
        return tensors.buffer == nullptr ? no_memory(n_bytes) : status();
    }

    status no_memory(size_t n_bytes) const {
        return status::error("device: " + name_ + " has no " + std::to_string(n_bytes) + " bytes for measuring, " +
                             std::to_string(max_bytes_) + " may be used; expected more free memory; end what uses it.");
    }

    status failed() const {
        return status::error("device: " + name_ + " couldn't compute a graph; expected a device that works; see what its driver says.");
    }

    bool compute(const device_graph & graph) const {
        return ggml_backend_graph_compute_async(backend_.get(), graph.graph) == GGML_STATUS_SUCCESS;
    }

    // Host memory of the device's own kind where it has one, zeroed; valid until the next call.
    uint8_t * host_memory(size_t n_bytes) {
        const ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(device_);
        pinned_.reset(type == nullptr ? nullptr : ggml_backend_buft_alloc_buffer(type, n_bytes));
        result_.pinned = pinned_ != nullptr;
        if (pinned_ == nullptr) {
            plain_.assign(n_bytes, 0);
            return plain_.data();
        }
        ggml_backend_buffer_clear(pinned_.get(), 0);
        return static_cast<uint8_t *>(ggml_backend_buffer_get_base(pinned_.get()));
    }

    // (n_rows, n_embd) rows of the type.
    std::vector<uint8_t> random_rows(ggml_type type, int64_t n_rows) const {
        std::mt19937 random(1);
        std::normal_distribution<float> normal;
        std::vector<float> values(n_rows * options_.n_embd);
        for (float & value : values) {
            value = normal(random);
        }
        std::vector<uint8_t> rows(n_rows * ggml_row_size(type, options_.n_embd));
        ggml_quantize_chunk(type, values.data(), rows.data(), 0, n_rows, options_.n_embd, nullptr);
        return rows;
    }

    // Of the fastest batch, each of about repeat_s: whatever else the machine did slowed the others. The device works off a
    // batch's runs one after the other. Reading `last`, a tensor that the runs use, waits for the end: on an RPC device
    // synchronize alone waits until requests are sent.
    template <typename Run>
    double seconds_per_run(const ggml_tensor * last, const Run & run) const {
        auto seconds_of = [&](int n_runs) {
            const double start = omp_get_wtime();
            for (int i = 0; i < n_runs; ++i) {
                run();
            }
            ggml_backend_synchronize(backend_.get());
            uint8_t value = 0;
            ggml_backend_tensor_get(last, &value, 0, 1);
            return omp_get_wtime() - start;
        };
        seconds_of(1);  // what is made at the first run
        const double once_s = std::max(seconds_of(1), 1e-6);
        const int n_runs = static_cast<int>(std::clamp(options_.repeat_s / once_s, 1.0, 1000.0));
        double best_s = seconds_of(n_runs);
        for (int i = 1; i < n_batches; ++i) {
            best_s = std::min(best_s, seconds_of(n_runs));
        }
        return best_s / n_runs;
    }

    const device_measure_options & options_;
    device_rates & result_;
    std::string name_;
    ggml_backend_dev_t device_ = nullptr;
    ggml_backend_ptr backend_;
    size_t max_bytes_ = 0;  // of the device's memory to use
    ggml_backend_buffer_ptr pinned_;
    std::vector<uint8_t> plain_;
};

status find_types(const device_measure_options & options, std::vector<ggml_type> & types) {
    for (const std::string & name : options.types) {
        const auto found = std::find_if(std::begin(row_types), std::end(row_types), [&](ggml_type type) { return name == ggml_type_name(type); });
        if (found == std::end(row_types)) {
            std::string known;
            for (ggml_type type : row_types) {
                known += (known.empty() ? "" : ", ") + std::string(ggml_type_name(type));
            }
            return status::error("types: " + name + "; expected some of " + known + "; pass those.");
        }
        types.push_back(*found);
    }
    if (types.empty()) {
        types.assign(std::begin(row_types), std::end(row_types));
    }
    for (ggml_type type : types) {
        if (options.n_embd < 1 || options.n_embd % ggml_blck_size(type) != 0) {
            return status::error("rows: " + std::to_string(options.n_embd) + " values; expected whole blocks of " +
                                 std::to_string(ggml_blck_size(type)) + " for " + ggml_type_name(type) + "; change n_embd.");
        }
    }
    return {};
}

}  // namespace

status measure_device(const std::string & name, const device_measure_options & options, device_rates & result) {
    std::vector<ggml_type> types;
    status done = find_types(options, types);
    device_bench bench(options, result);
    if (done.ok()) {
        done = bench.open(name);
    }
    auto step = [&](const std::string & text, auto && measure) {
        if (done.ok() && options.progress && !options.progress(text)) {
            done = status::error("device: measuring " + name + " was stopped.");
        }
        if (!done.ok()) {
            return;
        }
        try {
            done = measure();
        } catch (const std::bad_alloc &) {
            done = status::error("device: no host memory for measuring " + name + "; expected some 200 MiB; close other programs.");
        }
    };
    step("copies", [&] { return bench.measure_copies(); });
    step("round trip", [&] { return bench.measure_round_trip(); });
    for (ggml_type type : types) {
        result.rows.push_back({ggml_type_name(type)});
        step(result.rows.back().type, [&] { return bench.measure_rows(type, result.rows.back().bytes_s); });
        result.bandwidth_bytes_s = std::max(result.bandwidth_bytes_s, result.rows.back().bytes_s);
    }
    if (std::find(types.begin(), types.end(), GGML_TYPE_F32) == types.end()) {
        double bytes_s = 0.0;
        step("bandwidth", [&] { return bench.measure_rows(GGML_TYPE_F32, bytes_s); });
        result.bandwidth_bytes_s = std::max(result.bandwidth_bytes_s, bytes_s);
    }
    return done;
}

}  // namespace powerinfer
