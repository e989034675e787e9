"""`Llama`: `llama_cpp.Llama` whose feed-forward blocks a plan computes.

Upstream is changed in one place, once: `llama_cpp._internals.LlamaModel`, which asks a ContextVar for a plan to load.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import ctypes
import difflib
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import llama_cpp
import llama_cpp._internals as internals
import llama_cpp.llama
from llama_cpp._utils import suppress_stdout_stderr

from powerinfer_py import _core
from powerinfer_py.errors import ClosedError, FormatError, OptionError, PlanError, PowerInferError
from powerinfer_py.format import SIDECAR_SUFFIX, BaseModel

SPARSITY_MODES = ("auto", "dense", "exact", "threshold", "predicted")

# Options that older llama_cpp.Llama had; it ignores them today.
OBSOLETE_OPTIONS = ("f16_kv", "low_vram", "mul_mat_q", "n_gqa", "n_parts", "rms_norm_eps")

_logger = logging.getLogger("powerinfer_py")
stock_llama = llama_cpp.Llama


@dataclass(frozen=True)
class GpuOptions:
    """What may go to the GPU."""

    # GiB, or "8GiB", "75%"; one for all devices, or one each
    vram_budget: str | float | Sequence[str | float] | None = None
    device: str | Sequence[str] | None = None  # names, or "none"; None: as llama.cpp chooses
    reset_gpu_index: bool = False  # neurons are placed anew, whatever placement the plan has saved
    disable_gpu_index: bool = False  # no single neurons on the GPU, only whole dense blocks
    require_split: bool = False  # it is an error when no neuron is on the GPU


@dataclass(frozen=True)
class _Load:
    """What `_PlanModel` takes over from the model that makes it."""

    plan: _core.Plan | None
    decide: Callable[[llama_cpp.llama_model_params], _core.Budget | None]  # changes the parameters to what it decided


_to_load: contextvars.ContextVar[_Load | None] = contextvars.ContextVar("to_load", default=None)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device, or of the CPU, by what holds them."""

    name: str
    budget_bytes: int  # 0 for the CPU
    weights_bytes: int  # outside of the plan's FFNs
    kv_bytes: int  # KV cache, recurrent state
    compute_bytes: int  # buffers of the graphs
    scratch_bytes: int  # of the FFNs' hot part
    predictor_bytes: int
    ffn_bytes: int  # neurons

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self)[2:])


@dataclass(frozen=True)
class Memory:
    """What is where, as it was decided before the load."""

    devices: tuple[DeviceMemory, ...] = ()  # empty unless there was a budget and a device
    cpu: DeviceMemory | None = None
    n_gpu_layers: int = 0  # as llama.cpp counts: the output is one too
    n_hot: tuple[
        int, ...
    ] = ()  # neurons of each layer on a device; empty without a split, 0 where only prompts go there
    i_device: tuple[int, ...] = ()  # index into devices
    share_neurons: float = 0.0  # of the plan's neurons, on a device
    share_activations: float = 0.0  # of the expected activations, on a device
    split: str = ""  # "FFN split: ...", one line
    table: str = ""  # the bytes in MiB

    def __str__(self) -> str:
        return f"{self.table}{self.split}".rstrip()


@dataclass(frozen=True)
class Stats:
    """What the feed-forward blocks did since the start or the last `reset_stats`.

    Figures that need computed tokens are None before there are any, and for a model without a plan.
    """

    computed_by: str  # "powerinfer", or "upstream" for a model without a plan
    n_tokens: int = 0  # token x layer evaluations of covered layers
    density: float | None = None  # down rows used / n_ff
    candidate_density: float | None = None  # gate rows read / n_ff
    bytes_share: float | None = None  # read_bytes / dense_bytes
    overlap: float | None = None  # mean Jaccard overlap of the active sets of consecutive single tokens
    read_bytes: int = 0  # FFN bytes read, predictors included
    dense_bytes: int = 0  # FFN bytes that a dense pass would have read
    predictor_us: int = 0
    gate_us: int = 0
    up_down_us: int = 0
    total_us: int = 0
    cpu_us: int = 0  # the CPU's part of blocks
    gpu_us: int = 0  # the devices' part
    wait_us: int = 0  # the CPU waited for a device
    copy_us: int = 0  # the host spent in copies between itself and devices
    copied_bytes: int = 0
    gpu_read_bytes: int = 0  # FFN bytes read by devices
    gpu_share: float | None = None  # gate rows that devices read / gate rows read; None without a split
    gpu_active_share: float | None = None  # of the active neurons, on devices; counted while there is a trace
    n_blocks_whole: int = 0  # FFN blocks computed whole
    n_blocks_by_op: int = 0  # FFN blocks computed op by op (LoRA, eval callbacks)
    n_slow_rows: int = 0  # rows of a type without a kernel of its own
    row_types: tuple[str, ...] = ()  # types of the weight rows as they are stored
    modes: tuple[tuple[str, int], ...] = ()  # (mode, layers that run it); "upstream": not covered
    kernels: str | None = None  # kernel set in use
    memory_bytes: int = 0  # anonymous memory of the plan's buffers

    def __str__(self) -> str:
        if self.computed_by == "upstream":
            return "upstream computes this model: it has no plan"
        lines = [
            f"layers {', '.join(f'{mode} x {n}' for mode, n in self.modes)}; rows {', '.join(self.row_types)}; "
            f"kernels {self.kernels}; {self.memory_bytes / 2**20:.0f} MiB"
        ]
        if self.n_tokens:
            overlap = "-" if self.overlap is None else f"{self.overlap:.2f}"
            lines += [
                f"density {self.density:.3f}, candidate_density {self.candidate_density:.3f}, "
                f"bytes_share {self.bytes_share:.3f}, overlap {overlap}",
                f"read {self.read_bytes / 1e9:.2f} of {self.dense_bytes / 1e9:.2f} GB in {self.total_us / 1e6:.2f} s: "
                f"predictor {self.predictor_us / 1e6:.2f}, gate {self.gate_us / 1e6:.2f}, "
                f"up and down {self.up_down_us / 1e6:.2f}",
                f"blocks whole {self.n_blocks_whole}, op by op {self.n_blocks_by_op}; slow rows {self.n_slow_rows}",
            ]
            if self.gpu_share is not None:
                active = "" if self.gpu_active_share is None else f", {self.gpu_active_share:.0%} of the active ones"
                lines.append(
                    f"devices computed {self.gpu_share:.0%} of the neurons{active} in {self.gpu_us / 1e6:.2f} s, "
                    f"CPU {self.cpu_us / 1e6:.2f}, waiting {self.wait_us / 1e6:.2f}, "
                    f"copies {self.copy_us / 1e6:.2f} ({self.copied_bytes / 1e6:.2f} MB)"
                )
        return "\n".join(lines)


@dataclass(frozen=True)
class Layer:
    """One layer of the model, and what its feed-forward block did since the start or the last `reset_stats`."""

    n_ff: int  # neurons; 0: the plan doesn't cover it
    sparsity: str  # what it runs: dense, exact, threshold or predicted; "upstream": not covered
    n_hot: int  # neurons on a device
    device: str  # its name; "" when n_hot is 0
    n_tokens: int  # computed
    n_candidates: int  # gate rows read
    n_active: int  # down rows used

    @property
    def density(self) -> float | None:
        """Down rows used / n_ff; None before there are any."""
        return _share(self.n_active, self.n_tokens * self.n_ff)

    @property
    def candidate_density(self) -> float | None:
        """Gate rows read / n_ff; None before there are any."""
        return _share(self.n_candidates, self.n_tokens * self.n_ff)


class _PlanModel(internals.LlamaModel):
    """Upstream's model wrapper; loads as `_to_load` says when it says something, and then owns the plan."""

    def __init__(self, *, path_model: str, params: llama_cpp.llama_model_params, verbose: bool = True) -> None:
        load = _to_load.get()
        _to_load.set(None)
        self.plan = load.plan if load is not None else None
        # What upstream's __del__ looks at.
        self._exit_stack = contextlib.ExitStack()
        self.sampler = None
        self.custom_samplers: list[Any] = []
        self.budget = load.decide(params) if load is not None else None  # params points into it
        if self.plan is None:
            super().__init__(path_model=path_model, params=params, verbose=verbose)
            return
        self.path_model = path_model
        self.params = params
        self.verbose = verbose
        self.model: int | None = None
        # Freed in the reverse order: contexts (they register themselves here), the model, the plan.
        self._exit_stack.callback(self.plan.close)
        with _load_progress(path_model, verbose) as progress, suppress_stdout_stderr(disable=verbose):
            self.model = self.plan.load_model(ctypes.addressof(params), progress)
        self._exit_stack.callback(self._free_model)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)

    def _free_model(self) -> None:
        if self.model is not None:
            llama_cpp.llama_model_free(self.model)
            self.model = None


internals.LlamaModel = _PlanModel


@contextlib.contextmanager
def _load_progress(path: str, verbose: bool) -> Iterator[Callable[[float], None] | None]:
    """Show how far a load is: on a terminal in one line that goes away, elsewhere only when verbose, every 10 %.

    Args:
        path: of the model.
        verbose: as for Llama.

    Yields:
        What the load calls with its share done, 0 .. 1; None where nothing is shown.
    """
    stream = sys.stderr
    text = f"loading {os.path.basename(path)}:"
    last = -1

    def show_step(share: float) -> None:
        nonlocal last
        if int(share * 10) > last:
            last = int(share * 10)
            print(f"{text} {last * 10} %", file=stream, flush=True)

    if stream is not None and stream.isatty():
        # a copy: upstream switches the first one off unless verbose
        with os.fdopen(os.dup(stream.fileno()), "w") as terminal:
            # in one line also where that is short
            text = text[: (os.get_terminal_size(terminal.fileno()).columns or 80) - len(" 100 %") - 1]
            try:
                yield lambda share: print(f"\r{text} {share * 100:3.0f} %", end="", file=terminal, flush=True)
            finally:
                print("\r\x1b[K", end="", file=terminal, flush=True)
    else:
        yield show_step if verbose else None


class _Notes:
    """Hands the core's notes to logging; holds them back while upstream has stderr switched off."""

    def __init__(self) -> None:
        self._held: list[str] | None = []

    def __call__(self, text: str) -> None:
        if self._held is None:
            _logger.warning("%s", text)
        else:
            self._held.append(text)

    def release(self) -> None:
        held, self._held = self._held or [], None
        for text in held:
            _logger.warning("%s", text)


class _Turns:
    """One generation at a time on one context: those of other threads wait, those of its own thread end it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: object | None = None
        self._thread: threading.Thread | None = None

    def take(self) -> object:
        """Wait for the turn. A stream that this thread, or one that has ended, left unfinished loses it.

        Returns:
            The turn, for `check` and `give`.
        """
        turn = object()
        with self._changed:
            me = threading.current_thread()
            while self._holder is not None and self._thread is not me and self._thread.is_alive():
                self._changed.wait(1.0)  # the end of a thread notifies nobody
            self._holder = turn
            self._thread = me
        return turn

    def check(self, turn: object) -> None:
        """Note which thread goes on with the turn.

        Raises:
            PowerInferError: another generation took it.
        """
        with self._changed:
            if self._holder is not turn:
                raise PowerInferError(
                    "generation: another one was started on the same model in between; expected one at a time; "
                    "finish or close a stream before the next, or load the model twice."
                )
            self._thread = threading.current_thread()

    def give(self, turn: object) -> None:
        """End the turn; nothing happens when it was lost."""
        with self._changed:
            if self._holder is turn:
                self._holder = self._thread = None
                self._changed.notify_all()


class _Closed:
    """Stands where the parts of a closed model were."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError(_CLOSED_TEXT)


_CLOSED_TEXT = "model: it was closed; expected an open one; create it again."
_CLOSED = _Closed()


class Llama(stock_llama):
    """A model with sparse feed-forward blocks; otherwise `llama_cpp.Llama`.

    Args:
        model_path: a plain GGUF (its sidecar `X.powerinfer.gguf` is found beside it), or an extended GGUF.
        sparsity: auto, dense, exact, threshold or predicted.
        plan: the extended GGUF to use, when it isn't beside the model.
        strict: a fallback is an error instead of a note.
        mapped: FFN rows stay in the mapped file instead of a copy; for models near the size of memory.
        n_parallel: sequences that the context holds, each of n_ctx / n_parallel tokens; this class uses the first one,
            `powerinfer_py.serving` all of them.
        vram_budget: GPU memory that may be used for everything: GiB, or "8GiB", "512MiB", "75%"; for several devices one
            for all or one each. Without n_gpu_layers it decides that too. None: no neurons go to the GPU.
        device: names of GPU devices, or "none"; None: as llama.cpp chooses.
        reset_gpu_index: place neurons anew, whatever placement the plan has saved.
        disable_gpu_index: no single neurons on the GPU, only whole dense blocks.
        require_split: it is an error when no neuron is on the GPU.
        **options: the options of `llama_cpp.Llama`; n_threads and n_threads_batch default to the physical cores
            that the process may use.

    Raises:
        OptionError: an option doesn't exist.
        FormatError: the model file doesn't exist or isn't a GGUF.
        PlanError: the plan isn't usable for this model.
        BudgetError: the model doesn't fit the budget, or no neuron went to the GPU where that is required.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        sparsity: str = "auto",
        plan: str | os.PathLike[str] | None = None,
        strict: bool = False,
        mapped: bool = False,
        n_parallel: int = 1,
        vram_budget: str | float | Sequence[str | float] | None = None,
        device: str | Sequence[str] | None = None,
        reset_gpu_index: bool = False,
        disable_gpu_index: bool = False,
        require_split: bool = False,
        **options: Any,
    ) -> None:
        _check_options(options)
        if sparsity not in SPARSITY_MODES:
            near = _nearest(sparsity, SPARSITY_MODES)
            raise OptionError(f"sparsity: {sparsity!r}; expected one of {', '.join(SPARSITY_MODES)}; {near}")
        model_path = os.fspath(model_path)
        self._plan_options = {
            "sparsity": sparsity,
            "plan": None if plan is None else os.fspath(plan),
            "strict": strict,
            "mapped": mapped,
        }
        self._gpu_options = GpuOptions(vram_budget, device, reset_gpu_index, disable_gpu_index, require_split)
        if not 1 <= n_parallel <= llama_cpp.llama_max_parallel_sequences():
            raise OptionError(
                f"n_parallel: {n_parallel}; expected 1 .. {llama_cpp.llama_max_parallel_sequences()}; pass such a number."
            )
        self._n_parallel = n_parallel
        self._turns = _Turns()
        n_cores = _core.physical_cores()
        for name in ("n_threads", "n_threads_batch"):
            if (options.get(name) or 0) <= 0:
                options[name] = n_cores
        notes = _Notes()
        self._plan = _open_plan(
            model_path,
            notes,
            mlock=bool(options.get("use_mlock")),
            vocab_only=bool(options.get("vocab_only")),
            **self._plan_options,
        )
        self._tiles = _core.UpstreamTiles(max(options["n_threads"], options["n_threads_batch"]))
        token = _to_load.set(_Load(self._plan, lambda params: self._decide_budget(params, notes, options)))
        try:
            super().__init__(model_path, **options)
        except BaseException:
            self._free()
            raise
        finally:
            _to_load.reset(token)
            notes.release()
        # Another thread may be the one that decodes.
        _core.end_openmp_team()
        if n_parallel > 1:
            self._n_ctx = llama_cpp.llama_n_ctx_seq(self.ctx)

    def _decide_budget(
        self, params: llama_cpp.llama_model_params, notes: _Notes, options: dict[str, Any]
    ) -> _core.Budget | None:
        if params.vocab_only:
            return None
        if self._n_parallel > 1:
            # The context is made after this, from these parameters.
            self.context_params.n_seq_max = self._n_parallel
        strict = self._plan_options["strict"]
        budget = decide_budget(self, self._plan, params, options, self._gpu_options, strict)
        for text in (*budget.notes, budget.split_text):
            if text:
                notes(text)
        return budget

    @property
    def sparsity(self) -> str:
        """The mode asked for; setting it changes it between two decodes.

        Raises:
            PlanError: the plan can't run the mode, or the model has no plan.
            OptionError: there is no such mode.
        """
        return self._plan_options["sparsity"]

    @sparsity.setter
    def sparsity(self, mode: str) -> None:
        self._check_open()
        if self._plan is not None:
            self._plan.set_sparsity(mode)
        elif mode not in ("auto", "dense"):
            how = _how_to_plan(self.model_path)
            raise PlanError(f"{self.model_path}: sparsity {mode!r} was asked for without a plan; expected one; {how}")
        self._plan_options["sparsity"] = mode

    def stats(self) -> Stats:
        """What the feed-forward blocks did since the start or the last `reset_stats`.

        Returns:
            The figures.

        Raises:
            ClosedError: the model was closed.
        """
        self._check_open()
        if self._plan is None:
            return Stats(computed_by="upstream")
        sums = self._plan.stats()
        layers = self._plan.layers()
        modes = collections.Counter(layer["sparsity"] if layer["n_ff"] else "upstream" for layer in layers)
        row_types = {layer[name] for layer in layers for name in ("gate_type", "up_type", "down_type")} - {""}
        return Stats(
            computed_by="powerinfer",
            density=_share(sums["n_active"], sums["n_neurons"]),
            candidate_density=_share(sums["n_candidates"], sums["n_neurons"]),
            bytes_share=_share(sums["read_bytes"], sums["dense_bytes"]),
            overlap=_share(sums["overlap_sum"], sums["n_overlaps"]),
            gpu_share=_share(sums["n_gpu_neurons"], sums["n_candidates"]) if sums["n_gpu_neurons"] else None,
            gpu_active_share=_share(sums["n_gpu_active"], sums["n_gpu_active"] + sums["n_cpu_active"])
            if sums["n_gpu_active"]
            else None,
            row_types=tuple(sorted(row_types)),
            modes=tuple(sorted(modes.items())),
            kernels=self._plan.kernels,
            memory_bytes=self._plan.memory_bytes,
            **{
                name: sums[name]
                for name in (
                    "n_tokens", "read_bytes", "dense_bytes", "predictor_us", "gate_us", "up_down_us", "total_us",
                    "n_blocks_whole", "n_blocks_by_op", "n_slow_rows",
                    "cpu_us", "gpu_us", "wait_us", "copy_us", "copied_bytes", "gpu_read_bytes",
                )
            },
        )  # fmt: skip

    def layers(self) -> list[Layer]:
        """Each layer that the plan knows, and what it did.

        Returns:
            (n_layer) in order; empty for a model without a plan.

        Raises:
            ClosedError: the model was closed.
        """
        self._check_open()
        names = [field.name for field in fields(Layer)]
        layers = self._plan.layers() if self._plan is not None else []
        return [
            Layer(**{name: layer[name] for name in names} | ({} if layer["n_ff"] else {"sparsity": "upstream"}))
            for layer in layers
        ]

    def memory(self) -> Memory:
        """What was decided to be where before the load.

        Returns:
            The bytes by kind, and the split of the neurons.

        Raises:
            ClosedError: the model was closed.
        """
        self._check_open()
        budget = self._model.budget
        if budget is None:
            return Memory()
        return Memory(
            devices=tuple(DeviceMemory(**use) for use in budget.gpus),
            cpu=DeviceMemory(**budget.cpu) if budget.is_measured else None,
            n_gpu_layers=budget.n_gpu_layers,
            n_hot=tuple(budget.n_hot),
            i_device=tuple(budget.i_device),
            share_neurons=budget.share_neurons,
            share_activations=budget.share_activations,
            split=budget.split_text,
            table=budget.table() if budget.is_measured else "",
        )

    def reset_stats(self) -> None:
        """Start the figures of `stats` at 0 again.

        Raises:
            ClosedError: the model was closed.
        """
        self._check_open()
        if self._plan is not None:
            self._plan.reset_stats()

    def trace(self, callback: Callable[[dict[str, Any]], None] | None) -> None:
        """Learn when the parts of each FFN block ran; devices count active neurons meanwhile.

        Args:
            callback: called after every block, on the thread that computes, with i_layer, n_tokens, begin_s, end_s,
                cpu_begin_s, cpu_end_s, gpu_begin_s, gpu_end_s (seconds of one clock; begin == end == 0 for a part
                that there wasn't); None: no longer.

        Raises:
            PlanError: the model has no plan.
            ClosedError: the model was closed.
        """
        self._check_open()
        if self._plan is None:
            raise PlanError(f"{self.model_path}: a trace needs a plan; expected one; {_how_to_plan(self.model_path)}")
        self._plan.set_trace(callback)

    def close(self) -> None:
        """Free context, model and plan, in this order. Twice is fine; any later use raises ClosedError."""
        turn = self._turns.take()
        self._free()
        self._turns.give(turn)

    def __del__(self) -> None:
        self._free()

    def _free(self) -> None:
        # Also after an __init__ that failed at any point.
        if hasattr(self, "_stack"):
            self._stack.close()
        if getattr(self, "_plan", None) is not None:
            self._plan.close()
        self._model = self._ctx = self._batch = self.tokenizer_ = _CLOSED

    def __enter__(self) -> Llama:
        self._check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def eval(self, tokens: Sequence[int]) -> None:
        with self._tiles:
            super().eval(tokens)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        turn = self._turns.take()
        try:
            with self._tiles:
                return super().embed(*args, **kwargs)
        finally:
            self._turns.give(turn)

    def _create_completion(
        self, prompt: str | list[int], suffix: str | None = None, *args: Any, **kwargs: Any
    ) -> Iterator[Any]:
        """Upstream's one implementation of completions, streamed or not; one at a time."""
        if len(prompt) == 0 and suffix is None:
            prompt = self._empty_prompt()
        turn = self._turns.take()
        try:
            chunks = super()._create_completion(prompt, suffix, *args, **kwargs)
            while True:
                self._turns.check(turn)
                try:
                    chunk = next(chunks)
                except StopIteration:
                    return
                self._turns.check(turn)
                yield chunk
        finally:
            self._turns.give(turn)

    def _empty_prompt(self) -> str | list[int]:
        """What an empty prompt starts from: upstream puts BOS there only if the model's own prompts begin with it."""
        if self._model.add_bos_token():
            return ""
        if self.token_bos() == -1:
            raise OptionError("prompt: it is empty, and the model has no BOS token; expected text; pass some.")
        return [self.token_bos()]

    def _check_open(self) -> None:
        if self._model is _CLOSED:
            raise ClosedError(_CLOSED_TEXT)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "n_parallel": self._n_parallel,
            **self._plan_options,
            **asdict(self._gpu_options),
        }


def install() -> None:
    """Make `llama_cpp.Llama` this package's Llama, for frameworks that import it themselves. Twice is fine."""
    llama_cpp.Llama = llama_cpp.llama.Llama = Llama


def uninstall() -> None:
    """Undo `install`."""
    llama_cpp.Llama = llama_cpp.llama.Llama = stock_llama


def decide_budget(
    model: stock_llama,
    plan: _core.Plan | None,
    params: llama_cpp.llama_model_params,
    options: dict[str, Any],
    gpu: GpuOptions,
    strict: bool,
) -> _core.Budget:
    """Decide what goes to the GPU, and set the parameters of the load to it.

    Args:
        model: the model that is being made, as far as upstream's `__init__` is when it loads.
        plan: its plan; None: upstream computes all of it.
        params: of the load, changed.
        options: that upstream's `__init__` was called with.
        gpu: what may go to the GPU.
        strict: a fallback is an error.

    Returns:
        The decision; params points into it.

    Raises:
        OptionError: a budget that can't be read, or no such device.
        BudgetError: the model doesn't fit, or no neuron went to the GPU where that is required.
    """
    context = llama_cpp.llama_context_params.from_buffer_copy(model.context_params)
    # What upstream changes after the load.
    if context.n_ctx == 0:
        context.n_batch = options.get("n_batch", context.n_batch)
        context.n_ubatch = min(context.n_batch, options.get("n_ubatch", 512))
    if options.get("embedding"):
        context.n_seq_max = min(context.n_batch, llama_cpp.llama_max_parallel_sequences())
        context.kv_unified = True
    budget = _core.plan_budget(
        plan,
        model.model_path,
        ctypes.addressof(params),
        ctypes.addressof(context),
        budget=_list_text(gpu.vram_budget),
        device=_list_text(gpu.device),
        has_n_gpu_layers="n_gpu_layers" in options,
        reset_index=gpu.reset_gpu_index,
        disable_index=gpu.disable_gpu_index,
        require_split=gpu.require_split,
        strict=strict,
    )
    budget.apply(plan, ctypes.addressof(params))
    return budget


def limit_context(base: BaseModel, n_ctx: int) -> int:
    """A context that the model was trained for; what is more than that is said.

    Args:
        base: the model.
        n_ctx: tokens wished.

    Returns:
        n_ctx, or less.
    """
    n_ctx_train = base.n_ctx_train or n_ctx
    if n_ctx > n_ctx_train:
        _logger.warning("%s: trained with a context of %d; that is used instead of %d.", base.path, n_ctx_train, n_ctx)
    return min(n_ctx, n_ctx_train)


def load_stock(model_path: str, gpu: GpuOptions, **options: Any) -> stock_llama:
    """Upstream's model, with as many whole layers on the GPU as the budget holds.

    Args:
        model_path: a plain GGUF.
        gpu: what may go to the GPU.
        **options: of `llama_cpp.Llama`.

    Raises:
        OptionError, BudgetError: as decide_budget.
    """
    model = stock_llama.__new__(stock_llama)
    token = _to_load.set(_Load(None, lambda params: decide_budget(model, None, params, options, gpu, False)))
    try:
        model.__init__(model_path, **options)
    finally:
        _to_load.reset(token)
    return model


def _list_text(value: str | float | Sequence[str | float] | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, (str, int, float)) else ",".join(str(item) for item in value)


def _open_plan(
    model_path: str,
    notes: _Notes,
    *,
    sparsity: str,
    plan: str | None,
    strict: bool,
    mapped: bool,
    mlock: bool,
    vocab_only: bool,
) -> _core.Plan | None:
    """Open the plan that belongs to a model path; None when upstream computes the model."""
    for path in (model_path, plan):
        if path is not None and not os.path.exists(path):
            raise FormatError(f"{path}: no such file; expected a GGUF; check the path.")
    kind, sidecar = _core.inspect_path(model_path)
    options = {"sparsity": sparsity, "strict": strict, "mapped": mapped, "mlock": mlock, "note": notes}
    if kind == "extended":
        if plan is not None and not os.path.samefile(plan, model_path):
            raise OptionError(
                f"plan: {plan} was given, but {model_path} is an extended GGUF itself; expected one of them; "
                "leave plan out, or pass the base model as model_path."
            )
        return _core.Plan.open(model_path, **options)
    if vocab_only:
        return None
    if plan or sidecar:
        return _core.Plan.open(plan or sidecar, model_path, **options)
    if sparsity != "dense":
        text = f"{model_path}: it has no plan, so upstream computes it densely; {_how_to_plan(model_path)}"
        if strict:
            raise PlanError(text)
        notes(text)
    return None


def _how_to_plan(model_path: str) -> str:
    stem = model_path[: -len(".gguf")] if model_path.endswith(".gguf") else model_path
    return f"make one with: powerinfer profile {model_path} --text FILE -o {stem}{SIDECAR_SUFFIX}"


def _check_options(options: dict[str, Any]) -> None:
    """Refuse unknown options, drop obsolete ones with a note."""
    for name in list(options):
        if name in OBSOLETE_OPTIONS:
            del options[name]
            _logger.warning("option %s: obsolete, llama_cpp ignores it; leave it out.", name)
        elif name not in _SIGNATURE.parameters:
            raise OptionError(f"option {name}: Llama has none of this name; {_nearest(name, _SIGNATURE.parameters)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else "see help(powerinfer_py.Llama)."


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _signature() -> inspect.Signature:
    """Signature of Llama with upstream's options spelled out."""
    own = inspect.signature(Llama.__init__).parameters
    stock = inspect.signature(stock_llama.__init__).parameters
    return inspect.Signature(
        [p for p in own.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        + [p for name, p in stock.items() if name not in own and p.kind is inspect.Parameter.KEYWORD_ONLY]
    )


_SIGNATURE = _signature()
Llama.__init__.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
