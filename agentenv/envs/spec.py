"""The specification of an environment: its entry point, tasks, rewards and limits."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, cast, get_args

from agentenv.core.errors import TaskError, UnknownEnvironment, UsageError
from agentenv.core.imports import import_object
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.loops import run_sync
from agentenv.core.messages import JsonValue
from agentenv.core.playing import MessagePolicy, oracle_of
from agentenv.envs.found import SEEDED, kind_of
from agentenv.envs.prepared import prepared
from agentenv.envs.rewards.reward import Reward, as_reward
from agentenv.envs.tasks import TaskSet, held_out_seeds, train_seeds

if TYPE_CHECKING:
    from agentenv.envs.env import Env

__all__ = ["EnvSpec"]

_SEEDS = {"train": train_seeds, "test": held_out_seeds}
_WRITTEN = (str, int, float, list, dict, type(None))
"""Types of the arguments that a command line or a file can give."""


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Immutable specification of an environment.

    It can be written as JSON and read back if everything in it can be imported by name. It can be pickled if
    that is so, or if it is registered.

    Raises:
        UsageError: A field has a value that cannot be used.
    """

    id: str
    """Id of the form `namespace/Name-v0`."""
    entry_point: str
    """Class or function that makes the environment, as `module:attr`."""
    tasks: TaskSet | None = None
    rewards: tuple[Reward, ...] = ()
    """Rewards that are added to the environment's own reward."""
    limits: RunLimits | None = None
    """Limits of an episode; the stricter of these and the run's apply."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the entry point."""
    user: Any = None
    """A simulated user, or a function of the task that returns one."""
    done_policy: DonePolicy = "stop"
    sandbox: str | None = None
    """Name of the sandbox that episodes need."""
    description: str = ""
    target: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    """Object that `entry_point` names, if it is already imported."""

    def __post_init__(self) -> None:
        module, colon, attribute = self.entry_point.partition(":")
        if not (module and colon and attribute):
            raise UsageError(
                f"entry point {self.entry_point!r} of {self.id} does not have the form 'module:attr'"
            )
        if self.done_policy not in get_args(DonePolicy):
            raise UsageError(f"done_policy must be one of {get_args(DonePolicy)}, not {self.done_policy!r}")
        object.__setattr__(self, "kwargs", MappingProxyType(dict(self.kwargs)))

    @classmethod
    def of(
        cls,
        id: str,
        entry_point: str | Callable[..., Any],
        *,
        tasks: object = None,
        rewards: Sequence[Any] = (),
        limits: RunLimits | None = None,
        max_turns: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
        user: object = None,
        done_policy: DonePolicy = "stop",
        sandbox: str | None = None,
        description: str = "",
    ) -> EnvSpec:
        """Make a specification from the arguments of `register`.

        Raises:
            UsageError: A field has a value that cannot be used.
        """
        target = None if isinstance(entry_point, str) else entry_point
        if target is not None and not callable(target):
            told = f"the entry point of {id} is {target!r:.200}, which is not a class or function"
            raise UsageError(told, remedy="give the class itself, without calling it")
        if max_turns is not None:
            base = limits or _no_limits()
            limits = base.stricter(dataclasses.replace(_no_limits(), max_turns=max_turns))
        entry = cls(
            id=id,
            entry_point=entry_point if isinstance(entry_point, str) else _name_of(entry_point),
            tasks=None if tasks is None else TaskSet.of(tasks),
            rewards=tuple(as_reward(reward) for reward in rewards),
            limits=limits,
            kwargs=kwargs or {},
            user=user,
            done_policy=done_policy,
            sandbox=sandbox,
            description=description,
            target=target,
        )
        return entry._with_defaults_of_class()

    def __copy__(self) -> EnvSpec:
        return self

    def __deepcopy__(self, memo: Mapping[int, object]) -> EnvSpec:
        return self

    @property
    def module(self) -> str:
        """Name of the module that contains the entry point."""
        return self.entry_point.partition(":")[0]

    @property
    def attribute(self) -> str:
        """Name of the entry point in its module."""
        return self.entry_point.partition(":")[2]

    @property
    def max_turns(self) -> int | None:
        """Limit of assistant turns; None if the specification sets none."""
        return None if self.limits is None else self.limits.max_turns

    def load(self) -> Callable[..., Any]:
        """Return the class or function that the entry point names.

        Raises:
            UnknownEnvironment: The entry point cannot be imported.
        """
        if self.target is not None:
            return self.target
        return import_object(self.entry_point, UnknownEnvironment, where=f"entry point of {self.id}")

    def check_kwargs(self) -> None:
        """Find out, without making an environment, whether the entry point takes its arguments.

        Raises:
            UnknownEnvironment: The entry point cannot be imported.
            UnknownTool: It names a tool that does not exist.
            UsageError: It does not take the arguments, or declares other types.
        """
        from agentenv.envs.tool_env import check_tools

        arguments, tools = _tools_apart(target := self.load(), self.kwargs)
        if arguments and _refuses(target, arguments):
            raise UsageError(f"{self.id} cannot be made with {sorted(arguments)}: it takes no such arguments")
        # Objects are the caller's: reading an iterator here would leave none for the environment.
        written = {name: value for name, value in arguments.items() if isinstance(value, _WRITTEN)}
        if written:
            from agentenv.envs.declared import as_declared

            try:
                maker = target.__init__ if isinstance(target, type) else target
                as_declared(written, [maker], where=f"{self.id} cannot be made")
            except TaskError as error:
                raise UsageError(error.message, remedy="correct -o env.NAME=VALUE") from error
            except ValueError:  # a class in C has no signature
                pass
        check_tools(target, tools, where=self.id)

    def make(self, **kwargs: Any) -> Env:
        """Make a new environment; these arguments override the specification's.

        The argument `tools` replaces the tools of a `ToolEnv`, unless its entry point has such a parameter.

        Raises:
            UnknownEnvironment: The entry point cannot be imported.
            UsageError: The entry point refuses the arguments, or does not make an environment.
        """
        target = self.load()
        arguments, tools = _tools_apart(target, {**self.kwargs, **kwargs})
        try:
            env = target(**arguments)
        except TypeError as error:
            if not _refuses(target, arguments):
                raise
            given = f"with {sorted(arguments)}" if arguments else "without arguments"
            raise UsageError(
                f"{self.id} cannot be made {given}: {error}", remedy="name them as in -o env.NAME=VALUE"
            ) from error
        from agentenv.envs.env import Env

        if not isinstance(env, Env):
            from agentenv.envs.adapters.adapt import adapt

            env = adapt(env, where=self.id)
        if tools is not None:
            from agentenv.envs.tool_env import give_tools

            give_tools(env, tools, where=self.id)
        return env.bind(
            self.id,
            tasks=self.tasks,
            rewards=self.rewards,
            has_user=self.user is not None,
            oracle=oracle_of(target),
        )

    @asynccontextmanager
    async def prepare(self, **kwargs: Any) -> AsyncGenerator[None]:
        """Call the `prepare` of the entry point, of a class its class method, with the arguments of `make`.

        It is a coroutine, or a context manager around all episodes that a process plays, and raises what
        would fail all of them. The models of judges are loaded before.
        """
        for reward in self.rewards:
            from agentenv.envs.rewards.judge import Judge

            if isinstance(reward.function, Judge):
                await asyncio.to_thread(reward.function.load)
        prepare = getattr(target := self.load(), "prepare", None)
        if isinstance(prepare, MethodType) or (prepare is not None and not isinstance(target, type)):
            arguments = _tools_apart(target, {**self.kwargs, **kwargs})[0]
            async with prepared(partial(prepare, **arguments), (target, repr(arguments))):
                yield
        else:
            yield

    @property
    def oracle(self) -> MessagePolicy | None:
        """The policy that solves the tasks: `oracle` of the class or its module; None if there is none."""
        return cast("MessagePolicy | None", oracle_of(self.load()))

    def require_oracle(self) -> MessagePolicy:
        """Return the policy that solves the tasks.

        Raises:
            UsageError: The author wrote none.
        """
        if (oracle := self.oracle) is None:
            raise UsageError(
                f"{self.id} has no oracle",
                remedy="write a function oracle(messages, task, rng) beside the environment's class",
            )
        return oracle

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> EnvSpec:
        """Return this specification with further arguments of the entry point, which override its own."""
        return dataclasses.replace(self, kwargs={**self.kwargs, **kwargs}) if kwargs else self

    def task_set(self, split: str | None = None) -> TaskSet:
        """Return the task set, with the split chosen if one is named.

        A specification of a function without tasks has those of what the function makes.

        Raises:
            TaskError: There is no such split.
        """
        tasks = self.tasks if self.tasks is not None else self._tasks_of_made
        return tasks if split is None else tasks.split(split)

    def to_json(self) -> str:
        """Return the specification as JSON text; equal specifications give equal text.

        Raises:
            UsageError: A part cannot be imported by name or written as JSON; the message names it.
        """
        return json.dumps(self.record(), sort_keys=True, ensure_ascii=True)

    def record(self) -> dict[str, JsonValue]:
        """Return the specification as plain JSON values.

        Raises:
            UsageError: A part cannot be imported by name or written as JSON; the message names it.
        """
        if "<locals>" in self.entry_point:
            raise UsageError(
                f"{self.id}: {self.entry_point} is defined inside a function, so no import finds it",
                remedy="define it at the top level of a module",
            )
        limits = None if self.limits is None else _changed(self.limits)
        return {
            "id": self.id,
            "entry_point": self.entry_point,
            "tasks": None if self.tasks is None else self.tasks.record(where=self.id),
            "rewards": [_reward_record(reward, self.id) for reward in self.rewards],
            "limits": limits,
            "kwargs": _plain(dict(self.kwargs), f"kwargs of {self.id}"),
            "user": None if self.user is None else _user_name(self.user, self.id),
            "done_policy": self.done_policy,
            "sandbox": self.sandbox,
            "description": self.description,
        }

    @classmethod
    def from_json(cls, text: str) -> EnvSpec:
        """Read the text that `to_json` returned; the entry point is imported when it is first needed.

        Raises:
            UsageError: The text is not a specification.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            limits = data["limits"]
            return cls(
                id=data["id"],
                entry_point=data["entry_point"],
                tasks=None if data["tasks"] is None else TaskSet.from_record(data["tasks"]),
                rewards=tuple(
                    Reward(import_object(row["function"]), row["weight"], row["name"], row["timeout_s"])
                    for row in data["rewards"]
                ),
                limits=None if limits is None else RunLimits(**limits),
                kwargs=data["kwargs"],
                user=None if data["user"] is None else import_object(data["user"]),
                done_policy=data["done_policy"],
                sandbox=data["sandbox"],
                description=data["description"],
            )
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UsageError(f"this text is not the specification of an environment: {error!r}") from error

    @cached_property
    def _tasks_of_made(self) -> TaskSet:
        """The tasks of what a function makes, which is made once to learn them; else one without fields."""
        if not isinstance(make := self.load(), FunctionType) or _refuses(make, self.kwargs):
            return TaskSet.of([{}])
        from agentenv.envs.adapters.gym import GymnasiumText
        from agentenv.envs.adapters.stepped import SteppedObject

        env = self.make()
        run_sync(env.shutdown())
        seeds = _SEEDS if isinstance(env, GymnasiumText | SteppedObject) else [{}]
        return TaskSet.of(seeds if env.tasks is None else env.tasks)

    def _with_defaults_of_class(self) -> EnvSpec:
        """Take tasks and description from the class if the registration left them out."""
        target = self.target
        if not isinstance(target, type):
            return self
        tasks, doc = self.tasks, self.description
        class_tasks = getattr(target, "tasks", None)
        if tasks is None and class_tasks is not None and not isinstance(class_tasks, property):
            tasks = TaskSet.of(class_tasks)
        elif tasks is None and kind_of(target) in SEEDED:
            tasks = TaskSet.of(_SEEDS)
        if not doc:
            doc = (target.__dict__.get("__doc__") or "").strip().partition("\n")[0]
        return dataclasses.replace(self, tasks=tasks, description=doc)


def _no_limits() -> RunLimits:
    """Return limits that restrict nothing, so that the run's limits apply."""
    return RunLimits(
        max_turns=None,
        max_parse_errors=None,
        max_tokens_per_turn=None,
        max_tool_output_tokens=None,
        min_answer_tokens=1,
        tool_timeout_s=None,
        env_timeout_s=None,
        reward_timeout_s=None,
    )


def _changed(limits: RunLimits) -> dict[str, JsonValue]:
    return {limit.name: getattr(limits, limit.name) for limit in dataclasses.fields(limits)}


def _name_of(target: object) -> str:
    name = getattr(target, "__qualname__", None)
    if name is None:
        raise UsageError(
            f"{target!r:.200} cannot be imported by name", remedy="use a class, a function or 'module:attr'"
        )
    return f"{getattr(target, '__module__', '__main__')}:{name}"


def _user_name(user: object, id: str) -> str:
    name = getattr(user, "__qualname__", "<object>")
    if "<" in name:
        raise UsageError(
            f"the user of {id} is {user!r:.100}, which no import finds",
            remedy="register a function of the task, at the top level of a module, that returns the user",
        )
    return _name_of(user)


def _reward_record(reward: Reward, id: str) -> dict[str, JsonValue]:
    name = _name_of(reward.function)
    if "<" in name:
        raise UsageError(
            f"reward {name} of {id} is a lambda or defined inside a function, so no import finds it",
            remedy="define it at the top level of a module",
        )
    return {
        "function": name,
        "weight": reward.weight,
        "name": reward.name,
        "timeout_s": reward.timeout_s,
    }


def _plain(value: Any, where: str) -> JsonValue:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} cannot be written as JSON: {error}") from error


def _tools_apart(target: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[dict[str, Any], object]:
    """Return the arguments of the entry point, and `tools` if the entry point has no such parameter."""
    rest = dict(arguments)
    if "tools" not in rest or not _refuses(target, rest):
        return rest, None
    return rest, rest.pop("tools")


def _refuses(target: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    import inspect

    if isinstance(target, type) and target.__init__ is object.__init__:
        return True
    try:
        inspect.signature(target).bind(**arguments)
    except TypeError:
        return True
    except ValueError:
        return False
    return False
