// The tile configuration of the threads that upstream computes on. They are those of an OpenMP team, which other libraries may share.
#include "upstream-tiles.h"

#if defined(__x86_64__) && defined(POWERINFER_AMX)

#include "kernels/kernel-table.h"

#include <cstdint>
#include <cstring>

namespace powerinfer {

namespace {

struct tile_config {
    uint8_t palette_id = 0;  // 0: not configured
    uint8_t rest[63] = {};
};

thread_local tile_config remembered;

tile_config tile_config_read() {
    tile_config config;
    __asm__ volatile("sttilecfg %0" : "=m"(config));
    return config;
}

}  // namespace

void upstream_tiles_restore(int n_threads) {
    if (remembered.palette_id == 0) {
        return;
    }
    const tile_config current = tile_config_read();
    if (std::memcmp(&current, &remembered, sizeof(current)) == 0) {
        return;  // who changes a team's threads changes its first one
    }
    const tile_config wanted = remembered;
#pragma omp parallel num_threads(n_threads)
    __asm__ volatile("ldtilecfg %0" ::"m"(wanted));
}

void upstream_tiles_remember() {
    static const bool has_tiles = cpu_has_amx();
    if (has_tiles) {
        const tile_config current = tile_config_read();
        if (current.palette_id != 0) {
            remembered = current;
        }
    }
}

}  // namespace powerinfer

#else

namespace powerinfer {

void upstream_tiles_restore(int) {}

void upstream_tiles_remember() {}

}  // namespace powerinfer

#endif
