"""What `profile` asks of a model, one piece of text at a time: functions of a runner alone, so that they run anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Union

import numpy as np

from .text_runner import Runner
from .token_scores import TokenScores

Mode = Union[str, Sequence[tuple[float, float]]]  # a sparsity mode, or (threshold, product_threshold) per layer


@dataclass(frozen=True)
class WindowRun:
    """What one window did.

    Attributes:
        likelihood: mean negative log-likelihood of its second half, nats per token.
        n_active: down rows that were used, of all tokens and layers.
        n_neurons: down rows that there are, the same.
    """

    likelihood: float
    n_active: int
    n_neurons: int


class Runs(Protocol):
    """Calls functions of a runner."""

    def share(self, value: Any) -> Any:
        """What stands for a large value in the arguments of many calls."""

    def each(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """function(runner, *values) for all of the arguments, in their order."""


class LocalRuns:
    """Runs that call in this process, one after the other."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def share(self, value: Any) -> Any:
        return value

    def each(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        for values in arguments:
            yield function(self._runner, *values)


def set_mode(runner: Runner, mode: Mode) -> None:
    """Sets the mode, or the thresholds and the mode that uses them."""
    if isinstance(mode, str):
        runner.plan.set_sparsity(mode)
    else:
        runner.set_thresholds(mode)


def measure_window(runner: Runner, mode: Mode, window: np.ndarray) -> WindowRun:
    """Runs a window: (n_ctx,) int32."""
    set_mode(runner, mode)
    runner.plan.reset_stats()
    likelihood = runner.likelihood(window)
    stats = runner.plan.stats()
    return WindowRun(likelihood, stats["n_active"], stats["n_neurons"])


def count_window(runner: Runner, mode: Mode, window: np.ndarray) -> tuple[float, dict[int, np.ndarray]]:
    """Runs a window and counts activations.

    Args:
        runner: counts.
        mode: the mode.
        window: (n_ctx,) int32.

    Returns:
        Its likelihood as in WindowRun, and per covered layer the tokens in which each neuron was active, (n_ff,) uint64
        in the base's order.
    """
    set_mode(runner, mode)
    runner.plan.reset_counts()
    likelihood = runner.likelihood(window)
    return likelihood, {
        i: runner.plan.counts(i)["active"] for i, layer in enumerate(runner.plan.layers()) if layer["n_ff"]
    }


def mean_divergence(runner: Runner, mode: Mode, windows: np.ndarray, dense: Sequence[TokenScores]) -> float:
    """Kullback-Leibler divergence from the dense model, nats per token.

    Args:
        runner: the model.
        mode: the mode.
        windows: (n, n_ctx) int32.
        dense: what the dense model makes of each.

    Returns:
        The mean.
    """
    set_mode(runner, mode)
    found = [scores.divergences(runner.scored(window)).mean() for window, scores in zip(windows, dense)]
    return float(np.mean(found))
