"""A finished episode is kept, also if the run is stopped while its environment closes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import pytest

from agentenv.core import StopReason
from agentenv.engine import ScriptedEngine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions
from helpers.waiting import until

TOKENIZER = byte_tokenizer()


class SlowToClose(ToolEnv):
    closing: asyncio.Event
    may_close: asyncio.Event
    closed = 0

    def start(self) -> str:
        return "go"

    def reward(self) -> float:
        return 1.0

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


def runner_of(**options) -> Runner:
    engine = ScriptedEngine(["done"], tokenizer=TOKENIZER, repeat_last=True)
    return Runner(engine, Renderer(TOKENIZER), options=RunnerOptions(**options))


async def collect(runner: Runner, spec: EnvSpec, tasks: list, kept: list) -> None:
    async with aclosing(runner.run_groups(spec, tasks, on_trajectory=kept.append)) as groups:
        async for _ in groups:
            pass


async def test_a_run_that_is_stopped_while_an_environment_closes_keeps_the_episode(env):
    kept, runner = [], runner_of()
    run = asyncio.create_task(collect(runner, EnvSpec.of("test/Slow-v0", env), [{}], kept))
    await env.closing.wait()

    run.cancel()
    env.may_close.set()
    with suppress(asyncio.CancelledError):
        await run

    assert [one.stop_reason for one in kept] == [StopReason.FINAL_ANSWER]
    assert runner.ledger.outcomes == {StopReason.FINAL_ANSWER: 1}
    assert (runner.ledger.cancelled, runner.ledger.balanced, env.closed) == (0, True, 1)


async def test_a_stop_in_the_moment_in_which_a_record_is_complete_keeps_the_episode(env):
    """The record is complete, and the task that waits for it has not gone on yet."""
    kept, runner = [], runner_of()
    run = asyncio.create_task(collect(runner, EnvSpec.of("test/Slow-v0", env), [{}], kept))
    settled = asyncio.Event()
    env.may_close.set()

    def watch() -> None:
        watched = list(runner.watchdog._watched.values())
        if watched and watched[0].record.done():
            run.cancel()
            settled.set()
        elif not run.done():
            asyncio.get_running_loop().call_soon(watch)

    watch()
    with suppress(asyncio.CancelledError):
        await run

    assert settled.is_set()
    assert [one.stop_reason for one in kept] == [StopReason.FINAL_ANSWER]
    assert (runner.ledger.cancelled, runner.ledger.balanced) == (0, True)


async def test_a_close_that_takes_too_long_is_left_behind(env, caplog):
    class Stubborn(env):
        async def close(self) -> None:
            while True:
                with suppress(asyncio.CancelledError):
                    await type(self).may_close.wait()
                    return

    kept, runner = [], runner_of(close_timeout_s=0.05)

    await collect(runner, EnvSpec.of("test/Stubborn-v0", Stubborn), [{}], kept)
    Stubborn.may_close.set()
    await until(lambda: len(asyncio.all_tasks()) == 1)

    assert [one.stop_reason for one in kept] == [StopReason.FINAL_ANSWER]
    assert "closing Stubborn took longer than 0.05 s" in caplog.text
