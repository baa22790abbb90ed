"""A training branches inside its groups, and trains each sampled token once."""

from __future__ import annotations

import string

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import agentenv as ae
from agentenv.core import TrajectoryGroup
from agentenv.envs import Env, EnvSpec
from agentenv.render import byte_tokenizer
from agentenv.training import GRPOConfig, GRPOTrainer


class Talk(Env):
    """Three turns; each is rewarded by its length, so that a random model's branches differ."""

    def reset(self, *, seed=None, options=None):
        self.told = 0
        return f"say {self.task['n']}", {}

    def step(self, action: str):
        self.told += 1
        return "more", len(action) / 10, self.told == self.task.get("turns", 3), False, {}


def make_trainer(tmp_path, tasks=({"n": 1}, {"n": 2}), rollout=None, **settings):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, initializer_range=0.2, **shape)).eval()
    options = {"groups_per_step": 2, "num_generations": 2, "learning_rate": 0.01, "max_steps": 1}
    options["stop"] = tuple(string.ascii_letters)  # random weights would hardly end a turn otherwise
    kept, noted = [], []
    trainer = GRPOTrainer(
        GRPOConfig(output_dir=str(tmp_path), **{**options, "branches": 2, **settings}),
        model=model,
        tokenizer=byte_tokenizer(),
        envs=EnvSpec.of("test/Talk-v0", Talk, tasks=list(tasks)),
        limits=ae.RunLimits(max_tokens_per_turn=300),
        rollout=rollout,
        on_trajectory=kept.append,
        on_trained=lambda one, note: noted.append((one.group_id, one.member)),
    )
    return trainer, kept, noted


def grouped(kept) -> list[TrajectoryGroup]:
    ids = sorted({one.group_id for one in kept})
    members = [
        sorted((one for one in kept if one.group_id == name), key=lambda one: one.member) for name in ids
    ]
    return [TrajectoryGroup(tuple(each)) for each in members]


def sampled(one) -> list[tuple[int, tuple[int, ...]]]:
    return [(span.turn, span.token_ids) for seq in one.sequences for span in seq.spans if span.trained]


def test_members_branch_and_no_token_is_trained_twice(tmp_path):
    trainer, kept, noted = make_trainer(tmp_path)

    (metrics,) = trainer.train()

    groups = grouped(kept)
    assert [[one.branch_of for one in group] for group in groups] == [[None, None, 0, 0, 1, 1]] * 2
    assert [one.member for one in groups[0]] == list(range(6))
    for group in groups:
        for one in group:
            turns = {turn for turn, _ in sampled(one)}
            assert turns == ({0, 1, 2} if one.branch_of is None else {1, 2})
            if one.branch_of is not None:
                root = group[one.branch_of]
                start = root.turns[1].start
                assert one.shared_turns == 1
                assert one.sequences[0].token_ids[:start] == root.sequences[0].token_ids[:start]
                assert one.turns[0].reward == root.turns[0].reward
                assert one.sequences[0].token_ids != root.sequences[0].token_ids
    everything = [len(ids) for one in kept for _, ids in sampled(one)]
    assert metrics["tokens/trained"] == sum(everything)
    assert metrics["episodes"] == 12
    assert metrics["branch_episodes"] == 8
    assert sorted(noted) == sorted((one.group_id, one.member) for one in kept)


def test_only_the_named_number_of_members_with_such_a_turn_is_branched(tmp_path):
    trainer, kept, _ = make_trainer(
        tmp_path, [{"n": 1, "turns": 1}, {"n": 2}], branch_members=1, branch_turn=2, branches=1
    )

    trainer.train()

    short, long = sorted(grouped(kept), key=len)
    assert [one.branch_of for one in short] == [None, None]
    assert [(one.branch_of, one.shared_turns) for one in long] == [(None, 0), (None, 0), (0, 2)]


def test_a_group_of_one_can_train_with_branches(tmp_path):
    trainer, kept, _ = make_trainer(tmp_path, num_generations=1, branches=3)

    (metrics,) = trainer.train()

    assert metrics["updates"] == 1
    rows = trainer.grpo.batch(grouped(kept)).rows
    assert all(not row.advantages_n[row.turns_n == 0].any() for row in rows)


def test_a_rollout_of_ones_own_gets_the_branches_with_play(tmp_path):
    lent = []

    async def own(play):
        lent.extend(await play())
        return lent

    trainer, kept, _ = make_trainer(tmp_path, rollout=own)

    trainer.train()

    assert [len(group) for group in lent] == [6, 6]
    assert len(kept) == 12


def test_the_groups_of_a_stream_branch_too(tmp_path):
    trainer, kept, _ = make_trainer(tmp_path, max_ahead=1, max_steps=2, groups_per_step=1)

    history = trainer.train()

    assert [step["branch_episodes"] for step in history] == [4, 4]
    assert all(one.shared_turns == 1 for one in kept if one.branch_of is not None)
    assert all({turn for turn, _ in sampled(one)} == {1, 2} for one in kept if one.branch_of is not None)
