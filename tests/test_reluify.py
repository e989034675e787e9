"""`powerinfer reluify` on tiny models: what it writes, what it says, and that no stop, full disk or odd option breaks it."""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import hf_checkpoints as hf
import numpy as np
import pytest
import tiny_models
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from test_convert import TOKENS, logits, stock_logits

from powerinfer_py import cli
from powerinfer_py.errors import FormatError, OptionError, PlanError
from powerinfer_py.format import BaseModel, read_plan
from powerinfer_py.tools import distill, reluify_model, reluify_run
from powerinfer_py.tools.reluify_model import Reluified, ReluifyOptions
from powerinfer_py.tools.rewrite_gguf import TensorSource, string_entry, write_changed
from powerinfer_py.tools.terminal import interruptible
from powerinfer_py.tools.text_runner import Runner, Vocabulary, text_windows
from powerinfer_py.tools.torch_graph import Graph

# Of the largest logit: F32 throughout, but upstream's GELU is looked up in F16, and sums have another order.
TOLERANCE = 1e-3
# Of perplexity: kernels round activations to Q8_0, and upstream's cache is F16.
QUANTIZED_TOLERANCE = 0.01
N_CTX = 32
WORDS = (
    "the model reads a text and writes what it has seen before because every word follows from those it knows".split()
)


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
    options = ReluifyOptions(
        model, out, (text,), steps=6, tokens=24 * N_CTX, ctx=N_CTX, batch=2, threads=1, dtype="f32"
    )
    return replace(options, **changes)


@dataclass
class Seen:
    """What a run said."""

    notes: list[str] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    at: dict[str, Callable[[], object]] = field(default_factory=dict)  # what to do after the first step of a stage

    @contextmanager
    def steps(self, what: str, n: int) -> Iterator[Callable[..., None]]:
        def step(text: str | None = None) -> None:
            self.at.pop(what, lambda: None)()

        yield step


def reluify(
    options: ReluifyOptions, seen: Seen | None = None, each: Callable[[Any], object] | None = None
) -> Reluified:
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
    ("family", "activation", "dtype"),
    [
        ("mistral-silu", "relu", "f32"),
        ("qwen2", "drelu", "f32"),
        ("gemma", "relu", "bf16"),
        ("llama-silu", "relu_sqr", "f32"),
        ("opt", "relu_sqr", "f32"),
    ],
)
def test_any_family_learns_loads_and_equals_plain_torch(
    tmp_path: Path, text: Path, family: str, activation: str, dtype: str
) -> None:
    config = {"mlp_bias": True} if family == "llama-silu" else {}
    checkpoint = hf.FAMILIES[family](**config).save(tmp_path / "hf")
    options = small_run(
        checkpoint,
        text,
        tmp_path / "out.gguf",
        activation=activation,
        steps=40,
        lr=5e-3,
        end_to_end_lr=3e-3,
        dtype=dtype,
    )
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
    assert names(tmp_path) == {"hf", "out.gguf", "out.powerinfer.gguf"}
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
    assert (
        relative(stock_logits(options.out), expected) > 10 * TOLERANCE
    )  # the activation is the plan's, not upstream's


def test_density_falls_to_its_aim_and_more_pressure_makes_less(
    small: ReluifyOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "_CONTROL_RATE", 0.6)  # a run of 120 steps steers faster than one of thousands
    found = []
    for aim in (0.4, 0.2):
        options = replace(small, density=aim, steps=120, lr=1e-2, end_to_end_lr=6e-3)
        result = reluify(options)
        for wished in zip(*(entry["wished_density"] for entry in result.log)):  # of each layer
            assert list(wished) == sorted(wished, reverse=True) and wished[0] > 0.45
        last = result.log[-1]
        assert np.mean(last["wished_density"]) == pytest.approx(aim, abs=1e-3)
        assert all(abs(density / wished - 1) < 0.25 for density, wished in zip(last["density"], last["wished_density"]))
        assert result.density == pytest.approx(np.mean(result.log[-1]["density"]), abs=0.1 * aim)
        found.append(result.density)
    assert found[1] < 0.6 * found[0]


def test_layers_below_the_aim_stay_there_even_where_nothing_fires(small: ReluifyOptions) -> None:
    model = tiny_models.write_tiny_model(small.model, "gpt2", n_layer=2, n_ff=96, up_bias=-100.0)
    log = reluify(replace(small, model=model)).log
    assert all(entry["density"] == [0.0, 0.0] and max(entry["wished_density"]) < 0.01 for entry in log)


def test_only_the_named_keys_and_ffn_rows_change(small: ReluifyOptions) -> None:
    model = tiny_models.write_tiny_model(
        small.model, n_layer=2, n_ff=96, bias=True, row_type="Q8_0", split_max_tensors=9
    )
    reluify(replace(small, model=model, check=small.text))
    before, after = BaseModel(model), BaseModel(small.out)
    keys = [key for key in before.files[0].values if not key.startswith("split.")]
    assert list(after.files[0].values) == keys and after.files[0].get("general.name") == "tiny llama relu"
    for key in keys:
        assert key == "general.name" or after.files[0].entry(key) == before.files[0].entry(key), key
    assert list(after.tensors) == list(before.tensors)
    for name in before.tensors:
        assert after.tensor(name).type == before.tensor(name).type and after.tensor(name).ne == before.tensor(name).ne
        changed = ".ffn_" in name and "norm" not in name
        assert np.array_equal(after.raw(name), before.raw(name)) != changed, name


def test_rows_of_qat_are_what_the_last_pass_saw(small: ReluifyOptions) -> None:
    last: dict[str, Any] = {}
    seen = Seen()

    def each(run: Any) -> None:
        last.update(run=run, students=dict(run.distiller.students))

    result = reluify(replace(small, qat="q4_0", steps=12, lr=5e-3), seen, each)
    assert seen.notes == []
    base, plan = BaseModel(small.out), read_plan(small.plan)
    assert base.files[0].get("general.file_type") == 2  # MOSTLY_Q4_0
    losses = []
    for i, student in last["students"].items():
        assert (
            {tensor.type_name for tensor in base.ffn(i).values()}
            == {plan.layers[i].ffn_down_t.row_type.name.lower()}
            == {"q4_0"}
        )
        order = plan.layers[i].neuron_order
        for name in ("gate", "up"):
            assert np.array_equal(base.rows_f32(f"blk.{i}.ffn_{name}.weight"), student.rounded(name).numpy())
        assert np.array_equal(plan.layers[i].ffn_down_t.to_f32(), student.rounded("down").numpy()[order])
        student.begin(train=False)
    graph, windows = last["run"].graph, last["run"].held_out
    h = distill.forward_layers(graph, last["students"], range(2), graph.embed(windows))
    half = N_CTX // 2
    for states, window in zip(h, windows):
        losses.append(distill.negative_log_likelihood(graph, states[None, half:], window[None, half:]))
    assert result.measured[0].student == pytest.approx(np.exp(np.mean(losses)), rel=QUANTIZED_TOLERANCE)


def test_rows_that_cannot_have_the_type_get_the_next_one_which_is_said_once(small: ReluifyOptions) -> None:
    model = tiny_models.write_tiny_model(small.model, n_layer=2, n_ff=100)
    seen = Seen()
    small = replace(small, model=model, qat="q4_k", steps=2)
    refusal(
        replace(small, strict=True),
        "rows of 64 values can't be q4_k; they are q5_0. --strict refuses that; leave it out",
    )
    reluify(small, seen)
    assert seen.notes == [
        "qat: rows of 64 values can't be q4_k; they are q5_0.",
        "qat: rows of 100 values can't be q4_k; they are f16.",
    ]
    base, plan = BaseModel(small.out), read_plan(small.plan)
    assert [tensor.type_name for tensor in base.ffn(1).values()] == ["q5_0", "q5_0", "f16"]
    assert {layer.ffn_down_t.row_type.name for layer in plan.layers} == {"Q5_0"}


@pytest.mark.parametrize("given", ["model", "sidecar", "plan of another name"])
def test_a_models_plan_says_the_teachers_activation(small: ReluifyOptions, given: str) -> None:
    name = "plan.powerinfer.gguf" if given == "plan of another name" else "model.powerinfer.gguf"
    plan = tiny_models.write_tiny_plan(small.model, small.model.with_name(name), activation="relu")
    with Runner(plan, small.model, n_ctx=N_CTX, n_threads=1, note=print) as runner:
        windows: list[np.ndarray] = []
        result = reluify(
            replace(small, model=small.model if given == "model" else plan, lr=1e-9, end_to_end_lr=1e-9),
            each=lambda run: windows.append(run.held_out.numpy().astype(np.int32)),
        )
        expected = np.exp(np.mean([runner.likelihood(window) for window in windows[0]]))
    assert result.log[0]["loss"] < 1e-9
    assert result.measured[0].teacher == pytest.approx(expected, rel=1e-6)
    assert result.measured[0].student == pytest.approx(expected, rel=1e-3)


def test_other_text_is_measured_too(small: ReluifyOptions, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("".join(random.Random(1).choices("abcdefghij ", k=4000)))
    result = reluify(replace(small, check=(other, small.text[0])))
    assert [found.name for found in result.measured] == ["held-out windows of the text", "other.txt", "words.txt"]
    for model, plan, whose in ((small.model, None, "teacher"), (small.out, small.plan, "student")):
        with Runner(plan, model, n_ctx=N_CTX, n_threads=1, sparsity="exact", note=print) as runner:
            windows, _ = text_windows(runner, [other], 2 * N_CTX, n_needed=2, note=print)
            expected = np.exp(np.mean([runner.likelihood(window) for window in windows]))
        assert getattr(result.measured[1], whose) == pytest.approx(expected, rel=1e-6)


# ---- Time ----------------------------------------------------------------------------------------------------------


def test_hours_are_kept_over_all_stops(small: ReluifyOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    clock = types.SimpleNamespace(
        monotonic=lambda: next(ticks) * 0.1
    )  # seconds pass when somebody asks: no load matters
    monkeypatch.setattr(reluify_model, "time", clock)
    monkeypatch.setattr(reluify_run, "time", clock)
    options = replace(small, steps=None, hours=30 / 3600)
    with pytest.raises(KeyboardInterrupt):
        reluify(options, each=lambda run: run.state.seconds > 8.0 and signal.raise_signal(signal.SIGINT))
    result = reluify(replace(options, resume=True))
    assert result.log[-1]["seconds"] == pytest.approx(20.0, abs=1.0) and 20.0 < result.seconds < 25.0
    assert (result.log[0]["stage"], result.log[-1]["stage"]) == ("local", "end to end")
    times = [entry["seconds"] for entry in result.log]
    assert 5 < len(times) < 50
    # a check takes 0.2 s by this clock, so 2 s lie between two of them, but for the last one of a start
    assert sum(b - a < 2.0 for a, b in zip(times, times[1:])) <= 2


def test_time_for_the_output_is_left(small: ReluifyOptions) -> None:
    base = BaseModel(small.model)
    run = types.SimpleNamespace(
        held_out=np.zeros((16, 32)),
        windows=np.zeros((1000, 32)),
        window_seconds=0.5,
        graph=types.SimpleNamespace(base=base),
    )
    n_bytes = sum(base.tensor(name).n_bytes for name in base.tensors)
    # both models on held-out and check windows, and the profile; twice as slow as here, then writing
    expected = 3600 - 2.0 * 0.5 * (16 * 4 + 1000) - n_bytes / 50e6
    options = replace(small, steps=None, hours=1.0, check=small.text)
    assert reluify_model._training_seconds(options, run, 2) == pytest.approx(expected)
    run.window_seconds = 1e-6
    assert reluify_model._training_seconds(options, run, 2) == 3590.0
    with pytest.raises(
        OptionError, match=r"hours: 0\.001; writing and measuring the result takes 0\.0028 alone; expected several"
    ):
        reluify_model._training_seconds(replace(options, hours=0.001), run, 2)


# ---- Stops ---------------------------------------------------------------------------------------------------------


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


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
def uninterrupted(
    text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ReluifyOptions, Reluified, dict[str, bytes]]:
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


# ---- Large models: groups of layers --------------------------------------------------------------------------------


def grouped(text: Path, folder: Path, n_per_group: int = 1, n_layer: int = 3) -> ReluifyOptions:
    """Options of a run whose memory is enough for so many layers at once."""
    model = tiny_models.write_tiny_model(folder / "model.gguf", n_layer=n_layer, n_ff=96)
    options = small_run(model, text, folder / "out.gguf", steps=5, lr=5e-3)
    low, high = 1e-4, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        try:
            groups, _ = groups_of(replace(options, memory=middle))
            n_fit = len(groups[0])
        except OptionError:
            n_fit = 0
        low, high = (low, middle) if n_fit >= n_per_group else (middle, high)
    return replace(options, memory=high)


def groups_of(options: ReluifyOptions) -> tuple[list[range], bool]:
    base = BaseModel(options.model)
    return reluify_model.layer_groups_of(options, base, "cpu", torch.float32, 22, lambda text: None)


def test_groups_get_smaller_with_memory_and_cover_all_layers(text: Path, tmp_path: Path) -> None:
    options = grouped(text, tmp_path, n_layer=5)
    found = []
    for k in range(60):
        groups, keep = groups_of(replace(options, memory=options.memory * 1.05**k))
        assert [i for group in groups for i in group] == list(range(5))
        assert keep == (len(groups) == 1)
        found.append(len(groups))
    assert found == sorted(found, reverse=True) and set(found) == {1, 2, 3, 5}
    with pytest.raises(
        OptionError, match=r"memory: 0\.0 GiB; one layer needs .* GiB; pass a larger --memory, or a smaller"
    ):
        groups_of(replace(options, memory=options.memory / 2))


def test_groups_are_trained_one_after_the_other(text: Path, tmp_path: Path) -> None:
    options, seen = grouped(text, tmp_path), Seen()
    kept = []

    def each(run: Any) -> None:
        if run.state.step == 1:
            kept.append(sorted(path.name for path in run.folder.path.iterdir()))
            assert list(run.distiller.students) == [run.state.i_group]
            assert not run.graph._kept or all(w.dim() == 1 for w in run.graph._kept.values())

    reluify(replace(options, keep=True, steps=20), seen, each)
    assert len(seen.notes) == 1
    assert re.fullmatch(
        r"memory: all layers at once and the end-to-end stage need 0\.0 GiB, 0\.0 GiB may be used: 3 groups of layers are trained "
        r"locally, one after the other, with 0\.0 GB of hidden states on disk \(fewer --tokens: less\); for the end-to-end stage "
        r"pass a larger --memory\.",
        seen.notes[0],
    )
    assert kept == [
        [],
        ["checkpoint.pt", "layer-0.pt", "student-1.npy", "teacher-1.npy"],
        ["checkpoint.pt", "layer-0.pt", "layer-1.pt", "student-2.npy", "teacher-2.npy"],
    ]
    folder = tmp_path / "out.reluify"
    assert names(folder) == {"checkpoint.pt", *(f"layer-{i}.pt" for i in range(3))}
    assert {entry["stage"] for entry in seen.entries} == {"local", "blended"}
    for i in range(3):
        errors = [sum(entry["errors"]) for entry in seen.entries if entry["group"] == i]
        assert errors[-1] < errors[0]
        layer = torch.load(folder / f"layer-{i}.pt", weights_only=True)
        rows = BaseModel(options.out).rows_f32(f"blk.{i}.ffn_down.weight")
        assert np.array_equal(layer["down"].numpy(), rows.T)
    expected = forward(graph_of(options), torch.tensor([TOKENS]))[0].numpy()
    assert relative(logits(options.out), expected) < TOLERANCE


def test_hidden_states_between_groups_are_those_of_both_models(text: Path, tmp_path: Path) -> None:
    options = grouped(text, tmp_path)
    hidden: dict[str, np.ndarray] = {}

    def each(run: Any) -> None:
        if run.state.i_group == 2 and not hidden:
            hidden.update({whose: np.array(run.folder.hidden(whose, 2)) for whose in ("teacher", "student")})
            hidden["windows"] = run.windows

    reluify(options, each=each)
    for whose, graph in (("teacher", Graph(BaseModel(options.model))), ("student", graph_of(options))):
        h = graph.embed(torch.from_numpy(hidden["windows"].astype(np.int64)))
        with torch.no_grad():
            for i in range(2):
                after, x = graph.attend(i, h)
                h = graph.add_ffn(after, graph.ffn(i, x))
        assert hidden[whose].shape == (22, N_CTX, 64)
        assert relative(hidden[whose], h.numpy()) < 1e-5, whose


@pytest.mark.parametrize("stops", [(5,), (6,), (2, 5, 5)], ids=str)
def test_grouped_run_resumes_exactly_whatever_memory_is_free_then(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: tuple[int, ...]
) -> None:
    options = replace(grouped(text, tmp_path), memory=None)
    n_bytes = grouped(text, tmp_path).memory * 2**30 / 0.7
    monkeypatch.setattr(reluify_model, "available_memory_bytes", lambda: n_bytes)
    expected = reluify(options)
    rows = rows_of(options.out)
    options.out.unlink()
    options.plan.unlink()
    for n_steps in stops:
        with pytest.raises(KeyboardInterrupt):
            reluify(options, each=stop_after(n_steps))
        options = replace(options, resume=True)
        n_bytes *= 4  # all layers would fit now
    result = reluify(options)
    assert rows_of(options.out) == rows and without_times(result.log) == without_times(expected.log)


def test_strict_refuses_groups(text: Path, tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"3 groups of layers are trained locally.* --strict refuses that; leave it out"
    ):
        reluify(replace(grouped(text, tmp_path), strict=True))
    assert not (tmp_path / "out.reluify").exists()


def test_ctrl_c_while_the_output_is_written_or_measured(small: ReluifyOptions, tmp_path: Path) -> None:
    expected = reluify(small)
    rows = rows_of(small.out)
    for stage in ("writing", "counting"):
        small.out.unlink()
        small.plan.unlink()
        seen = Seen(at={stage: lambda: signal.raise_signal(signal.SIGINT)})
        with pytest.raises(KeyboardInterrupt):
            reluify(small, seen)
        assert seen.notes == [
            f"stopped; what was reached is kept in {tmp_path / 'out.reluify'}; the same command with --resume goes on."
        ]
        assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["out.reluify"]
        result = reluify(replace(small, resume=True))
        assert rows_of(small.out) == rows and result.measured == expected.measured
        assert result.log[-1]["step"] == 6
    seen = Seen(at={"measuring": lambda: signal.raise_signal(signal.SIGINT)})
    with pytest.raises(KeyboardInterrupt):
        reluify(small, seen)
    assert rows_of(small.out) == rows and read_plan(small.plan).open_base()


# ---- The run's folder ----------------------------------------------------------------------------------------------


def test_a_stopped_run_is_replaced_with_a_note_or_resumed_with_the_same_options_only(small: ReluifyOptions) -> None:
    with pytest.raises(KeyboardInterrupt):
        reluify(small, each=stop_after(2))
    folder = small.out.with_name("out.reluify")
    state = (folder / "checkpoint.pt").read_bytes()
    for changes, found in (
        ({"activation": "drelu"}, "activation relu; this run has drelu"),
        ({"density": 0.3}, r"density 0\.15; this run has 0\.3"),
        ({"qat": "q8_0"}, "qat none; this run has q8_0"),
        ({"batch": 3}, "batch 2; this run has 3"),
        ({"ctx": 30}, "ctx 32; this run has 30"),
        ({"seed": 5}, "seed 0; this run has 5"),
        ({"tokens": 20 * N_CTX}, r"text \w+; this run has \w+"),
        ({"memory": 2.0}, r"memory 0\.0; this run has 2\.0"),
        ({"dtype": "bf16"}, r"dtype torch\.float32; this run has torch\.bfloat16"),
        (
            {"model": tiny_models.write_tiny_model(folder.with_name("other.gguf"), n_layer=2, seed=2)},
            r"model \w+; this run has \w+",
        ),
    ):
        with pytest.raises(
            OptionError,
            match=rf"resume: .*checkpoint\.pt was made with {found}; give the same options, or leave --resume",
        ):
            reluify(replace(small, resume=True, **changes))
        assert (folder / "checkpoint.pt").read_bytes() == state
    seen = Seen()
    assert reluify(small, seen).log[0]["step"] == 1
    assert seen.notes == [f"{folder}: what an earlier run kept is replaced; --resume would have gone on with it."]


def test_nothing_to_resume_is_a_note(small: ReluifyOptions) -> None:
    seen = Seen()
    reluify(replace(small, resume=True), seen)
    assert seen.notes == [
        f"{small.out.with_name('out.reluify')}: there is nothing to resume; starting at the beginning."
    ]


@pytest.mark.parametrize("with_checkpoint", [False, True])
def test_a_folder_with_other_files_is_refused_and_left_alone(small: ReluifyOptions, with_checkpoint: bool) -> None:
    folder = small.out.with_name("out.reluify")
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    if with_checkpoint:
        (folder / "checkpoint.pt").write_bytes(b"?")
    before = sorted(folder.iterdir())
    for resume in (False, True):
        with pytest.raises(
            OptionError, match=r"out: .*out\.reluify holds other files; expected none there; move them, or pass"
        ):
            reluify(replace(small, resume=resume))
        assert sorted(folder.iterdir()) == before


def test_what_a_killed_run_left_is_cleared(small: ReluifyOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small.out.with_name("out.reluify")
    kept: list[set[str]] = []
    with pytest.raises(KeyboardInterrupt):
        reluify(small, each=stop_after(2))
    for resume in (True, False):
        (folder / "output-x7_d").mkdir(parents=True)
        (folder / "output-x7_d" / "out.gguf").write_bytes(b"half")
        (folder / ".checkpoint.pt.17.tmp").write_bytes(b"half")
        (folder / ".teacher-1.npy.17.tmp").write_bytes(b"half")
        with monkeypatch.context() as patch:
            patch.setattr(reluify_run.Run, "measure_teacher", lambda run: kept.append(names(run.folder.path)))
            patch.setattr(reluify_run.Run, "train", lambda run, *_: False)
            with pytest.raises(KeyboardInterrupt):
                reluify(replace(small, resume=resume))
    assert kept == [{"checkpoint.pt"}, set()]


def test_a_finished_run_that_was_kept_can_be_measured_again_and_run_again(small: ReluifyOptions) -> None:
    first = reluify(replace(small, keep=True))
    again = reluify(replace(small, keep=True, resume=True))
    assert again.log == first.log and again.measured == first.measured
    assert without_times(reluify(small).log) == without_times(first.log)


# ---- Full disks and kills ------------------------------------------------------------------------------------------


@contextmanager
def files_up_to(n_bytes: int) -> Iterator[None]:
    """No file can be larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_at(n_bytes: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_full_disk_under_the_checkpoint_keeps_the_one_before(
    small: ReluifyOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reluify_run, "_SAVE_SECONDS", 0.0)  # before every step
    folder = small.out.with_name("out.reluify")
    states = []

    def each(run: Any) -> None:
        states.append((folder / "checkpoint.pt").read_bytes())
        if run.state.step == 3:
            full_at(100_000)()

    with (
        files_up_to(1 << 40),
        pytest.raises(OSError, match=r"checkpoint\.pt: it could not be written; expected room for it on the disk"),
    ):
        reluify(small, each=each)
    assert [path.name for path in folder.iterdir()] == ["checkpoint.pt"]
    assert (folder / "checkpoint.pt").read_bytes() == states[-1]
    assert not small.out.exists() and not small.plan.exists()
    resumed = reluify(replace(small, resume=True))
    rows = rows_of(small.out)
    assert without_times(resumed.log) == without_times(reluify(small).log) and rows_of(small.out) == rows


def test_full_disk_at_the_first_checkpoint_leaves_nothing(small: ReluifyOptions, tmp_path: Path) -> None:
    with files_up_to(100_000), pytest.raises(OSError, match="could not be written"):
        reluify(small, each=stop_after(2))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("stage, n_bytes", [("writing", 100_000), ("counting", 500)])
def test_full_disk_under_the_output_keeps_the_old_one(small: ReluifyOptions, stage: str, n_bytes: int) -> None:
    reluify(small)
    old = [path.read_bytes() for path in (small.out, small.plan)]
    other = replace(small, activation="drelu")
    with files_up_to(1 << 40), pytest.raises(OSError) as caught:
        reluify(other, Seen(at={stage: full_at(n_bytes)}))
    assert caught.value.errno == errno.EFBIG
    assert [path.read_bytes() for path in (small.out, small.plan)] == old
    reluify(replace(other, resume=True))
    assert read_plan(small.plan).activation == "drelu" and read_plan(small.plan).open_base()


def test_full_disk_under_hidden_states_is_an_error(text: Path, tmp_path: Path) -> None:
    options = grouped(text, tmp_path)

    def each(run: Any) -> None:
        if run.state.step == 4:
            full_at(22 * N_CTX * 64 * 4)()  # all but the header

    with files_up_to(1 << 40), pytest.raises(OSError) as caught:
        reluify(options, each=each)
    assert caught.value.errno == errno.EFBIG
    assert not list(tmp_path.rglob("*.npy*")) and not options.out.exists()


# ---- Options and models that can't be used ---------------------------------------------------------------------------


def refusal(options: ReluifyOptions, expected: str, kind: type[Exception] = OptionError) -> None:
    """The run is refused before it leaves anything."""
    before = names(options.out.parent)
    with pytest.raises(kind, match=expected) as caught:
        reluify(options, each=lambda run: pytest.fail("it trains"))
    assert "\n" not in str(caught.value)
    assert names(options.out.parent) == before


def test_an_earlier_result_is_gone_on_from_end_to_end(small: ReluifyOptions, tmp_path: Path) -> None:
    first = replace(small, steps=40)
    reluify(first)
    again = replace(small, out=tmp_path / "again.gguf", start=small.out)
    seen = Seen()
    reluify(again, seen)
    assert {entry["stage"] for entry in seen.entries} == {"end to end"}
    tokens = torch.tensor([TOKENS])
    teacher, before, after = (
        forward(graph, tokens) for graph in (Graph(BaseModel(small.model)), graph_of(first), graph_of(again))
    )
    assert divergence(teacher, after) < 1.05 * divergence(teacher, before)
    with pytest.raises(KeyboardInterrupt):
        reluify(replace(again, keep=True), each=stop_after(1))
    with pytest.raises(OptionError, match=r"resume: .* was made with start \w{16}; this run has none"):
        reluify(replace(again, start=None, resume=True))


def test_starts_that_do_not_fit_are_refused(small: ReluifyOptions, model: Path) -> None:
    folder = model.parent
    refusal(replace(small, start=model), "model.gguf: there is no plan beside it; expected one, which says", PlanError)
    plan = tiny_models.write_tiny_plan(model, folder / "model.powerinfer.gguf", activation="relu")
    refusal(
        replace(small, activation="drelu", start=plan), "has activation relu; expected drelu; pass --activation relu"
    )
    wide = tiny_models.write_tiny_model(folder / "wide.gguf", n_layer=2, n_ff=128)
    tiny_models.write_tiny_plan(wide, folder / "wide.powerinfer.gguf", activation="relu")
    refusal(replace(small, start=wide), "wide.gguf has another shape than .*model.gguf")
    same = tiny_models.write_tiny_model(folder / "same.gguf", n_layer=2, n_ff=96, seed=3)
    tiny_models.write_tiny_plan(same, folder / "same.powerinfer.gguf", activation="relu")
    refusal(replace(small, start=same, out=same), "out: .* belongs to the model itself; expected another file")


def test_windows_longer_than_the_models_context_are_refused(small: ReluifyOptions) -> None:
    refusal(replace(small, ctx=1025, tokens=10**6), "ctx: 1025; the model was trained with 1024; pass a smaller -c")


def test_too_little_text_is_refused(small: ReluifyOptions, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("the model")
    refusal(
        replace(small, text=(short,)),
        r"text: 1 files hold \d tokens, 0 whole windows of 32 are used; expected at least 8",
        FormatError,
    )
    refusal(replace(small, tokens=7 * N_CTX), "7 whole windows of 32 are used; expected at least 8", FormatError)
    refusal(replace(small, check=(short,)), "0 whole windows of 32 are used; expected at least 1", FormatError)
    refusal(replace(small, check=(tmp_path / "none.txt",)), "none.txt: No such file", FormatError)


def test_output_that_would_replace_the_model_is_refused(small: ReluifyOptions, model: Path) -> None:
    plan = tiny_models.write_tiny_plan(model, model.with_name("plan.powerinfer.gguf"), activation="relu")
    belongs = "out: .* belongs to the model itself; expected another file; pass another -o"
    refusal(replace(small, out=model), belongs)
    refusal(replace(small, model=plan, out=model), belongs)
    refusal(replace(small, model=plan, out=plan.with_name("plan.gguf")), belongs)
    parts = tiny_models.write_tiny_model(model.with_name("parts.gguf"), n_layer=2, split_max_tensors=9)
    refusal(replace(small, model=parts, out=Path(str(parts).replace("00001-of", "00002-of"))), belongs)


def test_models_that_cannot_become_sparse_are_refused(small: ReluifyOptions, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    experts = tiny_models.write_tiny_model(folder / "experts.gguf", n_layer=2, n_expert=4)
    refusal(replace(small, model=experts), "layer 0 has no plain FFN: experts", FormatError)
    refusal(
        replace(small, model=tiny_models.write_tiny_model(folder / "mpt.gguf", "mpt")),
        "architecture 'mpt' has no graph",
        FormatError,
    )
    embedded = tiny_models.write_tiny_plan(small.model, folder / "all.powerinfer.gguf", embedded=True)
    refusal(replace(small, model=embedded), "the model is embedded in its plan; expected a GGUF beside its plan")
    tiny_models.write_tiny_plan(small.model, activation="relu", activation_param=0.1)
    refusal(small, r"its activation has a cut \(FATReLU\); expected one without")


@pytest.mark.parametrize("row_type", ["iq2_xxs", "iq1_s"])
def test_rows_that_need_an_importance_matrix_are_refused_before_the_training(
    small: ReluifyOptions, row_type: str
) -> None:
    model = tiny_models.write_tiny_model(small.model, n_layer=2, n_embd=256, n_ff=256)
    small = replace(small, model=model)
    refusal(
        replace(small, qat=row_type), f"{row_type.upper()} needs an importance matrix; expected a type that doesn't"
    )
    base = BaseModel(model)
    kind = GGMLQuantizationType[row_type.upper()]
    tensor = base.tensor("blk.1.ffn_up.weight")
    zeros = TensorSource.matrix(
        tensor.name, kind, 256, 256, lambda: np.zeros(256 * GGML_QUANT_SIZES[kind][1], np.uint8)
    )
    write_changed(base, model.with_name("iq.gguf"), {}, [zeros], lambda *_: None)
    small = replace(small, model=model.with_name("iq.gguf"))
    refusal(small, rf"iq\.gguf: row type: {kind.name} needs an importance matrix; .* Pass --qat with one\.")
    assert reluify(replace(small, qat="q8_0", steps=1)).measured


def test_a_loss_that_is_no_number_ends_the_run(small: ReluifyOptions) -> None:
    with pytest.raises(
        OptionError,
        match=r"lr: the loss of step \d+ \((local|blended|end to end)\) is (nan|inf); expected a number; pass",
    ):
        reluify(replace(small, lr=1e30, end_to_end_lr=1e30))
    assert not small.out.exists()


KILLED = """
import os, signal, sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
import torch
from powerinfer_py.tools import profile_activations, reluify_model, reluify_run

weight = torch.ones(1, requires_grad=True)  # what is loaded late is loaded once, before the children
weight.sum().backward()
torch.optim.Adam([weight], fused=True).step()
model, text, out = map(Path, sys.argv[1:4])
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
save, rename = torch.save, Path.replace

def half(values, path):
    save(values, path)
    with open(path, "r+b") as file:
        file.truncate(1000)
    die()

def between(path, target):
    rename(path, target)
    die()

def patch(point):
    def report(run, entry):
        if point == "training" and run.state.step == 4:
            die()
        if point == "checkpoint" and run.state.step == 4:
            torch.save = half
    if point == "renaming":
        Path.replace = between

    @contextmanager
    def steps(what, n):
        yield lambda text=None: what == point and die()

    return steps, report

reluify_run._SAVE_SECONDS = 0.0
for point in sys.argv[4:]:
    child = os.fork()
    if child == 0:
        steps, report = patch(point)
        folder = out / point
        options = reluify_model.ReluifyOptions(model, folder / "out.gguf", (text,), activation="drelu", steps=6, tokens=768, ctx=32, batch=2, threads=1, dtype="f32")
        reluify_model.reluify(options, steps, report, print)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, point
"""


def test_a_killed_run_leaves_the_old_output_and_a_whole_checkpoint(small: ReluifyOptions, tmp_path: Path) -> None:
    points = ("training", "checkpoint", "writing", "counting", "measuring", "renaming")
    reluify(small)
    old = [path.read_bytes() for path in (small.out, small.plan)]
    for point in points:
        (tmp_path / point).mkdir()
        for path in (small.out, small.plan):
            shutil.copy(path, tmp_path / point)
    command = [sys.executable, "-c", KILLED, small.model, small.text[0], tmp_path, *points]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=600, env=environment)
    new = replace(small, activation="drelu")
    reluify(new)
    rows = rows_of(small.out)
    for point in points:
        options = replace(new, out=tmp_path / point / "out.gguf", resume=True)
        if point == "renaming":  # between the two: the old model isn't run with the new plan
            assert options.out.read_bytes() == old[0] and options.plan.read_bytes() != old[1]
            with pytest.raises(PlanError, match="the plan was made for"):
                read_plan(options.plan).open_base()
        elif point == "measuring":
            assert rows_of(options.out) == rows and read_plan(options.plan).open_base()
        else:
            assert [path.read_bytes() for path in (options.out, options.plan)] == old, point
        state = torch.load(tmp_path / point / "out.reluify" / "checkpoint.pt", weights_only=True)["state"]
        assert (state["step"], state["i_group"]) == ((3, 0) if point in ("training", "checkpoint") else (0, 1))
        seen = Seen()
        reluify(options, seen)
        assert seen.notes == [] and rows_of(options.out) == rows, point
        assert read_plan(options.plan).open_base()
        assert names(tmp_path / point) == {"out.gguf", "out.powerinfer.gguf"}


# ---- Command line --------------------------------------------------------------------------------------------------


def command(options: ReluifyOptions, *more: object) -> list[str]:
    texts = [str(path) for path in options.text]
    sizes = f"--tokens {options.tokens} --ctx {N_CTX} --batch 2 --threads 1 --dtype f32".split()
    return ["reluify", str(options.model), "--text", *texts, "-o", str(options.out), *sizes, *map(str, more)]


def test_command_prints_checks_and_result_and_draws_them(
    small: ReluifyOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(small, "--steps", 5, "--check", small.text[0], "--lr", "1e-3")) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    check = r"0:00:\d\d {} +\d+\.\d{{3}} M tokens, loss [\d.]+, perplexity [\d.]+ \([\d.]+ x\), density [\d.]+ \([\d.]+ to [\d.]+; wished [\d.]+\)"
    for line, stage in zip(lines[:5], ("local", *["(?:blended|end to end)"] * 3, "end to end")):
        assert re.fullmatch(check.format(stage), line), line
    assert re.fullmatch(rf"{small.out}: \d\.\d MB, relu, density 0\.\d+; plan: {small.plan}", lines[5])
    for line, name in zip(lines[6:8], ("held-out windows of the text", "words.txt")):
        assert re.fullmatch(rf"perplexity, {name}: [\d.]+ -> [\d.]+ \([\d.]+ x\)", line), line
    assert lines[8] == f"0.00 hours. Next: powerinfer train {small.out}, powerinfer run {small.out}."
    assert lines[9] == f"picture: {small.out.with_suffix('.png')}" and len(lines) == 10
    assert small.out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not [line for line in err.splitlines() if line.startswith("powerinfer")]
    assert names(small.out.parent) == {"in", "out.gguf", "out.powerinfer.gguf", "out.png"}


def test_defaults_of_the_command_are_those_of_its_options() -> None:
    parser = argparse.ArgumentParser()
    reluify_model.add_arguments(parser)
    args = vars(parser.parse_args(["m.gguf", "--text", "t.txt", "-o", "out.gguf"]))
    for option in fields(ReluifyOptions):
        if option.default is not MISSING and option.name != "text":  # which the command needs
            expected = list(option.default) if isinstance(option.default, tuple) else option.default
            assert args[option.name] == expected, option.name


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["-o", "out.bin"], "out: out.bin; expected a name that ends in .gguf, for a stock GGUF; rename it."),
        (["-o", "x.powerinfer.gguf"], "expected a name that ends in .gguf, for a stock GGUF; rename it."),
        (["-o", "none/out.gguf"], "out: none isn't a folder; expected one; make it first."),
        (["--ctx", "3"], "ctx: 3; expected at least 4 tokens per window"),
        (["--qat", "q9_9"], "row type: found 'q9_9'; expected a ggml weight type such as q4_0"),
        (["--activation", "gelu"], "invalid choice: 'gelu'"),
        (["--density", "0"], "'0'; expected a share between 0 and 1"),
        (["--density", "nan"], "'nan'; expected a share between 0 and 1"),
        (["--hours", "0"], "hours: 0.0; expected more than 0; pass another number."),
        (["--hours", "inf"], "hours: inf; expected more than 0"),
        (["--hours", "1e-3"], "hours: 0.001; writing and measuring the result takes"),
        (["--lr", "-1"], "lr: -1.0; expected more than 0"),
        (["--end-to-end-lr", "nan"], "end-to-end-lr: nan; expected more than 0"),
        (["--memory", "nan"], "memory: nan; expected more than 0"),
        (["--memory", "1e-6"], "memory: 0.0 GiB; one layer needs"),
        (["--seed", "-1"], "seed: -1; expected 0 or more; pass another number."),
        (["--steps", "0"], "0; expected at least 1"),
        (["--batch", "x"], "invalid count_of value: 'x'"),
        (["--text", "none.txt"], "none.txt: No such file or directory; expected a text file; check the path."),
        (["--plot", "x.png", "--no-plot"], "plot: --plot and --no-plot were given; expected one of them"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_options_are_one_line_and_leave_nothing(
    small: ReluifyOptions,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(small.out.parent)
    assert cli.main(command(small, *more)) == 1
    out, err = capsys.readouterr()
    said = [line for line in err.splitlines() if line.startswith("powerinfer: ") and "note:" not in line]
    assert out == "" and len(said) == 1 and expected in said[0]
    assert names(Path()) == {"in"}


@pytest.mark.parametrize("name", ["none.gguf", "text.gguf", "empty"])
def test_what_is_no_model_is_one_line(small: ReluifyOptions, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder = small.model.parent
    (folder / "text.gguf").write_text("no model at all, but a text that is long enough")
    (folder / "empty").mkdir()
    assert cli.main(command(replace(small, model=folder / name))) == 1
    err = capsys.readouterr().err
    assert err.startswith("powerinfer: ") and err.count("\n") == 1 and name in err
    assert names(small.out.parent) == {"in"}


@pytest.mark.parametrize(("package", "extra"), [("torch", "train"), ("matplotlib", "plot")])
def test_missing_packages_are_named(small: ReluifyOptions, package: str, extra: str) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None; from powerinfer_py import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    found = subprocess.run([sys.executable, "-c", script, *command(small)], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert f"{package} isn't installed; expected it; pip install 'powerinfer_py[{extra}]'" in found.stderr
    assert found.stderr.count("\n") == 1


def test_ctrl_c_ends_the_command_with_130_and_resume_goes_on(small: ReluifyOptions) -> None:
    start = [sys.executable, "-m", "powerinfer_py.cli", *command(small, "--no-plot", "--steps", 10**6)]
    process = subprocess.Popen(
        start,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert "local" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130 and "Traceback" not in err
    assert (
        err
        == f"powerinfer: note: stopped; what was reached is kept in {small.out.with_name('out.reluify')}; the same command with --resume goes on.\n"
    )
    assert names(small.out.parent) == {"in", "out.reluify"}
    assert cli.main(command(small, "--no-plot", "--steps", 1, "--resume")) == 0
    assert names(small.out.parent) == {"in", "out.gguf", "out.powerinfer.gguf"}


@pytest.mark.parametrize(
    ("n_bytes", "expected"), [(50_000, "layer-0.pt: it could not be written; "), (100_000, "File too large")]
)
def test_full_disk_ends_the_command_with_1(
    small: ReluifyOptions, capsys: pytest.CaptureFixture[str], n_bytes: int, expected: str
) -> None:
    with files_up_to(n_bytes):
        assert cli.main(command(small, "--no-plot", "--steps", 2)) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("powerinfer")]
    assert len(said) == 1 and expected in said[0]
    assert not small.out.exists() and not small.plan.exists()


# ---- What it shares with other verbs -------------------------------------------------------------------------------


def test_a_vocabulary_without_weights_reads_text_as_the_whole_model_does(smollm2: Path, model: Path) -> None:
    for path, bos in ((smollm2, None), (model, 1)):
        with (
            Vocabulary(path, n_ctx=N_CTX) as vocabulary,
            Runner(None, path, n_ctx=N_CTX, n_threads=1, note=print) as runner,
        ):
            for special in (False, True):
                found = vocabulary.tokenize("<|im_start|>user\na text</s>", special)
                assert (
                    np.array_equal(found, runner.tokenize("<|im_start|>user\na text</s>", special)) and len(found) > 3
                )
            assert vocabulary.bos == runner.bos == bos
            vocabulary.close()


def test_a_model_without_a_vocabulary_is_refused(small: ReluifyOptions, tmp_path: Path) -> None:
    base = BaseModel(small.model)
    key = "tokenizer.ggml.model"
    write_changed(base, tmp_path / "in" / "none.gguf", {key: string_entry(key, "no_vocab")}, [], lambda *_: None)
    refusal(
        replace(small, model=tmp_path / "in" / "none.gguf"),
        "it has no vocabulary; expected one, to read text",
        PlanError,
    )


def test_signals_end_a_run_after_its_step_and_get_their_handlers_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for number in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(ZeroDivisionError), interruptible() as stopped:
            assert not stopped()
            signal.raise_signal(number)
            assert stopped()
            1 / 0  # noqa: B018
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
