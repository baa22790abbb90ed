"""The checker of tools."""

from __future__ import annotations

import pytest

import agentenv as ae
from agentenv.testing import check_tool


@ae.tool
def first(text: str) -> str:
    """Return the first letter.

    Args:
        text: Where to look.
    """
    return text[0]


@ae.tool
def echo(text: str) -> str:
    """Say it again.

    Args:
        text: What to say.
    """
    return text


def bare(text: str) -> str:
    return text[:1]


async def test_a_tool_that_models_cannot_break_passes():
    report = await check_tool("calculator", fuzz_calls=60)

    assert report.ok, str(report)
    assert [finding.name for finding in report.findings] == ["schema", "fuzz", "overflow"]


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        (first, "crashed: IndexError: string index out of range; raise ae.ToolError"),
        (echo, "it answers a megabyte of input with 800000 characters"),
        (ae.Tool.from_function(bare), "tool bare has no description"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
async def test_what_is_wrong_with_a_tool_is_told(tool: ae.Tool, told: str):
    report = await check_tool(tool, fuzz_calls=100)

    assert [finding.status for finding in report.findings].count("problem") == 1
    assert told in str(report)


@pytest.mark.sandbox
async def test_a_tool_that_runs_code_gets_a_sandbox():
    report = await check_tool("shell", fuzz_calls=3)

    assert report.ok, str(report)


def test_the_command_line_checks_a_tool_by_its_name(command):
    said = command("check", "calculator", "--fuzz", "20")

    assert said.code == 0
    assert "20 random calls: no crash" in said.out
