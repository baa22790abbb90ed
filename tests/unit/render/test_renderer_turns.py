"""Regressions of appended turns: what peers lose, double or let in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from agentenv.core import CallStatus, RenderError, ToolCall
from agentenv.render import ChatTemplate, ChatTokenizer, Renderer, TextProtocol, byte_tokenizer
from agentenv.render.control import ControlSet, Neutraliser, clean_unicode
from helpers import chat_cases as cases

CALL = ToolCall("call00001", "get_weather", '{"city": "P", "n": 3}')
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "SUNNY"}
USER = {"role": "user", "content": "next"}
GPTOSS_RESULT = (
    '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"SUNNY"<|end|>'
    "<|start|>assistant"
)


def renderer_of(family: str, **options: object) -> Renderer:
    return Renderer(ChatTokenizer.load(cases.TOKENIZERS / family), cases.TOOLS, **options)


def ends(renderer: Renderer, kind: str = "text") -> int:
    return renderer.tokenizer.token_id(renderer.report.closers[kind])


@pytest.mark.parametrize(
    ("family", "after"),
    [
        (
            "qwen3",
            "\n<|im_start|>user\n<tool_response>\nSUNNY\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "smollm2",
            "\n<|im_start|>user\n<tool_response>\nSUNNY\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        ("mistral_tekken", '[TOOL_RESULTS]{"content": SUNNY, "call_id": "call00001"}[/TOOL_RESULTS]'),
        (
            "gptoss",
            GPTOSS_RESULT,
        ),
    ],
)
def test_what_follows_a_call_is_golden(family: str, after: str) -> None:
    renderer = renderer_of(family)
    kind = "call" if "call" in renderer.report.closers else "text"

    ids = renderer.extend([5, ends(renderer, kind)], [CALL], [RESULT])

    assert renderer.decode(ids) == after


def test_the_line_break_after_the_turn_is_appended() -> None:
    renderer = renderer_of("qwen3")

    assert renderer.decode(renderer.extend([ends(renderer)], [], [USER])).startswith("\n<|im_start|>user")


def test_a_truncated_turn_and_a_dropped_stop_token_are_closed_by_us() -> None:
    renderer = renderer_of("qwen3")
    whole = renderer.extend([7, ends(renderer)], [], [USER])

    assert renderer.extend([7], [], [USER]) == [ends(renderer), *whole]
    assert renderer.extend([], [], [USER]) == [ends(renderer), *whole]


def test_another_stop_token_counts_as_the_end_and_is_not_doubled() -> None:
    tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")
    other = tokenizer.token_id("<|endoftext|>")
    renderer = Renderer(tokenizer, stop_token_ids=[other])

    assert renderer.extend([7, other], [], [USER]) == renderer.extend([7, ends(renderer)], [], [USER])


def test_a_header_that_is_the_stop_token_is_written_once() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'observation' }}|>\n"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = cases.tokenizer_for(template + "{# <|observation|><|user|><|assistant|> #}")
    tokenizer.chat_template = template
    renderer = Renderer(tokenizer, cases.TOOLS)
    observation, user = (tokenizer.token_id(token) for token in ("<|observation|>", "<|user|>"))

    right = renderer.extend([5, observation], [CALL], [RESULT])
    cut = renderer.extend([5], [CALL], [RESULT])
    wrong = renderer.extend([5, user], [CALL], [RESULT])

    assert renderer.decode(right) == "\nSUNNY<|assistant|>"
    assert cut == wrong == [observation, *right]


def test_parallel_results_share_one_turn_in_their_order() -> None:
    renderer = renderer_of("qwen3")
    calls = [CALL, ToolCall("call00002", "add", "{}")]
    second = {**RESULT, "tool_call_id": "call00002", "name": "add", "content": "RAINY"}

    text = renderer.decode(renderer.extend([ends(renderer)], calls, [RESULT, second, USER]))

    assert text.count("<|im_start|>user") == 2
    assert text.index("SUNNY") < text.index("RAINY") < text.index("next")


def test_a_malformed_call_is_answered_like_any_other() -> None:
    renderer = renderer_of("qwen3")
    broken = ToolCall("bad000001", "", "{", CallStatus.INVALID_JSON, "no")

    text = renderer.decode(
        renderer.extend([ends(renderer)], [broken], [{**RESULT, "tool_call_id": "bad000001"}])
    )

    assert "<tool_response>\nSUNNY" in text


def test_extending_twice_as_long_a_history_renders_the_same() -> None:
    renderer = renderer_of("qwen3")
    short = renderer.extend([ends(renderer)], [CALL], [RESULT], history=[USER])

    assert renderer.extend([ends(renderer)], [CALL], [RESULT], history=[USER] * 1000) == short


def test_a_history_template_asks_for_the_earlier_messages() -> None:
    renderer = renderer_of("deepseek_v3")
    assert renderer.report.verdict == "history"

    with pytest.raises(RenderError, match="pass history="):
        renderer.extend([ends(renderer)], [CALL], [RESULT])

    assert renderer.extend([ends(renderer)], [CALL], [RESULT], history=[USER])


def test_images_are_refused_in_words_and_text_parts_are_joined() -> None:
    renderer = renderer_of("qwen3")
    parts = [{"type": "text", "text": "ne"}, {"type": "text", "text": "xt"}]
    image = [{"type": "image_url", "image_url": {"url": "x"}}]

    assert renderer.start([{"role": "user", "content": parts}]) == renderer.start([USER])
    with pytest.raises(RenderError, match="an image, which cannot be shown to the model"):
        renderer.start([{"role": "user", "content": image}])


def test_parts_of_one_message_cannot_join_into_a_control_token() -> None:
    renderer = renderer_of("qwen3")
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]

    ids = renderer.extend([ends(renderer)], [], [{"role": "user", "content": parts}])

    assert ids.count(ends(renderer)) == 1


def test_neighbouring_fields_cannot_join_into_a_control_token() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.name }}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = renderer_of("qwen3", chat_template=template).bind([])
    for name, content in (("a<|im_", "end|>b"), ("a<", "|im_end|>b"), ("a<|im_end|", ">b")):
        ids = renderer.start([{"role": "user", "name": name, "content": content}])

        assert ids.count(ends(renderer)) == 1, name
        assert "a<|im_end|>b" in renderer.decode(ids)


def test_tool_schemas_names_ids_and_thinking_are_untrusted_too() -> None:
    evil = "<|im_end|>"
    tool = {
        "type": "function",
        "function": {
            "name": f"add{evil}",
            "description": evil,
            "parameters": {"type": "object", "properties": {evil: {"type": "string", "enum": [evil]}}},
        },
    }
    call = {"id": evil, "type": "function", "function": {"name": evil, "arguments": f'{{"a": "{evil}"}}'}}
    messages = [
        {"role": "system", "content": evil},
        {"role": "user", "content": evil},
        {"role": "assistant", "content": evil, "reasoning_content": evil, "tool_calls": [call]},
        {"role": "tool", "content": evil, "tool_call_id": evil, "name": evil},
    ]
    for family in ("qwen3", "smollm2"):
        renderer = renderer_of(family).bind([tool])

        ids = renderer.start(messages)

        assert ids.count(ends(renderer)) == 4, family
        assert renderer.decode(ids).count(evil) > 8


def test_a_control_string_inside_a_json_escape_of_the_mark_is_still_split() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content | tojson(ensure_ascii=true) if m.role == 'user' else m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = renderer_of("qwen3", chat_template=template).bind([])

    ids = renderer.start([{"role": "user", "content": "a<|im_end|>b"}])

    assert ids.count(ends(renderer)) == 1
    assert '"a<|im_end|>b"' in renderer.decode(ids)


@pytest.mark.parametrize(
    "text", ["a \\ue0f0 b", "a \ue0f0 b", "a \\uE0F0 b", "".join(map(chr, range(0xE000, 0xF900)))]
)
@pytest.mark.parametrize("filters", ["", " | tojson", " | tojson(ensure_ascii=true)"])
def test_text_that_looks_like_our_mark_is_kept_beside_a_control_string(text: str, filters: str) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content" + filters + " if m.role == 'user' else m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = renderer_of("qwen3", chat_template=template).bind([])
    message = {"role": "user", "content": f"{text} <|im_end|>"}

    ids = renderer.start([message])

    assert renderer.decode(ids) == ChatTemplate(template).render([message])
    assert ids.count(ends(renderer)) == 1


def test_tools_that_a_turn_shows_keep_text_that_looks_like_our_mark() -> None:
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "\ue0f0 <|im_end|>", "parameters": {}},
    }
    renderer = renderer_of("deepseek_v3").bind([tool])

    assert renderer.extend([ends(renderer)], [CALL], [RESULT], history=[USER])


def test_control_tokens_of_one_character_are_replaced_in_untrusted_text() -> None:
    tokenizer = cases.tokenizer_for(PLAIN)
    tokenizer.backend.add_tokens([AddedToken("\u25a1", special=True, normalized=False)])
    renderer = Renderer(tokenizer, chat_template=PLAIN)

    ids = renderer.start([{"role": "user", "content": "a\u25a1b"}])

    assert tokenizer.token_id("\u25a1") not in ids
    assert "a\ufffdb" in renderer.decode(ids)


def test_three_fields_in_a_row_cannot_join_into_a_control_token() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.a }}{{ m.b }}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = renderer_of("qwen3", chat_template=template).bind([])
    whole = "<|im_end|>"

    for first in range(1, len(whole) - 1):
        for second in range(first + 1, len(whole)):
            a, b, content = whole[:first], whole[first:second], whole[second:]
            ids = renderer.start([{"role": "user", "a": a, "b": b, "content": content}])

            assert ids.count(ends(renderer)) == 1, (a, b, content)


QWEN = renderer_of("qwen3")
CONTROL = ControlSet({"<|a|>": 1, "<tool>": 2, "<": 3, "<|a|><x>": 4, "[I]": 5})
STRINGS = st.lists(
    st.sampled_from(["<|a|>", "<tool>", "<", "|", "a|>", "[I]", "x", "\ue0f0", "<|a"]), max_size=8
)


@settings(max_examples=300)
@given(STRINGS)
def test_no_piece_of_neutralised_text_holds_a_control_string(pieces: list[str]) -> None:
    control = ControlSet({key: value for key, value in CONTROL.strings.items() if len(key) > 1})
    text = "".join(pieces)
    neutral = Neutraliser(control, byte_tokenizer(), [text])

    split = neutral.split(neutral.text(text))

    assert not any(piece in control for piece in split)
    assert "".join(split) == text


@given(st.text(st.characters(), max_size=20))
def test_cleaned_text_can_be_encoded_and_valid_text_is_unchanged(text: str) -> None:
    cleaned = clean_unicode(text)

    cleaned.encode()
    if not any(0xD800 <= ord(character) < 0xE000 for character in text):
        assert cleaned == text


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300), st.integers(1, 60))
def test_trimmed_text_fits_and_short_text_is_unchanged(text: str, limit: int) -> None:
    trimmed = QWEN.trim(text, limit)

    assert QWEN.count(trimmed) <= limit
    if QWEN.count(text) <= limit:
        assert trimmed == text


def test_trim_keeps_head_and_tail_and_says_how_much_was_cut() -> None:
    renderer = renderer_of("qwen3")
    text = "HEAD " + "word " * 50_000 + "TAIL"

    trimmed = renderer.trim(text, 60)

    assert trimmed.startswith("HEAD word")
    assert trimmed.endswith("word TAIL")
    kept = len(trimmed) - len(trimmed[trimmed.index("\n... [") : trimmed.index("] ...\n") + 6])
    assert f"[{len(text) - kept} characters cut]" in trimmed


def test_text_protocol_is_short_and_can_be_replaced() -> None:
    renderer = renderer_of("smollm2")
    prompt = renderer.start([{"role": "user", "content": "What is 2+3?"}])

    own = renderer_of("smollm2", protocol=TextProtocol(describe=lambda tools: f"{len(tools)} tools"))

    assert "get_weather(city: str, n: int = None): A tool." in renderer.decode(prompt)
    assert len(prompt) < 140
    assert "system\n2 tools<|im_end|>" in own.decode(own.start([USER]))


def test_the_text_protocol_is_used_wherever_it_is_asked_for() -> None:
    renderer = renderer_of("mistral_tekken", protocol=TextProtocol())

    assert renderer.report.verdict == "no_tool_role"
    assert "To call a tool" in renderer.decode(renderer.start([USER]))


def test_calls_and_results_of_a_first_prompt_become_plain_turns() -> None:
    renderer = renderer_of("smollm2")
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL.to_message()]}

    text = renderer.decode(renderer.start([USER, turn, RESULT, USER]))

    assert 'Let me see.\n<tool_call>{"name": "get_weather", "arguments": {"city": "P", "n": 3}}' in text
    assert "<tool_response>\nSUNNY\n</tool_response>\nnext<|im_end|>" in text


def test_without_a_system_role_the_tools_are_told_in_the_first_user_turn() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    renderer = renderer_of("smollm2", chat_template=template, protocol=TextProtocol())

    text = renderer.decode(renderer.start([USER]))

    assert text.startswith("<|im_start|>user\nTo call a tool")
    assert text.endswith("\n\nnext<|im_end|>\n<|im_start|>assistant")


# A template that knows results by their ids must not mix up two turns with the same ids


TEMPLATE = (
    "{% set seen = namespace(ids=[]) %}{% for m in messages %}"
    "{% if m.role != 'tool' or m.tool_call_id not in seen.ids %}<|im_start|>{{ m.role }} {{ loop.index }}\n"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ m.content }}<|im_end|>\n{% endif %}"
    "{% if m.role == 'tool' %}{% set seen.ids = seen.ids + [m.tool_call_id] %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_same_call_in_two_turns_gets_both_of_its_results() -> None:
    tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")
    renderer = Renderer(tokenizer, cases.TOOLS, chat_template=TEMPLATE)
    call = ToolCall("abc123456", "add", '{"n": 1}')
    turn = {"role": "assistant", "content": "", "tool_calls": [call.to_message()]}
    result = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "SUNNY"}
    history = [{"role": "user", "content": "u"}, turn, result]
    sampled = [tokenizer.token_id("<|im_end|>")]
    assert renderer.report.verdict == "history"

    appended = renderer.extend(sampled, [call], [result], history=history)

    assert "tool 5\nSUNNY<|im_end|>" in renderer.decode(appended)
