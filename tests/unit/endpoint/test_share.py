"""One agent's requests are bounded, worked on beside the event loop, and hold up no other session."""

from __future__ import annotations

import threading

import pytest

from agentenv.core.threads import LARGE_CHARS
from agentenv.endpoint.share import AT_ONCE_S, PART, Share
from agentenv.render import ChatTokenizer, Renderer
from helpers.agents import ADD, TOKENIZER, served

ASK = {"role": "user", "content": "a"}
CALLS = [
    {"id": f"c{i}", "type": "function", "function": {"name": "a", "arguments": ""}} for i in range(10_001)
]


class Watched(ChatTokenizer):
    """A tokenizer that notes in which threads it encodes large texts."""

    def encode(self, text: str) -> list[int]:
        if len(text) >= LARGE_CHARS:
            self.threads.add(threading.current_thread())
        return super().encode(text)


def watched() -> Watched:
    tokenizer = Watched(
        TOKENIZER.backend,
        chat_template=TOKENIZER.chat_template,
        eos_token_ids=TOKENIZER.eos_token_ids,
        special_tokens=TOKENIZER.special_tokens,
    )
    tokenizer.threads = set()
    return tokenizer


@pytest.mark.parametrize(
    ("messages", "tools", "told"),
    [
        ([ASK] * 10_001, (), "10,001 messages"),
        ([ASK, {"role": "assistant", "tool_calls": CALLS}, ASK], (), "10,001 calls"),
        ([ASK], [ADD] * 1_001, "1,001 tools"),
    ],
)
async def test_a_request_with_more_of_anything_than_an_agent_has_is_refused(messages, tools, told):
    async with served(["Yes."]) as agent:
        error = await agent.chat(messages, tools=tools, status=413)

        assert f"{told}, and at most" in error["message"]
        assert not agent.captured.turns


async def test_a_long_conversation_is_read_and_rendered_beside_the_event_loop():
    tokenizer = watched()
    renderer = Renderer(tokenizer)
    tokenizer.threads.clear()
    async with served(["Yes."], renderer=renderer) as agent:
        await agent.chat([{"role": "user", "content": "a" * LARGE_CHARS}])

    assert tokenizer.threads
    assert threading.main_thread() not in tokenizer.threads


def test_a_session_that_used_its_share_waits_until_it_has_grown_again():
    now = 100.0
    share = Share("greedy", clock=lambda: now)
    share._used_s = AT_ONCE_S + 1.0

    assert share.wait_s() == pytest.approx(1.0 / PART)

    now += 1.0 / PART
    assert share.wait_s() == 0.0
