"""How an answer is shown while it grows: as Markdown on a terminal, as it is elsewhere.

Only what Markdown may still change is drawn again; it is never taller than the screen, so nothing of it scrolls away half drawn.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Any, TextIO

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

# No tags: what looks like one, as <think>, is text of the answer.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")

_CONTROL_CODES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DRAW_S = 1 / 15  # between two drawings


class MarkdownView:
    """Shows one answer on a terminal; a context manager.

    Args:
        console: of the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False, vertical_overflow="visible")
        self._text = ""  # that isn't printed for good
        self._has_printed = False
        self._drawn_at_s = 0.0

    def __enter__(self) -> MarkdownView:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._live.update(Text(), refresh=True)
        finally:
            self._live.stop()
        for block in split_blocks(self._text):
            self._print(block)

    def add(self, piece: str) -> None:
        """Show more of the answer.

        Args:
            piece: text.
        """
        self._text += _CONTROL_CODES.sub("", piece)
        now_s = time.monotonic()
        if now_s - self._drawn_at_s >= _DRAW_S:
            *finished, self._text = split_blocks(self._text)
            self._live.update(Text())
            for block in finished:
                self._print(block)
            self._live.update(_Lines(self._text, self._has_printed, self._console.height - 1), refresh=True)
            self._drawn_at_s = now_s

    def _print(self, block: str) -> None:
        if block.strip():
            self._console.print(_Lines(block, self._has_printed), end="")
            self._has_printed = True


class PlainView:
    """Writes one answer to a file or a pipe, as it is; a context manager.

    Args:
        stream: where to; None: stdout.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._last = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._last.endswith("\n"):
            self.add("\n")

    def add(self, piece: str) -> None:
        """Write more of the answer.

        Args:
            piece: text.
        """
        self._stream.write(piece)
        self._stream.flush()
        self._last = piece or self._last


def split_blocks(text: str) -> list[str]:
    """The blocks of Markdown: paragraphs, lists, code and so on.

    Args:
        text: Markdown.

    Returns:
        At least one; together they are the text. More text can only change the last one.
    """
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    lines = text.split("\n")
    bounds = [0, *starts[1:], len(lines)]
    blocks = ["\n".join(lines[begin:end]) + "\n" for begin, end in zip(bounds, bounds[1:])]
    return [*blocks[:-1], blocks[-1][:-1]]


class _Lines:
    """A rendered block without the blanks around it, which on a terminal made narrower would wrap.

    Args:
        block: Markdown.
        apart: an empty line before it.
        n_last: lines from the end to show; None: all.
    """

    def __init__(self, block: str, apart: bool, n_last: int | None = None) -> None:
        self._block = block
        self._apart = apart
        self._n_last = n_last

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [_stripped(line) for line in console.render_lines(_markdown(self._block), options, pad=False)]
        while lines and not lines[-1]:
            lines.pop()
        while lines and not lines[0]:
            del lines[0]
        if self._apart:
            lines.insert(0, [])
        for line in lines[-self._n_last :] if self._n_last else lines:
            yield from line
            yield Segment.line()


def _markdown(text: str) -> Markdown:
    """Markdown that keeps tags and ends of lines as they were written."""
    markdown = Markdown("", code_theme="ansi_dark")
    markdown.parsed = _PARSER.parse(text)
    pending: list[Any] = list(markdown.parsed)
    while pending:
        token = pending.pop()
        token.type = "hardbreak" if token.type == "softbreak" else token.type
        pending += token.children or ()
    return markdown


def _stripped(line: list[Segment]) -> list[Segment]:
    line = list(line)
    while line and not line[-1].text.strip():
        line.pop()
    if line:
        line[-1] = Segment(line[-1].text.rstrip(), line[-1].style, line[-1].control)
    return line
