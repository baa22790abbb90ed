"""Threads between synchronous and asynchronous code: bounded, never clogged, never deadlocked."""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import threading
import warnings

import pytest

from agentenv.core import EnvironmentMisuse, threads
from agentenv.core.loops import run_blocking, run_sync
from agentenv.core.threads import ThreadPool, off_loop
from agentenv.tools import Tool, run
from helpers.waiting import PATIENCE_S


async def test_at_most_max_threads_calls_run_at_once_and_all_finish() -> None:
    pool = ThreadPool("tool", max_threads=3)
    lock, running, most = threading.Lock(), 0, 0

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1

    jobs = [pool.submit(work, "work") for _ in range(20)]
    outcomes = await asyncio.gather(*[job.future for job in jobs])

    assert outcomes == [(None, None)] * 20
    assert most == 3


async def test_a_call_never_waits_behind_a_busy_thread_while_there_is_room() -> None:
    pool = ThreadPool("tool", max_threads=2)
    first_done, release = threading.Event(), threading.Event()
    for _ in range(50):
        await pool.submit(lambda: None, "warm").future
        release.clear()
        long = pool.submit(lambda: release.wait(2 * PATIENCE_S), "long")
        short = pool.submit(first_done.set, "short")
        async with asyncio.timeout(PATIENCE_S):
            assert await short.future == (None, None)
        release.set()
        await long.future


@pytest.mark.untraced  # until the hung thread wakes, CPython 3.11 goes round in circles in a traced loop
async def test_an_abandoned_call_gives_its_place_to_the_next() -> None:
    pool = ThreadPool("tool", max_threads=1)
    release = threading.Event()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang() -> None:
        loop.call_soon_threadsafe(started.set)
        while not release.wait(60):
            continue

    stuck = pool.submit(hang, "stuck")
    waiting = pool.submit(lambda: "ran", "waiting")
    await started.wait()
    stuck.abandon()
    stuck.abandon()
    result, error = await waiting.future
    release.set()

    assert (result, error) == ("ran", None)
    assert stuck.thread is not None
    assert stuck.thread.name == "abandoned tool stuck"
    assert not stuck.future.done()


async def test_an_abandoned_call_that_had_not_started_never_runs() -> None:
    pool = ThreadPool("tool", max_threads=1)
    release, ran = threading.Event(), threading.Event()
    busy = pool.submit(lambda: release.wait(2 * PATIENCE_S), "busy")
    late = pool.submit(ran.set, "late")

    late.abandon()
    release.set()
    await busy.future
    await pool.submit(lambda: None, "last").future

    assert not ran.is_set()


async def test_too_many_hung_threads_refuse_further_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not those of environments."""
    monkeypatch.setattr(run, "MAX_ABANDONED", 0)

    with pytest.raises(RuntimeError, match="isolated=True"):
        run.in_thread(lambda: None, "any")
    assert await off_loop(lambda: "played") == "played"


async def test_idle_threads_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.02)
    pool = ThreadPool("tool", 64)
    thread: list[threading.Thread] = []

    await pool.submit(lambda: thread.append(threading.current_thread()), "short").future
    await asyncio.to_thread(thread[0].join, 5)

    assert not thread[0].is_alive()
    assert (await pool.submit(lambda: 1, "again").future) == (1, None)


async def test_a_call_handed_to_a_thread_that_is_just_leaving_still_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.0005)
    pool = ThreadPool("tool", max_threads=2)

    for _ in range(300):
        async with asyncio.timeout(PATIENCE_S):
            assert await pool.submit(lambda: 1, "short").future == (1, None)
            await asyncio.sleep(0.0005)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (LookupError("lost"), LookupError),
        *((kind("x"), RuntimeError) for kind in (StopIteration, SystemExit, KeyboardInterrupt)),
    ],
)
async def test_a_function_off_the_loop_keeps_the_caller_s_context_and_its_own_error(
    error: BaseException, told: type[Exception]
) -> None:
    """Unless that would end the loop."""
    mine = contextvars.ContextVar("mine", default=0)
    mine.set(3)

    def fail() -> None:
        raise error

    assert await off_loop(mine.get) == 3
    with pytest.raises(told, match="lost" if told is LookupError else type(error).__name__):
        await off_loop(fail)


async def test_a_tool_run_from_an_environment_s_thread_needs_no_free_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "_threads", ThreadPool("tool", max_threads=0))

    def step() -> str:
        return asyncio.run(Tool.from_function(add).call('{"a": 1}')).content

    def add(a: int) -> int:
        "Add one."
        return a + 1

    async with asyncio.timeout(PATIENCE_S):
        assert await off_loop(step) == "2"


def test_a_child_process_gets_threads_of_its_own() -> None:
    def work() -> None:
        async def once() -> int:
            return await off_loop(lambda: 1) + in_a_loop_of_its_own()

        assert asyncio.run(once()) == 2

    def in_a_loop_of_its_own() -> int:
        return run_blocking(asyncio.sleep(0, 1))

    work()
    child = multiprocessing.get_context("fork").Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    child.join(30)

    assert child.exitcode == 0


async def here() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_calls_from_synchronous_code_meet_on_one_loop() -> None:
    async def misused() -> object:
        return run_sync(here())

    async def inside() -> bool:
        return run_blocking(here()) is not asyncio.get_running_loop()

    assert run_sync(here()) is run_sync(here())
    assert run_blocking(here()) is not run_blocking(here())
    assert asyncio.run(inside())
    with pytest.raises(EnvironmentMisuse, match="await the asynchronous method"):
        run_sync(misused())
