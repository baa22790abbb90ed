"""Credit in groups that branch, against a tree that is built turn by turn."""

from __future__ import annotations

from math import sqrt
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import SequenceBuilder, StopReason, Trajectory, TrajectoryGroup, Turn, UsageError
from agentenv.training import GRPOConfig, group_advantages
from agentenv.training.batch import build_batch
from agentenv.training.objective import Branched, branch_advantages


def drawn(seed: int) -> list[Branched]:
    """A group of episodes that branch, and whose branches branch."""
    draw = Random(seed)
    group = [
        Branched(draw.choice([None, 0.0, 0.5, 1.0]), draw.randint(1, 5)) for _ in range(draw.randint(1, 3))
    ]
    for _ in range(draw.randint(0, 6)):
        parent = draw.randrange(len(group))
        if group[parent].turns < 2:
            continue
        shared = draw.randint(1, group[parent].turns - 1)
        reward = draw.choice([None, 0.0, 0.25, 1.0])
        group.append(Branched(reward, shared + draw.randint(1, 3), parent, shared))
    return group


class Node:
    """One turn of the tree, and everything after it."""

    def __init__(self) -> None:
        self.children: dict[tuple[int, int], Node] = {}
        self.reward: float | None = None

    def value(self) -> float | None:
        if not self.children:
            return self.reward
        known = [value for child in self.children.values() if (value := child.value()) is not None]
        return fmean(known) if known else None


def brute_force(group: list[Branched]) -> list[list[float]]:
    """Every turn is a node; a turn that is the only one to follow has the advantage of the turn before."""

    def path(index: int) -> list[tuple[int, int]]:
        """Who sampled each turn of an episode."""
        member = group[index]
        before = [] if member.parent is None else path(member.parent)[: member.shared]
        return before + [(index, turn) for turn in range(len(before), member.turns)]

    root = Node()
    for index, member in enumerate(group):
        node = root
        for turn in path(index):
            node = node.children.setdefault(turn, Node())
        node.reward = member.reward
    result = [[0.0] * member.turns for member in group]

    def visit(node: Node, before: float, first: bool) -> None:
        known = [value for child in node.children.values() if (value := child.value()) is not None]
        for (member, turn), child in node.children.items():
            own, value = before, child.value()
            if first or len(node.children) > 1:
                own = 0.0
                if len(known) > 1 and max(known) > min(known) and value is not None:
                    spread = sqrt(sum((each - fmean(known)) ** 2 for each in known) / (len(known) - 1))
                    own = (value - fmean(known)) / (spread + 0.5)
            result[member][turn] = own
            visit(child, own, first=False)

    visit(root, 0.0, first=True)
    return result


@given(st.integers(0, 10_000))
def test_each_part_is_compared_with_its_siblings(seed):
    group = drawn(seed)

    (ours,) = branch_advantages([group], eps=0.5)

    assert ours == [pytest.approx(own, abs=1e-9) for own in brute_force(group)]


def test_by_hand():
    group = [
        Branched(1.0, 3),
        Branched(0.0, 2),
        Branched(0.0, 3, parent=0, shared=1),
        Branched(0.5, 2, parent=0, shared=1),
    ]

    (ours,) = branch_advantages([group], scale_rewards="none")

    # The first turn of member 0 is worth the mean of what followed it: 0.5, against 0 of member 1.
    assert ours == [[0.25, 0.5, 0.5], [-0.25, -0.25], [0.0, -0.5, -0.5], [0.0, 0.0]]


@given(
    st.lists(st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=3)
)
def test_without_branches_the_advantages_are_those_of_the_episodes(rewards):
    trees = branch_advantages([[Branched(reward, 2) for reward in group] for group in rewards])

    assert trees == [[[value, value] for value in group] for group in group_advantages(rewards)]


def episode(
    member: int, reward: float, turns: int, branch_of: int | None = None, shared: int = 0
) -> Trajectory:
    builder, played = SequenceBuilder(), []
    builder.append("prompt", [1, 2, 3])
    for index in range(turns):
        start = len(builder)
        if index < shared:
            builder.append("other", [4, 5], turn=index)
        else:
            builder.append("model", [4, 5], logprobs=[-1.0, -1.0], weights_version=0, turn=index)
        builder.append("env", [6], turn=index)
        said = {"role": "assistant", "content": "x"}
        played.append(Turn(index, said, "stop", 2, start=start, reward=reward * (index == turns - 1)))
    return Trajectory(
        "test/E-v0", "t", 0, "g", StopReason.FINAL_ANSWER, member=member, turns=tuple(played),
        sequences=(builder.freeze(),), reward=reward, branch_of=branch_of, shared_turns=shared,
    )  # fmt: skip


def test_the_rows_have_the_advantages_of_their_turns_and_shared_turns_are_trained_once():
    members = (episode(4, 1.0, 3), episode(7, 0.0, 2), episode(9, 0.0, 3, 4, 1), episode(10, 0.5, 2, 4, 1))

    batch = build_batch([TrajectoryGroup(members)], GRPOConfig(scale_rewards="none"))

    found = [row.advantages_n.tolist()[::2] for row in batch.rows]
    assert found == [[0.25, 0.5, 0.5], [-0.25, -0.25], [-0.5, -0.5], [0.0]]
    assert [row.turns_n.tolist()[::2] for row in batch.rows] == [[0, 1, 2], [0, 1], [1, 2], [1]]


def test_branches_of_an_episode_that_is_not_there_are_compared_with_each_other():
    """As `agentenv replay --from-turn` stores them."""
    members = (episode(0, 1.0, 2, 5, 1), episode(1, 0.0, 3, 5, 1))

    batch = build_batch([TrajectoryGroup(members)], GRPOConfig(scale_rewards="none"))

    assert [row.advantages_n.tolist() for row in batch.rows] == [[0.5, 0.5], [-0.5] * 4]


def test_credit_by_branch_and_by_turn_exclude_each_other():
    with pytest.raises(UsageError, match="branches=2 gives credit by branch"):
        GRPOConfig(branches=2, advantage_level="turn")
