// Measures kernels alone, on rows of no model, and how fast memory can be read. For `powerinfer bench` only: the engine
// calls nothing here. Exported from the module, so that what is measured is the code that runs.
#pragma once

#include "ffn.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace powerinfer {

// One kernel set that was compiled in.
struct kernel_set_info {
    std::string name;
    bool is_supported = false;           // by this CPU
    std::vector<std::string> row_types;  // ggml type names
};
POWERINFER_EXPORT std::vector<kernel_set_info> kernel_sets();

// dot, add, unpack: one kernel over the rows of one matrix. ffn: gate dots, then up dots and down adds step by step, as a
// token has them.
enum class bench_op { dot, add, unpack, ffn };

// Where a neuron's gate, up and down rows lie. bundle is what ffn_store makes.
enum class bench_layout {
    separate,     // three matrices
    bundle,       // gate rows apart, up and down side by side
    interleaved,  // gate, up and down side by side
};

struct bench_options {
    std::string kernels;       // set by name
    bench_op op = bench_op::dot;
    bench_layout layout = bench_layout::separate;  // ffn only
    double gate_density = 1.0; // ffn only: share of gate rows read, at least `density`
    double density = 1.0;      // share of rows read (ffn: of up and of down rows); 1: all, without an index list
    bool in_cache = false;     // each thread reads the same few rows (cached_bytes) again and again; not for ffn, density 1
    int n_threads = 1;
    int n_repeats = 5;
    double repeat_s = 0.05;    // seconds per repeat, about
};

// A pass reads the rows of one matrix (ffn: of one layer) once.
struct bench_result {
    double pass_s = 0.0;       // seconds per pass: median of the repeats
    double pass_s_min = 0.0;
    double pass_s_max = 0.0;
    double pass_rows = 0.0;    // rows read per pass, mean
    double pass_bytes = 0.0;   // bytes of those rows
    double core_hz = 0.0;      // clock of the core, measured by a chain of dependent additions beside the kernel
};

// Rows of one type, in huge pages: as many layers of three matrices (n_rows, n) as fill the working set.
class POWERINFER_EXPORT kernel_bench {
public:
    kernel_bench();
    ~kernel_bench();

    static constexpr size_t cached_bytes = 256 * 1024;  // rows per thread of in_cache: they stay in the L2 cache
    static constexpr int n_lists = 32;                  // index lists that passes take in turn

    // type_name: a ggml type that quantizes without an importance matrix. n: values per row. n_rows: rows per matrix.
    // working_set_bytes: rounded up to whole layers.
    status create(const std::string & type_name, int64_t n, int64_t n_rows, size_t working_set_bytes);
    status run(const bench_options & options, bench_result & result);

    size_t row_bytes() const { return row_bytes_; }
    size_t working_set_bytes() const;

private:
    int row_type_ = -1;
    int64_t n_ = 0;
    int64_t n_rows_ = 0;
    int64_t n_layers_ = 0;
    size_t row_bytes_ = 0;
    size_t stride_bytes_ = 0;  // a row's room: whole cache lines
    int64_t i_next_ = 0;       // pass: calls go on where the last one stopped, not at rows that it left in the cache
    huge_block rows_;          // (n_layers, 3 * n_rows) rows, any layout
};

// How often each of n_rows rows, hot first, is active, with mean `density`: most of the frequency falls off exponentially
// (0.97 exp(-p/900) + 0.003 at 8 % of 11008, as measured on ReLU models). density in (0, 1].
POWERINFER_EXPORT std::vector<double> skewed_frequencies(int64_t n_rows, double density);

// Reads n_bytes of huge pages with n_threads threads, each its own part: the best of several passes.
POWERINFER_EXPORT status read_bandwidth(int n_threads, size_t n_bytes, double & bytes_per_s);

}  // namespace powerinfer
