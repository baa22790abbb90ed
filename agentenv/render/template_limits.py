"""Limits of the text that a chat template may make and of the time that it may take.

A template comes with a model, so it is code of somebody else. Jinja's sandbox keeps it from the host, but
not from using up memory and time: `{{ 'a' * 10**9 }}` is a valid template. The length of each text and list
is limited, before it is made where one operation can multiply lengths, and so are their sum and the processor
time of one render. The limits are far above what a conversation of a million tokens needs.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import wraps
from itertools import count
from typing import Any, cast

from agentenv.core.errors import RenderError

__all__ = [
    "TemplateLimit",
    "begin",
    "bounded_filter",
    "concat",
    "grow",
    "listed",
    "operate",
    "sized",
    "text_of",
    "tick",
]

MAX_CHARACTERS = 2**25
"""The longest text that a template may make; a conversation of a million tokens has about 4 million."""
MAX_MADE = 2**28
"""The sum of the lengths of all texts and lists that one render may make, intermediate ones included."""
MAX_SECONDS = 1.5
"""The processor time that one render may take; the time of other threads does not count."""
_MAX_BITS = 4096
_OTHER = 32
"""Characters that a value which is no text counts for; shorter texts are not counted when they are made."""
_GROWS = re.compile(
    "batch|center|expandtabs|format|indent|join|[lr]just|replace|slice|sum|tojson|translate|urlize|wordwrap|zfill"
).fullmatch
"""Matches the methods and filters whose arguments can make much of a short text."""
_WRITES = re.compile(
    "capitalize|e|(force)?escape|lower|pprint|string|striptags|title|trim|truncate|upper|urlencode|wordcount|xmlattr"
).fullmatch
"""Matches the other filters that write their value as text, whatever it is."""
_WIDTH = re.compile(r"\d{7,}|%[^%a-zA-Z]*\*|\{[^}]*\{")
"""A width in a format that is very large, or that a value decides."""


class TemplateLimit(RenderError):
    """A chat template used more text or time than a template may use."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the chat template {what}",
            remedy="shorten the messages if they are very long; otherwise pass another chat_template",
        )


class _Budget(threading.local):
    """What the render that runs in this thread may still use."""

    characters = MAX_MADE
    until: float | None = None

    def check(self) -> None:
        if self.characters < 0:
            raise TemplateLimit(f"makes more than {MAX_MADE:,} characters of text in one render")
        now = time.thread_time()
        if self.until is None:  # short renders rarely come here, so they do not ask for the time
            self.until = now + MAX_SECONDS
        elif now > self.until:
            raise TemplateLimit(f"takes more than {MAX_SECONDS:g} s of processor time for one render")


_budget = _Budget()
_rounds = count(1)


def begin() -> None:
    """Give the next render of this thread its full limits."""
    _budget.characters, _budget.until = MAX_MADE, None


def tick() -> None:
    """Look at the time now and then: called in every round of a loop and at every call."""
    if not next(_rounds) & 255:
        _budget.check()


def sized(value: Any) -> Any:
    """Count a value that an expression made."""
    kind = type(value)
    if (kind is str or kind is list or kind is tuple or kind is dict) and len(value) > _OTHER:
        _refuse_longer(len(value))
        _budget.characters -= len(value)
        if len(value) > 10_000 or _budget.characters < 0:
            _budget.check()
    return value


def concat(parts: Iterable[str]) -> str:
    """Join the blocks of a render, or of a macro."""
    kept: list[str] = []
    total = 0
    for part in parts:
        kept.append(part)
        total += len(part)
        if total > MAX_CHARACTERS:
            _refuse_longer(total)
    return "".join(kept)


def text_of(value: object) -> str:
    """Return a value as text."""
    if type(value) is not str:
        _written(value)
    return str(value)


def grow(name: str, value: object, given: Iterable[object]) -> None:
    """Refuse a method or filter if what it makes of a value and other arguments may be too long."""
    if not _GROWS(name):
        return
    given = list(given)
    if name == "format":
        fields = str(value).count("%") + str(value).count("{")
        if _WIDTH.search(str(value)):
            raise TemplateLimit("formats a text with a width that is very large, or not written out")
        _refuse_longer(len(str(value)) + fields * max(map(_written, given), default=0))
    elif name == "replace" and len(given) > 1:
        text, old, new = map(text_of, (value, *given[:2]))
        _refuse_longer(len(text) + text.count(old) * len(new))
    else:
        each = max((abs(one) if isinstance(one, int) else _written(one) for one in given), default=0)
        items = len(value) if isinstance(value, Sized) else _OTHER
        _refuse_longer(_written(value) + items * each)


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses to make too much."""
    first, writes = int(hasattr(function, "jinja_pass_arg")), _GROWS(name) or _WRITES(name)

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if writes:
            value = listed(args[first])
            args = (*args[:first], value, *args[first + 1 :])
            _written(value)
            grow(name, value, (*args[first + 1 :], *kwargs.values()))
        return sized(function(*args, **kwargs))

    return bounded


def listed(value: object) -> object:
    """Return a list in the place of an iterator, so that its items can be counted before they are used."""
    return list(cast("Iterator[object]", value)) if isinstance(value, Iterator) else value


def operate(operator: str, left: object, right: object) -> None:
    """Refuse a product, a power or a format that would be too large."""
    if operator == "%" and isinstance(left, str):
        grow("format", left, cast("tuple[object, ...]", right) if isinstance(right, tuple) else (right,))
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_BITS:
            raise TemplateLimit("makes a number of thousands of digits")
    elif operator == "*":
        times = [len(one) if isinstance(one, Sized) else one for one in (left, right)]
        if all(isinstance(one, int) for one in times):
            _refuse_longer(cast("int", times[0]) * cast("int", times[1]))


def _refuse_longer(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise TemplateLimit(
            f"makes a text of {characters:,} characters; at most {MAX_CHARACTERS:,} are allowed"
        )


def _written(value: object) -> int:
    """Return about how many characters a value takes as text, and refuse one that takes too many.

    A container may hold itself many times over, so its text can be far longer than the memory it takes.
    """
    total, waiting = 0, [value]
    while waiting and total <= MAX_CHARACTERS:
        item = waiting.pop()
        total += len(item) if isinstance(item, str) else _OTHER
        if isinstance(item, dict):
            waiting += cast("dict[object, object]", item).keys()
            waiting += cast("dict[object, object]", item).values()
        elif isinstance(item, (list, tuple, range)):
            waiting += cast("list[object]", item)
    _refuse_longer(total)
    return total
