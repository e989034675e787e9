"""What `powerinfer simulate` counts with: bytes of a model by layer, and how often its neurons are active.

From a GGUF and its plan, or from a shape with statistics; every published figure stands with its source. Sizes are in bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from powerinfer_py.errors import OptionError
from powerinfer_py.format import BaseModel, Plan, PlanLayer
from powerinfer_py.gguf_file import row_type_name

from .plot_profile import MARKED_SHARE
from .row_types import row_bytes
from .terminal import note_once

_KV_BYTES = 2  # of a value in the cache: F16, llama.cpp's default
_N_POINTS = 4096  # of the frequency curve, where it is fitted
_STEPS = 60  # of a bisection: more than the digits of a float32


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer.

    Attributes:
        n_ff: neurons; 0: an FFN that isn't computed by neurons, its bytes are in dense_bytes.
        dense_bytes: ggml type name -> bytes of the weights that every token reads: attention, norms.
        kv_bytes: of the layer's cache, full.
        rows: (type, bytes) of each row of a neuron; the first says whether it is active: gate, or up without a gate.
        predictor_row: (type, bytes) of the predictor per neuron; None: no predictor, every first row is read.
        frequency: (n_ff,) float64 in [0, 1], share of tokens in which each neuron is active, hot first.
        candidate_ratio: neurons that the predictor lets through per active one, at least 1.
    """

    n_ff: int
    dense_bytes: Mapping[str, int]
    kv_bytes: int
    rows: tuple[tuple[str, int], ...] = ()
    predictor_row: tuple[str, float] | None = None
    frequency: np.ndarray = field(default_factory=lambda: np.zeros(0))
    candidate_ratio: float = 1.0

    @property
    def neuron_bytes(self) -> int:
        """Of one neuron's rows, without the predictor."""
        return sum(n_bytes for _, n_bytes in self.rows)

    @property
    def predictor_bytes(self) -> float:
        """Of the layer's predictor."""
        return self.n_ff * self.predictor_row[1] if self.predictor_row else 0.0

    @property
    def dense_total(self) -> int:
        """Of what every token reads, cache included."""
        return sum(self.dense_bytes.values()) + self.kv_bytes

    @property
    def total_bytes(self) -> float:
        """Of everything."""
        return self.dense_total + self.n_ff * self.neuron_bytes + self.predictor_bytes


@dataclass(frozen=True, eq=False)
class Model:
    """A model as the simulation sees it.

    Attributes:
        name: for the reader.
        layers: one each.
        output_bytes: ggml type name -> bytes of the output matrix and what else is read behind the last layer.
    """

    name: str
    layers: tuple[Layer, ...]
    output_bytes: Mapping[str, int]

    @property
    def total_bytes(self) -> float:
        """Of everything that a token may read."""
        return sum(self.output_bytes.values()) + sum(layer.total_bytes for layer in self.layers)

    @property
    def density(self) -> float:
        """Active neurons of all."""
        n_ff = sum(layer.n_ff for layer in self.layers)
        return sum(float(layer.frequency.sum()) for layer in self.layers) / n_ff if n_ff else 0.0


@dataclass(frozen=True)
class Shape:
    """A model's shape, with the statistics of its activations.

    Attributes:
        n_layer: layers.
        n_embd: width.
        n_ff: neurons per layer.
        n_embd_kv: values of a token's key in one layer.
        n_vocab: rows of the output matrix.
        gated: whether the FFN has a gate.
        tied: whether the output matrix is the table of embeddings.
        density: share of active neurons.
        hot_share: share of the neurons that makes up 80 % of a layer's activations.
        predictor_share: parameters of all predictors / of the model; 0: no predictors.
    """

    n_layer: int
    n_embd: int
    n_ff: int
    n_embd_kv: int
    n_vocab: int
    gated: bool
    tied: bool
    density: float
    hot_share: float
    predictor_share: float

    @property
    def attention_parameters(self) -> int:
        """Of one layer: query, key, value, output."""
        return 2 * self.n_embd * (self.n_embd + self.n_embd_kv)

    @property
    def n_parameters(self) -> int:
        """Of all matrices."""
        ffn = (3 if self.gated else 2) * self.n_embd * self.n_ff
        tables = (1 if self.tied else 2) * self.n_embd * self.n_vocab
        return self.n_layer * (self.attention_parameters + ffn) + tables


# Where one model's figure isn't published, that of the nearest kind of model stands in.
_RELU_HOT_SHARE = 0.26  # OPT-30B, one layer (PowerInfer, SOSP'24, 3.1)
_REGLU_HOT_SHARE = 0.43  # LLaMA2(ReGLU)-70B, one layer (same)
_PREDICTOR_SHARE = 0.0709  # mean of table 6 (same, 8.3.4)

# Shapes: the config.json that each model was published with. Densities: PowerInfer, SOSP'24, table 3 (OPT-30B: table 1; OPT-66B:
# the middle of table 3's range). Predictors: table 6.
SHAPES = {
    "falcon-40b": Shape(60, 8192, 32768, 512, 65024, False, False, 0.05, _RELU_HOT_SHARE, 0.0868),
    "opt-30b": Shape(48, 7168, 28672, 7168, 50272, False, True, 0.03, _RELU_HOT_SHARE, _PREDICTOR_SHARE),
    "opt-66b": Shape(64, 9216, 36864, 9216, 50272, False, True, 0.03, _RELU_HOT_SHARE, 0.0488),
    "bamboo-7b": Shape(32, 4096, 14336, 1024, 32000, True, False, 0.10, _RELU_HOT_SHARE, _PREDICTOR_SHARE),
    "llama2-7b": Shape(32, 4096, 11008, 4096, 32000, True, False, 0.30, _REGLU_HOT_SHARE, _PREDICTOR_SHARE),
    "llama2-13b": Shape(40, 5120, 13824, 5120, 32000, True, False, 0.22, _REGLU_HOT_SHARE, _PREDICTOR_SHARE),
    "llama2-70b": Shape(80, 8192, 28672, 1024, 32000, True, False, 0.18, _REGLU_HOT_SHARE, 0.0808),
}

# What a shape has that doesn't say otherwise.
DEFAULT_SHAPE = {"n_vocab": 32000, "gated": True, "tied": False, "predictor_share": _PREDICTOR_SHARE}


def frequency_curve(n_ff: int, density: float, hot_share: float) -> np.ndarray:
    """Frequencies that have a given mean and skew: a power law, min(1, scale * position ** -exponent).

    Args:
        n_ff: neurons.
        density: mean, in (0, 1].
        hot_share: share of the neurons that makes up 80 % of the sum, in (0, 0.8]; 0.8: all are alike.

    Returns:
        (n_ff,) float64, hot first.

    Raises:
        OptionError: no frequencies up to 1 have that mean and skew.

    Source: PowerInfer, SOSP'24, 3.1 (activations follow a power law).
    """
    if not (0 < density <= 1 and MARKED_SHARE * density <= hot_share <= MARKED_SHARE):
        raise OptionError(
            f"statistics: density {density:g}, {hot_share:g} of the neurons for {MARKED_SHARE:.0%} of the activations; "
            f"expected a density up to 1 and a share from {MARKED_SHARE:g} * density to {MARKED_SHARE:g}; "
            "change --density or --skew."
        )
    positions = (np.arange(_N_POINTS) + 0.5) / _N_POINTS

    def fitted_scale(exponent: float) -> float:
        """Its logarithm, at which the mean is the density."""
        low, high = np.log(density) + exponent * np.log(positions[0]), 0.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            mean = np.exp(np.minimum(0.0, middle - exponent * np.log(positions))).mean()
            low, high = (middle, high) if mean < density else (low, middle)
        return (low + high) / 2

    low, high = 0.0, 64.0
    for _ in range(_STEPS):
        exponent = (low + high) / 2
        curve = np.exp(np.minimum(0.0, fitted_scale(exponent) - exponent * np.log(positions)))
        hot = curve[: round(hot_share * _N_POINTS)].sum() / curve.sum()
        low, high = (exponent, high) if hot < MARKED_SHARE else (low, exponent)
    scale = fitted_scale(low)
    curve = np.exp(np.minimum(0.0, scale - low * np.log((np.arange(n_ff) + 0.5) / n_ff)))
    return curve * min(1.0, density / curve.mean())


def shape_model(
    name: str, shape: Shape, row_type: str, predictor_type: str, n_ctx: int, candidate_density: float | None
) -> Model:
    """A model of a shape, all layers alike.

    Args:
        name: for the reader.
        shape: its shape and statistics.
        row_type: ggml type name of all weights.
        predictor_type: of the predictors.
        n_ctx: tokens in the cache.
        candidate_density: neurons that the predictors let through / n_ff; None: the active ones.

    Returns:
        The model.

    Raises:
        OptionError: rows that the type can't hold, or impossible statistics.
    """
    row = (row_type, row_bytes(shape.n_embd, row_type))
    # a neuron's column of down has n_embd values too
    predictor_values = shape.predictor_share * shape.n_parameters / (shape.n_layer * shape.n_ff)
    predictor = (predictor_type, predictor_values * row_bytes(shape.n_embd, predictor_type) / shape.n_embd)
    layer = Layer(
        n_ff=shape.n_ff,
        dense_bytes={row_type: row[1] * 2 * (shape.n_embd + shape.n_embd_kv)},
        kv_bytes=2 * _KV_BYTES * shape.n_embd_kv * n_ctx,
        rows=(row,) * (3 if shape.gated else 2),
        predictor_row=predictor if shape.predictor_share else None,
        frequency=frequency_curve(shape.n_ff, shape.density, shape.hot_share),
        candidate_ratio=_ratio(candidate_density, shape.density),
    )
    return Model(name, (layer,) * shape.n_layer, {row_type: row[1] * shape.n_vocab})


def file_model(base: BaseModel, plan: Plan | None, n_ctx: int, density: float | None, hot_share: float | None) -> Model:
    """A model from its files.

    Args:
        base: the base model.
        plan: its plan; None: every layer that a plan could cover counts, without predictors.
        n_ctx: tokens in the cache.
        density: share of active neurons where the plan has no statistics.
        hot_share: share of the neurons that makes up 80 % of the activations there.

    Returns:
        The model.

    Raises:
        OptionError: no statistics, neither in the plan nor given.
    """
    layers = []
    note = note_once()
    for i in range(base.n_layer):
        planned = plan.layers[i] if plan else None
        layers.append(_file_layer(base, planned, i, n_ctx, density, hot_share, note))
    output = base.tensor("output.weight") or base.tensor("token_embd.weight")
    return Model(base.path.name, tuple(layers), {output.type_name: output.n_bytes} if output else {})


def _file_layer(
    base: BaseModel,
    layer: PlanLayer | None,
    i_layer: int,
    n_ctx: int,
    density: float | None,
    hot_share: float | None,
    note: Callable[[str], None],
) -> Layer:
    ffn = base.ffn(i_layer)
    covered = bool(layer.n_ff) if layer else not base.why_not_covered(i_layer)
    neurons = {tensor.name for tensor in ffn.values()} if covered else set()
    dense = Counter()
    for name in base.tensors:
        if name.startswith(f"blk.{i_layer}.") and name not in neurons:
            dense[base.tensor(name).type_name] += base.tensor(name).n_bytes
    found = Layer(0, dict(dense), _kv_values(base, i_layer, note) * _KV_BYTES * n_ctx)
    if not covered:
        note(f"{base.where}: every weight of layers that no plan covers counts as read, experts too.")
        return found
    n_ff = ffn["down"].ne[0]
    rows = tuple((tensor.type_name, tensor.n_bytes // n_ff) for tensor in ffn.values())  # gate, up, down
    found = replace(found, n_ff=n_ff, rows=rows)
    if layer is not None and layer.neuron_frequency is not None:
        frequency = np.sort(layer.neuron_frequency.astype(np.float64))[::-1]
    elif density is not None and hot_share is not None:
        frequency = frequency_curve(n_ff, density, hot_share)
    else:
        raise OptionError(
            f"{base.where}: no statistics of layer {i_layer}; expected a profiled plan; "
            "profile it (powerinfer profile), or pass --density and --skew."
        )
    if layer is None or layer.predictor == "none":
        return replace(found, frequency=frequency)
    n_bytes = layer.fc1.data.nbytes + layer.fc2.data.nbytes
    ratio = _ratio(layer.predictor_candidate_density or None, float(frequency.mean()))
    row = (row_type_name(layer.fc2.row_type), n_bytes / n_ff)
    return replace(found, frequency=frequency, predictor_row=row, candidate_ratio=ratio)


def _ratio(candidate_density: float | None, density: float) -> float:
    return max(1.0, candidate_density / density) if candidate_density and density else 1.0


def _kv_values(base: BaseModel, i_layer: int, note: Callable[[str], None]) -> int:
    """Values of a token's key and value in one layer."""
    parts = [base.tensor(f"blk.{i_layer}.attn_{name}.weight") for name in ("k", "v")]
    if all(parts):
        return sum(part.ne[1] for part in parts)
    qkv = base.tensor(f"blk.{i_layer}.attn_qkv.weight")
    if qkv is None:
        note(f"{base.where}: layers without matrices of keys and values count as without a cache.")
        return 0
    return qkv.ne[1] - base.n_embd
