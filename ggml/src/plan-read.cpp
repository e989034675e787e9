// Reads extended GGUFs and the headers of base models. Files are untrusted: every count, size, offset and number is
// checked against the mapped bytes before it is used. ggml's own GGUF reader isn't used because it can't read an
// embedded base in place and believes sizes (it allocates what a file announces).
#include "plan.h"

#include "format-keys.h"

#include "ggml.h"
#include "gguf.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstring>
#include <fcntl.h>
#include <sstream>
#include <string_view>
#include <sys/mman.h>
#include <sys/stat.h>
#include <type_traits>
#include <unistd.h>
#include <unordered_map>

namespace powerinfer {

namespace {

#define POWERINFER_TRY(expression)                                \
    do {                                                          \
        if (status try_status = (expression); !try_status.ok()) { \
            return try_status;                                    \
        }                                                         \
    } while (0)

constexpr uint64_t max_keys = 65536;
constexpr uint64_t max_tensors = 1 << 20;
constexpr uint64_t max_values = uint64_t(1) << 59;  // of a tensor: 8 bytes each stay below 2^63
constexpr size_t tail_bytes = 4096;  // of zeros behind a mapped file: kernels may read past a row
constexpr uint64_t gguf_header_bytes = 24;  // magic, version, tensor count, key count
constexpr char copy_again[] = "copy or download the file again.";
constexpr char plan_again[] = "make the plan again (powerinfer profile).";
constexpr char use_base[] = "use the base model that the plan was made from, or make the plan again (powerinfer profile).";

template <typename... Parts>
std::string join(const Parts &... parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}

template <typename... Parts>
status error_at(const std::string & where, const Parts &... parts) {
    return status::error(join(where, ": ", parts...));
}

// Text from a file, fit for a message: short and printable.
std::string shown(std::string_view text) {
    constexpr size_t max_shown = 80;
    std::string result;
    for (const char c : text.substr(0, max_shown)) {
        result += c >= 0x20 && c < 0x7f ? c : '?';
    }
    return text.size() > max_shown ? result + "..." : result;
}

bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

bool is_hex(std::string_view text) { return text.find_first_not_of("0123456789abcdef") == std::string_view::npos; }

bool is_file(const std::string & path) {
    struct stat info;
    return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

std::string folder_of(const std::string & path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

// "blk.%d.x" -> "blk.7.x"
std::string numbered_name(const char * pattern, int64_t i) {
    const std::string text = pattern;
    const size_t at = text.find("%d");
    return text.substr(0, at) + std::to_string(i) + text.substr(at + 2);
}

// Splits "blk.7.rest"; false when the name isn't of that form or the number isn't written plainly.
bool split_layer_name(std::string_view name, int64_t & i_layer, std::string_view & rest) {
    constexpr std::string_view prefix = "blk.";
    if (name.substr(0, prefix.size()) != prefix) {
        return false;
    }
    name.remove_prefix(prefix.size());
    const size_t n_digits = name.find('.');
    if (n_digits == std::string_view::npos || n_digits == 0 || n_digits > 9 || (name[0] == '0' && n_digits > 1)) {
        return false;
    }
    i_layer = 0;
    for (const char c : name.substr(0, n_digits)) {
        if (c < '0' || c > '9') {
            return false;
        }
        i_layer = 10 * i_layer + (c - '0');
    }
    rest = name.substr(n_digits + 1);
    return true;
}

class sha256 {
public:
    void update(const void * bytes, size_t size) {
        const uint8_t * at = static_cast<const uint8_t *>(bytes);
        n_bytes_ += size;
        for (size_t i = 0; i < size; i++) {
            block_[n_block_++] = at[i];
            if (n_block_ == sizeof(block_)) {
                mix();
                n_block_ = 0;
            }
        }
    }

    std::string hex() {
        const uint64_t n_bits = 8 * n_bytes_;
        const uint8_t one = 0x80, zero = 0;
        update(&one, 1);
        while (n_block_ != 56) {
            update(&zero, 1);
        }
        for (int i = 7; i >= 0; i--) {
            const uint8_t byte = uint8_t(n_bits >> (8 * i));
            update(&byte, 1);
        }
        std::string text;
        for (const uint32_t word : state_) {
            for (int shift = 28; shift >= 0; shift -= 4) {
                text += "0123456789abcdef"[(word >> shift) & 15];
            }
        }
        return text;
    }

private:
    static uint32_t rotate(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

    void mix() {
        static constexpr uint32_t k[64] = {
            0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
            0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
            0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
            0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
            0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
            0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
            0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
            0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
        uint32_t w[64];
        for (int i = 0; i < 16; i++) {
            w[i] = uint32_t(block_[4 * i]) << 24 | uint32_t(block_[4 * i + 1]) << 16 | uint32_t(block_[4 * i + 2]) << 8 |
                   uint32_t(block_[4 * i + 3]);
        }
        for (int i = 16; i < 64; i++) {
            const uint32_t s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >> 3);
            const uint32_t s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16] + s0 + w[i - 7] + s1;
        }
        uint32_t v[8];
        std::memcpy(v, state_, sizeof(v));
        for (int i = 0; i < 64; i++) {
            const uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
            const uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
            const uint32_t t1 = v[7] + s1 + choice + k[i] + w[i];
            const uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
            const uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
            std::memmove(v + 1, v, 7 * sizeof(v[0]));
            v[4] += t1;
            v[0] = t1 + s0 + majority;
        }
        for (int i = 0; i < 8; i++) {
            state_[i] += v[i];
        }
    }

    uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t block_[64];
    size_t n_block_ = 0;
    uint64_t n_bytes_ = 0;
};

// ---- GGUF headers -------------------------------------------------------------------------------------------------

struct gguf_value {
    gguf_type type = GGUF_TYPE_COUNT;  // of the elements when it is an array
    bool is_array = false;
    uint64_t n = 1;
    const uint8_t * data = nullptr;  // first element; unaligned
};

struct gguf_tensor {
    ggml_type type = GGML_TYPE_F32;
    int n_dims = 0;
    int64_t ne[GGML_MAX_DIMS] = {1, 1, 1, 1};
    uint64_t offset_bytes = 0;  // in the data section
    uint64_t size_bytes = 0;
    const uint8_t * data = nullptr;
};

class byte_cursor {
public:
    byte_cursor(const uint8_t * data, uint64_t size_bytes) : begin_(data), at_(data), end_(data + size_bytes) {}

    uint64_t position_bytes() const { return uint64_t(at_ - begin_); }
    uint64_t left_bytes() const { return uint64_t(end_ - at_); }
    const uint8_t * at() const { return at_; }

    template <typename T>
    bool read(T & out) {
        if (left_bytes() < sizeof(T)) {
            return false;
        }
        std::memcpy(&out, at_, sizeof(T));
        at_ += sizeof(T);
        return true;
    }

    bool read_string(std::string_view & out) {
        uint64_t n = 0;
        if (!read(n) || n > left_bytes()) {
            return false;
        }
        out = {reinterpret_cast<const char *>(at_), size_t(n)};
        at_ += n;
        return true;
    }

    bool skip(uint64_t n, uint64_t unit_bytes) {
        if (n > left_bytes() / unit_bytes) {
            return false;
        }
        at_ += n * unit_bytes;
        return true;
    }

private:
    const uint8_t * begin_;
    const uint8_t * at_;
    const uint8_t * end_;
};

// 0: not a plain value type
uint64_t value_size_bytes(uint32_t type) {
    switch (type) {
        case GGUF_TYPE_UINT8:
        case GGUF_TYPE_INT8:
        case GGUF_TYPE_BOOL:    return 1;
        case GGUF_TYPE_UINT16:
        case GGUF_TYPE_INT16:   return 2;
        case GGUF_TYPE_UINT32:
        case GGUF_TYPE_INT32:
        case GGUF_TYPE_FLOAT32: return 4;
        case GGUF_TYPE_UINT64:
        case GGUF_TYPE_INT64:
        case GGUF_TYPE_FLOAT64: return 8;
        default:                return 0;
    }
}

// The header of a GGUF that lies in mapped memory. Names and values point into that memory.
class gguf_view {
public:
    static status parse(const std::string & where, const uint8_t * data, uint64_t size_bytes, gguf_view & out) {
        out = gguf_view();
        out.where_ = where;
        return out.parse(data, size_bytes);
    }

    const std::string & where() const { return where_; }
    const std::unordered_map<std::string_view, gguf_tensor> & tensors() const { return tensors_; }

    const gguf_value * find_key(std::string_view key) const {
        const auto it = keys_.find(key);
        return it == keys_.end() ? nullptr : &it->second;
    }

    const gguf_tensor * find_tensor(std::string_view name) const {
        const auto it = tensors_.find(name);
        return it == tensors_.end() ? nullptr : &it->second;
    }

    // A string value; empty when absent or of another type.
    std::string_view find_string(std::string_view key) const {
        const gguf_value * value = find_key(key);
        if (!value || value->is_array || value->type != GGUF_TYPE_STRING) {
            return {};
        }
        return string_at(value->data);
    }

    // A whole number of any width; false when absent or of another type.
    bool find_integer(std::string_view key, uint64_t & out) const {
        const gguf_value * value = find_key(key);
        if (!value || value->is_array || value->type == GGUF_TYPE_FLOAT32 || value->type == GGUF_TYPE_FLOAT64 ||
            value->type == GGUF_TYPE_BOOL || value_size_bytes(value->type) == 0) {
            return false;
        }
        out = 0;  // little-endian, as the file
        std::memcpy(&out, value->data, value_size_bytes(value->type));
        return true;
    }

    static std::string_view string_at(const uint8_t * data) {
        uint64_t n = 0;
        std::memcpy(&n, data, sizeof(n));
        return {reinterpret_cast<const char *>(data) + sizeof(n), size_t(n)};
    }

private:
    status parse(const uint8_t * data, uint64_t size_bytes) {
        if (size_bytes < gguf_header_bytes) {
            return error_at(where_, size_bytes, " bytes; expected a GGUF, which has ", gguf_header_bytes, " or more; ",
                            copy_again);
        }
        byte_cursor cursor(data, size_bytes);
        char magic[4] = {};
        uint32_t version = 0;
        uint64_t n_tensors = 0, n_keys = 0;
        cursor.read(magic);
        cursor.read(version);
        cursor.read(n_tensors);
        cursor.read(n_keys);
        if (std::memcmp(magic, "PWRI", 4) == 0) {
            return error_at(where_,
                            "starts with 'PWRI', a file of the original PowerInfer; expected 'GGUF'; "
                            "import it (powerinfer import).");
        }
        if (std::memcmp(magic, GGUF_MAGIC, 4) != 0) {
            return error_at(where_, "starts with '", shown({magic, 4}), "'; expected 'GGUF'; give a GGUF file.");
        }
        if ((version & 0xffff) == 0) {
            return error_at(where_, "the GGUF is big-endian; expected little-endian; convert it for this machine.");
        }
        if (version != 2 && version != GGUF_VERSION) {
            return error_at(where_, "GGUF version is ", version, "; this build reads 2 and ", GGUF_VERSION,
                            "; convert the model again.");
        }
        if (n_keys > max_keys || n_tensors > max_tensors) {
            return error_at(where_, "announces ", n_keys, " keys and ", n_tensors, " tensors; expected at most ", max_keys,
                            " and ", max_tensors, "; ", copy_again);
        }
        for (uint64_t i = 0; i < n_keys; i++) {
            POWERINFER_TRY(parse_key(cursor, i));
        }
        uint64_t alignment = GGUF_DEFAULT_ALIGNMENT;
        if (const gguf_value * value = find_key(format::key_alignment)) {
            if (value->is_array || value->type != GGUF_TYPE_UINT32) {
                return error_at(where_, format::key_alignment, " isn't a u32; ", copy_again);
            }
            find_integer(format::key_alignment, alignment);
        }
        if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
            return error_at(where_, format::key_alignment, " is ", alignment, "; expected a power of two; ", copy_again);
        }
        for (uint64_t i = 0; i < n_tensors; i++) {
            POWERINFER_TRY(parse_tensor(cursor, i));
        }
        const uint64_t data_at = (cursor.position_bytes() + alignment - 1) / alignment * alignment;
        for (auto & [name, tensor] : tensors_) {
            if (tensor.offset_bytes % alignment != 0) {
                return error_at(where_, "tensor ", shown(name), " has offset ", tensor.offset_bytes, "; expected a multiple of ",
                                alignment, "; ", copy_again);
            }
            if (data_at > size_bytes || tensor.offset_bytes > size_bytes - data_at ||
                tensor.size_bytes > size_bytes - data_at - tensor.offset_bytes) {
                return error_at(where_, "tensor ", shown(name), " (", tensor.size_bytes, " bytes at offset ", tensor.offset_bytes,
                                ") ends past the end of the file (", size_bytes, " bytes); the file is truncated or damaged; ",
                                copy_again);
            }
            tensor.data = data + data_at + tensor.offset_bytes;
        }
        return {};
    }

    status truncated(const char * what, uint64_t i) const {
        return error_at(where_, "the file ends, or has an impossible size, inside ", what, " ", i,
                        " of its header; "
                        "it is truncated or damaged; ",
                        copy_again);
    }

    status parse_key(byte_cursor & cursor, uint64_t i) {
        std::string_view key;
        gguf_value value;
        uint32_t type = 0;
        if (!cursor.read_string(key) || !cursor.read(type)) {
            return truncated("key", i);
        }
        if (type == GGUF_TYPE_ARRAY) {
            value.is_array = true;
            if (!cursor.read(type) || !cursor.read(value.n)) {
                return truncated("key", i);
            }
        }
        value.data = cursor.at();
        if (type == GGUF_TYPE_STRING) {
            std::string_view skipped;
            for (uint64_t j = 0; j < value.n; j++) {
                if (!cursor.read_string(skipped)) {
                    return truncated("key", i);
                }
            }
        } else if (value_size_bytes(type) == 0) {
            return error_at(where_, "key ", shown(key), " has value type ", type, ", which GGUF doesn't have; ", copy_again);
        } else if (!cursor.skip(value.n, value_size_bytes(type))) {
            return truncated("key", i);
        }
        value.type = gguf_type(type);
        if (!keys_.emplace(key, value).second) {
            return error_at(where_, "key ", shown(key), " is there twice; expected once; ", copy_again);
        }
        return {};
    }

    status parse_tensor(byte_cursor & cursor, uint64_t i) {
        std::string_view name;
        gguf_tensor tensor;
        uint32_t n_dims = 0, type = 0;
        if (!cursor.read_string(name) || !cursor.read(n_dims)) {
            return truncated("tensor", i);
        }
        if (name.size() >= GGML_MAX_NAME) {
            return error_at(where_, "tensor name ", shown(name), " has ", name.size(), " bytes; expected at most ",
                            GGML_MAX_NAME - 1, "; ", copy_again);
        }
        if (n_dims > GGML_MAX_DIMS) {
            return error_at(where_, "tensor ", shown(name), " has ", n_dims, " dimensions; expected at most ", GGML_MAX_DIMS,
                            "; ", copy_again);
        }
        uint64_t n_values = 1, n_places = 1;
        for (uint32_t j = 0; j < n_dims; j++) {
            if (!cursor.read(tensor.ne[j])) {
                return truncated("tensor", i);
            }
            n_values *= uint64_t(tensor.ne[j]);
            if (tensor.ne[j] < 0 || __builtin_mul_overflow(n_places, uint64_t(std::max<int64_t>(tensor.ne[j], 1)), &n_places) ||
                n_places >= max_values) {
                return error_at(where_, "tensor ", shown(name), " has an impossible shape; ", copy_again);
            }
        }
        if (!cursor.read(type) || !cursor.read(tensor.offset_bytes)) {
            return truncated("tensor", i);
        }
        if (type >= GGML_TYPE_COUNT || ggml_blck_size(ggml_type(type)) == 0) {
            return error_at(where_, "tensor ", shown(name), " has type number ", type,
                            ", which this build doesn't know; "
                            "convert it with a llama.cpp of the same version.");
        }
        tensor.type = ggml_type(type);
        tensor.n_dims = int(n_dims);
        const uint64_t block = uint64_t(ggml_blck_size(tensor.type));
        if (uint64_t(tensor.ne[0]) % block != 0) {
            return error_at(where_, "tensor ", shown(name), " has rows of ", tensor.ne[0], " values; ",
                            ggml_type_name(tensor.type), " needs a multiple of ", block, "; ", copy_again);
        }
        if (__builtin_mul_overflow(n_values / block, uint64_t(ggml_type_size(tensor.type)), &tensor.size_bytes)) {
            return error_at(where_, "tensor ", shown(name), " has an impossible shape; ", copy_again);
        }
        if (!tensors_.emplace(name, tensor).second) {
            return error_at(where_, "tensor ", shown(name), " is there twice; expected once; ", copy_again);
        }
        return {};
    }

    std::string where_;
    std::unordered_map<std::string_view, gguf_value> keys_;
    std::unordered_map<std::string_view, gguf_tensor> tensors_;
};

bool has_to_float(ggml_type type) { return type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr; }

bool is_matrix(const gguf_tensor * tensor, int64_t ne0, int64_t ne1) {
    return tensor && tensor->ne[0] == ne0 && tensor->ne[1] == ne1 && tensor->ne[2] == 1 && tensor->ne[3] == 1;
}

std::string shape_of(const gguf_tensor & tensor) {
    std::string text = "[";
    for (int i = 0; i < std::max(tensor.n_dims, 1); i++) {
        text += (i ? ", " : "") + std::to_string(tensor.ne[i]);
    }
    return text + "]";
}

// ---- Base models --------------------------------------------------------------------------------------------------

// The header of a base model: one GGUF, or all files of a split one.
class base_model {
public:
    // `data`: an embedded base; its bytes belong to the extended GGUF.
    static status open_embedded(const std::string & where, const uint8_t * data, uint64_t size_bytes, base_model & out) {
        out.views_.emplace_back();
        POWERINFER_TRY(gguf_view::parse(where, data, size_bytes, out.views_[0]));
        if (out.n_splits() > 1) {
            return error_at(where, "is one part of a split model; expected a whole one; pack the plan again (powerinfer pack).");
        }
        return out.read_keys();
    }

    static status open(const std::string & path, base_model & out) {
        POWERINFER_TRY(out.add_file(path));
        const uint64_t n_splits = out.n_splits();
        if (n_splits > 1) {
            const std::string tail = split_tail(1, n_splits);
            uint64_t number = 0;
            if (!out.views_[0].find_integer("split.no", number) || number != 0 || !ends_with(path, tail)) {
                return error_at(path, "is part ", number + 1, " of a model in ", n_splits,
                                " parts; expected the first part, named *", tail, "; give that file.");
            }
            const std::string stem = path.substr(0, path.size() - tail.size());
            for (uint64_t i = 2; i <= n_splits; i++) {
                POWERINFER_TRY(out.add_file(stem + split_tail(i, n_splits)));
            }
        }
        return out.read_keys();
    }

    // "-00001-of-00003.gguf"
    static std::string split_tail(uint64_t number, uint64_t n_splits) {
        const auto five = [](uint64_t n) {
            const std::string digits = std::to_string(n);
            return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
        };
        return "-" + five(number) + "-of-" + five(n_splits) + ".gguf";
    }

    const std::string & where() const { return views_[0].where(); }
    const std::vector<gguf_view> & views() const { return views_; }
    const std::string & architecture() const { return architecture_; }
    int64_t n_layer() const { return n_layer_; }
    int64_t n_embd() const { return n_embd_; }

    const gguf_tensor * find_layer_tensor(const char * pattern, int64_t i_layer) const {
        const std::string name = numbered_name(pattern, i_layer);
        for (const gguf_view & view : views_) {
            if (const gguf_tensor * tensor = view.find_tensor(name)) {
                return tensor;
            }
        }
        return nullptr;
    }

    std::string digest(int64_t i_layer) const {
        std::vector<digest_tensor> parts;
        for (const char * pattern : {format::tensor_base_gate, format::tensor_base_up, format::tensor_base_down}) {
            if (const gguf_tensor * tensor = find_layer_tensor(pattern, i_layer)) {
                const size_t head_bytes = size_t(std::min<uint64_t>(format::digest_head_bytes, tensor->size_bytes));
                parts.push_back({numbered_name(pattern, i_layer), ggml_type_name(tensor->type), tensor->ne[0], tensor->ne[1],
                                 tensor->data, head_bytes});
            }
        }
        return plan_digest(parts);
    }

private:
    uint64_t n_splits() const {
        uint64_t n = 1;
        views_[0].find_integer("split.count", n);
        return n;
    }

    status add_file(const std::string & path) {
        std::shared_ptr<mapped_file> file;
        POWERINFER_TRY(mapped_file::open(path, file));
        views_.emplace_back();
        POWERINFER_TRY(gguf_view::parse(path, file->data(), file->size_bytes(), views_.back()));
        files_.push_back(std::move(file));
        return {};
    }

    status read_keys() {
        const gguf_view & view = views_[0];
        architecture_ = std::string(view.find_string(format::key_architecture));
        if (architecture_.empty()) {
            return error_at(where(), format::key_architecture, " is missing; expected a model; give the base model's GGUF.");
        }
        if (architecture_ == format::architecture) {
            return error_at(where(), "is an extended GGUF; expected a base model; give the stock GGUF that belongs to it.");
        }
        uint64_t n_layer = 0, n_embd = 0;
        const std::string key_n_layer = architecture_ + ".block_count", key_n_embd = architecture_ + ".embedding_length";
        if (!view.find_integer(key_n_layer, n_layer) || n_layer < 1 || n_layer > format::max_block_count) {
            return error_at(where(), shown(key_n_layer), " is missing or not in 1 .. ", format::max_block_count,
                            "; expected a language model; give the base model's GGUF.");
        }
        if (!view.find_integer(key_n_embd, n_embd) || n_embd < 1 || n_embd > INT32_MAX) {
            return error_at(where(), shown(key_n_embd), " is missing or not in 1 .. ", INT32_MAX,
                            "; expected a language model; give the base model's GGUF.");
        }
        n_layer_ = int64_t(n_layer);
        n_embd_ = int64_t(n_embd);
        return {};
    }

    std::vector<std::shared_ptr<mapped_file>> files_;
    std::vector<gguf_view> views_;
    std::string architecture_;
    int64_t n_layer_ = 0;
    int64_t n_embd_ = 0;
};

// Layers whose FFN is more than gate, up and down: experts, a norm before down, MTP layers.
std::vector<bool> layers_not_plain(const base_model & base) {
    std::vector<bool> result(size_t(base.n_layer()), false);
    for (const gguf_view & view : base.views()) {
        for (const auto & [name, tensor] : view.tensors()) {
            int64_t i_layer = 0;
            std::string_view rest;
            if (!split_layer_name(name, i_layer, rest) || i_layer >= base.n_layer()) {
                continue;
            }
            bool plain = rest.substr(0, 6) != "nextn." && rest.substr(0, 4) != "ffn.";  // the latter: activation scales (AWQ)
            if (rest.substr(0, 4) == "ffn_") {
                const size_t dot = rest.find('.');
                const std::string_view stem = rest.substr(4, dot - 4);
                const bool numbered =
                    dot != std::string_view::npos && dot + 1 < rest.size() && rest[dot + 1] >= '0' && rest[dot + 1] <= '9';
                plain = !numbered && (stem == "gate" || stem == "up" || stem == "down" || stem == "norm" || stem == "post_norm");
            }
            if (!plain) {
                result[size_t(i_layer)] = true;
            }
        }
    }
    return result;
}

// Types of the base's rows, for the layers that the plan covers.
void set_row_types(const base_model & base, plan & out) {
    for (size_t i = 0; i < out.layers.size(); i++) {
        plan_layer & layer = out.layers[i];
        if (layer.n_ff == 0) {
            continue;
        }
        for (const auto & [pattern, type] : {std::pair(format::tensor_base_gate, &layer.gate_type),
                                             std::pair(format::tensor_base_up, &layer.up_type),
                                             std::pair(format::tensor_base_down, &layer.down_type)}) {
            if (const gguf_tensor * tensor = base.find_layer_tensor(pattern, int64_t(i))) {
                *type = tensor->type;
            }
        }
    }
}

// ---- Extended GGUFs -----------------------------------------------------------------------------------------------

template <typename T>
constexpr gguf_type value_type_of() {
    if constexpr (std::is_same_v<T, uint32_t>) {
        return GGUF_TYPE_UINT32;
    } else if constexpr (std::is_same_v<T, uint64_t>) {
        return GGUF_TYPE_UINT64;
    } else if constexpr (std::is_same_v<T, float>) {
        return GGUF_TYPE_FLOAT32;
    } else if constexpr (std::is_same_v<T, uint8_t>) {
        return GGUF_TYPE_BOOL;
    } else {
        return GGUF_TYPE_STRING;  // std::string_view
    }
}

template <size_t N>
int index_of(const char * const (&names)[N], std::string_view name) {
    for (size_t i = 0; i < N; i++) {
        if (name == names[i]) {
            return int(i);
        }
    }
    return -1;
}

template <size_t N>
std::string list_of(const char * const (&names)[N]) {
    std::string text;
    for (size_t i = 0; i < N; i++) {
        text += (i ? ", " : "") + std::string(names[i]);
    }
    return text;
}

enum class need { required, optional };

class plan_reader {
public:
    plan_reader(const std::string & path, plan & out) : path_(path), plan_(out) {}

    status read(const std::string & base_override) {
        plan_ = plan();
        plan_.path = path_;
        POWERINFER_TRY(mapped_file::open(path_, plan_.file));
        POWERINFER_TRY(gguf_view::parse(path_, plan_.file->data(), plan_.file->size_bytes(), view_));
        POWERINFER_TRY(read_keys());
        POWERINFER_TRY(read_layer_keys());
        POWERINFER_TRY(check_tensor_names());
        for (int64_t i = 0; i < plan_.n_layer; i++) {
            POWERINFER_TRY(read_layer_tensors(i));
        }
        POWERINFER_TRY(read_placements());
        base_model base;
        POWERINFER_TRY(open_base(base_override, base));
        POWERINFER_TRY(check_base(base));
        set_row_types(base, plan_);
        return {};
    }

private:
    static constexpr uint64_t any_count = UINT64_MAX;

    // An array must have n values, one per `what`.
    template <typename T>
    status find(const std::string & key, need how, bool is_array, uint64_t n, const char * what, const gguf_value *& out) const {
        out = view_.find_key(key);
        if (!out) {
            return how == need::optional ? status()
                                         : error_at(path_, key, " is missing; an extended GGUF must have it; ", plan_again);
        }
        if (out->is_array != is_array || out->type != value_type_of<T>()) {
            return error_at(path_, key, " is ", out->is_array ? "an array of " : "of type ", gguf_type_name(out->type),
                            "; expected ", is_array ? "an array of " : "", gguf_type_name(value_type_of<T>()), "; ", plan_again);
        }
        if (is_array && n != any_count && out->n != n) {
            return error_at(path_, key, " has ", out->n, " values; expected ", n, ", one per ", what, "; ", plan_again);
        }
        return {};
    }

    // Leaves `out` alone when the key is absent and optional.
    template <typename T>
    status read_scalar(const std::string & key, need how, T & out) const {
        const gguf_value * value = nullptr;
        POWERINFER_TRY(find<T>(key, how, false, any_count, "", value));
        if (value) {
            copy_value(value->data, out);
        }
        return {};
    }

    // One value per layer; `out` stays empty when the key is absent and optional.
    template <typename T>
    status read_array(const std::string & key, need how, std::vector<T> & out) const {
        return read_array(key, how, uint64_t(plan_.n_layer), "layer", out);
    }

    template <typename T>
    status read_array(const std::string & key, need how, uint64_t n, const char * what, std::vector<T> & out) const {
        const gguf_value * value = nullptr;
        POWERINFER_TRY(find<T>(key, how, true, n, what, value));
        if (value) {
            out.resize(size_t(value->n));
            const uint8_t * at = value->data;
            for (T & element : out) {
                at += copy_value(at, element);
            }
        }
        return {};
    }

    template <typename T>
    static size_t copy_value(const uint8_t * data, T & out) {
        if constexpr (std::is_same_v<T, std::string_view>) {
            out = gguf_view::string_at(data);
            return sizeof(uint64_t) + out.size();
        } else {
            std::memcpy(&out, data, sizeof(T));
            return sizeof(T);
        }
    }

    // One float per layer within [low, high]; `set` gets it for each layer when the key is there.
    template <typename Set>
    status read_floats(const char * key, float low, float high, Set set) {
        std::vector<float> values;
        POWERINFER_TRY(read_array(key, need::optional, values));
        for (size_t i = 0; i < values.size(); i++) {
            if (!std::isfinite(values[i]) || values[i] < low || values[i] > high) {
                return error_at(path_, key, " of layer ", i, " is ", values[i], "; expected a finite number",
                                low > -HUGE_VALF ? join(" from ", low, high < HUGE_VALF ? join(" to ", high) : " up") : "", "; ",
                                plan_again);
            }
            set(plan_.layers[i], values[i]);
        }
        return {};
    }

    status read_keys() {
        const std::string_view architecture = view_.find_string(format::key_architecture);
        if (architecture != format::architecture) {
            return error_at(path_, format::key_architecture, " is '", shown(architecture), "'; expected '", format::architecture,
                            "'; give an extended GGUF (powerinfer profile makes one for a model).");
        }
        uint32_t version = 0, n_layer = 0, n_embd = 0;
        POWERINFER_TRY(read_scalar(format::key_format_version, need::required, version));
        if (version < 1 || version > format::version) {
            return error_at(path_, format::key_format_version, " is ", version, "; this build reads up to ", format::version,
                            ". Convert the model again.");
        }
        if (const gguf_value * value = view_.find_key(format::key_alignment)) {
            uint64_t alignment = 0;
            view_.find_integer(format::key_alignment, alignment);
            if (value->is_array || alignment != format::alignment) {
                return error_at(path_, format::key_alignment, " is ", alignment, "; expected ", format::alignment, "; ",
                                plan_again);
            }
        }
        POWERINFER_TRY(read_scalar(format::key_block_count, need::required, n_layer));
        if (n_layer < 1 || n_layer > format::max_block_count) {
            return error_at(path_, format::key_block_count, " is ", n_layer, "; expected 1 .. ", format::max_block_count, "; ",
                            plan_again);
        }
        POWERINFER_TRY(read_scalar(format::key_embedding_length, need::required, n_embd));
        if (n_embd < 1 || n_embd > INT32_MAX) {
            return error_at(path_, format::key_embedding_length, " is ", n_embd, "; expected 1 .. ", INT32_MAX, "; ", plan_again);
        }
        plan_.n_layer = n_layer;
        plan_.n_embd = n_embd;
        plan_.layers.resize(n_layer);

        std::string_view base_architecture, activation, input, corpus;
        uint8_t gated = 0;
        POWERINFER_TRY(read_scalar(format::key_base_architecture, need::required, base_architecture));
        POWERINFER_TRY(read_scalar(format::key_ffn_activation, need::required, activation));
        POWERINFER_TRY(read_scalar(format::key_ffn_gated, need::required, gated));
        POWERINFER_TRY(read_scalar(format::key_predictor_input, need::optional, input));
        POWERINFER_TRY(read_scalar(format::key_profile_corpus, need::optional, corpus));
        plan_.base_architecture = std::string(base_architecture);
        plan_.corpus = std::string(corpus);
        const int i_activation = index_of(format::activations, activation);
        if (i_activation < 0) {
            return error_at(path_, format::key_ffn_activation, " is '", shown(activation), "'; expected one of ",
                            list_of(format::activations), "; ", plan_again);
        }
        plan_.activation = activation_kind(int(activation_kind::relu) + i_activation);
        if (gated > 1) {
            return error_at(path_, format::key_ffn_gated, " is ", int(gated), "; expected 0 or 1; ", plan_again);
        }
        plan_.gated = gated == 1;
        if (plan_.activation == activation_kind::drelu && !plan_.gated) {
            return error_at(path_, format::key_ffn_activation, " is drelu and ", format::key_ffn_gated,
                            " is false; expected a gated FFN; ", plan_again);
        }
        if (!input.empty() && index_of(format::predictor_inputs, input) < 0) {
            return error_at(path_, format::key_predictor_input, " is '", shown(input), "'; expected one of ",
                            list_of(format::predictor_inputs), "; ", plan_again);
        }
        plan_.predictor_reads_residual = index_of(format::predictor_inputs, input) == 1;
        plan_.has_loss = view_.find_key(format::key_ffn_loss) != nullptr;
        POWERINFER_TRY(read_scalar(format::key_ffn_loss, need::optional, plan_.loss));
        if (!std::isfinite(plan_.loss)) {
            return error_at(path_, format::key_ffn_loss, " is ", plan_.loss, "; expected a finite number; ", plan_again);
        }
        return {};
    }

    status read_layer_keys() {
        std::vector<uint32_t> n_ff;
        std::vector<std::string_view> digests, kinds;
        std::vector<uint64_t> tokens;
        POWERINFER_TRY(read_array(format::key_feed_forward_length, need::required, n_ff));
        POWERINFER_TRY(read_array(format::key_base_ffn_digest, need::required, digests));
        POWERINFER_TRY(read_array(format::key_predictor_kind, need::optional, kinds));
        POWERINFER_TRY(read_array(format::key_profile_tokens, need::optional, tokens));
        for (size_t i = 0; i < plan_.layers.size(); i++) {
            plan_layer & layer = plan_.layers[i];
            if (n_ff[i] > INT32_MAX) {
                return error_at(path_, format::key_feed_forward_length, " of layer ", i, " is ", n_ff[i], "; expected at most ",
                                INT32_MAX, "; ", plan_again);
            }
            layer.n_ff = n_ff[i];
            layer.digest = std::string(digests[i]);
            if (!is_hex(digests[i]) || digests[i].size() != (layer.n_ff > 0 ? 64 : 0)) {
                return error_at(path_, format::key_base_ffn_digest, " of layer ", i, " is '", shown(digests[i]), "'; expected ",
                                layer.n_ff > 0 ? "64 hexadecimal digits" : "nothing, because the layer isn't covered", "; ",
                                plan_again);
            }
            if (!kinds.empty()) {
                const int i_kind = index_of(format::predictor_kinds, kinds[i]);
                if (i_kind < 0) {
                    return error_at(path_, format::key_predictor_kind, " of layer ", i, " is '", shown(kinds[i]),
                                    "'; expected one of ", list_of(format::predictor_kinds), "; ", plan_again);
                }
                layer.predictor = predictor_kind(i_kind);
            }
            if (!tokens.empty()) {
                layer.profile_tokens = tokens[i];
            }
        }
        constexpr float any = HUGE_VALF;
        POWERINFER_TRY(
            read_floats(format::key_ffn_activation_param, 0, any, [](plan_layer & l, float v) { l.activation_param = v; }));
        POWERINFER_TRY(read_floats(format::key_ffn_threshold, 0, any, [](plan_layer & l, float v) { l.threshold = v; }));
        POWERINFER_TRY(
            read_floats(format::key_ffn_product_threshold, 0, any, [](plan_layer & l, float v) { l.product_threshold = v; }));
        POWERINFER_TRY(
            read_floats(format::key_predictor_threshold, -any, any, [](plan_layer & l, float v) { l.predictor_threshold = v; }));
        POWERINFER_TRY(read_floats(format::key_predictor_recall, 0, 1, [](plan_layer & l, float v) { l.predictor_recall = v; }));
        POWERINFER_TRY(
            read_floats(format::key_predictor_candidate_density, 0, 1, [](plan_layer & l, float v) { l.predictor_density = v; }));
        return read_floats(format::key_profile_density, 0, 1, [](plan_layer & l, float v) { l.profile_density = v; });
    }

    status read_placements() {
        uint32_t n_placements = 0;
        POWERINFER_TRY(read_scalar(format::key_placement_count, need::optional, n_placements));
        if (n_placements > format::max_placements) {
            return error_at(path_, format::key_placement_count, " is ", n_placements, "; expected at most ",
                            format::max_placements, "; ", plan_again);
        }
        plan_.placements.resize(n_placements);
        for (uint32_t i = 0; i < n_placements; i++) {
            POWERINFER_TRY(read_placement(i, plan_.placements[i]));
        }
        return {};
    }

    status read_placement(int64_t i_placement, saved_placement & out) const {
        const auto key = [&](const char * pattern) { return numbered_name(pattern, i_placement); };
        const gguf_value * listed = view_.find_key(key(format::key_placement_device));
        if (listed && listed->is_array && (listed->n < 1 || listed->n > format::max_devices)) {
            return error_at(path_, key(format::key_placement_device), " has ", listed->n, " values; expected 1 .. ",
                            format::max_devices, "; ", plan_again);
        }
        std::string_view budget, model_hash, statistics_hash;
        std::vector<std::string_view> devices;
        POWERINFER_TRY(read_scalar(key(format::key_placement_version), need::required, out.version));
        POWERINFER_TRY(read_scalar(key(format::key_placement_budget), need::required, budget));
        POWERINFER_TRY(read_scalar(key(format::key_placement_n_ctx), need::required, out.n_ctx));
        POWERINFER_TRY(read_array(key(format::key_placement_device), need::required, any_count, "", devices));
        POWERINFER_TRY(
            read_array(key(format::key_placement_hot_bytes), need::required, devices.size(), "device", out.hot_bytes));
        POWERINFER_TRY(read_array(key(format::key_placement_n_hot), need::required, out.n_hot));
        POWERINFER_TRY(read_array(key(format::key_placement_i_device), need::required, out.i_device));
        POWERINFER_TRY(read_scalar(key(format::key_placement_token_s), need::required, out.token_s));
        POWERINFER_TRY(read_scalar(key(format::key_placement_gap), need::required, out.gap));
        POWERINFER_TRY(read_scalar(key(format::key_placement_model_hash), need::required, model_hash));
        POWERINFER_TRY(read_scalar(key(format::key_placement_statistics_hash), need::required, statistics_hash));
        for (size_t i = 0; i < plan_.layers.size(); i++) {
            if (out.n_hot[i] > uint64_t(plan_.layers[i].n_ff)) {
                return error_at(path_, key(format::key_placement_n_hot), " of layer ", i, " is ", out.n_hot[i],
                                "; expected at most ", plan_.layers[i].n_ff, " (n_ff); ", plan_again);
            }
            if (out.i_device[i] >= devices.size()) {
                return error_at(path_, key(format::key_placement_i_device), " of layer ", i, " is ", out.i_device[i],
                                "; expected 0 .. ", devices.size() - 1, "; ", plan_again);
            }
        }
        for (const auto & [pattern, value] :
             {std::pair(format::key_placement_token_s, out.token_s), std::pair(format::key_placement_gap, out.gap)}) {
            if (!std::isfinite(value) || value < 0.0f) {
                return error_at(path_, key(pattern), " is ", value, "; expected a finite number from 0 up; ", plan_again);
            }
        }
        for (const auto & [pattern, text] : {std::pair(format::key_placement_model_hash, model_hash),
                                             std::pair(format::key_placement_statistics_hash, statistics_hash)}) {
            if (text.size() != 64 || !is_hex(text)) {
                return error_at(path_, key(pattern), " is '", shown(text), "'; expected 64 hexadecimal digits; ", plan_again);
            }
        }
        out.budget = std::string(budget);
        out.devices.assign(devices.begin(), devices.end());
        out.model_hash = std::string(model_hash);
        out.statistics_hash = std::string(statistics_hash);
        return {};
    }

    // Every tensor is one of the format's, for a layer that the plan covers.
    status check_tensor_names() const {
        constexpr size_t prefix = std::string_view("blk.%d.").size();
        for (const auto & [name, tensor] : view_.tensors()) {
            int64_t i_layer = 0;
            std::string_view rest;
            bool known = name == format::tensor_base;
            if (split_layer_name(name, i_layer, rest)) {
                for (const char * pattern :
                     {format::tensor_neuron_order, format::tensor_neuron_frequency, format::tensor_ffn_down_t,
                      format::tensor_predictor_fc1, format::tensor_predictor_fc2}) {
                    known = known || rest == pattern + prefix;
                }
                if (known && i_layer >= plan_.n_layer) {
                    return error_at(path_, "tensor ", shown(name), " belongs to layer ", i_layer, "; expected layers 0 .. ",
                                    plan_.n_layer - 1, " (", format::key_block_count, "); ", plan_again);
                }
                if (known && plan_.layers[size_t(i_layer)].n_ff == 0) {
                    return error_at(path_, "tensor ", shown(name), " belongs to layer ", i_layer,
                                    ", which the plan doesn't cover (", format::key_feed_forward_length, " is 0); ", plan_again);
                }
            }
            if (!known) {
                return error_at(path_, "tensor ", shown(name), " isn't part of format version ", format::version, "; ",
                                plan_again);
            }
        }
        return {};
    }

    const gguf_tensor * find(const char * pattern, int64_t i_layer) const {
        return view_.find_tensor(numbered_name(pattern, i_layer));
    }

    status expect_vector(const char * pattern, int64_t i_layer, const gguf_tensor & tensor, ggml_type type, int64_t n) const {
        if (tensor.type != type || tensor.ne[0] != n || !is_matrix(&tensor, n, 1)) {
            return error_at(path_, "layer ", i_layer, "'s ", numbered_name(pattern, i_layer), " is ", ggml_type_name(tensor.type),
                            " ", shape_of(tensor), "; expected ", ggml_type_name(type), " [", n, "]; ", plan_again);
        }
        return {};
    }

    status read_rows(const char * pattern, int64_t i_layer, const gguf_tensor & tensor, int64_t ne0, int64_t ne1,
                     plan_tensor & out) const {
        if (!is_matrix(&tensor, ne0, ne1)) {
            return error_at(path_, "layer ", i_layer, "'s ", numbered_name(pattern, i_layer), " has shape ", shape_of(tensor),
                            "; expected [", ne0, ", ", ne1, "]; ", plan_again);
        }
        if (!has_to_float(tensor.type)) {
            return error_at(path_, "layer ", i_layer, "'s ", numbered_name(pattern, i_layer), " is of type ",
                            ggml_type_name(tensor.type), "; expected a type that holds weights; ", plan_again);
        }
        out = {tensor.type, ne0, ne1, tensor.data, size_t(tensor.size_bytes)};
        return {};
    }

    status read_layer_tensors(int64_t i_layer) {
        plan_layer & layer = plan_.layers[size_t(i_layer)];
        if (const gguf_tensor * order = find(format::tensor_neuron_order, i_layer)) {
            POWERINFER_TRY(expect_vector(format::tensor_neuron_order, i_layer, *order, GGML_TYPE_I32, layer.n_ff));
            layer.neuron_order.resize(size_t(layer.n_ff));
            std::memcpy(layer.neuron_order.data(), order->data, size_t(order->size_bytes));
            std::vector<bool> seen(size_t(layer.n_ff), false);
            for (size_t p = 0; p < layer.neuron_order.size(); p++) {
                const int32_t row = layer.neuron_order[p];
                if (row < 0 || row >= layer.n_ff || seen[size_t(row)]) {
                    return error_at(path_, "layer ", i_layer, "'s neuron_order has ", row, " at position ", p,
                                    "; expected each of 0 .. ", layer.n_ff - 1, " once; ", plan_again);
                }
                seen[size_t(row)] = true;
            }
        }
        if (const gguf_tensor * frequency = find(format::tensor_neuron_frequency, i_layer)) {
            POWERINFER_TRY(expect_vector(format::tensor_neuron_frequency, i_layer, *frequency, GGML_TYPE_F32, layer.n_ff));
            layer.neuron_frequency.resize(size_t(layer.n_ff));
            std::memcpy(layer.neuron_frequency.data(), frequency->data, size_t(frequency->size_bytes));
            for (size_t p = 0; p < layer.neuron_frequency.size(); p++) {
                const float share = layer.neuron_frequency[p];
                if (!(share >= 0.0f && share <= 1.0f)) {
                    return error_at(path_, "layer ", i_layer, "'s neuron_frequency is ", share, " at position ", p,
                                    "; expected a share from 0 to 1; ", plan_again);
                }
            }
        }
        if (const gguf_tensor * down_t = find(format::tensor_ffn_down_t, i_layer)) {
            POWERINFER_TRY(read_rows(format::tensor_ffn_down_t, i_layer, *down_t, plan_.n_embd, layer.n_ff, layer.ffn_down_t));
        }
        return read_predictor(i_layer, layer);
    }

    status read_predictor(int64_t i_layer, plan_layer & layer) {
        const gguf_tensor * fc1 = find(format::tensor_predictor_fc1, i_layer);
        const gguf_tensor * fc2 = find(format::tensor_predictor_fc2, i_layer);
        const char * kind = format::predictor_kinds[int(layer.predictor)];
        if (layer.predictor == predictor_kind::none) {
            if (fc1 || fc2) {
                return error_at(path_, "layer ", i_layer, " has predictor tensors but ", format::key_predictor_kind, " is ", kind,
                                "; expected mlp or linear; ", plan_again);
            }
            return {};
        }
        if (!fc1 || !fc2) {
            return error_at(path_, "layer ", i_layer, "'s ", format::key_predictor_kind, " is ", kind, " but ",
                            numbered_name(fc1 ? format::tensor_predictor_fc2 : format::tensor_predictor_fc1, i_layer),
                            " is missing; ", plan_again);
        }
        const int64_t rank = fc1->ne[1];
        if (rank < 1 || rank > plan_.n_embd) {
            return error_at(path_, "layer ", i_layer, "'s predictor has rank ", rank, "; expected 1 .. ", plan_.n_embd, " (",
                            format::key_embedding_length, "); ", plan_again);
        }
        POWERINFER_TRY(read_rows(format::tensor_predictor_fc1, i_layer, *fc1, plan_.n_embd, rank, layer.fc1));
        return read_rows(format::tensor_predictor_fc2, i_layer, *fc2, rank, layer.n_ff, layer.fc2);
    }

    status open_base(const std::string & base_override, base_model & base) {
        std::string_view name;
        POWERINFER_TRY(read_scalar(format::key_base_file, need::optional, name));
        if (const gguf_tensor * embedded = view_.find_tensor(format::tensor_base)) {
            if (!base_override.empty()) {
                return error_at(path_, "carries its base model; ", base_override, " was named as base too; leave that out.");
            }
            const uint64_t offset = uint64_t(embedded->data - plan_.file->data());
            if (embedded->type != GGML_TYPE_I8 || !is_matrix(embedded, embedded->ne[0], 1) || offset % format::alignment != 0) {
                return error_at(path_, "tensor base is ", ggml_type_name(embedded->type), " ", shape_of(*embedded), " at byte ",
                                offset, "; expected i8 [size] at a multiple of ", format::alignment,
                                "; pack the plan again (powerinfer pack).");
            }
            plan_.base_path = path_;
            plan_.base_offset_bytes = offset;
            plan_.base_size_bytes = embedded->size_bytes;
            return base_model::open_embedded(path_ + " (the base model in it)", embedded->data, embedded->size_bytes, base);
        }
        if (name == "." || name == ".." || name.find_first_of(std::string_view("/\\\0", 3)) != std::string_view::npos) {
            return error_at(path_, format::key_base_file, " is '", shown(name), "'; expected a file name without folders; ",
                            plan_again);
        }
        plan_.base_path = base_override;
        if (base_override.empty()) {
            if (name.empty()) {
                return error_at(path_, "has neither ", format::key_base_file,
                                " nor an embedded base model; expected one of them; "
                                "name the base model.");
            }
            plan_.base_path = folder_of(path_) + std::string(name);
            if (!is_file(plan_.base_path)) {
                return error_at(path_, format::key_base_file, " is '", shown(name), "' but ", plan_.base_path,
                                " isn't a file; expected the base model there; put it beside the plan or name it.");
            }
        }
        return base_model::open(plan_.base_path, base);
    }

    status check_base(const base_model & base) const {
        const std::string & where = base.where();
        if (base.architecture() != plan_.base_architecture) {
            return error_at(path_, "the base model ", where, " has architecture '", shown(base.architecture()),
                            "'; the plan was made for '", shown(plan_.base_architecture), "'; ", use_base);
        }
        if (base.n_layer() != plan_.n_layer || base.n_embd() != plan_.n_embd) {
            return error_at(path_, "the base model ", where, " has ", base.n_layer(), " layers of width ", base.n_embd(),
                            "; the plan was made for ", plan_.n_layer, " of width ", plan_.n_embd, "; ", use_base);
        }
        for (int64_t i = 0; i < plan_.n_layer; i++) {
            const plan_layer & layer = plan_.layers[size_t(i)];
            if (layer.n_ff == 0) {
                continue;
            }
            const gguf_tensor * gate = base.find_layer_tensor(format::tensor_base_gate, i);
            const gguf_tensor * up = base.find_layer_tensor(format::tensor_base_up, i);
            const gguf_tensor * down = base.find_layer_tensor(format::tensor_base_down, i);
            if (!up || !down || plan_.gated != (gate != nullptr)) {
                return error_at(path_, "layer ", i, "'s FFN in the base model ", where, " has ", gate ? "a gate, " : "no gate, ",
                                up ? "up" : "no up", " and ", down ? "down" : "no down", "; the plan was made for ",
                                plan_.gated ? "" : "no gate, ", plan_.gated ? "gate, up and down" : "up and down", "; ",
                                use_base);
            }
            for (const gguf_tensor * rows : {gate, up}) {
                if (rows && !is_matrix(rows, plan_.n_embd, layer.n_ff)) {
                    return error_at(path_, "layer ", i, "'s ", rows == up ? "up" : "gate", " in the base model ", where,
                                    " has shape ", shape_of(*rows), "; the plan was made for [", plan_.n_embd, ", ", layer.n_ff,
                                    "]; ", use_base);
                }
            }
            if (!is_matrix(down, layer.n_ff, plan_.n_embd)) {
                return error_at(path_, "layer ", i, "'s down in the base model ", where, " has shape ", shape_of(*down),
                                "; the plan was made for [", layer.n_ff, ", ", plan_.n_embd, "]; ", use_base);
            }
            const std::string digest = base.digest(i);
            if (digest != layer.digest) {
                return error_at(path_, "layer ", i, "'s FFN has digest ", digest.substr(0, 12), "... in the base model ", where,
                                "; the plan was made for ", layer.digest.substr(0, 12), "...; ", use_base);
            }
        }
        return {};
    }

    std::string path_;
    plan & plan_;
    gguf_view view_;
};

// Runs `body`; whatever it throws (memory) becomes a status.
template <typename Body>
status guarded(const std::string & where, Body body) {
    try {
        return body();
    } catch (const std::exception & error) {
        return error_at(where, "reading it failed (", error.what(), "); expected enough memory; close other programs.");
    }
}

}  // namespace

status mapped_file::open(const std::string & path, std::shared_ptr<mapped_file> & out) {
    // O_NONBLOCK: a pipe is refused below instead of waited for
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return error_at(path, "can't be opened (", std::strerror(errno), "); expected a readable file; check the path.");
    }
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        ::close(fd);
        return error_at(path, "isn't a file; expected a GGUF file; check the path.");
    }
    std::shared_ptr<mapped_file> file(new mapped_file());
    file->size_bytes_ = size_t(info.st_size);
    if (file->size_bytes_ > 0) {
        // the file over the start of a larger anonymous mapping, whose last page stays zeros
        void * data = mmap(nullptr, file->size_bytes_ + tail_bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data != MAP_FAILED && mmap(data, file->size_bytes_, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
            const int code = errno;
            munmap(data, file->size_bytes_ + tail_bytes);
            errno = code;
            data = MAP_FAILED;
        }
        if (data == MAP_FAILED) {
            const int code = errno;
            ::close(fd);
            return error_at(path, "can't be mapped into memory (", std::strerror(code), "); expected ", info.st_size,
                            " bytes of address space; check the file system.");
        }
        file->data_ = static_cast<const uint8_t *>(data);
    }
    ::close(fd);
    out = std::move(file);
    return {};
}

mapped_file::~mapped_file() {
    if (data_) {
        munmap(const_cast<uint8_t *>(data_), size_bytes_ + tail_bytes);
    }
}

std::string plan_digest(const std::vector<digest_tensor> & tensors) {
    sha256 hash;
    for (const digest_tensor & tensor : tensors) {
        const std::string text =
            tensor.name + "\n" + tensor.type_name + "\n" + std::to_string(tensor.ne0) + "," + std::to_string(tensor.ne1) + "\n";
        hash.update(text.data(), text.size());
        hash.update(tensor.head, tensor.head_bytes);
    }
    return hash.hex();
}

std::string plan_model_hash(const plan & p) {
    sha256 hash;
    for (const plan_layer & layer : p.layers) {
        const std::string line =
            join(layer.n_ff, " ", layer.digest, " ",
                 layer.ffn_down_t.data ? ggml_type_name(ggml_type(layer.ffn_down_t.row_type)) : "", "\n");
        hash.update(line.data(), line.size());
    }
    return hash.hex();
}

std::string plan_statistics_hash(const plan & p) {
    sha256 hash;
    for (const plan_layer & layer : p.layers) {
        const std::string line = join(!layer.neuron_order.empty(), !layer.neuron_frequency.empty(), "\n");
        hash.update(line.data(), line.size());
        hash.update(layer.neuron_order.data(), layer.neuron_order.size() * sizeof(int32_t));
        hash.update(layer.neuron_frequency.data(), layer.neuron_frequency.size() * sizeof(float));
    }
    return hash.hex();
}

const saved_placement * plan_find_placement(const plan & p, const std::vector<uint64_t> & hot_bytes) {
    if (p.placements.empty()) {
        return nullptr;
    }
    const std::string model_hash = plan_model_hash(p), statistics_hash = plan_statistics_hash(p);
    for (auto saved = p.placements.rbegin(); saved != p.placements.rend(); ++saved) {
        bool fits = saved->version == format::placement_version && saved->model_hash == model_hash &&
                    saved->statistics_hash == statistics_hash && saved->hot_bytes.size() == hot_bytes.size();
        for (size_t d = 0; fits && d < hot_bytes.size(); d++) {
            fits = double(hot_bytes[d]) * (1 - format::placement_slack) <= double(saved->hot_bytes[d]) &&
                   saved->hot_bytes[d] <= hot_bytes[d];
        }
        if (fits) {
            return &*saved;
        }
    }
    return nullptr;
}

status plan_read(const std::string & path, const std::string & base_override, plan & out) {
    return guarded(path, [&] { return plan_reader(path, out).read(base_override); });
}

status plan_from_base(const std::string & base_path, plan & out) {
    return guarded(base_path, [&]() -> status {
        base_model base;
        POWERINFER_TRY(base_model::open(base_path, base));
        out = plan();
        out.base_path = base_path;
        out.base_architecture = base.architecture();
        out.n_layer = base.n_layer();
        out.n_embd = base.n_embd();
        out.layers.resize(size_t(out.n_layer));
        const std::vector<bool> not_plain = layers_not_plain(base);
        bool any = false;
        for (int64_t i = 0; i < out.n_layer; i++) {
            const gguf_tensor * gate = base.find_layer_tensor(format::tensor_base_gate, i);
            const gguf_tensor * up = base.find_layer_tensor(format::tensor_base_up, i);
            const gguf_tensor * down = base.find_layer_tensor(format::tensor_base_down, i);
            if (not_plain[size_t(i)] || !up || !down) {
                continue;
            }
            const int64_t n_ff = down->ne[0];
            // a fused gate and up has 2 * n_ff rows
            const bool fits = n_ff > 0 && n_ff <= INT32_MAX && is_matrix(up, out.n_embd, n_ff) &&
                              is_matrix(down, n_ff, out.n_embd) && (!gate || is_matrix(gate, out.n_embd, n_ff)) &&
                              has_to_float(up->type) && has_to_float(down->type) && (!gate || has_to_float(gate->type));
            if (!fits || (any && out.gated != (gate != nullptr))) {
                continue;
            }
            any = true;
            out.gated = gate != nullptr;
            out.layers[size_t(i)].n_ff = n_ff;
            out.layers[size_t(i)].digest = base.digest(i);
        }
        set_row_types(base, out);
        return {};
    });
}

status model_file_kind_of(const std::string & path, model_file_kind & out) {
    return guarded(path, [&]() -> status {
        std::shared_ptr<mapped_file> file;
        gguf_view view;
        POWERINFER_TRY(mapped_file::open(path, file));
        POWERINFER_TRY(gguf_view::parse(path, file->data(), file->size_bytes(), view));
        out = view.find_string(format::key_architecture) == format::architecture ? model_file_kind::extended
                                                                                 : model_file_kind::plain;
        return {};
    });
}

std::string plan_find_sidecar(const std::string & model_path) {
    constexpr std::string_view gguf = ".gguf";
    constexpr std::string_view split = "-00001-of-00000";
    if (!ends_with(model_path, gguf) || ends_with(model_path, format::sidecar_suffix)) {
        return "";
    }
    const std::string stem = model_path.substr(0, model_path.size() - gguf.size());
    std::vector<std::string> stems = {stem};
    if (stem.size() > split.size()) {
        const std::string_view tail = std::string_view(stem).substr(stem.size() - split.size());
        const bool is_split =
            tail.substr(0, 10) == split.substr(0, 10) && tail.find_first_not_of("0123456789", 10) == std::string_view::npos;
        if (is_split) {
            stems.push_back(stem.substr(0, stem.size() - split.size()));
        }
    }
    for (const std::string & candidate : stems) {
        if (is_file(candidate + format::sidecar_suffix)) {
            return candidate + format::sidecar_suffix;
        }
    }
    return "";
}

}  // namespace powerinfer
