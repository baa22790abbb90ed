"""The protocol between the runner and an environment, and the values that they exchange.

`agentenv.envs.Env` implements the protocol for every environment. The runner depends on this protocol
only, so it never imports Gymnasium.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isfinite
from typing import TYPE_CHECKING, Protocol, Self, cast, runtime_checkable

from agentenv.core.errors import EnvironmentMisuse
from agentenv.core.limits import RunLimits
from agentenv.core.messages import JsonValue, Message, ToolCall, ToolResult, distinct_calls

if TYPE_CHECKING:
    from agentenv.core.execution import SandboxProtocol

__all__ = [
    "Action",
    "AgentDriven",
    "Context",
    "EpisodeEnv",
    "EpisodeRecord",
    "OpensSandbox",
    "Outcome",
    "ResetResult",
    "StepResult",
    "Task",
    "TaskFields",
    "Wrapped",
    "check_attempt",
    "check_step",
    "derive_seed",
    "digest",
]


ENV_SEEDS = 2**31
"""Seeds of episodes are below this, because NumPy's older generators refuse larger ones."""


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) computed from parts such as run seed, task id, member and turn.

    The same parts have the same seed on every machine; the order and the types of the parts matter.
    """
    digest = blake2b(json.dumps(parts, ensure_ascii=True).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class TaskFields(dict[str, object]):
    """A task's fields by name, together with its id and, where that is a digest, its row in the source."""

    __slots__ = ("id", "row")

    def __init__(self, id: str, fields: Mapping[str, object], row: int | None = None) -> None:
        super().__init__(fields)
        self.id = id
        self.row = row

    @property
    def label(self) -> str:
        """What errors call the task."""
        return self.id if self.row is None else f"{self.id} (row {self.row + 1} of the data)"


@dataclass(frozen=True, slots=True)
class Task:
    """One task to solve."""

    id: str
    """Id of the task: unique in its task set, and the same in every run."""
    data: Mapping[str, object] = field(default_factory=dict[str, object])
    """The task's fields by name. Do not change them."""

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> Task:
        """Build a task from its fields. Its id is the field `id`, or a digest of the fields without one."""
        given_id = fields.get("id")
        id = digest(fields) if given_id is None else str(given_id)
        return cls(id, TaskFields(id, fields))


_encoder = json.JSONEncoder(sort_keys=True)


def digest(fields: Mapping[str, object], number: int = 0) -> str:
    """Return an id computed from the content alone, so that it survives reordering and filtering.

    Args:
        fields: fields of the task.
        number: position of the task in its source. The id is made from it if a value cannot be written
            as JSON, because such a value has no digest that is the same on every machine.
    """
    try:
        text = _encoder.encode(fields)
    except (TypeError, ValueError, RecursionError):
        return f"row-{number}"
    return blake2b(text.encode(), digest_size=6).hexdigest()


class EpisodeRecord(Protocol):
    """The part of an episode's record that rewards read; `Trajectory` implements it."""

    @property
    def messages(self) -> Sequence[Message]:
        """All messages of the episode, as they were shown to the model."""
        ...

    @property
    def answer(self) -> str:
        """Text of the last assistant message."""
        ...


@dataclass(slots=True)
class Context:
    """Seed, task, limits and sandbox of one episode; the runner creates it and passes it at reset.

    A tool that declares a parameter of this type receives it. The model never sees it.
    """

    episode_id: str = "episode"
    seed: int = 0
    """Seed of the episode, computed from run seed, task and member, never from the order of episodes."""
    task: Mapping[str, object] = field(default_factory=dict[str, object])
    limits: RunLimits = field(default_factory=RunLimits)
    sandbox: SandboxProtocol | None = None
    """Sandbox for untrusted code; None if the environment does not need one."""
    deadline: float | None = None
    """`time.monotonic()` value at which the episode ends."""
    turn: int = 0
    """Index of the assistant turn being answered."""
    attempt: int = 0
    """Index of the model's attempt at the task. An environment that lets the model try again sets it when it
    answers the turn that ends an attempt; each later turn is recorded with it (`Turn.attempt`)."""
    begins_anew: bool = False
    """An environment sets it when its answer begins a new conversation: the model then sees the messages of
    this answer alone. The record keeps all messages, and a `Rewrite` with the cause `new`."""
    tool_calls_left: int | None = None
    """Number of tool calls that the episode may still run, including those of this turn; None means no
    limit. The runner keeps the count and answers the calls over the limit; tools may read it."""
    state: dict[str, object] = field(default_factory=dict[str, object])
    """A dictionary that the environment's tools may use freely; each episode starts with an empty one."""
    draft: Callable[[], EpisodeRecord] | None = None
    """Function that returns the record so far, without reward fields; the runner sets it before it ends
    the episode.

    A reward with a parameter `trajectory` receives this record. `answer` and `messages` are read from it
    too, so that rewards judge what the model was shown, not what the environment returned.
    """


def check_attempt(attempt: object) -> None:
    """Check the index of an attempt, which an environment has set.

    Raises:
        EnvironmentMisuse: The index is no number from 0.
    """
    if not isinstance(attempt, int) or attempt < 0:
        raise EnvironmentMisuse(
            f"the environment set context.attempt to {attempt!r}", remedy="count attempts from 0"
        )


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the model: the assistant message, and the tool calls that the environment runs."""

    message: Message
    """The assistant message as it is recorded. It also contains the calls that are not to be run."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The parsed calls to run, in call order."""

    @classmethod
    def of(cls, action: object) -> Self:
        """Build an action from text or from an assistant message.

        Raises:
            EnvironmentMisuse: The argument is neither.
        """
        if isinstance(action, str):
            return cls({"role": "assistant", "content": action})
        if not isinstance(action, Mapping) or cast("Message", action).get("role") != "assistant":
            raise EnvironmentMisuse(f"an action must be text or an assistant message, not {action!r:.200}")
        message = cast("Message", action)
        calls = distinct_calls(message.get("tool_calls") or ())
        return cls(message, tuple(map(ToolCall.from_message, calls)))

    def to_message(self) -> Message:
        """Return the message with only those calls that are to be run."""
        fields = {key: value for key, value in self.message.items() if key != "tool_calls"}
        if self.tool_calls:
            fields["tool_calls"] = [call.to_message() for call in self.tool_calls]
        return cast("Message", fields)


@dataclass(frozen=True, slots=True)
class ResetResult:
    """The first observation as chat messages, including the system message."""

    messages: tuple[Message, ...]
    info: Mapping[str, object] = field(default_factory=dict[str, object])
    repair_json: bool = False
    """True if calls with broken JSON are to be repaired where possible; repaired calls are counted."""
    images: bool = False
    """True if the messages of the episode may contain images, which only some models see."""
    terminated: bool = False
    """True if the episode is over before its first turn, for example a game that another player ended."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to one action of the model."""

    messages: tuple[Message, ...] = ()
    """New messages besides the tool results, for example a user's text; never assistant messages."""
    tool_results: tuple[ToolResult, ...] = ()
    """One result for each call in the action, in call order."""
    reward: float = 0.0
    """Reward of this turn alone, without the reward that `finish` returns."""
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, object] = field(default_factory=dict[str, object])
    observation: object = None
    """What the author's `step` returned, which users of Gymnasium see; the runner reads `messages`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The environment's score of a finished episode."""

    reward: float | None = 0.0
    """Final reward, which is added to the last turn's; None means that the episode cannot be scored."""
    rewards: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    """Parts of the final reward by name."""


@runtime_checkable
class OpensSandbox(Protocol):
    """An environment whose task has a sandbox of its own, such as a container of the task's image."""

    async def open_sandbox(self, task: Mapping[str, object]) -> Mapping[str, float]:
        """Start the sandbox of a task, before `begin` and before the episode's time begins.

        Return the times that the task gives, by the name of the limit; they hold in the place of the run's
        defaults. Whatever it raises aborts the episode.
        """
        ...


class EpisodeEnv(Protocol):
    """The methods of an environment that the runner calls; an instance plays one episode at a time."""

    ends_on_text: bool
    """True if a message without tool calls is the final answer and ends the episode."""

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, JsonValue]]:
        """Schemas of the tools in OpenAI's shape. After `begin` they may depend on the task."""
        ...

    async def begin(self, task: Mapping[str, object], *, seed: int, context: Context) -> ResetResult:
        """Start an episode on a task."""
        ...

    async def advance(self, action: Action) -> StepResult:
        """Answer one action. Its tool calls run concurrently; their results are in call order."""
        ...

    async def is_finished(self) -> bool:
        """Return what the environment's optional `is_done()` returns; False without one."""
        ...

    async def end(self, stop_reason: str) -> Outcome:
        """Score the episode. The author's `finish` runs once, even if this is called several times."""
        ...

    async def shutdown(self) -> None:
        """Close the environment; may be called twice, and without `begin` before it."""
        ...


@runtime_checkable
class Wrapped(Protocol):
    """A wrapper of Gymnasium, such as `ae.make` returns; the runner plays the object inside."""

    @property
    def unwrapped(self) -> EpisodeEnv:
        """The author's own object."""
        ...


@runtime_checkable
class AgentDriven(Protocol):
    """An environment whose model is asked by an agent with a loop of its own, and not by the runner.

    The runner begins and ends its episodes as those of any environment. In between it never calls `advance`.
    """

    @property
    def trained_sequences(self) -> object:
        """Which sequences are trained; see `agentenv.endpoint.Choice`."""
        ...

    async def run_agent(self, url: str) -> None:
        """Run the agent to its end; it reaches the model at this address."""
        ...


def check_step(step: StepResult, calls: Sequence[ToolCall]) -> None:
    """Check an environment's answer to an action.

    Raises:
        EnvironmentMisuse: The results do not match the calls, or the reward is not finite.
    """
    answered = [result.tool_call_id for result in step.tool_results]
    if answered != [call.id for call in calls]:
        raise EnvironmentMisuse(
            f"the environment answered the calls {answered}, but the action has the calls "
            f"{[call.id for call in calls]}",
            remedy="return one result for each call, in call order",
        )
    if not isfinite(step.reward):
        raise EnvironmentMisuse(f"step returned the reward {step.reward!r}", remedy="it must be finite")
