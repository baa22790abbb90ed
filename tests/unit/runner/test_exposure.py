"""What the model is shown of an environment, and what a reset may return, seen in the record."""

from __future__ import annotations

import json
from typing import Literal

import pydantic
import pytest

from agentenv.envs import Env
from agentenv.render import Renderer
from agentenv.testing import tool_call
from agentenv.tools import tool
from scenes import TOKENIZER, Go, groups_of, play, runner


class Query(pydantic.BaseModel):
    words: list[str]
    limit: int = 5


class Helper:
    def inherited_helper(self) -> int:
        return 1


class Crowded(Helper, Go):
    """Has many public members; only one of them is a tool."""

    state = "x"

    @property
    def view(self) -> str:
        return "v"

    @staticmethod
    def static() -> int:
        return 1

    def render(self):
        return None

    @tool
    def only(self) -> str:
        "The only tool."
        return "x"


async def test_only_marked_methods_are_shown_to_the_model():
    record = await play(Crowded())

    assert [one["function"]["name"] for one in record.tools] == ["only"]


class Typed(Go):
    @tool
    def find(self, query: Query | None, colour: Literal["red", "blue"] = "red") -> str:
        return f"{query} {colour}"


async def test_a_nested_schema_reaches_the_prompt_whole_and_its_values_the_tool():
    old = TOKENIZER.chat_template
    start, end = old.index("{%- for tool in tools -%}"), old.index("{{- '\\nCall: ")
    as_json = Renderer(TOKENIZER, chat_template=old[:start] + "{{- '\\n' + tools | tojson -}}\n" + old[end:])

    playing = runner([tool_call("find", query={"words": ["w"]}), "done"], renderer=as_json)
    record = await playing.run_episode(Typed(), {})

    prompt = playing.engine.requests[0].prompt_text
    shown, _ = json.JSONDecoder().raw_decode(prompt[prompt.index("[{") :])
    assert shown == json.loads(json.dumps(record.tools))
    assert "anyOf" in json.dumps(shown)
    assert record.turns[0].tool_results[0].text == "words=['w'] limit=5 red"


USER, SYSTEM = {"role": "user", "content": "u"}, {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("observation", "messages"), [("u", [USER]), (USER, [USER]), ([SYSTEM, USER], [SYSTEM, USER])]
)
async def test_whatever_a_reset_returns_stands_once_in_the_messages(observation, messages):

    class Free(Env):
        ends_on_text = True

        def reset(self, *, seed=None, options=None):
            return observation, {}

        def step(self, action: str):
            return "", 0.0, True, False, {}

    before = json.dumps(observation)
    record = await play(Free())

    assert list(record.messages[: len(messages)]) == messages
    assert record.messages[len(messages)]["role"] == "assistant"
    assert record.stop_reason == "final_answer" or record.terminated
    assert json.dumps(observation) == before


async def test_members_of_a_group_are_told_apart_in_every_record():
    playing = runner()

    (group,) = await groups_of(playing, Crowded, [{"id": "same"}], group_size=4)

    assert len({(one.group_id, one.member) for one in group}) == 4
    assert len({request.session_id for request in playing.engine.requests}) == 4
