"""Models whose position frequencies depend on the longest row of a forward pass."""

from __future__ import annotations

import asyncio

import pytest
import torch

from agentenv.core import UsageError
from agentenv.engine import Sampling, TransformersEngine
from agentenv.engine.hf.positions import fix_frequencies
from helpers.rope import MODELS, ORIGINAL


def logits(model, rows: list[list[int]]) -> torch.Tensor:
    """Return the logits of the first row, padded on the right beside the others."""
    width = max(map(len, rows))
    with torch.no_grad():
        found = model(torch.tensor([row + [0] * (width - len(row)) for row in rows])).logits[0]
    return found[: len(rows[0])].log_softmax(-1)


SHORT, LONG = [3, 1, 4, 1, 5, 9, 2, 6] * 3, [2, 7, 1, 8] * 24


@pytest.mark.parametrize("kind", MODELS)
def test_a_row_has_the_same_numbers_beside_a_longer_one(kind):
    model = MODELS[kind]()
    gap = (logits(model, [SHORT, LONG]) - logits(model, [SHORT])).abs().mean()
    assert gap > 0.1  # as transformers computes it

    fix_frequencies(model)
    fix_frequencies(model)

    assert torch.allclose(logits(model, [SHORT, LONG]), logits(model, [SHORT]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_the_frequencies_are_those_of_the_context_limit(kind):
    plain, model = MODELS[kind](), MODELS[kind]()
    full = [SHORT[index % len(SHORT)] for index in range(128)]

    fix_frequencies(model)

    assert torch.allclose(logits(model, [full]), logits(plain, [full]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
async def test_an_answer_that_crosses_the_original_length_has_the_numbers_of_one_pass(kind, make):
    model = MODELS[kind]().float()
    engine = make(model)

    prompts = [SHORT, [*SHORT, 7], LONG]
    answers = await asyncio.gather(
        *(engine.generate(ids, Sampling(max_tokens=20, seed=0), stop_token_ids=[]) for ids in prompts)
    )

    assert engine.max_context_tokens == 128
    assert len(SHORT) < ORIGINAL < len(SHORT) + 20
    for prompt, answer in zip(prompts, answers, strict=True):
        row = [*prompt, *answer.token_ids]
        truth = logits(model, [row])[len(prompt) - 1 : -1].gather(1, torch.tensor(answer.token_ids)[:, None])
        assert answer.logprobs == pytest.approx(truth[:, 0].tolist(), abs=1e-3)


def test_a_model_that_goes_on_depending_on_the_longest_row_is_refused():
    model = MODELS["longrope"]()

    def by_longest(module, args, kwargs, output):
        long = kwargs["position_ids"].max() >= ORIGINAL
        return tuple(one * 1.5 for one in output) if long else output

    model.model.rotary_emb.register_forward_hook(by_longest, with_kwargs=True)

    with pytest.raises(UsageError, match="depend on the longest row") as refused:
        TransformersEngine(model)

    assert "max_position_embeddings" in refused.value.remedy
