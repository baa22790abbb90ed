"""A headless Chromium for tests, driven over its DevTools socket; no package beyond aiohttp."""

# ruff: noqa: ASYNC240 - another process is waited for
from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from agentenv.runs.view import build_page
from helpers.waiting import PATIENCE_S, until

ALL_VISIBLE = """
const style = document.createElement('style');
style.textContent = '* { content-visibility: visible !important }';
document.head.append(style);
"""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

STARTING_S = 180.0
"""Patience with Chromium's start, which took more than a minute beside fifty busy processes."""


def _all(selector: str) -> str:
    return f"[...document.querySelectorAll({json.dumps(selector)})]"


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []

    async def call(self, method: str, **params: object) -> dict:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = json.loads((await self._socket.receive()).data)
            self._note(message)
            if message.get("id") == number:
                return message.get("result", {})

    def _note(self, message: dict) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(message["params"]["entry"]["text"])

    async def js(self, expression: str) -> object:
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, *, seconds: float = PATIENCE_S) -> object:
        return await until(lambda: self.js(expression), seconds=seconds)

    async def open(self, url: str) -> None:
        """Open a page. `innerText` has all of its text: without the style, what is not painted yet is missing."""
        await self.call("Page.navigate", url=url)
        await self.until(
            "document.readyState === 'complete' && document.querySelector('#app').children.length > 0"
        )
        await self.js(ALL_VISIBLE)

    async def go(self, route: str) -> None:
        await self.js(f"location.hash = {json.dumps(route)}")

    async def text(self, selector: str = "body") -> str:
        return str(await self.js(f"document.querySelector({json.dumps(selector)})?.innerText"))

    async def texts(self, selector: str) -> list[str]:
        return await self.js(f"{_all(selector)}.map((one) => one.innerText)")

    async def count(self, selector: str) -> int:
        return await self.js(f"{_all(selector)}.length")

    async def wait(self, selector: str, count: str = "> 0") -> None:
        """Wait until there are so many elements, `== 2` or `> 10`."""
        await self.until(f"{_all(selector)}.length {count}")

    async def shows(self, text: str, selector: str = "body") -> None:
        """Wait until an element has a text."""
        await self.until(
            f"document.querySelector({json.dumps(selector)})?.innerText.includes({json.dumps(text)})"
        )

    async def click(self, selector: str, text: str = "") -> None:
        """Click the first element with this selector, and with this text alone where one is given."""
        chosen = f"one.innerText === {json.dumps(text)}" if text else "true"
        await self.js(f"{_all(selector)}.find((one) => {chosen}).click()")

    async def fill(self, selector: str, value: str, event: str = "input") -> None:
        await self.js(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)});"
            f" box.value = {json.dumps(value)}; box.dispatchEvent(new Event('{event}')); }})()"
        )

    async def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            extra = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, **extra)

    async def picture(self, path: Path) -> None:
        data = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(data["data"]))


@asynccontextmanager
async def open_browser(width: int = 1500, height: int = 900):
    """Start Chromium with one tab; it is ended with the block."""
    home = tempfile.mkdtemp()
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"],
        *[
            f"--user-data-dir={home}",
            f"--window-size={width},{height}",
            "--disable-extensions",
            "about:blank",
        ],
        stderr=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        ports = Path(home) / "DevToolsActivePort"
        await until(lambda: ports.exists() and "\n" in ports.read_text(), seconds=STARTING_S)
        port = ports.read_text().splitlines()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tab = next(one for one in await answer.json() if one["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.call(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=height,
                    deviceScaleFactor=1,
                    mobile=False,
                )
                yield page
    finally:
        process.kill()
        await process.wait()
        shutil.rmtree(home, ignore_errors=True)


@asynccontextmanager
async def viewer(root: Path, *runs, route: str = "", width: int = 1500, **options):
    """A tab with the viewer's page of these runs, which complains of nothing."""
    page = root / "view.html"
    page.write_text(build_page(list(runs), **options))
    async with open_browser(width) as tab:
        await tab.open(page.as_uri() + route)
        yield tab
        assert tab.complaints == []
