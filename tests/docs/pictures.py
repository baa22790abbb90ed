"""Take the pictures of docs/internals/gallery.md: every page of the viewer, at three widths, in light and dark.

PYTHONPATH=tests python tests/docs/pictures.py [FOLDER]        (needs Chromium; FOLDER is docs/images/gallery)
"""

# ruff: noqa: ASYNC240 - nothing else runs in the loop
from __future__ import annotations

import asyncio
import base64
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from agentenv.runs.store import Run
from agentenv.runs.view import build_page
from helpers.browser import Page, open_browser
from helpers.sample_runs import branch, talk, varied, write_branches, write_run, write_training

FOLDER = Path(__file__).parents[2] / "docs" / "images" / "gallery"
SIZES = {1500: 900, 820: 1100, 390: 844}
"""Height of the window for each width."""
QUALITY = 40
"""Of the WebP files: text stays sharp, and all pictures together have less than 2 MB."""
PAGES = {
    "runs": ("#/", ""),
    "run": ("#/r/0", ""),
    "grid": ("#/r/0", "document.querySelector('.grid').scrollIntoView()"),
    "training": ("#/r/1", ""),
    "step": ("#/r/1/step/2", ""),
    "two-steps": ("#/r/1/steps/2/5", ""),
    "comparison": ("#/compare/0/3", ""),
    "group": ("#/r/0/e/6", "tab:logprob"),
    "branches": ("#/r/4/e/1", "tab:mask"),
    "messages": ("#/r/2/e/0", "tab:messages"),
    "side-by-side": ("#/side/1/5/1/11", ""),
}
"""Address of each page, and what is done on it: an expression, or the tab to choose."""


def sample(root: Path) -> Path:
    """Write runs of every kind, as if they had been made in the past, and return the file of their page."""
    runs = [
        write_run(root, "eval", varied(12)),
        write_training(root, "train", steps=8, slope=0.1, scored=True),
        write_run(root, "talk", [talk()]),
        write_run(root, "eval-later", varied(10, size=3)),
    ]
    record = runs[0].load(0)
    branches = [branch(record, member, reward=float(member % 3 > 0)) for member in range(4)]
    runs.append(write_branches(root, "branches", runs[0], branches))
    for hour, run in enumerate(runs):
        times = {
            "created": f"2026-01-01T{hour:02}:00:00+00:00",
            "closed": f"2026-01-01T{hour:02}:01:30+00:00",
        }
        replace(run.info, **times).write(run.path)
    page = root / "view.html"
    page.write_text(build_page([Run(run.path) for run in runs]))
    return page


async def go(tab: Page, route: str) -> None:
    """Go to a page of the viewer and wait until it is drawn anew."""
    await tab.js(f"document.querySelector('header').dataset.old = 1; location.hash = '{route}'")
    await tab.until("!document.querySelector('header').dataset.old")


async def show(tab: Page, route: str, action: str, theme: str) -> None:
    """Show a page in a theme, and do on it what its picture shows."""
    await tab.js(f"document.documentElement.dataset.theme = '{theme}'; scrollTo(0, 0)")
    await go(tab, f"#/none/{theme}{route}")
    await go(tab, route)
    if action.startswith("tab:"):
        await tab.js(
            f"[...document.querySelectorAll('[role=tab]')].find(t => t.textContent === '{action[4:]}').click()"
        )
        await tab.until(f"document.querySelector('[role=tab].on').textContent === '{action[4:]}'")
    elif action:
        await tab.js(action)
    await tab.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


async def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        page = sample(Path(root))
        for width, height in SIZES.items():
            async with open_browser(width=width, height=height) as tab:
                await tab.open(page.as_uri() + "#/none")
                for name, (route, action) in PAGES.items():
                    for theme in ("light", "dark"):
                        await show(tab, route, action, theme)
                        data = await tab.call("Page.captureScreenshot", format="webp", quality=QUALITY)
                        target = folder / f"{name}-{width}-{theme}.webp"
                        target.write_bytes(base64.b64decode(data["data"]))
    total = sum(file.stat().st_size for file in folder.glob("*.webp"))
    print(f"{len(list(folder.glob('*.webp')))} pictures in {folder}, {total / 1e6:.2f} MB")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER))
