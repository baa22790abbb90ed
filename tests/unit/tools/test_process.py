"""Tools in processes of their own: killed when they hang, harmless when they die."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from agentenv.core import Context, SandboxCrashed, ToolDefinitionError, ToolErrorKind
from agentenv.tools import Tool, close_idle_workers
from helpers.waiting import until, wait_until


@pytest.fixture(scope="module")
def examples() -> Iterator[ModuleType]:
    """The functions, from a file that is no importable module: the worker loads the file."""
    path = Path(__file__).parents[2] / "helpers" / "isolated_examples.py"
    spec = importlib.util.spec_from_file_location("isolated_examples_for_tests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    close_idle_workers()
    del sys.modules[spec.name]


async def test_the_function_runs_in_one_other_process_call_after_call(examples: ModuleType) -> None:
    answers = [json.loads((await examples.where.call('{"x": "3"}')).text) for _ in range(2)]

    assert answers[0] == answers[1]
    assert answers[0][0] != os.getpid()
    assert answers[0][1:] == [3, True]
    bad = await examples.where.call('{"x": "three"}')
    assert bad.error_kind is ToolErrorKind.BAD_ARGUMENTS
    assert (await Tool.from_function(examples.plain, isolated=True).call({"x": 4})).content == "8"


def test_a_module_below_a_package_of_another_is_loaded_from_its_file(tmp_path: Path) -> None:
    """The worker's path may have a package of the same first name, which the module's file is not in."""
    file, other = tmp_path / "mine" / "parts.py", tmp_path / "other" / "shared_name"
    for folder in (file.parent, other):
        folder.mkdir(parents=True)
    file.write_text("def double(x: int) -> int:\n    return 2 * x\n")
    (other / "__init__.py").touch()
    asked = {"path": [str(other.parent), *sys.path], "module": "shared_name.mine.parts"}
    script = (
        "import json, sys; from agentenv.tools import process_main\n"
        "print(process_main._load(json.loads(sys.argv[1])).name)"
    )
    request = json.dumps({**asked, "qualname": "double", "file": str(file)})
    command = [sys.executable, "-c", script, request]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.stdout.strip() == "double", done.stderr


@pytest.mark.parametrize("cancelled", [False, True], ids=["at its limit", "with its caller"])
async def test_a_hung_function_is_killed_with_everything_it_started(
    examples: ModuleType, tmp_path: Path, cancelled: bool
) -> None:
    note = tmp_path / "pid"
    patient = Tool.from_function(examples.hang.function, isolated=True, timeout_s=60)
    call = asyncio.create_task((patient if cancelled else examples.hang).call({"note": str(note)}))
    if cancelled:
        await until(lambda: note.exists() and note.read_text())
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    else:
        result = await call
        assert result.error_kind is ToolErrorKind.TIMEOUT
        assert "2 s" in result.text

    grandchild = int(note.read_text())
    await until(lambda: not _alive(grandchild))


async def test_a_process_that_dies_is_an_answer_and_the_next_call_works(examples: ModuleType) -> None:
    died = await examples.die.call({"status": 7})

    assert (died.error_kind, died.text) == (ToolErrorKind.EXCEPTION, "the tool's process ended with status 7")
    assert not (await examples.where.call({"x": 1})).is_error


async def test_exceptions_keep_their_meaning(examples: ModuleType) -> None:
    tool_error = await examples.fail.call({"kind": "tool"})
    bug = await examples.fail.call({"kind": "bug"})

    assert (tool_error.error_kind, tool_error.text) == (ToolErrorKind.TOOL_ERROR, "for the model")
    assert (bug.error_kind, bug.text) == (ToolErrorKind.EXCEPTION, "ValueError: bug")
    assert "isolated_examples.py" in bug.detail
    with pytest.raises(SandboxCrashed, match="gone"):
        await examples.fail.call({"kind": "sandbox"})


async def test_a_function_that_sets_signals_works_in_a_process_of_its_own(examples: ModuleType) -> None:
    in_thread = await Tool.from_function(examples.alarmed.function).call({"seconds": 9})
    isolated = await examples.alarmed.call({"seconds": 9})

    assert "async def" in in_thread.text
    assert "isolated=True" in in_thread.text
    assert isolated.text == "in time"


def with_context(context: Context) -> None: ...


def test_what_another_process_cannot_find_or_be_sent_is_refused() -> None:
    class Box:
        def method(self, x: int) -> int:
            return x

    def local(x: int) -> int:
        return x

    needs = "isolated=True needs a function that another process can import"
    for function in (local, Box().method, Box.method):
        with pytest.raises(ToolDefinitionError, match=needs):
            Tool.from_function(function, isolated=True)
    with pytest.raises(ToolDefinitionError, match="cannot take a Context"):
        Tool.from_function(with_context, isolated=True)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


SCRIPT = """
import asyncio
from agentenv.tools import tool

@tool(isolated=True)
def double(x: int) -> int:
    return 2 * x

{guard}print(asyncio.run(double.call({{"x": 4}})).text)
"""


@pytest.mark.parametrize("guard", ['if __name__ == "__main__": ', ""], ids=["with guard", "without guard"])
def test_a_script_can_isolate_its_own_functions_without_running_itself_forever(
    tmp_path: Path, guard: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard=guard))
    command = [sys.executable, str(script)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.stdout.strip() == "8", done.stderr


BUSY = """
import asyncio, os, pathlib, signal
from agentenv.tools import tool

@tool(isolated=True)
def compute() -> int:
    pathlib.Path("computes").write_text(str(os.getpid()))
    {what}

if __name__ == "__main__":
    asyncio.run(compute.call({{}}))
"""


@pytest.mark.parametrize(
    "what",
    ["return pow(3, 10**9)", "os.kill(os.getpid(), signal.SIGSTOP)"],
    ids=["a lock held in C", "stopped"],
)
def test_a_hung_process_ends_when_its_parent_is_killed(tmp_path: Path, what: str) -> None:
    (tmp_path / "busy.py").write_text(BUSY.format(what=what))
    parent = subprocess.Popen([sys.executable, "busy.py"], cwd=tmp_path)
    note = tmp_path / "computes"
    process = int(wait_until(lambda: note.exists() and note.read_text()))

    parent.kill()
    parent.wait()

    wait_until(lambda: not _alive(process))


async def test_the_kernel_ends_a_call_that_takes_too_much_processor_time(
    examples: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.tools.process._Call.used_s", lambda self: 0.0)  # the parent never looks
    patient = Tool.from_function(examples.spin.function, isolated=True, timeout_s=0.1)

    done = await patient.call("{}")

    assert f"ended with status {-signal.SIGXCPU}" in done.text
