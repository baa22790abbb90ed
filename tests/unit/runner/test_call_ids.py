"""Answers go to calls by id, so a turn's ids differ, whatever ids the model or a server gives."""

from __future__ import annotations

import json

import pytest

from agentenv.core import Message, StopReason, Trajectory
from agentenv.engine import ChatCompletion, ScriptedEngine, Usage
from agentenv.envs import ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()


class Doubles(ToolEnv):
    def start(self) -> str:
        return "go"

    @tool
    def double(self, number: int) -> int:
        "Double a number."
        return 2 * number


class Server:
    """A server that gives each of these ids to a call of one turn, then ends."""

    name = "server"
    max_context_tokens = None

    def __init__(self, *ids: str) -> None:
        calls = [
            {"id": id, "type": "function", "function": {"name": "double", "arguments": f'{{"number": {n}}}'}}
            for n, id in enumerate(ids)
        ]
        first: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        self.answers: list[Message] = [first, {"role": "assistant", "content": "done"}]

    async def chat(self, messages, tools, sampling, *, deadline_s=None) -> ChatCompletion:
        return ChatCompletion(self.answers.pop(0), Usage(10, 5), "stop")

    async def close(self) -> None:
        return None


def assert_each_call_has_its_answer(record: Trajectory, num_calls: int) -> None:
    assert record.stop_reason is StopReason.FINAL_ANSWER, record.error
    calls = next(one["tool_calls"] for one in record.messages if one.get("tool_calls"))
    answers = {one["tool_call_id"]: one["content"] for one in record.messages if one["role"] == "tool"}
    assert answers == {call["id"]: str(2 * number) for number, call in enumerate(calls)}
    assert len(answers) == num_calls


async def test_calls_to_which_the_model_gives_one_id_are_no_error_of_the_environment():
    calls = [{"id": "x", "name": "double", "arguments": {"number": number}} for number in range(3)]
    turn = "".join(f"<tool_call>{json.dumps(one)}</tool_call>" for one in calls)
    engine = ScriptedEngine([turn, "done"], tokenizer=TOKENIZER)

    record = await Runner(engine, Renderer(TOKENIZER), options=RunnerOptions(retries=0)).run_episode(
        Doubles(), {}
    )

    assert_each_call_has_its_answer(record, 3)
    assert record.turns[0].tool_calls[0].id == "x"


@pytest.mark.parametrize("ids", [("", ""), ("x", "x", "x_1"), ("x_1", "x", "x")])
async def test_calls_to_which_a_server_gives_one_id_are_no_error_of_the_environment(ids):
    record = await Runner(Server(*ids), options=RunnerOptions(retries=0)).run_episode(Doubles(), {})

    assert_each_call_has_its_answer(record, len(ids))
