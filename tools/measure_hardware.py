"""`powerinfer measure-hardware`: what this machine's CPU and GPUs reach when they decode, as a table and a hardware file.

The CPU runs our kernels on rows in memory, a GPU products of its own backend; a rate is the best of several timed runs.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Loads the libraries that _core is linked to.
import llama_cpp  # noqa: F401

from powerinfer_py import _core
from powerinfer_py.bench_machine import Noise, NoiseMeter, read_bandwidth, total_memory_bytes, working_set_bytes
from powerinfer_py.bench_report import figure, names, print_table
from powerinfer_py.errors import OptionError

from .arguments import count_of
from .hardware import Cpu, Gpu, Hardware, write_hardware
from .row_types import row_bytes
from .terminal import Steps, progress_steps

# Rows that the cold part reads: a token's active ones, and the gate rows of candidates. From all rows down to 2 % of
# them the rate of f16 rows changes by 1 %, that of q4_0 rows by 15 % (2 threads, AMX).
DENSITY = 0.1
GATE_DENSITY = 0.13
_GPU_ROW_BYTES = 256 << 20
_N_REPEATS = 5
_HOW_TO_GET_A_GPU = (
    "no GPU: expected one that llama.cpp was built for, or an RPC server; build llama-cpp-python again with "
    "CMAKE_ARGS=-DGGML_CUDA=ON in the environment, or pass --rpc HOST:PORT."
)


@dataclass(frozen=True)
class MeasureOptions:
    """What to measure, with the defaults."""

    types: tuple[str, ...] = ()  # ggml type names of rows; empty: all that have kernels
    devices: tuple[str, ...] = ()  # names of GPUs; empty: all
    rpc: tuple[str, ...] = ()  # host:port of servers whose devices are GPUs too
    n_threads: int | None = None  # None: physical cores allowed
    n_embd: int = 4096  # values per row
    n_ff: int = 11008  # rows per matrix on the CPU
    row_mib: int | None = None  # rows of a type; None: three times the largest cache, at least 1024, and 256 on a GPU
    repeat_s: float = 0.05  # per timed run, about
    name: str | None = None  # of the machine; None: of its GPUs and CPU


def measure_hardware(options: MeasureOptions, steps: Steps, note: Callable[[str], None]) -> tuple[Hardware, Noise]:
    """Measures the CPU and the GPUs.

    Args:
        options: what to measure.
        steps: progress, as terminal.progress_steps gives it.
        note: receives what a GPU can't do.

    Returns:
        The machine, and what else it did meanwhile.

    Raises:
        OptionError: a type, device or server that isn't there, or a device that can't be measured.
    """
    kernels, known = _kernel_set()
    for row_type in options.types:
        if row_type not in known:
            raise OptionError(f"types: {row_type} has no kernels; expected some of {', '.join(known)}; pass those.")
    types = options.types or known
    for row_type in types:
        row_bytes(options.n_embd, row_type)
    for address in options.rpc:
        _core.add_rpc_server(address)
    devices = _core.devices()
    chosen = _choose(devices, options.devices)
    n_threads = options.n_threads or _core.physical_cores()
    meter = NoiseMeter(n_threads)
    cpu_name = next((item["description"] for item in devices if item["type"] == "cpu"), "CPU")
    cpu = _measure_cpu(options, types, kernels, n_threads, cpu_name, steps)
    gpus = tuple(_measure_gpu(options, types, item, steps, note) for item in chosen)
    noise = meter.stop()
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    source = (
        f"measured {today} by powerinfer {_core.version()}: {n_threads} threads, kernels {kernels}, rows of {options.n_embd} "
        f"values, {DENSITY:.0%} of them read by the CPU, all by a GPU"
    )
    name = options.name or " + ".join(item.name for item in (*gpus, cpu))
    return Hardware(name, source, cpu, gpus), noise


def _kernel_set() -> tuple[str, tuple[str, ...]]:
    """The kernel set that models run with, and the row types that it has."""
    wanted = os.environ.get("POWERINFER_KERNELS")
    for item in _core.kernel_sets():
        if item["is_supported"] and item["name"] == (wanted or item["name"]):
            return item["name"], tuple(item["row_types"])
    have = ", ".join(item["name"] for item in _core.kernel_sets() if item["is_supported"])
    raise OptionError(f"POWERINFER_KERNELS: {wanted} can't run on this CPU; expected one of {have}; set another.")


def _choose(devices: list[dict[str, Any]], wanted: tuple[str, ...]) -> list[dict[str, Any]]:
    """The GPUs to measure."""
    gpus = {item["name"]: item for item in devices if item["type"] in ("gpu", "igpu")}
    if not wanted:
        return [item for item in gpus.values() if item["type"] == "gpu"]
    for name in wanted:
        if name not in gpus:
            raise OptionError(
                f"device: {name} isn't a GPU here; expected one of {', '.join(gpus)}; pass one of them."
                if gpus
                else f"device: {name}: {_HOW_TO_GET_A_GPU}"
            )
    return [gpus[name] for name in dict.fromkeys(wanted)]


def _measure_cpu(
    options: MeasureOptions, types: tuple[str, ...], kernels: str, n_threads: int, name: str, steps: Steps
) -> Cpu:
    n_bytes = working_set_bytes() if options.row_mib is None else options.row_mib << 20
    rates = {}
    with steps("CPU: bandwidth", len(types) + 1) as step:
        bandwidth = read_bandwidth(n_threads)
        for row_type in types:
            step(f"CPU: {row_type}")
            bench = _core.KernelBench(row_type, options.n_embd, options.n_ff, n_bytes)
            result = bench.run(
                kernels=kernels,
                op="ffn",
                layout="bundle",
                gate_density=GATE_DENSITY,
                density=DENSITY,
                n_threads=n_threads,
                n_repeats=_N_REPEATS,
                repeat_s=options.repeat_s,
            )
            del bench  # before the next one is filled
            rates[row_type] = result["pass_bytes"] / result["pass_s_min"]
        step()
    return Cpu(name, total_memory_bytes(), max(bandwidth, *rates.values()), rates, n_threads)


def _measure_gpu(
    options: MeasureOptions, types: tuple[str, ...], device: dict[str, Any], steps: Steps, note: Callable[[str], None]
) -> Gpu:
    name = device["name"]
    if not device["memory_total"]:
        raise OptionError(f"device: {name} doesn't say how much memory it has; expected it; measure others (--device).")
    with steps(f"{name}:", len(types) + 3) as step:
        found = _core.measure_device(
            name,
            types=types,
            n_embd=options.n_embd,
            max_bytes=_GPU_ROW_BYTES if options.row_mib is None else options.row_mib << 20,
            repeat_s=options.repeat_s,
            progress=lambda what: step(f"{name}: {what}"),
        )
    missing = [row_type for row_type, rate in found["row_bytes_s"].items() if not rate]
    if missing:
        note(f"{name} can't multiply rows of {', '.join(missing)}; they have no rate.")
    return Gpu(
        name=f"{name}: {device['description']}",
        memory_bytes=device["memory_total"],
        bandwidth_bytes_s=found["bandwidth_bytes_s"],
        row_bytes_s={row_type: rate for row_type, rate in found["row_bytes_s"].items() if rate},
        to_gpu_bytes_s=found["to_device_bytes_s"],
        to_cpu_bytes_s=found["to_host_bytes_s"],
        round_trip_s=found["round_trip_s"],
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer measure-hardware`."""
    default = MeasureOptions()
    parser.add_argument("-o", "--outfile", type=Path, help="hardware file to write (JSON)")
    parser.add_argument(
        "--types", type=names, default=(), help="row types, e.g. f16,q4_0 (default: all that have kernels)"
    )
    parser.add_argument("--device", type=names, default=(), help="GPUs by ggml's name, e.g. CUDA0,CUDA1 (default: all)")
    parser.add_argument("--rpc", type=names, default=(), metavar="HOST:PORT", help="RPC servers, separated by commas")
    parser.add_argument("-t", "--threads", type=count_of, help="threads of the CPU (default: physical cores allowed)")
    parser.add_argument("--n-embd", type=count_of, default=default.n_embd, help="values per row (default: %(default)s)")
    parser.add_argument("--n-ff", type=count_of, default=default.n_ff, help="rows per matrix (default: %(default)s)")
    parser.add_argument(
        "--row-mib",
        type=count_of,
        help="MiB of rows per type, far more than caches hold (default: three times the largest cache, at least 1024; "
        f"on a GPU {_GPU_ROW_BYTES >> 20})",
    )
    parser.add_argument(
        "--repeat-ms", type=count_of, default=int(default.repeat_s * 1e3), help="per timed run (default: %(default)s)"
    )
    parser.add_argument("--name", help="of the machine, for the file (default: its GPUs and CPU)")


def run(args: argparse.Namespace) -> int:
    """`powerinfer measure-hardware`.

    Args:
        args: the parsed command line.

    Returns:
        The exit code.
    """
    if args.outfile and not args.outfile.parent.is_dir():
        raise OptionError(f"outfile: {args.outfile.parent} isn't a folder; expected one; make it first.")
    options = MeasureOptions(
        types=args.types,
        devices=args.device,
        rpc=args.rpc,
        n_threads=args.threads,
        n_embd=args.n_embd,
        n_ff=args.n_ff,
        row_mib=args.row_mib,
        repeat_s=args.repeat_ms / 1e3,
        name=args.name,
    )
    note = logging.getLogger("powerinfer_py").warning
    with progress_steps() as steps:
        hardware, noise = measure_hardware(options, steps, note)
    for reason in noise.reasons():
        note(f"{reason}: rates may be too low; measure again on a calm machine.")
    _print(hardware)
    if args.outfile:
        print(f"written: {write_hardware(hardware, args.outfile)}")
    return 0


def _print(hardware: Hardware) -> None:
    print_table(
        f"{hardware.name}\n{hardware.source}\n",
        ("device", "memory GiB", "read GB/s", "to GPU GB/s", "to CPU GB/s", "round trip us"),
        [
            (
                item.name,
                figure(item.memory_bytes / 2**30, 1),
                figure(item.bandwidth_bytes_s / 1e9, 1),
                *(
                    (
                        figure(item.to_gpu_bytes_s / 1e9, 1),
                        figure(item.to_cpu_bytes_s / 1e9, 1),
                        figure(item.round_trip_s * 1e6, 0),
                    )
                    if isinstance(item, Gpu)
                    else ("-", "-", "-")
                ),
            )
            for item in (hardware.cpu, *hardware.gpus)
        ],
        1,
    )
    print_table(
        "\nfeed-forward rows, GB/s\n",
        ("type", "CPU", *(gpu.name for gpu in hardware.gpus)),
        [
            (
                row_type,
                figure(rate / 1e9, 1),
                *(
                    figure(gpu.row_bytes_s[row_type] / 1e9, 1) if row_type in gpu.row_bytes_s else "-"
                    for gpu in hardware.gpus
                ),
            )
            for row_type, rate in hardware.cpu.row_bytes_s.items()
        ],
        1,
    )
    if not hardware.gpus:
        print(_HOW_TO_GET_A_GPU)
