"""Fill the table of goals, `benchmarks/nightly.md`, on a machine that does nothing else.

    make nightly
    python benchmarks/nightly.py --peers PYTHON --times 3
    python benchmarks/nightly.py --only sampler demo

Each benchmark that has a goal runs `--times` times, and its row shows all of them, with machine, date and the
load before the first. A row whose benchmark did not run, or lacks a peer, keeps what an earlier night wrote,
and says so when that is older than a month.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_suffix(".md")
FRESH = timedelta(days=31)
HEAD = """# Goals

`make nightly` writes this page (`benchmarks/nightly.py`), on a machine that does nothing else. A figure was
measured as often as it has numbers. Ratios are of two things in one run.

| figure | goal | measured | | why, where missed | machine, date and load |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Goal:
    """A figure of a benchmark, and what it should be."""

    what: str
    script: str
    most: float | None
    """Greatest value that holds; None if there is a least one."""
    figure: Callable[[Any], float]
    """Finds the figure in the benchmark's JSON; raises LookupError or TypeError if it is not there."""
    least: float = 0.0
    why: str = ""
    """What is known about a goal that is missed."""

    @property
    def bound(self) -> str:
        """The goal as the table shows it."""
        return f"≥ {self.least:g}" if self.most is None else f"≤ {self.most:g}"

    def holds(self, value: float) -> bool:
        """Return whether a value meets the goal."""
        return value >= self.least if self.most is None else value <= self.most


def where(rows: Sequence[Mapping[str, Any]], /, **texts: object) -> Mapping[str, Any]:
    """Return the first row of a table that has these values."""
    for row in rows:
        if all(row[name] == text for name, text in texts.items()):
            return row
    raise LookupError(f"no row has {texts}")


def sampled(rows: int, logits: str) -> Callable[[Any], float]:
    """Return what finds the cost of top-p in times plain sampling."""
    return lambda found: where(found["sampler"], rows=rows, logits=logits, sampling="top_p=0.95")[
        "times_plain"
    ]


def over_http(what: str, beside: str) -> Callable[[Any], float]:
    """Return what finds the cost of a turn over HTTP in times that of something else."""

    def find(found: Any) -> float:
        row = where(found["http"], what=what)
        return row["ms"] / row[beside]

    return find


def beside_batching(dtype: str, episodes: int) -> Callable[[Any], float]:
    """Return what finds the speed of the transformers engine over transformers' continuous batching."""
    return lambda found: where(found, dtype=dtype, episodes=episodes)["times_batching"]


GRPO_STEP = (
    "some 58 % of our step are matrix products of these weights, which both compute: 64 passes of 72 ms, "
    "and 2.2 s of the update (2 cores of a Xeon at 2.5 GHz)"
)

GOALS = (
    Goal(
        "optimiser's step, 134.5M float32 weights, times torch's fused AdamW",
        "optimizer",
        1.2,
        lambda found: where(found, how="ours")["cpu_s"] / where(found, how="fused")["cpu_s"],
    ),
    Goal(
        "top-p, 8 rows, times plain sampling",
        "sampler",
        3,
        sampled(8, "few likely tokens"),
        why="the ratio is of 1 to 3 ms, and what plain sampling takes varies by a half between runs",
    ),
    Goal("top-p, 32 rows, times plain sampling", "sampler", 3, sampled(32, "few likely tokens")),
    Goal("top-p, 32 rows, hundreds of likely tokens", "sampler", 3, sampled(32, "hundreds of them")),
    Goal(
        "a group of 8 on 1,000 tokens, prefill of eight different prompts",
        "engines",
        0.2,
        lambda found: where(found, engine="group")["ratio"],
    ),
    Goal(
        "schemas of 500 tools for another episode, ms",
        "tools",
        5,
        lambda found: where(found["episode"], tools=500)["schemas_ms"],
    ),
    Goal(
        "HTTP turn, 4 x 100, 8 at once, times a bare aiohttp client that posts the same tokens",
        "runner",
        3.5,
        over_http("4 x 100, 8 at once", "tokens_bare_ms"),
        why="no part of the turn is more than a sixth of it",
    ),
    Goal(
        "the same, times a bare aiohttp client that posts texts to a chat API",
        "runner",
        6,
        over_http("4 x 100, 8 at once", "chat_bare_ms"),
    ),
    Goal(
        "HTTP turn, 16 x 4,000, of verifiers' time",
        "runner",
        0.6,
        over_http("16 x 4000, 8 at once", "verifiers_ms"),
        why="half of it finds words with Python's `re`, a fifth is the system call that sends the JSON",
    ),
    Goal(
        "whole GRPO step, TRL / ours, CPU",
        "grpo_step",
        None,
        lambda found: found["trl"]["cpu_seconds"] / found["ours"]["cpu_seconds"],
        least=2,
        why=GRPO_STEP,
    ),
    Goal(
        "whole GRPO step, TRL / ours, wall-clock",
        "grpo_step",
        None,
        lambda found: found["trl"]["seconds"] / found["ours"]["seconds"],
        least=2,
        why=GRPO_STEP,
    ),
    Goal(
        "turns of llama.cpp's own tests that are read otherwise",
        "turns",
        25,
        lambda found: found["llama.cpp"]["differ"],
    ),
    Goal(
        "turns of vLLM's own tests that are read otherwise",
        "turns",
        30,
        lambda found: found["vLLM"]["differ"],
        why="in most vLLM guesses what a malformed call means, and here the model is told",
    ),
    Goal(
        "turns of both that SGLang's detectors read like those tests, and ours otherwise",
        "turns",
        0,
        lambda found: found["SGLang"]["differ"],
        why="it runs a call of MiniMax M3 without the argument that the model did not close",
    ),
    Goal(
        "first evaluation from start to exit, CPU-s",
        "evaluate",
        0.6,
        lambda found: found["rows"]["first score"]["cpu_s"],
        why="most of it imports the packages that every evaluation needs, Gymnasium with numpy first",
    ),
    *(
        Goal(
            f"transformers engine / transformers' own batching, tokens a CPU-s, {dtype}, {rows} rows",
            "engines",
            None,
            beside_batching(dtype, rows),
            least=1,
        )
        for dtype in ("float32", "bfloat16")
        for rows in (8, 32)
    ),
    Goal(
        "`make demo`, s",
        "demo",
        180,
        lambda found: found["seconds"],
        why="a decoding pass and a training step of 135M parameters in float32 are bound by the processor",
    ),
    Goal(
        "`make demo`, GiB",
        "demo",
        4.5,
        lambda found: found["peak_rss_bytes"] / 2**30,
        why="it varies between runs; 512 or 768 tokens at once instead of 1,024 do not lower it",
    ),
)


def command(script: str, figures: Path, options: argparse.Namespace) -> list[str]:
    """Return the command that writes the figures of a benchmark to a file."""
    if script == "demo":  # writes its summary into its run, which is the file's folder
        return [sys.executable, str(ROOT / "examples" / "demo.py"), "--output", str(figures.parent)]
    vllm = Path(sys.prefix) / "vllm" / "bin" / "python"
    more = {
        "evaluate": ["--quick"],
        "runner": ["--peers", options.peers] if options.peers else [],
        "turns": ["--sglang", *(["--vllm", str(vllm)] if vllm.exists() else [])],
    }
    return [
        sys.executable,
        str(ROOT / "benchmarks" / f"{script}.py"),
        "--json",
        str(figures),
        *more.get(script, []),
    ]


def measure(script: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Run a benchmark and return the values of its goals, by name, without those that it did not measure."""
    values: dict[str, list[float]] = {}
    for number in range(options.times):
        folder = options.into / f"{script}-{number}"
        figures = folder / ("run/summary.json" if script == "demo" else f"{script}.json")
        folder.mkdir(parents=True, exist_ok=True)
        figures.unlink(missing_ok=True)
        print(f"\n== {script}, {number + 1} of {options.times}", flush=True)
        # One thread, where two would wait for each other; the demo has all, as for a user.
        one = {} if script == "demo" else {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command(script, figures, options), env=os.environ | one, check=False)
        if done.returncode or not figures.exists():
            print(f"{script} has no figures: it ended with the exit code {done.returncode}", file=sys.stderr)
            continue
        found = json.loads(figures.read_text())
        for goal in GOALS:
            if goal.script == script:
                try:
                    value = goal.figure(found)
                except (LookupError, TypeError) as error:
                    print(f"no figure for {goal.what}: {error!r}", file=sys.stderr)
                else:
                    values.setdefault(goal.what, []).append(value)
    return values


def verdict(goal: Goal, values: Sequence[float]) -> str:
    """Return one or a few words for the table."""
    held = sum(map(goal.holds, values))
    return "holds" if held == len(values) else f"holds in {held} of {len(values)}" if held else "missed"


def machine() -> str:
    """Return the cores and the processor of this machine."""
    names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{os.cpu_count()} cores of {names[0] if names else 'an unknown processor'}"


def read(page: str) -> dict[str, list[str]]:
    """Return the cells of the rows of a page, by the name of their figure."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"
    ]
    return {cells[0]: cells for cells in rows[2:]}


def written(
    values: Mapping[str, Sequence[float]], earlier: Mapping[str, list[str]], when: str, today: date
) -> str:
    """Return the page: new values where there are some, else the cells of an earlier night."""
    lines: list[str] = []
    for goal in GOALS:
        if found := values.get(goal.what):
            word = verdict(goal, found)
            numbers = ", ".join(f"{value:.3g}" for value in found)
            cells = [numbers, word, "" if word == "holds" else goal.why, when]
        else:
            cells = earlier.get(goal.what, [])[2:] or ["not measured", "", "", ""]
            day = re.search(r"\d{4}-\d\d-\d\d", cells[3])
            if day and today - date.fromisoformat(day[0]) > FRESH:
                cells[1] = "**older than a month**"
        lines.append(f"| {' | '.join([goal.what, goal.bound, *cells])} |")
    return HEAD + "\n".join(lines) + "\n"


def main() -> int:
    """Measure, write the page and return the exit code: 1 if a benchmark failed."""
    scripts = list(dict.fromkeys(goal.script for goal in GOALS))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=scripts, default=scripts)
    parser.add_argument("--times", type=int, default=1, help="how often each benchmark runs")
    parser.add_argument("--peers", metavar="PYTHON", help="an interpreter that has verifiers")
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "nightly", help="folder of the JSON")
    options = parser.parse_args()
    today = datetime.now(UTC).date()
    when = f"{machine()}, {today}, {os.getloadavg()[0]:.1f}"
    measured: set[str] = set()
    for script in options.only:
        values = measure(script, options)
        measured |= values.keys()
        # After each benchmark, so that a night that is broken off keeps what it has measured.
        PAGE.write_text(written(values, read(PAGE.read_text()) if PAGE.exists() else {}, when, today))
    print(PAGE.read_text())
    missing = [goal.what for goal in GOALS if goal.script in options.only and goal.what not in measured]
    for what in missing:
        print(f"not measured: {what}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
