// What device.cpp and backend.cpp share: the opened plan, its buffers, and which tensor is which weight.
#pragma once

#include "ffn-hybrid.h"
#include "ggml-abi.h"
#include "ggml-powerinfer.h"
#include "plan.h"

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace powerinfer {

// State of one layer of an opened plan that changes while it runs.
struct layer_state {
    ffn_mode mode = ffn_mode::dense;
    float threshold = 0.0f;
    float product_threshold = 0.0f;
    uint64_t n_tokens = 0;
    uint64_t n_candidates = 0;
    uint64_t n_active = 0;
    uint64_t count_tokens = 0;
    std::vector<uint64_t> active;             // (n_ff) position order
    std::vector<double> gate_abs_sum;         // (n_ff)
    std::vector<uint64_t> gate_histogram;     // (ffn_n_bins)
    std::vector<uint64_t> product_histogram;  // (ffn_n_bins)
};

// Where hot neurons go; no devices: everything is on the CPU.
struct plan_split {
    std::vector<ggml_backend_dev_t> devices;
    std::vector<int64_t> n_hot;     // (n_layer)
    std::vector<int> i_device;      // (n_layer)
    int64_t max_tokens = 0;
    int64_t stream_tokens = 0;      // as in ggml-powerinfer.h
};

// Reference-counted: the public handle holds one, every buffer of the plan's type another.
class opened_plan {
public:
    opened_plan(plan data, const ggml_backend_powerinfer_options & options, const kernel_table * kernels);

    const plan data;
    const ggml_backend_powerinfer_options options;
    const kernel_table * const kernels;
    ggml_backend_buffer_type buffer_type;
    std::string name;
    std::string tensor_pattern;
    plan_split split;  // before the model is loaded

    // Guards everything below.
    std::mutex mutex;
    std::vector<layer_state> layers;
    ggml_backend_powerinfer_stats stats = {};
    std::string error;  // first error met while weights came in or a graph ran; the plan computes nothing from then on
    std::set<std::string> said;
    std::set<const void *> buffers;  // live plan_buffers
    ggml_backend_powerinfer_capture_t capture = nullptr;
    void * capture_user_data = nullptr;
    ggml_backend_powerinfer_trace_t trace = nullptr;
    void * trace_user_data = nullptr;
    std::atomic<bool> has_error{false};
    std::atomic<bool> counts_hot{false};  // while there is a trace
    bool says_errors = false;        // nobody calls plan_check for the environment's plan: errors go to stderr at once
    std::atomic<bool> is_open{true};  // the public handle is alive: its note callback may be called
    std::atomic<int> n_down_loras{0};  // LoRA matrices of down projections in live buffers: blocks then run op by op

    void note(const std::string & text);       // once per text
    void fail(const std::string & text);       // records it
    status choose_modes(ggml_backend_powerinfer_sparsity sparsity);  // sets layers[].mode; notes or (strict) an error

    void retain() { n_refs_.fetch_add(1); }
    void release();

    // The base tensors in a mapping of ours, for `mapped`; nullptr when not found. Filled by map_base().
    status map_base();
    const uint8_t * resident(const std::string & tensor_name) const;

private:
    std::atomic<int> n_refs_{1};
    std::vector<std::shared_ptr<mapped_file>> base_files_;
    std::vector<std::pair<std::string, const uint8_t *>> resident_;
};

enum class weight_kind { none, gate, up, down, gate_bias, up_bias, down_bias, lora };

// Which weight a tensor in a buffer of ours is, by its exact name. i_layer is set unless none.
struct weight_ref {
    opened_plan * owner = nullptr;
    weight_kind kind = weight_kind::none;
    int i_layer = -1;
};

// One buffer of a plan's type: repacked FFN weights, and plain tensors (LoRA, op-by-op results) at their addresses.
struct plan_buffer {
    opened_plan * owner;
    huge_block memory;
    std::vector<std::unique_ptr<ffn_store>> stores;  // (n_layer), null for layers without a tensor here
    std::vector<std::vector<std::unique_ptr<gpu_store>>> gpu_stores;  // per device of the split; made with its first layer
    std::vector<std::unique_ptr<hybrid_layer>> hybrids;  // (n_layer), null for layers that are on the CPU alone
    std::deque<weight_ref> weights;  // what the buffer's tensors are; their `extra` points here
    int n_down_loras = 0;
};

opened_plan * plan_of(const ggml_tensor * tensor);  // nullptr when the tensor isn't in a buffer of ours
weight_ref weight_of(const ggml_tensor * tensor);
ffn_store * store_of(const ggml_tensor * tensor);   // the repacked weights of the tensor's layer, or nullptr

// A hot neuron of a layer on a device, before anything is loaded.
struct hot_neuron {
    uint64_t bytes = 0;           // 0: the layer isn't covered
    bool skips_inactive = false;  // our kernels compute the layer
};
std::vector<hot_neuron> hot_neurons(const plan & data, ggml_backend_dev_t device);  // (n_layer)

const hybrid_layer * hybrid_of(const ggml_tensor * tensor);  // the layer's split, or nullptr

bool is_plan_buffer_type(ggml_backend_buffer_type_t buffer_type);

ggml_backend_dev_t powerinfer_device();
ggml_backend_t backend_create();          // backend.cpp
bool backend_supports_op(const ggml_tensor * op);  // graph-match.cpp

void backend_set_n_threads(ggml_backend_t backend, int n_threads);

}  // namespace powerinfer
