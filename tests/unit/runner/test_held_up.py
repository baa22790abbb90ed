"""A loop that was held up, by whatever episode, fails no other one, and large texts do not hold it up."""

from __future__ import annotations

import asyncio
import threading
from types import FrameType

import pytest

from agentenv.core.threads import LARGE_CHARS
from agentenv.envs import ToolEnv
from agentenv.render import Renderer
from agentenv.runner import held_up
from agentenv.runner.fair_timeout import FairTimeout
from agentenv.runner.held_up import LoopWatch
from agentenv.testing import tool_call
from agentenv.tools import tool
from helpers.virtual_time import run_in_virtual_time
from helpers.waiting import PATIENCE_S
from scenes import TOKENIZER, Tools, play


def hold_up(seconds: float) -> None:
    """Let the clock of a loop in virtual time go on as if its thread had done something else."""
    asyncio.get_running_loop()._selector.now += seconds


def test_time_in_which_the_loop_is_held_up_counts_towards_no_limit(monkeypatch):
    moved = []

    async def wait() -> None:
        async with FairTimeout(3.0, moved.append):
            await asyncio.sleep(1.0)
            hold_up(5.0)
            await asyncio.sleep(1.5)

    run_in_virtual_time(wait, monkeypatch)

    assert 4.5 <= sum(moved) <= 5.0


@pytest.mark.parametrize("before", [0.0, 5.0])
def test_a_limit_is_still_one(before, monkeypatch):
    async def limited() -> None:
        async with FairTimeout(3.0, lambda _: None):
            hold_up(before)
            await asyncio.sleep(1_000.0)

    async def wait() -> float:
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await limited()
        return asyncio.get_running_loop().time() - began

    assert 3.0 <= run_in_virtual_time(wait, monkeypatch) <= 3.001 + before


class Neighbours(ToolEnv):
    """One of two tasks holds the loop up while the other waits for something slow.

    Nothing of it is a plain function: that would run in a thread, for which a virtual clock does not wait.
    """

    async def start(self, task):
        return task["question"]

    @tool
    async def slow(self) -> str:
        """Wait for something."""
        await asyncio.sleep(2.0)
        return "done"

    @tool
    async def rude(self) -> str:
        """Hold the loop up."""
        await asyncio.sleep(1.0)
        hold_up(60.0)
        return "done"

    async def reward(self, answer):
        return 1.0


def test_an_episode_that_holds_the_loop_up_fails_no_neighbour(monkeypatch):
    async def both() -> list[str]:
        task = {"question": "a"}
        played = [
            play(Neighbours(), [tool_call(name), "yes"], task, tool_timeout_s=3.0)
            for name in ("slow", "rude")
        ]
        return [trajectory.stop_reason for trajectory in await asyncio.gather(*played)]

    assert run_in_virtual_time(both, monkeypatch) == ["final_answer"] * 2


async def test_a_first_message_and_a_tool_output_of_megabytes_are_rendered_beside_the_loop():
    threads = []

    class Watched(Renderer):
        def start(self, messages):
            threads.append(threading.current_thread())
            return super().start(messages)

        def extend(self, *args, **kwargs):
            threads.append(threading.current_thread())
            return super().extend(*args, **kwargs)

    class Long(Tools):
        def start(self):
            super().start()
            return "a" * LARGE_CHARS

    script = [tool_call("show", size=LARGE_CHARS), "yes"]
    trajectory = await play(Long(), script, renderer=Watched(TOKENIZER), max_tool_output_tokens=None)

    assert trajectory.stop_reason == "final_answer"
    assert threads
    assert threading.main_thread() not in threads


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(held_up, "HELD_UP_S", 0.0)
    monkeypatch.setattr(held_up, "_PERIOD_S", 0.01)
    monkeypatch.setattr(held_up, "_told", set())


@pytest.fixture
def told(monkeypatch):
    said: list[tuple[object, ...]] = []
    heard = threading.Event()

    def warning(text: str, *values: object) -> None:
        said.append(values)
        heard.set()

    monkeypatch.setattr(held_up._log, "warning", warning)
    return said, heard


async def blocks(heard: threading.Event) -> None:
    assert heard.wait(PATIENCE_S)


async def test_a_coroutine_that_blocks_is_named_once_with_its_line(told):
    said, heard = told
    watch = LoopWatch()
    watch.start()
    for _ in range(2):
        await asyncio.create_task(blocks(heard))
        heard.set()
    watch.stop()

    assert [(values[0], values[1]) for values in said] == [("blocks", __file__)]


async def test_a_program_that_waits_for_the_loop_is_not_named(told):
    said, _ = told
    watch, loop, looked = LoopWatch(), asyncio.get_running_loop(), asyncio.Event()
    tell = watch._tell

    def look(frame: FrameType | None, late_s: float) -> None:
        tell(frame, late_s)
        loop.call_soon_threadsafe(looked.set)

    watch._tell = look
    watch.start()
    await looked.wait()
    watch.stop()

    assert [values for values in said if "test_a_program" not in str(values[0])] == []


async def test_runners_on_one_loop_share_a_thread_that_ends_with_the_last_of_them():
    first, second = LoopWatch.of_running_loop(), LoopWatch.of_running_loop()
    others = threading.enumerate()
    first.start()
    second.start()
    mine = [thread for thread in threading.enumerate() if thread not in others]
    watching = [thread for thread in mine if thread.name == "loop watch"]
    first.stop()
    alive = [thread.is_alive() for thread in watching]
    second.stop()
    for thread in watching:
        thread.join(PATIENCE_S)

    assert alive == [True]
    assert not watching[0].is_alive()
