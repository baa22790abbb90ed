"""Render chat templates exactly as transformers does, without importing transformers.

The Jinja environment is the same: the immutable sandbox, trimmed blocks, loop controls, a `tojson`
that leaves HTML and non-ASCII characters alone, `raise_exception`, `strftime_now`, and the
`generation` tag, which marks text but does not change it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from agentenv.core.errors import RenderError

__all__ = ["ChatTemplate"]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: renders its body as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja declares it as a plain attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # noqa: DTZ005 - templates print the local date


_DICT_ATTRIBUTES = frozenset(dir({}))
_TEMPLATE_OBJECTS = (jinja2.runtime.LoopContext, jinja2.utils.Namespace)
_ABSENT = object()


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, made faster: reads of message keys, `loop` and namespaces skip needless checks."""

    def getattr(self, obj: object, attribute: str) -> object:
        """Return the value of `obj.attribute` in a template."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            entries = cast("dict[str, object]", obj)
            return entries[attribute] if attribute in entries else self.undefined(obj=obj, name=attribute)
        if kind in _TEMPLATE_OBJECTS and not attribute.startswith("_"):
            value = getattr(obj, attribute, _ABSENT)
            if value is not _ABSENT:
                return value
        return super().getattr(obj, attribute)


@lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _tojson
    global_names = cast("dict[str, object]", env.globals)
    global_names.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return env


@lru_cache(maxsize=256)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


class ChatTemplate:
    """A compiled chat template with the values that every render gets.

    Raises:
        RenderError: The source is not a Jinja template.
    """

    __slots__ = ("_compiled", "source", "values")

    def __init__(self, source: str, values: Mapping[str, object] | None = None) -> None:
        self.source = source
        self.values = dict(values or {})
        try:
            self._compiled = _compile(source)
        except jinja2.TemplateError as error:
            raise RenderError(
                f"the chat template is not valid Jinja: {error}", remedy="pass a correct one as chat_template"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        generation_prompt: bool = True,
    ) -> str:
        """Return the text of a conversation.

        Raises:
            RenderError: The template refuses the conversation; the message is that of the template.
        """
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self.values,
            )
        except RecursionError as error:
            raise RenderError("the chat template recurses without end") from error
        except Exception as error:
            raise RenderError(f"{type(error).__name__}: {error}") from error
