"""The picture of `powerinfer simulate`: tokens per second of each way to run a model, and the GPU's share of the work. matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer_py.format import atomic_path

if TYPE_CHECKING:
    from .simulate import Bar

_COLOURS = ("#7f7f7f", "#56b4e9", "#009e73", "#d55e00")


def write_plot(path: str | os.PathLike[str], bars: Sequence[Bar], title: str) -> Path:
    """Draws the bars as PNG.

    Args:
        path: the file.
        bars: at most four; the first is what the others are compared with.
        title: above the picture.

    Returns:
        The path written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9.6, 3.2), dpi=150, layout="constrained")
    speed, part = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    names = [bar.name for bar in bars]
    drawn = speed.barh(names, [bar.tok_s for bar in bars], color=_COLOURS, height=0.62)
    labels = [f"{bar.tok_s:.3g}  ({bar.tok_s / bars[0].tok_s:.2f}x)" for bar in bars]
    speed.bar_label(drawn, labels, padding=4, fontsize=9)
    speed.set(xlabel="tokens per second, decoding", xlim=(0, 1.32 * max(bar.tok_s for bar in bars)))
    speed.invert_yaxis()
    drawn = part.barh(names, [bar.gpu_share for bar in bars], color=_COLOURS, height=0.62)
    part.bar_label(drawn, [f"{bar.gpu_share:.0%}" for bar in bars], padding=4, fontsize=9)
    part.set(xlabel="GPU's share of the active neurons' work", xlim=(0, 1.18))
    part.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    for axes in (speed, part):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="0.92")
        axes.set_axisbelow(True)
    figure.suptitle(f"{title} (simulated)", fontsize=10)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format="png")
    return Path(path)
