"""Measure the interception server of verifiers; `endpoint.py --peers PYTHON` runs this.

    PYTHON benchmarks/endpoint_peers.py --turns 300 --chars 130

The script does not need agentenv; PYTHON is an interpreter that has verifiers. The client of the model is
replaced by a function that returns a prepared answer, so the server renders no tokens. The script prints one
JSON object: the CPU milliseconds of the server's process for each request after the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from importlib.metadata import version
from itertools import count, pairwise
from typing import Any

from endpoint_agent import TEXT, ask


async def measure(turns: int, chars: int) -> list[float]:
    """Return the CPU milliseconds of each request after the first."""
    import verifiers.v1 as vf
    from verifiers.v1.clients import Client, ModelContext
    from verifiers.v1.clients.train import serialize_completion
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.interception import InterceptionServer
    from verifiers.v1.session import RolloutSession
    from verifiers.v1.state import State
    from verifiers.v1.task import TaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, Response, ToolCall, Usage

    numbers = count()
    asked_at: list[float] = []

    class Prepared(Client):
        async def get_response(self, dialect: Any, body: dict, *_: Any, **__: Any) -> Response:
            asked_at.append(time.process_time())
            call = ToolCall(id=f"call_{next(numbers)}", name="look", arguments='{"page": 1}')
            message = AssistantMessage(content=TEXT, tool_calls=[call])
            usage = Usage(prompt_tokens=10, completion_tokens=10)
            response = Response(
                id="x", created=1, model="m", message=message, finish_reason="tool_calls", usage=usage
            )
            response.raw = serialize_completion(response, "m")
            return response

    data = TaskData(idx=0, prompt="Read the book.")
    trace = Trace(
        task=TraceTask(type="Task", data=data), state=State(), agent=AgentInfo(config=vf.AgentConfig())
    )
    session = RolloutSession(ctx=ModelContext(model="m", client=EvalClientConfig()), trace=trace)
    server = InterceptionServer()
    server._client = lambda config: Prepared()
    async with server, server.acquire(session) as (url, secret, _):
        process = multiprocessing.get_context("spawn").Process(
            target=ask, args=(url, "chat", turns, chars, secret)
        )
        process.start()
        await asyncio.to_thread(process.join)
    if process.exitcode or len(asked_at) != turns:
        raise SystemExit(f"the agent did not play its {turns} turns: {session.error}")
    return [1000 * (after - before) for before, after in pairwise(asked_at)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=300)
    parser.add_argument("--chars", type=int, default=130)
    options = parser.parse_args()
    took = asyncio.run(measure(options.turns, options.chars))
    print(json.dumps({"name": f"verifiers {version('verifiers')}", "took_ms": took}))


if __name__ == "__main__":
    main()
