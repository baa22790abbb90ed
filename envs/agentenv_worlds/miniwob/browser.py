"""One Chromium for all episodes of a process, driven by Playwright.

Playwright's objects belong to the event loop in which they were made. So the browser has a loop of its own,
in a thread, and episodes of any loop hand their work to it. Each episode has a browser context of its own,
which has no network. The browser is started by the first episode and ended with the process.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import importlib.util
import os
import shutil
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from agentenv.core import DependencyMissing, install_line
from agentenv_worlds.names import check_known

__all__ = ["INSTALL", "check_page", "close_browser", "new_page", "on_browser", "url_of"]

INSTALL = install_line("miniwob", more="miniwob")

END_S = 60.0
"""Seconds in which the browser must end when the process ends."""
SIZE = {"width": 332, "height": 214}
"""Size of a page of MiniWoB++; the task has the left half of it."""

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

T = TypeVar("T")


class _Browser:
    """The browser of a process, with its loop."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._chromium: Any = None
        self._driver: Any = None
        self._starting = asyncio.Lock()
        self._thread = threading.Thread(target=self.loop.run_forever, name="miniwob-browser", daemon=True)
        self._thread.start()

    async def context(self) -> Any:
        """Return a new context, after starting the browser if nobody has done so."""
        async with self._starting:
            if self._chromium is None or not self._chromium.is_connected():
                await self.stop()
                self._driver = (
                    await importlib.import_module("playwright.async_api").async_playwright().start()
                )
                # Chromium's own sandbox does not work for root; the pages are files of the package.
                args = ["--no-sandbox"] if os.geteuid() == 0 else []
                self._chromium = await self._driver.chromium.launch(executable_path=_chromium(), args=args)
        return await self._chromium.new_context(viewport=SIZE, offline=True)

    async def stop(self) -> None:
        """End the browser, if it runs."""
        if self._chromium is not None:
            await self._chromium.close()
        if self._driver is not None:  # it runs without a browser where Chromium could not be started
            await self._driver.stop()
        self._chromium = self._driver = None

    def close(self) -> None:
        """End the browser and the loop."""
        asyncio.run_coroutine_threadsafe(self.stop(), self.loop).result(END_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(END_S)
        self.loop.close()


_lock = threading.Lock()
_browsers: list[_Browser] = []


def _browser() -> _Browser:
    with _lock:
        if _browsers and _browsers[0].pid != os.getpid():
            _browsers.clear()  # of the process that this one was forked from
        if not _browsers:
            _browsers.append(_Browser())
        return _browsers[0]


async def on_browser(work: Coroutine[Any, Any, T]) -> T:
    """Do work with Playwright's objects in the browser's own loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _browser().loop))


async def new_page() -> Any:
    """Return a page in a context of its own; call this in the browser's loop."""
    return await (await _browser().context()).new_page()


def close_browser() -> None:
    """End this process's browser; the next episode starts a new one."""
    with _lock:
        mine = [browser for browser in _browsers if browser.pid == os.getpid()]
        _browsers.clear()
    for browser in mine:
        browser.close()


atexit.register(close_browser)


def check_page(name: str) -> None:
    """Check that the packages, a browser and the page of a task are there; nothing is started.

    Raises:
        DependencyMissing: A package or the browser is not installed.
        UnknownEnvironment: MiniWoB++ has no such page.
    """
    missing = [package for package in ("miniwob", "playwright") if importlib.util.find_spec(package) is None]
    if missing:
        raise DependencyMissing(f"miniwob:{name} needs {' and '.join(missing)}", remedy=INSTALL)
    if _chromium() is None and not _has_own():
        raise DependencyMissing(
            f"miniwob:{name} needs Chromium",
            remedy="apt-get install chromium, or: playwright install chromium",
        )
    check_known("MiniWoB++ has no task", name, sorted(page.stem for page in _folder().glob("*.html")))


def url_of(name: str) -> str:
    """Return the address of a task's page."""
    return (_folder() / f"{name}.html").as_uri()


def _folder() -> Path:
    spec = importlib.util.find_spec("miniwob")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "html" / "miniwob"


def _chromium() -> str | None:
    """Return the machine's Chromium; None means the one that Playwright has fetched."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def _has_own() -> bool:
    folder = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    return any(folder.glob("chromium*"))
