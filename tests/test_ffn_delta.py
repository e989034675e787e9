"""A model made again from its original, its feed-forward rows and its plan."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from powerinfer_py import Llama
from powerinfer_py import format as pi_format
from powerinfer_py.errors import FormatError, PlanError
from powerinfer_py.tools import ffn_delta
from powerinfer_py.tools.rewrite_gguf import TensorSource, string_entry, write_changed
from powerinfer_py.tools.row_types import quantize_rows, row_type_id, rows_of

TYPE = row_type_id("q4_0")
TEXT = [5, 9, 2, 40, 17, 3, 11]


@pytest.fixture
def sparse(tiny_model: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A tiny model, and one that other feed-forward weights and a plan with their down rows were made for."""
    original = tiny_model()
    base = pi_format.BaseModel(original)
    random = np.random.default_rng(3)
    sources, down = [], []
    for i in range(base.n_layer):
        for name, tensor in base.ffn(i).items():
            n_rows, n_values = tensor.rows_shape
            values = random.standard_normal((n_rows, n_values), np.float32) * 0.1
            rows = quantize_rows(values, TYPE.name)
            sources.append(TensorSource.matrix(tensor.name, TYPE, n_rows, n_values, lambda rows=rows: rows.reshape(-1)))
            if name == "down":
                down.append(np.ascontiguousarray(values.T))
    model = tmp_path / "sparse.gguf"
    write_changed(base, model, {"general.name": string_entry("general.name", "sparse")}, sources, lambda n, n_all: None)
    plan = pi_format.bare_plan(model, "relu")
    layers = []
    for layer, values in zip(plan.layers, down):
        order = random.permutation(layer.n_ff).astype(np.int32)
        layers.append(replace(layer, neuron_order=order, ffn_down_t=rows_of(np.ascontiguousarray(values[order]), TYPE)))
    pi_format.write_plan(replace(plan, layers=tuple(layers)), tmp_path / "sparse.powerinfer.gguf")
    return original, model


def logits(model: Path) -> np.ndarray:
    with Llama(str(model), n_ctx=32, logits_all=True, verbose=False, sparsity="exact") as llama:
        llama.eval(TEXT)
        return np.array(llama.scores[: len(TEXT)])


def test_model_made_again_gives_the_same_logits_and_other_tensors_are_the_originals(
    sparse: tuple[Path, Path], tmp_path: Path
) -> None:
    original, model = sparse
    rows, again = tmp_path / "rows.gguf", tmp_path / "again.gguf"
    ffn_delta.pack(model, rows)
    assert rows.stat().st_size < 0.8 * model.stat().st_size
    ffn_delta.apply(original, rows, tmp_path / "sparse.powerinfer.gguf", again, 1)
    assert np.array_equal(logits(again), logits(model))
    first, base, stock = pi_format.BaseModel(again), pi_format.BaseModel(model), pi_format.BaseModel(original)
    assert first.files[0].get("general.name") == "sparse"
    for name in base.tensors:
        if "ffn_down" not in name:
            assert np.array_equal(first.raw(name), base.raw(name))
        if ".ffn_" not in name:
            assert np.array_equal(first.raw(name), stock.raw(name))


def test_files_that_dont_belong_together_are_refused_and_leave_nothing(
    sparse: tuple[Path, Path], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    original, model = sparse
    rows, out, plan = tmp_path / "rows.gguf", tmp_path / "out.gguf", tmp_path / "sparse.powerinfer.gguf"
    ffn_delta.pack(model, rows)
    with pytest.raises(FormatError, match="isn't a file of feed-forward rows"):
        ffn_delta.apply(original, model, plan, out, 1)
    with pytest.raises(FormatError, match="give the files that belong together"):
        ffn_delta.apply(tiny_model(n_ff=128), rows, plan, out, 1)
    bare = tmp_path / "bare.powerinfer.gguf"
    pi_format.write_plan(pi_format.bare_plan(model, "relu"), bare)
    with pytest.raises(PlanError, match="has no ffn_down_t"):
        ffn_delta.apply(original, rows, bare, out, 1)
    with pytest.raises(PlanError, match="there is no plan beside it"):
        ffn_delta.pack(original, tmp_path / "none.gguf")
    assert not out.exists() and not list(tmp_path.glob(".*"))


def test_command_line_makes_the_model(sparse: tuple[Path, Path], tmp_path: Path) -> None:
    original, model = sparse
    command = [sys.executable, "-m", "powerinfer_py.tools.ffn_delta"]
    subprocess.run([*command, "pack", model, tmp_path / "rows.gguf"], check=True)
    files = [original, tmp_path / "rows.gguf", tmp_path / "sparse.powerinfer.gguf"]
    subprocess.run([*command, "apply", *files, "-o", tmp_path / "again.gguf"], check=True)
    assert (tmp_path / "again.gguf").exists() and (tmp_path / "again.powerinfer.gguf").exists()
    wrong = subprocess.run([*command, "apply", *files, "-o", original], capture_output=True, text=True)
    assert wrong.returncode == 1 and "expected another name" in wrong.stderr
