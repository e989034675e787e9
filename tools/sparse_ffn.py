"""Feed-forward blocks that are being trained to be sparse, in torch: weights, their rounding, and what keeps them sparse.

Weights are float32; a pass sees copies rounded to a row type and to the type of matrix products, whose gradients are the weights'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType
from torch.nn import functional as F

from powerinfer_py.format import BASE_TENSORS, BaseModel

from .row_types import dequantize_rows, quantize_rows
from .torch_graph import Graph, activate, compiled

# Size that the control takes a smaller weight for, so that it passes 0.
_LEAST_WEIGHT = 0.02
# Below 0 where a layer is sparser than wished: left alone, layers fell to a few percent at once, many neurons for good.
_WEIGHT_LIMITS = (-0.1, 3.0)


def steered_weight(weight: float, density: float, wished: float, rate: float) -> float:
    """The next weight of a layer's pressure.

    Args:
        weight: the present one.
        density: found, 0 to 1.
        wished: the density to steer to.
        rate: per step.

    Returns:
        Larger where the layer is too dense, smaller where it is too sparse.
    """
    distance = min(1.0, density / wished - 1.0)
    weight += rate * distance * max(_LEAST_WEIGHT, abs(weight))
    return min(_WEIGHT_LIMITS[1], max(_WEIGHT_LIMITS[0], weight))


@dataclass
class FfnOutput:
    """What one pass through a block gives.

    Attributes:
        y: (..., n_embd).
        pressure: (mean a)^2 / mean a^2 of the activations a: L1 against L2, a smooth measure of density.
        density: share of a > 0, without gradient.
    """

    y: torch.Tensor
    pressure: torch.Tensor
    density: torch.Tensor


class SparseFfn:
    """One layer's FFN.

    Attributes:
        activation: as the plan names it.
        weights: `gate` (absent: ungated), `up` and `down`, each (n_ff, n_embd) float32, neuron-major; and their biases, `gate_bias`, ...
        row_types: matrix -> type that its rows are rounded to in a pass; absent: not.
        stock_down: the rows of `down` that are rounded are those of a stock file, along n_ff; else neuron-major, as a plan's are.
    """

    def __init__(
        self,
        activation: str,
        weights: dict[str, torch.Tensor],
        row_types: Mapping[str, GGMLQuantizationType],
        graph: Graph,
        *,
        stock_down: bool = False,
    ) -> None:
        """Of these weights; `graph` says how it is computed."""
        self.activation = activation
        self.weights = weights
        self.row_types = row_types
        self.stock_down = stock_down
        self.dtype = graph.dtype
        self.n_threads = graph.n_threads
        self.compiled = graph.compiled
        self._seen: dict[str, torch.Tensor] = {}

    def rounded(self, name: str) -> torch.Tensor:
        """A weight as a file of its row type holds it: float32, in the shape of the weight."""
        weight = self.weights[name].detach()
        row_type = self.row_types.get(name)
        if row_type is None:
            return weight
        turned = name == "down" and self.stock_down
        values = (weight.T if turned else weight).contiguous().cpu().numpy()
        rows = quantize_rows(values, row_type.name, n_threads=self.n_threads)
        found = torch.from_numpy(dequantize_rows(rows, row_type.name, n_threads=self.n_threads)).to(weight.device)
        return found.T.contiguous() if turned else found

    def begin(self, *, train: bool) -> None:
        """Makes the copies that passes see, until the next call.

        Args:
            train: gradients are wanted.
        """
        self._seen = {name: self.rounded(name).to(self.dtype).requires_grad_(train) for name in self.weights}

    def end(self) -> None:
        """Gives the copies' gradients to the weights (straight through the rounding), and drops the copies."""
        for name, copy in self._seen.items():
            self.weights[name].grad = None if copy.grad is None else copy.grad.float()
        self._seen = {}

    def __call__(self, x: torch.Tensor) -> FfnOutput:
        """x: (..., n_embd) as dtype; between begin() and end()."""
        return FfnOutput(*compiled(_sparse_pass, self.compiled)(self.activation, self._seen, x))


def _sparse_pass(
    activation: str, weights: Mapping[str, torch.Tensor], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SparseFfn's pass: y, pressure, density."""
    up = F.linear(x, weights["up"], weights.get("up_bias"))
    gate = F.linear(x, weights["gate"], weights.get("gate_bias")) if "gate" in weights else None
    a, product = activate(activation, gate, up)
    y = product @ weights["down"]
    if "down_bias" in weights:
        y = y + weights["down_bias"]
    exact = a.float()
    pressure = exact.mean().square() / (exact.square().mean() + 1e-12)
    return y, pressure, (exact.detach() > 0).float().mean()


def read_ffn(
    graph: Graph,
    base: BaseModel,
    i_layer: int,
    activation: str,
    row_types: Mapping[str, GGMLQuantizationType],
    *,
    stock_down: bool = False,
) -> SparseFfn:
    """A model's own FFN as the start of a sparse one.

    Args:
        graph: says how it is computed.
        base: the model whose FFN it is.
        i_layer: a layer whose FFN has separate matrices.
        activation: of the sparse one.
        row_types: `gate`, `up`, `down` -> the type that rows are rounded to.
        stock_down: as SparseFfn's.

    Returns:
        The block.
    """
    weights = {}
    for name, tensor in base.ffn(i_layer).items():
        raw = base.raw(tensor.name).reshape(tensor.rows_shape[0], -1)
        rows = torch.from_numpy(dequantize_rows(raw, tensor.type.name, n_threads=graph.n_threads))
        weights[name] = (rows.T if name == "down" else rows).contiguous().to(graph.device)
        bias = BASE_TENSORS[f"base_{name}"].replace("weight", "bias") % i_layer
        if bias in base.tensors:
            weights[f"{name}_bias"] = torch.from_numpy(base.rows_f32(bias).reshape(-1).copy()).to(graph.device)
    return SparseFfn(activation, weights, row_types, graph, stock_down=stock_down)
