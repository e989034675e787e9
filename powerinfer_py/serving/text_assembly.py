"""From the bytes of tokens to text that can be sent: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from powerinfer_py.serving.requests import TokenLogprob


class TextAssembly:
    """The text of one answer, as it grows.

    Bytes that never become a character are left out, as in `llama_cpp.Llama`.

    Args:
        stop: strings that end the text; they aren't part of it.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(text for text in stop if text)
        self._decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        self._held = ""  # text that may be the begin of a stop string
        self._n_held_from = 0  # characters before _held
        self._logprobs: list[tuple[int, TokenLogprob]] = []  # (characters up to the token's end, token)
        self.is_stopped = False  # a stop string was found

    def add(self, text: bytes, logprob: TokenLogprob | None) -> tuple[str, tuple[TokenLogprob, ...]]:
        """Append a token.

        Args:
            text: of the token.
            logprob: of the token, when they are wanted.

        Returns:
            The text that is certain now, and the log-probabilities of the tokens that end in it.
        """
        self._held += self._decoder.decode(text)
        if logprob is not None:
            self._logprobs.append((self._n_held_from + len(self._held), logprob))
        found = [i for i in map(self._held.find, self._stop) if i >= 0]
        if found:
            self.is_stopped = True
            text_before = self._held[: min(found)]
            self._held = ""
            return self._release(text_before)
        n_held = self._n_begun_stop()
        certain = self._held[: len(self._held) - n_held]
        self._held = self._held[len(certain) :]
        return self._release(certain)

    def finish(self) -> tuple[str, tuple[TokenLogprob, ...]]:
        """The rest, when no more tokens come."""
        rest, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return self._release(rest)

    def _n_begun_stop(self) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = min(len(self._held), max(map(len, self._stop), default=1) - 1)
        for n in range(longest, 0, -1):
            end = self._held[-n:]
            if any(text.startswith(end) for text in self._stop):
                return n
        return 0

    def _release(self, text: str) -> tuple[str, tuple[TokenLogprob, ...]]:
        self._n_held_from += len(text)
        n_ended = sum(end <= self._n_held_from for end, _ in self._logprobs)
        ended, self._logprobs = self._logprobs[:n_ended], self._logprobs[n_ended:]
        return text, tuple(logprob for _, logprob in ended)
