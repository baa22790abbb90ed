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

    assert [(result.tool_call_id, result.error_kind) for result in results] == [
        ("c0", None),
        ("c1", None),
        ("c2", ToolErrorKind.UNKNOWN_TOOL),
        ("c3", ToolErrorKind.INVALID_JSON),
    ]
    assert results[2].content == "unknown tool 'ad'; did you mean 'add'?; the tools are: slow, add"
    (none,) = await Toolbox().run(calls(("f", {})))
    assert none.content == "unknown tool 'f'; there are no tools"


async def test_calls_of_a_turn_run_at_the_same_time_and_leave_nothing_behind() -> None:
    """Async and blocking ones, and the loop goes on."""
    inside: list[int] = []
    release, barrier = threading.Event(), asyncio.Barrier(8)

    @tool(timeout_s=60)
    def block() -> str:
        inside.append(threading.get_ident())
        return "released" if release.wait(60) else "forgotten"

    @tool(timeout_s=60)
    async def meet() -> str:
        await barrier.wait()
        return "met"

    async def release_all() -> None:
        await until(lambda: len(inside) == 8)
        release.set()

    releasing = asyncio.create_task(release_all())
    box = Toolbox([block, meet])
    results = await box.run(calls(*[("block", {}), ("meet", {})] * 8))
    await releasing
    assert [result.content for result in results] == ["released", "met"] * 8
    assert len(set(inside)) == 8

    tasks, threads, abandoned = len(asyncio.all_tasks()), threading.active_count(), len(abandoned_threads())
    for _ in range(20):
        await box.run(calls(*[("block", {}), ("meet", {})] * 8))
    assert (len(asyncio.all_tasks()), len(abandoned_threads())) == (tasks, abandoned)
    assert threading.active_count() <= threads + 10


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
async def test_a_call_that_the_parser_refused_is_executed_only_if_its_json_can_be_repaired(
    status: CallStatus,
) -> None:
    call = ToolCall("c0", "add", "{'a': 1, 'b': 2}", status, "what is wrong")

    (refused,) = await Toolbox([add]).run([call])
    (mended,) = await Toolbox([add], repair_json=True).run([call])

    assert (refused.content, refused.is_error, refused.repaired) == ("what is wrong", True, False)
    repaired = status is CallStatus.INVALID_JSON
    assert (mended.content, mended.repaired) == ("3" if repaired else "what is wrong", repaired)


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


def test_plain_functions_become_tools_and_two_of_one_name_are_refused() -> None:
    def twice(x: int) -> int:
        """Double."""
        return 2 * x

    box = Toolbox([twice, add])

    assert box.names == ("twice", "add")
    assert "twice" in box
    assert len(box) == 2
    assert box["add"].name == "add"
    assert [schema["function"]["name"] for schema in box.schemas()] == ["twice", "add"]
    with pytest.raises(ToolDefinitionError, match="two tools are named 'add'"):
        Toolbox([add, Tool.from_function(twice, name="add")])


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


async def test_only_marked_methods_are_tools_in_order_of_definition() -> None:
    assert Toolbox.of(Base()).names == ("first", "second", "third")
    assert Toolbox.of(Child()).names == ("first", "second", "fourth", "add")
    (result,) = await Toolbox.of(Child()).run(calls(("second", {})))
    assert result.content == "child"


async def test_each_object_has_its_own_state_and_no_schema_of_its_own() -> None:
    one, two = Base(), Base()
    boxes = [Toolbox.of(one), Toolbox.of(two)]

    for box, x in zip(boxes, (1, 5), strict=True):
        await box.run(calls(("first", {"x": x}), ("first", {"x": x})))

    assert (one.total, two.total) == (2, 10)
    assert one.first(1) == 3
    assert boxes[0]["first"] is not boxes[1]["first"]
    assert boxes[0]["first"].definition is boxes[1]["first"].definition


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
