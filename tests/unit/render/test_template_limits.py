"""A template that would use up memory or time is refused in words; ordinary templates render as before."""

from __future__ import annotations

import math

import jinja2.ext
import jinja2.sandbox
import pytest

from agentenv.core import RenderError
from agentenv.render import ChatTemplate, ChatTokenizer, Renderer
from agentenv.render import template as templates
from agentenv.render import template_limits as limits
from helpers import chat_cases as cases

USER = [{"role": "user", "content": "hi"}]
LONG = "{% set ns = namespace(a='abcdefgh', l=[1]) %}"
TOO_MUCH = {
    "product": "{{ 'a' * 10**8 }}",
    "product of a list": "{{ ([1] * 10**8) | length }}",
    "power": "{{ 10 ** (10 ** 6) }}",
    "sum doubled in a loop": LONG + "{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "joined with itself in a loop": LONG + "{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "list doubled in a loop": LONG + "{% for i in range(40) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "list that holds itself twice": LONG
    + "{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "the same as JSON": LONG
    + "{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "output": "{% set a = 'a' * 10**6 %}{% for i in range(1000) %}{{ a }}{% endfor %}",
    "output of a macro": "{% macro m() %}{% set a = 'a' * 10**6 %}{% for i in range(1000) %}{{ a }}{% endfor %}"
    "{% endmacro %}{{ m() | length }}",
    "replace": "{% set a = 'a' * 10**5 %}{{ a.replace('a', a) }}",
    "filter replace": "{% set a = 'a' * 10**5 %}{{ a | replace('a', a) }}",
    "join": "{% set a = 'a' * 10**6 %}{{ a.join(range(1000) | map('string')) }}",
    "filter join": "{% set a = 'a' * 10**6 %}{{ range(1000) | join(a) }}",
    "width": "{{ 'a'.ljust(10**9) }}",
    "filter width": "{{ 'a' | center(10**9) }}",
    "indent": "{{ ('a\\n' * 10**6) | indent(10**6) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent with a width": "{{ '%*d' % (1000000000, 1) }}",
    "format": "{{ '{:1000000000}'.format('a') }}",
    "format with a width": "{{ '{:{}}'.format('a', 1000000000) }}",
    "tabs": "{{ ('\\t' * 10**6).expandtabs(10**6) }}",
    "many slices": "{% set a = 'a' * 10**7 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(1000) %}{% set ns.l = ns.l + [a[i:]] %}{% endfor %}",
}
TOO_LONG = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros that call themselves": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_template_that_makes_too_much_text_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name_of_limit in ("MAX_CHARACTERS", "MAX_MADE"):
        monkeypatch.setattr(limits, name_of_limit, getattr(limits, name_of_limit) // 16)
    monkeypatch.setattr(limits, "MAX_SECONDS", math.inf)

    with pytest.raises(RenderError, match="the chat template ") as error:
        ChatTemplate(TOO_MUCH[name]).render(USER)

    assert error.value.remedy


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_template_that_takes_too_long_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.1)

    with pytest.raises(RenderError, match="processor time"):
        ChatTemplate(TOO_LONG[name]).render(USER)


def test_every_render_has_limits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_MADE", 3_000)
    template = ChatTemplate("{% set a = messages[0].content + '!' %}{{ a }}")

    for _ in range(4):
        assert len(template.render([{"role": "user", "content": "a" * 1_000}])) == 1_001


def test_a_greedy_template_is_refused_by_the_doctor_without_trying_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.05)
    tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")
    renders: list[None] = []
    begin = templates.begin
    monkeypatch.setattr(templates, "begin", lambda: renders.append(begin()))

    report = Renderer(tokenizer, chat_template=TOO_LONG["loops in loops"]).report

    assert report.verdict == "refused"
    assert "processor time" in report.reasons[0]
    assert len(renders) < 20


# Reads that skip the sandbox's slower checks give what the plain sandbox gives ------------


SOURCES = (
    "{{ m.role }}{{ m.items() | list }}{{ m.keys is defined }}{{ m.absent is defined }}{{ m.absent }}",
    "{{ m.__class__ is defined }}{{ m.__class__ }}{{ m.clear is defined }}{{ m.get('role') }}{{ m.format }}",
    "{% for x in [1, 2] %}{{ loop.index0 }}{{ loop.last }}{{ loop.previtem is defined }}{{ loop.no }}{% endfor %}",
    "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ n.b is defined }}{{ n.__init__ is defined }}",
    "{{ m.content.upper() }}{{ '{0.__class__}'.format(m) }}",
    "{{ m.pop('role') }}",
    "{% for x in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
)


@pytest.mark.parametrize("source", SOURCES)
def test_templates_read_attributes_as_in_the_plain_sandbox(source: str) -> None:
    source = "{% set m = messages[0] %}" + source
    messages = [{"role": "user", "content": "hi", "format": "f"}]
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])

    try:
        expected = plain.from_string(source).render(messages=messages)
    except jinja2.TemplateError as error:
        with pytest.raises(Exception, match=type(error).__name__):
            ChatTemplate(source).render(messages)
    else:
        assert ChatTemplate(source).render(messages) == expected


def test_a_conversation_of_a_million_tokens_is_far_below_the_limits() -> None:
    tokenizer = ChatTokenizer.load(cases.TOKENIZERS / "qwen3")
    template = ChatTemplate(tokenizer.chat_template)
    turns = [
        {"role": "user", "content": "some words " * 2_000},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nsome words " * 200},
    ] * 150

    assert len(template.render([*turns, *USER])) > 3_000_000


def test_numbers_are_not_taken_for_widths() -> None:
    template = (
        "{% macro show(n) %}{{ n }}{% endmacro %}{{ show(5000000000) }}{{ '{} %d' .format(7000000000) }}"
    )

    assert ChatTemplate(template).render(USER) == "50000000007000000000 %d"
