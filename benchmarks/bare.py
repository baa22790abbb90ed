"""The least that a turn of `runner.py` and `chat.py` can cost, as floors for their figures.

A bare aiohttp client writes a request, reads the answer and appends what the next request needs. It renders
nothing, keeps no log-probabilities, runs no tool and records nothing. Without a wire, the floor encodes each
result of a tool and appends its ids, the completion and its log-probabilities to lists.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
from runner_peers import QUESTION

from agentenv.render import ChatTokenizer

Converse = Callable[[aiohttp.ClientSession], Awaitable[None]]


def chat(
    url: str, schema: dict[str, Any], text: str, count: int, at_once: int
) -> Callable[[], Awaitable[None]]:
    """Return a function that plays episodes over a chat API, whose requests carry texts.

    Args:
        url: base URL of the API, with `/v1`.
        schema: schema of the only tool.
        text: output of the tool.
        count: number of episodes.
        at_once: number of episodes at the same time.
    """

    async def converse(http: aiohttp.ClientSession) -> None:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            data = json.dumps({"model": "mock", "messages": messages, "tools": [schema]})
            async with http.post(f"{url}/chat/completions", data=data) as reply:
                message = json.loads(await reply.read())["choices"][0]["message"]
            if not (calls := message.get("tool_calls")):
                return
            results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
            messages += [message, *results]

    return lambda: _all(converse, count, at_once)


def tokens(
    url: str, first: Sequence[int], more: Sequence[int], turns: int, count: int, at_once: int
) -> Callable[[], Awaitable[None]]:
    """Return a function that plays episodes over token ids, as the runner's own requests do.

    Args:
        url: address of the server, without `/v1`.
        first: ids of the first prompt.
        more: ids that follow each completion with a tool call.
        turns: number of tool calls of an episode.
        count: number of episodes.
        at_once: number of episodes at the same time.
    """
    drawn = {"return_token_ids": True, "temperature": 1.0, "max_tokens": 512, "logprobs": 0, "seed": 1}

    async def converse(http: aiohttp.ClientSession) -> None:
        prompt = list(first)
        for _ in range(turns + 1):
            data = json.dumps({"model": "mock", "prompt": prompt, **drawn})
            async with http.post(f"{url}/v1/completions", data=data) as reply:
                choice = json.loads(await reply.read())["choices"][0]
            prompt += [*choice["token_ids"], *more]

    return lambda: _all(converse, count, at_once)


def appended(
    tokenizer: ChatTokenizer, sampled: Sequence[int], text: str, turns: int, count: int
) -> Callable[[], Awaitable[None]]:
    """Return a function that only appends tokens, as an episode without a wire must.

    Args:
        tokenizer: encodes the results of the tool.
        sampled: ids of each completion.
        text: output of the tool.
        turns: number of tool calls of an episode.
        count: number of episodes.
    """

    async def play() -> None:
        for _ in range(count):
            ids: list[int] = []
            logprobs: list[float] = []
            for turn in range(turns + 1):
                ids += sampled
                logprobs += [-0.5] * len(sampled)
                if turn < turns:
                    ids += tokenizer.encode(text)
                    logprobs += [0.0] * (len(ids) - len(logprobs))

    return play


async def _all(converse: Converse, count: int, at_once: int) -> None:
    room = asyncio.Semaphore(at_once)

    async def one(http: aiohttp.ClientSession) -> None:
        async with room:
            await converse(http)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(one(http) for _ in range(count)))
