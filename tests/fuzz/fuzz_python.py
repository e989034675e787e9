"""atheris: the Python readers on any bytes. Only the errors of this package may come out, in the memory of a few files.

`python tests/fuzz/fuzz_python.py TARGET [libFuzzer's options] [folders or files of inputs]`; tests/fuzz/run.py runs all of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import atheris
import gguf
import mutators

# Before the limit on memory is set.
import safetensors.torch  # noqa: F401
import tokenizers  # noqa: F401
import torch  # noqa: F401

with atheris.instrument_imports(include=["powerinfer_py"]):
    from powerinfer_py import _core, gguf_file
    from powerinfer_py import format as pi_format
    from powerinfer_py.errors import FormatError, PowerInferError
    from powerinfer_py.tools import (
        architectures,
        checkpoint,
        hardware,
        hf_tokenizer,
        import_powerinfer,
        powerinfer_files,
    )

FOLDER = Path(__file__).resolve().parent
BASE = FOLDER / "corpus" / "base"
LLAMA = FOLDER / "corpus" / "llama.safetensors"
NAMES = [line[1:-1].encode() for line in (FOLDER / "names.dict").read_text().splitlines()]
# Address space beyond what the imports took: a reader that believes a size runs into it.
MEMORY_BYTES = 512 << 20
N_LAYER, N_EMBD, N_FF = 2, 8, 12  # of the corpora


def ignore(text: str) -> None:
    """A note that nobody reads."""


# ---- Targets -------------------------------------------------------------------------------------------------------


def fuzz_plan(data: bytes, folder: Path) -> None:
    """Any GGUF, and plans by both readers: what the one takes the other takes, but for text that isn't UTF-8."""
    path = _written(folder / "x.powerinfer.gguf", data)
    with contextlib.suppress(PowerInferError):
        _read_everything(gguf_file.GgufFile(path))
    for base in (BASE, None):
        try:
            _read_plan(path, base)
            refused = ""
        except PowerInferError as error:
            refused = str(error)
        try:
            _core.find_placement(path, base, [1000])
        except PowerInferError as error:
            assert refused, f"format.py takes it, plan-read.cpp doesn't: {error}"
        else:
            assert not refused or "UTF-8" in refused, f"plan-read.cpp takes it, format.py doesn't: {refused}"


def _read_everything(file: gguf_file.GgufFile) -> None:
    for key in file.values:
        file.get_int(key)
        file.entry(key)
        try:
            file.get(key)
        except FormatError:
            continue
    for name, tensor in file.tensors.items():
        assert tensor.n_bytes <= file.size and file.array(name).nbytes == tensor.n_bytes
        if tensor.n_bytes:
            with contextlib.suppress(FormatError):  # of a type without a conversion
                file.rows_f32(name, slice(2))


def _read_plan(path: Path, base: Path | None) -> None:
    plan = pi_format.read_plan(path)
    model = plan.open_base(base)
    for i, layer in enumerate(plan.layers):
        for rows in (layer.ffn_down_t, layer.fc1, layer.fc2):
            if rows is not None:
                rows.to_f32()
        model.why_not_covered(i)
    pi_format.find_placement(plan, [1000])


def fuzz_original(data: bytes, folder: Path) -> None:
    """Models and GPU splits of the original PowerInfer."""
    path = _written(folder / "x", data)
    for read in (_read_original, _read_split):
        try:
            read(path)
        except PowerInferError:
            continue


def _read_original(path: Path) -> None:
    model = import_powerinfer.OriginalModel(path)
    for i, n_ff in enumerate(model.n_ff()):
        if n_ff:
            model.rows(f"blk.{i}.ffn_down_t.weight")
    import_powerinfer.write_base(model, path.with_name("base.gguf"), 1, lambda n, n_all: None)


def _read_split(path: Path) -> None:
    powerinfer_files.read_split(path, [N_FF] * N_LAYER)


def fuzz_weights(data: bytes, folder: Path) -> None:
    """A file of tensors: safetensors, torch's, or torch's with this as its pickle. Of a checkpoint, counts and predictors."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("x/data.pkl", data)
        file.writestr("x/byteorder", b"little")
        file.writestr("x/data/0", bytes(8 * N_FF))
        file.writestr("x/data/1", bytes(4 * N_FF * N_EMBD))
        file.writestr("x/version", b"3\n")
    for content in (archive.getvalue(), data):
        for name in ("activation_0.pt", "model_0.pt", checkpoint.TORCH_FILE):
            _written(folder / name, content)
        for read in (_read_activations, _read_predictors, _read_checkpoint):
            try:
                read(folder)
            except PowerInferError:
                continue
    _written(folder / checkpoint.SAFETENSORS, data)
    _read_checkpoint(folder)


def _read_activations(folder: Path) -> None:
    powerinfer_files.read_activations(folder, [N_FF], ignore)


def _read_predictors(folder: Path) -> None:
    powerinfer_files.read_predictors(folder, N_EMBD, [N_FF], ignore)


def _read_checkpoint(folder: Path) -> None:
    found = checkpoint.Checkpoint(folder)
    for tensor in found.shapes:
        found.tensor(tensor)


def fuzz_checkpoint(data: bytes, folder: Path) -> None:
    """The JSON files of a checkpoint's folder, all in one document: {file name: content}."""
    try:
        files = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(files, dict) or not set(files) <= CHECKPOINT_FILES:
        return
    for name, content in files.items():
        _written(folder / name, json.dumps(content).encode())
    if "vocab.json" in files:
        _written(folder / "merges.txt", b"#version: 0.2\na b\n")
    shutil.copy(LLAMA, folder / "model.safetensors")
    with contextlib.suppress(PowerInferError):
        model = architectures.read_model(folder, ignore, ignore)
        for source in model.sources:
            model.read(source)
        model.add_keys(gguf.GGUFWriter(None, "llama"))
    config = files.get("config.json")
    if isinstance(config, dict) and isinstance(config.get("vocab_size"), int) and 0 < config["vocab_size"] < 1000:
        hf_tokenizer.add_tokenizer(gguf.GGUFWriter(None, "llama"), folder, config, ignore)


CHECKPOINT_FILES = {
    "config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json", "special_tokens_map.json",
    "model.safetensors.index.json",
}  # fmt: skip


def fuzz_sentencepiece(data: bytes, folder: Path) -> None:
    """A tokenizer.model."""
    _written(folder / "tokenizer.model", data)
    hf_tokenizer.add_tokenizer(gguf.GGUFWriter(None, "llama"), folder, {"vocab_size": 300}, ignore)


def fuzz_hardware(data: bytes, folder: Path) -> None:
    """A hardware file."""
    hardware.read_hardware(_written(folder / "x.json", data))


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@dataclass(frozen=True)
class Target:
    """A reader under test."""

    run: Callable[[bytes, Path], None]
    change: Callable[[bytes, random.Random], bytes] | None = None  # keeps the structure; None: bytes only


def _change_gguf(data: bytes, rng: random.Random) -> bytes:
    return mutators.change_gguf(data, NAMES, rng)


TARGETS = {
    "plan": Target(fuzz_plan, _change_gguf),
    "original": Target(fuzz_original, _change_gguf),
    "weights": Target(fuzz_weights),
    "checkpoint": Target(fuzz_checkpoint, mutators.change_json),
    "sentencepiece": Target(fuzz_sentencepiece),
    "hardware": Target(fuzz_hardware, mutators.change_json),
}


def run_once(target: Target, data: bytes) -> None:
    """One input, in a folder of its own in memory.

    Raises:
        Exception: the reader let something through that isn't an error of ours.
    """
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder:
        try:
            target.run(data, Path(folder))
        except PowerInferError:
            return


MEMORY_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main() -> int:
    target = TARGETS[sys.argv[1]]
    warnings.simplefilter("ignore")  # torch's, on pickles
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES,) * 2)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if target.change is not None and rng.random() < 0.5:
            try:
                return target.change(data, rng)[:max_size]
            except (ValueError, KeyError, RecursionError):
                pass
        return atheris.Mutate(data, max_size)

    atheris.Setup([sys.argv[0], *sys.argv[2:]], lambda data: run_once(target, data), custom_mutator=mutate)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
