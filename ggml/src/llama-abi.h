// Our declaration of the memory query that libllama 0.5.0-dev exports as C++ but doesn't install (its src/llama-ext.h).
// llama_abi_check() must have passed before a function of it is called; tools/bump_llama.py compares it with other releases.
#pragma once

#include "status.h"

#include "llama.h"

#include <cstddef>
#include <map>

// Bytes of one buffer type.
struct llama_memory_breakdown_data {
    size_t model = 0;    // weights
    size_t context = 0;  // KV cache, recurrent state
    size_t compute = 0;  // buffers of the graphs
};

std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data> llama_get_memory_breakdown(const struct llama_context * ctx);

int32_t llama_model_n_devices(const struct llama_model * model);
ggml_backend_dev_t llama_model_get_device(const struct llama_model * model, int i);

namespace powerinfer {

// Is the loaded libllama the release that this was built against?
status llama_abi_check();

}  // namespace powerinfer
