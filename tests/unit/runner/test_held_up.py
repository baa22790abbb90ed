"""Code that holds the event loop up is named, and nothing else is."""

from __future__ import annotations

import asyncio
import threading
from types import FrameType

import pytest

from agentenv.runner import held_up
from agentenv.runner.held_up import LoopWatch
from helpers.waiting import PATIENCE_S


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
