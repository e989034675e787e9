"""`powerinfer pack`: base model and sidecar to one file and back. `powerinfer rebind`: a plan for another quantization.

Files are copied in chunks to a temporary file that is renamed at the end: nothing is left when it is interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from powerinfer_py import format as pi_format
from powerinfer_py.errors import OptionError, PlanError

from .terminal import byte_progress


@dataclass(frozen=True)
class PackOptions:
    """What `pack` is to do.

    Attributes:
        files: base model and sidecar; with extract the packed file alone.
        output: the packed file; with extract the base model, whose sidecar is written beside it.
        extract: take a packed file apart instead.
    """

    files: tuple[Path, ...]
    output: Path
    extract: bool = False


@dataclass(frozen=True)
class RebindOptions:
    """What `rebind` is to do.

    Attributes:
        plan: a plan without stored ffn_down_t.
        base: another quantization of the model that it was made for.
        output: the sidecar to write.
    """

    plan: Path
    base: Path
    output: Path


def pack(base: Path, sidecar: Path, output: Path) -> None:
    """Writes one extended GGUF that carries the base model.

    Args:
        base: the stock GGUF, or the first part of a split one, which is merged.
        sidecar: its plan.
        output: the file to write.

    Raises:
        FormatError: a file is damaged.
        PlanError: the plan is another model's, or carries one already.
        OptionError: the output is one of the inputs.
    """
    refuse_same(output, base, sidecar)
    plan = pi_format.read_plan(sidecar)
    if plan.is_embedded:
        raise PlanError(f"{sidecar}: carries its base model already; expected a sidecar; use it as it is.")
    plan.open_base(base)
    with byte_progress(f"Packing {output.name}") as progress:
        pi_format.write_plan(replace(plan, base_file=""), output, base_embedded=base, progress=progress)


def extract(packed: Path, output: Path) -> Path:
    """Takes a packed file apart.

    Args:
        packed: an extended GGUF that carries its base model.
        output: where the base model goes, byte for byte as it was packed; must end in .gguf.

    Returns:
        The sidecar that was written beside it.

    Raises:
        FormatError: the file is damaged.
        PlanError: it carries no base model, or another one than its plan's.
        OptionError: the output is the input, or no name for a model.
    """
    refuse_same(output, packed)
    if output.suffix != ".gguf" or output.name.endswith(pi_format.SIDECAR_SUFFIX):
        raise OptionError(f"-o: {output}; expected the base model's name, ending in .gguf; name it so.")
    sidecar = output.with_name(output.name.removesuffix(".gguf") + pi_format.SIDECAR_SUFFIX)
    refuse_same(sidecar, packed)
    plan = pi_format.read_plan(packed)
    if not plan.is_embedded:
        raise PlanError(f"{packed}: carries no base model; expected a packed file; there is nothing to extract.")
    whole = plan.open_base().files[0].whole()
    with byte_progress(f"Extracting {output.name}") as progress, pi_format.atomic_path(output) as temporary:
        with open(temporary, "wb") as out:
            pi_format.copy_bytes(out, whole, lambda n: progress(n, len(whole)))
        pi_format.write_plan(replace(plan, base_file=output.name), sidecar)
    return sidecar


def rebind(plan_path: Path, base: Path, output: Path) -> pi_format.Plan:
    """Writes a plan's sidecar for another quantization of the same weights.

    Args:
        plan_path: the plan; orders, frequencies, thresholds and predictors are kept.
        base: the other quantization. That it holds the same weights can't be checked, only its shapes.
        output: the sidecar to write.

    Returns:
        The new plan.

    Raises:
        FormatError: a file is damaged.
        PlanError: the plan stores ffn_down_t, or the base has other shapes.
        OptionError: the output is the base model.
    """
    refuse_same(output, base)
    plan = pi_format.read_plan(plan_path)
    for i, layer in enumerate(plan.layers):
        if layer.ffn_down_t is not None:
            raise PlanError(
                f"{plan_path}: layer {i} stores ffn_down_t, weights of the old base model; expected a plan without; "
                "make the plan again (powerinfer profile)."
            )
    model = pi_format.BaseModel(base)
    pi_format.check_shapes(plan, model)
    layers = (replace(layer, digest=model.digest(i)) if layer.n_ff else layer for i, layer in enumerate(plan.layers))
    plan = replace(plan, layers=tuple(layers), base_file=model.path.name, base_offset=0, base_size=0)
    pi_format.write_plan(plan, output)
    return plan


def add_pack_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer pack`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="BASE SIDECAR, or with --extract PACKED")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    parser.add_argument(
        "--extract", action="store_true", default=PackOptions.extract, help="take a packed file apart: base and sidecar"
    )


def run_pack(args: argparse.Namespace) -> int:
    """Runs `powerinfer pack`.

    Args:
        args: parsed by add_pack_arguments.

    Returns:
        The exit code.

    Raises:
        OptionError: another number of files than needed.
    """
    options = PackOptions(tuple(args.files), args.output, args.extract)
    n_expected = 1 if options.extract else 2
    if len(options.files) != n_expected:
        wish = "PACKED" if options.extract else "BASE SIDECAR"
        raise OptionError(f"pack: {len(options.files)} files; expected {n_expected}; give {wish}.")
    if options.extract:
        sidecar = extract(options.files[0], options.output)
        print(f"{options.output}: base model ({options.output.stat().st_size} bytes); its plan is {sidecar}")
    else:
        pack(*options.files, options.output)
        print(f"{options.output}: {options.output.stat().st_size} bytes")
    return 0


def add_rebind_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer rebind`."""
    parser.add_argument("plan", type=Path, help="the plan (*.powerinfer.gguf)")
    parser.add_argument("base", type=Path, help="another quantization of the model that it was made for")
    parser.add_argument("-o", "--output", type=Path, required=True, help="sidecar to write")


def run_rebind(args: argparse.Namespace) -> int:
    """Runs `powerinfer rebind`.

    Args:
        args: parsed by add_rebind_arguments.

    Returns:
        The exit code.
    """
    options = RebindOptions(args.plan, args.base, args.output)
    plan = rebind(options.plan, options.base, options.output)
    print(f"{options.output}: plan for {options.base}")
    if plan.loss is not None:
        print(f"note: its loss ({100 * plan.loss:.2f} %) was measured with the old base model.", file=sys.stderr)
    if options.base.resolve().parent != options.output.resolve().parent:
        print(f"note: {plan.base_file} is looked for beside the plan; put it there or name it.", file=sys.stderr)
    return 0


def refuse_same(output: Path, *inputs: Path) -> None:
    """Raises OptionError when the file to write is one of the inputs."""
    for path in inputs:
        if output.exists() and path.exists() and os.path.samefile(output, path):
            raise OptionError(f"-o: {output} is an input; expected another file; name a new one.")
