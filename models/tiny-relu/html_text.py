"""Prints the text of HTML pages, a form feed after each: documents as tools/train_tiny.py reads them."""

from __future__ import annotations

import argparse
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

HIDDEN = {"script", "style", "nav", "head", "button", "svg"}
# a closing tag of these is often left out, so only the opening one counts
BLOCKS = {
    "p",
    "div",
    "br",
    "li",
    "tr",
    "dt",
    "dd",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "pre",
    "table",
    "ul",
    "ol",
    "hr",
}


class PageText(HTMLParser):
    """Collects the words that a reader sees: white space as it stands in `pre`, joined elsewhere."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.n_hidden = 0
        self.n_pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An opening tag; attributes don't matter."""
        self.n_hidden += tag in HIDDEN
        self.n_pre += tag == "pre"
        if tag in BLOCKS:
            self.parts.append("\n\n" if tag in ("p", "pre", "h1", "h2", "h3", "h4") else "\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        """A closing tag; one without an opening one is passed over."""
        self.n_hidden = max(0, self.n_hidden - (tag in HIDDEN))
        if tag == "pre":
            self.n_pre = max(0, self.n_pre - 1)
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        """Text between tags."""
        if not self.n_hidden:
            self.parts.append(data if self.n_pre else re.sub(r"\s+", " ", data))

    def text(self) -> str:
        """The page: no space at line ends, no more than one empty line in a row."""
        text = re.sub(r"[ \t]+\n", "\n", "".join(self.parts))
        text = re.sub(r"\n (?=\S)", "\n", text)
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path, metavar="FILE", help="HTML pages, UTF-8 or Latin-1")
    sys.stdout.reconfigure(encoding="utf-8")
    for path in parser.parse_args().pages:
        data = path.read_bytes()
        try:
            source = data.decode("utf-8")
        except UnicodeDecodeError:
            source = data.decode("latin-1")
        page = PageText()
        page.feed(source)
        page.close()
        sys.stdout.write(page.text() + "\f")


if __name__ == "__main__":
    main()
