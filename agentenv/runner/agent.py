"""Play an episode in which an agent with a loop of its own asks the model, through the endpoint.

1. The runner begins and scores the episode as any other. In between it runs the agent and waits: for the
   model while a request is being answered, and for the agent otherwise, each within its own limit.
2. A limit that refuses a request ends the episode. The agent gets a short time to end by itself.
3. An agent that raises fails its episode at the boundary `agent`, unless a limit or a full context did it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

from agentenv.core.episode_env import AgentDriven, Outcome
from agentenv.core.errors import UsageError
from agentenv.core.faults import must_pass
from agentenv.core.limits import RunLimits
from agentenv.core.messages import CallStatus, JsonValue, Message, ToolErrorKind
from agentenv.core.playing import CurrentEpisode
from agentenv.core.trajectory import EpisodeError, Rewrite, StopReason, TokenSequence, Trajectory
from agentenv.endpoint.captured import Captured, Choice
from agentenv.endpoint.session import Session, SessionOptions
from agentenv.engine.interface import ChatEngine, Engine
from agentenv.runner.conversation.conversation import Reply
from agentenv.runner.guard import Failure, Guard
from agentenv.runner.plan import Plan
from agentenv.runner.record import OpenTurn, Record

if TYPE_CHECKING:
    from agentenv.render.renderer import Renderer

__all__ = ["AgentConversation", "AgentRecord", "OpenAgent", "play_agent", "session_options"]

TimeLeft: TypeAlias = Callable[[], float | None]
"""Returns the seconds that a generation may take; None without a limit."""
Announce: TypeAlias = Callable[[Sequence[Message], Sequence[Mapping[str, JsonValue]]], CurrentEpisode | None]
_GRACE_S = 5.0
"""Time that an agent has to end by itself after a limit refused its request, or after its cancellation."""


class AgentConversation:
    """What an agent and the model said, as the record of an episode reads it.

    Args:
        engine: the model.
        renderer: turns messages into tokens and back; None with an engine that only speaks text.
        options: settings of the session.
    """

    def __init__(
        self, engine: Engine | ChatEngine, renderer: Renderer | None, options: SessionOptions
    ) -> None:
        self.session = Session(engine, renderer, options)
        self.captured = Captured()
        self.untrainable_reason = self.session.untrainable_reason
        self.has_policy_tokens = False
        self.rewrites: list[Rewrite] = []

    def settle(self) -> Captured:
        """Read what was captured so far."""
        self.captured = captured = self.session.captured()
        self.has_policy_tokens = captured.has_policy_tokens
        self.rewrites = list(captured.rewrites)
        self.untrainable_reason = self.session.untrainable_reason or captured.untrainable_reason
        return captured

    @property
    def forks(self) -> Mapping[str, int]:
        """How often a sequence began, by cause."""
        begun = ((name, count) for name, count in self.session.counts.items() if name.startswith("forks_"))
        return {name.removeprefix("forks_"): count for name, count in begun}

    @property
    def usage(self) -> Mapping[str, float]:
        """What else was counted: repeated requests, ignored settings, and tokens that are not trained."""
        counts = self.session.counts.items()
        other = {name: float(count) for name, count in counts if count and not name.startswith("forks_")}
        left_out = self.captured.left_out.items()
        return {**other, **{f"{cause}_tokens": float(count) for cause, count in left_out}}

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Token sequences of the episode."""
        return self.captured.sequences

    async def release(self) -> None:
        """Let the engine forget the episode."""
        await self.session.close()
        await self.session.release()


OpenAgent: TypeAlias = Callable[[SessionOptions], AgentConversation]
"""Opens the conversation of an agent."""


def session_options(
    env: AgentDriven, plan: Plan, name: str, announce: Announce, time_left: TimeLeft
) -> SessionOptions:
    """Return the settings of an agent's session.

    Args:
        env: the environment.
        plan: the episode.
        name: name of the attempt.
        announce: returns what engines without a model may know of the episode.
        time_left: returns the seconds that a generation may take.

    Raises:
        UsageError: The environment does not say which sequences are trained.
    """
    return SessionOptions(
        name=name,
        sampling=plan.rules.sampling,
        limits=plan.rules.limits,
        choice=_checked(env.trained_sequences),
        seed_of=plan.seed_of,
        announce=announce,
        time_left=time_left,
    )


def _checked(choice: object) -> Choice:
    """Return which sequences are trained.

    Raises:
        UsageError: The value is unknown.
    """
    if choice not in ("main", "all") and not callable(choice):
        raise UsageError(
            f"trained_sequences is {choice!r}",
            remedy='write "main", "all", or a function of a sequence that returns whether to train it',
        )
    return cast("Choice", choice)


@dataclass(slots=True)
class AgentRecord(Record):
    """The data of one attempt in which an agent asks the model."""

    @property
    def answered(self) -> bool:
        """Whether the model answered a request in this attempt."""
        return bool(cast("AgentConversation", self.conversation).session.turns)

    def freeze(
        self, reason: StopReason, *, outcome: Outcome | None = None, error: EpisodeError | None = None
    ) -> Trajectory:
        """Return the trajectory of what was captured so far."""
        captured = cast("AgentConversation", self.conversation).settle()
        self.turns = _open_turns(captured)
        self.messages = list(captured.messages)
        self.tools = captured.tools
        self.sampled_tokens = sum(turn.num_tokens for turn in captured.turns)
        results = [result for turn in captured.turns for result in turn.tool_results]
        self.tool_calls = sum(result.error_kind is not ToolErrorKind.NOT_RUN for result in results)
        statuses = [call.status for turn in captured.turns for call in turn.tool_calls]
        fine = (CallStatus.OK, CallStatus.IN_THINKING, CallStatus.UNKNOWN_TOOL)
        self.parse_errors = sum(status not in fine for status in statuses)
        # A dataclass with slots is made anew, so `super()` without arguments does not find it.
        return Record.freeze(self, reason, outcome=outcome, error=error)


def _open_turns(captured: Captured) -> list[OpenTurn]:
    turns: list[OpenTurn] = []
    for turn, sampling in zip(captured.turns, captured.sampling, strict=True):
        reply = Reply(
            turn.message, turn.tool_calls, turn.finish_reason, turn.num_tokens, turn.start, turn.sequence
        )
        open_turn = OpenTurn(turn.index, reply, sampling, turn.tool_results)
        open_turn.timings.update(turn.timings)
        turns.append(open_turn)
    return turns


async def play_agent(
    env: AgentDriven, conversation: AgentConversation, guard: Guard, limits: RunLimits
) -> StopReason:
    """Run an agent to its end, and return why the episode ended.

    Raises:
        Halt: A time limit ended the episode.
        Failure: The agent or the engine failed.
    """
    # The web server behind it takes a fifth of the time in which a small evaluation starts and ends.
    from agentenv.endpoint.server import session_url

    session = conversation.session
    async with session_url(session) as url:
        working = asyncio.create_task(_failure_of(env, url))
        try:
            await _watch(working, session, guard, limits)
        finally:
            await _end(working)
    return _reason(working, session)


async def _watch(
    working: asyncio.Task[BaseException | None], session: Session, guard: Guard, limits: RunLimits
) -> None:
    """Wait until the agent ends, a limit refuses its requests, or the model fails."""
    while not working.done() and session.stop is None and session.failure is None:
        session.changed.clear()
        changed = asyncio.create_task(session.changed.wait())
        try:
            # Each wait begins anew when a request begins or ends.
            if session.busy:
                wait = guard.waiting("engine", limits.turn_timeout_s)
            else:
                wait = guard.waiting("agent", limits.env_timeout_s)
            async with wait:
                await asyncio.wait({working, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
    if not working.done() and session.stop is not None:
        await asyncio.wait({working}, timeout=_GRACE_S)


def _reason(working: asyncio.Task[BaseException | None], session: Session) -> StopReason:
    """Return why an episode ended.

    Raises:
        Failure: The agent or the engine failed.
    """
    if session.failure is not None:
        raise Failure.of("engine", session.failure)
    if session.stop is not None:
        return session.stop
    if session.turns and session.turns[-1].finish_reason == "content_filter":
        return StopReason.CONTENT_FILTER
    failure = None if working.cancelled() or not working.done() else working.result()
    if failure is not None and session.refused == "context_length_exceeded":
        return StopReason.CONTEXT_LENGTH
    if session.turns and session.turns[-1].finish_reason == "length":
        return StopReason.GENERATION_LENGTH
    if failure is not None:
        raise Failure.of("agent", failure) from failure
    if not session.turns:
        silent = UsageError(
            "the agent ended without asking the model", remedy="give its SDK the url as the base URL"
        )
        if session.refusal:
            refused = f"the agent ended without an answer of the model: {session.refusal:.300}"
            silent = UsageError(refused, remedy="correct its request")
        raise Failure.of("agent", silent)
    return StopReason.FINAL_ANSWER


async def _failure_of(env: AgentDriven, url: str) -> BaseException | None:
    """Run an agent, and return what it raised; a `SystemExit` in a task would end the event loop."""
    try:
        await env.run_agent(url)
    except BaseException as error:
        if must_pass(error):
            raise
        return error
    return None


async def _end(working: asyncio.Task[BaseException | None]) -> None:
    """Cancel an agent that still runs, and give it time to clean up."""
    if not working.done():
        working.cancel()
        await asyncio.wait({working}, timeout=_GRACE_S)
