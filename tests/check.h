// The whole test framework: CHECK, CHECK_NEAR and check_nmse count failures and print where, main returns check_result().
// One translation unit per test program.
#pragma once

#include <cmath>
#include <cstdio>
#include <vector>

namespace check {

inline int n_checks = 0;
inline int n_failures = 0;
constexpr int max_printed = 50;

inline bool failed(const char * file, int line, const char * text) {
    if (++n_failures <= max_printed) {
        std::fprintf(stderr, "%s:%d: CHECK failed: %s", file, line, text);
    }
    return n_failures <= max_printed;
}

inline bool is_true(bool ok, const char * file, int line, const char * text) {
    ++n_checks;
    if (!ok && failed(file, line, text)) {
        std::fprintf(stderr, "\n");
    }
    return ok;
}

// Equal values (infinities of one sign too) and two NaN are near; one NaN never is.
inline bool is_near(double a, double b, double tolerance, const char * file, int line, const char * text) {
    ++n_checks;
    const bool ok = a == b || (std::isnan(a) && std::isnan(b)) || std::fabs(a - b) <= tolerance;
    if (!ok && failed(file, line, text)) {
        std::fprintf(stderr, ": %.9g and %.9g differ by %.3g, tolerance %.3g\n", a, b, std::fabs(a - b), tolerance);
    }
    return ok;
}

}  // namespace check

// Both evaluate to whether the check held.
#define CHECK(condition) check::is_true(bool(condition), __FILE__, __LINE__, #condition)
#define CHECK_NEAR(a, b, tolerance) check::is_near((a), (b), (tolerance), __FILE__, __LINE__, #a " ~ " #b)

// The sum of squared errors is at most `limit` of the sum of expected squares.
inline void check_nmse(const std::vector<float> & expected, const std::vector<float> & y, double limit) {
    double error = 0.0;
    double size = 0.0;
    for (size_t i = 0; i < expected.size(); ++i) {
        error += (y[i] - expected[i]) * static_cast<double>(y[i] - expected[i]);
        size += expected[i] * static_cast<double>(expected[i]);
    }
    if (!CHECK(error <= limit * size)) {
        std::fprintf(stderr, "error %.3g of %.3g\n", error, size);
    }
}

// Exit code of a test program: 0 when everything held and anything was checked at all.
inline int check_result() {
    std::fprintf(stderr, "%d checks, %d failures\n", check::n_checks, check::n_failures);
    return check::n_failures == 0 && check::n_checks > 0 ? 0 : 1;
}
