"""Low-rank predictors of active neurons: fit, round to row types, choose the threshold, measure. numpy only.

A neuron is skipped only when its score is below the threshold, so a score that is NaN computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from powerinfer_py.errors import OptionError

from .row_types import dequantize_rows, quantize_rows

FLOAT_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class LinearPredictor:
    """scores = fc2 (fc1 x), kind `linear` of the extended GGUF.

    Attributes:
        fc1: (rank, n_embd) float32.
        fc2: (n_ff, rank) float32.
    """

    fc1: np.ndarray
    fc2: np.ndarray

    def scores(self, x: np.ndarray) -> np.ndarray:
        """Scores of every neuron.

        Args:
            x: (n_samples, n_embd) float32, FFN inputs.
        Returns:
            (n_samples, n_ff) float32.
        """
        return (x @ self.fc1.T) @ self.fc2.T


@dataclass(frozen=True)
class PredictorRows:
    """A predictor as it is stored.

    Attributes:
        row_type: ggml type name of both matrices, e.g. `q4_0`.
        fc1: (rank, row bytes) uint8.
        fc2: (n_ff, row bytes) uint8.
        rounded: what the rows decode to; measure with this one.
    """

    row_type: str
    fc1: np.ndarray
    fc2: np.ndarray
    rounded: LinearPredictor


@dataclass(frozen=True)
class PredictorQuality:
    """Measured on tokens: recall = kept active / active, candidate_density = kept / all, density = active / all."""

    recall: float
    candidate_density: float
    density: float


@dataclass(frozen=True)
class InputMoment:
    """Second moment C = E[x x^T] of FFN inputs, estimated from samples.

    C = mean mean^T + factor^T factor + isotropic I, with factor^T factor = (1 - a) S, isotropic = a tr(S) / n_embd,
    S the sample covariance and a the shrinkage of Ledoit and Wolf (2004), in [0, 1]: near 1 with fewer samples than
    dimensions, near 0 with many. Without it a fit would only see the span of its samples.

    Attributes:
        mean: (n_embd,) float32.
        factor: (k, n_embd) float32.
        isotropic: variance added to every dimension, >= 0.
    """

    mean: np.ndarray
    factor: np.ndarray
    isotropic: float

    def apply(self, v: np.ndarray) -> np.ndarray:
        """C v for v (n_embd, k) float32."""
        product = self.factor.T @ (self.factor @ v)
        product += np.float32(self.isotropic) * v
        product += np.outer(self.mean, self.mean @ v)
        return product

    def draw(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """n random vectors with second moment C.

        Returns:
            (n, n_embd) float32.
        """
        vectors = rng.standard_normal((n, self.mean.size), dtype=np.float32)
        vectors *= np.float32(np.sqrt(self.isotropic))
        vectors += rng.standard_normal((n, self.factor.shape[0]), dtype=np.float32) @ self.factor
        vectors += np.outer(rng.standard_normal(n, dtype=np.float32), self.mean)
        return vectors


def estimate_moment(x: np.ndarray) -> InputMoment:
    """Second moment of FFN inputs from samples, with shrinkage.

    Args:
        x: (n_samples, n_embd) float32, finite, n_samples >= 2.
    Returns:
        The moment.
    Raises:
        OptionError: fewer than two samples, or values that aren't finite.
    Source:
        Ledoit, Wolf: A well-conditioned estimator for large-dimensional covariance matrices, 2004.
    """
    if x.ndim != 2 or x.shape[0] < 2:
        raise OptionError(
            f"predictor samples: shape is {x.shape}; expected (n_samples >= 2, n_embd). Give more tokens."
        )
    if not np.isfinite(x).all():
        raise OptionError("predictor samples: found NaN or infinite values; expected finite ones. Check the capture.")
    n_samples, n_embd = x.shape
    mean = x.mean(axis=0)
    centered = x - mean
    # tr(S^2) from the smaller of the two Gram matrices
    gram = centered @ centered.T if n_samples <= n_embd else centered.T @ centered
    square_norm = np.square(gram / n_samples, dtype=np.float64).sum()
    lengths = np.square(centered, dtype=np.float64).sum(axis=1)
    variance = lengths.sum() / (n_samples * n_embd)
    distance = square_norm - n_embd * variance**2  # |S - variance I|^2
    sampling = max(0.0, (np.square(lengths).mean() - square_norm) / n_samples)  # E|S - true S|^2
    shrinkage = min(1.0, sampling / distance) if distance > 0 else 1.0
    scale = np.float32(np.sqrt((1.0 - shrinkage) / n_samples))
    if n_samples <= n_embd:
        factor = centered * scale
    else:
        values, vectors = np.linalg.eigh(gram)
        factor = (vectors * (np.sqrt(np.maximum(values, 0.0)) * scale)).T
    return InputMoment(mean, np.ascontiguousarray(factor, dtype=np.float32), shrinkage * variance)


def orthonormal_columns(matrix: np.ndarray) -> np.ndarray:
    """Orthonormal basis of the columns of a tall matrix; directions below 1e-6 of the largest are dropped.

    Args:
        matrix: (n, k) float32, n >= k.
    Returns:
        (n, <= k) float32.
    """
    # by the Gram matrix in double: 5 times as fast as numpy's QR at 11008 x 288
    wide = matrix.astype(np.float64)
    values, vectors = np.linalg.eigh(wide.T @ wide)
    keep = values > values[-1] * 1e-12
    return (wide @ (vectors[:, keep] / np.sqrt(values[keep]))).astype(np.float32)


def fit_linear_predictor(
    gate: np.ndarray, x: np.ndarray, rank: int, *, n_iterations: int = 1, n_oversample: int = 32, seed: int = 0
) -> LinearPredictor:
    """Best low-rank approximation of a gate matrix on the inputs that it really sees.

    Minimises E|G x - F2 F1 x|^2 = tr((G - F2 F1) C (G - F2 F1)^T) over rank-limited F2 F1, C = E[x x^T]. The optimum
    is F2 = Q, F1 = Q^T G, where Q holds the leading eigenvectors of M = G C G^T. Q is found by randomised subspace
    iteration: Y = G (draws with moment C), then Y = M orth(Y), and the eigenvectors of M within span(Y). Columns of
    fc2 come in falling order of the variance that they explain. A constant part of x, and with it each neuron's
    offset, is a direction like any other: no bias is needed.

    Args:
        gate: (n_ff, n_embd) float32, gate rows (the rows that decide activity), as the model multiplies them.
        x: (n_samples, n_embd) float32, FFN inputs of calibration tokens.
        rank: of the predictor, 1 .. min(n_ff, n_embd).
        n_iterations: further multiplications by M; 1 is within a few percent of the optimum on flat spectra, 8 at it.
        n_oversample: extra directions while iterating.
        seed: of the random start.
    Returns:
        The predictor. Its rank is lower than asked when gate's own rank is.
    Raises:
        OptionError: shapes that don't fit, a rank out of range, values that aren't finite.
    Source:
        Randomised subspace iteration: Halko, Martinsson, Tropp, 2011, algorithm 4.4.
    """
    n_ff, n_embd = gate.shape
    if x.ndim != 2 or x.shape[1] != n_embd:
        raise OptionError(f"predictor samples: shape is {x.shape}; expected (n_samples, {n_embd}) as gate's rows have.")
    if not 1 <= rank <= min(n_ff, n_embd):
        raise OptionError(f"predictor rank: found {rank}; expected 1 .. {min(n_ff, n_embd)} for gate {gate.shape}.")
    rng = np.random.default_rng(seed)
    moment = estimate_moment(x)
    n_directions = min(rank + n_oversample, n_ff, n_embd)
    basis = orthonormal_columns(gate @ moment.draw(n_directions, rng).T)
    for _ in range(n_iterations):
        basis = orthonormal_columns(gate @ moment.apply(gate.T @ basis))
    projected = gate.T @ basis  # (n_embd, n_directions)
    _, vectors = np.linalg.eigh((projected.T @ moment.apply(projected)).astype(np.float64))
    leading = np.ascontiguousarray(vectors[:, ::-1][:, :rank], dtype=np.float32)
    return LinearPredictor(fc1=np.ascontiguousarray((projected @ leading).T), fc2=np.ascontiguousarray(basis @ leading))


def round_linear_predictor(predictor: LinearPredictor, x: np.ndarray, row_type: str) -> PredictorRows:
    """Rounds a predictor to a row type, and corrects what rounding does to each neuron's average score.

    Most of a score is the neuron's constant offset, carried by the leading column; rounding it to four bits would
    move whole neurons across the threshold. So one rank is added: fc1 gets its first row again, times a factor c,
    and fc2 a column d / c, where d is the least-squares error of the rounded scores along that direction. c makes
    the new column as large as the others, so that it doesn't coarsen their block.

    Args:
        predictor: of rank r.
        x: (n_samples, n_embd) float32, calibration inputs.
        row_type: ggml type name; its block must divide n_embd and r + 1.
    Returns:
        Rows of rank r + 1, and what they decode to.
    Raises:
        OptionError: a type that ggml doesn't know or can't write, or rows that aren't whole blocks.
    """
    n_ff, rank = predictor.fc2.shape
    fc2 = np.zeros((n_ff, rank + 1), np.float32)
    fc2[:, :rank] = predictor.fc2
    fc1 = np.concatenate([predictor.fc1, predictor.fc1[:1]])
    hidden = x @ dequantize_rows(quantize_rows(fc1, row_type), row_type).T
    error = predictor.scores(x) - hidden @ dequantize_rows(quantize_rows(fc2, row_type), row_type).T
    direction = hidden[:, 0]
    correction = direction @ error / max(float(direction @ direction), 1e-30)  # (n_ff,)
    size = float(np.sqrt(np.square(correction).mean() / np.square(predictor.fc2).mean()))
    if size > 0.0:
        fc1[rank] *= size
        fc2[:, rank] = correction / size
    fc1_rows = quantize_rows(fc1, row_type)
    fc2_rows = quantize_rows(fc2, row_type)
    rounded = LinearPredictor(dequantize_rows(fc1_rows, row_type), dequantize_rows(fc2_rows, row_type))
    return PredictorRows(row_type, fc1_rows, fc2_rows, rounded)


def calibrate_threshold(scores: np.ndarray, active: np.ndarray, recall: float) -> float:
    """The highest threshold that keeps at least `recall` of the active neurons.

    Args:
        scores: (n_samples, n_ff) float32, of tokens that the predictor wasn't fitted on; NaN counts as kept.
        active: (n_samples, n_ff) bool.
        recall: wished share of active neurons kept, 0 < recall <= 1.
    Returns:
        A finite float32 value: skip when score < it. With no active neuron every score seen is below it.
    Raises:
        OptionError: shapes that differ, or a recall out of range.
    """
    if scores.shape != active.shape:
        raise OptionError(f"predictor scores: shape is {scores.shape}; expected {active.shape} as the active set has.")
    if not 0.0 < recall <= 1.0:
        raise OptionError(f"predictor recall: found {recall}; expected a share in (0, 1].")
    wanted = scores[active]
    n_allowed_misses = int(np.floor((1.0 - recall) * wanted.size + 1e-9))
    # NaN sorts last, as a value that is always kept should
    threshold = np.partition(wanted, n_allowed_misses)[n_allowed_misses] if wanted.size else np.float32(np.nan)
    if np.isnan(threshold):
        seen = scores[~np.isnan(scores)]
        threshold = np.nextafter(seen.max(), np.float32(np.inf)) if seen.size else np.float32(0.0)
    return float(np.clip(threshold, -FLOAT_MAX, FLOAT_MAX))


def measure_predictor(scores: np.ndarray, active: np.ndarray, threshold: float) -> PredictorQuality:
    """Quality of a predictor on tokens; give it tokens that neither fit nor threshold has seen.

    Args:
        scores: (n_samples, n_ff) float32.
        active: (n_samples, n_ff) bool.
        threshold: skip when score < threshold.
    Returns:
        The three shares; recall is 1 when no neuron was active.
    """
    kept = ~(scores < np.float32(threshold))
    n_active = int(active.sum())
    return PredictorQuality(
        recall=float((kept & active).sum() / n_active) if n_active else 1.0,
        candidate_density=float(kept.mean()),
        density=float(active.mean()),
    )
