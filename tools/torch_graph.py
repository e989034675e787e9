"""llama.cpp's graphs in torch, layer by layer, from a GGUF whose rows stay as they are: what distillation runs and differentiates.

Attention, norms and embeddings are constants; the FFN of a layer is the caller's. Tests hold it against llama.cpp's logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from powerinfer_py.errors import FormatError
from powerinfer_py.format import BaseModel

from .row_types import dequantize_rows


@dataclass(frozen=True)
class GraphKind:
    """What sets one architecture's graph apart from llama's.

    Attributes:
        activation: of the FFN, as the plan names it.
        neox: rotary positions turn halves, not neighbours.
        layer_norm: LayerNorm instead of RMSNorm.
        parallel: attention and FFN both read the layer's input.
        positions: a table of positions instead of rotary ones.
        scaled_embeddings: multiplied by the root of n_embd.
    """

    activation: str = "silu"
    neox: bool = False
    layer_norm: bool = False
    parallel: bool = False
    positions: bool = False
    scaled_embeddings: bool = False


KINDS = {
    "llama": GraphKind(),
    "minicpm": GraphKind(),
    "arcee": GraphKind("relu_sqr"),
    "qwen2": GraphKind(neox=True),
    "qwen3": GraphKind(neox=True),
    "nemotron": GraphKind("relu_sqr", neox=True, layer_norm=True),
    "falcon": GraphKind("gelu", neox=True, layer_norm=True, parallel=True),
    "gpt2": GraphKind("gelu", layer_norm=True, positions=True),
    "gemma": GraphKind("gelu", neox=True, scaled_embeddings=True),
}
# Tensors that a graph of KINDS uses; another one would be left out silently.
_TOP = {
    "token_embd.weight",
    "position_embd.weight",
    "output.weight",
    "output_norm.weight",
    "output_norm.bias",
    "rope_freqs.weight",
}
_LAYER = {
    "attn_norm",
    "attn_norm_2",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_qkv",
    "attn_output",
    "attn_q_norm",
    "attn_k_norm",
}
_LAYER |= {"ffn_norm", "ffn_gate", "ffn_up", "ffn_down"}


class Graph:
    """A model's graph without its FFNs.

    Attributes:
        base: where the weights come from.
        kind: its row of KINDS.
        device, dtype: of matrix products; the residual stream is float32.
        n_layer, n_embd, n_vocab: sizes.
        activation: the plan's name of the FFN's.
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        keep: bool = True,
        n_threads: int = 1,
    ) -> None:
        """Reads the architecture's keys; weights are read when they are used.

        Args:
            base: the model.
            device: `cpu` or `cuda`.
            dtype: of matrix products.
            keep: matrices stay in memory as dtype; otherwise they are decoded from the file each time.
            n_threads: that decode rows.

        Raises:
            FormatError: an architecture, or a tensor, that no graph here has.
        """
        self.base = base
        self.device = device
        self.dtype = dtype
        self.keep = keep
        self.n_threads = n_threads
        kind = KINDS.get(base.architecture)
        if kind is None:
            raise FormatError(
                f"{base.where}: architecture '{base.architecture}' has no graph in torch here; expected one of {', '.join(KINDS)}; "
                "use a model of one of them."
            )
        self.kind = kind
        self.activation = kind.activation
        self.n_layer, self.n_embd = base.n_layer, base.n_embd
        self.n_vocab = base.tensor("token_embd.weight").rows_shape[0]
        self.n_head = self._per_layer("attention.head_count")
        self.n_kv = self._per_layer("attention.head_count_kv", self.n_head)
        self.head_dim = int(self._number("attention.key_length", self.n_embd // self.n_head[0]))
        self.eps = float(
            self._number("attention.layer_norm_epsilon" if kind.layer_norm else "attention.layer_norm_rms_epsilon")
        )
        self.embedding_scale = float(self._number("embedding_scale", 1.0)) if base.architecture == "minicpm" else 1.0
        if kind.scaled_embeddings:
            self.embedding_scale = math.sqrt(self.n_embd)
        self.residual_scale = float(self._number("residual_scale", 1.0))
        self.logit_scale = float(self._number("logit_scale", 1.0))
        self._kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._check_tensors()

    # ---- Keys and weights ----

    def _number(self, name: str, default: float | None = None) -> float:
        value = self.base.files[0].get(f"{self.base.architecture}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FormatError(
                f"{self.base.where}: {self.base.architecture}.{name} is {value!r}; expected a number; convert the model again."
            )
        return value

    def _per_layer(self, name: str, default: list[int] | None = None) -> list[int]:
        value = self.base.files[0].get(f"{self.base.architecture}.{name}", default)
        values = value if isinstance(value, list) else [value] * self.n_layer
        if len(values) != self.n_layer or not all(isinstance(n, int) and n > 0 for n in values):
            raise FormatError(
                f"{self.base.where}: {self.base.architecture}.{name} is {value!r}; expected a number of heads above 0 for each of "
                f"{self.n_layer} layers; convert the model again."
            )
        return values

    def _check_tensors(self) -> None:
        for name in self.base.tensors:
            parts = name.split(".")
            known = parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER and parts[3] in ("weight", "bias")
            if not known and name not in _TOP:
                raise FormatError(
                    f"{self.base.where}: tensor {name} has no place in the graph of '{self.base.architecture}' here; expected a plain "
                    "model of that architecture, without experts; use another model."
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
        n_rows, n_values = tensor.rows_shape
        raw = self.base.raw(name).reshape(n_rows, tensor.n_bytes // n_rows)
        rows = dequantize_rows(np.ascontiguousarray(raw), tensor.type.name, n_threads=self.n_threads)
        weight = torch.from_numpy(rows).to(self.device, dtype)
        weight = weight.reshape(n_values) if len(tensor.ne) == 1 else weight
        if self.keep or len(tensor.ne) == 1:
            self._kept[name, dtype] = weight
        return weight

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x (..., n) as dtype times a matrix of the model, plus its bias."""
        return F.linear(x, self.matrix(f"{name}.weight"), self.matrix(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Norm of the residual stream, float32."""
        weight = self.matrix(f"{name}.weight", torch.float32)
        if self.kind.layer_norm and not name.endswith(("_q_norm", "_k_norm")):
            return F.layer_norm(x, (x.shape[-1],), weight, self.matrix(f"{name}.bias", torch.float32), self.eps)
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    # ---- Positions ----

    def _rope(self, n_tok: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (n_tok, n_dims / 2), float32, with YaRN's and llama3's changes of frequencies as llama.cpp has them."""
        if n_tok in self._angles:
            return self._angles[n_tok]
        n_dims = int(self._number("rope.dimension_count", self.head_dim))
        base = float(self._number("rope.freq_base", 10000.0))
        i = torch.arange(0, n_dims, 2, dtype=torch.float64)
        frequency = base ** (-i / n_dims)
        factors = self.matrix("rope_freqs.weight", torch.float32)
        if factors is not None:
            frequency = frequency / factors.cpu().double()
        kind = self.base.files[0].get(f"{self.base.architecture}.rope.scaling.type", "none")
        factor = float(self._number("rope.scaling.factor", 1.0))
        magnitude = 1.0
        if kind == "linear" and factor > 0:
            frequency = frequency / factor
        elif kind == "yarn" and factor > 0:
            n_orig = float(self._number("rope.scaling.original_context_length", self.base.n_ctx_train or 1))

            def dimension(n_rotations: float) -> float:
                return n_dims * math.log(n_orig / (n_rotations * 2 * math.pi)) / (2 * math.log(base))

            fast, slow = (
                float(self._number(f"rope.scaling.yarn_beta_{x}", d)) for x, d in (("fast", 32.0), ("slow", 1.0))
            )
            low, high = max(0.0, math.floor(dimension(fast))), min(n_dims - 1.0, math.ceil(dimension(slow)))
            ramp = 1.0 - ((i / 2 - low) / max(0.001, high - low)).clamp(0.0, 1.0)
            frequency = frequency / factor * (1.0 - ramp) + frequency * ramp
            magnitude = 1.0 + 0.1 * math.log(factor)
        angle = torch.arange(n_tok, dtype=torch.float64)[:, None] * frequency
        self._angles[n_tok] = tuple((magnitude * f(angle)).float().to(self.device) for f in (torch.cos, torch.sin))
        return self._angles[n_tok]

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions of x (n_seq, n_head, n_tok, head_dim)."""
        cos, sin = (part.to(x.dtype) for part in self._rope(x.shape[2]))
        n_dims = 2 * cos.shape[-1]
        turned, rest = x[..., :n_dims], x[..., n_dims:]
        if self.kind.neox:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    # ---- The graph ----

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings: tokens (n_seq, n_tok) int64 -> (n_seq, n_tok, n_embd) float32."""
        if self.keep:
            h = F.embedding(tokens, self.matrix("token_embd.weight")).float()
        else:
            tensor = self.base.tensor("token_embd.weight")
            raw = self.base.raw(tensor.name).reshape(self.n_vocab, -1)[tokens.cpu().numpy().reshape(-1)]
            rows = torch.from_numpy(
                dequantize_rows(np.ascontiguousarray(raw), tensor.type.name, n_threads=self.n_threads)
            )
            h = rows.reshape(*tokens.shape, -1).to(self.device)
        h = h * self.embedding_scale
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
        name = f"blk.{i_layer}."
        normed = self._norm(h, name + "attn_norm")
        x = (self._norm(h, name + "attn_norm_2") if name + "attn_norm_2.weight" in self.base.tensors else normed).to(
            self.dtype
        )
        n_head, n_kv, n_seq, n_tok = self.n_head[i_layer], self.n_kv[i_layer], *h.shape[:2]
        sizes = [n * self.head_dim for n in (n_head, n_kv, n_kv)]
        if name + "attn_qkv.weight" in self.base.tensors:
            parts = self._linear(x, name + "attn_qkv").split(sizes, dim=-1)
        else:
            parts = [self._linear(x, name + f"attn_{letter}") for letter in "qkv"]
        q, k, v = (part.reshape(n_seq, n_tok, -1, self.head_dim).transpose(1, 2) for part in parts)
        if name + "attn_q_norm.weight" in self.base.tensors:
            q, k = (self._norm(t.float(), name + n).to(self.dtype) for t, n in ((q, "attn_q_norm"), (k, "attn_k_norm")))
        if not self.kind.positions:
            q, k = self._rotate(q), self._rotate(k)
        if n_kv != n_head:
            k, v = (t.repeat_interleave(n_head // n_kv, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n_seq, n_tok, -1)
        after = h + self.residual_scale * self._linear(out, name + "attn_output").float()
        ffn_input = normed if self.kind.parallel else self._norm(after, name + "ffn_norm")
        return after, ffn_input.to(self.dtype)

    def add_ffn(self, after: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The layer's output from attend()'s first and the FFN's output y."""
        return after + self.residual_scale * y.float()

    def ffn(self, i_layer: int, x: torch.Tensor) -> torch.Tensor:
        """The model's own FFN: x (..., n_embd) -> the same shape."""
        name = f"blk.{i_layer}.ffn_"
        up = self._linear(x, name + "up")
        gate = self._linear(x, name + "gate") if name + "gate.weight" in self.base.tensors else None
        return self._linear(activate(self.activation, gate, up)[1], name + "down")

    def last_norm(self, h: torch.Tensor) -> torch.Tensor:
        """What the head reads: (..., n_embd) as dtype."""
        return (self._norm(h, "output_norm") * self.logit_factor()).to(self.dtype)

    def logit_factor(self) -> float:
        """What llama.cpp multiplies before the head (MiniCPM)."""
        return 1.0 / self.logit_scale if self.base.architecture == "minicpm" else self.logit_scale

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
