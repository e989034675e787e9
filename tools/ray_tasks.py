"""Work of `profile` and `train` as Ray tasks, on this machine or on a cluster that is there; results as a local run has them.

Workers open files by path: the same machine, or a file system that all share. Ray alone decides where a task runs.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import powerinfer_py
from powerinfer_py import _core
from powerinfer_py.errors import OptionError, PlanError, PowerInferError
from powerinfer_py.format import BaseModel

from . import arguments
from .text_runner import Runner

LOCAL = "local"  # the address of a Ray that is started on this machine, for this run alone
# Of a file's digest: so many pieces, evenly spread. A smaller file is read whole.
_N_PIECES = 256
_PIECE_BYTES = 4096
_CONNECT_S = 10.0


# ---- Ray -----------------------------------------------------------------------------------------------------------


class Cluster:
    """A Ray that tasks are given to. Works in `with`; what is still running when it closes is cancelled."""

    def __init__(self, address: str, n_cpus: int, note: Callable[[str], None], *, verbose: bool = False) -> None:
        """Starts one on this machine, or joins one. A Ray that this process uses already is used, and left alone.

        Args:
            address: LOCAL; `auto` or host:port.
            n_cpus: that one task uses.
            note: receives notes.
            verbose: Ray says what it does.

        Raises:
            OptionError: Ray isn't installed, or can't be reached.
        """
        arguments.need_packages("--ray", "ray", "ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray = ray
        self._n_cpus = n_cpus
        self._note = note
        self._pending: set[Any] = set()
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _check_address(address)
            options: dict[str, Any] = {"address": address}
            if address == LOCAL:
                options["include_dashboard"] = False
                options["num_cpus"] = max(n_cpus, _core.physical_cores())
            try:
                ray.init(
                    **options,
                    log_to_driver=verbose,
                    logging_level="INFO" if verbose else "ERROR",
                )
            except Exception as error:  # a node that starts too slowly is a bare one
                raise _no_cluster(address, _first_line(error).partition(". ")[0]) from None
        most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
        if most < n_cpus:
            note(
                f"ray: a task needs {n_cpus} CPUs and no machine of the cluster has more than {most:.0f}; tasks wait for "
                "one that has. Fewer --threads need fewer."
            )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what is running, and ends a Ray that was started or joined here. Twice is fine."""
        for task in self._pending:
            self._ray.cancel(task)
        self._pending.clear()
        if self._is_ours:
            self._is_ours = False
            self._ray.shutdown()

    def share(self, value: Any) -> Any:
        """A value that is sent to each machine once; it stands for it among the arguments of tasks."""
        return self._ray.put(value)

    def start(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], n_gpus: int = 0
    ) -> Sequence[Any]:
        """Starts a task per tuple of arguments. A task whose worker dies is started again, by Ray.

        Args:
            function: of an importable module; called as function(notes, *values); notes is a list that it adds to.
            arguments: of each.
            n_gpus: that one task uses.

        Returns:
            The tasks.
        """
        # Ray sets OMP_NUM_THREADS to num_cpus: matrix products use so many threads too
        task = self._ray.remote(_run_task).options(num_cpus=self._n_cpus, num_gpus=n_gpus)
        tasks = [task.remote(powerinfer_py.__version__, function, *values) for values in arguments]
        self._pending.update(tasks)
        return tasks

    def result(self, task: Any) -> Any:
        """Waits for a task.

        Args:
            task: of start().

        Returns:
            What its function returned.

        Raises:
            PowerInferError: what it raised, or that it could not be finished.
        """
        from ray.exceptions import RayError, RayTaskError

        try:
            value, notes = self._ray.get(task)
        except RayTaskError as error:
            if isinstance(error.cause, (PowerInferError, OSError)):
                raise error.cause from None
            raise PlanError(
                f"ray: a task raised {type(error.cause).__name__}: {_first_line(error.cause)}; expected it to finish; "
                "--verbose shows what its worker says."
            ) from error
        except RayError as error:
            raise PlanError(
                f"ray: {type(error).__name__}: {_first_line(error)}; expected the task to finish; where memory was "
                "short, have fewer of them at a time (more --threads), and --resume."
            ) from None
        self._pending.discard(task)
        for text in notes:
            self._note(text)
        return value

    def finished(self, tasks: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
        """(key, result) of tasks as they come."""
        keys = {task: key for key, task in tasks.items()}
        while keys:
            (task,), _ = self._ray.wait(list(keys))
            yield keys.pop(task), self.result(task)


def _check_address(address: str) -> None:
    """Refuses what Ray would wait for in vain, for minutes."""
    if address in (LOCAL, "auto"):
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except ValueError:
        raise OptionError(f"ray: {address!r}; expected `auto` or host:port; or leave the address out.") from None
    except OSError as error:
        raise _no_cluster(address, error.strerror or str(error)) from None


def _no_cluster(address: str, why: str) -> OptionError:
    return OptionError(
        f"ray: {address}: {why}; expected a Ray cluster that this machine belongs to; start it with `ray start`, or leave "
        "the address out for one on this machine."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _run_task(version: str, function: Callable[..., Any], *values: Any) -> tuple[Any, list[str]]:
    """What a worker does: a task's value, and the notes that were made on the way."""
    if version != powerinfer_py.__version__:
        raise PlanError(
            f"ray: {platform.node()} has powerinfer_py {powerinfer_py.__version__}; expected {version}; install it there."
        )
    notes: list[str] = []
    return function(notes, *values), notes


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    """`--ray` and `--verbose`."""
    parser.add_argument(
        "--ray",
        nargs="?",
        const=LOCAL,
        metavar="ADDRESS",
        help="run as Ray tasks: on this machine, or on the cluster at `auto` or host:port (extra ray)",
    )
    parser.add_argument("--verbose", action="store_true", help="with --ray: Ray's own messages")


def check_ray(args: argparse.Namespace) -> None:
    """Refuses --verbose where nothing would be said.

    Raises:
        OptionError: that.
    """
    if args.verbose and args.ray is None:
        raise OptionError("verbose: it shows Ray's messages; expected --ray too; leave it out.")


# ---- Files ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileStamp:
    """What a file is, so that a worker can tell whether it sees the same one.

    Attributes:
        path: absolute.
        n_bytes: its size.
        digest: SHA-256 of pieces of it, hex.
    """

    path: Path
    n_bytes: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """That of a file here."""
        digest = hashlib.sha256()
        with path.open("rb") as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes <= _N_PIECES * _PIECE_BYTES:
                digest.update(file.read())
            else:
                for i in range(_N_PIECES):
                    file.seek(i * (n_bytes - _PIECE_BYTES) // (_N_PIECES - 1))
                    digest.update(file.read(_PIECE_BYTES))
        return cls(path.absolute(), n_bytes, digest.hexdigest())

    def check(self) -> None:
        """Refuses another file.

        Raises:
            PlanError: there is none on this machine, or it isn't the same.
        """
        advice = "put it on a file system that all machines share, or copy it to the same path on each."
        try:
            found = FileStamp.of(self.path)
        except OSError as error:
            raise PlanError(f"{self.path}: {platform.node()}: {error.strerror}; expected the file; {advice}") from None
        if found != self:
            raise PlanError(
                f"{self.path}: {platform.node()} has a file of {found.n_bytes} bytes, digest {found.digest[:12]}...; expected "
                f"{self.n_bytes}, {self.digest[:12]}...; {advice}"
            )


@functools.lru_cache(maxsize=4096)
def _check_once(stamp: FileStamp) -> None:
    stamp.check()


def on_same_files(notes: list[str], stamps: Sequence[FileStamp], function: Callable[..., Any], *values: Any) -> Any:
    """What a worker calls: function(*values), when it sees the same files."""
    for stamp in stamps:
        _check_once(stamp)
    return function(*values)


# ---- Windows of text -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RunnerTask:
    """How a worker makes a runner that is the same as the one here."""

    plan: Any  # reference of its bytes
    plan_name: str  # in notes
    model: Path
    stamps: tuple[FileStamp, ...]
    n_ctx: int
    n_threads: int
    kernels: str
    strict: bool
    mapped: bool


class RayRuns:
    """window_runs.Runs of which each call is a Ray task; a worker keeps its model for the next one."""

    def __init__(
        self,
        cluster: Cluster,
        runner: Runner,
        plan: bytes,
        plan_name: str,
        base: BaseModel,
        *,
        strict: bool,
        mapped: bool,
    ) -> None:
        """
        Args:
            cluster: of tasks that use as many CPUs as the runner has threads.
            runner: the runner here.
            plan: its file.
            plan_name: what notes call it.
            base: its model.
            strict, mapped: as for Runner.
        """
        self._task = _RunnerTask(
            plan=cluster.share(plan),
            plan_name=plan_name,
            model=base.path.absolute(),
            stamps=tuple(FileStamp.of(file.path) for file in base.files),
            n_ctx=runner.n_ctx,
            n_threads=runner.n_threads,
            kernels=runner.plan.kernels,
            strict=strict,
            mapped=mapped,
        )
        self._cluster = cluster

    def share(self, value: Any) -> Any:
        return self._cluster.share(value)

    def each(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        values = [(self._task, function, *rest) for rest in arguments]
        for task in self._cluster.start(_on_runner, values):
            yield self._cluster.result(task)


_kept: tuple[_RunnerTask, Runner] | None = None  # the runner of a worker process, and what it was made from


def _on_runner(notes: list[str], task: _RunnerTask, function: Callable[..., Any], *values: Any) -> Any:
    """What a worker calls: function(runner, *values)."""
    global _kept
    if _kept is None or _kept[0] != task:
        if _kept is not None:
            _kept[1].close()
            _kept = None
        _kept = task, _open_runner(notes, task)
    return function(_kept[1], *values)


def _open_runner(notes: list[str], task: _RunnerTask) -> Runner:
    import ray

    for stamp in task.stamps:
        stamp.check()
    with tempfile.TemporaryDirectory(prefix="powerinfer-profile-") as folder:  # a mapped file needs no name
        plan = Path(folder) / "plan.powerinfer.gguf"
        plan.write_bytes(ray.get(task.plan))
        runner = Runner(
            plan,
            task.model,
            n_ctx=task.n_ctx,
            n_threads=task.n_threads,
            strict=task.strict,
            mapped=task.mapped,
            note=lambda text: notes.append(text.replace(str(plan), task.plan_name)),
        )
    if runner.plan.kernels != task.kernels:
        notes.append(
            f"{platform.node()} computes with the kernels {runner.plan.kernels}, this machine with {task.kernels}: "
            "sums in another order differ in their last digits, and so may a few counts."
        )
    return runner
