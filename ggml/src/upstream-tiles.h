// Upstream's CPU backend configures a thread's AMX tiles once and never looks again. Others in the process release them
// (torch's oneDNN after each bf16 product), and upstream's next tile instruction is an illegal one. These put back what it had.
#pragma once

#include "status.h"

namespace powerinfer {

// Before upstream computes with n_threads threads on behalf of this one.
POWERINFER_EXPORT void upstream_tiles_restore(int n_threads);

// After it computed.
POWERINFER_EXPORT void upstream_tiles_remember();

}  // namespace powerinfer
