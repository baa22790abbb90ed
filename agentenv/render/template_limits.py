"""Limits of the text that a chat template may make and of the time that it may take.

A template comes with a model, so it is code of somebody else. Jinja's sandbox keeps it from the host, but
not from using up memory and time: `{{ 'a' * 10**9 }}` is a valid template. Here each of these is limited:

1. the length of every string and list that an expression makes, before it is made where one operation
   can multiply lengths (`*`, `replace`, `join`, formats, widths),
2. the sum of these lengths over one render, and the length of its output,
3. the processor time of one render.

The limits are far above what a conversation of a million tokens needs.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import count, islice
from typing import Any, TypeAlias, cast

from agentenv.core.errors import RenderError

__all__ = [
    "MAX_CHARACTERS",
    "MAX_SECONDS",
    "TemplateLimit",
    "begin",
    "bounded_filter",
    "checked_arguments",
    "concat",
    "formatted",
    "multiplied",
    "refuse_longer",
    "sized",
    "text_of",
    "tick",
    "to_the_power",
]

MAX_CHARACTERS = 2**25
"""The longest text that a template may make; a conversation of a million tokens has about 4 million."""
MAX_MADE = 2**28
"""The sum of the lengths of all texts and lists that one render may make, intermediate ones included."""
MAX_SECONDS = 10.0
"""The processor time that one render may take; the time of other threads does not count."""
_MAX_NUMBER = 1_000_000
"""The largest width or count that a template may pass to a method or filter."""
_MAX_BITS = 4096
_SMALL = 64


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


def refuse_longer(characters: int) -> None:
    """Refuse a text or list that would be longer than any that a template needs."""
    if characters > MAX_CHARACTERS:
        raise TemplateLimit(
            f"makes a text of {characters:,} characters; at most {MAX_CHARACTERS:,} are allowed"
        )


def sized(value: Any) -> Any:
    """Count a value that an expression made."""
    kind = type(value)
    if (kind is str or kind is list or kind is tuple or kind is dict) and len(value) > _SMALL:
        length = len(value)
        refuse_longer(length)
        _budget.characters -= length
        if length > 10_000 or _budget.characters < 0:
            _budget.check()
    return value


def tick() -> None:
    """Look at the time now and then: called in every round of a loop and at every call."""
    if not next(_rounds) & 255:
        _budget.check()


def concat(parts: Iterable[str]) -> str:
    """Join the blocks of a render, or of a macro."""
    parts = iter(parts)
    kept: list[str] = []
    total = 0
    while some := list(islice(parts, 16)):
        kept += some
        total += sum(map(len, some))
        if total > MAX_CHARACTERS:
            refuse_longer(total)
    return "".join(kept)


def _written(value: object) -> int:
    """Return about how many characters a value takes as text.

    A container may hold itself many times over, so its text can be far longer than the memory it takes.
    """
    if not isinstance(value, (list, tuple, dict)):
        return len(value) if isinstance(value, str) else _SMALL
    total = 0
    waiting: list[object] = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            waiting += cast("dict[object, object]", item).keys()
            waiting += cast("dict[object, object]", item).values()
            total += 32
        elif isinstance(item, (list, tuple)):
            waiting += cast("Sequence[object]", item)
            total += 32
        if total > MAX_CHARACTERS:
            break
    refuse_longer(total)
    return total


def text_of(value: object) -> str:
    """Return a value as text."""
    if type(value) is not str:
        _written(value)
    return str(value)


def _widths(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, int) and value > _MAX_NUMBER:
            raise TemplateLimit(f"asks for a width or count of {value:,}; at most {_MAX_NUMBER:,} is allowed")


_Growth: TypeAlias = "Callable[..., int]"
"""Returns the length of what a method or filter will make, from its arguments."""


def _replaced(text: object, old: object = "", new: object = "", *_: object, **__: object) -> int:
    text, old, new = str(text), str(old), str(new)
    most = len(text) * (len(new) + 1)
    return most if most <= MAX_CHARACTERS else len(text) + text.count(old) * len(new)


def _joined(items: Sequence[object], d: object = "", *_: object, **__: object) -> int:
    return sum(map(_written, items)) + len(items) * len(str(d))


def _indented(text: object, width: object = 4, *_: object, **__: object) -> int:
    each = width if isinstance(width, int) else len(str(width))
    return len(str(text)) + (str(text).count("\n") + 1) * each


def formatted(text: object, *values: object) -> int:
    """Return a bound for `%` and `str.format`: each field may hold the longest value, or a width."""
    text = str(text)
    widths = [int(digits[:12]) for digits in re.findall(r"\d{4,}", text)]
    if _WIDTH_FROM_VALUE.search(text):
        widths += [value for value in values if isinstance(value, int)]
    return len(text) + (text.count("%") + text.count("{")) * max([_SMALL, *widths, *map(_written, values)])


def _wrapped(
    text: object,
    width: object = 79,
    breaks: object = True,
    wrapstring: object = None,
    *_: object,
    **__: object,
) -> int:
    del width, breaks
    return len(str(text)) * (1 + len(str(wrapstring or "\n")))


def _expanded(text: str, tabsize: int = 8) -> int:
    return len(text) * max(tabsize, 1)


def _translated(text: str, table: Mapping[object, object]) -> int:
    return len(text) * max([1, *map(_written, dict(table).values())])


def _joined_by(separator: str, items: Sequence[object]) -> int:
    return _joined(items, separator)


def _format_filter(text: object, *values: object, **named: object) -> int:
    return formatted(text, *values, *named.values())


def _json(value: object, *_: object, indent: int | None = None, **__: object) -> int:
    return _written(value) * (1 + indent) if indent else 0


def _summed(items: Sequence[object], attribute: object = None, start: object = 0) -> int:
    del attribute
    return 0 if isinstance(start, (int, float)) else sum(map(_written, items))


_METHODS: Mapping[str, _Growth] = {
    "replace": _replaced,
    "join": _joined_by,
    "expandtabs": _expanded,
    "translate": _translated,
}
_FILTERS: Mapping[str, _Growth] = {
    "replace": _replaced,
    "join": _joined,
    "indent": _indented,
    "format": _format_filter,
    "wordwrap": _wrapped,
    "tojson": _json,
    "sum": _summed,
}
_WITH_WIDTH = frozenset(
    [
        "ljust",
        "rjust",
        "center",
        "zfill",
        "batch",
        "slice",
        "round",
        "indent",
        "truncate",
        "wordwrap",
        "tojson",
    ]
)
"""Methods and filters whose numbers are widths or counts."""
_WIDTH_FROM_VALUE = re.compile(r"%[^%a-zA-Z]*\*|\{[^}]*\{")
_LISTED = frozenset({"join", "sum"})
"""Filters and methods whose items are counted first, so that an iterator must become a list."""
_TEXTUAL = frozenset(
    [
        "capitalize",
        "center",
        "e",
        "escape",
        "forceescape",
        "format",
        "indent",
        "join",
        "lower",
        "pprint",
        "replace",
        "string",
        "striptags",
        "title",
        "tojson",
        "trim",
        "truncate",
        "upper",
        "urlencode",
        "urlize",
        "wordcount",
        "wordwrap",
        "xmlattr",
    ]
)
"""Filters that write their value as text, whatever it is."""


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that refuses to make too much."""
    if name not in _TEXTUAL and name not in _FILTERS and name not in _WITH_WIDTH:

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            return sized(function(*args, **kwargs))

        return counted
    first = 1 if hasattr(function, "jinja_pass_arg") else 0
    growth = _FILTERS.get(name)

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if name in _WITH_WIDTH:
            _widths([*args[first + 1 :], *kwargs.values()])
        if name in _LISTED and not isinstance(args[first], (list, tuple, dict, str)):
            args = (*args[:first], list(args[first]), *args[first + 1 :])
        if name in _TEXTUAL and type(args[first]) is not str:
            _written(args[first])
        if growth is not None:
            refuse_longer(growth(*args[first:], **kwargs))
        return sized(function(*args, **kwargs))

    return bounded


def checked_arguments(
    text: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a method of a text, if what the method makes of them is not too long."""
    if method in _WITH_WIDTH:
        _widths([*args, *kwargs.values()])
    # Jinja passes the variables of loops and blocks along with every call.
    named = {key: value for key, value in kwargs.items() if not key.startswith("_")}
    if (growth := _METHODS.get(method)) is not None:
        if method in _LISTED and args:
            args = (list(args[0]), *args[1:])
        refuse_longer(growth(text, *args, **named))
    return args


def multiplied(left: object, right: object) -> int:
    """Return the length of a product: of a text or list and a number, or the bits of two numbers."""
    for items, times in ((left, right), (right, left)):
        if isinstance(items, (str, list, tuple)) and isinstance(times, int):
            return len(cast("Sequence[object]", items)) * times
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() + right.bit_length() > _MAX_BITS
    ):
        raise TemplateLimit("multiplies numbers of thousands of digits")
    return 0


def to_the_power(base: object, exponent: object) -> None:
    """Refuse a power that has thousands of digits."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_BITS:
        raise TemplateLimit(f"raises a number to the power of {exponent:,}")
