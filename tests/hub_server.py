"""A server on loopback that speaks as much of the Hugging Face hub's protocol as downloads need."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

TOKEN = "hf_test"


class HubServer:
    """What it serves, and what it was asked.

    Attributes:
        url: for HF_ENDPOINT.
        repos: OWNER/NAME -> path -> content.
        gated: repositories whose files need TOKEN.
        breaks: path -> bytes after which its next answer ends early; each once.
        down: every answer is 500.
        requests: METHOD path, and the Range asked for.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.breaks: dict[str, int] = {}
        self.down = False
        self.requests: list[str] = []
        self._commits: dict[str, dict[str, bytes]] = {}

    def commit(self, repo: str) -> str:
        """The newest commit of a repository, which changes with its files."""
        digest = hashlib.sha1(repr(sorted(self.repos[repo])).encode())
        for content in self.repos[repo].values():
            digest.update(content)
        self._commits[digest.hexdigest()] = dict(self.repos[repo])
        return digest.hexdigest()

    def files(self, commit: str) -> dict[str, bytes]:
        """Of any commit that `commit` returned; {} for another one."""
        return self._commits.get(commit, {})

    def downloads(self) -> list[str]:
        """Paths of the files that were sent."""
        found = (re.match(r"GET /[^/]+/[^/]+/resolve/[^/]+/(\S+)", line) for line in self.requests)
        return [match[1] for match in found if match]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if self.hub.down:
            self.fail(500, "")
        elif not (info or file):
            self.fail(404, "EntryNotFound")
        else:
            repo, revision = (info or file)[1], (info or file)[2] or "main"
            known = repo in self.hub.repos
            commit = self.hub.commit(repo) if known and revision == "main" else revision
            files = self.hub.files(commit)
            if not known:
                self.fail(401, "RepoNotFound")
            elif not files:
                self.fail(404, "RevisionNotFound")
            elif info:
                siblings = [{"rfilename": name} for name in files]
                body = json.dumps({"id": repo, "sha": commit, "siblings": siblings}).encode()
                self.answer(200, body, {"Content-Type": "application/json"})
            elif repo in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.fail(403, "GatedRepo")
            elif file[3] not in files:
                self.fail(404, "EntryNotFound")
            else:
                self.send_file(commit, file[3], files[file[3]])

    def send_file(self, commit: str, name: str, content: bytes) -> None:
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if not start:
            self.answer(200, content, headers, self.hub.breaks.pop(name, None) if self.command == "GET" else None)
            return
        first = int(start[1])
        headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self.answer(206, content[first:], headers)

    def fail(self, status: int, code: str) -> None:
        self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def answer(self, status: int, body: bytes, headers: dict[str, str], stop: int | None = None) -> None:
        """Send it; with `stop`, only so many bytes of it before the connection ends."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:stop])
        self.close_connection = stop is not None

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A running server.

    Yields:
        It; ends with the block.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = HubServer(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
