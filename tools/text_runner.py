"""A model whose FFNs the device computes, run over windows of tokens, and the text that they come from.

Logits of every token are requested always: the last layer sees only the rows whose logits are.
"""

from __future__ import annotations

import codecs
import ctypes
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from powerinfer_py import _core
from powerinfer_py.errors import FormatError, OptionError, PlanError

from .token_scores import TokenScores

# Thresholds of a layer that skips nothing: `threshold` mode without a fallback note.
_NEVER = float(np.finfo(np.float32).tiny)
_N_DECODED_TOKENS = 128  # decoded one by one for the bytes that decoding reads


class Vocabulary:
    """A model's vocabulary, without its weights. Works in `with`.

    Attributes:
        vocab: llama.cpp's vocabulary.
        n_ctx: tokens per window.
        bos: the token that texts begin with; None where the vocabulary adds none.
    """

    def __init__(self, model: Path, *, n_ctx: int) -> None:
        """Loads it.

        Args:
            model: a stock GGUF.
            n_ctx: tokens per window.

        Raises:
            PlanError: it can't be loaded, or has no vocabulary.
        """
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._stack = ExitStack()
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # what upstream prints while it loads
        loaded = llama_cpp.llama_model_load_from_file(os.fsencode(model), params)
        if loaded is None:
            raise PlanError(f"{model}: stock llama.cpp could not load it; expected a model; see its messages above.")
        self._stack.callback(llama_cpp.llama_model_free, loaded)
        self._set_vocabulary(model, loaded, n_ctx)

    def _set_vocabulary(self, model: Path, loaded: Any, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self.vocab = llama_cpp.llama_model_get_vocab(loaded)
        if llama_cpp.llama_vocab_type(self.vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            raise PlanError(f"{model}: it has no vocabulary; expected one, to read text; use a model with a tokenizer.")
        has_bos = llama_cpp.llama_vocab_get_add_bos(self.vocab)
        self.bos = llama_cpp.llama_vocab_bos(self.vocab) if has_bos else None

    def __enter__(self) -> Vocabulary:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees all of it. Twice is fine."""
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


class Runner(Vocabulary):
    """A model whose FFNs the device computes, run over windows of tokens. Works in `with`.

    Attributes:
        plan: the plan; None: upstream computes.
        vocab: llama.cpp's vocabulary.
        n_ctx: tokens per window.
        n_threads: that compute.
        n_vocab: tokens that the vocabulary has.
        bos: the token that texts begin with; None where the vocabulary adds none.
        decode_s: seconds that all decodes took so far.
    """

    def __init__(
        self,
        plan_path: Path | None,
        model: Path | None,
        *,
        n_ctx: int,
        n_threads: int | None = None,
        sparsity: str = "dense",
        strict: bool = False,
        mapped: bool = False,
        count: bool = True,
        note: Callable[[str], None],
    ) -> None:
        """Loads it.

        Args:
            plan_path: the plan to run; None: stock llama.cpp runs the model.
            model: its base; None: embedded in the plan, or beside it.
            n_ctx: tokens per window.
            n_threads: None: physical cores allowed.
            sparsity: the mode.
            strict: a fallback is an error instead of a note.
            mapped: weights stay in the mapped file.
            count: the plan counts activations.
            note: receives the core's notes.

        Raises:
            PlanError: the model can't be loaded, or its context is shorter than a window.
        """
        self.n_ctx = n_ctx
        self.n_threads = n_threads or _core.physical_cores()
        self.plan = None
        self.decode_s = 0.0
        self._stack = ExitStack()
        with ExitStack() as stack:
            if plan_path is not None:
                self.plan = _core.Plan.open(
                    plan_path,
                    model,
                    sparsity=sparsity,
                    strict=strict,
                    mapped=mapped,
                    count=count,
                    note=note,
                )
                stack.callback(self.plan.close)
                model = self.plan.base_path
            self._load(stack, model)
            self._stack = stack.pop_all()

    def _load(self, stack: ExitStack, model: Path) -> None:
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # what upstream prints while it loads
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        if self.plan is not None:
            self._model = self.plan.load_model(ctypes.addressof(params))
        else:
            self._model = llama_cpp.llama_model_load_from_file(os.fsencode(model), params)
            if self._model is None:
                raise PlanError(
                    f"{model}: stock llama.cpp could not load it; expected a model; see its messages above."
                )
        stack.callback(llama_cpp.llama_model_free, self._model)
        self._set_vocabulary(model, self._model, self.n_ctx)
        n_ctx_train = llama_cpp.llama_model_n_ctx_train(self._model)
        if self.n_ctx > n_ctx_train:
            raise OptionError(f"ctx: {self.n_ctx}; the model was trained with {n_ctx_train}; pass a smaller -c.")
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = context.n_batch = self.n_ctx
        context.n_ubatch = min(self.n_ctx, context.n_ubatch)
        context.n_threads = context.n_threads_batch = self.n_threads
        self._tiles = _core.UpstreamTiles(self.n_threads)
        context.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if self._context is None:
            raise PlanError(f"{model}: no context of {self.n_ctx} tokens could be made; pass a smaller -c.")
        stack.callback(llama_cpp.llama_free, self._context)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(self.n_ctx, 0, 1)
        stack.callback(llama_cpp.llama_batch_free, self._batch)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def __enter__(self) -> Runner:
        return self

    def decode(self, tokens: np.ndarray, n_past: int = 0, i_first: int = 0) -> np.ndarray:
        """Runs tokens.

        Args:
            tokens: (n,) int32.
            n_past: tokens in the context before them; 0 empties it.
            i_first: the first of them whose logits are requested. The last layer sees only those.

        Returns:
            (n - i_first, n_vocab) float32, valid until the next decode.
        """
        start = time.perf_counter()
        if n_past == 0:
            llama_cpp.llama_memory_clear(self._memory, True)
        batch = self._batch
        batch.n_tokens = n = len(tokens)
        for i, token in enumerate(tokens.tolist()):
            batch.token[i] = token
            batch.pos[i] = n_past + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= i_first
        with self._tiles:
            code = llama_cpp.llama_decode(self._context, batch)
        if code != 0:
            raise PlanError(f"llama_decode: it ended with {code}; expected 0; see llama.cpp's messages above.")
        logits = llama_cpp.llama_get_logits(self._context)  # waits for them
        self.decode_s += time.perf_counter() - start
        return np.ctypeslib.as_array(logits, shape=(n - i_first, self.n_vocab))

    def run(self, window: np.ndarray, i_first: int = 0) -> np.ndarray:
        """Runs a window from an empty context; its first token is BOS where the model wants one.

        Args:
            window: (n_ctx,) int32.
            i_first: as in decode().

        Returns:
            (n_ctx - i_first, n_vocab) float32, valid until the next decode.
        """
        if self.bos is not None:
            window = window.copy()
            window[0] = self.bos
        return self.decode(window, i_first=i_first)

    def scored(self, window: np.ndarray, *, whole: bool = True) -> TokenScores:
        """Runs a window; its second half counts, as in llama.cpp's perplexity.

        Args:
            window: (n_ctx,) int32.
            whole: the last layer sees the first half too, which costs time: for who counts activations.

        Returns:
            Scores of the second half but its last place, valid until the next decode.
        """
        first = self.n_ctx // 2
        logits = self.run(window)[first:] if whole else self.run(window, first)
        return TokenScores.of(logits[:-1], window[first + 1 :])

    def likelihood(self, window: np.ndarray) -> float:
        """Mean negative log-likelihood of a window's second half, nats per token."""
        return float(self.scored(window).negative_log_likelihoods().mean())

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
        before = self.decode_s
        for i in range(first, min(len(window), first + n_tokens)):
            self.decode(window[i : i + 1], i)
        return {**self.plan.stats(), "wall_us": (self.decode_s - before) * 1e6}

    def set_thresholds(self, values: Sequence[tuple[float, float]]) -> None:
        """Sets (threshold, product_threshold) per layer, and the mode that uses them."""
        for i, (layer, (threshold, product)) in enumerate(zip(self.plan.layers(), values)):
            if layer["n_ff"]:
                self.plan.set_thresholds(i, threshold or (0.0 if product else _NEVER), product)
        self.plan.set_sparsity("threshold")


def read_text(path: Path, max_bytes: int | None = None) -> tuple[str, int]:
    """A text file, or its beginning.

    Args:
        path: UTF-8; bytes that aren't are replaced.
        max_bytes: at most; a character that this would cut is left out. None: all.

    Returns:
        The text, and how many characters were replaced.

    Raises:
        FormatError: it can't be read, or isn't text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes)
            whole = not file.read(1)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror}; expected a text file; check the path.") from None
    if b"\0" in data:
        raise FormatError(f"{path}: it holds zero bytes; expected text, UTF-8; convert it, or give another file.")
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(data, final=whole)
    own = data.count("\N{REPLACEMENT CHARACTER}".encode())
    return text, text.count("\N{REPLACEMENT CHARACTER}") - own


def text_windows(
    vocabulary: Vocabulary,
    paths: Sequence[Path],
    max_tokens: int,
    *,
    n_needed: int,
    special: bool = False,
    note: Callable[[str], None],
) -> tuple[np.ndarray, str]:
    """Windows of all files in turn, so that none is left out while another fills the limit.

    Args:
        vocabulary: tokenizes, and knows the length of a window.
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
    n_ctx = vocabulary.n_ctx
    per_file = []
    n_tokens = 0
    for path in paths:
        # longer than any text's mean token, so that the limit is reached
        text, n_replaced = read_text(path, max_tokens * 16)
        if n_replaced:
            note(f"{path}: {n_replaced} places aren't UTF-8 and were replaced.")
        tokens = vocabulary.tokenize(text, special)[:max_tokens]
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
