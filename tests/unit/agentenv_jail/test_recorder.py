"""What the programs of the sandbox and of isolated tools run is recorded, although they are killed and see no files."""

from __future__ import annotations

import pytest
from coverage import CoverageData

from agentenv.core import SandboxUnavailable
from agentenv.sandbox import create
from agentenv.tools import Tool
from helpers.measured.recorder import ROOT, Recorder

pytestmark = pytest.mark.sandbox


def double(x: int) -> int:
    """Double a number."""
    return 2 * x


@pytest.fixture
def lines_of(monkeypatch, tmp_path):
    recorder = Recorder()
    recorder.install(monkeypatch)

    def read(name: str) -> set[int]:
        recorder.write(tmp_path / "lines")
        data = CoverageData(basename=str(tmp_path / "lines"))
        data.read()
        return set(data.lines(str(ROOT / name)))

    return read


def lines_with(name: str, text: str) -> set[int]:
    lines = (ROOT / name).read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if text in line}


async def test_a_jail_that_sees_no_files_tells_its_lines(lines_of):
    try:
        async with create("local", size=1, tier="namespace") as box:
            assert (await box.run_code("print(6 * 7)")).stdout == "42\n"
    except SandboxUnavailable as error:
        pytest.skip(f"UNTESTED: no namespaces on this machine: {error}")

    assert lines_with("plugins/agentenv_jail/jail/launch.py", 'kernel.umount(".")') <= lines_of(
        "plugins/agentenv_jail/jail/launch.py"
    )
    for name in ("zygote", "worker", "child", "program"):
        assert len(lines_of(f"plugins/agentenv_jail/jail/{name}.py")) > 20


async def test_a_process_that_is_killed_tells_its_lines(lines_of):
    tool = Tool.from_function(double, isolated=True)

    assert (await tool.call({"x": 4})).text == "8"

    answered = lines_with("agentenv/tools/process_main.py", "result = await tool.call(arguments, context)")
    assert answered <= lines_of("agentenv/tools/process_main.py")
