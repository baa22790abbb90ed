"""Read settings from the command line, TOML files and Python, with one grammar for all of them.

Settings are in sections: `limits` contains the fields of `RunLimits`, `env` the arguments of the environment,
and so on. The same setting is written

- `-o limits.max_turns=4` on the command line; this is a line of TOML, except that quotes around a text may
  be left out and `none` means None;
- `max_turns = 4` in the table `[limits]` of a TOML file, or `limits.max_turns = 4`;
- `limits={"max_turns": 4}` in Python.

On the command line and at the top of a TOML file the section may be left out if exactly one section has a
field of that name. If two sources set the same name, the later source wins.

A section may keep the settings of one subject in a table, as `train.loss.epsilon=0.1`. The table's name may
be left out, too.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_origin

from agentenv.core.errors import UsageError, nearest
from agentenv.core.fields import SECRET, check_values, homes, in_tables, kinds_of, tables
from agentenv.core.files import user_text

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["Section", "build", "field_docs", "options_of", "parse_pairs", "read_settings", "read_toml"]

_T = TypeVar("_T")

_NONE = frozenset({"none", "None", "null"})


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the contents of a TOML file.

    Raises:
        UsageError: The file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(user_text(Path(path)))
    except OSError as error:
        raise UsageError(f"cannot read the settings in {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also bytes that are no text, huge numbers and deep lists
        raise UsageError(f"{path} is not TOML: {error}", remedy="correct that place of the file") from error


def parse_pairs(pairs: Sequence[str]) -> dict[str, Any]:
    """Return settings written as `name=value` or `section.name=value`, as TOML would read these lines.

    A value that is not TOML is read as text, and `none` as None.

    Raises:
        UsageError: A pair has no `=`.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        path = [part.strip() for part in name.split(".")]
        if not equals or not all(path):
            raise UsageError(f"settings look like name=value or section.name=value, not {pair!r}")
        table: dict[str, Any] = {path[-1]: _value(text)}
        for part in reversed(path[:-1]):
            table = {part: table}
        settings = _merged(settings, table)
    return settings


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return None if text.strip() in _NONE else text.strip()


def _merged(first: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return both tables as one. The later of two values wins; two tables of one name are merged."""
    both = dict(first)
    for name, value in later.items():
        mine = both.get(name)
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            both[name] = _merged(cast("Mapping[str, Any]", mine), cast("Mapping[str, Any]", value))
        else:
            both[name] = value
    return both


@dataclass(frozen=True, slots=True)
class Section:
    """The settings that one section accepts."""

    kind: type[Any] | None = None
    """Dataclass whose fields are the settings; None if the section accepts any name, as `env` does."""
    without: frozenset[str] = frozenset()
    """Fields that are not settings, because something else decides them."""

    @property
    def names(self) -> list[str]:
        """Names of the settings, those in tables included; empty if the section accepts any name."""
        if self.kind is None:
            return []
        known = [*(field.name for field in fields(self.kind)), *homes(self.kind)]
        return [name for name in known if name not in self.without]

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings of this section in which those of a table are in it."""
        return dict(values) if self.kind is None else in_tables(self.kind, values)


def read_settings(
    sources: Sequence[Mapping[str, Any]], sections: Mapping[str, Section]
) -> dict[str, dict[str, Any]]:
    """Put settings from several sources into their sections.

    Example:
        >>> from agentenv.core.limits import RunLimits
        >>> from agentenv.core.settings import Section, parse_pairs, read_settings
        >>> sections = {"env": Section(), "limits": Section(RunLimits)}
        >>> read_settings([parse_pairs(["env.digits=2", "max_turns=4"])], sections)
        {'env': {'digits': 2}, 'limits': {'max_turns': 4}}

    Args:
        sources: results of `read_toml` and `parse_pairs`, or mappings of the same shape; a later one wins.
        sections: sections by name. `build` turns the settings of a section into its dataclass.

    Returns:
        The settings of each section by name. Their values are not checked yet.

    Raises:
        UsageError: No section has a setting of this name, or several have. The error suggests similar names.
    """
    settings: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for source in sources:
        for name, value in source.items():
            if name in sections and isinstance(value, Mapping):
                table = cast("Mapping[str, Any]", value)
                for inner in table:
                    if sections[name].kind is not None and inner not in sections[name].names:
                        raise _unknown(f"{name}.{inner}", sections)
                settings[name] = _merged(settings[name], sections[name].nested(table))
            else:
                home = _home_of(name, value, sections)
                settings[home] = _merged(settings[home], sections[home].nested({name: value}))
    return settings


def _home_of(name: str, value: object, sections: Mapping[str, Section]) -> str:
    """Return the only section that has a setting of this name."""
    homes = [home for home, section in sections.items() if name in section.names]
    if len(homes) == 1:
        return homes[0]
    if homes:
        raise UsageError(
            f"setting {name!r} is in the sections {' and '.join(homes)}",
            remedy=f"write {' or '.join(f'{home}.{name}' for home in homes)}",
        )
    if name in sections:
        raise UsageError(f"{name!r} is a section, not a setting", remedy=f"write {name}.NAME=VALUE")
    inner = next(iter(cast("Mapping[str, Any]", value)), "") if isinstance(value, Mapping) else ""
    raise _unknown(f"{name}.{inner}" if inner else name, sections)


_OF_PEERS = {
    "max_assistant_turns": "max_turns",
    "max_tool_calling_iterations": "max_turns",
    "max_tool_response_length": "max_tool_output_tokens",
    "group_size": "num_generations",
    "max_new_tokens": "max_tokens_per_turn",
    "max_response_length": "max_tokens_per_turn",
}
"""Settings of peers, and ours that has the same meaning; similar names differ in it."""


def _unknown(name: str, sections: Mapping[str, Section]) -> UsageError:
    """Return the error for a name that no section has; it explains the most similar names."""
    named = [(home, field) for home, section in sections.items() for field in section.names]
    whole = {f"{home}.{field}" if home else field: (home, field) for home, field in named}
    spellings = {field: text for text, (_, field) in whole.items()} | {text: text for text in whole}
    last = name.rpartition(".")[2]
    inside = [part for part in name.split(".")[1:] if part in sections]
    if inside:
        remedy = (
            f"{inside[0]} is a section of its own: [{inside[0]}] in a file, {inside[0]}.NAME=VALUE with -o"
        )
        return UsageError(f"unknown setting {name!r}", remedy=remedy)
    elsewhere = [text for text, (_, field) in whole.items() if field in {last, _OF_PEERS.get(last)}]
    near = nearest(name, spellings, cutoff=0.9) or nearest(name, spellings, count=3)
    close = elsewhere or list(dict.fromkeys(spellings[spelling] for spelling in near))[:2]
    if close:
        told = " or ".join(_told(text, sections[whole[text][0]].kind, whole[text][1]) for text in close)
        return UsageError(f"unknown setting {name!r}", remedy=f"did you mean {told}?")
    free = [f"{home}.NAME" for home, section in sections.items() if section.kind is None]
    also = f"; {' and '.join(free)} take any name" if free else ""
    return UsageError(f"unknown setting {name!r}", remedy=f"known: {', '.join(sorted(whole))}{also}")


def _told(text: str, kind: type[Any] | None, name: str) -> str:
    """Return a setting's quoted name with the first sentence of its documentation."""
    owner = None if kind is None else tables(kind).get(homes(kind).get(name, ""), kind)
    meaning = " ".join(field_docs(owner).get(name, "").split())
    first = re.split(r"(?<=[.;:])\s", meaning, maxsplit=1)[0].rstrip(".;:")
    return f"{text!r} ({first})" if first else repr(text)


def field_docs(kind: type[Any] | None) -> dict[str, str]:
    """Return the docstring of each field of a dataclass; empty if its source code is not available."""
    if kind is None:
        return {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    return dict(_texts(cast("ast.ClassDef", tree.body[0]).body))


def _texts(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield field.target.id, text.value


def build(kind: type[_T], *sources: Mapping[str, Any]) -> _T:
    """Build a dataclass from several mappings of its fields; a later mapping wins.

    Pydantic converts each value to the type of its field. TOML has no word for None, so the text `none`
    means None if the field accepts None and does not accept text.

    Raises:
        UsageError: A name is unknown, or a value does not fit its field.
    """
    from pydantic import ValidationError

    values: dict[str, Any] = {}
    for source in sources:
        values = _merged(values, in_tables(kind, source))
    for name in values:
        if name not in Section(kind).names:
            raise _unknown(name, {"": Section(kind)})
    values = {name: _nested(kind, name, _spoken_none(kind, name, value)) for name, value in values.items()}
    try:
        return _adapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, UsageError):
            raise cause from error
        if len(first["loc"]) == 1:
            check_values(kind, {str(first["loc"][0]): first["input"]})  # says it in our words, if it can
        where = ".".join(map(str, first["loc"])) or kind.__name__
        value = "***" if where.partition(".")[0] in SECRET else first["input"]
        raise UsageError(f"setting {where} = {value!r}: {first['msg']}") from error


def _nested(kind: type, name: str, value: object) -> object:
    """Return a table as the dataclass that the field holds, so that wrong names in it are explained too."""
    if not isinstance(value, Mapping):
        return value
    inner = [choice for choice in kinds_of(kind, name) if is_dataclass(choice)]
    return build(cast("type[Any]", inner[0]), cast("Mapping[str, Any]", value)) if inner else value


@cache
def _adapter(kind: type[_T]) -> TypeAdapter[_T]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _spoken_none(kind: type, name: str, value: object) -> object:
    """Return None for the text `none` if that can only mean None, and `none` if it is one of the choices."""
    kinds = kinds_of(kind, name)
    words = {word for choice in kinds for word in get_args(choice) if get_origin(choice) is Literal}
    if value is None and NoneType not in kinds and "none" in words:
        return "none"
    if not isinstance(value, str) or value not in _NONE:
        return value
    return None if NoneType in kinds and str not in kinds and value not in words else value


def options_of(
    kind: type[_T], given: _T | Mapping[str, Any] | None, default: Mapping[str, Any] = MappingProxyType({})
) -> _T:
    """Return options as an object of their dataclass.

    Args:
        kind: the dataclass.
        given: an object of the dataclass, a mapping of some of its fields, or None for the defaults.
        default: values that replace the dataclass's own defaults; ignored if `given` is an object of it.

    Raises:
        UsageError: The mapping has an unknown name or a wrong value, or `given` has another type.
    """
    if isinstance(given, kind):
        return given
    if given is None or isinstance(given, Mapping):
        return build(kind, default, cast("Mapping[str, Any]", given or {}))
    raise UsageError(f"expected {kind.__name__} or a mapping of its fields, not {given!r:.200}")
