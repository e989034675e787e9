"""llama.cpp's graphs in torch against stock llama.cpp: every family that `powerinfer convert` knows, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import hf_checkpoints as hf
import numpy as np
import pytest
import tiny_models
import torch
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata
from test_convert import TOKENS, convert, stock_logits
from torch.nn import functional as F

from powerinfer_py.errors import FormatError
from powerinfer_py.format import ARCHITECTURE_ACTIVATIONS, BaseModel
from powerinfer_py.tools import torch_graph
from powerinfer_py.tools.architectures import FAMILIES
from powerinfer_py.tools.torch_graph import KINDS, Graph

# All relative to the largest logit. F32 throughout: what is left is the order of summation.
TOLERANCE = 1e-5
# llama.cpp rounds what GELU reads and what it gives to F16, and looks it up.
GELU_TOLERANCE = 1e-3
BF16_TOLERANCE = 0.05
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
# Name -> family of hf_checkpoints, and what its configuration has beside.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {})
    for name in (
        "llama-silu llama-biases llama-head_dim minicpm-relu qwen2 qwen3 arcee nemotron nemotron-biases falcon-gelu "
        "falcon-multi_head falcon-new falcon-one_norm opt gemma"
    ).split()
}
MODELS |= {
    "llama-groups": ("llama-silu", {"num_attention_heads": 8}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
}
for name, family, rope in (
    ("llama-base", "llama-silu", {"rope_type": "default", "rope_theta": 500.0}),
    ("llama-linear", "llama-silu", {"rope_type": "linear", "factor": 4.0}),
    ("llama-yarn", "llama-silu", YARN),
    ("llama-yarn-half", "llama-silu", {**YARN, "factor": 0.5}),
    ("qwen3-yarn", "qwen3", {**YARN, "original_max_position_embeddings": 32}),
    (
        "llama-llama3",
        "llama-silu",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    ("nemotron-quarter", "nemotron", {"rope_type": "default", "partial_rotary_factor": 0.25}),
):
    MODELS[name] = (family, {"rope_parameters": {"rope_theta": 10000.0, **rope}})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """`model(name, outtype) -> Path` of a stock GGUF that `convert` made of a row of MODELS; equal calls share one file."""
    written: dict[tuple[str, str], Path] = {}

    def write(name: str, outtype: str = "f32") -> Path:
        if (name, outtype) not in written:
            folder = tmp_path_factory.mktemp(name)
            family, config = MODELS[name]
            checkpoint = hf.FAMILIES[family](**config).save(folder / "hf")
            convert(checkpoint, "--sidecar", outtype=outtype, out=folder / "x.powerinfer.gguf")
            written[name, outtype] = folder / "x.gguf"
        return written[name, outtype]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "powerinfer_py.tools.hf_tokenizer", tiny_models.stand_in_tokenizer())
        yield write


def changed(path: Path, out: Path, keys: dict[str, float | str | None]) -> Path:
    """A copy of a model with other keys of its architecture; None: without that one."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
    new = {f"{arch}.{key}": MetadataDetails(kinds[type(v)], v) for key, v in keys.items() if v is not None}
    gone = [f"{arch}.{key}" for key, value in keys.items() if value is None]
    copy_with_new_metadata(reader, gguf.GGUFWriter(out, arch), new, gone)
    return out


def logits(graph: Graph) -> np.ndarray:
    """(n_tokens, n_vocab) float32."""
    with torch.no_grad():
        return graph.forward(torch.tensor([TOKENS]))[0].float().numpy()


def distance(found: np.ndarray, expected: np.ndarray, of: Callable[[np.ndarray], Any] = np.max) -> float:
    """The largest difference, or another one of all, relative to the largest value."""
    return float(of(np.abs(found - expected)) / np.abs(expected).max())


def gelu_of_llama_cpp(
    activation: str, gate: torch.Tensor | None, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch_graph.activate with the rounding of llama.cpp's table."""
    source = up if gate is None else gate
    a = F.gelu(source.half().float(), approximate="tanh").half().float()
    return a, a if gate is None else a * up


# ---- Logits ----------------------------------------------------------------------------------------------------------


def test_every_architecture_of_convert_has_a_graph() -> None:
    # deci: what `powerinfer prune` makes of llama
    assert {gguf.MODEL_ARCH_NAMES[family.arch] for family in FAMILIES.values()} | {"deci"} == set(KINDS)
    assert set(KINDS) <= set(ARCHITECTURE_ACTIVATIONS)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_llama_cpp(model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = stock_logits(model(name))
    graph = Graph(BaseModel(model(name)))
    assert expected.std() > 0.2
    if graph.activation != "gelu":
        assert distance(logits(graph), expected) < TOLERANCE
        return
    assert distance(logits(graph), expected) < GELU_TOLERANCE
    assert distance(logits(graph), expected, np.median) > TOLERANCE
    # nothing but the table: a sum at the edge of two of its values may still fall to the other
    monkeypatch.setattr(torch_graph, "activate", gelu_of_llama_cpp)
    assert distance(logits(graph), expected, np.median) < TOLERANCE


@pytest.mark.parametrize(
    "name, keys",
    [
        ("minicpm-relu", {"embedding_scale": None, "residual_scale": None, "logit_scale": None}),
        ("llama-silu", {"residual_scale": 2.0, "logit_scale": 2.0, "embedding_scale": 2.0}),  # not of this architecture
        ("llama-silu", {"rope.scale_linear": 2.0}),
        ("llama-linear", {"rope.scaling.type": None}),
        ("llama-linear", {"rope.scaling.type": "none"}),
        ("llama-linear", {"rope.scaling.attn_factor": 1.5}),
        ("llama-yarn", {"rope.scaling.attn_factor": 1.5}),
        ("llama-yarn", {"rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.yarn_beta_slow": 2.0}),
        ("llama-yarn", {"rope.scaling.original_context_length": None}),
        ("nemotron", {"rope.dimension_count": 4}),
        ("qwen2", {"rope.freq_base": None, "attention.layer_norm_rms_epsilon": 0.1}),
        ("gemma", {"rope.freq_base": 500.0}),
    ],
    ids=str,
)
def test_keys_mean_what_they_mean_to_llama_cpp(
    model: Callable[..., Path], tmp_path: Path, name: str, keys: dict[str, float | str | None]
) -> None:
    path = changed(model(name), tmp_path / "x.gguf", keys)
    tolerance = GELU_TOLERANCE if name == "gemma" else TOLERANCE
    assert distance(logits(Graph(BaseModel(path))), stock_logits(path)) < tolerance


@pytest.mark.parametrize("family", ["llama-relu", "bamboo", "minicpm-relu", "falcon-new", "opt", "arcee", "gemma"])
def test_with_the_plans_activation_logits_are_those_of_the_original(tmp_path: Path, family: str) -> None:
    oracle = hf.FAMILIES[family]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "powerinfer_py.tools.hf_tokenizer", tiny_models.stand_in_tokenizer())
        convert(oracle.save(tmp_path / "hf"), "--sidecar", out=tmp_path / "x.powerinfer.gguf")
    graph = Graph(BaseModel(tmp_path / "x.gguf"))
    graph.activation = oracle.activation
    assert distance(logits(graph), oracle.logits(TOKENS)) < TOLERANCE


@pytest.mark.parametrize("name", ["llama-silu", "qwen2-tied", "falcon-gelu", "opt", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_decoded_each_time_give_the_same(model: Callable[..., Path], name: str, dtype: torch.dtype) -> None:
    base = BaseModel(model(name, "q8_0"))
    kept = logits(Graph(base, dtype=dtype))
    assert np.array_equal(logits(Graph(base, dtype=dtype, keep=False, n_threads=2)), kept)
    assert distance(kept, logits(Graph(base))) < (TOLERANCE if dtype == torch.float32 else BF16_TOLERANCE)


def test_sequences_dont_see_each_other_and_later_tokens_not_earlier(model: Callable[..., Path]) -> None:
    graph = Graph(BaseModel(model("llama-groups")))
    tokens = torch.tensor([TOKENS[:20], TOKENS[20:]])
    with torch.no_grad():
        both = graph.forward(tokens)
        for i in range(2):
            assert torch.allclose(both[i], graph.forward(tokens[i : i + 1])[0], atol=TOLERANCE)
            assert torch.allclose(both[i, :7], graph.forward(tokens[i : i + 1, :7])[0], atol=TOLERANCE)


# ---- What is refused ---------------------------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    """What a graph says of a model, in one line."""
    with pytest.raises(FormatError) as caught:
        Graph(BaseModel(path))
    assert str(path) in str(caught.value) and str(caught.value).count("\n") == 0
    return str(caught.value)


def test_other_architectures_are_refused(tiny_model: Callable[..., Path]) -> None:
    for arch in ("olmo2", "mpt"):
        assert f"architecture '{arch}' has no graph in torch here; expected one of llama, minicpm" in refusal(
            tiny_model(arch)
        )


def test_experts_are_refused(tiny_model: Callable[..., Path]) -> None:
    assert "layer 0 has no plain FFN: experts (blk.0.ffn_" in refusal(tiny_model("llama", n_expert=4))


@pytest.mark.parametrize(
    "name, keys, found",
    [
        ("llama-silu", {"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing; expected a number"),
        ("nemotron", {"attention.layer_norm_epsilon": "x"}, "layer_norm_epsilon is 'x'; expected a number above 0"),
        ("llama-silu", {"attention.head_count": 0}, "head_count is '0'; expected a number of heads above 0"),
        ("llama-silu", {"attention.head_count": None}, "head_count is missing; expected a number of heads above 0"),
        ("llama-silu", {"attention.head_count": 3}, "head_count_kv is '2'; expected numbers that divide 3"),
        ("llama-silu", {"attention.head_count": 2}, "attn_k.weight has shape [32, 64]; expected [64, 64], as the keys say"),
        ("llama-silu", {"attention.key_length": 8}, "attn_output.weight has shape [64, 64]; expected [64, 32], as"),
        ("falcon-gelu", {"attention.head_count_kv": 2}, "attn_qkv.weight has shape [96, 64]; expected [128, 64]"),
        ("llama-silu", {"rope.dimension_count": 7}, "dimension_count is '7'; expected an even number up to 16"),
        ("llama-silu", {"rope.freq_base": float("nan")}, "freq_base is 'nan'; expected a number above 0"),
        ("llama-silu", {"rope.freq_base": 1.0}, "freq_base is '1.0'; expected a number above 1"),
        ("llama-silu", {"rope.scaling.type": "longrope"}, "type is 'longrope'; expected none, linear or yarn"),
        ("llama-llama3", {"rope.dimension_count": 8}, "dimension_count is '8'; expected 16, twice the values of rope_freqs"),
        ("minicpm-relu", {"logit_scale": -1.0}, "minicpm.logit_scale is '-1.0'; expected a number above 0"),
    ],
)  # fmt: skip
def test_broken_keys_are_refused(
    model: Callable[..., Path], tmp_path: Path, name: str, keys: dict[str, float | str | None], found: str
) -> None:
    assert found in refusal(changed(model(name), tmp_path / "x.gguf", keys))


@pytest.mark.parametrize(
    "name, old, new, found",
    [
        ("llama-silu", b"blk.1.attn_k.weight", b"blk.1.attn_x.weight", "blk.1.attn_k.weight is missing; expected [32, 64]"),
        ("llama-silu", b"output.weight", b"outpux.weight", "tensor 'outpux.weight' has no place in the graph of 'llama'"),
        ("qwen2", b"blk.0.attn_q.bias", b"blk.0.attn_x.bias", "tensor 'blk.0.attn_x.bias' has no place"),
        ("llama-silu", b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight", "layer 1 has no plain FFN"),
        ("opt", b"position_embd.weight", b"position_embx.weight", "position_embd.weight is missing; expected [tokens, 64]"),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_or_have_no_place_are_refused(
    model: Callable[..., Path], tmp_path: Path, name: str, old: bytes, new: bytes, found: str
) -> None:
    data, length = model(name).read_bytes(), len(old).to_bytes(8, "little")
    assert data.count(length + old) == 1
    path = tmp_path / "x.gguf"
    path.write_bytes(data.replace(length + old, length + new))
    assert found in refusal(path)
