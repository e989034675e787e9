"""Synthetic sparse models: what the generator promises is measured again by the device and on fresh tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

import powerinfer_py
from powerinfer_py.cli import main
from powerinfer_py.errors import OptionError
from powerinfer_py.format import read_plan
from powerinfer_py.tools.predictor import LinearPredictor, measure_predictor
from powerinfer_py.tools.row_types import row_bytes
from powerinfer_py.tools.synthetic_model import (
    PRESETS,
    SyntheticOptions,
    consecutive_overlap,
    generate_synthetic,
    power_law_frequencies,
)

DENSITY = 0.1
DENSITY_TOLERANCE = 0.2  # of the wished density; the 1.2B models are within 0.02 (few neurons here: more noise)
MOST_OVERLAP = 0.6
# The q4_0 device rounds FFN inputs to 8 bits: a few neurons at the edge change sides.
COUNT_TOLERANCE = 0.02
SHAPES = {
    "q4_0": SyntheticOptions(layers=2, n_embd=128, n_ff=512, heads=4, vocab=1024, tokens=1200),
    "f32": SyntheticOptions(
        layers=2,
        n_embd=96,
        n_ff=256,
        heads=6,
        kv_heads=2,
        vocab=512,
        row_type="f32",
        predictor_type="q8_0",
        tokens=1200,
    ),
}


@pytest.fixture(scope="module", params=sorted(SHAPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(path, options, report, lines) of one generated model."""
    path = tmp_path_factory.mktemp("synthetic") / f"{request.param}.gguf"
    lines: list[str] = []
    report = generate_synthetic(SHAPES[request.param], path, lines.append)
    return path, SHAPES[request.param], report, lines


def fresh_tokens(n_vocab: int, n: int) -> list[int]:
    """Tokens of another seed than the generator's."""
    return np.random.default_rng(12345).integers(3, n_vocab, n).tolist()


def run_tokens(llama: llama_cpp.Llama, tokens: list[int]) -> None:
    for token in tokens:
        llama.eval([token])


def test_stock_llama_cpp_loads_the_base_and_writes_words(model) -> None:
    path, options, _, _ = model
    llama = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, verbose=False)
    try:
        assert llama.n_vocab() == options.vocab
        text = b"Hello w\xc3\xb6rld, \xf0\x9f\x91\x8d"
        assert llama.detokenize(llama.tokenize(text, add_bos=False)).strip() == text
        llama.reset()
        run_tokens(llama, [1])
        written = []
        for _ in range(12):
            written.append(llama.sample(temp=0.0))
            llama.eval([written[-1]])
        assert min(written) > 258
        assert len(set(written)) > 2
    finally:
        llama.close()


def test_report_holds_what_was_wished(model) -> None:
    _, options, report, lines = model
    assert report.density == pytest.approx(DENSITY, rel=DENSITY_TOLERANCE)
    assert report.overlap <= MOST_OVERLAP
    assert report.top_share > 0.5
    assert report.recall >= 0.93
    assert report.candidate_density < 0.2
    assert len(lines) == options.layers + 2
    assert f"overlap of consecutive tokens {report.overlap:.2f}" in lines[-1]


def test_plan_is_hot_first_and_complete(model) -> None:
    path, options, _, _ = model
    plan = read_plan(path.with_name(path.stem + ".powerinfer.gguf"))
    plan.open_base()
    assert (plan.activation, plan.gated, plan.n_layer) == ("relu", True, options.layers)
    for layer in plan.layers:
        assert layer.predictor == "linear" and layer.profile_tokens == options.tokens
        assert (np.diff(layer.neuron_frequency) <= 0).all()
        assert layer.neuron_frequency.mean() == pytest.approx(layer.profile_density, rel=1e-3)
        assert layer.ffn_down_t.row_type.name.lower() == options.row_type
        assert layer.fc2.n == options.predictor_rank
        assert not np.array_equal(layer.neuron_order, np.arange(options.n_ff))


def test_device_measures_the_same_density_and_overlap(model) -> None:
    path, options, report, _ = model
    with powerinfer_py.Llama(str(path), sparsity="exact", n_ctx=256, n_threads=1, verbose=False) as llama:
        run_tokens(llama, fresh_tokens(options.vocab, 150))
        stats = llama.stats()
    assert stats.density == pytest.approx(DENSITY, rel=DENSITY_TOLERANCE)
    assert stats.overlap == pytest.approx(report.overlap, abs=0.05)
    assert stats.overlap <= MOST_OVERLAP


def test_first_tokens_of_a_context_are_as_sparse_as_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    options = SyntheticOptions(layers=24, n_embd=128, n_ff=256, heads=4, vocab=512, tokens=400)
    generate_synthetic(options, path, lambda _: None)
    with powerinfer_py.Llama(str(path), sparsity="exact", n_ctx=64, n_threads=1, verbose=False) as llama:
        tokens = fresh_tokens(options.vocab, 32)
        for first in range(0, len(tokens), 4):
            llama.reset()
            run_tokens(llama, tokens[first : first + 4])
        assert llama.stats().density == pytest.approx(DENSITY, rel=DENSITY_TOLERANCE)


def test_predictor_finds_the_active_neurons_of_fresh_tokens(model) -> None:
    path, options, _, _ = model
    plan = read_plan(path.with_name(path.stem + ".powerinfer.gguf"))
    base = plan.open_base()
    inputs: list[list[np.ndarray]] = [[] for _ in range(options.layers)]
    with powerinfer_py.Llama(str(path), sparsity="exact", n_ctx=256, n_threads=1, verbose=False) as llama:
        llama._plan.set_capture(lambda i_layer, x: inputs[i_layer].append(x))
        run_tokens(llama, fresh_tokens(options.vocab, 120))
        llama._plan.set_capture(None)
        n_active = [layer["n_active"] for layer in llama._plan.layers()]
    for i_layer, layer in enumerate(plan.layers):
        x = np.concatenate(inputs[i_layer])
        active = x @ base.rows_f32(f"blk.{i_layer}.ffn_gate.weight")[layer.neuron_order].T > 0.0
        assert n_active[i_layer] == pytest.approx(active.sum(), rel=COUNT_TOLERANCE)
        scores = LinearPredictor(layer.fc1.to_f32(), layer.fc2.to_f32()).scores(x)
        quality = measure_predictor(scores, active, layer.predictor_threshold)
        assert quality.recall >= 0.9
        assert quality.recall == pytest.approx(layer.predictor_recall, abs=0.03)
        assert quality.candidate_density == pytest.approx(layer.predictor_candidate_density, abs=0.03)


def test_predicted_mode_reads_only_candidates(model) -> None:
    path, options, report, _ = model
    with powerinfer_py.Llama(str(path), sparsity="predicted", n_ctx=256, n_threads=1, verbose=False) as llama:
        run_tokens(llama, fresh_tokens(options.vocab, 120))
        stats = llama.stats()
    assert stats.candidate_density == pytest.approx(report.candidate_density, abs=0.03)
    assert 0.85 * DENSITY < stats.density < 1.2 * DENSITY


def test_same_seed_same_files_and_another_seed_others(tmp_path: Path) -> None:
    options = SyntheticOptions(layers=1, n_embd=64, n_ff=64, heads=2, vocab=300, tokens=64)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        generate_synthetic(dataclasses.replace(options, seed=seed), tmp_path / f"{name}.gguf", lambda _: None)
    a, b, c = ((tmp_path / f"{name}.gguf").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(("density", "exponent"), [(0.02, 1.0), (0.1, 0.0), (0.1, 1.2), (0.5, 1.0), (1.0, 1.0)])
def test_frequencies_follow_the_law_and_have_the_wished_mean(density: float, exponent: float) -> None:
    frequencies = power_law_frequencies(4096, density, exponent)
    assert frequencies.mean() == pytest.approx(density, rel=1e-3)
    assert (np.diff(frequencies) <= 0).all() and frequencies.min() > 0 and frequencies.max() < 1
    if exponent and density <= 0.1:
        below_cap = frequencies < frequencies.max()
        slope = np.polyfit(np.log(np.arange(1, 4097)[below_cap]), np.log(frequencies[below_cap]), 1)[0]
        assert slope == pytest.approx(-exponent, abs=0.01)


@pytest.mark.parametrize("density", [0.02, 0.05, 0.2, 0.5, 1.0])
def test_other_densities(tmp_path: Path, density: float) -> None:
    path = tmp_path / "x.gguf"
    options = SyntheticOptions(layers=1, n_embd=128, n_ff=512, heads=4, vocab=300, tokens=1200, density=density)
    report = generate_synthetic(options, path, lambda _: None)
    assert report.density == pytest.approx(density, rel=DENSITY_TOLERANCE)
    with powerinfer_py.Llama(str(path), sparsity="exact", n_ctx=256, n_threads=1, verbose=False) as llama:
        run_tokens(llama, fresh_tokens(options.vocab, 200))
        assert llama.stats().density == pytest.approx(density, rel=DENSITY_TOLERANCE)


@pytest.mark.parametrize("row_type", ["q8_0", "f16", "bf16", "q5_1", "iq4_nl", "q4_k", "q5_k", "q6_k"])
def test_every_row_type_has_neuron_major_rows_of_its_own_and_a_4_bit_predictor(tmp_path: Path, row_type: str) -> None:
    options = SyntheticOptions(layers=1, n_embd=256, n_ff=512, heads=4, vocab=300, tokens=800, row_type=row_type)
    report = generate_synthetic(options, tmp_path / "x.gguf", lambda _: None)
    assert report.density == pytest.approx(DENSITY, rel=DENSITY_TOLERANCE)
    assert report.recall > 0.94 and report.overlap < MOST_OVERLAP
    plan = read_plan(tmp_path / "x.powerinfer.gguf")
    (layer,) = plan.layers
    base = plan.open_base()
    base_types = {base.files[0].tensors[f"blk.0.ffn_{name}.weight"].type.name for name in ("gate", "up", "down")}
    assert base_types == {layer.ffn_down_t.row_type.name} == {row_type.upper()}
    assert layer.fc1.row_type.name == layer.fc2.row_type.name == "Q4_0"
    assert (
        layer.predictor_candidate_density == pytest.approx(report.candidate_density) and report.candidate_density < 0.2
    )


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    options = SyntheticOptions(layers=1, n_embd=256, n_ff=320, heads=4, vocab=300, row_type="q4_K")
    with pytest.raises(OptionError, match="multiple of 256"):
        generate_synthetic(options, tmp_path / "y.gguf", lambda _: None)
    assert not list(tmp_path.iterdir())


def test_presets_read_what_their_names_say() -> None:
    for name, megabytes in (("1.2b", 642), ("7b", 3718)):
        o = PRESETS[name]
        o.check()
        rows = o.layers * (4 * o.n_embd + 2 * o.n_ff) + o.vocab
        n_bytes = rows * row_bytes(o.n_embd, o.row_type) + o.layers * o.n_embd * row_bytes(o.n_ff, o.row_type)
        assert n_bytes / 1e6 == pytest.approx(megabytes, rel=0.003)


def test_overlap_of_known_sets() -> None:
    active = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], bool)
    assert consecutive_overlap(active) == pytest.approx((1 / 3 + 0 + 1) / 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 3}, "3 heads"),
        ({"kv_heads": 5}, "5 key/value heads"),
        ({"vocab": 200}, "at least 260"),
        ({"density": 0.0}, "density 0.0"),
        ({"n_embd": 32}, "n_embd is 32"),
        ({"rank": 33}, "multiple of 32"),
        ({"layers": 0}, "layers is 0"),
        ({"tokens": 3}, "too few"),
        ({"row_type": "q7"}, "found 'q7'"),
    ],
)
def test_options_that_cannot_be_a_model(tmp_path: Path, change: dict, words: str) -> None:
    options = dataclasses.replace(SyntheticOptions(layers=1, n_embd=128, n_ff=256, heads=4, vocab=300), **change)
    with pytest.raises(OptionError) as caught:
        generate_synthetic(options, tmp_path / "x.gguf", lambda _: None)
    assert words in str(caught.value) and not list(tmp_path.iterdir())


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "x.gguf"
    flags = "--preset 7b --layers 1 --n-embd 64 --n-ff 64 --heads 2 --vocab 300 --tokens 64 --type q8_0".split()
    assert main(["synthetic", *flags, "-o", str(output)]) == 0
    assert "density" in capsys.readouterr().out
    plan = read_plan(tmp_path / "x.powerinfer.gguf")
    assert plan.layers[0].ffn_down_t.row_type.name == "Q8_0"
    assert main(["synthetic", "-o", str(tmp_path / "x.bin")]) == 1
    assert "expected a name such as model.gguf" in capsys.readouterr().err
