"""A feed gets jobs while others are played, and the run ends when it is closed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import pytest

from agentenv.core import UsageError
from agentenv.envs import ToolEnv
from agentenv.runner import GroupPolicy, JobFeed, Runner
from helpers.waiting import until
from scenes import Go, groups_of, numbered, runner


class Quiet(ToolEnv):
    closed = 0

    def start(self, n: int) -> str:
        return f"say {n}"

    def close(self) -> None:
        type(self).closed += 1


SPEC = numbered(Quiet, 9)


@pytest.fixture(autouse=True)
def _anew():
    Quiet.closed = 0


def jobs_of(playing: Runner, count: int = 9):
    return list(playing.stage(SPEC).jobs([{"n": n} for n in range(count)]))


async def test_jobs_that_are_put_in_later_are_played_and_a_closed_feed_ends_the_run():
    playing, feed = runner(), JobFeed()
    jobs = jobs_of(playing, 3)
    played = []

    async with aclosing(playing.run_groups(SPEC, feed, 2)) as groups:
        feed.put(jobs[0])
        async for group in groups:
            played.append(group.group_id)
            if len(played) == 1:
                # Nothing runs now, so only the feed can keep the run alive.
                asyncio.get_running_loop().call_soon(feed.put, jobs[1])
            elif len(played) == 2:
                feed.put(jobs[2])
                feed.close()

    assert played == [job.group_id for job in jobs]
    assert feed.ended
    assert Quiet.closed == 6


async def test_a_run_whose_feed_is_closed_before_any_job_plays_nothing():
    feed = JobFeed()
    groups = runner().run_groups(SPEC, feed, 2)
    waiting = asyncio.create_task(anext(groups, None))
    await asyncio.sleep(0)
    assert not waiting.done()

    feed.close()

    assert await waiting is None


async def test_a_job_begins_when_there_is_room_for_it():
    begun: list[str] = []
    playing, feed = runner(concurrency=1), JobFeed(lambda job: begun.append(job.group_id))
    for job in jobs_of(playing, 4):
        feed.put(job)
    feed.close()
    when: list[int] = []

    async with aclosing(
        playing.run_groups(SPEC, feed, 1, on_trajectory=lambda _: when.append(len(begun)))
    ) as groups:
        ids = [group.group_id async for group in groups]

    assert ids == begun
    assert when == [1, 2, 3, 4]


async def test_an_error_of_the_callback_ends_the_run_although_the_feed_is_open():
    def fail(job):
        raise ZeroDivisionError

    feed = JobFeed(fail)
    playing = runner()
    groups = playing.run_groups(SPEC, feed, 1)
    feed.put(jobs_of(playing, 1)[0])

    with pytest.raises(ZeroDivisionError):
        await anext(groups)


async def test_leaving_early_closes_the_environments_and_takes_no_further_job():
    playing, feed = runner(concurrency=2), JobFeed()
    jobs = jobs_of(playing)
    for job in jobs:
        feed.put(job)

    async with aclosing(playing.run_groups(SPEC, feed, 1)) as groups:
        await anext(groups)
    played = Quiet.closed
    feed.put(jobs[0])

    assert played >= 1
    assert Quiet.closed == played
    assert not feed.ended


def test_groups_that_cannot_satisfy_the_policy_are_refused():
    playing = runner(group_policy=GroupPolicy(min_usable=3))

    with pytest.raises(UsageError, match="min_usable is 3"):
        playing.run_groups(SPEC, JobFeed(), 2)


class SlowToClose(Go):
    closing: asyncio.Event
    may_close: asyncio.Event
    closed = 0

    async def close(self) -> None:
        type(self).closing.set()
        await type(self).may_close.wait()
        type(self).closed += 1


@pytest.fixture
async def env() -> type[SlowToClose]:
    class Fresh(SlowToClose):
        closing = asyncio.Event()
        may_close = asyncio.Event()

    return Fresh


async def collect(playing: Runner, env: type[Go], kept: list) -> None:
    await groups_of(playing, env, on_trajectory=kept.append)


async def test_a_run_that_is_stopped_while_an_environment_closes_keeps_the_episode(env):
    kept, playing = [], runner()
    run = asyncio.create_task(collect(playing, env, kept))
    await env.closing.wait()

    run.cancel()
    env.may_close.set()
    with suppress(asyncio.CancelledError):
        await run

    assert [one.stop_reason for one in kept] == ["final_answer"]
    assert playing.ledger.outcomes == {"final_answer": 1}
    assert (playing.ledger.cancelled, playing.ledger.balanced, env.closed) == (0, True, 1)


async def test_a_stop_in_the_moment_in_which_a_record_is_complete_keeps_the_episode(env):
    """The record is complete, and the task that waits for it has not gone on yet."""
    kept, playing = [], runner()
    run = asyncio.create_task(collect(playing, env, kept))
    settled = asyncio.Event()
    env.may_close.set()

    def watch() -> None:
        watched = list(playing.watchdog._watched.values())
        if watched and watched[0].record.done():
            run.cancel()
            settled.set()
        elif not run.done():
            asyncio.get_running_loop().call_soon(watch)

    watch()
    with suppress(asyncio.CancelledError):
        await run

    assert settled.is_set()
    assert [one.stop_reason for one in kept] == ["final_answer"]
    assert (playing.ledger.cancelled, playing.ledger.balanced) == (0, True)


async def test_a_close_that_takes_too_long_is_left_behind(env, caplog):
    class Stubborn(env):
        async def close(self) -> None:
            while True:
                with suppress(asyncio.CancelledError):
                    await type(self).may_close.wait()
                    return

    kept = []

    await collect(runner(close_timeout_s=0.05), Stubborn, kept)
    Stubborn.may_close.set()
    await until(lambda: len(asyncio.all_tasks()) == 1)

    assert [one.stop_reason for one in kept] == ["final_answer"]
    assert "closing Stubborn took longer than 0.05 s" in caplog.text
