"""A cancellation that an environment's own code causes is its failure, never a cancelled episode."""

from __future__ import annotations

import asyncio

from agentenv.core import StopReason
from agentenv.engine import ScriptedEngine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)


class AwaitsWhatItCancelled(ToolEnv):
    async def start(self) -> str:
        self.background = asyncio.create_task(asyncio.Event().wait())
        return "go"

    async def close(self) -> None:
        self.background.cancel()
        await self.background


class CancelsItsCaller(ToolEnv):
    async def start(self, number: int) -> str:
        if number:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        return "go"


def runner_of() -> Runner:
    return Runner(
        ScriptedEngine(["done"], tokenizer=TOKENIZER, repeat_last=True),
        RENDERER,
        options=RunnerOptions(retries=0),
    )


async def collect(runner: Runner, entry: type[ToolEnv], tasks: list, group_size: int) -> list:
    spec = EnvSpec.of("test/Own-v0", entry, tasks=tasks)
    return [group async for group in runner.run_groups(spec, tasks, group_size)]


async def test_a_close_that_raises_cancelled_error_loses_no_finished_episode():
    runner = runner_of()

    (group,) = await collect(runner, AwaitsWhatItCancelled, [{}], 2)

    assert [one.stop_reason for one in group] == [StopReason.FINAL_ANSWER] * 2
    assert runner.ledger.cancelled == 0


async def test_a_close_that_raises_cancelled_error_does_not_cancel_who_plays_one_episode():
    record = await runner_of().run_episode(AwaitsWhatItCancelled(), {})

    assert record.stop_reason is StopReason.FINAL_ANSWER


async def test_an_environment_that_cancels_its_caller_fails_its_episode_only():
    runner = runner_of()

    groups = await collect(runner, CancelsItsCaller, [{"number": 0}, {"number": 1}], 1)

    by_number = {group.trajectories[0].task["number"]: group.trajectories[0] for group in groups}
    assert by_number[0].stop_reason is StopReason.FINAL_ANSWER
    assert by_number[1].stop_reason is StopReason.ERROR
    assert by_number[1].error.boundary == "env"
    assert runner.ledger.cancelled == 0
