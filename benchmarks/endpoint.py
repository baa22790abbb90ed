"""Measure what a request of an agent costs the endpoint, with a short and with a long history.

    python benchmarks/endpoint.py
    python benchmarks/endpoint.py --quick --json endpoint.json

A client in another process asks over HTTP as OpenAI's SDK does, and sends its whole history each time. The
model is a function that returns prepared completions. The figures are CPU milliseconds of the server's
process for each request: HTTP, JSON, matching, rendering, parsing and recording.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentenv.core import RunLimits
from agentenv.endpoint import Session, SessionOptions, serve_sessions
from agentenv.engine import Completion, Sampling
from agentenv.render import ChatTokenizer, Renderer, byte_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a page.",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]},
    },
}
CALL = 'Let me look at the next page.\n<tool_call>{"name": "look", "arguments": {"page": 1}}</tool_call>'
LINE = "the quick brown fox jumps over a lazy dog and runs home at dusk "
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


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


def ask(url: str, api: str, turns: int, chars: int) -> None:
    """Play an agent of so many turns, each with a tool result of so many characters."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port)
    result = (LINE * (chars // len(LINE) + 1))[:chars]
    flat = {"name": "look", "description": "Look.", "parameters": TOOL["function"]["parameters"]}
    said: list[Any] = [{"role": "user", "content": "Read the book."}]
    for _ in range(turns):
        body: dict[str, Any] = {"model": "m"}
        if api == "chat":
            body |= {"messages": said, "tools": [TOOL]}
        elif api == "responses":
            body |= {"input": said, "tools": [{"type": "function", **flat}]}
        else:
            body |= {"messages": said, "max_tokens": 500}
            body["tools"] = [{"name": "look", "input_schema": flat["parameters"]}]
        text = json.dumps(body, ensure_ascii=False).encode()
        connection.request("POST", parts.path + PATHS[api], text, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        if api == "chat":
            message = answer["choices"][0]["message"]
            id = message["tool_calls"][0]["id"]
            said += [message, {"role": "tool", "tool_call_id": id, "content": result}]
        elif api == "responses":
            id = answer["output"][-1]["call_id"]
            said += [*answer["output"], {"type": "function_call_output", "call_id": id, "output": result}]
        else:
            id = answer["content"][-1]["id"]
            block = {"type": "tool_result", "tool_use_id": id, "content": result}
            said.append({"role": "assistant", "content": answer["content"]})
            said.append({"role": "user", "content": [block]})


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


def main() -> None:
    """Measure and print."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("--quick", action="store_true", help="chat completions only")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    renderer = Renderer(byte_tokenizer())
    rows: list[dict[str, Any]] = []
    print(f"{'API':>10}  {'turns':>5}  {'tokens':>6}  {'first 20':>8}  {'last 20':>8}   CPU ms a request")
    for api in ("chat",) if options.quick else PATHS:
        gc.collect()
        took, tokens = asyncio.run(measure(renderer, api, 300, 130))
        early, late = (statistics.median(part) for part in (took[:20], took[-20:]))
        rows.append({"api": api, "turns": 300, "tokens": tokens, "early_ms": early, "late_ms": late})
        print(f"{api:>10}  {300:>5}  {tokens:>6}  {early:>8.2f}  {late:>8.2f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
