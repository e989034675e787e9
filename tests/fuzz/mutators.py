"""Changes that keep a file's structure: one field of a GGUF's header, one value of a JSON document. For atheris' custom mutators."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

HEADER_BYTES = 24
ALIGNMENT = 32
STRING, ARRAY = 8, 9
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    31,
    32,
    63,
    64,
    255,
    4096,
    65535,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
TYPES = (*range(43), 1000, 0xFFFFFFFF)  # of tensors
JSON_VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    1 << 31,
    1 << 64,
    10**400,
    0.5,
    1e308,
    1e-320,
    "",
    "a",
    "\u2581",
    "x" * 300,
    [],
    {},
    [[]],
)


@dataclass
class _Key:
    name: bytes
    type: int
    is_array: bool
    values: list[bytes]  # encoded elements


@dataclass
class _Tensor:
    name: bytes
    ne: list[int]
    type: int
    offset: int


@dataclass
class _Gguf:
    magic: bytes
    version: int
    keys: list[_Key] = field(default_factory=list)
    tensors: list[_Tensor] = field(default_factory=list)
    data: bytes = b""

    def alignment(self) -> int:
        for key in self.keys:
            if key.name == b"general.alignment" and key.type == 4 and not key.is_array:
                n = struct.unpack("<I", key.values[0])[0]
                return n if 0 < n <= 4096 else ALIGNMENT
        return ALIGNMENT


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise ValueError("the end")
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, code: str) -> int:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def text(self) -> bytes:
        return self.take(self.number("Q"))


def _parse(data: bytes) -> _Gguf:
    cursor = _Cursor(data)
    file = _Gguf(cursor.take(4), cursor.number("I"))
    n_tensors, n_keys = cursor.number("Q"), cursor.number("Q")
    for _ in range(n_keys):
        name, kind = cursor.text(), cursor.number("I")
        is_array, n = kind == ARRAY, 1
        if is_array:
            kind, n = cursor.number("I"), cursor.number("Q")
        read: Callable[[], bytes] = cursor.text if kind == STRING else lambda kind=kind: cursor.take(VALUE_BYTES[kind])
        file.keys.append(_Key(name, kind, is_array, [read() for _ in range(n)]))
    for _ in range(n_tensors):
        name, n_dims = cursor.text(), cursor.number("I")
        ne = [cursor.number("Q") for _ in range(n_dims)]
        file.tensors.append(_Tensor(name, ne, cursor.number("I"), cursor.number("Q")))
    cursor.take(min(-cursor.at % file.alignment(), len(data) - cursor.at))
    file.data = data[cursor.at :]
    return file


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _encode(file: _Gguf) -> bytes:
    out = bytearray(file.magic + struct.pack("<IQQ", file.version, len(file.tensors), len(file.keys)))
    for key in file.keys:
        out += _text(key.name) + (struct.pack("<I", ARRAY) if key.is_array else b"") + struct.pack("<I", key.type)
        if key.is_array:
            out += struct.pack("<Q", len(key.values))
        out += b"".join(_text(value) if key.type == STRING else value for value in key.values)
    for tensor in file.tensors:
        out += _text(tensor.name) + struct.pack(f"<I{len(tensor.ne)}Q", len(tensor.ne), *tensor.ne)
        out += struct.pack("<IQ", tensor.type, tensor.offset)
    out += bytes(-len(out) % file.alignment())
    return bytes(out) + file.data


def _element(kind: int, names: Sequence[bytes], rng: random.Random) -> bytes:
    if kind == STRING:
        return rng.choice([*names, b"", b"\xff\xfe", b"a/b", b"0" * 64])
    if kind in (6, 12):
        return struct.pack("<f" if kind == 6 else "<d", rng.choice(FLOATS[:6] if kind == 6 else FLOATS))
    return struct.pack("<Q", rng.choice(NUMBERS))[: VALUE_BYTES[kind]]


def _change_key(file: _Gguf, names: Sequence[bytes], rng: random.Random) -> None:
    key = rng.choice(file.keys)
    what = rng.randrange(7)
    if what == 0:
        file.keys.remove(key)
    elif what == 1:
        file.keys.append(_Key(rng.choice(names), key.type, key.is_array, list(key.values)))
    elif what == 2:
        key.name = rng.choice(names)
    elif what == 3:
        key.type = rng.choice((STRING, *VALUE_BYTES))
        key.values = [_element(key.type, names, rng) for _ in key.values]
    elif what == 4:
        key.is_array = not key.is_array
        key.values = key.values[:1] or [_element(key.type, names, rng)]
    elif what == 5 and key.is_array:
        key.values = (key.values * 2)[: rng.choice((0, 1, len(key.values) + 1))]
    elif key.values:
        key.values[rng.randrange(len(key.values))] = _element(key.type, names, rng)


def _change_tensor(file: _Gguf, names: Sequence[bytes], rng: random.Random) -> None:
    tensor = rng.choice(file.tensors)
    what = rng.randrange(6)
    if what == 0:
        file.tensors.remove(tensor)
    elif what == 1:
        file.tensors.append(_Tensor(rng.choice(names), list(tensor.ne), tensor.type, tensor.offset))
    elif what == 2:
        tensor.name = rng.choice(names)
    elif what == 3:
        tensor.type = rng.choice(TYPES)
    elif what == 4:
        tensor.offset = rng.choice((*NUMBERS, tensor.offset + 32, tensor.offset + 1)) & ((1 << 64) - 1)
    elif rng.random() < 0.3 or not tensor.ne:
        tensor.ne = [*tensor.ne, rng.choice((0, 1, 2))][: rng.randrange(6)]
    else:
        i = rng.randrange(len(tensor.ne))
        tensor.ne[i] = rng.choice((*NUMBERS, tensor.ne[i] * 2, tensor.ne[i] + 1)) & ((1 << 64) - 1)


def change_gguf(data: bytes, names: Sequence[bytes], rng: random.Random) -> bytes:
    """A GGUF with one field of its header changed, all else consistent.

    Args:
        data: the file.
        names: of keys, tensors and values.
        rng: decides.

    Raises:
        ValueError, KeyError: its header can't be read.
    """
    file = _parse(data)
    if file.tensors and (not file.keys or rng.random() < 0.5):
        _change_tensor(file, names, rng)
    elif file.keys:
        _change_key(file, names, rng)
    return _encode(file)


def change_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON document with one value changed, taken away or put elsewhere.

    Args:
        data: the document.
        rng: decides.

    Raises:
        ValueError, RecursionError: it isn't one.
    """
    document = json.loads(data)
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                collect(node[key])

    if not isinstance(document, (dict, list)):
        return json.dumps(rng.choice(JSON_VALUES)).encode()
    collect(document)
    if not places:
        return json.dumps([document]).encode()
    node, key = rng.choice(places)
    what = rng.randrange(5)
    if what == 0:
        del node[key]
    elif what == 1:
        other, other_key = rng.choice(places)
        node[key] = json.loads(json.dumps(other[other_key]))
    elif what == 2:
        node[key] = [node[key]]
    elif what == 3 and isinstance(node, dict):
        node[str(rng.choice(places)[1])] = node.pop(key)
    else:
        node[key] = rng.choice(JSON_VALUES)
    return json.dumps(document).encode()
