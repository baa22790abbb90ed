"""What the model is shown of an environment, and what a reset may return, seen in the record."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Literal

import pydantic
import pytest

from agentenv.core import AlignmentError, SequenceBuilder, StopReason, TokenSpan, UnknownEnvironment
from agentenv.engine import ScriptedEngine
from agentenv.envs import Env, EnvSpec, ToolEnv, spec
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions
from agentenv.testing import tool_call
from agentenv.tools import tool

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)


async def play(env, script=("done",), renderer=RENDERER):
    engine = ScriptedEngine(list(script), tokenizer=renderer.tokenizer)
    return await Runner(engine, renderer, options=RunnerOptions(retries=0)).run_episode(
        env, {}
    ), engine.requests


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Query(pydantic.BaseModel):
    words: list[str]
    limit: int = 5


class Helper:
    def inherited_helper(self) -> int:
        return 1


class Crowded(Helper, ToolEnv):
    """Has many public members; only one of them is a tool."""

    state = "x"

    def start(self) -> str:
        return "go"

    @property
    def view(self) -> str:
        return "v"

    @staticmethod
    def static() -> int:
        return 1

    def render(self):
        return None

    def is_done(self) -> bool:
        return False

    def close(self) -> None:
        pass

    @tool
    def only(self) -> str:
        "The only tool."
        return "x"


async def test_only_marked_methods_are_shown_to_the_model():
    record, _ = await play(Crowded())

    assert [one["function"]["name"] for one in record.tools] == ["only"]


class Typed(ToolEnv):
    def start(self) -> str:
        return "go"

    @tool
    def many(
        self,
        mode: Literal["a", "b"],
        maybe: int | None,
        rows: list[dict[str, int]],
        colour: Colour,
        point: Point,
        query: Query,
        count: int = 3,
    ) -> str:
        return f"{mode} {maybe} {rows} {colour} {point} {query} {count}"


async def test_every_annotation_becomes_a_schema_and_arrives_as_declared():
    arguments = {
        "mode": "b",
        "maybe": None,
        "rows": [{"k": 1}],
        "colour": "red",
        "point": {"x": 2},
        "query": {"words": ["w"]},
    }

    record, _ = await play(Typed(), [tool_call("many", **arguments), "done"])

    (schema,) = record.tools
    parameters = schema["function"]["parameters"]
    assert set(parameters["required"]) == set(arguments)
    assert parameters["properties"]["mode"]["enum"] == ["a", "b"]
    assert parameters["properties"]["count"]["default"] == 3
    said = record.turns[0].tool_results[0].text
    assert said == "b None [{'k': 1}] Colour.RED Point(x=2, y=0) words=['w'] limit=5 3"


async def test_a_nested_schema_reaches_the_prompt_whole():
    old = TOKENIZER.chat_template
    start, end = old.index("{%- for tool in tools -%}"), old.index("{{- '\\nCall: ")
    as_json = Renderer(TOKENIZER, chat_template=old[:start] + "{{- '\\n' + tools | tojson -}}\n" + old[end:])

    record, requests = await play(Typed(), renderer=as_json)

    prompt = requests[0].prompt_text
    shown, _ = json.JSONDecoder().raw_decode(prompt[prompt.index("[{") :])
    assert shown == json.loads(json.dumps(record.tools))
    assert "anyOf" in json.dumps(shown)


@pytest.mark.parametrize(
    ("observation", "messages"),
    [
        ("hello", [{"role": "user", "content": "hello"}]),
        ({"role": "user", "content": "one"}, [{"role": "user", "content": "one"}]),
        (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        ),
    ],
)
async def test_whatever_a_reset_returns_stands_once_in_the_messages(observation, messages):

    class Free(Env):
        ends_on_text = True

        def reset(self, *, seed=None, options=None):
            return observation, {}

        def step(self, action: str):
            return "", 0.0, True, False, {}

    before = json.dumps(observation)
    record, _ = await play(Free())

    assert list(record.messages[: len(messages)]) == messages
    assert record.messages[len(messages)]["role"] == "assistant"
    assert record.stop_reason is StopReason.FINAL_ANSWER or record.terminated
    assert json.dumps(observation) == before


def test_an_unknown_environment_is_an_error_when_it_is_named():
    with pytest.raises(UnknownEnvironment, match="nowhere/Nothing-v0"):
        spec("nowhere/Nothing-v0")


def test_a_list_that_is_shorter_is_refused_with_both_numbers():
    with pytest.raises(AlignmentError, match="3 sampled tokens but 2 logprobs"):
        TokenSpan("model", (1, 2, 3), (-0.1, -0.2))
    with pytest.raises(AlignmentError, match="turn 4: 3 sampled tokens but 2 logprobs"):
        SequenceBuilder().append_completion((1, 2, 3), (-0.1, -0.2), ((0, 0, 3),), turn=4)


async def test_members_of_a_group_are_told_apart_in_every_record():
    engine = ScriptedEngine(["done"], tokenizer=TOKENIZER, repeat_last=True)
    runner = Runner(engine, RENDERER)
    entry = EnvSpec.of("test/Crowded-v0", Crowded, tasks=[{}])

    (group,) = [one async for one in runner.run_groups(entry, [{"id": "same"}], group_size=4)]

    assert len({(one.group_id, one.member) for one in group}) == 4
    assert len({request.session_id for request in engine.requests}) == 4
