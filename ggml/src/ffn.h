// One feed-forward block: its weights as we store them, and the ways to compute it.
// Everything is in position order (hot first); `order` leads back to the base model's neuron order.
#pragma once

#include "kernels/kernel-table.h"
#include "plan.h"
#include "status.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace powerinfer {

enum class ffn_mode { dense, exact, threshold, predicted };

// What is applied to a gate (or ungated up) value. The gelu kinds are upstream's, F16 rounding of the input included.
enum class ffn_activation { relu, relu_sqr, drelu, silu, gelu, gelu_erf, gelu_quick };

// Anonymous memory in huge pages (as far as the system gives them), zeroed, freed with the object.
class huge_block {
public:
    static status allocate(size_t size_bytes, bool lock, huge_block & out);
    huge_block() = default;
    huge_block(huge_block && other) noexcept { *this = std::move(other); }
    huge_block & operator=(huge_block && other) noexcept;
    ~huge_block();

    uint8_t * data() const { return data_; }
    size_t size_bytes() const { return size_bytes_; }

    // Gives the whole pages among the first `n_bytes` back: they must not be touched again. Returns how many bytes that were.
    size_t release_front(size_t n_bytes);

private:
    uint8_t * data_ = nullptr;
    size_t size_bytes_ = 0;
    size_t released_bytes_ = 0;
};

// A matrix with one neuron per row.
struct row_matrix {
    const uint8_t * rows = nullptr;         // nullptr: the block has no such matrix
    size_t stride_bytes = 0;                // distance of rows
    size_t row_bytes = 0;                   // bytes that reading one row reads
    int64_t n = 0;                          // values per row
    int64_t n_rows = 0;
    int row_type = -1;                      // ggml_type
    const row_kernels * kernels = nullptr;  // nullptr: slow, rows go through to_float
    const int32_t * row_of = nullptr;       // (n_rows) stored row of each position; nullptr: identity
};

struct ffn_layer {
    int64_t n_embd = 0;
    int64_t n_ff = 0;
    bool gated = true;
    float activation_param = 0.0f;
    row_matrix first;                  // gate, or up when ungated: (n_ff, n_embd)
    row_matrix second;                 // up when gated: (n_ff, n_embd)
    row_matrix down;                   // (n_ff, n_embd), neuron-major
    row_matrix fc1;                    // (rank, n_embd); absent without a predictor
    row_matrix fc2;                    // (n_ff, rank)
    bool predictor_relu = false;       // ReLU between fc1 and fc2
    float predictor_threshold = 0.0f;
    std::vector<float> first_bias;     // (n_ff) in position order; empty: none
    std::vector<float> second_bias;    // (n_ff)
    std::vector<float> down_bias;      // (n_embd)
    std::vector<float> down_norm;      // (n_ff) euclidean norm of each down row
    const int32_t * order = nullptr;   // (n_ff) base neuron at each position; nullptr: identity

    uint64_t matrix_bytes() const { return n_ff * (first.row_bytes + second.row_bytes + down.row_bytes); }
    uint64_t predictor_bytes() const { return fc1.row_bytes * fc1.n_rows + fc2.row_bytes * fc2.n_rows; }
};

// How one block runs; chosen per layer.
struct ffn_options {
    ffn_mode mode = ffn_mode::dense;
    ffn_activation activation = ffn_activation::silu;
    float threshold = 0.0f;
    float product_threshold = 0.0f;
    bool add_biases = false;  // the block that was matched includes its bias additions
    bool count = false;       // fill ffn_result's counting arrays
    bool count_hot = false;   // a device says how many of its neurons were active, which costs it two operators and a copy

    bool is_approximate() const { return mode == ffn_mode::threshold || mode == ffn_mode::predicted; }
    // The thresholds that apply in this mode; 0: none.
    float gate_limit() const { return is_approximate() ? threshold : 0.0f; }
    float product_limit() const { return is_approximate() ? product_threshold : 0.0f; }
};

constexpr int ffn_n_bins = 320;        // histogram bins, as in ggml-powerinfer.h
int ffn_histogram_bin(float value);    // bin of |value|

// What one pass over a block read and used.
struct ffn_tally {
    uint64_t n_candidates = 0;  // summed over tokens
    uint64_t n_active = 0;      // summed over tokens
    uint64_t n_gate_rows = 0;   // rows read, once for all tokens
    uint64_t n_up_rows = 0;
    uint64_t n_down_rows = 0;
    uint64_t n_slow_rows = 0;
    double predictor_s = 0.0;
    double gate_s = 0.0;
    double up_down_s = 0.0;

    ffn_tally & operator+=(const ffn_tally & other) {
        n_candidates += other.n_candidates;
        n_active += other.n_active;
        n_gate_rows += other.n_gate_rows;
        n_up_rows += other.n_up_rows;
        n_down_rows += other.n_down_rows;
        n_slow_rows += other.n_slow_rows;
        predictor_s += other.predictor_s;
        gate_s += other.gate_s;
        up_down_s += other.up_down_s;
        return *this;
    }
};
#ifdef _OPENMP  // not where a test includes this
#pragma omp declare reduction(+ : ffn_tally : omp_out += omp_in)
#endif

// What one call did. Arrays are in position order and only filled when counting, the last three only in dense mode.
struct ffn_result {
    uint64_t n_tokens = 0;
    uint64_t n_candidates = 0;         // gate rows used, summed over tokens
    uint64_t n_active = 0;             // down rows used, summed over tokens
    uint64_t n_slow_rows = 0;
    uint64_t read_bytes = 0;           // rows that several tokens of a batch share count once
    uint64_t dense_bytes = 0;          // what the same call would have read in dense mode
    uint64_t predictor_us = 0;
    uint64_t gate_us = 0;
    uint64_t up_down_us = 0;
    double overlap_sum = 0.0;
    uint64_t n_overlaps = 0;
    std::vector<uint32_t> active;             // (n_ff)
    std::vector<double> gate_abs_sum;         // (n_ff)
    std::vector<uint64_t> gate_histogram;     // (ffn_n_bins)
    std::vector<uint64_t> product_histogram;  // (ffn_n_bins)

    void add(const ffn_layer & layer, const ffn_options & options, int64_t n_tokens, const ffn_tally & tally);
};

// The neurons that a layer's last single token used, for the overlap figure.
struct active_set {
    bool is_set = false;
    std::vector<uint8_t> flags;  // (n_ff)
    std::vector<int32_t> ids;
};

// Memory that calls reuse. One per backend instance: never shared between threads that compute at once.
class ffn_workspace {
public:
    // A block of at least size_bytes, aligned to 64; valid until the next call with the same slot.
    void * get(int slot, size_t size_bytes);
    template <class T> T * array(int slot, size_t n) { return static_cast<T *>(get(slot, n * sizeof(T))); }

    active_set & last_active(const void * layer);

private:
    struct free_aligned { void operator()(void * p) const; };
    std::vector<std::unique_ptr<void, free_aligned>> blocks_;
    std::vector<size_t> sizes_;
    std::unordered_map<const void *, active_set> last_active_;
};

// y[t] = FFN(x[t]) for all tokens. x, y: (n_tokens, n_embd) f32, rows ld_x / ld_y floats apart; they may overlap.
// r (n_tokens, n_embd): what the predictor reads, apart from y; nullptr: x. Same thread count, same bits.
void ffn_forward(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int n_threads,
                 int64_t n_tokens, const float * x, int64_t ld_x, float * y, int64_t ld_y,
                 ffn_workspace & workspace, ffn_result & result, const float * r = nullptr, int64_t ld_r = 0);

// --- pieces that the blocked path, the op-by-op path and tests share ---

// Rows of a matrix by position. ids == nullptr: positions first .. first + n_ids - 1. `remapped` (n_ids) and `scratch`
// (scratch_bytes()) are the caller's, one per thread. dot, add and unpack return how many rows were slow.
class row_reader {
public:
    row_reader(const row_matrix & matrix, const kernel_table * kernels) : m_(matrix), kernels_(kernels) {}

    size_t scratch_bytes() const;
    void pack(const float * x, void * scratch) const;  // x (n) f32, for `dot`
    // out[i] = dot(row of ids[i], the x packed in scratch). n_ahead > n_ids: the list goes on, and the next call is for that.
    uint64_t dot(const int32_t * ids, int64_t first, int64_t n_ids, const void * scratch, float * out, int32_t * remapped,
                 int64_t n_ahead = 0) const;
    // y += scale[i] * row of ids[i], in order. y (n).
    uint64_t add(const int32_t * ids, int64_t first, int64_t n_ids, const float * scale, void * scratch, float * y,
                 int32_t * remapped, int64_t n_ahead = 0) const;
    uint64_t unpack(int64_t position, float * out) const;  // out (n) f32
    // Values first .. first + n - 1 of a row; both are whole blocks of the row type. out (n) f32.
    uint64_t unpack_part(int64_t position, int64_t first, int64_t n, float * out) const;

private:
    const int32_t * stored_rows(const int32_t * ids, int64_t first, int64_t n_ids, int32_t * remapped) const;

    const row_matrix & m_;
    const kernel_table * kernels_;
};

// v[i] = act(v[i]) for the gate part of `activation` (drelu: its relu). i < n.
void ffn_activate(ffn_activation activation, float param, const kernel_table * kernels, int64_t n, float * v);

// Neurons whose up and down rows one step of the decode path reads together (measured at 1152 and 2304 bytes).
inline int64_t ffn_step_neurons(size_t row_bytes) { return row_bytes < 2048 ? 4 : 8; }

constexpr int64_t ffn_few_tokens = 16;
constexpr int64_t ffn_few_tokens_dense = 8;

// out (width) = columns from .. from + width - 1 of the down bias, if it is added here, plus n_sums partial results, in order:
// (width) each, `stride` floats apart.
void ffn_join_sums(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int n_sums, const float * sums,
                   int64_t stride, int64_t from, int64_t width, float * out);

// 2 to ffn_few_tokens tokens (dense mode: ffn_few_tokens_dense), rows read once for all; called by ffn_forward.
// Doesn't fill the counting arrays.
void ffn_forward_few(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int n_threads,
                     int64_t n_tokens, const float * x, int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y,
                     ffn_workspace & workspace, ffn_result & result);

// The blocked path for batches; called by ffn_forward.
void ffn_forward_batch(const ffn_layer & layer, const ffn_options & options, const kernel_table * kernels, int n_threads,
                       int64_t n_tokens, const float * x, int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y,
                       ffn_workspace & workspace, ffn_result & result);

// Whole matrices for the op-by-op path, in the base model's neuron order.
// out (n_tokens, n_rows): out[t][order[p]] = dot(row p, x[t]).
void ffn_matmul_rows(const row_matrix & matrix, const int32_t * order, const kernel_table * kernels, int n_threads,
                     int64_t n_tokens, const float * x, int64_t ld_x, float * out, int64_t ld_out,
                     ffn_workspace & workspace, ffn_result & result);
// y (n_tokens, n_embd): y[t] = sum over p of a[t][order[p]] * row p; zeros of a are skipped.
void ffn_matmul_columns(const row_matrix & matrix, const int32_t * order, const kernel_table * kernels, int n_threads,
                        int64_t n_tokens, const float * a, int64_t ld_a, float * y, int64_t ld_y,
                        ffn_workspace & workspace, ffn_result & result);

// --- storage (ffn-store.cpp) ---

// The layer without its positions 0 .. n_hot - 1: the same rows.
ffn_layer ffn_without_hot(const ffn_layer & layer, int64_t n_hot);

// One tensor of a block as the model loader announces it.
enum class ffn_role { gate, up, down, gate_bias, up_bias, down_bias };

struct ffn_tensor_info {
    bool present = false;
    int row_type = -1;
    int64_t ne0 = 0;
    int64_t ne1 = 0;
};

// Weights of one layer in one buffer, filled tensor by tensor.
class ffn_store {
public:
    // mapped: rows stay where `set` is told that they are mapped, instead of being copied.
    ffn_store(const plan & owner, int i_layer, const kernel_table * kernels, bool lock, bool mapped);

    // Announces a tensor before any data comes; an unfitting shape is an error.
    status announce(ffn_role role, const ffn_tensor_info & info);

    // Takes a whole tensor in ggml's layout. A mapped store takes `resident`, the same bytes in a mapping that outlives it.
    status set(ffn_role role, const void * data, const uint8_t * resident);

    bool is_complete() const;
    const ffn_layer & layer() const { return layer_; }
    size_t memory_bytes() const { return memory_bytes_; }
    // Frees the rows of positions 0 .. n_hot - 1; layer() must not be computed with from then on.
    void release_hot(int64_t n_hot);

    bool derives_down() const;  // down rows were transposed here because the plan stores none
    int base_down_type() const { return info_[2].row_type; }

private:
    status prepare();
    status set_down(const void * data);
    status copy_predictor();

    const plan & plan_;
    const plan_layer & plan_layer_;
    int i_layer_;
    const kernel_table * kernels_;
    bool lock_;
    bool mapped_;
    bool prepared_ = false;
    ffn_tensor_info info_[6];
    bool filled_[6] = {};
    std::string head_[3];  // first bytes of gate, up, down, for the digest
    ffn_layer layer_;
    huge_block first_block_;
    huge_block bundle_block_;
    huge_block predictor_block_;
    size_t up_bytes_ = 0;  // an up row's room at the start of its neuron's bundle
    size_t memory_bytes_ = 0;
};

// to_float of slow types and the row size rules, from ggml-base.
void row_to_float(int row_type, const void * row, float * out, int64_t n);
size_t row_size_bytes(int row_type, int64_t n);  // 0 when n isn't whole blocks

// Row type of down rows derived from a base tensor of `row_type` with rows of n_embd values.
int derived_row_type(int row_type, int64_t n_embd);

}  // namespace powerinfer
