"""Which neurons go to which device: the time of one decoded token as hot neurons are added, and the MILP that shares memory out.

The maths stand at `cost_curves` and `solve`; ggml/src/placement.h has the same costs, and the greedy choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

# Loads the libraries that _core is linked to.
import llama_cpp  # noqa: F401
import numpy as np

from powerinfer_py import _core
from powerinfer_py.errors import OptionError

from .arguments import need_packages
from .hardware import Gpu, Processor

GROUP = 64  # neurons that move together (SOSP'24, 6.3.3)
# Seconds relative to the whole token's, below which differences are rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class SolveOptions:
    """How long the MILP is searched, with the defaults."""

    time_limit_s: float = 10.0
    gap: float = 1e-4  # of a token's time, at which the search ends


@dataclass(frozen=True)
class NeuronRows:
    """What reading one neuron costs: (ggml type name, bytes) of each row.

    Attributes:
        first: the row that says whether the neuron is active: gate, or up when ungated.
        second: up; None when ungated.
        down: of the neuron-major down projection.
        predictor: its share of fc1 and fc2; None without predictor.
    """

    first: tuple[str, float]
    second: tuple[str, float] | None
    down: tuple[str, float]
    predictor: tuple[str, float] | None = None


@dataclass(frozen=True, eq=False)
class PlacementLayer:
    """One layer, as the placement sees it.

    Attributes:
        n_ff: neurons; 0: nothing to place.
        frequency: (n_ff,) share of tokens in which a neuron is active, in position order, hot first.
        neuron_bytes: that a hot neuron takes on its device.
        cpu: (neuron_s, active_s): seconds per neuron, and per active neuron, on the CPU.
        gpu: the same on the device.
        sync_s: seconds for handing a token over and back, when the layer has hot neurons.
        min_hot: hot neurons are 0 or at least so many.
        host_bytes: that a cold neuron takes in host memory.
        i_device: the layer's device.
    """

    n_ff: int
    frequency: np.ndarray
    neuron_bytes: int
    cpu: tuple[float, float]
    gpu: tuple[float, float]
    sync_s: float = 0.0
    min_hot: int = 0
    host_bytes: int = 0
    i_device: int = 0


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """What is to be placed.

    Attributes:
        layers: one per layer of the model.
        capacity_bytes: of each device, memory for hot neurons.
        host_bytes: memory for cold neurons; None: enough.
    """

    layers: tuple[PlacementLayer, ...]
    capacity_bytes: tuple[int, ...]
    host_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class Curve:
    """One layer's choices, fewest hot neurons first; the first is none.

    Attributes:
        n_hot: (n_choices,) int64 neurons.
        bytes: (n_choices,) int64 on the device.
        cold_bytes: (n_choices,) int64 in host memory.
        cpu_s: (n_choices,) seconds of the CPU's part.
        gpu_s: (n_choices,) seconds of the device's part, synchronisation included.
        layer_s: (n_choices,) seconds of the layer.
    """

    n_hot: np.ndarray
    bytes: np.ndarray
    cold_bytes: np.ndarray
    cpu_s: np.ndarray
    gpu_s: np.ndarray
    layer_s: np.ndarray


@dataclass(frozen=True)
class Placement:
    """What was chosen.

    Attributes:
        n_hot: per layer, hot neurons: whole groups, or all.
        token_s: seconds per token of all FFNs.
        cold_s: the same without hot neurons.
        gap: token_s is at most this share above the least possible.
        used_bytes: per device, of hot neurons.
        method: `milp`, or `greedy` when that found no better one in time.
        seconds: that the search took.
        notes: what the reader should know.
    """

    n_hot: tuple[int, ...]
    token_s: float
    cold_s: float
    gap: float
    used_bytes: tuple[int, ...]
    method: str
    seconds: float
    notes: tuple[str, ...] = ()


def neuron_costs(
    rows: NeuronRows,
    processor: Processor,
    note: Callable[[str], None],
    *,
    candidate_ratio: float = 1.0,
    reads_all: bool = False,
) -> tuple[float, float]:
    """Seconds that a processor takes per neuron, and per active neuron.

    Args:
        rows: what is read.
        processor: whose rates count.
        note: receives the fallback for a type without a rate.
        candidate_ratio: candidates per active neuron, where there is a predictor.
        reads_all: every neuron is computed, active or not, without the predictor: devices other than CUDA.

    Returns:
        (neuron_s, active_s).
    """

    def seconds(row: tuple[str, float] | None) -> float:
        return row[1] / processor.row_rate(row[0], note) if row is not None and row[1] else 0.0

    return _core.placement_neuron_cost(
        seconds(rows.first),
        seconds(rows.second),
        seconds(rows.down),
        0.0 if reads_all else seconds(rows.predictor),
        candidate_ratio if rows.predictor is not None else 0.0,
        reads_all,
    )


def make_layer(
    rows: NeuronRows,
    frequency: np.ndarray,
    cpu: Processor,
    gpu: Gpu,
    note: Callable[[str], None],
    *,
    neuron_bytes: int,
    candidate_ratio: float = 1.0,
    reads_all: bool = True,
    i_device: int = 0,
) -> PlacementLayer:
    """A layer from its rows and the hardware's rates, with the paper's least number of hot neurons.

    Args:
        rows: what reading one neuron costs.
        frequency: (n_ff,) share of tokens in which a neuron is active, hot first.
        cpu: the CPU.
        gpu: the layer's device.
        note: receives the fallback for a type without a rate.
        neuron_bytes: that a hot neuron takes on the device.
        candidate_ratio: candidates per active neuron, where there is a predictor.
        reads_all: the device computes every hot neuron; false: only active ones (CUDA).
        i_device: the device's number.

    Returns:
        The layer; `min_hot` is the least number of neurons whose CPU time is as much as sync_s.

    Source: PowerInfer, SOSP'24, section 6.3.2, inequalities 4, 7 and 8 (the least number of neurons).
    """
    cpu_cost = neuron_costs(rows, cpu, note, candidate_ratio=candidate_ratio)
    gpu_cost = neuron_costs(rows, gpu, note, candidate_ratio=candidate_ratio, reads_all=reads_all)
    layer = PlacementLayer(
        n_ff=len(frequency),
        frequency=np.asarray(frequency, np.float32),
        neuron_bytes=neuron_bytes,
        cpu=cpu_cost,
        gpu=gpu_cost,
        sync_s=gpu.round_trip_s,
        host_bytes=int(sum(row[1] for row in (rows.first, rows.second, rows.down) if row is not None)),
        i_device=i_device,
    )
    return replace(layer, min_hot=least_hot(layer))


def least_hot(layer: PlacementLayer) -> int:
    """The least number of hot neurons whose CPU time is as much as the synchronisation that they need.

    Args:
        layer: the layer; its min_hot isn't read.

    Returns:
        A whole number of groups, or n_ff; n_ff + 1 when all of them aren't worth it.
    """
    curve = _curve(replace(layer, min_hot=0))
    worth = np.flatnonzero(curve.cpu_s[0] - curve.cpu_s >= layer.sync_s)
    worth = worth[worth > 0]
    return int(curve.n_hot[worth[0]]) if len(worth) else layer.n_ff + 1


def cost_curves(problem: PlacementProblem) -> list[Curve]:
    """What each number of hot neurons costs in each layer, for one decoded token.

    Layer l has groups g = 1, 2, .. of 64 neurons in position order (the last is shorter): n_g neurons, of which
    w_g = sum of their frequencies are active. With the first k groups hot:

        cpu_s(l, k)   = sum over g > k of  n_g * cpu.neuron_s + w_g * cpu.active_s
        gpu_s(l, k)   = sync_s * [k > 0] + sum over g <= k of  n_g * gpu.neuron_s + w_g * gpu.active_s
        layer_s(l, k) = max(cpu_s(l, k), gpu_s(l, k))

    because both parts run at the same time. Per neuron, with seconds = row bytes / rate of their type:

        without predictor   neuron_s = first row                 active_s = second + down row
        with predictor      neuron_s = predictor                 active_s = candidate_ratio * first + second + down row
        a device that       neuron_s = first + second + down     active_s = 0
        computes all

    Args:
        problem: the layers.

    Returns:
        One curve per layer. Numbers of neurons between 0 and min_hot aren't choices.

    Raises:
        OptionError: a frequency or cost that is negative, infinite or not a number.
    """
    for i, layer in enumerate(problem.layers):
        if layer.frequency.shape != (layer.n_ff,):
            raise OptionError(
                f"placement: layer {i} has frequencies of shape {layer.frequency.shape}; "
                f"expected ({layer.n_ff},), one per neuron; profile the model again."
            )
        wrong = ~np.isfinite(layer.frequency) | (layer.frequency < 0)
        if wrong.any():
            position = int(np.argmax(wrong))
            raise OptionError(
                f"placement: layer {i}'s frequency at position {position} is {layer.frequency[position]}; "
                "expected a finite number from 0 up; profile the model again."
            )
        costs = np.array([*layer.cpu, *layer.gpu, layer.sync_s])
        if not np.all(np.isfinite(costs) & (costs >= 0)):
            raise OptionError(
                f"placement: layer {i}'s costs are {costs.tolist()} seconds; expected finite numbers from 0 up; "
                "correct the hardware's rates."
            )
        if not 0 <= layer.i_device < len(problem.capacity_bytes):
            raise OptionError(
                f"placement: layer {i} is for device {layer.i_device}; expected 0 .. {len(problem.capacity_bytes) - 1}; "
                "name one of the devices."
            )
    return [_curve(layer) for layer in problem.layers]


def _curve(layer: PlacementLayer) -> Curve:
    n_hot = np.append(np.arange(0, layer.n_ff, GROUP), layer.n_ff)
    active = np.concatenate([[0.0], np.cumsum(layer.frequency, dtype=np.float64)])
    n_active = active[n_hot]
    cpu_s = (layer.n_ff - n_hot) * layer.cpu[0] + (active[-1] - n_active) * layer.cpu[1]
    gpu_s = (n_hot > 0) * layer.sync_s + n_hot * layer.gpu[0] + n_active * layer.gpu[1]
    if layer.n_ff == 0:
        n_hot, cpu_s, gpu_s = n_hot[:1], cpu_s[:1], gpu_s[:1]
    allowed = (n_hot == 0) | (n_hot >= layer.min_hot)
    n_hot, cpu_s, gpu_s = n_hot[allowed], cpu_s[allowed], gpu_s[allowed]
    return Curve(
        n_hot=n_hot,
        bytes=n_hot * layer.neuron_bytes,
        cold_bytes=(layer.n_ff - n_hot) * layer.host_bytes,
        cpu_s=cpu_s,
        gpu_s=gpu_s,
        layer_s=np.maximum(cpu_s, gpu_s),
    )


def place_greedy(problem: PlacementProblem) -> Placement:
    """The core's greedy choice, which powerinfer-main uses too. It doesn't know of host memory.

    Args:
        problem: what is to be placed.

    Returns:
        The placement, with a gap from the bound that the greedy choice knows.

    Raises:
        OptionError: as cost_curves.
    """
    start = time.monotonic()
    curves = cost_curves(problem)
    layers = problem.layers
    none = np.zeros(0, np.float32)
    found = _core.place_greedy(
        n_ff=np.array([layer.n_ff for layer in layers], np.int64),
        frequency=np.concatenate([none, *(np.asarray(layer.frequency, np.float32) for layer in layers)]),
        neuron_bytes=np.array([layer.neuron_bytes for layer in layers], np.uint64),
        cpu_s=np.array([layer.cpu for layer in layers], np.float64).reshape(-1, 2),
        gpu_s=np.array([layer.gpu for layer in layers], np.float64).reshape(-1, 2),
        sync_s=np.array([layer.sync_s for layer in layers], np.float64),
        min_hot=np.array([layer.min_hot for layer in layers], np.int64),
        i_device=np.array([layer.i_device for layer in layers], np.int32),
        capacity_bytes=np.array(problem.capacity_bytes, np.uint64),
    )
    return _placement(problem, curves, _indices(curves, found["n_hot"]), found["gap"], "greedy", start)


def solve(problem: PlacementProblem, options: SolveOptions | None = None) -> Placement:
    """Shares device memory out, so that a token takes the least time.

    With y[l,k] = 1 when exactly the first k groups of layer l are hot (k = 0: none; no k between that and min_hot):

        maximise    saved   = sum over l, k of (layer_s(l, 0) - layer_s(l, k)) * y[l,k]
        subject to
        choose[l]     sum over k of y[l,k]                                    = 1
        capacity[d]   sum over l on device d, k of bytes(l, k) * y[l,k]      <= capacity_bytes[d]
        host          sum over l, k of cold_bytes(l, k) * y[l,k]             <= host_bytes
        y[l,k] in {0, 1}

    The paper has one variable per group (x[l,g] = sum over k >= g of y[l,k]), one for a layer that is synchronised
    (z[l] = 1 - y[l,0]) and one for a layer's time (t[l] = sum over k of layer_s(l, k) * y[l,k]). The two say the same;
    with y a layer's time is exact in the relaxation too, so that hardly anything is left to search.

    What is left of the memory then goes to neurons that make no layer slower. Where the device would become slower than
    the CPU memory stays unused, and a note says so.

    Args:
        problem: what is to be placed.
        options: limits of the search; None: the defaults.

    Returns:
        The placement: the MILP's, or the greedy one when the search found no better one in time.

    Raises:
        OptionError: as cost_curves; cold neurons don't fit host memory; scipy isn't installed.

    Source: PowerInfer, SOSP'24, section 6.3.
    """
    options = options or SolveOptions()
    start = time.monotonic()
    curves = cost_curves(problem)
    greedy = place_greedy(problem)
    picked, method = _indices(curves, greedy.n_hot), "greedy"
    found, bound_s, in_time = _search(problem, curves, options)
    if found is not None and (
        in_time or _token_s(curves, found) < greedy.token_s or not _fits_host(problem, curves, picked)
    ):
        picked, method = found, "milp"
    if not _fits_host(problem, curves, picked):
        raise OptionError(
            f"host memory: no placement that leaves at most {problem.host_bytes} bytes to it was found within "
            f"{options.time_limit_s:g} s; expected one; raise --time-limit or pass a larger budget."
        )
    _fill(problem, curves, picked)
    gap = max(_token_s(curves, picked) / bound_s - 1, 0.0) if bound_s > 0 else greedy.gap
    notes = _unused_notes(problem, curves, picked)
    if not in_time:
        notes.append(
            f"the search ended at its time limit of {options.time_limit_s:g} s; "
            f"the placement is within {100 * gap:.3g} % of the best"
        )
    return _placement(problem, curves, picked, gap, method, start, notes)


def _search(
    problem: PlacementProblem, curves: list[Curve], options: SolveOptions
) -> tuple[list[int] | None, float, bool]:
    """Solves the MILP.

    Returns:
        Index of each layer's choice (None: none found in time), a lower bound of a token's seconds, whether it ended
        before the time limit.
    """
    need_packages("place", "place", "scipy")
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    kept = [_useful(problem, curve, layer) for curve, layer in zip(curves, problem.layers)]
    i_layer = np.concatenate([np.full(len(k), i) for i, k in enumerate(kept)])
    n = len(i_layer)
    columns = np.arange(n)

    def gathered(name: str) -> np.ndarray:
        return np.concatenate([getattr(curve, name)[k] for curve, k in zip(curves, kept)]).astype(np.float64)

    def block(rows: np.ndarray, values: np.ndarray, n_rows: int) -> coo_array:
        return coo_array((values, (rows, columns)), shape=(n_rows, n))

    n_layer, n_devices = len(curves), len(problem.capacity_bytes)
    cold_s = sum(float(curve.layer_s[0]) for curve in curves)
    device = np.array([layer.i_device for layer in problem.layers])[i_layer]
    # in units of the smallest neuron, so that the solver's tolerances are far below one
    unit = float(min((layer.neuron_bytes for layer in problem.layers if layer.neuron_bytes), default=1))
    choose = LinearConstraint(block(i_layer, np.ones(n), n_layer), 1, 1)
    capacity = LinearConstraint(
        block(device, gathered("bytes") / unit, n_devices), -np.inf, np.array(problem.capacity_bytes) / unit
    )
    constraints = [choose, capacity]
    if problem.host_bytes is not None:
        host = block(np.zeros(n, int), gathered("cold_bytes") / unit, 1)
        constraints.append(LinearConstraint(host, -np.inf, problem.host_bytes / unit))
    # in thousandths of the token without hot neurons
    scale = 1e3 / cold_s if cold_s > 0 else 1.0
    found = milp(
        gathered("layer_s") * scale,
        integrality=np.ones(n),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"time_limit": options.time_limit_s, "mip_rel_gap": options.gap},
    )
    if found.status == 2:
        raise OptionError(
            f"host memory: the cold neurons don't fit {problem.host_bytes} bytes with all that the devices can hold; "
            "expected room for them; use a larger budget or a smaller quantization."
        )
    bound = getattr(found, "mip_dual_bound", None)
    bound_s = bound / scale if bound is not None and np.isfinite(bound) else 0.0
    if found.x is None:
        return None, bound_s, False
    picked = [int(kept[i][np.argmax(found.x[i_layer == i])]) for i in range(n_layer)]
    _make_fit(problem, curves, picked)
    return picked, bound_s, found.status == 0


def _indices(curves: list[Curve], n_hot: Sequence[int]) -> list[int]:
    return [int(np.searchsorted(curve.n_hot, n)) for curve, n in zip(curves, n_hot)]


def _token_s(curves: list[Curve], picked: list[int]) -> float:
    return sum(float(curve.layer_s[k]) for curve, k in zip(curves, picked))


def _free_bytes(problem: PlacementProblem, curves: list[Curve], picked: list[int]) -> list[int]:
    """Of each device, what is left of its capacity."""
    free = list(problem.capacity_bytes)
    for layer, curve, k in zip(problem.layers, curves, picked):
        free[layer.i_device] -= int(curve.bytes[k])
    return free


def _fits_host(problem: PlacementProblem, curves: list[Curve], picked: list[int]) -> bool:
    cold_bytes = sum(int(curve.cold_bytes[k]) for curve, k in zip(curves, picked))
    return problem.host_bytes is None or cold_bytes <= problem.host_bytes


def _useful(problem: PlacementProblem, curve: Curve, layer: PlacementLayer) -> np.ndarray:
    """Indices of the choices that a best placement may need: they fit, and are faster than every smaller one, or leave
    less to a limited host memory."""
    fits = curve.bytes <= problem.capacity_bytes[layer.i_device]
    faster = np.ones(len(fits), bool)
    if problem.host_bytes is None:
        faster[1:] = curve.layer_s[1:] < np.minimum.accumulate(curve.layer_s)[:-1]
    return np.flatnonzero(fits & faster)


def _make_fit(problem: PlacementProblem, curves: list[Curve], picked: list[int]) -> None:
    """Takes groups away until no device is over its capacity, which the solver's tolerance may have let pass."""
    for d, n_free in enumerate(_free_bytes(problem, curves, picked)):
        while n_free < 0:
            layers = [i for i, layer in enumerate(problem.layers) if layer.i_device == d and picked[i] > 0]
            i = min(layers, key=lambda i: curves[i].layer_s[picked[i] - 1] - curves[i].layer_s[picked[i]])
            n_free += int(curves[i].bytes[picked[i]] - curves[i].bytes[picked[i] - 1])
            picked[i] -= 1


def _fill(problem: PlacementProblem, curves: list[Curve], picked: list[int]) -> None:
    """Gives what is left of the memory to whatever gets no slower by it, first layer first."""
    free = _free_bytes(problem, curves, picked)
    slack_s = _ROUNDING * sum(float(curve.layer_s[0]) for curve in curves)
    for i, (layer, curve) in enumerate(zip(problem.layers, curves)):
        for k in range(picked[i] + 1, len(curve.n_hot)):
            n_bytes = int(curve.bytes[k] - curve.bytes[k - 1])
            if n_bytes > free[layer.i_device] or curve.layer_s[k] > curve.layer_s[k - 1] + slack_s:
                break
            free[layer.i_device] -= n_bytes
            picked[i] = k


def _unused_notes(problem: PlacementProblem, curves: list[Curve], picked: list[int]) -> list[str]:
    """Says of each device why it has room for more."""
    notes = []
    for d, n_free in enumerate(_free_bytes(problem, curves, picked)):
        slower = any(
            layer.i_device == d and k + 1 < len(curve.n_hot) and curve.bytes[k + 1] - curve.bytes[k] <= n_free
            for layer, curve, k in zip(problem.layers, curves, picked)
        )
        if slower:
            notes.append(
                f"device {d}: {n_free / 2**20:.1f} MiB for hot neurons stay unused, "
                "because by these rates more of them make a token slower"
            )
    return notes


def _placement(
    problem: PlacementProblem,
    curves: list[Curve],
    picked: list[int],
    gap: float,
    method: str,
    start: float,
    notes: Sequence[str] = (),
) -> Placement:
    free = _free_bytes(problem, curves, picked)
    return Placement(
        n_hot=tuple(int(curve.n_hot[k]) for curve, k in zip(curves, picked)),
        token_s=_token_s(curves, picked),
        cold_s=sum(float(curve.layer_s[0]) for curve in curves),
        gap=gap,
        used_bytes=tuple(n - n_free for n, n_free in zip(problem.capacity_bytes, free)),
        method=method,
        seconds=time.monotonic() - start,
        notes=tuple(notes),
    )
