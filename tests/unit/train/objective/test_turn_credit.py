"""Credit for turns: exact, and blind to turns that change no reward."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import SequenceBuilder, StopReason, Trajectory, TrajectoryGroup, Turn
from agentenv.train import GRPOConfig, group_advantages
from agentenv.train.batch import build_batch
from agentenv.train.objective import turn_advantages, turn_returns

finite = st.floats(-4, 4).map(lambda value: round(value, 3))
settings = st.fixed_dictionaries(
    {
        "advantage": st.sampled_from(["grpo", "rloo"]),
        "scale_rewards": st.sampled_from(["group", "batch", "none"]),
    }
)


def pooled(returns: list[list[float]]) -> list[list[float]]:
    """The biased way, for contrast: every turn compared with the mean over all turns of the group."""
    flat = [value for own in returns for value in own]
    (values,) = group_advantages([flat])
    turns = iter(values)
    return [[next(turns) for _ in own] for own in returns]


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
    st.lists(finite, min_size=2, max_size=6), st.lists(st.integers(0, 5), min_size=6, max_size=6), settings
)
def test_turns_without_reward_before_the_end_change_no_advantage(rewards, extra, options):
    short = [[reward] for reward in rewards]
    long = [turn_returns([0.0] * more + [reward]) for more, reward in zip(extra, rewards, strict=False)]

    (plain,) = turn_advantages([short], **options)
    (padded,) = turn_advantages([long], **options)

    for (truth,), turns in zip(plain, padded, strict=True):
        assert turns == pytest.approx([truth] * len(turns), abs=1e-9, rel=1e-9)


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_policies_that_differ_only_in_extra_turns_have_equal_expected_advantage(advantage):
    random = Random(0)
    ours = {1: 0.0, 4: 0.0}
    theirs = {1: 0.0, 4: 0.0}
    rounds = 4000
    for _ in range(rounds):
        lengths = [1, 1, 4]
        returns = [turn_returns([0.0] * (n - 1) + [float(random.random() < 0.3)]) for n in lengths]
        (fair,) = turn_advantages([returns], advantage=advantage)
        for values, total in ((fair, ours), (pooled(returns), theirs)):
            total[1] += (values[0][0] + values[1][0]) / 2 / rounds
            total[4] += values[2][0] / rounds

    assert abs(ours[1] - ours[4]) < 0.03
    assert abs(theirs[1] - theirs[4]) > 0.05  # the control: a mean over turns does favour one of them


def test_every_token_gets_the_advantage_of_its_turn():
    group = TrajectoryGroup((played([0.1, 0.0, 1.0]), played([0.0], member=1)))
    config = GRPOConfig(advantage_level="turn", advantage="rloo", scale_rewards="none", turn_discount=0.5)

    batch = build_batch([group], config)

    first, second = (row.advantages_n.tolist() for row in batch.rows)
    assert first == pytest.approx([0.35, 0.35, 0.5, 0.5, 1.0, 1.0])
    assert second == pytest.approx([-0.35, -0.35])


def test_a_penalty_on_the_episode_lands_on_its_last_turn():
    group = TrajectoryGroup((played([0.0, 2.0]), played([0.0], member=1)))
    config = GRPOConfig(
        advantage_level="turn",
        advantage="rloo",
        scale_rewards="none",
        overlong_penalty_tokens=2,
        max_completion_length=4,
    )

    rows = build_batch([group], config).rows

    assert [row.advantages_n.tolist() for row in rows] == [[1.0] * 4, [-1.0] * 2]


def test_an_unscored_member_counts_nowhere():
    (values,) = turn_advantages([[[1.0, 1.0], None, [0.0]]], scale_rewards="none")
    assert values == [[0.5, 0.5], [], [-0.5]]
