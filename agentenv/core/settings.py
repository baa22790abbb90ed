"""Settings from a TOML file and from `name=value` pairs into one frozen dataclass.

A value takes the type of its field; an unknown name is an error that suggests the nearest one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from agentenv.core.errors import UsageError

__all__ = ["build", "parse_pairs", "read_toml"]

_T = TypeVar("_T")


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the contents of a TOML file.

    Raises:
        UsageError: The file is missing or not TOML.
    """
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read the settings in {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """Return settings given as `name=value`; values are read as TOML, else as text.

    Raises:
        UsageError: A pair has no `=`.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"settings look like name=value, not {pair!r}")
        try:
            found[name.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[name.strip()] = None if text.strip() in {"none", "None", "null"} else text.strip()
    return found


def build(kind: type[_T], *sources: Mapping[str, Any]) -> _T:
    """Return a dataclass or pydantic model from several mappings; a later one wins.

    Raises:
        UsageError: A name is unknown, or a value does not fit its field.
    """
    from pydantic import TypeAdapter, ValidationError

    values: dict[str, Any] = {}
    for source in sources:
        values.update(source)
    known = [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind.__annotations__)
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
            raise UsageError(f"unknown setting {name!r}{hint}")
    adapter: TypeAdapter[_T] = TypeAdapter(kind)
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, UsageError):
            raise cause from error
        where = ".".join(map(str, first["loc"])) or kind.__name__
        raise UsageError(f"setting {where} = {first['input']!r}: {first['msg']}") from error
