"""One attempt at one episode: generate, answer, decide, until something ends it.

Rules:

1. A tool call gets exactly one answer, in call order: calls that may run go to the environment in
   one action, the others are answered here. On the last turn and after a cut completion none runs.
2. An observation becomes tokens only if the model will read it, so a sequence that was not
   interrupted ends on a sampled token, and the final reward stands on it.
3. Every wait is guarded by its limit and by the episode's deadline, and says whose code runs.
4. A failed episode is not scored: its environment is closed, its record says why.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from math import isfinite
from typing import cast

from agentenv.core.context import Context
from agentenv.core.episode_env import EpisodeEnv, Outcome, StepResult
from agentenv.core.errors import EngineUnavailable, UsageError
from agentenv.core.messages import CallStatus, Message, ToolCall, ToolResult
from agentenv.core.seeds import derive_seed
from agentenv.core.trajectory import StopReason, Trajectory
from agentenv.engine.base import Completion, Sampling
from agentenv.runner.answers import check_step, malformed, marked, mend, not_run, with_recall
from agentenv.runner.condense import Condenser
from agentenv.runner.conversation.base import Conversation
from agentenv.runner.conversation.fit import Observation, max_tokens_left
from agentenv.runner.conversation.overflow import FullOutputs
from agentenv.runner.guard import Failure, Halt, at
from agentenv.runner.leasing import Lease
from agentenv.runner.recorder import OpenTurn, Plan, Record
from agentenv.runner.users import User, read_turn
from agentenv.runner.waiting import Waits

__all__ = ["Episode"]

EXPLANATION = "The environment has finished. Give your final answer now; no tool can be called any more."

_ABORT_SLACK_S = 0.05
"""An engine may give up this much before the deadline that it was told."""


class Episode:
    """Plays a plan once, on a fresh conversation; `play` never raises for what went wrong in it."""

    def __init__(
        self,
        plan: Plan,
        env: EpisodeEnv,
        conversation: Conversation,
        context: Context,
        user: User | None,
        *,
        condenser: Condenser | None = None,
        lease: Lease | None = None,
        full_outputs: FullOutputs | None = None,
        attempt: int = 0,
    ) -> None:
        self._plan = plan
        self._limits = plan.limits
        self._env = env
        self._conversation = conversation
        self._context = context
        self._user = user
        self._condenser = condenser
        self._lease = lease
        self._full_outputs = full_outputs
        self.waits = Waits(context)
        """What the episode waits for; read by whoever watches it."""
        self._record = Record(plan, conversation, attempt)
        self._explained = False
        self._begun = False
        self._repair_json = False

    async def play(self) -> Trajectory:
        """Play to the end and return the record."""
        record = self._record
        try:
            try:
                reason = await self._begin()
                while reason is None:
                    reason = await self._turn(len(record.turns))
            except Halt as halt:
                reason = halt.reason
            return record.freeze(reason, outcome=await self._score(reason))
        except Failure as failure:
            return record.freeze(failure.reason, error=failure.error)
        finally:
            # The environment holds the context: no episode must keep itself alive through it.
            self._context.draft = None

    def give_up(self, failure: Failure) -> Trajectory:
        """Return the record as it stands, failed."""
        return self._record.freeze(failure.reason, error=failure.error)

    # The loop -----------------------------------------------------------------------------

    async def _begin(self) -> StopReason | None:
        plan = self._plan
        lease = self._lease
        if lease is not None:
            began = time.perf_counter()
            self._context.sandbox = await self.waits.within("sandbox", lease.timeout_s, lease.take)
            self._record.spare["queue_s"] += time.perf_counter() - began
        # The deadline is for playing: waiting for a sandbox that others hold does not count.
        if self._limits.episode_timeout_s is not None:
            self._context.deadline = time.monotonic() + self._limits.episode_timeout_s
        began = time.perf_counter()
        reset = await self.waits.within(
            "env",
            self._limits.env_timeout_s,
            self._env.begin,
            plan.task,
            seed=plan.seed,
            context=self._context,
        )
        self._begun = True
        self._repair_json = reset.repair_json
        messages = list(reset.messages)
        self._record.spare["env_s"] += time.perf_counter() - began
        if self._user is not None:
            began = time.perf_counter()
            opening = await self.waits.within(
                "user", self._limits.env_timeout_s, self._user.start, plan.task, seed=plan.seed
            )
            self._record.spare["user_s"] += time.perf_counter() - began
            if opening:
                messages.append({"role": "user", "content": opening})
        with at("env"):
            self._record.tools = tuple(self._env.tool_schemas)
            if self._condenser is not None:
                self._record.tools = with_recall(self._record.tools)
        self._record.messages.extend(messages)
        began = time.perf_counter()
        self._conversation.start(messages, self._record.tools)
        self._record.spare["render_s"] += time.perf_counter() - began
        return None

    async def _turn(self, index: int) -> StopReason | None:
        left = max_tokens_left(
            self._limits, self._plan.sampling.max_tokens, self._conversation.room, self._record.sampled_tokens
        )
        if left < 1:
            room = self._conversation.room
            full = room is not None and room < 1
            return StopReason.CONTEXT_LENGTH if full else StopReason.GENERATION_LENGTH
        turn = await self._generate(index, left)
        if turn.reply.finish_reason == "length":
            self._refuse(turn, "the completion was cut at its length")
            return StopReason.GENERATION_LENGTH
        calls = [call for call in turn.reply.tool_calls if call.status is not CallStatus.IN_THINKING]
        if self._explained:
            self._refuse(turn, "the environment has finished")
            return StopReason.ENV_DONE
        if calls:
            return await self._answer_calls(turn, calls)
        return await self._answer_text(turn)

    async def _generate(self, index: int, max_tokens: int) -> OpenTurn:
        plan = self._plan
        seed = derive_seed(plan.run_seed, plan.env_id, plan.task_id, plan.member, index)
        sampling = replace(plan.sampling, max_tokens=max_tokens, seed=seed)
        began = time.perf_counter()
        raw = await self.waits.within("engine", self._limits.turn_timeout_s, self._ask, sampling, index)
        took = time.perf_counter() - began
        began = time.perf_counter()
        reply = self._conversation.read(raw, turn=index)
        turn = OpenTurn(index, reply, sampling)
        turn.timings["render_s"] += time.perf_counter() - began
        turn.timings["queue_s"] = min(reply.queue_s, took)
        turn.timings["generate_s"] = took - turn.timings["queue_s"]
        self._record.turns.append(turn)
        self._record.messages.append(reply.message)
        self._record.sampled_tokens += reply.num_tokens
        return turn

    async def _ask(self, sampling: Sampling, index: int) -> object:
        left = self.waits.left(self._limits.turn_timeout_s)[0]
        raw = await self._conversation.generate(sampling, turn=index, deadline_s=left)
        if isinstance(raw, Completion) and raw.finish_reason == "abort":
            left = self.waits.left(self._limits.turn_timeout_s, spent=True)[0]
            if left is not None and left < _ABORT_SLACK_S:
                raise Halt(StopReason.DEADLINE)
            raise EngineUnavailable(f"turn {index}: the engine aborted the completion")
        return raw

    async def _answer_calls(self, turn: OpenTurn, calls: list[ToolCall]) -> StopReason | None:
        limits = self._limits
        if last := self._why_last(turn):
            spent = (
                f"{limits.max_turns} turns"
                if last is StopReason.MAX_TURNS
                else f"{limits.max_total_tokens} sampled tokens"
            )
            self._refuse(turn, f"no turn was left to read the result (limit of {spent})")
            return last
        mended: frozenset[str] = frozenset()
        if self._repair_json:
            calls, mended = mend(calls, self._record.tools)
            self._record.repaired_calls += len(mended)
        answers: dict[int, ToolResult] = {}
        runnable: list[int] = []
        over_calls = over_errors = False
        for place, call in enumerate(calls):
            if self._condenser is not None and call.name == "recall_block" and call.status is CallStatus.OK:
                answers[place] = self._condenser.recall(call)
            elif call.status is not CallStatus.OK:
                answers[place] = malformed(call)
                # A well-formed call of a tool that does not exist is no parse error.
                self._record.parse_errors += call.status is not CallStatus.UNKNOWN_TOOL
            elif (
                limits.max_tool_calls is not None
                and self._record.tool_calls + len(runnable) >= limits.max_tool_calls
            ):
                over_calls = True
                answers[place] = not_run(call, f"limit of {limits.max_tool_calls} tool calls reached")
            else:
                runnable.append(place)
        if limits.max_parse_errors is not None:
            over_errors = self._record.parse_errors > limits.max_parse_errors
        step = StepResult()
        if runnable:
            step = await self._advance(turn, [calls[place] for place in runnable])
            answers.update(zip(runnable, marked(step.tool_results, mended), strict=True))
        observation = Observation(tuple(answers[place] for place in range(len(calls))), step.messages)
        reason = await self._stop_after(step, asked=bool(runnable))
        if reason is None and over_calls:
            reason = StopReason.MAX_TOOL_CALLS
        if reason is None and over_errors:
            reason = StopReason.MAX_PARSE_ERRORS
        return await self._observe(turn, observation, reason)

    async def _answer_text(self, turn: OpenTurn) -> StopReason | None:
        step = await self._advance(turn, [])
        if self._env.ends_on_text and not step.truncated:
            return await self._observe(turn, Observation((), step.messages), StopReason.FINAL_ANSWER)
        reason = await self._stop_after(step, asked=True)
        messages = step.messages
        if reason is None and self._user is not None:
            words, reason = await self._ask_user(turn, self._user, messages)
            messages = (*messages, *words)
        return await self._observe(turn, Observation((), messages), reason or self._why_last(turn))

    async def _advance(self, turn: OpenTurn, calls: list[ToolCall]) -> StepResult:
        limits, context = self._limits, self._context
        context.turn = turn.index
        if limits.max_tool_calls is not None:
            # As it stands before this turn's calls: a toolbox counts those itself.
            context.tool_calls_left = limits.max_tool_calls - self._record.tool_calls
        self._record.tool_calls += len(calls)
        action = cast(
            "Message", {key: value for key, value in turn.reply.message.items() if key != "tool_calls"}
        )
        if calls:
            action["tool_calls"] = [call.to_message() for call in calls]
        began = time.perf_counter()
        step = await self.waits.within("env", limits.env_timeout_s, self._env.advance, action)
        took = time.perf_counter() - began
        with at("env"):
            check_step(step, calls)
        tools = max((result.duration_s for result in step.tool_results), default=0.0)
        turn.timings["tools_s"] += min(tools, took)
        turn.timings["env_s"] += took - min(tools, took)
        turn.reward += step.reward
        return step

    async def _stop_after(self, step: StepResult, *, asked: bool) -> StopReason | None:
        """Why the environment's answer ends the episode; None if it goes on."""
        if step.terminated:
            return StopReason.ENV_TERMINATED
        if step.truncated:
            return StopReason.ENV_TRUNCATED
        if not asked or not await self.waits.within("env", self._limits.env_timeout_s, self._env.is_finished):
            return None
        return StopReason.ENV_DONE

    async def _ask_user(
        self, turn: OpenTurn, user: User, said: tuple[Message, ...]
    ) -> tuple[tuple[Message, ...], StopReason | None]:
        limit = self._limits.max_user_turns
        if limit is not None and self._record.user_turns >= limit:
            return (), StopReason.MAX_USER_TURNS
        self._record.user_turns += 1
        began = time.perf_counter()
        heard = [*self._record.messages, *said] if said else self._record.messages
        raw = await self.waits.within("user", self._limits.env_timeout_s, user.respond, heard)
        turn.timings["user_s"] += time.perf_counter() - began
        with at("user"):
            answer = read_turn(raw)
            self._record.give(turn.index, answer.reward)
            for index, reward in answer.turn_rewards.items():
                self._record.give(index, reward)
        words: tuple[Message, ...] = ({"role": "user", "content": answer.text},) if answer.text else ()
        return words, StopReason.USER_DONE if answer.done else None

    async def _observe(
        self, turn: OpenTurn, observation: Observation, reason: StopReason | None
    ) -> StopReason | None:
        """Record what the turn is answered with; tokens only if the episode goes on."""
        explain = reason is StopReason.ENV_DONE and self._plan.done_policy == "explain"
        if explain and not self._why_last(turn):
            told: Message = {"role": "user", "content": EXPLANATION}
            observation = Observation(observation.results, (*observation.messages, told))
            reason, self._explained = None, True
        if reason is None:
            await self._condense(turn, observation)
            # What a summariser writes counts too: it may have used up the rest.
            reason = self._why_last(turn)
        if reason is None:
            began = time.perf_counter()
            fitted = self._conversation.observe(turn.reply, observation)
            turn.timings["render_s"] += time.perf_counter() - began
            if fitted is None:
                reason = StopReason.TOOL_OUTPUT_OVERFLOW if observation.results else StopReason.CONTEXT_LENGTH
            else:
                observation = await self._keep_whole(turn, observation, fitted)
        if reason is not None and self._explained:
            reason = StopReason.ENV_DONE
        turn.results = observation.results
        self._record.trimmed += observation.trimmed_messages + sum(one.trimmed for one in observation.results)
        self._record.messages.extend(observation.all_messages)
        return reason

    async def _keep_whole(self, turn: OpenTurn, whole: Observation, shown: Observation) -> Observation:
        """Keep on disk what was cut of tool results, if the run asks for it."""
        if self._full_outputs is None or shown.results == whole.results:
            return shown
        plan = self._plan
        name = f"{plan.group_id}/{plan.member}/{self._record.attempt}"
        results = await asyncio.to_thread(
            self._full_outputs.keep_cut, name, turn.index, whole.results, shown.results
        )
        return replace(shown, results=results)

    async def _condense(self, turn: OpenTurn, observation: Observation) -> None:
        condenser = self._condenser
        if condenser is None or not condenser.due(*self._conversation.used_with(observation)):
            return
        began = time.perf_counter()
        limit = self._limits.turn_timeout_s
        view = await self.waits.within("engine", limit, condenser.shorten, self._conversation.view)
        turn.timings["generate_s"] += time.perf_counter() - began
        if view is not None:
            self._record.sampled_tokens += view.written_tokens
            self._record.condenser_tokens += view.written_tokens
            self._conversation.go_on_with(view)

    def _refuse(self, turn: OpenTurn, why: str) -> None:
        """Answer every call of the turn "not run", in the messages alone."""
        calls = [call for call in turn.reply.tool_calls if call.status is not CallStatus.IN_THINKING]
        turn.results = tuple(not_run(call, why) for call in calls)
        self._record.messages.extend(result.to_message() for result in turn.results)

    def _why_last(self, turn: OpenTurn) -> StopReason | None:
        """Why no turn can follow this one; None if one can."""
        limits = self._limits
        if limits.max_turns is not None and turn.index + 1 >= limits.max_turns:
            return StopReason.MAX_TURNS
        if limits.max_total_tokens is not None and self._record.sampled_tokens >= limits.max_total_tokens:
            return StopReason.GENERATION_LENGTH
        return None

    # The end ------------------------------------------------------------------------------

    async def _score(self, reason: StopReason) -> Outcome:
        if not self._begun:
            return Outcome(None)
        began = time.perf_counter()

        def draft() -> Trajectory:
            return self._record.freeze(reason)

        self._context.draft = draft
        # The deadline is for playing: an episode that was cut by it is still scored.
        self._context.deadline = None
        limit = self._limits.reward_timeout_s
        outcome = await self.waits.within("reward", limit, self._env.end, reason.value)
        reward, parts = outcome.reward, outcome.rewards
        if self._plan.score is not None:
            more, named = await self.waits.within(
                "reward", limit, self._plan.score, draft(), self._env, self._plan.task
            )
            reward = None if reward is None or more is None else reward + more
            parts = {**parts, **named}
        with at("reward"):
            if reward is not None and not isfinite(reward):
                raise UsageError(f"the reward {reward!r} is not finite; give None if there is none")
        self._record.spare["reward_s"] += time.perf_counter() - began
        return Outcome(reward, parts)
