"""What an engine can do stands in one place, and an engine around another one forgets none of it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from agentenv.core import EngineUnavailable, UsageError
from agentenv.engine import (
    ChatCompletion,
    Completion,
    Engine,
    Features,
    Sampling,
    ScriptedEngine,
    ScriptedTurn,
    TextModel,
    Usage,
    features_of,
    policy_of,
)
from agentenv.engine.scripted.replayed import ReplayEngine
from agentenv.render import Renderer
from agentenv.testing import tool_call
from agentenv_bridges.trainers.trl import _Bounded
from agentenv_extras import RouterEngine
from scenes import RENDERER, TOKENIZER, Go, play


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


# One way to ask a model, whichever kind of engine it has ----------------------------------


QUESTION = [{"role": "user", "content": "Well?"}]
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}


class Chat:
    """A chat engine that says one thing and remembers what it was asked."""

    name = "chat"
    max_context_tokens = None
    finish = "stop"

    async def chat(self, messages, tools, sampling, *, deadline_s=None):
        self.asked = (messages, tools, sampling)
        message = {"role": "assistant", "content": "Yes."}
        return ChatCompletion(message, Usage(7, 2, cost_usd=0.25), self.finish)

    async def close(self): ...


async def test_an_engine_on_tokens_is_asked_through_its_renderer_whose_tools_are_not_offered():
    engine = ScriptedEngine(["Yes."], tokenizer=TOKENIZER)

    answer = await TextModel(engine, Renderer(TOKENIZER, tools=(ADD,))).ask(QUESTION, Sampling(seed=3))

    (request,) = engine.requests
    assert answer.text == "Yes."
    assert list(request.prompt_ids) == RENDERER.start(QUESTION)
    assert request.stop_token_ids == tuple(RENDERER.stop_token_ids)
    assert request.sampling.seed == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(request.prompt_ids), 5)


async def test_a_chat_engine_answers_with_the_usage_that_it_reported():
    engine = Chat()

    answer = await TextModel(engine).ask(QUESTION, Sampling(seed=3))

    assert (answer.text, answer.usage) == ("Yes.", Usage(7, 2, cost_usd=0.25))
    assert engine.asked == (QUESTION, (), Sampling(seed=3))


async def test_tools_are_offered_and_their_calls_are_returned():
    engine, chat = ScriptedEngine([tool_call("add", a=1)], tokenizer=TOKENIZER), Chat()

    answer = await TextModel(engine, RENDERER).ask(QUESTION, Sampling(), [ADD])
    await TextModel(chat).ask(QUESTION, Sampling(), [ADD])

    (call,) = answer.tool_calls
    assert (call.name, call.arguments, answer.text) == ("add", '{"a": 1}', "")
    assert "Add." in engine.requests[0].prompt_text
    assert chat.asked[1] == [ADD]


@pytest.mark.parametrize("kind", ["tokens", "chat"])
async def test_an_aborted_request_is_an_engine_that_is_unavailable(kind):
    cut = ScriptedTurn(text="Y", finish_reason="abort")
    engine = Chat() if kind == "chat" else ScriptedEngine([cut], tokenizer=TOKENIZER)
    engine.finish = "abort"
    judge = TextModel(engine, None if kind == "chat" else RENDERER, role="a judge")

    with pytest.raises(EngineUnavailable, match="engine of a judge"):
        await judge.ask(QUESTION, Sampling())


async def test_a_model_can_be_loaded_by_its_name_and_one_on_tokens_needs_a_renderer():
    assert (await TextModel.load("scripted:Yes.").ask(QUESTION, Sampling())).text == "Yes."
    with pytest.raises(UsageError, match="a user has an engine that works on tokens, but no renderer"):
        TextModel(ScriptedEngine(["Yes."]), role="a user")
