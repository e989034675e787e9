"""Extended GGUF, version 1: the specification's names in one place, the plan they describe, read and write.

Nothing read from a file is believed before it is checked. The C++ reader is ggml/src/plan-read.cpp; it takes its
names from format-keys.h, which `python -m powerinfer_py.format --write-header PATH` generates from here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from powerinfer_py.errors import FormatError, PlanError
from powerinfer_py.gguf_file import GgufFile, GgufTensor, row_type_name

FORMAT_VERSION = 1
ARCHITECTURE = "powerinfer"
ALIGNMENT = 64
# The first bytes of each FFN tensor that the digest covers.
DIGEST_HEAD_BYTES = 4096
SIDECAR_SUFFIX = ".powerinfer.gguf"
# More layers than any model has; bounds what a damaged file can make a reader allocate.
MAX_BLOCK_COUNT = 4096
MAX_DEVICES = 16
MAX_PLACEMENTS = 64
# Of the cost model that a saved placement was made by.
PLACEMENT_VERSION = 1
# A saved placement is still used where up to this share more than it was made for is available: another batch size, flash attention.
PLACEMENT_SLACK = 0.1

KEYS = {
    "architecture": "general.architecture",
    "alignment": "general.alignment",
    "format_version": "powerinfer.format_version",
    "base_architecture": "powerinfer.base.architecture",
    "base_file": "powerinfer.base.file",
    "base_ffn_digest": "powerinfer.base.ffn_digest",
    "block_count": "powerinfer.block_count",
    "embedding_length": "powerinfer.embedding_length",
    "feed_forward_length": "powerinfer.feed_forward_length",
    "ffn_activation": "powerinfer.ffn.activation",
    "ffn_gated": "powerinfer.ffn.gated",
    "ffn_activation_param": "powerinfer.ffn.activation_param",
    "ffn_threshold": "powerinfer.ffn.threshold",
    "ffn_product_threshold": "powerinfer.ffn.product_threshold",
    "ffn_loss": "powerinfer.ffn.loss",
    "predictor_kind": "powerinfer.predictor.kind",
    "predictor_input": "powerinfer.predictor.input",
    "predictor_threshold": "powerinfer.predictor.threshold",
    "predictor_recall": "powerinfer.predictor.recall",
    "predictor_candidate_density": "powerinfer.predictor.candidate_density",
    "profile_tokens": "powerinfer.profile.tokens",
    "profile_density": "powerinfer.profile.density",
    "profile_corpus": "powerinfer.profile.corpus",
    "placement_count": "powerinfer.placement.count",
    "placement_version": "powerinfer.placement.%d.version",
    "placement_budget": "powerinfer.placement.%d.budget",
    "placement_n_ctx": "powerinfer.placement.%d.n_ctx",
    "placement_device": "powerinfer.placement.%d.device",
    "placement_hot_bytes": "powerinfer.placement.%d.hot_bytes",
    "placement_n_hot": "powerinfer.placement.%d.n_hot",
    "placement_i_device": "powerinfer.placement.%d.i_device",
    "placement_token_s": "powerinfer.placement.%d.token_s",
    "placement_gap": "powerinfer.placement.%d.gap",
    "placement_model_hash": "powerinfer.placement.%d.model_hash",
    "placement_statistics_hash": "powerinfer.placement.%d.statistics_hash",
}
TENSORS = {
    "base": "base",
    "neuron_order": "blk.%d.neuron_order",
    "neuron_frequency": "blk.%d.neuron_frequency",
    "ffn_down_t": "blk.%d.ffn_down_t.weight",
    "predictor_fc1": "blk.%d.predictor.fc1.weight",
    "predictor_fc2": "blk.%d.predictor.fc2.weight",
}
# In the base model.
BASE_TENSORS = {
    "base_gate": "blk.%d.ffn_gate.weight",
    "base_up": "blk.%d.ffn_up.weight",
    "base_down": "blk.%d.ffn_down.weight",
}
ACTIVATIONS = ("relu", "relu_sqr", "drelu", "silu", "gelu")
PREDICTOR_KINDS = ("none", "mlp", "linear")
PREDICTOR_INPUTS = ("ffn_input", "residual")

# Activation of upstream's graph per architecture, where every plain FFN of the architecture has the same one.
# Source: llama.cpp, src/models (libllama 0.5.0).
ARCHITECTURE_ACTIVATIONS = {
    **dict.fromkeys(
        "afmoe apertus arctic baichuan bailingmoe chameleon chatglm cogvlm cohere2 command-r deci deepseek "
        "deepseek2 dots1 "
        "dream ernie4_5 exaone exaone4 falcon-h1 glm4 granite granitehybrid granitemoe hunyuan-dense "
        "internlm2 jais jamba "
        "lfm2 llada llama llama4 maincoder mellum minicpm minicpm3 mistral3 mistral4 olmo olmo2 openelm "
        "orion paddleocr "
        "pangu-embedded phi3 plamo plamo2 plamo3 qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen3moe qwen3next "
        "qwen3vl refact "
        "seed_oss smollm3 stablelm xverse".split(),
        "silu",
    ),
    **dict.fromkeys(
        "bloom codeshell falcon gemma gemma2 gemma3 gemma4 gpt2 gptneox mpt phi2 starcoder starcoder2".split(), "gelu"
    ),
    **dict.fromkeys("arcee jais2 nemotron plm".split(), "relu_sqr"),
}
_PLAN_AGAIN = "make the plan again (powerinfer profile)."
_USE_BASE = "use the base model that the plan was made from, or make the plan again (powerinfer profile)."
_COPY_CHUNK_BYTES = 16 << 20
_F32_MAX = float(np.finfo(np.float32).max)

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all


# ---- The plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix of weights, one row per neuron or feature.

    Attributes:
        row_type: how a row is stored.
        data: (n_rows, n) float32 or float16, or (n_rows, bytes per row) uint8 for BF16 and quantized rows.
        n: values per row.
    """

    row_type: GGMLQuantizationType
    data: np.ndarray
    n: int

    @classmethod
    def of(cls, values: np.ndarray, row_type: GGMLQuantizationType | None = None) -> Rows:
        """Rows from floats.

        Args:
            values: (n_rows, n) float32 or float16.
            row_type: the type to store; None: as they are. A type that n isn't a whole number of blocks of is
                replaced as `derived_row_type` says.

        Returns:
            The rows.

        Raises:
            FormatError: not a float matrix, or a type that can't be written here (K-quants).
        """
        if values.ndim != 2 or values.dtype not in (np.float32, np.float16):
            raise FormatError(f"rows: {values.dtype} {values.shape}; expected a float32 or float16 matrix; convert it.")
        n = values.shape[1]
        if row_type is None:
            row_type = GGMLQuantizationType.F32 if values.dtype == np.float32 else GGMLQuantizationType.F16
            return cls(row_type, np.ascontiguousarray(values), n)
        row_type = derived_row_type(row_type, n)
        try:
            return cls(row_type, quantize(np.ascontiguousarray(values, np.float32), row_type), n)
        except NotImplementedError:
            raise FormatError(
                f"rows: type {row_type_name(row_type)} can't be written here; "
                "expected f32, f16, bf16, q8_0, q4_0, q4_1, q5_0 or q5_1; "
                "choose one of them."
            ) from None

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.data.shape[0]

    def to_f32(self) -> np.ndarray:
        """(n_rows, n) float32."""
        return dequantize(np.ascontiguousarray(self.data), self.row_type)


@dataclass(frozen=True, eq=False)
class PlanLayer:
    """One layer of a plan; every array is in position order (hot first).

    Attributes:
        n_ff: neurons; 0: not covered, upstream computes the layer.
        digest: SHA-256 of the base's FFN, hex; empty when not covered.
        activation_param: FATReLU's cut.
        threshold: on |act(gate)|; 0: exact zeros only.
        product_threshold: on |act(gate) * up| * norm(down row); 0: off.
        predictor: `none`, `mlp` or `linear`.
        predictor_threshold: a neuron is skipped only when score < it.
        predictor_recall: measured, 0 when unknown.
        predictor_candidate_density: measured, 0 when unknown.
        profile_tokens: tokens that the statistics come from.
        profile_density: down rows used / n_ff while profiling, 0 when unknown.
        neuron_order: (n_ff,) int32, base row at each position; None: identity.
        neuron_frequency: (n_ff,) float32 in [0, 1]; None when not profiled.
        ffn_down_t: n_ff rows of n_embd; None: derived at load.
        fc1: rank rows of n_embd; None without predictor.
        fc2: n_ff rows of rank; None without predictor.
    """

    n_ff: int = 0
    digest: str = ""
    activation_param: float = 0.0
    threshold: float = 0.0
    product_threshold: float = 0.0
    predictor: str = "none"
    predictor_threshold: float = 0.0
    predictor_recall: float = 0.0
    predictor_candidate_density: float = 0.0
    profile_tokens: int = 0
    profile_density: float = 0.0
    neuron_order: np.ndarray | None = None
    neuron_frequency: np.ndarray | None = None
    ffn_down_t: Rows | None = None
    fc1: Rows | None = None
    fc2: Rows | None = None


@dataclass(frozen=True)
class SavedPlacement:
    """How many neurons of each layer go to which device, and what that was computed for.

    Attributes:
        budget: device memory as it was asked for, e.g. `8GiB`.
        n_ctx: context that the budget had to hold too.
        devices: names, at least one.
        hot_bytes: of each device, what was left of the budget for hot neurons.
        n_hot: (n_layer) hot neurons: positions 0 .. n_hot - 1.
        i_device: (n_layer) index into devices.
        token_s: seconds per decoded token that the FFNs were expected to take; stored as float32.
        gap: relative distance of token_s from the bound of the best; stored as float32.
        model_hash: `model_hash` of the plan.
        statistics_hash: `statistics_hash` of the plan.
        version: of the cost model.
    """

    budget: str
    n_ctx: int
    devices: tuple[str, ...]
    hot_bytes: tuple[int, ...]
    n_hot: tuple[int, ...]
    i_device: tuple[int, ...]
    token_s: float
    gap: float
    model_hash: str
    statistics_hash: str
    version: int = PLACEMENT_VERSION


@dataclass(frozen=True, eq=False)
class Plan:
    """All that an extended GGUF says about a model.

    Attributes:
        base_architecture: architecture of the base model.
        n_embd: width of the residual stream.
        activation: one of ACTIVATIONS.
        gated: whether the FFN has a gate.
        layers: one per layer of the base.
        base_file: file name of the base, empty when it is only embedded.
        predictor_input: `ffn_input` or `residual`.
        loss: relative perplexity increase measured with the thresholds; None when not measured.
        corpus: what the statistics came from.
        placements: saved ones, the newest last.
        path: the extended GGUF that this was read from; None for a new plan.
        base_offset: byte of `path` where the embedded base starts; 0 when it isn't embedded.
        base_size: its size in bytes; 0 when it isn't embedded.
    """

    base_architecture: str
    n_embd: int
    activation: str
    gated: bool
    layers: tuple[PlanLayer, ...]
    base_file: str = ""
    predictor_input: str = "ffn_input"
    loss: float | None = None
    corpus: str = ""
    placements: tuple[SavedPlacement, ...] = ()
    path: Path | None = None
    base_offset: int = 0
    base_size: int = 0

    @property
    def n_layer(self) -> int:
        """Number of layers of the base."""
        return len(self.layers)

    @property
    def is_embedded(self) -> bool:
        """Whether the extended GGUF carries the base."""
        return self.base_offset > 0

    def open_base(self, base: str | os.PathLike[str] | None = None) -> BaseModel:
        """Opens the base model and checks that the plan was made for it.

        Args:
            base: where it is; None: embedded, or `base_file` beside the plan.

        Returns:
            The base model.

        Raises:
            FormatError: the base isn't there or damaged.
            PlanError: it isn't the plan's.
        """
        if self.is_embedded:
            if base is not None:
                raise PlanError(f"{self.path}: carries its base model; {base} was named as base too; leave that out.")
            model = BaseModel(self.path, offset=self.base_offset, size=self.base_size)
        else:
            if base is None:
                base = self._base_beside()
            model = BaseModel(base)
        check_base(self, model)
        return model

    def _base_beside(self) -> Path:
        if not self.base_file or self.path is None:
            raise FormatError(
                f"{self.path or 'plan'}: has neither {KEYS['base_file']} nor an embedded base model; "
                "expected one of them; "
                "name the base model."
            )
        base = self.path.parent / self.base_file
        if not os.path.isfile(base):  # Path.is_file raises where a name is too long
            raise FormatError(
                f"{self.path}: {KEYS['base_file']} is '{self.base_file}' but {base} isn't a file; "
                "expected the base model there; "
                "put it beside the plan or name it."
            )
        return base


def derived_row_type(row_type: GGMLQuantizationType, n: int) -> GGMLQuantizationType:
    """The type that rows get when their length isn't a whole number of blocks of the type wished for.

    Args:
        row_type: the type wished for.
        n: values per row.

    Returns:
        row_type itself where it fits; else Q5_1 for Q5_K, Q8_0 for Q6_K and Q8_K, Q5_0 for the other types of
        256 per block; F16 where n isn't a multiple of 32 either.
    """
    block, _ = GGML_QUANT_SIZES[row_type]
    if n % block == 0:
        return row_type
    if n % 32:
        return GGMLQuantizationType.F16
    if row_type == GGMLQuantizationType.Q5_K:
        return GGMLQuantizationType.Q5_1
    if row_type in (GGMLQuantizationType.Q6_K, GGMLQuantizationType.Q8_K):
        return GGMLQuantizationType.Q8_0
    return GGMLQuantizationType.Q5_0


def model_hash(plan: Plan) -> str:
    """What a saved placement knows a model by.

    Args:
        plan: the plan.

    Returns:
        SHA-256 in hex over one line per layer: n_ff, digest, and the type of a stored neuron-major down projection.
    """
    lines = (
        f"{layer.n_ff} {layer.digest} {row_type_name(layer.ffn_down_t.row_type) if layer.ffn_down_t else ''}\n"
        for layer in plan.layers
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def statistics_hash(plan: Plan) -> str:
    """What a saved placement knows a plan's statistics by.

    Args:
        plan: the plan.

    Returns:
        SHA-256 in hex over, per layer, a line that says which of order and frequency are there, then their bytes.
    """
    digest = hashlib.sha256()
    for layer in plan.layers:
        order, frequency = layer.neuron_order, layer.neuron_frequency
        digest.update(f"{order is not None:d}{frequency is not None:d}\n".encode())
        if order is not None:
            digest.update(np.ascontiguousarray(order, "<i4"))
        if frequency is not None:
            digest.update(np.ascontiguousarray(frequency, "<f4"))
    return digest.hexdigest()


def find_placement(plan: Plan, hot_bytes: Sequence[int]) -> SavedPlacement | None:
    """The saved placement that can be used again.

    Args:
        plan: the plan.
        hot_bytes: bytes that each device has for hot neurons now.

    Returns:
        The newest one of this model, these statistics and this version that was made for as many devices, and on each
        for what it has, or at most PLACEMENT_SLACK less; None when there is none.
    """
    if not plan.placements:
        return None
    wished = (PLACEMENT_VERSION, model_hash(plan), statistics_hash(plan))
    for saved in reversed(plan.placements):
        if (
            (saved.version, saved.model_hash, saved.statistics_hash) == wished
            and len(saved.hot_bytes) == len(hot_bytes)
            and all(n * (1 - PLACEMENT_SLACK) <= made_for <= n for made_for, n in zip(saved.hot_bytes, hot_bytes))
        ):
            return saved
    return None


def find_sidecar(model: str | os.PathLike[str]) -> Path | None:
    """The sidecar beside a plain GGUF: X.powerinfer.gguf beside X.gguf.

    Args:
        model: the GGUF; the first split of a split model may have its sidecar with or without the split's number.

    Returns:
        The sidecar's path, None when there is none.
    """
    name = os.fspath(model)
    if not name.endswith(".gguf") or name.endswith(SIDECAR_SUFFIX):
        return None
    stem = name[: -len(".gguf")]
    for candidate in (stem, re.sub(r"-00001-of-\d{5}$", "", stem)):
        if os.path.isfile(candidate + SIDECAR_SUFFIX):
            return Path(candidate + SIDECAR_SUFFIX)
    return None


def is_extended(path: str | os.PathLike[str]) -> bool:
    """Whether a file is an extended GGUF.

    Args:
        path: any GGUF.

    Returns:
        True when its architecture is `powerinfer`.

    Raises:
        FormatError: not a GGUF.
    """
    return _architecture(GgufFile(path)) == ARCHITECTURE


# ---- Base models ---------------------------------------------------------------------------------------------------


class BaseModel:
    """The header of a stock GGUF, all files of a split one, or one embedded in an extended GGUF; weights are read lazily.

    Attributes:
        files: the GGUF, or every part of a split one.
        architecture: e.g. `llama`.
        n_layer: number of layers.
        n_embd: width of the residual stream.
        tensors: tensor name -> the file that holds it.
    """

    def __init__(self, path: str | os.PathLike[str], *, offset: int = 0, size: int | None = None) -> None:
        """Opens it.

        Args:
            path: the GGUF, the first part of a split one, or the extended GGUF.
            offset: byte where the base starts (embedded only).
            size: its size in bytes (embedded only).

        Raises:
            FormatError: not a stock language model, damaged, or a part is missing.
        """
        first = GgufFile(path, offset=offset, size=size)
        self.where = first.where
        self.files = [first, *self._other_parts(first)]
        self.architecture = _architecture(first)
        if not self.architecture:
            raise FormatError(
                f"{self.where}: {KEYS['architecture']} is missing; expected a model; give the base model's GGUF."
            )
        if self.architecture == ARCHITECTURE:
            raise FormatError(
                f"{self.where}: is an extended GGUF; expected a base model; give the stock GGUF that belongs to it."
            )
        self.n_layer = self._size_key("block_count", MAX_BLOCK_COUNT)
        self.n_embd = self._size_key("embedding_length", (1 << 31) - 1)
        self.tensors: dict[str, GgufFile] = {}
        for file in self.files:
            for name in file.tensors:
                self.tensors.setdefault(name, file)
        self._others = self._layers_with_more_than_an_ffn()

    @property
    def path(self) -> Path:
        """The file, or the first part."""
        return self.files[0].path

    def tensor(self, name: str) -> GgufTensor | None:
        """A tensor's place and shape, None when the model doesn't have it."""
        file = self.tensors.get(name)
        return None if file is None else file.tensors[name]

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes, mapped: (n_bytes,) uint8."""
        return self.tensors[name].raw(name)

    def array(self, name: str) -> np.ndarray:
        """A tensor as numpy sees it, mapped: (..., ne1, ne0), or rows of bytes for BF16 and quantized types."""
        return self.tensors[name].array(name)

    def rows_f32(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows of a matrix as floats: (rows, ne0) float32."""
        return self.tensors[name].rows_f32(name, rows)

    @property
    def n_ctx_train(self) -> int | None:
        """Tokens of context that the model was trained with; None: its file doesn't say."""
        return self.files[0].get_int(f"{self.architecture}.context_length")

    def ffn(self, i_layer: int) -> dict[str, GgufTensor]:
        """The FFN tensors of a layer.

        Args:
            i_layer: the layer.

        Returns:
            `gate`, `up`, `down` (those that exist, in this order) -> tensor.
        """
        found = {}
        for name, pattern in BASE_TENSORS.items():
            tensor = self.tensor(pattern % i_layer)
            if tensor is not None:
                found[name.removeprefix("base_")] = tensor
        return found

    def digest(self, i_layer: int) -> str:
        """FORMAT's digest of a layer's FFN.

        Args:
            i_layer: the layer.

        Returns:
            SHA-256 in hex over name, type, shape and first bytes of gate, up and down.
        """
        digest = hashlib.sha256()
        for tensor in self.ffn(i_layer).values():
            ne = (*tensor.ne, 1)[:2]
            digest.update(f"{tensor.name}\n{tensor.type_name}\n{ne[0]},{ne[1]}\n".encode())
            digest.update(self.raw(tensor.name)[:DIGEST_HEAD_BYTES])
        return digest.hexdigest()

    def why_not_covered(self, i_layer: int) -> str:
        """Why a plan leaves a layer to upstream.

        Args:
            i_layer: the layer.

        Returns:
            The reason, empty when the layer can be covered.
        """
        other = self._others.get(i_layer)
        if other is not None:
            if ".nextn." in other:
                return f"MTP layer ({other})"
            if "exp" in other or "gate_inp" in other or re.search(r"\.\d+\.", other.removeprefix(f"blk.{i_layer}.")):
                return f"experts ({other})"
            return f"not a plain FFN ({other})"
        ffn = self.ffn(i_layer)
        for name in ("up", "down"):
            if name not in ffn:
                return f"no {BASE_TENSORS['base_' + name] % i_layer}"
        n_ff = ffn["down"].ne[0]
        if ffn["up"].ne == (self.n_embd, 2 * n_ff):
            return "gate and up are one fused tensor"
        for name, tensor in ffn.items():
            ne = (n_ff, self.n_embd) if name == "down" else (self.n_embd, n_ff)
            if tensor.ne != ne:
                return f"{tensor.name} has shape {list(tensor.ne)}; expected {list(ne)}"
        return ""

    def pieces(self) -> list[np.ndarray]:
        """The whole model as one stock GGUF; a split model is merged.

        Returns:
            Runs of bytes, (n,) uint8 each, mapped where they are weights; one after the other they are the GGUF.
        """
        first = self.files[0]
        if len(self.files) == 1:
            return [first.whole()]
        alignment = first.alignment
        entries = [first.entry(key) for key in first.values if not key.startswith("split.")]
        header = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(entries)) + b"".join(entries))
        offset, data = 0, []
        for name in self.tensors:
            tensor = self.tensor(name)
            raw_name = name.encode()
            header += struct.pack("<Q", len(raw_name)) + raw_name + struct.pack("<I", len(tensor.ne))
            header += struct.pack(f"<{len(tensor.ne)}QIQ", *tensor.ne, tensor.type, offset)
            padding = np.zeros(-tensor.n_bytes % alignment, np.uint8)
            data += [self.raw(name), padding]
            offset += tensor.n_bytes + len(padding)
        header += bytes(-len(header) % alignment)
        return [np.frombuffer(header, np.uint8), *data]

    def _size_key(self, name: str, most: int) -> int:
        key = f"{self.architecture}.{name}"
        value = self.files[0].get_int(key)
        if value is None or not 1 <= value <= most:
            raise FormatError(
                f"{self.where}: {key} is missing or not in 1 .. {most}; expected a language model; "
                "give the base model's GGUF."
            )
        return value

    @staticmethod
    def _other_parts(first: GgufFile) -> list[GgufFile]:
        n_parts = first.get_int("split.count") or 1
        if n_parts == 1:
            return []
        if first.offset:
            raise FormatError(
                f"{first.where}: is one part of a split model; expected a whole one; "
                "pack the plan again (powerinfer pack)."
            )
        tail = f"-00001-of-{n_parts:05d}.gguf"
        name = str(first.path)
        number = first.get_int("split.no")
        if number != 0 or not name.endswith(tail):
            raise FormatError(
                f"{first.where}: is part {(number or 0) + 1} of a model in {n_parts} parts; "
                f"expected the first part, named *{tail}; "
                "give that file."
            )
        stem = name[: -len(tail)]
        return [GgufFile(f"{stem}-{i:05d}-of-{n_parts:05d}.gguf") for i in range(2, n_parts + 1)]

    def _layers_with_more_than_an_ffn(self) -> dict[int, str]:
        """Layer -> a tensor that makes its FFN more than gate, up and down: experts, a norm before down, MTP."""
        others: dict[int, str] = {}
        for name in self.tensors:
            match = _LAYER_NAME.fullmatch(name)
            if match is None or int(match[1]) >= self.n_layer:
                continue
            rest = match[2]
            # "ffn.": activation scales (AWQ)
            plain = not rest.startswith(("nextn.", "ffn."))
            if rest.startswith("ffn_"):
                plain = re.fullmatch(r"ffn_(gate|up|down|norm|post_norm)(\.(?!\d).*)?", rest, re.DOTALL) is not None
            if not plain:
                others.setdefault(int(match[1]), name)
        return others


def split_layer_name(name: str) -> tuple[int, str] | None:
    """`blk.7.rest` -> (7, `rest`); None for other names.

    Args:
        name: of a tensor.

    Returns:
        The layer and what follows.
    """
    match = _LAYER_NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def layer_digests(base: str | os.PathLike[str]) -> list[str]:
    """FORMAT's digest of every layer's FFN.

    Args:
        base: a stock GGUF.

    Returns:
        One digest per layer, empty where the layer can't be covered.

    Raises:
        FormatError: not a stock language model.
    """
    model = BaseModel(base)
    return ["" if model.why_not_covered(i) else model.digest(i) for i in range(model.n_layer)]


def bare_plan(base: str | os.PathLike[str], activation: str | None = None) -> Plan:
    """A plan that says nothing but which layers can be covered: identity order, no statistics, no predictor.

    Args:
        base: a stock GGUF.
        activation: one of ACTIVATIONS; None: that of upstream's graph for the architecture. The activation belongs to
            the weights, not to the architecture: name it for ReLU models that run on upstream's `llama` or `falcon`.

    Returns:
        The plan, not yet written.

    Raises:
        FormatError: not a stock language model, an unknown activation, or an architecture without a known one.
    """
    model = BaseModel(base)
    if activation is None:
        activation = ARCHITECTURE_ACTIVATIONS.get(model.architecture)
        if activation is None:
            raise FormatError(
                f"{model.where}: the activation of architecture '{model.architecture}' isn't known; expected one of "
                f"{', '.join(ACTIVATIONS)}; name it."
            )
    if activation not in ACTIVATIONS:
        raise FormatError(f"activation: '{activation}'; expected one of {', '.join(ACTIVATIONS)}; name one of them.")
    gated: bool | None = None
    layers = []
    for i in range(model.n_layer):
        ffn = model.ffn(i)
        if model.why_not_covered(i) or gated not in (None, "gate" in ffn):
            layers.append(PlanLayer())
            continue
        gated = "gate" in ffn
        layers.append(PlanLayer(n_ff=ffn["down"].ne[0], digest=model.digest(i)))
    return Plan(
        base_architecture=model.architecture,
        n_embd=model.n_embd,
        activation=activation,
        gated=gated is not False,
        layers=tuple(layers),
        base_file=model.path.name,
    )


def check_base(plan: Plan, model: BaseModel) -> None:
    """Checks that a plan was made for a base model.

    Args:
        plan: the plan.
        model: the base model.

    Raises:
        PlanError: another architecture, shape or weights; the text names the layer.
    """
    check_shapes(plan, model)
    where = plan.path or "plan"
    for i, layer in enumerate(plan.layers):
        if layer.n_ff and (digest := model.digest(i)) != layer.digest:
            raise PlanError(
                f"{where}: layer {i}'s FFN has digest {digest[:12]}... in the base model {model.where}; "
                "the plan was made for "
                f"{layer.digest[:12]}...; {_USE_BASE}"
            )


def check_shapes(plan: Plan, model: BaseModel) -> None:
    """Checks that a plan's architecture and shapes are the base model's; the weights may be others.

    Args:
        plan: the plan.
        model: the base model.

    Raises:
        PlanError: naming what differs, and the layer.
    """
    where = plan.path or "plan"
    if model.architecture != plan.base_architecture:
        raise PlanError(
            f"{where}: the base model {model.where} has architecture '{model.architecture}'; the plan was made for "
            f"'{plan.base_architecture}'; {_USE_BASE}"
        )
    if (model.n_layer, model.n_embd) != (plan.n_layer, plan.n_embd):
        raise PlanError(
            f"{where}: the base model {model.where} has {model.n_layer} layers of width {model.n_embd}; "
            "the plan was made for "
            f"{plan.n_layer} of width {plan.n_embd}; {_USE_BASE}"
        )
    for i, layer in enumerate(plan.layers):
        if not layer.n_ff:
            continue
        ffn = model.ffn(i)
        wished = ["gate", "up", "down"] if plan.gated else ["up", "down"]
        if list(ffn) != wished:
            raise PlanError(
                f"{where}: layer {i}'s FFN in the base model {model.where} has {', '.join(ffn) or 'nothing'}; "
                "the plan was made for "
                f"{', '.join(wished)}; {_USE_BASE}"
            )
        for name, tensor in ffn.items():
            ne = (layer.n_ff, plan.n_embd) if name == "down" else (plan.n_embd, layer.n_ff)
            if tensor.ne != ne:
                raise PlanError(
                    f"{where}: layer {i}'s {name} in the base model {model.where} has shape {list(tensor.ne)}; "
                    "the plan was made for "
                    f"{list(ne)}; {_USE_BASE}"
                )


# ---- Reading -------------------------------------------------------------------------------------------------------

_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(.*)", re.DOTALL)
_WEIGHT_TYPES = frozenset(GGMLQuantizationType) - {
    GGMLQuantizationType.F64,
    GGMLQuantizationType.I8,
    GGMLQuantizationType.I16,
    GGMLQuantizationType.I32,
    GGMLQuantizationType.I64,
    GGMLQuantizationType.Q8_1,
    GGMLQuantizationType.Q8_K,
}


def _architecture(file: GgufFile) -> str:
    value = file.values.get(KEYS["architecture"])
    return file.get(KEYS["architecture"]) if value is not None and value.type == "str" and not value.is_array else ""


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads and checks an extended GGUF. The base model isn't opened: `Plan.open_base` does that.

    Args:
        path: a sidecar or a file that carries its base.

    Returns:
        The plan; orders and frequencies in memory, weights mapped.

    Raises:
        FormatError: not an extended GGUF, of a newer version, damaged, or against the format.
    """
    return _PlanReader(path).read()


def open_files(
    model: str | os.PathLike[str], plan: str | os.PathLike[str] | None = None
) -> tuple[BaseModel, Plan | None]:
    """The base model and the plan that belong to a model path.

    Args:
        model: a plain GGUF, or an extended one.
        plan: the extended GGUF to use; None: what is found.

    Returns:
        The base, and its plan when there is one.

    Raises:
        FormatError: a file isn't what it should be.
    """
    if is_extended(model):
        found = read_plan(model)
        return found.open_base(), found
    path = plan or find_sidecar(model)
    return BaseModel(model), None if path is None else read_plan(path)


class _PlanReader:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.file = GgufFile(path)
        self.n_layer = 0
        self.n_embd = 0

    def read(self) -> Plan:
        architecture = _architecture(self.file)
        if architecture != ARCHITECTURE:
            raise self.error(
                f"{KEYS['architecture']} is '{architecture[:80]}'; expected '{ARCHITECTURE}'; "
                "give an extended GGUF (powerinfer profile makes one for a model)."
            )
        version = self.scalar("format_version", "u32")
        if not 1 <= version <= FORMAT_VERSION:
            raise self.error(
                f"{KEYS['format_version']} is {version}; "
                f"this build reads up to {FORMAT_VERSION}. Convert the model again."
            )
        alignment = self.file.get(KEYS["alignment"], ALIGNMENT)
        if alignment != ALIGNMENT:
            raise self.expected("alignment", alignment, ALIGNMENT)
        self.n_layer = self.scalar("block_count", "u32")
        if not 1 <= self.n_layer <= MAX_BLOCK_COUNT:
            raise self.expected("block_count", self.n_layer, f"1 .. {MAX_BLOCK_COUNT}")
        self.n_embd = self.scalar("embedding_length", "u32")
        if not 1 <= self.n_embd < 1 << 31:
            raise self.expected("embedding_length", self.n_embd, f"1 .. {(1 << 31) - 1}")
        gated = self.boolean("ffn_gated")
        activation = self.choice("ffn_activation", ACTIVATIONS)
        if activation == "drelu" and not gated:
            raise self.wrong(
                f"{KEYS['ffn_activation']} is drelu and {KEYS['ffn_gated']} is false; expected a gated FFN"
            )
        predictor_input = self.choice("predictor_input", PREDICTOR_INPUTS, default="ffn_input")
        loss = self.scalar("ffn_loss", "f32", default=None)
        if loss is not None and not np.isfinite(loss):
            raise self.expected("ffn_loss", loss, "a finite number")
        base_architecture = self.scalar("base_architecture", "str")
        corpus = self.scalar("profile_corpus", "str", default="")
        base_file = self.scalar("base_file", "str", default="")
        layers = self.layer_values()
        self.check_tensor_names([layer["n_ff"] for layer in layers])
        offset, size = self.embedded_base()
        if not size and (base_file in (".", "..") or re.search(r"[/\\\0]", base_file)):
            raise self.expected("base_file", base_file, "a file name without folders")
        return Plan(
            base_architecture=base_architecture,
            n_embd=self.n_embd,
            activation=activation,
            gated=gated,
            layers=tuple(PlanLayer(**layer, **self.layer_tensors(i, layer)) for i, layer in enumerate(layers)),
            base_file=base_file,
            predictor_input=predictor_input,
            loss=loss,
            corpus=corpus,
            placements=self.placements([layer["n_ff"] for layer in layers]),
            path=Path(self.path),
            base_offset=offset,
            base_size=size,
        )

    def error(self, text: str) -> FormatError:
        return FormatError(f"{self.path}: {text}")

    def wrong(self, text: str) -> FormatError:
        return self.error(f"{text}; {_PLAN_AGAIN}")

    def expected(self, name: str, found: object, expected: object, i_layer: int | None = None) -> FormatError:
        return self.key_expected(KEYS[name], found, expected, "" if i_layer is None else f" of layer {i_layer}")

    def key_expected(self, key: str, found: object, expected: object, of: str = "") -> FormatError:
        shown = repr(found[:80]) if isinstance(found, str) else found
        return self.wrong(f"{key}{of} is {shown}; expected {expected}")

    def value(self, name: str, type_name: str, is_array: bool, required: bool) -> Any:
        return self.key_value(KEYS[name], type_name, is_array, required, self.n_layer, "layer")

    def key_value(self, key: str, type_name: str, is_array: bool, required: bool, n: int, what: str) -> Any:
        value = self.file.values.get(key)
        if value is None:
            if required:
                raise self.wrong(f"{key} is missing; an extended GGUF must have it")
            return None
        if (value.type, value.is_array) != (type_name, is_array):
            kinds = {False: "of type ", True: "an array of "}
            raise self.wrong(
                f"{key} is {kinds[value.is_array]}{value.type}; "
                f"expected {kinds[is_array].removeprefix('of type ')}{type_name}"
            )
        if is_array and value.n != n:
            raise self.wrong(f"{key} has {value.n} values; expected {n}, one per {what}")
        return self.file.get(key)

    def scalar(self, name: str, type_name: str, default: Any = ...) -> Any:
        value = self.value(name, type_name, is_array=False, required=default is ...)
        return default if value is None else value

    def array(self, name: str, type_name: str, default: Any = ...) -> list[Any]:
        value = self.value(name, type_name, is_array=True, required=default is ...)
        return [default] * self.n_layer if value is None else value

    def boolean(self, name: str) -> bool:
        value = self.scalar(name, "bool")
        raw = int(self.file.raw_value(KEYS[name]))
        if raw > 1:
            raise self.expected(name, raw, "0 or 1")
        return value

    def choice(self, name: str, choices: Sequence[str], default: Any = ...) -> str:
        value = self.scalar(name, "str", default)
        if value not in choices:
            raise self.expected(name, value, f"one of {', '.join(choices)}")
        return value

    def floats(self, name: str, low: float, high: float) -> list[float]:
        values = self.array(name, "f32", 0.0)
        for i, value in enumerate(values):
            if not low <= value <= high:
                bounds = "" if low < 0 else f" from {low:g}{f' to {high:g}' if high < _F32_MAX else ' up'}"
                raise self.expected(name, value, f"a finite number{bounds}", i)
        return values

    def layer_values(self) -> list[dict[str, Any]]:
        """The fields of every layer that come from keys."""
        n_ff = self.array("feed_forward_length", "u32")
        digests = self.array("base_ffn_digest", "str")
        kinds = self.array("predictor_kind", "str", "none")
        for i in range(self.n_layer):
            if n_ff[i] >= 1 << 31:
                raise self.expected("feed_forward_length", n_ff[i], f"at most {(1 << 31) - 1}", i)
            if not re.fullmatch(r"[0-9a-f]{64}" if n_ff[i] else "", digests[i]):
                wish = "64 hexadecimal digits" if n_ff[i] else "nothing, because the layer isn't covered"
                raise self.expected("base_ffn_digest", digests[i], wish, i)
            if kinds[i] not in PREDICTOR_KINDS:
                raise self.expected("predictor_kind", kinds[i], f"one of {', '.join(PREDICTOR_KINDS)}", i)
        columns = {
            "n_ff": n_ff,
            "digest": digests,
            "activation_param": self.floats("ffn_activation_param", 0.0, _F32_MAX),
            "threshold": self.floats("ffn_threshold", 0.0, _F32_MAX),
            "product_threshold": self.floats("ffn_product_threshold", 0.0, _F32_MAX),
            "predictor": kinds,
            "predictor_threshold": self.floats("predictor_threshold", -_F32_MAX, _F32_MAX),
            "predictor_recall": self.floats("predictor_recall", 0.0, 1.0),
            "predictor_candidate_density": self.floats("predictor_candidate_density", 0.0, 1.0),
            "profile_tokens": self.array("profile_tokens", "u64", 0),
            "profile_density": self.floats("profile_density", 0.0, 1.0),
        }
        return [dict(zip(columns, row)) for row in zip(*columns.values())]

    def placements(self, n_ff: list[int]) -> tuple[SavedPlacement, ...]:
        """All saved placements."""
        n_placements = self.scalar("placement_count", "u32", 0)
        if n_placements > MAX_PLACEMENTS:
            raise self.expected("placement_count", n_placements, f"at most {MAX_PLACEMENTS}")
        return tuple(self.placement(i, n_ff) for i in range(n_placements))

    def placement(self, i_placement: int, n_ff: list[int]) -> SavedPlacement:
        def key(name: str) -> str:
            return KEYS[f"placement_{name}"] % i_placement

        def scalar(name: str, type_name: str) -> Any:
            return self.key_value(key(name), type_name, False, True, 0, "")

        def array(name: str, type_name: str, n: int, what: str) -> tuple[Any, ...]:
            return tuple(self.key_value(key(name), type_name, True, True, n, what))

        listed = self.file.values.get(key("device"))
        n_devices = listed.n if listed is not None and listed.is_array else 1
        if not 1 <= n_devices <= MAX_DEVICES:
            raise self.wrong(f"{key('device')} has {n_devices} values; expected 1 .. {MAX_DEVICES}")
        saved = SavedPlacement(
            version=scalar("version", "u32"),
            budget=scalar("budget", "str"),
            n_ctx=scalar("n_ctx", "u32"),
            devices=array("device", "str", n_devices, "device"),
            hot_bytes=array("hot_bytes", "u64", n_devices, "device"),
            n_hot=array("n_hot", "u32", self.n_layer, "layer"),
            i_device=array("i_device", "u32", self.n_layer, "layer"),
            token_s=scalar("token_s", "f32"),
            gap=scalar("gap", "f32"),
            model_hash=scalar("model_hash", "str"),
            statistics_hash=scalar("statistics_hash", "str"),
        )
        for i, (n_hot, i_device) in enumerate(zip(saved.n_hot, saved.i_device)):
            if n_hot > n_ff[i]:
                raise self.key_expected(key("n_hot"), n_hot, f"at most {n_ff[i]} (n_ff)", f" of layer {i}")
            if i_device >= n_devices:
                raise self.key_expected(key("i_device"), i_device, f"0 .. {n_devices - 1}", f" of layer {i}")
        for name in ("token_s", "gap"):
            if not 0 <= getattr(saved, name) <= _F32_MAX:
                raise self.key_expected(key(name), getattr(saved, name), "a finite number from 0 up")
        for name in ("model_hash", "statistics_hash"):
            if not re.fullmatch("[0-9a-f]{64}", getattr(saved, name)):
                raise self.key_expected(key(name), getattr(saved, name), "64 hexadecimal digits")
        return saved

    def check_tensor_names(self, n_ff: list[int]) -> None:
        """Every tensor is one of the format's, for a layer that the plan covers."""
        rests = {pattern.removeprefix("blk.%d.") for pattern in TENSORS.values()} - {TENSORS["base"]}
        for name in self.file.tensors:
            match = _LAYER_NAME.fullmatch(name)
            if name == TENSORS["base"]:
                continue
            if match is None or match[2] not in rests:
                raise self.wrong(f"tensor {name!r} isn't part of format version {FORMAT_VERSION}")
            i_layer = int(match[1])
            if i_layer >= self.n_layer:
                raise self.wrong(
                    f"tensor {name} belongs to layer {i_layer}; "
                    f"expected layers 0 .. {self.n_layer - 1} ({KEYS['block_count']})"
                )
            if n_ff[i_layer] == 0:
                raise self.wrong(
                    f"tensor {name} belongs to layer {i_layer}, which the plan doesn't cover "
                    f"({KEYS['feed_forward_length']} is 0)"
                )

    def embedded_base(self) -> tuple[int, int]:
        """(offset, size) of the embedded base in bytes, zeros when there is none."""
        tensor = self.file.tensors.get(TENSORS["base"])
        if tensor is None:
            return 0, 0
        if tensor.type != GGMLQuantizationType.I8 or tensor.rows_shape[0] != 1 or tensor.offset % ALIGNMENT:
            raise self.error(
                f"tensor base is {tensor.type_name} {list(tensor.ne)} at byte {tensor.offset}; "
                "expected i8 [size] at a multiple of "
                f"{ALIGNMENT}; pack the plan again (powerinfer pack)."
            )
        GgufFile(self.path, offset=tensor.offset, size=tensor.n_bytes)
        return tensor.offset, tensor.n_bytes

    def layer_tensors(self, i_layer: int, layer: dict[str, Any]) -> dict[str, Any]:
        """The fields of one layer that come from tensors."""
        n_ff = layer["n_ff"]
        order = self.vector("neuron_order", i_layer, GGMLQuantizationType.I32, n_ff)
        if order is not None and not np.array_equal(np.sort(order), np.arange(n_ff, dtype=np.int32)):
            position, row = _first_wrong(order)
            raise self.wrong(
                f"layer {i_layer}'s neuron_order has {row} at position {position}; "
                f"expected each of 0 .. {n_ff - 1} once"
            )
        frequency = self.vector("neuron_frequency", i_layer, GGMLQuantizationType.F32, n_ff)
        if frequency is not None and not np.all((frequency >= 0) & (frequency <= 1)):
            position = int(np.argmin((frequency >= 0) & (frequency <= 1)))
            raise self.wrong(
                f"layer {i_layer}'s neuron_frequency is {frequency[position]} at position {position}; "
                f"expected a share from 0 to 1"
            )
        fc1, fc2 = self.predictor(i_layer, layer["predictor"], n_ff)
        return {
            "neuron_order": order,
            "neuron_frequency": frequency,
            "ffn_down_t": self.rows("ffn_down_t", i_layer, self.n_embd, n_ff),
            "fc1": fc1,
            "fc2": fc2,
        }

    def predictor(self, i_layer: int, kind: str, n_ff: int) -> tuple[Rows | None, Rows | None]:
        names = [TENSORS[name] % i_layer for name in ("predictor_fc1", "predictor_fc2")]
        found = [name for name in names if name in self.file.tensors]
        if kind == "none":
            if found:
                raise self.wrong(
                    f"layer {i_layer} has predictor tensors but {KEYS['predictor_kind']} is none; "
                    "expected mlp or linear"
                )
            return None, None
        if len(found) < len(names):
            missing = next(name for name in names if name not in found)
            raise self.wrong(f"layer {i_layer}'s {KEYS['predictor_kind']} is {kind} but {missing} is missing")
        rank = (*self.file.tensors[names[0]].ne, 1)[1]
        if not 1 <= rank <= self.n_embd:
            raise self.wrong(
                f"layer {i_layer}'s predictor has rank {rank}; expected 1 .. {self.n_embd} ({KEYS['embedding_length']})"
            )
        return self.rows("predictor_fc1", i_layer, self.n_embd, rank), self.rows("predictor_fc2", i_layer, rank, n_ff)

    def vector(self, name: str, i_layer: int, row_type: GGMLQuantizationType, n: int) -> np.ndarray | None:
        tensor = self.file.tensors.get(TENSORS[name] % i_layer)
        if tensor is None:
            return None
        if tensor.type != row_type or tensor.ne[0] != n or tensor.rows_shape[0] != 1:
            raise self.wrong(
                f"layer {i_layer}'s {tensor.name} is {tensor.type_name} {list(tensor.ne)}; "
                f"expected {row_type_name(row_type)} [{n}]"
            )
        return np.array(self.file.array(tensor.name)).reshape(n)

    def rows(self, name: str, i_layer: int, ne0: int, ne1: int) -> Rows | None:
        tensor = self.file.tensors.get(TENSORS[name] % i_layer)
        if tensor is None:
            return None
        if (*tensor.ne, 1, 1, 1)[:4] != (ne0, ne1, 1, 1):
            raise self.wrong(f"layer {i_layer}'s {tensor.name} has shape {list(tensor.ne)}; expected {[ne0, ne1]}")
        if tensor.type not in _WEIGHT_TYPES:
            raise self.wrong(
                f"layer {i_layer}'s {tensor.name} is of type {tensor.type_name}; expected a type that holds weights"
            )
        data = self.file.array(tensor.name)
        return Rows(tensor.type, data.reshape(ne1, -1), ne0)


def _first_wrong(order: np.ndarray) -> tuple[int, int]:
    """(position, value) of the first value that is out of range or there for the second time."""
    seen = set()
    for position, row in enumerate(order.tolist()):
        if not 0 <= row < len(order) or row in seen:
            return position, row
        seen.add(row)
    raise ValueError("a permutation has nothing wrong")


# ---- Writing -------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path in the same folder that becomes `path` when the block ends well, and is removed when it doesn't.

    Args:
        path: the file to write.

    Yields:
        The temporary path; the block must create it.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_plan(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    base_embedded: str | os.PathLike[str] | BaseModel | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes an extended GGUF: a temporary file, read back with every check, then renamed.

    Saved placements of other weights or other statistics than the plan's are left out: nothing could use them again.

    Args:
        plan: what to write.
        path: the file.
        base_embedded: a stock GGUF to carry inside, or an opened one, merged when it is split; None: a sidecar.
        progress: called while tensors are copied, with bytes written and bytes in all.

    Returns:
        The path written.

    Raises:
        FormatError: the plan is against the format; no file is left then.
    """
    if base_embedded is not None and not isinstance(base_embedded, BaseModel):
        base_embedded = BaseModel(base_embedded)
    with atomic_path(path) as temporary:
        try:
            _write(plan, temporary, base_embedded, progress)
            read_plan(temporary)
        except FormatError as error:
            raise FormatError(str(error).replace(str(temporary), str(path), 1)) from None
    return Path(path)


def _write(plan: Plan, path: Path, base: BaseModel | None, progress: Progress | None) -> None:
    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_custom_alignment(ALIGNMENT)
    for key, kind, value in _plan_values(plan):
        if isinstance(value, list):
            writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=kind)
        else:
            writer.add_key_value(key, value, kind)
    sources: list[list[np.ndarray]] = []  # of each tensor, the runs of bytes
    for name, array, row_type in _plan_arrays(plan):
        array = np.ascontiguousarray(array)
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, raw_dtype=row_type)
        sources.append([array.reshape(-1).view(np.uint8)])
    if base is not None:
        sources.append(base.pieces())
        n_bytes = sum(len(piece) for piece in sources[-1])
        writer.add_tensor_info(TENSORS["base"], (n_bytes,), np.dtype(np.int8), n_bytes)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        _write_data(writer.fout[0], sources, progress)
    finally:
        writer.close()


def _plan_values(plan: Plan) -> Iterator[tuple[str, GGUFValueType, Any]]:
    """(key, value type, value) of every key to write; optional ones only where they say something."""
    for name, kind, value in _model_values(plan):
        yield KEYS[name], kind, value
    wished = (model_hash(plan), statistics_hash(plan)) if plan.placements else ()
    usable = [saved for saved in plan.placements if (saved.model_hash, saved.statistics_hash) == wished]
    if usable:
        yield KEYS["placement_count"], GGUFValueType.UINT32, len(usable)
    for i, saved in enumerate(usable):
        for name, kind, value in _placement_values(saved):
            yield KEYS[name] % i, kind, value


def _placement_values(saved: SavedPlacement) -> Iterator[tuple[str, GGUFValueType, Any]]:
    """(name in KEYS, value type, value) of every key of a saved placement."""
    t = GGUFValueType
    yield "placement_version", t.UINT32, saved.version
    yield "placement_budget", t.STRING, saved.budget
    yield "placement_n_ctx", t.UINT32, saved.n_ctx
    yield "placement_device", t.STRING, list(saved.devices)
    yield "placement_hot_bytes", t.UINT64, list(saved.hot_bytes)
    yield "placement_n_hot", t.UINT32, list(saved.n_hot)
    yield "placement_i_device", t.UINT32, list(saved.i_device)
    yield "placement_token_s", t.FLOAT32, saved.token_s
    yield "placement_gap", t.FLOAT32, saved.gap
    yield "placement_model_hash", t.STRING, saved.model_hash
    yield "placement_statistics_hash", t.STRING, saved.statistics_hash


def _model_values(plan: Plan) -> Iterator[tuple[str, GGUFValueType, Any]]:
    """(name in KEYS, value type, value) of every key that isn't a placement's."""
    t = GGUFValueType
    yield "format_version", t.UINT32, FORMAT_VERSION
    yield "base_architecture", t.STRING, plan.base_architecture
    if plan.base_file:
        yield "base_file", t.STRING, plan.base_file
    yield "base_ffn_digest", t.STRING, [layer.digest for layer in plan.layers]
    yield "block_count", t.UINT32, plan.n_layer
    yield "embedding_length", t.UINT32, plan.n_embd
    yield "feed_forward_length", t.UINT32, [layer.n_ff for layer in plan.layers]
    yield "ffn_activation", t.STRING, plan.activation
    yield "ffn_gated", t.BOOL, plan.gated
    if plan.loss is not None:
        yield "ffn_loss", t.FLOAT32, plan.loss
    has_predictor = any(layer.predictor != "none" for layer in plan.layers)
    if has_predictor:
        yield "predictor_kind", t.STRING, [layer.predictor for layer in plan.layers]
        yield "predictor_input", t.STRING, plan.predictor_input
        yield "predictor_threshold", t.FLOAT32, [layer.predictor_threshold for layer in plan.layers]
    for name, kind, attribute in (
        ("ffn_activation_param", t.FLOAT32, "activation_param"),
        ("ffn_threshold", t.FLOAT32, "threshold"),
        ("ffn_product_threshold", t.FLOAT32, "product_threshold"),
        ("predictor_recall", t.FLOAT32, "predictor_recall"),
        ("predictor_candidate_density", t.FLOAT32, "predictor_candidate_density"),
        ("profile_tokens", t.UINT64, "profile_tokens"),
        ("profile_density", t.FLOAT32, "profile_density"),
    ):
        values = [getattr(layer, attribute) for layer in plan.layers]
        if any(values):
            yield name, kind, values
    if plan.corpus:
        yield "profile_corpus", t.STRING, plan.corpus


def _plan_arrays(plan: Plan) -> Iterator[tuple[str, np.ndarray, GGMLQuantizationType | None]]:
    """(tensor name, array, raw type of byte rows) of every tensor to write but the base."""
    for i, layer in enumerate(plan.layers):
        if layer.neuron_order is not None:
            yield TENSORS["neuron_order"] % i, layer.neuron_order.astype(np.int32), None
        if layer.neuron_frequency is not None:
            yield TENSORS["neuron_frequency"] % i, layer.neuron_frequency.astype(np.float32), None
        for name, rows in (
            ("ffn_down_t", layer.ffn_down_t),
            ("predictor_fc1", layer.fc1),
            ("predictor_fc2", layer.fc2),
        ):
            if rows is not None:
                yield TENSORS[name] % i, rows.data, rows.row_type


def _write_data(out: IO[bytes], sources: Sequence[Sequence[np.ndarray]], progress: Progress | None) -> None:
    """Writes tensor data in chunks, each tensor from a multiple of ALIGNMENT on."""
    n_bytes = sum(len(run) for runs in sources for run in runs)
    n_written = 0
    for runs in sources:
        out.write(b"\0" * (-out.tell() % ALIGNMENT))
        for run in runs:
            n_written += copy_bytes(out, run, lambda n, before=n_written: progress and progress(before + n, n_bytes))


def copy_bytes(out: IO[bytes], data: np.ndarray, progress: Callable[[int], object]) -> int:
    """Writes bytes in chunks, so that a mapped file needs no memory of its size.

    Args:
        out: where to.
        data: (n,) uint8.
        progress: called after each chunk with the bytes written so far.

    Returns:
        n.
    """
    for at in range(0, len(data), _COPY_CHUNK_BYTES):
        chunk = data[at : at + _COPY_CHUNK_BYTES]
        out.write(chunk)
        progress(at + len(chunk))
    return len(data)


# ---- Generated header ----------------------------------------------------------------------------------------------


def header_text() -> str:
    """The text of ggml/src/format-keys.h.

    Returns:
        A C++ header with every key and tensor name and every constant of the format.
    """
    lines = [
        "// Key and tensor names and constants of extended GGUF. Generated from powerinfer_py/format.py: "
        "don't edit, run",
        "// python -m powerinfer_py.format --write-header ggml/src/format-keys.h",
        "#pragma once",
        "",
        "namespace powerinfer::format {",
        "",
        f"inline constexpr unsigned version = {FORMAT_VERSION};",
        f'inline constexpr char architecture[] = "{ARCHITECTURE}";',
        f"inline constexpr unsigned alignment = {ALIGNMENT};",
        f"inline constexpr unsigned digest_head_bytes = {DIGEST_HEAD_BYTES};",
        f'inline constexpr char sidecar_suffix[] = "{SIDECAR_SUFFIX}";',
        f"inline constexpr unsigned max_block_count = {MAX_BLOCK_COUNT};",
        f"inline constexpr unsigned max_devices = {MAX_DEVICES};",
        f"inline constexpr unsigned max_placements = {MAX_PLACEMENTS};",
        f"inline constexpr unsigned placement_version = {PLACEMENT_VERSION};",
        f"inline constexpr double placement_slack = {PLACEMENT_SLACK};",
        "",
    ]
    lines += [f'inline constexpr char key_{name}[] = "{key}";' for name, key in KEYS.items()]
    lines += [""]
    lines += [f'inline constexpr char tensor_{name}[] = "{key}";' for name, key in {**TENSORS, **BASE_TENSORS}.items()]
    lines += [""]
    for name, values in (
        ("activations", ACTIVATIONS),
        ("predictor_kinds", PREDICTOR_KINDS),
        ("predictor_inputs", PREDICTOR_INPUTS),
    ):
        lines.append(
            f"inline constexpr const char * {name}[] = {{{', '.join(f'{chr(34)}{v}{chr(34)}' for v in values)}}};"
        )
    lines += ["", "}  // namespace powerinfer::format", ""]
    return "\n".join(lines)


def main() -> int:
    """Writes the C++ header of the names: `python -m powerinfer_py.format --write-header PATH`."""
    parser = argparse.ArgumentParser(prog="python -m powerinfer_py.format", description=main.__doc__)
    parser.add_argument("--write-header", metavar="PATH", required=True, help="where to write format-keys.h")
    Path(parser.parse_args().write_header).write_text(header_text(), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
