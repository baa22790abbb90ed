"""Play one attempt at one episode: generate, answer the model, decide, until something ends the episode.

Rules:

1. Each tool call gets exactly one answer, in call order. Calls that may run go to the environment in one
   action; the others are answered here. No call runs on the last turn or after a completion that was cut.
2. An observation becomes tokens only if the model will read it. A sequence that was not interrupted
   therefore ends on a sampled token, which carries the final reward.
3. Every wait has its own limit and the episode's deadline, and records whose code is running.
4. A failed episode is not scored. Its environment is closed, and its record says why it failed. An episode
   whose time is up before the model answered anything has failed: the model is not to blame.
5. All code of the environment and the user runs in the task of the episode, also their constructors. Whatever
   it raises ends this episode only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Protocol

from agentenv.core.episode_env import (
    Action,
    AgentDriven,
    Context,
    EpisodeEnv,
    OpensSandbox,
    Outcome,
    ResetResult,
    StepResult,
    check_attempt,
    check_step,
)
from agentenv.core.errors import EngineUnavailable, UsageError
from agentenv.core.faults import must_pass
from agentenv.core.limits import max_tokens_left
from agentenv.core.messages import CallStatus, JsonValue, Message, ToolCall, ToolResult, copy_of, text_of
from agentenv.core.playing import CurrentEpisode, playing
from agentenv.core.refusals import Refusal, malformed
from agentenv.core.threads import beside_loop
from agentenv.core.trajectory import EpisodeError, StopReason, Trajectory
from agentenv.engine.interface import ChatCompletion, Completion, Sampling
from agentenv.runner.conversation.conversation import Conversation
from agentenv.runner.conversation.fit import TurnAnswer
from agentenv.runner.guard import Failure, Guard, Halt, at
from agentenv.runner.plan import Plan
from agentenv.runner.record import OpenTurn, Record
from agentenv.tools.arguments import marked, mend

if TYPE_CHECKING:
    from agentenv.core.execution import SandboxProtocol
    from agentenv.runner.agent import OpenAgent
    from agentenv.runner.condense import Condenser, View
    from agentenv.runner.outputs import FullOutputs
    from agentenv.runner.users import User

__all__ = ["Episode"]

EXPLANATION = "The environment has finished. Give your final answer now; no tool can be called any more."

_ABORT_SLACK_S = 0.05
"""An engine may abort a completion this much before its deadline; the stop then counts as the deadline."""


class _Lease(Protocol):
    """The sandbox that an episode may wait for; see `agentenv.runner.watchdog.Lease`."""

    @property
    def timeout_s(self) -> float | None: ...

    async def take(self) -> SandboxProtocol: ...


class Episode:
    """Plays a plan once, on a new conversation. A failure in the episode is recorded, never raised.

    Args:
        plan: what to play.
        open_env: makes the environment.
        open_user: makes the simulated user, or returns None.
        conversation: the conversation with the model.
        context: the context that the environment gets.
        open_agent: opens the conversation of an agent with its own loop, in place of `conversation`.
        condenser: shortens the conversation; a fresh copy is used.
        lease: the sandbox to wait for.
        full_outputs: keeps the full text of cut tool outputs.
        attempt: number of earlier attempts.
    """

    def __init__(
        self,
        plan: Plan,
        open_env: Callable[[], EpisodeEnv],
        open_user: Callable[[], User | None],
        conversation: Conversation,
        context: Context,
        *,
        open_agent: OpenAgent,
        condenser: Condenser | None = None,
        lease: _Lease | None = None,
        full_outputs: FullOutputs | None = None,
        attempt: int = 0,
    ) -> None:
        self._plan = plan
        self._limits = plan.rules.limits
        self._open_env = open_env
        self._open_user = open_user
        self._env: EpisodeEnv
        self._conversation = conversation
        self._context = context
        self._open_agent = open_agent
        self._user: User | None = None
        self._condenser = condenser
        self._lease = lease
        self._full_outputs = full_outputs
        self.guard = Guard(context)
        """Guards the episode's waits; the watchdog reads it to see what the episode waits for."""
        self._record = Record(plan, conversation, attempt)
        self._explained = False
        self._begun = False
        self.touched = False
        """True once the environment was told to begin, so that it cannot be taken for a new one."""
        self._repair_json = False

    async def play(self) -> Trajectory:
        """Play to the end and return the record."""
        reason: StopReason | None = None
        try:
            try:
                reason = await self._begin()
                record = self._record
                while reason is None:
                    index = len(record.turns)
                    sampling = self._sampling(index)
                    began = time.perf_counter()
                    # The engine is awaited here and not deeper, so that few frames lie above it.
                    async with self.guard.waiting("engine", self._limits.turn_timeout_s) as left:
                        sampled = await self._conversation.generate(sampling, turn=index, deadline_s=left)
                        self._refuse_abort(sampled, index)
                    turn = self._read(sampled, index, sampling, time.perf_counter() - began)
                    reason = await self._answer(turn)
            except Halt as halt:
                reason = halt.reason
            if reason is StopReason.DEADLINE and not self._record.answered:
                raise self._unanswered()
            return self._record.freeze(reason, outcome=await self._score(reason))
        except Failure as failure:
            return self.give_up(failure)
        except BaseException as error:
            # Values of outside code, such as a deadline that is no number, may raise anywhere.
            if must_pass(error):
                raise
            return self.give_up(Failure.of(self.guard.boundary, error))
        finally:
            # The environment holds the context, and `draft` holds this episode: without this line they would
            # keep each other alive.
            self._context.draft = None

    def give_up(self, failure: Failure) -> Trajectory:
        """Return the record of what was played so far, marked as failed."""
        return self._record.freeze_failed(failure.reason, failure.error)

    def _unanswered(self) -> Failure:
        """Return the failure of an episode whose time was up before the model said anything."""
        boundary = self.guard.boundary
        message = f"the time was up before the model answered a request; the episode waited for: {boundary}"
        error = EpisodeError(boundary, "TimeoutError", message, retryable=boundary == "engine")
        return Failure(StopReason.ABORTED, error)

    # The beginning ------------------------------------------------------------------------

    async def _begin(self) -> StopReason | None:
        """Begin the episode; play it to its end if an agent plays it, and return why it ended."""
        job, limits, spare = self._plan.job, self._limits, self._record.spare
        with at("env"):
            self._env = self._open_env()
        with at("user"):
            self._user = self._open_user()
        if self._condenser is not None:
            with at("render"):
                self._condenser = self._condenser.fresh()
        if (lease := self._lease) is not None:
            began = time.perf_counter()
            async with self.guard.waiting("sandbox", lease.timeout_s):
                self._context.sandbox = await lease.take()
            spare["queue_s"] += time.perf_counter() - began
        if isinstance(self._env, OpensSandbox):
            began, self.touched = time.perf_counter(), True
            async with self.guard.waiting("sandbox", None):
                limits = self._limits = limits.with_times(await self._env.open_sandbox(job.task))
            self._context.limits = limits
            spare["queue_s"] += time.perf_counter() - began
        # The deadline limits playing: waiting for a sandbox that other episodes hold does not count.
        if limits.episode_timeout_s is not None:
            self._context.deadline = time.monotonic() + limits.episode_timeout_s
        began = time.perf_counter()
        self.touched = True
        async with self.guard.waiting("env", limits.env_timeout_s):
            reset = await self._env.begin(job.task, seed=job.seed, context=self._context)
        self._begun = True
        self._record.keep_declared(self._context.task)
        spare["env_s"] += time.perf_counter() - began
        if isinstance(self._env, AgentDriven):
            return await self._play_agent(self._env)
        await self._start(reset)
        return StopReason.ENV_TERMINATED if reset.terminated else None

    async def _play_agent(self, env: AgentDriven) -> StopReason:
        # The endpoint behind it is loaded with the first agent.
        from agentenv.runner.agent import AgentRecord, play_agent, session_options

        name = self._context.episode_id
        with at("env"):
            if self._plan.job.branch is not None:
                raise UsageError(
                    "an episode that an agent plays cannot be continued from one of its turns",
                    remedy="play it anew; branches and replays work with environments that the runner drives",
                )
            options = session_options(env, self._plan, name, self._known, self._time_left)
        conversation = self._open_agent(options)
        begun = self._record
        self._record = AgentRecord(self._plan, conversation, begun.attempt, begun.started, begun.declared)
        return await play_agent(env, conversation, self.guard, self._limits)

    def _time_left(self) -> float | None:
        """Return the seconds that a generation may take."""
        return self.guard.left(self._limits.turn_timeout_s)[0]

    async def _start(self, reset: ResetResult) -> None:
        """Start the conversation with the first messages of the environment and the user."""
        limits, spare = self._limits, self._record.spare
        self._repair_json = reset.repair_json
        if reset.images and not self._conversation.takes_images:
            raise UsageError(
                f"{self._plan.rules.env_id} shows images, and this model sees none",
                remedy="name a model that sees (hf: or vLLM), evaluate with a chat engine, such as "
                "-m openai:NAME, or turn the images off",
            )
        messages = list(reset.messages)
        if (user := self._user) is not None:
            # Imported here, as few episodes have a user and it brings its own calls of models.
            from agentenv.runner.users import read_opening

            began = time.perf_counter()
            async with self.guard.waiting("user", limits.env_timeout_s):
                # The user gets copies of the task and of messages, so that it cannot change the record.
                opening = read_opening(
                    await user.start(deepcopy(self._context.task), seed=self._plan.job.seed)
                )
            spare["user_s"] += time.perf_counter() - began
            if opening:
                messages.append({"role": "user", "content": opening})
        with at("env"):
            tools = tuple(self._env.tool_schemas)
            if self._condenser is not None:
                from agentenv.runner.condense import with_recall

                tools = with_recall(tools)
            self._record.tools = tools
        self._record.messages.extend(messages)
        self._tell_engine()
        began = time.perf_counter()
        size = sum(len(text_of(message)) for message in messages)
        seen = await beside_loop(size, self._conversation.start, messages, self._record.tools)
        self._record.messages[-len(messages) :] = seen
        spare["render_s"] += time.perf_counter() - began
        if self._condenser is not None and self._condenser.opening:
            view = await self._shortened(TurnAnswer(), spare)
            if view is not None:
                with at("render"):
                    self._conversation.begin_with(view)

    def _tell_engine(self) -> None:
        """Let engines without a model see the episode; the task of the episode ends with it."""
        playing.set(self._known(self._record.messages, self._record.tools))

    def _known(self, messages: Sequence[Message], tools: Sequence[Mapping[str, JsonValue]]) -> CurrentEpisode:
        """Return what engines without a model may know."""
        job = self._plan.job
        return CurrentEpisode(
            env=self._env,
            env_id=self._plan.rules.env_id,
            task=self._context.task,
            seed=job.seed,
            messages=messages,
            tools=tools,
        )

    # A turn -------------------------------------------------------------------------------

    def _sampling(self, index: int) -> Sampling:
        """Return the sampling settings of the next completion.

        Raises:
            Halt: No token is left for a completion.
        """
        asked, room = self._plan.rules.sampling, self._conversation.room
        left = max_tokens_left(self._limits, asked.max_tokens, room, self._record.sampled_tokens)
        if left < 1:
            full = room is not None and room < 1
            raise Halt(StopReason.CONTEXT_LENGTH if full else StopReason.GENERATION_LENGTH)
        return replace(asked, max_tokens=left, seed=self._plan.seed_of(index))

    def _refuse_abort(self, sampled: Completion | ChatCompletion, index: int) -> None:
        if not isinstance(sampled, Completion) or sampled.finish_reason != "abort":
            return
        left = self.guard.left(self._limits.turn_timeout_s, spent=True)[0]
        if left is not None and left < _ABORT_SLACK_S:
            raise Halt(StopReason.DEADLINE)
        raise EngineUnavailable(f"turn {index}: the engine aborted the completion")

    def _read(
        self, sampled: Completion | ChatCompletion, index: int, sampling: Sampling, took: float
    ) -> OpenTurn:
        """Parse and record a completion that took `took` seconds."""
        began = time.perf_counter()
        reply = self._conversation.read(sampled, turn=index)
        turn = OpenTurn(index, reply, sampling, attempt=self._context.attempt)
        turn.timings["render_s"] += time.perf_counter() - began
        turn.timings["queue_s"] = min(reply.queue_s, took)
        turn.timings["generate_s"] = took - turn.timings["queue_s"]
        self._record.turns.append(turn)
        self._record.messages.append(reply.message)
        self._record.sampled_tokens += reply.num_tokens
        return turn

    async def _answer(self, turn: OpenTurn) -> StopReason | None:
        """Answer a turn; return the stop reason, or None if the episode continues."""
        if turn.reply.finish_reason == "length":
            self._refuse(turn, Refusal.CUT)
            return StopReason.GENERATION_LENGTH
        if turn.reply.finish_reason == "content_filter":
            self._refuse(turn, Refusal.FILTERED)
            return StopReason.CONTENT_FILTER
        calls = [call for call in turn.reply.tool_calls if call.status is not CallStatus.IN_THINKING]
        if self._explained:
            self._refuse(turn, Refusal.ENV_FINISHED)
            return StopReason.ENV_DONE
        if not calls:
            return await self._answer_text(turn)
        last, limit = self._last(turn)
        if last is not None:
            self._refuse(turn, Refusal.LAST_TURN, limit)
            return last
        return await self._answer_calls(turn, calls)

    async def _answer_calls(self, turn: OpenTurn, calls: list[ToolCall]) -> StopReason | None:
        mended: frozenset[str] = frozenset()
        if self._repair_json:
            calls, mended = mend(calls, self._record.tools)
            self._record.repaired_calls += len(mended)
        # Invariant: each index of `calls` is either a key of `results` or in `runnable`.
        results, runnable, over = self._sort_out(calls)
        step, finished = StepResult(), False
        if runnable:
            step, finished = await self._advance(
                turn, tuple(calls[index] for index in runnable), ask_done=True
            )
            results.update(zip(runnable, marked(step.tool_results, mended), strict=True))
        answer = TurnAnswer(tuple(results[index] for index in range(len(calls))), step.messages)
        reason = _stop_after(step, finished)
        return await self._observe(turn, answer, over if reason is None else reason)

    def _sort_out(self, calls: list[ToolCall]) -> tuple[dict[int, ToolResult], list[int], StopReason | None]:
        """Answer the calls that are not run; return the indices of the others, and the limit that was passed.

        Tool calls are counted only here. The count includes the calls of environments that run them in their
        own `step`, and each call over the limit gets its own answer.
        """
        limits, record = self._limits, self._record
        results: dict[int, ToolResult] = {}
        runnable: list[int] = []
        over: StopReason | None = None
        for index, call in enumerate(calls):
            if self._condenser is not None and call.name == "recall_block" and call.status is CallStatus.OK:
                with at("render"):
                    results[index] = self._condenser.recall(call)
            elif call.status is not CallStatus.OK:
                results[index] = malformed(call)
                # A well-formed call of a tool that does not exist is not a parse error.
                record.parse_errors += call.status is not CallStatus.UNKNOWN_TOOL
            elif limits.max_tool_calls_per_turn == len(runnable):
                results[index] = Refusal.TURN_CALLS.answer(call, limits.max_tool_calls_per_turn)
            elif (
                limits.max_tool_calls is not None
                and record.tool_calls + len(runnable) >= limits.max_tool_calls
            ):
                over = StopReason.MAX_TOOL_CALLS
                results[index] = Refusal.EPISODE_CALLS.answer(call, limits.max_tool_calls)
            else:
                runnable.append(index)
        if over is None and limits.max_parse_errors is not None:
            over = StopReason.MAX_PARSE_ERRORS if record.parse_errors > limits.max_parse_errors else None
        return results, runnable, over

    async def _answer_text(self, turn: OpenTurn) -> StopReason | None:
        with at("env"):
            # With a user the conversation goes on after a text, whatever the environment does without one.
            ends = self._env.ends_on_text and self._user is None
        step, finished = await self._advance(turn, (), ask_done=not ends)
        if ends and not step.truncated:
            return await self._observe(turn, TurnAnswer((), step.messages), StopReason.FINAL_ANSWER)
        reason = _stop_after(step, finished)
        messages = step.messages
        # One of the two answers: a user who spoke after the environment would answer its words, too.
        if reason is None and self._user is not None and not messages:
            messages, reason = await self._ask_user(turn, self._user)
        return await self._observe(turn, TurnAnswer((), messages), reason or self._last(turn)[0])

    async def _advance(
        self, turn: OpenTurn, calls: tuple[ToolCall, ...], *, ask_done: bool
    ) -> tuple[StepResult, bool]:
        """Let the environment answer a turn; return its answer, and whether its `is_done()` is true."""
        limits, context = self._limits, self._context
        context.turn = turn.index
        if limits.max_tool_calls is not None:
            context.tool_calls_left = limits.max_tool_calls - self._record.tool_calls
        self._record.tool_calls += len(calls)
        began = time.perf_counter()
        async with self.guard.waiting("env", limits.env_timeout_s):
            step = await self._env.advance(Action(turn.reply.message, calls))
            # One wait for both, because a wait costs as much as a small environment's step.
            goes_on = not (step.terminated or step.truncated)
            finished = ask_done and goes_on and await self._env.is_finished()
        took = time.perf_counter() - began
        with at("env"):
            check_step(step, calls)
            check_attempt(context.attempt)
        tools = max((result.duration_s for result in step.tool_results), default=0.0)
        turn.timings["tools_s"] += min(tools, took)
        turn.timings["env_s"] += took - min(tools, took)
        turn.reward += step.reward
        return step, finished

    async def _ask_user(self, turn: OpenTurn, user: User) -> tuple[tuple[Message, ...], StopReason | None]:
        from agentenv.runner.users import read_turn, said_by

        limit = self._limits.max_user_turns
        if limit is not None and self._record.user_turns >= limit:
            return (), StopReason.MAX_USER_TURNS
        self._record.user_turns += 1
        began = time.perf_counter()
        heard = list(map(copy_of, self._record.messages))
        async with self.guard.waiting("user", self._limits.env_timeout_s):
            said_back = await user.respond(heard)
        turn.timings["user_s"] += time.perf_counter() - began
        with at("user"):
            answer = read_turn(said_back)
            self._record.give(turn.index, answer.reward)
            for index, reward in answer.turn_rewards.items():
                self._record.give(index, reward)
            words = said_by(answer)
            return words, StopReason.USER_DONE if answer.done else None

    async def _observe(
        self, turn: OpenTurn, answer: TurnAnswer, reason: StopReason | None
    ) -> StopReason | None:
        """Record the answer to a turn; append its tokens only if the episode continues."""
        explain = reason is StopReason.ENV_DONE and self._plan.rules.done_policy == "explain"
        if explain and not self._last(turn)[0]:
            told: Message = {"role": "user", "content": EXPLANATION}
            answer = TurnAnswer(answer.results, (*answer.messages, told))
            reason, self._explained = None, True
        shown, anew = answer, self._context.begins_anew
        self._context.begins_anew = False
        if reason is None and anew:
            from agentenv.runner.condense import View

            self._conversation.go_on_with(View((), "new"))
            shown = TurnAnswer((), answer.messages)
        elif reason is None:
            await self._condense(turn, answer)
            # A summariser's tokens count towards the episode's limit, and may have used up the rest.
            reason = self._last(turn)[0]
        if reason is None:
            began = time.perf_counter()
            size = sum(map(len, shown.texts))
            fitted = await beside_loop(size, self._conversation.observe, turn.reply, shown)
            turn.timings["render_s"] += time.perf_counter() - began
            if fitted is None:
                reason = StopReason.TOOL_OUTPUT_OVERFLOW if answer.results else StopReason.CONTEXT_LENGTH
            elif anew:
                answer = replace(fitted, results=answer.results)
            elif self._full_outputs is None:
                answer = fitted
            else:
                name = self._record.name
                answer = await self._full_outputs.keep_whole(name, turn.index, answer, fitted)
        if reason is not None and self._explained:
            reason = StopReason.ENV_DONE
        turn.results = answer.results
        self._record.trimmed += answer.trimmed_messages + sum(result.trimmed for result in answer.results)
        self._record.messages.extend(answer.all_messages)
        return reason

    async def _condense(self, turn: OpenTurn, answer: TurnAnswer) -> None:
        view = await self._shortened(answer, turn.timings)
        if view is not None:
            with at("render"):
                self._conversation.go_on_with(view)

    async def _shortened(self, answer: TurnAnswer, timings: dict[str, float]) -> View | None:
        """Return a shorter view of the conversation if it is due with this answer, and add up its cost."""
        condenser = self._condenser
        if condenser is None:
            return None
        with at("render"):
            if not condenser.due(*self._conversation.used_with(answer)):
                return None
        from agentenv.runner.condense import shortened

        began = time.perf_counter()
        async with self.guard.waiting("engine", self._limits.turn_timeout_s):
            view = await shortened(condenser, self._conversation.view)
        timings["generate_s"] += time.perf_counter() - began
        with at("render"):
            if view is not None:
                self._record.sampled_tokens += view.written_tokens
                self._record.condenser_tokens += view.written_tokens
        return view

    def _refuse(self, turn: OpenTurn, why: Refusal, limit: str = "") -> None:
        """Answer every call of the turn with "not run", in the messages only, not in the tokens."""
        calls = [call for call in turn.reply.tool_calls if call.status is not CallStatus.IN_THINKING]
        turn.results = tuple(why.answer(call, limit) for call in calls)
        self._record.messages.extend(result.to_message() for result in turn.results)

    def _last(self, turn: OpenTurn) -> tuple[StopReason | None, str]:
        """Return why no turn can follow this one, and the limit in words."""
        return self._limits.reached(turn.index + 1, self._record.sampled_tokens)

    # The end ------------------------------------------------------------------------------

    async def _score(self, reason: StopReason) -> Outcome:
        if not self._begun:
            return Outcome(None)
        began = time.perf_counter()

        def draft() -> Trajectory:
            return self._record.freeze(reason)

        self._context.draft = draft
        # The deadline limits playing: an episode that it ended is still scored.
        self._context.deadline = None
        limit = self._limits.reward_timeout_s
        async with self.guard.waiting("reward", limit):
            outcome = await self._env.end(reason.value)
        reward, parts = outcome.reward, outcome.rewards
        if (score := self._plan.rules.score) is not None:
            async with self.guard.waiting("reward", limit):
                more, named = await score(draft(), self._env, self._context.task)
            reward = None if reward is None or more is None else reward + more
            parts = {**parts, **named}
        with at("reward"):
            if reward is not None and not isfinite(reward):
                raise UsageError(
                    f"the reward {reward!r} is not finite",
                    remedy="return a finite number, or None if the episode cannot be scored",
                )
        self._record.spare["reward_s"] += time.perf_counter() - began
        return Outcome(reward, parts)


def _stop_after(step: StepResult, finished: bool) -> StopReason | None:
    """Return why the environment's answer ends the episode; None if the episode continues."""
    if step.terminated:
        return StopReason.ENV_TERMINATED
    if step.truncated:
        return StopReason.ENV_TRUNCATED
    return StopReason.ENV_DONE if finished else None
