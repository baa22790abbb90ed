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

from helpers.sdk_agents import THINKS, check_linear

pytestmark = pytest.mark.slow

FOLDER = Path(sys.prefix) / "js"
SCRIPT = Path(__file__).parents[2] / "helpers" / "js" / "agents.mjs"
AGENTS = {
    "openai": ("chat", "responses"),
    "anthropic": ("messages",),
    "ai": ("responses", "chat", "compatible", "anthropic"),
    "openai-agents": ("chat", "responses"),
    "langgraph": ("chat", "responses", "anthropic"),
}

# LangChain downloads a tokenizer to count the tokens of a stream of chat completions.
CASES = [
    (f"{name} {api}", way)
    for name, apis in AGENTS.items()
    for api in apis
    for way in ("plain", "stream")
    if (name, api, way) != ("langgraph", "chat", "stream")
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


@THINKS
@pytest.mark.parametrize(("name", "way"), CASES)
async def test_a_linear_conversation_is_one_sequence(name, way, thinks):
    if not (FOLDER / "node_modules").exists():
        pytest.skip("the packages are not installed; .ci/install-agents installs them where there is npm")
    await check_linear(lambda url: run(name, url, way), thinks=thinks)
