// libpowerinfer-preload.so: brings the device into an unmodified llama.cpp program by LD_PRELOAD.
// With POWERINFER_PLAN unset or empty it does nothing; the device itself opens the plan named there.
#include "ggml-powerinfer.h"

#include <cstdio>
#include <cstdlib>

__attribute__((constructor)) static void powerinfer_preload() {
    const char * plan = std::getenv("POWERINFER_PLAN");
    if (plan == nullptr || plan[0] == '\0') return;
    ggml_backend_reg_t reg = ggml_backend_powerinfer_reg();
    if (reg == nullptr) {  // the reason is on stderr already
        std::fprintf(stderr, "powerinfer-preload: %s: found no usable device; the program goes on without the plan\n", plan);
        return;
    }
    ggml_backend_register(reg);
}
