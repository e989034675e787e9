"""The picture of a reluify run: perplexity and density over tokens. matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powerinfer_py.format import atomic_path


def write_plot(
    path: str | os.PathLike[str],
    log: Sequence[dict[str, Any]],
    teacher_perplexity: float,
    aim: float | None,
    title: str,
) -> Path:
    """Draws perplexity and density over the tokens as PNG.

    Args:
        path: the file.
        log: of the run.
        teacher_perplexity: of the model that it began with.
        aim: density that was wished for, 0 to 1; None: none, and only perplexity is drawn.
        title: above the picture.

    Returns:
        The path written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    n_panels = 1 if aim is None else 2
    figure = Figure(figsize=(7.2, 3.0 * n_panels), dpi=150, layout="constrained")
    quality, *rest = panels = figure.subplots(n_panels, 1, sharex=True, squeeze=False)[:, 0]
    figure.suptitle(title)
    tokens = [entry["tokens"] / 1e6 for entry in log]
    quality.plot(tokens, [entry["perplexity"] for entry in log], "o-", markersize=3, color="C0", label="this model")
    quality.axhline(teacher_perplexity, color="0.4", linestyle="--", label=f"original: {teacher_perplexity:.2f}")
    quality.set(ylabel="perplexity, held-out text", yscale="log")
    for density in rest:
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
        density.set(ylabel="active neurons", ylim=(0, None))
        density.yaxis.set_major_formatter(PercentFormatter(1))
    panels[-1].set_xlabel("million tokens")
    edges = [(a, b) for a, b in zip(log, log[1:]) if a["stage"] != b["stage"] or a["group"] != b["group"]]
    for axes in panels:
        for before, after in edges:
            axes.axvline((before["tokens"] + after["tokens"]) / 2e6, color="0.8", linewidth=1)
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
        axes.legend(fontsize=8, framealpha=1)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format="png")
    return Path(path)
