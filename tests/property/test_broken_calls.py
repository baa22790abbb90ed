"""A call whose tags the model broke is told, or read as it was meant: it is never dropped, and never another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from agentenv.core import CallStatus
from agentenv.render import Renderer
from helpers import chat_cases as cases
from helpers.call_formats import CALL_FORMATS, ESCAPED_FORMATS

FORMATS = {**CALL_FORMATS, **ESCAPED_FORMATS}
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
    """Yield the text with each of its tags left out, written twice, last, and first behind it."""
    control = renderer._diagnosis.control
    tags = [tag for tag in renderer._diagnosis.grammar.syntax if tag in text]
    for tag in dict.fromkeys([*tags, *control.find(text)]):
        for place in re.finditer(re.escape(tag), text):
            yield text[: place.start()] + text[place.end() :]
            yield text[: place.end()] + text[place.start() :]
            yield text[: place.end()]
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
