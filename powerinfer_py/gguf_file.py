"""Headers of GGUF files, whole or embedded in another file, and their tensors as lazily mapped numpy arrays.

Files are untrusted: every count, size and offset is checked against the file before it is used. The gguf package's
reader isn't used because it believes them, and because it decodes whole vocabularies.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from powerinfer_py.errors import FormatError

MAX_KEYS = 65536
MAX_TENSORS = 1 << 20
MAX_DIMS = 4
MAX_NAME_BYTES = 63
MAX_VALUES = 1 << 59  # of a tensor: 8 bytes each stay below 2^63
DEFAULT_ALIGNMENT = 32
HEADER_BYTES = 24
COPY_AGAIN = "copy or download the file again."

# GGUF value type number -> (name, struct format); text and arrays apart
_VALUE_TYPES = {
    0: ("u8", "B"),
    1: ("i8", "b"),
    2: ("u16", "H"),
    3: ("i16", "h"),
    4: ("u32", "I"),
    5: ("i32", "i"),
    6: ("f32", "f"),
    7: ("bool", "B"),
    10: ("u64", "Q"),
    11: ("i64", "q"),
    12: ("f64", "d"),
}
_STRING, _ARRAY = 8, 9
# Tensor types that numpy has; all others are rows of bytes.
_NUMPY_TYPES = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.I8: np.int8,
    GGMLQuantizationType.I16: np.int16,
    GGMLQuantizationType.I32: np.int32,
    GGMLQuantizationType.I64: np.int64,
}


def row_type_name(row_type: GGMLQuantizationType) -> str:
    """ggml's own name of a tensor type, e.g. `q4_0`, `q4_K`.

    Args:
        row_type: the type.

    Returns:
        The name as `ggml_type_name` gives it.
    """
    name = row_type.name.lower()
    return name[:-1] + "K" if name.endswith("_k") else name


@dataclass(frozen=True)
class GgufValue:
    """A key's value, not yet decoded: `type` as GGUF names it, `n` elements from byte `offset` on.

    The entry with its name lies from byte `begin` to byte `end`.
    """

    type: str
    is_array: bool
    n: int
    offset: int
    begin: int
    end: int


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place: `ne` in ggml order, `offset` in bytes from the start of the GGUF."""

    name: str
    type: GGMLQuantizationType
    ne: tuple[int, ...]
    offset: int
    n_bytes: int

    @property
    def rows_shape(self) -> tuple[int, int]:
        """(rows, values per row); all dimensions above the first counted as rows."""
        return int(np.prod(self.ne[1:], dtype=np.int64)), self.ne[0]

    @property
    def type_name(self) -> str:
        """ggml's name of the type."""
        return row_type_name(self.type)


class GgufFile:
    """The checked header of a GGUF. Holds a read-only mapping of the file until it is garbage collected."""

    def __init__(
        self, path: str | os.PathLike[str], *, offset: int = 0, size: int | None = None, magic: bytes = b"GGUF"
    ) -> None:
        """Reads and checks the header.

        Args:
            path: the file.
            offset: byte where the GGUF starts in it.
            size: its size in bytes; None: up to the end of the file.
            magic: its first 4 bytes; files of the original PowerInfer have others.

        Raises:
            FormatError: the file can't be read, isn't a GGUF, is truncated, or damaged.
        """
        self.path = Path(path)
        self.offset = offset
        self.where = f"{path} (the base model in it)" if offset else str(path)
        if not self.path.is_file():
            raise self._error("isn't a file; expected a GGUF file; check the path.")
        try:
            n_bytes = self.path.stat().st_size
            # numpy can't map an empty file
            whole = np.memmap(self.path, np.uint8, "r") if n_bytes else np.zeros(0, np.uint8)
        except OSError as error:
            raise self._error(
                f"can't be opened ({error.strerror}); expected a readable file; check the path."
            ) from None
        self._bytes = whole[offset : n_bytes if size is None else offset + size]
        self._buffer = memoryview(self._bytes)
        self.size = len(self._bytes)
        self._magic = magic
        self.values: dict[str, GgufValue] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._parse()

    @property
    def alignment(self) -> int:
        """Every tensor starts at a multiple of it, in bytes."""
        return self.get("general.alignment", DEFAULT_ALIGNMENT)

    def get(self, key: str, default: Any = None) -> Any:
        """The decoded value of a key.

        Args:
            key: its name.
            default: what to return when the file doesn't have it.

        Returns:
            int, float, bool, str, or a list of one of them.

        Raises:
            FormatError: text that isn't UTF-8.
        """
        value = self.values.get(key)
        if value is None:
            return default
        if value.type == "str":
            at, texts = value.offset, []
            for _ in range(value.n):
                (n,) = struct.unpack_from("<Q", self._buffer, at)
                try:
                    texts.append(bytes(self._buffer[at + 8 : at + 8 + n]).decode())
                except UnicodeDecodeError:
                    raise self._error(f"{key} isn't UTF-8 text; {COPY_AGAIN}") from None
                at += 8 + n
            return texts if value.is_array else texts[0]
        code = next(code for name, code in _VALUE_TYPES.values() if name == value.type)
        numbers = struct.unpack_from(f"<{value.n}{code}", self._buffer, value.offset)
        if value.type == "bool":
            numbers = tuple(bool(number) for number in numbers)
        return list(numbers) if value.is_array else numbers[0]

    def get_int(self, key: str) -> int | None:
        """A whole number of any width, None when the key is absent or something else."""
        value = self.values.get(key)
        if value is None or value.is_array or value.type[0] not in "ui":
            return None
        return self.get(key)

    def raw_value(self, key: str) -> int:
        """The first byte of a key's value, as it lies in the file."""
        return self._buffer[self.values[key].offset]

    def entry(self, key: str) -> bytes:
        """A key's name, type and value, as they lie in the file."""
        return self._bytes[self.values[key].begin : self.values[key].end].tobytes()

    def whole(self) -> np.ndarray:
        """(size,) uint8: all bytes of the GGUF, a view of the mapped file."""
        return self._bytes

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes.

        Args:
            name: the tensor.

        Returns:
            (n_bytes,) uint8, a view of the mapped file.
        """
        tensor = self.tensors[name]
        return self._bytes[tensor.offset : tensor.offset + tensor.n_bytes]

    def array(self, name: str) -> np.ndarray:
        """A tensor as numpy sees it.

        Args:
            name: the tensor.

        Returns:
            (..., ne1, ne0) of the numpy type, or (..., ne1, bytes per row) uint8 for BF16 and quantized types;
            a view of the mapped file.
        """
        tensor = self.tensors[name]
        shape = tuple(reversed(tensor.ne))
        if tensor.type in _NUMPY_TYPES:
            return self.raw(name).view(_NUMPY_TYPES[tensor.type]).reshape(shape)
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        return self.raw(name).reshape((*shape[:-1], shape[-1] // block * block_bytes))

    def rows_f32(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows of a matrix as floats.

        Args:
            name: the tensor.
            rows: which of its rows.

        Returns:
            (rows, ne0) float32; one row of a vector.

        Raises:
            FormatError: the gguf package has no conversion of the type.
        """
        tensor = self.tensors[name]
        try:
            return dequantize(np.ascontiguousarray(np.atleast_2d(self.array(name))[rows]), tensor.type)
        except NotImplementedError:
            raise self._error(
                f"tensor {_shown(name)} has type {tensor.type_name}, which can't be read as floats here; expected another; "
                "convert the model to one."
            ) from None

    def _error(self, text: str) -> FormatError:
        return FormatError(f"{self.where}: {text}")

    def _parse(self) -> None:
        if self.size < HEADER_BYTES:
            raise self._error(f"{self.size} bytes; expected a GGUF, which has {HEADER_BYTES} or more; {COPY_AGAIN}")
        magic = bytes(self._buffer[:4])
        version, n_tensors, n_keys = struct.unpack_from("<IQQ", self._buffer, 4)
        if magic != self._magic:
            if magic == b"PWRI":
                raise self._error(
                    "starts with 'PWRI', a file of the original PowerInfer; expected 'GGUF'; "
                    "import it (powerinfer import)."
                )
            raise self._error(f"starts with {_shown(magic)}; expected {_shown(self._magic)}; give a file of that kind.")
        if version & 0xFFFF == 0:
            raise self._error("the GGUF is big-endian; expected little-endian; convert it for this machine.")
        if version not in (2, 3):
            raise self._error(f"GGUF version is {version}; this build reads 2 and 3; convert the model again.")
        if n_keys > MAX_KEYS or n_tensors > MAX_TENSORS:
            raise self._error(
                f"announces {n_keys} keys and {n_tensors} tensors; expected at most {MAX_KEYS} and {MAX_TENSORS}; "
                f"{COPY_AGAIN}"
            )
        at = HEADER_BYTES
        place = ""
        try:
            for i in range(n_keys):
                place = f"key {i}"
                at = self._parse_key(at)
            for i in range(n_tensors):
                place = f"tensor {i}"
                at = self._parse_tensor(at)
        except (struct.error, OverflowError):
            raise self._error(
                f"the file ends, or has an impossible size, inside {place} of its header; it is truncated or damaged; "
                f"{COPY_AGAIN}"
            ) from None
        self._place_tensors(at)

    def _string(self, at: int) -> tuple[bytes, int]:
        (n,) = struct.unpack_from("<Q", self._buffer, at)
        if n > self.size - at - 8:
            raise struct.error
        return bytes(self._buffer[at + 8 : at + 8 + n]), at + 8 + n

    def _name(self, at: int) -> tuple[str, int]:
        raw, at = self._string(at)
        try:
            return raw.decode(), at
        except UnicodeDecodeError:
            raise self._error(f"the name {_shown(raw)} isn't UTF-8 text; {COPY_AGAIN}") from None

    def _parse_key(self, at: int) -> int:
        begin = at
        key, at = self._name(at)
        (number,) = struct.unpack_from("<I", self._buffer, at)
        at += 4
        is_array, n = number == _ARRAY, 1
        if is_array:
            number, n = struct.unpack_from("<IQ", self._buffer, at)
            at += 12
        start = at
        if number == _STRING:
            unpack, buffer, size = struct.Struct("<Q").unpack_from, self._buffer, self.size
            for _ in range(n):
                at += 8 + unpack(buffer, at)[0]
                if at > size:
                    raise struct.error
        elif number in _VALUE_TYPES:
            at += n * struct.calcsize(_VALUE_TYPES[number][1])
            if at > self.size:
                raise struct.error
        else:
            raise self._error(f"key {_shown(key)} has value type {number}, which GGUF doesn't have; {COPY_AGAIN}")
        if key in self.values:
            raise self._error(f"key {_shown(key)} is there twice; expected once; {COPY_AGAIN}")
        type_name = "str" if number == _STRING else _VALUE_TYPES[number][0]
        self.values[key] = GgufValue(type_name, is_array, n, start, begin, at)
        return at

    def _parse_tensor(self, at: int) -> int:
        name, at = self._name(at)
        (n_dims,) = struct.unpack_from("<I", self._buffer, at)
        if len(name.encode()) > MAX_NAME_BYTES:
            raise self._error(
                f"tensor name {_shown(name)} has {len(name.encode())} bytes; expected at most {MAX_NAME_BYTES}; "
                f"{COPY_AGAIN}"
            )
        if n_dims > MAX_DIMS:
            raise self._error(
                f"tensor {_shown(name)} has {n_dims} dimensions; expected at most {MAX_DIMS}; {COPY_AGAIN}"
            )
        ne = struct.unpack_from(f"<{n_dims}q", self._buffer, at + 4) or (1,)
        at += 4 + 8 * n_dims
        number, offset = struct.unpack_from("<IQ", self._buffer, at)
        n_values, n_places = 1, 1
        for n in ne:
            n_values *= n
            n_places *= max(n, 1)  # numpy multiplies them too, before it looks for a 0
        if min(ne) < 0 or n_places >= MAX_VALUES:
            raise self._error(f"tensor {_shown(name)} has an impossible shape; {COPY_AGAIN}")
        try:
            row_type = GGMLQuantizationType(number)
        except ValueError:
            raise self._error(
                f"tensor {_shown(name)} has type number {number}, which this build doesn't know; "
                "convert it with a llama.cpp of the same version."
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[row_type]
        if ne[0] % block:
            raise self._error(
                f"tensor {_shown(name)} has rows of {ne[0]} values; "
                f"{row_type_name(row_type)} needs a multiple of {block}; {COPY_AGAIN}"
            )
        if name in self.tensors:
            raise self._error(f"tensor {_shown(name)} is there twice; expected once; {COPY_AGAIN}")
        self.tensors[name] = GgufTensor(name, row_type, ne, offset, n_values // block * block_bytes)
        return at + 12

    def _place_tensors(self, header_end: int) -> None:
        """Turns offsets in the data section into offsets in the GGUF, and checks them."""
        value = self.values.get("general.alignment")
        if value is not None and (value.is_array or value.type != "u32"):
            raise self._error(f"general.alignment isn't a u32; {COPY_AGAIN}")
        alignment = self.alignment
        if alignment == 0 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment}; expected a power of two; {COPY_AGAIN}")
        data_at = -(-header_end // alignment) * alignment
        for tensor in self.tensors.values():
            if tensor.offset % alignment:
                raise self._error(
                    f"tensor {_shown(tensor.name)} has offset {tensor.offset}; expected a multiple of {alignment}; "
                    f"{COPY_AGAIN}"
                )
            if data_at + tensor.offset + tensor.n_bytes > self.size:
                raise self._error(
                    f"tensor {_shown(tensor.name)} ({tensor.n_bytes} bytes at offset {tensor.offset}) ends past the end "
                    "of "
                    f"the file ({self.size} bytes); the file is truncated or damaged; {COPY_AGAIN}"
                )
        self.tensors = {
            name: GgufTensor(name, tensor.type, tensor.ne, data_at + tensor.offset, tensor.n_bytes)
            for name, tensor in self.tensors.items()
        }


def _shown(text: str | bytes) -> str:
    """Text from a file, fit for a message: short and printable."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    plain = "".join(c if " " <= c <= "~" else "?" for c in text[:80])
    return f"'{plain}{'...' if len(text) > 80 else ''}'"
