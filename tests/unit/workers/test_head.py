"""A run ends in words when the head of its cluster has gone, and goes on while it is only late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from agentenv.runs.store import Run, RunWriter
from agentenv.runs.store.runinfo import RunStatus
from agentenv.workers import head as heads
from agentenv.workers.head import Head
from agentenv.workers.silence import answers
from agentenv.workers.worker import ClusterLost
from helpers.waiting import until


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "ASK_EVERY_S", 0.02)
    monkeypatch.setattr(heads, "GONE_S", 0.2)


@asynccontextmanager
async def listening(port: int = 0) -> AsyncGenerator[asyncio.Server]:
    """Listen as the head of a cluster does."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)
    try:
        yield server
    finally:
        server.close()
        await server.wait_closed()


def port_of(server: asyncio.Server) -> int:
    return server.sockets[0].getsockname()[1]


class Calls:
    """A worker whose calls are answered only while the head is there."""

    name = "w1"

    def __init__(self, head: Head) -> None:
        self.head = head

    async def stats(self) -> dict[str, object]:
        return await self.head.answer(asyncio.get_running_loop().create_future())


async def test_calls_that_are_awaited_and_later_ones_end_when_the_head_has_gone(caplog):
    async with listening() as server:
        head = Head(f"127.0.0.1:{port_of(server)}")
        async with head:
            never = asyncio.ensure_future(head.answer(asyncio.get_running_loop().create_future()))
            assert await head.answer(asyncio.sleep(0, "played")) == "played"
            server.close()

            with pytest.raises(ClusterLost, match="the head of the Ray cluster at"):
                await never
            with pytest.raises(ClusterLost, match="start the cluster again"):
                await head.answer(asyncio.get_running_loop().create_future())
            assert not await answers(Calls(head))

    (told,) = [message for message in caplog.messages if "does not answer" in message]
    assert "the run ends in" in told


async def test_a_head_that_is_restarted_in_time_ends_nothing(monkeypatch, caplog):
    monkeypatch.setattr(heads, "GONE_S", 600.0)
    async with listening() as server:
        port = port_of(server)
    async with Head(f"127.0.0.1:{port}") as head:
        await until(lambda: "does not answer" in caplog.text)
        asked: list[int] = []
        again = await asyncio.start_server(
            lambda _, writer: asked.append(1) or writer.close(), "127.0.0.1", port
        )
        async with again:
            await until(lambda: len(asked) > 2)

        assert await head.answer(asyncio.sleep(0, "played")) == "played"


async def test_a_cancelled_call_is_cancelled_and_not_told_as_a_loss():
    async with listening() as server, Head(f"127.0.0.1:{port_of(server)}") as head:
        call = asyncio.ensure_future(head.answer(asyncio.get_running_loop().create_future()))
        await asyncio.sleep(0)
        call.cancel()

        with pytest.raises(asyncio.CancelledError):
            await call


def test_a_run_whose_cluster_has_gone_ends_with_the_command_that_continues_it(tmp_path):
    with pytest.raises(ClusterLost) as told, RunWriter.create("a", runs_dir=tmp_path) as writer:
        raise ClusterLost("the head has gone", remedy="start it again")

    assert told.value.remedy == f"start it again; then continue with: agentenv eval --resume {writer.path}"
    assert Run(writer.path).status is RunStatus.FAILED
    assert "the head has gone" in Run(writer.path).info.note
