"""The experts that vLLM tells are read from both routes, and from streams."""

from __future__ import annotations

import io
from base64 import b64encode

import numpy as np
import pytest

from agentenv.core import EngineError
from agentenv.engine import Sampling
from agentenv.engine.vllm.experts import decode_experts
from helpers.fake_vllm import engine_on, experts_of, say, serving


@pytest.mark.parametrize(
    ("route", "streamed"), [("generate", False), ("generate", True), ("completions", False)]
)
async def test_a_server_tells_the_experts_of_all_tokens_but_the_last(route, streamed):
    async with serving(route=route, experts=True) as fake, engine_on(fake) as engine:
        assert engine.features.experts
        if streamed:
            drawn = Sampling(max_tokens=4, seed=0)
            done = await engine.stream((1, 2, 3), drawn, lambda _: None, stop_token_ids=())
        else:
            done = await say(engine)

    assert len(done.token_ids) == 4
    assert done.routed_experts.array().tolist() == experts_of(6).tolist()


async def test_a_server_that_tells_none_is_known_as_such():
    async with serving() as fake, engine_on(fake) as engine:
        assert not engine.features.experts
        assert (await say(engine)).routed_experts is None


async def test_experts_that_cannot_be_read_are_an_error_of_the_engine(monkeypatch):
    async with serving(experts=True) as fake, engine_on(fake) as engine:
        fake.told = lambda tokens: "no base64"
        with pytest.raises(EngineError, match="is not a completion"):
            await say(engine)


def test_wider_numbers_are_stored_in_two_bytes():
    file = io.BytesIO()
    np.save(file, np.full((4, 3, 2), 300, "int32"))

    routed = decode_experts(b64encode(file.getvalue()).decode())

    assert (routed.width, routed.array().max(), len(routed)) == (2, 300, 4)
    assert decode_experts(None) is None
