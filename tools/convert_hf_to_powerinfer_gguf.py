"""`powerinfer convert`: a Hugging Face checkpoint to one extended GGUF, tensor by tensor.

Runs as a script too, so its imports are absolute. Everything temporary is in one folder beside the output.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np

from powerinfer_py import _core
from powerinfer_py import format as pi_format
from powerinfer_py.errors import FormatError, OptionError
from powerinfer_py.format import SIDECAR_SUFFIX, BaseModel, Plan, PlanLayer
from powerinfer_py.hub import add_hub_arguments, resolve_checkpoint
from powerinfer_py.tools.architectures import HfModel, Source, read_model
from powerinfer_py.tools.arguments import check_plan_path
from powerinfer_py.tools.quantize_base import FILE_TYPES, quantize_model, read_imatrix
from powerinfer_py.tools.row_types import Spool, row_type_id, rows_of
from powerinfer_py.tools.terminal import Steps, note_once, percent, progress_steps

if TYPE_CHECKING:
    from torch import Tensor

    from powerinfer_py.tools.powerinfer_files import PredictorFolder

AUTO = "auto"
_FLOATS = ("f32", "f16", "bf16")
_NUMPY_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_PROFILE_CTX = 512

Note = Callable[[str], None]


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion, with their defaults.

    Attributes:
        model: folder of the checkpoint.
        outfile: the extended GGUF to write.
        outtype: one of FILE_TYPES, or `auto`: the checkpoint's own.
        predictor: folder of the original's model_<layer>.pt.
        activation: folder of its activation_<layer>.pt.
        text: files to profile the model with.
        imatrix: importance matrix of llama-imatrix.
        sidecar: the base model goes beside the plan, not into it.
        threads: None: physical cores allowed.
        strict: a fallback is an error instead of a note.
    """

    model: Path
    outfile: Path
    outtype: str = AUTO
    predictor: Path | None = None
    activation: Path | None = None
    text: tuple[Path, ...] = ()
    imatrix: Path | None = None
    sidecar: bool = False
    threads: int | None = None
    strict: bool = False


# ---- The whole -----------------------------------------------------------------------------------------------------


def convert(options: ConvertOptions, steps: Steps, note: Note) -> Plan:
    """Converts a checkpoint.

    Args:
        options: what to do.
        steps: `steps(what, n)` is a context that gives a function to call n times.
        note: receives every note.

    Returns:
        The plan as written.

    Raises:
        FormatError: the checkpoint, or a file beside it, can't be used; nothing is left then.
        PlanError: the profile can't be made.
        OptionError: an option can't be used, or a package isn't installed.
    """

    def fallback(text: str) -> None:
        if options.strict:
            raise FormatError(f"{text} --strict refuses that; leave it out to go on.")
        note(text)

    model = read_model(options.model, note, fallback)
    outtype = own_type(model) if options.outtype == AUTO else options.outtype
    imatrix = None if options.imatrix is None else _imatrix(options.imatrix, outtype, model, fallback)
    n_ff = [model.shape.n_ff] * model.shape.n_layer
    predictors = _predictors(options, model, n_ff, note)
    counts = None
    if options.activation is not None:
        from powerinfer_py.tools.powerinfer_files import read_activations

        counts = read_activations(options.activation, n_ff, note)
    n_threads = options.threads or _core.physical_cores()
    outfile = options.outfile
    with tempfile.TemporaryDirectory(prefix=f".{outfile.name}.", suffix=".tmp", dir=outfile.parent) as temporary:
        folder = Path(temporary)
        base = folder / (outfile.name.removesuffix(SIDECAR_SUFFIX) + ".gguf")
        _check_vocabulary(model, folder / "vocabulary.gguf")
        write_base(model, base, outtype, imatrix, n_threads=n_threads, steps=steps, note=note)
        plan = pi_format.bare_plan(base, model.activation)
        stock_activation = pi_format.bare_plan(base).activation
        if plan.activation != stock_activation or model.activation_param:
            note(
                f"stock llama.cpp computes {stock_activation} where this model has {_activation_text(model)}: its text is right "
                "only with the plan, here."
            )
        if options.text:
            plan = _profiled(base, model, options, folder, steps, note)
        with ExitStack() as stack, steps("plan", len(plan.layers)) as step:
            model_base = BaseModel(base)
            spool = Spool(stack.enter_context(tempfile.TemporaryFile(dir=folder)))
            layers = []
            for i, layer in enumerate(plan.layers):
                layer = replace(layer, activation_param=model.activation_param)
                layer = with_rows(
                    model, i, layer, model_base, outtype, predictors, n_threads=n_threads, fallback=fallback
                )
                layers.append(spool.keep_layer(layer if counts is None else _ordered(layer, counts, i, note)))
                step()
            plan = replace(plan, layers=tuple(layers), base_file=base.name if options.sidecar else "")
            if predictors is not None:
                plan = replace(plan, predictor_input="ffn_input" if predictors.folded else "residual")
            with steps("writing", 100) as step:
                written = folder / "plan"
                pi_format.write_plan(
                    plan, written, base_embedded=None if options.sidecar else base, progress=percent(step)
                )
            if options.sidecar:
                base.replace(outfile.with_name(base.name))
            written.replace(outfile)
    return plan


def own_type(model: HfModel) -> str:
    """The type in which nothing of the checkpoint's matrices is lost."""
    types = {
        model.checkpoint.row_type(part) for source in model.sources if len(source.shape) > 1 for part in source.parts
    }
    return types.pop().lower() if len(types) == 1 else "f32"


def _activation_text(model: HfModel) -> str:
    cut = f" with cut {model.activation_param:g}" if model.activation_param else ""
    return model.activation + cut


# ---- The base model ------------------------------------------------------------------------------------------------


def write_base(
    model: HfModel,
    path: Path,
    outtype: str,
    imatrix: dict[str, np.ndarray] | None,
    *,
    n_threads: int,
    steps: Steps,
    note: Note,
) -> None:
    """Writes a GGUF that stock llama.cpp loads.

    Args:
        model: what to write.
        path: the file.
        outtype: one of FILE_TYPES; a quantized one goes by way of a GGUF in the checkpoint's own types.
        imatrix: importance of each tensor's columns; None: without.
        n_threads: for the quantization.
        steps: progress.
        note: receives notes about the tokenizer.

    Raises:
        FormatError: a tensor or the tokenizer can't be used, or libllama refuses.
    """
    if outtype in _FLOATS:
        _write_floats(model, path, outtype, steps, note)
        return
    floats = path.with_name("floats.gguf")
    _write_floats(model, floats, None, steps, note)
    with steps(f"to {outtype}", len(model.sources)) as step:
        quantize_model(floats, path, outtype, imatrix=imatrix, n_threads=n_threads, step=step)
    floats.unlink()


def _write_floats(model: HfModel, path: Path, outtype: str | None, steps: Steps, note: Note) -> None:
    """Writes all tensors as floats; None: matrices in their own types. Vectors are always F32, as ggml wants them."""
    from powerinfer_py.tools.hf_tokenizer import add_tokenizer

    writer = gguf.GGUFWriter(path, model.architecture)
    try:
        writer.add_name(model.checkpoint.name)
        if outtype is not None:
            writer.add_file_type(FILE_TYPES[outtype])
        model.add_keys(writer)
        add_tokenizer(writer, model.checkpoint.folder, model.config, note)
        sources = list(model.sources)
        types = [_float_type(model, source, outtype) for source in sources]
        factors = model.rope.frequency_factors if model.rope else None
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        for source, row_type in zip(sources, types):
            dtype = np.dtype(_NUMPY_TYPES[row_type])
            n_bytes = int(np.prod(source.shape)) * dtype.itemsize
            writer.add_tensor_info(source.name, source.shape, dtype, n_bytes, raw_dtype=row_type_id(row_type))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        with steps("reading", len(sources)) as step:
            for source, row_type in zip(sources, types):
                writer.write_tensor_data(_values(model.read(source), source, row_type))
                step()
    finally:
        writer.close()


def _check_vocabulary(model: HfModel, path: Path) -> None:
    """Refuses a tokenizer that llama.cpp would read otherwise, before any weight is read."""
    from powerinfer_py.tools.hf_tokenizer import add_tokenizer, check_tokenizer

    writer = gguf.GGUFWriter(path, model.architecture)
    try:
        model.add_keys(writer)
        add_tokenizer(writer, model.checkpoint.folder, model.config, lambda text: None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    check_tokenizer(path, model.checkpoint.folder)


def _float_type(model: HfModel, source: Source, outtype: str | None) -> str:
    if len(source.shape) == 1:
        return "F32"
    if outtype is not None:
        return outtype.upper()
    types = {model.checkpoint.row_type(part) for part in source.parts}
    return types.pop() if len(types) == 1 else "F32"


def _values(tensor: Tensor, source: Source, row_type: str) -> np.ndarray:
    """A tensor as numpy array of a ggml float type; BF16 as uint16."""
    import torch

    kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[row_type]
    changed = tensor.to(kind).contiguous()
    if kind == torch.float16 and not torch.isfinite(changed).all():
        raise FormatError(
            f"{' + '.join(source.parts)}: has values that aren't finite as f16; expected numbers up to 65504; "
            "choose another --outtype, such as bf16."
        )
    return (changed.view(torch.int16) if row_type == "BF16" else changed).numpy().view(_NUMPY_TYPES[row_type])


def _imatrix(path: Path, outtype: str, model: HfModel, fallback: Note) -> dict[str, np.ndarray]:
    if outtype in _FLOATS:
        raise OptionError(f"imatrix: given with --outtype {outtype}; expected a quantized type; leave it out.")
    imatrix = read_imatrix(path)
    # embeddings and head have no entry as a rule
    wished = [s.name for s in model.sources if len(s.shape) == 2 and s.name.startswith("blk.")]
    missing = [name for name in wished if name not in imatrix]
    if missing == wished:
        raise FormatError(
            f"{path}: has no entry for {wished[0]}; expected the model's tensors; make it with this model."
        )
    if missing:
        fallback(f"{path}: has no entry for {len(missing)} tensors, such as {missing[0]}; they are quantized without.")
    return imatrix


# ---- Predictors and statistics -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Predictors:
    """Predictors of every layer, read when they are asked for.

    Attributes:
        threshold: a neuron is skipped only when its score is below.
        folded: whether they see the FFN's input instead of the residual.
        read: layer -> fc1 (r, n_embd) and fc2 (n_ff, r), float32.
    """

    threshold: float
    folded: bool
    read: Callable[[int], tuple[np.ndarray, np.ndarray]]


def _predictors(options: ConvertOptions, model: HfModel, n_ff: Sequence[int], note: Note) -> _Predictors | None:
    """The folder's predictors, or those inside the checkpoint."""
    if options.predictor is None and not model.predictors:
        return None
    from powerinfer_py.tools.powerinfer_files import check_predictor, ffn_input_predictor, read_predictors

    n_embd = model.shape.n_embd
    found: PredictorFolder | None = None
    if options.predictor is not None:
        if model.predictors:
            note(f"{options.predictor}: its predictors are used instead of the checkpoint's own.")
        found = read_predictors(options.predictor, n_embd, n_ff, note)
    else:
        shapes = model.checkpoint.shapes
        for i, (fc1, fc2) in enumerate(model.predictors):
            where = f"{model.checkpoint.folder}: layer {i}'s predictor"
            check_predictor(where, shapes[fc1], shapes[fc2], n_embd, n_ff[i])
    threshold = found.threshold if found else 0.0
    # Only the sign of a score survives what the norm does; a LayerNorm takes the mean away too.
    folded = threshold == 0 and not model.family.layer_norm
    norms = []
    if folded:
        sources = [model.source(f"blk.{i}.ffn_norm.weight") for i in range(model.shape.n_layer)]
        norms = [_values(model.read(source), source, "F32") for source in sources]
        folded = all(np.all(norm != 0) for norm in norms)

    def read(i: int) -> tuple[np.ndarray, np.ndarray]:
        if found:
            fc1, fc2 = found.fc1[i], found.fc2[i]
        else:
            fc1, fc2 = (model.checkpoint.tensor(name).float().numpy() for name in model.predictors[i])
        return ffn_input_predictor(fc1, norms[i]) if folded else fc1, fc2

    return _Predictors(threshold, folded, read)


def _profiled(base: Path, model: HfModel, options: ConvertOptions, folder: Path, steps: Steps, note: Note) -> Plan:
    """The plan with order, frequencies and thresholds from text."""
    from powerinfer_py.tools.profile_activations import ProfileOptions, make_profile

    def note_of_result(text: str) -> None:
        # The core speaks of the plan that is profiled, which has no down rows yet; the one that is written has them.
        if str(folder) not in text:
            note(text)

    profile = make_profile(
        ProfileOptions(
            model=base,
            text=options.text,
            out=folder / ("profile" + SIDECAR_SUFFIX),
            activation=model.activation,
            activation_param=model.activation_param,
            ctx=min(_PROFILE_CTX, model.shape.n_ctx),
            threads=options.threads,
            strict=options.strict,
            keeps_state=False,
        ),
        steps,
        note_of_result,
    )
    if profile.loss is not None:
        note(f"perplexity on held-out text: {profile.loss.relative:+.2%} (standard error {profile.loss.error:.2%}).")
    return profile.plan


def with_rows(
    model: HfModel,
    i_layer: int,
    layer: PlanLayer,
    base: BaseModel,
    outtype: str,
    predictors: _Predictors | None,
    *,
    n_threads: int,
    fallback: Note,
) -> PlanLayer:
    """A layer with its down rows and its predictor, in the order that it has.

    Args:
        model: where the weights come from.
        i_layer: the layer.
        layer: its order and all else.
        base: the written base model, whose down rows' type ours get.
        outtype: one of FILE_TYPES.
        predictors: None without.
        n_threads: for the quantization.
        fallback: receives a type that doesn't fit.

    Returns:
        The layer, all of it in memory.
    """
    order = slice(None) if layer.neuron_order is None else layer.neuron_order
    source = model.source(f"blk.{i_layer}.ffn_down.weight")
    wished = base.tensor(source.name).type
    row_type = pi_format.derived_row_type(wished, model.shape.n_embd)
    if row_type != wished:
        fallback(
            f"ffn_down_t: rows of {model.shape.n_embd} values can't be {wished.name.lower()}; they are {row_type.name.lower()}."
        )
    # An importance matrix has a value per column of down, which is one per neuron: none for the columns of these rows.
    values = np.ascontiguousarray(_values(model.read(source), source, "F32").T[order])
    layer = replace(layer, ffn_down_t=rows_of(values, row_type, n_threads=n_threads))
    if predictors is None:
        return layer
    fc1, fc2 = predictors.read(i_layer)
    kind = row_type_id(outtype if outtype in _FLOATS else "q8_0")
    fc1_rows, fc2_rows = (
        rows_of(np.ascontiguousarray(m), pi_format.derived_row_type(kind, m.shape[1]), n_threads=n_threads)
        for m in (fc1, fc2[order])
    )
    return replace(layer, predictor="mlp", predictor_threshold=predictors.threshold, fc1=fc1_rows, fc2=fc2_rows)


def _ordered(layer: PlanLayer, counts: list[np.ndarray], i_layer: int, note: Note) -> PlanLayer:
    """A layer in falling order of its counts."""
    from powerinfer_py.tools.powerinfer_files import ordered_layer, relative_frequencies

    frequency = relative_frequencies(counts, note)[i_layer]
    return ordered_layer(replace(layer, neuron_frequency=frequency), counts[i_layer])


# ---- Command line --------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer convert`."""
    parser.add_argument(
        "model", type=Path, nargs="?", metavar="MODEL_DIR", help="folder with config.json, weights and tokenizer"
    )
    add_hub_arguments(parser, "checkpoint")
    parser.add_argument(
        "-o", "--outfile", type=Path, required=True, metavar=f"X{SIDECAR_SUFFIX}", help="extended GGUF to write"
    )
    parser.add_argument(
        "--outtype",
        type=str.lower,
        choices=[AUTO, *FILE_TYPES],
        default=ConvertOptions.outtype,
        metavar="TYPE",
        help=f"{', '.join(FILE_TYPES)} or auto, the checkpoint's own (default: %(default)s)",
    )
    parser.add_argument("--predictor", type=Path, metavar="DIR", help="the original PowerInfer's model_<layer>.pt")
    parser.add_argument(
        "--activation", type=Path, metavar="DIR", help="its activation_<layer>.pt, which give the neurons' order"
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="run this text (powerinfer profile): order, thresholds",
    )
    parser.add_argument("--imatrix", type=Path, metavar="FILE", help="importance matrix of llama-imatrix")
    parser.add_argument("--sidecar", action="store_true", help="write the base model beside the plan, not into it")
    parser.add_argument("-t", "--threads", type=int, help="default: physical cores allowed")
    parser.add_argument("--strict", action="store_true", help="a fallback is an error instead of a note")


def _options(args: argparse.Namespace) -> ConvertOptions:
    """The options of a command line, checked."""
    check_plan_path("outfile", args.outfile)
    if args.text and args.activation:
        raise OptionError("text: --text and --activation both give the neurons' order; expected one; leave one out.")
    if args.threads is not None and args.threads < 1:
        raise OptionError(f"threads: {args.threads}; expected at least 1; pass another number.")
    values = {field.name: getattr(args, field.name) for field in fields(ConvertOptions)}
    return ConvertOptions(**{**values, "model": Path(resolve_checkpoint(args)), "text": tuple(args.text)})


def run(args: argparse.Namespace) -> int:
    """`powerinfer convert`: notes and progress to stderr, what was written to stdout.

    Args:
        args: the parsed command line.

    Returns:
        The exit code.
    """
    options = _options(args)
    with progress_steps() as steps:
        plan = convert(options, steps, note_once())
    predictor = f", predictors read {plan.predictor_input}" if plan.layers[0].predictor != "none" else ""
    print(
        f"{options.outfile}: {options.outfile.stat().st_size / 1e6:.1f} MB, {plan.base_architecture}, "
        f"{plan.n_layer} layers of {plan.layers[0].n_ff} neurons, {plan.activation}{predictor}"
    )
    if options.sidecar:
        print(f"base model: {options.outfile.with_name(plan.base_file)}")
    return 0


if __name__ == "__main__":
    # the console knows how to report errors
    sys.argv.insert(1, "convert")
    runpy.run_module("powerinfer_py.cli", run_name="__main__")
