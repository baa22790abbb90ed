"""A list of servers that changes during a run: servers join with the right weights, and leave after their last."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from agentenv.core import EngineUnavailable, UsageError
from agentenv.engine import load_engine
from agentenv.engine.labels import Label
from agentenv.engine.listed import addresses, names_servers
from helpers.fake_vllm import ROUTES, connected, say, serving
from helpers.servers import http_server
from helpers.waiting import until

pytestmark = pytest.mark.usefixtures("frequent_checks")


def engine_of(place, **options):
    return connected(f"servers:{place}", retry_s=20.0, **options)


def urls_of(engine):
    return [server.url for server in engine._pool.servers]


@ROUTES
async def test_a_server_joins_with_the_present_weights_and_one_that_leaves_ends_what_it_began(
    tmp_path, route
):
    place = tmp_path / "servers.txt"
    async with serving(route=route) as one, serving(route=route) as two:
        place.write_text(f"# the first\n{one.url}/v1\n\n")
        async with engine_of(place) as engine:
            await engine.claim("mine-1")
            await engine.load_weights("/w/1", version=1)
            one.gate = asyncio.Event()
            begun = asyncio.create_task(say(engine, session="long"))
            await one.until(1)

            place.write_text(f"{two.url}/v1\n")
            await until(lambda: urls_of(engine) == [one.url, two.url] and engine.servers()[1]["used"])
            asked = len(one.sampled)
            later = [await say(engine, session=str(number), seed=number) for number in range(4)]
            assert len(one.sampled) == asked  # it gets nothing new, and is not forgotten yet
            one.gate.set()
            await begun
            await until(lambda: urls_of(engine) == [two.url])
            again = await say(engine, session="long", seed=7)

            assert {done.version_ranges for done in (await begun, *later, again)} == {((1, 0, 4),)}
            assert {weights for _, weights, _ in two.sampled[-5:]} == {"/w/1"}
            assert one.version == str(Label(1))  # another training may have it
            assert Label.read(two.version).run == "mine-1"


async def test_a_server_that_is_listed_again_is_used_again(tmp_path):
    place = tmp_path / "servers.txt"
    async with serving() as one, serving() as two:
        both = f"{one.url}\n{two.url}\n"
        place.write_text(both)
        async with engine_of(place) as engine:
            await engine.load_weights("/w/1", version=1)
            place.write_text(one.url)
            await until(lambda: urls_of(engine) == [one.url])
            await engine.load_weights("/w/2", version=2)
            place.write_text(both)
            await until(lambda: [row["used"] for row in engine.servers()] == [True, True])

            assert (one.weights, two.weights) == ("/w/2", "/w/2")


async def test_a_list_that_is_away_or_empty_changes_nothing(tmp_path, caplog):
    place = tmp_path / "servers.txt"
    async with serving() as one:
        place.write_text(one.url)
        async with engine_of(place) as engine:
            await say(engine)
            place.unlink()
            await until(lambda: "cannot be read" in caplog.text)
            place.write_text("\n")
            await until(lambda: "names no server" in caplog.text)
            await say(engine)

            assert urls_of(engine) == [one.url]
    assert caplog.text.count("cannot be read") == 1


async def test_a_web_server_may_have_the_list(tmp_path):
    async with serving() as one:

        async def tell(_):
            return web.Response(text=f"{one.url}/v1\r\n")

        async with http_server(tell) as url, engine_of(f"{url}/fleet") as engine:
            await say(engine)
            assert urls_of(engine) == [one.url]
        with pytest.raises(EngineUnavailable):
            await asyncio.to_thread(addresses, f"servers:{url}/fleet")


def test_the_list_must_be_there_at_the_start(tmp_path):
    with pytest.raises(EngineUnavailable, match="cannot be read"):
        load_engine(f"servers:{tmp_path}/none.txt")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UsageError, match="names no server"):
        load_engine(f"servers:{tmp_path}/empty.txt")


def test_addresses_are_named_once_and_without_their_path():
    assert addresses("http://a:1/v1, https://b:2/v1/,http://a:1,") == ["http://a:1", "https://b:2"]
    assert names_servers("servers:x")
    assert not names_servers("vllm:x")
