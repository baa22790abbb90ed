"""`ToolEnv`, the simplest base class of an environment: `start`, methods as tools, and `reward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from agentenv.core.episode_env import Action, Context, ResetResult
from agentenv.core.errors import TaskError, UsageError, did_you_mean
from agentenv.core.fields import arguments_for, wanted_by
from agentenv.core.messages import JsonValue, Message, ToolCall
from agentenv.envs import spaces
from agentenv.envs.advice import tell_once, unmarked_methods
from agentenv.envs.env import Env, ResetReturn, StepReturn
from agentenv.envs.names import move_tools
from agentenv.envs.rewards.reward import RESERVED_NAMES
from agentenv.tools.toolbox import Toolbox, listed

__all__ = ["ToolEnv", "check_tools", "give_tools"]


class ToolEnv(Env):
    """An environment made of tools.

    - `start(...)` gets the task's fields by name and returns the first observation. It may also
      have parameters named `task`, `context`, `state`, `seed` and `sandbox`.
    - Methods marked with `@ae.tool` are the model's tools; `tools` adds functions, and tools by their names
      in the registry, such as `("calculator", "python")`. The setting `env.tools` of a run replaces
      these. A tool may have any name. If the environment has an attribute of that name, such as `end` or
      `step`, then `self.end` stays that attribute, and only the model calls the tool.
    - `reward(...)` scores the finished episode; its arguments are filled by name.
    - `is_done()` is optional and can end the episode after a step.

    Each of them may be asynchronous. A message without tool calls ends the episode.
    """

    observation_space = spaces.Chat()
    action_space = spaces.Action()
    ends_on_text = True
    tools: Sequence[Any] = ()
    """Functions, tools or names of tools that this environment has in addition to its marked methods."""
    repair_json: bool = False
    """Repair invalid JSON in a call where that is possible (needs json-repair), and count the repairs."""

    _hooks: ClassVar[tuple[str, ...]] = (*Env._hooks, "start", "reward")  # noqa: SLF001 - of its base class

    def __init_subclass__(cls, **kwargs: object) -> None:
        move_tools(cls, ToolEnv)
        super().__init_subclass__(**kwargs)

    # To a type checker `*args: Any, **kwargs: Any` means that a subclass may choose its own parameters.

    def start(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a task and return its first observation."""
        raise UsageError(
            f"{type(self).__name__} has no start()", remedy="write one that returns the first observation"
        )

    def reward(self, *args: Any, **kwargs: Any) -> Any:
        """Score the finished episode; the reward is 0 unless a subclass overrides this method."""
        return 0.0

    def add_turn_reward(self, value: float) -> None:
        """Add a reward to the turn whose tool calls are being run."""
        self._episode.turn_reward += float(value)
        self._episode.rewarded = True

    @property
    def toolbox(self) -> Toolbox:
        """Toolbox with the tools of this instance."""
        return self._toolbox

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, JsonValue]]:
        """Schemas of the tools, in OpenAI's format."""
        return self._toolbox.schemas()

    async def begin(self, task: Mapping[str, object], *, seed: int, context: Context) -> ResetResult:
        """Start an episode on a task; see `agentenv.core.episode_env.EpisodeEnv`."""
        first = await super().begin(task, seed=seed, context=context)
        return replace(first, repair_json=True) if self.repair_json else first

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetReturn:
        """Start the task that the core has set."""
        first = await self._call(self.start, **self._start_arguments())
        self.__dict__.pop("_toolbox", None)  # `start` may have given this episode other tools
        if first is None or (isinstance(first, str) and not first):
            tell_once(
                type(self), "%s.start() returned nothing, so the model is given no task", type(self).__name__
            )
        if not len(self._toolbox) and (unmarked := unmarked_methods(type(self), ToolEnv)):
            tell_once(
                type(self),
                "%s has no tools: mark those of its methods that are tools with @ae.tool (it has %s)",
                type(self).__name__,
                ", ".join(unmarked),
            )
        return first, {}

    async def step(self, action: Message) -> StepReturn:
        """Run the message's tool calls concurrently and answer them in order."""
        episode = self._episode
        results = await self._toolbox.run(self._parsed_calls(action), episode.context)
        episode.results.update({result.tool_call_id: result for result in results})
        return [result.to_message() for result in results], episode.turn_reward, False, False, {}

    def _parsed_calls(self, message: Message) -> Sequence[ToolCall]:
        """Return the calls that were already parsed, if the author passed the message on unchanged."""
        action = self._episode.action
        if action is not None and message.get("tool_calls") == action.to_message().get("tool_calls"):
            return action.tool_calls
        return Action.of(message).tool_calls

    async def finish(self, stop_reason: str) -> Any:
        """Call `reward` with the arguments it names."""
        if not self._writes_reward:
            self._warn_without_reward()
            return 0.0
        reward = self._hook("reward")
        arguments = arguments_for(reward, self._offered(stop_reason), self.task)
        return await self._call(reward, **arguments)

    @property
    def _writes_reward(self) -> bool:
        return type(self).reward is not ToolEnv.reward or "reward" in vars(self)

    @property
    def _scores_itself(self) -> bool:
        return self._writes_reward or type(self).finish is not ToolEnv.finish or self._episode.rewarded

    @property
    def _task_readers(self) -> Sequence[Callable[..., object]]:
        return (self.start, self.reward)

    @property
    def _scorer(self) -> str:
        return "reward" if type(self).finish is ToolEnv.finish else "finish"

    def _warn_without_reward(self) -> None:
        """Log, once for each class, that nothing can give its episodes a reward."""
        cls = type(self)
        other = self._rewards or self._has_user or self._episode.rewarded or cls.step is not ToolEnv.step
        if other:
            return
        tell_once(
            cls,
            "%s has no reward, so all of its episodes score 0: write reward(), call add_turn_reward(), or "
            "register the environment with rewards=[...]",
            self.env_id,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the toolbox, which holds bound methods; it is made again when needed."""
        return {name: value for name, value in self.__dict__.items() if name != "_toolbox"}

    @cached_property
    def _toolbox(self) -> Toolbox:
        return Toolbox([*Toolbox.of(self), *listed(self.tools)], repair_json=self.repair_json)

    def _start_arguments(self) -> dict[str, object]:
        """Return the arguments of `start`.

        Raises:
            TaskError: A field of the task is missing or unknown.
        """
        wanted, task = wanted_by(self.start), self._episode.task
        context = self.context
        offered: dict[str, object] = {
            "context": context,
            "sandbox": context.sandbox,
            "seed": context.seed,
            "state": context.state,
            "task": task,
            **task,
        }
        where = f"task {self._episode.label}"
        for name in wanted.required:
            if name not in offered:
                has = ", ".join(task) or f"no fields: register the environment with tasks=[{{{name!r}: ...}}]"
                raise TaskError(
                    f"{where} lacks the field {name!r}, a parameter of {type(self).__name__}.start()",
                    remedy=f"{did_you_mean(name, task)} it has: {has}".lstrip(),
                )
        self._refuse_unknown_fields(where)
        return arguments_for(self.start, offered, task)

    def _refuse_unknown_fields(self, where: str) -> None:
        readers = [self.start, *(reward.function for reward in self._rewards)]
        if type(self).reward is not ToolEnv.reward:
            readers.append(self.reward)
        known: set[str] = {"id"}
        for reader in readers:
            wanted = wanted_by(reader)
            if wanted.takes_rest or "task" in wanted.names:
                return
            known |= wanted.names
        for name in self._episode.task:
            if name not in known:
                raise TaskError(
                    f"{where} has the field {name!r}, which is not a parameter of "
                    f"{type(self).__name__}.start() or of a reward",
                    remedy=did_you_mean(name, sorted(known - RESERVED_NAMES)),
                )


def give_tools(env: object, tools: object, *, where: str) -> None:
    """Replace the tools that an environment has in addition to its methods.

    Args:
        env: the environment.
        tools: what `ToolEnv.tools` takes, or names in one text, separated by commas.
        where: id of the environment, for the message of an error.

    Raises:
        UsageError: The environment has no place for tools.
        UnknownTool: No tool has one of the names.
    """
    if not isinstance(env, ToolEnv):
        raise _no_place(where)
    env.tools = listed(tools)
    vars(env).pop("_toolbox", None)


def check_tools(target: object, tools: object, *, where: str) -> None:
    """Find out, without making an environment, whether the tools that are named exist.

    Args:
        target: class or function that makes the environment.
        tools: tools given by a setting; None means those of the class.
        where: id of the environment, for the message of an error.

    Raises:
        UsageError: The environment has no place for tools.
        UnknownTool: No tool has one of the names.
    """
    if isinstance(target, type) and issubclass(target, ToolEnv):
        own = None if isinstance(vars(target).get("tools"), property) else target.tools
        tools = own if tools is None else tools
    elif isinstance(target, type) and tools is not None:
        raise _no_place(where)
    if tools is not None:
        Toolbox(listed(tools))


def _no_place(where: str) -> UsageError:
    return UsageError(f"{where} cannot be given tools", remedy="only a ToolEnv takes the setting tools")
