// placement.cpp at its edges: nothing to place, no room, minima, group ends, wrong numbers, devices. Random cases against
// brute force and the MILP are in test_placement.py.
#include "placement.h"

#include "check.h"

#include <algorithm>
#include <limits>
#include <random>
#include <string>

using namespace powerinfer;

namespace {

constexpr double tolerance = 1e-12;  // relative to costs of about 1: sums in another order

placement_layer make_layer(int64_t n_ff, const std::vector<float> & frequency = {}) {
    placement_layer layer;
    layer.n_ff = n_ff;
    layer.frequency = frequency.empty() ? nullptr : frequency.data();
    layer.neuron_bytes = 100;
    layer.cpu = {1.0, 10.0};
    layer.gpu = {0.5, 0.0};
    return layer;
}

placement_result placed(const placement_problem & problem) {
    placement_result result;
    const status answer = place_greedy(problem, result);
    if (!CHECK(answer.ok())) {
        std::fprintf(stderr, "  %s\n", answer.text().c_str());
    }
    return result;
}

void expect_error(const placement_problem & problem, const std::string & part) {
    placement_result result;
    const status answer = place_greedy(problem, result);
    if (!CHECK(!answer.ok() && answer.text().find(part) != std::string::npos)) {
        std::fprintf(stderr, "  %s\n", answer.text().c_str());
    }
}

void test_neuron_cost() {
    const row_seconds rows = {1.0, 2.0, 4.0, 0.5};
    neuron_cost cost = placement_neuron_cost(rows, 0.0, false);
    CHECK(cost.neuron_s == 1.0 && cost.active_s == 6.0);
    cost = placement_neuron_cost(rows, 1.5, false);
    CHECK(cost.neuron_s == 0.5 && cost.active_s == 7.5);
    cost = placement_neuron_cost(rows, 1.5, true);
    CHECK(cost.neuron_s == 7.0 && cost.active_s == 0.0);
}

void test_nothing_to_place() {
    CHECK(placed({{}, {}}).n_hot.empty());
    CHECK(placed({{}, {1000}}).token_s == 0.0);
    const placement_result result = placed({{make_layer(0), make_layer(64)}, {1000000}});
    CHECK(result.n_hot == std::vector<int64_t>({0, 64}));
    CHECK_NEAR(result.token_s, 32.0, tolerance);
    CHECK_NEAR(result.saved_s, 64 * 11.0 - 32.0, tolerance * 1000);
}

// BUG_CASES 6: no room is an empty split.
void test_no_room() {
    for (const uint64_t capacity : {uint64_t(0), uint64_t(6399)}) {
        const placement_result result = placed({{make_layer(1000), make_layer(1000)}, {capacity}});
        CHECK(result.n_hot == std::vector<int64_t>({0, 0}));
        CHECK(result.saved_s == 0.0);
        CHECK_NEAR(result.token_s, 22000.0, tolerance * 1e5);
    }
}

// BUG_CASES 4: n_ff that isn't a whole number of groups.
void test_group_ends() {
    for (const int64_t n_ff : {31, 64, 65, 300, 1000, 1856}) {
        placement_layer layer = make_layer(n_ff);
        layer.gpu.neuron_s = 0.0;
        const uint64_t all = uint64_t(n_ff) * layer.neuron_bytes;
        CHECK(placed({{layer}, {all}}).n_hot[0] == n_ff);
        CHECK(placed({{layer}, {all - 1}}).n_hot[0] == (n_ff - 1) / placement_group * placement_group);
        for (uint64_t capacity = 0; capacity < all; capacity += 1700) {
            const int64_t n_hot = placed({{layer}, {capacity}}).n_hot[0];
            CHECK(n_hot % placement_group == 0 && uint64_t(n_hot) * layer.neuron_bytes <= capacity);
            CHECK(uint64_t(n_hot + placement_group) * layer.neuron_bytes > capacity);  // BUG_CASES 8
        }
    }
}

// BUG_CASES 7: 0 hot neurons or at least the minimum.
void test_minimum() {
    placement_layer layer = make_layer(256);
    layer.min_hot = 100;
    const std::vector<placement_layer> layers(4, layer);
    // room for 64 neurons of each layer, or the least whole number of groups (128) of two
    const placement_result result = placed({layers, {4 * 64 * 100}});
    CHECK(std::count(result.n_hot.begin(), result.n_hot.end(), 0) == 2);
    CHECK(std::count(result.n_hot.begin(), result.n_hot.end(), 128) == 2);
    CHECK(placed({layers, {127 * 100}}).saved_s == 0.0);
    CHECK(placed({{layer}, {127 * 100}}).n_hot[0] == 0);

    layer.sync_s = 700.0;  // 64 neurons save 704 seconds of the CPU
    CHECK(placement_min_hot(layer) == 64);
    layer.sync_s = 705.0;
    CHECK(placement_min_hot(layer) == 128);
    layer.sync_s = 256 * 11.0;
    CHECK(placement_min_hot(layer) == 256);
    layer.sync_s += 1.0;
    CHECK(placement_min_hot(layer) == 257);
    layer.min_hot = placement_min_hot(layer);
    CHECK(placed({{layer}, {1000000}}).n_hot[0] == 0);
}

// BUG_CASES 5: a layer without activations comes last; memory that is left is for it too.
void test_zero_layer() {
    const std::vector<float> zeros(256, 0.0f), some(256, 0.5f);
    for (const double neuron_s : {0.0, 1.0}) {
        placement_layer dead = make_layer(256, zeros), live = make_layer(256, some);
        dead.cpu.neuron_s = live.cpu.neuron_s = neuron_s;
        dead.gpu = live.gpu = {0.0, 0.0};
        CHECK(placed({{dead, live}, {25600}}).n_hot == std::vector<int64_t>({0, 256}));
        CHECK(placed({{dead, live}, {25600 + 6400}}).n_hot == std::vector<int64_t>({64, 256}));
    }
}

void test_ties_and_repeats() {
    const std::vector<placement_layer> layers(5, make_layer(192));
    const placement_result first = placed({layers, {100 * 64 * 7}});
    int64_t n_hot = 0;
    for (const int64_t n : first.n_hot) {
        n_hot += n;
    }
    CHECK(n_hot == 64 * 7);
    for (int i = 0; i < 3; i++) {
        CHECK(placed({layers, {100 * 64 * 7}}).n_hot == first.n_hot);
    }
}

// The device is slower than the CPU: memory stays unused rather than a token getting slower.
void test_slow_device() {
    placement_layer layer = make_layer(1024);
    layer.gpu = {100.0, 0.0};
    const placement_result result = placed({{layer}, {1 << 30}});
    CHECK(result.n_hot[0] == 64);  // 960 neurons on the CPU take 10560 seconds, 64 on the device 6400
    CHECK_NEAR(result.token_s, 10560.0, tolerance * 1e5);
    layer.gpu = {1000.0, 0.0};
    CHECK(placed({{layer}, {1 << 30}}).n_hot[0] == 0);
}

void test_devices() {
    std::vector<placement_layer> layers(4, make_layer(256));
    for (size_t i = 0; i < layers.size(); i++) {
        layers[i].i_device = int32_t(i / 2);
    }
    CHECK(placed({layers, {1 << 20, 0}}).n_hot == std::vector<int64_t>({256, 256, 0, 0}));
    CHECK(placed({layers, {0, 25600}}).n_hot[2] + placed({layers, {0, 25600}}).n_hot[3] == 256);
    layers[3].i_device = 2;
    expect_error({layers, {1, 1}}, "layer 3's i_device is 2");
    layers[3].i_device = -1;
    expect_error({layers, {1, 1}}, "layer 3's i_device is -1");
}

void test_wrong_numbers() {
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (const float wrong : {nan, inf, -0.5f}) {
        std::vector<float> frequency(100, 0.5f);
        frequency[99] = wrong;
        expect_error({{make_layer(100), make_layer(100, frequency)}, {1000}}, "layer 1's frequency is ");
        placement_layer layer = make_layer(100);
        layer.gpu.active_s = wrong;
        expect_error({{layer}, {1000}}, "layer 0's cost is ");
    }
    placement_layer layer = make_layer(100);
    layer.n_ff = -1;
    expect_error({{layer}, {1000}}, "layer 0's n_ff is -1");
}

// The size that must answer in seconds. What it says of the gap is true by the bound alone.
void test_large() {
    constexpr int n_layer = 80;
    constexpr int64_t n_ff = 28672;
    std::mt19937 random(1);
    std::vector<std::vector<float>> frequencies;
    placement_problem problem;
    for (int i = 0; i < n_layer; i++) {
        std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
        std::vector<float> frequency(n_ff);
        for (float & f : frequency) {
            f = std::pow(uniform(random), 4.0f);
        }
        std::sort(frequency.begin(), frequency.end(), std::greater<>());
        frequencies.push_back(std::move(frequency));
    }
    for (int i = 0; i < n_layer; i++) {
        placement_layer layer = make_layer(n_ff, frequencies[size_t(i)]);
        layer.neuron_bytes = i % 2 ? 24588 : 18444;
        layer.sync_s = 1000.0;
        layer.min_hot = placement_min_hot(layer);
        problem.layers.push_back(layer);
    }
    problem.capacity_bytes = {uint64_t(8) << 30};
    const placement_result result = placed(problem);
    uint64_t used = 0;
    for (int i = 0; i < n_layer; i++) {
        used += uint64_t(result.n_hot[size_t(i)]) * problem.layers[size_t(i)].neuron_bytes;
    }
    CHECK(used <= problem.capacity_bytes[0] && used + 24588 * placement_group > problem.capacity_bytes[0]);
    CHECK(result.gap < 0.001);
}

}  // namespace

int main() {
    test_neuron_cost();
    test_nothing_to_place();
    test_no_room();
    test_group_ends();
    test_minimum();
    test_zero_layer();
    test_ties_and_repeats();
    test_slow_device();
    test_devices();
    test_wrong_numbers();
    test_large();
    return check_result();
}
