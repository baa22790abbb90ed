"""Read the descriptions of a function, its parameters and its result from the docstring.

The package docstring-parser reads Google, NumPy, reST and Epydoc styles. If it cannot read a docstring, the
whole text becomes the description, so that a docstring never is a reason to refuse a tool.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from docstring_parser import Docstring, DocstringStyle, ParseError
from docstring_parser import parse as parse_style

__all__ = ["FunctionDoc", "ParameterDoc", "read_docstring"]

_SECTION = re.compile(
    r"^(?:Args|Arguments|Params|Parameters|Attributes|Returns|Yields|Raises|Except|Exceptions):[ \t]*$",
    re.MULTILINE,
)
_CHOICES = re.compile(r"\(choices:\s*(\[.*\])\s*\)\s*$", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParameterDoc:
    """The documentation of one parameter."""

    description: str = ""
    choices: tuple[object, ...] = ()
    """Allowed values, from `(choices: [...])` at the end of the description, as in transformers."""


@dataclass(frozen=True, slots=True)
class FunctionDoc:
    """The documentation of a function."""

    description: str = ""
    parameters: Mapping[str, ParameterDoc] = field(default_factory=dict[str, ParameterDoc])
    """Documentation of the parameters by name, without the stars of `*args` and `**kwargs`."""
    returns: str = ""


def read_docstring(docstring: str | None) -> FunctionDoc:
    """Parse a docstring of any common style; without a docstring the result is empty."""
    if not docstring or not docstring.strip():
        return FunctionDoc()
    text = inspect.cleandoc(docstring)
    parsed = _parse(text)
    if parsed is None:
        return FunctionDoc(description=text)
    parameters: dict[str, ParameterDoc] = {}
    for entry in parsed.params:
        doc = _parameter(entry.description or "")
        for name in entry.arg_name.split(","):
            parameters.setdefault(name.strip().lstrip("*\\"), doc)
    returns = _one_line(parsed.returns.description or "") if parsed.returns else ""
    return FunctionDoc(_description(text, parsed), parameters, returns)


def _parse(text: str) -> Docstring | None:
    """Return the result of the style that finds the most entries; None if no style can read the text."""
    best: Docstring | None = None
    for style in (
        DocstringStyle.GOOGLE,
        DocstringStyle.NUMPYDOC,
        DocstringStyle.REST,
        DocstringStyle.EPYDOC,
    ):
        try:
            parsed = parse_style(text, style=style)
        except (ParseError, ValueError, IndexError, AttributeError):
            continue
        if best is None or len(parsed.meta) > len(best.meta):
            best = parsed
    return best


def _description(text: str, parsed: Docstring) -> str:
    if parsed.style is DocstringStyle.GOOGLE:
        section = _SECTION.search(text)
        return text[: section.start()].strip() if section else text.strip()
    return (parsed.description or "").strip()


def _parameter(description: str) -> ParameterDoc:
    line = _one_line(description)
    match = _CHOICES.search(line)
    if match is None:
        return ParameterDoc(line)
    try:
        choices = json.loads(match.group(1))
    except ValueError:
        return ParameterDoc(line)
    cleaned = tuple(choice.strip() if isinstance(choice, str) else choice for choice in choices)
    return ParameterDoc(line[: match.start()].strip(), cleaned)


def _one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text.strip())
