// The avx512 set. Placeholder: reported as unsupported until its kernels are in.
#include "kernel-table.h"

namespace powerinfer {
namespace {
bool never_supported() {
    return false;
}
}  // namespace
const kernel_table kernels_avx512 = {"avx512", never_supported, nullptr, 0, nullptr, nullptr, nullptr, nullptr};
}  // namespace powerinfer
