"""`powerinfer bench`: speed of the sparsity modes against stock llama.cpp, in one process, interleaved A B A B.

Decoding is timed on given tokens (no sampling), thread counts of stock and ours are equal, figures are medians.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from powerinfer_py import _core, bench_kernels, hub
from powerinfer_py.bench_machine import (
    MAX_RATIO_SPREAD,
    NOTED_PROBE_RANGE,
    Noise,
    NoiseMeter,
    PeakMemory,
    available_memory_bytes,
    check_noise,
    read_bandwidth,
    relative_spread,
)
from powerinfer_py.bench_report import counts, figure, names, percents, print_table, write_csv, write_json
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.format import SIDECAR_SUFFIX, BaseModel, Plan, open_files
from powerinfer_py.llama import SPARSITY_MODES, GpuOptions, Llama, Stats, limit_context, load_stock, stock_llama

STOCK = "stock"

# Real text for the models that have a vocabulary: the overlap of active sets means nothing on random tokens.
TEXT = """The river came down from the hills in spring, brown and fast, and the people of the village moved their boats
above the old stone wall. Nobody could say who had built the wall. The miller thought it was older than the church; the
teacher, who had read about such things, said that it was a dam for a pond where monks had kept carp. In the summer,
when the water was low, children walked along its top and looked for crayfish between the stones.
One year the snow lasted until the middle of April. Then it rained for nine days. On the tenth day the wall broke near
its northern end, and by noon the lower road was gone. The baker's son, who was eleven, had been sent to fetch flour
from the mill. He saw the water turn the corner by the smithy, left the cart where it stood, and climbed the pear tree
in the yard of the inn. From there he counted what went by: two doors, a wheel, a goat that swam better than he would
have believed, and the long table from the council room with the papers still on it.
When they asked him afterwards what he had thought about, up there, he said that he had tried to work out how much
water it was. If the road was six metres wide and the water half a metre deep, and if a door took ten seconds from the
smithy to the inn, which was about forty metres, then it had to be twelve cubic metres in every second. The teacher did
the sum again on the blackboard and found that it was right. "And then," said the boy, "I thought that if it went on
like this for an hour, it would be more than all the carp ponds in the world." That was not right, but nobody minded.
They built the wall again in the autumn, higher and with an iron gate, and put a mark on it to show where the water had
stood. The mark is still there. Below it somebody has scratched, quite neatly, the number twelve.
"""

# After a probe. Linux in a virtual machine hands the freed gigabyte back to its host two seconds later, which takes a core:
# with a probe in every round, the last mode of each round decoded up to 1.4 times slower.
_SETTLE_S = 3.0

# Decoded tokens of a warm-up; its prompt is the timed one.
_N_WARM_UP = 8
# Fits of time against density need a third point to say anything.
_LEAST_FIT_POINTS = 3


@dataclass(frozen=True)
class BenchOptions:
    """Options of a benchmark of one model, with their defaults."""

    model: str
    plan: str | None = None
    modes: tuple[str, ...] = (STOCK, "auto")
    n_prompt: int = 128  # tokens
    n_gen: int = 64  # tokens
    n_context: int | None = None  # tokens before the first decoded one; None: n_prompt
    repeats: int = 5
    threads: tuple[int, ...] = ()  # empty: physical cores allowed
    strict: bool = False
    mapped: bool = False
    mlock: bool = False
    gpu: GpuOptions = field(default_factory=GpuOptions)  # stock gets the same budget, in whole layers

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """The thread counts that are measured."""
        return self.threads or (_core.physical_cores(),)

    @property
    def context(self) -> int:
        """Tokens before the first decoded one."""
        return self.n_prompt if self.n_context is None else self.n_context


@dataclass(frozen=True)
class Sample:
    """One timed run of one mode."""

    mode: str
    n_threads: int
    i_repeat: int
    prompt_tok_s: float
    decode_tok_s: float
    stats: Stats | None  # of the decoded tokens; None for stock


@dataclass(frozen=True)
class Model:
    """What is measured, and on what."""

    name: str
    shape: str
    row_types: tuple[str, ...]  # of the base's feed-forward matrices
    tokens: str  # "text" or "random"
    recall: float | None  # mean over the plan's predictors, measured on held-out text
    weight_bytes: int  # weights of the base that a dense decode of one token reads
    ffn_bytes: int  # those of them that the plan covers
    loaded_together: bool


@dataclass(frozen=True)
class Measured:
    """All that a benchmark of one model measured."""

    model: Model
    samples: tuple[Sample, ...]  # in the order in which they were run
    probes_gb_s: dict[int, tuple[float, ...]]  # read bandwidth by thread count, before and after the runs
    peak_bytes: dict[str, int]  # anonymous memory of "stock" and of "powerinfer" at its peak, loading included
    noise: Noise


@dataclass(frozen=True)
class Line:
    """One mode at one thread count: medians over the repeats, with smallest and largest, and ratios to stock.

    A ratio is the median of the ratios of runs that were measured one after the other. Density, candidate_density and
    bytes_share are as measured while decoding; stock, which computes every neuron, has 1.
    """

    model: str
    shape: str
    row_types: str  # of the feed-forward rows as they are read
    mode: str
    layers: str  # what they run
    kernels: str
    n_threads: int
    oversubscribed: bool  # more threads than physical cores allowed
    n_context: int
    density: float | None
    candidate_density: float | None
    bytes_share: float | None
    recall: float | None  # of the predictors, where they run
    overlap: float | None
    prompt_tok_s: float
    prompt_tok_s_min: float
    prompt_tok_s_max: float
    prompt_ratio: float | None
    prompt_ratio_spread: float | None  # interquartile range / median
    decode_tok_s: float
    decode_tok_s_min: float
    decode_tok_s_max: float
    decode_ratio: float | None
    decode_ratio_spread: float | None
    bytes_per_token: float  # weights read per decoded token
    read_gb_s: float
    bandwidth_gb_s: float  # measured by read_bandwidth, median of before and after
    bandwidth_share: float  # read_gb_s / bandwidth_gb_s
    limit_tok_s: float  # decoding speed at the measured bandwidth
    limit_ratio: float  # bytes that stock reads per token / bytes_per_token
    peak_anonymous_bytes: int
    token_ms: float  # decode time per token; the parts below add up to it
    predictor_ms: float
    gate_ms: float
    up_down_ms: float
    ffn_rest_ms: float  # in our feed-forward blocks, but in none of the parts above
    outside_ms: float  # outside of our feed-forward blocks


@dataclass(frozen=True)
class Fit:
    """Straight line through decode time per token against density, by least squares over the models of one shape."""

    shape: str
    row_types: str
    mode: str
    n_threads: int
    n_points: int
    base_ms: float  # at density 0
    ms_per_percent: float  # per per cent of density
    worst_deviation: float  # largest |measured / fitted - 1|
    worst_density: float  # where


class _Models:
    """The models under test: stock and ours, kept loaded together when memory allows."""

    def __init__(self, options: BenchOptions, base: BaseModel) -> None:
        self._options = options
        self._base = base
        self._loaded: dict[str, Any] = {}
        self._held_bytes: dict[str, int] = {}
        self._warm: set[tuple[str, int]] = set()
        self.peak_bytes: dict[str, int] = {}
        # Of the first model that is loaded.
        self.tokens: list[int] = []
        self.tokens_are = self.shape = ""
        n_bytes = sum(file.size for file in base.files)
        # A budget is one model's at a time.
        self.together = options.gpu.vram_budget is None and n_bytes * 2.2 < available_memory_bytes()

    def get(self, mode: str, n_threads: int) -> Any:
        """The model that runs a mode, set to it and warm: it has run the prompt since it was loaded."""
        engine = STOCK if mode == STOCK else "powerinfer"
        if engine not in self._loaded and not self.together:
            self.close()
        if (mode, n_threads) in self._warm:
            return self._set(self._loaded[engine], mode, n_threads)
        with PeakMemory() as memory:
            if engine not in self._loaded:
                self._loaded[engine] = self._load(mode)
            if not self.tokens:
                o = self._options
                n_tokens = max(o.n_prompt, o.context) + o.n_gen
                self.tokens, self.tokens_are = _make_tokens(self._loaded[engine], n_tokens)
                self.shape = _shape(self._loaded[engine].metadata)
            model = self._set(self._loaded[engine], mode, n_threads)
            n_prompt = self._options.n_prompt
            _time_prompt(model, self.tokens[:n_prompt])
            _time_decode(model, self.tokens[n_prompt : n_prompt + min(_N_WARM_UP, self._options.n_gen)], n_prompt)
        # Of this engine alone, while the other one may be loaded too.
        held = self._held_bytes.get(engine, 0)
        self.peak_bytes[engine] = max(self.peak_bytes.get(engine, 0), held + memory.peak_bytes - memory.start_bytes)
        self._held_bytes[engine] = held + memory.end_bytes - memory.start_bytes
        self._warm.add((mode, n_threads))
        return model

    def _set(self, model: Any, mode: str, n_threads: int) -> Any:
        if mode != STOCK and model.sparsity != mode:
            model.sparsity = mode
        model._ctx.set_n_threads(n_threads, n_threads)
        return model

    def _load(self, mode: str) -> Any:
        o = self._options
        common = {
            "n_ctx": max(o.n_prompt, o.context) + o.n_gen + 8,
            "n_batch": 512,
            "n_threads": max(o.thread_counts),
            "n_threads_batch": max(o.thread_counts),
            "use_mlock": o.mlock,
            "verbose": False,
        }
        if mode == STOCK:
            return load_stock(_stock_path(self._base), o.gpu, **common)
        gpu = vars(o.gpu)
        model = Llama(o.model, sparsity=mode, plan=o.plan, strict=o.strict, mapped=o.mapped, **gpu, **common)
        _check_has_plan(model)
        return model

    def close(self) -> None:
        for model in self._loaded.values():
            model.close()
        self._loaded.clear()
        self._held_bytes.clear()
        self._warm.clear()


def measure(options: BenchOptions) -> Measured:
    """Run the benchmark of one model.

    Args:
        options: what to measure.

    Returns:
        Everything measured; samples repeat by repeat, in each repeat all thread counts and modes.

    Raises:
        OptionError: a mode doesn't exist.
        PlanError: the model has no plan, or stock llama.cpp can't open its base.
    """
    for mode in options.modes:
        if mode not in (STOCK, *SPARSITY_MODES):
            raise OptionError(f"modes: {mode!r}; expected {STOCK}, {', '.join(SPARSITY_MODES)}; pass some of them.")
    base, plan = open_files(options.model, options.plan)
    models = _Models(options, base)
    turns = [(n_threads, mode) for n_threads in options.thread_counts for mode in options.modes]
    if not models.together:  # a mode's thread counts in a row: each change of the engine loads it again
        turns.sort(key=lambda turn: options.modes.index(turn[1]))
    try:
        probes: dict[int, list[float]] = {n_threads: [] for n_threads in options.thread_counts}
        samples = []
        for n_threads, mode in turns if models.together else turns[:1]:
            models.get(mode, n_threads)
        _probe(probes)
        time.sleep(_SETTLE_S)
        meter = NoiseMeter(max(options.thread_counts))
        for i_repeat in range(options.repeats):
            for n_threads, mode in turns:
                model = models.get(mode, n_threads)
                samples.append(_time_run(model, mode, n_threads, i_repeat, models.tokens, options))
        noise = meter.stop()
        _probe(probes)
    finally:
        models.close()
    return Measured(
        model=Model(
            name=os.path.basename(options.model),
            shape=models.shape,
            row_types=_row_types(base),
            tokens=models.tokens_are,
            recall=_recall(plan),
            weight_bytes=_weight_bytes(base),
            ffn_bytes=_ffn_bytes(base, plan),
            loaded_together=models.together,
        ),
        samples=tuple(samples),
        probes_gb_s={n_threads: tuple(values) for n_threads, values in probes.items()},
        peak_bytes=models.peak_bytes,
        noise=noise,
    )


def _probe(probes: dict[int, list[float]]) -> None:
    for n_threads, values in probes.items():
        values.append(read_bandwidth(n_threads) / 1e9)


def _time_run(model: Any, mode: str, n_threads: int, i_repeat: int, tokens: list[int], options: BenchOptions) -> Sample:
    prompt_s = _time_prompt(model, tokens[: options.n_prompt])
    n_past = options.context
    if n_past != options.n_prompt:
        _time_prompt(model, tokens[:n_past])
    if mode != STOCK:
        model.reset_stats()
    decode_s = _time_decode(model, tokens[n_past : n_past + options.n_gen], n_past)
    return Sample(
        mode=mode,
        n_threads=n_threads,
        i_repeat=i_repeat,
        prompt_tok_s=options.n_prompt / prompt_s,
        decode_tok_s=options.n_gen / decode_s,
        stats=None if mode == STOCK else model.stats(),
    )


def summarize(measured: Measured, options: BenchOptions) -> list[Line]:
    """Medians, spreads and ratios of a benchmark.

    Args:
        measured: what `measure` returned.
        options: what it was given.

    Returns:
        One line per thread count and mode, in the order of the samples.
    """
    runs_of: dict[tuple[int, str], list[Sample]] = {}
    for sample in measured.samples:
        runs_of.setdefault((sample.n_threads, sample.mode), []).append(sample)
    return [_line(measured, options, runs, runs_of.get((n_threads, STOCK))) for (n_threads, _), runs in runs_of.items()]


def _line(measured: Measured, options: BenchOptions, runs: list[Sample], stock: list[Sample] | None) -> Line:
    model, n_threads, mode, stats = measured.model, runs[0].n_threads, runs[0].mode, runs[-1].stats
    bytes_per_token = float(model.weight_bytes)
    if stats is not None:
        bytes_per_token += stats.read_bytes / options.n_gen - model.ffn_bytes
    prompt, decode = ([getattr(run, name) for run in runs] for name in ("prompt_tok_s", "decode_tok_s"))
    decode_tok_s = statistics.median(decode)
    bandwidth = statistics.median(measured.probes_gb_s[n_threads])
    read_gb_s = bytes_per_token * decode_tok_s / 1e9
    ratios: dict[str, list[float]] = {"prompt_tok_s": [], "decode_tok_s": []}
    for name, values in ratios.items():
        values += [getattr(run, name) / getattr(reference, name) for run, reference in zip(runs, stock or ())]

    def part_ms(name: str) -> float:
        if stats is None:
            return 0.0
        return statistics.median(getattr(run.stats, name) for run in runs) / 1000 / options.n_gen

    token_ms = 1000 / decode_tok_s
    parts = {name: part_ms(f"{name}_us") for name in ("predictor", "gate", "up_down", "total")}
    whole = 1.0 if stats is None else None
    return Line(
        model=model.name,
        shape=model.shape,
        row_types="+".join(model.row_types if stats is None else stats.row_types),
        mode=mode,
        layers=", ".join(f"{name} x {n}" for name, n in stats.modes) if stats else "upstream",
        kernels=(stats and stats.kernels) or "upstream",
        n_threads=n_threads,
        oversubscribed=n_threads > _core.physical_cores(),
        n_context=options.context,
        density=stats.density if stats else whole,
        candidate_density=stats.candidate_density if stats else whole,
        bytes_share=stats.bytes_share if stats else whole,
        recall=model.recall if stats and "predicted" in dict(stats.modes) else None,
        overlap=stats.overlap if stats else None,
        prompt_tok_s=statistics.median(prompt),
        prompt_tok_s_min=min(prompt),
        prompt_tok_s_max=max(prompt),
        prompt_ratio=statistics.median(ratios["prompt_tok_s"]) if stock else None,
        prompt_ratio_spread=relative_spread(ratios["prompt_tok_s"]),
        decode_tok_s=decode_tok_s,
        decode_tok_s_min=min(decode),
        decode_tok_s_max=max(decode),
        decode_ratio=statistics.median(ratios["decode_tok_s"]) if stock else None,
        decode_ratio_spread=relative_spread(ratios["decode_tok_s"]),
        bytes_per_token=bytes_per_token,
        read_gb_s=read_gb_s,
        bandwidth_gb_s=bandwidth,
        bandwidth_share=read_gb_s / bandwidth,
        limit_tok_s=bandwidth * 1e9 / bytes_per_token,
        limit_ratio=model.weight_bytes / bytes_per_token,
        peak_anonymous_bytes=measured.peak_bytes[STOCK if mode == STOCK else "powerinfer"],
        token_ms=token_ms,
        predictor_ms=parts["predictor"],
        gate_ms=parts["gate"],
        up_down_ms=parts["up_down"],
        ffn_rest_ms=max(0.0, parts["total"] - parts["predictor"] - parts["gate"] - parts["up_down"]),
        outside_ms=max(0.0, token_ms - parts["total"]),
    )


def fit_lines(lines: Sequence[Line]) -> list[Fit]:
    """Straight lines of decode time per token against density, over the models of one shape and type.

    Args:
        lines: of several models.

    Returns:
        One fit per shape, row types, mode and thread count that was measured at three densities or more.
    """
    groups: dict[tuple, list[Line]] = {}
    for line in lines:
        if line.density is not None and line.mode != STOCK:
            groups.setdefault((line.shape, line.row_types, line.mode, line.n_threads), []).append(line)
    fits = []
    for (shape, row_types, mode, n_threads), points in groups.items():
        density = np.array([line.density for line in points])
        if len(np.unique(density)) < _LEAST_FIT_POINTS:
            continue
        token_ms = np.array([line.token_ms for line in points])
        slope, base = np.polyfit(density, token_ms, 1)
        deviation = np.abs(token_ms / (base + slope * density) - 1)
        worst = int(deviation.argmax())
        fits.append(
            Fit(
                shape=shape,
                row_types=row_types,
                mode=mode,
                n_threads=n_threads,
                n_points=len(points),
                base_ms=float(base),
                ms_per_percent=float(slope) / 100,
                worst_deviation=float(deviation[worst]),
                worst_density=float(density[worst]),
            )
        )
    return fits


def noise_reasons(measured: Measured, lines: Sequence[Line]) -> list[str]:
    """Why the figures of a model can't be trusted; empty when they can.

    Limits: 10 % of the used cores taken by other processes, 5 % of their time taken by a virtual machine's host, and an
    interquartile range of 20 % of the median for the ratios to stock (of decoding and of the prompt; without stock in
    the run, there are none). Oversubscribed thread counts are left out of the last: their own threads disturb each other.

    Args:
        measured: of the model.
        lines: its lines.

    Returns:
        One text per limit that was passed.
    """
    reasons = measured.noise.reasons()
    spreads = [
        (spread, f"{what} of {line.mode} with {line.n_threads} threads")
        for line in lines
        for what, spread in (("prompt", line.prompt_ratio_spread), ("decode", line.decode_ratio_spread))
        if spread is not None and not line.oversubscribed
    ]
    worst, where = max(spreads, default=(0.0, ""))
    if worst > MAX_RATIO_SPREAD:
        reasons.append(
            f"ratios to stock spread by up to {worst:.0%} of their median ({where}; interquartile range, "
            f"limit {MAX_RATIO_SPREAD:.0%})"
        )
    return reasons


def compare_with_stock(llama: Llama, tokens: list[int], n_gen: int, repeats: int, stock: str | None = None) -> str:
    """Time decoding with a loaded model and with stock llama.cpp, interleaved.

    Args:
        llama: the model.
        tokens: (n) a text; its last tokens are decoded one by one.
        n_gen: how many of them.
        repeats: timed runs per engine.
        stock: the GGUF that stock llama.cpp runs, of the same vocabulary; None: the model's own file.

    Returns:
        One line: medians of both, and the median of the pairwise ratios.

    Raises:
        PlanError: the model has no plan, or its base is inside the extended GGUF, where stock llama.cpp can't open it.
        OptionError: `stock` has another vocabulary.
    """
    _check_has_plan(llama)
    n_gen = max(1, min(n_gen, len(tokens) - 1))
    prompt, decoded = tokens[:-n_gen], tokens[-n_gen:]
    with_stock = stock_llama(
        _stock_path(open_files(stock or llama.model_path, None)[0]),
        n_ctx=llama.n_ctx(),
        n_threads=llama.n_threads,
        n_threads_batch=llama.n_threads,
        verbose=False,
    )
    speeds: dict[str, list[float]] = {"sparse": [], STOCK: []}
    try:
        if with_stock.n_vocab() != llama.n_vocab():
            raise OptionError(
                f"compare-with: {stock} has {with_stock.n_vocab()} tokens; expected {llama.n_vocab()}, the model's vocabulary; "
                "give the model that it was made from."
            )
        for i_repeat in range(-1, repeats):
            for name, model in (("sparse", llama), (STOCK, with_stock)):
                _time_prompt(model, prompt)
                seconds = _time_decode(model, decoded, len(prompt))
                if i_repeat >= 0:
                    speeds[name].append(n_gen / seconds)
    finally:
        with_stock.close()
        llama.reset()
    ratio = _ratio(speeds["sparse"], speeds[STOCK])
    return (
        f"sparse {statistics.median(speeds['sparse']):.2f} tokens/s, stock {statistics.median(speeds[STOCK]):.2f} tokens/s, "
        f"ratio {ratio:.2f} "
        f"(decode, medians of {repeats} runs of {n_gen} tokens, interleaved, {llama.n_threads} threads)"
    )


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say how a model is loaded."""
    parser.add_argument("--plan", help="the extended GGUF to use, when it isn't beside the model")
    parser.add_argument("--strict", action="store_true", help="a fallback is an error instead of a note")
    parser.add_argument("--mapped", action="store_true", help="FFN rows stay in the mapped file instead of a copy")
    parser.add_argument("--mlock", action="store_true", help="keep the weights in memory")
    parser.add_argument(
        "--vram-budget",
        metavar="SIZE",
        help="GPU memory that may be used: GiB, or 8GiB, 75%%; one for all GPUs or one each",
    )
    parser.add_argument(
        "--device", metavar="NAME,...", help="GPU devices to use, or none (default: as llama.cpp chooses)"
    )
    parser.add_argument(
        "--rpc", type=names, metavar="HOST:PORT,...", help="use the devices of these ggml RPC servers too"
    )
    parser.add_argument(
        "--reset-gpu-index", action="store_true", help="place neurons anew, also when a placement is saved"
    )
    parser.add_argument(
        "--disable-gpu-index", action="store_true", help="no single neurons on the GPU, only whole dense blocks"
    )
    parser.add_argument("--require-split", action="store_true", help="it is an error when no neuron is on the GPU")


def gpu_options(args: argparse.Namespace) -> GpuOptions:
    """What the options of `add_load_arguments` say of the GPU; adds the devices of the RPC servers.

    Args:
        args: the parsed command line.

    Raises:
        OptionError: a server that doesn't answer.
    """
    for address in args.rpc or ():
        _core.add_rpc_server(address)
    return GpuOptions(args.vram_budget, args.device, args.reset_gpu_index, args.disable_gpu_index, args.require_split)


def load_options(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """What `Llama` is given for the options of `add_load_arguments` and sparsity, threads and ctx_size.

    Args:
        args: the parsed command line.
        model: path of the model.

    Raises:
        FormatError: not a model.
        OptionError: as gpu_options.
    """
    base, _ = open_files(model, args.plan)
    return {
        "sparsity": args.sparsity,
        "plan": args.plan,
        "strict": args.strict,
        "mapped": args.mapped,
        "use_mlock": args.mlock,
        "n_threads": args.threads,
        "n_threads_batch": args.threads,
        "n_ctx": limit_context(base, args.ctx_size),
        **vars(gpu_options(args)),
    }


# Flags that only one of the two benchmarks has, as attribute names.
_MODEL_FLAGS = (
    "model", "hf_repo", "hf_file", "hf_revision", "synthetic", "work_dir", "plan", "strict", "mapped", "mlock", "modes", "n_prompt", "n_gen", "context",
    "png", "vram_budget", "device", "rpc", "reset_gpu_index", "disable_gpu_index", "require_split",
)  # fmt: skip
_KERNEL_FLAGS = ("sets", "n", "n_rows")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer bench`."""
    o, k = BenchOptions, bench_kernels.KernelOptions
    modes = ", ".join((STOCK, *SPARSITY_MODES))
    densities = ",".join(f"{density * 100:g}" for density in k.densities)
    parser.description = (
        "Speed of the sparsity modes against stock llama.cpp, or with --kernels of each kernel alone. Nothing is reported "
        "when the machine was too noisy: when other processes took more than 10 % of the cores used, when a virtual "
        "machine's host took more than 5 %, or when the ratios to stock spread by more than 20 % (interquartile range / "
        "median)."
    )
    parser.add_argument(
        "model",
        nargs="*",
        help="a GGUF (its sidecar is found beside it), or an extended GGUF; several are measured in turn",
    )
    parser.add_argument(
        "-t",
        "--threads",
        type=counts,
        help="thread counts, e.g. 1,2,4, for prompts too (default: physical cores allowed)",
    )
    parser.add_argument("-r", "--repeats", type=int, help=f"timed runs of each (default: {o.repeats})")
    parser.add_argument("--json", help="write everything measured to this file")
    parser.add_argument("--csv", help="write this file, one line per result")
    parser.add_argument("--allow-noise", action="store_true", help="report a noisy run too, with a warning")
    group = parser.add_argument_group("models")
    hub.add_hub_arguments(group)
    add_load_arguments(group)
    group.add_argument("--modes", type=names, help=f"of {modes} (default: {','.join(o.modes)})")
    group.add_argument("-p", "--n-prompt", type=int, help=f"tokens of the prompt (default: {o.n_prompt})")
    group.add_argument("-n", "--n-gen", type=int, help=f"tokens to decode (default: {o.n_gen})")
    group.add_argument("--context", type=int, help="tokens before the first decoded one (default: those of the prompt)")
    group.add_argument("--png", help="draw this file: speed-up against density, and decode time by part (matplotlib)")
    group.add_argument(
        "--synthetic",
        metavar="PRESET",
        help="make and measure synthetic models of this shape, e.g. 1.2b (see --densities)",
    )
    group.add_argument(
        "--work-dir",
        help="where the synthetic models are kept for the next time (default: a cache folder, which is told)",
    )
    group = parser.add_argument_group("synthetic models and kernels")
    group.add_argument(
        "--densities", type=percents, help=f"per cents, e.g. 2,5,10,20,50 (default: 10; of kernels {densities})"
    )
    group.add_argument("--types", type=names, help="ggml row types (default: q4_0; of kernels all that have some)")
    group = parser.add_argument_group("kernels")
    group.add_argument(
        "--kernels", action="store_true", help="no model: each kernel alone, and the layouts of a feed-forward block"
    )
    group.add_argument("--sets", type=names, help="kernel sets, e.g. avx512,avx2 (default: all that this CPU runs)")
    group.add_argument("--n", type=int, help=f"values per row (default: {k.n})")
    group.add_argument("--n-rows", type=int, help=f"rows per matrix (default: {k.n_rows})")


def run(args: argparse.Namespace) -> int:
    """`powerinfer bench`: measure, print tables, write files.

    Args:
        args: the parsed command line.

    Returns:
        The exit code.

    Raises:
        OptionError: flags that have no effect together, or values out of range.
        NoiseError: the machine was too noisy, and --allow-noise wasn't given.
    """
    for name in ("n_prompt", "n_gen", "repeats", "context", "n", "n_rows"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise OptionError(f"{name}: {value}; expected 1 or more; pass a larger one.")
    for path in (args.json, args.csv, args.png):
        if path and not Path(path).absolute().parent.is_dir():
            raise OptionError(f"{path}: its folder doesn't exist; expected one to write to; make it first.")
    for name in _MODEL_FLAGS if args.kernels else _KERNEL_FLAGS:
        if getattr(args, name):
            rest = "only a model's benchmark has it" if args.kernels else "only --kernels has it"
            raise OptionError(
                f"{name}: it was given {'with' if args.kernels else 'without'} --kernels; {rest}; leave it out."
            )
    if args.kernels:
        given = {
            name: getattr(args, name) for name in ("sets", "types", "n", "n_rows", "densities", "threads", "repeats")
        }
        return bench_kernels.run(replace(bench_kernels.KernelOptions(), **_without_none(given)), args)
    if args.png:
        _tool("plot_bench").check_plot(args.modes or BenchOptions.modes)
    paths = _model_paths(args)
    given = {
        "plan": args.plan,
        "modes": args.modes,
        "n_prompt": args.n_prompt,
        "n_gen": args.n_gen,
        "n_context": args.context,
        "repeats": args.repeats,
        "threads": args.threads,
        "strict": args.strict,
        "mapped": args.mapped,
        "mlock": args.mlock,
        "gpu": gpu_options(args),
    }
    lines: list[Line] = []
    reports = []
    all_reasons = []
    for path in paths:
        options = BenchOptions(path, **_without_none(given))
        measured = measure(options)
        found = summarize(measured, options)
        reasons = noise_reasons(measured, found)
        check_noise([f"{measured.model.name}: {reason}" for reason in reasons], args.allow_noise)
        _print_model(measured, found, options, reasons)
        lines += found
        all_reasons += reasons
        reports.append({"options": options, "measured": measured, "lines": found, "warnings": reasons})
    fits = fit_lines(lines)
    for fit in fits:
        print(_fit_text(fit))
    if args.json:
        write_json(args.json, {"models": reports, "fits": fits})
    if args.csv:
        write_csv(args.csv, lines)
    if args.png:
        _tool("plot_bench").write_plot(args.png, lines, noisy=bool(all_reasons))
    return 0


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _tool(name: str) -> Any:
    """A module of the offline tools."""
    return importlib.import_module(f"powerinfer_py.tools.{name}")


def _model_paths(args: argparse.Namespace) -> list[str]:
    """The models that the command line names, or the synthetic ones that it asks for."""
    if args.synthetic:
        if args.model or args.hf_repo or args.plan:
            raise OptionError("synthetic: a model or a plan was given too; expected one of them; leave the other out.")
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powerinfer" / "synthetic"
        return synthetic_models(
            args.synthetic, args.densities or (0.1,), args.types or ("q4_0",), Path(args.work_dir or default)
        )
    for name in ("densities", "types", "work_dir"):
        if getattr(args, name):
            raise OptionError(
                f"{name}: neither --synthetic nor --kernels was given, which have it; add one, or leave it out."
            )
    if not args.model and not args.hf_repo:
        raise OptionError(
            "model: none was given; expected one or more, --hf-repo, --synthetic or --kernels; pass one of them."
        )
    if args.plan and len(args.model) > 1:
        raise OptionError(
            f"plan: one was given for {len(args.model)} models; expected one model; pass one, or no plan."
        )
    if args.hf_repo or args.hf_file or args.hf_revision:
        return [hub.resolve_model(args)]
    return args.model


def synthetic_models(preset: str, densities: Sequence[float], types: Sequence[str], folder: Path) -> list[str]:
    """Synthetic models of several densities and row types, made where they don't exist yet.

    Args:
        preset: a shape of `powerinfer synthetic`.
        densities: wished shares of active neurons.
        types: ggml row types.
        folder: where they are kept.

    Returns:
        Paths of the base models, type by type; their plans are beside them.

    Raises:
        OptionError: there is no such preset.
    """
    tool = _tool("synthetic_model")
    if preset not in tool.PRESETS:
        raise OptionError(f"synthetic: {preset}; expected one of {', '.join(sorted(tool.PRESETS))}; pass one of them.")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"synthetic models are kept in {folder}; delete them there when you are done", file=sys.stderr)
    paths = []
    for row_type in types:
        for density in densities:
            path = folder / f"{preset}-{row_type}-density-{density * 100:g}.gguf"
            # the plan is written last
            if not path.with_name(path.stem + SIDECAR_SUFFIX).exists():
                print(f"making {path.name}", file=sys.stderr)
                options = replace(tool.PRESETS[preset], row_type=row_type, density=density)
                tool.generate_synthetic(options, path, report=lambda _: None)
            paths.append(str(path))
    return paths


def _print_model(measured: Measured, lines: list[Line], options: BenchOptions, reasons: list[str]) -> None:
    model = measured.model
    probes = {
        n_threads: f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f}) GB/s"
        for n_threads, values in measured.probes_gb_s.items()
    }
    noise = measured.noise
    title = [
        f"{model.name}: {model.shape}, FFN rows {'+'.join(model.row_types)}",
        f"prompt {options.n_prompt}, decode {options.n_gen} tokens of {model.tokens} behind {options.context}; {options.repeats} "
        f"runs, interleaved{'' if model.loaded_together else ', loaded one at a time'}; "
        f"read bandwidth {', '.join(f'{n} threads {text}' for n, text in probes.items())}",
        f"other processes took {noise.other_share:.1%} of {noise.n_cores} cores, the host {noise.steal_share:.1%}, "
        f"in {noise.seconds:.0f} s",
    ]
    if any(max(values) > min(values) * (1 + NOTED_PROBE_RANGE) for values in measured.probes_gb_s.values()):
        title.append(
            "note: the memory changed its speed during the run; ratios are of neighbouring runs, medians mix both"
        )
    title += [f"warning: {reason}" for reason in reasons]
    print_table(
        "\n".join(title) + "\n",
        (
            "mode", "layers", "rows", "kernels", "threads", "prompt tok/s", "x stock", "decode tok/s", "x stock", "limit x",
            "density", "candidate_density", "bytes_share", "recall", "overlap", "MB/token", "GB/s", "of bandwidth", "peak MiB",
        ),
        [
            (
                line.mode,
                line.layers,
                line.row_types,
                line.kernels,
                f"{line.n_threads} (oversubscribed)" if line.oversubscribed else str(line.n_threads),
                f"{line.prompt_tok_s:.1f} ({line.prompt_tok_s_min:.1f}-{line.prompt_tok_s_max:.1f})",
                figure(line.prompt_ratio),
                f"{line.decode_tok_s:.1f} ({line.decode_tok_s_min:.1f}-{line.decode_tok_s_max:.1f})",
                figure(line.decode_ratio),
                figure(line.limit_ratio),
                figure(line.density, 3),
                figure(line.candidate_density, 3),
                figure(line.bytes_share, 3),
                figure(line.recall, 3),
                figure(line.overlap),
                figure(line.bytes_per_token / 1e6, 1),
                figure(line.read_gb_s, 1),
                f"{line.bandwidth_share:.0%}",
                figure(line.peak_anonymous_bytes / 2**20, 0),
            )
            for line in lines
        ],
        5,
    )  # fmt: skip
    print_table(
        "",
        ("ms per decoded token", "threads", "all", "predictor", "gate", "up and down", "rest of FFN", "outside of FFN"),
        [
            (
                line.mode,
                str(line.n_threads),
                figure(line.token_ms),
                *(
                    figure(None if line.mode == STOCK else value)
                    for value in (
                        line.predictor_ms, line.gate_ms, line.up_down_ms, line.ffn_rest_ms, line.outside_ms
                    )
                ),
            )
            for line in lines
        ],
        2,
    )  # fmt: skip
    print()


def _fit_text(fit: Fit) -> str:
    return (
        f"{fit.shape}, {fit.row_types}: {fit.mode}, {fit.n_threads} threads: {fit.base_ms:.2f} ms per token + "
        f"{fit.ms_per_percent:.3f} ms per % of density, least squares over {fit.n_points} models; "
        f"worst deviation {fit.worst_deviation:.1%}, at density {fit.worst_density:.3f}"
    )


def _ratio(values: Sequence[float], references: Sequence[float]) -> float:
    """Median of the ratios of values measured one after the other."""
    return statistics.median(value / reference for value, reference in zip(values, references))


def _time_prompt(model: Any, tokens: list[int]) -> float:
    """Seconds to evaluate the tokens from an empty context, in batches."""
    model._ctx.kv_cache_clear()
    start = time.perf_counter()
    for i in range(0, len(tokens), model.n_batch):
        _decode(model, tokens[i : i + model.n_batch], i)
    llama_cpp.llama_synchronize(model.ctx)
    return time.perf_counter() - start


def _time_decode(model: Any, tokens: list[int], n_past: int) -> float:
    """Seconds to evaluate the tokens one by one behind n_past others."""
    start = time.perf_counter()
    for i, token in enumerate(tokens):
        _decode(model, [token], n_past + i)
    llama_cpp.llama_synchronize(model.ctx)
    return time.perf_counter() - start


def _decode(model: Any, tokens: list[int], n_past: int) -> None:
    # Below Llama.eval, which copies logits.
    model._batch.set_batch(tokens, n_past, logits_all=False)
    model._ctx.decode(model._batch)


def _make_tokens(model: Any, n: int) -> tuple[list[int], str]:
    """Tokens (n) to run, and what they are: text, or random ones for a model without a vocabulary."""
    if llama_cpp.llama_vocab_type(model._model.vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        return np.random.default_rng(0).integers(0, model.n_vocab(), n).tolist(), "random"
    tokens = model.tokenize(TEXT.encode("utf-8"))
    return (tokens * (n // len(tokens) + 1))[:n], "text"


def _shape(metadata: dict[str, str]) -> str:
    architecture = metadata.get("general.architecture", "?")

    def of(key: str) -> str:
        return metadata.get(f"{architecture}.{key}", "?")

    n_layer, n_embd, n_ff = of("block_count"), of("embedding_length"), of("feed_forward_length")
    return f"{architecture}, {n_layer} layers, n_embd {n_embd}, n_ff {n_ff}"


def _check_has_plan(llama: Llama) -> None:
    if llama.stats().computed_by == "upstream":
        raise PlanError(
            f"{llama.model_path}: it has no plan; expected one to measure; make one with powerinfer profile."
        )


def _stock_path(base: BaseModel) -> str:
    """Where stock llama.cpp opens a base model.

    Raises:
        PlanError: nowhere, it is inside the extended GGUF.
    """
    if base.files[0].offset:
        raise PlanError(
            f"{base.path}: the base model is inside it, where stock llama.cpp can't open it; "
            "expected a sidecar beside its base; compare there, or leave stock out."
        )
    return str(base.path)


def _weight_bytes(base: BaseModel) -> int:
    """Weights that a dense decode reads per token: all but the tables of which it reads one row."""
    tables = {"position_embd.weight"} | ({"token_embd.weight"} if "output.weight" in base.tensors else set())
    return sum(base.tensor(name).n_bytes for name in base.tensors if name not in tables)


def _ffn_bytes(base: BaseModel, plan: Plan | None) -> int:
    """Bytes that the layers of a plan have in the base."""
    layers = plan.layers if plan else ()
    return sum(t.n_bytes for i, layer in enumerate(layers) if layer.n_ff for t in base.ffn(i).values())


def _row_types(base: BaseModel) -> tuple[str, ...]:
    """Row types of the base's dense feed-forward matrices, as ggml names them."""
    found = {tensor.type_name for i in range(base.n_layer) for tensor in base.ffn(i).values()}
    return tuple(sorted(found))


def _recall(plan: Plan | None) -> float | None:
    """Mean of the recalls that were measured for the predictors."""
    recalls = [layer.predictor_recall for layer in plan.layers if layer.predictor_recall] if plan else []
    return statistics.mean(recalls) if recalls else None
