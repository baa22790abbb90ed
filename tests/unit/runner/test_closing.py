"""A finished episode is kept, also if the run is stopped while its environment closes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from agentenv.runner import Runner
from helpers.waiting import until
from scenes import Go, groups_of, runner


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
