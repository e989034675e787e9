"""One layer's predictor, from the shards: the curve of sizes, the fit or training, its rows, and what it was measured to do.

Runs in worker processes. Three parts of the text: fit, calibrate (every choice, and the threshold), measure (figures).
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer_py.format import BaseModel, Plan, atomic_path, read_plan

from . import mlp_predictor
from .active_sets import ActiveSets
from .capture_activations import Shards
from .plot_profile import share_of_neurons
from .predictor import (
    LinearFit,
    LinearPredictor,
    MlpPredictor,
    PredictorQuality,
    PredictorRows,
    calibrate_threshold,
    constant_direction,
    estimate_moment,
    fit_probabilities,
    fit_products,
    measure_predictor,
    round_predictor,
)
from .predictor_cost import PREDICTOR_TYPES, RANK_STEP, LayerCost, SizeCurve, best_saving, grow, start_rank

# Of one layer's scores at a time (128 MiB), and of the inputs that the closed fit sees (256 MiB).
_MAX_SCORES = 1 << 25
_MAX_FIT_VALUES = 1 << 26
# The paper's: a layer's predictor grows until so many of its decisions are right (PowerInfer, SOSP'24, section 5.1).
_WISHED_ACCURACY = 0.95
# Training must leave so much fewer candidates to be worth its ReLU.
_MIN_GAIN = 0.01
# So few candidates per active neuron that is kept leave nothing to be gained.
_NEARLY_IDEAL = 1.05


@dataclass(frozen=True)
class LayerTask:
    """All that a worker needs for one layer.

    Attributes:
        plan, base: files; base None: where the plan says.
        shards: with all inputs and active sets.
        i_layer: the layer.
        cost: its times.
        kind: auto, linear or mlp.
        recall: wished.
        row_type: auto, or that of the predictor's rows.
        device: cpu or cuda.
        epochs, max_seconds: of a training.
        seed: of everything random.
        most_parameters: of this layer's predictor, when it needn't pay; None: it must.
    """

    plan: Path
    base: Path | None
    shards: Shards
    i_layer: int
    cost: LayerCost
    kind: str
    recall: float
    row_type: str
    device: str
    epochs: int
    max_seconds: float
    seed: int
    most_parameters: float | None = None

    @property
    def identity(self) -> str:
        """What a kept result must agree with to be of use."""
        values = {name: value for name, value in asdict(self).items() if name not in ("plan", "base", "shards")}
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def searched_type(self) -> str:
        """Row type that sizes are weighed with."""
        if self.row_type != "auto":
            return self.row_type
        return "f16" if self.cost.n_embd % RANK_STEP else "q8_0"

    @property
    def input_paths(self) -> list[Path]:
        """Files of the shards that a worker reads."""
        return [self.shards.state_path, self.shards.x_path(self.i_layer), self.shards.active_path(self.i_layer)]

    def path(self, what: str) -> Path:
        """Where a result of this layer is kept."""
        return self.shards.folder / f"layer-{self.i_layer:03d}.{what}.npz"


@dataclass(frozen=True)
class LayerResult:
    """What was made for a layer, and measured on the part of the text that nothing was chosen by.

    Attributes:
        i_layer: the layer.
        n_ff: its neurons.
        density: share of active neurons.
        kind: none, linear or mlp.
        reason: why none, empty otherwise.
        rank, row_type, n_parameters, n_bytes: of the predictor.
        threshold: skip when score < it.
        recall, candidate_density, accuracy: as stored; 1, 1 and density without one.
        float_recall, float_candidate_density: before rounding.
        other_candidate_density: of the linear one when the mlp was better, and the other way round; 0: not tried.
        predictor_us, saving_us: expected per token.
        epochs, seconds: that were spent.
    """

    i_layer: int
    n_ff: int
    density: float
    kind: str = "none"
    reason: str = ""
    rank: int = 0
    row_type: str = ""
    n_parameters: int = 0
    n_bytes: int = 0
    threshold: float = 0.0
    recall: float = 1.0
    candidate_density: float = 1.0
    accuracy: float = 0.0
    float_recall: float = 1.0
    float_candidate_density: float = 1.0
    other_candidate_density: float = 0.0
    predictor_us: float = 0.0
    saving_us: float = 0.0
    epochs: int = 0
    seconds: float = 0.0


@functools.lru_cache(maxsize=1)
def _open_files(plan: Path, base: Path | None, identity: str) -> tuple[Plan, BaseModel]:
    opened = read_plan(plan)
    return opened, opened.open_base(base)


def _open(task: LayerTask) -> tuple[Plan, BaseModel]:
    """A worker's plan and base, opened once; a plan that was written anew isn't mistaken for the old one."""
    return _open_files(task.plan, task.base, json.dumps(task.shards.identity))


class _Data:
    """A layer's tokens."""

    def __init__(self, task: LayerTask) -> None:
        self.task = task
        self.shards = task.shards
        self.x = task.shards.x(task.i_layer)
        self.n_ff = task.cost.n_ff

    def few(self, part: str, max_tokens: int) -> np.ndarray:
        """Rows of the shards: at most so many tokens, spread over a part."""
        rows = self.shards.sample.rows(part)
        n = rows.stop - rows.start
        return rows.start + np.unique(np.linspace(0, n - 1, max(1, min(n, max_tokens))).astype(np.int64))

    def fit_rows(self) -> np.ndarray:
        """Of the tokens that the closed fit sees."""
        return self.few("fit", _MAX_FIT_VALUES // max(self.task.cost.n_embd, self.n_ff // 8))

    def inputs(self, rows: np.ndarray) -> np.ndarray:
        """(n, n_embd) float32."""
        return self.x[rows].astype(np.float32)

    @functools.cached_property
    def calibration(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (n, n_embd) float32 and active sets (n, n_ff) bool of the tokens that choose."""
        rows = self.few("calibrate", _MAX_SCORES // self.n_ff)
        return self.inputs(rows), self.shards.active(self.task.i_layer, rows)

    def threshold(self, predictor: LinearPredictor) -> tuple[float, float]:
        """The threshold for the wished recall, and the candidate density with it."""
        x, active = self.calibration
        scores = predictor.scores(x)
        threshold = calibrate_threshold(scores, active, self.task.recall)
        return threshold, measure_predictor(scores, active, threshold).candidate_density

    def candidates(self, predictor: LinearPredictor) -> float:
        """Candidate density at the wished recall."""
        return self.threshold(predictor)[1]


# ---- Size ----------------------------------------------------------------------------------------------------------


def search_layer(task: LayerTask) -> SizeCurve:
    """Finds what closed fits of every size reach; the fit is kept for train_layer.

    Args:
        task: the layer.

    Returns:
        Its curve; no ranks when no size could pay.
    """
    data = _Data(task)
    x_calibration, active = data.calibration
    density = float(active.mean())
    largest = min(task.cost.n_embd, task.cost.n_ff) // RANK_STEP * RANK_STEP
    if task.most_parameters is None:
        largest = min(largest, task.cost.largest_rank(task.searched_type))
    else:
        largest = min(largest, int(task.most_parameters // task.cost.n_parameters(1)) // RANK_STEP * RANK_STEP)
    if largest == 0 or not active.any():
        return SizeCurve((), (), (), density)
    plan, base = _open(task)
    sets = ActiveSets(base, plan, task.i_layer)
    rows = data.fit_rows()
    x = data.inputs(rows)
    active_fit = data.shards.active(task.i_layer, rows)
    moment = estimate_moment(x)
    frequency = np.sort(active_fit.mean(axis=0, dtype=np.float64))[::-1]
    found: dict[int, tuple[LinearFit, SizeCurve]] = {}

    def evaluate(limit: int) -> SizeCurve:
        fits = [fit_products(sets.decides, sets.offset, moment, limit, seed=task.seed)]
        if sets.offset.any():  # where no direction of x is constant, offsets can't be had, but one cut for all can
            fits.append(replace(fits[0], is_comparable=True))
        if not sets.is_linear:
            fits.append(fit_probabilities(x, active_fit, moment, limit, seed=task.seed))
        fits = [fit.padded(limit) for fit in fits]  # a gate's own rank may be lower
        curves = [_curve(fit, x_calibration, active, task.recall) for fit in fits]
        best = int(np.argmin([curve.candidate_density[-1] for curve in curves]))
        found[limit] = fits[best], curves[best]
        return curves[best]

    def wants_more(curve: SizeCurve) -> bool:
        rank, saving = best_saving(curve, task.cost, task.searched_type)
        return rank == curve.ranks[-1] or (saving > 0 and curve.accuracy[-1] < _WISHED_ACCURACY)

    start = largest if task.most_parameters else start_rank(task.cost.n_embd, density, share_of_neurons(frequency))
    curve = grow(evaluate, wants_more, start, largest)
    fit, _ = found[max(found)]
    _write(
        task.path("fit"),
        {"identity": task.identity, "curve": asdict(curve), "is_comparable": fit.is_comparable},
        {name: getattr(fit, name) for name in ("fc1", "fc2", "power", "explained")},
    )
    return curve


def kept_curve(task: LayerTask) -> SizeCurve | None:
    """The curve of a search that a stopped run had done; None when there is none of use."""
    kept = _read(task.path("fit"), task.identity)
    return (
        None
        if kept is None
        else SizeCurve(**{k: tuple(v) if isinstance(v, list) else v for k, v in kept[0]["curve"].items()})
    )


def _curve(fit: LinearFit, x: np.ndarray, active: np.ndarray, recall: float) -> SizeCurve:
    """What the ranks of a fit reach on some tokens."""
    hidden = x @ fit.fc1.T
    products = np.zeros(active.shape, np.float32)
    ranks, candidates, accuracy = [], [], []
    done = 0
    for rank in range(RANK_STEP, fit.rank + 1, RANK_STEP):
        products += hidden[:, done:rank] @ fit.fc2[:, done:rank].T
        done = rank
        scores = products if fit.is_comparable else products / fit.error(rank)
        quality = measure_predictor(scores, active, calibrate_threshold(scores, active, recall))
        ranks.append(rank)
        candidates.append(quality.candidate_density)
        accuracy.append(quality.accuracy)
    return SizeCurve(tuple(ranks), tuple(candidates), tuple(accuracy), float(active.mean()))


# ---- Fit or training, rows, measurement ----------------------------------------------------------------------------


def train_layer(task: LayerTask, rank: int) -> LayerResult:
    """Makes a layer's predictor and keeps it.

    Args:
        task: the layer, searched.
        rank: of the predictor.

    Returns:
        What was made; its rows are in the shards' folder.
    """
    started = time.monotonic()
    data = _Data(task)
    meta, arrays = _read(task.path("fit"), task.identity)
    fit = LinearFit(**arrays, is_comparable=meta["is_comparable"])
    x = data.inputs(data.fit_rows())
    # rounding to blocks adds one rank of its own
    inner = rank if task.searched_type == "f16" else rank - 1
    made: list[tuple[float, LinearPredictor, int]] = []
    if task.kind in ("auto", "linear"):
        linear = mlp_predictor.balanced(fit.scaled(inner), x)
        made.append((data.candidates(linear), linear, 0))
        ideal = task.recall * float(data.calibration[1].mean())
    if task.kind == "mlp" or (task.kind == "auto" and made[0][0] > _NEARLY_IDEAL * ideal):
        mlp, epochs = _train_mlp(task, data, fit, inner, x)
        gain = _MIN_GAIN if made else 0.0
        made.append((data.candidates(mlp) * (1.0 + gain), mlp, epochs))
    _, predictor, epochs = min(made, key=lambda item: item[0])
    others = [density for density, other, _ in made if other is not predictor]
    rows = _choose_rows(task, data, predictor, x)
    threshold, _ = data.threshold(rows.rounded)
    quality, up_saved = _measure(task, data, rows.rounded, threshold)
    unrounded, _ = _measure(task, data, predictor, data.threshold(predictor)[0])
    n_rows = rows.rounded.rank
    result = LayerResult(
        i_layer=task.i_layer,
        n_ff=task.cost.n_ff,
        density=quality.density,
        kind=predictor.kind,
        rank=n_rows,
        row_type=rows.row_type,
        n_parameters=task.cost.n_parameters(n_rows),
        n_bytes=rows.fc1.nbytes + rows.fc2.nbytes,
        threshold=threshold,
        recall=quality.recall,
        candidate_density=quality.candidate_density,
        accuracy=quality.accuracy,
        float_recall=unrounded.recall,
        float_candidate_density=unrounded.candidate_density,
        other_candidate_density=others[0] if others else 0.0,
        predictor_us=task.cost.predictor_us(n_rows, rows.row_type),
        saving_us=task.cost.saving_us(n_rows, rows.row_type, quality.candidate_density, up_saved),
        epochs=epochs,
        seconds=time.monotonic() - started,
    )
    if task.most_parameters is None and result.saving_us <= 0:
        why = f"rank {n_rows} would cost {-result.saving_us:.1f} us per token more than the rows that it saves"
        result = LayerResult(task.i_layer, task.cost.n_ff, quality.density, reason=why, seconds=result.seconds)
    _write(
        task.path("predictor"),
        {"identity": task.identity, "rank": rank, "result": asdict(result)},
        {"fc1": rows.fc1, "fc2": rows.fc2},
    )
    return result


def kept_result(task: LayerTask, rank: int) -> LayerResult | None:
    """The result of a layer that a stopped run had finished; None when there is none of use."""
    kept = _read(task.path("predictor"), task.identity)
    return LayerResult(**kept[0]["result"]) if kept is not None and kept[0]["rank"] == rank else None


def predictor_rows(task: LayerTask) -> tuple[np.ndarray, np.ndarray]:
    """(fc1, fc2) as train_layer kept them, (rows, row bytes) uint8 each."""
    _, arrays = _read(task.path("predictor"), task.identity)
    return arrays["fc1"], arrays["fc2"]


def _train_mlp(task: LayerTask, data: _Data, fit: LinearFit, rank: int, x: np.ndarray) -> tuple[MlpPredictor, int]:
    constant = constant_direction(estimate_moment(x))
    starts = mlp_predictor.start_of(fit, rank, x[: _MAX_SCORES // task.cost.n_embd], constant)
    start = min(starts, key=data.candidates)
    threshold, _ = data.threshold(start)
    x_calibration, active = data.calibration
    odds = mlp_predictor.odds_at(start.scores(x_calibration), active, threshold)
    rows = data.shards.sample.rows("fit")
    options = mlp_predictor.MlpOptions(task.recall, task.epochs, task.max_seconds, task.device, task.seed)
    packed = data.shards.packed(task.i_layer)[rows]
    return mlp_predictor.train_mlp(start, data.x[rows], packed, threshold, odds, data.candidates, options)


def _choose_rows(task: LayerTask, data: _Data, predictor: LinearPredictor, x: np.ndarray) -> PredictorRows:
    """The rows that save most time at the wished recall: coarser ones are read faster, and may leave more candidates."""
    types = (task.row_type,)
    if task.row_type == "auto":
        types = PREDICTOR_TYPES if task.searched_type == "q8_0" else ("f16",)
    x = x[:: max(1, len(x) * task.cost.n_ff // _MAX_SCORES)]
    made = [_float_rows(predictor) if t == "f16" else round_predictor(predictor, x, t) for t in types]
    return max(
        made,
        key=lambda rows: task.cost.saving_us(rows.rounded.rank, rows.row_type, data.candidates(rows.rounded)),
    )


def _float_rows(predictor: LinearPredictor) -> PredictorRows:
    halves = [np.ascontiguousarray(matrix, np.float16) for matrix in (predictor.fc1, predictor.fc2)]
    rounded = type(predictor)(*(half.astype(np.float32) for half in halves))
    return PredictorRows("f16", *(half.view(np.uint8) for half in halves), rounded)


def _measure(
    task: LayerTask, data: _Data, predictor: LinearPredictor, threshold: float
) -> tuple[PredictorQuality, float]:
    """Quality on all tokens of the part that measures, and up rows saved / n_ff where activity depends on up."""
    plan, base = _open(task)
    sets = ActiveSets(base, plan, task.i_layer)
    rows = data.shards.sample.rows("measure")
    step = max(1, _MAX_SCORES // task.cost.n_ff)
    found = []
    for first in range(rows.start, rows.stop, step):
        part = np.arange(first, min(first + step, rows.stop))
        x = data.inputs(part)
        active = data.shards.active(task.i_layer, part)
        scores = predictor.scores(x)
        quality = measure_predictor(scores, active, threshold)
        saved = 0.0
        if sets.up_depends:
            fires, _ = sets.of(x)
            saved = float((fires & (scores < np.float32(threshold))).mean())
        n = len(part)
        found.append(
            (n, n * quality.density, n * quality.density * quality.recall, n * quality.candidate_density, n * saved)
        )
    n, active, kept, candidates, saved = np.sum(found, axis=0)
    return PredictorQuality(float(kept / active) if active else 1.0, float(candidates / n), float(active / n)), float(
        saved / n
    )


# ---- Kept results --------------------------------------------------------------------------------------------------


def _write(path: Path, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, meta=json.dumps(meta), **arrays)


def _read(path: Path, identity: str) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """What _write wrote, None when it isn't there or of another run."""
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as file:
        meta = json.loads(str(file["meta"]))
        if meta["identity"] != identity:
            return None
        return meta, {name: file[name] for name in file.files if name != "meta"}
