"""Measure the cost of a model turn in verifiers and Inspect over HTTP; `runner.py --peers PYTHON` runs this.

    PYTHON benchmarks/runner_peers.py verifiers --turns 4 --at-once 8 --count 64 --text "..."

The script does not need agentenv; PYTHON is an interpreter that has the peers. A mock server of the chat API
answers at once from another process, with a tool call in every turn except the last. The script prints one
JSON object: CPU milliseconds of the peer's process for each model turn, and its peak memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import tempfile
import time
from functools import partial
from importlib.metadata import version
from typing import Any

from verifiers_look import QUESTION, load_environment


def serve(pipe: Any, turns: int) -> None:
    """Answer chat requests at once; the number of tool results decides between a call and an answer."""
    asked = 0

    def answer(body: dict[str, Any]) -> bytes:
        nonlocal asked
        asked += 1
        message: dict[str, Any] = {"role": "assistant", "content": "That is all."}
        finish = "stop"
        played = sum(message["role"] == "tool" for message in body["messages"])
        if played < turns:
            function = {"name": "look", "arguments": '{"page": 1}'}
            calls = [{"id": f"call_{played}", "type": "function", "function": function}]
            message, finish = {"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"
        usage = {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20}
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "mock", "usage": usage}
        return json.dumps({**answer, "choices": [choice]}).encode()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                size = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
                content = await reader.readexactly(size)
                count = head.startswith(b"GET /asked")
                body = json.dumps({"asked": asked}).encode() if count else answer(json.loads(content))
                kind = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                writer.write(kind + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(client, "127.0.0.1", 0, limit=2**26)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def verifiers(url: str, text: str, turns: int, at_once: int, count: int, *, workers: int = 0) -> None:
    """Play the episodes with the ToolEnv of verifiers, in this process or in its env workers."""
    from verifiers.types import ClientConfig

    given = {"text": text, "turns": turns, "count": count}
    env = load_environment(**given)
    env.env_id, env.env_args = load_environment.__module__, given
    os.environ["MOCK_KEY"] = "none"

    async def play() -> Any:
        if workers:
            await env.start_server(num_workers=workers, console_logging=False)
        try:
            return await env.evaluate(
                ClientConfig(api_base_url=url, api_key_var="MOCK_KEY"),
                "mock",
                num_examples=count,
                rollouts_per_example=1,
                max_concurrent=at_once,
                on_progress=[],
            )
        finally:
            if workers:
                await env.stop_server()

    found = asyncio.run(play())
    rewards = [one["reward"] for one in found["outputs"]]
    assert rewards == [1.0] * count, rewards


def inspect_ai(url: str, text: str, turns: int, at_once: int, count: int) -> None:
    """Play the episodes with Inspect's default loop."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def look() -> Any:
        async def execute(page: int) -> str:
            """Look at a page.

            Args:
                page: Its number.
            """
            return text

        return execute

    model = get_model("openai/mock", base_url=url, api_key="none", responses_api=False, memoize=False)
    samples = [Sample(input=QUESTION, target="all", id=n) for n in range(count)]
    task = Task(dataset=samples, solver=[use_tools(look()), generate()], scorer=includes())
    with tempfile.TemporaryDirectory() as folder:
        (log,) = eval(
            task, model=model, max_connections=at_once, max_samples=at_once, display="none", log_dir=folder
        )
    assert log.status == "success", log.error
    assert log.results.completed_samples == count
    assert log.results.scores[0].metrics["accuracy"].value == 1.0


PEERS = {
    "verifiers": verifiers,
    "verifiers_workers": partial(verifiers, workers=2),
    "inspect_ai": inspect_ai,
}


def asked(port: int) -> int:
    """Return how many requests the server has answered."""
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/asked") as reply:
        return json.load(reply)["asked"]


def main() -> None:
    """Measure one peer with one shape of episodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--at-once", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--text", required=True, help="output of the tool")
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(there, options.turns), daemon=True
    )
    server.start()
    port = here.recv()
    play, url = PEERS[options.peer], f"http://127.0.0.1:{port}/v1"
    try:
        play(url, options.text, options.turns, options.at_once, min(options.count, 8))
        before, began = asked(port), time.process_time()
        play(url, options.text, options.turns, options.at_once, options.count)
        took, turns = time.process_time() - began, asked(port) - before
    finally:
        server.terminate()
        server.join()
    assert turns == options.count * (options.turns + 1), f"{turns} requests"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    package = options.peer.removesuffix("_workers")
    figures = {"ms": took * 1000 / turns, "peak_rss_mb": peak, "version": version(package)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
