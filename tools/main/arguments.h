// Command line of powerinfer-main. A flag that llama.cpp has too is spelt as there. Parsing opens no model and prints nothing.
#pragma once

#include "ggml-powerinfer.h"
#include "status.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace powerinfer {

// The one place of each default; flags and help are made from it.
struct arguments {
    // model
    std::string model_path;
    std::string plan_path;  // --plan; empty: the sidecar beside the model, if there is one
    bool no_plan = false;
    ggml_backend_powerinfer_sparsity sparsity = GGML_POWERINFER_AUTO;
    bool strict = false;
    bool mapped = false;
    bool mlock = false;
    bool no_mmap = false;
    int32_t n_gpu_layers = -1;  // -1: as llama.cpp decides, -2: all
    std::string tensor_split;   // checked text, e.g. "3,1"; empty: as llama.cpp decides
    std::string devices;        // names with commas between, or "none"; empty: as llama.cpp chooses
    std::string rpc_servers;    // HOST:PORT with commas between
    std::string vram_budget;    // checked text, e.g. "8", "8GiB", "75%", "8GiB,6GiB"; empty: not given
    bool reset_gpu_index = false;
    bool disable_gpu_index = false;
    bool require_split = false;

    // text
    std::string prompt;  // any bytes, NUL included
    std::string system_prompt;
    bool escape = true;  // \n, \t, ... in -p and -sys
    bool display_prompt = true;
    bool interactive = false;
    bool conversation = false;
    int32_t n_predict = -1;  // tokens; below 0: until the end of the text or of the context

    // compute
    int32_t n_ctx = 4096;         // tokens; 0: what the model was trained with
    int32_t n_batch = 2048;       // tokens
    int32_t n_ubatch = 512;       // tokens
    int32_t n_threads = 0;        // 0 or less: physical cores that the process may use
    int32_t n_threads_batch = 0;  // 0 or less: n_threads

    // sampling; a value in the model's own metadata replaces a default, never a given flag
    int64_t seed = -1;            // -1: random
    float temp = 0.8f;            // 0 or less: the most likely token
    int32_t top_k = 40;           // 0 or less: off
    float typical_p = 1.0f;       // 1: off
    float top_p = 0.95f;          // 1: off
    float min_p = 0.05f;          // 0: off
    float repeat_penalty = 1.0f;  // 1: off
    int32_t repeat_last_n = 64;   // tokens; 0: off
    bool ignore_eos = false;

    // output
    bool log_disable = false;
    bool verbose = false;
    bool help = false;
    bool version = false;

    std::set<std::string> given;  // long names of the flags that were given
};

// Reads argv[1 .. argc - 1]. With --help or --version nothing else is checked.
status arguments_parse(int argc, char ** argv, arguments & out);

// Sets one flag's value by its long name. Returns "" or, with nothing changed, what was expected instead.
std::string arguments_set(arguments & args, const std::string & long_name, const std::string & value);

// Reads the value of --tensor-split; false when it is none.
bool tensor_split_parse(const std::string & text, std::vector<float> & out);

// The text of --help.
std::string arguments_help();

}  // namespace powerinfer
