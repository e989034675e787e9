// As much of CUDA as ggml/src/gpu/cuda-*.cu use, on the CPU: a thread is a fiber, a thread block 256 of them; streams are
// queues that run as early or as late as a test asks. What a GPU would get wrong silently ends the program with a line.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

// --- what a test sets and asks ---

namespace cuda_shim {

inline bool reverse_order = false;    // threads of a block run last to first between their meeting points
inline bool eager_streams = true;     // what is queued runs at once; else when something waits for it
inline size_t memory_left_bytes = SIZE_MAX;  // what cudaMalloc still gives
inline int n_allocations = 0;                // alive
inline int broken = 0;                       // a cudaError_t that every wait returns from now on

[[noreturn]] void fail(const char * format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace cuda_shim

// --- language ---

#define __global__
#define __device__
#define __align__(n) alignas(n)

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace cuda_shim {

void launch(dim3 grid, dim3 block, size_t shared_bytes, struct stream * stream, std::function<void()> kernel);
void * shared_memory(size_t size_bytes);
void meet_block(int line);
// Puts a value where the warp's other lanes find it: returns their values, once all 32 are there.
const uint64_t * meet_warp(unsigned mask, uint64_t value, int line);

template <class T>
T shuffle_xor(unsigned mask, T value, int lanes, int line) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "one word per lane");
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    word = meet_warp(mask, word, line)[(threadIdx.x % 32) ^ lanes];
    std::memcpy(&value, &word, sizeof(T));
    return value;
}

inline unsigned ballot(unsigned mask, bool value, int line) {
    const uint64_t * values = meet_warp(mask, value, line);
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) {
        bits |= static_cast<unsigned>(values[i]) << i;
    }
    return bits;
}

}  // namespace cuda_shim

#define CUDA_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    cuda_shim::launch(grid, block, shared_bytes, stream, [=] { kernel(__VA_ARGS__); })
#define CUDA_SHARED(type, name) type & name = *static_cast<type *>(cuda_shim::shared_memory(sizeof(type)))
#define __syncthreads() cuda_shim::meet_block(__LINE__)
#define __shfl_xor_sync(mask, value, lanes) cuda_shim::shuffle_xor(mask, value, lanes, __LINE__)
#define __ballot_sync(mask, value) cuda_shim::ballot(mask, value, __LINE__)

// --- functions ---

template <class T>
T __ldg(const T * p) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0) {
        cuda_shim::fail("a load of %zu bytes at an address that isn't a multiple of it", sizeof(T));
    }
    return *p;
}

inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) {
        sum += static_cast<int8_t>(a >> i & 0xff) * static_cast<int8_t>(b >> i & 0xff);
    }
    return sum;
}

struct __half {
    uint16_t bits;
};
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
float __half2float(__half value);
__half __float2half_rn(float value);
inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned long long atomicAdd(unsigned long long * to, unsigned long long value) {
    const unsigned long long before = *to;
    *to += value;
    return before;
}

// --- runtime ---

enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorMemoryAllocation,
    cudaErrorNoDevice,
    cudaErrorLaunchFailure,
    cudaErrorNoKernelImageForDevice
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
struct cudaFuncAttributes {};
using cudaStream_t = cuda_shim::stream *;
using cudaEvent_t = struct cuda_shim_event *;
constexpr unsigned cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDisableTiming = 2;

cudaError_t cudaGetLastError();
const char * cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDeviceCount(int * n);
cudaError_t cudaDeviceGetByPCIBusId(int * device, const char * id);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * attributes, const void * kernel);
cudaError_t cudaMalloc(void ** p, size_t size_bytes);
cudaError_t cudaFree(void * p);
cudaError_t cudaMallocHost(void ** p, size_t size_bytes);
cudaError_t cudaFreeHost(void * p);
cudaError_t cudaMemset(void * p, int value, size_t size_bytes);
cudaError_t cudaMemcpy(void * to, const void * from, size_t size_bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t size_bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t * event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaDeviceSynchronize();
