// Python core `powerinfer_py._core`: converts arguments, calls ggml-powerinfer.h, model-load.h, vram-budget.h and what the module
// exports beside it (plan.h, placement.h, kernel-bench.h, upstream-tiles.h, gpu/), translates errors. No logic. Core calls run without the
// GIL, because the core's callbacks take it.
#include "ggml-powerinfer.h"
#include "gpu/gpu-devices.h"
#include "gpu/gpu-measure.h"
#include "kernel-bench.h"
#include "model-load.h"
#include "placement.h"
#include "plan.h"
#include "upstream-tiles.h"
#include "vram-budget.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr size_t error_size = 4096;
constexpr size_t path_size = 4096;
constexpr const char * sparsity_names[] = {"auto", "dense", "exact", "threshold", "predicted"};  // by enum value

constexpr const char * bench_op_names[] = {"dot", "add", "unpack", "ffn"};                    // by enum value
constexpr const char * bench_layout_names[] = {"separate", "bundle", "interleaved"};          // by enum value

// File names inside a text may hold any bytes.
nb::str to_str(const char * text) {
    PyObject * decoded = PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(std::strlen(text)), "replace");
    if (!decoded) {
        throw nb::python_error();
    }
    return nb::steal<nb::str>(decoded);
}

[[noreturn]] void raise_error(const char * class_name, const char * text) {
    nb::object type = nb::module_::import_("powerinfer_py.errors").attr(class_name);
    PyErr_SetObject(type.ptr(), to_str(text).ptr());
    throw nb::python_error();
}

ggml_backend_powerinfer_sparsity to_sparsity(const std::string & name) {
    for (int i = 0; i < static_cast<int>(std::size(sparsity_names)); ++i) {
        if (name == sparsity_names[i]) {
            return static_cast<ggml_backend_powerinfer_sparsity>(i);
        }
    }
    const std::string text = "sparsity: '" + name + "'; expected auto, dense, exact, threshold or predicted; pass one of them.";
    raise_error("OptionError", text.c_str());
}

template <typename T>
using vector_1d = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T>
vector_1d<T> make_vector(size_t n) {
    T * data = new T[n]();
    nb::capsule owner(data, [](void * p) noexcept { delete[] static_cast<T *>(p); });
    return vector_1d<T>(data, {n}, owner);
}

struct upstream_tiles {
    int n_threads;
    explicit upstream_tiles(int n) : n_threads(n) {}
};

// A plan handle, and what the core calls back into.
class plan_object {
public:
    plan_object(nb::object note) : note_(std::move(note)) {}
    plan_object(const plan_object &) = delete;
    plan_object & operator=(const plan_object &) = delete;

    ~plan_object() {
        free_handle();
        if (error_.is_valid()) {
            PyErr_SetObject(error_.type().ptr(), error_.ptr());
            PyErr_WriteUnraisable(nullptr);
        }
    }

    static plan_object * open(const std::filesystem::path & path, const std::optional<std::filesystem::path> & base, bool bare,
                              const std::string & sparsity, bool strict, bool mapped, bool mlock, bool count,
                              const std::optional<std::string> & kernels, nb::object note) {
        auto self = std::make_unique<plan_object>(std::move(note));
        ggml_backend_powerinfer_options options = ggml_backend_powerinfer_default_options();
        options.sparsity = to_sparsity(sparsity);
        options.strict = strict;
        options.mapped = mapped;
        options.mlock = mlock;
        options.count = count;
        options.kernels = kernels ? kernels->c_str() : nullptr;
        if (!self->note_.is_none()) {
            options.note = on_note;
            options.note_user_data = self.get();
        }
        char error[error_size] = "";
        {
            nb::gil_scoped_release no_gil;
            self->handle_ =
                bare ? ggml_backend_powerinfer_plan_open_bare(path.c_str(), &options, error, sizeof(error))
                     : ggml_backend_powerinfer_plan_open(path.c_str(), base ? base->c_str() : nullptr, &options, error, sizeof(error));
        }
        if (!self->handle_) {
            raise_error("PlanError", error);
        }
        return self.release();
    }

    // The handle; raises when it is closed or when a callback failed since the last call.
    ggml_backend_powerinfer_plan_t handle() {
        raise_kept();
        if (!handle_) {
            raise_error("ClosedError", "plan: it was closed; expected an open plan; open it again.");
        }
        return handle_;
    }

    void close() {
        free_handle();
        raise_kept();
    }

    void set_capture(nb::object capture) {
        const ggml_backend_powerinfer_plan_t plan = handle_;
        if (plan) {
            const bool is_on = !capture.is_none();
            capture_ = std::move(capture);
            nb::gil_scoped_release no_gil;
            ggml_backend_powerinfer_plan_set_capture(plan, is_on ? on_capture : nullptr, is_on ? this : nullptr);
        }
        handle();
    }

    void set_trace(nb::object trace) {
        const ggml_backend_powerinfer_plan_t plan = handle_;
        if (plan) {
            const bool is_on = !trace.is_none();
            trace_ = std::move(trace);
            nb::gil_scoped_release no_gil;
            ggml_backend_powerinfer_plan_set_trace(plan, is_on ? on_trace : nullptr, is_on ? this : nullptr);
        }
        handle();
    }

    static int traverse(PyObject * self, visitproc visit, void * arg) {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self)) {
            plan_object * plan = nb::inst_ptr<plan_object>(self);
            Py_VISIT(plan->note_.ptr());
            Py_VISIT(plan->capture_.ptr());
            Py_VISIT(plan->trace_.ptr());
            Py_VISIT(plan->error_.ptr());
        }
        return 0;
    }

    static int clear(PyObject * self) {
        plan_object * plan = nb::inst_ptr<plan_object>(self);
        plan->free_handle();
        plan->note_ = nb::none();
        plan->capture_ = nb::none();
        plan->trace_ = nb::none();
        plan->error_.reset();
        return 0;
    }

    // Raises what a callback raised since the last call.
    void raise_kept() {
        if (error_.is_valid()) {
            nb::object error = std::move(error_);
            error_.reset();
            PyErr_SetObject(error.type().ptr(), error.ptr());
            throw nb::python_error();
        }
    }

    // llama_model_params.progress_callback. Signals and exceptions end the load.
    struct progress_call {
        plan_object & plan;
        nb::object report;
    };
    static bool on_progress(float share, void * user_data) {
        nb::gil_scoped_acquire gil;
        auto * call = static_cast<progress_call *>(user_data);
        try {
            if (PyErr_CheckSignals() != 0) {
                throw nb::python_error();
            }
            if (!call->report.is_none()) {
                call->report(share);
            }
            return true;
        } catch (const nb::python_error & error) {
            call->plan.keep(error);
            return false;
        }
    }

private:
    void free_handle() {
        const ggml_backend_powerinfer_plan_t plan = handle_;
        handle_ = nullptr;
        if (plan) {
            nb::gil_scoped_release no_gil;
            ggml_backend_powerinfer_plan_free(plan);  // ends capture and trace
        }
        capture_ = nb::none();
        trace_ = nb::none();
    }

    void keep(const nb::python_error & error) {
        if (!error_.is_valid()) {
            error_ = nb::borrow(error.value());
        }
    }

    static void on_note(const char * text, void * user_data) {
        nb::gil_scoped_acquire gil;
        auto * self = static_cast<plan_object *>(user_data);
        try {
            self->note_(to_str(text));
        } catch (const nb::python_error & error) {
            self->keep(error);
        }
    }

    static void on_capture(int i_layer, int64_t n_tokens, int64_t n_embd, const float * x, void * user_data) {
        nb::gil_scoped_acquire gil;
        auto * self = static_cast<plan_object *>(user_data);
        if (self->capture_.is_none() || self->error_.is_valid()) {
            return;
        }
        const size_t n = static_cast<size_t>(n_tokens * n_embd);
        float * data = new float[std::max<size_t>(n, 1)];
        std::copy_n(x, n, data);
        try {
            nb::capsule owner(data, [](void * p) noexcept { delete[] static_cast<float *>(p); });
            self->capture_(i_layer, nb::ndarray<nb::numpy, float, nb::ndim<2>>(
                                        data, {static_cast<size_t>(n_tokens), static_cast<size_t>(n_embd)}, owner));
        } catch (const nb::python_error & error) {
            self->keep(error);
        }
    }

    static void on_trace(const ggml_backend_powerinfer_block_times * times, void * user_data) {
        nb::gil_scoped_acquire gil;
        auto * self = static_cast<plan_object *>(user_data);
        if (self->trace_.is_none() || self->error_.is_valid()) {
            return;
        }
        try {
            nb::dict item;
            item["i_layer"] = times->i_layer;
            item["n_tokens"] = times->n_tokens;
            item["begin_s"] = times->begin_s;
            item["end_s"] = times->end_s;
            item["cpu_begin_s"] = times->cpu_begin_s;
            item["cpu_end_s"] = times->cpu_end_s;
            item["gpu_begin_s"] = times->gpu_begin_s;
            item["gpu_end_s"] = times->gpu_end_s;
            self->trace_(item);
        } catch (const nb::python_error & error) {
            self->keep(error);
        }
    }

    ggml_backend_powerinfer_plan_t handle_ = nullptr;
    nb::object note_;
    nb::object capture_ = nb::none();
    nb::object trace_ = nb::none();
    nb::object error_;  // the first exception of a callback, until the next call raises it
};

PyType_Slot plan_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void *>(plan_object::traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(plan_object::clear)},
    {0, nullptr},
};

uintptr_t plan_load_model(plan_object & self, uintptr_t params_address, nb::object progress) {
    const ggml_backend_powerinfer_plan_t plan = self.handle();
    llama_model_params params = *reinterpret_cast<const llama_model_params *>(params_address);
    plan_object::progress_call call{self, std::move(progress)};
    params.progress_callback = plan_object::on_progress;
    params.progress_callback_user_data = &call;
    llama_model * model = nullptr;
    std::string error;
    {
        nb::gil_scoped_release no_gil;
        error = powerinfer::model_load(plan, params, model).text();
    }
    if (!error.empty()) {
        self.raise_kept();
        raise_error("PlanError", error.c_str());
    }
    return reinterpret_cast<uintptr_t>(model);
}

void plan_check(plan_object & self) {
    const ggml_backend_powerinfer_plan_t plan = self.handle();
    char error[error_size] = "";
    bool ok;
    {
        nb::gil_scoped_release no_gil;
        ok = ggml_backend_powerinfer_plan_check(plan, error, sizeof(error));
    }
    if (!ok) {
        raise_error("PlanError", error);
    }
}

void plan_set_sparsity(plan_object & self, const std::string & name) {
    const ggml_backend_powerinfer_plan_t plan = self.handle();
    const ggml_backend_powerinfer_sparsity sparsity = to_sparsity(name);
    char error[error_size] = "";
    bool ok;
    {
        nb::gil_scoped_release no_gil;
        ok = ggml_backend_powerinfer_plan_set_sparsity(plan, sparsity, error, sizeof(error));
    }
    if (!ok) {
        raise_error("PlanError", error);
    }
}

[[noreturn]] void raise_layer(int i_layer, int n_layer) {
    const std::string text = "i_layer: " + std::to_string(i_layer) + "; expected 0 to " + std::to_string(n_layer - 1) +
                             ", a layer that the plan covers; see layers().";
    throw nb::index_error(text.c_str());
}

void plan_set_thresholds(plan_object & self, int i_layer, float threshold, float product_threshold) {
    const ggml_backend_powerinfer_plan_t plan = self.handle();
    bool ok;
    {
        nb::gil_scoped_release no_gil;
        ok = ggml_backend_powerinfer_plan_set_thresholds(plan, i_layer, threshold, product_threshold);
    }
    if (!ok) {
        raise_layer(i_layer, ggml_backend_powerinfer_plan_n_layer(plan));
    }
}

// What set_split and split_bytes are given. Keeps the arrays that `split` points to.
struct split_arguments {
    std::vector<ggml_backend_dev_t> devices;
    std::vector<int64_t> n_hot;
    std::vector<int32_t> i_device;
    ggml_backend_powerinfer_split split{};

    split_arguments(ggml_backend_powerinfer_plan_t plan, const std::vector<std::string> & names, const std::vector<int64_t> & hot,
                    const std::optional<std::vector<int32_t>> & device_of, int64_t max_tokens, int64_t stream_tokens)
        : n_hot(hot), i_device(device_of.value_or(std::vector<int32_t>())) {
        const size_t n_layer = static_cast<size_t>(ggml_backend_powerinfer_plan_n_layer(plan));
        const auto check_length = [&](const char * name, size_t n) {
            if (n != n_layer) {
                const std::string text = std::string(name) + ": " + std::to_string(n) + " values; expected one per layer, " +
                                         std::to_string(n_layer) + "; pass as many.";
                raise_error("OptionError", text.c_str());
            }
        };
        check_length("n_hot", n_hot.size());
        check_length("i_device", device_of ? i_device.size() : n_layer);
        for (const std::string & name : names) {
            devices.push_back(ggml_backend_dev_by_name(name.c_str()));
            if (devices.back() == nullptr) {
                const std::string text = "devices: no device " + name + "; expected one that ggml lists; see devices().";
                raise_error("OptionError", text.c_str());
            }
        }
        split.n_devices = static_cast<int>(devices.size());
        split.devices = devices.data();
        split.n_hot = n_hot.data();
        split.i_device = device_of ? i_device.data() : nullptr;
        split.max_tokens = max_tokens;
        split.stream_tokens = stream_tokens;
    }
};

void plan_set_split(plan_object & self, const std::vector<std::string> & devices, const std::vector<int64_t> & n_hot,
                    const std::optional<std::vector<int32_t>> & i_device, int64_t max_tokens, int64_t stream_tokens) {
    const ggml_backend_powerinfer_plan_t plan = self.handle();
    const split_arguments arguments(plan, devices, n_hot, i_device, max_tokens, stream_tokens);
    char error[error_size] = "";
    if (!ggml_backend_powerinfer_plan_set_split(plan, &arguments.split, error, sizeof(error))) {
        raise_error("PlanError", error);
    }
}

std::vector<std::pair<uint64_t, uint64_t>> plan_split_bytes(
    plan_object & self, const std::vector<std::string> & devices, const std::vector<int64_t> & n_hot,
    const std::optional<std::vector<int32_t>> & i_device, int64_t max_tokens, int64_t stream_tokens) {
    const ggml_backend_powerinfer_plan_t plan = self.handle();
    const split_arguments arguments(plan, devices, n_hot, i_device, max_tokens, stream_tokens);
    std::vector<uint64_t> rows(devices.size());
    std::vector<uint64_t> scratch(devices.size());
    char error[error_size] = "";
    if (!ggml_backend_powerinfer_plan_split_bytes(plan, &arguments.split, rows.data(), scratch.data(), error, sizeof(error))) {
        raise_error("PlanError", error);
    }
    std::vector<std::pair<uint64_t, uint64_t>> out;
    for (size_t i = 0; i < devices.size(); ++i) {
        out.emplace_back(rows[i], scratch[i]);
    }
    return out;
}

nb::dict plan_stats(plan_object & self) {
    const ggml_backend_powerinfer_plan_t plan = self.handle();
    ggml_backend_powerinfer_stats stats{};
    {
        nb::gil_scoped_release no_gil;
        ggml_backend_powerinfer_plan_stats(plan, &stats);
    }
    nb::dict out;
    out["n_tokens"] = stats.n_tokens;
    out["n_blocks_whole"] = stats.n_blocks_whole;
    out["n_blocks_by_op"] = stats.n_blocks_by_op;
    out["n_slow_rows"] = stats.n_slow_rows;
    out["n_neurons"] = stats.n_neurons;
    out["n_candidates"] = stats.n_candidates;
    out["n_active"] = stats.n_active;
    out["read_bytes"] = stats.read_bytes;
    out["dense_bytes"] = stats.dense_bytes;
    out["predictor_us"] = stats.predictor_us;
    out["gate_us"] = stats.gate_us;
    out["up_down_us"] = stats.up_down_us;
    out["total_us"] = stats.total_us;
    out["n_gpu_neurons"] = stats.n_gpu_neurons;
    out["cpu_us"] = stats.cpu_us;
    out["gpu_us"] = stats.gpu_us;
    out["wait_us"] = stats.wait_us;
    out["copy_us"] = stats.copy_us;
    out["copied_bytes"] = stats.copied_bytes;
    out["n_gpu_active"] = stats.n_gpu_active;
    out["n_cpu_active"] = stats.n_cpu_active;
    out["gpu_read_bytes"] = stats.gpu_read_bytes;
    out["overlap_sum"] = stats.overlap_sum;
    out["n_overlaps"] = stats.n_overlaps;
    return out;
}

void plan_reset_stats(plan_object & self) {
    const ggml_backend_powerinfer_plan_t plan = self.handle();
    nb::gil_scoped_release no_gil;
    ggml_backend_powerinfer_plan_reset_stats(plan);
}

nb::list plan_layers(plan_object & self) {
    const ggml_backend_powerinfer_plan_t plan = self.handle();
    nb::list out;
    const int n_layer = ggml_backend_powerinfer_plan_n_layer(plan);
    for (int i_layer = 0; i_layer < n_layer; ++i_layer) {
        ggml_backend_powerinfer_layer layer{};
        bool ok;
        {
            nb::gil_scoped_release no_gil;
            ok = ggml_backend_powerinfer_plan_layer(plan, i_layer, &layer);
        }
        if (!ok) {
            raise_layer(i_layer, n_layer);
        }
        nb::dict item;
        item["n_ff"] = layer.n_ff;
        item["sparsity"] = sparsity_names[layer.sparsity];
        item["gate_type"] = layer.gate_type;
        item["up_type"] = layer.up_type;
        item["down_type"] = layer.down_type;
        item["n_hot"] = layer.n_hot;
        item["device"] = layer.device;
        item["n_tokens"] = layer.n_tokens;
        item["n_candidates"] = layer.n_candidates;
        item["n_active"] = layer.n_active;
        out.append(item);
    }
    return out;
}

nb::dict plan_counts(plan_object & self, int i_layer) {
    const ggml_backend_powerinfer_plan_t plan = self.handle();
    ggml_backend_powerinfer_layer layer{};
    if (!ggml_backend_powerinfer_plan_layer(plan, i_layer, &layer)) {
        raise_layer(i_layer, ggml_backend_powerinfer_plan_n_layer(plan));
    }
    const size_t n_ff = static_cast<size_t>(layer.n_ff);
    auto active = make_vector<uint64_t>(n_ff);
    auto gate_histogram = make_vector<uint64_t>(GGML_POWERINFER_N_BINS);
    auto product_histogram = make_vector<uint64_t>(GGML_POWERINFER_N_BINS);
    auto gate_abs_sum = make_vector<double>(n_ff);
    ggml_backend_powerinfer_counts counts{};
    counts.active = active.data();
    counts.gate_histogram = gate_histogram.data();
    counts.product_histogram = product_histogram.data();
    counts.gate_abs_sum = gate_abs_sum.data();
    bool ok;
    {
        nb::gil_scoped_release no_gil;
        ok = ggml_backend_powerinfer_plan_counts(plan, i_layer, &counts);
    }
    if (!ok) {
        raise_error("PlanError", ("layer " + std::to_string(i_layer) +
                                  ": there are no counts; expected a covered layer of a plan opened with count=True; "
                                  "see layers().").c_str());
    }
    nb::dict out;
    out["n_tokens"] = counts.n_tokens;
    out["active"] = active;
    out["gate_histogram"] = gate_histogram;
    out["product_histogram"] = product_histogram;
    out["gate_abs_sum"] = gate_abs_sum;
    return out;
}

void plan_reset_counts(plan_object & self) {
    const ggml_backend_powerinfer_plan_t plan = self.handle();
    nb::gil_scoped_release no_gil;
    ggml_backend_powerinfer_plan_reset_counts(plan);
}

nb::tuple inspect_path(const std::filesystem::path & path) {
    char sidecar[path_size] = "";
    char error[error_size] = "";
    int kind;
    {
        nb::gil_scoped_release no_gil;
        kind = ggml_backend_powerinfer_inspect_path(path.c_str(), sidecar, sizeof(sidecar), error, sizeof(error));
    }
    if (kind < 0) {
        raise_error("FormatError", error);
    }
    nb::object found = nb::none();
    if (sidecar[0]) {
        found = nb::steal(PyUnicode_DecodeFSDefault(sidecar));
        if (!found.is_valid()) {
            throw nb::python_error();
        }
    }
    return nb::make_tuple(kind == 1 ? "extended" : "plain", found);
}

nb::object find_placement(const std::filesystem::path & path, const std::optional<std::filesystem::path> & base,
                          const std::vector<uint64_t> & hot_bytes) {
    powerinfer::plan plan;
    const powerinfer::saved_placement * found = nullptr;
    std::string error;
    {
        nb::gil_scoped_release no_gil;
        error = powerinfer::plan_read(path, base ? base->string() : "", plan).text();
        if (error.empty()) {
            found = powerinfer::plan_find_placement(plan, hot_bytes);
        }
    }
    if (!error.empty()) {
        raise_error("PlanError", error.c_str());
    }
    return found ? nb::int_(found - plan.placements.data()) : nb::object(nb::none());
}

nb::tuple placement_neuron_cost(double first_s, double second_s, double down_s, double predictor_s, double candidate_ratio,
                                bool reads_all) {
    const powerinfer::neuron_cost cost =
        powerinfer::placement_neuron_cost({first_s, second_s, down_s, predictor_s}, candidate_ratio, reads_all);
    return nb::make_tuple(cost.neuron_s, cost.active_s);
}

template <typename T>
using input_1d = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using input_pairs = nb::ndarray<const double, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;

nb::dict place_greedy(input_1d<int64_t> n_ff, input_1d<float> frequency, input_1d<uint64_t> neuron_bytes, input_pairs cpu_s,
                      input_pairs gpu_s, input_1d<double> sync_s, input_1d<int64_t> min_hot, input_1d<int32_t> i_device,
                      input_1d<uint64_t> capacity_bytes) {
    const size_t n_layer = n_ff.shape(0);
    for (const size_t n : {neuron_bytes.shape(0), cpu_s.shape(0), gpu_s.shape(0), sync_s.shape(0), min_hot.shape(0), i_device.shape(0)}) {
        if (n != n_layer) {
            raise_error("OptionError", "placement: arrays of different lengths; expected one value per layer in each; pass that.");
        }
    }
    powerinfer::placement_problem problem;
    problem.capacity_bytes.assign(capacity_bytes.data(), capacity_bytes.data() + capacity_bytes.shape(0));
    problem.layers.resize(n_layer);
    size_t n_frequencies = 0;
    for (size_t i = 0; i < n_layer; ++i) {
        if (n_ff(i) < 0 || static_cast<size_t>(n_ff(i)) > frequency.shape(0) - n_frequencies) {
            raise_error("OptionError", "placement: too few frequencies; expected one per neuron; pass that.");
        }
        problem.layers[i] = {n_ff(i), frequency.data() + n_frequencies, 1.0, neuron_bytes(i), {cpu_s(i, 0), cpu_s(i, 1)},
                             {gpu_s(i, 0), gpu_s(i, 1)}, sync_s(i), min_hot(i), i_device(i)};
        n_frequencies += static_cast<size_t>(n_ff(i));
    }
    powerinfer::placement_result result;
    std::string error;
    {
        nb::gil_scoped_release no_gil;
        error = powerinfer::place_greedy(problem, result).text();
    }
    if (!error.empty()) {
        raise_error("OptionError", error.c_str());
    }
    vector_1d<int64_t> n_hot = make_vector<int64_t>(n_layer);
    std::copy(result.n_hot.begin(), result.n_hot.end(), n_hot.data());
    nb::dict out;
    out["n_hot"] = n_hot;
    out["token_s"] = result.token_s;
    out["saved_s"] = result.saved_s;
    out["gap"] = result.gap;
    return out;
}

powerinfer::budget_decision * plan_budget(plan_object * self, const std::string & path, uintptr_t model_params, uintptr_t context_params,
                                          const std::string & budget, const std::string & device, bool has_n_gpu_layers,
                                          bool reset_index, bool disable_index, bool require_split, bool strict) {
    const ggml_backend_powerinfer_plan_t plan = self ? self->handle() : nullptr;
    powerinfer::budget_request request;
    request.budget = budget;
    request.has_n_gpu_layers = has_n_gpu_layers;
    request.reset_index = reset_index;
    request.disable_index = disable_index;
    request.require_split = require_split;
    request.strict = strict;
    std::vector<powerinfer::budget_amount> amounts;
    std::string error;
    if (!budget.empty()) {
        error = powerinfer::budget_parse(budget, amounts).text();
    }
    if (error.empty() && !device.empty()) {
        error = powerinfer::find_devices(device, request).text();
    }
    if (!error.empty()) {
        raise_error("OptionError", error.c_str());
    }
    llama_model_params params = *reinterpret_cast<const llama_model_params *>(model_params);
    params.progress_callback = [](float, void *) {  // an error that a signal raised stays set on this thread
        nb::gil_scoped_acquire gil;
        return PyErr_CheckSignals() == 0;
    };
    const llama_context_params context = *reinterpret_cast<const llama_context_params *>(context_params);
    auto decision = std::make_unique<powerinfer::budget_decision>();
    {
        nb::gil_scoped_release no_gil;
        error = powerinfer::budget_decide(plan, path, params, [&](const llama_model *) { return context; }, request, *decision).text();
    }
    if (PyErr_Occurred()) {
        throw nb::python_error();
    }
    if (!error.empty()) {
        raise_error("BudgetError", error.c_str());
    }
    return decision.release();
}

void budget_apply(powerinfer::budget_decision & self, plan_object * plan, uintptr_t model_params) {
    const ggml_backend_powerinfer_plan_t handle = plan ? plan->handle() : nullptr;
    const std::string error = self.apply(handle, *reinterpret_cast<llama_model_params *>(model_params)).text();
    if (!error.empty()) {
        raise_error("BudgetError", error.c_str());
    }
}

nb::dict memory_use(const powerinfer::memory_use & use) {
    nb::dict out;
    out["name"] = use.name;
    out["budget_bytes"] = use.budget_bytes;
    out["weights_bytes"] = use.weights_bytes;
    out["kv_bytes"] = use.kv_bytes;
    out["compute_bytes"] = use.compute_bytes;
    out["scratch_bytes"] = use.scratch_bytes;
    out["predictor_bytes"] = use.predictor_bytes;
    out["ffn_bytes"] = use.ffn_bytes;
    return out;
}

nb::list budget_gpus(const powerinfer::budget_decision & self) {
    nb::list out;
    for (const powerinfer::memory_use & use : self.gpus) {
        out.append(memory_use(use));
    }
    return out;
}

nb::list kernel_sets() {
    nb::list out;
    for (const powerinfer::kernel_set_info & info : powerinfer::kernel_sets()) {
        nb::list row_types;
        for (const std::string & type : info.row_types) {
            row_types.append(type);
        }
        nb::dict item;
        item["name"] = info.name;
        item["is_supported"] = info.is_supported;
        item["row_types"] = row_types;
        out.append(item);
    }
    return out;
}

double read_bandwidth(int n_threads, size_t n_bytes) {
    double bytes_per_s = 0.0;
    std::string error;
    {
        nb::gil_scoped_release no_gil;
        error = powerinfer::read_bandwidth(n_threads, n_bytes, bytes_per_s).text();
    }
    if (!error.empty()) {
        raise_error("OptionError", error.c_str());
    }
    return bytes_per_s;
}

powerinfer::kernel_bench * kernel_bench_create(const std::string & row_type, int64_t n, int64_t n_rows, size_t working_set_bytes) {
    auto self = std::make_unique<powerinfer::kernel_bench>();
    std::string error;
    {
        nb::gil_scoped_release no_gil;
        error = self->create(row_type, n, n_rows, working_set_bytes).text();
    }
    if (!error.empty()) {
        raise_error("OptionError", error.c_str());
    }
    return self.release();
}

template <size_t N>
int index_of_name(const char * const (&names)[N], const std::string & name, const char * option) {
    std::string expected;
    for (size_t i = 0; i < N; ++i) {
        if (name == names[i]) {
            return static_cast<int>(i);
        }
        expected += (i ? ", " : "") + std::string(names[i]);
    }
    raise_error("OptionError", (std::string(option) + ": '" + name + "'; expected one of " + expected + "; pass one of them.").c_str());
}

nb::dict kernel_bench_run(powerinfer::kernel_bench & self, const std::string & kernels, const std::string & op,
                          const std::string & layout, double gate_density, double density, bool in_cache, int n_threads,
                          int n_repeats, double repeat_s) {
    powerinfer::bench_options options;
    options.kernels = kernels;
    options.op = static_cast<powerinfer::bench_op>(index_of_name(bench_op_names, op, "op"));
    options.layout = static_cast<powerinfer::bench_layout>(index_of_name(bench_layout_names, layout, "layout"));
    options.gate_density = gate_density;
    options.density = density;
    options.in_cache = in_cache;
    options.n_threads = n_threads;
    options.n_repeats = n_repeats;
    options.repeat_s = repeat_s;
    powerinfer::bench_result result;
    std::string error;
    {
        nb::gil_scoped_release no_gil;
        error = self.run(options, result).text();
    }
    if (!error.empty()) {
        raise_error("OptionError", error.c_str());
    }
    nb::dict out;
    out["pass_s"] = result.pass_s;
    out["pass_s_min"] = result.pass_s_min;
    out["pass_s_max"] = result.pass_s_max;
    out["pass_rows"] = result.pass_rows;
    out["pass_bytes"] = result.pass_bytes;
    out["core_hz"] = result.core_hz;
    return out;
}

nb::list devices() {
    std::vector<powerinfer::device_info> found;
    {
        nb::gil_scoped_release no_gil;
        found = powerinfer::list_devices();
    }
    nb::list out;
    for (const powerinfer::device_info & info : found) {
        nb::dict item;
        item["name"] = to_str(info.name.c_str());
        item["description"] = to_str(info.description.c_str());
        item["type"] = info.type;
        item["memory_free"] = info.memory_free;
        item["memory_total"] = info.memory_total;
        item["async"] = info.async;
        out.append(item);
    }
    return out;
}

std::vector<std::string> add_rpc_server(const std::string & address) {
    std::vector<std::string> names;
    std::string error;
    {
        nb::gil_scoped_release no_gil;
        error = powerinfer::add_rpc_server(address, names).text();
    }
    if (!error.empty()) {
        raise_error("OptionError", error.c_str());
    }
    return names;
}

nb::dict measure_device(const std::string & name, const std::vector<std::string> & types, int64_t n_embd, size_t max_bytes,
                        double repeat_s, nb::object progress) {
    powerinfer::device_measure_options options;
    options.types = types;
    options.n_embd = n_embd;
    options.max_bytes = max_bytes;
    options.repeat_s = repeat_s;
    bool failed = false;  // a Python error is set
    options.progress = [&](const std::string & text) {
        nb::gil_scoped_acquire gil;
        try {
            if (!progress.is_none()) {
                progress(text);
            }
            failed = PyErr_CheckSignals() != 0;
        } catch (nb::python_error & error) {
            error.restore();
            failed = true;
        }
        return !failed;
    };
    powerinfer::device_rates rates;
    std::string error;
    {
        nb::gil_scoped_release no_gil;
        error = powerinfer::measure_device(name, options, rates).text();
    }
    if (failed) {
        throw nb::python_error();
    }
    if (!error.empty()) {
        raise_error("OptionError", error.c_str());
    }
    nb::dict rows;
    for (const powerinfer::device_row_rate & rate : rates.rows) {
        rows[rate.type.c_str()] = rate.bytes_s;
    }
    nb::dict out;
    out["bandwidth_bytes_s"] = rates.bandwidth_bytes_s;
    out["to_device_bytes_s"] = rates.to_device_bytes_s;
    out["to_host_bytes_s"] = rates.to_host_bytes_s;
    out["round_trip_s"] = rates.round_trip_s;
    out["pinned"] = rates.pinned;
    out["row_bytes_s"] = rows;
    return out;
}

}  // namespace

NB_MODULE(_core, m) {
    m.doc() = "The compiled core: plans, and models loaded with them. Import powerinfer_py instead of this module.";
    nb::set_leak_warnings(false);  // a model that lives until the interpreter ends is no bug
    m.attr("N_BINS") = GGML_POWERINFER_N_BINS;

    nb::class_<plan_object>(m, "Plan", nb::type_slots(plan_slots),
                            "An opened plan: the sparse part of one model, its options and its statistics.")
        .def_static(
            "open",
            [](const std::filesystem::path & path, const std::optional<std::filesystem::path> & base, const std::string & sparsity,
               bool strict, bool mapped, bool mlock, bool count, const std::optional<std::string> & kernels, nb::object note) {
                return plan_object::open(path, base, false, sparsity, strict, mapped, mlock, count, kernels, std::move(note));
            },
            "path"_a, "base"_a = nb::none(), nb::kw_only(), "sparsity"_a = "auto", "strict"_a = false, "mapped"_a = false,
            "mlock"_a = false, "count"_a = false, "kernels"_a = nb::none(), "note"_a = nb::none(),
            R"(Open an extended GGUF.

Args:
    path: the extended GGUF, sidecar or embedded.
    base: the stock GGUF; None: where the file says.
    sparsity: auto, dense, exact, threshold or predicted.
    strict: a fallback is an error instead of a note.
    mapped: weight rows stay in the mapped file instead of a copy.
    mlock: lock the plan's buffers in memory.
    count: count activations and histograms (see counts).
    kernels: kernel set by name; None: POWERINFER_KERNELS, else the best.
    note: callable(text: str), called once per note, from any thread; None: notes go to stderr.

Returns:
    The plan.

Raises:
    PlanError: the file can't be used; the text says why.
    OptionError: unknown sparsity.)")
        .def_static(
            "open_bare",
            [](const std::filesystem::path & path, const std::string & sparsity, bool strict, bool mapped, bool mlock, bool count,
               const std::optional<std::string> & kernels, nb::object note) {
                return plan_object::open(path, std::nullopt, true, sparsity, strict, mapped, mlock, count, kernels, std::move(note));
            },
            "path"_a, nb::kw_only(), "sparsity"_a = "auto", "strict"_a = false, "mapped"_a = false, "mlock"_a = false,
            "count"_a = false, "kernels"_a = nb::none(), "note"_a = nb::none(),
            R"(Make a plan for a stock GGUF that has none: its own neuron order, the activation of its graph.

Args:
    path: the stock GGUF.
    sparsity, strict, mapped, mlock, count, kernels, note: as in open.

Returns:
    The plan.

Raises:
    PlanError: the file can't be used; the text says why.)")
        .def("load_model", &plan_load_model, "params_address"_a, "progress"_a = nb::none(),
             R"(Load the plan's base model, its FFN in the plan's buffers. Ctrl-C ends it.

Args:
    params_address: address of a struct llama_model_params; its progress callback isn't used.
    progress: called as progress(share) before each tensor and at the end, 0 <= share <= 1; what it raises ends the load.

Returns:
    Address of the llama_model. The caller frees it with llama_model_free.

Raises:
    PlanError: the model can't be loaded, or its weights aren't the plan's.)")
        .def("check", &plan_check, R"(Check a model that was loaded into the plan's buffers.

Raises:
    PlanError: its weights aren't the plan's, or no weight was claimed.)")
        .def("set_sparsity", &plan_set_sparsity, "sparsity"_a, R"(Change the mode between two decodes.

Args:
    sparsity: auto, dense, exact, threshold or predicted.

Raises:
    PlanError: the plan can't run it (strict).
    OptionError: unknown mode.)")
        .def("set_thresholds", &plan_set_thresholds, "i_layer"_a, "threshold"_a, "product_threshold"_a,
             R"(Change one layer's thresholds between two decodes.

Args:
    i_layer: layer, 0 to n_layer - 1.
    threshold: on |act(gate)|; 0: exact zeros only.
    product_threshold: on |act(gate) * up| * norm(down row); 0: off.

Raises:
    IndexError: i_layer out of range.)")
        .def("set_split", &plan_set_split, "devices"_a, "n_hot"_a, nb::kw_only(), "i_device"_a = nb::none(), "max_tokens"_a = 512,
             "stream_tokens"_a = 0,
             R"(Say where hot neurons go, before the model is loaded.

Args:
    devices: names of GPU devices, 1 to 16; see devices().
    n_hot: (n_layer) neurons of each layer on its device, hot first; 0 for layers not covered.
    i_device: (n_layer) index into devices; None: all 0.
    max_tokens: tokens that the devices' scratch memory is made for (n_ubatch).
    stream_tokens: batches of so many tokens and more: cold rows are brought to the device and computed there; 0: when the device asks
        for it (upstream's op_offload); -1: never.

Raises:
    PlanError: it doesn't fit the plan.
    OptionError: no such device, or not one value per layer.)")
        .def("split_bytes", &plan_split_bytes, "devices"_a, "n_hot"_a, nb::kw_only(), "i_device"_a = nb::none(), "max_tokens"_a = 512,
             "stream_tokens"_a = 0,
             R"(Device memory that a split takes.

Args:
    devices, n_hot, i_device, max_tokens, stream_tokens: as in set_split.

Returns:
    Per device: bytes of hot rows, bytes of scratch in every context.

Raises:
    PlanError, OptionError: as set_split.)")
        .def(
            "neuron_bytes",
            [](plan_object & self, int i_layer) { return ggml_backend_powerinfer_plan_neuron_bytes(self.handle(), nullptr, i_layer); }, "i_layer"_a,
            "Bytes of one hot neuron of a layer on a device that ggml's operators compute on; 0: not covered.")
        .def(
            "device_bytes",
            [](plan_object & self, int i_device) { return ggml_backend_powerinfer_plan_device_bytes(self.handle(), i_device); },
            "i_device"_a, "Memory in bytes of hot rows on the split's device number i_device.")
        .def("set_trace", &plan_object::set_trace, "trace"_a.none(),
             nb::sig("def set_trace(self, trace: typing.Callable[[dict[str, typing.Any]], None] | None) -> None"),
             R"(Learn when the parts of each block ran.

Args:
    trace: callable, called on the thread that computes after every whole block, with i_layer, n_tokens, begin_s, end_s, cpu_begin_s,
        cpu_end_s, gpu_begin_s, gpu_end_s: seconds of the monotonic clock; begin == end == 0 for a part that there wasn't. None
        stops it. An exception in it is raised by the next call of the plan; until then it isn't called again.)")
        .def("stats", &plan_stats, nb::sig("def stats(self) -> dict[str, int | float]"),
             R"(Sums since the last reset.

Returns:
    n_tokens (token x layer evaluations), n_blocks_whole, n_blocks_by_op, n_slow_rows, n_neurons, n_candidates, n_active,
    read_bytes, dense_bytes, predictor_us, gate_us, up_down_us, total_us, n_overlaps; of blocks with a split: n_gpu_neurons
    (neurons that devices computed, summed over tokens), cpu_us, gpu_us, wait_us (the CPU waited for a device), copy_us,
    copied_bytes (between host and devices), gpu_read_bytes, and while there is a trace n_gpu_active and n_cpu_active (active neurons
    on devices and on the CPU): int; overlap_sum: float.)")
        .def("reset_stats", &plan_reset_stats, "Set all sums of stats and layers to 0.")
        .def("layers", &plan_layers, nb::sig("def layers(self) -> list[dict[str, int | str]]"),
             R"(What each layer runs.

Returns:
    One item per layer: n_ff (0: not covered), sparsity (as it runs), gate_type, up_type, down_type (ggml type names
    of the rows as stored, "" when absent), n_hot (neurons on a device), device (its name, or ""), n_tokens, n_candidates,
    n_active.)")
        .def("counts", &plan_counts, "i_layer"_a, nb::sig("def counts(self, i_layer: int) -> dict[str, typing.Any]"),
             R"(Activations of one layer since the last reset, in the base model's neuron order.

Args:
    i_layer: layer, 0 to n_layer - 1.

Returns:
    n_tokens: int. active: (n_ff) uint64, tokens in which the neuron was active. gate_histogram: (N_BINS) uint64 of
    |act(gate)|. product_histogram: (N_BINS) uint64 of |act(gate) * up| * norm(down row). gate_abs_sum: (n_ff) float64,
    sum of |act(gate)|. Bin i holds values v with floor(8 * (log2 v + 24)) == i; bin 0 holds 0 too.

Raises:
    IndexError: i_layer out of range.
    PlanError: the plan doesn't count, or doesn't cover the layer.)")
        .def("reset_counts", &plan_reset_counts, "Set all counts to 0.")
        .def("set_capture", &plan_object::set_capture, "capture"_a.none(),
             nb::sig("def set_capture(self, capture: typing.Callable[[int, typing.Any], None] | None) -> None"),
             R"(Receive the inputs of FFN blocks while a model runs.

Args:
    capture: callable(i_layer: int, x: (n_tokens, n_embd) float32, a copy), called on the thread that computes; None
        stops it. An exception in it is raised by the next call of the plan; until then it isn't called again.)")
        .def("close", &plan_object::close, "Free the handle. Models loaded with it stay valid. Twice is fine.")
        .def("__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Plan"))
        .def("__exit__", [](plan_object & self, nb::args) { self.close(); }, nb::sig("def __exit__(self, *exc: object) -> None"))
        .def_prop_ro(
            "memory_bytes",
            [](plan_object & self) {
                const ggml_backend_powerinfer_plan_t plan = self.handle();
                nb::gil_scoped_release no_gil;
                return ggml_backend_powerinfer_plan_memory_bytes(plan);
            },
            "Anonymous memory that the plan's buffers hold, bytes.")
        .def_prop_ro(
            "kernels", [](plan_object & self) { return ggml_backend_powerinfer_plan_kernels(self.handle()); },
            "Kernel set in use, e.g. avx512.")
        .def_prop_ro(
            "base_path",
            [](plan_object & self) { return std::filesystem::path(ggml_backend_powerinfer_plan_base_path(self.handle())); },
            "The file that holds the base model.")
        .def_prop_ro(
            "base_offset", [](plan_object & self) { return ggml_backend_powerinfer_plan_base_offset(self.handle()); },
            "Where the base GGUF starts in base_path, bytes; 0 unless embedded.")
        .def_prop_ro(
            "n_layer", [](plan_object & self) { return ggml_backend_powerinfer_plan_n_layer(self.handle()); },
            "Layers of the model, covered or not.")
        .def_prop_ro(
            "n_embd", [](plan_object & self) { return ggml_backend_powerinfer_plan_n_embd(self.handle()); },
            "Values per token between the layers.");

    nb::class_<powerinfer::budget_decision>(m, "Budget", "What goes to the GPU within a VRAM budget. Lives until the model is loaded.")
        .def("apply", &budget_apply, "plan"_a.none(), "model_params"_a,
             R"(Put the decision into the parameters of a load, and into its plan.

Args:
    plan: the plan it was decided for; None: a model without one.
    model_params: address of a struct llama_model_params, which then points into this object.

Raises:
    BudgetError: the plan can't take the split.)")
        .def("table", &powerinfer::budget_decision::table, "Bytes by kind in MiB, one column per device and one for the CPU.")
        .def_prop_ro("gpus", &budget_gpus, nb::sig("def gpus(self, /) -> list[dict[str, int | str]]"),
                     "Bytes by kind of each device; empty unless a budget was given and a device is there.")
        .def_prop_ro("cpu", [](const powerinfer::budget_decision & self) { return memory_use(self.cpu); },
                     nb::sig("def cpu(self, /) -> dict[str, int | str]"), "Bytes by kind on the CPU; budget_bytes is 0.")
        .def_ro("is_measured", &powerinfer::budget_decision::is_measured, "Memory was measured; without, all bytes are 0.")
        .def_ro("split_text", &powerinfer::budget_decision::split_text, "'FFN split: ...', one line; '' where nobody asked.")
        .def_ro("notes", &powerinfer::budget_decision::notes, "Fallbacks, one line each.")
        .def_ro("n_gpu_layers", &powerinfer::budget_decision::n_gpu_layers, "As llama.cpp counts: the output is one too.")
        .def_ro("n_hot", &powerinfer::budget_decision::n_hot, "(n_layer) neurons of each layer on a device; [] without a split, all 0 when only prompts go there.")
        .def_ro("i_device", &powerinfer::budget_decision::i_device, "(n_layer) index into gpus.")
        .def_ro("hot_bytes", &powerinfer::budget_decision::hot_bytes, "(n_devices) bytes left for hot neurons; [] without a plan.")
        .def_ro("is_saved", &powerinfer::budget_decision::is_saved, "The split is the plan's saved placement.")
        .def_ro("max_tokens", &powerinfer::budget_decision::max_tokens, "Tokens that the scratch memory is made for.")
        .def_ro("share_neurons", &powerinfer::budget_decision::share_neurons, "Of the plan's neurons, on a device.")
        .def_ro("share_activations", &powerinfer::budget_decision::share_activations, "Of the expected activations, on a device.")
        .def_ro("n_dry_runs", &powerinfer::budget_decision::n_dry_runs, "Dry runs of llama.cpp that the decision took.")
        .def_ro("dry_run_s", &powerinfer::budget_decision::dry_run_s, "Seconds that they took.");
    m.def("plan_budget", &plan_budget, "plan"_a.none(), "path"_a, "model_params"_a, "context_params"_a, nb::kw_only(),
          "budget"_a = "", "device"_a = "", "has_n_gpu_layers"_a = false, "reset_index"_a = false, "disable_index"_a = false,
          "require_split"_a = false, "strict"_a = false,
          R"(Decide what goes to the GPU within a VRAM budget. No weight is loaded.

Args:
    plan: the opened plan; None: llama.cpp computes all of the model.
    path: the model, for messages; without a plan the GGUF that is measured.
    model_params: address of a struct llama_model_params, as for the load.
    context_params: address of the struct llama_context_params of the context that will be made.
    budget: GiB as a plain number, or 8GiB, 512MiB, 75%; with several devices one for all, or one each with commas
        between. '': none was given.
    device: names of the devices with commas between; 'none': the CPU alone; '': as llama.cpp chooses.
    has_n_gpu_layers: model_params.n_gpu_layers stays as it is.
    reset_index: don't use a saved placement.
    disable_index: no single neurons on the GPU, only whole dense blocks.
    require_split: it is an error when no neuron is on the GPU.
    strict: a fallback is an error instead of a note.

Returns:
    The decision.

Raises:
    OptionError: the budget can't be read, or there is no such device.
    BudgetError: the model doesn't fit, a fallback under strict, or no split where one is required.)");
    m.def("inspect_path", &inspect_path, "path"_a, nb::sig("def inspect_path(path: str | os.PathLike) -> tuple[str, str | None]"),
          R"(Say what a model file is.

Args:
    path: any GGUF.

Returns:
    "extended" or "plain", and for a plain one the sidecar beside it, None when there is none.

Raises:
    FormatError: the file can't be read.)");
    m.def("find_placement", &find_placement, "path"_a, "base"_a.none(), "hot_bytes"_a,
          nb::sig("def find_placement(path: str | os.PathLike, base: str | os.PathLike | None, hot_bytes: list[int]) -> int | None"),
          R"(Find the saved placement that can be used again, as format.find_placement does.

Args:
    path: the extended GGUF.
    base: the stock GGUF; None: where the file says.
    hot_bytes: bytes that each device has for hot neurons now.

Returns:
    Its number, None when there is none.

Raises:
    PlanError: the file can't be used; the text says why.)");
    m.def("placement_neuron_cost", &placement_neuron_cost, "first_s"_a, "second_s"_a, "down_s"_a, "predictor_s"_a, "candidate_ratio"_a,
          "reads_all"_a, nb::sig("def placement_neuron_cost(first_s: float, second_s: float, down_s: float, predictor_s: float, "
                                 "candidate_ratio: float, reads_all: bool) -> tuple[float, float]"),
          R"(Turn the seconds of a neuron's rows into seconds per neuron and per active neuron.

Args:
    first_s, second_s, down_s: seconds for gate, up and down row; ungated: up, 0 and down.
    predictor_s: for its share of the predictor.
    candidate_ratio: candidates per active neuron; 0: no predictor.
    reads_all: every neuron is computed.

Returns:
    (neuron_s, active_s).)");
    m.def("place_greedy", &place_greedy, "n_ff"_a.noconvert(), "frequency"_a.noconvert(), "neuron_bytes"_a.noconvert(),
          "cpu_s"_a.noconvert(), "gpu_s"_a.noconvert(), "sync_s"_a.noconvert(), "min_hot"_a.noconvert(), "i_device"_a.noconvert(),
          "capacity_bytes"_a.noconvert(),
          R"(Choose the hot neurons of every layer.

Args:
    n_ff: (n_layer) int64 neurons.
    frequency: (sum of n_ff) float32 share of tokens in which a neuron is active, layer by layer, hot first.
    neuron_bytes: (n_layer) uint64 that a hot neuron takes on its device.
    cpu_s, gpu_s: (n_layer, 2) float64 seconds per neuron and per active neuron.
    sync_s: (n_layer) float64 seconds for a layer that has hot neurons.
    min_hot: (n_layer) int64, hot neurons are 0 or at least so many.
    i_device: (n_layer) int32 index into capacity_bytes.
    capacity_bytes: (n_devices) uint64 for hot neurons.

Returns:
    n_hot: (n_layer) int64. token_s, saved_s: float, seconds per token. gap: float, token_s is at most this share above
    the least possible.

Raises:
    OptionError: a frequency, cost or device that can't be; the text names the layer.)");
    m.def("kernel_sets", &kernel_sets, nb::sig("def kernel_sets() -> list[dict[str, typing.Any]]"),
          R"(The kernel sets that were compiled in, widest first.

Returns:
    One item per set: name: str. is_supported: bool, by this CPU. row_types: list[str], ggml type names that have kernels.)");
    m.def("read_bandwidth", &read_bandwidth, "n_threads"_a, "n_bytes"_a,
          R"(Measure how fast memory can be read: wide loads of huge pages, prefetched, each thread its own part.

Args:
    n_threads: threads, at least 1.
    n_bytes: how much is read per pass; far more than the caches hold, or it is their speed.

Returns:
    Bytes per second, the best of six passes.

Raises:
    OptionError: no threads, too few bytes, or more than memory has.)");
    nb::class_<powerinfer::kernel_bench>(m, "KernelBench", "Rows of no model, and the speed of each kernel over them.")
        .def(nb::new_(&kernel_bench_create), "row_type"_a, "n"_a, "n_rows"_a, "working_set_bytes"_a,
             R"(Fill the working set: layers of three matrices (n_rows, n).

Args:
    row_type: ggml type name of a type that has kernels.
    n: values per row, whole blocks of the type.
    n_rows: rows per matrix.
    working_set_bytes: rounded up to whole layers; far more than the caches hold, or rows come from them.

Raises:
    OptionError: rows that can't be, or more than memory has.)")
        .def("run", &kernel_bench_run, nb::kw_only(), "kernels"_a, "op"_a, "layout"_a = "separate", "gate_density"_a = 1.0,
             "density"_a = 1.0, "in_cache"_a = false, "n_threads"_a = 1, "n_repeats"_a = 5, "repeat_s"_a = 0.05,
             nb::sig("def run(self, *, kernels: str, op: str, layout: str = 'separate', gate_density: float = 1.0, "
                     "density: float = 1.0, in_cache: bool = False, n_threads: int = 1, n_repeats: int = 5, "
                     "repeat_s: float = 0.05) -> dict[str, float]"),
             R"(Time one kernel, or the three of a feed-forward block.

Args:
    kernels: kernel set by name.
    op: dot, add, unpack (one matrix per pass), or ffn (gate dots, up dots, down adds: one layer per pass).
    layout: of ffn: separate (three matrices), bundle (up and down side by side), interleaved (all three).
    gate_density: of ffn: share of gate rows read, density to 1.
    density: share of rows read, of ffn: of up and of down rows, over 0 to 1. Hot rows lie together; which ones are hot
        changes from pass to pass.
    in_cache: each thread reads 256 KiB of rows again and again; single kernels at density 1 only.
    n_threads: threads; each takes an even share of the rows.
    n_repeats: timed repeats.
    repeat_s: seconds per repeat, about.

Returns:
    pass_s: seconds per pass, median of the repeats; pass_s_min, pass_s_max. pass_rows: rows read per pass, mean;
    pass_bytes: their bytes. core_hz: clock of the core, by a chain of dependent additions.

Raises:
    OptionError: a set, op or layout that isn't there, or a share out of range.)")
        .def_prop_ro("row_bytes", &powerinfer::kernel_bench::row_bytes, "Bytes of one row.")
        .def_prop_ro("working_set_bytes", &powerinfer::kernel_bench::working_set_bytes, "Bytes of all rows, as allocated.");
    m.def("devices", &devices, nb::sig("def devices() -> list[dict[str, typing.Any]]"),
          R"(The devices that ggml lists in this process.

Returns:
    One item per device: name, description: str. type: cpu, gpu, igpu, accel or meta. memory_free, memory_total: int,
    bytes; 0 of 0: the device doesn't say. async: bool, it computes while the caller goes on.)");
    m.def("add_rpc_server", &add_rpc_server, "address"_a,
          R"(Add the devices of an RPC server to those that ggml lists in this process; again: no change.

Args:
    address: host:port.

Returns:
    Names of its devices.

Raises:
    OptionError: no address, no server there or one of another version, or the installed llama.cpp has no RPC backend.)");
    m.def("measure_device", &measure_device, "name"_a, nb::kw_only(), "types"_a = std::vector<std::string>(), "n_embd"_a = 4096,
          "max_bytes"_a = size_t(256) << 20, "repeat_s"_a = 0.05, "progress"_a = nb::none(),
          nb::sig("def measure_device(name: str, *, types: collections.abc.Sequence[str] = (), n_embd: int = 4096, "
                  "max_bytes: int = 268435456, repeat_s: float = 0.05, "
                  "progress: typing.Callable[[str], object] | None = None) -> dict[str, typing.Any]"),
          R"(Measure one device: copies, a round trip, and how fast it multiplies rows of weights with a vector.

Args:
    name: of the device, as in devices.
    types: ggml type names of rows; none: all that have kernels of ours.
    n_embd: values per row, whole blocks of the types; floats of the round trip.
    max_bytes: rows of a type; half of the free memory at most. Far more than the device's caches hold, or it is their
        speed.
    repeat_s: seconds per timed batch, about; a rate is the best of five, the round trip a median.
    progress: called with a word for what is measured next; what it raises ends the measuring, as Ctrl-C does.

Returns:
    bandwidth_bytes_s (the best of all rows, f32 among them), to_device_bytes_s, to_host_bytes_s: bytes per second.
    round_trip_s: seconds: n_embd floats up, a feed-forward block of 8 f32 neurons, n_embd floats back. pinned: bool,
    whether host memory of the device's own kind was used. row_bytes_s: bytes per second by type; 0: it can't.

Raises:
    OptionError: an unknown device or type, no whole blocks, a device that fails or has no memory to spare.)");
    nb::class_<upstream_tiles>(m, "UpstreamTiles", R"(In `with`: upstream computes here.

Upstream configures a thread's AMX tiles once; where other libraries released them since (torch does after bf16 products), they
are put back, or upstream would die of an illegal instruction.

Args:
    n_threads: that upstream computes with.)")
        .def(nb::init<int>(), "n_threads"_a)
        .def("__enter__", [](const upstream_tiles & self) { powerinfer::upstream_tiles_restore(self.n_threads); },
             nb::sig("def __enter__(self) -> None"))
        .def("__exit__", [](const upstream_tiles &, nb::args) { powerinfer::upstream_tiles_remember(); },
             nb::sig("def __exit__(self, *exc: object) -> None"));
    m.def("physical_cores", &powerinfer::physical_cores_allowed, "Physical cores that this process may run on, at least 1.");
    m.def("end_openmp_team", &powerinfer::openmp_team_end,
          "End the calling thread's OpenMP team, so that it doesn't count beside that of the thread which computes next.");
    m.def("version", &ggml_backend_powerinfer_version, "Version of the compiled core.");
}
