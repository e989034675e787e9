"""`--hf-repo`: which files of a Hugging Face repository a command needs, and where they are after huggingface_hub fetched them.

The client's own cache, progress bars, tokens and environment variables (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, ...) apply.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from powerinfer_py.errors import OptionError, PowerInferError
from powerinfer_py.format import SIDECAR_SUFFIX, read_plan

DEFAULT_QUANT = "Q4_K_M"

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# What the converter reads of a checkpoint beside its weights; no code, no other framework's weights.
_CHECKPOINT_FILES = re.compile(r"[^/]+\.(json|model|txt|jinja|tiktoken)")
_SAFETENSORS = re.compile(r"model(-[^/]+)?\.safetensors")
_TORCH_FILES = re.compile(r"pytorch_model(-[^/]+)?\.bin")


@dataclass(frozen=True)
class Source:
    """A repository at a revision."""

    repo: str  # OWNER/NAME
    revision: str | None = None  # branch, tag or commit; None: the default branch
    strict: bool = False  # the cache instead of a hub that can't be reached is an error


def add_hub_arguments(parser: argparse.ArgumentParser, what: str = "GGUF") -> None:
    """The options that name a model on the hub; the verb's own model argument has to be optional.

    Args:
        parser: of a verb that calls `resolve_model` or `resolve_checkpoint`.
        what: is fetched; GGUF: one of a repository's GGUFs is chosen.
    """
    one_of_many = what == "GGUF"
    parser.add_argument(
        "--hf-repo",
        metavar="OWNER/NAME[:QUANT]" if one_of_many else "OWNER/NAME",
        help=f"fetch the {what} from this Hugging Face repository instead (extra hub)"
        + (f"; QUANT as in file names (default: {DEFAULT_QUANT}, or the only one)" if one_of_many else ""),
    )
    if one_of_many:
        parser.add_argument("--hf-file", metavar="NAME", help="the file of --hf-repo to use")
    parser.add_argument("--hf-revision", metavar="REV", help="branch, tag or commit of --hf-repo")


def resolve_model(args: argparse.Namespace) -> str:
    """The path of the model that a command line names, after fetching it when that is on the hub.

    Args:
        args: parsed; has model, and what `add_hub_arguments` adds.

    Returns:
        The path of a GGUF; its other parts and its plan, when the repository has one, are beside it.

    Raises:
        OptionError: not exactly one of model and --hf-repo, no such repository or file, or it can't be fetched.
    """
    if not _is_on_hub(args):
        return os.fspath(args.model)
    repo, _, quant = args.hf_repo.partition(":")
    if quant and args.hf_file:
        raise OptionError(f"--hf-file: {args.hf_repo} names a quantization too; expected one of them; leave one out.")
    source = Source(repo, args.hf_revision, getattr(args, "strict", False))
    names, where = _list_files(source)
    first = choose_gguf(names, where, quant, args.hf_file)
    path = _fetch(source, [first, *_companions(names, where, first)])[0]
    if first.endswith(SIDECAR_SUFFIX):
        plan = read_plan(path)
        base = str(PurePosixPath(first).with_name(plan.base_file)) if plan.base_file else ""
        if not plan.is_embedded and base in names:
            _fetch(source, [base, *_other_parts(names, where, base)])
    return str(path)


def resolve_checkpoint(args: argparse.Namespace) -> str:
    """The folder of the checkpoint that a command line names, after fetching it when that is on the hub.

    Args:
        args: parsed; has model, and what `add_hub_arguments` adds.

    Returns:
        A folder with configuration, tokenizer and weights: safetensors where the repository has them, else .bin.

    Raises:
        OptionError: as resolve_model.
    """
    if not _is_on_hub(args):
        return os.fspath(args.model)
    source = Source(args.hf_repo, args.hf_revision, args.strict)
    names, where = _list_files(source)
    return str(_fetch(source, choose_checkpoint(names, where))[0].parent)


def choose_gguf(names: Sequence[str], where: str, quant: str = "", file: str | None = None) -> str:
    """The GGUF of a repository that is meant.

    Args:
        names: paths of all its files.
        where: for errors.
        quant: a quantization as file names have it, in any case; empty: DEFAULT_QUANT, else the only GGUF.
        file: the very file.

    Returns:
        Its path in the repository; the first part of a split one. An extended GGUF only when it is named, or when there are no
        others.

    Raises:
        OptionError: none fits, or several do.
    """
    if file:
        if file not in names:
            near = difflib.get_close_matches(file, names, n=1)
            raise OptionError(
                f"{where}: has no file {file}; expected one of its files; "
                + (f"did you mean {near[0]}?" if near else f"there are: {_listed(_models(names) or names)}.")
            )
        return _PART.sub(r"-00001-of-\2.gguf", file)
    models = _models(names)
    if not models:
        raise OptionError(
            f"{where}: has no GGUF; expected one; convert it (powerinfer convert --hf-repo), or choose a repository with GGUFs."
        )
    tag = re.compile(rf"(?<![a-z0-9]){re.escape(quant or DEFAULT_QUANT)}(?![a-z0-9_])", re.IGNORECASE)
    found = [name for name in models if tag.search(name)]
    if not found and not quant:
        found = models
    if len(found) == 1:
        return found[0]
    wished = f"of which none is {DEFAULT_QUANT}" if found == models and not quant else f"named {quant or DEFAULT_QUANT}"
    raise OptionError(
        f"{where}: has {len(found)} GGUFs {wished}; expected one; choose with --hf-file, or --hf-repo OWNER/NAME:QUANT, "
        f"from: {_listed(found or models)}."
    )


def choose_checkpoint(names: Sequence[str], where: str) -> list[str]:
    """The files of a repository that belong to its checkpoint.

    Args:
        names: paths of all its files.
        where: for errors.

    Returns:
        Configuration and tokenizer, and the weights as safetensors or else as .bin, never both.

    Raises:
        OptionError: there are no weights.
    """
    for pattern, other in ((_SAFETENSORS, "pytorch_model"), (_TORCH_FILES, "model.safetensors")):
        weights = [name for name in names if pattern.fullmatch(name)]
        if weights:
            rest = [n for n in names if _CHECKPOINT_FILES.fullmatch(n) and not n.startswith(f"{other}.")]
            return [*rest, *weights]
    raise OptionError(
        f"{where}: has neither model.safetensors nor pytorch_model.bin, nor shards of one; expected a checkpoint; "
        "choose the repository with the model's original weights."
    )


def _is_on_hub(args: argparse.Namespace) -> bool:
    """Whether --hf-repo names the model.

    Raises:
        OptionError: not exactly one was named, or options of the other one.
    """
    if not args.hf_repo:
        for option in ("hf_file", "hf_revision"):
            if getattr(args, option, None):
                flag = f"--{option.replace('_', '-')}"
                raise OptionError(f"{flag}: was given without --hf-repo; expected both; add --hf-repo OWNER/NAME.")
        if not args.model:
            raise OptionError("model: none was given; expected a path, or --hf-repo OWNER/NAME; pass one of them.")
        return False
    if args.model:
        raise OptionError(f"--hf-repo: {args.model} was given as model too; expected one of them; leave one out.")
    return True


def _models(names: Sequence[str]) -> list[str]:
    """GGUFs of language models, one name for each; extended ones only where there are no others."""
    ggufs = []
    for name in sorted(names):
        file = PurePosixPath(name).name.lower()
        part = _PART.search(file)
        if not file.endswith(".gguf") or (part and int(part[1]) != 1):
            continue
        if "mmproj" not in file and not file.startswith("imatrix") and not file.endswith("imatrix.gguf"):
            ggufs.append(name)
    return [name for name in ggufs if not name.endswith(SIDECAR_SUFFIX)] or ggufs


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _companions(names: Sequence[str], where: str, first: str) -> list[str]:
    """The other parts of a split GGUF, and the plan beside it."""
    stem = first.removesuffix(".gguf")
    plans = [s + SIDECAR_SUFFIX for s in (stem, re.sub(r"-00001-of-\d{5}$", "", stem)) if s + SIDECAR_SUFFIX in names]
    return _other_parts(names, where, first) + plans[:1]


def _other_parts(names: Sequence[str], where: str, first: str) -> list[str]:
    part = _PART.search(first)
    parts = [f"{first[: part.start()]}-{i:05d}-of-{part[2]}.gguf" for i in range(2, int(part[2]) + 1)] if part else []
    missing = [name for name in parts if name not in names]
    if missing:
        raise OptionError(
            f"{where}: {missing[0]} isn't there; {first} expects it beside it; choose another file, or fetch it whole."
        )
    return parts


# ---- The hub's client ----------------------------------------------------------------------------------------------


def _list_files(source: Source) -> tuple[list[str], str]:
    """The files that a repository has, or the cache has of it, and how to call that in errors."""
    importlib.import_module("powerinfer_py.tools.arguments").need_packages("--hf-repo", "hub", "huggingface_hub")
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    with _errors_of_hub(source):
        try:
            timeout_s = constants.HF_HUB_ETAG_TIMEOUT
            info = huggingface_hub.HfApi().model_info(source.repo, revision=source.revision, timeout=timeout_s)
            return [file.rfilename for file in info.siblings or ()], source.repo
        except OfflineModeIsEnabled:
            reason = "HF_HUB_OFFLINE is set"
        except Exception as error:  # the client's major versions use different HTTP libraries
            answer = error.response if isinstance(error, HfHubHTTPError) else None
            if isinstance(error, ValueError) or (answer is not None and answer.status_code < 500):
                raise
            reason = f"the hub can't be reached ({_first_line(error)})"
            if source.strict:
                raise OptionError(
                    f"{source.repo}: {reason}; --strict refuses the cache instead; set HF_HUB_OFFLINE=1 to use it."
                ) from None
        names = _cached_files(source, reason)
    if reason != "HF_HUB_OFFLINE is set":
        logging.getLogger("powerinfer_py").warning("%s: %s; its files in the cache are used.", source.repo, reason)
    return names, f"{source.repo} in the cache ({reason})"


def _cached_files(source: Source, reason: str) -> list[str]:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # nothing is asked for: any part of the snapshot will do
        folder = huggingface_hub.snapshot_download(
            source.repo, revision=source.revision, allow_patterns=[], local_files_only=True
        )
    except LocalEntryNotFoundError:
        revision = f" at {source.revision}" if source.revision else ""
        raise OptionError(
            f"{source.repo}: {reason}, and the cache {constants.HF_HUB_CACHE} has nothing of it{revision}; expected one of "
            "them; fetch it once with a network, or give the path of a model."
        ) from None
    return [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()]


def _fetch(source: Source, names: Sequence[str]) -> list[Path]:
    """Paths of files of a repository, all in one snapshot in the cache."""
    import huggingface_hub

    paths = []
    for name in names:
        with _errors_of_hub(source):
            paths.append(Path(huggingface_hub.hf_hub_download(source.repo, name, revision=source.revision)))
    if len({path.as_posix().removesuffix(name) for path, name in zip(paths, names)}) > 1:
        raise OptionError(
            f"{source.repo}: it changed while it was fetched; expected one commit; run the command again."
        )
    return paths


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def _errors_of_hub(source: Source) -> Iterator[None]:
    try:
        yield
    except PowerInferError:
        raise
    except Exception as error:  # the client's major versions use different HTTP libraries
        _raise_for_hub(source, error)


def _raise_for_hub(source: Source, error: Exception) -> NoReturn:
    """Says an error of the hub's client in one sentence.

    Raises:
        OptionError: always.
    """
    from huggingface_hub import constants, errors

    repo = source.repo
    if isinstance(error, errors.HFValidationError):
        text = f"--hf-repo: found {repo!r}; expected OWNER/NAME or OWNER/NAME:QUANT; change it."
    elif isinstance(error, errors.GatedRepoError):
        text = (
            f"{repo}: is gated, and the hub knows of no access for this token; expected one that has it; accept the terms at "
            f"{constants.ENDPOINT}/{repo}, then log in (hf auth login) or set HF_TOKEN."
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = (
            f"{repo}: {constants.ENDPOINT} has no such model, or it is private; expected OWNER/NAME of a model; check the name, "
            "or log in (hf auth login) or set HF_TOKEN."
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{repo}: has no revision {source.revision}; expected a branch, tag or commit; change --hf-revision."
    elif "No space left on device" in str(error):
        text = (
            f"{repo}: no space is left for it in {constants.HF_HUB_CACHE}; expected some; make some, or set HF_HOME to a folder "
            "on another disk."
        )
    else:
        text = (
            f"{repo}: can't be fetched ({_first_line(error)}); expected the hub at {constants.ENDPOINT} to answer; run the "
            "command again, or check the network, HF_ENDPOINT and HF_HOME."
        )
    raise OptionError(text) from error
