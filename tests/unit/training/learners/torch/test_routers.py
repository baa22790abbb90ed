"""The load balancing loss of a mixture of experts is that of transformers, over each real token once."""

from __future__ import annotations

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
from helpers.moe import CHOSEN, EXPERTS, tiny_moe
from helpers.ranks import run_driver
from helpers.training import make_row, tiny

KINDS = ("mixtral", "qwen3-moe")


def rows_of(*lengths: int, prompt: int = 4) -> list:
    draw = torch.Generator().manual_seed(1)
    shared = torch.randint(0, 61, (prompt,), generator=draw).tolist()
    rows = []
    for number, length in enumerate(lengths):
        # The first own token is different in each row, so rows share exactly the prompt.
        ids = [*shared, number, *torch.randint(0, 61, (length,), generator=draw).tolist()]
        rows.append(make_row(ids, list(range(prompt, len(ids))), group=number, weight=0.1))
    return rows


def policy_of(model, **options) -> Policy:
    return Policy(model, GRPOConfig(**{"dtype": "float64", "router_aux_loss_coef": 0.5, **options}))


def gradients(model) -> torch.Tensor:
    found = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    model.zero_grad(set_to_none=True)
    return torch.cat([one.to_dense().flatten() if one.is_sparse else one.flatten() for one in found])


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


def test_the_loss_is_its_formula():
    # Float64 but for the norms, which compute in float32 whatever the weights are.
    model, rows = tiny_moe(), rows_of(9, 3, 6)
    policy, micro = policy_of(model), pad_rows(rows)
    logits = []
    for row in rows:
        output = model(input_ids=torch.tensor([row.token_ids[:-1]]), output_router_logits=True)
        logits.append(torch.stack(output.router_logits))
    probs = torch.cat(logits, 1).softmax(-1).flatten(0, 1)
    chosen = torch.nn.functional.one_hot(probs.topk(CHOSEN).indices, EXPERTS).double().sum(1)
    truth = EXPERTS * (chosen.mean(0) * probs.mean(0)).sum()
    truth.backward()
    wanted = gradients(model)

    found, grads = balanced(policy, micro)

    assert found == pytest.approx(float(truth.detach()), rel=1e-6)
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


def test_layers_with_different_numbers_of_experts_are_not_watched():
    model, meter = tiny_moe(), Meter()
    first = model.model.layers[0].mlp
    for experts in (first.experts.gate_up_proj, first.experts.down_proj, first.gate.weight):
        experts.data = experts.data[: EXPERTS - 1].clone()

    accumulated(policy_of(model, router_aux_loss_coef=0.0, packing="padded"), rows_of(5, 3), meter)

    assert not any(name.startswith("moe/") for name in meter.result())


def test_dense_models_have_no_load():
    meter = Meter()

    accumulated(policy_of(tiny(), router_aux_loss_coef=0.0), rows_of(5, 3), meter)

    assert not any(name.startswith("moe/") for name in meter.result())


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (tiny, "LlamaForCausalLM has no routers"),
        (lambda: tiny_moe("deepseek-v3"), "no load balancing loss"),
    ],
)
def test_models_without_such_a_loss_are_refused(model, why):
    with pytest.raises(UsageError, match=why):
        policy_of(model())


DRIVER = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from agentenv.training import GRPOConfig, GRPOTrainer
from agentenv.training.learners.torch.shards import whole
from agentenv.training.metrics import Meter
from agentenv.training.learners.torch.passes import accumulate
from agentenv.training.step import assign_weights
from helpers.moe import tiny_moe
from helpers.ranks import play
from helpers.training import make_row

torch.set_num_threads(1)
OUT = sys.argv[1]


def rows_of(lengths):
    draw = torch.Generator().manual_seed(1)
    rows = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, 61, (length + 3,), generator=draw).tolist()
        rows.append(make_row(ids, list(range(3, length + 3)), group=number))
    return rows


def gradient(kind, **options):
    # A row for each micro-batch, so that the processes compute the same micro-batches as one process.
    config = GRPOConfig(
        packing="padded", tokens_per_micro_batch=1, dtype="float64", router_aux_loss_coef=0.5, **options
    )
    trainer = GRPOTrainer(config, model=tiny_moe(num_hidden_layers=2))
    world, learner = trainer.world, trainer.learner
    rows = rows_of((4, 25, 9, 14, 30))
    first = {1: [0], 2: [0, 1]}[world.size] + [len(rows)]
    mine = rows[first[world.rank] : first[world.rank + 1]]
    mine = assign_weights(mine, trainer.config, total=world.total)
    meter = Meter()
    accumulate(learner.policy, mine, meter)
    world.add_gradients(learner.optimizer)
    grads = torch.cat([whole(one.grad).flatten() for one in learner.optimizer.masters])
    metrics = world.merge(meter.result())
    if world.rank == 0:
        torch.save((grads, metrics["moe/aux_loss"], metrics["moe/load/max"]), f"{OUT}/{kind}")


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
@pytest.mark.parametrize("way", ["replicate", "shard", "checkpoints"])
def test_two_processes_have_the_gradient_and_the_load_of_one(found, way):
    grads, loss, load = torch.load(found / "one")
    ours, our_loss, our_load = torch.load(found / way)

    # Norms compute in float32 whatever the weights are, and a rank that waits passes other shapes.
    assert float((ours - grads).norm() / grads.norm()) < 1e-6
    assert our_loss == pytest.approx(loss, rel=1e-6)
    assert our_load == pytest.approx(load)
