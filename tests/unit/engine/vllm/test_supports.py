"""Supports from a vLLM server: proven complete, or refused with what to change."""

from __future__ import annotations

from itertools import accumulate
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.engine import Completion, Sampling
from agentenv.engine.vllm.supports import (
    MOST_LOGPROBS,
    WITHOUT_TOP_K,
    allowed_logprobs,
    num_logprobs,
    with_supports,
)
from helpers.fake_vllm import engine_on, say, serving

CUT = {"top_k": 6, "temperature": 0.8, "keep_support": True, "seed": 3}
DROPPED = -9999.0


def renormalised(support: list[int], table: dict[int, float]) -> dict[int, float]:
    total = log(sum(exp(table[token]) for token in support))
    return {token: table[token] - total for token in support}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["generate", "completions"])
@pytest.mark.parametrize("cut", [CUT, {**CUT, "top_k": 0, "top_p": 0.5}], ids=["top_k", "top_p"])
async def test_the_support_of_each_token_comes_through_either_route(route, cut, stream):
    async with serving(route=route, max_logprobs=MOST_LOGPROBS) as fake, engine_on(fake) as engine:
        told: list[int] = []
        if stream:
            asked = Sampling(**{"max_tokens": 4} | cut)
            done = await engine.stream([1, 2, 3], asked, told.extend, stop_token_ids=())
        else:
            done = await say(engine, **cut)

        sent = fake.seen[0].get("sampling_params", fake.seen[0])
    assert sent["logprobs"] == (14 if cut["top_k"] else WITHOUT_TOP_K)
    assert done.no_supports == ""
    assert done.supports is not None
    assert told == (list(done.token_ids) if stream else [])
    for token, logprob, support in zip(done.token_ids, done.logprobs, done.supports.tolist(), strict=True):
        assert token in support
        assert len(support) == 6 if cut["top_k"] else 1 < len(support) < 30
        assert exp(logprob) <= 1
    assert done.unfit_for_training(Sampling(**cut)) == ""


async def test_without_the_wish_for_supports_nothing_more_is_asked_for():
    async with serving() as fake, engine_on(fake) as engine:
        whole = await say(engine)
        cut = await say(engine, top_k=6)
        greedy = await say(engine, **{**CUT, "temperature": 0.0})

        assert [body["sampling_params"]["logprobs"] for body in fake.seen] == [0, 0, 0]
    assert whole.supports is cut.supports is greedy.supports is None
    assert "keep_support" in cut.unfit_for_training(Sampling(top_k=6))


async def test_a_server_that_tells_fewer_logprobs_is_asked_again_for_as_many():
    async with serving(max_logprobs=8) as fake, engine_on(fake) as engine:
        done = await say(engine, **CUT)
        again = await say(engine, **CUT)

        assert [body["sampling_params"]["logprobs"] for body in fake.seen] == [14, 8, 8]
    assert done.supports is not None  # eight tokens are more than the six that are left
    assert (again.token_ids, again.supports) == (done.token_ids, done.supports)


async def test_an_incomplete_support_is_told_with_the_option_of_the_server():
    async with serving(max_logprobs=3) as fake, engine_on(fake) as engine:
        done = await say(engine, **CUT)

        assert len(fake.seen) == 2
    assert done.supports is None
    assert len(done.token_ids) == 4
    assert f"start it with --max-logprobs {MOST_LOGPROBS}" in done.unfit_for_training(Sampling(**CUT))


@given(
    st.lists(st.floats(-8, 0), min_size=2, max_size=30),
    st.integers(1, 40),
    st.integers(0, 40),
    st.data(),
)
def test_a_support_is_returned_exactly_if_it_is_complete(values, kept, told, data):
    table = dict(enumerate(values))
    order = sorted(table, key=table.get, reverse=True)  # pyright: ignore[reportArgumentType, reportCallIssue]
    support = order[:kept]
    shares = renormalised(support, table)
    token = data.draw(st.sampled_from(support))
    done = Completion((token,), (shares[token],), "stop")
    likeliest = [(one, shares.get(one, DROPPED)) for one in order[:told]]

    found = with_supports(done, [likeliest], told, Sampling(top_p=0.9, keep_support=True))

    missing = 1 - sum(exp(shares[one]) for one in {*order[:told], token} if one in shares)
    if missing > 2e-5:
        assert found.supports is None
        assert f"than the {told} tokens" in found.no_supports
    elif missing < 5e-6:
        assert found.supports is not None
        proven = sorted({*order[:told], token} & set(support))
        assert found.supports.tolist() == [proven]
        assert sum(exp(shares[one]) for one in proven) == pytest.approx(1, abs=1e-5)


def test_what_is_asked_for_follows_top_k_the_server_and_the_vocabulary():
    def asked(most=MOST_LOGPROBS, vocab_size=None, **cut):
        return num_logprobs(Sampling(keep_support=True, **cut), most, vocab_size)

    assert asked() == 0
    assert [asked(top_k=k) for k in (1, 20, 100)] == [9, 28, 125]
    assert asked(top_p=0.9) == WITHOUT_TOP_K
    assert asked(top_p=0.9, vocab_size=60) == 60
    assert [asked(top_k=100, most=most) for most in (20, -1)] == [20, 125]
    assert num_logprobs(Sampling(top_k=5), MOST_LOGPROBS, None) == 0
    # No top-k that is recorded asks for more than our own servers tell.
    assert max(accumulate([asked(top_k=k) for k in (4000, 4096)], max)) <= MOST_LOGPROBS


def test_the_refusal_of_vllm_names_what_it_allows():
    said = "Requested sample logprobs of 256, which is greater than max allowed: 20"

    assert allowed_logprobs(f"http://h/v1 answered with status 400: {said}") == 20
    assert allowed_logprobs("no model x") is None
