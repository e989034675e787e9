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


def changed(path: Path, out: Path, *, without: tuple[str, ...] = (), **values: float | str) -> Path:
    """A copy of a model with other keys of its architecture; `_` stands for `.` nowhere but before the key's last word."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, arch)
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
    new = {f"{arch}.{key}": MetadataDetails(kinds[type(value)], value) for key, value in values.items()}
    copy_with_new_metadata(reader, writer, new, [f"{arch}.{key}" for key in without])
    return out


def logits(graph: Graph) -> np.ndarray:
    """(n_tokens, n_vocab) float32."""
    with torch.no_grad():
        return graph.forward(torch.tensor([TOKENS]))[0].float().numpy()


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def gelu_of_llama_cpp(
    activation: str, gate: torch.Tensor | None, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch_graph.activate with the rounding of llama.cpp's table."""
    source = up if gate is None else gate
    a = F.gelu(source.half().float(), approximate="tanh").half().float()
    return a, a if gate is None else a * up


# ---- Logits ----------------------------------------------------------------------------------------------------------


def test_every_architecture_of_convert_has_a_graph() -> None:
    wished = {gguf.MODEL_ARCH_NAMES[family.arch] for family in FAMILIES.values()}
    assert wished == set(KINDS) <= set(ARCHITECTURE_ACTIVATIONS)
    assert wished == {gguf.MODEL_ARCH_NAMES[FAMILIES[name].arch] for name in FAMILIES}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_llama_cpp(model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = stock_logits(model(name))
    graph = Graph(BaseModel(model(name)))
    assert expected.std() > 0.2
    if graph.activation == "gelu":
        assert distance(logits(graph), expected) < GELU_TOLERANCE
        monkeypatch.setattr(torch_graph, "activate", gelu_of_llama_cpp)
    assert distance(logits(graph), expected) < TOLERANCE
