"""No completion makes a parser raise or take more than linear time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core import CallStatus
from agentenv.render import ChatTokenizer, Renderer, byte_tokenizer
from agentenv.render.parse import GRAMMARS
from helpers import chat_cases as cases
from helpers.costs import Costs, parsing_counted

PIECES = (
    *(
        tag
        for grammar in GRAMMARS.values()
        for block in grammar.blocks
        for tag in (block.opens, block.closes)
    ),
    "<think>",
    "</think>",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "to=functions.add",
    "[ARGS]",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<function=add>",
    "</function>",
    "<parameter=n>",
    "</parameter>",
    '<invoke name="add">',
    "</invoke>",
    '<parameter name="n">',
    '<|"|>',
    "<escape>",
    '{"name": "add", "arguments": {',
    '"n": 1',
    "}}",
    "[",
    "]",
    "{",
    "}",
    "add(",
    "n=",
    "'",
    '"',
    "\\",
    ",",
    ":",
    "1e5",
    "-",
    "\n",
    " ",
    "é",
    ">>>",
    "all\n",
    "9" * 500,
    "NaN",
)
RENDERERS = {name: Renderer(byte_tokenizer(), cases.TOOLS, grammar=name) for name in GRAMMARS}
QWEN = Renderer(ChatTokenizer.load(cases.TOKENIZERS / "qwen3"), cases.TOOLS)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30), st.booleans())
def test_no_completion_makes_a_parser_raise(pieces: list[str], ended: bool) -> None:
    ids = byte_tokenizer().encode("".join(pieces))
    for renderer in RENDERERS.values():
        parsed = renderer.parse([*ids, *renderer.stop_token_ids[:ended]])

        good = [call for call in parsed.tool_calls if call.status is CallStatus.OK]
        unknown = [call for call in parsed.tool_calls if call.status is CallStatus.UNKNOWN_TOOL]
        assert len(parsed.message.get("tool_calls", [])) == len(good) + len(unknown)
        assert all(isinstance(json.loads(call.arguments), dict) for call in good)
        assert all(
            call.values in (None, json.loads(call.arguments)) for call in parsed.tool_calls if call in good
        )
        assert all(call.name in {"add", "get_weather"} for call in good)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, QWEN.tokenizer.vocab_size - 1), max_size=60))
def test_no_token_sequence_makes_the_parser_raise(token_ids: list[int]) -> None:
    assert QWEN.parse(token_ids).message["role"] == "assistant"


HOSTILE = (
    "<tool_call>",
    "<think>",
    "[",
    "{",
    '{"a":',
    '{"a":"',
    "[TOOL_CALLS]",
    "<function=",
    "<|message|>",
    "(",
    "'",
    ">>>",
    "a(",
    " ",
    "```json\n[",
    "add(n=1),",
    "<parameter=a>",
    "<|tool_call_begin|>",
    "<think>a</think>",
    '<tool_call>{"name": "add", "arguments": {"n": 1}}</tool_call>',
)


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_repetition_takes_linear_time(piece: str) -> None:
    def cost(renderer: Renderer, count: int) -> Costs:
        ids = byte_tokenizer().encode(piece * count)
        with parsing_counted() as costs:
            renderer.parse(ids)
        return costs

    for name, renderer in RENDERERS.items():
        small, large = cost(renderer, 100), cost(renderer, 800)

        # 8 times the text: at most 8.1 times was counted, and quadratic time would be 64 times.
        assert large.lines <= 12 * small.lines, name
        assert large.characters <= 12 * small.characters, name
