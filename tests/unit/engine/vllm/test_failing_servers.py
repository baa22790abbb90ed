"""Servers that die, hang, restart or refuse in mid-run: no label is wrong, nothing hangs, the others go on."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from time import monotonic

import pytest

from agentenv.core import EngineError, EngineUnavailable, UsageError
from agentenv.engine import VLLMServerEngine
from agentenv.engine.vllm import pool as pools
from agentenv.engine.vllm import probe, server
from agentenv.engine.vllm.server_weights import BROKEN_LABEL
from helpers.fake_vllm import ROUTES, engine_on, say, serving
from helpers.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("frequent_checks")


def restart_unnoticed(fake, *engines):
    """Give the server the state after a restart that broke no connection, long after the last check."""
    fake.forget()
    for engine in engines:
        engine._pool.servers[0].confirmed = -1.0


# Labels --------------------------------------------------------------------------------------


@ROUTES
async def test_a_process_that_did_not_push_never_takes_base_weights_for_those_pushed(route, monkeypatch):
    monkeypatch.setattr(pools, "CHECK_EVERY_S", 60.0)
    async with (
        serving(route=route) as fake,
        engine_on(fake) as pusher,
        engine_on(fake, retry_s=2) as other,
    ):
        await pusher.load_weights("/w/3", version=3)
        await pusher.close()
        other.weights_version = 3  # as the trainer does in its other processes
        assert (await say(other)).version_ranges == ((3, 0, 4),)
        restart_unnoticed(fake, other)

        with pytest.raises(EngineUnavailable, match="'default'"):
            await say(other)


@ROUTES
async def test_other_processes_go_on_once_the_pusher_has_restored_a_server(route):
    async with serving(route=route) as fake, engine_on(fake) as pusher, engine_on(fake) as other:
        await pusher.load_weights("/w/3", version=3)
        other.weights_version = 3
        await say(other)
        await fake.stop()
        fake.sampled.clear()
        await fake.come_back()

        done = await say(other)

        assert done.version_ranges == ((3, 0, 4),)
        assert fake.sampled[-1][:2] == ("agentenv-3", "/w/3")


@ROUTES
async def test_the_pusher_restores_a_server_whose_restart_broke_no_connection(route):
    async with serving(route=route) as fake, engine_on(fake) as engine:
        await engine.load_weights("/w/3", version=3)
        await engine.load_adapter("policy", "/lora/4", version=4)
        restart_unnoticed(fake, engine)

        done = await say(engine, adapter="policy")

        assert done.version_ranges == ((4, 0, 4),)
        label, weights, adapters = fake.sampled[-1]
        assert (label, weights, list(adapters.values())) == ("agentenv-3", "/w/3", ["/lora/4"])


async def test_a_pushed_version_zero_is_not_the_weights_of_the_start():
    async with serving() as fake, engine_on(fake) as pusher, engine_on(fake, retry_s=2) as other:
        await pusher.load_weights("/w/0", version=0)
        await pusher.close()
        other.weights_version = 0
        assert (await say(other)).version_ranges == ((0, 0, 4),)
        fake.forget()

        with pytest.raises(EngineUnavailable, match="'default'"):
            await say(other)


async def test_a_server_that_missed_an_adapter_gets_it_beside_the_one_before():
    async with serving() as fake, serving() as away, engine_on(fake, away, hang_s=1) as engine:
        await engine.load_adapter("policy", "/lora/1", version=1)
        away.frozen = asyncio.Event()
        await until(lambda: not engine._pool.servers[1].alive)
        await engine.load_adapter("policy", "/lora/2", version=2)
        away.frozen.set()
        await until(lambda: engine._pool.servers[1].alive)

        assert (away.version, list(away.adapters.values())) == ("default", ["/lora/1", "/lora/2"])


async def test_servers_with_different_weights_are_used_once_they_have_the_newest():
    async with serving() as old, serving() as new:
        new.version = "agentenv-5"
        async with engine_on(new, old) as engine:
            for number in range(6):
                assert (await say(engine, session=str(number))).version_ranges == ((5, 0, 4),)
            assert old.seen == []


async def test_a_server_that_lost_an_adapter_is_restored_once_for_all_its_requests():
    async with serving() as fake, engine_on(fake) as engine:
        await engine.load_weights("/w/3", version=3)
        await engine.load_adapter("policy", "/lora/4", version=4)
        restart_unnoticed(fake, engine)
        fake.posts.clear()

        done = await asyncio.gather(*(say(engine, adapter="policy", seed=seed) for seed in range(8)))

        assert {each.version_ranges for each in done} == {((4, 0, 4),)}
        assert fake.posts.count("reload_weights") == 1


async def miss_an_update(away, engine):
    """Let the second server hang while the engine pushes /w/2; it goes on once `away.frozen` is set."""
    await engine.load_weights("/w/1", version=1)
    away.frozen = asyncio.Event()
    await until(lambda: not engine._pool.servers[1].alive)
    await engine.load_weights("/w/2", version=2)


async def test_requests_of_others_wait_while_a_server_that_missed_weights_gets_them():
    async with serving() as fake, serving() as away, engine_on(fake, away, hang_s=1) as engine:
        await miss_an_update(away, engine)
        away.posts.clear()
        away.torn = "/w/2"
        away.frozen.set()
        await until(lambda: away.posts[-1:] == ["/resume"])
        assert away.posts[:2] == ["/pause?mode=keep", "reload_weights"]
        assert away.version == BROKEN_LABEL  # for others, these are not the weights before

        away.torn = ""
        await until(lambda: engine._pool.servers[1].alive)

        drop = "/reset_prefix_cache?reset_running_requests=true"
        assert away.posts[-5:] == ["/pause?mode=keep", "reload_weights", drop, "agentenv-2", "/resume"]


async def test_an_engine_that_closes_while_it_restores_a_server_leaves_it_named_and_running():
    async with serving() as fake, serving() as away, engine_on(fake, away, hang_s=1) as engine:
        await miss_an_update(away, engine)
        away.loads = asyncio.Event()
        away.frozen.set()
        await until(lambda: away.posts[-1:] == ["reload_weights"])

        await engine.close()

        assert away.posts[-2:] == [BROKEN_LABEL, "/resume"]
        assert [server.watcher for server in engine._pool.servers] == [None, None]
        away.loads.set()


@pytest.mark.parametrize("named", [None, "policy"])
async def test_a_server_without_labels_is_used_on_as_long_as_it_has_the_sampled_adapter(named):
    async with serving(adapters={"policy": "/lora/1"}) as fake:
        report = await asyncio.to_thread(probe, fake.url, model=named)
        engine = VLLMServerEngine(replace(report, weights_label=None))
        await say(engine)
        server = engine._pool.servers[0]

        await engine._pool.check(server)
        fake.forget()
        lost = named is not None
        with pytest.raises(EngineError, match="has no adapter 'policy'") if lost else nullcontext():
            await engine._pool.check(server)
        await engine.close()


async def test_a_check_that_breaks_does_not_end_the_watching():
    async with serving() as fake, engine_on(fake, retry_s=20) as engine:
        await say(engine)
        check, server = engine._pool.check, engine._pool.servers[0]

        async def broken(server):
            raise KeyError("data")

        engine._pool.check = broken
        await until(lambda: not server.alive)
        engine._pool.check = check

        assert (await say(engine)).version_ranges == ((0, 0, 4),)


async def test_requests_of_no_episode_reach_every_idle_server():
    async with serving() as one, serving() as two, serving() as three, engine_on(one, two, three) as engine:
        await say(engine, session="a")
        await until(lambda: len(engine._pool.live) == 3)
        for fake in (one, two, three):
            fake.sampled.clear()
        await asyncio.gather(*(say(engine, seed=seed) for seed in range(engine.num_servers)))

        assert [len(fake.sampled) for fake in (one, two, three)] == [1, 1, 1]


# Hangs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "said"),
    [(say, "did not answer"), (lambda engine: engine.load_weights("/w/1"), "0 of 1 servers")],
    ids=["request", "push"],
)
async def test_a_server_that_answers_nothing_is_given_up_in_time(ask, said):
    async with serving() as fake, engine_on(fake, hang_s=1, retry_s=2) as engine:
        await say(engine)
        fake.frozen = asyncio.Event()

        with pytest.raises(EngineUnavailable, match=said):
            async with asyncio.timeout(PATIENCE_S):
                await ask(engine)
        fake.frozen.set()


async def test_the_requests_of_a_hung_server_go_to_the_others_and_it_comes_back():
    async with serving() as fake, serving() as hung, engine_on(fake, hung, hang_s=1) as engine:
        for session in "abcd":
            await say(engine, session=session)
        hung.gate = asyncio.Event()
        requests = [asyncio.create_task(say(engine, session=session)) for session in "abcd"]
        await hung.until(2)
        hung.frozen = asyncio.Event()
        done = await asyncio.gather(*requests)
        hung.frozen.set()
        hung.gate.set()
        await until(lambda: engine._pool.servers[1].alive)

        assert [len(each.token_ids) for each in done] == [4] * 4
        assert len(fake.sampled) == 6


async def test_a_server_that_only_passes_its_checks_is_used_again_after_it_sampled_a_token():
    async with serving() as fake, serving() as stuck, engine_on(fake, stuck) as engine:
        engine._pool.request_timeout_s = 1
        stuck.gate = asyncio.Event()
        done = await asyncio.gather(*(say(engine, session=session) for session in "abcd"))
        server = engine._pool.servers[1]

        assert [len(each.token_ids) for each in done] == [4] * 4
        assert (server.stuck, server.alive) == (True, False)
        stuck.gate.set()
        await until(lambda: server.alive)
        assert len(stuck.sampled) >= 1


async def test_a_slow_completion_does_not_take_its_server_out_while_others_are_answered():
    async with serving() as fake, engine_on(fake, retry_s=1) as engine:
        await say(engine)
        engine._pool.request_timeout_s = 1
        fake.gate = asyncio.Event()
        slow = asyncio.create_task(say(engine, seed=1))
        await fake.until(1)
        engine._pool.servers[0].answered = monotonic() + 60

        with pytest.raises(EngineUnavailable, match="did not answer"):
            await slow
        assert engine._pool.servers[0].failures == 0
        fake.gate.set()


async def test_an_answer_that_is_longer_than_its_tokens_can_be_is_refused_and_not_decoded(monkeypatch):
    for name in ("ANSWER_BYTES", "SENT_BYTES", "TOKEN_BYTES"):
        monkeypatch.setattr(server, name, 0)
    async with serving() as fake, engine_on(fake) as engine:
        with pytest.raises(EngineError, match=r"the answer has more than \d+ bytes"):
            await say(engine)


# One of several ------------------------------------------------------------------------------


async def test_a_push_goes_to_the_live_servers_and_reaches_the_others_when_they_return():
    async with serving() as fake, serving() as dead, engine_on(fake, dead) as engine:
        await say(engine)
        await dead.stop()
        await engine.load_weights("/w/1", version=1)
        assert (await say(engine)).version_ranges == ((1, 0, 4),)

        await dead.come_back()
        await until(lambda: engine._pool.servers[1].alive)

        assert (dead.weights, dead.version) == ("/w/1", "agentenv-1")
        assert dead.posts[-1] == "/resume"


async def test_a_server_that_dies_of_an_update_gets_it_when_it_returns():
    async with serving() as fake, serving(dies_of="/w/1") as dying, engine_on(fake, dying) as engine:
        await engine.load_weights("/w/1", version=1)
        await until(lambda: engine._pool.servers[1].alive)

        assert {(each.weights, each.version) for each in (fake, dying)} == {("/w/1", "agentenv-1")}
        assert [each.posts[-1] for each in (fake, dying)] == ["/resume"] * 2


async def test_too_few_servers_end_an_update():
    async with serving() as fake, serving() as dead:
        async with engine_on(fake, dead, min_servers=2, retry_s=0.2) as engine:
            await dead.stop()
            with pytest.raises(EngineUnavailable, match="1 of 2 servers can be used, and 2 are needed"):
                await engine.load_weights("/w/1")
        with pytest.raises(UsageError, match="min_servers is 2"):
            async with engine_on(fake, min_servers=2):
                pass


async def test_after_weights_that_one_server_refuses_all_have_those_before():
    async with serving() as fake, serving(torn="/w/2") as other, engine_on(fake, other) as engine:
        await engine.load_weights("/w/1", version=1)
        with pytest.raises(EngineError, match="a tensor is missing"):
            await engine.load_weights("/w/2", version=2)
        done = [await say(engine, session=session) for session in "abcdef"]

        assert {each.version_ranges for each in done} == {((1, 0, 4),)}
        used = [*fake.sampled, *other.sampled]
        # What a server sampled under the label of broken weights is nobody's completion.
        assert {weights for label, weights, _ in used if label != BROKEN_LABEL} == {"/w/1"}
        assert BROKEN_LABEL in [*fake.posts, *other.posts]


async def test_the_first_weights_come_back_after_others_were_refused():
    async with serving(torn="/w/1") as fake, engine_on(fake) as engine:
        with pytest.raises(EngineError, match="a tensor is missing"):
            await engine.load_weights("/w/1", version=1)

        assert (await say(engine)).version_ranges == ((0, 0, 4),)
        assert fake.sampled[-1][:2] == ("default", "/srv/model")


async def test_an_interrupted_update_leaves_no_weights_under_a_wrong_label():
    async with serving() as fake, engine_on(fake) as engine:
        await engine.load_weights("/w/1", version=1)
        posted = len(fake.posts)
        loading = asyncio.create_task(engine.load_weights("/w/2", version=2))
        await until(lambda: "reload_weights" in fake.posts[posted:])
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)

        done = await say(engine)

        labels = {("agentenv-1", "/w/1"): 1, ("agentenv-2", "/w/2"): 2}
        assert done.version_ranges[0][0] == labels[fake.sampled[-1][:2]]
