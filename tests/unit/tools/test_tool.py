"""One call of a tool: arguments, answers, time limits, and what may never happen."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import json
import pickle
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

import json_repair
import pytest
from pydantic import BaseModel, field_validator

from agentenv.core import Context, RunLimits, SandboxCrashed, ToolDefinitionError, ToolError, ToolErrorKind
from agentenv.tools import Tool, Toolbox, abandoned_threads, tool
from helpers.waiting import PATIENCE_S, until


@tool
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@tool
def echo(text: str = "", data: Any = None) -> Any:
    """Return what is given."""
    return text or data


def test_the_decorated_function_is_still_the_function_and_its_schema_nobodys_to_change() -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
        "required": ["a"],
    }
    add.schema()["function"]["name"] = "other"
    add.parameters["properties"].clear()

    assert (add(2, b=3), add.function(1), add.__name__, add.__doc__) == (5, 2, "add", "Add two numbers.")
    assert add.schema() == {
        "type": "function",
        "function": {"name": "add", "description": "Add two numbers.", "parameters": parameters},
    }


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ('{"a": 1', ToolErrorKind.INVALID_JSON, "not valid JSON"),
        ("a=1", ToolErrorKind.INVALID_JSON, "not valid JSON"),
        *((text, ToolErrorKind.BAD_ARGUMENTS, "one JSON object") for text in ("[1]", "3", '"text"', "null")),
        ("", ToolErrorKind.BAD_ARGUMENTS, "a: field required"),
        ('{"a": 1, "c": 2}', ToolErrorKind.BAD_ARGUMENTS, "c: unknown argument; the arguments are a, b"),
        ('{"a": 1, "a": 2}', ToolErrorKind.BAD_ARGUMENTS, 'the key "a" appears twice'),
        ('{"a": NaN}', ToolErrorKind.BAD_ARGUMENTS, "NaN"),
        ('{"a": -Infinity}', ToolErrorKind.BAD_ARGUMENTS, "-Infinity"),
        ('{"a": 1e999}', ToolErrorKind.BAD_ARGUMENTS, "1e999"),
        ('{"a": "\\ud800"}', ToolErrorKind.BAD_ARGUMENTS, "invalid Unicode surrogate (U+D800)"),
        ('{"a": "\ud800"}', ToolErrorKind.BAD_ARGUMENTS, "invalid Unicode surrogate (U+D800)"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", ToolErrorKind.BAD_ARGUMENTS, ""),
        ('{"a": ' + "9" * 5000 + "}", ToolErrorKind.BAD_ARGUMENTS, "too many digits"),
        ('{"a": 1.5}', ToolErrorKind.BAD_ARGUMENTS, "a: should be a valid integer"),
        ('{"a": null}', ToolErrorKind.BAD_ARGUMENTS, "a: should be a valid integer, got null"),
        ('{"a": "' + "x" * 9000 + '"}', ToolErrorKind.BAD_ARGUMENTS, "..."),
        (
            '{"a": "' + "x" * 10_000_000 + '"}',
            ToolErrorKind.BAD_ARGUMENTS,
            "10,000,009 characters; at most 1,000,000",
        ),
    ],
    ids=lambda value: str(value)[:30].encode("ascii", "replace").decode() if value else "empty",
)
async def test_bad_arguments_are_one_short_line_for_the_model(
    arguments: str, kind: ToolErrorKind, says: str
) -> None:
    result = await add.call(arguments)

    assert result.error_kind is kind
    assert says in result.text
    assert "\n" not in result.text
    assert len(result.text) < 300
    assert result.text.startswith("bad arguments for add: ")


class Inner(BaseModel):
    x: int = 7
    items: list[int] = []


MISSING = object()


def nested(inner: Inner, n: int = 3, maybe: int | None = 5) -> list[Any]:
    return [inner.x, n, maybe]


def collect(x: int, into: list[int] = []) -> list[int]:  # noqa: B006 - the mistake under test
    into.append(x)
    return into


def put(bag: Inner = Inner()) -> int:  # noqa: B008 - the habit under test
    bag.items.append(1)
    return len(bag.items)


def is_missing(x: Any = MISSING) -> bool:
    return x is MISSING


def where() -> list[Any]:
    return [threading.current_thread() is threading.main_thread(), NUMBER.get()]


def note(context: Context, x: int) -> list[Any]:
    context.state["x"] = x
    return [context.seed, context.state]


def twice(x: int) -> Any:
    async def later() -> int:
        return x * 2

    return later()


NUMBER: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)
TAKEN = {
    "a pair of surrogate escapes": (echo, '{"text": "\\ud83d\\ude00"}', "😀"),
    "JSON in a string": (add, json.dumps(json.dumps({"a": 4})), "5"),
    "null for an argument with a default": (
        *(nested, '{"inner": {"x": null}, "n": null, "maybe": null}', "[7, 3, null]"),
    ),
    "a mutable default": (collect, '{"x": 1}', "[1]"),
    "a default model": (put, "{}", "1"),
    "a default that JSON cannot say": (is_missing, "{}", "true"),
    "another thread, with the caller's context variables": (where, "{}", "[false, 9]"),
    "a coroutine of a function": (twice, '{"x": 4}', "8"),
    "the context": (note, '{"x": 3}', '[11, {"x": 3}]'),
}


@pytest.mark.parametrize(("function", "arguments", "answer"), TAKEN.values(), ids=TAKEN)
async def test_a_call_is_answered_and_the_next_one_alike(function: Any, arguments: str, answer: str) -> None:
    NUMBER.set(9)
    made = function if isinstance(function, Tool) else Tool.from_function(function, name="made")

    for _ in range(2):
        result = await made.call(arguments, Context(seed=11), tool_call_id="c7")

        assert (result.content, result.error_kind) == (answer, None)
        assert (result.tool_call_id, result.name) == ("c7", made.name)
        assert result.duration_s > 0


async def test_broken_json_is_repaired_only_when_asked_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "{'a': 2, b: 3,}"
    answers = [
        await add.call(text, repair_json=repair)
        for text, repair in ((broken, False), (broken, True), ('{"a": 2}', True), ("no json at all", True))
    ]
    told = [(answer.error_kind or answer.content, answer.repaired) for answer in answers]
    invalid = (ToolErrorKind.INVALID_JSON, False)
    assert told == [invalid, ("5", True), ("3", False), invalid]

    repaired: list[str] = []
    monkeypatch.setattr(json_repair, "loads", lambda text, **_: repaired.append(text))
    for text in ("{" * 100 + "a" * 20_000, "{'text': '" + "a" * 5000):  # would take long
        assert (await echo.call(text, repair_json=True)).error_kind is ToolErrorKind.INVALID_JSON
    assert repaired == []


def test_defaults_stand_in_the_schema_where_json_can_say_them() -> None:
    assert Tool.from_function(is_missing).parameters == {"type": "object", "properties": {"x": {}}}
    assert Tool.from_function(collect).parameters["properties"]["into"]["default"] == []


def raising(error: BaseException, is_async: bool = False) -> Tool:
    def fail() -> None:
        raise error

    async def fail_later() -> None:
        raise error

    return Tool.from_function(fail_later if is_async else fail, name="fail")


class Oops(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("a\nb"), SystemExit(3), KeyboardInterrupt(), Oops("x"), GeneratorExit(), KeyError()),
        *(asyncio.CancelledError(), ToolError("rows go from 1 to 9"), SandboxCrashed("gone")),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_nothing_that_a_tool_raises_gets_out(error: BaseException, is_async: bool) -> None:
    """But the failure of a sandbox, which is not the model's."""
    if isinstance(error, SandboxCrashed):
        with pytest.raises(SandboxCrashed, match="gone"):
            await raising(error, is_async).call("{}")
        return
    result = await raising(error, is_async).call("{}")

    if isinstance(error, ToolError):
        told = ("rows go from 1 to 9", ToolErrorKind.TOOL_ERROR, "")
        assert (result.content, result.error_kind, result.detail) == told
        return
    assert result.error_kind is ToolErrorKind.EXCEPTION
    assert result.text.startswith(type(error).__name__)
    assert "\n" not in result.text
    assert result.detail.splitlines()[1].strip().startswith(f'File "{__file__}"')
    assert "in fail" in result.detail


class Strange(BaseModel):
    x: int

    @field_validator("x")
    @classmethod
    def check(cls, value: int) -> int:
        raise RuntimeError("boom")


def dive(x: int) -> int:
    return dive(x + 1)


def strange(x: Strange) -> None: ...


def finite(x: float, more: list[float]) -> None: ...


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "says"),
    [
        (dive, {"x": 0}, ToolErrorKind.EXCEPTION, ["RecursionError"]),
        (strange, {"x": {"x": 1}}, ToolErrorKind.EXCEPTION, ["RuntimeError: boom"]),
        *(
            (finite, {"x": value, "more": [value]}, ToolErrorKind.BAD_ARGUMENTS, ["x: should", "more[0]: should"])
            for value in ("NaN", "-Infinity", "inf")
        ),
    ],
)  # fmt: skip
async def test_endless_recursion_raising_validators_and_numbers_without_end_are_answers(
    function: Any, arguments: Any, kind: ToolErrorKind, says: list[str]
) -> None:
    result = await Tool.from_function(function).call(json.dumps(arguments))

    assert result.error_kind is kind
    assert [words for words in says if words not in result.text] == []
    assert "be a finite number" in result.text or kind is ToolErrorKind.EXCEPTION
    assert len(result.detail) <= 8000


async def test_a_coroutine_that_refuses_to_stop_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.tools.run._GRACE_S", 0.02)
    release = asyncio.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    result = await Tool.from_function(stubborn, timeout_s=0.02).call("{}")
    release.set()
    await asyncio.sleep(0)

    assert result.error_kind is ToolErrorKind.TIMEOUT


@pytest.mark.untraced  # until the hung thread wakes, CPython 3.11 goes round in circles in a traced loop
async def test_a_hung_thread_is_left_behind_named_and_counted() -> None:
    release = threading.Event()

    def hang() -> None:
        while not release.wait(60):
            continue

    before = len(abandoned_threads())
    result = await Tool.from_function(hang, timeout_s=0.05).call("{}")
    names = [thread.name for thread in abandoned_threads()]
    release.set()
    await until(lambda: len(abandoned_threads()) == before)

    assert result.error_kind is ToolErrorKind.TIMEOUT
    assert "abandoned tool hang" in names


async def test_an_endless_loop_in_python_is_ended_after_its_limit() -> None:
    def spin() -> None:
        while True:
            pass

    result = await Tool.from_function(spin, timeout_s=0.05).call("{}")
    await until(lambda: "abandoned tool spin" not in {thread.name for thread in abandoned_threads()})

    assert result.error_kind is ToolErrorKind.TIMEOUT


@pytest.mark.parametrize(("own", "says"), [(50, "0.02 s"), (0.01, "0.01 s")])
@pytest.mark.parametrize("lags", [False, True], ids=["", "on a loop that lags"])
async def test_a_hung_coroutine_is_stopped_at_the_stricter_of_its_limit_and_the_runs(
    own: float, says: str, lags: bool
) -> None:
    cleaned: list[bool] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    async def lag() -> None:
        while lags:
            time.sleep(0.08)  # noqa: ASYNC251 - the busy loop under test
            await asyncio.sleep(0)

    busy = asyncio.create_task(lag())
    made = Tool.from_function(hang, timeout_s=own)
    result = await asyncio.wait_for(
        made.call("{}", Context(limits=RunLimits(tool_timeout_s=0.02))), PATIENCE_S
    )
    busy.cancel()

    assert (result.error_kind, cleaned) == (ToolErrorKind.TIMEOUT, [True])
    assert says in result.text


async def test_time_in_which_the_loop_was_blocked_does_not_count() -> None:
    go = asyncio.Event()

    async def quick() -> str:
        await go.wait()
        return "done"

    call = asyncio.create_task(Tool.from_function(quick, timeout_s=0.1).call("{}"))
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251 - the blocked loop under test
    go.set()
    result = await call

    assert result.content == "done"


async def test_cancelling_the_caller_cancels_the_tool() -> None:
    hanging, stopped = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    call = asyncio.create_task(Tool.from_function(hang).call("{}"))
    await hanging.wait()
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call
    assert stopped.is_set()


def _generator(x: int) -> Any:
    yield x


async def _async_generator(x: int) -> Any:
    yield x


class Plain:
    pass


class Odd(Enum):
    PAIR = (1, 2)


def annotated(bad: Any) -> Callable[..., None]:
    """A function with a parameter of a type that JSON can say, and one of another."""

    def take(good: int, bad: Any) -> None: ...

    take.__annotations__ = {"good": int, "bad": bad}
    return take


def _no_annotation(x, y: int) -> None: ...  # type: ignore[no-untyped-def]


def _a_class_variable(good: int, bad: ClassVar[int]) -> None: ...  # type: ignore[valid-type]


def _arbitrary_kwargs(**bad: Plain) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_generator, "generator"),
        (_async_generator, "generator"),
        (_no_annotation, "parameter 'x' has no annotation"),
        (annotated("1 + "), "parameter 'bad'"),
        (annotated(Plain), "parameter 'bad'"),
        (_arbitrary_kwargs, "parameter 'bad'"),
        (annotated(dict[str, Odd]), "parameter 'bad'.*values must be text or numbers"),
        (annotated(type[int]), "parameter 'bad'.*a class cannot be written in JSON"),
        (annotated(Callable[[int], int]), "parameter 'bad'"),
        (_a_class_variable, "parameter 'bad'.*(no type of a value|not a type)"),
        (Plain, "is a class"),
        (lambda x: x, "pass name="),
        (functools.partial(_generator), "generator"),
        (sys.exit, "parameter"),
        (3, "cannot be called"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:20]),
)
def test_what_cannot_be_a_tool_is_refused_when_it_is_made(function: Any, says: str) -> None:
    with pytest.raises(ToolDefinitionError, match=says):
        Tool.from_function(function)


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        *((name, False) for name in (" ", "a b", "é", "a.b", "x" * 65, "a\n")),
        *((name, True) for name in ("a", "A-1_b", "x" * 64)),
    ],
)
def test_names_that_providers_refuse_are_refused_here(name: str, taken: bool) -> None:
    if taken:
        assert Tool.from_function(add, name=name).name == name
        return
    with pytest.raises(ToolDefinitionError, match="pass name="):
        Tool.from_function(add, name=name)


def test_an_unresolvable_annotation_is_refused_at_first_use_with_the_remedy() -> None:
    def take(x: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    made = Tool.from_function(take)

    told = r"parameter 'x' is annotated 'Missing'.*import the name at run time"
    with pytest.raises(ToolDefinitionError, match=told):
        made.schema()


async def test_a_tool_is_not_decorated_twice_but_can_get_other_options() -> None:
    with pytest.raises(ToolDefinitionError, match="is a tool already"):
        tool(add)
    for options in ({"timeout_s": 0}, {"timeout_s": float("nan")}, {"max_output_tokens": 0}):
        with pytest.raises(ToolDefinitionError, match=r"must be (more than 0 seconds|finite|at least 1)"):
            Tool.from_function(add, **options)

    other = Tool.from_function(add, name="plus", description="Sum.", timeout_s=1, max_output_tokens=5)

    assert (other.name, other.description, other.options.timeout_s) == ("plus", "Sum.", 1)
    assert add.name == "add"
    assert [(await made.call('{"a": 1}')).max_tokens for made in (other, add)] == [5, None]


async def test_an_unbound_method_cannot_be_called_by_a_model() -> None:
    class Box:
        @tool
        def open(self, x: int) -> int:
            return x

    assert Box.open(Box(), 3) == 3
    assert Box().open(3) == 3
    with pytest.raises(ToolDefinitionError, match="through an object"):
        await Box.open.call({"x": 1})


async def test_notes_say_what_would_help_the_model_and_a_deep_schema_still_works() -> None:
    def bare(deep: list[list[list[list[list[list[int]]]]]]) -> int:
        return deep[0][0][0][0][0][0]

    made = Tool.from_function(bare)

    assert made.notes == (
        "tool bare has no description: give its function a docstring",
        "tool bare: parameter 'deep' has no description",
        "tool bare: arguments nest 7 levels; some providers accept only 5",
    )
    assert (await made.call('{"deep": [[[[[["3"]]]]]]}')).content == "3"


async def test_a_tool_from_a_schema_shows_it_unchanged_and_checks_its_top_level() -> None:
    parameters = {
        "type": "object",
        "title": "Kept",
        "properties": {
            "q": {"type": "string", "title": "Q"},
            "n": {"type": "integer", "default": 3},
            "where": {"type": "object", "properties": {"a": {"anyOf": [{"enum": [1]}, {"type": "array"}]}}},
            "mode": {"enum": ["a", "b"]},
            "any": {"enum": [1.5, [1], None]},
            "maybe": {"type": ["string", "null"]},
        },
        "required": ["q"],
        "additionalProperties": False,
    }

    async def search(**arguments: Any) -> Any:
        return arguments

    made = Tool.from_schema("search", "Find.", parameters, search)
    given = {"q": "x", "where": {"a": 2}, "any": [1], "maybe": None}
    good = await made.call(json.dumps(given))
    bad = await made.call('{"n": "many", "mode": "c", "z": 1}')
    told = ("q: field required", "n: should be", "mode: should be", "z: unknown")

    assert made.schema()["function"] == {"name": "search", "description": "Find.", "parameters": parameters}
    assert json.loads(good.text) == given
    assert all(words in bad.text for words in told)
    del parameters["additionalProperties"]
    open_one = Tool.from_schema("search", "", parameters, search)
    assert json.loads((await open_one.call('{"q": "x", "z": 3}')).text) == {"q": "x", "z": 3}


class Tally:
    def __init__(self) -> None:
        self.count = 0
        self.tools = Toolbox.of(self)

    @tool
    def up(self) -> int:
        self.count += 1
        return self.count


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
async def test_a_copy_of_an_object_has_tools_of_its_own(again: Callable[[Any], Any]) -> None:
    one = Tally()
    two = again(one)
    await two.tools["up"].call("{}")
    await two.up.call("{}")

    assert (one.count, two.count) == (0, 2)
    assert again(add)(2) == 3


def test_a_tool_that_cannot_be_found_again_refuses_to_be_pickled() -> None:
    other = Tool.from_function(add, name="other")
    local = Tool.from_function(lambda: 1, name="local")

    for made in (other, local):
        with pytest.raises(pickle.PicklingError):
            pickle.dumps(made)
