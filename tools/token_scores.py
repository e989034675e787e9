"""What logits say of the tokens that follow: likelihoods, and the divergence between two models. numpy only.

A vocabulary can have 150,000 tokens: whole rows of logits are worked on in blocks, so that nothing of their size is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

_BLOCK_VALUES = 1 << 20  # logits worked on at a time


@dataclass(frozen=True)
class TokenScores:
    """Logits at some places of a text, and the tokens that follow there.

    Attributes:
        logits: (n, n_vocab) float32.
        tokens: (n,) int32, those that follow.
        log_sum: (n,) float64, logarithm of the sum of the logits' exponentials.
    """

    logits: np.ndarray
    tokens: np.ndarray
    log_sum: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray, tokens: np.ndarray) -> TokenScores:
        """Scores of logits (n, n_vocab) float32 and the tokens (n,) int32 that follow them."""

        def log_sums(rows: slice) -> np.ndarray:
            top = logits[rows].max(axis=1, keepdims=True)
            return top[:, 0] + np.log(np.exp(logits[rows] - top).sum(axis=1, dtype=np.float64))

        return cls(logits, tokens, _by_blocks(log_sums, logits.shape))

    def copy(self) -> TokenScores:
        """The same with logits of its own."""
        return replace(self, logits=self.logits.copy())

    def negative_log_likelihoods(self) -> np.ndarray:
        """(n,) float64, nats, of the tokens that follow."""
        return self.log_sum - self.logits[np.arange(len(self.tokens)), self.tokens]

    def divergences(self, other: TokenScores) -> np.ndarray:
        """Kullback-Leibler divergence of the other's probabilities from these, nats.

        Args:
            other: scores at the same places.

        Returns:
            (n,) float64.
        """

        def of_rows(rows: slice) -> np.ndarray:
            log_p = self.logits[rows] - self.log_sum[rows, None]
            p = np.exp(log_p)
            change = other.logits[rows] - other.log_sum[rows, None] - log_p
            # log E[e^change] - E[change] is the divergence too, and keeps its digits where the two are close
            return np.log1p((p * np.expm1(change)).sum(1)) - (p * change).sum(1)

        return _by_blocks(of_rows, self.logits.shape)

    def same_top(self, other: TokenScores) -> np.ndarray:
        """(n,) bool: whether both find the same token likeliest."""
        return self.logits.argmax(axis=1) == other.logits.argmax(axis=1)


def _by_blocks(function: Callable[[slice], np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """function(rows) of all n rows of (n, n_vocab), a few rows at a time: (n,)."""
    n, n_vocab = shape
    step = max(1, _BLOCK_VALUES // n_vocab)
    return np.concatenate([function(slice(i, i + step)) for i in range(0, n, step)])
