"""Continuous batching: many requests share one llama.cpp context, each in a sequence of its own.

One thread decodes; requests enter and leave between two decodes. All llama.cpp calls on the context are in that thread.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import logging
import operator
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import llama_cpp
import numpy as np

from powerinfer_py.errors import CancelledError, ClosedError, OptionError, PowerInferError, RequestTimeoutError
from powerinfer_py.format import open_files
from powerinfer_py.llama import Llama, limit_context
from powerinfer_py.serving import sampler
from powerinfer_py.serving.fair_queue import FairQueue
from powerinfer_py.serving.requests import Piece, Request, TokenLogprob
from powerinfer_py.serving.text_assembly import TextAssembly

# Cells of a sequence come in multiples of this (llama.cpp pads to it).
CONTEXT_STEP = 256
# A common prefix of fewer tokens is computed again rather than copied from another sequence.
MIN_COPIED_PREFIX = 32
# The cached sequence with the longest common prefix is taken only when that is this share of the prompt; otherwise the
# one that was used longest ago, so that a chance match of a few tokens costs nobody a conversation.
MIN_PREFIX_SHARE = 0.25
# Decodes with gaps between the sequences in use before they are moved together: llama.cpp computes each run of
# neighbouring sequences apart, and every run reads all weights.
STEPS_BEFORE_COMPACTION = 4
RATE_WINDOW_S = 2.0
LAYER_WINDOW_S = 1.0

_UINT8_POINTER = ctypes.POINTER(ctypes.c_uint8)
_logger = logging.getLogger("powerinfer_py")


@dataclass(frozen=True)
class EngineOptions:
    """Limits of an engine."""

    queue_limit: int = 128  # requests that may wait
    timeout_s: float = 600.0  # of a request, from submission to its last token
    prompt_chunk: int = 256  # prompt tokens per decode while other requests generate


@dataclass(frozen=True)
class LayerSnapshot:
    """What one layer did lately."""

    n_ff: int  # 0: not covered by the plan
    sparsity: str
    n_hot: int
    density: float | None  # None: nothing ran
    candidate_density: float | None


@dataclass(frozen=True)
class SlotSnapshot:
    """One sequence of the context."""

    state: str  # idle, prompt, generating or embedding
    n_tokens: int  # in the cache
    n_cached: int  # of the prompt's tokens, those that were in the cache already


@dataclass(frozen=True)
class Snapshot:
    """What an engine does now and did since its start."""

    model: str
    sparsity: str
    computed_by: str
    kernels: str | None
    n_parallel: int
    n_ctx: int  # of one sequence
    n_running: int
    n_waiting: int
    n_requests: dict[str, int]  # finished, by finish_reason
    n_rejected: int
    n_prompt_tokens: int  # computed
    n_cached_tokens: int  # of prompts, taken from the cache
    n_generated_tokens: int
    tokens_per_s: float  # generated, lately
    prompt_tokens_per_s: float
    density: float | None
    candidate_density: float | None
    bytes_share: float | None
    read_bytes: int
    dense_bytes: int
    gpu_share: float | None
    uptime_s: float
    layers: list[LayerSnapshot]
    slots: list[SlotSnapshot]


class Generation:
    """One running request: an iterator of its pieces, which waits for the next one in the caller's thread.

    The last piece has a finish_reason. Counts are those so far.

    Raises:
        PowerInferError: the engine failed.
    """

    def __init__(self, request: Request, deadline: float, wake: Callable[[], None]) -> None:
        self.request = request
        self.deadline = deadline  # time.monotonic()
        self.n_prompt = len(request.prompt)
        self.n_cached = 0
        self.n_generated = 0
        self.is_cancelled = False
        self._wake = wake
        self._pieces: queue.SimpleQueue[Piece | PowerInferError] = queue.SimpleQueue()
        self._is_done = False

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self._is_done:
            raise StopIteration
        piece = self._pieces.get()
        if isinstance(piece, PowerInferError):
            self._is_done = True
            raise piece
        self._is_done = piece.finish_reason is not None
        return piece

    def cancel(self) -> None:
        """End it, from any thread: its last piece says "cancelled" unless it has ended before."""
        self.is_cancelled = True
        self._wake()

    def put(self, piece: Piece | PowerInferError) -> None:
        """For the engine."""
        self._pieces.put(piece)


class Embedding:
    """A prompt whose embedding is wanted."""

    def __init__(self, prompt: tuple[int, ...], deadline: float, wake: Callable[[], None]) -> None:
        self.prompt = prompt
        self.deadline = deadline  # time.monotonic()
        self.n_cached = 0
        self.is_cancelled = False
        self.sum: np.ndarray | None = None  # (n_embd) float64, of the tokens so far
        self._wake = wake
        self._row: queue.SimpleQueue[np.ndarray | PowerInferError] = queue.SimpleQueue()

    def wait(self) -> np.ndarray:
        """The row, once: (n_embd) float32 of length 1.

        Raises:
            RequestTimeoutError, CancelledError: it ended before.
            PowerInferError: the engine failed.
        """
        row = self._row.get()
        if isinstance(row, PowerInferError):
            raise row
        return row

    def cancel(self) -> None:
        """End it, from any thread."""
        self.is_cancelled = True
        self._wake()

    def put(self, row: np.ndarray | PowerInferError) -> None:
        """For the engine."""
        self._row.put(row)


@dataclass
class _Slot:
    """One sequence of the context, and who uses it."""

    i_seq: int
    tokens: list[int] = field(default_factory=list)  # whose keys and values are in the cache
    job: Generation | Embedding | None = None
    last_used: int = 0  # number of the step
    # Of a generation:
    sampler: sampler.Sampler | None = None
    text: TextAssembly | None = None
    next_token: int | None = None  # chosen, not decoded yet; None while the prompt is being computed
    i_output: int = -1  # in the current batch
    waits_for: _Slot | None = None  # that computes a prefix of this prompt now

    @property
    def state(self) -> str:
        if self.job is None:
            return "idle"
        if isinstance(self.job, Embedding):
            return "embedding"
        return "prompt" if self.next_token is None else "generating"


class _Batch:
    """llama.cpp's batch over arrays of ours."""

    def __init__(self, n_max: int) -> None:
        self.token = np.zeros(n_max, np.int32)
        self.pos = np.zeros(n_max, np.int32)
        self.seq_id = np.zeros(n_max, np.int32)
        self.has_output = np.zeros(n_max, np.int8)
        self._n_seq_id = np.ones(n_max, np.int32)
        self._seq_ids = self.seq_id.ctypes.data + 4 * np.arange(n_max, dtype=np.uintp)
        self.n_tokens = 0
        self.raw = llama_cpp.llama_batch(
            token=self.token.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token)),
            pos=self.pos.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_pos)),
            n_seq_id=self._n_seq_id.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._seq_ids.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(llama_cpp.llama_seq_id))),
            logits=self.has_output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def add(self, tokens: Sequence[int], first_pos: int, i_seq: int, all_outputs: bool = False) -> int:
        """Append tokens of a sequence.

        Returns:
            The index of the last one.
        """
        begin, end = self.n_tokens, self.n_tokens + len(tokens)
        self.token[begin:end] = tokens
        self.pos[begin:end] = np.arange(first_pos, first_pos + len(tokens))
        self.seq_id[begin:end] = i_seq
        self.has_output[begin:end] = all_outputs
        self.n_tokens = self.raw.n_tokens = end
        return end - 1

    def clear(self) -> None:
        self.n_tokens = self.raw.n_tokens = 0


def load_model(path: str | os.PathLike[str], n_parallel: int, n_ctx: int, **options: Any) -> Llama:
    """Load a model for an engine.

    Args:
        path: as for Llama.
        n_parallel: sequences, at least 1.
        n_ctx: tokens of one sequence; 0: as many as the model was trained with, which is the most too.
        **options: of Llama.

    Raises:
        OptionError, FormatError, PlanError, BudgetError: as Llama.
    """
    base, _ = open_files(path, options.get("plan"))
    n_ctx = limit_context(base, n_ctx or base.n_ctx_train or CONTEXT_STEP)
    n_ctx = -(-n_ctx // CONTEXT_STEP) * CONTEXT_STEP
    if base.files[0].get(f"{base.architecture}.pooling_type") is not None:
        # Per token, so that prompts can be computed in parts; the engine pools.
        options["pooling_type"] = llama_cpp.LLAMA_POOLING_TYPE_NONE
    return Llama(path, n_parallel=n_parallel, n_ctx=n_parallel * n_ctx, **options)


class Engine:
    """Runs requests on one model, several at a time.

    Args:
        llama: from `load_model`; the engine uses it alone until it is closed, and doesn't close it.
        options: limits.

    Raises:
        OptionError: the model can't generate text.
    """

    def __init__(self, llama: Llama, options: EngineOptions = EngineOptions()) -> None:
        model = llama.model
        if llama_cpp.llama_model_has_encoder(model) or not llama_cpp.llama_model_has_decoder(model):
            raise OptionError(f"{llama.model_path}: it has an encoder; expected a model that only decodes; use one.")
        self.llama = llama
        self.options = options
        self.n_ctx: int = llama_cpp.llama_n_ctx_seq(llama.ctx)
        self.n_parallel: int = llama_cpp.llama_n_seq_max(llama.ctx)
        self._context = llama.ctx
        self._memory = llama_cpp.llama_get_memory(llama.ctx)
        self._vocab = llama._model.vocab
        self._n_vocab = llama.n_vocab()
        self._pooling = llama.metadata.get(f"{llama.metadata.get('general.architecture')}.pooling_type")
        self._batch = _Batch(llama.n_batch)
        self._slots = [_Slot(i) for i in range(self.n_parallel)]
        self._texts: dict[int, bytes] = {}  # of tokens
        self._i_step = 0
        self._n_gap_steps = 0  # decodes in a row with gaps between the sequences in use

        self._changed = threading.Condition()  # guards what follows
        self._queue: FairQueue[Generation | Embedding] = FairQueue(options.queue_limit)
        self._commands: list[tuple[Callable[[], None], queue.SimpleQueue[BaseException | None]]] = []
        self._is_closed = False
        self._failure: str | None = None
        self._n_requests: collections.Counter[str] = collections.Counter()
        self._n_rejected = self._n_prompt_tokens = self._n_cached_tokens = self._n_generated_tokens = 0
        self._n_running = 0
        self._slot_states = [SlotSnapshot("idle", 0, 0)] * self.n_parallel
        self._rates: collections.deque[tuple[float, int, int]] = collections.deque()  # (time, prompt, generated)
        self._start = time.monotonic()

        self._stats = llama.stats()
        self._layers = llama.layers()
        self._layer_time = time.monotonic()
        self._layer_states = [
            LayerSnapshot(layer.n_ff, layer.sparsity, layer.n_hot, None, None) for layer in self._layers
        ]

        self._turn = llama._turns.take()
        self._thread = threading.Thread(target=self._run, name="powerinfer-engine", daemon=True)
        self._thread.start()

    # -- for any thread --------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Generation:
        """Queue a request.

        Args:
            request: what is wanted.

        Returns:
            Its answer, to iterate over.

        Raises:
            QueueFullError: too many wait.
            OptionError: the prompt is empty or too long, or an option can't be used.
            ClosedError, PowerInferError: the engine was closed, or failed.
        """
        self._check_prompt(request.prompt)
        if not 0 <= (request.n_top_logprobs or 0) <= self._n_vocab:
            raise OptionError(
                f"logprobs: {request.n_top_logprobs}; expected 0 .. {self._n_vocab}; pass a smaller number."
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise OptionError(f"max_tokens: {request.max_tokens}; expected at least 1; leave it out for no limit.")
        for token in request.sampling.logit_bias:
            if not 0 <= token < self._n_vocab:
                raise OptionError(f"logit_bias: token {token}; expected 0 .. {self._n_vocab - 1}; correct it.")
        chooser = sampler.Sampler(self.llama, request.sampling)
        generation = Generation(request, self._deadline(request.timeout_s), self._wake)
        generation.sampler = chooser
        try:
            self._put(request.client, generation)
        except BaseException:
            chooser.close()
            raise
        return generation

    def submit_embedding(self, prompt: Sequence[int], client: str = "", timeout_s: float | None = None) -> Embedding:
        """Queue a text whose embedding is wanted: the last layer's output, averaged over the tokens unless the model
        says otherwise.

        Args:
            prompt: tokens.
            client: as in Request.
            timeout_s: as in Request.

        Returns:
            Its embedding, to wait for.

        Raises:
            As submit.
        """
        self._check_prompt(prompt)
        embedding = Embedding(tuple(prompt), self._deadline(timeout_s), self._wake)
        self._put(client, embedding)
        return embedding

    def set_sparsity(self, mode: str) -> None:
        """Change the mode between two decodes.

        Raises:
            PlanError, OptionError: as Llama.sparsity.
            ClosedError, PowerInferError: the engine was closed, or failed.
        """

        def change() -> None:
            self.llama.sparsity = mode
            self._layer_states = [
                replace(state, sparsity=layer.sparsity) for state, layer in zip(self._layer_states, self.llama.layers())
            ]

        self._call(change)

    def snapshot(self) -> Snapshot:
        """What it does; cheap, at any time."""
        with self._changed:
            now = time.monotonic()
            while self._rates and self._rates[0][0] < now - RATE_WINDOW_S:
                self._rates.popleft()
            stats = self._stats
            layers = self._layer_states
            if now - self._layer_time > LAYER_WINDOW_S + 0.5:
                layers = [LayerSnapshot(layer.n_ff, layer.sparsity, layer.n_hot, None, None) for layer in layers]
            return Snapshot(
                model=os.path.basename(self.llama.model_path),
                sparsity=self.llama.sparsity,
                computed_by=stats.computed_by,
                kernels=stats.kernels,
                n_parallel=self.n_parallel,
                n_ctx=self.n_ctx,
                n_running=self._n_running,
                n_waiting=len(self._queue),
                n_requests=dict(self._n_requests),
                n_rejected=self._n_rejected,
                n_prompt_tokens=self._n_prompt_tokens,
                n_cached_tokens=self._n_cached_tokens,
                n_generated_tokens=self._n_generated_tokens,
                tokens_per_s=sum(rate[2] for rate in self._rates) / RATE_WINDOW_S,
                prompt_tokens_per_s=sum(rate[1] for rate in self._rates) / RATE_WINDOW_S,
                density=stats.density,
                candidate_density=stats.candidate_density,
                bytes_share=stats.bytes_share,
                read_bytes=stats.read_bytes,
                dense_bytes=stats.dense_bytes,
                gpu_share=stats.gpu_share,
                uptime_s=now - self._start,
                layers=layers,
                slots=self._slot_states,
            )

    @property
    def failure(self) -> str | None:
        """Why it runs no more; None: nothing failed."""
        return self._failure

    def close(self) -> None:
        """Cancel what runs and waits, and end the thread. Twice is fine."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not 0 < len(prompt) < self.n_ctx:
            raise OptionError(
                f"prompt: {len(prompt)} tokens; expected 1 .. {self.n_ctx - 1}; "
                + ("pass a shorter one, or start with a larger context." if prompt else "pass some.")
            )
        wrong = next((token for token in prompt if not 0 <= token < self._n_vocab), None)
        if wrong is not None:
            raise OptionError(f"prompt: token {wrong}; expected 0 .. {self._n_vocab - 1}; correct it.")

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.options.timeout_s if timeout_s is None else timeout_s)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _check_running(self) -> None:
        if self._failure is not None:
            raise PowerInferError(self._failure)
        if self._is_closed:
            raise ClosedError("engine: it was closed; expected a running one; create it again.")

    def _put(self, client: str, job: Generation | Embedding) -> None:
        with self._changed:
            self._check_running()
            try:
                self._queue.put(client, job)
            except PowerInferError:
                self._n_rejected += 1
                raise
            self._changed.notify_all()

    def _call(self, command: Callable[[], None]) -> None:
        """Run something in the engine's thread, between two decodes."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        with self._changed:
            self._check_running()
            self._commands.append((command, done))
            self._changed.notify_all()
        error = done.get()
        if error is not None:
            raise error

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.llama._turns.check(self._turn)  # it is this thread's now
            llama_cpp.llama_memory_clear(self._memory, False)
            while self._wait_for_work():
                self._drop_ended()
                self._admit()
                self._step()
                self._embed_step()
                self._note_stats()
        except BaseException as error:
            _logger.exception("engine: it failed")
            with self._changed:
                self._failure = f"engine: it failed ({error}); expected it to run; see the log and start it again."
        finally:
            self._end_all()
            self.llama._turns.give(self._turn)

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False: the engine was closed."""
        with self._changed:
            while True:
                commands, self._commands = self._commands, []
                for command, done in commands:
                    try:
                        command()
                        done.put(None)
                    except Exception as error:
                        done.put(error)
                if self._is_closed:
                    return False
                if len(self._queue) or any(slot.job for slot in self._slots):
                    return True
                self._note_slots()
                self._changed.wait()

    def _end_all(self) -> None:
        with self._changed:
            jobs = self._queue.take_where(lambda job: True)
            commands, self._commands = self._commands, []
        for _, done in commands:
            done.put(ClosedError("engine: it was closed; expected a running one; create it again."))
        for slot in self._slots:
            if slot.job is not None:
                self._finish(slot, "cancelled", self._failure)
        for job in jobs:
            self._finish_waiting(job, "cancelled", self._failure)

    def _drop_ended(self) -> None:
        """End what was cancelled and what took too long."""
        now = time.monotonic()
        with self._changed:
            ended = self._queue.take_where(lambda job: job.is_cancelled or job.deadline <= now)
        for job in ended:
            self._finish_waiting(job, "cancelled" if job.is_cancelled else "timeout")
        for slot in self._slots:
            if slot.job is not None and (slot.job.is_cancelled or slot.job.deadline <= now):
                self._finish(slot, "cancelled" if slot.job.is_cancelled else "timeout")

    def _finish_waiting(self, job: Generation | Embedding, reason: str, failure: str | None = None) -> None:
        with self._changed:
            self._n_requests["error" if failure else reason] += 1
        if isinstance(job, Generation):
            job.sampler.close()
            job.put(PowerInferError(failure) if failure else Piece("", (), reason))
        elif failure:
            job.put(PowerInferError(failure))
        else:
            kind = RequestTimeoutError if reason == "timeout" else CancelledError
            job.put(kind(f"embedding: {reason}; expected it to end; try again."))

    def _finish(self, slot: _Slot, reason: str, failure: str | None = None) -> None:
        """Give a slot's last piece and free it; its tokens stay cached."""
        job = slot.job
        if isinstance(job, Generation) and not failure:
            text, logprobs = ("", ()) if slot.text.is_stopped else slot.text.finish()
            if text or logprobs:
                job.put(Piece(text, logprobs))
        slot.job = slot.sampler = slot.text = slot.next_token = slot.waits_for = None
        slot.last_used = self._i_step
        self._finish_waiting(job, reason, failure)

    # -- admission -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give waiting requests the free sequences."""
        self._resume_waiting()
        while any(slot.job is None for slot in self._slots):
            with self._changed:
                if not len(self._queue):
                    return
                job = self._queue.get()
            prompt = job.prompt if isinstance(job, Embedding) else job.request.prompt
            slot = self._choose_slot(prompt)
            slot.job = job
            if isinstance(job, Embedding):
                self._keep(slot, 0)
                continue
            slot.sampler = job.sampler
            slot.text = TextAssembly(job.request.stop)
            slot.next_token = None
            # One token of the prompt is always computed: its logits are needed.
            n_cached = min(_common_length(slot.tokens, prompt), len(prompt) - 1)
            other = max(self._slots, key=lambda s: self._n_coming(s, prompt))
            if other is not slot and self._n_coming(other, prompt) - n_cached >= MIN_COPIED_PREFIX:
                slot.waits_for = other
                # At once where the other one runs nothing: the next request could be given its sequence.
                self._resume_waiting()
            else:
                self._begin(slot, n_cached)

    def _choose_slot(self, prompt: Sequence[int]) -> _Slot:
        """The free sequence to use: with the longest common prefix, else beside those in use, else the oldest."""
        busy = {slot.i_seq for slot in self._slots if slot.job is not None}

        def preference(slot: _Slot) -> tuple[int, int, int]:
            n_common = _common_length(slot.tokens, prompt)
            n_neighbours = (slot.i_seq - 1 in busy) + (slot.i_seq + 1 in busy)
            return n_common if n_common >= MIN_PREFIX_SHARE * len(prompt) else 0, n_neighbours, -slot.last_used

        return max((slot for slot in self._slots if slot.job is None), key=preference)

    def _n_coming(self, slot: _Slot, prompt: Sequence[int]) -> int:
        """Length of the common prefix that a sequence has, or will have when its prompt is computed."""
        has = _common_length(slot.tokens, prompt)
        if isinstance(slot.job, Generation) and slot.next_token is None and slot.waits_for is None:
            has = max(has, _common_length(slot.job.request.prompt, prompt))
        return min(has, len(prompt) - 1)

    def _begin(self, slot: _Slot, n_cached: int) -> None:
        """Start a request on a sequence whose first n_cached tokens it can use."""
        slot.job.n_cached = self._keep(slot, n_cached)
        with self._changed:
            self._n_cached_tokens += slot.job.n_cached

    def _keep(self, slot: _Slot, n_kept: int) -> int:
        """Forget all but the first tokens of a sequence.

        Returns:
            How many are left: 0 where a model can't forget a part (recurrent ones, sliding windows).
        """
        is_whole = llama_cpp.llama_memory_seq_pos_min(self._memory, slot.i_seq) <= 0
        if not (is_whole and llama_cpp.llama_memory_seq_rm(self._memory, slot.i_seq, n_kept, -1)):
            llama_cpp.llama_memory_seq_rm(self._memory, slot.i_seq, -1, -1)
            n_kept = 0
        del slot.tokens[n_kept:]
        return n_kept

    def _resume_waiting(self) -> None:
        """Start requests whose prefix another sequence has computed, or won't any more, with a copy of what there is.

        Before a sequence gets its next request: until then it has the tokens that another one waits for.
        """
        for slot in self._slots:
            other = slot.waits_for
            if other is None or (other.job is not None and other.next_token is None):
                continue
            slot.waits_for = None
            prompt = slot.job.request.prompt
            n_common = min(_common_length(other.tokens, prompt), len(prompt) - 1)
            if n_common - _common_length(slot.tokens, prompt) >= MIN_COPIED_PREFIX:
                self._write_state(slot, self._read_state(other), other.tokens)
            self._begin(slot, min(_common_length(slot.tokens, prompt), len(prompt) - 1))

    # -- sequences are moved ---------------------------------------------------------------------------------------

    def _read_state(self, slot: _Slot) -> np.ndarray:
        size = llama_cpp.llama_state_seq_get_size(self._context, slot.i_seq)
        # Not an array of ctypes: that makes a type for each size, and keeps it.
        state = np.empty(size, np.uint8)
        data = state.ctypes.data_as(_UINT8_POINTER)
        if llama_cpp.llama_state_seq_get_data(self._context, data, size, slot.i_seq) != size:
            raise PowerInferError(
                f"sequence {slot.i_seq}: llama.cpp can't read its state; expected {size} bytes; report it."
            )
        return state

    def _write_state(self, slot: _Slot, state: np.ndarray, tokens: Sequence[int]) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, slot.i_seq, -1, -1)
        slot.tokens = list(tokens)
        data = state.ctypes.data_as(_UINT8_POINTER)
        if tokens and not llama_cpp.llama_state_seq_set_data(self._context, data, state.nbytes, slot.i_seq):
            raise PowerInferError(
                f"sequence {slot.i_seq}: llama.cpp can't set its state; expected it to fit; report it."
            )

    def _compact(self) -> None:
        """Move the sequences in use together when they have been apart for some decodes."""
        busy = sorted(slot.i_seq for slot in self._slots if slot.job is not None)
        if not busy or busy[-1] - busy[0] + 1 == len(busy):
            self._n_gap_steps = 0
            return
        self._n_gap_steps += 1
        if self._n_gap_steps < STEPS_BEFORE_COMPACTION:
            return
        self._n_gap_steps = 0
        n_busy = len(busy)
        first = max(range(self.n_parallel - n_busy + 1), key=lambda i: sum(i <= b < i + n_busy for b in busy))
        inside = range(first, first + n_busy)
        slots = sorted(self._slots, key=lambda slot: slot.i_seq)
        gaps = [slots[i] for i in inside if slots[i].job is None]
        outside = [slots[i] for i in busy if i not in inside]
        for idle, moved in zip(gaps, outside):
            idle_state, moved_state = self._read_state(idle), self._read_state(moved)
            idle.i_seq, moved.i_seq = moved.i_seq, idle.i_seq
            self._write_state(idle, idle_state, idle.tokens)
            self._write_state(moved, moved_state, moved.tokens)

    # -- decoding --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Decode one token of each generating request and some of the prompts, and choose the next tokens."""
        self._compact()
        self._i_step += 1
        batch = self._batch
        batch.clear()
        running = [slot for slot in sorted(self._slots, key=lambda s: s.i_seq) if isinstance(slot.job, Generation)]
        generating = [slot for slot in running if slot.next_token is not None]
        room = len(batch.token) - len(generating)
        if generating:
            room = min(room, self.options.prompt_chunk)
        n_prompt = 0
        decoded: list[tuple[_Slot, Sequence[int]]] = []
        # Prompts take turns when they don't fit together.
        prompts = [slot for slot in running if slot.next_token is None and slot.waits_for is None]
        prompts.sort(key=lambda slot: slot.last_used)
        chunks = {}
        for slot in prompts:
            chunk = slot.job.request.prompt[len(slot.tokens) :][:room]
            if chunk:
                chunks[slot.i_seq] = chunk
                room -= len(chunk)
                n_prompt += len(chunk)
                slot.last_used = self._i_step
        for slot in running:
            slot.i_output = -1
            tokens = chunks.get(slot.i_seq, ()) if slot.next_token is None else (slot.next_token,)
            if not tokens:
                continue
            i_last = batch.add(tokens, len(slot.tokens), slot.i_seq)
            decoded.append((slot, tokens))
            if slot.next_token is not None or len(slot.tokens) + len(tokens) == slot.job.n_prompt:
                batch.has_output[i_last] = True
                slot.i_output = i_last
        if not decoded:
            return
        self._decode()
        for slot, tokens in decoded:
            slot.tokens += tokens
        n_generated = 0
        for slot in running:
            if slot.i_output >= 0:
                n_generated += self._choose_token(slot)
        with self._changed:
            self._n_prompt_tokens += n_prompt
            self._n_generated_tokens += n_generated
            self._rates.append((time.monotonic(), n_prompt, n_generated))

    def _decode(self) -> None:
        with self.llama._tiles:
            result = llama_cpp.llama_decode(self._context, self._batch.raw)
        if result != 0:
            raise PowerInferError(f"llama_decode returned {result} for {self._batch.n_tokens} tokens; expected 0")

    def _choose_token(self, slot: _Slot) -> int:
        """Choose the next token of a request and hand on what is certain of its text.

        Returns:
            1, or 0 when the text ended before.
        """
        job = slot.job
        token = slot.sampler.sample(self._context, slot.i_output)
        if token is None or llama_cpp.llama_vocab_is_eog(self._vocab, token):
            self._finish(slot, "stop")
            return 0
        slot.next_token = token
        job.n_generated += 1
        logprob = None
        n_top = job.request.n_top_logprobs
        if n_top is not None:
            values = sampler.logits(self._context, slot.i_output, self._n_vocab)
            chosen, best = sampler.top_logprobs(values, token, n_top)
            top = tuple((i, self._token_text(i), value) for i, value in best)
            logprob = TokenLogprob(token, self._token_text(token), chosen, top)
        text, logprobs = slot.text.add(self._token_text(token), logprob)
        if text or logprobs:
            job.put(Piece(text, logprobs))
        max_tokens = job.request.max_tokens
        if slot.text.is_stopped:
            self._finish(slot, "stop")
        elif job.n_generated == max_tokens or job.n_prompt + job.n_generated >= self.n_ctx:
            self._finish(slot, "length")
        return 1

    def _token_text(self, token: int) -> bytes:
        text = self._texts.get(token)
        if text is None:
            buffer = ctypes.create_string_buffer(64)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
            if n < 0:
                buffer = ctypes.create_string_buffer(-n)
                n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
            text = self._texts[token] = buffer.raw[:n]
        return text

    def _embed_step(self) -> None:
        """Compute the next part of one embedding."""
        slot = min(
            (slot for slot in self._slots if isinstance(slot.job, Embedding)),
            key=lambda slot: slot.last_used,
            default=None,
        )
        if slot is None:
            return
        self._i_step += 1
        slot.last_used = self._i_step
        job = slot.job
        n_chunk = len(self._batch.token)
        if any(isinstance(other.job, Generation) for other in self._slots):
            n_chunk = min(n_chunk, self.options.prompt_chunk)
        chunk = job.prompt[len(slot.tokens) :][:n_chunk]
        self._batch.clear()
        self._batch.add(chunk, len(slot.tokens), slot.i_seq, all_outputs=True)
        llama_cpp.llama_set_embeddings(self._context, True)
        try:
            self._decode()
            rows = np.stack(
                [
                    np.ctypeslib.as_array(
                        llama_cpp.llama_get_embeddings_ith(self._context, i), shape=(self.llama.n_embd(),)
                    )
                    for i in range(len(chunk))
                ]
            ).astype(np.float64)
        finally:
            llama_cpp.llama_set_embeddings(self._context, False)
        slot.tokens += chunk
        with self._changed:
            self._n_prompt_tokens += len(chunk)
            self._rates.append((time.monotonic(), len(chunk), 0))
        if self._pooling == str(llama_cpp.LLAMA_POOLING_TYPE_LAST):
            job.sum = rows[-1]
        elif self._pooling == str(llama_cpp.LLAMA_POOLING_TYPE_CLS):
            job.sum = rows[0] if job.sum is None else job.sum
        else:
            job.sum = rows.sum(0) if job.sum is None else job.sum + rows.sum(0)
        if len(slot.tokens) == len(job.prompt):
            norm = np.linalg.norm(job.sum)
            slot.job = None
            with self._changed:
                self._n_requests["embedding"] += 1
            job.put((job.sum / (norm or 1.0)).astype(np.float32))

    # -- figures ---------------------------------------------------------------------------------------------------

    def _note_slots(self) -> None:
        """With the lock held."""
        self._n_running = sum(slot.job is not None for slot in self._slots)
        self._slot_states = [
            SlotSnapshot(slot.state, len(slot.tokens), slot.job.n_cached if slot.job else 0) for slot in self._slots
        ]

    def _note_stats(self) -> None:
        """Between two decodes: figures for `snapshot`, those of layers once a second."""
        now = time.monotonic()
        stats = layers = None
        is_idle = not any(slot.job for slot in self._slots)
        if now - self._layer_time >= LAYER_WINDOW_S or is_idle:
            stats, layers = self.llama.stats(), self.llama.layers()
        with self._changed:
            self._note_slots()
            while self._rates and self._rates[0][0] < now - RATE_WINDOW_S:
                self._rates.popleft()
            if stats is not None:
                self._stats = stats
                self._layer_states = [
                    LayerSnapshot(
                        layer.n_ff,
                        layer.sparsity,
                        layer.n_hot,
                        _rate(layer.n_active - last.n_active, (layer.n_tokens - last.n_tokens) * layer.n_ff),
                        _rate(layer.n_candidates - last.n_candidates, (layer.n_tokens - last.n_tokens) * layer.n_ff),
                    )
                    for layer, last in zip(layers, self._layers)
                ]
                self._layers = layers
                self._layer_time = now


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next(itertools.compress(itertools.count(), map(operator.ne, a, b)), min(len(a), len(b)))
