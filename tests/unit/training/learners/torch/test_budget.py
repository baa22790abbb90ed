"""The tokens of a micro-batch follow from the memory of the device, and halve where it runs out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentenv.core import TrainingFailed
from agentenv.training.learners.pass_sizes import FIRST_TOKENS
from agentenv.training.learners.torch import learner, passes
from agentenv.training.learners.torch.budget import TokenBudget, memory_of
from agentenv.training.learners.torch.packing import pad_rows
from agentenv.training.metrics import Meter
from agentenv.training.step import assign_weights
from helpers.training import group, make_row, trainer_of


def alone(values):
    return list(values)


@pytest.mark.parametrize(
    ("given", "gigabytes", "tokens"),
    [
        (None, 8, 4096),
        (None, 24, 4096),
        (None, 48, 8192),
        (None, 85, 16_384),
        (None, 151, 16_384),
        (700, 85, 700),
    ],
)
def test_the_number_follows_the_size_of_the_card_unless_it_is_given(given, gigabytes, tokens):
    assert TokenBudget(given, gigabytes * 10**9, alone).tokens == tokens
    assert TokenBudget(given, memory_of(torch.device("cpu")), alone).tokens == (given or FIRST_TOKENS)


def out_of_memory_above(policy, tokens: int) -> list[int]:
    """Let passes with more tokens end as on a full GPU; return the tokens of all passes, which grow."""
    found, score = [], policy.score

    def scored(micro):
        found.append(micro.ids_BT.numel())
        if found[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return score(micro)

    policy.score = scored
    return found


def gradients(trainer) -> list[torch.Tensor]:
    return [one.grad.clone() for one in trainer.learner.model.parameters()]


def rows_of_different_lengths(config):
    rows = [
        make_row(list(range(1, 2 + length)), [length - 1, length], group=length) for length in (4, 5, 9, 9)
    ]
    return assign_weights(rows, config)


def test_passes_that_run_out_of_memory_are_made_again_half_as_large_with_the_same_gradient(caplog):
    usual, short = (trainer_of(packing="padded", tokens_per_micro_batch=64) for _ in range(2))
    for trainer in (usual, short):
        rows = rows_of_different_lengths(trainer.config)
        metrics = Meter()
        seen = out_of_memory_above(trainer.learner.policy, 9 if trainer is short else 64)
        trainer.learner.forward_backward(rows, metrics)
        trainer.metrics_of_test = metrics.result()

    assert seen == [36, 18, 9, 9, 5, 4]
    assert short.learner.policy.budget.tokens == 9
    for ours, theirs in zip(gradients(short), gradients(usual), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert short.metrics_of_test.pop("packing/halved/max") == 2.0
    assert short.metrics_of_test.keys() == usual.metrics_of_test.keys()
    assert short.metrics_of_test["entropy"].count == usual.metrics_of_test["entropy"].count
    assert "memory ran out in a micro-batch of 36 tokens" in caplog.text


def test_scores_are_computed_again_and_a_row_that_does_not_fit_alone_ends_the_training_in_words():
    trainer = trainer_of(packing="padded", tokens_per_micro_batch=64)
    rows = rows_of_different_lengths(trainer.config)
    whole = trainer.learner.score(rows)
    out_of_memory_above(trainer.learner.policy, 18)

    torch.testing.assert_close(trainer.learner.score(rows), whole)
    out_of_memory_above(trainer.learner.policy, 8)
    with pytest.raises(TrainingFailed, match=r"a single row does not fit .*Tried to allocate.*agentenv plan"):
        trainer.learner.forward_backward(rows, Meter())


def test_a_pass_of_shards_is_not_repeated_by_one_of_them_alone(monkeypatch):
    monkeypatch.setattr(passes, "micro_batches", lambda policy, rows: [pad_rows(rows)])
    several = SimpleNamespace(sharded=True, size=2)
    policy: Any = SimpleNamespace(budget=TokenBudget(64, None, alone), world=several)

    def breaks(_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError) as failed:
        passes._in_memory(policy, [make_row([1, 2, 3, 4], [3])], breaks)

    assert failed.value.__notes__ == ["shards repeat no pass: set tokens_per_micro_batch below 3"]


def test_all_processes_halve_what_did_not_fit_in_one():
    budget = TokenBudget(None, 10**6, lambda values: [*values, 3000])

    assert budget.shrink("", 0)
    assert budget.tokens == 1500


def test_the_most_that_a_step_held_is_a_metric_of_it(monkeypatch):
    plain = trainer_of(packing="padded").step([group("a", [0.0, 1.0])])
    monkeypatch.setattr(learner, "peak_of", lambda _: 9_870_000_000)
    metrics = trainer_of(packing="padded").step([group("a", [0.0, 1.0])])

    assert metrics["memory/held_gb/max"] == pytest.approx(9.87)
    assert "memory/held_gb/max" not in plain
