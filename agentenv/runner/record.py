"""What was played: the turns of an attempt, and the trajectory that is made of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal, cast

from agentenv.core.episode_env import Outcome
from agentenv.core.errors import UsageError
from agentenv.core.messages import JsonValue, Message, ToolResult
from agentenv.core.pictures import pictured
from agentenv.core.trajectory import EpisodeError, StopReason, Trajectory, Turn
from agentenv.engine.interface import Sampling
from agentenv.runner.conversation.conversation import Recorded, Reply
from agentenv.runner.plan import Plan

__all__ = ["OpenTurn", "Record"]

_PLAIN = (str, int, float, bool, type(None))
_TIMES = ("generate_s", "queue_s", "env_s", "tools_s", "user_s", "render_s")


@dataclass(slots=True)
class OpenTurn:
    """A turn while it is being played."""

    index: int
    reply: Reply
    sampling: Sampling
    results: tuple[ToolResult, ...] = ()
    reward: float = 0.0
    timings: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_TIMES, 0.0))
    attempt: int = 0

    def close(self, reward: float) -> Turn:
        """Return the finished turn with its reward."""
        reply = self.reply
        return Turn(
            index=self.index,
            message=reply.message,
            finish_reason=cast("Literal['stop', 'length']", reply.finish_reason),
            num_tokens=reply.num_tokens,
            sequence=reply.sequence,
            start=reply.start,
            tool_calls=reply.tool_calls,
            tool_results=self.results,
            reward=reward,
            sampling=self.sampling.record(),
            timings=self.timings,
            attempt=self.attempt,
        )


@dataclass(slots=True)
class Record:
    """The data of one attempt; every attempt has its own."""

    plan: Plan
    conversation: Recorded
    attempt: int = 0
    started: float = field(default_factory=time.perf_counter)
    declared: Mapping[str, object] = field(default_factory=dict[str, object])
    """Fields of the task that the environment reads as another type than the data has, such as a cell of a
    table that it declares to be a number."""
    turns: list[OpenTurn] = field(default_factory=list[OpenTurn])
    messages: list[Message] = field(default_factory=list[Message])
    tools: tuple[Mapping[str, JsonValue], ...] = ()
    sampled_tokens: int = 0
    parse_errors: int = 0
    repaired_calls: int = 0
    tool_calls: int = 0
    """Number of tool calls that were run."""
    user_turns: int = 0
    condenser_tokens: int = 0
    """Tokens that a summariser sampled; `sampled_tokens` includes them."""
    trimmed: int = 0
    """Number of tool results and messages that were cut."""
    spare: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*_TIMES, "reward_s"), 0.0))
    """Seconds spent outside turns, at the start and for the reward."""

    @property
    def name(self) -> str:
        """Name of the attempt; it is the same each time the episode is played."""
        return f"{self.plan.name}/{self.attempt}"

    def keep_declared(self, read: Mapping[str, object]) -> None:
        """Keep the fields that the environment read as a plain value of another type than the data has."""
        fields = ((name, value, read.get(name, value)) for name, value in self.plan.job.task.items())
        self.declared = {
            name: found
            for name, value, found in fields
            if type(found) is not type(value) and isinstance(value, _PLAIN) and isinstance(found, _PLAIN)
        }

    @property
    def answered(self) -> bool:
        """Whether the model answered a request in this attempt."""
        return len(self.turns) > (0 if self.plan.job.branch is None else self.plan.job.branch.turns)

    def give(self, index: int, reward: float) -> None:
        """Add a user's reward to the reward of a turn.

        Raises:
            UsageError: The reward is not finite, or no such turn was played.
        """
        if not isfinite(reward):
            raise UsageError(
                f"the user gave turn {index} the reward {reward!r}", remedy="the reward must be finite"
            )
        if not 0 <= index < len(self.turns):
            raise UsageError(
                f"the user rewarded turn {index}, but turns 0 to {len(self.turns) - 1} were played"
            )
        self.turns[index].reward += reward

    def freeze(
        self, reason: StopReason, *, outcome: Outcome | None = None, error: EpisodeError | None = None
    ) -> Trajectory:
        """Return the trajectory; without an outcome it is the draft that rewards see."""
        turn_rewards = [turn.reward if outcome is not None else 0.0 for turn in self.turns]
        reward = None if outcome is None else outcome.reward
        if reward is not None and turn_rewards:
            # The outcome belongs to the last turn, so that the turns' rewards sum to the episode's reward.
            turn_rewards[-1] += reward
            reward = sum(turn_rewards)
        turns = tuple(turn.close(share) for turn, share in zip(self.turns, turn_rewards, strict=True))
        return replace(
            self._without_turns(reason, error),
            turns=turns,
            sequences=self.conversation.sequences,
            messages=tuple(map(pictured, self.messages)),
            reward=reward,
            rewards=dict(outcome.rewards) if outcome is not None else {},
            tools=self.tools,
            rewrites=tuple(self.conversation.rewrites),
            metrics=self._metrics(turns),
            timings=self._timings(turns),
        )

    def freeze_failed(self, reason: StopReason, error: EpisodeError) -> Trajectory:
        """Return the record of a failed attempt; without its turns, if what was recorded is inconsistent."""
        try:
            return self.freeze(reason, error=error)
        except Exception:  # noqa: BLE001 - values of outside code are in the record, and the episode must not be lost
            return self._without_turns(reason, error)

    def _without_turns(self, reason: StopReason, error: EpisodeError | None) -> Trajectory:
        job, branch = self.plan.job, self.plan.job.branch
        return Trajectory(
            env_id=self.plan.rules.env_id,
            task_id=job.task_id,
            seed=job.seed,
            group_id=job.group_id,
            stop_reason=reason,
            member=self.plan.member,
            attempt=self.attempt,
            branch_of=None if branch is None else branch.record.member,
            shared_turns=0 if branch is None else branch.turns,
            error=error,
            untrainable_reason=self._untrainable(error),
            task=cast("Mapping[str, JsonValue]", {**job.task, **self.declared}),
        )

    def _metrics(self, turns: tuple[Turn, ...]) -> dict[str, float]:
        return {
            "turns": float(len(turns)),
            "sampled_tokens": float(self.sampled_tokens),
            "tool_calls": float(self.tool_calls),
            "tool_errors": float(sum(result.is_error for turn in turns for result in turn.tool_results)),
            "parse_errors": float(self.parse_errors),
            "repaired_calls": float(self.repaired_calls),
            "user_turns": float(self.user_turns),
            "trimmed_outputs": float(self.trimmed),
            "condenser_tokens": float(self.condenser_tokens),
            **({} if self.plan.job.branch is None else {"shared_turns": float(self.plan.job.branch.turns)}),
            **{f"forks_{cause}": float(count) for cause, count in self.conversation.forks.items()},
            **self.conversation.usage,
        }

    def _timings(self, turns: tuple[Turn, ...]) -> dict[str, float]:
        summed = dict(self.spare)
        for turn in turns:
            for name, seconds in turn.timings.items():
                summed[name] += seconds
        summed["total_s"] = time.perf_counter() - self.started
        return summed

    def _untrainable(self, error: EpisodeError | None) -> str:
        if error is not None:
            return f"failed at {error.boundary}: {error.type}: {error.message}"
        if self.conversation.untrainable_reason:
            return self.conversation.untrainable_reason
        if not self.conversation.has_policy_tokens:
            return "no token was sampled by the policy"
        return self.plan.rules.sampling.untrainable_reason
