"""`powerinfer serve` as its clients see it: the official openai client, plain HTTP, and connections that break."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import prometheus_client.parser
import pytest
import uvicorn
from hub_server import hub_server

from powerinfer_py import Llama, cli
from powerinfer_py.errors import OptionError
from powerinfer_py.serving import app as app_module
from powerinfer_py.serving import protocol
from powerinfer_py.serving.app import ServeOptions, create_app
from powerinfer_py.serving.completions import MAX_GRAMMAR_DEPTH, check_grammar
from powerinfer_py.serving.engine import Engine, EngineOptions, load_model

# F32 keys and values, and a fixed number of threads: an answer doesn't depend on what else is in the batch.
EXACT_OPTIONS = {"type_k": 0, "type_v": 0, "flash_attn": False, "n_threads": 2, "n_threads_batch": 2, "verbose": False}
N_CTX = 1024  # all that tiny models have: seconds of text
WAIT_S = 120
# Several tokens each, also within a character: "wai" in Chinese, a family, sharp s, notes.
SPLIT_TEXT = "\u6b6a \U0001f468\u200d\U0001f469\u200d\U0001f467 \u00df\u266c"
# What a tiny model writes until its context is full: never its EOS.
LONG = {"prompt": "a", "max_tokens": N_CTX, "logit_bias": {"2": -100}, "seed": 1}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
            "required": ["town", "days"],
        },
    },
}
USER = [{"role": "user", "content": "How is the weather in Paris?"}]


class Server:
    """An app that listens on a free port, in a thread."""

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        self.engine = engine
        self.app = create_app(engine, options)
        self._server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="error", timeout_graceful_shutdown=5))
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        # The certificates that aren't read save 0.2 s.
        http = httpx.Client(verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, http_client=http)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **options)

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **options})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@contextlib.contextmanager
def serve(
    path: Path, n_parallel: int = 4, engine_options: EngineOptions | None = None, **options: Any
) -> Iterator[Server]:
    """A model behind HTTP: options of ServeOptions, a few of Llama, and step_s, seconds that each decode takes longer."""
    model_options = {name: options.pop(name) for name in ("chat_format", "plan") if name in options}
    step_s = options.pop("step_s", 0.0)
    with (
        load_model(path, n_parallel, N_CTX, **EXACT_OPTIONS, **model_options) as llama,
        Engine(llama, engine_options or EngineOptions()) as engine,
    ):
        decode = engine._decode
        engine._decode = lambda: (time.sleep(step_s), decode())
        server = Server(engine, ServeOptions(**options))
        try:
            yield server
        finally:
            server.app.state.serving.stop()
            server.stop()


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(tied=True)


@pytest.fixture(scope="module")
def tiny(model_path: Path) -> Iterator[Server]:
    with serve(model_path, alias="tiny") as server:
        yield server


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[Server]:
    with serve(smollm2, alias="smol") as server:
        yield server


@pytest.fixture
def narrow(model_path: Path) -> Iterator[Server]:
    """One request runs, for seconds if it is long, and one may wait."""
    with serve(model_path, 1, EngineOptions(queue_limit=1), step_s=0.005) as server:
        yield server


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_idle(server: Server) -> bool:
    now = server.engine.snapshot()
    return now.n_running == now.n_waiting == 0


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, which has all of OpenAI's fields."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def long_stream(server: Server) -> Any:
    """A stream that goes on for as long as the context does; its first chunk has come."""
    stream = server.client().completions.create(model=name_of(server), stream=True, **LONG)
    next(stream)
    return stream


def name_of(server: Server) -> str:
    return httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]


def raw_post(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """A request on a connection of its own."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return connection


# -- completions -----------------------------------------------------------------------------------------------------


def test_models_are_listed_and_others_dont_exist(tiny: Server) -> None:
    client = tiny.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    for call in (
        lambda: client.models.retrieve("gpt-4"),
        lambda: client.completions.create(model="gpt-4", prompt="a"),
        lambda: client.embeddings.create(model="gpt-4", input="a"),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            call()
        assert raised.value.code == "model_not_found"


def test_completion_is_that_of_llama(tiny: Server, model_path: Path) -> None:
    with Llama(model_path, n_ctx=N_CTX, **EXACT_OPTIONS) as llama:
        wanted = llama.create_completion("the an", max_tokens=20, temperature=0)
    answer = tiny.client().completions.create(model="tiny", prompt="the an", max_tokens=20, temperature=0)
    assert answer.choices[0].text == wanted["choices"][0]["text"]
    assert answer.choices[0].finish_reason == wanted["choices"][0]["finish_reason"] == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (wanted["usage"]["prompt_tokens"], 20)


def test_chat_is_that_of_llama(smol: Server, smollm2: Path) -> None:
    options = {"max_tokens": 12, "temperature": 0, "stop": ["!!"]}
    with Llama(smollm2, n_ctx=N_CTX, **EXACT_OPTIONS) as llama:
        wanted = llama.create_chat_completion(USER, **options)
    answer = smol.client().chat.completions.create(model="smol", messages=USER, **options)
    assert answer.choices[0].message.content == wanted["choices"][0]["message"]["content"]
    assert answer.usage.prompt_tokens == wanted["usage"]["prompt_tokens"]
    parts = [{"type": "text", "text": "How is the weather"}, {"type": "text", "text": " in Paris?"}]
    again = smol.client().chat.completions.create(
        model="smol", messages=[{"role": "user", "content": parts}], **options
    )
    assert again.choices[0].message.content == answer.choices[0].message.content


def test_stream_is_the_whole_in_parts(tiny: Server) -> None:
    options = {"model": "tiny", "prompt": "in the", "max_tokens": 30, "temperature": 0}
    whole = tiny.client().completions.create(**options)
    chunks = list(tiny.client().completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 30
    assert all(chunk.usage is None for chunk in tiny.client().completions.create(**options, stream=True))


def test_chat_stream_is_the_whole_in_parts(smol: Server) -> None:
    options = {"model": "smol", "messages": USER, "max_tokens": 12, "temperature": 0}
    whole = smol.client().chat.completions.create(**options)
    chunks = list(smol.client().chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_prompts_come_as_text_or_tokens_alone_or_many(tiny: Server) -> None:
    tokens = tiny.engine.llama.tokenize(b"the", special=True)
    text = tiny.complete("the", max_tokens=5)["choices"][0]["text"]
    for prompt, n_prompts in (("the", 1), (tokens, 1), (["the", "the"], 2), ([tokens, tokens], 2)):
        answer = tiny.complete(prompt, max_tokens=5, n=2)
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * n_prompts))
        assert answer["choices"][0]["text"] == answer["choices"][1]["text"] == text
        assert answer["usage"]["prompt_tokens"] == n_prompts * len(tokens)
        assert answer["usage"]["completion_tokens"] == 2 * n_prompts * 5
    streamed: dict[int, str] = {}
    for chunk in tiny.client().completions.create(
        model="tiny", prompt=["the", "an"], n=2, max_tokens=5, temperature=0, stream=True
    ):
        streamed[chunk.choices[0].index] = streamed.get(chunk.choices[0].index, "") + chunk.choices[0].text
    many = tiny.complete(["the", "an"], max_tokens=5, n=2)
    assert streamed == {choice["index"]: choice["text"] for choice in many["choices"]}


def test_equal_seeds_give_equal_texts(tiny: Server) -> None:
    def texts(**options: Any) -> list[str]:
        answer = tiny.client().completions.create(
            model="tiny", prompt="a", max_tokens=16, temperature=1, n=2, **options
        )
        return [choice.text for choice in answer.choices]

    first = texts(seed=5)
    assert first == texts(seed=5)
    assert first[0] != first[1]
    assert first[1] == texts(seed=6)[0]
    assert texts() != texts()
    assert texts(seed=-1) == texts(seed=-1)
    assert texts(seed=2**40) == texts(seed=2**40)


def test_nothing_of_a_stop_string_leaks(tiny: Server) -> None:
    text = tiny.complete("er", max_tokens=24)["choices"][0]["text"]
    begin = len(text) // 2
    stop = text[begin : begin + 5]
    found = text.index(stop)
    for stops, wanted in (
        (stop, text[:found]),
        ([stop + "never", stop], text[:found]),  # one begins as the other does
        ([text[found : found + 2], stop], text[: min(text.index(text[found : found + 2]), found)]),
        (text[:3], ""),  # at the begin
    ):
        for stream in (False, True):
            answer = tiny.client().completions.create(
                model="tiny", prompt="er", max_tokens=24, temperature=0, stop=stops, stream=stream
            )
            chunks = list(answer) if stream else [answer]
            assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
            assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_completions(tiny: Server, stream: bool) -> None:
    answer = tiny.client().completions.create(
        model="tiny", prompt="the", max_tokens=6, temperature=0, logprobs=3, stream=stream
    )
    found: dict[str, list[Any]] = {"tokens": [], "text_offset": [], "token_logprobs": [], "top_logprobs": []}
    for chunk in answer if stream else [answer]:
        for name, values in (chunk.choices[0].logprobs.model_dump() if chunk.choices[0].logprobs else {}).items():
            found[name] += values
    assert [len(values) for values in found.values()] == [6, 6, 6, 6]
    assert found["text_offset"][0] == len("the")
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values()) < 0


def test_logprobs_of_chats(smol: Server) -> None:
    answer = smol.client().chat.completions.create(
        model="smol", messages=USER, max_tokens=6, temperature=2, seed=3, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    assert [len(token.top_logprobs) for token in tokens] == [2] * 6
    bare = smol.client().chat.completions.create(model="smol", messages=USER, max_tokens=2, logprobs=True)
    assert [token.top_logprobs for token in bare.choices[0].logprobs.content] == [[], []]


def test_characters_split_over_tokens_arrive_whole(smol: Server) -> None:
    grammar = f'root ::= "{SPLIT_TEXT}"'
    options = {"model": "smol", "prompt": "a", "max_tokens": 64, "extra_body": {"grammar": grammar}}
    whole = smol.client().completions.create(**options)
    assert whole.choices[0].text == SPLIT_TEXT
    assert whole.usage.completion_tokens > len(SPLIT_TEXT)
    chunks = [chunk.choices[0].text for chunk in smol.client().completions.create(**options, stream=True)]
    assert "".join(chunks) == SPLIT_TEXT
    assert len(chunks) > 3
    # A stop string of one of these characters.
    stopped = smol.client().completions.create(**options, stop="\U0001f469")
    assert stopped.choices[0].text == SPLIT_TEXT[: SPLIT_TEXT.index("\U0001f469")]
    logprobs = smol.client().completions.create(**options, logprobs=0).choices[0].logprobs
    assert any(token.startswith("bytes:\\x") for token in logprobs.tokens)


def test_streams_at_once_are_what_each_is_alone(tiny: Server) -> None:
    prompts = ["the", "an in", "re", "he er"]
    wanted = [tiny.complete(prompt, max_tokens=40)["choices"][0]["text"] for prompt in prompts]

    async def run() -> list[str]:
        client = openai.AsyncOpenAI(
            base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, http_client=httpx.AsyncClient(verify=False)
        )

        async def one(prompt: str) -> str:
            stream = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=40, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        async with client:
            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(run()) == wanted


def test_echo_puts_the_prompt_in_front(tiny: Server) -> None:
    text = tiny.complete("the an", max_tokens=4)["choices"][0]["text"]
    assert tiny.complete("the an", max_tokens=4, echo=True)["choices"][0]["text"] == "the an" + text
    chunks = tiny.client().completions.create(
        model="tiny", prompt="the an", max_tokens=4, temperature=0, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "the an" + text


@pytest.mark.parametrize("prompt", ["", [1], "   ", "a\0b", "x" * 2**20, [], "\n", "\ud800"])
def test_odd_prompts_are_answered_and_the_next_one_too(tiny: Server, prompt: Any) -> None:
    body = json.dumps({**LONG, "prompt": prompt, "max_tokens": 3})
    answer = httpx.post(
        f"{tiny.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=60
    )
    if len(prompt) > N_CTX or prompt == "\ud800":
        error_of(answer, 400)
    else:
        assert answer.json()["usage"]["completion_tokens"] == 3, answer.text
    assert tiny.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1


# -- chats -----------------------------------------------------------------------------------------------------------


def test_json_schema_is_kept(smol: Server) -> None:
    schema = WEATHER["function"]["parameters"]
    client = smol.client().chat.completions
    for response_format in (
        {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}},
        {"type": "json_object", "schema": schema},
    ):
        answer = client.create(model="smol", messages=USER, max_tokens=100, seed=1, response_format=response_format)
        value = json.loads(answer.choices[0].message.content)
        assert set(value) == {"town", "days"}
        assert isinstance(value["town"], str)
        assert isinstance(value["days"], int)
    answer = client.create(
        model="smol", messages=USER, max_tokens=8, temperature=0, response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.content.lstrip().startswith("{")


def test_strings_of_a_schema_hold_no_control_characters(tiny: Server) -> None:
    """Upstream's grammar lets a line break into them."""
    schema = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 6}}, "required": ["s"]}
    chat = {
        "messages": USER,
        "temperature": 0,
        "max_tokens": 40,
        "logit_bias": {"13": 100},
    }  # the token of a line break
    for options in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
        {"tools": [{"type": "function", "function": {"name": "s", "parameters": schema}}], "tool_choice": "required"},
    ):
        message = tiny.post("/v1/chat/completions", chat | options).json()["choices"][0]["message"]
        text = message["tool_calls"][0]["function"]["arguments"] if "tools" in options else message["content"]
        assert set(json.loads(text)) == {"s"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 10**9},
        {"type": "string", "pattern": "^(a{1000000})$"},
        {"$ref": "https://example.com/schema.json"},
        {"type": "nothing"},
        {"type": "array", "items": {"type": "integer"}, "minItems": -1},
        {"enum": ["x" * 70000]},
    ],
    ids=lambda schema: next(iter(schema.items()))[0] + str(len(str(schema))),
)
def test_schemas_that_cant_be_kept_are_refused(smol: Server, schema: dict[str, Any]) -> None:
    body = {
        "messages": USER,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    start = time.monotonic()
    assert "schema" in error_of(smol.post("/v1/chat/completions", body), 400)["message"]
    assert time.monotonic() - start < 5


def test_grammars_that_cant_be_used_are_refused(tiny: Server) -> None:
    for grammar in ("root ::= (", 'a ::= "b"', "(" * 30000, 'root ::= root "a" | "b"'):
        error = error_of(tiny.post("/v1/completions", {"prompt": "a", "grammar": grammar}), 400)
        assert error["param"] == "grammar"
    with pytest.raises(OptionError, match="nested"):
        check_grammar('root ::= "))))" # )))\n' + "(" * (MAX_GRAMMAR_DEPTH + 1))
    nested = "(" * MAX_GRAMMAR_DEPTH + '"a"' + ")" * MAX_GRAMMAR_DEPTH
    assert tiny.complete("a", grammar=f"root ::= {nested}", max_tokens=8)["choices"][0]["text"] == "a"


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "get_weather"}}, "required"])
def test_a_named_tool_is_called(smol: Server, choice: Any) -> None:
    options = {
        "model": "smol",
        "messages": USER,
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 100,
        "seed": 2,
    }
    answer = smol.client().chat.completions.create(**options).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is answer.message.function_call is None
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"town", "days"}
    deltas = [chunk.choices[0] for chunk in smol.client().chat.completions.create(**options, stream=True)]
    calls = [delta.delta.tool_calls[0] for delta in deltas if delta.delta.tool_calls]
    assert [part.function.name for part in calls] == ["get_weather"] + [None] * (len(calls) - 1)
    assert [bool(part.id) for part in calls] == [True] + [False] * (len(calls) - 1)
    assert "".join(part.function.arguments for part in calls) == call.function.arguments
    assert deltas[-1].finish_reason == "tool_calls"
    cut = smol.client().chat.completions.create(**{**options, "max_tokens": 2}).choices[0]
    assert cut.finish_reason == "length"


def test_functions_are_the_older_form_of_tools(smol: Server) -> None:
    answer = smol.client().chat.completions.create(
        model="smol",
        messages=USER,
        functions=[WEATHER["function"]],
        function_call={"name": "get_weather"},
        max_tokens=100,
    )
    assert answer.choices[0].finish_reason == "function_call"
    assert answer.choices[0].message.tool_calls is None
    assert set(json.loads(answer.choices[0].message.function_call.arguments)) == {"town", "days"}


def test_tools_that_a_template_doesnt_show_are_refused(smol: Server) -> None:
    body = {"messages": USER, "tools": [WEATHER]}
    assert "chatml-function-calling" in error_of(smol.post("/v1/chat/completions", body), 400)["message"]
    none = smol.post("/v1/chat/completions", {**body, "tool_choice": "none", "max_tokens": 1})
    assert none.status_code == 200
    other = {"type": "function", "function": {"name": "get_time"}}
    for choice, tools in ((other, [WEATHER]), (other, None), ("required", [WEATHER, {**WEATHER}])):
        error = error_of(smol.post("/v1/chat/completions", {**body, "tools": tools, "tool_choice": choice}), 400)
        assert error["param"] == "tool_choice"


def test_the_model_chooses_a_tool_in_the_format_for_that(smollm2: Path) -> None:
    with serve(smollm2, 2, chat_format="chatml-function-calling") as server:
        body = {"messages": USER, "tools": [WEATHER], "max_tokens": 60, "seed": 1}
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            assert set(json.loads(call["function"]["arguments"])) == {"town", "days"}
        else:
            assert len(choice["message"]["content"]) > 0
            assert not choice["message"]["content"].startswith("functions.")
        older = server.post("/v1/chat/completions", {**body, "tools": None, "functions": [WEATHER["function"]]}).json()
        message = older["choices"][0]["message"]
        assert message["content"] or message["function_call"]["name"] == "get_weather"
        plain = server.post("/v1/chat/completions", {"messages": USER, "max_tokens": 3, "seed": 1, "logprobs": True})
        assert len(plain.json()["choices"][0]["logprobs"]["content"]) == 3
        results = [*USER, {"role": "tool", "content": "rain", "tool_call_id": "1"}]
        error = error_of(server.post("/v1/chat/completions", {"messages": results}), 400)
        assert error["param"] == "messages"


# -- embeddings ------------------------------------------------------------------------------------------------------


def test_embeddings_have_length_1_in_both_encodings(tiny: Server) -> None:
    client = tiny.client().embeddings
    found = client.create(model="tiny", input=["the an", "in"])  # base64, of which the client makes numbers
    rows = np.array([entry.embedding for entry in found.data])
    assert rows.shape == (2, 64)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    assert [entry.index for entry in found.data] == [0, 1]
    assert found.usage.prompt_tokens == found.usage.total_tokens > 2
    floats = client.create(model="tiny", input="the an", encoding_format="float", dimensions=64).data[0].embedding
    np.testing.assert_allclose(floats, rows[0], rtol=1e-5, atol=1e-6)
    raw = tiny.post("/v1/embeddings", {"input": "the an", "encoding_format": "base64"}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(raw), "<f4"), rows[0], rtol=1e-5, atol=1e-6)
    tokens = tiny.engine.llama.tokenize(b"the an", special=True)
    np.testing.assert_allclose(
        client.create(model="tiny", input=[tokens]).data[0].embedding, rows[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 32}, "dimensions"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [10**6]}, "prompt"),
    ],
)
def test_embeddings_that_cant_be_are_refused(tiny: Server, fields: dict[str, Any], param: str) -> None:
    assert error_of(tiny.post("/v1/embeddings", {"input": "a", **fields}), 400)["param"] == param


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"temprature": 0}, "temprature", "did you mean temperature?"),
        ({"xyzzy": 0}, "xyzzy", "known are"),
        ({"temperature": -1}, "temperature", "greater than"),
        ({"n": 0}, "n", "greater than"),
        ({"n": 1000}, "n", "less than"),
        ({"prompt": ["a"] * 40, "n": 2}, None, "40 prompts x n 2"),
        ({"prompt": ["a"] * 100}, "prompt", "64"),
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": [10**6]}, "prompt", "token 1000000"),
        ({"prompt": [-1]}, "prompt.0", "greater than"),
        ({"best_of": 2}, "best_of", "1"),
        ({"logprobs": 21}, "logprobs", "less than"),
        ({"logprobs": 1, "echo": True}, "echo", "logprobs"),
        ({"suffix": "b"}, "suffix", "no tokens for it"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"stop": "a" * 300}, "stop", "256"),
        ({"stop": ""}, "stop", "1 character"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", "1024"),
        ({"logit_bias": {"5": 1000}}, "logit_bias", "100"),
        ({"logit_bias": {"100000": 1}}, "logit_bias", "100000"),
        ({"max_tokens": 0}, "max_tokens", "greater than"),
        ({"stream_options": {"include_usage": True}}, None, "only for streams"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "did you mean include_usage?"),
        ({"prompt": "a b " * N_CTX}, "prompt", "tokens"),
    ],
)
def test_what_cant_be_done_is_refused_by_name(
    tiny: Server, fields: dict[str, Any], param: str | None, text: str
) -> None:
    error = error_of(tiny.post("/v1/completions", {"prompt": "a", **fields}), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert text in error["message"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "contnt": "a"}]}, "did you mean content?"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
        ),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "differ"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_chats_that_cant_be_are_refused(smol: Server, fields: dict[str, Any], text: str) -> None:
    assert text in error_of(smol.post("/v1/chat/completions", {"messages": USER, **fields}), 400)["message"]


def test_null_means_the_default(tiny: Server) -> None:
    body = {
        "prompt": "a",
        "n": None,
        "stop": None,
        "temperature": None,
        "logit_bias": None,
        "user": None,
        "stream": None,
    }
    answer = tiny.post("/v1/completions", {**body, "logit_bias": LONG["logit_bias"]}).json()
    assert answer["usage"]["completion_tokens"] == protocol.CompletionBody(prompt="a").max_tokens == 16
    answer = tiny.post("/v1/completions", {**body, **LONG, "max_tokens": None}).json()
    assert answer["usage"]["total_tokens"] == N_CTX


def test_bodies_that_arent_json_are_refused(tiny: Server) -> None:
    def post(body: bytes, kind: str = "application/json") -> httpx.Response:
        return httpx.post(f"{tiny.url}/v1/completions", content=body, headers={"Content-Type": kind})

    assert "not JSON" in error_of(post(b'{"prompt": "a'), 400)["message"]
    assert "Content-Type" in error_of(post(b'{"prompt": "a"}', "text/plain"), 400)["message"]
    error_of(post(b"[1, 2]"), 400)
    error_of(post(b""), 400)
    error_of(post(b'{"prompt": "\xff"}'), 400)
    error_of(post(b'{"prompt": "a", "temperature": NaN}'), 400)
    error_of(post(b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}"), 400)
    deep = b'{"prompt": "a", "logit_bias": ' + b'{"1":' * 100 + b"1" + b"}" * 100 + b"}"
    assert "nested" in error_of(post(deep), 400)["message"]
    assert tiny.complete("a", max_tokens=1)


def test_bodies_that_are_too_large_are_refused(model_path: Path) -> None:
    with serve(model_path, 1, max_body_bytes=10000) as server:
        for content in (b"x" * 20000, iter([b"x" * 6000] * 10)):  # the second one in chunks, without a length
            answer = httpx.post(
                f"{server.url}/v1/completions", content=content, headers={"Content-Type": "application/json"}
            )
            assert "10000 bytes" in error_of(answer, 413)["message"]
        assert server.complete("a" * 900, max_tokens=1)


def test_paths_and_methods_that_arent_there(tiny: Server) -> None:
    assert "/v1/completions" in error_of(httpx.get(f"{tiny.url}/v2/completions"), 404)["message"]
    error_of(httpx.get(f"{tiny.url}/v1/completions"), 405)


# -- who may use it --------------------------------------------------------------------------------------------------


def test_api_keys_are_asked_for(model_path: Path) -> None:
    with serve(model_path, 1, api_keys=("first", "second")) as server:
        for key in ("first", "second"):
            assert server.client(key).models.list().data
        for key in ("third", "firs", "first1", "f"):
            with pytest.raises(openai.AuthenticationError) as raised:
                server.client(key).models.list()
            assert raised.value.code == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/powerinfer/stats", "/openapi.json"):
            error_of(httpx.get(f"{server.url}{path}"), 401)
        error_of(server.post("/powerinfer/sparsity", {"sparsity": "dense"}), 401)
        error_of(httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Basic first"}), 401)
        error_of(httpx.get(f"{server.url}/v1/models", headers={"Authorization": b"Bearer \xff\xfe"}), 401)
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_other_names_of_this_machine_are_refused(model_path: Path) -> None:
    with serve(model_path, 1, allowed_hosts=("my.host",)) as server:
        for host in ("localhost", "127.0.0.1:1", "[::1]:80", "my.host", "MY.HOST:8080"):
            assert httpx.get(f"{server.url}/health", headers={"Host": host}).status_code == 200
        for host in ("evil.example", "localhost.evil.example", "evil.example:80", "my.host.", ""):
            assert "Host" in error_of(httpx.get(f"{server.url}/health", headers={"Host": host}), 403)["message"]


def test_pages_elsewhere_use_it_only_when_named(model_path: Path, tiny: Server) -> None:
    headers = {
        "Origin": "https://good.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    assert "access-control-allow-origin" not in httpx.options(f"{tiny.url}/v1/completions", headers=headers).headers
    with serve(model_path, 1, cors_origins=("https://good.example",)) as server:
        answer = httpx.options(f"{server.url}/v1/completions", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        refused = httpx.options(f"{server.url}/v1/completions", headers={**headers, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in refused.headers


def test_clients_take_turns_by_user(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = []
    submit = narrow.engine.submit
    monkeypatch.setattr(narrow.engine, "submit", lambda request: clients.append(request.client) or submit(request))
    narrow.complete("a", max_tokens=1)
    narrow.complete("a", max_tokens=1, user="anna")
    assert clients == ["127.0.0.1", "127.0.0.1 anna"]


# -- limits, ends ----------------------------------------------------------------------------------------------------


def test_a_full_queue_is_said_at_once(narrow: Server) -> None:
    running = long_stream(narrow)
    with raw_post(narrow, {"prompt": "b", "max_tokens": 1}):
        wait_until(lambda: narrow.engine.snapshot().n_waiting == 1)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as raised:
                narrow.client().completions.create(model=name_of(narrow), prompt="c", stream=stream)
            assert raised.value.code == "rate_limit_exceeded"
            assert int(raised.value.response.headers["Retry-After"]) >= 1
        # A request that fits in part is refused whole.
        error_of(narrow.post("/v1/completions", {"prompt": "c", "n": 3}), 429)
    running.close()
    wait_until(lambda: is_idle(narrow))


def test_closing_a_stream_ends_its_generation(narrow: Server) -> None:
    stream = long_stream(narrow)
    assert narrow.engine.snapshot().n_running == 1
    stream.close()
    wait_until(lambda: is_idle(narrow))
    assert narrow.engine.snapshot().n_requests == {"cancelled": 1}
    wait_until(lambda: not narrow.app.state.serving._calls)
    assert narrow.complete("a", max_tokens=1)


def test_a_client_that_goes_away_before_its_answer_ends_its_generation(narrow: Server) -> None:
    for stream in (False, True):
        running = raw_post(narrow, LONG)
        wait_until(lambda: narrow.engine.snapshot().n_running == 1)
        waiting = raw_post(narrow, {**LONG, "stream": stream})
        wait_until(lambda: narrow.engine.snapshot().n_waiting == 1)
        waiting.close()
        wait_until(lambda: narrow.engine.snapshot().n_waiting == 0)
        assert narrow.engine.snapshot().n_running == 1
        running.close()
        wait_until(lambda: is_idle(narrow))
    assert narrow.engine.snapshot().n_requests == {"cancelled": 4}
    running = raw_post(narrow, LONG)
    wait_until(lambda: narrow.engine.snapshot().n_running == 1)
    waiting = raw_post(narrow, {"input": "a"}, "/v1/embeddings")
    wait_until(lambda: narrow.engine.snapshot().n_waiting == 1)
    waiting.close()
    wait_until(lambda: narrow.engine.snapshot().n_waiting == 0)
    running.close()
    wait_until(lambda: not narrow.app.state.serving._calls)
    assert (
        'powerinfer_http_requests_total{path="/v1/completions",status="200"}'
        not in httpx.get(f"{narrow.url}/metrics").text
    )


def test_time_that_is_up_is_an_error(model_path: Path) -> None:
    with serve(model_path, 1, EngineOptions(queue_limit=256, timeout_s=0.3), step_s=0.005) as server:
        model = name_of(server)
        answer = server.post("/v1/completions", LONG)
        assert error_of(answer, 504)["code"] == "timeout"
        assert answer.headers["x-should-retry"] == "false"
        embeddings = server.post("/v1/embeddings", {"input": ["a"] * 200})
        assert error_of(embeddings, 504)["code"] == "timeout"
        stream = server.client().completions.create(model=model, stream=True, **LONG)
        text = ""
        with pytest.raises(openai.APIError, match="time was up"):
            for chunk in stream:
                text += chunk.choices[0].text
        assert text
        assert server.complete("a", max_tokens=1)


def test_an_engine_that_failed_is_said(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(model_path, 1) as server:

        def fail() -> None:
            raise RuntimeError("no power")

        monkeypatch.setattr(server.engine, "_decode", fail)
        for _ in range(2):
            error = error_of(server.post("/v1/completions", {"prompt": "a"}), 500)
            assert error["type"] == "server_error"
            assert "no power" in error["message"]
        assert "no power" in error_of(httpx.get(f"{server.url}/health"), 503)["message"]


def test_a_stopping_server_cancels_and_refuses(narrow: Server) -> None:
    stream = long_stream(narrow)
    narrow.app.state.serving.stop()
    with pytest.raises(openai.APIError, match="ends"):
        list(stream)
    assert error_of(narrow.post("/v1/completions", {"prompt": "a"}), 503)["code"] == "shutdown"
    error_of(httpx.get(f"{narrow.url}/health"), 503)


# -- beside OpenAI's paths -------------------------------------------------------------------------------------------


def test_metrics_are_what_prometheus_reads(tiny: Server) -> None:
    tiny.complete("a", max_tokens=5)
    tiny.post("/v1/completions", {"prompt": "a", "n": 0})
    answer = httpx.get(f"{tiny.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in prometheus_client.parser.text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["powerinfer_http_requests_total", "/v1/completions", "200"] >= 1
    assert samples["powerinfer_http_requests_total", "/v1/completions", "400"] >= 1
    assert samples["powerinfer_generations_total", "length"] >= 1
    assert samples["powerinfer_generated_tokens_total",] >= 5
    assert samples["powerinfer_time_to_first_token_seconds_count",] >= 1
    assert samples["powerinfer_time_per_token_seconds_count",] >= 1
    assert samples["powerinfer_waiting",] == 0


def test_stats_are_the_snapshot(tiny: Server) -> None:
    stats = httpx.get(f"{tiny.url}/powerinfer/stats").json()
    assert set(stats) == {field.name for field in dataclasses.fields(tiny.engine.snapshot())}
    assert len(stats["slots"]) == 4


def test_sparsity_changes_where_there_is_a_plan(tiny: Server, model_path: Path, tiny_plan: Callable[..., Path]) -> None:
    assert "plan" in error_of(tiny.post("/powerinfer/sparsity", {"sparsity": "exact"}), 400)["message"]
    with serve(model_path, 1, plan=tiny_plan(model_path)) as server:
        assert server.post("/powerinfer/sparsity", {"sparsity": "exact"}).json() == {"sparsity": "exact"}
        assert httpx.get(f"{server.url}/powerinfer/stats").json()["sparsity"] == "exact"
        assert server.complete("a", max_tokens=2)
        assert "auto" in error_of(server.post("/powerinfer/sparsity", {"sparsity": "none"}), 400)["message"]


def test_the_page_is_served_with_a_strict_policy(tiny: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "PAGE_FOLDER", tmp_path)
    for path, name, kind in (
        ("/", "index.html", "text/html"),
        ("/page.css", "page.css", "text/css"),
        ("/page.js", "page.js", "javascript"),
    ):
        (tmp_path / name).write_text(name)
        answer = httpx.get(f"{tiny.url}{path}")
        assert answer.text == name
        assert kind in answer.headers["content-type"]
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_interface_describes_itself(tiny: Server) -> None:
    described = httpx.get(f"{tiny.url}/openapi.json").json()
    assert "/v1/chat/completions" in described["paths"]
    assert "temperature" in described["components"]["schemas"]["ChatBody"]["properties"]


# -- the verb --------------------------------------------------------------------------------------------------------


def start_verb(*arguments: object, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """`powerinfer serve`, and the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "powerinfer_py.cli", "serve", "--port", "0", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )
    line = process.stdout.readline()
    assert line.startswith("listening on "), process.communicate()
    return process, line.split()[-1]


def test_verb_serves_a_model_from_the_hub(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with hub_server() as hub:
        hub.repos["someone/tiny-GGUF"] = {"tiny.gguf": tiny_model().read_bytes()}
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path)}
        process, url = start_verb("--hf-repo", "someone/tiny-GGUF", **environment)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny.gguf"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_verb_lets_requests_end_and_exits_with_0(smollm2: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\ntwo\n")
    process, url = start_verb(
        smollm2, "-np", 2, "-c", 1024, "--alias", "smol", "--api-key-file", keys, "--api-key", "three"
    )
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="two", max_retries=0)
    stream = client.completions.create(model="smol", stream=True, **{**LONG, "max_tokens": 60})
    next(stream)
    process.send_signal(signal.SIGTERM)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    output, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, output, errors.count("\n")) == (0, "", 1)
    assert "no plan" in errors


def test_verb_cancels_after_the_grace_and_ends_at_once_when_asked_again(smollm2: Path) -> None:
    process, url = start_verb(smollm2, "-np", 1, "--grace", 0)
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        assert json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]["code"] == "shutdown"
    assert process.wait(WAIT_S) == 0
    process, url = start_verb(smollm2, "-np", 1)
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept: the end of it closes the connection
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--chat-format", "chatlm"], "chatml"),
        (["--parallel", "0"], "--parallel"),
        (["--timeout", "0"], "--timeout"),
        (["--api-key", ""], "--api-key"),
        (["--host", "256.0.0.1"], "256.0.0.1"),
        (["--prot", "1"], "--prot"),
    ],
)
def test_verb_refuses_options_before_it_loads(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert cli.main(["serve", "no-such.gguf", *arguments]) == 1
    errors = capsys.readouterr().err
    assert text in errors
    assert "no-such" not in errors


def test_verb_says_a_port_in_use_and_an_open_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["serve", "no-such.gguf", "--port", str(taken.getsockname()[1])]) == 1
    assert "in use" in capsys.readouterr().err
    assert cli.main(["serve", "no-such.gguf", "--host", "0.0.0.0", "--port", "0"]) == 1
    assert "without a key" in capsys.readouterr().err
    (tmp_path / "keys").write_text("\n")
    assert cli.main(["serve", "no-such.gguf", "--api-key-file", str(tmp_path / "keys")]) == 1
    assert "no key in it" in capsys.readouterr().err
