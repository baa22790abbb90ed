"""What refills ask for: each group once, and only groups without a gradient are replaced."""

from __future__ import annotations

import pytest

from agentenv.core import UsageError
from agentenv.training import GRPOConfig, GRPOTrainer
from agentenv.training.batch import episode_kl
from helpers.training import group, tiny, trainer_of

FIRST = [group("a", [0.0, 1.0]), group("b", [1.0, 1.0])]
REFILL = [group("c", [1.0, 0.0])]


def test_the_users_advantages_are_asked_for_once_for_each_group():
    seen: list[list[str]] = []

    def own(groups):
        seen.append([one.group_id for one in groups])
        return [[episode.reward - 0.5 for episode in one] for one in groups]

    trainer = trainer_of(refill_rounds=3)
    trainer.grpo.advantage_fn = own

    assert trainer.grpo.count_mixed(FIRST) == 2
    assert trainer.grpo.count_mixed([*FIRST, *REFILL]) == 3
    trainer.step([*FIRST, *REFILL])
    assert seen == [["group-a", "group-b"], ["group-c"]]

    trainer.step(FIRST)  # the next step asks again
    assert seen[2:] == [["group-a", "group-b"]]


def test_too_few_lists_of_advantages_are_refused():
    trainer = trainer_of()
    trainer.grpo.advantage_fn = lambda groups: [[0.0, 1.0]]

    with pytest.raises(UsageError, match="returned 1 lists for 2 groups"):
        trainer.step(FIRST)


def test_the_reference_scores_each_group_once_for_the_kl_in_the_reward(monkeypatch):
    scored: list[int] = []

    def counting(reference, groups, *args, **options):
        scored.append(len(groups))
        return episode_kl(reference, groups, *args, **options)

    monkeypatch.setattr("agentenv.training.step.episode_kl", counting)
    trainer = trainer_of(beta=0.5, kl_in="reward", refill_rounds=3)

    trainer.grpo.count_mixed(FIRST)
    trainer.grpo.count_mixed([*FIRST, *REFILL])
    trainer.step([*FIRST, *REFILL])

    assert scored == [2, 1]


@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1}], ids=["left out", "trained"])
def test_a_group_without_spread_is_replaced_also_where_it_is_trained(options):
    trainer = trainer_of(refill_rounds=1, **options)

    assert trainer.grpo.count_mixed(FIRST) == 1


PENALTY = {"overlong_penalty_tokens": 5, "max_completion_length": 5}


@pytest.mark.parametrize(
    "options", [PENALTY, {"beta": 0.5, "kl_in": "reward"}, PENALTY | {"entropy_coef": 0.1}], ids=str
)
def test_a_group_that_only_penalties_tell_apart_is_replaced_and_teaches_nothing(options):
    trainer = trainer_of(refill_rounds=1, **options)
    wrong = group("w", [0.0, 0.0])

    assert trainer.grpo.count_mixed([*FIRST, wrong]) == 1
    batch = trainer.grpo.batch([*FIRST, wrong])

    assert batch.mixed == [True, False, False]
    assert batch.metrics["groups/frac_mixed"] == pytest.approx(1 / 3)
    assert {row.group for row in batch.rows if row.advantages_n.any()} == {0}


def test_without_refills_penalties_count_as_published():
    batch = trainer_of(**PENALTY).grpo.batch([group("w", [0.0, 0.0])])

    assert {row.group for row in batch.rows} == {0}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"beta": 0.1, "kl_in": "reward"}, "kl_in='reward' has no effect with an advantage_fn"),
        ({"overlong_penalty_tokens": 2, "max_completion_length": 8}, "overlong_penalty_tokens has no effect"),
    ],
)
def test_an_option_that_the_users_advantages_would_ignore_is_refused(options, text):
    with pytest.raises(UsageError, match=text):
        GRPOTrainer(
            GRPOConfig(dtype="float64", **options),
            model=tiny(),
            advantage_fn=lambda groups: [[0.0] for _ in groups],
        )
