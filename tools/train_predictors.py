"""`powerinfer train`: predictors of active neurons for a model and its plan, as large per layer as saves time.

Text is shared out once, by --seed: what predictors are fitted to, what chooses sizes and thresholds, what measures them.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer_py import _core
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.format import (
    SIDECAR_SUFFIX,
    BaseModel,
    Plan,
    atomic_path,
    find_sidecar,
    is_extended,
    write_plan,
)

from . import arguments, mlp_predictor, plot_profile, plot_training
from .active_sets import check_has_inactive
from .capture_activations import MIN_WINDOWS, Shards, capture_inputs, choose_sample, write_active
from .predictor_cost import (
    LayerCost,
    Rates,
    SizeCurve,
    best_saving,
    measure_rates,
    read_rates,
    share_budget,
    write_rates,
)
from .ray_tasks import Cluster, FileStamp, add_ray_arguments, check_ray, on_same_files
from .row_types import plan_rows, row_bytes
from .terminal import Steps, note_once, progress_steps
from .text_runner import Runner, text_windows
from .thresholds import CALIBRATED_ACTIVATIONS
from .train_layer import LayerResult, LayerTask, kept_curve, kept_result, predictor_rows, search_layer, train_layer

# PowerInfer, SOSP'24: share of the model's parameters, accuracy, share of run time (5.1, table 6, 8.5).
PAPER_PARAMETERS, PAPER_ACCURACY, PAPER_TIME = 0.0709, 0.95, 0.10
# No layer gets more than so many times its even share of --max-parameters.
_MOST_OF_BUDGET = 3.0
_MAX_CHECKED_WINDOWS = 8
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training, with their defaults."""

    model: Path  # a GGUF with its plan beside it, or a plan
    text: tuple[Path, ...]
    out: Path
    base: Path | None = None  # None: where the plan says
    kind: str = "auto"  # auto: mlp where torch is there and it is better, else linear
    recall: float = 0.97
    max_parameters: float | None = None  # share of the model's; None: what saves time
    layers: tuple[int, ...] | None = None  # None: all
    max_bytes: int = 2 << 30  # of the shards
    tokens: int = 65536  # at most
    ctx: int = 512  # tokens per window
    threads: int | None = None  # None: physical cores allowed
    jobs: int | None = None  # None: the same
    device: str = "auto"
    row_type: str = "auto"
    epochs: int = 8  # at most, of an mlp
    max_seconds: float = 300.0  # per layer, of an mlp
    seed: int = 0
    special: bool = False  # the text holds special tokens
    rates: Path | None = None  # None: measured
    resume: bool = False
    keep: bool = False  # the shards, for another --resume
    strict: bool = False
    mapped: bool = False
    ray: str | None = None  # address of a Ray cluster, or `local`: a Ray on this machine; None: without Ray
    verbose: bool = False  # Ray's own messages

    @property
    def folder(self) -> Path:
        """Where shards and finished layers are kept."""
        return self.out.with_name(self.out.name.removesuffix(SIDECAR_SUFFIX) + ".train")


@dataclass(frozen=True)
class Check:
    """What the core does with the new plan, on text that nothing was chosen by.

    Attributes:
        n_tokens: of the text.
        without: the mode that it is compared with: exact, threshold.
        perplexity, predicted_perplexity: without and with predictors.
        recall: active neurons with / without predictors.
        candidate_density: gate rows used / n_ff.
        token_us, predicted_token_us: decoding time, FFNs and all else.
        predictor_share: predictors' part of predicted_token_us.
    """

    n_tokens: int
    without: str
    perplexity: float
    predicted_perplexity: float
    recall: float
    candidate_density: float
    token_us: float
    predicted_token_us: float
    predictor_share: float

    @property
    def loss(self) -> float:
        """Relative increase of perplexity."""
        return self.predicted_perplexity / self.perplexity - 1.0


@dataclass(frozen=True)
class Training:
    """A finished training.

    Attributes:
        plan: as written.
        layers: what was made for each layer that was asked for.
        rates: that decided.
        n_parameters: of the model, without predictors.
        corpus: what the text was.
        check: None when no layer got a predictor.
    """

    plan: Plan
    layers: list[LayerResult]
    rates: Rates
    n_parameters: int
    corpus: str
    check: Check | None

    def totals(self) -> dict[str, float]:
        """Figures of all layers, weighted by neurons."""
        made = [layer for layer in self.layers if layer.kind != "none"]
        weights = [layer.n_ff for layer in made]

        def mean(name: str) -> float:
            return float(np.average([getattr(layer, name) for layer in made], weights=weights)) if made else 0.0

        return {
            "layers": len(made),
            "parameters_share": sum(layer.n_parameters for layer in made) / self.n_parameters,
            "bytes": sum(layer.n_bytes for layer in made),
            "saving_us": sum(layer.saving_us for layer in made),
            **{name: mean(name) for name in ("recall", "candidate_density", "density", "accuracy")},
        }


# ---- The whole -----------------------------------------------------------------------------------------------------


def plan_to_train(options: TrainOptions) -> tuple[Plan, BaseModel]:
    """The plan to train for, and its base.

    Args:
        options: name a model or a plan.

    Returns:
        Both.

    Raises:
        FormatError: a file can't be used.
        PlanError: there is no plan, it isn't the model's, or it doesn't say what is inactive.
        OptionError: layers that can't be trained.
    """
    plan, base = arguments.open_plan(options.model, options.base)
    check_has_inactive(plan)
    for i in options.layers or ():
        if not 0 <= i < plan.n_layer or not plan.layers[i].n_ff:
            covered = ", ".join(str(k) for k, layer in enumerate(plan.layers) if layer.n_ff)
            raise OptionError(f"layers: {i}; expected some of those that the plan covers: {covered}.")
    chosen = chosen_layers(plan, options)
    kept = [i for i, layer in enumerate(plan.layers) if i not in chosen and layer.predictor != "none"]
    if plan.predictor_input == "residual" and kept:
        raise OptionError(
            f"layers: layer {kept[0]} keeps a predictor that reads the residual stream, and new ones read the FFN input; "
            "expected one kind in a plan; leave --layers out."
        )
    return plan, base


def chosen_layers(plan: Plan, options: TrainOptions) -> list[int]:
    """Layers to train, ascending."""
    return [i for i, layer in enumerate(plan.layers) if layer.n_ff and (not options.layers or i in options.layers)]


def make_training(options: TrainOptions, steps: Steps, note: Callable[[str], None]) -> Training:
    """Captures, trains, and writes the plan.

    Args:
        options: what to do.
        steps: `steps(what, n)` is a context that gives a function to call n times.
        note: receives every note once.

    Returns:
        The training. When it is stopped by Ctrl-C, shards and finished layers stay in the folder beside the output.

    Raises:
        FormatError: a file can't be used.
        PlanError: the model or the plan can't, or the shards belong to another run.
        OptionError: an option can't be used, or torch is missing.
    """
    options = _with_kind(options, note)
    plan, base = plan_to_train(options)
    layers = chosen_layers(plan, options)
    n_threads = options.threads or _core.physical_cores()
    without = "threshold" if plan.activation in CALIBRATED_ACTIVATIONS else "exact"
    try:
        with Runner(
            plan.path,
            None if plan.is_embedded else base.path,
            n_ctx=options.ctx,
            n_threads=n_threads,
            sparsity="dense" if without == "threshold" else "exact",
            strict=options.strict,
            mapped=options.mapped,
            note=note,
        ) as runner:
            kernels = runner.plan.kernels
            windows, corpus = text_windows(
                runner, options.text, options.tokens, n_needed=MIN_WINDOWS, special=options.special, note=note
            )
            shards = _open_shards(options, plan, layers, windows, note)
            capture_inputs(runner, windows, shards, steps)
        write_active(shards, base, plan, steps)
        rates = _rates(options, plan, base, layers, kernels, n_threads, note)
        tasks = _tasks(options, plan, base, layers, shards, rates)
        with _worker(options, tasks, base, note) as work:
            results = _train(options, tasks, base, work, steps)
    except KeyboardInterrupt:
        note(f"stopped; what was done is kept in {options.folder}; the same command with --resume goes on.")
        raise
    new = _new_plan(plan, tasks, results)
    write_plan(new, options.out, base_embedded=base if plan.is_embedded else None)
    check = None
    if any(result.kind != "none" for result in results):
        numbers = shards.sample.windows("measure")[:_MAX_CHECKED_WINDOWS]
        with Runner(
            options.out,
            None if plan.is_embedded else base.path,
            n_ctx=options.ctx,
            n_threads=n_threads,
            sparsity=without,
            mapped=options.mapped,
            note=lambda text: None,  # layers without a predictor are in the report
        ) as runner:
            made = [result.i_layer for result in results if result.kind != "none"]
            check = _check(runner, windows[numbers], made, without, steps)
    if not options.keep:
        shutil.rmtree(options.folder)
    return Training(new, results, rates, _n_parameters(base), corpus, check)


def _with_kind(options: TrainOptions, note: Callable[[str], None]) -> TrainOptions:
    """The options with a kind and device that can be had here."""
    device = mlp_predictor.find_device(options.device)
    kind = options.kind
    if kind != "linear":
        try:
            mlp_predictor.check_torch()
        except OptionError:
            if kind == "mlp" or options.strict:
                raise
            note(
                "torch isn't installed: only linear predictors are made; pip install 'powerinfer_py[train]' for mlp too."
            )
            kind = "linear"
    return replace(options, kind=kind, device=device)


def _open_shards(
    options: TrainOptions, plan: Plan, layers: Sequence[int], windows: np.ndarray, note: Callable[[str], None]
) -> Shards:
    """New shards, or those of a stopped run."""
    n_ff = {i: plan.layers[i].n_ff for i in layers}
    token_bytes = Shards.token_bytes(plan.n_embd, list(n_ff.values()))
    sample = choose_sample(len(windows), options.ctx, token_bytes, options.max_bytes, options.seed)
    if sample.n_tokens < windows.size:
        note(
            f"{sample.n_tokens} of {windows.size} tokens fit into --bytes ({token_bytes} bytes each); "
            f"{sample.n_kept} of each window are kept."
        )
    shards = Shards(options.folder, _identity(options, plan, layers, windows), sample, plan.n_embd, n_ff)
    exists = shards.state_path.exists()
    if options.resume and exists:
        shards.load()
        return shards
    if options.resume:
        note(f"{options.folder}: there is nothing to resume; starting at the beginning.")
    elif exists:
        note(f"{options.folder}: what a stopped run left is replaced; --resume would have gone on with it.")
    if options.folder.exists():
        if not exists and any(options.folder.iterdir()):
            raise OptionError(
                f"out: {options.folder} holds other files; expected none there; move them, or pass another -o."
            )
        shutil.rmtree(options.folder)
    shards.create()
    return shards


def _identity(options: TrainOptions, plan: Plan, layers: Sequence[int], windows: np.ndarray) -> dict[str, Any]:
    """What shards must agree with to be of use."""

    def digest(*data: bytes) -> str:
        return hashlib.sha256(b"".join(data)).hexdigest()[:16]

    orders = [layer.neuron_order for layer in plan.layers if layer.neuron_order is not None]
    limits = [[layer.threshold, layer.product_threshold, layer.activation_param] for layer in plan.layers]
    return {
        "model": digest("".join(layer.digest for layer in plan.layers).encode()),
        "order": digest(*(order.tobytes() for order in orders)),
        "thresholds": digest(np.array(limits).tobytes()),
        "activation": plan.activation,
        "text": digest(windows.tobytes()),
        "ctx": options.ctx,
        "seed": options.seed,
        "layers": list(layers),
        "bytes": options.max_bytes,
    }


def _rates(
    options: TrainOptions,
    plan: Plan,
    base: BaseModel,
    layers: Sequence[int],
    kernels: str,
    n_threads: int,
    note: Callable[[str], None],
) -> Rates:
    """Given, kept by a stopped run, or measured now."""
    gate = base.ffn(layers[0])["gate" if plan.gated else "up"]
    if options.rates is not None:
        return read_rates(options.rates, gate.type_name)
    path = options.folder / "rates.json"
    if path.exists():
        return read_rates(path, gate.type_name)
    ffn_bytes = sum(t.n_bytes for i in range(plan.n_layer) for t in base.ffn(i).values())
    rates = measure_rates(gate.type_name, plan.n_embd, plan.layers[layers[0]].n_ff, ffn_bytes, kernels, n_threads, note)
    write_rates(rates, path)
    return rates


def _tasks(
    options: TrainOptions, plan: Plan, base: BaseModel, layers: Sequence[int], shards: Shards, rates: Rates
) -> list[LayerTask]:
    most = None
    if options.max_parameters is not None:
        most = _MOST_OF_BUDGET * options.max_parameters * _n_parameters(base) / len(layers)
    gate = base.ffn(layers[0])["gate" if plan.gated else "up"]
    return [
        LayerTask(
            plan=plan.path,
            base=None if plan.is_embedded else base.path,
            shards=shards,
            i_layer=i,
            cost=LayerCost(rates, plan.n_embd, plan.layers[i].n_ff, row_bytes(plan.n_embd, gate.type_name)),
            kind=options.kind,
            recall=options.recall,
            row_type=options.row_type,
            device=options.device,
            epochs=options.epochs,
            max_seconds=options.max_seconds,
            seed=options.seed,
            most_parameters=most,
        )
        for i in layers
    ]


def _n_parameters(base: BaseModel) -> int:
    return sum(math.prod(base.tensor(name).ne) for name in base.tensors)


# (function of a layer's task, its arguments by number) -> (number, result) as they come
Work = Callable[[Callable[..., Any], dict[int, tuple[Any, ...]]], Iterator[tuple[int, Any]]]


@contextmanager
def _worker(
    options: TrainOptions, tasks: Sequence[LayerTask], base: BaseModel, note: Callable[[str], None]
) -> Iterator[Work]:
    """What works on layers: processes here, or Ray."""
    if options.ray is None:
        n_jobs = min(options.jobs or _core.physical_cores(), len(tasks))
        yield functools.partial(_in_parallel, n_jobs)
        return
    model = [FileStamp.of(file.path) for file in base.files] + [FileStamp.of(tasks[0].plan)]
    n_gpus = 1 if options.device == "cuda" else 0
    with Cluster(options.ray, 1, note, verbose=options.verbose) as cluster:

        def work(function: Callable[..., Any], arguments: dict[int, tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
            values = []
            for task, *rest in arguments.values():
                stamps = [*model, *(FileStamp.of(path) for path in task.input_paths)]
                values.append((stamps, function, task, *rest))
            started = cluster.start(on_same_files, values, n_gpus if function is train_layer else 0)
            return cluster.finished(dict(zip(arguments, started)))

        yield work


def _train(
    options: TrainOptions, tasks: Sequence[LayerTask], base: BaseModel, work: Work, steps: Steps
) -> list[LayerResult]:
    """Sizes of all layers, then their predictors."""
    curves: list[SizeCurve | None] = [kept_curve(task) for task in tasks]
    missing = [i for i, curve in enumerate(curves) if curve is None]
    with steps("sizes", len(missing)) as step:
        for i, curve in work(search_layer, {i: (tasks[i],) for i in missing}):
            curves[i] = curve
            step()
    ranks, reasons = _choose_ranks(options, tasks, curves, base)
    results: list[LayerResult | None] = []
    for task, curve, rank, reason in zip(tasks, curves, ranks, reasons):
        none = LayerResult(task.i_layer, task.cost.n_ff, curve.density, reason=reason)
        results.append(kept_result(task, rank) if rank else none)
    missing = [i for i, result in enumerate(results) if result is None]
    with steps("predictors", len(missing)) as step:
        for i, result in work(train_layer, {i: (tasks[i], ranks[i]) for i in missing}):
            results[i] = result
            step()
    return results


def _choose_ranks(
    options: TrainOptions, tasks: Sequence[LayerTask], curves: Sequence[SizeCurve], base: BaseModel
) -> tuple[list[int], list[str]]:
    """A rank per layer, 0 for none, and the reason for that."""
    if options.max_parameters is not None:
        budget = options.max_parameters * _n_parameters(base)
        ranks = share_budget(curves, [task.cost for task in tasks], budget)
        return ranks, [f"none of its sizes fits into {options.max_parameters:.2%} of the parameters"] * len(ranks)
    ranks, reasons = [], []
    for task, curve in zip(tasks, curves):
        rank, saving = best_saving(curve, task.cost, task.searched_type)
        ranks.append(rank if saving > 0 else 0)
        if curve.density == 0:
            reasons.append("no neuron was active")
        elif not rank:
            reasons.append(f"reading the gate takes {task.cost.gate_us:.1f} us, less than any predictor")
        else:
            reasons.append(f"the best, rank {rank}, would cost {-saving:.1f} us per token more than it saves")
    return ranks, reasons


def _in_parallel(
    n_jobs: int, work: Callable[..., Any], arguments: dict[int, tuple[Any, ...]]
) -> Iterator[tuple[int, Any]]:
    """Calls work(*arguments[key]) in processes of one thread each; yields (key, result) as they come.

    One job runs in this process. When the caller stops, so do the processes.
    """
    if n_jobs == 1 or len(arguments) < 2:
        for key, values in arguments.items():
            yield key, work(*values)
        return
    before = set(multiprocessing.active_children())
    with _one_thread_each():
        pool = ProcessPoolExecutor(n_jobs, multiprocessing.get_context("spawn"), _ignore_interrupt)
        keys = {pool.submit(work, *values): key for key, values in arguments.items()}
    try:
        for future in as_completed(keys):
            yield keys[future], future.result()
        pool.shutdown()
    except BrokenProcessPool:
        raise PlanError(
            "train: a worker process ended unexpectedly; expected it to finish its layer; "
            "if memory was short, pass fewer --jobs or --tokens, and --resume; "
            "a script of your own needs `if __name__ == '__main__':`."
        ) from None
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        pool.shutdown(cancel_futures=True)  # waits for the pool's own thread, the only one that joins its processes


def _ignore_interrupt() -> None:
    """Ctrl-C reaches every process of a terminal; the first one decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started meanwhile use one thread for matrix products."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _new_plan(plan: Plan, tasks: Sequence[LayerTask], results: Sequence[LayerResult]) -> Plan:
    """The plan with the predictors that were made, in place of those it had in these layers."""
    layers = list(plan.layers)
    for task, result in zip(tasks, results):
        fields_of: dict[str, Any] = {"fc1": None, "fc2": None}
        if result.kind != "none":
            fc1, fc2 = predictor_rows(task)
            fields_of["fc1"] = plan_rows(fc1, result.row_type, plan.n_embd)
            fields_of["fc2"] = plan_rows(fc2, result.row_type, result.rank)
        layers[task.i_layer] = replace(
            layers[task.i_layer],
            predictor=result.kind,
            predictor_threshold=result.threshold,
            predictor_recall=result.recall if result.kind != "none" else 0.0,
            predictor_candidate_density=result.candidate_density if result.kind != "none" else 0.0,
            **fields_of,
        )
    return replace(plan, layers=tuple(layers), predictor_input="ffn_input")


def _check(runner: Runner, windows: np.ndarray, made: Sequence[int], without: str, steps: Steps) -> Check:
    """Runs the text with and without predictors, and decodes some of it; shares are those of the layers made."""
    likelihoods, stats, decoded = [], [], []
    with steps("check", 2 * len(windows)) as step:
        for mode in (without, "predicted"):
            runner.plan.set_sparsity(mode)
            runner.plan.reset_stats()
            likelihoods.append([])
            for window in windows:
                likelihoods[-1].append(runner.likelihood(window))
                step()
            stats.append(runner.plan.layers())
            decoded.append(runner.decode_stats(windows[0]))

    def total(which: int, name: str) -> float:
        return float(sum(stats[which][i][name] for i in made))

    n_neurons = sum(stats[1][i]["n_tokens"] * stats[1][i]["n_ff"] for i in made)
    n_decoded = decoded[0]["n_tokens"] / sum(layer["n_ff"] > 0 for layer in stats[0])
    return Check(
        n_tokens=windows.size,
        without=without,
        perplexity=math.exp(np.mean(likelihoods[0])),
        predicted_perplexity=math.exp(np.mean(likelihoods[1])),
        recall=total(1, "n_active") / max(total(0, "n_active"), 1.0),
        candidate_density=total(1, "n_candidates") / n_neurons,
        token_us=decoded[0]["wall_us"] / n_decoded,
        predicted_token_us=decoded[1]["wall_us"] / n_decoded,
        predictor_share=decoded[1]["predictor_us"] / decoded[1]["wall_us"],
    )


# ---- Command line --------------------------------------------------------------------------------------------------


def _size(text: str) -> int:
    """`2G`, `500M`, `1000000`."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    try:
        value = int(float(text[: len(text) - len(unit)]) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of bytes, such as 500M or 2G")
    return value


def _layer_list(text: str) -> tuple[int, ...]:
    """`0-3,7`."""
    found: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected layers such as 0-3,7") from None
    return tuple(sorted(found))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer train`."""
    defaults = {field.name: field.default for field in fields(TrainOptions)}
    parser.add_argument("model", type=Path, metavar="MODEL", help="a stock GGUF with its plan beside it, or a plan")
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="plain text, UTF-8")
    parser.add_argument("-o", "--out", type=Path, metavar="OUT.powerinfer.gguf", help="default: the plan itself")
    parser.add_argument("--base", type=Path, help="the plan's base model (default: embedded, or beside it)")
    parser.add_argument(
        "--kind",
        choices=("auto", "linear", "mlp"),
        default=defaults["kind"],
        help="linear: closed form; mlp: trained, needs torch; auto: the better one (default: %(default)s)",
    )
    parser.add_argument(
        "--recall",
        type=arguments.share,
        default=defaults["recall"],
        help="active neurons to keep (default: %(default)s)",
    )
    parser.add_argument(
        "--max-parameters",
        type=arguments.share,
        metavar="SHARE",
        help="make the best predictors within so many of the model's parameters, whether they save time or not",
    )
    parser.add_argument("--layers", type=_layer_list, metavar="0-3,7", help="only these (default: all)")
    parser.add_argument(
        "--bytes",
        dest="max_bytes",
        type=_size,
        default=defaults["max_bytes"],
        help="most that captured data may take (default: 2G)",
    )
    parser.add_argument(
        "--tokens",
        type=arguments.count_of,
        default=defaults["tokens"],
        help="use at most so many (default: %(default)s)",
    )
    parser.add_argument(
        "-c", "--ctx", type=arguments.count_of, default=defaults["ctx"], help="tokens per window (default: %(default)s)"
    )
    parser.add_argument(
        "-t", "--threads", type=arguments.count_of, help="that run the model (default: physical cores allowed)"
    )
    parser.add_argument(
        "-j", "--jobs", type=arguments.count_of, help="layers at a time (default: physical cores allowed)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default=defaults["device"],
        help="that trains (default: %(default)s)",
    )
    parser.add_argument(
        "--type",
        dest="row_type",
        choices=("auto", "q8_0", "q4_0", "f16"),
        default=defaults["row_type"],
        help="of the predictors' rows; auto: what saves most time at the same recall (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=arguments.count_of,
        default=defaults["epochs"],
        help="of a training, at most (default: %(default)s)",
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=defaults["max_seconds"],
        help="per layer, after which a training ends (default: %(default)s)",
    )
    parser.add_argument(
        "-s", "--seed", type=int, default=defaults["seed"], help="of the split of the text and of starts"
    )
    parser.add_argument(
        "--special", action="store_true", help="the text holds the model's special tokens, e.g. of its chat template"
    )
    parser.add_argument("--rates", type=Path, metavar="RATES.json", help="of another machine (default: measured here)")
    parser.add_argument("--resume", action="store_true", help="go on where a stopped run ended")
    parser.add_argument("--keep", action="store_true", help="keep captured data and rates for another --resume")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="picture of the layers (default: beside the plan)")
    parser.add_argument("--no-plot", action="store_true", help="no picture")
    parser.add_argument("--strict", action="store_true", help="a fallback is an error instead of a note")
    parser.add_argument("--mapped", action="store_true", help="weights stay in the mapped file")
    add_ray_arguments(parser)


def _options(args: argparse.Namespace) -> TrainOptions:
    """The options of a command line, checked."""
    out = args.out
    if out is None:
        out = args.model if is_extended(args.model) else find_sidecar(args.model)
        if out is None:
            raise PlanError(
                f"{args.model}: there is no plan beside it; expected one; run `powerinfer profile {args.model}` first."
            )
    arguments.check_plan_path("out", out)
    arguments.check_run(args)
    check_ray(args)
    if args.ray is not None and args.jobs is not None:
        raise OptionError("jobs: with --ray, Ray decides how many layers run at a time; leave one of them out.")
    values = {field.name: getattr(args, field.name) for field in fields(TrainOptions)}
    return TrainOptions(**{**values, "text": tuple(args.text), "out": out})


def run(args: argparse.Namespace) -> int:
    """`powerinfer train`: notes and progress to stderr, the report to stdout.

    Args:
        args: the parsed command line.

    Returns:
        The exit code.
    """
    from rich.console import Console

    options = _options(args)
    note = note_once()
    picture = None if args.no_plot else args.plot or options.out.with_name(f"{options.folder.stem}.predictors.png")
    if picture is not None:
        try:
            plot_profile.check_plot()
        except OptionError as error:
            if args.plot or options.strict:
                raise
            note(str(error))
            picture = None
    with progress_steps() as steps:
        training = make_training(options, steps, note)
    print_training(training, options, Console())
    if args.json is not None:
        with atomic_path(args.json) as temporary:
            temporary.write_text(json.dumps(report(training, options), indent=2) + "\n", encoding="utf-8")
        print(f"report: {args.json}")
    if picture is not None:
        print(f"picture: {plot_training.write_plot(picture, training.layers, options.model.name)}")
    return 0


def report(training: Training, options: TrainOptions) -> dict[str, Any]:
    """The training as JSON has it."""
    return {
        "options": {
            name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items() if name != "text"
        },
        "corpus": training.corpus,
        "rates": asdict(training.rates),
        "layers": [asdict(layer) for layer in training.layers],
        "totals": training.totals(),
        "check": None if training.check is None else {**asdict(training.check), "loss": training.check.loss},
    }


def print_training(training: Training, options: TrainOptions, console: Any) -> None:
    """Prints a table of the layers, the totals beside the paper's, and what the core did with the plan."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("layer", "density", "predictor", "recall", "cand.", "x", "accuracy", "params", "saves us"):
        table.add_column(name, justify="left" if name == "predictor" else "right", no_wrap=True)
    for layer in training.layers:
        if layer.kind == "none":
            table.add_row(str(layer.i_layer), f"{layer.density:.3f}", "none", *["-"] * 6)
            continue
        table.add_row(
            str(layer.i_layer),
            f"{layer.density:.3f}",
            f"{layer.kind} {layer.rank} {layer.row_type}",
            f"{layer.recall:.3f}",
            f"{layer.candidate_density:.3f}",
            f"{layer.candidate_density / layer.density:.2f}" if layer.density else "-",
            f"{layer.accuracy:.3f}",
            f"{layer.n_parameters / 1e3:.0f}k",
            f"{layer.saving_us:.1f}",
        )
    console.print(table)
    for reason, layers in _by_reason(training.layers).items():
        print(f"none in {layers}: {reason}")
    rates = training.rates
    gathered = ", ".join(f"{value:.1f} at {density:.0%}" for density, value in rates.gathered_gb_s)
    predictors = ", ".join(f"{name} {value:.1f}" for name, value in rates.predictor_gb_s.items())
    print(
        f"rates, GB/s, {rates.n_threads} threads, {rates.kernels}, rows from {'cache' if rates.in_cache else 'memory'}: "
        f"{rates.gate_type} gate {rates.gate_gb_s:.1f}, single rows {gathered}; predictor rows {predictors}"
    )
    totals = training.totals()
    print(
        f"{totals['layers']} of {len(training.layers)} layers; {training.corpus}; "
        f"predictors {totals['bytes'] / 1e6:.2f} MB, {totals['parameters_share']:.2%} of the model's parameters "
        f"(paper: {PAPER_PARAMETERS:.2%})"
    )
    if totals["layers"]:
        print(
            f"recall {totals['recall']:.3f} at candidate density {totals['candidate_density']:.3f}, density "
            f"{totals['density']:.3f} ({totals['candidate_density'] / max(totals['density'], 1e-9):.2f}x); accuracy "
            f"{totals['accuracy']:.1%} (paper: > {PAPER_ACCURACY:.0%}); expected saving {totals['saving_us']:.0f} us per token"
        )
    if (check := training.check) is not None:
        print(
            f"run on {check.n_tokens} tokens that chose nothing: perplexity {check.without} {check.perplexity:.3f}, predicted "
            f"{check.predicted_perplexity:.3f} ({check.loss:+.2%}); active {check.recall:.3f} of {check.without}'s at candidate "
            f"density {check.candidate_density:.3f}"
        )
        print(
            f"decoding: {check.token_us:.0f} us per token {check.without}, {check.predicted_token_us:.0f} predicted; predictors "
            f"take {check.predictor_share:.1%} of that (paper: < {PAPER_TIME:.0%})"
        )
    if options.max_parameters is None and not totals["layers"]:
        print("Predictors don't pay here; --max-parameters makes them all the same.")
    elif totals["layers"] and totals["saving_us"] <= 0:
        print("These predictors don't pay here: reading them takes longer than the rows that they save.")
    print(f"plan: {options.out} ({options.out.stat().st_size / 1e3:.0f} kB)")


def _by_reason(layers: Sequence[LayerResult]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for layer in layers:
        if layer.kind == "none":
            found.setdefault(layer.reason, []).append(str(layer.i_layer))
    return {reason: f"layer{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}" for reason, numbers in found.items()}
