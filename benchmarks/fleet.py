"""Measure what many servers cost the process that uses them: connecting, beginning episodes, new weights.

    python benchmarks/fleet.py                              # 6 and 64 servers that do no work
    python benchmarks/fleet.py --send MODEL --servers 6 24  # and the files of a model, sent to each of them

The servers are those of the tests, all in one process beside this one, so the seconds are mostly theirs and
the CPU seconds are those of this process alone. Workers take turns in this process; each sends one
request to every server that it begins with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from agentenv.engine.vllm import connect  # noqa: E402 - the tests' folder comes first

WORKERS, EACH = 40, 10
"""Workers, and how many of the servers each begins with."""
Measured = dict[str, float]


async def serve(servers: int, receiving: bool) -> None:
    """Serve in this process until it is ended, after a line with the addresses."""
    from helpers.fake_vllm import FakeVLLM

    kind: Callable[[], FakeVLLM] = FakeVLLM
    if receiving:
        from helpers.receiving import Emptied as kind
    fakes = [kind() for _ in range(servers)]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await fake.start()
            stack.push_async_callback(fake.stop)
        print(",".join(fake.url for fake in fakes), flush=True)
        await asyncio.Event().wait()


async def timed(rounds: int, once: Callable[[], Awaitable[object]]) -> Measured:
    """Return the seconds and the CPU seconds of a round: the best and the median of several."""
    walls: list[float] = []
    spent: list[float] = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        await once()
        walls.append(time.perf_counter() - wall)
        spent.append(time.process_time() - cpu)
    measured = {
        "best_wall_s": min(walls),
        "median_wall_s": statistics.median(walls),
        "best_cpu_s": min(spent),
        "median_cpu_s": statistics.median(spent),
    }
    return {name: round(seconds, 3) for name, seconds in measured.items()}


async def measure(urls: str, rounds: int) -> dict[str, Measured]:
    """Return what servers cost that do no work."""
    from helpers.fake_vllm import say

    servers = urls.count(",") + 1
    driver: Any = None

    async def connected() -> None:
        nonlocal driver
        if driver is not None:
            await driver.close()
        driver, _ = await asyncio.to_thread(connect, urls, tokenizer="x")

    async def begun(turns: int = 1) -> None:
        for _ in range(WORKERS):
            engine: Any = (await asyncio.to_thread(connect, urls, tokenizer="x", examined=examined))[0]
            for number in range(EACH):
                for _ in range(turns):  # a new episode goes to a server that has none
                    await say(engine, session=str(number))
            await engine.close()

    async def pushed() -> None:
        await driver.load_weights("/w", version=driver.weights_version + 1)

    figures = {"connect": await timed(rounds, connected)}
    examined = json.loads(json.dumps(driver.examined()))
    try:
        if servers >= EACH:
            figures[f"{WORKERS} workers"] = await timed(rounds, begun)
            figures["with 2 turns"] = await timed(rounds, lambda: begun(2))
        figures["push"] = await timed(rounds, pushed)
    finally:
        await driver.close()
    return figures


async def send(urls: str, model: Path, rounds: int) -> dict[str, Measured]:
    """Return what it costs to send a model's files to all servers."""
    engine: Any = (await asyncio.to_thread(connect, urls, tokenizer="x", transfer="gloo"))[0]
    try:
        first = time.perf_counter()
        await engine.load_weights(model, version=1)
        first = time.perf_counter() - first  # with the meeting of both sides

        async def sent() -> None:
            await engine.load_weights(model, version=engine.weights_version + 1)

        return {"send": await timed(rounds, sent) | {"first_wall_s": round(first, 2)}}
    finally:
        await engine.close()


def main() -> None:
    """Measure with each number of servers, and print a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", nargs="+", type=int, default=[6, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--send", type=Path, metavar="MODEL", help="directory whose weights are sent instead")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=["fake", "receiving"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.servers[0], options.serve == "receiving"))
        return
    found: dict[str, Any] = {}
    for servers in options.servers:
        words = ["--servers", str(servers), "--serve", "receiving" if options.send else "fake"]
        beside = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True)
        try:
            assert beside.stdout is not None
            urls = beside.stdout.readline().strip()
            rounds = 1 if options.quick else options.rounds
            asked = send(urls, options.send, rounds) if options.send else measure(urls, rounds)
            found[str(servers)] = asyncio.run(asked)
        finally:
            beside.kill()
            beside.wait()
        for what, figures in found[str(servers)].items():
            told = "  ".join(f"{name} {seconds:.3f}" for name, seconds in figures.items())
            print(f"{servers:>3} servers, {what:<11} {told}  load {os.getloadavg()[0]:.1f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
