// The avx2 set. Placeholder: reported as unsupported until its kernels are in.
#include "kernel-table.h"

namespace powerinfer {
namespace {
bool never_supported() {
    return false;
}
}  // namespace
const kernel_table kernels_avx2 = {"avx2", never_supported, nullptr, 0, nullptr, nullptr, nullptr, nullptr};
}  // namespace powerinfer
