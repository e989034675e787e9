"""`powerinfer perplexity`: quality of the sparsity modes against dense on a text, by llama.cpp's method, in one load.

Per chunk every mode runs in turn, dense first: its logits are kept only for that chunk, so memory doesn't grow.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer_py import _core
from powerinfer_py.bench import STOCK
from powerinfer_py.bench_report import figure, names, print_table, write_json
from powerinfer_py.errors import FormatError, OptionError, PlanError
from powerinfer_py.format import BaseModel, Plan, bare_plan, is_extended, open_files
from powerinfer_py.hub import add_hub_arguments, resolve_model
from powerinfer_py.llama import SPARSITY_MODES

from .terminal import Steps, note_once, progress_steps
from .text_runner import Runner, read_text
from .thresholds import CALIBRATED_ACTIVATIONS

_DENSE = "dense"
_MODES = (_DENSE, *(mode for mode in SPARSITY_MODES if mode not in (_DENSE, "auto")), "auto")
_LEAST_CTX = 8  # three tokens of a chunk count: enough for a standard error
_LEAST_CHUNKS = 2  # of text, as llama.cpp's program asks
# What a layer must have for a mode, and where it comes from.
_NEEDS = {
    "threshold": ("thresholds", "calibrate the plan (powerinfer profile)"),
    "predicted": ("a predictor that can run", "use a plan with predictors"),
}


@dataclass(frozen=True)
class PerplexityOptions:
    """Options of a measurement, with their defaults."""

    model: Path
    files: tuple[Path, ...]
    plan: Path | None = None  # None: the model is one, or it is beside it
    modes: tuple[str, ...] | None = None  # None: all that the plan can run and that differ
    stock: bool = False  # stock llama.cpp too
    n_ctx: int = 512  # tokens per chunk
    n_chunks: int | None = None  # at most; None: all of the text
    n_threads: int | None = None  # None: physical cores allowed
    special: bool = False  # the text holds special tokens
    strict: bool = False
    mapped: bool = False
    json: Path | None = None


@dataclass(frozen=True)
class ModeResult:
    """One mode. Each `_error` is a standard error over tokens, which are taken as independent.

    Attributes:
        mode: its name, or `stock`.
        layers: what they run, e.g. `threshold x 30`.
        perplexity: on the tokens that count.
        ratio: perplexity / that of dense, of the same tokens; its error is that of the differences per token.
        kl: mean Kullback-Leibler divergence from dense, nats per token; kl_median, kl_99 (percentile), kl_max.
        same_top: share of tokens where dense finds the same token likeliest.
        density, candidate_density: of all tokens that were run; None for upstream's layers.
        bytes_share: of decoding token by token; None where it wasn't measured.
        token_ms: median over chunks, run as prompts.
    """

    mode: str
    layers: str
    perplexity: float
    perplexity_error: float
    ratio: float
    ratio_error: float
    kl: float
    kl_error: float
    kl_median: float
    kl_99: float
    kl_max: float
    same_top: float
    same_top_error: float
    density: float | None
    candidate_density: float | None
    bytes_share: float | None
    token_ms: float


@dataclass(frozen=True)
class Report:
    """A measurement.

    Attributes:
        model: the file.
        plan: the plan's file; None: upstream computed the model.
        text: names of the files.
        n_tokens: of the text, BOS included.
        n_ctx: tokens per chunk.
        n_chunks: chunks that were measured.
        n_chunks_wanted: chunks that were asked for.
        n_scored: tokens that count.
        n_threads: that computed.
        interrupted: by Ctrl-C, before all was measured.
        modes: dense first, then as asked for, stock last.
    """

    model: str
    plan: str | None
    text: tuple[str, ...]
    n_tokens: int
    n_ctx: int
    n_chunks: int
    n_chunks_wanted: int
    n_scored: int
    n_threads: int
    interrupted: bool
    modes: tuple[ModeResult, ...]


@dataclass(frozen=True)
class _Outcome:
    """What one mode did in one chunk.

    Attributes:
        nll: (n,) float64, negative log-likelihoods.
        kl: (n,) float64, divergences from dense.
        same: (n,) bool, same likeliest token as dense.
        seconds: that the chunk took.
        stats: the plan's; empty for upstream.
    """

    nll: np.ndarray
    kl: np.ndarray
    same: np.ndarray
    seconds: float
    stats: dict[str, Any] = field(default_factory=dict)


# ---- The whole -----------------------------------------------------------------------------------------------------


def measure(options: PerplexityOptions, steps: Steps, note: Callable[[str], None]) -> Report:
    """Measures a model's modes on a text.

    Args:
        options: what to measure.
        steps: progress, see terminal.py.
        note: receives every note.

    Returns:
        The report. Ctrl-C ends it early, with the chunks that all modes had finished.

    Raises:
        FormatError: a file can't be used, or holds too little text.
        PlanError: the plan isn't the model's, or can't run a mode that was named.
        OptionError: an option can't be used.
        KeyboardInterrupt: before the first chunk was finished.
    """
    text = _read_files(options.files, note)
    if options.plan is not None and is_extended(options.model):
        raise OptionError(
            f"plan: {options.plan} was given, but {options.model} is a plan itself; leave one of them out."
        )
    base, plan = open_files(str(options.model), None if options.plan is None else str(options.plan))
    n_threads = options.n_threads or _core.physical_cores()
    with ExitStack() as stack:

        def load(plan: Plan | None, note: Callable[[str], None]) -> Runner:
            return stack.enter_context(
                Runner(
                    plan and plan.path,
                    None if plan and plan.is_embedded else base.path,
                    n_ctx=options.n_ctx,
                    n_threads=n_threads,
                    strict=options.strict,
                    mapped=options.mapped,
                    count=False,
                    note=note,
                )
            )

        held: list[str] = []
        runner = load(plan, held.append)
        tokens = _tokens(runner, text, options)
        chunks = tokens[: len(tokens) // options.n_ctx * options.n_ctx].reshape(-1, options.n_ctx)[: options.n_chunks]
        layers = _choose_modes(runner, plan, options, held, note)
        runners = dict.fromkeys(layers, runner)
        if options.stock:
            why_not = _why_no_stock(base, plan)
            if why_not and options.strict:
                raise PlanError(why_not)
            if why_not:
                note(why_not)
            else:
                runners[STOCK] = load(None, note)
                layers[STOCK] = "upstream"
        done: list[dict[str, _Outcome]] = []
        bytes_shares: dict[str, float] = {}
        interrupted = False
        so_far = None
        try:
            with steps(f"chunks of {options.n_ctx} tokens", len(chunks) * len(runners)) as step:
                for chunk in chunks:
                    outcomes = {}
                    for mode, outcome in _run_modes(runners, chunk):
                        outcomes[mode] = outcome
                        step(so_far)
                    done.append(outcomes)  # at once: Ctrl-C must not leave a chunk that some modes lack
                    so_far = _running_text(done)
            with_plan = [mode for mode, runner in runners.items() if runner.plan is not None]
            with steps("decoding", len(with_plan)) as step:
                for mode in with_plan:
                    runner.plan.set_sparsity(mode)
                    stats = runner.decode_stats(chunks[0])
                    bytes_shares[mode] = stats["read_bytes"] / stats["dense_bytes"]
                    step()
        except KeyboardInterrupt:
            if not done:
                raise
            interrupted = True
        for said in held:
            note(said)
    return Report(
        model=str(options.model),
        plan=None if plan is None else str(plan.path),
        text=tuple(str(path) for path in options.files),
        n_tokens=len(tokens),
        n_ctx=options.n_ctx,
        n_chunks=len(done),
        n_chunks_wanted=len(chunks),
        n_scored=sum(len(outcomes[_DENSE].nll) for outcomes in done),
        n_threads=n_threads,
        interrupted=interrupted,
        modes=tuple(
            _summary(mode, layers[mode], [outcomes[mode] for outcomes in done], done, options.n_ctx, bytes_shares)
            for mode in runners
        ),
    )


def _read_files(paths: Sequence[Path], note: Callable[[str], None]) -> str:
    """The text of all files, one after the other; like llama.cpp's, without the last line feed of each."""
    texts = []
    for path in paths:
        text, n_replaced = read_text(path)
        if not text.strip():
            raise FormatError(f"{path}: there is no text in it; expected some; give another file.")
        if n_replaced:
            note(f"{path}: {n_replaced} places aren't UTF-8 and were replaced.")
        texts.append(text[:-1] if text.endswith("\n") else text)
    return "\n".join(texts)


def _tokens(runner: Runner, text: str, options: PerplexityOptions) -> np.ndarray:
    """Tokens of the whole text, (n,) int32, BOS first where the vocabulary adds it."""
    tokens = runner.tokenize(text, options.special)
    if runner.bos is not None:
        tokens = np.concatenate([np.array([runner.bos], np.int32), tokens])
    n_needed = _LEAST_CHUNKS * options.n_ctx
    if len(tokens) < n_needed:
        raise FormatError(
            f"text: {', '.join(str(path) for path in options.files)} make {len(tokens)} tokens; expected at least "
            f"{n_needed}, {_LEAST_CHUNKS} chunks; give more text or a smaller -c."
        )
    return tokens


def _choose_modes(
    runner: Runner, plan: Plan | None, options: PerplexityOptions, held: list[str], note: Callable[[str], None]
) -> dict[str, str]:
    """Which modes to measure.

    Args:
        runner: the model.
        plan: its plan.
        options: modes and strictness.
        held: notes of the core; those of modes that are left out are dropped.
        note: receives the others.

    Returns:
        Mode -> what its layers run; dense first.

    Raises:
        PlanError: a mode that was named can't run.
    """

    def release() -> None:
        while held:
            note(held.pop(0))

    if plan is None:
        text = (
            f"{options.model}: it has no plan, so upstream computes it densely and no other mode can be measured; "
            f"make one with: powerinfer profile {options.model} --text FILE"
        )
        if options.strict or set(options.modes or ()) - {_DENSE}:
            raise PlanError(text)
        note(text)
        return {_DENSE: "upstream"}
    release()
    found: dict[str, str] = {}
    for mode in dict.fromkeys((_DENSE, *(options.modes or _MODES))):
        reason = ""
        try:
            runner.plan.set_sparsity(mode)
        except PlanError as error:  # strict
            reason = str(error)
        ran = collections.Counter(layer["sparsity"] if layer["n_ff"] else "upstream" for layer in runner.plan.layers())
        layers = ", ".join(f"{name} x {n}" for name, n in sorted(ran.items()))
        if not reason and mode in _NEEDS and mode not in ran:
            what, how = _NEEDS[mode]
            reason = f"{plan.path}: no layer has {what}, so mode {mode} isn't measured; {how}, or leave it out."
        if reason and options.modes is not None:
            raise PlanError(reason)
        if options.modes is None and not reason:
            if mode == "exact" and plan.activation in CALIBRATED_ACTIVATIONS:
                reason = (
                    f"{plan.path}: {plan.activation} has no exact zeros: `exact` would equal dense, and is left out."
                )
            elif mode == "auto" and layers in found.values():
                reason = f"{plan.path}: auto runs {layers}, which is measured already."
        if reason:
            held.clear()
            note(reason)
        else:
            release()
            found[mode] = layers
    return found


def _why_no_stock(base: BaseModel, plan: Plan | None) -> str:
    """Why stock llama.cpp can't check the base model, empty when it can."""
    if plan is None:
        return f"{base.path}: it has no plan, so what is measured is stock llama.cpp; --stock adds nothing."
    if plan.is_embedded:
        return (
            f"{plan.path}: the base model is inside it, where stock llama.cpp can't open it, so stock isn't measured; "
            "take it out with powerinfer pack --extract."
        )
    try:
        of_graph = bare_plan(base.path).activation
    except FormatError as error:
        return f"{error} Stock isn't measured."
    cut = max((layer.activation_param for layer in plan.layers), default=0.0)
    if of_graph == plan.activation and not cut:
        return ""
    own = f"{plan.activation} with a cut at {cut:g}" if cut else plan.activation
    return (
        f"{plan.path}: its weights belong to {own}, but stock llama.cpp computes {of_graph} for architecture "
        f"'{base.architecture}', so stock isn't measured."
    )


# ---- Figures -------------------------------------------------------------------------------------------------------


def _run_modes(runners: dict[str, Runner], chunk: np.ndarray) -> Iterator[tuple[str, _Outcome]]:
    """Runs one chunk (n_ctx,) in every mode, dense first."""
    dense = None
    for mode, runner in runners.items():
        if runner.plan is not None:
            runner.plan.set_sparsity(mode)
            runner.plan.reset_stats()
        before = runner.decode_s
        scores = runner.scored(chunk, whole=False)
        seconds = runner.decode_s - before
        stats = {} if runner.plan is None else runner.plan.stats()
        nll = scores.negative_log_likelihoods()
        if not np.isfinite(nll).all():
            raise PlanError(
                f"mode {mode}: its logits aren't finite; expected numbers; the model or its plan is damaged."
            )
        if dense is None:
            dense = scores.copy()
            yield mode, _Outcome(nll, np.zeros(len(nll)), np.ones(len(nll), bool), seconds, stats)
        else:
            yield mode, _Outcome(nll, dense.divergences(scores), dense.same_top(scores), seconds, stats)


def _mean(values: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def _summary(
    mode: str,
    layers: str,
    outcomes: Sequence[_Outcome],
    done: Sequence[dict[str, _Outcome]],
    n_ctx: int,
    bytes_shares: dict[str, float],
) -> ModeResult:
    """The figures of one mode over all chunks."""
    nll, kl, same = (np.concatenate([getattr(o, name) for o in outcomes]) for name in ("nll", "kl", "same"))
    dense = np.concatenate([of_modes[_DENSE].nll for of_modes in done])
    nll_mean, nll_error = _mean(nll)
    change, change_error = _mean(nll - dense)
    kl_mean, kl_error = _mean(kl)
    median, percentile_99 = np.percentile(kl, (50, 99))
    same_share, same_error = _mean(same.astype(np.float64))

    def share(part: str) -> float | None:
        whole = sum(o.stats.get("n_neurons", 0) for o in outcomes)
        return sum(o.stats[part] for o in outcomes) / whole if whole else None

    return ModeResult(
        mode=mode,
        layers=layers,
        perplexity=math.exp(nll_mean),
        perplexity_error=math.exp(nll_mean) * nll_error,
        ratio=math.exp(change),
        ratio_error=math.exp(change) * change_error,
        kl=kl_mean,
        kl_error=kl_error,
        kl_median=float(median),
        kl_99=float(percentile_99),
        kl_max=float(kl.max()),
        same_top=same_share,
        same_top_error=same_error,
        density=share("n_active"),
        candidate_density=share("n_candidates"),
        bytes_share=bytes_shares.get(mode),
        token_ms=1e3 * float(np.median([o.seconds for o in outcomes])) / n_ctx,
    )


def _running_text(done: Sequence[dict[str, _Outcome]]) -> str:
    """Dense perplexity so far, and each other mode's ratio to it."""
    means = {mode: float(np.mean([outcomes[mode].nll for outcomes in done])) for mode in done[0]}
    dense = means.pop(_DENSE)
    ratios = "".join(f", {mode} x {math.exp(mean - dense):.4f}" for mode, mean in means.items())
    return f"perplexity {math.exp(dense):.3f}{ratios}"


# ---- Command line --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer perplexity`."""
    o = PerplexityOptions
    parser.description = (
        "Perplexity of a text by llama.cpp's method (chunks, the second half of each counts), and what each sparsity mode "
        "changes against dense: ratio of perplexities, KL divergence, agreement on the likeliest token, with standard errors."
    )
    parser.add_argument(
        "model", type=Path, nargs="?", metavar="MODEL", help="a GGUF (its sidecar is found beside it), or a plan"
    )
    add_hub_arguments(parser)
    parser.add_argument(
        "-f",
        "--file",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        help="plain text, UTF-8; several are joined",
    )
    parser.add_argument("-c", "--ctx-size", type=int, default=o.n_ctx, help="tokens per chunk (default: %(default)s)")
    parser.add_argument("--chunks", type=int, help="at most so many (default: the whole text)")
    parser.add_argument(
        "--modes", type=names, help=f"of {', '.join(_MODES)} (default: all that the plan can run); dense runs always"
    )
    parser.add_argument("--stock", action="store_true", help="stock llama.cpp on the base model too, as a check")
    parser.add_argument("--plan", type=Path, help="the extended GGUF to use, when it isn't beside the model")
    parser.add_argument("-t", "--threads", type=int, help="default: physical cores allowed")
    parser.add_argument("--special", action="store_true", help="the text holds the model's special tokens")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--strict", action="store_true", help="a fallback is an error instead of a note")
    parser.add_argument("--mapped", action="store_true", help="FFN rows stay in the mapped file instead of a copy")


def _options(args: argparse.Namespace) -> PerplexityOptions:
    """The options of a command line, checked."""
    for name, least in (("ctx_size", _LEAST_CTX), ("chunks", 1), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise OptionError(f"{name}: {value}; expected {least} or more; pass a larger one.")
    for mode in args.modes or ():
        if mode not in _MODES:
            raise OptionError(f"modes: {mode!r}; expected some of {', '.join(_MODES)}; stock is measured by --stock.")
    if args.json and not args.json.absolute().parent.is_dir():
        raise OptionError(f"{args.json}: its folder doesn't exist; expected one to write to; make it first.")
    return PerplexityOptions(
        model=Path(resolve_model(args)),
        files=tuple(args.file),
        plan=args.plan,
        modes=args.modes,
        stock=args.stock,
        n_ctx=args.ctx_size,
        n_chunks=args.chunks,
        n_threads=args.threads,
        special=args.special,
        strict=args.strict,
        mapped=args.mapped,
        json=args.json,
    )


def run(args: argparse.Namespace) -> int:
    """`powerinfer perplexity`: notes and progress to stderr, the table to stdout.

    Args:
        args: the parsed command line.

    Returns:
        The exit code; 130 when Ctrl-C ended it, with the figures so far.
    """
    options = _options(args)
    note = note_once()
    with progress_steps() as steps:
        report = measure(options, steps, note)
    print_report(report)
    if options.json is not None:
        write_json(options.json, dataclasses.asdict(report))
    if report.interrupted:
        note(
            f"stopped by Ctrl-C: the figures are those of {report.n_chunks} of {report.n_chunks_wanted} chunks; what "
            "wasn't reached is left blank."
        )
    return 130 if report.interrupted else 0


def print_report(report: Report) -> None:
    """Prints a column per mode."""

    def with_error(name: str, digits: int, scale: float = 1.0) -> list[str]:
        return [
            f"{scale * getattr(m, name):.{digits}f} +- {scale * getattr(m, name + '_error'):.{digits}f}"
            for m in report.modes
        ]

    def plain(name: str, digits: int) -> list[str]:
        return [figure(getattr(m, name), digits) for m in report.modes]

    rows = [
        ("perplexity", *with_error("perplexity", 4)),
        ("ratio to dense", *with_error("ratio", 5)),
        ("KL divergence", *with_error("kl", 6)),
        ("  median", *plain("kl_median", 6)),
        ("  99 %", *plain("kl_99", 6)),
        ("  maximum", *plain("kl_max", 6)),
        ("same top token, %", *with_error("same_top", 2, 100.0)),
        ("density", *plain("density", 3)),
        ("candidate_density", *plain("candidate_density", 3)),
        ("bytes_share of decoding", *plain("bytes_share", 3)),
        ("ms per token of a chunk", *plain("token_ms", 2)),
        ("layers", *(m.layers for m in report.modes)),
    ]
    print_table("", ("", *(m.mode for m in report.modes)), rows, 1)
    print(
        f"{', '.join(os.path.basename(name) for name in report.text)}: {report.n_tokens} tokens, {report.n_chunks} of "
        f"{report.n_chunks_wanted} chunks of {report.n_ctx}, {report.n_scored} tokens count; {report.n_threads} threads"
    )
