"""`powerinfer measure-hardware`, devices and RPC servers. Speed itself is never asserted.

What adds an RPC server runs in a child process: ggml never forgets a device, and aborts when its server is gone.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import devices
import pytest

from powerinfer_py import _core, bench_machine, cli
from powerinfer_py.errors import OptionError
from powerinfer_py.tools.hardware import read_hardware

SMALL = ["--types", "f16,q4_K", "--n-embd", "256", "--n-ff", "64", "--row-mib", "1", "--repeat-ms", "1"]
SMALL_DEVICE = {"n_embd": 256, "max_bytes": 1 << 20, "repeat_s": 0.001}
HELLO_BYTES = 1 + 8 + 24  # command, size, capabilities
NOT_OURS = bytes([6, 0, 0, 0]) + bytes(24)  # version 6.0.0, capabilities


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth probe reads a few MiB: quick, and nothing is asserted about speed. GPUs of this machine aren't seen."""
    without_gpus = [item for item in _core.devices() if item["type"] == "cpu"]
    monkeypatch.setattr(_core, "devices", lambda: without_gpus)
    monkeypatch.setattr(bench_machine, "working_set_bytes", lambda: 2**22)


@pytest.fixture
def other_server() -> Iterator[Callable[[bytes | None], str]]:
    """`other_server(answer) -> address` of something that takes one connection, reads a hello and answers; None: never."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        done = threading.Event()
        threads = []

        def start(answer: bytes | None) -> str:
            def serve() -> None:
                with listener.accept()[0] as client:
                    if answer is None:
                        done.wait(30)
                    else:
                        client.recv(HELLO_BYTES, socket.MSG_WAITALL)
                        client.sendall(answer)

            threads.append(threading.Thread(target=serve))
            threads[0].start()
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield start
        done.set()
        threads[0].join()


def measure(*arguments: object) -> int:
    return cli.main(["measure-hardware", *map(str, arguments)])


def measure_in_child(address: str, arguments: list[str]) -> int:
    """`--rpc` too."""
    return cli.main(["measure-hardware", "--rpc", address, *arguments])


def measure_poor_device(path: Path) -> list[str]:
    """A fake GPU without q4_K rows goes to a file; then one whose memory is taken away meanwhile, and one without any."""
    fake = devices.FakeDevices(memory_bytes=1 << 20)
    fake.refuse_type("q4_K")
    assert cli.main(["measure-hardware", *SMALL, "-o", str(path)]) == 0
    errors = []
    for memory in (100, 0):
        with pytest.raises(OptionError) as caught:
            _core.measure_device("FAKE0", progress=lambda _, n=memory: fake.set_memory(n), **SMALL_DEVICE)
        errors.append(str(caught.value))
    return errors


def test_cpu_alone_gives_a_file_and_a_word_about_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hw.json"
    assert measure(*SMALL, "-t", 2, "-o", path) == 0
    hardware = read_hardware(path)
    cpu = hardware.cpu
    assert hardware.gpus == () and hardware.name == cpu.name and cpu.n_threads == 2
    assert cpu.memory_bytes == bench_machine.total_memory_bytes()
    assert set(cpu.row_bytes_s) == {"f16", "q4_K"} and cpu.bandwidth_bytes_s >= max(cpu.row_bytes_s.values())
    out = capsys.readouterr().out
    assert "no GPU: expected one" in out and "--rpc" in out and "q4_K" in out
    assert json.loads(path.read_text())["gpus"] == []


def test_name_and_kernel_set_stand_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERINFER_KERNELS", "scalar")
    assert measure(*SMALL, "--name", "my machine", "-o", tmp_path / "hw.json") == 0
    hardware = read_hardware(tmp_path / "hw.json")
    assert hardware.name == "my machine" and "kernels scalar" in hardware.source


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--types", "f17"], "types: f17 has no kernels; expected some of "),
        (["--types", "q4_K", "--n-embd", "100"], "q4_K needs a multiple of 256"),
        (["--device", "CUDA0"], "device: CUDA0: no GPU: expected one that llama.cpp was built for"),
        (["--device", "CPU"], "device: CPU: no GPU"),
        (["--rpc", "127.0.0.1"], "rpc: '127.0.0.1'; expected host:port"),
        (["-o", "no/such/folder/hw.json"], "isn't a folder"),
        (["-t", "0"], "expected at least 1"),
    ],
)
def test_wrong_argument_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(*arguments) == 1
    found = capsys.readouterr()
    assert text in found.err and found.err.count("\n") == 1 and found.out == ""


def test_kernel_set_that_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POWERINFER_KERNELS", "none-such")
    assert measure() == 1
    assert "POWERINFER_KERNELS: none-such can't run on this CPU; expected one of " in capsys.readouterr().err


def test_noise_is_a_note(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_machine, "MAX_OTHER_SHARE", -1.0)
    assert measure(*SMALL) == 0
    assert "rates may be too low" in capsys.readouterr().err


def test_memory_is_what_control_groups_allow(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal:       1000 kB\nMemAvailable:    500 kB\n")
    assert bench_machine.total_memory_bytes(tmp_path) == 1000 * 1024
    write("proc/self/cgroup", "4:cpu,memory:/a/b\n2:cpu:/a\n0::/c/d\n")
    assert bench_machine.total_memory_bytes(tmp_path) == 1000 * 1024
    write("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n")
    write("sys/fs/cgroup/c/d/memory.max", "max\n")
    assert bench_machine.total_memory_bytes(tmp_path) == 1000 * 1024
    write("sys/fs/cgroup/c/memory.max", "600000\n")
    assert bench_machine.total_memory_bytes(tmp_path) == 600000
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "500000\n")
    assert bench_machine.total_memory_bytes(tmp_path) == 500000


def test_devices_are_listed() -> None:
    (cpu,) = _core.devices()
    assert set(cpu) == {"name", "description", "type", "memory_free", "memory_total", "async"}
    assert cpu["name"] == "CPU" and cpu["memory_total"] >= cpu["memory_free"] > 0


def test_device_is_measured() -> None:
    steps: list[str] = []
    found = _core.measure_device("CPU", types=["q4_0", "f16"], progress=steps.append, **SMALL_DEVICE)
    assert steps == ["copies", "round trip", "q4_0", "f16", "bandwidth"]
    assert list(found["row_bytes_s"]) == ["q4_0", "f16"]
    rates = [found[name] for name in ("to_device_bytes_s", "to_host_bytes_s", "round_trip_s")]
    assert min(*rates, *found["row_bytes_s"].values()) > 0 and found["pinned"] is False
    assert found["bandwidth_bytes_s"] >= max(found["row_bytes_s"].values())


def test_every_row_type_with_kernels_is_measured_on_a_device() -> None:
    found = _core.measure_device("CPU", **SMALL_DEVICE)
    assert set(found["row_bytes_s"]) == set(_core.kernel_sets()[0]["row_types"]) and min(found["row_bytes_s"].values())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_measuring_ends_with_what_progress_raises(error: type[BaseException]) -> None:
    def progress(what: str) -> None:
        if what == "round trip":
            raise error

    with pytest.raises(error):
        _core.measure_device("CPU", progress=progress, **SMALL_DEVICE)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("none", {}, "device: none; expected one of .*CPU"),
        ("CPU", {"types": ["q1"]}, "types: q1; expected some of f32, "),
        ("CPU", {"types": ["q4_K"], "n_embd": 128}, "128 values; expected whole blocks of 256 for q4_K"),
        ("CPU", {"n_embd": 0}, "0 values"),
        ("CPU", {"max_bytes": 0}, "device: CPU has no "),
        ("CPU", {"max_bytes": 100}, "device: CPU has no 1024 bytes for measuring, 100 may be used"),
    ],
)
def test_what_cannot_be_measured_is_refused(name: str, options: dict[str, object], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        _core.measure_device(name, **{**SMALL_DEVICE, **options})


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:x", "host:0", "host:65536", "host:1:2", "host:-1"]
)
def test_address_of_a_server_is_checked(address: str) -> None:
    with pytest.raises(OptionError, match=f"rpc: '{address}'; expected host:port"):
        _core.add_rpc_server(address)


def test_address_without_a_server_is_an_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and doesn't listen
        with pytest.raises(OptionError, match=r"nothing answers there .*; expected an RPC server"):
            _core.add_rpc_server(f"127.0.0.1:{unused.getsockname()[1]}")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "it hangs up"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it isn't an RPC server"),
        (len(NOT_OURS).to_bytes(8, "little") + NOT_OURS[:9], "it isn't an RPC server"),
        (len(NOT_OURS).to_bytes(8, "little") + NOT_OURS, "its protocol is 6.0"),
        (None, "it is silent for 5 s: no RPC server, or one with another client"),
    ],
)
def test_server_that_cannot_be_used_is_an_error(
    other_server: Callable[[bytes | None], str], answer: bytes | None, text: str
) -> None:
    with pytest.raises(OptionError, match=text):
        _core.add_rpc_server(other_server(answer))


def test_rpc_server_is_measured_as_a_gpu(rpc_server: devices.RpcServer, tmp_path: Path) -> None:
    path = tmp_path / "hw.json"
    arguments = [*SMALL, "--device", "RPC0", "-o", str(path)]
    assert devices.run_in_child(measure_in_child, rpc_server.endpoint, arguments) == 0
    hardware = read_hardware(path)
    (gpu,) = hardware.gpus
    assert gpu.name == f"RPC0: {rpc_server.endpoint}" and hardware.name == f"{gpu.name} + {hardware.cpu.name}"
    assert set(gpu.row_bytes_s) == {"f16", "q4_K"} and gpu.round_trip_s < 1.0


def test_server_that_went_away_is_an_error(rpc_server: devices.RpcServer) -> None:
    rpc_server.process.kill()
    rpc_server.process.wait()
    assert devices.run_in_child(measure_in_child, rpc_server.endpoint, SMALL) == 1


@pytest.mark.usefixtures("fake_device")
def test_device_is_measured_within_its_memory_and_types(tmp_path: Path) -> None:
    errors = devices.run_in_child(measure_poor_device, tmp_path / "hw.json")
    (gpu,) = read_hardware(tmp_path / "hw.json").gpus
    assert gpu.name.startswith("FAKE0: ") and set(gpu.row_bytes_s) == {"f16"} and gpu.memory_bytes == 1 << 20
    assert all(error.startswith("device: FAKE0 has no ") for error in errors) and len(errors) == 2
