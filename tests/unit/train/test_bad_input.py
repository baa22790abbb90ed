"""What must never reach the weights: each is counted, said, and makes no step and no NaN."""

from __future__ import annotations

import math
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from agentenv.errors import AlignmentError, UsageError
from agentenv.train.warn import early_warnings
from agentenv.trajectory import SequenceBuilder, StopReason, TokenSpan, Trajectory, TrajectoryGroup, Turn

_spec = spec_from_file_location("check_model", Path(__file__).with_name("test_check_model.py"))
assert _spec is not None
assert _spec.loader is not None
helpers = module_from_spec(_spec)
_spec.loader.exec_module(helpers)
episode, group, trainer_of = helpers.episode, helpers.group, helpers.trainer_of


def unsampled(member: int, reward: float) -> Trajectory:
    """An episode of which the policy sampled nothing."""
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])
    builder.append("other", [4, 5], turn=0)
    return Trajectory(
        "e", "t", 0, "g", StopReason.FINAL_ANSWER, member=member, sequences=(builder.freeze(),), reward=reward
    )


def spoken(member: int, reward: float) -> Trajectory:
    """An episode of an engine that only speaks text."""
    return Trajectory(
        "e",
        "t",
        0,
        "g",
        StopReason.FINAL_ANSWER,
        member=member,
        reward=reward,
        untrainable_reason="the engine gives no token ids",
    )


def crossing(member: int, reward: float) -> Trajectory:
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])
    ids, logprobs = [4 + member, 5, 6, 7], [-3.0, -3.5, -4.0, -3.0]
    builder.append_completion(ids, logprobs, [(0, 0, 2), (2, 2, 4)], turn=0)
    said = {"role": "assistant", "content": "x"}
    return Trajectory(
        "e",
        "t",
        0,
        "g",
        StopReason.FINAL_ANSWER,
        member=member,
        turns=(Turn(0, said, "stop", 4, start=3, reward=reward),),
        sequences=(builder.freeze(),),
        reward=reward,
    )


NOTHING = {
    "all rewards equal": (lambda: group("a", [1.0, 1.0, 1.0]), "zero_std_episodes"),
    "a group of one": (lambda: group("a", [1.0]), "zero_std_episodes"),
    "no rewards": (lambda: group("a", [None, None]), "zero_std_episodes"),
    "no token of the policy": (
        lambda: TrajectoryGroup((unsampled(0, 0.0), unsampled(1, 1.0))),
        "rows_without_trained_tokens",
    ),
    "no tokens at all": (lambda: TrajectoryGroup((spoken(0, 0.0), spoken(1, 1.0))), "zero_std_episodes"),
    "all over the model's length": (lambda: group("a", [0.0, 1.0], top=61), "rows_too_long"),
}


@pytest.mark.parametrize("drop_zero_std", [True, False])
@pytest.mark.parametrize("case", NOTHING)
def test_check_14_what_cannot_be_trained_makes_no_step(case, drop_zero_std):
    make, reason = NOTHING[case]
    trainer = trainer_of(weight_decay=0.1, drop_zero_std=drop_zero_std)
    if reason == "rows_too_long":
        trainer.policy.max_length = 7
    before = [one.clone() for one in trainer.model.parameters()]

    metrics = trainer.step([make()])

    kept = not drop_zero_std and case in ("all rewards equal", "a group of one")
    assert metrics["updates"] == (1 if kept else 0)  # kept without an advantage: a step of weight decay alone
    if not kept:
        assert all(map(torch.equal, trainer.model.parameters(), before))
        assert trainer.weights_version == 0
        assert sum(count for name, count in metrics.items() if name.startswith("dropped/")) > 0
    if drop_zero_std:
        assert metrics[f"dropped/{reason}"] > 0
    assert all(torch.isfinite(one).all() for one in trainer.model.parameters())
    assert all(math.isfinite(value) for name, value in metrics.items() if not name.startswith("reward"))


def test_check_14_an_empty_batch_makes_no_step():
    trainer = trainer_of(weight_decay=0.1)
    assert trainer.step([])["updates"] == 0
    assert trainer.steps_done == 1
    assert trainer.updates_done == 0


def test_an_unscored_member_beside_others_costs_only_itself():
    trainer = trainer_of()
    metrics = trainer.step([group("a", [None, 0.0, 1.0])])
    assert metrics["dropped/unscored_episodes"] == 1
    assert metrics["updates"] == 1
    assert metrics["reward"] == 0.5


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_cannot_be_recorded(reward):
    with pytest.raises(AlignmentError, match="is not finite"):
        group("a", [reward, 1.0])


def test_episodes_of_mixed_versions_are_trained_and_their_age_is_counted():
    trainer = trainer_of()
    trainer.weights_version = 3
    metrics = trainer.step([TrajectoryGroup((crossing(0, 0.0), crossing(1, 1.0)))])
    assert metrics["updates"] == 1
    assert metrics["staleness/mean"] == 2.0
    assert metrics["staleness/max"] == 3.0
    assert metrics["staleness/mixed_episodes"] == 2.0


def test_the_oldest_token_decides_whether_an_episode_is_too_stale():
    trainer = trainer_of(max_staleness=2)
    trainer.weights_version = 3
    metrics = trainer.step([TrajectoryGroup((crossing(0, 0.0), crossing(1, 1.0)))])
    assert metrics["dropped/stale_episodes"] == 2
    assert metrics["updates"] == 0
    assert "2 stale episodes" in early_warnings([metrics])[0]


def test_tokens_of_another_tokenizer_are_refused_before_any_step():
    trainer = trainer_of()
    with pytest.raises(UsageError, match="another tokenizer"):
        trainer.step([group("a", [0.0, 1.0], top=500)])
    assert trainer.weights_version == 0


@pytest.mark.parametrize("logprobs", [None, (-1.0,), (math.nan, -1.0), (-1.0, -math.inf)])
def test_sampled_tokens_without_their_logprobs_cannot_be_recorded(logprobs):
    with pytest.raises(AlignmentError):
        TokenSpan("model", (1, 2), logprobs)


def test_most_of_a_batch_left_out_is_said():
    metrics = trainer_of().step([TrajectoryGroup((spoken(0, 0.0), spoken(1, 1.0))), group("a", [0.0, 1.0])])
    assert metrics["updates"] == 1
    said = early_warnings([{**metrics, "dropped/untrainable_episodes": 3.0}])
    assert any("3 untrainable episodes" in text for text in said)
