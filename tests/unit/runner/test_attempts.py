"""An environment marks which attempt at the task a turn belongs to."""

from __future__ import annotations

import pytest

from agentenv.core import StopReason
from agentenv.engine import ScriptedEngine
from agentenv.envs import ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv.runs.store.codec import decode_trajectory, dumps, encode_trajectory, loads
from agentenv.testing import tool_call
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()


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


async def play(*calls: str):
    engine = ScriptedEngine([*calls, "done"], tokenizer=TOKENIZER)
    return await Runner(engine, Renderer(TOKENIZER)).run_episode(Door(), {"code": 7})


async def test_a_turn_belongs_to_the_attempt_that_it_was_sampled_in():
    looked = tool_call("look")

    record = await play(looked, tool_call("enter", code=1), looked, tool_call("enter", code=7))

    assert [turn.attempt for turn in record.turns] == [0, 0, 1, 1, 2]
    assert decode_trajectory(loads(dumps(encode_trajectory(record)))) == record


async def test_an_attempt_below_zero_is_an_error_of_the_environment():
    record = await play(tool_call("enter", code=-3))

    assert record.stop_reason is StopReason.ERROR
    assert record.error.boundary == "env"
    assert "context.attempt to -3" in record.error.message


@pytest.mark.parametrize("told", [1.5, "second", None])
async def test_an_attempt_that_is_no_number_is_an_error_of_the_environment(told):
    class Odd(Door):
        def reward(self) -> float:
            return 1.0

        @tool
        def look(self) -> str:
            """Look at the door."""
            self.context.attempt = told
            return "It is closed."

    engine = ScriptedEngine([tool_call("look"), "done"], tokenizer=TOKENIZER)
    record = await Runner(engine, Renderer(TOKENIZER)).run_episode(Odd(), {"code": 7})

    assert record.stop_reason is StopReason.ERROR
    assert f"{told!r}" in record.error.message
