// Loads the base model of a plan through libllama, with the plan's buffer type for its FFN tensors.
#include "model-load.h"

#include <omp.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>
#include <string>
#include <vector>

namespace powerinfer {

namespace {

struct memory_range {
    uintptr_t begin;
    uintptr_t end;
};

// This process's private anonymous memory, ascending.
std::vector<memory_range> anonymous_memory() {
    std::vector<memory_range> ranges;
    std::ifstream maps("/proc/self/maps");
    std::string line;
    while (std::getline(maps, line)) {
        unsigned long begin = 0;
        unsigned long end = 0;
        unsigned long inode = 0;
        char flags[5] = "";
        if (std::sscanf(line.c_str(), "%lx-%lx %4s %*s %*s %lu", &begin, &end, flags, &inode) == 4 && inode == 0 &&
            std::strcmp(flags, "rw-p") == 0) {
            ranges.push_back({begin, end});
        }
    }
    return ranges;
}

// Asks for huge pages for the anonymous memory that came since `before`: the weights that upstream repacked (attention,
// output). In 4-KiB pages they are read at half the speed, less when memory is fragmented; upstream doesn't ask.
void use_huge_pages(const std::vector<memory_range> & before) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t huge_page_bytes = 2u << 20;
    constexpr int madv_collapse = 25;  // Linux 6.1: now, not when the kernel comes around to it
    auto ask = [](uintptr_t begin, uintptr_t end) {
        begin = (begin + huge_page_bytes - 1) / huge_page_bytes * huge_page_bytes;
        end = end / huge_page_bytes * huge_page_bytes;
        if (begin < end && madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE) == 0) {
            madvise(reinterpret_cast<void *>(begin), end - begin, madv_collapse);
        }
    };
    auto old = before.begin();
    for (const memory_range & range : anonymous_memory()) {
        uintptr_t at = range.begin;
        while (old != before.end() && old->end <= at) {
            ++old;
        }
        for (auto part = old; part != before.end() && part->begin < range.end; ++part) {
            ask(at, part->begin < at ? at : part->begin);
            at = std::max(at, part->end);
        }
        ask(at, range.end);
    }
#else
    (void) before;
#endif
}

}  // namespace

status model_open(ggml_backend_powerinfer_plan_t plan, const std::string & path, llama_model_params params, llama_model *& out) {
    out = nullptr;
    if (plan == nullptr) {
        out = llama_model_load_from_file(path.c_str(), params);
        return {};
    }
    // The override list dies with this call; libllama reads it only while it loads.
    std::vector<llama_model_tensor_buft_override> overrides;
    overrides.push_back({ggml_backend_powerinfer_plan_tensor_pattern(plan), ggml_backend_powerinfer_plan_buffer_type(plan)});
    for (const auto * given = params.tensor_buft_overrides; given != nullptr && given->pattern != nullptr; ++given) {
        overrides.push_back(*given);
    }
    overrides.push_back({nullptr, nullptr});
    params.tensor_buft_overrides = overrides.data();

    const std::string base = ggml_backend_powerinfer_plan_base_path(plan);
    const uint64_t offset = ggml_backend_powerinfer_plan_base_offset(plan);
    if (offset == 0) {
        out = llama_model_load_from_file(base.c_str(), params);
        return {};
    }
    FILE * file = std::fopen(base.c_str(), "rb");
    if (file == nullptr || fseeko(file, static_cast<off_t>(offset), SEEK_SET) != 0) {
        const std::string reason = std::strerror(errno);
        if (file != nullptr) {
            std::fclose(file);
        }
        return status::error(base + ": can't be read (" + reason + "); check the path and permissions.");
    }
    out = llama_model_load_from_file_ptr(file, params);
    std::fclose(file);
    return {};
}

status model_load(ggml_backend_powerinfer_plan_t plan, llama_model_params params, llama_model *& out) {
    out = nullptr;
    const std::vector<memory_range> before = anonymous_memory();
    const std::string path = ggml_backend_powerinfer_plan_base_path(plan);
    llama_model * model = nullptr;
    if (status opened = model_open(plan, path, params, model); !opened.ok()) {
        return opened;
    }
    char error[1024] = "";
    const bool fits = params.vocab_only || params.no_alloc || ggml_backend_powerinfer_plan_check(plan, error, sizeof(error));
    if (model != nullptr && fits) {
        use_huge_pages(before);
        out = model;
        return {};
    }
    if (model != nullptr) {
        llama_model_free(model);
        return status::error(error);
    }
    // The plan's own reason, when it has one, is the better one.
    const bool ours = std::strstr(error, "no complete FFN") == nullptr && error[0] != '\0';
    return status::error(ours ? error
                              : path + ": libllama could not load the base model; its log says why (verbose); check the file and the free memory.");
}

int physical_cores_allowed() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        return 1;
    }
    // Cores are told apart by the list of their hyper-threads.
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed)) {
            continue;
        }
        std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        std::string siblings;
        if (!std::getline(file, siblings) || siblings.empty()) {
            siblings = std::to_string(cpu);
        }
        cores.insert(siblings);
    }
    return cores.empty() ? 1 : static_cast<int>(cores.size());
}

void openmp_team_end() {
#if defined(__clang__) || __GNUC__ >= 9  // OpenMP 5.0
    omp_pause_resource_all(omp_pause_soft);
#endif
}

}  // namespace powerinfer
