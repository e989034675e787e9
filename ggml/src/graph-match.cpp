// Finds FFN blocks in a split's nodes, and says what single nodes are when a block isn't whole.
#include "graph-match.h"

#include <algorithm>

namespace powerinfer {

namespace {

constexpr int max_chain = 16;  // elementwise nodes between a weight and its activation

bool is_plain_f32(const ggml_tensor * tensor) { return tensor->type == GGML_TYPE_F32 && tensor->nb[0] == sizeof(float); }

bool is_known_unary(const ggml_tensor * node, ffn_activation & out) {
    if (node->op != GGML_OP_UNARY) {
        return false;
    }
    switch (ggml_get_unary_op(node)) {
        case GGML_UNARY_OP_RELU:       out = ffn_activation::relu; return true;
        case GGML_UNARY_OP_SILU:       out = ffn_activation::silu; return true;
        case GGML_UNARY_OP_GELU:       out = ffn_activation::gelu; return true;
        case GGML_UNARY_OP_GELU_ERF:   out = ffn_activation::gelu_erf; return true;
        case GGML_UNARY_OP_GELU_QUICK: out = ffn_activation::gelu_quick; return true;
        default: return false;
    }
}

bool is_gelu(ffn_activation activation) {
    return activation == ffn_activation::gelu || activation == ffn_activation::gelu_erf || activation == ffn_activation::gelu_quick;
}

// A product with a LoRA matrix of ours, or its scaled value.
bool is_lora_value(const ggml_tensor * node) {
    if (node->op == GGML_OP_SCALE && node->src[0] != nullptr) {
        node = node->src[0];
    }
    return node->op == GGML_OP_MUL_MAT && weight_of(node->src[0]).kind == weight_kind::lora;
}

node_match match(const ggml_tensor * node, int depth) {
    node_match none;
    if (node == nullptr || depth > max_chain) {
        return none;
    }
    node_match found;
    auto with_role = [](node_match m, node_role role) {
        m.role = role;
        return m;
    };
    switch (node->op) {
        case GGML_OP_MUL_MAT: {
            const weight_ref weight = weight_of(node->src[0]);
            if (weight.kind == weight_kind::gate || weight.kind == weight_kind::up || weight.kind == weight_kind::down) {
                found.role = weight.kind == weight_kind::down ? node_role::down : node_role::pre_activation;
                found.owner = weight.owner;
                found.i_layer = weight.i_layer;
                return found;
            }
            return none;
        }
        case GGML_OP_ADD: {
            const node_match left = match(node->src[0], depth + 1);
            if (left.role == node_role::pre_activation) {
                return left;
            }
            const bool ours = weight_of(node->src[1]).kind == weight_kind::down_bias || is_lora_value(node->src[1]);
            return left.role == node_role::down && ours ? left : none;
        }
        case GGML_OP_MUL: {
            const node_match left = match(node->src[0], depth + 1);
            const node_match right = match(node->src[1], depth + 1);
            if (left.role == node_role::activated && right.role == node_role::pre_activation) {
                return with_role(left, node_role::product);
            }
            if (right.role == node_role::activated && left.role == node_role::pre_activation) {
                return with_role(right, node_role::product);
            }
            if (left.role == node_role::pre_activation && right.role == node_role::none) {
                return left;  // a scale
            }
            return left.role == node_role::down && plan_of(node->src[1]) != nullptr ? left : none;
        }
        case GGML_OP_DIV: {
            const node_match left = match(node->src[0], depth + 1);
            return left.role == node_role::activated || left.role == node_role::product ? with_role(left, node_role::product) : none;
        }
        case GGML_OP_SCALE:
        case GGML_OP_RESHAPE: {
            const node_match left = match(node->src[0], depth + 1);
            return left.role == node_role::pre_activation ? left : none;
        }
        case GGML_OP_UNARY: {
            const node_match left = match(node->src[0], depth + 1);
            return left.role == node_role::pre_activation ? with_role(left, node_role::activated) : none;
        }
        case GGML_OP_SQR: {
            const node_match left = match(node->src[0], depth + 1);
            return left.role == node_role::activated ? left : none;
        }
        case GGML_OP_GLU: {
            const node_match gate = match(node->src[0], depth + 1);
            const node_match up = match(node->src[1], depth + 1);
            return gate.role == node_role::pre_activation && up.role == node_role::pre_activation ? with_role(gate, node_role::product)
                                                                                                  : none;
        }
        default: return none;
    }
}

int index_of(const std::vector<ggml_tensor *> & nodes, const ggml_tensor * tensor) {
    for (size_t i = 0; i < nodes.size(); ++i) {
        if (nodes[i] == tensor) {
            return static_cast<int>(i);
        }
    }
    return -1;
}

// Is x the norm of `residual` (with its weight and bias), for the same rows of both?
bool is_norm_of(const ggml_tensor * x, const ggml_tensor * residual) {
    if (x == nullptr) {
        return false;
    }
    if (x->op == GGML_OP_GET_ROWS && residual->op == GGML_OP_GET_ROWS && x->src[1] == residual->src[1]) {
        x = x->src[0];
        residual = residual->src[0];
    }
    while ((x->op == GGML_OP_ADD || x->op == GGML_OP_MUL) && x->src[1]->op == GGML_OP_NONE) {
        x = x->src[0];
    }
    return (x->op == GGML_OP_NORM || x->op == GGML_OP_RMS_NORM) && x->src[0] == residual;
}

// The input of the FFN that ends at `node` (role down): what its gate or up mat-mul reads. nullptr: there is none.
const ggml_tensor * input_of(const ggml_tensor * node) {
    auto to_matmul = [](const ggml_tensor * from) {
        for (int depth = 0; from != nullptr && from->op != GGML_OP_MUL_MAT; ++depth) {
            from = depth < max_chain ? from->src[0] : nullptr;
        }
        return from;
    };
    node = to_matmul(node);
    node = node ? to_matmul(node->src[1]) : nullptr;
    return node && match_node(node).role == node_role::pre_activation ? node->src[1] : nullptr;
}

// A mat-mul with the wanted weight, with its bias addition or without.
bool match_linear(const std::vector<ggml_tensor *> & nodes, const ggml_tensor * node, weight_kind wanted, weight_kind wanted_bias,
                  ffn_block & block, bool & has_bias) {
    has_bias = false;
    int i = index_of(nodes, node);
    if (i < 0) {
        return false;
    }
    if (node->op == GGML_OP_ADD && weight_of(node->src[1]).kind == wanted_bias) {
        block.nodes.push_back(i);
        has_bias = true;
        node = node->src[0];
        i = index_of(nodes, node);
    }
    if (i < 0 || node->op != GGML_OP_MUL_MAT) {
        return false;
    }
    const weight_ref weight = weight_of(node->src[0]);
    if (weight.kind != wanted || weight.i_layer != block.i_layer || node->src[0]->buffer != block.out->src[0]->buffer) {
        return false;
    }
    if (block.x != nullptr && block.x != node->src[1]) {
        return false;
    }
    block.x = node->src[1];
    block.nodes.push_back(i);
    return is_plain_f32(block.x) && ggml_is_contiguous_1(block.x) && block.x->ne[2] == 1 && block.x->ne[3] == 1;
}

// Does the layer's predictor read the residual stream?
bool reads_residual(const opened_plan & owner, int i_layer) {
    return owner.data.predictor_reads_residual && owner.data.layers[i_layer].predictor != predictor_kind::none;
}

bool match_block(const std::vector<ggml_tensor *> & nodes, int i_down, ffn_block & block) {
    ggml_tensor * down = nodes[i_down];
    const weight_ref weight = weight_of(down->src[0]);
    block.owner = weight.owner;
    block.i_layer = weight.i_layer;
    block.store = store_of(down->src[0]);
    block.hybrid = hybrid_of(down->src[0]);
    block.out = down;
    block.nodes.push_back(i_down);
    if (block.store == nullptr || !block.store->is_complete() || weight.owner->n_down_loras > 0) {
        return false;
    }
    const ffn_layer & layer = block.store->layer();

    const ggml_tensor * product = down->src[1];
    const int i_product = index_of(nodes, product);
    if (i_product < 0 || !block_activation(*weight.owner, product, block.activation)) {
        return false;
    }
    block.nodes.push_back(i_product);
    // act(gate), unless a GLU node does both.
    auto walk_activated = [&](const ggml_tensor * node, const ggml_tensor *& pre, bool listed) {
        if (!listed) {
            const int i = index_of(nodes, node);
            if (i < 0) {
                return false;
            }
            block.nodes.push_back(i);
        }
        if (node->op == GGML_OP_SQR) {
            node = node->src[0];
            const int i = index_of(nodes, node);
            if (i < 0) {
                return false;
            }
            block.nodes.push_back(i);
        }
        pre = node->op == GGML_OP_UNARY ? node->src[0] : nullptr;
        return pre != nullptr;
    };
    const ggml_tensor * first = nullptr;
    const ggml_tensor * second = nullptr;
    if (product->op == GGML_OP_GLU) {
        first = product->src[0];
        second = product->src[1];
        if (second == nullptr) {
            return false;
        }
    } else if (product->op == GGML_OP_MUL) {
        const bool left = match_node(product->src[0]).role == node_role::activated;
        second = product->src[left ? 1 : 0];
        if (!walk_activated(product->src[left ? 0 : 1], first, false)) {
            return false;
        }
    } else if (!walk_activated(product, first, true)) {
        return false;
    }
    if (layer.gated != (second != nullptr)) {
        return false;
    }
    bool first_bias = false;
    bool second_bias = false;
    const weight_kind first_kind = layer.gated ? weight_kind::gate : weight_kind::up;
    const weight_kind first_bias_kind = layer.gated ? weight_kind::gate_bias : weight_kind::up_bias;
    if (!match_linear(nodes, first, first_kind, first_bias_kind, block, first_bias) ||
        (second != nullptr && !match_linear(nodes, second, weight_kind::up, weight_kind::up_bias, block, second_bias))) {
        return false;
    }
    // Biases belong to the block or to nobody: ones that are added elsewhere make it not whole.
    bool down_bias = false;
    if (!layer.down_bias.empty()) {
        for (size_t i = i_down + 1; i < nodes.size(); ++i) {
            if (nodes[i]->op == GGML_OP_ADD && nodes[i]->src[0] == down && weight_of(nodes[i]->src[1]).kind == weight_kind::down_bias) {
                block.nodes.push_back(static_cast<int>(i));
                block.out = nodes[i];
                down_bias = true;
                break;
            }
        }
    }
    if (first_bias == layer.first_bias.empty() || second_bias == layer.second_bias.empty() || down_bias == layer.down_bias.empty()) {
        return false;
    }
    block.has_biases = first_bias || second_bias || down_bias;
    // In this split such an addition is that of the residual: supports_op() takes no other.
    if (reads_residual(*block.owner, block.i_layer)) {
        for (size_t i = i_down + 1; i < nodes.size(); ++i) {
            if (nodes[i]->op == GGML_OP_ADD && nodes[i]->src[0] == block.out && ggml_are_same_shape(nodes[i], nodes[i]->src[1])) {
                block.residual = nodes[i]->src[1];
                block.nodes.push_back(static_cast<int>(i));
                block.out = nodes[i];
                break;
            }
        }
    }
    std::sort(block.nodes.begin(), block.nodes.end());

    // Nobody else may need a value that the whole block never writes.
    for (const int i : block.nodes) {
        const ggml_tensor * value = nodes[i];
        if (value == block.out) {
            continue;
        }
        if (value->flags & GGML_TENSOR_FLAG_OUTPUT) {
            return false;
        }
        for (size_t k = 0; k < nodes.size(); ++k) {
            if (std::binary_search(block.nodes.begin(), block.nodes.end(), static_cast<int>(k))) {
                continue;
            }
            if (nodes[k]->view_src == value) {
                return false;
            }
            for (const ggml_tensor * source : nodes[k]->src) {
                if (source == value) {
                    return false;
                }
            }
        }
    }
    return is_plain_f32(block.out) && ggml_is_contiguous_1(block.out);
}

}  // namespace

node_match match_node(const ggml_tensor * node) { return match(node, 0); }

residual_add match_residual_add(const ggml_tensor * node) {
    residual_add found;
    if (node->op != GGML_OP_ADD || !ggml_are_same_shape(node->src[0], node->src[1])) {
        return found;
    }
    const ggml_tensor * ffn = node->src[0];
    node_match end = match_node(ffn);
    if (end.role == node_role::none && ffn->op == GGML_OP_ADD) {
        found.is_apart = true;
        ffn = ffn->src[0];
        end = match_node(ffn);
    }
    if (end.role == node_role::down && reads_residual(*end.owner, end.i_layer) && is_norm_of(input_of(ffn), node->src[1])) {
        found.owner = end.owner;
        found.i_layer = end.i_layer;
    }
    return found;
}

bool graph_activation(const ggml_tensor * node, ffn_activation & out) {
    for (int depth = 0; node != nullptr && depth < max_chain; ++depth) {
        switch (node->op) {
            case GGML_OP_GLU:
                switch (ggml_get_glu_op(node)) {
                    case GGML_GLU_OP_REGLU:       out = ffn_activation::relu; return true;
                    case GGML_GLU_OP_GEGLU:       out = ffn_activation::gelu; return true;
                    case GGML_GLU_OP_SWIGLU:      out = ffn_activation::silu; return true;
                    case GGML_GLU_OP_GEGLU_ERF:   out = ffn_activation::gelu_erf; return true;
                    case GGML_GLU_OP_GEGLU_QUICK: out = ffn_activation::gelu_quick; return true;
                    default: return false;
                }
            case GGML_OP_UNARY: return is_known_unary(node, out);
            case GGML_OP_SQR: {
                ffn_activation inner;
                if (node->src[0] == nullptr || !is_known_unary(node->src[0], inner) || inner != ffn_activation::relu) {
                    return false;
                }
                out = ffn_activation::relu_sqr;
                return true;
            }
            case GGML_OP_MUL: node = node->src[match_node(node->src[0]).role == node_role::activated ? 0 : 1]; break;
            case GGML_OP_DIV: node = node->src[0]; break;
            default: return false;
        }
    }
    return false;
}

bool block_activation(const opened_plan & owner, const ggml_tensor * node, ffn_activation & out) {
    switch (owner.data.activation) {
        case activation_kind::graph:    return graph_activation(node, out);
        case activation_kind::relu:     out = ffn_activation::relu; return true;
        case activation_kind::relu_sqr: out = ffn_activation::relu_sqr; return true;
        case activation_kind::drelu:    out = ffn_activation::drelu; return true;
        case activation_kind::silu:     out = ffn_activation::silu; return true;
        case activation_kind::gelu:
            // The variant of gelu is the architecture's.
            if (!graph_activation(node, out) || !is_gelu(out)) {
                out = ffn_activation::gelu;
            }
            return true;
    }
    return false;
}

std::vector<ffn_block> match_blocks(const std::vector<ggml_tensor *> & nodes) {
    std::vector<ffn_block> blocks;
    for (size_t i = 0; i < nodes.size(); ++i) {
        if (nodes[i]->op != GGML_OP_MUL_MAT || weight_of(nodes[i]->src[0]).kind != weight_kind::down) {
            continue;
        }
        ffn_block block;
        if (match_block(nodes, static_cast<int>(i), block)) {
            blocks.push_back(std::move(block));
        }
    }
    return blocks;
}

// Yes for mat-muls with weights of ours, for what lies between them, and for the addition of a residual that a predictor reads;
// everything else stays upstream's.
bool backend_supports_op(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_NONE: return plan_of(op) != nullptr;
        case GGML_OP_MUL_MAT: {
            const weight_ref weight = weight_of(op->src[0]);
            const bool fits = op->type == GGML_TYPE_F32 && is_plain_f32(op->src[1]) && op->src[0]->ne[2] == 1 && op->src[0]->ne[3] == 1;
            if (!fits || weight.kind == weight_kind::none) {
                return false;
            }
            if (weight.kind == weight_kind::lora) {
                return op->src[0]->nb[0] == ggml_type_size(op->src[0]->type);
            }
            // A model of other shapes may share the default buffer type: it is upstream's.
            const int64_t n_embd = weight.owner->data.n_embd;
            const int64_t n_ff = weight.owner->data.layers[weight.i_layer].n_ff;
            const bool is_down = weight.kind == weight_kind::down;
            return op->src[0]->ne[0] == (is_down ? n_ff : n_embd) && op->src[0]->ne[1] == (is_down ? n_embd : n_ff);
        }
        case GGML_OP_ADD:
        case GGML_OP_MUL:
        case GGML_OP_DIV:
        case GGML_OP_SCALE:
        case GGML_OP_SQR:
        case GGML_OP_UNARY:
        case GGML_OP_GLU: {
            for (const ggml_tensor * source : op->src) {
                if (source != nullptr && (!is_plain_f32(source) || !ggml_is_contiguous_1(source))) {
                    return false;
                }
            }
            if (op->type != GGML_TYPE_F32 || !ggml_is_contiguous_1(op)) {
                return false;
            }
            // At load a bias is probed alone, before any graph.
            if (op->op == GGML_OP_ADD) {
                const weight_kind kind = weight_of(op->src[1]).kind;
                if (kind == weight_kind::gate_bias || kind == weight_kind::up_bias || kind == weight_kind::down_bias) {
                    return true;
                }
            }
            const node_match found = match_node(op);
            if (found.role == node_role::activated || (found.role == node_role::product && op->op != GGML_OP_DIV)) {
                ffn_activation activation;
                return block_activation(*found.owner, op, activation);
            }
            return found.role != node_role::none || is_lora_value(op) || match_residual_add(op).owner != nullptr;
        }
        default: return false;
    }
}

}  // namespace powerinfer
