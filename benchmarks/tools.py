"""Measure the cost of a tool call over that of the function itself, next to two peers in the same run.

    python benchmarks/tools.py
    python benchmarks/tools.py --quick --json tools.json
    python benchmarks/tools.py --peers /path/to/other/venv/bin/python

The function adds two numbers, and the call is JSON text as a model writes it. Each figure is the wall-clock
milliseconds of a call without the function's own time, as the median of batches, together with the CPU time.
The bare hop is asyncio's switch to a thread and back, without a schema, checks or a time limit; no sync tool
that runs off the event loop can be faster on the same machine.
Peers that are not installed are looked for in the interpreter named with `--peers`, which does not need
agentenv. Peers that it does not have are skipped with a note.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ARGUMENTS = {"a": 3, "b": "4"}
TEXT = json.dumps(ARGUMENTS)
PEERS = {"mcp": "MCP SDK, Tool.run", "inspect_ai": "Inspect, execute_tools"}
LIMITS = {"async": 0.1, "sync, off the loop": 0.2}


async def add_later(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: First.
        b: Second.
    """
    return a + b


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: First.
        b: Second.
    """
    return a + b


async def measure(call: Callable[[], Awaitable[object]], batches: int, size: int) -> dict[str, float]:
    """Return milliseconds for each call: median and least wall-clock time, and median CPU time."""
    for _ in range(size // 4):
        await call()
    wall: list[float] = []
    cpu: list[float] = []
    for _ in range(batches):
        start, used = time.perf_counter(), time.process_time()
        for _ in range(size):
            await call()
        wall.append((time.perf_counter() - start) / size * 1e3)
        cpu.append((time.process_time() - used) / size * 1e3)
    return {"median_ms": statistics.median(wall), "least_ms": min(wall), "cpu_ms": statistics.median(cpu)}


async def ours(batches: int, size: int) -> dict[str, dict[str, float]]:
    """Measure agentenv's tools, without the function's own cost."""
    from agentenv.core import Context, ToolCall
    from agentenv.tools import Tool, Toolbox

    context = Context()
    own = await measure(lambda: add_later(3, 4), batches, size)
    later, plain = Tool.from_function(add_later), Tool.from_function(add)
    box = Toolbox([later, plain])
    eight = [ToolCall(str(index), "add_later", TEXT) for index in range(8)]
    rows = {
        "async": await measure(lambda: later.call(TEXT, context), batches, size),
        "sync, off the loop": await measure(lambda: plain.call(TEXT, context), batches, size),
        "turn of 8 async calls, each": await measure(lambda: box.run(eight, context), batches, size // 8),
    }
    for figure in rows["turn of 8 async calls, each"]:
        rows["turn of 8 async calls, each"][figure] /= 8
    return {
        name: {figure: value - own[figure] for figure, value in row.items()} for name, row in rows.items()
    }


async def bare_hop(batches: int, size: int) -> dict[str, float]:
    """Measure the function in a thread of asyncio's own pool."""
    loop = asyncio.get_running_loop()
    return await measure(lambda: loop.run_in_executor(None, add, 3, 4), batches, size)


async def schema_costs(batches: int) -> float:
    """Return milliseconds to make a tool and its schema."""
    from agentenv.tools import Tool

    async def make() -> None:
        Tool.from_function(add_later).schema()

    return (await measure(make, batches, 20))["median_ms"]


async def episode_costs(batches: int, count: int) -> dict[str, float]:
    """Return milliseconds for the schemas of so many tools, and for the first prompt of an episode with them.

    Both were asked for before, as those of an episode are after the first one; the prompt is of another task.
    """
    from agentenv.render import Renderer, byte_tokenizer
    from agentenv.tools import Tool, Toolbox

    box = Toolbox([Tool.from_function(add_later, name=f"add_{number}") for number in range(count)])
    renderer, tasks = Renderer(byte_tokenizer()), itertools.count()

    async def schemas() -> None:
        box.schemas()

    async def prompt() -> None:
        renderer.bind(box.schemas()).start([{"role": "user", "content": f"Task {next(tasks)}"}])

    return {
        "tools": count,
        "schemas_ms": (await measure(schemas, batches, 20))["median_ms"],
        "first_prompt_ms": (await measure(prompt, batches, 4))["median_ms"],
    }


async def mcp(batches: int, size: int) -> dict[str, dict[str, float]]:
    """Measure the MCP SDK's function tools, without any transport."""
    tools = importlib.import_module("mcp.server.mcpserver.tools.base")
    context = importlib.import_module("mcp.server.mcpserver").Context()
    rows: dict[str, dict[str, float]] = {}
    for name, function in (("async", add_later), ("sync", add)):
        made = tools.Tool.from_function(function)
        rows[name] = await measure(lambda made=made: made.run(json.loads(TEXT), context), batches, size)
    return rows


async def inspect_ai(batches: int, size: int) -> dict[str, dict[str, float]]:
    """Measure Inspect's execution of one async tool call."""
    model = importlib.import_module("inspect_ai.model")
    tool = importlib.import_module("inspect_ai.tool")

    @tool.tool
    def adder() -> Any:
        async def execute(a: int, b: int = 2) -> int:
            """Add two numbers.

            Args:
                a: First.
                b: Second.
            """
            return a + b

        return execute

    made = adder()
    call = tool.ToolCall(id="1", function="adder", arguments=ARGUMENTS)
    messages = [model.ChatMessageAssistant(content="", tool_calls=[call])]
    return {
        "async": await measure(lambda: model.execute_tools(messages, [made]), batches, max(size // 10, 20))
    }


def peer(name: str, batches: int, size: int, other: str | None) -> dict[str, dict[str, float]] | str:
    """Measure a peer in this or another interpreter; a text says why the peer was skipped."""
    if importlib.util.find_spec(name) is not None:
        try:
            return asyncio.run(globals()[name](batches, size))
        except Exception as error:
            return f"skipped: {type(error).__name__}: {error}"
    if other is None:
        return f"skipped: {name} is not installed here; name an interpreter that has it with --peers"
    command = [other, __file__, "--only", name, "--batches", str(batches), "--size", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        return f"skipped: {done.stderr.strip().splitlines()[-1]}"
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller batches")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--peers", help="a Python interpreter that has the peers")
    parser.add_argument("--only", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, default=15)
    parser.add_argument("--size", type=int, default=500)
    options = parser.parse_args()
    batches, size = (5, 100) if options.quick else (options.batches, options.size)
    if options.only:
        print(json.dumps(asyncio.run(globals()[options.only](batches, size))))
        return
    rows = asyncio.run(ours(batches, size))
    figures: dict[str, Any] = {"agentenv": rows, "make_tool_ms": asyncio.run(schema_costs(batches))}
    figures["episode"] = [asyncio.run(episode_costs(batches, count)) for count in (10, 500)]
    figures["bare_hop"] = asyncio.run(bare_hop(batches, size))
    figures |= {name: peer(name, batches, size, options.peers) for name in PEERS}
    figures["machine"] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
    }
    _show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def _show(figures: dict[str, Any]) -> None:
    line = "{:<46} {:>10} {:>10} {:>10}"
    print(line.format("over the function itself, ms a call", "median", "least", "CPU"))
    for name, row in figures["agentenv"].items():
        print(line.format(f"agentenv, {name}", *(f"{value:.4f}" for value in row.values())), end="")
        print(f"   (at most {LIMITS[name]})" if name in LIMITS else "")
    hop = (f"{value:.4f}" for value in figures["bare_hop"].values())
    print(line.format("asyncio, bare hop to a thread and back", *hop))
    for name, label in PEERS.items():
        rows = figures[name]
        if isinstance(rows, str):
            print(f"{label}: {rows}")
            continue
        for kind, row in rows.items():
            print(line.format(f"{label}, {kind}", *(f"{value:.4f}" for value in row.values())))
    for row in figures["episode"]:
        print(
            f"an episode with {row['tools']} tools: schemas {row['schemas_ms']:.2f} ms,"
            f" first prompt {row['first_prompt_ms']:.1f} ms"
        )
    print(f"making a tool with its schema: {figures['make_tool_ms']:.2f} ms, once")


if __name__ == "__main__":
    main()
