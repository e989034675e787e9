"""Predictors of active neurons: closed low-rank fit, round to row types, choose the threshold, measure. numpy only.

A neuron is skipped only when its score is below the threshold, so a score that is NaN computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    kind = "linear"

    fc1: np.ndarray
    fc2: np.ndarray

    @property
    def rank(self) -> int:
        """Values between the two matrices."""
        return len(self.fc1)

    def hidden(self, x: np.ndarray) -> np.ndarray:
        """What fc2 multiplies.

        Args:
            x: (n_samples, n_embd) float32, FFN inputs.
        Returns:
            (n_samples, rank) float32.
        """
        return x @ self.fc1.T

    def scores(self, x: np.ndarray) -> np.ndarray:
        """Scores of every neuron.

        Args:
            x: (n_samples, n_embd) float32, FFN inputs.
        Returns:
            (n_samples, n_ff) float32.
        """
        return self.hidden(x) @ self.fc2.T


@dataclass(frozen=True)
class MlpPredictor(LinearPredictor):
    """scores = fc2 relu(fc1 x), kind `mlp` of the extended GGUF."""

    kind = "mlp"

    def hidden(self, x: np.ndarray) -> np.ndarray:
        """What fc2 multiplies: (n_samples, n_embd) float32 -> (n_samples, rank) float32."""
        return np.maximum(x @ self.fc1.T, 0.0)


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

    @property
    def accuracy(self) -> float:
        """Share of all decisions that were right."""
        return 1.0 - self.candidate_density - (1.0 - 2.0 * self.recall) * self.density


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

    def power(self, rows: np.ndarray) -> np.ndarray:
        """E[(row . x)^2] of each row: (n_rows, n_embd) float32 -> (n_rows,) float32."""
        power = np.square(rows @ self.factor.T).sum(axis=1)
        power += np.float32(self.isotropic) * np.square(rows).sum(axis=1)
        power += np.square(rows @ self.mean)
        return power

    def solve(self, v: np.ndarray) -> np.ndarray:
        """C^-1 v for v (n_embd, k) float32, with 1e-6 of the mean variance added to C."""
        c = (self.factor.T @ self.factor).astype(np.float64)
        c += np.outer(self.mean, self.mean)
        c[np.diag_indices_from(c)] += self.isotropic + 1e-6 * np.trace(c) / len(c)
        return np.linalg.solve(c, v.astype(np.float64)).astype(np.float32)

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


@dataclass(frozen=True)
class LinearFit:
    """Low-rank approximations of every rank up to one: that of rank r is the first r rows of fc1 and columns of fc2.

    Attributes:
        fc1: (rank, n_embd) float32.
        fc2: (n_ff, rank) float32.
        power: (n_ff,) float32, second moment of each row's product with x.
        explained: (rank,) float32, second moment of each row of fc1; times fc2^2 that is what it explains of `power`.
        is_comparable: scores mean the same for every neuron as they are, e.g. probabilities of being active.
    """

    fc1: np.ndarray
    fc2: np.ndarray
    power: np.ndarray
    explained: np.ndarray
    is_comparable: bool = False

    @property
    def rank(self) -> int:
        """The highest rank."""
        return len(self.fc1)

    def padded(self, rank: int) -> LinearFit:
        """The same with zeros up to a rank, for rows that must be whole blocks."""
        n = max(0, rank - self.rank)
        return replace(
            self,
            fc1=np.pad(self.fc1, ((0, n), (0, 0))),
            fc2=np.pad(self.fc2, ((0, 0), (0, n))),
            explained=np.pad(self.explained, (0, n)),
        )

    def at(self, rank: int) -> LinearPredictor:
        """The predictor of a rank, scores as they come: approximate products."""
        return LinearPredictor(self.fc1[:rank], self.fc2[:, :rank])

    def scaled(self, rank: int) -> LinearPredictor:
        """The predictor of a rank whose scores mean the same for every neuron.

        A product is p = s + e, s known and e of standard deviation sigma, different for each neuron. P(p > 0) grows with
        s / sigma, so one threshold on that is the same certainty for every neuron.
        """
        if self.is_comparable:
            return self.at(rank)
        return LinearPredictor(self.fc1[:rank], self.fc2[:, :rank] / self.error(rank)[:, None])

    def error(self, rank: int) -> np.ndarray:
        """Standard deviation of what a rank leaves of each row's product.

        Args:
            rank: at most the fit's.

        Returns:
            (n_ff,) float32, above 0.
        """
        left = self.power - np.square(self.fc2[:, :rank]) @ self.explained[:rank]
        return np.sqrt(np.maximum(left, 1e-6 * self.power + 1e-30))


def fit_linear_predictor(
    gate: np.ndarray, x: np.ndarray, rank: int, *, n_iterations: int = 1, n_oversample: int = 32, seed: int = 0
) -> LinearPredictor:
    """Best low-rank approximation of a gate matrix on the inputs that it really sees, see fit_low_rank.

    Args:
        gate: (n_ff, n_embd) float32, gate rows (the rows that decide activity), as the model multiplies them.
        x: (n_samples, n_embd) float32, FFN inputs of calibration tokens.
        rank: of the predictor, 1 .. min(n_ff, n_embd).
        n_iterations: further multiplications; 1 is within a few percent of the optimum on flat spectra, 8 at it.
        n_oversample: extra directions while iterating.
        seed: of the random start.
    Returns:
        The predictor. Its rank is lower than asked when gate's own rank is.
    Raises:
        OptionError: shapes that don't fit, a rank out of range, values that aren't finite.
    """
    n_embd = gate.shape[1]
    if x.ndim != 2 or x.shape[1] != n_embd:
        raise OptionError(f"predictor samples: shape is {x.shape}; expected (n_samples, {n_embd}) as gate's rows have.")
    fit = fit_low_rank(gate, estimate_moment(x), rank, n_iterations=n_iterations, n_oversample=n_oversample, seed=seed)
    return fit.at(rank)


def fit_low_rank(
    rows: np.ndarray,
    moment: InputMoment,
    rank: int,
    *,
    weights: np.ndarray | None = None,
    n_iterations: int = 1,
    n_oversample: int = 32,
    seed: int = 0,
) -> LinearFit:
    """Best low-rank approximation of rows on inputs of a second moment.

    Minimises E|D (G x - F2 F1 x)|^2 = tr(D (G - F2 F1) C (G - F2 F1)^T D) over rank-limited F2 F1, C = E[x x^T]. The
    optimum is F2 = D^-1 Q, F1 = Q^T D G, where Q holds the leading eigenvectors of M = D G C G^T D. Q is found by
    randomised subspace iteration: Y = D G (draws with moment C), then Y = M orth(Y), and the eigenvectors of M within
    span(Y). Columns of fc2 come in falling order of the variance that they explain. A constant part of x, and with it
    each neuron's offset, is a direction like any other: no bias is needed.

    Args:
        rows: G, (n_ff, n_embd) float32.
        moment: C.
        rank: 1 .. min(n_ff, n_embd).
        weights: (n_ff,) float32 above 0, the diagonal of D; None: all 1.
        n_iterations: further multiplications by M; 1 is within a few percent of the optimum on flat spectra, 8 at it.
        n_oversample: extra directions while iterating.
        seed: of the random start.
    Returns:
        The fit. Its rank is lower than asked when G's own rank is.
    Raises:
        OptionError: a rank out of range.
    Source:
        Randomised subspace iteration: Halko, Martinsson, Tropp, 2011, algorithm 4.4.
    """
    n_ff, n_embd = rows.shape
    if not 1 <= rank <= min(n_ff, n_embd):
        raise OptionError(f"predictor rank: found {rank}; expected 1 .. {min(n_ff, n_embd)} for gate {rows.shape}.")
    weighted = rows if weights is None else rows * weights[:, None]
    rng = np.random.default_rng(seed)
    n_directions = min(rank + n_oversample, n_ff, n_embd)
    basis = orthonormal_columns(weighted @ moment.draw(n_directions, rng).T)
    for _ in range(n_iterations):
        basis = orthonormal_columns(weighted @ moment.apply(weighted.T @ basis))
    projected = weighted.T @ basis  # (n_embd, n_directions)
    values, vectors = np.linalg.eigh((projected.T @ moment.apply(projected)).astype(np.float64))
    leading = np.ascontiguousarray(vectors[:, ::-1][:, :rank], dtype=np.float32)
    fc2 = basis @ leading
    return LinearFit(
        fc1=np.ascontiguousarray((projected @ leading).T),
        fc2=np.ascontiguousarray(fc2 if weights is None else fc2 / weights[:, None]),
        power=moment.power(rows),
        explained=np.maximum(values[::-1][:rank], 0.0).astype(np.float32),
    )


def round_predictor(predictor: LinearPredictor, x: np.ndarray, row_type: str) -> PredictorRows:
    """Rounds a predictor to a row type, and corrects what rounding does to each neuron's average score.

    Most of a score is the neuron's constant offset, carried by the first column; rounding it to four bits would
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
    made = type(predictor)
    rounded = made(*(dequantize_rows(quantize_rows(rows, row_type), row_type) for rows in (fc1, fc2)))
    hidden = rounded.hidden(x)
    error = predictor.scores(x) - hidden @ rounded.fc2.T
    direction = hidden[:, 0]
    correction = direction @ error / max(float(direction @ direction), 1e-30)  # (n_ff,)
    size = float(np.sqrt(np.square(correction).mean() / np.square(predictor.fc2).mean()))
    if size > 0.0:
        fc1[rank] *= size
        fc2[:, rank] = correction / size
    fc1_rows = quantize_rows(fc1, row_type)
    fc2_rows = quantize_rows(fc2, row_type)
    rounded = made(dequantize_rows(fc1_rows, row_type), dequantize_rows(fc2_rows, row_type))
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


def constant_direction(moment: InputMoment) -> np.ndarray:
    """The c that brings c . x nearest to 1 for all inputs, in least squares; a bias that a plan has room for.

    Args:
        moment: of the inputs.

    Returns:
        (n_embd,) float32.
    """
    return moment.solve(moment.mean[:, None])[:, 0]


def fit_products(rows: np.ndarray, offset: np.ndarray, moment: InputMoment, rank: int, *, seed: int = 0) -> LinearFit:
    """Low-rank approximation of row . x + offset, each neuron's error relative to its spread over tokens.

    Args:
        rows: (n_ff, n_embd) float32, that decide activity.
        offset: (n_ff,) float32.
        moment: of the inputs.
        rank: the highest.
        seed: of the random start.

    Returns:
        The fit.
    """
    if offset.any():
        rows = rows + np.outer(offset, constant_direction(moment))
    spread = np.maximum(moment.power(rows) - np.square(rows @ moment.mean), 0.0)
    weights = 1.0 / np.sqrt(spread + 1e-6 * spread.mean() + 1e-30)
    return fit_low_rank(rows, moment, rank, weights=weights, n_iterations=4, seed=seed)


def fit_probabilities(x: np.ndarray, active: np.ndarray, moment: InputMoment, rank: int, *, seed: int = 0) -> LinearFit:
    """Low-rank least-squares regression of activity on x, for activity that no single row decides.

    Args:
        x: (n_samples, n_embd) float32.
        active: (n_samples, n_ff) bool.
        moment: of the inputs.
        rank: the highest.
        seed: of the random start.

    Returns:
        The fit.
    """
    products = np.empty((x.shape[1], active.shape[1]), np.float32)
    for first in range(0, active.shape[1], 1024):  # the whole as floats would take four times the bits' bytes
        part = slice(first, first + 1024)
        products[:, part] = x.T @ active[:, part].astype(np.float32) / np.float32(len(x))
    rows = np.ascontiguousarray(moment.solve(products).T)
    frequency = np.clip(active.mean(axis=0, dtype=np.float64), 1.0 / len(x), 1.0 - 1.0 / len(x))
    weights = (1.0 / np.sqrt(frequency * (1.0 - frequency))).astype(np.float32)
    fit = fit_low_rank(rows, moment, rank, weights=weights, n_iterations=4, seed=seed)
    return replace(fit, is_comparable=True)
