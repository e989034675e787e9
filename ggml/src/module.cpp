// Entry point of the backend module for programs that load ggml backends themselves (GGML_BACKEND_PATH).
#include "ggml-powerinfer.h"

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) { return ggml_backend_powerinfer_reg(); }
