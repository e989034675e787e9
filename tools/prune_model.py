"""`powerinfer prune`: a model loses the neurons that matter least; a smaller stock GGUF, recovered by distillation if that is wished.

Rows of gate and up stay as they are, byte by byte. Those of down lose columns, so their blocks are rounded again to the type that they have.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES

from powerinfer_py import _core
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.format import (
    SIDECAR_SUFFIX,
    BaseModel,
    Plan,
    PlanLayer,
    Rows,
    atomic_path,
    bare_plan,
    split_layer_name,
    write_plan,
)
from powerinfer_py.gguf_file import GgufTensor
from powerinfer_py.hub import add_hub_arguments, resolve_model

from . import arguments
from .neuron_impact import kept_neurons, magnitude_impacts, stored_impacts, taylor_impacts
from .reluify_model import (
    TrainingOptions,
    add_training_arguments,
    check_base,
    identity,
    kept_run,
    layer_groups_of,
    memory_limit,
    model_and_plan,
    open_folder,
    perplexities,
    profile_windows,
    split_windows,
    start_torch,
    step_options,
    train,
    training_progress,
    training_values,
    write_outputs,
)
from .rewrite_gguf import TensorSource, renamed_entry, string_entry, u32_array_entry, u32_entry, write_changed
from .row_types import dequantize_rows, quantize_rows
from .terminal import Steps, note_once, percent
from .thresholds import CALIBRATED_ACTIVATIONS

if TYPE_CHECKING:
    import torch

    from .reluify_run import Run
    from .reluify_state import RunFolder
    from .torch_graph import Graph

IMPACTS = ("magnitude", "taylor")
# Architectures for which llama.cpp reads an n_ff of each layer. Source: llama.cpp, src/models (libllama 0.5.0).
PER_LAYER = ("deci", "openelm")
# One n_ff for all layers -> the architecture of the same graph that has one for each.
TWINS = {"llama": "deci"}
_UNIT = 32  # neurons that go at once, where blocks of down's rows aren't larger
_LEAST_DENSITY = 1e-6
# Options that only --recover reads.
_RECOVERY = ("hours", "steps", "qat", "lr", "end_to_end_lr", "resume", "keep", "plot", "compile")


@dataclass(frozen=True)
class PruneOptions(TrainingOptions):
    """Options of `powerinfer prune`."""

    drop: float = 0.1  # of all layers' neurons
    impact: str = "magnitude"  # with text
    even: bool = False  # the same number of neurons in each layer
    recover: bool = False
    hours: float = 1.0  # with recover
    qat: bool = True  # passes of the recovery see rows rounded as the file's


@dataclass(frozen=True)
class Pruned:
    """A model that was made smaller.

    Attributes:
        n_before, n_after: neurons of each layer.
        bytes_before, bytes_after: of the GGUFs.
        plan: as written; None: the model had none.
        measured: for each text its name, and the perplexity before, pruned, and recovered.
        seconds: that all took, over all stops.
    """

    n_before: list[int]
    n_after: list[int]
    bytes_before: int
    bytes_after: int
    plan: Plan | None
    measured: list[tuple[str, list[float]]]
    seconds: float


@dataclass(frozen=True)
class _Source:
    """The model that is made smaller.

    Attributes:
        base: the model.
        plan: its plan, if it has one.
        architecture: of the smaller model.
        even: all its layers lose the same share.
        per_layer: it has an n_ff of each layer.
        units: for each layer, of how many neurons a multiple goes.
    """

    base: BaseModel
    plan: Plan | None
    architecture: str
    even: bool
    per_layer: bool
    units: list[int]

    @property
    def activation(self) -> str:
        """Of its weights."""
        return self.plan.activation if self.plan else bare_plan(self.base.path).activation


# ---- The whole -----------------------------------------------------------------------------------------------------


def prune(
    options: PruneOptions,
    steps: Steps,
    report: Callable[[Run, dict[str, Any] | None], None],
    note: Callable[[str], None],
) -> Pruned:
    """Writes a model without the neurons that matter least, and its plan if it has one.

    Args:
        options: what to do.
        steps: progress of everything but the training.
        report: called after each step of the training, with an entry of its log where one was made.
        note: receives every note once.

    Returns:
        What became of it.

    Raises:
        FormatError: a file can't be used.
        PlanError: the model can't.
        OptionError: an option can't be used, or a package is missing.
        KeyboardInterrupt: it was stopped; a training's state is kept in the run's folder.
    """
    began = time.monotonic()
    source = _open_source(options, note)
    if options.recover:
        return _recovered(options, source, began, steps, report, note)
    out = options.out
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent) as temporary:
        model = Path(temporary) / out.name
        if options.text:
            n_threads, device, dtype = start_torch(options)
            windows, texts = split_windows(options, source.base.path, note)
            graph = _graph(options, source, device, dtype, n_threads, keep=_fits(options, source.base, device, dtype))
            impacts = _measured_impacts(options, graph, windows, steps, note)
        else:
            n_threads = options.threads or _core.physical_cores()
            impacts, origin = stored_impacts(source.base, source.plan, n_threads=n_threads)
            note(f"impact of neurons: from {origin}; --text measures it.")
        plan = _write_pruned(options, source, impacts, model, n_threads, steps)
        models = [_measurable(source.base.path, source.plan), _measurable(model, plan)]
        measured = perplexities(options, models, texts, steps) if options.text else []
        if plan is not None:
            plan.path.replace(options.plan)
        model.replace(out)
    return _result(options, source, plan, measured, time.monotonic() - began)


def _recovered(
    options: PruneOptions,
    source: _Source,
    began: float,
    steps: Steps,
    report: Callable[[Run, dict[str, Any] | None], None],
    note: Callable[[str], None],
) -> Pruned:
    """With distillation: what prune() returns."""
    from .reluify_run import run_folder
    from .reluify_state import RunFolder

    folder = RunFolder(run_folder(options.out, "prune"), {})
    with kept_run(folder, note):
        return _recover(options, source, folder, began, steps, report, note)


def _recover(
    options: PruneOptions,
    source: _Source,
    folder: RunFolder,
    began: float,
    steps: Steps,
    report: Callable[[Run, dict[str, Any] | None], None],
    note: Callable[[str], None],
) -> Pruned:
    from .reluify_run import Run, RunOptions
    from .reluify_state import RunState

    base = source.base
    n_threads, device, dtype = start_torch(options)
    windows, texts = split_windows(options, base.path, note)
    folder.identity = identity(
        options,
        base,
        windows,
        str(dtype),
        **{name: getattr(options, name) for name in ("drop", "impact", "qat")},
        even=source.even,
        activation=source.activation,
    )
    groups, keep = layer_groups_of(options, base, device, dtype, len(windows), note)
    graph = _graph(options, source, device, dtype, n_threads, keep=keep)
    resumed = open_folder(options, folder, note)
    model = folder.path / "pruned.gguf"
    if not resumed:
        folder.save(RunState([[group.start, group.stop] for group in groups]), None)
    if not model.exists():
        impacts = _measured_impacts(options, graph, windows, steps, note)
        _write_pruned(options, source, impacts, model, n_threads, steps)
    _, plan = model_and_plan(model)
    down_t = plan and next((layer.ffn_down_t for layer in plan.layers if layer.ffn_down_t is not None), None)
    start = BaseModel(model)
    run_options = RunOptions(
        activation=source.activation,
        density=None if source.activation in CALIBRATED_ACTIVATIONS else 1.0,  # 1: what each layer begins with
        row_types=None if options.qat else {},
        groups=groups,
        down_t_type=down_t and down_t.row_type,
        start=start,
        **step_options(options),
    )
    run = Run(graph, windows, texts[0][1], run_options, folder, resume=resumed, began=began)
    train(options, run, report, n_models=3)
    if plan is not None and any(layer.predictor != "none" for layer in plan.layers):
        note(
            f"predictors: they belong to the weights before the training; train others: powerinfer train {options.out}."
        )
    written = write_outputs(
        options,
        start,
        run,
        steps,
        note,
        name=start.files[0].get("general.name"),
        activation=plan and plan.activation,
        down_type=down_t and down_t.row_type.name,
    )
    models = [_measurable(base.path, source.plan), _measurable(model, plan), _measurable(options.out, written)]
    measured = perplexities(options, models, texts, steps)
    if options.plot is not None:
        from .plot_reluify import write_plot

        wished = run.state.log[-1]["wished_density"]
        aim = float(np.mean(wished)) if wished else None
        write_plot(options.plot, run.state.log, run.state.teacher_perplexity, aim, options.out.name)
    if not options.keep:
        folder.remove()
    return _result(options, source, written, measured, run.seconds())


def _result(
    options: PruneOptions,
    source: _Source,
    plan: Plan | None,
    measured: list[tuple[str, list[float]]],
    seconds: float,
) -> Pruned:
    base, after = source.base, BaseModel(options.out)
    return Pruned(
        n_before=[base.ffn(i)["down"].ne[0] for i in range(base.n_layer)],
        n_after=[after.ffn(i)["down"].ne[0] for i in range(base.n_layer)],
        bytes_before=sum(file.size for file in base.files),
        bytes_after=after.files[0].size,
        plan=plan and replace(plan, path=options.plan),
        measured=measured,
        seconds=seconds,
    )


def _measurable(model: Path, plan: Plan | None) -> tuple[Path, Path | None, str]:
    """What perplexities() wants of a model."""
    return model, plan and plan.path, "dense"


# ---- The model -----------------------------------------------------------------------------------------------------


def _open_source(options: PruneOptions, note: Callable[[str], None]) -> _Source:
    """The model, checked."""
    path, plan = model_and_plan(options.model)
    base = BaseModel(path)
    check_base(options, base)
    if plan is None and options.plan.exists():
        raise OptionError(
            f"out: {options.plan} is there, a plan of another model; expected none, as {path} has no plan; "
            "move it, or pass another -o."
        )
    if plan is not None and options.plan.exists() and options.plan.samefile(plan.path):
        raise OptionError(f"out: {options.plan} is the model's own plan; expected another file; pass another -o.")
    for i in range(base.n_layer):
        reason = base.why_not_covered(i) or _other_tensor(base, i)
        if reason:
            raise PlanError(
                f"{base.where}: layer {i} has no plain FFN: {reason}; expected up, down and maybe gate; use another model."
            )
    if options.text and plan is not None and any(layer.activation_param for layer in plan.layers):
        raise OptionError(
            f"{plan.path}: its activation has a cut (FATReLU); expected one without, to run text in torch; leave --text out."
        )
    even, architecture = options.even, base.architecture
    per_layer = architecture in PER_LAYER or len({base.ffn(i)["down"].ne[0] for i in range(base.n_layer)}) > 1
    if not even and architecture in TWINS:
        architecture, per_layer = TWINS[architecture], True
        note(
            f"{base.architecture}: llama.cpp reads one n_ff for all layers of this architecture; the output is '{architecture}', the same "
            "graph with an n_ff for each layer (--even keeps the architecture)."
        )
    elif not even and not per_layer:
        text = f"{architecture}: llama.cpp reads one n_ff for all layers of this architecture: each loses the same number of neurons."
        if options.strict:
            raise OptionError(f"{text} --strict refuses that; pass --even.")
        note(text)
        even = True
    units = []
    for i in range(base.n_layer):
        down = base.ffn(i)["down"]
        block, _ = GGML_QUANT_SIZES[down.type]
        # refuses types that can't be rounded to
        quantize_rows(np.zeros((1, block), np.float32), down.type.name)
        units.append(max(block, _UNIT) if down.ne[0] % _UNIT == 0 else block)
    if not per_layer:
        units = [max(units)] * base.n_layer
    return _Source(base, plan, architecture, even, per_layer, units)


def _other_tensor(base: BaseModel, i_layer: int) -> str:
    """A tensor of an FFN that is neither weight nor bias, such as scales; empty: none."""
    for name in base.tensors:
        found = split_layer_name(name)
        if (
            found
            and found[0] == i_layer
            and found[1].startswith("ffn_")
            and found[1].rpartition(".")[2] not in ("weight", "bias")
        ):
            return name
    return ""


def _graph(
    options: PruneOptions, source: _Source, device: str, dtype: torch.dtype, n_threads: int, *, keep: bool
) -> Graph:
    """The model in torch."""
    from .torch_graph import Graph

    graph = Graph(source.base, device=device, dtype=dtype, keep=keep, compiled=options.compile, n_threads=n_threads)
    graph.activation = source.activation
    return graph


def _fits(options: PruneOptions, base: BaseModel, device: str, dtype: torch.dtype) -> bool:
    """Whether the decoded model and what a window's backward pass needs fit into memory."""
    item = dtype.itemsize
    n_ff = max(base.ffn(i)["down"].ne[0] for i in range(base.n_layer))
    n_vocab = base.tensor("token_embd.weight").rows_shape[0]
    per_token = base.n_layer * (40 * base.n_embd + 6 * item * n_ff) + 12 * n_vocab
    n_all = sum(math.prod(base.tensor(name).ne) for name in base.tensors)
    return n_all * item + options.ctx * per_token <= memory_limit(options, device)


def _measured_impacts(
    options: PruneOptions, graph: Graph, windows: np.ndarray, steps: Steps, note: Callable[[str], None]
) -> list[np.ndarray]:
    """Impacts from a profile's share of the text."""
    windows = windows[: profile_windows(options, len(windows))]
    note(f"impact of neurons: {options.impact}, from {windows.size} tokens of the text.")
    if options.impact == "taylor":
        if not graph.keep:
            raise OptionError(
                f"impact: taylor differentiates the whole model, which doesn't fit into {memory_limit(options, graph.device) / 2**30:.1f} GiB; "
                "expected more memory; pass a larger --memory, or --impact magnitude."
            )
        with steps("impact", len(windows)) as step:
            return taylor_impacts(graph, windows, step)
    with steps("impact", -(-len(windows) // options.batch)) as step:
        return magnitude_impacts(graph, windows, options.batch, step)


# ---- Output --------------------------------------------------------------------------------------------------------


def _write_pruned(
    options: PruneOptions,
    source: _Source,
    impacts: Sequence[np.ndarray],
    path: Path,
    n_threads: int,
    steps: Steps,
) -> Plan | None:
    """Writes the smaller model, and the plan of what is left of it beside, if there was one: where the model is, the plan is too.

    Args:
        options: what to do.
        source: the model.
        impacts: for each layer (n_ff,).
        path: the file.
        n_threads: that round rows.
        steps: progress.

    Returns:
        The plan.
    """
    base = source.base
    kept = kept_neurons(impacts, options.drop, source.units, even=source.even)
    sources = [tensor for i, rows in enumerate(kept) for tensor in _ffn_sources(base, i, rows, n_threads)]
    with atomic_path(path) as temporary:
        with steps("writing", 100) as step:
            write_changed(base, temporary, _keys(source, [len(rows) for rows in kept]), sources, percent(step))
        if source.plan is None:
            return None
        plan_path = path.with_name(path.name.removesuffix(".gguf") + SIDECAR_SUFFIX)
        plan = replace(pruned_plan(source.plan, kept, temporary), base_file=path.name)
        write_plan(plan, plan_path)
    return replace(plan, path=plan_path)


def _keys(source: _Source, n_ff: list[int]) -> dict[str, bytes]:
    """Keys that change: name, n_ff, and those of the architecture when it becomes another."""
    base, architecture = source.base, source.architecture
    first = base.files[0]
    length = "feed_forward_length"
    name = first.get("general.name") or base.path.stem
    keys = {"general.name": string_entry("general.name", f"{name} pruned")}
    if architecture != base.architecture:
        keys["general.architecture"] = string_entry("general.architecture", architecture)
        for key in first.values:
            owner, _, rest = key.partition(".")
            if owner == base.architecture:
                keys[key] = renamed_entry(first.entry(key), f"{architecture}.{rest}")
    key = f"{architecture}.{length}"
    keys[f"{base.architecture}.{length}"] = u32_array_entry(key, n_ff) if source.per_layer else u32_entry(key, n_ff[0])
    return keys


def _ffn_sources(base: BaseModel, i_layer: int, neurons: np.ndarray, n_threads: int) -> list[TensorSource]:
    """The FFN of a layer, of some of its neurons only."""
    sources = []
    for part, tensor in base.ffn(i_layer).items():
        if part == "down":
            n_rows = tensor.rows_shape[0]
            data = partial(_columns, base, tensor, neurons, n_threads)
            sources.append(TensorSource.matrix(tensor.name, tensor.type, n_rows, len(neurons), data))
            continue
        for found in (tensor, base.tensor(tensor.name.replace("weight", "bias"))):
            if found is not None:
                n_ff = found.ne[-1]
                ne, n_bytes = (*found.ne[:-1], len(neurons)), found.n_bytes // n_ff * len(neurons)
                sources.append(
                    TensorSource(found.name, found.type, ne, n_bytes, partial(_picked, base, found, neurons))
                )
    return sources


def _picked(base: BaseModel, tensor: GgufTensor, neurons: np.ndarray) -> np.ndarray:
    """Rows of gate or up, or values of their bias, as they are stored: (n_bytes,) uint8."""
    return base.raw(tensor.name).reshape(tensor.ne[-1], -1)[neurons].reshape(-1)


def _columns(base: BaseModel, tensor: GgufTensor, neurons: np.ndarray, n_threads: int) -> np.ndarray:
    """Columns of down, rounded again to its type: (n_bytes,) uint8."""
    raw = base.raw(tensor.name).reshape(tensor.rows_shape[0], -1)
    values = dequantize_rows(raw, tensor.type.name, n_threads=n_threads)[:, neurons]
    return quantize_rows(np.ascontiguousarray(values), tensor.type.name, n_threads=n_threads).reshape(-1)


def pruned_plan(plan: Plan, kept: Sequence[np.ndarray], model: Path) -> Plan:
    """A plan of the neurons that are left.

    Args:
        plan: of the model before.
        kept: for each layer the neurons that stay, ascending.
        model: the smaller model.

    Returns:
        Orders, frequencies, thresholds, down rows and predictors of theirs; densities are those of the frequencies, of active
        neurons and of candidates alike, and the predictors' recall stays as it was. Loss and placements are left out.
    """
    bare = bare_plan(model, plan.activation)
    layers = []
    for old, new, neurons in zip(plan.layers, bare.layers, kept):
        if not old.n_ff:
            layers.append(PlanLayer())
            continue
        order = np.arange(old.n_ff) if old.neuron_order is None else old.neuron_order
        number = np.full(old.n_ff, -1)
        number[neurons] = np.arange(len(neurons))
        stays = number[order] >= 0
        frequency = None if old.neuron_frequency is None else old.neuron_frequency[stays]
        growth = 1.0 if frequency is None else frequency.mean() / max(old.neuron_frequency.mean(), _LEAST_DENSITY)
        layers.append(
            replace(
                old,
                n_ff=new.n_ff,
                digest=new.digest,
                predictor_candidate_density=float(min(1.0, old.predictor_candidate_density * growth)),
                profile_density=0.0 if frequency is None else float(frequency.mean()),
                neuron_order=None if old.neuron_order is None else number[order][stays].astype(np.int32),
                neuron_frequency=frequency,
                ffn_down_t=_rows(old.ffn_down_t, stays),
                fc2=_rows(old.fc2, stays),
            )
        )
    return replace(bare, layers=tuple(layers), predictor_input=plan.predictor_input, corpus=plan.corpus)


def _rows(rows: Rows | None, stays: np.ndarray) -> Rows | None:
    """Some rows of a plan, as they are stored."""
    return rows and replace(rows, data=rows.data[stays])


# ---- Command line --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer prune`."""
    defaults = {field.name: field.default for field in fields(PruneOptions)}
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="a GGUF (its plan is found beside it)")
    add_hub_arguments(parser)
    parser.add_argument(
        "--drop",
        type=arguments.share,
        required=True,
        metavar="SHARE",
        help="neurons to leave out, of those of all layers, such as 10%%",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        required=True,
        metavar="OUT.gguf",
        help="the smaller model; its plan, if MODEL has one, goes beside it",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="plain text, UTF-8, of the kind the model is for: measures impact and perplexity (default: impact from the plan, or the weights)",
    )
    parser.add_argument(
        "--impact",
        choices=IMPACTS,
        default=defaults["impact"],
        help="of a neuron, with --text: what it adds, or the loss without it to first order (default: %(default)s)",
    )
    parser.add_argument(
        "--even", action="store_true", help="leave out the same number in each layer, and keep the architecture"
    )
    parser.add_argument(
        "--recover", action="store_true", help="then distil the model before into the smaller one, for --hours"
    )
    parser.add_argument(
        "--qat",
        action=argparse.BooleanOptionalAction,
        default=defaults["qat"],
        help="with --recover: rows are rounded as in the file while they learn, or only at the end (default: while they learn)",
    )
    add_training_arguments(parser, defaults)


def _options(args: argparse.Namespace) -> PruneOptions:
    """The options of a command line, checked."""
    defaults = {field.name: field.default for field in fields(PruneOptions)}
    if not args.text:
        for name, what in (("recover", "a text to learn from"), ("impact", "a text"), ("check", "a text beside")):
            if getattr(args, name) not in (defaults[name], []):
                raise OptionError(f"{name}: given without --text; expected {what}; pass --text FILE, or leave it out.")
    if not args.recover:
        for name in _RECOVERY:
            if getattr(args, name) != defaults[name]:
                raise OptionError(
                    f"{name.replace('_', '-')}: given without --recover; expected it with that; leave it out, or pass --recover."
                )
        args.no_plot = True
    if args.text:
        arguments.need_packages("prune", "train", "torch", otherwise=" or leave --text out")
    model = Path(resolve_model(args))
    return PruneOptions(**training_values(args, model, PruneOptions))


def run(args: argparse.Namespace) -> int:
    """`powerinfer prune`: notes and progress to stderr, a line per check and the result to stdout.

    Args:
        args: the parsed command line.

    Returns:
        The exit code.
    """
    options = _options(args)
    with training_progress() as (steps, report):
        result = prune(options, steps, report, note_once())
    print_result(options, result)
    return 0


def print_result(options: PruneOptions, result: Pruned) -> None:
    """Prints sizes before and after, and perplexities."""
    before, after = result.n_before, result.n_after
    if len(set(before)) == 1:
        sizes = f"n_ff {before[0]} -> " + (
            f"{after[0]} in each of {len(after)} layers" if len(set(after)) == 1 else " ".join(map(str, after))
        )
    else:
        sizes = "n_ff " + " ".join(f"{a}->{b}" for a, b in zip(before, after))
    print(textwrap.fill(sizes, 100, subsequent_indent="  "))
    print(
        f"{options.out}: {result.bytes_before / 1e6:.1f} -> {result.bytes_after / 1e6:.1f} MB, "
        f"{1 - sum(after) / sum(before):.1%} of the neurons left out"
        + (f"; plan: {options.plan}" if result.plan else "")
    )
    for name, found in result.measured:
        line = f"perplexity, {name}: {found[0]:.3f}"
        for what, value in zip(("pruned", "recovered"), found[1:]):
            line += f", {what} {value:.3f} ({value / found[0]:.3f} x)"
        print(line)
    if options.plot is not None:
        print(f"picture: {options.plot}")
