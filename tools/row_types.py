"""Rows of any ggml type: quantise and decode through the packaged ggml, the code that llama.cpp itself uses.

Rows are whole blocks: a row length that isn't a multiple of the type's block is an error, never padded.
"""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO

import gguf
import numpy as np

from powerinfer_py.errors import OptionError
from powerinfer_py.format import PlanLayer, Rows


class _TypeTraits(ctypes.Structure):
    """ggml_type_traits of ggml.h."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float_ref", ctypes.c_void_p),
    )


@functools.lru_cache(maxsize=1)
def _ggml() -> ctypes.CDLL:
    import llama_cpp

    # by its SONAME: libggml-base.so is a copy, and a second one in the process would be another library
    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so.0"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = (
        [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    )
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    library.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    library.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
    library.ggml_get_type_traits.argtypes = [ctypes.c_int]
    return library


def row_type_id(row_type: str) -> gguf.GGMLQuantizationType:
    """The ggml type of a name such as `q4_0` or `F16`.

    Raises:
        OptionError: no such type, or one that rows of weights can't have.
    """
    type_id = gguf.GGMLQuantizationType.__members__.get(row_type.upper())
    if type_id is None or row_type.upper() in ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"):
        raise OptionError(f"row type: found {row_type!r}; expected a ggml weight type such as q4_0, q8_0, q4_K, f16.")
    return type_id


def row_bytes(n_values: int, row_type: str) -> int:
    """Bytes of a row of n_values.

    Raises:
        OptionError: an unknown type, or a length that isn't a multiple of the type's block.
    """
    block, size = gguf.GGML_QUANT_SIZES[row_type_id(row_type)]
    if n_values % block:
        raise OptionError(f"row type: rows have {n_values} values; {row_type} needs a multiple of {block}.")
    return n_values // block * size


def quantize_rows(values: np.ndarray, row_type: str, *, n_threads: int = 1) -> np.ndarray:
    """Rounds rows to a ggml type.

    Args:
        values: (n_rows, n_values) float32, C-contiguous.
        row_type: ggml type name.
        n_threads: rows are shared out between them.
    Returns:
        (n_rows, row bytes) uint8.
    Raises:
        OptionError: an unknown type, one that needs an importance matrix, or rows that aren't whole blocks.
    """
    type_id = row_type_id(row_type)
    n_rows, n_values = values.shape
    rows = np.empty((n_rows, row_bytes(n_values, row_type)), np.uint8)
    if _ggml().ggml_quantize_requires_imatrix(type_id):
        raise OptionError(f"row type: {row_type} needs an importance matrix; expected a type that doesn't, e.g. q4_K.")
    values = np.ascontiguousarray(values, dtype=np.float32)

    def quantize_part(bounds: tuple[int, int]) -> None:
        first, last = bounds
        if first < last:
            _ggml().ggml_quantize_chunk(
                type_id, values[first:].ctypes.data, rows[first:].ctypes.data, 0, last - first, n_values, None
            )

    _run_parts(quantize_part, n_rows, n_threads)
    return rows


def rows_of(values: np.ndarray, row_type: gguf.GGMLQuantizationType, *, n_threads: int = 1) -> Rows:
    """Rows of a plan.

    Args:
        values: (n_rows, n_values) float32, C-contiguous.
        row_type: their type; n_values must be whole blocks of it (derived_row_type).
        n_threads: rows are shared out between them.
    Returns:
        The rows; floats as numpy has them, other types as bytes.
    Raises:
        OptionError: a type that needs an importance matrix, or rows that aren't whole blocks.
    """
    return plan_rows(quantize_rows(values, row_type.name, n_threads=n_threads), row_type.name, values.shape[1])


def dequantize_rows(
    rows: np.ndarray, row_type: str, *, out: np.ndarray | None = None, n_threads: int = 1
) -> np.ndarray:
    """Decodes rows of a ggml type.

    Args:
        rows: (n_rows, row bytes) uint8, C-contiguous.
        row_type: ggml type name.
        out: (n_rows, n_values) float32 to write to; None: a new array.
        n_threads: rows are shared out between them.
    Returns:
        (n_rows, n_values) float32.
    """
    type_id = row_type_id(row_type)
    block, size = gguf.GGML_QUANT_SIZES[type_id]
    n_rows = rows.shape[0]
    n_values = rows.shape[1] // size * block
    if out is None:
        out = np.empty((n_rows, n_values), np.float32)
    if type_id == gguf.GGMLQuantizationType.F32:
        out[:] = rows.view(np.float32)
        return out
    to_float = _ggml().ggml_get_type_traits(type_id).contents.to_float

    def dequantize_part(bounds: tuple[int, int]) -> None:
        first, last = bounds
        if first < last:
            to_float(rows[first:].ctypes.data, out[first:].ctypes.data, (last - first) * n_values)

    _run_parts(dequantize_part, n_rows, n_threads)
    return out


def plan_rows(rows: np.ndarray, row_type: str, n_values: int) -> Rows:
    """Bytes of rows as a plan wants them: floats that numpy has as such.

    Args:
        rows: (n_rows, row bytes) uint8.
        row_type: ggml type name.
        n_values: values per row.
    Returns:
        The rows of a plan.
    """
    type_id = row_type_id(row_type)
    float_type = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}.get(type_id)
    return Rows(type_id, rows if float_type is None else rows.view(float_type), n_values)


def _run_parts(run_part, n_rows: int, n_threads: int) -> None:
    edges = [n_rows * i // n_threads for i in range(n_threads + 1)]
    parts = list(zip(edges, edges[1:]))
    if n_threads == 1:
        run_part(parts[0])
        return
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(run_part, parts))


class Spool:
    """Rows that wait on disk until a plan is written: in a file without a name, gone when it is closed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def keep(self, rows: Rows) -> Rows:
        """The same rows, mapped from the file."""
        at = self._file.tell()
        self._file.write(np.ascontiguousarray(rows.data))
        self._file.flush()
        mapped = np.memmap(self._file, rows.data.dtype, "r", at, rows.data.shape)
        self._file.seek(0, 2)
        return replace(rows, data=mapped)

    def keep_layer(self, layer: PlanLayer) -> PlanLayer:
        """The same layer, all of its rows mapped."""
        rows = {name: getattr(layer, name) for name in ("ffn_down_t", "fc1", "fc2")}
        return replace(layer, **{name: self.keep(value) for name, value in rows.items() if value is not None})
