"""The transformers engine tells to which experts it sent each token of prompt and completion."""

from __future__ import annotations

import asyncio

import pytest
import torch

from agentenv.core import UsageError
from agentenv.engine import Completion, Sampling, TransformersEngine
from helpers.moe import CHOSEN, tiny_moe
from helpers.training import tiny

PROMPT = [5, 9, 14, 20, 27, 35, 3, 8]


def engine_on(model, **options) -> TransformersEngine:
    return TransformersEngine(model, return_routed_experts=True, **options)


async def say(engine, prompt, *, seed=0, session=None, tokens=6) -> Completion:
    sampling = Sampling(max_tokens=tokens, seed=seed)
    return await engine.generate(prompt, sampling, stop_token_ids=(), session_id=session)


def chosen_by(model, ids: list[int]) -> list[list[list[int]]]:
    """Return the experts of all tokens but the last in a plain forward pass, `[tokens, layers, choices]`."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
    chosen = torch.stack([one.topk(CHOSEN).indices for one in logits], 1)
    return chosen.sort(-1).values.tolist()


def told(completion: Completion) -> list[list[list[int]]]:
    return torch.from_numpy(completion.routed_experts.array().astype("int64")).sort(-1).values.tolist()


def run(engine, work):
    try:
        return asyncio.run(work())
    finally:
        engine.shutdown()


@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_the_experts_are_those_of_a_plain_forward_pass(kind):
    model = tiny_moe(kind)
    engine = engine_on(model)
    # Prompts of different lengths are prefilled together, and rows leave while others decode.
    prompts = [PROMPT, PROMPT[:3], PROMPT * 4]

    async def work():
        return await asyncio.gather(
            *(say(engine, one, seed=n, tokens=3 + n) for n, one in enumerate(prompts))
        )

    for prompt, completion in zip(prompts, run(engine, work), strict=True):
        ids = [*prompt, *completion.token_ids]
        assert len(completion.routed_experts) == len(ids) - 1
        assert told(completion) == chosen_by(model, ids)


def test_members_of_a_group_and_later_turns_have_the_experts_of_their_kept_tokens():
    model = tiny_moe()
    engine = engine_on(model)
    long = PROMPT * 6  # long enough that its common beginning is computed once

    async def work():
        same = await asyncio.gather(*(say(engine, long, seed=n, session=f"{n}") for n in range(3)))
        begun = await asyncio.gather(*(say(engine, [*long, 40 + n], seed=n) for n in range(3)))
        later = [[*long, *one.token_ids, 17, 19] for one in same]
        again = await asyncio.gather(*(say(engine, one, session=f"{n}") for n, one in enumerate(later)))
        return [
            *((long, one) for one in same),
            *(([*long, 40 + n], one) for n, one in enumerate(begun)),
        ], list(zip(later, again, strict=True))

    first, second = run(engine, work)

    assert engine.stats()["reused"] > 3 * len(long)
    for prompt, completion in [*first, *second]:
        assert told(completion) == chosen_by(model, [*prompt, *completion.token_ids])


def test_tokens_that_are_kept_have_the_experts_with_which_they_were_computed():
    model = tiny_moe()
    engine = engine_on(model)

    async def work():
        before = await say(engine, PROMPT, session="one")
        with torch.no_grad():  # a change of the routers that the engine is not told of
            for layer in model.model.layers:
                layer.mlp.gate.weight.normal_(generator=torch.Generator().manual_seed(7))
        return before, await say(engine, [*PROMPT, *before.token_ids, 4], session="one")

    before, after = run(engine, work)

    known = len(before.routed_experts)
    assert after.routed_experts.part(0, known) == before.routed_experts
    assert (
        told(after)[known:]
        != chosen_by(tiny_moe(), [*PROMPT, *before.token_ids, 4, *after.token_ids])[known:]
    )


def test_nothing_is_told_unless_it_is_asked_for():
    engine = TransformersEngine(tiny_moe())

    assert run(engine, lambda: say(engine, PROMPT)).routed_experts is None
    assert not engine.features.experts


def test_a_model_without_routers_is_refused():
    with pytest.raises(UsageError, match="LlamaForCausalLM has no routers"):
        engine_on(tiny())


def test_telling_changes_no_token():
    plain, telling = TransformersEngine(tiny_moe()), engine_on(tiny_moe())

    assert (
        run(plain, lambda: say(plain, PROMPT)).logprobs == run(telling, lambda: say(telling, PROMPT)).logprobs
    )
