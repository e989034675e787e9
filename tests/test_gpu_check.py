"""tools/gpu_check.sh as far as it goes without a GPU: what it refuses, and how it says so."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "gpu_check.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [shutil.which("bash") or "bash", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_arguments_says_how_it_is_used() -> None:
    done = run()
    assert done.returncode == 2
    assert "usage: gpu_check.sh --prepare ARCH OUT.tar.xz" in done.stderr


def test_missing_pack_and_wrong_architecture_are_told() -> None:
    done = run("nothing.tar.xz")
    assert done.returncode == 1 and "nothing.tar.xz: not found; expected what --prepare wrote" in done.stderr
    done = run("--prepare", "hopper", "out.tar.xz")
    assert done.returncode == 1 and "architecture is 'hopper'; expected a number" in done.stderr


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine may have an NVIDIA GPU")
def test_machine_without_gpu_is_told(tmp_path: Path) -> None:
    pack = tmp_path / "pack.tar.xz"
    pack.touch()
    done = run(str(pack))
    assert done.returncode == 1 and "found no nvidia-smi; expected an NVIDIA GPU" in done.stderr
