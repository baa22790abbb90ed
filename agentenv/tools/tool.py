"""The tool: a function with a schema, whose calls are always answered, even if the function fails."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import time
from collections.abc import Callable, Mapping
from pickle import PicklingError
from types import FrameType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from agentenv.core.episode_env import Context
from agentenv.core.errors import ToolDefinitionError
from agentenv.core.faults import must_pass
from agentenv.core.messages import ArgumentError, ToolResult
from agentenv.tools.arguments import Arguments, read_arguments
from agentenv.tools.definition import Definition, ToolOptions
from agentenv.tools.run import ToolOutcome, failure, run_coroutine, run_function
from agentenv.tools.schema.dialects import Dialect, Schema

__all__ = ["Tool", "tool"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class Tool(Generic[P, R]):
    """A function that a model can call, with a name and a schema.

    Tools are made by the decorator `tool` or by `Tool.from_function`. A tool made from a method binds to
    the object like the method.
    """

    def __init__(self, definition: Definition, receiver: object = None) -> None:
        self.definition = definition
        """The function, its options and its schema; all objects of a class share it."""
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
            function: Function that the model calls, synchronous or asynchronous.
            name: Name that the model sees; None uses the function's name.
            description: Description that the model sees; None uses the docstring.
            timeout_s: Time limit of one call; the run's limit applies too.
            max_output_tokens: Largest number of tokens of one result; the run's limit applies too.
            isolated: Run each call in a separate process, which can be killed.
            parallel: Let a call run at the same time as other calls of its turn.

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
        """Make a tool from an existing JSON Schema, which the model sees unchanged.

        Args:
            name: Name that the model sees.
            description: Description that the model sees.
            parameters: JSON Schema of an object. Before a call, the names and types of its properties are
                checked; the function must check what is nested deeper.
            function: Function that is called with the arguments by name, synchronous or asynchronous.
            timeout_s: Time limit of one call; the run's limit applies too.
            max_output_tokens: Largest number of tokens of one result; the run's limit applies too.
            parallel: Let a call run at the same time as other calls of its turn.

        Raises:
            ToolDefinitionError: Providers would refuse the name.
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
        """Name by which the model calls the tool."""
        return self.definition.name

    @property
    def description(self) -> str:
        """Description that the model sees."""
        return self.definition.description

    @property
    def parameters(self) -> Schema:
        """JSON Schema of the arguments; each access returns a new object."""
        return self.definition.parameters

    @property
    def returns(self) -> Schema | None:
        """JSON Schema of the result; None if the function's annotation has no schema."""
        return self.definition.returns

    @property
    def options(self) -> ToolOptions:
        """Options of the tool, such as its time limit."""
        return self.definition.options

    @property
    def notes(self) -> tuple[str, ...]:
        """Advice on what would help the model, about missing descriptions and deep nesting."""
        return self.definition.notes

    @property
    def function(self) -> Callable[..., Any]:
        """The function of the tool, bound to an object if the tool is."""
        if self._receiver is None:
            return self.definition.function
        return functools.partial(self.definition.function, self._receiver)

    def schema(self, dialect: Dialect = "openai") -> Schema:
        """Return the schema `{"type": "function", "function": {...}}` as a new object.

        Args:
            dialect: `openai` (JSON Schema with `$defs`), `inline` (every `$ref` is replaced by its
                definition) or `strict` (OpenAI's strict mode: all properties are required, and optional
                ones accept null).

        Raises:
            ToolDefinitionError: The strict dialect cannot express a parameter; the message names it.
        """
        return self.definition.schema(dialect)

    def schema_text(self, dialect: Dialect = "openai") -> str:
        """Return the schema as JSON text, which has the same bytes in every process."""
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
        """Run the tool and return its result; errors in the arguments or the function become results too.

        Args:
            arguments: JSON text that the model wrote, or a dictionary.
            context: Context of the episode, which has the time limits and is passed to `Context` parameters.
            tool_call_id: Id of the call, which the result repeats.
            values: Values that were already parsed from the JSON text (`ToolCall.values`); None if it was
                not parsed yet.
            repair_json: Repair broken JSON (needs json-repair); `ToolResult.repaired` is then true.

        Raises:
            InfrastructureError: A sandbox, an engine or a server that the tool uses failed, so the episode
                must be aborted.
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
            checked = read_arguments(definition.arguments, arguments, values, repair=repair_json)
            repaired = checked.repaired
        except ArgumentError as error:
            outcome = ToolOutcome(f"bad arguments for {self.name}: {error.text}", error.kind)
        except BaseException as error:  # a type's own validator is the author's code and may raise anything
            if must_pass(error):
                raise
            outcome = failure(error)
        else:
            outcome = await self._run(checked, context)
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

    async def _run(self, arguments: Arguments, context: Context) -> ToolOutcome:
        limits = [
            limit for limit in (self.options.timeout_s, context.limits.tool_timeout_s) if limit is not None
        ]
        limit_s = min(limits, default=None)
        function = self.definition.function
        if self.options.isolated:
            from agentenv.tools.process import FunctionPath, run_isolated

            return await run_isolated(FunctionPath.of(function), arguments.text, limit_s, self.name)
        args, kwargs = self.definition.arguments.bind(arguments.model, context)
        if self._receiver is not None:
            args.insert(0, self._receiver)
        if self.definition.signature.is_async:
            return await run_coroutine(function, args, kwargs, limit_s)
        return await run_function(function, args, kwargs, limit_s, self.name)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly, without validation or time limit."""
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
                f"tool {self.name} cannot be pickled: {function.__module__}.{function.__qualname__} is "
                "another tool"
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
    """Make a tool from a function or method; the options are those of `Tool.from_function`.

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
    """Return the tool with a qualified name in a module."""
    value: Any = importlib.import_module(module)
    for name in qualname.split("."):
        value = inspect.getattr_static(value, name, None)
    value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    if not isinstance(value, Tool):
        raise PicklingError(
            f"there is no tool at {module}.{qualname}; only tools of modules and classes can be pickled"
        )
    return value


def _restore(module: str, qualname: str, receiver: object) -> Tool[..., Any]:
    return Tool(_find(module, qualname).definition, receiver)


def _caller() -> FrameType | None:
    """Return the frame of the code that called this function's caller."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame.f_back if frame is not None else None
    return frame


def _make(function: Any, options: ToolOptions, frame: FrameType | None) -> Tool[Any, Any]:
    if isinstance(function, Tool):
        raise ToolDefinitionError(
            f"{function.name} is a tool already",
            remedy="use Tool.from_function to make one with other options",
        )
    return Tool(Definition(function, options, _names_in_sight(function, frame)))


def _names_in_sight(function: Any, frame: FrameType | None) -> dict[str, object]:
    """Return the local variables around a tool's definition, which annotations written as text may name."""
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
