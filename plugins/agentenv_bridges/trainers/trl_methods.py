"""Make a class for TRL's `environment_factory` from an environment: it has `reset`, and methods as tools.

TRL reads a tool's schema from the type hints and the Google docstring of a method, so this module writes both
from the environment's schema. The arguments of every call are still checked by agentenv. TRL's loop does not
report its end and the model's answer; both are read from the completion when the reward is computed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

from agentenv.core import (
    Action,
    Context,
    EpisodeEnv,
    Message,
    Outcome,
    ResetResult,
    RunLimits,
    StepResult,
    Task,
    ToolCall,
    UsageError,
    derive_seed,
    logger,
    run_sync,
    text_of,
)
from agentenv.envs import EnvSpec, TaskSet

__all__ = ["TrlEnvironment", "environment_class"]

log = logger(__name__)
T = TypeVar("T")

PLAIN = {"string": str, "integer": int, "number": float, "boolean": bool, "object": dict, "array": list}


class TrlEnvironment:
    """Plays one episode at a time of an environment, driven by TRL's tool loop.

    To TRL every public method of the class except `reset` is a tool, so all other methods are private.
    """

    _spec: EnvSpec
    _tasks: TaskSet
    _limits: RunLimits
    _seed: int

    def __init__(self) -> None:
        self._env: EpisodeEnv | None = None
        self._calls = 0
        self._reward = 0.0
        self._over = ""
        """Stop reason with which the environment ended the episode; empty while it continues."""
        self._failed = False

    def reset(self, *, task_id: str, prompt: Any = (), **_: Any) -> str:
        """Begin the task of a row and return its first observation."""
        old, self._env = self._env, None
        if old is not None:
            self._guarded("its end", old.shutdown())
        self._calls, self._reward, self._over, self._failed = 0, 0.0, "", False
        begun = self._guarded("reset", self._begin(self._tasks[task_id]))
        return "" if begun is None else _first_text(begun.messages, prompt, self._spec.id)

    def _call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Run a tool call and return the text that the model is shown."""
        if self._env is None or self._failed or self._over:
            return "not run: the environment has finished"
        answer = self._guarded(f"the tool {name}", self._answer(self._env, name, json.dumps(arguments)))
        return "the environment has failed" if answer is None else answer

    def _finish(self, completion: Sequence[Message]) -> float | None:
        """End the episode with the model's last message and return its reward; None if it failed."""
        if self._env is None or self._failed:
            return None
        last: Message = completion[-1] if completion else {"role": "tool"}
        outcome = self._guarded("the reward", self._end(self._env, last))
        return None if outcome is None or outcome.reward is None else self._reward + outcome.reward

    def _guarded(self, where: str, work: Coroutine[Any, Any, T]) -> T | None:
        """Run the environment's code; an exception fails only this episode."""
        try:
            return run_sync(work)
        except Exception:  # an error of one environment must not end TRL's training
            log.warning("an episode of %s failed at %s", self._spec.id, where, exc_info=True)
            self._failed = True
            return None

    async def _begin(self, task: Task) -> ResetResult:
        context = Context(seed=derive_seed(self._seed, self._spec.id, task.id), limits=self._limits)
        self._env = self._spec.make()
        return await self._env.begin(task.data, seed=context.seed, context=context)

    async def _answer(self, env: EpisodeEnv, name: str, arguments: str) -> str:
        self._calls += 1
        call = ToolCall(f"call_{self._calls}", name, arguments)
        step = await self._advance(env, Action({"role": "assistant", "content": ""}, (call,)))
        if not self._over and await env.is_finished():
            self._over = "env_done"
        return text_of(step.tool_results[0].to_message())

    async def _end(self, env: EpisodeEnv, last: Message) -> Outcome:
        if not self._over and last["role"] == "assistant" and not last.get("tool_calls"):
            await self._advance(env, Action({"role": "assistant", "content": text_of(last)}))
            self._over = self._over or "final_answer"
        return await env.end(self._over or "max_turns")

    async def _advance(self, env: EpisodeEnv, action: Action) -> StepResult:
        step = await env.advance(action)
        self._reward += step.reward
        if step.terminated or step.truncated:
            self._over = "env_terminated" if step.terminated else "env_truncated"
        return step


def environment_class(
    spec: EnvSpec, tasks: TaskSet, *, limits: RunLimits | None, seed: int
) -> type[TrlEnvironment]:
    """Return the class of an environment; see `agentenv_bridges.trainers.trl.environment_factory`.

    Raises:
        UsageError: TRL's tool loop cannot play the environment.
    """
    probe = spec.make()
    try:
        schemas = list(probe.tool_schemas)
        ends_on_text = probe.ends_on_text
    finally:
        run_sync(probe.shutdown())
    if spec.user is not None or not ends_on_text or not schemas:
        raise UsageError(
            f"{spec.id} has no tools or answers the model's text, which TRL's tool loop cannot play",
            remedy="use rollout_func",
        )
    members: dict[str, Any] = {
        "_spec": spec,
        "_tasks": tasks,
        "_limits": (limits or RunLimits()).stricter(spec.limits),
        "_seed": seed,
    }
    for schema in schemas:
        function: Any = schema["function"]
        members[function["name"]] = _method(function)
    return type(spec.id.rpartition("/")[2].partition("-")[0], (TrlEnvironment,), members)


def _method(function: Mapping[str, Any]) -> Callable[..., str]:
    """Return a method with the name, type hints and docstring of a tool's schema."""
    name: str = function["name"]

    def call(self: Any, **arguments: Any) -> str:
        return self._call(name, arguments)

    properties: Mapping[str, Any] = function["parameters"].get("properties", {})
    required = set(function["parameters"].get("required", ()))
    hints = {key: _hint(value) for key, value in properties.items()}
    parameters = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hint,
            default=inspect.Parameter.empty if key in required else None,
        )
        for key, hint in hints.items()
    ]
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method: Any = call
    method.__name__, method.__qualname__ = name, f"TrlEnvironment.{name}"
    method.__signature__ = inspect.Signature([receiver, *parameters], return_annotation=str)
    method.__annotations__ = {**hints, "return": str}
    method.__doc__ = _docstring(function.get("description", name), properties)
    return method


def _hint(schema: Mapping[str, Any]) -> Any:
    """Return the type hint that TRL turns into this schema; details of nested parts are lost."""
    if "enum" in schema:
        return Literal[tuple(schema["enum"])]
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    if options:
        hint = _hint(options[0])
        for option in options[1:]:
            hint = hint | _hint(option)
        return hint | None if len(options) < len(schema["anyOf"]) else hint
    if schema.get("type") == "array" and "items" in schema:
        return list[_hint(schema["items"])]
    return PLAIN.get(schema.get("type", "object"), dict)


def _docstring(description: str, properties: Mapping[str, Any]) -> str:
    lines = [description or "A tool."]
    if properties:
        lines += ["", "Args:"]
        lines += [
            f"    {key}: {' '.join(str(value.get('description') or key).split())}"
            for key, value in properties.items()
        ]
    return "\n".join(lines)


def _first_text(messages: Sequence[Message], prompt: Any, env_id: str) -> str:
    """Return the first observation as the text that TRL appends to the row's last message."""
    system = [text_of(message) for message in messages if message["role"] == "system"]
    row = prompt if isinstance(prompt, list) else []
    shown = [text_of(message) for message in row if message["role"] == "system"]
    if system != shown:
        raise UsageError(
            f"a row lacks the system prompt of {env_id}", remedy="make rows with environment_rows(spec)"
        )
    rest = [message for message in messages if message["role"] != "system"]
    if len(rest) != 1 or rest[0]["role"] != "user" or not isinstance(rest[0].get("content"), str):
        raise UsageError(
            f"{env_id} begins with {len(rest)} messages, but TRL takes the text of one user message",
            remedy="use rollout_func",
        )
    return text_of(rest[0])
