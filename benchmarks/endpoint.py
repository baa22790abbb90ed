"""Measure what a request of an agent costs the endpoint, with a short and with a long history.

    python benchmarks/endpoint.py
    python benchmarks/endpoint.py --quick --json endpoint.json
    python benchmarks/endpoint.py --peers /path/to/other/venv/bin/python

A client in another process asks over HTTP as OpenAI's SDK does, and sends its whole history each time. The
model is a function that returns prepared completions. The figures are CPU milliseconds of the server's
process for each request: HTTP, JSON, matching, rendering, parsing and recording. The row "bare" is a server
that only reads the JSON and answers. With --peers, the interception server of verifiers is measured in the
same run; the interpreter must have verifiers (`make test-peers` makes one, `.venv-peers`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import subprocess
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from aiohttp import web
from endpoint_agent import PATHS, TEXT, ask

from agentenv.core import RunLimits
from agentenv.endpoint import Session, SessionOptions, serve_sessions
from agentenv.engine import Completion, Sampling
from agentenv.render import ChatTokenizer, Renderer, byte_tokenizer

CALL = TEXT + '\n<tool_call>{"name": "look", "arguments": {"page": 1}}</tool_call>'
TURNS, CHARS = 300, 130


class Prepared:
    """An engine that answers at once, and notes the CPU time at which it is asked."""

    name = "prepared"
    max_context_tokens = None
    weights_version = 0

    def __init__(self, tokenizer: ChatTokenizer, stop: int) -> None:
        ids = (*tokenizer.encode(CALL), stop)
        self._completion = Completion(ids, (-0.5,) * len(ids), "stop", ((0, 0, len(ids)),))
        self.asked_at: list[float] = []
        self.prompt_tokens = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **_: object) -> Completion:
        """Return the prepared completion."""
        self.asked_at.append(time.process_time())
        self.prompt_tokens = len(prompt_ids)
        return self._completion

    async def release(self, session_id: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is open."""


async def measure(renderer: Renderer, api: str, turns: int, chars: int) -> tuple[list[float], int]:
    """Return the CPU milliseconds of each request after the first, and the tokens of the last prompt."""
    engine = Prepared(renderer.tokenizer, renderer.stop_token_ids[0])
    limits = RunLimits(max_turns=None, max_tokens_per_turn=None)
    session = Session(engine, renderer, SessionOptions(limits=limits))
    async with serve_sessions() as endpoint:
        url = endpoint.url_of(endpoint.open(session))
        client = multiprocessing.get_context("spawn").Process(target=ask, args=(url, api, turns, chars))
        client.start()
        await asyncio.to_thread(client.join)
    if client.exitcode or len(session.captured().sequences) != 1:
        raise SystemExit("the agent did not play one conversation")
    times = engine.asked_at
    took = [1000 * (after - before) for before, after in pairwise(times)]
    return took, engine.prompt_tokens


async def bare() -> list[float]:
    """Return the CPU milliseconds of each request to a server that only reads and writes JSON."""
    asked_at: list[float] = []

    async def answer(request: web.Request) -> web.Response:
        json.loads(await request.read())
        asked_at.append(time.process_time())
        function = {"name": "look", "arguments": '{"page": 1}'}
        call = {"id": f"call_{len(asked_at)}", "type": "function", "function": function}
        message = {"role": "assistant", "content": TEXT, "tool_calls": [call]}
        return web.json_response({"choices": [{"message": message}]})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post(PATHS["chat"], answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    client = multiprocessing.get_context("spawn").Process(
        target=ask, args=(f"http://{host}:{port}", "chat", TURNS, CHARS)
    )
    client.start()
    await asyncio.to_thread(client.join)
    await runner.cleanup()
    return [1000 * (after - before) for before, after in pairwise(asked_at)]


def peer(python: str) -> tuple[str, list[float]] | None:
    """Return the name of the peer and the milliseconds of its requests; None if it cannot be measured."""
    script = Path(__file__).with_name("endpoint_peers.py")
    command = [python, str(script), "--turns", str(TURNS), "--chars", str(CHARS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"verifiers was not measured: {done.stderr.strip().splitlines()[-1:]}")
        return None
    read = json.loads(done.stdout.splitlines()[-1])
    return read["name"], read["took_ms"]


def row(name: str, api: str, took: Sequence[float], tokens: int | None = None) -> dict[str, Any]:
    """Print and return the figures of one server."""
    early, late = (statistics.median(part) for part in (took[:20], took[-20:]))
    shown = "" if tokens is None else str(tokens)
    print(f"{name:>16}  {api:>9}  {shown:>6}  {early:>8.2f}  {late:>8.2f}")
    return {"name": name, "api": api, "turns": TURNS, "tokens": tokens, "early_ms": early, "late_ms": late}


def main() -> None:
    """Measure and print."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--quick", action="store_true", help="chat completions only")
    parser.add_argument("--peers", help="a Python interpreter that has verifiers")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    renderer = Renderer(byte_tokenizer())
    print(f"{TURNS} turns; CPU ms a request")
    print(f"{'server':>16}  {'API':>9}  {'tokens':>6}  {'first 20':>8}  {'last 20':>8}")
    rows = [row("bare", "chat", asyncio.run(bare()))]
    for api in ("chat",) if options.quick else PATHS:
        gc.collect()
        took, tokens = asyncio.run(measure(renderer, api, TURNS, CHARS))
        rows.append(row("agentenv", api, took, tokens))
    if options.peers and (found := peer(options.peers)) is not None:
        rows.append(row(found[0], "chat", found[1]))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
