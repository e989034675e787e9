// The kernel sets that were compiled in, what the CPU and operating system can run, and the choice by name.
// Compiled without wide instruction-set flags, so that detection itself runs everywhere.
#include "kernel-table.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace powerinfer {

namespace {

const kernel_table * const tables[] = {
#if defined(__x86_64__)
#if defined(POWERINFER_AMX)
    &kernels_amx,
#endif
    &kernels_avx512,
    &kernels_avx2,
#elif defined(__aarch64__)
    &kernels_neon,
#endif
    &kernels_scalar,
};
constexpr int n_tables = sizeof(tables) / sizeof(tables[0]);

#if defined(__x86_64__)

struct cpu_features {
    uint64_t xcr0 = 0;       // register state that the operating system saves
    uint32_t leaf1_ecx = 0;
    uint32_t leaf7_ebx = 0;
    uint32_t leaf7_ecx = 0;
    uint32_t leaf7_edx = 0;
    uint32_t leaf7_1_eax = 0;
};

bool has_bits(uint64_t value, uint64_t bits) {
    return (value & bits) == bits;
}

cpu_features cpu_detect() {
    cpu_features f;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !has_bits(ecx, bit_OSXSAVE)) {
        return f;
    }
    f.leaf1_ecx = ecx;
    uint32_t lo = 0, hi = 0;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    f.xcr0 = (uint64_t(hi) << 32) | lo;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
        f.leaf7_ebx = ebx;
        f.leaf7_ecx = ecx;
        f.leaf7_edx = edx;
        if (eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) {
            f.leaf7_1_eax = eax;
        }
    }
    return f;
}

#endif

}  // namespace

#if defined(__x86_64__)

bool cpu_has_avx2() {
    const cpu_features f = cpu_detect();
    return has_bits(f.xcr0, 0x06) &&  // xmm, ymm
           has_bits(f.leaf1_ecx, bit_AVX | bit_FMA | bit_F16C) && has_bits(f.leaf7_ebx, bit_AVX2 | bit_BMI | bit_BMI2);
}

bool cpu_has_avx512() {
    const cpu_features f = cpu_detect();
    return cpu_has_avx2() && has_bits(f.xcr0, 0xe6) &&  // xmm, ymm, opmask, zmm
           has_bits(f.leaf7_ebx, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL) &&
           has_bits(f.leaf7_ecx, bit_AVX512VNNI);
}

bool cpu_has_amx() {
    constexpr uint32_t amx_bf16 = 1u << 22, amx_tile = 1u << 24, avx512_bf16 = 1u << 5;
    const cpu_features f = cpu_detect();
    if (!cpu_has_avx512() || !has_bits(f.xcr0, 0x60000) || !has_bits(f.leaf7_edx, amx_bf16 | amx_tile) ||
        !has_bits(f.leaf7_1_eax, avx512_bf16)) {
        return false;
    }
#if defined(__linux__)
    // Linux gives a process the 8 KiB of tile state only when it asks (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA).
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

#elif defined(__aarch64__)

bool cpu_has_neon() {
    constexpr unsigned long needed = HWCAP_ASIMD | HWCAP_ASIMDDP;
    return (getauxval(AT_HWCAP) & needed) == needed;
}

#endif

const row_kernels * kernel_table_find(const kernel_table * table, int row_type) {
    for (int i = 0; i < table->n_rows; ++i) {
        if (table->rows[i].row_type == row_type) {
            return &table->rows[i];
        }
    }
    return nullptr;
}

const kernel_table * kernel_table_select(const char * name) {
    const bool best = name == nullptr || name[0] == '\0';
    for (const kernel_table * table : tables) {
        if ((best || std::strcmp(name, table->name) == 0) && table->is_supported()) {
            return table;
        }
    }
    return nullptr;
}

int kernel_table_list(const kernel_table * const ** out) {
    *out = tables;
    return n_tables;
}

}  // namespace powerinfer
