"""A model whose FFNs the device computes, run over windows of tokens, and the text that they come from.

Logits of every token are requested always: the last layer sees only the rows whose logits are.
"""

from __future__ import annotations

import codecs
import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from powerinfer_py import _core
from powerinfer_py.errors import FormatError, OptionError, PlanError

_N_DECODED_TOKENS = 128  # decoded one by one for what decoding reads
# Thresholds of a layer that skips nothing: `threshold` mode without a fallback note.
_NEVER = float(np.finfo(np.float32).tiny)


class Runner:
    """A model whose FFNs the device computes, run over windows of tokens. Works in `with`."""

    def __init__(
        self,
        plan_path: Path,
        model: Path | None,
        *,
        n_ctx: int,
        n_threads: int | None = None,
        sparsity: str = "dense",
        strict: bool = False,
        mapped: bool = False,
        note: Callable[[str], None],
    ) -> None:
        """Loads it.

        Args:
            plan_path: the plan to run.
            model: its base; None: where the plan says.
            n_ctx: tokens per window.
            n_threads: None: physical cores allowed.
            sparsity: the mode.
            strict: a fallback is an error instead of a note.
            mapped: weights stay in the mapped file.
            note: receives the core's notes.

        Raises:
            PlanError: the model can't be loaded, or its context is shorter than a window.
        """
        self.n_ctx = n_ctx
        self._stack = ExitStack()
        with ExitStack() as stack:
            self.plan = _core.Plan.open(
                plan_path,
                model,
                sparsity=sparsity,
                strict=strict,
                mapped=mapped,
                count=True,
                note=note,
            )
            stack.callback(self.plan.close)
            self._load(stack, model or plan_path, n_threads or _core.physical_cores())
            self._stack = stack.pop_all()

    def _load(self, stack: ExitStack, model: Path, n_threads: int) -> None:
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # what upstream prints while it loads
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = self.plan.load_model(ctypes.addressof(params))
        stack.callback(llama_cpp.llama_model_free, self._model)
        self.vocab = llama_cpp.llama_model_get_vocab(self._model)
        if llama_cpp.llama_vocab_type(self.vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            raise PlanError(f"{model}: it has no vocabulary; expected one, to read text; use a model with a tokenizer.")
        n_ctx_train = llama_cpp.llama_model_n_ctx_train(self._model)
        if self.n_ctx > n_ctx_train:
            raise OptionError(f"ctx: {self.n_ctx}; the model was trained with {n_ctx_train}; pass a smaller --ctx.")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = context.n_batch = self.n_ctx
        context.n_ubatch = min(self.n_ctx, context.n_ubatch)
        context.n_threads = context.n_threads_batch = n_threads
        context.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if self._context is None:
            raise PlanError(f"{model}: no context of {self.n_ctx} tokens could be made; pass a smaller --ctx.")
        stack.callback(llama_cpp.llama_free, self._context)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(self.n_ctx, 0, 1)
        stack.callback(llama_cpp.llama_batch_free, self._batch)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees context, model and plan. Twice is fine."""
        self._stack.close()

    def tokenize(self, text: str, special: bool) -> np.ndarray:
        """Tokens of a text, without BOS: (n,) int32."""
        data = text.encode("utf-8")
        n_max = len(data) + 16
        tokens = np.empty(n_max, np.int32)
        out = tokens.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token))
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), out, n_max, False, special)
        if n < 0:
            raise FormatError(f"text: {len(data)} bytes make more than {n_max} tokens; expected at most one per byte.")
        return tokens[:n].copy()

    def decode(self, tokens: np.ndarray, n_past: int = 0) -> np.ndarray:
        """Runs tokens, logits of all of them requested: the last layer sees only rows whose logits are.

        Args:
            tokens: (n,) int32.
            n_past: tokens in the context before them; 0 empties it.

        Returns:
            (n, n_vocab) float32, valid until the next decode.
        """
        if n_past == 0:
            llama_cpp.llama_memory_clear(self._memory, True)
        batch = self._batch
        batch.n_tokens = n = len(tokens)
        for i, token in enumerate(tokens.tolist()):
            batch.token[i] = token
            batch.pos[i] = n_past + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1
        code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise PlanError(f"llama_decode: it ended with {code}; expected 0; see llama.cpp's messages above.")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(n, self.n_vocab))

    def run(self, window: np.ndarray) -> np.ndarray:
        """Runs a window from an empty context; its first token is BOS where the model wants one.

        Args:
            window: (n_ctx,) int32.

        Returns:
            (n_ctx, n_vocab) float32, valid until the next decode.
        """
        if llama_cpp.llama_vocab_get_add_bos(self.vocab):
            window = window.copy()
            window[0] = llama_cpp.llama_vocab_bos(self.vocab)
        return self.decode(window)

    def scored(self, window: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs a window; its second half counts, as in llama.cpp's perplexity.

        Args:
            window: (n_ctx,) int32.

        Returns:
            logits (n_scored, n_vocab) float32 of the tokens that follow, valid until the next decode; the logarithm of
            the sum of their exponentials (n_scored, 1) float64; those tokens (n_scored,) int32.
        """
        first = self.n_ctx // 2
        logits = self.run(window)[first:-1]
        top = logits.max(axis=1, keepdims=True)
        log_sum = top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True, dtype=np.float64))
        return logits, log_sum, window[first + 1 :]

    def log_probabilities(self, window: np.ndarray) -> np.ndarray:
        """(n_scored, n_vocab) float32 log-probabilities of a window's second half."""
        logits, log_sum, _ = self.scored(window)
        return logits - log_sum.astype(np.float32)

    def likelihood(self, window: np.ndarray) -> float:
        """Mean negative log-likelihood of a window's second half, nats per token."""
        logits, log_sum, tokens = self.scored(window)
        return float((log_sum[:, 0] - logits[np.arange(len(tokens)), tokens]).mean())

    def decode_stats(self, window: np.ndarray, n_tokens: int = _N_DECODED_TOKENS) -> dict[str, Any]:
        """The plan's statistics of decoding tokens one by one, with the window's first half before them.

        Args:
            window: (n,) int32.
            n_tokens: to decode, at most half of the window.

        Returns:
            Of _core.Plan.stats; and `wall_us`, the time that decoding took.
        """
        first = len(window) // 2
        self.decode(window[:first])
        self.plan.reset_stats()
        started = time.perf_counter()
        for i in range(first, min(len(window), first + n_tokens)):
            self.decode(window[i : i + 1], i)
        wall_us = (time.perf_counter() - started) * 1e6
        return {**self.plan.stats(), "wall_us": wall_us}

    def set_thresholds(self, values: Sequence[tuple[float, float]]) -> None:
        """Sets (threshold, product_threshold) per layer, and the mode that uses them."""
        for i, (layer, (threshold, product)) in enumerate(zip(self.plan.layers(), values)):
            if layer["n_ff"]:
                self.plan.set_thresholds(i, threshold or (0.0 if product else _NEVER), product)
        self.plan.set_sparsity("threshold")


def read_text(path: Path, max_bytes: int) -> tuple[str, int]:
    """The beginning of a text file.

    Args:
        path: UTF-8; bytes that aren't are replaced.
        max_bytes: at most; a character that this would cut is left out.

    Returns:
        The text, and how many characters were replaced.

    Raises:
        FormatError: it can't be read.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes)
            whole = not file.read(1)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}; expected a text file; check the path.") from None
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=whole)
    own = data.count("\N{REPLACEMENT CHARACTER}".encode())
    return text, text.count("\N{REPLACEMENT CHARACTER}") - own


def text_windows(
    runner: Runner,
    paths: Sequence[Path],
    max_tokens: int,
    *,
    n_needed: int,
    special: bool = False,
    note: Callable[[str], None],
) -> tuple[np.ndarray, str]:
    """Windows of all files in turn, so that none is left out while another fills the limit.

    Args:
        runner: tokenizes, and knows the length of a window.
        paths: the files.
        max_tokens: tokens to use.
        n_needed: windows without which there is nothing to be learned.
        special: the text holds the model's special tokens.
        note: receives notes.

    Returns:
        (n_windows, ctx) int32, and what the text is.

    Raises:
        FormatError: a file can't be read, or all hold too little.
    """
    n_ctx = runner.n_ctx
    per_file = []
    n_tokens = 0
    for path in paths:
        # longer than any text's mean token, so that the limit is reached
        text, n_replaced = read_text(path, max_tokens * 16)
        if n_replaced:
            note(f"{path}: {n_replaced} places aren't UTF-8 and were replaced.")
        tokens = runner.tokenize(text, special)[:max_tokens]
        n_tokens += len(tokens)
        n = len(tokens) // n_ctx
        per_file.append(tokens[: n * n_ctx].reshape(n, n_ctx))
    n_wanted = max_tokens // n_ctx
    picked = sorted((i, k) for k, windows in enumerate(per_file) for i in range(len(windows)))[:n_wanted]
    if len(picked) < n_needed:
        raise FormatError(
            f"text: {len(paths)} files hold {n_tokens} tokens, {len(picked)} whole windows of {n_ctx} are used; "
            f"expected at least {n_needed} windows, {n_needed * n_ctx} tokens; give more text, more --tokens or a smaller --ctx."
        )
    counts = [sum(1 for _, at in picked if at == k) for k in range(len(per_file))]
    corpus = ", ".join(f"{path.name} ({n * n_ctx} tokens)" for path, n in zip(paths, counts) if n)
    return np.stack([per_file[k][i] for i, k in picked]), corpus
