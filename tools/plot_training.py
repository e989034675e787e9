"""The picture of trained predictors: recall, candidate and true density, and rank of each layer. matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from powerinfer_py.format import atomic_path

from .train_layer import LayerResult


def write_plot(path: str | os.PathLike[str], layers: Sequence[LayerResult], title: str) -> Path:
    """Draws three panels over the layers as PNG.

    Args:
        path: the file.
        layers: in any order.
        title: above the picture.

    Returns:
        The path written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    layers = sorted(layers, key=lambda layer: layer.i_layer)
    made = [layer for layer in layers if layer.kind != "none"]
    figure = Figure(figsize=(7.2, 7.2), dpi=150, layout="constrained")
    recall, density, rank = figure.subplots(3, 1, sharex=True)
    figure.suptitle(title)
    numbers = [layer.i_layer for layer in made]
    recall.plot(numbers, [layer.recall for layer in made], "o-", color="C0", label="recall")
    recall.plot(numbers, [layer.accuracy for layer in made], "s--", color="C2", label="accuracy of all decisions")
    recall.set(ylabel="share")
    density.plot(
        [layer.i_layer for layer in layers], [layer.density for layer in layers], "o-", color="0.4", label="active"
    )
    density.plot(numbers, [layer.candidate_density for layer in made], "o-", color="C1", label="candidates")
    density.set(ylabel="share of neurons")
    density.set_ylim(bottom=0)
    for kind, colour in (("linear", "C0"), ("mlp", "C3")):
        of_kind = [layer for layer in made if layer.kind == kind]
        if of_kind:
            rank.bar([layer.i_layer for layer in of_kind], [layer.rank for layer in of_kind], color=colour, label=kind)
    rank.set(ylabel="rank", xlabel="layer")
    rank.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (recall, density):
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in (recall, density, rank):
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, framealpha=1)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format="png")
    return Path(path)
