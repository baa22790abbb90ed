"""Read a callable's signature: parameters with resolved types, defaults and descriptions.

1. Every parameter that the model fills needs an annotation; the error for a missing one names it.
2. The model does not see parameters of an injected type (`agentenv.Context`), nor those that
   `functools.partial` has bound.
3. Annotations written as text are resolved with the function's globals, its closure and the names that
   were visible where the tool was made. A name that does not exist yet raises `UnresolvedAnnotation`, so
   that the caller can try again when the class or module is complete.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import typing_extensions

from agentenv.core.errors import ToolDefinitionError
from agentenv.tools.schema.docstrings import FunctionDoc, ParameterDoc, read_docstring

__all__ = [
    "ABSENT",
    "EMPTY",
    "Parameter",
    "Signature",
    "UnresolvedAnnotation",
    "parameter_types",
    "read_signature",
]

_NO_DOC = ParameterDoc()
ParameterKind = Literal["positional", "keyword", "args", "kwargs"]
EMPTY = inspect.Parameter.empty


class _Absent:
    """Default of an optional argument that is not passed to the function if the model leaves it out."""

    def __repr__(self) -> str:
        return "<absent>"

    def __deepcopy__(self, memo: object) -> _Absent:
        return self


ABSENT = _Absent()


class UnresolvedAnnotation(ToolDefinitionError):
    """An annotation names something that does not exist (yet)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool."""

    name: str
    annotation: object
    """The resolved type, including `Annotated` metadata."""
    kind: ParameterKind
    """How the function receives the argument; `args` and `kwargs` are the starred parameters."""
    default: object = EMPTY
    """The default; `inspect.Parameter.empty` if the argument is required, `ABSENT` if it may be left out."""
    doc: ParameterDoc = _NO_DOC
    injected: bool = False
    """True if the library fills the parameter and the model never sees it."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters, the result and the documentation of a callable."""

    name: str
    doc: FunctionDoc
    parameters: tuple[Parameter, ...]
    returns: object
    """The annotation of the result, or `inspect.Parameter.empty`."""
    is_async: bool

    @property
    def visible(self) -> tuple[Parameter, ...]:
        """Parameters that the model fills."""
        return tuple(parameter for parameter in self.parameters if not parameter.injected)


def read_signature(
    function: Callable[..., object],
    *,
    injected: Sequence[type] = (),
    names: Mapping[str, object] | None = None,
    skip_first: bool = False,
) -> Signature:
    """Read the signature of a callable.

    Args:
        function: A function, method, `functools.partial` or object with `__call__`.
        injected: Types of the parameters that the library fills.
        names: Names that annotations may use besides the function's own globals and closure.
        skip_first: True leaves out the first parameter (`self` or `cls`), which a bound call fills.

    Raises:
        ToolDefinitionError: The callable cannot be a tool; the message names the parameter.
        UnresolvedAnnotation: An annotation names something that is not defined (yet).
    """
    inner = _innermost(function)
    label = getattr(function, "__name__", None) or getattr(inner, "__name__", type(function).__name__)
    if not callable(function):
        raise ToolDefinitionError(f"{function!r} cannot be called", remedy="a tool is made from a function")
    if inspect.isclass(function):
        raise ToolDefinitionError(
            f"{label} is a class", remedy="make the tool from a function or from a method of an object"
        )
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise ToolDefinitionError(
            f"{label} is a generator", remedy="a tool returns one value (return a list instead)"
        )
    try:
        raw = inspect.signature(function)
    except NameError as error:
        raise UnresolvedAnnotation(f"tool {label}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ToolDefinitionError(f"{label} has no signature that Python can read: {error}") from error
    doc = read_docstring(_docstring(function, inner))
    resolve = _Resolver(inner, label, names or {})
    bound = _bound_keywords(function)
    entries = list(raw.parameters.values())[1 if skip_first else 0 :]
    parameters: list[Parameter] = []
    for entry in entries:
        if entry.name not in bound:
            parameters.extend(_parameters(entry, resolve, doc, tuple(injected)))
    returns = resolve.optional(raw.return_annotation)
    return Signature(label, doc, tuple(parameters), returns, inspect.iscoroutinefunction(inner))


def parameter_types(function: Callable[..., object]) -> dict[str, object]:
    """Return the resolved types of the annotated parameters; without those that cannot be resolved."""
    resolve = _Resolver(_innermost(function), getattr(function, "__name__", repr(function)), {})
    entries = inspect.signature(function).parameters.values()
    types = {entry.name: resolve.optional(entry.annotation) for entry in entries}
    return {name: kind for name, kind in types.items() if kind is not EMPTY}


def _parameters(
    entry: inspect.Parameter, resolve: _Resolver, doc: FunctionDoc, injected: tuple[type, ...]
) -> list[Parameter]:
    """Read one entry of a signature; `**kwargs: Unpack[Options]` becomes one parameter for each option."""
    description = doc.parameters.get(entry.name, ParameterDoc())
    if entry.annotation is EMPTY:
        raise ToolDefinitionError(
            f"tool {resolve.label}: parameter {entry.name!r} has no annotation",
            remedy=f"write its type, for example {entry.name}: str (Any takes every JSON value)",
        )
    annotation = resolve(entry.name, entry.annotation)
    if _is_injected(annotation, injected):
        kind: ParameterKind = "keyword" if entry.kind is entry.KEYWORD_ONLY else "positional"
        return [Parameter(entry.name, annotation, kind, injected=True)]
    if entry.kind is entry.VAR_POSITIONAL:
        return [Parameter(entry.name, annotation, "args", ABSENT, description)]
    if entry.kind is entry.VAR_KEYWORD:
        if typing_extensions.get_origin(annotation) in {typing.Unpack, typing_extensions.Unpack}:
            return _unpacked(annotation, doc)
        return [Parameter(entry.name, annotation, "kwargs", ABSENT, description)]
    kind = "keyword" if entry.kind is entry.KEYWORD_ONLY else "positional"
    return [Parameter(entry.name, annotation, kind, entry.default, description)]


def _unpacked(annotation: Any, doc: FunctionDoc) -> list[Parameter]:
    """Turn the fields of a `TypedDict` into keyword parameters."""
    (options,) = typing_extensions.get_args(annotation)
    required, hints = _typed_dict_fields(options)
    return [
        Parameter(
            name,
            _portable(hint, {}),
            "keyword",
            EMPTY if name in required else ABSENT,
            doc.parameters.get(name, ParameterDoc()),
        )
        for name, hint in hints.items()
    ]


def _is_injected(annotation: object, injected: tuple[type, ...]) -> bool:
    """Return whether a type is injected, also as `Context | None` or `Annotated[Context, ...]`."""
    origin = typing_extensions.get_origin(annotation)
    if origin is typing.Annotated:
        return _is_injected(typing_extensions.get_args(annotation)[0], injected)
    if origin in {typing.Union, types.UnionType}:
        rest = [arg for arg in typing_extensions.get_args(annotation) if arg is not type(None)]
        return bool(rest) and all(_is_injected(arg, injected) for arg in rest)
    return inspect.isclass(annotation) and issubclass(annotation, injected)


class _Resolver:
    """Resolves annotations to types, with the names that a function can see."""

    def __init__(self, function: Any, label: str, names: Mapping[str, object]) -> None:
        self.label = label
        self._globals = dict(getattr(function, "__globals__", {}))
        closure: dict[str, object] = {}
        code = getattr(function, "__code__", None)
        for name, cell in zip(
            getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=False
        ):
            try:
                closure[name] = cell.cell_contents
            except ValueError:  # the enclosing function has not assigned the name yet
                continue
        self._locals = {**names, **closure}

    def __call__(self, name: str, annotation: object) -> object:
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints = typing_extensions.get_type_hints(holder, self._globals, self._locals, include_extras=True)
        except NameError as error:
            raise UnresolvedAnnotation(
                f"tool {self.label}: parameter {name!r} is annotated {annotation!r}, but {error}",
                remedy="import the name at run time (not under TYPE_CHECKING) or define it before the tool",
            ) from error
        except Exception as error:  # an annotation is any expression and can fail in any way
            raise ToolDefinitionError(
                f"tool {self.label}: annotation {annotation!r} of parameter {name!r} is not a type: {error}"
            ) from error
        return _portable(hints[name], {})

    def optional(self, annotation: object) -> object:
        """Resolve the annotation of the result; return `EMPTY` on failure, since it is only a description."""
        if annotation is EMPTY:
            return EMPTY
        try:
            return self("return", annotation)
        except ToolDefinitionError:
            return EMPTY


def _innermost(function: Any) -> Any:
    """Return the plain function under partials, methods, wrappers and callable objects."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType | staticmethod | classmethod):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif not inspect.isroutine(function) and not inspect.isclass(function) and callable(function):
            function = type(function).__call__
        else:
            return function


def _docstring(function: Any, inner: Any) -> str | None:
    """Return the docstring the author wrote, not the one of `functools.partial` or of a type."""
    if inspect.isroutine(function):
        return inspect.getdoc(function)
    return inspect.getdoc(inner) or (
        None if isinstance(function, functools.partial) else type(function).__doc__
    )


def _bound_keywords(function: object) -> frozenset[str]:
    bound: set[str] = set()
    while isinstance(function, functools.partial):
        bound.update(function.keywords)
        function = function.func
    return frozenset(bound)


def _portable(annotation: Any, seen: dict[type, type]) -> Any:
    """Replace types that pydantic reads differently from what the author means.

    Pydantic does not accept `typing.TypedDict` on Python 3.11, and it would check an `Iterable` only while
    the function uses it, so an `Iterable` becomes a list.
    """
    if typing.is_typeddict(annotation):
        return _portable_typed_dict(annotation, seen)
    origin, args = typing_extensions.get_origin(annotation), typing_extensions.get_args(annotation)
    if origin is None or origin is Literal or not args:
        return annotation
    if origin is typing.Annotated:
        first, *metadata = args
        inner = _portable(first, seen)
        return annotation if inner is first else typing.Annotated[(inner, *metadata)]
    if origin in {collections.abc.Iterable, collections.abc.Generator}:
        return list[_portable(args[0], seen)]
    swapped = tuple(_portable(arg, seen) if not isinstance(arg, list) else arg for arg in args)
    if all(new is old for new, old in zip(swapped, args, strict=True)):
        return annotation
    if origin in {typing.Union, types.UnionType}:
        return typing.Union[swapped]  # noqa: UP007 - built from a tuple
    return origin[swapped[0] if len(swapped) == 1 else swapped]


def _portable_typed_dict(annotation: Any, seen: dict[type, type]) -> type:
    if type(annotation).__module__ != "typing" or sys.version_info >= (3, 12):
        return annotation
    if annotation not in seen:
        required, hints = _typed_dict_fields(annotation)
        make: Any = typing_extensions.TypedDict
        twin = make(annotation.__name__, {})
        seen[annotation] = twin
        twin.__doc__ = annotation.__doc__
        twin.__module__ = annotation.__module__
        twin.__annotations__ = {name: _portable(hint, seen) for name, hint in hints.items()}
        twin.__required_keys__ = frozenset(required)
        twin.__optional_keys__ = frozenset(hints) - required
    return seen[annotation]


def _typed_dict_fields(annotation: Any) -> tuple[frozenset[str], dict[str, Any]]:
    """Return the required keys and the field types; `Required` in annotations written as text counts too."""
    hints = typing_extensions.get_type_hints(annotation, include_extras=True)
    required = set(annotation.__required_keys__)
    bare: dict[str, Any] = {}
    for name, hint in hints.items():
        origin = typing_extensions.get_origin(hint)
        if origin in {typing.NotRequired, typing_extensions.NotRequired}:
            required.discard(name)
        elif origin in {typing.Required, typing_extensions.Required}:
            required.add(name)
        else:
            bare[name] = hint
            continue
        bare[name] = typing_extensions.get_args(hint)[0]
    return frozenset(required), bare
