"""What a tool is made of: the function, its options, and what is read from its signature.

The signature is read when the tool is made, so that a mistake shows where it stands. Only when an
annotation names something that does not exist yet is it read again at first use.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentenv.core.bounds import PositiveInt, PositiveSeconds, check_bounds
from agentenv.core.context import Context
from agentenv.core.errors import ToolDefinitionError
from agentenv.tools.schema.arguments_model import ArgumentsModel, check_name, function_schema, returns_schema
from agentenv.tools.schema.dialects import Dialect, Schema, schema_depth
from agentenv.tools.schema.docstrings import FunctionDoc
from agentenv.tools.schema.signature import (
    ABSENT,
    EMPTY,
    Parameter,
    Signature,
    UnresolvedAnnotation,
    read_signature,
)

__all__ = ["Definition", "ToolOptions"]

_DEEP = 5
"""Levels of nesting that every provider takes."""

_DECLARED_TYPES: dict[str, object] = {
    "string": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "array": list[Any],
    "object": dict[str, Any],
    "null": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """What an author says about a tool besides its function.

    Raises:
        ToolDefinitionError: A limit is not a positive number.
    """

    name: str | None = None
    """Name for the model; the function's own by default."""
    description: str | None = None
    """Description for the model; the docstring's by default."""
    timeout_s: PositiveSeconds | None = None
    """Time limit of one call; of this and the run's limit the stricter holds."""
    max_output_tokens: PositiveInt | None = None
    """Tokens of one result; of this and the run's limit the stricter holds."""
    isolated: bool = False
    """Run each call in a process that can be killed."""
    parallel: bool = True
    """May run at the same time as other calls of its turn."""

    def __post_init__(self) -> None:
        check_bounds(self, ToolDefinitionError)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a signature gave."""

    signature: Signature
    arguments: ArgumentsModel
    parameters: str
    """The arguments' JSON Schema as text, so that nobody can change it."""


class Definition:
    """A function as a tool; shared by a method's tools on all objects of its class."""

    def __init__(
        self,
        function: Any,
        options: ToolOptions,
        names: Mapping[str, object] | None = None,
        *,
        reading: _Reading | None = None,
    ) -> None:
        self.function: Callable[..., Any] = _plain(function)
        self.options = options
        self.names = dict(names or {})
        self.binding = _binding(function) if reading is None else None
        """How access through an object binds the function: to the object, its class, or not at all."""
        self.name = check_name(options.name or _name_of(self.function))
        self._reading = reading
        self._texts: dict[Dialect, str] = {}
        if options.isolated:
            self._check_isolated()
        try:
            self._read()
        except UnresolvedAnnotation:
            self._reading = None

    @classmethod
    def from_schema(
        cls, function: Callable[..., Any], parameters: Mapping[str, Any], options: ToolOptions
    ) -> Definition:
        """Define a tool by a JSON Schema, which is shown to the model as it is."""
        name = check_name(options.name or _name_of(function))
        is_async = inspect.iscoroutinefunction(function)
        doc = FunctionDoc(options.description or "")
        signature = Signature(name, doc, _declared(parameters), EMPTY, is_async)
        text = json.dumps(parameters, ensure_ascii=False)
        return cls(function, options, reading=_Reading(signature, ArgumentsModel(signature), text))

    @property
    def signature(self) -> Signature:
        """The signature, its annotations resolved."""
        return self._read().signature

    @property
    def arguments(self) -> ArgumentsModel:
        """The validator of the arguments."""
        return self._read().arguments

    @property
    def parameters(self) -> Schema:
        """The JSON Schema of the arguments; a new object at every access."""
        return json.loads(self._read().parameters)

    @property
    def description(self) -> str:
        """What the model is told the tool does."""
        return (
            self.options.description
            if self.options.description is not None
            else self.signature.doc.description
        )

    @property
    def returns(self) -> Schema | None:
        """The JSON Schema of the result, or None where the annotation does not tell."""
        return returns_schema(self.signature)

    def schema_text(self, dialect: Dialect) -> str:
        """Return the tool's schema as JSON text, the same bytes in every process."""
        if dialect not in self._texts:
            schema = function_schema(self.name, self.description, self.parameters, dialect)
            self._texts[dialect] = json.dumps(schema, ensure_ascii=False)
        return self._texts[dialect]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on what would help the model; none of them is an error."""
        found: list[str] = []
        if not self.description:
            found.append(f"tool {self.name} has no description: give its function a docstring")
        properties = self.parameters.get("properties", {})
        for name, entry in properties.items():
            if not entry.get("description"):
                found.append(f"tool {self.name}: parameter {name!r} has no description")
        depth = schema_depth(self.parameters)
        if depth > _DEEP:
            found.append(f"tool {self.name}: arguments nest {depth} levels; some providers take {_DEEP}")
        return tuple(found)

    def _read(self) -> _Reading:
        if self._reading is None:
            signature = read_signature(
                self.function, injected=(Context,), names=self.names, skip_first=self.binding is not None
            )
            if self.options.isolated and any(parameter.injected for parameter in signature.parameters):
                raise ToolDefinitionError(
                    f"tool {self.name}: an isolated tool cannot take a Context, which lives in this process"
                )
            arguments = ArgumentsModel(signature, self.names)
            self._reading = _Reading(
                signature, arguments, json.dumps(arguments.json_schema(), ensure_ascii=False)
            )
            self.names.clear()
        return self._reading

    def _check_isolated(self) -> None:
        where = getattr(self.function, "__qualname__", "")
        if self.binding is not None or "<locals>" in where or not inspect.isfunction(self.function):
            raise ToolDefinitionError(
                f"tool {self.name}: isolated=True needs a function of a module, which another process "
                f"can import; {where or self.function!r} is not one"
            )


def _plain(function: Any) -> Any:
    return function.__func__ if isinstance(function, staticmethod | classmethod) else function


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _binding(function: Any) -> Literal["object", "class"] | None:
    """Tell whether a function was written in a class body as a method."""
    if isinstance(function, classmethod):
        return "class"
    if isinstance(function, staticmethod) or not inspect.isfunction(function):
        return None
    outer = function.__qualname__.rpartition(".")[0]
    if not outer or outer.endswith("<locals>"):
        return None
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if first is None or first.kind not in {first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD}:
        return None
    receiver = first.annotation is EMPTY or first.name in {"self", "cls"}
    return ("class" if first.name == "cls" else "object") if receiver else None


def _declared(parameters: Mapping[str, Any]) -> tuple[Parameter, ...]:
    """Turn the top level of a JSON Schema into parameters; what is deeper is not checked."""
    required = parameters.get("required", ())
    found: list[Parameter] = []
    for name, entry in parameters.get("properties", {}).items():
        kind, values = (entry.get("type"), entry.get("enum")) if isinstance(entry, Mapping) else (None, None)
        annotation: object = Any
        if values and all(isinstance(value, str | int | None) for value in values):
            annotation = Literal[tuple(values)]
        elif isinstance(kind, str) and not values:
            annotation = _DECLARED_TYPES.get(kind, Any)
        found.append(Parameter(name, annotation, "keyword", EMPTY if name in required else ABSENT))
    if parameters.get("additionalProperties", True) is not False:
        found.append(Parameter("_rest", Any, "kwargs", ABSENT))
    return tuple(found)
