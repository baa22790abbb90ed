"""Reads that skip the sandbox's slower checks give what the plain sandbox gives."""

from __future__ import annotations

import jinja2.ext
import jinja2.sandbox
import pytest

from agentenv.render import ChatTemplate

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
