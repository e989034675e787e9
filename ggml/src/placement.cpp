// Greedy placement. A price per byte decides each layer on its own; the least price at which all choices fit gives a bound
// on what can be saved. Choices that this bound rules out are dropped, and the few that are left are combined.
#include "placement.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>

namespace powerinfer {

namespace {

// Combinations that a layer may leave to the next, times its choices: bounds the time of the last step.
constexpr size_t max_combinations = 200000;
constexpr size_t min_kept = 64;
constexpr int n_bisections = 100;
// Differences below this share of the whole time are rounding.
constexpr double rounding = 1e-12;

// One number of hot neurons that a layer can have.
struct choice {
    int64_t n_hot;
    uint64_t bytes;
    double saved_s;
};

// All choices of one layer, fewest hot neurons first; the first is none.
struct curve {
    size_t i_layer;
    std::vector<choice> choices;
};

status check(const placement_problem & problem) {
    const auto wrong = [](size_t i_layer, const char * what, double found, const char * expected) {
        std::ostringstream text;
        text << "placement: layer " << i_layer << "'s " << what << " is " << found << "; expected " << expected
             << "; profile the model again or correct the hardware's rates.";
        return status::error(text.str());
    };
    const double n_devices = double(problem.capacity_bytes.size());
    for (size_t i = 0; i < problem.layers.size(); i++) {
        const placement_layer & layer = problem.layers[i];
        if (layer.n_ff < 0 || layer.min_hot < 0) {
            return wrong(i, layer.n_ff < 0 ? "n_ff" : "min_hot", double(std::min(layer.n_ff, layer.min_hot)), "0 or more");
        }
        if (layer.i_device < 0 || layer.i_device >= n_devices) {
            return wrong(i, "i_device", layer.i_device, "one of the devices");
        }
        for (const double seconds : {layer.mean_frequency, layer.cpu.neuron_s, layer.cpu.active_s, layer.gpu.neuron_s,
                                     layer.gpu.active_s, layer.sync_s}) {
            if (!std::isfinite(seconds) || seconds < 0.0) {
                return wrong(i, "cost", seconds, "a finite number from 0 up");
            }
        }
        for (int64_t j = 0; layer.frequency && j < layer.n_ff; j++) {
            if (!std::isfinite(layer.frequency[j]) || layer.frequency[j] < 0.0f) {
                return wrong(i, "frequency", layer.frequency[j], "a finite number from 0 up");
            }
        }
    }
    return {};
}

// Expected active neurons among positions begin .. end - 1.
double expected_active(const placement_layer & layer, int64_t begin, int64_t end) {
    if (!layer.frequency) {
        return layer.mean_frequency * double(end - begin);
    }
    double sum = 0.0;
    for (int64_t i = begin; i < end; i++) {
        sum += layer.frequency[i];
    }
    return sum;
}

double part_s(const neuron_cost & cost, double n_neurons, double n_active) {
    return n_neurons * cost.neuron_s + n_active * cost.active_s;
}

// Seconds of a layer without hot neurons.
double cold_s(const placement_layer & layer) {
    return part_s(layer.cpu, double(layer.n_ff), expected_active(layer, 0, layer.n_ff));
}

curve curve_of(const placement_layer & layer, size_t i_layer) {
    curve out{i_layer, {{0, 0, 0.0}}};
    const double all_cold_s = cold_s(layer);
    const double n_active = expected_active(layer, 0, layer.n_ff);
    double n_hot_active = 0.0;
    for (int64_t n_hot = 0; n_hot < layer.n_ff;) {
        const int64_t end = std::min(n_hot + placement_group, layer.n_ff);
        n_hot_active += expected_active(layer, n_hot, end);
        n_hot = end;
        if (n_hot >= layer.min_hot) {
            const double cpu_s = part_s(layer.cpu, double(layer.n_ff - n_hot), n_active - n_hot_active);
            const double gpu_s = layer.sync_s + part_s(layer.gpu, double(n_hot), n_hot_active);
            out.choices.push_back({n_hot, uint64_t(n_hot) * layer.neuron_bytes, all_cold_s - std::max(cpu_s, gpu_s)});
        }
    }
    return out;
}

// The layers of one device: picked[i] is the index of curves[i]'s choice.
class device_placement {
public:
    device_placement(std::vector<curve> curves, uint64_t capacity_bytes)
        : curves_(std::move(curves)), capacity_bytes_(capacity_bytes), picked_(curves_.size(), 0) {
        for (const curve & layer : curves_) {
            double most_s = 0.0;
            for (const choice & c : layer.choices) {
                most_s = std::max(most_s, c.saved_s);
            }
            scale_s_ += most_s;
        }
    }

    void solve() {
        find_price();
        add_while_it_saves();
        if (bound_s() > saved_s() + rounding * scale_s_) {
            combine();
        }
        fill();
    }

    double saved_s() const {
        double sum = 0.0;
        for (size_t i = 0; i < curves_.size(); i++) {
            sum += at(i).saved_s;
        }
        return sum;
    }

    // No choices that fit save more.
    double bound_s() const {
        double sum = price_ * double(capacity_bytes_);
        for (const curve & layer : curves_) {
            sum += worth(layer.choices[best_at(layer, price_)]);
        }
        return sum;
    }

    void store(std::vector<int64_t> & n_hot) const {
        for (size_t i = 0; i < curves_.size(); i++) {
            n_hot[curves_[i].i_layer] = at(i).n_hot;
        }
    }

private:
    const choice & at(size_t i) const { return curves_[i].choices[picked_[i]]; }

    double worth(const choice & c) const { return c.saved_s - price_ * double(c.bytes); }

    uint64_t used_bytes() const {
        uint64_t sum = 0;
        for (size_t i = 0; i < curves_.size(); i++) {
            sum += at(i).bytes;
        }
        return sum;
    }

    // The choice that is worth most at a price; of equal ones the smallest.
    static size_t best_at(const curve & layer, double price) {
        size_t best = 0;
        double best_s = 0.0;
        for (size_t k = 1; k < layer.choices.size(); k++) {
            const double worth_s = layer.choices[k].saved_s - price * double(layer.choices[k].bytes);
            if (worth_s > best_s) {
                best = k;
                best_s = worth_s;
            }
        }
        return best;
    }

    bool fits_at(double price) {
        for (size_t i = 0; i < curves_.size(); i++) {
            picked_[i] = best_at(curves_[i], price);
        }
        return used_bytes() <= capacity_bytes_;
    }

    // The least price at which the choices fit, and these choices.
    void find_price() {
        price_ = 0.0;
        if (fits_at(0.0)) {
            return;
        }
        double low = 0.0, high = 0.0;  // at `high` nothing is worth its price
        for (const curve & layer : curves_) {
            for (size_t k = 1; k < layer.choices.size(); k++) {
                if (layer.choices[k].bytes > 0) {
                    high = std::max(high, 2.0 * layer.choices[k].saved_s / double(layer.choices[k].bytes));
                }
            }
        }
        for (int i = 0; i < n_bisections; i++) {
            const double middle = 0.5 * (low + high);
            (fits_at(middle) ? high : low) = middle;
        }
        price_ = high;
        fits_at(high);
    }

    // Takes what saves most per byte, again and again, from what still fits.
    void add_while_it_saves() {
        while (true) {
            const uint64_t free_bytes = capacity_bytes_ - used_bytes();
            size_t best_layer = 0, best = 0;
            double best_ratio = 0.0;
            for (size_t i = 0; i < curves_.size(); i++) {
                for (size_t k = picked_[i] + 1; k < curves_[i].choices.size(); k++) {
                    const choice & c = curves_[i].choices[k];
                    const uint64_t bytes = c.bytes - at(i).bytes;
                    const double gain_s = c.saved_s - at(i).saved_s;
                    if (bytes > free_bytes) {
                        break;
                    }
                    if (gain_s > rounding * scale_s_ && gain_s > best_ratio * double(std::max<uint64_t>(bytes, 1))) {
                        best_ratio = gain_s / double(std::max<uint64_t>(bytes, 1));
                        best_layer = i;
                        best = k;
                    }
                }
            }
            if (best_ratio == 0.0) {
                return;
            }
            picked_[best_layer] = best;
        }
    }

    // Looks for choices that save more than those picked, among all that the bound doesn't rule out. When these are too
    // many, the ones that are worth least at the price go.
    void combine() {
        struct state {
            uint64_t bytes;
            double saved_s;
            size_t parent;
            size_t picked;
        };
        const double least_s = saved_s() + rounding * scale_s_;
        const double bound = bound_s();
        const double budget_s = price_ * double(capacity_bytes_);
        double rest_s = bound - budget_s;  // what the layers that follow are worth at most
        std::vector<std::vector<state>> steps = {{{0, 0.0, 0, 0}}};
        for (const curve & layer : curves_) {
            const double best_s = worth(layer.choices[best_at(layer, price_)]);
            rest_s -= best_s;
            std::vector<size_t> left;
            for (size_t k = 0; k < layer.choices.size(); k++) {
                if (bound - best_s + worth(layer.choices[k]) > least_s) {
                    left.push_back(k);
                }
            }
            std::vector<state> next;
            const std::vector<state> & last = steps.back();
            for (size_t s = 0; s < last.size(); s++) {
                for (const size_t k : left) {
                    const choice & c = layer.choices[k];
                    const state made = {last[s].bytes + c.bytes, last[s].saved_s + c.saved_s, s, k};
                    const double most_s = made.saved_s - price_ * double(made.bytes) + budget_s + rest_s;
                    if (made.bytes <= capacity_bytes_ && most_s > least_s) {
                        next.push_back(made);
                    }
                }
            }
            std::sort(next.begin(), next.end(), [](const state & a, const state & b) {
                return a.bytes != b.bytes ? a.bytes < b.bytes : a.saved_s > b.saved_s;
            });
            double most_saved_s = -HUGE_VAL;
            next.erase(std::remove_if(next.begin(), next.end(),
                                      [&](const state & s) {
                                          const bool is_worse = s.saved_s <= most_saved_s;
                                          most_saved_s = std::max(most_saved_s, s.saved_s);
                                          return is_worse;
                                      }),
                       next.end());
            const size_t n_kept = std::max(min_kept, max_combinations / std::max<size_t>(left.size(), 1));
            if (next.size() > n_kept) {
                std::stable_sort(next.begin(), next.end(), [&](const state & a, const state & b) {
                    return a.saved_s - price_ * double(a.bytes) > b.saved_s - price_ * double(b.bytes);
                });
                next.resize(n_kept);
            }
            steps.push_back(std::move(next));
        }
        const std::vector<state> & last = steps.back();
        const auto best = std::max_element(last.begin(), last.end(),
                                           [](const state & a, const state & b) { return a.saved_s < b.saved_s; });
        if (best == last.end() || best->saved_s <= least_s) {
            return;
        }
        size_t i_state = size_t(best - last.begin());
        for (size_t i = curves_.size(); i-- > 0;) {
            picked_[i] = steps[i + 1][i_state].picked;
            i_state = steps[i + 1][i_state].parent;
        }
    }

    // Memory that is left goes to whatever gets no slower by it.
    void fill() {
        uint64_t free_bytes = capacity_bytes_ - used_bytes();
        for (size_t i = 0; i < curves_.size(); i++) {
            while (picked_[i] + 1 < curves_[i].choices.size()) {
                const choice & next = curves_[i].choices[picked_[i] + 1];
                const uint64_t bytes = next.bytes - at(i).bytes;
                if (bytes > free_bytes || next.saved_s < at(i).saved_s - rounding * scale_s_) {
                    break;
                }
                free_bytes -= bytes;
                picked_[i]++;
            }
        }
    }

    std::vector<curve> curves_;
    uint64_t capacity_bytes_;
    std::vector<size_t> picked_;  // (curves)
    double price_ = 0.0;          // seconds per byte
    double scale_s_ = 0.0;        // what all layers could save without a limit
};

}  // namespace

neuron_cost placement_neuron_cost(const row_seconds & rows, double candidate_ratio, bool reads_all) {
    if (reads_all) {
        return {rows.first + rows.second + rows.down, 0.0};
    }
    if (candidate_ratio > 0.0) {
        return {rows.predictor, candidate_ratio * rows.first + rows.second + rows.down};
    }
    return {rows.first, rows.second + rows.down};
}

int64_t placement_min_hot(const placement_layer & layer) {
    double n_active = 0.0;
    for (int64_t n = 0; n < layer.n_ff;) {
        const int64_t end = std::min(n + placement_group, layer.n_ff);
        n_active += expected_active(layer, n, end);
        n = end;
        if (part_s(layer.cpu, double(n), n_active) >= layer.sync_s) {
            return n;
        }
    }
    return layer.n_ff + 1;
}

status place_greedy(const placement_problem & problem, placement_result & out) {
    if (status answer = check(problem); !answer.ok()) {
        return answer;
    }
    out = {};
    out.n_hot.assign(problem.layers.size(), 0);
    double all_cold_s = 0.0, bound_s = 0.0;
    for (const placement_layer & layer : problem.layers) {
        all_cold_s += cold_s(layer);
    }
    for (size_t d = 0; d < problem.capacity_bytes.size(); d++) {
        std::vector<curve> curves;
        for (size_t i = 0; i < problem.layers.size(); i++) {
            if (size_t(problem.layers[i].i_device) == d) {
                curves.push_back(curve_of(problem.layers[i], i));
            }
        }
        device_placement device(std::move(curves), problem.capacity_bytes[d]);
        device.solve();
        device.store(out.n_hot);
        out.saved_s += device.saved_s();
        bound_s += device.bound_s();
    }
    out.token_s = all_cold_s - out.saved_s;
    const double least_s = all_cold_s - bound_s;
    out.gap = out.token_s > least_s && least_s > 0.0 ? out.token_s / least_s - 1.0 : 0.0;
    return {};
}

}  // namespace powerinfer
