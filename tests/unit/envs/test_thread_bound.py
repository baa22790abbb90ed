"""Environments that hold objects which only one thread may use, such as a SQLite connection."""

import asyncio
import gc
import sqlite3
import threading

import pytest

from agentenv.core import Action, Context
from agentenv.core.threads import off_loop
from agentenv.envs import ToolEnv, make
from agentenv.testing import check_env, tool_call, tool_call_message
from agentenv.tools import tool
from helpers.waiting import PATIENCE_S, wait_until
from scenes import groups_of, runner, spec_of


def spec_with(kind):
    return spec_of(kind, [{"n": n} for n in range(6)])


class Shop(ToolEnv):
    def __init__(self):
        self.db = None

    def start(self, n: int) -> str:
        self.db = sqlite3.connect(":memory:")
        self.db.execute("create table sold (name text)")
        return "Sell."

    @tool
    def sell(self, name: str) -> str:
        "Sell an article."
        self.db.execute("insert into sold values (?)", (name[:40],))
        return "sold"

    def is_done(self) -> bool:
        return self._sold() >= 3

    def reward(self, answer: str) -> float:
        return self._sold() / 3

    def close(self):
        if self.db is not None:
            self.db.close()

    def _sold(self) -> int:
        return self.db.execute("select count(*) from sold").fetchone()[0]


async def begun(kind):
    env = spec_with(kind).make()
    await env.begin({"n": 1}, seed=0, context=Context())
    return env


def kept_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "thread of its own" in thread.name]


def all_ended() -> bool:
    """Return whether no environment has a thread; one that is forgotten ends it when it is collected."""
    gc.collect()  # again and again, because another thread may still hold an environment for a moment
    return not kept_threads()


async def test_a_connection_of_start_works_in_tools_rewards_and_close():
    script = [tool_call("sell", name="tea") * 2, tool_call("sell", name="jam")]
    spec = spec_with(Shop)

    played = [each for group in await groups_of(runner(script), spec, group_size=4) for each in group]
    report = await check_env(
        spec, only=("play", "fuzz", "reuse", "parallel", "runner"), tasks=4, fuzz_calls=30
    )

    assert len(played) == 24
    assert [each.error for each in played if each.error] == []
    assert {(each.reward, each.stop_reason.value) for each in played} == {(1.0, "env_done")}
    assert report.ok, str(report)
    wait_until(all_ended)


class Nested(Shop):
    @tool
    def ask_another(self) -> str:
        "Play an episode of another shop, from within the thread of this one."
        other = make(spec_with(Shop))
        other.reset(seed=1)
        other.step(tool_call_message("sell", name="tea"))
        return f"sold {self._sold()}"


async def test_a_tool_may_play_another_environment():
    """In Gymnasium's front, too, all is done in one thread, and a forgotten environment ends it."""
    env = await begun(Nested)

    step = await env.advance(Action.of(tool_call_message("ask_another")))
    await env.shutdown()

    assert step.tool_results[0].text == "sold 0"
    wait_until(all_ended)


class Broken(Shop):
    def start(self, n: int) -> str:
        super().start(n)
        raise ValueError("the shelf is broken")


async def test_an_environment_whose_start_failed_is_closed():
    env = spec_with(Broken).make()
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
    env = await begun(Stuck)
    reply = tool_call_message("wait")
    reply["tool_calls"] += tool_call_message("look")["tool_calls"]

    async with asyncio.timeout(PATIENCE_S):
        step = await env.advance(Action.of(reply))

    assert [(result.is_error, result.text) for result in step.tool_results][1] == (False, "1")
    assert step.tool_results[0].is_error
    await env.shutdown()


class Lazy(Shop):
    def __init__(self):
        Shop.start(self, 0)

    def start(self, n: int) -> str:
        return f"{self._sold()}"


async def test_a_connection_of_another_thread_is_explained():
    report = await check_env(spec_with(Lazy), only=("play",))

    assert "open the database in start() or reset()" in report.problems[0].text
