// Fibers, meeting points and stream queues of cuda-shim.h. One host thread at a time.
#include "cuda-shim.h"

#include "ggml.h"

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_shim {

void fail(const char * format, ...) {
    std::fprintf(stderr, "cuda-shim: ");
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, " (block %u %u %u, thread %u)\n", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x);
    std::abort();
}

namespace {

constexpr size_t stack_bytes = 256 << 10;
constexpr size_t shared_room_bytes = 64 << 10;
constexpr size_t canary_bytes = 64;
constexpr size_t max_shared_bytes = 48 << 10;  // what every GPU gives without asking
constexpr uint8_t filler = 0xff;               // of memory that nobody wrote: NaN, -1

enum class thread_state { ready, at_block, at_warp, done };

struct fiber {
    ucontext_t context;
    jmp_buf jump;
    std::unique_ptr<uint8_t[]> stack;
    bool is_started = false;
    thread_state state = thread_state::done;
    int line = 0;
    unsigned n_meetings = 0;  // of its warp
};

struct warp {
    int n_waiting = 0;
    int line = 0;
    uint64_t values[2][32];  // of the last meeting, and of the one before it, which slow lanes still read
};

struct machine {
    std::vector<std::unique_ptr<fiber>> fibers;
    std::vector<warp> warps;
    ucontext_t scheduler;
    jmp_buf scheduler_jump;
    const std::function<void()> * kernel = nullptr;
    unsigned n_threads = 0;
    unsigned n_at_block = 0;
    int block_line = 0;
    size_t shared_bytes = 0;
    uint8_t * shared_end = nullptr;  // an unmapped page begins here
};

machine & the() {
    static machine instance;
    return instance;
}

fiber & self() { return *the().fibers[threadIdx.x]; }

// ASan wants to be told; it follows swapcontext. Otherwise jumps, which call no system function.
void enter(fiber & f) {
#if defined(__SANITIZE_ADDRESS__)
    void * fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, f.stack.get(), stack_bytes);
    swapcontext(&the().scheduler, &f.context);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    if (_setjmp(the().scheduler_jump) == 0) {
        if (f.is_started) {
            _longjmp(f.jump, 1);
        }
        f.is_started = true;
        setcontext(&f.context);
    }
#endif
}

#if defined(__SANITIZE_ADDRESS__)
const void * scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
#endif

void leave(fiber & f) {
#if defined(__SANITIZE_ADDRESS__)
    void * fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, scheduler_stack, scheduler_stack_bytes);
    swapcontext(&f.context, &the().scheduler);
    __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_stack_bytes);
#else
    if (_setjmp(f.jump) == 0) {
        _longjmp(the().scheduler_jump, 1);
    }
#endif
}

void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
    for (;;) {
        (*the().kernel)();
        self().state = thread_state::done;
        leave(self());
    }
}

void wait(thread_state state, int line) {
    fiber & f = self();
    f.state = state;
    f.line = line;
    leave(f);
}

void make_fibers(unsigned n) {
    machine & m = the();
    while (m.fibers.size() < n) {
        std::unique_ptr<fiber> f(new fiber);
        f->stack.reset(new uint8_t[stack_bytes]);
        getcontext(&f->context);
        f->context.uc_stack.ss_sp = f->stack.get();
        f->context.uc_stack.ss_size = stack_bytes;
        f->context.uc_link = nullptr;
        makecontext(&f->context, fiber_main, 0);
        m.fibers.push_back(std::move(f));
    }
    m.warps.resize(m.fibers.size() / 32);
    if (m.shared_end == nullptr) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        void * room = mmap(nullptr, shared_room_bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (room == MAP_FAILED || mprotect(static_cast<uint8_t *>(room) + shared_room_bytes, page, PROT_NONE) != 0) {
            fail("no memory for shared memory");
        }
        m.shared_end = static_cast<uint8_t *>(room) + shared_room_bytes;
    }
}

void run_block(size_t shared_bytes) {
    machine & m = the();
    uint8_t * const shared = m.shared_end - shared_bytes;
    std::memset(shared - canary_bytes, filler, shared_bytes + canary_bytes);
    for (unsigned i = 0; i < m.n_threads; ++i) {
        m.fibers[i]->state = thread_state::ready;
        m.fibers[i]->n_meetings = 0;
    }
    for (warp & w : m.warps) {
        w.n_waiting = 0;
    }
    m.n_at_block = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (unsigned k = 0; k < m.n_threads; ++k) {
            const unsigned i = reverse_order ? m.n_threads - 1 - k : k;
            if (m.fibers[i]->state == thread_state::ready) {
                threadIdx = {i, 0, 0};
                enter(*m.fibers[i]);
                moved = true;
            }
        }
    }
    for (unsigned i = 0; i < m.n_threads; ++i) {
        const fiber & f = *m.fibers[i];
        if (f.state != thread_state::done) {
            threadIdx = {i, 0, 0};
            fail("a thread waits for others in line %d (%s) and they never come", f.line,
                 f.state == thread_state::at_block ? "__syncthreads" : "a warp function");
        }
    }
    for (size_t i = 1; i <= canary_bytes; ++i) {
        if (shared[-static_cast<ptrdiff_t>(i)] != filler) {
            fail("something was written %zu bytes in front of shared memory", i);
        }
    }
}

}  // namespace

void * shared_memory(size_t size_bytes) {
    if (size_bytes > the().shared_bytes) {
        fail("the kernel uses %zu bytes of shared memory, it was started with %zu", size_bytes, the().shared_bytes);
    }
    return the().shared_end - the().shared_bytes;
}

void meet_block(int line) {
    machine & m = the();
    if (m.n_at_block > 0 && m.block_line != line) {
        fail("__syncthreads in line %d, while others wait in line %d", line, m.block_line);
    }
    m.block_line = line;
    if (++m.n_at_block < m.n_threads) {
        wait(thread_state::at_block, line);
        return;
    }
    m.n_at_block = 0;
    for (unsigned i = 0; i < m.n_threads; ++i) {
        m.fibers[i]->state = thread_state::ready;
    }
}

const uint64_t * meet_warp(unsigned mask, uint64_t value, int line) {
    machine & m = the();
    warp & w = m.warps[threadIdx.x / 32];
    if (mask != 0xffffffffu) {
        fail("a warp function in line %d with mask %08x; this code uses whole warps", line, mask);
    }
    if (w.n_waiting > 0 && w.line != line) {
        fail("a warp function in line %d, while other lanes wait in line %d", line, w.line);
    }
    w.line = line;
    uint64_t * values = w.values[self().n_meetings++ % 2];
    values[threadIdx.x % 32] = value;
    if (++w.n_waiting < 32) {
        wait(thread_state::at_warp, line);
        return values;
    }
    w.n_waiting = 0;
    const unsigned first = threadIdx.x / 32 * 32;
    for (unsigned i = first; i < first + 32; ++i) {
        m.fibers[i]->state = thread_state::ready;
    }
    return values;
}

namespace {

void run_kernel(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> & kernel) {
    machine & m = the();
    shared_bytes = (shared_bytes + 15) / 16 * 16;
    if (block.x % 32 != 0 || block.y != 1 || block.z != 1 || block.x > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
        grid.y > 65535 || grid.z > 65535 || shared_bytes > max_shared_bytes) {
        fail("a launch of %u x %u x %u blocks of %u threads with %zu bytes of shared memory", grid.x, grid.y, grid.z, block.x,
             shared_bytes);
    }
    make_fibers(block.x);
    m.kernel = &kernel;
    m.n_threads = block.x;
    m.shared_bytes = shared_bytes;
    gridDim = grid;
    blockDim = block;
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; ++x) {
                blockIdx = {x, y, z};
                run_block(shared_bytes);
            }
        }
    }
}

}  // namespace

// --- streams ---

struct stream {
    std::deque<std::function<void()>> queue;
};

}  // namespace cuda_shim

struct cuda_shim_event {
    uint64_t recorded = 0;
    uint64_t completed = 0;
    cuda_shim::stream * stream = nullptr;  // that it was recorded in
};

namespace cuda_shim {

namespace {

std::vector<stream *> & streams() {
    static std::vector<stream *> instance;
    return instance;
}

// Runs the next operation; false when there is none.
bool step(stream & s) {
    if (s.queue.empty()) {
        return false;
    }
    const std::function<void()> next = std::move(s.queue.front());
    s.queue.pop_front();
    next();
    return true;
}

void run_all() {
    for (stream * s : streams()) {
        while (step(*s)) {
        }
    }
}

void enqueue(stream * s, std::function<void()> next) {
    if (s == nullptr) {
        next();
        return;
    }
    s->queue.push_back(std::move(next));
    if (eager_streams) {
        run_all();
    }
}

cudaError_t waited() { return static_cast<cudaError_t>(broken); }

cudaError_t allocate(void ** p, size_t size_bytes) {
    if (size_bytes > memory_left_bytes) {
        return cudaErrorMemoryAllocation;
    }
    *p = std::aligned_alloc(256, (size_bytes + 255) / 256 * 256);
    std::memset(*p, filler, size_bytes);
    ++n_allocations;
    return cudaSuccess;
}

cudaError_t release(void * p) {
    run_all();
    n_allocations -= p != nullptr;
    std::free(p);
    return cudaSuccess;
}

}  // namespace

void launch(dim3 grid, dim3 block, size_t shared_bytes, stream * s, std::function<void()> kernel) {
    enqueue(s, [=] { run_kernel(grid, block, shared_bytes, kernel); });
}

}  // namespace cuda_shim

using namespace cuda_shim;

float __half2float(__half value) { return ggml_fp16_to_fp32(value.bits); }
__half __float2half_rn(float value) { return {ggml_fp32_to_fp16(value)}; }

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char * cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:                     return "no error";
        case cudaErrorInvalidValue:           return "invalid argument";
        case cudaErrorMemoryAllocation:       return "out of memory";
        case cudaErrorNoDevice:               return "no CUDA-capable device is detected";
        case cudaErrorLaunchFailure:          return "unspecified launch failure";
        case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    }
    return "unknown error";
}

cudaError_t cudaGetDeviceCount(int * n) {
    *n = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetByPCIBusId(int * device, const char * id) {
    *device = 0;
    return std::strcmp(id, "0000:01:00.0") == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorNoDevice; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, const void *) { return cudaSuccess; }
cudaError_t cudaMalloc(void ** p, size_t size_bytes) { return allocate(p, size_bytes); }
cudaError_t cudaFree(void * p) { return release(p); }
cudaError_t cudaMallocHost(void ** p, size_t size_bytes) { return allocate(p, size_bytes); }
cudaError_t cudaFreeHost(void * p) { return release(p); }

cudaError_t cudaMemset(void * p, int value, size_t size_bytes) {
    std::memset(p, value, size_bytes);
    return waited();
}

cudaError_t cudaMemcpy(void * to, const void * from, size_t size_bytes, cudaMemcpyKind) {
    std::memcpy(to, from, size_bytes);
    return waited();
}

cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t size_bytes, cudaMemcpyKind, cudaStream_t stream) {
    enqueue(stream, [=] { std::memcpy(to, from, size_bytes); });
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned) {
    *stream = new cuda_shim::stream;
    streams().push_back(*stream);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    run_all();
    std::vector<cuda_shim::stream *> & all = streams();
    for (size_t i = 0; i < all.size(); ++i) {
        if (all[i] == stream) {
            all.erase(all.begin() + i);
            break;
        }
    }
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t * event, unsigned) {
    *event = new cuda_shim_event;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    run_all();
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->stream = stream;
    const uint64_t version = ++event->recorded;
    enqueue(stream, [=] { event->completed = version; });
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    while (event->completed < event->recorded) {
        if (!step(*event->stream)) {
            fail("an event is waited for that nothing completes");
        }
    }
    return waited();
}

cudaError_t cudaDeviceSynchronize() {
    run_all();
    return waited();
}
