// Row access by position, activations, and the predictor's scores: what decides which neurons a token uses.
#include "ffn.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace powerinfer {

// --- workspace ---

void ffn_workspace::free_aligned::operator()(void * p) const { std::free(p); }

void * ffn_workspace::get(int slot, size_t size_bytes) {
    if (static_cast<size_t>(slot) >= blocks_.size()) {
        blocks_.resize(slot + 1);
        sizes_.resize(slot + 1, 0);
    }
    if (sizes_[slot] < size_bytes) {
        const size_t rounded = (size_bytes + 4095) / 4096 * 4096;
        blocks_[slot].reset();
        blocks_[slot].reset(std::aligned_alloc(64, rounded));
        GGML_ASSERT(blocks_[slot] != nullptr && "out of memory for FFN scratch space");
        sizes_[slot] = rounded;
    }
    return blocks_[slot].get();
}

active_set & ffn_workspace::last_active(const void * layer) { return last_active_[layer]; }

// --- rows by position ---

namespace {

// f32 kernels of a table: slow rows are unpacked and then treated as f32.
const row_kernels * f32_kernels(const kernel_table * table) { return kernel_table_find(table, GGML_TYPE_F32); }

}  // namespace

size_t row_reader::scratch_bytes() const {
    const row_kernels * k = m_.kernels ? m_.kernels : f32_kernels(kernels_);
    const size_t packed = (k->packed_x_bytes(m_.n) + 63) / 64 * 64;
    return packed + m_.n * sizeof(float) + row_tail_bytes;  // behind it: one unpacked row
}

void row_reader::pack(const float * x, void * scratch) const {
    const row_kernels * k = m_.kernels ? m_.kernels : f32_kernels(kernels_);
    k->pack_x(m_.n, x, scratch);
}

const int32_t * row_reader::stored_rows(const int32_t * ids, int64_t first, int64_t n_ids, int32_t * remapped) const {
    if (m_.row_of == nullptr) {
        return ids;
    }
    for (int64_t i = 0; i < n_ids; ++i) {
        remapped[i] = m_.row_of[ids ? ids[i] : first + i];
    }
    return remapped;
}

uint64_t row_reader::dot(const int32_t * ids, int64_t first, int64_t n_ids, const void * scratch, float * out,
                         int32_t * remapped, int64_t n_ahead) const {
    n_ahead = m_.row_of ? n_ids : std::max(n_ids, n_ahead);
    ids = stored_rows(ids, first, n_ids, remapped);
    if (m_.kernels != nullptr) {
        const uint8_t * rows = ids ? m_.rows : m_.rows + first * m_.stride_bytes;
        m_.kernels->dot_rows(m_.n, rows, m_.stride_bytes, ids, n_ids, n_ahead, scratch, out);
        return 0;
    }
    const row_kernels * k = f32_kernels(kernels_);
    const size_t packed = (k->packed_x_bytes(m_.n) + 63) / 64 * 64;
    float * row = reinterpret_cast<float *>(const_cast<uint8_t *>(static_cast<const uint8_t *>(scratch)) + packed);
    for (int64_t i = 0; i < n_ids; ++i) {
        row_to_float(m_.row_type, m_.rows + (ids ? ids[i] : first + i) * m_.stride_bytes, row, m_.n);
        k->dot_rows(m_.n, row, m_.n * sizeof(float), nullptr, 1, 1, scratch, out + i);
    }
    return n_ids;
}

uint64_t row_reader::add(const int32_t * ids, int64_t first, int64_t n_ids, const float * scale, void * scratch, float * y,
                         int32_t * remapped, int64_t n_ahead) const {
    n_ahead = m_.row_of ? n_ids : std::max(n_ids, n_ahead);
    ids = stored_rows(ids, first, n_ids, remapped);
    if (m_.kernels != nullptr) {
        const uint8_t * rows = ids ? m_.rows : m_.rows + first * m_.stride_bytes;
        m_.kernels->add_rows(m_.n, rows, m_.stride_bytes, ids, n_ids, n_ahead, scale, y);
        return 0;
    }
    const row_kernels * k = f32_kernels(kernels_);
    float * row = static_cast<float *>(scratch);
    for (int64_t i = 0; i < n_ids; ++i) {
        row_to_float(m_.row_type, m_.rows + (ids ? ids[i] : first + i) * m_.stride_bytes, row, m_.n);
        k->add_rows(m_.n, row, m_.n * sizeof(float), nullptr, 1, 1, scale + i, y);
    }
    return n_ids;
}

uint64_t row_reader::unpack(int64_t position, float * out) const { return unpack_part(position, 0, m_.n, out); }

uint64_t row_reader::unpack_part(int64_t position, int64_t first, int64_t n, float * out) const {
    const uint8_t * row = m_.rows + (m_.row_of ? m_.row_of[position] : position) * m_.stride_bytes +
                          (first > 0 ? row_size_bytes(m_.row_type, first) : 0);
    if (m_.kernels != nullptr) {
        m_.kernels->unpack_row(n, row, out);
        return 0;
    }
    row_to_float(m_.row_type, row, out, n);
    return 1;
}

// --- activations ---

namespace {

// Upstream's CPU gelu looks an F16-rounded input up in a table of F16 results; the same here, so that both agree.
struct gelu_tables {
    std::vector<float> tanh_form;
    std::vector<float> quick_form;

    gelu_tables() : tanh_form(1 << 16), quick_form(1 << 16) {
        for (int i = 0; i < 1 << 16; ++i) {
            const ggml_fp16_t half = static_cast<ggml_fp16_t>(i);
            const float v = ggml_fp16_to_fp32(half);
            const float gelu = 0.5f * v * (1.0f + std::tanh(0.79788456080286535587989211986876f * v * (1.0f + 0.044715f * v * v)));
            tanh_form[i] = ggml_fp16_to_fp32(ggml_fp32_to_fp16(gelu));
            quick_form[i] = ggml_fp16_to_fp32(ggml_fp32_to_fp16(v * (1.0f / (1.0f + std::exp(-1.702f * v)))));
        }
    }
};

const gelu_tables & tables() {
    static const gelu_tables instance;
    return instance;
}

}  // namespace

void ffn_activate(ffn_activation activation, float param, const kernel_table * kernels, int64_t n, float * v) {
    // Comparisons are written so that NaN passes through: a NaN is computed, never skipped.
    switch (activation) {
        case ffn_activation::relu:
        case ffn_activation::drelu:
            for (int64_t i = 0; i < n; ++i) {
                v[i] = v[i] <= param ? 0.0f : v[i];
            }
            break;
        case ffn_activation::relu_sqr:
            for (int64_t i = 0; i < n; ++i) {
                v[i] = v[i] <= param ? 0.0f : v[i] * v[i];
            }
            break;
        case ffn_activation::silu:
            kernels->silu(n, v);
            break;
        case ffn_activation::gelu: {
            const float * table = tables().tanh_form.data();
            for (int64_t i = 0; i < n; ++i) {
                if (v[i] <= -10.0f) {
                    v[i] = 0.0f;
                } else if (!(v[i] >= 10.0f)) {
                    v[i] = table[ggml_fp32_to_fp16(v[i])];
                }
            }
            break;
        }
        case ffn_activation::gelu_quick: {
            const float * table = tables().quick_form.data();
            for (int64_t i = 0; i < n; ++i) {
                v[i] = table[ggml_fp32_to_fp16(v[i])];
            }
            break;
        }
        case ffn_activation::gelu_erf:
            for (int64_t i = 0; i < n; ++i) {
                v[i] = 0.5f * v[i] * (1.0f + std::erf(v[i] * 0.70710678118654752440f));
            }
            break;
    }
}

int ffn_histogram_bin(float value) {
    const float magnitude = std::fabs(value);
    if (!(magnitude > 0.0f)) {
        return 0;
    }
    const float bin = std::floor(8.0f * (std::log2(magnitude) + 24.0f));
    return static_cast<int>(std::min(std::max(bin, 0.0f), static_cast<float>(ffn_n_bins - 1)));
}

}  // namespace powerinfer
