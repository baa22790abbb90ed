"""Replay a recorded episode without a model, or continue it with a model from one of its turns.

The recorded completions take the place of the model, and the environment really runs. Its answers are
compared with the record, so that a nondeterministic environment is found at the first difference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentenv.core.episode_env import EpisodeEnv, Task
from agentenv.core.errors import UsageError
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.one_line import one_line
from agentenv.core.trajectory import Trajectory
from agentenv.engine.base import ChatEngine, Engine, Sampling
from agentenv.engine.scripted.replayed import ChatReplayEngine, ReplayEngine
from agentenv.render.base import RendererProtocol
from agentenv.runner.options import RunnerOptions
from agentenv.runner.runner import Runner
from agentenv.runner.users import UserLike
from agentenv.runner.watchdog import SandboxPool

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
    renderer: RendererProtocol | None = None,
    *,
    limits: RunLimits | None = None,
    from_turn: int | None = None,
    live: Engine | ChatEngine | None = None,
    sampling: Sampling | None = None,
    options: RunnerOptions | None = None,
    run_seed: int = 0,
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
        from_turn: number of recorded turns to play before `live` continues; None plays all of them.
        live: the engine that continues after `from_turn`.
        sampling: sampling parameters of the turns that `live` plays.
        options: options of the recorded run, such as `history`; an episode is never played twice.
        run_seed: seed of the run, from which the seeds of these turns are derived.
        user: the simulated user of the run, if it had one.
        done_policy: the run's policy for an episode whose task is done.
        sandbox: pool that lends a sandbox to an environment that needs one.

    Raises:
        UsageError: `from_turn` is out of range, or is set without `live`.
    """
    engine = _engine(record, from_turn, live)
    runner = Runner(
        engine,
        renderer,
        limits,
        options=replace(options or RunnerOptions(), retries=0),
        sampling=sampling,
        run_seed=run_seed,
        sandbox=sandbox,
    )
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
    return Replay(played, _compare(record, played, from_turn))


def _engine(
    record: Trajectory, from_turn: int | None, live: Engine | ChatEngine | None
) -> Engine | ChatEngine:
    """Return an engine that replays the record's completions and continues with `live` at `from_turn`."""
    if from_turn is not None and not 0 <= from_turn <= len(record.turns):
        raise UsageError(f"from_turn must be between 0 and {len(record.turns)}, not {from_turn}")
    if from_turn is not None and live is None:
        raise UsageError("from_turn needs an engine that continues", remedy="pass the engine as live=")
    if record.sequences:
        if isinstance(live, ChatEngine):
            raise UsageError(
                f"an episode with tokens cannot continue with the chat engine {live.name!r}",
                remedy="pass an engine that generates tokens as live=",
            )
        return ReplayEngine(record, turns=from_turn, live=live)
    if live is not None and not isinstance(live, ChatEngine):
        raise UsageError(
            f"an episode without tokens cannot continue with the token engine {live.name!r}",
            remedy="pass a chat engine as live=",
        )
    return ChatReplayEngine(record, turns=from_turn, live=live)


def _compare(record: Trajectory, played: Trajectory, from_turn: int | None) -> Difference | None:
    """Return the first difference in the part that both episodes should share."""
    if from_turn is None and _same_conversations(record, played):
        return _other_end(record, played, len(record.turns))
    before = 0
    for index, message in enumerate(record.messages):
        if message["role"] == "assistant":
            if before == from_turn:
                return None
            before += 1
        replayed = played.messages[index] if index < len(played.messages) else None
        if replayed != message:
            return Difference("message", before, message, replayed)
    if from_turn is not None:
        return None
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
