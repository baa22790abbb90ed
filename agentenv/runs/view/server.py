"""The live viewer: a small server on this machine that sends what is new in running runs.

It listens on the loopback address only and answers only requests that were sent to that address, so
that no page of the web can read runs through a name that points here.
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
from agentenv.runs.view.data import episode_data, page_json, run_data, safe_json
from agentenv.runs.view.page import frame

__all__ = ["LiveServer", "serve"]

LOOPBACK = "127.0.0.1"
POLL_S = 1.0
"""How often the files are looked at for news."""


class LiveServer(ThreadingHTTPServer):
    """Serves the viewer of some run directories, or of all under a root.

    Args:
        paths: the runs; all under `root` if there are none.
        root: directory of all runs.
        port: any free one if 0.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], root: Path, *, port: int = 0) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.paths = list(paths)
        self.root = root
        self.stopping = Event()
        self.given: dict[str, dict[str, str]] = {}
        """What each page that was sent knows of the runs; its stream starts from there."""

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/"

    def runs(self) -> list[Run]:
        """Return the runs as they are now."""
        return [Run(path) for path in self.paths] if self.paths else list_runs(self.root)

    def close(self) -> None:
        """Stop serving; open streams end."""
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
            self._send(404, "text/plain", "there is nothing here")
            return
        try:
            page(parse_qs(address.query))
        except StoreError as error:
            self._send(404, "text/plain", str(error))
        except (BrokenPipeError, ConnectionResetError):
            return

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the terminal belongs to whoever started the server."""

    def _page(self, _: dict[str, list[str]]) -> None:
        runs = self.server.runs()
        number = str(len(self.server.given))
        self.server.given[number] = {run.id: _state(run) for run in runs}
        data = [run_data(run, vocabulary={}) for run in runs]
        page = page_json(data, live=True, number=number, single=len(runs) == 1, sort="")
        self._send(200, "text/html; charset=utf-8", frame([_block(page)], connect=True))

    def _episode(self, query: dict[str, list[str]]) -> None:
        name, place = query.get("run", [""])[0], query.get("place", [""])[0]
        run = next((run for run in self.server.runs() if run.id == name), None)
        if run is None or not place.isdecimal() or int(place) >= len(run):
            self._send(404, "text/plain", "there is no such episode")
            return
        summary = run.summaries[int(place)]
        data = episode_data(run.load(summary), run.note(summary))
        words = run.vocabulary()
        used = {token for sequence in data["sequences"] for span in sequence for token in span["ids"]}
        data["vocab"] = {str(token): words[token] for token in used if token in words}
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
                    self.wfile.write(f"data: {safe_json(run_data(run, vocabulary={}))}\n\n".encode())
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
    """Return something that changes when a run has news."""
    sizes = [
        (run.path / name).stat().st_size if (run.path / name).exists() else 0
        for name in ("trajectories.jsonl", "metrics.jsonl", "annotations.jsonl")
    ]
    return json.dumps([*sizes, run.status.value])


def serve(paths: Sequence[Path], root: Path, *, port: int = 0, open_browser: bool = True) -> None:
    """Serve until the user stops it.

    Raises:
        StoreError: The port cannot be had.
    """
    try:
        server = LiveServer(paths, root, port=port)
    except OSError as error:
        raise StoreError(
            f"cannot listen on port {port}: {error.strerror}", remedy="choose another with --port"
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
