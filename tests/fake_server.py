"""A server for the page's tests that answers from a script: the page's files, a chat, figures that walk at random."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import fastapi
import uvicorn
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse

import powerinfer_py.serving

PAGE = Path(powerinfer_py.serving.__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ANSWER = """Ten words, then a list:

1. **First** point with `code`
2. Second point
   - deeper, \u6b6a \U0001f600

## A heading
```python
def skip(x):
    return x[x > 0]  # **not bold**
```
That is all."""


class FakeServer:
    """Starts in `with` on a free port and keeps that port over stop() and start().

    Attributes are the script; tests change them at any time.
    """

    def __init__(self, n_layers: int = 30) -> None:
        self.answer = ANSWER
        self.delay_s = 0.0  # between two pieces of four characters
        self.refusal: tuple[int, Any] | None = None  # of chat requests: status, body
        self.breaks_after: int | None = None  # pieces
        self.breaks_silently = False  # ends the stream instead of sending an error
        self.finish_reason = "stop"
        self.key: str | None = None
        self.requests: list[dict[str, Any]] = []  # chat requests
        self.n_polls = 0
        self.n_gone = 0  # clients that went away during an answer
        self._random = random.Random(1)
        self.densities = [self._random.uniform(0.05, 0.3) for _ in range(n_layers)]
        self.stats: dict[str, Any] = {
            "model": "tiny.gguf", "sparsity": "auto", "kernels": "avx2", "computed_by": "powerinfer",
            "n_parallel": 4, "n_ctx": 4096, "n_running": 2, "n_waiting": 1,
            "n_requests": {"stop": 1200, "length": 7}, "n_rejected": 3,
            "n_prompt_tokens": 5000, "n_cached_tokens": 700, "n_generated_tokens": 9000,
            "tokens_per_s": 42.5, "prompt_tokens_per_s": 310.0, "density": 0.152, "candidate_density": 0.19,
            "bytes_share": 0.39, "read_bytes": 7_839_000_000, "dense_bytes": 20_100_000_000,
            "gpu_share": None, "uptime_s": 4000.5,
            "slots": [{"state": "generating", "n_tokens": 1024, "n_cached": 200},
                      {"state": "prompt", "n_tokens": 300, "n_cached": 0},
                      {"state": "idle", "n_tokens": 0, "n_cached": 0}, {"state": "idle", "n_tokens": 0, "n_cached": 0}],
        }  # fmt: skip
        self.has_plan = True
        self.n_hot = [0] * n_layers
        self.is_idle = False
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._port = self._socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self._port}/"
        self._stop = contextlib.ExitStack()

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.close()

    def start(self) -> None:
        if self._socket.fileno() < 0:  # uvicorn closed it
            self._socket = socket.create_server(("127.0.0.1", self._port))
        server = uvicorn.Server(uvicorn.Config(self._app(), log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join()

        self._stop.callback(stop)

    def stop(self) -> None:
        self._stop.close()

    def snapshot(self) -> dict[str, Any]:
        """The figures, one random step later."""
        self.densities = [min(1.0, max(0.01, d + self._random.gauss(0, 0.008))) for d in self.densities]
        layers = [
            {
                "n_ff": 8192,
                "sparsity": "predicted" if i % 10 else "exact",
                "n_hot": n_hot,
                "density": None if self.is_idle else density,
                "candidate_density": None if self.is_idle else min(1.0, 1.2 * density) if i % 10 else 1.0,
            }
            for i, (density, n_hot) in enumerate(zip(self.densities, self.n_hot))
        ]
        if not self.has_plan:
            return {**self.stats, "computed_by": "upstream", "kernels": None, "layers": []}
        return {**self.stats, "layers": layers}

    def _app(self) -> fastapi.FastAPI:
        app = fastapi.FastAPI(openapi_url=None)

        @app.middleware("http")
        async def check(request: fastapi.Request, call_next: Any) -> fastapi.Response:
            is_open = request.url.path in ("/", "/page.css", "/page.js")
            if self.key and not is_open and request.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": {"message": "wrong API key", "type": "invalid_request_error"}}, 401)
            response = await call_next(request)
            response.headers["Content-Security-Policy"] = POLICY
            return response

        @app.get("/{name}")
        def file(name: str) -> fastapi.Response:
            return FileResponse(PAGE / name)

        @app.get("/")
        def index() -> fastapi.Response:
            return FileResponse(PAGE / "index.html")

        @app.get("/powerinfer/stats")
        def stats() -> dict[str, Any]:
            self.n_polls += 1
            return self.snapshot()

        @app.post("/powerinfer/sparsity")
        async def sparsity(request: fastapi.Request) -> fastapi.Response:
            mode = (await request.json())["sparsity"]
            if mode == "predicted":
                return JSONResponse({"error": {"message": "tiny.gguf: no predictors"}}, 400)
            self.stats["sparsity"] = mode
            return JSONResponse({"sparsity": mode})

        @app.post("/v1/chat/completions")
        async def chat(request: fastapi.Request) -> fastapi.Response:
            self.requests.append(await request.json())
            if self.refusal:
                status, body = self.refusal
                return JSONResponse(body, status) if body else fastapi.Response(status_code=status)
            return StreamingResponse(self._events(), media_type="text/event-stream")

        return app

    async def _events(self) -> AsyncIterator[str]:
        pieces = [self.answer[i : i + 4] for i in range(0, len(self.answer), 4)]
        try:
            for i, piece in enumerate(pieces):
                if i == self.breaks_after:
                    if not self.breaks_silently:
                        yield 'data: {"error": {"message": "the engine failed: out of paper", "code": 500}}\n\n'
                    return
                yield _event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
                await asyncio.sleep(self.delay_s)
            yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]})
            usage = {"prompt_tokens": 9, "completion_tokens": len(pieces), "total_tokens": len(pieces) + 9}
            yield _event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.n_gone += 1
            raise


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
