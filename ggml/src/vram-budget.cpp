// Dry runs of libllama, the search for the layers that fit, and the neurons that fill what is left.
#include "vram-budget.h"

#include "gpu/gpu-devices.h"
#include "llama-abi.h"
#include "plan-place.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>

namespace powerinfer {

status llama_abi_check() {
    const std::string found = llama_version();
    if (found == POWERINFER_LLAMA_VERSION) {
        return {};
    }
    return status::error("powerinfer: the loaded libllama is version " + found + "; this build needs exactly " POWERINFER_LLAMA_VERSION
                         "; install llama-cpp-python again or build powerinfer against the installed one.");
}

namespace {

// Kept free beside what is counted: backends allocate some memory of their own (CUDA: pools, cuBLAS), 1.6 % of the device.
constexpr uint64_t margin_divisor = 64;

constexpr double mib = 1024.0 * 1024.0;

std::string format(const char * pattern, ...) {
    char text[512];
    va_list args;
    va_start(args, pattern);
    std::vsnprintf(text, sizeof(text), pattern, args);
    va_end(args);
    return text;
}

std::string join(const std::vector<std::string> & parts, const char * separator) {
    std::string text;
    for (const std::string & part : parts) {
        text += (text.empty() ? "" : separator) + part;
    }
    return text;
}

std::vector<std::string> split_list(const std::string & text) {
    std::vector<std::string> parts(1);
    for (char c : text) {
        if (c == ',') {
            parts.emplace_back();
        } else {
            parts.back() += c;
        }
    }
    return parts;
}

// Keeps libllama's log from the user while it lives; remembers the first error. One at a time: the log is the process's.
class log_silencer {
public:
    log_silencer() : lock_(mutex()) {
        llama_log_get(&callback_, &user_data_);
        llama_log_set(
            [](ggml_log_level level, const char * text, void * self) {
                std::string & error = static_cast<log_silencer *>(self)->error_;
                if (level == GGML_LOG_LEVEL_ERROR && error.empty()) {
                    error = text;
                    error.erase(error.find_last_not_of('\n') + 1);
                }
            },
            this);
    }
    ~log_silencer() { llama_log_set(callback_, user_data_); }
    log_silencer(const log_silencer &) = delete;
    log_silencer & operator=(const log_silencer &) = delete;

    std::string error_in_brackets() const { return error_.empty() ? "" : " (llama.cpp: " + error_ + ")"; }

private:
    static std::mutex & mutex() {
        static std::mutex instance;
        return instance;
    }

    std::lock_guard<std::mutex> lock_;
    ggml_log_callback callback_ = nullptr;
    void * user_data_ = nullptr;
    std::string error_;
};

// What libllama would allocate.
struct dry_run {
    std::vector<ggml_backend_dev_t> devices;
    std::vector<memory_use> gpus;  // (n_devices); weights, KV, compute
    memory_use cpu;
    int32_t n_layer = 0;
    int64_t n_ubatch = 0;
    bool op_offload = false;
};

// The model and what it is asked for; runs it dry.
class measurer {
public:
    measurer(ggml_backend_powerinfer_plan_t plan, const std::string & path, const llama_model_params & params,
             const make_context_params & context_params, budget_decision & decision)
        : plan_(plan), path_(path), params_(params), context_params_(context_params), decision_(decision) {}

    // With the decision's devices, tensor_split and n_gpu_layers.
    status run(dry_run & out) {
        out = dry_run{};
        if (params_.progress_callback != nullptr && !params_.progress_callback(0.0f, params_.progress_callback_user_data)) {
            return status::error(path_ + ": the load was interrupted.");
        }
        const auto begin = std::chrono::steady_clock::now();
        llama_model_params params = params_;
        decision_.set_params(params);
        params.no_alloc = true;
        params.load_mode = LLAMA_LOAD_MODE_NONE;
        const log_silencer log;
        llama_model * opened = nullptr;
        if (status result = model_open(plan_, path_, params, opened); !result.ok()) {
            return result;
        }
        const std::unique_ptr<llama_model, decltype(&llama_model_free)> model(opened, llama_model_free);
        if (model == nullptr) {
            return status::error(path_ + ": libllama could not load it" + log.error_in_brackets() +
                                 "; expected a complete GGUF of an architecture that it knows; convert or fetch the file again.");
        }
        const llama_context_params context_params = context_params_(model.get());
        const std::unique_ptr<llama_context, decltype(&llama_free)> context(llama_init_from_model(model.get(), context_params), llama_free);
        if (context == nullptr) {
            return status::error(path_ + ": libllama could not make the context that was asked for" + log.error_in_brackets() +
                                 "; change the context's options.");
        }
        out.op_offload = context_params.op_offload;
        read(*model, *context, out);
        decision_.n_dry_runs += 1;
        decision_.dry_run_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        return {};
    }

private:
    void read(const llama_model & model, const llama_context & context, dry_run & out) const {
        for (int i = 0; i < llama_model_n_devices(&model); ++i) {
            out.devices.push_back(llama_model_get_device(&model, i));
        }
        out.gpus.resize(out.devices.size());
        out.n_layer = llama_model_n_layer(&model);
        out.n_ubatch = llama_n_ubatch(&context);
        const ggml_backend_buffer_type_t ours = plan_ ? ggml_backend_powerinfer_plan_buffer_type(plan_) : nullptr;
        for (const auto & [buffer_type, bytes] : llama_get_memory_breakdown(&context)) {
            if (buffer_type == ours) {
                continue;  // counted by neurons
            }
            const bool is_host = ggml_backend_buft_is_host(buffer_type);  // a device's pinned memory is the CPU's
            const auto device = std::find(out.devices.begin(), out.devices.end(), ggml_backend_buft_get_device(buffer_type));
            memory_use & use = is_host || device == out.devices.end() ? out.cpu : out.gpus[size_t(device - out.devices.begin())];
            use.weights_bytes += bytes.model;
            use.kv_bytes += bytes.context;
            use.compute_bytes += bytes.compute;
        }
    }

    const ggml_backend_powerinfer_plan_t plan_;
    const std::string path_;
    const llama_model_params params_;
    const make_context_params & context_params_;
    budget_decision & decision_;
};

bool fits(const dry_run & run, const std::vector<memory_use> & gpus) {
    for (size_t i = 0; i < gpus.size(); ++i) {
        if (run.gpus[i].dense_bytes() > gpus[i].budget_bytes) {
            return false;
        }
    }
    return true;
}

// The largest n_gpu_layers below all whose dense blocks fit, and its run; `all` is the run of all layers, which don't.
// `one` gets the run of one: the output matrix and its buffers. From there to all of them memory grows about evenly.
status find_layers(measurer & measure, const dry_run & all, budget_decision & decision, dry_run & one, dry_run & run) {
    decision.n_gpu_layers = 1;
    if (status result = measure.run(one); !result.ok()) {
        return result;
    }
    run = one;
    if (!fits(one, decision.gpus)) {
        decision.n_gpu_layers = 0;
        return measure.run(run);
    }
    int low = 1;                 // fits
    int high = all.n_layer + 1;  // doesn't
    int guess = high - 1;
    for (size_t i = 0; i < decision.gpus.size(); ++i) {
        const double per_layer = (double(all.gpus[i].dense_bytes()) - double(one.gpus[i].dense_bytes())) / all.n_layer;
        const double room = double(decision.gpus[i].budget_bytes) - double(one.gpus[i].dense_bytes());
        if (per_layer > 0.0) {
            guess = int(std::min(double(guess), 1.0 + room / per_layer));
        }
    }
    for (int i_try = 0; high - low > 1; ++i_try) {
        const int n = i_try < 2 ? std::clamp(guess, low + 1, high - 1) : (low + high) / 2;
        dry_run tried;
        decision.n_gpu_layers = n;
        if (status result = measure.run(tried); !result.ok()) {
            return result;
        }
        if (fits(tried, decision.gpus)) {
            low = n;
            run = tried;
            guess = n + 1;
        } else {
            high = n;
            guess = n - 1;
        }
    }
    decision.n_gpu_layers = low;
    return {};
}

// Bytes that each device may use, from the amounts and from what is free.
status set_budgets(std::vector<budget_amount> amounts, const budget_request & request, budget_decision & out) {
    if (amounts.size() > 1 && amounts.size() != out.devices.size()) {
        return status::error("VRAM budget: found " + std::to_string(amounts.size()) + " amounts for " +
                             std::to_string(out.devices.size()) + " devices; expected one amount, or one for each device.");
    }
    if (amounts.size() > 1) {
        for (size_t i = amounts.size(); i-- > 0;) {
            if (amounts[i].value == 0.0) {  // not to be used
                amounts.erase(amounts.begin() + long(i));
                out.devices.erase(out.devices.begin() + long(i));
            }
        }
    }
    out.gpus.assign(out.devices.size(), {});
    for (size_t i = 0; i < out.devices.size(); ++i) {
        memory_use & gpu = out.gpus[i];
        gpu.name = ggml_backend_dev_name(out.devices[i]);
        size_t free_bytes = 0;
        size_t total_bytes = 0;
        ggml_backend_dev_memory(out.devices[i], &free_bytes, &total_bytes);
        const budget_amount & amount = amounts[amounts.size() > 1 ? i : 0];
        if (amount.is_share && total_bytes == 0) {
            return status::error("VRAM budget: found a percentage for " + gpu.name +
                                 ", which doesn't tell its memory; expected an amount; write it in GiB.");
        }
        gpu.budget_bytes = uint64_t(amount.is_share ? amount.value * double(total_bytes) : amount.value);
        const uint64_t margin = total_bytes / margin_divisor;
        const uint64_t usable = free_bytes > margin ? free_bytes - margin : 0;
        if (total_bytes > 0 && gpu.budget_bytes > usable) {
            const std::string text = format("VRAM budget: found %.0f MiB for %s, which has %.0f MiB free of %.0f; %.0f MiB are used.",
                                            double(gpu.budget_bytes) / mib, gpu.name.c_str(), double(free_bytes) / mib,
                                            double(total_bytes) / mib, double(usable) / mib);
            if (request.strict) {
                return status::error(text);
            }
            out.notes.push_back(text);
            gpu.budget_bytes = usable;
        }
    }
    return {};
}

// Whole layers go to the devices in proportion to their budgets, as libllama does it with free memory.
void split_by_budget(budget_decision & out) {
    out.tensor_split.assign(llama_max_devices(), 0.0f);
    for (size_t i = 0; i < out.gpus.size(); ++i) {
        out.tensor_split[i] = float(double(out.gpus[i].budget_bytes) / mib);
    }
}

// Device of each layer's hot neurons: where libllama puts the layer; for layers on the CPU the device with the most room.
std::vector<int32_t> layer_devices(const budget_decision & decision, const float * tensor_split,
                                   const std::vector<uint64_t> & layer_bytes) {
    const int n_devices = int(decision.devices.size());
    const int n_layer = decision.n_layer;
    if (n_devices == 1) {
        return std::vector<int32_t>(n_layer, 0);
    }
    const int n_gpu = decision.n_gpu_layers < 0 ? n_layer + 1 : std::min(decision.n_gpu_layers, n_layer + 1);
    std::vector<float> ends(n_devices);  // of each device's share, as llama_model_base::load_tensors sums them
    float sum = 0.0f;
    for (int i = 0; i < n_devices; ++i) {
        sum += tensor_split[i];
        ends[i] = sum;
    }
    std::vector<double> room(n_devices);
    for (int i = 0; i < n_devices; ++i) {
        ends[i] /= sum;
        room[i] = double(decision.gpus[i].budget_bytes) - double(decision.gpus[i].dense_bytes());
    }
    std::vector<int32_t> devices(n_layer);
    for (int i_layer = n_layer - 1; i_layer >= 0; --i_layer) {
        const int i_on_gpu = i_layer - (n_layer + 1 - n_gpu);
        const int i_device = i_on_gpu >= 0
                                 ? int(std::upper_bound(ends.begin(), ends.end(), float(i_on_gpu) / float(n_gpu)) - ends.begin())
                                 : int(std::max_element(room.begin(), room.end()) - room.begin());
        devices[i_layer] = std::min(i_device, n_devices - 1);
        room[devices[i_layer]] -= double(layer_bytes[i_layer]);
    }
    return devices;
}

int64_t layer_n_ff(ggml_backend_powerinfer_plan_t plan, int i_layer) {
    ggml_backend_powerinfer_layer layer{};
    return ggml_backend_powerinfer_plan_layer(plan, i_layer, &layer) ? layer.n_ff : 0;
}

// Rows and scratch on each device for the decision's n_hot.
status split_bytes(ggml_backend_powerinfer_plan_t plan, const budget_decision & decision, std::vector<uint64_t> & rows,
                   std::vector<uint64_t> & scratch) {
    rows.assign(decision.devices.size(), 0);
    scratch.assign(decision.devices.size(), 0);
    const ggml_backend_powerinfer_split split = decision.split();
    char error[1024] = "";
    return ggml_backend_powerinfer_plan_split_bytes(plan, &split, rows.data(), scratch.data(), error, sizeof(error))
               ? status()
               : status::error(error);
}

// Fills what the dense blocks leave with neurons. Scratch memory grows with the most hot neurons of a layer, and the more of
// it there is the fewer neurons fit: it is raised until both do.
status place_neurons(ggml_backend_powerinfer_plan_t plan, const float * tensor_split, const budget_request & asked,
                     budget_decision & out, place_result & placed, bool & has_room) {
    place_request request;
    std::vector<int64_t> n_ff(out.n_layer);
    std::vector<uint64_t> neuron_bytes(out.n_layer);
    std::vector<uint64_t> layer_bytes(out.n_layer);
    for (int i = 0; i < out.n_layer; ++i) {
        n_ff[i] = layer_n_ff(plan, i);
        neuron_bytes[i] = ggml_backend_powerinfer_plan_neuron_bytes(plan, out.devices.front(), i);
        layer_bytes[i] = uint64_t(n_ff[i]) * neuron_bytes[i];
    }
    request.devices = out.devices;
    request.reset_index = asked.reset_index;
    out.i_device = layer_devices(out, out.tensor_split.empty() ? tensor_split : out.tensor_split.data(), layer_bytes);
    request.i_device = out.i_device;

    // The least scratch memory: of one group.
    std::vector<uint64_t> rows;
    std::vector<uint64_t> scratch;
    out.n_hot.resize(n_ff.size());
    std::transform(n_ff.begin(), n_ff.end(), out.n_hot.begin(), [](int64_t n) { return std::min(n, placement_group); });
    if (status result = split_bytes(plan, out, rows, scratch); !result.ok()) {
        return result;
    }
    for (bool fits_all = false; !fits_all;) {
        request.capacity_bytes.clear();
        for (size_t i = 0; i < out.gpus.size(); ++i) {
            const uint64_t used = out.gpus[i].dense_bytes() + scratch[i];
            const bool is_free = !asked.disable_index && out.gpus[i].budget_bytes > used;
            request.capacity_bytes.push_back(is_free ? out.gpus[i].budget_bytes - used : 0);
        }
        if (status result = plan_place(plan, request, placed); !result.ok()) {
            return result;
        }
        out.n_hot = placed.n_hot;
        out.i_device = placed.i_device;
        std::vector<uint64_t> needed;
        if (status result = split_bytes(plan, out, rows, needed); !result.ok()) {
            return result;
        }
        fits_all = true;
        for (size_t i = 0; i < out.gpus.size(); ++i) {
            if (rows[i] > 0 && rows[i] + needed[i] > request.capacity_bytes[i] + scratch[i]) {
                fits_all = false;
                scratch[i] += std::max<uint64_t>(rows[i] + needed[i] - request.capacity_bytes[i] - scratch[i], 1);
            }
        }
        if (fits_all) {
            scratch = needed;
        }
    }
    // Without hot neurons the scratch memory still serves prompts, where it fits.
    const bool any_hot = std::any_of(rows.begin(), rows.end(), [](uint64_t n) { return n > 0; });
    out.only_streams = !any_hot && out.stream_tokens == 0 && !asked.disable_index;
    for (size_t i = 0; i < out.gpus.size(); ++i) {
        out.only_streams = out.only_streams && out.gpus[i].dense_bytes() + scratch[i] <= out.gpus[i].budget_bytes;
    }
    for (size_t i = 0; i < out.gpus.size(); ++i) {
        out.gpus[i].ffn_bytes = rows[i];
        out.gpus[i].scratch_bytes = rows[i] > 0 || out.only_streams ? scratch[i] : 0;
    }
    out.hot_bytes = request.capacity_bytes;
    out.is_saved = placed.is_saved;
    out.share_neurons = placed.share_neurons;
    out.share_activations = placed.share_activations;
    out.cpu.predictor_bytes = placed.predictor_bytes;
    out.cpu.ffn_bytes = 0;
    has_room = false;
    for (int i = 0; i < out.n_layer; ++i) {
        has_room |= n_ff[i] > 0 && request.capacity_bytes[out.i_device[i]] >= uint64_t(std::min(n_ff[i], placement_group)) * neuron_bytes[i];
        out.cpu.ffn_bytes += uint64_t(n_ff[i] - out.n_hot[i]) * neuron_bytes[i];
    }
    return {};
}

// The first device that can't hold what `run` needs; the first one at all when each could.
status no_room(const std::vector<memory_use> & gpus, const dry_run & run, const std::string & what) {
    size_t i = 0;
    while (i + 1 < gpus.size() && run.gpus[i].dense_bytes() <= gpus[i].budget_bytes) {
        ++i;
    }
    const memory_use & need = run.gpus[i];
    return status::error(format("VRAM budget: found %.1f MiB for %s; ", double(gpus[i].budget_bytes) / mib, gpus[i].name.c_str()) + what +
                         format(" needs %.1f MiB (weights %.1f, KV cache %.1f, compute buffers %.1f); give more, a smaller context or batch, "
                                "or 0 for the CPU alone.",
                                double(need.dense_bytes()) / mib, double(need.weights_bytes) / mib, double(need.kv_bytes) / mib,
                                double(need.compute_bytes) / mib));
}

// Ends with "FFN split: none, because <reason>".
status without_split(const budget_request & request, budget_decision & out, const std::string & reason, bool is_fallback) {
    if (!out.only_streams) {
        out.n_hot.clear();
    }
    out.split_text = "FFN split: none, because " + reason;
    return request.require_split || (is_fallback && request.strict) ? status::error(out.split_text) : status();
}

// What is on the GPU, in words.
status describe(ggml_backend_powerinfer_plan_t plan, const std::string & path, const budget_request & request,
                const place_result & placed, bool has_room, budget_decision & out) {
    const bool all_layers = out.n_gpu_layers < 0 || out.n_gpu_layers > out.n_layer;
    const std::string blocks = all_layers              ? format("all %d layers and the output", out.n_layer)
                               : out.n_gpu_layers == 0 ? format("none of %d layers", out.n_layer)
                                                       : format("%d of %d layers and the output", out.n_gpu_layers - 1, out.n_layer);
    if (placed.share_neurons > 0.0) {
        std::vector<std::string> names;
        for (const memory_use & gpu : out.gpus) {
            if (gpu.ffn_bytes > 0) {
                names.push_back(gpu.name + (out.gpus.size() > 1 ? format(" (%.0f MiB)", double(gpu.ffn_bytes) / mib) : ""));
            }
        }
        const std::string activations = placed.has_statistics ? format("%.0f %% of expected activations", 100.0 * placed.share_activations)
                                                              : "no statistics: all count alike";
        out.split_text = format("FFN split: %.0f %% of neurons (%s) on ", 100.0 * placed.share_neurons, activations.c_str()) +
                         join(names, ", ") + (placed.is_saved ? ", as the plan has it saved" : "") + "; dense blocks there: " + blocks + ".";
        return {};
    }
    if (has_room) {
        return without_split(request, out,
                             "handing tokens over would take longer than the CPU's work on the neurons that fit; dense blocks on the GPU: " +
                                 blocks + ".",
                             false);
    }
    if (plan == nullptr) {
        return without_split(request, out, path + " has no plan; on the GPU: " + blocks + ".", false);
    }
    if (request.disable_index) {
        return without_split(request, out, "it was disabled; dense blocks on the GPU: " + blocks + ".", false);
    }
    return without_split(request, out, "the dense blocks leave no room for neurons and their scratch memory; on the GPU: " + blocks + ".", false);
}

}  // namespace

status budget_parse(const std::string & text, std::vector<budget_amount> & out) {
    out.clear();
    for (const std::string & part : split_list(text)) {
        char * end = nullptr;
        const bool is_number = !part.empty() && (std::isdigit((unsigned char)part[0]) || part[0] == '.');
        const double value = is_number ? std::strtod(part.c_str(), &end) : 0.0;
        const std::string unit = is_number ? end : "?";
        double scale = 0.0;
        if (unit == "" || unit == "G" || unit == "GB" || unit == "GiB") {
            scale = 1024.0 * mib;
        } else if (unit == "M" || unit == "MB" || unit == "MiB") {
            scale = mib;
        } else if (unit == "%" && value <= 100.0) {
            scale = 0.01;
        }
        if (scale == 0.0 || end == part.c_str() || !(value * scale < 0x1p62)) {
            return status::error("VRAM budget: found '" + part + "'; expected GiB as a plain number, or 8GiB, 512MiB, 75%; with several "
                                 "devices one for all, or one each with commas between.");
        }
        out.push_back({value * scale, unit == "%"});
    }
    return {};
}

status budget_decide(ggml_backend_powerinfer_plan_t plan, const std::string & path, const llama_model_params & params,
                     const make_context_params & context_params, const budget_request & request, budget_decision & out) {
    out = budget_decision{};
    out.n_gpu_layers = params.n_gpu_layers;
    out.devices = request.devices;
    out.is_cpu_only = request.cpu_only;
    if (request.budget.empty()) {
        if ((request.cpu_only || !has_gpu_device()) && !request.require_split) {
            return {};
        }
        return without_split(request, out, "no VRAM budget was given; give one, e.g. 8GiB or 75%.", false);
    }
    std::vector<budget_amount> amounts;
    if (status result = budget_parse(request.budget, amounts); !result.ok()) {
        return result;
    }
    if (status result = llama_abi_check(); !result.ok()) {
        return result;
    }
    const bool is_zero = std::all_of(amounts.begin(), amounts.end(), [](const budget_amount & a) { return a.value == 0.0; });
    if (request.cpu_only || is_zero) {
        out.is_cpu_only = true;
        return without_split(request, out, request.cpu_only ? "no device was chosen." : "the VRAM budget is 0.", false);
    }

    measurer measure(plan, path, params, context_params, out);
    dry_run run;
    if (!request.has_n_gpu_layers) {
        out.n_gpu_layers = std::numeric_limits<int32_t>::max();
    }
    if (status result = measure.run(run); !result.ok()) {
        return result;
    }
    out.devices = run.devices;
    out.n_layer = run.n_layer;
    if (out.devices.empty()) {
        out.n_gpu_layers = params.n_gpu_layers;
        return without_split(request, out, "this llama.cpp has no GPU device; everything is computed on the CPU.", true);
    }
    if (status result = set_budgets(amounts, request, out); !result.ok()) {
        return result;
    }
    if (out.devices.size() > 1 && params.tensor_split == nullptr) {
        split_by_budget(out);
    }
    if (out.devices.size() != run.devices.size() || !out.tensor_split.empty()) {
        if (status result = measure.run(run); !result.ok()) {
            return result;
        }
    }
    dry_run one;
    if (!fits(run, out.gpus) && !request.has_n_gpu_layers) {
        const dry_run all = run;
        if (status result = find_layers(measure, all, out, one, run); !result.ok()) {
            return result;
        }
    }
    out.is_measured = true;
    out.max_tokens = run.n_ubatch;
    out.stream_tokens = run.op_offload ? 0 : -1;
    for (size_t i = 0; i < out.gpus.size(); ++i) {
        memory_use & gpu = out.gpus[i];
        gpu.weights_bytes = run.gpus[i].weights_bytes;
        gpu.kv_bytes = run.gpus[i].kv_bytes;
        gpu.compute_bytes = run.gpus[i].compute_bytes;
    }
    out.cpu = run.cpu;
    out.cpu.name = "CPU";
    if (!fits(run, out.gpus)) {
        return no_room(out.gpus, run, request.has_n_gpu_layers ? "the number of layers that was asked for" : "prompts alone, with no layer there,");
    }
    place_result placed;
    bool has_room = false;
    if (plan != nullptr) {
        if (status result = place_neurons(plan, params.tensor_split, request, out, placed, has_room); !result.ok()) {
            return result;
        }
        if (!has_room && !request.disable_index && out.stream_tokens == 0) {
            // Room for groups of cold rows is the larger part of the scratch memory.
            out.stream_tokens = -1;
            if (status result = place_neurons(plan, params.tensor_split, request, out, placed, has_room); !result.ok()) {
                return result;
            }
            if (placed.share_neurons > 0.0) {
                const std::string text = path + ": the VRAM budget has no room to bring cold rows to the GPU for prompts; the CPU computes them.";
                if (request.strict) {
                    return status::error(text);
                }
                out.notes.push_back(text);
            } else {
                out.stream_tokens = 0;
                if (status result = place_neurons(plan, params.tensor_split, request, out, placed, has_room); !result.ok()) {
                    return result;
                }
            }
        }
    }
    if (out.n_gpu_layers == 0 && !request.has_n_gpu_layers && placed.share_neurons == 0.0 && !has_room) {
        return no_room(out.gpus, one, "no neuron fits, and the output, the first block to go to a GPU,");
    }
    return describe(plan, path, request, placed, has_room, out);
}

void budget_decision::set_params(llama_model_params & params) {
    params.n_gpu_layers = is_cpu_only ? 0 : n_gpu_layers;
    device_list_ = is_cpu_only ? std::vector<ggml_backend_dev_t>() : devices;
    if (is_cpu_only || !devices.empty()) {
        device_list_.push_back(nullptr);
        params.devices = device_list_.data();
    }
    if (!tensor_split.empty()) {
        params.tensor_split = tensor_split.data();
    }
}

ggml_backend_powerinfer_split budget_decision::split() const {
    ggml_backend_powerinfer_split split{};
    split.n_devices = int(devices.size());
    split.devices = devices.data();
    split.n_hot = n_hot.data();
    split.i_device = i_device.data();
    split.max_tokens = max_tokens;
    split.stream_tokens = stream_tokens;
    return split;
}

status budget_decision::apply(ggml_backend_powerinfer_plan_t plan, llama_model_params & params) {
    set_params(params);
    if (plan == nullptr || n_hot.empty()) {
        return {};
    }
    const ggml_backend_powerinfer_split wanted = split();
    char error[1024] = "";
    return ggml_backend_powerinfer_plan_set_split(plan, &wanted, error, sizeof(error)) ? status() : status::error(error);
}

std::string budget_decision::table() const {
    static const struct { const char * name; uint64_t memory_use::* bytes; } kinds[] = {
        {"weights", &memory_use::weights_bytes},        {"KV cache", &memory_use::kv_bytes},
        {"compute buffers", &memory_use::compute_bytes}, {"FFN scratch", &memory_use::scratch_bytes},
        {"predictors", &memory_use::predictor_bytes},   {"FFN neurons", &memory_use::ffn_bytes},
    };
    std::string text = format("%-16s", "memory, MiB");
    auto row = [&](const char * name, auto bytes_of) {
        text += format("%-16s", name);
        for (const memory_use & gpu : gpus) {
            text += format(" %10.1f", double(bytes_of(gpu)) / mib);
        }
        text += format(" %10.1f\n", double(bytes_of(cpu)) / mib);
    };
    for (const memory_use & gpu : gpus) {
        text += format(" %10s", gpu.name.c_str());
    }
    text += format(" %10s\n", cpu.name.c_str());
    for (const auto & kind : kinds) {
        row(kind.name, [&](const memory_use & use) { return use.*kind.bytes; });
    }
    row("total", [](const memory_use & use) { return use.total_bytes(); });
    text += format("%-16s", "budget");
    for (const memory_use & gpu : gpus) {
        text += format(" %10.1f", double(gpu.budget_bytes) / mib);
    }
    return text + "\n";
}

bool has_gpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU) != nullptr || ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_IGPU) != nullptr;
}

status find_devices(const std::string & names, budget_request & out) {
    out.devices.clear();
    out.cpu_only = names == "none";
    if (out.cpu_only) {
        return {};
    }
    for (const std::string & name : split_list(names)) {
        ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
        const bool is_gpu = device != nullptr && (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_GPU ||
                                                  ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_IGPU);
        if (!is_gpu) {
            std::vector<std::string> known;
            for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
                const auto type = ggml_backend_dev_type(ggml_backend_dev_get(i));
                if (type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU) {
                    known.push_back(ggml_backend_dev_name(ggml_backend_dev_get(i)));
                }
            }
            return status::error("device: found '" + name + "'; expected a GPU device of this llama.cpp" +
                                 (known.empty() ? ", which has none" : ": " + join(known, ", ")) + ", or none for the CPU alone.");
        }
        if (std::find(out.devices.begin(), out.devices.end(), device) != out.devices.end()) {
            return status::error("device: found " + name + " twice; expected each device once; leave one out.");
        }
        out.devices.push_back(device);
    }
    return {};
}

status add_rpc_servers(const std::string & addresses) {
    for (const std::string & address : split_list(addresses)) {
        std::vector<std::string> names;
        if (status result = add_rpc_server(address, names); !result.ok()) {
            return result;
        }
    }
    return {};
}

}  // namespace powerinfer
