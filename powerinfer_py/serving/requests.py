"""What the engine is asked for and what it answers: plain data, without HTTP and without llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, with the names and defaults of `llama_cpp.Llama.create_completion`."""

    temperature: float = 0.8  # 0: the best token
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    mirostat_mode: int = 0  # 0, 1 or 2
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None  # None: another one for each request
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token -> added to its logit
    grammar: str | None = None  # GBNF


@dataclass(frozen=True)
class Request:
    """One text to continue."""

    prompt: tuple[int, ...]  # tokens, at least one
    max_tokens: int | None = None  # None: to the end of the context
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    n_top_logprobs: int | None = None  # None: no log-probabilities; 0: of the chosen tokens only
    client: str = ""  # whose request: clients take turns in the queue
    timeout_s: float | None = None  # from submission to the last token; None: the engine's


@dataclass(frozen=True)
class TokenLogprob:
    """A chosen token and its neighbours, with natural logarithms of their probabilities before sampling."""

    token: int
    text: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...]  # (token, text, logprob), best first


@dataclass(frozen=True)
class Piece:
    """The next part of an answer."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens that ended within this piece
    finish_reason: str | None = None  # last piece: "stop", "length", "timeout" or "cancelled"
