"""Activation-sparse LLM inference on one PC: `Llama` is `llama_cpp.Llama` with sparse feed-forward blocks.

What needs the compiled core is imported at first use, so that format and errors work without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

# First of all: _core must find upstream's libraries in the process, or it loads second copies of them.
import llama_cpp  # noqa: F401

if TYPE_CHECKING:
    from powerinfer_py.llama import Llama, Stats, install, uninstall

__all__ = ["Llama", "Stats", "__version__", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    """Import what the name needs.

    Raises:
        AttributeError: the package has no such name.
    """
    if name == "__version__":
        return importlib.metadata.version("powerinfer_py")
    if name in __all__:
        return getattr(importlib.import_module("powerinfer_py.llama"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
