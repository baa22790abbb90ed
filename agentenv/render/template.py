"""Render chat templates exactly as transformers does, without importing transformers.

The Jinja environment is the same: the immutable sandbox, trimmed blocks, loop controls, a `tojson`
that leaves HTML and non-ASCII characters alone, `raise_exception`, `strftime_now`, and the
`generation` tag, which marks text but does not change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import jinja2

from agentenv.core.errors import RenderError
from agentenv.render.jinja import environment
from agentenv.render.template_limits import TemplateLimit, begin

__all__ = ["ChatTemplate"]


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
                f"the chat template is not valid Jinja: {error}", remedy="pass a correct one as chat_template"
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
