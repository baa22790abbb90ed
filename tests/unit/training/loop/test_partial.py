"""Partial rollouts: episodes go on in later steps, with the tokens and versions of those that sampled them."""

from __future__ import annotations

import string

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import agentenv as ae
from agentenv.core import StopReason, TrainingFailed, UsageError
from agentenv.envs import Env, EnvSpec
from agentenv.render import byte_tokenizer
from agentenv.training import GRPOConfig, GRPOTrainer


class Talk(Env):
    """Some turns, each rewarded by its length, so that a random model's groups differ."""

    scored = 0

    def reset(self, *, seed=None, options=None):
        self.told = 0
        return f"say {self.task['n']}", {}

    def step(self, action: str):
        self.told += 1
        last = self.told == self.task["turns"]
        return f"more {self.np_random.integers(100)}", len(action) / 10, last, False, {}

    def finish(self, stop_reason: str) -> float:
        Talk.scored += 1
        return 0.0


TASKS = [{"n": 1, "turns": 1}, {"n": 2, "turns": 5}, {"n": 3, "turns": 2}, {"n": 4, "turns": 3}]


def make_trainer(path, *, env=Talk, tasks=TASKS, rollout=None, runner=None, **settings):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, initializer_range=0.2, **shape)).eval()
    options = {"groups_per_step": 2, "num_generations": 2, "learning_rate": 0.01, "max_steps": 5}
    options["stop"] = tuple(string.ascii_letters)  # random weights would hardly end a turn otherwise
    kept = []
    trainer = GRPOTrainer(
        GRPOConfig(output_dir=str(path), **{**options, "partial_turns": 2, **settings}),
        model=model,
        tokenizer=byte_tokenizer(),
        envs=EnvSpec.of("test/Talk-v0", env, tasks=list(tasks)),
        limits=ae.RunLimits(max_tokens_per_turn=300),
        runner=runner,
        rollout=rollout,
        on_trajectory=kept.append,
    )
    return trainer, kept


def test_an_unfinished_episode_goes_on_with_the_next_weights(tmp_path):
    trainer, kept = make_trainer(tmp_path)
    Talk.scored = 0

    history = trainer.train()

    assert all(one.stop_reason is StopReason.ENV_TERMINATED for one in kept)
    assert len({(one.group_id, one.member) for one in kept}) == len(kept) == Talk.scored
    long = [one for one in kept if one.task["turns"] == 5]
    assert long
    for one in long:
        spans = [span for span in one.sequences[0].spans if span.source == "model"]
        versions = {span.turn: span.weights_version for span in spans}
        first = versions[0]
        # Two turns in a step, and each step changed the weights once.
        assert [versions[turn] - first for turn in range(5)] == [0, 0, 1, 1, 2]
        assert one.reward == pytest.approx(sum(one.turn_rewards))
        assert all(one.turn_rewards[-3:])
        assert (one.branch_of, one.shared_turns) == (None, 0)
    assert [step["updates"] for step in history] == [1.0] * 5
    assert max(step["staleness/max"] for step in history) == 2
    assert history[0]["partial/paused"] == 2
    assert max(step["mismatch/abs_max"] for step in history if step["staleness/max"] == 0) < 1e-4


def test_older_turns_are_masked_where_one_chooses(tmp_path):
    trainer, kept = make_trainer(tmp_path, max_token_staleness=0)

    history = trainer.train()

    stale = sum(
        len(span)
        for one in kept
        for span in one.sequences[0].spans
        if span.trained and span.weights_version < max(one.weights_versions)
    )
    assert sum(step["tokens/stale"] for step in history) == stale > 0
    assert all(step["staleness/max"] == 0 or step["tokens/stale"] > 0 for step in history)


def test_what_is_trained_with_one_version_does_not_depend_on_the_slices(tmp_path):
    """With a learning rate of almost nothing the episodes are those that are played at once."""
    whole, at_once = make_trainer(tmp_path / "a", partial_turns=None, learning_rate=1e-30, max_steps=2)
    sliced, in_parts = make_trainer(tmp_path / "b", partial_turns=1, learning_rate=1e-30, max_steps=8)

    whole.train()
    sliced.train()

    first = {one.task_id: one for one in at_once if one.member == 0 and "@1" in one.group_id}
    same = {one.task_id: one for one in in_parts if one.member == 0 and "@1" in one.group_id}
    assert first.keys() == same.keys()
    for task_id, one in first.items():
        assert same[task_id].messages == one.messages
        assert same[task_id].sequences[0].token_ids == one.sequences[0].token_ids
        assert same[task_id].sequences[0].loss_mask == one.sequences[0].loss_mask
        assert same[task_id].reward == pytest.approx(one.reward)


def test_a_resumed_run_goes_on_inside_its_episodes(tmp_path):
    options = {"old_logprobs": "recompute", "max_steps": 4}
    whole, at_once = make_trainer(tmp_path / "a", **options)
    whole.train()

    begun, before = make_trainer(tmp_path / "b", **{**options, "max_steps": 2})
    begun.train()
    saved = begun.save(tmp_path / "b" / "checkpoint")
    resumed, after = make_trainer(tmp_path / "b", **options)
    resumed.resume(saved)
    assert any(
        one.stop_reason is StopReason.PAUSED for group in resumed.place.unfinished for one in group.members
    )
    resumed.train()

    told = [(one.group_id, one.member, one.weights_versions, one.sequences[0].token_ids) for one in at_once]
    again = [
        (one.group_id, one.member, one.weights_versions, one.sequences[0].token_ids) for one in before + after
    ]
    assert sorted(again) == sorted(told)
    for left, right in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(left, right)

    other, _ = make_trainer(tmp_path / "c", **options, partial_turns=None)
    other.resume(saved)
    with pytest.raises(UsageError, match="groups with unfinished episodes"):
        other.train()
    changed, _ = make_trainer(tmp_path / "d", **options, tasks=[{"n": 9, "turns": 3}])
    changed.resume(saved)
    with pytest.raises(UsageError, match="which this run does not deal"):
        changed.train()


def test_an_environment_that_answers_differently_aborts_its_episodes(tmp_path):
    class Chance(Talk):
        starts = 0

        def reset(self, *, seed=None, options=None):
            Chance.starts += 1
            super().reset()
            return f"start {Chance.starts}", {}

    trainer, kept = make_trainer(tmp_path, env=Chance, tasks=TASKS[1:2], groups_per_step=1)

    with pytest.raises(TrainingFailed, match="is not the recorded one"):
        trainer.train()

    assert {one.stop_reason for one in kept} == {StopReason.ABORTED}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_ahead": 1}, "max_ahead=1"),
        ({"asynchronous": True}, "asynchronous=True"),
        ({"refill_rounds": 1}, "refill_rounds=1"),
        ({"branches": 2}, "branches=2"),
        ({"workers": 2, "engine": "http://localhost:1/v1"}, "workers=2"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings, said):
    with pytest.raises(UsageError, match=f"partial_turns=2 cannot be combined with {said}"):
        GRPOConfig(partial_turns=2, **settings)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout": lambda play: play()}, "a rollout function"),
        ({"runner": ae.RunnerOptions(group_policy=ae.GroupPolicy(on_failed="refill"))}, "a group policy"),
    ],
    ids=["rollout", "policy"],
)
def test_parts_that_play_groups_otherwise_are_refused(tmp_path, given, said):
    trainer, _ = make_trainer(tmp_path, **given)

    with pytest.raises(UsageError, match=said):
        trainer.train()
