"""Small web pages of MiniWoB++: `miniwob:click-test-2`, `miniwob:login-user`.

1. A task is a page and a seed, which decides what the page shows and asks for. The model reads the page as
   Playwright's accessibility tree, in which each element has a reference such as `e3`.
2. The tools click, fill, select and scroll by these references, or click at a point. Each answers with the
   page as it is afterwards. With `env.screenshots=true` each also shows a picture of the page.
3. The page itself gives the reward, from -1 to 1. Ending without its verdict counts -1, as running out of
   time does in MiniWoB++. The time that the model takes changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from agentenv.core import Message, ToolError
from agentenv.envs import ToolEnv
from agentenv.tools import Image, to_content, tool
from agentenv_worlds.miniwob.browser import new_page, on_browser, url_of

__all__ = ["MAX_TURNS", "MiniWob"]

MAX_TURNS = 20

ACTION_MS = 20_000
"""Longest time that an element may take until it can be clicked or filled."""
MAX_SHOWN = 20_000
"""Characters of the page's text that the model sees."""
TASK_AREA = {"x": 0, "y": 0, "width": 160, "height": 210}
"""The part of a page with the task; beside it the page shows the time that is left."""

_START = """seed => {
  Math.seedrandom(seed);
  core.EPISODE_MAX_TIME = 1e9;
  core.startEpisodeReal();
  const asked = core.getUtterance();
  return typeof asked === 'string' ? asked : asked.utterance;
}"""
_POINT = """e => {
  e.scrollIntoView({block: 'nearest'});
  const box = e.getBoundingClientRect();
  for (const down of [0.5, 0.25, 0.75, 0.1, 0.9])
    for (const along of [0.5, 0.25, 0.75, 0.1, 0.9]) {
      const [x, y] = [box.x + along * box.width, box.y + down * box.height];
      const top = document.elementFromPoint(x, y);
      if (top && (e === top || e.contains(top))) return [x, y];
    }
  return null;
}"""
"""A point at which an element is not covered by another one; elements of a page may overlap."""
_SCROLL = "(e, by) => e.scrollBy(0, by)"
_STATE = "() => [WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]"
_BESIDE = """visibility => {
  for (const name of ['query', 'reward-display', 'sync-task-cover', 'click-canvas']) {
    const element = document.getElementById(name);
    if (element) element.style.visibility = visibility;
  }
}"""
"""Hides what MiniWoB++'s own description of a page leaves out, and shows it again."""
_REF = re.compile(r"\[ref=(e\d+)\]")
_COLOURED = re.compile(r"^Error: |\x1b\[[0-9;]*m")


class MiniWob(ToolEnv):
    """One page with a task.

    Args:
        page: name of the page, such as `click-test-2`.
        screenshots: show a picture of the page with each observation, for models that see images.
    """

    ends_on_text = False

    def __init__(self, page: str, screenshots: bool = False) -> None:
        self._name = page
        self._page: Any = None
        self._refs: set[str] = set()
        self.sends_images = screenshots

    async def start(self, task: Mapping[str, object], seed: int) -> list[Message]:
        """Load the page, let it begin with the task's seed, and show it."""
        await self.close()
        asked = await on_browser(self._load(int(str(task.get("seed", seed)))))
        self._done, self._raw = False, 0.0
        text, *pictures = await self._shown()
        asked = f"{asked}\n\nThe page:\n{text}"
        return [{"role": "user", "content": to_content([asked, *pictures] if pictures else asked)}]

    @tool(parallel=False)
    async def click(self, ref: str) -> Any:
        """Click an element.

        Args:
            ref: the element's reference, such as e3.
        """
        element = self._found(ref)

        async def click(page: Any) -> None:
            point = await page.locator(element).evaluate(_POINT, timeout=ACTION_MS)
            if point is None:
                raise ToolError("nothing of the element can be seen, so it cannot be clicked")
            await page.mouse.click(*point)

        return await self._act(click)

    @tool(parallel=False)
    async def fill(self, ref: str, text: str) -> Any:
        """Write a text into a field, in place of what is there.

        Args:
            ref: the field's reference, such as e3.
            text: the text.
        """
        element = self._found(ref)
        return await self._act(lambda page: page.locator(element).fill(text, timeout=ACTION_MS))

    @tool(parallel=False)
    async def select(self, ref: str, options: list[str]) -> Any:
        """Select options of a list.

        Args:
            ref: the list's reference, such as e3.
            options: labels of the options.
        """
        element = self._found(ref)
        return await self._act(
            lambda page: page.locator(element).select_option(label=options, timeout=ACTION_MS)
        )

    @tool(parallel=False)
    async def scroll(self, ref: str, direction: Literal["up", "down"], pixels: int = 100) -> Any:
        """Scroll an element.

        Args:
            ref: the element's reference, such as e3.
            direction: where to scroll.
            pixels: how far.
        """
        element, by = self._found(ref), pixels if direction == "down" else -pixels
        return await self._act(lambda page: page.locator(element).evaluate(_SCROLL, by, timeout=ACTION_MS))

    @tool(parallel=False)
    async def click_at(self, x: int, y: int) -> Any:
        """Click at a point of the page, which is 160 pixels wide and 210 high.

        Args:
            x: pixels from the left.
            y: pixels from the top.
        """
        return await self._act(lambda page: page.mouse.click(x, y))

    def is_done(self) -> bool:
        """Return whether the page has given its verdict."""
        return self._done

    def reward(self) -> float:
        """Return the page's reward; -1 if it has given none."""
        return self._raw if self._done else -1.0

    async def close(self) -> None:
        """Close the page."""
        page, self._page = self._page, None
        if page is not None:
            await on_browser(page.context.close())

    async def _load(self, seed: int) -> str:
        self._page = await new_page()
        await self._page.goto(url_of(self._name))
        return str(await self._page.evaluate(_START, seed))

    async def _act(self, action: Callable[[Any], Awaitable[object]]) -> Any:
        """Act on the page, and return what it shows afterwards.

        Raises:
            ToolError: The page refuses the action, for example because there is no such element.
        """
        if self._done:
            raise ToolError("the page has ended")
        error = await on_browser(self._try(action))
        if error:
            raise ToolError(error)
        text, *pictures = ["The page has ended."] if self._done else await self._shown()
        return [text, *pictures] if pictures else text

    def _found(self, ref: str) -> str:
        """Return how Playwright finds the element with a reference.

        Raises:
            ToolError: The page, as it was shown last, has no such element.
        """
        if ref not in self._refs:
            raise ToolError(f"the page shows no element {ref[:40]!r}; references look like e3")
        return f"aria-ref={ref}"

    async def _try(self, action: Callable[[Any], Awaitable[object]]) -> str:
        from playwright.async_api import Error  # pyright: ignore[reportMissingImports]

        try:
            await action(self._page)
        except Error as error:
            lines = [_COLOURED.sub("", line).strip() for line in str(error).splitlines()]
            return next(filter(None, lines), "the action failed")
        finally:
            self._done, self._raw = await self._page.evaluate(_STATE)
        return ""

    async def _tree(self) -> str:
        """Return the accessibility tree of what the page shows, dialogs and menus included."""
        await self._page.evaluate(_BESIDE, "hidden")
        try:
            return str(await self._page.locator("body").aria_snapshot(mode="ai"))
        finally:
            await self._page.evaluate(_BESIDE, "")

    async def _shown(self) -> list[Any]:
        """Return the page's text, and a picture if the environment shows them."""
        text = await on_browser(self._tree())
        if len(text) > MAX_SHOWN:
            text = f"{text[:MAX_SHOWN]}\n... (cut, {len(text)} characters)"
        self._refs = set(_REF.findall(text))
        text = text or "(nothing that can be read)"
        if not self.sends_images:
            return [text]
        return [text, Image(await on_browser(self._page.screenshot(clip=TASK_AREA)))]
