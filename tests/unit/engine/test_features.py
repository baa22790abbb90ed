"""What an engine can do stands in one place, and an engine around another one forgets none of it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from agentenv.engine import Completion, Engine, Features, ScriptedEngine, features_of, policy_of
from agentenv.engine.scripted.replayed import ReplayEngine
from agentenv_bridges.trainers.trl import _Bounded
from agentenv_extras import RouterEngine
from scenes import TOKENIZER, Go, play


class Able(ScriptedEngine):
    """An engine with a value of its own for everything that an engine may be able to do."""

    features = Features(**{field.name: object() for field in fields(Features)})


class Least(Engine):
    """No more than an engine must have."""

    name = "least"

    async def generate(self, prompt_ids, sampling, *, stop_token_ids, session_id=None, deadline_s=None):
        ids = (*TOKENIZER.encode("hi"), *stop_token_ids[:1])
        return Completion(ids, (-0.5,) * len(ids), "stop")


async def replayed(live):
    return ReplayEngine(await play(Go(), Least()), live=live)


async def routed(inner):
    return RouterEngine(inner, Able([]))


async def bounded(inner):
    return _Bounded(inner, 8)


@pytest.mark.parametrize(
    ("around", "otherwise"),
    [
        (replayed, {"stream"}),
        (routed, {"images", "stream", "disconnect"}),
        (bounded, {"images", "stream"}),
    ],
)
async def test_an_engine_around_another_can_do_the_same_but_for_what_it_names(around, otherwise):
    inner = Able([])

    able = features_of(await around(inner))

    differs = {
        name for name in Features.__slots__ if getattr(able, name) is not getattr(inner.features, name)
    }
    assert differs == otherwise


def test_a_router_gives_the_weights_to_its_policy_and_follows_what_both_follow():
    class Plain(ScriptedEngine):
        features = Features()

    policy, helper = ScriptedEngine([]), ScriptedEngine([])

    assert policy_of(RouterEngine(policy, helper)) is policy
    assert features_of(RouterEngine(policy, helper)).grammars
    assert not features_of(RouterEngine(policy, Plain([]))).grammars
    assert not features_of(RouterEngine(Plain([]), helper)).grammars


async def test_a_name_and_a_way_to_sample_make_an_engine():
    engine = Least()

    played = await play(Go(), engine)

    assert (played.stop_reason, played.trainable) == ("final_answer", True)
    assert policy_of(engine) is engine
    engine.weights_version += 2
    assert (engine.weights_version, Least().weights_version) == (2, 0)


async def test_an_object_of_the_shape_of_an_engine_is_one():
    class Shape:
        name, max_context_tokens, weights_version = "shape", None, 0
        generate, release, close = Least.generate, Least.release, Least.close

    played = await play(Go(), Shape())

    assert played.trainable
    assert features_of(Shape()) == Features()
