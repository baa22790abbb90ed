"""Completions are read from their ids: a status for each call, nothing raised, nothing guessed."""

from __future__ import annotations

import json

import pytest

from agentenv.core import CallStatus, UsageError
from agentenv.render import ChatTokenizer, Renderer, byte_tokenizer
from agentenv.tools.arguments import mend
from helpers import chat_cases as cases
from helpers.call_formats import CALL_FORMATS, CHANNELS

GOOD = '{"name": "add", "arguments": {"city": "P", "n": 1}}'


@pytest.fixture(scope="module")
def qwen() -> Renderer:
    return Renderer(ChatTokenizer.load(cases.TOKENIZERS / "qwen3"), cases.TOOLS)


def read(renderer: Renderer, text: str, *, ended: bool = True):
    end = [renderer.stop_token_ids[0]] if ended else []
    return renderer.parse(renderer.tokenizer.encode(text) + end)


@pytest.mark.parametrize(
    ("inside", "status"),
    [
        (GOOD, CallStatus.OK),
        ('{"name": "add", "arguments": "{\\"n\\": 1}"}', CallStatus.OK),
        ('{"name": "add"}', CallStatus.OK),
        ('{"name": "add", "parameters": {}}', CallStatus.OK),
        ('{"name": "add", "arguments": {"n": 1,}}', CallStatus.INVALID_JSON),
        ("{'name': 'add', 'arguments': {}}", CallStatus.INVALID_JSON),
        ('{"name": "add", "arguments": {"city": "a\nb"}}', CallStatus.INVALID_JSON),
        (GOOD + GOOD, CallStatus.INVALID_JSON),
        ('{"name": "add", "arguments": {"n": NaN}}', CallStatus.INVALID_JSON),
        ('{"name": "add", "name": "sub", "arguments": {}}', CallStatus.INVALID_JSON),
        ('{"name": "add", "arguments": {"n": 1}, "arguments": {"n": 2}}', CallStatus.INVALID_JSON),
        ('{"function": {"name": "sub", "name": "add", "arguments": {}}}', CallStatus.INVALID_JSON),
        ("[" * 5000, CallStatus.INVALID_JSON),
        ("", CallStatus.INVALID_JSON),
        ('{"arguments": {}}', CallStatus.MISSING_NAME),
        ('{"name": 7, "arguments": {}}', CallStatus.MISSING_NAME),
        ('{"name": "sub", "arguments": {}}', CallStatus.UNKNOWN_TOOL),
        ('{"name": "add", "arguments": [1]}', CallStatus.BAD_ARGUMENTS),
        ('{"name": "add", "arguments": "n=1"}', CallStatus.BAD_ARGUMENTS),
    ],
)
def test_every_call_in_tags_gets_a_status(qwen: Renderer, inside: str, status: CallStatus) -> None:
    parsed = read(qwen, f"<tool_call>\n{inside}\n</tool_call>")

    assert [call.status for call in parsed.tool_calls] == [status]
    assert bool(parsed.errors) == (status is not CallStatus.OK)
    readable = status in {CallStatus.OK, CallStatus.UNKNOWN_TOOL}
    assert bool(parsed.message.get("tool_calls")) == readable
    assert parsed.message["content"] == ("" if readable else f"<tool_call>\n{inside}\n</tool_call>")


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (
            "function_xml",
            "<tool_call><function=add><parameter=n>1</parameter><parameter=n>2</parameter></function></tool_call>",
        ),
        (
            "glm",
            "<tool_call>add"
            + "".join(f"<arg_key>n</arg_key><arg_value>{n}</arg_value>" for n in (1, 2))
            + "</tool_call>",
        ),
        ("lfm", "<|tool_call_start|>[add(n=1, n=2)]<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:add{n:1,n:2}<tool_call|>"),
        ("bare_json", '{"name": "sub", "name": "add", "parameters": {"n": 1}}'),
        ("mistral", '[TOOL_CALLS][{"name": "sub", "name": "add", "arguments": {"n": 3}}]'),
        (
            "minimax_m3",
            'M<tool_call>M<invoke name="add">M<n>1M</n>M<n>2M</n>M</invoke>M</tool_call>'.replace(
                "M<", "]<]minimax[>[<"
            ),
        ),
    ],
)
def test_a_call_that_says_something_twice_is_not_run(grammar: str, text: str) -> None:
    renderer = Renderer(byte_tokenizer(), cases.TOOLS, grammar=grammar)

    (call,) = read(renderer, text).tool_calls

    assert call.status in {CallStatus.INVALID_JSON, CallStatus.BAD_ARGUMENTS}
    assert "twice" in call.error


def test_a_call_with_two_names_is_not_repaired_into_one_of_them(qwen: Renderer) -> None:
    pytest.importorskip("json_repair")
    text = '<tool_call>{"name": "sub", "name": "add", "arguments": {}}</tool_call>'

    calls, mended = mend(read(qwen, text).tool_calls, cases.TOOLS)

    assert calls[0].status is CallStatus.INVALID_JSON
    assert not mended


def test_a_call_that_cannot_be_read_stays_in_the_text_as_it_was_written(qwen: Renderer) -> None:
    broken = "<tool_call>[1]</tool_call>"

    parsed = read(qwen, f"First.\n{broken}\n<tool_call>{GOOD}</tool_call>\nEnd.")

    assert parsed.message["content"] == f"First.\nEnd.\n{broken}"
    assert [call["id"] for call in parsed.message["tool_calls"]] == [parsed.tool_calls[1].id]
    assert [call.text for call in parsed.tool_calls] == [broken, ""]


def test_one_call_of_an_array_that_cannot_be_read_stays_in_the_text() -> None:
    template = CALL_FORMATS["mistral"]
    renderer = Renderer(cases.tokenizer_for(template), cases.TOOLS)

    parsed = read(
        renderer, '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "add", "arguments": [1]}]'
    )

    assert [call.status for call in parsed.tool_calls] == [CallStatus.OK, CallStatus.BAD_ARGUMENTS]
    assert parsed.message["content"] == '{"name": "add", "arguments": [1]}'


REFUSES_ORPHANS = (
    "{% set ns = namespace(calls=0) %}{% for m in messages %}"
    "{% if m.role == 'tool' and not ns.calls %}{{ raise_exception('a result without a call') }}{% endif %}"
    "{% set ns.calls = (m.tool_calls or []) | length if m.role == 'assistant' else ns.calls %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_refuses_results_without_calls_renders_the_answer_to_such_a_call() -> None:
    renderer = Renderer(cases.tokenizer_for(REFUSES_ORPHANS), cases.TOOLS)
    turn = read(renderer, "<tool_call>[1]</tool_call>")
    told = {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": "no JSON object"}

    ids = renderer.start([{"role": "user", "content": "u"}, turn.message, told])

    assert "<tool_call>[1]</tool_call><|im_end|>\n<|im_start|>user\nno JSON object" in renderer.decode(ids)


@pytest.mark.parametrize("arguments", ["%s", '"%s"'], ids=["object", "text of an object"])
def test_arguments_nested_deeper_than_a_template_can_render_are_told_to_the_model(
    qwen: Renderer, arguments: str
) -> None:
    deep = '{"city": ' + '{"a": ' * 600 + "1" + "}" * 601
    written = arguments % (deep if arguments == "%s" else deep.replace('"', '\\"'))

    parsed = read(qwen, f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>')

    (call,) = parsed.tool_calls
    assert call.status is CallStatus.BAD_ARGUMENTS
    assert "nested too deep" in call.error
    assert qwen.start([{"role": "user", "content": "u"}, parsed.message, {"role": "user", "content": "u"}])


def test_brackets_in_the_text_of_an_argument_are_no_nesting(qwen: Renderer) -> None:
    written = json.dumps({"city": '[{"' * 300, "n": 1})

    parsed = read(qwen, f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>')

    assert parsed.tool_calls[0].status is CallStatus.OK


@pytest.mark.parametrize(
    ("text", "ended", "status"),
    [
        (GOOD, True, CallStatus.OK),
        (GOOD, False, CallStatus.UNCLOSED),
        (GOOD[:-1], True, CallStatus.UNCLOSED),
        (f"{GOOD} I call it.", True, CallStatus.UNCLOSED),
    ],
)
def test_a_call_without_its_tag_is_run_where_the_model_ended_its_turn_behind_the_whole_call(
    qwen: Renderer, text: str, ended: bool, status: CallStatus
) -> None:
    parsed = read(qwen, f"<tool_call>\n{text}", ended=ended)

    assert [call.status for call in parsed.tool_calls] == [status]
    assert ("</tool_call>" in "".join(parsed.errors)) == (status is not CallStatus.OK)


def test_a_call_inside_thinking_is_not_run_and_not_answered(qwen: Renderer) -> None:
    parsed = read(qwen, f"<think>\n<tool_call>{GOOD}</tool_call>\n</think>\n\nhello")

    assert [call.status for call in parsed.tool_calls] == [CallStatus.IN_THINKING]
    assert parsed.errors == ()
    assert parsed.message["content"] == "hello"
    assert "tool_call" in parsed.message["reasoning_content"]


def test_a_call_in_thinking_without_an_end_is_told_and_not_run(qwen: Renderer) -> None:
    parsed = read(qwen, f"<think>\nhm\n<tool_call>{GOOD}</tool_call>")

    assert [call.status for call in parsed.tool_calls] == [CallStatus.UNCLOSED]
    assert parsed.message["content"] == ""


def test_a_bare_call_of_a_tool_is_told_where_calls_have_tags(qwen: Renderer) -> None:
    assert [call.status for call in read(qwen, GOOD).tool_calls] == [CallStatus.INVALID_JSON]
    assert read(qwen, GOOD.replace("add", "a name")).tool_calls == ()


def test_a_control_token_inside_a_value_is_told_and_not_run(qwen: Renderer) -> None:
    for tag in ("<tool_call>", "</think>", "<|im_start|>"):
        (call,) = read(qwen, f"<tool_call>{GOOD.replace('P', f'P{tag}')}</tool_call>").tool_calls

        assert (call.status, tag in call.error) == (CallStatus.BAD_ARGUMENTS, True)


def test_thinking_that_the_prompt_opened_ends_at_its_tag() -> None:
    name = "qwen3_5_think"
    if name not in cases.trl_templates():
        pytest.skip("trl is not installed")
    template = cases.trl_templates()[name]
    renderer = Renderer(cases.tokenizer_for(template), cases.TOOLS)

    parsed = read(renderer, "I wonder.\n</think>\n\nDone.")

    assert parsed.message == {"role": "assistant", "content": "Done.", "reasoning_content": "I wonder."}


def test_a_token_that_ends_thinking_where_none_is_stands_for_no_content(qwen: Renderer) -> None:
    assert read(qwen, "a </think> b").message["content"] == "a\nb"


def test_a_call_before_a_token_that_ends_thinking_is_told_and_not_run(qwen: Renderer) -> None:
    call = f"<tool_call>{GOOD}</tool_call>"

    parsed = read(qwen, f"I could {call}, but </think>{call}")

    assert [call.status for call in parsed.tool_calls] == [CallStatus.UNCLOSED, CallStatus.OK]
    assert parsed.errors == (
        "the call stands before the end of thinking, so it was not run: write it after your thinking",
    )
    assert parsed.message["content"].startswith("I could")


def test_calls_keep_order_duplicates_text_and_raw_arguments(qwen: Renderer) -> None:
    raw = '{"city":"P",  "n": 1.0}'
    call = f'<tool_call>{{"name": "add", "arguments": {raw}}}</tool_call>'

    parsed = read(qwen, f"First.\n{call}\nThen.\n{call}\nEnd.")

    assert [one.arguments for one in parsed.tool_calls] == [raw, raw]
    assert parsed.tool_calls[0].id != parsed.tool_calls[1].id
    assert parsed.message["content"] == "First.\nThen.\nEnd."


def test_ids_are_nine_characters_and_depend_on_the_tokens_alone(qwen: Renderer) -> None:
    first = read(qwen, f"<tool_call>{GOOD}</tool_call>").tool_calls[0].id
    again = read(qwen, f"<tool_call>{GOOD}</tool_call>").tool_calls[0].id

    assert first == again
    assert len(first) == 9
    assert first.isalnum()


def test_a_tag_made_of_ordinary_tokens_is_told_where_the_tag_is_a_control_token(qwen: Renderer) -> None:
    encode = qwen.tokenizer.encode
    ids = encode("<") + encode("tool_call>") + encode(GOOD) + encode("<") + encode("/tool_call>")
    assert qwen.decode(ids) == f"<tool_call>{GOOD}</tool_call>"

    parsed = qwen.parse([*ids, qwen.stop_token_ids[0]])

    assert [call.status for call in parsed.tool_calls] == [CallStatus.INVALID_JSON]
    assert parsed.message["content"] == f"<tool_call>{GOOD}</tool_call>"


def test_a_tag_in_plain_text_is_a_call_where_the_vocabulary_has_no_such_token() -> None:
    renderer = Renderer(ChatTokenizer.load(cases.TOKENIZERS / "smollm2"), cases.TOOLS)

    parsed = read(renderer, f"<tool_call>{GOOD}</tool_call>")

    assert [call.status for call in parsed.tool_calls] == [CallStatus.OK]


def test_without_tools_every_call_is_unknown(qwen: Renderer) -> None:
    parsed = read(qwen.bind([]), f"<tool_call>{GOOD}</tool_call>")

    assert parsed.tool_calls[0].status is CallStatus.UNKNOWN_TOOL
    assert "there are no tools" in parsed.errors[0]


def test_nothing_sampled_is_an_empty_message(qwen: Renderer) -> None:
    assert qwen.parse([]).message == {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("grammar", "text", "status"),
    [
        (
            "function_xml",
            "<tool_call><function=add><parameter=n>1</parameter></tool_call>",
            CallStatus.UNCLOSED,
        ),
        ("function_xml", "<tool_call>add</tool_call>", CallStatus.INVALID_JSON),
        (
            "function_xml",
            "<tool_call><function=add><parameter=n>1</function></tool_call>",
            CallStatus.BAD_ARGUMENTS,
        ),
        ("function_xml", "<tool_call><function=></function></tool_call>", CallStatus.MISSING_NAME),
        ("glm", "<tool_call><arg_key>n</arg_key></tool_call>", CallStatus.MISSING_NAME),
        ("glm", "<tool_call>add<arg_key>n</arg_key></tool_call>", CallStatus.BAD_ARGUMENTS),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"n"', CallStatus.UNCLOSED),
        ("mistral_args", '[TOOL_CALLS]add[ARGS]{"n": ', CallStatus.UNCLOSED),
        ("mistral_args", "[TOOL_CALLS]add", CallStatus.UNCLOSED),
        ("gemma4", "<|tool_call>call:add{n:}<tool_call|>", CallStatus.BAD_ARGUMENTS),
        ("gemma4", "<|tool_call>{n:3}<tool_call|>", CallStatus.MISSING_NAME),
        ("lfm", "<|tool_call_start|>[add(n=3<|tool_call_end|>", CallStatus.INVALID_JSON),
        ("lfm", "<|tool_call_start|>[add(city='it's', n=3)]<|tool_call_end|>", CallStatus.INVALID_JSON),
        ("lfm", "<|tool_call_start|>[add(a='it's'), add(b='')]<|tool_call_end|>", CallStatus.INVALID_JSON),
        ("pythonic", "[add(n=3", CallStatus.UNCLOSED),
        ("bare_json", '{"name": "add", "parameters": {"n": 3', CallStatus.UNCLOSED),
        ("functionary_v32", 'add\n{"n": ', CallStatus.UNCLOSED),
        ("harmony", ' to=functions.add<|channel|>commentary<|message|>{"n": 3}', CallStatus.UNCLOSED),
    ],
)
def test_grammars_name_what_is_wrong_with_a_cut_turn(grammar: str, text: str, status: CallStatus) -> None:
    renderer = Renderer(byte_tokenizer(), cases.TOOLS, grammar=grammar)

    parsed = read(renderer, text, ended=False)

    assert [call.status for call in parsed.tool_calls] == [status]
    assert parsed.errors[0]


@pytest.mark.parametrize("grammar", ["bare_json", "bare_literals", "pythonic"])
@pytest.mark.parametrize("text", ['{"a": 1}', "[1, 2]", "hello {", "", '["add"]', "(x)"])
def test_plain_answers_are_not_taken_for_calls(grammar: str, text: str) -> None:
    parsed = read(Renderer(byte_tokenizer(), cases.TOOLS, grammar=grammar), text)

    assert parsed.tool_calls == ()
    assert parsed.message["content"] == text


@pytest.mark.parametrize("grammar", ["function_xml", "seed_xml", "functionary_v31"])
@pytest.mark.parametrize(
    "text", ["#include <functional>\nint f();", "Replace <function> by a name.", "<parameters>1</parameters>"]
)
def test_words_that_begin_as_a_tag_does_are_text(grammar: str, text: str) -> None:
    parsed = read(Renderer(byte_tokenizer(), cases.TOOLS, grammar=grammar), text)

    assert parsed.tool_calls == ()
    assert parsed.message["content"] == text


def test_harmony_channels_become_thinking_and_content() -> None:
    renderer = Renderer(ChatTokenizer.load(cases.TOKENIZERS / "gptoss"), cases.TOOLS)

    parsed = read(
        renderer,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Done.",
    )

    assert parsed.message == {"role": "assistant", "content": "Done.", "reasoning_content": "hm"}


def test_an_unknown_grammar_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'hermes'"):
        Renderer(byte_tokenizer(), grammar="hermess")


HEADED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% for c in m.tool_calls or [] %} to={{ c.function.name }}<|sep|><tool_call>{{ c.function | tojson }}"
    "</tool_call>{% else %} to=user<|sep|>{{ m.content }}{% endfor %}"
    "{% else %}<|sep|>{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (" to=user<|sep|>Done.", "Done.", 0),
        (f" to=add<|sep|><tool_call>{GOOD}</tool_call>", "", 1),
        ("Done. to=user<|sep|>", "Done.", 0),
        (f" to=user<|sep|>Write <tool_call>{GOOD}</tool_call>", f"Write <tool_call>{GOOD}</tool_call>", 0),
        (" to=user", " to=user", 0),
    ],
)
def test_a_header_that_the_model_writes_is_no_content(text: str, content: str, calls: int) -> None:
    renderer = Renderer(cases.tokenizer_for(HEADED), cases.TOOLS)

    parsed = read(renderer, text)

    assert parsed.message["content"] == content
    assert sum(call.status is CallStatus.OK for call in parsed.tool_calls) == calls


@pytest.mark.parametrize(
    ("text", "statuses", "message"),
    [
        (
            (
                'hm <|open|>call tool="add" index="1"<|sep|><|close|>call<|sep|><|close|>think<|sep|>'
                "<|open|>response<|sep|>Hi.<|close|>response<|sep|><|close|>message<|sep|>"
            ),
            [CallStatus.IN_THINKING],
            "Hi.",
        ),
        ("Just text.", [], "Just text."),
        (
            '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>',
            [CallStatus.UNCLOSED],
            '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>',
        ),
        (
            '<|open|>tools<|sep|><|open|>call index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
            [CallStatus.INVALID_JSON],
            '<|open|>tools<|sep|><|open|>call index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        ),
        (
            (
                '<|open|>tools<|sep|><|open|>call tool="add"<|sep|><|open|>json type="object"<|sep|>{"n": 1}'
                "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
            ),
            [CallStatus.OK],
            "",
        ),
    ],
)
def test_channels_are_no_content_and_calls_in_them_are_read(text: str, statuses: list, message: str) -> None:
    renderer = Renderer(cases.tokenizer_for(CHANNELS), cases.TOOLS)

    parsed = read(renderer, text)

    assert [call.status for call in parsed.tool_calls] == statuses
    assert parsed.message["content"] == message


@pytest.mark.parametrize(
    ("grammar", "text", "statuses", "message"),
    [
        (
            "minimax_m3",
            'M<tool_call>\nM<invoke name="add">M<city>PM</n>M</invoke>\nM</tool_call>',
            [CallStatus.BAD_ARGUMENTS],
            'M<tool_call>\nM<invoke name="add">M<city>PM</n>M</invoke>\nM</tool_call>',
        ),
        (
            "minimax_m3",
            'M<tool_call>M<invoke name="add">M<city>PM</tool_call>',
            [CallStatus.UNCLOSED],
            'M<tool_call>M<invoke name="add">M<city>PM</tool_call>',
        ),
        (
            "minimax_m3",
            "M<tool_call>M<add>M</tool_call>",
            [CallStatus.INVALID_JSON],
            "M<tool_call>M<add>M</tool_call>",
        ),
        (
            "minimax_m3",
            "<tool_call>M<add></tool_call>",
            [CallStatus.INVALID_JSON],
            "<tool_call>M<add></tool_call>",
        ),
    ],
)
def test_newer_formats_name_what_is_wrong_and_keep_their_text(
    grammar: str, text: str, statuses: list, message: str
) -> None:
    renderer = Renderer(byte_tokenizer(), cases.TOOLS, grammar=grammar)
    mark = "]<]minimax[>["

    parsed = read(renderer, text.replace("M<", mark + "<"))

    assert [call.status for call in parsed.tool_calls] == statuses
    assert parsed.message["content"] == message.replace("M<", mark + "<")


def test_a_schema_that_refers_to_itself_is_followed_once() -> None:
    again = {"$ref": "#/$defs/Loop"}
    loop = {"anyOf": [{"type": "string"}, *[dict(again) for _ in range(50)]], "properties": {"x": again}}
    parameters = {"type": "object", "properties": {"x": again}, "$defs": {"Loop": loop}}
    tool = {"type": "function", "function": {"name": "act", "description": "", "parameters": parameters}}
    renderer = Renderer(cases.tokenizer_for(CALL_FORMATS["minimax"]), [tool])

    (call,) = read(renderer, '<invoke name="act"><parameter name="x">42</parameter></invoke>').tool_calls

    assert call.values == {"x": "42"}


@pytest.mark.parametrize(
    ("grammar", "text", "arguments"),
    [
        (
            "glm",
            "<tool_call>add\n<arg_key>city</arg_key>\n<arg_value>P\n</arg_value>\n</tool_call>",
            {"city": "P\n"},
        ),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"n": 3}, "id": "abc123456"}]', {"n": 3}),
        (
            "gemma4",
            '<|tool_call>call:add{city:<|"|>it\'s "P"<|"|>,n:3}<tool_call|>',
            {"city": 'it\'s "P"', "n": 3},
        ),
        ("granite", '<tool_call>[{"name": "add", "arguments": {"n": 3}}]', {"n": 3}),
        ("lfm", "<|tool_call_start|>[add(city='P', n=3)]<|tool_call_end|>", {"city": "P", "n": 3}),
        (
            "lfm",
            "<|tool_call_start|>[add(city='it's 'P', (so)')]<|tool_call_end|>",
            {"city": "it's 'P', (so)"},
        ),
        ("pythonic", '[add(city="a, b)", n=-3)]', {"city": "a, b)", "n": -3}),
        ("bare_literals", "[{'name': 'add', 'arguments': {'n': 3, 'city': None}}]", {"n": 3, "city": None}),
        (
            "harmony",
            (
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
                '<|constrain|>json<|message|>{"n": 3}'
            ),
            {"n": 3},
        ),
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"n": 3}', {"n": 3}),
    ],
)
def test_named_grammars_read_tags_of_plain_text(grammar: str, text: str, arguments: dict) -> None:
    (call,) = read(Renderer(byte_tokenizer(), cases.TOOLS, grammar=grammar), text).tool_calls

    assert (call.name, call.status, json.loads(call.arguments)) == ("add", CallStatus.OK, arguments)
