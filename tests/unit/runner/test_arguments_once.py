"""The JSON of a call's arguments is read once between the sampled text and the Python function."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date

import pytest

from agentenv.core import Message, StopReason
from agentenv.engine import ChatCompletion, ScriptedEngine, Usage
from agentenv.envs import ToolEnv, make
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv.tools import tool
from agentenv.tools.arguments import Validator

TOKENIZER = byte_tokenizer()
ARGUMENTS = '{"number": 41, "words": ["a", "b"]}'


class Notes(ToolEnv):
    def start(self) -> str:
        self.given: list[object] = []
        return "go"

    @tool
    def note(self, number: int, words: list[str]) -> str:
        "Note something."
        self.given.append((number, words))
        return "noted"

    @tool
    def on(self, day: date) -> str:
        "Note a day."
        self.given.append(day)
        return "noted"


@contextmanager
def reads_of(text: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Note who reads a JSON text: Python's decoder (also behind `json.loads`), or pydantic."""
    readers: list[str] = []
    decode = json.JSONDecoder.raw_decode

    def raw_decode(self, source, idx=0):
        value, end = decode(self, source, idx)
        if text in source[idx:end]:
            readers.append("json")
        return value, end

    validate = Validator.validate

    def noted(self, values, source):
        inner = self._model

        class Spy:
            model_validate = staticmethod(inner.model_validate)

            @staticmethod
            def model_validate_json(source):
                readers.append("pydantic")
                return inner.model_validate_json(source)

        self._model = Spy
        try:
            return validate(self, values, source)
        finally:
            self._model = inner

    with monkeypatch.context() as patched:
        patched.setattr(json.JSONDecoder, "raw_decode", raw_decode)
        patched.setattr(Validator, "validate", noted)
        yield readers


@pytest.mark.parametrize(
    "turn",
    [
        f'<tool_call>{{"name": "note", "arguments": {ARGUMENTS}}}</tool_call>',
        f'<tool_call>{{"function": {{"name": "note", "arguments": {ARGUMENTS}}}}}</tool_call>',
        f'<tool_call>{{"name": "note", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>',
    ],
    ids=["object", "nested", "in a string"],
)
async def test_arguments_that_a_model_wrote_are_read_once(turn, monkeypatch):
    env = Notes()
    engine = ScriptedEngine([turn, "done"], tokenizer=TOKENIZER)

    with reads_of(ARGUMENTS, monkeypatch) as readers:
        record = await Runner(engine, Renderer(TOKENIZER)).run_episode(env, {})

    assert record.stop_reason is StopReason.FINAL_ANSWER
    assert env.given == [(41, ["a", "b"])]
    assert readers == ["json"]
    assert record.turns[0].tool_calls[0].arguments == ARGUMENTS


async def test_arguments_that_a_chat_api_gave_are_read_once(monkeypatch):
    class Server:
        name = "server"
        max_context_tokens = None

        def __init__(self) -> None:
            call = {"id": "c1", "type": "function", "function": {"name": "note", "arguments": ARGUMENTS}}
            first: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            self.answers: list[Message] = [first, {"role": "assistant", "content": "done"}]

        async def chat(self, messages, tools, sampling, *, deadline_s=None) -> ChatCompletion:
            return ChatCompletion(self.answers.pop(0), Usage(10, 5), "stop")

        async def close(self) -> None:
            return None

    env = Notes()

    with reads_of(ARGUMENTS, monkeypatch) as readers:
        await Runner(Server()).run_episode(env, {})

    assert env.given == [(41, ["a", "b"])]
    assert readers == ["json"]


async def test_an_author_s_own_step_around_the_tools_reads_nothing_again(monkeypatch):
    class Stepping(Notes):
        async def step(self, action):
            observation, reward, terminated, truncated, info = await super().step(action)
            return observation, reward + 1, terminated, truncated, info

    env = Stepping()
    turn = f'<tool_call>{{"name": "note", "arguments": {ARGUMENTS}}}</tool_call>'
    engine = ScriptedEngine([turn, "done"], tokenizer=TOKENIZER)

    with reads_of(ARGUMENTS, monkeypatch) as readers:
        record = await Runner(engine, Renderer(TOKENIZER)).run_episode(env, {})

    assert record.reward == 2.0
    assert env.given == [(41, ["a", "b"])]
    assert readers == ["json"]


def test_a_gymnasium_user_s_message_is_read_once(monkeypatch):
    env = make(Notes)
    env.reset(seed=0, options={"task": {}})
    call = {"id": "c1", "type": "function", "function": {"name": "note", "arguments": ARGUMENTS}}

    with reads_of(ARGUMENTS, monkeypatch) as readers:
        observation, *_ = env.step({"role": "assistant", "content": None, "tool_calls": [call]})

    assert [message["content"] for message in observation] == ["noted"]
    assert readers == ["json"]


async def test_a_type_that_reads_json_more_freely_than_python_is_read_by_pydantic_too(monkeypatch):
    env = Notes()
    arguments = '{"day": "2026-01-31"}'
    turn = f'<tool_call>{{"name": "on", "arguments": {arguments}}}</tool_call>'
    engine = ScriptedEngine([turn, "done"], tokenizer=TOKENIZER)

    with reads_of(arguments, monkeypatch) as readers:
        await Runner(engine, Renderer(TOKENIZER)).run_episode(env, {})

    assert env.given == [date(2026, 1, 31)]
    assert readers == ["json", "pydantic"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ('{"number": 1, "number": 2, "words": []}', "appears twice"),
        ('{"number": 1e999, "words": []}', "not a JSON number"),
        ('{"number": 1, "words": ["\\ud800"]}', "surrogate"),
    ],
)
async def test_json_that_no_tool_can_be_given_is_still_told_to_the_model_by_the_tool(arguments, why):
    env = Notes()
    turn = f'<tool_call>{{"name": "note", "arguments": {arguments}}}</tool_call>'
    engine = ScriptedEngine([turn, "done"], tokenizer=TOKENIZER)

    record = await Runner(engine, Renderer(TOKENIZER)).run_episode(env, {})

    (result,) = record.turns[0].tool_results
    assert result.error_kind == "bad_arguments"
    assert why in result.text
    assert env.given == []
    assert record.metrics["parse_errors"] == 0
    assert record.turns[0].tool_calls[0].values is None
