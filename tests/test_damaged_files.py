"""Every offline verb, given a damaged file in each of its places: one line, at once, and nothing is left behind."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models

from powerinfer_py import cli
from powerinfer_py.tools import pack_plan
from powerinfer_py.tools.hardware import Cpu, Gpu, Hardware, write_hardware

# Of processor time; a check that reads what a header announces would take longer.
LIMIT_S = 1.0
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "10 %": lambda content: content[: len(content) // 10],
    "50 %": lambda content: content[: len(content) // 2],
    "99 %": lambda content: content[: len(content) * 99 // 100],
    "no bytes": lambda content: b"",
    "zero bytes": lambda content: bytes(len(content)),
    "text": lambda content: b"This is a text file, not a model.\n" * 100,
}
ONE_GPU = Hardware("one", "made up", Cpu("c", 1 << 36, 1e10, {}, 1), (Gpu("g", 1 << 30, 1e11, {}, 1e10, 1e10, 1e-5),))
# Verb and the place of the damaged file -> its command line. {model} has {plan} beside it; {packed} is both in one file.
COMMANDS = {
    "inspect model": "inspect {model}",
    "inspect plan": "inspect {plan}",
    "inspect packed": "inspect {packed}",
    "pack model": "pack {model} {plan} -o {out}/out.powerinfer.gguf",
    "pack plan": "pack {model} {plan} -o {out}/out.powerinfer.gguf",
    "pack part": "pack {split} {split_plan} -o {out}/out.powerinfer.gguf",
    "pack packed": "pack --extract {packed} -o {out}/out.gguf",
    "rebind model": "rebind {plan} {model} -o {out}/out.powerinfer.gguf",
    "rebind plan": "rebind {plan} {model} -o {out}/out.powerinfer.gguf",
    "profile model": "profile {model} --text {text} -o {out}/out.powerinfer.gguf",
    "profile part": "profile {split} --text {text} -o {out}/out.powerinfer.gguf",
    "perplexity model": "perplexity {model} -f {text} --json {out}/out.json",
    "perplexity plan": "perplexity {model} -f {text} --json {out}/out.json",
    "perplexity packed": "perplexity {packed} -f {text} --json {out}/out.json",
    "place model": "place {model} --vram-budget 1 --hardware {hardware} -o {out}/out.json --save",
    "place plan": "place {plan} --base {model} --vram-budget 1 --hardware {hardware} -o {out}/out.json",
    "place packed": "place {packed} --vram-budget 1 --hardware {hardware} -o {out}/out.json",
    "perplexity part": "perplexity {split} -f {text} --json {out}/out.json",
}


@pytest.fixture(scope="module")
def whole_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files that the commands name, undamaged."""
    folder = tmp_path_factory.mktemp("whole")
    files = {"model": tiny_models.write_tiny_model(folder / "m.gguf", n_layer=2)}
    files["plan"] = tiny_models.write_tiny_plan(files["model"], order_seed=1, predictor="linear", threshold=0.1)
    files["packed"] = folder / "packed.powerinfer.gguf"
    pack_plan.pack(files["model"], files["plan"], files["packed"])
    files["split"] = tiny_models.write_tiny_model(folder / "s.gguf", n_layer=2, split_max_tensors=15)
    files["split_plan"] = tiny_models.write_tiny_plan(files["split"])
    files["part"] = folder / files["split"].name.replace("-00001-", "-00002-")
    files["hardware"] = write_hardware(ONE_GPU, folder / "hardware.json")
    files["text"] = folder / "text.txt"
    files["text"].write_text("the river came down from the hills in spring, brown and fast. " * 200)
    return files


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", COMMANDS)
def test_damaged_file_is_one_line_at_once_and_leaves_nothing(
    command: str,
    damage: str,
    whole_files: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    paths = {name: tmp_path / path.name for name, path in whole_files.items()}
    for name, path in paths.items():
        path.write_bytes(whole_files[name].read_bytes())
    damaged = paths[command.split()[1]]
    damaged.write_bytes(DAMAGES[damage](damaged.read_bytes()))
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    start = time.process_time()
    code = cli.main(COMMANDS[command].format(out=tmp_path / "out", **paths).split())
    seconds = time.process_time() - start
    captured = capfd.readouterr()
    assert code == 1, captured
    errors = captured.err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("powerinfer: ") and damaged.name in errors[0], captured.err
    assert captured.out == ""
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before
    assert seconds < LIMIT_S


def test_the_commands_work_with_whole_files(whole_files: dict[str, Path], tmp_path: Path) -> None:
    for i, line in enumerate(COMMANDS.values()):
        out = tmp_path / str(i)
        out.mkdir()
        limits = " --no-plot --tokens 640 -c 32" if line.startswith("profile") else ""
        limits += " --chunks 1 -c 32" if line.startswith("perplexity") else ""
        assert cli.main((line + limits).format(out=out, **whole_files).split()) == 0, line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("inspect {model}", ""),
        ("perplexity {model} -f {text} -c 32 --chunks 1", "it has no plan"),
        ("profile {model} --text {text} -o {out} --activation relu --no-plot --tokens 64 -c 32", ""),
    ],
)
def test_an_ordinary_model_without_a_plan_works(
    line: str, said: str, whole_files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "plain.gguf"
    model.write_bytes(whole_files["model"].read_bytes())
    out = tmp_path / "out.powerinfer.gguf"
    assert cli.main(line.format(model=model, text=whole_files["text"], out=out).split()) == 0
    assert said in capsys.readouterr().err
