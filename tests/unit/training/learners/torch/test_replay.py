"""Replayed routers: the gradient of a forward pass with given experts, in every layout, and little mismatch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from agentenv.core import RoutedExperts, UsageError
from agentenv.training import GRPOConfig
from agentenv.training.learners.torch import Policy
from agentenv.training.learners.torch.packing import CostModel, pack_rows, pad_rows, plan
from agentenv.training.learners.torch.passes import accumulate, score_rows
from agentenv.training.metrics import Meter
from agentenv.training.step import assign_weights
from helpers.moe import CHOSEN, EXPERTS, PROMPT, rows_with_experts, tiny_moe
from helpers.ranks import run_driver
from helpers.training import tiny


def policy_of(model, **options) -> Policy:
    return Policy(model, GRPOConfig(**{"dtype": "float64", "router_replay": True, **options}))


def gradients(model) -> torch.Tensor:
    found = [torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters()]
    model.zero_grad(set_to_none=True)
    return torch.cat([one.to_dense().flatten() if one.is_sparse else one.flatten() for one in found])


def given(kind: str, router, ids):
    """Return what a router would return if it chose these experts, written out for each family."""

    def forward(hidden):
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = functional.linear(hidden, router.weight, getattr(router, "bias", None))
        if kind == "gpt-oss":
            return logits, logits.gather(-1, ids).softmax(-1), ids
        if kind == "deepseek-v3":
            logits = functional.linear(hidden.float(), router.weight.float())
            chosen = logits.sigmoid().gather(-1, ids)
            return logits, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor, ids
        chosen = logits.float().softmax(-1).gather(-1, ids)
        return logits, (chosen / chosen.sum(-1, keepdim=True)).to(logits.dtype), ids

    return forward


def routers_of(model) -> list:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def truth(kind: str, rows) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the log-probabilities and the gradient of their weighted sum, each row alone."""
    model = tiny_moe(kind)
    scores = []
    for row in rows:
        ids = torch.tensor(row.token_ids)
        chosen = torch.from_numpy(row.routed_experts.array().astype("int64"))
        for layer, router in enumerate(routers_of(model)):
            router.forward = given(kind, router, chosen[:, layer])
        logits = model(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
        scores.append(logits[row.positions_n - 1, ids[row.positions_n]])
        (scores[-1].sum() * row.weight).backward()
    return [one.detach() for one in scores], gradients(model)


def replayed(policy, micro) -> tuple[list[torch.Tensor], torch.Tensor]:
    with policy.replayed(micro):
        logprobs, _ = policy.score(micro)
        parts = logprobs.split([row.num_trained for row in micro.rows])
        sum(part.sum() * row.weight for part, row in zip(parts, micro.rows, strict=True)).backward()
    return [part.detach() for part in parts], gradients(policy.model)


@pytest.mark.parametrize(
    ("kind", "layout", "checkpointing"),
    [
        *((kind, pack_rows, False) for kind in ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3")),
        *((kind, pad_rows, False) for kind in ("qwen3-moe", "gpt-oss")),
        ("mixtral", pad_rows, True),
        ("deepseek-v3", pack_rows, True),
    ],
)
def test_gradients_are_those_of_a_pass_with_the_given_experts(kind, layout, checkpointing):
    policy = policy_of(tiny_moe(kind), gradient_checkpointing=checkpointing)
    policy.check()  # which says how rows may be packed
    if layout is pack_rows and not policy.packable:
        pytest.skip(f"rows of {kind} are not packed: {policy.pack_reason}")
    rows = rows_with_experts(9, 3, 6, layers=len(routers_of(policy.model)), wide=kind == "mixtral")
    wanted, grads = truth(kind, rows)

    scores, ours = replayed(policy, layout(rows))

    # Routers and norms of some families compute in float32 whatever the weights are.
    for one, other in zip(scores, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
    assert float((ours - grads).norm() / grads.norm()) < 1e-5
    assert not any("forward" in router.__dict__ for router in routers_of(policy.model))


def test_rows_share_tokens_only_as_far_as_they_were_sent_to_the_same_experts():
    rows = rows_with_experts(5, 5)
    other = rows[1].routed_experts.array().copy()
    other[2] = (other[2] + 1) % EXPERTS  # the third token of the prompt was sent elsewhere
    apart = RoutedExperts.of(other)

    assert pack_rows(rows).ids_BT.shape[1] == 2 * 9 - PROMPT
    rows[1] = replace(rows[1], routed_experts=apart)
    micro = pack_rows(rows)
    assert micro.ids_BT.shape[1] == 2 * 9 - 2
    (planned,) = plan(rows, layout="shared", max_tokens=1000, cost=CostModel(branch=0.0))
    assert planned.ids_BT.shape[1] == 2 * 9 - 2
    wanted, grads = truth("qwen3-moe", rows)
    scores, ours = replayed(policy_of(tiny_moe()), micro)
    assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(scores, wanted, strict=True))
    assert float((ours - grads).norm() / grads.norm()) < 1e-5


def test_rows_without_experts_leave_the_choice_to_the_routers():
    policy, rows = policy_of(tiny_moe()), rows_with_experts(5, 3)
    rows[1] = replace(rows[1], routed_experts=None)
    plain = policy_of(tiny_moe(), router_replay=False)

    free = score_rows(plain, rows)
    for layout in (pad_rows, pack_rows):
        scores, _ = replayed(policy, layout(rows))

        assert torch.allclose(scores[1], free[1], rtol=1e-6, atol=1e-6)
        assert not torch.allclose(scores[0], free[0], rtol=1e-2)


def test_experts_of_layers_without_a_router_are_left_out():
    # vLLM tells a row for every layer, of which the first of this model has no router.
    model, rows = tiny_moe("deepseek-v3"), rows_with_experts(5, 3, layers=2)
    wanted, _ = truth("deepseek-v3", rows)
    told = [row.routed_experts.array() for row in rows]
    every = [np.concatenate([np.zeros_like(ids[:, :1]), ids], 1) for ids in told]
    rows = [replace(row, routed_experts=RoutedExperts.of(ids)) for row, ids in zip(rows, every, strict=True)]

    scores, _ = replayed(policy_of(model), pad_rows(rows))

    assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(scores, wanted, strict=True))


def chosen_by(model, row) -> RoutedExperts:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row.token_ids[:-1]]), output_router_logits=True).router_logits
    return RoutedExperts.of(
        torch.stack([one.topk(CHOSEN).indices for one in logits], 1).to(torch.uint8).numpy()
    )


def test_replay_removes_most_of_the_mismatch_of_a_router_that_was_rounded():
    sampler, rows = tiny_moe(num_hidden_layers=3), rows_with_experts(60, 40, 80)
    policy = policy_of(tiny_moe(num_hidden_layers=3))
    rows = [replace(row, routed_experts=chosen_by(sampler, row)) for row in rows]
    sampled = score_rows(policy_of(sampler, router_replay=False), rows)

    exact = score_rows(policy, rows)
    for router in routers_of(policy.model):  # as of a lower precision
        router.weight.data = (router.weight * 2**4).to(torch.bfloat16).to(torch.float64) / 2**4
        router.weight.data += 0.003 * torch.randn(
            router.weight.shape, generator=torch.Generator().manual_seed(3)
        )
    kept = score_rows(policy, rows)
    free = score_rows(policy_of(policy.model, router_replay=False), rows)

    def gap(scores) -> float:
        pairs = zip(scores, sampled, strict=True)
        return float(torch.cat([(one - other).abs() for one, other in pairs]).max())

    assert gap(exact) < 1e-6  # on-policy, the ratio is 1
    assert gap(kept) < 0.2 * gap(free)


def test_routers_are_trained_and_the_load_is_that_of_the_given_experts():
    policy, rows, meter = policy_of(tiny_moe(), router_aux_loss_coef=0.1), rows_with_experts(9, 3, 6), Meter()
    for number, row in enumerate(rows):
        ids = row.routed_experts.array().copy()
        ids[:] = np.arange(CHOSEN)
        rows[number] = replace(row, routed_experts=RoutedExperts.of(ids))
    rows = assign_weights(rows, policy.config)

    accumulate(policy, rows, meter)

    assert meter.result()["moe/load/max"] == pytest.approx(EXPERTS / CHOSEN)
    assert all(float(router.weight.grad.norm()) > 0 for router in routers_of(policy.model))


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (np.zeros((8, 3, 1), "uint8"), "to 1 of at least 1 experts in 3 layers"),
        (np.zeros((8, 2, 2), "uint8"), "in 2 layers"),
        (np.full((8, 3, 2), EXPERTS, "uint8"), f"of at least {EXPERTS + 1} experts"),
    ],
)
def test_experts_of_another_model_are_refused(ids, said):
    policy, (row,) = policy_of(tiny_moe()), rows_with_experts(4)

    with pytest.raises(UsageError, match=said):
        score_rows(policy, [replace(row, routed_experts=RoutedExperts.of(ids))])


def test_a_model_without_routers_is_refused():
    with pytest.raises(UsageError, match="router_replay is set, but LlamaForCausalLM has no routers"):
        policy_of(tiny())


def test_routers_that_choose_in_another_way_are_refused():
    model = tiny_moe()
    for router in routers_of(model):
        forward = router.forward
        router.forward = lambda hidden, forward=forward: (
            *forward(hidden)[:2],
            forward(hidden)[0].argsort(-1)[:, -CHOSEN:],
        )

    with pytest.raises(UsageError, match="has routers that choose in another way"):
        policy_of(model)


def test_routers_that_give_no_weight_to_some_experts_are_refused():
    model = tiny_moe("deepseek-v3")

    def masked(router):
        """Choose by a `topk` of scores in which the experts of one group have none."""

        def forward(hidden):
            logits = functional.linear(hidden.float(), router.weight.float())
            scores = logits.sigmoid().clone()
            scores[:, 2:4] = 0
            return logits, *torch.topk(scores, CHOSEN)

        return forward

    for router in routers_of(model):
        router.forward = masked(router)

    with pytest.raises(UsageError, match="has routers that choose in another way"):
        policy_of(model)


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
from helpers.moe import rows_with_experts, tiny_moe
from helpers.ranks import play

torch.set_num_threads(1)
OUT = sys.argv[1]


def gradient(kind, **options):
    config = GRPOConfig(packing="padded", dtype="float64", router_replay=True, **options)
    trainer = GRPOTrainer(config, model=tiny_moe(num_hidden_layers=2))
    world, learner = trainer.world, trainer.learner
    rows = rows_with_experts(4, 25, 9, 14, 30, layers=2)
    first = {1: [0], 2: [0, 1]}[world.size] + [len(rows)]
    mine = rows[first[world.rank] : first[world.rank + 1]]
    mine = assign_weights(mine, trainer.config, total=world.total)
    accumulate(learner.policy, mine, Meter())
    world.add_gradients(learner.optimizer)
    grads = torch.cat([whole(one.grad).flatten() for one in learner.optimizer.masters])
    if world.rank == 0:
        torch.save(grads, f"{OUT}/{kind}")


play(lambda: gradient("one"), 1)
play(lambda: (gradient("replicate"), gradient("shard", fsdp=True, gradient_checkpointing=True)), 2)
"""


@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(tmp_path):
    run_driver(DRIVER, tmp_path)

    truth = torch.load(tmp_path / "one")
    for way in ("replicate", "shard"):
        assert float((torch.load(tmp_path / way) - truth).norm() / truth.norm()) < 1e-6
