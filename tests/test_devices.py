"""The devices that other tests use: llama.cpp alone computes on them what it computes on the CPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import devices
import llama_cpp
import numpy as np
import pytest

# The devices compute with the CPU's operators, but weights that stay on the CPU may be repacked, which sums in another order.
TOLERANCE = 1e-4
TOKENS = [1, *range(260, 300)]
OPTIONS = {
    "n_ctx": 128, "n_threads": 1, "n_threads_batch": 1, "logits_all": True, "verbose": True,
    "type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False,
}  # fmt: skip
MIB = 1 << 20


def logits(model: Path, n_gpu_layers: int) -> np.ndarray:
    """(n_tokens, n_vocab) float32 of a prompt and one more token."""
    llm = llama_cpp.Llama(str(model), n_gpu_layers=n_gpu_layers, **OPTIONS)
    llm.eval(TOKENS[:-1])
    llm.eval(TOKENS[-1:])
    out = llm.scores[: len(TOKENS)].copy()
    llm.close()
    return out


def on_cpu(model: Path) -> np.ndarray:
    return logits(model, 0)


def on_rpc(model: Path, endpoint: str, n_gpu_layers: int) -> tuple[str, np.ndarray]:
    return devices.add_rpc_device(endpoint), logits(model, n_gpu_layers)


def on_fake(model: Path, n_devices: int, n_gpu_layers: int) -> tuple[np.ndarray, list[dict], np.ndarray]:
    """Logits, the figures of each device, and the intervals of the first."""
    fake = devices.FakeDevices(n_devices)
    out = logits(model, n_gpu_layers)
    names = [name for name, _ in devices.FakeStats._fields_]
    figures = [{name: getattr(fake.stats(i), name) for name in names} for i in range(n_devices)]
    return out, figures, fake.intervals()


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model()


@pytest.fixture(scope="module")
def cpu_logits(model: Path) -> np.ndarray:
    return devices.run_in_child(on_cpu, model)


@pytest.mark.parametrize("n_gpu_layers", [2, 99])
def test_llama_cpp_on_the_rpc_device_equals_the_cpu(
    rpc_server: devices.RpcServer, model: Path, cpu_logits: np.ndarray, n_gpu_layers: int
) -> None:
    name, out = devices.run_in_child(on_rpc, model, rpc_server.endpoint, n_gpu_layers)
    assert name == "RPC0"
    np.testing.assert_allclose(out, cpu_logits, atol=TOLERANCE, rtol=0)


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize(("n_devices", "n_gpu_layers"), [(1, 2), (1, 99), (2, 99)])
def test_llama_cpp_on_the_fake_device_equals_the_cpu(
    model: Path, cpu_logits: np.ndarray, n_devices: int, n_gpu_layers: int
) -> None:
    out, figures, intervals = devices.run_in_child(on_fake, model, n_devices, n_gpu_layers)
    np.testing.assert_allclose(out, cpu_logits, atol=TOLERANCE, rtol=0)
    for device in figures:
        assert device["n_graphs"] >= 2 and device["set_bytes"] > 0 and device["get_bytes"] > 0
        assert device["used_bytes"] == 0 < device["peak_bytes"] < 100 * MIB
    assert len(intervals) == figures[0]["n_graphs"]
    assert (intervals[:, 1] > intervals[:, 0]).all()


def beyond_the_limit(model: Path) -> tuple[bool, bool, int]:
    fake = devices.FakeDevices(memory_bytes=100_000)
    try:
        logits(model, 99)
        loaded = True
    except ValueError:
        loaded = False
    refused_bytes = fake.stats().peak_bytes
    fake.set_memory(100 * MIB)
    return loaded, np.isfinite(logits(model, 99)).all(), refused_bytes


@pytest.mark.usefixtures("fake_device")
def test_an_allocation_beyond_the_limit_is_refused_and_nothing_aborts(model: Path) -> None:
    loaded, later, peak_bytes = devices.run_in_child(beyond_the_limit, model)
    assert not loaded
    assert later
    assert peak_bytes <= 100_000


def refused(model: Path) -> tuple[np.ndarray, int, int]:
    fake = devices.FakeDevices()
    fake.refuse_type("f32")
    out = logits(model, 99)
    set_bytes = fake.stats().set_bytes
    fake.refuse_type(None)
    fake.reset_stats()
    logits(model, 99)
    return out, set_bytes, fake.stats().set_bytes


@pytest.mark.usefixtures("fake_device")
def test_a_refused_type_stays_on_the_cpu(model: Path, cpu_logits: np.ndarray) -> None:
    out, refused_bytes, all_bytes = devices.run_in_child(refused, model)
    np.testing.assert_allclose(out, cpu_logits, atol=TOLERANCE, rtol=0)
    assert refused_bytes < all_bytes


def offloaded(model: Path) -> tuple[np.ndarray, int, int]:
    fake = devices.FakeDevices()
    logits(model, 0)
    without_bytes = fake.stats().set_bytes
    fake.reset_stats()
    fake.set_offload(32)
    return logits(model, 0), without_bytes, fake.stats().set_bytes


@pytest.mark.usefixtures("fake_device")
def test_prompts_are_offloaded_from_the_given_length_on(model: Path, cpu_logits: np.ndarray) -> None:
    out, without_bytes, with_bytes = devices.run_in_child(offloaded, model)
    np.testing.assert_allclose(out, cpu_logits, atol=TOLERANCE, rtol=0)
    assert with_bytes > without_bytes + 500_000  # the model's matrices


def delayed(model: Path) -> tuple[float, np.ndarray, float]:
    fake = devices.FakeDevices(delay_us=30_000)
    begin_s = time.monotonic()
    logits(model, 99)
    return begin_s, fake.intervals(), time.monotonic()


@pytest.mark.usefixtures("fake_device")
def test_a_delay_lengthens_every_graph_and_intervals_are_monotonic_time(model: Path) -> None:
    begin_s, intervals, end_s = devices.run_in_child(delayed, model)
    assert len(intervals) > 0
    assert (intervals[:, 1] - intervals[:, 0] >= 0.03).all()
    times = np.array([begin_s, *intervals.ravel(), end_s])
    assert (np.diff(times) >= 0).all()


@pytest.mark.usefixtures("fake_device")
def test_a_program_finds_fake_devices_by_its_environment() -> None:
    code = f"""
import ctypes
import llama_cpp
base, ggml = (ctypes.CDLL({str(devices.LLAMA_LIB)!r} + "/" + name) for name in ("libggml-base.so.0", "libggml.so.0"))
ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
base.ggml_backend_dev_name.restype = ctypes.c_char_p
for i in range(ggml.ggml_backend_dev_count()):
    device = ctypes.c_void_p(ggml.ggml_backend_dev_get(i))
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    print(base.ggml_backend_dev_name(device).decode(), total.value)
"""
    env = devices.program_environment(2, 12345)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=devices.TIMEOUT_S, check=True, env=env)
    assert {"FAKE0 12345", "FAKE1 12345"} < set(done.stdout.splitlines()), done.stdout


def port_answers(endpoint: str) -> bool:
    host, port = endpoint.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def test_the_rpc_server_ends_with_its_context(rpc_server: devices.RpcServer) -> None:
    assert port_answers(rpc_server.endpoint)
    with devices.rpc_server() as server:
        assert server.endpoint != rpc_server.endpoint
    assert server.process.returncode is not None
    assert not port_answers(server.endpoint)


def die_beside_a_server(endpoint_file: Path) -> None:
    with devices.rpc_server() as server:
        endpoint_file.write_text(server.endpoint)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("rpc_server")
def test_the_rpc_server_ends_when_its_parent_dies(tmp_path: Path) -> None:
    with pytest.raises(devices.ChildError, match="ended with -9"):
        devices.run_in_child(die_beside_a_server, tmp_path / "endpoint")
    endpoint = (tmp_path / "endpoint").read_text()
    deadline = time.monotonic() + 30
    while port_answers(endpoint):
        assert time.monotonic() < deadline, f"{endpoint} still answers"
        time.sleep(0.05)


def lose_the_server(model: Path, endpoint: str, server: int) -> None:
    devices.add_rpc_device(endpoint)
    llm = llama_cpp.Llama(str(model), n_gpu_layers=99, **OPTIONS)
    os.kill(server, signal.SIGKILL)
    llm.eval(TOKENS)


def test_a_device_that_dies_takes_only_its_child_with_it(rpc_server: devices.RpcServer, model: Path) -> None:
    with pytest.raises(devices.ChildError, match="ended with -6"):
        devices.run_in_child(lose_the_server, model, rpc_server.endpoint, rpc_server.process.pid)


def raise_error(text: str) -> None:
    raise ValueError(text)


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(devices.ChildError, match="ended with 1") as failure:
        devices.run_in_child(raise_error, "a reason")
    assert "ValueError: a reason" in failure.value.stderr
