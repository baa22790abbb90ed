"""A server that says which weights answered which prompt, and an environment whose waits have a long tail.

`python -m helpers.chaotic PORT` serves until it is killed; SIGUSR1 makes it slow, and quick again.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from random import Random
from zlib import crc32

from agentenv.envs import Env, register
from helpers.talking_server import TalkingServer

ENV = str(Path(__file__))
QUICK_S, SLOW_S = 0.01, 0.7


def said(weights: str, prompt: list[int]) -> str:
    """Return what weights answer to a prompt."""
    return f"{weights} {crc32(str(prompt).encode()):x}"


class ChaoticServer(TalkingServer):
    """Holds its requests while it is paused, as vLLM does."""

    latency_s = QUICK_S

    def text(self, prompt: list[int], random: Random) -> str:
        return said(self.weights, prompt)

    async def generate(self, request):
        await asyncio.sleep(self.latency_s)
        commands = ("/pause?mode=keep", "/resume")
        while next((post for post in reversed(self.posts) if post in commands), "/resume") != "/resume":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await super().generate(request)

    def change_pace(self) -> None:
        self.latency_s = QUICK_S + SLOW_S - self.latency_s


class Waits(Env):
    """Four turns; most waits are short, and a few last seconds."""

    async def reset(self, *, seed: int | None = None, options=None):
        assert options is not None
        self.turn, self.random = 0, Random(options["task"]["n"])
        return "begin", {}

    async def step(self, action):
        self.turn += 1
        await asyncio.sleep(min(self.random.lognormvariate(-2.5, 1.5), 8.0))
        return f"turn {self.turn}", 1.0, self.turn == 4, False, {}


register("helpers/Waits-v0", Waits, tasks=[{"n": n} for n in range(20_000)], override=True)


async def serve(port: int) -> None:
    server = ChaoticServer(max_model_len=4096)
    await server.start(port)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, server.change_pace)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
