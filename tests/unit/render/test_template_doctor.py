"""The doctor says what a template does, chooses how to render with it, and never guesses silently."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from agentenv.cli import app
from agentenv.core import ModelNotFound, RenderError
from agentenv.render import ChatTokenizer, Renderer, byte_tokenizer, doctor_report
from agentenv.testing import tool_call_message
from helpers import chat_cases as cases
from helpers.costs import lines_counted

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def report_of(template: str, *, family: str = "qwen3", **options: object):
    return Renderer(ChatTokenizer.load(cases.TOKENIZERS / family), chat_template=template, **options).report


@pytest.mark.parametrize(
    ("family", "verdict", "grammar", "closers"),
    [
        ("qwen3", "fast", "hermes", {"text": "<|im_end|>", "call": "<|im_end|>"}),
        ("smollm2", "no_tool_role", "hermes", {"text": "<|im_end|>"}),
        ("mistral_tekken", "fast", "mistral", {"text": "</s>", "call": "</s>"}),
        ("gptoss", "fast", "harmony", {"text": "<|end|>", "call": "<|call|>"}),
        ("bytes", "fast", "hermes", {"text": "<|im_end|>", "call": "<|im_end|>"}),
    ],
)
def test_verdicts_of_real_templates(family: str, verdict: str, grammar: str, closers: dict) -> None:
    tokenizer = byte_tokenizer() if family == "bytes" else ChatTokenizer.load(cases.TOKENIZERS / family)

    report = Renderer(tokenizer).report

    assert (report.verdict, report.grammar, dict(report.closers)) == (verdict, grammar, closers)


def test_a_template_whose_tail_depends_on_earlier_rounds_needs_the_history() -> None:
    report = Renderer(ChatTokenizer.load(cases.TOKENIZERS / "deepseek_v3")).report

    assert report.verdict == "history"
    assert "an earlier turn with 1 call" in report.reasons[0]
    assert any("does not describe the tools" in warning for warning in report.warnings)


def test_calls_numbered_over_the_conversation_need_the_history() -> None:
    template = CHATML.replace(
        "{{ m.content }}",
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        "{% if m.role == 'tool' %}[{{ loop.index }}] {% endif %}{{ m.content }}",
    )

    assert report_of(template).verdict == "history"


@pytest.mark.parametrize(
    ("template", "reason", "remedy"),
    [
        (None, "no chat template", "pass a template"),
        ("{% for", "not valid Jinja", "pass a chat_template"),
        ("{{ raise_exception('go away') }}", "go away", "pass a chat_template"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "leaves out",
            "chat_template",
        ),
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            "no control token ends",
            "stop_token_ids",
        ),
        (CHATML.replace("<|im_", "<|xx_").replace("}\n{{", "}\n<think>{{"), "<|xx_end|>", "stop_token_ids"),
        ("{{ messages.append(1) }}", "SecurityError", "pass a chat_template"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_reason_and_remedy(template, reason: str, remedy: str) -> None:
    tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")
    tokenizer.chat_template = template
    tokenizer.special_tokens = {}
    tokenizer.eos_token_ids = ()

    renderer = Renderer(tokenizer)

    assert renderer.report.verdict == "refused"
    assert reason in renderer.report.reasons[0]
    assert remedy in renderer.report.remedy
    with pytest.raises(RenderError, match="; "):
        renderer.start([{"role": "user", "content": "hi"}])


def test_content_that_a_template_changes_is_reported() -> None:
    trimmed = report_of(CHATML.replace("m.content", "m.content | trim"))
    upper = report_of(CHATML.replace("m.content", "m.content | replace('<', '&lt;')"))

    assert any("lose white space" in warning for warning in trimmed.warnings)
    assert any("changed by the template" in warning for warning in upper.warnings)


def test_control_tokens_that_the_tokenizer_does_not_know_are_reported() -> None:
    report = report_of(CHATML.replace("<|im_start|>", "<|begin_turn|>"))

    assert any("<|begin_turn|>" in warning for warning in report.warnings)


def test_a_closer_that_is_no_stop_token_is_added_and_reported() -> None:
    tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")
    tokenizer.eos_token_ids = ()

    renderer = Renderer(tokenizer)

    assert renderer.stop_token_ids == (tokenizer.token_id("<|im_end|>"),)
    assert any("was not a stop token of the model" in warning for warning in renderer.report.warnings)


TAGGED = (
    "{% for m in messages %}<|open|>message {{ m.role }}<|sep|>{% if m.role == 'assistant' %}<|open|>response<|sep|>"
    "{{ m.content }}<|close|>response<|sep|>{% else %}{{ m.content }}{% endif %}<|close|>message<|sep|>"
    "<|end_of_msg|>{% endfor %}"
    "{% if add_generation_prompt %}<|open|>message assistant<|sep|><|open|>response<|sep|>{% endif %}"
)


def test_words_within_tags_that_close_a_turn_are_no_unknown_control_tokens() -> None:
    tokenizer = cases.tokenizer_for(TAGGED)
    tokenizer.eos_token_ids = ()

    renderer = Renderer(tokenizer)
    appended = renderer.extend([renderer.stop_token_ids[0]], [], [{"role": "user", "content": "next"}])

    assert renderer.report.closers["text"] == "<|end_of_msg|>"
    assert any("was not a stop token of the model" in warning for warning in renderer.report.warnings)
    assert renderer.decode(appended) == (
        "<|open|>message user<|sep|>next<|close|>message<|sep|><|end_of_msg|>"
        "<|open|>message assistant<|sep|><|open|>response<|sep|>"
    )


def test_a_template_that_does_not_end_a_turn_with_calls_gets_the_text_protocol_with_the_reason() -> None:
    template = CHATML.replace(
        "{{ m.content }}<|im_end|>\n",
        "{% if m.tool_calls %}Action: {{ m.tool_calls[0].function | tojson }}\n"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
    )

    report = report_of(template)

    assert report.verdict == "no_tool_role"
    assert "'<|im_start|>' follows the calls" in report.reasons[0]
    assert "stop_token_ids" not in report.reasons[0]


def test_grammars_nobody_listed_are_inferred_from_a_rendered_call() -> None:
    calls = "{% for c in m.tool_calls or [] %}<zap>{{ c.function | tojson }}</zap>{% endfor %}{{ m.content }}"
    tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")
    renderer = Renderer(tokenizer, cases.TOOLS, chat_template=CHATML.replace("{{ m.content }}", calls))

    parsed = renderer.parse(tokenizer.encode('<zap>{"name": "add", "arguments": {"n": 1}}</zap>'))

    assert renderer.report.grammar == "json between <zap> and </zap>"
    assert [call.name for call in parsed.tool_calls] == ["add"]


def test_a_way_of_calling_that_nothing_reads_is_replaced_by_the_text_protocol_in_words() -> None:
    calls = "{% for c in m.tool_calls or [] %}do {{ c.function.name | upper }} {{ c.function.arguments.x }}{{ c.function.arguments.city }}{% endfor %}"
    template = CHATML.replace("{{ m.content }}", calls + "{{ m.content }}")

    report = report_of(template)
    named = report_of(template, grammar="hermes")

    assert (report.verdict, report.grammar) == ("no_tool_role", "hermes")
    assert "no grammar can parse the tool calls" in report.reasons[0]
    assert "grammar=" in report.remedy
    assert (named.verdict, named.grammar, named.reasons) == ("fast", "hermes", ())


@pytest.mark.parametrize(
    ("told", "grammar", "call"),
    [
        ("<tool_call>", "hermes", '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'),
        ("<|tool_call|>", "granite", '<|tool_call|>[{"name": "add", "arguments": {"n": 1}}]'),
    ],
)
def test_calls_that_a_template_leaves_out_are_written_in_the_format_that_it_tells(
    told: str, grammar: str, call: str
) -> None:
    template = f"{{% if tools %}}Write {told} before a call of {{{{ tools | tojson }}}}{{% endif %}}{CHATML}"
    renderer = Renderer(cases.tokenizer_for(template), cases.TOOLS)

    assert (renderer.report.verdict, renderer.report.grammar) == ("fast", grammar)
    written = renderer.decode(renderer.write(tool_call_message("add", n=1)))
    assert written == f"{call}<|im_end|>"


def test_the_remedy_names_the_grammar_of_the_tags_that_a_template_has() -> None:
    report = report_of(CHATML + "{# <|tool_call_begin|> <|tool_call_end|> #}")

    assert report.verdict == "no_tool_role"
    assert report.remedy.endswith("; grammar='kimi_k2' reads calls in the format of its tags")


def test_a_second_renderer_and_a_binding_cost_next_to_nothing() -> None:
    tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "gptoss")
    with lines_counted() as cold:
        first = Renderer(tokenizer)
    with lines_counted() as warm:
        second = Renderer(tokenizer)
        second.bind(cases.TOOLS)

    assert first.report is second.report
    assert warm.lines < cold.lines / 20, (warm.lines, cold.lines)


def test_the_report_is_text_for_a_person() -> None:
    text = doctor_report(cases.TOKENIZERS / "smollm2")

    assert "no_tool_role: tools go through the text protocol" in text
    assert "text turns end  <|im_end|>" in text
    with pytest.raises(ModelNotFound):
        doctor_report(cases.TOKENIZERS / "nothing")


def test_the_command_line_prints_the_report_of_a_path_without_an_engine() -> None:
    path = str(cases.TOKENIZERS / "qwen3")

    text = CliRunner().invoke(app, ["doctor", "--model", path])
    found = CliRunner().invoke(app, ["doctor", "--model", path, "--json"])

    assert doctor_report(path) in text.output
    template = json.loads(found.output)["template"]
    assert (template["verdict"], template["grammar"]) == ("fast", "hermes")
    assert template["closers"] == {"text": "<|im_end|>", "call": "<|im_end|>"}


SPELLED = (
    "{% if tools %}List of tools: {{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{# <|tool_call_start|> <|tool_call_end|> #}"
)
CONTINUED = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|assistant_end|>' if not loop.first }}<|user|>{{ m.content }}"
    "<|assistant|>{% elif m.role == 'tool' %}[{{ m.content }}]{% else %}{{ m.content }}{% if m.tool_calls %}"
    '<|tools_prefix|>[{% for c in m.tool_calls %}{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]<|tools_suffix|>{% endif %}{% endif %}{% endfor %}{{ '' if tools }}"
)


def test_calls_that_a_template_leaves_out_are_written_as_its_models_write_them() -> None:
    renderer = Renderer(cases.tokenizer_for(SPELLED), cases.TOOLS)

    written = renderer.write(tool_call_message("add", city='a "b"', n=None))

    assert (renderer.report.verdict, renderer.report.grammar) == ("fast", "lfm")
    assert renderer.decode(written) == (
        '<|tool_call_start|>[add(city="a \\"b\\"", n=null)]<|tool_call_end|><|im_end|>'
    )


def test_calls_after_which_the_turn_goes_on_end_where_the_results_begin() -> None:
    renderer = Renderer(cases.tokenizer_for(CONTINUED), cases.TOOLS)

    written = renderer.write(tool_call_message("add", city="P"))
    calls = renderer.parse(written).tool_calls
    after = renderer.extend(written, calls, [{"role": "tool", "tool_call_id": calls[0].id, "content": "7"}])

    assert renderer.decode(written) == '<|tools_prefix|>[{"add": {"city": "P"}}]<|tools_suffix|>'
    assert renderer.report.closers["call"] == "<|tools_suffix|>"
    assert written[-1] in renderer.stop_token_ids
    assert renderer.decode(after) == "[7]"
