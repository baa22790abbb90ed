"""The live viewer: a small local server that sends new episodes of running runs to the page.

It listens only on the loopback address. The address of the page contains a token, without which the server
tells nothing: neither to a web page of another origin nor to another user of this machine.
"""

from __future__ import annotations

import json
import socket
import sys
import time
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import BoundedSemaphore, Event, Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from agentenv.core.errors import StoreError
from agentenv.core.serving.guard import Guard, Refused, new_token
from agentenv.core.visible import logger
from agentenv.runs.store.reader import Run, list_runs
from agentenv.runs.view.data import episode_data, page_json, run_json, safe_json
from agentenv.runs.view.page import frame

__all__ = ["LiveServer", "serve"]

_log = logger(__name__)
LOOPBACK = "127.0.0.1"
POLL_S = 1.0
"""Seconds between two checks of the files for new data."""
IDLE_S = 30.0
"""Time that a client has to send a request and to take an answer."""
_MAX_CONNECTIONS = 64
_MAX_PAGES = 256
_MAX_DIGITS = 9


class LiveServer(ThreadingHTTPServer):
    """Serves the viewer of some runs, or of all runs in a directory.

    Args:
        paths: the run directories; if empty, all runs in `root`.
        root: the directory that contains the runs.
        port: the port; 0 takes a free one.
        idle_s: time that a client has to send a request.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], root: Path, *, port: int = 0, idle_s: float = IDLE_S) -> None:
        self.guard = Guard(host=LOOPBACK)
        self.idle_s = idle_s
        self.waiting: dict[socket.socket, float] = {}
        """Since when each connection sends no complete request."""
        self._room = BoundedSemaphore(_MAX_CONNECTIONS)
        self._lock = Lock()
        self._code = new_token()
        super().__init__((LOOPBACK, port), _Handler)
        self.paths = list(paths)
        self.root = root
        self.stopping = Event()
        self.given: dict[str, dict[str, str]] = {}
        """State of the runs in each page that was sent, by page number; its stream sends later changes."""
        self._pages = 0

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"{self.address}?token={self.guard.token}"

    @property
    def url_to_open(self) -> str:
        """Address that leads to the page once; other users may read it from the browser's command line."""
        return f"{self.address}open?code={self._code}"

    def take_code(self, code: str) -> bool:
        """Return whether this is the code of `url_to_open`, which is used up then."""
        with self._lock:
            right = code == self._code
            if right:
                self._code = new_token()
            return right

    @property
    def address(self) -> str:
        """Address of the server."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def runs(self) -> list[Run]:
        """Return the runs in their current state."""
        return [Run(path) for path in self.paths] if self.paths else list_runs(self.root)

    def remember(self, states: dict[str, str]) -> str:
        """Keep what a page shows, and return the page's number; the oldest pages are forgotten."""
        with self._lock:
            self._pages += 1
            self.given[str(self._pages)] = states
            if len(self.given) > _MAX_PAGES:
                del self.given[next(iter(self.given))]
            return str(self._pages)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own, unless there are too many already."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self.waiting[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection; this is what its thread runs."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.waiting.pop(request, None)
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a connection, but not that a client has gone."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            _log.exception("a request could not be answered")

    def service_actions(self) -> None:
        """Close connections that send no complete request for too long; the server calls this often."""
        early = time.monotonic() - self.idle_s
        for connection, since in list(self.waiting.items()):
            if since <= early:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop the server and end open streams."""
        self.stopping.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S  # of each read and write; `service_actions` limits the time of a whole request

    def do_GET(self) -> None:
        self.server.waiting.pop(self.connection, None)
        try:
            self._answer()
        except Refused as error:
            self._send(error.status, "text/plain", str(error))
        except StoreError as error:
            self._send(404, "text/plain", str(error))
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        self.server.waiting[self.connection] = time.monotonic()

    do_POST = do_PUT = do_DELETE = do_HEAD = do_OPTIONS = do_GET

    def _answer(self) -> None:
        if self.command != "GET" or "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body is not read, and must not be taken for a request
        headers = {name: self.headers[name] for name in ("Host", "Origin") if name in self.headers}
        self.server.guard.check_source(headers)
        if self.command != "GET":
            raise Refused(405, f"the viewer does not answer to {self.command}", remedy="use GET")
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query, max_num_fields=8)
        except ValueError:
            raise Refused(400, "the address cannot be read") from None
        if address.path == "/open" and self.server.take_code(query.get("code", [""])[0]):
            self._send(303, "text/plain", "", location=self.server.url)
            return
        self.server.guard.check_token({}, query=query.get("token", [""])[0])
        pages: dict[str, Callable[[dict[str, list[str]]], None]] = {
            "/": self._page,
            "/episode": self._episode,
            "/events": self._events,
        }
        if address.path not in pages:
            raise Refused(404, "this page does not exist")
        pages[address.path](query)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP, or whose method has no handler, in words and with a 4xx."""
        status = 405 if code == HTTPStatus.NOT_IMPLEMENTED else code
        status = 400 if status == HTTPStatus.HTTP_VERSION_NOT_SUPPORTED else status
        self.close_connection = True
        self.request_version = self.protocol_version  # else a line that is not HTTP gets no status
        self._send(status, "text/plain", message or HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, so that requests do not fill the terminal."""

    def _page(self, _: dict[str, list[str]]) -> None:
        runs = self.server.runs()
        number = self.server.remember({run.id: _state(run) for run in runs})
        data = list(filter(None, (run_json(run, vocabulary={}) for run in runs)))
        token = self.server.guard.token
        page = page_json(data, live=True, number=number, token=token, single=len(runs) == 1, sort="")
        self._send(200, "text/html; charset=utf-8", frame([_block(page)], connect=True))

    def _episode(self, query: dict[str, list[str]]) -> None:
        name, index = query.get("run", [""])[0], query.get("place", [""])[0]
        run = next((run for run in self.server.runs() if run.id == name), None)
        if run is None or not _is_index(index) or int(index) >= len(run):
            raise Refused(404, "this episode does not exist")
        summary = run.summaries[int(index)]
        data = episode_data(run.load(summary), run.note(summary))
        texts = run.vocabulary()
        used = {token for sequence in data["sequences"] for span in sequence for token in span["ids"]}
        data["vocab"] = {str(token): texts[token] for token in used if token in texts}
        self._send(200, "application/json", safe_json(data))

    def _events(self, query: dict[str, list[str]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        seen = dict(self.server.given.get(query.get("page", [""])[0], {}))
        while True:
            for run in self.server.runs():
                state = _state(run)
                if seen.get(run.id) != state:
                    seen[run.id] = state
                    if text := run_json(run, vocabulary={}):
                        self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.write(b": still here\n\n")
            self.wfile.flush()
            if self.server.stopping.wait(POLL_S):
                return

    def _send(self, status: int, kind: str, text: str, *, location: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if location:
            self.send_header("Location", location)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")  # the address has the token
        self.end_headers()
        self.wfile.write(body)


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _block(page: str) -> str:
    return f'<script type="application/json" id="page">{page}</script>'


def _state(run: Run) -> str:
    """Return a text that changes whenever the run has new data."""
    sizes = [
        (run.path / name).stat().st_size if (run.path / name).exists() else 0
        for name in (
            "trajectories.jsonl",
            "metrics.jsonl",
            "annotations.jsonl",
            "workers.jsonl",
            "servers.jsonl",
        )
    ]
    return json.dumps([*sizes, run.status.value])


def serve(paths: Sequence[Path], root: Path, *, port: int = 0, open_browser: bool = True) -> None:
    """Serve the viewer until the user stops it with Ctrl-C, which is raised when the server is closed.

    Raises:
        StoreError: The port cannot be used.
    """
    try:
        server = LiveServer(paths, root, port=port)
    except OSError as error:
        raise StoreError(
            f"cannot listen on port {port}: {error.strerror}", remedy="choose another port with --port"
        ) from error
    print(f"{server.url}  (Ctrl-C stops it)", flush=True)  # noqa: T201 - the address is the verb's output
    if open_browser:
        webbrowser.open(server.url_to_open)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.stopping.set()
        raise
    finally:
        server.server_close()
