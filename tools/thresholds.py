"""Thresholds per layer: what they save in bytes, what they cost in quality, and the best exchange of the two. numpy only.

A neuron's activation is a = act(gate . x), its product a * (up . x), its impact |product| * norm(down row). Ungated
blocks have no gate: a = act(up . x) is the product itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from powerinfer_py.errors import OptionError
from powerinfer_py.format import BASE_TENSORS, BaseModel

# Bins of |a| and of the impact: 8 per factor of 2, from 2^-24 on, as in ggml-powerinfer.h.
N_BINS = 320
_BINS_PER_OCTAVE = 8
_LOG2_LOWEST = -24
CALIBRATED_ACTIVATIONS = ("silu", "gelu")  # those without exact zeros
_TINY = np.finfo(np.float32).tiny


@dataclass(frozen=True)
class LayerCurves:
    """What thresholds at the lower edges of bins i (of |a|) and j (of the impact) do in one layer, per token.

    Attributes:
        up_saved: (N_BINS,) share of up rows that i skips, 0 to 1.
        down_saved: (N_BINS, N_BINS) share of down rows that i and j skip together.
        gate_energy: (N_BINS,) sum of impact^2 of the neurons that i skips.
        product_energy: (N_BINS, N_BINS) sum of impact^2 of those that only j skips.
    """

    up_saved: np.ndarray
    down_saved: np.ndarray
    gate_energy: np.ndarray
    product_energy: np.ndarray


@dataclass(frozen=True)
class LayerModel:
    """What one layer offers to the exchange.

    Attributes:
        saved: (N_BINS, N_BINS) bytes saved per token at edges (i, j).
        cost: (N_BINS, N_BINS) predicted KL divergence from the dense model, nats per token.
    """

    saved: np.ndarray
    cost: np.ndarray


def bin_edge(i: int) -> float:
    """Lower edge of a bin: the threshold that skips everything below bin i; 0 for bin 0."""
    return 0.0 if i == 0 else 2.0 ** (i / _BINS_PER_OCTAVE + _LOG2_LOWEST)


def _bins(values: np.ndarray) -> np.ndarray:
    bins = np.floor(_BINS_PER_OCTAVE * (np.log2(np.maximum(values, _TINY)) - _LOG2_LOWEST))
    return np.clip(bins, 0, N_BINS - 1).astype(np.intp)


def activate(activation: str, v: np.ndarray) -> np.ndarray:
    """Activations without exact zeros.

    Args:
        activation: `silu` or `gelu`.
        v: float32, any shape.

    Returns:
        float32 of the same shape.
    """
    if activation == "silu":
        return v / (1 + np.exp(-np.clip(v, -80, None)))
    if activation == "gelu":
        return 0.5 * v * (1 + np.tanh(0.7978845608 * v * (1 + 0.044715 * v * v)))
    raise OptionError(
        f"activation: '{activation}'; expected one of {', '.join(CALIBRATED_ACTIVATIONS)}; it has exact zeros."
    )


def neuron_impacts(base: BaseModel, activation: str, i_layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every neuron of one layer, computed densely.

    Args:
        base: the model.
        activation: `silu` or `gelu`.
        i_layer: the layer.
        x: (n_tokens, n_embd) float32, inputs of its FFN.

    Returns:
        |a| (n_tokens, n_ff) and impact (n_tokens, n_ff), float32.
    """

    def projected(name: str) -> np.ndarray:
        weight = BASE_TENSORS[f"base_{name}"] % i_layer
        out = x @ base.rows_f32(weight).T
        bias = weight.removesuffix("weight") + "bias"
        return out + base.array(bias) if bias in base.tensors else out

    if "gate" in base.ffn(i_layer):
        a = activate(activation, projected("gate"))
        product = a * projected("up")
    else:
        a = product = activate(activation, projected("up"))
    down_norm = np.linalg.norm(base.rows_f32(BASE_TENSORS["base_down"] % i_layer), axis=0)
    return np.abs(a), np.abs(product) * down_norm


def layer_curves(a: np.ndarray, impact: np.ndarray) -> LayerCurves:
    """The joint distribution of |a| and impact, summed up to every pair of edges.

    Args:
        a: (n_tokens, n_ff) float32, |a|.
        impact: (n_tokens, n_ff) float32.

    Returns:
        The curves.
    """
    n_tokens = a.shape[0]
    cells = (_bins(a) * N_BINS + _bins(impact)).ravel()

    def below_edges(weights: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sums over |a| < edge i; over impact < edge j; over both."""
        grid = np.bincount(cells, weights, N_BINS * N_BINS).reshape(N_BINS, N_BINS).astype(np.float64)
        both = np.zeros((N_BINS + 1, N_BINS + 1))
        both[1:, 1:] = grid.cumsum(0).cumsum(1)
        return both[:-1, -1], both[-1, :-1], both[:-1, :-1]

    by_gate, by_product, by_both = below_edges(None)
    gate_energy, product_energy, both_energy = below_edges(np.square(impact, dtype=np.float64).ravel())
    return LayerCurves(
        up_saved=by_gate / a.size,
        down_saved=(by_gate[:, None] + by_product - by_both) / a.size,
        gate_energy=gate_energy / n_tokens,
        product_energy=(product_energy - both_energy) / n_tokens,
    )


def layer_model(
    curves: LayerCurves, n_ff: int, up_bytes: int, down_bytes: int, gate_price: float, product_price: float
) -> LayerModel:
    """What the layer offers: KL divergence grows with the energy that is dropped, at a price measured per layer and test.

    Args:
        curves: of the layer.
        n_ff: neurons.
        up_bytes: of one up row that the test on |a| may skip; 0 when ungated.
        down_bytes: of one down row.
        gate_price: KL divergence per energy that the test on |a| drops, nats.
        product_price: the same for the test on the impact.

    Returns:
        The model.
    """
    saved = n_ff * (up_bytes * curves.up_saved[:, None] + down_bytes * curves.down_saved)
    if up_bytes == 0:
        saved[1:] = 0.0  # |a| is the product itself: one test does
    return LayerModel(saved, gate_price * curves.gate_energy[:, None] + product_price * curves.product_energy)


def best_edges(layers: Sequence[LayerModel], price: float) -> list[tuple[int, int]]:
    """The thresholds that are worth most at one price.

    maximise over edges (i_l, j_l) of every layer l:  sum_l saved_l(i_l, j_l) - price * sum_l cost_l(i_l, j_l)

    The sum falls apart into layers, so each is searched whole. Every answer is also the one that saves most among all
    that cost no more (Everett 1963: generalised Lagrange multipliers). A higher price never saves more in any layer.

    Args:
        layers: what each offers.
        price: bytes per token that one nat is worth.

    Returns:
        (i, j) per layer; the lowest edges where several are worth the same.
    """
    found = []
    for layer in layers:
        i, j = np.unravel_index(np.argmax(layer.saved - price * layer.cost), layer.saved.shape)
        found.append((int(i), int(j)))
    return found


def price_for(reach: Callable[[float], float], target: float, *, steps: int = 30) -> float:
    """The lowest price at which a falling quantity stays within a target.

    Args:
        reach: price -> the quantity (cost, or share saved), which falls as the price rises.
        target: at most this.
        steps: halvings of the logarithmic range 1e-6 .. 1e18.

    Returns:
        The price.
    """
    low, high = np.log(1e-6), np.log(1e18)
    for _ in range(steps):
        middle = (low + high) / 2
        if reach(np.exp(middle)) > target:
            low = middle
        else:
            high = middle
    return float(np.exp(high))
