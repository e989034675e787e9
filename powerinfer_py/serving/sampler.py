"""The next token of one sequence: llama.cpp's samplers in the order of `llama_cpp.Llama`, and log-probabilities."""

from __future__ import annotations

import ctypes
import secrets

import llama_cpp
import llama_cpp._internals as internals
import numpy as np

from powerinfer_py.errors import OptionError
from powerinfer_py.llama import Llama
from powerinfer_py.serving.requests import Sampling

PENALTY_LAST_N = 64  # tokens that penalties look back at, as llama_cpp.Llama's last_n_tokens_size


class Sampler:
    """Chooses tokens for one request.

    A grammar is asked about the chosen token first, and about all of them only when it refuses that one: the same
    tokens remain possible, and the usual case costs little.

    Args:
        llama: the model.
        sampling: how.

    Raises:
        OptionError: the grammar can't be read.
    """

    def __init__(self, llama: Llama, sampling: Sampling) -> None:
        self._n_vocab = llama.n_vocab()
        self._grammar = None
        chain = self._chain = internals.LlamaSampler()
        if sampling.logit_bias:
            chain.add_logit_bias(self._n_vocab, dict(sampling.logit_bias))
        chain.add_penalties(
            self._n_vocab,
            PENALTY_LAST_N,
            sampling.repeat_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed & 0xFFFFFFFF
        if sampling.temperature <= 0:
            chain.add_greedy()
        elif sampling.mirostat_mode == 1:
            chain.add_mirostat(self._n_vocab, seed, sampling.mirostat_tau, sampling.mirostat_eta, 100)
        elif sampling.mirostat_mode == 2:
            chain.add_mirostat_v2(seed, sampling.mirostat_tau, sampling.mirostat_eta)
        else:
            chain.add_top_k(sampling.top_k)
            chain.add_typical(sampling.typical_p, 1)
            chain.add_top_p(sampling.top_p, 1)
            chain.add_min_p(sampling.min_p, 1)
            chain.add_temp(sampling.temperature)
            chain.add_dist(seed)
        if sampling.grammar is not None:
            self._grammar = llama_cpp.llama_sampler_init_grammar(
                llama._model.vocab, sampling.grammar.encode("utf-8"), b"root"
            )
            if not self._grammar:
                raise OptionError("grammar: llama.cpp can't read it; expected GBNF with a rule named root; correct it.")
            self._candidates = internals.LlamaTokenDataArray(n_vocab=self._n_vocab)

    def sample(self, context: int, i_output: int) -> int | None:
        """Choose a token and remember it.

        Args:
            context: llama.cpp's context, decoded.
            i_output: index of the token in the batch whose logits count.

        Returns:
            The token; None when the grammar allows none.
        """
        if self._grammar is None:
            return llama_cpp.llama_sampler_sample(self._chain.sampler, context, i_output)
        values = logits(context, i_output, self._n_vocab)
        token, _ = self._choose(values, with_grammar=False)
        one = llama_cpp.llama_token_data(id=token, logit=1.0, p=0.0)
        allowed = llama_cpp.llama_token_data_array(data=ctypes.pointer(one), size=1, selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._grammar, ctypes.byref(allowed))
        if one.logit == -np.inf:
            token, logit = self._choose(values, with_grammar=True)
            if logit == -np.inf:
                return None
        llama_cpp.llama_sampler_accept(self._grammar, token)
        llama_cpp.llama_sampler_accept(self._chain.sampler, token)
        return token

    def _choose(self, values: np.ndarray, with_grammar: bool) -> tuple[int, float]:
        candidates = self._candidates
        candidates.copy_logits(values)
        array = candidates.candidates
        array.selected = -1
        if with_grammar:
            llama_cpp.llama_sampler_apply(self._grammar, ctypes.byref(array))
        llama_cpp.llama_sampler_apply(self._chain.sampler, ctypes.byref(array))
        chosen = array.data[array.selected]
        return chosen.id, chosen.logit

    def close(self) -> None:
        """Free llama.cpp's samplers. Twice is fine."""
        self._chain.close()
        if self._grammar:
            llama_cpp.llama_sampler_free(self._grammar)
            self._grammar = None


def logits(context: int, i_output: int, n_vocab: int) -> np.ndarray:
    """Logits of one token of the last batch.

    Returns:
        (n_vocab) float32; llama.cpp's own memory, valid until the next decode.
    """
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i_output), shape=(n_vocab,))


def top_logprobs(values: np.ndarray, token: int, n_top: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-probabilities before any sampler.

    Args:
        values: (n_vocab) float32, logits.
        token: the chosen one.
        n_top: how many of the best.

    Returns:
        The token's, and (token, log-probability) of the best, best first.
    """
    values = values.astype(np.float64)
    log_sum = np.logaddexp.reduce(values)
    best = np.argpartition(-values, n_top)[:n_top] if 0 < n_top < len(values) else np.arange(min(n_top, len(values)))
    best = best[np.argsort(-values[best], kind="stable")]
    return float(values[token] - log_sum), [(int(i), float(values[i] - log_sum)) for i in best]
