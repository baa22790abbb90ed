"""The calls of a turn: all at once, one answer each, in call order."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from agentenv.core import (
    CallStatus,
    SandboxUnavailable,
    ToolCall,
    ToolDefinitionError,
    ToolErrorKind,
)
from agentenv.tools import Tool, Toolbox, abandoned_threads, tool
from helpers.waiting import let_others_run, until


def calls(*entries: tuple[str, Any]) -> list[ToolCall]:
    return [
        ToolCall(f"c{index}", name, arguments if isinstance(arguments, str) else json.dumps(arguments))
        for index, (name, arguments) in enumerate(entries)
    ]


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def test_every_call_gets_one_answer_in_call_order_with_its_id() -> None:
    added = threading.Event()

    @tool
    async def slow() -> str:
        await until(added.is_set)
        return "slow"

    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        added.set()
        return a + b

    box = Toolbox([slow, add])
    results = await box.run(calls(("slow", {}), ("add", {"a": 1, "b": 2}), ("ad", {}), ("add", "{")))

    assert [result.tool_call_id for result in results] == ["c0", "c1", "c2", "c3"]
    assert [result.error_kind for result in results] == [
        None,
        None,
        ToolErrorKind.UNKNOWN_TOOL,
        ToolErrorKind.INVALID_JSON,
    ]
    assert results[2].content == "unknown tool 'ad'; did you mean 'add'?; the tools are: slow, add"


async def test_async_calls_of_a_turn_run_at_the_same_time() -> None:
    barrier = asyncio.Barrier(8)

    @tool(timeout_s=5)
    async def meet() -> str:
        await barrier.wait()
        return "met"

    results = await Toolbox([meet]).run(calls(*[("meet", {})] * 8))

    assert [result.content for result in results] == ["met"] * 8


async def test_blocking_calls_of_a_turn_run_at_the_same_time_and_the_loop_goes_on() -> None:
    inside: list[int] = []
    release = threading.Event()

    @tool(timeout_s=60)
    def meet() -> str:
        inside.append(threading.get_ident())
        return "released" if release.wait(60) else "forgotten"

    async def release_all() -> None:
        await until(lambda: len(inside) == 8)
        release.set()

    releasing = asyncio.create_task(release_all())
    results = await Toolbox([meet]).run(calls(*[("meet", {})] * 8))
    await releasing

    assert [result.content for result in results] == ["released"] * 8
    assert len(set(inside)) == 8


async def test_calls_that_may_not_overlap_run_alone_and_in_order() -> None:
    log: list[str] = []

    @tool(parallel=False)
    async def alone(name: str) -> None:
        log.append(f"+{name}")
        await let_others_run()
        log.append(f"-{name}")

    @tool
    async def beside(name: str) -> None:
        log.append(f"+{name}")
        await let_others_run()
        log.append(f"-{name}")

    order = [("beside", "a"), ("beside", "b"), ("alone", "c"), ("alone", "d"), ("beside", "e")]
    await Toolbox([alone, beside]).run(calls(*[(name, {"name": text}) for name, text in order]))

    assert log == ["+a", "+b", "-a", "-b", "+c", "-c", "+d", "-d", "+e", "-e"]


@pytest.mark.parametrize("status", [status for status in CallStatus if status is not CallStatus.OK])
async def test_a_call_that_the_parser_refused_is_never_executed(status: CallStatus) -> None:
    call = ToolCall("c0", "add", '{"a": 1, "b": 2}', status, "what is wrong")

    (result,) = await Toolbox([add]).run([call])

    assert result.content == "what is wrong"
    assert result.is_error


async def test_repair_is_a_choice_of_the_toolbox() -> None:
    broken = [ToolCall("c0", "add", "{'a': 1, 'b': 2}", CallStatus.INVALID_JSON, "broken")]

    (refused,) = await Toolbox([add]).run(broken)
    (mended,) = await Toolbox([add], repair_json=True).run(broken)

    assert (refused.content, refused.repaired) == ("broken", False)
    assert (mended.content, mended.repaired) == ("3", True)


async def test_a_failing_sandbox_stops_the_turn_and_its_other_calls() -> None:
    hanging, stopped = asyncio.Event(), asyncio.Event()

    @tool
    async def hang() -> None:
        hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    @tool
    async def crash() -> None:
        await hanging.wait()
        raise SandboxUnavailable("no isolation here")

    with pytest.raises(SandboxUnavailable):
        await Toolbox([hang, crash]).run(calls(("hang", {}), ("crash", {})))
    assert stopped.is_set()


async def test_cancelling_a_turn_cancels_its_calls() -> None:
    stopped: list[int] = []
    hanging = asyncio.Barrier(3)

    @tool
    async def hang(n: int) -> None:
        await hanging.wait()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(n)

    turn = asyncio.create_task(Toolbox([hang]).run(calls(("hang", {"n": 1}), ("hang", {"n": 2}))))
    await hanging.wait()
    await let_others_run()
    turn.cancel()

    with pytest.raises(asyncio.CancelledError):
        await turn
    assert sorted(stopped) == [1, 2]


def abs_of(x: int) -> int:
    return abs(x)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolDefinitionError, match="two tools are named 'add'"):
        Toolbox([add, Tool.from_function(abs_of, name="add")])


def test_plain_functions_become_tools() -> None:
    def twice(x: int) -> int:
        """Double."""
        return 2 * x

    box = Toolbox([twice, add])

    assert box.names == ("twice", "add")
    assert "twice" in box
    assert len(box) == 2
    assert box["add"].name == "add"
    assert [schema["function"]["name"] for schema in box.schemas()] == ["twice", "add"]


async def test_an_empty_toolbox_says_so() -> None:
    (result,) = await Toolbox().run(calls(("f", {})))

    assert result.content == "unknown tool 'f'; there are no tools"


class Base:
    def __init__(self) -> None:
        self.total = 0

    @tool
    def first(self, x: int) -> int:
        """First."""
        self.total += x
        return self.total

    @tool
    def second(self) -> str:
        """Second."""
        return "base"

    @tool
    def third(self) -> str:
        """Third."""
        return "third"

    def close(self) -> None: ...

    def render(self) -> None: ...

    def is_done(self) -> bool:
        return False

    @property
    def state(self) -> int:
        raise AssertionError("properties are never touched")

    @staticmethod
    def helper(x: int) -> int:
        return x


class Child(Base):
    @tool
    def fourth(self) -> str:
        """Fourth."""
        return "fourth"

    @tool
    def second(self) -> str:
        """Second again."""
        return "child"

    def third(self) -> str:
        return "no tool any more"

    plus = add


def test_only_marked_methods_are_tools_in_order_ofdefinition() -> None:
    assert Toolbox.of(Base()).names == ("first", "second", "third")
    assert Toolbox.of(Child()).names == ("first", "second", "fourth", "add")


async def test_overriding_is_respected() -> None:
    (result,) = await Toolbox.of(Child()).run(calls(("second", {})))

    assert result.content == "child"


async def test_each_object_has_its_own_state() -> None:
    one, two = Base(), Base()
    boxes = [Toolbox.of(one), Toolbox.of(two)]

    for box, x in zip(boxes, (1, 5), strict=True):
        await box.run(calls(("first", {"x": x}), ("first", {"x": x})))

    assert (one.total, two.total) == (2, 10)
    assert one.first(1) == 3


def test_collecting_tools_copies_no_schema() -> None:
    one, two = Toolbox.of(Base())["first"], Toolbox.of(Base())["first"]

    assert one is not two
    assert one.definition is two.definition


async def test_a_tool_may_run_tools_from_its_own_thread() -> None:
    @tool
    def inner(x: int) -> int:
        return x + 1

    @tool
    def outer(x: int) -> str:
        results = asyncio.run(Toolbox([inner]).run(calls(("inner", {"x": x}), ("inner", {"x": x + 1}))))
        return ",".join(result.text for result in results)

    results = await Toolbox([outer]).run(calls(*[("outer", {"x": x}) for x in range(80)]))

    assert [result.content for result in results] == [f"{x + 1},{x + 2}" for x in range(80)]


async def test_many_turns_leave_no_task_and_no_thread_behind() -> None:
    @tool
    async def wait() -> None:
        await asyncio.sleep(0)

    @tool
    def work() -> None: ...

    box = Toolbox([wait, work])
    await box.run(calls(*[("wait", {}), ("work", {})] * 10))
    tasks, threads, abandoned = len(asyncio.all_tasks()), threading.active_count(), len(abandoned_threads())
    for _ in range(20):
        await box.run(calls(*[("wait", {}), ("work", {})] * 10))

    assert len(asyncio.all_tasks()) == tasks
    assert threading.active_count() <= threads + 10
    assert len(abandoned_threads()) == abandoned
