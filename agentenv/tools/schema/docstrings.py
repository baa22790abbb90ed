"""Read what a docstring says about a function, its parameters and its result.

Google, NumPy, reST and Epydoc styles are read by docstring-parser. A docstring that no style
explains becomes the description as it stands: a docstring is never the reason to refuse a tool.
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
    """What a docstring says about one parameter."""

    description: str = ""
    choices: tuple[object, ...] = ()
    """Allowed values, from a closing `(choices: [...])` as transformers writes it."""


@dataclass(frozen=True, slots=True)
class FunctionDoc:
    """What a docstring says about a function."""

    description: str = ""
    parameters: Mapping[str, ParameterDoc] = field(default_factory=dict[str, ParameterDoc])
    """By name, without the stars of `*args` and `**kwargs`."""
    returns: str = ""


def read_docstring(docstring: str | None) -> FunctionDoc:
    """Parse a docstring of any common style; an absent one gives an empty record."""
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
    """Return the reading that finds most, or None if no style can read the text."""
    best: Docstring | None = None
    for style in (
        DocstringStyle.GOOGLE,
        DocstringStyle.NUMPYDOC,
        DocstringStyle.REST,
        DocstringStyle.EPYDOC,
    ):
        try:
            found = parse_style(text, style=style)
        except (ParseError, ValueError, IndexError, AttributeError):
            continue
        if best is None or len(found.meta) > len(best.meta):
            best = found
    return best


def _description(text: str, parsed: Docstring) -> str:
    if parsed.style is DocstringStyle.GOOGLE:
        section = _SECTION.search(text)
        return text[: section.start()].strip() if section else text.strip()
    return (parsed.description or "").strip()


def _parameter(description: str) -> ParameterDoc:
    line = _one_line(description)
    found = _CHOICES.search(line)
    if found is None:
        return ParameterDoc(line)
    try:
        choices = json.loads(found.group(1))
    except ValueError:
        return ParameterDoc(line)
    cleaned = tuple(choice.strip() if isinstance(choice, str) else choice for choice in choices)
    return ParameterDoc(line[: found.start()].strip(), cleaned)


def _one_line(text: str) -> str:
    return re.sub(r"\s*\n\s*", " ", text.strip())
