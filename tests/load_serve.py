"""Holds load on `powerinfer serve` for minutes and checks every answer: python load_serve.py MODEL --minutes 5.

Answers are scored again alone, in this process, after the load. Exit code 1 when a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import collections
import contextlib
import ctypes
import json
import os
import random
import re
import signal
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import httpx
import llama_cpp
import numpy as np
import rich.console
import rich.progress
import rich.table
from llama_cpp._utils import suppress_stdout_stderr

from powerinfer_py import Llama

# A chosen token is at most this far below the best logit, and its log-probability at most this far from the server's, when
# its text is scored alone. Holds for F32 weights and KV cache; other kernels and types move logits by about 1e-2.
SCORE_TOLERANCE = 1e-3
# Per minute, of the server's anonymous memory after the warm-up; the larger one. That of SmolLM2 (430 MiB) was flat for two
# minutes, then went up by 8 MiB within one, and was flat again.
MAX_GROWTH_MIB = 1.0
MAX_GROWTH_SHARE = 0.01
MIN_GROWTH_MINUTES = 2.0  # shorter runs say nothing of growth
WAIT_S = 300.0  # for any answer
MAX_FAILURES = 50  # then the load ends
RETRY_S = 0.3  # after 429
API_KEY = "load-test"
F32_CACHE = ("--cache-type-k", "f32", "--cache-type-v", "f32")
WORDS = (
    "the a of to and in that it was he his with as for on had at by not but from have they which you were all one her she "
    "would there been their we him when who will more no if out so what up into than them can only other time new some"
).split()
GRAMMARS = (
    ('root ::= "{" [0-9] [0-9] [0-9] "}"', r"\{\d{3}\}"),
    ('root ::= ("yes" | "no") "."', r"(yes|no)\."),
    ('root ::= [a-z]+ ":" [0-9]+', r"[a-z]+:[0-9]+"),
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@dataclass(frozen=True)
class LoadOptions:
    """Options of the load."""

    model: Path
    streams: int = 32
    minutes: float = 5.0
    seed: int = 0
    url: str | None = None  # None: a server is started
    api_key: str = API_KEY
    plan: Path | None = None
    sparsity: str = "auto"
    parallel: int = 8
    context: int = 1024  # tokens of each request
    queue_limit: int = 40
    max_scored: int | None = None  # None: all answers


@dataclass
class Choice:
    """One text of an answer, as far as it came."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[tuple[bytes, float]] = field(default_factory=list)  # (text, log-probability)
    times: list[float] = field(default_factory=list)  # of the pieces of a stream


@dataclass
class Sent:
    """A request for text, and what came back."""

    path: str
    body: dict[str, Any]
    prompts: list[tuple[int, ...]]  # tokens; each has body["n"] choices
    pattern: str | None = None  # of a grammar: what a text that ended looks like
    start_s: float = 0.0
    choices: list[Choice] = field(default_factory=list)
    usage: dict[str, Any] | None = None

    @property
    def n(self) -> int:
        return self.body.get("n", 1)


@dataclass
class Sample:
    """The server's process at one time."""

    time_s: float
    anonymous_mib: float
    n_threads: int
    n_files: int


@dataclass
class Report:
    """What the load found."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)  # with at least one token
    seeded: dict[str, list[str]] = field(default_factory=lambda: collections.defaultdict(list))
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0
    gaps: list[float] = field(default_factory=list)  # one a token: best logit - chosen logit, of greedy answers
    errors: list[float] = field(default_factory=list)  # |log-probability - that of the server|
    is_exact: bool = False

    def fail(self, text: str) -> None:
        self.outcomes["FAILED"] += 1
        self.failures.append(text)


# -- what is asked ---------------------------------------------------------------------------------------------------


class Vocabulary:
    """The model's tokens, for prompts and answers; needs no weights."""

    def __init__(self, path: Path) -> None:
        with suppress_stdout_stderr(disable=False):  # llama.cpp warns of a context that is never used
            self.llama = Llama(path, vocab_only=True, verbose=False)
        vocab = self.llama._model.vocab
        buffer = ctypes.create_string_buffer(1024)
        self.ids: dict[bytes, int] = {}
        # No text, or that of another token: a text would have several readings with them, so they are never chosen.
        self.ambiguous: list[int] = []
        self.ends = {i for i in range(self.llama.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, i)}
        for i in range(self.llama.n_vocab()):
            n = llama_cpp.llama_token_to_piece(vocab, i, buffer, len(buffer), 0, False)
            text = buffer.raw[: max(n, 0)]
            if i in self.ends:
                continue
            if not text or text in self.ids:
                self.ambiguous.append(i)
            else:
                self.ids[text] = i
        self.bias = {str(i): -100.0 for i in self.ambiguous}
        self.chars_per_token = len(" ".join(WORDS)) / len(self.llama.tokenize(" ".join(WORDS).encode()))

    def prompt_of_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """The prompt that llama_cpp makes of a chat."""

        class Taken(Exception):
            pass

        class Taker:
            def __getattr__(_, name: str) -> Any:
                return getattr(self.llama, name)

            def create_completion(_, prompt: list[int], **options: Any) -> None:
                raise Taken(prompt)

        name = self.llama.chat_format
        handler = self.llama._chat_handlers.get(name) or llama_cpp.llama_chat_format.get_chat_completion_handler(name)
        try:
            handler(llama=Taker(), messages=messages)
        except Taken as taken:
            return tuple(taken.args[0])
        raise AssertionError("the handler asked for no completion")


class Chooser:
    """Random requests of one stream.

    Args:
        name: of the stream; with the seed it decides everything.
        seed: of the whole load.
        options: of the load.
        vocabulary: of the model.
    """

    def __init__(self, name: str, seed: int, options: LoadOptions, vocabulary: Vocabulary) -> None:
        self.random = random.Random(f"{seed} {name}")
        self._options = options
        self._vocabulary = vocabulary
        common = random.Random(f"{seed} common")
        self._prefixes = [self._text(common, common.randint(20, options.context // 4)) for _ in range(6)]
        self._seeded = [(self._text(common, 20), common.randrange(2**31)) for _ in range(3)]
        self.texts_to_embed = [self._text(common, common.randint(1, 60)) for _ in range(6)]

    def _text(self, chance: random.Random, n_tokens: int) -> str:
        n_chars = int(n_tokens * self._vocabulary.chars_per_token)
        text = " ".join(chance.choice(WORDS) for _ in range(n_chars // 2 + 1))
        return text[: max(n_chars, 1)].strip() or "a"

    def text(self) -> str:
        """A prompt, often with the beginning of another one."""
        chance = self.random
        tail = self._text(chance, chance.randint(1, self._options.context // 8))
        if chance.random() < 0.25:
            return tail
        prefix = chance.choice(self._prefixes)
        return f"{prefix[: chance.choice((len(prefix), len(prefix), chance.randint(1, len(prefix))))]} {tail}"

    def request(self) -> Sent:
        """Any request for text."""
        chance = self.random
        if chance.random() < 0.06:
            text, seed = chance.choice(self._seeded)
            body: dict[str, Any] = {"prompt": text, "seed": seed, "temperature": 0.9, "max_tokens": 24}
            return self._sent("/v1/completions", body, [text])
        body = {"max_tokens": chance.choice((1, 2, 8, 16, 24, 48, 100)), "logit_bias": self._vocabulary.bias}
        if chance.random() < 0.65:
            body["temperature"] = 0
        else:
            body.update(temperature=chance.choice((0.5, 1.0, 1.5)), seed=chance.randrange(2**31))
        if chance.random() < 0.6:
            body["stream"] = True
            if chance.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        if chance.random() < 0.2:
            body["n"] = chance.randint(2, 3)
        if chance.random() < 0.2:
            body["stop"] = chance.choice((["e"], [" the", "xy"], ["\n\n", "qq", "."]))
        if chance.random() < 0.2:
            body["user"] = chance.choice(("ada", "bob"))
        pattern = None
        is_chat = chance.random() < 0.4
        if chance.random() < 0.15:
            body.pop("stop", None)
            if is_chat and chance.random() < 0.5:
                body["response_format"] = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
            else:
                body["grammar"], pattern = chance.choice(GRAMMARS)
        if chance.random() < 0.75:
            body["logprobs"] = True if is_chat else 0
        if is_chat:
            messages = [{"role": "system", "content": chance.choice(self._prefixes)[:200]}]
            for _ in range(chance.randint(0, 2)):
                messages += [
                    {"role": "user", "content": self._text(chance, 10)},
                    {"role": "assistant", "content": self._text(chance, 10)},
                ]
            body["messages"] = [*messages, {"role": "user", "content": self._text(chance, chance.randint(1, 30))}]
            prompts = [self._vocabulary.prompt_of_chat(body["messages"])]
            return Sent("/v1/chat/completions", body, prompts, pattern)
        texts = [self.text() for _ in range(chance.choice((1, 1, 1, 1, 1, 2)))]
        sent = self._sent("/v1/completions", body, texts, pattern)
        if chance.random() < 0.3:
            body["prompt"] = [list(prompt) for prompt in sent.prompts]
        else:
            body["prompt"] = texts if len(texts) > 1 else texts[0]
        return sent

    def too_many(self) -> Sent:
        """More texts at once than the queue holds."""
        texts = [self._text(self.random, 5) for _ in range(64)]
        return self._sent("/v1/completions", {"prompt": texts, "max_tokens": 4, "temperature": 0}, texts)

    def _sent(self, path: str, body: dict[str, Any], texts: Sequence[str], pattern: str | None = None) -> Sent:
        prompts = [tuple(self._vocabulary.llama.tokenize(text.encode(), special=True)) for text in texts]
        return Sent(path, body, prompts, pattern)


# Bodies that must be refused: (path, body, statuses).
WRONG_BODIES: tuple[tuple[str, Any, tuple[int, ...]], ...] = (
    ("/v1/completions", b'{"prompt": "a", ', (400,)),
    ("/v1/completions", b"[1, 2]", (400,)),
    ("/v1/completions", b"\xff\xfe\x00", (400,)),
    ("/v1/completions", b'{"prompt": ' + b"[" * 20000, (400,)),
    ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', (400,)),
    ("/v1/completions", b"", (400,)),
    ("/v1/completions", b" " * (5 * 2**20), (413,)),
    ("/v1/completions", {}, (400,)),
    ("/v1/completions", {"prompt": 5}, (400,)),
    ("/v1/completions", {"prompt": "a", "max_tokens": "many"}, (400,)),
    ("/v1/completions", {"prompt": "a", "temperature": "hot"}, (400,)),
    ("/v1/completions", {"prompt": "a", "n": 0}, (400,)),
    ("/v1/completions", {"prompt": "a", "n": 10**9}, (400,)),
    ("/v1/completions", {"prompt": "a", "stop": [1]}, (400,)),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}, (400,)),
    ("/v1/completions", {"prompt": "a", "grammar": "root = 1"}, (400,)),
    ("/v1/completions", {"prompt": "a", "temprature": 1}, (400,)),
    ("/v1/completions", {"prompt": [10**9]}, (400,)),
    ("/v1/completions", {"prompt": "a " * 200000}, (400,)),
    ("/v1/completions", {"prompt": "a", "model": "another"}, (404,)),
    ("/v1/chat/completions", {"messages": "hi"}, (400,)),
    ("/v1/chat/completions", {"messages": []}, (400,)),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "a"}]}, (400,)),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}},
        (400,),
    ),
    ("/v1/embeddings", {"input": ""}, (400,)),
    ("/v1/embeddings", {"input": []}, (400,)),
    ("/v1/nothing", {}, (404,)),
    ("/health", {}, (405,)),
    ("/powerinfer/sparsity", {"sparsity": "nonsense"}, (400,)),
)


# -- the streams -----------------------------------------------------------------------------------------------------


class Load:
    """Streams of requests on one server.

    Args:
        options: of the load.
        url: of the server.
        vocabulary: of the model.
        report: what is found goes there.
    """

    def __init__(self, options: LoadOptions, url: str, vocabulary: Vocabulary, report: Report) -> None:
        self._options = options
        self._url = url
        self._vocabulary = vocabulary
        self._report = report
        self._end_s = 0.0
        self._ssl = ssl.create_default_context()  # once: it takes longer than a request
        self._embeddings: dict[str, np.ndarray] = {}

    def _client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self._options.api_key}"}
        return httpx.AsyncClient(base_url=self._url, headers=headers, timeout=WAIT_S, verify=self._ssl)

    async def run(self, minutes: float) -> None:
        """Hold the load; each stream ends with its last answer."""
        start_s = time.monotonic()
        self._end_s = start_s + 60 * minutes
        is_over = threading.Event()
        health = threading.Thread(target=self._ask_health, args=(is_over,))
        health.start()
        try:
            await asyncio.gather(*(self._run_stream(i) for i in range(self._options.streams)))
        finally:
            is_over.set()
            await asyncio.to_thread(health.join)
        self._report.duration_s = time.monotonic() - start_s
        try:
            await self._check_rest()
        except httpx.HTTPError as error:
            self._report.fail(f"after the load: {type(error).__name__} {error}")

    async def _run_stream(self, i: int) -> None:
        chooser = Chooser(f"stream {i}", self._options.seed, self._options, self._vocabulary)
        chance = chooser.random
        actions = (self._ask, self._leave, self._ask_wrongly, self._break_http, self._embed, self._ask_too_much)
        async with self._client() as client:
            while time.monotonic() < self._end_s and len(self._report.failures) < MAX_FAILURES:
                action = chance.choices(actions, (62, 14, 8, 6, 8, 2))[0]
                try:
                    await action(client, chooser)
                except (httpx.HTTPError, OSError) as error:
                    self._report.fail(f"{action.__name__}: {type(error).__name__} {error}")
                await asyncio.sleep(chance.choice((0, 0, 0.01, 0.1)))

    async def _ask(self, client: httpx.AsyncClient, chooser: Chooser) -> None:
        await self._send(client, chooser.request())

    async def _ask_too_much(self, client: httpx.AsyncClient, chooser: Chooser) -> None:
        await self._send(client, chooser.too_many())

    async def _leave(self, client: httpx.AsyncClient, chooser: Chooser) -> None:
        """The client goes away at any moment."""
        sent = chooser.request()
        chance = chooser.random
        n_pieces = chance.randint(1, 12) if sent.body.get("stream") and chance.random() < 0.6 else None
        wait_s = None if n_pieces else chance.choice((0.0, 0.002, 0.02, chance.random()))
        async with self._client() as own:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._send(own, sent, n_pieces, is_left=True), wait_s)
        self._report.outcomes["client left"] += 1
        if any(choice.tokens for choice in sent.choices):
            self._report.sent.append(sent)

    async def _send(
        self, client: httpx.AsyncClient, sent: Sent, n_pieces: int | None = None, *, is_left: bool = False
    ) -> None:
        """Send a request and read its answer, or only the first pieces of it."""
        sent.choices = [Choice() for _ in range(len(sent.prompts) * sent.n)]
        sent.start_s = time.monotonic()
        async with client.stream("POST", sent.path, json=sent.body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode()
                if answer.status_code == 429 and "retry-after" in answer.headers:
                    self._report.outcomes["queue full (429)"] += not is_left
                    await asyncio.sleep(RETRY_S)
                else:
                    self._report.fail(f"{sent.path}: status {answer.status_code}: {text[:300]}")
                return
            if sent.body.get("stream"):
                async for part in _events(answer):
                    if "error" in part:
                        self._report.fail(f"{sent.path}: a stream ended with {part['error']}")
                        return
                    _add_part(sent, part)
                    if n_pieces is not None:
                        n_pieces -= 1
                        if n_pieces == 0:
                            return
            else:
                _add_part(sent, json.loads(await answer.aread()))
        if not is_left:
            self._note_answer(sent)

    def _note_answer(self, sent: Sent) -> None:
        report = self._report
        wrong = check_answer(sent)
        if wrong:
            report.fail(f"{sent.path}: {wrong}; the body was {json.dumps(sent.body)[:300]}")
            return
        report.outcomes["answered, streamed" if sent.body.get("stream") else "answered"] += 1
        if "seed" in sent.body and "logit_bias" not in sent.body:
            report.seeded[sent.body["prompt"]].append(sent.choices[0].text)
        if any(choice.tokens for choice in sent.choices):
            report.sent.append(sent)
        if sent.body.get("stream"):
            times = [choice.times for choice in sent.choices if choice.times]
            if times:
                report.first_s.append(min(one[0] for one in times) - sent.start_s)
            for one in times:
                report.between_s += np.diff(one).tolist()

    async def _ask_wrongly(self, client: httpx.AsyncClient, chooser: Chooser) -> None:
        """A request that is refused."""
        chance = chooser.random
        if chance.random() < 0.2:
            headers, status = chance.choice(
                (
                    ({"Authorization": "Bearer wrong"}, 401),
                    ({"Authorization": "\xff\xfe"}, 401),
                    ({"Host": "example.org"}, 403),
                    ({"Content-Type": "text/plain"}, 400),
                )
            )
            body = json.dumps({"prompt": "a"}).encode()
            headers = {"Content-Type": "application/json", **headers}
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            answer = await client.post("/v1/completions", content=body, headers=raw)
            expected: tuple[int, ...] = (status,)
        else:
            path, body, expected = chance.choice(WRONG_BODIES)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            try:
                answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
            except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
                if expected != (413,):
                    raise
                self._report.outcomes["refused, connection closed"] += 1  # before all of it was sent
                return
        if answer.status_code not in expected or "message" not in answer.json()["error"]:
            self._report.fail(
                f"{expected} expected, {answer.status_code} {answer.text[:200]}; the body was {body!r:.200}"
            )
        else:
            self._report.outcomes[f"refused ({answer.status_code})"] += 1

    async def _break_http(self, client: httpx.AsyncClient, chooser: Chooser) -> None:
        """Bytes that aren't HTTP, or end early, or come slowly."""
        chance = chooser.random
        host, port = httpx.URL(self._url).host, httpx.URL(self._url).port
        body = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {self._options.api_key}\r\n"
            f"Content-Type: application/json\r\nConnection: close\r\n"
        ).encode()
        length = b"Content-Length: %d\r\n\r\n"
        kind, parts = chance.choice(
            (
                ("garbage", [chance.randbytes(chance.randint(1, 3000))]),
                ("headers cut", [head[: chance.randint(1, len(head))]]),
                ("body cut", [head, length % len(body), body[: chance.randint(0, len(body) - 1)]]),
                ("body too short", [head, length % (len(body) + 1000), body]),
                ("chunk size", [head, b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", body]),
                ("two lengths", [head, b"Content-Length: 3\r\n", length % len(body), body]),
                ("header too long", [head, b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n"]),
                ("slow", [head, length % len(body), *(body[i : i + 4] for i in range(0, len(body), 4))]),
            )
        )
        reader, writer = await asyncio.open_connection(host, port)
        received = b""
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                if kind == "slow":
                    await asyncio.sleep(0.2)
            wait_s = WAIT_S if kind == "slow" else chance.choice((0.0, 0.5))
            received = await asyncio.wait_for(reader.read(65536), wait_s)
        except (asyncio.TimeoutError, ConnectionError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        status = received.split(b" ")[1].decode() if received.startswith(b"HTTP/1.1 ") else "no answer"
        if (kind == "slow" and status not in ("200", "429")) or (kind != "slow" and status[0] not in "4n"):
            self._report.fail(f"HTTP with {kind}: {received[:200]!r}")
        else:
            self._report.outcomes["broken HTTP" if kind != "slow" else "slow body"] += 1

    async def _embed(self, client: httpx.AsyncClient, chooser: Chooser) -> None:
        """Embeddings, which are the same each time."""
        texts = chooser.random.sample(chooser.texts_to_embed, chooser.random.randint(1, 3))
        answer = await client.post("/v1/embeddings", json={"input": texts})
        if answer.status_code == 429:
            self._report.outcomes["queue full (429)"] += 1
            await asyncio.sleep(RETRY_S)
            return
        if answer.status_code != 200:
            self._report.fail(f"/v1/embeddings: status {answer.status_code}: {answer.text[:300]}")
            return
        tolerance = SCORE_TOLERANCE if self._report.is_exact else 0.1
        for text, item in zip(texts, answer.json()["data"]):
            row = np.array(item["embedding"])
            if np.abs(self._embeddings.setdefault(text, row) - row).max() > tolerance:
                self._report.fail("/v1/embeddings: one text has two embeddings")
                return
        self._report.outcomes["embeddings"] += 1

    def _ask_health(self, is_over: threading.Event) -> None:
        """In a thread: the streams' turns in the event loop don't count."""
        while not is_over.wait(0.25):
            start_s = time.monotonic()
            try:
                answer = httpx.get(f"{self._url}/health", timeout=WAIT_S, verify=self._ssl)
                if answer.status_code != 200:
                    self._report.fail(f"/health: status {answer.status_code}: {answer.text[:200]}")
                self._report.health_s.append(time.monotonic() - start_s)
            except httpx.HTTPError as error:
                self._report.fail(f"/health: {type(error).__name__} {error}")

    async def _check_rest(self) -> None:
        """Nothing runs on: what clients left was cancelled."""
        async with self._client() as client:
            for _ in range(100):
                stats = (await client.get("/powerinfer/stats")).json()
                if stats["n_running"] == stats["n_waiting"] == 0:
                    break
                await asyncio.sleep(0.1)
            else:
                self._report.fail(
                    f"{stats['n_running']} requests run and {stats['n_waiting']} wait after the last answer"
                )
            self._report.stats = stats


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The parts of a stream, which must end with [DONE]."""
    is_done = False
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            is_done = True
        elif line:
            assert line.startswith("data: ") and not is_done, line
            yield json.loads(line[6:])
    if not is_done:
        raise httpx.RemoteProtocolError("a stream ended without [DONE]")


def _add_part(sent: Sent, part: dict[str, Any]) -> None:
    """Note a whole answer, or a part of a stream."""
    now = time.monotonic()
    if part.get("usage"):
        sent.usage = part["usage"]
    for new in part["choices"]:
        choice = sent.choices[new["index"]]
        message = new.get("delta") or new.get("message") or new
        text = message.get("text") or message.get("content") or ""
        choice.text += text
        choice.finish_reason = new["finish_reason"] or choice.finish_reason
        logprobs = new.get("logprobs")
        if logprobs and "content" in logprobs:
            choice.tokens += [(_token_bytes(item["token"]), item["logprob"]) for item in logprobs["content"]]
        elif logprobs:
            choice.tokens += zip(map(_token_bytes, logprobs["tokens"]), logprobs["token_logprobs"])
        if text:
            choice.times.append(now)


def _token_bytes(text: str) -> bytes:
    if text.startswith("bytes:\\x"):
        return bytes.fromhex(text[6:].replace("\\x", ""))
    return text.encode()


def check_answer(sent: Sent) -> str | None:
    """What is wrong with a whole answer, as far as it says itself."""
    max_tokens = sent.body["max_tokens"]
    for choice in sent.choices:
        if choice.finish_reason not in ("stop", "length"):
            return f"finish_reason {choice.finish_reason!r}"
        if any(stop in choice.text for stop in sent.body.get("stop", ())):
            return f"a stop string in {choice.text!r}"
        if choice.finish_reason == "stop":
            if sent.pattern and not re.fullmatch(sent.pattern, choice.text):
                return f"{choice.text!r} isn't of grammar {sent.pattern}"
            if "response_format" in sent.body:
                try:
                    json.loads(choice.text)
                except ValueError:
                    return f"{choice.text!r} isn't JSON"
        if "logprobs" in sent.body:
            text = codecs.getincrementaldecoder("utf-8")("ignore").decode(b"".join(token for token, _ in choice.tokens))
            if not choice.text.startswith(text) or (choice.finish_reason == "length" and text != choice.text):
                return f"text {choice.text!r}, but tokens {text!r}"
            if choice.finish_reason == "length" and len(choice.tokens) != max_tokens:
                return f"{len(choice.tokens)} tokens of {max_tokens}, and finish_reason length"
    usage = sent.usage
    if usage is not None:
        if usage["prompt_tokens"] != sum(map(len, sent.prompts)):
            return f"prompt_tokens {usage['prompt_tokens']} for prompts of {[len(prompt) for prompt in sent.prompts]}"
        if usage["completion_tokens"] > max_tokens * len(sent.choices):
            return f"completion_tokens {usage['completion_tokens']} of {max_tokens} x {len(sent.choices)}"
    elif "stream_options" in sent.body or not sent.body.get("stream"):
        return "no usage"
    return None


# -- answers are scored again ----------------------------------------------------------------------------------------


def score(options: LoadOptions, vocabulary: Vocabulary, report: Report) -> None:
    """Compare every token with what the model says of it alone."""
    answers: dict[tuple[tuple[int, ...], tuple[bytes, ...]], tuple[bool, list[float]]] = {}
    for sent in report.sent:
        is_greedy = sent.body["temperature"] == 0 and not {"grammar", "response_format"} & sent.body.keys()
        for i, choice in enumerate(sent.choices):
            if choice.tokens:
                key = (sent.prompts[i // sent.n], tuple(token for token, _ in choice.tokens))
                answers[key] = (is_greedy, [logprob for _, logprob in choice.tokens])
    chosen = list(answers.items())
    if options.max_scored is not None and len(chosen) > options.max_scored:
        chosen = random.Random(options.seed).sample(chosen, options.max_scored)
    cache = {"type_k": 0, "type_v": 0} if report.is_exact else {}
    with Llama(
        options.model,
        plan=options.plan,
        sparsity=options.sparsity,
        n_ctx=options.context,
        logits_all=True,
        verbose=False,
        **cache,
    ) as alone:
        # Some modes compute a token of a prompt otherwise than one that is generated.
        is_lossy = any(mode in ("predicted", "threshold") for mode, _ in alone.stats().modes)
        for (prompt, texts), (is_greedy, logprobs) in rich.progress.track(chosen, "scoring", transient=True):
            unknown = [text for text in texts if text not in vocabulary.ids]
            if unknown:
                report.fail(f"an answer has token {unknown[0]!r}, which the model doesn't have or mustn't choose")
                continue
            tokens = [vocabulary.ids[text] for text in texts]
            alone.reset()
            alone.eval(prompt)
            for part in [tokens[i : i + 1] for i in range(len(tokens) - 1)] if is_lossy else [tokens[:-1]]:
                alone.eval(part)
            logits = alone.scores[len(prompt) - 1 : len(prompt) + len(tokens) - 1].astype(np.float64)
            of_chosen = logits[np.arange(len(tokens)), tokens]
            log_sums = np.logaddexp.reduce(logits, axis=1)
            report.errors += np.abs(of_chosen - log_sums - logprobs).tolist()
            if is_greedy:
                logits[:, vocabulary.ambiguous] = -np.inf
                report.gaps += (logits.max(1) - of_chosen).tolist()


# -- the server's process --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def start_server(options: LoadOptions, is_exact: bool, report: Report) -> Iterator[tuple[str, int]]:
    """`powerinfer serve` on a free port.

    Yields:
        Its URL and process id.
    """
    command = [
        os.path.join(sysconfig.get_path("scripts"), "powerinfer"), "serve", str(options.model), "--port", "0", "--api-key", options.api_key,
        "--parallel", str(options.parallel), "--ctx-size", str(options.context), "--queue-limit", str(options.queue_limit),
        "--sparsity", options.sparsity, *(("--plan", str(options.plan)) if options.plan else ()),
        *(F32_CACHE if is_exact else ()),
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            line = server.stdout.readline()
            if not line.startswith("listening on "):
                log.seek(0)
                raise SystemExit(f"{' '.join(command)}: it didn't start:\n{line}{log.read()}")
            yield line.split()[-1], server.pid
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            try:
                code: int | str = server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
                code = "killed: it didn't end within a minute"
            server.stdout.close()
            log.seek(0)
            text = log.read()
        if code != 0:
            report.fail(f"the server's exit code: {code}")
        if "Traceback" in text:
            report.fail(f"the server's log:\n{text[text.index('Traceback') :][:3000]}")


def sample(pid: int, start_s: float) -> Sample:
    """What the process holds now."""
    status = Path(f"/proc/{pid}/status").read_text()
    value = {name: int(re.search(rf"{name}:\s+(\d+)", status).group(1)) for name in ("RssAnon", "Threads")}
    n_files = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(time.monotonic() - start_s, value["RssAnon"] / 1024, value["Threads"], n_files)


async def hold(load: Load, options: LoadOptions, pid: int | None, report: Report) -> None:
    """Hold the load, and watch the server's process meanwhile."""
    start_s = time.monotonic()

    async def watch() -> None:
        with contextlib.suppress(OSError):  # the server ended: its exit code says so
            while True:
                report.samples.append(sample(pid, start_s))
                await asyncio.sleep(0.5)

    watcher = asyncio.create_task(watch()) if pid is not None else None
    await load.run(options.minutes)
    if watcher is not None:
        watcher.cancel()
        with contextlib.suppress(OSError):
            await check_files(pid, start_s, report)


async def check_files(pid: int, start_s: float, report: Report) -> None:
    """The connections' files are closed, soon."""
    n_before = report.samples[0].n_files
    for _ in range(50):
        after = sample(pid, start_s)
        if after.n_files <= n_before + 1:
            break
        await asyncio.sleep(0.1)
    else:
        report.fail(f"the server has {after.n_files} open files after the load, {n_before} before")
    report.samples.append(after)


def growth(samples: Sequence[Sample]) -> float:
    """MiB a minute by which the server's memory grew in the second half: the median of all pairs (Theil and Sen's).

    A request of megabytes that was there at a sample doesn't count as growth.
    """
    late = samples[len(samples) // 2 :]
    minutes, memory = np.array([(one.time_s / 60, one.anonymous_mib) for one in late]).T
    i, j = np.triu_indices(len(late), 1)
    return float(np.median((memory[j] - memory[i]) / (minutes[j] - minutes[i])))


def run_load(options: LoadOptions) -> Report:
    """Start a server, hold the load and check everything.

    Args:
        options: of the load.

    Returns:
        What was found; nothing failed when its `failures` are empty.
    """
    report = Report()
    tensors = gguf.GGUFReader(options.model).tensors
    report.is_exact = all(tensor.tensor_type == gguf.GGMLQuantizationType.F32 for tensor in tensors)
    vocabulary = Vocabulary(options.model)
    with contextlib.ExitStack() as stack:
        url, pid = options.url, None
        if url is None:
            url, pid = stack.enter_context(start_server(options, report.is_exact, report))
        asyncio.run(hold(Load(options, url.rstrip("/"), vocabulary, report), options, pid, report))
    score(options, vocabulary, report)
    check_figures(options, report)
    return report


def check_figures(options: LoadOptions, report: Report) -> None:
    """What only all answers together say."""
    if report.is_exact:
        for name, values in (("logit below the best one", report.gaps), ("log-probability", report.errors)):
            n_wrong = sum(value > SCORE_TOLERANCE for value in values)
            if n_wrong:
                report.fail(f"{name}: {n_wrong} of {len(values)} tokens differ by up to {max(values):.4f}")
    if not report.gaps or not report.errors:
        report.fail("no answer could be scored")
    if len(report.samples) > 8:
        late = report.samples[len(report.samples) // 2 :]
        most = max(MAX_GROWTH_MIB, MAX_GROWTH_SHARE * late[0].anonymous_mib)
        if options.minutes >= MIN_GROWTH_MINUTES and growth(report.samples) > most:
            report.fail(f"the server's memory grew by {growth(report.samples):.2f} MiB a minute")
        n_early = max(one.n_threads for one in report.samples[: -len(late)])
        n_late = max(one.n_threads for one in late)
        if n_late > 1.5 * n_early:
            report.fail(f"the server's threads grew from {n_early} to {n_late}")


# -- the table -------------------------------------------------------------------------------------------------------


def _percentiles(values: Sequence[float], scale: float = 1e3, unit: str = "ms") -> str:
    if not values:
        return "-"
    return " / ".join(f"{np.percentile(values, p) * scale:.1f}" for p in (50, 95)) + f" {unit} (p50 / p95)"


def table(options: LoadOptions, report: Report) -> rich.table.Table:
    """Everything that was found."""
    shown = rich.table.Table(
        title=f"{options.model.name}: {options.streams} streams, {report.duration_s:.0f} s, seed {options.seed}"
    )
    shown.add_column("what")
    shown.add_column("found", justify="right")
    for name, n in sorted(report.outcomes.items()):
        shown.add_row(name, str(n))
    shown.add_section()
    if report.stats:
        stats = report.stats
        n_cached, n_prompt = stats["n_cached_tokens"], stats["n_prompt_tokens"]
        shown.add_row("computed by", f"{stats['computed_by']}, {stats['sparsity']}")
        shown.add_row("tokens generated", f"{stats['n_generated_tokens']}")
        shown.add_row("tokens/s generated", f"{stats['n_generated_tokens'] / report.duration_s:.1f}")
        shown.add_row("prompt tokens/s computed", f"{n_prompt / report.duration_s:.1f}")
        shown.add_row("prompt tokens from the cache", f"{n_cached / max(n_cached + n_prompt, 1):.0%}")
    shown.add_row("time to the first text", _percentiles(report.first_s))
    shown.add_row("time between texts of a stream", _percentiles(report.between_s))
    shown.add_row("/health", f"{_percentiles(report.health_s)}, worst {max(report.health_s, default=0) * 1e3:.1f} ms")
    if report.samples:
        first, last = report.samples[0], report.samples[-1]
        threads = [one.n_threads for one in report.samples]
        shown.add_section()
        shown.add_row("server's memory, start / end", f"{first.anonymous_mib:.1f} / {last.anonymous_mib:.1f} MiB")
        shown.add_row("its growth in the second half", f"{growth(report.samples):+.2f} MiB/min")
        shown.add_row("its threads, start / most / end", f"{threads[0]} / {max(threads)} / {threads[-1]}")
        files = [one.n_files for one in report.samples]
        shown.add_row("its open files, start / most / end", f"{files[0]} / {max(files)} / {files[-1]}")
    shown.add_section()
    for name, values in (
        ("greedy token: below the best logit", report.gaps),
        ("token's log-probability: off by", report.errors),
    ):
        if values:
            shown.add_row(f"{name}, tokens", str(len(values)))
            shown.add_row(
                f"{name}, p50 / p99 / worst",
                f"{np.median(values):.1e} / {np.percentile(values, 99):.1e} / {max(values):.1e}",
            )
    n_seeded = sum(map(len, report.seeded.values()))
    if n_seeded:
        n_same = sum(collections.Counter(texts).most_common(1)[0][1] for texts in report.seeded.values())
        shown.add_row("same seed, same text", f"{n_same} of {n_seeded}")
    return shown


def print_report(options: LoadOptions, report: Report) -> None:
    """The table, and the first failures."""
    console = rich.console.Console(width=110)
    console.print(table(options, report))
    for text in report.failures[:20]:
        console.print(f"FAILED: {text}", markup=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line.

    Returns:
        The exit code.
    """
    defaults = LoadOptions
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("model", type=Path, help="the GGUF; with --url the one that the server has")
    parser.add_argument("--streams", type=int, default=defaults.streams, help="requests at the same time")
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="how long")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the requests")
    parser.add_argument("--url", help="of a server that runs already; its memory isn't watched")
    parser.add_argument("--api-key", default=defaults.api_key, help="of that server")
    parser.add_argument("--plan", type=Path, help="as for powerinfer serve")
    parser.add_argument("--sparsity", default=defaults.sparsity, help="as for powerinfer serve")
    parser.add_argument("--parallel", type=int, default=defaults.parallel, help="as for powerinfer serve")
    parser.add_argument("--context", type=int, default=defaults.context, help="tokens of each request")
    parser.add_argument("--queue-limit", type=int, default=defaults.queue_limit, help="as for powerinfer serve")
    parser.add_argument("--max-scored", type=int, help="answers that are scored again, of all")
    options = LoadOptions(**vars(parser.parse_args(arguments)))
    report = run_load(options)
    print_report(options, report)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
