"""The parts of a run that settings name: a condenser, a simulated user and a score function.

A part is named by a short name (`summarise`), by `file.py:name` or by `module:name`. A table such as
`{name = "summarise", at = 0.5}` also has the arguments with which the part is made.

1. A name is checked when the settings are made; what it names is imported later, because importing executes
   code. A resumed run must be trusted before that.
2. A part that needs a model uses the run's own, which in a training is the policy. The argument `model`
   names another one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from agentenv.core.episode_env import EpisodeEnv
from agentenv.core.errors import UsageError, did_you_mean
from agentenv.core.fields import arguments_for, wanted_by
from agentenv.core.imports import import_object, name_of
from agentenv.core.messages import Message
from agentenv.core.settings import build
from agentenv.core.trajectory import Trajectory
from agentenv.engine.ask import TextModel
from agentenv.engine.interface import OWN_ADAPTER, ChatEngine, Engine, Sampling
from agentenv.runner.condense import Condenser, DropToolOutputs, Summarise
from agentenv.runner.plan import Score
from agentenv.runner.users import FunctionUser, ModelUser, ScriptedUser, User, UserLike

if TYPE_CHECKING:
    from agentenv.render.renderer import Renderer

__all__ = ["BUILT_IN", "PolicyModel", "check_import", "check_part", "load_parts", "part_record"]

_Make = Callable[..., object]

BUILT_IN: Mapping[str, Mapping[str, _Make]] = MappingProxyType(
    {
        "condenser": {"drop_tool_outputs": DropToolOutputs, "summarise": Summarise},
        "user": {"model": ModelUser, "scripted": ScriptedUser},
        "score": {},
    }
)
"""Short names of the parts that the library has, by kind of part."""
_MODEL_PARAMETERS = frozenset({"engine", "renderer"})
"""Parameters that receive the model; in settings they are given as `model`."""
_OBJECT = "object"
"""Key under which a run's record describes a part that has no name."""


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """The model that plays the episodes, for parts that need a model."""

    engine: Engine | ChatEngine
    renderer: Renderer | None
    adapter: str | None = OWN_ADAPTER


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that a run's options name; None for those that they do not name."""

    condenser: Condenser | None
    user: UserLike
    score: Score | None


def check_part(kind: str, value: object) -> None:
    """Check how a part is named, without importing it.

    Args:
        kind: `condenser`, `user` or `score`.
        value: the name, a table with the name, the part itself, or None.

    Raises:
        UsageError: A short name is unknown, or a table has no name.
    """
    if isinstance(value, Mapping) and _OBJECT in value:
        raise UsageError(
            f"the {kind} of this run was the Python object {value[_OBJECT]}, which has no name",
            remedy="start a new run; a run can be resumed if its parts are named, as in file.py:name",
        )
    name, _ = _split(kind, value)
    if isinstance(name, str) and ":" not in name and name not in BUILT_IN[kind]:
        known = ", ".join((*BUILT_IN[kind], "file.py:name", "module:name"))
        meant = did_you_mean(name, BUILT_IN[kind])
        raise UsageError(f"unknown {kind} {name!r}", remedy=f"{meant} known: {known}".lstrip())


def check_import(kind: str, value: object) -> None:
    """Import a part and check the names of its arguments, without making it.

    Raises:
        UsageError: The part cannot be imported, or takes no such arguments.
    """
    name, arguments = _split(kind, value)
    if name is None:
        return
    part = _found(kind, name)
    if kind == "score":
        _score(part)
    if kind == "user" and callable(part) and not isinstance(part, type | User):
        _function_user(part)
    _check_arguments(kind, name, part, arguments)


def part_record(value: object) -> object:
    """Return a part as plain values for a run's record, from which a resumed run finds it again."""
    if value is None or isinstance(value, str | Mapping):
        return cast("object", value)
    return name_of(value) or {_OBJECT: f"{type(value).__module__}.{type(value).__qualname__}"}


def load_parts(condenser: object, user: object, score: object, model: PolicyModel) -> Parts:
    """Return the parts that a run's options name.

    Raises:
        UsageError: A part cannot be imported or made, or is not what its setting needs.
    """
    made = _made("condenser", condenser, model)
    if made is not None and not isinstance(made, Condenser):
        raise UsageError(f"{made!r:.200} is not a condenser", remedy="name a subclass of Condenser")
    return Parts(made, _user(user, model), None if score is None else _score(_found("score", score)))


def _split(kind: str, value: object) -> tuple[object, dict[str, Any]]:
    """Return the name of a part, or the part itself, and the arguments that a table has."""
    if not isinstance(value, Mapping):
        return value, {}
    table = dict(cast("Mapping[str, Any]", value))
    if "name" not in table:
        raise UsageError(f"the {kind} {table} has no name", remedy=f"write runner.{kind}.name=NAME as well")
    return table.pop("name"), table


def _found(kind: str, name: object) -> object:
    """Return what a name names; anything that is not text is the part itself."""
    if not isinstance(name, str):
        return name
    return BUILT_IN[kind].get(name) or import_object(name, where=f"runner.{kind}")


def _check_arguments(kind: str, name: object, part: object, arguments: Mapping[str, Any]) -> None:
    if not arguments:
        return
    if not callable(part) or isinstance(part, Condenser | User):
        raise UsageError(f"the {kind} {name!r} is an object that takes no arguments: {dict(arguments)}")
    parameters = [item for item in inspect.signature(part).parameters.values() if item.name != "task"]
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        return
    names = [item.name for item in parameters]
    known = [item for item in names if item not in _MODEL_PARAMETERS] + ["model"] * ("engine" in names)
    for argument in arguments:
        if argument not in known:
            meant = did_you_mean(argument, known)
            raise UsageError(
                f"the {kind} {name!r} takes no argument {argument!r}",
                remedy=f"{meant} arguments: {', '.join(known) or 'none'}".lstrip(),
            )


def _made(kind: str, value: object, model: PolicyModel) -> object:
    """Return the part itself: made with its arguments if a class or function is named."""
    name, arguments = _split(kind, value)
    if name is None:
        return None
    part = _found(kind, name)
    _check_arguments(kind, name, part, arguments)
    if not callable(part) or isinstance(part, Condenser | User):
        return part
    wanted = inspect.signature(part).parameters
    if "sampling" in wanted and isinstance(arguments.get("sampling"), Mapping):
        arguments["sampling"] = build(Sampling, arguments["sampling"])
    if "engine" in wanted:
        other = arguments.pop("model", None)
        arguments["engine"] = (
            TextModel(model.engine, model.renderer, role=f"a {kind}", adapter=model.adapter)
            if other is None
            else TextModel.load(other, role=f"a {kind}")
        )
    try:
        return part(**arguments)
    except TypeError as error:
        shown = {key: given for key, given in arguments.items() if key not in _MODEL_PARAMETERS}
        raise UsageError(f"the {kind} {name!r} cannot be made with {shown}: {error}") from error


def _user(value: object, model: PolicyModel) -> UserLike:
    name, arguments = _split("user", value)
    part = None if name is None else _found("user", name)
    if part is None or isinstance(part, type | User):
        user = _made("user", value, model)
        if user is None or isinstance(user, User):
            return user
    elif callable(part) and not arguments:
        return _function_user(part) or cast("UserLike", part)
    raise UsageError(
        f"{name!r:.200} is not a user",
        remedy="name a subclass of User, a function of the messages and the task, or a function of the task",
    )


def _function_user(part: _Make) -> User | None:
    """Return a user whose answers the function gives; None if it has no parameter `messages`.

    Raises:
        UsageError: It needs something else than `messages` and `task`.
    """
    if "messages" not in wanted_by(part).names:
        return None
    arguments_for(part, dict.fromkeys(("messages", "task")), {})

    def answer(messages: Sequence[Message], task: Mapping[str, object]) -> Any:
        return part(**arguments_for(part, {"messages": messages, "task": task}, {}))

    return FunctionUser(answer)


def _score(part: object) -> Score:
    """Return a score of the runner, made from a function that names the parameters that it needs.

    Raises:
        UsageError: It is not a function, or needs something else than `trajectory`, `env` and `task`.
    """
    if not callable(part):
        raise UsageError(f"{part!r:.200} is not a function", remedy="name a function that returns a number")
    label = getattr(part, "__name__", type(part).__name__)
    arguments_for(part, dict.fromkeys(("trajectory", "env", "task")), {})

    async def score(
        trajectory: Trajectory, env: EpisodeEnv, task: Mapping[str, object]
    ) -> tuple[float | None, Mapping[str, float | None]]:
        given: Any = part(**arguments_for(part, {"trajectory": trajectory, "env": env, "task": task}, {}))
        if inspect.isawaitable(given):
            given = await given
        return given if isinstance(given, tuple) else (given, {label: given})

    return score
