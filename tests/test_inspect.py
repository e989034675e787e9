"""inspect: what it says of models and plans, as a report, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_models

from powerinfer_py import cli
from powerinfer_py import format as pi_format
from powerinfer_py.errors import FormatError, OptionError
from powerinfer_py.tools import inspect_model

MAX_COLUMNS = 100


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.write_tiny_model(tmp_path / "m.gguf", n_layer=3, row_type="Q4_0")


def full_plan(model: Path, **changes: object) -> Path:
    """A plan with every field that inspect shows; its second layer is left out."""
    path = tiny_models.write_tiny_plan(model, order_seed=1, frequency=True, predictor="linear", rank=8)
    plan = pi_format.read_plan(path)
    layer = dataclasses.replace(
        plan.layers[0],
        activation_param=0.01,
        threshold=0.0123456,
        product_threshold=0.00234567,
        predictor_recall=0.953,
        predictor_candidate_density=0.21,
        profile_tokens=20480,
        profile_density=0.123,
        neuron_frequency=np.repeat(np.float32([1.0, 0.0]), [32, 224]),
    )
    layers = (layer, pi_format.PlanLayer(), dataclasses.replace(plan.layers[2], ffn_down_t=None))
    return pi_format.write_plan(
        dataclasses.replace(plan, layers=layers, loss=0.0185, corpus="answers", **changes), path
    )


def test_plan_report(model: Path) -> None:
    report = inspect_model.inspect(full_plan(model))
    assert (report.kind, report.architecture, report.n_embd, report.activation) == (
        "sidecar",
        "llama",
        64,
        "silu, gated",
    )
    assert report.base == str(model) and not report.problems and not report.notes
    assert report.loss == "Calibration measured that the plan's thresholds change perplexity by +1.85 %."
    assert report.profile == "20480 tokens of answers"
    first, second, _ = report.layers
    assert (first.n_ff, first.types, first.predictor, first.rank) == (256, "q4_0", "linear", 8)
    assert first.ffn_bytes == 3 * 64 * 256 // 32 * 18
    assert first.hot_neurons == pytest.approx(26 / 256)  # 80 % of 32 equally hot neurons
    assert first.predictor_bytes == 4 * 8 * (64 + 256) and first.statistics_bytes == 8 * 256
    assert first.density == pytest.approx(0.123) and first.recall == pytest.approx(0.953)
    # the base's Q4_0 down becomes Q8_0 rows: 34 bytes per 32 values instead of 18
    assert (first.down_t_type, first.down_t_derived_bytes) == ("q8_0", 64 * 256 // 32 * (34 - 18))
    assert (second.covered, second.reason, second.n_ff) == (False, "left out by the plan", 256)


def test_stored_down_projection_is_counted_as_duplicated(model: Path) -> None:
    path = tiny_models.write_tiny_plan(model, ffn_down_t="F16", embedded=True)
    report = inspect_model.inspect(path)
    assert report.kind == "packed" and "the base model in it" in report.base
    assert [layer.down_t_stored_bytes for layer in report.layers] == [2 * 64 * 256] * 3
    assert [layer.down_t_derived_bytes for layer in report.layers] == [0] * 3


def test_floats_are_transposed_without_more_memory(tmp_path: Path) -> None:
    model = tiny_models.write_tiny_model(tmp_path / "f.gguf", row_type="BF16")
    layer = inspect_model.inspect(tiny_models.write_tiny_plan(model)).layers[0]
    assert (layer.down_t_type, layer.down_t_derived_bytes) == ("bf16", 0)


def test_model_report_names_why_layers_are_not_covered(model: Path, tiny_model: Callable[..., Path]) -> None:
    report = inspect_model.inspect(model)
    assert report.kind == "model" and report.sidecar == "" and all(layer.covered for layer in report.layers)
    full_plan(model)
    assert inspect_model.inspect(model).sidecar == str(model.with_name("m.powerinfer.gguf"))
    report = inspect_model.inspect(tiny_model(n_expert=4, n_ff=96))
    assert [layer.reason[:7] for layer in report.layers] == ["experts"] * 4


def test_loss_sentences(model: Path) -> None:
    no_thresholds = pi_format.bare_plan(model)
    assert "without loss" in inspect_model.loss_sentence(no_thresholds)
    layers = tuple(dataclasses.replace(layer, threshold=0.1) for layer in no_thresholds.layers)
    assert "not measured" in inspect_model.loss_sentence(dataclasses.replace(no_thresholds, layers=layers))


def test_missing_base_is_a_note_and_another_one_a_problem(
    model: Path, tmp_path: Path, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = full_plan(model)
    other = tiny_model(n_layer=3, seed=9)
    assert cli.main(["inspect", str(plan), "--base", str(other)]) == 1
    assert "problem: " in capsys.readouterr().out
    model.rename(tmp_path / "moved.gguf")
    assert cli.main(["inspect", str(plan)]) == 0
    out = capsys.readouterr().out
    assert "note: nothing is known of the base model" in out and "unknown without the base model" in out
    assert cli.main(["inspect", str(plan), "--base", str(tmp_path / "moved.gguf")]) == 0


def test_table_fits_the_width_and_has_a_line_per_layer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = full_plan(model)
    assert cli.main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith((" layer", "layer"))) :]
    assert max(len(line) for line in table) <= MAX_COLUMNS
    rows = [line for line in table if line.split()[:1] in (["0"], ["1"], ["2"])]
    assert len(rows) == 3
    for part in ("256", "q4_0", "12.3%", "0.0123", "0.00235", "linear 8", "95.3%", "21.0%"):
        assert part in rows[0]
    assert "not covered: layer 1: left out by the plan" in lines


def test_equal_reasons_share_a_line(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tiny_model(n_expert=4, n_ff=96))]) == 0
    assert "not covered: layers 0-3: experts (blk.*.ffn_gate_inp.weight)" in capsys.readouterr().out.splitlines()


def test_json_holds_the_report(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = full_plan(model)
    assert cli.main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(dataclasses.asdict(inspect_model.inspect(path)))
    )


def test_picture_needs_frequencies(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    assert cli.main(["inspect", str(full_plan(model)), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OptionError, match="no neuron frequencies"):
        inspect_model.plot_activations(pi_format.bare_plan(model), picture)
    assert cli.main(["inspect", str(model), "--plot", str(picture)]) == 1


def test_damaged_file_is_one_line(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(model.read_bytes()[:1000])
    with pytest.raises(FormatError, match=r"bad\.gguf"):
        inspect_model.inspect(bad)
    assert cli.main(["inspect", str(bad)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(OptionError, match="leave it out"):
        inspect_model.inspect(model, model)
