"""The linear way has the gradient of the torch learner, for every loss, reduction and kind of server."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from agentenv.training.learners.torch.learner import TorchLearner
from agentenv.training.metrics import Meter
from agentenv.training.step import GRPO
from agentenv_tinker import Traits
from helpers.training import episode, group

# Steps of plain gradient descent, so that adapters differ by as much as gradients do.
PLAIN = {"adam_epsilon": 1e6, "adam_beta1": 0.0, "adam_beta2": 0.0, "learning_rate": 1e5}
LOSSES = {
    "dapo": {},
    "grpo": {"delta": 3.0},
    "dr_grpo": {"max_completion_length": 16},
    "prompt_mean": {},
    "cispo": {},
    "sapo": {},
    "reinforce": {},
    "dppo": {},
    "gmpo": {},
    "gpg": {},
    "distill": {"teacher": "http://127.0.0.1:1/v1"},
}
OPTIONS = [
    {"reduction": "seq_mean"},
    {"reduction": "constant", "max_completion_length": 16},
    {"reduction": "prompt_mean"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "old_logprobs": "sampler"},
    {"old_logprobs": "recompute", "importance_correction": "token_truncate"},
    {"old_logprobs": "recompute", "importance_correction": "sequence_mask", "importance_cap": 50.0},
    {"off_policy_mask_threshold": 0.5},
    {"beta": 0.1},
    {"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": True},
    {"turn_discount": 1.0},
]


def batch(grpo: GRPO):
    """Return uneven rows, of which two are of one episode, and two demonstrations beside them."""
    first, second = group("a", [1.0, 0.0, 0.5]), group("bcd", [0.0, 1.0])
    members = list(first)
    other = episode("a", 9, 1.0)
    both = {name: (*getattr(members[0], name), *getattr(other, name)) for name in ("sequences", "turns")}
    members[0] = replace(members[0], **both)
    whole = grpo.batch(
        [replace(first, trajectories=tuple(members)), second], [episode("d", n, 1.0) for n in (1, 2)], 0.5
    )
    return [*whole.rows, *whole.counted]


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


CASES = [*({"loss_type": name, **options} for name, options in LOSSES.items()), *OPTIONS]
QUICK = ({"loss_type": "dapo"},)
"""Also on servers that take means; the others of these are slow tests."""


def named(case: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in case.items())


@pytest.mark.parametrize(
    ("options", "reduction"),
    [
        *(pytest.param(case, "sum", id=named(case)) for case in CASES),
        *(
            pytest.param(
                case, "mean_mean", id=f"{named(case)} means", marks=[] if case in QUICK else pytest.mark.slow
            )
            for case in CASES
        ),
    ],
)
def test_the_linear_way_has_the_gradient_of_the_torch_learner(server, learner_of, options, reduction):
    server.reduction = reduction
    sums = reduction == "sum"
    mine = learner_of(Traits(adds_tokens=sums, adds_data=sums), **PLAIN, **options)
    mine.reference = None
    mine.score(batch(GRPO(mine, mine.config))[:1])  # makes the adapters
    model = mine._client.model
    start = weights(model)

    theirs = TorchLearner(copy.deepcopy(model), replace(mine.config, dtype="float64"), teacher=_Fixed())
    results = []
    for learner in (mine, theirs):
        grpo = GRPO(learner, learner.config)
        rows = batch(grpo)
        if options.get("teacher") or options.get("beta"):
            scored = zip(rows, _Fixed().score(rows), strict=True)
            rows = [replace(row, ref_n=ref_n) for row, ref_n in scored]
        results.append(grpo.update(rows, PLAIN["learning_rate"], Meter()))
    ours, wanted = results
    assert ours.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert ours.norm == pytest.approx(wanted.norm, rel=1e-5)
    moved, wanted = weights(mine._client.model), weights(theirs.model)
    off = sum(float((moved[name] - wanted[name]).square().sum()) for name in start) ** 0.5
    size = sum(float((wanted[name] - start[name]).square().sum()) for name in start) ** 0.5
    assert size > 0
    assert off < 1e-5 * size


class _Fixed:
    """A reference that has the same opinion whatever scores the rows."""

    def score(self, rows) -> list[torch.Tensor]:
        return [row.sampler_n + torch.linspace(-1, 1, row.num_trained, dtype=torch.float64) for row in rows]
