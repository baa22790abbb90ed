"""Isolation: a failing episode is one record; the others go on, the books balance, all is closed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import aclosing
from typing import ClassVar
from zlib import crc32

import pytest

from agentenv.core import EngineUnavailable, SandboxCrashed, SandboxUnavailable
from agentenv.engine import ScriptedTurn
from agentenv.envs import Env, ToolEnv
from agentenv.render import Renderer
from agentenv.runner import FunctionUser, GroupPolicy, UserTurn
from agentenv.testing import tool_call
from agentenv.tools import tool
from helpers.waiting import PATIENCE_S, until
from scenes import TOKENIZER, groups_of, play, runner, spec_of

DOWN = ScriptedTurn(error=EngineUnavailable("down"))


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
        causes = {
            "env": RuntimeError("step broke"),
            "exit": SystemExit(3),
            "cancel": asyncio.CancelledError(),
        }
        if self.where in causes:
            raise causes[self.where]
        return await super().step(action)

    def reward(self) -> float:
        if self.where == "reward":
            raise RuntimeError("reward broke")
        return 1.0

    def close(self) -> None:
        Faulty.closed[self.where] += 1
        if self.where == "close":
            raise RuntimeError("close broke")


@pytest.fixture(autouse=True)
def _anew():
    Faulty.closed.clear()
    Faulty.made = 0


def script(request):
    if "go engine" in request.prompt_text:
        raise RuntimeError("engine broke")
    return tool_call("work") if request.turn == 0 else "done"


def failing_at(*members: int, error: Exception | None = None):
    """A model that answers no such member of a group."""

    def answer(request):
        if any(f"/{member}/" in request.session_id for member in members):
            raise error or RuntimeError("gone")
        return "done"

    return answer


SPEC = spec_of(Faulty, [{"where": ""}])


async def collect(playing, tasks, spec=SPEC, **options):
    return await groups_of(playing, spec, tasks, **options)


WHERE = ["", "start", "tool", "env", "exit", "cancel", "reward", "engine", "sandbox", "close"]


async def test_one_failing_episode_leaves_the_others_alone_and_is_delivered_with_its_cause():
    playing = runner(script, retries=0)

    groups = await collect(playing, [{"where": where} for where in WHERE])

    by_where = {group[0].task["where"]: group[0] for group in groups}
    failed = {where: one for where, one in by_where.items() if one.error}
    assert set(by_where) == set(WHERE)
    assert {where: one.error.boundary for where, one in failed.items()} == {
        **dict.fromkeys(("start", "env", "exit", "cancel"), "env"),
        **{where: where for where in ("reward", "engine", "sandbox")},
    }
    aborted = {where for where, one in failed.items() if one.stop_reason == "aborted"}
    assert aborted == {"engine", "sandbox"}
    assert "reset broke" in by_where["start"].error.traceback
    assert by_where["start"].error.type == "RuntimeError"
    for healthy in ("", "tool", "close"):
        assert (by_where[healthy].stop_reason, by_where[healthy].reward) == ("final_answer", 1.0)
    assert all(not one.trainable and one.reward is None for one in failed.values())
    assert playing.ledger.submitted == len(WHERE) == sum(playing.ledger.outcomes.values())
    assert all(Faulty.closed[where] == 1 for where in WHERE if where != "start")


async def test_a_parser_that_raises_fails_its_episode_only():
    class BrokenParser(Renderer):
        def parse(self, token_ids):
            if "parser" in self.decode(token_ids):
                raise RuntimeError("parser broke")
            return super().parse(token_ids)

    playing = runner(
        lambda request: "parser" if "1" in request.prompt_text else "fine", renderer=BrokenParser(TOKENIZER)
    )

    groups = await collect(playing, [{"number": 0}, {"number": 1}])

    fine, broken = sorted((group[0] for group in groups), key=lambda one: one.task["number"])
    assert (fine.stop_reason, broken.stop_reason) == ("final_answer", "error")
    assert broken.error.boundary == "parser"


@pytest.mark.parametrize("failure", [ValueError, SystemExit])
async def test_an_environment_that_cannot_be_made_is_an_error_of_each_episode(failure):
    def broken(**kwargs):
        raise failure("no such world")

    playing = runner()

    (group,) = await collect(playing, [{}], spec_of(broken), group_size=3)

    assert [one.error.message for one in group] == ["no such world"] * 3
    assert (playing.ledger.outcomes, playing.ledger.balanced) == ({"error": 3}, True)


async def test_failed_members_stay_in_the_group_as_data_and_out_of_what_is_usable():
    playing = runner(failing_at(2, error=EngineUnavailable("gone")), retries=0)

    (group,) = await collect(playing, [{}], group_size=4)

    assert [one.member for one in group] == [0, 1, 2, 3]
    assert [one.member for one in group.usable] == [0, 1, 3]
    assert group.outcomes == {"final_answer": 3, "aborted": 1}
    assert len({one.seed for one in group}) == 1


@pytest.mark.parametrize(
    ("failing", "most", "members", "usable"),
    [
        ((2,), 0, 4, 3),
        ((2,), 1, 5, 4),
        ((2, 4), 1, 5, 3),  # one that fails in the place of another is not refilled beyond the limit
        ((2, 4), 2, 6, 4),
        ((1, 2), 3, 6, 4),
    ],
)
async def test_failed_members_are_refilled_by_others_up_to_a_number(failing, most, members, usable):
    playing = runner(failing_at(*failing), retries=0)
    policy = GroupPolicy(on_failed="refill", max_refills=most)

    (group,) = await collect(playing, [{}], group_size=4, policy=policy)

    assert [one.member for one in group] == list(range(members))
    assert (len(group.usable), playing.ledger.submitted, playing.ledger.balanced) == (usable, members, True)


async def test_a_group_below_its_minimum_is_marked_and_says_why():
    playing = runner(failing_at(1, 2), retries=0)

    (group,) = await collect(playing, [{}], group_size=3, policy=GroupPolicy(min_usable=2))

    assert group.usable == ()
    assert "min_usable=2" in group[0].untrainable_reason
    assert group[0].reward == 1.0


async def test_a_retry_is_equal_to_a_fresh_run():
    tries = Counter()

    def flaky(request):
        tries[request.turn] += 1
        aborted = request.turn == 1 and tries[1] == 1
        return ScriptedTurn(token_ids=(104,), finish_reason="abort") if aborted else script(request)

    playing = runner(flaky)

    ((retried,),) = await collect(playing, [{"number": 4}])
    ((plain,),) = await collect(runner(script), [{"number": 4}])

    assert (retried.attempt, plain.attempt, playing.ledger.retried) == (1, 0, 1)
    for name in ("sequences", "messages", "stop_reason", "reward", "metrics", "seed", "error"):
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
    playing = runner(lambda _: ScriptedTurn(error=error), retries=3)

    ((record,),) = await collect(playing, [{}])

    assert len(playing.engine.requests) == tries
    assert (record.attempt, record.stop_reason) == (tries - 1, "aborted")


async def test_waits_between_attempts_grow_to_a_cap(monkeypatch, caplog):
    real = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real(0))

    await collect(runner(lambda _: DOWN, retries=7, retry_wait_s=0.5), [{}])

    waits = [float(line.split(" follows in ")[1].removesuffix(" s")) for line in caplog.messages]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


async def test_no_attempt_follows_that_would_wait_past_the_time_of_the_episode():
    playing = runner(lambda _: DOWN, episode_timeout_s=50, retries=5, retry_wait_s=60)

    ((record,),) = await collect(playing, [{}])

    assert (record.stop_reason, record.attempt) == ("aborted", 0)


@pytest.mark.parametrize(
    ("turns", "limits", "ended", "rewarded"),
    [
        ([], {"episode_timeout_s": 0.2}, "aborted", False),  # no answer is no score
        ([tool_call("work")], {"episode_timeout_s": 1.5}, "deadline", True),
        ([tool_call("work")], {"turn_timeout_s": 1.5}, "deadline", True),
    ],
    ids=["before an answer", "after one", "of a turn"],
)
async def test_time_that_is_up_is_a_deadline_where_the_model_has_answered(turns, limits, ended, rewarded):
    stuck = ScriptedTurn(text="late", gate=asyncio.Event())

    ((record,),) = await collect(runner([*turns, stuck], **limits), [{}])

    assert (record.stop_reason, len(record.turns), record.attempt) == (ended, len(turns), 0)
    assert (record.reward is not None, record.trainable) == (rewarded, rewarded)
    assert record.truncated if rewarded else record.error.boundary == "engine"


async def test_a_stop_request_is_honoured_while_waiting_for_a_retry():
    playing = runner(lambda _: DOWN, retries=50, retry_wait_s=10 * PATIENCE_S)
    task = asyncio.create_task(collect(playing, [{}]))
    await until(lambda: playing.ledger.retried)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(PATIENCE_S):
            await task

    assert (playing.ledger.cancelled, playing.ledger.balanced) == (1, True)


async def test_a_reward_of_none_is_left_out_and_counted_nowhere():
    class Maybe(Faulty):
        def reward(self):
            return None if self.context.episode_id.split("/")[-2:][0] == "1" else 1.0

    (group,) = await collect(runner(), [{}], spec_of(Maybe), group_size=3)

    assert [one.reward for one in group].count(None) == 1
    assert len(group.usable) == 2


async def test_cancelling_closes_every_environment_and_keeps_what_is_finished():
    gate, kept = asyncio.Event(), []

    def waiting(request):
        return ScriptedTurn(text="done", gate=None if "go  0" in request.prompt_text else gate)

    playing = runner(waiting, concurrency=4)
    tasks = [{"number": n} for n in range(9)]
    task = asyncio.create_task(collect(playing, tasks, on_trajectory=kept.append))
    await until(lambda: kept and playing.ledger.in_flight == 4)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert [one.stop_reason for one in kept] == ["final_answer"]
    assert sum(Faulty.closed.values()) == Faulty.made == 5
    assert (playing.ledger.cancelled, playing.ledger.in_flight, playing.ledger.balanced) == (4, 0, True)


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

    playing, spec = runner(script), spec_of(Waiting, user=FunctionUser(answer))
    task = asyncio.create_task(collect(playing, [{}], spec))
    await until(lambda: where in reached)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    parts = ["reset", "tool", "user", "reward"]
    assert reached == parts[: parts.index(where) + 1]
    assert closed == [where]
    assert (playing.ledger.cancelled, playing.ledger.in_flight) == (1, 0)


async def test_leaving_the_loop_early_closes_what_is_running():
    playing = runner(concurrency=3)

    async with aclosing(playing.run_groups(SPEC, ({"number": n} for n in range(10**9)))) as groups:
        await anext(groups)

    assert sum(Faulty.closed.values()) == Faulty.made
    assert playing.ledger.in_flight == 0


async def test_the_task_source_may_fail_and_says_so():
    def rows():
        yield {"number": 1}
        raise ValueError("row 2 is broken")

    playing = runner()

    with pytest.raises(ValueError, match="row 2 is broken"):
        await collect(playing, rows())
    assert (playing.ledger.balanced, playing.ledger.in_flight) == (True, 0)


async def test_order_of_completion_changes_no_result():
    async def at_pace(pace):
        async def paced(request):
            for _ in range(pace(request)):
                await asyncio.sleep(0)
            return tool_call("work") if request.turn == 0 else f"done {request.sampling.seed}"

        playing = runner(paced, concurrency=5, run_seed=7)
        groups = await collect(playing, [{"number": n} for n in range(6)], group_size=3)
        return {
            group.group_id: [(one.sequences, one.messages, one.member) for one in group] for group in groups
        }

    one = await at_pace(lambda request: 0)
    other = await at_pace(lambda request: crc32(request.session_id.encode()) % 13)

    assert one == other
    assert len({record[0][0].spans[-1].token_ids for group in one.values() for record in group}) == 18


async def test_a_task_met_again_is_another_group_and_sampled_anew():
    playing = runner()

    groups = await collect(playing, [{"number": 1}, {"number": 1}])
    again = await collect(playing, [{"number": 1}], round_index=1)

    assert len({group.group_id for group in [*groups, *again]}) == 3
    assert len({request.sampling.seed for request in playing.engine.requests}) == 3


async def test_slow_hung_and_raising_resets_start_together():
    together = asyncio.Barrier(14)

    class Mixed(Env):
        async def reset(self, *, seed=None, options=None):
            number = options["task"]["number"]
            if number == 3:
                raise RuntimeError("no")
            await (asyncio.Event().wait() if number == 5 else together.wait())
            return "hi", {}

        def step(self, action: str):
            return "", 0.0, True, False, {}

    groups = await collect(runner(env_timeout_s=2), [{"number": n} for n in range(16)], spec_of(Mixed))

    records = {group[0].task["number"]: group[0] for group in groups}
    failed = {number: one.error.type for number, one in records.items() if one.stop_reason == "error"}
    assert failed == {3: "RuntimeError", 5: "TimeoutError"}
    assert sum(one.stop_reason == "env_terminated" for one in records.values()) == 14


async def test_blocking_tools_do_not_block_the_loop():
    inside: list[int] = []
    release = threading.Event()

    class Blocking(ToolEnv):
        def start(self) -> str:
            return "go"

        @tool
        def work(self) -> str:
            "Block."
            inside.append(threading.get_ident())
            return "released" if release.wait(60) else "forgotten"

    async def release_all():
        await until(lambda: len(inside) == 8)
        release.set()

    releasing = asyncio.create_task(release_all())

    groups = await collect(
        runner(script, concurrency=8), [{"id": str(n)} for n in range(8)], spec_of(Blocking)
    )

    await releasing
    assert len(set(inside)) == 8
    assert [one.turns[0].tool_results[0].text for (one,) in groups] == ["released"] * 8


async def test_an_environment_that_hangs_past_the_episode_s_deadline_is_the_deadline():
    class Hanging(Faulty):
        async def step(self, action):
            await asyncio.Event().wait()

    record = await play(Hanging(), script, episode_timeout_s=0.2, env_timeout_s=5)

    assert record.stop_reason == "deadline"


@pytest.mark.parametrize(
    ("error", "ended"), [(EngineUnavailable("user model down"), "aborted"), (KeyError("oops"), "error")]
)
async def test_a_user_s_broken_infrastructure_aborts_and_its_broken_code_is_an_error(error, ended):
    class Talk(Faulty):
        ends_on_text = False

    def user(messages, task):
        raise error

    record = await play(Talk(), user=FunctionUser(user))

    assert (record.stop_reason, record.error.boundary) == (ended, "user")


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

    playing = runner(script, env_timeout_s=0.5, close_timeout_s=0.5, retries=0)

    record = await asyncio.wait_for(playing.run_episode(Stubborn(), {}), PATIENCE_S)

    release.set()
    assert (record.stop_reason, record.error.boundary) == ("error", "env")
    assert "ignored" in record.error.message
    assert (playing.watchdog.abandoned, playing.ledger.balanced) == (1, True)


async def test_the_watchdog_names_what_an_episode_waits_for(caplog):
    gate = asyncio.Event()
    playing = runner([ScriptedTurn(text="late", gate=gate)], warn_after_s=0.5)
    task = asyncio.create_task(playing.run_episode(Faulty(), {}, group_id="slowpoke"))
    await until(lambda: caplog.records)

    (waiting,) = playing.watchdog.waiting()
    gate.set()
    record = await task

    assert waiting.boundary == "engine"
    assert "slowpoke" in waiting.episode_id
    assert "engine" in caplog.text
    assert (record.stop_reason, playing.watchdog.waiting()) == ("final_answer", [])
