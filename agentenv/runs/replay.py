"""Replay a recorded episode without a model; `agentenv.runs.branch` goes on from one of its turns.

The recorded completions take the place of the model, and the environment really runs. Its answers are
compared with the record, so that a nondeterministic environment is found at the first difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentenv.core.episode_env import EpisodeEnv, Task
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.trajectory import Trajectory
from agentenv.core.visible import one_line
from agentenv.engine.scripted.replayed import ChatReplayEngine, ReplayEngine
from agentenv.runner.options import RunnerOptions
from agentenv.runner.runner import Runner
from agentenv.runner.users import UserLike
from agentenv.runner.watchdog import SandboxPool

if TYPE_CHECKING:
    from agentenv.render.renderer import Renderer

__all__ = ["Difference", "Replay", "replay_episode"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between a replay and the record."""

    what: str
    """What differs: `message`, `tokens`, `stop_reason`, `turn_rewards` or `reward`."""
    turn: int
    """Number of assistant turns before the difference."""
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return (
            f"{self.what} differs after {self.turn} turns: recorded {self.recorded!r:.500}, "
            f"replayed {self.replayed!r:.500}"
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of replaying an episode."""

    trajectory: Trajectory
    """The replayed episode."""
    difference: Difference | None
    """The first difference from the record; None if there is none."""

    def __repr__(self) -> str:
        return one_line(self, "same as recorded" if self.same else self.difference)

    @property
    def same(self) -> bool:
        """True if nothing differs."""
        return self.difference is None


async def replay_episode(
    record: Trajectory,
    env: EpisodeEnv,
    renderer: Renderer | None = None,
    *,
    limits: RunLimits | None = None,
    options: RunnerOptions | None = None,
    user: UserLike = None,
    done_policy: DonePolicy = "stop",
    sandbox: SandboxPool | None = None,
) -> Replay:
    """Play a recorded episode again and compare the environment's answers with the record.

    Args:
        record: the recorded episode, whose task and seed are used.
        env: a new environment of the same kind; it is closed afterwards.
        renderer: the run's renderer; None for an episode without tokens.
        limits: limits of the recorded run, so that outputs are shortened in the same way.
        options: options of the recorded run, such as `history`; an episode is never played twice.
        user: the simulated user of the run, if it had one.
        done_policy: the run's policy for an episode whose task is done.
        sandbox: pool that lends a sandbox to an environment that needs one.
    """
    engine = ReplayEngine(record) if record.sequences else ChatReplayEngine(record)
    options = replace(options or RunnerOptions(), retries=0)
    runner = Runner(engine, renderer, limits, options=options, sandbox=sandbox)
    played = await runner.run_episode(
        env,
        Task(record.task_id, record.task),
        seed=record.seed,
        env_id=record.env_id,
        group_id=record.group_id,
        member=record.member,
        user=user,
        done_policy=done_policy,
    )
    return Replay(played, _compare(record, played))


def _compare(record: Trajectory, played: Trajectory) -> Difference | None:
    """Return the first difference of two episodes."""
    if _same_conversations(record, played):
        return _other_end(record, played, len(record.turns))
    before = 0
    for index, message in enumerate(record.messages):
        before += message["role"] == "assistant"
        replayed = played.messages[index] if index < len(played.messages) else None
        if replayed != message:
            return Difference("message", before, message, replayed)
    if len(played.messages) != len(record.messages):
        return Difference("message", before, None, played.messages[len(record.messages)])
    if (other := _other_end(record, played, before)) is not None:
        return other
    recorded = [sequence.token_ids for sequence in record.sequences]
    if recorded != [sequence.token_ids for sequence in played.sequences]:
        replayed = "other tokens, because the renderer or the limits differ"
        return Difference("tokens", before, "the recorded tokens", replayed)
    return None


def _other_end(record: Trajectory, played: Trajectory, turns: int) -> Difference | None:
    for name in ("stop_reason", "turn_rewards", "reward"):
        if getattr(record, name) != getattr(played, name):
            return Difference(name, turns, getattr(record, name), getattr(played, name))
    return None


def _same_conversations(record: Trajectory, played: Trajectory) -> bool:
    """Return whether an agent led the same conversations again, whichever of them ended first."""
    if not record.rewrites or not record.sequences:
        return False

    def all_tokens(trajectory: Trajectory) -> list[list[int]]:
        return sorted(list(sequence.token_ids) for sequence in trajectory.sequences)

    return len(record.messages) == len(played.messages) and all_tokens(record) == all_tokens(played)
