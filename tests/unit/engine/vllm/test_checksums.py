"""Servers that read different weights from one path are found by their checksums."""

from __future__ import annotations

import pytest

from agentenv.core import EngineError
from helpers.fake_vllm import engine_on, say, serving
from helpers.waiting import until


async def test_a_server_that_read_other_weights_fails_the_update_and_all_go_back():
    async with serving() as fake, serving(stale="/w/2") as behind, engine_on(fake, behind) as engine:
        await engine.load_weights("/w/1", version=1)

        with pytest.raises(EngineError, match="their checksums differ"):
            await engine.load_weights("/w/2", version=2)

        assert engine.weights_version == 1
        await until(lambda: (fake.version, behind.version) == ("agentenv-1", "agentenv-1"))
        assert (await say(engine)).version_ranges == ((1, 0, 4),)
        assert (fake.weights, behind.weights) == ("/w/1", "/w/1")


async def test_adapters_and_servers_with_other_hardware_are_not_compared():
    async with serving() as fake, serving(hardware="small") as other, engine_on(fake, other) as engine:
        await engine.load_weights("/w/1", version=1)
        await engine.load_adapter("policy", "/lora/2", version=2)
        other.stale = "/w/3"

        assert await engine.load_weights("/w/3", version=3) == 3


async def test_a_server_that_returns_must_read_what_the_others_have():
    async with serving() as fake, serving() as dead, engine_on(fake, dead, retry_s=20) as engine:
        await engine.load_weights("/w/1", version=1)
        await dead.stop()
        await until(lambda: len(engine._pool.live) == 1)
        dead.stale = "/w/1"
        await dead.come_back()
        (server,) = (server for server in engine._pool.servers if server.url == dead.url)
        await until(lambda: "checksums differ" in server.problem)
        assert not server.alive

        dead.stale = ""

        await until(lambda: server.alive)
        assert (dead.weights, dead.version) == ("/w/1", "agentenv-1")


async def test_weights_that_are_written_to_the_same_path_again_have_no_old_checksum():
    async with serving() as fake, serving() as other, engine_on(fake, other, retry_s=20) as engine:
        await engine.load_weights("/w/1", version=1)
        fake.hardware = other.hardware = "as the file is now"
        await engine.load_weights("/w/1", version=2)
        await other.stop()
        await until(lambda: len(engine._pool.live) == 1)
        other.hardware = "as a still newer file is"  # which nobody pushed
        await other.come_back()
        await until(lambda: "checksums differ" in engine._pool.servers[1].problem)
        other.hardware = "as the file is now"

        await until(lambda: len(engine._pool.live) == 2)
