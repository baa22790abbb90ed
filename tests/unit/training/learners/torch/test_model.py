"""The numeric checks that need a model: packing, resume, memory, temperature, degenerate batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.torch_version import TorchVersion
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentenv.core import UsageError
from agentenv.engine import TransformersEngine
from agentenv.training import GRPOConfig
from agentenv.training.batch import build_batch
from agentenv.training.learners.torch import CostModel, Policy, pack_attention, pack_rows
from agentenv.training.learners.torch.logprob import WIDE_SUMS, add_product
from agentenv.training.learners.torch.packing import pad_rows, plan
from agentenv.training.learners.torch.passes import accumulate
from agentenv.training.metrics import Meter
from agentenv.training.step import assign_weights
from helpers.packs import gradient_of
from helpers.rope import SHAPE
from helpers.training import group, make_row, tiny, tiny_gpt2, trainer_of

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


def test_a_training_leaves_out_the_attention_of_cudnn_because_it_plans_for_each_length():
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    Policy(tiny(), GRPOConfig())

    assert not torch.backends.cuda.cudnn_sdp_enabled()
