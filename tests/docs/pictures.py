"""Take the pictures of the viewer in docs/images; needs Chromium.

PYTHONPATH=tests python tests/docs/pictures.py          every page at three widths, in light and dark (gallery/)
PYTHONPATH=tests python tests/docs/pictures.py RUN#12   an episode of a real model (view-episode, view-tokens)
"""

# ruff: noqa: ASYNC240 - nothing else runs in the loop
from __future__ import annotations

import asyncio
import base64
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from agentenv.runs.store import Run, find_run
from agentenv.runs.view import build_page
from helpers.browser import Page, open_browser
from helpers.sample_runs import branch, talk, varied, write_branches, write_run, write_training

IMAGES = Path(__file__).parents[2] / "docs" / "images"
FOLDER = IMAGES / "gallery"
SIZES = {1500: 900, 820: 1100, 390: 844}
"""Height of the window for each width."""
QUALITY = 38
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
        write_run(root, "eval", varied(12), terms=("12 of 40 tasks of the split test", "temperature 1.0")),
        write_training(root, "train", steps=8, slope=0.1, scored=True),
        write_run(root, "talk", [talk()]),
        write_run(
            root,
            "eval-later",
            varied(10, size=3),
            terms=("10 of 40 tasks of the split test", "temperature 0.5"),
        ),
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


async def take_gallery() -> None:
    """Take every page of runs that the tests make, so that every machine takes the same pictures."""
    with tempfile.TemporaryDirectory() as root:
        page = sample(Path(root))
        for width, height in SIZES.items():
            async with open_browser(width=width, height=height) as tab:
                await tab.open(page.as_uri() + "#/none")
                for name, (route, action) in PAGES.items():
                    for theme in ("light", "dark"):
                        await show(tab, route, action, theme)
                        await take(
                            tab, FOLDER / f"{name}-{width}-{theme}.webp", format="webp", quality=QUALITY
                        )
    total = sum(file.stat().st_size for file in FOLDER.glob("*.webp"))
    print(f"{len(list(FOLDER.glob('*.webp')))} pictures in {FOLDER}, {total / 1e6:.2f} MB")


async def take_episode(name: str) -> None:
    """Take an episode of a run on this machine, whole and as tokens alone."""
    run, _, index = name.partition("#")
    with tempfile.TemporaryDirectory() as root:
        page = Path(root) / "view.html"
        page.write_text(build_page([find_run(run)]))
        async with open_browser(width=1400, height=900) as tab:
            await tab.open(page.as_uri() + "#/none")
            await show(tab, f"#/r/0/e/{index}", "tab:logprob", "light")
            await take(tab, IMAGES / "view-episode.png")
            box = await tab.js(
                "(() => { const {x, y, width} = document.querySelector('.centre').getBoundingClientRect();"
                " const last = [...document.querySelectorAll('.centre .box')].pop().getBoundingClientRect();"
                " return {x, y, width, height: last.bottom - y + 12, scale: 1}; })()"
            )
            await take(tab, IMAGES / "view-tokens.png", clip=box)


async def take(tab: Page, target: Path, **options: object) -> None:
    """Write a picture of what a tab shows."""
    data = await tab.call("Page.captureScreenshot", **options)
    target.write_bytes(base64.b64decode(data["data"]))


if __name__ == "__main__":
    asyncio.run(take_episode(sys.argv[1]) if sys.argv[1:] else take_gallery())
