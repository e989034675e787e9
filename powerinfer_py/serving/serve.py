"""`powerinfer serve`: loads a model and answers HTTP until it is told to end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import importlib
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from powerinfer_py import bench, hub
from powerinfer_py.errors import OptionError
from powerinfer_py.llama import SPARSITY_MODES

if TYPE_CHECKING:
    from powerinfer_py.serving.app import ServeOptions

N_PARALLEL = 4
N_CTX = 4096
# Of keys and values, as llama_cpp's GGML_TYPE numbers; quantized values would need flash attention.
CACHE_TYPES = {"f32": 0, "f16": 1}
_M_ARENA_MAX = -8  # of glibc's malloc.h
# After the grace: for cancelled requests to say so to their clients.
_LAST_WORDS_S = 5

_logger = logging.getLogger("powerinfer_py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `powerinfer serve`."""
    arguments = importlib.import_module("powerinfer_py.tools.arguments")
    arguments.need_packages("serve", "serve", "fastapi", "uvicorn", "prometheus_client")
    from powerinfer_py.serving.app import ServeOptions
    from powerinfer_py.serving.engine import EngineOptions

    parser.add_argument("model", nargs="?", help="a GGUF (its sidecar is found beside it), or an extended GGUF")
    hub.add_hub_arguments(parser)
    bench.add_load_arguments(parser)
    parser.add_argument("-t", "--threads", type=int, help="threads, for prompts too (default: physical cores allowed)")
    parser.add_argument("--sparsity", default="auto", help=f"{', '.join(SPARSITY_MODES)} (default: auto)")
    parser.add_argument(
        "-np",
        "--parallel",
        type=int,
        default=N_PARALLEL,
        help="requests that run at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "-c", "--ctx-size", type=int, default=N_CTX, help="context of each request, in tokens (default: %(default)s)"
    )
    for flag, name in (("-ctk", "k"), ("-ctv", "v")):
        parser.add_argument(
            flag,
            f"--cache-type-{name}",
            choices=list(CACHE_TYPES),
            default="f16",
            help=f"type of the {name.upper()} cache: {', '.join(CACHE_TYPES)} (default: %(default)s)",
            metavar="TYPE",
        )
    parser.add_argument("--host", default=ServeOptions.host, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=ServeOptions.port, help="0: any free one (default: %(default)s)")
    parser.add_argument("--api-key", action="append", metavar="KEY", help="ask for this key; may be given again")
    parser.add_argument("--api-key-file", metavar="FILE", help="ask for one of the keys in this file, one a line")
    parser.add_argument(
        "--allowed-host", action="append", metavar="NAME", help="another name that clients may use; may be given again"
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="web pages from there may use the server; again for more",
    )
    parser.add_argument("--alias", metavar="NAME", help="the model's name in answers (default: its file's)")
    parser.add_argument("--chat-format", metavar="NAME", help="one of llama_cpp's (default: the model's own template)")
    parser.add_argument(
        "--queue-limit",
        type=int,
        default=EngineOptions.queue_limit,
        metavar="N",
        help="requests that may wait; further ones are refused (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=EngineOptions.timeout_s,
        metavar="SECONDS",
        help="of a request, from the queue to its last token (default: %(default)s)",
    )
    parser.add_argument(
        "--max-body",
        type=int,
        default=ServeOptions.max_body_bytes,
        metavar="BYTES",
        help="of a request (default: %(default)s)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=ServeOptions.grace_s,
        metavar="SECONDS",
        help="that running requests have when the server ends (default: %(default)s)",
    )
    parser.add_argument("--log-requests", action="store_true", help="a line for each request")


def run(args: argparse.Namespace) -> int:
    """`powerinfer serve`: one line with the address when it is ready; ends with Ctrl-C or SIGTERM.

    Args:
        args: the parsed command line.

    Returns:
        The exit code.
    """
    from powerinfer_py.serving.app import ServeOptions, create_app
    from powerinfer_py.serving.engine import Engine, EngineOptions, load_model

    options = ServeOptions(
        host=args.host,
        port=args.port,
        api_keys=read_keys(args.api_key or (), args.api_key_file),
        allowed_hosts=tuple(args.allowed_host or ()),
        cors_origins=tuple(args.cors_origin or ()),
        alias=args.alias,
        max_body_bytes=args.max_body,
        grace_s=args.grace,
        log_requests=args.log_requests,
    )
    _limit_heaps()
    _check_arguments(args)
    if not options.is_loopback and not options.api_keys:
        _logger.warning(
            "%s: other machines can use this server without a key; pass --api-key-file, or listen on 127.0.0.1.",
            args.host,
        )
    # Before the model is loaded: a port in use is said at once.
    with contextlib.closing(_bind(options)) as listener:
        model = hub.resolve_model(args)
        with (
            load_model(
                model,
                args.parallel,
                type_k=CACHE_TYPES[args.cache_type_k],
                type_v=CACHE_TYPES[args.cache_type_v],
                chat_format=args.chat_format,
                verbose=False,
                **bench.load_options(args, model),
            ) as llama,
            Engine(llama, EngineOptions(queue_limit=args.queue_limit, timeout_s=args.timeout)) as engine,
        ):
            app = create_app(engine, options)
            _serve(app, listener, options)
    return 0


def _serve(app: object, listener: socket.socket, options: ServeOptions) -> None:
    """Answer until a signal says to end; a second one ends the process."""
    import uvicorn

    class Server(uvicorn.Server):
        """Says where it listens; ends as `powerinfer serve` promises instead of by the signal that it got."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = listener.getsockname()[:2]
                print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.state.serving.is_stopping = True
            timer = asyncio.get_running_loop().call_later(options.grace_s, app.state.serving.stop)
            await super().shutdown(sockets)
            timer.cancel()

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            def end(*_: object) -> None:
                if self.should_exit:
                    os._exit(130)  # not even a decode that is running is waited for
                self.should_exit = True

            before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    config = uvicorn.Config(
        app,
        log_level="info" if options.log_requests else "warning",
        access_log=options.log_requests,
        server_header=False,
        timeout_graceful_shutdown=round(options.grace_s) + _LAST_WORDS_S,
    )
    Server(config).run(sockets=[listener])


def _limit_heaps() -> None:
    """Let all threads share two of glibc's heaps: each keeps what it once needed, and there would be eight a core."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def _check_arguments(args: argparse.Namespace) -> None:
    from powerinfer_py.serving.completions import llama_chat_format_names

    if args.chat_format is not None and args.chat_format not in llama_chat_format_names():
        raise OptionError(
            f"--chat-format: {args.chat_format!r}; expected one of {', '.join(llama_chat_format_names())}; pass one of them."
        )
    for name, value, least in (
        ("--parallel", args.parallel, 1),
        ("--ctx-size", args.ctx_size, 1),
        ("--queue-limit", args.queue_limit, 1),
        ("--max-body", args.max_body, 1),
        ("--grace", args.grace, 0),
    ):
        if value < least:
            raise OptionError(f"{name}: {value}; expected at least {least}; pass such a number.")
    if args.timeout <= 0:
        raise OptionError(f"--timeout: {args.timeout}; expected more than 0 seconds; pass such a number.")


def read_keys(given: Sequence[str], path: str | None) -> tuple[str, ...]:
    """The API keys that are asked for.

    Args:
        given: keys.
        path: of a file with more, one a line.

    Returns:
        All.

    Raises:
        OptionError: the file has none, or a key can't be used.
    """
    keys = list(given)
    if path is not None:
        with open(path, encoding="utf-8") as file:
            keys += [line.strip() for line in file if line.strip()]
        if not keys:
            raise OptionError(f"{path}: no key in it; expected one a line; write one, or leave the option out.")
    if any(not key.strip() or not key.isprintable() for key in keys):
        raise OptionError("--api-key: a key that is empty or can't be printed; expected text; pass another.")
    return tuple(keys)


def _bind(options: ServeOptions) -> socket.socket:
    """A socket on the address; uvicorn listens on it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise OptionError(
            f"{options.host}:{options.port}: {error}; expected an address of this machine; correct it."
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        listener.close()
        raise OptionError(
            f"{options.host}:{options.port}: {error}; expected a free port; pass another --port."
        ) from error
    return listener
