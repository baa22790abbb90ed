"""The reference policy of the KL term: the adapter switched off, or a frozen copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.train.batch import Row, make_row
from agentenv.train.model.adapters import AdaptedModel, adapted
from agentenv.train.model.policy import Policy
from agentenv.train.objective.loss import kl_penalty
from agentenv.train.update import score_rows

__all__ = ["Reference", "episode_kl"]

ADAPTER = "agentenv_reference"


class Reference:
    """The policy as it was when training began.

    With a new LoRA adapter that is the model without it, at no cost. When an adapter is continued,
    its weights are copied into a second adapter (as TRL does). A full fine-tune keeps a frozen copy.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        model = policy.model
        self._model = adapted(model)
        self._first: str | None = None
        """The adapter that holds what a continued one was when training began."""
        self._frozen: Policy | None = None
        if self._model is None:
            self._frozen = Policy(copy.deepcopy(model).requires_grad_(requires_grad=False), policy.config)
            # What the policy's check found holds for its copy too.
            self._frozen.fused, self._frozen.packable = policy.fused, policy.packable
            self._frozen.tree, self._frozen.cost = policy.tree, policy.cost
            self._frozen.shard()
        elif not _is_new(self._model):
            _copy_adapter(self._model, self._model.active_adapter, ADAPTER)
            self._first = ADAPTER

    def score(self, rows: Sequence[Row]) -> None:
        """Set `ref_n` of the rows."""
        if self._frozen is not None:
            scored = score_rows(self._frozen, rows)
        else:
            with self._switched():
                scored = score_rows(self._policy, rows)
        for row, values in zip(rows, scored, strict=True):
            row.ref_n = values

    @contextmanager
    def _switched(self) -> Generator[None]:
        model = self._model
        assert model is not None
        if self._first is None:
            with model.disable_adapter():
                yield
            return
        active = model.active_adapter
        trained = [one for one in model.parameters() if one.requires_grad]
        model.set_adapter(self._first)
        try:
            yield
        finally:
            model.set_adapter(active)
            for one in trained:
                one.requires_grad_(requires_grad=True)


def episode_kl(
    reference: Reference, groups: Sequence[TrajectoryGroup], estimator: str
) -> Callable[[Trajectory], float]:
    """Return the KL of each episode to the reference, from the sampler's logprobs, summed over its tokens."""
    held: dict[int, float] = {}
    rows: list[Row] = []
    owners: list[int] = []
    for one in (member for group in groups for member in group if member.trainable):
        for sequence in one.sequences:
            row = make_row(sequence, 0.0, 0, 0)
            if row is not None:
                rows.append(row)
                owners.append(id(one))
    reference.score(rows)
    for row, owner in zip(rows, owners, strict=True):
        assert row.ref_n is not None
        value = kl_penalty(row.sampler_n, row.ref_n, estimator).sum()
        held[owner] = held.get(owner, 0.0) + float(value)
    return lambda one: held.get(id(one), 0.0)


def _is_new(model: AdaptedModel) -> bool:
    """Return whether the active adapter still does nothing: every B matrix is zero."""
    return all(
        not one.detach().any()
        for name, one in model.named_parameters()
        if "lora_B" in name and one.requires_grad
    )


def _copy_adapter(model: AdaptedModel, source: str, target: str) -> None:
    model.add_adapter(target, model.peft_config[source])
    parameters = dict(model.named_parameters())
    for name, one in parameters.items():
        if f".{target}." in name:
            one.data.copy_(parameters[name.replace(f".{target}.", f".{source}.")].data)
            one.requires_grad_(requires_grad=False)
    model.set_adapter(source)
