"""Models whose FFN blocks are split between a GPU device and the CPU, inside real llama contexts, against the CPU alone.

Devices: ggml's RPC device on 127.0.0.1, whose buffers aren't host memory and which queues its work, and the fake one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import devices
import llama_cpp
import numpy as np
import pytest
from test_llama import write_lora

from powerinfer_py import _core
from powerinfer_py.errors import PlanError, PowerInferError

N_LAYER, N_EMBD, N_FF = 4, 64, 256
# F32 weights and F32 KV cache, flash attention off: only the order of sums differs.
TOLERANCE = 1e-4
# Q4_0: the device keeps down rows as Q8_0 along the neurons.
QUANTIZED_NMSE = 1e-3
TOKENS = [1, *np.random.default_rng(5).integers(3, 380, 59).tolist()]
BATCHES = (40, 1, 1, 12, 1, 5)  # a prompt that is streamed, single tokens, short batches
UNKNOWN_LAYERS = 99  # all of them


@dataclasses.dataclass(frozen=True)
class Run:
    """One load of a model and what is evaluated with it."""

    n_hot: tuple[int, ...] = ()  # empty: no split
    devices: tuple[str, ...] = ()
    i_device: tuple[int, ...] | None = None
    n_gpu_layers: int = 0
    stream: bool = False
    sparsity: str = "dense"
    max_tokens: int = 64
    n_contexts: int = 1
    lora: Path | None = None
    observed: bool = False  # an eval callback asks for every node: blocks run op by op


@dataclasses.dataclass(frozen=True)
class Outcome:
    logits: np.ndarray  # (n_contexts, n_tokens, n_vocab)
    stats: dict[str, float]
    layers: list[dict]
    notes: list[str]
    host_bytes: int
    device_bytes: list[int]
    trace: list[dict]


class Loaded:
    """A model loaded with its plan, and its contexts."""

    def __init__(self, stack: contextlib.ExitStack, model: Path, plan: Path, run: Run) -> None:
        llama_cpp.llama_backend_init()
        self.notes: list[str] = []
        self.trace: list[dict] = []
        self.plan = stack.enter_context(_core.Plan.open(plan, model, sparsity=run.sparsity, note=self.notes.append))
        if run.n_hot:
            self.plan.set_split(
                list(run.devices), list(run.n_hot), i_device=run.i_device and list(run.i_device),
                max_tokens=run.max_tokens, stream_tokens=32 if run.stream else -1,
            )  # fmt: skip
            self.plan.set_trace(self.trace.append)
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = run.n_gpu_layers
        self.model = self.plan.load_model(ctypes.addressof(params))
        stack.callback(llama_cpp.llama_model_free, self.model)
        context_params = llama_cpp.llama_context_default_params()
        context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = 128
        context_params.type_k = context_params.type_v = 0  # F32
        context_params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context_params.n_threads = context_params.n_threads_batch = 2
        context_params.op_offload = False
        self.observer = llama_cpp.ggml_backend_sched_eval_callback(lambda tensor, ask, user_data: True)
        if run.observed:
            context_params.cb_eval = self.observer
        self.contexts = []
        for _ in range(run.n_contexts):
            context = llama_cpp.llama_init_from_model(self.model, context_params)
            stack.callback(llama_cpp.llama_free, context)
            if run.lora is not None:
                adapter = llama_cpp.llama_adapter_lora_init(self.model, str(run.lora).encode())
                assert llama_cpp.llama_set_adapters_lora(
                    context, (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter), 1, (ctypes.c_float * 1)(1.0)
                ) == 0  # fmt: skip
            self.contexts.append(context)

    def evaluate(self) -> np.ndarray:
        """(n_contexts, n_tokens, n_vocab) logits; the contexts take turns."""
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        out = np.zeros((len(self.contexts), len(TOKENS), n_vocab), np.float32)
        batch = llama_cpp.llama_batch_init(len(TOKENS), 0, 1)
        begin = 0
        for n in BATCHES:
            for i_context, context in enumerate(self.contexts):
                batch.n_tokens = n
                for i in range(n):
                    batch.token[i] = TOKENS[begin + i]
                    batch.pos[i] = begin + i
                    batch.n_seq_id[i] = 1
                    batch.seq_id[i][0] = 0
                    batch.logits[i] = True
                assert llama_cpp.llama_decode(context, batch) == 0
                for i in range(n):
                    row = llama_cpp.llama_get_logits_ith(context, i)
                    out[i_context, begin + i] = np.ctypeslib.as_array(row, shape=(n_vocab,))
            begin += n
        llama_cpp.llama_batch_free(batch)
        return out

    def outcome(self) -> Outcome:
        logits = self.evaluate()
        held = [self.plan.device_bytes(i) for i in range(2)]
        return Outcome(
            logits, self.plan.stats(), self.plan.layers(), self.notes, self.plan.memory_bytes, held, self.trace
        )


def outcome_of(model: Path, plan: Path, run: Run) -> Outcome:
    with contextlib.ExitStack() as stack:
        return Loaded(stack, model, plan, run).outcome()


def on_rpc(endpoint: str, model: Path, plan: Path, runs: list[Run]) -> list[Outcome]:
    devices.add_rpc_device(endpoint)
    return [outcome_of(model, plan, run) for run in runs]


def on_fake(model: Path, plan: Path, runs: list[Run], n_devices: int = 1) -> tuple[list[Outcome], list[int]]:
    """Outcomes, and the device memory that is left in use after each run."""
    fake = devices.FakeDevices(n_devices)
    outcomes, used = [], []
    for run in runs:
        outcomes.append(outcome_of(model, plan, run))
        used.append(sum(fake.stats(i).used_bytes for i in range(n_devices)))
    return outcomes, used


def nmse(value: np.ndarray, expected: np.ndarray) -> float:
    return float(((value - expected) ** 2).sum() / (expected**2).sum())


SPLITS = {
    "none": (0,) * N_LAYER,
    "one group": (64,) * N_LAYER,
    "one neuron": (1,) * N_LAYER,
    "all but one": (N_FF - 1,) * N_LAYER,
    "all": (N_FF,) * N_LAYER,
    "mixed": (0, 37, 255, 256),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_gpu_layers", [0, UNKNOWN_LAYERS])
def test_every_split_on_the_rpc_device_equals_dense_on_the_cpu(
    rpc_server: devices.RpcServer,
    tiny_model: Callable[..., Path],
    tiny_plan: Callable[..., Path],
    n_gpu_layers: int,
    stream: bool,
) -> None:
    model = tiny_model(bias=True)
    plan = tiny_plan(model, order_seed=3)
    splits = [
        Run(n_hot, ("RPC0",), n_gpu_layers=n_gpu_layers, stream=stream, sparsity=sparsity)
        for n_hot in SPLITS.values()
        for sparsity in ("dense", "exact")
    ]
    dense, *outcomes = devices.run_in_child(on_rpc, rpc_server.endpoint, model, plan, [Run(), *splits])
    n_singles = BATCHES.count(1) + (0 if stream else sum(n for n in BATCHES if n > 1))
    for run, outcome in zip(splits, outcomes):
        np.testing.assert_allclose(outcome.logits, dense.logits, atol=TOLERANCE, rtol=0, err_msg=str(run))
        assert [layer["n_hot"] for layer in outcome.layers] == list(run.n_hot)
        if not stream:
            assert outcome.stats["n_gpu_neurons"] == sum(run.n_hot) * n_singles
            # x there and y back, and (there is a trace) a count of active neurons
            n_split = sum(n > 0 for n in run.n_hot)
            assert outcome.stats["copied_bytes"] == n_split * len(TOKENS) * (2 * N_EMBD + 1) * 4
        assert outcome.host_bytes < dense.host_bytes or sum(run.n_hot) <= N_LAYER * 64


@pytest.mark.parametrize("activation", ["relu", "drelu", "silu"])
def test_activations_and_thresholds_on_the_rpc_device(
    rpc_server: devices.RpcServer, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], activation: str
) -> None:
    model = tiny_model()
    plan = tiny_plan(model, order_seed=3, activation=activation, threshold=0.02, product_threshold=0.01)
    runs = [
        Run(n_hot, ("RPC0",), stream=True, sparsity="threshold") for n_hot in (SPLITS["mixed"], SPLITS["one group"])
    ]
    whole, *outcomes = devices.run_in_child(
        on_rpc, rpc_server.endpoint, model, plan, [Run(sparsity="threshold"), *runs]
    )
    for outcome in outcomes:
        assert nmse(outcome.logits, whole.logits) < 1e-6  # a value at a threshold may fall on either side


@pytest.mark.parametrize("stream", [False, True])
def test_q4_0_splits_on_the_rpc_device(
    rpc_server: devices.RpcServer, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], stream: bool
) -> None:
    model = tiny_model(row_type="Q4_0")
    plan = tiny_plan(model, order_seed=3, ffn_down_t="Q4_0")
    runs = [Run(n_hot, ("RPC0",), stream=stream) for n_hot in SPLITS.values()]
    dense, *outcomes = devices.run_in_child(on_rpc, rpc_server.endpoint, model, plan, [Run(), *runs])
    for run, outcome in zip(runs, outcomes):
        assert nmse(outcome.logits, dense.logits) < QUANTIZED_NMSE, run


@pytest.mark.parametrize("arch", ["gpt2", "falcon", "mpt", "olmo2"])
@pytest.mark.usefixtures("fake_device")
def test_architectures_on_the_fake_device(
    arch: str, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    model = tiny_model(arch)
    plan = tiny_plan(model, order_seed=3, activation="silu" if arch == "olmo2" else "relu", frequency=True)
    runs = [
        Run(SPLITS["mixed"], ("FAKE0",), n_gpu_layers=n, stream=stream)
        for n in (0, UNKNOWN_LAYERS)
        for stream in (False, True)
    ]
    (dense, *outcomes), used = devices.run_in_child(on_fake, model, plan, [Run(), *runs])
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.logits, dense.logits, atol=TOLERANCE, rtol=0)
    assert used == [0] * len(used)  # closing gives all device memory back


@pytest.mark.usefixtures("fake_device")
def test_two_devices_and_two_contexts(tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]) -> None:
    model = tiny_model()
    plan = tiny_plan(model, order_seed=3)
    run = Run((100, 256, 0, 64), ("FAKE0", "FAKE1"), (0, 0, 1, 1), UNKNOWN_LAYERS, stream=True, n_contexts=2)
    (dense, split), used = devices.run_in_child(on_fake, model, plan, [Run(), run], 2)
    for logits in split.logits:
        np.testing.assert_allclose(logits, dense.logits[0], atol=TOLERANCE, rtol=0)
    assert [layer["device"] for layer in split.layers] == ["FAKE0", "FAKE0", "", "FAKE1"]
    assert min(split.device_bytes) > 0
    assert used == [0, 0]


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("how", ["lora", "observed"])
def test_blocks_that_run_op_by_op_use_both_parts(
    how: str, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model()
    plan = tiny_plan(model, order_seed=3)
    change = (
        {"lora": write_lora(tmp_path / "lora.gguf", model, ("gate", "up", "down"), N_LAYER)}
        if how == "lora"
        else {"observed": True}
    )
    runs = [Run(**change), *(Run(n_hot, ("FAKE0",), **change) for n_hot in SPLITS.values())]
    (whole, *outcomes), _ = devices.run_in_child(on_fake, model, plan, runs)
    for outcome in outcomes:
        assert outcome.stats["n_blocks_by_op"] > 0
        np.testing.assert_allclose(outcome.logits, whole.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.usefixtures("fake_device")
def test_the_share_of_active_neurons_on_the_device_is_counted(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    model = tiny_model()
    plan = tiny_plan(model, order_seed=3, activation="relu")
    runs = [Run(sparsity="exact"), Run(SPLITS["mixed"], ("FAKE0",), sparsity="exact")]
    (whole, split), _ = devices.run_in_child(on_fake, model, plan, runs)
    assert 0 < split.stats["n_gpu_active"] < split.stats["n_gpu_neurons"]
    # up to values that are 0 by one order of sums and not by the other
    active = split.stats["n_gpu_active"] + split.stats["n_cpu_active"]
    assert abs(active - whole.stats["n_active"]) <= 0.001 * active


def one_after_the_other(first: tuple[Path, Path], second: tuple[Path, Path], run: Run) -> dict[str, np.ndarray]:
    devices.FakeDevices()
    out = {"A": outcome_of(*first, run).logits, "B": outcome_of(*second, run).logits}
    with contextlib.ExitStack() as stack:
        a, b = Loaded(stack, *first, run), Loaded(stack, *second, run)
        out["A with B"], out["B with A"] = a.evaluate(), b.evaluate()
    return out


@pytest.mark.usefixtures("fake_device")
def test_a_second_model_in_one_process_computes_as_alone(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    models = tiny_model(), tiny_model(n_embd=96, n_ff=320, row_type="F16")
    pairs = [(model, tiny_plan(model, order_seed=3)) for model in models]
    run = Run(SPLITS["mixed"], ("FAKE0",), n_gpu_layers=UNKNOWN_LAYERS)
    out = devices.run_in_child(one_after_the_other, *pairs, run)
    alone = devices.run_in_child(on_fake, *pairs[1], [run])[0][0].logits
    np.testing.assert_array_equal(out["B"], alone)
    np.testing.assert_array_equal(out["B with A"], alone)
    np.testing.assert_array_equal(out["A with B"], out["A"])


def refusals(model: Path, plan: Path) -> list[str]:
    fake = devices.FakeDevices(memory_bytes=400_000)
    with pytest.raises(PlanError) as raised:
        outcome_of(model, plan, Run(SPLITS["all"], ("FAKE0",)))
    assert fake.stats().used_bytes == 0
    texts = [str(raised.value)]
    fake.set_memory(100 << 20)
    fake.refuse_type("f32")
    unsupported = outcome_of(model, plan, Run(SPLITS["all"], ("FAKE0",)))
    assert [layer["n_hot"] for layer in unsupported.layers] == [0] * N_LAYER
    texts += unsupported.notes
    for change in (
        {"n_hot": [1]},
        {"n_hot": [257] * N_LAYER},
        {"devices": ["CPU"]},
        {"devices": ["nothing"]},
        {"devices": []},
    ):
        with _core.Plan.open(plan, model, note=str) as opened, pytest.raises(PowerInferError) as raised:
            opened.set_split(**{"devices": ["FAKE0"], "n_hot": [0] * N_LAYER, **change})
        texts.append(str(raised.value))
    return texts


@pytest.mark.usefixtures("fake_device")
def test_what_does_not_fit_is_said_in_a_sentence(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    model = tiny_model()
    no_memory, *rest = devices.run_in_child(refusals, model, tiny_plan(model))
    assert re.match(r"FAKE0: layer [12]: ", no_memory) and "smaller VRAM budget" in no_memory
    text = "\n".join(rest)
    for part in (
        "rows are f32",
        "stays on the CPU",
        "expected one per layer",
        "257 hot neurons",
        "CPU isn't a GPU",
        "no device nothing",
        "0 devices",
    ):
        assert part in text


@pytest.mark.usefixtures("fake_device")
def test_both_parts_of_a_block_run_at_the_same_time(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    model = tiny_model(n_ff=2048)
    outcomes, _ = devices.run_in_child(on_slow_fake, model, tiny_plan(model), Run((64,) * N_LAYER, ("FAKE0",)))
    singles = [t for t in outcomes.trace if t["n_tokens"] == 1]
    assert len(singles) == N_LAYER * BATCHES.count(1)
    for times in singles:
        assert times["begin_s"] <= times["cpu_begin_s"] <= times["cpu_end_s"] <= times["end_s"]
        assert times["gpu_end_s"] - times["gpu_begin_s"] >= 0.01
    # On a busy machine the device's thread may start late; mostly it doesn't.
    assert any(t["gpu_begin_s"] < t["cpu_end_s"] and t["cpu_begin_s"] < t["gpu_end_s"] for t in singles)
    assert outcomes.stats["wait_us"] > 0


def on_slow_fake(model: Path, plan: Path, run: Run) -> tuple[Outcome, list[int]]:
    devices.FakeDevices(delay_us=10_000)
    return outcome_of(model, plan, run), []
