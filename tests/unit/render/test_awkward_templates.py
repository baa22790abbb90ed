"""Templates that make appending hard are exact, need the history, or are refused in words."""

from __future__ import annotations

import pytest

from agentenv.core import RenderError
from agentenv.render import ChatTokenizer
from agentenv.render.tail import FIRST
from helpers import chat_cases as cases
from helpers.render_truth import Checker

CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
TURN = "<|im_start|>{{ m.role }}\n" + CALLS + "{{ m.content or '' }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chat(turn: str = TURN, before: str = "", prompt: str = PROMPT) -> str:
    return f"{before}{{% for m in messages %}}{turn}{{% endfor %}}{prompt}"


EXACT = {
    "no line break after the closer": chat(TURN.removesuffix("\n")),
    "line breaks of Windows": chat(TURN.replace("\n", "\r\n")),
    "arguments must be text": chat(
        "{% for c in m.tool_calls or [] %}{% if c.function.arguments is not string %}"
        "{{ raise_exception('arguments must be JSON text') }}{% endif %}{% endfor %}"
        + TURN.replace("c.function.arguments | tojson", "c.function.arguments")
    ),
    "ids of nine characters": chat(
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids have 9 characters') }}{% endif %}{% endfor %}"
        "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
        "{{ raise_exception('ids have 9 characters') }}{% endif %}"
        + TURN.replace("{{ m.role }}", "{{ m.role }} {{ m.tool_call_id or '' }}")
    ),
    "roles must alternate, tool turns aside": chat(
        "{% if m.role == 'user' and not loop.first and loop.previtem.role == 'user' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN
    ),
    "a result must answer a call just before it": chat(
        "{% if m.role == 'tool' and loop.previtem.role not in ('assistant', 'tool') %}"
        "{{ raise_exception('no call before this result') }}{% endif %}" + TURN
    ),
    "results are named by looking up their call": chat(
        "{% if m.role == 'assistant' %}{% set names.calls = m.tool_calls or [] %}{% endif %}"
        "{% if m.role == 'tool' %}{% set found = names.calls | selectattr('id', 'equalto', m.tool_call_id)"
        " | list %}{{ found[0].function.name }}: {% endif %}" + TURN,
        "{% set names = namespace(calls=[]) %}",
    ),
    "parallel results share one turn as a list": chat(
        "{% if m.role == 'tool' %}{{ '<|im_start|>tool\n[' if loop.previtem.role != 'tool' }}"
        "{{ m.content | tojson }}{{ ', ' if not loop.last and loop.nextitem.role == 'tool' else ']<|im_end|>\n' }}"
        "{% else %}" + TURN + "{% endif %}"
    ),
    "the prompt opens the thinking, history drops it": chat(
        TURN.replace(
            "{{ m.content or '' }}",
            "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}",
        ),
        prompt=PROMPT.replace("assistant\n", "assistant\n<think>\n"),
    ),
    "empty thinking only in the last answer": chat(
        TURN.replace(
            "{{ m.role }}\n",
            "{{ m.role }}\n{{ '<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' }}",
        )
    ),
    "the last answer ends with another token": chat(
        TURN.replace(
            "<|im_end|>",
            "{{ '<|endoftext|>' if loop.last and m.role == 'assistant' and not add_generation_prompt "
            "else '<|im_end|>' }}",
        )
    ),
    "no prompt after results": chat(
        prompt=PROMPT.replace(
            "if add_generation_prompt", "if add_generation_prompt and messages[-1].role != 'tool'"
        )
    ),
    "answers end, nobody else does": chat(
        "{% if m.role == 'assistant' %}<|im_start|>assistant\n" + CALLS + "{{ m.content or '' }}<|im_end|>"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}"
    ),
    "a call turn has no content": chat(
        "{% if m.tool_calls and m.content is not none %}"
        "{{ raise_exception('content beside calls') }}{% endif %}" + TURN
    ),
    "a system message is written where there is none": chat(
        before="{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    ),
    "the date stands at the top": chat(before="<|im_start|>system\n{{ strftime_now('%Y') }}<|im_end|>\n"),
    "there must be a user": chat(
        before="{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no user query found') }}{% endif %}"
    ),
    "without tools it fails": chat(before="{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}"),
    "content is escaped as HTML": chat(TURN.replace("{{ m.content or '' }}", "{{ (m.content or '') | e }}")),
}
HISTORY = {
    "calls are numbered over the conversation": chat(
        "{% if m.role == 'tool' %}{% set n.results = n.results + 1 %}{{ n.results }}. {% endif %}" + TURN,
        "{% set n = namespace(results=0) %}",
    ),
    "turns are numbered": chat(TURN.replace("{{ m.role }}", "{{ m.role }} {{ loop.index }}")),
    "what it says depends on how many calls there were": chat(
        prompt="{% if messages | selectattr('tool_calls') | list | length > 1 %}<|im_start|>system\nStop "
        "calling.<|im_end|>\n{% endif %}" + PROMPT
    ),
}
MOVED = {
    "tools": chat(
        "{% if m.role == 'user' and loop.index0 == last.user %}{{ tools | tojson if tools }}{% endif %}"
        + TURN,
        "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set last.user = loop.index0 %}{% endif %}{% endfor %}",
    ),
    "a system message": chat(
        "{% if m.role == 'user' and loop.index0 == last.user and messages[0].role == 'system' %}"
        "{{ messages[0].content }}\n{% endif %}{% if m.role != 'system' %}" + TURN + "{% endif %}",
        "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set last.user = loop.index0 %}{% endif %}{% endfor %}",
    ),
}
REFUSED = {
    "only the last answer is kept": (
        chat("{% if m.role != 'assistant' or loop.last %}" + TURN + "{% endif %}"),
        "leaves out an assistant turn's text",
    ),
    "plain text ends a turn": (
        chat("{{ m.role }}: {{ m.content }}\n", prompt="assistant: "),
        "stop_token_ids",
    ),
    "only one message": (
        chat(before="{% if messages | length > 1 %}{{ raise_exception('one message, please') }}{% endif %}"),
        "one message, please",
    ),
}

USERS_LAST = (
    "{% for m in messages %}{% if m.role != 'user' %}" + TURN + "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}" + TURN + "{% endif %}{% endfor %}" + PROMPT
)
REWRITTEN = {
    "messages of the user stand last": (USERS_LAST, "changes earlier text", "FIRST"),
    "the header counts the messages": (
        chat(before="<|im_start|>system\n{{ messages | length }} messages<|im_end|>\n"),
        "1 messages",
        "3 messages",
    ),
    "the first message is dropped later": (
        chat("{% if not (loop.first and messages | length > 2) %}" + TURN + "{% endif %}"),
        "changes earlier text",
        "PROBE",
    ),
    "only the last ten messages are kept": (
        chat("{% if loop.revindex <= 10 %}" + TURN + "{% endif %}"),
        "changes earlier text",
        "render of 23 messages",
    ),
    "the last message of the user is marked": (
        chat(TURN.replace("{{ m.role }}", "{{ m.role }}{{ ' now' if m.role == 'user' and loop.last }}")),
        "user now",
        "render of 3 messages",
    ),
    "there is no generation prompt": (chat(prompt=""), "generation prompt", "<|im_start|>assistant"),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_template_that_rewrites_what_was_appended_is_refused_with_the_first_difference(name: str) -> None:
    template, first, second = REWRITTEN[name]

    report = checker_of(template).renderer.report

    assert report.verdict == "refused"
    assert first in report.reasons[0]
    assert second in report.reasons[0]
    assert report.remedy


def test_a_template_that_drops_older_results_gets_the_text_protocol() -> None:
    turn = "{% if m.role != 'tool' or loop.last %}" + TURN + "{% endif %}"

    report = checker_of(chat(turn)).renderer.report

    assert report.verdict == "no_tool_role"
    assert "leaves out or moves earlier tool results" in report.reasons[0]


REMINDER = "<|im_start|>system\nTask: {{ messages[0].content }}<|im_end|>\n"


def test_a_template_that_repeats_the_first_message_gets_the_real_one() -> None:
    reminder = "{% if messages | length > 1 %}" + REMINDER + "{% endif %}"
    renderer = checker_of(chat(prompt=reminder + PROMPT)).renderer
    first, new = {"role": "user", "content": "Sail."}, {"role": "user", "content": "Go on."}

    ids = renderer.extend([], [], [new], history=[first])

    assert renderer.report.verdict == "history"
    assert "Task: Sail." in renderer.decode(ids)


def test_text_of_a_probe_is_never_appended() -> None:
    reminder = "{% if 'remind' in messages[-1].content %}" + REMINDER + "{% endif %}"
    renderer = checker_of(chat(prompt=reminder + PROMPT)).renderer

    with pytest.raises(RenderError, match="first message again"):
        renderer.extend([], [], [{"role": "user", "content": "remind me"}])

    assert renderer.extend([], [], [{"role": "user", "content": FIRST}])  # somebody's own words


def checker_of(template: str) -> Checker:
    tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")
    tokenizer.chat_template = template
    return Checker(tokenizer)


@pytest.mark.parametrize("name", EXACT)
def test_an_awkward_template_is_exact_from_what_is_new(name: str) -> None:
    checker = checker_of(EXACT[name])

    assert checker.verdict == "fast", checker.renderer.report.reasons
    for seed in range(6):
        checker.play(seed)
    assert checker.compared >= 6


@pytest.mark.parametrize("name", HISTORY)
def test_a_template_that_counts_over_the_conversation_needs_the_history(name: str) -> None:
    checker = checker_of(HISTORY[name])

    assert checker.verdict == "history"
    for seed in range(6):
        checker.play(seed)
    assert checker.compared >= 6


@pytest.mark.parametrize("name", MOVED)
def test_what_a_fresh_render_would_move_is_said_and_stays_where_it_was(name: str) -> None:
    checker = checker_of(MOVED[name])

    assert any(text.startswith(f"with {name}, a fresh render") for text in checker.renderer.report.warnings)
    for seed in range(6):
        checker.play(seed)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_appended_is_refused_in_words(name: str) -> None:
    template, reason = REFUSED[name]

    report = checker_of(template).renderer.report

    assert report.verdict == "refused"
    assert reason in f"{report.reasons[0]}; {report.remedy}"
    assert report.remedy
