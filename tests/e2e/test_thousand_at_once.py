"""A thousand episodes in flight at once, on one core: all are played, and memory stays within bounds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentenv.core import RunLimits
from agentenv.engine import Completion
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions
from agentenv.testing import tool_call
from agentenv.tools import tool

AT_ONCE = 1000
TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
STOP = RENDERER.stop_token_ids[0]
CALL = (*TOKENIZER.encode(tool_call("look")), STOP)
DONE = (*TOKENIZER.encode("done"), STOP)


class Pages(ToolEnv):
    def start(self, number: int) -> str:
        return f"read {number}"

    @tool
    def look(self) -> str:
        "Look."
        return "x" * 100

    def reward(self, answer: str) -> float:
        return float(answer == "done")


class Gate:
    """Answers nobody until all episodes that can be in flight have asked for their first turn."""

    name, weights_version, max_context_tokens = "gate", 0, None

    def __init__(self) -> None:
        self.played: dict[str, int] = {}
        self.most = 0
        self.full = asyncio.Event()

    async def generate(self, prompt_ids, sampling, *, session_id, **request):
        turn = self.played.get(session_id, 0)
        self.played[session_id] = turn + 1
        self.most = max(self.most, len(self.played))
        if len(self.played) == AT_ONCE:
            self.full.set()
        await self.full.wait()
        ids = CALL if turn < 4 else DONE
        return Completion(ids, (-0.5,) * len(ids), "stop", ((0, 0, len(ids)),))

    async def release(self, session_id):
        self.played.pop(session_id, None)

    async def close(self):
        pass


async def play(count: int) -> int:
    engine = Gate()
    runner = Runner(
        engine,
        RENDERER,
        RunLimits(env_timeout_s=None, tool_timeout_s=None),
        options=RunnerOptions(concurrency=AT_ONCE, retries=0),
    )
    spec = EnvSpec.of("test/Pages-v0", Pages, tasks=[{}])
    async for group in runner.run_groups(spec, ({"number": number} for number in range(count))):
        (record,) = group
        assert (record.reward, len(record.turns)) == (1.0, 5), record.error
    assert runner.ledger.balanced
    return engine.most


def peak_mb() -> float:
    # Not ru_maxrss, which begins with what the parent held.
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def main() -> None:
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    asyncio.run(play(AT_ONCE))
    once = peak_mb()
    most = asyncio.run(play(4 * AT_ONCE))
    print(most, once, peak_mb(), threading.active_count())


@pytest.mark.slow
def test_a_thousand_episodes_at_once_on_one_core_take_bounded_memory():
    done = subprocess.run(
        [sys.executable, str(Path(__file__))], capture_output=True, text=True, timeout=300, check=False
    )

    assert done.returncode == 0, done.stderr
    most, once, four_times, threads = map(float, done.stdout.split())
    assert most == AT_ONCE
    assert once < 300, "megabytes, the interpreter and every import included"
    assert four_times < once + 20, "four times as many episodes keep no more"
    assert threads < 330, "synchronous tools and methods wait for threads"


if __name__ == "__main__":
    main()
