"""`powerinfer inspect`: what any GGUF or plan says, per layer, and why a layer isn't covered."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from rich import box
from rich.console import Console
from rich.table import Table

from powerinfer_py import format as pi_format
from powerinfer_py.errors import FormatError, OptionError, PlanError
from powerinfer_py.gguf_file import row_type_name
from powerinfer_py.hub import add_hub_arguments, resolve_model

from .arguments import need_packages

_FLOAT_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
# Share of activations that the "hot" column counts neurons for.
HOT_SHARE = 0.8
_WIDTH = 100


@dataclass(frozen=True)
class InspectOptions:
    """What `inspect` is to show.

    Attributes:
        file: any GGUF or plan.
        base: the plan's base model; None: embedded, or beside it.
        json: print JSON instead of tables.
        plot: PNG of the neurons' share of activations; None: no picture.
    """

    file: Path
    base: Path | None = None
    json: bool = False
    plot: Path | None = None


@dataclass(frozen=True)
class LayerReport:
    """One layer. Sizes in bytes; what isn't known is None.

    Attributes:
        n_ff: neurons, 0 when there is no plain FFN.
        covered: whether the plan computes it (of a stock model: whether a plan could).
        reason: why it isn't covered.
        types: ggml types of gate, up and down as `q4_0`, or `q4_0/q4_0/q6_K` where they differ.
        ffn_bytes: of gate, up and down in the base model.
        density: down rows used / n_ff while profiling.
        hot_neurons: share of neurons that do HOT_SHARE of all activations.
        threshold: on |act(gate)|.
        product_threshold: on |act(gate) * up| * norm(down row).
        activation_param: FATReLU's cut.
        predictor: its kind.
        rank: of the predictor.
        recall: share of truly active neurons that it keeps.
        candidate_density: gate rows read / n_ff with it.
        predictor_bytes: fc1 and fc2.
        statistics_bytes: order and frequencies.
        down_t_type: type of the neuron-major down projection, stored or derived at load.
        down_t_stored_bytes: that it takes in the file, 0 when it is derived.
        down_t_derived_bytes: that it takes in memory beyond what the base's down has, 0 when it is stored.
    """

    n_ff: int = 0
    covered: bool = False
    reason: str = ""
    types: str = ""
    ffn_bytes: int | None = None
    density: float | None = None
    hot_neurons: float | None = None
    threshold: float | None = None
    product_threshold: float | None = None
    activation_param: float | None = None
    predictor: str | None = None
    rank: int | None = None
    recall: float | None = None
    candidate_density: float | None = None
    predictor_bytes: int = 0
    statistics_bytes: int = 0
    down_t_type: str | None = None
    down_t_stored_bytes: int = 0
    down_t_derived_bytes: int = 0


@dataclass(frozen=True)
class Report:
    """All of a file.

    Attributes:
        file: its path.
        kind: `model`, `sidecar` or `packed`.
        architecture: of the base model.
        n_embd: width.
        activation: e.g. `silu, gated`; empty for a stock model.
        base: path of the base model; empty when it wasn't found.
        notes: what isn't shown because the base model isn't there.
        problems: why the base model isn't the plan's.
        loss: the stored loss in one sentence.
        profile: what the statistics come from.
        model_bytes: all weights of the base model, FFN included; None when it wasn't found.
        sidecar: the plan beside a stock model; empty when there is none.
        layers: one per layer.
    """

    file: str
    kind: str
    architecture: str
    n_embd: int
    activation: str
    base: str
    notes: tuple[str, ...]
    problems: tuple[str, ...]
    loss: str
    profile: str
    model_bytes: int | None
    sidecar: str
    layers: tuple[LayerReport, ...]


def inspect(file: Path, base: Path | None = None) -> Report:
    """Reads a GGUF or a plan.

    Args:
        file: any language model's GGUF, or an extended GGUF.
        base: the plan's base model; None: embedded, or beside it.

    Returns:
        What it says. A base model that is missing or another one is a line in the report, not an error.

    Raises:
        FormatError: the file is damaged.
        OptionError: a base was named for a file that isn't a plan.
    """
    if not pi_format.is_extended(file):
        if base is not None:
            raise OptionError(
                f"--base: {base}; expected a plan to use it with, but {file} is a stock model; leave it out."
            )
        return _inspect_model(file)
    plan = pi_format.read_plan(file)
    notes, problems = [], []
    model = None
    try:
        model = plan.open_base(base)
    except PlanError as error:
        problems.append(str(error))
    except FormatError as error:
        notes.append(f"nothing is known of the base model: {error}")
    return Report(
        file=str(file),
        kind="packed" if plan.is_embedded else "sidecar",
        architecture=plan.base_architecture,
        n_embd=plan.n_embd,
        activation=f"{plan.activation}, {'gated' if plan.gated else 'ungated'}",
        base=model.where if model else "",
        notes=tuple(notes),
        problems=tuple(problems),
        loss=loss_sentence(plan),
        profile=_profile_sentence(plan),
        model_bytes=_model_bytes(model) if model else None,
        sidecar="",
        layers=tuple(_plan_layer(plan, layer, model, i) for i, layer in enumerate(plan.layers)),
    )


def loss_sentence(plan: pi_format.Plan) -> str:
    """What a plan's thresholds cost in quality, in one sentence.

    Args:
        plan: the plan.

    Returns:
        The sentence.
    """
    has_thresholds = any(layer.threshold or layer.product_threshold for layer in plan.layers)
    if not has_thresholds:
        return "The plan has no thresholds: only exact zeros are skipped, without loss."
    if plan.loss is None:
        return "The loss that the plan's thresholds cost was not measured."
    return f"Calibration measured that the plan's thresholds change perplexity by {100 * plan.loss:+.2f} %."


def plot_activations(plan: pi_format.Plan, output: Path) -> None:
    """Draws the cumulative share of activations against the share of neurons, hot first, one line per layer.

    Args:
        plan: a plan with frequencies.
        output: the PNG to write.

    Raises:
        OptionError: no frequencies in the plan, or matplotlib isn't installed.
    """
    curves = [(i, _cumulative(layer)) for i, layer in enumerate(plan.layers) if layer.neuron_frequency is not None]
    if not curves:
        raise OptionError(
            f"--plot: {plan.path} has no neuron frequencies; expected a profiled plan; make one (powerinfer profile)."
        )
    need_packages("--plot", "plot", "matplotlib")
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, curve in curves:
        axes.plot(
            np.linspace(0, 1, len(curve)),
            curve,
            color=colormaps["viridis"](i / max(plan.n_layer - 1, 1)),
            linewidth=1,
            label=f"{i}",
        )
    axes.axhline(HOT_SHARE, color="gray", linewidth=0.5, linestyle="--")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="share of neurons, hot first", ylabel="cumulative share of activations")
    axes.legend(title="layer", fontsize=6, ncols=1 + len(curves) // 16)
    with pi_format.atomic_path(output) as temporary:
        figure.savefig(temporary, format="png", dpi=150)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer inspect`."""
    parser.add_argument("model", type=Path, nargs="?", metavar="FILE", help="any GGUF or plan")
    add_hub_arguments(parser)
    parser.add_argument(
        "--base", type=Path, default=InspectOptions.base, help="the plan's base model (default: beside it)"
    )
    parser.add_argument("--json", action="store_true", default=InspectOptions.json, help="print JSON")
    parser.add_argument(
        "--plot",
        type=Path,
        default=InspectOptions.plot,
        metavar="OUT.png",
        help="picture of the neurons' share of activations",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `powerinfer inspect`.

    Args:
        args: parsed by add_arguments.

    Returns:
        The exit code; 1 when the base model isn't the plan's.
    """
    options = InspectOptions(Path(resolve_model(args)), args.base, args.json, args.plot)
    report = inspect(options.file, options.base)
    if options.plot is not None:
        if report.kind == "model":
            raise OptionError(f"--plot: {options.file} is a stock model; expected a profiled plan; give that.")
        plot_activations(pi_format.read_plan(options.file), options.plot)
    if options.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        console = Console()
        # piped output is as wide as it needs to be, not 80 columns
        _print(report, console if console.is_terminal else Console(width=_WIDTH))
    return 1 if report.problems else 0


def _inspect_model(file: Path) -> Report:
    model = pi_format.BaseModel(file)
    sidecar = pi_format.find_sidecar(file)
    layers = []
    for i in range(model.n_layer):
        reason = model.why_not_covered(i)
        layers.append(LayerReport(covered=not reason, reason=reason, **_base_fields(model, i)))
    return Report(
        file=str(file),
        kind="model",
        architecture=model.architecture,
        n_embd=model.n_embd,
        activation="",
        base=str(file),
        notes=(),
        problems=(),
        loss="",
        profile="",
        model_bytes=_model_bytes(model),
        sidecar=str(sidecar or ""),
        layers=tuple(layers),
    )


def _model_bytes(model: pi_format.BaseModel) -> int:
    return sum(file.tensors[name].n_bytes for name, file in model.tensors.items())


def _base_fields(model: pi_format.BaseModel, i_layer: int) -> dict[str, Any]:
    """What the base model says about a layer's FFN."""
    ffn = model.ffn(i_layer)
    types = [tensor.type_name for tensor in ffn.values()]
    return {
        "n_ff": ffn["down"].ne[0] if "down" in ffn else 0,
        "types": types[0] if len(set(types)) == 1 else "/".join(types),
        "ffn_bytes": sum(tensor.n_bytes for tensor in ffn.values()),
    }


def _plan_layer(
    plan: pi_format.Plan, layer: pi_format.PlanLayer, model: pi_format.BaseModel | None, i_layer: int
) -> LayerReport:
    base = _base_fields(model, i_layer) if model else {"n_ff": layer.n_ff}
    if not layer.n_ff:
        reason = (
            (model.why_not_covered(i_layer) or "left out by the plan") if model else "unknown without the base model"
        )
        return LayerReport(covered=False, reason=reason, **base)
    stored = layer.ffn_down_t
    down_t_type, derived_bytes = None, 0
    if stored is not None:
        down_t_type = row_type_name(stored.row_type)
    elif model is not None:
        down = model.ffn(i_layer)["down"]
        row_type = (
            down.type
            if down.type in _FLOAT_TYPES
            else pi_format.derived_row_type(GGMLQuantizationType.Q8_0, plan.n_embd)
        )
        block, block_bytes = GGML_QUANT_SIZES[row_type]
        down_t_type = row_type_name(row_type)
        derived_bytes = plan.n_embd // block * block_bytes * layer.n_ff - down.n_bytes
    has_predictor = layer.predictor != "none"
    return LayerReport(
        covered=True,
        density=layer.profile_density if layer.profile_tokens else None,
        hot_neurons=_hot_neurons(layer),
        threshold=layer.threshold or None,
        product_threshold=layer.product_threshold or None,
        activation_param=layer.activation_param or None,
        predictor=layer.predictor if has_predictor else None,
        rank=layer.fc1.n_rows if has_predictor else None,
        recall=layer.predictor_recall or None,
        candidate_density=layer.predictor_candidate_density or None,
        predictor_bytes=layer.fc1.data.nbytes + layer.fc2.data.nbytes if has_predictor else 0,
        statistics_bytes=sum(a.nbytes for a in (layer.neuron_order, layer.neuron_frequency) if a is not None),
        down_t_type=down_t_type,
        down_t_stored_bytes=stored.data.nbytes if stored is not None else 0,
        down_t_derived_bytes=derived_bytes,
        **base,
    )


def _cumulative(layer: pi_format.PlanLayer) -> np.ndarray:
    """(n_ff + 1,) share of activations of the first 0, 1, .. n_ff neurons, the most frequent first."""
    frequency = np.sort(layer.neuron_frequency.astype(np.float64))[::-1]
    total = frequency.sum()
    return np.concatenate([[0.0], np.cumsum(frequency) / total if total else np.linspace(0, 1, len(frequency) + 1)[1:]])


def _hot_neurons(layer: pi_format.PlanLayer) -> float | None:
    if layer.neuron_frequency is None:
        return None
    return float(np.searchsorted(_cumulative(layer), HOT_SHARE)) / layer.n_ff


def _profile_sentence(plan: pi_format.Plan) -> str:
    n_tokens = max((layer.profile_tokens for layer in plan.layers), default=0)
    if not n_tokens:
        return ""
    return f"{n_tokens} tokens" + (f" of {plan.corpus}" if plan.corpus else "")


# ---- Tables --------------------------------------------------------------------------------------------------------


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes >= 2**20 else f"{n_bytes / 2**10:.1f} KiB"


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


# attribute of LayerReport -> (column title, how a value is shown); columns without a value are left out
_COLUMNS = {
    "n_ff": ("n_ff", str),
    "types": ("types", str),
    "ffn_bytes": ("FFN MiB", lambda n_bytes: f"{n_bytes / 2**20:.2f}"),
    "density": ("density", _share),
    "hot_neurons": (f"{HOT_SHARE:.0%} by", _share),
    "activation_param": ("cut", "{:.3g}".format),
    "threshold": ("threshold", "{:.3g}".format),
    "product_threshold": ("product", "{:.3g}".format),
    "predictor": ("predictor", str),
    "recall": ("recall", _share),
    "candidate_density": ("cand.", _share),
}


def _print(report: Report, console: Console) -> None:
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in _facts(report):
        facts.add_row(name, text)
    console.print(facts)

    layers = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    layers.add_column("layer", justify="right")
    values = [dataclasses.asdict(layer) for layer in report.layers]
    for layer in values:
        if layer["predictor"]:
            layer["predictor"] = f"{layer['predictor']} {layer['rank']}"
    shown = [name for name in _COLUMNS if any(layer[name] not in (None, "", 0) for layer in values)]
    for name in shown:
        layers.add_column(
            _COLUMNS[name][0], justify="left" if name in ("types", "predictor") else "right", overflow="fold"
        )
    for i, layer in enumerate(values):
        layers.add_row(str(i), *("" if layer[name] in (None, "") else _COLUMNS[name][1](layer[name]) for name in shown))
    console.print(layers)
    lines = [f"not covered: {text}" for text in _not_covered(report)]
    lines += [f"note: {note}" for note in report.notes] + [f"problem: {problem}" for problem in report.problems]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _not_covered(report: Report) -> list[str]:
    """One line per reason, with the layers that it holds for."""
    layers: dict[str, list[int]] = {}
    for i, layer in enumerate(report.layers):
        if not layer.covered:
            layers.setdefault(layer.reason.replace(f"blk.{i}.", "blk.*."), []).append(i)
    return [f"{_ranges(numbers)}: {reason}" for reason, numbers in layers.items()]


def _ranges(numbers: list[int]) -> str:
    """`layer 3`, or `layers 0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{'layers' if len(numbers) > 1 else 'layer'} {text}"


def _facts(report: Report) -> list[tuple[str, str]]:
    """(name, text) of what isn't per layer."""
    kinds = {"model": "stock GGUF", "sidecar": "plan (sidecar)", "packed": "plan with its base model"}
    n_covered = sum(layer.covered for layer in report.layers)
    facts = [
        ("file", report.file),
        ("kind", kinds[report.kind]),
        ("model", f"{report.architecture}, {len(report.layers)} layers of width {report.n_embd}"),
    ]
    if report.kind == "model":
        facts.append(("plan", report.sidecar or "none beside it; powerinfer profile makes one"))
        facts.append(("covered", f"a plan can cover {n_covered} of {len(report.layers)} layers"))
    else:
        facts.append(("base", report.base or "not found"))
        facts.append(("FFN", report.activation))
        facts.append(("covered", f"{n_covered} of {len(report.layers)} layers"))
        facts.append(("loss", report.loss))
        if report.profile:
            facts.append(("profile", report.profile))
    return facts + [("size", text) for text in _sizes(report)]


def _sizes(report: Report) -> list[str]:
    """Sizes by kind, one per line."""

    def total(name: str) -> int:
        return sum(getattr(layer, name) or 0 for layer in report.layers)

    lines = []
    if report.model_bytes is not None:
        ffn = total("ffn_bytes")
        lines.append(f"{_size(ffn)} FFN, {_size(report.model_bytes - ffn)} other weights of the base model")
    if report.kind != "model":
        lines.append(
            f"{_size(total('statistics_bytes'))} order and frequencies, {_size(total('predictor_bytes'))} predictors"
        )
    types = ", ".join(sorted({layer.down_t_type for layer in report.layers if layer.down_t_type}))
    if stored := total("down_t_stored_bytes"):
        lines.append(f"{_size(stored)} duplicated: neuron-major down projection ({types}), stored beside the base's")
    if derived := total("down_t_derived_bytes"):
        lines.append(
            f"{_size(derived)} more memory than the base's down: it is derived at load, neuron-major ({types})"
        )
    return lines
