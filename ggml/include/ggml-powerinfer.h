// powerinfer: a GGML device for the sparse feed-forward part of a model, and the plans that drive it.
// The one public header. Plain C; every size is in bytes, every time in microseconds.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

#define GGML_POWERINFER_API __attribute__((visibility("default")))

// The backend's registration. nullptr (with one line on stderr) when the loaded ggml isn't the version this was built for.
GGML_POWERINFER_API ggml_backend_reg_t ggml_backend_powerinfer_reg(void);

GGML_POWERINFER_API const char * ggml_backend_powerinfer_version(void);

enum ggml_backend_powerinfer_sparsity {
    GGML_POWERINFER_AUTO,
    GGML_POWERINFER_DENSE,
    GGML_POWERINFER_EXACT,
    GGML_POWERINFER_THRESHOLD,
    GGML_POWERINFER_PREDICTED,
};

// Receives each note once, without newline: a fallback or a choice that the user should know of.
typedef void (*ggml_backend_powerinfer_note_t)(const char * text, void * user_data);

struct ggml_backend_powerinfer_options {
    enum ggml_backend_powerinfer_sparsity sparsity;  // default AUTO
    bool strict;                                     // a fallback is an error instead of a note; default false
    bool mapped;                                     // rows stay in the mapped file instead of a copy; default false
    bool mlock;                                      // lock our buffers in memory; default false
    bool count;                                      // count activations and histograms (profiling); default false
    const char * kernels;                            // kernel set by name; NULL: POWERINFER_KERNELS, else the best
    ggml_backend_powerinfer_note_t note;             // NULL: stderr
    void * note_user_data;
};

GGML_POWERINFER_API struct ggml_backend_powerinfer_options ggml_backend_powerinfer_default_options(void);

// An opened plan. It owns a buffer type; the handle and every buffer of that type keep it alive.
typedef struct ggml_backend_powerinfer_plan * ggml_backend_powerinfer_plan_t;

// Opens an extended GGUF (sidecar or embedded) and registers the device. path_base may be NULL (FORMAT.md says where
// it is looked for). NULL on failure, with one sentence in error.
GGML_POWERINFER_API ggml_backend_powerinfer_plan_t ggml_backend_powerinfer_plan_open(
    const char * path, const char * path_base, const struct ggml_backend_powerinfer_options * options,
    char * error, size_t error_size);

// Opens a plan for a stock GGUF that has none: every dense FFN in its own order, the activation of the model's graph.
// For profiling, and as an oracle.
GGML_POWERINFER_API ggml_backend_powerinfer_plan_t ggml_backend_powerinfer_plan_open_bare(
    const char * path_base, const struct ggml_backend_powerinfer_options * options, char * error, size_t error_size);

GGML_POWERINFER_API void ggml_backend_powerinfer_plan_free(ggml_backend_powerinfer_plan_t plan);

// Where the base model is: file, and the offset of its GGUF in that file (0 unless embedded).
GGML_POWERINFER_API const char * ggml_backend_powerinfer_plan_base_path(ggml_backend_powerinfer_plan_t plan);
GGML_POWERINFER_API uint64_t ggml_backend_powerinfer_plan_base_offset(ggml_backend_powerinfer_plan_t plan);

// For llama_model_params.tensor_buft_overrides: the pattern of the tensors that the plan claims, and their buffer type.
// Both live as long as the handle.
GGML_POWERINFER_API const char * ggml_backend_powerinfer_plan_tensor_pattern(ggml_backend_powerinfer_plan_t plan);
GGML_POWERINFER_API ggml_backend_buffer_type_t ggml_backend_powerinfer_plan_buffer_type(ggml_backend_powerinfer_plan_t plan);

// Where hot neurons go. Devices are of type GPU, and exist as long as the plan and its models.
struct ggml_backend_powerinfer_split {
    int n_devices;                       // 1 .. 16
    const ggml_backend_dev_t * devices;  // (n_devices)
    const int64_t * n_hot;               // (n_layer) neurons of each layer on its device, hot first; 0 for layers not covered
    const int32_t * i_device;            // (n_layer) index into devices; NULL: all 0
    int64_t max_tokens;                  // tokens that the scratch memory is made for (n_ubatch)
    int64_t stream_tokens;               // batches of so many tokens and more: cold rows are brought to the device and computed there;
                                         // 0: when the device asks for it (upstream's op_offload); -1: never
};

// Sets it, after open and before the model is loaded. false, and one sentence in error, when it doesn't fit the plan.
GGML_POWERINFER_API bool ggml_backend_powerinfer_plan_set_split(
    ggml_backend_powerinfer_plan_t plan, const struct ggml_backend_powerinfer_split * split, char * error, size_t error_size);

// Memory that a split takes: per device (n_devices) bytes of hot rows, and of scratch in every context.
GGML_POWERINFER_API bool ggml_backend_powerinfer_plan_split_bytes(
    ggml_backend_powerinfer_plan_t plan, const struct ggml_backend_powerinfer_split * split, uint64_t * row_bytes, uint64_t * scratch_bytes,
    char * error, size_t error_size);

// Bytes of one hot neuron of a layer on a device (NULL: any that ggml's operators compute on); 0: not covered.
GGML_POWERINFER_API uint64_t ggml_backend_powerinfer_plan_neuron_bytes(
    ggml_backend_powerinfer_plan_t plan, ggml_backend_dev_t device, int i_layer);

// After a model was loaded: false, and one sentence in error, when its weights aren't the plan's (or nothing was claimed).
GGML_POWERINFER_API bool ggml_backend_powerinfer_plan_check(ggml_backend_powerinfer_plan_t plan, char * error, size_t error_size);

// Changes the mode between two decodes. false when the plan can't (strict, or an unknown mode), with one sentence.
GGML_POWERINFER_API bool ggml_backend_powerinfer_plan_set_sparsity(
    ggml_backend_powerinfer_plan_t plan, enum ggml_backend_powerinfer_sparsity sparsity, char * error, size_t error_size);

// Changes one layer's thresholds between two decodes (calibration). false when i_layer is out of range.
GGML_POWERINFER_API bool ggml_backend_powerinfer_plan_set_thresholds(
    ggml_backend_powerinfer_plan_t plan, int i_layer, float threshold, float product_threshold);

struct ggml_backend_powerinfer_stats {
    uint64_t n_tokens;            // token x layer evaluations of covered layers
    uint64_t n_blocks_whole;      // FFN blocks computed whole
    uint64_t n_blocks_by_op;      // FFN blocks computed op by op
    uint64_t n_slow_rows;         // rows that went through to_float because their type has no kernel
    uint64_t n_neurons;           // sum of n_ff over evaluations
    uint64_t n_candidates;        // gate rows read
    uint64_t n_active;            // down rows used
    uint64_t read_bytes;          // FFN bytes read, predictor included
    uint64_t dense_bytes;         // FFN bytes a dense pass would have read
    uint64_t predictor_us;
    uint64_t gate_us;
    uint64_t up_down_us;
    uint64_t total_us;
    uint64_t n_gpu_neurons;       // neurons that devices computed, summed over tokens
    uint64_t cpu_us;              // the CPU's part of blocks,
    uint64_t gpu_us;              // the device's part,
    uint64_t wait_us;             // and what the CPU only waited for the device
    uint64_t copy_us;             // the host spent in copies; devices that queue copy later
    uint64_t copied_bytes;        // between host and devices
    uint64_t n_gpu_active;        // while there is a trace: values other than 0 on devices (blocks computed there whole not counted),
    uint64_t n_cpu_active;        // and always: neurons that the CPU used
    uint64_t gpu_read_bytes;      // FFN bytes read by devices
    double overlap_sum;           // Jaccard overlap of active sets of consecutive single tokens, summed
    uint64_t n_overlaps;
};

GGML_POWERINFER_API void ggml_backend_powerinfer_plan_stats(
    ggml_backend_powerinfer_plan_t plan, struct ggml_backend_powerinfer_stats * stats);
GGML_POWERINFER_API void ggml_backend_powerinfer_plan_reset_stats(ggml_backend_powerinfer_plan_t plan);

struct ggml_backend_powerinfer_layer {
    int64_t n_ff;                                    // 0: not covered
    enum ggml_backend_powerinfer_sparsity sparsity;  // what this layer runs: DENSE, EXACT, THRESHOLD or PREDICTED
    const char * gate_type;                          // ggml type names of the rows as stored; "" when absent
    const char * up_type;
    const char * down_type;
    int64_t n_hot;                                   // neurons on a device
    const char * device;                             // its name; "" when n_hot is 0
    uint64_t n_tokens;
    uint64_t n_candidates;
    uint64_t n_active;
};

GGML_POWERINFER_API int ggml_backend_powerinfer_plan_n_layer(ggml_backend_powerinfer_plan_t plan);
GGML_POWERINFER_API int64_t ggml_backend_powerinfer_plan_n_embd(ggml_backend_powerinfer_plan_t plan);
GGML_POWERINFER_API bool ggml_backend_powerinfer_plan_layer(
    ggml_backend_powerinfer_plan_t plan, int i_layer, struct ggml_backend_powerinfer_layer * layer);

// When the parts of a block ran, in seconds of one clock. A part that there wasn't has begin == end == 0.
struct ggml_backend_powerinfer_block_times {
    int i_layer;
    int64_t n_tokens;
    double begin_s;
    double end_s;
    double cpu_begin_s;
    double cpu_end_s;
    double gpu_begin_s;  // a device that queues its work: when it was handed over
    double gpu_end_s;    // its result was in host memory
};
typedef void (*ggml_backend_powerinfer_trace_t)(const struct ggml_backend_powerinfer_block_times * times, void * user_data);

// Called on the thread that computes, after every whole block; devices count active neurons meanwhile. NULL stops it.
GGML_POWERINFER_API void ggml_backend_powerinfer_plan_set_trace(
    ggml_backend_powerinfer_plan_t plan, ggml_backend_powerinfer_trace_t trace, void * user_data);

// Anonymous memory that the plan's buffers hold.
GGML_POWERINFER_API uint64_t ggml_backend_powerinfer_plan_memory_bytes(ggml_backend_powerinfer_plan_t plan);

// Memory of hot rows on the split's device number i_device.
GGML_POWERINFER_API uint64_t ggml_backend_powerinfer_plan_device_bytes(ggml_backend_powerinfer_plan_t plan, int i_device);

// Kernel set in use, e.g. "avx512".
GGML_POWERINFER_API const char * ggml_backend_powerinfer_plan_kernels(ggml_backend_powerinfer_plan_t plan);

// Counting (options.count), summed since the last reset. Per-neuron arrays are in the base model's neuron order.
// `active` counts in every mode; the histograms and sums only while the layer runs DENSE.
// A histogram bin i holds values v with floor(8 * (log2 v + 24)) == i, clamped to 0 .. n_bins - 1; bin 0 holds v == 0 too.
#define GGML_POWERINFER_N_BINS 320
struct ggml_backend_powerinfer_counts {
    uint64_t n_tokens;
    uint64_t * active;           // (n_ff) tokens in which the neuron was active under the running mode; caller's array, may be NULL
    uint64_t * gate_histogram;   // (GGML_POWERINFER_N_BINS) of |act(gate)|; may be NULL
    uint64_t * product_histogram;  // (GGML_POWERINFER_N_BINS) of |act(gate) * up| * norm(down row); may be NULL
    double * gate_abs_sum;       // (n_ff) sum of |act(gate)| per neuron; may be NULL
};
GGML_POWERINFER_API bool ggml_backend_powerinfer_plan_counts(
    ggml_backend_powerinfer_plan_t plan, int i_layer, struct ggml_backend_powerinfer_counts * counts);
GGML_POWERINFER_API void ggml_backend_powerinfer_plan_reset_counts(ggml_backend_powerinfer_plan_t plan);

// Capture of FFN inputs (predictor training): called on the thread that computes, once per block with
// x (n_tokens, n_embd) f32, valid during the call. NULL stops it.
typedef void (*ggml_backend_powerinfer_capture_t)(int i_layer, int64_t n_tokens, int64_t n_embd, const float * x, void * user_data);
GGML_POWERINFER_API void ggml_backend_powerinfer_plan_set_capture(
    ggml_backend_powerinfer_plan_t plan, ggml_backend_powerinfer_capture_t capture, void * user_data);

// What a model path is. 1: an extended GGUF; 0: a plain GGUF (sidecar_path gets the sidecar beside it, or "");
// -1: unreadable, with one sentence in error.
GGML_POWERINFER_API int ggml_backend_powerinfer_inspect_path(
    const char * model_path, char * sidecar_path, size_t sidecar_size, char * error, size_t error_size);

#ifdef __cplusplus
}
#endif
