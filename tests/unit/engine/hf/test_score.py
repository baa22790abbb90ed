"""Recomputed log-probabilities against one plain forward pass of a tiny model."""

from __future__ import annotations

import pytest
import torch

from agentenv.core import Supports, UsageError
from agentenv.engine import Sampling
from agentenv.engine.hf import score
from agentenv.engine.hf.score import TokenScorer
from helpers.training import tiny

IDS = [int(token) for token in torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(3))]


def plain(model, start: int, end: int, temperature: float) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([IDS])).logits[0].float() / temperature
    return [float(logits[place - 1].log_softmax(-1)[IDS[place]]) for place in range(start, end)]


@pytest.mark.parametrize("chunk", [7, 256])
def test_each_part_is_scored_at_its_own_temperature_across_chunks(chunk, monkeypatch):
    monkeypatch.setattr(score, "CHUNK", chunk)
    model = tiny()
    settings = [(5, 9, Sampling(temperature=0.7)), (12, 31, Sampling(temperature=0.0)), (39, 40, Sampling())]
    parts = [(*one, None) for one in settings]

    scored = TokenScorer(model).score(IDS, parts)

    wanted = [plain(model, 5, 9, 0.7), plain(model, 12, 31, 1.0), plain(model, 39, 40, 1.0)]
    assert [pytest.approx(values, abs=1e-5) for values in wanted] == scored


def test_a_cut_distribution_is_scored_as_it_was_sampled():
    model = tiny()

    (values,) = TokenScorer(model).score(IDS, [(1, 40, Sampling(top_k=61 // 2), None)])

    # Renormalised over fewer tokens, each token is likelier or was excluded.
    for value, uncut in zip(values, plain(model, 1, 40, 1.0), strict=True):
        assert value == float("-inf") or value > uncut


@pytest.mark.parametrize("chunk", [7, 256])
def test_a_recorded_support_is_used_whatever_the_model_would_leave_out_now(chunk, monkeypatch):
    monkeypatch.setattr(score, "CHUNK", chunk)
    model = tiny()
    kept = [sorted({token, (token + 7) % 61, (token * 3) % 61}) for token in IDS[4:20]]

    (values,) = TokenScorer(model).score(
        IDS, [(4, 20, Sampling(temperature=0.7, top_k=3), Supports.of(kept))]
    )

    with torch.inference_mode():
        logits = model(torch.tensor([IDS])).logits[0].float() / 0.7
    wanted = [
        float(logits[place - 1, support].log_softmax(-1)[support.index(IDS[place])])
        for place, support in enumerate(kept, start=4)
    ]
    assert values == pytest.approx(wanted, abs=1e-5)


def test_other_engines_and_foreign_tokens_are_refused():
    with pytest.raises(UsageError, match="cannot recompute"):
        TokenScorer.load("mock")
    with pytest.raises(UsageError, match="outside the model's vocabulary"):
        TokenScorer(tiny()).score([1, 99], [(1, 2, Sampling(), None)])
