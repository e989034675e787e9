// FFN blocks found in a ggml graph, and what a single node is when its block isn't whole.
// At compute time only pointers between nodes of one split are followed: an input may be a copy without a history.
#pragma once

#include "device.h"

#include <vector>

namespace powerinfer {

// A block whose every node is in the graph: x -> gate, up -> activation -> down (-> bias).
struct ffn_block {
    opened_plan * owner = nullptr;
    int i_layer = -1;
    const ffn_store * store = nullptr;
    ffn_activation activation = ffn_activation::silu;
    bool has_biases = false;
    const ggml_tensor * x = nullptr;
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

// The activation that a node of role activated/product stands for in the graph itself. false: none that we know.
bool graph_activation(const ggml_tensor * node, ffn_activation & out);

// The activation to compute for a layer: the plan's, else the graph's. false: neither is known to us.
bool block_activation(const opened_plan & owner, const ggml_tensor * node, ffn_activation & out);

}  // namespace powerinfer
