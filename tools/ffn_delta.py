"""What a reluified model shares with its original isn't shipped twice: its feed-forward rows and its plan make it again.

Run as `python -m powerinfer_py.tools.ffn_delta pack MODEL.gguf ROWS.gguf` and `... apply ORIGINAL.gguf ROWS.gguf PLAN -o MODEL.gguf`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from powerinfer_py import _core
from powerinfer_py import format as pi_format
from powerinfer_py.errors import FormatError, OptionError, PlanError, PowerInferError
from powerinfer_py.format import (
    SIDECAR_SUFFIX,
    BaseModel,
    Plan,
    Rows,
    atomic_path,
    derived_row_type,
    find_sidecar,
    read_plan,
    write_plan,
)
from powerinfer_py.gguf_file import DEFAULT_ALIGNMENT, GgufFile

from .rewrite_gguf import TensorSource, string_entry, write_changed, write_gguf
from .row_types import dequantize_rows, quantize_rows

ARCHITECTURE = "powerinfer-rows"  # of a file that holds rows alone
_NAME, _FILE_TYPE = "general.name", "general.file_type"


def pack(model: Path, rows: Path) -> None:
    """Writes the gate and up rows of a model, and what names it; down rows are in its plan.

    Args:
        model: a GGUF whose plan beside it holds ffn_down_t.
        rows: the file to write.

    Raises:
        FormatError: a file can't be used.
        PlanError: there is no plan, or it lacks the down rows.
    """
    base = BaseModel(model)
    sidecar = find_sidecar(model)
    if sidecar is None:
        raise PlanError(
            f"{model}: there is no plan beside it; expected one with its down rows; run powerinfer reluify --qat."
        )
    _check_down(read_plan(sidecar))
    first = base.files[0]
    entries = [string_entry("general.architecture", ARCHITECTURE)]
    entries += [first.entry(key) for key in (_NAME, _FILE_TYPE, "general.license") if key in first.values]
    sources = []
    for i in range(base.n_layer):
        for name, tensor in base.ffn(i).items():
            if name != "down":
                sources.append(
                    TensorSource(tensor.name, tensor.type, tensor.ne, tensor.n_bytes, lambda n=tensor.name: base.raw(n))
                )
    with atomic_path(rows) as temporary:
        write_gguf(temporary, entries, sources, DEFAULT_ALIGNMENT, lambda n, n_all: None)


def apply(original: Path, rows: Path, plan_path: Path, out: Path, n_threads: int) -> None:
    """Makes a model and its plan from the original's other tensors, the rows, and the plan's down rows.

    Args:
        original: the GGUF that was reluified.
        rows: of pack().
        plan_path: the model's plan.
        out: the model to write; its plan is written beside it.
        n_threads: that round rows.

    Raises:
        FormatError: a file can't be used, or they don't belong together.
        PlanError: the plan lacks the down rows.
    """
    base, delta, plan = BaseModel(original), GgufFile(rows), read_plan(plan_path)
    _check_down(plan)
    if delta.get("general.architecture") != ARCHITECTURE:
        raise FormatError(
            f"{rows}: isn't a file of feed-forward rows; expected one that `ffn_delta pack` wrote; give another file."
        )
    if (plan.base_architecture, plan.n_layer, plan.n_embd) != (base.architecture, base.n_layer, base.n_embd):
        raise FormatError(
            f"{original}: {base.architecture} of {base.n_layer} layers, n_embd {base.n_embd}; expected {plan.base_architecture} of "
            f"{plan.n_layer}, n_embd {plan.n_embd}, the plan's; give the original model."
        )
    sources = []
    for i in range(base.n_layer):
        for name, tensor in base.ffn(i).items():
            if name == "down":
                sources.append(
                    _down_source(plan.layers[i].ffn_down_t, plan.layers[i].neuron_order, tensor.name, n_threads)
                )
                continue
            new = delta.tensors.get(tensor.name)
            if new is None or new.ne != tensor.ne:
                raise FormatError(
                    f"{rows}: {tensor.name} {'is missing' if new is None else f'has shape {list(new.ne)}'}; expected shape "
                    f"{list(tensor.ne)}, the original's; give the files that belong together."
                )
            sources.append(TensorSource(new.name, new.type, new.ne, new.n_bytes, lambda n=new.name: delta.raw(n)))
    keys = {key: delta.entry(key) for key in (_NAME, _FILE_TYPE) if key in delta.values}
    with atomic_path(out) as model:
        write_changed(base, model, keys, sources, lambda n, n_all: None)
        digests = pi_format.layer_digests(model)
        layers = tuple(replace(layer, digest=digest) for layer, digest in zip(plan.layers, digests))
        write_plan(
            replace(plan, layers=layers, base_file=out.name),
            out.with_name(out.name.removesuffix(".gguf") + SIDECAR_SUFFIX),
        )


def _check_down(plan: Plan) -> None:
    for i, layer in enumerate(plan.layers):
        if layer.n_ff and (layer.ffn_down_t is None or layer.neuron_order is None):
            raise PlanError(
                f"{plan.path}: layer {i} has no ffn_down_t; expected the down rows of every layer; run powerinfer reluify --qat."
            )


def _down_source(rows: Rows, order: np.ndarray, name: str, n_threads: int) -> TensorSource:
    """ffn_down from the plan's rows, which are in another order."""
    row_type = derived_row_type(rows.row_type, rows.n_rows)

    def data() -> np.ndarray:
        raw = np.ascontiguousarray(rows.data).view(np.uint8).reshape(rows.n_rows, -1)
        values = np.empty((rows.n_rows, rows.n), np.float32)
        values[order] = dequantize_rows(raw, rows.row_type.name, n_threads=n_threads)
        return quantize_rows(np.ascontiguousarray(values.T), row_type.name, n_threads=n_threads).reshape(-1)

    return TensorSource.matrix(name, row_type, rows.n, rows.n_rows, data)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m powerinfer_py.tools.ffn_delta", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="write the rows of a model")
    packing.add_argument("model", type=Path, metavar="MODEL.gguf")
    packing.add_argument("rows", type=Path, metavar="ROWS.gguf")
    applying = verbs.add_parser("apply", help="make the model from its original")
    for name, shown in (("original", "ORIGINAL.gguf"), ("rows", "ROWS.gguf"), ("plan", "PLAN.powerinfer.gguf")):
        applying.add_argument(name, type=Path, metavar=shown)
    applying.add_argument("-o", "--out", type=Path, required=True, metavar="MODEL.gguf")
    args = parser.parse_args()
    try:
        if args.verb == "pack":
            pack(args.model, args.rows)
        else:
            if not args.out.name.endswith(".gguf") or args.out.resolve() == args.original.resolve():
                raise OptionError(f"out: {args.out}; expected another name that ends in .gguf; pass another -o.")
            apply(args.original, args.rows, args.plan, args.out, _core.physical_cores())
    except (PowerInferError, OSError) as error:
        print(f"ffn_delta: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
