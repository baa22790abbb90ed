"""The Python and shell tools, called as a model calls them."""

from __future__ import annotations

import json

import pytest

from agentenv.core import Context, ToolCall
from agentenv.sandbox import create
from agentenv.tools import Toolbox
from agentenv_tools.python import python, python_session
from agentenv_tools.shell import shell

pytestmark = pytest.mark.sandbox


async def ask(box, context, name, **arguments):
    (result,) = await box.run([ToolCall("1", name, json.dumps(arguments))], context)
    return result


async def test_code_answers_with_output_value_and_traceback():
    async with create("auto", size=1) as sandbox:
        box, context = Toolbox([python]), Context(sandbox=sandbox)

        assert (await ask(box, context, "python", code="x = 6\nprint('hi')\nx * 7")).text == "hi\n42"
        assert (await ask(box, context, "python", code="x = 1")).text == "(no output)"
        silent = await ask(box, context, "python", code="raise SystemExit(3)")
        assert silent.text == "(no output)\n[exit code 3]"
        after = await ask(box, context, "python", code="print('out')\nimport os\nos._exit(1)")
        assert after.text == "out\n[exit code 1]"
        assert (await ask(box, context, "python", code="1 / 0")).text.endswith("division by zero")
        assert "NameError: name 'x' is not defined" in (await ask(box, context, "python", code="x")).text
        assert list(box.schemas()[0]["function"]["parameters"]["properties"]) == ["code"]


async def test_a_session_keeps_names_and_begins_again_after_its_end():
    async with create("auto", size=1) as sandbox:
        box, context = Toolbox([python_session]), Context(sandbox=sandbox)

        await ask(box, context, "python", code="x = 6")
        assert (await ask(box, context, "python", code="x * 7")).text == "42"
        ended = await ask(box, context, "python", code="import os; os._exit(3)")
        assert "state is lost" in ended.text
        assert (await ask(box, context, "python", code="'x' in globals()")).text == "False"


async def test_a_shell_keeps_files_and_tells_exit_codes():
    async with create("auto", size=1) as sandbox:
        box, context = Toolbox([shell]), Context(sandbox=sandbox)

        await ask(box, context, "shell", command="echo hello > note")
        assert (await ask(box, context, "shell", command="cat note | tr a-z A-Z")).text == "HELLO"
        assert (await ask(box, context, "shell", command="false")).text == "(no output)\n[exit code 1]"


async def test_a_line_that_begins_with_a_dash_is_no_option_of_the_shell():
    async with create("auto", size=1) as sandbox:
        box, context = Toolbox([shell]), Context(sandbox=sandbox)

        said = await ask(box, context, "shell", command="-c 'echo run'")

    assert "-c: not found" in said.text
    assert said.text.endswith("[exit code 127]")
