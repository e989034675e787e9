"""How benchmarks report: tables on the terminal, CSV with one line per result, JSON; files are written whole or not at all."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from powerinfer_py.format import atomic_path


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], n_text_columns: int) -> None:
    """Print a table.

    Args:
        title: lines above it; may be empty.
        columns: its names.
        rows: one text per column.
        n_text_columns: that many first columns are words, the others figures.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if os.isatty(1) else 240, highlight=False, markup=False)
    if title:
        console.print(title)
    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name.replace("_", " "), justify="left" if i < n_text_columns else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def figure(value: float | None, digits: int = 2) -> str:
    """A number for a table; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def write_csv(path: str | os.PathLike[str], rows: Sequence[Any]) -> None:
    """Write dataclass instances of one flat class, a line each.

    Args:
        path: the file.
        rows: at least one.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    with atomic_path(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")


def write_json(path: str | os.PathLike[str], report: dict[str, Any]) -> None:
    """Write a report; dataclass instances in it become objects."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(report, indent=1, default=dataclasses.asdict), encoding="utf-8")


def names(text: str) -> tuple[str, ...]:
    """A list of names from the command line, e.g. `exact,predicted`."""
    return tuple(text.split(","))


def counts(text: str) -> tuple[int, ...]:
    """A list of whole numbers of at least 1, e.g. `1,2,4`.

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = (0,)
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text}; expected whole numbers of at least 1, such as 1,2,4")
    return values


def percents(text: str) -> tuple[float, ...]:
    """A list of per cents, e.g. `2,5,10`, as shares.

    Raises:
        argparse.ArgumentTypeError: something that isn't in (0, 100].
    """
    try:
        values = tuple(float(part) / 100 for part in text.split(","))
    except ValueError:
        values = (0.0,)
    if not all(0 < value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text}; expected per cents above 0, at most 100, such as 2,5,10")
    return values
