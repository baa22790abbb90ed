"""Check the arguments of a tool call against the tool's types, and explain mistakes to the model in one line.

If the call's JSON was not parsed yet, it is parsed here by the rules of `agentenv.core.messages`. Broken
JSON is repaired only if the caller asks for it with `repair`.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from agentenv.core.errors import DependencyMissing
from agentenv.core.messages import (
    MAX_ARGUMENT_CHARS,
    ArgumentError,
    CallStatus,
    JsonValue,
    ToolCall,
    ToolErrorKind,
    ToolResult,
    check_text,
    decode,
)
from agentenv.tools.schema.signature import ABSENT, Signature

__all__ = [
    "Arguments",
    "Parsed",
    "Validator",
    "check_repair",
    "marked",
    "mend",
    "mend_call",
    "parse_object",
    "read_arguments",
]

_REPAIR_CHARS = 4000
_REPAIR_BRACKETS = 20
"""Text with more characters or brackets is not repaired, because json-repair can take 5 s for 20 brackets
and 20,000 characters."""
_SHOWN_ERRORS = 5
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class Parsed:
    """Arguments that were parsed from text."""

    values: dict[str, Any]
    text: str
    """JSON text of the same arguments."""
    repaired: bool = False


class Validator:
    """Validates the arguments of a tool and converts them to the types that the function declares.

    Args:
        signature: the signature of the tool's function.
        model: what `arguments_model` has made of it.
    """

    def __init__(self, signature: Signature, model: type[BaseModel]) -> None:
        self._signature = signature
        self._model = model
        self._reads_alike = _reads_alike(cast("Any", model.__pydantic_core_schema__))
        self._fields = {parameter.name: f"p{index}" for index, parameter in enumerate(signature.visible)}
        self.names = tuple(field.alias or "" for field in model.model_fields.values())
        """Names of the arguments that the model writes."""

    def validate(self, values: Mapping[str, object], text: str) -> BaseModel:
        """Validate arguments by pydantic's rules for JSON.

        If pydantic treats Python values like JSON for all types of the model, it validates `values`, so that
        the text is not parsed again. For other types (dates, sets, unions, strict models) its rules for JSON
        accept more than those for Python values, and its messages differ, so it validates `text`.

        Args:
            values: the parsed arguments.
            text: the JSON text of the same arguments; empty if JSON cannot express them.

        Raises:
            ValidationError: The arguments are wrong (the error is pydantic's).
        """
        if self._reads_alike or not text:
            try:
                return self._model.model_validate(values)
            except ValidationError:
                if not text:
                    raise
        return self._model.model_validate_json(text)

    def bind(self, values: BaseModel, injected: object) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments of the call."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        by_field = values.__dict__
        for parameter in self._signature.parameters:
            if parameter.kind == "kwargs":
                kwargs.update(values.__pydantic_extra__ or {})
                continue
            value = injected if parameter.injected else by_field[self._fields[parameter.name]]
            if parameter.kind == "args":
                args.extend(cast("list[Any]", value))
            elif value is ABSENT:
                continue
            elif parameter.kind == "keyword":
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return args, kwargs


_SAME_FROM_JSON = frozenset({"any", "bool", "definition-ref", "float", "int", "none", "str"})
"""Pydantic's schema types that treat a JSON value and the Python value parsed from it alike. References are
in the list because their definitions are checked separately."""
_PARTS = {
    "default": ("schema",),
    "dict": ("keys_schema", "values_schema"),
    "list": ("items_schema",),
    "model": ("schema",),
    "model-field": ("schema",),
    "nullable": ("schema",),
}
"""Schema types that do so if their parts do, with the keys of the parts."""


def _reads_alike(schema: Mapping[str, Any]) -> bool:
    """Return whether pydantic treats Python values like the JSON text that they were parsed from."""
    kind = schema["type"]
    if schema.get("strict") or schema.get("config", {}).get("strict"):
        return False
    if kind == "literal":
        return all(type(value) is str for value in schema["expected"])
    if kind == "definitions":
        return all(map(_reads_alike, [*schema["definitions"], schema["schema"]]))
    if kind == "model-fields":
        extras = schema.get("extras_schema")
        parts = [*schema["fields"].values(), *([] if extras is None else [extras])]
        return all(map(_reads_alike, parts))
    if kind in _PARTS:
        return all(_reads_alike(schema[part]) for part in _PARTS[kind] if part in schema)
    return kind in _SAME_FROM_JSON


def parse_object(text: str, *, repair: bool = False) -> Parsed:
    """Parse the JSON object of a call's arguments; an object inside a JSON string is accepted too.

    Args:
        text: JSON text; empty text means no arguments.
        repair: Let json-repair repair broken JSON; `Parsed.repaired` is then true.

    Raises:
        ArgumentError: The text is not a JSON object that a tool can use.
        DependencyMissing: `repair` is true and json-repair is not installed.
    """
    if len(text) > MAX_ARGUMENT_CHARS:
        raise ArgumentError(
            ToolErrorKind.BAD_ARGUMENTS,
            f"the arguments have {len(text):,} characters; at most {MAX_ARGUMENT_CHARS:,} are allowed",
        )
    if not text.strip():
        return Parsed({}, "{}")
    repaired = False
    try:
        values = decode(text)
    except ArgumentError as error:
        mended = _repair(text) if repair and error.kind is ToolErrorKind.INVALID_JSON else None
        if mended is None:
            raise
        values, text, repaired = mended, json.dumps(mended), True
    if isinstance(values, str):  # {"a": 1} written as "{\"a\": 1}"
        try:
            text, values = values, decode(values)
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
    validator: Validator,
    arguments: str | Mapping[str, object],
    values: Mapping[str, object] | None = None,
    *,
    repair: bool = False,
) -> Arguments:
    """Return the validated arguments of a call.

    Null for an argument that has a default and does not accept null means the default, because models
    write null for omitted arguments in strict mode.

    Args:
        validator: validator of the tool.
        arguments: JSON text, or Python values.
        values: values that were already parsed from the JSON text (`ToolCall.values`), or None.
        repair: let json-repair repair broken JSON.

    Raises:
        ArgumentError: The arguments are wrong. Its text is a line for the model that names each wrong field.
    """
    repaired = False
    if not isinstance(arguments, str):
        values, text = dict(arguments), _text(arguments)
    elif values is not None:
        text = arguments
    else:
        parsed = parse_object(arguments, repair=repair)
        values, text, repaired = parsed.values, parsed.text, parsed.repaired
    try:
        model = validator.validate(values, text)
    except ValidationError as error:
        pruned = _drop_nulls(values, error)
        try:
            if pruned is not None:
                text = _text(pruned)
                return Arguments(validator.validate(pruned, text), text, repaired)
        except ValidationError:
            pass
        raise ArgumentError(ToolErrorKind.BAD_ARGUMENTS, _explain(error, values, validator.names)) from error
    return Arguments(model, text, repaired)


def _text(values: Mapping[str, object]) -> str:
    """Return values as JSON text, or an empty text if JSON cannot express a value that Python code passed."""
    try:
        text = json.dumps(values, allow_nan=False)
        check_text(text, values)
    except (TypeError, ValueError):
        return ""
    return text


def _repair(text: str) -> object | None:
    """Return the object that json-repair makes of the text, or None if it makes no object."""
    if len(text) > _REPAIR_CHARS or text.count("{") + text.count("[") > _REPAIR_BRACKETS:
        return None
    check_repair()
    import json_repair

    try:
        mended = json_repair.loads(text, skip_json_loads=True)
        return decode(json.dumps(mended)) if isinstance(mended, dict) and mended else None
    except (ValueError, RecursionError):
        return None


def check_repair() -> None:
    """Check that json-repair is installed.

    Raises:
        DependencyMissing: json-repair is not installed.
    """
    if importlib.util.find_spec("json_repair") is None:
        raise DependencyMissing.of("json-repair", "repair", purpose="repair of broken JSON")


def mend_call(call: ToolCall, names: Collection[str]) -> ToolCall:
    """Return a call with its broken JSON repaired, or the same call if there was nothing to repair.

    Args:
        call: any call. If it has no name, its arguments are the text of the whole call.
        names: names of the episode's tools.
    """
    if call.status is not CallStatus.INVALID_JSON:
        return call
    mended: Any = _repair(call.arguments)
    name: Any = call.name
    if not name and mended is not None:
        name, mended = mended.get("name"), mended.get("arguments", mended.get("parameters"))
    if name not in names or not isinstance(mended, dict):
        return call
    text = json.dumps(mended)
    return replace(call, name=name, arguments=text, status=CallStatus.OK, error="", values=mended)


def mend(
    calls: Sequence[ToolCall], tools: Sequence[Mapping[str, JsonValue]]
) -> tuple[list[ToolCall], frozenset[str]]:
    """Repair calls whose JSON is broken; return all calls, and the ids of the repaired ones."""
    names = {str(cast("Mapping[str, object]", tool["function"])["name"]) for tool in tools}
    tried = [mend_call(call, names) for call in calls]
    return tried, frozenset(new.id for old, new in zip(calls, tried, strict=True) if new is not old)


def marked(results: Sequence[ToolResult], mended: frozenset[str]) -> list[ToolResult]:
    """Mark the results of repaired calls as `repaired`."""
    return [replace(result, repaired=True) if result.tool_call_id in mended else result for result in results]


def _drop_nulls(values: Mapping[str, object], error: ValidationError) -> dict[str, Any] | None:
    """Return the values without the nulls that validation refused; None if it refused no null."""
    paths = [
        entry["loc"] for entry in error.errors(include_url=False) if entry["input"] is None and entry["loc"]
    ]
    if not paths:
        return None
    pruned = copy.deepcopy(dict(values))
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
    """Return the value one level deeper. A key that is only the name of a union's member is skipped."""
    if isinstance(at, dict) and key in at:
        return cast("dict[object, Any]", at)[key]
    if isinstance(at, list) and isinstance(key, int) and key < len(cast("list[Any]", at)):
        return cast("list[Any]", at)[key]
    return at


def _explain(error: ValidationError, values: object, names: tuple[str, ...]) -> str:
    """Return one line that names each wrong field and says what is expected."""
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
    """Return a location as text such as `orders[0].price`, without the names of union members."""
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
