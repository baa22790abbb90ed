"""Playing a recorded episode again without a model, and going on live from one of its turns.

The recorded completions are the model; the environment is played for real. What it then says is
compared with the record: a nondeterministic environment shows at its first difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.core.episode_env import EpisodeEnv
from agentenv.core.errors import UsageError
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.task import Task
from agentenv.core.trajectory import Trajectory
from agentenv.engine.base import ChatEngine, Engine, Sampling
from agentenv.engine.scripted.replayed import ChatReplayEngine, ReplayEngine
from agentenv.render.base import RendererProtocol
from agentenv.runner.held import SandboxPool
from agentenv.runner.options import RunnerOptions
from agentenv.runner.runner import Runner
from agentenv.runner.users import UserLike

__all__ = ["Difference", "Replay", "replay_episode"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay first differs from the record."""

    what: str
    """`message`, `tokens`, `stop_reason`, `turn_rewards` or `reward`."""
    turn: int
    """Assistant turns before it."""
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return (
            f"{self.what} differs after {self.turn} turns: recorded {self.recorded!r:.500}, "
            f"replayed {self.replayed!r:.500}"
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of playing an episode again."""

    trajectory: Trajectory
    """The new record."""
    difference: Difference | None
    """None if the environment said the same."""

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
    run_seed: int = 0,
    user: UserLike = None,
    done_policy: DonePolicy = "stop",
    sandbox: SandboxPool | None = None,
) -> Replay:
    """Play a recorded episode again and compare what the environment says.

    Args:
        record: the episode; its task and seed are used.
        env: a new environment of the same kind; closed afterwards.
        renderer: the run's renderer; none for an episode without tokens.
        limits: of the run that made the record, so that outputs are cut alike.
        from_turn: play only so many recorded turns, then go on with `live`.
        live: plays on after `from_turn`.
        sampling: for the live turns.
        run_seed: of the run, for the seeds of the live turns.
        user: the simulated user of the run, if it had one.
        done_policy: of the run.
        sandbox: lends one, where the environment needs it.

    Raises:
        UsageError: `from_turn` is out of range, or given without `live`.
    """
    engine = _engine(record, from_turn, live)
    runner = Runner(
        engine,
        renderer,
        limits,
        options=RunnerOptions(retries=0),
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
    """Give the record's completions before a turn, and from there the live engine's."""
    if from_turn is not None and not 0 <= from_turn <= len(record.turns):
        raise UsageError(f"from_turn must be between 0 and {len(record.turns)}, not {from_turn}")
    if from_turn is not None and live is None:
        raise UsageError("from_turn needs live=, the engine that goes on from there")
    if record.sequences:
        if isinstance(live, ChatEngine):
            raise UsageError("an episode with tokens goes on with an engine on tokens")
        return ReplayEngine(record, turns=from_turn, live=live)
    if live is not None and not isinstance(live, ChatEngine):
        raise UsageError("an episode without tokens goes on with an engine that speaks text")
    return ChatReplayEngine(record, turns=from_turn, live=live)


def _compare(record: Trajectory, played: Trajectory, from_turn: int | None) -> Difference | None:
    """Return the first difference in what both should share."""
    before = 0
    for place, message in enumerate(record.messages):
        if message["role"] == "assistant":
            if before == from_turn:
                return None
            before += 1
        again = played.messages[place] if place < len(played.messages) else None
        if again != message:
            return Difference("message", before, message, again)
    if from_turn is not None:
        return None
    if len(played.messages) != len(record.messages):
        return Difference("message", before, None, played.messages[len(record.messages)])
    for name in ("stop_reason", "turn_rewards", "reward"):
        if getattr(record, name) != getattr(played, name):
            return Difference(name, before, getattr(record, name), getattr(played, name))
    if [one.token_ids for one in record.sequences] != [one.token_ids for one in played.sequences]:
        return Difference("tokens", before, "the recorded tokens", "others: renderer or limits differ")
    return None
