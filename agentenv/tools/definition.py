"""The definition of a tool: its function, its options, and what the function's signature says.

The signature is read when the tool is made, so that the error for a mistake points at the tool. If an
annotation names something that does not exist yet, the signature is read again at first use.
"""

from __future__ import annotations

import functools
import inspect
import json
import marshal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agentenv.core.episode_env import Context
from agentenv.core.errors import ToolDefinitionError
from agentenv.core.fields import PositiveInt, PositiveSeconds, check_fields
from agentenv.tools.arguments import Validator
from agentenv.tools.schema.arguments_model import (
    arguments_model,
    arguments_schema,
    check_name,
    function_schema,
    returns_schema,
)
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
"""Number of nested levels that every provider accepts."""

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
    """Options of a tool, which its author may set.

    Raises:
        ToolDefinitionError: A limit is not a positive number.
    """

    name: str | None = None
    """Name that the model sees; None uses the function's name."""
    description: str | None = None
    """Description that the model sees; None uses the docstring."""
    timeout_s: PositiveSeconds | None = None
    """Time limit of one call. If the run has a limit too, the stricter one holds."""
    max_output_tokens: PositiveInt | None = None
    """Largest number of tokens of one result. If the run has a limit too, the stricter one holds."""
    isolated: bool = False
    """True runs each call in a separate process, which can be killed."""
    parallel: bool = True
    """True lets a call run at the same time as other calls of its turn."""

    def __post_init__(self) -> None:
        check_fields(self, ToolDefinitionError)


@dataclass(frozen=True, slots=True)
class _Reading:
    """The results of reading a signature."""

    signature: Signature
    arguments: Validator
    parameters: str
    """JSON Schema of the arguments, kept as text so that no caller can change it."""


class Definition:
    """The definition of one tool. A method's tools on all objects of a class share one definition."""

    def __init__(
        self,
        function: Any,
        options: ToolOptions,
        names: Mapping[str, object] | None = None,
        *,
        reading: _Reading | None = None,
    ) -> None:
        self.function: Callable[..., Any] = (
            function.__func__ if isinstance(function, staticmethod | classmethod) else function
        )
        self.options = options
        self.names = dict(names or {})
        self.binding = _binding(function) if reading is None else None
        """What the function is bound to when it is read from an object: the object, its class, or nothing."""
        self.name = check_name(options.name or _name_of(self.function))
        self._reading = reading
        self._texts: dict[Dialect, str] = {}
        self._packed: dict[Dialect, bytes] = {}
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
        """Define a tool by a JSON Schema, which is shown to the model unchanged."""
        name = check_name(options.name or _name_of(function))
        is_async = inspect.iscoroutinefunction(function)
        doc = FunctionDoc(options.description or "")
        signature = Signature(name, doc, _declared(parameters), EMPTY, is_async)
        text = json.dumps(parameters, ensure_ascii=False)
        return cls(
            function,
            options,
            reading=_Reading(signature, Validator(signature, arguments_model(signature, {})), text),
        )

    @property
    def signature(self) -> Signature:
        """The signature with resolved annotations."""
        return self._read().signature

    @property
    def arguments(self) -> Validator:
        """The validator of the arguments."""
        return self._read().arguments

    @property
    def parameters(self) -> Schema:
        """The JSON Schema of the arguments; a new object at every access."""
        return json.loads(self._read().parameters)

    @property
    def description(self) -> str:
        """Description that the model sees."""
        return (
            self.options.description
            if self.options.description is not None
            else self.signature.doc.description
        )

    @property
    def returns(self) -> Schema | None:
        """The JSON Schema of the result; None if the function's annotation has no schema."""
        return returns_schema(self.signature)

    def schema(self, dialect: Dialect) -> Schema:
        """Return the tool's schema as a new object."""
        if dialect not in self._packed:
            self._packed[dialect] = marshal.dumps(json.loads(self.schema_text(dialect)))
        # Each episode asks for the schemas of all its tools, and JSON takes four times as long to read.
        return marshal.loads(self._packed[dialect])  # noqa: S302 - written four lines above

    def schema_text(self, dialect: Dialect) -> str:
        """Return the tool's schema as JSON text; it has the same bytes in every process."""
        if dialect not in self._texts:
            schema = function_schema(self.name, self.description, self.parameters, dialect)
            self._texts[dialect] = json.dumps(schema, ensure_ascii=False)
        return self._texts[dialect]

    @property
    def notes(self) -> tuple[str, ...]:
        """Advice on what would help the model, such as a missing description; none of it is an error."""
        notes: list[str] = []
        if not self.description:
            notes.append(f"tool {self.name} has no description: give its function a docstring")
        properties = self.parameters.get("properties", {})
        for name, entry in properties.items():
            if not entry.get("description"):
                notes.append(f"tool {self.name}: parameter {name!r} has no description")
        depth = schema_depth(self.parameters)
        if depth > _DEEP:
            notes.append(
                f"tool {self.name}: arguments nest {depth} levels; some providers accept only {_DEEP}"
            )
        return tuple(notes)

    def _read(self) -> _Reading:
        if self._reading is None:
            signature = read_signature(
                self.function, injected=(Context,), names=self.names, skip_first=self.binding is not None
            )
            if self.options.isolated and any(parameter.injected for parameter in signature.parameters):
                raise ToolDefinitionError(
                    f"tool {self.name}: an isolated tool cannot take a Context, which only this process has",
                    remedy="remove the parameter or isolated=True",
                )
            model = arguments_model(signature, self.names)
            shown = json.dumps(arguments_schema(model, signature), ensure_ascii=False)
            self._reading = _Reading(signature, Validator(signature, model), shown)
            self.names.clear()
        return self._reading

    def _check_isolated(self) -> None:
        where = getattr(self.function, "__qualname__", "")
        if self.binding is not None or "<locals>" in where or not inspect.isfunction(self.function):
            raise ToolDefinitionError(
                f"tool {self.name}: isolated=True needs a function that another process can import; "
                f"{where or self.function!r} is not one",
                remedy="define it at the top level of a module",
            )


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _binding(function: Any) -> Literal["object", "class"] | None:
    """Return what a function from a class body is bound to; None if it is not a method."""
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
    """Turn the top level of a JSON Schema into parameters; deeper levels are not checked."""
    required = parameters.get("required", ())
    declared: list[Parameter] = []
    for name, entry in parameters.get("properties", {}).items():
        kind, values = (entry.get("type"), entry.get("enum")) if isinstance(entry, Mapping) else (None, None)
        annotation: object = Any
        if values and all(isinstance(value, str | int | None) for value in values):
            annotation = Literal[tuple(values)]
        elif isinstance(kind, str) and not values:
            annotation = _DECLARED_TYPES.get(kind, Any)
        declared.append(Parameter(name, annotation, "keyword", EMPTY if name in required else ABSENT))
    if parameters.get("additionalProperties", True) is not False:
        declared.append(Parameter("_rest", Any, "kwargs", ABSENT))
    return tuple(declared)
