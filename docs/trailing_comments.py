"""Griffe extension: the comment behind a field of a dataclass is its documentation, as it is in the source."""

from __future__ import annotations

import re
from typing import Any

import griffe


class TrailingComments(griffe.Extension):
    """Gives attributes without a docstring the comment of their own line, or of the line above."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        """Reads the attribute's lines.

        Args:
            attr: the attribute that griffe found.
        """
        if attr.docstring or attr.lineno is None:
            return
        lines = attr.module.lines_collection[attr.filepath]
        line = lines[(attr.endlineno or attr.lineno) - 1]
        found = re.search(r"  # (.*)$", line) or re.fullmatch(r" +# (.*)", lines[attr.lineno - 2])
        if found:
            attr.docstring = griffe.Docstring(found[1], parent=attr)
