// A plan: all that an extended GGUF says about a model (FORMAT.md). Reading touches no weights of the base model.
// Everything in it was checked: sizes against the file, orders as permutations, numbers as finite.
#pragma once

#include "status.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace powerinfer {

enum class activation_kind { graph, relu, relu_sqr, drelu, silu, gelu };  // graph: as the model's graph says (no plan)
enum class predictor_kind { none, mlp, linear };

// A read-only mapping of a whole file.
class mapped_file {
public:
    static status open(const std::string & path, std::shared_ptr<mapped_file> & out);
    ~mapped_file();
    mapped_file(const mapped_file &) = delete;
    mapped_file & operator=(const mapped_file &) = delete;

    const uint8_t * data() const { return data_; }
    size_t size_bytes() const { return size_bytes_; }

private:
    mapped_file() = default;
    const uint8_t * data_ = nullptr;
    size_t size_bytes_ = 0;
};

// A tensor inside a mapped file: ne0 values per row, ne1 rows, contiguous. Absent: data == nullptr.
struct plan_tensor {
    int row_type = -1;  // ggml_type number
    int64_t ne0 = 0;
    int64_t ne1 = 0;
    const uint8_t * data = nullptr;
    size_t size_bytes = 0;
};

struct plan_layer {
    int64_t n_ff = 0;                     // 0: not covered, upstream computes the layer
    std::string digest;                   // SHA-256, hex; empty when not covered
    float activation_param = 0.0f;        // FATReLU's cut
    float threshold = 0.0f;               // on |act(gate)|; 0: exact zeros only
    float product_threshold = 0.0f;       // on |act(gate) * up| * norm(down row); 0: off
    predictor_kind predictor = predictor_kind::none;
    float predictor_threshold = 0.0f;     // skipped only when score < it
    float predictor_recall = 0.0f;        // measured, 0 when absent
    float predictor_density = 0.0f;       // candidate_density measured, 0 when absent
    int gate_type = -1;                   // ggml_type numbers of the base's rows; -1: not there
    int up_type = -1;
    int down_type = -1;
    uint64_t profile_tokens = 0;
    float profile_density = 0.0f;         // 0 when absent
    std::vector<int32_t> neuron_order;    // (n_ff) base row at each position; empty: identity
    std::vector<float> neuron_frequency;  // (n_ff) in position order; empty when absent
    plan_tensor ffn_down_t;               // [n_embd, n_ff], rows in position order
    plan_tensor fc1;                      // [n_embd, rank]
    plan_tensor fc2;                      // [rank, n_ff], rows in position order
};

// How many neurons of each layer go to which device, and what that was computed for.
struct saved_placement {
    uint32_t version = 0;                 // of the cost model
    std::string budget;                   // device memory as it was asked for, e.g. "8GiB"
    uint32_t n_ctx = 0;                   // context that the budget had to hold too
    std::vector<std::string> devices;     // (n_devices) names
    std::vector<uint64_t> hot_bytes;      // (n_devices) what was left of the budget for hot neurons
    std::vector<uint32_t> n_hot;          // (n_layer) positions 0 .. n_hot - 1 are hot
    std::vector<uint32_t> i_device;       // (n_layer) index into devices
    float token_s = 0.0f;                 // seconds per decoded token that the FFNs were expected to take
    float gap = 0.0f;                     // relative distance of token_s from the bound of the best
    std::string model_hash;
    std::string statistics_hash;
};

struct plan {
    std::string path;                     // the extended GGUF; empty for a bare plan
    std::string base_path;                // file that holds the base GGUF (== path when embedded)
    uint64_t base_offset_bytes = 0;       // where the base GGUF starts in it
    uint64_t base_size_bytes = 0;         // its size, 0 when it is the whole file
    std::string base_architecture;
    int64_t n_layer = 0;
    int64_t n_embd = 0;
    activation_kind activation = activation_kind::graph;
    bool gated = true;
    bool predictor_reads_residual = false;  // powerinfer.predictor.input == "residual"
    bool has_loss = false;
    float loss = 0.0f;                    // relative perplexity increase measured with the thresholds
    std::string corpus;
    std::vector<plan_layer> layers;       // (n_layer)
    std::vector<saved_placement> placements;  // the newest last
    std::shared_ptr<mapped_file> file;    // keeps the plan_tensors alive; nullptr for a bare plan
};

// Reads the extended GGUF at `path` and checks all of it.
// `base_override` names the base model when it isn't embedded (empty: powerinfer.base.file beside `path`).
// The base's FFN digests are compared here too, for every covered layer (reads 4 KiB per tensor).
POWERINFER_EXPORT status plan_read(const std::string & path, const std::string & base_override, plan & out);

// A plan without an extended GGUF, made from the tensor list of a stock GGUF (first split of a split one included):
// identity order, activation `graph`, no predictor. Layers without separate dense up and down rows get n_ff 0.
status plan_from_base(const std::string & base_path, plan & out);

// What a saved placement knows a model and its statistics by: SHA-256 in hex, as format.py's functions of the same names.
// The second reads all orders and frequencies.
std::string plan_model_hash(const plan & p);
std::string plan_statistics_hash(const plan & p);

// The saved placement that can be used again: the newest one of this model, these statistics and this version that was
// made for as many devices, and on each for what it has now (hot_bytes), or at most placement_slack less. nullptr: none.
POWERINFER_EXPORT const saved_placement * plan_find_placement(const plan & p, const std::vector<uint64_t> & hot_bytes);

enum class model_file_kind { plain, extended };

// What `path` is: `extended` when general.architecture is `powerinfer`, else `plain`. An unreadable file is an error.
status model_file_kind_of(const std::string & path, model_file_kind & out);

// The sidecar that lies beside a plain GGUF (X.powerinfer.gguf beside X.gguf, for a split model beside its first
// split without the -00001-of-0000N part too); empty when there is none.
std::string plan_find_sidecar(const std::string & model_path);

// FORMAT.md's digest of one layer's FFN. Each present tensor: name, type name, ne0, ne1 and the first
// min(4096, size) bytes. Order: gate, up, down.
struct digest_tensor {
    std::string name;
    std::string type_name;
    int64_t ne0 = 0;
    int64_t ne1 = 0;
    const uint8_t * head = nullptr;  // (head_bytes)
    size_t head_bytes = 0;
};
std::string plan_digest(const std::vector<digest_tensor> & tensors);

}  // namespace powerinfer
