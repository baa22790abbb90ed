"""Environments of verifiers: `verifiers:NAME`, where NAME is a name for its `load_environment`.

The adapter plays multi-turn environments (`SingleTurnEnv`, `ToolEnv` and other subclasses of
`MultiTurnEnv`, and groups of them), which verifiers has up to version 0.3. Rows of the environment's data set
are the tasks, its `env_response` is the observation, its stop conditions end the episode, and its rubric
scores it.

verifiers has no seeds and no snapshots, runs tools one after another on the event loop, does not say which
tool answers are errors, and scores a reward function that raises as 0. The adapter raises an error for
environments that call the model themselves or rewrite earlier messages; for prompts that are no messages; and
for rubrics that score a group of episodes. `task_set` plays task sets of verifiers.v1.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, cast

from agentenv.core import (
    DependencyMissing,
    EnvironmentMisuse,
    Message,
    Outcome,
    SandboxCrashed,
    TaskError,
    UnknownEnvironment,
    UsageError,
    text_of,
)
from agentenv.envs import Env, spaces

__all__ = ["Verifiers", "rows", "splits"]

_CUT = frozenset(
    {"max_turns_reached", "timeout_reached", "prompt_too_long", "max_total_completion_tokens_reached"}
)
"""Stop conditions that are limits; the other conditions mean that the task is over."""


class Verifiers(Env):
    """Plays an environment of verifiers.

    Args:
        source: name of an installed environment, or an environment object.
        arguments: arguments of `load_environment`, if `source` is a name.

    Raises:
        UnknownEnvironment: There is no such environment.
        UsageError: The environment cannot be played turn by turn.
    """

    observation_space = spaces.Chat()
    action_space = spaces.Action()

    def __init__(self, source: Any, **arguments: Any) -> None:
        named = isinstance(source, str)
        self._source = _loaded(source, json.dumps(arguments, sort_keys=True)) if named else source
        self._infra_error: type[Exception] = _check(self._source)
        self._inner = self._source
        self._state: Any = None
        self._shown: list[Any] = []

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of the episode's tools."""
        offered = self._inner.tool_defs if self._state is None else self._state["tool_defs"]
        return [_schema(tool) for tool in offered or ()]

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Set up the row's state and return its prompt."""
        await self._clean()
        inner, row = _chosen(self._source, self.task)
        self._inner = inner
        self._state = await inner.init_state(row, _no_model(), "agentenv")
        changed = await self._asked(inner.setup_state(self._state))
        self._state = self._state if changed is None else changed
        if await inner.is_completed(self._state):
            raise EnvironmentMisuse(
                f"{self.env_id}: the episode is over before the first turn ({self._why()})"
            )
        self._shown = await self._prompt()
        return [_ours(message) for message in self._shown], {}

    async def step(self, action: Message) -> Any:
        """Record the model's message, and return the environment's answer."""
        inner, state = self._inner, self._state
        await inner.add_model_response(state, self._shown, _response(action))
        new: list[Any] = []
        if not await inner.is_completed(state):
            new = await self._answer()
        over = bool(state["is_completed"])
        cut = over and state["stop_condition"] in _CUT and inner.max_turns != 1
        return [_ours(message) for message in new], 0.0, over and not cut, cut, {}

    async def finish(self, stop_reason: str) -> Outcome:
        """Score the episode with the rubric; the rubric's metrics are the named parts."""
        state = self._state
        if not state["is_completed"]:
            state.update(is_completed=True, stop_condition=stop_reason)
        inner = self._inner
        await inner.cleanup(state)
        self._state = None
        if not inner.score_rollouts:
            return Outcome(None)
        await inner.rubric.score_rollout(state)
        await inner.rubric.cleanup(state)
        return Outcome(float(state["reward"]), {name: float(part) for name, part in state["metrics"].items()})

    async def close(self) -> None:
        """Free the resources of an unfinished episode."""
        await self._clean()

    async def _answer(self) -> list[Any]:
        """Get the next prompt and return its new messages."""
        state = self._state
        prompt = await self._prompt()
        if state.get("final_env_response") is not None:
            await self._inner.is_completed(state)
            return _normal(state["final_env_response"])
        old = len(self._shown)
        if prompt[:old] != self._shown:
            raise EnvironmentMisuse(
                f"{self.env_id} rewrites messages that the model was already shown, so it cannot be played "
                "turn by turn"
            )
        self._shown = prompt
        return prompt[old + 1 :]

    async def _prompt(self) -> list[Any]:
        return _normal(await self._asked(self._inner.get_prompt_messages(self._state)))

    async def _asked(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except self._infra_error as error:
            raise SandboxCrashed(f"{self.env_id}: {type(error).__name__}: {error}") from error

    def _why(self) -> str:
        error = self._state.get("error")
        return str(self._state["stop_condition"]) if error is None else f"{type(error).__name__}: {error}"

    async def _clean(self) -> None:
        state, self._state = self._state, None
        if state is not None:
            await self._inner.cleanup(state)


def _chosen(inner: Any, task: Mapping[str, object]) -> tuple[Any, dict[str, object]]:
    """Return the environment that plays a task, and the row as it gets it; a group names it in the row."""
    row = dict(task)
    while isinstance(inner, _package().EnvGroup):
        given = row.pop("info", None) or {}
        info: dict[str, Any] = json.loads(given) if isinstance(given, str) else dict(cast("Any", given))
        route = info.pop("env_id", None) or inner.env_names[:1]
        first, *rest = [route] if isinstance(route, str) else route
        inner = inner.env_map[first]
        info |= {"env_id": rest[0] if len(rest) == 1 else rest} if rest else {}
        row |= {"info": info} if info else {}
    return inner, row


def _package() -> Any:
    """Return the package verifiers.

    Raises:
        DependencyMissing: The package is not installed, or its version has no such environments.
    """
    remedy = "pip install 'verifiers>=0.1.14,<0.4' into an environment of its own"
    try:
        package: Any = importlib.import_module("verifiers")
    except ImportError as error:
        raise DependencyMissing(
            f"verifiers:NAME needs the package verifiers, which cannot be imported: {error}", remedy=remedy
        ) from error
    try:
        package.MultiTurnEnv  # noqa: B018 - the package loads the class when it is first accessed
    except (ImportError, AttributeError) as error:
        raise DependencyMissing(
            "verifiers:NAME names no task set of verifiers.v1, and needs a version of verifiers whose "
            "environments can be played step by step; version 0.4 has none",
            remedy=remedy,
        ) from error
    return package


@lru_cache(maxsize=64)
def _loaded(name: str, arguments: str) -> Any:
    """Load an environment; it is cached, because its objects keep no state of an episode."""
    package = _package()
    try:
        return package.load_environment(name, **json.loads(arguments))
    except ValueError as error:
        raise UnknownEnvironment(
            f"verifiers has no environment {name!r}: {error}",
            remedy="install its package, with `prime env install` or, from a folder, `vf-install`",
        ) from error
    except Exception as error:
        # An environment's own code runs here; what it raises is told like any other wrong name.
        raise UsageError(
            f"verifiers cannot load the environment {name!r}: {type(error).__name__}: {error}",
            remedy="give what the error names, such as a package or a key in the environment's variables",
        ) from error


def splits(name: str) -> list[str]:
    """Load an environment and return the splits for which it has tasks.

    Raises:
        UnknownEnvironment: There is no such environment.
        UsageError: The environment cannot be loaded, or not be played turn by turn.
        DependencyMissing: verifiers is not installed.
    """
    inner = _loaded(name, "{}")
    _check(inner)
    sources = {"train": inner.dataset_source, "test": inner.eval_dataset_source}
    return [split for split, source in sources.items() if source is not None]


def rows(name: str, split: str) -> list[dict[str, object]]:
    """Return the tasks of a split.

    Raises:
        TaskError: The split has no tasks.
    """
    inner = _loaded(name, "{}")
    rows = inner.get_dataset() if split == "train" else inner.get_eval_dataset()
    tasks: list[dict[str, object]] = [{"id": f"{split}-{row['example_id']}", **row} for row in rows]
    if not tasks:
        raise TaskError(f"verifiers:{name} has no rows in its split {split!r}")
    return tasks


def _check(inner: Any) -> type[Exception]:
    """Return the package's class of infrastructure errors.

    Raises:
        UsageError: The environment cannot be played step by step by another runner.
    """
    package = _package()
    what = type(inner).__name__
    if isinstance(inner, package.EnvGroup):
        checked = [_check(each) for each in inner.envs]
        return checked[-1]
    if not isinstance(inner, package.MultiTurnEnv):
        raise UsageError(
            f"{what} is not a MultiTurnEnv of verifiers",
            remedy="pass what its load_environment returns, or its name: verifiers:NAME",
        )
    if inner.message_type != "chat":
        raise UsageError(
            f"{what} has message_type={inner.message_type!r}, whose prompts are no chat messages",
            remedy="make it with message_type='chat'; if load_environment takes it: -o env.message_type=chat",
        )
    base = package.MultiTurnEnv
    for method in ("rollout", "get_model_response"):
        if getattr(type(inner), method) is not getattr(base, method):
            raise UsageError(
                f"{what} overrides {method}() and calls the model itself, so it cannot be played step by step"
            )
    if inner.requires_group_rollouts:
        raise UsageError(
            f"the rubric of {what} scores groups of episodes", remedy="write that score as a GroupReward"
        )
    return package.InfraError


@lru_cache(maxsize=1)
def _no_model() -> Any:
    """Return the client that an episode's state needs; it raises when it is used."""
    client = importlib.import_module("verifiers.clients").Client

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise UsageError("the environment calls the model itself, which only the runner may do")

    methods: dict[str, Callable[..., Any]] = dict.fromkeys(
        [*client.__abstractmethods__, "get_response"], refuse
    )
    return type("NoModel", (client,), methods)(None)


def _normal(messages: Any) -> list[Any]:
    utils = importlib.import_module("verifiers.utils.message_utils")
    return list(utils.normalize_messages(messages, field_name="messages"))


def _response(action: Message) -> Any:
    """Return the model's message as a response object of verifiers."""
    types = importlib.import_module("verifiers.types")
    calls = [
        types.ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in action.get("tool_calls", [])
    ]
    message = types.ResponseMessage(
        content=text_of(action),
        reasoning_content=action.get("reasoning_content"),
        tool_calls=calls or None,
        finish_reason="tool_calls" if calls else "stop",
        is_truncated=False,
    )
    return types.Response(id="agentenv", created=0, model="agentenv", message=message)


def _ours(message: Any) -> Message:
    """Return a message of verifiers as a chat message."""
    converted: Any = message.model_dump(mode="json", exclude_none=True)
    if calls := converted.get("tool_calls"):
        converted["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return converted


def _schema(offered: Any) -> dict[str, Any]:
    function = {
        "name": offered.name,
        "description": offered.description,
        "parameters": offered.parameters,
    }
    return {"type": "function", "function": function}
