"""Make the fields of a task what the methods that read them declare.

Data sets hold text where a number is meant (every cell of a CSV file), and null where a value is missing. A
field becomes the annotated type of the parameter that has its name, where the conversion is exact: "12" is
12 for `x: int`, and 12 is "12" for `name: str`. Null, and an empty cell for a parameter that is no text,
mean the default. A field that no annotation names stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from agentenv.core.errors import TaskError
from agentenv.envs.rewards.reward import RESERVED_NAMES
from agentenv.tools.schema.signature import EMPTY, parameter_types

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["as_declared"]


class _Field(NamedTuple):
    reader: str
    """Name of the method that declares the field, for errors."""
    default: Any
    """`inspect.Parameter.empty` if the method needs the field."""
    adapter: TypeAdapter[Any] | None
    """None if the type is not annotated, or is none that can be checked."""


def as_declared(
    task: Mapping[str, object], readers: Iterable[Callable[..., object]], *, where: str
) -> dict[str, object]:
    """Return the fields of a task as the first reader that annotates them declares them.

    Args:
        task: fields of the task.
        readers: `start`, then the methods that score. Of these, the parameters that are values of the
            episode, such as `answer`, are no fields.
        where: the task in words, for errors.

    Raises:
        TaskError: A value is not of the declared type. The message names the field and the value.
    """
    fields: dict[str, _Field] = {}
    for index, reader in enumerate(readers):
        for name, field in _fields(getattr(reader, "__func__", reader)).items():
            if index and name in RESERVED_NAMES:
                continue
            if name not in fields or fields[name].adapter is None:
                fields[name] = field
    return {
        name: value if name not in fields else _converted(name, value, fields[name], where)
        for name, value in task.items()
    }


def _converted(name: str, value: object, field: _Field, where: str) -> object:
    if field.adapter is None:
        return field.default if value is None and field.default is not EMPTY else value
    try:
        return field.adapter.validate_python(value)
    except ValueError as error:
        problem = error
    if value is None or (isinstance(value, str) and not value):
        if field.default is not EMPTY:
            return field.default
        value = None
    try:
        # A cell of a table holds a list or a mapping as JSON.
        return field.adapter.validate_json(value if isinstance(value, str) else "null")
    except ValueError:
        wanted = cast("Any", problem).errors()[0]["msg"].removeprefix("Input ").split(", unable to parse")[0]
        raise TaskError(
            f"{where}: the field {name!r} is {value!r:.200}, but {field.reader}() declares that it {wanted}",
            remedy="change the data, or the annotation of the parameter",
        ) from problem


@lru_cache(maxsize=4096)
def _fields(reader: Callable[..., object]) -> dict[str, _Field]:
    types = parameter_types(reader)
    label = getattr(reader, "__qualname__", repr(reader))
    return {
        name: _Field(label, parameter.default, _adapter(types.get(name, Any)))
        for name, parameter in inspect.signature(reader).parameters.items()
        if parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    }


def _adapter(kind: Any) -> TypeAdapter[Any] | None:
    from pydantic import ConfigDict, TypeAdapter
    from pydantic.errors import PydanticUserError

    if kind is Any or kind is object:
        return None
    for config in (ConfigDict(coerce_numbers_to_str=True), None):
        try:
            return TypeAdapter(kind, config=config)
        except PydanticUserError:  # a class that pydantic does not know, or that has its own config
            continue
        except (TypeError, NameError):
            return None
    return None
