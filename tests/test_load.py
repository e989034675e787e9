"""Loading a model with a plan: how far it is, that Ctrl-C ends it, and the memory it takes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import pytest

from powerinfer_py import Llama, _core

# Pages of small allocations and of the tensors that aren't in FFNs, beside the weights of the memory test.
SMALL_BYTES = 4 << 20


def load_model(plan: _core.Plan, progress: Callable[[float], None] | None = None) -> int:
    params = llama_cpp.llama_model_default_params()
    return plan.load_model(ctypes.addressof(params), progress)


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(n_layer=3)


def test_progress_goes_from_0_to_1(model: Path, tiny_plan: Callable[..., Path]) -> None:
    shares: list[float] = []
    with _core.Plan.open(tiny_plan(model), model) as plan:
        llama_cpp.llama_model_free(load_model(plan, shares.append))
    assert shares[0] == 0.0 and shares[-1] == 1.0
    assert shares == sorted(shares) and len(shares) > 3 * 9  # before each tensor


def test_what_progress_raises_ends_the_load(model: Path, tiny_plan: Callable[..., Path]) -> None:
    shares: list[float] = []

    def fail(share: float) -> None:
        shares.append(share)
        if len(shares) == 3:
            raise LookupError("stop")

    with _core.Plan.open(tiny_plan(model), model) as plan:
        with pytest.raises(LookupError, match="stop"):
            load_model(plan, fail)
        assert len(shares) == 3
        llama_cpp.llama_model_free(load_model(plan))


def test_ctrl_c_ends_a_load(model: Path, tiny_plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            if "loading" in text and "50 %" in text:
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    options = {"plan": tiny_plan(model), "n_ctx": 64, "n_threads": 1}
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            Llama(model, verbose=True, **options)
    assert str(model) not in Path("/proc/self/maps").read_text()
    with Llama(model, verbose=False, **options) as llama:
        llama.eval([1])


def test_a_load_that_isnt_on_a_terminal_shows_tenths_when_verbose(
    model: Path, tiny_plan: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"plan": tiny_plan(model), "n_ctx": 64, "n_threads": 1, "sparsity": "dense"}
    Llama(model, verbose=False, **options).close()
    assert capfd.readouterr().err == ""
    Llama(model, verbose=True, **options).close()
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("loading ")]
    assert lines[0] == f"loading {model.name}: 0 %" and lines[-1] == f"loading {model.name}: 100 %"
    assert 2 < len(lines) <= 11


@pytest.mark.parametrize("verbose", [False, True])
def test_a_load_on_a_terminal_shows_one_line_that_goes_away(
    model: Path, tiny_plan: Callable[..., Path], verbose: bool
) -> None:
    code = (
        "import sys, powerinfer_py\n"
        "powerinfer_py.Llama(sys.argv[1], plan=sys.argv[2], n_ctx=64, sparsity='dense', verbose=bool(int(sys.argv[3])))\n"
    )
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", code, str(model), str(tiny_plan(model)), str(int(verbose))]
    with subprocess.Popen(command, stderr=end) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal says that nobody has it open any more
            while piece := os.read(terminal, 65536):
                shown += piece
    os.close(terminal)
    assert process.returncode == 0, shown
    name = model.name.encode()
    line = shown[shown.index(b"\rloading ") : shown.index(b"\x1b[K") + 3]
    assert line.startswith(b"\rloading %s:   0 %%" % name)
    assert line.endswith(b"\rloading %s: 100 %%\r\x1b[K" % name)
    assert b"\n" not in line
    assert verbose or shown == line


@pytest.mark.parametrize("ffn_down_t", ["F32", None])
def test_a_load_takes_no_more_memory_than_the_model_has(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], ffn_down_t: str | None
) -> None:
    path = tiny_model(n_layer=4, n_embd=256, n_ff=8192)
    plan_path = tiny_plan(path, order_seed=1, ffn_down_t=ffn_down_t)
    gc.collect()
    before = anonymous_bytes()
    seen: list[int] = []
    with _core.Plan.open(plan_path, path) as plan:
        loaded = load_model(plan, lambda _: seen.append(anonymous_bytes() - before))
        llama_cpp.llama_model_free(loaded)
    weight_bytes = 4 * 3 * 8192 * 256 * 4
    assert weight_bytes - SMALL_BYTES < max(seen) < 1.1 * path.stat().st_size + SMALL_BYTES
