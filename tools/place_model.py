"""`powerinfer place`: shares a budget of GPU memory out over a model's neurons, shows the split, and saves it.

What the numbers mean and how they are found stands in placement.py; this module gathers them from plan, base and hardware.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# Loads the libraries that _core is linked to.
import llama_cpp
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from rich import box
from rich.console import Console
from rich.table import Table

from powerinfer_py import _core
from powerinfer_py import format as pi_format
from powerinfer_py.bench_report import names
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.gguf_file import row_type_name

from .arguments import count_of, device_memory, need_packages, open_plan
from .hardware import Hardware, find_hardware, shipped_hardware
from .placement import (
    NeuronRows,
    Placement,
    PlacementLayer,
    PlacementProblem,
    SolveOptions,
    cost_curves,
    make_layer,
    solve,
)
from .terminal import byte_progress, note_once, progress_steps

SPLIT_VERSION = 1  # of the JSON file
_WIDTH = 100
_FLOAT_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
_KV_BYTES = 2  # F16, the default
_NEURON_VALUES_BYTES = 4 * 3  # two biases and the norm of the down row, which the core reserves for every neuron


@dataclass(frozen=True)
class PlaceOptions:
    """What `place` is to do, with the defaults."""

    model: Path  # a GGUF with its plan beside it, or a plan
    vram_budget: tuple[str, ...]  # one per device
    base: Path | None = None  # None: where the plan says
    hardware: str | None = None  # a file, or the name of a shipped one; None: measured
    ctx_size: int = 4096
    device: tuple[str, ...] = ()  # GPUs of this machine, by ggml's names; empty: those that the hardware file names
    rpc: tuple[str, ...] = ()  # host:port of servers whose devices are GPUs too
    cuda: bool = False  # the device skips inactive hot neurons
    time_limit: float = SolveOptions.time_limit_s
    gap: float = SolveOptions.gap
    outfile: Path | None = None
    save: bool = False
    plot: Path | None = None
    strict: bool = False


@dataclass(frozen=True)
class Room:
    """What a budget leaves for hot neurons.

    Attributes:
        hot_bytes: per device, memory for hot neurons.
        dense_bytes: per device, what the rest of the model takes.
        i_device: (n_layer) device of each layer's hot neurons.
    """

    hot_bytes: tuple[int, ...]
    dense_bytes: tuple[int, ...]
    i_device: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Split:
    """A placement and what it was made from.

    Attributes:
        problem: as it was solved.
        placement: the answer.
        saved: the same, as a plan keeps it.
        budget_bytes: per device, all that may be used.
        dense_bytes: per device, what the rest of the model takes.
        dense_s: seconds per token of the rest of the model, by the devices' bandwidth.
    """

    problem: PlacementProblem
    placement: Placement
    saved: pi_format.SavedPlacement
    budget_bytes: tuple[int, ...]
    dense_bytes: tuple[int, ...]
    dense_s: float

    @property
    def gpu_share(self) -> float:
        """Share of expected activations that devices compute."""
        layers = list(zip(self.problem.layers, self.placement.n_hot))
        total = sum(float(layer.frequency.sum(dtype=np.float64)) for layer, _ in layers)
        hot = sum(float(layer.frequency[:n_hot].sum(dtype=np.float64)) for layer, n_hot in layers)
        return hot / total if total else 0.0

    @property
    def token_s(self) -> float:
        """Seconds per token, as predicted."""
        return self.placement.token_s + self.dense_s


def place(
    plan: pi_format.Plan,
    base: pi_format.BaseModel,
    hardware: Hardware,
    options: PlaceOptions,
    note: Callable[[str], None],
    room: Room | None = None,
) -> Split:
    """Places a model's neurons.

    Args:
        plan: the plan.
        base: its base model.
        hardware: the machine; of its GPUs the first are used, as many as there are budgets.
        options: what to do.
        note: receives fallbacks.
        room: as `measured_room` gives it; None: estimated by `dense_bytes`.

    Returns:
        The split.

    Raises:
        OptionError: a budget that can't be, more budgets than GPUs, or cold neurons that don't fit the CPU's memory.
        PlanError: a plan that covers nothing.
    """
    n_devices = len(options.vram_budget)
    if not any(layer.n_ff for layer in plan.layers):
        raise PlanError(
            f"{plan.path}: covers no layer; expected one with neurons to place; use a model with dense FFNs."
        )
    if not 1 <= n_devices <= len(hardware.gpus):
        raise OptionError(
            f"vram-budget: {n_devices} given, {hardware.name} has {len(hardware.gpus)} GPUs; "
            "expected one per GPU that is to be used; change --vram-budget or --hardware."
        )
    if n_devices < len(hardware.gpus):
        note(f"{hardware.name}: {len(hardware.gpus) - n_devices} of its GPUs have no budget and aren't used.")
    gpus = hardware.gpus[:n_devices]
    budget = [device_memory("vram-budget", text, gpu.memory_bytes) for text, gpu in zip(options.vram_budget, gpus)]
    for i, gpu in enumerate(gpus):
        if budget[i] > gpu.memory_bytes:
            note(
                f"{gpu.name}: the budget is {options.vram_budget[i]}, the memory {_mib(gpu.memory_bytes)}; that is used."
            )
            budget[i] = gpu.memory_bytes
    if room is None:
        room = _estimated_room(plan, base, options.ctx_size, budget)
    for gpu, n, n_dense in zip(gpus, budget, room.dense_bytes):
        if n_dense > n:
            note(f"{gpu.name}: all but the FFNs takes {_mib(n_dense)} of a budget of {_mib(n)}; no neuron fits.")
    layers = tuple(
        _layer(plan, base, hardware, i, room.i_device[i], options, note) if layer.n_ff else _EMPTY
        for i, layer in enumerate(plan.layers)
    )
    problem = PlacementProblem(layers, room.hot_bytes, _host_bytes(plan, base, hardware, layers))
    placement = solve(problem, SolveOptions(options.time_limit, options.gap))
    saved = pi_format.SavedPlacement(
        budget=",".join(options.vram_budget),
        n_ctx=options.ctx_size,
        devices=tuple(gpu.name for gpu in gpus),
        hot_bytes=room.hot_bytes,
        n_hot=placement.n_hot,
        i_device=room.i_device,
        token_s=placement.token_s,
        gap=placement.gap,
        model_hash=pi_format.model_hash(plan),
        statistics_hash=pi_format.statistics_hash(plan),
    )
    dense_s = sum(n / gpu.bandwidth_bytes_s for n, gpu in zip(room.dense_bytes, gpus))
    return Split(problem, placement, saved, tuple(budget), room.dense_bytes, dense_s)


def measured_room(
    plan: pi_format.Plan, base: pi_format.BaseModel, devices: Sequence[str], options: PlaceOptions
) -> Room:
    """What a budget leaves for hot neurons on devices of this machine, by a dry run of llama.cpp.

    Args:
        plan: the plan.
        base: its base model.
        devices: names, one per budget.
        options: budget and context.

    Returns:
        The room, as a load with that budget and context has it.

    Raises:
        OptionError: a budget that can't be read.
        BudgetError: the model doesn't fit.
    """
    model_params = llama_cpp.llama_model_default_params()
    context_params = llama_cpp.llama_context_default_params()
    context_params.n_ctx = options.ctx_size
    # What Llama defaults to. Without flash attention graphs need more memory: what fits then fits with it.
    context_params.n_batch = context_params.n_ubatch = 512
    context_params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    path = str(base.files[0].path)
    with _core.Plan.open(plan.path, None if plan.base_size else path, note=lambda text: None) as opened:
        budget = _core.plan_budget(
            opened, path, ctypes.addressof(model_params), ctypes.addressof(context_params),
            budget=",".join(options.vram_budget), device=",".join(devices), reset_index=True,
        )  # fmt: skip
    dense = tuple(gpu["budget_bytes"] - n for gpu, n in zip(budget.gpus, budget.hot_bytes))
    return Room(tuple(budget.hot_bytes), dense, tuple(budget.i_device))


def _estimated_room(plan: pi_format.Plan, base: pi_format.BaseModel, n_ctx: int, budget: Sequence[int]) -> Room:
    i_device = layer_devices(plan.n_layer, budget)
    dense = dense_bytes(plan, base, n_ctx, i_device, len(budget))
    hot = tuple(max(n - n_dense, 0) for n, n_dense in zip(budget, dense))
    return Room(hot, tuple(dense), tuple(i_device[:-1]))


def layer_devices(n_layer: int, budget: Sequence[int]) -> list[int]:
    """Layers in order, each device as many as its part of the budget.

    Args:
        n_layer: layers.
        budget: (n_devices) bytes.

    Returns:
        (n_layer + 1) index into budget; the last is the output's.

    Source: llama.cpp, src/llama-model.cpp (libllama 0.5.0), load_tensors with all layers on GPUs.
    """
    ends = np.cumsum(budget, dtype=np.float64) / max(sum(budget), 1)
    return [
        min(int(np.searchsorted(ends, i / (n_layer + 1), side="right")), len(budget) - 1) for i in range(n_layer + 1)
    ]


def dense_bytes(
    plan: pi_format.Plan, base: pi_format.BaseModel, n_ctx: int, i_device: Sequence[int], n_devices: int
) -> list[int]:
    """What the model takes beside its covered FFNs: weights, and the KV cache.

    An estimate from tensor sizes and metadata; compute buffers aren't in it.

    Args:
        plan: the plan.
        base: its base.
        n_ctx: context.
        i_device: (n_layer + 1) device of each layer, and of the output.
        n_devices: devices.

    Returns:
        (n_devices) bytes.
    """
    n_bytes = [0] * n_devices
    ffn = {t.name for i, layer in enumerate(plan.layers) if layer.n_ff for t in base.ffn(i).values()}
    for name in base.tensors:
        tensor = base.tensor(name)
        match = pi_format.split_layer_name(name)
        if match is not None and match[0] < plan.n_layer:
            n_bytes[i_device[match[0]]] += 0 if name in ffn else tensor.n_bytes
        elif name != "token_embd.weight" or "output.weight" not in base.tensors:
            n_bytes[i_device[-1]] += tensor.n_bytes
    for i, n_values in enumerate(_kv_values(base, plan.n_layer)):
        n_bytes[i_device[i]] += n_ctx * n_values * _KV_BYTES
    return n_bytes


def _kv_values(base: pi_format.BaseModel, n_layer: int) -> list[int]:
    """Per layer, values of a token's key and value."""
    file, name = base.files[0], base.architecture
    n_head = file.get_int(f"{name}.attention.head_count") or 1
    found = file.get(f"{name}.attention.head_count_kv", n_head)
    n_kv = found if isinstance(found, list) and len(found) == n_layer else [found] * n_layer
    length = sum(file.get_int(f"{name}.attention.{part}_length") or base.n_embd // n_head for part in ("key", "value"))
    return [int(n) * length for n in n_kv]


_EMPTY = PlacementLayer(0, np.zeros(0, np.float32), 0, (0.0, 0.0), (0.0, 0.0))


def _layer(
    plan: pi_format.Plan,
    base: pi_format.BaseModel,
    hardware: Hardware,
    i_layer: int,
    i_device: int,
    options: PlaceOptions,
    note: Callable[[str], None],
) -> PlacementLayer:
    layer, ffn = plan.layers[i_layer], base.ffn(i_layer)
    frequency = layer.neuron_frequency
    if frequency is None:
        note(f"{plan.path}: has no neuron frequencies for some layers; all of such a layer's neurons count equally.")
        frequency = np.full(layer.n_ff, layer.profile_density or 1.0, np.float32)
    rows = [(row_type_name(ffn[name].type), ffn[name].n_bytes / layer.n_ff) for name in ("gate", "up") if name in ffn]
    predictor = None
    if layer.predictor != "none":
        n_bytes = layer.fc1.data.nbytes + layer.fc2.data.nbytes
        predictor = (row_type_name(layer.fc2.row_type), n_bytes / layer.n_ff)
    density = float(frequency.mean(dtype=np.float64))
    down = _down_row(plan, layer, ffn["down"].type)
    return make_layer(
        NeuronRows(rows[0], rows[1] if len(rows) > 1 else None, down, predictor),
        frequency,
        hardware.cpu,
        hardware.gpus[i_device],
        note,
        neuron_bytes=int(sum(n_bytes for _, n_bytes in (*rows, down))) + _NEURON_VALUES_BYTES,
        candidate_ratio=layer.predictor_candidate_density / density
        if layer.predictor_candidate_density and density
        else 1.0,
        reads_all=not options.cuda,
        i_device=i_device,
    )


def _down_row(plan: pi_format.Plan, layer: pi_format.PlanLayer, base_type: GGMLQuantizationType) -> tuple[str, float]:
    """Type and bytes of a neuron's down row: as stored in the plan, or as derived at load."""
    if layer.ffn_down_t is not None:
        row_type = layer.ffn_down_t.row_type
    elif base_type in _FLOAT_TYPES:
        row_type = base_type
    else:
        row_type = pi_format.derived_row_type(GGMLQuantizationType.Q8_0, plan.n_embd)
    block, n_bytes = GGML_QUANT_SIZES[row_type]
    return row_type_name(row_type), plan.n_embd * n_bytes / block


def _host_bytes(
    plan: pi_format.Plan, base: pi_format.BaseModel, hardware: Hardware, layers: Sequence[PlacementLayer]
) -> int | None:
    """What the CPU's memory has for cold rows; None when all rows fit."""
    embeddings = base.tensor("token_embd.weight")
    taken = embeddings.n_bytes if embeddings is not None else 0
    taken += sum(rows.data.nbytes for layer in plan.layers for rows in (layer.fc1, layer.fc2) if rows is not None)
    free = hardware.cpu.memory_bytes - taken
    return None if sum(layer.n_ff * layer.host_bytes for layer in layers) <= free else max(free, 0)


def save_placement(plan: pi_format.Plan, base: pi_format.BaseModel, saved: pi_format.SavedPlacement) -> Path:
    """Writes a plan again, with one placement more; one for the same devices' memory is replaced.

    Args:
        plan: as read.
        base: its base model, which stays embedded when it was.
        saved: the placement.

    Returns:
        The plan's path.
    """
    kept = [other for other in plan.placements if other.hot_bytes != saved.hot_bytes]
    placements = (*kept, saved)[-pi_format.MAX_PLACEMENTS :]
    with byte_progress(f"Writing {plan.path.name}") as progress:
        return pi_format.write_plan(
            replace(plan, placements=placements),
            plan.path,
            base_embedded=base if plan.is_embedded else None,
            progress=progress,
        )


def write_split(split: Split, plan: pi_format.Plan, output: Path) -> None:
    """Writes a split as JSON.

    Args:
        split: what to write.
        plan: its plan.
        output: the file.
    """
    found = {
        "format_version": SPLIT_VERSION,
        "plan": str(plan.path),
        **asdict(split.saved),
        "budget_bytes": split.budget_bytes,
        "dense_bytes": split.dense_bytes,
        "used_bytes": split.placement.used_bytes,
        "cold_s": split.placement.cold_s,
        "dense_s": split.dense_s,
        "method": split.placement.method,
        "seconds": split.placement.seconds,
        "gpu_share": split.gpu_share,
    }
    with pi_format.atomic_path(output) as temporary:
        temporary.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def plot_split(split: Split, output: Path) -> None:
    """Draws each layer's share of hot neurons and the share of its activations that they make up.

    Args:
        split: what to draw.
        output: the PNG.

    Raises:
        OptionError: matplotlib isn't installed.
    """
    need_packages("plot", "plot", "matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = [(i, x, n) for i, (x, n) in enumerate(zip(split.problem.layers, split.placement.n_hot)) if x.n_ff]
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    numbers = [i for i, _, _ in layers]
    for d, name in enumerate(split.saved.devices):
        on = [(i, n) for i, x, n in layers if x.i_device == d]
        axes.bar([i for i, _ in on], [n for _, n in on], label=f"hot, {name}")
    axes.step(numbers, [x.n_ff for _, x, _ in layers], where="mid", color="gray", linewidth=0.8, label="all")
    axes.set(
        xlabel="layer", ylabel="neurons", title=f"{split.saved.budget}: {split.gpu_share:.0%} of activations on GPUs"
    )
    shares = axes.twinx()
    shares.plot(numbers, [100 * _hot_share(x, n) for _, x, n in layers], "k.", markersize=4, label="activations")
    shares.set(ylim=(0, 105), ylabel="share of the layer's activations, %")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    with pi_format.atomic_path(output) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def _hot_share(layer: PlacementLayer, n_hot: int) -> float:
    total = float(layer.frequency.sum(dtype=np.float64))
    return float(layer.frequency[:n_hot].sum(dtype=np.float64)) / total if total else n_hot / layer.n_ff


def _mib(n_bytes: float) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"


def print_split(split: Split, console: Console) -> None:
    """Prints a split.

    Args:
        split: what to print.
        console: where to.
    """
    problem, placement = split.problem, split.placement
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("layer", "device", "hot", "of", "activations", "MiB", "CPU ms", "GPU ms"):
        table.add_column(title, justify="right")
    for i, (layer, curve, n_hot) in enumerate(zip(problem.layers, cost_curves(problem), placement.n_hot)):
        if not layer.n_ff:
            table.add_row(str(i), "", "not covered")
            continue
        k = int(np.searchsorted(curve.n_hot, n_hot))
        table.add_row(
            str(i),
            str(layer.i_device),
            str(n_hot),
            f"{n_hot / layer.n_ff:.1%}",
            f"{_hot_share(layer, n_hot):.1%}",
            f"{curve.bytes[k] / 2**20:.1f}",
            f"{1e3 * curve.cpu_s[k]:.3f}",
            f"{1e3 * curve.gpu_s[k]:.3f}",
        )
    console.print(table)
    for d, name in enumerate(split.saved.devices):
        console.print(
            f"device {d}, {name}: budget {_mib(split.budget_bytes[d])}; all but FFNs {_mib(split.dense_bytes[d])}, "
            f"hot neurons {_mib(placement.used_bytes[d])} of {_mib(problem.capacity_bytes[d])}",
            soft_wrap=True,
        )
    console.print(
        f"{sum(placement.n_hot)} of {sum(layer.n_ff for layer in problem.layers)} neurons hot, "
        f"{split.gpu_share:.1%} of expected activations on GPUs",
        soft_wrap=True,
    )
    console.print(
        f"predicted: FFNs {1e3 * placement.token_s:.3f} ms per token ({1e3 * placement.cold_s:.3f} ms without hot neurons), "
        f"all else {1e3 * split.dense_s:.3f} ms: {1 / split.token_s:.1f} tokens/s",
        soft_wrap=True,
    )
    for text in placement.notes:
        console.print(f"{text}.", soft_wrap=True)
    console.print(f"{placement.method}, gap {placement.gap:.2%}, {placement.seconds:.1f} s", soft_wrap=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer place`."""
    parser.add_argument("model", type=Path, help="a GGUF with its plan beside it, or a plan")
    parser.add_argument("--base", type=Path, help="the plan's base model (default: embedded, or beside it)")
    parser.add_argument(
        "--vram-budget",
        required=True,
        metavar="AMOUNT",
        help="GPU memory: GiB as a plain number, or 8GiB, 512MiB, 75%%; several GPUs: one each, separated by commas",
    )
    parser.add_argument(
        "--hardware",
        metavar="HW.json",
        help=f"the machine: a hardware file, or one of {', '.join(shipped_hardware())} (default: measured now)",
    )
    parser.add_argument(
        "--device", type=names, default=(), metavar="NAME", help="GPUs by ggml's name, e.g. CUDA0,CUDA1"
    )
    parser.add_argument("--rpc", type=names, default=(), metavar="HOST:PORT", help="GPUs of ggml RPC servers")
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=count_of,
        default=PlaceOptions.ctx_size,
        help="context that the budget must hold too (default: %(default)s)",
    )
    parser.add_argument(
        "--cuda", action="store_true", help="the GPU skips inactive hot neurons (a build with POWERINFER_CUDA)"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=PlaceOptions.time_limit,
        metavar="SECONDS",
        help="of the search (default: %(default)s)",
    )
    parser.add_argument(
        "--gap",
        type=float,
        default=PlaceOptions.gap,
        help="of a token's time, at which the search ends (default: %(default)s)",
    )
    parser.add_argument("-o", "--outfile", type=Path, metavar="SPLIT.json", help="write the split there")
    parser.add_argument("--save", action="store_true", help="write the split into the plan")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="picture of the hot neurons per layer")
    parser.add_argument("--strict", action="store_true", help="a fallback is an error instead of a note")


def run(args: argparse.Namespace) -> int:
    """Runs `powerinfer place`.

    Args:
        args: parsed by add_arguments.

    Returns:
        The exit code.
    """
    options = PlaceOptions(**{**vars(args), "vram_budget": tuple(args.vram_budget.split(","))})
    if options.time_limit < 0 or not 0 <= options.gap < 1:
        raise OptionError(
            f"time-limit {options.time_limit:g} s, gap {options.gap:g}; expected 0 or more, and 0 to 1; change them."
        )
    if options.plot is not None:
        need_packages("plot", "plot", "matplotlib")
    plan, base = open_plan(options.model, options.base)
    note = _strict_note if options.strict else note_once()
    for address in options.rpc:
        _core.add_rpc_server(address)
    hardware = find_hardware(options.hardware) if options.hardware is not None else _measured(options, note)
    devices = _devices_here(hardware, options)
    if not devices:
        note(
            f"{hardware.name}: its GPUs aren't those of this machine; the memory beside the FFNs is estimated, "
            "and a load places anew where it finds less or more."
        )
    split = place(plan, base, hardware, options, note, measured_room(plan, base, devices, options) if devices else None)
    if options.outfile is not None:
        write_split(split, plan, options.outfile)
    if options.plot is not None:
        plot_split(split, options.plot)
    if options.save:
        save_placement(plan, base, split.saved)
    console = Console()
    print_split(split, console if console.is_terminal else Console(width=_WIDTH))
    return 0


def _devices_here(hardware: Hardware, options: PlaceOptions) -> tuple[str, ...]:
    """Names of the GPUs to place on, one per budget; none when they aren't in this machine."""
    here = [item["name"] for item in _core.devices() if item["type"] in ("gpu", "igpu")]
    wanted = options.device or tuple(gpu.name.split(":")[0] for gpu in hardware.gpus)
    wanted = wanted[: len(options.vram_budget)]
    return wanted if set(wanted) <= set(here) and len(wanted) == len(options.vram_budget) else ()


def _measured(options: PlaceOptions, note: Callable[[str], None]) -> Hardware:
    from .measure_hardware import MeasureOptions, measure_hardware

    with progress_steps() as steps:
        hardware, _ = measure_hardware(MeasureOptions(devices=options.device), steps, note)
    if not hardware.gpus:
        raise OptionError(
            "hardware: this machine has no GPU that can be measured; expected one, or a hardware file; pass --hardware."
        )
    return hardware


def _strict_note(text: str) -> None:
    raise OptionError(f"strict: {text.rstrip('.')}; expected no fallback; correct it, or leave --strict out.")
