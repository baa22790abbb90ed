"""Isolation: a failing episode is one record; the others go on, the books balance, all is closed."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from contextlib import aclosing
from typing import ClassVar
from zlib import crc32

import pytest

from agentenv.core import EngineUnavailable, RunLimits, SandboxCrashed, SandboxUnavailable, StopReason
from agentenv.engine import ScriptedEngine, ScriptedTurn
from agentenv.envs import Env, EnvSpec, ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import FunctionUser, GroupPolicy, Runner, RunnerOptions, UserTurn
from agentenv.testing import tool_call
from agentenv.tools import tool
from helpers.waiting import PATIENCE_S, until

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)


class Faulty(ToolEnv):
    """Breaks where its task says."""

    closed: ClassVar[Counter[str]] = Counter()
    made = 0

    def __init__(self) -> None:
        Faulty.made += 1
        self.where = ""

    def start(self, where: str = "", number: int = 0) -> str:
        self.where = where
        if where == "start":
            raise RuntimeError("reset broke")
        return f"go {where} {number}"

    @tool
    def work(self) -> str:
        "Work."
        if self.where == "tool":
            raise RuntimeError("tool broke")
        if self.where == "sandbox":
            raise SandboxCrashed("the sandbox is gone")
        return "worked"

    async def step(self, action):
        if self.where == "env":
            raise RuntimeError("step broke")
        if self.where == "exit":
            raise SystemExit(3)
        if self.where == "cancel":
            raise asyncio.CancelledError
        return await super().step(action)

    def reward(self) -> float:
        if self.where == "reward":
            raise RuntimeError("reward broke")
        return 1.0

    def close(self) -> None:
        Faulty.closed[self.where] += 1
        if self.where == "close":
            raise RuntimeError("close broke")


def script(request):
    if "go engine" in request.prompt_text:
        raise RuntimeError("engine broke")
    return tool_call("work") if request.turn == 0 else "done"


class BrokenParser(Renderer):
    def parse(self, token_ids):
        if "parser" in self.decode(token_ids):
            raise RuntimeError("parser broke")
        return super().parse(token_ids)


def spec_of(entry=Faulty, tasks=None, **options) -> EnvSpec:
    return EnvSpec.of("test/Faulty-v0", entry, tasks=tasks or [{"where": ""}], **options)


async def collect(runner, spec, tasks, **options):
    return [group async for group in runner.run_groups(spec, tasks, **options)]


WHERE = ["", "start", "tool", "env", "exit", "cancel", "reward", "engine", "sandbox", "close"]


async def test_one_failing_episode_leaves_the_others_alone_and_is_delivered_with_its_cause():
    Faulty.closed.clear()
    runner = Runner(ScriptedEngine(script, tokenizer=TOKENIZER), RENDERER, options=RunnerOptions(retries=0))

    groups = await collect(runner, spec_of(), [{"where": where} for where in WHERE])

    by_where = {group.trajectories[0].task["where"]: group.trajectories[0] for group in groups}
    assert set(by_where) == set(WHERE)
    boundaries = {where: one.error.boundary for where, one in by_where.items() if one.error}
    assert boundaries == {
        "start": "env",
        "env": "env",
        "exit": "env",
        "cancel": "env",
        "reward": "reward",
        "engine": "engine",
        "sandbox": "sandbox",
    }
    failed = {where: one.stop_reason for where, one in by_where.items() if one.error}
    assert {where for where, reason in failed.items() if reason is StopReason.ABORTED} == {
        "engine",
        "sandbox",
    }
    assert "reset broke" in by_where["start"].error.traceback
    assert by_where["start"].error.type == "RuntimeError"
    for healthy in ("", "tool", "close"):
        assert by_where[healthy].stop_reason is StopReason.FINAL_ANSWER
        assert by_where[healthy].reward == 1.0
    assert all(not by_where[where].trainable and by_where[where].reward is None for where in failed)
    assert runner.ledger.submitted == len(WHERE) == sum(runner.ledger.outcomes.values())
    assert all(Faulty.closed[where] == 1 for where in WHERE if where != "start")


async def test_a_parser_that_raises_fails_its_episode_only():
    renderer = BrokenParser(TOKENIZER)
    engine = ScriptedEngine(
        lambda request: "parser" if "1" in request.prompt_text else "fine", tokenizer=TOKENIZER
    )
    runner = Runner(engine, renderer, options=RunnerOptions(retries=0))

    records = [
        group.trajectories[0] for group in await collect(runner, spec_of(), [{"number": 0}, {"number": 1}])
    ]

    fine, broken = sorted(records, key=lambda one: one.task["number"])
    assert fine.stop_reason is StopReason.FINAL_ANSWER
    assert broken.stop_reason is StopReason.ERROR
    assert broken.error.boundary == "parser"


@pytest.mark.parametrize("failure", [ValueError, SystemExit])
async def test_an_environment_that_cannot_be_made_is_an_error_of_each_episode(failure):

    def broken(**kwargs):
        raise failure("no such world")

    runner = Runner(ScriptedEngine(["a"], tokenizer=TOKENIZER), RENDERER)

    (group,) = await collect(runner, spec_of(broken), [{}], group_size=3)

    assert [one.error.message for one in group] == ["no such world"] * 3
    assert runner.ledger.outcomes == {StopReason.ERROR: 3}
    assert runner.ledger.balanced


async def test_failed_members_stay_in_the_group_as_data_and_out_of_what_is_usable():

    def sometimes(request):
        if "/2/" in request.session_id:
            raise EngineUnavailable("gone")
        return "done"

    runner = Runner(
        ScriptedEngine(sometimes, tokenizer=TOKENIZER), RENDERER, options=RunnerOptions(retries=0)
    )

    (group,) = await collect(runner, spec_of(), [{}], group_size=4)

    assert [one.member for one in group] == [0, 1, 2, 3]
    assert [one.member for one in group.usable] == [0, 1, 3]
    assert group.outcomes == {StopReason.FINAL_ANSWER: 3, StopReason.ABORTED: 1}
    assert len({one.seed for one in group}) == 1


async def test_a_failed_member_can_be_refilled_by_another():

    def sometimes(request):
        if "/2/" in request.session_id:
            raise RuntimeError("gone")
        return "done"

    runner = Runner(
        ScriptedEngine(sometimes, tokenizer=TOKENIZER), RENDERER, options=RunnerOptions(retries=0)
    )

    (group,) = await collect(
        runner, spec_of(), [{}], group_size=4, policy=GroupPolicy(on_failed="refill", max_refills=1)
    )

    assert [one.member for one in group] == [0, 1, 2, 3, 4]
    assert len(group.usable) == 4
    assert runner.ledger.submitted == 5
    assert runner.ledger.balanced


async def test_a_group_below_its_minimum_is_marked_and_says_why():

    def sometimes(request):
        if "/0/" not in request.session_id:
            raise RuntimeError("gone")
        return "done"

    runner = Runner(
        ScriptedEngine(sometimes, tokenizer=TOKENIZER), RENDERER, options=RunnerOptions(retries=0)
    )

    (group,) = await collect(runner, spec_of(), [{}], group_size=3, policy=GroupPolicy(min_usable=2))

    assert group.usable == ()
    assert "min_usable=2" in group.trajectories[0].untrainable_reason
    assert group.trajectories[0].reward == 1.0


async def test_a_retry_is_equal_to_a_fresh_run():
    tries = Counter()

    def flaky(request):
        tries[request.turn] += 1
        if request.turn == 1 and tries[1] == 1:
            return ScriptedTurn(token_ids=(104,), finish_reason="abort")
        return tool_call("work") if request.turn == 0 else "done"

    def steady(request):
        return tool_call("work") if request.turn == 0 else "done"

    runner = Runner(
        ScriptedEngine(flaky, tokenizer=TOKENIZER), RENDERER, options=RunnerOptions(retry_wait_s=0.001)
    )
    fresh = Runner(ScriptedEngine(steady, tokenizer=TOKENIZER), RENDERER)

    ((retried,),) = await collect(runner, spec_of(), [{"number": 4}])
    ((plain,),) = await collect(fresh, spec_of(), [{"number": 4}])

    assert (retried.attempt, plain.attempt) == (1, 0)
    assert runner.ledger.retried == 1
    for name in (
        "sequences",
        "messages",
        "stop_reason",
        "reward",
        "metrics",
        "seed",
        "error",
        "untrainable_reason",
    ):
        assert getattr(retried, name) == getattr(plain, name), name
    assert [turn.sampling for turn in retried.turns] == [turn.sampling for turn in plain.turns]


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (EngineUnavailable("503"), 4),
        (ConnectionResetError("reset"), 4),
        (SandboxUnavailable("no isolation"), 1),
        (RuntimeError("400 bad request"), 1),
    ],
)
async def test_retries_are_bounded_and_only_for_what_may_pass(error, tries):
    engine = ScriptedEngine([ScriptedTurn(error=error)], tokenizer=TOKENIZER, repeat_last=True)
    runner = Runner(engine, RENDERER, options=RunnerOptions(retries=3, retry_wait_s=0.001))

    ((record,),) = await collect(runner, spec_of(), [{}])

    assert len(engine.requests) == tries
    assert record.attempt == tries - 1
    assert record.stop_reason is StopReason.ABORTED


async def test_waits_between_attempts_grow_to_a_cap(monkeypatch, caplog):
    engine = ScriptedEngine(
        [ScriptedTurn(error=EngineUnavailable("down"))], tokenizer=TOKENIZER, repeat_last=True
    )
    real = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real(0))
    runner = Runner(engine, RENDERER, options=RunnerOptions(retries=7))

    await collect(runner, spec_of(), [{}])

    waits = [float(line.split(" follows in ")[1].removesuffix(" s")) for line in caplog.messages]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


async def test_no_attempt_follows_that_would_wait_past_the_time_of_the_episode():
    engine = ScriptedEngine(
        [ScriptedTurn(error=EngineUnavailable("down"))], tokenizer=TOKENIZER, repeat_last=True
    )
    limits = RunLimits(episode_timeout_s=50)
    runner = Runner(engine, RENDERER, limits, options=RunnerOptions(retries=5, retry_wait_s=60))

    ((record,),) = await collect(runner, spec_of(), [{}])

    assert (record.stop_reason, record.attempt) == (StopReason.ABORTED, 0)


async def test_time_that_is_up_before_the_model_answers_is_no_score():
    stuck = ScriptedEngine([ScriptedTurn(text="done", gate=asyncio.Event())], tokenizer=TOKENIZER)
    runner = Runner(stuck, RENDERER, RunLimits(episode_timeout_s=0.2))

    ((record,),) = await collect(runner, spec_of(), [{}])

    assert (record.stop_reason, record.reward) == (StopReason.ABORTED, None)
    assert (record.error.boundary, record.attempt) == ("engine", 0)


async def test_time_that_is_up_after_an_answer_is_a_deadline():
    turns = [tool_call("work"), ScriptedTurn(text="done", gate=asyncio.Event())]
    runner = Runner(ScriptedEngine(turns, tokenizer=TOKENIZER), RENDERER, RunLimits(episode_timeout_s=2))

    ((record,),) = await collect(runner, spec_of(), [{}])

    assert (record.stop_reason, len(record.turns)) == (StopReason.DEADLINE, 1)
    assert record.reward is not None


async def test_a_stop_request_is_honoured_while_waiting_for_a_retry():
    engine = ScriptedEngine(
        [ScriptedTurn(error=EngineUnavailable("down"))], tokenizer=TOKENIZER, repeat_last=True
    )
    runner = Runner(engine, RENDERER, options=RunnerOptions(retries=50, retry_wait_s=10 * PATIENCE_S))
    task = asyncio.create_task(collect(runner, spec_of(), [{}]))
    while not runner.ledger.retried:  # noqa: ASYNC110 - the runner has no event for it
        await asyncio.sleep(0)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(PATIENCE_S):
            await task

    assert runner.ledger.cancelled == 1
    assert runner.ledger.balanced


async def test_a_reward_of_none_is_left_out_and_counted_nowhere():

    class Maybe(Faulty):
        def reward(self):
            return None if self.context.episode_id.split("/")[-2:][0] == "1" else 1.0

    runner = Runner(ScriptedEngine(["done"], tokenizer=TOKENIZER, repeat_last=True), RENDERER)

    (group,) = await collect(runner, spec_of(Maybe), [{}], group_size=3)

    assert [one.reward for one in group].count(None) == 1
    assert len(group.usable) == 2


async def test_cancelling_closes_every_environment_and_keeps_what_is_finished():
    Faulty.closed.clear()
    Faulty.made = 0
    gate = asyncio.Event()

    def waiting(request):
        return ScriptedTurn(text="done", gate=None if "go  0" in request.prompt_text else gate)

    runner = Runner(
        ScriptedEngine(waiting, tokenizer=TOKENIZER), RENDERER, options=RunnerOptions(concurrency=4)
    )
    kept = []
    task = asyncio.create_task(
        collect(runner, spec_of(), [{"number": n} for n in range(9)], on_trajectory=kept.append)
    )
    while len(kept) < 1 or runner.ledger.in_flight < 4:  # noqa: ASYNC110 - likewise
        await asyncio.sleep(0)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert len(kept) == 1
    assert kept[0].stop_reason is StopReason.FINAL_ANSWER
    assert sum(Faulty.closed.values()) == Faulty.made == 5
    assert runner.ledger.cancelled == 4
    assert runner.ledger.in_flight == 0
    assert runner.ledger.balanced


@pytest.mark.parametrize("where", ["reset", "tool", "user", "reward"])
async def test_cancelling_reaches_every_part_of_an_episode_once(where):
    reached: list[str] = []
    closed: list[str] = []

    async def wait_at(place: str) -> None:
        reached.append(place)
        if place == where:
            await asyncio.Event().wait()

    class Waiting(ToolEnv):
        async def start(self) -> str:
            await wait_at("reset")
            return "go"

        @tool
        async def work(self) -> str:
            "Work."
            await wait_at("tool")
            return "worked"

        async def reward(self) -> float:
            await wait_at("reward")
            return 1.0

        def close(self) -> None:
            closed.append(where)

    async def answer(messages, task):
        await wait_at("user")
        return UserTurn("Thanks.", done=True)

    runner = Runner(ScriptedEngine([tool_call("work"), "done"], tokenizer=TOKENIZER), RENDERER)
    spec = spec_of(Waiting, tasks=[{}], user=FunctionUser(answer))
    playing = asyncio.create_task(collect(runner, spec, [{}]))
    await until(lambda: where in reached)

    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing

    parts = ["reset", "tool", "user", "reward"]
    assert reached == parts[: parts.index(where) + 1]
    assert closed == [where]
    assert (runner.ledger.cancelled, runner.ledger.in_flight) == (1, 0)


async def test_leaving_the_loop_early_closes_what_is_running():
    Faulty.closed.clear()
    Faulty.made = 0
    runner = Runner(
        ScriptedEngine(["done"], tokenizer=TOKENIZER, repeat_last=True),
        RENDERER,
        options=RunnerOptions(concurrency=3),
    )

    async with aclosing(runner.run_groups(spec_of(), ({"number": n} for n in range(10**9)))) as groups:
        async for _ in groups:
            break

    assert sum(Faulty.closed.values()) == Faulty.made
    assert runner.ledger.in_flight == 0


async def test_the_task_source_may_fail_and_says_so():
    def rows():
        yield {"number": 1}
        raise ValueError("row 2 is broken")

    runner = Runner(ScriptedEngine(["done"], tokenizer=TOKENIZER, repeat_last=True), RENDERER)

    with pytest.raises(ValueError, match="row 2 is broken"):
        await collect(runner, spec_of(), rows())
    assert runner.ledger.balanced
    assert runner.ledger.in_flight == 0


async def test_order_of_completion_changes_no_result():
    async def at_pace(pace):
        async def paced(request):
            for _ in range(pace(request)):
                await asyncio.sleep(0)
            return tool_call("work") if request.turn == 0 else f"done {request.sampling.seed}"

        runner = Runner(
            ScriptedEngine(paced, tokenizer=TOKENIZER),
            RENDERER,
            options=RunnerOptions(concurrency=5),
            run_seed=7,
        )
        groups = await collect(runner, spec_of(), [{"number": n} for n in range(6)], group_size=3)
        return {
            group.group_id: [(one.sequences, one.messages, one.member) for one in group] for group in groups
        }

    one = await at_pace(lambda request: 0)
    other = await at_pace(lambda request: crc32(request.session_id.encode()) % 13)

    assert one == other
    assert len({record[0][0].spans[-1].token_ids for group in one.values() for record in group}) == 18


async def test_a_task_met_again_is_another_group_and_sampled_anew():
    seeds = []
    engine = ScriptedEngine(
        lambda request: seeds.append(request.sampling.seed) or "done", tokenizer=TOKENIZER
    )
    runner = Runner(engine, RENDERER)

    groups = await collect(runner, spec_of(), [{"number": 1}, {"number": 1}])
    again = await collect(runner, spec_of(), [{"number": 1}], round_index=1)

    assert len({group.group_id for group in [*groups, *again]}) == 3
    assert len(set(seeds)) == 3


async def test_slow_hung_and_raising_resets_start_together():
    together = asyncio.Barrier(14)

    class Slow(Env):
        def reset(self, *, seed=None, options=None):
            raise NotImplementedError

        def step(self, action: str):
            return "", 0.0, True, False, {}

    class Mixed(Slow):
        async def reset(self, *, seed=None, options=None):
            number = options["task"]["number"]
            if number == 3:
                raise RuntimeError("no")
            await (asyncio.Event().wait() if number == 5 else together.wait())
            return "hi", {}

    runner = Runner(
        ScriptedEngine(["done"], tokenizer=TOKENIZER, repeat_last=True),
        RENDERER,
        RunLimits(env_timeout_s=2),
    )

    groups = await collect(runner, spec_of(Mixed), [{"number": n} for n in range(16)])

    records = {group.trajectories[0].task["number"]: group.trajectories[0] for group in groups}
    assert records[3].stop_reason is StopReason.ERROR
    assert records[3].error.type == "RuntimeError"
    assert records[5].stop_reason is StopReason.ERROR
    assert records[5].error.type == "TimeoutError"
    assert sum(one.stop_reason is StopReason.ENV_TERMINATED for one in records.values()) == 14


async def test_blocking_tools_do_not_block_the_loop():
    inside: list[int] = []
    release = threading.Event()

    class Blocking(ToolEnv):
        def start(self) -> str:
            return "go"

        @tool
        def block(self) -> str:
            "Block."
            inside.append(threading.get_ident())
            return "released" if release.wait(60) else "forgotten"

    async def release_all():
        await until(lambda: len(inside) == 8)
        release.set()

    releasing = asyncio.create_task(release_all())
    engine = ScriptedEngine([tool_call("block"), "done"], tokenizer=TOKENIZER)
    runner = Runner(engine, RENDERER, options=RunnerOptions(concurrency=8))

    groups = await collect(runner, spec_of(Blocking), [{"id": str(n)} for n in range(8)])

    await releasing
    assert len(set(inside)) == 8
    assert [one.turns[0].tool_results[0].text for (one,) in groups] == ["released"] * 8


async def test_a_turn_that_takes_too_long_and_a_whole_episode_that_does_are_truncated():
    gate = asyncio.Event()
    engine = ScriptedEngine([tool_call("work"), ScriptedTurn(text="late", gate=gate)], tokenizer=TOKENIZER)

    by_turn = await Runner(engine, RENDERER, RunLimits(turn_timeout_s=1.5)).run_episode(Faulty(), {})
    by_episode = await Runner(engine, RENDERER, RunLimits(episode_timeout_s=1.5)).run_episode(Faulty(), {})

    for record in (by_turn, by_episode):
        assert record.stop_reason is StopReason.DEADLINE
        assert record.truncated
        assert record.reward == 1.0
        assert len(record.turns) == 1
        assert record.trainable


async def test_an_environment_that_hangs_past_the_episode_s_deadline_is_the_deadline():
    class Hanging(Faulty):
        async def step(self, action):
            await asyncio.Event().wait()

    engine = ScriptedEngine([tool_call("work")], tokenizer=TOKENIZER)
    runner = Runner(engine, RENDERER, RunLimits(episode_timeout_s=0.2, env_timeout_s=5))

    record = await runner.run_episode(Hanging(), {})

    assert record.stop_reason is StopReason.DEADLINE


async def test_a_user_s_broken_infrastructure_aborts_and_its_broken_code_is_an_error():
    class Talk(Faulty):
        ends_on_text = False

    def down(messages, task):
        raise EngineUnavailable("user model down")

    def wrong(messages, task):
        raise KeyError("oops")

    engine = ScriptedEngine(["hi"], tokenizer=TOKENIZER, repeat_last=True)
    runner = Runner(engine, RENDERER, options=RunnerOptions(retries=0))

    aborted = await runner.run_episode(Talk(), {}, user=FunctionUser(down))
    error = await runner.run_episode(Talk(), {}, user=FunctionUser(wrong))

    assert (aborted.stop_reason, aborted.error.boundary) == (StopReason.ABORTED, "user")
    assert (error.stop_reason, error.error.boundary) == (StopReason.ERROR, "user")


async def test_a_thousand_episodes_close_every_environment_and_leak_nothing():
    Faulty.closed.clear()
    Faulty.made = 0
    runner = Runner(
        ScriptedEngine(["done"], tokenizer=TOKENIZER, repeat_last=True),
        RENDERER,
        options=RunnerOptions(concurrency=200),
    )
    tasks_before = len(asyncio.all_tasks())

    count = 0
    async for group in runner.run_groups(spec_of(), ({"number": n} for n in range(1000))):
        count += len(group)

    gc.collect()
    assert count == 1000 == sum(Faulty.closed.values()) == Faulty.made
    assert len(asyncio.all_tasks()) == tasks_before
    assert runner.ledger.outcomes == {StopReason.FINAL_ANSWER: 1000}
    assert threading.active_count() < 300


async def test_code_that_ignores_its_cancellation_is_left_behind_and_counted():
    release = asyncio.Event()

    class Stubborn(Faulty):
        async def step(self, action):
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return await super().step(action)

    engine = ScriptedEngine([tool_call("work"), "done"], tokenizer=TOKENIZER)
    runner = Runner(
        engine, RENDERER, RunLimits(env_timeout_s=0.5), options=RunnerOptions(close_timeout_s=0.5, retries=0)
    )

    record = await asyncio.wait_for(runner.run_episode(Stubborn(), {}), PATIENCE_S)

    release.set()
    assert record.stop_reason is StopReason.ERROR
    assert record.error.boundary == "env"
    assert "ignored" in record.error.message
    assert runner.watchdog.abandoned == 1
    assert runner.ledger.balanced


async def test_the_watchdog_names_what_an_episode_waits_for(caplog):
    gate = asyncio.Event()
    engine = ScriptedEngine([ScriptedTurn(text="late", gate=gate)], tokenizer=TOKENIZER)
    runner = Runner(engine, RENDERER, options=RunnerOptions(warn_after_s=0.5))
    task = asyncio.create_task(runner.run_episode(Faulty(), {}, group_id="slowpoke"))
    await until(lambda: caplog.records)

    (waiting,) = runner.watchdog.waiting()
    gate.set()
    record = await task

    assert waiting.boundary == "engine"
    assert "slowpoke" in waiting.episode_id
    assert "engine" in caplog.text
    assert record.stop_reason is StopReason.FINAL_ANSWER
    assert runner.watchdog.waiting() == []
