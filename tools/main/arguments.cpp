// One table of flags: parsing, help and the hint for a misspelt flag all come from it.
#include "arguments.h"

#include "vram-budget.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

namespace powerinfer {

namespace {

constexpr int32_t int_max = std::numeric_limits<int32_t>::max();
constexpr float float_max = std::numeric_limits<float>::max();

struct flag {
    std::vector<std::string> names;  // the last one is the long name
    std::string value;               // what the value is called in the help; empty: the flag takes none
    std::string help;
    // Stores the value. Returns "" or what was expected instead.
    std::function<std::string(arguments & args, const std::string & text)> set;
};

std::string number_text(double value) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.10g", value);
    return text;
}

// A flag with a number from lo to hi.
template <typename T>
flag number(std::vector<std::string> names, T arguments::* member, T lo, T hi, const std::string & help) {
    constexpr bool is_integer = std::is_integral_v<T>;
    const std::string fallback = number_text(double(arguments{}.*member));
    return {std::move(names), "N", help + " (default " + fallback + ")",
            [=](arguments & args, const std::string & text) -> std::string {
                char * end = nullptr;
                errno = 0;
                T value;
                if constexpr (is_integer) {
                    const long long parsed = std::strtoll(text.c_str(), &end, 10);
                    value = T(std::clamp<long long>(parsed, std::numeric_limits<T>::lowest(), std::numeric_limits<T>::max()));
                    if (errno != 0 || parsed != (long long)value) {
                        end = nullptr;
                    }
                } else {
                    value = T(std::strtod(text.c_str(), &end));
                    if (errno != 0 || !std::isfinite(value)) {
                        end = nullptr;
                    }
                }
                const bool is_number =
                    !text.empty() && !std::isspace((unsigned char)text[0]) && end == text.c_str() + text.size();
                if (is_number && value >= lo && value <= hi) {
                    args.*member = value;
                    return "";
                }
                std::string expected = is_integer ? "an integer" : "a number";
                const bool has_lo = lo > std::numeric_limits<T>::lowest();
                const bool has_hi = hi < std::numeric_limits<T>::max();
                if (has_lo && has_hi) {
                    expected += " from " + number_text(double(lo)) + " to " + number_text(double(hi));
                } else if (has_lo) {
                    expected += " of at least " + number_text(double(lo));
                }
                return expected;
            }};
}

flag text(std::vector<std::string> names, std::string value, std::string arguments::* member, const std::string & help) {
    return {std::move(names), std::move(value), help, [=](arguments & args, const std::string & text) {
                args.*member = text;
                return std::string();
            }};
}

flag file_name(std::vector<std::string> names, std::string arguments::* member, const std::string & help) {
    return {std::move(names), "FILE", help, [=](arguments & args, const std::string & text) -> std::string {
                args.*member = text;
                return text.empty() ? "a file name" : "";
            }};
}

flag on_off(std::vector<std::string> names, bool arguments::* member, bool value, const std::string & help) {
    return {std::move(names), "", help, [=](arguments & args, const std::string &) {
                args.*member = value;
                return std::string();
            }};
}

std::string set_sparsity(arguments & args, const std::string & text) {
    const char * names[] = {"auto", "dense", "exact", "threshold", "predicted"};  // in the order of the enum
    for (int i = 0; i < 5; i++) {
        if (text == names[i]) {
            args.sparsity = ggml_backend_powerinfer_sparsity(i);
            return "";
        }
    }
    return "auto, dense, exact, threshold or predicted";
}

std::string set_gpu_layers(arguments & args, const std::string & text) {
    if (text == "auto" || text == "all") {
        args.n_gpu_layers = text == "auto" ? -1 : -2;
        return "";
    }
    flag as_number = number({"--gpu-layers"}, &arguments::n_gpu_layers, -2, int_max, "");
    return as_number.set(args, text).empty() ? "" : "a number of layers, auto or all";
}

std::string set_vram_budget(arguments & args, const std::string & text) {
    std::vector<budget_amount> amounts;
    if (!budget_parse(text, amounts).ok()) {
        return "an amount of GPU memory: GiB as a plain number, or 8GiB, 512MiB, 75%, with several GPUs one each and commas between";
    }
    args.vram_budget = text;
    return "";
}

std::string set_tensor_split(arguments & args, const std::string & text) {
    std::vector<float> shares;
    if (!tensor_split_parse(text, shares)) {
        return "the share of each GPU, e.g. 3,1";
    }
    args.tensor_split = text;
    return "";
}

std::string set_prompt_file(arguments & args, const std::string & path) {
    std::FILE * file = path == "-" ? stdin : std::fopen(path.c_str(), "rb");
    if (file == nullptr) {
        return std::string("a readable file (") + std::strerror(errno) + ")";
    }
    std::string content;
    char block[1 << 16];
    for (size_t n; (n = std::fread(block, 1, sizeof(block), file)) > 0;) {
        content.append(block, n);
    }
    const bool failed = std::ferror(file) != 0;
    const std::string reason = failed ? std::strerror(errno) : "";
    if (file != stdin) {
        std::fclose(file);
    }
    if (failed) {
        return "a readable file (" + reason + ")";
    }
    if (!content.empty() && content.back() == '\n') {
        content.pop_back();
    }
    args.prompt = std::move(content);
    return "";
}

struct section {
    const char * title;
    std::vector<flag> flags;
};

const std::vector<section> & flag_table() {
    using a = arguments;
    static const std::vector<section> table = {
        {"Model",
         {
             file_name({"-m", "--model"}, &a::model_path,
                       "the model: a plain GGUF (a sidecar X.powerinfer.gguf beside it is used) or an extended one"),
             file_name({"--plan"}, &a::plan_path, "the sidecar to use with a plain GGUF"),
             on_off({"--no-plan"}, &a::no_plan, true, "ignore the sidecar: llama.cpp computes every neuron"),
             {{"--sparsity"}, "MODE", "auto, dense, exact, threshold or predicted (default auto)", set_sparsity},
             on_off({"--strict"}, &a::strict, true, "a fallback is an error instead of a note"),
             on_off({"--mapped"}, &a::mapped, true,
                    "FFN weights stay mapped from the file instead of copied (models near the size of memory)"),
             on_off({"--mlock"}, &a::mlock, true, "lock the weights in memory"),
             on_off({"--no-mmap"}, &a::no_mmap, true, "read the weights instead of mapping the file"),
             {{"-ngl", "--n-gpu-layers", "--gpu-layers"},
              "N",
              "layers that llama.cpp puts on the GPU: a number, auto or all (default auto)",
              set_gpu_layers},
             {{"-ts", "--tensor-split"}, "N0,N1,...", "share of the layers that each GPU gets, e.g. 3,1", set_tensor_split},
             text({"-dev", "--device"}, "NAME,...", &a::devices, "GPU devices to use, or none (default: as llama.cpp chooses)"),
             text({"--rpc"}, "HOST:PORT,...", &a::rpc_servers, "use the devices of these ggml RPC servers too"),
             {{"--vram-budget"},
              "SIZE",
              "GPU memory that may be used for everything: GiB, or 8GiB, 512MiB, 75%; one for all GPUs, or one each with commas",
              set_vram_budget},
             on_off({"--reset-gpu-index"}, &a::reset_gpu_index, true, "place neurons anew, whatever placement the plan has saved"),
             on_off({"--disable-gpu-index"}, &a::disable_gpu_index, true, "no single neurons on the GPU, only whole dense blocks"),
             on_off({"--require-split"}, &a::require_split, true, "it is an error when no neuron is on the GPU"),
         }},
        {"Text",
         {
             text({"-p", "--prompt"}, "TEXT", &a::prompt, "text to continue; with -cnv the first message. None: starts from BOS"),
             {{"-f", "--file"},
              "FILE",
              "read the prompt from a file, byte for byte without its last newline; - is stdin",
              set_prompt_file},
             on_off({"-e", "--escape"}, &a::escape, true, "\\n \\r \\t \\' \\\" \\\\ in -p and -sys are escapes (the default)"),
             on_off({"--no-escape"}, &a::escape, false, "-p and -sys are taken as they are"),
             number<int32_t>({"-n", "--predict", "--n-predict"}, &a::n_predict, -2, int_max,
                             "tokens to generate; -1: until the end of the text or of the context"),
             on_off({"--ignore-eos"}, &a::ignore_eos, true, "never end the text by an end token"),
             on_off({"-i", "--interactive"}, &a::interactive, true, "after the text ends, read more text from stdin and go on"),
             on_off({"-cnv", "--conversation"}, &a::conversation, true,
                    "chat with the model's chat template; a line that ends in \\ continues on the next"),
             on_off({"-no-cnv", "--no-conversation"}, &a::conversation, false, "no chat (the default)"),
             text({"-sys", "--system-prompt"}, "TEXT", &a::system_prompt, "system message of the chat"),
             on_off({"--no-display-prompt"}, &a::display_prompt, false, "don't print the prompt"),
         }},
        {"Compute",
         {
             number<int32_t>({"-c", "--ctx-size"}, &a::n_ctx, 0, int_max,
                             "context in tokens; 0: what the model was trained with; the default is never more than that"),
             number<int32_t>({"-b", "--batch-size"}, &a::n_batch, 1, int_max, "prompt tokens per call"),
             number<int32_t>({"-ub", "--ubatch-size"}, &a::n_ubatch, 1, int_max, "prompt tokens per graph"),
             number<int32_t>({"-t", "--threads"}, &a::n_threads, -1, GGML_MAX_N_THREADS,
                             "threads for generation; 0 or less: physical cores allowed"),
             number<int32_t>({"-tb", "--threads-batch"}, &a::n_threads_batch, -1, GGML_MAX_N_THREADS,
                             "threads for prompts; 0 or less: as --threads"),
         }},
        {"Sampling",
         {
             number<int64_t>({"-s", "--seed"}, &a::seed, -1, 4294967295LL, "random seed; -1: a new one each time"),
             number<float>({"--temp", "--temperature"}, &a::temp, -float_max, float_max,
                           "temperature; 0 or less: the most likely token"),
             number<int32_t>({"--top-k"}, &a::top_k, -1, int_max, "keep the k most likely tokens; 0 or less: off"),
             number<float>({"--typical", "--typical-p"}, &a::typical_p, 0.0f, 1.0f, "locally typical sampling; 1: off"),
             number<float>({"--top-p"}, &a::top_p, 0.0f, 1.0f, "keep the most likely tokens up to this sum; 1: off"),
             number<float>({"--min-p"}, &a::min_p, 0.0f, 1.0f, "keep tokens at least this likely against the first; 0: off"),
             number<float>({"--repeat-penalty"}, &a::repeat_penalty, 1e-6f, 1e6f, "penalty of repeated tokens; 1: off"),
             number<int32_t>({"--repeat-last-n"}, &a::repeat_last_n, 0, int_max, "tokens that the penalty looks back; 0: off"),
         }},
        {"Output",
         {
             on_off({"--log-disable"}, &a::log_disable, true, "no notes and no timing on stderr, only errors"),
             on_off({"-v", "--verbose"}, &a::verbose, true, "llama.cpp's own log on stderr"),
             on_off({"-h", "--help"}, &a::help, true, "this text"),
             on_off({"--version"}, &a::version, true, "versions of this program and of llama.cpp"),
         }},
    };
    return table;
}

const flag * flag_find(const std::string & name) {
    for (const section & section : flag_table()) {
        for (const flag & flag : section.flags) {
            if (std::find(flag.names.begin(), flag.names.end(), name) != flag.names.end()) {
                return &flag;
            }
        }
    }
    return nullptr;
}

size_t edit_distance(const std::string & a, const std::string & b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++) {
        row[j] = j;
    }
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            const size_t above = row[j];
            row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
            diagonal = above;
        }
    }
    return row[b.size()];
}

// What to do about a flag that doesn't exist.
std::string hint(const std::string & name) {
    const size_t equals = name.find('=');
    if (equals != std::string::npos && flag_find(name.substr(0, equals)) != nullptr) {
        return "write '" + name.substr(0, equals) + " " + name.substr(equals + 1) + "'";
    }
    std::string nearest;
    size_t distance = name.size() / 3 + 1;  // further away than this it is no slip
    for (const section & section : flag_table()) {
        for (const flag & flag : section.flags) {
            for (const std::string & candidate : flag.names) {
                const size_t d = edit_distance(name, candidate);
                if (d < distance) {
                    distance = d;
                    nearest = candidate;
                }
            }
        }
    }
    return nearest.empty() ? "see --help" : "did you mean " + nearest + "?";
}

void unescape(std::string & text) {
    const std::string letters = "nrt'\"\\";
    const std::string bytes = "\n\r\t'\"\\";
    std::string out;
    for (size_t i = 0; i < text.size(); i++) {
        const size_t which = text[i] == '\\' && i + 1 < text.size() ? letters.find(text[i + 1]) : std::string::npos;
        if (which == std::string::npos) {
            out += text[i];
        } else {
            out += bytes[which];
            i++;
        }
    }
    text = std::move(out);
}

}  // namespace

status arguments_parse(int argc, char ** argv, arguments & out) {
    out = arguments{};
    bool prompt_is_typed = false;
    for (int i = 1; i < argc; i++) {
        std::string name = argv[i];
        if (name.empty() || name[0] != '-') {
            return status::error(
                "'" + name +
                "': found a word that belongs to no flag; expected a flag; give the model by -m and the prompt by -p");
        }
        if (name.compare(0, 2, "--") == 0) {
            std::replace(name.begin(), name.begin() + long(std::min(name.find('='), name.size())), '_', '-');
        }
        const flag * flag = flag_find(name);
        if (flag == nullptr) {
            return status::error(name + ": found an unknown flag; expected one of --help; " + hint(name));
        }
        std::string value;
        if (!flag->value.empty()) {
            if (i + 1 == argc) {
                return status::error(name + ": found no value; expected one after it (" + flag->value + "); see --help");
            }
            value = argv[++i];
        }
        const std::string expected = flag->set(out, value);
        if (!expected.empty()) {
            return status::error(name + ": found '" + value + "'; expected " + expected + "; see --help");
        }
        const std::string & long_name = flag->names.back();
        if (long_name == "--prompt" || long_name == "--file") {
            prompt_is_typed = long_name == "--prompt";
        }
        out.given.insert(long_name);
        if (out.help || out.version) {
            return {};
        }
    }
    if (out.model_path.empty()) {
        return status::error("--model: found none; expected a GGUF file; run powerinfer-main -m MODEL.gguf -p TEXT");
    }
    if (out.no_plan && !out.plan_path.empty()) {
        return status::error("--no-plan: found --plan too; expected one of them; leave one out");
    }
    if (out.no_plan && out.given.count("--sparsity") != 0 && out.sparsity != GGML_POWERINFER_DENSE) {
        return status::error("--no-plan: found a --sparsity that needs a plan; expected none, or dense; leave one out");
    }
    if (out.escape) {
        if (prompt_is_typed) {
            unescape(out.prompt);
        }
        unescape(out.system_prompt);
    }
    return {};
}

std::string arguments_set(arguments & args, const std::string & long_name, const std::string & value) {
    return flag_find(long_name)->set(args, value);
}

bool tensor_split_parse(const std::string & text, std::vector<float> & out) {
    out.clear();
    float sum = 0.0f;
    for (const char * at = text.c_str();; ++at) {
        char * end = nullptr;
        const float share = std::strtof(at, &end);
        if (end == at || !(share >= 0.0f) || !std::isfinite(share) || (*end != ',' && *end != '\0')) {
            return false;
        }
        out.push_back(share);
        sum += share;
        at = end;
        if (*end == '\0') {
            return sum > 0.0f && out.size() <= llama_max_devices();
        }
    }
}

std::string arguments_help() {
    std::string out =
        "usage: powerinfer-main -m MODEL.gguf [-p TEXT] [flags]\n"
        "\n"
        "  continue a text:  powerinfer-main -m model.gguf -p \"The capital of France is\" -n 32\n"
        "  chat:             powerinfer-main -m model.gguf -cnv -sys \"You are a helpful assistant\"\n"
        "\n"
        "The text goes to stdout, everything else to stderr. Ctrl-C ends the answer.\n"
        "POWERINFER_KERNELS=scalar|avx2|avx512|amx|neon in the environment chooses the kernel set.\n";
    for (const section & section : flag_table()) {
        out += std::string("\n") + section.title + ":\n";
        for (const flag & flag : section.flags) {
            std::string left = "  ";
            for (const std::string & name : flag.names) {
                left += (left.size() > 2 ? ", " : "") + name;
            }
            if (!flag.value.empty()) {
                left += " " + flag.value;
            }
            constexpr size_t column = 42;
            out += left.size() < column ? left + std::string(column - left.size(), ' ') : left + "\n" + std::string(column, ' ');
            out += flag.help + "\n";
        }
    }
    return out;
}

}  // namespace powerinfer
