"""`powerinfer simulate`: tokens per second of a model on a machine that needn't be at hand, by counting bytes and waiting times.

Decoding one token at a time. Nothing is measured: what a hardware file and the model's statistics don't say, it doesn't know.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from powerinfer_py.errors import OptionError
from powerinfer_py.format import open_files

from .arguments import count_of, device_memory, need_packages, share
from .hardware import Gpu, Hardware, Processor, find_hardware, shipped_hardware
from .model_shapes import DEFAULT_SHAPE, SHAPES, Layer, Model, Shape, file_model, shape_model
from .placement import PlacementLayer, PlacementProblem, place_greedy
from .terminal import note_once

# GPU memory that no weight can have: CUDA's context and llama.cpp's compute buffers. An assumption.
RESERVED_BYTES = 2**30

LAYER_OFFLOAD = "layer offload"
SPARSE = "+ predictor, operators"
RANDOM = "+ hybrid, random split"
SOLVED = "+ solver's split"
_WIDTH = 120


@dataclass(frozen=True)
class Engine:
    """How well an engine uses a machine.

    Attributes:
        cpu_rows: rate of single neurons' rows on the CPU, of what the hardware file says.
        predictor: time and memory of predictors, of what their parameters say.
        dense_gpu: the GPU computes every hot neuron, without a predictor (any ggml device; not CUDA).
    """

    cpu_rows: float = 1.0
    predictor: float = 1.0
    dense_gpu: bool = False


# The original's engine: fitted to its three bars of Falcon-40B (PowerInfer, SOSP'24, figure 15: 3.32, 7.80 and 11.69 times llama.cpp) with
# rtx4090.json, F16 and PAPER_N_CTX; tests/test_simulate.py fits it again. llama.cpp's own bar needs no factor: 1.12 tokens per
# second here, about 1.1 in figure 10.
PAPER_ENGINE = Engine(cpu_rows=0.684, predictor=0.325)
PAPER_N_CTX = 320  # mean context of figure 10's longest runs: 64 tokens in, 512 out
ENGINES = {"ours": Engine(), "paper": PAPER_ENGINE}


@dataclass(frozen=True)
class Bar:
    """One way to run the model.

    Attributes:
        name: of the way.
        tok_s: tokens per second.
        cpu_s: of a token, that the CPU works.
        gpu_s: of a token, that the GPU works.
        sync_s: of a token, waiting for copies between the two.
        gpu_share: of the active neurons' work that the GPU does.
        gpu_bytes: of weights and cache on the GPU.
        n_gpu_layers: layers whose attention is on the GPU.
        n_hot: neurons on the GPU, per layer.
    """

    name: str
    tok_s: float
    cpu_s: float
    gpu_s: float
    sync_s: float
    gpu_share: float
    gpu_bytes: float
    n_gpu_layers: int
    n_hot: tuple[int, ...]


def layer_seconds(layer: PlacementLayer, n_hot: int, active: float) -> tuple[float, float, float]:
    """Times of one token in one layer, whichever neurons are hot.

    Args:
        layer: the layer.
        n_hot: neurons on the GPU.
        active: expected active ones among them.

    Returns:
        Of the layer, of its CPU part, of its GPU part without sync_s.
    """
    cpu_s = (layer.n_ff - n_hot) * layer.cpu[0] + (float(layer.frequency.sum()) - active) * layer.cpu[1]
    gpu_s = n_hot * layer.gpu[0] + active * layer.gpu[1]
    return max(cpu_s, gpu_s + layer.sync_s * (n_hot != 0)), cpu_s, gpu_s


class Machine:
    """Seconds on a machine's CPU and its first GPU, as an engine uses them."""

    def __init__(self, hardware: Hardware, engine: Engine, note: Callable[[str], None]) -> None:
        """Args: the machine; how well it is used; `note` receives rates that the hardware file lacks."""
        if not hardware.gpus:
            raise OptionError(f"hardware: {hardware.name} has no GPU; expected one; pass another --hardware.")
        if len(hardware.gpus) > 1:
            note(f"{hardware.name}: only the first of its {len(hardware.gpus)} GPUs is used.")
        self.cpu, self.gpu = hardware.cpu, hardware.gpus[0]
        self.engine = engine
        self._note = note

    def read_s(self, device: Processor, parts: Mapping[str, float]) -> float:
        """Reading bytes of each row type, dense."""
        if not device.row_bytes_s:
            self._note(
                f"{device.name}: no rates of rows in the hardware file; its memory's bandwidth is used for them."
            )
            return sum(parts.values()) / device.bandwidth_bytes_s
        return sum(n_bytes / device.row_rate(row_type, self._note) for row_type, n_bytes in parts.items())

    def dense_s(self, layer: Layer, device: Processor) -> float:
        """A layer's attention and cache."""
        return self.read_s(device, layer.dense_bytes) + layer.kv_bytes / device.bandwidth_bytes_s

    def rows_s(self, layer: Layer, device: Processor) -> float:
        """All rows of one neuron, dense."""
        return sum(self.read_s(device, {row[0]: row[1]}) for row in layer.rows)

    def neuron_cost(self, layer: Layer, device: Processor) -> tuple[float, float]:
        """(neuron_s, active_s): seconds per neuron, and per active neuron."""
        if not layer.n_ff:
            return 0.0, 0.0
        on_gpu = isinstance(device, Gpu)
        scale = 1.0 if on_gpu else self.engine.cpu_rows
        first_s, *other_s = [self.read_s(device, {row[0]: row[1]}) / scale for row in layer.rows]
        if on_gpu and self.engine.dense_gpu:
            return first_s + sum(other_s), 0.0
        if layer.predictor_row is None:
            return first_s, sum(other_s)
        predictor_s = self.read_s(device, dict((layer.predictor_row,))) * self.engine.predictor
        return predictor_s, layer.candidate_ratio * first_s + sum(other_s)

    def gpu_neuron_bytes(self, layer: Layer) -> float:
        """Of one hot neuron, with its part of the predictor."""
        predictor = layer.predictor_row[1] if layer.predictor_row and not self.engine.dense_gpu else 0.0
        return layer.neuron_bytes + self.engine.predictor * predictor

    def placement_layer(self, layer: Layer) -> PlacementLayer:
        """The layer's neurons, as they are placed."""
        return PlacementLayer(
            n_ff=layer.n_ff,
            frequency=layer.frequency,
            neuron_bytes=round(self.gpu_neuron_bytes(layer)),
            cpu=self.neuron_cost(layer, self.cpu),
            gpu=self.neuron_cost(layer, self.gpu),
            sync_s=self.gpu.round_trip_s,
        )


def simulate(
    model: Model, hardware: Hardware, engine: Engine, vram_bytes: float, note: Callable[[str], None]
) -> tuple[Bar, ...]:
    """The four ways to run a model: dense by layers, sparse by layers, sparse by neurons at random, and by value.

    Args:
        model: bytes and frequencies.
        hardware: the machine; of its GPUs the first is used.
        engine: how well it is used.
        vram_bytes: GPU memory for all; what RESERVED_BYTES says goes off.
        note: receives what is assumed.

    Returns:
        LAYER_OFFLOAD, SPARSE, RANDOM, SOLVED.

    Raises:
        OptionError: no GPU, or a model that CPU and GPU memory can't hold.

    Source: the steps of PowerInfer, SOSP'24, 8.3.1.
    """
    machine = Machine(hardware, engine, note)
    if vram_bytes > machine.gpu.memory_bytes:
        note(f"{machine.gpu.name}: the VRAM budget is cut to its memory, {machine.gpu.memory_bytes / 2**30:.4g} GiB.")
    capacity = max(0.0, min(vram_bytes, machine.gpu.memory_bytes) - RESERVED_BYTES)
    if model.total_bytes > capacity + machine.cpu.memory_bytes:
        raise OptionError(
            f"{model.name}: {model.total_bytes / 2**30:.4g} GiB; expected at most what {hardware.name} can hold, "
            f"{(capacity + machine.cpu.memory_bytes) / 2**30:.4g} GiB; choose a smaller row type or another machine."
        )
    return (
        _by_layers(model, machine, capacity, LAYER_OFFLOAD, sparse=False),
        _by_layers(model, machine, capacity, SPARSE, sparse=True),
        _by_neurons(model, machine, capacity, RANDOM, solved=False),
        _by_neurons(model, machine, capacity, SOLVED, solved=True),
    )


class _Token:
    """Adds up one token: seconds of both devices and of waiting, GPU memory, and who computes the active neurons."""

    def __init__(self, model: Model, machine: Machine, capacity: float) -> None:
        self.machine = machine
        self.capacity = capacity
        self.gpu_bytes = 0.0
        self.seconds = self.cpu_s = self.gpu_s = self.sync_s = 0.0
        self.active = self.gpu_active = 0.0
        output_bytes = sum(model.output_bytes.values())
        on_gpu = self.take(output_bytes)
        self.add(on_gpu, machine.read_s(machine.gpu if on_gpu else machine.cpu, model.output_bytes))

    def take(self, n_bytes: float) -> bool:
        """Whether that much GPU memory is left; if so, it is used now."""
        fits = self.gpu_bytes + n_bytes <= self.capacity
        self.gpu_bytes += n_bytes * fits
        return fits

    def add(self, on_gpu: bool, seconds: float) -> None:
        """Work of one device while the other waits."""
        self.seconds += seconds
        self.gpu_s += seconds * on_gpu
        self.cpu_s += seconds * (not on_gpu)

    def wait(self, seconds: float) -> None:
        """Copies while both wait."""
        self.seconds += seconds
        self.sync_s += seconds

    def bar(self, name: str, n_gpu_layers: int, n_hot: Sequence[int]) -> Bar:
        return Bar(
            name=name,
            tok_s=1 / float(self.seconds),
            cpu_s=float(self.cpu_s),
            gpu_s=float(self.gpu_s),
            sync_s=float(self.sync_s),
            gpu_share=self.gpu_active / self.active if self.active else 0.0,
            gpu_bytes=self.gpu_bytes,
            n_gpu_layers=n_gpu_layers,
            n_hot=tuple(n_hot),
        )


def _by_layers(model: Model, machine: Machine, capacity: float, name: str, *, sparse: bool) -> Bar:
    """Whole layers on the GPU, from the last one on, as llama.cpp chooses them."""
    token = _Token(model, machine, capacity)
    n_hot = [0] * len(model.layers)
    n_gpu_layers = 0
    for i, layer in reversed(list(enumerate(model.layers))):
        neuron_bytes = machine.gpu_neuron_bytes(layer) if sparse else layer.neuron_bytes
        next_one = n_gpu_layers == len(model.layers) - 1 - i
        on_gpu = next_one and token.take(layer.dense_total + layer.n_ff * neuron_bytes)
        device = machine.gpu if on_gpu else machine.cpu
        active = float(layer.frequency.sum())
        token.active += active
        token.add(on_gpu, machine.dense_s(layer, device))
        if sparse:
            neuron_s, active_s = machine.neuron_cost(layer, device)
            token.add(on_gpu, layer.n_ff * neuron_s + active * active_s)
        else:
            token.add(on_gpu, machine.rows_s(layer, device) * layer.n_ff)
        if on_gpu:
            n_gpu_layers += 1
            n_hot[i] = layer.n_ff
            token.gpu_active += active
    if 0 < n_gpu_layers < len(model.layers):
        token.wait(machine.gpu.round_trip_s)
    return token.bar(name, n_gpu_layers, n_hot)


def _by_neurons(model: Model, machine: Machine, capacity: float, name: str, *, solved: bool) -> Bar:
    """Attention on the GPU, from the last layer on, then neurons: by value, or an equal share of each layer at random."""
    token = _Token(model, machine, capacity)
    n_gpu_layers = 0
    for layer in reversed(model.layers):
        if not token.take(layer.dense_total):
            break
        n_gpu_layers += 1
    for i, layer in enumerate(model.layers):
        on_gpu = i >= len(model.layers) - n_gpu_layers
        token.add(on_gpu, machine.dense_s(layer, machine.gpu if on_gpu else machine.cpu))
        if on_gpu and layer.n_ff:
            token.wait(machine.gpu.round_trip_s)  # the FFN's input to the host and its output back
    layers = [machine.placement_layer(layer) for layer in model.layers]
    left = capacity - token.gpu_bytes
    if solved:
        n_hot = place_greedy(PlacementProblem(tuple(layers), (max(0, int(left)),))).n_hot
        active = [float(layer.frequency[:n].sum()) for layer, n in zip(layers, n_hot)]
    else:
        all_bytes = sum(layer.n_ff * layer.neuron_bytes for layer in layers)
        part = min(1.0, left / all_bytes) if all_bytes else 0.0
        n_hot = [int(part * layer.n_ff) for layer in layers]
        active = [part * float(layer.frequency.sum()) for layer in layers]
    for layer, n, n_active in zip(layers, n_hot, active):
        layer_s, cpu_s, gpu_s = layer_seconds(layer, n, n_active)
        token.seconds += layer_s
        token.cpu_s += cpu_s
        token.gpu_s += gpu_s
        token.sync_s += layer.sync_s * (n > 0)
        token.active += float(layer.frequency.sum())
        token.gpu_active += n_active
        token.take(n * layer.neuron_bytes)
    return token.bar(name, n_gpu_layers, n_hot)


# ---- The verb ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulateOptions:
    """What `simulate` is to count.

    Attributes:
        hardware: a hardware file, or a shipped one's name.
        model: a GGUF or a plan; None: a shape.
        plan: the model's plan, when it isn't beside it.
        shape: name of one of SHAPES; None: only `changes`.
        changes: fields of Shape that differ from it.
        row_type: ggml type name of a shape's weights.
        predictor_type: of a shape's predictors; None: row_type.
        candidate_density: neurons that a shape's predictors let through / n_ff; None: the active ones.
        n_ctx: tokens in the cache, which is full.
        vram_budget: GiB, or 8GiB, 512MiB, 75%; None: all.
        engine: name of one of ENGINES.
        dense_gpu: the GPU computes every hot neuron.
        strict: a fallback is an error.
    """

    hardware: str
    model: str | None = None
    plan: str | None = None
    shape: str | None = None
    changes: Mapping[str, float] = field(default_factory=dict)
    row_type: str | None = None
    predictor_type: str | None = None
    candidate_density: float | None = None
    n_ctx: int = 2048
    vram_budget: str | None = None
    engine: str = "ours"
    dense_gpu: bool = False
    strict: bool = False


DEFAULT_TYPE = "f16"


def _share_or_zero(text: str) -> float:
    return 0.0 if text == "0" else share(text)


# flag, field of Shape, type of its value, help
_SHAPE_FLAGS = (
    ("--n-layer", "n_layer", count_of, "layers"),
    ("--n-embd", "n_embd", count_of, "width"),
    ("--n-ff", "n_ff", count_of, "neurons per layer"),
    ("--n-embd-kv", "n_embd_kv", count_of, "values of a token's key (default: as --n-embd)"),
    ("--n-vocab", "n_vocab", count_of, "vocabulary"),
    ("--predictor-share", "predictor_share", _share_or_zero, "parameters of all predictors / of the model; 0: none"),
)
_STATISTICS_FLAGS = (
    ("--density", "density", share, "share of active neurons (default: as the shape's paper says)"),
    ("--skew", "hot_share", share, "share of the neurons that makes up 80 %% of a layer's activations (same)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer simulate`."""
    o = SimulateOptions
    machines = ", ".join(shipped_hardware())
    parser.add_argument("model", nargs="?", help="a GGUF (its sidecar is found beside it), or a plan; or give --shape")
    parser.add_argument("--plan", help="the extended GGUF to use, when it isn't beside the model")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="a shape with its published statistics; other flags change it"
    )
    for flag, name, kind, text in (*_SHAPE_FLAGS, *_STATISTICS_FLAGS):
        parser.add_argument(flag, dest=name, type=kind, help=text)
    parser.add_argument("--gated", action=argparse.BooleanOptionalAction, help="whether the FFN has a gate")
    parser.add_argument("--type", help=f"ggml type of a shape's weights (default: {DEFAULT_TYPE})")
    parser.add_argument("--predictor-type", help="ggml type of a shape's predictors (default: as --type)")
    parser.add_argument(
        "--candidate-density",
        type=share,
        help="neurons that a shape's predictors let through / n_ff (default: the active ones only)",
    )
    parser.add_argument("--hardware", required=True, help=f"a hardware file, or one of {machines}")
    parser.add_argument("--vram-budget", help="GPU memory for all: GiB, or 8GiB, 512MiB, 75%% (default: all)")
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=count_of,
        default=o.n_ctx,
        help="tokens in the cache, which is full (default: %(default)s)",
    )
    parser.add_argument(
        "--engine",
        choices=tuple(ENGINES),
        default=o.engine,
        help="ours: as the hardware file says; paper: as fitted to the original's published bars (default: %(default)s)",
    )
    parser.add_argument(
        "--dense-gpu",
        action="store_true",
        help="the GPU computes every hot neuron, as on devices without our CUDA operators",
    )
    parser.add_argument("--strict", action="store_true", help="a fallback is an error instead of a note")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the bars")


def run(args: argparse.Namespace) -> int:
    """Runs `powerinfer simulate`.

    Args:
        args: parsed by add_arguments.

    Returns:
        The exit code.
    """
    fields = [name for _, name, _, _ in (*_SHAPE_FLAGS, *_STATISTICS_FLAGS)] + ["gated"]
    options = SimulateOptions(
        hardware=args.hardware,
        model=args.model,
        plan=args.plan,
        shape=args.shape,
        changes={name: getattr(args, name) for name in fields if getattr(args, name) is not None},
        row_type=args.type,
        predictor_type=args.predictor_type,
        candidate_density=args.candidate_density,
        n_ctx=args.ctx_size,
        vram_budget=args.vram_budget,
        engine=args.engine,
        dense_gpu=args.dense_gpu,
        strict=args.strict,
    )
    if args.plot:
        need_packages("plot", "plot", "matplotlib", otherwise=" or leave --plot out")
    note = _refuse if options.strict else note_once()
    hardware = find_hardware(options.hardware)
    model = load_model(options)
    engine = replace(ENGINES[options.engine], dense_gpu=options.dense_gpu)
    bars = simulate(model, hardware, engine, budget_bytes(options.vram_budget, hardware), note)
    if args.plot:
        from .plot_simulation import write_plot

        write_plot(args.plot, bars, f"{model.name} on {hardware.name}")
    if args.json:
        print(json.dumps(_json(model, hardware, options, bars), indent=2))
    else:
        _print(model, hardware, bars)
    return 0


def load_model(options: SimulateOptions) -> Model:
    """The model that the options name.

    Raises:
        OptionError: neither or both of a file and a shape, or a shape that isn't complete.
    """
    statistics = {name: options.changes.get(name) for _, name, _, _ in _STATISTICS_FLAGS}
    if options.model is not None:
        only_shapes = (options.shape, options.row_type, options.predictor_type, options.candidate_density)
        if any(value is not None for value in only_shapes) or options.changes.keys() - statistics.keys():
            raise OptionError(
                f"simulate: {options.model}, and flags of a shape; expected one of them; leave the model or the flags out."
            )
        return file_model(*open_files(options.model, options.plan), options.n_ctx, **statistics)
    if options.shape is not None:
        shape = replace(SHAPES[options.shape], **options.changes)
    else:
        needed = ("n_layer", "n_embd", "n_ff", "density", "hot_share")
        missing = [name for name in needed if name not in options.changes]
        if missing:
            flags = {name: flag for flag, name, _, _ in (*_SHAPE_FLAGS, *_STATISTICS_FLAGS)}
            raise OptionError(
                "simulate: neither a model nor a shape; expected MODEL, --shape, or a shape's flags; "
                f"give {', '.join(flags[name] for name in missing)}."
            )
        shape = Shape(**{**DEFAULT_SHAPE, "n_embd_kv": options.changes["n_embd"], **options.changes})
    row_type = options.row_type or DEFAULT_TYPE
    name = f"{options.shape or 'a model'} in {row_type}"
    predictor_type = options.predictor_type or row_type
    return shape_model(name, shape, row_type, predictor_type, options.n_ctx, options.candidate_density)


def budget_bytes(text: str | None, hardware: Hardware) -> int:
    """GPU memory that a budget's text allows.

    Args:
        text: GiB as a plain number, or 8GiB, 512MiB, 75%; None: all.
        hardware: the machine, whose first GPU counts.

    Returns:
        Bytes.

    Raises:
        OptionError: another text.
    """
    memory = hardware.gpus[0].memory_bytes if hardware.gpus else 0
    return device_memory("vram-budget", "100%" if text is None else text, memory)


def _refuse(text: str) -> None:
    raise OptionError(f"strict: {text.rstrip('.')}; expected no fallback; correct it, or leave --strict out.")


def _json(model: Model, hardware: Hardware, options: SimulateOptions, bars: Sequence[Bar]) -> dict[str, Any]:
    return {
        "model": model.name,
        "model_bytes": model.total_bytes,
        "density": model.density,
        "hardware": hardware.name,
        "source": hardware.source,
        "vram_bytes": budget_bytes(options.vram_budget, hardware),
        "n_ctx": options.n_ctx,
        "engine": options.engine,
        "dense_gpu": options.dense_gpu,
        "bars": [{**asdict(bar), "speed_up": bar.tok_s / bars[0].tok_s} for bar in bars],
    }


def _print(model: Model, hardware: Hardware, bars: Sequence[Bar]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("decoding")
    for title in (
        "tokens/s",
        "speed-up",
        "CPU ms",
        "GPU ms",
        "copies ms",
        "GPU's share",
        "GPU GiB",
        "attention",
        "hot",
    ):
        table.add_column(title, justify="right")
    n_neurons = sum(layer.n_ff for layer in model.layers)
    for bar in bars:
        table.add_row(
            bar.name,
            f"{bar.tok_s:.2f}",
            f"{bar.tok_s / bars[0].tok_s:.2f}x",
            *(f"{seconds * 1e3:.2f}" for seconds in (bar.cpu_s, bar.gpu_s, bar.sync_s)),
            f"{bar.gpu_share:.0%}",
            f"{bar.gpu_bytes / 2**30:.2f}",
            f"{bar.n_gpu_layers}/{len(model.layers)}",
            f"{sum(bar.n_hot) / n_neurons:.1%}" if n_neurons else "-",
        )
    console = Console()
    # piped output is as wide as it needs to be, not 80 columns
    console = console if console.is_terminal else Console(width=_WIDTH)
    lines = (
        f"{model.name}: {model.total_bytes / 2**30:.2f} GiB with predictors and cache, density {model.density:.1%}",
        f"{hardware.name}: {hardware.source}",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        "GPU's share: of the active neurons' work; attention: layers that have it on the GPU; hot: neurons on the GPU.",
        highlight=False,
    )
