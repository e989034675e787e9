// libpowerinfer-preload.so: brings the device into an unmodified llama.cpp program by LD_PRELOAD.
// With POWERINFER_PLAN unset or empty it does nothing. A plan that can't be used ends the process: without it the
// program would compute the base model, which may be another function.
#include "ggml-powerinfer.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

__attribute__((constructor)) static void powerinfer_preload() {
    const char * path = std::getenv("POWERINFER_PLAN");
    if (path == nullptr || path[0] == '\0') {
        return;
    }
    // Opening registers the device. The device opens the plan again for itself when a model is loaded; by then programs may
    // have closed stderr, so what is wrong with it is said here. Its notes are said there.
    ggml_backend_powerinfer_options options = ggml_backend_powerinfer_default_options();
    options.note = [](const char *, void *) {};
    char error[4096] = "";
    ggml_backend_powerinfer_plan_t plan = ggml_backend_powerinfer_plan_open(path, nullptr, &options, error, sizeof(error));
    if (plan == nullptr) {
        std::fprintf(stderr, "powerinfer: POWERINFER_PLAN: %s\n", error);
        _exit(1);
    }
    ggml_backend_powerinfer_plan_free(plan);
}
