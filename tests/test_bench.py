"""`powerinfer bench`: what is in a line, how ratios, fits and noise are formed. Speed itself is never asserted."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from powerinfer_py import _core, bench, bench_kernels, bench_machine, cli
from powerinfer_py.bench import BenchOptions, Line, Measured, Model, Sample
from powerinfer_py.bench_kernels import KernelOptions
from powerinfer_py.bench_machine import Noise
from powerinfer_py.errors import NoiseError, OptionError, PlanError
from powerinfer_py.format import open_files
from powerinfer_py.llama import Stats
from powerinfer_py.tools import plot_bench

FAST = {"n_prompt": 8, "n_gen": 4, "repeats": 2, "threads": (2,)}
OPTIONS = BenchOptions("m.gguf", n_prompt=1, n_gen=4)
MODEL = Model("m", "llama", ("q4_0",), "text", None, weight_bytes=1000, ffn_bytes=600, loaded_together=True)
CALM = Noise(seconds=10.0, n_cores=2, other_share=0.01, steal_share=0.0)
SOME_MIB = 2**22
# The seeds of the index lists are fixed; draws of 64 rows and more deviate less.
DENSITY_TOLERANCE = 0.2


@pytest.fixture(autouse=True)
def small_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes and kernels over a few MiB: quick, and nothing is asserted about speed."""
    monkeypatch.setattr(bench_machine, "working_set_bytes", lambda: SOME_MIB)
    monkeypatch.setattr(bench_kernels, "working_set_bytes", lambda: SOME_MIB)


@pytest.fixture
def planned(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> list[object]:
    """Arguments of `bench` for a tiny model with a plan."""
    path = tiny_model()
    plan = tiny_plan(path, activation="relu", order_seed=1)
    return ["bench", path, "--plan", plan, "--modes", "stock,exact", "-p", 8, "-n", 4, "-r", 2]


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def measured_of(speeds: dict[str, list[float]], stats: Stats | None = None, noise: Noise = CALM) -> Measured:
    """What `measure` returns for decode speeds by mode; prompts have the same."""
    return Measured(
        model=MODEL,
        samples=tuple(
            Sample(mode, 2, i, values[i], values[i], None if mode == "stock" else stats)
            for i in range(len(next(iter(speeds.values()))))
            for mode, values in speeds.items()
        ),
        probes_gb_s={2: (9.0, 10.0, 11.0)},
        peak_bytes={"stock": 7, "powerinfer": 8},
        noise=noise,
    )


def lines_at(densities: list[float], token_ms: list[float], mode: str = "exact", model: str = "m") -> list[Line]:
    """Lines of one mode at several densities."""
    stats = Stats(
        "powerinfer", read_bytes=400, density=0.1, candidate_density=1.0, modes=(("exact", 4),), kernels="avx2"
    )
    (line,) = bench.summarize(measured_of({"exact": [10.0]}, stats), OPTIONS)
    line = dataclasses.replace(line, decode_ratio=1.5, model=model, mode=mode)
    return [dataclasses.replace(line, density=d, token_ms=t) for d, t in zip(densities, token_ms)]


def test_modes_are_measured_in_turns(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> None:
    path = tiny_model()
    plan = tiny_plan(path, activation="relu", order_seed=1)
    modes = ("stock", "dense", "exact")
    measured = bench.measure(BenchOptions(str(path), str(plan), modes, **FAST))
    assert [sample.mode for sample in measured.samples] == [*modes, *modes]
    assert [sample.i_repeat for sample in measured.samples] == [0, 0, 0, 1, 1, 1]
    model = measured.model
    assert model.shape == "llama, 4 layers, n_embd 64, n_ff 256"
    assert model.tokens == "text" and model.row_types == ("f32",)
    for sample in measured.samples:
        assert sample.n_threads == 2 and sample.prompt_tok_s > 0 and sample.decode_tok_s > 0
        if sample.mode != "stock":
            assert sample.stats.n_tokens == 4 * FAST["n_gen"]  # of decoding alone
    stats = {sample.mode: sample.stats for sample in measured.samples}
    assert stats["stock"] is None
    assert stats["dense"].density == 1.0 > stats["exact"].density > 0
    assert 0 < stats["exact"].overlap < 1
    assert set(measured.peak_bytes) == {"stock", "powerinfer"} and min(measured.peak_bytes.values()) >= 0
    assert [len(values) for values in measured.probes_gb_s.values()] == [2] and measured.noise.seconds > 0


def test_every_thread_count_is_measured_for_stock_and_ours(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_core, "physical_cores", lambda: 2)
    path = tiny_model()
    options = BenchOptions(
        str(path), str(tiny_plan(path)), ("stock", "dense"), **{**FAST, "repeats": 1, "threads": (1, 2, 4)}
    )
    measured = bench.measure(options)
    order = [(sample.n_threads, sample.mode) for sample in measured.samples]
    assert order == [(n, mode) for n in (1, 2, 4) for mode in ("stock", "dense")]
    lines = bench.summarize(measured, options)
    assert [line.oversubscribed for line in lines] == [False] * 4 + [True] * 2
    assert all(line.decode_ratio is not None for line in lines) and set(measured.probes_gb_s) == {1, 2, 4}


@pytest.mark.parametrize("n_context", [3, 24])
def test_decoding_starts_behind_the_context(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], n_context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model()
    starts = []
    time_decode = bench._time_decode
    monkeypatch.setattr(bench, "_time_decode", lambda *args: starts.append(args[2]) or time_decode(*args))
    options = BenchOptions(str(path), str(tiny_plan(path)), ("stock", "dense"), n_context=n_context, **FAST)
    measured = bench.measure(options)
    assert starts == [8, 8] + [n_context] * 4  # warm-ups decode behind the prompt
    assert {line.n_context for line in bench.summarize(measured, options)} == {n_context}
    assert {sample.stats.n_tokens for sample in measured.samples if sample.stats} == {4 * FAST["n_gen"]}


def test_weight_bytes_leave_out_the_table_of_which_one_row_is_read(tiny_model: Callable[..., Path]) -> None:
    untied, tied = (open_files(str(tiny_model(tied=tied)), None)[0] for tied in (False, True))
    assert bench._weight_bytes(untied) == bench._weight_bytes(tied)
    n_ffn = 4 * 3 * 256 * 64 * 4
    assert n_ffn < bench._weight_bytes(untied) < 2 * n_ffn


def test_ratio_is_the_median_of_pairs() -> None:
    speeds = {"stock": [10.0, 20.0, 40.0], "exact": [15.0, 20.0, 80.0]}
    stock, exact = bench.summarize(measured_of(speeds, Stats("powerinfer", read_bytes=2400)), OPTIONS)
    assert (stock.decode_ratio, exact.decode_ratio) == (1.0, 1.5)
    assert (exact.decode_tok_s, exact.decode_tok_s_min, exact.decode_tok_s_max) == (20.0, 15.0, 80.0)
    assert stock.decode_ratio_spread == 0.0
    assert exact.decode_ratio_spread == pytest.approx((1.75 - 1.25) / 1.5)
    assert stock.bytes_per_token == 1000
    assert stock.read_gb_s == pytest.approx(1000 * 20 / 1e9)
    assert stock.bandwidth_share == pytest.approx(stock.read_gb_s / 10)
    assert stock.limit_tok_s == pytest.approx(10e9 / 1000)
    assert (stock.density, stock.bytes_share, stock.kernels, stock.layers) == (1.0, 1.0, "upstream", "upstream")
    assert (stock.peak_anonymous_bytes, exact.peak_anonymous_bytes) == (7, 8)


def test_bytes_per_token_are_those_read_and_set_the_limit() -> None:
    (line,) = bench.summarize(measured_of({"exact": [2.0]}, Stats("powerinfer", read_bytes=4 * 150)), OPTIONS)
    assert line.bytes_per_token == 1000 - 600 + 150
    assert line.limit_ratio == pytest.approx(1000 / 550)


def test_time_parts_add_up_to_the_token() -> None:
    stats = Stats("powerinfer", predictor_us=4000, gate_us=8000, up_down_us=12000, total_us=40000)
    stock, exact = bench.summarize(measured_of({"stock": [20.0], "exact": [50.0]}, stats), OPTIONS)
    parts = (exact.predictor_ms, exact.gate_ms, exact.up_down_ms, exact.ffn_rest_ms, exact.outside_ms)
    assert parts == pytest.approx((1.0, 2.0, 3.0, 4.0, 10.0)) and sum(parts) == pytest.approx(exact.token_ms)
    assert stock.outside_ms == stock.token_ms == 50.0


def test_recall_stands_only_where_a_predictor_runs() -> None:
    measured = measured_of({"predicted": [1.0]}, Stats("powerinfer", modes=(("predicted", 4),)))
    measured = dataclasses.replace(measured, model=dataclasses.replace(MODEL, recall=0.96))
    assert bench.summarize(measured, OPTIONS)[0].recall == 0.96
    measured = dataclasses.replace(
        measured, samples=(Sample("exact", 2, 0, 1.0, 1.0, Stats("powerinfer", modes=(("exact", 4),))),)
    )
    assert bench.summarize(measured, OPTIONS)[0].recall is None


def test_without_stock_there_is_no_ratio() -> None:
    (line,) = bench.summarize(measured_of({"exact": [2.0, 3.0]}, Stats("powerinfer")), OPTIONS)
    assert line.decode_ratio is None and line.prompt_ratio is None and line.decode_ratio_spread is None


def test_fit_finds_the_line_and_the_worst_point() -> None:
    densities = [0.02, 0.05, 0.1, 0.2, 0.5]
    (fit,) = bench.fit_lines(lines_at(densities, [10 + 30 * d for d in densities]))
    assert (fit.n_points, fit.mode, fit.n_threads) == (5, "exact", 2)
    assert fit.base_ms == pytest.approx(10) and fit.ms_per_percent == pytest.approx(0.3)
    assert fit.worst_deviation == pytest.approx(0, abs=1e-9)
    bent = [10 + 30 * d for d in densities]
    bent[2] *= 1.3
    (fit,) = bench.fit_lines(lines_at(densities, bent))
    assert fit.worst_density == 0.1 and 0.1 < fit.worst_deviation < 0.3
    assert "worst deviation" in bench._fit_text(fit)


def test_fit_needs_three_densities_and_one_shape() -> None:
    assert bench.fit_lines(lines_at([0.1, 0.2], [1.0, 2.0])) == []
    assert bench.fit_lines(lines_at([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])) == []
    lines = lines_at([0.1, 0.2, 0.3], [1.0, 2.0, 3.0])
    lines[2] = dataclasses.replace(lines[2], shape="another")
    assert bench.fit_lines(lines) == []


@pytest.mark.parametrize(
    ("other_share", "steal_share", "words"),
    [(0.0, 0.0, ()), (0.1, 0.05, ()), (0.11, 0.0, ("other processes", "11%")), (0.0, 0.06, ("host", "6%"))],
)
def test_machine_noise_is_what_others_and_the_host_took(
    other_share: float, steal_share: float, words: tuple[str, ...]
) -> None:
    reasons = Noise(10.0, 2, other_share, steal_share).reasons()
    assert len(reasons) == bool(words)
    assert all(word in reasons[0] for word in words)


def test_spread_of_ratios_is_noise() -> None:
    stats = Stats("powerinfer")
    calm = measured_of({"stock": [10.0, 20.0, 40.0], "exact": [15.0, 31.0, 60.0]}, stats)
    assert bench.noise_reasons(calm, bench.summarize(calm, OPTIONS)) == []
    noisy = measured_of({"stock": [10.0, 20.0, 40.0], "exact": [15.0, 60.0, 120.0]}, stats)
    lines = bench.summarize(noisy, OPTIONS)
    (reason,) = bench.noise_reasons(noisy, lines)
    assert "25%" in reason and "of exact with 2 threads" in reason
    lines = [dataclasses.replace(line, oversubscribed=True) for line in lines]
    assert bench.noise_reasons(noisy, lines) == []


def test_cpu_times_are_those_of_the_cpus_that_are_used() -> None:
    stat = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 20 30 1000 5 1 2 50 7 7\ncpu1 900 0 0 0 0 0 0 900 0 0\nintr 5\n"
    assert bench_machine.cpu_times(stat, {0}) == (1.53, 0.5)


def test_meter_takes_own_time_for_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter([(0.0, 0.0, 5.0, 1.0), (10.0, 8.0, 15.0, 1.5)])
    monkeypatch.setattr(bench_machine.NoiseMeter, "_read", lambda self: next(reads))
    monkeypatch.setattr(bench_machine.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    noise = bench_machine.NoiseMeter(2).stop()
    assert noise == Noise(10.0, 2, pytest.approx(0.1), pytest.approx(0.0125))


def test_noisy_run_is_refused_in_one_line_unless_allowed(
    planned: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_machine.NoiseMeter, "stop", lambda self: Noise(3.0, 2, 0.4, 0.0))
    out = tmp_path / "bench.json"
    assert run(*planned, "--json", out) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and not out.exists()
    line = captured.err.strip()
    assert "\n" not in line and "other processes took 40%" in line and "--allow-noise" in line
    assert run(*planned, "--json", out, "--allow-noise") == 0
    assert "warning: other processes took 40%" in capsys.readouterr().out
    assert "other processes" in json.loads(out.read_text())["models"][0]["warnings"][0]


def test_check_noise_raises_what_users_expect() -> None:
    bench_machine.check_noise([], allowed=False)
    bench_machine.check_noise(["something"], allowed=True)
    with pytest.raises(NoiseError, match="something") as error:
        bench_machine.check_noise(["something"], allowed=False)
    assert isinstance(error.value, RuntimeError)


def test_peak_memory_sees_what_is_gone_at_the_end() -> None:
    with bench_machine.PeakMemory() as memory:
        block = np.ones(2**26, np.uint8)
        memory._done.wait(0.2)
        del block
    assert memory.peak_bytes - memory.start_bytes > 2**25
    assert memory.end_bytes - memory.start_bytes < 2**25


def test_table_json_csv_and_png_hold_every_figure(
    planned: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"bench.{name}" for name in ("json", "csv", "png")}
    flags = [word for name, path in files.items() for word in (f"--{name}", path)]
    assert run(*planned, "--threads", "1,2", "--allow-noise", *flags) == 0
    text = capsys.readouterr().out
    words = (
        "n_embd 64", "f32", "kernels", "threads", "GB/s", "density", "candidate", "bytes share", "overlap", "recall",
        "MB/token", "read bandwidth", "peak MiB", "limit", "up and down", "outside of FFN", "other processes took",
    )  # fmt: skip
    for word in words:
        assert word in text
    (report,) = json.loads(files["json"].read_text())["models"]
    assert [line["mode"] for line in report["lines"]] == ["stock", "exact"] * 2
    assert report["lines"][1]["kernels"] and len(report["measured"]["samples"]) == 8
    with files["csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["n_threads"], row["mode"]) for row in rows] == [
        ("1", "stock"), ("1", "exact"), ("2", "stock"), ("2", "exact"),
    ]  # fmt: skip
    assert list(rows[0]) == [field.name for field in dataclasses.fields(Line)]
    assert 0 < float(rows[1]["density"]) < 1 and rows[1]["recall"] == ""
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob("*.tmp")) == []


def test_picture_of_a_sweep_of_two_types(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = []
    for row_types in ("q4_0", "q8_0"):
        for model, density in (("a", 0.02), ("b", 0.1), ("c", 0.5)):
            ours = lines_at([density, density], [10.0, 9.0], model=model + row_types)
            ours[1] = dataclasses.replace(ours[1], mode="predicted")
            stock = dataclasses.replace(ours[0], mode="stock", density=1.0)
            lines += [dataclasses.replace(line, row_types=row_types) for line in (stock, *ours)]
    bars = plot_bench._bars(lines)
    assert len(bars) == 2 * (1 + 3 * 2) and [line for _, line, _ in bars].count(None) == 2
    path = plot_bench.write_plot(tmp_path / "sweep.png", lines)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_names_the_extra(
    planned: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(*planned, "--png", "out.png") == 1
    assert "powerinfer_py[plot]" in capsys.readouterr().err


def test_synthetic_models_are_made_once_per_density_and_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from powerinfer_py.tools import synthetic_model

    shape = synthetic_model.SyntheticOptions(layers=1, n_embd=64, n_ff=256, heads=2, vocab=512, tokens=64)
    monkeypatch.setitem(synthetic_model.PRESETS, "tiny", shape)
    arguments = ["bench", "--synthetic", "tiny", "--densities", "10,30,60", "--work-dir", tmp_path]
    arguments += ["--modes", "stock,exact", "-p", 8, "-n", 4, "-r", 1, "--allow-noise", "--csv", tmp_path / "out.csv"]
    assert run(*arguments) == 0
    captured = capsys.readouterr()
    assert str(tmp_path) in captured.err and captured.err.count("making") == 3
    assert "ms per % of density" in captured.out and "worst deviation" in captured.out
    with (tmp_path / "out.csv").open(newline="") as file:
        density = [float(row["density"]) for row in csv.DictReader(file) if row["mode"] == "exact"]
    assert density == sorted(density) and density[0] not in (0.1, 0.3)  # measured, not wished
    assert {path.name for path in tmp_path.glob("*.gguf")} == {
        f"tiny-q4_0-density-{d}{suffix}.gguf" for d in (10, 30, 60) for suffix in ("", ".powerinfer")
    }
    assert bench.synthetic_models("tiny", (0.1,), ("q4_0",), tmp_path) == [str(tmp_path / "tiny-q4_0-density-10.gguf")]
    assert "making" not in capsys.readouterr().err
    with pytest.raises(OptionError, match=r"7b"):
        bench.synthetic_models("8b", (0.1,), ("q4_0",), tmp_path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ("model", "--synthetic")),
        (["--kernels", "m.gguf"], ("model", "--kernels")),
        (["--kernels", "--png", "a.png"], ("png",)),
        (["m.gguf", "--sets", "avx2"], ("sets", "--kernels")),
        (["m.gguf", "--densities", "10"], ("densities", "--synthetic")),
        (["m.gguf", "--synthetic", "1.2b"], ("synthetic",)),
        (["a.gguf", "b.gguf", "--plan", "c.gguf"], ("plan", "2 models")),
        (["m.gguf", "--threads", "0"], ("--threads", "1,2,4")),
        (["--kernels", "--densities", "0,10"], ("--densities", "2,5,10")),
        (["m.gguf", "--repeats", "0"], ("repeats",)),
        (["m.gguf", "--csv", "missing/a.csv"], ("missing/a.csv", "folder")),
        (["m.gguf", "--modes", "exact", "--png", "a.png"], ("png", "stock")),
        (["--kernels", "--sets", "sse"], ("sse",)),
        (["--kernels", "--types", "iq1_s"], ("iq1_s",)),
        (["--kernels", "--types", "q4_0", "--n", "40"], ("--n",)),
    ],
)
def test_flags_that_have_no_effect_or_no_sense_are_refused(
    flags: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if "--png" in flags:
        pytest.importorskip("matplotlib")
    assert run("bench", *flags) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("powerinfer: ") and "\n" not in error
    assert all(word in error for word in words), error


def test_model_without_plan_and_unknown_mode_are_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(PlanError, match="no plan"):
        bench.measure(BenchOptions(str(tiny_model()), modes=("exact",), **FAST))
    with pytest.raises(OptionError, match="exakt"):
        bench.measure(BenchOptions(str(tiny_model()), modes=("exakt",), **FAST))


def test_stock_cannot_open_an_embedded_base(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> None:
    path = tiny_plan(tiny_model(), embedded=True)
    with pytest.raises(PlanError, match="stock"):
        bench.measure(BenchOptions(str(path), modes=("stock", "dense"), **FAST))
    assert bench.measure(BenchOptions(str(path), modes=("dense",), **FAST)).samples


def test_models_that_dont_fit_together_are_loaded_in_turns(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model()
    plan = tiny_plan(path)
    monkeypatch.setattr(bench, "available_memory_bytes", lambda: 2**20)
    options = {**FAST, "threads": (1, 2)}
    measured = bench.measure(BenchOptions(str(path), str(plan), ("stock", "dense"), **options))
    assert not measured.model.loaded_together
    assert [(sample.mode, sample.n_threads) for sample in measured.samples] == [
        ("stock", 1), ("stock", 2), ("dense", 1), ("dense", 2),
    ] * 2  # fmt: skip


def test_read_bandwidth_needs_bytes_and_threads() -> None:
    assert _core.read_bandwidth(2, SOME_MIB) > 0
    for n_threads, n_bytes in ((0, SOME_MIB), (2, 100)):
        with pytest.raises(OptionError, match="read_bandwidth"):
            _core.read_bandwidth(n_threads, n_bytes)


def test_kernel_sets_are_those_of_the_cpu() -> None:
    sets = {item["name"]: item for item in _core.kernel_sets()}
    assert sets["scalar"]["is_supported"] and "q4_0" in sets["scalar"]["row_types"]


def test_kernel_benchmark_reads_the_rows_that_were_asked_for() -> None:
    rows = _core.KernelBench("q8_0", 256, 512, SOME_MIB)
    assert rows.row_bytes == 8 * 34 and rows.working_set_bytes >= SOME_MIB
    quick = {"kernels": "scalar", "n_repeats": 2, "repeat_s": 0.002, "n_threads": 2}
    for op in bench_kernels.KERNELS:
        full = rows.run(op=op, **quick)
        assert full["pass_rows"] == 512 and full["pass_bytes"] == 512 * rows.row_bytes
        assert full["pass_s_min"] <= full["pass_s"] <= full["pass_s_max"] and full["core_hz"] > 1e6
        some = rows.run(op=op, density=0.1, **quick)
        assert some["pass_rows"] == pytest.approx(51.2, rel=DENSITY_TOLERANCE)
    for layout in bench_kernels.LAYOUTS:
        exact = rows.run(op="ffn", layout=layout, density=0.1, **quick)
        assert exact["pass_rows"] == pytest.approx(512 + 2 * 51.2, rel=DENSITY_TOLERANCE)
        predicted = rows.run(op="ffn", layout=layout, density=0.1, gate_density=0.13, **quick)
        assert predicted["pass_rows"] == pytest.approx(66.6 + 2 * 51.2, rel=DENSITY_TOLERANCE)
    for wrong in ({"op": "dott"}, {"op": "dot", "density": 0.0}, {"op": "ffn", "in_cache": True}):
        with pytest.raises(OptionError):
            rows.run(**wrong, **quick)
    with pytest.raises(OptionError, match="scaler"):
        rows.run(op="dot", kernels="scaler")


def test_kernel_report_has_a_line_for_each_kernel_and_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"kernels.{name}" for name in ("json", "csv")}
    flags = ["--types", "q4_0", "--sets", "scalar", "--n", 64, "--n-rows", 256, "--densities", "10,100", "--threads", 2]
    written = [word for name, path in files.items() for word in (f"--{name}", path)]
    assert run("bench", "--kernels", *flags, "-r", 1, "--allow-noise", *written) == 0
    text = capsys.readouterr().out
    for word in ("cycles/row", "GB/s", "core clock", "interleaved", "bundle", "separate", "cache", "memory"):
        assert word in text
    with files["csv"].open(newline="") as file:
        rows = list(csv.DictReader(file))
    # three kernels in cache and at two densities; exact and predicted at 10 %, both as one at 100 %, in three layouts
    assert len(rows) == 3 * 3 + 3 * 3
    assert {row["op"] for row in rows} == {"dot", "add", "unpack", "exact", "predicted"}
    assert all(float(row["gb_s"]) > 0 and float(row["cycles_per_row"]) > 0 for row in rows)
    report = json.loads(files["json"].read_text())
    assert len(report["report"]["lines"]) == len(rows) and report["options"]["types"] == ["q4_0"]


def test_kernel_benchmark_on_a_noisy_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = Noise(3.0, 2, 0.0, 0.3)
    report = bench_kernels.KernelReport((), {2: 1.0}, SOME_MIB, noise)
    monkeypatch.setattr(bench_kernels, "measure_kernels", lambda options: report)
    assert run("bench", "--kernels") == 1
    assert "the host took 30%" in capsys.readouterr().err


def test_defaults_of_the_kernel_benchmark_are_a_7b_shape() -> None:
    options = KernelOptions()
    assert (options.n, options.n_rows) == (4096, 11008) and not options.sets
