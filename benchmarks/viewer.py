"""Measure the page of a large run: making it, and what a reader waits for in Chromium.

    python benchmarks/viewer.py [--episodes 150000] [--quick] [--json PATH]

The seconds in the browser need playwright and Chromium, as the extra `miniwob` installs them, and are left
out otherwise. Each of them ends when the page has been drawn again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from agentenv.core import Message, StopReason, TokenSequence, TokenSpan, Trajectory, Turn
from agentenv.runs.store import Run, RunWriter
from agentenv.runs.view import build_page, write_page

MEMBERS = 8
TOKENS = 100
ROWS = "document.querySelectorAll('.vrow').length > 10"
FILTER = (
    "const i = document.querySelector('input'); i.value = '%s';"
    " i.dispatchEvent(new Event('input', {bubbles: true}))"
)
ALL = "/(\\d+) of \\1 episodes/.test(document.body.innerText)"
STEPS = {
    "filter": (FILTER % "reward<0.5", f"!{ALL}"),
    "no filter": (FILTER % "", ALL),
    "to the end": ("const list = document.querySelector('.vlist'); list.scrollTop = list.scrollHeight", ROWS),
    "an episode": ("location.hash = '#/r/0/e/1'", "document.querySelectorAll('.box').length > 1"),
    "back": ("location.hash = '#/r/0'", ROWS),
}
"""What a reader does, and what is true as soon as the page shows it."""
DRAWN = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"


def episode(group: int, member: int) -> Trajectory:
    """Return an episode of one turn."""
    tokens = tuple(range(group % 1_000, group % 1_000 + TOKENS))
    sampled = TokenSpan("model", tokens, (-0.1,) * TOKENS, 0, 0)
    answer: Message = {"role": "assistant", "content": f"The answer is {group + member}."}
    return Trajectory(
        env_id="bench/A-v0",
        task_id=f"t{group}",
        seed=group,
        group_id=f"g{group}",
        member=member,
        stop_reason=StopReason.FINAL_ANSWER,
        turns=(Turn(0, answer, "stop", TOKENS, start=3),),
        sequences=(TokenSequence((TokenSpan("prompt", (1, 2, 3)), sampled)),),
        messages=({"role": "user", "content": f"What is {group} + {member}?"}, answer),
        reward=float((group + member) % 3 == 0),
    )


def stored(root: Path, episodes: int) -> Run:
    """Write a run."""
    with RunWriter.create("big", runs_dir=root, run_id="big") as writer:
        for number in range(episodes):
            writer.append(episode(*divmod(number, MEMBERS)))
    return Run(writer.path)


def waits(page: Path) -> dict[str, float]:
    """Return the seconds until each step of a reader is drawn."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    figures: dict[str, float] = {}
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(bypass_csp=True)
        began = time.perf_counter()
        tab.goto(page.as_uri())
        tab.wait_for_function(ROWS, timeout=120_000)
        figures["open"] = time.perf_counter() - began
        for name, (step, shown) in STEPS.items():
            began = time.perf_counter()
            tab.evaluate(f"() => {{ {step}; return {DRAWN}; }}")
            tab.wait_for_function(shown)
            figures[name] = time.perf_counter() - began
        browser.close()
    return figures


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=150_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    episodes = 5_000 if options.quick else options.episodes
    with tempfile.TemporaryDirectory() as root:
        began = time.process_time()
        run = stored(Path(root), episodes)
        figures = {"write_cpu_s": time.process_time() - began}
        page = Path(root) / "view.html"
        began = time.process_time()
        write_page(page, build_page([run]))
        figures |= {"page_cpu_s": time.process_time() - began, "page_mb": page.stat().st_size / 1e6}
        if find_spec("playwright") is None:
            print("playwright is not installed, so nothing is measured in a browser")
        else:
            figures |= {f"{name}_s": seconds for name, seconds in waits(page).items()}
    for name, value in figures.items():
        print(f"{name:<16} {value:>8.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"episodes": episodes, **figures}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
