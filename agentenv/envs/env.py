"""Environments: Gymnasium environments whose observations are text or chat messages.

1. An asynchronous core (`begin`, `advance`, `is_finished`, `end`, `shutdown`) plays an episode for the
   runner. It calls what the author wrote, and checks what these methods return.
2. Authors write `reset`, `step`, and optionally `is_done`, `finish` and `close`. Each may be synchronous or
   asynchronous; synchronous methods run in a worker thread and do not block the event loop. They stay what
   the author wrote: `agentenv.envs.front.Front` wraps an environment for users of Gymnasium.
3. `finish` runs exactly once in each episode, no matter what ends it.
4. After the end of an episode the core refuses another step until the next begins.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeAlias, cast

import gymnasium

from agentenv.core.episode_env import (
    ENV_SEEDS,
    Action,
    Context,
    Outcome,
    ResetResult,
    StepResult,
    TaskFields,
)
from agentenv.core.errors import EnvironmentMisuse, UsageError
from agentenv.core.messages import JsonValue, Message, ToolResult, text_of
from agentenv.core.playing import oracle_of
from agentenv.core.threads import OwnThread, off_loop, own_thread
from agentenv.envs import spaces
from agentenv.envs.declared import as_declared
from agentenv.envs.gym_values import (
    answered,
    last_answer,
    messages_of,
    outcome_of,
    read_reset,
    read_step,
    takes_text,
)
from agentenv.envs.names import check_methods
from agentenv.envs.rewards.reward import Reward, combine
from agentenv.envs.snapshots import Snapshot, put_back, take
from agentenv.envs.tasks import TaskSet

__all__ = ["Env", "Observation", "ResetReturn", "Snapshot", "StepReturn"]

Observation: TypeAlias = str | Message | Sequence[Message] | None
"""What `reset` and `step` may return: text, one chat message or several, or nothing new."""
Info: TypeAlias = dict[str, Any]
ResetReturn: TypeAlias = tuple[Observation, Info]
StepReturn: TypeAlias = tuple[Observation, float, bool, bool, Info]


@dataclass(slots=True)
class _Episode:
    """State of the episode being played, as the core keeps it."""

    context: Context = field(default_factory=Context)
    task: dict[str, object] = field(default_factory=dict[str, object])
    label: str = ""
    """Name of the task in error messages: its id, or its content if it has no id."""
    messages: list[Message] = field(default_factory=list[Message])
    """Messages that the environment returned and received; the runner's record may have shortened results."""
    action: Action | None = None
    """Action that the current step answers."""
    results: dict[str, ToolResult] = field(default_factory=dict[str, ToolResult])
    """Results of the current step by call id, which `ToolEnv.step` also returns as messages."""
    turn_reward: float = 0.0
    """Reward that tools added during the current step."""
    rewarded: bool = False
    """True once a tool has added a reward."""
    begun: bool = False
    over: bool = False
    """True once a step or `end` has ended the episode."""
    scoring: bool = False
    """True once `finish` was called."""
    outcome: Outcome | BaseException | None = None
    """Result or exception of `finish`; set once."""


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
    """True if a message without tool calls is the final answer and ends the episode."""
    system_prompt: str = ""
    """System message before the first observation; empty means none."""
    sends_images: bool = False
    """True if observations or tool results contain images. A model that sees none refuses the episode when it
    starts."""
    tasks: object = None
    """Tasks from which `reset` draws when it gets no task: anything that `TaskSet.of` takes."""
    full_marks: float = 1.0
    """Reward of a perfect episode."""
    trivial_limit: float = 0.25
    """Share of the full marks that a policy which does nothing may get; `check` complains above it. It is
    higher in a task set in which nothing is to be done in many tasks."""

    _wants_text: ClassVar[bool] = False
    _hooks: ClassVar[tuple[str, ...]] = ("reset", "step", "close", "is_done", "finish")
    """Methods that authors may write."""
    _episode: _Episode
    _rewards: tuple[Reward, ...]
    _has_user: bool = False
    _oracle: object = None
    _thread: OwnThread | None = None
    """Thread in which all synchronous methods run; None means any thread of the pool."""
    env_id: str
    """Id of the specification that made the environment; without one, the class's name."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: D102 - `__init__` types the call
        if (args or kwargs) and cls.__init__ is object.__init__:
            # Python ignores these arguments in a class that defines __new__ but not __init__, so that a
            # misspelt option would silently do nothing.
            arguments = ", ".join([*map(repr, args), *kwargs])
            raise TypeError(f"{cls.__name__}() takes no arguments, but was given: {arguments}")
        self = super().__new__(cls)
        self._episode = _Episode()
        self._rewards = ()
        self.env_id = cls.__name__
        # A space holds a random generator. If instances shared it, one would change the draws of another.
        self.observation_space = copy.deepcopy(cls.observation_space)
        self.action_space = copy.deepcopy(cls.action_space)
        return self

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        check_methods(cls, cls._hooks)
        if "step" in cls.__dict__:
            cls._wants_text = takes_text(cls.__dict__["step"])
            if cls._wants_text and "action_space" not in cls.__dict__:
                cls.action_space = spaces.Text()

    # What authors write or call -----------------------------------------------------------

    @property
    def task(self) -> Mapping[str, object]:
        """Fields of the task being played, by name."""
        return self._episode.task

    @property
    def context(self) -> Context:
        """Context of this episode, which the runner passed to `begin`."""
        return self._episode.context

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, JsonValue]]:
        """Schemas of the tools, in OpenAI's format; empty unless a subclass has tools."""
        return ()

    # Authors choose whether their methods are asynchronous, so the base class allows both.

    def reset(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> ResetReturn | Awaitable[ResetReturn]:
        """Begin the task `self.task`, which is `options["task"]` too, and return its first observation."""
        gymnasium.Env.reset(self, seed=seed)
        return "", {}

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, action: Any
    ) -> StepReturn | Awaitable[StepReturn]:
        """Answer one message of the model."""
        raise EnvironmentMisuse(f"{type(self).__name__} does not define step()")

    def close(self) -> Awaitable[None] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Free the environment's resources; may be called twice."""

    def is_done(self) -> bool | Awaitable[bool]:
        """Return whether the task is over; called after each step."""
        return False

    def finish(self, stop_reason: str) -> object:
        """Score the finished episode: return a number, named parts, or None if it cannot be scored."""
        return 0.0

    def bind(
        self,
        env_id: str,
        *,
        tasks: TaskSet | None,
        rewards: Sequence[Reward],
        has_user: bool = False,
        oracle: object = None,
    ) -> Self:
        """Apply the id, tasks and rewards of a specification, and return the environment itself."""
        self.env_id, self._rewards, self._has_user = env_id, tuple(rewards), has_user
        self._oracle = oracle
        if has_user:
            # The user answers the model's text, so text does not end the episode.
            self.ends_on_text = False
        if tasks is not None:
            self.tasks = tasks
        return self

    @property
    def oracle_policy(self) -> object:
        """The author's policy that solves the tasks, which `-m oracle` plays; None if there is none."""
        return self._oracle or oracle_of(type(self))

    def snapshot(self) -> Snapshot:
        """Copy the state of the episode, so that `restore` can return to it.

        A sandbox is not copied and goes on as it is: files that `write_file` wrote into it later stay.

        Raises:
            UsageError: An attribute cannot be copied, such as a session of a sandbox; the message names it.
        """
        return take(self, self._episode.context, _NOT_COPIED)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot, which can be used any number of times.

        Raises:
            UsageError: The snapshot was taken of another class.
        """
        put_back(self, snapshot, self._episode.context, _NOT_COPIED)

    # The core, which the runner calls -----------------------------------------------------

    async def begin(self, task: Mapping[str, object], *, seed: int, context: Context) -> ResetResult:
        """Start an episode on a task; see `agentenv.core.episode_env.EpisodeEnv`."""
        gymnasium.Env.reset(self, seed=seed)
        observation, info = await self._begin(task, seed, context, options=None)
        first = messages_of(observation, where=self._opener)
        return ResetResult(self._with_system_prompt(first), info, images=self.sends_images)

    async def advance(self, action: Action) -> StepResult:
        """Answer one action; see `agentenv.core.episode_env.EpisodeEnv`.

        Raises:
            EnvironmentMisuse: No episode is being played, or the author's `step` returned something else
                than a step.
        """
        episode, where = self._episode, f"{type(self).__name__}.step()"
        if not episode.begun or episode.over:
            when = "after the end" if episode.begun else "before reset"
            raise EnvironmentMisuse(f"{type(self).__name__}: step {when}", remedy="call reset first")
        message = action.to_message()
        episode.action, episode.turn_reward = action, 0.0
        episode.results.clear()
        episode.messages.append(message)
        as_text = self._wants_text or isinstance(self.action_space, spaces.Text)
        raw = read_step(await self._call(self.step, text_of(message) if as_text else message), where=where)
        step = answered(raw, action.tool_calls, episode.results, where)
        episode.messages.extend(result.to_message() for result in step.tool_results)
        episode.messages.extend(step.messages)
        episode.over = episode.over or step.terminated or step.truncated
        return step

    async def is_finished(self) -> bool:
        """Return the result of the author's `is_done`."""
        if type(self).is_done is Env.is_done and "is_done" not in vars(self):
            return False
        return bool(await self._call(self._hook("is_done")))

    async def end(self, stop_reason: str) -> Outcome:
        """Score the episode; the author's `finish` runs once, however often this is called.

        Raises:
            EnvironmentMisuse: No episode was begun.
        """
        episode = self._episode
        if not episode.begun:
            raise EnvironmentMisuse(
                f"{type(self).__name__}: end was called before an episode was begun",
                remedy="call begin or reset first",
            )
        episode.over = True
        if episode.outcome is None:
            if episode.scoring:
                raise EnvironmentMisuse("the episode is being scored")
            # This is set before the first await, so that a concurrent second call never runs `finish` again.
            episode.scoring = True
            try:
                episode.outcome = await self._score(str(stop_reason))
            except BaseException as error:
                episode.outcome = error
                raise
        if isinstance(episode.outcome, BaseException):
            raise episode.outcome
        return episode.outcome

    async def shutdown(self) -> None:
        """Close the environment; may be called twice, and without a call of `begin`."""
        try:
            if type(self).close is not Env.close:
                await self._call(self.close)
        finally:
            if self._thread is not None:
                self._thread.close()
                self._thread = None

    # Helpers of the core ------------------------------------------------------------------

    @property
    def _task_readers(self) -> Sequence[Callable[..., object]]:
        """Methods of the author whose parameters are fields of the task."""
        return ()

    async def _begin(
        self, task: Mapping[str, object], seed: int, context: Context, options: Mapping[str, object] | None
    ) -> tuple[object, dict[str, object]]:
        label = task.label if isinstance(task, TaskFields) else repr(dict(task))
        fresh = as_declared(copy.deepcopy(dict(task)), self._task_readers, where=f"task {label}")
        # A mapping of its own, so that what reset() takes out of the task stays known to oracles and users.
        context.task, context.seed, seed = dict(fresh), context.seed % ENV_SEEDS, seed % ENV_SEEDS
        self._episode = _Episode(context=context, task=fresh, label=label)
        passed = {**(options or {}), "task": fresh}
        returned = await self._call(self.reset, seed=seed, options=passed)
        observation, info = read_reset(returned, where=self._opener)
        first = messages_of(observation, where=self._opener)
        self._episode.messages.extend(self._with_system_prompt(first))
        self._episode.begun = True
        return observation, info

    @property
    def _opener(self) -> str:
        """The method of the author that begins an episode, for errors."""
        return f"{type(self).__name__}.{'start' if 'start' in self._hooks else 'reset'}()"

    @property
    def _scorer(self) -> str:
        """The method of the author that gives the reward, for errors."""
        return "finish"

    @property
    def _scores_itself(self) -> bool:
        """Whether the author wrote a reward into the class."""
        return type(self).finish is not Env.finish

    async def _score(self, stop_reason: str) -> Outcome:
        own = None
        if type(self).finish is not Env.finish:
            where = f"{type(self).__name__}.{self._scorer}()"
            own = outcome_of(await self._call(self.finish, stop_reason), where=where)
        if not self._rewards:
            return own or Outcome()
        own = own if self._scores_itself else None
        offered = self._offered(stop_reason)
        parts = [(reward, await reward.score(offered, self._episode.task)) for reward in self._rewards]
        return combine(own, parts)

    def _offered(self, stop_reason: str) -> dict[str, object]:
        """Return the values that a reward's arguments may name."""
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
        """Call an author's method: an asynchronous one here, a synchronous one in a thread."""
        thread = None if self._thread is None else own_thread.set(self._thread)
        try:
            if _is_async(getattr(method, "__func__", method)):
                return await cast("Awaitable[object]", method(*args, **kwargs))
            if not self._episode.begun:
                method = functools.partial(self._keep_thread, method)
            value = await off_loop(method, *args, **kwargs)
            if inspect.isgenerator(value) or inspect.isasyncgen(value):
                problem = (
                    f"{value.__qualname__}() has a yield, so it is a generator and nothing of it has run"
                )
                raise UsageError(problem, remedy="return the value instead")
            return await cast("Awaitable[object]", value) if inspect.isawaitable(value) else value
        finally:
            if thread is not None:
                own_thread.reset(thread)

    def _keep_thread(self, method: Callable[..., Any], *args: object, **kwargs: object) -> object:
        """Call a method that begins an episode; keep this thread if the environment is bound to it then."""
        try:
            return method(*args, **kwargs)
        finally:  # also where the method raises, because the environment is closed then
            if self._thread is None and is_thread_bound(self):
                self._thread = OwnThread.keep()
                if self._thread is not None:
                    weakref.finalize(self, self._thread.close)

    def _hook(self, name: str) -> Callable[..., Any]:
        """Return a method that authors may write.

        Raises:
            UsageError: An attribute of the instance hides the method.
        """
        method = getattr(self, name)
        if not callable(method):
            raise UsageError(
                f"self.{name} is {method!r:.200}, which hides the method {name}() of {type(self).__name__}",
                remedy="give the attribute another name",
            )
        return method

    def _with_system_prompt(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if not self.system_prompt or (messages and messages[0]["role"] == "system"):
            return messages
        return ({"role": "system", "content": self.system_prompt}, *messages)


_NOT_COPIED = frozenset(
    {"_has_user", "_oracle", "_rewards", "_thread", "_toolbox", "env_id", "ends_on_text", "spec", "tasks"}
)
"""Attributes that belong to the instance and not to an episode; a snapshot leaves them out."""


@functools.lru_cache(maxsize=4096)
def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def is_thread_bound(env: object) -> bool:
    """Return whether an environment, or an object in its attributes, holds a SQLite connection or cursor."""
    sqlite3 = sys.modules.get("sqlite3")
    if sqlite3 is None:
        return False
    bound = (sqlite3.Connection, sqlite3.Cursor)
    own = list(_attributes(env))
    return any(
        isinstance(value, bound) for value in (*own, *(part for each in own for part in _attributes(each)))
    )


def _attributes(value: object) -> Iterator[object]:
    attributes = getattr(value, "__dict__", None)
    return iter(list(attributes.values()) if isinstance(attributes, dict) else [])
