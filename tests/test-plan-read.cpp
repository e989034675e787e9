// plan-read.cpp: good files are read as written; damaged and hostile ones end in one sentence, never in a crash.
// Files are built byte by byte here, so that each field can be wrong; ggml's reader confirms that the good ones are GGUFs.
#include "plan.h"

#include "check.h"
#include "format-keys.h"

#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <sys/mman.h>
#include <unistd.h>

using namespace powerinfer;

namespace {

using bytes = std::vector<uint8_t>;

constexpr int n_layer = 3;  // the last isn't covered
constexpr int n_embd = 32;
constexpr int n_ff = 64;
constexpr int rank = 4;

template <typename T>
void put(bytes & out, const T & value) {
    const uint8_t * at = reinterpret_cast<const uint8_t *>(&value);
    out.insert(out.end(), at, at + sizeof(T));
}

void put(bytes & out, const std::string & text) {
    put(out, uint64_t(text.size()));
    out.insert(out.end(), text.begin(), text.end());
}

template <typename T>
gguf_type type_of() {
    if (std::is_same<T, uint32_t>::value) {
        return GGUF_TYPE_UINT32;
    }
    if (std::is_same<T, int32_t>::value) {
        return GGUF_TYPE_INT32;
    }
    if (std::is_same<T, uint64_t>::value) {
        return GGUF_TYPE_UINT64;
    }
    if (std::is_same<T, float>::value) {
        return GGUF_TYPE_FLOAT32;
    }
    if (std::is_same<T, bool>::value) {
        return GGUF_TYPE_BOOL;
    }
    return GGUF_TYPE_STRING;
}

template <typename T>
bytes value_of(const T & value) {
    bytes out;
    put(out, uint32_t(type_of<T>()));
    put(out, value);
    return out;
}

template <typename T>
bytes array_of(const std::vector<T> & values) {
    bytes out;
    put(out, uint32_t(GGUF_TYPE_ARRAY));
    put(out, uint32_t(type_of<T>()));
    put(out, uint64_t(values.size()));
    for (const T & value : values) {
        put(out, value);
    }
    return out;
}

struct tensor_entry {
    std::string name;
    std::vector<uint64_t> ne;
    uint32_t type;
    bytes data;
    int64_t offset = -1;  // -1: where it belongs
};

// A GGUF as a list of fields.
struct file_fields {
    uint32_t alignment = format::alignment;
    std::vector<std::pair<std::string, bytes>> keys;
    std::vector<tensor_entry> tensors;

    void set(const std::string & key, const bytes & value) {
        for (auto & entry : keys) {
            if (entry.first == key) {
                entry.second = value;
                return;
            }
        }
        keys.emplace_back(key, value);
    }
    template <typename T>
    void set(const std::string & key, const T & value) {
        set(key, value_of(value));
    }
    void set(const std::string & key, const char * text) { set(key, value_of(std::string(text))); }

    void remove(const std::string & key) {
        keys.erase(std::remove_if(keys.begin(), keys.end(), [&](const auto & entry) { return entry.first == key; }), keys.end());
    }

    tensor_entry & tensor(const std::string & name) {
        for (tensor_entry & entry : tensors) {
            if (entry.name == name) {
                return entry;
            }
        }
        std::abort();
    }
    void remove_tensor(const std::string & name) {
        tensors.erase(std::remove_if(tensors.begin(), tensors.end(), [&](const auto & entry) { return entry.name == name; }),
                      tensors.end());
    }

    bytes build() const {
        bytes out = {'G', 'G', 'U', 'F'};
        put(out, uint32_t(3));
        put(out, uint64_t(tensors.size()));
        put(out, uint64_t(keys.size()));
        for (const auto & entry : keys) {
            put(out, entry.first);
            out.insert(out.end(), entry.second.begin(), entry.second.end());
        }
        uint64_t offset = 0;
        for (const tensor_entry & entry : tensors) {
            put(out, entry.name);
            put(out, uint32_t(entry.ne.size()));
            for (const uint64_t n : entry.ne) {
                put(out, n);
            }
            put(out, entry.type);
            put(out, entry.offset < 0 ? offset : uint64_t(entry.offset));
            offset += (entry.data.size() + alignment - 1) / alignment * alignment;
        }
        for (const tensor_entry & entry : tensors) {
            out.resize((out.size() + alignment - 1) / alignment * alignment);
            out.insert(out.end(), entry.data.begin(), entry.data.end());
        }
        return out;
    }
};

template <typename T>
bytes data_of(const std::vector<T> & values) {
    bytes out(values.size() * sizeof(T));
    std::memcpy(out.data(), values.data(), out.size());
    return out;
}

std::vector<float> some_floats(size_t n, int seed) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; i++) {
        values[i] = float((i * 7919 + size_t(seed) * 104729) % 1000) / 1000.0f - 0.5f;
    }
    return values;
}

std::string blk(int i, const std::string & rest) { return "blk." + std::to_string(i) + "." + rest; }

file_fields base_fields(bool gated = true) {
    file_fields base;
    base.alignment = 32;
    base.set("general.architecture", "llama");
    base.set("llama.block_count", uint32_t(n_layer));
    base.set("llama.embedding_length", uint32_t(n_embd));
    for (int i = 0; i < n_layer; i++) {
        if (i == n_layer - 1) {
            base.tensors.push_back(
                {blk(i, "ffn_gate_inp.weight"), {n_embd, 4}, GGML_TYPE_F32, data_of(some_floats(n_embd * 4, i))});
            continue;
        }
        if (gated) {
            base.tensors.push_back(
                {blk(i, "ffn_gate.weight"), {n_embd, n_ff}, GGML_TYPE_F32, data_of(some_floats(n_embd * n_ff, i))});
        }
        base.tensors.push_back(
            {blk(i, "ffn_up.weight"), {n_embd, n_ff}, GGML_TYPE_F32, data_of(some_floats(n_embd * n_ff, 10 + i))});
        base.tensors.push_back(
            {blk(i, "ffn_down.weight"), {n_ff, n_embd}, GGML_TYPE_F32, data_of(some_floats(n_embd * n_ff, 20 + i))});
    }
    return base;
}

class test_folder {
public:
    test_folder() {
        path_ = std::filesystem::temp_directory_path() / ("test-plan-read-" + std::to_string(getpid()));
        std::filesystem::create_directories(path_);
    }
    ~test_folder() { std::filesystem::remove_all(path_); }

    std::string path(const std::string & name) const { return (path_ / name).string(); }

    std::string write(const std::string & name, const bytes & content) const {
        std::ofstream(path(name), std::ios::binary)
            .write(reinterpret_cast<const char *>(content.data()), std::streamsize(content.size()));
        return path(name);
    }

private:
    std::filesystem::path path_;
};

// "powerinfer.placement.%d.x" -> "powerinfer.placement.0.x"
std::string first(const char * pattern) { return std::string(pattern).replace(std::strstr(pattern, "%d") - pattern, 2, "0"); }

void set_placement(file_fields & file) {
    file.set(format::key_placement_count, uint32_t(1));
    file.set(first(format::key_placement_version), uint32_t(format::placement_version));
    file.set(first(format::key_placement_budget), "75%");
    file.set(first(format::key_placement_n_ctx), uint32_t(4096));
    file.set(first(format::key_placement_device), array_of<std::string>({"one", "two"}));
    file.set(first(format::key_placement_hot_bytes), array_of<uint64_t>({uint64_t(1) << 40, 1000}));
    file.set(first(format::key_placement_n_hot), array_of<uint32_t>({n_ff, 3, 0}));
    file.set(first(format::key_placement_i_device), array_of<uint32_t>({0, 1, 0}));
    file.set(first(format::key_placement_token_s), 0.25f);
    file.set(first(format::key_placement_gap), 0.125f);
    file.set(first(format::key_placement_model_hash), std::string(64, 'a'));
    file.set(first(format::key_placement_statistics_hash), std::string(64, 'b'));
}

// A plan with everything in it, for the base at `base_path`.
file_fields plan_fields(const std::string & base_path) {
    plan bare;
    CHECK(plan_from_base(base_path, bare).ok());
    file_fields file;
    file.set("general.architecture", "powerinfer");
    file.set("general.alignment", uint32_t(64));
    file.set(format::key_format_version, uint32_t(1));
    file.set(format::key_base_architecture, "llama");
    file.set(format::key_base_file, "base.gguf");
    file.set(format::key_block_count, uint32_t(n_layer));
    file.set(format::key_embedding_length, uint32_t(n_embd));
    file.set(format::key_feed_forward_length, array_of<uint32_t>({n_ff, n_ff, 0}));
    file.set(format::key_ffn_activation, "silu");
    file.set(format::key_ffn_gated, true);
    file.set(format::key_base_ffn_digest, array_of<std::string>({bare.layers[0].digest, bare.layers[1].digest, ""}));
    file.set(format::key_ffn_activation_param, array_of<float>({0.0f, 0.25f, 0.0f}));
    file.set(format::key_ffn_threshold, array_of<float>({0.1f, 0.2f, 0.0f}));
    file.set(format::key_ffn_product_threshold, array_of<float>({0.3f, 0.4f, 0.0f}));
    file.set(format::key_ffn_loss, 0.015f);
    file.set(format::key_predictor_kind, array_of<std::string>({"mlp", "linear", "none"}));
    file.set(format::key_predictor_input, "residual");
    file.set(format::key_predictor_threshold, array_of<float>({-0.5f, 0.5f, 0.0f}));
    file.set(format::key_predictor_recall, array_of<float>({0.9f, 0.8f, 0.0f}));
    file.set(format::key_predictor_candidate_density, array_of<float>({0.2f, 0.3f, 0.0f}));
    file.set(format::key_profile_tokens, array_of<uint64_t>({1000, uint64_t(1) << 40, 0}));
    file.set(format::key_profile_density, array_of<float>({0.1f, 0.2f, 0.0f}));
    file.set(format::key_profile_corpus, "some text");
    set_placement(file);
    for (int i = 0; i < 2; i++) {
        std::vector<int32_t> order(n_ff);
        std::vector<float> frequency(n_ff);
        for (int p = 0; p < n_ff; p++) {
            order[size_t(p)] = n_ff - 1 - p;
            frequency[size_t(p)] = 1.0f - float(p) / n_ff;
        }
        file.tensors.push_back({blk(i, "neuron_order"), {n_ff}, GGML_TYPE_I32, data_of(order)});
        file.tensors.push_back({blk(i, "neuron_frequency"), {n_ff}, GGML_TYPE_F32, data_of(frequency)});
        file.tensors.push_back({blk(i, "ffn_down_t.weight"), {n_embd, n_ff}, GGML_TYPE_F16, bytes(2 * n_embd * n_ff, 0)});
        file.tensors.push_back(
            {blk(i, "predictor.fc1.weight"), {n_embd, rank}, GGML_TYPE_F32, data_of(some_floats(n_embd * rank, i))});
        file.tensors.push_back(
            {blk(i, "predictor.fc2.weight"), {rank, n_ff}, GGML_TYPE_F32, data_of(some_floats(rank * n_ff, i))});
    }
    return file;
}

bool contains(const std::string & text, const std::string & part) { return text.find(part) != std::string::npos; }

// The read must fail with a sentence that starts with a path and contains every part.
void expect_error(const char * what, const status & result, const std::vector<std::string> & parts) {
    bool good = !result.ok() && !contains(result.text(), "\n") && contains(result.text(), ": ");
    for (const std::string & part : parts) {
        good = good && contains(result.text(), part);
    }
    if (!CHECK(good)) {
        std::fprintf(stderr, "  %s: %s\n", what, result.ok() ? "was read" : result.text().c_str());
    }
}

void test_digest() {
    // Values from Python's hashlib.
    CHECK(plan_digest({}) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    bytes head(200);
    for (size_t i = 0; i < head.size(); i++) {
        head[i] = uint8_t(i);
    }
    // With the 10 bytes of text before them: around the ends of a block, and where the length no longer fits in it.
    const std::vector<std::pair<size_t, std::string>> cases = {
        {0, "9965fde4ac4bf9dc17c0a2e4e08a0709176af8d87f9ef63f24ca13721b6fa198"},
        {45, "23731475697b09ba1f944336eb2fdd170ed3cd034a03fd3b1605810c9a164450"},
        {46, "8b0deb4af6306191e8699793a425feaaedd1d6de6de61e7b1e49b4278d2f6572"},
        {53, "9c974c4f6b467bf87f2d7053ae9c80230ebdd6ea0dfbd5be091812dea9352264"},
        {54, "57f83defaacd0c8710273bf2a3081e87cc003b3f6f2683603289f14802c682f6"},
        {55, "63f810c578180e6bdfce2d7aa05f8078a5bee5dc72e8ef40ffa2426ca39c2c01"},
        {118, "f932f33344b25f71cf6b3a697a92cecf9ac7da533e4ac7fd2760f47f4cbefec1"},
        {200, "97193c79bbbfa8a62a7e08ec8c160701f0e6b5d87d2b007ea68bfa72fd811042"},
    };
    for (const auto & entry : cases) {
        CHECK(plan_digest({{"a", "f32", 2, 3, head.data(), entry.first}}) == entry.second);
    }
}

void test_good(const test_folder & folder) {
    const std::string base = folder.write("base.gguf", base_fields().build());
    const bytes content = plan_fields(base).build();
    const std::string path = folder.write("good.powerinfer.gguf", content);
    for (const std::string & file : {base, path}) {
        gguf_context * context = gguf_init_from_file(file.c_str(), {true, nullptr});
        CHECK(context != nullptr);
        gguf_free(context);
    }
    plan read;
    const status result = plan_read(path, "", read);
    if (!CHECK(result.ok())) {
        std::fprintf(stderr, "  %s\n", result.text().c_str());
        return;
    }
    CHECK(read.path == path && read.base_path == base && read.base_offset_bytes == 0 && read.base_size_bytes == 0);
    CHECK(read.base_architecture == "llama" && read.n_layer == n_layer && read.n_embd == n_embd);
    CHECK(read.activation == activation_kind::silu && read.gated && read.predictor_reads_residual);
    CHECK(read.has_loss && read.corpus == "some text");
    CHECK_NEAR(read.loss, 0.015, 1e-9);
    CHECK(read.layers.size() == n_layer && read.layers[2].n_ff == 0 && read.layers[2].digest.empty());
    const plan_layer & layer = read.layers[1];
    CHECK(layer.n_ff == n_ff && layer.predictor == predictor_kind::linear && read.layers[0].predictor == predictor_kind::mlp);
    CHECK_NEAR(layer.activation_param, 0.25, 1e-7);
    CHECK_NEAR(layer.threshold, 0.2, 1e-7);
    CHECK_NEAR(layer.product_threshold, 0.4, 1e-7);
    CHECK_NEAR(layer.predictor_threshold, 0.5, 1e-7);
    CHECK_NEAR(layer.predictor_recall, 0.8, 1e-7);
    CHECK_NEAR(layer.predictor_density, 0.3, 1e-7);
    CHECK_NEAR(layer.profile_density, 0.2, 1e-7);
    CHECK(layer.profile_tokens == uint64_t(1) << 40);
    CHECK(layer.neuron_order.size() == n_ff && layer.neuron_order[0] == n_ff - 1 && layer.neuron_order[n_ff - 1] == 0);
    CHECK(layer.neuron_frequency.size() == n_ff && layer.neuron_frequency[0] == 1.0f);
    CHECK(layer.ffn_down_t.row_type == GGML_TYPE_F16 && layer.ffn_down_t.ne0 == n_embd && layer.ffn_down_t.ne1 == n_ff);
    CHECK(layer.fc1.ne0 == n_embd && layer.fc1.ne1 == rank && layer.fc2.ne0 == rank && layer.fc2.ne1 == n_ff);
    const std::vector<float> fc2 = some_floats(rank * n_ff, 1);
    CHECK(layer.fc2.size_bytes == fc2.size() * sizeof(float) &&
          std::memcmp(layer.fc2.data, fc2.data(), layer.fc2.size_bytes) == 0);
    CHECK(layer.gate_type == GGML_TYPE_F32 && layer.up_type == GGML_TYPE_F32 && layer.down_type == GGML_TYPE_F32);
    CHECK(read.layers[2].gate_type == -1 && read.layers[2].down_type == -1);
    CHECK(read.placements.size() == 1);
    const saved_placement & saved = read.placements[0];
    CHECK(saved.version == format::placement_version && saved.budget == "75%" && saved.n_ctx == 4096);
    CHECK(saved.devices == std::vector<std::string>({"one", "two"}));
    CHECK(saved.hot_bytes == std::vector<uint64_t>({uint64_t(1) << 40, 1000}));
    CHECK(saved.n_hot == std::vector<uint32_t>({n_ff, 3, 0}) && saved.i_device == std::vector<uint32_t>({0, 1, 0}));
    CHECK(saved.token_s == 0.25f && saved.gap == 0.125f);
    CHECK(saved.model_hash == std::string(64, 'a') && saved.statistics_hash == std::string(64, 'b'));
    CHECK(plan_read(path, base, read).ok());

    file_fields least = plan_fields(base);
    least.tensors.clear();
    for (const char * key :
         {format::key_alignment, format::key_ffn_activation_param, format::key_ffn_threshold, format::key_ffn_product_threshold,
          format::key_ffn_loss, format::key_predictor_kind, format::key_predictor_input, format::key_predictor_threshold,
          format::key_predictor_recall, format::key_predictor_candidate_density, format::key_profile_tokens,
          format::key_profile_density, format::key_profile_corpus, format::key_placement_count}) {
        least.remove(key);
    }
    CHECK(plan_read(folder.write("least.powerinfer.gguf", least.build()), "", read).ok());
    CHECK(!read.has_loss && !read.predictor_reads_residual && read.layers[0].neuron_order.empty() && !read.layers[0].fc1.data);
    CHECK(read.layers[0].predictor == predictor_kind::none && read.layers[0].threshold == 0.0f);
    CHECK(read.placements.empty() && plan_find_placement(read, {}) == nullptr);

    model_file_kind kind = model_file_kind::plain;
    CHECK(model_file_kind_of(path, kind).ok() && kind == model_file_kind::extended);
    CHECK(model_file_kind_of(base, kind).ok() && kind == model_file_kind::plain);
    expect_error("no such file", model_file_kind_of(folder.path("none.gguf"), kind), {"none.gguf", "No such file"});
}

struct damage {
    const char * what;
    std::function<void(file_fields &)> apply;
    std::vector<std::string> parts;  // of the error
};

void test_against_format(const test_folder & folder) {
    const std::string base = folder.path("base.gguf");
    const float inf = std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::vector<damage> damages = {
        {"a base", [](file_fields & f) { f.set("general.architecture", "llama"); }, {"'llama'", "'powerinfer'"}},
        {"version 3",
         [](file_fields & f) { f.set(format::key_format_version, uint32_t(3)); },
         {"powerinfer.format_version is 3; this build reads up to 1. Convert the model again."}},
        {"version 0", [](file_fields & f) { f.set(format::key_format_version, uint32_t(0)); }, {"format_version is 0"}},
        {"version of another type", [](file_fields & f) { f.set(format::key_format_version, int32_t(1)); }, {"i32", "u32"}},
        {"alignment",
         [](file_fields & f) {
             f.alignment = 128;
             f.set(format::key_alignment, uint32_t(128));
         },
         {"128", "64"}},
        {"no layers", [](file_fields & f) { f.set(format::key_block_count, uint32_t(0)); }, {"block_count is 0"}},
        {"too many layers", [](file_fields & f) { f.set(format::key_block_count, ~uint32_t(0)); }, {"block_count is 4294967295"}},
        {"other layer count",
         [](file_fields & f) { f.set(format::key_block_count, uint32_t(4)); },
         {"has 3 values", "expected 4"}},
        {"width 0", [](file_fields & f) { f.set(format::key_embedding_length, uint32_t(0)); }, {"embedding_length is 0"}},
        {"huge n_ff",
         [](file_fields & f) { f.set(format::key_feed_forward_length, array_of<uint32_t>({~uint32_t(0), n_ff, 0})); },
         {"layer 0"}},
        {"other n_ff",
         [](file_fields & f) { f.set(format::key_feed_forward_length, array_of<uint32_t>({n_ff, n_ff - 1, 0})); },
         {"layer 1's", "[64]", "[63]"}},
        {"uncovered layer with tensors",
         [](file_fields & f) {
             f.set(format::key_feed_forward_length, array_of<uint32_t>({n_ff, 0, 0}));
             f.set(format::key_base_ffn_digest, array_of<std::string>({std::string(64, '0'), "", ""}));
         },
         {"layer 1", "doesn't cover"}},
        {"activation",
         [](file_fields & f) { f.set(format::key_ffn_activation, "swish"); },
         {"'swish'", "relu, relu_sqr, drelu, silu, gelu"}},
        {"ungated drelu",
         [](file_fields & f) {
             f.set(format::key_ffn_activation, "drelu");
             f.set(format::key_ffn_gated, false);
         },
         {"drelu"}},
        {"gated is 2",
         [](file_fields & f) {
             bytes b;
             put(b, uint32_t(GGUF_TYPE_BOOL));
             put(b, uint8_t(2));
             f.set(format::key_ffn_gated, b);
         },
         {"ffn.gated is 2"}},
        {"nan threshold",
         [=](file_fields & f) { f.set(format::key_ffn_threshold, array_of<float>({0, nan, 0})); },
         {"layer 1", "nan"}},
        {"negative threshold",
         [](file_fields & f) { f.set(format::key_ffn_threshold, array_of<float>({-1, 0, 0})); },
         {"layer 0", "-1"}},
        {"infinite product threshold",
         [=](file_fields & f) { f.set(format::key_ffn_product_threshold, array_of<float>({0, inf, 0})); },
         {"inf"}},
        {"infinite predictor threshold",
         [=](file_fields & f) { f.set(format::key_predictor_threshold, array_of<float>({-inf, 0, 0})); },
         {"-inf"}},
        {"recall",
         [](file_fields & f) { f.set(format::key_predictor_recall, array_of<float>({1.5f, 0, 0})); },
         {"1.5", "0 to 1"}},
        {"loss", [=](file_fields & f) { f.set(format::key_ffn_loss, nan); }, {"ffn.loss"}},
        {"tokens as u32",
         [](file_fields & f) { f.set(format::key_profile_tokens, array_of<uint32_t>({1, 1, 1})); },
         {"array of u32", "u64"}},
        {"scalar for array", [](file_fields & f) { f.set(format::key_ffn_threshold, 0.5f); }, {"expected an array of f32"}},
        {"kind",
         [](file_fields & f) { f.set(format::key_predictor_kind, array_of<std::string>({"mlp", "tree", "none"})); },
         {"layer 1", "'tree'"}},
        {"kind without tensors",
         [](file_fields & f) { f.remove_tensor("blk.1.predictor.fc2.weight"); },
         {"layer 1's", "blk.1.predictor.fc2.weight"}},
        {"tensors without kind",
         [](file_fields & f) { f.set(format::key_predictor_kind, array_of<std::string>({"none", "linear", "none"})); },
         {"layer 0"}},
        {"input", [](file_fields & f) { f.set(format::key_predictor_input, "attention"); }, {"'attention'"}},
        {"digest",
         [](file_fields & f) { f.set(format::key_base_ffn_digest, array_of<std::string>({"xyz", std::string(64, 'a'), ""})); },
         {"layer 0", "'xyz'"}},
        {"order twice",
         [](file_fields & f) { f.tensor("blk.1.neuron_order").data[4] = n_ff - 1; },
         {"layer 1's neuron_order has 63 at position 1"}},
        {"order out of range",
         [](file_fields & f) { f.tensor("blk.0.neuron_order").data[3] = 0x80; },
         {"layer 0's neuron_order has -"}},
        {"order of floats", [](file_fields & f) { f.tensor("blk.0.neuron_order").type = GGML_TYPE_F32; }, {"f32", "i32"}},
        {"frequency above 1",
         [](file_fields & f) { f.tensor("blk.1.neuron_frequency").data = data_of(std::vector<float>(n_ff, 1.5f)); },
         {"1.5"}},
        {"nan frequency",
         [=](file_fields & f) { f.tensor("blk.1.neuron_frequency").data = data_of(std::vector<float>(n_ff, nan)); },
         {"nan"}},
        {"frequency shape", [](file_fields & f) { f.tensor("blk.1.neuron_frequency").ne = {n_ff / 2, 2}; }, {"[32, 2]", "[64]"}},
        {"down_t transposed",
         [](file_fields & f) { f.tensor("blk.0.ffn_down_t.weight").ne = {n_ff, n_embd}; },
         {"[64, 32]", "[32, 64]"}},
        {"down_t of integers",
         [](file_fields & f) { f.tensor("blk.0.ffn_down_t.weight").type = GGML_TYPE_I16; },
         {"layer 0's", "i16"}},
        {"fc2 too short",
         [](file_fields & f) { f.tensor("blk.1.predictor.fc2.weight").ne = {rank, n_ff - 1}; },
         {"[4, 63]", "[4, 64]"}},
        {"rank above n_embd",
         [](file_fields & f) {
             f.tensor("blk.0.predictor.fc1.weight").ne = {n_embd, n_embd + 1};
             f.tensor("blk.0.predictor.fc1.weight").data.resize(4 * n_embd * (n_embd + 1));
         },
         {"layer 0's", "rank 33", "32"}},
        {"rank 0", [](file_fields & f) { f.tensor("blk.0.predictor.fc1.weight").ne = {n_embd, 0}; }, {"rank 0"}},
        {"layer out of range",
         [](file_fields & f) { f.tensor("blk.1.neuron_order").name = "blk.3.neuron_order"; },
         {"layer 3", "0 .. 2"}},
        {"layer written oddly",
         [](file_fields & f) { f.tensor("blk.1.neuron_order").name = "blk.01.neuron_order"; },
         {"blk.01.neuron_order"}},
        {"unknown tensor",
         [](file_fields & f) { f.tensor("blk.1.neuron_order").name = "blk.1.attn_q.weight"; },
         {"blk.1.attn_q.weight", "version 1"}},
        {"base file with folder",
         [](file_fields & f) { f.set(format::key_base_file, "../base.gguf"); },
         {"'../base.gguf'", "without folders"}},
        {"base file is ..", [](file_fields & f) { f.set(format::key_base_file, ".."); }, {"without folders"}},
        {"base file with NUL",
         [](file_fields & f) { f.set(format::key_base_file, std::string("base.gguf\0x", 11)); },
         {"without folders"}},
        {"base not there",
         [&](file_fields & f) { f.set(format::key_base_file, "other.gguf"); },
         {"powerinfer.base.file is 'other.gguf'", folder.path("other.gguf")}},
        {"no base named", [](file_fields & f) { f.remove(format::key_base_file); }, {"powerinfer.base.file"}},
        {"other architecture", [](file_fields & f) { f.set(format::key_base_architecture, "qwen2"); }, {"'llama'", "'qwen2'"}},
        {"ungated", [](file_fields & f) { f.set(format::key_ffn_gated, false); }, {"layer 0's", "a gate"}},
        {"a second placement",
         [](file_fields & f) { f.set(format::key_placement_count, uint32_t(2)); },
         {"powerinfer.placement.1.version is missing"}},
        {"many placements",
         [](file_fields & f) { f.set(format::key_placement_count, ~uint32_t(0)); },
         {"placement.count is 4294967295", "at most 64"}},
        {"more hot than there are",
         [](file_fields & f) { f.set(first(format::key_placement_n_hot), array_of<uint32_t>({n_ff, n_ff + 1, 0})); },
         {"placement.0.n_hot of layer 1 is 65", "at most 64 (n_ff)"}},
        {"hot neurons of a layer that isn't covered",
         [](file_fields & f) { f.set(first(format::key_placement_n_hot), array_of<uint32_t>({0, 0, 1})); },
         {"placement.0.n_hot of layer 2 is 1", "at most 0"}},
        {"negative n_hot",
         [](file_fields & f) { f.set(first(format::key_placement_n_hot), array_of<int32_t>({0, -1, 0})); },
         {"array of i32", "array of u32"}},
        {"n_hot too short",
         [](file_fields & f) { f.set(first(format::key_placement_n_hot), array_of<uint32_t>({0, 0})); },
         {"has 2 values; expected 3, one per layer"}},
        {"no device",
         [](file_fields & f) { f.set(first(format::key_placement_device), array_of<std::string>({})); },
         {"has 0 values; expected 1 .. 16"}},
        {"hot bytes of one device",
         [](file_fields & f) { f.set(first(format::key_placement_hot_bytes), array_of<uint64_t>({1})); },
         {"has 1 values; expected 2, one per device"}},
        {"device out of range",
         [](file_fields & f) { f.set(first(format::key_placement_i_device), array_of<uint32_t>({0, 2, 0})); },
         {"i_device of layer 1 is 2", "0 .. 1"}},
        {"placement gap", [=](file_fields & f) { f.set(first(format::key_placement_gap), nan); }, {"placement.0.gap is nan"}},
        {"negative seconds",
         [](file_fields & f) { f.set(first(format::key_placement_token_s), -1.0f); },
         {"placement.0.token_s is -1"}},
        {"placement hash",
         [](file_fields & f) { f.set(first(format::key_placement_model_hash), "xyz"); },
         {"placement.0.model_hash is 'xyz'", "64 hexadecimal digits"}},
    };
    for (const char * key : {format::key_architecture, format::key_format_version, format::key_base_architecture,
                             format::key_block_count, format::key_embedding_length, format::key_feed_forward_length,
                             format::key_ffn_activation, format::key_ffn_gated, format::key_base_ffn_digest}) {
        damages.push_back({key, [key](file_fields & f) { f.remove(key); }, {key}});
    }
    for (const damage & damaged : damages) {
        file_fields file = plan_fields(base);
        damaged.apply(file);
        plan out;
        std::vector<std::string> parts = damaged.parts;
        parts.push_back("bad.powerinfer.gguf: ");
        expect_error(damaged.what, plan_read(folder.write("bad.powerinfer.gguf", file.build()), "", out), parts);
    }
}

// BUG_CASES 12: model, statistics, budget and version.
void test_find_placement(const test_folder & folder) {
    plan read;
    CHECK(plan_read(folder.path("good.powerinfer.gguf"), "", read).ok());
    saved_placement & saved = read.placements[0];
    saved.hot_bytes = {1000000, 0};
    CHECK(!plan_find_placement(read, {1000000, 0}));
    saved.model_hash = plan_model_hash(read);
    saved.statistics_hash = plan_statistics_hash(read);
    CHECK(plan_find_placement(read, {1000000, 0}) == &saved);
    CHECK(plan_find_placement(read, {1100000, 0}) == &saved);
    for (const std::vector<uint64_t> & other :
         {std::vector<uint64_t>{999999, 0}, {1120000, 0}, {1000000, 1}, {1000000}, {1000000, 0, 0}, {}}) {
        CHECK(!plan_find_placement(read, other));
    }
    saved.version++;
    CHECK(!plan_find_placement(read, {1000000, 0}));
    saved.version--;
    plan other = read;
    other.layers[1].neuron_frequency[n_ff - 1] = 0.5f;
    CHECK(!plan_find_placement(other, {1000000, 0}));
    other = read;
    std::swap(other.layers[0].neuron_order[0], other.layers[0].neuron_order[1]);
    CHECK(!plan_find_placement(other, {1000000, 0}));
    other = read;
    other.layers[0].digest[0] ^= 1;
    CHECK(!plan_find_placement(other, {1000000, 0}));
    other = read;
    other.layers[0].ffn_down_t.row_type = GGML_TYPE_BF16;
    CHECK(!plan_find_placement(other, {1000000, 0}));
    read.placements.push_back(saved);
    CHECK(plan_find_placement(read, {1000000, 0}) == &read.placements[1]);
}

void test_other_base(const test_folder & folder) {
    const std::string path = folder.path("good.powerinfer.gguf");
    plan out;
    const auto expect = [&](const char * what, const std::vector<std::string> & parts,
                            const std::function<void(file_fields &)> & apply) {
        file_fields base = base_fields();
        apply(base);
        expect_error(what, plan_read(path, folder.write("changed.gguf", base.build()), out), parts);
    };
    expect("one weight",
           {"good.powerinfer.gguf: layer 1's FFN has digest ", "changed.gguf; the plan was made for ", "powerinfer profile"},
           [](file_fields & f) { f.tensor("blk.1.ffn_down.weight").data[4095] ^= 1; });
    expect("type", {"layer 0's FFN has digest"}, [](file_fields & f) {
        f.tensor("blk.0.ffn_up.weight").type = GGML_TYPE_F16;
        f.tensor("blk.0.ffn_up.weight").data.resize(2 * n_embd * n_ff);
    });
    expect("shape", {"layer 1's up", "[32, 63]", "[32, 64]"},
           [](file_fields & f) { f.tensor("blk.1.ffn_up.weight").ne = {n_embd, n_ff - 1}; });
    expect("down", {"layer 1's down", "[64, 31]"},
           [](file_fields & f) { f.tensor("blk.1.ffn_down.weight").ne = {n_ff, n_embd - 1}; });
    expect("no up", {"layer 0's", "no up"}, [](file_fields & f) { f.remove_tensor("blk.0.ffn_up.weight"); });
    expect("depth", {"4 layers", "3"}, [](file_fields & f) { f.set("llama.block_count", uint32_t(4)); });
    expect("no block count", {"llama.block_count"}, [](file_fields & f) { f.remove("llama.block_count"); });
    expect("a plan", {"is an extended GGUF"}, [](file_fields & f) { f.set("general.architecture", "powerinfer"); });
    expect("no architecture", {"general.architecture is missing"}, [](file_fields & f) { f.remove("general.architecture"); });
    file_fields same = base_fields();
    same.tensor("blk.1.ffn_down.weight").data[4096] ^= 1;  // the digest covers 4096 bytes
    CHECK(plan_read(path, folder.write("changed.gguf", same.build()), out).ok());
}

void test_embedded(const test_folder & folder) {
    const bytes base = base_fields().build();
    file_fields file = plan_fields(folder.path("base.gguf"));
    file.tensors.push_back({"base", {base.size()}, GGML_TYPE_I8, base});
    const bytes content = file.build();
    const std::string path = folder.write("embedded.powerinfer.gguf", content);
    plan read;
    const status result = plan_read(path, "", read);
    CHECK(result.ok());
    CHECK(read.base_path == path && read.base_offset_bytes % 64 == 0 && read.base_size_bytes == base.size());
    CHECK(read.base_offset_bytes + base.size() <= content.size() &&
          std::equal(base.begin(), base.end(), content.begin() + int64_t(read.base_offset_bytes)));
    expect_error("a base beside", plan_read(path, folder.path("base.gguf"), read), {"carries its base"});

    file_fields bad = file;
    bad.tensor("base").data[0] = 'X';
    expect_error("not a GGUF", plan_read(folder.write("bad.powerinfer.gguf", bad.build()), "", read),
                 {"the base model in it", "XGUF"});
    bad = file;
    bad.tensor("base").type = GGML_TYPE_F32;
    bad.tensor("base").ne = {base.size() / 4};
    expect_error("floats", plan_read(folder.write("bad.powerinfer.gguf", bad.build()), "", read), {"tensor base is f32"});
    int n_misplaced = 0;
    for (const size_t n : {0, 32}) {  // moves the data by 32 bytes: once the base is at an odd multiple of them
        bad = file;
        bad.alignment = 32;
        bad.remove(format::key_alignment);
        bad.set(format::key_profile_corpus, std::string(n, 'x'));
        std::rotate(bad.tensors.begin(), bad.tensors.end() - 1, bad.tensors.end());
        const status misplaced = plan_read(folder.write("bad.powerinfer.gguf", bad.build()), "", read);
        n_misplaced += !misplaced.ok() && contains(misplaced.text(), "expected i8 [size] at a multiple of 64");
    }
    CHECK(n_misplaced == 1);
    bad = file;
    bad.tensor("base").data.resize(base.size() / 2);
    bad.tensor("base").ne = {base.size() / 2};
    expect_error("half a base", plan_read(folder.write("bad.powerinfer.gguf", bad.build()), "", read),
                 {"the base model in it", "truncated"});
    bad = file;
    bad.tensor("base").data = content;
    bad.tensor("base").ne = {content.size()};
    expect_error("a plan in a plan", plan_read(folder.write("bad.powerinfer.gguf", bad.build()), "", read),
                 {"is an extended GGUF"});
}

void test_from_base(const test_folder & folder) {
    plan out;
    CHECK(plan_from_base(folder.write("ungated.gguf", base_fields(false).build()), out).ok());
    CHECK(!out.gated && out.activation == activation_kind::graph && out.layers[0].n_ff == n_ff && out.layers[2].n_ff == 0);
    const auto n_ff_with = [&](const std::function<void(file_fields &)> & apply) {
        file_fields base = base_fields();
        apply(base);
        CHECK(plan_from_base(folder.write("changed.gguf", base.build()), out).ok());
        return out.layers[0].n_ff;
    };
    CHECK(n_ff_with([](file_fields &) {}) == n_ff);
    CHECK(n_ff_with([](file_fields & f) {
              f.tensors.push_back({"blk.0.ffn_up.bias", {n_ff}, GGML_TYPE_F32, bytes(4 * n_ff)});
          }) == n_ff);
    for (const char * name : {"blk.0.ffn_up_exps.weight", "blk.0.ffn_up_shexp.weight", "blk.0.ffn_gate.0.weight",
                              "blk.0.ffn_sub_norm.weight", "blk.0.nextn.enorm.weight", "blk.0.ffn.act.scales"}) {
        CHECK(n_ff_with([name](file_fields & f) { f.tensors.push_back({name, {n_ff}, GGML_TYPE_F32, bytes(4 * n_ff)}); }) == 0);
    }
    const bool fused = n_ff_with([](file_fields & f) {
                           f.remove_tensor("blk.0.ffn_gate.weight");
                           f.tensor("blk.0.ffn_up.weight") = {
                               "blk.0.ffn_up.weight", {n_embd, 2 * n_ff}, GGML_TYPE_F32, bytes(8 * n_embd * n_ff)};
                       }) == 0;
    CHECK(fused && out.gated && out.layers[1].n_ff == n_ff);
    expect_error("no model", plan_from_base(folder.path("good.powerinfer.gguf"), out), {"is an extended GGUF"});

    file_fields first = base_fields(), second = base_fields();
    first.set("split.count", uint32_t(2));
    first.set("split.no", uint32_t(0));
    second.set("split.count", uint32_t(2));
    second.set("split.no", uint32_t(1));
    first.tensors.erase(first.tensors.begin() + 4, first.tensors.end());
    second.tensors.erase(second.tensors.begin(), second.tensors.begin() + 4);
    const std::string path = folder.write("split-00001-of-00002.gguf", first.build());
    expect_error("second part missing", plan_from_base(path, out), {"split-00002-of-00002.gguf", "No such file"});
    folder.write("split-00002-of-00002.gguf", second.build());
    CHECK(plan_from_base(path, out).ok());
    plan whole;
    CHECK(plan_from_base(folder.path("base.gguf"), whole).ok());
    CHECK(out.layers[0].digest == whole.layers[0].digest && out.layers[1].digest == whole.layers[1].digest);
    expect_error("second part", plan_from_base(folder.path("split-00002-of-00002.gguf"), out),
                 {"part 2", "-00001-of-00002.gguf"});
    CHECK(plan_read(folder.path("good.powerinfer.gguf"), path, out).ok());
}

void test_sidecar(const test_folder & folder) {
    const auto sidecar = [&](const std::string & name) { return plan_find_sidecar(folder.path(name)); };
    folder.write("m.powerinfer.gguf", {});
    CHECK(sidecar("m.gguf") == folder.path("m.powerinfer.gguf"));
    CHECK(sidecar("m-00001-of-00003.gguf") == folder.path("m.powerinfer.gguf"));
    folder.write("m-00001-of-00003.powerinfer.gguf", {});
    CHECK(sidecar("m-00001-of-00003.gguf") == folder.path("m-00001-of-00003.powerinfer.gguf"));
    CHECK(sidecar("m-00002-of-00003.gguf").empty());
    CHECK(sidecar("m.powerinfer.gguf").empty());
    CHECK(sidecar("n.gguf").empty());
    CHECK(sidecar("m").empty());
    CHECK(plan_find_sidecar("").empty());
}

// BUG_CASES 32: headers that lie.
void test_hostile(const test_folder & folder) {
    plan out;
    const auto expect = [&](const char * what, const bytes & content, const std::vector<std::string> & parts) {
        const std::string path = folder.write("hostile.gguf", content);
        model_file_kind kind;
        expect_error(what, plan_read(path, "", out), parts);
        expect_error(what, plan_from_base(path, out), parts);
        expect_error(what, model_file_kind_of(path, kind), parts);
    };
    const auto header = [](uint32_t version, uint64_t n_tensors, uint64_t n_keys) {
        bytes content = {'G', 'G', 'U', 'F'};
        put(content, version);
        put(content, n_tensors);
        put(content, n_keys);
        return content;
    };
    const std::string text = "This is a text file, not a model; it is longer than a header.";
    const uint64_t huge = ~uint64_t(0);
    expect("empty", {}, {"0 bytes"});
    expect("zeros", bytes(1000, 0), {"starts with '", "'GGUF'"});
    expect("text", bytes(text.begin(), text.end()), {"'This'", "'GGUF'"});
    bytes original(100, 0);
    std::memcpy(original.data(), "PWRI", 4);
    expect("original PowerInfer", original, {"'PWRI'", "original PowerInfer"});
    expect("version 1", header(1, 0, 0), {"GGUF version is 1"});
    expect("version 4", header(4, 0, 0), {"GGUF version is 4"});
    expect("big-endian", header(0x03000000, 0, 0), {"big-endian"});
    expect("huge counts", header(3, huge, huge), {"announces"});
    expect("many keys", header(3, 0, 60000), {"inside key 0"});
    expect("many tensors", header(3, 1000000, 0), {"inside tensor 0"});

    bytes content = header(3, 0, 1);
    put(content, huge);
    expect("key length", content, {"inside key 0"});
    for (const uint32_t type : {uint32_t(GGUF_TYPE_STRING), uint32_t(GGUF_TYPE_UINT8), uint32_t(GGUF_TYPE_UINT64)}) {
        content = header(3, 0, 1);
        put(content, std::string("a"));
        put(content, uint32_t(GGUF_TYPE_ARRAY));
        put(content, type);
        put(content, huge / 4);
        content.resize(content.size() + 100);
        expect("array count", content, {"inside key 0"});
    }
    content = header(3, 0, 1);
    put(content, std::string("a"));
    put(content, uint32_t(GGUF_TYPE_STRING));
    put(content, huge);
    expect("string length", content, {"inside key 0"});
    content = header(3, 0, 1);
    put(content, std::string("a"));
    put(content, uint32_t(77));
    expect("value type", content, {"type 77"});
    content = header(3, 0, 1);
    put(content, std::string("a"));
    put(content, uint32_t(GGUF_TYPE_ARRAY));
    put(content, uint32_t(GGUF_TYPE_ARRAY));
    put(content, uint64_t(1));
    expect("array of arrays", content, {"type 9"});

    const auto expect_file = [&](const char * what, const std::vector<std::string> & parts,
                                 const std::function<void(file_fields &)> & apply) {
        file_fields file = plan_fields(folder.path("base.gguf"));
        apply(file);
        expect(what, file.build(), parts);
    };
    expect_file("alignment 0", {"general.alignment is 0"}, [](file_fields & f) { f.set(format::key_alignment, uint32_t(0)); });
    expect_file("alignment 48", {"general.alignment is 48"}, [](file_fields & f) { f.set(format::key_alignment, uint32_t(48)); });
    expect_file("alignment text", {"general.alignment"}, [](file_fields & f) { f.set(format::key_alignment, "64"); });
    expect_file("alignment 2^31", {"ends past"}, [](file_fields & f) {
        f.set(format::key_alignment, uint32_t(1) << 31);
        for (auto & t : f.tensors) {
            t.offset = 0;
        }
    });
    expect_file("key twice", {"there twice"}, [](file_fields & f) { f.keys.push_back(f.keys[3]); });
    expect_file("tensor twice", {"blk.0.neuron_order", "there twice"},
                [](file_fields & f) { f.tensors.push_back(f.tensors[0]); });
    expect_file("long name", {"64 bytes", "63"}, [](file_fields & f) { f.tensors[1].name = std::string(64, 'x'); });
    expect_file("odd name", {"?[31m"}, [](file_fields & f) {
        f.tensors[1].name = "\x1b[31m";
        f.tensors[1].offset = 1;
    });
    expect_file("9 dimensions", {"9 dimensions"}, [](file_fields & f) { f.tensors[0].ne = std::vector<uint64_t>(9, 1); });
    expect_file("negative dimension", {"impossible shape"}, [=](file_fields & f) { f.tensors[0].ne = {huge}; });
    expect_file("overflow behind a 0", {"impossible shape"},
                [](file_fields & f) { f.tensors[0].ne = {0, int64_t(1) << 40, int64_t(1) << 40}; });
    expect_file("overflow", {"impossible shape"},
                [](file_fields & f) { f.tensors[0].ne = {uint64_t(1) << 32, uint64_t(1) << 32, 4}; });
    expect_file("size overflow", {"impossible shape"}, [](file_fields & f) {
        f.tensors[0].ne = {uint64_t(1) << 62};
        f.tensors[0].type = GGML_TYPE_F64;
    });
    expect_file("too big", {"ends past"}, [](file_fields & f) { f.tensors[0].ne = {uint64_t(1) << 40}; });
    expect_file("offset", {"ends past"}, [](file_fields & f) { f.tensors[0].offset = int64_t(1) << 62; });
    expect_file("odd offset", {"multiple of 64"}, [](file_fields & f) { f.tensors[0].offset = 8; });
    expect_file("type", {"type number 9999"}, [](file_fields & f) { f.tensors[0].type = 9999; });
    expect_file("removed type", {"type number 4"}, [](file_fields & f) { f.tensors[0].type = 4; });
    expect_file("half blocks", {"multiple of 32"}, [](file_fields & f) {
        f.tensors[3].type = GGML_TYPE_Q4_0;
        f.tensors[3].ne = {40, 2};
    });

    expect_error("folder", plan_read(folder.path(""), "", out), {"isn't a file"});
    expect_error("empty path", plan_read("", "", out), {"can't be opened"});
}

// A file in memory that is changed in place.
class memory_file {
public:
    explicit memory_file(const bytes & content) : fd_(memfd_create("test-plan-read", 0)) {
        write(0, content.data(), content.size());
    }
    ~memory_file() { close(fd_); }
    memory_file(const memory_file &) = delete;
    memory_file & operator=(const memory_file &) = delete;

    std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }
    void write(size_t at, const uint8_t * data, size_t n) const { CHECK(pwrite(fd_, data, n, off_t(at)) == ssize_t(n)); }
    void truncate(size_t n) const { CHECK(ftruncate(fd_, off_t(n)) == 0); }

private:
    int fd_;
};

void test_every_byte(const test_folder & folder) {
    const std::string base_path = folder.path("base.gguf");
    const bytes base = base_fields().build();
    for (const bool embedded : {false, true}) {
        file_fields fields = plan_fields(base_path);
        if (embedded) {
            fields.tensors.insert(fields.tensors.begin(), {"base", {base.size()}, GGML_TYPE_I8, base});
        }
        const bytes content = fields.build();
        const memory_file file(content);
        const std::string base_override = embedded ? "" : base_path;
        plan out;
        CHECK(plan_read(file.path(), base_override, out).ok());
        int n_read = 0;
        for (size_t i = 0; i < std::min<size_t>(content.size(), 7168); i++) {
            for (const uint8_t mask : {0xff, 0x01, 0x80}) {
                const uint8_t flipped = content[i] ^ mask;
                file.write(i, &flipped, 1);
                const status result = plan_read(file.path(), base_override, out);
                n_read += result.ok();
                CHECK(result.ok() ? out.n_layer == n_layer : !result.text().empty());
            }
            file.write(i, &content[i], 1);
        }
        std::fprintf(stderr, "flipped bytes: %d of the files were still read\n", n_read);
        // the last tensor ends with the file: every truncation loses something
        for (size_t n = content.size() - 1; n > 0; n -= n > 16384 ? 17 : 1) {
            file.truncate(n);
            expect_error("truncated", plan_read(file.path(), base_override, out), {});
        }
    }
}

}  // namespace

int main() {
    const test_folder folder;
    test_digest();
    test_good(folder);
    test_against_format(folder);
    test_find_placement(folder);
    test_other_base(folder);
    test_embedded(folder);
    test_from_base(folder);
    test_sidecar(folder);
    test_hostile(folder);
    test_every_byte(folder);
    return check_result();
}
