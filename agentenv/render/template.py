"""Render chat templates exactly as transformers does, without importing transformers.

The Jinja environment is the same: the immutable sandbox, trimmed blocks, loop controls, a `tojson`
that leaves HTML and non-ASCII characters alone, `raise_exception`, `strftime_now`, and the
`generation` tag, which marks text but does not change it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, cast

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from agentenv.core.errors import RenderError
from agentenv.render import template_limits as limits
from agentenv.render.template_limits import TemplateLimit, begin

__all__ = ["ChatTemplate", "Sandbox", "environment"]


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Writes the checks into the code of a template."""

    def writeline(self, x: str, node: jinja2.nodes.Node | None = None, extra: int = 0) -> None:
        super().writeline(x, node, extra)
        if x == "concat = environment.concat":  # Jinja writes this line at the start of each block
            super().writeline("sized, text, tick = environment.sized, environment.text, environment.tick")
        elif x == "_loop_vars = {}":  # and this one at the start of the body of each loop
            super().writeline("tick()")

    def _output_child_pre(self, node: Any, frame: jinja2.compiler.Frame, finalize: Any) -> None:
        self.write("text(")

    def _output_child_post(self, node: Any, frame: jinja2.compiler.Frame, finalize: Any) -> None:
        self.write(")")

    def visit_Add(self, node: jinja2.nodes.Add, frame: jinja2.compiler.Frame) -> None:
        self._counted(super().visit_Add, node, frame)

    @jinja2.compiler.optimizeconst
    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        def visit(*_: object) -> None:
            self.write("''.join((")
            for item in node.nodes:
                self.write("text(")
                self.visit(item, frame)
                self.write("), ")
            self.write("))")

        self._counted(visit, node, frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        if isinstance(node.arg, jinja2.nodes.Slice):
            self._counted(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def _counted(
        self, visit: Callable[[Any, jinja2.compiler.Frame], None], node: Any, frame: jinja2.compiler.Frame
    ) -> None:
        self.write("sized(")
        visit(node, frame)
        self.write(")")


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


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the limits of this module.

    Reads of message keys, `loop` and namespaces skip needless checks, which makes them faster.
    """

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"*", "**", "%"})
    concat = staticmethod(limits.concat)
    sized = staticmethod(limits.sized)
    text = staticmethod(limits.text_of)
    tick = staticmethod(limits.tick)

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

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object from a template."""
        limits.tick()
        if type(owner := getattr(obj, "__self__", None)) is str:
            args = tuple(map(limits.listed, args))
            # Jinja passes the variables of loops and blocks along with every call.
            named = (value for key, value in kwargs.items() if not key.startswith("_"))
            limits.grow(obj.__name__, owner, (*args, *named))
        if not self.is_safe_callable(obj):
            raise jinja2.exceptions.SecurityError(f"{obj!r} is not safely callable")
        return limits.sized(context.call(obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of `*`, `**` or `%`."""
        limits.operate(operator, left, right)
        return limits.sized(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` with the checks of Jinja and of this module."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            limits.grow("format", value.__self__, (*args, *kwargs.values()))
            return function(*args, **kwargs)

        return bounded


@lru_cache(maxsize=1)
def environment() -> Sandbox:
    """Return the environment that all templates share."""
    env = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    filters = cast("dict[str, Callable[..., Any]]", env.filters)
    filters["tojson"] = _tojson
    filters.update({name: limits.bounded_filter(name, function) for name, function in filters.items()})
    global_names = cast("dict[str, object]", env.globals)
    global_names.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    del global_names["lipsum"]  # writes as many paragraphs as it is asked for
    return env


@lru_cache(maxsize=256)
def _compile(source: str) -> jinja2.Template:
    return environment().from_string(source)


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
                f"the chat template is not valid Jinja: {error}", remedy="pass a chat_template that is valid"
            ) from error

    def constants(self) -> set[str]:
        """Return the strings in the template's expressions, which it may look for in a text."""
        return {token.value for token in environment().lexer.tokenize(self.source) if token.type == "string"}

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
            TemplateLimit: The template makes too much text or takes too long.
        """
        begin()
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self.values,
            )
        except TemplateLimit:
            raise
        except RecursionError as error:
            raise RenderError("the chat template recurses without end") from error
        except Exception as error:
            raise RenderError(f"{type(error).__name__}: {error}") from error
