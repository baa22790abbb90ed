"""Check what callers pass: arguments by the names of parameters, and options by the types of their fields.

Authors of environments and rewards declare the parameters that they need, in any order; the library passes
the available values by name. A parameter that has no default and is not available is an error, which names
the parameter and the available name that looks most like it.

An annotation such as `max_turns: PositiveInt | None` says which values a field accepts. `__post_init__`
calls `check_fields`, so plain construction refuses a wrong value as `agentenv.core.settings.build` does.
Fields that have their default are not checked, so that pydantic is loaded only where options are set.

A text among the constraints says why the bound exists, and is part of the error message:
`Annotated[float, Gt(0), "greedy samples have no gradient"]`.

A dataclass with many options keeps those of one subject in a dataclass of their own, `loss: LossOptions =
field(default_factory=LossOptions, metadata=TABLE)`. With `takes_flat_names` above it, its constructor takes
`epsilon=0.1` as well as `loss=LossOptions(epsilon=0.1)`, and so do settings (`agentenv.core.settings`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache, wraps
from math import inf
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt

from agentenv.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = [
    "TABLE",
    "NonNegativeFloat",
    "NonNegativeInt",
    "NonNegativeSeconds",
    "PositiveFloat",
    "PositiveInt",
    "PositiveSeconds",
    "Wanted",
    "arguments_for",
    "by_flat_name",
    "check_fields",
    "check_values",
    "homes",
    "in_tables",
    "kinds_of",
    "tables",
    "takes_flat_names",
    "wanted_by",
    "without_secrets",
]


_T = TypeVar("_T")

SECRET = ("api_key", "headers")
"""Names of settings whose values no error repeats and no record has."""


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a record may have them: without keys and headers, and addresses without a query.

    A query may hold a key under any name, and so may what follows a `#`. Of the names in a query,
    `api-version` alone is known to be no secret, and stays.
    """
    return {name: _bare(value) for name, value in options.items() if name not in SECRET}


def _bare(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(cast("Mapping[str, Any]", value))
    if not isinstance(value, str) or "://" not in value:
        return value
    place, _, query = value.partition("#")[0].partition("?")
    kept = "&".join(one for one in query.split("&") if one.startswith("api-version="))
    return f"{place}?{kept}" if kept else place


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parameters of a function, by whether they are required."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_rest: bool
    """True if the function has a `**parameter`."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all parameters, without a `**parameter`."""
        return frozenset(self.required) | frozenset(self.optional)


def wanted_by(function: Callable[..., object]) -> Wanted:
    """Return a function's parameters, without the `self` of a bound method.

    Raises:
        UsageError: A parameter can be passed by position only.
    """
    if inspect.ismethod(function):
        # The cache is keyed on the plain function, so that it keeps no instance alive.
        return _read(function.__func__, skip_self=True)
    return _read(function, skip_self=False)


@lru_cache(maxsize=4096)
def _read(function: Callable[..., object], *, skip_self: bool) -> Wanted:
    required: list[str] = []
    optional: list[str] = []
    takes_rest = False
    for parameter in list(inspect.signature(function).parameters.values())[int(skip_self) :]:
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_rest = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise UsageError(
                f"{_label(function)} takes {parameter.name!r} by position only",
                remedy="remove the '/' from its parameters, because they are passed by name",
            )
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            (required if parameter.default is parameter.empty else optional).append(parameter.name)
    return Wanted(tuple(required), tuple(optional), takes_rest)


def arguments_for(
    function: Callable[..., object], offered: Mapping[str, object], rest: Mapping[str, object]
) -> dict[str, object]:
    """Return the keyword arguments for a function, chosen by the names of its parameters.

    Args:
        function: the function to be called.
        offered: available values by name. If a name is in both mappings, this value is used.
        rest: further available values by name. A `**parameter` receives all of these and no others.

    Raises:
        UsageError: A required parameter is not available.
    """
    wanted = wanted_by(function)
    arguments: dict[str, object] = dict(rest) if wanted.takes_rest else {}
    for name in (*wanted.required, *wanted.optional):
        if name in offered:
            arguments[name] = offered[name]
        elif name in rest:
            arguments[name] = rest[name]
        elif name in wanted.required:
            known = sorted({*offered, *rest})
            meant = did_you_mean(name, known)
            raise UsageError(
                f"parameter {name!r} of {_label(function)} is not available here",
                remedy=f"{meant} available: {', '.join(known)}".lstrip(),
            )
    return arguments


def _label(function: Callable[..., object]) -> str:
    return f"{getattr(function, '__qualname__', repr(function))}()"


PositiveInt: TypeAlias = Annotated[int, Ge(1)]
NonNegativeInt: TypeAlias = Annotated[int, Ge(0)]
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
        value = "***" if name in SECRET else first["input"]
        message, remedy = _said(where, hint, first["type"], value)
        raise error(message or f"{where} = {value!r}: {first['msg']}", remedy=remedy) from None


def kinds_of(kind: type, name: str) -> list[Any]:
    """Return the alternatives of a field's annotation, without their constraints."""
    return [alternative for alternative, _ in _parts(_hints(kind)[name])]


TABLE = {"table": True}
"""Metadata of a field that holds the options of one subject, whose names are also flat ones."""


@cache
def tables(kind: type) -> dict[str, type[Any]]:
    """Return the fields of a dataclass that are tables, with their classes."""
    found = (option for option in fields(kind) if option.metadata.get("table"))
    return {option.name: cast("type[Any]", option.default_factory) for option in found}


@cache
def homes(kind: type) -> dict[str, str]:
    """Return the table of each flat name."""
    return {option.name: name for name, inner in tables(kind).items() for option in fields(inner)}


def by_flat_name(options: object) -> dict[str, Any]:
    """Return the options of a dataclass by their flat names, in place of its tables."""
    kind = type(options)
    own = {option.name: getattr(options, option.name) for option in fields(cast("Any", kind))}
    inner = {name: getattr(own[home], name) for name, home in homes(kind).items()}
    return {name: value for name, value in own.items() if name not in tables(kind)} | inner


def in_tables(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which those with flat names are in their tables.

    If an option is there in both spellings, the flat one wins: it is the change in `replace(config, beta=0)`.
    """
    nested = {name: value for name, value in values.items() if name not in homes(kind)}
    for name, home in homes(kind).items():
        if name in values:
            held = nested.get(home, {})
            if isinstance(held, tables(kind)[home]):
                held = {option.name: getattr(held, option.name) for option in fields(held)}
            if isinstance(held, Mapping):
                nested[home] = {**cast("Mapping[str, Any]", held), name: values[name]}
    return nested


def takes_flat_names(kind: type[_T]) -> type[_T]:
    """Let the constructor of a dataclass take the options of its tables by their own names, too."""
    make: Callable[..., None] = kind.__init__

    @wraps(make)
    def init(self: _T, **options: Any) -> None:
        given = in_tables(kind, options)
        for name, inner in tables(kind).items():
            if isinstance(held := given.get(name), Mapping):
                given[name] = inner(**cast("Mapping[str, Any]", held))
            elif name in given and not isinstance(held, inner):
                raise UsageError(f"{name} must be {inner.__name__} or a mapping of its options, not {held!r}")
        make(self, **given)

    kind.__init__ = init
    return kind


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
