// Force-included when llama-cpp-python is compiled by a GCC that believes ldtilecfg to read 8 bytes, so that it drops the
// stores to the other 56 of the tile configuration. This intrinsic says 64. Source: Intel SDM, LDTILECFG.
#if defined(__AMX_TILE__) && !defined(__ASSEMBLER__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%0" : : "m"(*(const char(*)[64])(config)))
#endif
