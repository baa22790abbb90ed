"""Playing a recorded episode again without a model, and going on live from one of its turns.

The recorded completions are the model; the environment is played for real. What it then says is
compared with the record: a nondeterministic environment shows at its first difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentenv.core.episode_env import EpisodeEnv
from agentenv.core.errors import EngineError, UsageError
from agentenv.core.limits import DonePolicy, RunLimits
from agentenv.core.messages import JsonValue, Message
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.engine.base import ChatCompletion, ChatEngine, Completion, Engine, Sampling, Usage
from agentenv.render.base import RendererProtocol
from agentenv.runner.leasing import SandboxPool
from agentenv.runner.options import RunnerOptions
from agentenv.runner.runner import Runner
from agentenv.runner.users import UserLike

__all__ = ["ChatReplayEngine", "Difference", "Replay", "ReplayEngine", "replay_episode"]


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


class ReplayEngine:
    """Gives the completions of a record in order; after `turns` of them, a live engine's.

    Args:
        record: an episode with tokens.
        turns: recorded turns to play; all by default.
        live: plays on from there; without it, being asked for more is an error.
    """

    def __init__(self, record: Trajectory, *, turns: int | None = None, live: Engine | None = None) -> None:
        self.name = f"replay:{record.group_id}/{record.member}"
        self.weights_version = live.weights_version if live is not None else 0
        self.max_context_tokens = live.max_context_tokens if live is not None else None
        self._record = record
        self._turns = len(record.turns) if turns is None else turns
        self._played = 0
        self._live = live

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Completion:
        """Give the next recorded completion; see `agentenv.engine.base.Engine`.

        Raises:
            EngineError: The record is at its end and there is no live engine.
        """
        self._played += 1
        if self._played <= self._turns:
            return _completion(self._record, self._record.turns[self._played - 1])
        if self._live is None:
            raise EngineError(f"the record has {self._turns} turns to play, and another was asked for")
        return await self._live.generate(
            prompt_ids,
            sampling,
            stop_token_ids=stop_token_ids,
            session_id=session_id,
            deadline_s=deadline_s,
        )

    async def release(self, session_id: str) -> None:
        """Let the live engine forget the episode."""
        if self._live is not None:
            await self._live.release(session_id)

    async def close(self) -> None:
        """Leave the live engine to its owner."""


class ChatReplayEngine:
    """Gives the messages of a record without tokens in order; then a live engine's."""

    def __init__(
        self, record: Trajectory, *, turns: int | None = None, live: ChatEngine | None = None
    ) -> None:
        self.name = f"replay:{record.group_id}/{record.member}"
        self.max_context_tokens = live.max_context_tokens if live is not None else None
        self._record = record
        self._turns = len(record.turns) if turns is None else turns
        self._played = 0
        self._live = live

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JsonValue]],
        sampling: Sampling,
        *,
        deadline_s: float | None = None,
    ) -> ChatCompletion:
        """Give the next recorded message; see `agentenv.engine.base.ChatEngine`.

        Raises:
            EngineError: The record is at its end and there is no live engine.
        """
        self._played += 1
        if self._played <= self._turns:
            turn = self._record.turns[self._played - 1]
            return ChatCompletion(turn.message, Usage(completion_tokens=turn.num_tokens), turn.finish_reason)
        if self._live is None:
            raise EngineError(f"the record has {self._turns} turns to play, and another was asked for")
        return await self._live.chat(messages, tools, sampling, deadline_s=deadline_s)

    async def close(self) -> None:
        """Leave the live engine to its owner."""


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
        _Recorded(record.task_id, record.task),
        seed=record.seed,
        env_id=record.env_id,
        group_id=record.group_id,
        member=record.member,
        user=user,
        done_policy=done_policy,
    )
    return Replay(played, _compare(record, played, from_turn))


@dataclass(frozen=True, slots=True)
class _Recorded:
    id: str
    data: Mapping[str, object]


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


def _completion(record: Trajectory, turn: Turn) -> Completion:
    sequence = record.sequences[turn.sequence]
    spans = [span for span in sequence.spans if span.turn == turn.index and span.source in {"model", "other"}]
    ids = tuple(sequence.token_ids[turn.start : turn.end])
    if not all(span.trained for span in spans):
        return Completion(ids, (), turn.finish_reason, sampled_by_policy=False)
    ranges: list[tuple[int, int, int]] = []
    start = 0
    for span in spans:
        ranges.append((span.weights_version or 0, start, start + len(span)))
        start += len(span)
    logprobs = tuple(sequence.logprobs[turn.start : turn.end])
    return Completion(ids, logprobs, turn.finish_reason, tuple(ranges))


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
