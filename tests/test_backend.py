"""The backend inside a real llama context: blocks that an eval callback takes apart, node by node."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import tiny_models

from powerinfer_py import _core

N_TOKENS = 9
# F32 weights and F32 KV cache: only the order of summation differs.
TOLERANCE = 1e-4
# Upstream's gelu reads a table by an input rounded to F16: a last-bit difference before it can become one of 5e-4 behind it.
GELU_TOLERANCE = 1e-3

base = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so.0"))
base.ggml_get_name.restype = ctypes.c_char_p
base.ggml_nbytes.restype = ctypes.c_size_t
for name in ("ggml_get_name", "ggml_nbytes"):
    getattr(base, name).argtypes = [ctypes.c_void_p]
base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]


def run(
    model: int, wanted: Callable[[str], bool] | None, batch_size: int = N_TOKENS
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Decodes fixed tokens. Returns logits (N_TOKENS, n_vocab) and the wanted nodes' values of the last batch."""
    values: dict[str, np.ndarray] = {}

    def callback(tensor: int, ask: bool, _: int) -> bool:
        node = base.ggml_get_name(tensor).decode()
        if ask:
            return wanted(node)
        data = np.empty(base.ggml_nbytes(tensor) // 4, np.float32)
        base.ggml_backend_tensor_get(tensor, data.ctypes.data_as(ctypes.c_void_p), 0, data.nbytes)
        values[node] = data
        return True

    params = llama_cpp.llama_context_default_params()
    params.n_ctx = 64
    params.type_k = params.type_v = 0  # F32
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.n_threads = params.n_threads_batch = 2
    keep = llama_cpp.ggml_backend_sched_eval_callback(callback)
    if wanted:
        params.cb_eval = keep
    context = llama_cpp.llama_init_from_model(model, params)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(N_TOKENS, 0, 1)
    logits = []
    for first in range(0, N_TOKENS, batch_size):
        batch.n_tokens = min(batch_size, N_TOKENS - first)
        for i in range(batch.n_tokens):
            batch.token[i] = 40 + 7 * (first + i)
            batch.pos[i] = first + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        assert llama_cpp.llama_decode(context, batch) == 0
        rows = llama_cpp.llama_get_logits(context)
        logits.append(np.ctypeslib.as_array(rows, shape=(batch.n_tokens, n_vocab)).copy())
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return np.concatenate(logits), values


@pytest.fixture
def load() -> Callable[[_core.Plan | None, Path], int]:
    """`load(plan, path)`: a llama_model of the plan, or a stock one; freed at the end."""
    llama_cpp.llama_backend_init()
    models = []

    def load_model(plan: _core.Plan | None, path: Path) -> int:
        params = llama_cpp.llama_model_default_params()
        if plan is None:
            models.append(llama_cpp.llama_model_load_from_file(str(path).encode(), params))
        else:
            models.append(plan.load_model(ctypes.addressof(params)))
        return models[-1]

    yield load_model
    for model in models:
        llama_cpp.llama_model_free(model)


@pytest.mark.parametrize("batch_size", [1, N_TOKENS])
@pytest.mark.parametrize(
    ("arch", "activation"),
    [
        *((arch, "graph") for arch in tiny_models.ARCHITECTURES),
        ("llama", "relu"),
        ("llama", "relu_sqr"),
        ("llama", "drelu"),
        ("gpt2", "relu"),
        ("falcon", "relu_sqr"),
    ],
)
def test_block_taken_apart_by_a_callback_computes_the_same(
    arch: str,
    activation: str,
    batch_size: int,
    tiny_model: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    load: Callable[..., int],
) -> None:
    tolerance = TOLERANCE if arch == "llama" or activation != "graph" else GELU_TOLERANCE
    path = tiny_model(arch, n_layer=3)
    if activation == "graph":
        plan = _core.Plan.open_bare(str(path), sparsity="dense")
        expected, _ = run(load(None, path), None, batch_size)
    else:
        file = tiny_plan(path, activation=activation, order_seed=3, activation_param=0.1)
        plan = _core.Plan.open(str(file), str(path), sparsity="exact")
        expected, _ = run(load(plan, path), None, batch_size)
        assert plan.stats()["n_blocks_by_op"] == 0
    model = load(plan, path)
    whole, _ = run(model, None, batch_size)
    assert np.abs(whole - expected).max() < tolerance

    plan.reset_stats()
    by_node, values = run(model, lambda node: True, batch_size)
    assert np.abs(by_node - expected).max() < tolerance
    assert plan.stats()["n_blocks_by_op"] == 3 * -(-N_TOKENS // batch_size)
    assert plan.stats()["n_blocks_whole"] == 0
    assert any(node.startswith("ffn_up") for node in values)

    # A callback that wants one node in the middle of one block leaves the other blocks whole.
    plan.reset_stats()
    some, _ = run(model, lambda node: node == "ffn_up-1", batch_size)
    assert np.abs(some - expected).max() < tolerance
    assert plan.stats()["n_blocks_by_op"] == -(-N_TOKENS // batch_size)
    assert plan.stats()["n_blocks_whole"] == 2 * -(-N_TOKENS // batch_size)


def test_values_that_a_callback_sees_are_in_the_bases_neuron_order(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], load: Callable[..., int]
) -> None:
    path = tiny_model("llama", n_layer=2)
    plan = _core.Plan.open(str(tiny_plan(path, activation="silu", order_seed=5)), str(path), sparsity="dense")
    nodes = ("ffn_gate-1", "ffn_up-1", "ffn_swiglu-1", "ffn_out-1")
    _, expected = run(load(None, path), lambda node: node in nodes)
    _, found = run(load(plan, path), lambda node: node in nodes)
    assert set(expected) == set(nodes) == set(found)
    for node in nodes:
        assert np.abs(found[node] - expected[node]).max() < TOLERANCE


def test_device_is_registered_once_and_stock_contexts_stay_stock(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], load: Callable[..., int]
) -> None:
    path = tiny_model("llama")
    before, _ = run(load(None, path), None)
    plan = _core.Plan.open(str(tiny_plan(path, activation="relu")), str(path))
    sparse, _ = run(load(plan, path), None)
    after, _ = run(load(None, path), None)
    assert np.array_equal(before, after)
    assert np.abs(sparse - before).max() > TOLERANCE
    assert plan.stats()["n_blocks_whole"] == 4


def test_module_loads_twice_as_a_backend_of_ggml() -> None:
    code = f"""
import ctypes, llama_cpp
from pathlib import Path
ggml = ctypes.CDLL("libggml.so.0")
ggml.ggml_backend_load.restype = ctypes.c_void_p
ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
before = ggml.ggml_backend_dev_count()
path = {str(Path(_core.__file__).parent / "lib" / "libggml-powerinfer.so")!r}.encode()
assert ggml.ggml_backend_load(path) == ggml.ggml_backend_load(path) != None
assert ggml.ggml_backend_dev_count() == before + 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_unreadable_environment_plan_starts_no_context(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    code = f"""
import ctypes, llama_cpp
ggml = ctypes.CDLL("libggml.so.0")
ggml.ggml_backend_load({str(Path(_core.__file__).parent / "lib" / "libggml-powerinfer.so")!r}.encode())
llama_cpp.Llama({str(tiny_model())!r}, verbose=True)
"""
    environment = {**os.environ, "POWERINFER_PLAN": str(tmp_path / "absent.powerinfer.gguf")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "absent.powerinfer.gguf: can't be opened" in done.stderr
