"""`powerinfer import`: a *.powerinfer.gguf of the original PowerInfer becomes a stock base model and a plan.

Weights go from file to file one tensor at a time. Only the down projection, which the original stores transposed, is
rounded anew for the base; the plan keeps the rows of the file.
"""

from __future__ import annotations

import argparse
import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from powerinfer_py import _core
from powerinfer_py import format as pi_format
from powerinfer_py.errors import FormatError, OptionError, PlanError
from powerinfer_py.format import Plan, PlanLayer, Rows
from powerinfer_py.gguf_file import GgufFile, GgufTensor, row_type_name

from . import powerinfer_files
from .arguments import check_plan_path
from .pack_plan import refuse_same
from .rewrite_gguf import TensorSource, entry, string_entry, u32_entry, write_gguf
from .row_types import Spool, dequantize_rows, quantize_rows, row_type_id, rows_of
from .terminal import byte_progress, note_once

# OPT's table of positions begins with two rows that no token uses: position p is row p + 2.
OPT_POSITION_OFFSET = 2
# The original's OPT files don't say the epsilon; it is that of torch's LayerNorm, which OPT is built from.
OPT_NORM_EPSILON = 1e-5
# Share of decisions that folding the norm into a rounded predictor may change, measured on random residuals: as much as
# the original's own rounding of a predictor's inputs to 8 bits changes (0.22 % at n_embd 4096, rank 1024, Q4_0).
MAX_CHANGED_DECISIONS = 0.002
_N_FOLD_SAMPLES = 64
_TRANSPOSABLE = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(.+)")


@dataclass(frozen=True)
class ImportOptions:
    """Options of an import, with their defaults."""

    model: Path
    output: Path
    activation: Path | None = None
    predictor: Path | None = None
    split: Path | None = None
    sidecar: bool = False
    strict: bool = False
    threads: int | None = None  # None: physical cores allowed


@dataclass(frozen=True)
class Family:
    """What an architecture of the original is upstream.

    Attributes:
        base: upstream's architecture.
        activation: of the FFN, as the original computes it whatever the weights' origin.
        gated: whether the FFN has a gate.
        rms_norm: the RMSNorm between residual and FFN; None where it is a LayerNorm.
    """

    base: str
    activation: str
    gated: bool
    rms_norm: str | None = None


FAMILIES = {
    "llama": Family("llama", "relu", True, "blk.%d.ffn_norm.weight"),
    "bamboo": Family("llama", "drelu", True, "blk.%d.ffn_norm.weight"),
    "falcon": Family("falcon", "relu", False),
    "opt": Family("gpt2", "relu", False),
}


# ---- The original's file -------------------------------------------------------------------------------------------


class OriginalModel:
    """The checked header of a sparse model of the original PowerInfer.

    Attributes:
        file: the GGUF behind the magic.
        architecture: the original's name.
        family: what it is upstream.
        n_layer: number of layers.
        n_embd: width of the residual stream.
        threshold: a neuron is computed when its score isn't below.
    """

    def __init__(self, path: Path) -> None:
        """Opens it.

        Args:
            path: the file.

        Raises:
            FormatError: not such a model, damaged, or of an unknown architecture.
        """
        _refuse_plain(path)
        self.file = GgufFile(path, magic=powerinfer_files.MAGIC)
        value = self.file.values.get("general.architecture")
        is_text = value is not None and value.type == "str" and not value.is_array
        self.architecture = self.file.get("general.architecture") if is_text else ""
        if self.architecture not in FAMILIES:
            raise self.error(
                f"general.architecture is {self.architecture[:80]!a}; expected one of {', '.join(FAMILIES)}; "
                "give a sparse model of the original PowerInfer (a GPU split goes to --split)."
            )
        self.family = FAMILIES[self.architecture]
        self.n_layer = self._size("block_count", pi_format.MAX_BLOCK_COUNT)
        self.n_embd = self._size("embedding_length", (1 << 31) - 1)
        self.threshold = self._threshold()
        if not any(f"blk.{i}.ffn_down_t.weight" in self.file.tensors for i in range(self.n_layer)):
            raise self.error(
                "no layer has ffn_down_t.weight; expected a sparse model; convert the original checkpoint."
            )
        for tensor in self.file.tensors.values():
            if 0 in tensor.ne:
                raise self.error(f"tensor {tensor.name} is empty; expected weights; convert the original checkpoint.")
            if tensor.name.endswith((".ffn_down_t.weight", ".fc1.weight", ".fc2.weight")):
                self._check_matrix(tensor)

    def n_ff(self) -> list[int]:
        """Neurons per layer, 0 where the layer has no neuron-major down projection."""
        tensors = [self.file.tensors.get(f"blk.{i}.ffn_down_t.weight") for i in range(self.n_layer)]
        return [0 if tensor is None else tensor.ne[1] for tensor in tensors]

    def rows(self, name: str) -> Rows:
        """A matrix as it lies in the file, mapped."""
        tensor = self.file.tensors[name]
        return Rows(tensor.type, self.file.array(name).reshape(tensor.rows_shape[0], -1), tensor.ne[0])

    def error(self, text: str) -> FormatError:
        """An error that names the file."""
        return FormatError(f"{self.file.path}: {text}")

    def _size(self, name: str, most: int) -> int:
        key = f"{self.architecture}.{name}"
        value = self.file.get_int(key)
        if value is None or not 1 <= value <= most:
            raise self.error(f"{key} is missing or not in 1 .. {most}; expected a model; convert it again.")
        return value

    def _threshold(self) -> float:
        key = "powerinfer.sparse_threshold"
        value = self.file.values.get(key)
        if value is None:
            return powerinfer_files.DEFAULT_THRESHOLD
        if value.is_array or value.type != "f32" or not np.isfinite(self.file.get(key)):
            shown = "an array" if value.is_array else f"{self.file.get(key)!r:.40} ({value.type})"
            raise self.error(f"{key} is {shown}; expected a finite f32; convert the model again.")
        return self.file.get(key)

    def _check_matrix(self, tensor: GgufTensor) -> None:
        try:
            row_type_id(tensor.type.name)
        except OptionError:
            raise self.error(
                f"{tensor.name} is of type {tensor.type_name}; expected a type that holds weights; convert the model again."
            ) from None
        wished = (self.n_embd, None)[tensor.name.endswith(".fc2.weight")]
        if len(tensor.ne) != 2 or wished not in (None, tensor.ne[0]):
            raise self.error(
                f"{tensor.name} has shape {list(tensor.ne)}; expected [{wished or 'r'}, n]; convert the model again."
            )


def _refuse_plain(path: Path) -> None:
    """Raises FormatError for files that need no import."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise FormatError(f"{path}: can't be opened ({error.strerror}); expected a file; check the path.") from None
    if magic != b"GGUF":
        return
    if pi_format.is_extended(path):
        raise FormatError(
            f"{path}: is an extended GGUF already; expected a file of the original PowerInfer; use it as it is."
        )
    raise FormatError(
        f"{path}: is an ordinary GGUF without predictors (magic 'GGUF'); expected one of the original PowerInfer ('PWRI'); "
        "use it directly, or make a plan for it (powerinfer profile)."
    )


# ---- The base model ------------------------------------------------------------------------------------------------


def _plain_tensor(name: str, tensor: GgufTensor, data: Callable[[], np.ndarray]) -> TensorSource:
    return TensorSource(name, tensor.type, tensor.ne, tensor.n_bytes, data)


def _down_tensor(model: OriginalModel, tensor: GgufTensor, n_threads: int) -> TensorSource:
    """ffn_down, whose rows are outputs, from ffn_down_t, whose rows are neurons."""
    n_embd, n_ff = tensor.ne
    row_type = pi_format.derived_row_type(tensor.type, n_ff)

    def data() -> np.ndarray:
        rows = model.rows(tensor.name)
        if row_type == tensor.type and row_type in _TRANSPOSABLE:
            width = np.dtype(f"u{tensor.n_bytes // (n_embd * n_ff)}")
            bits = rows.data.view(np.uint8).reshape(n_ff, -1).view(width)
            return np.ascontiguousarray(bits.T).reshape(-1).view(np.uint8)
        values = np.ascontiguousarray(decoded(rows, n_threads).T)
        return quantize_rows(values, row_type.name, n_threads=n_threads).reshape(-1)

    return TensorSource.matrix(tensor.name.replace("ffn_down_t", "ffn_down"), row_type, n_embd, n_ff, data)


def _joined_tensor(model: OriginalModel, parts: list[str], name: str) -> TensorSource:
    """Rows of several tensors one after the other: upstream's gpt2 has q, k and v in one."""
    tensors = [model.file.tensors.get(part) for part in parts]
    if None in tensors or len({(tensor.type, len(tensor.ne), tensor.ne[0]) for tensor in tensors}) != 1:
        found = ", ".join("nothing" if t is None else f"{t.type_name} {list(t.ne)}" for t in tensors)
        raise model.error(
            f"{', '.join(parts)} are {found}; expected three of one type and shape; convert the model again."
        )
    n_last = sum(tensor.ne[-1] for tensor in tensors)
    return TensorSource(
        name,
        tensors[0].type,
        (*tensors[0].ne[:-1], n_last),
        sum(tensor.n_bytes for tensor in tensors),
        lambda: np.concatenate([model.file.raw(part) for part in parts]),
    )


def _position_tensor(model: OriginalModel, tensor: GgufTensor) -> TensorSource:
    """OPT's positions without the rows that only its offset needs."""
    n_rows = tensor.rows_shape[0] - OPT_POSITION_OFFSET
    if len(tensor.ne) != 2 or n_rows < 1:
        raise model.error(
            f"{tensor.name} has shape {list(tensor.ne)}; expected [{model.n_embd}, {OPT_POSITION_OFFSET} + positions]; "
            "convert the model again."
        )
    row_bytes = tensor.n_bytes // tensor.ne[1]
    return TensorSource(
        tensor.name,
        tensor.type,
        (tensor.ne[0], n_rows),
        n_rows * row_bytes,
        lambda: model.file.raw(tensor.name)[OPT_POSITION_OFFSET * row_bytes :],
    )


def _base_tensors(model: OriginalModel, n_threads: int) -> Iterator[TensorSource]:
    is_opt = model.architecture == "opt"
    for name, tensor in model.file.tensors.items():
        match = _LAYER_TENSOR.fullmatch(name)
        rest = match[2] if match else name
        if match and rest in ("fc1.weight", "fc2.weight"):
            continue
        if match and rest == "ffn_down_t.weight":
            yield _down_tensor(model, tensor, n_threads)
        elif match and is_opt and re.fullmatch(r"attn_[qkv]\.(weight|bias)", rest):
            if rest.startswith("attn_q."):
                parts = [name.replace("attn_q.", f"attn_{letter}.") for letter in "qkv"]
                yield _joined_tensor(model, parts, name.replace("attn_q.", "attn_qkv."))
        elif is_opt and name == "position_embd.weight":
            yield _position_tensor(model, tensor)
        else:
            # the original's converter renames the bias of down along with its weight
            base_name = name.replace("ffn_down_t.bias", "ffn_down.bias") if match else name
            yield _plain_tensor(base_name, tensor, lambda name=name: model.file.raw(name))


def _base_entries(model: OriginalModel) -> list[bytes]:
    """Key entries of the base: the file's, under upstream's architecture, without the original's own."""
    old, new = model.architecture, model.family.base
    entries = []
    changed: dict[str, bytes] = {}
    if old != new:
        changed["general.architecture"] = string_entry("general.architecture", new)
    if old == "opt":
        positions = model.file.tensors.get("position_embd.weight")
        if positions is None:
            raise model.error(
                "position_embd.weight is missing; expected a table of positions; convert the model again."
            )
        n_ctx = positions.rows_shape[0] - OPT_POSITION_OFFSET
        key, epsilon = "context_length", "attention.layer_norm_epsilon"
        changed[f"{old}.{key}"] = u32_entry(f"{new}.{key}", max(n_ctx, 0))
        if f"{old}.{epsilon}" not in model.file.values:
            value = struct.pack("<f", OPT_NORM_EPSILON)
            changed[f"{old}.{epsilon}"] = entry(f"{new}.{epsilon}", GGUFValueType.FLOAT32, value)
    for key in model.file.values:
        if key in changed or key.startswith("powerinfer."):
            continue
        text = model.file.entry(key)
        if key.startswith(f"{old}.") and old != new:
            renamed = f"{new}.{key.removeprefix(f'{old}.')}".encode()
            text = struct.pack("<Q", len(renamed)) + renamed + text[8 + len(key.encode()) :]
        entries.append(text)
    return [*changed.values(), *entries]


def write_base(model: OriginalModel, path: Path, n_threads: int, progress: pi_format.Progress) -> None:
    """Writes the stock GGUF of a model, one tensor at a time.

    Args:
        model: the original's file.
        path: the file to write; the caller renames it.
        n_threads: threads that round the down projections.
        progress: called with bytes written and bytes in all.

    Raises:
        FormatError: tensors of the file don't fit together.
    """
    tensors = list(_base_tensors(model, n_threads))
    entries = _base_entries(model)
    write_gguf(path, entries, tensors, model.file.alignment, progress)


def decoded(rows: Rows, n_threads: int) -> np.ndarray:
    """Rows of any type as floats: (n_rows, n) float32."""
    data = np.ascontiguousarray(rows.data).view(np.uint8).reshape(rows.n_rows, -1)
    return dequantize_rows(data, rows.row_type.name, n_threads=n_threads)


# ---- The plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predictors:
    """Predictors as the plan stores them.

    Attributes:
        input: `residual`, or `ffn_input` when the norm is folded in.
        threshold: a neuron is skipped only when its score is below.
        layers: per layer fc1 and fc2, None without predictor.
    """

    input: str
    threshold: float
    layers: list[tuple[Rows, Rows] | None]


class Importer:
    """One import: what it reads, and whom it tells."""

    def __init__(self, options: ImportOptions, note: Callable[[str], None]) -> None:
        """Opens and checks every input.

        Args:
            options: the options.
            note: receives what is said once.

        Raises:
            FormatError: a file is damaged or of another model.
            OptionError: torch is needed and not installed.
        """
        self.options = options
        self.note = note
        self.n_threads = options.threads or _core.physical_cores()
        self.model = OriginalModel(options.model)
        self.n_ff = self.model.n_ff()
        self.counts = None
        if options.activation is not None:
            self.counts = powerinfer_files.read_activations(options.activation, self.n_ff, note)
        self.split = None
        if options.split is not None:
            self.split = powerinfer_files.read_split(options.split, self.n_ff)
        self._say_what_is_left_out()

    def _say_what_is_left_out(self) -> None:
        file, path = self.model.file, self.options.model
        if file.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in file.values:
            self.note(
                f"{path}: the file is older than tokenizer.ggml.pre: llama.cpp splits text by its 'default' rule, and says so."
            )
        if self.model.architecture == "opt":
            self.note(f"{path}: OPT runs as gpt2; the first {OPT_POSITION_OFFSET} rows of its positions are left out.")
        folder = path.parent / "activation"
        if self.counts is None and folder.is_dir():
            self.note(
                f"{folder}: statistics beside the model aren't read by themselves; pass --activation to use them."
            )
        if self.split is not None and self.counts is not None:
            self.note(f"{self.options.split}: the statistics give the order of the neurons; the split adds nothing.")
        elif self.split is not None:
            gib = self.split.vram_bytes / (1 << 30)
            self.note(
                f"{self.options.split}: GPU neurons come first; how many of them, and the budget of {gib:.2f} GiB, aren't stored."
            )

    def fall_back(self, text: str) -> None:
        """A note, or with --strict an error."""
        if self.options.strict:
            raise PlanError(f"{text.removesuffix('.')}; expected no fallback (--strict).")
        self.note(text)

    def predictors(self, spool: Spool) -> Predictors:
        """The file's predictors, or those of --predictor, for the input that they can be given.

        Args:
            spool: takes rows that are made here.

        Returns:
            The predictors.

        Raises:
            FormatError: a predictor of another shape; the text names the layer.
            PlanError: a fallback with --strict.
        """
        threshold, layers = self._found_predictors(spool)
        norm = self.model.family.rms_norm
        if norm is None or threshold != 0:
            why = "a LayerNorm is between" if norm is None else f"the threshold is {threshold:g}"
            self.note(f"predictors read the residual stream, not the FFN's input: {why}.")
            return Predictors("residual", threshold, layers)
        try:
            folded = self._all_folded(norm, layers, spool)
        except FormatError as error:
            self.fall_back(f"{error} All predictors read the residual stream.")
            return Predictors("residual", threshold, layers)
        return Predictors("ffn_input", threshold, folded)

    def _all_folded(
        self, norm: str, layers: list[tuple[Rows, Rows] | None], spool: Spool
    ) -> list[tuple[Rows, Rows] | None]:
        """Predictors for the FFN's input, and a note about what rounding them changes."""
        folded: list[tuple[Rows, Rows] | None] = []
        most_changed, row_types = 0.0, set()  # types that aren't the file's
        with byte_progress("Predictors") as progress:
            for i, layer in enumerate(layers):
                if layer is None:
                    folded.append(None)
                    continue
                try:
                    fc1, changed = self._folded(norm % i, *layer)
                except FormatError as error:
                    raise FormatError(f"layer {i}: {error}") from None
                most_changed = max(most_changed, changed)
                row_types |= {fc1.row_type} - {layer[0].row_type}
                folded.append((spool.keep(fc1), layer[1]))
                n_bytes = layer[0].data.nbytes + layer[1].data.nbytes
                progress((i + 1) * n_bytes, len(layers) * n_bytes)
        if row_types:
            names = " or ".join(row_type_name(row_type) for row_type in sorted(row_types))
            self.note(f"predictors: fc1 is stored as {names}: its own type can't hold the norm folded in.")
        if most_changed:
            self.note(
                f"predictors: rounding fc1 with the norm folded in changes at most {100 * most_changed:.3f} % of a layer's "
                "decisions on random residuals."
            )
        return folded

    def _found_predictors(self, spool: Spool) -> tuple[float, list[tuple[Rows, Rows] | None]]:
        model, options = self.model, self.options
        layers: list[tuple[Rows, Rows] | None] = []
        if options.predictor is not None:
            found = powerinfer_files.read_predictors(options.predictor, model.n_embd, self.n_ff, self.note)
            for i, n_ff in enumerate(self.n_ff):
                halves = (found.fc1[i].astype(np.float16), found.fc2[i].astype(np.float16)) if n_ff else ()
                layers.append(tuple(spool.keep(Rows.of(half)) for half in halves) or None)
            return found.threshold, layers
        lacking = []
        for i, n_ff in enumerate(self.n_ff):
            names = [f"blk.{i}.fc1.weight", f"blk.{i}.fc2.weight"]
            if not all(name in model.file.tensors for name in names) or not n_ff:
                layers.append(None)
                lacking += [str(i)] if n_ff else []
                continue
            shapes = [tuple(reversed(model.file.tensors[name].ne)) for name in names]
            where = f"{model.file.path}: layer {i}'s predictor"
            powerinfer_files.check_predictor(where, *shapes, model.n_embd, n_ff)
            layers.append((model.rows(names[0]), model.rows(names[1])))
        if lacking:
            self.fall_back(
                f"{model.file.path}: no fc1.weight and fc2.weight, so no predictor, in layers {', '.join(lacking)}."
            )
        return model.threshold, layers

    def _folded(self, norm_name: str, fc1: Rows, fc2: Rows) -> tuple[Rows, float]:
        """fc1 for the FFN's input in the smallest type that keeps the decisions, and the share that it changes."""
        tensor = self.model.file.tensors.get(norm_name)
        if tensor is None or tensor.ne != (self.model.n_embd,):
            raise FormatError(f"{norm_name} is missing or has another length; expected {self.model.n_embd} values.")
        norm = decoded(self.model.rows(norm_name), 1)[0]
        exact = decoded(fc1, self.n_threads)
        folded = powerinfer_files.ffn_input_predictor(exact, norm)
        second = decoded(fc2, self.n_threads)
        residual = np.random.default_rng(0).standard_normal((_N_FOLD_SAMPLES, norm.size), np.float32)
        x = residual * norm / np.sqrt(np.square(residual).mean(axis=1, keepdims=True))

        def skipped(matrix: np.ndarray, inputs: np.ndarray) -> np.ndarray:
            return np.maximum(inputs @ matrix.T, 0) @ second.T < 0

        wished = skipped(exact, residual)
        t = GGMLQuantizationType
        better = [row_type for row_type in (t.Q8_0, t.F16, t.F32) if _bits(row_type) > _bits(fc1.row_type)]
        for row_type in (fc1.row_type, *better):
            row_type = pi_format.derived_row_type(row_type, folded.shape[1])
            rows = rows_of(folded, row_type, n_threads=self.n_threads)
            changed = float((skipped(decoded(rows, self.n_threads), x) != wished).mean())
            if changed <= MAX_CHANGED_DECISIONS:
                break
        return rows, changed

    def plan(self, base: Path, spool: Spool) -> Plan:
        """The plan of a base that was written from the model.

        Args:
            base: the base model.
            spool: takes rows in a new order.

        Returns:
            The plan; its base_file is the caller's to set.

        Raises:
            FormatError: the model's FFNs aren't those of its architecture.
            PlanError: a fallback with --strict.
        """
        family = self.model.family
        plan = pi_format.bare_plan(base, family.activation)
        if plan.gated != family.gated or [layer.n_ff for layer in plan.layers] != self.n_ff:
            raise self.model.error(
                f"its FFNs are {'' if plan.gated else 'un'}gated with {[layer.n_ff for layer in plan.layers][:4]}... neurons; "
                f"expected {'' if family.gated else 'un'}gated ones of {self.n_ff[:4]}... as {self.model.architecture} has; "
                "convert the model again."
            )
        predictors = self.predictors(spool)
        frequencies = keys = None
        if self.counts is not None:
            keys = self.counts
            frequencies = powerinfer_files.relative_frequencies(self.counts, self.note)
        elif self.split is not None:
            keys = self.split.on_gpu
        layers = []
        for i, layer in enumerate(plan.layers):
            if layer.n_ff:
                layer = self._layer(i, layer, predictors)
                if frequencies is not None:
                    layer = replace(layer, neuron_frequency=frequencies[i])
                if keys is not None:
                    layer = self._ordered(layer, keys[i], spool)
            layers.append(layer)
        corpus = "" if self.counts is None else f"the original PowerInfer's {self.options.activation.name}"
        return replace(plan, layers=tuple(layers), predictor_input=predictors.input, corpus=corpus)

    def _layer(self, i: int, layer: PlanLayer, predictors: Predictors) -> PlanLayer:
        layer = replace(layer, ffn_down_t=self.model.rows(f"blk.{i}.ffn_down_t.weight"))
        if predictors.layers[i] is None:
            return layer
        fc1, fc2 = predictors.layers[i]
        return replace(layer, predictor="mlp", predictor_threshold=predictors.threshold, fc1=fc1, fc2=fc2)

    @staticmethod
    def _ordered(layer: PlanLayer, keys: np.ndarray, spool: Spool) -> PlanLayer:
        layer = powerinfer_files.ordered_layer(layer, keys)
        moved = {name: getattr(layer, name) for name in ("ffn_down_t", "fc2")}
        return replace(layer, **{name: spool.keep(rows) for name, rows in moved.items() if rows is not None})


def _bits(row_type: GGMLQuantizationType) -> float:
    block, block_bytes = pi_format.GGML_QUANT_SIZES[row_type]
    return 8 * block_bytes / block


def import_model(options: ImportOptions, note: Callable[[str], None]) -> Plan:
    """Writes the extended GGUF of a model of the original PowerInfer; with sidecar the base model beside it.

    Args:
        options: the options.
        note: receives what is said once.

    Returns:
        The plan as written.

    Raises:
        FormatError: a file is damaged, or of another model.
        PlanError: a fallback with --strict.
        OptionError: an output that can't be written; torch is needed and not installed.
    """
    output = options.output
    check_plan_path("-o", output)
    if options.threads is not None and options.threads < 1:
        raise OptionError(f"--threads: {options.threads}; expected at least 1.")
    base = output.with_name(output.name.removesuffix(pi_format.SIDECAR_SUFFIX) + ".gguf")
    inputs = [path for path in (options.model, options.split) if path is not None]
    refuse_same(output, *inputs)
    refuse_same(base, *inputs)
    importer = Importer(options, note)
    with ExitStack() as stack:
        spool = Spool(stack.enter_context(tempfile.TemporaryFile(dir=output.parent)))
        if options.sidecar:
            base_path = stack.enter_context(pi_format.atomic_path(base))
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".import-", dir=output.parent))
            base_path = Path(folder) / base.name
        with byte_progress("Base model") as progress:
            write_base(importer.model, base_path, importer.n_threads, progress)
        plan = replace(importer.plan(base_path, spool), base_file=base.name if options.sidecar else "")
        with byte_progress(f"Writing {output.name}") as progress:
            embedded = None if options.sidecar else base_path
            pi_format.write_plan(plan, output, base_embedded=embedded, progress=progress)
    return plan


# ---- Command line --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer import`."""
    parser.add_argument("model", type=Path, help="the original's *.powerinfer.gguf")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the file to write (*.powerinfer.gguf)")
    parser.add_argument(
        "--activation", type=Path, metavar="DIR", help="statistics: activation_<layer>.pt give the order"
    )
    parser.add_argument(
        "--predictor", type=Path, metavar="DIR", help="predictors in place of the file's: model_<layer>.pt"
    )
    parser.add_argument("--split", type=Path, metavar="FILE", help="a .gpuidx file: GPU neurons come first")
    parser.add_argument("--sidecar", action="store_true", help="write base model and plan as two files")
    parser.add_argument("--strict", action="store_true", help="a fallback is an error instead of a note")
    parser.add_argument("--threads", type=int, help="threads that round weights (default: physical cores allowed)")


def run(args: argparse.Namespace) -> int:
    """Runs `powerinfer import`.

    Args:
        args: parsed by add_arguments.

    Returns:
        The exit code.
    """
    options = ImportOptions(**{field.name: getattr(args, field.name) for field in fields(ImportOptions)})
    plan = import_model(options, note_once())
    n_predictors = sum(layer.predictor != "none" for layer in plan.layers)
    print(
        f"{options.output}: {plan.base_architecture} with {plan.activation}, {plan.n_layer} layers, {n_predictors} predictors "
        f"that read {'the FFN input' if plan.predictor_input == 'ffn_input' else 'the residual stream'}"
        + (f"; base model {plan.base_file}" if options.sidecar else "")
    )
    return 0
