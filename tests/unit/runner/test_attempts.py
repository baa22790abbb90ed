"""An environment marks which attempt at the task a turn belongs to."""

from __future__ import annotations

import pytest

from agentenv.envs import ToolEnv
from agentenv.runs.store.codec import decode_trajectory, dumps, encode_trajectory, loads
from agentenv.testing import tool_call, tool_call_message
from agentenv.tools import tool
from scenes import TOKENIZER, Chat
from scenes import play as play_in_scene

LOOK = tool_call("look")


class Door(ToolEnv):
    """Each code that is tried ends an attempt."""

    def start(self, code: int) -> str:
        self.code = code
        return "Open the door."

    @tool
    def look(self) -> str:
        """Look at the door."""
        return "It is closed."

    @tool
    def enter(self, code: int) -> str:
        """Enter a code."""
        self.context.attempt += 1 if code >= 0 else code
        return "open" if code == self.code else "wrong"


async def play(*calls: str, env: type[ToolEnv] = Door):
    record = await play_in_scene(env(), [*calls, "done"], {"code": 7})
    assert decode_trajectory(loads(dumps(encode_trajectory(record)))) == record
    return record


async def test_a_turn_belongs_to_the_attempt_that_it_was_sampled_in():
    record = await play(LOOK, tool_call("enter", code=1), LOOK, tool_call("enter", code=7))

    assert [turn.attempt for turn in record.turns] == [0, 0, 1, 1, 2]


async def test_an_attempt_below_zero_is_an_error_of_the_environment():
    record = await play(tool_call("enter", code=-3))

    assert (record.stop_reason, record.error.boundary) == ("error", "env")
    assert "context.attempt to -3" in record.error.message


@pytest.mark.parametrize("told", [1.5, "second", None])
async def test_an_attempt_that_is_no_number_is_an_error_of_the_environment(told):
    class Odd(Door):
        @tool
        def look(self) -> str:
            """Look at the door."""
            self.context.attempt = told
            return "It is closed."

    record = await play(LOOK, env=Odd)

    assert record.stop_reason == "error"
    assert f"{told!r}" in record.error.message


class Forgetful(ToolEnv):
    """The second turn's answer begins a new conversation."""

    def start(self, code: int) -> str:
        return "Open the door."

    @tool
    def look(self) -> str:
        """Look at the door."""
        self.context.begins_anew = self.context.turn == 1
        return f"look {self.context.turn}"

    def step(self, action):
        step = super().step(action)

        async def with_prompt():
            results, *rest = await step
            prompt = [{"role": "user", "content": "You wake up. Open the door."}]
            return [*results, *prompt] if self.context.begins_anew else results, *rest

        return with_prompt()


async def test_an_environment_begins_a_new_conversation_of_which_the_model_sees_no_more():
    record = await play(LOOK, LOOK, LOOK, env=Forgetful)

    assert [(one.turn, one.cause, len(one.messages)) for one in record.rewrites] == [(2, "new", 1)]
    answers = [result.text for turn in record.turns for result in turn.tool_results]
    assert answers == ["look 0", "look 1", "look 2"]
    assert [message["role"] for message in record.messages].count("user") == 2
    first, second = (TOKENIZER.decode(one.token_ids) for one in record.sequences)
    assert "look 0" in first
    assert "You wake up" not in first
    assert "You wake up" in second
    assert "look 0" not in second


async def test_a_chat_api_is_sent_the_new_conversation_alone():
    api = Chat(*[tool_call_message("look")] * 3, "done")

    record = await play_in_scene(Forgetful(), api, {"code": 7})

    assert [len(messages) for messages in api.heard] == [1, 3, 1, 3]
    assert [message["content"] for message in api.heard[2]] == ["You wake up. Open the door."]
    assert [(one.turn, one.cause) for one in record.rewrites] == [(2, "new")]
