"""The picture of a reluify run: perplexity and density over tokens. matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powerinfer_py.format import atomic_path


def write_plot(
    path: str | os.PathLike[str], log: Sequence[dict[str, Any]], teacher_perplexity: float, aim: float, title: str
) -> Path:
    """Draws two panels over the tokens as PNG.

    Args:
        path: the file.
        log: of the run.
        teacher_perplexity: of the model that it began with.
        aim: density that was wished for, 0 to 1.
        title: above the picture.

    Returns:
        The path written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(7.2, 6.0), dpi=150, layout="constrained")
    quality, density = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title)
    tokens = [entry["tokens"] / 1e6 for entry in log]
    quality.plot(tokens, [entry["perplexity"] for entry in log], "o-", markersize=3, color="C0", label="sparse model")
    quality.axhline(teacher_perplexity, color="0.4", linestyle="--", label=f"original: {teacher_perplexity:.2f}")
    quality.set(ylabel="perplexity, held-out text", yscale="log")
    means = [sum(entry["density"]) / len(entry["density"]) for entry in log]
    density.fill_between(
        tokens,
        [min(entry["density"]) for entry in log],
        [max(entry["density"]) for entry in log],
        color="C1",
        alpha=0.2,
        label="all layers",
    )
    density.plot(tokens, means, "o-", markersize=3, color="C1", label="mean")
    density.axhline(aim, color="0.4", linestyle="--", label=f"aim: {aim:.0%}")
    density.set(ylabel="active neurons", xlabel="million tokens", ylim=(0, None))
    density.yaxis.set_major_formatter(PercentFormatter(1))
    edges = [(a, b) for a, b in zip(log, log[1:]) if a["stage"] != b["stage"] or a["group"] != b["group"]]
    for axes in (quality, density):
        for before, after in edges:
            axes.axvline((before["tokens"] + after["tokens"]) / 2e6, color="0.8", linewidth=1)
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.legend(fontsize=8, framealpha=1)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format="png")
    return Path(path)
