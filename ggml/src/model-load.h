// The only file that knows llama.h: loads the base model of a plan, its FFN in the plan's buffers.
// Linked into the programs that load models (powerinfer-main, the Python bindings), not into the backend module.
#pragma once

#include "ggml-powerinfer.h"
#include "status.h"

#include "llama.h"

namespace powerinfer {

// Loads the plan's base model with `params`; the plan's override is put before the caller's own
// tensor_buft_overrides. The weights are checked against the plan. On failure `out` is nullptr.
// The caller frees the model with llama_model_free and may free the plan handle before or after.
status model_load(ggml_backend_powerinfer_plan_t plan, llama_model_params params, llama_model *& out);

// Physical cores that this process may run on (affinity mask and SMT siblings considered), at least 1.
int physical_cores_allowed();

}  // namespace powerinfer
