"""Tiny models with random weights that stock llama.cpp loads, and plans for them.

Every function is plain: it writes a file and returns its path. The activation belongs to the plan, not to the model.
"""

from __future__ import annotations

import ctypes
import dataclasses
import types
from collections.abc import Sequence
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType

from powerinfer_py import format as pi_format

ARCHITECTURES = ("llama", "gpt2", "falcon", "mpt")
N_CTX_TRAIN = 1024
# A threshold that no score is below: every neuron is a candidate.
ALL_ACTIVE = -1e30


def quantize_rows(values: np.ndarray, row_type: GGMLQuantizationType) -> np.ndarray:
    """Rows of any type that llama.cpp can quantize to without an importance matrix.

    Args:
        values: (..., n) float32.
        row_type: the type; replaced as `derived_row_type` says where n isn't a whole number of its blocks.

    Returns:
        (..., n) float32 or float16, or (..., bytes per row) uint8.
    """
    values = np.ascontiguousarray(values, np.float32)
    if row_type == GGMLQuantizationType.F32:
        return values
    if row_type == GGMLQuantizationType.F16:
        return values.astype(np.float16)
    n = values.shape[-1]
    n_rows = values.size // n
    block, block_bytes = gguf.GGML_QUANT_SIZES[row_type]
    out = np.zeros((*values.shape[:-1], n // block * block_bytes), np.uint8)
    base = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so.0"))
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    n_bytes = base.ggml_quantize_chunk(
        ctypes.c_int(row_type),
        values.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0),
        ctypes.c_int64(n_rows),
        ctypes.c_int64(n),
        None,
    )
    assert n_bytes == out.nbytes
    return out


def _add_vocab(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """A SentencePiece vocabulary: 256 byte tokens, so that any text has tokens, and a few pieces."""
    pieces = ["\u2581", *(chr(c) for c in range(33, 127)), "\u2581a", "\u2581the", "th", "he", "in", "er", "an", "re"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    tokens = (tokens + [f"\u2581w{i}" for i in range(n_vocab)])[:n_vocab]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(n_vocab - 259)])
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (n_vocab - len(kinds)))
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


def stand_in_tokenizer() -> types.ModuleType:
    """A module in hf_tokenizer's place, for checkpoints that have no tokenizer of their own."""
    module = types.ModuleType("powerinfer_py.tools.hf_tokenizer")
    module.add_tokenizer = lambda writer, folder, config, note: _add_vocab(writer, config["vocab_size"])
    module.check_tokenizer = lambda gguf_path, folder: None
    return module


def write_tiny_model(
    path: str | Path,
    arch: str = "llama",
    *,
    n_layer: int = 4,
    n_embd: int = 64,
    n_ff: int = 256,
    n_head: int = 2,
    n_kv: int | None = None,
    head_dim: int | None = None,
    row_type: str = "F32",
    n_vocab: int = 384,
    seed: int = 0,
    tied: bool = False,
    bias: bool = False,
    up_bias: float | None = None,
    n_expert: int = 0,
    split_max_tensors: int = 0,
    gate_ranks: tuple[int, ...] = (),
) -> Path:
    """Writes a model whose logits are of the order of 1.

    Args:
        path: the file; with split_max_tensors the name that the parts' names are made from.
        arch: `llama` (gated, RMSNorm, RoPE), `gpt2` (ungated, biases, learned positions), `falcon` (ungated,
            attention beside the FFN, multi-query), `mpt` (ungated, ALiBi), `olmo2` (gated, norms behind both parts).
        n_layer: layers.
        n_embd: width; with n_head 2, any multiple of 4 works.
        n_ff: neurons per layer.
        n_head: attention heads.
        n_kv: key/value heads; None: 1 for falcon, n_head otherwise.
        head_dim: values per head; None: n_embd / n_head.
        row_type: type of the FFN's rows, as the gguf package names it, e.g. `Q4_0`; all else is F32.
        n_vocab: tokens, at least 259.
        seed: of the weights.
        tied: no output matrix of its own.
        bias: biases in the llama FFN (gpt2 always has them).
        up_bias: one value for all biases of up; None: random.
        n_expert: experts, 2 of them used; 0: a dense FFN (llama only).
        split_max_tensors: tensors per file; 0: one file.
        gate_ranks: rank of each layer's gate; empty: full.

    Returns:
        The path, or that of the first part.
    """
    path = Path(path)
    rng = np.random.default_rng(seed)
    n_kv = n_kv or (1 if arch == "falcon" else n_head)
    head_dim = head_dim or n_embd // n_head
    ffn_type = GGMLQuantizationType[row_type]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
    writer.add_name(f"tiny {arch}")
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_kv)
    gated = arch in ("llama", "olmo2")
    if gated:
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(head_dim)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    else:
        writer.add_layer_norm_eps(1e-5)
    if arch == "mpt":
        writer.add_max_alibi_bias(8.0)
    if n_expert:
        writer.add_expert_count(n_expert)
        writer.add_expert_used_count(2)
    _add_vocab(writer, n_vocab)

    def matrix(
        name: str, *shape: int, gain: float = 1.0, kind: GGMLQuantizationType = GGMLQuantizationType.F32, rank: int = 0
    ) -> None:
        values = rng.standard_normal(shape, np.float32) * np.float32(gain / np.sqrt(shape[-1]))
        if rank:
            values = values[:, :rank] @ rng.standard_normal((rank, shape[-1]), np.float32) / np.float32(np.sqrt(rank))
        kind = pi_format.derived_row_type(kind, shape[-1])
        writer.add_tensor(name, quantize_rows(values, kind), raw_dtype=kind)

    def vector(name: str, n: int, mean: float = 0.0, spread: float = 0.1) -> None:
        writer.add_tensor(name, (mean + spread * rng.standard_normal(n)).astype(np.float32))

    def norm(name: str) -> None:
        vector(f"{name}.weight", n_embd, mean=1.0)
        if arch in ("gpt2", "falcon"):
            vector(f"{name}.bias", n_embd)

    with_bias = arch == "gpt2" or bias
    residual_gain = 1.0 / np.sqrt(2 * n_layer)
    # tied embeddings are the output matrix too: its gain keeps the logits small
    matrix("token_embd.weight", n_vocab, n_embd, gain=2.0 if tied else np.sqrt(n_embd))
    if arch == "gpt2":
        matrix("position_embd.weight", N_CTX_TRAIN, n_embd)
    for i in range(n_layer):
        blk = f"blk.{i}"
        if arch != "olmo2":
            norm(f"{blk}.attn_norm")
        n_q, n_kv_out = n_head * head_dim, n_kv * head_dim
        if gated:
            matrix(f"{blk}.attn_q.weight", n_q, n_embd)
            matrix(f"{blk}.attn_k.weight", n_kv_out, n_embd)
            matrix(f"{blk}.attn_v.weight", n_kv_out, n_embd)
        else:
            matrix(f"{blk}.attn_qkv.weight", n_q + 2 * n_kv_out, n_embd)
            if arch == "gpt2":
                vector(f"{blk}.attn_qkv.bias", n_q + 2 * n_kv_out)
        matrix(f"{blk}.attn_output.weight", n_embd, n_q, gain=residual_gain)
        if arch == "gpt2":
            vector(f"{blk}.attn_output.bias", n_embd, spread=0.02)
        if arch == "olmo2":
            for name in ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"):
                norm(f"{blk}.{name}")
        elif arch != "falcon":
            norm(f"{blk}.ffn_norm")
        if n_expert:
            matrix(f"{blk}.ffn_gate_inp.weight", n_expert, n_embd)
            matrix(f"{blk}.ffn_gate_exps.weight", n_expert, n_ff, n_embd, kind=ffn_type)
            matrix(f"{blk}.ffn_up_exps.weight", n_expert, n_ff, n_embd, kind=ffn_type)
            matrix(f"{blk}.ffn_down_exps.weight", n_expert, n_embd, n_ff, gain=residual_gain, kind=ffn_type)
            continue
        if gated:
            rank = gate_ranks[i] if gate_ranks else 0
            matrix(f"{blk}.ffn_gate.weight", n_ff, n_embd, kind=ffn_type, rank=rank)
        matrix(f"{blk}.ffn_up.weight", n_ff, n_embd, kind=ffn_type)
        matrix(f"{blk}.ffn_down.weight", n_embd, n_ff, gain=2 * residual_gain, kind=ffn_type)
        if with_bias:
            if gated:
                vector(f"{blk}.ffn_gate.bias", n_ff)
            vector(f"{blk}.ffn_up.bias", n_ff, mean=up_bias or 0.0, spread=0.1 if up_bias is None else 0.0)
            vector(f"{blk}.ffn_down.bias", n_embd, spread=0.02)
    norm("output_norm")
    if not tied:
        matrix("output.weight", n_vocab, n_embd, gain=2.0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    n_parts = len(writer.tensors)
    writer.close()
    return path if n_parts == 1 else path.with_name(f"{path.stem}-00001-of-{n_parts:05d}.gguf")


def _predictor(
    kind: str, rows: np.ndarray, rank: int, rng: np.random.Generator, row_type: GGMLQuantizationType
) -> tuple[pi_format.Rows, pi_format.Rows]:
    """(fc1, fc2) for rows (n_ff, n_embd): the best `linear` one of that rank, or a random `mlp`."""
    n_ff, n_embd = rows.shape
    if kind == "linear":
        u, s, vt = np.linalg.svd(rows, full_matrices=False)
        fc1, fc2 = vt[:rank], u[:, :rank] * s[:rank]
    else:
        fc1 = rng.standard_normal((rank, n_embd)) / np.sqrt(n_embd)
        fc2 = rng.standard_normal((n_ff, rank)) / np.sqrt(rank)
    return pi_format.Rows.of(fc1.astype(np.float32), row_type), pi_format.Rows.of(fc2.astype(np.float32), row_type)


def write_tiny_plan(
    model: str | Path,
    out: str | Path | None = None,
    *,
    activation: str = "silu",
    order_seed: int | None = None,
    frequency: bool = False,
    predictor: str = "none",
    predictor_layers: range | list[int] | None = None,
    predictor_threshold: float | Sequence[float] = ALL_ACTIVE,
    predictor_row_type: str = "F32",
    predictor_input: str = "ffn_input",
    candidate_density: float = 0.0,
    rank: int = 16,
    threshold: float = 0.0,
    product_threshold: float = 0.0,
    activation_param: float = 0.0,
    loss: float | None = None,
    ffn_down_t: str | None = None,
    embedded: bool = False,
) -> Path:
    """Writes a plan for a model.

    Args:
        model: a stock GGUF.
        out: the file; None: the sidecar beside the model.
        activation: what the plan says the FFN computes.
        order_seed: of a random neuron order; None: identity.
        frequency: whether random frequencies are stored, hot first.
        predictor: `none`, `linear` (the best one of the rank; exact at rank n_embd) or `mlp` (random weights).
        predictor_layers: layers that have it; None: all.
        predictor_threshold: a neuron is skipped when its score is below, one value or one per layer; the default skips none.
        predictor_row_type: type of its rows.
        predictor_input: `ffn_input` or `residual`.
        candidate_density: what the plan says that was measured; 0: unknown.
        rank: its rank.
        threshold: on |act(gate)|.
        product_threshold: on |act(gate) * up| * norm(down row).
        activation_param: FATReLU's cut.
        loss: what the plan says that calibration measured.
        ffn_down_t: type of a stored neuron-major down projection; None: derived at load.
        embedded: whether the file carries the model.

    Returns:
        The path written.
    """
    model = Path(model)
    out = Path(out) if out else model.with_name(model.name.removesuffix(".gguf") + pi_format.SIDECAR_SUFFIX)
    rng = np.random.default_rng(order_seed or 0)
    base = pi_format.BaseModel(model)
    bare = pi_format.bare_plan(model, activation)
    thresholds = np.broadcast_to(predictor_threshold, len(bare.layers)).tolist()
    layers = []
    for i, layer in enumerate(bare.layers):
        fields: dict = {}
        if layer.n_ff:
            order = np.arange(layer.n_ff) if order_seed is None else rng.permutation(layer.n_ff)
            fields["neuron_order"] = None if order_seed is None else order
            fields["neuron_frequency"] = np.sort(rng.random(layer.n_ff))[::-1] if frequency else None
            if predictor != "none" and (predictor_layers is None or i in predictor_layers):
                rows = base.rows_f32(base.ffn(i)["gate" if bare.gated else "up"].name)[order]
                kind = GGMLQuantizationType[predictor_row_type]
                fields["fc1"], fields["fc2"] = _predictor(predictor, rows, min(rank, bare.n_embd), rng, kind)
                fields["predictor"] = predictor
                fields["predictor_threshold"] = thresholds[i]
                fields["predictor_candidate_density"] = candidate_density
            if ffn_down_t is not None:
                down_t = np.ascontiguousarray(base.rows_f32(base.ffn(i)["down"].name).T[order])
                fields["ffn_down_t"] = pi_format.Rows.of(down_t, GGMLQuantizationType[ffn_down_t])
            fields["threshold"] = threshold
            fields["product_threshold"] = product_threshold
            fields["activation_param"] = activation_param
        layers.append(dataclasses.replace(layer, **fields))
    plan = dataclasses.replace(bare, layers=tuple(layers), loss=loss, predictor_input=predictor_input)
    return pi_format.write_plan(plan, out, base_embedded=model if embedded else None)
