// Vector code shared by the wide sets, written once over the primitives that the including file defines before.
// Included once per file, inside its anonymous namespace: nothing here has a name that the linker could share.

// The primitives:
//   vf, vf_n                     a vector of vf_n floats
//   vf_zero, vf_set, vf_load, vf_store, vf_load_part, vf_store_part, vf_first, vf_add, vf_fma, vf_div, vf_max, vf_min,
//   vf_round, vf_scale2, vf_sum4, vf_nonzero, vf_load_f16, vf_load_bf16
//   block_scale, block_scale_of  how 32 values of x are quantized
//   matmul_n_x, matmul_v         register tiles: rows of x in matmul_nt, vectors of columns in matmul_nn_add
// For code_blocks, which a set with block decoders of its own leaves out by defining KERNEL_BODY_WITHOUT_CODE_BLOCKS:
//   store_quantized              32 values of x as int8, 16 to each of two places
//   vi, vi_bytes                 a vector of vi_bytes = 4 * vf_n bytes, or of vf_n int32
//   vi_load, vi_store, vi_zero, vi_set_bytes, vi_negative (of int32), vf_of_ints, vf_of_bytes (int8 in memory)
//   vf_mul
//   vf_set2, vf_permute          a number in the even and one in the odd lanes; lanes by their index
//   vf_add_odd                   sum + the odd lanes of a vector

const uint8_t * row_at(const void * rows, size_t stride_bytes, const int32_t * ids, int64_t i) {
    return static_cast<const uint8_t *>(rows) + size_t(ids ? ids[i] : i) * stride_bytes;
}

// Scattered rows defeat the hardware prefetcher, so each pass over R rows fetches the lines of the next R rows.
// Measured, Q4_0, 10 % of the rows, one thread: 5.2 -> 7.8 GB/s at n 2048, 7.0 -> 9.8 at n 4096. Fetching two passes
// ahead, or only into the second level, was slower.
template <int R>
struct next_rows {
    const uint8_t * row[R];
    size_t n_bytes;
    size_t i_byte = 0;

    next_rows(const void * rows, size_t stride_bytes, const int32_t * ids, int64_t i, int64_t n_ids, size_t row_bytes)
        : n_bytes(i < n_ids ? row_bytes : 0) {
        for (int r = 0; r < R; ++r) {
            row[r] = row_at(rows, stride_bytes, ids, i + r < n_ids ? i + r : n_ids - 1);
        }
    }

    // One line of each row: at most one call per 64 bytes of the rows that are computed.
    void fetch_line() {
        if (i_byte < n_bytes) {
            for (int r = 0; r < R; ++r) {
                __builtin_prefetch(row[r] + i_byte, 0, 3);
            }
            i_byte += 64;
        }
    }

    void fetch_rest() {
        while (i_byte < n_bytes) {
            fetch_line();
        }
    }
};

// Runs pass<R>(i) over all ids, R rows at a time, the remainder in passes of fewer rows.
template <int R, class Pass>
void for_rows(int64_t i, int64_t n_ids, const Pass & pass) {
    for (; i + R <= n_ids; i += R) {
        pass.template run<R>(i);
    }
    if constexpr (R > 1) {
        for_rows<R / 2>(i, n_ids, pass);
    }
}

// The arguments that dot_rows and add_rows share.
struct row_list {
    int64_t n;
    size_t row_bytes;
    const void * rows;
    size_t stride_bytes;
    const int32_t * ids;
    int64_t n_ids;
    int64_t n_ahead;

    const uint8_t * at(int64_t i) const { return row_at(rows, stride_bytes, ids, i); }

    template <int R>
    next_rows<R> next(int64_t i) const {
        return next_rows<R>(rows, stride_bytes, ids, i + R, n_ahead, row_bytes);
    }
};

// out: (R) sums of R vectors. A sum has the same bits whatever R is.
template <int R>
void store_sums(const vf * sum, float * out) {
    for (int r = 0; r < R; r += 4) {
        const auto at = [&](int k) { return sum[r + k < R ? r + k : R - 1]; };
        float total[4];
        vf_sum4(at(0), at(1), at(2), at(3), total);
        for (int k = 0; k < 4 && r + k < R; ++k) {
            out[r + k] = total[k];
        }
    }
}

// Rows of plain values: x stays f32, padded with zeros to whole pairs of vectors.

struct values_f32 {
    static constexpr int row_type = row_type_f32;
    static constexpr size_t value_bytes = 4;
    static vf load(const uint8_t * p) { return vf_load(reinterpret_cast<const float *>(p)); }
};

struct values_f16 {
    static constexpr int row_type = row_type_f16;
    static constexpr size_t value_bytes = 2;
    static vf load(const uint8_t * p) { return vf_load_f16(p); }
};

struct values_bf16 {
    static constexpr int row_type = row_type_bf16;
    static constexpr size_t value_bytes = 2;
    static vf load(const uint8_t * p) { return vf_load_bf16(p); }
};

size_t packed_x_bytes_values(int64_t n) {
    return size_t((n + 2 * vf_n - 1) / (2 * vf_n) * (2 * vf_n)) * sizeof(float);
}

void pack_x_values(int64_t n, const float * x, void * packed) {
    float * out = static_cast<float *>(packed);
    int64_t j = 0;
    for (; j + vf_n <= n; j += vf_n) {
        vf_store(out + j, vf_load(x + j));
    }
    const int64_t n_packed = int64_t(packed_x_bytes_values(n) / sizeof(float));
    for (; j < n_packed; j += vf_n) {
        vf_store(out + j, vf_load_part(x + j, n - j));
    }
}

template <class T>
struct dot_values : row_list {
    const float * x;
    float * out;

    template <int R>
    void run(int64_t i) const {
        const uint8_t * w[R];
        vf sum0[R], sum1[R];
        for (int r = 0; r < R; ++r) {
            w[r] = at(i + r);
            sum0[r] = sum1[r] = vf_zero();
        }
        next_rows<R> ahead = next<R>(i);
        int64_t j = 0;
        for (; j + 2 * vf_n <= n; j += 2 * vf_n) {
            for (size_t b = 0; b < 2 * vf_n * T::value_bytes; b += 64) {
                ahead.fetch_line();
            }
            const vf x0 = vf_load(x + j);
            const vf x1 = vf_load(x + j + vf_n);
            for (int r = 0; r < R; ++r) {
                sum0[r] = vf_fma(T::load(w[r] + j * T::value_bytes), x0, sum0[r]);
                sum1[r] = vf_fma(T::load(w[r] + (j + vf_n) * T::value_bytes), x1, sum1[r]);
            }
        }
        ahead.fetch_rest();
        if (j < n) {  // what lies behind the row may be NaN, so it is cut off, not multiplied by zero
            const vf x0 = vf_load(x + j);
            const vf x1 = vf_load(x + j + vf_n);
            for (int r = 0; r < R; ++r) {
                const vf w0 = vf_first(T::load(w[r] + j * T::value_bytes), n - j);
                const vf w1 = vf_first(T::load(w[r] + (j + vf_n) * T::value_bytes), n - j - vf_n);
                sum0[r] = vf_fma(w0, x0, sum0[r]);
                sum1[r] = vf_fma(w1, x1, sum1[r]);
            }
        }
        for (int r = 0; r < R; ++r) {
            sum0[r] = vf_add(sum0[r], sum1[r]);
        }
        store_sums<R>(sum0, out + i);
    }
};

template <class T>
void dot_rows_values(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids, int64_t n_ahead,
                     const void * packed_x, float * out) {
    const float * x = static_cast<const float *>(packed_x);
    for_rows<4>(0, n_ids, dot_values<T>{{n, n * T::value_bytes, rows, stride_bytes, ids, n_ids, n_ahead}, x, out});
}

template <class T>
struct add_values : row_list {
    const float * scale;
    float * y;

    template <int R>
    void run(int64_t i) const {
        const uint8_t * w[R];
        vf s[R];
        for (int r = 0; r < R; ++r) {
            w[r] = at(i + r);
            s[r] = vf_set(scale[i + r]);
        }
        next_rows<R> ahead = next<R>(i);
        int64_t j = 0;
        for (; j + 2 * vf_n <= n; j += 2 * vf_n) {
            for (size_t b = 0; b < 2 * vf_n * T::value_bytes; b += 64) {
                ahead.fetch_line();
            }
            vf y0 = vf_load(y + j);
            vf y1 = vf_load(y + j + vf_n);
            for (int r = 0; r < R; ++r) {
                y0 = vf_fma(s[r], T::load(w[r] + j * T::value_bytes), y0);
                y1 = vf_fma(s[r], T::load(w[r] + (j + vf_n) * T::value_bytes), y1);
            }
            vf_store(y + j, y0);
            vf_store(y + j + vf_n, y1);
        }
        ahead.fetch_rest();
        for (; j < n; j += vf_n) {
            vf y0 = vf_load_part(y + j, n - j);
            for (int r = 0; r < R; ++r) {
                y0 = vf_fma(s[r], T::load(w[r] + j * T::value_bytes), y0);
            }
            vf_store_part(y + j, y0, n - j);
        }
    }
};

template <class T>
void add_rows_values(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids, int64_t n_ahead,
                     const float * scale, float * y) {
    for_rows<4>(0, n_ids, add_values<T>{{n, n * T::value_bytes, rows, stride_bytes, ids, n_ids, n_ahead}, scale, y});
}

template <class T>
void unpack_row_values(int64_t n, const void * row, float * out) {
    const uint8_t * w = static_cast<const uint8_t *>(row);
    int64_t j = 0;
    for (; j + vf_n <= n; j += vf_n) {
        vf_store(out + j, T::load(w + j * T::value_bytes));
    }
    if (j < n) {
        vf_store_part(out + j, T::load(w + j * T::value_bytes), n - j);
    }
}

// Rows of blocks. B is the type's decoder: x_group, packed form of B::group_blocks blocks of x; dot and add of one group.

template <class B>
size_t row_bytes_blocks(int64_t n) {
    return size_t(n / B::block_n) * sizeof(typename B::block);
}

template <class B>
size_t packed_x_bytes_blocks(int64_t n) {
    const int64_t n_blocks = n / block_values;
    return size_t((n_blocks + B::group_blocks - 1) / B::group_blocks) * sizeof(typename B::x_group);
}

template <class B>
void pack_x_blocks(int64_t n, const float * x, void * packed) {
    typename B::x_group * group = static_cast<typename B::x_group *>(packed);
    for (int64_t n_left = n / block_values; n_left > 0; n_left -= B::group_blocks, ++group) {
        for (int k = 0; k < B::group_blocks; ++k, x += block_values) {
            if (k < n_left) {
                const block_scale s = block_scale_of(x);
                B::pack_block(*group, k, x, s);
            } else {
                B::pack_zero(*group, k);
            }
        }
        B::pack_sums(*group);
    }
}

template <class B>
struct dot_blocks : row_list {
    const typename B::x_group * x;
    float * out;

    template <int R>
    void run(int64_t i) const {
        const uint8_t * w[R];
        vf sum[R];
        for (int r = 0; r < R; ++r) {
            w[r] = at(i + r);
            sum[r] = vf_zero();
        }
        next_rows<R> ahead = next<R>(i);
        const typename B::x_group * group = x;
        int64_t n_left = n / block_values;
        for (; n_left >= B::group_blocks; n_left -= B::group_blocks, ++group) {
            for (size_t b = 0; b + 64 <= B::group_bytes; b += 64) {
                ahead.fetch_line();
            }
            for (int r = 0; r < R; ++r) {
                sum[r] = B::template dot<false>(w[r], *group, sum[r], B::group_blocks);
                w[r] += B::group_bytes;
            }
        }
        ahead.fetch_rest();
        if (n_left > 0) {
            for (int r = 0; r < R; ++r) {
                sum[r] = B::template dot<true>(w[r], *group, sum[r], n_left);
            }
        }
        store_sums<R>(sum, out + i);
    }
};

template <class B>
void dot_rows_blocks(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids, int64_t n_ahead,
                     const void * packed_x, float * out) {
    const auto * x = static_cast<const typename B::x_group *>(packed_x);
    for_rows<4>(0, n_ids, dot_blocks<B>{{n, row_bytes_blocks<B>(n), rows, stride_bytes, ids, n_ids, n_ahead}, x, out});
}

// fresh: y isn't read, as if it held -0, the one number that leaves even the sign of a zero alone.
template <bool fresh>
vf load_y(const float * y) {
    return fresh ? vf_set(-0.0f) : vf_load(y);
}

template <class B, bool fresh>
struct add_blocks : row_list {
    const float * scale;
    float * y;

    template <int R>
    void run(int64_t i) const {
        const uint8_t * w[R];
        for (int r = 0; r < R; ++r) {
            w[r] = at(i + r);
        }
        next_rows<R> ahead = next<R>(i);
        const typename B::template row_scales<R> scales(scale + i);
        float * y_group = y;
        int64_t n_left = n / block_values;
        for (; n_left >= B::group_blocks; n_left -= B::group_blocks, y_group += B::group_blocks * block_values) {
            for (size_t b = 0; b + 64 <= B::group_bytes; b += 64) {
                ahead.fetch_line();
            }
            const auto c = scales.of_group(w);
#pragma GCC unroll 8  // where a block lies is then constant: Q4_K and Q5_K 1.1 times as fast
            for (int k = 0; k < B::group_blocks; ++k) {
                B::template add<R, fresh>(w, k, c, y_group);
            }
            for (int r = 0; r < R; ++r) {
                w[r] += B::group_bytes;
            }
        }
        ahead.fetch_rest();
        if (n_left > 0) {
            const auto c = scales.of_group(w);
            for (int k = 0; k < n_left; ++k) {
                B::template add<R, fresh>(w, k, c, y_group);
            }
        }
    }
};

template <class B>
void add_rows_blocks(int64_t n, const void * rows, size_t stride_bytes, const int32_t * ids, int64_t n_ids, int64_t n_ahead,
                     const float * scale, float * y) {
    for_rows<4>(0, n_ids, add_blocks<B, false>{{n, row_bytes_blocks<B>(n), rows, stride_bytes, ids, n_ids, n_ahead}, scale, y});
}

template <class B>
void unpack_row_blocks(int64_t n, const void * row, float * out) {
    const float one = 1.0f;
    add_blocks<B, true>{{n, 0, row, 0, nullptr, 1, 1}, &one, out}.template run<1>(0);
}

#ifndef KERNEL_BODY_WITHOUT_CODE_BLOCKS

// Block types by their codes: value = c * (code - offset) + minimum_sign * m. A decoder D has
//   block, block_n               ggml's block and its number of values
//   group_blocks, group_bytes    what is decoded at once: blocks of 32 values, bytes of the row
//   part_chunks                  a part is what shares one c and m: 1 or 2 chunks of 16 values
//   has_minimum, minimum_sign, offset
//   codes<is_signed>(w, q)       the codes of a group: 16 * 2 * group_blocks bytes, minus offset where is_signed
//   chunk(i)                     which chunk the 16 codes from 16 * i on are
//   panel_vectors                vectors of codes per panel; what one lane of them holds is of one part
//   coefs(w), part_coefs         c of part p in lane part_coefs * p and its m in the next; with minima, zeros in what is left
//   dot(sum, q, x)               sum + the products of 4 neighbouring codes and int8

struct coef_lanes {
    vf v[16 / vf_n];
};

template <class D>
struct code_layout {
    static constexpr int n_chunks = 2 * D::group_blocks;
    static constexpr int n_vectors = n_chunks * 16 / vi_bytes;
    static constexpr int n_panels = n_vectors / D::panel_vectors;
    static constexpr int block_coefs = D::part_coefs * 2 / D::part_chunks;  // lanes per 32 values

    int place[n_chunks];        // inverse of D::chunk
    int lane[n_panels * vf_n];  // for each lane of the panels, the lane of coef_lanes with its c
    alignas(64) int32_t spread[n_panels][vf_n];  // the same within coef_lanes::v[vector[panel]]
    int vector[n_panels];

    static constexpr int lane_of_chunk(int chunk) { return D::part_coefs * (chunk / D::part_chunks); }

    constexpr code_layout() : place(), lane(), spread(), vector() {
        for (int i = 0; i < n_chunks; ++i) {
            place[D::chunk(i)] = i;
        }
        for (int l = 0; l < n_panels * vf_n; ++l) {
            lane[l] = lane_of_chunk(D::chunk((l / vf_n * D::panel_vectors * vi_bytes + l % vf_n * 4) / 16));
            spread[l / vf_n][l % vf_n] = lane[l] % vf_n;
            vector[l / vf_n] = lane[l] / vf_n;
        }
    }
};

template <class D>
constexpr code_layout<D> layout_of{};

template <class D>
struct code_blocks {
    static constexpr int row_type = D::row_type;
    using block = typename D::block;
    static constexpr int64_t block_n = D::block_n;
    static constexpr int group_blocks = D::group_blocks;
    static constexpr size_t group_bytes = D::group_bytes;
    using layout = code_layout<D>;

    struct x_group {
        int8_t q[layout::n_vectors * vi_bytes];   // in the order of the codes
        int32_t offset[layout::n_panels * vf_n];  // -offset * sum of the lane's q (with minima, which have no offset: -sum)
        float coef[16];                           // beside c: d of the block; beside m: minimum_sign * d * sum of the block's q
    };

    static void set_coefs(x_group & g, int k, float d) {
        for (int i = 0; i < layout::block_coefs; ++i) {
            g.coef[layout::block_coefs * k + i] = d;
        }
    }
    static void pack_block(x_group & g, int k, const float * x, block_scale s) {
        store_quantized(x, s.inverse, g.q + 16 * layout_of<D>.place[2 * k], g.q + 16 * layout_of<D>.place[2 * k + 1]);
        set_coefs(g, k, s.d);
    }
    static void pack_zero(x_group & g, int k) {
        __builtin_memset(g.q + 16 * layout_of<D>.place[2 * k], 0, 16);
        __builtin_memset(g.q + 16 * layout_of<D>.place[2 * k + 1], 0, 16);
        set_coefs(g, k, 0.0f);
    }
    static void pack_sums(x_group & g) {
        for (int i = layout::block_coefs * group_blocks; i < 16; ++i) {
            g.coef[i] = 0.0f;
        }
        for (int p = 0; p < layout::n_panels; ++p) {
            vi sum = vi_zero();
            for (int v = p * D::panel_vectors; v < (p + 1) * D::panel_vectors; ++v) {
                sum = D::dot(sum, vi_set_bytes(D::has_minimum ? 1 : D::offset), g.q + v * vi_bytes);
            }
            vi_store(g.offset + p * vf_n, vi_negative(sum));
        }
        if (D::has_minimum) {
            int32_t sums[16] = {};
            for (int l = 0; l < layout::n_panels * vf_n; ++l) {
                sums[layout_of<D>.lane[l]] -= g.offset[l];
            }
            for (int i = 0; i < 16; i += 2) {
                g.coef[i + 1] = g.coef[i] * float(D::minimum_sign * sums[i]);
            }
        }
    }

    template <bool part>
    static vf dot(const uint8_t * w, const x_group & x, vf sum, int64_t n_left) {
        coef_lanes c = D::coefs(w);
        for (int i = 0; i < 16 / vf_n; ++i) {
            if (part) {  // what lies behind the row may be NaN
                c.v[i] = vf_first(c.v[i], n_left * layout::block_coefs - i * vf_n);
            }
            c.v[i] = vf_mul(c.v[i], vf_load(x.coef + i * vf_n));
        }
        vi q[layout::n_vectors];
        D::template codes<false>(w, q);
        for (int p = 0; p < layout::n_panels; ++p) {
            vi i = D::offset ? vi_load(x.offset + p * vf_n) : vi_zero();
            for (int v = p * D::panel_vectors; v < (p + 1) * D::panel_vectors; ++v) {
                i = D::dot(i, q[v], x.q + v * vi_bytes);
            }
            const vf d = vf_permute(c.v[layout_of<D>.vector[p]], layout_of<D>.spread[p]);
            sum = vf_fma(d, vf_of_ints(i), sum);
        }
        for (int i = 0; D::has_minimum && i < 16 / vf_n; ++i) {
            sum = vf_add_odd(sum, c.v[i]);
        }
        return sum;
    }

    // A group of R rows is decoded into memory: converting and broadcasting from there needs no shuffle. After each part is
    // filled, an empty asm keeps the compiler from taking it out of registers again.
    template <int R>
    struct group_coefs {
        alignas(64) float c[R][16];  // scale * c
        alignas(64) float m[16];     // odd lanes: minima, summed over the rows
    };

    template <int R>
    struct group : group_coefs<R> {
        alignas(64) int8_t code[R][layout::n_vectors * vi_bytes];  // signed
    };

    template <int R>
    struct row_scales {
        vf scale[R];
        explicit row_scales(const float * s) {
            for (int r = 0; r < R; ++r) {
                scale[r] = D::has_minimum ? vf_set2(s[r], float(D::minimum_sign) * s[r]) : vf_set(s[r]);
            }
        }
        void coefs_of_group(const uint8_t * const * w, group_coefs<R> & g) const {
            for (int i = 0; i < 16 / vf_n; ++i) {
                vf m = vf_set(-0.0f);  // keeps the sign of a zero
                for (int r = 0; r < R; ++r) {
                    const vf c = vf_mul(scale[r], D::coefs(w[r]).v[i]);
                    vf_store(g.c[r] + i * vf_n, c);
                    m = vf_add(m, c);
                }
                if (D::has_minimum) {
                    vf_store(g.m + i * vf_n, m);
                }
            }
            __asm__("" : "+m"(g));
        }
        group<R> of_group(const uint8_t * const * w) const {
            group<R> g;
            for (int r = 0; r < R; ++r) {
                vi q[layout::n_vectors];
                D::template codes<true>(w[r], q);
                for (int v = 0; v < layout::n_vectors; ++v) {
                    vi_store(g.code[r] + v * vi_bytes, q[v]);
                }
            }
            __asm__("" : "+m"(g.code));
            coefs_of_group(w, g);
            return g;
        }
    };

    template <int R, bool fresh>
    static vf load_y_and_minimum(const group_coefs<R> & g, int chunk, const float * y) {
        return D::has_minimum ? vf_add(load_y<fresh>(y), vf_set(g.m[layout::lane_of_chunk(chunk) + 1])) : load_y<fresh>(y);
    }

    template <int R, bool fresh>
    static void add(const uint8_t * const *, int k, const group<R> & g, float * y) {
        vf sum[32 / vf_n];
        for (int i = 0; i < 32; i += vf_n) {
            sum[i / vf_n] = load_y_and_minimum<R, fresh>(g, 2 * k + i / 16, y + 32 * k + i);
        }
        for (int r = 0; r < R; ++r) {
            for (int i = 0; i < 32; i += vf_n) {
                const int8_t * code = g.code[r] + 16 * layout_of<D>.place[2 * k + i / 16] + i % 16;
                const vf c = vf_set(g.c[r][layout::lane_of_chunk(2 * k + i / 16)]);
                sum[i / vf_n] = vf_fma(c, vf_of_bytes(code), sum[i / vf_n]);
            }
        }
        for (int i = 0; i < 32; i += vf_n) {
            vf_store(y + 32 * k + i, sum[i / vf_n]);
        }
    }
};

#endif

// matmul_nt: tiles of 4 rows of w and X rows of x in registers, over slices of n that stay in the first-level cache.

constexpr int64_t matmul_slice = 1024;  // values; 4 + 6 rows of it are 40 KiB

template <int X>
void matmul_nt_tile(int64_t n, const float * const * w, const float * x, int64_t ld_x, bool first, int n_w, float * out,
                    int64_t ld_out) {
    vf sum[X][4];
    for (int t = 0; t < X; ++t) {
        for (int k = 0; k < 4; ++k) {
            sum[t][k] = vf_zero();
        }
    }
    int64_t j = 0;
    for (; j + vf_n <= n; j += vf_n) {
        vf wk[4];
        for (int k = 0; k < 4; ++k) {
            wk[k] = vf_load(w[k] + j);
        }
        for (int t = 0; t < X; ++t) {
            const vf xt = vf_load(x + t * ld_x + j);
            for (int k = 0; k < 4; ++k) {
                sum[t][k] = vf_fma(wk[k], xt, sum[t][k]);
            }
        }
    }
    if (j < n) {
        for (int t = 0; t < X; ++t) {
            const vf xt = vf_load_part(x + t * ld_x + j, n - j);
            for (int k = 0; k < 4; ++k) {
                sum[t][k] = vf_fma(vf_load_part(w[k] + j, n - j), xt, sum[t][k]);
            }
        }
    }
    for (int t = 0; t < X; ++t) {
        float total[4];
        vf_sum4(sum[t][0], sum[t][1], sum[t][2], sum[t][3], total);
        for (int k = 0; k < n_w; ++k) {
            out[t * ld_out + k] = first ? total[k] : out[t * ld_out + k] + total[k];
        }
    }
}

// X rows of x against all rows of w, one slice of n; fewer rows of x at the end.
template <int X>
void matmul_nt_slice(int64_t n_x, int64_t n_w, int64_t n, const float * x, int64_t ld_x, const float * w, int64_t ld_w,
                     bool first, float * out, int64_t ld_out) {
    int64_t t = 0;
    for (; t + X <= n_x; t += X) {
        for (int64_t i = 0; i < n_w; i += 4) {
            const float * rows[4];
            for (int k = 0; k < 4; ++k) {
                rows[k] = w + (i + k < n_w ? i + k : n_w - 1) * ld_w;
            }
            matmul_nt_tile<X>(n, rows, x + t * ld_x, ld_x, first, int(n_w - i < 4 ? n_w - i : 4), out + t * ld_out + i, ld_out);
        }
    }
    if constexpr (X > 1) {
        if (t < n_x) {
            matmul_nt_slice<X - 1>(n_x - t, n_w, n, x + t * ld_x, ld_x, w, ld_w, first, out + t * ld_out, ld_out);
        }
    }
}

void matmul_nt(int64_t n_x, int64_t n_w, int64_t n, const float * x, int64_t ld_x, const float * w, int64_t ld_w,
               float * out, int64_t ld_out) {
    for (int64_t j = 0; j < n; j += matmul_slice) {
        const int64_t n_slice = n - j < matmul_slice ? n - j : matmul_slice;
        matmul_nt_slice<matmul_n_x>(n_x, n_w, n_slice, x + j, ld_x, w + j, ld_w, j == 0, out, ld_out);
    }
}

// matmul_nn_add: tiles of matmul_rows rows of w and V vectors of columns. Per token the bits of its non-zero coefficients
// are walked, so a token costs what it uses. Each sum is taken in the order of the rows and never depends on other tokens.

constexpr int64_t matmul_rows = 64;  // one bit each; with 8 vectors of columns a tile is 32 KiB

uint64_t nonzero_bits(int64_t n, const float * a) {
    uint64_t bits = 0;
    for (int64_t i = 0; i < n; i += vf_n) {
        bits |= uint64_t(vf_nonzero(n - i < vf_n ? vf_load_part(a + i, n - i) : vf_load(a + i))) << i;
    }
    return bits;
}

template <int V>
void load_tile(const float * y, vf * sum) {
    for (int v = 0; v < V; ++v) {
        sum[v] = vf_load(y + v * vf_n);
    }
}

template <int V>
void store_tile(float * y, const vf * sum) {
    for (int v = 0; v < V; ++v) {
        vf_store(y + v * vf_n, sum[v]);
    }
}

template <int V>
void matmul_nn_add_one(uint64_t bits, const float * a, const float * tile, float * y) {
    vf sum[V];
    load_tile<V>(y, sum);
    for (; bits; bits &= bits - 1) {
        const int i = __builtin_ctzll(bits);
        const vf ai = vf_set(a[i]);
        for (int v = 0; v < V; ++v) {
            sum[v] = vf_fma(ai, vf_load(tile + (i * V + v) * vf_n), sum[v]);
        }
    }
    store_tile<V>(y, sum);
}

// Two tokens share the loads of w: pays when most of their coefficients are non-zero.
template <int V>
void matmul_nn_add_two(uint64_t bits0, uint64_t bits1, const float * a0, const float * a1, const float * tile, float * y0,
                       float * y1) {
    vf sum0[V], sum1[V];
    load_tile<V>(y0, sum0);
    load_tile<V>(y1, sum1);
    for (uint64_t left = bits0 | bits1; left; left &= left - 1) {
        const int i = __builtin_ctzll(left);
        const float * w = tile + i * V * vf_n;
        if ((bits0 & bits1) >> i & 1) {
            const vf a0i = vf_set(a0[i]);
            const vf a1i = vf_set(a1[i]);
            for (int v = 0; v < V; ++v) {
                const vf wv = vf_load(w + v * vf_n);
                sum0[v] = vf_fma(a0i, wv, sum0[v]);
                sum1[v] = vf_fma(a1i, wv, sum1[v]);
            }
        } else if (bits0 >> i & 1) {
            for (int v = 0; v < V; ++v) {
                sum0[v] = vf_fma(vf_set(a0[i]), vf_load(w + v * vf_n), sum0[v]);
            }
        } else {
            for (int v = 0; v < V; ++v) {
                sum1[v] = vf_fma(vf_set(a1[i]), vf_load(w + v * vf_n), sum1[v]);
            }
        }
    }
    store_tile<V>(y0, sum0);
    store_tile<V>(y1, sum1);
}

// All tokens against n_w <= matmul_rows rows, columns from j on, V vectors of columns at a time, then fewer.
template <int V>
void matmul_nn_add_columns(int64_t n_x, int64_t n_w, int64_t j, int64_t n, const float * a, int64_t ld_a, const float * w,
                           int64_t ld_w, float * y, int64_t ld_y) {
    for (; j + V * vf_n <= n; j += V * vf_n) {
        // A copy of the tile: rows a power of two apart would share a few sets of the first-level cache.
        alignas(64) float tile[matmul_rows * V * vf_n];
        for (int64_t i = 0; i < n_w; ++i) {
            vf row[V];
            load_tile<V>(w + i * ld_w + j, row);
            store_tile<V>(tile + i * V * vf_n, row);
        }
        for (int64_t t = 0; t < n_x; ++t) {
            const float * a0 = a + t * ld_a;
            const uint64_t bits0 = nonzero_bits(n_w, a0);
            const uint64_t bits1 = t + 1 < n_x ? nonzero_bits(n_w, a0 + ld_a) : 0;
            if (2 * __builtin_popcountll(bits0 & bits1) > __builtin_popcountll(bits0 | bits1)) {
                matmul_nn_add_two<V>(bits0, bits1, a0, a0 + ld_a, tile, y + t * ld_y + j, y + (t + 1) * ld_y + j);
                ++t;
            } else if (bits0) {
                matmul_nn_add_one<V>(bits0, a0, tile, y + t * ld_y + j);
            }
        }
    }
    if constexpr (V > 1) {
        matmul_nn_add_columns<V / 2>(n_x, n_w, j, n, a, ld_a, w, ld_w, y, ld_y);
    } else if (j < n) {
        for (int64_t t = 0; t < n_x; ++t) {
            const float * at = a + t * ld_a;
            vf sum = vf_load_part(y + t * ld_y + j, n - j);
            for (uint64_t bits = nonzero_bits(n_w, at); bits; bits &= bits - 1) {
                const int i = __builtin_ctzll(bits);
                sum = vf_fma(vf_set(at[i]), vf_load_part(w + i * ld_w + j, n - j), sum);
            }
            vf_store_part(y + t * ld_y + j, sum, n - j);
        }
    }
}

void matmul_nn_add(int64_t n_x, int64_t n_w, int64_t n, const float * a, int64_t ld_a, const float * w, int64_t ld_w,
                   float * y, int64_t ld_y) {
    for (int64_t i = 0; i < n_w; i += matmul_rows) {
        const int64_t n_rows = n_w - i < matmul_rows ? n_w - i : matmul_rows;
        matmul_nn_add_columns<matmul_v>(n_x, n_rows, 0, n, a + i, ld_a, w + i * ld_w, ld_w, y, ld_y);
    }
}

void add(int64_t n, const float * x, float * y) {
    int64_t j = 0;
    for (; j + vf_n <= n; j += vf_n) {
        vf_store(y + j, vf_add(vf_load(y + j), vf_load(x + j)));
    }
    if (j < n) {
        vf_store_part(y + j, vf_add(vf_load_part(y + j, n - j), vf_load_part(x + j, n - j)), n - j);
    }
}

// exp(x) for x in [-104, 104], infinite or zero past the float range; relative error below 2e-7 inside it.
vf vf_exp(vf x) {
    const vf n = vf_round(vf_fma(x, vf_set(1.44269504f), vf_zero()));
    // ln 2 in two parts: n times the first is exact.
    const vf r = vf_fma(n, vf_set(1.42860677e-6f), vf_fma(n, vf_set(-0.693148613f), x));
    // Taylor series of degree 7 on |r| <= ln 2 / 2: the first term left out is below 6e-9.
    vf p = vf_set(1.0f / 5040);
    p = vf_fma(p, r, vf_set(1.0f / 720));
    p = vf_fma(p, r, vf_set(1.0f / 120));
    p = vf_fma(p, r, vf_set(1.0f / 24));
    p = vf_fma(p, r, vf_set(1.0f / 6));
    p = vf_fma(p, r, vf_set(0.5f));
    p = vf_fma(p, r, vf_set(1.0f));
    p = vf_fma(p, r, vf_set(1.0f));
    return vf_scale2(p, n);
}

// vf_max and vf_min return their second argument when either is NaN, so NaN passes the clamps.
vf vf_silu(vf v) {
    const vf x = vf_max(vf_set(-104.0f), v);
    const vf e = vf_exp(vf_min(vf_set(104.0f), vf_max(vf_set(-104.0f), vf_fma(x, vf_set(-1.0f), vf_zero()))));
    return vf_div(x, vf_add(vf_set(1.0f), e));
}

void silu(int64_t n, float * v) {
    int64_t j = 0;
    for (; j + vf_n <= n; j += vf_n) {
        vf_store(v + j, vf_silu(vf_load(v + j)));
    }
    if (j < n) {
        vf_store_part(v + j, vf_silu(vf_load_part(v + j, n - j)), n - j);
    }
}

template <class T>
constexpr row_kernels kernels_values = {T::row_type,        packed_x_bytes_values, pack_x_values,
                                        dot_rows_values<T>, add_rows_values<T>,    unpack_row_values<T>};

template <class B>
constexpr row_kernels kernels_blocks = {B::row_type,        packed_x_bytes_blocks<B>, pack_x_blocks<B>,
                                        dot_rows_blocks<B>, add_rows_blocks<B>,       unpack_row_blocks<B>};
