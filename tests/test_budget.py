"""VRAM budgets: what is decided for them, and what devices then really hold. Models are tiny, devices of RAM."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import devices
import llama_cpp
import pytest

from powerinfer_py import Llama, _core, bench, cli
from powerinfer_py import format as pi_format
from powerinfer_py.errors import BudgetError, OptionError
from powerinfer_py.llama import GpuOptions

MIB = 1 << 20
GROUP = 64
# Wide enough for a layer's neurons to be worth a hand-over to a device; small attention.
SHAPE = {"n_layer": 4, "n_embd": 256, "n_ff": 1024, "n_head": 4, "n_kv": 2}
CONTEXT = {"n_ctx": 256, "n_batch": 64}
# Upstream rounds some buffers up after they were counted.
ROUNDING_BYTES = 64 << 10

pytestmark = pytest.mark.usefixtures("fake_device")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(**SHAPE)


@pytest.fixture
def plan(model: Path, tiny_plan: Callable[..., Path]) -> Path:
    return tiny_plan(model, frequency=True, order_seed=1)


@contextlib.contextmanager
def notes() -> Iterator[list[str]]:
    """What powerinfer_py's logger says."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("powerinfer_py")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def decide(path: Path, plan: Path | None = None, **options: Any) -> _core.Budget:
    """The decision alone; options of the context beside those of plan_budget."""
    params = llama_cpp.llama_model_default_params()
    context = llama_cpp.llama_context_default_params()
    context.n_ctx = options.pop("n_ctx", CONTEXT["n_ctx"])
    context.n_batch = context.n_ubatch = options.pop("n_batch", CONTEXT["n_batch"])
    if (n_gpu_layers := options.pop("n_gpu_layers", None)) is not None:
        params.n_gpu_layers, options["has_n_gpu_layers"] = n_gpu_layers, True
    addresses = ctypes.addressof(params), ctypes.addressof(context)
    if plan is None:
        return _core.plan_budget(None, str(path), *addresses, **options)
    with _core.Plan.open(plan, path, note=lambda text: None) as opened:
        return _core.plan_budget(opened, str(path), *addresses, **options)


def error_of(error: type[Exception], call: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(error) as raised:
        call(*args, **options)
    return str(raised.value)


def total(use: dict[str, Any]) -> int:
    return sum(value for name, value in use.items() if name not in ("name", "budget_bytes"))


def tokens_of(llama: Llama) -> str:
    return llama("abc", max_tokens=4, temperature=0)["choices"][0]["text"]


# --- the budget is obeyed ---


def loaded(path: Path, plan: Path | None) -> list[tuple[int, int, Any, str]]:
    """(budget, most that the device held, memory(), text) for budgets from nearly all to nearly nothing."""
    fake = devices.FakeDevices()
    out = []
    for mib in (32, 9, 6, 2, 1):
        fake.reset_stats()
        with Llama(str(path), plan=plan, verbose=False, vram_budget=f"{mib}MiB", **CONTEXT) as llama:
            text = tokens_of(llama)
            out.append((mib * MIB, fake.stats().peak_bytes, llama.memory(), text))
    return out


@pytest.mark.parametrize("with_plan", [True, False])
def test_device_holds_what_was_decided(model: Path, plan: Path, with_plan: bool) -> None:
    results = devices.run_in_child(loaded, model, plan if with_plan else None)
    for budget, held, memory, _ in results:
        assert held <= budget
        assert abs(held - memory.devices[0].total_bytes) <= ROUNDING_BYTES
        assert memory.devices[0].budget_bytes == budget
        assert f"budget           {budget / MIB:>10.1f}\n" in memory.table and memory.cpu.weights_bytes > 0
    shares = [memory.share_neurons for _, _, memory, _ in results]
    layers = [memory.n_gpu_layers for _, _, memory, _ in results]
    assert shares == sorted(shares, reverse=True) and layers == sorted(layers, reverse=True)
    assert layers[0] > SHAPE["n_layer"] > layers[-1] > 0
    assert len({text for _, _, _, text in results}) == 1
    first = results[0][2].split
    if with_plan:
        assert 0 < shares[1] < shares[0] and shares[-1] == 0
        assert re.fullmatch(
            r"FFN split: \d+ % of neurons \(\d+ % of expected activations\) on FAKE0; "
            r"dense blocks there: all 4 layers and the output\.",
            first,
        )
        assert results[1][2].share_activations > shares[1]  # hot ones first
        assert "handing tokens over would take longer" in results[2][2].split
        assert "the dense blocks leave no room" in results[3][2].split
    else:
        assert first == f"FFN split: none, because {model} has no plan; on the GPU: all 4 layers and the output."


def decided_for_contexts(path: Path, plan: Path) -> list[_core.Budget]:
    devices.FakeDevices(memory_bytes=600 * MIB)
    shapes = [(128, 1), (128, 512), (8192, 512), (32768, 512)]
    runs = [decide(path, plan, budget="70MiB", n_ctx=n_ctx, n_batch=n_batch) for n_ctx, n_batch in shapes]
    return [(run.gpus[0], list(run.n_hot), run.n_gpu_layers) for run in runs]


def test_hot_neurons_shrink_with_context_and_batch(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    path = tiny_model(n_layer=4, n_embd=512, n_ff=3072, n_head=4, n_kv=2)
    results = devices.run_in_child(decided_for_contexts, path, tiny_plan(path))
    hot = [sum(n_hot) for _, n_hot, _ in results]
    kv = [use["kv_bytes"] for use, _, _ in results]
    assert hot[0] > hot[1] > hot[2] and kv[0] == kv[1] < kv[2]
    # 32768 tokens: the KV cache of all layers doesn't fit; the last layers come first, then neurons.
    assert results[2][2] > 4 >= results[3][2] and kv[3] <= 70 * MIB
    assert results[1][0]["compute_bytes"] > results[0][0]["compute_bytes"]
    for use, _, _ in results:
        assert total(use) <= use["budget_bytes"] == 70 * MIB


SHAPES = {
    0.375: {"arch": "llama", "n_embd": 2048, "n_ff": 768, "row_type": "F16"},
    2: {"arch": "gpt2", "n_embd": 1024, "n_ff": 2048, "row_type": "Q4_0"},
    2.6875: {"arch": "llama", "n_embd": 1024, "n_ff": 2752, "row_type": "Q4_0"},
    3.5: {"arch": "llama", "n_embd": 512, "n_ff": 1792, "row_type": "F16"},
    4: {"arch": "gpt2", "n_embd": 512, "n_ff": 2048, "row_type": "F16"},
}


def decided_for_half(path: Path, plan: Path) -> tuple[dict[str, Any], int, list[int]]:
    """Half of the FFNs fit: the device's bytes, those left for neurons, and n_hot."""
    devices.FakeDevices()
    all_bytes = decide(path, plan, budget="90MiB")
    dense = sum(all_bytes.gpus[0][name] for name in ("weights_bytes", "kv_bytes", "compute_bytes"))
    ffn = all_bytes.gpus[0]["ffn_bytes"] + all_bytes.cpu["ffn_bytes"]
    budget = decide(path, plan, budget=f"{(dense + all_bytes.gpus[0]['scratch_bytes'] + ffn / 2) / MIB}MiB")
    return budget.gpus[0], budget.hot_bytes[0], list(budget.n_hot)


@pytest.mark.parametrize("ratio", SHAPES)
def test_budget_is_filled_to_a_group(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], ratio: float
) -> None:
    shape = SHAPES[ratio]
    assert shape["n_ff"] / shape["n_embd"] == ratio
    small_attention = {"n_head": 2, "head_dim": 32} if shape["arch"] == "llama" else {}
    path = tiny_model(n_layer=2, **small_attention, **shape)
    plan = tiny_plan(path, activation="gelu" if shape["arch"] == "gpt2" else "silu")
    use, hot_bytes, n_hot = devices.run_in_child(decided_for_half, path, plan)
    assert total(use) <= use["budget_bytes"]
    assert 0 <= hot_bytes - use["ffn_bytes"] < use["ffn_bytes"] / sum(n_hot) * GROUP + ROUNDING_BYTES


def decided_for_both(tied: Path, untied: Path) -> list[int]:
    devices.FakeDevices()
    return [decide(path, budget="50MiB").gpus[0]["weights_bytes"] for path in (tied, untied)]


def test_tied_embeddings_count_once(tiny_model: Callable[..., Path]) -> None:
    tied, untied = devices.run_in_child(decided_for_both, tiny_model(**SHAPE, tied=True), tiny_model(**SHAPE))
    assert abs(tied - untied) <= ROUNDING_BYTES


# --- devices ---


def loaded_on_two(path: Path, plan: Path) -> list[tuple[Any, list[int]]]:
    fake = devices.FakeDevices(2)
    out = []
    for budget, device in (("9MiB,14MiB", None), (["14MiB", 0], None), ("16MiB", ["FAKE1"])):
        for i_device in range(2):
            fake.reset_stats(i_device)
        options = {"vram_budget": budget, "device": device, "n_ctx": 128, "n_batch": 8}
        with Llama(str(path), plan=plan, verbose=False, **options) as llama:
            tokens_of(llama)
            out.append((llama.memory(), [fake.stats(i).peak_bytes for i in range(2)]))
    text = error_of(BudgetError, decide, path, budget="1,1,1")
    assert "found 3 amounts for 2 devices" in text
    assert "found FAKE0 twice" in error_of(OptionError, decide, path, budget="1", device="FAKE0,FAKE0")
    assert "FAKE0, FAKE1" in error_of(OptionError, decide, path, budget="1", device="FAKE7")
    none = decide(path, plan, budget="1", device="none")
    assert none.split_text == "FFN split: none, because no device was chosen."
    return out


def test_each_of_two_devices_has_its_budget(model: Path, plan: Path) -> None:
    both, first, second = devices.run_in_child(loaded_on_two, model, plan)
    memory, held = both
    assert [use.name for use in memory.devices] == ["FAKE0", "FAKE1"]
    assert held[0] <= 9 * MIB and held[1] <= 14 * MIB and set(memory.i_device) == {0, 1}
    assert all(use.ffn_bytes > 0 for use in memory.devices) and "FAKE0 (" in memory.split and "FAKE1 (" in memory.split
    for use, bytes_held in zip(memory.devices, held):
        assert abs(use.total_bytes - bytes_held) <= ROUNDING_BYTES
    assert [use.name for use in first[0].devices] == ["FAKE0"] and first[1][1] == 0 < first[1][0]
    assert [use.name for use in second[0].devices] == ["FAKE1"] and second[1][0] == 0 < second[1][1]


def split_on_rpc(path: Path, plan: Path, endpoint: str) -> tuple[Any, str]:
    _core.add_rpc_server(endpoint)
    with Llama(str(path), plan=plan, verbose=False, vram_budget="18MiB", **CONTEXT) as llama:
        return llama.memory(), tokens_of(llama)


def on_cpu(path: Path, plan: Path) -> str:
    with Llama(str(path), plan=plan, verbose=False, **CONTEXT) as llama:
        return tokens_of(llama)


def test_split_on_rpc_computes_the_same(model: Path, plan: Path, rpc_server: devices.RpcServer) -> None:
    memory, text = devices.run_in_child(split_on_rpc, model, plan, rpc_server.endpoint)
    assert memory.share_neurons > 0 and " on RPC0; " in memory.split
    assert text == on_cpu(model, plan)


# --- notes and errors ---


def noted(path: Path, plan: Path) -> dict[str, list[str]]:
    """The notes of loads on a device of 100 MiB."""
    devices.FakeDevices()
    out = {}
    for name, options in {
        "none": {},
        "clamped": {"vram_budget": "1GiB"},
        "disabled": {"vram_budget": "50%", "disable_gpu_index": True},
        "zero": {"vram_budget": 0},
    }.items():
        with notes() as found, Llama(str(path), plan=plan, sparsity="dense", verbose=False, **CONTEXT, **options):
            out[name] = list(found)
    load = {"plan": plan, "verbose": False, **CONTEXT}
    assert "which has 100 MiB free of 100" in error_of(
        BudgetError, Llama, str(path), vram_budget=1, strict=True, **load
    )
    for options, part in (
        ({}, "no VRAM budget was given"),
        ({"vram_budget": 0}, "the VRAM budget is 0"),
        ({"vram_budget": "20MiB", "disable_gpu_index": True}, "it was disabled"),
        ({"vram_budget": "2MiB"}, "leave no room"),
    ):
        assert part in error_of(BudgetError, Llama, str(path), require_split=True, **load, **options)
    text = error_of(BudgetError, Llama, str(path), vram_budget="0.1MiB", **load)
    assert text.startswith("VRAM budget: found 0.1 MiB for FAKE0; no neuron fits, and the output")
    assert re.search(r"needs 0\.5 MiB \(weights 0\.4, KV cache 0\.0, compute buffers 0\.\d\); give more", text)
    assert "the number of layers" in error_of(
        BudgetError, Llama, str(path), vram_budget="1MiB", n_gpu_layers=99, **load
    )
    assert "could not make the context" in error_of(BudgetError, Llama, str(path), vram_budget=1, type_v=8, **load)
    for text in ("8 apples", "-1", "101%", "8,", "", "nan", "1e30"):
        if text:
            assert "expected GiB as a plain number" in error_of(OptionError, decide, path, budget=text)
    return out


def prompt_without_hot_neurons(model: Path, plan: Path, offload_tokens: int) -> tuple[int, Any, dict[str, Any], int]:
    """Hot neurons, the device's memory as decided, and what a prompt did; the last: bytes that the device held at most."""
    fake = devices.FakeDevices()
    fake.set_offload(offload_tokens)
    fake.reset_stats()
    with Llama(str(model), plan=plan, verbose=False, vram_budget="64MiB", **CONTEXT) as llm:
        llm.eval(list(range(300, 340)))
        memory = llm.memory()
        return sum(memory.n_hot), memory.devices[0], vars(llm.stats()), fake.stats().peak_bytes


@pytest.mark.parametrize("offload_tokens", [0, 32])
def test_prompts_go_to_the_device_where_it_asks_also_when_no_neuron_is_hot(
    tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path], offload_tokens: int
) -> None:
    small = tiny_model()  # a hand-over takes longer than its neurons
    n_hot, use, stats, held = devices.run_in_child(prompt_without_hot_neurons, small, tiny_plan(small), offload_tokens)
    assert n_hot == 0 and use.ffn_bytes == 0
    assert (use.scratch_bytes > 0) == (stats["gpu_share"] is not None) == (offload_tokens > 0)
    assert use.total_bytes - ROUNDING_BYTES <= held <= use.budget_bytes


def test_one_line_in_every_case(model: Path, plan: Path) -> None:
    found = devices.run_in_child(noted, model, plan)
    assert found["none"] == ["FFN split: none, because no VRAM budget was given; give one, e.g. 8GiB or 75%."]
    assert found["zero"] == ["FFN split: none, because the VRAM budget is 0."]
    assert found["disabled"] == [
        "FFN split: none, because it was disabled; dense blocks on the GPU: all 4 layers and the output."
    ]
    clamped, split = found["clamped"]
    assert clamped == "VRAM budget: found 1024 MiB for FAKE0, which has 100 MiB free of 100; 98 MiB are used."
    assert split.startswith("FFN split: ")


def test_without_a_gpu_there_is_one_line(model: Path, plan: Path) -> None:
    if any(device["type"] in ("gpu", "igpu") for device in _core.devices()):
        pytest.skip("this llama.cpp has a GPU device")
    load = {"plan": plan, "sparsity": "dense", "verbose": False, **CONTEXT}
    with notes() as found, Llama(str(model), vram_budget="75%", **load) as llama:
        assert llama.memory().devices == () and llama.memory().table == ""
    reason = "FFN split: none, because this llama.cpp has no GPU device; everything is computed on the CPU."
    assert found == [reason]
    for options in ({"strict": True}, {"require_split": True}):
        assert error_of(BudgetError, Llama, str(model), vram_budget="75%", **load, **options) == reason
    with notes() as found, Llama(str(model), **load):
        assert found == []


# --- saved placements, several models ---


def placed(path: Path, plan: Path, other: Path) -> None:
    devices.FakeDevices()
    fresh = decide(path, plan, budget="18MiB")
    assert not fresh.is_saved and sum(fresh.n_hot) > 0
    read = pi_format.read_plan(plan)
    n_hot = (*fresh.n_hot[1:], 0)  # another one than the greedy's
    saved = pi_format.SavedPlacement(
        budget="18MiB",
        n_ctx=CONTEXT["n_ctx"],
        devices=("FAKE0",),
        hot_bytes=tuple(fresh.hot_bytes),
        n_hot=n_hot,
        i_device=(0,) * len(n_hot),
        token_s=1e-3,
        gap=0.0,
        model_hash=pi_format.model_hash(read),
        statistics_hash=pi_format.statistics_hash(read),
    )
    pi_format.write_plan(replace(read, placements=(saved,)), plan)
    again = decide(path, plan, budget="18MiB")
    assert again.is_saved and tuple(again.n_hot) == n_hot and ", as the plan has it saved; " in again.split_text
    assert not decide(path, plan, budget="18MiB", reset_index=True).is_saved
    assert not decide(path, plan, budget="30MiB").is_saved
    assert not decide(path, plan, budget="18MiB", n_ctx=4096).is_saved  # less is left for neurons
    # The same file with other statistics.
    stale = pi_format.read_plan(other)
    pi_format.write_plan(replace(stale, placements=(saved,)), other)
    assert not decide(path, other, budget="18MiB").is_saved


def test_only_a_placement_that_matches_is_used(model: Path, plan: Path, tiny_plan: Callable[..., Path]) -> None:
    devices.run_in_child(placed, model, plan, tiny_plan(model, frequency=True, order_seed=2))


def split_of(path: Path, plan: Path) -> tuple[tuple[int, ...], str]:
    with Llama(str(path), plan=plan, verbose=False, vram_budget="18MiB", **CONTEXT) as llama:
        return llama.memory().n_hot, tokens_of(llama)


def fresh_split(path: Path, plan: Path) -> tuple[tuple[int, ...], str]:
    devices.FakeDevices()
    return split_of(path, plan)


def splits_in_one_process(first: tuple[Path, Path], second: tuple[Path, Path]) -> list[tuple[tuple[int, ...], str]]:
    """A, B after A was closed, B while A is loaded; and whether all memory came back."""
    fake = devices.FakeDevices()
    out = [split_of(*first), split_of(*second)]
    with Llama(str(first[0]), plan=first[1], verbose=False, vram_budget="18MiB", **CONTEXT) as llama:
        out.append(split_of(*second))
        out.append((llama.memory().n_hot, tokens_of(llama)))
    assert fake.stats().used_bytes == 0
    return out


def test_models_after_and_beside_each_other(
    model: Path, plan: Path, tiny_model: Callable[..., Path], tiny_plan: Callable[..., Path]
) -> None:
    other = tiny_model(n_layer=3, n_embd=512, n_ff=1024, n_head=4, head_dim=32, row_type="BF16")
    first, second = (model, plan), (other, tiny_plan(other))
    alone = [devices.run_in_child(fresh_split, *pair) for pair in (first, second)]
    assert all(sum(n_hot) > 0 for n_hot, _ in alone)
    found = devices.run_in_child(splits_in_one_process, first, second)
    assert found == [alone[0], alone[1], alone[1], alone[0]]


# --- run, bench, and the native program ---


def run_and_bench(path: Path, plan: Path) -> tuple[int, str, dict[str, int]]:
    """`powerinfer run`'s exit code and stderr, and what the device held while each engine was benched."""
    fake = devices.FakeDevices()
    args = ["run", str(path), "--plan", str(plan), "-p", "abc", "-n", "2", "-c", "256", "--vram-budget", "12MiB"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = cli.main([*args, "--device", "FAKE0"])
    held = {}
    for mode in ("stock", "dense"):
        fake.reset_stats()
        options = bench.BenchOptions(
            str(path), str(plan), (mode,), n_prompt=4, n_gen=2, repeats=1, threads=(1,), gpu=GpuOptions("12MiB")
        )
        assert len(bench.measure(options).samples) == 1
        held[mode] = fake.stats().peak_bytes
    return code, errors.getvalue(), held


def test_run_and_bench_keep_the_budget(model: Path, plan: Path) -> None:
    code, errors, held = devices.run_in_child(run_and_bench, model, plan)
    assert code == 0 and "FFN split: " in errors and "memory, MiB           FAKE0        CPU\n" in errors
    assert all(6 * MIB < n_bytes <= 12 * MIB for n_bytes in held.values()), held


def main_run(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [Path(sysconfig.get_path("scripts")) / "powerinfer-main", "-t", "1", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=devices.TIMEOUT_S, check=False, env=env
    )


def test_main_prints_table_and_line(model: Path, plan: Path, rpc_server: devices.RpcServer) -> None:
    args = ["-m", model, "--plan", plan, "-p", "abc", "-n", 4, "--temp", 0, "-c", CONTEXT["n_ctx"], "-b", 64, "-ub", 64]
    expected = main_run(*args)
    assert expected.returncode == 0
    fake = devices.program_environment()
    for name, more, env in (("FAKE0", [], fake), ("RPC0", ["--rpc", rpc_server.endpoint], None)):
        found = main_run(*args, "--vram-budget", "18MiB", *more, env=env)
        assert found.returncode == 0, found.stderr
        assert found.stdout == expected.stdout
        assert re.search(rf"memory, MiB +{name} +CPU\nweights +\d+\.\d +\d+\.\d\n", found.stderr)
        assert found.stderr.count("powerinfer-main: FFN split: ") == 1 and f" on {name}; " in found.stderr
    failed = main_run(*args, "--vram-budget", "0.1MiB", env=fake)
    assert failed.returncode == 1 and failed.stderr.splitlines()[-1].startswith(
        "powerinfer-main: VRAM budget: found 0.1 MiB"
    )
    failed = main_run(*args, "--vram-budget", "18MiB", "--disable-gpu-index", "--require-split", env=fake)
    assert failed.returncode == 1 and "it was disabled" in failed.stderr
    two = main_run(*args, "--vram-budget", "9MiB,14MiB", "-ts", "1,3", env=devices.program_environment(2))
    assert two.returncode == 0 and "FAKE1" in two.stderr and two.stdout == expected.stdout, two.stderr
