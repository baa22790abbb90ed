"""The live viewer: a small local server that sends new episodes of running runs to the page.

It listens only on the loopback address. The address of the page contains a token, without which the server
tells nothing: neither to a web page of another origin nor to another user of this machine.
"""

from __future__ import annotations

import asyncio
import json
import webbrowser
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

from aiohttp import web

from agentenv.core.errors import StoreError
from agentenv.core.loops import run_blocking
from agentenv.core.serving.guard import Guard, Refused, new_token
from agentenv.core.serving.listening import guarded, listen
from agentenv.runs.store.reader import Run, list_runs
from agentenv.runs.view.data import episode_data, page_json, run_json, safe_json
from agentenv.runs.view.page import frame

__all__ = ["LiveServer", "serve"]

POLL_S = 1.0
"""Seconds between two checks of the files for new data."""
_MAX_PAGES = 256
_MAX_DIGITS = 9
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address has the token
}


class LiveServer:
    """Serves the viewer of some runs, or of all runs in a directory.

    Args:
        paths: the run directories; if empty, all runs in `root`.
        root: the directory that contains the runs.
    """

    def __init__(self, paths: Sequence[Path], root: Path) -> None:
        self.guard = Guard()
        self.address = ""
        """Address of the server, once it listens."""
        self._paths, self._root = list(paths), root
        self._code = new_token()
        self._stopping = asyncio.Event()
        self._given: dict[str, Mapping[str, str]] = {}
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

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncGenerator[Self]:
        """Answer requests while the block runs; port 0 takes a free one.

        Raises:
            OSError: The port is in use.
        """
        app = web.Application(middlewares=[guarded(self.guard, public=("/open",), query="token")])
        app.router.add_get("/", self._page)
        app.router.add_get("/episode", self._episode)
        app.router.add_get("/events", self._events)
        app.router.add_get("/open", self._open)
        app.on_shutdown.append(self._stop)
        async with listen(app, self.guard, port=port) as served:
            self.address = f"{served.url}/"
            yield self

    async def _stop(self, _: web.Application) -> None:
        self._stopping.set()

    async def _open(self, request: web.Request) -> web.Response:
        """Lead to the page, if the code is that of `url_to_open`, which is used up then."""
        if request.query.get("code") != self._code:
            raise Refused(401, "this address was used already", remedy="open the address with the token")
        self._code = new_token()
        return web.Response(status=303, headers={**_HEADERS, "Location": self.url})

    async def _page(self, _: web.Request) -> web.Response:
        states, text = await asyncio.to_thread(self._read, {})
        self._pages += 1
        number = str(self._pages)
        self._given[number] = states
        if len(self._given) > _MAX_PAGES:
            del self._given[next(iter(self._given))]
        page = page_json(
            text, live=True, number=number, token=self.guard.token, single=len(states) == 1, sort=""
        )
        return web.Response(
            text=frame([_block(page)], connect=True), content_type="text/html", headers=_HEADERS
        )

    async def _episode(self, request: web.Request) -> web.Response:
        name, index = request.query.get("run", ""), request.query.get("place", "")
        return web.Response(
            text=await asyncio.to_thread(self._told_episode, name, index),
            content_type="application/json",
            headers=_HEADERS,
        )

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send the runs that change, again and again, until the page is closed or the server stops."""
        stream = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await stream.prepare(request)
        seen = dict(self._given.get(request.query.get("page", ""), {}))
        with suppress(ConnectionError):  # the page was closed
            while not self._stopping.is_set():
                states, news = await asyncio.to_thread(self._read, seen)
                seen |= states
                data = "".join(f"data: {text}\n\n" for text in news)
                await stream.write(f"{data}: still here\n\n".encode())
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), POLL_S)
        return stream

    def _runs(self) -> list[Run]:
        """Return the runs in their current state."""
        try:
            return [Run(path) for path in self._paths] if self._paths else list_runs(self._root)
        except StoreError as error:
            raise Refused(404, str(error)) from error

    def _read(self, seen: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
        """Return the states of the runs, and the JSON of those that are in another state than was seen."""
        runs = self._runs()
        states = {run.id: _state(run) for run in runs}
        changed = [run for run in runs if seen.get(run.id) != states[run.id]]
        return states, [text for run in changed if (text := run_json(run, vocabulary={}))]

    def _told_episode(self, name: str, index: str) -> str:
        """Return the JSON of an episode with the texts of its tokens."""
        run = next((run for run in self._runs() if run.id == name), None)
        if run is None or not _is_index(index) or int(index) >= len(run):
            raise Refused(404, "this episode does not exist")
        summary = run.summaries[int(index)]
        try:
            data = episode_data(run.load(summary), run.note(summary))
        except StoreError as error:
            raise Refused(404, str(error)) from error
        texts = run.vocabulary()
        used = {token for sequence in data["sequences"] for span in sequence for token in span["ids"]}
        data["vocab"] = {str(token): texts[token] for token in used if token in texts}
        return safe_json(data)


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
    run_blocking(_serve(LiveServer(paths, root), port, open_browser=open_browser))


async def _serve(server: LiveServer, port: int, *, open_browser: bool) -> None:
    try:
        async with server.listening(port):
            print(f"{server.url}  (Ctrl-C stops it)", flush=True)  # noqa: T201 - the verb's output
            if open_browser:
                webbrowser.open(server.url_to_open)
            await asyncio.Event().wait()
    except OSError as error:
        raise StoreError(
            f"cannot listen on port {port}: {error.strerror}", remedy="choose another port with --port"
        ) from error
