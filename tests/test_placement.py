"""placement.py and placement.cpp: MILP, greedy choice and brute force agree, and the cases that other solvers got wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from powerinfer_py import _core
from powerinfer_py.errors import OptionError
from powerinfer_py.tools.hardware import Cpu, Gpu
from powerinfer_py.tools.placement import (
    GROUP,
    NeuronRows,
    PlacementLayer,
    PlacementProblem,
    SolveOptions,
    cost_curves,
    least_hot,
    make_layer,
    neuron_costs,
    place_greedy,
    solve,
)

EXACT = SolveOptions(gap=0.0)
# Sums of the same seconds in another order.
ROUNDING = 1e-9
# How close the greedy choice must come to the MILP's token time.
GREEDY_SHARE = 0.01


def random_layer(rng: np.random.Generator, n_ff: int, i_device: int = 0, sparse: bool = False) -> PlacementLayer:
    """A layer with rates, row bytes and a minimum of its own."""
    n_bytes = 4 * int(rng.integers(50, 300))
    row_s = 1e-9 * n_bytes * rng.uniform(0.5, 2)
    cpu = (row_s * rng.uniform(0, 0.5), row_s)
    ratio = rng.uniform(0.05, 0.8)
    layer = PlacementLayer(
        n_ff=n_ff,
        frequency=np.sort(rng.random(n_ff) ** rng.uniform(1, 8)).astype(np.float32)[::-1],
        neuron_bytes=n_bytes,
        cpu=cpu,
        gpu=(cpu[0] * ratio, cpu[1] * ratio) if sparse else (row_s * ratio, 0.0),
        sync_s=row_s * rng.uniform(0, 40),
        host_bytes=n_bytes,
        i_device=i_device,
    )
    return replace(layer, min_hot=int(rng.choice([0, 100, least_hot(layer)])))


def even_layers(n_layer: int, n_ff: int, **changes: object) -> tuple[PlacementLayer, ...]:
    """Equal layers of 100 bytes per neuron, with frequencies that fall from 1 to 0."""
    frequency = np.linspace(1, 0, n_ff, dtype=np.float32)
    layer = PlacementLayer(n_ff, frequency, 100, (1e-6, 9e-6), (1e-6, 0.0), host_bytes=100)
    return (replace(layer, **changes),) * n_layer


def total_bytes(layers: Sequence[PlacementLayer]) -> int:
    return sum(layer.n_ff * layer.neuron_bytes for layer in layers)


def token_s(problem: PlacementProblem, n_hot: Sequence[int]) -> float:
    """Seconds of a token, counted neuron by neuron."""
    total = 0.0
    for layer, n in zip(problem.layers, n_hot):
        frequency = np.asarray(layer.frequency, np.float64)
        cpu = sum(layer.cpu[0] + layer.cpu[1] * f for f in frequency[n:])
        gpu = sum(layer.gpu[0] + layer.gpu[1] * f for f in frequency[:n])
        total += max(cpu, gpu + (layer.sync_s if n else 0.0))
    return total


def check_placement(problem: PlacementProblem, n_hot: Sequence[int]) -> None:
    """Whole groups or all, minima kept, every device and the host within their memory."""
    used = [0] * len(problem.capacity_bytes)
    cold = 0
    for layer, n in zip(problem.layers, n_hot):
        assert n == layer.n_ff or n % GROUP == 0
        assert n == 0 or layer.min_hot <= n <= layer.n_ff
        used[layer.i_device] += n * layer.neuron_bytes
        cold += (layer.n_ff - n) * layer.host_bytes
    assert all(n <= capacity for n, capacity in zip(used, problem.capacity_bytes))
    assert problem.host_bytes is None or cold <= problem.host_bytes


def brute_force(problem: PlacementProblem) -> float:
    """Least seconds of a token over all placements that fit."""
    curves = cost_curves(problem)
    best = np.inf
    for picked in itertools.product(*(range(len(curve.n_hot)) for curve in curves)):
        free = list(problem.capacity_bytes)
        cold = 0
        for layer, curve, k in zip(problem.layers, curves, picked):
            free[layer.i_device] -= int(curve.bytes[k])
            cold += int(curve.cold_bytes[k])
        if min(free) >= 0 and (problem.host_bytes is None or cold <= problem.host_bytes):
            best = min(best, sum(curve.layer_s[k] for curve, k in zip(curves, picked)))
    return best


def random_problem(rng: np.random.Generator, n_layers: Sequence[int], shapes: Sequence[int]) -> PlacementProblem:
    n_devices = int(rng.integers(1, 3))
    layers = tuple(
        random_layer(rng, int(rng.choice(shapes)), int(rng.integers(n_devices)), bool(rng.integers(2)))
        for _ in range(int(rng.choice(n_layers)))
    )
    capacity = tuple(int(total_bytes(layers) * rng.uniform(0, 0.8)) for _ in range(n_devices))
    return PlacementProblem(layers, capacity)


# ---- The same answer three ways -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_greedy_and_milp_equal_brute_force_on_small_cases(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, (1, 2, 3, 4), (31, 64, 192, 256, 300, 500))
    best = brute_force(problem)
    for found in (place_greedy(problem), solve(problem, EXACT)):
        check_placement(problem, found.n_hot)
        assert found.token_s == pytest.approx(best, rel=ROUNDING)
        assert found.token_s == pytest.approx(token_s(problem, found.n_hot), rel=ROUNDING)
        assert found.cold_s == pytest.approx(token_s(problem, [0] * len(problem.layers)), rel=ROUNDING)


@pytest.mark.parametrize("seed", range(25))
def test_greedy_is_within_one_percent_of_milp(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    problem = random_problem(rng, (6, 12, 24), (256, 1000, 1856, 4096))
    greedy, exact = place_greedy(problem), solve(problem)
    check_placement(problem, greedy.n_hot)
    check_placement(problem, exact.n_hot)
    assert greedy.token_s <= exact.token_s * (1 + GREEDY_SHARE)
    assert exact.token_s <= greedy.token_s * (1 + SolveOptions.gap)
    # both bounds are true: no placement is faster than them
    assert greedy.token_s / (1 + greedy.gap) <= exact.token_s * (1 + ROUNDING)
    assert exact.token_s / (1 + exact.gap) <= greedy.token_s * (1 + ROUNDING)


def test_host_memory_is_kept_to() -> None:
    for seed in range(20):
        rng = np.random.default_rng(200 + seed)
        problem = random_problem(rng, (2, 3), (192, 300, 500))
        layers = tuple(replace(layer, min_hot=0, gpu=(5 * sum(layer.cpu), 0.0)) for layer in problem.layers)
        capacity = tuple(2 * n for n in problem.capacity_bytes)
        problem = PlacementProblem(layers, capacity, int(total_bytes(layers) * rng.uniform(0.1, 1)))
        best = brute_force(problem)
        if np.isinf(best):
            with pytest.raises(OptionError, match="host memory: the cold neurons don't fit"):
                solve(problem, EXACT)
            continue
        found = solve(problem, EXACT)
        check_placement(problem, found.n_hot)
        assert found.token_s == pytest.approx(best, rel=ROUNDING)


def test_80_layers_of_28672_neurons_take_seconds() -> None:
    """35,840 groups. The limit is the search's own; well under a second was seen."""
    rng = np.random.default_rng(1)
    layers = tuple(replace(random_layer(rng, 28672, i // 40), neuron_bytes=24588) for i in range(80))
    problem = PlacementProblem(layers, (int(0.3 * total_bytes(layers) / 2),) * 2)
    found = solve(problem)
    check_placement(problem, found.n_hot)
    assert found.method == "milp" and found.gap <= SolveOptions.gap and found.seconds < SolveOptions.time_limit_s
    greedy = place_greedy(problem)
    assert greedy.token_s <= found.token_s * (1 + GREEDY_SHARE) and greedy.seconds < SolveOptions.time_limit_s


# ---- Costs ----------------------------------------------------------------------------------------------------------


def test_costs_follow_rows_rates_and_predictor() -> None:
    notes: list[str] = []
    cpu = Cpu("cpu", 1 << 40, 100.0, {"f16": 50.0, "q4_0": 25.0}, 8)
    gpu = Gpu("gpu", 1 << 30, 1000.0, {"f16": 500.0}, 1.0, 1.0, 2.0)
    rows = NeuronRows(("f16", 100.0), ("f16", 200.0), ("q4_0", 50.0))
    assert neuron_costs(rows, cpu, notes.append) == (2.0, 6.0)
    with_predictor = replace(rows, predictor=("q8_0", 10.0))
    assert neuron_costs(with_predictor, cpu, notes.append, candidate_ratio=1.5) == (pytest.approx(0.1), 9.0)
    assert notes == ["cpu: no rate of q8_0 rows in the hardware file; its memory's bandwidth is used for them."]
    del notes[:]
    assert neuron_costs(with_predictor, gpu, notes.append, reads_all=True) == (pytest.approx(0.65), 0.0)
    assert len(notes) == 1 and "q4_0" in notes[0]
    ungated = NeuronRows(("f16", 100.0), None, ("f16", 100.0))
    assert neuron_costs(ungated, cpu, notes.append) == (2.0, 2.0)
    # 64 neurons that are always active save 64 * 8 s of the CPU
    for round_trip_s, expected in ((512.0, 64), (513.0, 128), (1024.0, 128), (1601.0, 201)):
        slow = replace(gpu, round_trip_s=round_trip_s)
        layer = make_layer(rows, np.ones(200), cpu, slow, notes.append, neuron_bytes=360)
        assert (layer.min_hot, layer.sync_s, layer.host_bytes) == (expected, round_trip_s, 350)


# ---- Reported cases -------------------------------------------------------------------------------------------------


def test_neurons_of_a_layer_are_chosen_by_that_layers_statistics() -> None:
    """BUG_CASES 1: of 12 layers, the one whose statistics are hottest gets the memory, whichever it is."""
    for hottest in range(12):
        layers = [replace(layer, frequency=layer.frequency * np.float32(0.1)) for layer in even_layers(12, 256)]
        layers[hottest] = even_layers(1, 256)[0]
        problem = PlacementProblem(tuple(layers), (100 * 192,))
        for found in (place_greedy(problem), solve(problem)):
            assert [n > 0 for n in found.n_hot] == [i == hottest for i in range(12)]


@pytest.mark.parametrize("n_ff", [1000, 1856, 300, 31])
def test_last_group_is_shorter(n_ff: int) -> None:
    """BUG_CASES 4."""
    layers = even_layers(2, n_ff, gpu=(0.0, 0.0))
    for share in (0.0, 0.3, 0.99, 1.0):
        problem = PlacementProblem(layers, (int(share * total_bytes(layers)),))
        for found in (place_greedy(problem), solve(problem)):
            check_placement(problem, found.n_hot)
            if share == 1.0:
                assert found.n_hot == (n_ff, n_ff)


def test_layer_without_activations_gets_memory_only_when_it_is_left_over() -> None:
    """BUG_CASES 5."""
    for neuron_s in (0.0, 1e-6):
        layers = list(even_layers(12, 256, cpu=(neuron_s, 9e-6), gpu=(0.0, 0.0)))
        for i, layer in enumerate(layers):
            layers[i] = replace(layer, frequency=np.maximum(layer.frequency, np.float32(0.01)) * np.float32(i != 4))
        for n_groups in range(0, 49):
            problem = PlacementProblem(tuple(layers), (n_groups * GROUP * 100,))
            for found in (place_greedy(problem), solve(problem, EXACT)):
                assert sum(found.n_hot) == n_groups * GROUP
                assert found.n_hot[4] == max(n_groups - 44, 0) * GROUP


def test_equal_counts_are_placed_the_same_way_each_time_and_for_each_type() -> None:
    """BUG_CASES 5: ties, int64 and float."""
    layers = even_layers(6, 320)
    found = set()
    for dtype in (np.int64, np.float64, np.float32, np.float32):
        equal = tuple(replace(layer, frequency=np.ones(320, dtype)) for layer in layers)
        problem = PlacementProblem(equal, (100 * GROUP * 11,))
        found.add((place_greedy(problem).n_hot, solve(problem).n_hot))
    assert len(found) == 1
    assert all(sum(n_hot) == GROUP * 11 for n_hot in found.pop())


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -0.5])
def test_impossible_statistics_and_costs_are_refused(wrong: float) -> None:
    """BUG_CASES 5."""
    layers = list(even_layers(3, 128))
    frequency = layers[1].frequency.copy()
    frequency[77] = wrong
    layers[1] = replace(layers[1], frequency=frequency)
    for call in (place_greedy, solve):
        with pytest.raises(OptionError, match=r"layer 1's frequency at position 77 is .*; expected a finite number"):
            call(PlacementProblem(tuple(layers), (1000,)))
        with pytest.raises(OptionError, match=r"layer 0's costs are .*; expected finite numbers"):
            call(PlacementProblem(even_layers(1, 128, sync_s=wrong), (1000,)))
    with pytest.raises(OptionError, match="layer 0 has frequencies of shape"):
        solve(PlacementProblem((replace(even_layers(1, 128)[0], n_ff=100),), (1000,)))
    with pytest.raises(OptionError, match="layer 0 is for device 1; expected 0"):
        solve(PlacementProblem(even_layers(1, 128, i_device=1), (1000,)))


def test_no_memory_is_an_empty_split() -> None:
    """BUG_CASES 6."""
    for layers, capacity in (
        (even_layers(4, 256), 0),
        (even_layers(4, 256), 6399),
        (even_layers(4, 256, min_hot=128), 12799),
    ):
        problem = PlacementProblem(layers, (capacity,))
        for found in (place_greedy(problem), solve(problem)):
            assert found.n_hot == (0, 0, 0, 0) and found.token_s == found.cold_s and found.used_bytes == (0,)


def test_no_time_is_the_greedy_split_with_its_gap() -> None:
    """BUG_CASES 6."""
    rng = np.random.default_rng(5)
    layers = tuple(random_layer(rng, 4096) for _ in range(40))
    problem = PlacementProblem(layers, (total_bytes(layers) // 3,))
    found, greedy = solve(problem, SolveOptions(time_limit_s=0.0)), place_greedy(problem)
    assert found.method == "greedy" and found.n_hot == greedy.n_hot
    assert 0 <= found.gap == greedy.gap < GREEDY_SHARE
    assert any("the search ended at its time limit of 0 s; the placement is within" in text for text in found.notes)
    with pytest.raises(OptionError, match="host memory: no placement that leaves at most 0 bytes"):
        solve(replace(problem, host_bytes=0), SolveOptions(time_limit_s=0.0))


def test_no_layer_has_fewer_hot_neurons_than_are_worth_a_transfer() -> None:
    """BUG_CASES 7: room for 10 neurons per layer, 64 are needed."""
    layers = even_layers(12, 256, min_hot=32, sync_s=5e-5)
    problem = PlacementProblem(layers, (12 * 10 * 100,))
    greedy, exact = place_greedy(problem), solve(problem, EXACT)
    for found in (greedy, exact):
        check_placement(problem, found.n_hot)
        assert sorted(found.n_hot) == [0] * 11 + [64]
    assert exact.token_s <= greedy.token_s * (1 + ROUNDING)


@pytest.mark.parametrize("ratio", [0.375, 2, 2.6875, 3.5, 4])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("row_bytes", [2.0, 18 / 32])
def test_memory_is_used_up_to_one_group(ratio: float, gated: bool, row_bytes: float) -> None:
    """BUG_CASES 8: n_ff / n_embd, F16 and Q4_0."""
    n_embd = 512
    n_bytes = int((3 if gated else 2) * row_bytes * n_embd)
    layers = even_layers(6, int(ratio * n_embd), neuron_bytes=n_bytes, gpu=(1e-7, 0.0), sync_s=1e-6)
    for share in (0.05, 0.35, 0.8):
        problem = PlacementProblem(layers, (int(share * total_bytes(layers)),))
        for found in (place_greedy(problem), solve(problem)):
            check_placement(problem, found.n_hot)
            assert found.used_bytes[0] > problem.capacity_bytes[0] - GROUP * n_bytes


def test_memory_stays_unused_where_the_device_would_be_slower_and_a_note_says_so() -> None:
    layers = even_layers(4, 1024, gpu=(1e-5, 0.0))
    problem = PlacementProblem(layers, (total_bytes(layers),))
    for found in (place_greedy(problem), solve(problem, EXACT)):
        assert 0 < found.used_bytes[0] < problem.capacity_bytes[0]
        assert found.token_s == pytest.approx(brute_force(problem), rel=ROUNDING)
    assert "MiB for hot neurons stay unused, because by these rates more of them make a token slower" in found.notes[0]


def test_more_memory_is_never_slower() -> None:
    rng = np.random.default_rng(9)
    layers = tuple(random_layer(rng, 1000) for _ in range(8))
    times = [
        [call(PlacementProblem(layers, (int(share * total_bytes(layers)),))).token_s for share in np.linspace(0, 1, 12)]
        for call in (place_greedy, lambda problem: solve(problem, EXACT))
    ]
    for row in times:
        assert all(b <= a * (1 + ROUNDING) for a, b in zip(row, row[1:]))


def test_core_takes_only_arrays_as_they_are() -> None:
    arrays = {
        "n_ff": np.array([64], np.int64),
        "frequency": np.ones(64, np.float32),
        "neuron_bytes": np.array([1], np.uint64),
        "cpu_s": np.array([[1.0, 0.0]]),
        "gpu_s": np.array([[0.5, 0.0]]),
        "sync_s": np.zeros(1),
        "min_hot": np.zeros(1, np.int64),
        "i_device": np.zeros(1, np.int32),
        "capacity_bytes": np.array([64], np.uint64),
    }
    assert _core.place_greedy(**arrays)["n_hot"].tolist() == [64]
    with pytest.raises(TypeError):
        _core.place_greedy(**{**arrays, "frequency": np.ones(64)})
    for name, wrong in (("frequency", np.ones(63, np.float32)), ("sync_s", np.zeros(2)), ("n_ff", np.array([-1]))):
        with pytest.raises(OptionError, match="placement: "):
            _core.place_greedy(**{**arrays, name: wrong})
