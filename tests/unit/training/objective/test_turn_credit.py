"""Credit for turns: each turn is compared with others of its kind, and no baseline adds a bias."""

from __future__ import annotations

import itertools
import math
from random import Random
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import SequenceBuilder, StopReason, Trajectory, TrajectoryGroup, Turn, UsageError
from agentenv.training import GRPOConfig, LossOptions, group_advantages
from agentenv.training.batch import build_batch
from agentenv.training.objective import turn_advantages, turn_returns
from helpers.training import episode, group, tiny_gpt2, trainer_of

finite = st.floats(-4, 4).map(lambda value: round(value, 3))
settings = st.fixed_dictionaries(
    {
        "advantage": st.sampled_from(["grpo", "rloo"]),
        "scale_rewards": st.sampled_from(["group", "batch", "none"]),
    }
)


def played(rewards: list[float], member: int = 0) -> Trajectory:
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])
    turns = []
    for index, reward in enumerate(rewards):
        start = len(builder)
        builder.append("model", [4, 5], logprobs=[-1.0, -1.0], weights_version=0, turn=index)
        builder.append("env", [6], turn=index)
        message = {"role": "assistant", "content": "x"}
        turns.append(Turn(index, message, "stop", 2, start=start, reward=reward))
    return Trajectory(
        "test/E-v0", "t", 0, "g", StopReason.FINAL_ANSWER, member=member, turns=tuple(turns),
        sequences=(builder.freeze(),), reward=sum(rewards),
    )  # fmt: skip


@given(st.lists(st.lists(finite, min_size=2, max_size=6), min_size=1, max_size=3), settings)
def test_with_one_turn_each_turns_are_episodes(groups, options):
    turns = turn_advantages([[[reward] for reward in group] for group in groups], **options)
    assert [[own[0] for own in group] for group in turns] == [
        pytest.approx(group, abs=1e-9, rel=1e-9) for group in group_advantages(groups, **options)
    ]


@given(
    st.lists(st.lists(finite, min_size=1, max_size=4), min_size=2, max_size=6), st.sampled_from([1.0, 0.5])
)
def test_each_turn_is_compared_as_documented(rewards, discount):
    """Against a literal reading of the docstring, member by member."""
    returns = [turn_returns(own, discount=discount) for own in rewards]
    (ours,) = turn_advantages([returns], advantage="rloo", scale_rewards="none")
    (shrunk,) = turn_advantages([returns], scale_rewards="none")
    (scaled,) = turn_advantages([returns], eps=0.5)
    columns = [[own[turn] for own in returns if len(own) > turn] for turn in range(4)]
    if all(len(column) == 0 or max(column) - min(column) <= 1e-8 for column in columns):
        assert not any(value for own in (*ours, *shrunk, *scaled) for value in own)
        return

    size = len(returns)
    expected: list[list[float]] = []
    for number, own in enumerate(returns):
        others = returns[:number] + returns[number + 1 :]
        values: list[float] = []
        for turn, value in enumerate(own):
            # What the baseline before still expects is that baseline without the reward since.
            still = value - values[-1] if turn else None
            seen = [other[turn] for other in others if len(other) > turn]
            values.append(value - fmean(seen + ([] if still is None else [still])))
        expected.append(values)
    deviation = math.sqrt(
        sum(fmean((value * (size - 1) / size) ** 2 for value in own) for own in expected) / (size - 1)
    )
    for number, own in enumerate(expected):
        assert ours[number] == pytest.approx(own, abs=1e-9)
        assert shrunk[number] == pytest.approx([one * (size - 1) / size for one in own], abs=1e-9)
        assert scaled[number] == pytest.approx(
            [one * (size - 1) / size / (deviation + 0.5) for one in own], abs=1e-9
        )


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 0], [0, 1], [[0, -0.25], [0, 0.25]]),
        ([1, 1], [1, 0], [[0.5, 0.5], [-0.5, -0.5]]),
        ([1, 0, 0], [0, 0, 0], [[0.5, 0.25, 0.125], [-0.5, -0.25, -0.125]]),
    ],
    ids=["equal sums", "a good last turn", "after the last reward"],
)
def test_turns_that_differ_get_credit_and_others_do_not(first, second, expected):
    (ours,) = turn_advantages([[turn_returns(first), turn_returns(second)]], scale_rewards="none")
    assert ours == expected


def test_a_group_of_equal_sums_is_trained_if_its_turns_differ():
    group = TrajectoryGroup((played([1.0, 0.0]), played([0.0, 1.0], member=1)))

    batch = build_batch([group], GRPOConfig(turn_discount=1.0, scale_rewards="none"))

    assert [row.advantages_n.tolist() for row in batch.rows] == [[0, 0, -0.25, -0.25], [0, 0, 0.25, 0.25]]
    assert batch.metrics["groups/frac_mixed"] == 1


@given(
    st.lists(finite, min_size=2, max_size=6), st.lists(st.integers(0, 5), min_size=6, max_size=6), settings
)
def test_turns_without_reward_before_the_end_change_no_first_advantage(rewards, extra, options):
    options |= {"scale_rewards": "none"}
    short = [[reward] for reward in rewards]
    long = [turn_returns([0.0] * more + [reward]) for more, reward in zip(extra, rewards, strict=False)]

    (plain,) = turn_advantages([short], **options)
    (padded,) = turn_advantages([long], **options)

    for (truth,), turns in zip(plain, padded, strict=True):
        assert turns[0] == pytest.approx(truth, abs=1e-9, rel=1e-9)


def test_every_token_gets_the_advantage_of_its_turn():
    group = TrajectoryGroup((played([0.1, 0.0, 1.0]), played([0.0, 0.0, 0.0], member=1)))
    config = GRPOConfig(advantage="rloo", scale_rewards="none", turn_discount=0.5)

    batch = build_batch([group], config)

    first, second = (row.advantages_n.tolist() for row in batch.rows)
    assert first == pytest.approx([0.35, 0.35, 0.425, 0.425, 0.7125, 0.7125])
    assert second == pytest.approx([-value for value in first])


def test_a_penalty_on_the_episode_lands_on_its_last_turn():
    group = TrajectoryGroup((played([0.0, 2.0]), played([0.0], member=1)))
    options = {"turn_discount": 1.0, "advantage": "rloo", "scale_rewards": "none"}
    config = GRPOConfig(**options, overlong_penalty_tokens=2, max_completion_length=4)

    rows = build_batch([group], config).rows

    assert [row.advantages_n.tolist() for row in rows] == [[1.0] * 4, [-1.0] * 2]


def test_an_unscored_member_counts_nowhere():
    (values,) = turn_advantages([[[1.0, 1.0], None, [0.0]]], scale_rewards="none")
    assert values == [[0.5, 0.5], [], [-0.5]]


GOOD = (0.3, 0.5, 0.6, 0.4)
"""Probability that the policy acts well in each of four turns."""
ON = (0.7, 0.6, 0.5, 0.0)
"""Probability that the policy goes on after each turn."""

TASKS = {
    "final": lambda turn, hits, last: float(last and all(hits)),
    "each turn": lambda turn, hits, last: float(hits[-1]),
    "first turn": lambda turn, hits, last: float(hits[-1] and turn == 0),
    "cost per turn": lambda turn, hits, last: float(last and hits[-1]) - 0.2,
}
"""Reward of a turn: of its index, whether each turn so far was good, and whether it is the last."""


def exact_gradient(reward) -> list[float]:
    """Return the gradient of the expected return by enumeration, for the 4 + 4 logits of the policy."""
    gradient = [0.0] * 8

    def go(turn: int, chance: float, hits: list[int], scores: list[float], total: float) -> None:
        for good, on in itertools.product((0, 1), (0, 1)):
            p = (GOOD[turn] if good else 1 - GOOD[turn]) * (ON[turn] if on else 1 - ON[turn])
            own = [*scores]
            own[turn], own[4 + turn] = good - GOOD[turn], on - ON[turn]
            value = total + reward(turn, [*hits, good], not on)
            if on and p:
                go(turn + 1, chance * p, [*hits, good], own, value)
            elif p:
                for index, score in enumerate(own):
                    gradient[index] += chance * p * value * score

    go(0, 1.0, [], [0.0] * 8, 0.0)
    return gradient


def sampled(random: Random, reward) -> tuple[list[float], list[tuple[float, float]]]:
    rewards, scores, hits, on = [], [], [], True
    while on:
        turn = len(hits)
        hits.append(int(random.random() < GOOD[turn]))
        on = random.random() < ON[turn]
        rewards.append(reward(turn, hits, not on))
        scores.append((hits[-1] - GOOD[turn], on - ON[turn]))
    return turn_returns(rewards), scores


def estimate(reward, advantages, *, groups: int, size: int = 4) -> tuple[list[float], list[float]]:
    """Return mean and variance of the gradient of one group, for each logit."""
    random = Random(1)
    sums, squares = [0.0] * 8, [0.0] * 8
    for _ in range(groups):
        members = [sampled(random, reward) for _ in range(size)]
        gradient = [0.0] * 8
        values = advantages([returns for returns, _ in members])
        for (_, scores), own in zip(members, values, strict=True):
            for turn, (act, on) in enumerate(scores):
                gradient[turn] += own[turn] * act / size
                gradient[4 + turn] += own[turn] * on / size
        sums = [total + value for total, value in zip(sums, gradient, strict=True)]
        squares = [total + value**2 for total, value in zip(squares, gradient, strict=True)]
    means = [total / groups for total in sums]
    return means, [total / groups - mean**2 for total, mean in zip(squares, means, strict=True)]


def distance(reward, advantages, groups: int) -> tuple[float, float]:
    """Return the largest bias in standard errors, and the variance."""
    means, variances = estimate(reward, advantages, groups=groups)
    gaps = zip(means, variances, exact_gradient(reward), strict=True)
    errors = [abs(mean - truth) / math.sqrt(v / groups) for mean, v, truth in gaps if v > 1e-12]
    return max(errors), sum(variances)


def by_episode(returns: list[list[float]]) -> list[list[float]]:
    """The plain unbiased way, for contrast: every turn compared with the others' whole episodes."""
    first = sum(own[0] for own in returns)
    return [[value - (first - own[0]) / (len(returns) - 1) for value in own] for own in returns]


@pytest.mark.parametrize("task", TASKS)
def test_the_baseline_of_a_turn_has_no_bias_and_varies_little(task):
    def ours(advantage):
        factor = 1.0 if advantage == "rloo" else 4 / 3  # of the shrinking that grpo's own mean causes

        def advantages(returns):
            (values,) = turn_advantages([returns], advantage=advantage, scale_rewards="none")
            return [[value * factor for value in own] for own in values]

        return distance(TASKS[task], advantages, groups=2000)

    turn, grpo = ours("rloo"), ours("grpo")
    episode = distance(TASKS[task], by_episode, groups=2000)

    assert max(turn[0], episode[0], grpo[0]) < 4
    assert turn[1] < episode[1] * {"first turn": 0.75}.get(task, 1.15)


# Groups without spread cost no pass, and the weights of the other tokens count them as published


REDUCTIONS = ("token_mean", "seq_mean", "constant", "prompt_mean")
MIXED = [0.0, 1.0, 0.5]


def groups(number: int):
    """One group with spread, and others of other lengths without any."""
    same = [group(f"same {index}", [0.25] * (2 + index % 3)) for index in range(number - 1)]
    return [*same[:2], group("mixed", MIXED), *same[2:]]


@pytest.fixture
def train_all(monkeypatch):
    """A function after whose call groups without spread are trained, too."""
    return lambda: monkeypatch.setattr(LossOptions, "trains_zero_std", property(lambda options: True))


def stepped(played, **options):
    trainer = trainer_of(tiny_gpt2(), max_completion_length=8, packing="padded", **options)
    metrics = trainer.step(played)
    return metrics, torch.cat([one.detach().flatten() for one in trainer.model.parameters()])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_leaving_them_out_changes_no_gradient(reduction, num_minibatches, train_all):
    options = {"reduction": reduction, "num_minibatches": num_minibatches}
    left_out, ours = stepped(groups(5), **options)
    train_all()
    trained, truth = stepped(groups(5), **options)

    assert left_out["tokens/trained"] < trained["tokens/trained"]
    assert left_out["grad_norm"] == pytest.approx(trained["grad_norm"], rel=1e-12)
    assert left_out["loss"] == pytest.approx(trained["loss"], rel=1e-12)
    assert left_out["mismatch/k3"] > 0
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_with_dynamic_sampling_one_mixed_group_of_sixteen_gets_the_whole_mean(reduction):
    played = groups(16)
    counts = {  # by hand: what the reduction divides by, over all groups and over the mixed one
        "token_mean": [sum(one.num_sampled_tokens for one in part) for part in played],
        "seq_mean": [len(part) for part in played],
        "constant": [len(part) for part in played],
        "prompt_mean": [1 for _ in played],
    }[reduction]

    counted, _ = stepped(played, reduction=reduction)
    kept, _ = stepped(played, reduction=reduction, refill_rounds=1)
    alone, _ = stepped([played[2]], reduction=reduction)

    assert kept["grad_norm"] == pytest.approx(counted["grad_norm"] * sum(counts) / counts[2], rel=1e-12)
    assert kept["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-12)
    assert kept["dropped/zero_std_episodes"] == counted["dropped/zero_std_episodes"] > 0


@pytest.mark.parametrize(
    ("options", "trains"),
    [
        ({}, False),
        ({"beta": 0.1}, True),
        ({"beta": 0.1, "kl_in": "reward"}, False),
        ({"entropy_coef": 0.1}, True),
        ({"loss_type": "distill", "teacher": "some/model"}, True),
    ],
)
def test_groups_without_spread_are_trained_where_the_loss_has_more_than_advantages(options, trains):
    assert GRPOConfig(**options).loss.trains_zero_std == trains


def test_rows_that_the_model_cannot_take_are_not_counted(train_all):
    played = [group("mixed", MIXED), group("same", [1.0] * 6)]  # the last rows of the second are longer
    longest = 6 + 5

    def norm():
        trainer = trainer_of(tiny_gpt2(), packing="padded")
        trainer.learner.policy.max_length = longest
        return trainer.step(played)["grad_norm"]

    left_out = norm()
    train_all()
    assert left_out == pytest.approx(norm(), rel=1e-12)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_a_member_over_the_models_length_is_left_out_wherever_the_kl_is(kl_in):
    """GPT-2 has no position beyond its length, so scoring such a member would raise."""
    trainer = trainer_of(tiny_gpt2(), beta=0.5, kl_in=kl_in)
    members = (episode("a", 0, 1.0), episode("a", 1, 0.0), episode("a", 2, 9.0, tokens=130))

    metrics = trainer.step([TrajectoryGroup(members)])

    assert metrics["dropped/rows_too_long"] == 1
    assert metrics["updates"] == 1


def test_an_unknown_kl_leaves_a_member_out_of_the_statistics():
    options = {"beta": 0.5, "kl_in": "reward", "scale_rewards": "none"}
    members = (episode("a", 0, 1.0), episode("a", 1, 0.0), episode("a", 2, 9.0, tokens=130))

    with_long = trainer_of(tiny_gpt2(), **options).grpo.batch([TrajectoryGroup(members)])
    without = trainer_of(tiny_gpt2(), **options).grpo.batch([TrajectoryGroup(members[:2])])

    ours, truth = ([row.advantages_n.tolist() for row in batch.rows] for batch in (with_long, without))
    assert ours == truth


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_tokens_of_another_tokenizer_are_refused_wherever_the_kl_is(kl_in):
    trainer = trainer_of(tiny_gpt2(), beta=0.5, kl_in=kl_in)
    members = (episode("a", 0, 1.0), episode("a", 1, 0.0, top=500))

    with pytest.raises(UsageError, match="outside the model's vocabulary of 61"):
        trainer.step([TrajectoryGroup(members)])
