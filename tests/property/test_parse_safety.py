"""No completion makes a parser raise or take more than linear time; rendered calls are read back."""

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

TRL = cases.trl_templates()
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


VALUES = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20),
    st.integers(-(10**6), 10**6).map(str),
    st.sampled_from(
        ["true", "null", "a\nb", "<b>", '"q"', "{'x': 1}", " padded ", "a, b=c", "\\n", "e\u0301"]
    ),
)


WRITERS = {
    "qwen3": "hermes",
    "qwen3_6": "function_xml",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "gemma4_v3": "gemma4",
    "lfm2_2_5": "lfm",
    "llama3_1": "bare_json",
    "deepseekv3": "deepseek_v3",
    "muse_glimmer": "tagged parameters between <atem:function_calls> and </atem:function_calls>",
}


@pytest.mark.skipif(not TRL, reason="trl is not installed")
@pytest.mark.parametrize("name", WRITERS)
def test_rendered_calls_are_read_back(name: str) -> None:
    renderer = Renderer(cases.tokenizer_for(TRL[name]), cases.TOOLS)

    assert renderer.report.grammar == WRITERS[name]
    check_round_trip(renderer)


def check_round_trip(renderer: Renderer) -> None:
    @settings(max_examples=20, deadline=None, database=None)
    @given(VALUES, st.integers(-99, 99))
    def check(city: str, n: int) -> None:
        if renderer.report.grammar == "lfm":  # this template does not escape what stands in quotes
            city = "".join(character for character in city if character not in "'\"\\\n")
        written = _written(renderer, {"city": city, "n": n})
        parsed = renderer.parse(renderer.tokenizer.encode(written) + list(renderer.stop_token_ids[:1]))

        assert [(call.name, call.status) for call in parsed.tool_calls] == [("add", CallStatus.OK)], written
        read = json.loads(parsed.tool_calls[0].arguments)
        assert _same(read["city"], city, renderer), written
        assert int(read["n"]) == n

    check()


def _same(read: object, city: str, renderer: Renderer) -> bool:
    if renderer.report.grammar == "function_xml":  # one line break at either end belongs to the tags
        return str(read).strip("\n") == city.strip("\n")
    return read == city


def _written(renderer: Renderer, arguments: dict[str, object]) -> str:
    """Return what the model would have sampled for a call, as its template writes it."""
    reader = renderer._diagnosis.reader
    shaped = json.dumps(arguments, ensure_ascii=False) if reader.habits.json_arguments else arguments
    call = {"id": "abc123456", "type": "function", "function": {"name": "add", "arguments": shaped}}
    content = None if reader.habits.null_content else ""
    user = {"role": "user", "content": "u"}
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    prompt = reader.render([user], tools=cases.TOOLS)
    whole = reader.render([user, turn], tools=cases.TOOLS, generation_prompt=False)
    shared = 0
    while shared < min(len(prompt), len(whole)) and prompt[shared] == whole[shared]:
        shared += 1
    if shared < len(prompt):
        shared = max(whole.rfind(mark, 0, shared) for mark in ("\n", ">", "]")) + 1
    closes = whole.rfind(renderer.report.closers["call"])
    written = whole[shared : closes if closes > shared else None]
    if "<think>" in prompt[-12:]:  # the model would first end the thinking that its prompt opened
        written = "</think>" + written.removeprefix("</think>")
    return written
