"""`powerinfer profile`: run text through a model on the device and write its plan: order, frequencies, thresholds.

Text that chooses thresholds never measures them: windows of the text are shared out once, by --seed.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer_py import _core
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.format import (
    ACTIVATIONS,
    SIDECAR_SUFFIX,
    BaseModel,
    Plan,
    Rows,
    bare_plan,
    derived_row_type,
    write_plan,
)
from powerinfer_py.hub import add_hub_arguments, resolve_model

from . import arguments, plot_profile
from .calibration import Calibration, Loss, layer_row_bytes
from .profile_state import ProfileState
from .ray_tasks import Cluster, RayRuns, add_ray_arguments, check_ray
from .row_types import row_type_id, rows_of
from .terminal import Steps, note_once, progress_steps
from .text_runner import Runner, text_windows
from .thresholds import CALIBRATED_ACTIVATIONS
from .window_runs import LocalRuns, Mode, Runs, count_window, set_mode

# Windows whose dense outputs are kept, to measure what skipping in one layer changes.
_N_PROBE_WINDOWS = 2
# One window to choose by and one to measure with would have no standard error.
_MIN_HELD_OUT_WINDOWS = 2
_MIN_WINDOWS = _N_PROBE_WINDOWS + 3 * _MIN_HELD_OUT_WINDOWS
# Of the windows, each: those that choose the thresholds, those that measure the result.
_HELD_OUT_SHARE = 0.2
_LITTLE_SAVED = 0.1  # share of FFN bytes below which the report says that there is little to be had


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a profile, with their defaults."""

    model: Path
    text: tuple[Path, ...]
    out: Path
    check: tuple[Path, ...] = ()  # other text, on which the loss is measured too
    max_loss: float | None = 0.02  # relative increase of perplexity
    density: float | None = None  # instead of max_loss: down rows used / n_ff
    activation: str | None = None  # None: that of the architecture
    activation_param: float = 0.0  # FATReLU's cut
    tokens: int = 40960  # at most
    ctx: int = 512  # tokens per window
    threads: int | None = None  # None: physical cores allowed
    seed: int = 0
    special: bool = False  # the text holds special tokens
    down_type: str | None = None  # None: the plan stores no down rows
    down_rows: Callable[[int], np.ndarray] | None = None  # layer -> (n_ff, n_embd) float32 to round; None: the base's
    plot: Path | None = None
    resume: bool = False
    strict: bool = False
    mapped: bool = False
    keeps_state: bool = True  # when it is stopped by Ctrl-C
    ray: str | None = None  # address of a Ray cluster, or `local`: a Ray on this machine; None: without Ray
    verbose: bool = False  # Ray's own messages


@dataclass(frozen=True)
class Profile:
    """A finished profile.

    Attributes:
        plan: as written.
        loss: on text that chose nothing; None without thresholds.
        checks: what each `check` file is, and the loss on it.
        perplexity: on the text that was counted, in the mode that was counted.
        up_share: (n_layer,) up rows read / n_ff (dReLU: at least), 1 where not covered or ungated.
        row_bytes: per layer (gate, up, down) bytes of a row.
        density, candidate_density, bytes_share: of decoding token by token.
        base_share: bytes that this reads / bytes of the FFN in the base, whose down rows may be of a smaller type.
    """

    plan: Plan
    loss: Loss | None
    checks: list[tuple[str, Loss]]
    perplexity: float
    up_share: np.ndarray
    row_bytes: list[tuple[int, int, int]]
    density: float
    candidate_density: float
    bytes_share: float
    base_share: float


# ---- The whole -----------------------------------------------------------------------------------------------------


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
    if options.down_rows is not None:
        values = options.down_rows(i_layer)
    else:
        values = np.ascontiguousarray(base.rows_f32(base.ffn(i_layer)["down"].name).T)
    row_type = derived_row_type(row_type_id(options.down_type), values.shape[1])
    return rows_of(values, row_type, n_threads=options.threads or _core.physical_cores())


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
    calibrates = plan.activation in CALIBRATED_ACTIVATIONS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="powerinfer-profile-")))
        first = write_plan(plan, folder / options.out.name)

        def named(text: str) -> str:
            return text.replace(str(first), str(options.out))

        try:
            runner = Runner(
                first,
                options.model,
                n_ctx=options.ctx,
                n_threads=options.threads,
                sparsity="dense" if calibrates else "exact",
                strict=options.strict,
                mapped=options.mapped,
                note=lambda text: note(named(text)),
            )
        except PlanError as error:
            raise PlanError(named(str(error))) from None
        stack.enter_context(runner)
        windows, corpus = text_windows(
            runner,
            options.text,
            options.tokens,
            n_needed=_MIN_WINDOWS if calibrates else 1,
            special=options.special,
            note=note,
        )
        state = ProfileState(
            options.out.with_name(options.out.name + ".state.npz"),
            _identity(options, plan, windows),
            f"max_loss {options.max_loss}" if options.density is None else f"density {options.density}",
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
            runs = LocalRuns(runner)
            if options.ray is not None:
                cluster = stack.enter_context(Cluster(options.ray, runner.n_threads, note, verbose=options.verbose))
                runs = RayRuns(
                    cluster,
                    runner,
                    first.read_bytes(),
                    str(options.out),
                    base,
                    strict=options.strict,
                    mapped=options.mapped,
                )
            result = _run(options, base, plan, runner, runs, windows, corpus, state, steps, note)
        except KeyboardInterrupt:
            if not options.keeps_state:
                raise
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
        "down_type": options.down_type,
    }


def _run(
    options: ProfileOptions,
    base: BaseModel,
    plan: Plan,
    runner: Runner,
    runs: Runs,
    windows: np.ndarray,
    corpus: str,
    state: ProfileState,
    steps: Steps,
    note: Callable[[str], None],
) -> Profile:
    counted = np.random.default_rng(options.seed).permutation(len(windows))
    loss = None
    checks = []
    mode: Mode = "exact"
    values = [(0.0, 0.0)] * plan.n_layer
    up_share = np.ones(plan.n_layer)
    if plan.activation in CALIBRATED_ACTIVATIONS:
        n_held_out = max(_MIN_HELD_OUT_WINDOWS, round(_HELD_OUT_SHARE * len(windows)))
        measuring, choosing, counted = counted[:n_held_out], counted[n_held_out : 2 * n_held_out], counted[n_held_out:]
        calibration = Calibration(runner, runs, base, plan, state, steps)
        calibration.measure_layers(windows[counted[n_held_out : n_held_out + _N_PROBE_WINDOWS]])
        edges, loss = calibration.search(options.max_loss, options.density, windows, choosing, measuring)
        values = calibration.values_of(edges)
        for i, (edge, _) in zip(calibration.covered, edges):
            up_share[i] = 1.0 - calibration.curves[i].up_saved[edge] if plan.gated else 1.0
        for path in options.check:
            others, name = text_windows(
                runner,
                [path],
                n_held_out * options.ctx,
                n_needed=_MIN_HELD_OUT_WINDOWS,
                special=options.special,
                note=note,
            )
            unknown = np.full(len(others), np.nan)
            checks.append(
                (name, calibration.loss(edges, others, np.arange(len(others)), unknown, f"check {path.name}"))
            )
        mode = values
    _count(runs, mode, windows[counted], state, steps)
    n_tokens = len(counted) * options.ctx
    layers = []
    for i, layer in enumerate(plan.layers):
        if layer.n_ff:
            active = state.active[i, : layer.n_ff]
            order = np.argsort(-active.astype(np.int64), kind="stable").astype(np.int32)
            down_t = layer.ffn_down_t
            density = float(active.sum() / (n_tokens * layer.n_ff))
            if loss is None and plan.gated:
                up_share[i] = density
            layer = replace(
                layer,
                threshold=values[i][0],
                product_threshold=values[i][1],
                neuron_order=order,
                neuron_frequency=(active[order] / n_tokens).astype(np.float32),
                profile_tokens=n_tokens,
                profile_density=density,
                ffn_down_t=None if down_t is None else replace(down_t, data=down_t.data[order]),
            )
        layers.append(layer)
    base_bytes = [sum(t.n_bytes for t in base.ffn(i).values()) for i, layer in enumerate(plan.layers) if layer.n_ff]
    set_mode(runner, mode)
    stats = runner.decode_stats(windows[counted[0]])
    has_thresholds = any(map(any, values))
    return Profile(
        plan=replace(
            plan, layers=tuple(layers), corpus=corpus, loss=loss.relative if loss and has_thresholds else None
        ),
        loss=loss,
        checks=checks,
        perplexity=math.exp(state.counted.mean()),
        up_share=up_share,
        row_bytes=layer_row_bytes(runner.plan),
        density=stats["n_active"] / stats["n_neurons"],
        candidate_density=stats["n_candidates"] / stats["n_neurons"],
        bytes_share=stats["read_bytes"] / stats["dense_bytes"],
        base_share=stats["read_bytes"] / (stats["n_tokens"] / len(base_bytes) * sum(base_bytes)),
    )


def _count(runs: Runs, mode: Mode, windows: np.ndarray, state: ProfileState, steps: Steps) -> None:
    """Adds the activations of the windows that the state lacks."""
    with steps("counting", len(windows)) as step:
        for _ in range(len(state.counted)):
            step()
        missing = windows[len(state.counted) :]
        for likelihood, fired in runs.each(count_window, [(mode, window) for window in missing]):
            counted = np.append(state.counted, likelihood)
            active = state.active.copy()
            for i, n_tokens in fired.items():
                active[i, : len(n_tokens)] += n_tokens
            # in one step: Ctrl-C must not leave a window's activations without the window
            state.active, state.counted = active, counted
            state.save_sometimes()
            step()


# ---- Command line --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer profile`."""
    defaults = {field.name: field.default for field in fields(ProfileOptions)}
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL.gguf", help="a stock GGUF")
    add_hub_arguments(parser)
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help="plain text, UTF-8")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="OUT.powerinfer.gguf", help="default: the sidecar beside the model"
    )
    parser.add_argument(
        "--check", type=Path, nargs="+", default=[], metavar="FILE", help="other text to measure the loss on as well"
    )
    target = parser.add_mutually_exclusive_group()
    target.add_argument(
        "--max-loss",
        type=arguments.share,
        metavar="SHARE",
        help=f"most that perplexity on held-out text may grow, SiLU and GELU models (default: {defaults['max_loss']:.0%})".replace(
            "%", "%%"
        ),
    )
    target.add_argument("--density", type=arguments.share, metavar="SHARE", help="down rows to use, whatever it costs")
    parser.add_argument("--activation", choices=ACTIVATIONS, help="of the weights (default: that of the architecture)")
    parser.add_argument("--activation-param", type=float, default=0.0, metavar="X", help="FATReLU's cut (default: 0)")
    parser.add_argument(
        "--tokens",
        type=arguments.count_of,
        default=defaults["tokens"],
        help="use at most so many (default: %(default)s)",
    )
    parser.add_argument(
        "-c", "--ctx", type=arguments.count_of, default=defaults["ctx"], help="tokens per window (default: %(default)s)"
    )
    parser.add_argument("-t", "--threads", type=arguments.count_of, help="default: physical cores allowed")
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
    add_ray_arguments(parser)


def _options(args: argparse.Namespace) -> ProfileOptions:
    """The options of a command line, checked."""
    if args.hf_repo and args.out is None:
        raise OptionError(
            "out: --hf-repo was given without it; expected a plan that the cache's next clean-up leaves alone; pass -o."
        )
    model = Path(resolve_model(args))
    out = args.out or model.with_name(model.name.removesuffix(".gguf") + SIDECAR_SUFFIX)
    arguments.check_plan_path("out", out)
    arguments.check_run(args)
    check_ray(args)
    activation = args.activation or bare_plan(model).activation
    if activation not in CALIBRATED_ACTIVATIONS and (args.max_loss or args.density or args.check):
        raise OptionError(
            f"{activation}: has exact zeros, nothing is calibrated; leave --max-loss, --density and --check out."
        )
    if args.activation_param and activation != "relu":
        raise OptionError(
            f"activation-param: {args.activation_param} with {activation}; expected it with relu only; leave it out."
        )
    if args.down_type:
        row_type_id(args.down_type)
    default_loss = ProfileOptions.max_loss if args.density is None else None
    return ProfileOptions(
        model=model,
        text=tuple(args.text),
        check=tuple(args.check),
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
        ray=args.ray,
        verbose=args.verbose,
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

    options = _options(args)
    note = note_once()
    if options.plot is not None:
        try:
            plot_profile.check_plot()
        except OptionError as error:
            if args.plot or options.strict:
                raise
            note(str(error))
            options = replace(options, plot=None)
    with progress_steps() as steps:
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
    for name in ("layer", "n_ff", "up rows", "down rows", "80 % by", "threshold", "on impact", "bytes saved"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, layer in enumerate(plan.layers):
        if not layer.n_ff:
            table.add_row(str(i), "-", *["not covered"] * 2)
            continue
        gate, up, down = profile.row_bytes[i]
        read = gate + up * profile.up_share[i] + down * layer.profile_density
        table.add_row(
            str(i),
            str(layer.n_ff),
            f"{profile.up_share[i]:.3f}",
            f"{layer.profile_density:.3f}",
            f"{plot_profile.share_of_neurons(layer.neuron_frequency):.1%}",
            f"{layer.threshold:.4g}",
            f"{layer.product_threshold:.4g}",
            f"{1 - read / (gate + up + down):.1%}",
        )
    console.print(table)
    n_covered = sum(1 for layer in plan.layers if layer.n_ff)
    print(f"{n_covered} of {plan.n_layer} layers, {plan.activation}; {plan.corpus}")
    if profile.loss is None:
        print(f"perplexity: {profile.perplexity:.3f} (exact zeros: nothing is lost)")
    else:
        for what, loss in [("held-out text", profile.loss), *profile.checks]:
            print(
                f"perplexity on {what}: dense {loss.dense:.3f}, sparse {loss.sparse:.3f}, "
                f"loss {loss.relative:+.2%} (standard error {loss.error:.2%})"
            )
    print(
        f"decoding: density {profile.density:.3f}, candidate_density {profile.candidate_density:.3f}, "
        f"bytes_share {profile.bytes_share:.3f}; reads {profile.base_share:.0%} of the bytes of the base's own FFN"
    )
    if 1 - profile.base_share < _LITTLE_SAVED:
        within = f" within {options.max_loss:.1%} loss" if options.max_loss and profile.loss else ""
        print(
            f"Little is to be had{within}: {1 - profile.base_share:.0%} fewer bytes than stock llama.cpp reads; "
            "expect no more speed-up than that from fewer bytes."
        )
    if profile.base_share > profile.bytes_share + _LITTLE_SAVED:
        print("The down rows are larger here than in the base; --down-type stores rows of its type in the plan.")
    print(f"plan: {options.out} ({options.out.stat().st_size / 1e3:.0f} kB)")
