// Loads the base model of a plan through libllama, its FFN in the plan's buffers. Every file that knows llama.h is here:
// this one, llama-abi.h and vram-budget.h.
// Linked into the programs that load models (powerinfer-main, the Python bindings), not into the backend module.
#pragma once

#include "ggml-powerinfer.h"
#include "status.h"

#include "llama.h"

#include <string>

namespace powerinfer {

// Loads without a check of the weights: the plan's base as model_load does, or with plan == nullptr the GGUF at `path`.
// The model is nullptr when libllama refuses; its log says why. An error only where the file can't be read.
status model_open(ggml_backend_powerinfer_plan_t plan, const std::string & path, llama_model_params params, llama_model *& out);

// Loads the plan's base model with `params`; the plan's override is put before the caller's own
// tensor_buft_overrides. The weights are checked against the plan. On failure `out` is nullptr.
// The caller frees the model with llama_model_free and may free the plan handle before or after.
status model_load(ggml_backend_powerinfer_plan_t plan, llama_model_params params, llama_model *& out);

// Physical cores that this process may run on (affinity mask and SMT siblings considered), at least 1.
int physical_cores_allowed();

// Ends the calling thread's OpenMP team; its next parallel work makes another. Where a model is loaded in one thread and used in
// another, libgomp counts both teams: with more threads than cores they sleep at each barrier instead of spinning.
void openmp_team_end();

}  // namespace powerinfer
