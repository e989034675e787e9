// The hot part of FFN blocks on one device. No type of a device's library appears here.
#pragma once

#include "../ffn.h"

#include "ggml-backend.h"

#include <memory>
#include <string>

namespace powerinfer {

// Weights of one layer that a device holds: positions 0 .. n_hot - 1, hot first.
struct gpu_layer_shape {
    int64_t n_embd = 0;
    int64_t n_hot = 0;
    bool gated = true;
    int first_type = -1;  // ggml_type of the rows: gate, or up when ungated
    int second_type = -1;  // up when gated
    int down_type = -1;    // of the neuron-major rows
    bool has_biases = false;
};

// What a device did for one block.
struct gpu_result {
    double begin_s = 0.0;     // omp_get_wtime: its work began (a device that queues: was handed over)
    double end_s = 0.0;       // its result was in host memory
    uint64_t copied_bytes = 0;  // between host and device, both ways
    uint64_t n_candidates = 0;  // gate rows computed, summed over tokens
    uint64_t n_active = 0;      // down rows used, summed over tokens
    uint64_t read_bytes = 0;    // weight bytes that the device read
};

class gpu_executor;

// The hot rows of a model on one device; shared by the executors of all its contexts.
class gpu_store {
public:
    virtual ~gpu_store() = default;

    // Uploads a layer's positions 0 .. n_hot - 1, once, while the model loads. The host rows may go afterwards.
    virtual status add_layer(int i_layer, const ffn_layer & layer, int64_t n_hot, const kernel_table * kernels) = 0;

    virtual size_t memory_bytes() const = 0;  // on the device

    // An executor on these rows. max_tokens: batches above it are computed in parts.
    virtual status make_executor(int64_t max_tokens, std::unique_ptr<gpu_executor> & out) = 0;
};

// One per device and llama context: start and finish come in pairs, from one thread at a time.
class gpu_executor {
public:
    virtual ~gpu_executor() = default;

    // Begins a layer's hot part for all tokens and returns; x may be overwritten afterwards.
    // x: (n_tokens, n_embd) f32, rows ld_x floats apart.
    virtual status start(int i_layer, const ffn_options & options, int64_t n_tokens, const float * x, int64_t ld_x) = 0;

    // Waits for what start began, and adds it to y: (n_tokens, n_embd) f32, rows ld_y floats apart.
    virtual status finish(float * y, int64_t ld_y, gpu_result & result) = 0;

    // All of a block on the device, for batches: the hot part, and the cold rows streamed to it in groups.
    // y = what the block adds, without the down bias. cold: the layer without its hot positions.
    virtual status stream(int i_layer, const ffn_layer & cold, const ffn_options & options, int64_t n_tokens, const float * x,
                          int64_t ld_x, float * y, int64_t ld_y, gpu_result & result) = 0;
};

// The store on any ggml device of type GPU (ggml-executor.cpp), or on a CUDA device with our kernels (cuda-executor.cu).
status ggml_store_create(ggml_backend_dev_t device, std::unique_ptr<gpu_store> & out);
#if defined(POWERINFER_CUDA)
status cuda_store_create(ggml_backend_dev_t device, std::unique_ptr<gpu_store> & out);
#endif

}  // namespace powerinfer
