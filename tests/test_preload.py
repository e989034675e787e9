"""An unmodified llama_cpp program in another process, with LD_PRELOAD and POWERINFER_PLAN."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import tiny_models

from powerinfer_py import Llama, _core

TIMEOUT_S = 120
TOLERANCE = 1e-4  # F32 weights and KV cache: only the order of sums differs
TOKENS = [1, *range(260, 300)]
OPTIONS = {
    "n_ctx": 128, "n_threads": 2, "n_threads_batch": 2, "logits_all": True,
    "type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False,
}  # fmt: skip
STOCK_PROGRAM = f"""
import sys
import numpy as np
import llama_cpp
assert "powerinfer_py" not in sys.modules
llm = llama_cpp.Llama(sys.argv[1], verbose=True, **{OPTIONS!r})  # otherwise it closes stderr while it loads
llm.eval({TOKENS!r})
np.save(sys.argv[2], llm.scores[: {len(TOKENS)}])
"""


def preload_library() -> str:
    """The library as installed: beside the core, in lib/."""
    path = Path(_core.__file__).parent / "lib" / "libpowerinfer-preload.so"
    assert path.exists(), path
    return str(path)


def run_stock(
    model: Path, out: Path, plan: Path | str | None, *, preload: bool = True
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("POWERINFER_PLAN", "PYTHONPATH")}
    if preload:
        env["LD_PRELOAD"] = " ".join(filter(None, (preload_library(), os.environ.get("LD_PRELOAD"))))
    if plan is not None:
        env["POWERINFER_PLAN"] = str(plan)
    command = [sys.executable, "-c", STOCK_PROGRAM, str(model), str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)


def stock_logits(model: Path, out: Path, plan: Path | str | None, *, preload: bool = True) -> np.ndarray:
    """(n_tokens, n_vocab) float32 from the other process."""
    result = run_stock(model, out, plan, preload=preload)
    assert result.returncode == 0, result.stderr
    return np.load(out)


def own_logits(model: Path, **options: object) -> np.ndarray:
    """(n_tokens, n_vocab) float32 from powerinfer_py in this process."""
    with Llama(str(model), verbose=False, **OPTIONS, **options) as llm:
        llm.eval(TOKENS)
        return llm.scores[: len(TOKENS)].copy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preload")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return tiny_models.write_tiny_model(folder / "base.gguf")


@pytest.fixture(scope="module")
def plan(model: Path) -> Path:
    """Says relu where the model's graph says silu."""
    return tiny_models.write_tiny_plan(model, activation="relu", order_seed=1)


def test_the_plan_computes_in_a_stock_program(model: Path, plan: Path, folder: Path) -> None:
    stock = stock_logits(model, folder / "stock.npy", None, preload=False)
    sparse = stock_logits(model, folder / "sparse.npy", plan)
    assert np.abs(sparse - stock).max() > 100 * TOLERANCE
    np.testing.assert_allclose(sparse, own_logits(model, plan=plan), atol=TOLERANCE, rtol=0)


def test_an_embedded_plan_on_its_base(model: Path, folder: Path, plan: Path) -> None:
    embedded = tiny_models.write_tiny_plan(
        model, folder / "all.powerinfer.gguf", activation="relu", order_seed=1, embedded=True
    )
    sparse = stock_logits(model, folder / "embedded.npy", embedded)
    np.testing.assert_allclose(sparse, own_logits(model, plan=plan), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_it_does_nothing(model: Path, folder: Path, value: str | None) -> None:
    stock = stock_logits(model, folder / "stock.npy", None, preload=False)
    assert np.array_equal(stock_logits(model, folder / "nothing.npy", value), stock)


def test_other_programs_are_left_alone(plan: Path) -> None:
    env = {**os.environ, "LD_PRELOAD": preload_library(), "POWERINFER_PLAN": str(plan)}
    echo = shutil.which("echo")
    assert echo
    result = subprocess.run([echo, "hello"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True, env=env)
    assert (result.stdout, result.stderr) == ("hello\n", "")


def test_the_plan_of_another_model_fails(plan: Path, folder: Path) -> None:
    (folder / "other").mkdir()
    other = tiny_models.write_tiny_model(folder / "other" / "base.gguf", seed=9)  # same shapes, other weights
    for used in (plan, shutil.copy(plan, folder / "other" / "base.powerinfer.gguf")):
        result = run_stock(other, folder / "never.npy", used)
        assert result.returncode != 0
        assert "the plan was made for" in result.stderr, result.stderr
        assert not (folder / "never.npy").exists()


@pytest.mark.parametrize("content", [None, b"", b"not a plan"])
def test_a_plan_that_cannot_be_read_fails(model: Path, folder: Path, content: bytes | None) -> None:
    broken = folder / "broken.powerinfer.gguf"
    broken.unlink(missing_ok=True)
    if content is not None:
        broken.write_bytes(content)
    result = run_stock(model, folder / "never.npy", broken)
    assert result.returncode == 1
    assert result.stderr.startswith("powerinfer: POWERINFER_PLAN: ") and result.stderr.count("\n") == 1, result.stderr
    assert str(broken) in result.stderr
    assert not (folder / "never.npy").exists()
