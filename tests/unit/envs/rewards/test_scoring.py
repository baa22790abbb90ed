"""Rewards of groups, and of stored episodes."""

import asyncio
import math

import numpy as np
import pytest

from agentenv.core import EpisodeError, StopReason, Trajectory, TrajectoryGroup, Turn, UsageError
from agentenv.envs.gym_values import outcome_of
from agentenv.envs.rewards import GroupReward, Reward, rescore, score_group
from agentenv.envs.rewards.reward import as_reward


def played(answer, reward=1.0, stop=StopReason.FINAL_ANSWER, member=0):
    failed = stop.failed
    turns = (
        Turn(0, {"role": "assistant", "content": "hm"}, "stop", 0, reward=0.25),
        Turn(1, {"role": "assistant", "content": answer}, "stop", 0, reward=reward - 0.25),
    )
    return Trajectory(
        env_id="d/E-v0",
        task_id="t",
        seed=1,
        group_id="g",
        stop_reason=stop,
        member=member,
        turns=turns,
        messages=({"role": "user", "content": "go"}, turns[1].message),
        reward=None if failed else reward,
        task={"target": "b"},
        error=EpisodeError("env", "E", "e") if failed else None,
        untrainable_reason="failed" if failed else "",
    )


def group(*members):
    return TrajectoryGroup(tuple(members))


async def test_group_rewards_compare_the_members_and_keep_the_sums():
    def longest(answers):
        return [float(len(one) == max(map(len, answers))) for one in answers]

    members = group(played("a"), played("bbb"))
    scored = await score_group(members, [GroupReward(longest, weight=2.0)])
    unscored = await score_group(members, [GroupReward(lambda rewards: [None, 1.0])])

    assert [one.reward for one in scored] == [1.0, 3.0]
    assert [sum(one.turn_rewards) for one in scored] == [1.0, 3.0]
    assert [one.rewards for one in scored] == [{"longest": 0.0}, {"longest": 1.0}]
    assert [one.reward for one in unscored] == [None, 2.0]


async def test_group_rewards_do_not_see_episodes_that_failed():
    async def count(trajectories, task, target):
        assert task == {"target": target}
        return [float(len(trajectories))] * len(trajectories)

    members = [played("a"), played("", stop=StopReason.ERROR), played("c")]
    scored = await score_group(group(*members), [GroupReward(count)])

    assert [one.reward for one in scored] == [3.0, None, 3.0]
    assert scored.trajectories[1] == members[1]


@pytest.mark.parametrize("given", [[1.0], 3.0, "ab", [math.nan, 1.0], {"a": 1, "b": 2}])
async def test_a_group_reward_of_the_wrong_shape_is_refused(given):
    with pytest.raises(UsageError, match="group reward"):
        await score_group(group(played("a"), played("b")), [GroupReward(lambda answers: given)])


async def test_rescoring_replaces_the_reward_and_keeps_the_sums():
    def right(answer, target):
        return answer == target

    again = await rescore(played("b", reward=0.5), [right, (lambda stop_reason: 1.0, 0.5)])

    assert again.reward == 1.5
    assert again.turn_rewards == (0.0, 1.5)
    assert again.rewards["right"] == 1.0


async def test_rescoring_leaves_failed_episodes_alone_and_refuses_what_is_gone():
    failed = played("", stop=StopReason.ABORTED)

    assert await rescore(failed, [lambda answer: 1.0]) is failed
    with pytest.raises(UsageError, match="'env'"):
        await rescore(played("b"), [lambda env: 1.0])


async def test_a_reward_that_takes_too_long_times_out():
    async def slow(answer):
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await Reward(slow, timeout_s=0.01).score({"answer": ""}, {})


def good(answer):
    return 1.0


def test_what_a_reward_may_be_and_return():
    assert as_reward(good) == Reward(good)
    assert as_reward((good, 0.5)) == Reward(good, 0.5)
    for wrong in (3, (good, math.inf)):
        with pytest.raises(UsageError):
            as_reward(wrong)
    assert [outcome_of(value, where="r").reward for value in (True, np.float32(0.5))] == [1.0, 0.5]
    parts = outcome_of({"a": 1, "b": None}, where="r")
    assert (parts.reward, parts.rewards) == (None, {"a": 1.0, "b": None})
