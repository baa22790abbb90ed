"""Play classes that were written for TRL's `environment_factory`, as TRL 1.16 reads them.

1. Every function of the class is a tool, except `reset`, `get_reward` and what begins with an underscore.
   What a tool returns is shown as `str` of it, or as content parts; an exception as `{'error': ...}`.
2. `reset` gets the task's fields. What it returns is appended to the last message of the field `prompt`.
3. The reward is the sum of `get_reward()` and of the reward functions, which take lists
   (`agentenv.envs.rewards.batched`). One of them must be there, or an attribute `reward` of the object.

Such classes have no seeds and cannot end an episode: it ends with the model's final answer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from agentenv.core.errors import InfrastructureError, TaskError, ToolError, UsageError
from agentenv.core.faults import message_of
from agentenv.core.fields import wanted_by
from agentenv.core.messages import image_parts
from agentenv.envs.rewards.reward import Reward
from agentenv.envs.tasks import TaskSet
from agentenv.envs.tool_env import ToolEnv
from agentenv.tools.content import parts_of
from agentenv.tools.tool import Tool

__all__ = ["ToolMethods", "tool_env"]

_NO_TOOLS = frozenset({"reset", "get_reward"})


class _TrlReward(Reward):
    """A reward function that takes lists, whatever the names of its parameters."""

    @property
    def batched(self) -> bool:
        return True


class ToolMethods(ToolEnv):
    """Plays an object with `reset` and tool methods; the module's docstring has the rules.

    Args:
        inner: the object, or several by name, of which the task's field `environment` chooses one.
        reward: reward function of TRL, or several.

    Raises:
        UsageError: An object has no method `reset`.
    """

    def __init__(
        self, inner: Any, reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None
    ) -> None:
        self._choices: Mapping[str, Any] | None = inner if isinstance(inner, Mapping) else None
        self.raw_results: dict[str, list[Any]] = {}
        """Lists that tools returned, by the text that the model was shown; reward functions get the lists."""
        functions = () if reward is None else (reward,) if callable(reward) else tuple(reward)
        self._rewards = tuple(map(_TrlReward, functions))
        for kind, one in {type(one): one for one in (self._choices or {"": inner}).values()}.items():
            self._play(one)
            if "get_reward" in _functions_of(one):
                score = functools.partial(self._get_reward, kind)
                self._rewards += (_TrlReward(score, name=kind.__name__),)
            elif not functions and inspect.getattr_static(one, "reward", None) is not None:
                self._rewards += (_TrlReward(self._read_reward, name="reward"),)

    def _play(self, inner: Any) -> None:
        if not callable(getattr(inner, "reset", None)):
            raise UsageError(f"{type(inner).__name__} has no method reset(), which begins an episode")
        self.inner = inner
        self.tools = tuple(
            Tool.from_function(self._shown(getattr(inner, name)))
            for name in _functions_of(inner)
            if not name.startswith("_") and name not in _NO_TOOLS
        )
        vars(self).pop("_toolbox", None)

    def bind(self, env_id: str, *, tasks: TaskSet | None, rewards: Sequence[Reward], **others: Any) -> Self:
        """Apply a specification; its reward functions are TRL's, too, if they take any column.

        Raises:
            UsageError: Nothing scores the episodes.
        """
        given = [
            _TrlReward(one.function, one.weight, one.name, one.timeout_s)
            if type(one) is Reward and wanted_by(one.function).takes_rest
            else one
            for one in rewards
        ]
        if not (scored := (*self._rewards, *given)):
            raise UsageError(
                f"{env_id} has no reward, and TRL refuses {type(self.inner).__name__} without one, too",
                remedy="write get_reward(), or pass reward functions: tool_env(factory, reward)",
            )
        return super().bind(env_id, tasks=tasks, rewards=scored, **others)

    async def start(self, **fields: Any) -> Any:
        """Call `reset` with those task fields that it takes, and append its result to the prompt."""
        if self._choices is not None:
            name = str(fields.pop("environment", ""))
            if name not in self._choices:
                raise TaskError(
                    f"the task's field environment is {name!r}", remedy=f"one of: {', '.join(self._choices)}"
                )
            self._play(self._choices[name])
        wanted = wanted_by(self.inner.reset)
        taken = fields if wanted.takes_rest else {name: fields[name] for name in wanted.names & fields.keys()}
        observation = await self._call(self.inner.reset, **taken)
        prompt = fields.get("prompt") or ""
        rows = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages: list[Any] = [{**row, "content": _in_openai_form(row["content"])} for row in rows]
        if observation is not None:
            messages[-1]["content"] = self._appended(messages[-1].get("content"), observation)
        self.raw_results.clear()
        self.sends_images = bool(image_parts(messages))
        return messages if any(message.get("content") for message in messages) else None

    def _appended(self, content: Any, observation: object) -> Any:
        if isinstance(observation, str):
            return content + (observation if isinstance(content, str) else [_text(observation)])
        if parts := parts_of(observation):
            return ([_text(content)] if isinstance(content, str) and content else list(content)) + parts
        raise UsageError(
            f"{type(self.inner).__name__}.reset() returned {observation!r:.200}",
            remedy="TRL appends text or a list of content parts to the prompt",
        )

    async def _get_reward(self, kind: type) -> list[Any]:
        return [await self._call(self.inner.get_reward) if type(self.inner) is kind else None]

    async def _read_reward(self) -> list[Any]:
        return [self.inner.reward]

    def _shown(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method whose results and exceptions are written as TRL writes them."""

        def content(result: object) -> object:
            if parts := parts_of(result) or parts_of([result]):
                return parts
            if isinstance(result, list):
                self.raw_results[str(result)] = result
            return str(result)

        if inspect.iscoroutinefunction(method):

            async def awaited(*args: Any, **kwargs: Any) -> object:
                with _told():
                    return content(await method(*args, **kwargs))

            shown = functools.wraps(method)(awaited)
        else:

            def called(*args: Any, **kwargs: Any) -> object:
                with _told():
                    return content(method(*args, **kwargs))

            shown = functools.wraps(method)(called)
        shown.__qualname__ = method.__name__  # bound already, and no longer a method of its class
        return shown


def tool_env(
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]],
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
) -> Callable[[], ToolMethods]:
    """Turn an environment factory of TRL, or several by name, into an entry point for `ae.register`."""

    def make() -> ToolMethods:
        inner = factory() if callable(factory) else {name: each() for name, each in factory.items()}
        return ToolMethods(inner, reward)

    make.__name__ = make.__qualname__ = getattr(factory, "__name__", "make")
    make.__module__ = getattr(factory, "__module__", __name__)
    return make


def _functions_of(inner: object) -> dict[str, Any]:
    # Of the class, as TRL does it: reading an object's members would run its properties.
    return dict(inspect.getmembers(type(inner), inspect.isfunction))


def _text(text: str) -> Mapping[str, str]:
    return {"type": "text", "text": text}


def _in_openai_form(content: Any) -> Any:
    return (parts_of(content) or content) if isinstance(content, list) else content


@contextmanager
def _told() -> Generator[None]:
    try:
        yield
    except (ToolError, InfrastructureError):
        raise
    except Exception as error:  # the boundary of foreign code, whose exceptions the model reads
        raise ToolError(str({"error": message_of(error)})) from error
