"""Real agents of JavaScript SDKs: what each does to its history leaves one sequence, with the tokens as sampled.

`.ci/install-agents` installs the packages for `make test-agents`; elsewhere they are skipped.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from helpers.agents import by_turn, call, check_tokens, served

pytestmark = pytest.mark.slow

FOLDER = Path(sys.prefix) / "js"
SCRIPT = Path(__file__).parents[2] / "helpers" / "js" / "agents.mjs"
ODD = call('{"b": 3,  "a": 2}') + call('{"query": "caf\\u00e9 ü</x>", "limit": 1.0}', "lookup")
TURNS = (" Let me look. \n" + ODD, call('{"a":5,"b":1}'), "\n\nIt is 6. \n")
AGENTS = [
    "openai chat",
    "openai responses",
    "anthropic messages",
    "ai responses",
    "ai chat",
    "ai compatible",
    "ai anthropic",
    "openai-agents chat",
    "openai-agents responses",
    "langgraph chat",
    "langgraph responses",
    "langgraph anthropic",
]

# LangChain downloads a tokenizer to count the tokens of a stream of chat completions.
CASES = [
    (name, way)
    for name in AGENTS
    for way in ("plain", "stream")
    if (name, way) != ("langgraph chat", "stream")
]


def said(thinks: bool) -> list[str]:
    """What the scripted model says, with thinking before each turn or not."""
    thoughts = ("I should\n  use tools.  ", "hm", "so")
    return [
        f"<think>{thought}</think>{turn}" if thinks else turn
        for thought, turn in zip(thoughts, TURNS, strict=True)
    ]


async def run(name: str, url: str, way: str) -> str:
    """Run an agent and return its answer."""
    # Packages are looked for beside the script.
    script = await asyncio.to_thread(shutil.copy, SCRIPT, FOLDER)
    pipe = asyncio.subprocess.PIPE
    node = await asyncio.create_subprocess_exec("node", script, name, url, way, stdout=pipe, stderr=pipe)
    out, err = await node.communicate()
    assert node.returncode == 0, err.decode()
    return json.loads(out.decode().splitlines()[-1])


@pytest.mark.parametrize("thinks", [True, False], ids=["thinking", "no-thinking"])
@pytest.mark.parametrize(("name", "way"), CASES)
async def test_a_linear_conversation_is_one_sequence(name, way, thinks):
    if not (FOLDER / "node_modules").exists():
        pytest.skip("the packages are not installed; .ci/install-agents installs them where there is npm")
    async with served(by_turn(*said(thinks))) as agent:
        answer = await run(name, agent.url, way)

        captured = agent.captured
        check_tokens(agent.session, agent.engine)
    assert answer.strip() == "It is 6."
    assert [turn.sequence for turn in captured.turns] == [0, 0, 0]
    assert captured.left_out == {}
    assert captured.sequences[0].num_trained_tokens == sum(turn.num_tokens for turn in captured.turns)
    assert [result.content for result in captured.turns[0].tool_results] == ["5", "café ü"]
