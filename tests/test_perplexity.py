"""perplexity: figures against plain double arithmetic and stock llama.cpp's logits; modes, errors, Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import tiny_models

from powerinfer_py import cli
from powerinfer_py.errors import FormatError, OptionError, PlanError
from powerinfer_py.tools import pack_plan, perplexity, token_scores
from powerinfer_py.tools.perplexity import ModeResult, PerplexityOptions, Report
from powerinfer_py.tools.text_runner import Runner
from powerinfer_py.tools.token_scores import TokenScores

N_CTX = 32
N_CHUNKS = 6
# The same logits, by float32 exponentials in our program and by float64 ones in the reference.
FLOAT32_ERROR = 1e-6
# Stock llama.cpp against itself through another program: other batch shapes, F16 KV.
STOCK_ERROR = 1e-4


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.write_tiny_model(tmp_path / "m.gguf", n_layer=3)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = ("the river came down from the hills in spring, brown and fast. " * 20).split()
    np.random.default_rng(0).shuffle(words)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def options(model: Path, text: Path) -> PerplexityOptions:
    return PerplexityOptions(model, (text,), n_ctx=N_CTX, n_chunks=N_CHUNKS, n_threads=1)


class Stopper:
    """Steps that are counted; the one with number `at` is Ctrl-C."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.n = 0
        self.texts: list[str] = []

    @contextmanager
    def __call__(self, what: str, n: int) -> Iterator[Callable[..., None]]:
        def step(text: str | None = None) -> None:
            self.n += 1
            if text:
                self.texts.append(text)
            if self.n == self.at:
                raise KeyboardInterrupt

        yield step


def measure(options: PerplexityOptions, steps: Stopper | None = None, notes: list[str] | None = None) -> Report:
    return perplexity.measure(options, steps or Stopper(), (notes if notes is not None else []).append)


def by_mode(report: Report) -> dict[str, ModeResult]:
    return {result.mode: result for result in report.modes}


def arguments(options: PerplexityOptions, *more: str) -> list[str]:
    limits = ["-c", str(options.n_ctx), "--chunks", str(options.n_chunks), "-t", "1"]
    return ["perplexity", str(options.model), "-f", *map(str, options.files), *limits, *more]


def stock_chunks(model: Path, text: Path, add_bos: bool = True) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Chunk by chunk (n_scored, n_vocab) logits of stock llama.cpp and the tokens that follow, as llama.cpp counts them."""
    llama = llama_cpp.Llama(str(model), n_ctx=N_CTX, n_batch=N_CTX, verbose=False, logits_all=True)
    tokens = llama.tokenize(text.read_bytes().removesuffix(b"\n"), add_bos=add_bos, special=False)
    for i in range(N_CHUNKS):
        chunk = tokens[i * N_CTX : (i + 1) * N_CTX]
        llama.reset()
        llama.eval([llama.token_bos(), *chunk[1:]] if add_bos else chunk)
        yield np.array(llama.scores[N_CTX // 2 : N_CTX - 1]), np.array(chunk[N_CTX // 2 + 1 :])
    llama.close()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    values = logits.astype(np.float64)
    return values - np.log(np.exp(values).sum(1, keepdims=True))


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """As llama.cpp's program computes them."""
    mean = values.mean()
    return mean, math.sqrt(((values**2).mean() - mean**2) / (len(values) - 1))


def test_figures_equal_a_double_reference(options: PerplexityOptions) -> None:
    plan = tiny_models.write_tiny_plan(options.model, threshold=0.2)
    found = by_mode(measure(options))
    rows: dict[str, list[np.ndarray]] = {"dense": [], "threshold": []}
    following = []
    with Runner(plan, options.model, n_ctx=N_CTX, n_threads=1, note=print) as runner:
        tokens = runner.tokenize(options.files[0].read_text().removesuffix("\n"), False)
        tokens = np.append(np.int32(runner.bos), tokens)[: N_CHUNKS * N_CTX].reshape(-1, N_CTX)
        for mode in rows:
            runner.plan.set_sparsity(mode)
            for chunk in tokens:
                rows[mode].append(log_softmax(runner.decode(np.append(np.int32(runner.bos), chunk[1:]))[16:31]))
        for chunk in tokens:
            following.append(chunk[17:])
    p, q = (np.concatenate(rows[mode]) for mode in rows)
    at = np.arange(len(p)), np.concatenate(following)
    kl = (np.exp(p) * (p - q)).sum(1)
    same = (p.argmax(1) == q.argmax(1)).astype(float)
    for mode, log_p in (("dense", p), ("threshold", q)):
        nll, nll_error = mean_and_error(-log_p[at])
        assert found[mode].perplexity == pytest.approx(math.exp(nll), rel=FLOAT32_ERROR)
        assert found[mode].perplexity_error == pytest.approx(math.exp(nll) * nll_error, rel=FLOAT32_ERROR)
    change, change_error = mean_and_error(p[at] - q[at])
    result = found["threshold"]
    assert result.ratio == pytest.approx(math.exp(change), rel=FLOAT32_ERROR)
    assert result.ratio_error == pytest.approx(math.exp(change) * change_error, rel=1e-4)
    assert (result.kl, result.kl_error) == pytest.approx(mean_and_error(kl), rel=1e-4)
    assert (result.kl_median, result.kl_99) == pytest.approx(tuple(np.percentile(kl, (50, 99))), rel=1e-4)
    assert result.kl_max == pytest.approx(kl.max(), rel=1e-4)
    assert (result.same_top, result.same_top_error) == pytest.approx(mean_and_error(same))


@pytest.mark.parametrize("add_bos", [True, False])
def test_perplexity_equals_that_of_stock_logits(options: PerplexityOptions, add_bos: bool) -> None:
    if not add_bos:
        content = bytearray(options.model.read_bytes())
        key = b"tokenizer.ggml.add_bos_token"
        content[content.index(key) + len(key) + 4] = 0
        options.model.write_bytes(content)
    nll = []
    for logits, tokens in stock_chunks(options.model, options.files[0], add_bos):
        nll.append(-log_softmax(logits)[np.arange(len(tokens)), tokens])
    expected = math.exp(np.mean(nll))
    without_plan = measure(options)
    assert by_mode(without_plan)["dense"].perplexity == pytest.approx(expected, rel=STOCK_ERROR)
    tiny_models.write_tiny_plan(options.model)
    report = measure(dataclasses.replace(options, stock=True))
    found = by_mode(report)
    assert found["stock"].perplexity == pytest.approx(expected, rel=STOCK_ERROR)
    assert found["dense"].perplexity == pytest.approx(expected, rel=STOCK_ERROR)
    assert found["stock"].kl < 1e-6 and found["stock"].same_top == 1 and found["stock"].density is None
    assert report.n_scored == N_CHUNKS * (N_CTX - N_CTX // 2 - 1)


def test_dense_equals_itself_and_exact_equals_dense_on_relu(options: PerplexityOptions) -> None:
    tiny_models.write_tiny_plan(options.model, activation="relu", order_seed=1)
    report = measure(options)
    dense, exact = report.modes
    assert (dense.mode, dense.layers, dense.ratio, dense.ratio_error) == ("dense", "dense x 3", 1, 0)
    assert (dense.kl, dense.kl_max, dense.same_top, dense.same_top_error) == (0, 0, 1, 0)
    assert dense.density == dense.bytes_share == 1
    assert exact.kl < 1e-6 and exact.same_top == 1 and exact.ratio == pytest.approx(1, abs=1e-5)
    assert 0.3 < exact.density < 0.7 and exact.bytes_share < 1 and exact.candidate_density == 1


def test_harsh_thresholds_cost_quality_with_a_paired_error(options: PerplexityOptions) -> None:
    tiny_models.write_tiny_plan(options.model, threshold=0.3, product_threshold=0.5)
    dense, harsh = measure(options).modes
    assert harsh.density < 0.3
    assert harsh.kl > 4 * harsh.kl_error > 0
    assert 0 < harsh.kl_median < harsh.kl_99 <= harsh.kl_max
    assert 0 < harsh.same_top < 1 and 0 < harsh.same_top_error < 0.1
    # paired: much less than the errors of the two perplexities
    assert 0 < harsh.ratio_error < harsh.perplexity_error / harsh.perplexity
    assert harsh.ratio == pytest.approx(harsh.perplexity / dense.perplexity)


def test_modes_run_in_the_order_given_with_dense_first_in_one_load(
    options: PerplexityOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.write_tiny_plan(options.model, activation="relu", threshold=0.1, predictor="linear", rank=64)
    loads = []
    monkeypatch.setattr(perplexity, "Runner", lambda *args, **given: loads.append(args) or Runner(*args, **given))
    all_modes = [result.mode for result in measure(options).modes]
    assert all_modes == ["dense", "exact", "threshold", "predicted"] and len(loads) == 1
    named = dataclasses.replace(options, modes=("auto", "predicted", "dense", "exact", "auto"))
    assert [result.mode for result in measure(named).modes] == ["dense", "auto", "predicted", "exact"]


def test_modes_that_cant_run_are_left_out_with_a_note(options: PerplexityOptions) -> None:
    plan = tiny_models.write_tiny_plan(options.model, threshold=0.1)
    notes: list[str] = []
    assert [result.mode for result in measure(options, notes=notes).modes] == ["dense", "threshold"]
    left_out = [note for note in notes if str(plan) in note]
    assert len(left_out) == len(notes) == 3
    assert "silu has no exact zeros" in left_out[0]
    assert "no layer has a predictor that can run" in left_out[1]
    assert "auto runs threshold x 3" in left_out[2]
    named = dataclasses.replace(options, modes=("exact",))
    assert by_mode(measure(named, notes=notes))["exact"].kl < 1e-6 and "`exact` equals `dense`" in notes[-1]


def test_fallback_of_some_layers_is_a_note_and_strict_leaves_the_mode_out(options: PerplexityOptions) -> None:
    tiny_models.write_tiny_plan(options.model, activation="relu", predictor="linear", predictor_layers=[1])
    notes: list[str] = []
    assert by_mode(measure(options, notes=notes))["predicted"].layers == "exact x 2, predicted x 1"
    assert any("no predictor in layer 0, 2" in note for note in notes)
    strict = dataclasses.replace(options, strict=True)
    assert "predicted" not in by_mode(measure(strict))
    with pytest.raises(PlanError, match="no predictor in layer 0, 2"):
        measure(dataclasses.replace(strict, modes=("predicted",)))


def test_a_model_without_a_plan_is_measured_dense_with_a_note(options: PerplexityOptions) -> None:
    notes: list[str] = []
    (dense,) = measure(dataclasses.replace(options, stock=True), notes=notes).modes
    assert (dense.mode, dense.layers, dense.density) == ("dense", "upstream", None)
    assert "it has no plan" in notes[0] and "powerinfer profile" in notes[0] and "--stock adds nothing" in notes[1]
    for changed in ({"modes": ("exact",)}, {"strict": True}):
        with pytest.raises(PlanError, match="it has no plan"):
            measure(dataclasses.replace(options, **changed))


def test_stock_is_left_out_where_it_computes_something_else(options: PerplexityOptions, tmp_path: Path) -> None:
    options = dataclasses.replace(options, stock=True, modes=("dense",))

    def why_not() -> str:
        notes: list[str] = []
        assert [result.mode for result in measure(options, notes=notes).modes] == ["dense"]
        with pytest.raises(PlanError):
            measure(dataclasses.replace(options, strict=True))
        return notes[-1]

    plan = tiny_models.write_tiny_plan(options.model, activation="relu")
    assert "belong to relu, but stock llama.cpp computes silu" in why_not()
    tiny_models.write_tiny_plan(options.model, activation="relu", activation_param=0.1)
    assert "relu with a cut at 0.1" in why_not()
    packed = tmp_path / "packed.powerinfer.gguf"
    pack_plan.pack(options.model, plan, packed)
    options = dataclasses.replace(options, model=packed)
    assert "pack --extract" in why_not()


def test_a_plan_is_a_model_too(options: PerplexityOptions, tmp_path: Path) -> None:
    plan = tiny_models.write_tiny_plan(options.model, threshold=0.2)
    expected = by_mode(measure(options))["threshold"]
    packed = tmp_path / "packed.powerinfer.gguf"
    pack_plan.pack(options.model, plan, packed)
    for path in (plan, packed):
        found = by_mode(measure(dataclasses.replace(options, model=path)))["threshold"]
        assert (found.perplexity, found.kl) == (expected.perplexity, expected.kl)
    with pytest.raises(OptionError, match="is a plan itself"):
        measure(dataclasses.replace(options, model=packed, plan=plan))


def test_files_are_one_text(options: PerplexityOptions, tmp_path: Path) -> None:
    first, second = tmp_path / "1.txt", tmp_path / "2.txt"
    words = options.files[0].read_text().split(" ")
    first.write_text(" ".join(words[:50]) + "\n")
    second.write_text(" ".join(words[50:]))
    whole = tmp_path / "whole.txt"
    whole.write_text(first.read_text() + second.read_text())
    split, joined = (
        measure(dataclasses.replace(options, files=files, n_chunks=None)) for files in ((first, second), (whole,))
    )
    assert split.n_tokens == joined.n_tokens and split.n_chunks == joined.n_chunks == split.n_tokens // N_CTX
    assert split.modes[0].perplexity == joined.modes[0].perplexity


def test_json_holds_every_figure(options: PerplexityOptions, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tiny_models.write_tiny_plan(options.model, threshold=0.2)
    path = tmp_path / "out.json"
    assert cli.main(arguments(options, "--json", str(path), "--stock")) == 0
    written = json.loads(path.read_text())
    assert set(written) == {field.name for field in dataclasses.fields(Report)}
    assert [mode["mode"] for mode in written["modes"]] == ["dense", "threshold", "stock"]
    for mode in written["modes"]:
        assert set(mode) == {field.name for field in dataclasses.fields(ModeResult)}
    assert (written["n_chunks"], written["interrupted"], written["n_threads"]) == (N_CHUNKS, False, 1)
    captured = capsys.readouterr()
    assert f"{written['modes'][1]['kl']:.6f} +- " in captured.out and "stock" in captured.out
    assert captured.err.count("powerinfer: note:") == 3


def test_running_values_are_shown(options: PerplexityOptions) -> None:
    tiny_models.write_tiny_plan(options.model, threshold=0.2)
    steps = Stopper()
    result = by_mode(measure(options, steps))["threshold"]
    assert len(steps.texts) == 2 * (N_CHUNKS - 1)
    assert steps.texts[0].startswith("perplexity ") and ", threshold x " in steps.texts[0]
    assert steps.n == 2 * N_CHUNKS + 2 and result.bytes_share < 1


# While the third chunk runs in its second mode; while the bytes of decoding are measured.
@pytest.mark.parametrize(("at", "n_chunks"), [(6, 2), (2 * N_CHUNKS + 1, N_CHUNKS)])
def test_ctrl_c_prints_what_was_measured(
    options: PerplexityOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    at: int,
    n_chunks: int,
) -> None:
    tiny_models.write_tiny_plan(options.model, threshold=0.2)
    expected = measure(dataclasses.replace(options, n_chunks=n_chunks))

    @contextmanager
    def stopping_steps() -> Iterator[Stopper]:
        yield Stopper(at)

    monkeypatch.setattr(perplexity, "progress_steps", stopping_steps)
    path = tmp_path / "out.json"
    assert cli.main(arguments(options, "--json", str(path))) == 130
    captured = capsys.readouterr()
    assert f"stopped by Ctrl-C: the figures are those of {n_chunks} of {N_CHUNKS} chunks" in captured.err
    assert f"{n_chunks} of {N_CHUNKS} chunks of {N_CTX}" in captured.out
    written = json.loads(path.read_text())
    assert written["interrupted"] and written["n_scored"] == expected.n_scored
    for found, whole in zip(written["modes"], expected.modes):
        assert (found["perplexity"], found["kl"]) == (whole.perplexity, whole.kl)


def test_ctrl_c_before_the_first_chunk_prints_nothing(options: PerplexityOptions) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure(options, Stopper(1))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file or directory; expected a text file"),
        (b"", "there is no text in it"),
        (b" \n\n", "there is no text in it"),
        (b"GGUF\x03\0\0\0" + bytes(range(256)), "it holds zero bytes; expected text"),
        (b"too short", "tokens; expected at least 64, 2 chunks; give more text or a smaller -c"),
    ],
)
def test_text_that_cant_be_used_is_one_line(
    options: PerplexityOptions, capsys: pytest.CaptureFixture, content: bytes | None, found: str
) -> None:
    options.files[0].unlink()
    if content is not None:
        options.files[0].write_bytes(content)
    assert cli.main(arguments(options, "--modes", "dense")) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if "note:" not in line]
    assert len(errors) == 1 and str(options.files[0]) in errors[0] and found in errors[0]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--modes", "sparse"], "modes: 'sparse'; expected some of dense, exact, threshold, predicted, auto"),
        (["--modes", "stock"], "stock is measured by --stock"),
        (["--modes", "threshold"], "no layer has thresholds, so mode threshold isn't measured"),
        (["--modes", "predicted,dense"], "no layer has a predictor that can run"),
        (["--ctx-size", "7"], "ctx_size: 7; expected 8 or more"),
        (["--ctx-size", "4096"], "4096"),
        (["--chunks", "0"], "chunks: 0"),
        (["--threads", "0"], "threads: 0"),
        (["--json", "nowhere/out.json"], "nowhere/out.json: its folder doesn't exist"),
        (["--plan", "none.powerinfer.gguf"], "none.powerinfer.gguf"),
    ],
)
def test_wrong_options_are_one_line(
    options: PerplexityOptions, capsys: pytest.CaptureFixture, flags: list[str], found: str
) -> None:
    options.files[0].write_text("more of the same, " * 1000)
    tiny_models.write_tiny_plan(options.model)
    assert cli.main(arguments(options, *flags)) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and found in captured.err and captured.err.count("\n") == 1


def test_a_plan_of_another_model_is_refused(options: PerplexityOptions, tmp_path: Path) -> None:
    other = tiny_models.write_tiny_model(tmp_path / "n.gguf", n_layer=3, seed=1)
    with pytest.raises(PlanError, match="digest"):
        measure(dataclasses.replace(options, plan=tiny_models.write_tiny_plan(other)))
    with pytest.raises(FormatError, match=r"none\.gguf"):
        measure(dataclasses.replace(options, model=tmp_path / "none.gguf"))


# ---- scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-3, 1.0, 60.0])
def test_divergence_is_right_from_nearly_equal_to_far_apart(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_scores, "_BLOCK_VALUES", 100)  # rows one by one
    rng = np.random.default_rng(0)
    first = 5 * rng.standard_normal((7, 90)).astype(np.float32)
    second = first + np.float32(scale) * rng.standard_normal((7, 90)).astype(np.float32)
    tokens = rng.integers(0, 90, 7).astype(np.int32)
    p, q = (log_softmax(logits.astype(np.longdouble)) for logits in (first, second))
    expected = (np.exp(p) * (p - q)).sum(1)
    scores, other = TokenScores.of(first, tokens), TokenScores.of(second, tokens)
    assert scores.divergences(other) == pytest.approx(expected, rel=1e-6)
    assert np.all(scores.divergences(scores) == 0) and scores.same_top(scores).all()
    assert other.negative_log_likelihoods() == pytest.approx(-q[np.arange(7), tokens], rel=1e-6)


def test_a_copy_outlives_the_logits() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 10)).astype(np.float32)
    scores = TokenScores.of(logits, np.zeros(3, np.int32))
    copy = scores.copy()
    before = copy.negative_log_likelihoods()
    logits[:] = 0
    assert np.array_equal(copy.negative_log_likelihoods(), before)
