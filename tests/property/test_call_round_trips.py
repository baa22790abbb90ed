"""A call that a template renders is read back as it was: name, arguments, order, whatever stands in them."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core import CallStatus, RenderError
from agentenv.core.messages import chat_call
from agentenv.render import ChatTokenizer, Renderer
from agentenv.render.parse import GRAMMARS
from helpers import call_formats as formats
from helpers import chat_cases as cases

TRL = cases.trl_templates()
SHIPPED = {"qwen3": "hermes", "gptoss": "harmony", "mistral_tekken": "mistral", "deepseek_v3": "deepseek_v3"}
BY_TRL = {
    "qwen3_6": "function_xml",
    "glm4moe": "glm",
    "gemma4_v3": "gemma4",
    "lfm2_2_5": "lfm",
    "llama3_1": "bare_json",
    "muse_glimmer": "tagged parameters between <atem:function_calls> and </atem:function_calls>",
}

BOOK = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Book.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "n": {"type": "integer"},
                "ratio": {"type": "number"},
                "flag": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "extra": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "string"},
                        "b": {"type": "array", "items": {"type": "integer"}},
                    },
                },
            },
            "required": ["city", "n"],
        },
    },
}
WORDS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20),
    st.integers(-(10**6), 10**6).map(str),
    st.sampled_from(
        ["true", "null", "None", "", "a\nb", "<b>", '"q"', "it's", "{'x': 1}", "[1]", " padded ", "a, b=c"]
    ),
    st.sampled_from(["\\n", "e\u0301", "\U000e0041", "&amp;", "a)", "}", "```", "name", "\u2028x", "tab\tx"]),
)
ARGUMENTS = st.fixed_dictionaries(
    {"city": WORDS, "n": st.integers(-(10**15), 10**15)},
    optional={
        "ratio": st.floats(-1e6, 1e6, allow_nan=False).filter(lambda value: value != int(value)),
        "flag": st.booleans(),
        "tags": st.lists(WORDS, max_size=3),
        "extra": st.fixed_dictionaries({"a": WORDS, "b": st.lists(st.integers(-9, 9), max_size=3)}),
    },
)
CALLS = st.lists(ARGUMENTS, min_size=1, max_size=3)


@pytest.mark.parametrize("family", SHIPPED)
def test_calls_of_real_vocabularies_are_read_back(family: str) -> None:
    renderer = Renderer(ChatTokenizer.load(cases.TOKENIZERS / family), [BOOK])

    assert renderer.report.grammar == SHIPPED[family]
    check_round_trip(renderer)


@pytest.mark.parametrize("grammar", formats.CALL_FORMATS)
def test_calls_of_every_format_are_recognised_and_read_back(grammar: str) -> None:
    renderer = Renderer(cases.tokenizer_for(formats.CALL_FORMATS[grammar]), [BOOK])

    assert renderer.report.grammar == grammar
    check_round_trip(renderer)


@pytest.mark.skipif(not TRL, reason="trl is not installed")
@pytest.mark.parametrize("name", BY_TRL)
def test_calls_of_real_templates_are_read_back(name: str) -> None:
    renderer = Renderer(cases.tokenizer_for(TRL[name]), [BOOK])

    assert renderer.report.grammar == BY_TRL[name]
    check_round_trip(renderer)


@pytest.mark.slow
@pytest.mark.skipif(not TRL, reason="trl is not installed")
@pytest.mark.parametrize("name", sorted(TRL))
def test_calls_of_every_template_of_trl_are_read_back(name: str) -> None:
    renderer = Renderer(cases.tokenizer_for(TRL[name]), [BOOK])

    if renderer.report.verdict in {"fast", "history"}:
        check_round_trip(renderer, examples=40)
    else:
        assert renderer.report.reasons


def test_no_grammar_is_left_without_a_round_trip() -> None:
    proven = {*SHIPPED.values(), *BY_TRL.values(), *formats.CALL_FORMATS}

    assert set(GRAMMARS) - proven == {"text"}


def check_round_trip(renderer: Renderer, examples: int = 15) -> None:
    at_most = calls_in_a_turn(renderer)

    @settings(max_examples=examples, deadline=None, database=None)
    @given(CALLS)
    def check(calls: list[dict]) -> None:
        calls = carried(renderer, calls[:at_most])
        ids = renderer.write(message_of(calls))
        written, parsed = renderer.decode(ids), renderer.parse(ids)

        assert [(call.name, call.status) for call in parsed.tool_calls] == [
            ("book", CallStatus.OK) for _ in calls
        ], written
        read = [json.loads(call.arguments) for call in parsed.tool_calls]
        assert [call.values for call in parsed.tool_calls] == read, written
        assert normal(renderer, read) == normal(renderer, calls), written
        assert len(calls) > 1 or parsed.message["content"].strip() == "", written

    check()


def calls_in_a_turn(renderer: Renderer) -> int:
    """How many calls a template writes in one turn: some refuse a second one, or leave it out."""
    if any("one call per turn" in warning for warning in renderer.report.warnings):
        return 1
    try:
        renderer.write(message_of([{"city": "a", "n": 1}] * 3))
    except RenderError:
        return 1
    return 3


def message_of(calls: list[dict]) -> dict:
    """The message with these calls of the tool, whose ids every template takes."""
    texts = [json.dumps(arguments, ensure_ascii=False) for arguments in calls]
    made = [chat_call(f"abc{index:06d}", "book", text) for index, text in enumerate(texts)]
    return {"role": "assistant", "content": "", "tool_calls": made}


def carried(renderer: Renderer, value: object) -> object:
    """What of a value a format can carry: LFM's template escapes nothing that stands in quotes."""
    if renderer.report.grammar != "lfm" or "tojson" in renderer._diagnosis.reader.template.source[-400:]:
        return value
    if isinstance(value, dict):
        return {key: carried(renderer, item) for key, item in value.items()}
    if isinstance(value, list):
        return [carried(renderer, item) for item in value]
    return re.sub(r"['\"\\\n]", "", value) if isinstance(value, str) else value


def normal(renderer: Renderer, value: object) -> object:
    return cases.nfc_json(value) if renderer.tokenizer.backend.normalizer is not None else value
