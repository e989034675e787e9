"""The HTTP server as an ASGI app: OpenAI's paths, health, metrics, the page.

Nothing blocks the event loop: each text that is being generated has a thread, which waits for its pieces.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import ipaddress
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from powerinfer_py.errors import (
    CancelledError,
    OptionError,
    PlanError,
    PowerInferError,
    QueueFullError,
    RequestTimeoutError,
)
from powerinfer_py.serving import metrics
from powerinfer_py.serving.completions import Call, ServedModel
from powerinfer_py.serving.engine import Engine
from powerinfer_py.serving.protocol import ChatBody, CompletionBody, EmbeddingBody, SparsityBody

PAGE_FOLDER = Path(__file__).parent / "page"
PAGE_FILES = {"/": "index.html", "/page.css": "page.css", "/page.js": "page.js"}
# Without an API key, too.
OPEN_PATHS = (*PAGE_FILES, "/health")
# The page's own files, and images that it draws; nothing from elsewhere, nothing inline, no frame around it.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
RETRY_AFTER_S = 1
# Threads beyond those for the requests that the engine takes: for those that it refuses.
N_SPARE_THREADS = 32

_STOPPING_TEXT = "server: it ends; expected a running one; try again later."
_logger = logging.getLogger("powerinfer_py")


@dataclass(frozen=True)
class ServeOptions:
    """Options of the HTTP server, with their defaults."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free one
    api_keys: tuple[str, ...] = ()  # empty: none is asked for
    allowed_hosts: tuple[str, ...] = ()  # names in the header Host, beside those of this machine's loopback
    cors_origins: tuple[str, ...] = ()  # origins whose pages may use the server
    alias: str | None = None  # the model's name in answers; None: that of its file
    max_body_bytes: int = 4 * 2**20
    grace_s: float = 10.0  # that running requests have at the end
    log_requests: bool = False

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"


class HttpError(PowerInferError):
    """An answer in OpenAI's form of errors.

    Args:
        status: of HTTP.
        text: where, what was found, what was expected, what to do.
        kind: OpenAI's type.
        param: the field that is wrong.
        code: OpenAI's code.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        text: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers
        self.body = {"error": {"message": text, "type": kind, "param": param, "code": code}}

    @classmethod
    def of(cls, error: BaseException) -> HttpError:
        """The answer that says an error."""
        text = str(error)
        if isinstance(error, HttpError):
            return error
        if isinstance(error, QueueFullError):
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            return cls(429, text, "rate_limit_error", code="rate_limit_exceeded", headers=headers)
        if isinstance(error, (OptionError, PlanError)):
            return cls(400, text, param=text.split(":")[0] if text.split(":")[0].isidentifier() else None)
        if isinstance(error, UnicodeEncodeError):
            return cls(400, "body: half of a surrogate pair; expected Unicode; correct the text.")
        if isinstance(error, RequestTimeoutError):
            # OpenAI's clients would send it again on their own.
            return cls(504, text, "timeout_error", code="timeout", headers={"x-should-retry": "false"})
        if isinstance(error, CancelledError):
            return cls(
                503, "server: it ends; expected a running one; try again later.", "server_error", code="shutdown"
            )
        return cls(
            500, text if isinstance(error, PowerInferError) else "server: it failed; see its log.", "server_error"
        )

    def response(self) -> Response:
        """As it is sent; in ASCII, since what was found may be no Unicode."""
        return Response(json.dumps(self.body), self.status, self.headers, media_type="application/json")


def create_app(engine: Engine, options: ServeOptions = ServeOptions()) -> FastAPI:
    """The app for one engine.

    Args:
        engine: what answers; open as long as the app is used.
        options: of the server.

    Returns:
        The app; `app.state.serving.stop()` ends its requests.
    """
    app = FastAPI(title="powerinfer", docs_url=None, redoc_url=None)
    serving = app.state.serving = Serving(engine, options)
    for kind in (PowerInferError, RequestValidationError, AnyHTTPException, Exception):
        app.add_exception_handler(kind, _send_error)
    app.get("/v1/models")(serving.list_models)
    app.get("/v1/models/{name:path}")(serving.get_model)
    app.post("/v1/completions")(serving.create_completion)
    app.post("/v1/chat/completions")(serving.create_chat_completion)
    app.post("/v1/embeddings")(serving.create_embedding)
    app.get("/health")(serving.check_health)
    app.get("/metrics")(serving.show_metrics)
    app.get("/powerinfer/stats")(serving.show_stats)
    app.post("/powerinfer/sparsity")(serving.set_sparsity)
    for path in PAGE_FILES:
        app.get(path, include_in_schema=False)(serving.send_page)
    serving.paths = tuple(route.path for route in app.routes)
    app.add_middleware(_Gate, serving=serving)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("Authorization", "Content-Type"),
        )
    return app


class Serving:
    """What the paths of an app do, and the requests that are running.

    Args:
        engine: what answers.
        options: of the server.
    """

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        self.options = options
        self.metrics = metrics.Metrics(engine)
        self.paths: tuple[str, ...] = ()
        self.is_stopping = False
        self._engine = engine
        self._model = ServedModel(engine)
        self._model_name = options.alias or engine.snapshot().model
        self._limiter = CapacityLimiter(engine.n_parallel + engine.options.queue_limit + N_SPARE_THREADS)
        self._calls: set[Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """End all requests, and take no more. In the event loop's thread."""
        self.is_stopping = True
        for call in self._calls:
            call.cancel()

    # -- OpenAI's paths --------------------------------------------------------------------------------------------

    async def list_models(self) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model_entry()]})

    async def get_model(self, name: str) -> Response:
        """The one model, by its name."""
        self._check_model(name)
        return JSONResponse(self._model_entry())

    async def create_completion(self, request: Request, body: CompletionBody) -> Response:
        """Texts that go on from prompts."""
        self._check_model(body.model)
        call = self._open_call(request, body.user)
        jobs = [
            functools.partial(
                self._model.create_completion,
                prompt,
                body.suffix,
                max_tokens=body.max_tokens,
                logprobs=body.logprobs,
                echo=body.echo,
                model=self._model_name,
                call=call,
                **body.completion_options(i),
            )
            for prompt in body.prompts
            for i in range(body.n)
        ]
        return await self._answer(request, call, jobs, body)

    async def create_chat_completion(self, request: Request, body: ChatBody) -> Response:
        """Answers in a chat."""
        self._check_model(body.model)
        call = self._open_call(request, body.user)
        fields = body.model_dump(exclude_none=True, by_alias=True)
        jobs = [
            functools.partial(
                self._model.create_chat_completion,
                [message.as_dict() for message in body.messages],
                call=call,
                tools=fields.get("tools"),
                tool_choice=fields["tool_choice"],
                functions=fields.get("functions"),
                function_call=fields["function_call"],
                schema=body.response_format.schema_text,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                max_tokens=body.max_completion_tokens or body.max_tokens,
                model=self._model_name,
                **body.completion_options(i),
            )
            for i in range(body.n)
        ]
        return await self._answer(request, call, jobs, body)

    async def create_embedding(self, request: Request, body: EmbeddingBody) -> Response:
        """Embeddings of texts."""
        self._check_model(body.model)
        n_embd = self._engine.llama.n_embd()
        if body.dimensions not in (None, n_embd):
            raise HttpError(
                400,
                f"dimensions: {body.dimensions}; expected {n_embd}, which the model has; leave it out.",
                param="dimensions",
            )
        if "" in body.inputs:
            raise HttpError(400, "input: an empty text; expected some; leave it out.", param="input")
        call = self._open_call(request, body.user)

        def embed() -> tuple[list[list[int]], list[Any]]:
            prompts = [self._model.prompt_tokens(text) for text in body.inputs]
            return prompts, [embedding.wait() for embedding in [call.submit_embedding(prompt) for prompt in prompts]]

        def encode(row: Any) -> str | list[float]:
            if body.encoding_format == "float":
                return row.tolist()
            return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")

        close = self._watch(request, call)
        try:
            prompts, rows = await anyio.to_thread.run_sync(embed, limiter=self._limiter, abandon_on_cancel=True)
        finally:
            close()
        n_tokens = sum(map(len, prompts))
        data = [{"object": "embedding", "index": i, "embedding": encode(row)} for i, row in enumerate(rows)]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return JSONResponse({"object": "list", "model": self._model_name, "data": data, "usage": usage})

    # -- the others ------------------------------------------------------------------------------------------------

    async def check_health(self) -> Response:
        """Whether requests are taken."""
        failure = _STOPPING_TEXT if self.is_stopping else self._engine.failure
        if failure is not None:
            raise HttpError(503, failure, "server_error")
        return JSONResponse({"status": "ok"})

    async def show_metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(self.metrics.text(), media_type=metrics.CONTENT_TYPE)

    async def show_stats(self) -> Response:
        """What the engine does now."""
        return JSONResponse(dataclasses.asdict(self._engine.snapshot()))

    async def set_sparsity(self, body: SparsityBody) -> Response:
        """Change the mode between two decodes."""
        await anyio.to_thread.run_sync(self._engine.set_sparsity, body.sparsity, limiter=self._limiter)
        return JSONResponse({"sparsity": self._engine.snapshot().sparsity})

    async def send_page(self, request: Request) -> Response:
        """A file of the page."""
        path = PAGE_FOLDER / PAGE_FILES[request.url.path]
        return FileResponse(path, headers={"Content-Security-Policy": PAGE_POLICY})

    # -- how answers come about ------------------------------------------------------------------------------------

    def _model_entry(self) -> dict[str, Any]:
        return {"id": self._model_name, "object": "model", "created": 0, "owned_by": "powerinfer"}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model_name):
            raise HttpError(
                404,
                f"model: {name!r} isn't here; expected {self._model_name!r}; see /v1/models.",
                param="model",
                code="model_not_found",
            )

    def _client(self, request: Request, user: str | None) -> str:
        """Whose turn it is in the queue: a user's of an API key, or of an address."""
        owner = request.state.owner or (request.client.host if request.client is not None else "")
        return owner if user is None else f"{owner} {user}"

    def _open_call(self, request: Request, user: str | None) -> Call:
        call = Call(self._engine, self._client(request, user))
        if self.is_stopping:
            call.cancel()
        return call

    def _watch(self, request: Request, call: Call) -> Callable[[], None]:
        """Cancel a call when its client goes away, or the server ends.

        Returns:
            What is called when its answer ends.
        """
        self._calls.add(call)
        watch = asyncio.create_task(_cancel_when_gone(request, call))

        def close() -> None:
            call.cancel()
            watch.cancel()
            self._calls.discard(call)
            for timing in call.timings:
                self.metrics.add_timing(timing)

        return close

    async def _answer(
        self, request: Request, call: Call, jobs: Sequence[Callable[[], Any]], body: CompletionBody | ChatBody
    ) -> Response:
        """Run jobs at the same time, and answer with what they return, or with the chunks that they yield.

        Args:
            request: whose client may go away meanwhile.
            call: that the jobs belong to.
            jobs: one for each choice.
            body: what was asked for.
        """
        close = self._watch(request, call)
        items = self._run(jobs)
        try:
            if body.stream:
                # What goes wrong before the first token is a normal answer of HTTP.
                first = await items.__anext__()
                return _EventStream(_chunks(first, items, body), close)
            answers = [item async for item in items]
        except BaseException:
            close()
            raise
        close()
        return JSONResponse(_join_answers([answer for _, answer in sorted(answers, key=lambda item: item[0])], body.n))

    async def _run(self, jobs: Sequence[Callable[[], Any]]) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Run jobs in threads.

        Args:
            jobs: each returns a dict, or an iterator of dicts.

        Yields:
            (index of the job, dict), as they come.

        Raises:
            The first error of a job; the others run on.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, dict[str, Any] | BaseException | None]] = asyncio.Queue()

        def put(i: int, item: dict[str, Any] | BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(queue.put_nowait, (i, item))

        def work(i: int, job: Callable[[], Any]) -> None:
            try:
                answer = job()
                for item in [answer] if isinstance(answer, dict) else answer:
                    put(i, item)
                put(i, None)
            except Exception as error:
                put(i, error)

        for i, job in enumerate(jobs):
            thread = anyio.to_thread.run_sync(work, i, job, limiter=self._limiter, abandon_on_cancel=True)
            task = asyncio.create_task(thread)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        n_running = len(jobs)
        while n_running:
            i, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                n_running -= 1
            else:
                yield i, item


class _Gate:
    """What every request passes: its host, its size and its API key are checked, and its answer is counted."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving
        options = serving.options
        self._digests = [hashlib.sha256(key.encode("utf-8")).digest() for key in options.api_keys]
        # A page elsewhere can't read answers, but its own name may come to mean this machine (DNS rebinding).
        local = ("localhost", "127.0.0.1", "[::1]", options.host) if options.is_loopback else ()
        self._hosts = {name.lower() for name in (*local, *options.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._serving.paths else "other"
        n_bytes = 0
        status = 499

        async def receive_some() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > self._serving.options.max_body_bytes:
                raise HTTPException(413)
            return message

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] += [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
            await send(message)

        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        try:
            refusal = self._check(scope, headers)
            if refusal is None:
                await self._app(scope, receive_some, send_counted)
            else:
                await refusal.response()(scope, receive, send_counted)
        except Exception:
            status = 500  # sent from outside of here
            raise
        finally:
            self._serving.metrics.count_answer(path, status)

    def _check(self, scope: Scope, headers: dict[bytes, str]) -> HttpError | None:
        host = headers.get(b"host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if self._hosts and name.lower() not in self._hosts:
            return HttpError(
                403,
                f"Host: {host!r}; expected {' or '.join(sorted(self._hosts))}; start the server with --allowed-host.",
            )
        owner = self._owner(headers.get(b"authorization", ""))
        if owner is None and scope["path"] not in OPEN_PATHS:
            return HttpError(
                401,
                "Authorization: no API key that this server knows; expected 'Bearer KEY'; ask who runs it for one.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope.setdefault("state", {})["owner"] = owner
        # Anything else can come from a web page elsewhere, without the browser asking first.
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":
            return HttpError(400, f"Content-Type: {kind!r}; expected application/json; send the body as that.")
        length = headers.get(b"content-length", "")
        if length.isdigit() and int(length) > self._serving.options.max_body_bytes:
            return _too_large(self._serving.options)
        return None

    def _owner(self, authorization: str) -> str | None:
        """A name for whose API key it is; "": keys aren't asked for; None: nobody's."""
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # All of them, whatever the first ones say: the time tells nothing.
        same = [hmac.compare_digest(given, digest) for digest in self._digests]
        return f"key {same.index(True)}" if any(same) and scheme.lower() == "bearer" else None


class _EventStream(Response):
    """Server-sent events; cleans up when it ends, however it does."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], close: Callable[[], None]) -> None:
        super().__init__(headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_text(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode("utf-8"), "more_body": more})

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for chunk in self._chunks:
                    await send_text(_event(chunk))
                await send_text("data: [DONE]\n\n", more=False)
            except Exception as error:
                if not isinstance(error, PowerInferError):
                    _logger.exception("server: a stream failed")
                await send_text(_event(HttpError.of(error).body), more=False)
        except OSError:
            pass  # the client went away while something was being sent
        finally:
            self._close()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _cancel_when_gone(request: Request, call: Call) -> None:
    """Cancel a call when its client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    call.cancel()


async def _chunks(
    first: tuple[int, dict[str, Any]], items: AsyncIterator[tuple[int, dict[str, Any]]], body: CompletionBody | ChatBody
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of all choices, each with its index, and the usage at the end where it is wanted."""
    usages: dict[int, dict[str, Any]] = {}
    item: tuple[int, dict[str, Any]] | None = first
    head: dict[str, Any] = {}
    while item is not None:
        i, chunk = item
        chunk["choices"][0]["index"] = i
        if "usage" in chunk:
            usages[i] = chunk.pop("usage")
        head = chunk
        yield {**chunk, "usage": None} if body.include_usage else chunk
        item = await _next_or_none(items)
    if body.include_usage:
        yield {**head, "choices": [], "usage": _join_usages([usages[i] for i in sorted(usages)], body.n)}


async def _next_or_none(items: AsyncIterator[Any]) -> Any:
    """The next item; None: there is no more."""
    try:
        return await items.__anext__()
    except StopAsyncIteration:
        return None


def _join_answers(answers: Sequence[dict[str, Any]], n: int) -> dict[str, Any]:
    """One answer with the choices of all.

    Args:
        answers: of one choice each; n in a row have the same prompt.
        n: choices of a prompt.
    """
    for i, answer in enumerate(answers):
        answer["choices"][0]["index"] = i
    choices = [answer["choices"][0] for answer in answers]
    return {**answers[0], "choices": choices, "usage": _join_usages([answer["usage"] for answer in answers], n)}


def _join_usages(usages: Sequence[dict[str, Any]], n: int) -> dict[str, Any]:
    """The sum; a prompt counts once, however many choices it has."""
    n_prompt = sum(usage["prompt_tokens"] for usage in usages[::n])
    n_cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages[::n])
    n_generated = sum(usage["completion_tokens"] for usage in usages)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def _too_large(options: ServeOptions) -> HttpError:
    return HttpError(
        413, f"body: larger than {options.max_body_bytes} bytes; expected no more; send less, or start with --max-body."
    )


async def _send_error(request: Request, error: Exception) -> Response:
    """The answer to any error of a path, and to what the framework refuses."""
    if isinstance(error, RequestValidationError):
        return _body_error(error).response()
    if isinstance(error, AnyHTTPException):
        return _http_error(request, error).response()
    return HttpError.of(error).response()


def _http_error(request: Request, error: AnyHTTPException) -> HttpError:
    serving = request.app.state.serving
    where = f"{request.method} {request.url.path}"
    if error.status_code == 413:
        return _too_large(serving.options)
    if error.status_code in (404, 405):
        text = f"{where}: no such path; expected one of {', '.join(serving.paths)}; correct it."
    else:
        text = f"{where}: {error.detail}."
    return HttpError(error.status_code, text, headers=dict(error.headers or {}))


def _body_error(error: RequestValidationError) -> HttpError:
    """The first thing that is wrong with a body."""
    errors = error.errors()
    # A field of several types has errors for each; that it isn't a text says less than what is wrong with its list.
    first = min((e for e in errors if e["loc"][:2] == errors[0]["loc"][:2]), key=lambda e: e["type"].endswith("_type"))
    if first["type"] == "json_invalid":
        what = f"{first['ctx']['error']} at character {first['loc'][-1]}"
        return HttpError(400, f"body: not JSON ({what}); expected an object; correct it.")
    names = [*first["loc"][1:], *([first["ctx"]["field"]] if first["type"] == "unknown_field" else [])]
    # Names of types in a choice of types aren't names of fields.
    is_field = (isinstance(name, int) or (name.isidentifier() and name != "str") for name in names)
    param = ".".join(str(name) for name, is_one in zip(names, is_field) if is_one) or None
    found = json.dumps(first.get("input"), default=str)
    if first["type"] == "unknown_field":
        return HttpError(400, f"{param}: {first['msg']}", param=param)
    found = found if len(found) < 80 else f"{found[:77]}..."
    return HttpError(400, f"{param or 'body'}: {found}; {first['msg']}; correct it.", param=param)
