"""A rollout function plays the groups of a step, with the weights versions of the training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentenv.core import (
    SequenceBuilder,
    StopReason,
    TrainingFailed,
    Trajectory,
    TrajectoryGroup,
    Turn,
    UsageError,
)
from agentenv.core.loops import run_blocking
from scenes import groups_of, trainer
from scenes import runner as scripted


def make_trainer(tmp_path, rollout, **settings):
    kept = []
    options = {"num_generations": 4, "max_steps": 2, **settings}
    return trainer(tmp_path, rollout=rollout, on_trajectory=kept.append, **options), kept


async def from_tokens(engine, renderer, tasks, group_ids, group_size, sampling):
    """Sample one answer for each episode, and record it without any weights version."""
    groups = []
    for task, group_id in zip(tasks, group_ids, strict=True):
        prompt = renderer.start([{"role": "user", "content": f"say {task.data['n']}"}])
        members = []
        for member in range(group_size):
            done = await engine.generate(
                prompt, replace(sampling, max_tokens=4), stop_token_ids=renderer.stop_token_ids
            )
            builder = SequenceBuilder()
            builder.append("prompt", prompt)
            builder.append("model", done.token_ids, logprobs=done.logprobs, turn=0)
            said = renderer.parse(done.token_ids).message
            turn = Turn(0, said, done.finish_reason, len(done.token_ids), start=len(prompt))
            members.append(
                Trajectory(
                    *("test/Lengths-v0", task.id, 0, group_id, StopReason.FINAL_ANSWER),
                    task=task.data,
                    member=member,
                    reward=float(member % 2),
                    turns=(turn,),
                    sequences=(builder.freeze(),),
                )
            )
        groups.append(TrajectoryGroup(tuple(members)))
    return groups


def test_a_rollout_from_tokens_trains_with_the_right_weights_versions(tmp_path):
    training, kept = make_trainer(tmp_path, from_tokens)

    history = training.train()

    assert [one.weights_versions for one in kept] == [(0,)] * 8 + [(1,)] * 8
    assert len({one.group_id for one in kept}) == 4
    assert [step["updates"] for step in history] == [1, 1]
    assert all(step["staleness/max"] == 0 and step["mismatch/k3"] < 1e-6 for step in history)
    assert training.cursors == {"test/Lengths-v0": 4}


def test_a_rollout_may_play_as_the_training_would_and_choose(tmp_path):
    async def chosen(play, group_size):
        groups = await play(group_size=2 * group_size)
        return [TrajectoryGroup(group.trajectories[::2]) for group in groups]

    training, kept = make_trainer(tmp_path, chosen, max_steps=1)
    plain, played = make_trainer(tmp_path, None, max_steps=1)

    training.train()
    plain.train()

    assert [one.member for one in kept] == [0, 2, 4, 6] * 2
    same = {(one.group_id, one.member): one.sequences[0].token_ids for one in played}
    assert all(same[one.group_id, one.member] == one.sequences[0].token_ids for one in kept if one.member < 4)


def test_a_rollout_that_is_not_asynchronous_runs_beside_the_event_loop(tmp_path):
    lent = []

    def blocking(tasks, spec, group_size):
        lent.append(len(tasks))
        lines = ["one", "three", "fifteen", "seventeen"]
        own = scripted(lines, max_turns=1, max_tokens_per_turn=4)
        return run_blocking(groups_of(own, spec, tasks, group_size))

    training, kept = make_trainer(tmp_path, blocking, max_steps=1)

    history = training.train()

    assert lent == [2]
    assert len(kept) == history[0]["episodes"] == 8


@pytest.mark.parametrize(
    ("rollout", "said"),
    [(lambda tasks: [1], "returned 1, a int and not a group"), (lambda tasks: None, "returned None")],
    ids=["other", "none"],
)
def test_what_is_no_group_is_refused(tmp_path, rollout, said):
    training, _ = make_trainer(tmp_path, rollout)

    with pytest.raises(UsageError, match=said):
        training.train()


@pytest.mark.parametrize("max_ahead", [0, 1])
def test_a_rollout_that_never_returns_an_episode_fails_at_the_end(tmp_path, max_ahead):
    training, _ = make_trainer(tmp_path, lambda tasks: [], max_ahead=max_ahead)

    with pytest.raises(TrainingFailed, match="none of 2 steps was given an episode"):
        training.train()


def test_a_parameter_that_no_request_has_is_refused_at_once(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'engine'"):
        make_trainer(tmp_path, lambda engin: [])
    with pytest.raises(UsageError, match="rollout"):
        make_trainer(tmp_path, "no_such_module_here:play")
