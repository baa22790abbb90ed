"""What the viewer's pages say, as text: pictures differ between machines, and this text does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.runs.store import Run
from agentenv.runs.view import build_page
from helpers.browser import CHROMIUM, open_browser
from helpers.sample_runs import talk, varied, write_run, write_training

FOLDER = Path(__file__).with_name("viewer_pages")
ROUTES = {
    "runs": "#/",
    "run": "#/r/0",
    "training": "#/r/1",
    "step": "#/r/1/step/2",
    "two-steps": "#/r/1/steps/1/3",
    "group": "#/r/0/e/6",
    "side-by-side": "#/side/1/5/1/11",
    "contexts": "#/r/2/e/0",
}


def dated(run: Run, hour: int) -> Run:
    """The run as if it had been made at an hour of the past, in 90 seconds."""
    info = replace(
        run.info, created=f"2026-01-01T{hour:02}:00:00+00:00", closed=f"2026-01-01T{hour:02}:01:30+00:00"
    )
    info.write(run.path)
    return Run(run.path)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.slow
async def test_pages_say_what_they_said(tmp_path, update_golden):
    runs = [
        write_run(tmp_path, "eval", varied(4)),
        write_training(tmp_path, "train", steps=3),
        write_run(tmp_path, "talk", [talk()]),
    ]
    page = tmp_path / "view.html"
    page.write_text(build_page([dated(run, hour) for hour, run in enumerate(runs)]))
    found: dict[str, str] = {}
    async with open_browser(width=1280) as tab:
        await tab.open(page.as_uri() + "#/none")
        for name, route in ROUTES.items():
            await tab.js(f"document.querySelector('header').dataset.old = 1; location.hash = '{route}'")
            await tab.until("!document.querySelector('header').dataset.old")
            text = str(await tab.js("document.getElementById('app').innerText"))
            found[name] = "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"

    if update_golden:
        FOLDER.mkdir(exist_ok=True)
        for name, text in found.items():
            (FOLDER / f"{name}.txt").write_text(text)
    assert found == {name: (FOLDER / f"{name}.txt").read_text() for name in ROUTES}
