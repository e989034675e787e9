"""A GGUF from key entries and tensors that come one at a time: models that are another model with some things changed.

Entries are copied as they lie in their file; whoever writes renames the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from powerinfer_py import format as pi_format
from powerinfer_py.format import BaseModel


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write: `ne` in ggml order; `data()` gives its bytes, (n_bytes,) uint8, when it is its turn."""

    name: str
    type: GGMLQuantizationType
    ne: tuple[int, ...]
    n_bytes: int
    data: Callable[[], np.ndarray]

    @classmethod
    def matrix(
        cls, name: str, row_type: GGMLQuantizationType, n_rows: int, n_values: int, data: Callable[[], np.ndarray]
    ) -> TensorSource:
        """A matrix of n_rows rows; data() gives their bytes."""
        block, block_bytes = GGML_QUANT_SIZES[row_type]
        return cls(name, row_type, (n_values, n_rows), n_rows * (n_values // block * block_bytes), data)


def entry(key: str, value_type: GGUFValueType, value: bytes) -> bytes:
    """A key's entry: name, type, value."""
    raw = key.encode()
    return struct.pack("<Q", len(raw)) + raw + struct.pack("<I", value_type) + value


def string_entry(key: str, text: str) -> bytes:
    """The entry of a text."""
    raw = text.encode()
    return entry(key, GGUFValueType.STRING, struct.pack("<Q", len(raw)) + raw)


def u32_entry(key: str, value: int) -> bytes:
    """The entry of a whole number."""
    return entry(key, GGUFValueType.UINT32, struct.pack("<I", value))


def u32_array_entry(key: str, values: Sequence[int]) -> bytes:
    """The entry of a list of whole numbers."""
    return entry(
        key, GGUFValueType.ARRAY, struct.pack(f"<IQ{len(values)}I", GGUFValueType.UINT32, len(values), *values)
    )


def renamed_entry(raw: bytes, key: str) -> bytes:
    """An entry's value under another name."""
    (n,) = struct.unpack_from("<Q", raw)
    name = key.encode()
    return struct.pack("<Q", len(name)) + name + raw[8 + n :]


def write_gguf(
    path: Path, entries: Sequence[bytes], tensors: Sequence[TensorSource], alignment: int, progress: pi_format.Progress
) -> None:
    """Writes a GGUF, one tensor at a time.

    Args:
        path: the file to write; the caller renames it.
        entries: of the keys.
        tensors: in order.
        alignment: every tensor starts at a multiple of it; the entries must agree.
        progress: called with bytes written and bytes in all.
    """
    header = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)) + b"".join(entries))
    offset = 0
    for tensor in tensors:
        name = tensor.name.encode()
        header += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.ne))
        header += struct.pack(f"<{len(tensor.ne)}QIQ", *tensor.ne, tensor.type, offset)
        offset += tensor.n_bytes + -tensor.n_bytes % alignment
    with path.open("wb") as out:
        out.write(header + bytes(-len(header) % alignment))
        n_done = 0
        for tensor in tensors:
            data = tensor.data()
            n_done += pi_format.copy_bytes(out, data, lambda n, before=n_done: progress(before + n, offset))
            out.write(bytes(-len(data) % alignment))


def write_changed(
    base: BaseModel,
    path: Path,
    keys: Mapping[str, bytes],
    tensors: Iterable[TensorSource],
    progress: pi_format.Progress,
) -> None:
    """Writes a model with some keys and tensors changed; parts of a split one are joined.

    Args:
        base: the model.
        path: the file to write; the caller renames it.
        keys: key -> its new entry; new keys come last.
        tensors: that take the place of those of the same names.
        progress: called with bytes written and bytes in all.
    """
    first = base.files[0]
    changed = {tensor.name: tensor for tensor in tensors}
    kept = [key for key in first.values if not key.startswith("split.")]
    entries = [keys.get(key) or first.entry(key) for key in kept]
    entries += [text for key, text in keys.items() if key not in first.values]

    def source(name: str) -> TensorSource:
        tensor = base.tensor(name)
        return TensorSource(name, tensor.type, tensor.ne, tensor.n_bytes, lambda: base.raw(name))

    sources = [changed.get(name) or source(name) for name in base.tensors]
    write_gguf(path, entries, sources, first.alignment, progress)
