"""Play classes that were written for TRL's `environment_factory`.

Such a class has `reset(**fields)`, which may return the first observation, and methods with type hints and
docstrings, each of which is a tool. A reward function takes the values of one episode (`environment` is the
object), or lists as TRL passes them (`environments`, `prompts`, `completions`, the task's fields).

Such classes have no seeds and cannot end an episode: it ends with the model's final answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agentenv.core.fields import wanted_by
from agentenv.core.threads import off_loop
from agentenv.envs.rewards.reward import call_reward, takes_lists
from agentenv.envs.tool_env import ToolEnv
from agentenv.tools.tool import Tool

__all__ = ["ToolMethods", "tool_env"]

_NO_TOOLS = frozenset({"reset", "close", "reward", "is_done"})


class ToolMethods(ToolEnv):
    """Plays an object with `reset` and tool methods.

    Public methods other than `reset`, `close`, `reward` and `is_done` are tools. If the task has a field
    `prompt` (text or chat messages), it is shown before the text that `reset` returns.
    """

    def __init__(self, inner: Any, reward: Callable[..., Any] | None = None) -> None:
        self.inner = inner
        self._reward = reward
        self.tools = tuple(Tool.from_function(method) for method in _methods_of(inner))

    async def start(self, **fields: Any) -> Any:
        """Call `reset` with those task fields that it takes, and put the prompt before its result."""
        first = await _called(self.inner.reset, _taken_by(self.inner.reset, fields))
        prompt = fields.get("prompt", "")
        if isinstance(prompt, str):
            words = [part for part in (prompt, first) if isinstance(part, str) and part]
            return "\n\n".join(words)
        return (
            [*prompt, {"role": "user", "content": first}]
            if isinstance(first, str) and first
            else list(prompt)
        )

    async def reward(self, **fields: Any) -> Any:
        """Call the reward function, or the object's method `reward`, or read its attribute `reward`."""
        score = self._reward or getattr(self.inner, "reward", 0.0)
        if not callable(score):
            return score
        offered = {**self._offered(str(self.context.state.get("stop_reason", ""))), "environment": self.inner}
        if takes_lists(score):
            return await call_reward(score, offered, fields, where="the reward function")
        return await _called(score, _taken_by(score, {**fields, **offered}))

    async def is_done(self) -> bool:
        """Return the result of the object's `is_done`, or False if it has none."""
        ask = getattr(self.inner, "is_done", None)
        return bool(await _called(ask, {})) if callable(ask) else False

    async def close(self) -> None:
        """Call the object's `close`, if it has one."""
        close = getattr(self.inner, "close", None)
        if callable(close):
            await _called(close, {})


def tool_env(
    factory: Callable[[], Any], reward: Callable[..., Any] | None = None
) -> Callable[[], ToolMethods]:
    """Turn an environment factory of TRL into an entry point for `ae.register`."""

    def make() -> ToolMethods:
        return ToolMethods(factory(), reward)

    make.__name__ = make.__qualname__ = getattr(factory, "__name__", "make")
    make.__module__ = getattr(factory, "__module__", __name__)
    return make


def _methods_of(inner: Any) -> list[Callable[..., Any]]:
    return [
        method
        for name, method in inspect.getmembers(inner, callable)
        if not name.startswith("_") and name not in _NO_TOOLS and not isinstance(method, type)
    ]


def _taken_by(function: Callable[..., Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    wanted = wanted_by(function)
    return (
        dict(fields) if wanted.takes_rest else {name: fields[name] for name in wanted.names if name in fields}
    )


async def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await off_loop(function, **arguments)
