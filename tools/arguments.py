"""What the verbs' command lines share: types of arguments, checks of outputs, the plan of a model, packages that an extra brings."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from pathlib import Path

from powerinfer_py import format as pi_format
from powerinfer_py.errors import OptionError, PlanError
from powerinfer_py.format import SIDECAR_SUFFIX


def share(text: str) -> float:
    """`2%` or `0.02`.

    Raises:
        argparse.ArgumentTypeError: something that isn't between 0 and 1.
    """
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a share between 0 and 1, such as 2% or 0.02")
    return value


def count_of(text: str) -> int:
    """A whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: a smaller one.
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}; expected at least 1")
    return value


def device_memory(name: str, text: str, total_bytes: int) -> int:
    """An amount of a device's memory: GiB as a plain number, or `8GiB`, `512MiB`, `75%`. G and GB mean GiB, M and MB MiB.

    Args:
        name: of the option.
        text: its value.
        total_bytes: memory that the device has.

    Returns:
        Bytes.

    Raises:
        OptionError: another text.
    """
    found = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(G|GB|GiB|M|MB|MiB|%)?", text, re.ASCII)
    amount = float(found[1]) if found else math.nan
    if found is None or not math.isfinite(amount) or (found[2] == "%" and amount > 100):
        raise OptionError(
            f"{name}: found '{text}'; expected an amount of GPU memory: GiB as a plain number, or 8GiB, 512MiB, 75%; change it."
        )
    return int(amount * {"M": 2**20, "%": total_bytes / 100}.get((found[2] or "G")[0], 2**30))


def check_plan_path(name: str, path: Path) -> None:
    """Refuses an extended GGUF's path that can't be written to.

    Args:
        name: of the option.
        path: its value.

    Raises:
        OptionError: another ending, or no such folder.
    """
    if not path.name.endswith(SIDECAR_SUFFIX) or path.name == SIDECAR_SUFFIX:
        raise OptionError(f"{name}: {path}; expected a name that ends in {SIDECAR_SUFFIX}; rename it.")
    if not path.parent.is_dir():
        raise OptionError(f"{name}: {path.parent} isn't a folder; expected one; make it first.")


def check_run(args: argparse.Namespace) -> None:
    """Refuses windows (`--ctx`) that are too short to learn from, and contradictory wishes for a picture.

    Raises:
        OptionError: one of them.
    """
    if args.ctx < 4:
        raise OptionError(f"ctx: {args.ctx}; expected at least 4 tokens per window; pass a larger --ctx.")
    if args.plot and args.no_plot:
        raise OptionError("plot: --plot and --no-plot were given; expected one of them; leave one out.")


def need_packages(where: str, extra: str, *packages: str, otherwise: str = "") -> None:
    """Says which packages are missing, and how to get them.

    Args:
        where: what needs them.
        extra: of powerinfer_py, which brings them.
        packages: names to import.
        otherwise: what can be done instead, e.g. ` or pass --no-plot`.

    Raises:
        OptionError: one isn't installed.
    """
    # a name with a dot can't be looked for where its first part is missing
    missing = [
        n for n in packages if not (importlib.util.find_spec(n.partition(".")[0]) and importlib.util.find_spec(n))
    ]
    if missing:
        raise OptionError(
            f"{where}: {', '.join(missing)} isn't installed; expected it; pip install 'powerinfer_py[{extra}]'{otherwise}."
        )


def open_plan(model: Path, base: Path | None) -> tuple[pi_format.Plan, pi_format.BaseModel]:
    """A plan and its base model.

    Args:
        model: a GGUF with its plan beside it, or a plan.
        base: the plan's base; None: embedded, beside it, or the model itself.

    Returns:
        Both.

    Raises:
        FormatError: a file is damaged.
        PlanError: there is no plan, or it is another model's.
    """
    if not pi_format.is_extended(model):
        sidecar = pi_format.find_sidecar(model)
        if sidecar is None:
            raise PlanError(
                f"{model}: there is no plan beside it; expected one; run `powerinfer profile {model}` first."
            )
        model, base = sidecar, base or model
    plan = pi_format.read_plan(model)
    return plan, plan.open_base(base)
