"""The live viewer: a small local server that sends new episodes of running runs to the page.

It listens only on the loopback address and answers only requests whose Host header has that address, so
that a web page cannot read runs through a host name that resolves to this machine (DNS rebinding).
"""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import parse_qs, urlsplit

from agentenv.core.errors import StoreError
from agentenv.runs.store.reader import Run, list_runs
from agentenv.runs.view.data import episode_data, page_json, run_json, safe_json
from agentenv.runs.view.page import frame

__all__ = ["LiveServer", "serve"]

LOOPBACK = "127.0.0.1"
POLL_S = 1.0
"""Seconds between two checks of the files for new data."""


class LiveServer(ThreadingHTTPServer):
    """Serves the viewer of some runs, or of all runs in a directory.

    Args:
        paths: the run directories; if empty, all runs in `root`.
        root: the directory that contains the runs.
        port: the port; 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], root: Path, *, port: int = 0) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.paths = list(paths)
        self.root = root
        self.stopping = Event()
        self.given: dict[str, dict[str, str]] = {}
        """State of the runs in each page that was sent, by page number; its stream sends later changes."""

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def runs(self) -> list[Run]:
        """Return the runs in their current state."""
        return [Run(path) for path in self.paths] if self.paths else list_runs(self.root)

    def close(self) -> None:
        """Stop the server and end open streams."""
        self.stopping.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in {LOOPBACK, "localhost"}:
            self._send(403, "text/plain", "this server answers on 127.0.0.1 only")
            return
        address = urlsplit(self.path)
        pages: dict[str, Callable[[dict[str, list[str]]], None]] = {
            "/": self._page,
            "/episode": self._episode,
            "/events": self._events,
        }
        page = pages.get(address.path)
        if page is None:
            self._send(404, "text/plain", "this page does not exist")
            return
        try:
            page(parse_qs(address.query))
        except StoreError as error:
            self._send(404, "text/plain", str(error))
        except (BrokenPipeError, ConnectionResetError):
            return

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, so that requests do not fill the terminal."""

    def _page(self, _: dict[str, list[str]]) -> None:
        runs = self.server.runs()
        number = str(len(self.server.given))
        self.server.given[number] = {run.id: _state(run) for run in runs}
        data = list(filter(None, (run_json(run, vocabulary={}) for run in runs)))
        page = page_json(data, live=True, number=number, single=len(runs) == 1, sort="")
        self._send(200, "text/html; charset=utf-8", frame([_block(page)], connect=True))

    def _episode(self, query: dict[str, list[str]]) -> None:
        name, index = query.get("run", [""])[0], query.get("place", [""])[0]
        run = next((run for run in self.server.runs() if run.id == name), None)
        if run is None or not index.isdecimal() or int(index) >= len(run):
            self._send(404, "text/plain", "this episode does not exist")
            return
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

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)


def _block(page: str) -> str:
    return f'<script type="application/json" id="page">{page}</script>'


def _state(run: Run) -> str:
    """Return a text that changes whenever the run has new data."""
    sizes = [
        (run.path / name).stat().st_size if (run.path / name).exists() else 0
        for name in ("trajectories.jsonl", "metrics.jsonl", "annotations.jsonl")
    ]
    return json.dumps([*sizes, run.status.value])


def serve(paths: Sequence[Path], root: Path, *, port: int = 0, open_browser: bool = True) -> None:
    """Serve the viewer until the user stops it.

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
        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.stopping.set()
    finally:
        server.server_close()
