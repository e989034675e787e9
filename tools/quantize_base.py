"""Quantization of a whole GGUF by libllama, with an importance matrix if there is one, and the readers of its two formats.

libllama can't be stopped while it works: it runs in a thread of its own, which Ctrl-C leaves behind with its files.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from powerinfer_py.errors import FormatError
from powerinfer_py.gguf_file import GgufFile

# What users write -> libllama's type; K without a letter is the medium mix, as in llama.cpp.
FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "q2_k": gguf.LlamaFileType.MOSTLY_Q2_K,
    "q3_k": gguf.LlamaFileType.MOSTLY_Q3_K_M,
    "q3_k_s": gguf.LlamaFileType.MOSTLY_Q3_K_S,
    "q3_k_m": gguf.LlamaFileType.MOSTLY_Q3_K_M,
    "q3_k_l": gguf.LlamaFileType.MOSTLY_Q3_K_L,
    "q4_k": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "q4_k_s": gguf.LlamaFileType.MOSTLY_Q4_K_S,
    "q4_k_m": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "q5_k": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "q5_k_s": gguf.LlamaFileType.MOSTLY_Q5_K_S,
    "q5_k_m": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "q6_k": gguf.LlamaFileType.MOSTLY_Q6_K,
    "iq4_nl": gguf.LlamaFileType.MOSTLY_IQ4_NL,
    "iq4_xs": gguf.LlamaFileType.MOSTLY_IQ4_XS,
}
_BUFFER_BYTES = 64 << 20  # of rows that libllama holds at once; its default is 8 GiB
_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_ENTRIES = 1 << 20  # of an importance matrix
_POLL_SECONDS = 0.1
_ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR
_TENSOR_LINE = re.compile(rb"\[ *\d+/ *\d+\]")


def quantize_model(
    source: Path,
    target: Path,
    outtype: str,
    *,
    imatrix: dict[str, np.ndarray] | None = None,
    n_threads: int,
    step: Callable[[], object],
) -> None:
    """Quantizes a GGUF as llama.cpp's own program does.

    Args:
        source: a GGUF of floats.
        target: the file to write.
        outtype: one of FILE_TYPES.
        imatrix: tensor name -> (row length,) float32 importance of each column; None: without.
        n_threads: to work with.
        step: called after each tensor.

    Raises:
        FormatError: libllama refuses; with its own words.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = n_threads
    params.ftype = int(FILE_TYPES[outtype])
    params.max_buf_size = _BUFFER_BYTES
    entries = None
    if imatrix:
        entries = (llama_cpp.llama_model_imatrix_data * (len(imatrix) + 1))()  # the last one, without a name, ends it
        for entry, (name, values) in zip(entries, imatrix.items()):
            entry.name, entry.size = name.encode(), len(values)
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = entries
    errors: list[str] = []
    n_begun = 0

    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, _: object) -> None:
        nonlocal n_begun
        n_begun += bool(_TENSOR_LINE.match(text))
        if level == _ERROR_LEVEL:
            errors.append(text.decode("utf-8", "replace").strip())

    result: list[int] = []

    def work() -> None:
        # holds on to what C uses, also when the caller has gone
        keep = (log, entries, imatrix)
        result.append(llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)))
        del keep

    from llama_cpp._logger import llama_log_callback as stock_log

    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    n_told = 0
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            while n_told < n_begun:
                n_told += 1
                step()
    finally:
        llama_cpp.llama_log_set(stock_log, ctypes.c_void_p(0))
    if result != [0]:
        reason = re.sub(r"\s+", " ", " ".join(errors[-2:])) or "no reason given"
        raise FormatError(
            f"{outtype}: libllama couldn't quantize the model ({reason}); expected a type that it can make of it; "
            "choose another --outtype, or another --imatrix."
        )


def read_imatrix(path: Path) -> dict[str, np.ndarray]:
    """Reads an importance matrix, in GGUF or in llama.cpp's older format.

    Args:
        path: the file that llama-imatrix wrote.

    Returns:
        Tensor name -> (row length,) float32: mean square of what each column was multiplied with.

    Raises:
        FormatError: the file isn't one, or is damaged.
    """
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
            file.seek(0)
            found = _gguf_imatrix(path) if is_gguf else _legacy_imatrix(path, file.read())
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}; expected an importance matrix; check the path.") from None
    for name, values in found.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise _damaged(path, f"{name} has values that are negative or not finite")
    return found


def _gguf_imatrix(path: Path) -> dict[str, np.ndarray]:
    file = GgufFile(path)
    found = {}
    for key in file.tensors:
        if not key.endswith(_SUMS):
            continue
        name = key.removesuffix(_SUMS)
        tensors = [file.tensors.get(name + suffix) for suffix in (_SUMS, _COUNTS)]
        if any(tensor is None or tensor.type != gguf.GGMLQuantizationType.F32 for tensor in tensors):
            raise _damaged(path, f"{name} lacks its sums or counts in f32")
        sums = file.array(name + _SUMS).reshape(-1)
        counts = file.array(name + _COUNTS).reshape(-1)
        if len(counts) != 1:  # of experts, which no model converted here has
            raise _damaged(path, f"{name} has {len(counts)} counts instead of one")
        # a matrix that saw no token says nothing: all columns are alike
        found[name] = (sums / counts[0]).astype(np.float32) if counts[0] > 0 else np.ones(len(sums), np.float32)
    if not found:
        raise _damaged(path, f"has no tensor named *{_SUMS}")
    return found


def _legacy_imatrix(path: Path, data: bytes) -> dict[str, np.ndarray]:
    """Count of entries; each: length and name, calls, count and f32 sums (times calls)."""
    found = {}
    try:
        (n_entries,) = struct.unpack_from("<i", data)
        at = 4
        if not 1 <= n_entries <= _MAX_ENTRIES:
            raise struct.error
        for _ in range(n_entries):
            (length,) = struct.unpack_from("<i", data, at)
            name = data[at + 4 : at + 4 + length].decode()
            n_calls, n_values = struct.unpack_from("<ii", data, at + 4 + length)
            at += 12 + length
            if length < 0 or n_values < 1:
                raise struct.error
            sums = np.frombuffer(data, "<f4", n_values, at)
            at += 4 * n_values
            found[name] = np.ascontiguousarray(sums / max(n_calls, 1), np.float32)
    except (struct.error, ValueError):
        raise _damaged(path, "is neither GGUF nor llama.cpp's older format, or truncated") from None
    return found


def _damaged(path: Path, found: str) -> FormatError:
    return FormatError(f"{path}: {found}; expected an importance matrix of llama-imatrix; make it again.")
