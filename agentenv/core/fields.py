"""Types of the fields of options, and `check_fields`, by which pydantic checks them.

An annotation such as `max_turns: PositiveInt | None` says which values a field accepts. `__post_init__`
calls `check_fields`, so plain construction refuses a wrong value as `agentenv.core.settings.build` does.
Fields that have their default are not checked, so that pydantic is loaded only where options are set.

A text among the constraints says why the bound exists, and is part of the error message:
`Annotated[float, Gt(0), "greedy samples have no gradient"]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from math import inf
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt

from agentenv.core.by_name import did_you_mean
from agentenv.core.errors import UsageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = [
    "FiniteFloat",
    "NonNegativeFloat",
    "NonNegativeInt",
    "NonNegativeSeconds",
    "PositiveFloat",
    "PositiveInt",
    "PositiveSeconds",
    "check_fields",
    "check_values",
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

_PLAIN = {int, float, bool, str, tuple, NoneType}
_WANTED = {
    "bool_type": "true or false",
    "finite_number": "finite",
    "float_type": "a number",
    "int_type": "a whole number",
    "string_type": "a text",
    "tuple_type": "a list",
}
"""What pydantic misses in a value, by the names of its errors."""


def check_fields(options: object, error: type[UsageError] = UsageError) -> None:
    """Check that the value of each field fits the field's annotation.

    Fields of type `int`, `float`, `bool`, `Literal` and `tuple` are checked. Numbers of other libraries, such
    as numpy's, are replaced by Python's own, so that they can be written as JSON; a list becomes a tuple.

    Args:
        options: an object of a dataclass, frozen or not.
        error: class of the error to raise.

    Raises:
        UsageError: A value does not fit. The message has the field's name, the value and the bounds.
    """
    kind = type(options)
    given: dict[str, Any] = {}
    for name, default in _checked(kind).items():
        value = getattr(options, name)
        if value is default:
            continue
        if type(value) not in _PLAIN:
            value = _plain(value)
            object.__setattr__(options, name, value)
        given[name] = value
    if given:
        check_values(kind, given, error)


def check_values(kind: type, values: Mapping[str, Any], error: type[UsageError] = UsageError) -> None:
    """Check values for some fields of a dataclass, as `check_fields` does.

    Raises:
        UsageError: A value does not fit.
    """
    try:
        _adapter(kind).validate_python(values)
    except ValueError as wrong:
        first = cast("Any", wrong).errors()[0]
        name, *place = map(str, first["loc"])
        where, hint = ".".join((name, *place)), Any if place else _hints(kind)[name]
        message, remedy = _said(where, hint, first["type"], first["input"])
        raise error(message or f"{where} = {first['input']!r}: {first['msg']}", remedy=remedy) from None


def kinds_of(kind: type, name: str) -> list[Any]:
    """Return the alternatives of a field's annotation, without their constraints."""
    return [alternative for alternative, _ in _parts(_hints(kind)[name])]


def _plain(value: Any) -> Any:
    """Return a number of another library as Python's own, and a list as a tuple."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


@cache
def _checked(kind: type) -> dict[str, Any]:
    """Return the fields that are checked, with their defaults."""
    simple = ({int}, {float}, {bool}, {tuple}, {Literal})
    found: dict[str, Any] = {}
    for field in fields(kind):
        parts = {get_origin(part) or part for part, _ in _parts(_hints(kind)[field.name])}
        if parts - {NoneType} in simple:
            found[field.name] = field.default
    return found


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    """Return what checks mappings of some fields of a dataclass."""
    from pydantic import ConfigDict, TypeAdapter, with_config
    from typing_extensions import TypedDict

    hints = {name: hint for name, hint in _hints(kind).items() if name in _checked(kind)}
    table: Any = TypedDict(kind.__name__, hints, total=False)  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues, reportUnknownVariableType]
    return TypeAdapter(with_config(ConfigDict(strict=True, allow_inf_nan=False, extra="ignore"))(table))


def _said(name: str, hint: Any, problem: str, value: object) -> tuple[str, str]:
    """Return what is wrong with a value and what to do about it, in our words; empty if we have none."""
    parts = list(_parts(hint))
    extras = [extra for _, inner in parts for extra in inner]
    if problem == "literal_error":
        choices = tuple(word for part, _ in parts for word in (get_args(part) or (None,)))
        meant = did_you_mean(str(value), [str(choice) for choice in choices])
        return f"unknown {name} {value!r}", f"{meant} one of {choices}".strip()
    if problem == "tuple_type" and isinstance(value, str):
        return f"{name} must be a list, not the text {value!r}", f"write [{value!r}]"
    wanted, because = _WANTED.get(problem, ""), ""
    if problem.startswith(("greater_than", "less_than")):
        unit = " seconds" if name.endswith("_s") else ""
        wanted = " and ".join(filter(None, map(_bound, extras))) + unit
        because = "".join(f": {extra}" for extra in extras if isinstance(extra, str))
    return (f"{name} must be {wanted}, not {value!r}{because}" if wanted else ""), ""


def _bound(extra: object) -> str:
    """Return a bound in words; empty for what is none, or is none that a number could miss."""
    match extra:
        case Ge(ge=bound):
            return "0 or more" if bound == 0 else f"at least {bound}"
        case Gt(gt=bound):
            return "" if bound == -inf else f"more than {bound}"
        case Le(le=bound):
            return f"at most {bound}"
        case Lt(lt=bound):
            return "" if bound == inf else f"below {bound}"
        case _:
            return ""


def _parts(hint: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield each alternative of an annotation with its constraints."""
    if get_origin(hint) is Annotated:
        kind, *extras = get_args(hint)
        for part, inner in _parts(kind):
            yield part, (*inner, *extras)
    elif get_origin(hint) in {Union, UnionType}:
        for alternative in get_args(hint):
            yield from _parts(alternative)
    else:
        yield hint, ()
