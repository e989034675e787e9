"""The forward pass of a tiny model in float64, straight from its GGUF: an oracle that shares no code with what it checks.

F32 tensors only; `llama`, `gpt2` and `falcon` as tiny_models.py writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

ROPE_BASE = 10000.0
# ffn(i_layer, x, residual) -> y, all (n_sequences, n_tokens, n_embd); x is the normed input, residual what the layer's
# predictor reads in the original PowerInfer.
Ffn = Callable[[int, np.ndarray, np.ndarray], np.ndarray]


def _rope(x: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotates (n_sequences, n_tokens, n_head, head_dim) by position: neighbours, or the halves of a head."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * ROPE_BASE ** (-np.arange(half) / half)  # (n_tokens, half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (a * cos - b * sin, a * sin + b * cos)
    return np.stack(turned, axis=-1).reshape(x.shape) if interleaved else np.concatenate(turned, axis=-1)


class ReferenceModel:
    """A model's tensors as float64, and its forward pass with the FFN given from outside.

    Args:
        path: the GGUF.
    """

    def __init__(self, path: str | Path) -> None:
        reader = gguf.GGUFReader(path)
        self.tensors = {t.name: np.asarray(t.data, np.float64) for t in reader.tensors}
        fields = reader.fields

        def number(name: str) -> float:
            return float(fields[f"{self.arch}.{name}"].contents())

        self.arch = fields["general.architecture"].contents()
        self.n_layer = int(number("block_count"))
        self.n_head = int(number("attention.head_count"))
        self.n_kv = int(number("attention.head_count_kv"))
        self.eps = number(f"attention.layer_norm_{'rms_' if self.arch == 'llama' else ''}epsilon")

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """x (..., n) times a weight's rows, plus its bias where there is one."""
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        if self.arch != "llama":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps)
        return x * self.tensors[f"{name}.weight"] + self.tensors.get(f"{name}.bias", 0.0)

    def _attention(self, block: str, x: np.ndarray) -> np.ndarray:
        n_sequences, n_tokens, _ = x.shape
        if self.arch == "llama":
            parts = [self.linear(f"{block}.attn_{name}", x) for name in "qkv"]
        else:
            joined = self.linear(f"{block}.attn_qkv", x)
            head_dim = joined.shape[-1] // (self.n_head + 2 * self.n_kv)
            parts = np.split(joined, np.cumsum([self.n_head, self.n_kv]) * head_dim, axis=-1)
        q, k, v = (
            part.reshape(n_sequences, n_tokens, n, -1) for part, n in zip(parts, (self.n_head, self.n_kv, self.n_kv))
        )
        if self.arch != "gpt2":
            q, k = (_rope(part, interleaved=self.arch == "llama") for part in (q, k))
        k, v = (np.repeat(part, self.n_head // self.n_kv, axis=2) for part in (k, v))
        scores = np.einsum("sqhd,skhd->shqk", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(n_tokens, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("shqk,skhd->sqhd", weights, v).reshape(n_sequences, n_tokens, -1)
        return self.linear(f"{block}.attn_output", out)

    def relu_ffn(self, i_layer: int, x: np.ndarray, used: np.ndarray) -> np.ndarray:
        """The layer's FFN with ReLU, of some neurons.

        Args:
            i_layer: the layer.
            x: (..., n_embd) normed input.
            used: (..., n_ff) bool, neurons in the base's order; the others give exactly 0.

        Returns:
            (..., n_embd).
        """
        block = f"blk.{i_layer}"
        hidden = self.linear(f"{block}.ffn_up", x)
        if self.arch == "llama":
            hidden = hidden * np.maximum(self.linear(f"{block}.ffn_gate", x), 0.0)
        else:
            hidden = np.maximum(hidden, 0.0)
        return self.linear(f"{block}.ffn_down", np.where(used, hidden, 0.0))

    def logits(self, tokens: np.ndarray, ffn: Ffn, control: np.ndarray | None = None) -> np.ndarray:
        """Evaluates sequences from an empty context.

        Args:
            tokens: (n_sequences, n_tokens) int.
            ffn: computes the FFN of a layer.
            control: (n_layer, n_embd) added to the layers' outputs.

        Returns:
            (n_sequences, n_tokens, n_vocab) float64.
        """
        stream = self.tensors["token_embd.weight"][tokens]
        if self.arch == "gpt2":
            stream = stream + self.tensors["position_embd.weight"][: tokens.shape[1]]
        for i in range(self.n_layer):
            block = f"blk.{i}"
            normed = self._norm(f"{block}.attn_norm", stream)
            attention = self._attention(block, normed)
            if self.arch == "falcon":
                stream = stream + attention + ffn(i, normed, stream)
            else:
                stream = stream + attention
                stream = stream + ffn(i, self._norm(f"{block}.ffn_norm", stream), stream)
            if control is not None:
                stream = stream + control[i]
        return self.linear("output", self._norm("output_norm", stream))
