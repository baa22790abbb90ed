"""Servers that several trainings know: nobody samples from another's weights, and nobody overwrites them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import EngineError
from agentenv.engine.labels import Label, run_of_adapters
from agentenv.engine.vllm import pool as pools
from helpers.fake_vllm import ROUTES, engine_on, say, serving
from helpers.waiting import until

pytestmark = pytest.mark.usefixtures("frequent_checks")
SOON = {"retry_s": 20.0}


@given(version=st.integers(0, 10**15 - 1), run=st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True))
def test_a_label_says_what_it_was_made_of(version, run):
    for label in (Label(version), Label(version, run, "2026-11-24 11:30:00 UTC")):
        read = Label.read(str(label))
        assert read == label
        assert read.since == label.since


@pytest.mark.parametrize(
    "text", [None, "default", "agentenv-", "agentenv-broken", "agentenv-1@a", "agentenv-1x"]
)
def test_other_labels_are_not_ours(text):
    assert Label.read(text) is None


@ROUTES
async def test_a_second_training_is_refused_before_it_changes_anything(route):
    async with serving(route=route) as fake, engine_on(fake) as first, engine_on(fake, **SOON) as second:
        await first.claim("first-1")
        await first.load_weights("/w/1", version=1)

        with pytest.raises(
            EngineError, match=r"has the weights of the training first-1 since 20.*UTC"
        ) as refused:
            await second.claim("second-2")
        with pytest.raises(EngineError, match="first-1"):
            await second.load_weights("/other/1", version=1)

        assert "engine.take_over=true" in refused.value.remedy
        assert (fake.weights, Label.read(fake.version)) == ("/w/1", Label(1, "first-1"))
        assert (await say(first)).version_ranges == ((1, 0, 4),)


@ROUTES
async def test_two_trainings_that_begin_at_once_never_train_on_each_others_samples(route):
    async with serving(route=route) as fake, engine_on(fake) as first, engine_on(fake, **SOON) as second:
        await first.claim("first-1")
        await second.claim("second-2")  # neither has pushed yet
        await first.load_weights("/w/1", version=1)

        with pytest.raises(EngineError, match="first-1"):
            await second.load_weights("/other/1", version=1)
        with pytest.raises(EngineError, match="first-1"):
            await say(second)

        assert fake.weights == "/w/1"


@ROUTES
async def test_a_training_whose_servers_are_taken_over_fails_at_once_and_takes_nothing_back(route):
    async with (
        serving(route=route) as fake,
        engine_on(fake) as first,
        engine_on(fake, take_over=True) as second,
    ):
        await first.claim("first-1")
        await first.load_weights("/w/1", version=1)
        await second.claim("second-2")
        await second.load_weights("/other/1", version=1)

        with pytest.raises(EngineError, match=r"training second-2 since"):
            await say(first)
        with pytest.raises(EngineError, match="second-2"):
            await first.load_weights("/w/2", version=2)

        assert fake.weights == "/other/1"
        assert (await say(second)).version_ranges == ((1, 0, 4),)


async def test_a_completion_says_whose_weights_sampled_it(monkeypatch):
    monkeypatch.setattr(pools, "CHECK_EVERY_S", 60.0)  # so that no check is earlier than the completion
    async with serving() as fake, engine_on(fake) as engine:
        await engine.claim("first-1")
        await engine.load_weights("/w/1", version=1)
        await say(engine)
        fake.version = str(Label(1, "second-2", "today"))

        with pytest.raises(EngineError, match="second-2"):
            await say(engine)

    assert fake.sampled[-1][0].startswith("agentenv-1@second-2")


@ROUTES
async def test_a_training_that_has_ended_leaves_the_servers_to_others(route):
    async with serving(route=route) as fake, engine_on(fake) as second:
        async with engine_on(fake) as first:
            await first.claim("first-1")
            await first.load_weights("/w/1", version=1)
        assert (fake.version, fake.weights) == ("agentenv-1", "/w/1")

        await second.claim("second-2")
        await second.load_weights("/other/1", version=1)

        assert (await say(second)).version_ranges == ((1, 0, 4),)


@ROUTES
async def test_a_resumed_training_has_its_servers_again(route):
    async with (
        serving(route=route, version="agentenv-7@first-1@yesterday") as fake,
        engine_on(fake) as engine,
    ):
        await engine.claim("first-1")
        await engine.load_weights("/w/7", version=7)

        assert (await say(engine)).version_ranges == ((7, 0, 4),)


@ROUTES
async def test_other_processes_of_a_training_use_its_weights_alone(route):
    async with serving(route=route) as fake, engine_on(fake) as pusher, engine_on(fake, **SOON) as worker:
        await pusher.claim("first-1")
        await pusher.load_weights("/w/1", version=1)
        worker.follow("first-1", 1)
        assert (await say(worker)).version_ranges == ((1, 0, 4),)

        await pusher.load_weights("/w/2", version=2)
        await until(lambda: worker.weights_version == 2)
        assert (await say(worker)).version_ranges == ((2, 0, 4),)

        fake.version = str(Label(3, "second-2", "today"))
        with pytest.raises(EngineError, match="second-2"):
            await say(worker)


@ROUTES
async def test_an_evaluation_says_that_a_training_changes_the_weights_beneath_it(route, caplog):
    async with serving(route=route) as fake, engine_on(fake) as evaluation, engine_on(fake) as training:
        await say(evaluation)
        await training.claim("first-1")
        await training.load_weights("/w/1", version=1)
        await until(lambda: "has newer weights (agentenv-1@first-1" in caplog.text)
        await training.load_weights("/w/2", version=2)
        await until(lambda: evaluation.weights_version == 2)

        assert (await say(evaluation)).version_ranges == ((2, 0, 4),)


FIRST, SECOND = run_of_adapters("first-1"), run_of_adapters("second-2")


@ROUTES
async def test_trainings_of_adapters_share_a_server_and_each_samples_from_its_own(route):
    async with (
        serving(route=route) as fake,
        engine_on(fake) as first,
        engine_on(fake) as second,
        engine_on(fake) as worker,
    ):
        await first.claim(FIRST)
        await second.claim(SECOND)
        for version in (1, 2, 3):
            await first.load_adapter("default", f"/first/{version}", version=version)
            await second.load_adapter("default", f"/second/{version}", version=10 * version)
        worker.follow(FIRST, 3)  # a process of the first training that does not push

        for engine, place, version in (
            (first, "/first/3", 3),
            (second, "/second/3", 30),
            (worker, "/first/3", 3),
        ):
            done = await say(engine, adapter="default")
            assert fake.adapters[fake.seen[-1]["model"]] == place
            assert done.version_ranges == ((version, 0, 4),)
        assert sorted(fake.adapters.values()) == ["/first/2", "/first/3", "/second/2", "/second/3"]
        assert (fake.version, fake.posts) == ("default", [])

        await first.load_adapter("default", "/first/4", version=4)
        await first.load_adapter("default", "/first/5", version=5)
        fake.gate = asyncio.Event()
        asked = asyncio.create_task(say(worker, adapter="default"))  # by a name that is gone by now
        await fake.until(1)
        worker.follow(FIRST, 5)
        fake.gate.set()
        assert (await asked).version_ranges == ((5, 0, 4),)

        await first.close()
        assert sorted(fake.adapters.values()) == ["/second/2", "/second/3"]


async def test_what_a_killed_training_of_adapters_left_is_no_adapter_of_the_one_that_goes_on():
    left = {f"default@{run_of_adapters('first-1')}@7": "/old/7", f"default@{SECOND}@7": "/second/7"}
    async with serving(adapters=left) as fake, engine_on(fake) as engine:
        await engine.claim(FIRST)
        await engine.load_adapter("default", "/new/7", version=7)

        assert sorted(fake.adapters.values()) == ["/new/7", "/second/7"]


async def test_weights_below_adapters_are_changed_by_no_other_training():
    async with serving() as fake, engine_on(fake, **SOON) as adapters, engine_on(fake) as full:
        await adapters.claim(FIRST)
        await adapters.load_adapter("default", "/first/1", version=1)

        with pytest.raises(EngineError, match="has the weights of the training first-1"):
            await full.claim("full-3")
        async with engine_on(fake, take_over=True) as taker:
            await taker.claim("full-3")
            await taker.load_weights("/w/1", version=1)
            with pytest.raises(EngineError, match="full-3"):
                await say(adapters, adapter="default")
        async with engine_on(fake, take_over=True) as other:
            fake.version = str(Label(1, "full-3", "today"))
            with pytest.raises(EngineError, match="full-3"):  # it would have no weights to train on
                await other.claim(SECOND)
