"""Tiny random checkpoints of every family, with transformers' own class as the oracle of their logits.

Where transformers has no class (Bamboo, ProSparse, MiniCPM) the nearest one is changed to compute what the original does.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

N_VOCAB = 384
N_LAYER = 2
N_EMBD = 64
CUT = 0.1  # of FATReLU, large enough to matter
SCALES = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 16}  # MiniCPM

torch.set_num_threads(2)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@dataclass
class Oracle:
    """A model and what its config.json says.

    Attributes:
        model: transformers' class, changed where it must be.
        activation: what the plan should say.
        config: keys to set in the config.json that save_pretrained writes.
        extra: tensors that the class doesn't have.
    """

    model: Any
    activation: str
    config: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """(n_tokens, n_vocab) float32."""
        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0].float().numpy()

    def save(self, folder: Path, *, kind: str = "safetensors", shard: str = "100KB") -> Path:
        """Writes the checkpoint.

        Args:
            folder: where to.
            kind: `safetensors` in shards, `single`, `bin` or `bin-shards`.
            shard: size of a shard.
        """
        if kind == "safetensors" and not self.extra:
            self.model.save_pretrained(folder, max_shard_size=shard)
        else:
            self.model.config.architectures = [type(self.model).__name__]
            self.model.config.save_pretrained(folder)
            # the embeddings are the head too: shared tensors are stored once
            tied = self.model.config.tie_word_embeddings
            tensors = {
                name: tensor.clone()
                for name, tensor in {**self.model.state_dict(), **self.extra}.items()
                if not (tied and name == "lm_head.weight")
            }
            if kind == "bin":
                torch.save(tensors, folder / "pytorch_model.bin")
            elif kind == "bin-shards":
                names = list(tensors)
                parts = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
                for file, part in parts.items():
                    torch.save({name: tensors[name] for name in part}, folder / file)
                weight_map = {name: file for file, part in parts.items() for name in part}
                (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
            else:
                save_file(tensors, folder / "model.safetensors")
        change_config(folder, **self.config)
        return folder


def change_config(folder: Path, **values: Any) -> None:
    """Sets keys of config.json; `...` takes a key away."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def _randomize(model: Any, seed: int) -> Any:
    """Weights whose logits are of the order of 1, and norms and biases that matter."""
    generator = torch.Generator().manual_seed(seed)
    one_more = model.config.model_type in ("nemotron", "gemma")
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() == 2:
                value.copy_(noise * (1.5 if "embed" in name else 1.0) / value.shape[1] ** 0.5)
            elif name.endswith("weight"):
                value.copy_((0.0 if one_more else 1.0) + 0.2 * noise)
            else:
                value.copy_(0.1 * noise)
    return model.eval()


def _model(kind: str, seed: int, **config: Any) -> Any:
    values = {
        "vocab_size": N_VOCAB,
        "hidden_size": N_EMBD,
        "num_hidden_layers": N_LAYER,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        **config,
    }
    torch.manual_seed(seed)
    transformer_config = getattr(transformers, f"{kind}Config")(**values)
    return _randomize(getattr(transformers, f"{kind}ForCausalLM")(transformer_config), seed)


def _plain(kind: str, wished: str, seed: int = 0, **config: Any) -> Oracle:
    return Oracle(_model(kind, seed, **config), wished)


def _gated(kind: str, wished: str, hidden_act: str, **config: Any) -> Oracle:
    return _plain(
        kind, wished, **{"intermediate_size": 100, "num_key_value_heads": 2, "hidden_act": hidden_act, **config}
    )


def _with_mlp(oracle: Oracle, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> Oracle:
    for layer in oracle.model.model.layers:
        layer.mlp.forward = functools.partial(forward, layer.mlp)
    return oracle


def _fat_relu(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    gate = mlp.gate_proj(x)
    return mlp.down_proj(torch.where(gate >= CUT, gate, 0.0) * mlp.up_proj(x))


def _double_relu(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(mlp.gate_proj(x).relu() * mlp.up_proj(x).relu())


def prosparse(**config: Any) -> Oracle:
    oracle = _with_mlp(_gated("Llama", "relu", "relu", **config), _fat_relu)
    oracle.config = {
        "architectures": ["SparseLlamaForCausalLM"],
        "model_type": "sparsellama",
        "hidden_act": "fatrelu",
        "hidden_act_param": CUT,
    }
    return oracle


def bamboo(**config: Any) -> Oracle:
    oracle = _with_mlp(_gated("Mistral", "drelu", "relu", sliding_window=None, **config), _double_relu)
    oracle.config = {"architectures": ["BambooForCausalLM"], "model_type": "bamboo"}
    return oracle


def turbosparse(rank: int = 16, masked: bool = False, **config: Any) -> Oracle:
    """Bamboo with predictors in the checkpoint; masked: the oracle skips what they skip."""
    oracle = bamboo(**config)
    generator = torch.Generator().manual_seed(5)
    for i, layer in enumerate(oracle.model.model.layers):
        fc1 = torch.randn(rank, N_EMBD, generator=generator)
        fc2 = torch.randn(layer.mlp.gate_proj.out_features, rank, generator=generator)
        oracle.extra[f"model.layers.{i}.mlp.predictor.fc1.weight"] = fc1
        oracle.extra[f"model.layers.{i}.mlp.predictor.fc2.weight"] = fc2
        if not masked:
            continue
        seen: dict[str, torch.Tensor] = {}
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda module, args, seen=seen: seen.update(residual=args[0])
        )

        def forward(x: torch.Tensor, mlp=layer.mlp, fc1=fc1, fc2=fc2, seen=seen) -> torch.Tensor:
            mask = torch.sigmoid((seen["residual"] @ fc1.T).relu() @ fc2.T).round()
            return mlp.down_proj(mask * mlp.gate_proj(x).relu() * mlp.up_proj(x).relu())

        layer.mlp.forward = forward
    return oracle


def minicpm(hidden_act: str = "relu", **config: Any) -> Oracle:
    oracle = _gated("Llama", "relu", "relu", **config)
    if hidden_act == "fatrelu":
        _with_mlp(oracle, _fat_relu)
    model = oracle.model
    depth = SCALES["scale_depth"] / N_LAYER**0.5
    logit = model.config.hidden_size / SCALES["dim_model_base"]
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out * SCALES["scale_emb"])
    model.model.norm.register_forward_hook(lambda module, args, out: out / logit)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, out: out * depth)
        layer.mlp.down_proj.register_forward_hook(lambda module, args, out: out * depth)
    oracle.config = {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "hidden_act": hidden_act,
        "hidden_act_param": CUT,
        **SCALES,
    }
    return oracle


def falcon(activation: str = "relu", **config: Any) -> Oracle:
    plan = {"relu": "relu", "gelu": "gelu"}[activation]
    return _plain("Falcon", plan, **{"activation": activation, "ffn_hidden_size": 100, **config})


def opt(**config: Any) -> Oracle:
    values = {"ffn_dim": 100, "word_embed_proj_dim": N_EMBD, "activation_function": "relu", "dropout": 0.0}
    return _plain("OPT", "relu", **{**values, **config})


def nemotron(**config: Any) -> Oracle:
    return _gated("Nemotron", "relu_sqr", "relu2", **config)


def arcee(**config: Any) -> Oracle:
    return _gated("Arcee", "relu_sqr", "relu2", **config)


def gemma(**config: Any) -> Oracle:
    return _gated("Gemma", "gelu", "gelu_pytorch_tanh", **{"head_dim": 32, **config})


FAMILIES: dict[str, Callable[..., Oracle]] = {
    "llama-silu": functools.partial(_gated, "Llama", "silu", "silu"),
    "llama-relu": functools.partial(_gated, "Llama", "relu", "relu"),
    "llama-biases": functools.partial(_gated, "Llama", "relu", "relu", attention_bias=True, mlp_bias=True),
    "llama-head_dim": functools.partial(_gated, "Llama", "relu", "relu", head_dim=32),
    "mistral-silu": functools.partial(_gated, "Mistral", "silu", "silu", sliding_window=None),
    "mistral-relu": functools.partial(_gated, "Mistral", "relu", "relu", sliding_window=None),
    "prosparse": prosparse,
    "bamboo": bamboo,
    "turbosparse": turbosparse,
    "minicpm-relu": minicpm,
    "minicpm-fatrelu": functools.partial(minicpm, "fatrelu"),
    "qwen2": functools.partial(_gated, "Qwen2", "silu", "silu"),
    "qwen3": functools.partial(_gated, "Qwen3", "silu", "silu", head_dim=32),
    "falcon-relu": falcon,
    "falcon-gelu": functools.partial(falcon, "gelu"),
    "falcon-multi_head": functools.partial(falcon, multi_query=False),
    "falcon-new": functools.partial(falcon, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-one_norm": functools.partial(
        falcon, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "opt": opt,
    "nemotron": nemotron,
    "nemotron-biases": functools.partial(nemotron, attention_bias=True, mlp_bias=True),
    "arcee": arcee,
    "gemma": gemma,
}
