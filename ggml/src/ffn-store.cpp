// Copies the weights of one layer into our layout: gate rows contiguous, a neuron's up and down rows side by side,
// hot neurons first, huge pages. Or points at mapped rows. Checks the layer's digest on the way.
#include "ffn.h"

#include "ggml.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

namespace powerinfer {

namespace {

constexpr size_t huge_page_bytes = 2u << 20;
constexpr size_t cache_line_bytes = 64;
constexpr size_t digest_head_bytes = 4096;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

int index_of(ffn_role role) { return static_cast<int>(role); }

const char * role_name(ffn_role role) {
    static const char * names[] = {"ffn_gate.weight", "ffn_up.weight", "ffn_down.weight",
                                   "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"};
    return names[index_of(role)];
}

std::string shape_text(int64_t ne0, int64_t ne1) {
    return "[" + std::to_string(ne0) + ", " + std::to_string(ne1) + "]";
}

}  // namespace

// --- huge_block ---

status huge_block::allocate(size_t size_bytes, bool lock, huge_block & out) {
    const size_t page_bytes = size_t(sysconf(_SC_PAGESIZE));  // 4 KiB; on aarch64 also 16 or 64 KiB
    const size_t size = round_up(std::max<size_t>(size_bytes, 1), page_bytes);
    const size_t huge = size / huge_page_bytes * huge_page_bytes;  // the tail stays in small pages: no memory is wasted
    // Over-map by one huge page so that the block starts on a huge-page boundary.
    const size_t slack = huge > 0 ? huge_page_bytes : 0;
    void * raw = mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) {
        return status::error("FFN buffer: " + std::to_string(size) + " bytes could not be allocated (" + std::strerror(errno) +
                             "); close other programs, or load with the weights mapped.");
    }
    uint8_t * begin = static_cast<uint8_t *>(raw);
    uint8_t * aligned = begin;
    if (huge > 0) {
        aligned = reinterpret_cast<uint8_t *>(round_up(reinterpret_cast<uintptr_t>(begin), huge_page_bytes));
        if (aligned > begin) {
            munmap(begin, aligned - begin);
        }
        if (begin + slack > aligned) {
            munmap(aligned + size, begin + slack - aligned);
        }
        madvise(aligned, huge, MADV_HUGEPAGE);
    }
    huge_block block;
    block.data_ = aligned;
    block.size_bytes_ = size;
    if (lock && mlock(aligned, size) != 0) {
        return status::error("FFN buffer: mlock of " + std::to_string(size) + " bytes failed (" + std::strerror(errno) +
                             "); raise the limit (ulimit -l) or load without mlock.");
    }
    out = std::move(block);
    return {};
}

huge_block & huge_block::operator=(huge_block && other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    std::swap(released_bytes_, other.released_bytes_);
    return *this;
}

huge_block::~huge_block() {
    if (released_bytes_ < size_bytes_) {
        munmap(data_ + released_bytes_, size_bytes_ - released_bytes_);
    }
}

size_t huge_block::release_front(size_t n_bytes) {
    const size_t page_bytes = size_t(sysconf(_SC_PAGESIZE));
    const size_t end = std::min(n_bytes, size_bytes_) / page_bytes * page_bytes;
    if (end <= released_bytes_ || munmap(data_ + released_bytes_, end - released_bytes_) != 0) {
        return 0;
    }
    return end - std::exchange(released_bytes_, end);
}

// --- row types ---

void row_to_float(int row_type, const void * row, float * out, int64_t n) {
    if (row_type == GGML_TYPE_F32) {
        std::memcpy(out, row, n * sizeof(float));
        return;
    }
    ggml_get_type_traits(static_cast<ggml_type>(row_type))->to_float(row, out, n);
}

size_t row_size_bytes(int row_type, int64_t n) {
    const ggml_type type = static_cast<ggml_type>(row_type);
    if (n % ggml_blck_size(type) != 0) {
        return 0;
    }
    return ggml_row_size(type, n);
}

int derived_row_type(int row_type, int64_t n_embd) {
    const ggml_type type = static_cast<ggml_type>(row_type);
    if (!ggml_is_quantized(type)) {
        return row_type;
    }
    return n_embd % ggml_blck_size(GGML_TYPE_Q8_0) == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
}

ffn_layer ffn_without_hot(const ffn_layer & layer, int64_t n_hot) {
    ffn_layer cold = layer;
    cold.n_ff -= n_hot;
    for (row_matrix * m : {&cold.first, &cold.second, &cold.down, &cold.fc2}) {
        if (m->rows == nullptr) {
            continue;
        }
        m->n_rows -= n_hot;
        if (m->row_of != nullptr) {
            m->row_of += n_hot;
        } else {
            m->rows += n_hot * m->stride_bytes;
        }
    }
    for (std::vector<float> * values : {&cold.first_bias, &cold.second_bias, &cold.down_norm}) {
        if (!values->empty()) {
            values->erase(values->begin(), values->begin() + n_hot);
        }
    }
    if (cold.order != nullptr) {
        cold.order += n_hot;
    }
    return cold;
}

// --- ffn_store ---

ffn_store::ffn_store(const plan & owner, int i_layer, const kernel_table * kernels, bool lock, bool mapped)
    : plan_(owner), plan_layer_(owner.layers[i_layer]), i_layer_(i_layer), kernels_(kernels), lock_(lock), mapped_(mapped) {
    layer_.n_embd = owner.n_embd;
    layer_.n_ff = plan_layer_.n_ff;
    layer_.gated = owner.gated;
    layer_.activation_param = plan_layer_.activation_param;
    layer_.order = plan_layer_.neuron_order.empty() ? nullptr : plan_layer_.neuron_order.data();
}

status ffn_store::announce(ffn_role role, const ffn_tensor_info & info) {
    const int64_t n_embd = layer_.n_embd;
    const int64_t n_ff = layer_.n_ff;
    int64_t ne0 = n_embd;
    int64_t ne1 = n_ff;
    switch (role) {
        case ffn_role::gate:
        case ffn_role::up:        break;
        case ffn_role::down:      ne0 = n_ff; ne1 = n_embd; break;
        case ffn_role::gate_bias:
        case ffn_role::up_bias:   ne0 = n_ff; ne1 = 1; break;
        case ffn_role::down_bias: ne0 = n_embd; ne1 = 1; break;
    }
    const std::string where = "blk." + std::to_string(i_layer_) + "." + role_name(role);
    if (info.ne0 != ne0 || info.ne1 != ne1) {
        return status::error(where + ": shape is " + shape_text(info.ne0, info.ne1) + "; the plan expects " +
                             shape_text(ne0, ne1) + "; use the base model that the plan was made from.");
    }
    if (index_of(role) >= index_of(ffn_role::gate_bias) && info.row_type != GGML_TYPE_F32) {
        return status::error(where + ": type is " + ggml_type_name(static_cast<ggml_type>(info.row_type)) +
                             "; expected f32; convert the model again with F32 biases.");
    }
    info_[index_of(role)] = info;
    info_[index_of(role)].present = true;
    return {};
}

status ffn_store::prepare() {
    const ffn_tensor_info & gate = info_[index_of(ffn_role::gate)];
    const ffn_tensor_info & up = info_[index_of(ffn_role::up)];
    const ffn_tensor_info & down = info_[index_of(ffn_role::down)];
    const std::string where = "layer " + std::to_string(i_layer_);
    if (!up.present || !down.present || gate.present != layer_.gated) {
        return status::error(where + ": the model's FFN is " + (gate.present ? "gated" : "ungated") + "; the plan says " +
                             (layer_.gated ? "gated" : "ungated") + "; make the plan again from this model.");
    }
    auto describe = [&](row_matrix & m, int row_type, int64_t n, int64_t n_rows) -> status {
        m.row_bytes = row_size_bytes(row_type, n);
        if (m.row_bytes == 0) {
            return status::error(where + ": rows of " + std::to_string(n) + " values don't fit type " +
                                 ggml_type_name(static_cast<ggml_type>(row_type)) + "; convert the model to another type.");
        }
        m.n = n;
        m.n_rows = n_rows;
        m.row_type = row_type;
        m.kernels = kernel_table_find(kernels_, row_type);
        if (m.kernels == nullptr && row_type != GGML_TYPE_F32 &&
            ggml_get_type_traits(static_cast<ggml_type>(row_type))->to_float == nullptr) {
            return status::error(where + ": type " + ggml_type_name(static_cast<ggml_type>(row_type)) +
                                 " can't be read row by row; convert the model to another type.");
        }
        return {};
    };
    status result = describe(layer_.first, layer_.gated ? gate.row_type : up.row_type, layer_.n_embd, layer_.n_ff);
    if (result.ok() && layer_.gated) {
        result = describe(layer_.second, up.row_type, layer_.n_embd, layer_.n_ff);
    }
    const plan_tensor & stored_down = plan_layer_.ffn_down_t;
    if (result.ok()) {
        const int down_type = stored_down.data ? stored_down.row_type : derived_row_type(down.row_type, layer_.n_embd);
        result = describe(layer_.down, down_type, layer_.n_embd, layer_.n_ff);
    }
    if (result.ok() && plan_layer_.predictor != predictor_kind::none) {
        const int64_t rank = plan_layer_.fc1.ne1;
        result = describe(layer_.fc1, plan_layer_.fc1.row_type, layer_.n_embd, rank);
        if (result.ok()) {
            result = describe(layer_.fc2, plan_layer_.fc2.row_type, rank, layer_.n_ff);
        }
        layer_.predictor_relu = plan_layer_.predictor == predictor_kind::mlp;
        layer_.predictor_threshold = plan_layer_.predictor_threshold;
    }
    if (!result.ok()) {
        return result;
    }
    up_bytes_ = layer_.gated && !mapped_ ? round_up(layer_.second.row_bytes, cache_line_bytes) : 0;
    layer_.down.stride_bytes = up_bytes_ + round_up(layer_.down.row_bytes, cache_line_bytes);
    result = copy_predictor();
    prepared_ = result.ok();
    return result;
}

namespace {

// Room for rows of `bytes` each, `count` of them, plus what kernels may read past the end.
status allocate_rows(size_t stride_bytes, int64_t count, bool lock, huge_block & block, size_t & memory_bytes) {
    if (block.data() != nullptr) {
        return {};
    }
    status result = huge_block::allocate(stride_bytes * count + row_tail_bytes, lock, block);
    if (result.ok()) {
        memory_bytes += block.size_bytes();
    }
    return result;
}

// to[i] = from[order[i]], all threads. order == nullptr: identity.
void copy_rows(uint8_t * to, size_t to_stride_bytes, const uint8_t * from, size_t row_bytes, int64_t n_rows, const int32_t * order) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n_rows; ++i) {
        std::memcpy(to + i * to_stride_bytes, from + (order ? order[i] : i) * row_bytes, row_bytes);
    }
}

}  // namespace

status ffn_store::copy_predictor() {
    row_matrix & fc1 = layer_.fc1;
    row_matrix & fc2 = layer_.fc2;
    if (fc1.n == 0) {
        return {};
    }
    const size_t fc1_bytes = round_up(fc1.row_bytes * fc1.n_rows, cache_line_bytes);
    const size_t fc2_bytes = fc2.row_bytes * fc2.n_rows;
    status result = allocate_rows(fc1_bytes + fc2_bytes, 1, lock_, predictor_block_, memory_bytes_);
    if (!result.ok()) {
        return result;
    }
    copy_rows(predictor_block_.data(), fc1.row_bytes, plan_layer_.fc1.data, fc1.row_bytes, fc1.n_rows, nullptr);
    copy_rows(predictor_block_.data() + fc1_bytes, fc2.row_bytes, plan_layer_.fc2.data, fc2.row_bytes, fc2.n_rows, nullptr);
    fc1.rows = predictor_block_.data();
    fc1.stride_bytes = fc1.row_bytes;
    fc2.rows = predictor_block_.data() + fc1_bytes;
    fc2.stride_bytes = fc2.row_bytes;
    return {};
}

status ffn_store::set(ffn_role role, const void * data, const uint8_t * resident) {
    if (!prepared_) {
        status result = prepare();
        if (!result.ok()) {
            return result;
        }
    }
    const ffn_tensor_info & info = info_[index_of(role)];
    const uint8_t * bytes = static_cast<const uint8_t *>(data);
    const int32_t * order = layer_.order;
    const int64_t n_ff = layer_.n_ff;

    if (index_of(role) >= index_of(ffn_role::gate_bias)) {
        const float * values = static_cast<const float *>(data);
        if (role == ffn_role::down_bias) {
            layer_.down_bias.assign(values, values + layer_.n_embd);
        } else {
            std::vector<float> & bias = (role == ffn_role::gate_bias || !layer_.gated) ? layer_.first_bias : layer_.second_bias;
            bias.resize(n_ff);
            for (int64_t i = 0; i < n_ff; ++i) {
                bias[i] = values[order ? order[i] : i];
            }
        }
        filled_[index_of(role)] = true;
        return {};
    }

    const size_t tensor_bytes = row_size_bytes(info.row_type, info.ne0) * info.ne1;
    head_[index_of(role)].assign(reinterpret_cast<const char *>(bytes), std::min(digest_head_bytes, tensor_bytes));

    const bool is_first = role == ffn_role::gate || (role == ffn_role::up && !layer_.gated);
    if (is_first || role == ffn_role::up) {
        row_matrix & m = is_first ? layer_.first : layer_.second;
        const size_t row_bytes = m.row_bytes;
        if (mapped_) {
            m.rows = resident;
            m.stride_bytes = row_bytes;
            m.row_of = order;
        } else {
            const size_t stride = is_first ? row_bytes : layer_.down.stride_bytes;
            huge_block & block = is_first ? first_block_ : bundle_block_;
            status result = allocate_rows(stride, n_ff, lock_, block, memory_bytes_);
            if (!result.ok()) {
                return result;
            }
            m.rows = block.data();
            m.stride_bytes = stride;
            copy_rows(block.data(), stride, bytes, row_bytes, n_ff, order);
        }
    } else {
        status result = set_down(data);
        if (!result.ok()) {
            return result;
        }
    }
    filled_[index_of(role)] = true;

    const bool weights_complete = filled_[index_of(ffn_role::up)] && filled_[index_of(ffn_role::down)] &&
                                  (filled_[index_of(ffn_role::gate)] || !layer_.gated);
    if (!weights_complete) {
        return {};
    }
    // All three are here: are they the plan's?
    std::vector<digest_tensor> parts;
    for (const ffn_role part : {ffn_role::gate, ffn_role::up, ffn_role::down}) {
        const ffn_tensor_info & tensor = info_[index_of(part)];
        if (tensor.present) {
            const std::string & head = head_[index_of(part)];
            parts.push_back({"blk." + std::to_string(i_layer_) + "." + role_name(part),
                             ggml_type_name(static_cast<ggml_type>(tensor.row_type)), tensor.ne0, tensor.ne1,
                             reinterpret_cast<const uint8_t *>(head.data()), head.size()});
        }
    }
    const std::string digest = plan_digest(parts);
    for (std::string & head : head_) {
        head = {};
    }
    if (digest != plan_layer_.digest) {
        return status::error((plan_.path.empty() ? plan_.base_path : plan_.path) + ": layer " + std::to_string(i_layer_) +
                             ": the FFN of the loaded model has digest " + digest.substr(0, 12) + "; the plan was made for " +
                             plan_layer_.digest.substr(0, 12) +
                             "; use the base model that the plan was made from, or make the plan again (powerinfer profile).");
    }
    return {};
}

status ffn_store::set_down(const void * data) {
    const int64_t n_ff = layer_.n_ff;
    const int64_t n_embd = layer_.n_embd;
    row_matrix & down = layer_.down;
    const plan_tensor & stored = plan_layer_.ffn_down_t;
    uint8_t * rows = nullptr;

    if (mapped_ && stored.data != nullptr) {
        down.rows = stored.data;
        down.stride_bytes = down.row_bytes;
    } else {
        status result = allocate_rows(down.stride_bytes, n_ff, lock_, bundle_block_, memory_bytes_);
        if (!result.ok()) {
            return result;
        }
        rows = bundle_block_.data() + up_bytes_;
        down.rows = rows;
        if (stored.data == nullptr) {
            // Transpose in slabs of neurons: unpack the slab's columns of every base row, then quantize neuron rows.
            const int base_type = info_[index_of(ffn_role::down)].row_type;
            const size_t base_row_bytes = row_size_bytes(base_type, n_ff);
            const uint8_t * base = static_cast<const uint8_t *>(data);
            const int32_t * order = layer_.order;
            const ggml_type type = static_cast<ggml_type>(base_type);
            const int64_t unit = ggml_blck_size(type);
            const int64_t slab = std::max<int64_t>(unit, 256);
            std::vector<int32_t> position_of(n_ff);
            for (int64_t i = 0; i < n_ff; ++i) {
                position_of[order ? order[i] : i] = static_cast<int32_t>(i);
            }
            ggml_quantize_init(static_cast<ggml_type>(down.row_type));
#pragma omp parallel
            {
                std::vector<float> columns(slab * n_embd);  // (neuron in slab, n_embd)
                std::vector<float> piece(slab);
#pragma omp for schedule(static)
                for (int64_t i_slab = 0; i_slab < (n_ff + slab - 1) / slab; ++i_slab) {
                    const int64_t begin = i_slab * slab;
                    const int64_t count = std::min(slab, n_ff - begin);
                    for (int64_t j = 0; j < n_embd; ++j) {
                        row_to_float(base_type, base + j * base_row_bytes + ggml_row_size(type, begin), piece.data(), count);
                        for (int64_t i = 0; i < count; ++i) {
                            columns[i * n_embd + j] = piece[i];
                        }
                    }
                    for (int64_t i = 0; i < count; ++i) {
                        uint8_t * row = rows + position_of[begin + i] * down.stride_bytes;
                        if (down.row_type == GGML_TYPE_F32) {
                            std::memcpy(row, &columns[i * n_embd], n_embd * sizeof(float));
                        } else {
                            ggml_quantize_chunk(static_cast<ggml_type>(down.row_type), &columns[i * n_embd], row, 0, 1, n_embd, nullptr);
                        }
                    }
                }
            }
        }
    }

    // One pass: a row is still in the cache when its norm is taken.
    const bool copies = rows != nullptr && stored.data != nullptr;
    const row_reader reader(down, kernels_);
    layer_.down_norm.resize(n_ff);
#pragma omp parallel
    {
        std::vector<float> row(n_embd);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < n_ff; ++i) {
            if (copies) {
                std::memcpy(rows + i * down.stride_bytes, stored.data + i * down.row_bytes, down.row_bytes);
            }
            reader.unpack(i, row.data());
            float sum = 0.0f;
            kernels_->matmul_nt(1, 1, n_embd, row.data(), n_embd, row.data(), n_embd, &sum, 1);
            layer_.down_norm[i] = std::sqrt(sum);
        }
    }
    return {};
}

void ffn_store::release_hot(int64_t n_hot) {
    memory_bytes_ -= first_block_.release_front(n_hot * layer_.first.stride_bytes);
    memory_bytes_ -= bundle_block_.release_front(n_hot * layer_.down.stride_bytes);
}

bool ffn_store::derives_down() const { return plan_layer_.ffn_down_t.data == nullptr; }

bool ffn_store::is_complete() const {
    for (int i = 0; i < 6; ++i) {
        if (info_[i].present && !filled_[i]) {
            return false;
        }
    }
    return prepared_;
}

}  // namespace powerinfer
