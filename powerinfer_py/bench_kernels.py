"""`powerinfer bench --kernels`: each kernel alone, without a model, and the memory layouts of a feed-forward block."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Loads the libraries that _core is linked to.
import llama_cpp  # noqa: F401

from powerinfer_py import _core
from powerinfer_py.bench_machine import (
    Noise,
    NoiseMeter,
    cache_bytes,
    check_noise,
    read_bandwidth,
    working_set_bytes,
)
from powerinfer_py.bench_report import figure, print_table, write_csv, write_json
from powerinfer_py.errors import OptionError

KERNELS = ("dot", "add", "unpack")
LAYOUTS = ("separate", "bundle", "interleaved")
# Gate rows that `predicted` reads per row that is active: what predictors with recall 0.95 to 0.96 need.
CANDIDATES_PER_ACTIVE = 1.3


@dataclass(frozen=True)
class KernelOptions:
    """Options of a kernel benchmark, with their defaults."""

    sets: tuple[str, ...] = ()  # empty: all that this CPU runs
    types: tuple[str, ...] = ()  # empty: all that have kernels
    n: int = 4096  # values per row
    n_rows: int = 11008  # rows per matrix
    densities: tuple[float, ...] = (0.1, 1.0)  # shares of rows read
    threads: tuple[int, ...] = ()  # empty: physical cores allowed
    repeats: int = 5  # timed, of 50 ms each


@dataclass(frozen=True)
class KernelLine:
    """One kernel, or the three of a block in one layout."""

    kernels: str  # set
    row_type: str
    op: str  # dot, add, unpack; exact, predicted: gate dots, up dots and down adds of one layer
    layout: str  # of exact and predicted; rows: one matrix
    source: str  # memory or cache
    n_threads: int
    gate_density: float | None  # asked for; share of gate rows read by exact and predicted
    density: float  # asked for; share of rows read (exact, predicted: of up and of down rows)
    row_bytes: int
    pass_us: float  # median time of one matrix, or of one layer
    pass_us_min: float
    pass_us_max: float
    separate_ratio: (
        float | None
    )  # speed / that of separate matrices, median of neighbouring runs; of exact and predicted
    gb_s: float  # bytes of the rows read / time
    bandwidth_share: float  # gb_s / read bandwidth of as many threads
    cycles_per_row: float  # of one thread: time x core clock x threads / rows
    core_ghz: float


@dataclass(frozen=True)
class KernelReport:
    """All lines, and what they were measured on."""

    lines: tuple[KernelLine, ...]
    bandwidth_gb_s: dict[int, float]  # by threads
    working_set_bytes: int
    noise: Noise


def measure_kernels(options: KernelOptions) -> KernelReport:
    """Time every kernel that is asked for.

    Args:
        options: what to measure.

    Returns:
        Lines in the order type, threads, set.

    Raises:
        OptionError: a set or type that isn't there, or rows that can't be.
    """
    known = {item["name"]: item for item in _core.kernel_sets()}
    sets = options.sets or tuple(name for name, item in known.items() if item["is_supported"])
    for name in sets:
        if name not in known or not known[name]["is_supported"]:
            raise OptionError(f"sets: {name} can't run on this CPU; expected some of {', '.join(known)}; pass others.")
    types = options.types or tuple(dict.fromkeys(t for name in sets for t in known[name]["row_types"]))
    for row_type in types:
        if not any(row_type in known[name]["row_types"] for name in sets):
            have = ", ".join(sorted({t for name in sets for t in known[name]["row_types"]}))
            raise OptionError(f"types: {row_type} has no kernels in {', '.join(sets)}; expected some of {have}.")
    threads = options.threads or (_core.physical_cores(),)
    n_bytes = working_set_bytes()
    meter = NoiseMeter(max(threads))
    bandwidth = {n_threads: read_bandwidth(n_threads) for n_threads in threads}
    lines = []
    for row_type in types:
        bench = _core.KernelBench(row_type, options.n, options.n_rows, n_bytes)
        for n_threads in threads:
            for name in sets:
                if row_type in known[name]["row_types"]:
                    lines += _measure_set(bench, options, row_type, name, n_threads, bandwidth[n_threads])
        del bench  # before the next one is filled
    return KernelReport(tuple(lines), {n: value / 1e9 for n, value in bandwidth.items()}, n_bytes, meter.stop())


def _measure_set(
    bench: _core.KernelBench, options: KernelOptions, row_type: str, kernels: str, n_threads: int, bandwidth: float
) -> Iterator[KernelLine]:
    def measure(n_repeats: int, op: str, **what: Any) -> dict[str, float]:
        return bench.run(kernels=kernels, op=op, n_threads=n_threads, n_repeats=n_repeats, **what)

    def line(result: dict[str, float], ratio: float | None = None, **fields: Any) -> KernelLine:
        gb_s = result["pass_bytes"] / result["pass_s"] / 1e9
        return KernelLine(
            kernels=kernels,
            row_type=row_type,
            n_threads=n_threads,
            row_bytes=bench.row_bytes,
            pass_us=result["pass_s"] * 1e6,
            pass_us_min=result["pass_s_min"] * 1e6,
            pass_us_max=result["pass_s_max"] * 1e6,
            separate_ratio=ratio,
            gb_s=gb_s,
            bandwidth_share=gb_s * 1e9 / bandwidth,
            cycles_per_row=result["pass_s"] * result["core_hz"] * n_threads / result["pass_rows"],
            core_ghz=result["core_hz"] / 1e9,
            **fields,
        )

    for op in KERNELS:
        rows = {"op": op, "layout": "rows", "gate_density": None}
        yield line(measure(options.repeats, op, in_cache=True), source="cache", density=1.0, **rows)
        for density in options.densities:
            yield line(measure(options.repeats, op, density=density), source="memory", density=density, **rows)
    for density in options.densities:
        candidates = min(1.0, CANDIDATES_PER_ACTIVE * density)
        # Where all are candidates the two patterns are one.
        for op, gate_density in {"exact": 1.0, "predicted": candidates}.items():
            if op == "predicted" and gate_density == 1.0:
                continue
            what = {"gate_density": gate_density, "density": density}
            # In turns: what the machine does meanwhile meets all layouts.
            turns = [
                {layout: measure(1, "ffn", layout=layout, **what) for layout in LAYOUTS} for _ in range(options.repeats)
            ]
            for layout in LAYOUTS:
                yield line(
                    _medians([turn[layout] for turn in turns]),
                    statistics.median(turn["separate"]["pass_s"] / turn[layout]["pass_s"] for turn in turns),
                    op=op,
                    layout=layout,
                    source="memory",
                    **what,
                )


def _medians(results: list[dict[str, float]]) -> dict[str, float]:
    """One result of several with one repeat each."""
    medians = {name: statistics.median(result[name] for result in results) for name in results[0]}
    times = [result["pass_s"] for result in results]
    return {**medians, "pass_s_min": min(times), "pass_s_max": max(times)}


def run(options: KernelOptions, args: argparse.Namespace) -> int:
    """Measure, print tables, write files.

    Args:
        options: what to measure.
        args: json, csv: files to write, or None; allow_noise.

    Returns:
        The exit code.
    """
    report = measure_kernels(options)
    reasons = report.noise.reasons()
    check_noise(reasons, args.allow_noise)
    _print(options, report, reasons)
    if args.json:
        write_json(args.json, {"options": options, "report": report, "warnings": reasons})
    if args.csv:
        write_csv(args.csv, report.lines)
    return 0


def _print(options: KernelOptions, report: KernelReport, reasons: list[str]) -> None:
    probes = ", ".join(f"{n} threads {value:.1f} GB/s" for n, value in report.bandwidth_gb_s.items())
    cache = cache_bytes()
    title = [
        f"matrices of {options.n_rows} x {options.n} values; working set {report.working_set_bytes / 2**20:.0f} MiB in huge "
        f"pages, largest cache {cache / 2**20:.0f} MiB; read bandwidth: {probes}",
        "GB/s: bytes of the rows read. cycles/row: of one thread, elapsed time x core clock (measured by dependent additions).",
        "memory: other rows and another matrix in every pass, hot rows together. cache: 256 KiB of rows per thread, again and again.",
    ]
    if report.working_set_bytes < 2 * cache:
        title.append("note: the working set is less than twice the largest cache; rows may come from there")
    title += [f"warning: {reason}" for reason in reasons]
    single = [line for line in report.lines if line.layout == "rows"]
    print_table(
        "\n".join(title) + "\n",
        (
            "type",
            "set",
            "kernel",
            "from",
            "threads",
            "density",
            "bytes/row",
            "GB/s",
            "of bandwidth",
            "cycles/row",
            "spread",
        ),
        [
            (
                line.row_type,
                line.kernels,
                line.op,
                line.source,
                str(line.n_threads),
                figure(line.density, 3),
                str(line.row_bytes),
                figure(line.gb_s, 1),
                f"{line.bandwidth_share:.0%}",
                figure(line.cycles_per_row, 0),
                _spread(line),
            )
            for line in single
        ],
        4,
    )
    blocks = [line for line in report.lines if line.layout != "rows"]
    print_table(
        "\nlayouts of a feed-forward block, in turns: bundle: up and down rows side by side; interleaved: gate rows too\n",
        (
            "type",
            "set",
            "rows of",
            "layout",
            "threads",
            "gate rows",
            "other rows",
            "us/layer",
            "GB/s",
            "x separate",
            "spread",
        ),
        [
            (
                line.row_type,
                line.kernels,
                line.op,
                line.layout,
                str(line.n_threads),
                figure(line.gate_density, 3),
                figure(line.density, 3),
                figure(line.pass_us, 0),
                figure(line.gb_s, 1),
                figure(line.separate_ratio),
                _spread(line),
            )
            for line in blocks
        ],
        4,
    )


def _spread(line: KernelLine) -> str:
    return f"{line.pass_us_min / line.pass_us - 1:+.0%} {line.pass_us_max / line.pass_us - 1:+.0%}"
