"""The numeric checks that need a model: packing, resume, memory, temperature, degenerate batches."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.torch_version import TorchVersion
from transformers import Qwen2Config, Qwen2ForCausalLM, masking_utils

from agentenv.core import StopReason, TrainingFailed, TrajectoryGroup, UsageError
from agentenv.core.images import ImageTokens, hash_of
from agentenv.engine import TransformersEngine
from agentenv.training import GRPOConfig
from agentenv.training.batch import build_batch
from agentenv.training.learners.pass_sizes import FIRST_TOKENS
from agentenv.training.learners.torch import (
    CostModel,
    Policy,
    flex,
    learner,
    pack_attention,
    passes,
)
from agentenv.training.learners.torch import policy as policy_module
from agentenv.training.learners.torch.budget import TokenBudget, memory_of
from agentenv.training.learners.torch.logprob import WIDE_SUMS, add_product
from agentenv.training.learners.torch.packing import pack_rows, pad_rows, plan
from agentenv.training.learners.torch.passes import ExpertLoad, _backward, accumulate
from agentenv.training.metrics import Meter
from agentenv.training.rows import TokenSupports
from agentenv.training.step import assign_weights
from helpers.packs import gradient_of
from helpers.rope import SHAPE
from helpers.training import episode, group, make_row, tiny, tiny_gpt2, trainer_of

tokens = st.lists(st.integers(0, 3), min_size=2, max_size=12)


@given(st.lists(tokens, min_size=1, max_size=6), st.integers(0, 100))
@settings(max_examples=40)
def test_packed_equals_padded(sequences, seed):
    # Four token ids only, so that prefixes meet at every depth, rows repeat and rows begin with others.
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for ids in sequences:
        trained = [p for p in range(1, len(ids)) if torch.rand(1, generator=draw) < 0.6] or [len(ids) - 1]
        rows.append(make_row(ids[: trained[-1] + 1], trained))
    policy = Policy(tiny_gpt2(), GRPOConfig())
    assert policy.packable

    packed = gradient_of(policy, pack_rows(rows))
    padded = gradient_of(policy, pad_rows(rows))

    torch.testing.assert_close(packed[0], padded[0], rtol=0, atol=1e-12)
    assert ((packed[1] - padded[1]).norm() / padded[1].norm()).item() <= 1e-12


def test_padded_equals_the_model_alone():
    model = tiny()
    rows = [make_row([5, 6, 7, 8, 9], [2, 4]), make_row([5, 6, 1], [1, 2])]

    logprobs, _ = Policy(model, GRPOConfig(temperature=0.7)).score(pad_rows(rows))

    truth = []
    for row in rows:
        log_p = torch.log_softmax(model(torch.tensor([row.token_ids])).logits[0] / 0.7, -1)
        truth += [log_p[p - 1, row.token_ids[p]] for p in row.positions_n.tolist()]
    torch.testing.assert_close(logprobs, torch.stack(truth), rtol=0, atol=1e-12)


@given(
    st.lists(tokens, min_size=1, max_size=12),
    st.integers(1, 40),
    st.sampled_from(["auto", "shared", "padded"]),
)
def test_a_plan_holds_every_row_once_and_keeps_its_bound(sequences, bound, layout):
    rows = [make_row(ids, [len(ids) - 1]) for ids in sequences]

    micros = plan(rows, layout=layout, max_tokens=bound, cost=CostModel(attention=0.01, overhead=5))

    assert sorted(id(row) for micro in micros for row in micro.rows) == sorted(map(id, rows))
    for micro in micros:
        assert micro.ids_BT.numel() <= bound or len(micro.rows) == 1
        assert micro.labels_N.tolist() == [
            row.token_ids[p] for row in micro.rows for p in row.positions_n.tolist()
        ]


def test_a_model_that_leaks_between_rows_is_not_packed(monkeypatch):
    """A window over the pack would hide other tokens than a window over each row."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    config = Qwen2Config(**SHAPE, **window)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).double().eval()
    monkeypatch.setattr(pack_attention, "_sliding_layers", lambda text: False)
    monkeypatch.setattr(pack_attention, "UNSUPPORTED", ())
    policy = Policy(model, GRPOConfig())
    assert policy.packable

    assert "packed gradients are off" in policy.check()[0]
    assert not policy.packable


def test_a_head_that_is_not_a_plain_matrix_is_found():
    model = tiny()
    model.lm_head.register_forward_hook(lambda module, args, out: out * 0.5)
    policy = Policy(model, GRPOConfig())

    findings = policy.check()

    assert policy.head_way == "own"
    assert "LM head" in findings[0]
    rows = [make_row([5, 6, 7, 8], [2, 3])]
    truth = torch.log_softmax(model(torch.tensor([[5, 6, 7]])).logits[0], -1)
    logprobs, _ = policy.score(pad_rows(rows))
    torch.testing.assert_close(logprobs, torch.stack([truth[1, 7], truth[2, 8]]), rtol=0, atol=1e-12)


def test_equal_tokens_of_other_images_are_not_compared_as_equal():
    plain = make_row([5, 6, 7, 8], [3])
    one, other = (replace(plain, images=(ImageTokens(1, 2, hash_of(data), data),)) for data in (b"a", b"b"))

    assert plain.keys == plain.token_ids
    assert [mine == theirs for mine, theirs in zip(one.keys, other.keys, strict=True)] == [
        True,
        False,
        False,
        True,
    ]


def test_resume_is_bit_equal(tmp_path):
    batches = [[group(f"{step}-{n}", [0.0, 1.0, 0.5]) for n in range(2)] for step in range(6)]
    options = {"old_logprobs": "recompute", "num_minibatches": 2, "lr_scheduler_type": "cosine"}
    options["warmup_steps"] = 2

    whole = trainer_of(tiny(1, torch.bfloat16), **options)
    for batch in batches:
        whole.step(batch)
    first = trainer_of(tiny(1, torch.bfloat16), **options)
    for batch in batches[:3]:
        first.step(batch)
    first.save(tmp_path / "half")
    second = trainer_of(tiny(2, torch.bfloat16), **options)
    second.resume(tmp_path / "half")
    for batch in batches[3:]:
        second.step(batch)

    assert second.steps_done == whole.steps_done == 6
    assert second.grpo.updates_done == whole.grpo.updates_done
    assert second.grpo.tokens_seen == whole.grpo.tokens_seen == 6 * 2 * (3 * (6 + 2) + 3 + 4 + 5)
    for ours, truth in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, truth)
    for ours, truth in zip(second.learner.optimizer.masters, whole.learner.optimizer.masters, strict=True):
        assert torch.equal(ours, truth)


def test_a_float32_checkpoint_is_resumed_in_a_narrower_format(tmp_path):
    whole = trainer_of(tiny(dtype=torch.float32), learning_rate=0.05)
    whole.step([group("a", [0.0, 1.0, 0.3])])
    whole.save(tmp_path / "wide")
    narrow = trainer_of(tiny(dtype=torch.bfloat16), learning_rate=0.05)

    narrow.resume(tmp_path / "wide")

    for ours, truth in zip(narrow.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, truth.bfloat16())


def test_an_adapter_of_any_name_is_resumed(tmp_path):
    def make():
        torch.manual_seed(3)
        options = LoraConfig(r=4, target_modules="all-linear")
        return trainer_of(get_peft_model(tiny(), options, adapter_name="policy"), learning_rate=0.05)

    whole, again = make(), make()
    whole.step([group("a", [0.0, 1.0, 0.3])])

    again.resume(whole.save(tmp_path / "half"))

    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))


def test_a_resume_draws_the_random_numbers_that_would_have_come_next(tmp_path):
    trainer = trainer_of()
    torch.manual_seed(7)
    path = trainer.save(tmp_path / "half")
    expected = torch.rand(3)
    again = trainer_of()

    again.resume(path)

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("limit", "left"), [(None, {"step-8", "step-9", "step-10"}), (2, {"step-9", "step-10"}), (1, {"step-10"})]
)
def test_the_newest_checkpoints_are_kept_up_to_the_limit(tmp_path, limit, left):
    trainer = trainer_of(output_dir=str(tmp_path), save_total_limit=limit)

    for trainer.grpo.steps_done in (8, 9, 10):
        trainer.save_step()

    assert {one.name for one in (tmp_path / "checkpoints").iterdir()} == left


def test_a_checkpoint_is_kept_beside_those_of_later_steps(tmp_path):
    trainer = trainer_of(output_dir=str(tmp_path), save_total_limit=1)
    trainer.grpo.steps_done = 9
    later = trainer.save_step()

    for trainer.grpo.steps_done in (4, 5):  # of a run that resumed an earlier checkpoint, or began again
        saved = trainer.save_step()

    assert set((tmp_path / "checkpoints").iterdir()) == {later, saved}


def test_resume_refuses_another_models_checkpoint(tmp_path):
    path = trainer_of().save(tmp_path / "model")
    with pytest.raises(UsageError, match="another model"):
        trainer_of(tiny(num_hidden_layers=1)).resume(path)
    with pytest.raises(UsageError, match=r"no trainer_state\.json"):
        trainer_of().resume(tmp_path / "nothing")


def test_a_gradient_that_is_not_finite_changes_nothing_and_gives_the_engine_no_version():
    trainer = trainer_of()
    trainer.engine = TransformersEngine(trainer.model)
    trainer.grpo.loss_fn = lambda x: x.logprobs_N * math.inf
    before = [one.clone() for one in trainer.model.parameters()]

    metrics = trainer.step([group("a", [0.0, 1.0])])

    assert (metrics["updates/not_finite"], trainer.engine.weights_version) == (1, 0)
    assert all(torch.equal(ours, then) for ours, then in zip(trainer.model.parameters(), before, strict=True))
    trainer.grpo.loss_fn = None
    trainer.step([group("a", [0.0, 1.0])])
    assert trainer.engine.weights_version == 1


def test_untrainable_truncated_and_long_episodes_are_dropped_and_counted():
    config = GRPOConfig(mask_truncated_completions=True)
    members = (
        episode("a", 0, 1.0, version=5),
        episode("a", 1, 0.0, version=5, tokens=40),
        episode("a", 3, 0.0, version=5, stop=StopReason.MAX_TURNS),
        episode("a", 4, 0.0, version=5, untrainable_reason="said so"),
    )

    batch = build_batch([TrajectoryGroup(members)], config, max_length=20)

    assert len(batch.rows) == 1
    assert {name: count for name, count in batch.metrics.items() if name.startswith("dropped/")} == {
        "dropped/rows_too_long": 1,
        "dropped/truncated_episodes": 1,
        "dropped/untrainable_episodes": 1,
    }


def test_recomputed_old_logprobs_of_one_update_are_its_own():
    metrics = trainer_of(old_logprobs="recompute").step([group("a", [0.0, 1.0, 0.3])])

    assert metrics["ratio/mean"] == 1.0
    assert metrics["clip_ratio/region_mean"] == 0.0


@pytest.mark.parametrize("packing", ["shared", "padded"])
@pytest.mark.parametrize("bound", [16, 4096])
def test_micro_batches_of_a_real_model_do_not_change_the_update(packing, bound):
    batch = [group("a", [0.0, 1.0, 0.3]), group("b", [0.2, 0.9, 0.4, 0.1])]

    def gradient(**options) -> torch.Tensor:
        trainer = trainer_of(tiny_gpt2(), loss_type="grpo", **options)
        rows = build_batch(batch, trainer.config).rows
        rows = assign_weights(rows, trainer.config)
        accumulate(trainer.learner.policy, rows, Meter())
        return torch.cat([one.grad.flatten() for one in trainer.model.parameters()])

    truth = gradient(packing="padded")
    ours = gradient(packing=packing, tokens_per_micro_batch=bound)

    assert ((ours - truth).norm() / truth.norm()).item() <= 1e-12


def test_the_sum_of_the_heads_gradient_is_wide_though_the_operands_of_its_products_are_narrow():
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(64, 40, generator=draw).bfloat16() for _ in range(2))
    total = torch.full((64, 64), 1000.0)
    for _ in range(3):
        add_product(total, left, right.T)

    truth = 1000 + 3 * (left.double() @ right.double().T)
    assert (total - truth).abs().max() <= 1e-3, "a sum in bfloat16 would be off by 4"


@pytest.mark.parametrize(("version", "wide"), [("2.9.1+cu128", False), ("2.10.0", True), ("2.11.0", True)])
def test_torch_adds_narrow_products_to_wide_sums_since_2_10(version, wide):
    assert (TorchVersion(version) >= WIDE_SUMS) is wide  # before, it refused a sum in float32


def test_nothing_is_read_from_the_device_between_a_backward_pass_and_the_next_pass(monkeypatch):
    policy = Policy(tiny(), GRPOConfig(tokens_per_micro_batch=20, packing="padded"))
    rows = [make_row(list(range(1, 11)), [5, 9], group=number) for number in range(6)]
    rows = assign_weights(rows, policy.config)
    loss, _ = accumulate(policy, rows, Meter())
    backward, score, begun = torch.Tensor.backward, policy.score, list[bool]()

    def began(self, *args, **options):
        backward(self, *args, **options)
        begun.append(True)

    def reads(self):
        assert not begun, "the host waits for a backward pass"
        return self.item()

    def scored(micro):
        passes.append(micro)
        begun.clear()
        return score(micro)

    meter, passes = Meter(), []
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", began)
        patch.setattr(torch.Tensor, "__float__", reads)
        patch.setattr(torch.Tensor, "__int__", reads)
        patch.setattr(policy, "score", scored)
        again, _ = accumulate(policy, rows, meter)

    assert len(passes) == 3
    assert again == loss
    assert meter.result()


def test_a_training_leaves_out_the_attention_of_cudnn_because_it_plans_for_each_length():
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    Policy(tiny(), GRPOConfig())

    assert not torch.backends.cuda.cudnn_sdp_enabled()


# The host waits for the device after the last pass alone: a pass over a micro-batch reads nothing from it


ROWS = [make_row(list(range(1, 11)), [5, 9], group=number) for number in range(4)]
RECOMPUTED = {"old_logprobs": "recompute", "num_iterations": 2}
SUPPORTS = TokenSupports(torch.tensor([5, 6, 1, 9, 10], dtype=torch.int32), torch.tensor([2, 3]))


def rows_with(**fields):
    return [replace(row, **fields) for row in ROWS]


CASES = {
    "plain": (ROWS, {}),
    "demonstrations beside episodes": ([*ROWS, *rows_with(demonstration=True)], {}),
    "demonstrations alone": (rows_with(demonstration=True), {}),
    "reference": (rows_with(ref_n=torch.zeros(2)), {"beta": 0.1}),
    "betas of attempts": (rows_with(ref_n=torch.zeros(2)), {"beta": (0.1, 0.2)}),
    "entropy": (ROWS, {"entropy_coef": 0.1}),
    "ratio of a sequence": (ROWS, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "mean of a sequence": (ROWS, {"loss_type": "gmpo"}),
    "corrected sequence": (
        rows_with(old_n=torch.zeros(2)),
        {"importance_correction": "sequence_mask", **RECOMPUTED},
    ),
    "off-policy mask": (ROWS, {"off_policy_mask_threshold": 0.1}),
    "checkpoints": (ROWS, {"gradient_checkpointing": True}),
    "cut distributions": (rows_with(supports=SUPPORTS), {}),
}


def attention(query, key, value, **options):
    return query * key.mean() * value.mean()


def policy_on_meta(model, monkeypatch, **options) -> Policy:
    # Of rows without a mask, transformers itself asks whether their positions are those of a pack.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: None)
    # Flex attention runs on no device without numbers; its result has the shape of the queries.
    monkeypatch.setattr(flex, "_kernel", lambda _: attention)
    policy = Policy(model, GRPOConfig(**options))
    policy.model.to("meta")
    policy.device, policy.way = torch.device("meta"), "flex"
    return policy


@pytest.mark.parametrize("layout", [pad_rows, pack_rows])
@pytest.mark.parametrize("case", CASES)
def test_a_pass_with_its_loss_and_gradients_reads_nothing_from_the_device(case, layout, monkeypatch):
    rows, options = CASES[case]
    policy = policy_on_meta(tiny(dtype=torch.float32), monkeypatch, **options)
    load = ExpertLoad(policy, 10.0)
    loss, scores = _backward(policy, layout(rows), Meter(), load, loss_fn=None, moved=False)

    assert loss.is_meta
    assert all(score.is_meta for pair in scores for score in pair)
    assert all(one.grad is not None for one in policy.model.parameters())


# The tokens of a micro-batch follow from the memory of the device, and halve where it runs out


def alone(values):
    return list(values)


@pytest.mark.parametrize(
    ("given", "gigabytes", "tokens"),
    [
        (None, 8, 4096),
        (None, 24, 4096),
        (None, 48, 8192),
        (None, 85, 16_384),
        (None, 151, 16_384),
        (700, 85, 700),
    ],
)
def test_the_number_follows_the_size_of_the_card_unless_it_is_given(given, gigabytes, tokens):
    assert TokenBudget(given, gigabytes * 10**9, alone).tokens == tokens
    assert TokenBudget(given, memory_of(torch.device("cpu")), alone).tokens == (given or FIRST_TOKENS)


@pytest.mark.parametrize(("fsdp", "tokens"), [(False, 16_384), (True, FIRST_TOKENS)])
def test_shards_which_repeat_no_pass_begin_with_few_tokens_on_any_card(monkeypatch, fsdp, tokens):
    monkeypatch.setattr(policy_module, "memory_of", lambda _: 85 * 10**9)
    world: Any = SimpleNamespace(size=2, device=torch.device("cuda"), gather=alone)

    assert policy_module._budget(GRPOConfig(fsdp=fsdp), world).tokens == tokens


def out_of_memory_above(policy, tokens: int) -> list[int]:
    """Let passes with more tokens end as on a full GPU; return the tokens of all passes, which grow."""
    found, score = [], policy.score

    def scored(micro):
        found.append(micro.ids_BT.numel())
        if found[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return score(micro)

    policy.score = scored
    return found


def gradients(trainer) -> list[torch.Tensor]:
    return [one.grad.clone() for one in trainer.learner.model.parameters()]


def rows_of_different_lengths(config):
    rows = [
        make_row(list(range(1, 2 + length)), [length - 1, length], group=length) for length in (4, 5, 9, 9)
    ]
    return assign_weights(rows, config)


def test_passes_that_run_out_of_memory_are_made_again_half_as_large_with_the_same_gradient(caplog):
    usual, short = (trainer_of(packing="padded", tokens_per_micro_batch=64) for _ in range(2))
    for trainer in (usual, short):
        rows = rows_of_different_lengths(trainer.config)
        metrics = Meter()
        seen = out_of_memory_above(trainer.learner.policy, 9 if trainer is short else 64)
        trainer.learner.forward_backward(rows, metrics)
        trainer.metrics_of_test = metrics.result()

    assert seen == [36, 18, 9, 9, 5, 4]
    assert short.learner.policy.budget.tokens == 9
    for ours, theirs in zip(gradients(short), gradients(usual), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert short.metrics_of_test.pop("packing/halved/max") == 2.0
    assert short.metrics_of_test.keys() == usual.metrics_of_test.keys()
    assert short.metrics_of_test["entropy"].count == usual.metrics_of_test["entropy"].count
    assert "memory ran out in a micro-batch of 36 tokens" in caplog.text


def test_a_pass_that_broke_off_late_leaves_nothing_of_its_gradient():
    usual, late = (trainer_of(packing="padded", tokens_per_micro_batch=10) for _ in range(2))
    given, broken = late.learner.policy.score, []

    def breaks_once(micro):
        if micro.ids_BT.numel() < 10 and not broken:
            broken.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return given(micro)

    late.learner.policy.score = breaks_once
    for trainer in (usual, late):
        trainer.learner.forward_backward(rows_of_different_lengths(trainer.config), Meter())

    assert broken
    for ours, theirs in zip(gradients(late), gradients(usual), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_scores_are_computed_again_and_a_row_that_does_not_fit_alone_ends_the_training_in_words():
    trainer = trainer_of(packing="padded", tokens_per_micro_batch=64)
    rows = rows_of_different_lengths(trainer.config)
    whole = trainer.learner.score(rows)
    out_of_memory_above(trainer.learner.policy, 18)

    torch.testing.assert_close(trainer.learner.score(rows), whole)
    out_of_memory_above(trainer.learner.policy, 8)
    with pytest.raises(TrainingFailed, match=r"a single row does not fit .*Tried to allocate.*agentenv plan"):
        trainer.learner.forward_backward(rows, Meter())


def test_a_pass_of_shards_is_not_repeated_by_one_of_them_alone(monkeypatch):
    monkeypatch.setattr(passes, "micro_batches", lambda policy, rows: [pad_rows(rows)])
    several = SimpleNamespace(sharded=True, size=2)
    policy: Any = SimpleNamespace(budget=TokenBudget(64, None, alone), world=several)

    def breaks(_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError) as failed:
        passes._in_memory(policy, [make_row([1, 2, 3, 4], [3])], breaks)

    assert failed.value.__notes__ == ["shards repeat no pass: set tokens_per_micro_batch below 3"]


def test_all_processes_halve_what_did_not_fit_in_one():
    budget = TokenBudget(None, 10**6, lambda values: [*values, 3000])

    assert budget.shrink("", 0)
    assert budget.tokens == 1500


def test_the_most_that_a_step_held_is_a_metric_of_it(monkeypatch):
    plain = trainer_of(packing="padded").step([group("a", [0.0, 1.0])])
    monkeypatch.setattr(learner, "peak_of", lambda _: 9_870_000_000)
    metrics = trainer_of(packing="padded").step([group("a", [0.0, 1.0])])

    assert metrics["memory/held_gb/max"] == pytest.approx(9.87)
    assert "memory/held_gb/max" not in plain
