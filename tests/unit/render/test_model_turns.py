"""Turns as models write them are read as their authors' own tools read them, or the model is told."""

import json
from pathlib import Path

import pytest

from agentenv.core import CallStatus
from agentenv.render import Renderer
from agentenv.testing import tool_call_message
from helpers import chat_cases as cases

TURNS = json.loads((Path(__file__).parents[2] / "field" / "model_turns.json").read_text(encoding="utf-8"))
TAGS = " ".join(
    (
        "<|im_start|> <|im_end|> <|python_tag|> <|python_start|> <|python_end|>",
        "<|start|> <|channel|> <|message|> <|end|> <|START_ACTION|> <|END_ACTION|>",
        '<|tool_call> <tool_call|> <|"|>',
    )
)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ begins }}{% endif %}"
    f"{{# <|channel> <channel|> {TAGS} #}}"
)


def renderer_of(turn: dict) -> Renderer:
    parameters = turn.get("parameters") or {
        "type": "object",
        "properties": turn["properties"],
        "$defs": turn.get("defs", {}),
    }
    tools = [{"type": "function", "function": {"name": "act", "description": "", "parameters": parameters}}]
    kwargs = {"begins": "<think>" if turn.get("thinks") else ""}
    tokenizer = cases.tokenizer_for(CHAT)
    return Renderer(tokenizer, tools, template_kwargs=kwargs, grammar=turn["grammar"])


@pytest.mark.parametrize("turn", TURNS, ids=[turn["case"] for turn in TURNS])
def test_a_turn_of_a_model_is_read_as_expected(turn):
    renderer = renderer_of(turn)
    ids = [*renderer.tokenizer.encode(turn["text"]), renderer.stop_token_ids[0]]

    parsed = renderer.parse(ids)

    live = [call for call in parsed.tool_calls if call.status is CallStatus.OK]
    assert [json.loads(call.arguments) for call in live] == turn.get("calls", [])
    if "error" in turn:
        assert turn["error"] in "; ".join(parsed.errors)
        return
    assert (parsed.message["content"], parsed.errors) == (turn["content"], ())
    assert parsed.message.get("reasoning_content", "") == turn.get(
        "thinking", parsed.message.get("reasoning_content", "")
    )


FRAMED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<|self|>{{ m.reasoning_content }}<|done|>{% endif %}"
    "{% if m.role == 'assistant' %}<|text|>{{ m.content }}<|/text|>{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_thinking_and_frames_of_text_are_learned_from_the_template():
    renderer = Renderer(cases.tokenizer_for(FRAMED), cases.TOOLS, grammar="hermes")
    thought = 'I could <tool_call>{"name": "add", "arguments": {}}</tool_call>.'
    text = f"<|self|>{thought}<|done|><|text|>12<|/text|>"

    parsed = renderer.parse([*renderer.tokenizer.encode(text), renderer.stop_token_ids[0]])

    assert (parsed.message["content"], parsed.message["reasoning_content"]) == ("12", thought)
    assert [call.status for call in parsed.tool_calls] == [CallStatus.IN_THINKING]
    assert renderer.parse(renderer.write(parsed.message)).message == parsed.message


HEADERS = (
    "{% for m in messages %}<|sep|>{{ m.role }}<|is|>{{ m.reasoning_content }}"
    "{% if m.reasoning_content %}[DONE]{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|sep|>\n\nfunction call<|is|>{{ c.function | tojson }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|sep|>assistant<|is|>{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "content", "thinking", "calls"),
    [
        ("I look.<|sep|>\n\nfunction call<|is|>{call}", "I look.", "", 1),
        ("Hm.[DONE]12", "12", "Hm.", 0),
        ("I may {call}.[DONE]<|sep|>\n\nfunction call<|is|>{call}", "", "I may {call}.", 1),
        ("A plain answer", "A plain answer", "", 0),
    ],
)
def test_headers_and_thinking_without_an_opening_tag_are_learned(text, content, thinking, calls):
    renderer = Renderer(cases.tokenizer_for(HEADERS), cases.TOOLS)
    call = '{"name": "add", "arguments": {"city": "P"}}'

    ids = renderer.tokenizer.encode(text.replace("{call}", call))
    parsed = renderer.parse([*ids, renderer.stop_token_ids[0]])

    live = [one for one in parsed.tool_calls if one.status is CallStatus.OK]
    assert (parsed.message["content"], len(live)) == (content, calls)
    assert parsed.message.get("reasoning_content", "") == thinking.replace("{call}", call)
    assert parsed.errors == ()


QUOTED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}["
    "{% for c in m.tool_calls %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}=\"{{ v }}\"{{ ', ' if not loop.last }}{% endfor %})"
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_values_that_a_template_writes_as_text_get_the_types_of_the_schema():
    renderer = Renderer(cases.tokenizer_for(QUOTED), cases.TOOLS)
    asked = tool_call_message("add", city="12", n=3)

    assert '[add(city="12", n="3")]' in renderer.decode(renderer.write(asked))
    read = renderer.parse(renderer.write(asked)).message["tool_calls"][0]["function"]
    assert json.loads(read["arguments"]) == {"city": "12", "n": 3}
