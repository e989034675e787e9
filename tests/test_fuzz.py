"""What fuzzing starts from and what it found, through the same targets; and that it notices what a reader must not do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from powerinfer_py.errors import FormatError
from powerinfer_py.tools.checkpoint import Checkpoint, read_json
from powerinfer_py.tools.hf_tokenizer import add_tokenizer

FOLDER = Path(__file__).resolve().parent / "fuzz"
sys.path.insert(0, str(FOLDER))
fuzz_run = pytest.importorskip("run")
fuzz_python = pytest.importorskip("fuzz_python", reason="atheris has no release for this Python")


@pytest.mark.parametrize("name", fuzz_python.TARGETS)
def test_readers_let_nothing_but_their_errors_out(name: str) -> None:
    inputs = sorted((FOLDER / "corpus" / name).iterdir())
    assert inputs
    for path in inputs:
        fuzz_python.run_once(fuzz_python.TARGETS[name], path.read_bytes())


def test_every_target_is_run() -> None:
    assert set(fuzz_run.PYTHON_TARGETS) == set(fuzz_python.TARGETS)


def test_another_error_is_a_finding() -> None:
    def reader(data: bytes, folder: Path) -> None:
        raise KeyError(data)

    with pytest.raises(KeyError):
        fuzz_python.run_once(fuzz_python.Target(reader), b"")


def test_json_too_deep_to_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(FormatError, match="can't be read"):
        read_json(path)


def test_shard_with_too_long_a_name_isnt_there(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    with pytest.raises(FormatError, match="isn't there"):
        Checkpoint(tmp_path)


def test_sentencepiece_piece_that_isnt_utf8_is_an_error(tmp_path: Path) -> None:
    content = (FOLDER / "corpus" / "sentencepiece" / "type-2").read_bytes()
    # a piece of kind 4, user defined
    (tmp_path / "tokenizer.model").write_bytes(content + b"\x0a\x06\x0a\x02\xff\xfe\x18\x04")
    with pytest.raises(FormatError, match="something unexpected"):
        add_tokenizer(None, tmp_path, {"vocab_size": 300}, print)


def test_tokenizer_file_with_values_of_other_kinds_is_an_error(tmp_path: Path) -> None:
    files = json.loads((FOLDER / "corpus" / "checkpoint" / "llama").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(files["tokenizer.json"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": ["</s>"]}))
    with pytest.raises(FormatError, match="something unexpected"):
        add_tokenizer(None, tmp_path, {"vocab_size": 16}, print)


@pytest.mark.parametrize("change", [{"unk_token": "<gone>"}, {"vocab": {}}])
def test_tokenizer_library_that_gives_up_is_an_error(change: dict, tmp_path: Path) -> None:
    """It raises bare Exceptions: while it reads the file, or at the first text."""
    files = json.loads((FOLDER / "corpus" / "checkpoint" / "llama").read_text())
    model = {"type": "WordLevel", "vocab": {"<s>": 0}, "unk_token": "<s>", **change}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**files["tokenizer.json"], "model": model}))
    with pytest.raises(FormatError):
        add_tokenizer(None, tmp_path, {"vocab_size": 16}, print)
