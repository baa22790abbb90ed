"""The load balancing loss of a mixture of experts is that of transformers, over each real token once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from agentenv.core import UsageError
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy
from agentenv.training.learners.torch.packing import pack_rows, pad_rows
from agentenv.training.learners.torch.passes import ExpertLoad, accumulate
from agentenv.training.metrics import Meter
from agentenv.training.step import assign_weights
from helpers.moe import CHOSEN, EXPERTS, gradients, rows_with_experts, tiny_moe
from helpers.ranks import run_driver
from helpers.training import tiny

KINDS = ("mixtral", "qwen3-moe")


def rows_of(*lengths: int) -> list:
    """Rows that share exactly their prompt, and of which nobody told the experts."""
    return [replace(row, routed_experts=None, weight=0.1) for row in rows_with_experts(*lengths)]


def policy_of(model, **options) -> Policy:
    return Policy(model, GRPOConfig(**{"dtype": "float64", "router_aux_loss_coef": 0.5, **options}))


def balanced(policy, micro, coefficient: float | None = None) -> tuple[float, torch.Tensor]:
    """Return the loss of a micro-batch as the trainer computes it, and its gradient."""
    load = ExpertLoad(policy, micro.num_tokens)
    with load.watched() as routed:
        policy.score(micro)
    loss = load.loss(micro, routed) / policy.config.loss.router_aux_loss_coef
    loss.backward()
    return float(loss.detach()), gradients(policy.model)


def of_transformers(model, rows, *, once: bool = False) -> tuple[float, torch.Tensor]:
    """Return the loss and its gradient as transformers has them, with a mask of the padding.

    Args:
        model: the model.
        rows: the rows.
        once: whether the prompt of the rows counts once only.
    """
    width = max(len(row.token_ids) for row in rows) - 1
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for number, row in enumerate(rows):
        size = len(row.token_ids) - 1
        ids[number, :size] = torch.tensor(row.token_ids[:-1])
        mask[number, :size] = 1
    output = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    mask = mask.clone()
    if once:
        mask[1:, :4] = 0
    loss = load_balancing_loss_func(output.router_logits, EXPERTS, CHOSEN, mask)
    loss.backward()
    return float(loss.detach()), gradients(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradient_are_those_of_transformers(kind, layout, checkpointing):
    model, rows = tiny_moe(kind), rows_of(9, 3, 6)
    truth, wanted = of_transformers(model, rows, once=layout == "packed")
    policy = policy_of(model, gradient_checkpointing=checkpointing)

    found, grads = balanced(policy, (pack_rows if layout == "packed" else pad_rows)(rows))

    # Transformers adds the probabilities in float32.
    assert found == pytest.approx(truth, rel=1e-6)
    assert float((grads - wanted).norm() / wanted.norm()) < 1e-6


def accumulated(policy, rows, meter: Meter | None = None) -> torch.Tensor:
    rows = assign_weights(rows, policy.config)
    accumulate(policy, rows, meter or Meter())
    return gradients(policy.model)


def test_micro_batches_add_their_losses_in_proportion_to_their_tokens():
    model, rows = tiny_moe(), rows_of(9, 3, 6)
    options = {"packing": "padded", "tokens_per_micro_batch": 1}
    plain = accumulated(policy_of(model, router_aux_loss_coef=0.0, **options), rows)
    parts = [(balanced(policy_of(model), pad_rows([row])), len(row.token_ids) - 1) for row in rows]
    total = sum(size for _, size in parts)
    meter = Meter()

    grads = accumulated(policy_of(model, **options), rows, meter)

    wanted = 0.5 * sum(grad * size / total for (_, grad), size in parts)
    assert float((grads - plain - wanted).norm() / wanted.norm()) < 1e-6
    mean = sum(loss * size / total for (loss, _), size in parts)
    assert meter.result()["moe/aux_loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("collapsed", [False, True])
def test_a_collapse_is_seen(collapsed):
    model, meter = tiny_moe(), Meter()
    if collapsed:  # of equal logits a router takes the same experts for all tokens
        torch.nn.init.zeros_(model.model.layers[1].mlp.gate.weight)

    accumulated(policy_of(model, router_aux_loss_coef=0.0), rows_of(9, 3, 6), meter)

    metrics = meter.result()
    assert "moe/aux_loss" not in metrics
    if collapsed:
        assert metrics["moe/load/max"] == pytest.approx(EXPERTS / CHOSEN)
    else:
        assert 1.0 < metrics["moe/load/max"] < EXPERTS / CHOSEN


def uneven():
    """A model whose first layer has fewer experts than the others."""
    model = tiny_moe()
    first = model.model.layers[0].mlp
    for experts in (first.experts.gate_up_proj, first.experts.down_proj, first.gate.weight):
        experts.data = experts.data[: EXPERTS - 1].clone()
    return model


@pytest.mark.parametrize("model", [tiny, uneven])
def test_models_without_experts_or_with_uneven_numbers_of_them_are_not_watched(model):
    meter = Meter()

    accumulated(policy_of(model(), router_aux_loss_coef=0.0, packing="padded"), rows_of(5, 3), meter)

    assert not any(name.startswith("moe/") for name in meter.result())


@pytest.mark.parametrize(
    ("model", "why"), [(tiny, "no routers"), (lambda: tiny_moe("deepseek-v3"), "no load balancing loss")]
)
def test_models_without_such_a_loss_are_refused(model, why):
    with pytest.raises(UsageError, match=why):
        policy_of(model())


DRIVER = """
from helpers.moe import rows_with_experts, tiny_moe


def gradient(kind, **options):
    # A row for each micro-batch, so that the processes compute the same micro-batches as one process.
    options |= {"packing": "padded", "tokens_per_micro_batch": 1, "dtype": "float64", "router_aux_loss_coef": 0.5}
    first = {1: [0], 2: [0, 1]}
    for replay in (True, False):
        trainer = GRPOTrainer(GRPOConfig(router_replay=replay, **options), model=tiny_moe(num_hidden_layers=2))
        rows = rows_with_experts(4, 25, 9, 14, 30, layers=2)
        rows = rows if replay else [replace(row, routed_experts=None) for row in rows]
        grads, metrics = gradient_of(trainer, rows, first[trainer.world.size])
        if trainer.world.rank == 0:
            torch.save((grads, metrics["moe/aux_loss"], metrics["moe/load/max"]), f"{OUT}/{kind}-{replay}")


play(lambda: gradient("one"), 1)
play(lambda: (gradient("replicate"), gradient("shard", fsdp=True), gradient(
    "checkpoints", fsdp=True, gradient_checkpointing=True)), 2)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("routers")
    run_driver(DRIVER, out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("way", ["replicate", "shard", "checkpoints"])
def test_two_processes_have_the_gradient_and_the_load_of_one(found, way, replay):
    grads, loss, load = torch.load(found / f"one-{replay}")
    ours, our_loss, our_load = torch.load(found / f"{way}-{replay}")

    # Norms compute in float32 whatever the weights are, and a rank that waits passes other shapes.
    assert float((ours - grads).norm() / grads.norm()) < 1e-6
    assert our_loss == pytest.approx(loss, rel=1e-6)
    assert our_load == pytest.approx(load)
