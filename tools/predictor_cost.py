"""What a predictor costs and saves per token, from measured rates, and how large the predictor of each layer should be.

Times are those of decoding one token with all threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from powerinfer_py import _core
from powerinfer_py.bench_machine import cache_bytes, working_set_bytes
from powerinfer_py.errors import FormatError

from .row_types import row_bytes

RANK_STEP = 32  # rows of Q8_0 and Q4_0 are blocks of 32 values
PREDICTOR_TYPES = ("q8_0", "q4_0", "f16")
_DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)  # where reading single rows is measured
# A list of candidates is made between two more barriers: 2 to 5 us on 2 to 8 threads.
_STEP_US = 3.0
# Weights that fill less of the largest cache than this are still there when the next token comes.
_CACHED_SHARE = 0.5
_PREDICTOR_ROW = 256  # values per row at which predictor rows are measured: fc2 has about so many
_MIN_GROWTH = 1.5  # of the largest rank looked at, when a larger one may be better


@dataclass(frozen=True)
class Rates:
    """How fast rows are read.

    Attributes:
        kernels: kernel set.
        n_threads: threads.
        in_cache: whether the model's FFNs stay in the cache.
        gate_type: row type of the gate.
        gate_gb_s: all gate rows, one after the other.
        gathered_gb_s: single gate rows: (share of rows read, GB/s), ascending.
        predictor_gb_s: rows of a predictor, one after the other, by type.
        step_us: what predicting costs besides reading rows.
    """

    kernels: str
    n_threads: int
    in_cache: bool
    gate_type: str
    gate_gb_s: float
    gathered_gb_s: tuple[tuple[float, float], ...]
    predictor_gb_s: dict[str, float]
    step_us: float = _STEP_US

    def gathered_us(self, n_bytes: float, density: float) -> float:
        """Time to read a share of the gate's rows, in us."""
        points = [*self.gathered_gb_s, (1.0, self.gate_gb_s)]
        return n_bytes / float(np.interp(density, *zip(*points))) / 1e3


def measure_rates(
    gate_type: str, n_embd: int, n_ff: int, ffn_bytes: int, kernels: str, n_threads: int, note: Callable[[str], None]
) -> Rates:
    """Measures them on rows of no model.

    Args:
        gate_type: row type of the gate.
        n_embd: values per row.
        n_ff: rows.
        ffn_bytes: of all FFNs of the model; decides whether rows come from the cache.
        kernels: kernel set.
        n_threads: threads.
        note: receives a fallback.

    Returns:
        The rates.
    """
    known = next(item["row_types"] for item in _core.kernel_sets() if item["name"] == kernels)
    measured_type = gate_type
    if gate_type not in known:
        measured_type = "q8_0"
        note(f"rows of type {gate_type} have no kernel; the rates of q8_0 are used for them.")
    in_cache = ffn_bytes < _CACHED_SHARE * cache_bytes()
    n_bytes = 1 << 20 if in_cache else working_set_bytes()

    def rates(row_type: str, n: int, densities: tuple[float, ...]) -> list[float]:
        bench = _core.KernelBench(row_type, -(-n // 256) * 256, n_ff, n_bytes)
        options = {"kernels": kernels, "op": "dot", "n_threads": n_threads, "n_repeats": 7, "repeat_s": 0.01}
        results = [bench.run(density=density, in_cache=in_cache, **options) for density in densities]
        # the fastest pass: others were slowed by whatever else the machine did
        return [result["pass_bytes"] / result["pass_s_min"] / 1e9 for result in results]

    if in_cache:
        (gate,) = rates(measured_type, n_embd, (1.0,))
        gathered = [gate]  # a row in the cache is as near as the next
    else:
        gate, *gathered = rates(measured_type, n_embd, (1.0, *_DENSITIES))
    predictors = {row_type: rates(row_type, _PREDICTOR_ROW, (1.0,))[0] for row_type in PREDICTOR_TYPES}
    return Rates(kernels, n_threads, in_cache, gate_type, gate, tuple(zip(_DENSITIES, gathered)), predictors)


def write_rates(rates: Rates, path: Path) -> None:
    """Writes rates as JSON."""
    path.write_text(json.dumps(asdict(rates), indent=2) + "\n", encoding="utf-8")


def read_rates(path: Path, gate_type: str) -> Rates:
    """Reads rates that were measured before.

    Args:
        path: JSON, the fields of Rates.
        gate_type: row type of the gate, which they must hold.

    Returns:
        The rates.

    Raises:
        FormatError: it isn't such a file, or of another gate type.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rates = Rates(**{**found, "gathered_gb_s": tuple(map(tuple, found["gathered_gb_s"]))})
        numbers = [
            rates.gate_gb_s,
            *rates.predictor_gb_s.values(),
            *(v for point in rates.gathered_gb_s for v in point),
        ]
        if not numbers or not all(value > 0 for value in numbers) or not rates.step_us >= 0:
            raise ValueError("a rate that isn't above 0")
        missing = set(PREDICTOR_TYPES) - set(rates.predictor_gb_s)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        names = ", ".join(field.name for field in fields(Rates))
        raise FormatError(f"{path}: it can't be read ({error}); expected JSON with {names}; measure again.") from None
    if missing or rates.gate_type != gate_type:
        raise FormatError(
            f"{path}: rates for gates of {rates.gate_type}, predictors of {', '.join(rates.predictor_gb_s)}; expected "
            f"{gate_type}, and {', '.join(PREDICTOR_TYPES)}; measure again (leave --rates out)."
        )
    return rates


@dataclass(frozen=True)
class LayerCost:
    """Times of one layer."""

    rates: Rates
    n_embd: int
    n_ff: int
    gate_row_bytes: int

    @property
    def gate_us(self) -> float:
        """Reading every gate row."""
        return self.n_ff * self.gate_row_bytes / self.rates.gate_gb_s / 1e3

    def n_parameters(self, rank: int) -> int:
        """Weights of a predictor."""
        return rank * (self.n_embd + self.n_ff)

    def predictor_us(self, rank: int, row_type: str) -> float:
        """Reading and using a predictor."""
        n_bytes = rank * row_bytes(self.n_embd, row_type) + self.n_ff * row_bytes(rank, row_type)
        return n_bytes / self.rates.predictor_gb_s[row_type] / 1e3 + self.rates.step_us

    def saving_us(self, rank: int, row_type: str, candidate_density: float, up_saved: float = 0.0) -> float:
        """What a predictor saves per token: gate rows not read, less itself.

        Args:
            rank: of the predictor.
            row_type: of its rows.
            candidate_density: gate rows read / n_ff.
            up_saved: up rows not read / n_ff that would be read without it.

        Returns:
            us; below 0 it costs time.
        """
        read = self.rates.gathered_us(candidate_density * self.n_ff * self.gate_row_bytes, candidate_density)
        up = self.rates.gathered_us(up_saved * self.n_ff * self.gate_row_bytes, candidate_density)
        return self.gate_us - read + up - self.predictor_us(rank, row_type)

    def largest_rank(self, row_type: str) -> int:
        """The highest rank that could save time if it left no candidate."""
        rank = 0
        while rank + RANK_STEP <= min(self.n_embd, self.n_ff):
            if self.saving_us(rank + RANK_STEP, row_type, 0.0) <= 0:
                break
            rank += RANK_STEP
        return rank


@dataclass(frozen=True)
class SizeCurve:
    """What predictors of one layer reach at a wished recall, by rank.

    Attributes:
        ranks: ascending.
        candidate_density: by rank.
        accuracy: share of right decisions, by rank.
        density: share of active neurons.
    """

    ranks: tuple[int, ...]
    candidate_density: tuple[float, ...]
    accuracy: tuple[float, ...]
    density: float


def start_rank(n_embd: int, density: float, hot_share: float) -> int:
    """Where the search for a layer's size starts: larger for denser layers, and for those whose activity is spread.

    Args:
        n_embd: width.
        density: share of active neurons.
        hot_share: share of neurons that make up 80 % of the activity, 0 to 0.8; small: skewed.

    Returns:
        A multiple of RANK_STEP, at least that.

    Source:
        PowerInfer, SOSP'24, section 5.1: a baseline by sparsity, moved by skewness.
    """
    return RANK_STEP * max(1, round(n_embd * np.sqrt(density) * hot_share / RANK_STEP))


def grow(
    evaluate: Callable[[int], SizeCurve], wants_more: Callable[[SizeCurve], bool], start: int, largest: int
) -> SizeCurve:
    """Looks at larger and larger predictors while the largest one looked at may not be the last.

    Args:
        evaluate: highest rank -> the curve up to it.
        wants_more: whether a larger rank than the curve's last should be tried.
        start: first highest rank.
        largest: last one.

    Returns:
        The curve up to where it stopped.
    """
    limit = min(start, largest)
    while True:
        curve = evaluate(limit)
        if limit >= largest or not wants_more(curve):
            return curve
        limit = min(largest, -(-int(_MIN_GROWTH * limit) // RANK_STEP) * RANK_STEP)


def best_saving(curve: SizeCurve, cost: LayerCost, row_type: str) -> tuple[int, float]:
    """The rank that saves most time.

    Args:
        curve: of the layer.
        cost: its times.
        row_type: of the predictor's rows.

    Returns:
        The rank and what it saves, us; rank 0 when the curve is empty.
    """
    savings = [cost.saving_us(rank, row_type, d) for rank, d in zip(curve.ranks, curve.candidate_density)]
    if not savings:
        return 0, 0.0
    best = int(np.argmax(savings))
    return curve.ranks[best], savings[best]


def share_budget(curves: Sequence[SizeCurve], costs: Sequence[LayerCost], max_parameters: float) -> list[int]:
    """Ranks that leave the fewest gate weights to read within a number of parameters.

    Greedy: of all steps of one layer to a higher rank that fit, the one that saves most gate weights per parameter.

    Args:
        curves: per layer.
        costs: per layer.
        max_parameters: of all predictors together.

    Returns:
        A rank per layer; 0: none.
    """
    ranks = [0] * len(curves)
    read = [1.0] * len(curves)
    left = max_parameters
    while True:
        best = (0.0, 0, 0, 0.0)
        for i, (curve, cost) in enumerate(zip(curves, costs)):
            for rank, density in zip(curve.ranks, curve.candidate_density):
                price = cost.n_parameters(rank) - cost.n_parameters(ranks[i])
                if 0 < price <= left:
                    gain = (read[i] - density) * cost.n_ff * cost.n_embd / price
                    if gain > best[0]:
                        best = (gain, i, rank, density)
        gain, i, rank, density = best
        if gain <= 0:
            return ranks
        left -= costs[i].n_parameters(rank) - costs[i].n_parameters(ranks[i])
        ranks[i], read[i] = rank, density
