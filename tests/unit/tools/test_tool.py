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


def test_the_decorated_function_is_still_the_function() -> None:
    assert add(2, b=3) == 5
    assert add.__name__ == "add"
    assert add.__doc__ == "Add two numbers."
    assert add.function(1) == 2


def test_schema_has_the_shape_of_chat_templates() -> None:
    schema = add.schema()

    assert schema["type"] == "function"
    assert schema["function"]["name"] == "add"
    assert schema["function"]["description"] == "Add two numbers."
    assert list(schema["function"]["parameters"]) == ["type", "properties", "required"]


def test_nobody_can_change_a_schema_from_outside() -> None:
    add.schema()["function"]["name"] = "other"
    add.parameters["properties"].clear()

    assert add.schema()["function"]["name"] == "add"
    assert list(add.parameters["properties"]) == ["a", "b"]


async def test_a_call_answers_with_id_name_and_time() -> None:
    result = await add.call('{"a": "2"}', tool_call_id="c7")

    assert (result.tool_call_id, result.name, result.content, result.error_kind) == ("c7", "add", "3", None)
    assert result.duration_s > 0


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ('{"a": 1', ToolErrorKind.INVALID_JSON, "not valid JSON"),
        ("a=1", ToolErrorKind.INVALID_JSON, "not valid JSON"),
        ("[1]", ToolErrorKind.BAD_ARGUMENTS, "one JSON object"),
        ("3", ToolErrorKind.BAD_ARGUMENTS, "one JSON object"),
        ('"text"', ToolErrorKind.BAD_ARGUMENTS, "one JSON object"),
        ("null", ToolErrorKind.BAD_ARGUMENTS, "one JSON object"),
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


async def test_ten_megabytes_of_arguments_are_refused_unread() -> None:
    text = '{"text": "' + "x" * 10_000_000 + '"}'

    result = await echo.call(text)

    assert result.error_kind is ToolErrorKind.BAD_ARGUMENTS
    assert "10,000,012 characters; at most 1,000,000" in result.text


async def test_a_pair_of_surrogate_escapes_is_one_character() -> None:
    result = await echo.call('{"text": "\\ud83d\\ude00"}')

    assert result.content == "😀"


async def test_arguments_written_as_a_json_string_are_unwrapped() -> None:
    result = await add.call(json.dumps(json.dumps({"a": 4})))

    assert result.content == "5"


async def test_null_for_an_argument_with_a_default_means_the_default() -> None:
    class Inner(BaseModel):
        x: int = 7

    def nested(inner: Inner, n: int = 3, maybe: int | None = 5) -> list[Any]:
        return [inner.x, n, maybe]

    result = await Tool.from_function(nested).call('{"inner": {"x": null}, "n": null, "maybe": null}')

    assert result.content == "[7, 3, null]"


async def test_broken_json_is_repaired_only_when_asked_and_said() -> None:
    broken = "{'a': 2, b: 3,}"

    refused = await add.call(broken)
    mended = await add.call(broken, repair_json=True)
    whole = await add.call('{"a": 2}', repair_json=True)
    hopeless = await add.call("no json at all", repair_json=True)

    assert (refused.error_kind, refused.repaired) == (ToolErrorKind.INVALID_JSON, False)
    assert (mended.content, mended.repaired) == ("5", True)
    assert (whole.content, whole.repaired) == ("3", False)
    assert hopeless.error_kind is ToolErrorKind.INVALID_JSON


async def test_text_that_would_take_long_to_repair_is_not_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    repaired: list[str] = []
    monkeypatch.setattr(json_repair, "loads", lambda text, **_: repaired.append(text))

    for text in ("{" * 100 + "a" * 20_000, "{'text': '" + "a" * 5000):
        result = await echo.call(text, repair_json=True)

        assert result.error_kind is ToolErrorKind.INVALID_JSON
    assert repaired == []


async def test_a_mutable_default_is_new_for_each_call() -> None:
    def collect(x: int, into: list[int] = []) -> list[int]:  # noqa: B006 - the mistake under test
        into.append(x)
        return into

    made = Tool.from_function(collect)
    answers = [(await made.call({"x": x})).content for x in (1, 2)]

    assert answers == ["[1]", "[2]"]
    assert made.parameters["properties"]["into"]["default"] == []


async def test_a_default_that_json_cannot_say_reaches_the_function_unchanged() -> None:
    missing = object()

    def take(x: Any = missing) -> bool:
        return x is missing

    made = Tool.from_function(take)

    assert made.parameters == {"type": "object", "properties": {"x": {}}}
    assert (await made.call("{}")).content == "true"


async def test_tool_error_is_text_for_the_model() -> None:
    result = await raising(ToolError("no such row; rows go from 1 to 9")).call("{}")

    assert result.content == "no such row; rows go from 1 to 9"
    assert (result.error_kind, result.detail) == (ToolErrorKind.TOOL_ERROR, "")


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
        ValueError("a\nb"),
        SystemExit(3),
        KeyboardInterrupt(),
        Oops("x"),
        GeneratorExit(),
        asyncio.CancelledError(),
        KeyError(),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_nothing_that_a_tool_raises_gets_out(error: BaseException, is_async: bool) -> None:
    result = await raising(error, is_async).call("{}")

    assert result.error_kind is ToolErrorKind.EXCEPTION
    assert result.text.startswith(type(error).__name__)
    assert "\n" not in result.text
    assert "Traceback" in result.detail
    assert "in fail" in result.detail


async def test_endless_recursion_is_an_answer() -> None:
    def dive(x: int) -> int:
        return dive(x + 1)

    result = await Tool.from_function(dive).call({"x": 0})

    assert result.text.startswith("RecursionError")
    assert len(result.detail) <= 8000


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "inf"])
async def test_a_number_written_as_text_must_be_finite(value: str) -> None:
    def take(x: float, more: list[float]) -> None: ...

    result = await Tool.from_function(take).call(json.dumps({"x": value, "more": [value]}))

    assert "x: should be a finite number" in result.text
    assert "more[0]: should be a finite number" in result.text


async def test_a_raising_validator_is_the_tools_fault_not_the_models() -> None:
    class Strange(BaseModel):
        x: int

        @field_validator("x")
        @classmethod
        def check(cls, value: int) -> int:
            raise RuntimeError("boom")

    def take(strange: Strange) -> None: ...

    result = await Tool.from_function(take).call({"strange": {"x": 1}})

    assert (result.error_kind, result.text) == (ToolErrorKind.EXCEPTION, "RuntimeError: boom")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_failing_sandbox_aborts_instead_of_blaming_the_model(is_async: bool) -> None:
    with pytest.raises(SandboxCrashed, match="gone"):
        await raising(SandboxCrashed("gone"), is_async).call("{}")


async def test_a_hung_coroutine_is_stopped_at_its_limit() -> None:
    cleaned: list[bool] = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    result = await Tool.from_function(hang, timeout_s=0.02).call("{}")

    assert result.error_kind is ToolErrorKind.TIMEOUT
    assert "0.02 s" in result.text
    assert cleaned == [True]


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


async def test_the_stricter_of_tool_limit_and_run_limit_holds() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    context = Context(limits=RunLimits(tool_timeout_s=0.02))
    loose = await Tool.from_function(hang, timeout_s=50).call("{}", context)
    tight = await Tool.from_function(hang, timeout_s=0.01).call("{}", context)

    assert "0.02 s" in loose.text
    assert "0.01 s" in tight.text


async def test_a_hung_tool_ends_also_on_a_loop_that_always_lags() -> None:
    async def lag() -> None:
        while True:
            time.sleep(0.08)  # noqa: ASYNC251 - the busy loop under test
            await asyncio.sleep(0)

    @tool(timeout_s=0.05)
    async def wait() -> None:
        """Wait for nothing."""
        await asyncio.Event().wait()

    busy = asyncio.create_task(lag())
    result = await asyncio.wait_for(wait.call({}), PATIENCE_S)
    busy.cancel()

    assert result.is_error
    assert "0.05 s" in result.content


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


async def test_a_sync_tool_runs_off_the_loop_with_the_callers_context_variables() -> None:
    number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)
    number.set(9)

    def where() -> list[Any]:
        return [threading.current_thread() is threading.main_thread(), number.get()]

    assert (await Tool.from_function(where).call("{}")).content == "[false, 9]"


async def test_a_sync_function_that_returns_a_coroutine_is_awaited() -> None:
    async def inner(x: int) -> int:
        return x * 2

    def outer(x: int) -> Any:
        return inner(x)

    assert (await Tool.from_function(outer).call({"x": 4})).content == "8"


async def test_context_reaches_the_tool() -> None:
    def note(context: Context, x: int) -> int:
        context.state["x"] = x
        return context.seed

    context = Context(seed=11)
    result = await Tool.from_function(note).call({"x": 3}, context)

    assert (result.content, context.state) == ("11", {"x": 3})


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


@pytest.mark.parametrize("name", ["", "a b", "é", "a.b", "x" * 65, "a\n"])
def test_names_that_providers_refuse_are_refused_here(name: str) -> None:
    with pytest.raises(ToolDefinitionError, match="pass name="):
        Tool.from_function(add, name=name or " ")


@pytest.mark.parametrize("name", ["a", "A-1_b", "x" * 64])
def test_names_that_providers_take_are_taken(name: str) -> None:
    assert Tool.from_function(add, name=name).name == name


def test_an_unresolvable_annotation_is_refused_at_first_use_with_the_remedy() -> None:
    def take(x: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    made = Tool.from_function(take)

    with pytest.raises(
        ToolDefinitionError, match=r"parameter 'x' is annotated 'Missing'.*import the name at run time"
    ):
        made.schema()


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"max_output_tokens": 0}])
def test_limits_are_positive(options: dict[str, Any]) -> None:
    with pytest.raises(ToolDefinitionError, match=r"must be (more than 0 seconds|finite|at least 1)"):
        Tool.from_function(add, **options)


def test_a_tool_is_not_decorated_twice_but_can_get_other_options() -> None:
    with pytest.raises(ToolDefinitionError, match="is a tool already"):
        tool(add)

    other = Tool.from_function(add, name="plus", description="Sum.", timeout_s=1, max_output_tokens=5)

    assert (other.name, other.description, other.options.timeout_s) == ("plus", "Sum.", 1)
    assert add.name == "add"


async def test_the_tools_own_output_limit_travels_with_the_answer() -> None:
    @tool(max_output_tokens=12, name="short")
    def give() -> str:
        return "x"

    assert (await give.call("{}")).max_tokens == 12
    assert (await add.call('{"a": 1}')).max_tokens is None


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
        },
        "required": ["q"],
        "additionalProperties": False,
    }

    async def search(**arguments: Any) -> Any:
        return arguments

    made = Tool.from_schema("search", "Find.", parameters, search)
    good = await made.call('{"q": "x", "where": {"a": 2}}')
    bad = await made.call('{"n": "many", "mode": "c", "z": 1}')

    assert made.schema()["function"] == {"name": "search", "description": "Find.", "parameters": parameters}
    assert json.loads(good.text) == {"q": "x", "where": {"a": 2}}
    assert all(
        name in bad.text for name in ("q: field required", "n: should be", "mode: should be", "z: unknown")
    )


async def test_a_declared_enum_of_anything_is_left_to_the_function() -> None:
    parameters = {
        "type": "object",
        "properties": {"x": {"enum": [1.5, [1], None]}, "y": {"type": ["string", "null"]}},
    }
    made = Tool.from_schema("pick", "", parameters, lambda **arguments: arguments)

    assert json.loads((await made.call('{"x": [1], "y": null, "z": 3}')).text) == {
        "x": [1],
        "y": None,
        "z": 3,
    }


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


async def test_a_traceback_begins_with_the_tools_own_lines() -> None:
    result = await raising(ValueError("x")).call("{}")

    assert result.detail.splitlines()[1].strip().startswith(f'File "{__file__}"')


async def test_a_default_model_is_not_shared_between_calls() -> None:
    class Bag(BaseModel):
        items: list[int] = []

    def put(bag: Bag = Bag()) -> int:  # noqa: B008 - the habit under test
        bag.items.append(1)
        return len(bag.items)

    made = Tool.from_function(put)

    assert [(await made.call("{}")).content for _ in range(3)] == ["1", "1", "1"]
