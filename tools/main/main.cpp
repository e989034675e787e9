// powerinfer-main: continues a text or chats, on libllama's public API. The text goes to stdout, all else to stderr.
// Nothing falls back silently: a fallback is one note, an error with --strict.
#include "arguments.h"

#include "ggml-powerinfer.h"
#include "model-load.h"
#include "status.h"
#include "vram-budget.h"

#include "llama.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace powerinfer {

namespace {

// ---- Ctrl-C: the first ends the answer, a second one before that happened ends the program ----

std::atomic<int> n_interrupts{0};

void on_interrupt(int) {
    if (n_interrupts.fetch_add(1) > 0) {
        _exit(130);
    }
}

bool is_interrupted() { return n_interrupts.load() > 0; }

// ---- stderr ----

void note(const std::string & text, bool quiet) {
    if (!quiet) {
        std::fprintf(stderr, "powerinfer-main: %s\n", text.c_str());
    }
}

// llama.cpp's log: all of it with --verbose, else the first error is kept for the one line that reports the failure.
struct upstream_log {
    bool verbose = false;
    std::string error;
};

void on_upstream_log(ggml_log_level level, const char * text, void * user_data) {
    auto * log = static_cast<upstream_log *>(user_data);
    if (log->verbose) {
        std::fputs(text, stderr);
    }
    if (level == GGML_LOG_LEVEL_ERROR && log->error.empty()) {
        log->error = text;
        while (!log->error.empty() && log->error.back() == '\n') {
            log->error.pop_back();
        }
    }
}

// An error that didn't stop anything is shown all the same.
void note_upstream_error(upstream_log & log) {
    if (!log.error.empty() && !log.verbose) {
        std::fprintf(stderr, "powerinfer-main: llama.cpp: %s\n", log.error.c_str());
    }
    log.error.clear();
}

status upstream_error(upstream_log & log, std::string text) {
    if (!log.error.empty()) {
        text += " (llama.cpp: " + log.error + ")";
    }
    return status::error(std::move(text));
}

// ---- stdout ----

// Length of the longest start of `text` that doesn't cut a UTF-8 character. Invalid bytes count as whole.
size_t whole_characters(const std::string & text) {
    const size_t n = text.size();
    for (size_t back = 1; back <= std::min<size_t>(3, n); back++) {
        const auto byte = (unsigned char)text[n - back];
        if ((byte & 0xC0) == 0x80) {
            continue;  // a continuation: its first byte is further left
        }
        const size_t length = byte >= 0xF0 && byte <= 0xF4  ? 4
                              : byte >= 0xE0 && byte < 0xF0 ? 3
                              : byte >= 0xC2 && byte < 0xE0 ? 2
                                                            : 1;
        return length > back ? n - back : n;
    }
    return n;
}

// Writes text as it comes, whole characters only.
class text_stream {
public:
    status write(const std::string & piece) {
        held_ += piece;
        return put(whole_characters(held_));
    }

    // What is held, and a newline where the text didn't end in one.
    status end() {
        if (status s = put(held_.size()); !s.ok()) {
            return s;
        }
        if (last_ == '\n') {
            return {};
        }
        held_ = "\n";
        return put(1);
    }

private:
    status put(size_t n) {
        if (n == 0) {
            return {};
        }
        last_ = held_[n - 1];
        if (std::fwrite(held_.data(), 1, n, stdout) != n || std::fflush(stdout) != 0) {
            return status::error(std::string("stdout: could not be written (") + std::strerror(errno) +
                                 "); expected an open file or pipe; check where the output goes");
        }
        held_.erase(0, n);
        return {};
    }

    std::string held_;
    char last_ = '\n';
};

// ---- stdin ----

// Reads lines; a line that ends in a backslash continues on the next.
class line_reader {
public:
    // false at the end of input or on Ctrl-C. `out` has no newline at its end.
    bool read(std::string & out) {
        out.clear();
        std::fputs("> ", stderr);
        for (std::string line; read_one(line);) {
            out += line;
            if (out.empty() || out.back() != '\\') {
                return true;
            }
            out.back() = '\n';
        }
        if (!out.empty() && !is_interrupted()) {
            return true;
        }
        std::fputc('\n', stderr);
        return false;
    }

private:
    bool read_one(std::string & line) {
        size_t newline;
        while ((newline = buffer_.find('\n')) == std::string::npos) {
            char block[4096];
            const ssize_t n = is_interrupted() ? -1 : ::read(STDIN_FILENO, block, sizeof(block));
            if (n < 0) {
                return false;
            }
            if (n == 0) {
                line = std::move(buffer_);
                buffer_.clear();
                return !line.empty();
            }
            buffer_.append(block, size_t(n));
        }
        line = buffer_.substr(0, newline);
        buffer_.erase(0, newline + 1);
        return true;
    }

    std::string buffer_;
};

// ---- the session: everything that is open ----

template <auto release>
struct releaser {
    template <typename T>
    void operator()(T * object) const {
        release(object);
    }
};

struct session {
    arguments args;
    upstream_log log;
    // The load's parameters point into these two.
    std::vector<float> tensor_split;
    budget_decision budget;
    // Freed in reverse order. Without a plan upstream computes.
    std::unique_ptr<ggml_backend_powerinfer_plan, releaser<ggml_backend_powerinfer_plan_free>> plan;
    std::unique_ptr<llama_model, releaser<llama_model_free>> model;
    std::unique_ptr<llama_context, releaser<llama_free>> context;
    std::unique_ptr<llama_sampler, releaser<llama_sampler_free>> sampler;
    const llama_vocab * vocab = nullptr;
    std::vector<llama_token> past;     // tokens in the context
    std::vector<llama_token> pending;  // tokens that follow them and were not computed yet
    int32_t n_ctx = 0;                 // tokens
    text_stream out;
    int64_t start_us = 0;
    int64_t load_us = 0;
    ggml_backend_powerinfer_stats prompt_stats{};      // of the plan, while prompts were read
    ggml_backend_powerinfer_stats generation_stats{};  // of the plan, while text was generated
};

// A fallback: a note, or with --strict the error.
status fallback(const session & s, const std::string & text) {
    if (s.args.strict) {
        return status::error(text);
    }
    note(text, s.args.log_disable);
    return {};
}

// ---- loading ----

// Opens the plan that belongs to the model path, if there is one.
status open_plan(session & s) {
    const arguments & args = s.args;
    char sidecar[4096];
    char error[4096];
    const int kind =
        ggml_backend_powerinfer_inspect_path(args.model_path.c_str(), sidecar, sizeof(sidecar), error, sizeof(error));
    if (kind < 0) {
        return status::error(error);
    }
    const bool is_extended = kind == 1;
    if (is_extended && (args.no_plan || !args.plan_path.empty())) {
        return status::error(args.model_path + ": found an extended GGUF and " + (args.no_plan ? "--no-plan" : "--plan") +
                             "; expected a plain GGUF with this flag; leave the flag out or give the base model");
    }
    if (args.no_plan) {
        return {};
    }
    const std::string plan_path = is_extended ? args.model_path : !args.plan_path.empty() ? args.plan_path : sidecar;
    if (plan_path.empty()) {
        if (args.sparsity == GGML_POWERINFER_DENSE) {
            return {};
        }
        const bool has_suffix =
            args.model_path.size() > 5 && args.model_path.compare(args.model_path.size() - 5, 5, ".gguf") == 0;
        const std::string stem = args.model_path.substr(0, args.model_path.size() - (has_suffix ? 5 : 0));
        return fallback(s, args.model_path +
                               ": it has no plan, so llama.cpp computes every neuron; make one with: powerinfer profile " +
                               args.model_path + " --text FILE -o " + stem + ".powerinfer.gguf");
    }
    ggml_backend_powerinfer_options options = ggml_backend_powerinfer_default_options();
    options.sparsity = args.sparsity;
    options.strict = args.strict;
    options.mapped = args.mapped;
    options.mlock = args.mlock;
    options.note = [](const char * text, void * user_data) {
        note(text, static_cast<const session *>(user_data)->args.log_disable);
    };
    options.note_user_data = &s;
    s.plan.reset(ggml_backend_powerinfer_plan_open(plan_path.c_str(), is_extended ? nullptr : args.model_path.c_str(), &options,
                                                   error, sizeof(error)));
    return s.plan ? status() : status::error(error);
}

// How far the load is: on a terminal in one line that goes away, elsewhere only with --verbose, every 10 %.
class load_progress {
public:
    explicit load_progress(const arguments & args)
        : text_("loading " + args.model_path.substr(args.model_path.find_last_of('/') + 1) + ":"),
          on_terminal_(isatty(STDERR_FILENO) && !args.log_disable), in_steps_(!isatty(STDERR_FILENO) && args.verbose) {}
    load_progress(const load_progress &) = delete;

    ~load_progress() {
        if (on_terminal_) {
            std::fputs("\r\x1b[K", stderr);
        }
    }

    // llama_model_params.progress_callback: `share` (0 .. 1) is done. Ctrl-C ends the load.
    static bool on_progress(float share, void * user_data) {
        auto * self = static_cast<load_progress *>(user_data);
        if (self->on_terminal_) {
            std::fprintf(stderr, "\r%s %3d %%", self->text_.c_str(), int(100 * share));
        } else if (self->in_steps_ && int(10 * share) > self->last_) {
            self->last_ = int(10 * share);
            std::fprintf(stderr, "%s %d %%\n", self->text_.c_str(), 10 * self->last_);
        }
        return !is_interrupted();
    }

private:
    std::string text_;
    bool on_terminal_;
    bool in_steps_;
    int last_ = -1;
};

// The context's parameters, for a model that may have no weights yet.
llama_context_params context_params(const arguments & args, const llama_model * model) {
    const int32_t n_trained = llama_model_n_ctx_train(model);
    int32_t n_ctx = args.n_ctx;
    if (n_ctx == 0 || (args.given.count("--ctx-size") == 0 && n_ctx > n_trained)) {
        n_ctx = n_trained;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = uint32_t(n_ctx);
    params.n_batch = uint32_t(args.n_batch);
    params.n_ubatch = uint32_t(args.n_ubatch);
    params.n_threads = args.n_threads > 0 ? args.n_threads : physical_cores_allowed();
    params.n_threads_batch = args.n_threads_batch > 0 ? args.n_threads_batch : params.n_threads;
    params.abort_callback = [](void *) { return is_interrupted(); };
    params.no_perf = false;
    return params;
}

// Decides what goes to the GPU, says it, and puts it into the parameters of the load.
status take_budget(session & s, llama_model_params & params) {
    const arguments & args = s.args;
    const bool asks_for_layers = args.given.count("--gpu-layers") != 0 && args.n_gpu_layers != -1;
    if (asks_for_layers && args.n_gpu_layers != 0 && !has_gpu_device()) {
        status answer =
            fallback(s, "--gpu-layers: found no GPU device; every layer is computed on the CPU; use -ngl 0");
        if (!answer.ok()) {
            return answer;
        }
    }
    budget_request request;
    request.budget = args.vram_budget;
    request.has_n_gpu_layers = asks_for_layers;
    request.reset_index = args.reset_gpu_index;
    request.disable_index = args.disable_gpu_index;
    request.require_split = args.require_split;
    request.strict = args.strict;
    if (!args.devices.empty()) {
        if (status t = find_devices(args.devices, request); !t.ok()) {
            return t;
        }
    }
    if (!args.tensor_split.empty()) {
        tensor_split_parse(args.tensor_split, s.tensor_split);
        s.tensor_split.resize(llama_max_devices());
        params.tensor_split = s.tensor_split.data();
    }
    status decided = budget_decide(
        s.plan.get(), args.model_path, params, [&](const llama_model * model) { return context_params(args, model); }, request,
        s.budget);
    if (!decided.ok()) {
        return decided;
    }
    for (const std::string & text : s.budget.notes) {
        note(text, args.log_disable);
    }
    if (s.budget.is_measured && !args.log_disable) {
        std::fputs(s.budget.table().c_str(), stderr);
    }
    if (!s.budget.split_text.empty()) {
        note(s.budget.split_text, args.log_disable);
    }
    return s.budget.apply(s.plan.get(), params);
}

status load_model(session & s) {
    const arguments & args = s.args;
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = args.n_gpu_layers;
    if (args.mlock) {
        params.load_mode = args.no_mmap ? LLAMA_LOAD_MODE_MLOCK : LLAMA_LOAD_MODE_MMAP_MLOCK;
    } else if (args.no_mmap) {
        params.load_mode = LLAMA_LOAD_MODE_NONE;
    }
    load_progress progress(args);
    params.progress_callback = load_progress::on_progress;
    params.progress_callback_user_data = &progress;
    if (status t = take_budget(s, params); !t.ok()) {
        return t;
    }
    llama_model * model = nullptr;
    if (s.plan) {
        status loaded = model_load(s.plan.get(), params, model);
        if (!loaded.ok()) {
            return upstream_error(s.log, loaded.text());
        }
    } else {
        model = llama_model_load_from_file(args.model_path.c_str(), params);
        if (model == nullptr) {
            return upstream_error(s.log,
                                  args.model_path +
                                      ": llama.cpp could not load it; expected a complete GGUF of an architecture it knows; "
                                      "convert or fetch the file again");
        }
    }
    s.model.reset(model);
    s.vocab = llama_model_get_vocab(model);
    if (llama_model_has_encoder(model) || !llama_model_has_decoder(model)) {
        return status::error(args.model_path +
                             ": found a model with an encoder; expected one that generates text from text; use another model");
    }
    if (llama_vocab_type(s.vocab) == LLAMA_VOCAB_TYPE_NONE) {
        return status::error(args.model_path +
                             ": found no vocabulary; expected a tokenizer in the file; convert the model with its tokenizer");
    }
    return {};
}

status make_context(session & s) {
    const arguments & args = s.args;
    const int32_t n_trained = llama_model_n_ctx_train(s.model.get());
    const llama_context_params params = context_params(args, s.model.get());
    if (params.n_ctx > uint32_t(n_trained)) {
        note("--ctx-size: found " + std::to_string(params.n_ctx) + "; the model was trained with " + std::to_string(n_trained) +
                 " tokens and may write nonsense beyond",
             args.log_disable);
    }
    s.context.reset(llama_init_from_model(s.model.get(), params));
    if (!s.context) {
        return upstream_error(s.log, "--ctx-size: a context of " + std::to_string(params.n_ctx) +
                                         " tokens could not be made; expected enough memory for its KV cache; give a smaller -c");
    }
    s.n_ctx = int32_t(llama_n_ctx(s.context.get()));
    return {};
}

// Sampling values in the model's metadata replace the defaults; a flag that was given replaces both.
void take_sampling_metadata(session & s) {
    const std::pair<const char *, llama_model_meta_key> flags[] = {
        {"--temperature", LLAMA_MODEL_META_KEY_SAMPLING_TEMP},
        {"--top-k", LLAMA_MODEL_META_KEY_SAMPLING_TOP_K},
        {"--top-p", LLAMA_MODEL_META_KEY_SAMPLING_TOP_P},
        {"--min-p", LLAMA_MODEL_META_KEY_SAMPLING_MIN_P},
        {"--repeat-penalty", LLAMA_MODEL_META_KEY_SAMPLING_PENALTY_REPEAT},
        {"--repeat-last-n", LLAMA_MODEL_META_KEY_SAMPLING_PENALTY_LAST_N},
    };
    for (const auto & [flag, key] : flags) {
        const char * name = llama_model_meta_key_str(key);
        char value[64];
        if (s.args.given.count(flag) != 0 || llama_model_meta_val_str(s.model.get(), name, value, sizeof(value)) <= 0) {
            continue;
        }
        const std::string expected = arguments_set(s.args, flag, value);
        if (!expected.empty()) {
            note(s.args.model_path + ": found " + name + " '" + value + "'; expected " + expected + "; it is not used",
                 s.args.log_disable);
        }
    }
}

// The chain in llama.cpp's order: biases, penalties, top-k, typical, top-p, min-p, temperature, draw.
void make_sampler(session & s) {
    const arguments & args = s.args;
    const int32_t n_vocab = llama_vocab_n_tokens(s.vocab);
    llama_sampler_chain_params params = llama_sampler_chain_default_params();
    params.no_perf = false;
    s.sampler.reset(llama_sampler_chain_init(params));
    llama_sampler * chain = s.sampler.get();

    std::vector<llama_logit_bias> never;
    int32_t n_suppressed = 0;
    const llama_token * suppressed = llama_vocab_get_suppress_tokens(s.vocab, &n_suppressed);
    for (int32_t i = 0; i < n_suppressed; i++) {
        never.push_back({suppressed[i], -INFINITY});
    }
    for (llama_token token = 0; args.ignore_eos && token < n_vocab; token++) {
        if (llama_vocab_is_eog(s.vocab, token)) {
            never.push_back({token, -INFINITY});
        }
    }
    if (!never.empty()) {
        llama_sampler_chain_add(chain, llama_sampler_init_logit_bias(n_vocab, int32_t(never.size()), never.data()));
    }
    llama_sampler_chain_add(chain, llama_sampler_init_penalties(n_vocab, args.repeat_last_n, args.repeat_penalty, 0.0f, 0.0f));
    if (args.temp <= 0.0f) {
        llama_sampler_chain_add(chain, llama_sampler_init_greedy());
        return;
    }
    llama_sampler_chain_add(chain, llama_sampler_init_top_k(args.top_k));
    llama_sampler_chain_add(chain, llama_sampler_init_typical(args.typical_p, 0));
    llama_sampler_chain_add(chain, llama_sampler_init_top_p(args.top_p, 0));
    llama_sampler_chain_add(chain, llama_sampler_init_min_p(args.min_p, 0));
    llama_sampler_chain_add(chain, llama_sampler_init_temp(args.temp));
    llama_sampler_chain_add(chain, llama_sampler_init_dist(args.seed < 0 ? LLAMA_DEFAULT_SEED : uint32_t(args.seed)));
}

status load(session & s) {
    s.start_us = llama_time_us();
    if (!s.args.rpc_servers.empty()) {
        if (status t = add_rpc_servers(s.args.rpc_servers); !t.ok()) {
            return t;
        }
    }
    if (status t = open_plan(s); !t.ok()) {
        return t;
    }
    if (status t = load_model(s); !t.ok()) {
        return t;
    }
    if (status t = make_context(s); !t.ok()) {
        return t;
    }
    take_sampling_metadata(s);
    make_sampler(s);
    s.load_us = llama_time_us() - s.start_us;
    return {};
}

// ---- tokens ----

status tokenize(const session & s, const std::string & text, bool add_special, std::vector<llama_token> & out) {
    if (text.size() > size_t(INT32_MAX) / 2) {
        return status::error("prompt: found " + std::to_string(text.size()) + " bytes; expected less than 1 GiB; shorten it");
    }
    const auto n_bytes = int32_t(text.size());
    out.resize(size_t(n_bytes) + 2);
    int32_t n = llama_tokenize(s.vocab, text.data(), n_bytes, out.data(), int32_t(out.size()), add_special, true);
    if (n < 0 && n != INT32_MIN) {
        out.resize(size_t(-n));
        n = llama_tokenize(s.vocab, text.data(), n_bytes, out.data(), int32_t(out.size()), add_special, true);
    }
    if (n < 0) {
        return status::error("prompt: could not be tokenized; expected text that the model's vocabulary covers; change it");
    }
    out.resize(size_t(n));
    return {};
}

std::string token_text(const session & s, llama_token token) {
    std::string piece(32, '\0');
    int32_t n = llama_token_to_piece(s.vocab, token, piece.data(), int32_t(piece.size()), 0, false);
    if (n < 0) {
        piece.resize(size_t(-n));
        n = llama_token_to_piece(s.vocab, token, piece.data(), int32_t(piece.size()), 0, false);
    }
    piece.resize(size_t(std::max(n, 0)));
    return piece;
}

// Removes the tokens from n_keep on from the context.
void forget(session & s, size_t n_keep) {
    llama_memory_t memory = llama_get_memory(s.context.get());
    if (!llama_memory_seq_rm(memory, 0, llama_pos(n_keep), -1)) {  // a recurrent state can't be cut
        llama_memory_clear(memory, true);
        n_keep = 0;
    }
    s.past.resize(n_keep);
}

// Computes the pending tokens. On Ctrl-C some stay pending, which is no error.
status evaluate(session & s) {
    const size_t n_batch = llama_n_batch(s.context.get());
    while (!s.pending.empty() && !is_interrupted()) {
        const size_t n = std::min(n_batch, s.pending.size());
        const int32_t result = llama_decode(s.context.get(), llama_batch_get_one(s.pending.data(), int32_t(n)));
        if (result == 2) {  // broken off, which llama.cpp's log calls an error
            s.log.error.clear();
            const std::vector<llama_token> past = s.past;
            forget(s, past.size());
            s.pending.insert(s.pending.begin(), past.begin() + long(s.past.size()), past.end());
        } else if (result != 0) {
            return upstream_error(s.log, "llama_decode: found result " + std::to_string(result) + " after " +
                                             std::to_string(s.past.size()) +
                                             " tokens; expected 0; run with --verbose for llama.cpp's log");
        } else {
            s.past.insert(s.past.end(), s.pending.begin(), s.pending.begin() + long(n));
            s.pending.erase(s.pending.begin(), s.pending.begin() + long(n));
        }
    }
    return {};
}

// Moves what the plan counted since the last call into `total`.
void take_stats(session & s, ggml_backend_powerinfer_stats & total) {
    if (!s.plan) {
        return;
    }
    ggml_backend_powerinfer_stats now{};
    ggml_backend_powerinfer_plan_stats(s.plan.get(), &now);
    ggml_backend_powerinfer_plan_reset_stats(s.plan.get());
    total.n_tokens += now.n_tokens;
    total.n_slow_rows += now.n_slow_rows;
    total.n_neurons += now.n_neurons;
    total.n_candidates += now.n_candidates;
    total.n_active += now.n_active;
    total.read_bytes += now.read_bytes;
    total.dense_bytes += now.dense_bytes;
    total.overlap_sum += now.overlap_sum;
    total.n_overlaps += now.n_overlaps;
}

// Reads the prompt's tokens, which must fit; `echo` is printed once that is known.
status read_prompt(session & s, const std::vector<llama_token> & tokens, const std::string & echo) {
    s.pending.insert(s.pending.end(), tokens.begin(), tokens.end());
    const size_t n_tokens = s.past.size() + s.pending.size();
    if (n_tokens > size_t(s.n_ctx)) {
        return status::error("prompt: found " + std::to_string(n_tokens) + " tokens; expected at most " +
                             std::to_string(s.n_ctx) + ", the context; shorten it or give a larger -c");
    }
    if (status t = s.out.write(echo); !t.ok()) {
        return t;
    }
    for (llama_token token : tokens) {
        llama_sampler_accept(s.sampler.get(), token);
    }
    status result = evaluate(s);
    take_stats(s, s.prompt_stats);
    return result;
}

enum class stop_reason { end_of_text, limit, context_full, interrupted };

// Generates tokens, streams them and appends them to `text`, until something stops it.
status generate_until_stop(session & s, std::string & text, stop_reason & reason) {
    for (int32_t n = 0;; n++) {
        if (s.args.n_predict >= 0 && n >= s.args.n_predict) {
            reason = stop_reason::limit;
            return {};
        }
        if (s.past.size() + s.pending.size() > size_t(s.n_ctx)) {
            reason = stop_reason::context_full;
            return {};
        }
        if (status t = evaluate(s); !t.ok()) {
            return t;
        }
        if (is_interrupted()) {
            reason = stop_reason::interrupted;
            return {};
        }
        const llama_token token = llama_sampler_sample(s.sampler.get(), s.context.get(), -1);
        if (llama_vocab_is_eog(s.vocab, token)) {
            reason = stop_reason::end_of_text;
            return {};
        }
        s.pending.push_back(token);
        const std::string piece = token_text(s, token);
        text += piece;
        if (status t = s.out.write(piece); !t.ok()) {
            return t;
        }
    }
}

status generate(session & s, std::string & text, stop_reason & reason) {
    if (status t = generate_until_stop(s, text, reason); !t.ok()) {
        return t;
    }
    take_stats(s, s.generation_stats);
    if (reason == stop_reason::context_full) {
        note("context: full with " + std::to_string(s.n_ctx) + " tokens, the text stops here; give a larger -c",
             s.args.log_disable);
    }
    return s.out.end();
}

// ---- a text, or a chat ----

// The first tokens of a text. An empty one starts from BOS.
status first_tokens(const session & s, const std::string & text, std::vector<llama_token> & out) {
    if (status t = tokenize(s, text, true, out); !t.ok()) {
        return t;
    }
    if (out.empty()) {
        out.push_back(llama_vocab_bos(s.vocab));
    }
    if (out[0] == LLAMA_TOKEN_NULL) {
        return status::error(
            "prompt: found an empty one, and the model has no BOS token; expected a token to start from; give -p TEXT");
    }
    return {};
}

status run_text(session & s) {
    std::vector<llama_token> tokens;
    std::string text;
    stop_reason reason;
    line_reader lines;
    std::string line = s.args.prompt;
    if (s.args.interactive && line.empty() && !lines.read(line)) {
        return {};
    }
    std::string echo = s.args.display_prompt ? s.args.prompt : "";
    if (status t = first_tokens(s, line, tokens); !t.ok()) {
        return t;
    }
    while (true) {
        if (status t = read_prompt(s, tokens, echo); !t.ok()) {
            return t;
        }
        echo.clear();
        if (status t = generate(s, text, reason); !t.ok()) {
            return t;
        }
        if (!s.args.interactive || reason == stop_reason::context_full) {
            return {};
        }
        n_interrupts = 0;
        if (!lines.read(line)) {
            return {};
        }
        if (status t = tokenize(s, line, false, tokens); !t.ok()) {
            return t;
        }
    }
}

using message = std::pair<std::string, std::string>;  // role, content

// The chat as the model's template writes it, ready for an answer. Empty when the template isn't one that llama.cpp knows.
std::string format_chat(const char * chat_template, const std::vector<message> & messages) {
    std::vector<llama_chat_message> chat;
    size_t n_bytes = 1024;
    for (const message & m : messages) {
        chat.push_back({m.first.c_str(), m.second.c_str()});
        n_bytes += 2 * m.second.size() + 64;
    }
    std::string text(n_bytes, '\0');
    int32_t n = llama_chat_apply_template(chat_template, chat.data(), chat.size(), true, text.data(), int32_t(text.size()));
    if (n > int32_t(text.size())) {
        text.resize(size_t(n));
        n = llama_chat_apply_template(chat_template, chat.data(), chat.size(), true, text.data(), n);
    }
    text.resize(size_t(std::max(n, 0)));
    return text;
}

status run_conversation(session & s) {
    const char * chat_template = llama_model_chat_template(s.model.get(), nullptr);
    if (chat_template == nullptr || format_chat(chat_template, {{"user", "x"}}).empty()) {
        const std::string found =
            chat_template == nullptr ? "no chat template" : "a chat template that llama.cpp's C API doesn't know";
        if (status t = fallback(s, s.args.model_path + ": found " + found + "; the chat is written as ChatML"); !t.ok()) {
            return t;
        }
        chat_template = "chatml";
    }
    std::vector<message> messages;
    if (!s.args.system_prompt.empty()) {
        messages.emplace_back("system", s.args.system_prompt);
    }
    line_reader lines;
    std::string line = s.args.prompt;
    std::string echo = !line.empty() && s.args.display_prompt ? "> " + line + "\n" : "";
    while (true) {
        while (line.empty()) {
            if (!lines.read(line)) {
                return {};
            }
        }
        if (line.find('\0') != std::string::npos) {
            note("message: found NUL bytes, which chat templates can't carry; they were left out", s.args.log_disable);
            line.erase(std::remove(line.begin(), line.end(), '\0'), line.end());
        }
        messages.emplace_back("user", line);
        line.clear();

        // The whole chat is written anew; what the context already holds of it is not computed again.
        std::vector<llama_token> tokens;
        if (status t = tokenize(s, format_chat(chat_template, messages), true, tokens); !t.ok()) {
            return t;
        }
        size_t n_same = 0;
        while (n_same < s.past.size() && n_same + 1 < tokens.size() && s.past[n_same] == tokens[n_same]) {
            n_same++;
        }
        if (n_same < s.past.size()) {
            forget(s, n_same);
        }
        s.pending.clear();
        tokens.erase(tokens.begin(), tokens.begin() + long(s.past.size()));

        std::string answer;
        stop_reason reason;
        if (status t = read_prompt(s, tokens, echo); !t.ok()) {
            return t;
        }
        echo.clear();
        if (status t = generate(s, answer, reason); !t.ok()) {
            return t;
        }
        if (reason == stop_reason::context_full) {
            return {};
        }
        messages.emplace_back("assistant", answer);
        n_interrupts = 0;
    }
}

// ---- timing ----

const char * sparsity_name(ggml_backend_powerinfer_sparsity sparsity) {
    switch (sparsity) {
        case GGML_POWERINFER_AUTO:      return "auto";
        case GGML_POWERINFER_DENSE:     return "dense";
        case GGML_POWERINFER_EXACT:     return "exact";
        case GGML_POWERINFER_THRESHOLD: return "threshold";
        case GGML_POWERINFER_PREDICTED: return "predicted";
    }
    return "unknown";
}

double ratio(double a, double b) { return b > 0 ? a / b : 0.0; }

void print_plan_stats(const session & s) {
    std::map<std::string, int> n_layers;  // by what they run
    int n_covered = 0;
    for (int i = 0; i < ggml_backend_powerinfer_plan_n_layer(s.plan.get()); i++) {
        ggml_backend_powerinfer_layer layer{};
        if (!ggml_backend_powerinfer_plan_layer(s.plan.get(), i, &layer)) {
            continue;
        }
        n_covered += layer.n_ff > 0;
        n_layers[layer.n_ff > 0 ? sparsity_name(layer.sparsity) : "left to llama.cpp"]++;
    }
    std::string modes;
    for (const auto & [name, n] : n_layers) {
        modes += (modes.empty() ? "" : ", ") + name + " in " + std::to_string(n) + " layers";
    }
    std::fprintf(stderr, "powerinfer-main:         sparsity = %s: %s\n", sparsity_name(s.args.sparsity), modes.c_str());
    std::fprintf(stderr, "powerinfer-main:       kernel set = %s, threads %d, for prompts %d\n",
                 ggml_backend_powerinfer_plan_kernels(s.plan.get()), llama_n_threads(s.context.get()),
                 llama_n_threads_batch(s.context.get()));

    const bool has_generated = s.generation_stats.n_tokens > 0;
    const ggml_backend_powerinfer_stats & stats = has_generated ? s.generation_stats : s.prompt_stats;
    std::fprintf(stderr, "powerinfer-main:          density = %.4f, candidate_density %.4f, bytes_share %.4f (%s)\n",
                 ratio(double(stats.n_active), double(stats.n_neurons)),
                 ratio(double(stats.n_candidates), double(stats.n_neurons)),
                 ratio(double(stats.read_bytes), double(stats.dense_bytes)), has_generated ? "generation" : "prompt");
    std::fprintf(stderr, "powerinfer-main:         FFN read = %10.3f MiB per token",
                 ratio(double(stats.read_bytes) * n_covered, double(stats.n_tokens)) / 1048576.0);
    if (stats.n_overlaps > 0) {
        std::fprintf(stderr, ", overlap %.4f", stats.overlap_sum / double(stats.n_overlaps));
    }
    std::fputc('\n', stderr);
    const uint64_t n_slow_rows = s.prompt_stats.n_slow_rows + s.generation_stats.n_slow_rows;
    if (n_slow_rows > 0) {
        std::fprintf(stderr, "powerinfer-main:        slow rows = %llu\n", (unsigned long long)n_slow_rows);
    }
}

void print_timing(const session & s) {
    const llama_perf_context_data context = llama_perf_context(s.context.get());
    const llama_perf_sampler_data sampler = llama_perf_sampler(s.sampler.get());
    // llama_perf_context says 1 where nothing ran
    const int n_prompt = context.t_p_eval_ms > 0 ? context.n_p_eval : 0;
    const int n_eval = context.t_eval_ms > 0 ? context.n_eval : 0;
    const double total_ms = 1e-3 * double(llama_time_us() - s.start_us);
    std::fprintf(stderr, "\n");
    std::fprintf(stderr, "powerinfer-main:    sampling time = %10.2f ms / %5d runs\n", sampler.t_sample_ms, sampler.n_sample);
    std::fprintf(stderr, "powerinfer-main:        load time = %10.2f ms\n", 1e-3 * double(s.load_us));
    std::fprintf(stderr,
                 "powerinfer-main: prompt eval time = %10.2f ms / %5d tokens (%8.2f ms per token, %8.2f tokens per second)\n",
                 context.t_p_eval_ms, n_prompt, ratio(context.t_p_eval_ms, n_prompt), ratio(1e3 * n_prompt, context.t_p_eval_ms));
    std::fprintf(stderr,
                 "powerinfer-main:        eval time = %10.2f ms / %5d runs   (%8.2f ms per token, %8.2f tokens per second)\n",
                 context.t_eval_ms, n_eval, ratio(context.t_eval_ms, n_eval), ratio(1e3 * n_eval, context.t_eval_ms));
    std::fprintf(stderr, "powerinfer-main:       total time = %10.2f ms / %5d tokens\n", total_ms, n_prompt + n_eval);
    if (s.plan) {
        print_plan_stats(s);
    } else {
        std::fprintf(stderr,
                     "powerinfer-main:         sparsity = none, llama.cpp computes every neuron; threads %d, for prompts %d\n",
                     llama_n_threads(s.context.get()), llama_n_threads_batch(s.context.get()));
    }
}

// ---- program ----

int run(int argc, char ** argv) {
    session s;
    status result = arguments_parse(argc, argv, s.args);
    if (result.ok() && s.args.help) {
        std::fputs(arguments_help().c_str(), stdout);
        return 0;
    }
    if (result.ok() && s.args.version) {
        std::printf("powerinfer-main %s (llama.cpp %s, ggml %s)\n", ggml_backend_powerinfer_version(), llama_version(),
                    ggml_version());
        return 0;
    }

    struct sigaction action{};
    action.sa_handler = on_interrupt;  // no SA_RESTART: reading a line ends
    sigaction(SIGINT, &action, nullptr);
    s.log.verbose = s.args.verbose;
    llama_log_set(on_upstream_log, &s.log);

    if (result.ok()) {
        llama_backend_init();
        result = load(s);
        if (is_interrupted()) {
            note("interrupted while loading", false);
            return 130;
        }
    }
    if (result.ok()) {
        note_upstream_error(s.log);
        result = s.args.conversation ? run_conversation(s) : run_text(s);
        if (result.ok()) {
            note_upstream_error(s.log);
        }
        if (result.ok() && !s.args.log_disable) {
            print_timing(s);
        }
    }
    if (!result.ok()) {
        std::fflush(stdout);
        std::fprintf(stderr, "powerinfer-main: %s\n", result.text().c_str());
        return 1;
    }
    return 0;
}

}  // namespace

}  // namespace powerinfer

int main(int argc, char ** argv) {
    try {
        return powerinfer::run(argc, argv);
    } catch (const std::exception & error) {  // the tokenizer throws on vocabularies that lack bytes; out of memory
        std::fprintf(stderr,
                     "powerinfer-main: found an unexpected failure (%s); expected none; run with --verbose for llama.cpp's log\n",
                     error.what());
        return 1;
    }
}
