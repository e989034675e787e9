"""What verbs that run for long share on the terminal: progress bars, and notes that are said once."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

# (what, how many) -> a context that gives a function to call once per step; step(text) says how far things are
Steps = Callable[[str, int], AbstractContextManager[Callable[..., None]]]


@contextmanager
def progress_steps() -> Iterator[Steps]:
    """Progress bars on stderr, one at a time, when that is a terminal.

    Yields:
        What starts one.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        @contextmanager
        def steps(what: str, n: int) -> Iterator[Callable[..., None]]:
            task = progress.add_task(what, total=n)

            def step(text: str | None = None) -> None:
                progress.update(task, advance=1, description=text)

            try:
                yield step
            finally:
                progress.remove_task(task)

        yield steps


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], object]]:
    """A progress bar in bytes on stderr, when that is a terminal.

    Args:
        title: of the bar.

    Yields:
        progress(bytes done, bytes in all).
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    rest = (TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, *rest, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda n_done, n_total: bar.update(task, completed=n_done, total=n_total)


def note_once() -> Callable[[str], None]:
    """A function that hands each note to logging the first time it is said."""
    said: set[str] = set()

    def note(text: str) -> None:
        if text not in said:
            said.add(text)
            logging.getLogger("powerinfer_py").warning("%s", text)

    return note


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the run after the step in progress. Yields a function that says whether one came."""
    stopped = []
    handlers = {}

    def stop(number: int, frame: Any) -> None:
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, stop)
    try:
        yield lambda: bool(stopped)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def percent(step: Callable[[], None]) -> Callable[[int, int], None]:
    """A progress in bytes as 100 steps."""
    n_done = 0

    def progress(n: int, n_all: int) -> None:
        nonlocal n_done
        while n_done < 100 * n // max(n_all, 1):
            n_done += 1
            step()

    return progress
