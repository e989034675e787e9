"""The search for thresholds: measures what skipping costs in a running model, and keeps to a limit on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from powerinfer_py import _core
from powerinfer_py.format import BaseModel, Plan

from . import thresholds
from .profile_state import ProfileState
from .row_types import row_bytes
from .terminal import Steps
from .text_runner import Runner
from .token_scores import TokenScores
from .window_runs import Runs, mean_divergence, measure_window

# Where the two tests are probed: shares of rows skipped in one layer, near what 2 % loss allows.
_PROBED_DOWN_SHARE = 0.5
_PROBED_UP_SHARE = 0.25
_MAX_SEARCH_STEPS = 10
_SEARCH_TOLERANCE = 0.05  # of the target

Edges = tuple[int, int]  # of |a| and of the impact, see thresholds.LayerCurves


@dataclass(frozen=True)
class Loss:
    """What thresholds cost on some windows.

    Attributes:
        dense: perplexity of the dense model.
        sparse: perplexity with the thresholds.
        increase: mean increase of the negative log-likelihood, nats per token.
        error: standard error of `increase`, over windows.
        density: down rows used / n_ff.
    """

    dense: float
    sparse: float
    increase: float
    error: float
    density: float

    @property
    def relative(self) -> float:
        """Relative increase of perplexity."""
        return math.expm1(self.increase)


def layer_row_bytes(plan: _core.Plan) -> list[tuple[int, int, int]]:
    """Bytes of a gate, up and down row per layer, as stored; 0 for a matrix that isn't there."""
    return [
        tuple(
            row_bytes(plan.n_embd, layer[f"{name}_type"]) if layer[f"{name}_type"] else 0
            for name in ("gate", "up", "down")
        )
        for layer in plan.layers()
    ]


class Calibration:
    """Chooses thresholds: curves of every layer, prices of their tests, then the budget that the target allows."""

    def __init__(
        self, runner: Runner, runs: Runs, base: BaseModel, plan: Plan, state: ProfileState, steps: Steps
    ) -> None:
        self.runner = runner
        self.runs = runs
        self.base = base
        self.plan = plan
        self.state = state
        self.steps = steps
        self.covered = [i for i, layer in enumerate(plan.layers) if layer.n_ff]
        self.row_bytes = layer_row_bytes(runner.plan)
        self.curves: dict[int, thresholds.LayerCurves] = {}
        self.models: list[thresholds.LayerModel] = []

    def measure_layers(self, windows: np.ndarray) -> None:
        """Fills `curves` and `models`, from the dense model and from skipping in one layer at a time.

        Args:
            windows: (n, n_ctx) int32.
        """
        inputs: dict[int, list[np.ndarray]] = {i: [] for i in self.covered}
        plan = self.runner.plan
        plan.set_sparsity("dense")
        plan.set_capture(lambda i_layer, x: inputs[i_layer].append(x))
        with self.steps("dense outputs", len(windows)) as step:
            dense = []
            for window in windows:
                dense.append(self.runner.scored(window).copy())
                step()
        plan.set_capture(None)
        with self.steps("activations", len(self.covered)) as step:
            for i in self.covered:
                x = np.concatenate(inputs.pop(i))
                self.curves[i] = thresholds.layer_curves(
                    *thresholds.neuron_impacts(self.base, self.plan.activation, i, x)
                )
                step()
        self._measure_prices(windows, dense)
        for i in self.covered:
            gate_bytes, up_bytes, down_bytes = self.row_bytes[i]
            self.models.append(
                thresholds.layer_model(
                    self.curves[i],
                    self.plan.layers[i].n_ff,
                    up_bytes if gate_bytes else 0,
                    down_bytes,
                    *np.nan_to_num(self.state.prices[i]),
                )
            )

    def _measure_prices(self, windows: np.ndarray, dense: Sequence[TokenScores]) -> None:
        """KL divergence per dropped energy when one layer alone skips by one test, where the state lacks it."""
        prices = self.state.prices
        tests = (0, 1) if self.plan.gated else (1,)
        probes = []
        with self.steps("cost of each layer", len(tests) * len(self.covered)) as step:
            for i in self.covered:
                for test in tests:
                    probe = self._probe(i, test) if np.isnan(prices[i, test]) else None
                    if probe is not None:
                        probes.append((i, test, *probe))
                        continue
                    if np.isnan(prices[i, test]):
                        prices[i, test] = 0.0  # a layer that adds nothing
                    step()
            shared = self.runs.share(windows), self.runs.share(dense)
            found = self.runs.each(mean_divergence, [(values, *shared) for *_, values in probes])
            for divergence, (i, test, energy, _) in zip(found, probes):
                prices[i, test] = max(divergence, 0.0) / energy
                self.state.save_sometimes()
                step()

    def _probe(self, i_layer: int, test: int) -> tuple[float, list[tuple[float, float]]] | None:
        """The energy that one layer drops, and the thresholds of all layers that make it do so; None: it has none."""
        curves = self.curves[i_layer]
        skipped, energy, share = (
            (curves.up_saved, curves.gate_energy, _PROBED_UP_SHARE)
            if test == 0
            else (curves.down_saved[0], curves.product_energy[0], _PROBED_DOWN_SHARE)
        )
        edges = np.flatnonzero(energy)
        if not len(edges):
            return None
        edge = int(edges[np.argmin(np.abs(skipped[edges] - share))])
        values = [(0.0, 0.0)] * self.plan.n_layer
        values[i_layer] = (thresholds.bin_edge(edge), 0.0) if test == 0 else (0.0, thresholds.bin_edge(edge))
        return float(energy[edge]), values

    def edges_within(self, what: str, limit: float) -> list[Edges]:
        """The thresholds that save most bytes while a predicted quantity stays within a limit.

        Args:
            what: `cost` (KL divergence, nats) or `skipped` (share of all down rows).
            limit: of the quantity.

        Returns:
            (i, j) per covered layer.
        """
        n_ff = np.array([self.plan.layers[i].n_ff for i in self.covered])

        def reach(price: float) -> float:
            edges = thresholds.best_edges(self.models, price)
            if what == "cost":
                return sum(model.cost[edge] for model, edge in zip(self.models, edges))
            skipped = [self.curves[i].down_saved[edge] for i, edge in zip(self.covered, edges)]
            return float(np.dot(skipped, n_ff) / n_ff.sum())

        return thresholds.best_edges(self.models, thresholds.price_for(reach, limit))

    def values_of(self, edges: Sequence[Edges]) -> list[tuple[float, float]]:
        """(threshold, product_threshold) per layer, zeros where not covered, as float32 holds them."""
        values = [(0.0, 0.0)] * self.plan.n_layer
        for i_layer, edge in zip(self.covered, edges):
            threshold, product = (float(np.float32(thresholds.bin_edge(i))) for i in edge)
            values[i_layer] = (threshold, product)
        return values

    def loss(
        self, edges: Sequence[Edges], windows: np.ndarray, numbers: np.ndarray, dense: np.ndarray, what: str
    ) -> Loss:
        """Measures thresholds against the dense model.

        Args:
            edges: per covered layer.
            windows: (n_windows, n_ctx) int32, all of them.
            numbers: which of them.
            dense: (n_windows,) negative log-likelihoods of the dense model; those that are NaN are filled in.
            what: for the progress bar.

        Returns:
            The loss.
        """
        missing = [i for i in numbers if np.isnan(dense[i])]
        with self.steps(what, len(missing) + len(numbers)) as step:
            for run, i in zip(self.runs.each(measure_window, [("dense", windows[i]) for i in missing]), missing):
                dense[i] = run.likelihood
                self.state.save_sometimes()
                step()
            values = self.values_of(edges)
            runs = []
            for run in self.runs.each(measure_window, [(values, windows[i]) for i in numbers]):
                runs.append(run)
                step()
        sparse = np.array([run.likelihood for run in runs])
        change = sparse - dense[numbers]
        return Loss(
            dense=math.exp(dense[numbers].mean()),
            sparse=math.exp(sparse.mean()),
            increase=float(change.mean()),
            error=float(change.std(ddof=1) / math.sqrt(len(change))),
            density=sum(run.n_active for run in runs) / sum(run.n_neurons for run in runs),
        )

    def search(
        self,
        max_loss: float | None,
        density: float | None,
        windows: np.ndarray,
        choosing: np.ndarray,
        measuring: np.ndarray,
    ) -> tuple[list[Edges], Loss]:
        """The sparsest thresholds that keep to the target.

        With max_loss the increase of the negative log-likelihood plus its standard error must stay within it on the
        windows that choose; where the measuring windows then show more than max_loss after all, thresholds are only
        lowered. With density the share of skipped rows on the windows that choose decides.

        Args:
            max_loss: most that perplexity may grow, relatively.
            density: down rows to use / n_ff, instead.
            windows: (n_windows, n_ctx) int32, all of them.
            choosing: numbers of the windows to choose by.
            measuring: numbers of those that measure the result.

        Returns:
            Edges per covered layer, and the loss on the measuring windows.
        """
        is_loss = density is None
        what = "cost" if is_loss else "skipped"
        target = math.log1p(max_loss) if is_loss else 1.0 - density
        dense = self.state.dense

        def reached(limit: float) -> float:
            """What the target speaks of, measured on the choosing windows."""
            known = [row for row in self.state.trials if row[0] == limit]
            if not known:
                name = f"trial {len(self.state.trials) + 1}"
                loss = self.loss(self.edges_within(what, limit), windows, choosing, dense, name)
                known = [(limit, loss.increase, loss.error, loss.density)]
                self.state.trials = np.vstack([self.state.trials, known])
                self.state.save()
            _, increase, error, used = known[0]
            return increase + error if is_loss else 1.0 - used

        limit = search_limit(reached, target)
        for _ in range(_MAX_SEARCH_STEPS):
            edges = self.edges_within(what, limit)
            loss = self.loss(edges, windows, measuring, dense, "result")
            if not is_loss or loss.increase <= target:
                return edges, loss
            limit *= min(0.9, target / loss.increase)
        edges = [(0, 0)] * len(self.covered)
        return edges, self.loss(edges, windows, measuring, dense, "result")


def search_limit(reached: Callable[[float], float], target: float) -> float:
    """The largest limit whose measured outcome stays within a target.

    Args:
        reached: limit -> outcome, about proportional to it; measured, so each call is dear.
        target: for the outcome; also the first limit to try.

    Returns:
        The limit; 0 when none was found that stays within.
    """
    good, bad = 0.0, math.inf
    limit = target
    last = math.nan
    for _ in range(_MAX_SEARCH_STEPS):
        outcome = reached(limit)
        if outcome > target:
            bad = limit
        else:
            good = limit
            if outcome >= (1 - _SEARCH_TOLERANCE) * target or outcome == last:
                break  # near enough, or more can't be skipped
            last = outcome
        guess = limit * min(max(target / outcome, 0.25), 4.0) if outcome > 0 else limit * 4
        if not good < guess < bad:
            guess = math.sqrt(good * bad) if good else bad / 4
        limit = guess
        if bad < (1 + _SEARCH_TOLERANCE) * good:
            break
    return good
