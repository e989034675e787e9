// Times kernels over rows in memory or in cache, and plain reading. Passes take other matrices and other rows each time, so
// that nothing but the hardware's own locality helps.
#include "kernel-bench.h"

#include "ggml.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

namespace powerinfer {

namespace {

constexpr size_t cache_line_bytes = 64;
constexpr int64_t n_pool_rows = 509;  // different rows, repeated; prime, so that matrices don't repeat in step

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const size_t n = values.size();
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2.0;
}

// Cycles per second of this core now: register additions that wait for each other take one cycle each.
double measure_core_hz() {
    constexpr int n_loops = 1 << 14;
    double best_s = 1e9;
    for (int i_try = 0; i_try < 5; ++i_try) {
        uint64_t x = 1;
        uint64_t y = 3;
        const double start = omp_get_wtime();
        for (int i = 0; i < n_loops; ++i) {
            for (int k = 0; k < 16; ++k) {
                x += y;
                __asm__ volatile("" : "+r"(x), "+r"(y));
            }
        }
        best_s = std::min(best_s, omp_get_wtime() - start);
    }
    return 16.0 * n_loops / best_s;
}

// Rows of one matrix that a pass reads, ascending.
struct index_list {
    bool all = true;
    std::vector<int32_t> ids;

    int64_t size(int64_t n_rows) const { return all ? n_rows : static_cast<int64_t>(ids.size()); }
};

struct pass_lists {
    index_list gate;
    index_list rows;  // a subset of gate
};

// A pass's hot end is somewhere else than the last pass's: no row is hot twice before the working set has gone by.
// `exact` reads all gate rows, but the others are as skewed as those of `predicted`.
std::vector<pass_lists> make_lists(int64_t n_rows, double gate_density, double density) {
    std::mt19937_64 random(1);
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    const double skewed = gate_density < 1.0 ? gate_density : density;
    const std::vector<double> frequency = skewed_frequencies(n_rows, skewed);
    std::vector<pass_lists> passes(kernel_bench::n_lists);
    for (size_t k = 0; k < passes.size(); ++k) {
        const double golden = 0.6180339887498949 * static_cast<double>(k);
        const int64_t shift = static_cast<int64_t>((golden - std::floor(golden)) * static_cast<double>(n_rows));
        passes[k].gate.all = gate_density >= 1.0;
        passes[k].rows.all = density >= 1.0;
        for (int64_t i = 0; i < n_rows; ++i) {
            if (skewed < 1.0 && uniform(random) >= frequency[(i + n_rows - shift) % n_rows]) {
                continue;
            }
            if (!passes[k].gate.all) {
                passes[k].gate.ids.push_back(static_cast<int32_t>(i));
            }
            if (!passes[k].rows.all && uniform(random) < density / skewed) {
                passes[k].rows.ids.push_back(static_cast<int32_t>(i));
            }
        }
    }
    return passes;
}

// A matrix in the working set.
struct matrix_view {
    const uint8_t * rows;
    size_t stride_bytes;
};

// (n) values that no kernel turns into denormals or infinities.
std::vector<float> random_values(size_t n, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (float & value : values) {
        value = normal(random);
    }
    return values;
}

// Memory of one thread, on cache lines of its own.
struct thread_memory {
    std::vector<uint8_t> packed;
    std::vector<float> out;    // (n_rows)
    std::vector<float> scale;  // (n_rows)
    std::vector<float> y;      // (n), and room to align
    uint8_t * packed_x = nullptr;
    float * sum = nullptr;

    thread_memory(const row_kernels & kernels, int64_t n, int64_t n_rows)
        : packed(kernels.packed_x_bytes(n) + cache_line_bytes), out(n_rows), scale(n_rows), y(n + 2 * cache_line_bytes / sizeof(float)) {
        packed_x = reinterpret_cast<uint8_t *>(round_up(reinterpret_cast<uintptr_t>(packed.data()), cache_line_bytes));
        sum = reinterpret_cast<float *>(round_up(reinterpret_cast<uintptr_t>(y.data()), cache_line_bytes));
        for (int64_t i = 0; i < n_rows; ++i) {
            scale[i] = i % 2 ? 0x1p-20f : -0x1p-20f;
        }
        kernels.pack_x(n, random_values(n, 2).data(), packed_x);
    }
};

void run_kernel(bench_op op, const row_kernels & kernels, int64_t n, const matrix_view & m, const int32_t * ids, int64_t first,
                int64_t n_ids, thread_memory & memory) {
    // ids == nullptr: rows first .. first + n_ids - 1.
    const uint8_t * rows = ids ? m.rows : m.rows + first * m.stride_bytes;
    switch (op) {
        case bench_op::dot: kernels.dot_rows(n, rows, m.stride_bytes, ids, n_ids, n_ids, memory.packed_x, memory.out.data()); break;
        case bench_op::add: kernels.add_rows(n, rows, m.stride_bytes, ids, n_ids, n_ids, memory.scale.data(), memory.sum); break;
        case bench_op::unpack:
            for (int64_t i = 0; i < n_ids; ++i) {
                kernels.unpack_row(n, rows + (ids ? ids[i] : i) * m.stride_bytes, memory.sum);
            }
            break;
        case bench_op::ffn: break;
    }
}

// A thread's even share of a list.
void run_share(bench_op op, const row_kernels & kernels, int64_t n, const matrix_view & m, const index_list & list,
               int64_t n_rows, int i_thread, int n_threads, thread_memory & memory) {
    const int64_t begin = list.size(n_rows) * i_thread / n_threads;
    const int64_t end = list.size(n_rows) * (i_thread + 1) / n_threads;
    run_kernel(op, kernels, n, m, list.all ? nullptr : list.ids.data() + begin, begin, end - begin, memory);
}

// A thread's share of the up and down rows, step by step as the decode path takes them.
void run_steps(const row_kernels & kernels, int64_t n, const matrix_view & up, const matrix_view & down, const index_list & list,
               int64_t n_rows, int i_thread, int n_threads, thread_memory & memory) {
    const int64_t begin = list.size(n_rows) * i_thread / n_threads;
    const int64_t end = list.size(n_rows) * (i_thread + 1) / n_threads;
    const int64_t step = ffn_step_neurons(row_size_bytes(kernels.row_type, n));
    for (int64_t i = begin; i < end; i += step) {
        const int64_t n_ids = std::min(step, end - i);
        const int64_t n_ahead = std::min(2 * step, end - i);
        const int32_t * ids = list.all ? nullptr : list.ids.data() + i;
        const size_t first = list.all ? i : 0;
        kernels.dot_rows(n, up.rows + first * up.stride_bytes, up.stride_bytes, ids, n_ids, n_ahead, memory.packed_x, memory.out.data());
        kernels.add_rows(n, down.rows + first * down.stride_bytes, down.stride_bytes, ids, n_ids, n_ahead, memory.scale.data(), memory.sum);
    }
}

}  // namespace

std::vector<kernel_set_info> kernel_sets() {
    const kernel_table * const * tables = nullptr;
    const int n = kernel_table_list(&tables);
    std::vector<kernel_set_info> sets;
    for (int i = 0; i < n; ++i) {
        kernel_set_info info;
        info.name = tables[i]->name;
        info.is_supported = tables[i]->is_supported();
        for (int k = 0; k < tables[i]->n_rows; ++k) {
            info.row_types.push_back(ggml_type_name(static_cast<ggml_type>(tables[i]->rows[k].row_type)));
        }
        sets.push_back(std::move(info));
    }
    return sets;
}

std::vector<double> skewed_frequencies(int64_t n_rows, double density) {
    const double floor = std::min(0.003, density / 4.0);
    const double peak = std::max(0.97, (1.0 + density) / 2.0);
    std::vector<double> frequency(n_rows);
    double low = 0.0;
    double high = 1e6;  // rows over which the frequency falls, as a share of n_rows
    for (int i = 0; i < 100; ++i) {
        const double width = (low + high) / 2.0;
        double sum = 0.0;
        for (int64_t p = 0; p < n_rows; ++p) {
            frequency[p] = floor + (peak - floor) * std::exp(-static_cast<double>(p) / (width * static_cast<double>(n_rows)));
            sum += frequency[p];
        }
        (sum < density * static_cast<double>(n_rows) ? low : high) = width;
    }
    return frequency;
}

kernel_bench::kernel_bench() = default;
kernel_bench::~kernel_bench() = default;

size_t kernel_bench::working_set_bytes() const { return rows_.size_bytes(); }

status kernel_bench::create(const std::string & type_name, int64_t n, int64_t n_rows, size_t working_set_bytes) {
    row_type_ = -1;
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const char * name = ggml_type_name(static_cast<ggml_type>(i));
        if (name != nullptr && type_name == name && !ggml_quantize_requires_imatrix(static_cast<ggml_type>(i))) {
            row_type_ = i;
        }
    }
    if (row_type_ < 0) {
        return status::error("types: " + type_name + "; expected a ggml type that has kernels; see powerinfer bench --help.");
    }
    const ggml_type type = static_cast<ggml_type>(row_type_);
    if (n < 1 || n_rows < 1 || n_rows > INT32_MAX || row_size_bytes(row_type_, n) == 0) {
        return status::error("rows: " + std::to_string(n_rows) + " of " + std::to_string(n) + " values; expected whole blocks of " +
                             std::to_string(ggml_blck_size(type)) + " for " + type_name + "; change --n or --n-rows.");
    }
    n_ = n;
    n_rows_ = n_rows;
    row_bytes_ = row_size_bytes(row_type_, n);
    stride_bytes_ = round_up(row_bytes_, cache_line_bytes);
    const size_t layer_bytes = 3 * n_rows * stride_bytes_;
    n_layers_ = std::max<int64_t>(1, static_cast<int64_t>((working_set_bytes + layer_bytes - 1) / layer_bytes));
    rows_ = huge_block();
    status result = huge_block::allocate(n_layers_ * layer_bytes + row_tail_bytes, false, rows_);
    if (!result.ok()) {
        return result;
    }
    const std::vector<float> values = random_values(n_pool_rows * n, 1);
    std::vector<uint8_t> pool(n_pool_rows * row_bytes_);
    ggml_quantize_init(type);
    ggml_quantize_chunk(type, values.data(), pool.data(), 0, n_pool_rows, n, nullptr);
    const int64_t total = n_layers_ * 3 * n_rows;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < total; ++i) {
        std::memcpy(rows_.data() + i * stride_bytes_, pool.data() + i % n_pool_rows * row_bytes_, row_bytes_);
    }
    return {};
}

status kernel_bench::run(const bench_options & options, bench_result & result) {
    const kernel_table * table = kernel_table_select(options.kernels.c_str());
    const row_kernels * found = table == nullptr ? nullptr : kernel_table_find(table, row_type_);
    if (found == nullptr) {
        return status::error("sets: " + options.kernels + (table == nullptr ? " can't run here" : " has no kernels for this type") +
                             "; expected a set that does; see powerinfer bench --help.");
    }
    const bool is_ffn = options.op == bench_op::ffn;
    if (options.n_threads < 1 || options.n_repeats < 1 || !(options.density > 0.0 && options.density <= (is_ffn ? options.gate_density : 1.0)) ||
        (is_ffn && options.gate_density > 1.0) || (options.in_cache && (is_ffn || options.density < 1.0))) {
        return status::error("options: " + std::to_string(options.n_threads) + " threads, density " + std::to_string(options.density) +
                             ", gate density " + std::to_string(options.gate_density) +
                             (options.in_cache ? ", in cache" : "") + "; expected 1 thread or more, 0 < density <= gate density <= 1, "
                             "and in cache only single kernels at density 1; change them.");
    }
    const row_kernels & kernels = *found;
    const int n_threads = options.n_threads;
    const int64_t n_cached = std::min<int64_t>(n_rows_, std::max<int64_t>(1, cached_bytes / stride_bytes_));
    const std::vector<pass_lists> lists = make_lists(n_rows_, is_ffn ? options.gate_density : options.density, options.density);
    std::vector<thread_memory> memories;
    for (int i = 0; i < n_threads; ++i) {
        memories.emplace_back(kernels, n_, n_rows_);
    }

    const size_t matrix_bytes = n_rows_ * stride_bytes_;
    const int64_t n_matrices = is_ffn ? n_layers_ : 3 * n_layers_;
    double n_read = 0.0;  // rows

    auto list_of = [&](int64_t i_pass) -> const pass_lists & { return lists[(i_pass / n_matrices + 5 * i_pass) % n_lists]; };
    auto thread_pass = [&](int64_t i_pass, int i_thread, thread_memory & memory) {
        if (options.in_cache) {
            const matrix_view rows = {rows_.data() + (i_thread % (3 * n_layers_)) * matrix_bytes, stride_bytes_};
            run_kernel(options.op, kernels, n_, rows, nullptr, 0, n_cached, memory);
            return;
        }
        const pass_lists & list = list_of(i_pass);
        const uint8_t * at = rows_.data() + (i_pass % n_matrices) * matrix_bytes * (is_ffn ? 3 : 1);
        if (!is_ffn) {
            run_share(options.op, kernels, n_, {at, stride_bytes_}, list.rows, n_rows_, i_thread, n_threads, memory);
            return;
        }
        matrix_view gate = {at, stride_bytes_};
        matrix_view up = {at + matrix_bytes, stride_bytes_};
        matrix_view down = {at + 2 * matrix_bytes, stride_bytes_};
        if (options.layout == bench_layout::bundle) {
            up = {at + matrix_bytes, 2 * stride_bytes_};
            down = {at + matrix_bytes + stride_bytes_, 2 * stride_bytes_};
        } else if (options.layout == bench_layout::interleaved) {
            gate = {at, 3 * stride_bytes_};
            up = {at + stride_bytes_, 3 * stride_bytes_};
            down = {at + 2 * stride_bytes_, 3 * stride_bytes_};
        }
        run_share(bench_op::dot, kernels, n_, gate, list.gate, n_rows_, i_thread, n_threads, memory);
        run_steps(kernels, n_, up, down, list.rows, n_rows_, i_thread, n_threads, memory);
    };
    auto rows_of = [&](int64_t i_pass) -> double {
        if (options.in_cache) {
            return static_cast<double>(n_cached * n_threads);
        }
        const pass_lists & list = list_of(i_pass);
        return static_cast<double>(is_ffn ? list.gate.size(n_rows_) + 2 * list.rows.size(n_rows_) : list.rows.size(n_rows_));
    };
    // Seconds of passes i_next_ .. i_next_ + n_passes - 1. Threads don't wait for each other in between.
    auto run_passes = [&](int64_t n_passes) -> double {
        double start = 0.0;
        double end = 0.0;
#pragma omp parallel num_threads(n_threads)
        {
            const int i_thread = omp_get_thread_num();
            thread_memory & memory = memories[i_thread];
#pragma omp barrier
#pragma omp master
            start = omp_get_wtime();
            for (int64_t i = 0; i < n_passes; ++i) {
                thread_pass(i_next_ + i, i_thread, memory);
            }
#pragma omp barrier
#pragma omp master
            end = omp_get_wtime();
        }
        for (int64_t i = 0; i < n_passes; ++i) {
            n_read += rows_of(i_next_ + i);
        }
        i_next_ += n_passes;
        return end - start;
    };

    // Warm up, and find out how many passes make a repeat.
    int64_t n_passes = 1;
    double seconds = run_passes(1);
    while (seconds < options.repeat_s / 2.0) {
        n_passes *= 2;
        seconds = run_passes(n_passes);
    }
    n_passes = std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(n_passes) * options.repeat_s / seconds));
    n_read = 0.0;
    std::vector<double> pass_s;
    std::vector<double> core_hz;
    for (int i = 0; i < options.n_repeats; ++i) {
        core_hz.push_back(measure_core_hz());
        pass_s.push_back(run_passes(n_passes) / static_cast<double>(n_passes));
    }
    result.pass_s = median(pass_s);
    result.pass_s_min = *std::min_element(pass_s.begin(), pass_s.end());
    result.pass_s_max = *std::max_element(pass_s.begin(), pass_s.end());
    result.pass_rows = n_read / static_cast<double>(n_passes * options.n_repeats);
    result.pass_bytes = result.pass_rows * static_cast<double>(row_bytes_);
    result.core_hz = median(core_hz);
    return {};
}

status read_bandwidth(int n_threads, size_t n_bytes, double & bytes_per_s) {
    constexpr size_t step_bytes = 256;
    constexpr size_t prefetch_bytes = 2048;
    constexpr int n_passes = 6;
    const size_t part_bytes = n_threads < 1 ? 0 : n_bytes / n_threads / step_bytes * step_bytes;
    if (part_bytes == 0) {
        return status::error("read_bandwidth: " + std::to_string(n_threads) + " threads, " + std::to_string(n_bytes) +
                             " bytes; expected 1 thread or more and 256 bytes for each; pass more bytes.");
    }
    huge_block block;
    status result = huge_block::allocate(part_bytes * n_threads + prefetch_bytes, false, block);
    if (!result.ok()) {
        return result;
    }
    double best_s = 1e9;
    uint64_t all = 0;
    // Pass 0 writes: every page then exists, touched first by the thread that reads it.
    for (int i_pass = 0; i_pass <= n_passes; ++i_pass) {
        double start = 0.0;
        double end = 0.0;
#pragma omp parallel num_threads(n_threads) reduction(^ : all)
        {
            uint8_t * part = block.data() + part_bytes * omp_get_thread_num();
#pragma omp barrier
#pragma omp master
            start = omp_get_wtime();
            if (i_pass == 0) {
                std::memset(part, 1, part_bytes);
            } else {
                // 32 sums: enough independent loads, whatever the width that the compiler chooses.
                uint64_t sums[step_bytes / sizeof(uint64_t)] = {};
                for (size_t at = 0; at < part_bytes; at += step_bytes) {
                    for (size_t line = 0; line < step_bytes; line += cache_line_bytes) {
                        __builtin_prefetch(part + at + prefetch_bytes + line);
                    }
                    const uint64_t * values = reinterpret_cast<const uint64_t *>(part + at);
                    for (size_t k = 0; k < step_bytes / sizeof(uint64_t); ++k) {
                        sums[k] ^= values[k];
                    }
                }
                for (const uint64_t sum : sums) {
                    all ^= sum;
                }
            }
#pragma omp barrier
#pragma omp master
            end = omp_get_wtime();
        }
        if (i_pass > 0) {
            best_s = std::min(best_s, end - start);
        }
    }
    __asm__ volatile("" : : "r"(all));  // the sums are wanted
    bytes_per_s = static_cast<double>(part_bytes * n_threads) / best_s;
    return {};
}

}  // namespace powerinfer
