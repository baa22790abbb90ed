"""What a step notes of each episode: against the model's own logits, and what the loss was given."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2LMHeadModel

from agentenv.core import EpisodeError, SequenceBuilder, StopReason, Trajectory, TrajectoryGroup, Turn
from agentenv.training import Callbacks, GRPOConfig, GRPOTrainer
from helpers.training import tiny_gpt2


def sequence(seed: int, turns: range):
    draw = torch.Generator().manual_seed(seed)
    builder = SequenceBuilder()
    builder.append("prompt", [1, 2, 3])
    for turn in turns:
        sampled = torch.randint(0, 61, (4,), generator=draw).tolist()
        builder.append("model", sampled, logprobs=[-3.0] * 4, weights_version=0, turn=turn)
        builder.append("env", [5, 6], turn=turn)
    return builder.freeze()


def episode(
    member: int, reward: float | None, *, task: str = "a", contexts: int = 1, turns: int = 1
) -> Trajectory:
    """Turns of four sampled tokens, the same number in each context."""
    said = {"role": "assistant", "content": "x"}
    lost = EpisodeError("engine", "EngineUnavailable", "503") if reward is None else None
    parts = [range(first, first + turns) for first in range(0, contexts * turns, turns)]
    return Trajectory(
        env_id="demo/A-v0",
        task_id=task,
        seed=0,
        group_id=task,
        member=member,
        stop_reason=StopReason.ABORTED if lost else StopReason.FINAL_ANSWER,
        sequences=tuple(sequence(member * 10 + part.start, part) for part in parts),
        turns=tuple(
            Turn(turn, said, "stop", 4, sequence=number, start=3 + 6 * place, reward=(reward or 0.0) / turns)
            for number, part in enumerate(parts)
            for place, turn in enumerate(part)
        ),
        reward=reward,
        error=lost,
        untrainable_reason="aborted" if lost else "",
    )


def noted(groups: list[TrajectoryGroup], **settings) -> tuple[GPT2LMHeadModel, dict[tuple[str, int], dict]]:
    """Train one step; return the model as it was and the notes by group and member."""
    found: dict[tuple[str, int], dict] = {}
    own = tiny_gpt2()
    trainer = GRPOTrainer(
        GRPOConfig(dtype="float64", packing="padded", num_generations=2, **settings),
        model=copy.deepcopy(own),
        callbacks=Callbacks(
            on_trained=lambda one, note: found.update({(one.group_id, one.member): dict(note)})
        ),
    )
    trainer.step(groups)
    return own, found


def test_tokens_have_the_models_own_logprob_and_entropy():
    one = episode(0, 1.0)
    before, notes = noted([TrajectoryGroup((one, episode(1, 0.0)))])
    ids = one.sequences[0].token_ids
    with torch.no_grad():
        scores = torch.log_softmax(before(torch.tensor([ids])).logits[0], -1)
    entropies = -(scores.exp() * scores).sum(-1)

    note = notes["a", 0]

    assert note["step"] == 1
    for place, trained in enumerate(one.sequences[0].loss_mask):
        new = float(scores[place - 1, ids[place]]) if trained else 0.0
        entropy = float(entropies[place - 1]) if trained else 0.0
        assert note["new_logprobs"][place] == pytest.approx(new, abs=1e-4)
        assert note["entropy"][place] == pytest.approx(entropy, abs=1e-4)


def test_advantages_are_those_of_the_loss_also_in_groups_without_a_gradient():
    groups = [
        TrajectoryGroup((episode(0, 1.0), episode(1, 0.0), episode(2, None))),
        TrajectoryGroup((episode(0, 1.0, task="b"), episode(1, 1.0, task="b"))),
    ]
    _, notes = noted(groups, scale_rewards="none")

    assert [notes["a", member]["advantage"] for member in range(3)] == [0.5, -0.5, None]
    assert notes["b", 0] == {"step": 1, "advantage": 0.0}


def test_each_context_of_an_episode_has_its_own_numbers():
    one = episode(0, 1.0, contexts=2)
    _, notes = noted([TrajectoryGroup((one, episode(1, 0.0)))])
    mask = [trained for part in one.sequences for trained in part.loss_mask]

    entropy = notes["a", 0]["entropy"]

    assert len(entropy) == len(mask)
    assert [value > 0 for value in entropy] == mask


def test_turns_with_their_own_credit_are_noted_token_by_token():
    group = TrajectoryGroup((episode(0, 1.0, turns=2), episode(1, 0.0, turns=2)))
    _, notes = noted([group], turn_discount=1.0, scale_rewards="none")
    turn_of = group.trajectories[0].sequences[0].turn_index

    note = notes["a", 0]
    first, second = (note["advantages"][turn_of.index(turn)] for turn in (0, 1))

    assert len(note["advantages"]) == len(turn_of)
    assert first != second
    assert note["advantage"] == pytest.approx((first + second) / 2)
