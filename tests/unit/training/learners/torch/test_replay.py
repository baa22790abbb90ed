"""Replayed routers: the gradient of a forward pass with given experts, in every layout, and little mismatch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

import agentenv as ae
from agentenv.core import RoutedExperts, UsageError
from agentenv.engine import MockEngine, TransformersEngine
from agentenv.envs import Env
from agentenv.render import byte_tokenizer
from agentenv.training import GRPOConfig, LoraOptions
from agentenv.training.learners.torch import Policy
from agentenv.training.learners.torch.packing import CostModel, pack_rows, pad_rows, plan
from agentenv.training.learners.torch.passes import accumulate, score_rows
from agentenv.training.metrics import Meter
from agentenv.training.step import assign_weights
from helpers.moe import CHOSEN, EXPERTS, PROMPT, gradients, rows_with_experts, tiny_moe
from helpers.training import group, tiny, trainer_of
from scenes import TOKENIZER, numbered, trainer


def policy_of(model, **options) -> Policy:
    return Policy(model, GRPOConfig(**{"dtype": "float64", "router_replay": True, **options}))


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


def by_the_lowest(router):
    forward = router.forward
    return lambda hidden: (*forward(hidden)[:2], forward(hidden)[0].argsort(-1)[:, -CHOSEN:])


def without_some(router):
    """Choose by a `topk` of scores in which the experts of one group have none."""

    def forward(hidden):
        logits = functional.linear(hidden.float(), router.weight.float())
        scores = logits.sigmoid().clone()
        scores[:, 2:4] = 0
        return logits, *torch.topk(scores, CHOSEN)

    return forward


@pytest.mark.parametrize(
    ("model", "choose", "said"),
    [
        (tiny, None, "router_replay is set, but LlamaForCausalLM has no routers"),
        (tiny_moe, by_the_lowest, "has routers that choose in another way"),
        (lambda: tiny_moe("deepseek-v3"), without_some, "has routers that choose in another way"),
    ],
)
def test_a_model_whose_routers_choose_in_another_way_or_that_has_none_is_refused(model, choose, said):
    model = model()
    for router in routers_of(model):
        router.forward = choose(router)

    with pytest.raises(UsageError, match=said):
        policy_of(model)


class Talk(Env):
    """Two turns, rewarded by their lengths, so that a random model's groups differ."""

    def reset(self, *, seed=None, options=None):
        self.told = 0
        return f"say {self.task['n']}", {}

    def step(self, action: str):
        self.told += 1
        return "more", len(action) / 10, self.told == 2, False, {}


def make_trainer(path, **settings):
    kept = []
    options = {"learning_rate": 0.01, "max_steps": 2, "router_replay": True, "beta": 0.1}
    options |= {"router_aux_loss_coef": 0.01, "num_minibatches": 2, "old_logprobs": "recompute"}
    options |= {
        "dtype": "float32",
        "stop": tuple("abcdefghij"),
        "limits": ae.RunLimits(max_tokens_per_turn=12),
    }
    model = tiny_moe(vocab_size=TOKENIZER.vocab_size, max_position_embeddings=512).float()
    given = {"model": model, "envs": numbered(Talk, 4), "on_trajectory": kept.append}
    return trainer(path, **{**given, **options, **settings}), kept


LORA = LoraOptions(r=2, target_modules=("q_proj", "v_proj"))


@pytest.mark.parametrize("way", [{}, {"lora": LORA}, {"max_ahead": 1}])
def test_episodes_carry_the_engines_choices_to_the_step(tmp_path, way):
    training, kept = make_trainer(tmp_path, **way)

    history = training.train()

    whole = [one for one in kept if one.reward is not None]
    assert whole
    for one in whole:
        for sequence in one.sequences:
            routed = sequence.routed_experts
            sampled = max(place for place, trained in enumerate(sequence.loss_mask) if trained)
            assert len(routed) == sampled
            assert (routed.layers, routed.choices, routed.width) == (3, 2, 1)
    trained = [metrics for metrics in history if metrics["tokens/trained"]]
    assert trained
    assert all(1 < metrics["moe/load/max"] <= 3 and metrics["moe/aux_loss"] > 0 for metrics in trained)
    if not way or "lora" in way:  # the engine samples from the weights that the step begins with
        assert all(metrics["mismatch/k3"] < 1e-6 for metrics in trained)


def test_an_engine_that_tells_no_experts_is_refused(tmp_path):
    silent = TransformersEngine(tiny_moe(vocab_size=300).float())
    for engine in (MockEngine(byte_tokenizer()), silent):
        training, _ = make_trainer(tmp_path, engine=engine)
        with pytest.raises(UsageError, match="does not tell to which experts"):
            training.train()
    silent.shutdown()


def test_episodes_without_experts_are_refused():
    training = trainer_of(tiny_moe(), router_replay=True)

    with pytest.raises(UsageError, match="the experts of 0 of the 8 tokens"):
        training.step([group("a", [0.0, 1.0])])
