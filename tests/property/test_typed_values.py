"""A value is the same Python value through every grammar, or the model is told why its call was not run."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.core import CallStatus
from agentenv.render import ChatTokenizer, Renderer
from agentenv.render.write import TurnWriter
from agentenv.testing import tool_call_message
from helpers import call_formats as formats
from helpers import chat_cases as cases

TRL = cases.trl_templates()
TEMPLATES = {
    **formats.CALL_FORMATS,
    **formats.ESCAPED_FORMATS,
    **{name: TRL[name] for name in ("qwen3_6", "glm4moe", "gemma4_v3", "llama3_1", "muse_glimmer") if TRL},
}
FAMILIES = sorted({*cases.FAMILIES} - {"smollm2"})  # its template has no tool turns

HARD = [
    *("", " ", "\n", "a\nb", "\nb\n", "it's", '"q"', "'q'", "\\n", "a\\", "tab\tx", "é\u2028", "\U0001f600"),
    *(
        "42",
        "-0",
        "1e5",
        "true",
        "True",
        "null",
        "None",
        "NaN",
        "[1]",
        '["a"]',
        '{"a": 1}',
        "{'a': 1}",
        "[",
        "{x",
    ),
    *(
        "<b>",
        "&amp;",
        "a & b < c",
        "<![CDATA[x]]>",
        "]]>",
        "```",
        "a, b=c",
        "}",
        ")",
        '"}}',
        "f(x)",
        "%s {{ x }}",
    ),
    *(
        "</parameter>",
        "<parameter=x>",
        "</function>",
        "</tool_call>",
        "<tool_call>",
        "</arg_value>",
        "<arg_key>",
    ),
    *(
        "</invoke>",
        '<parameter name="x">',
        "<escape>",
        '<|"|>',
        "[/TOOL_CALLS]",
        "[ARGS]",
        ">>>all\nx",
        "<|im_end|>",
    ),
]
TEXTS = st.sampled_from(HARD) | st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12
)
INTEGERS = st.integers(-9, 9) | st.sampled_from([10**18 + 1, -(10**30), 2**53 + 1, 10**300])
NUMBERS = st.sampled_from([0.5, 1.0, -0.0, 1e5, 1e16, 1e-7, 1.7e308, 3, 10**20])
ROWS = st.lists(TEXTS, max_size=3)
FREE = st.recursive(
    TEXTS | INTEGERS | NUMBERS | st.booleans() | st.none(),
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(st.sampled_from("ab"), inside, max_size=2),
    max_leaves=4,
)
PEOPLE = st.fixed_dictionaries({"name": TEXTS}, optional={"age": INTEGERS, "tags": ROWS})

PERSON = {
    "type": "object",
    "properties": {
        "name": {"$ref": "#/$defs/Name"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
}
DEFS = {
    "Name": {"type": "string"},
    "Person": PERSON,
    "Again": {"$ref": "#/$defs/Name"},
    "Count": {"type": "integer"},
}


TEXT = {"type": "string"}


def kinds(*names: str) -> dict:
    inside = {"array": {"items": TEXT}, "object": {"additionalProperties": TEXT}}
    return {"anyOf": [{"type": name, **inside.get(name, {})} for name in names]}


FREE_OBJECT = "object whose members have no schema"
# What a text is read as where a schema allows other types beside text, is in test_model_turns.
SCHEMAS: dict[str, tuple[dict, st.SearchStrategy]] = {
    "text": (TEXT, TEXTS),
    "integer": ({"type": "integer"}, INTEGERS),
    "number": ({"type": "number"}, NUMBERS),
    "truth": ({"type": "boolean"}, st.booleans()),
    "list of texts": ({"type": "array", "items": TEXT}, ROWS),
    "list of numbers": ({"type": "array", "items": {"type": "number"}}, st.lists(NUMBERS, max_size=3)),
    FREE_OBJECT: (
        {"type": "object"},
        st.dictionaries(st.sampled_from(["a", "b c"]), FREE, min_size=1, max_size=2),
    ),
    "map of texts": (
        {"type": "object", "additionalProperties": TEXT},
        st.dictionaries(st.sampled_from("ab"), TEXTS, min_size=1),
    ),
    "pair": (
        {"type": "array", "prefixItems": [TEXT, {"type": "integer"}]},
        st.tuples(TEXTS, INTEGERS).map(list),
    ),
    "reference": ({"$ref": "#/$defs/Again"}, TEXTS),
    "reference to a number": ({"$ref": "#/$defs/Count"}, INTEGERS),
    "reference to an object": ({"$ref": "#/$defs/Person"}, PEOPLE),
    "list of references": (
        {"type": "array", "items": {"$ref": "#/$defs/Person"}},
        st.lists(PEOPLE, max_size=2),
    ),
    "all of": ({"allOf": [{"$ref": "#/$defs/Name"}, {"maxLength": 99}]}, TEXTS),
    "constant text": ({"const": "7"}, st.just("7")),
    "constant number": ({"const": 7}, st.just(7)),
    "constant truth": ({"const": True}, st.just(True)),
    "constant nothing as text": ({"const": "null"}, st.just("null")),
    "mixed values": (
        {"enum": ["a", "8", 9, True, None, "false"]},
        st.sampled_from(["a", "8", 9, True, None, "false"]),
    ),
    "text or nothing": (
        kinds("string", "null"),
        st.none() | TEXTS.filter(lambda text: text.strip() not in {"null", "None"}),
    ),
    "number or nothing": ({"type": ["integer", "null"]}, st.none() | INTEGERS),
    "truth or number": (kinds("boolean", "integer"), st.booleans() | INTEGERS),
    "list or nothing": (kinds("array", "null"), st.none() | ROWS),
    "list or object": (kinds("array", "object"), ROWS | st.dictionaries(st.just("a"), TEXTS, min_size=1)),
    "text or list": (
        kinds("string", "array"),
        st.lists(TEXTS, min_size=1) | st.sampled_from(["a", "it's", "42", "{x", "["]),
    ),
}


def tool_of(schema: dict, shape: str) -> dict:
    """A tool with one parameter `value` of this schema, and with the schema of all its parameters in a shape."""
    parameters = {"type": "object", "properties": {"value": schema, "n": {"type": "integer"}}}
    other = {"type": "object", "properties": {"other": {"type": "boolean"}}}
    shaped = {
        "plain": parameters,
        "any of": {"anyOf": [other, parameters]},
        "all of": {"type": "object", "allOf": [other, parameters]},
        "reference": {"$ref": "#/$defs/All"},
    }[shape]
    whole = {**shaped, "$defs": {**DEFS, "All": parameters}}
    return {"type": "function", "function": {"name": "act", "description": "Act.", "parameters": whole}}


@pytest.mark.parametrize("grammar", [*TEMPLATES, *FAMILIES])
def test_a_value_is_the_same_through_every_grammar_or_is_refused_with_words(grammar: str) -> None:
    tokenizer = (
        cases.tokenizer_for(TEMPLATES[grammar])
        if grammar in TEMPLATES
        else ChatTokenizer.load(cases.TOKENIZERS / grammar)
    )
    normalizes = tokenizer.backend.normalizer is not None
    renderer = Renderer(tokenizer)
    # MiniMax-M3 writes every value inside of another one as tags and text, so that only a schema tells its type.
    names = sorted({*SCHEMAS} - ({FREE_OBJECT} if grammar == "minimax_m3" else set()))

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.data(), st.sampled_from(names), st.sampled_from(["plain", "any of", "all of", "reference"]))
    def check(data: st.DataObject, name: str, shape: str) -> None:
        schema, values = SCHEMAS[name]
        arguments = {"value": data.draw(values), "n": 3}
        tool = tool_of(schema, shape)
        reading = renderer.bind([tool])
        written = written_by(reading, tool_call_message("act", **arguments))
        (call, *rest) = reading.parse(tokenizer.encode(written)).tool_calls or (None,)

        assert call is not None, written
        if call.status is not CallStatus.OK or rest:
            assert call.error or rest, written
            return
        read = json.loads(call.arguments)
        if read.keys() - arguments:
            return  # what looks like the opening of a parameter is one, which no tool accepts
        assert typed(read) == typed(cases.nfc_json(arguments) if normalizes else arguments), written

    check()


def written_by(renderer: Renderer, message: dict) -> str:
    """A turn as the template writes it, in which tags of values are tags, as a model may write them."""
    known = renderer._diagnosis
    writer = TurnWriter(known.reader, known.ends["call"], known.forms.thinking_open)
    return writer.write(renderer._shaped(message, renderer._splicer([])), renderer.tools).text


def typed(value: object) -> str:
    """A value as text that tells 1 from 1.0 and from True."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
