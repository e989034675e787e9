"""The picture of `powerinfer bench`: speed-up against density with its bandwidth limit, and decode time by part. matplotlib."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powerinfer_py.bench import STOCK, Line
from powerinfer_py.errors import OptionError
from powerinfer_py.format import atomic_path

from .arguments import need_packages

COLOURS = {"dense": "#7f7f7f", "exact": "#0072b2", "threshold": "#009e73", "predicted": "#d55e00", "auto": "#cc79a7"}
MARKERS = ("o", "s", "^", "D", "v", "P")
# What a decoded token's time is made of, from the bottom of a bar up: field of Line, name, colour.
PARTS = (
    ("outside_ms", "outside of our FFN", "#c8c8c8"),
    ("ffn_rest_ms", "rest of FFN", "#e5c494"),
    ("up_down_ms", "up and down", "#8da0cb"),
    ("gate_ms", "gate", "#66c2a5"),
    ("predictor_ms", "predictor", "#fc8d62"),
)
STOCK_COLOUR = "#555555"
# Densities further apart than this factor are drawn on a logarithmic axis.
LOG_AXIS_FROM = 4.0
# Marks of a logarithmic axis, in per cent.
MARKED_DENSITIES = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
# With more bars than this, their labels stand upright.
N_LEVEL_LABELS = 9


def check_plot(modes: Sequence[str]) -> None:
    """Says whether the picture can be made.

    Args:
        modes: what will be measured.

    Raises:
        OptionError: matplotlib isn't installed, or stock, which the picture compares with, isn't measured.
    """
    need_packages("png", "plot", "matplotlib", otherwise=" or leave --png out")
    if STOCK not in modes or len(modes) < 2:
        raise OptionError(f"png: modes are {','.join(modes)}; expected stock and another to compare; change --modes.")


def write_plot(path: str | os.PathLike[str], lines: Sequence[Line], noisy: bool = False) -> Path:
    """Draws the lines of one or more models as PNG.

    Drawn is the largest thread count that isn't oversubscribed, or the largest.

    Args:
        path: the file.
        lines: stock and at least one other mode of each model.
        noisy: the picture says that the machine was too noisy.

    Returns:
        The path written.
    """
    from matplotlib.figure import Figure

    n_threads = max(lines, key=lambda line: (not line.oversubscribed, line.n_threads)).n_threads
    drawn = [line for line in lines if line.n_threads == n_threads]
    bars = _bars(drawn)
    figure = Figure(figsize=(12.5 + max(0, len(bars) - 8) * 0.35, 5.4), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.0, max(1.0, len(bars) / 8)))
    _draw_speed_up(left, [line for line in drawn if line.mode != STOCK])
    _draw_parts(right, bars)
    shapes = sorted({line.shape for line in drawn})
    title = f"{'; '.join(shapes)} - {n_threads} thread{'s' if n_threads > 1 else ''}, decoding"
    figure.suptitle(title + (" - NOISY MACHINE" if noisy else ""), fontsize=11)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format="png")
    return Path(path)


def _group(line: Line) -> tuple[str, str]:
    """What a curve joins over densities, beside the mode."""
    return line.shape, "" if line.mode == STOCK else line.row_types


def _draw_speed_up(axes: Any, lines: Sequence[Line]) -> None:
    """Points and limit of each mode over density in per cent."""
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    groups = list(dict.fromkeys(_group(line) for line in lines))
    densities = sorted({round(100 * line.density, 2) for line in lines})
    for mode in dict.fromkeys(line.mode for line in lines):
        for group, marker in zip(groups, MARKERS * len(groups)):
            points = sorted(
                (line for line in lines if line.mode == mode and _group(line) == group), key=lambda line: line.density
            )
            x = [100 * line.density for line in points]
            colour = COLOURS[mode]
            name = mode if len(groups) == 1 else f"{mode}, {group[1]}"
            axes.plot(x, [line.decode_ratio for line in points], marker=marker, color=colour, label=name, zorder=3)
            # One point has no line: its limit is a short dash.
            style = {"linestyle": "--"} if len(points) > 1 else {"linestyle": "", "marker": "_", "markersize": 16}
            axes.plot(x, [line.limit_ratio for line in points], color=colour, linewidth=1.2, **style)
    axes.plot([], [], color="0.3", linestyle="--", linewidth=1.2, label="limit: bytes of stock / bytes read")
    axes.axhline(1.0, color=STOCK_COLOUR, linewidth=1.2, linestyle=":", label="stock llama.cpp")
    if densities[-1] > LOG_AXIS_FROM * densities[0]:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(densities[0] / 1.3, densities[-1] * 1.3)
        axes.set_xticks([mark for mark in MARKED_DENSITIES if densities[0] / 1.3 < mark < densities[-1] * 1.3])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="density: down rows used, %", ylabel="decode speed, x stock", title="Speed-up and bandwidth limit")
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.legend(fontsize=9, framealpha=1)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"


def _bars(lines: Sequence[Line]) -> list[tuple[str, Line | None, float]]:
    """(label, line, ms per token) of each bar; line None: stock. Models alike in mode and density have one, the median."""
    bars: list[tuple[str, Line | None, float]] = []
    several_types = len({line.row_types for line in lines if line.mode == STOCK}) > 1
    for key in dict.fromkeys((line.shape, line.row_types) for line in lines if line.mode == STOCK):
        stock = [line for line in lines if line.mode == STOCK and (line.shape, line.row_types) == key]
        models = {line.model for line in stock}
        label = f"stock\n{key[1]}" if several_types else "stock"
        bars.append((label, None, statistics.median(line.token_ms for line in stock)))
        ours = [line for line in lines if line.mode != STOCK and line.model in models and line.shape == key[0]]
        modes = list(dict.fromkeys(line.mode for line in ours))
        labelled: dict[str, list[Line]] = {}
        for line in sorted(ours, key=lambda line: (modes.index(line.mode), line.density)):
            labelled.setdefault(f"{line.mode}\n{_percent(line.density)} %", []).append(line)
        for text, same in labelled.items():
            line = sorted(same, key=lambda line: line.token_ms)[len(same) // 2]
            bars.append((text, line, line.token_ms))
    return bars


def _draw_parts(axes: Any, bars: Sequence[tuple[str, Line | None, float]]) -> None:
    """One stacked bar per mode and model."""
    drawn = [0.0] * len(bars)
    is_stock = [line is None for _, line, _ in bars]
    axes.bar(
        [i for i, stock in enumerate(is_stock) if stock],
        [total for (_, _, total), stock in zip(bars, is_stock) if stock],
        color=STOCK_COLOUR,
        width=0.7,
        label="stock llama.cpp, all",
    )
    for field, name, colour in PARTS:
        values = [0.0 if line is None else getattr(line, field) for _, line, _ in bars]
        if any(values):
            axes.bar(range(len(bars)), values, bottom=drawn, color=colour, width=0.7, label=name)
        drawn = [below + value for below, value in zip(drawn, values)]
    for i, (_, _, total) in enumerate(bars):
        axes.text(i, total, f"{total:.1f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(bars)), [label for label, _, _ in bars], fontsize=9)
    if len(bars) > N_LEVEL_LABELS:
        axes.set_xticks(range(len(bars)), [label.replace("\n", ", ") for label, _, _ in bars], fontsize=9)
        axes.tick_params(axis="x", rotation=90)
    axes.set_ylim(0, 1.3 * max(total for _, _, total in bars))
    axes.set(ylabel="ms per token", title="Decode time per token")
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=9, framealpha=1, loc="upper center", ncols=3)
