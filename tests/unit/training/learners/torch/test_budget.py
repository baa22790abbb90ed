"""The tokens of a micro-batch follow from the memory that passes took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentenv.core import TrainingFailed
from agentenv.training.learners.pass_sizes import FIRST_TOKENS
from agentenv.training.learners.torch import passes
from agentenv.training.learners.torch.budget import TokenBudget, memory_of
from agentenv.training.learners.torch.packing import pad_rows
from agentenv.training.learners.torch.passes import accumulate
from agentenv.training.metrics import Meter
from agentenv.training.step import assign_weights
from helpers.training import group, make_row, trainer_of


class FakeMemory:
    """A device on which a pass takes a number of bytes for each token."""

    def __init__(self, total: int, held: int, each: int, gradients: int = 0) -> None:
        self.total, self.held, self.each, self.gradients = total, held, each, gradients
        self.peak = held

    def reset(self) -> None:
        self.peak = self.held

    def update(self, budget: TokenBudget, tokens: int, passes: int = 2) -> None:
        """Do what the passes of an update do, each with so many tokens."""
        with budget.measured([tokens] * passes):
            self.held += self.gradients
            self.peak = self.held + self.each * tokens
        assert self.peak <= self.total, "out of memory"
        self.held -= self.gradients


def alone(values):
    return list(values)


def test_a_given_number_stays_and_so_does_the_first_one_without_a_measurement():
    given = TokenBudget(700, FakeMemory(10**9, 0, 1), alone)
    unmeasured = TokenBudget(None, None, alone)

    assert (given.tokens, given.memory) == (700, None)
    assert (unmeasured.tokens, unmeasured.memory) == (FIRST_TOKENS, None)
    assert memory_of(torch.device("cpu")) is None


def test_the_budget_doubles_until_nine_tenths_of_the_memory_are_used():
    memory = FakeMemory(total=1_000_000, held=200_000, each=10, gradients=100_000)
    budget, seen = TokenBudget(None, memory, alone), []
    for _ in range(6):
        memory.update(budget, budget.tokens)
        seen.append(budget.tokens)
    most = (900_000 - 300_000) // 10 // 256 * 256
    assert seen == [8192, 16384, 32768, most, most, most]


@pytest.mark.parametrize(
    ("gigabytes", "repeats", "tokens"),
    [(8, 1, 4096), (24, 1, 4096), (48, 1, 8192), (85, 1, 16_384), (151, 1, 16_384), (85, 0, 4096)],
)
def test_the_first_budget_follows_the_size_of_the_card_where_a_pass_can_be_repeated(
    gigabytes, repeats, tokens
):
    memory = FakeMemory(gigabytes * 10**9, 0, 1)

    assert TokenBudget(None, memory, alone, repeats=bool(repeats)).tokens == tokens


def test_a_budget_that_leaves_too_little_free_becomes_smaller():
    memory = FakeMemory(total=1_000_000, held=200_000, each=10)
    budget = TokenBudget(None, memory, alone)
    memory.update(budget, 60_000)  # a row of its own, longer than the budget
    memory.held = 870_000  # a reference was loaded
    memory.update(budget, budget.tokens)
    assert budget.tokens == 2816
    assert budget.tokens * memory.each <= 900_000 - memory.held


def test_a_single_pass_counts_the_gradients_as_its_own():
    memory = FakeMemory(total=300_000, held=50_000, each=10, gradients=100_000)
    budget = TokenBudget(None, memory, alone)
    memory.update(budget, 4096, passes=1)
    cautious = budget.tokens
    memory.update(budget, cautious, passes=2)
    assert cautious < budget.tokens <= (270_000 - 150_000) // 10


def test_small_passes_say_nothing_and_processes_use_the_smallest_budget():
    memory = FakeMemory(total=1_000_000, held=0, each=10, gradients=500_000)
    budget = TokenBudget(None, memory, alone)
    memory.update(budget, 1000)
    with budget.measured([]):
        pass
    assert budget.tokens == FIRST_TOKENS
    several = TokenBudget(None, FakeMemory(10**9, 0, 1), lambda values: [*values, 5120])
    with several.measured([4096, 4096]):
        pass
    assert several.tokens == 5120


def test_an_update_measures_its_passes_and_the_next_one_uses_more_tokens():
    trainer = trainer_of(packing="padded")
    policy, memory = trainer.learner.policy, FakeMemory(10**9, 0, 1)
    policy.budget = TokenBudget(None, memory, alone)
    policy.budget.tokens = 40
    rows = [make_row(list(range(1, 11)), [5, 9], group=number) for number in range(8)]
    rows = assign_weights(rows, trainer.config)

    def sizes() -> list[int]:
        found, score = [], policy.score
        policy.score = lambda micro: (found.append(micro.ids_BT.numel()), score(micro))[1]
        accumulate(policy, rows, Meter())
        del policy.score
        return found

    assert sizes() == [36, 36]
    assert sizes() == [72]


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


def test_a_pass_that_broke_off_late_leaves_nothing_of_its_gradient():
    usual, late = (trainer_of(packing="padded", tokens_per_micro_batch=10) for _ in range(2))
    given, broken = late.learner.policy.score, []

    def breaks_once(micro):
        if micro.ids_BT.numel() < 10 and not broken:
            broken.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return given(micro)

    late.learner.policy.score = breaks_once
    for trainer in (usual, late):
        trainer.learner.forward_backward(rows_of_different_lengths(trainer.config), Meter())

    assert broken
    for ours, theirs in zip(gradients(late), gradients(usual), strict=True):
        torch.testing.assert_close(ours, theirs)


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


def test_all_processes_halve_what_did_not_fit_in_one_and_grow_only_a_little_again():
    memory = FakeMemory(total=10**6, held=0, each=10)
    budget = TokenBudget(None, memory, lambda values: [*values, 3000])

    assert budget.shrink("", 0)
    assert budget.tokens == 1500
    budget._gather = alone
    for _ in range(4):
        memory.update(budget, budget.tokens)
    assert budget.tokens == 2250 // 256 * 256


def test_the_most_that_a_step_held_is_a_metric_of_it():
    trainer = trainer_of(packing="padded")
    trainer.learner.memory = FakeMemory(total=80 * 10**9, held=2 * 10**9, each=1)
    trainer.learner.memory.peak = 9_870_000_000
    metrics = trainer.step([group("a", [0.0, 1.0])])

    assert metrics["memory/held_gb/max"] == pytest.approx(9.87)
    assert "memory/held_gb/max" not in trainer_of(packing="padded").step([group("a", [0.0, 1.0])])
