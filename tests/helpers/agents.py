"""A scripted model behind the endpoint, and what its sessions recorded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from agentenv.endpoint import Endpoint, Session, SessionOptions, serve_sessions
from agentenv.engine import ScriptedEngine
from agentenv.render import Renderer, byte_tokenizer

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def call(arguments: str, name: str = "add") -> str:
    """The text in which the scripted model calls a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def by_turn(*texts: str) -> Callable[[object], str]:
    """A policy that says the texts by the number of replies in the prompt; the last one again and again."""

    def policy(request) -> str:
        said = request.prompt_text.count("<|im_start|>assistant") - 1
        return texts[min(said, len(texts) - 1)]

    return policy


@dataclass
class Served:
    """A session that is served."""

    endpoint: Endpoint
    session: Session
    engine: ScriptedEngine
    url: str
    http: aiohttp.ClientSession

    async def chat(
        self, messages: Sequence[object], *, tools=(ADD,), status: int = 200, headers=None, **more
    ):
        """Ask as OpenAI's SDK does; the message of the answer, or the error."""
        body = {"model": "m", "messages": list(messages), **({"tools": list(tools)} if tools else {}), **more}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as got:
            said = await got.json()
            assert got.status == status, said
        return said["choices"][0]["message"] if status == 200 else said["error"]

    @property
    def captured(self):
        """The record of the session."""
        return self.session.captured()


@asynccontextmanager
async def served(script, *, renderer: Renderer = RENDERER, **options) -> AsyncGenerator[Served]:
    """Serve a session of a scripted model."""
    engine = ScriptedEngine(script, tokenizer=renderer.tokenizer)
    session = Session(engine, renderer, SessionOptions(**options))
    async with serve_sessions() as endpoint, aiohttp.ClientSession() as http:
        yield Served(endpoint, session, engine, endpoint.url_of(endpoint.open(session)), http)


def check_tokens(session: Session, engine: ScriptedEngine) -> None:
    """Check that each sequence is what the engine saw and said, and that nothing is trained twice."""
    captured = session.captured()
    prompts = {request.prompt_ids for request in engine.requests}
    trained: dict[int, int] = {}
    for number, sequence in enumerate(captured.sequences):
        ids, mask = sequence.token_ids, sequence.loss_mask
        for turn in captured.turns:
            if turn.sequence != number:
                continue
            assert tuple(ids[: turn.start]) in prompts, "the engine was never sent this prompt"
            sampled = session.turns[[t.message for t in session.turns].index(turn.message)]
            assert tuple(ids[turn.start : turn.end]) == sampled.completion.token_ids
            if any(mask[turn.start : turn.end]):
                assert all(mask[turn.start : turn.end])
                trained[turn.index] = trained.get(turn.index, 0) + 1
        assert sum(mask) == sum(
            t.num_tokens for t in captured.turns if t.sequence == number and t.index in trained
        )
    assert set(trained.values()) <= {1}
