// Whether ThreadSanitizer sees OpenMP as it is: `ordered` has no race, only a barrier between threads; `planted` has one. Built with
// POWERINFER_TSAN alone; CTest expects the report of the second and none of the first.
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

// Each thread writes its part and, behind a barrier, reads all others'.
double sum_behind_barrier(std::vector<double> & values) {
    double sum = 0.0;
#pragma omp parallel num_threads(2) reduction(+ : sum)
    {
#pragma omp for nowait
        for (size_t i = 0; i < values.size(); ++i) {
            values[i] = double(i);
        }
#pragma omp barrier
        for (const double value : values) {
            sum += value;
        }
    }
    return sum;
}

int count_unguarded() {
    int n = 0;
#pragma omp parallel num_threads(2)
    ++n;
    return n;
}

}  // namespace

int main(int argc, char ** argv) {
    std::vector<double> values(1000);
    const bool planted = argc > 1 && std::strcmp(argv[1], "planted") == 0;
    std::printf("%g\n", planted ? count_unguarded() : sum_behind_barrier(values));
    return 0;
}
