"""A call whose tags the model broke is told, or read as it was meant: it is never dropped, and never another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product

import pytest

from agentenv.core import CallStatus
from agentenv.render import Renderer
from helpers import chat_cases as cases
from helpers.call_formats import CALL_FORMATS, ESCAPED_FORMATS, LEARNED_FORMATS

FORMATS = {**CALL_FORMATS, **ESCAPED_FORMATS, **LEARNED_FORMATS}
UNTAGGED = ("cohere", "granite", "hermes", "lfm", "mistral")
"""Formats whose calls can be told from text without their tags."""
ARGUMENTS = {"city": "Sao Paulo, Brazil", "n": 7}
CALL = {
    "id": "abcdefgh1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
}


def written(renderer: Renderer) -> str:
    ids = renderer.write({"role": "assistant", "content": "", "tool_calls": [CALL]})
    return renderer.decode(ids).removesuffix(renderer.decode(ids[-1:]))


def broken(text: str, renderer: Renderer) -> Iterator[str]:
    """Yield the text with each of its tags left out, torn, written twice, last, and first behind it."""
    control = renderer._diagnosis.control
    tags = [tag for tag in renderer._diagnosis.grammar.syntax if tag in text]
    for tag in dict.fromkeys([*tags, *control.find(text)]):
        for place in re.finditer(re.escape(tag), text):
            yield text[: place.start()] + text[place.end() :]
            yield text[: place.end()] + text[place.start() :]
            yield text[: place.end()]
            for kept in (place.start() + max(3, len(tag) // 2), place.end() - 1):
                yield text[:kept]
                yield text[:kept] + text[place.end() :]
            yield text[: place.start()] + text[place.start() + 1 :]
        yield f"It is 7. {tag[:-1]}"
        yield text + tag
        yield tag + text
        if tag in control:
            yield text.replace("Brazil", f"{tag}Brazil")


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_with_broken_tags_is_told_or_read_as_it_was_meant(name: str) -> None:
    renderer = Renderer(cases.tokenizer_for(FORMATS[name]), cases.TOOLS)
    whole = written(renderer)
    stop = renderer.stop_token_ids[0]

    for text in broken(whole, renderer):
        parsed = renderer.parse([*renderer.tokenizer.encode(text), stop])

        live = [json.loads(call.arguments) for call in parsed.tool_calls if call.status is CallStatus.OK]
        assert all(arguments == ARGUMENTS for arguments in live), text
        assert live or parsed.errors, text


@pytest.mark.parametrize(
    ("name", "around"),
    [*product(UNTAGGED, ["{}", "I look: {}", "{} And then?"]), ("name as a key", "{}")],
)
def test_a_call_without_any_tags_is_told(name: str, around: str) -> None:
    renderer = Renderer(cases.tokenizer_for(FORMATS[name]), cases.TOOLS)
    text = written(renderer)
    for tag in {*renderer._diagnosis.control.find(text), "<tool_call>", "</tool_call>"}:
        text = text.replace(tag, "")
    stop = renderer.stop_token_ids[0]

    parsed = renderer.parse([*renderer.tokenizer.encode(around.format(text)), stop])

    assert parsed.errors
    assert text.strip() in str(parsed.message["content"])


def test_a_header_that_names_a_tool_is_told_without_its_call() -> None:
    renderer = Renderer(cases.tokenizer_for(FORMATS["name in a header"]), cases.TOOLS)
    text = "to=get_weather<|message|>It rains."

    parsed = renderer.parse([*renderer.tokenizer.encode(text), renderer.stop_token_ids[0]])

    assert "belongs to a call" in parsed.errors[0]


@pytest.mark.parametrize(("answer", "status"), [("", CallStatus.UNCLOSED), ("7", CallStatus.IN_THINKING)])
def test_a_call_in_closed_thinking_is_told_where_nothing_follows(answer: str, status: CallStatus) -> None:
    renderer = Renderer(cases.tokenizer_for(FORMATS["hermes"]), cases.TOOLS)
    text = f"<think>I call: {written(renderer)}</think>{answer}"

    parsed = renderer.parse([*renderer.tokenizer.encode(text), renderer.stop_token_ids[0]])

    assert [call.status for call in parsed.tool_calls] == [status]
