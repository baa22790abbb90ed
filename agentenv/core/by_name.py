"""Pass a function the arguments that its parameters name.

Authors of environments and rewards declare the parameters that they need, in any order; the library passes
the available values by name. A parameter that has no default and is not available is an error, which names
the parameter and the available name that looks most like it.
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


def nearest(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are similar to a name, the most similar first."""
    return get_close_matches(name, list(known), n=count, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean ...?` with the most similar known name, or an empty text if none is similar."""
    close = nearest(name, known)
    return f"did you mean {close[0]!r}?" if close else ""


def _label(function: Callable[..., object]) -> str:
    return f"{getattr(function, '__qualname__', repr(function))}()"
