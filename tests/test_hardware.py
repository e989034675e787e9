"""The hardware file: what is written is read again, and what can't be is refused with the key that is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from powerinfer_py.errors import FormatError
from powerinfer_py.tools.hardware import Cpu, Gpu, Hardware, read_hardware, write_hardware

CPU = Cpu("some CPU", 64 << 30, 5e10, {"f16": 4.5e10, "q4_K": 3e10}, n_threads=8)
GPU = Gpu("some GPU", 24 << 30, 1e12, {"f16": 9e11}, to_gpu_bytes_s=2.5e10, to_cpu_bytes_s=2.4e10, round_trip_s=2e-5)


def file_of(**changes: Any) -> dict[str, Any]:
    """A good file's contents, with other values at keys joined by __; None removes the key."""
    found = {"format_version": 1, **dataclasses.asdict(Hardware("machine", "measured", CPU, (GPU,)))}
    found["gpus"] = list(found["gpus"])
    for key, value in changes.items():
        *path, last = (int(part) if part.isdigit() else part for part in key.split("__"))
        target = found
        for part in path:
            target = target[part]
        target[last] = value
        if value is None:
            del target[last]
    return found


@pytest.mark.parametrize("gpus", [(), (GPU,), (GPU, dataclasses.replace(GPU, name="other"))])
def test_file_is_read_as_it_was_written(tmp_path: Path, gpus: tuple[Gpu, ...]) -> None:
    hardware = Hardware("machine", "measured", CPU, gpus)
    assert write_hardware(hardware, tmp_path / "hw.json") == tmp_path / "hw.json"
    assert read_hardware(tmp_path / "hw.json") == hardware
    assert [path.name for path in tmp_path.iterdir()] == ["hw.json"]


def test_whole_numbers_may_stand_for_rates(tmp_path: Path) -> None:
    (tmp_path / "hw.json").write_text(json.dumps(file_of(cpu__bandwidth_bytes_s=70_000_000_000)))
    bandwidth = read_hardware(tmp_path / "hw.json").cpu.bandwidth_bytes_s
    assert bandwidth == 7e10 and isinstance(bandwidth, float)


def test_row_type_without_a_rate_has_the_bandwidth_and_it_is_said() -> None:
    notes: list[str] = []
    assert CPU.row_rate("q4_K", notes.append) == 3e10 and notes == []
    assert CPU.row_rate("q8_0", notes.append) == 5e10
    assert len(notes) == 1 and "some CPU" in notes[0] and "q8_0" in notes[0]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"format_version": 2}, "format_version is 2"),
        ({"format_version": True}, "format_version is True"),
        ({"format_version": None}, "format_version isn't there"),
        ({"extra": 1}, "extra isn't known"),
        ({"cpu__cores": 1}, "cpu.cores isn't known"),
        ({"gpus__0__watts": 1}, "gpus[0].watts isn't known"),
        ({"name": " "}, "name is ' '"),
        ({"source": 3}, "source is 3"),
        ({"cpu": None}, "cpu isn't there"),
        ({"cpu": []}, "cpu is []"),
        ({"gpus": None}, "gpus isn't there"),
        ({"gpus": {}}, "gpus is {}"),
        ({"gpus__0": 1}, "gpus[0] is 1"),
        ({"cpu__n_threads": 0}, "cpu.n_threads is 0"),
        ({"cpu__n_threads": 1.5}, "cpu.n_threads is 1.5"),
        ({"cpu__memory_bytes": -1}, "cpu.memory_bytes is -1"),
        ({"cpu__memory_bytes": 10**400}, "cpu.memory_bytes is 1000"),
        ({"cpu__bandwidth_bytes_s": 0}, "cpu.bandwidth_bytes_s is 0"),
        ({"cpu__bandwidth_bytes_s": True}, "cpu.bandwidth_bytes_s is True"),
        ({"cpu__bandwidth_bytes_s": 10**400}, "cpu.bandwidth_bytes_s is 1000"),
        ({"cpu__row_bytes_s": []}, "cpu.row_bytes_s is []"),
        ({"cpu__row_bytes_s__f17": 1.0}, "cpu.row_bytes_s is 'f17'"),
        ({"cpu__row_bytes_s__f16": float("nan")}, "cpu.row_bytes_s.f16 is nan"),
        ({"gpus__0__to_gpu_bytes_s": -1.0}, "gpus[0].to_gpu_bytes_s is -1.0"),
        ({"gpus__0__to_cpu_bytes_s": "fast"}, "gpus[0].to_cpu_bytes_s is 'fast'"),
        ({"gpus__0__round_trip_s": float("inf")}, "gpus[0].round_trip_s is inf"),
        ({"gpus__0__round_trip_s": None}, "gpus[0].round_trip_s isn't there"),
    ],
)
def test_wrong_figure_is_refused_by_its_key(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    path = tmp_path / "hw.json"
    path.write_text(json.dumps(file_of(**changes)))
    with pytest.raises(FormatError) as caught:
        read_hardware(path)
    assert str(caught.value).startswith(f"{path}: {found}")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "it isn't JSON"),
        (b"GGUF\x00\xff", "it isn't UTF-8"),
        (b"[" * 100_000, "it isn't JSON"),
        (b"[]", "format_version isn't there"),
        (b'{"format_version": 1, "format_version": 1}', "format_version is there twice"),
        (b" " * (2**20 + 1), "more than 1048576 bytes"),
    ],
)
def test_file_that_is_something_else_is_refused(tmp_path: Path, data: bytes, found: str) -> None:
    path = tmp_path / "hw.json"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=found):
        read_hardware(path)


def test_figure_that_a_reader_would_refuse_is_not_written(tmp_path: Path) -> None:
    bad = Hardware("machine", "measured", dataclasses.replace(CPU, bandwidth_bytes_s=float("nan")))
    with pytest.raises(FormatError, match="bandwidth_bytes_s is nan"):
        write_hardware(bad, tmp_path / "hw.json")
    assert list(tmp_path.iterdir()) == []


def test_file_in_the_documents_can_be_read(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "placement.md").read_text(encoding="utf-8")
    (tmp_path / "hw.json").write_text(re.search(r"^```json\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1])
    assert read_hardware(tmp_path / "hw.json").gpus[0].round_trip_s == 2e-5
