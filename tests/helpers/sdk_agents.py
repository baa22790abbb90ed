"""The conversation that agents of SDKs have: a question, two tools, and what the scripted model says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec

import pytest

from helpers.agents import by_turn, call, check_one_sequence, served

ODD = call('{"b": 3,  "a": 2}') + call('{"query": "caf\\u00e9 ü</x>", "limit": 1.0}', "lookup")
TURNS = (" Let me look. \n" + ODD, call('{"a":5,"b":1}'), "\n\nIt is 6. \n")
QUESTION = "What is 2+3+1?"
THINKS = pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "no-thinking"])


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def lookup(query: str, limit: float = 1.0) -> str:
    """Look up.

    Args:
        query: what to look up
        limit: how much
    """
    return "café ü"


def said(turns: Sequence[str], *, thinks: bool) -> list[str]:
    """What the scripted model says, with thinking before each turn or not."""
    thoughts = ("I should\n  use tools.  ", "hm", "so")
    return [
        f"<think>{thought}</think>{turn}" if thinks else turn
        for thought, turn in zip(thoughts, turns, strict=False)
    ]


def require(package: str) -> None:
    """Skip the test unless an SDK is installed."""
    try:
        found = find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{package} is not installed")


async def check_linear(
    run: Callable[[str], Awaitable[str]], *, thinks: bool, turns: Sequence[str] = TURNS
) -> None:
    """Check that an agent's conversation is one sequence, with the results of its tools."""
    async with served(by_turn(*said(turns, thinks=thinks))) as agent:
        answer = await run(agent.url)

        captured = check_one_sequence(agent)
    assert answer.strip().endswith("It is 6.")
    results = [result.content for result in captured.turns[0].tool_results]
    assert ["5" in str(results[0]), "café ü" in str(results[1]), len(results)] == [True, True, 2]
