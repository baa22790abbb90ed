"""Read the arguments of a tool call: JSON text to checked values, or one line for the model.

Nothing is guessed silently: broken JSON, a key given twice, NaN, text that is not Unicode and
oversized arguments are refused with the reason. Repair of broken JSON is off unless asked for.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Protocol, cast

from pydantic import BaseModel, ValidationError

from agentenv.core.errors import DependencyMissing
from agentenv.core.messages import CallStatus, ToolCall, ToolErrorKind

__all__ = [
    "MAX_ARGUMENT_CHARS",
    "ArgumentError",
    "Arguments",
    "Parsed",
    "Validator",
    "check_repair",
    "mend_call",
    "parse_object",
    "read_arguments",
]

MAX_ARGUMENT_CHARS = 1_000_000
"""Longer arguments are refused unread: no model samples them, and reading them stalls the rest."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89abcdefABCDEF]")
_REPAIR_CHARS = 4000
_REPAIR_BRACKETS = 20
"""Longer or deeper text is not repaired: 20 brackets and 20,000 characters can take json-repair 5 s."""
_SHOWN_ERRORS = 5
_SHOWN_CHARS = 40


class ArgumentError(ValueError):
    """The arguments cannot be used; the text is one line for the model."""

    def __init__(self, kind: ToolErrorKind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


@dataclass(frozen=True, slots=True)
class Parsed:
    """Arguments read from text."""

    values: dict[str, Any]
    text: str
    """JSON text of the same object."""
    repaired: bool = False


class Validator(Protocol):
    """The part of `agentenv.tools.schema.arguments_model.ArgumentsModel` that reading needs."""

    names: tuple[str, ...]

    def validate_json(self, text: str) -> BaseModel:
        """Validate JSON text."""
        ...

    def validate(self, arguments: Mapping[str, object]) -> BaseModel:
        """Validate Python values."""
        ...


def parse_object(text: str, *, repair: bool = False) -> Parsed:
    """Read the JSON object of a call's arguments; an object wrapped in a string is unwrapped.

    Args:
        text: JSON text; empty text means no arguments.
        repair: Let json-repair mend broken JSON; `Parsed.repaired` tells when it did.

    Raises:
        ArgumentError: The text is not one JSON object that can be used.
        DependencyMissing: Repair was asked for and json-repair is not installed.
    """
    if len(text) > MAX_ARGUMENT_CHARS:
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS,
            f"the arguments have {len(text):,} characters; at most {MAX_ARGUMENT_CHARS:,} are taken",
        )
    if not text.strip():
        return Parsed({}, "{}")
    repaired = False
    try:
        values = _loads(text)
    except ArgumentError as error:
        mended = _repair(text) if repair and error.kind is ToolErrorKind.INVALID_JSON else None
        if mended is None:
            raise
        values, text, repaired = mended, json.dumps(mended), True
    if isinstance(values, str):  # {"a": 1} written as "{\"a\": 1}"
        try:
            text, values = values, _loads(values)
        except ArgumentError:
            values = None
    if not isinstance(values, dict):
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS, 'the arguments must be one JSON object, like {"name": value}'
        )
    return Parsed(values, text, repaired)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments that fit a tool."""

    model: BaseModel
    """The validated values, as the function declares them."""
    text: str
    """The same arguments as JSON text."""
    repaired: bool


def read_arguments(
    validator: Validator, arguments: str | Mapping[str, object], *, repair: bool = False
) -> Arguments:
    """Return the validated arguments of a call.

    A null given for an argument that has a default and does not take null means the default, as
    strict mode writes arguments that are left out.

    Raises:
        ArgumentError: With one line for the model that names every field that is wrong.
    """
    if isinstance(arguments, str):
        parsed = parse_object(arguments, repair=repair)
        values, text, repaired = parsed.values, parsed.text, parsed.repaired
    else:
        values, text, repaired = dict(arguments), _text(arguments), False
    try:
        model = validator.validate_json(text) if text else validator.validate(values)
    except ValidationError as error:
        pruned = _drop_nulls(values, error)
        try:
            if pruned is not None:
                return Arguments(validator.validate(pruned), _text(pruned), repaired)
        except ValidationError:
            pass
        raise ArgumentError(ToolErrorKind.BAD_ARGUMENTS, _explain(error, values, validator.names)) from error
    return Arguments(model, text, repaired)


def _text(values: Mapping[str, object]) -> str:
    """Return values as JSON text, or nothing where a caller in Python gave what JSON cannot say."""
    try:
        text = json.dumps(values, allow_nan=False)
    except (TypeError, ValueError):
        return ""
    return "" if _SURROGATE_ESCAPE.search(text) else text


def _loads(text: str) -> Any:
    try:
        text.encode()
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(json.loads(text), ensure_ascii=False).encode()
        return _DECODER.decode(text)
    except UnicodeEncodeError as error:
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS,
            f"the arguments hold half a character (lone surrogate U+{ord(error.object[error.start]):04X}); "
            "write the whole character",
        ) from None
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 10, 0) : error.pos + 10]
        raise ArgumentError(
            ToolErrorKind.INVALID_JSON,
            f"the arguments are not valid JSON: {error.msg} at character {error.pos}, near {near!r}",
        ) from None
    except RecursionError:
        raise ArgumentError(ToolErrorKind.BAD_ARGUMENTS, "the arguments are nested too deeply") from None
    except ValueError as error:  # an integer with more digits than Python reads
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS, "the arguments hold a number with too many digits"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS, f"the key {_short(twice)} is given twice; give it once"
        )
    return values


def _finite(digits: str) -> float:
    value = float(digits)
    return value if isfinite(value) else _not_json(digits)


def _not_json(constant: str) -> float:
    raise ArgumentError(
        ToolErrorKind.BAD_ARGUMENTS, f"the arguments hold {_short(constant)}, which is not a JSON number"
    )


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_not_json)


def _repair(text: str) -> object | None:
    """Return what json-repair makes of the text, if that is an object."""
    if len(text) > _REPAIR_CHARS or text.count("{") + text.count("[") > _REPAIR_BRACKETS:
        return None
    check_repair()
    import json_repair

    try:
        mended = json_repair.loads(text, skip_json_loads=True)
        return _loads(json.dumps(mended)) if isinstance(mended, dict) and mended else None
    except (ValueError, RecursionError):
        return None


def check_repair() -> None:
    """Make sure that broken JSON can be mended.

    Raises:
        DependencyMissing: json-repair is not installed.
    """
    if importlib.util.find_spec("json_repair") is None:
        raise DependencyMissing.of("json-repair", "repair", purpose="repair of broken JSON")


def mend_call(call: ToolCall, names: Collection[str]) -> ToolCall:
    """Return a call whose broken JSON could be mended; else the call as it is.

    Args:
        call: any call. Without a name, its arguments are the text of the whole call.
        names: the tools of the episode.
    """
    if call.status is not CallStatus.INVALID_JSON:
        return call
    mended: Any = _repair(call.arguments)
    name: Any = call.name
    if not name and mended is not None:
        name, mended = mended.get("name"), mended.get("arguments", mended.get("parameters"))
    if name not in names or not isinstance(mended, dict):
        return call
    return replace(call, name=name, arguments=json.dumps(mended), status=CallStatus.OK, error="")


def _drop_nulls(values: dict[str, Any], error: ValidationError) -> dict[str, Any] | None:
    """Return the values without the nulls that were refused, or None if there are none."""
    paths = [
        entry["loc"] for entry in error.errors(include_url=False) if entry["input"] is None and entry["loc"]
    ]
    if not paths:
        return None
    pruned = copy.deepcopy(values)
    dropped = False
    for path in paths:
        at: Any = pruned
        for key in path[:-1]:
            at = _step(at, key)
        last = path[-1]
        if isinstance(at, dict) and last in at and at[last] is None:
            del at[last]
            dropped = True
    return pruned if dropped else None


def _step(at: Any, key: int | str) -> Any:
    """Go one level deeper; the name of a union's member leads nowhere and stays where it is."""
    if isinstance(at, dict) and key in at:
        return cast("dict[object, Any]", at)[key]
    if isinstance(at, list) and isinstance(key, int) and key < len(cast("list[Any]", at)):
        return cast("list[Any]", at)[key]
    return at


def _explain(error: ValidationError, values: object, names: tuple[str, ...]) -> str:
    """Return one line that names each wrong field and what it should be."""
    reasons: dict[str, list[str]] = {}
    for entry in error.errors(include_url=False):
        path = _path(entry["loc"], values) or "arguments"
        reason = _reason(entry, names)
        if reason not in reasons.setdefault(path, []):
            reasons[path].append(reason)
    shown = [f"{path}: {' or '.join(lines)}" for path, lines in list(reasons.items())[:_SHOWN_ERRORS]]
    if len(reasons) > _SHOWN_ERRORS:
        shown.append(f"and {len(reasons) - _SHOWN_ERRORS} more")
    return " ".join("; ".join(shown).split())


def _reason(entry: Any, names: tuple[str, ...]) -> str:
    if entry["type"] == "missing":
        return "field required"
    if entry["type"] == "extra_forbidden":
        known = f"; the arguments are {', '.join(names)}" if len(entry["loc"]) == 1 and names else ""
        return f"unknown argument{known or ''}" if len(entry["loc"]) == 1 else "unknown field"
    message = entry["msg"].removeprefix("Input ").removeprefix("Value error, ")
    if message.startswith("should be"):
        message = message.split(", unable to parse")[0].split(", got a number")[0]
    value = entry["input"]
    return f"{message}, got {_short(value)}" if not isinstance(value, dict | list) else message


def _path(loc: tuple[int | str, ...], values: Any) -> str:
    """Write a location as `orders[0].price`; names of union members are left out."""
    text, at = "", values
    for index, key in enumerate(loc):
        below = _step(at, key)
        if isinstance(key, int) and isinstance(at, list):
            text += f"[{key}]"
        elif isinstance(at, dict) and (key in at or index == len(loc) - 1):
            text += f".{key}" if text else str(key)
        at = below
    return text


def _short(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."
