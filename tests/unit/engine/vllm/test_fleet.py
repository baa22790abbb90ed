"""Several servers, or a router in front of them: an episode stays on one, and a dead one costs only its own."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from agentenv.core import EngineError, EngineUnavailable
from agentenv.engine import VLLMServerEngine
from agentenv.engine.vllm import connect, probe, server_weights
from agentenv.engine.vllm import pool as pools
from agentenv.engine.vllm.assigned import assigned_server, on_server
from helpers.fake_vllm import ROUTES, connected, engine_on, say, serving
from helpers.servers import http_server
from helpers.waiting import until

STRANGE = "env:täsk\n\ud800/0#1"


@asynccontextmanager
async def router_to(*fakes):
    """Forward requests as vLLM's router does: by the session header, and without one in turns."""
    turns, chosen = iter(range(10**6)), {}

    async def forward(request):
        session = request.headers.get("x-session-id")
        turn = next(turns) % len(fakes)
        fake = fakes[turn if session is None else chosen.setdefault(session, len(chosen) % len(fakes))]
        headers = {} if session is None else {"x-session-id": session}
        async with (
            aiohttp.ClientSession() as http,
            http.request(
                request.method, fake.url + request.path_qs, data=await request.read(), headers=headers
            ) as reply,
        ):
            return web.Response(body=await reply.read(), status=reply.status, content_type=reply.content_type)

    async with http_server(forward) as url:
        yield url


@ROUTES
async def test_a_router_can_keep_each_episode_on_one_server(route):
    async with serving(route=route) as one, serving(route=route) as two, router_to(one, two) as url:
        engine = VLLMServerEngine(await asyncio.to_thread(probe, url))
        one.sessions.clear()
        two.sessions.clear()

        for turn in range(3):
            for session in ("a", "b", "c", STRANGE):
                await say(engine, session=session, seed=turn)
        await engine.close()

    assert Counter(one.sessions).most_common() == [(session, 3) for session in dict.fromkeys(one.sessions)]
    assert len(set(one.sessions)) == len(set(two.sessions)) == 2
    assert not set(one.sessions) & set(two.sessions)


async def test_an_episode_keeps_to_the_server_that_a_driver_assigned():
    async with serving() as one, serving() as two, engine_on(one, two) as engine:
        for turn in range(2):
            for session in "abc":
                with on_server(1):
                    await say(engine, session=session, seed=turn)
        with on_server(1):
            await say(engine)  # a request of no episode goes where there is room
        assert two.sessions.count(None) + len(set(two.sessions) - {None}) >= 3
        assert len(two.seen) >= 6
        assert len(one.seen) <= 1

        await two.stop()
        with on_server(1):
            done = await say(engine, session="a")

        assert len(done.token_ids) == 4
        assert set(one.sessions[-1:]) <= set(two.sessions)


async def test_an_assignment_holds_for_the_tasks_of_an_episode_only():
    seen = []

    async def episode(number):
        with on_server(number):
            await asyncio.sleep(0)
            seen.append(await asyncio.create_task(asyncio.to_thread(assigned_server)))

    await asyncio.gather(*(episode(number) for number in range(4)))

    assert sorted(seen) == [0, 1, 2, 3]
    assert assigned_server() is None


async def test_a_request_of_no_episode_has_no_session():
    async with serving() as fake, engine_on(fake) as engine:
        fake.sessions.clear()
        await say(engine)

        assert fake.sessions == [None]


async def test_a_dead_server_costs_the_requests_that_it_had_and_no_other():
    async with serving() as one, serving() as two, engine_on(one, two, retry_s=20) as engine:
        for session in range(8):
            await say(engine, session=str(session))
        one.gate, two.gate = asyncio.Event(), asyncio.Event()
        one.seen.clear()
        two.seen.clear()
        running = [
            asyncio.create_task(say(engine, session=str(session), seed=session)) for session in range(8)
        ]
        await one.until(4)
        await two.until(4)

        await one.stop()
        await two.until(8)  # the four of the dead server, and nothing of the other one again
        two.gate.set()
        done = await asyncio.gather(*running)

    seeds = defaultdict(list)
    for fake in (one, two):
        for body in fake.seen:
            seeds[body["sampling_params"]["seed"]].append(fake)
    assert sorted(map(len, seeds.values())) == [1, 1, 1, 1, 2, 2, 2, 2]
    assert all(sent == [one, two] for sent in seeds.values() if len(sent) == 2)
    assert all(len(each.token_ids) == 4 for each in done)


@pytest.mark.usefixtures("frequent_checks")
async def test_servers_that_are_away_at_the_start_join_when_they_answer(caplog):
    async with serving() as here, serving() as away, serving() as gone:
        await away.stop()
        await gone.stop()
        async with connected(*(f"{fake.url}/v1" for fake in (gone, away, here))) as engine:
            await say(engine)
            assert [row["used"] for row in engine.servers()] == [False, False, True]
            await away.come_back()
            await until(lambda: [row["used"] for row in engine.servers()].count(True) == 2)

    assert caplog.text.count("it is used as soon as it answers") == 2


async def test_fewer_servers_than_needed_are_an_error_at_the_start():
    async with serving() as here, serving() as away:
        await away.stop()
        with pytest.raises(EngineUnavailable, match=away.url):
            await asyncio.to_thread(connect, f"{here.url},{away.url}", tokenizer="x", min_servers=2)


@pytest.mark.usefixtures("frequent_checks")
async def test_different_models_under_one_name_are_never_mixed():
    async with serving() as here, serving() as other:
        other.shift = 3
        with pytest.raises(EngineError, match="call their model 'base', but it is not the same one"):
            await asyncio.to_thread(connect, f"{here.url},{other.url}", tokenizer="x")
        await other.stop()
        async with connected(here.url, other.url) as engine:
            await say(engine)
            await other.come_back()
            await until(lambda: "not the same one" in engine.servers()[1]["problem"])
            here.seen.clear()
            for seed in range(8):
                await say(engine, seed=seed)

        assert len(here.seen) == 8


async def test_many_servers_are_asked_at_once():
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(serving()) for _ in range(16)]
        gate = asyncio.Event()
        for fake in fakes:
            fake.frozen = gate
        connecting = asyncio.create_task(
            asyncio.to_thread(connect, ",".join(fake.url for fake in fakes), tokenizer="x")
        )
        await until(lambda: all(fake.asked for fake in fakes))
        gate.set()
        engine, _ = await connecting
        await engine.close()

    assert engine.num_servers == 16


async def test_a_worker_asks_only_the_servers_that_it_needs_and_examines_none():
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(serving()) for _ in range(8)]
        urls = [fake.url for fake in fakes]
        driver = await stack.enter_async_context(connected(*urls))
        examined = json.loads(json.dumps(driver.examined()))
        await fakes[5].stop()
        for fake in fakes:
            fake.asked = 0

        async with connected(*urls, examined=examined) as worker:
            assert (worker.report, worker.num_servers) == (driver.report, 8)
            for number in (2, 5):  # the second is dead, so another one plays its episode
                with on_server(number):
                    await say(worker, session=str(number))
            asked = [fake for fake in fakes if fake.asked]
            used = [row["used"] for row in worker.servers()]

    assert len(asked) <= 2
    assert fakes[2] in asked
    assert sorted(used) == [False, True, True]


@pytest.fixture
def late_at_once(monkeypatch, frequent_checks):
    """A server that takes longer than the others to load is late soon."""
    monkeypatch.setattr(server_weights, "LATE_S", 0.2)
    monkeypatch.setattr(server_weights, "LATE", 0.0)


@pytest.mark.usefixtures("late_at_once")
async def test_a_server_that_loads_slowly_stops_no_other_and_gets_its_weights_in_the_end():
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(serving()) for _ in range(64)]
        engine = await stack.enter_async_context(engine_on(*fakes, retry_s=60))
        await until(lambda: len(engine._pool.live) == 64)
        slow, others = fakes[17], fakes[:17] + fakes[18:]
        slow.loads = asyncio.Event()

        push = asyncio.create_task(engine.load_weights("/w/1", version=1))
        await until(lambda: slow.posts.count("reload_weights"))
        # While one server still loads, the others have resumed and sample with the new weights.
        await until(lambda: all(fake.posts.count("/resume") for fake in others))
        await push
        done = await asyncio.gather(*(say(engine, session=str(n), seed=n) for n in range(64)))
        assert {one.version_ranges for one in done} == {((1, 0, 4),)}
        assert not slow.sampled

        slow.loads.set()
        await until(lambda: len(engine._pool.live) == 64)
        assert (slow.weights, slow.version) == ("/w/1", "agentenv-1")
        assert await engine.load_weights("/w/2", version=2) == 2
        assert {fake.weights for fake in fakes} == {"/w/2"}


async def test_a_completion_may_take_by_the_token_what_others_took_from_the_first_answer_on():
    async with serving() as one, engine_on(one) as engine:
        pool, limits = engine._pool, []
        (server,) = pool.live
        for took in ([], [0.02], [0.02] * 8, [0.02] * 32):
            pool._took.clear()
            pool._took.extend(took)
            limits.append(pool._limit_s(server, 1_000))

    assert limits == [pool.request_timeout_s, 540.0, 120.0, 75.0]


async def test_completions_that_hang_behind_a_healthy_server_end_long_before_their_limit(monkeypatch):
    monkeypatch.setattr(pools, "SHORTEST_LIMIT_S", 1.0)
    monkeypatch.setattr(pools, "SLOWER", 0.0)
    async with serving() as one, serving() as two, engine_on(one, two, retry_s=60) as engine:
        for number in range(4):
            await say(engine, session=str(number))
        hangs = one if engine._pool._sticky["0"].url == one.url else two
        hangs.gate = asyncio.Event()

        done = await say(engine, session="0")  # its request_timeout_s is half an hour

        assert done.version_ranges == ((0, 0, 4),)
        assert "did not answer" in next(row["problem"] for row in engine.servers() if not row["used"])


@pytest.mark.usefixtures("late_at_once")
async def test_a_late_server_that_missed_the_next_push_has_it_before_it_is_used():
    async with serving() as one, serving() as slow, engine_on(one, slow, retry_s=60) as engine:
        await until(lambda: len(engine._pool.live) == 2)
        slow.loads = asyncio.Event()
        await engine.load_weights("/w/1", version=1)
        await engine.load_weights("/w/2", version=2)
        slow.loads.set()
        await until(lambda: len(engine._pool.live) == 2)

        done = [await say(engine, session=str(n)) for n in range(4)]

        assert (one.weights, slow.weights) == ("/w/2", "/w/2")
        assert {each.version_ranges for each in done} == {((2, 0, 4),)}
        assert {weights for _, weights, _ in slow.sampled[-2:]} == {"/w/2"}
