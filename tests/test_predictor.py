"""Low-rank predictors: optimality against exact SVD, shrinkage, rounding, thresholds at their edges."""

from __future__ import annotations

import numpy as np
import pytest

from powerinfer_py.errors import OptionError
from powerinfer_py.tools import predictor
from powerinfer_py.tools.row_types import dequantize_rows, quantize_rows, row_bytes

# Randomised subspace iteration against the exact optimum, relative, on slowly falling spectra.
OPTIMUM_TOLERANCE = 0.001
# The same with the default number of iterations.
ONE_ITERATION_TOLERANCE = 0.05
# float32 products of a few hundred terms, relative to the largest result.
F32_TOLERANCE = 1e-4


def samples(n: int, n_embd: int, seed: int) -> np.ndarray:
    """Inputs with unequal variances and a constant part, as FFN inputs have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, n_embd)) * np.linspace(0.2, 2.0, n_embd) + 1.5 * (np.arange(n_embd) < 4)
    return x.astype(np.float32)


def gate_matrix(n_ff: int, n_embd: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weak = rng.standard_normal((n_ff, n_embd)) * 0.3
    strong = rng.standard_normal((n_ff, 8)) @ rng.standard_normal((8, n_embd))
    return (weak + strong).astype(np.float32)


def test_moment_is_the_sample_moment_when_samples_abound() -> None:
    x = samples(20000, 24, 1)
    moment = predictor.estimate_moment(x)
    wide = x.astype(np.float64)
    expected = wide.T @ wide / len(x)
    found = moment.apply(np.eye(24, dtype=np.float32))
    assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()


def test_moment_shrinks_to_isotropic_when_samples_are_few() -> None:
    x = np.random.default_rng(2).standard_normal((30, 400)).astype(np.float32)
    moment = predictor.estimate_moment(x)
    assert moment.isotropic > 0.8
    draws = moment.draw(4000, np.random.default_rng(3))
    assert np.square(draws).mean() == pytest.approx(np.square(x).mean(), rel=0.1)


@pytest.mark.parametrize("rank", [1, 5, 16, 40])
def test_low_rank_fit_is_the_exact_optimum(rank: int) -> None:
    gate, x = gate_matrix(120, 64), samples(3000, 64, 1)
    root = np.linalg.cholesky(predictor.estimate_moment(x).apply(np.eye(64, dtype=np.float32)).astype(np.float64))
    best = np.square(np.linalg.svd(gate.astype(np.float64) @ root, compute_uv=False)[rank:]).sum()
    fit = predictor.fit_linear_predictor(gate, x, rank, n_iterations=8)
    assert fit.fc1.shape == (rank, 64) and fit.fc2.shape == (120, rank)
    reached = np.square((gate - fit.fc2 @ fit.fc1).astype(np.float64) @ root).sum()
    assert best * (1 - F32_TOLERANCE) <= reached <= best * (1 + OPTIMUM_TOLERANCE)
    fit = predictor.fit_linear_predictor(gate, x, rank)
    assert np.square((gate - fit.fc2 @ fit.fc1).astype(np.float64) @ root).sum() <= best * (1 + ONE_ITERATION_TOLERANCE)


@pytest.mark.parametrize("shape", [(120, 64), (48, 64)])
def test_full_rank_reproduces_the_gate(shape: tuple[int, int]) -> None:
    gate, x = gate_matrix(*shape), samples(500, shape[1], 1)
    fit = predictor.fit_linear_predictor(gate, x, min(shape))
    exact = x @ gate.T
    assert np.abs(fit.scores(x) - exact).max() < F32_TOLERANCE * np.abs(exact).max()


def test_gate_of_lower_rank_than_asked() -> None:
    rng = np.random.default_rng(5)
    gate = (rng.standard_normal((80, 3)) @ rng.standard_normal((3, 32))).astype(np.float32)
    x = samples(200, 32, 1)
    fit = predictor.fit_linear_predictor(gate, x, 10)
    exact = x @ gate.T
    assert np.isfinite(fit.fc1).all() and np.isfinite(fit.fc2).all()
    assert np.abs(fit.scores(x) - exact).max() < 1e-3 * np.abs(exact).max()


def test_same_seed_same_predictor() -> None:
    gate, x = gate_matrix(64, 32), samples(100, 32, 1)
    first, second = (predictor.fit_linear_predictor(gate, x, 7, seed=3) for _ in range(2))
    assert np.array_equal(first.fc1, second.fc1) and np.array_equal(first.fc2, second.fc2)


@pytest.mark.parametrize(("row_type", "share"), [("q4_0", 0.3), ("q8_0", 0.3), ("f16", 1.0), ("f32", 1.0)])
def test_rounding_keeps_each_neurons_average_score(row_type: str, share: float) -> None:
    n_embd, n_ff = 128, 512
    rng = np.random.default_rng(4)
    x = rng.standard_normal((900, n_embd)).astype(np.float32)
    x[:, :32] = 1.0
    gate = gate_matrix(n_ff, n_embd)
    gate[:, :32] = -rng.uniform(0.0, 2.0, (n_ff, 1))  # offsets far larger than what four bits resolve
    fit = predictor.fit_linear_predictor(gate, x[:600], 63)
    rows = predictor.round_predictor(fit, x[:600], row_type)
    assert rows.fc1.shape == (64, row_bytes(n_embd, row_type)) and rows.fc2.shape == (n_ff, row_bytes(64, row_type))
    assert np.array_equal(dequantize_rows(rows.fc2, row_type), rows.rounded.fc2)

    def average_error(rounded: predictor.LinearPredictor) -> float:
        return float(np.sqrt(np.square((rounded.scores(x[600:]) - fit.scores(x[600:])).mean(axis=0)).mean()))

    uncorrected = predictor.LinearPredictor(
        dequantize_rows(quantize_rows(np.concatenate([fit.fc1, 0 * fit.fc1[:1]]), row_type), row_type),
        dequantize_rows(quantize_rows(np.pad(fit.fc2, ((0, 0), (0, 1))), row_type), row_type),
    )
    assert average_error(rows.rounded) <= share * average_error(uncorrected) + 1e-5


@pytest.mark.parametrize("recall", [0.5, 0.9, 0.95, 1.0])
def test_threshold_is_the_highest_that_keeps_the_recall(recall: float) -> None:
    rng = np.random.default_rng(6)
    scores = rng.standard_normal((40, 50)).astype(np.float32)
    active = scores + 0.5 * rng.standard_normal(scores.shape) > 1.0
    threshold = predictor.calibrate_threshold(scores, active, recall)
    assert predictor.measure_predictor(scores, active, threshold).recall >= recall
    above = np.nextafter(np.float32(threshold), np.float32(np.inf))
    assert predictor.measure_predictor(scores, active, above).recall < recall


def test_threshold_when_all_are_active_keeps_the_recall() -> None:
    scores = np.arange(100, dtype=np.float32).reshape(10, 10)
    active = np.ones_like(scores, dtype=bool)
    assert predictor.calibrate_threshold(scores, active, 1.0) == 0.0
    quality = predictor.measure_predictor(scores, active, predictor.calibrate_threshold(scores, active, 0.9))
    assert quality.recall == pytest.approx(0.9) and quality.density == 1.0


def test_threshold_when_none_is_active_skips_all_that_was_seen() -> None:
    scores = np.arange(100, dtype=np.float32).reshape(10, 10)
    active = np.zeros_like(scores, dtype=bool)
    threshold = predictor.calibrate_threshold(scores, active, 0.95)
    quality = predictor.measure_predictor(scores, active, threshold)
    assert np.isfinite(threshold) and quality.candidate_density == 0.0 and quality.recall == 1.0


def test_nan_scores_are_kept() -> None:
    scores = np.array([[np.nan, 1.0, 2.0, 3.0]], np.float32)
    active = np.array([[True, False, True, True]])
    threshold = predictor.calibrate_threshold(scores, active, 1.0)
    assert threshold == 2.0
    quality = predictor.measure_predictor(scores, active, threshold)
    assert quality.recall == 1.0 and quality.candidate_density == 0.75
    # active neurons all NaN: kept whatever the threshold, so everything else may go
    assert predictor.calibrate_threshold(scores, np.array([[True, False, False, False]]), 1.0) > 3.0
    everything = np.full((2, 3), np.nan, np.float32)
    assert predictor.calibrate_threshold(everything, np.zeros((2, 3), bool), 0.9) == 0.0


def test_infinite_scores_give_a_finite_threshold() -> None:
    scores = np.array([[-np.inf, 1.0]], np.float32)
    threshold = predictor.calibrate_threshold(scores, np.array([[True, True]]), 1.0)
    assert np.isfinite(threshold) and threshold < -3e38


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g, x: predictor.fit_linear_predictor(g, x, 0), "rank: found 0"),
        (lambda g, x: predictor.fit_linear_predictor(g, x, 33), "expected 1 .. 32"),
        (lambda g, x: predictor.fit_linear_predictor(g, x[:, :31], 4), "expected (n_samples, 32)"),
        (lambda g, x: predictor.fit_linear_predictor(g, x[:1], 4), "n_samples >= 2"),
        (lambda g, x: predictor.fit_linear_predictor(g, np.where(x > 2, np.nan, x), 4), "NaN"),
        (lambda g, x: predictor.calibrate_threshold(x, x > 0, 0.0), "recall: found 0.0"),
        (lambda g, x: predictor.calibrate_threshold(x, x > 0, 1.5), "recall: found 1.5"),
        (lambda g, x: predictor.calibrate_threshold(x, x[:, :3] > 0, 0.9), "scores: shape"),
        (lambda g, x: quantize_rows(g[:, :31].copy(), "q4_0"), "multiple of 32"),
        (lambda g, x: quantize_rows(g, "q9_9"), "found 'q9_9'"),
        (lambda g, x: quantize_rows(np.zeros((1, 256), np.float32), "iq2_xxs"), "importance matrix"),
    ],
)
def test_wrong_input_is_one_clear_error(call, words: str) -> None:
    with pytest.raises(OptionError, match=r"predictor|row type") as caught:
        call(gate_matrix(64, 32), samples(50, 32, 1))
    assert words in str(caught.value)


@pytest.mark.parametrize("row_type", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_K", "q6_K", "bf16", "f16", "f32"])
def test_rows_of_every_type_decode_to_what_went_in(row_type: str) -> None:
    values = np.random.default_rng(8).standard_normal((37, 512)).astype(np.float32)
    rows = quantize_rows(values, row_type, n_threads=3)
    assert np.array_equal(rows, quantize_rows(values, row_type))
    decoded = dequantize_rows(rows, row_type, n_threads=2)
    assert np.abs(decoded - values).max() < {"q4": 0.4, "q5": 0.2, "q6": 0.15, "q8": 0.02}.get(row_type[:2], 0.02)
