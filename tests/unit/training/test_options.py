"""The options of a run: KL and its reference, LoRA, corrections, filters, schedules, the user's own functions."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel

import agentenv as ae
from agentenv.core import StopReason, TokenSequence, TokenSpan, TrajectoryGroup, UsageError
from agentenv.core.settings import build, parse_pairs
from agentenv.training import GRPOConfig, GRPOTrainer, LoraOptions, group_advantages
from agentenv.training.batch import TrainBatch, add_demonstrations, build_batch
from agentenv.training.learners.torch.passes import score_rows
from agentenv.training.objective import correction_weights, overlong_penalty, turn_returns
from agentenv.training.objective.loss import SURROGATES
from agentenv.training.options.loss import REDUCTION_OF
from agentenv.training.step import assign_weights, learning_rate, minibatches
from helpers.training import episode, group, loss_of, make_row, tiny, trainer_of

rewards = st.lists(st.one_of(st.none(), st.floats(-5, 5)), min_size=2, max_size=9)


@given(rewards)
def test_advantages_are_the_textbook_ones(values):
    known = [value for value in values if value is not None]
    (ours,) = group_advantages([values])
    (loo,) = group_advantages([values], advantage="rloo", scale_rewards="none")
    if len(known) < 2 or max(known) - min(known) <= 1e-8:
        assert not any(ours)
        return
    r = torch.tensor(known, dtype=torch.float64)
    truth = iter(((r - r.mean()) / (r.std() + 1e-4)).tolist())
    others = iter([value - (sum(known) - value) / (len(known) - 1) for value in known])
    assert ours == pytest.approx([0.0 if value is None else next(truth) for value in values], abs=1e-9)
    assert loo == pytest.approx([0.0 if value is None else next(others) for value in values], abs=1e-9)


def test_batch_scale_divides_by_the_spread_of_the_whole_batch():
    values = group_advantages([[0.0, 1.0], [0.0, 3.0]], scale_rewards="batch")
    std = torch.tensor([0.0, 1.0, 0.0, 3.0], dtype=torch.float64).std().item()
    assert values[1] == pytest.approx([-1.5 / (std + 1e-4), 1.5 / (std + 1e-4)])
    assert values[1:] == group_advantages(
        [[0.0, 3.0]], scale_rewards="batch", gather=lambda own: [0.0, 1.0, *own]
    )


def test_groups_count_as_all_good_or_all_bad_by_their_last_member_too():
    rewards = ([1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.5, 0.0])

    metrics = build_batch([group(f"{n}", own) for n, own in enumerate(rewards)], GRPOConfig()).metrics

    assert (metrics["groups/frac_all_good"], metrics["groups/frac_all_bad"]) == (2 / 5, 1 / 5)


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (150, -1.0)])
def test_overlong_penalty_falls_linearly(tokens, penalty):
    assert overlong_penalty(tokens, max_tokens=100, cache_tokens=20) == pytest.approx(penalty)


def test_turn_returns_are_discounted_sums_of_what_follows():
    assert turn_returns([1.0, 0.0, 2.0], discount=0.5) == [1.5, 1.0, 2.0]


def test_every_loss_type_has_a_surrogate_and_a_reduction():
    assert SURROGATES.keys() == REDUCTION_OF.keys()


PER_TOKEN, PER_EPISODE = [1 / 4, 1 / 4, 1 / 4], [1 / 3, 1 / 6, 1 / 3]


@pytest.mark.parametrize(
    ("loss_type", "weights"),
    [
        ("dapo", PER_TOKEN),
        ("grpo", PER_EPISODE),
        ("dr_grpo", [1 / 30, 1 / 30, 1 / 30]),
        ("prompt_mean", [1 / 6, 1 / 6, 1 / 2]),
        ("cispo", PER_TOKEN),
        ("sapo", PER_EPISODE),
        ("reinforce", PER_TOKEN),
        ("dppo", PER_TOKEN),
        ("gmpo", PER_EPISODE),
        ("gpg", PER_TOKEN),
    ],
)
def test_each_loss_type_weighs_tokens_as_it_was_published(loss_type, weights):
    rows = [make_row([1] * 9, trained, place) for trained, place in (([1], 0), ([1, 2], 0), ([1], 1))]
    rows = [replace(row, episode=number) for number, row in enumerate(rows)]

    rows = assign_weights(rows, GRPOConfig(loss_type=loss_type, max_completion_length=10))

    assert [row.weight for row in rows] == pytest.approx(weights)


GROUPS = [group(f"task {number}", [0.0, 1.0]) for number in range(6)]


def rows_of(numbers):
    return [make_row([1, 2], [1], number) for number in numbers]


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=20), st.integers(1, 4), st.integers(0, 100))
def test_minibatches_hold_every_row_once_and_whole_groups(numbers, count, seed):
    rows = rows_of(numbers)

    parts = minibatches(rows, GROUPS, count, order=Random(seed))

    assert len(parts) == min(count, len(set(numbers)))
    assert sorted(index for part in parts for index in part) == list(range(len(rows)))
    homes = [number for part in parts for number in {rows[index].group for index in part}]
    assert sorted(homes) == sorted(set(numbers))


@given(st.lists(st.integers(-1, 5), max_size=20), st.data(), st.integers(1, 4), st.integers(0, 100))
def test_no_split_over_processes_changes_a_minibatch(numbers, data, count, seed):
    split = data.draw(st.integers(0, len(numbers)))
    names = [GROUPS[number].group_id if number >= 0 else "" for number in numbers]

    def dealt(mine: list[int], **options) -> list[list[int]]:
        parts = minibatches(rows_of(mine), GROUPS, count, order=Random(seed), **options)
        return [[mine[index] for index in part] for part in parts]

    first, second = (dealt(mine, gather=lambda _: names) for mine in (numbers[:split], numbers[split:]))

    both = [sorted([*one, *other]) for one, other in zip(first, second, strict=True)]
    assert both == [sorted(part) for part in dealt(numbers)]


def test_the_order_of_minibatches_is_drawn():
    rows = rows_of(range(4))

    def first(seed: int) -> int:
        return rows[minibatches(rows, GROUPS, 4, order=Random(seed))[0][0]].group

    assert {first(seed) for seed in range(40)} == {0, 1, 2, 3}
    assert [first(seed) for seed in range(40)] == [first(seed) for seed in range(40)]


def test_delta_bounds_the_loss_of_a_negative_advantage_as_a_dual_clip_does():
    lp, old = torch.tensor([0.0], requires_grad=True), torch.tensor([-3.0])

    loss = loss_of(lp, old, torch.tensor([-1.0]), delta=3.0).loss
    loss.backward()

    assert (loss.item(), lp.grad.item()) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [0.9, 2.0, 0.1, 1.5]),
        ("token_mask", [0.9, 0.0, 0.0, 1.5]),
        ("sequence_truncate", [2.0, 2.0, 0.15, 0.15]),
        ("sequence_mask", [0.0, 0.0, 0.0, 0.0]),
        (None, [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_corrections_by_hand(mode, expected):
    rho = torch.tensor([0.9, 5.0, 0.1, 1.5], dtype=torch.float64)
    config = GRPOConfig(importance_correction=mode, importance_cap=2.0, old_logprobs="recompute")
    values = correction_weights(rho.log(), torch.zeros_like(rho), torch.tensor([0, 0, 1, 1]), config)
    assert values.tolist() == pytest.approx(expected)


def test_opsm_drops_a_bad_sequence_that_the_policy_has_left():
    lp = torch.tensor([-3.0, -3.0, -1.0, -3.0, -3.0], requires_grad=True)
    old, advantages = torch.tensor([-1.0, -2.0, -1.0, -1.0, -2.0]), torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0])

    ids = torch.tensor([0, 0, 1, 2, 2])
    output = loss_of(lp, old, advantages, sequence_ids=ids, off_policy_mask_threshold=0.5)
    output.loss.backward()

    assert output.sums["importance/frac_dropped"].item() == 2
    assert lp.grad[:2].abs().sum().item() == 0.0
    assert lp.grad[3:].abs().sum().item() > 0.0


SERVED = {"loss_type": "distill", "teacher": "http://t:1"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epsilon": 1.5}, "epsilon must be 0 or more and below 1"),
        ({"delta": 1.1}, "delta must be above"),
        ({"importance_correction": "token_mask"}, "no effect with old_logprobs='sampler'"),
        ({"loss_type": "dr_grpo"}, "needs max_completion_length"),
        ({"overlong_penalty_tokens": 5}, "needs max_completion_length"),
        ({"importance_sampling_level": "sequence"}, "GSPO"),
        ({"learning_rate": 0.0}, "learning_rate must be more than 0"),
        ({"learning_rate": math.nan}, "must be finite"),
        ({"loss_type": "ppo"}, "unknown loss_type"),
        ({"kl_in": "rewards"}, "unknown kl_in 'rewards'; did you mean 'reward'"),
        ({"reduction": "mean"}, "unknown reduction 'mean'"),
        ({"old_logprobs": "recomputed"}, "did you mean 'recompute'"),
        ({"importance_correction": "token"}, "unknown importance_correction"),
        ({"lr_scheduler_type": "cosin"}, "did you mean 'cosine'"),
        ({"beta": -1.0}, "beta must be finite and 0 or more"),
        ({"importance_cap": 1.0}, "importance_cap must be more than 1"),
        ({"refill_rounds": -2}, "refill_rounds must be 0 or more"),
        ({"eval_tasks": -1}, "eval_tasks must be 0 or more"),
        ({"save_total_limit": -1}, "save_total_limit must be 0 or more"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or more"),
        ({"turn_discount": -0.5}, "turn_discount must be 0 or more"),
        ({"adam_beta1": 2.0}, "adam_beta1 must be 0 or more and below 1, not 2.0"),
        ({"adam_beta2": 1.0}, "adam_beta2 must be 0 or more and below 1"),
        ({"max_completion_length": 0}, "max_completion_length must be at least 1"),
        ({"overlong_penalty_tokens": -1}, "overlong_penalty_tokens must be 0 or more"),
        ({"overlong_penalty_tokens": 6, "max_completion_length": 5}, "at most max_completion_length = 5"),
        ({"groups_per_step": 1.5}, "groups_per_step must be a whole number, not 1.5"),
        ({"max_steps": None}, "max_steps must be a whole number, not None"),
        ({"learning_rate": "1e-5"}, "learning_rate must be a number, not '1e-5'"),
        ({"fsdp": 1}, "fsdp must be true, false or the number of processes .*, at least 2, not 1"),
        *(({"fsdp": wrong}, f"at least 2, not {wrong!r}") for wrong in (0, -4, 2.5, "two")),
        ({"loss_type": "reinforce", "epsilon": 0.2}, "epsilon=0.2 has no effect with loss_type='reinforce'"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "bounds the ratio itself, so epsilon_high=0.28"),
        ({"loss_type": "gmpo", "delta": 3.0}, "delta=3 has no effect with loss_type='gmpo'"),
        ({"beta": 0.1, "kl_in": "reward", "use_bias_correction_kl": True}, "without a KL term in the loss"),
        ({"use_bias_correction_kl": True}, "without a KL term in the loss"),
        ({"temperature": 0.0}, "greedy samples have no gradient"),
        ({"num_generations_eval": 4}, "eval_temperature is 0"),
        ({"tokens_per_micro_batch": 0}, "tokens_per_micro_batch"),
        ({"tokens_per_micro_batch": -1}, "tokens_per_micro_batch"),
        ({"max_ahead": -1}, "max_ahead"),
        ({"max_ahead": 2, "loss_type": "gpg"}, "loss_type='gpg' has no importance ratio"),
        ({"loss_type": "distill"}, "needs a teacher"),
        ({"teacher": "large"}, "has no effect"),
        (SERVED | {"top_p": 0.9}, "leave out top_p"),
        (SERVED | {"temperature": 0.5}, r"temperature 1, not at 0\.5"),
        ({"beta": (1, -1)}, r"a list of such numbers, not \(1, -1\)"),
        ({"beta": (1, math.nan)}, "beta must be finite and 0 or more"),
        ({"beta": ("1",)}, "beta must be finite and 0 or more"),
        ({"lora": {"rank": 4}}, "rank"),
        ({"warmup_steps": 21}, "warmup_steps=21 is more than max_steps=20"),
        ({"loss_type": "gpg", "num_iterations": 2}, "gpg' has no importance ratio, so with num_iterations=2"),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options, text):
    with pytest.raises(UsageError, match=text):
        GRPOConfig(**options)


@pytest.mark.parametrize(
    ("written", "processes", "size"),
    [("true", 8, 8), ("false", 8, 1), ("true", 1, 1), ("4", 8, 4), ("2", 8, 2), ("8", 8, 8)],
)
def test_fsdp_says_how_many_processes_share_a_copy_of_the_model(written, processes, size):
    config = build(GRPOConfig, parse_pairs([f"fsdp={written}"]))

    assert config.shard_size(processes) == size


@pytest.mark.parametrize(("fsdp", "processes"), [(4, 1), (4, 6), (4, 2)])
def test_a_number_that_does_not_divide_the_processes_is_refused(monkeypatch, fsdp, processes):
    monkeypatch.setenv("WORLD_SIZE", str(processes))

    with pytest.raises(UsageError, match=f"fsdp={fsdp} cannot divide {processes} training process"):
        GRPOTrainer(GRPOConfig(fsdp=fsdp), model=tiny())


@pytest.mark.parametrize(
    ("written", "names"),
    [("wandb", ("wandb",)), ("wandb, trackio", ("wandb", "trackio")), ("none", ()), ((), ())],
)
def test_trackers_may_be_written_as_a_text(written, names):
    assert GRPOConfig(report_to=written).report_to == names


def test_kl_to_a_frozen_copy_is_zero_at_first_and_then_pulls_back():
    trainer = trainer_of(beta=0.5, old_logprobs="recompute")
    batch = [group("a", [0.0, 1.0, 0.3])]

    first = trainer.step(batch)
    second = trainer.step(batch)

    assert first["kl"] == pytest.approx(0.0, abs=1e-12)
    assert second["kl"] > 1e-6


def test_kl_in_the_reward_changes_advantages_not_the_loss():
    trainer = trainer_of(beta=1.0, kl_in="reward", kl_estimator="k1", scale_rewards="none")
    one = group("a", [1.0, 1.0])
    rows = build_batch([one], GRPOConfig(entropy_coef=1.0)).rows
    ref = [values.sum().item() for values in score_rows(trainer.learner.policy, rows)]
    kl = [row.sampler_n.sum().item() - value for row, value in zip(rows, ref, strict=True)]

    batch = trainer.grpo.batch([one])

    expected = [1 - kl[0] - (2 - sum(kl)) / 2, 1 - kl[1] - (2 - sum(kl)) / 2]
    assert [row.advantages_n[0].item() for row in batch.rows] == pytest.approx(expected, rel=1e-5)


def test_lora_trains_adapters_only_and_its_reference_is_the_model_without_them(tmp_path):
    batch = [group("a", [0.0, 1.0, 0.3])]
    base = tiny()
    before = {name: one.clone() for name, one in base.named_parameters()}
    rows = build_batch(batch, GRPOConfig()).rows
    truth = score_rows(trainer_of(tiny()).learner.policy, rows)
    trainer = trainer_of(base, lora=LoraOptions(r=4), beta=0.1, learning_rate=0.05)

    first = trainer.step(batch)
    second = trainer.step(batch)

    assert first["kl"] == pytest.approx(0.0, abs=1e-12)
    assert second["kl"] > 1e-4
    named = trainer.learner.policy.base.named_parameters()
    trained = {name.replace(".base_layer", ""): one for name, one in named}
    assert all(torch.equal(trained[name], one) for name, one in before.items())
    torch.testing.assert_close(trainer.learner.reference.score(rows), truth, rtol=0, atol=1e-10)

    path = trainer.save(tmp_path / "adapter")
    again = trainer_of(tiny(), lora=LoraOptions(r=4), beta=0.1, learning_rate=0.05)
    again.resume(path)
    assert trainer.step(batch)["loss"] == again.step(batch)["loss"]


def advantages_of(values) -> TrainBatch:
    """A batch of one group of two, with the advantages that a function of the user returns."""
    return build_batch([group("a", [0.0, 1.0])], GRPOConfig(), advantage_fn=lambda groups: [values])


def test_a_users_advantages_may_be_one_number_for_each_token():
    each = [[[0.1 * n for n in range(len(one.sequences[0]))]] for one in group("a", [0.0, 1.0])]

    for row in advantages_of(each).rows:
        assert row.advantages_n.tolist() == pytest.approx([0.1 * p for p in row.positions_n.tolist()])


@pytest.mark.parametrize("values", [np.array([1.0, -1.0]), torch.tensor([1.0, -1.0]), [np.float32(1), -1]])
def test_a_users_advantages_may_come_from_numpy_or_torch(values):
    assert [row.advantages_n[0].item() for row in advantages_of(values).rows] == [1.0, -1.0]


NO_NUMBER = "of member 1 of group 'group-a' must be a finite number"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1.0], "one advantage for each member"),
        ([[[1.0]], [[1.0]]], "per-token advantages"),
        ([0.5, []], "0 lists of advantages for an episode of 1 sequences"),
        *(([0.5, wrong], NO_NUMBER) for wrong in (None, math.nan, "much", [[math.inf]], [None])),
    ],
)
def test_a_users_advantages_that_do_not_fit_are_refused_with_their_place(values, told):
    with pytest.raises(UsageError, match=told):
        advantages_of(values)


def test_a_users_loss_takes_the_place_of_the_surrogate():
    trainer = trainer_of()
    trainer.grpo.loss_fn = lambda x: -x.logprobs_N * x.advantages_N
    plain = trainer_of(loss_type="gpg")
    batch = [group("a", [0.0, 1.0, 0.3])]
    assert trainer.step(batch)["loss"] == pytest.approx(plain.step(batch)["loss"], abs=1e-12)


@pytest.mark.parametrize(
    ("loss_fn", "given"),
    [
        (lambda x: (-x.logprobs_N * x.advantages_N).mean(), r"shape \(\)"),
        (lambda x: (-x.logprobs_N * x.advantages_N).mean(0, keepdim=True), r"shape \(1,\)"),
        (lambda x: x.logprobs_N[:, None], r"shape \(12, 1\)"),
        (lambda x: 1.0, "float"),
    ],
)
def test_a_users_loss_must_be_one_number_for_each_token(loss_fn, given):
    trainer = trainer_of()
    trainer.grpo.loss_fn = loss_fn

    with pytest.raises(UsageError, match=rf"loss_fn returned {given}; .* of shape \(12,\)"):
        trainer.step([group("a", [0.0, 1.0, 0.3])])


def test_entropy_bonus_lowers_the_loss_by_the_mean_entropy():
    batch = [group("a", [0.0, 1.0, 0.3])]
    plain, bonus = trainer_of().step(batch), trainer_of(entropy_coef=0.25).step(batch)
    assert bonus["loss"] == pytest.approx(plain["loss"] - 0.25 * plain["entropy"], abs=1e-9)
    assert bonus["grad_norm"] != pytest.approx(plain["grad_norm"])


def test_demonstrations_mix_into_a_step_with_their_own_mean():
    batch = [group("a", [0.0, 1.0, 0.3])]
    shown = [episode("d", 0, 1.0, tokens=7), episode("d", 1, 1.0, tokens=2)]
    alone = trainer_of().step(batch)
    mixed = trainer_of().step(batch, demonstrations=shown, sft_coef=0.5)
    assert mixed["loss"] == pytest.approx(alone["loss"] + 0.5 * mixed["sft/nll"], abs=1e-9)
    assert mixed["ratio/mean"] == pytest.approx(alone["ratio/mean"], abs=1e-9)


@pytest.mark.parametrize(("longest", "left"), [(None, 2), (13, 2), (12, 1), (7, 0)])
def test_demonstrations_longer_than_the_model_takes_are_left_out(longest, left):
    shown = [episode("d", 0, 1.0, tokens=7), episode("d", 1, 1.0, tokens=2)]  # after a prompt of 6

    batch = add_demonstrations(build_batch([], GRPOConfig()), shown, longest, None)

    assert [len(row.token_ids) for row in batch.rows] == [13, 8][2 - left :]


def test_a_demonstration_in_which_nothing_was_sampled_is_left_out_and_counted():
    prompt = TokenSequence((TokenSpan("prompt", (1, 2)),))
    silent = replace(episode("d", 0, 1.0), turns=(), sequences=(prompt,))

    metrics = trainer_of().step([group("a", [0.0, 1.0])], demonstrations=[silent, episode("d", 1, 1.0)])

    assert metrics["sft/nll"] > 0
    assert [name for name in metrics if name.startswith("dropped/demonstrations_")]


def test_the_metrics_tell_what_sharing_prefixes_spared():
    batch = [group("a", [0.0, 1.0, 0.3])]
    inputs = [row.token_ids[:-1] for row in build_batch(batch, GRPOConfig()).rows]
    computed = len({tuple(ids[:end]) for ids in inputs for end in range(1, len(ids) + 1)})

    shared = trainer_of(packing="shared").step(batch)
    padded = trainer_of(packing="padded").step(batch)

    assert shared["packing/shared_share"] == 1
    assert shared["packing/tokens_saved"] == pytest.approx(1 - computed / sum(map(len, inputs)))
    assert (padded["packing/shared_share"], padded["packing/tokens_saved"]) == (0, 0)


def test_activation_checkpointing_brings_no_dropout():
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.3)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).double().eval()
    plain = trainer_of(copy.deepcopy(model))
    saving = trainer_of(model, gradient_checkpointing=True)
    passes = []
    saving.learner.policy.decoder.h[0].ln_1.register_forward_hook(lambda *_: passes.append(1))
    batch = [group("a", [0.0, 1.0, 0.3])]

    ours, truth = saving.step(batch), plain.step(batch)

    assert ours["grad_norm"] == pytest.approx(truth["grad_norm"], rel=1e-9)
    assert len(passes) == 2  # once more in the backward pass


def test_a_frozen_reference_keeps_what_the_check_of_the_policy_found():
    torch.manual_seed(0)
    config = FalconConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    trainer = trainer_of(FalconForCausalLM(config).double().eval(), beta=0.1, packing="shared")
    assert not trainer.learner.policy.packable

    assert trainer.learner.reference._frozen.pack_reason == trainer.learner.policy.pack_reason
    assert trainer.step([group("a", [0.0, 1.0, 0.3])])["kl"] == pytest.approx(0.0, abs=1e-9)


def test_a_step_with_few_groups_does_not_end_the_schedule():
    trainer = trainer_of(lr_scheduler_type="linear", max_steps=2, num_minibatches=4)

    full = trainer.step([group(name, [0.0, 1.0]) for name in "abcd"])
    few = trainer.step([group("e", [0.0, 1.0])])

    assert full["learning_rate"] == pytest.approx(1e-3 / 2)
    assert few["learning_rate"] == pytest.approx(0.0)


def test_several_passes_use_old_logprobs_from_before_the_first():
    trainer = trainer_of(num_iterations=2, num_minibatches=2, old_logprobs="recompute", learning_rate=1e-4)
    metrics = trainer.step([group("a", [0.0, 1.0, 0.3]), group("b", [0.5, 0.0])])
    assert metrics["updates"] == 4
    assert metrics["ratio/max"] > 1.001


def test_truncated_members_stay_in_the_statistics():
    members = (episode("a", 0, 1.0), episode("a", 1, 0.0, stop=StopReason.MAX_TURNS))
    config = GRPOConfig(mask_truncated_completions=True, scale_rewards="none")
    batch = build_batch([TrajectoryGroup(members)], config)
    assert [row.advantages_n[0].item() for row in batch.rows] == [0.5]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_schedules(schedule, rates):
    config = GRPOConfig(learning_rate=1.0, warmup_steps=4, max_steps=8, lr_scheduler_type=schedule)
    assert [learning_rate(config, step) for step in range(8)] == pytest.approx(rates)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_ends_with_the_run_however_many_updates_its_steps_make(schedule):
    config = GRPOConfig(learning_rate=1.0, max_steps=10, num_minibatches=8, lr_scheduler_type=schedule)

    # A step of four groups makes four updates, and one without a gradient none.
    parts = [learning_rate(config, 4 + part / 4, 1 / 4) for part in range(5)]
    assert parts[-1] == learning_rate(config, 5) == pytest.approx(1 / 2)
    assert parts == sorted(parts, reverse=True)
    assert learning_rate(config, 10) == pytest.approx(0.0)


def test_a_warm_up_of_the_rate_reaches_its_height_within_its_steps():
    config = GRPOConfig(learning_rate=1.0, warmup_steps=2, num_minibatches=4)
    rates = [learning_rate(config, step + part / 4, 1 / 4) for step in range(2) for part in range(4)]
    assert rates == pytest.approx([part / 8 for part in range(1, 9)])


AHEAD = {"max_ahead": 1, "old_logprobs": "recompute"}


@pytest.mark.parametrize(
    ("options", "proximal", "correction"),
    [
        ({}, "sampler", "off"),
        ({"engine": "http://host:8000/v1"}, "recompute", "token_truncate"),
        ({"engine": "vllm:model"}, "recompute", "token_truncate"),
        ({"engine": "vllm:model", "importance_correction": "off"}, "recompute", "off"),
        ({"engine": "vllm:model", "old_logprobs": "sampler"}, "sampler", "off"),
        ({"engine": "vllm:model", "max_ahead": 2}, "sampler", "off"),
        ({"engine": "vllm:model", "max_ahead": 1}, "sampler", "off"),
        ({"max_ahead": 1}, "sampler", "off"),  # the ratio is to the sampler itself
        ({"old_logprobs": "recompute"}, "recompute", "off"),
        ({"max_ahead": 2, "old_logprobs": "recompute"}, "recompute", "token_truncate"),
        (AHEAD | {"importance_correction": "off"}, "recompute", "off"),
        (AHEAD | {"importance_correction": "sequence_mask"}, "recompute", "sequence_mask"),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "recompute", "off"),
    ],
)
def test_another_engine_than_the_model_itself_is_corrected_for_by_default(options, proximal, correction):
    config = GRPOConfig(**options)

    assert (config.proximal, config.correction) == (proximal, correction)


def test_ratios_of_sequences_have_the_clip_of_gspo_by_default():
    sequence = {"importance_sampling_level": "sequence", "loss_type": "grpo"}

    assert GRPOConfig().loss.clip == (0.2, 0.28)
    assert GRPOConfig(**sequence).loss.clip == (3e-4, 4e-4)
    assert GRPOConfig(**sequence, epsilon=0.0, epsilon_high=0.1).loss.clip == (0.0, 0.1)


def test_the_clip_of_gspo_acts_on_the_loss():
    def gradient(shift: float, **options) -> float:
        lp = torch.full((4,), -1.0 + shift, dtype=torch.float64, requires_grad=True)
        options |= {"loss_type": "grpo", "importance_sampling_level": "sequence"}
        loss_of(lp, torch.full_like(lp, -1.0), **options).loss.backward()
        return lp.grad.abs().sum().item()

    assert gradient(3.9e-4) > 0
    assert gradient(4.1e-4) == 0
    assert gradient(4.1e-4, epsilon_high=0.28) > 0


def test_a_teacher_is_a_reference_too_and_scores_at_any_temperature_in_this_process():
    assert GRPOConfig(teacher="large", beta=0.1).loss.teacher == "large"
    assert GRPOConfig(loss_type="distill", teacher="large", temperature=0.5).sampling.temperature == 0.5


def test_options_of_lora_may_be_a_mapping():
    assert GRPOConfig(lora={"r": 4}).lora == LoraOptions(r=4)


@pytest.mark.parametrize("envs", [ae.ToolEnv, [ae.ToolEnv]])
@pytest.mark.parametrize("play", [ae.evaluate, lambda env: ae.train(env, "hf:none", runs_dir="r")])
def test_a_class_in_the_place_of_an_environment_is_refused_with_what_to_do(envs, play, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageError, match="named by an id, a file or an EnvSpec") as refused:
        play(envs)

    assert "ae.register" in refused.value.remedy
