"""GPU devices for tests: ggml's RPC device with a server of its own, and the fake device (fake-device.h).

A registered device stays in its process and changes llama.cpp's defaults there: register only inside `run_in_child`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

TIMEOUT_S = 120
SERVER_START_S = 30
ROOT = Path(__file__).resolve().parent.parent
LLAMA_LIB = Path(importlib.util.find_spec("llama_cpp").submodule_search_locations[0]) / "lib"
RPC_LIBRARY = LLAMA_LIB / "libggml-rpc.so.0"
FAKE_LIBRARY = Path(os.environ.get("POWERINFER_TEST_LIB", ROOT / "build" / "tests")) / "libfake-device.so"


# --- child processes ---


class ChildError(Exception):
    """A child of `run_in_child` that failed: `returncode` (negative: the signal that ended it) and its `stderr`."""

    def __init__(self, name: str, returncode: int, stderr: str) -> None:
        super().__init__(f"{name} ended with {returncode}:\n{stderr}")
        self.returncode = returncode
        self.stderr = stderr


def run_in_child(function: Callable, *args: object, timeout_s: float = TIMEOUT_S) -> object:
    """Calls a function in a new Python process.

    Args:
        function: of a module's top level; that module is loaded again in the child.
        args: its arguments; they and the result are pickled.
        timeout_s: then the child is killed.

    Returns:
        What the function returned.

    Raises:
        ChildError: it raised, or the process ended otherwise.
        subprocess.TimeoutExpired: it took too long.
    """
    module = sys.modules[function.__module__]
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call.pickle"
        call.write_bytes(pickle.dumps(args))
        result = Path(folder) / "result.pickle"
        command = [sys.executable, __file__, module.__name__, module.__file__, function.__qualname__, call, result]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode != 0:
            raise ChildError(function.__qualname__, done.returncode, done.stderr)
        return pickle.loads(result.read_bytes())


def _call_in_this_process(module_name: str, module_file: str, function: str, call: str, result: str) -> None:
    """The child's side of `run_in_child`."""
    spec = importlib.util.spec_from_file_location(module_name, module_file)
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    package = module_name.rpartition(".")[0]  # as pytest names it; pickle looks it up for classes of the module
    sys.modules.setdefault(package, types.ModuleType(package))
    spec.loader.exec_module(module)
    value = getattr(module, function)(*pickle.loads(Path(call).read_bytes()))
    Path(result).write_bytes(pickle.dumps(value))


# --- RPC ---

# Ends with the pipe on its standard input, that is with the process that started it, and after half an hour in any case.
_SERVER = """
import ctypes, os, signal, sys, threading
folder, endpoint, n_threads = sys.argv[1:]
signal.alarm(1800)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
ggml = ctypes.CDLL(folder + "/libggml.so.0")
rpc = ctypes.CDLL(folder + "/libggml-rpc.so.0")
ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(0))
rpc.ggml_backend_rpc_start_server(endpoint.encode(), None, ctypes.c_size_t(int(n_threads)), ctypes.c_size_t(1), devices)
sys.exit("the server could not start, or stopped")
"""


@dataclasses.dataclass(frozen=True)
class RpcServer:
    """A running server: host:port, and the process, for tests that end it early."""

    endpoint: str
    process: subprocess.Popen


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def rpc_server(n_threads: int = 1) -> Iterator[RpcServer]:
    """ggml's RPC server on 127.0.0.1 with the CPU as its device, in a child process. It serves one client at a time.

    Args:
        n_threads: CPU threads that the server computes with.

    Raises:
        RuntimeError: it didn't start, with what it printed.
    """
    port = _free_port()
    endpoint = f"127.0.0.1:{port}"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _SERVER, str(LLAMA_LIB), endpoint, str(n_threads)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline = time.monotonic() + SERVER_START_S
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise RuntimeError(f"no RPC server on {endpoint}: {output.read().decode(errors='replace')}")
                time.sleep(0.02)
            yield RpcServer(endpoint, process)
        finally:
            process.kill()
            process.wait()
            process.stdin.close()


def add_rpc_device(endpoint: str) -> str:
    """Registers a server's device in this process and returns its name."""
    # The files that everything links: a copy without `.0` in its name would bring a registry of its own.
    rpc = ctypes.CDLL(str(RPC_LIBRARY))
    ggml = ctypes.CDLL(str(LLAMA_LIB / "libggml.so.0"))
    base = ctypes.CDLL(str(LLAMA_LIB / "libggml-base.so.0"))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    base.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
    base.ggml_backend_dev_name.restype = ctypes.c_char_p
    reg = ctypes.c_void_p(rpc.ggml_backend_rpc_add_server(endpoint.encode()))
    ggml.ggml_backend_register(reg)
    device = ctypes.c_void_p(base.ggml_backend_reg_dev_get(reg, ctypes.c_size_t(0)))
    return base.ggml_backend_dev_name(device).decode()


# --- fake ---


class FakeStats(ctypes.Structure):
    """What a fake device counted; fake-device.h says what each is."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("used_bytes", "peak_bytes", "set_bytes", "get_bytes", "n_graphs")
    )


class FakeDevices:
    """Registers FAKE0 .. in this process. One object per process; `i_device` counts from 0.

    Args:
        n_devices: 1 or 2.
        memory_bytes: the limit of each.
        delay_us: what every graph takes longer.
    """

    def __init__(self, n_devices: int = 1, memory_bytes: int = 100 << 20, delay_us: int = 0) -> None:
        self._library = ctypes.CDLL(str(FAKE_LIBRARY))
        self._library.fake_device_register.restype = ctypes.c_bool
        self._library.fake_device_get_intervals.restype = ctypes.c_size_t
        for i_device in range(n_devices):
            self.set_memory(memory_bytes, i_device)
            self.set_delay(delay_us, i_device)
        assert self._library.fake_device_register(n_devices), "registered before"

    def set_memory(self, limit_bytes: int, i_device: int = 0) -> None:
        self._library.fake_device_set_memory(i_device, ctypes.c_uint64(limit_bytes))

    def set_delay(self, delay_us: int, i_device: int = 0) -> None:
        self._library.fake_device_set_delay(i_device, ctypes.c_uint64(delay_us))

    def refuse_type(self, row_type: str | None, i_device: int = 0) -> None:
        """Matrix products with weights of this ggml type ("q4_0") aren't supported; None: all are."""
        self._library.fake_device_refuse_type(i_device, row_type.encode() if row_type else None)

    def set_offload(self, n_tokens: int, i_device: int = 0) -> None:
        """Matrix products of so many tokens are computed here though their weights are in host memory; 0: none."""
        self._library.fake_device_set_offload(i_device, ctypes.c_int64(n_tokens))

    def stats(self, i_device: int = 0) -> FakeStats:
        out = FakeStats()
        self._library.fake_device_get_stats(i_device, ctypes.byref(out))
        return out

    def intervals(self, i_device: int = 0) -> np.ndarray:
        """(n_graphs, 2) float64: begin and end of each graph, seconds of time.monotonic()."""
        n = self._library.fake_device_get_intervals(i_device, None, ctypes.c_size_t(0))
        out = np.zeros((n, 2))
        self._library.fake_device_get_intervals(i_device, out.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(n))
        return out

    def reset_stats(self, i_device: int = 0) -> None:
        self._library.fake_device_reset_stats(i_device)


def program_environment(n_devices: int = 1, memory_bytes: int = 100 << 20) -> dict[str, str]:
    """An environment in which any program that loads ggml finds fake devices."""
    preload = " ".join(filter(None, (os.environ.get("LD_PRELOAD"), str(FAKE_LIBRARY))))
    return {
        **os.environ,
        "LD_PRELOAD": preload,
        "FAKE_DEVICES": str(n_devices),
        "FAKE_DEVICE_MEMORY": str(memory_bytes),
    }


if __name__ == "__main__":
    _call_in_this_process(*sys.argv[1:])
