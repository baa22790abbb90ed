"""The JSON of a call's arguments is read once between the sampled text and the Python function."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date

import pytest

from agentenv.envs import ToolEnv, make
from agentenv.tools import tool
from agentenv.tools.arguments import Validator
from scenes import Chat, play

ARGUMENTS = '{"number": 41, "words": ["a", "b"]}'


def called(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


CALL = {"id": "c1", "type": "function", "function": {"name": "note", "arguments": ARGUMENTS}}
MESSAGE = {"role": "assistant", "content": "", "tool_calls": [CALL]}


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


class Stepping(Notes):
    async def step(self, action):
        observation, reward, terminated, truncated, info = await super().step(action)
        return observation, reward + 1, terminated, truncated, info


@pytest.mark.parametrize(
    ("model", "env"),
    [
        ([called("note", ARGUMENTS), "done"], Notes),
        (
            [f'<tool_call>{{"function": {{"name": "note", "arguments": {ARGUMENTS}}}}}</tool_call>', "done"],
            Notes,
        ),
        ([called("note", json.dumps(ARGUMENTS)), "done"], Notes),
        (MESSAGE, Notes),
        ([called("note", ARGUMENTS), "done"], Stepping),
    ],
    ids=["object", "nested", "in a string", "of a chat api", "an author's own step"],
)
async def test_arguments_are_read_once(model, env, monkeypatch):
    made = env()

    with reads_of(ARGUMENTS, monkeypatch) as readers:
        record = await play(made, model if isinstance(model, list) else Chat(model, "done"))

    assert record.stop_reason == "final_answer"
    assert (made.given, readers) == ([(41, ["a", "b"])], ["json"])
    assert record.turns[0].tool_calls[0].arguments == ARGUMENTS
    assert record.reward == (2.0 if env is Stepping else 0.0)


def test_a_gymnasium_user_s_message_is_read_once(monkeypatch):
    env = make(Notes)
    env.reset(seed=0, options={"task": {}})
    with reads_of(ARGUMENTS, monkeypatch) as readers:
        observation, *_ = env.step({**MESSAGE, "content": None})

    assert [message["content"] for message in observation] == ["noted"]
    assert readers == ["json"]


async def test_a_type_that_reads_json_more_freely_than_python_is_read_by_pydantic_too(monkeypatch):
    env = Notes()
    arguments = '{"day": "2026-01-31"}'

    with reads_of(arguments, monkeypatch) as readers:
        await play(env, [called("on", arguments), "done"])

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

    record = await play(env, [called("note", arguments), "done"])

    (result,) = record.turns[0].tool_results
    assert (result.error_kind, env.given) == ("bad_arguments", [])
    assert why in result.text
    assert record.metrics["parse_errors"] == 0
    assert record.turns[0].tool_calls[0].values is None
