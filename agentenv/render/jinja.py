"""The Jinja sandbox that chat templates run in: transformers' sandbox, with limits of size and time."""

from __future__ import annotations

import json
from collections.abc import Callable
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

from agentenv.render import template_limits as limits

__all__ = ["Sandbox", "environment"]


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Writes the checks into the code of a template."""

    _shown = False
    """True within an expression whose value is only written to the output, which has its own limit."""

    def writeline(self, x: str, node: jinja2.nodes.Node | None = None, extra: int = 0) -> None:
        super().writeline(x, node, extra)
        if x == "concat = environment.concat":  # Jinja writes this line at the start of each block
            super().writeline("sized, text, tick = environment.sized, environment.text, environment.tick")
        elif x == "_loop_vars = {}":  # and this one at the start of the body of each loop
            super().writeline("tick()")

    def _output_child_pre(self, node: Any, frame: jinja2.compiler.Frame, finalize: Any) -> None:
        self._shown = frame.buffer is None
        self.write("text(")

    def _output_child_post(self, node: Any, frame: jinja2.compiler.Frame, finalize: Any) -> None:
        self._shown = False
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

    def visit_Call(
        self, node: jinja2.nodes.Call, frame: jinja2.compiler.Frame, forward_caller: bool = False
    ) -> None:
        shown, self._shown = self._shown, False  # what is passed to a call may be kept
        super().visit_Call(node, frame, forward_caller=forward_caller)
        self._shown = shown

    def _counted(
        self, visit: Callable[[Any, jinja2.compiler.Frame], None], node: Any, frame: jinja2.compiler.Frame
    ) -> None:
        self.write("(" if self._shown else "sized(")
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
            args = limits.checked_arguments(owner, obj.__name__, args, kwargs)
        if not self.is_safe_callable(obj):
            raise jinja2.exceptions.SecurityError(f"{obj!r} is not safely callable")
        return limits.sized(context.call(obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Return the result of `*`, `**` or `%`."""
        if operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            limits.refuse_longer(limits.formatted(left, *cast("tuple[object, ...]", values)))
        elif operator == "*":
            limits.refuse_longer(limits.multiplied(left, right))
        elif operator == "**":
            limits.to_the_power(left, right)
        return limits.sized(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` with the checks of Jinja and of this module."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            limits.refuse_longer(limits.formatted(value.__self__, *args, *kwargs.values()))
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
