"""A server that keeps vLLM's protocol and plays `helpers/deadly.py`: its answers depend on nothing but the seed."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from aiohttp import web

from agentenv.render import byte_tokenizer
from helpers.fake_vllm import FakeVLLM, in_a_thread

CALL = '<tool_call>{"name": "near", "arguments": {"number": %d}}</tool_call>'


class TalkingServer(FakeVLLM):
    """Answers each request with a tool call or a sentence, which the seed of the request chooses."""

    dies_after = 0
    """Number of completions after which the server breaks all connections and is gone; 0 means never."""
    answered = 0
    died: asyncio.Task[None] | None = None

    def text(self, prompt: list[int], random: Random) -> str:
        number = random.randrange(200)
        return CALL % number if random.random() < 0.6 else f"It is {number}."

    async def generate(self, request):
        body = await request.json()
        drawn = body["sampling_params"]
        self.answered += 1
        if self.answered == self.dies_after:
            self.died = asyncio.create_task(self.stop())
        random = Random(drawn.get("seed", 0))
        text = self.text(body["token_ids"], random)
        ids = [*byte_tokenizer().encode(text), *drawn.get("stop_token_ids", [])[:1]][: drawn["max_tokens"]]
        logprobs = [-random.random() - 0.01 for _ in ids]
        content = [
            {"token_id": token, "logprob": value, "top_logprobs": [{"token_id": token, "logprob": value}] * 5}
            for token, value in zip(ids, logprobs, strict=True)
        ]
        choice = {
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": "stop",
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
        }
        return web.json_response({"choices": [choice]})


@contextmanager
def talking_servers(number: int, directory: Path) -> Generator[list[TalkingServer]]:
    """Serve from a thread, and yield the servers; the directory gets the files of their tokenizer."""
    from agentenv.training.loop import (
        save_tokenizer,  # loads torch, which a server in a process does not need
    )

    directory.mkdir(exist_ok=True)
    save_tokenizer(byte_tokenizer(), directory)
    servers = [TalkingServer(model_path=str(directory), max_model_len=4096) for _ in range(number)]
    with in_a_thread(*servers):
        yield servers
