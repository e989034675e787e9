"""Models without the neurons that matter least: which ones go, what llama.cpp and our device make of the rest, its plan, its recovery."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
import tiny_models
import torch
from test_convert import EXACT_OPTIONS
from torch.nn import functional as F

from powerinfer_py import Llama, cli
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.format import SIDECAR_SUFFIX, BaseModel, bare_plan, read_plan
from powerinfer_py.tools import prune_model
from powerinfer_py.tools.neuron_impact import (
    LEAST_KEPT,
    kept_neurons,
    magnitude_impacts,
    row_norms,
    stored_impacts,
    taylor_impacts,
)
from powerinfer_py.tools.prune_model import PruneOptions, prune
from powerinfer_py.tools.rewrite_gguf import TensorSource, write_changed
from powerinfer_py.tools.terminal import progress_steps
from powerinfer_py.tools.text_runner import Vocabulary
from powerinfer_py.tools.torch_graph import Graph

TOKENS = [1, 300, 12, 77, 260, 5, 371, 42, 99, 150, 33, 8]
# Relative to the largest logit; what is left is the order of summation.
TOLERANCE = 1e-5
# llama.cpp looks GELU up in a table, and a sum at the edge of two of its values may fall to either.
GELU_TOLERANCE = 1e-3
# llama.cpp rounds what down reads to the type of its rows' partner (Q8_0), which the reference in float32 doesn't.
QUANTIZED_TOLERANCE = 0.03
N_LAYER, N_FF = 2, 128
WORDS = "rows of a model that nobody needs are left out and the rest learns to do without them".split()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    random = np.random.default_rng(0)
    path.write_text(" ".join(random.choice(WORDS, 500)) + "\n", encoding="ascii")
    return path


@pytest.fixture
def own(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`own(arch, **options)`: a tiny model in the test's own folder, so that a plan may lie beside it."""

    def copy(arch: str = "llama", **options: Any) -> Path:
        made = tiny_model(arch, **{"n_layer": N_LAYER, "n_ff": N_FF, **options})
        return Path(shutil.copy(made, tmp_path / "model.gguf"))

    return copy


def cut(
    model: Path,
    drop: float = 0.25,
    *,
    notes: list[str] | None = None,
    report: Callable[[Any, Any], None] = lambda run, entry: None,
    **options: Any,
) -> prune_model.Pruned:
    """Prunes to out.gguf beside the model."""
    options = {"ctx": 16, "batch": 2, "threads": 1, "dtype": "f32", **options}
    made = PruneOptions(model=model, out=model.with_name("out.gguf"), drop=drop, **options)
    said = [] if notes is None else notes
    with progress_steps() as steps:
        return prune(made, steps, report, said.append)


def stock_logits(path: Path) -> np.ndarray:
    """(n_tokens, n_vocab) of llama.cpp alone."""
    llama = llama_cpp.Llama(str(path), **EXACT_OPTIONS)
    try:
        llama.eval(TOKENS)
        return llama.scores[: len(TOKENS)].copy()
    finally:
        llama.close()


def our_logits(path: Path, sparsity: str) -> np.ndarray:
    """(n_tokens, n_vocab) of our device, by the plan beside the model."""
    with Llama(str(path), sparsity=sparsity, **EXACT_OPTIONS) as llama:
        llama.eval(TOKENS)
        return llama.scores[: len(TOKENS)].copy()


def torch_logits(path: Path, activation: str | None = None, tokens: Sequence[int] = TOKENS) -> np.ndarray:
    graph = Graph(BaseModel(path))
    graph.activation = activation or graph.activation
    with torch.no_grad():
        return graph.forward(torch.tensor([tokens]))[0].numpy()


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def widths(path: Path) -> list[int]:
    base = BaseModel(path)
    return [base.ffn(i)["down"].ne[0] for i in range(base.n_layer)]


def neurons_of(small: Path, large: Path) -> list[np.ndarray]:
    """For each layer the neurons of `large` that `small` has, found by their rows of up, byte for byte."""
    found = []
    a, b = BaseModel(small), BaseModel(large)
    for i in range(a.n_layer):
        name = f"blk.{i}.ffn_up.weight"
        rows = {row.tobytes(): k for k, row in enumerate(b.raw(name).reshape(b.tensor(name).ne[1], -1))}
        found.append(np.array([rows[row.tobytes()] for row in a.raw(name).reshape(a.tensor(name).ne[1], -1)]))
    return found


def without(model: Path, kept: Sequence[np.ndarray], out: Path) -> Path:
    """The model with the down columns of all other neurons 0: F32."""
    base, sources = BaseModel(model), []
    for i, neurons in enumerate(kept):
        name = f"blk.{i}.ffn_down.weight"
        values = base.rows_f32(name).copy()
        values[:, np.setdiff1d(np.arange(values.shape[1]), neurons)] = 0.0
        data = values.reshape(-1).view(np.uint8)
        kind = gguf.GGMLQuantizationType.F32
        sources.append(TensorSource.matrix(name, kind, *values.shape, lambda data=data: data))
    write_changed(base, out, {}, sources, lambda n, n_all: None)
    return out


# ---- Which neurons go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [(2, 2, 2), (4, 4, 4), (2, 4, 2)])
def test_the_units_of_least_impact_of_all_layers_go(units: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    impacts = [random.random(8) * scale for scale in (1.0, 3.0, 0.2)]
    kept = kept_neurons(impacts, 8 / 24, units, even=False)
    assert sum(map(len, kept)) == 16
    lost = sum(impact.sum() - impact[rows].sum() for impact, rows in zip(impacts, kept))
    best = np.inf
    choices = [range(0, 7, unit) for unit in units]
    for n in itertools.product(*choices):
        if sum(n) == 8:
            best = min(best, sum(np.sort(impact)[:k].sum() for impact, k in zip(impacts, n)))
    # a rank by mean impact is the best choice where units are equal
    assert lost == pytest.approx(best) or (len(set(units)) > 1 and lost < 1.2 * best)
    assert all((8 - len(rows)) % unit == 0 and np.all(np.diff(rows) > 0) for rows, unit in zip(kept, units))


def test_every_layer_keeps_a_part() -> None:
    impacts = [np.full(64, 1e-3), np.arange(64.0) + 1]
    kept = kept_neurons(impacts, 0.5, [4, 4], even=False)
    assert [len(rows) for rows in kept] == [64 * LEAST_KEPT, 48]
    kept = kept_neurons(impacts, 0.5, [4, 4], even=True)
    assert [len(rows) for rows in kept] == [32, 32] and kept[1].tolist() == list(range(32, 64))


@pytest.mark.parametrize("even", [False, True])
def test_too_much_and_too_little_are_refused(even: bool) -> None:
    impacts = [np.ones(64)] * 2
    with pytest.raises(OptionError, match=r"drop: 80.00%; expected at most 75%"):
        kept_neurons(impacts, 0.8, [32, 32], even=even)
    with pytest.raises(OptionError, match=rf"0.10% of 128 neurons; expected {'50' if even else '25'}.00% or more"):
        kept_neurons(impacts, 0.001, [32, 32], even=even)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_stored_impact_is_frequency_times_norm_or_norms(own: Callable[..., Path], arch: str) -> None:
    model = own(arch)
    base = BaseModel(model)
    (impact, _), from_weights = stored_impacts(base, None)
    norms = row_norms(base, 0)
    names = ("gate", "up") if arch == "llama" else ("up",)
    product = np.linalg.norm(base.rows_f32("blk.0.ffn_down.weight"), axis=0).astype(float)
    for name in names:
        product *= np.linalg.norm(base.rows_f32(f"blk.0.ffn_{name}.weight"), axis=1)
    assert np.allclose(impact, product / product.mean(), rtol=1e-5) and "alone" in from_weights
    plan = read_plan(tiny_models.write_tiny_plan(model, order_seed=2, frequency=True))
    (impact, _), from_plan = stored_impacts(base, plan)
    layer = plan.layers[0]
    expected = np.empty(N_FF)
    for position, neuron in enumerate(layer.neuron_order):
        expected[neuron] = layer.neuron_frequency[position] * norms["down"][neuron]
    assert np.allclose(impact, expected / expected.mean()) and "frequencies" in from_plan


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_measured_impacts_are_what_a_missing_neuron_changes(own: Callable[..., Path], activation: str) -> None:
    graph = Graph(BaseModel(own()))
    graph.activation = activation
    random = np.random.default_rng(3)
    windows = random.integers(3, 384, (3, 10)).astype(np.int32)
    magnitude = magnitude_impacts(graph, windows, 2, lambda: None)
    taylor = taylor_impacts(graph, windows, lambda: None)

    def run(window: np.ndarray, i_layer: int, neuron: int, gate: float) -> tuple[torch.Tensor, float]:
        """Output of the layer, and the loss."""
        tokens = torch.from_numpy(window[None].astype(np.int64))
        h = graph.embed(tokens)
        for i in range(graph.n_layer):
            after, x = graph.attend(i, h)
            products = graph.products(i, x)
            if i == i_layer:
                products[..., neuron] *= gate
            h = graph.add_ffn(after, graph.down(i, products))
            if i == i_layer:
                found = h[0].double()
        logits = (graph.last_norm(h) @ graph.head().T)[0, :-1].double()
        return found, float(F.cross_entropy(logits, tokens[0, 1:]))

    with torch.no_grad():
        for i, neuron in ((0, 5), (1, 70)):
            shares, slopes = [], []
            for window in windows:
                whole, _ = run(window, i, neuron, 1.0)
                part, _ = run(window, i, neuron, 0.0)
                shares.append(((whole - part).norm(dim=-1) / whole.norm(dim=-1)).square())
                slopes.append(abs(run(window, i, neuron, 1.5)[1] - run(window, i, neuron, 0.5)[1]))
            assert magnitude[i][neuron] == pytest.approx(float(torch.cat(shares).mean().sqrt()), rel=1e-3)
            assert taylor[i][neuron] == pytest.approx(np.mean(slopes), rel=0.05, abs=2e-4)


# ---- The file --------------------------------------------------------------------------------------------------------


def write_openelm(path: Path) -> Path:
    """A tiny model of that architecture, with an n_ff of each layer."""
    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "openelm")
    n_embd, n_head, sizes = 64, 2, [160, 128]
    writer.add_context_length(64)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(len(sizes))
    writer.add_feed_forward_length(sizes)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head)
    writer.add_key_length(n_embd // n_head)
    writer.add_value_length(n_embd // n_head)
    writer.add_layer_norm_rms_eps(1e-5)
    tiny_models._add_vocab(writer, 384)

    def matrix(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1])))

    matrix("token_embd.weight", 384, n_embd)
    for i, n_ff in enumerate(sizes):
        matrix(f"blk.{i}.attn_qkv.weight", 3 * n_embd, n_embd)
        matrix(f"blk.{i}.attn_output.weight", n_embd, n_embd)
        matrix(f"blk.{i}.ffn_gate.weight", n_ff, n_embd)
        matrix(f"blk.{i}.ffn_up.weight", n_ff, n_embd)
        matrix(f"blk.{i}.ffn_down.weight", n_embd, n_ff)
        for name, n in (("attn_norm", 64), ("ffn_norm", 64), ("attn_q_norm", 32), ("attn_k_norm", 32)):
            writer.add_tensor(f"blk.{i}.{name}.weight", np.ones(n, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(n_embd, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "name, options, architecture, uneven",
    [
        ("llama", {"bias": True}, "deci", True),
        ("llama", {"n_kv": 1, "n_head": 4, "tied": True}, "deci", True),
        ("llama even", {}, "llama", False),
        ("gpt2", {}, "gpt2", False),
        ("falcon", {}, "falcon", False),
        ("openelm", {}, "openelm", True),
    ],
    ids=str,
)
def test_stock_runs_the_smaller_file_as_the_model_without_the_neurons(
    own: Callable[..., Path], tmp_path: Path, name: str, options: dict[str, Any], architecture: str, uneven: bool
) -> None:
    arch, _, even = name.partition(" ")
    model = write_openelm(tmp_path / "model.gguf") if arch == "openelm" else own(arch, seed=3, **options)
    scaled = BaseModel(model)
    # layers that differ, so that unequal numbers go
    plan = tmp_path / f"model{SIDECAR_SUFFIX}"
    tiny_models.write_tiny_plan(model, plan, activation=bare_plan(model).activation, order_seed=4, frequency=True)
    notes: list[str] = []
    result = cut(model, 0.25, even=bool(even), notes=notes)
    out = BaseModel(model.with_name("out.gguf"))
    assert out.architecture == architecture and result.n_after == widths(out.path) and result.n_before == widths(model)
    assert sum(result.n_before) - sum(result.n_after) == 64 and all(n % 32 == 0 for n in result.n_after)
    key = out.files[0].values[f"{architecture}.feed_forward_length"]
    assert key.is_array == uneven
    assert any("n_ff for all layers" in note for note in notes) == (arch != "openelm" and not even)
    kept = neurons_of(out.path, model)
    assert [len(rows) for rows in kept] == result.n_after
    expected = stock_logits(without(model, kept, tmp_path / "without.gguf"))
    assert distance(stock_logits(out.path), expected) < (
        TOLERANCE if "silu" in read_plan(plan).activation else GELU_TOLERANCE
    )
    assert distance(expected, stock_logits(model)) > 10 * GELU_TOLERANCE
    for i, rows in enumerate(kept):
        for tensor in ("ffn_gate.weight", "ffn_up.weight", "ffn_gate.bias", "ffn_up.bias"):
            found = out.tensor(f"blk.{i}.{tensor}")
            if found:
                whole = scaled.raw(found.name).reshape(result.n_before[i], -1)
                assert np.array_equal(out.raw(found.name), whole[rows].reshape(-1))
    others = [n for n in scaled.tensors if ".ffn_" not in n]
    assert all(np.array_equal(scaled.raw(n), out.raw(n)) for n in others)


@pytest.mark.parametrize(
    "row_type, n_ff, unit", [("Q4_0", 128, 32), ("F16", 128, 32), ("Q4_K", 1024, 256), ("F32", 90, 1)]
)
def test_rows_of_down_stay_whole_blocks_of_their_type(
    own: Callable[..., Path], text: Path, row_type: str, n_ff: int, unit: int
) -> None:
    model = own(row_type=row_type, n_ff=n_ff)
    cut(model, 0.375, text=(text,))
    out = model.with_name("out.gguf")
    a, b = BaseModel(model), BaseModel(out)
    assert {t.type for i in range(N_LAYER) for t in b.ffn(i).values()} == {
        t.type for i in range(N_LAYER) for t in a.ffn(i).values()
    }
    sizes = widths(out)
    assert all((n_ff - n) % unit == 0 for n in sizes) and sum(sizes) < 2 * n_ff
    assert abs(sum(sizes) - 0.625 * 2 * n_ff) <= unit / 2
    found = stock_logits(out)
    tolerance = TOLERANCE if row_type == "F32" else QUANTIZED_TOLERANCE
    assert distance(found, torch_logits(out)) < tolerance
    if row_type in ("F16", "F32"):  # nothing is rounded anew
        for i, rows in enumerate(neurons_of(out, model)):
            name = f"blk.{i}.ffn_down.weight"
            assert np.array_equal(b.rows_f32(name), a.rows_f32(name)[:, rows])


# ---- The plan --------------------------------------------------------------------------------------------------------


def test_the_plan_is_that_of_the_neurons_that_are_left(
    own: Callable[..., Path], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = own(seed=7)
    old = read_plan(
        tiny_models.write_tiny_plan(
            model,
            activation="relu",
            order_seed=1,
            frequency=True,
            predictor="mlp",
            rank=8,
            threshold=1e-30,
            ffn_down_t="F32",
            loss=0.01,
            candidate_density=0.5,
        )
    )
    result = cut(model, 0.25, text=(text,), impact="taylor")
    out = model.with_name("out.gguf")
    plan = read_plan(model.with_name("out" + SIDECAR_SUFFIX))
    assert plan.activation == "relu" and plan.base_file == "out.gguf" and plan.loss is None
    assert plan.open_base().path == out and result.plan.path == model.with_name("out" + SIDECAR_SUFFIX)
    assert len(set(result.n_after)) == 2 or result.n_after == [96, 96]
    for neurons, before, after in zip(neurons_of(out, model), old.layers, plan.layers):
        assert after.n_ff == len(neurons)
        positions = {int(row): p for p, row in enumerate(before.neuron_order)}
        from_old = np.array([positions[int(neurons[row])] for row in after.neuron_order])
        assert np.all(np.diff(from_old) > 0)  # hot first, as before
        assert np.array_equal(after.neuron_frequency, before.neuron_frequency[from_old])
        assert np.array_equal(after.fc2.data, before.fc2.data[from_old])
        assert np.array_equal(after.fc1.data, before.fc1.data)
        assert np.array_equal(after.ffn_down_t.data, before.ffn_down_t.data[from_old])
        assert after.profile_density == pytest.approx(after.neuron_frequency.mean())
        assert (after.predictor, after.threshold) == (before.predictor, before.threshold)
        ratio = before.predictor_candidate_density / before.neuron_frequency.mean()  # of candidates to active ones
        assert after.predictor_candidate_density == pytest.approx(ratio * after.profile_density, rel=1e-5)
    expected = torch_logits(out, "relu")
    for mode in ("dense", "exact", "predicted"):  # the predictors let everything through
        assert distance(our_logits(out, mode), expected) < TOLERANCE
    assert cli.main(["inspect", str(model.with_name("out" + SIDECAR_SUFFIX))]) == 0
    shown = capsys.readouterr().out
    assert "deci, 2 layers" in shown and all(f" {n} " in shown for n in result.n_after)
    (name, (before, pruned)) = result.measured[0]
    assert "held-out" in name and before > 1 and pruned > 1


# ---- Recovery --------------------------------------------------------------------------------------------------------


def divergence(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean KL of found from expected, nats per token."""
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("arch, activation", [("llama", None), ("llama", "relu"), ("gpt2", None)])
def test_recovery_brings_the_smaller_model_back_to_the_model(
    own: Callable[..., Path], text: Path, arch: str, activation: str | None
) -> None:
    model = own(arch)
    if activation:
        tiny_models.write_tiny_plan(model, activation=activation, order_seed=1, frequency=True, predictor="linear")
    notes: list[str] = []
    options = {"recover": True, "steps": 24, "text": (text,), "lr": 2e-3, "end_to_end_lr": 2e-3}
    recovered = cut(model, 0.375, notes=notes, **options)
    out, plan = model.with_name("out.gguf"), model.with_name("out" + SIDECAR_SUFFIX)
    with Vocabulary(model, n_ctx=16) as vocabulary:
        tokens = vocabulary.tokenize(text.read_text(encoding="ascii"), False)[:256].tolist()
    found = torch_logits(out, activation, tokens)
    assert [len(found) for _, found in recovered.measured] == [3]
    assert not model.with_name("out.prune").exists()
    assert plan.exists() == (activation is not None) == (recovered.plan is not None)
    if activation:
        assert any("predictors" in note for note in notes)
        assert distance(our_logits(out, "exact"), our_logits(out, "dense")) < TOLERANCE
        assert all(layer.neuron_frequency is not None for layer in read_plan(plan).layers)
    cut(model, 0.375, text=(text,))
    pruned = torch_logits(out, activation, tokens)
    expected = torch_logits(model, activation, tokens)
    assert recovered.n_after == widths(out)
    assert divergence(found, expected) < 0.8 * divergence(pruned, expected)


def test_recovery_in_groups_of_layers_and_with_rounded_rows(own: Callable[..., Path], text: Path) -> None:
    model = own(row_type="Q4_0")
    notes: list[str] = []
    cut(model, 0.25, recover=True, steps=3, text=(text,), memory=0.004, notes=notes)
    assert any("groups of layers" in note for note in notes)
    assert distance(stock_logits(model.with_name("out.gguf")), torch_logits(model.with_name("out.gguf"))) < 0.05


@pytest.mark.parametrize("ffn_down_t", [None, "Q8_0"], ids=["no plan", "plan with down rows"])
def test_recovery_learns_with_the_rows_that_will_be_written(
    own: Callable[..., Path], text: Path, ffn_down_t: str | None
) -> None:
    model = own(row_type="Q4_0")
    if ffn_down_t:
        tiny_models.write_tiny_plan(model, activation="relu", frequency=True, order_seed=1, ffn_down_t=ffn_down_t)
    students: dict[int, Any] = {}
    cut(
        model,
        recover=True,
        steps=4,
        lr=5e-3,
        text=(text,),
        report=lambda run, entry: students.update(run.distiller.students),
    )
    base = BaseModel(model.with_name("out.gguf"))
    for i, student in students.items():
        for name in ("gate", "up"):
            assert np.array_equal(base.rows_f32(f"blk.{i}.ffn_{name}.weight"), student.rounded(name).numpy())
        if ffn_down_t is None:
            assert np.array_equal(base.rows_f32(f"blk.{i}.ffn_down.weight"), student.rounded("down").numpy().T)
            continue
        layer = read_plan(model.with_name("out" + SIDECAR_SUFFIX)).layers[i]
        assert layer.ffn_down_t.row_type.name == ffn_down_t
        assert np.array_equal(layer.ffn_down_t.to_f32(), student.rounded("down").numpy()[layer.neuron_order])


def test_a_stopped_recovery_goes_on_where_it_was(own: Callable[..., Path], text: Path) -> None:
    model = own()
    options = PruneOptions(
        model=model, out=model.with_name("out.gguf"), text=(text,), drop=0.25, recover=True, steps=6, ctx=16, threads=1
    )
    stopped_at = []

    def stop(run: Any, entry: Any) -> None:
        if run.state.step == 3:
            stopped_at.append(run.state.step)
            os.kill(os.getpid(), signal.SIGINT)

    notes: list[str] = []
    with progress_steps() as steps:
        with pytest.raises(KeyboardInterrupt):
            prune(options, steps, stop, notes.append)
        assert stopped_at == [3] and "--resume" in notes[-1]
        assert sorted(p.name for p in model.parent.iterdir()) == ["model.gguf", "out.prune"]
        first = []
        with pytest.raises(OptionError, match=r"was made with drop 0\.25; this run has 0\.5"):
            prune(replace(options, resume=True, drop=0.5), steps, stop, notes.append)
        result = prune(
            replace(options, resume=True), steps, lambda run, entry: first.append(run.state.step), notes.append
        )
    assert first[0] == 4 and result.n_after == widths(options.out)
    assert sorted(p.name for p in model.parent.iterdir()) == ["model.gguf", "out.gguf"]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, OSError(28, "No space left on device")], ids=["stop", "full disk"]
)
def test_nothing_is_left_where_writing_ends_early(
    own: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    model = own()

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(prune_model, "_columns", fail)
    with pytest.raises((KeyboardInterrupt, OSError)):
        cut(model)
    assert [p.name for p in model.parent.iterdir()] == ["model.gguf"]


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, found",
    [
        (["--drop", "0"], "'0'; expected a share between 0 and 1"),
        (["--drop", "120%"], "'120%'; expected a share between 0 and 1"),
        (["--drop", "ten"], "'ten'; expected a share between 0 and 1"),
        (["--drop", "0.9"], "drop: 90.00%; expected at most 75%"),
        (["--drop", "0.1%"], "0.10% of 256 neurons; expected 12.50% or more"),
        (["--drop", "25%", "--recover"], "recover: given without --text; expected a text to learn from"),
        (["--drop", "25%", "--impact", "taylor"], "impact: given without --text; expected a text"),
        (["--drop", "25%", "--steps", "3"], "steps: given without --recover; expected it with that"),
        (["--drop", "25%", "--no-qat"], "qat: given without --recover"),
        (["--drop", "25%", "--plot", "x.png"], "plot: given without --recover"),
    ],
    ids=str,
)
def test_wishes_that_cant_be_met_are_refused(
    own: Callable[..., Path], capsys: pytest.CaptureFixture[str], flags: list[str], found: str
) -> None:
    model = own()
    assert cli.main(["prune", str(model), "-o", str(model.with_name("out.gguf")), *flags]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert found in said, said
    assert [p.name for p in model.parent.iterdir()] == ["model.gguf"]


def test_models_without_plain_blocks_are_refused(own: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="layer 0 has no plain FFN: experts"):
        cut(own(n_expert=4))
    model = own(bias=True)
    model.write_bytes(model.read_bytes().replace(b"blk.1.ffn_up.bias", b"blk.1.ffn_up.scal"))
    with pytest.raises(PlanError, match=r"layer 1 has no plain FFN: blk\.1\.ffn_up\.scal; expected up, down"):
        cut(model)
    model = own()
    packed = tiny_models.write_tiny_plan(model, tmp_path / f"packed{SIDECAR_SUFFIX}", embedded=True)
    with pytest.raises(OptionError, match="the model is embedded in its plan; expected a GGUF beside its plan"):
        cut(packed)


def test_a_plan_of_another_model_isnt_left_beside(own: Callable[..., Path]) -> None:
    model = own()
    plan = tiny_models.write_tiny_plan(model, model.with_name("out" + SIDECAR_SUFFIX))
    with pytest.raises(OptionError, match="a plan of another model; expected none"):
        cut(model)
    assert plan.exists()


def test_taylor_and_cuts_have_their_limits(own: Callable[..., Path], text: Path) -> None:
    model = own()
    with pytest.raises(OptionError, match="taylor differentiates the whole model"):
        cut(model, text=(text,), impact="taylor", memory=1e-4)
    tiny_models.write_tiny_plan(model, activation="relu", activation_param=0.1)
    with pytest.raises(OptionError, match="its activation has a cut"):
        cut(model, text=(text,))
    cut(model)
    assert all(layer.activation_param for layer in read_plan(model.with_name("out" + SIDECAR_SUFFIX)).layers)


def test_strict_refuses_an_even_cut(own: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match="--strict refuses that; pass --even"):
        cut(own("gpt2"), strict=True)


def test_the_command_says_what_became_of_the_model(
    own: Callable[..., Path], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = own()
    out = model.with_name("out.gguf")
    command = ["prune", str(model), "--drop", "25%", "-o", str(out), "--text", str(text), "-c", "16", "-t", "1"]
    assert cli.main([*command, "--recover", "--steps", "2", "--check", str(text)]) == 0
    said = capsys.readouterr()
    sizes = " ".join(map(str, widths(out)))
    assert f"n_ff 128 -> {sizes}" in said.out or "in each of 2 layers" in said.out
    assert "25.0% of the neurons left out" in said.out and "loss" in said.out and "density" not in said.out
    assert said.out.count("perplexity, ") == 2 and said.out.count(", recovered ") == 2
    assert "impact of neurons: magnitude, from" in said.err and out.with_suffix(".png").exists()
