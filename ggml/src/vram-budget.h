// What goes to the GPU within a memory budget: whole dense blocks first, then single FFN neurons. Sizes of dense parts come
// from a dry run of libllama itself, which loads no weights. Linked into the programs that load models.
#pragma once

#include "model-load.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace powerinfer {

// One amount of a budget text: bytes, or a share of the device's memory.
struct budget_amount {
    double value = 0.0;  // bytes, or 0 .. 1
    bool is_share = false;
};

// Reads "8" (GiB), "8GiB", "512MiB", "75%", and lists of them with commas, one for each device.
status budget_parse(const std::string & text, std::vector<budget_amount> & out);

struct budget_request {
    std::string budget;                       // text; empty: none given
    std::vector<ggml_backend_dev_t> devices;  // empty: as libllama chooses
    bool cpu_only = false;                    // no device was asked for
    bool has_n_gpu_layers = false;            // params.n_gpu_layers is the user's, not ours to choose
    bool reset_index = false;                 // a saved placement isn't used
    bool disable_index = false;               // no single neurons on the GPU, only whole dense blocks
    bool require_split = false;               // it is an error when no neuron is on the GPU
    bool strict = false;                      // a fallback is an error instead of a note
};

// Bytes by kind on one device, or on the CPU (whose budget_bytes is 0).
struct memory_use {
    std::string name;
    uint64_t budget_bytes = 0;
    uint64_t weights_bytes = 0;     // outside of the plan's FFN
    uint64_t kv_bytes = 0;          // KV cache, recurrent state
    uint64_t compute_bytes = 0;     // buffers of the graphs
    uint64_t scratch_bytes = 0;     // of the FFN's hot part
    uint64_t predictor_bytes = 0;
    uint64_t ffn_bytes = 0;         // neurons

    uint64_t dense_bytes() const { return weights_bytes + kv_bytes + compute_bytes; }
    uint64_t total_bytes() const { return dense_bytes() + scratch_bytes + predictor_bytes + ffn_bytes; }
};

// What was decided. apply() puts it into the parameters of the load.
struct budget_decision {
    bool is_measured = false;               // memory was measured: a budget was given and a device is there
    bool is_cpu_only = false;
    std::vector<ggml_backend_dev_t> devices;
    int32_t n_gpu_layers = 0;
    int32_t n_layer = 0;
    std::vector<float> tensor_split;        // (llama_max_devices), empty: libllama's own
    std::vector<int64_t> n_hot;             // (n_layer) of the plan; empty: no split
    std::vector<int32_t> i_device;          // (n_layer)
    std::vector<uint64_t> hot_bytes;        // (n_devices) left for rows of hot neurons
    bool is_saved = false;                  // the plan's saved placement
    int64_t max_tokens = 0;                 // n_ubatch
    int64_t stream_tokens = -1;             // as in ggml-powerinfer.h: 0 as op_offload would, -1 never
    bool only_streams = false;              // no neuron is hot, and the device computes prompts if it asks for them
    double share_neurons = 0.0;
    double share_activations = 0.0;
    std::vector<memory_use> gpus;
    memory_use cpu;
    std::string split_text;                 // "FFN split: ...", one line; empty when nobody asked and there is no GPU
    std::vector<std::string> notes;         // fallbacks
    int n_dry_runs = 0;
    double dry_run_s = 0.0;                 // all of them

    // Sets devices, n_gpu_layers and tensor_split of params, which then points into this object.
    void set_params(llama_model_params & params);

    // The split of the plan's neurons; points into this object.
    ggml_backend_powerinfer_split split() const;

    // set_params, and the plan's split. Before the model is loaded.
    status apply(ggml_backend_powerinfer_plan_t plan, llama_model_params & params);

    // The bytes by kind, in MiB, one column per device and one for the CPU; lines end in newlines.
    std::string table() const;

private:
    std::vector<ggml_backend_dev_t> device_list_;  // as params wants it: nullptr at the end
};

// The context that the program will make; asked with a model that has no weights yet.
using make_context_params = std::function<llama_context_params(const llama_model *)>;

// plan: nullptr when libllama computes all of `path`. params: as for the load. `path` names the model in messages.
status budget_decide(ggml_backend_powerinfer_plan_t plan, const std::string & path, const llama_model_params & params,
                     const make_context_params & context_params, const budget_request & request, budget_decision & out);

// Is there a GPU device? llama_supports_gpu_offload says yes for a build with RPC that no server was added to.
bool has_gpu_device();

// Sets the request's devices by their names, with commas between; "none": cpu_only.
status find_devices(const std::string & names, budget_request & out);

// Adds the devices of ggml RPC servers: HOST:PORT, with commas between.
status add_rpc_servers(const std::string & addresses);

}  // namespace powerinfer
