"""Measure a model turn over a chat API, beside a bare HTTP client.

    python benchmarks/chat.py
    python benchmarks/chat.py --quick --json chat.json

A mock server on loopback answers at once from another process, with a tool call in every turn except the
last. The figures are CPU milliseconds of this process for each turn, as medians of the repeats, in which the
two take turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import bare
from runner import SCHEMA, cpu_ms_in_turns, episodes, output, table, tokenizer
from runner_peers import serve

from agentenv.render import Renderer
from agentenv_providers import OpenAIChatEngine

AT_ONCE = 8


def row(text: str, turns: int, count: int, repeats: int) -> dict[str, Any]:
    """Measure one shape of episodes in both ways."""
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there, turns), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}/v1"
    ways = {
        "ms": ours(url, text, count, turns),
        "bare_ms": bare.chat(url, SCHEMA, text, count, AT_ONCE),
    }
    try:
        found: dict[str, Any] = dict(cpu_ms_in_turns(ways, (turns + 1) * count, repeats))
    finally:
        server.terminate()
        server.join()
    what = f"{turns} x 100, {AT_ONCE} at once"
    return {"what": what, **found, "ours / bare": found["ms"] / found["bare_ms"]}


def ours(url: str, text: str, count: int, turns: int) -> Callable[[], Awaitable[None]]:
    """Return a function that plays episodes with the runner."""

    async def play() -> None:
        engine = OpenAIChatEngine("mock", base_url=url, api_key="k")
        try:
            await episodes(engine, None, text, count, AT_ONCE, turns)
        finally:
            await engine.close()

    return play


def main() -> None:
    """Measure and print the table, and write JSON if `--json` is set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    text = output(Renderer(tokenizer()), 100)
    rows = [row(text, turns, count, 1 if options.quick else 3) for turns, count in ((4, 64), (64, 8))]
    table("Over a chat API, CPU ms a turn", rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
