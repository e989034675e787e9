"""The picture of one token in time: when the CPU and the devices worked on each layer's FFN, and who waited. matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from powerinfer_py.errors import OptionError
from powerinfer_py.format import atomic_path

from .arguments import need_packages

_LANES = ("device", "CPU", "other work")
_COLOURS = {"device": "#009e73", "CPU": "#56b4e9", "CPU waits": "#d55e00", "other work": "#bbbbbb"}


def check_plot() -> None:
    """Says whether pictures can be made here.

    Raises:
        OptionError: matplotlib isn't installed.
    """
    need_packages("timeline", "plot", "matplotlib", otherwise=" or leave --timeline out")


def last_token(trace: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of the last token that was computed alone.

    Args:
        trace: what Llama.trace gave, in order.

    Returns:
        One item per layer, ascending; empty when no token was computed alone.
    """
    blocks: list[dict[str, Any]] = []
    for times in reversed(trace):
        if times["n_tokens"] != 1 or (blocks and times["i_layer"] >= blocks[-1]["i_layer"]):
            if blocks:
                break
            continue
        blocks.append(times)
    return blocks[::-1]


def spans(blocks: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """When what ran.

    Args:
        blocks: of one token, as `last_token` gives them.

    Returns:
        For `device`, `CPU`, `CPU waits` (for the device) and `other work` (all but the FFNs, between two of them):
        (begin, duration) in milliseconds since the first block began.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _COLOURS}
    zero = blocks[0]["begin_s"]

    def add(name: str, begin_s: float, end_s: float) -> None:
        if end_s > begin_s:
            found[name].append((1000 * (begin_s - zero), 1000 * (end_s - begin_s)))

    for before, times in zip([None, *blocks], blocks):
        if before is not None:
            add("other work", before["end_s"], times["begin_s"])
        add("device", times["gpu_begin_s"], times["gpu_end_s"])
        add("CPU", times["cpu_begin_s"], times["cpu_end_s"])
        if times["gpu_end_s"]:
            add("CPU waits", max(times["cpu_end_s"], times["gpu_begin_s"]), times["end_s"])
    return found


def write_plot(path: str | os.PathLike[str], trace: Sequence[dict[str, Any]], title: str) -> Path:
    """Draws the last token as PNG.

    Args:
        path: the file.
        trace: what Llama.trace gave.
        title: above the picture.

    Returns:
        The path written.

    Raises:
        OptionError: no token was computed alone.
    """
    from matplotlib.figure import Figure

    blocks = last_token(trace)
    if not blocks:
        raise OptionError("timeline: no token was computed alone; expected one; generate at least two tokens.")
    figure = Figure(figsize=(11, 2.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    lanes = {"device": 0, "CPU": 1, "CPU waits": 1, "other work": 2}
    for name, pieces in spans(blocks).items():
        total = sum(duration for _, duration in pieces)
        axes.broken_barh(
            pieces, (lanes[name] - 0.36, 0.72), facecolors=_COLOURS[name], label=f"{name}: {total:.3g} ms", linewidth=0
        )
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set_ylim(len(_LANES) - 0.5, -0.5)
    axes.set(xlabel="milliseconds of one token", title=title)
    axes.margins(x=0.01)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(_COLOURS), fontsize=9, frameon=False)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        figure.savefig(file, format="png")
    return Path(path)
