"""What must never reach the weights: each is counted, said, and makes no step and no NaN."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from agentenv.core import (
    AlignmentError,
    EpisodeError,
    SequenceBuilder,
    StopReason,
    TokenSequence,
    TokenSpan,
    Trajectory,
    TrajectoryGroup,
    UsageError,
)
from agentenv.training import LoraOptions, LossOptions
from agentenv.training.batch import build_batch
from agentenv.training.learners.torch.passes import score_rows
from agentenv.training.watch import early_warnings
from helpers.training import episode, group, trainer_of


def unsampled(member: int) -> Trajectory:
    """An episode of which the policy sampled nothing."""
    spans = (TokenSpan("prompt", (1, 2, 3)), TokenSpan("other", (4, 5), turn=0))
    return replace(episode("t", member, member), turns=(), sequences=(TokenSequence(spans),))


def spoken(member: int) -> Trajectory:
    """An episode of an engine that only speaks text."""
    reason = "the engine gives no token ids"
    return replace(episode("t", member, member), turns=(), sequences=(), untrainable_reason=reason)


def failed(member: int) -> Trajectory:
    """An episode whose environment crashed."""
    error = EpisodeError("env", "OSError", "the disk is full")
    return episode("a", member, None, stop=StopReason.ERROR, error=error, untrainable_reason="it failed")


def crossing(member: int) -> Trajectory:
    """An episode in the middle of which the weights changed."""
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3, 4, 5, 6])
    builder.append_completion([4 + member, 5, 6, 7], [-3.0, -3.5, -4.0, -3.0], [(0, 0, 2), (2, 2, 4)], turn=0)
    return replace(episode("t", member, member, tokens=4), sequences=(builder.freeze(),))


def both(make) -> TrajectoryGroup:
    return TrajectoryGroup((make(0), make(1)))


def recorded_at(temperature: float) -> TrajectoryGroup:
    members = [episode("a", member, 1.0 - member) for member in range(2)]
    at = [[replace(turn, sampling={"temperature": temperature}) for turn in one.turns] for one in members]
    return TrajectoryGroup(
        tuple(replace(one, turns=tuple(turns)) for one, turns in zip(members, at, strict=True))
    )


def weights_of(trainer) -> list[torch.Tensor]:
    return [one.clone() for one in trainer.model.parameters()]


def unchanged(trainer, before: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, trainer.model.parameters(), before))


def sampled_with(one: TrajectoryGroup, logprobs: list[list[float]]) -> TrajectoryGroup:
    """The same episodes, with other numbers of the sampler's."""
    members = []
    for member, values in zip(one, logprobs, strict=True):
        (sequence,) = member.sequences
        spans = [replace(s, logprobs=tuple(values)) if s.trained else s for s in sequence.spans]
        members.append(replace(member, sequences=(TokenSequence(tuple(spans)),)))
    return TrajectoryGroup(tuple(members))


NOTHING = {
    "all rewards equal": (lambda: group("a", [0.5, 0.5, 0.5]), "zero_std_episodes"),
    "a group of one": (lambda: group("a", [0.5]), "zero_std_episodes"),
    "no rewards": (lambda: group("a", [None, None]), "unscored_episodes"),
    "all failed": (lambda: both(failed), "failed_episodes"),
    "no token of the policy": (lambda: both(unsampled), "rows_without_trained_tokens"),
    "no tokens at all": (lambda: both(spoken), "untrainable_episodes"),
    "all over the model's length": (lambda: group("a", [0.0, 1.0], top=61), "rows_too_long"),
}


@pytest.mark.parametrize("case", NOTHING)
def test_what_cannot_be_trained_makes_no_step(case):
    make, reason = NOTHING[case]
    trainer = trainer_of(weight_decay=0.1)
    if reason == "rows_too_long":
        trainer.learner.policy.max_length = 7
    before = weights_of(trainer)

    metrics = trainer.step([make()])

    assert metrics["updates"] == trainer.weights_version == trainer.grpo.updates_done == 0
    assert unchanged(trainer, before)
    dropped = {name for name, count in metrics.items() if name.startswith("dropped/") and count}
    assert dropped == {f"dropped/{reason}"}
    said = " ".join(early_warnings([metrics]))
    assert ("no group has mixed rewards" in said) == (reason == "zero_std_episodes")
    assert reason == "zero_std_episodes" or reason.replace("_", " ") in said
    assert all(math.isfinite(value) for name, value in metrics.items() if not name.startswith("reward"))


def test_an_empty_batch_makes_no_step():
    trainer = trainer_of(weight_decay=0.1)
    metrics = trainer.step([])
    assert (metrics["updates"], trainer.steps_done, trainer.grpo.updates_done) == (0, 1, 0)
    assert early_warnings([metrics]) == ["the batch has no episodes: there is nothing to train on"]


def test_the_reason_of_each_member_comes_before_that_of_its_group():
    members = (failed(0), episode("a", 1, 1.0), episode("a", 2, 1.0))
    metrics = trainer_of().step([TrajectoryGroup(members)])
    assert metrics["dropped/failed_episodes"] == 1
    assert metrics["dropped/zero_std_episodes"] == 2


@pytest.mark.parametrize("every_token_is_dropped", [True, False])
def test_a_gradient_of_zero_lets_no_momentum_move_the_weights(every_token_is_dropped, monkeypatch):
    monkeypatch.setattr(LossOptions, "trains_zero_std", property(lambda options: True))
    trainer = trainer_of(old_logprobs="recompute", importance_correction="token_mask", importance_cap=1e6)
    assert trainer.step([group("a", [0.0, 1.0])])["updates"] == 1
    before = weights_of(trainer)

    far = sampled_with(group("a", [0.0, 1.0]), [[-90.0] * 3, [-90.0] * 4])
    metrics = trainer.step([far if every_token_is_dropped else group("a", [1.0, 1.0])])

    assert (metrics["grad_norm"], metrics["updates"], metrics["updates/not_finite"]) == (0.0, 0.0, 0.0)
    assert trainer.weights_version == trainer.grpo.updates_done == 1
    assert unchanged(trainer, before)


def test_an_unscored_member_beside_others_costs_only_itself():
    trainer = trainer_of()
    metrics = trainer.step([group("a", [None, 0.0, 1.0])])
    assert (metrics["dropped/unscored_episodes"], metrics["updates"], metrics["reward"]) == (1, 1, 0.5)
    rows = build_batch([group("a", [None, 0.0, 1.0])], trainer_of(scale_rewards="none").config).rows
    assert [row.advantages_n[0].item() for row in rows] == [-0.5, 0.5]


@pytest.mark.parametrize("options", [{"num_iterations": 4}, {"num_iterations": 2, "num_minibatches": 2}])
@pytest.mark.parametrize("old_logprobs", ["sampler", "recompute"])
def test_what_the_updates_of_a_batch_move_is_no_mismatch(old_logprobs, options):
    trainer = trainer_of(old_logprobs=old_logprobs, learning_rate=0.05, **options)
    batch = [group("a", [0.0, 1.0]), group("b", [1.0, 0.0])]
    rows = build_batch(batch, trainer.config).rows
    scores = [values.tolist() for values in score_rows(trainer.learner.policy, rows)]

    metrics = trainer.step([sampled_with(batch[0], scores[:2]), sampled_with(batch[1], scores[2:])])

    assert metrics["updates"] >= 2
    assert metrics["ratio/max"] > 1.2
    assert metrics["mismatch/k3"] < 1e-9
    assert metrics["mismatch/abs_max"] < 1e-4
    assert not any("disagree" in text for text in early_warnings([metrics]))


def test_demonstrations_are_checked_as_episodes_are():
    trainer = trainer_of()
    with pytest.raises(UsageError, match="another tokenizer"):
        trainer.step([], demonstrations=[episode("d", 0, 1.0, top=500)])
    with pytest.raises(UsageError, match="another tokenizer"):
        trainer.warmup([episode("d", 0, 1.0, top=500)], steps=1)

    trainer.learner.policy.max_length = 12
    shown = [episode("d", 0, 1.0, tokens=20), episode("d", 1, 1.0, tokens=2)]
    metrics = trainer.step([], demonstrations=shown)
    first, second = trainer.warmup(shown, steps=2)

    assert metrics["updates"] == 1
    assert metrics["dropped/demonstrations_too_long"] == first["dropped/demonstrations_too_long"] == 1
    assert "dropped/demonstrations_too_long" not in second
    with pytest.raises(UsageError, match="1 are longer than the 12 tokens"):
        trainer.warmup(shown[:1], steps=1)


def test_a_group_of_one_is_refused_by_the_loop_unless_it_has_advantages_of_its_own():
    trainer = trainer_of(num_generations=1)
    with pytest.raises(UsageError, match=r"num_generations=1 \(-k 1\) can never train"):
        trainer.train()

    trainer.grpo.advantage_fn = lambda groups: [[1.0] * len(one) for one in groups]
    with pytest.raises(UsageError, match="no environment to play"):
        trainer.train()
    assert trainer.step([group("a", [1.0])])["updates"] == 1


@pytest.mark.parametrize(("lora", "rate"), [(None, "5.6e-05"), (LoraOptions(r=2), "0.00056")])
def test_a_warm_up_that_has_hardly_learned_says_what_to_do(caplog, lora, rate):
    trainer, shown = trainer_of(lora=lora, learning_rate=0.5), [episode("d", 0, 1.0)]

    trainer.warmup(shown, steps=8, learning_rate=0.05)
    assert "hardly learned" not in caplog.text

    trainer_of(lora=lora, learning_rate=0.5).warmup(shown, steps=2)
    assert f"at a learning rate of {rate}; show each demonstration more often (num_demos)" in caplog.text


def test_a_warm_up_goes_on_in_rounds_until_the_demonstrations_are_learned_or_a_round_lowers_hardly_anything():
    shown = [episode("d", 0, 1.0)]

    learned = trainer_of().warmup(shown, steps=4, max_steps=400, learning_rate=0.01)
    never = trainer_of().warmup(shown, steps=4, max_steps=400, learning_rate=1e-9)
    bounded = trainer_of().warmup(shown, steps=4, max_steps=8, learning_rate=0.01)

    tokens = int(sum(shown[0].sequences[0].loss_mask))
    assert learned[-1]["sft/nll"] * tokens < 0.1 < learned[-2]["sft/nll"] * tokens
    assert (len(never), len(bounded)) == (4, 8)


def test_reward_metrics_are_of_the_rewards_that_the_environment_gave():
    trainer = trainer_of(overlong_penalty_tokens=5, max_completion_length=5)
    solved, failed = group("a", [1.0, 1.0]), group("b", [0.0, 0.0])

    metrics = trainer.step([solved, failed])

    assert (metrics["reward"], metrics["reward_std"]) == (0.5, 0.0)
    assert metrics["groups/frac_all_good"] == metrics["groups/frac_all_bad"] == 0.5
    # Although members of different lengths have different penalties.
    assert metrics["groups/frac_mixed"] == 0.0
    assert metrics["grad_norm"] > 0


def test_episodes_of_mixed_versions_are_trained_and_their_age_is_counted():
    trainer = trainer_of()
    trainer.learner.weights_version = 3
    metrics = trainer.step([both(crossing)])
    assert metrics["updates"] == 1
    ages = [metrics[f"staleness/{name}"] for name in ("mean", "max", "mixed_episodes")]
    assert ages == [2.0, 3.0, 2.0]


@pytest.mark.parametrize("source", ["prompt", "env", "model"])
def test_a_negative_token_id_cannot_be_recorded(source):
    logprobs = (-1.0, -1.0) if source == "model" else None
    with pytest.raises(AlignmentError, match=f"token id -7 of a {source} span is negative"):
        TokenSpan(source, (3, -7), logprobs)


def test_an_episode_of_another_temperature_is_refused_and_told_both():
    trainer = trainer_of(temperature=1.0)
    before = weights_of(trainer)

    told = r"sampled at temperature 0\.5 in turn 0.* at temperature 1\b"
    with pytest.raises(UsageError, match=told) as refused:
        trainer.step([recorded_at(0.5)])

    assert "temperature=0.5" in refused.value.remedy
    assert unchanged(trainer, before)


@pytest.mark.parametrize("temperature", [0.5, 1])
def test_an_episode_of_the_trainings_own_temperature_is_trained(temperature: float):
    assert trainer_of(temperature=temperature).step([recorded_at(temperature)])["tokens/trained"] == 10


def test_a_demonstration_may_have_any_temperature():
    """Imitation compares the policy with no log-probability of a sampler."""
    metrics = trainer_of().step([], demonstrations=[recorded_at(0.5)[0]])

    assert metrics["tokens/trained"] == 5
