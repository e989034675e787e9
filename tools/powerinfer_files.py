"""Side files of the original PowerInfer: activation counts, predictor checkpoints, GPU splits; and what a plan makes of them.

They are untrusted input: numbered files are sorted as numbers, gaps and other models' shapes refused, no code is run.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from powerinfer_py.errors import FormatError
from powerinfer_py.format import PlanLayer, Rows
from powerinfer_py.gguf_file import GgufFile

from .arguments import need_packages
from .checkpoint import load_torch_file, read_json

MAGIC = b"PWRI"
DEFAULT_THRESHOLD = 0.0
_N_NAMES_SHOWN = 8


# ---- Numbered files of torch ---------------------------------------------------------------------------------------


def _numbered_files(folder: Path, stem: str, n_ff: Sequence[int], note: Callable[[str], None]) -> dict[int, Path]:
    """Layer -> file `<stem>_<layer>.pt`; every layer with neurons has one."""
    pattern = re.compile(rf"{stem}_(0|[1-9]\d{{0,8}})\.pt")
    if not folder.is_dir():
        raise FormatError(f"{folder}: isn't a folder; expected one with {stem}_0.pt and so on; check the path.")
    files, others = {}, []
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or not path.is_file():
            others.append(path.name)
        else:
            files[int(match[1])] = path
    others = [name for name in others if name != "config.json"]
    if others:
        shown = ", ".join(ascii(name)[1:-1] for name in others[:_N_NAMES_SHOWN])
        more = f" and {len(others) - _N_NAMES_SHOWN} more" if len(others) > _N_NAMES_SHOWN else ""
        note(f"{folder}: not {stem}_<layer>.pt, ignored: {shown}{more}.")
    wished = f"expected {stem}_0.pt to {stem}_{len(n_ff) - 1}.pt, one per layer of the model"
    missing = [i for i, n in enumerate(n_ff) if n and i not in files]
    if missing:
        raise FormatError(f"{folder}: {stem}_{missing[0]}.pt is missing; {wished}; complete the folder.")
    if max(files, default=0) >= len(n_ff):
        raise FormatError(f"{folder}: has {stem}_{max(files)}.pt; {wished}; give the folder made for this model.")
    return {i: path for i, path in files.items() if n_ff[i]}


def _load(path: Path) -> Any:
    """What torch stored in a file; data only, mapped where the file allows it."""
    need_packages(str(path), "convert", "torch")
    otherwise = "expected tensors saved by torch.save; copy or download the file again."
    return load_torch_file(path, otherwise, mapped=zipfile.is_zipfile(path))


def _array(path: Path, what: str, value: Any, dtype: np.dtype) -> np.ndarray:
    """A tensor as numpy array of finite numbers."""
    import torch

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_complex():
        raise FormatError(f"{path}: {what} is {type(value).__name__}; expected a dense tensor of numbers.")
    array = value.detach().to(torch.float64 if dtype == np.float64 else torch.float32).numpy()
    if not np.isfinite(array).all():
        raise FormatError(f"{path}: {what} holds NaN or infinite values; expected finite ones; make the file again.")
    return array


# ---- Activation counts ---------------------------------------------------------------------------------------------


def read_activations(folder: Path, n_ff: Sequence[int], note: Callable[[str], None]) -> list[np.ndarray]:
    """Reads a folder of activation_<layer>.pt.

    Args:
        folder: one 1-D tensor of n_ff counts per file, whole numbers or floats.
        n_ff: neurons of each layer of the model; a layer with 0 needs no file.
        note: receives what is said once, e.g. which other files were ignored.

    Returns:
        Per layer (n_ff,) float64, how often each neuron was active, in the base's order.

    Raises:
        FormatError: a layer's file is missing or can't be read, another length, NaN, infinite or negative counts.
        OptionError: torch isn't installed.
    """
    files = _numbered_files(folder, "activation", n_ff, note)
    counts = []
    for i, n in enumerate(n_ff):
        if not n:
            counts.append(np.zeros(0))
            continue
        array = _array(files[i], f"layer {i}'s counts", _load(files[i]), np.dtype(np.float64))
        if array.shape != (n,):
            raise FormatError(
                f"{files[i]}: layer {i}'s counts have shape {list(array.shape)}; expected [{n}], one per neuron; "
                "give the statistics of this model."
            )
        if array.min() < 0:
            raise FormatError(
                f"{files[i]}: layer {i}'s count of neuron {int(array.argmin())} is {array.min():g}; "
                "expected 0 or more; make the statistics again."
            )
        counts.append(array)
    return counts


def relative_frequencies(counts: Sequence[np.ndarray], note: Callable[[str], None]) -> list[np.ndarray]:
    """Frequencies from counts whose number of tokens nobody wrote down: the busiest neuron counts as always active.

    Args:
        counts: per layer (n_ff,) float64, 0 or more.
        note: receives the sentence that says so.

    Returns:
        Per layer (n_ff,) float32 from 0 to 1; counts that are shares already stay as they are.
    """
    most = max((float(layer.max()) for layer in counts if layer.size), default=0.0)
    if most > 1:
        note(
            f"the statistics don't say how many tokens they come from: frequencies are relative to the most active neuron "
            f"({most:g} times active)."
        )
    return [(layer / max(1.0, most)).astype(np.float32) for layer in counts]


def ordered_layer(layer: PlanLayer, counts: np.ndarray | None) -> PlanLayer:
    """A layer with its neurons in falling order of their counts; equal ones stay in their order.

    Args:
        layer: the layer; its frequencies, down rows and predictor outputs move along.
        counts: (n_ff,) any number, in the layer's present order; None: the order stays.

    Returns:
        The layer in its new order.
    """
    if counts is None:
        return layer
    order = np.argsort(-np.asarray(counts, np.float64), kind="stable").astype(np.int32)

    def moved(rows: Rows | None) -> Rows | None:
        return None if rows is None else replace(rows, data=rows.data[order])

    return replace(
        layer,
        neuron_order=order if layer.neuron_order is None else layer.neuron_order[order],
        neuron_frequency=None if layer.neuron_frequency is None else layer.neuron_frequency[order],
        ffn_down_t=moved(layer.ffn_down_t),
        fc2=moved(layer.fc2),
    )


# ---- Predictors ----------------------------------------------------------------------------------------------------


class _Matrices(Sequence):
    """One matrix of every layer's predictor, read from its file when it is asked for: (rows, columns) float32."""

    def __init__(self, paths: Sequence[Path | None], name: str) -> None:
        self._paths = paths
        self._name = name

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, i: int) -> np.ndarray:
        path = self._paths[i]
        if path is None:
            return np.zeros((0, 0), np.float32)
        tensors = _load(path)
        found = sorted(map(str, tensors)) if isinstance(tensors, dict) else [type(tensors).__name__]
        if found != ["fc1.weight", "fc2.weight"]:
            raise FormatError(
                f"{path}: holds {', '.join(found)[:120]}; expected fc1.weight and fc2.weight, and no biases; "
                "give a predictor checkpoint of the original PowerInfer."
            )
        return _array(path, self._name, tensors[self._name], np.dtype(np.float32))


@dataclass(frozen=True)
class PredictorFolder:
    """Predictors of every layer: scores = fc2(relu(fc1(r))), r the residual stream that enters the FFN's norm.

    Attributes:
        threshold: a neuron is skipped only when its score is below.
        fc1: per layer (r, n_embd) float32, read when asked for.
        fc2: per layer (n_ff, r) float32, read when asked for.
    """

    threshold: float
    fc1: Sequence[np.ndarray]
    fc2: Sequence[np.ndarray]


def read_predictors(folder: Path, n_embd: int, n_ff: Sequence[int], note: Callable[[str], None]) -> PredictorFolder:
    """Opens a folder of model_<layer>.pt and checks every file; matrices are read again when they are asked for.

    Args:
        folder: per layer fc1.weight [r, n_embd] and fc2.weight [n_ff, r]; config.json may hold sparse_threshold.
        n_embd: width of the model.
        n_ff: neurons of each layer; a layer with 0 needs no file, and its matrices are empty.
        note: receives what is said once, e.g. the threshold when none is stored.

    Returns:
        The predictors.

    Raises:
        FormatError: a layer's file is missing or can't be read, other shapes, values that aren't finite, a threshold that
            isn't a number.
        OptionError: torch isn't installed.
    """
    files = _numbered_files(folder, "model", n_ff, note)
    paths = [files.get(i) for i in range(len(n_ff))]
    found = PredictorFolder(_threshold(folder, note), _Matrices(paths, "fc1.weight"), _Matrices(paths, "fc2.weight"))
    for i, path in enumerate(paths):
        if path is not None:
            check_predictor(f"{path}: layer {i}'s predictor", found.fc1[i].shape, found.fc2[i].shape, n_embd, n_ff[i])
    return found


def check_predictor(where: str, fc1: tuple[int, ...], fc2: tuple[int, ...], n_embd: int, n_ff: int) -> None:
    """Checks a predictor's shapes, outermost dimension first.

    Args:
        where: file and layer, for the error.
        fc1: wished (r, n_embd).
        fc2: wished (n_ff, r).
        n_embd: width of the model.
        n_ff: neurons of the layer.

    Raises:
        FormatError: naming both shapes.
    """
    rank = fc1[0] if fc1 else 0
    if fc1 != (rank, n_embd) or fc2 != (n_ff, rank) or not 1 <= rank <= n_embd:
        raise FormatError(
            f"{where} has fc1 {list(fc1)} and fc2 {list(fc2)}; expected [r, {n_embd}] and [{n_ff}, r] with r from 1 to "
            f"{n_embd}; give the predictors trained for this model."
        )


def _threshold(folder: Path, note: Callable[[str], None]) -> float:
    path = folder / "config.json"
    value: Any = None
    if path.is_file():
        value = read_json(path).get("sparse_threshold")
    if value is None:
        note(f"{folder}: no config.json with sparse_threshold; the predictors' threshold is {DEFAULT_THRESHOLD:g}.")
        return DEFAULT_THRESHOLD
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 3e38:
        raise FormatError(
            f"{path}: sparse_threshold is {json.dumps(value)[:80]}; expected a finite number; write it as one."
        )
    return float(value)


def ffn_input_predictor(fc1: np.ndarray, norm_weight: np.ndarray) -> np.ndarray:
    """fc1 of a predictor that sees the FFN's input x instead of the residual r, for threshold 0 and RMSNorm.

    x = r * w / rms(r), so (fc1 / w) x = (fc1 r) / rms(r). ReLU and fc2 keep the positive factor, and with threshold 0
    only the sign of a score decides: the same neurons are skipped.

    Args:
        fc1: (r, n_embd) float32, for the residual.
        norm_weight: (n_embd,) float32, weight w of the RMSNorm before the FFN.

    Returns:
        (r, n_embd) float32.

    Raises:
        FormatError: a weight is 0, or so small that the quotient isn't finite: x doesn't hold what fc1 needs.
    """
    with np.errstate(all="ignore"):
        folded = (fc1 / norm_weight).astype(np.float32)
    if not (np.all(norm_weight != 0) and np.isfinite(folded).all()):
        at = int(np.argmin(np.abs(norm_weight)))
        raise FormatError(
            f"predictor: the norm's weight is {norm_weight[at]:g} at {at}, so that the FFN's input lacks what the predictor "
            "reads; expected weights that can be divided by; use the residual as its input."
        )
    return folded


# ---- GPU splits ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuSplit:
    """Which neurons the original kept on the GPU.

    Attributes:
        vram_bytes: the budget that it was made for.
        on_gpu: per layer (n_ff,) bool, in the base's order.
    """

    vram_bytes: int
    on_gpu: list[np.ndarray]


def read_split(path: Path, n_ff: Sequence[int]) -> GpuSplit:
    """Reads a .gpuidx file: magic PWRI, split.vram_capacity, and per layer gpu_idx and gpu_bucket.

    Args:
        path: the file.
        n_ff: neurons of each layer of the model.

    Returns:
        The split; layers with 0 neurons have none.

    Raises:
        FormatError: damaged, of another model, or gpu_bucket isn't what gpu_idx says.
    """
    file = GgufFile(path, magic=MAGIC)
    again = "make the split again, or import without it."
    capacity = file.get_int("split.vram_capacity")
    if capacity is None or capacity < 0:
        raise FormatError(f"{path}: split.vram_capacity is missing or no size; expected bytes as u64; {again}")
    others = [name for name in file.tensors if not re.fullmatch(r"blk\.\d+\.gpu_(idx|bucket)", name)]
    n_layer = len({name for name in file.tensors if name.endswith(".gpu_idx")})
    if others or n_layer != len(n_ff):
        found = f"tensor {others[0][:60]!r}" if others else f"gpu_idx of {n_layer} layers"
        raise FormatError(f"{path}: has {found}; expected gpu_idx of {len(n_ff)} layers and no more; {again}")
    return GpuSplit(capacity, list(_split_layers(file, n_ff, again)))


def _split_layers(file: GgufFile, n_ff: Sequence[int], again: str) -> Iterator[np.ndarray]:
    for i, n in enumerate(n_ff):
        name, bucket_name = f"blk.{i}.gpu_idx", f"blk.{i}.gpu_bucket"
        for tensor in (file.tensors.get(name), file.tensors.get(bucket_name)):
            if tensor is not None and (tensor.type != GGMLQuantizationType.I32 or tensor.rows_shape[0] != 1):
                raise FormatError(
                    f"{file.path}: {tensor.name} is {tensor.type_name} {list(tensor.ne)}; expected a row of i32; {again}"
                )
        if name not in file.tensors:
            raise FormatError(f"{file.path}: {name} is missing; expected one per layer; {again}")
        mask = file.array(name).reshape(-1)
        if mask.shape != (n,) or not np.isin(mask, (0, 1)).all():
            raise FormatError(
                f"{file.path}: {name} has {mask.size} values from {mask.min(initial=0)} to {mask.max(initial=0)}; "
                f"expected {n}, each 0 or 1; {again}"
            )
        # files of one age of the original have no buckets
        if bucket_name in file.tensors and not np.array_equal(
            file.array(bucket_name).reshape(-1), np.flatnonzero(mask)
        ):
            raise FormatError(
                f"{file.path}: {bucket_name} isn't the rising list of the {int(mask.sum())} neurons that {name} marks; "
                f"expected both to agree; {again}"
            )
        yield mask == 1
