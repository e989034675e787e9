"""`powerinfer reluify` on tiny models: what it writes, what it says, and that no stop, full disk or odd option breaks it."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hf_checkpoints as hf
import numpy as np
import pytest
import tiny_models
import torch
from test_convert import TOKENS, logits, stock_logits

from powerinfer_py.format import BaseModel, read_plan
from powerinfer_py.tools import reluify_model
from powerinfer_py.tools.reluify_model import Reluified, ReluifyOptions
from powerinfer_py.tools.torch_graph import Graph

# Of the largest logit: F32 throughout, but upstream's GELU is looked up in F16, and sums have another order.
TOLERANCE = 1e-3
N_CTX = 32
WORDS = "the model reads a text and writes what it has seen before because every word follows from those it knows".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(rng.choice(WORDS) for _ in range(1000)), encoding="utf-8")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two SwiGLU layers, in a folder of its own."""
    (tmp_path / "in").mkdir()
    return tiny_models.write_tiny_model(tmp_path / "in" / "model.gguf", n_layer=2, n_ff=96)


@pytest.fixture
def small(tmp_path: Path, text: Path, model: Path) -> ReluifyOptions:
    """Options of a run that takes a second."""
    return small_run(model, text, tmp_path / "out.gguf")


def small_run(model: Path, text: Path, out: Path, **changes: object) -> ReluifyOptions:
    options = ReluifyOptions(model, (text,), out, steps=6, tokens=24 * N_CTX, ctx=N_CTX, batch=2, threads=1, dtype="f32")
    return replace(options, **changes)


@dataclass
class Seen:
    """What a run said."""

    notes: list[str] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)  # that showed progress

    @contextmanager
    def steps(self, what: str, n: int) -> Iterator[Callable[..., None]]:
        self.stages.append(what)
        yield lambda text=None: None


def reluify(options: ReluifyOptions, seen: Seen | None = None, each: Callable[[Any], object] | None = None) -> Reluified:
    """A run; each(run) is called after each of its steps."""
    seen = seen or Seen()

    def report(run: Any, entry: dict[str, Any] | None) -> None:
        if entry is not None:
            seen.entries.append(entry)
        if each is not None:
            each(run)

    return reluify_model.reluify(options, seen.steps, report, seen.notes.append)


def graph_of(options: ReluifyOptions) -> Graph:
    """Plain torch: the written model with its plan's activation."""
    graph = Graph(BaseModel(options.out))
    graph.activation = read_plan(options.plan).activation
    return graph


def forward(graph: Graph, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of tokens (n_seq, n_tok)."""
    with torch.no_grad():
        return graph.forward(tokens)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> float:
    """Mean KL(teacher || student) of logits, nats."""
    p, q = (logits.double().log_softmax(-1) for logits in (teacher, student))
    return float((p.exp() * (p - q)).sum(-1).mean())


# ---- What it makes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "activation"),
    [("mistral-silu", "relu"), ("qwen2", "drelu"), ("gemma", "relu"), ("llama-silu", "relu_sqr"), ("opt", "relu_sqr")],
)
def test_any_family_learns_loads_and_equals_plain_torch(tmp_path: Path, text: Path, family: str, activation: str) -> None:
    config = {"mlp_bias": True} if family == "llama-silu" else {}
    checkpoint = hf.FAMILIES[family](**config).save(tmp_path / "hf")
    options = small_run(checkpoint, text, tmp_path / "out.gguf", activation=activation, steps=40, lr=5e-3, end_to_end_lr=3e-3)
    seen = Seen()
    start: list[torch.Tensor] = []

    def keep_logits(run: Any) -> None:
        """Held-out windows; the teacher's logits, and those of its weights with the other activation."""
        if not start:
            own = run.graph.activation
            start.extend((run.held_out, forward(run.graph, run.held_out)))
            run.graph.activation = activation
            start.append(forward(run.graph, run.held_out))
            run.graph.activation = own

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "powerinfer_py.tools.hf_tokenizer", tiny_models.stand_in_tokenizer())
        result = reluify(options, seen, keep_logits)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out.gguf", "out.powerinfer.gguf"}
    assert all("stock llama.cpp computes gelu" in text for text in seen.notes) and len(seen.notes) == (family == "opt")
    first, last = seen.entries[0], seen.entries[-1]
    assert (first["stage"], last["stage"]) == ("local", "end to end")
    assert sum(last["errors"]) < 0.5 * sum(first["errors"])
    plan = read_plan(options.plan)
    assert plan.activation == result.plan.activation == activation
    assert plan.corpus == result.plan.corpus == f"words.txt ({22 * N_CTX} tokens)"
    assert all(layer.profile_tokens == 22 * N_CTX and layer.neuron_order is not None for layer in plan.layers)
    windows, teacher, other = start
    graph = graph_of(options)
    assert divergence(teacher, forward(graph, windows)) < 0.6 * divergence(teacher, other)
    expected = forward(graph, torch.tensor([TOKENS]))[0].numpy()
    for sparsity in ("exact", "dense"):
        assert relative(logits(options.out, sparsity), expected) < TOLERANCE, sparsity
    assert np.isfinite(stock_logits(options.out)).all()
    assert relative(stock_logits(options.out), expected) > 10 * TOLERANCE  # the activation is the plan's, not upstream's


# ---- Stops ---------------------------------------------------------------------------------------------------------


def stop_after(n_steps: int) -> Callable[[Any], None]:
    """Ctrl-C after so many steps of this start."""
    n_done = 0

    def each(run: Any) -> None:
        nonlocal n_done
        n_done += 1
        if n_done == n_steps:
            signal.raise_signal(signal.SIGINT)

    return each


def rows_of(path: Path) -> dict[str, bytes]:
    base = BaseModel(path)
    return {name: base.raw(name).tobytes() for name in base.tensors}


def without_times(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ReluifyOptions, Reluified, dict[str, bytes]]:
    """A run of 8 steps, and the rows that it wrote."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    model = tiny_models.write_tiny_model(folder / "model.gguf", n_layer=2, n_ff=96)
    options = small_run(model, text, folder / "out.gguf", steps=8, lr=5e-3, qat="q4_0")
    return options, reluify(options), rows_of(options.out)


@pytest.mark.parametrize("stops", [(1,), (2,), (7,), (8,), (1, 1, 3)], ids=str)
def test_resumed_run_equals_an_uninterrupted_one(
    tmp_path: Path, uninterrupted: tuple[ReluifyOptions, Reluified, dict[str, bytes]], stops: tuple[int, ...]
) -> None:
    whole, expected, rows = uninterrupted
    options = replace(whole, out=tmp_path / "out.gguf")
    before = signal.getsignal(signal.SIGINT)
    for n_steps in stops:
        seen = Seen()
        with pytest.raises(KeyboardInterrupt):
            reluify(options, seen, stop_after(n_steps))
        assert seen.notes[-1].endswith("out.reluify; the same command with --resume goes on.")
        assert signal.getsignal(signal.SIGINT) is before
        assert [path.name for path in tmp_path.iterdir()] == ["out.reluify"]
        options = replace(options, resume=True)
    result = reluify(options)
    assert result.log[-1]["step"] == 8
    assert rows_of(options.out) == rows
    assert without_times(result.log) == without_times(expected.log)
    assert result.measured == expected.measured
    assert not (tmp_path / "out.reluify").exists()
