"""How much each neuron of a model matters, from its weights, its plan or text, and which ones to keep.

Impacts of all layers are ranked together: each is relative to what it adds to, or, with a gradient, of one loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from powerinfer_py.errors import OptionError
from powerinfer_py.format import BaseModel, Plan

from .row_types import dequantize_rows

if TYPE_CHECKING:
    from .torch_graph import Graph

LEAST_KEPT = 0.25  # of each layer's neurons


def row_norms(base: BaseModel, i_layer: int, *, n_threads: int = 1) -> dict[str, np.ndarray]:
    """Norms of each neuron's weights.

    Args:
        base: the model.
        i_layer: a layer with a plain FFN.
        n_threads: that decode rows.

    Returns:
        `gate` (absent: ungated), `up`, `down` -> (n_ff,) float32, L2.
    """
    found = {}
    for name, tensor in base.ffn(i_layer).items():
        rows = dequantize_rows(
            base.raw(tensor.name).reshape(tensor.rows_shape[0], -1), tensor.type.name, n_threads=n_threads
        )
        found[name] = np.linalg.norm(rows, axis=0 if name == "down" else 1)
    return found


def stored_impacts(base: BaseModel, plan: Plan | None, *, n_threads: int = 1) -> tuple[list[np.ndarray], str]:
    """Impacts without text, relative to their layer's mean.

    Args:
        base: the model.
        plan: its plan.
        n_threads: that decode rows.

    Returns:
        For each layer (n_ff,) float64 in the base's order, and what they were computed from.
    """
    frequencies = [layer.neuron_frequency for layer in plan.layers] if plan else [None]
    known = all(frequency is not None for frequency in frequencies)
    impacts = []
    for i in range(base.n_layer):
        norms = row_norms(base, i, n_threads=n_threads)
        if known:
            order = plan.layers[i].neuron_order
            impact = np.empty(len(norms["down"]))
            impact[slice(None) if order is None else order] = frequencies[i]
            impact *= norms["down"]
        else:
            impact = np.prod([norm.astype(np.float64) for norm in norms.values()], axis=0)
        impacts.append(impact / max(impact.mean(), np.finfo(np.float64).tiny))
    return impacts, "the plan's frequencies and norms of down rows" if known else "norms of the weights alone"


def magnitude_impacts(graph: Graph, windows: np.ndarray, batch: int, step: Callable[[], object]) -> list[np.ndarray]:
    """Impacts from text: what neurons add to the residual stream, relative to the stream's norm.

    Args:
        graph: the model.
        windows: (n, ctx) int32.
        batch: windows at a time.
        step: called after each batch.

    Returns:
        For each layer (n_ff,) float64: product / norm of the layer's output, root mean square of all tokens (so that frequency
        counts), times norm of the down row. On models/tiny-relu the mean of absolute values chose worse.
    """
    import torch

    totals = [0.0] * graph.n_layer
    with torch.no_grad():
        for first in range(0, len(windows), batch):
            h = graph.embed(_tokens(graph, windows[first : first + batch]))
            for i in range(graph.n_layer):
                after, x = graph.attend(i, h)
                products = graph.products(i, x)
                h = graph.add_ffn(after, graph.down(i, products))
                share = products.float() / torch.linalg.vector_norm(h, dim=-1, keepdim=True)
                totals[i] = totals[i] + share.square().sum(dim=(0, 1)).cpu().double().numpy()
            step()
    norms = (row_norms(graph.base, i, n_threads=graph.n_threads)["down"] for i in range(graph.n_layer))
    return [np.sqrt(total / windows.size) * norm for total, norm in zip(totals, norms)]


def taylor_impacts(graph: Graph, windows: np.ndarray, step: Callable[[], object]) -> list[np.ndarray]:
    """Impacts from text: how far the loss of the next token would change without a neuron, to first order.

    Args:
        graph: the model, its matrices kept.
        windows: (n, ctx) int32; one is differentiated at a time.
        step: called after each.

    Returns:
        For each layer (n_ff,) float64: |sum over a window's tokens of (dLoss / dproduct) * product|, mean of windows.
        A sum over all text vanishes where training has ended, as no scale of a row lowers the loss then: it chose far worse.
    """
    import torch
    from torch.nn import functional as F

    sizes = [graph.base.ffn(i)["down"].ne[0] for i in range(graph.n_layer)]
    totals = [np.zeros(n) for n in sizes]
    for window in windows:
        tokens = _tokens(graph, window[None])
        # dLoss / dgate is the sum
        gates = [torch.ones(n, device=graph.device, requires_grad=True) for n in sizes]
        h = graph.embed(tokens)
        for i, gate in enumerate(gates):
            after, x = graph.attend(i, h)
            h = graph.add_ffn(after, graph.down(i, (graph.products(i, x) * gate).to(graph.dtype)))
        logits = graph.last_norm(h)[0, :-1] @ graph.head().T
        loss = F.cross_entropy(logits.float(), tokens[0, 1:])
        for total, found in zip(totals, torch.autograd.grad(loss, gates)):
            total += found.abs().cpu().double().numpy()
        step()
    return [total / len(windows) for total in totals]


def _tokens(graph: Graph, windows: np.ndarray):
    import torch

    return torch.from_numpy(windows.astype(np.int64)).to(graph.device)


def kept_neurons(impacts: Sequence[np.ndarray], share: float, units: Sequence[int], *, even: bool) -> list[np.ndarray]:
    """Which neurons stay when the least of them go, in whole units, and never more than 1 - LEAST_KEPT of a layer.

    Args:
        impacts: for each layer (n_ff,).
        share: of all neurons that are to go, above 0.
        units: for each layer, of how many neurons a multiple goes.
        even: the same share of each layer goes; otherwise the units of least mean impact of all layers together.

    Returns:
        For each layer the neurons that stay, ascending: (n_kept,) int64.

    Raises:
        OptionError: more than may go, or less than a unit.
    """
    if share > 1 - LEAST_KEPT:
        raise OptionError(
            f"drop: {share:.2%}; expected at most {1 - LEAST_KEPT:.0%}: every layer keeps {LEAST_KEPT:.0%}; pass less."
        )
    n_all = sum(len(impact) for impact in impacts)
    most = [math.floor((1 - LEAST_KEPT) * len(impact)) // unit for impact, unit in zip(impacts, units)]
    if even:
        dropped = [min(n, round(share * len(impact) / unit)) * unit for impact, unit, n in zip(impacts, units, most)]
    else:
        ranked = [np.sort(impact)[: n * unit].reshape(n, unit) for impact, unit, n in zip(impacts, units, most)]
        candidates = sorted((mean, i) for i, rows in enumerate(ranked) for mean in rows.mean(axis=1).tolist())
        dropped = [0] * len(impacts)
        n_left = round(share * n_all)
        for _, i in candidates:
            if 2 * n_left >= units[i]:
                dropped[i] += units[i]
                n_left -= units[i]
    if not any(dropped):
        least = max(units) * len(units) if even else min(units)
        raise OptionError(
            f"drop: {share:.2%} of {n_all} neurons; expected {least / n_all:.2%} or more: rows of down lose whole blocks, "
            f"{max(units)} neurons of a layer at once{', of each layer' if even else ''}, and every layer keeps {LEAST_KEPT:.0%}; pass more."
        )
    return [np.sort(np.argsort(impact, kind="stable")[n:]) for impact, n in zip(impacts, dropped)]
