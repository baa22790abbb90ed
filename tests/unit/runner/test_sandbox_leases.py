"""Every attempt at an episode has a sandbox of its own, lent by a pool and always given back."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from agentenv.core import Context, RunLimits, SandboxCrashed, SandboxUnavailable, UsageError
from agentenv.envs import ToolEnv
from agentenv.sandbox import SandboxLimits, create
from agentenv.testing import tool_call
from agentenv.tools import tool
from helpers.waiting import until
from scenes import Go, groups_of, play, runner, spec_of


class Coder(ToolEnv):
    """Writes a file and lists what is there, each in the episode's sandbox."""

    def start(self, number: int = 0) -> str:
        self.number = number
        return f"task {number}"

    @tool
    async def save(self, context: Context) -> str:
        "Save the task's number."
        await context.sandbox.write_file(f"{self.number}.txt", str(self.number))
        return "saved"

    @tool
    async def files(self, context: Context) -> str:
        "List the files."
        result = await context.sandbox.run_code(
            "import os; print(sorted(n for n in os.listdir() if n.endswith('.txt')))"
        )
        return result.text()

    async def reward(self, context: Context) -> float:
        left = await context.sandbox.read_file(f"{self.number}.txt")
        return float(left == str(self.number).encode())


class Watched:
    """A pool that keeps the books of another: how many are lent, and what was lent to whom."""

    def __init__(self, pool=None, *, fail=(), wait=None, fail_at_end=None):
        self.pool, self.fail, self.wait, self.fail_at_end = pool, list(fail), wait, fail_at_end
        self.called = asyncio.Event()
        self.asked = self.out = self.most = self.given_back = 0

    @asynccontextmanager
    async def lease(self):
        self.asked += 1
        self.called.set()
        if self.wait is not None:
            await self.wait.wait()
        if self.fail:
            raise self.fail.pop(0)
        self.out += 1
        self.most = max(self.most, self.out)
        try:
            # As pools may: what belongs to the task that entered must be left by the same task.
            async with asyncio.timeout(60):
                if self.pool is None:
                    yield object()
                else:
                    async with self.pool.lease() as mine:
                        yield mine
        finally:
            self.out -= 1
            self.given_back += 1
        if self.fail_at_end is not None:
            raise self.fail_at_end


class Idle(Go):
    """Needs nothing of its sandbox; may hang or break."""

    async def start(self, where: str = "") -> str:
        self.where = where
        return "go"

    async def step(self, action):
        if self.where == "hang":
            await asyncio.Event().wait()
        if self.where == "break":
            raise RuntimeError("step broke")
        return await super().step(action)


def play_files(request):
    return [tool_call("save"), tool_call("files"), "done"][request.turn]


@pytest.mark.sandbox
async def test_the_episodes_of_a_run_share_workers_but_no_files():
    limits = SandboxLimits(memory_bytes=256 << 20, address_space_bytes=256 << 20, max_processes=16)
    async with create("auto", size=2, limits=limits) as sandbox:
        pool = Watched(sandbox)
        spec = spec_of(Coder, [{"number": n} for n in range(3)])
        groups = await groups_of(runner(play_files, concurrency=3, sandbox=pool), spec, group_size=2)
        records = [one for group in groups for one in group]
        left = await sandbox.run_code("import os; print([n for n in os.listdir() if n.endswith('.txt')])")

    assert [(one.stop_reason, one.reward) for one in records] == [("final_answer", 1.0)] * 6
    for one in records:
        seen = one.turns[1].tool_results[0].text
        assert seen == f"['{one.task['number']}.txt']", "an episode sees its own file and no other"
    assert left.stdout == "[]\n"
    assert (pool.asked, pool.out, pool.given_back) == (6, 0, 6)
    assert 1 < pool.most <= 3


async def test_each_attempt_leases_anew_and_a_crash_while_leasing_is_retried():
    pool = Watched(fail=[SandboxCrashed("no worker")])
    playing = runner(sandbox=pool, retries=1)

    record = await playing.run_episode(Idle(), {})

    assert (record.stop_reason, record.attempt) == ("final_answer", 1)
    assert (pool.asked, pool.out) == (2, 0)
    assert playing.ledger.retried == 1


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (SandboxUnavailable("no isolation"), False),
        (SandboxCrashed("gone"), True),
        (OSError("no more processes"), True),
        (UsageError("the sandbox is closed"), False),
        (SystemExit(3), False),
        (asyncio.CancelledError(), False),
    ],
)
async def test_a_lease_that_fails_is_infrastructure(error, retryable):
    pool = Watched(fail=[error])

    record = await play(Idle(), sandbox=pool)

    assert (record.stop_reason, record.turns, record.trainable) == ("aborted", (), False)
    assert (record.error.boundary, record.error.retryable) == ("sandbox", retryable)
    assert record.error.type == type(error).__name__
    assert pool.out == 0


@pytest.mark.parametrize("where", ["", "break"])
async def test_a_lease_is_given_back_after_the_environment_is_closed(where):
    pool = Watched()
    lent_at_close = []

    class Closing(Idle):
        def close(self) -> None:
            lent_at_close.append(pool.out)

    ((record,),) = await groups_of(runner(sandbox=pool), spec_of(Closing, [{"where": where}]))

    assert (lent_at_close, pool.out) == ([1], 0)
    assert record.stop_reason == ("error" if where else "final_answer")


async def test_a_cancelled_episode_gives_back_its_sandbox():
    pool = Watched()
    playing = runner(sandbox=pool)
    task = asyncio.create_task(playing.run_episode(Idle(), {"where": "hang"}))
    await until(lambda: [one.boundary for one in playing.watchdog.waiting()] == ["env"] and pool.out)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert (pool.out, pool.given_back) == (0, 1)


async def test_an_episode_cancelled_while_it_waits_for_a_sandbox_leaves_nothing_behind():
    pool = Watched(wait=asyncio.Event())
    playing = runner(sandbox=pool)
    task = asyncio.create_task(playing.run_episode(Idle(), {}))
    await pool.called.wait()
    assert [one.boundary for one in playing.watchdog.waiting()] == ["sandbox"]

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pool.wait.set()
    await asyncio.sleep(0)

    assert (pool.asked, pool.out, pool.given_back) == (1, 0, 0)
    assert playing.ledger.cancelled == 1


async def test_waiting_for_a_sandbox_is_bounded_and_is_no_part_of_the_episode_s_deadline():
    never, late = Watched(wait=asyncio.Event()), Watched(wait=asyncio.Event())

    refused = await play(Idle(), sandbox=never, lease_timeout_s=0.2, episode_timeout_s=0.02)
    waiting = asyncio.create_task(play(Idle(), sandbox=late))
    await late.called.wait()
    late.wait.set()
    patient = await waiting

    assert (refused.stop_reason, refused.error.boundary) == ("aborted", "sandbox")
    assert (refused.error.type, refused.error.retryable) == ("TimeoutError", True)
    assert patient.stop_reason == "final_answer"
    assert patient.timings["queue_s"] > 0
    assert never.out == late.out == 0


async def test_a_pool_that_fails_when_it_takes_back_spoils_no_record(caplog):
    pool = Watched(fail_at_end=SandboxCrashed("cannot be cleaned"))

    record = await play(Idle(), sandbox=pool)

    assert (record.stop_reason, record.reward) == ("final_answer", 1.0)
    assert "closing sandbox failed" in caplog.text


async def test_without_a_pool_there_is_no_sandbox_and_what_lends_nothing_is_refused():
    class Curious(Idle):
        def reward(self, context: Context) -> float:
            return float(context.sandbox is None)

    assert (await play(Curious())).reward == 1.0
    with pytest.raises(UsageError, match="cannot lend sandboxes"):
        runner(sandbox=object())


async def test_a_spec_that_names_a_sandbox_gets_it_from_any_runner():
    spec = spec_of(Coder, [{"number": 7}], sandbox="none")

    (group,) = await groups_of(runner(play_files), spec, group_size=2)

    assert [record.reward for record in group] == [1.0, 1.0]
    assert [record.turns[1].tool_results[0].text for record in group] == ["['7.txt']"] * 2


async def test_a_runner_s_own_sandbox_goes_before_a_spec_s():
    pool = Watched()

    ((record,),) = await groups_of(runner(sandbox=pool), spec_of(Idle, sandbox="no such backend"))

    assert record.reward == 1.0
    assert pool.asked == pool.given_back == 1


class Timed(ToolEnv):
    """An environment whose task gives times of its own."""

    async def open_sandbox(self, task):
        return {"tool_timeout_s": 900.0, "reward_timeout_s": 300.0}

    def start(self, x: int = 0) -> str:
        self.seen = self.context.limits
        return "x"


@pytest.mark.parametrize(
    ("of_run", "tool_s", "reward_s"),
    [({}, 900.0, 300.0), ({"tool_timeout_s": 60.0, "reward_timeout_s": None}, 60.0, None)],
)
async def test_times_of_a_task_hold_in_place_of_defaults_and_not_of_what_the_run_sets(
    of_run, tool_s, reward_s
):
    env = Timed()
    await play(env, task={"x": 1}, **of_run)

    assert (env.seen.tool_timeout_s, env.seen.reward_timeout_s) == (tool_s, reward_s)
    assert env.seen.env_timeout_s == RunLimits().env_timeout_s
