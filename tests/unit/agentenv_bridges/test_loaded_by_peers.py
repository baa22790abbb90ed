"""Exports with good, failed and cut members are loaded by the peers' own classes, where these are installed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from agentenv.core import EpisodeError, SequenceBuilder, StopReason, Trajectory, TrajectoryGroup, Turn
from agentenv_bridges import slime_samples, to_prime_rl


def episode(**values) -> Trajectory:
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])
    builder.append("model", [7, 7], logprobs=[-0.5, -0.25], weights_version=4, turn=0)
    turn = Turn(0, {"role": "assistant", "content": "yes"}, "stop", 2, start=3)
    return Trajectory(
        "e/E-v0",
        "t",
        0,
        "g",
        turns=(turn,),
        sequences=(builder.freeze(),),
        messages=({"role": "user", "content": "hi"}, turn.message),
        **{"stop_reason": StopReason.FINAL_ANSWER, "reward": 1.0, **values},
    )


def group() -> TrajectoryGroup:
    gone = EpisodeError("engine", "E", "gone")
    failed = {"stop_reason": StopReason.ABORTED, "error": gone, "untrainable_reason": "gone", "reward": None}
    return TrajectoryGroup(
        (episode(), episode(member=1, **failed), episode(member=2, stop_reason=StopReason.MAX_TURNS))
    )


def test_slimes_own_samples_hold_the_export_and_a_number_as_reward():
    slime = pytest.importorskip("slime.utils.types", exc_type=ImportError)
    import torch

    (rows,) = slime_samples([group()], lambda ids: "h" * len(ids))
    samples = [slime.Sample.from_dict(json.loads(json.dumps(row))) for row in rows]

    rewards = [sample.get_reward_value(SimpleNamespace(reward_key=None)) for sample in samples]
    assert torch.tensor(rewards, dtype=torch.float).tolist() == [1.0, 0.0, 1.0]
    assert [sample.remove_sample for sample in samples] == [False, True, False]
    assert [sample.status.value for sample in samples] == ["completed", "aborted", "truncated"]
    assert all(sample.response_length == len(sample.loss_mask) for sample in samples)


def test_verifiers_own_episodes_hold_the_export_for_prime_rl():
    verifiers = pytest.importorskip("verifiers.v1", exc_type=ImportError)

    rows = [json.loads(json.dumps(row)) for row in to_prime_rl(group())]
    traces = [verifiers.WireEpisode.model_validate(row).traces[0] for row in rows]

    assert [trace.reward for trace in traces] == [1.0, 0.0, 1.0]
    assert [trace.is_truncated for trace in traces] == [False, False, True]
    (branch,) = traces[0].branches
    assert list(branch.token_ids) == [1, 2, 3, 7, 7]
    assert [bool(one) for one in branch.sampled_mask] == [False] * 3 + [True] * 2
    assert list(branch.logprobs)[-2:] == [-0.5, -0.25]
