// The kernels of cuda-kernels.cuh. A thread block has 8 warps; a warp takes one row at a time, its lanes the row's chunks.
// Integer sums are the scalar set's; float sums differ by order only.
#include "cuda-kernels.cuh"

#ifndef POWERINFER_CUDA_SHIM
#include <cuda_fp16.h>
#define CUDA_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define CUDA_SHARED(type, name)                              \
    extern __shared__ __align__(16) unsigned char shared_[]; \
    type & name = *reinterpret_cast<type *>(shared_)
#endif

namespace powerinfer {

namespace {

constexpr int n_threads = 256;
constexpr int n_warps = n_threads / 32;
constexpr unsigned all_lanes = 0xffffffffu;

__device__ float half_bits_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

__device__ float warp_sum(float v) {
    for (int step = 16; step > 0; step /= 2) {
        v += __shfl_xor_sync(all_lanes, v, step);
    }
    return v;
}

// Blocks of 18 and 34 bytes lie at even addresses only.
__device__ int load_int_at_2(const uint8_t * p) {
    const uint16_t * half = reinterpret_cast<const uint16_t *>(p);
    return static_cast<int>(__ldg(half) | static_cast<uint32_t>(__ldg(half + 1)) << 16);
}

__device__ float signed_byte(int packed, int i) { return static_cast<float>(static_cast<int8_t>(packed >> 8 * i & 0xff)); }
__device__ float byte(int packed, int i) { return static_cast<float>(packed >> 8 * i & 0xff); }

// One type each. dot: a chunk of n_dot values with the input. add: sums[k] += scale * value k of a chunk of n_add.

struct f32_rows {
    static constexpr int n_dot = 8;
    static constexpr int n_add = 8;
    static __device__ void load(const uint8_t * row, int chunk, float * v) {
        const float4 * p = reinterpret_cast<const float4 *>(row) + 2 * chunk;
        const float4 a = __ldg(p);
        const float4 b = __ldg(p + 1);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
};

// Two 16-bit values per word.
template <float (*to_float)(uint16_t)>
struct half_rows {
    static constexpr int n_dot = 8;
    static constexpr int n_add = 8;
    static __device__ void load(const uint8_t * row, int chunk, float * v) {
        const uint4 p = __ldg(reinterpret_cast<const uint4 *>(row) + chunk);
        const uint32_t words[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[2 * i] = to_float(static_cast<uint16_t>(words[i] & 0xffff));
            v[2 * i + 1] = to_float(static_cast<uint16_t>(words[i] >> 16));
        }
    }
};

struct f16_rows : half_rows<half_bits_to_float> {};

__device__ float bf16_bits_to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
struct bf16_rows : half_rows<bf16_bits_to_float> {};

template <class T>
__device__ float dot_chunk_values(const uint8_t * row, int chunk, const float * x) {
    float v[T::n_dot];
    T::load(row, chunk, v);
    const float4 a = *(reinterpret_cast<const float4 *>(x) + 2 * chunk);
    const float4 b = *(reinterpret_cast<const float4 *>(x) + 2 * chunk + 1);
    return v[0] * a.x + v[1] * a.y + v[2] * a.z + v[3] * a.w + v[4] * b.x + v[5] * b.y + v[6] * b.z + v[7] * b.w;
}

template <class T>
__device__ void add_chunk_values(const uint8_t * row, int chunk, float scale, float * sums) {
    float v[T::n_add];
    T::load(row, chunk, v);
#pragma unroll
    for (int k = 0; k < T::n_add; ++k) {
        sums[k] += scale * v[k];
    }
}

// The 32 int8 values of a block of the input, as 8 words.
__device__ void load_q(const cuda_block_x * x, int * q) {
    const int2 * p = reinterpret_cast<const int2 *>(x->q);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int2 pair = p[i];
        q[2 * i] = pair.x;
        q[2 * i + 1] = pair.y;
    }
}

struct q8_0_rows {
    static constexpr int n_dot = 32;
    static constexpr int n_add = 16;
    static __device__ float dot(const uint8_t * row, int chunk, const cuda_block_x * x) {
        const uint8_t * block = row + chunk * sizeof(block_q8_0);
        int q[8];
        load_q(x + chunk, q);
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum = __dp4a(load_int_at_2(block + 2 + 4 * i), q[i], sum);
        }
        return half_bits_to_float(__ldg(reinterpret_cast<const uint16_t *>(block))) * (x[chunk].d * static_cast<float>(sum));
    }
    static __device__ void add(const uint8_t * row, int chunk, float scale, float * sums) {
        const uint8_t * block = row + chunk / 2 * sizeof(block_q8_0);
        const float d = scale * half_bits_to_float(__ldg(reinterpret_cast<const uint16_t *>(block)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int q = load_int_at_2(block + 2 + 16 * (chunk % 2) + 4 * i);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                sums[4 * i + k] += d * signed_byte(q, k);
            }
        }
    }
};

struct q4_0_rows {
    static constexpr int n_dot = 32;
    static constexpr int n_add = 16;
    static __device__ float dot(const uint8_t * row, int chunk, const cuda_block_x * x) {
        const uint8_t * block = row + chunk * sizeof(block_q4_0);
        int q[8];
        load_q(x + chunk, q);
        int sum = -8 * x[chunk].sum;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int both = load_int_at_2(block + 2 + 4 * i);
            sum = __dp4a(both & 0x0f0f0f0f, q[i], sum);
            sum = __dp4a(both >> 4 & 0x0f0f0f0f, q[4 + i], sum);
        }
        return half_bits_to_float(__ldg(reinterpret_cast<const uint16_t *>(block))) * (x[chunk].d * static_cast<float>(sum));
    }
    static __device__ void add(const uint8_t * row, int chunk, float scale, float * sums) {
        const uint8_t * block = row + chunk / 2 * sizeof(block_q4_0);
        const float d = scale * half_bits_to_float(__ldg(reinterpret_cast<const uint16_t *>(block)));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int q = load_int_at_2(block + 2 + 4 * i) >> 4 * (chunk % 2) & 0x0f0f0f0f;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                sums[4 * i + k] += d * (byte(q, k) - 8.0f);
            }
        }
    }
};

struct q4_k_rows {
    static constexpr int n_dot = 32;
    static constexpr int n_add = 16;

    // Scale and minimum of part p of a block.
    static __device__ void load_scales(const block_q4_k * block, int p, float & scale, float & minimum) {
        const float d = half_bits_to_float(__ldg(&block->d));
        const float m = half_bits_to_float(__ldg(&block->m));
        const int lo = __ldg(block->scales + p % 4);
        const int hi = __ldg(block->scales + 4 + p % 4);
        const int both = __ldg(block->scales + 8 + p % 4);
        scale = d * static_cast<float>(p < 4 ? lo & 63 : (both & 15) | lo >> 6 << 4);
        minimum = -m * static_cast<float>(p < 4 ? hi & 63 : both >> 4 | hi >> 6 << 4);
    }
    // 16 values of part p, from value 16 * i_half on, as 4 words.
    static __device__ void load_codes(const block_q4_k * block, int p, int i_half, int * codes) {
        const uint4 both = __ldg(reinterpret_cast<const uint4 *>(block->q + 32 * (p / 2) + 16 * i_half));
        const int shift = 4 * (p % 2);
        codes[0] = static_cast<int>(both.x >> shift & 0x0f0f0f0f);
        codes[1] = static_cast<int>(both.y >> shift & 0x0f0f0f0f);
        codes[2] = static_cast<int>(both.z >> shift & 0x0f0f0f0f);
        codes[3] = static_cast<int>(both.w >> shift & 0x0f0f0f0f);
    }
    static __device__ float dot(const uint8_t * row, int chunk, const cuda_block_x * x) {
        const block_q4_k * block = reinterpret_cast<const block_q4_k *>(row) + chunk / 8;
        float scale, minimum;
        load_scales(block, chunk % 8, scale, minimum);
        int q[8];
        load_q(x + chunk, q);
        int sum = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int codes[4];
            load_codes(block, chunk % 8, h, codes);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum = __dp4a(codes[i], q[4 * h + i], sum);
            }
        }
        const float d = x[chunk].d;
        return scale * (d * static_cast<float>(sum)) + minimum * (d * static_cast<float>(x[chunk].sum));
    }
    static __device__ void add(const uint8_t * row, int chunk, float factor, float * sums) {
        const block_q4_k * block = reinterpret_cast<const block_q4_k *>(row) + chunk / 16;
        const int p = chunk % 16 / 2;
        float scale, minimum;
        load_scales(block, p, scale, minimum);
        int codes[4];
        load_codes(block, p, chunk % 2, codes);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                sums[4 * i + k] += factor * scale * byte(codes[i], k) + factor * minimum;
            }
        }
    }
};

template <class T>
__device__ float dot_values(const uint8_t * row, int n, const float * x, int lane) {
    float sum = 0.0f;
    const int n_chunks = n / T::n_dot;
#pragma unroll 4
    for (int chunk = lane; chunk < n_chunks; chunk += 32) {
        sum += dot_chunk_values<T>(row, chunk, x);
    }
    return sum;
}

template <class T>
__device__ float dot_blocks(const uint8_t * row, int n, const cuda_block_x * x, int lane) {
    float sum = 0.0f;
    const int n_chunks = n / T::n_dot;
#pragma unroll 4
    for (int chunk = lane; chunk < n_chunks; chunk += 32) {
        sum += T::dot(row, chunk, x);
    }
    return sum;
}

// dot(row i_row, x of token t): all lanes of a warp call it, all get the result.
__device__ float warp_dot(const cuda_matrix & m, int i_row, const cuda_input & x, int t) {
    const int lane = threadIdx.x % 32;
    const uint8_t * row = m.rows + i_row * m.stride_bytes;
    const float * values = x.values + t * x.ld;
    const cuda_block_x * packed = x.packed + t * (x.ld / block_values);
    float sum = 0.0f;
    switch (m.row_type) {
        case row_type_f32:  sum = dot_values<f32_rows>(row, m.n, values, lane); break;
        case row_type_f16:  sum = dot_values<f16_rows>(row, m.n, values, lane); break;
        case row_type_bf16: sum = dot_values<bf16_rows>(row, m.n, values, lane); break;
        case row_type_q8_0: sum = dot_blocks<q8_0_rows>(row, m.n, packed, lane); break;
        case row_type_q4_0: sum = dot_blocks<q4_0_rows>(row, m.n, packed, lane); break;
        case row_type_q4_k: sum = dot_blocks<q4_k_rows>(row, m.n, packed, lane); break;
        default:            break;  // the host refused it
    }
    return warp_sum(sum);
}

// --- input ---

// One warp per 32 values.
__global__ void pack_kernel(const float * values, int n_blocks, cuda_block_x * packed) {
    const int lane = threadIdx.x % 32;
    const int i = blockIdx.x * n_warps + threadIdx.x / 32;
    if (i >= n_blocks) {
        return;  // a whole warp
    }
    const float v = values[static_cast<int64_t>(i) * block_values + lane];
    const float magnitude = fabsf(v);
    const bool finite = __ballot_sync(all_lanes, magnitude <= 3.402823466e+38f) == all_lanes;
    float x_max = magnitude;
    for (int step = 16; step > 0; step /= 2) {
        x_max = fmaxf(x_max, __shfl_xor_sync(all_lanes, x_max, step));
    }
    const bool quantized = finite && x_max >= 0x1p-100f;
    const int q = quantized ? __float2int_rn(v * (127.0f / x_max)) : 0;
    int sum = q;
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(all_lanes, sum, step);
    }
    packed[i].q[lane] = static_cast<int8_t>(q);
    if (lane == 0) {
        packed[i].d = !finite ? nanf("") : quantized ? x_max / 127.0f : 0.0f;
        packed[i].sum = sum;
    }
}

// blockIdx.x: token, so that the tokens' blocks of one row run side by side and share it in the cache.
__global__ void dot_rows_kernel(cuda_matrix m, int n_rows, cuda_input x, bool relu, float * out, int64_t ld_out) {
    const int t = blockIdx.x;
    const int i = blockIdx.y * n_warps + threadIdx.x / 32;
    if (i >= ld_out) {
        return;  // a whole warp
    }
    float v = i < n_rows ? warp_dot(m, i, x, t) : 0.0f;
    v = relu && v <= 0.0f ? 0.0f : v;
    if (threadIdx.x % 32 == 0) {
        out[t * ld_out + i] = v;
    }
}

// --- active neurons ---

__device__ float round_to_half(float v) { return __half2float(__float2half_rn(v)); }

// As ffn_activate.
__device__ float activate(cuda_activation activation, float param, float v) {
    switch (activation) {
        case cuda_activation::relu:
        case cuda_activation::drelu:    return v <= param ? 0.0f : v;
        case cuda_activation::relu_sqr: return v <= param ? 0.0f : v * v;
        case cuda_activation::silu:     {
            const float x = v < -104.0f ? -104.0f : v;
            return x / (1.0f + expf(-x));
        }
        case cuda_activation::gelu: {
            if (v <= -10.0f || v >= 10.0f) {
                return v <= -10.0f ? 0.0f : v;
            }
            const float h = round_to_half(v);
            return round_to_half(0.5f * h * (1.0f + tanhf(0.79788456080286535587989211986876f * h * (1.0f + 0.044715f * h * h))));
        }
        case cuda_activation::gelu_erf:   return 0.5f * v * (1.0f + erff(v * 0.70710678118654752440f));
        case cuda_activation::gelu_quick: {
            const float h = round_to_half(v);
            return round_to_half(h * (1.0f / (1.0f + expf(-1.702f * h))));
        }
    }
    return v;
}

struct select_memory {
    float raw[cuda_tile_neurons];  // what the warps computed, by place in the list
    int32_t ids[2][cuda_tile_neurons];
    float values[cuda_tile_neurons];
};

// The entries to keep, in order. Every warp calls it with the same arguments per lane and gets their number; one writes.
__device__ int keep_entries(bool keep, int32_t id, float value, int32_t * ids, float * values) {
    const int lane = threadIdx.x % 32;
    const unsigned mask = __ballot_sync(all_lanes, keep);
    if (threadIdx.x < 32 && keep) {
        const int at = __popc(mask & ((1u << lane) - 1));
        ids[at] = id;
        values[at] = value;
    }
    return __popc(mask);
}

// blockIdx: token, tile. Each step's list is computed by all warps, then cut by every warp alike.
__global__ void select_kernel(cuda_neurons neurons, cuda_rule rule, cuda_input x, cuda_input hidden, cuda_list list) {
    CUDA_SHARED(select_memory, s);
    const int t = blockIdx.x;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int first = blockIdx.y * cuda_tile_neurons;
    const int n_tile = min(cuda_tile_neurons, neurons.n - first);
    const int64_t i_tile = static_cast<int64_t>(t) * gridDim.y + blockIdx.y;
    int32_t * out_ids = list.ids + i_tile * cuda_tile_neurons;
    float * out_values = list.values + i_tile * cuda_tile_neurons;

    if (rule.is_predicted) {
        for (int i = warp; i < n_tile; i += n_warps) {
            const float score = warp_dot(neurons.fc2, first + i, hidden, t);
            if (lane == 0) {
                s.raw[i] = score;
            }
        }
    }
    __syncthreads();
    const bool is_candidate = lane < n_tile && !(rule.is_predicted && s.raw[lane] < rule.predictor_threshold);
    const int n_candidates = keep_entries(is_candidate, first + lane, 0.0f, s.ids[0], s.values);
    __syncthreads();

    for (int k = warp; k < n_candidates; k += n_warps) {
        const float v = warp_dot(neurons.first, s.ids[0][k], x, t);
        if (lane == 0) {
            s.raw[k] = v;
        }
    }
    __syncthreads();
    int32_t id = 0;
    float value = 0.0f;
    bool keep = false;
    if (lane < n_candidates) {
        id = s.ids[0][lane];
        value = s.raw[lane] + (rule.add_biases && neurons.first_bias != nullptr ? neurons.first_bias[id] : 0.0f);
        value = activate(rule.activation, rule.activation_param, value);
        keep = rule.is_dense || !(value == 0.0f || fabsf(value) < rule.gate_limit);
    }
    const bool gated = neurons.second.rows != nullptr;
    int n_up = keep_entries(keep, id, value, s.ids[1], s.values);
    __syncthreads();

    if (gated) {
        for (int k = warp; k < n_up; k += n_warps) {
            const float v = warp_dot(neurons.second, s.ids[1][k], x, t);
            if (lane == 0) {
                s.raw[k] = v;
            }
        }
        __syncthreads();
    }
    keep = false;
    if (lane < n_up) {
        id = s.ids[1][lane];
        value = s.values[lane];
        if (gated) {
            float up = s.raw[lane] + (rule.add_biases && neurons.second_bias != nullptr ? neurons.second_bias[id] : 0.0f);
            if (rule.activation == cuda_activation::drelu) {
                up = up <= 0.0f ? 0.0f : up;
            }
            value *= up;
        }
        keep = rule.is_dense || !(value == 0.0f || fabsf(value) * neurons.down_norm[id] < rule.product_limit);
    }
    const int n_used = keep_entries(keep, id, value, out_ids, out_values);
    const int n_not_0 = __popc(__ballot_sync(all_lanes, keep && value != 0.0f));
    if (threadIdx.x == 0) {
        list.n_ids[i_tile] = n_used;
        // Whole numbers: their sum doesn't depend on the order.
        atomicAdd(list.totals, static_cast<unsigned long long>(n_candidates));
        atomicAdd(list.totals + 1, static_cast<unsigned long long>(gated ? n_up : 0));
        atomicAdd(list.totals + 2, static_cast<unsigned long long>(n_used));
        atomicAdd(list.totals + 3, static_cast<unsigned long long>(n_not_0));
    }
}

// --- down ---

constexpr int split_tiles = cuda_split_neurons / cuda_tile_neurons;

template <int n_add>
struct down_memory {
    int32_t n_ids[split_tiles];
    int32_t ids[cuda_split_neurons];
    float values[cuda_split_neurons];
    float sums[n_warps][n_add][32];  // of each warp: value k of the lane's chunk
};

template <class T>
struct chunk_of_values {
    static constexpr int n_add = T::n_add;
    static __device__ void add(const uint8_t * row, int chunk, float scale, float * sums) {
        add_chunk_values<T>(row, chunk, scale, sums);
    }
};

// blockIdx: token, columns (32 chunks), split. A warp takes every eighth neuron of the split; the warps' sums are joined in order.
template <class T>
__global__ void sum_down_kernel(cuda_matrix down, int n_tiles, cuda_list list, float * sums, int64_t ld_sums) {
    CUDA_SHARED(down_memory<T::n_add>, s);
    const int t = blockIdx.x;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int first_tile = blockIdx.z * split_tiles;
    const int n_own_tiles = min(split_tiles, n_tiles - first_tile);
    const int64_t i_tile = static_cast<int64_t>(t) * n_tiles + first_tile;
    if (threadIdx.x < split_tiles) {
        s.n_ids[threadIdx.x] = static_cast<int>(threadIdx.x) < n_own_tiles ? list.n_ids[i_tile + threadIdx.x] : 0;
    }
    __syncthreads();
    int n_ids = 0;
    for (int i = 0; i < split_tiles; ++i) {
        n_ids += s.n_ids[i];
    }
    for (int i = threadIdx.x; i < cuda_split_neurons; i += n_threads) {
        const int tile = i / cuda_tile_neurons;
        const int k = i % cuda_tile_neurons;
        if (k < s.n_ids[tile]) {
            int at = k;
            for (int before = 0; before < tile; ++before) {
                at += s.n_ids[before];
            }
            s.ids[at] = list.ids[i_tile * cuda_tile_neurons + i];
            s.values[at] = list.values[i_tile * cuda_tile_neurons + i];
        }
    }
    __syncthreads();

    const int n_chunks = down.n / T::n_add;
    const int chunk = blockIdx.y * 32 + lane;
    float own[T::n_add] = {};
    if (chunk < n_chunks) {
#pragma unroll 4
        for (int k = warp; k < n_ids; k += n_warps) {
            T::add(down.rows + s.ids[k] * down.stride_bytes, chunk, s.values[k], own);
        }
    }
#pragma unroll
    for (int k = 0; k < T::n_add; ++k) {
        s.sums[warp][k][lane] = own[k];
    }
    __syncthreads();
    float * out = sums + (static_cast<int64_t>(t) * gridDim.z + blockIdx.z) * ld_sums;
    for (int i = threadIdx.x; i < 32 * T::n_add; i += n_threads) {
        const int64_t column = static_cast<int64_t>(blockIdx.y) * 32 * T::n_add + i;
        if (column < down.n) {
            float sum = 0.0f;
            for (int w = 0; w < n_warps; ++w) {
                sum += s.sums[w][i % T::n_add][i / T::n_add];
            }
            out[column] = sum;
        }
    }
}

// y[t][j] = the splits' sums, in order.
__global__ void join_kernel(int n, int n_splits, const float * sums, float * y, int64_t ld) {
    const int t = blockIdx.x;
    const int j = blockIdx.y * n_threads + threadIdx.x;
    if (j >= n) {
        return;
    }
    float sum = 0.0f;
    for (int i = 0; i < n_splits; ++i) {
        sum += sums[(static_cast<int64_t>(t) * n_splits + i) * ld + j];
    }
    y[t * ld + j] = sum;
}

template <class T>
void launch_sum_down(int n_tokens, int n, const cuda_matrix & down, const cuda_list & list, float * sums, int64_t ld,
                     cudaStream_t stream) {
    const unsigned n_columns = (down.n + 32 * T::n_add - 1) / (32 * T::n_add);
    const dim3 grid(n_tokens, n_columns, cuda_n_splits(n));
    CUDA_LAUNCH(sum_down_kernel<T>, grid, dim3(n_threads), sizeof(down_memory<T::n_add>), stream, down, cuda_n_tiles(n), list,
                sums, ld);
}

}  // namespace

cudaError_t cuda_pack(int n_tokens, const float * values, int64_t ld, cuda_block_x * packed, cudaStream_t stream) {
    const int n_blocks = static_cast<int>(n_tokens * ld / block_values);
    CUDA_LAUNCH(pack_kernel, dim3((n_blocks + n_warps - 1) / n_warps), dim3(n_threads), 0, stream, values, n_blocks, packed);
    return cudaGetLastError();
}

cudaError_t cuda_dot_rows(int n_tokens, const cuda_matrix & matrix, int n_rows, const cuda_input & x, bool relu, float * out,
                          int64_t ld_out, cudaStream_t stream) {
    const dim3 grid(n_tokens, static_cast<unsigned>((ld_out + n_warps - 1) / n_warps));
    CUDA_LAUNCH(dot_rows_kernel, grid, dim3(n_threads), 0, stream, matrix, n_rows, x, relu, out, ld_out);
    return cudaGetLastError();
}

cudaError_t cuda_select(int n_tokens, const cuda_neurons & neurons, const cuda_rule & rule, const cuda_input & x,
                        const cuda_input & hidden, const cuda_list & list, cudaStream_t stream) {
    const dim3 grid(n_tokens, cuda_n_tiles(neurons.n));
    CUDA_LAUNCH(select_kernel, grid, dim3(n_threads), sizeof(select_memory), stream, neurons, rule, x, hidden, list);
    return cudaGetLastError();
}

cudaError_t cuda_sum_down(int n_tokens, int n, const cuda_matrix & down, const cuda_list & list, float * sums, float * y,
                          int64_t ld_y, cudaStream_t stream) {
    switch (down.row_type) {
        case row_type_f32:  launch_sum_down<chunk_of_values<f32_rows>>(n_tokens, n, down, list, sums, ld_y, stream); break;
        case row_type_f16:  launch_sum_down<chunk_of_values<f16_rows>>(n_tokens, n, down, list, sums, ld_y, stream); break;
        case row_type_bf16: launch_sum_down<chunk_of_values<bf16_rows>>(n_tokens, n, down, list, sums, ld_y, stream); break;
        case row_type_q8_0: launch_sum_down<q8_0_rows>(n_tokens, n, down, list, sums, ld_y, stream); break;
        case row_type_q4_0: launch_sum_down<q4_0_rows>(n_tokens, n, down, list, sums, ld_y, stream); break;
        case row_type_q4_k: launch_sum_down<q4_k_rows>(n_tokens, n, down, list, sums, ld_y, stream); break;
        default:            return cudaErrorInvalidValue;
    }
    const cudaError_t launched = cudaGetLastError();
    if (launched != cudaSuccess) {
        return launched;
    }
    const dim3 grid(n_tokens, (down.n + n_threads - 1) / n_threads);
    CUDA_LAUNCH(join_kernel, grid, dim3(n_threads), 0, stream, down.n, cuda_n_splits(n), sums, y, ld_y);
    return cudaGetLastError();
}

cudaError_t cuda_check_kernels() {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(select_kernel));
}

}  // namespace powerinfer
