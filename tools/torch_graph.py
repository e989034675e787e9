"""llama.cpp's graphs in torch, layer by layer, from a GGUF whose rows stay as they are: what distillation runs and differentiates.

Attention, norms and embeddings are constants; the FFN of a layer is the caller's. Tests hold it against llama.cpp's logits.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn import functional as F

from powerinfer_py.errors import FormatError
from powerinfer_py.format import ARCHITECTURE_ACTIVATIONS, BaseModel

from .architectures import YARN_BETAS
from .row_types import dequantize_rows


@dataclass(frozen=True)
class GraphKind:
    """What sets one architecture's graph apart from llama's. Source: llama.cpp, src/models (libllama 0.5.0).

    Attributes:
        neox: rotary positions turn halves, not neighbours.
        layer_norm: LayerNorm instead of RMSNorm.
        parallel: attention and FFN both read the layer's input.
        positions: a table of positions instead of rotary ones.
        scaled_embeddings: multiplied by the root of n_embd.
        head_norms: queries and keys are normed, head by head.
        scales: embeddings, residuals and logits have factors.
    """

    neox: bool = False
    layer_norm: bool = False
    parallel: bool = False
    positions: bool = False
    scaled_embeddings: bool = False
    head_norms: bool = False
    scales: bool = False


KINDS = {
    "llama": GraphKind(),
    "minicpm": GraphKind(scales=True),
    "arcee": GraphKind(),
    "qwen2": GraphKind(neox=True),
    "qwen3": GraphKind(neox=True, head_norms=True),
    "nemotron": GraphKind(neox=True, layer_norm=True),
    "falcon": GraphKind(neox=True, layer_norm=True, parallel=True),
    "gpt2": GraphKind(layer_norm=True, positions=True),
    "gemma": GraphKind(neox=True, scaled_embeddings=True),
    "deci": GraphKind(),  # llama with an n_ff of each layer
}


class Graph:
    """A model's graph without its FFNs.

    Attributes:
        base: where the weights come from.
        kind: its row of KINDS.
        device, dtype: of matrix products; the residual stream is float32.
        n_layer, n_embd, n_vocab: sizes.
        n_head, n_kv: heads of queries and of keys, per layer.
        head_dim: values per head.
        activation: the plan's name of that which upstream's graph has.
        residual_scale: what attention's and the FFN's output are multiplied by.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        keep: bool = True,
        compiled: bool = False,
        n_threads: int = 1,
    ) -> None:
        """Reads and checks the architecture's keys and tensors; weights are read when they are used.

        Args:
            base: the model.
            device: `cpu` or `cuda`.
            dtype: of matrix products.
            keep: matrices stay in memory as dtype; otherwise they are decoded from the file each time.
            compiled: blocks are compiled by torch: twice as fast, after a minute; needs a C++ compiler.
            n_threads: that decode rows.

        Raises:
            FormatError: an architecture, a key or a tensor that no graph here has, or one that is missing.
        """
        kind = KINDS.get(base.architecture)
        if kind is None:
            raise FormatError(
                f"{base.where}: architecture '{base.architecture}' has no graph in torch here; expected one of {', '.join(KINDS)}; "
                "use a model of one of them."
            )
        self.base = base
        self.kind = kind
        self.device = device
        self.dtype = dtype
        self.keep = keep
        self.compiled = compiled
        self.n_threads = n_threads
        self.activation = ARCHITECTURE_ACTIVATIONS[base.architecture]
        self.n_layer, self.n_embd = base.n_layer, base.n_embd
        self.n_head = self._heads("attention.head_count")
        self.n_kv = self._heads("attention.head_count_kv", self.n_head)
        self.head_dim = int(self._number("attention.key_length", self.n_embd // self.n_head[0]))
        self.eps = self._number(
            "attention.layer_norm_epsilon" if kind.layer_norm else "attention.layer_norm_rms_epsilon"
        )
        self.embedding_scale = math.sqrt(self.n_embd) if kind.scaled_embeddings else 1.0
        self.residual_scale = self._logit_factor = 1.0
        if kind.scales:
            self.embedding_scale = self._number("embedding_scale", 12.0)
            self.residual_scale = self._number("residual_scale", 1.4 / math.sqrt(self.n_layer))
            self._logit_factor = 1.0 / self._number("logit_scale", 256.0 / self.n_embd)
        self._kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._check_tensors()
        self.n_vocab = base.tensor("token_embd.weight").rows_shape[0]
        # equal ones are one object: torch compiles for each object anew
        kinds = {
            heads: _Block(kind, *heads, self.head_dim, self.eps, self.residual_scale, dtype)
            for heads in zip(self.n_head, self.n_kv)
        }
        self._blocks = [kinds[heads] for heads in zip(self.n_head, self.n_kv)]
        self._layer_names = [
            [name for name in base.tensors if re.match(rf"blk\.{i}\.(attn_|ffn_norm)", name)]
            for i in range(self.n_layer)
        ]
        if not kind.positions:
            self._frequency, self._magnitude = self._rope_frequency()

    # ---- Keys and weights ----

    def _wrong(self, name: str, expected: str) -> NoReturn:
        key = f"{self.base.architecture}.{name}"
        found = f"is {str(self.base.files[0].get(key))[:80]!a}" if key in self.base.files[0].values else "is missing"
        raise FormatError(f"{self.base.where}: {key} {found}; expected {expected}; convert the model again.")

    def _number(self, name: str, default: float | None = None) -> float:
        value = self.base.files[0].get(f"{self.base.architecture}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self._wrong(name, "a number above 0")
        return float(value)

    def _heads(self, name: str, default: list[int] | None = None) -> list[int]:
        value = self.base.files[0].get(f"{self.base.architecture}.{name}", default)
        values = value if isinstance(value, list) else [value] * self.n_layer
        if len(values) != self.n_layer or not all(type(n) is int and n > 0 for n in values):
            self._wrong(name, f"a number of heads above 0 for each of {self.n_layer} layers")
        return values

    def _check_tensors(self) -> None:
        """Refuses a tensor that is missing, of another shape than the keys say, or without a place."""
        base, n_embd = self.base, self.n_embd
        wished = {"token_embd": (0, n_embd), "output_norm": (1, n_embd)}  # (rows, values per row); 0: any number
        if self.kind.positions:
            wished["position_embd"] = (0, n_embd)
        others = {"output", "rope_freqs"}
        for i, (n_head, n_kv) in enumerate(zip(self.n_head, self.n_kv)):
            if n_head % n_kv:
                self._wrong("attention.head_count_kv", f"numbers that divide {n_head}")
            n_q, n_k = n_head * self.head_dim, n_kv * self.head_dim
            layer = {"attn_norm": (1, n_embd), "attn_output": (n_embd, n_q)}
            if f"blk.{i}.attn_qkv.weight" in base.tensors:
                layer["attn_qkv"] = (n_q + 2 * n_k, n_embd)
            else:
                layer |= {"attn_q": (n_q, n_embd), "attn_k": (n_k, n_embd), "attn_v": (n_k, n_embd)}
            if self.kind.head_norms:
                layer |= {"attn_q_norm": (1, self.head_dim), "attn_k_norm": (1, self.head_dim)}
            if self.kind.parallel:
                others.add(f"blk.{i}.attn_norm_2")
            else:
                layer["ffn_norm"] = (1, n_embd)
            wished |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
            others |= {f"blk.{i}.ffn_{name}" for name in ("gate", "up", "down")}
            reason = base.why_not_covered(i)
            if reason:
                raise FormatError(
                    f"{base.where}: layer {i} has no plain FFN: {reason}; expected up, down and maybe gate; use another model."
                )
        for name, shape in wished.items():
            tensor = base.tensor(f"{name}.weight")
            found = None if tensor is None else tensor.rows_shape
            if found is None or found != (shape[0] or found[0], shape[1]):
                raise FormatError(
                    f"{base.where}: {name}.weight {'is missing' if found is None else f'has shape {list(found)}'}; expected "
                    f"[{shape[0] or 'tokens'}, {shape[1]}], as the keys say; convert the model again."
                )
        known = {f"{name}.{what}" for name in (*wished, *others) for what in ("weight", "bias")} - {"output.bias"}
        for name in base.tensors:
            if name not in known:
                raise FormatError(
                    f"{base.where}: tensor {name[:80]!a} has no place in the graph of '{base.architecture}' here; expected a "
                    "plain model of that architecture; use another one."
                )

    def matrix(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """A weight.

        Args:
            name: in the GGUF.
            dtype: None: that of matrix products.

        Returns:
            (rows, values per row), or (values,) of a vector, on the device; None when the model doesn't have it.
        """
        dtype = dtype or self.dtype
        kept = self._kept.get((name, dtype))
        if kept is not None:
            return kept
        tensor = self.base.tensor(name)
        if tensor is None:
            return None
        weight = self._decode(name, slice(None))
        if len(tensor.ne) == 1:
            weight = weight.reshape(-1)
        weight = self._in_halves(name, weight).to(self.device, dtype)
        if self.keep or len(tensor.ne) == 1:
            self._kept[name, dtype] = weight
        return weight

    def _in_halves(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Rows of queries and keys so that halves turn instead of neighbours: contiguous values are faster, products the same."""
        if self.kind.neox or self.kind.positions or (".attn_q." not in name and ".attn_k." not in name):
            return weight
        n_dims = 2 * len(self._frequency)
        heads = weight.reshape(-1, self.head_dim, *weight.shape[1:])
        return torch.cat((heads[:, 0:n_dims:2], heads[:, 1:n_dims:2], heads[:, n_dims:]), dim=1).reshape(weight.shape)

    def _layer(self, i_layer: int) -> dict[str, torch.Tensor]:
        """Weights of a layer up to its FFN, by their names in it; norms in float32."""
        found = {}
        for name in self._layer_names[i_layer]:
            short = name.split(".", 2)[2]
            found[short] = self.matrix(name, torch.float32 if "norm" in short else self.dtype)
        return found

    def _decode(self, name: str, rows: slice | np.ndarray) -> torch.Tensor:
        """Rows of a matrix of the file: (rows, values per row) float32 on the CPU."""
        tensor = self.base.tensor(name)
        raw = self.base.raw(name).reshape(tensor.rows_shape[0], -1)[rows]
        return torch.from_numpy(dequantize_rows(np.ascontiguousarray(raw), tensor.type.name, n_threads=self.n_threads))

    # ---- Positions ----

    def _rope_frequency(self) -> tuple[torch.Tensor, float]:
        """Frequencies (n_dims / 2,) float64 and what cos and sin are multiplied by, as llama.cpp has them."""
        n_dims = int(self._number("rope.dimension_count", self.head_dim))
        if n_dims % 2 or n_dims > self.head_dim:
            self._wrong("rope.dimension_count", f"an even number up to {self.head_dim}")
        base = self._number("rope.freq_base", 10000.0)
        if base <= 1.0:
            self._wrong("rope.freq_base", "a number above 1")
        i = torch.arange(n_dims // 2, dtype=torch.float64)
        frequency = base ** (-2 * i / n_dims)
        factors = self.matrix("rope_freqs.weight", torch.float32)
        if factors is not None:
            if factors.shape != frequency.shape:
                self._wrong("rope.dimension_count", f"{2 * factors.numel()}, twice the values of rope_freqs.weight")
            frequency = frequency / factors.cpu().double()
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        magnitude = self._number("rope.scaling.attn_factor", 1.0)
        scaling = self.base.files[0].get(f"{self.base.architecture}.rope.scaling.type", "linear")
        if scaling == "linear":
            frequency = frequency / factor
        elif scaling == "yarn":
            n_orig = self._number("rope.scaling.original_context_length", self._number("context_length"))
            # pairs that turn n times in the context before
            fast, slow = (
                n_dims * math.log(n_orig / (n * 2 * math.pi)) / (2 * math.log(base)) for n in YARN_BETAS.values()
            )
            low, high = max(0, math.floor(fast)), min(n_dims - 1, math.ceil(slow))
            kept = 1.0 - ((i - low) / max(0.001, high - low)).clamp(0.0, 1.0)
            frequency = frequency / factor * (1.0 - kept) + frequency * kept
            magnitude *= max(1.0, 1.0 + 0.1 * math.log(factor))
        elif scaling != "none":
            self._wrong("rope.scaling.type", "none, linear or yarn")
        return frequency, magnitude

    def _rope(self, n_tok: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (n_tok, n_dims / 2) as dtype."""
        if n_tok not in self._angles:
            angle = torch.arange(n_tok, dtype=torch.float64)[:, None] * self._frequency
            self._angles[n_tok] = tuple(
                (self._magnitude * part).to(self.device, self.dtype) for part in (angle.cos(), angle.sin())
            )
        return self._angles[n_tok]

    # ---- The graph ----

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings: tokens (n_seq, n_tok) int64 -> (n_seq, n_tok, n_embd) float32."""
        if self.keep:
            h = F.embedding(tokens, self.matrix("token_embd.weight"))
        else:
            rows = self._decode("token_embd.weight", tokens.cpu().numpy().reshape(-1))
            h = rows.reshape(*tokens.shape, -1).to(self.device, self.dtype)
        h = h.float() * self.embedding_scale
        if self.kind.positions:
            h = h + self.matrix("position_embd.weight", torch.float32)[: tokens.shape[1]]
        return h

    def attend(self, i_layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer up to its FFN.

        Args:
            i_layer: the layer.
            h: (n_seq, n_tok, n_embd) float32, its input.

        Returns:
            What the FFN's output is added to, and what the FFN reads, both of h's shape in float32 and dtype.
        """
        angles = None if self.kind.positions else self._rope(h.shape[1])
        return compiled(_attend, self.compiled)(self._blocks[i_layer], self._layer(i_layer), h, angles)

    def add_ffn(self, after: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The layer's output from attend()'s first and the FFN's output y."""
        return compiled(_add, self.compiled)(after, y, self.residual_scale)

    def ffn(self, i_layer: int, x: torch.Tensor) -> torch.Tensor:
        """The model's own FFN: x (..., n_embd) -> the same shape."""
        return compiled(_ffn, self.compiled)(self.activation, self._ffn_weights(i_layer), x)

    def products(self, i_layer: int, x: torch.Tensor) -> torch.Tensor:
        """What the model's own FFN multiplies down with: x (..., n_embd) -> (..., n_ff)."""
        return compiled(_products, self.compiled)(self.activation, self._ffn_weights(i_layer), x)

    def down(self, i_layer: int, products: torch.Tensor) -> torch.Tensor:
        """The FFN's output: products (..., n_ff) -> (..., n_embd)."""
        return _linear(self._ffn_weights(i_layer), products, "ffn_down")

    def _ffn_weights(self, i_layer: int) -> dict[str, torch.Tensor]:
        """Weights of a layer's FFN, by their names in it."""
        names = [
            name for name in self.base.tensors if name.startswith(f"blk.{i_layer}.ffn_") and ".ffn_norm." not in name
        ]
        return {name.split(".", 2)[2]: self.matrix(name) for name in names}

    def last_norm(self, h: torch.Tensor) -> torch.Tensor:
        """What the head reads, with all factors of the logits: (..., n_embd) as dtype."""
        names = ("output_norm.weight", "output_norm.bias")
        weights = {name: self.matrix(name, torch.float32) for name in names if name in self.base.tensors}
        return (_norm(self._blocks[0], weights, h, "output_norm") * self._logit_factor).to(self.dtype)

    def head(self) -> torch.Tensor:
        """(n_vocab, n_embd): the output matrix, or the embeddings."""
        return self.matrix("output.weight" if "output.weight" in self.base.tensors else "token_embd.weight")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The whole model: tokens (n_seq, n_tok) int64 -> logits (n_seq, n_tok, n_vocab)."""
        h = self.embed(tokens)
        for i in range(self.n_layer):
            after, x = self.attend(i, h)
            h = self.add_ffn(after, self.ffn(i, x))
        return F.linear(self.last_norm(h), self.head())


# ---- Blocks: functions of tensors alone, so that torch can compile them -------------------------------------------


@dataclass(frozen=True)
class _Block:
    """What a layer's attention needs to know beside its weights."""

    kind: GraphKind
    n_head: int
    n_kv: int
    head_dim: int
    eps: float
    residual_scale: float
    dtype: torch.dtype


@functools.cache
def compiled(function: Callable[..., Any], wished: bool) -> Callable[..., Any]:
    """A function of tensors, compiled by torch if that is wished."""
    return torch.compile(function) if wished else function


def _linear(weights: Mapping[str, torch.Tensor], x: torch.Tensor, name: str) -> torch.Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _norm(block: _Block, weights: Mapping[str, torch.Tensor], x: torch.Tensor, name: str) -> torch.Tensor:
    """Norm of float32 values."""
    weight = weights[f"{name}.weight"]
    if block.kind.layer_norm:
        return F.layer_norm(x, (x.shape[-1],), weight, weights.get(f"{name}.bias"), block.eps)
    return F.rms_norm(x, (x.shape[-1],), weight, block.eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x (n_seq, n_head, n_tok, head_dim); cos, sin: (n_tok, n_dims / 2)."""
    n_dims = 2 * cos.shape[-1]
    turned, rest = x[..., :n_dims], x[..., n_dims:]
    a, b = turned.chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _attend(
    block: _Block,
    weights: Mapping[str, torch.Tensor],
    h: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Graph.attend, of one layer's weights by their names in it."""
    normed = _norm(block, weights, h, "attn_norm")
    x = (_norm(block, weights, h, "attn_norm_2") if "attn_norm_2.weight" in weights else normed).to(block.dtype)
    n_seq, n_tok = h.shape[:2]
    if "attn_qkv.weight" in weights:
        sizes = [n * block.head_dim for n in (block.n_head, block.n_kv, block.n_kv)]
        parts = _linear(weights, x, "attn_qkv").split(sizes, dim=-1)
    else:
        parts = [_linear(weights, x, f"attn_{letter}") for letter in "qkv"]
    q, k, v = (part.reshape(n_seq, n_tok, -1, block.head_dim).transpose(1, 2) for part in parts)
    if block.kind.head_norms:
        q, k = (
            _norm(block, weights, t.float(), n).to(block.dtype) for t, n in ((q, "attn_q_norm"), (k, "attn_k_norm"))
        )
    if angles is not None:
        q, k = _rotate(q, *angles), _rotate(k, *angles)
    if block.n_kv != block.n_head:
        k, v = (t.repeat_interleave(block.n_head // block.n_kv, dim=1) for t in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n_seq, n_tok, -1)
    after = h + block.residual_scale * _linear(weights, out, "attn_output").float()
    ffn_input = normed if block.kind.parallel else _norm(block, weights, after, "ffn_norm")
    return after, ffn_input.to(block.dtype)


def _add(after: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return after + scale * y.float()


def _ffn(activation: str, weights: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Graph.ffn, of one layer's weights by their names in it."""
    return _linear(weights, _products(activation, weights, x), "ffn_down")


def _products(activation: str, weights: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Graph.products, of one layer's weights by their names in it."""
    gate = _linear(weights, x, "ffn_gate") if "ffn_gate.weight" in weights else None
    return activate(activation, gate, _linear(weights, x, "ffn_up"))[1]


def activate(activation: str, gate: torch.Tensor | None, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The middle of an FFN.

    Args:
        activation: as the plan names it.
        gate: (..., n_ff); None: ungated, the activation acts on up.
        up: (..., n_ff).

    Returns:
        What must be zero for a neuron to be inactive, and what down is multiplied with, both (..., n_ff).
    """
    source = up if gate is None else gate
    if activation == "silu":
        a = F.silu(source)
    elif activation == "gelu":
        a = F.gelu(source, approximate="tanh")
    else:
        a = F.relu(source)
    if activation == "drelu" and gate is not None:
        a = a * F.relu(up)
        return a, a
    product = a.square() if activation == "relu_sqr" else a
    return a, product if gate is None else product * up
