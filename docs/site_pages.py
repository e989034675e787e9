"""MkDocs hook: pages made from other files of the repository, reference pages made from the programs themselves, and links that lead
somewhere both on the site and in the repository. Warnings of the build are errors (mkdocs.yml)."""

from __future__ import annotations

import argparse
import importlib
import os
import posixpath
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from powerinfer_py import cli

ROOT = Path(__file__).resolve().parent.parent
# Files of the repository that are pages too.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "models/README.md": "models.md",
    "models/tiny-relu/README.md": "tiny-relu.md",
    "models/smollm2-relu/README.md": "smollm2-relu.md",
}
HEADER = "ggml/include/ggml-powerinfer.h"
HELP_WIDTH = 90  # characters

_LINK = re.compile(r"(!?)\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)*)\]\(([^()\s#]*)(#[^()\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of PAGES, and the pictures that lie beside them."""
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "models").rglob("*.png")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fills in what is generated, and turns links between files of the repository into links between pages."""
    markdown = re.sub(r"^<!-- made: (\w+) -->$", lambda found: _MAKERS[found[1]](), markdown, flags=re.MULTILINE)
    sources = {uri: name for name, uri in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    # code blocks stay as they are
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    for i in range(0, len(parts), 2):
        parts[i] = _LINK.sub(lambda found: _link(found, source, page.file.src_uri, files), parts[i])
    return "".join(parts)


def _link(found: re.Match[str], source: str, page_uri: str, files: Files) -> str:
    """One link of a page: to another page or a picture of the site; only its text where the site has no such file."""
    is_picture, text, target, anchor = found[1], found[2], found[3], found[4] or ""
    if not target or re.match(r"\w+:", target):
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    uri = PAGES.get(path) or path.removeprefix("docs/")
    if files.get_file_from_path(uri) is None and (ROOT / path).exists():
        return text
    return f"{is_picture}[{text}]({posixpath.relpath(uri, posixpath.dirname(page_uri) or '.')}{anchor})"


def _command_line() -> str:
    """The help of every verb of `powerinfer`."""
    os.environ["COLUMNS"] = str(HELP_WIDTH)
    sections = []
    for name, verb in cli.VERBS.items():
        module = importlib.import_module(verb.module)
        parser = argparse.ArgumentParser(prog=f"powerinfer {name}", description=verb.help, allow_abbrev=False)
        getattr(module, verb.add_arguments)(parser)
        sections.append(f"## powerinfer {name}\n\n```text\n{parser.format_help().rstrip()}\n```\n")
    return "\n".join(sections)


def _main_program() -> str:
    """The help of `powerinfer-main`."""
    program = Path(sysconfig.get_path("scripts")) / "powerinfer-main"
    text = subprocess.run([program, "-h"], capture_output=True, text=True, check=True).stdout
    return f"```text\n{text.rstrip()}\n```\n"


def _header() -> str:
    """The public C header."""
    return f"```c\n{(ROOT / HEADER).read_text(encoding='utf-8').rstrip()}\n```\n"


_MAKERS = {"command_line": _command_line, "main_program": _main_program, "header": _header}
