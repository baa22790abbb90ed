"""Environments that hold objects which only one thread may use, such as a SQLite connection."""

import asyncio
import gc
import sqlite3
import threading

import pytest

from agentenv.core import Action, Context
from agentenv.core.threads import off_loop
from agentenv.envs import EnvSpec, ToolEnv, make
from agentenv.testing import check_env, tool_call, tool_call_message
from agentenv.tools import tool
from helpers.waiting import PATIENCE_S, wait_until
from scenes import groups_of, runner


class Store:
    def __init__(self):
        self.db = sqlite3.connect(":memory:")
        self.db.execute("create table sold (name text)")


class Shop(ToolEnv):
    def start(self, n: int) -> str:
        self.store = Store()
        return "Sell."

    @tool
    def sell(self, name: str) -> str:
        "Sell an article."
        self.store.db.execute("insert into sold values (?)", (name[:40],))
        return "sold"

    def is_done(self) -> bool:
        return self._sold() >= 3

    def reward(self, answer: str) -> float:
        return self._sold() / 3

    def close(self):
        if hasattr(self, "store"):
            self.store.db.close()

    def _sold(self) -> int:
        return self.store.db.execute("select count(*) from sold").fetchone()[0]


SHOP = EnvSpec.of("test/Shop-v0", Shop, tasks=[{"n": n} for n in range(6)])


def kept_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "thread of its own" in thread.name]


def all_ended() -> bool:
    """Return whether no environment has a thread; one that is forgotten ends it when it is collected."""
    gc.collect()  # again and again, because another thread may still hold an environment for a moment
    return not kept_threads()


async def test_a_connection_of_start_works_in_tools_rewards_and_close():
    script = [tool_call("sell", name="tea") * 2, tool_call("sell", name="jam")]

    played = [each for group in await groups_of(runner(script), SHOP, group_size=4) for each in group]

    assert len(played) == 24
    assert [each.error for each in played if each.error] == []
    assert {(each.reward, each.stop_reason.value) for each in played} == {(1.0, "env_done")}
    wait_until(all_ended)


async def test_the_checker_finds_nothing_wrong_with_it():
    report = await check_env(
        SHOP, only=("play", "fuzz", "reuse", "parallel", "runner"), tasks=4, fuzz_calls=30
    )

    assert report.ok, str(report)


def test_gymnasiums_front_uses_the_same_thread_and_a_forgotten_environment_ends_it():
    env = make(SHOP)
    env.reset(seed=1)
    for _ in range(3):
        done = env.step(tool_call_message("sell", name="tea"))[2]
    assert done

    del env

    wait_until(all_ended)


class Nested(Shop):
    @tool
    def ask_another(self) -> str:
        "Play an episode of another shop, from within the thread of this one."
        other = make(SHOP)
        other.reset(seed=1)
        other.step(tool_call_message("sell", name="tea"))
        other.close()
        return f"sold {self._sold()}"


async def test_a_tool_may_play_another_environment():
    env = EnvSpec.of("test/Nested-v0", Nested, tasks=[{"n": 1}]).make()
    await env.begin({"n": 1}, seed=0, context=Context())

    step = await env.advance(Action.of(tool_call_message("ask_another")))

    assert step.tool_results[0].text == "sold 0"
    await env.shutdown()


class Broken(Shop):
    def start(self, n: int) -> str:
        super().start(n)
        raise ValueError("the shelf is broken")


async def test_an_environment_whose_start_failed_is_closed():
    env = EnvSpec.of("test/Broken-v0", Broken, tasks=[{"n": 1}]).make()
    with pytest.raises(ValueError, match="broken"):
        await env.begin({"n": 1}, seed=0, context=Context())
    free = threading.Event()
    busy = [asyncio.create_task(off_loop(free.wait)) for _ in range(32)]  # more than the pool has idle
    await asyncio.sleep(0)

    try:
        await env.shutdown()
    finally:
        free.set()
        await asyncio.gather(*busy)

    wait_until(all_ended)


class Stuck(Shop):
    def start(self, n: int) -> str:
        self.free = threading.Event()
        self.shared = sqlite3.connect(":memory:", check_same_thread=False)
        return super().start(n)

    @tool(timeout_s=0.1)
    def wait(self) -> str:
        "Wait for nothing."
        # Not one long wait: while an abandoned thread hangs outside of Python's own code, a tracer such as
        # coverage makes the other threads of Python 3.11 spin.
        while not self.free.wait(0.01):
            pass
        return "done"

    @tool
    def look(self) -> str:
        "Look into a database that every thread may use."
        return str(self.shared.execute("select 1").fetchone()[0])

    def close(self):
        self.free.set()
        self.shared.close()


async def test_calls_beside_a_tool_that_hangs_are_answered_too():
    env = EnvSpec.of("test/Stuck-v0", Stuck, tasks=[{"n": 1}]).make()
    await env.begin({"n": 1}, seed=0, context=Context())
    reply = tool_call_message("wait")
    reply["tool_calls"] += tool_call_message("look")["tool_calls"]

    async with asyncio.timeout(PATIENCE_S):
        step = await env.advance(Action.of(reply))

    assert [(result.is_error, result.text) for result in step.tool_results][1] == (False, "1")
    assert step.tool_results[0].is_error
    await env.shutdown()


class Lazy(Shop):
    def __init__(self):
        self.store = Store()

    def start(self, n: int) -> str:
        return f"{self._sold()}"


async def test_a_connection_of_another_thread_is_explained():
    report = await check_env(EnvSpec.of("test/Lazy-v0", Lazy, tasks=[{"n": 1}]), only=("play",))

    assert "open the database in start() or reset()" in report.problems[0].text
