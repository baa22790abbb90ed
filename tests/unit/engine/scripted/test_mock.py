"""The mock engine: deterministic, weak, and shaped by the tools in the prompt."""

import json
from datetime import date, datetime
from random import Random
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentenv.core import ContextTooLong, text_of
from agentenv.engine import MockEngine, Sampling
from agentenv.engine.scripted.mock import answer, arguments_for, tools_in
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import ChatTokenizer, Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv.runs import rollout
from agentenv.tools import tool
from helpers import chat_cases

CODEC = byte_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {
        "expression": {"type": "string"},
        "digits": {"type": "integer", "minimum": 0, "maximum": 9},
        "mode": {"enum": ["a", "b"]},
        "deep": {"$ref": "#/$defs/Deep"},
        "many": {"type": "array", "items": {"type": "boolean"}},
        "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["expression", "digits", "mode", "deep", "many", "maybe"],
    "$defs": {"Deep": {"type": "object", "properties": {"x": {"const": 3}}, "required": ["x"]}},
}
PROMPT = (
    json.dumps({"type": "function", "function": {"name": "calc", "parameters": SCHEMA}}) + "What is 2 + 3?"
)


async def ask(engine, text=PROMPT, **sampling):
    return await engine.generate(CODEC.encode(text), Sampling(**sampling), stop_token_ids=CODEC.eos_token_ids)


async def test_answers_depend_on_seed_and_prompt_only():
    first = [await ask(MockEngine(CODEC, seed=1), seed=member) for member in range(6)]
    again = [await ask(MockEngine(CODEC, seed=1), seed=member) for member in range(6)]
    other = [await ask(MockEngine(CODEC, seed=2), seed=member) for member in range(6)]

    assert first == again
    assert [done.logprobs for done in first] != [done.logprobs for done in other]
    assert all(len(done.logprobs) == len(done.token_ids) and max(done.logprobs) <= 0 for done in first)


async def test_greedy_ignores_the_request_seed():
    engine = MockEngine(CODEC)

    assert await ask(engine, temperature=0.0, seed=1) == await ask(engine, temperature=0.0, seed=2)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "array", "items": {"$ref": "#/$defs/Node"}},
        {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
        {"$ref": "#/$defs/Node"},
    ],
)
def test_arguments_of_a_schema_that_contains_itself_come_to_an_end(part):
    node = {"type": "object", "properties": {"left": part, "right": part}, "required": ["left", "right"]}
    schema = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/Node"}},
        "required": ["tree"],
        "$defs": {"Node": node},
    }

    made = [arguments_for(schema, "1", Random(seed)) for seed in range(20)]

    assert all(set(each["tree"]) == {"left", "right"} for each in made)


def test_it_calls_an_offered_tool_sometimes_and_answers_otherwise():
    said = [answer(PROMPT, Random(seed)) for seed in range(40)]

    calls = [message["tool_calls"][0]["function"] for message in said if "tool_calls" in message]
    assert 10 < len(calls) < 40
    assert all(call["name"] == "calc" for call in calls)
    assert all(json.loads(call["arguments"])["mode"] in {"a", "b"} for call in calls)


@given(st.integers(0, 10**6))
def test_arguments_have_the_shape_of_the_schema(seed):
    made = arguments_for(SCHEMA, "What is 2 + 3?", Random(seed))

    assert isinstance(made["expression"], str)
    assert isinstance(made["digits"], int)
    assert 0 <= made["digits"] <= 9
    assert made["mode"] in {"a", "b"}
    assert made["deep"] == {"x": 3}
    assert all(isinstance(part, bool) for part in made["many"])
    assert made["maybe"] is None or isinstance(made["maybe"], int | float)


@pytest.mark.parametrize(
    "text",
    ['{"name": "f", "parameters": {"a": 1}}', '{"function": {"name": "f", "parameters": {"a": 1}}}, {"b'],
    ids=str,
)
def test_tools_are_read_out_of_any_json(text):
    assert tools_in("prose { " + text) == [("f", {"a": 1})]


class Item(BaseModel):
    name: Annotated[str, Field(min_length=2, max_length=8, pattern=r"^[a-z]+$")]
    count: Annotated[int, Field(gt=3, multiple_of=7)]
    color: Literal["red", "blue"]


class Typed(ToolEnv):
    def start(self, x: int) -> str:
        return f"Order {x}."

    @tool
    def order(self, items: Annotated[list[Item], Field(min_length=1)], on: date, tags: dict[str, int]) -> str:
        "Order items."
        return "ok"

    @tool
    def book(
        self, at: datetime, code: Annotated[str, Field(pattern=r"^[A-Z]{3}-\d{4}$")], pair: tuple[int, str]
    ) -> str:
        "Book."
        return "ok"

    def reward(self, answer: str) -> float:
        return 0.0


def test_calls_of_typed_tools_succeed_in_a_run():
    spec = EnvSpec.of("test/Typed-v0", Typed, tasks=[{"x": x} for x in range(10)])

    groups = rollout(spec, "mock", num_tasks=10, group_size=2)

    results = [
        result for group in groups for each in group for turn in each.turns for result in turn.tool_results
    ]
    assert len(results) > 10
    assert [result.text for result in results if result.is_error] == []


def test_it_answers_with_the_texts_that_the_environment_takes():
    groups = rollout("gymnasium:FrozenLake-v1", "mock", num_tasks=3, limits={"max_turns": 8})

    said = [text_of(turn.message) for group in groups for each in group for turn in each.turns]
    named = [text for text in said if text in {"left", "down", "right", "up"}]
    assert len(named) > len(said) / 2


def test_tools_are_read_out_of_signatures():
    assert [name for name, _ in tools_in("Tools:\nadd(a, b): Add.\nnow(): Time.\n")] == ["add", "now"]


async def test_the_context_limit_and_the_token_limit_hold():
    with pytest.raises(ContextTooLong):
        await ask(MockEngine(CODEC, max_context_tokens=5))
    short = await ask(MockEngine(CODEC), max_tokens=3)
    assert (len(short.token_ids), short.finish_reason) == (3, "length")


async def test_tokens_are_told_one_by_one():
    told = []
    engine = MockEngine(CODEC)
    done = await engine.stream(CODEC.encode("What is 1+2?"), Sampling(seed=1), told.append, stop_token_ids=())

    assert told == [(token,) for token in done.token_ids]
    assert len(told) > 1


@pytest.mark.parametrize("family", chat_cases.FAMILIES)
async def test_its_calls_are_written_as_the_template_of_the_model_writes_them(family):
    tokenizer = ChatTokenizer.load(chat_cases.TOKENIZERS / family)
    runner = Runner(MockEngine(tokenizer), Renderer(tokenizer))
    tasks = [{"x": seed} for seed in range(8)]
    spec = EnvSpec.of("test/Typed-v0", Typed, tasks=tasks)

    episodes = [each async for group in runner.run_groups(spec, tasks) for each in group]

    results = [result for each in episodes for turn in each.turns for result in turn.tool_results]
    assert [each.error for each in episodes] == [None] * 8
    assert results
    assert [result.text for result in results if result.is_error] == []
