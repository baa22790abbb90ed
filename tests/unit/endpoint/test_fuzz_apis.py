"""Random conversations over the three APIs: what is sent is what the SDKs' own types say, and one sequence."""

from __future__ import annotations

import json
import random
from functools import cache

import pytest
from pydantic import TypeAdapter

from helpers.agents import (
    ADD,
    ASK,
    CHAT,
    MESSAGES,
    RESPONSES,
    body_of,
    by_turn,
    call,
    check_one_sequence,
    served,
)
from helpers.wire import ask, goes_on

openai_chat = pytest.importorskip("openai.types.chat")
openai_responses = pytest.importorskip("openai.types.responses")
anthropic_types = pytest.importorskip("anthropic.types")

pytestmark = pytest.mark.slow

TEXTS = ["", " Let me look. \n", "é ü 日本 🙂", "a </x> <b> {", "```json\n{}\n```", "x" * 130]
THOUGHTS = ["", "hm", "I should\n  use tools.  ", "y" * 99]
ARGUMENTS = ['{"a": 1, "b": 2}', '{"b": 3,  "a": 2}', '{"a":1.0,"b":-2}', "{}", '{"a": "é\\n", "b": null}']
KINDS = {
    CHAT: (openai_chat.ChatCompletion, openai_chat.ChatCompletionChunk),
    RESPONSES: (openai_responses.Response, openai_responses.ResponseStreamEvent),
    MESSAGES: (anthropic_types.Message, anthropic_types.RawMessageStreamEvent),
}


def reply(draw, *, last):
    thought, text = draw.choice(THOUGHTS), draw.choice(TEXTS)
    calls = "" if last else "".join(call(draw.choice(ARGUMENTS)) for _ in range(draw.randint(1, 3)))
    return (f"<think>{thought}</think>" if thought else "") + text + calls


adapter_of = cache(TypeAdapter)
"""Making an adapter for the events of a response takes seconds."""


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("seed", range(40))
async def test_a_random_conversation_is_valid_and_one_sequence(path, seed):
    whole, event = KINDS[path]

    def strictly(value, *, streamed):
        adapter_of(event if streamed else whole).validate_json(json.dumps(value))
        return value

    draw = random.Random(f"{path}/{seed}")
    size = draw.randint(1, 5)
    replies = [reply(draw, last=turn == size - 1) for turn in range(size)]
    history = [ASK]
    async with served(by_turn(*replies)) as agent:
        for _ in range(size):
            stream = draw.random() < 0.5
            more = {"stream_options": {"include_usage": True}} if stream and path == CHAT else {}
            body = body_of(path, *history, tools=[ADD], stream=stream, **more)
            history += goes_on(path, await ask(agent, path, body, strictly))

        check_one_sequence(agent, size)
