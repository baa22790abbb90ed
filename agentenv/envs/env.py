"""Environments: Gymnasium environments whose observations are text or chat messages.

1. One asynchronous core (`begin`, `advance`, `is_finished`, `end`, `shutdown`) plays an episode for
   the runner. Gymnasium's `reset`, `step` and `close` are a synchronous view on it: the message or text
   that a Gymnasium user passes is read once, there.
2. Authors write `reset`, `step`, and optionally `is_done`, `finish` and `close`, synchronous or
   asynchronous. Synchronous ones run in a worker thread, off the event loop.
3. `finish` runs exactly once in each episode, whoever ends it. The front's `step` adds what it
   gives to the reward when the episode ends there.
4. After the end, `step` raises until the next `reset`.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import gymnasium

from agentenv.core.context import Context
from agentenv.core.episode_env import Action, Outcome, ResetResult, StepResult
from agentenv.core.errors import EnvironmentMisuse
from agentenv.core.messages import JsonValue, Message, ToolResult, text_of
from agentenv.core.task import TaskFields
from agentenv.core.threads import off_loop, run_sync
from agentenv.envs import spaces
from agentenv.envs.gym_values import (
    answered,
    last_answer,
    messages_of,
    read_reset,
    read_step,
    takes_text,
)
from agentenv.envs.rewards.reward import Reward, combine, outcome_of
from agentenv.envs.snapshots import Snapshot, put_back, take
from agentenv.envs.tasks import TaskSet, task_from

__all__ = ["Env", "Snapshot"]

_inside: ContextVar[frozenset[int]] = ContextVar("agentenv_inside", default=frozenset())
"""Ids of the environments whose author's code is running: their methods are then called as they are."""


@dataclass(slots=True)
class _Episode:
    """What the core knows of the episode being played."""

    context: Context = field(default_factory=Context)
    task: dict[str, object] = field(default_factory=dict[str, object])
    label: str = ""
    """The task's id, or its content where it has none: for error messages."""
    messages: list[Message] = field(default_factory=list[Message])
    """As the environment gave and got them; the runner's record may have shortened results."""
    action: Action | None = None
    """What the step being made answers."""
    results: dict[str, ToolResult] = field(default_factory=dict[str, ToolResult])
    """Results that `ToolEnv.step` gave to an author's own `step` as messages, by call id."""
    turn_reward: float = 0.0
    """Given by tools during the step being made."""
    begun: bool = False
    over: bool = False
    """Set when a step or `end` ended the episode."""
    outcome: Outcome | BaseException | None = None
    """What `finish` gave or raised; set once."""


class Env(gymnasium.Env[Any, Any]):
    """An environment that a language model acts in.

    Subclasses write `reset(*, seed=None, options=None) -> (observation, info)`, where the task is
    `self.task` and `options["task"]`, and `step(action) -> (observation, reward, terminated,
    truncated, info)`. The action is the model's message; a `step` whose parameter is annotated
    `str` gets its text.
    """

    observation_space = spaces.Text()
    action_space = spaces.Action()
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's attribute

    ends_on_text: bool = False
    """True if a message without tool calls is the final answer."""
    system_prompt: str = ""
    """Put before the first observation as a system message, if not empty."""
    tasks: object = None
    """Where `reset` draws a task from when it gets none: anything `TaskSet.of` takes."""
    full_marks: float = 1.0
    """Reward of a perfect episode."""

    _wants_text: ClassVar[bool] = False
    _episode: _Episode
    _rewards: tuple[Reward, ...]
    env_id: str
    """Id of the specification that made the environment; else the class's name."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 - `Any` lets __init__ type the call
        if (args or kwargs) and cls.__init__ is object.__init__:
            # Python lets these pass where a class writes __new__: a misspelt option would do nothing.
            given = ", ".join([*map(repr, args), *kwargs])
            raise TypeError(f"{cls.__name__}() takes no arguments, but was given: {given}")
        self = super().__new__(cls)
        self._episode = _Episode()
        self._rewards = ()
        self.env_id = cls.__name__
        # Spaces hold a generator: shared by a class, one environment would disturb another.
        self.observation_space = spaces.fresh(cls.observation_space)
        self.action_space = spaces.fresh(cls.action_space)
        return self

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("reset", "step", "close"):
            author = cls.__dict__.get(name)
            if author is not None:
                setattr(cls, name, _front(author, f"_gym_{name}"))
        if "step" in cls.__dict__:
            cls._wants_text = takes_text(cls.__dict__["step"])
            if cls._wants_text and "action_space" not in cls.__dict__:
                cls.action_space = spaces.Text()

    # What authors write or call -----------------------------------------------------------

    @property
    def task(self) -> Mapping[str, object]:
        """The task being played: its fields by name."""
        return self._episode.task

    @property
    def context(self) -> Context:
        """What the runner handed over for this episode."""
        return self._episode.context

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, JsonValue]]:
        """Schemas shown to the model, in OpenAI's shape; none here."""
        return ()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Start an episode; without `options["task"]` one is drawn by the seed."""
        # `super().reset(seed=seed)` of an author has nothing left to do: the core has seeded already.
        return ("", {}) if self.is_inside() else self._gym_reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Answer one message of the model."""
        if self.is_inside():
            raise EnvironmentMisuse(f"{type(self).__name__} has no step() of its own to call")
        return self._gym_step(action)

    def close(self) -> Any:
        """Free what the environment holds; may be called twice."""
        return None if self.is_inside() else self._gym_close()

    def is_done(self) -> bool | Awaitable[bool]:
        """Say whether the task is over; asked after each step."""
        return False

    def finish(self, stop_reason: str) -> object:
        """Score the finished episode: a number, None (cannot be scored) or named parts."""
        return 0.0

    def bind(
        self, env_id: str, *, tasks: TaskSet | None, rewards: Sequence[Reward], has_user: bool = False
    ) -> Env:
        """Take what a specification adds to the class, and return the environment itself."""
        self.env_id, self._rewards = env_id, tuple(rewards)
        if has_user:
            # The user answers the model's text; the text alone is no end.
            self.ends_on_text = False
        if tasks is not None:
            self.tasks = tasks
        return self

    def snapshot(self) -> Snapshot:
        """Copy the state of the episode, so that `restore` can come back to it.

        Raises:
            UsageError: An attribute cannot be copied; the message names it.
        """
        return take(self, self._episode.context, _NOT_COPIED)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot; it can be used any number of times.

        Raises:
            UsageError: The snapshot is of another class.
        """
        put_back(self, snapshot, self._episode.context, _NOT_COPIED)

    # The core: what the runner drives -----------------------------------------------------

    async def begin(self, task: Mapping[str, object], *, seed: int, context: Context) -> ResetResult:
        """Start an episode on a task; see `agentenv.core.episode_env.EpisodeEnv`."""
        gymnasium.Env.reset(self, seed=seed)
        observation, info = await self._begin(task, seed, context, options=None)
        first = messages_of(observation, where=f"{type(self).__name__}.reset()")
        return ResetResult(self._with_system_prompt(first), info)

    async def advance(self, action: Action) -> StepResult:
        """Answer one action; see `agentenv.core.episode_env.EpisodeEnv`.

        Raises:
            EnvironmentMisuse: No episode is being played.
        """
        return (await self._advance(action))[0]

    async def is_finished(self) -> bool:
        """Ask the author's `is_done`."""
        if type(self).is_done is Env.is_done:
            return False
        return bool(await self._call(self.is_done))

    async def end(self, stop_reason: str) -> Outcome:
        """Score the episode; the author's `finish` runs once however often this is called.

        Raises:
            EnvironmentMisuse: No episode was begun.
        """
        episode = self._episode
        if not episode.begun:
            raise EnvironmentMisuse(f"{type(self).__name__}: end before an episode was begun")
        episode.over = True
        if episode.outcome is None:
            # Set before the first await, so that a second caller never runs `finish` again.
            episode.outcome = EnvironmentMisuse("the episode is being scored")
            try:
                episode.outcome = await self._score(str(stop_reason))
            except BaseException as error:
                episode.outcome = error
                raise
        if isinstance(episode.outcome, BaseException):
            raise episode.outcome
        return episode.outcome

    async def shutdown(self) -> None:
        """Close the environment; may be called twice, and without `begin`."""
        if type(self).close is not Env.close:
            await self._call(self.close)

    # Inside -------------------------------------------------------------------------------

    async def _begin(
        self, task: Mapping[str, object], seed: int, context: Context, options: Mapping[str, object] | None
    ) -> tuple[object, dict[str, object]]:
        fresh = copy.deepcopy(dict(task))
        context.task = fresh
        label = task.id if isinstance(task, TaskFields) else repr(fresh)
        self._episode = _Episode(context=context, task=fresh, label=label)
        where = f"{type(self).__name__}.reset()"
        passed = {**(options or {}), "task": fresh}
        observation, info = read_reset(await self._call(self.reset, seed=seed, options=passed), where=where)
        first = messages_of(observation, where=where)
        self._episode.messages.extend(self._with_system_prompt(first))
        self._episode.begun = True
        return observation, info

    async def _advance(self, action: Action) -> tuple[StepResult, object]:
        """Make one step; return it as the runner takes it, and the observation as the author gave it."""
        episode = self._episode
        if not episode.begun:
            raise EnvironmentMisuse(f"{type(self).__name__}: step before reset")
        if episode.over:
            raise EnvironmentMisuse(f"{type(self).__name__}: step after the end; call reset first")
        episode.action = action
        episode.turn_reward = 0.0
        message = action.to_message()
        episode.messages.append(message)
        result, observation = await self._answer_action(action, message)
        episode.messages.extend(answer.to_message() for answer in result.tool_results)
        episode.messages.extend(result.messages)
        if result.terminated or result.truncated:
            episode.over = True
        return result, observation

    async def _answer_action(self, action: Action, message: Message) -> tuple[StepResult, object]:
        """Let the author's `step` answer the message, and read what it gave."""
        where = f"{type(self).__name__}.step()"
        self._episode.results.clear()
        as_text = self._wants_text or isinstance(self.action_space, spaces.Text)
        given = text_of(message) if as_text else message
        raw = read_step(await self._call(self.step, given), where=where)
        return answered(raw, action.tool_calls, self._episode.results, where), raw[0]

    async def _score(self, stop_reason: str) -> Outcome:
        own = Outcome()
        if type(self).finish is not Env.finish:
            where = f"{type(self).__name__}.finish()"
            own = outcome_of(await self._call(self.finish, stop_reason), where=where)
        if not self._rewards:
            return own
        offered = self._offered(stop_reason)
        parts = [(reward, await reward.score(offered, self._episode.task)) for reward in self._rewards]
        return combine(own, parts)

    def _offered(self, stop_reason: str) -> dict[str, object]:
        """What a reward may ask for by name."""
        episode = self._episode
        context = episode.context
        record = context.draft() if context.draft is not None else None
        messages = list(episode.messages if record is None else record.messages)
        offered: dict[str, object] = {
            "answer": last_answer(messages) if record is None else record.answer,
            "messages": messages,
            "task": episode.task,
            "stop_reason": stop_reason,
            "env": self,
            "state": context.state,
            "context": context,
            "seed": context.seed,
            "sandbox": context.sandbox,
        }
        return offered if record is None else {**offered, "trajectory": record}

    async def _call(self, method: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """Call an author's method as it was written: asynchronous here, synchronous in a thread."""
        token = _inside.set(_inside.get() | {id(self)})
        try:
            if _is_async(getattr(method, "__func__", method)):
                return await cast("Awaitable[object]", method(*args, **kwargs))
            value = await off_loop(method, *args, **kwargs)
            return await cast("Awaitable[object]", value) if inspect.isawaitable(value) else value
        finally:
            _inside.reset(token)

    def is_inside(self) -> bool:
        """Return whether this instance's own code is running here, called by the core."""
        return id(self) in _inside.get()

    def _with_system_prompt(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if not self.system_prompt or (messages and messages[0]["role"] == "system"):
            return messages
        return ({"role": "system", "content": self.system_prompt}, *messages)

    # Gymnasium's synchronous front --------------------------------------------------------

    def _gym_reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[object, dict[str, object]]:
        gymnasium.Env.reset(self, seed=seed)
        given = dict(options or {})
        context = given.pop("context", None)
        if not isinstance(context, Context):
            context = Context()
        # Without a seed the episode still has one, drawn from the generator as it stands.
        context.seed = int(self.np_random.integers(2**63)) if seed is None else seed
        task = task_from(given.pop("task", None), self.tasks, context.seed)
        observation, info = run_sync(self._begin(task, context.seed, context, given))
        return self._front_observation(observation, first=True), info

    def _gym_step(self, action: object) -> tuple[object, float, bool, bool, dict[str, object]]:
        return run_sync(self._step_and_finish(Action.of(action)))

    def _gym_close(self) -> None:
        run_sync(self.shutdown())

    async def _step_and_finish(self, action: Action) -> tuple[object, float, bool, bool, dict[str, object]]:
        result, observation = await self._advance(action)
        reason = await self._stop_reason(action, result)
        reward, info = result.reward, dict(result.info)
        if reason:
            outcome = await self.end(reason)
            reward += outcome.reward or 0.0
            info |= {"stop_reason": reason, "rewards": dict(outcome.rewards)}
            if outcome.reward is None:
                info["scorable"] = False
        shown = self._front_observation(observation, first=False)
        truncated = result.truncated and not result.terminated
        return shown, reward, bool(reason) and not truncated, truncated, info

    async def _stop_reason(self, action: Action, result: StepResult) -> str:
        if result.terminated:
            return "env_terminated"
        if result.truncated:
            return "env_truncated"
        if await self.is_finished():
            return "env_done"
        return "final_answer" if self.ends_on_text and not action.tool_calls else ""

    def _front_observation(self, observation: object, *, first: bool) -> object:
        """Return the author's observation; chat messages get the system prompt and fresh objects."""
        if not isinstance(self.observation_space, spaces.Chat):
            return observation
        messages = messages_of(observation, where=type(self).__name__)
        return copy.deepcopy(list(self._with_system_prompt(messages) if first else messages))


_NOT_COPIED = frozenset({"_rewards", "_toolbox", "env_id", "ends_on_text", "spec", "tasks"})
"""Attributes that belong to the instance and not to an episode."""


def _front(author: Callable[..., Any], core: str) -> Callable[..., Any]:
    """Put Gymnasium's synchronous method in front of an author's method.

    Called by the core (or by the author's own code through `super()`), the author's method runs
    as it was written; called from outside, the synchronous front runs.
    """

    @functools.wraps(author)
    def front(self: Env, *args: Any, **kwargs: Any) -> Any:
        return author(self, *args, **kwargs) if self.is_inside() else getattr(self, core)(*args, **kwargs)

    return front


@functools.lru_cache(maxsize=4096)
def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))
