"""The bounds of options, written beside each field as pydantic's constraints are.

A field says in its annotation what it takes, such as `max_turns: PositiveInt | None`. `check_bounds`,
called by `__post_init__`, reads these annotations and refuses a wrong value in our words, without loading
pydantic. `agentenv.core.settings.build` gives the same annotations to pydantic.

A text among the constraints says why the bound is there, and stands in the error:
`Annotated[float, Gt(0), "greedy samples have no gradient"]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from math import inf, isfinite, nextafter
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from agentenv.core.by_name import did_you_mean
from agentenv.core.errors import UsageError

__all__ = [
    "FiniteFloat",
    "NonNegativeFloat",
    "NonNegativeInt",
    "NonNegativeSeconds",
    "PositiveFloat",
    "PositiveInt",
    "PositiveSeconds",
    "check_bounds",
    "check_value",
    "kinds_of",
]

PositiveInt: TypeAlias = Annotated[int, Ge(1)]
NonNegativeInt: TypeAlias = Annotated[int, Ge(0)]
FiniteFloat: TypeAlias = Annotated[float, Gt(-inf), Lt(inf)]
PositiveFloat: TypeAlias = Annotated[float, Gt(0), Lt(inf)]
NonNegativeFloat: TypeAlias = Annotated[float, Ge(0), Lt(inf)]
NonNegativeSeconds: TypeAlias = Annotated[float, Ge(0), Lt(inf)]
PositiveSeconds: TypeAlias = Annotated[float, Gt(0), Lt(inf)]
"""Durations; the field's name ends with `_s`."""


def check_bounds(options: object, error: type[UsageError] = UsageError) -> None:
    """Refuse an object's first field whose value does not fit its annotation.

    Whole numbers, numbers, truth values, choices (`Literal`) and tuples are checked; numbers of other
    libraries (numpy's) become Python's own, so that they can be written down.

    Args:
        options: a dataclass, frozen or not.
        error: what to raise.

    Raises:
        UsageError: A value does not fit; the message has the field's name, the value and what it takes.
    """
    for rule in _rules(type(options)):
        value = getattr(options, rule.name)
        if type(value) in rule.types and rule.low <= value <= rule.high:
            continue  # a number as it should be: the usual case, at every turn of an episode
        settled = rule.settle(value, error)
        if settled is not value:
            object.__setattr__(options, rule.name, settled)


def check_value(kind: type, name: str, value: object) -> None:
    """Refuse a value for a field of a dataclass, as `check_bounds` does.

    Raises:
        UsageError: The value does not fit.
    """
    for rule in _rules(kind):
        if rule.name == name:
            rule.settle(value, UsageError)


def kinds_of(kind: type, name: str) -> list[Any]:
    """Return the alternatives of a field's annotation, without their constraints."""
    return [alternative for alternative, _ in _parts(_hints(kind)[name])]


@dataclass(frozen=True, slots=True)
class _Rule:
    """What one field takes."""

    name: str
    kind: type | None
    """`int`, `float`, `bool` or `tuple`; None where there are choices."""
    optional: bool
    low: float = -inf
    high: float = inf
    """Both are allowed values; an open bound is the next number inside."""
    bounds: str = ""
    """The bounds in words."""
    reason: str = ""
    choices: tuple[object, ...] = ()
    types: frozenset[type] = frozenset()
    """Number types that need no conversion."""

    def settle(self, value: Any, error: type[UsageError]) -> Any:
        """Return the value as it is to be kept, or raise."""
        if value is None and self.optional:
            return None
        if self.kind is None:
            if value in self.choices:
                return value
            meant = did_you_mean(str(value), [str(choice) for choice in self.choices])
            one_of = f"one of {self.choices}"
            raise error(f"unknown {self.name} {value!r}", remedy=f"{meant} {one_of}" if meant else one_of)
        if self.kind is bool:
            if not isinstance(value, bool):
                raise error(f"{self.name} must be true or false, not {value!r}")
            return value
        if self.kind is tuple:
            if isinstance(value, str):
                raise error(
                    f"{self.name} must be a list, not the text {value!r}", remedy=f"write [{value!r}]"
                )
            return value
        return self._number(value, error)

    def _number(self, value: Any, error: type[UsageError]) -> int | float:
        whole = self.kind is int
        kinds: Any = Integral if whole else Real
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise error(f"{self.name} must be a {'whole ' if whole else ''}number, not {value!r}")
        number = value if type(value) in self.types else int(value) if whole else float(value)
        if not (whole or isfinite(number)):
            raise error(f"{self.name} must be finite, not {value!r}")
        if not self.low <= number <= self.high:
            because = f": {self.reason}" if self.reason else ""
            raise error(f"{self.name} must be {self.bounds}, not {value!r}{because}")
        return number


@cache
def _rules(kind: type) -> tuple[_Rule, ...]:
    """Read the annotations of a dataclass; fields that nothing is known of are left out."""
    found = (_rule(field.name, _hints(kind)[field.name]) for field in fields(kind))
    return tuple(rule for rule in found if rule is not None)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _rule(name: str, hint: Any) -> _Rule | None:
    parts = list(_parts(hint))
    optional = any(kind is NoneType for kind, _ in parts)
    choices = [get_args(kind) for kind, _ in parts if get_origin(kind) is Literal]
    if choices:
        none: tuple[None, ...] = (None,) if optional else ()
        return _Rule(name, None, optional, choices=(*(word for words in choices for word in words), *none))
    solid = [(get_origin(kind) or kind, extras) for kind, extras in parts if kind is not NoneType]
    if len(solid) != 1 or solid[0][0] not in {int, float, bool, tuple}:
        return None
    kind, extras = solid[0]
    if kind in {bool, tuple}:
        return _Rule(name, kind, optional)
    low, high, words = _interval(kind, extras)
    unit = " seconds" if name.endswith("_s") else ""
    return _Rule(
        name,
        kind,
        optional,
        low=low,
        high=high,
        bounds=" and ".join(words) + unit,
        reason=next((extra for extra in extras if isinstance(extra, str)), ""),
        types=frozenset({int} if kind is int else {int, float}),
    )


def _parts(hint: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Give each alternative of an annotation with its constraints."""
    if get_origin(hint) is Annotated:
        kind, *extras = get_args(hint)
        for part, inner in _parts(kind):
            yield part, (*inner, *extras)
    elif get_origin(hint) in {Union, UnionType}:
        for one in get_args(hint):
            yield from _parts(one)
    else:
        yield hint, ()


def _interval(kind: type, extras: tuple[Any, ...]) -> tuple[float, float, list[str]]:
    """Return the least and the greatest value allowed, and both bounds in words."""
    low, high = (-inf, inf) if kind is int else (nextafter(-inf, 0), nextafter(inf, 0))
    words: list[str] = []
    for extra in extras:
        match extra:
            case Ge(ge=bound):
                low = max(low, _plain(bound))
                words.append("0 or more" if bound == 0 else f"at least {bound}")
            case Gt(gt=bound):
                low = max(low, _inside(kind, _plain(bound), 1))
                words += [] if bound == -inf else [f"more than {bound}"]
            case Le(le=bound):
                high = min(high, _plain(bound))
                words.append(f"at most {bound}")
            case Lt(lt=bound):
                high = min(high, _inside(kind, _plain(bound), -1))
                words += [] if bound == inf else [f"below {bound}"]
            case _:
                pass
    return low, high, words


def _plain(bound: Any) -> float:
    return bound


def _inside(kind: type, bound: float, step: int) -> float:
    """Return the next value on the inner side of an open bound."""
    return bound + step if kind is int else nextafter(bound, step * inf)
