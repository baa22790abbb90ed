"""A function as a tool: its schema, and one call of it answered whatever happens."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import time
from collections.abc import Callable, Mapping
from pickle import PicklingError
from types import FrameType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from agentenv.core.arguments import ArgumentError
from agentenv.core.context import Context
from agentenv.core.errors import ToolDefinitionError
from agentenv.core.messages import ToolResult
from agentenv.tools.arguments import Arguments, read_arguments
from agentenv.tools.definition import Definition, ToolOptions
from agentenv.tools.process import Place, run_isolated
from agentenv.tools.run import ToolOutcome, failure, run_coroutine, run_function
from agentenv.tools.schema.dialects import Dialect, Schema

__all__ = ["Tool", "tool"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class Tool(Generic[P, R]):
    """A function with a name, a schema and a safe way to be called by a model.

    Made by `tool` or `Tool.from_function`. As an attribute of a class it binds like the method it
    was made from.
    """

    def __init__(self, definition: Definition, receiver: object = None) -> None:
        self.definition = definition
        """The function, its options and its schema; shared by all objects of a class."""
        self._receiver = receiver
        functools.update_wrapper(self, definition.function, updated=())

    @classmethod
    def from_function(
        cls,
        function: Callable[Q, R] | Tool[Q, R],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float | None = None,
        max_output_tokens: int | None = None,
        isolated: bool = False,
        parallel: bool = True,
    ) -> Tool[Q, R]:
        """Make a tool from a function, method, `functools.partial` or callable object.

        Args:
            function: What the model calls; async or not.
            name: Name for the model; the function's own by default.
            description: Description for the model; the docstring's by default.
            timeout_s: Time limit of one call; the run's limit holds too.
            max_output_tokens: Tokens of one result; the run's limit holds too.
            isolated: Run each call in a process that can be killed.
            parallel: May run at the same time as other calls of its turn.

        Raises:
            ToolDefinitionError: The function cannot be a tool; the message names the parameter.
        """
        options = ToolOptions(
            name=name,
            description=description,
            timeout_s=timeout_s,
            max_output_tokens=max_output_tokens,
            isolated=isolated,
            parallel=parallel,
        )
        if isinstance(function, Tool):
            function = function.function
        return _make(function, options, _caller())

    @classmethod
    def from_schema(
        cls,
        name: str,
        description: str,
        parameters: Mapping[str, Any],
        function: Callable[..., Any],
        *,
        timeout_s: float | None = None,
        max_output_tokens: int | None = None,
        parallel: bool = True,
    ) -> Tool[..., Any]:
        """Make a tool from a JSON Schema that someone else wrote; the model sees it unchanged.

        Args:
            name: Name for the model.
            description: Description for the model.
            parameters: JSON Schema of an object. Names and types of its own properties are checked
                before a call; what is nested deeper is left to the function.
            function: Called with the arguments by name; async or not.
            timeout_s: Time limit of one call; the run's limit holds too.
            max_output_tokens: Tokens of one result; the run's limit holds too.
            parallel: May run at the same time as other calls of its turn.

        Raises:
            ToolDefinitionError: The name is one that providers refuse.
        """
        options = ToolOptions(
            name=name,
            description=description,
            timeout_s=timeout_s,
            max_output_tokens=max_output_tokens,
            parallel=parallel,
        )
        return Tool(Definition.from_schema(function, parameters, options))

    @property
    def name(self) -> str:
        """Name that the model calls."""
        return self.definition.name

    @property
    def description(self) -> str:
        """What the model is told the tool does."""
        return self.definition.description

    @property
    def parameters(self) -> Schema:
        """JSON Schema of the arguments; a new object at every access."""
        return self.definition.parameters

    @property
    def returns(self) -> Schema | None:
        """JSON Schema of the result, or None where the annotation does not tell."""
        return self.definition.returns

    @property
    def options(self) -> ToolOptions:
        """Limits and switches of the tool."""
        return self.definition.options

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on what would help the model: missing descriptions, deep nesting."""
        return self.definition.notes

    @property
    def function(self) -> Callable[..., Any]:
        """The function under the tool, bound if the tool is."""
        if self._receiver is None:
            return self.definition.function
        return functools.partial(self.definition.function, self._receiver)

    def schema(self, dialect: Dialect = "openai") -> Schema:
        """Return `{"type": "function", "function": {...}}`; a new object at every call.

        Args:
            dialect: `openai` (JSON Schema with `$defs`), `inline` (every `$ref` replaced) or
                `strict` (OpenAI's strict mode: all properties required, optional ones nullable).

        Raises:
            ToolDefinitionError: The strict dialect cannot express a parameter; it is named.
        """
        return json.loads(self.definition.schema_text(dialect))

    def schema_text(self, dialect: Dialect = "openai") -> str:
        """Return the schema as JSON text: the same function gives the same bytes in every process."""
        return self.definition.schema_text(dialect)

    async def call(
        self,
        arguments: str | Mapping[str, object],
        context: Context | None = None,
        tool_call_id: str = "call_0",
        *,
        values: Mapping[str, object] | None = None,
        repair_json: bool = False,
    ) -> ToolResult:
        """Run the tool as the model asked, and answer whatever happens.

        Args:
            arguments: JSON text as the model wrote it, or a dictionary.
            context: The episode's surroundings, for time limits and `Context` parameters.
            tool_call_id: Id that the answer carries.
            values: What was read from the JSON text already, if it was (`ToolCall.values`).
            repair_json: Mend broken JSON (needs json-repair); the answer says when it did.

        Raises:
            SandboxError: The sandbox failed, not the tool: the episode is to be aborted.
            EngineError: An engine that the tool uses failed: likewise.
        """
        definition = self.definition
        if definition.binding is not None and self._receiver is None:
            raise ToolDefinitionError(
                f"tool {self.name} is a method", remedy="call it through an object of its class"
            )
        start = time.perf_counter()
        context = context if context is not None else Context()
        repaired = False
        try:
            given = read_arguments(definition.arguments, arguments, values, repair=repair_json)
            repaired = given.repaired
        except ArgumentError as error:
            outcome = ToolOutcome(f"bad arguments for {self.name}: {error.text}", error.kind)
        except Exception as error:  # noqa: BLE001 - a type's own validator is the author's code and may raise anything
            outcome = failure(error)
        else:
            outcome = await self._run(given, context)
        return ToolResult(
            tool_call_id,
            self.name,
            outcome.content,
            outcome.error_kind,
            outcome.detail,
            time.perf_counter() - start,
            repaired=repaired,
            max_tokens=self.options.max_output_tokens,
        )

    async def _run(self, given: Arguments, context: Context) -> ToolOutcome:
        limits = [
            limit for limit in (self.options.timeout_s, context.limits.tool_timeout_s) if limit is not None
        ]
        limit_s = min(limits, default=None)
        function = self.definition.function
        if self.options.isolated:
            return await run_isolated(Place.of(function), given.text, limit_s, self.name)
        args, kwargs = self.definition.arguments.bind(given.model, context)
        if self._receiver is not None:
            args.insert(0, self._receiver)
        if self.definition.signature.is_async:
            return await run_coroutine(function, args, kwargs, limit_s)
        return await run_function(function, args, kwargs, limit_s, self.name)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, as if it were no tool."""
        if self._receiver is not None:
            return self.definition.function(self._receiver, *args, **kwargs)
        return self.definition.function(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> Tool[P, R]: ...
    @overload
    def __get__(
        self: Tool[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> Tool[Q, R]: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> Tool[Any, Any]:
        binding = self.definition.binding
        if binding is None or self._receiver is not None:
            return self
        receiver = instance if binding == "object" else owner or type(instance)
        return self if receiver is None else Tool(self.definition, receiver)

    def __set_name__(self, owner: type, name: str) -> None:
        self.definition.names.setdefault(owner.__name__, owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tool[P, R]:
        return Tool(self.definition, copy.deepcopy(self._receiver, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        function = self.definition.function
        if _find(function.__module__, function.__qualname__).definition is not self.definition:
            raise PicklingError(
                f"tool {self.name} cannot be pickled: {function.__qualname__} is not where it was made"
            )
        return _restore, (function.__module__, function.__qualname__, self._receiver)

    def __repr__(self) -> str:
        return f"<Tool {self.name}>"


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
    max_output_tokens: int | None = None,
    isolated: bool = False,
    parallel: bool = True,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...
def tool(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a tool of a function or method; options as in `Tool.from_function`.

    ```python
    @ae.tool
    def add(a: int, b: int) -> int:
        "Add two numbers."
        return a + b
    ```
    """
    if function is not None:
        return _make(function, ToolOptions(), _caller())
    settings = ToolOptions(**options)

    def decorate(decorated: Callable[..., Any]) -> Tool[..., Any]:
        return _make(decorated, settings, _caller())

    return decorate


def _find(module: str, qualname: str) -> Tool[..., Any]:
    """Return the tool that stands at a place in a module."""
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = inspect.getattr_static(found, name, None)
    found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    if not isinstance(found, Tool):
        raise PicklingError(
            f"there is no tool at {module}.{qualname}; only tools of modules and classes are pickled"
        )
    return found


def _restore(module: str, qualname: str, receiver: object) -> Tool[..., Any]:
    return Tool(_find(module, qualname).definition, receiver)


def _caller() -> FrameType | None:
    """Return the frame that called the function which asks."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame.f_back if frame is not None else None
    return frame


def _make(function: Any, options: ToolOptions, frame: FrameType | None) -> Tool[Any, Any]:
    if isinstance(function, Tool):
        raise ToolDefinitionError(
            f"{function.name} is a tool already", remedy="use Tool.from_function to give it other options"
        )
    return Tool(Definition(function, options, _names_in_sight(function, frame)))


def _names_in_sight(function: Any, frame: FrameType | None) -> dict[str, object]:
    """Return the local names that annotations written as text may use where a tool is made."""
    inner = inspect.unwrap(getattr(function, "__func__", function))
    annotations = getattr(inner, "__annotations__", {})
    if not any(isinstance(annotation, str) for annotation in annotations.values()):
        return {}
    names: dict[str, object] = {}
    while frame is not None and frame.f_globals is getattr(inner, "__globals__", None):
        if frame.f_locals is frame.f_globals:
            break
        names = {**frame.f_locals, **names}
        frame = frame.f_back
    return names
