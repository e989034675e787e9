"""Tiny models in the original PowerInfer's file format, and what that engine computes for them, in plain torch.

The file layout is written out by hand here: nothing of the importer is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import tiny_models
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

N_VOCAB = 384
N_CTX = 256
EPSILON = 1e-5
ROPE_BASE = 10000.0
GATED = ("llama", "bamboo")


@dataclasses.dataclass
class Original:
    """A model as it lies in the file.

    Attributes:
        path: the file.
        architecture: `llama`, `bamboo`, `falcon` or `opt`.
        threshold: a neuron is computed when its score >= it.
        weights: tensor name -> what its rows decode to, outermost dimension first, float64.
        types: tensor name -> type.
        n_layer, n_embd, n_ff, n_head, n_kv: shape.
    """

    path: Path
    architecture: str
    threshold: float
    weights: dict[str, torch.Tensor]
    types: dict[str, GGMLQuantizationType]
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_kv: int


@dataclasses.dataclass
class Evaluation:
    """Of one sequence: logits (n_tokens, n_vocab), and per layer (n_tokens, n_ff) masks, (n_tokens, n_embd) predictor
    inputs and FFN inputs; float64."""

    logits: np.ndarray
    masks: list[np.ndarray]
    residuals: list[np.ndarray]
    ffn_inputs: list[np.ndarray]


def set_magic(path: Path) -> Path:
    """Writes the original's first four bytes over those of GGUF."""
    with path.open("r+b") as file:
        file.write(b"PWRI")
    return path


def write_original(
    path: Path,
    architecture: str = "llama",
    *,
    n_layer: int = 3,
    n_embd: int = 64,
    n_ff: int = 160,
    n_head: int = 4,
    rank: int = 32,
    row_type: str = "F32",
    predictor_type: str = "F32",
    norm_type: str = "F32",
    threshold: float | None = None,
    zero_norm: bool = False,
    without_predictor: Sequence[int] = (),
    leave_out: Sequence[str] = (),
    tokenizer: str = "llama",
    seed: int = 0,
) -> Original:
    """Writes one.

    Args:
        path: the file.
        architecture: the original's name.
        n_layer, n_embd, n_ff, n_head: shape.
        rank: of the predictors.
        row_type: of the FFN's rows.
        predictor_type: of the predictors' rows.
        norm_type: F32, or F16 as no file has it.
        threshold: sparse_threshold; None: the key is absent.
        zero_norm: one weight of one FFN norm is 0.
        without_predictor: layers that lack it.
        leave_out: tensors and keys that the file lacks.
        tokenizer: tokenizer.ggml.model.
        seed: of the weights.

    Returns:
        The model.
    """
    rng = np.random.default_rng(seed)
    n_kv = {"falcon": 1, "bamboo": n_head // 2}.get(architecture, n_head)
    head = n_embd // n_head
    is_layer_norm = architecture in ("falcon", "opt")
    model = Original(path, architecture, threshold or 0.0, {}, {}, n_layer, n_embd, n_ff, n_head, n_kv)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture}")
    writer.add_context_length(N_CTX + 2 if architecture == "opt" else N_CTX)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    if architecture != "opt":
        writer.add_head_count_kv(n_kv)
        (writer.add_layer_norm_eps if is_layer_norm else writer.add_layer_norm_rms_eps)(EPSILON)
    if architecture in GATED:
        writer.add_rope_dimension_count(head)
        writer.add_rope_freq_base(ROPE_BASE)
    if threshold is not None:
        writer.add_float32("powerinfer.sparse_threshold", threshold)
    tiny_models._add_vocab(writer, N_VOCAB)
    writer.kv_data[0]["tokenizer.ggml.model"].value = tokenizer

    def add(name: str, values: np.ndarray, kind: str = "F32") -> None:
        if name in leave_out:
            return
        row_kind = GGMLQuantizationType[kind]
        rows = tiny_models.quantize_rows(values.astype(np.float32), row_kind)
        writer.add_tensor(name, rows, raw_dtype=row_kind)
        model.weights[name] = torch.from_numpy(np.array(dequantize(rows, row_kind))).double()
        model.types[name] = row_kind

    def matrix(name: str, n_rows: int, n: int, gain: float = 1.0, kind: str = "F32") -> None:
        add(name, rng.standard_normal((n_rows, n)) * gain / np.sqrt(n), kind)

    def vector(name: str, n: int, mean: float = 0.0, spread: float = 0.1, kind: str = "F32") -> None:
        add(name, mean + spread * rng.standard_normal(n), kind)

    def norm(name: str) -> None:
        values = 1.0 + 0.3 * rng.standard_normal(n_embd)
        values[5] = -0.4
        if zero_norm and name == "blk.1.ffn_norm":
            values[9] = 0.0
        add(f"{name}.weight", values, norm_type)
        if is_layer_norm:
            vector(f"{name}.bias", n_embd)

    gain = 1.0 / np.sqrt(2 * n_layer)
    matrix("token_embd.weight", N_VOCAB, n_embd, np.sqrt(n_embd))
    if architecture == "opt":
        matrix("position_embd.weight", N_CTX + 2, n_embd, 0.5 * np.sqrt(n_embd))
    for i in range(n_layer):
        blk = f"blk.{i}"
        if i not in without_predictor:
            matrix(f"{blk}.fc1.weight", rank, n_embd, kind=predictor_type)
            matrix(f"{blk}.fc2.weight", n_ff, rank, kind=predictor_type)
        norm(f"{blk}.attn_norm")
        if architecture == "falcon":
            matrix(f"{blk}.attn_qkv.weight", (n_head + 2 * n_kv) * head, n_embd)
        else:
            for letter, n_heads in (("q", n_head), ("k", n_kv), ("v", n_kv)):
                matrix(f"{blk}.attn_{letter}.weight", n_heads * head, n_embd)
                if architecture == "opt":
                    vector(f"{blk}.attn_{letter}.bias", n_heads * head)
            norm(f"{blk}.ffn_norm")
        matrix(f"{blk}.attn_output.weight", n_embd, n_embd, gain)
        if architecture in GATED:
            matrix(f"{blk}.ffn_gate.weight", n_ff, n_embd, kind=row_type)
        matrix(f"{blk}.ffn_up.weight", n_ff, n_embd, kind=row_type)
        matrix(f"{blk}.ffn_down_t.weight", n_ff, n_embd, 2 * gain, kind=row_type)
        if architecture == "opt":
            vector(f"{blk}.attn_output.bias", n_embd)
            vector(f"{blk}.ffn_up.bias", n_ff)
            vector(f"{blk}.ffn_down_t.bias", n_embd)
    norm("output_norm")
    matrix("output.weight", N_VOCAB, n_embd, 2.0)
    for key in leave_out:
        writer.kv_data[0].pop(key, None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    set_magic(path)
    return model


def evaluate(model: Original, tokens: Sequence[int]) -> Evaluation:
    """The original's rule, in double precision: a neuron counts when fc2(relu(fc1(r))) >= threshold.

    Args:
        model: the model.
        tokens: one sequence from position 0 on.

    Returns:
        What it computes.
    """
    w = model.weights
    n = len(tokens)
    head = model.n_embd // model.n_head

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = w[f"{name}.weight"]
        if f"{name}.bias" in w:
            return torch.nn.functional.layer_norm(x, (model.n_embd,), weight, w[f"{name}.bias"], EPSILON)
        return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        """x (n, heads, head): pairs are neighbours for llama, halves for falcon; OPT doesn't rotate."""
        if model.architecture == "opt":
            return x
        angle = torch.arange(n).double()[:, None] * ROPE_BASE ** (-torch.arange(0, head, 2).double() / head)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        if model.architecture == "falcon":
            a, b = x[..., : head // 2], x[..., head // 2 :]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def attention(x: torch.Tensor, blk: str) -> torch.Tensor:
        if model.architecture == "falcon":
            q, k, v = linear(x, f"{blk}.attn_qkv").split(
                [model.n_head * head, model.n_kv * head, model.n_kv * head], -1
            )
        else:
            q, k, v = (linear(x, f"{blk}.attn_{letter}") for letter in "qkv")
        q = rotated(q.view(n, model.n_head, head))
        k = rotated(k.view(n, model.n_kv, head)).repeat_interleave(model.n_head // model.n_kv, 1)
        v = v.view(n, model.n_kv, head).repeat_interleave(model.n_head // model.n_kv, 1)
        weights = torch.einsum("qhd,khd->hqk", q, k) / head**0.5
        weights = weights.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
        return linear(torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1), f"{blk}.attn_output")

    found = Evaluation(np.empty(0), [], [], [])

    def ffn(x: torch.Tensor, residual: torch.Tensor, blk: str) -> torch.Tensor:
        mask = torch.ones(n, model.n_ff, dtype=torch.bool)
        if f"{blk}.fc1.weight" in w:
            scores = torch.relu(residual @ w[f"{blk}.fc1.weight"].T) @ w[f"{blk}.fc2.weight"].T
            mask = scores >= model.threshold
        a = linear(x, f"{blk}.ffn_up")
        if model.architecture == "bamboo":
            a = torch.relu(linear(x, f"{blk}.ffn_gate")) * torch.relu(a)
        elif model.architecture == "llama":
            a = torch.relu(linear(x, f"{blk}.ffn_gate")) * a
        else:
            a = torch.relu(a)
        found.masks.append(mask.numpy())
        found.residuals.append(residual.numpy())
        found.ffn_inputs.append(x.numpy())
        return (a * mask) @ w[f"{blk}.ffn_down_t.weight"] + w.get(f"{blk}.ffn_down_t.bias", 0.0)

    x = w["token_embd.weight"][torch.as_tensor(list(tokens))]
    if model.architecture == "opt":
        x = x + w["position_embd.weight"][2 : n + 2]
    for i in range(model.n_layer):
        blk = f"blk.{i}"
        first = normed(x, f"{blk}.attn_norm")
        if model.architecture == "falcon":
            x = x + attention(first, blk) + ffn(first, x, blk)
        else:
            x = x + attention(first, blk)
            x = x + ffn(normed(x, f"{blk}.ffn_norm"), x, blk)
    found.logits = linear(normed(x, "output_norm"), "output").numpy()
    return found


def write_activations(folder: Path, counts: Sequence[torch.Tensor]) -> Path:
    """activation_<layer>.pt of every layer."""
    folder.mkdir(exist_ok=True)
    for i, layer in enumerate(counts):
        torch.save(layer, folder / f"activation_{i}.pt")
    return folder


def write_predictors(folder: Path, model: Original, layers: Sequence[int] | None = None) -> Path:
    """model_<layer>.pt with the predictors of a model."""
    folder.mkdir(exist_ok=True)
    for i in range(model.n_layer) if layers is None else layers:
        halves = {name: model.weights[f"blk.{i}.{name}"].float() for name in ("fc1.weight", "fc2.weight")}
        torch.save(halves, folder / f"model_{i}.pt")
    return folder


def write_split(
    path: Path, masks: Sequence[np.ndarray], *, capacity: int | None = 1 << 20, buckets: Sequence[np.ndarray] | None = None,
    kind: type = np.int32,
) -> Path:  # fmt: skip
    """A .gpuidx file.

    Args:
        path: the file.
        masks: per layer (n_ff,) what gpu_idx holds.
        capacity: split.vram_capacity; None: absent.
        buckets: per layer what gpu_bucket holds; None: the ids of the ones, rising.
        kind: numpy type of both.

    Returns:
        The path.
    """
    writer = gguf.GGUFWriter(path, "generic.gpu_index")
    writer.add_block_count(len(masks))
    if capacity is not None:
        writer.add_uint64("split.vram_capacity", capacity)
    for i, mask in enumerate(masks):
        bucket = np.flatnonzero(mask == 1) if buckets is None else buckets[i]
        writer.add_tensor(f"blk.{i}.gpu_idx", mask.astype(kind))
        if len(bucket):
            writer.add_tensor(f"blk.{i}.gpu_bucket", bucket.astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return set_magic(path)
