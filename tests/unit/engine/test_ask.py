"""One way to ask a model, whichever kind of engine it has."""

from __future__ import annotations

import pytest

from agentenv.core import EngineUnavailable, UsageError
from agentenv.engine import ChatCompletion, Sampling, ScriptedEngine, ScriptedTurn, TextModel, Usage
from agentenv.render import Renderer, byte_tokenizer
from agentenv.testing import tool_call

TOKENIZER = byte_tokenizer()
QUESTION = [{"role": "user", "content": "Well?"}]


class Chat:
    """A chat engine that says one thing and remembers what it was asked."""

    name = "chat"
    max_context_tokens = None

    async def chat(self, messages, tools, sampling, *, deadline_s=None):
        self.asked = (messages, tools, sampling)
        return ChatCompletion({"role": "assistant", "content": "Yes."}, Usage(7, 2, cost_usd=0.25), "stop")

    async def close(self): ...


async def test_an_engine_on_tokens_is_asked_through_its_renderer():
    engine = ScriptedEngine(["Yes."], tokenizer=TOKENIZER)
    renderer = Renderer(TOKENIZER)

    answer = await TextModel(engine, renderer).ask(QUESTION, Sampling(seed=3))

    (request,) = engine.requests
    assert answer.text == "Yes."
    assert list(request.prompt_ids) == renderer.start(QUESTION)
    assert request.stop_token_ids == tuple(renderer.stop_token_ids)
    assert request.sampling.seed == 3
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(request.prompt_ids), 5)


async def test_a_renderer_s_tools_are_not_offered():
    schema = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
    engine = ScriptedEngine(["Yes."], tokenizer=TOKENIZER)

    await TextModel(engine, Renderer(TOKENIZER, tools=(schema,))).ask(QUESTION, Sampling())

    assert "Add." not in engine.requests[0].prompt_text


async def test_a_chat_engine_answers_with_the_usage_that_it_reported():
    engine = Chat()

    answer = await TextModel(engine).ask(QUESTION, Sampling(seed=3))

    assert (answer.text, answer.usage) == ("Yes.", Usage(7, 2, cost_usd=0.25))
    assert engine.asked == (QUESTION, (), Sampling(seed=3))


async def test_tools_are_offered_and_their_calls_are_returned():
    schema = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
    engine = ScriptedEngine([tool_call("add", a=1)], tokenizer=TOKENIZER)
    chat = Chat()

    answer = await TextModel(engine, Renderer(TOKENIZER)).ask(QUESTION, Sampling(), [schema])
    await TextModel(chat).ask(QUESTION, Sampling(), [schema])

    (call,) = answer.tool_calls
    assert (call.name, call.arguments, answer.text) == ("add", '{"a": 1}', "")
    assert "Add." in engine.requests[0].prompt_text
    assert chat.asked[1] == [schema]


async def test_an_aborted_request_is_an_engine_that_is_unavailable():
    engine = ScriptedEngine([ScriptedTurn(text="Y", finish_reason="abort")], tokenizer=TOKENIZER)
    judge = TextModel(engine, Renderer(TOKENIZER), role="a judge")

    with pytest.raises(EngineUnavailable, match="engine of a judge"):
        await judge.ask(QUESTION, Sampling())


async def test_an_aborted_chat_is_no_answer():
    class Late(Chat):
        async def chat(self, messages, tools, sampling, *, deadline_s=None):
            return ChatCompletion({"role": "assistant", "content": ""}, Usage(), "abort")

    with pytest.raises(EngineUnavailable, match="engine of a judge"):
        await TextModel(Late(), role="a judge").ask(QUESTION, Sampling())


async def test_a_model_can_be_loaded_by_its_name():
    answer = await TextModel.load("scripted:Yes.").ask(QUESTION, Sampling())

    assert answer.text == "Yes."


def test_an_engine_on_tokens_without_a_renderer_is_refused():
    with pytest.raises(UsageError, match="a user has an engine that works on tokens, but no renderer"):
        TextModel(ScriptedEngine(["Yes."]), role="a user")
