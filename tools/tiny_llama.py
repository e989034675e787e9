"""A small llama with a gated ReLU, in torch: its parameters carry the names of a Hugging Face checkpoint.

Same arithmetic as transformers' LlamaForCausalLM with hidden_act `relu` and tied embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TinyShape:
    """Sizes of the model; every row length is a multiple of 256, so that any quantization type fits."""

    n_vocab: int = 8192
    n_embd: int = 256
    n_layer: int = 6
    n_ff: int = 1536
    n_head: int = 4
    n_head_kv: int = 2
    n_ctx: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


@dataclass
class TinyOutput:
    """What one pass gives.

    Attributes:
        logits: (n_seq, n_tok, n_vocab).
        pressure: (n_layer,) float32, (mean a)^2 / mean a^2 of a = relu(gate): a smooth measure of density.
        density: (n_layer,) float32, share of a > 0, without gradient.
        active: (n_layer, n_ff) bool, neurons that fired at least once.
    """

    logits: torch.Tensor
    pressure: torch.Tensor
    density: torch.Tensor
    active: torch.Tensor


class Attention(nn.Module):
    """Causal attention with rotary positions (halves rotated, as in transformers) and grouped keys."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.n_head, self.n_head_kv = shape.n_head, shape.n_head_kv
        self.head_dim = shape.n_embd // shape.n_head
        n_kv = self.n_head_kv * self.head_dim
        self.q_proj = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.k_proj = nn.Linear(shape.n_embd, n_kv, bias=False)
        self.v_proj = nn.Linear(shape.n_embd, n_kv, bias=False)
        self.o_proj = nn.Linear(shape.n_embd, shape.n_embd, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x: (n_seq, n_tok, n_embd); cos, sin: (n_tok, head_dim). Returns the shape of x."""
        n_seq, n_tok, n_embd = x.shape
        q = self.q_proj(x).view(n_seq, n_tok, self.n_head, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(n_seq, n_tok, self.n_head_kv, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(n_seq, n_tok, self.n_head_kv, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        n_group = self.n_head // self.n_head_kv
        k, v = k.repeat_interleave(n_group, dim=1), v.repeat_interleave(n_group, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(n_seq, n_tok, n_embd))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: x (..., n_tok, head_dim) with its two halves as the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class GatedRelu(nn.Module):
    """down(relu(gate x) * up x)."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.up_proj = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.down_proj = nn.Linear(shape.n_ff, shape.n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: (n_seq, n_tok, n_embd). Returns the same shape, and the activations (n_seq, n_tok, n_ff)."""
        activation = F.relu(self.gate_proj(x))
        return self.down_proj(activation * self.up_proj(x)), activation


class Layer(nn.Module):
    """One block, norms first."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = GatedRelu(shape)
        self.input_layernorm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)


class Decoder(nn.Module):
    """Embedding, blocks, last norm: what a checkpoint calls `model`."""

    def __init__(self, shape: TinyShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.n_layer))
        self.norm = nn.RMSNorm(shape.n_embd, eps=shape.norm_eps)


class TinyLlama(nn.Module):
    """The whole model; the output layer is the embedding."""

    def __init__(self, shape: TinyShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        head_dim = shape.n_embd // shape.n_head
        angle = torch.arange(shape.n_ctx)[:, None] * shape.rope_theta ** (-torch.arange(0, head_dim, 2) / head_dim)
        self.register_buffer("cos", torch.cat((angle, angle), dim=-1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angle, angle), dim=-1).sin(), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 if name.endswith("embed_tokens.weight") else parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= (2 * shape.n_layer) ** 0.5  # so that the sum over layers has the size of one
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens: torch.Tensor) -> TinyOutput:
        """tokens: (n_seq, n_tok) int64, n_tok <= n_ctx."""
        n_tok = tokens.shape[1]
        cos, sin = self.cos[:n_tok], self.sin[:n_tok]
        hidden = self.model.embed_tokens(tokens)
        pressure, density, active = [], [], []
        for layer in self.model.layers:
            hidden = hidden + layer.self_attn(layer.input_layernorm(hidden), cos, sin)
            out, a = layer.mlp(layer.post_attention_layernorm(hidden))
            hidden = hidden + out
            pressure.append(a.mean(dtype=torch.float32) ** 2 / (a.float().square().mean() + 1e-12))
            fired = a.detach() > 0
            density.append(fired.float().mean())
            active.append(fired.flatten(0, 1).any(dim=0))
        logits = F.linear(self.model.norm(hidden), self.model.embed_tokens.weight)
        return TinyOutput(logits, torch.stack(pressure), torch.stack(density), torch.stack(active))
