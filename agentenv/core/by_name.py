"""Call a function with the arguments that it names.

Authors of environments and rewards write the parameters they need, in any order; what is available is
passed by name. A parameter that is not available and has no default is the author's mistake, and the
error names it and what comes nearest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from agentenv.core.errors import UsageError

__all__ = ["Wanted", "arguments_for", "did_you_mean", "nearest", "wanted_by"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parameters of a function, as far as filling by name needs them."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_rest: bool
    """It has a `**parameter`."""

    @property
    def names(self) -> frozenset[str]:
        """Every named parameter."""
        return frozenset(self.required) | frozenset(self.optional)


def wanted_by(function: Callable[..., object]) -> Wanted:
    """Read a function's parameters; `self` of a bound method is not among them.

    Raises:
        UsageError: A parameter can only be given by position.
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
                f"{_label(function)} takes {parameter.name!r} by position only; arguments are filled by name"
            )
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            (required if parameter.default is parameter.empty else optional).append(parameter.name)
    return Wanted(tuple(required), tuple(optional), takes_rest)


def arguments_for(
    function: Callable[..., object], offered: Mapping[str, object], rest: Mapping[str, object]
) -> dict[str, object]:
    """Return the keyword arguments that a function asks for.

    Args:
        function: what will be called.
        offered: named values; they win over `rest` where both have a name.
        rest: more named values; a `**parameter` gets all of these, and only these.

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


def nearest(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names that look most like a name, the nearest first; none if all are far."""
    return get_close_matches(name, list(known), n=count, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean ...?` for a near miss, else nothing."""
    close = nearest(name, known)
    return f"did you mean {close[0]!r}?" if close else ""


def _label(function: Callable[..., object]) -> str:
    return f"{getattr(function, '__qualname__', repr(function))}()"
