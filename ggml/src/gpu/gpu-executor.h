// The hot part of FFN blocks on one device. No type of a device's library appears here.
#pragma once

#include "../ffn.h"

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace powerinfer {

// What a device did for one block.
struct gpu_result {
    double begin_s = 0.0;        // omp_get_wtime: its work began (a device that queues: was handed over)
    double end_s = 0.0;          // its result was in host memory
    double copy_s = 0.0;         // the host spent in copies; a device that queues copies later
    uint64_t copied_bytes = 0;   // between host and device, both ways
    uint64_t n_candidates = 0;   // gate rows computed, summed over tokens
    uint64_t n_used = 0;         // down rows used, summed over tokens
    uint64_t n_active = 0;       // values other than 0, summed over tokens; 0 unless options.count_hot
    uint64_t read_bytes = 0;     // weight bytes that the device read, rows that tokens share once
};

// A layer's matrices, as far as memory on a device is concerned.
struct gpu_layer_shape {
    int64_t n_embd = 0;
    int64_t n_ff = 0;
    int64_t n_hot = 0;
    int64_t rank = 0;      // of the predictor; 0: none
    int first_type = -1;   // ggml_type of gate rows, or of up rows when ungated
    int second_type = -1;  // of up rows when gated
    int down_type = -1;    // of neuron-major down rows
    int fc1_type = -1;     // of the predictor's rows
    int fc2_type = -1;
    bool has_first_bias = true;
    bool has_second_bias = true;
    bool streams = true;   // gpu_executor::stream will be called

    gpu_layer_shape() = default;
    gpu_layer_shape(const ffn_layer & layer, int64_t n_hot, bool streams);
};

class gpu_executor;

// The hot rows of a model on one device; shared by the executors of all its contexts, and outlives them.
class gpu_store {
public:
    virtual ~gpu_store() = default;

    // Can this device compute the layer? An error that names what it can't.
    virtual status check_layer(int i_layer, const gpu_layer_shape & shape) const = 0;

    // Device memory: of one hot neuron, of a layer's hot rows, and of an executor's scratch for all layers of the device.
    virtual size_t neuron_bytes(const gpu_layer_shape & shape) const = 0;
    virtual size_t rows_bytes(const gpu_layer_shape & shape) const = 0;
    virtual size_t scratch_bytes(const std::vector<gpu_layer_shape> & shapes, int64_t max_tokens) const = 0;

    // Uploads a layer's positions 0 .. n_hot - 1, once, while the model loads. The host rows may go afterwards.
    virtual status add_layer(int i_layer, const ffn_layer & layer, const gpu_layer_shape & shape, const kernel_table * kernels) = 0;

    virtual size_t memory_bytes() const = 0;  // of the rows, on the device

    // An executor on these rows. max_tokens: batches above it are computed in parts.
    virtual status make_executor(int64_t max_tokens, std::unique_ptr<gpu_executor> & out) = 0;
};

// One per device and llama context, used from one thread at a time.
class gpu_executor {
public:
    virtual ~gpu_executor() = default;

    // Begins a layer's hot part for at most max_tokens tokens and returns; x may be overwritten afterwards.
    // x: (n_tokens, n_embd) f32, rows ld_x floats apart. r (n_tokens, n_embd): what the predictor reads.
    virtual status start(int i_layer, const ffn_options & options, int64_t n_tokens, const float * x, int64_t ld_x, const float * r,
                         int64_t ld_r) = 0;

    // Waits for what start began, and adds it to y: (n_tokens, n_embd) f32, rows ld_y floats apart.
    virtual status finish(float * y, int64_t ld_y, gpu_result & result) = 0;

    // A whole block of at most max_tokens tokens on the device: the hot part, and the cold rows brought to it in groups.
    // y = all that the block gives but the down bias. cold: the layer without its hot positions, in host memory.
    // r (n_tokens, n_embd): what the predictor reads.
    virtual status stream(int i_layer, const ffn_layer & cold, const ffn_options & options, int64_t n_tokens, const float * x,
                          int64_t ld_x, const float * r, int64_t ld_r, float * y, int64_t ld_y, gpu_result & result) = 0;

    // One matrix alone, for blocks that run op by op. gate, up: out (n_tokens, n_hot) = products of x (n_tokens, n_embd) with
    // the hot rows. down: out (n_tokens, n_embd) = sum of the hot rows, weighted by x (n_tokens, n_hot).
    virtual status multiply(int i_layer, ffn_role role, int64_t n_tokens, const float * x, int64_t ld_x, float * out, int64_t ld_out) = 0;

    virtual size_t memory_bytes() const = 0;  // scratch, on the device
};

// Any ggml device of type GPU (ggml-executor.cpp). Hot gate and up rows are kept as they are, down is kept transposed: floats
// as they are, quantized rows as Q8_0 along the neurons. Every hot neuron is computed.
std::unique_ptr<gpu_store> ggml_store_create(ggml_backend_dev_t device);

// Neurons of a block on a ggml device; nullptr: none. Rows have no gaps.
struct gpu_tensors {
    ggml_tensor * first = nullptr;        // [n_embd, n] gate, or up when ungated
    ggml_tensor * second = nullptr;       // [n_embd, n]
    ggml_tensor * down = nullptr;         // [n_embd, n] neuron-major, or [n, n_embd] transposed
    ggml_tensor * first_bias = nullptr;   // [n]
    ggml_tensor * second_bias = nullptr;  // [n]
    ggml_tensor * down_norm = nullptr;    // [n]
    ggml_tensor * fc1 = nullptr;          // [n_embd, rank]; of hot neurons only
    ggml_tensor * fc2 = nullptr;          // [rank, n]
};

// The same for kernels that want rows: down is kept neuron-major, the predictor too. Executors only stream, where hot neurons
// are skipped as cold ones are, and multiply; whoever reads `tensors` with kernels of its own does the rest.
class gpu_row_store : public gpu_store {
public:
    // A layer's hot neurons, and zero rows behind them up to a multiple of 32.
    virtual const gpu_tensors & tensors(int i_layer) const = 0;
};
std::unique_ptr<gpu_row_store> ggml_row_store_create(ggml_backend_dev_t device);

#if defined(POWERINFER_CUDA)
// A CUDA device with our kernels (cuda-executor.cu): rows are kept as they are, inactive neurons are skipped. Long batches
// run through ggml's mat-muls on the same rows.
std::unique_ptr<gpu_store> cuda_store_create(ggml_backend_dev_t device);
#endif

}  // namespace powerinfer
