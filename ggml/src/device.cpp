// The device, the plan's buffer type and its buffers, and the C interface of plans. Reads the environment; prints notes.
#include "device.h"

#include "ggml-cpp.h"
#include "gguf.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace powerinfer {

// --- ABI ---

const char * ggml_abi_version() { return POWERINFER_GGML_VERSION; }

status ggml_abi_check(const std::string & version) {
    const std::string found = ggml_version();
    if (found != version) {
        return status::error("powerinfer: the loaded ggml is version " + found + "; this build needs exactly " + version +
                             "; install llama-cpp-python again or build powerinfer against the installed one.");
    }
    const std::string differs = "powerinfer: ggml " + found + ": the backend structs don't lie as declared in ggml-abi.h (";
    const std::string advice = "); build powerinfer against the installed llama-cpp-python.";
    ggml_backend_buffer_type_t cpu_type = ggml_backend_cpu_buffer_type();
    ggml_backend_dev_t cpu = ggml_backend_buft_get_device(cpu_type);
    if (cpu_type->device != cpu) {
        return status::error(differs + "buffer type" + advice);
    }
    if (cpu != nullptr) {
        if (cpu->reg != ggml_backend_dev_backend_reg(cpu)) {
            return status::error(differs + "device" + advice);
        }
        if (cpu->reg->api_version != ggml_abi_api_version) {
            return status::error("powerinfer: the loaded ggml has backend API " + std::to_string(cpu->reg->api_version) +
                                 "; this build needs " + std::to_string(ggml_abi_api_version) +
                                 "; build powerinfer against the installed llama-cpp-python.");
        }
    }
    ggml_backend_buffer_t probe = ggml_backend_buft_alloc_buffer(cpu_type, 64);
    if (probe == nullptr) {
        return status::error("powerinfer: no memory for a 64-byte probe buffer; close other programs.");
    }
    ggml_backend_buffer_set_usage(probe, GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    const bool same = probe->buft == ggml_backend_buffer_get_type(probe) && probe->size == ggml_backend_buffer_get_size(probe) &&
                      probe->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE && probe->iface.get_base(probe) == ggml_backend_buffer_get_base(probe);
    ggml_backend_buffer_free(probe);
    return same ? status() : status::error(differs + "buffer" + advice);
}

// --- plan buffers ---

namespace {

const char * buffer_type_name(ggml_backend_buffer_type_t buffer_type) {
    return static_cast<opened_plan *>(buffer_type->context)->name.c_str();
}

plan_buffer * buffer_of(ggml_backend_buffer_t buffer) { return static_cast<plan_buffer *>(buffer->context); }

void buffer_free(ggml_backend_buffer_t buffer) {
    plan_buffer * self = buffer_of(buffer);
    opened_plan * owner = self->owner;
    {
        std::lock_guard<std::mutex> lock(owner->mutex);
        owner->buffers.erase(self);
    }
    owner->n_down_loras -= self->n_down_loras;
    delete self;
    owner->release();
}

void * buffer_base(ggml_backend_buffer_t buffer) { return buffer_of(buffer)->memory.data(); }

// Empty stores for a device: with our own kernels first, where there are any for it.
std::vector<std::unique_ptr<gpu_store>> stores_of(ggml_backend_dev_t device) {
    std::vector<std::unique_ptr<gpu_store>> stores;
#if defined(POWERINFER_CUDA)
    if (device != nullptr && std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device)), "CUDA") == 0) {
        stores.push_back(cuda_store_create(device));
    }
#endif
    stores.push_back(ggml_store_create(device));
    return stores;
}

// The first store that can compute the layer; the last one when none can.
size_t store_index(const std::vector<std::unique_ptr<gpu_store>> & stores, int i_layer, const gpu_layer_shape & shape) {
    size_t i = 0;
    while (i + 1 < stores.size() && !stores[i]->check_layer(i_layer, shape).ok()) {
        ++i;
    }
    return i;
}

// What a device stores of a layer of the plan. The base's biases aren't known yet: they are counted in.
gpu_layer_shape planned_shape(const plan & data, int i_layer, int64_t n_hot) {
    const plan_layer & layer = data.layers[i_layer];
    gpu_layer_shape shape;
    shape.n_embd = data.n_embd;
    shape.n_ff = layer.n_ff;
    shape.n_hot = n_hot;
    shape.rank = layer.fc1.ne1;
    shape.fc1_type = layer.fc1.row_type;
    shape.fc2_type = layer.fc2.row_type;
    shape.first_type = data.gated ? layer.gate_type : layer.up_type;
    shape.second_type = data.gated ? layer.up_type : -1;
    shape.down_type = layer.ffn_down_t.data ? layer.ffn_down_t.row_type : derived_row_type(layer.down_type, data.n_embd);
    return shape;
}

ffn_role role_of(weight_kind kind) {
    switch (kind) {
        case weight_kind::gate:      return ffn_role::gate;
        case weight_kind::up:        return ffn_role::up;
        case weight_kind::down:      return ffn_role::down;
        case weight_kind::gate_bias: return ffn_role::gate_bias;
        case weight_kind::up_bias:   return ffn_role::up_bias;
        default:                     return ffn_role::down_bias;
    }
}

bool is_ffn_weight(weight_kind kind) { return kind != weight_kind::none && kind != weight_kind::lora; }
bool is_matrix(weight_kind kind) { return kind == weight_kind::gate || kind == weight_kind::up || kind == weight_kind::down; }

enum ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    if (tensor->view_src != nullptr) {
        return GGML_STATUS_SUCCESS;
    }
    const weight_ref weight = weight_of(tensor);
    plan_buffer * self = buffer_of(buffer);
    if (weight.kind == weight_kind::none) {
        return GGML_STATUS_SUCCESS;
    }
    self->weights.push_back(weight);
    tensor->extra = &self->weights.back();
    if (weight.kind == weight_kind::lora && std::strstr(tensor->name, ".ffn_down.weight") != nullptr) {
        self->n_down_loras += 1;
        weight.owner->n_down_loras += 1;
    }
    if (!is_ffn_weight(weight.kind)) {
        return GGML_STATUS_SUCCESS;
    }
    std::unique_ptr<ffn_store> & store = self->stores[weight.i_layer];
    if (store == nullptr) {
        store.reset(new ffn_store(weight.owner->data, weight.i_layer, weight.owner->kernels, weight.owner->options.mlock,
                                  weight.owner->options.mapped));
    }
    ffn_tensor_info info;
    info.row_type = tensor->type;
    info.ne0 = tensor->ne[0];
    info.ne1 = tensor->ne[1];
    const status result = store->announce(role_of(weight.kind), info);
    if (!result.ok()) {
        weight.owner->fail(result.text());
        return GGML_STATUS_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

// From how many tokens on cold rows are brought to the device; 0: never. wanted: as in ggml-powerinfer.h.
int64_t stream_tokens_of(ggml_backend_dev_t device, const gpu_layer_shape & shape, int64_t wanted) {
    if (wanted != 0) {
        return std::max<int64_t>(wanted, 0);
    }
    const ggml_init_params params = {3 * ggml_tensor_overhead(), nullptr, true};
    for (int64_t n_tokens = 8; n_tokens <= 4096; n_tokens *= 2) {
        const ggml_context_ptr ctx(ggml_init(params));
        ggml_tensor * rows = ggml_new_tensor_2d(ctx.get(), static_cast<ggml_type>(shape.first_type), shape.n_embd, shape.n_ff);
        ggml_tensor * x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, shape.n_embd, n_tokens);
        if (ggml_backend_dev_offload_op(device, ggml_mul_mat(ctx.get(), rows, x))) {
            return n_tokens;
        }
    }
    return 0;
}

// Makes a split layer's hot part on its device, and frees its rows here. A device that can't compute the layer leaves it to the CPU.
void split_layer(plan_buffer & buffer, int i_layer) {
    opened_plan * owner = buffer.owner;
    const plan_split & split = owner->split;
    ffn_store & store = *buffer.stores[i_layer];
    const ffn_layer & layer = store.layer();
    const int64_t n_hot = split.n_hot[i_layer];
    const int i_device = split.i_device[i_layer];
    const ggml_backend_dev_t device = split.devices[i_device];
    const int64_t wanted = stream_tokens_of(device, gpu_layer_shape(layer, n_hot, true), split.stream_tokens);
    if (buffer.gpu_stores[i_device].empty()) {
        buffer.gpu_stores[i_device] = stores_of(device);
    }
    const auto fall_back = [&](const status & refusal, const char * what) {
        if (owner->options.strict) {
            owner->fail(refusal.text());
        } else {
            owner->note(refusal.text() + what);
        }
        return !owner->options.strict;
    };
    for (const int64_t stream_tokens : {wanted, int64_t(0)}) {
        if (n_hot == 0 && stream_tokens == 0) {
            return;
        }
        status refusal;
        const gpu_layer_shape shape(layer, n_hot, stream_tokens > 0);
        for (const std::unique_ptr<gpu_store> & gpu : buffer.gpu_stores[i_device]) {
            const status checked = gpu->check_layer(i_layer, shape);
            if (!checked.ok()) {
                refusal = checked;
                continue;
            }
            if (!refusal.ok() && !fall_back(refusal, " ggml's own operators compute the layer there.")) {
                return;
            }
            const status added = gpu->add_layer(i_layer, layer, shape, owner->kernels);
            if (!added.ok()) {
                owner->fail(added.text());
                return;
            }
            buffer.hybrids[i_layer].reset(new hybrid_layer(i_layer, layer, n_hot, gpu.get(), stream_tokens));
            if (!owner->options.mapped) {
                store.release_hot(n_hot);
            }
            return;
        }
        if (!fall_back(refusal, stream_tokens > 0 ? " Its cold rows stay on the CPU for prompts too." : " The layer stays on the CPU.") ||
            stream_tokens == 0) {
            return;
        }
    }
}

void buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    const weight_ref weight = weight_of(tensor);
    if (!is_matrix(weight.kind)) {
        std::memcpy(static_cast<uint8_t *>(tensor->data) + offset, data, size);
    }
    if (!is_ffn_weight(weight.kind)) {
        return;
    }
    GGML_ASSERT(offset == 0 && size == ggml_nbytes(tensor) && "FFN weights are set whole");
    opened_plan * owner = weight.owner;
    if (owner->has_error) {
        return;
    }
    const uint8_t * resident = nullptr;
    if (owner->options.mapped && is_matrix(weight.kind)) {
        resident = owner->resident(tensor->name);
        if (resident == nullptr || std::memcmp(resident, data, std::min<size_t>(size, 4096)) != 0) {
            owner->fail(owner->data.base_path + ": " + tensor->name +
                        " in the mapped file differs from the loaded one; load the file that the plan names, or without `mapped`.");
            return;
        }
    }
    ffn_store & store = *buffer_of(buffer)->stores[weight.i_layer];
    const status result = store.set(role_of(weight.kind), data, resident);
    if (!result.ok()) {
        owner->fail(result.text());
    } else if (store.is_complete() && !owner->split.devices.empty()) {
        split_layer(*buffer_of(buffer), weight.i_layer);
    }
}

void buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    if (is_matrix(weight_of(tensor).kind)) {
        GGML_ABORT("powerinfer: %s is stored in another order and can't be read back; this is an error in powerinfer", tensor->name);
    }
    std::memcpy(data, static_cast<const uint8_t *>(tensor->data) + offset, size);
}

void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    std::memset(static_cast<uint8_t *>(tensor->data) + offset, value, size);
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    huge_block & memory = buffer_of(buffer)->memory;
    if (value != 0 || madvise(memory.data(), memory.size_bytes(), MADV_DONTNEED) != 0) {
        std::memset(memory.data(), value, memory.size_bytes());
    }
}

ggml_backend_buffer_t buffer_type_alloc(ggml_backend_buffer_type_t buffer_type, size_t size) {
    opened_plan * owner = static_cast<opened_plan *>(buffer_type->context);
    if (owner->has_error) {
        return nullptr;
    }
    std::unique_ptr<plan_buffer> self(new plan_buffer());
    self->owner = owner;
    self->stores.resize(owner->data.layers.size());
    self->gpu_stores.resize(owner->split.devices.size());
    self->hybrids.resize(owner->data.layers.size());
    // Address space for every tensor; pages are used by plain tensors only, repacked weights live in their stores.
    const status result = huge_block::allocate(size + row_tail_bytes, false, self->memory);
    if (!result.ok()) {
        owner->fail(result.text());
        return nullptr;
    }
    ggml_backend_buffer_i iface = {};
    iface.free_buffer = buffer_free;
    iface.get_base = buffer_base;
    iface.init_tensor = buffer_init_tensor;
    iface.memset_tensor = buffer_memset_tensor;
    iface.set_tensor = buffer_set_tensor;
    iface.get_tensor = buffer_get_tensor;
    iface.clear = buffer_clear;
    owner->retain();
    {
        std::lock_guard<std::mutex> lock(owner->mutex);
        owner->buffers.insert(self.get());
    }
    return ggml_backend_buffer_init(buffer_type, iface, self.release(), size);
}

size_t buffer_type_alignment(ggml_backend_buffer_type_t) { return 64; }
bool buffer_type_is_host(ggml_backend_buffer_type_t) { return false; }

}  // namespace

bool is_plan_buffer_type(ggml_backend_buffer_type_t buffer_type) {
    return buffer_type != nullptr && buffer_type->iface.get_name == buffer_type_name;
}

opened_plan * plan_of(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    return buffer != nullptr && is_plan_buffer_type(buffer->buft) ? static_cast<opened_plan *>(buffer->buft->context) : nullptr;
}

weight_ref weight_of(const ggml_tensor * tensor) {
    weight_ref weight;
    weight.owner = plan_of(tensor);
    if (weight.owner == nullptr || tensor->view_src != nullptr) {
        return weight;
    }
    if (tensor->extra != nullptr) {
        return *static_cast<const weight_ref *>(tensor->extra);  // set by buffer_init_tensor
    }
    int i_layer = 0;
    int used = 0;
    if (std::sscanf(tensor->name, "blk.%d.%n", &i_layer, &used) != 1 || used == 0 || i_layer < 0 ||
        i_layer >= weight.owner->data.n_layer || weight.owner->data.layers[i_layer].n_ff == 0) {
        return weight;
    }
    static const struct { const char * suffix; weight_kind kind; } names[] = {
        {"ffn_gate.weight", weight_kind::gate}, {"ffn_up.weight", weight_kind::up},     {"ffn_down.weight", weight_kind::down},
        {"ffn_gate.bias", weight_kind::gate_bias}, {"ffn_up.bias", weight_kind::up_bias}, {"ffn_down.bias", weight_kind::down_bias},
    };
    for (const auto & name : names) {
        const size_t length = std::strlen(name.suffix);
        if (std::strncmp(tensor->name + used, name.suffix, length) != 0) {
            continue;
        }
        const char * rest = tensor->name + used + length;
        if (*rest == '\0') {
            weight.kind = name.kind;
        } else if (std::strcmp(rest, ".lora_a") == 0 || std::strcmp(rest, ".lora_b") == 0) {
            weight.kind = weight_kind::lora;
        }
        weight.i_layer = i_layer;
    }
    return weight;
}

ffn_store * store_of(const ggml_tensor * tensor) {
    const weight_ref weight = weight_of(tensor);
    return is_ffn_weight(weight.kind) ? buffer_of(tensor->buffer)->stores[weight.i_layer].get() : nullptr;
}

std::vector<hot_neuron> hot_neurons(const plan & data, ggml_backend_dev_t device) {
    const std::vector<std::unique_ptr<gpu_store>> stores = stores_of(device);
    std::vector<hot_neuron> found(data.layers.size());
    for (size_t i = 0; i < found.size(); ++i) {
        if (data.layers[i].n_ff > 0) {
            const gpu_layer_shape shape = planned_shape(data, static_cast<int>(i), 1);
            const size_t i_store = store_index(stores, static_cast<int>(i), shape);
            found[i] = {stores[i_store]->neuron_bytes(shape), i_store + 1 < stores.size()};
        }
    }
    return found;
}

const hybrid_layer * hybrid_of(const ggml_tensor * tensor) {
    const weight_ref weight = weight_of(tensor);
    return is_ffn_weight(weight.kind) ? buffer_of(tensor->buffer)->hybrids[weight.i_layer].get() : nullptr;
}

// --- opened_plan ---

opened_plan::opened_plan(plan plan_data, const ggml_backend_powerinfer_options & plan_options, const kernel_table * plan_kernels)
    : data(std::move(plan_data)), options(plan_options), kernels(plan_kernels) {
    const size_t slash = data.base_path.find_last_of('/');
    name = "POWERINFER(" + (slash == std::string::npos ? data.base_path : data.base_path.substr(slash + 1)) + ")";
    buffer_type.iface = {};
    buffer_type.iface.get_name = buffer_type_name;
    buffer_type.iface.alloc_buffer = buffer_type_alloc;
    buffer_type.iface.get_alignment = buffer_type_alignment;
    buffer_type.iface.is_host = buffer_type_is_host;
    buffer_type.device = powerinfer_device();
    buffer_type.context = this;

    // The FFN tensors of the covered layers, biases and scales included: a scale left elsewhere would split the block.
    tensor_pattern = "^blk\\.(";
    bool any = false;
    for (size_t i = 0; i < data.layers.size(); ++i) {
        if (data.layers[i].n_ff > 0) {
            tensor_pattern += (any ? "|" : "") + std::to_string(i);
            any = true;
        }
    }
    tensor_pattern += ")\\.ffn_(gate|up|down)\\.(weight|bias|scale)$";
    layers.resize(data.layers.size());
    for (size_t i = 0; i < data.layers.size(); ++i) {
        layers[i].threshold = data.layers[i].threshold;
        layers[i].product_threshold = data.layers[i].product_threshold;
    }
}

void opened_plan::release() {
    if (n_refs_.fetch_sub(1) == 1) {
        delete this;
    }
}

void opened_plan::note(const std::string & text) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (!said.insert(text).second) {
            return;
        }
    }
    if (is_open && options.note != nullptr) {
        options.note(text.c_str(), options.note_user_data);
    } else {
        std::fprintf(stderr, "powerinfer: %s\n", text.c_str());
    }
}

void opened_plan::fail(const std::string & text) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (!error.empty()) {
            return;
        }
        error = text;
    }
    has_error = true;
    if (says_errors) {
        std::fprintf(stderr, "powerinfer: %s\n", text.c_str());
    }
}

status opened_plan::map_base() {
    // Which files hold the base: the one file, or every split beside the first.
    std::vector<std::string> paths = {data.base_path};
    const std::string first_split = "-00001-of-";
    const size_t at = data.base_path.rfind(first_split);
    if (at != std::string::npos && data.base_offset_bytes == 0) {
        const int n_splits = std::atoi(data.base_path.c_str() + at + first_split.size());
        for (int i = 2; i <= n_splits; ++i) {
            char number[16];
            std::snprintf(number, sizeof(number), "-%05d-of-", i);
            std::string path = data.base_path;
            paths.push_back(path.replace(at, first_split.size(), number));
        }
    }
    for (const std::string & path : paths) {
        std::shared_ptr<mapped_file> file;
        status result = mapped_file::open(path, file);
        if (!result.ok()) {
            return result;
        }
        FILE * stream = std::fopen(path.c_str(), "rb");
        if (stream == nullptr || std::fseek(stream, static_cast<long>(data.base_offset_bytes), SEEK_SET) != 0) {
            if (stream != nullptr) {
                std::fclose(stream);
            }
            return status::error(path + ": can't be read (" + std::strerror(errno) + "); check the path and permissions.");
        }
        gguf_init_params params = {true, nullptr};
        gguf_context * gguf = gguf_init_from_file_ptr(stream, params);
        std::fclose(stream);
        if (gguf == nullptr) {
            return status::error(path + ": not a readable GGUF; expected the base model of the plan; check the file.");
        }
        const uint64_t begin = gguf_get_data_offset(gguf);  // from the start of the file, not of the embedded GGUF
        for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
            const uint64_t offset = begin + gguf_get_tensor_offset(gguf, i);
            if (offset + gguf_get_tensor_size(gguf, i) <= file->size_bytes()) {
                resident_.emplace_back(gguf_get_tensor_name(gguf, i), file->data() + offset);
            }
        }
        gguf_free(gguf);
        base_files_.push_back(file);
        if (options.mlock && mlock(file->data(), file->size_bytes()) != 0) {
            return status::error(path + ": mlock of " + std::to_string(file->size_bytes()) + " bytes failed (" + std::strerror(errno) +
                                 "); raise the limit (ulimit -l) or load without mlock.");
        }
    }
    std::sort(resident_.begin(), resident_.end());
    return {};
}

const uint8_t * opened_plan::resident(const std::string & tensor_name) const {
    const auto found = std::lower_bound(resident_.begin(), resident_.end(), tensor_name,
                                        [](const auto & entry, const std::string & key) { return entry.first < key; });
    return found != resident_.end() && found->first == tensor_name ? found->second : nullptr;
}

namespace {

bool has_exact_zeros(activation_kind activation) {
    return activation == activation_kind::relu || activation == activation_kind::relu_sqr || activation == activation_kind::drelu;
}

// "3", "0-5, 7" for a list of ascending layer numbers.
std::string layer_list(const std::vector<int> & layers) {
    std::string text;
    for (size_t i = 0; i < layers.size();) {
        size_t end = i;
        while (end + 1 < layers.size() && layers[end + 1] == layers[end] + 1) {
            ++end;
        }
        text += (text.empty() ? "" : ", ") + std::to_string(layers[i]);
        if (end > i) {
            text += "-" + std::to_string(layers[end]);
        }
        i = end + 1;
    }
    return text;
}

// Does reading the predictor and its candidates cost fewer bytes than reading every gate row? From the plan's own figures.
bool predictor_pays(const plan & data, const plan_layer & layer) {
    const double row = 1.0;  // a gate, up and down row cost about the same
    const double n_ff = static_cast<double>(layer.n_ff);
    const double predictor = static_cast<double>(layer.fc1.size_bytes + layer.fc2.size_bytes);
    const double row_bytes = layer.ffn_down_t.size_bytes > 0 ? static_cast<double>(layer.ffn_down_t.size_bytes) / n_ff
                                                             : static_cast<double>(data.n_embd) * 34.0 / 32.0;
    const double candidates = layer.predictor_density > 0.0f ? layer.predictor_density : 1.0;
    return predictor / row_bytes + candidates * n_ff * row < n_ff * row;
}

}  // namespace

status opened_plan::choose_modes(ggml_backend_powerinfer_sparsity sparsity) {
    const bool zeros = has_exact_zeros(data.activation);
    const std::string where = data.path.empty() ? data.base_path : data.path;
    std::vector<int> no_predictor;
    std::vector<int> no_threshold;
    std::vector<int> by_mode[4];
    std::vector<ffn_mode> chosen(data.layers.size(), ffn_mode::dense);
    for (size_t i = 0; i < data.layers.size(); ++i) {
        const plan_layer & layer = data.layers[i];
        if (layer.n_ff == 0) {
            continue;
        }
        const bool has_predictor = layer.predictor != predictor_kind::none;
        const bool has_threshold = layers[i].threshold > 0.0f || layers[i].product_threshold > 0.0f;
        const ffn_mode without = has_threshold ? ffn_mode::threshold : zeros ? ffn_mode::exact : ffn_mode::dense;
        ffn_mode mode = ffn_mode::dense;
        switch (sparsity) {
            case GGML_POWERINFER_DENSE: mode = ffn_mode::dense; break;
            case GGML_POWERINFER_EXACT: mode = ffn_mode::exact; break;
            case GGML_POWERINFER_THRESHOLD:
                mode = has_threshold ? ffn_mode::threshold : ffn_mode::exact;
                if (!has_threshold) {
                    no_threshold.push_back(static_cast<int>(i));
                }
                break;
            case GGML_POWERINFER_PREDICTED:
                mode = has_predictor ? ffn_mode::predicted : ffn_mode::exact;
                if (!has_predictor) {
                    no_predictor.push_back(static_cast<int>(i));
                }
                break;
            case GGML_POWERINFER_AUTO: mode = has_predictor && predictor_pays(data, layer) ? ffn_mode::predicted : without; break;
            default: return status::error("sparsity: found mode number " + std::to_string(sparsity) + "; expected 0 to 4; use a known mode.");
        }
        chosen[i] = mode;
        by_mode[static_cast<int>(mode)].push_back(static_cast<int>(i));
    }

    std::vector<std::string> notes;
    auto fallback = [&](const std::string & text) -> status {
        if (options.strict) {
            return status::error(text);
        }
        notes.push_back(text);
        return {};
    };
    status result;
    if (!no_predictor.empty()) {
        result = fallback(where + ": no predictor in layer " + layer_list(no_predictor) +
                          "; `exact` is used there; use a plan with predictors, or another mode.");
    } else if (!no_threshold.empty()) {
        result = fallback(where + ": no threshold in layer " + layer_list(no_threshold) +
                          "; `exact` is used there; calibrate the plan (powerinfer profile) or use another mode.");
    } else if (sparsity == GGML_POWERINFER_EXACT && !zeros && data.activation != activation_kind::graph) {
        result = fallback(where + ": `exact` equals `dense` because this activation has no exact zeros; use `threshold`, or a ReLU model.");
    } else if (sparsity == GGML_POWERINFER_AUTO) {
        static const char * mode_names[] = {"dense", "exact", "threshold", "predicted"};
        std::string text = where + ": auto chose";
        bool any = false;
        for (int mode = 0; mode < 4; ++mode) {
            if (!by_mode[mode].empty()) {
                text += std::string(any ? "; " : " ") + mode_names[mode] + " for layer " + layer_list(by_mode[mode]);
                any = true;
            }
        }
        if (data.has_loss && !by_mode[static_cast<int>(ffn_mode::threshold)].empty()) {
            char loss[64];
            std::snprintf(loss, sizeof(loss), "; calibration measured %.2f %% higher perplexity", 100.0 * data.loss);
            text += loss;
        }
        notes.push_back(text + ".");
    }
    if (!result.ok()) {
        return result;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (size_t i = 0; i < layers.size(); ++i) {
            layers[i].mode = chosen[i];
        }
    }
    for (const std::string & text : notes) {
        note(text);
    }
    return {};
}

// --- device ---

namespace {

const char * device_name(ggml_backend_dev_t) { return "POWERINFER"; }

const char * device_description(ggml_backend_dev_t) {
    static const std::string text = [] {
        const kernel_table * kernels = kernel_table_select(std::getenv("POWERINFER_KERNELS"));
        return std::string("activation-sparse FFN, kernels ") + (kernels ? kernels->name : "none");
    }();
    return text.c_str();
}

void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = 0;
    *total = 0;
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    *props = {};
    props->name = device_name(device);
    props->description = device_description(device);
    props->type = device_type(device);
    props->caps.mmap_support = true;
}

// The plan that POWERINFER_PLAN names, for programs that can't pass overrides; opened when a model is first loaded.
// A plan that can't be opened still has a buffer type, and no backend starts: no context computes without it.
opened_plan * environment_plan() {
    static opened_plan * const instance = []() -> opened_plan * {
        const char * path = std::getenv("POWERINFER_PLAN");
        if (path == nullptr || *path == '\0') {
            return nullptr;
        }
        ggml_backend_powerinfer_options options = ggml_backend_powerinfer_default_options();
        char error[1024];
        ggml_backend_powerinfer_plan_t handle = ggml_backend_powerinfer_plan_open(path, nullptr, &options, error, sizeof(error));
        if (handle != nullptr) {
            opened_plan * opened = reinterpret_cast<opened_plan *>(handle);
            opened->says_errors = true;
            return opened;
        }
        std::fprintf(stderr, "powerinfer: POWERINFER_PLAN: %s\n", error);
        plan refusing;
        refusing.path = path;
        opened_plan * refused = new opened_plan(refusing, options, kernel_table_select(nullptr));
        refused->fail(error);
        return refused;
    }();
    return instance;
}

ggml_backend_t device_init_backend(ggml_backend_dev_t, const char *) {
    opened_plan * environment = environment_plan();
    return environment != nullptr && environment->data.layers.empty() ? nullptr : backend_create();
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t) {
    opened_plan * environment = environment_plan();
    return environment != nullptr ? &environment->buffer_type : ggml_backend_cpu_buffer_type();
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) { return backend_supports_op(op); }

bool device_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buffer_type) {
    return is_plan_buffer_type(buffer_type) || ggml_backend_buft_is_host(buffer_type);
}

const char * reg_name(ggml_backend_reg_t) { return "POWERINFER"; }
size_t reg_device_count(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t reg_device(ggml_backend_reg_t, size_t) { return powerinfer_device(); }

void * reg_proc_address(ggml_backend_reg_t, const char * name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(backend_set_n_threads);
    }
    return nullptr;
}

ggml_backend_reg * registration() {
    static ggml_backend_reg reg = {ggml_abi_api_version, {reg_name, reg_device_count, reg_device, reg_proc_address}, nullptr};
    return &reg;
}

}  // namespace

ggml_backend_dev_t powerinfer_device() {
    static ggml_backend_device device = [] {
        ggml_backend_device made = {};
        made.iface.get_name = device_name;
        made.iface.get_description = device_description;
        made.iface.get_memory = device_memory;
        made.iface.get_type = device_type;
        made.iface.get_props = device_props;
        made.iface.init_backend = device_init_backend;
        made.iface.get_buffer_type = device_buffer_type;
        made.iface.supports_op = device_supports_op;
        made.iface.supports_buft = device_supports_buft;
        made.reg = registration();
        return made;
    }();
    return &device;
}

}  // namespace powerinfer

// --- C interface ---

using namespace powerinfer;

namespace {

void put_error(const std::string & text, char * error, size_t error_size) {
    if (error != nullptr && error_size > 0) {
        std::snprintf(error, error_size, "%s", text.c_str());
    }
}

opened_plan * unwrap(ggml_backend_powerinfer_plan_t handle) { return reinterpret_cast<opened_plan *>(handle); }

ggml_backend_powerinfer_plan_t open_plan(plan & data, const ggml_backend_powerinfer_options * given, char * error, size_t error_size) {
    const ggml_backend_powerinfer_options options = given ? *given : ggml_backend_powerinfer_default_options();
    const char * wanted = options.kernels != nullptr ? options.kernels : std::getenv("POWERINFER_KERNELS");
    const kernel_table * kernels = kernel_table_select(wanted);
    if (kernels == nullptr) {
        std::string names;
        const kernel_table * const * tables = nullptr;
        const int n = kernel_table_list(&tables);
        for (int i = 0; i < n; ++i) {
            if (tables[i]->is_supported()) {
                names += (names.empty() ? "" : ", ") + std::string(tables[i]->name);
            }
        }
        put_error(std::string("kernels: found '") + (wanted ? wanted : "") + "'; this CPU runs: " + names + "; choose one of these.",
                  error, error_size);
        return nullptr;
    }
    if (ggml_backend_powerinfer_reg() == nullptr) {
        put_error(ggml_abi_check(ggml_abi_version()).text(), error, error_size);
        return nullptr;
    }
    int n_covered = 0;
    for (const plan_layer & layer : data.layers) {
        n_covered += layer.n_ff > 0 ? 1 : 0;
    }
    if (n_covered == 0) {
        put_error((data.path.empty() ? data.base_path : data.path) +
                  ": no layer has a dense FFN with separate up and down matrices; at least one is needed; use another model "
                  "(powerinfer inspect lists the reasons).", error, error_size);
        return nullptr;
    }
    opened_plan * opened = new opened_plan(std::move(data), options, kernels);
    status result = options.mapped ? opened->map_base() : status();
    if (result.ok()) {
        result = opened->choose_modes(options.sparsity);
    }
    if (!result.ok()) {
        put_error(result.text(), error, error_size);
        opened->release();
        return nullptr;
    }
    ggml_backend_register(ggml_backend_powerinfer_reg());
    return reinterpret_cast<ggml_backend_powerinfer_plan_t>(opened);
}

const char * stored_type(const row_matrix & matrix) {
    return matrix.n > 0 ? ggml_type_name(static_cast<ggml_type>(matrix.row_type)) : "";
}

}  // namespace

const char * ggml_backend_powerinfer_version(void) { return POWERINFER_VERSION; }

ggml_backend_reg_t ggml_backend_powerinfer_reg(void) {
    static ggml_backend_reg_t const instance = []() -> ggml_backend_reg_t {
        const status result = ggml_abi_check(ggml_abi_version());
        if (!result.ok()) {
            std::fprintf(stderr, "%s\n", result.text().c_str());
            return nullptr;
        }
        return registration();
    }();
    return instance;
}

ggml_backend_powerinfer_options ggml_backend_powerinfer_default_options(void) {
    ggml_backend_powerinfer_options options = {};
    options.sparsity = GGML_POWERINFER_AUTO;
    return options;
}

ggml_backend_powerinfer_plan_t ggml_backend_powerinfer_plan_open(
    const char * path, const char * path_base, const ggml_backend_powerinfer_options * options, char * error, size_t error_size) {
    plan data;
    const status result = plan_read(path, path_base ? path_base : "", data);
    if (!result.ok()) {
        put_error(result.text(), error, error_size);
        return nullptr;
    }
    return open_plan(data, options, error, error_size);
}

ggml_backend_powerinfer_plan_t ggml_backend_powerinfer_plan_open_bare(
    const char * path_base, const ggml_backend_powerinfer_options * options, char * error, size_t error_size) {
    plan data;
    const status result = plan_from_base(path_base, data);
    if (!result.ok()) {
        put_error(result.text(), error, error_size);
        return nullptr;
    }
    return open_plan(data, options, error, error_size);
}

void ggml_backend_powerinfer_plan_free(ggml_backend_powerinfer_plan_t handle) {
    if (handle != nullptr) {
        // Buffers may outlive the handle; the caller's callbacks may not.
        opened_plan * self = unwrap(handle);
        self->is_open = false;
        ggml_backend_powerinfer_plan_set_capture(handle, nullptr, nullptr);
        ggml_backend_powerinfer_plan_set_trace(handle, nullptr, nullptr);
        self->release();
    }
}

const char * ggml_backend_powerinfer_plan_base_path(ggml_backend_powerinfer_plan_t handle) {
    return unwrap(handle)->data.base_path.c_str();
}

uint64_t ggml_backend_powerinfer_plan_base_offset(ggml_backend_powerinfer_plan_t handle) {
    return unwrap(handle)->data.base_offset_bytes;
}

const char * ggml_backend_powerinfer_plan_tensor_pattern(ggml_backend_powerinfer_plan_t handle) {
    return unwrap(handle)->tensor_pattern.c_str();
}

ggml_backend_buffer_type_t ggml_backend_powerinfer_plan_buffer_type(ggml_backend_powerinfer_plan_t handle) {
    return &unwrap(handle)->buffer_type;
}

namespace {

status check_split(const opened_plan & self, const ggml_backend_powerinfer_split & split) {
    const std::string where = self.data.path.empty() ? self.data.base_path : self.data.path;
    if (split.n_devices < 1 || split.n_devices > 16 || split.max_tokens < 1) {
        return status::error(where + ": split: found " + std::to_string(split.n_devices) + " devices and room for " + std::to_string(split.max_tokens) +
                             " tokens; expected 1 to 16, and at least 1; name the devices.");
    }
    for (int i = 0; i < split.n_devices; ++i) {
        const ggml_backend_dev_t device = split.devices[i];
        const enum ggml_backend_dev_type type = ggml_backend_dev_type(device);
        if (type != GGML_BACKEND_DEVICE_TYPE_GPU && type != GGML_BACKEND_DEVICE_TYPE_IGPU) {
            return status::error(where + ": split: device " + ggml_backend_dev_name(device) + " isn't a GPU; expected one; name a GPU device.");
        }
    }
    for (int64_t i = 0; i < self.data.n_layer; ++i) {
        const int i_device = split.i_device ? split.i_device[i] : 0;
        if (split.n_hot[i] < 0 || split.n_hot[i] > self.data.layers[i].n_ff || i_device < 0 || i_device >= split.n_devices) {
            return status::error(where + ": split: layer " + std::to_string(i) + " has " + std::to_string(split.n_hot[i]) + " hot neurons on device number " +
                                 std::to_string(i_device) + "; expected 0 to " + std::to_string(self.data.layers[i].n_ff) + " on one of " +
                                 std::to_string(split.n_devices) + "; place the model again (powerinfer place).");
        }
    }
    if (self.options.count) {
        return status::error(where + ": split: activations are being counted; expected every neuron on the CPU; profile without a VRAM budget.");
    }
    return {};
}

}  // namespace

bool ggml_backend_powerinfer_plan_set_split(
    ggml_backend_powerinfer_plan_t handle, const ggml_backend_powerinfer_split * split, char * error, size_t error_size) {
    opened_plan * self = unwrap(handle);
    const status result = check_split(*self, *split);
    if (!result.ok()) {
        put_error(result.text(), error, error_size);
        return false;
    }
    plan_split & own = self->split;
    own.devices.assign(split->devices, split->devices + split->n_devices);
    own.n_hot.assign(split->n_hot, split->n_hot + self->data.n_layer);
    own.i_device.assign(self->data.n_layer, 0);
    if (split->i_device != nullptr) {
        own.i_device.assign(split->i_device, split->i_device + self->data.n_layer);
    }
    own.max_tokens = split->max_tokens;
    own.stream_tokens = split->stream_tokens;
    return true;
}

bool ggml_backend_powerinfer_plan_split_bytes(
    ggml_backend_powerinfer_plan_t handle, const ggml_backend_powerinfer_split * split, uint64_t * row_bytes, uint64_t * scratch_bytes,
    char * error, size_t error_size) {
    const opened_plan * self = unwrap(handle);
    const status result = check_split(*self, *split);
    if (!result.ok()) {
        put_error(result.text(), error, error_size);
        return false;
    }
    for (int i_device = 0; i_device < split->n_devices; ++i_device) {
        const ggml_backend_dev_t device = split->devices[i_device];
        const std::vector<std::unique_ptr<gpu_store>> stores = stores_of(device);
        std::vector<std::vector<gpu_layer_shape>> shapes(stores.size());
        row_bytes[i_device] = scratch_bytes[i_device] = 0;
        for (int i = 0; i < static_cast<int>(self->data.n_layer); ++i) {
            if (self->data.layers[i].n_ff > 0 && (split->i_device ? split->i_device[i] : 0) == i_device) {
                gpu_layer_shape shape = planned_shape(self->data, i, split->n_hot[i]);
                shape.streams = stream_tokens_of(device, shape, split->stream_tokens) > 0;
                if (shape.n_hot == 0 && !shape.streams) {
                    continue;  // the CPU's alone
                }
                const size_t i_store = store_index(stores, i, shape);
                row_bytes[i_device] += stores[i_store]->rows_bytes(shape);
                shapes[i_store].push_back(shape);
            }
        }
        for (size_t i = 0; i < stores.size(); ++i) {
            scratch_bytes[i_device] += shapes[i].empty() ? 0 : stores[i]->scratch_bytes(shapes[i], split->max_tokens);
        }
    }
    return true;
}

uint64_t ggml_backend_powerinfer_plan_neuron_bytes(ggml_backend_powerinfer_plan_t handle, ggml_backend_dev_t device, int i_layer) {
    const plan & data = unwrap(handle)->data;
    if (i_layer < 0 || i_layer >= data.n_layer || data.layers[i_layer].n_ff == 0) {
        return 0;
    }
    const gpu_layer_shape shape = planned_shape(data, i_layer, 1);
    const std::vector<std::unique_ptr<gpu_store>> stores = stores_of(device);
    return stores[store_index(stores, i_layer, shape)]->neuron_bytes(shape);
}

uint64_t ggml_backend_powerinfer_plan_device_bytes(ggml_backend_powerinfer_plan_t handle, int i_device) {
    opened_plan * self = unwrap(handle);
    std::lock_guard<std::mutex> lock(self->mutex);
    uint64_t bytes = 0;
    for (const void * item : self->buffers) {
        const auto & stores = static_cast<const plan_buffer *>(item)->gpu_stores;
        if (i_device >= 0 && i_device < static_cast<int>(stores.size())) {
            for (const auto & store : stores[i_device]) {
                bytes += store->memory_bytes();
            }
        }
    }
    return bytes;
}

void ggml_backend_powerinfer_plan_set_trace(
    ggml_backend_powerinfer_plan_t handle, ggml_backend_powerinfer_trace_t trace, void * user_data) {
    opened_plan * self = unwrap(handle);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->trace = trace;
    self->trace_user_data = user_data;
    self->counts_hot = trace != nullptr;
}

bool ggml_backend_powerinfer_plan_check(ggml_backend_powerinfer_plan_t handle, char * error, size_t error_size) {
    opened_plan * self = unwrap(handle);
    std::string found;
    std::vector<int> missing;
    std::vector<int> slow;
    std::vector<int> derived;
    std::string slow_types;
    {
        std::lock_guard<std::mutex> lock(self->mutex);
        found = self->error;
        std::vector<const ffn_store *> stores(self->data.layers.size(), nullptr);
        for (const void * item : self->buffers) {
            const plan_buffer * buffer = static_cast<const plan_buffer *>(item);
            for (size_t i = 0; i < stores.size(); ++i) {
                if (buffer->stores[i] != nullptr) {
                    stores[i] = buffer->stores[i].get();
                }
            }
        }
        for (size_t i = 0; i < stores.size(); ++i) {
            if (self->data.layers[i].n_ff == 0) {
                continue;
            }
            if (stores[i] == nullptr || !stores[i]->is_complete()) {
                missing.push_back(static_cast<int>(i));
                continue;
            }
            const ffn_layer & layer = stores[i]->layer();
            bool is_slow = false;
            for (const row_matrix * m : {&layer.first, &layer.second, &layer.down, &layer.fc1, &layer.fc2}) {
                if (m->n > 0 && m->kernels == nullptr) {
                    is_slow = true;
                    const std::string type = stored_type(*m);
                    if (slow_types.find(type) == std::string::npos) {
                        slow_types += (slow_types.empty() ? "" : ", ") + type;
                    }
                }
            }
            if (is_slow) {
                slow.push_back(static_cast<int>(i));
            }
            const int base_down = stores[i]->base_down_type();
            if (stores[i]->derives_down() && base_down != layer.down.row_type) {
                derived.push_back(static_cast<int>(i));
            }
        }
    }
    const std::string where = self->data.path.empty() ? self->data.base_path : self->data.path;
    if (found.empty() && !missing.empty()) {
        found = where + ": the loaded model has no complete FFN for layer " + layer_list(missing) +
                "; the plan expects gate, up and down there; use the base model that the plan was made from.";
    }
    if (found.empty() && !slow.empty()) {
        const std::string text = where + ": rows of type " + slow_types + " in layer " + layer_list(slow) +
            " have no fast kernel and are unpacked one by one (slow); convert the model to q4_0, q4_1, q5_0, q5_1,"
            " q8_0, q4_K, q5_K, q6_K, iq4_nl, f16, bf16 or f32.";
        if (self->options.strict) {
            found = text;
        } else {
            self->note(text);
        }
    }
    if (!found.empty()) {
        put_error(found, error, error_size);
        return false;
    }
    if (!derived.empty()) {
        char text[512];
        std::snprintf(text, sizeof(text), "%s: the plan stores no neuron-major down rows; they were re-quantized along the neuron to q8_0 "
                      "(or f16), and the FFN holds %.0f MB; a plan with ffn_down_t is smaller and exact.", where.c_str(),
                      static_cast<double>(ggml_backend_powerinfer_plan_memory_bytes(handle)) / 1e6);
        self->note(text);
    }
    return true;
}

bool ggml_backend_powerinfer_plan_set_sparsity(
    ggml_backend_powerinfer_plan_t handle, ggml_backend_powerinfer_sparsity sparsity, char * error, size_t error_size) {
    const status result = unwrap(handle)->choose_modes(sparsity);
    if (!result.ok()) {
        put_error(result.text(), error, error_size);
    }
    return result.ok();
}

bool ggml_backend_powerinfer_plan_set_thresholds(
    ggml_backend_powerinfer_plan_t handle, int i_layer, float threshold, float product_threshold) {
    opened_plan * self = unwrap(handle);
    std::lock_guard<std::mutex> lock(self->mutex);
    if (i_layer < 0 || i_layer >= static_cast<int>(self->layers.size()) || !(threshold >= 0.0f) || !(product_threshold >= 0.0f)) {
        return false;
    }
    self->layers[i_layer].threshold = threshold;
    self->layers[i_layer].product_threshold = product_threshold;
    return true;
}

void ggml_backend_powerinfer_plan_stats(ggml_backend_powerinfer_plan_t handle, ggml_backend_powerinfer_stats * stats) {
    opened_plan * self = unwrap(handle);
    std::lock_guard<std::mutex> lock(self->mutex);
    *stats = self->stats;
}

void ggml_backend_powerinfer_plan_reset_stats(ggml_backend_powerinfer_plan_t handle) {
    opened_plan * self = unwrap(handle);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->stats = {};
    for (layer_state & layer : self->layers) {
        layer.n_tokens = 0;
        layer.n_candidates = 0;
        layer.n_active = 0;
    }
}

int ggml_backend_powerinfer_plan_n_layer(ggml_backend_powerinfer_plan_t handle) {
    return static_cast<int>(unwrap(handle)->data.n_layer);
}

int64_t ggml_backend_powerinfer_plan_n_embd(ggml_backend_powerinfer_plan_t handle) { return unwrap(handle)->data.n_embd; }

bool ggml_backend_powerinfer_plan_layer(ggml_backend_powerinfer_plan_t handle, int i_layer, ggml_backend_powerinfer_layer * out) {
    opened_plan * self = unwrap(handle);
    if (i_layer < 0 || i_layer >= self->data.n_layer) {
        return false;
    }
    std::lock_guard<std::mutex> lock(self->mutex);
    const layer_state & state = self->layers[i_layer];
    *out = {};
    out->n_ff = self->data.layers[i_layer].n_ff;
    static const ggml_backend_powerinfer_sparsity modes[] = {GGML_POWERINFER_DENSE, GGML_POWERINFER_EXACT, GGML_POWERINFER_THRESHOLD,
                                                             GGML_POWERINFER_PREDICTED};
    out->sparsity = modes[static_cast<int>(state.mode)];
    out->gate_type = out->up_type = out->down_type = out->device = "";
    for (const void * item : self->buffers) {
        const hybrid_layer * hybrid = static_cast<const plan_buffer *>(item)->hybrids[i_layer].get();
        if (hybrid != nullptr && hybrid->n_hot > 0) {
            out->n_hot = hybrid->n_hot;
            out->device = ggml_backend_dev_name(self->split.devices[self->split.i_device[i_layer]]);
        }
        const ffn_store * store = static_cast<const plan_buffer *>(item)->stores[i_layer].get();
        if (store != nullptr) {
            const ffn_layer & layer = store->layer();
            out->gate_type = layer.gated ? stored_type(layer.first) : "";
            out->up_type = stored_type(layer.gated ? layer.second : layer.first);
            out->down_type = stored_type(layer.down);
        }
    }
    out->n_tokens = state.n_tokens;
    out->n_candidates = state.n_candidates;
    out->n_active = state.n_active;
    return true;
}

uint64_t ggml_backend_powerinfer_plan_memory_bytes(ggml_backend_powerinfer_plan_t handle) {
    opened_plan * self = unwrap(handle);
    std::lock_guard<std::mutex> lock(self->mutex);
    uint64_t bytes = 0;
    for (const void * item : self->buffers) {
        for (const auto & store : static_cast<const plan_buffer *>(item)->stores) {
            bytes += store ? store->memory_bytes() : 0;
        }
    }
    return bytes;
}

const char * ggml_backend_powerinfer_plan_kernels(ggml_backend_powerinfer_plan_t handle) { return unwrap(handle)->kernels->name; }

bool ggml_backend_powerinfer_plan_counts(ggml_backend_powerinfer_plan_t handle, int i_layer, ggml_backend_powerinfer_counts * counts) {
    opened_plan * self = unwrap(handle);
    if (i_layer < 0 || i_layer >= self->data.n_layer || !self->options.count) {
        return false;
    }
    std::lock_guard<std::mutex> lock(self->mutex);
    const layer_state & state = self->layers[i_layer];
    const plan_layer & layer = self->data.layers[i_layer];
    counts->n_tokens = state.count_tokens;
    for (int64_t i = 0; i < layer.n_ff; ++i) {
        const int64_t base = layer.neuron_order.empty() ? i : layer.neuron_order[i];
        if (counts->active != nullptr) {
            counts->active[base] = state.active.empty() ? 0 : state.active[i];
        }
        if (counts->gate_abs_sum != nullptr) {
            counts->gate_abs_sum[base] = state.gate_abs_sum.empty() ? 0.0 : state.gate_abs_sum[i];
        }
    }
    for (int i = 0; i < ffn_n_bins; ++i) {
        if (counts->gate_histogram != nullptr) {
            counts->gate_histogram[i] = state.gate_histogram.empty() ? 0 : state.gate_histogram[i];
        }
        if (counts->product_histogram != nullptr) {
            counts->product_histogram[i] = state.product_histogram.empty() ? 0 : state.product_histogram[i];
        }
    }
    return true;
}

void ggml_backend_powerinfer_plan_reset_counts(ggml_backend_powerinfer_plan_t handle) {
    opened_plan * self = unwrap(handle);
    std::lock_guard<std::mutex> lock(self->mutex);
    for (layer_state & layer : self->layers) {
        layer.count_tokens = 0;
        layer.active.clear();
        layer.gate_abs_sum.clear();
        layer.gate_histogram.clear();
        layer.product_histogram.clear();
    }
}

void ggml_backend_powerinfer_plan_set_capture(
    ggml_backend_powerinfer_plan_t handle, ggml_backend_powerinfer_capture_t capture, void * user_data) {
    opened_plan * self = unwrap(handle);
    std::lock_guard<std::mutex> lock(self->mutex);
    self->capture = capture;
    self->capture_user_data = user_data;
}

int ggml_backend_powerinfer_inspect_path(
    const char * model_path, char * sidecar_path, size_t sidecar_size, char * error, size_t error_size) {
    model_file_kind kind;
    const status result = model_file_kind_of(model_path, kind);
    if (!result.ok()) {
        put_error(result.text(), error, error_size);
        return -1;
    }
    const std::string sidecar = kind == model_file_kind::plain ? plan_find_sidecar(model_path) : "";
    if (sidecar_path != nullptr && sidecar_size > 0) {
        std::snprintf(sidecar_path, sidecar_size, "%s", sidecar.c_str());
    }
    return kind == model_file_kind::extended ? 1 : 0;
}
