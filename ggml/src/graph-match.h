// FFN blocks found in a ggml graph, and what a single node is when its block isn't whole.
// At compute time only pointers between nodes of one split are followed: an input may be a copy without a history.
#pragma once

#include "device.h"

#include <vector>

namespace powerinfer {

// A block whose every node is in the graph: x -> gate, up -> activation -> down (-> bias) (-> addition of the residual).
struct ffn_block {
    opened_plan * owner = nullptr;
    int i_layer = -1;
    const ffn_store * store = nullptr;
    const hybrid_layer * hybrid = nullptr;  // nullptr: the CPU computes all of it
    ffn_activation activation = ffn_activation::silu;
    bool has_biases = false;
    const ggml_tensor * x = nullptr;
    const ggml_tensor * residual = nullptr;  // what the block adds to its output and its predictor reads; nullptr: neither
    ggml_tensor * out = nullptr;
    std::vector<int> nodes;  // indices in the graph, ascending; the block runs at the last one
};

// Blocks of `nodes` (a split's nodes in order), by their last node.
std::vector<ffn_block> match_blocks(const std::vector<ggml_tensor *> & nodes);

// What a node computes between gate/up and down.
enum class node_role { none, pre_activation, activated, product, down };

struct node_match {
    node_role role = node_role::none;
    opened_plan * owner = nullptr;
    int i_layer = -1;
    bool is_last_activation = false;  // for `activated`: further activation nodes upstream of it already ran
};

// Follows elementwise operations back to a mat-mul with a weight of ours.
node_match match_node(const ggml_tensor * node);

// The addition that joins a layer's residual stream, for plans whose predictors read it. The residual is the tensor that the norm
// before the FFN reads: ADD(ffn, residual), or with attention beside the FFN ADD(ADD(ffn, attention), residual).
// Recognised while the scheduler assigns nodes, when the graph is still whole.
struct residual_add {
    opened_plan * owner = nullptr;  // nullptr: `node` is no such addition
    int i_layer = -1;
    bool is_apart = false;  // the second form: other nodes lie between the block and it
};
residual_add match_residual_add(const ggml_tensor * node);

// The activation that a node of role activated/product stands for in the graph itself. false: none that we know.
bool graph_activation(const ggml_tensor * node, ffn_activation & out);

// The activation to compute for a layer: the plan's, else the graph's. false: neither is known to us.
bool block_activation(const opened_plan & owner, const ggml_tensor * node, ffn_activation & out);

}  // namespace powerinfer
