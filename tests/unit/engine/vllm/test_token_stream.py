"""A vLLM server tells the tokens of a completion as they are sampled."""

from __future__ import annotations

import pytest

from agentenv.core import ContextTooLong, EngineError
from agentenv.engine import Sampling
from helpers.fake_vllm import ROUTES, STOP, engine_on, say, serving


async def stream(engine, told, *, prompt=(1, 2, 3), **sampling):
    drawn = Sampling(**{"max_tokens": 6, "seed": 0} | sampling)
    return await engine.features.stream(prompt, drawn, told.append, stop_token_ids=(STOP,))


@ROUTES
async def test_a_streamed_completion_equals_a_plain_one(route):
    async with serving(route=route) as fake, engine_on(fake) as engine:
        told = []
        streamed = await stream(engine, told)
        plain = await say(engine, max_tokens=6, stop=(STOP,))

        assert [body.get("stream") for body in fake.seen] == [True, None]
    assert (streamed.token_ids, streamed.logprobs) == (plain.token_ids, plain.logprobs)
    assert (streamed.finish_reason, streamed.version_ranges) == (plain.finish_reason, plain.version_ranges)
    assert told == [[token] for token in streamed.token_ids]


@ROUTES
@pytest.mark.parametrize("streams", [False, None], ids=["ignored", "refused"])
async def test_a_server_that_cannot_stream_answers_plainly(route, streams):
    async with serving(route=route, streams=streams) as fake, engine_on(fake) as engine:
        told = []
        streamed = await stream(engine, told)

        assert streamed.token_ids == (await say(engine, max_tokens=6, stop=(STOP,))).token_ids
    assert told == []


async def test_a_stream_that_breaks_is_sampled_again_and_no_token_is_told_twice():
    async with serving() as fake, engine_on(fake, retry_s=30.0) as engine:
        fake.plan = ["breaks"]
        told = []
        streamed = await stream(engine, told)

        assert len(fake.sampled) == 2
    assert [token for part in told for token in part] == list(streamed.token_ids)


async def test_other_tokens_than_those_that_were_told_are_an_error():
    async with serving() as fake, engine_on(fake, retry_s=30.0) as engine:
        fake.plan = ["breaks"]
        with pytest.raises(EngineError, match="other tokens were sampled"):
            await stream(engine, [], seed=None, max_tokens=40)

        assert len(fake.sampled) == 2


@pytest.mark.parametrize(
    ("fault", "words"), [("fails", "out of memory"), ("no end", "in the middle of the completion")]
)
async def test_a_server_that_fails_in_mid_stream_is_told(fault, words):
    async with serving() as fake, engine_on(fake) as engine:
        fake.plan = [fault]
        told = []
        with pytest.raises(EngineError, match=words):
            await stream(engine, told)

        assert told
        assert len(fake.sampled) == 1


async def test_a_prompt_that_does_not_fit_is_not_asked_twice():
    async with serving() as fake, engine_on(fake) as engine:
        engine.max_context_tokens = None
        with pytest.raises(ContextTooLong):
            await stream(engine, [], prompt=range(80))

        assert len(fake.seen) == 1
