"""`powerinfer bench`: what is in a line, how ratios are formed. Speed itself is never asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from powerinfer_py import bench, cli
from powerinfer_py.bench import BenchOptions, Model, Sample
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.llama import Stats

FAST = {"n_prompt": 8, "n_gen": 4, "repeats": 2, "n_threads": 2}
MODEL = Model(
    "m", "llama", "text", 2, None, weight_bytes=1000, ffn_bytes=600, bandwidth_gb_s=10.0, loaded_together=True
)


def test_modes_are_measured_in_turns(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> None:
    path = tiny_model()
    plan = tiny_plan(path, activation="relu", order_seed=1)
    modes = ("stock", "dense", "exact")
    model, *samples = bench.measure(BenchOptions(str(path), str(plan), modes, **FAST))
    assert [sample.mode for sample in samples] == [*modes, *modes]
    assert [sample.i_repeat for sample in samples] == [0, 0, 0, 1, 1, 1]
    assert model.shape == "llama, 4 layers, n_embd 64, n_ff 256"
    assert model.tokens == "text" and model.n_threads == 2 and model.bandwidth_gb_s > 0
    for sample in samples:
        assert sample.prompt_tok_s > 0 and sample.decode_tok_s > 0
        if sample.mode != "stock":
            assert sample.stats.n_tokens == 4 * FAST["n_gen"]  # of decoding alone
    stats = {sample.mode: sample.stats for sample in samples}
    assert stats["stock"] is None
    assert stats["dense"].density == 1.0 > stats["exact"].density > 0
    assert 0 < stats["exact"].overlap < 1


def test_weight_bytes_leave_out_the_table_of_which_one_row_is_read(tiny_model: Callable[..., Path]) -> None:
    untied, tied = (bench.open_files(str(tiny_model(tied=tied)), None)[0] for tied in (False, True))
    assert bench._weight_bytes(untied) == bench._weight_bytes(tied)
    n_ffn = 4 * 3 * 256 * 64 * 4
    assert n_ffn < bench._weight_bytes(untied) < 2 * n_ffn


def test_ratio_is_the_median_of_pairs() -> None:
    speeds = {"stock": [10.0, 20.0, 40.0], "exact": [15.0, 20.0, 80.0]}
    samples = [Sample(mode, i, 1.0, speeds[mode][i], None) for i in range(3) for mode in speeds]
    stock, exact = bench.summarize(MODEL, samples, n_gen=4)
    assert (stock.decode_ratio, exact.decode_ratio) == (1.0, 1.5)
    assert (exact.decode_tok_s, exact.decode_spread) == (20.0, (15.0, 80.0))
    assert stock.bytes_per_token == 1000
    assert stock.gb_s == pytest.approx(1000 * 20 / 1e9)
    assert stock.bandwidth_share == pytest.approx(stock.gb_s / 10)


def test_bytes_per_token_are_those_read() -> None:
    stats = Stats("powerinfer", read_bytes=4 * 150)
    (line,) = bench.summarize(MODEL, [Sample("exact", 0, 1.0, 2.0, stats)], n_gen=4)
    assert line.bytes_per_token == 1000 - 600 + 150


def test_without_stock_there_is_no_ratio() -> None:
    (line,) = bench.summarize(MODEL, [Sample("exact", 0, 1.0, 2.0, None)], n_gen=1)
    assert line.decode_ratio is None and line.prompt_ratio is None


def test_table_and_json_hold_every_figure(
    tiny_model: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tiny_model()
    plan = tiny_plan(path, activation="relu", order_seed=1)
    out = tmp_path / "bench.json"
    arguments = ["bench", path, "--plan", plan, "--modes", "stock,exact", "-p", 8, "-n", 4, "-r", 2, "--json", out]
    assert cli.main([str(argument) for argument in arguments]) == 0
    text = capsys.readouterr().out
    words = (
        "n_embd 64",
        "f32",
        "kernels",
        "threads",
        "GB/s",
        "density",
        "candidate",
        "bytes share",
        "overlap",
        "MB/token",
    )
    for word in words:
        assert word in text
    report = json.loads(out.read_text())
    assert [line["mode"] for line in report["lines"]] == ["stock", "exact"]
    assert report["lines"][1]["stats"]["kernels"] and len(report["samples"]) == 4
    assert list(tmp_path.glob("*.tmp")) == []


def test_model_without_plan_and_unknown_mode_are_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(PlanError, match="no plan"):
        list(bench.measure(BenchOptions(str(tiny_model()), modes=("exact",), **FAST)))
    with pytest.raises(OptionError, match="exakt"):
        list(bench.measure(BenchOptions(str(tiny_model()), modes=("exakt",), **FAST)))


def test_stock_cannot_open_an_embedded_base(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> None:
    path = tiny_plan(tiny_model(), embedded=True)
    with pytest.raises(PlanError, match="stock"):
        list(bench.measure(BenchOptions(str(path), modes=("stock", "dense"), **FAST)))
    assert list(bench.measure(BenchOptions(str(path), modes=("dense",), **FAST)))


def test_models_that_dont_fit_together_are_loaded_in_turns(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model()
    plan = tiny_plan(path)
    monkeypatch.setattr(bench, "_available_memory_bytes", lambda: 2**20)
    model, *samples = bench.measure(BenchOptions(str(path), str(plan), ("stock", "dense"), **FAST))
    assert not model.loaded_together
    assert [sample.mode for sample in samples] == ["stock", "dense"] * 2
