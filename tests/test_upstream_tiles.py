"""Upstream after another library released the AMX tiles of its threads: it decodes on. Without AMX there is nothing to release."""

from __future__ import annotations

from pathlib import Path

import devices
import numpy as np
import pytest

MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-relu" / "tiny-relu.Q8_0.gguf"
PLAN = MODEL.with_name("tiny-relu.Q8_0.powerinfer.gguf")
N_CTX = 64


def multiply_bf16() -> None:
    """What makes torch's oneDNN load and release tiles on each of its threads, which are upstream's too."""
    import torch

    values = torch.ones(256, 256, dtype=torch.bfloat16)
    assert (values @ values)[0, 0] == 256


def differences_of_llama() -> list[float]:
    """How far logits and embeddings move when bf16 products ran in between."""
    from powerinfer_py import Llama

    def logits() -> np.ndarray:
        model.reset()
        model.eval(list(range(300, 300 + N_CTX)))
        return np.array(model.scores[:N_CTX])

    with Llama(str(MODEL), n_ctx=N_CTX, logits_all=True, verbose=False) as model:
        before = logits()
        multiply_bf16()
        moved = [float(np.abs(logits() - before).max())]
    with Llama(str(MODEL), n_ctx=N_CTX, embedding=True, verbose=False) as model:
        text = "the river came down from the hills in spring, brown and fast"
        first = np.array(model.embed(text))
        multiply_bf16()
        return [*moved, float(np.abs(np.array(model.embed(text)) - first).max())]


def differences_of_runner(plan: Path | None) -> list[float]:
    from powerinfer_py.tools.text_runner import Runner

    tokens = np.arange(300, 300 + N_CTX, dtype=np.int32)
    with Runner(plan, MODEL, n_ctx=N_CTX, note=print) as runner:
        before = runner.run(tokens).copy()
        multiply_bf16()
        return [float(np.abs(runner.run(tokens) - before).max())]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(differences_of_llama, ()), (differences_of_runner, (None,)), (differences_of_runner, (PLAN,))],
    ids=["llama", "stock", "plan"],
)
def test_upstream_decodes_after_torch_released_the_tiles_of_its_threads(
    function: object, arguments: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")  # set for the other tests, by conftest.py
    assert not any(devices.run_in_child(function, *arguments))
