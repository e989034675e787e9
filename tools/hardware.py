"""The hardware file: what a machine's CPU and GPUs can do, as JSON with a version; placement and simulation count with it.

Sizes are in bytes, rates in bytes per second, times in seconds. Nothing read from a file is believed before it is checked.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import gguf

from powerinfer_py.errors import FormatError, OptionError
from powerinfer_py.format import atomic_path
from powerinfer_py.gguf_file import row_type_name

FORMAT_VERSION = 1
ROW_TYPES = tuple(row_type_name(row_type) for row_type in gguf.GGMLQuantizationType)
_MAX_BYTES = 2**60  # of memory, and per second: more than any machine has
_MAX_FILE_BYTES = 2**20
_AGAIN = "correct it, or measure again (powerinfer measure-hardware)."


@dataclass(frozen=True)
class Processor:
    """What CPU and GPU have in common.

    Attributes:
        name: of the device.
        memory_bytes: that it has in all.
        bandwidth_bytes_s: reading its memory one byte after the other.
        row_bytes_s: bytes of feed-forward rows per second that the operators of a row type reach when they decode, by
            ggml type name.
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_s: float
    row_bytes_s: dict[str, float]

    def row_rate(self, row_type: str, note: Callable[[str], None]) -> float:
        """How fast rows are read and used.

        Args:
            row_type: ggml type name, e.g. `q4_K`.
            note: receives the fallback for a type that has no rate (terminal.note_once).

        Returns:
            Bytes per second; the bandwidth for a type that has no rate.
        """
        rate = self.row_bytes_s.get(row_type)
        if rate is None:
            note(
                f"{self.name}: no rate of {row_type} rows in the hardware file; its memory's bandwidth is used for them."
            )
            return self.bandwidth_bytes_s
        return rate


@dataclass(frozen=True)
class Cpu(Processor):
    """The CPU.

    Attributes:
        n_threads: with which the rates were measured.
    """

    n_threads: int


@dataclass(frozen=True)
class Gpu(Processor):
    """One GPU.

    Attributes:
        to_gpu_bytes_s: copies from host memory.
        to_cpu_bytes_s: copies to host memory.
        round_trip_s: n_embd floats up, a small graph, n_embd floats back.
    """

    to_gpu_bytes_s: float
    to_cpu_bytes_s: float
    round_trip_s: float


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Attributes:
        name: what it is called, e.g. `RTX 4090 + i9-13900K`.
        source: where the figures are from.
        cpu: its CPU.
        gpus: its GPUs; may be none.
    """

    name: str
    source: str
    cpu: Cpu
    gpus: tuple[Gpu, ...] = field(default=())


def write_hardware(hardware: Hardware, path: str | os.PathLike[str]) -> Path:
    """Writes a hardware file: a temporary file, then renamed.

    Args:
        hardware: what to write.
        path: the file.

    Returns:
        The path written.

    Raises:
        FormatError: a figure that a reader would refuse; no file is written then.
    """
    text = json.dumps({"format_version": FORMAT_VERSION, **asdict(hardware)}, indent=2) + "\n"
    _parse(str(path), text)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def read_hardware(path: str | os.PathLike[str]) -> Hardware:
    """Reads and checks a hardware file.

    Args:
        path: the file.

    Returns:
        The machine.

    Raises:
        FormatError: not JSON, another version, or a key or figure that can't be.
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise FormatError(f"{path}: more than {_MAX_FILE_BYTES} bytes; expected a hardware file; pass another.")
    try:
        return _parse(str(path), data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: it isn't UTF-8 ({error.reason}); expected JSON; {_AGAIN}") from None


def shipped_hardware() -> dict[str, Path]:
    """Hardware files that come with the package, by name: figures of data sheets."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "machines").glob("*.json"))}


def find_hardware(name: str) -> Hardware:
    """Reads a hardware file, or one that comes with the package.

    Args:
        name: a path, or a shipped file's name without its ending, e.g. `rtx4090`.

    Returns:
        The machine.

    Raises:
        OptionError: neither is there.
        FormatError: it isn't a hardware file.
    """
    shipped = shipped_hardware()
    path = shipped.get(name, Path(name))
    if not path.is_file():
        raise OptionError(
            f"hardware: {name} isn't a file; expected one (powerinfer measure-hardware), or {', '.join(shipped)}; check the path."
        )
    return read_hardware(path)


def _parse(path: str, text: str) -> Hardware:
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: it isn't JSON ({error}); expected a hardware file; {_AGAIN}") from None
    if not isinstance(found, dict) or "format_version" not in found:
        raise FormatError(f"{path}: format_version isn't there; expected a hardware file; {_AGAIN}")
    version = found.pop("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise FormatError(f"{path}: format_version is {version!r}; this build reads {FORMAT_VERSION}; {_AGAIN}")
    values = _Values(path, "", found, Hardware)
    return Hardware(
        name=values.text("name"),
        source=values.text("source"),
        cpu=_read_cpu(values.child("cpu", found["cpu"], Cpu)),
        gpus=tuple(_read_gpu(values.child(f"gpus[{i}]", item, Gpu)) for i, item in enumerate(values.list("gpus"))),
    )


def _unique(path: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"{path}: {twice} is there twice; expected once; {_AGAIN}")
    return found


def _read_common(values: _Values) -> dict[str, Any]:
    return {
        "name": values.text("name"),
        "memory_bytes": values.whole("memory_bytes", _MAX_BYTES),
        "bandwidth_bytes_s": values.rate("bandwidth_bytes_s"),
        "row_bytes_s": values.row_rates("row_bytes_s"),
    }


def _read_cpu(values: _Values) -> Cpu:
    return Cpu(**_read_common(values), n_threads=values.whole("n_threads", 2**16))


def _read_gpu(values: _Values) -> Gpu:
    rates = {name: values.rate(name) for name in ("to_gpu_bytes_s", "to_cpu_bytes_s")}
    return Gpu(**_read_common(values), **rates, round_trip_s=values.number("round_trip_s", 3600.0))


class _Values:
    """The keys of one object of the file, checked as they are asked for."""

    def __init__(self, path: str, where: str, found: Any, of: type) -> None:
        self._path = path
        self._where = where
        names = {item.name for item in fields(of)}
        if not isinstance(found, dict):
            self._refuse("", found, f"an object with {', '.join(sorted(names))}")
        for name in found.keys() - names:
            raise FormatError(
                f"{path}: {where}{name} isn't known; expected only {', '.join(sorted(names))}; remove or rename it."
            )
        for name in sorted(names - found.keys()):
            raise FormatError(f"{path}: {where}{name} isn't there; expected it; {_AGAIN}")
        self._found = found

    def _refuse(self, name: str, value: Any, expected: str) -> None:
        key = f"{self._where}{name}".rstrip(".")
        raise FormatError(f"{self._path}: {key} is {repr(value)[:80]}; expected {expected}; {_AGAIN}")

    def child(self, name: str, found: Any, of: type) -> _Values:
        return _Values(self._path, f"{self._where}{name}.", found, of)

    def text(self, name: str) -> str:
        value = self._found[name]
        if not isinstance(value, str) or not value.strip():
            self._refuse(name, value, "a text")
        return value

    def list(self, name: str) -> list[Any]:
        value = self._found[name]
        if not isinstance(value, list):
            self._refuse(name, value, "a list")
        return value

    def whole(self, name: str, most: int) -> int:
        value = self._found[name]
        if type(value) is not int or not 1 <= value <= most:
            self._refuse(name, value, f"a whole number from 1 to {most}")
        return value

    def rate(self, name: str) -> float:
        return self._positive(name, self._found[name], _MAX_BYTES)

    def number(self, name: str, most: float) -> float:
        return self._positive(name, self._found[name], most)

    def row_rates(self, name: str) -> dict[str, float]:
        value = self._found[name]
        if not isinstance(value, dict):
            self._refuse(name, value, "an object of rates by row type")
        for row_type in value:
            if row_type not in ROW_TYPES:
                self._refuse(name, row_type, f"ggml type names such as {', '.join(ROW_TYPES[:5])}")
        return {row_type: self._positive(f"{name}.{row_type}", rate, _MAX_BYTES) for row_type, rate in value.items()}

    def _positive(self, name: str, value: Any, most: float) -> float:
        if type(value) not in (int, float) or not 0 < value <= most or not math.isfinite(value):
            self._refuse(name, value, f"a number above 0, at most {most:.3g}")
        return float(value)
