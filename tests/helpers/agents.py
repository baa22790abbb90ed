"""A scripted model behind the endpoint, and what its sessions recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from agentenv.endpoint import Endpoint, Session, SessionOptions, serve_sessions
from agentenv.engine import ScriptedEngine
from agentenv.render import Renderer, byte_tokenizer
from helpers.waiting import until

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
ASK = {"role": "user", "content": "What is 2+3?"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
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


THREE_TURNS = by_turn(
    "<think>hm\n</think> Let me look. \n" + call('{"b": 3,  "a": 2}') + call('{"a": 1.0, "b": 2}'),
    "<think>so\n</think>" + call('{"a": 5, "b": 1}'),
    "\n\nIt is 6. \n",
)


def tools_of(path: str, *tools: dict[str, Any]) -> list[dict[str, Any]]:
    """Tools in the form of one of the APIs."""
    functions = [tool["function"] for tool in tools]
    if path == MESSAGES:
        return [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
    return list(tools) if path == CHAT else [{"type": "function", **one} for one in functions]


def body_of(
    path: str, *messages: object, tools: Sequence[dict[str, Any]] = (), **more: object
) -> dict[str, Any]:
    """The body of a request to one of the APIs."""
    body: dict[str, Any] = {"model": "m", "input" if path == RESPONSES else "messages": list(messages)}
    body |= {"max_tokens": 2000} if path == MESSAGES else {}
    return body | ({"tools": tools_of(path, *tools)} if tools else {}) | more


def results(message, text: str = "5") -> list[dict[str, str]]:
    """A result for each call of a message."""
    return [
        {"role": "tool", "tool_call_id": made["id"], "content": text}
        for made in message.get("tool_calls") or ()
    ]


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

    async def post(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        """Post a body, and return the answer."""
        async with self.http.post(f"{self.url}{path}", json={"model": "m", **body}) as got:
            said = await got.json()
            assert got.status == status, said
        return said

    async def hang_up(self, asking: asyncio.Task[Any]) -> None:
        """Break off a request that the session works on."""
        await until(lambda: self.session.busy)
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: next(iter(self.session._flights.values())).is_gone())

    @property
    def ignored(self) -> set[str]:
        """Names of what was not followed."""
        counts = self.session.counts
        return {name for name, count in counts.items() if name.startswith("ignored_") and count}

    @property
    def causes(self) -> list[str]:
        """Why the conversation was split."""
        return [rewrite.cause for rewrite in self.captured.rewrites]

    @property
    def captured(self):
        """The record of the session."""
        return self.session.captured()


@asynccontextmanager
async def served(
    script: Any = None, *, renderer: Renderer | None = RENDERER, engine: Any = None, **options: Any
) -> AsyncGenerator[Served]:
    """Serve a session of a scripted model, or of another engine."""
    engine = engine or ScriptedEngine(script, tokenizer=renderer.tokenizer)
    session = Session(engine, renderer, SessionOptions(**options))
    async with serve_sessions() as endpoint, aiohttp.ClientSession() as http:
        yield Served(endpoint, session, engine, endpoint.url_of(endpoint.open(session)), http)


def check_one_sequence(agent: Served, turns: int = 3):
    """Check that a conversation is one sequence in which all that was sampled is trained; return the record."""
    captured = agent.captured
    check_tokens(agent.session, agent.engine)
    assert [turn.sequence for turn in captured.turns] == [0] * turns
    assert captured.sequences[0].num_trained_tokens == sum(turn.num_tokens for turn in captured.turns)
    assert captured.rewrites == ()
    assert captured.left_out == {}
    return captured


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
