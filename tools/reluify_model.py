"""`powerinfer reluify`: a model's activation becomes one with exact zeros, and its feed-forward blocks learn to live with it.

Distillation on the user's own machine and text: the model is its own teacher, only feed-forward weights change.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import math
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from powerinfer_py import _core
from powerinfer_py.bench_machine import available_memory_bytes
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.format import (
    SIDECAR_SUFFIX,
    BaseModel,
    Plan,
    derived_row_type,
    find_sidecar,
    is_extended,
    read_plan,
)
from powerinfer_py.hub import add_hub_arguments, resolve_checkpoint, resolve_model

from . import arguments
from .mlp_predictor import find_device
from .quantize_base import FILE_TYPES
from .rewrite_gguf import TensorSource, string_entry, u32_entry, write_changed
from .row_types import quantize_rows, row_type_id
from .terminal import Steps, interruptible, note_once, percent, progress_steps
from .text_runner import Runner, Vocabulary, text_windows

if TYPE_CHECKING:
    import torch

    from .reluify_run import Run
    from .reluify_state import RunFolder

ACTIVATIONS = ("relu", "drelu", "relu_sqr")
_MIN_WINDOWS = 8
_HELD_OUT_SHARE, _MAX_HELD_OUT = 1 / 32, 16
_MEMORY_SHARE = 0.7  # of what is free, without --memory
_LEAST_FINISHING_SECONDS = 10.0
_WRITTEN_BYTES_PER_SECOND = 50e6
_FINISHING_FACTOR = 2.0  # profile and checks against the speed of the forward pass in torch


@dataclass(frozen=True)
class TrainingOptions:
    """Options of every verb that distils a model into a changed one, with their defaults."""

    model: Path
    out: Path
    text: tuple[Path, ...] = ()
    check: tuple[Path, ...] = ()  # other text to measure on at the end
    hours: float = 2.0  # of all, over all stops
    steps: int | None = None  # of each group of layers, instead of hours
    tokens: int = 4_000_000  # of the text, at most
    ctx: int = 512  # tokens per window
    batch: int = 4  # windows per step
    lr: float = 5e-4
    end_to_end_lr: float = 3e-4
    special: bool = False  # the text holds special tokens
    memory: float | None = None  # GiB; None: most of what is free
    device: str = "auto"
    dtype: str = "auto"  # of matrix products
    compile: bool = False  # blocks, by torch
    threads: int | None = None  # None: physical cores allowed
    seed: int = 0
    plot: Path | None = None
    resume: bool = False
    keep: bool = False  # the run's folder
    strict: bool = False

    @property
    def plan(self) -> Path:
        """The output's sidecar."""
        return self.out.with_name(self.out.name.removesuffix(".gguf") + SIDECAR_SUFFIX)


@dataclass(frozen=True)
class ReluifyOptions(TrainingOptions):
    """Options of `powerinfer reluify`; the model may be a Hugging Face folder."""

    activation: str = "relu"
    density: float = 0.15
    qat: str | None = (
        None  # type that rows are rounded to while they learn, and in the output; None: those of the model
    )
    start: Path | None = None  # model of an earlier run, whose feed-forward blocks this one begins with


@dataclass(frozen=True)
class Measured:
    """Perplexity on one text, of the files as llama.cpp runs them.

    Attributes:
        name: of the text.
        teacher, student: of the model, and of what became of it.
    """

    name: str
    teacher: float
    student: float


@dataclass(frozen=True)
class Reluified:
    """A finished run.

    Attributes:
        plan: as written.
        density: mean over layers and profiled tokens.
        measured: on held-out windows of the text, then on every `check` file.
        log: one entry per check.
        seconds: that all took, over all stops.
    """

    plan: Plan
    density: float
    measured: list[Measured]
    log: list[dict[str, Any]]
    seconds: float


# ---- The whole -----------------------------------------------------------------------------------------------------


def reluify(
    options: ReluifyOptions,
    steps: Steps,
    report: Callable[[Run, dict[str, Any] | None], None],
    note: Callable[[str], None],
) -> Reluified:
    """Trains, writes the model and its plan.

    Args:
        options: what to do.
        steps: progress of everything but the training.
        report: called after each step of the training, with an entry of its log where one was made.
        note: receives every note once.

    Returns:
        The finished run.

    Raises:
        FormatError: a file can't be used.
        PlanError: the model can't.
        OptionError: an option can't be used, or a package is missing.
        KeyboardInterrupt: it was stopped; what was reached is kept in the run's folder.
    """
    from .reluify_run import run_folder
    from .reluify_state import RunFolder

    folder = RunFolder(run_folder(options.out, "reluify"), {})
    with kept_run(folder, note, *_teacher_files(folder.path)):
        return _reluify(options, folder, steps, report, note)


def _reluify(
    options: ReluifyOptions,
    folder: RunFolder,
    steps: Steps,
    report: Callable[[Run, dict[str, Any] | None], None],
    note: Callable[[str], None],
) -> Reluified:
    from .reluify_run import Run, RunOptions
    from .torch_graph import Graph

    began = time.monotonic()
    n_threads, device, dtype = start_torch(options)
    model, teacher_plan, activation = _teacher(options, folder.path, steps, note)
    base = BaseModel(model)
    check_base(options, base)
    graph = Graph(base, device=device, dtype=dtype, keep=False, compiled=options.compile, n_threads=n_threads)
    graph.activation = activation
    start = _start(options, base)
    windows, texts = split_windows(options, model, note)
    folder.identity = identity(
        options,
        base,
        windows,
        str(dtype),
        folder=options.model.resolve().name if options.model.is_dir() else "none",
        activation=options.activation,
        density=options.density,
        qat=options.qat or "none",
        start=_digest(start) if start else "none",
    )
    row_types = _row_types(base, options, note)
    groups, graph.keep = layer_groups_of(options, base, device, dtype, len(windows), note)
    resumed = open_folder(options, folder, note)
    run_options = RunOptions(
        activation=options.activation,
        density=options.density,
        row_types=row_types,
        groups=groups,
        start=start,
        end_to_end_only=start is not None,
        **step_options(options),
    )
    run = Run(graph, windows, texts[0][1], run_options, folder, resume=resumed, began=began)
    train(options, run, report)
    log = run.state.log
    name = base.files[0].get("general.name") or base.path.stem
    plan = write_outputs(
        options,
        base,
        run,
        steps,
        note,
        name=f"{name} {options.activation}",
        activation=options.activation,
        qat=options.qat,
        down_type=options.qat,
    )
    models = [(model, teacher_plan, "dense"), (options.out, options.plan, "exact")]
    measured = [Measured(text, *found) for text, found in perplexities(options, models, texts, steps)]
    seconds = run.seconds()
    if options.plot is not None:
        from .plot_reluify import write_plot

        write_plot(options.plot, log, run.state.teacher_perplexity, options.density, options.out.name)
    if not options.keep:
        folder.remove()
    covered = [layer for layer in plan.layers if layer.n_ff]
    density = float(np.average([layer.profile_density for layer in covered], weights=[layer.n_ff for layer in covered]))
    return Reluified(plan, density, measured, log, seconds)


def start_torch(options: TrainingOptions) -> tuple[int, str, torch.dtype]:
    """Prepares torch: number of threads, device, and type of matrix products."""
    import torch

    _keep_freed_memory()
    n_threads = options.threads or _core.physical_cores()
    torch.set_num_threads(n_threads)
    device = find_device(options.device)
    return n_threads, device, _dtype(options.dtype, device)


def open_folder(options: TrainingOptions, folder: RunFolder, note: Callable[[str], None]) -> bool:
    """Opens a run's folder: whether it holds a state to go on from."""
    exists = folder.checkpoint.exists()
    resumed = folder.open(resume=options.resume)
    if options.resume and not resumed:
        note(f"{folder.path}: there is nothing to resume; starting at the beginning.")
    elif exists and not resumed:
        note(f"{folder.path}: what an earlier run kept is replaced; --resume would have gone on with it.")
    return resumed


@contextmanager
def kept_run(folder: RunFolder, note: Callable[[str], None], *temporary: Path) -> Iterator[None]:
    """Around all of a run: a stopped one says where its state is, one that is done or has none leaves nothing.

    Args:
        folder: of the run.
        note: receives notes.
        temporary: files that go with the folder.
    """
    try:
        yield
    except KeyboardInterrupt:
        if folder.checkpoint.exists():
            note(f"stopped; what was reached is kept in {folder.path}; the same command with --resume goes on.")
        raise
    finally:
        if not folder.checkpoint.exists():
            folder.remove()
            for path in temporary:
                path.unlink(missing_ok=True)


def train(
    options: TrainingOptions,
    run: Run,
    report: Callable[[Run, dict[str, Any] | None], None],
    n_models: int = 2,
) -> None:
    """Trains to the end, or until it is stopped.

    Args:
        options: what to do.
        run: opened.
        report: called after each step, with an entry of the log where one was made.
        n_models: that are measured afterwards.

    Raises:
        KeyboardInterrupt: it was stopped; what was reached is kept in the run's folder.
    """
    with interruptible() as stopped:
        run.measure_teacher()
        if options.steps is None:
            run.options = replace(run.options, seconds=_training_seconds(options, run, n_models))
        done = run.train(lambda entry: report(run, entry), stopped) and not stopped()
    if not done:
        raise KeyboardInterrupt


def _keep_freed_memory() -> None:
    """glibc gives large blocks back to the kernel at every step, which costs a third of the time: it shall keep them."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # of malloc.h
    for option, value in ((m_mmap_max, 0), (m_trim_threshold, (1 << 31) - 1), (m_top_pad, 1 << 28)):
        mallopt(option, value)


def _dtype(name: str, device: str) -> torch.dtype:
    """The type of matrix products: bfloat16 where the processor multiplies it."""
    import torch

    if name == "auto":
        fast = torch.cuda.is_bf16_supported() if device == "cuda" else torch.ops.mkldnn._is_mkldnn_bf16_supported()
        name = "bf16" if fast else "f32"
    return {"bf16": torch.bfloat16, "f32": torch.float32}[name]


def _teacher_files(folder: Path) -> tuple[Path, Path]:
    """Where a teacher that was a Hugging Face folder is kept, and its plan: beside the run's folder."""
    teacher = folder.with_name(folder.name + "-teacher.gguf")
    return teacher, teacher.with_name(folder.name + "-teacher" + SIDECAR_SUFFIX)


def _teacher(
    options: ReluifyOptions, folder: Path, steps: Steps, note: Callable[[str], None]
) -> tuple[Path, Path | None, str]:
    """The model as GGUF, its plan if there is one, and the activation of its weights."""
    from powerinfer_py.format import bare_plan

    model = options.model
    if model.is_dir():
        from .convert_hf_to_powerinfer_gguf import ConvertOptions, convert

        teacher, plan = _teacher_files(folder)
        if not (options.resume and teacher.exists() and plan.exists()):
            convert(ConvertOptions(model=model, outfile=plan, sidecar=True, threads=options.threads), steps, note)
        model = teacher
    model, plan = model_and_plan(model)
    if plan is None:
        return model, None, bare_plan(model).activation
    if any(layer.activation_param for layer in plan.layers):
        raise OptionError(
            f"{plan.path}: its activation has a cut (FATReLU); expected one without; it is sparse already: use it as it is."
        )
    return model, plan.path, plan.activation


def _start(options: ReluifyOptions, base: BaseModel) -> BaseModel | None:
    """The model of `--start`, if there is one: of the same shape as base, and of the wished activation."""
    if options.start is None:
        return None
    model, plan = model_and_plan(options.start)
    if plan is None:
        raise PlanError(
            f"{model}: there is no plan beside it; expected one, which says the activation; pass reluify's output."
        )
    if plan.activation != options.activation:
        raise OptionError(
            f"start: {model} has activation {plan.activation}; expected {options.activation}; pass --activation {plan.activation}, or another --start."
        )
    start = BaseModel(model)
    _check_outputs(options, options.start, start)

    def shape(model: BaseModel) -> tuple[Any, ...]:
        layers = range(model.n_layer)
        return model.architecture, [{name: tensor.ne for name, tensor in model.ffn(i).items()} for i in layers]

    if shape(start) != shape(base):
        raise OptionError(
            f"start: {model} has another shape than {base.where}; expected a model that was reluified from it; pass another --start."
        )
    return start


def model_and_plan(model: Path) -> tuple[Path, Plan | None]:
    """A stock GGUF, given itself or by its sidecar, and its plan if it has one.

    Raises:
        FormatError: a file can't be used.
        PlanError: the plan is another model's.
        OptionError: the plan carries the model.
    """
    sidecar = model if is_extended(model) else find_sidecar(model)
    if sidecar is None:
        return model, None
    plan = read_plan(sidecar)
    if plan.is_embedded:
        raise OptionError(
            f"{model}: the model is embedded in its plan; expected a GGUF beside its plan; extract it, or give the original model."
        )
    return plan.open_base(None if model == sidecar else model).path, plan


def check_base(options: TrainingOptions, base: BaseModel) -> None:
    """Refuses windows longer than the model's context, and outputs that would replace the model."""
    if base.n_ctx_train is not None and options.ctx > base.n_ctx_train:
        raise OptionError(f"ctx: {options.ctx}; the model was trained with {base.n_ctx_train}; pass a smaller -c.")
    _check_outputs(options, options.model, base)


def _check_outputs(options: TrainingOptions, given: Path, base: BaseModel) -> None:
    """Refuses outputs that would replace a model that is read.

    Args:
        options: what to do.
        given: its path on the command line.
        base: the model.
    """
    read = {path.resolve() for path in (given, *(file.path for file in base.files))}
    for path in (options.out, options.plan):
        if path.resolve() in read:
            raise OptionError(f"out: {path} belongs to the model itself; expected another file; pass another -o.")


def split_windows(
    options: TrainingOptions, model: Path, note: Callable[[str], None]
) -> tuple[np.ndarray, list[tuple[str, np.ndarray]]]:
    """Windows to train on; what is measured on: held-out ones, and those of the check files, each with its name."""
    with Vocabulary(model, n_ctx=options.ctx) as vocabulary:

        def read(paths: Sequence[Path], n_tokens: int, n_needed: int) -> np.ndarray:
            return text_windows(vocabulary, paths, n_tokens, n_needed=n_needed, special=options.special, note=note)[0]

        windows = read(options.text, options.tokens, _MIN_WINDOWS)
        if vocabulary.bos is not None:
            windows[:, 0] = vocabulary.bos
        n_held_out = min(_MAX_HELD_OUT, max(2, round(_HELD_OUT_SHARE * len(windows))))
        checks = [(path.name, read([path], n_held_out * options.ctx, 1)) for path in options.check]
    order = np.random.default_rng(options.seed).permutation(len(windows))
    return windows[order[n_held_out:]], [("held-out windows of the text", windows[order[:n_held_out]]), *checks]


def identity(
    options: TrainingOptions, base: BaseModel, windows: np.ndarray, dtype: str, **own: str | float
) -> dict[str, Any]:
    """What a state must agree with to be of use: what all verbs have in common, and a verb's own."""
    return {
        "model": _digest(base),
        **own,
        "batch": options.batch,
        "ctx": options.ctx,
        "seed": options.seed,
        "memory": options.memory or 0.0,
        "dtype": dtype,
        "text": hashlib.sha256(windows.tobytes()).hexdigest()[:16],  # last: other options change it too
    }


def _digest(base: BaseModel) -> str:
    """Of a model's feed-forward weights."""
    digests = "".join(base.digest(i) for i in range(base.n_layer))
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


def _row_types(
    base: BaseModel, options: ReluifyOptions, note: Callable[[str], None]
) -> dict[str, GGMLQuantizationType]:
    """Types that rows are rounded to while they learn: none without --qat. All that will be written can be."""
    ffns = [base.ffn(i) for i in range(base.n_layer)]
    if options.qat is None:
        for row_type in {tensor.type for ffn in ffns for tensor in ffn.values()}:
            try:
                quantize_rows(np.zeros((1, GGML_QUANT_SIZES[row_type][0]), np.float32), row_type.name)
            except OptionError as error:
                raise OptionError(f"{base.where}: {error} Pass --qat with one.") from None
        return {}
    wished = row_type_id(options.qat)
    for n_values in sorted({tensor.ne[0] for ffn in ffns for tensor in ffn.values()}):
        row_type = derived_row_type(wished, n_values)
        quantize_rows(np.zeros((1, n_values), np.float32), row_type.name)
        if row_type != wished:
            text = f"qat: rows of {n_values} values can't be {options.qat}; they are {row_type.name.lower()}."
            if options.strict:
                raise OptionError(f"{text} --strict refuses that; leave it out to go on, or pass another --qat.")
            note(text)
    return dict.fromkeys(ffns[0], derived_row_type(wished, base.n_embd))


def layer_groups_of(
    options: TrainingOptions,
    base: BaseModel,
    device: str,
    dtype: torch.dtype,
    n_windows: int,
    note: Callable[[str], None],
) -> tuple[list[range], bool]:
    """Groups of layers that fit into memory, and whether the teacher's matrices stay there, decoded."""
    from .reluify_run import hidden_bytes, layer_groups

    limit = memory_limit(options, device)
    item = dtype.itemsize
    n_ffn = max(sum(math.prod(tensor.ne) for tensor in base.ffn(i).values()) for i in range(base.n_layer))
    n_all = sum(math.prod(base.tensor(name).ne) for name in base.tensors)
    layer_bytes = n_ffn * (16 + 2 * item)  # weight, gradient and Adam's two; copy and its gradient
    n_ff = base.ffn(0)["down"].ne[0]
    token_bytes = 40 * base.n_embd + 6 * item * n_ff  # what a layer's backward pass needs of a token
    n_tokens = options.batch * options.ctx
    n_vocab = base.tensor("token_embd.weight").rows_shape[0]
    fixed = 12 * n_vocab * 512 + 2 * item * n_vocab * base.n_embd
    whole = fixed + base.n_layer * layer_bytes + n_all * item + n_tokens * base.n_layer * token_bytes
    if whole <= limit:
        return [range(base.n_layer)], True
    n_per_group = int((limit - fixed - n_tokens * token_bytes - n_ffn * item) // layer_bytes)
    if n_per_group < 1:
        raise OptionError(
            f"memory: {limit / 2**30:.1f} GiB; one layer needs {(fixed + n_tokens * token_bytes + layer_bytes + n_ffn * item) / 2**30:.1f} GiB; "
            "pass a larger --memory, or a smaller --batch or --ctx."
        )
    groups = layer_groups(base.n_layer, min(n_per_group, base.n_layer - 1))
    text = (
        f"memory: all layers at once and the end-to-end stage need {whole / 2**30:.1f} GiB, {limit / 2**30:.1f} GiB may be used: "
        f"{len(groups)} groups of layers are trained locally, one after the other, with "
        f"{hidden_bytes(n_windows, options.ctx, base.n_embd) / 1e9:.1f} GB of hidden states on disk (fewer --tokens: less); "
        "for the end-to-end stage pass a larger --memory."
    )
    if options.strict:
        raise OptionError(f"{text} --strict refuses that; leave it out to go on.")
    note(text)
    return groups, False


def memory_limit(options: TrainingOptions, device: str) -> float:
    """Bytes that may be used."""
    import torch

    if options.memory is not None:
        return options.memory * 2**30
    return _MEMORY_SHARE * (torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory_bytes())


def step_options(options: TrainingOptions) -> dict[str, Any]:
    """Values of RunOptions that are a command line's own."""
    return {
        "batch": options.batch,
        "seconds": None,
        "n_steps": options.steps,
        "lr": options.lr,
        "end_to_end_lr": options.end_to_end_lr,
        "seed": options.seed,
    }


def _training_seconds(options: TrainingOptions, run: Run, n_models: int) -> float:
    """Of --hours what the training may take: the rest is for the output, its profile and the checks."""
    base = run.graph.base
    n_bytes = sum(base.tensor(name).n_bytes for name in base.tensors)
    n_windows = n_models * len(run.held_out) * (1 + len(options.check)) + profile_windows(options, len(run.windows))
    finishing = _FINISHING_FACTOR * n_windows * run.window_seconds + n_bytes / _WRITTEN_BYTES_PER_SECOND
    finishing = max(finishing, _LEAST_FINISHING_SECONDS)
    seconds = options.hours * 3600.0 - finishing
    if seconds < finishing:
        raise OptionError(
            f"hours: {options.hours:g}; writing and measuring the result takes {finishing / 3600:.4f} alone; expected several times that; "
            "pass more --hours."
        )
    return seconds


def profile_windows(options: TrainingOptions, n_windows: int) -> int:
    """Windows that a profile's tokens are."""
    from .profile_activations import ProfileOptions

    return max(1, min(ProfileOptions.tokens // options.ctx, n_windows))


# ---- Outputs -------------------------------------------------------------------------------------------------------


def write_outputs(
    options: TrainingOptions,
    base: BaseModel,
    run: Run,
    steps: Steps,
    note: Callable[[str], None],
    *,
    name: str,
    activation: str | None,
    qat: str | None = None,
    down_type: str | None = None,
) -> Plan | None:
    """Writes a trained model and its plan; both are complete before either gets its name.

    Args:
        options: what to do.
        base: model with the other tensors.
        run: finished.
        steps: progress.
        note: receives notes.
        name: of the model.
        activation: of the plan; None: no plan is made.
        qat: type of the rows; None: those of base.
        down_type: type of neuron-major down rows in the plan; None: it has none.

    Returns:
        The plan as written.
    """
    from .profile_activations import ProfileOptions, make_profile

    n_threads = run.graph.n_threads
    out = options.out
    with tempfile.TemporaryDirectory(prefix="output-", dir=run.folder.path) as temporary:
        model, plan_path = Path(temporary) / out.name, Path(temporary) / options.plan.name
        with steps("writing", 100) as step:
            write_model(base, model, run.folder.read_layer, name, qat, n_threads, step)
        if activation is None:
            model.replace(out)
            return None
        profile = make_profile(
            ProfileOptions(
                model=model,
                text=options.text,
                out=plan_path,
                activation=activation,
                tokens=profile_windows(options, len(run.windows)) * options.ctx,
                ctx=options.ctx,
                threads=options.threads,
                special=options.special,
                keeps_state=False,
                down_type=down_type,
                down_rows=lambda i: run.folder.read_layer(i)["down"].numpy(),
            ),
            steps,
            lambda text: note(text.replace(str(plan_path), str(options.plan)).replace(str(model), str(out))),
        )
        plan_path.replace(options.plan)
        model.replace(out)
    return replace(profile.plan, path=options.plan)


def write_model(
    base: BaseModel,
    path: Path,
    read_layer: Callable[[int], dict[str, torch.Tensor]],
    name: str,
    qat: str | None,
    n_threads: int,
    step: Callable[[], None],
) -> None:
    """Writes a model with other feed-forward weights; everything else is the model's, byte by byte.

    Args:
        base: the model.
        path: the file; the caller renames it.
        read_layer: layer -> `gate`, `up`, `down` (n_ff, n_embd), neuron-major, and their biases.
        name: of the model.
        qat: type of the rows; None: those of the model.
        n_threads: that round rows.
        step: called 100 times.
    """
    sources = []
    for i in range(base.n_layer):
        for part, tensor in base.ffn(i).items():
            n_rows, n_values = tensor.rows_shape
            row_type = tensor.type if qat is None else derived_row_type(row_type_id(qat), n_values)

            def data(i: int = i, part: str = part, row_type: GGMLQuantizationType = row_type) -> np.ndarray:
                values = read_layer(i)[part].numpy()
                values = np.ascontiguousarray(values.T if part == "down" else values)
                return quantize_rows(values, row_type.name, n_threads=n_threads).reshape(-1)

            sources.append(TensorSource.matrix(tensor.name, row_type, n_rows, n_values, data))
            bias = tensor.name.replace("weight", "bias")
            if bias in base.tensors:
                shape = base.tensor(bias)

                def bias_data(i: int = i, part: str = part) -> np.ndarray:
                    return read_layer(i)[f"{part}_bias"].numpy().reshape(-1).view(np.uint8)

                sources.append(
                    TensorSource(bias, GGMLQuantizationType.F32, shape.ne, 4 * math.prod(shape.ne), bias_data)
                )
    keys = {"general.name": string_entry("general.name", name)}
    if qat in FILE_TYPES:
        keys["general.file_type"] = u32_entry("general.file_type", int(FILE_TYPES[qat]))
    write_changed(base, path, keys, sources, percent(step))


def perplexities(
    options: TrainingOptions,
    models: Sequence[tuple[Path, Path | None, str]],
    texts: Sequence[tuple[str, np.ndarray]],
    steps: Steps,
) -> list[tuple[str, list[float]]]:
    """Perplexity of files as llama.cpp runs them.

    Args:
        options: what to do.
        models: each a model, its plan if it has one, and the mode that the plan runs in.
        texts: each a name, and (n, ctx) int32.
        steps: progress.

    Returns:
        For each text its name, and the perplexity of each model.
    """
    from .distill import MAX_LOSS

    measured: list[tuple[str, list[float]]] = [(name, []) for name, _ in texts]
    n_windows = sum(len(windows) for _, windows in texts)
    for model, plan, sparsity in models:
        how = {"n_ctx": options.ctx, "n_threads": options.threads, "sparsity": sparsity, "note": lambda text: None}
        with Runner(plan, model, **how) as runner, steps("measuring", n_windows) as step:
            for (_, windows), (_, found) in zip(texts, measured):
                likelihoods = []
                for window in windows:
                    likelihoods.append(runner.likelihood(window))
                    step()
                found.append(math.exp(min(sum(likelihoods) / len(likelihoods), MAX_LOSS)))
    return measured


# ---- Command line --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer reluify`."""
    defaults = {field.name: field.default for field in fields(ReluifyOptions)}
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="a GGUF, or a Hugging Face folder")
    add_hub_arguments(parser)
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="plain text, UTF-8, of the kind the model is for",
    )
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="OUT.gguf", help="the sparse model; its plan goes beside it"
    )
    parser.add_argument(
        "--activation", choices=ACTIVATIONS, default=defaults["activation"], help="(default: %(default)s)"
    )
    parser.add_argument(
        "--density",
        type=arguments.share,
        default=defaults["density"],
        metavar="SHARE",
        help="active neurons to aim at in each layer (default: %(default)s)",
    )
    parser.add_argument(
        "--qat",
        type=str.lower,
        metavar="TYPE",
        help="quantization-aware: rows are rounded to this type while they learn (default: not; the output has the model's types)",
    )
    parser.add_argument(
        "--start",
        type=Path,
        metavar="EARLIER.gguf",
        help="go on from the result of an earlier run, end to end, with other text or more hours; MODEL stays the original",
    )
    add_training_arguments(parser, defaults)


def add_training_arguments(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    """Arguments of TrainingOptions but model, text and output.

    Args:
        parser: of a verb.
        defaults: of its options, by name.
    """
    parser.add_argument(
        "--check", type=Path, nargs="+", default=[], metavar="FILE", help="other text to measure on at the end"
    )
    parser.add_argument(
        "--hours", type=float, default=defaults["hours"], help="to take in all, over all stops (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=arguments.count_of, help="train so many steps instead (of each group of layers)"
    )
    parser.add_argument(
        "--tokens",
        type=arguments.count_of,
        default=defaults["tokens"],
        help="of the text, at most (default: %(default)s)",
    )
    parser.add_argument(
        "-c", "--ctx", type=int, default=defaults["ctx"], help="tokens per window (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=arguments.count_of, default=defaults["batch"], help="windows per step (default: %(default)s)"
    )
    parser.add_argument(
        "--lr", type=float, default=defaults["lr"], help="peak learning rate of the local stages (default: %(default)s)"
    )
    parser.add_argument(
        "--end-to-end-lr",
        type=float,
        default=defaults["end_to_end_lr"],
        help="of the last stage (default: %(default)s)",
    )
    parser.add_argument(
        "--special", action="store_true", help="the text holds the model's special tokens, e.g. of its chat template"
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="to use at most; a large model's layers are trained in groups (default: most of what is free)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default=defaults["device"], help="(default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "f32", "bf16"),
        default=defaults["dtype"],
        help="of matrix products (default: %(default)s: bf16 where it is fast)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile blocks (torch.compile): up to twice as fast, after a minute or two; needs a C++ compiler",
    )
    parser.add_argument("-t", "--threads", type=arguments.count_of, help="default: physical cores allowed")
    parser.add_argument("--seed", type=int, default=defaults["seed"], help="(default: %(default)s)")
    parser.add_argument(
        "--plot", type=Path, metavar="OUT.png", help="picture of perplexity and density (default: beside the model)"
    )
    parser.add_argument("--no-plot", action="store_true", help="no picture")
    parser.add_argument("--resume", action="store_true", help="go on where a stopped run ended")
    parser.add_argument("--keep", action="store_true", help="keep the run's folder: float weights, log")
    parser.add_argument("--strict", action="store_true", help="a fallback is an error instead of a note")


def _options(args: argparse.Namespace) -> ReluifyOptions:
    """The options of a command line, checked."""
    arguments.need_packages("reluify", "train", "torch")
    if args.qat:
        row_type_id(args.qat)
    is_folder = args.model is not None and args.model.is_dir()
    model = Path(resolve_checkpoint(args) if is_folder else resolve_model(args))
    return ReluifyOptions(**training_values(args, model, ReluifyOptions))


def training_values(args: argparse.Namespace, model: Path, kind: type[TrainingOptions]) -> dict[str, Any]:
    """Values of a verb's options, checked.

    Args:
        args: the parsed command line.
        model: the model.
        kind: of the options.

    Raises:
        OptionError: one that can't be used.
    """
    arguments.check_run(args)
    out = args.out
    if not out.name.endswith(".gguf") or out.name.endswith(SIDECAR_SUFFIX):
        raise OptionError(f"out: {out}; expected a name that ends in .gguf, for a stock GGUF; rename it.")
    if not out.parent.is_dir():
        raise OptionError(f"out: {out.parent} isn't a folder; expected one; make it first.")
    for name in ("hours", "lr", "end_to_end_lr", "memory"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise OptionError(f"{name.replace('_', '-')}: {value}; expected more than 0; pass another number.")
    if args.seed < 0:
        raise OptionError(f"seed: {args.seed}; expected 0 or more; pass another number.")
    plot = None if args.no_plot else args.plot or out.with_suffix(".png")
    if plot is not None:
        arguments.need_packages("plot", "plot", "matplotlib", otherwise=" or pass --no-plot")
    values = {field.name: getattr(args, field.name) for field in fields(kind)}
    return {**values, "model": model, "text": tuple(args.text), "check": tuple(args.check), "plot": plot}


@contextmanager
def training_progress() -> Iterator[tuple[Steps, Callable[[Run, dict[str, Any] | None], None]]]:
    """Progress bars on stderr, and a line per check of a training on stdout.

    Yields:
        What starts a bar, and the training's report.
    """
    with progress_steps() as steps, steps("training", 1000) as step:
        n_told = 0

        def report(run: Run, entry: dict[str, Any] | None) -> None:
            nonlocal n_told
            while n_told < int(1000 * run.progress()):
                n_told += 1
                step()
            if entry is not None:
                print(log_line(entry, run.state.teacher_perplexity), flush=True)

        yield steps, report


def run(args: argparse.Namespace) -> int:
    """`powerinfer reluify`: progress to stderr, a line per check and the result to stdout.

    Args:
        args: the parsed command line.

    Returns:
        The exit code.
    """
    options = _options(args)
    with training_progress() as (steps, report):
        result = reluify(options, steps, report, note_once())
    print(
        f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB, {options.activation}, density {result.density:.3f}; plan: {options.plan}"
    )
    for found in result.measured:
        print(
            f"perplexity, {found.name}: {found.teacher:.3f} -> {found.student:.3f} ({found.student / found.teacher:.3f} x)"
        )
    print(f"{result.seconds / 3600:.2f} hours. Next: powerinfer train {options.out}, powerinfer run {options.out}.")
    if options.plot is not None:
        print(f"picture: {options.plot}")
    return 0


def log_line(entry: dict[str, Any], teacher_perplexity: float) -> str:
    """One check of a training, as a line."""
    seconds, densities, wished = round(entry["seconds"]), entry["density"], entry["wished_density"]
    line = (
        f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} {entry['stage']:<10} {entry['tokens'] / 1e6:6.3f} M tokens, "
        f"loss {entry['loss']:.4f}, perplexity {entry['perplexity']:.3f} ({entry['perplexity'] / teacher_perplexity:.3f} x)"
    )
    if wished:
        line += (
            f", density {sum(densities) / len(densities):.3f} ({min(densities):.3f} to {max(densities):.3f}; "
            f"wished {sum(wished) / len(wished):.3f})"
        )
    return line
