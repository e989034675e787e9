"""train: shards against plain captures, planted structure found, sizes by cost, the core's figures against the report's."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from test_profile import Stopper

from powerinfer_py import cli
from powerinfer_py import format as pi_format
from powerinfer_py.errors import FormatError, OptionError, PlanError
from powerinfer_py.tools import mlp_predictor, predictor, predictor_cost, text_runner, train_layer
from powerinfer_py.tools import train_predictors as tp
from powerinfer_py.tools.active_sets import ActiveSets
from powerinfer_py.tools.capture_activations import PARTS, Shards, choose_sample

N_CTX = 64
N_TOKENS = 24 * N_CTX
# float32 sums of 64 products of values of order 1 may differ from double ones by this much.
GATE_ERROR = 1e-5
# Shares of 200 to 1500 tokens x 256 neurons; the core multiplies inputs that were changed by what was missed before.
SHARE_ERROR = 0.02
# Another order of sums moves a neuron at the very edge now and then.
EDGE_SHARE = 1e-4
# Rates at which reading the gate is dear, and at which it is nearly free.
DEAR_GATE = predictor_cost.Rates(
    "any", 1, False, "f32", 0.1, ((0.1, 0.1),), {"q8_0": 10.0, "q4_0": 10.0, "f16": 10.0}, 0.0
)
FREE_GATE = dataclasses.replace(DEAR_GATE, gate_gb_s=1e3, gathered_gb_s=((0.1, 1e3),))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Random letters: inputs that fill all dimensions."""
    letters = np.random.default_rng(0).integers(ord("!"), ord("~"), 3000, dtype=np.uint8)
    path = tmp_path / "text.txt"
    path.write_bytes(letters.tobytes())
    return path


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    predictor_cost.write_rates(DEAR_GATE, tmp_path / "rates.json")
    return tmp_path / "rates.json"


@pytest.fixture
def options(tmp_path: Path, text: Path, rates: Path) -> tp.TrainOptions:
    """Two ReLU layers whose gates have ranks 12 and 40, a shuffled plan, linear predictors, one process."""
    model = tiny_models.write_tiny_model(tmp_path / "m.gguf", n_layer=2, gate_ranks=(12, 40))
    plan = tiny_models.write_tiny_plan(model, activation="relu", order_seed=3)
    return tp.TrainOptions(
        model, (text,), plan, kind="linear", tokens=N_TOKENS, ctx=N_CTX, threads=1, jobs=1, rates=rates, recall=0.98
    )


def train(options: tp.TrainOptions, steps: Stopper | None = None, notes: list[str] | None = None) -> tp.Training:
    return tp.make_training(options, steps or Stopper(), (notes if notes is not None else []).append)


def arguments(options: tp.TrainOptions, *more: str) -> list[str]:
    limits = ["--tokens", str(options.tokens), "--ctx", str(options.ctx), "--threads", "1", "--jobs", "1"]
    kind = ["--kind", options.kind, "--rates", str(options.rates)]
    return ["train", str(options.model), "--text", str(options.text[0]), *limits, *kind, *more]


def shards_of(options: tp.TrainOptions) -> Shards:
    """Those that a run with keep left."""
    plan, _ = tp.plan_to_train(options)
    layers = tp.chosen_layers(plan, options)
    n_ff = {i: plan.layers[i].n_ff for i in layers}
    n_windows = options.tokens // options.ctx
    token_bytes = Shards.token_bytes(plan.n_embd, list(n_ff.values()))
    sample = choose_sample(n_windows, options.ctx, token_bytes, options.max_bytes, options.seed)
    return Shards(options.folder, {}, sample, plan.n_embd, n_ff)


# ---- What is active, and what is captured --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "values"),
    [
        ("llama", {"activation": "relu"}),
        ("llama", {"activation": "relu", "activation_param": 0.3}),
        ("llama", {"activation": "relu_sqr"}),
        ("llama", {"activation": "drelu"}),
        ("llama", {"activation": "silu", "threshold": 0.1}),
        ("llama", {"activation": "silu", "threshold": 0.1, "product_threshold": 0.2}),
        ("gpt2", {"activation": "relu"}),
        ("falcon", {"activation": "gelu", "product_threshold": 0.2}),
    ],
)
def test_active_sets_are_those_that_the_core_counts(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], text: Path, arch: str, values: dict
) -> None:
    model = tiny_model(arch, n_layer=2)
    path = tiny_plan(model, order_seed=1, **values)
    plan = pi_format.read_plan(path)
    base = plan.open_base(model)
    mode = "threshold" if values["activation"] in ("silu", "gelu") else "exact"
    inputs: dict[int, list[np.ndarray]] = {0: [], 1: []}
    with text_runner.Runner(path, model, n_ctx=N_CTX, n_threads=1, sparsity=mode, note=print) as runner:
        windows, _ = text_runner.text_windows(runner, [text], 4 * N_CTX, n_needed=4, note=print)
        runner.plan.set_capture(lambda i_layer, x: inputs[i_layer].append(x))
        for window in windows:
            runner.run(window)
        counts = [runner.plan.counts(i)["active"] for i in range(2)]
    for i, layer in enumerate(plan.layers):
        sets = ActiveSets(base, plan, i)
        fires, active = sets.of(np.concatenate(inputs[i]))
        assert not (active & ~fires).any() and 0.02 < active.mean() < 0.9
        assert sets.up_depends == (values["activation"] == "drelu" or (plan.gated and layer.product_threshold > 0))
        found = np.zeros(layer.n_ff)
        found[layer.neuron_order] = active.sum(axis=0)
        # neurons at the very edge; gelu is looked up by a rounded input
        assert np.abs(found - counts[i]).sum() <= max(2, 1e-3 * active.sum())


def test_shards_hold_what_a_plain_computation_gives(options: tp.TrainOptions) -> None:
    train(dataclasses.replace(options, keep=True))
    shards = shards_of(options)
    plan, base = tp.plan_to_train(options)
    inputs: dict[int, list[np.ndarray]] = {0: [], 1: []}
    with text_runner.Runner(
        options.out, options.model, n_ctx=N_CTX, n_threads=1, sparsity="exact", note=print
    ) as runner:
        windows, _ = text_runner.text_windows(runner, options.text, N_TOKENS, n_needed=1, note=print)
        runner.plan.set_capture(lambda i_layer, x: inputs[i_layer].append(x))
        for number in shards.sample.order:
            runner.run(windows[number])
    for i, layer in enumerate(plan.layers):
        x = np.concatenate(inputs[i])
        assert np.array_equal(shards.x(i), x.astype(np.float16))
        gate = shards.x(i).astype(np.float64) @ base.rows_f32(f"blk.{i}.ffn_gate.weight").astype(np.float64).T
        gate = gate[:, layer.neuron_order]
        active = shards.active(i, slice(None))
        assert np.array_equal(active[np.abs(gate) > GATE_ERROR], (gate > 0)[np.abs(gate) > GATE_ERROR])
        # halves decide as the model's own floats do
        exact = x.astype(np.float64) @ base.rows_f32(f"blk.{i}.ffn_gate.weight").astype(np.float64).T
        assert ((exact[:, layer.neuron_order] > 0) != active).mean() < 1e-3


def test_shards_keep_to_the_byte_limit_and_parts_share_no_window(options: tp.TrainOptions) -> None:
    token_bytes = 2 * (2 * 64 + 256 // 8)
    for limit, n_kept in ((token_bytes * 24 * 7 + 5, 7), (token_bytes * 10, 1)):
        notes: list[str] = []
        train(dataclasses.replace(options, keep=True, max_bytes=limit), notes=notes)
        shards = shards_of(dataclasses.replace(options, max_bytes=limit))
        files = [path(i) for i in range(2) for path in (shards.x_path, shards.active_path)]
        header = 128  # of a .npy file
        assert sum(path.stat().st_size - header for path in files) <= limit
        assert shards.sample.n_kept == n_kept and any("fit into --bytes" in note for note in notes)
        parts = [set(shards.sample.windows(part).tolist()) for part in PARTS]
        assert all(parts) and len(set.union(*parts)) == sum(map(len, parts)) == len(shards.sample.order)
        rows = [shards.sample.rows(part) for part in PARTS]
        assert rows[0].start == 0 and rows[2].stop == shards.sample.n_tokens
        assert rows[0].stop == rows[1].start and rows[1].stop == rows[2].start
    with pytest.raises(OptionError, match=rf"bytes: 100; one token takes {token_bytes}"):
        train(dataclasses.replace(options, max_bytes=100))


def test_order_of_the_plan_is_respected(options: tp.TrainOptions) -> None:
    found = {}
    for seed in (None, 5):
        plan = tiny_models.write_tiny_plan(options.model, activation="relu", order_seed=seed)
        train(dataclasses.replace(options, out=plan, keep=True))
        shards = shards_of(dataclasses.replace(options, out=plan))
        written = pi_format.read_plan(plan)
        for i, layer in enumerate(written.layers):
            order = np.arange(256) if layer.neuron_order is None else layer.neuron_order
            scores = shards.x(i).astype(np.float32) @ layer.fc1.to_f32().T @ layer.fc2.to_f32().T
            active, kept = (np.empty((shards.sample.n_tokens, 256), bool) for _ in range(2))
            active[:, order] = shards.active(i, slice(None))
            kept[:, order] = scores >= layer.predictor_threshold
            found[seed, i] = active, kept
    for i in range(2):
        assert (found[None, i][0] != found[5, i][0]).mean() < EDGE_SHARE
        assert (found[None, i][1] != found[5, i][1]).mean() < SHARE_ERROR


# ---- Fits ----------------------------------------------------------------------------------------------------------


def test_linear_finds_planted_gates_and_the_core_agrees_with_the_report(options: tp.TrainOptions) -> None:
    found = train(dataclasses.replace(options, recall=0.995))
    written = pi_format.read_plan(options.out)
    for result, layer in zip(found.layers, written.layers):
        assert result.kind == layer.predictor == "linear"
        assert result.recall > 0.98 and result.accuracy > 0.95
        assert result.candidate_density < 1.1 * result.density
        assert (layer.predictor_recall, layer.predictor_candidate_density) == pytest.approx(
            (result.recall, result.candidate_density)
        )
        assert layer.fc1.n_rows == result.rank and result.rank % 32 == 0
        assert result.n_parameters == result.rank * (64 + 256) and result.saving_us > 0
    totals = found.totals()
    assert found.check.recall == pytest.approx(totals["recall"], abs=SHARE_ERROR)
    assert found.check.candidate_density == pytest.approx(totals["candidate_density"], abs=SHARE_ERROR)
    assert abs(found.check.loss) < 0.05
    assert not options.folder.exists()


def test_report_is_measured_on_tokens_that_chose_nothing(options: tp.TrainOptions) -> None:
    found = train(dataclasses.replace(options, keep=True))
    shards = shards_of(options)
    for i, layer in enumerate(pi_format.read_plan(options.out).layers):

        def quality(part: str, i: int = i, layer: pi_format.PlanLayer = layer) -> predictor.PredictorQuality:
            rows = shards.sample.rows(part)
            scores = shards.x(i)[rows].astype(np.float32) @ layer.fc1.to_f32().T @ layer.fc2.to_f32().T
            return predictor.measure_predictor(scores, shards.active(i, rows), layer.predictor_threshold)

        result = found.layers[i]
        measured = quality("measure")
        assert (measured.recall, measured.candidate_density, measured.density, measured.accuracy) == pytest.approx(
            (result.recall, result.candidate_density, result.density, result.accuracy), abs=1e-4
        )
        assert quality("calibrate").recall == pytest.approx(options.recall, abs=1e-3)


@pytest.mark.parametrize("activation", ["relu", "drelu", "silu"])
def test_every_activation_gets_predictors_that_run(options: tp.TrainOptions, activation: str) -> None:
    limits = {"threshold": 0.1, "product_threshold": 0.1} if activation == "silu" else {"activation_param": 0.2}
    limits = {} if activation == "drelu" else limits
    tiny_models.write_tiny_plan(options.model, activation=activation, order_seed=2, **limits)
    found = train(dataclasses.replace(options, recall=0.95, max_parameters=0.5))
    assert [layer.kind for layer in found.layers] == ["linear"] * 2
    assert found.check.without == ("threshold" if activation == "silu" else "exact")
    assert found.check.recall == pytest.approx(found.totals()["recall"], abs=2 * SHARE_ERROR)


def test_mlp_beats_linear_on_activity_that_no_row_decides() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3000, 32), dtype=np.float32)
    directions = rng.standard_normal((4, 32), dtype=np.float32)
    active = np.abs(x @ directions.repeat(24, axis=0).T) > 1.5 * np.sqrt(32)
    moment = predictor.estimate_moment(x[:2000])
    # what is linear in the four products
    mixture = rng.standard_normal((96, 4), dtype=np.float32) / np.float32(6)
    start = predictor.MlpPredictor(
        np.concatenate([directions, -directions]), np.concatenate([mixture, -mixture], axis=1)
    )

    def candidates(found: predictor.LinearPredictor) -> float:
        scores = found.scores(x[2000:])
        threshold = predictor.calibrate_threshold(scores[:500], active[2000:2500], 0.95)
        return predictor.measure_predictor(scores[500:], active[2500:], threshold).candidate_density

    options = mlp_predictor.MlpOptions(0.95, epochs=20)
    packed = np.packbits(active[:2000], axis=1, bitorder="little")
    mlp, epochs = mlp_predictor.train_mlp(start, x[:2000].astype(np.float16), packed, 0.0, 3.0, candidates, options)
    linear = predictor.fit_probabilities(x[:2000], active[:2000], moment, 8)
    assert candidates(mlp) < 0.97 * candidates(linear.scaled(8)) and 0 < epochs <= 20
    assert mlp.kind == "mlp" and np.all(mlp.hidden(x) >= 0)


def test_starts_of_an_mlp_score_as_the_linear_one() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((500, 32), dtype=np.float32)
    x[:, 0] = 3.0
    rows = rng.standard_normal((64, 32), dtype=np.float32)
    moment = predictor.estimate_moment(x)
    fit = predictor.fit_products(rows, np.zeros(64, np.float32), moment, 16)
    shifted, paired = mlp_predictor.start_of(fit, 16, x, predictor.constant_direction(moment))
    assert shifted.rank == paired.rank == 16
    assert np.allclose(paired.scores(x), fit.scaled(8).scores(x), atol=1e-3)
    scores = fit.scaled(15).scores(x)
    assert np.abs(shifted.scores(x) - scores).mean() < 0.05 * np.abs(scores).mean()
    assert np.allclose(mlp_predictor.balanced(paired, x).scores(x), paired.scores(x), atol=1e-3)


def test_auto_takes_the_better_kind_and_mlp_runs_in_the_core(options: tp.TrainOptions) -> None:
    found = train(dataclasses.replace(options, kind="mlp", epochs=2, layers=(1,)))
    assert [layer.predictor for layer in pi_format.read_plan(options.out).layers] == ["none", "mlp"]
    assert found.check.recall == pytest.approx(found.layers[0].recall, abs=SHARE_ERROR)
    assert found.check.candidate_density == pytest.approx(found.layers[0].candidate_density, abs=SHARE_ERROR)
    found = train(dataclasses.replace(options, kind="auto", epochs=2, layers=(0,)))
    assert found.layers[0].kind == "linear"  # its gate's rank is 12: nothing to be gained
    assert [layer.predictor for layer in found.plan.layers] == ["linear", "mlp"]


def test_rows_are_of_the_type_asked_for_and_decide_nearly_the_same(options: tp.TrainOptions) -> None:
    auto = train(options).layers
    for row_type in ("q8_0", "q4_0", "f16"):
        fixed = train(dataclasses.replace(options, row_type=row_type)).layers
        assert [layer.row_type for layer in fixed] == [row_type] * 2
        assert pi_format.read_plan(options.out).layers[0].fc2.row_type.name == row_type.upper()
        if row_type == "q8_0":
            for layer in fixed:
                assert abs(layer.recall - layer.float_recall) < 0.01
                assert layer.candidate_density == pytest.approx(layer.float_candidate_density, rel=0.03)
    assert {layer.row_type for layer in auto} <= {"q8_0", "q4_0", "f16"}


# ---- Sizes ---------------------------------------------------------------------------------------------------------


def test_harder_layers_get_larger_predictors(options: tp.TrainOptions) -> None:
    easy, hard = train(options).layers
    assert easy.rank == 32 < hard.rank
    easy, hard = train(dataclasses.replace(options, max_parameters=0.3)).layers
    assert 32 == easy.rank <= hard.rank


def test_nothing_is_made_where_nothing_pays(options: tp.TrainOptions, capsys: pytest.CaptureFixture[str]) -> None:
    train(options)
    predictor_cost.write_rates(FREE_GATE, options.rates)
    found = train(options)
    assert [layer.kind for layer in found.layers] == ["none"] * 2
    assert all("reading the gate takes 0.1 us" in layer.reason for layer in found.layers)
    assert found.check is None
    assert all(layer.predictor == "none" and layer.fc1 is None for layer in pi_format.read_plan(options.out).layers)
    assert cli.main(arguments(options, "--no-plot")) == 0
    assert "Predictors don't pay here" in capsys.readouterr().out
    found = train(dataclasses.replace(options, max_parameters=0.2))
    assert found.totals()["parameters_share"] <= 0.2
    assert [layer.kind for layer in found.layers] == ["linear"] * 2 and all(v.saving_us < 0 for v in found.layers)


def test_cost_is_rows_not_read_less_the_predictor() -> None:
    rates = predictor_cost.Rates("any", 1, False, "f32", 4.0, ((0.1, 2.0),), {"q8_0": 8.0, "f16": 8.0}, 1.0)
    cost = predictor_cost.LayerCost(rates, 64, 1000, 256)
    assert cost.gate_us == pytest.approx(1000 * 256 / 4e3)
    assert cost.predictor_us(32, "q8_0") == pytest.approx((32 * 68 + 1000 * 34) / 8e3 + 1.0)
    saving = cost.saving_us(32, "q8_0", 0.1)
    assert saving == pytest.approx(64.0 - 100 * 256 / 2e3 - cost.predictor_us(32, "q8_0"))
    assert cost.saving_us(32, "q8_0", 0.1, up_saved=0.1) == pytest.approx(saving + 100 * 256 / 2e3)
    assert cost.largest_rank("q8_0") == 64


def test_search_starts_with_sparsity_and_skew_and_grows_while_it_helps() -> None:
    ranks = [
        predictor_cost.start_rank(4096, density, hot)
        for density, hot in ((0.02, 0.2), (0.1, 0.2), (0.1, 0.6), (0.5, 0.8))
    ]
    assert ranks == sorted(set(ranks)) and all(rank % 32 == 0 for rank in ranks)
    assert predictor_cost.start_rank(64, 0.0, 0.0) == 32
    looked_at = []

    def evaluate(limit: int) -> predictor_cost.SizeCurve:
        looked_at.append(limit)
        return predictor_cost.SizeCurve((limit,), (0.1,), (0.9,), 0.1)

    curve = predictor_cost.grow(evaluate, lambda curve: curve.ranks[-1] < 200, 64, 1024)
    assert looked_at == [64, 96, 160, 256] and curve.ranks == (256,)
    assert predictor_cost.grow(evaluate, lambda curve: True, 640, 704).ranks == (704,)


def test_a_budget_goes_where_it_saves_most() -> None:
    costs = [predictor_cost.LayerCost(DEAR_GATE, 64, 256, 256)] * 3
    curves = [
        predictor_cost.SizeCurve((32, 64), (0.2, 0.19), (0.9, 0.9), 0.1),
        predictor_cost.SizeCurve((32, 64), (0.9, 0.3), (0.9, 0.9), 0.1),
        predictor_cost.SizeCurve((32, 64), (0.99, 0.98), (0.9, 0.9), 0.1),
    ]
    unit = costs[0].n_parameters(32)
    assert predictor_cost.share_budget(curves, costs, 0.5 * unit) == [0, 0, 0]
    assert predictor_cost.share_budget(curves, costs, 1.5 * unit) == [32, 0, 0]
    assert predictor_cost.share_budget(curves, costs, 3.0 * unit) == [32, 64, 0]
    assert predictor_cost.share_budget(curves, costs, 9.0 * unit) == [64, 64, 64]


def test_rates_are_measured_kept_and_read(options: tp.TrainOptions, tmp_path: Path) -> None:
    measured = train(dataclasses.replace(options, rates=None, keep=True)).rates
    assert measured.in_cache and measured.gate_type == "f32" and measured.gate_gb_s > 0
    kept = options.folder / "rates.json"
    assert predictor_cost.read_rates(kept, "f32") == measured
    with pytest.raises(FormatError, match="rates for gates of f32"):
        predictor_cost.read_rates(kept, "q4_0")
    for content in ("{}", "no", json.dumps({**json.loads(kept.read_text()), "gate_gb_s": -1})):
        bad = tmp_path / "bad.json"
        bad.write_text(content)
        with pytest.raises(FormatError, match=r"bad\.json: it can't be read"):
            predictor_cost.read_rates(bad, "f32")


# ---- Stopping and going on -----------------------------------------------------------------------------------------


# Stopped while text runs, while active sets are made, while sizes are sought, while predictors are made.
@pytest.mark.parametrize("at", [5, 25, 28, 29])
def test_a_resumed_run_writes_what_an_uninterrupted_one_does(options: tp.TrainOptions, at: int) -> None:
    before = options.out.read_bytes()
    out = options.out.with_name("other.powerinfer.gguf")
    whole = Stopper()
    train(dataclasses.replace(options, out=out), whole)
    with pytest.raises(KeyboardInterrupt):
        train(options, Stopper(at))
    assert options.out.read_bytes() == before and options.folder.exists()
    rest = Stopper()
    notes: list[str] = []
    train(dataclasses.replace(options, resume=True), rest, notes)
    assert options.out.read_bytes() == out.read_bytes()
    assert not options.folder.exists() and not notes
    assert rest.n <= whole.n


def test_ctrl_c_keeps_finished_layers_and_ends_the_workers(options: tp.TrainOptions) -> None:
    notes: list[str] = []
    parallel = dataclasses.replace(options, jobs=2)
    n_before = len(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        train(parallel, Stopper(24 + 2 + 2 + 1), notes)
    assert len(multiprocessing.active_children()) == n_before
    assert "--resume goes on" in notes[-1]
    kept = sorted(options.folder.glob("layer-*.predictor.npz"))
    assert kept
    times = [path.stat().st_mtime_ns for path in kept]
    found = train(dataclasses.replace(parallel, resume=True, keep=True))
    assert [path.stat().st_mtime_ns for path in kept] == times
    assert [layer.kind for layer in found.layers] == ["linear"] * 2
    # the same as one process makes, but for how long it took
    alone = train(dataclasses.replace(options, out=options.out.with_name("other.powerinfer.gguf"))).layers
    assert [dataclasses.replace(v, seconds=0) for v in alone] == [
        dataclasses.replace(v, seconds=0) for v in found.layers
    ]


def test_kept_shards_serve_other_options(options: tp.TrainOptions) -> None:
    train(dataclasses.replace(options, keep=True))
    steps = Stopper()
    found = train(dataclasses.replace(options, resume=True, recall=0.9), steps)
    assert found.layers[0].recall == pytest.approx(0.9, abs=SHARE_ERROR)
    # text isn't run again: the same number of steps, but the first 24 at once
    assert steps.phases[0] == "running text"


def test_shards_of_another_run_are_refused(options: tp.TrainOptions, tmp_path: Path) -> None:
    train(dataclasses.replace(options, keep=True))
    resumed = dataclasses.replace(options, resume=True)
    with pytest.raises(PlanError, match=r"capture\.json: it was made with seed 0; this run has 1"):
        train(dataclasses.replace(resumed, seed=1))
    with pytest.raises(PlanError, match=r"it was made with layers \[0, 1\]; this run has \[1\]"):
        train(dataclasses.replace(resumed, layers=(1,)))
    tiny_models.write_tiny_plan(options.model, activation="relu", order_seed=4)
    with pytest.raises(PlanError, match="it was made with order"):
        train(resumed)
    (options.folder / "capture.json").write_text("{")
    with pytest.raises(FormatError, match=r"capture\.json: it can't be read"):
        train(resumed)


# ---- Files and options ---------------------------------------------------------------------------------------------


def test_wrong_files_are_refused(options: tp.TrainOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny_models.write_tiny_model(tmp_path / "other.gguf", n_layer=2, seed=9)
    assert cli.main(["train", str(options.out), "--base", str(other), "--text", str(options.text[0])]) == 1
    errors = capsys.readouterr().err
    assert "the plan was made for" in errors and errors.count("\n") == 1
    assert cli.main(["train", str(other), "--text", str(options.text[0])]) == 1
    assert "run `powerinfer profile" in capsys.readouterr().err
    silu = tiny_models.write_tiny_plan(options.model, activation="silu")
    before = silu.read_bytes()
    assert cli.main(arguments(options)) == 1
    errors = capsys.readouterr().err
    assert "layer 0 has no threshold" in errors and "powerinfer profile" in errors and errors.count("\n") == 1
    assert silu.read_bytes() == before and not options.folder.exists()


def test_plan_keeps_what_it_had_and_may_carry_its_base(options: tp.TrainOptions, tmp_path: Path) -> None:
    packed = tmp_path / "packed.powerinfer.gguf"
    tiny_models.write_tiny_plan(
        options.model, packed, activation="relu", order_seed=3, frequency=True, ffn_down_t="Q8_0", embedded=True
    )
    before = pi_format.read_plan(packed)
    found = train(dataclasses.replace(options, model=packed, out=packed, layers=(1,)))
    after = pi_format.read_plan(packed)
    assert after.is_embedded and bytes(after.open_base().files[0].whole()) == options.model.read_bytes()
    assert [layer.predictor for layer in after.layers] == ["none", "linear"] and len(found.layers) == 1
    for old, new in zip(before.layers, after.layers):
        assert np.array_equal(old.neuron_order, new.neuron_order) and old.digest == new.digest
        assert np.array_equal(old.neuron_frequency, new.neuron_frequency)
        assert np.array_equal(old.ffn_down_t.data, new.ffn_down_t.data)


def test_without_torch_linear_works_and_mlp_says_what_to_install(
    options: tp.TrainOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert train(options).layers[0].kind == "linear"
    notes: list[str] = []
    assert train(dataclasses.replace(options, kind="auto"), notes=notes).layers[0].kind == "linear"
    assert any("torch isn't installed" in note for note in notes)
    for wrong in (dataclasses.replace(options, kind="mlp"), dataclasses.replace(options, kind="auto", strict=True)):
        with pytest.raises(OptionError, match=r"pip install 'powerinfer_py\[train\]'"):
            train(wrong)
    with pytest.raises(OptionError, match="torch finds no GPU"):
        train(dataclasses.replace(options, device="cuda"))


def test_report_is_a_table_json_and_a_picture(options: tp.TrainOptions, capsys: pytest.CaptureFixture[str]) -> None:
    report = options.out.with_name("report.json")
    assert cli.main(arguments(options, "--json", str(report))) == 0
    out = capsys.readouterr().out
    for word in ("7.09%", "> 95%", "< 10%", "GB/s", "perplexity", "linear 32", "candidate density", "us per token"):
        assert word in out, word
    found = json.loads(report.read_text())
    assert [layer["kind"] for layer in found["layers"]] == ["linear"] * 2
    assert found["check"]["loss"] == pytest.approx(0, abs=0.05) and found["rates"]["gate_gb_s"] == 0.1
    assert options.out.with_name("m.predictors.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--recall", "2"], "'2'; expected a share between 0 and 1"),
        (["--bytes", "2X"], "'2X'; expected a number of bytes"),
        (["--layers", "a-b"], "'a-b'; expected layers such as 0-3,7"),
        (["--layers", "0-7"], "layers: 2; expected some of those that the plan covers: 0, 1"),
        (["--out", "plan.gguf"], "expected a name that ends in .powerinfer.gguf"),
        (["--out", "nowhere/x.powerinfer.gguf"], "nowhere isn't a folder"),
        (["--ctx", "4096"], "the model was trained with 1024"),
        (["--tokens", "128"], "expected at least 3 windows"),
    ],
)
def test_wrong_options_are_one_line(
    options: tp.TrainOptions, capsys: pytest.CaptureFixture[str], flags: list[str], found: str
) -> None:
    assert cli.main(arguments(options, *flags)) == 1
    errors = capsys.readouterr().err
    assert found in errors and errors.count("\n") == 1
    assert not list(options.out.parent.glob("*.train"))


def test_kept_results_are_read_back(options: tp.TrainOptions) -> None:
    found = train(dataclasses.replace(options, keep=True))
    task = dataclasses.replace(_task(options), most_parameters=None)
    assert train_layer.kept_result(task, found.layers[0].rank) == found.layers[0]
    assert train_layer.kept_result(task, found.layers[0].rank + 32) is None
    assert train_layer.kept_result(dataclasses.replace(task, recall=0.5), found.layers[0].rank) is None


def _task(options: tp.TrainOptions) -> train_layer.LayerTask:
    plan, base = tp.plan_to_train(options)
    options = dataclasses.replace(options, device="cpu")
    return tp._tasks(options, plan, base, [0, 1], shards_of(options), DEAR_GATE)[0]
