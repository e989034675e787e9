"""The picture of a profile: cumulative share of activations against share of neurons, one line per layer. matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from powerinfer_py.format import atomic_path

from .arguments import need_packages

# The share of activations that the paper's "hot" neurons make up (arXiv 2312.12456, section 2.2).
MARKED_SHARE = 0.8


def check_plot() -> None:
    """Says whether pictures can be made here.

    Raises:
        OptionError: matplotlib isn't installed.
    """
    need_packages("plot", "plot", "matplotlib", otherwise=" or pass --no-plot")


def share_of_neurons(frequency: np.ndarray, share: float = MARKED_SHARE) -> float:
    """The share of a layer's neurons that makes up a share of its activations.

    Args:
        frequency: (n_ff,) activations of each neuron, any unit, hot first.
        share: of the activations, 0 to 1.

    Returns:
        0 to 1; 0 for a layer that was never active.
    """
    total = frequency.sum(dtype=np.float64)
    if total == 0:
        return 0.0
    return int(np.searchsorted(np.cumsum(frequency, dtype=np.float64), share * total) + 1) / len(frequency)


def write_plot(path: str | os.PathLike[str], frequencies: Sequence[np.ndarray | None], title: str) -> Path:
    """Draws the curves as PNG.

    Args:
        path: the file.
        frequencies: per layer (n_ff,) activations of each neuron, hot first; None for a layer that isn't covered.
        title: above the picture.

    Returns:
        The path written.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    drawn = [(i, f) for i, f in enumerate(frequencies) if f is not None and f.any()]
    figure = Figure(figsize=(7.2, 5.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    colours = ScalarMappable(Normalize(0, max(len(frequencies) - 1, 1)), colormaps["viridis"])
    for i, frequency in drawn:
        cumulative = np.concatenate([[0.0], np.cumsum(frequency, dtype=np.float64) / frequency.sum(dtype=np.float64)])
        axes.plot(np.linspace(0, 1, len(cumulative)), cumulative, color=colours.to_rgba(i), linewidth=1.1)
    marked = f"{MARKED_SHARE:.0%} of a layer's activations"
    if drawn:
        shares = [
            f"{share_of_neurons(frequency):.0%}" for frequency in sorted((f for _, f in drawn), key=share_of_neurons)
        ]
        marked += f": made by {shares[0]}{'' if shares[0] == shares[-1] else f' to {shares[-1]}'} of its neurons"
    axes.axhline(MARKED_SHARE, color="0.35", linewidth=0.9, linestyle="--", label=marked)
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=0.9, linestyle=":", label="if all neurons were alike")
    axes.legend(loc="lower right", fontsize=9, framealpha=1)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="neurons, hottest first", ylabel="share of activations", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    if len(frequencies) > 1:
        bar = figure.colorbar(colours, ax=axes, label="layer")
        bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format="png")
    return Path(path)
