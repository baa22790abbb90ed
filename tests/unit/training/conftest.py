"""Trainers check their model once for each kind of model, not once for each test."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.training.learners.torch.policy import Policy

CHECKED: dict[object, tuple[list[str], dict[str, Any]]] = {}
"""For each kind of model and settings, what the check found, and what it left switched on."""


@pytest.fixture(autouse=True)
def _each_kind_of_model_is_checked_once(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep what `Policy.check` found, which takes a fifth of a tiny training and is equal for equal models.

    The tests of `learners`, where the check itself is tried, do without.
    """
    if "learners" in request.path.parts:
        return
    check = Policy.check

    def check_once(self: Policy) -> list[str]:
        kind = kind_of(self)
        if kind not in CHECKED:
            found = check(self)
            CHECKED[kind] = found, {"head_way": self.head_way, "pack_reason": self.pack_reason}
        found, left = CHECKED[kind]
        vars(self).update(left)
        return list(found)

    monkeypatch.setattr(Policy, "check", check_once)


def kind_of(policy: Policy) -> object:
    """What the outcome of the check depends on: the model's classes and shapes, and how it is computed."""
    config, parameters = policy.config, policy.model.named_parameters()
    return (
        tuple(type(module) for module in policy.model.modules()),
        tuple((name, weight.shape, weight.dtype, weight.requires_grad) for name, weight in parameters),
        policy.base.config.to_json_string(use_diff=False),
        (policy.head_way, policy.pack_reason),
        (
            config.gradient_checkpointing,
            config.fsdp,
            config.sampling.temperature,
            config.stream.router_replay,
        ),
    )
