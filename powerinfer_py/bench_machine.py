"""The machine during a benchmark: read bandwidth, anonymous memory, and noise with the limits above which nothing is reported.

Figures come from /proc and /sys (Linux).
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from powerinfer_py import _core
from powerinfer_py.errors import NoiseError

# Limits of the noise. A tenth of the cores taken by others moves medians by about as much as the differences looked for.
MAX_OTHER_SHARE = 0.10
# Time that the host of a virtual machine gave to others is lost for all threads that wait at the next barrier.
MAX_STEAL_SHARE = 0.05
# Interquartile range / median of the ratios of neighbouring runs; changes of the whole machine cancel in them.
MAX_RATIO_SPREAD = 0.20
# A probe range (largest / smallest - 1) above this is worth a note: the memory changed its speed during the run.
NOTED_PROBE_RANGE = 0.20

_MEMORY_POLL_S = 0.01
_LEAST_WORKING_SET_BYTES = 2**30
# Working set / largest cache from which reads count as reads from memory.
_CACHE_MULTIPLE = 3


@dataclass(frozen=True)
class Noise:
    """What else the machine did during the timed runs of one benchmark."""

    seconds: float
    n_cores: int  # that the benchmark's threads use
    other_share: float  # CPU time of other processes on the cores that we may run on / (seconds x n_cores)
    steal_share: float  # the same of what a virtual machine's host took, over all cores that we may run on

    def reasons(self) -> list[str]:
        """What was too much, in words; empty when nothing was."""
        found = []
        if self.other_share > MAX_OTHER_SHARE:
            found.append(
                f"other processes took {self.other_share:.0%} of the {self.n_cores} cores used (limit {MAX_OTHER_SHARE:.0%})"
            )
        if self.steal_share > MAX_STEAL_SHARE:
            found.append(f"the host took {self.steal_share:.0%} of the cores' time (limit {MAX_STEAL_SHARE:.0%})")
        return found


class NoiseMeter:
    """Measures Noise from its creation to `stop`."""

    def __init__(self, n_threads: int) -> None:
        """
        Args:
            n_threads: most threads that the benchmark runs at once.
        """
        self._cpus = os.sched_getaffinity(0)
        self._n_cores = min(n_threads, len(self._cpus))
        self._start = self._read()

    def stop(self) -> Noise:
        """The noise since the start."""
        seconds, own_s, busy_s, steal_s = (now - then for now, then in zip(self._read(), self._start))
        seconds = max(seconds, 1e-9)
        return Noise(
            seconds=seconds,
            n_cores=self._n_cores,
            other_share=max(0.0, busy_s - own_s) / (seconds * self._n_cores),
            steal_share=steal_s / (seconds * len(self._cpus)),
        )

    def _read(self) -> tuple[float, float, float, float]:
        """Clock, CPU time of this process, busy and stolen time of the allowed CPUs; all in seconds."""
        busy, steal = cpu_times(Path("/proc/stat").read_text(encoding="ascii"), self._cpus)
        return time.perf_counter(), time.process_time(), busy, steal


def cpu_times(stat: str, cpus: set[int]) -> tuple[float, float]:
    """Sums of /proc/stat.

    Args:
        stat: its text.
        cpus: numbers of the CPUs to sum.

    Returns:
        Seconds that they were busy for processes and interrupts, and seconds that were stolen from them.
    """
    busy = steal = 0
    for line in stat.splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _wait, irq, soft_irq, stolen = (int(count) for count in counts[:8])
            busy += user + nice + system + irq + soft_irq
            steal += stolen
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return busy / ticks_per_s, steal / ticks_per_s


def relative_spread(values: Sequence[float]) -> float | None:
    """Interquartile range / median; None for fewer than two values."""
    if len(values) < 2:
        return None
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / median


def check_noise(reasons: Sequence[str], allowed: bool) -> None:
    """Refuse to report what a noisy machine measured.

    Args:
        reasons: what was too much, in words.
        allowed: whether to report anyway.

    Raises:
        NoiseError: there are reasons, and they aren't allowed.
    """
    if reasons and not allowed:
        raise NoiseError(
            f"bench: the machine was too noisy to report: {'; '.join(reasons)}; expected a calm one; "
            "close other programs and run again, or pass --allow-noise for a report with this warning."
        )


class PeakMemory:
    """Anonymous memory (RssAnon + RssShmem) of this process while the `with` block runs, looked at every 10 ms."""

    def __enter__(self) -> PeakMemory:
        self.start_bytes = self.peak_bytes = self.end_bytes = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        self.end_bytes = anonymous_bytes()
        self.peak_bytes = max(self.peak_bytes, self.end_bytes)

    def _poll(self) -> None:
        while not self._done.wait(_MEMORY_POLL_S):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())


def anonymous_bytes() -> int:
    """RssAnon + RssShmem of this process: memory that no file backs."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(("RssAnon:", "RssShmem:")))


def available_memory_bytes() -> int:
    """MemAvailable of the system."""
    return _memory_info(Path("/"), "MemAvailable")


def total_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may use in all: the machine's, or less where its control groups (v1 or v2) allow less.

    Args:
        root: where proc and sys are.

    Returns:
        Bytes.
    """
    limits = [_memory_info(root, "MemTotal")]
    groups = root / "proc/self/cgroup"
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else ():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            folder, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = folder / group[1:]
        # Of every group above it too; in a container its own folder may be the root of what is mounted.
        for file in (path / name for path in (own, *own.parents) if path.is_relative_to(folder)):
            if file.is_file() and file.read_text(encoding="ascii").strip().isdigit():
                limits.append(int(file.read_text(encoding="ascii")))
    return min(limits)


def _memory_info(root: Path, name: str) -> int:
    """A line of /proc/meminfo, in bytes."""
    with open(root / "proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:")) * 1024


def cache_bytes() -> int:
    """The largest cache of CPU 0; 0 when the system doesn't say."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    texts = [size.read_text(encoding="ascii").strip() for size in sizes]
    return max((int(text[:-1]) * units[text[-1]] for text in texts if text[-1:] in units), default=0)


def working_set_bytes() -> int:
    """How much to read so that it comes from memory: three times the largest cache, at least 1 GiB, if memory has it."""
    return min(max(_LEAST_WORKING_SET_BYTES, _CACHE_MULTIPLE * cache_bytes()), available_memory_bytes() // 3)


def read_bandwidth(n_threads: int) -> float:
    """Measure how fast memory can be read.

    Args:
        n_threads: threads that read, each its own part; no more than the CPUs that we may run on are used.

    Returns:
        Bytes per second.
    """
    return _core.read_bandwidth(min(n_threads, len(os.sched_getaffinity(0))), working_set_bytes())
