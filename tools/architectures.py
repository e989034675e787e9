"""What config.json says about a model: the llama.cpp architecture to run it on, its activation, keys, and tensors.

The activation comes from the configuration, never from a name; what isn't known here is refused, not guessed.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import gguf
import numpy as np

from powerinfer_py.errors import FormatError
from powerinfer_py.format import MAX_BLOCK_COUNT

from .checkpoint import Checkpoint, read_json

if TYPE_CHECKING:
    from torch import Tensor

# Name in config.json -> the plan's.
ACTIVATIONS = {
    "relu": "relu",
    "fatrelu": "relu",  # with a cut
    "relu2": "relu_sqr",
    "drelu": "drelu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
}
_DEFAULT_ROPE_BASE = 10000.0
YARN_BETAS = {"beta_fast": 32, "beta_slow": 1}  # llama.cpp reads no others for these architectures
_MAX_FLOAT = sys.float_info.max  # JSON has larger whole numbers
_EPS_KEYS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps")
_N_CTX_FALCON = 2048  # its first checkpoints don't say it
_N_OPT_PADDING = 2  # rows of the position embeddings before that of the first token
# Buffers that old versions of transformers saved with the weights.
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attention\.bias|masked_bias)$")


# ---- Families ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """One row of the table: how the models of a class in transformers become a llama.cpp architecture.

    Shapes are letters, outermost first (Shape.of). Tensors with a `+` between their names are joined.

    Attributes:
        arch: architecture that runs it.
        root: what the names of all tensors but the head's start with.
        top: name -> shape of tensors that there is one of.
        layer: name in a layer -> shape.
        optional: the same; tensors that a model may have.
        layers: where the layers are.
        names: our name -> the architecture's, where gguf's own map doesn't have it.
        changes: tensor of the architecture -> what must be done to the checkpoint's.
        activation_keys: where config.json says the activation.
        activation_default: the class's own, where its first checkpoints don't say it.
        both: whether the activation acts on gate and up: relu is the plan's drelu.
        layer_norm: LayerNorm instead of RMSNorm.
        scales: MiniCPM's scales of embeddings, residuals and logits.
        frequency_factors: whether the architecture takes them (llama3's rope).
        partial_rope: whether it rotates only a part of a head.
        free_heads: whether its heads may be wider or narrower than the width divided by their number.
        output: whether it needs an output matrix even if that is the embeddings.
        required: configuration key -> the only value that the architecture computes, which a missing key means too.
    """

    arch: gguf.MODEL_ARCH
    top: Mapping[str, str]
    layer: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    root: str = "model."
    layers: str = "layers"
    names: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, Callable[[Tensor, Shape], Tensor]] = field(default_factory=dict)
    activation_keys: tuple[str, ...] = ("hidden_act",)
    activation_default: str | None = None
    both: bool = False
    layer_norm: bool = False
    scales: bool = False
    frequency_factors: bool = False
    partial_rope: bool = False
    free_heads: bool = False
    output: bool = False
    required: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    n_vocab: int
    n_ctx: int
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_kv: int
    head_dim: int

    def of(self, letters: str) -> tuple[int, ...]:
        """The shape that a Family's letters mean."""
        n_q, n_k = self.n_head * self.head_dim, self.n_kv * self.head_dim
        sizes = {
            "v": self.n_vocab,
            "p": self.n_ctx,
            "P": self.n_ctx + _N_OPT_PADDING,  # in the checkpoint only
            "e": self.n_embd,
            "f": self.n_ff,
            "q": n_q,  # queries of all heads
            "k": n_k,  # keys or values of all heads
            "j": n_q + 2 * n_k,  # all of them joined
            "d": self.head_dim,
        }
        return tuple(sizes[letter] for letter in letters)


def _interleave(n_head: int, rows: Tensor) -> Tensor:
    """Rows of each head from (first half, second half) to alternating: llama.cpp rotates neighbours, transformers halves."""
    return rows.reshape(n_head, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _split_groups(rows: Tensor, shape: Shape) -> Tensor:
    """Falcon's joined rows from groups (queries, one key, one value) to all queries, all keys, all values."""
    import torch

    groups = rows.reshape(shape.n_kv, shape.n_head // shape.n_kv + 2, shape.head_dim, -1)
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    return torch.cat([part.reshape(-1, rows.shape[1]) for part in parts])


_QUERIES_AND_KEYS = {
    "attn_q.weight": lambda rows, shape: _interleave(shape.n_head, rows),
    "attn_k.weight": lambda rows, shape: _interleave(shape.n_kv, rows),
    "attn_q.bias": lambda rows, shape: _interleave(shape.n_head, rows),
    "attn_k.bias": lambda rows, shape: _interleave(shape.n_kv, rows),
}
# transformers adds 1 to the weight when it runs the norm (Nemotron's LayerNorm1P, Gemma's RMSNorm)
_ONE_MORE = dict.fromkeys(("attn_norm.weight", "ffn_norm.weight", "output_norm.weight"), lambda w, _: w.float() + 1)

_TOP = {"embed_tokens.weight": "ve", "norm.weight": "e"}
_ATTENTION = {
    "input_layernorm.weight": "e",
    "self_attn.q_proj.weight": "qe",
    "self_attn.k_proj.weight": "ke",
    "self_attn.v_proj.weight": "ke",
    "self_attn.o_proj.weight": "eq",
    "post_attention_layernorm.weight": "e",
}
_QKV_BIASES = {"self_attn.q_proj.bias": "q", "self_attn.k_proj.bias": "k", "self_attn.v_proj.bias": "k"}
_BIASES = {**_QKV_BIASES, "self_attn.o_proj.bias": "e"}
_UNGATED = {"mlp.up_proj.weight": "fe", "mlp.down_proj.weight": "ef"}
_UNGATED_BIASES = {"mlp.up_proj.bias": "f", "mlp.down_proj.bias": "e"}
_GATED = {"mlp.gate_proj.weight": "fe", **_UNGATED}
_DENSE = {"num_experts": 0, "num_local_experts": 0}

_LLAMA = Family(
    gguf.MODEL_ARCH.LLAMA,
    top=_TOP,
    layer={**_ATTENTION, **_GATED},
    optional={**_BIASES, "mlp.gate_proj.bias": "f", **_UNGATED_BIASES},
    changes=_QUERIES_AND_KEYS,
    frequency_factors=True,
    free_heads=True,
    required=_DENSE,
)
# ReLU on gate and up. Predictors may be part of the checkpoint: layers.N.mlp.predictor.fc1 and fc2, without biases, which
# read the residual that enters the FFN's norm; a neuron counts when its score's sigmoid rounds to 1.
# Source: modeling_bamboo.py of PowerInfer/TurboSparse-Mistral-Instruct.
_BAMBOO = Family(
    gguf.MODEL_ARCH.LLAMA,
    top=_TOP,
    layer={**_ATTENTION, **_GATED},
    changes=_QUERIES_AND_KEYS,
    frequency_factors=True,
    free_heads=True,
    both=True,
)
_MINICPM = Family(
    gguf.MODEL_ARCH.MINICPM,
    top=_TOP,
    layer={**_ATTENTION, **_GATED},
    optional=_BIASES,
    changes=_QUERIES_AND_KEYS,
    frequency_factors=True,
    free_heads=True,
    scales=True,
    required=_DENSE,
)
_QWEN2 = Family(
    gguf.MODEL_ARCH.QWEN2, top=_TOP, layer={**_ATTENTION, **_QKV_BIASES, **_GATED}, required={"use_mrope": False}
)
_QWEN3 = Family(
    gguf.MODEL_ARCH.QWEN3,
    top=_TOP,
    layer={**_ATTENTION, **_GATED, "self_attn.q_norm.weight": "d", "self_attn.k_norm.weight": "d"},
    free_heads=True,
    required={"attention_bias": False},
)
_ARCEE = Family(
    gguf.MODEL_ARCH.ARCEE,
    top=_TOP,
    layer={**_ATTENTION, **_UNGATED},
    optional=_BIASES,
    changes=_QUERIES_AND_KEYS,
    frequency_factors=True,
    free_heads=True,
    required={"mlp_bias": False},
)
_NEMOTRON = Family(
    gguf.MODEL_ARCH.NEMOTRON,
    top={**_TOP, "norm.bias": "e"},
    layer={**_ATTENTION, **_UNGATED, "input_layernorm.bias": "e", "post_attention_layernorm.bias": "e"},
    optional={**_BIASES, **_UNGATED_BIASES},
    changes=_ONE_MORE,
    layer_norm=True,
    partial_rope=True,
    output=True,
)
_GEMMA = Family(
    gguf.MODEL_ARCH.GEMMA,
    top=_TOP,
    layer={**_ATTENTION, **_GATED},
    changes=_ONE_MORE,
    activation_keys=("hidden_activation", "hidden_act"),
    free_heads=True,
    required={"attention_bias": False, "tie_word_embeddings": True, "use_bidirectional_attention": False},
)
_FALCON = Family(
    gguf.MODEL_ARCH.FALCON,
    root="transformer.",
    layers="h",
    top={"word_embeddings.weight": "ve", "ln_f.weight": "e", "ln_f.bias": "e"},
    layer={
        "self_attention.query_key_value.weight": "je",
        "self_attention.dense.weight": "eq",
        "mlp.dense_h_to_4h.weight": "fe",
        "mlp.dense_4h_to_h.weight": "ef",
    },
    # one norm for attention and FFN, or one for each
    optional={
        f"{name}.{what}": "e" for name in ("input_layernorm", "ln_attn", "ln_mlp") for what in ("weight", "bias")
    },
    changes={"attn_qkv.weight": _split_groups},
    activation_keys=("activation", "hidden_act"),
    activation_default="gelu",
    layer_norm=True,
    required={"alibi": False, "bias": False},
)
_OPT = Family(
    gguf.MODEL_ARCH.GPT2,
    root="model.decoder.",
    top={
        "embed_tokens.weight": "ve",
        "embed_positions.weight": "Pe",
        "final_layer_norm.weight": "e",
        "final_layer_norm.bias": "e",
    },
    layer={
        "self_attn_layer_norm.weight": "e",
        "self_attn_layer_norm.bias": "e",
        "self_attn.q_proj.weight+self_attn.k_proj.weight+self_attn.v_proj.weight": "je",
        "self_attn.q_proj.bias+self_attn.k_proj.bias+self_attn.v_proj.bias": "j",
        "self_attn.out_proj.weight": "eq",
        "self_attn.out_proj.bias": "e",
        "final_layer_norm.weight": "e",
        "final_layer_norm.bias": "e",
        "fc1.weight": "fe",
        "fc1.bias": "f",
        "fc2.weight": "ef",
        "fc2.bias": "e",
    },
    names={
        "embed_tokens": "token_embd",
        "embed_positions": "position_embd",
        "final_layer_norm": "output_norm",
        "layers.self_attn_layer_norm": "attn_norm",
        "layers.self_attn.q_proj": "attn_qkv",
        "layers.self_attn.out_proj": "attn_output",
        "layers.final_layer_norm": "ffn_norm",
        "layers.fc1": "ffn_up",
        "layers.fc2": "ffn_down",
    },
    # gpt2 has no rows for padding
    changes={"position_embd.weight": lambda rows, _: rows[_N_OPT_PADDING:]},
    activation_keys=("activation_function",),
    layer_norm=True,
    required={
        # false for OPT-350M: its norms follow the blocks
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
    },
)
# Class in config.json's `architectures` -> family.
FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "SparseLlamaForCausalLM": _LLAMA,  # ProSparse
    "MistralForCausalLM": _LLAMA,
    "BambooForCausalLM": _BAMBOO,
    "MiniCPMForCausalLM": _MINICPM,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "ArceeForCausalLM": _ARCEE,
    "NemotronForCausalLM": _NEMOTRON,
    "GemmaForCausalLM": _GEMMA,
    "FalconForCausalLM": _FALCON,
    "RWForCausalLM": _FALCON,  # Falcon before transformers had it
    "OPTForCausalLM": _OPT,
}


# ---- A model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rope:
    """Rotary positions.

    Attributes:
        base: of the frequencies.
        n_dims: values of a head that are rotated.
        scaling: `linear`, `yarn` or empty.
        factor: of the scaling.
        n_ctx_orig: context before it (yarn).
        frequency_factors: (n_dims / 2,) float32 that frequencies are divided by (llama3); None: not.
    """

    base: float
    n_dims: int
    scaling: str = ""
    factor: float = 1.0
    n_ctx_orig: int = 0
    frequency_factors: np.ndarray | None = None


@dataclass(frozen=True)
class Source:
    """Where a tensor of the GGUF comes from.

    Attributes:
        name: in the GGUF.
        parts: tensors of the checkpoint, joined along their rows.
        shape: in the GGUF, outermost first.
        change: what must be done to the joined rows; None: nothing.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    change: Callable[[Tensor, Shape], Tensor] | None


@dataclass(frozen=True)
class HfModel:
    """All that the conversion needs to know.

    Attributes:
        family: its row of the table.
        config: config.json.
        checkpoint: its tensors.
        shape: its sizes.
        activation: the plan's name for it.
        activation_param: FATReLU's cut.
        norm_eps: of all norms.
        rope: None without rotary positions.
        scales: of embeddings, residuals and logits (MiniCPM); None otherwise.
        sources: every tensor of the GGUF.
        predictors: per layer the checkpoint's names of fc1 and fc2; empty without.
    """

    family: Family
    config: dict[str, Any]
    checkpoint: Checkpoint
    shape: Shape
    activation: str
    activation_param: float
    norm_eps: float
    rope: Rope | None
    scales: tuple[float, float, float] | None
    sources: tuple[Source, ...]
    predictors: tuple[tuple[str, str], ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return gguf.MODEL_ARCH_NAMES[self.family.arch]

    def source(self, name: str) -> Source:
        """The source of one tensor of the GGUF."""
        return next(source for source in self.sources if source.name == name)

    def read(self, source: Source) -> Tensor:
        """One tensor of the GGUF, in the checkpoint's type; mapped where nothing changes it."""
        import torch

        parts = [self.checkpoint.tensor(part) for part in source.parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole if source.change is None else source.change(whole, self.shape)

    def add_keys(self, writer: gguf.GGUFWriter) -> None:
        """Writes the architecture's keys."""
        shape = self.shape
        writer.add_context_length(shape.n_ctx)
        writer.add_embedding_length(shape.n_embd)
        writer.add_block_count(shape.n_layer)
        writer.add_feed_forward_length(shape.n_ff)
        writer.add_head_count(shape.n_head)
        writer.add_head_count_kv(shape.n_kv)
        writer.add_vocab_size(shape.n_vocab)
        if shape.head_dim * shape.n_head != shape.n_embd:
            writer.add_key_length(shape.head_dim)
            writer.add_value_length(shape.head_dim)
        if self.family.layer_norm:
            writer.add_layer_norm_eps(self.norm_eps)
        else:
            writer.add_layer_norm_rms_eps(self.norm_eps)
        if self.scales is not None:
            embedding, residual, logit = self.scales
            writer.add_embedding_scale(embedding)
            writer.add_residual_scale(residual)
            writer.add_logit_scale(logit)
        rope = self.rope
        if rope is None:
            return
        writer.add_rope_dimension_count(rope.n_dims)
        writer.add_rope_freq_base(rope.base)
        if rope.scaling:
            writer.add_rope_scaling_type(gguf.RopeScalingType(rope.scaling))
            writer.add_rope_scaling_factor(rope.factor)
        if rope.scaling == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope.n_ctx_orig)


Note = Callable[[str], None]


def read_model(folder: Path, note: Note, fallback: Note) -> HfModel:
    """Reads a checkpoint's configuration and what its tensors are; no weights.

    Args:
        folder: of a Hugging Face checkpoint.
        note: receives what is worth knowing.
        fallback: receives where the result isn't all that the model is.

    Returns:
        The model.

    Raises:
        FormatError: a class, activation or setting that isn't known, a file or tensor that is missing or damaged, or a
            checkpoint that isn't its config.json's.
        OptionError: a package isn't installed.
    """
    config = _Config(folder / "config.json")
    family = config.family()
    shape = config.shape(family)
    activation, param = config.activation(family, note)
    config.check(family, shape, fallback)
    checkpoint = Checkpoint(folder)
    sources, predictors = _Names(config, family, shape, checkpoint).sources()
    return HfModel(
        family=family,
        config=config.values,
        checkpoint=checkpoint,
        shape=shape,
        activation=activation,
        activation_param=param,
        norm_eps=config.number(*_EPS_KEYS, default=1e-5 if family.layer_norm else None),
        rope=None if family is _OPT else config.rope(family, shape),
        scales=config.scales(shape) if family.scales else None,
        sources=sources,
        predictors=predictors,
    )


class _Config:
    """config.json, and what its keys mean."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = read_json(path)

    def wrong(self, key: str, expected: str, wish: str = "only that is supported") -> NoReturn:
        found = f"is {str(self.values[key])[:80]!r}" if key in self.values else "is missing"
        raise FormatError(f"{self.path}: {key} {found}; expected {expected}; {wish}.")

    def key(self, *keys: str) -> str:
        """The first of the keys that is there and not null, or the first."""
        return next((key for key in keys if self.values.get(key) is not None), keys[0])

    def count(self, *keys: str, default: int | None = None) -> int:
        key = self.key(*keys)
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
            self.wrong(key, "a whole number from 1 up", "give the checkpoint's own config.json")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        key = self.key(*keys)
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MAX_FLOAT:
            self.wrong(key, "a number above 0", "give the checkpoint's own config.json")
        return float(value)

    def family(self) -> Family:
        classes = self.values.get("architectures")
        name = classes[0] if isinstance(classes, list) and len(classes) == 1 else None
        if not isinstance(name, str) or name not in FAMILIES:
            self.wrong("architectures", f"one of {', '.join(FAMILIES)}", "other architectures aren't known here")
        if "quantization_config" in self.values:
            self.wrong("quantization_config", "none", "give the checkpoint before it was quantized")
        return FAMILIES[name]

    def shape(self, family: Family) -> Shape:
        n_embd = self.count("hidden_size", "n_embed")
        n_head = self.count("num_attention_heads", "n_head")
        n_layer = self.count("num_hidden_layers", "n_layer")
        if n_layer > MAX_BLOCK_COUNT:
            self.wrong(self.key("num_hidden_layers", "n_layer"), f"at most {MAX_BLOCK_COUNT}")
        n_kv = self.count("num_key_value_heads", "num_kv_heads", "n_head_kv", default=n_head)
        # before transformers had Falcon, n_head_kv was there in the new decoder only
        if family is _FALCON and not (self.values.get("new_decoder_architecture") or "n_head_kv" in self.values):
            n_kv = 1 if self.values.get("multi_query", True) else n_head
        given = self.values.get("head_dim") is not None
        if n_head % n_kv or not (given or n_embd % n_head == 0):
            self.wrong(self.key("num_attention_heads", "n_head"), f"a multiple of {n_kv} that divides {n_embd}")
        head_dim = self.count("head_dim", default=n_embd // n_head)
        if head_dim % 2:
            self.wrong("head_dim" if given else "hidden_size", "an even number of values per head")
        if not family.free_heads and head_dim * n_head != n_embd:
            self.wrong(
                "head_dim", f"{n_embd} / {n_head}, as llama.cpp's {gguf.MODEL_ARCH_NAMES[family.arch]} computes it"
            )
        n_ff_default = 4 * n_embd if family is _FALCON else None
        n_ctx_default = _N_CTX_FALCON if family is _FALCON else None
        return Shape(
            n_vocab=self.count("vocab_size"),
            n_ctx=self.count("max_position_embeddings", default=n_ctx_default),
            n_layer=n_layer,
            n_embd=n_embd,
            n_ff=self.count("intermediate_size", "ffn_dim", "ffn_hidden_size", default=n_ff_default),
            n_head=n_head,
            n_kv=n_kv,
            head_dim=head_dim,
        )

    def activation(self, family: Family, note: Note) -> tuple[str, float]:
        """The plan's activation and its parameter."""
        given = [key for key in family.activation_keys if self.values.get(key) is not None]
        meant = ["gelu" if ACTIVATIONS.get(str(self.values[key])) == "gelu" else self.values[key] for key in given]
        if any(name != meant[0] for name in meant):
            self.wrong(given[1], f"{given[0]}'s value, {self.values[given[0]]!r}", "say which is the activation")
        key = given[0] if given else family.activation_keys[0]
        name = self.values.get(key, family.activation_default)
        if not given and name is not None:
            note(f"{self.path}: {key} is missing; it is {name}, the default of the model's class.")
        found = ACTIVATIONS.get(name) if isinstance(name, str) else None
        gated = "mlp.gate_proj.weight" in family.layer
        if found is None or (found == "drelu" and not gated) or (family.both and name not in ("relu", "drelu")):
            known = ("relu", "drelu") if family.both else [n for n in ACTIVATIONS if gated or n != "drelu"]
            self.wrong(key, f"one of {', '.join(known)}", "another activation isn't known here")
        if name == "gelu":
            note(f"{self.path}: {key} gelu is computed in its tanh form, as llama.cpp does.")
        if family.both:
            return "drelu", 0.0
        return found, self.number("hidden_act_param") if name == "fatrelu" else 0.0

    def check(self, family: Family, shape: Shape, fallback: Note) -> None:
        """Refuses what the architecture doesn't compute."""
        for key, value in family.required.items():
            if self.values.get(key) not in (None, value):
                self.wrong(
                    key, str(value).lower(), f"llama.cpp's {gguf.MODEL_ARCH_NAMES[family.arch]} has no other form"
                )
        if (
            family is _FALCON
            and not self.values.get("new_decoder_architecture")
            and not self.values.get("parallel_attn", True)
        ):
            self.wrong("parallel_attn", "true", "llama.cpp's falcon has no other form")
        if self.count("word_embed_proj_dim", default=shape.n_embd) != shape.n_embd:
            self.wrong("word_embed_proj_dim", f"{shape.n_embd}, as hidden_size", "llama.cpp's gpt2 has no projection")
        window = self.count("sliding_window", default=shape.n_ctx)
        if window < shape.n_ctx and self.values.get("use_sliding_window", True):
            fallback(
                f"{self.path}: sliding_window is {window}; llama.cpp's {gguf.MODEL_ARCH_NAMES[family.arch]} attends to "
                f"everything, so contexts beyond {window} tokens differ from the original."
            )

    def scales(self, shape: Shape) -> tuple[float, float, float]:
        return (
            self.number("scale_emb"),
            self.number("scale_depth") / math.sqrt(shape.n_layer),
            shape.n_embd / self.number("dim_model_base"),
        )

    def rope(self, family: Family, shape: Shape) -> Rope:
        """Rotary positions, of transformers 5 (rope_parameters) and before (rope_theta and rope_scaling)."""
        key = self.key("rope_parameters", "rope_scaling")
        given = self.values.get(key) or {}
        if not isinstance(given, dict):
            self.wrong(key, "an object", "give the checkpoint's own config.json")
        base = given.get("rope_theta", self.values.get("rope_theta", _DEFAULT_ROPE_BASE))
        share = given.get(
            "partial_rotary_factor", self.values.get("partial_rotary_factor", 0.5 if family is _NEMOTRON else 1.0)
        )
        kind = given.get("rope_type", given.get("type", "default"))
        if not isinstance(kind, str):
            self.wrong(key, "a text as its rope_type", "give the checkpoint's own config.json")
        numbers = {"rope_theta": base, "partial_rotary_factor": share}
        wished = {"linear": ("factor",), "yarn": ("factor",)}.get(kind, ())
        if kind == "llama3":
            wished = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        numbers.update({name: given.get(name) for name in wished})
        extra = ("beta_fast", "beta_slow", "original_max_position_embeddings")
        numbers.update({name: given[name] for name in extra if given.get(name) is not None})
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MAX_FLOAT:
                self.wrong(key, f"a number above 0 as its {name}", "give the checkpoint's own config.json")
        if not family.partial_rope and share != 1:
            self.wrong(
                key, "all of a head rotated", f"llama.cpp's {gguf.MODEL_ARCH_NAMES[family.arch]} has no other form"
            )
        rope = Rope(float(base), int(shape.head_dim * share))
        if kind == "default":
            return rope
        known = ["default", "linear", "yarn", *["llama3"] * family.frequency_factors]
        strange = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if given.get(name) is not None]
        strange += [name for name, value in YARN_BETAS.items() if numbers.get(name, value) != value]
        if kind not in known or strange or given.get("truncate", True) is not True:
            self.wrong(key, f"a rope_type of {', '.join(known)}, without {', '.join(strange) or 'other settings'}")
        if kind == "llama3":
            factors = _llama3_factors(rope, *(numbers[name] for name in wished))
            return Rope(rope.base, rope.n_dims, frequency_factors=factors)
        orig = given.get("original_max_position_embeddings") or shape.n_ctx
        return Rope(rope.base, rope.n_dims, kind, float(given["factor"]), int(orig))


def _llama3_factors(rope: Rope, factor: float, low: float, high: float, n_ctx_orig: float) -> np.ndarray:
    """What frequencies are divided by: 1 for short waves, `factor` for long ones, between them a straight line of 1 / it."""
    frequencies = rope.base ** (-np.arange(0, rope.n_dims, 2) / rope.n_dims)
    n_waves = n_ctx_orig * frequencies / (2 * math.pi)  # that fit into the context before
    smooth = np.clip((n_waves - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


class _Names:
    """Finds every tensor that the architecture wants, and what is left over."""

    def __init__(self, config: _Config, family: Family, shape: Shape, checkpoint: Checkpoint) -> None:
        self.config = config
        self.family = family
        self.shape = shape
        self.checkpoint = checkpoint
        self.used: set[str] = set()
        self.known = gguf.get_tensor_name_map(family.arch, shape.n_layer)

    def sources(self) -> tuple[tuple[Source, ...], tuple[tuple[str, str], ...]]:
        family = self.family
        found = [self.source("", names, letters) for names, letters in family.top.items()]
        found += self.output(found[0])
        for i in range(self.shape.n_layer):
            prefix = f"{family.layers}.{i}."
            found += [self.source(prefix, names, letters) for names, letters in family.layer.items()]
            optional = {name: letters for name, letters in family.optional.items() if self.stored(prefix + name)}
            found += [self.source(prefix, name, letters) for name, letters in optional.items()]
            if family is _FALCON and not optional.keys() & {"input_layernorm.weight", "ln_mlp.weight"}:
                self.missing(f"{family.root}{prefix}input_layernorm.weight")
        predictors = self.predictors() if family.both else ()
        for name in self.checkpoint.shapes:
            if name not in self.used and not _BUFFERS.search(name):
                raise FormatError(
                    f"{self.checkpoint.folder}: holds tensor {name}, which llama.cpp's "
                    f"{gguf.MODEL_ARCH_NAMES[family.arch]} has no place for; expected the tensors of config.json's model; "
                    "give the checkpoint as it was published."
                )
        return tuple(found), predictors

    def output(self, embeddings: Source) -> Sequence[Source]:
        """The head, unless it is the embeddings: config.json says so, or, silent about it, the checkpoint has none."""
        tied = self.family.required.get("tie_word_embeddings", self.stored("lm_head.weight") is None)
        if self.config.values.get("tie_word_embeddings", tied):
            self.used.add("lm_head.weight")
            return [Source("output.weight", embeddings.parts, embeddings.shape, None)] if self.family.output else []
        return [self.source("", "lm_head.weight", "ve")]

    def stored(self, name: str) -> str | None:
        """A tensor's name in the checkpoint, with the root, or without it as OPT's first checkpoints."""
        for candidate in (self.family.root + name, name, (self.family.root + name).removeprefix("model.")):
            if candidate in self.checkpoint.shapes:
                return candidate
        return None

    def missing(self, name: str) -> NoReturn:
        raise FormatError(
            f"{self.checkpoint.folder}: has no tensor {name}; expected it from {self.config.path.name} "
            f"({', '.join(self.config.values['architectures'])}, {self.shape.n_layer} layers); "
            "give the whole checkpoint with its own config.json."
        )

    def source(self, prefix: str, names: str, letters: str) -> Source:
        """The source of one tensor, of the shape that it must have."""
        parts = []
        for name in names.split("+"):
            stored = self.stored(prefix + name)
            if stored is None:
                self.missing(("" if name == "lm_head.weight" else self.family.root) + prefix + name)
            parts.append(stored)
        self.used.update(parts)
        shapes = [self.checkpoint.shapes[part] for part in parts]
        whole = (sum(shape[0] if shape else 0 for shape in shapes), *shapes[0][1:])
        expected = self.shape.of(letters)
        if whole != expected or len({shape[1:] for shape in shapes}) > 1:
            raise FormatError(
                f"{self.checkpoint.folder}: tensor {' + '.join(parts)} has shape {list(whole)}; expected {list(expected)} "
                f"from {self.config.path.name}; give the checkpoint with its own config.json."
            )
        name = self.target(prefix, names.split("+")[0])
        change = self.family.changes.get(re.sub(r"^blk\.\d+\.", "", name))
        return Source(name, tuple(parts), self.shape.of(letters.replace("P", "p")), change)

    def target(self, prefix: str, name: str) -> str:
        """The architecture's name of a tensor."""
        stem, _, suffix = name.rpartition(".")
        own = self.family.names.get(f"layers.{stem}" if prefix else stem)
        if own is None:
            root = "" if stem == "lm_head" else self.family.root
            return f"{self.known.get_name(root + prefix + stem)}.{suffix}"
        layer = f"blk.{prefix.split('.')[1]}." if prefix else ""
        return f"{layer}{own}.{suffix}"

    def predictors(self) -> tuple[tuple[str, str], ...]:
        """Names of fc1 and fc2 per layer; all layers have them or none."""
        found = []
        for i in range(self.shape.n_layer):
            names = [f"{self.family.layers}.{i}.mlp.predictor.{fc}.weight" for fc in ("fc1", "fc2")]
            stored = [self.stored(name) for name in names]
            if i == 0 and not any(stored):
                return ()
            for name, where in zip(names, stored):
                if where is None:
                    self.missing(self.family.root + name)
            self.used.update(stored)
            found.append((stored[0], stored[1]))
        return tuple(found)
