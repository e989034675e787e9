"""`powerinfer bench`: speed of the sparsity modes against stock llama.cpp, in one process, interleaved A B A B.

Decoding is timed on given tokens (no sampling), both thread counts are equal, figures are medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np

from powerinfer_py import _core
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.format import BaseModel, Plan, atomic_path, find_sidecar, is_extended, read_plan
from powerinfer_py.llama import SPARSITY_MODES, Llama, Stats, stock_llama

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

_FFN_FIGURES = ("density", "candidate_density", "bytes_share", "overlap")


@dataclass(frozen=True)
class BenchOptions:
    """Options of a benchmark, with their defaults."""

    model: str
    plan: str | None = None
    modes: tuple[str, ...] = (STOCK, "auto")
    n_prompt: int = 128  # tokens
    n_gen: int = 64  # tokens
    repeats: int = 5
    n_threads: int | None = None  # None: physical cores allowed
    strict: bool = False
    mapped: bool = False
    mlock: bool = False


@dataclass(frozen=True)
class Sample:
    """One timed run of one mode."""

    mode: str
    i_repeat: int
    prompt_tok_s: float
    decode_tok_s: float
    stats: Stats | None  # of the decoded tokens; None for stock


@dataclass(frozen=True)
class Model:
    """What is measured, and on what."""

    name: str
    shape: str
    tokens: str  # "text" or "random"
    n_threads: int
    recall: float | None  # mean over the plan's predictors, measured on held-out text
    weight_bytes: int  # weights of the base that a dense decode of one token reads
    ffn_bytes: int  # those of them that the plan covers
    bandwidth_gb_s: float  # measured by read_bandwidth
    loaded_together: bool


@dataclass(frozen=True)
class Line:
    """One mode's result: medians, spread as (min, max), and the median of the pairwise ratios to stock."""

    mode: str
    prompt_tok_s: float
    prompt_spread: tuple[float, float]
    decode_tok_s: float
    decode_spread: tuple[float, float]
    prompt_ratio: float | None
    decode_ratio: float | None
    bytes_per_token: float  # weights read per decoded token
    gb_s: float
    bandwidth_share: float  # gb_s / measured bandwidth
    stats: Stats | None


class _Models:
    """The models under test: stock and ours, kept loaded together when memory allows."""

    def __init__(self, options: BenchOptions, base: BaseModel) -> None:
        self._options = options
        self._base = base
        self._loaded: dict[bool, Any] = {}
        n_bytes = sum(file.size for file in base.files)
        self.together = n_bytes * 2.2 < _available_memory_bytes()

    def get(self, mode: str) -> Any:
        """The model that runs a mode, set to it."""
        is_stock = mode == STOCK
        if is_stock not in self._loaded:
            if not self.together:
                self.close()
            self._loaded[is_stock] = self._load(mode)
        model = self._loaded[is_stock]
        if not is_stock and model.sparsity != mode:
            model.sparsity = mode
        return model

    def _load(self, mode: str) -> Any:
        o = self._options
        n_threads = o.n_threads or _core.physical_cores()
        common = {
            "n_ctx": o.n_prompt + o.n_gen + 8,
            "n_batch": 512,
            "n_threads": n_threads,
            "n_threads_batch": n_threads,
            "use_mlock": o.mlock,
            "verbose": False,
        }
        if mode == STOCK:
            return stock_llama(_stock_path(self._base), **common)
        model = Llama(o.model, sparsity=mode, plan=o.plan, strict=o.strict, mapped=o.mapped, **common)
        _check_has_plan(model)
        return model

    def close(self) -> None:
        for model in self._loaded.values():
            model.close()
        self._loaded.clear()


def measure(options: BenchOptions) -> Iterator[Model | Sample]:
    """Run the benchmark.

    Args:
        options: what to measure.

    Yields:
        The Model, then a Sample per repeat and mode, in the order in which they were run.

    Raises:
        OptionError: a mode doesn't exist.
        PlanError: the model has no plan.
    """
    for mode in options.modes:
        if mode not in (STOCK, *SPARSITY_MODES):
            raise OptionError(f"modes: {mode!r}; expected {STOCK}, {', '.join(SPARSITY_MODES)}; pass some of them.")
    base, plan = open_files(options.model, options.plan)
    models = _Models(options, base)
    try:
        first = models.get(options.modes[0])
        tokens, tokens_are = _make_tokens(first, options.n_prompt + options.n_gen)
        n_threads = options.n_threads or _core.physical_cores()
        yield Model(
            name=os.path.basename(options.model),
            shape=_shape(first.metadata),
            tokens=tokens_are,
            n_threads=n_threads,
            recall=_recall(plan),
            weight_bytes=_weight_bytes(base),
            ffn_bytes=_ffn_bytes(base, plan),
            bandwidth_gb_s=read_bandwidth(n_threads) / 1e9,
            loaded_together=models.together,
        )
        for i_repeat in range(-1, options.repeats):
            for mode in options.modes:
                model = models.get(mode)
                prompt_s = _time_prompt(model, tokens[: options.n_prompt])
                if mode != STOCK:
                    model.reset_stats()
                decode_s = _time_decode(model, tokens[options.n_prompt :], options.n_prompt)
                if i_repeat < 0:
                    continue  # the first round warms up
                yield Sample(
                    mode=mode,
                    i_repeat=i_repeat,
                    prompt_tok_s=options.n_prompt / prompt_s,
                    decode_tok_s=options.n_gen / decode_s,
                    stats=None if mode == STOCK else model.stats(),
                )
    finally:
        models.close()


def summarize(model: Model, samples: Sequence[Sample], n_gen: int) -> list[Line]:
    """Medians, spreads and ratios of a benchmark.

    Args:
        model: what was measured.
        samples: all samples of measure.
        n_gen: tokens that each sample decoded.

    Returns:
        One line per mode, in the order of the samples.
    """
    by_mode: dict[str, list[Sample]] = {}
    for sample in samples:
        by_mode.setdefault(sample.mode, []).append(sample)
    stock = by_mode.get(STOCK)
    lines = []
    for mode, runs in by_mode.items():
        decode = statistics.median(run.decode_tok_s for run in runs)
        prompt = statistics.median(run.prompt_tok_s for run in runs)
        stats = runs[-1].stats
        bytes_per_token = float(model.weight_bytes)
        if stats is not None:
            bytes_per_token += stats.read_bytes / n_gen - model.ffn_bytes
        gb_s = bytes_per_token * decode / 1e9
        lines.append(
            Line(
                mode=mode,
                prompt_tok_s=prompt,
                prompt_spread=_spread([run.prompt_tok_s for run in runs]),
                decode_tok_s=decode,
                decode_spread=_spread([run.decode_tok_s for run in runs]),
                prompt_ratio=_ratio([r.prompt_tok_s for r in runs], [r.prompt_tok_s for r in stock]) if stock else None,
                decode_ratio=_ratio([r.decode_tok_s for r in runs], [r.decode_tok_s for r in stock]) if stock else None,
                bytes_per_token=bytes_per_token,
                gb_s=gb_s,
                bandwidth_share=gb_s / model.bandwidth_gb_s,
                stats=stats,
            )
        )
    return lines


def compare_with_stock(llama: Llama, tokens: list[int], n_gen: int, repeats: int) -> str:
    """Time decoding with a loaded model and with stock llama.cpp on the same file, interleaved.

    Args:
        llama: the model.
        tokens: (n) a text; its last tokens are decoded one by one.
        n_gen: how many of them.
        repeats: timed runs per engine.

    Returns:
        One line: medians of both, and the median of the pairwise ratios.

    Raises:
        PlanError: the model has no plan, or its base is inside the extended GGUF, where stock llama.cpp can't open it.
    """
    _check_has_plan(llama)
    n_gen = max(1, min(n_gen, len(tokens) - 1))
    prompt, decoded = tokens[:-n_gen], tokens[-n_gen:]
    with_stock = stock_llama(
        _stock_path(open_files(llama.model_path, None)[0]),
        n_ctx=llama.n_ctx(),
        n_threads=llama.n_threads,
        n_threads_batch=llama.n_threads,
        verbose=False,
    )
    speeds: dict[str, list[float]] = {"sparse": [], STOCK: []}
    try:
        for i_repeat in range(-1, repeats):
            for name, model in (("sparse", llama), (STOCK, with_stock)):
                _time_prompt(model, prompt)
                seconds = _time_decode(model, decoded, len(prompt))
                if i_repeat >= 0:
                    speeds[name].append(n_gen / seconds)
    finally:
        with_stock.close()
        llama.reset()
    sparse, stock = statistics.median(speeds["sparse"]), statistics.median(speeds[STOCK])
    ratio = _ratio(speeds["sparse"], speeds[STOCK])
    return (
        f"sparse {sparse:.2f} tokens/s, stock {stock:.2f} tokens/s, ratio {ratio:.2f} "
        f"(decode, medians of {repeats} runs of {n_gen} tokens, interleaved, {llama.n_threads} threads)"
    )


def read_bandwidth(n_threads: int) -> float:
    """Measure how fast memory can be read: the best of five passes over up to 1 GiB.

    Args:
        n_threads: threads that read, each its own part.

    Returns:
        Bytes per second.
    """
    n_bytes = min(2**30, _available_memory_bytes() // 4) // n_threads
    parts = [np.ones(n_bytes // 8, np.int64) for _ in range(n_threads)]
    best_s = float("inf")
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            best_s = min(best_s, time.perf_counter() - start)
    return sum(part.nbytes for part in parts) / best_s


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which model is loaded, and how."""
    parser.add_argument("model", help="a GGUF (its sidecar is found beside it), or an extended GGUF")
    parser.add_argument("--plan", help="the extended GGUF to use, when it isn't beside the model")
    parser.add_argument("--strict", action="store_true", help="a fallback is an error instead of a note")
    parser.add_argument("--mapped", action="store_true", help="FFN rows stay in the mapped file instead of a copy")
    parser.add_argument("--mlock", action="store_true", help="keep the weights in memory")
    parser.add_argument("-t", "--threads", type=int, help="threads, for prompts too (default: physical cores allowed)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer bench`."""
    default = BenchOptions
    modes = ", ".join((STOCK, *SPARSITY_MODES))
    add_model_arguments(parser)
    parser.add_argument("--modes", default=",".join(default.modes), help=f"of {modes} (default: %(default)s)")
    parser.add_argument("-p", "--n-prompt", type=int, default=default.n_prompt, help="tokens (default: %(default)s)")
    parser.add_argument("-n", "--n-gen", type=int, default=default.n_gen, help="tokens (default: %(default)s)")
    parser.add_argument("-r", "--repeats", type=int, default=default.repeats, help="runs (default: %(default)s)")
    parser.add_argument("--json", help="write everything measured to this file")


def run(args: argparse.Namespace) -> int:
    """`powerinfer bench`: measure, print a table, write JSON.

    Args:
        args: the parsed command line.

    Returns:
        The exit code.
    """
    for name in ("n_prompt", "n_gen", "repeats"):
        if getattr(args, name) < 1:
            raise OptionError(f"{name}: {getattr(args, name)}; expected 1 or more; pass a larger one.")
    options = BenchOptions(
        model=args.model,
        plan=args.plan,
        modes=tuple(args.modes.split(",")),
        n_prompt=args.n_prompt,
        n_gen=args.n_gen,
        repeats=args.repeats,
        n_threads=args.threads,
        strict=args.strict,
        mapped=args.mapped,
        mlock=args.mlock,
    )
    results = measure(options)
    model = next(results)
    samples = list(results)
    lines = summarize(model, samples, options.n_gen)
    _print_table(model, lines, options)
    if args.json:
        report = {
            "model": dataclasses.asdict(model),
            "options": dataclasses.asdict(options),
            "lines": [dataclasses.asdict(line) for line in lines],
            "samples": [dataclasses.asdict(sample) for sample in samples],
        }
        with atomic_path(args.json) as temporary:
            temporary.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def _print_table(model: Model, lines: list[Line], options: BenchOptions) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if os.isatty(1) else 160, highlight=False)
    sparse = next((line.stats for line in lines if line.stats is not None), None)
    console.print(f"{model.name}: {model.shape}")
    if sparse is not None:
        memory = f"{sparse.memory_bytes / 2**20:.0f} MiB"
        console.print(f"FFN rows {', '.join(sparse.row_types)}; kernels {sparse.kernels}; {memory}")
    console.print(
        f"{model.n_threads} threads; prompt {options.n_prompt}, decode {options.n_gen} tokens of {model.tokens}; "
        f"{options.repeats} runs, interleaved{'' if model.loaded_together else ', loaded one at a time'}; "
        f"read probe {model.bandwidth_gb_s:.1f} GB/s{f'; recall {model.recall:.3f}' if model.recall else ''}"
    )
    table = Table(box=None, pad_edge=False)
    speeds = ("prompt tok/s", "x stock", "decode tok/s", "x stock")
    for name in ("mode", "layers", *speeds, *_FFN_FIGURES, "MB/token", "GB/s", "of probe"):
        table.add_column(name.replace("_", " "), justify="left" if name in ("mode", "layers") else "right")
    for line in lines:
        table.add_row(
            line.mode,
            "-" if line.stats is None else ", ".join(f"{mode} x {n}" for mode, n in line.stats.modes),
            _with_spread(line.prompt_tok_s, line.prompt_spread),
            _figure(line.prompt_ratio),
            _with_spread(line.decode_tok_s, line.decode_spread),
            _figure(line.decode_ratio),
            *(_figure(None if line.stats is None else getattr(line.stats, name), 3) for name in _FFN_FIGURES),
            f"{line.bytes_per_token / 1e6:.1f}",
            f"{line.gb_s:.1f}",
            f"{line.bandwidth_share:.0%}",
        )
    console.print(table)


def _figure(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _with_spread(median: float, spread: tuple[float, float]) -> str:
    return f"{median:.1f} ({spread[0]:.1f}-{spread[1]:.1f})"


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


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


def open_files(model: str, plan: str | None) -> tuple[BaseModel, Plan | None]:
    """The base model and the plan that belong to a model path."""
    if is_extended(model):
        found = read_plan(model)
        return found.open_base(), found
    path = plan or find_sidecar(model)
    return BaseModel(model), None if path is None else read_plan(path)


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


def _recall(plan: Plan | None) -> float | None:
    """Mean of the recalls that were measured for the predictors."""
    recalls = [layer.predictor_recall for layer in plan.layers if layer.predictor_recall] if plan else []
    return statistics.mean(recalls) if recalls else None


def _available_memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) * 1024
