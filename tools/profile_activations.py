"""`powerinfer profile`: run text through a model on the device and write its plan: order, frequencies, thresholds.

Text that chooses thresholds never measures them: windows of the text are shared out once, by --seed.
"""

from __future__ import annotations

import argparse
import codecs
import ctypes
import hashlib
import json
import logging
import math
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from powerinfer_py import _core
from powerinfer_py.errors import FormatError, OptionError, PlanError
from powerinfer_py.format import (
    ACTIVATIONS,
    SIDECAR_SUFFIX,
    BaseModel,
    Plan,
    Rows,
    atomic_path,
    bare_plan,
    derived_row_type,
    write_plan,
)

from . import plot_profile, thresholds
from .row_types import quantize_rows, row_bytes, row_type_id

STATE_VERSION = 1
_SAVE_EVERY_S = 60.0
# Windows whose dense outputs are kept, to measure what skipping in one layer changes.
_N_PROBE_WINDOWS = 2
# One window to choose by and one to measure with would have no standard error.
_MIN_HELD_OUT_WINDOWS = 2
_MIN_WINDOWS = _N_PROBE_WINDOWS + 3 * _MIN_HELD_OUT_WINDOWS
# Of the windows, each: those that choose the thresholds, those that measure the result.
_HELD_OUT_SHARE = 0.2
# Where the two tests are probed: shares of rows skipped in one layer, near what 2 % loss allows.
_PROBED_DOWN_SHARE = 0.5
_PROBED_UP_SHARE = 0.25
_MAX_SEARCH_STEPS = 10
_SEARCH_TOLERANCE = 0.03  # of the target
# Thresholds of a layer that skips nothing: `threshold` mode without a fallback note.
_NEVER = float(np.finfo(np.float32).tiny)
_N_DECODED_TOKENS = 128  # decoded one by one for the bytes that decoding reads
_LITTLE_SAVED = 0.1  # share of FFN bytes below which the report says that there is little to be had


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile, with their defaults."""

    model: Path
    text: tuple[Path, ...]
    out: Path
    max_loss: float | None = 0.02  # relative increase of perplexity
    density: float | None = None  # instead of max_loss: down rows used / n_ff
    activation: str | None = None  # None: that of the architecture
    activation_param: float = 0.0  # FATReLU's cut
    tokens: int = 65536  # at most
    ctx: int = 512  # tokens per window
    threads: int | None = None  # None: physical cores allowed
    seed: int = 0
    special: bool = False  # the text holds special tokens
    down_type: str | None = None  # None: the plan stores no down rows
    plot: Path | None = None
    resume: bool = False
    strict: bool = False
    mapped: bool = False


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


@dataclass(frozen=True)
class Profile:
    """A finished profile.

    Attributes:
        plan: as written.
        loss: on text that chose nothing; None without thresholds.
        perplexity: on the text that was counted, in the mode that was counted.
        up_share: (n_layer,) up rows read / n_ff, 1 where not covered.
        row_bytes: per layer (gate, up, down) bytes of a row.
        density, candidate_density, bytes_share: of decoding token by token.
    """

    plan: Plan
    loss: Loss | None
    perplexity: float
    up_share: np.ndarray
    row_bytes: list[tuple[int, int, int]]
    density: float
    candidate_density: float
    bytes_share: float


# ---- The model -----------------------------------------------------------------------------------------------------


class Runner:
    """A model whose FFNs the device computes, run over windows of tokens. Works in `with`."""

    def __init__(self, plan_path: Path, options: ProfileOptions, sparsity: str, note: Callable[[str], None]) -> None:
        """Loads it.

        Args:
            plan_path: the plan to run.
            options: the profile's options.
            sparsity: the mode.
            note: receives the core's notes.

        Raises:
            PlanError: the model can't be loaded, or its context is shorter than a window.
        """
        self.n_ctx = options.ctx
        self._stack = ExitStack()
        with ExitStack() as stack:
            self.plan = _core.Plan.open(
                plan_path,
                options.model,
                sparsity=sparsity,
                strict=options.strict,
                mapped=options.mapped,
                count=True,
                note=note,
            )
            stack.callback(self.plan.close)
            self._load(stack, options)
            self._stack = stack.pop_all()

    def _load(self, stack: ExitStack, options: ProfileOptions) -> None:
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # what upstream prints while it loads
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self.plan.load_model(ctypes.addressof(params))
        stack.callback(llama_cpp.llama_model_free, self._model)
        self.vocab = llama_cpp.llama_model_get_vocab(self._model)
        if llama_cpp.llama_vocab_type(self.vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            raise PlanError(
                f"{options.model}: it has no vocabulary; expected one, to read text; use a model with a tokenizer."
            )
        n_ctx_train = llama_cpp.llama_model_n_ctx_train(self._model)
        if self.n_ctx > n_ctx_train:
            raise OptionError(f"ctx: {self.n_ctx}; the model was trained with {n_ctx_train}; pass a smaller --ctx.")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = context.n_batch = self.n_ctx
        context.n_ubatch = min(self.n_ctx, context.n_ubatch)
        context.n_threads = context.n_threads_batch = options.threads or _core.physical_cores()
        context.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if self._context is None:
            raise PlanError(f"{options.model}: no context of {self.n_ctx} tokens could be made; pass a smaller --ctx.")
        stack.callback(llama_cpp.llama_free, self._context)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(self.n_ctx, 0, 1)
        stack.callback(llama_cpp.llama_batch_free, self._batch)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees context, model and plan. Twice is fine."""
        self._stack.close()

    def tokenize(self, text: str, special: bool) -> np.ndarray:
        """Tokens of a text, without BOS: (n,) int32."""
        data = text.encode("utf-8")
        n_max = len(data) + 16
        tokens = np.empty(n_max, np.int32)
        out = tokens.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token))
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), out, n_max, False, special)
        if n < 0:
            raise FormatError(f"text: {len(data)} bytes make more than {n_max} tokens; expected at most one per byte.")
        return tokens[:n].copy()

    def decode(self, tokens: np.ndarray, n_past: int = 0) -> np.ndarray:
        """Runs tokens, logits of all of them requested: the last layer sees only rows whose logits are.

        Args:
            tokens: (n,) int32.
            n_past: tokens in the context before them; 0 empties it.

        Returns:
            (n, n_vocab) float32, valid until the next decode.
        """
        if n_past == 0:
            llama_cpp.llama_memory_clear(self._memory, True)
        batch = self._batch
        batch.n_tokens = n = len(tokens)
        for i, token in enumerate(tokens.tolist()):
            batch.token[i] = token
            batch.pos[i] = n_past + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise PlanError(f"llama_decode: it ended with {code}; expected 0; see llama.cpp's messages above.")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(n, self.n_vocab))

    def scored(self, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Runs a window; its second half counts, as in llama.cpp's perplexity.

        Args:
            window: (n_ctx,) int32.

        Returns:
            log-probabilities (n_scored, n_vocab) float32 of the tokens that follow, and those tokens (n_scored,).
        """
        first = self.n_ctx // 2
        window = window.copy()
        if llama_cpp.llama_vocab_get_add_bos(self.vocab):
            window[0] = llama_cpp.llama_vocab_bos(self.vocab)
        logits = self.decode(window)[first:-1]
        top = logits.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(logits - top).sum(axis=1, keepdims=True, dtype=np.float64))
        return logits - (top + log_sum).astype(np.float32), window[first + 1 :]

    def likelihood(self, window: np.ndarray) -> float:
        """Mean negative log-likelihood of a window's second half, nats per token."""
        log_p, tokens = self.scored(window)
        return -float(log_p[np.arange(len(tokens)), tokens].mean(dtype=np.float64))

    def set_thresholds(self, values: Sequence[tuple[float, float]]) -> None:
        """Sets (threshold, product_threshold) per layer, and the mode that uses them."""
        for i, (layer, (threshold, product)) in enumerate(zip(self.plan.layers(), values)):
            if layer["n_ff"]:
                self.plan.set_thresholds(i, threshold or (0.0 if product else _NEVER), product)
        self.plan.set_sparsity("threshold")


def _divergence(log_p: np.ndarray, log_q: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of q from p, nats; (n, n_vocab) log-probabilities each."""
    p = np.exp(log_p)
    change = log_q - log_p
    # log E[e^change] - E[change] is the divergence too, and keeps its digits where the two are close
    return float(
        (np.log1p((p * np.expm1(change)).sum(1, dtype=np.float64)) - (p * change).sum(1, dtype=np.float64)).mean()
    )


# ---- Text ----------------------------------------------------------------------------------------------------------


def read_text(path: Path, max_bytes: int) -> tuple[str, int]:
    """The beginning of a text file.

    Args:
        path: UTF-8; bytes that aren't are replaced.
        max_bytes: at most; a character that this would cut is left out.

    Returns:
        The text, and how many characters were replaced.

    Raises:
        FormatError: it can't be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes)
            whole = not file.read(1)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}; expected a text file; check the path.") from None
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=whole)
    own = data.count("\N{REPLACEMENT CHARACTER}".encode())
    return text, text.count("\N{REPLACEMENT CHARACTER}") - own


def text_windows(
    runner: Runner, options: ProfileOptions, n_needed: int, note: Callable[[str], None]
) -> tuple[np.ndarray, str]:
    """Windows of all files in turn, so that none is left out while another fills the limit.

    Args:
        runner: tokenizes.
        options: files, limit, window length.
        n_needed: windows without which there is nothing to be learned.
        note: receives notes.

    Returns:
        (n_windows, ctx) int32, and what the text is.

    Raises:
        FormatError: a file can't be read, or all hold too little.
    """
    per_file = []
    n_tokens = 0
    for path in options.text:
        # longer than any text's mean token, so that the limit is reached
        text, n_replaced = read_text(path, options.tokens * 16)
        if n_replaced:
            note(f"{path}: {n_replaced} places aren't UTF-8 and were replaced.")
        tokens = runner.tokenize(text, options.special)[: options.tokens]
        n_tokens += len(tokens)
        n = len(tokens) // options.ctx
        per_file.append(tokens[: n * options.ctx].reshape(n, options.ctx))
    n_wanted = options.tokens // options.ctx
    picked = sorted((i, k) for k, windows in enumerate(per_file) for i in range(len(windows)))[:n_wanted]
    if len(picked) < n_needed:
        raise FormatError(
            f"text: {len(options.text)} files hold {n_tokens} tokens, {len(picked)} whole windows of {options.ctx} are used; "
            f"expected at least {n_needed} windows, {n_needed * options.ctx} tokens; give more text, more --tokens or a smaller --ctx."
        )
    counts = [sum(1 for _, at in picked if at == k) for k in range(len(per_file))]
    corpus = ", ".join(f"{path.name} ({n * options.ctx} tokens)" for path, n in zip(options.text, counts) if n)
    return np.stack([per_file[k][i] for i, k in picked]), corpus


# ---- State ---------------------------------------------------------------------------------------------------------


class State:
    """What a run has found so far; saved beside the output, so that a stopped run can go on.

    Attributes:
        prices: (n_layer, 2) KL divergence per dropped energy of the tests on |a| and on the impact; NaN: not measured.
        dense: (n_windows,) negative log-likelihood of the dense model per window; NaN: not measured.
        trials: (n, 5) one row per set of thresholds that was measured: see Search.
        active: (n_layer, n_ff) tokens in which each neuron was active, in the base's order.
        counted: (n_counted,) negative log-likelihood of the counted windows.
    """

    _ARRAYS = ("prices", "dense", "trials", "active", "counted")

    def __init__(self, path: Path, identity: dict[str, Any], n_layer: int, n_ff: int, n_windows: int) -> None:
        self.path = path
        self.identity = identity
        self.prices = np.full((n_layer, 2), np.nan)
        self.dense = np.full(n_windows, np.nan)
        self.trials = np.empty((0, 5))
        self.active = np.zeros((n_layer, n_ff), np.uint64)
        self.counted = np.empty(0)
        self._saved_s = time.monotonic()

    def load(self) -> None:
        """Reads the file.

        Raises:
            FormatError: it is damaged or of another version.
            PlanError: it comes from another model, text or options.
        """
        advice = "run without --resume to start again."
        try:
            with np.load(self.path, allow_pickle=False) as file:
                meta = json.loads(str(file["meta"]))
                arrays = {name: file[name] for name in self._ARRAYS}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise FormatError(
                f"{self.path}: it can't be read ({error}); expected the state of a stopped run; {advice}"
            ) from None
        if not isinstance(meta, dict) or meta.get("version") != STATE_VERSION:
            raise FormatError(f"{self.path}: it isn't a state of version {STATE_VERSION}; {advice}")
        for name, value in self.identity.items():
            if meta.get(name) != value:
                raise PlanError(
                    f"{self.path}: it was made with {name} {meta.get(name)}; this run has {value}; {advice}"
                )
        for name, array in arrays.items():
            own = getattr(self, name)
            if array.dtype != own.dtype or array.shape[1:] != own.shape[1:]:
                raise FormatError(
                    f"{self.path}: {name} is {array.dtype} {array.shape}; expected {own.dtype} {own.shape}; {advice}"
                )
            setattr(self, name, array)

    def save(self) -> None:
        """Writes the file."""
        meta = json.dumps({"version": STATE_VERSION, **self.identity})
        with atomic_path(self.path) as temporary, temporary.open("wb") as file:
            np.savez(file, meta=meta, **{name: getattr(self, name) for name in self._ARRAYS})
        self._saved_s = time.monotonic()

    def save_sometimes(self) -> None:
        """Writes the file when the last time is long ago."""
        if time.monotonic() - self._saved_s > _SAVE_EVERY_S:
            self.save()


# ---- Calibration ---------------------------------------------------------------------------------------------------

# (what, how many) -> a context that gives a function to call once per step
Steps = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


class Calibration:
    """Chooses thresholds: curves of every layer, prices of their tests, then the budget that the target allows."""

    def __init__(self, runner: Runner, base: BaseModel, plan: Plan, state: State, steps: Steps) -> None:
        self.runner = runner
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
                dense.append(self.runner.scored(window)[0])
                step()
        plan.set_capture(None)
        with self.steps("activations", len(self.covered)) as step:
            for i in self.covered:
                x = np.concatenate(inputs.pop(i))
                self.curves[i] = thresholds.layer_curves(
                    *thresholds.neuron_impacts(self.base, self.plan.activation, i, x)
                )
                step()
        tests = (0, 1) if self.plan.gated else (1,)
        with self.steps("cost of each layer", len(tests) * len(self.covered)) as step:
            for i in self.covered:
                for test in tests:
                    if np.isnan(self.state.prices[i, test]):
                        self.state.prices[i, test] = self._price(i, test, windows, dense)
                        self.state.save_sometimes()
                    step()
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

    def _price(self, i_layer: int, test: int, windows: np.ndarray, dense: Sequence[np.ndarray]) -> float:
        """KL divergence per dropped energy when one layer alone skips by one test."""
        curves = self.curves[i_layer]
        skipped, energy, share = (
            (curves.up_saved, curves.gate_energy, _PROBED_UP_SHARE)
            if test == 0
            else (curves.down_saved[0], curves.product_energy[0], _PROBED_DOWN_SHARE)
        )
        edges = np.flatnonzero(energy)
        if not len(edges):
            return 0.0  # a layer that adds nothing
        edge = int(edges[np.argmin(np.abs(skipped[edges] - share))])
        values = [(0.0, 0.0)] * self.plan.n_layer
        values[i_layer] = (thresholds.bin_edge(edge), 0.0) if test == 0 else (0.0, thresholds.bin_edge(edge))
        self.runner.set_thresholds(values)
        found = [_divergence(p, self.runner.scored(window)[0]) for window, p in zip(windows, dense)]
        return max(float(np.mean(found)), 0.0) / energy[edge]

    def edges_within(self, what: str, limit: float) -> list[tuple[int, int]]:
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

    def values_of(self, edges: Sequence[tuple[int, int]]) -> list[tuple[float, float]]:
        """(threshold, product_threshold) per layer, zeros where not covered, as float32 holds them."""
        values = [(0.0, 0.0)] * self.plan.n_layer
        for i_layer, edge in zip(self.covered, edges):
            threshold, product = (float(np.float32(thresholds.bin_edge(i))) for i in edge)
            values[i_layer] = (threshold, product)
        return values

    def loss(self, values: Sequence[tuple[float, float]], windows: np.ndarray, numbers: np.ndarray, what: str) -> Loss:
        """Measures thresholds against the dense model.

        Args:
            values: (threshold, product_threshold) per layer.
            windows: (n_windows, n_ctx) int32, all of them.
            numbers: which of them.
            what: for the progress bar.

        Returns:
            The loss.
        """
        runner, dense = self.runner, self.state.dense
        missing = [i for i in numbers if np.isnan(dense[i])]
        with self.steps(what, len(missing) + len(numbers)) as step:
            runner.plan.set_sparsity("dense")
            for i in missing:
                dense[i] = runner.likelihood(windows[i])
                self.state.save_sometimes()
                step()
            runner.set_thresholds(values)
            runner.plan.reset_stats()
            sparse = []
            for i in numbers:
                sparse.append(runner.likelihood(windows[i]))
                step()
        stats = runner.plan.stats()
        change = np.array(sparse) - dense[numbers]
        return Loss(
            dense=math.exp(dense[numbers].mean()),
            sparse=math.exp(np.mean(sparse)),
            increase=float(change.mean()),
            error=float(change.std(ddof=1) / math.sqrt(len(change))),
            density=stats["n_active"] / stats["n_neurons"],
        )

    def search(
        self, options: ProfileOptions, windows: np.ndarray, choosing: np.ndarray, measuring: np.ndarray
    ) -> tuple[list[tuple[float, float]], Loss]:
        """The sparsest thresholds that keep to the target.

        With max_loss the increase of the negative log-likelihood plus its standard error must stay within it on the
        windows that choose; where the measuring windows then show more than max_loss after all, thresholds are only
        lowered. With density the share of skipped rows on the windows that choose decides.

        Args:
            options: max_loss or density.
            windows: (n_windows, n_ctx) int32, all of them.
            choosing: numbers of the windows to choose by.
            measuring: numbers of those that measure the result.

        Returns:
            (threshold, product_threshold) per layer, and the loss on the measuring windows.
        """
        is_loss = options.density is None
        what = "cost" if is_loss else "skipped"
        target = math.log1p(options.max_loss) if is_loss else 1.0 - options.density

        def reached(limit: float) -> float:
            """What the target speaks of, measured on the choosing windows."""
            known = [row for row in self.state.trials if row[0] == limit]
            if not known:
                edges = self.edges_within(what, limit)
                loss = self.loss(self.values_of(edges), windows, choosing, f"trial {len(self.state.trials) + 1}")
                row = (limit, loss.increase, loss.error, loss.density, loss.dense)
                self.state.trials = np.vstack([self.state.trials, row])
                self.state.save()
                known = [row]
            _, increase, error, density, _ = known[0]
            return increase + error if is_loss else 1.0 - density

        limit = search_limit(reached, target)
        for _ in range(_MAX_SEARCH_STEPS):
            values = self.values_of(self.edges_within(what, limit))
            loss = self.loss(values, windows, measuring, "result")
            if not is_loss or loss.increase <= target:
                return values, loss
            limit *= min(0.9, target / loss.increase)
        values = [(0.0, 0.0)] * self.plan.n_layer
        return values, self.loss(values, windows, measuring, "result")


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


# ---- The whole -----------------------------------------------------------------------------------------------------


def layer_row_bytes(plan: _core.Plan) -> list[tuple[int, int, int]]:
    """Bytes of a gate, up and down row per layer, as stored; 0 for a matrix that isn't there."""
    return [
        tuple(
            row_bytes(plan.n_embd, layer[f"{name}_type"]) if layer[f"{name}_type"] else 0
            for name in ("gate", "up", "down")
        )
        for layer in plan.layers()
    ]


def provisional_plan(base: BaseModel, options: ProfileOptions) -> Plan:
    """The plan to profile with: the base's order, the activation, and down rows of the type wished for."""
    plan = bare_plan(options.model, options.activation)
    if not any(layer.n_ff for layer in plan.layers):
        raise PlanError(
            f"{options.model}: no layer can be covered ({base.why_not_covered(0)}); expected dense FFNs with separate up and down; "
            "use another model."
        )
    layers = []
    for i, layer in enumerate(plan.layers):
        if layer.n_ff:
            down_t = None if options.down_type is None else down_rows(base, i, options)
            layer = replace(layer, activation_param=options.activation_param, ffn_down_t=down_t)
        layers.append(layer)
    return replace(plan, layers=tuple(layers))


def down_rows(base: BaseModel, i_layer: int, options: ProfileOptions) -> Rows:
    """Down rows of one layer, neuron-major, in the base's order and the type wished for."""
    values = np.ascontiguousarray(base.rows_f32(base.ffn(i_layer)["down"].name).T)
    row_type = derived_row_type(row_type_id(options.down_type), values.shape[1])
    data = quantize_rows(values, row_type.name, n_threads=options.threads or _core.physical_cores())
    if row_type.name in ("F32", "F16"):
        data = data.view(np.float32 if row_type.name == "F32" else np.float16)
    return Rows(row_type, data, values.shape[1])


def make_profile(options: ProfileOptions, steps: Steps, note: Callable[[str], None]) -> Profile:
    """Profiles a model and writes its plan.

    Args:
        options: what to do.
        steps: `steps(what, n)` is a context that gives a function to call n times.
        note: receives every note once.

    Returns:
        The profile. When it is stopped by Ctrl-C, what was found is in the state file beside the output.

    Raises:
        FormatError: a file can't be used.
        PlanError: the model can't, or the state belongs to another run.
        OptionError: an option can't be used.
    """
    base = BaseModel(options.model)
    plan = provisional_plan(base, options)
    calibrates = plan.activation in thresholds.CALIBRATED_ACTIVATIONS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="powerinfer-profile-")))
        first = write_plan(plan, folder / options.out.name)

        def core_note(text: str) -> None:
            note(text.replace(str(first), str(options.out)))

        runner = stack.enter_context(Runner(first, options, "dense" if calibrates else "exact", core_note))
        windows, corpus = text_windows(runner, options, _MIN_WINDOWS if calibrates else 1, note)
        state = State(
            options.out.with_name(options.out.name + ".state.npz"),
            _identity(options, plan, windows),
            plan.n_layer,
            max(layer.n_ff for layer in plan.layers),
            len(windows),
        )
        if options.resume and state.path.exists():
            state.load()
        elif options.resume:
            note(f"{state.path}: there is no state to resume; starting at the beginning.")
        elif state.path.exists():
            note(f"{state.path}: the state of a stopped run is replaced; --resume would have gone on with it.")
        try:
            result = _run(options, base, plan, runner, windows, corpus, state, steps)
        except KeyboardInterrupt:
            state.save()
            note(f"stopped; what was found is kept in {state.path}; the same command with --resume goes on.")
            raise
        write_plan(result.plan, options.out)
        state.path.unlink(missing_ok=True)
        return result


def _identity(options: ProfileOptions, plan: Plan, windows: np.ndarray) -> dict[str, Any]:
    """What a state must agree with to be of use."""

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()[:16]

    return {
        "model": digest("".join(layer.digest for layer in plan.layers).encode()),
        "text": digest(windows.tobytes()),
        "ctx": options.ctx,
        "seed": options.seed,
        "activation": plan.activation,
        "activation_param": options.activation_param,
        "max_loss": options.max_loss,
        "density": options.density,
        "down_type": options.down_type,
    }


def _run(
    options: ProfileOptions,
    base: BaseModel,
    plan: Plan,
    runner: Runner,
    windows: np.ndarray,
    corpus: str,
    state: State,
    steps: Steps,
) -> Profile:
    counted = np.random.default_rng(options.seed).permutation(len(windows))
    loss = None
    values = [(0.0, 0.0)] * plan.n_layer
    up_share = np.ones(plan.n_layer)
    if plan.activation in thresholds.CALIBRATED_ACTIVATIONS:
        n_held_out = max(_MIN_HELD_OUT_WINDOWS, round(_HELD_OUT_SHARE * len(windows)))
        measuring, choosing, counted = counted[:n_held_out], counted[n_held_out : 2 * n_held_out], counted[n_held_out:]
        calibration = Calibration(runner, base, plan, state, steps)
        calibration.measure_layers(windows[counted[n_held_out : n_held_out + _N_PROBE_WINDOWS]])
        values, loss = calibration.search(options, windows, choosing, measuring)
        for i, curves in calibration.curves.items():
            if runner.plan.layers()[i]["gate_type"]:
                edge = next(
                    e
                    for e in range(thresholds.N_BINS)
                    if np.float32(thresholds.bin_edge(e)) >= np.float32(values[i][0])
                )
                up_share[i] = 1.0 - curves.up_saved[edge]
        runner.set_thresholds(values)
    _count(runner, windows[counted], state, steps)
    n_tokens = len(counted) * options.ctx
    layers = []
    for i, layer in enumerate(plan.layers):
        if layer.n_ff:
            active = state.active[i, : layer.n_ff]
            order = np.argsort(-active.astype(np.int64), kind="stable").astype(np.int32)
            down_t = layer.ffn_down_t
            layer = replace(
                layer,
                threshold=values[i][0],
                product_threshold=values[i][1],
                neuron_order=order,
                neuron_frequency=(active[order] / n_tokens).astype(np.float32),
                profile_tokens=n_tokens,
                profile_density=float(active.sum() / (n_tokens * layer.n_ff)),
                ffn_down_t=None if down_t is None else replace(down_t, data=down_t.data[order]),
            )
        layers.append(layer)
    stats = _decode_stats(runner, windows[counted[0]])
    has_thresholds = any(map(any, values))
    return Profile(
        plan=replace(
            plan, layers=tuple(layers), corpus=corpus, loss=loss.relative if loss and has_thresholds else None
        ),
        loss=loss,
        perplexity=math.exp(state.counted.mean()),
        up_share=up_share,
        row_bytes=layer_row_bytes(runner.plan),
        density=stats["n_active"] / stats["n_neurons"],
        candidate_density=stats["n_candidates"] / stats["n_neurons"],
        bytes_share=stats["read_bytes"] / stats["dense_bytes"],
    )


def _count(runner: Runner, windows: np.ndarray, state: State, steps: Steps) -> None:
    """Adds the activations of the windows that the state lacks."""
    plan = runner.plan
    covered = [i for i, layer in enumerate(plan.layers()) if layer["n_ff"]]

    plan.reset_counts()
    with steps("counting", len(windows)) as step:
        for _ in range(len(state.counted)):
            step()
        for window in windows[len(state.counted) :]:
            counted = np.append(state.counted, runner.likelihood(window))
            active = state.active.copy()
            for i in covered:
                fired = plan.counts(i)["active"]
                active[i, : len(fired)] += fired
            plan.reset_counts()
            # in one step: Ctrl-C must not leave a window's activations without the window
            state.active, state.counted = active, counted
            state.save_sometimes()
            step()


def _decode_stats(runner: Runner, window: np.ndarray) -> dict[str, Any]:
    """The plan's statistics of decoding a window's second half token by token."""
    first = len(window) // 2
    runner.decode(window[:first])
    runner.plan.reset_stats()
    for i in range(first, min(len(window), first + _N_DECODED_TOKENS)):
        runner.decode(window[i : i + 1], i)
    return runner.plan.stats()


# ---- Command line --------------------------------------------------------------------------------------------------


def _share(text: str) -> float:
    """`2%` or `0.02`."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a share between 0 and 1, such as 2% or 0.02")
    return value


def _count_of(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}; expected at least 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer profile`."""
    defaults = {field.name: field.default for field in fields(ProfileOptions)}
    parser.add_argument("model", type=Path, metavar="MODEL.gguf", help="a stock GGUF")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="plain text, UTF-8")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="OUT.powerinfer.gguf", help="default: the sidecar beside the model"
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--max-loss",
        type=_share,
        metavar="SHARE",
        help=f"most that perplexity on held-out text may grow, SiLU and GELU models (default: {defaults['max_loss']:.0%})".replace(
            "%", "%%"
        ),
    )
    target.add_argument("--density", type=_share, metavar="SHARE", help="down rows to use, whatever it costs")
    parser.add_argument("--activation", choices=ACTIVATIONS, help="of the weights (default: that of the architecture)")
    parser.add_argument("--activation-param", type=float, default=0.0, metavar="X", help="FATReLU's cut (default: 0)")
    parser.add_argument(
        "--tokens", type=_count_of, default=defaults["tokens"], help="use at most so many (default: %(default)s)"
    )
    parser.add_argument(
        "-c", "--ctx", type=_count_of, default=defaults["ctx"], help="tokens per window (default: %(default)s)"
    )
    parser.add_argument("-t", "--threads", type=_count_of, help="default: physical cores allowed")
    parser.add_argument(
        "-s", "--seed", type=int, default=defaults["seed"], help="of the split into calibration and held-out text"
    )
    parser.add_argument(
        "--special", action="store_true", help="the text holds the model's special tokens, e.g. of its chat template"
    )
    parser.add_argument(
        "--down-type", metavar="TYPE", help="store neuron-major down rows of this type in the plan (default: none)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="picture of the activations (default: beside the plan)"
    )
    parser.add_argument("--no-plot", action="store_true", help="no picture")
    parser.add_argument("--resume", action="store_true", help="go on where a stopped run ended")
    parser.add_argument("--strict", action="store_true", help="a fallback is an error instead of a note")
    parser.add_argument("--mapped", action="store_true", help="weights stay in the mapped file")


def _options(args: argparse.Namespace) -> ProfileOptions:
    """The options of a command line, checked."""
    name = args.model.name
    out = args.out or args.model.with_name(name.removesuffix(".gguf") + SIDECAR_SUFFIX)
    if not out.name.endswith(SIDECAR_SUFFIX):
        raise OptionError(f"out: {out}; expected a name that ends in {SIDECAR_SUFFIX}; rename it.")
    if not out.parent.is_dir():
        raise OptionError(f"out: {out.parent} isn't a folder; expected one; make it first.")
    if args.ctx < 4:
        raise OptionError(f"ctx: {args.ctx}; expected at least 4 tokens per window; pass a larger --ctx.")
    activation = args.activation or bare_plan(args.model).activation
    if activation not in thresholds.CALIBRATED_ACTIVATIONS and (args.max_loss or args.density):
        raise OptionError(f"{activation}: has exact zeros, nothing is calibrated; leave --max-loss and --density out.")
    if args.activation_param and activation != "relu":
        raise OptionError(
            f"activation-param: {args.activation_param} with {activation}; expected it with relu only; leave it out."
        )
    if args.plot and args.no_plot:
        raise OptionError("plot: --plot and --no-plot were given; expected one of them; leave one out.")
    if args.down_type:
        row_type_id(args.down_type)
    default_loss = ProfileOptions.max_loss if args.density is None else None
    return ProfileOptions(
        model=args.model,
        text=tuple(args.text),
        out=out,
        max_loss=args.max_loss or default_loss,
        density=args.density,
        activation=args.activation,
        activation_param=args.activation_param,
        tokens=args.tokens,
        ctx=args.ctx,
        threads=args.threads,
        seed=args.seed,
        special=args.special,
        down_type=args.down_type,
        plot=None if args.no_plot else args.plot or out.with_name(out.name.removesuffix(".gguf") + ".png"),
        resume=args.resume,
        strict=args.strict,
        mapped=args.mapped,
    )


def run(args: argparse.Namespace) -> int:
    """`powerinfer profile`: notes and progress to stderr, the table to stdout.

    Args:
        args: the parsed command line.

    Returns:
        The exit code.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    options = _options(args)
    notes: set[str] = set()

    def note(text: str) -> None:
        if text not in notes:
            notes.add(text)
            logging.getLogger("powerinfer_py").warning("%s", text)

    if options.plot is not None:
        try:
            plot_profile.check_plot()
        except OptionError as error:
            if args.plot or options.strict:
                raise
            note(str(error))
            options = replace(options, plot=None)
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        @contextmanager
        def steps(what: str, n: int) -> Iterator[Callable[[], None]]:
            task = progress.add_task(what, total=n)
            try:
                yield lambda: progress.advance(task)
            finally:
                progress.remove_task(task)

        profile = make_profile(options, steps, note)
    print_profile(profile, options, Console())
    if options.plot is not None:
        frequencies = [layer.neuron_frequency for layer in profile.plan.layers]
        print(f"picture: {plot_profile.write_plot(options.plot, frequencies, options.model.name)}")
    return 0


def print_profile(profile: Profile, options: ProfileOptions, console: Any) -> None:
    """Prints a table of the layers, the totals, and what to make of them."""
    from rich.table import Table

    plan = profile.plan
    table = Table(box=None, pad_edge=False)
    for name in ("layer", "n_ff", "up rows", "down rows", "80 % by", "threshold", "product threshold", "bytes saved"):
        table.add_column(name, justify="right")
    for i, layer in enumerate(plan.layers):
        if not layer.n_ff:
            table.add_row(str(i), "-", *["not covered"] * 2)
            continue
        gate, up, down = profile.row_bytes[i]
        up_share = profile.up_share[i] if gate else 1.0
        if plan.activation not in thresholds.CALIBRATED_ACTIVATIONS and gate:
            up_share = layer.profile_density
        read = gate + up * up_share + down * layer.profile_density
        table.add_row(
            str(i),
            str(layer.n_ff),
            f"{up_share:.3f}",
            f"{layer.profile_density:.3f}",
            f"{plot_profile.share_of_neurons(layer.neuron_frequency):.1%}",
            f"{layer.threshold:.4g}",
            f"{layer.product_threshold:.4g}",
            f"{1 - read / (gate + up + down):.1%}",
        )
    console.print(table)
    n_covered = sum(1 for layer in plan.layers if layer.n_ff)
    console.print(f"{n_covered} of {plan.n_layer} layers, {plan.activation}; {plan.corpus}")
    if profile.loss is not None:
        loss = profile.loss
        console.print(
            f"perplexity on held-out text: dense {loss.dense:.3f}, sparse {loss.sparse:.3f}, "
            f"loss {loss.relative:+.2%} (standard error {loss.error:.2%})"
        )
    else:
        console.print(f"perplexity: {profile.perplexity:.3f} (exact zeros: nothing is lost)")
    console.print(
        f"decoding: density {profile.density:.3f}, candidate_density {profile.candidate_density:.3f}, "
        f"bytes_share {profile.bytes_share:.3f}"
    )
    if 1 - profile.bytes_share < _LITTLE_SAVED:
        within = f" within {options.max_loss:.1%} loss" if options.max_loss and profile.loss else ""
        console.print(
            f"Little is to be had: this model's FFN still reads {profile.bytes_share:.0%} of its bytes{within}; "
            "expect no speed-up from it."
        )
    console.print(f"plan: {options.out} ({options.out.stat().st_size / 1e3:.0f} kB)")
