"""The thread pool: bounded, never clogged, never deadlocked."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agentenv.tools import threads as workers
from agentenv.tools.threads import WorkerPool


async def test_at_most_max_threads_calls_run_at_once_and_all_finish() -> None:
    pool = WorkerPool(max_threads=3)
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
    pool = WorkerPool(max_threads=2)
    first_done, release = threading.Event(), threading.Event()
    for _ in range(50):
        await pool.submit(lambda: None, "warm").future
        release.clear()
        long = pool.submit(lambda: release.wait(10), "long")
        short = pool.submit(first_done.set, "short")
        async with asyncio.timeout(5):
            assert await short.future == (None, None)
        release.set()
        await long.future


@pytest.mark.untraced  # until the hung thread wakes, CPython 3.11 goes round in circles in a traced loop
async def test_an_abandoned_call_gives_its_place_to_the_next() -> None:
    pool = WorkerPool(max_threads=1)
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
    pool = WorkerPool(max_threads=1)
    release, ran = threading.Event(), threading.Event()
    busy = pool.submit(lambda: release.wait(10), "busy")
    late = pool.submit(ran.set, "late")

    late.abandon()
    release.set()
    await busy.future
    await pool.submit(lambda: None, "last").future

    assert not ran.is_set()


async def test_too_many_hung_threads_refuse_further_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MAX_ABANDONED", 0)

    with pytest.raises(RuntimeError, match="isolated=True"):
        WorkerPool().submit(lambda: None, "any")


async def test_idle_threads_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.02)
    pool = WorkerPool()
    thread: list[threading.Thread] = []

    await pool.submit(lambda: thread.append(threading.current_thread()), "short").future
    await asyncio.to_thread(thread[0].join, 5)

    assert not thread[0].is_alive()
    assert (await pool.submit(lambda: 1, "again").future) == (1, None)


async def test_a_call_handed_to_a_thread_that_is_just_leaving_still_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.0005)
    pool = WorkerPool(max_threads=2)

    for _ in range(300):
        async with asyncio.timeout(5):
            assert await pool.submit(lambda: 1, "short").future == (1, None)
            await asyncio.sleep(0.0005)
