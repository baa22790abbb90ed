"""The reference policy of the KL term: the model without its adapter, a frozen copy, or a teacher."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentenv.core.errors import UsageError
from agentenv.core.visible import logger
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.torch.adapters import SAME_NATS, AdaptedModel, adapted, probe
from agentenv.training.learners.torch.passes import score_rows
from agentenv.training.learners.torch.policy import Policy
from agentenv.training.rows import Row

__all__ = ["Reference", "Teacher"]

log = logger(__name__)

ADAPTER = "agentenv_reference"


class Reference:
    """The policy as it was when training began.

    With a new LoRA adapter, the reference is the model without the adapter and costs no memory. If training
    continues an adapter, its weights are copied into a second adapter (as TRL does). A full fine-tune keeps
    a frozen copy of the model.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._model = adapted(policy.model)
        self._first: str | None = None
        """Adapter with the first weights of a continued adapter; None if the trained adapter is new."""
        self._frozen: Policy | None = None
        if self._model is not None:
            _refuse_trained_base(self._model)
            if not _is_new(self._model):
                _copy_adapter(self._model, self._model.active_adapter, ADAPTER)
                self._first = ADAPTER

    def freeze(self) -> None:
        """Keep a copy of the model as it is, if it has no adapters. It is sharded if the model is."""
        if self._model is None:
            self._frozen = self._policy.copy()
            self._frozen.model.requires_grad_(requires_grad=False)

    def score(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return the log-probabilities of each row's trained tokens under the reference."""
        if self._frozen is not None:
            return score_rows(self._frozen, rows)
        with self._switched():
            return score_rows(self._policy, rows)

    @contextmanager
    def _switched(self) -> Generator[None]:
        model = self._model
        assert model is not None
        if self._first is None:
            with model.disable_adapter():
                yield
            return
        active = model.active_adapter
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.set_adapter(self._first)
        try:
            yield
        finally:
            model.set_adapter(active)
            # `set_adapter` may have changed which parameters are trained.
            for parameter in trained:
                parameter.requires_grad_(requires_grad=True)


class Teacher:
    """Another model in the place of the reference.

    Args:
        model: a causal language model whose token ids mean what those of the policy do.
        config: the run's options.
    """

    def __init__(self, model: Any, config: GRPOConfig) -> None:
        # The experts of another model have nothing to do with those of the policy.
        own = replace(config, gradient_checkpointing=False, router_aux_loss_coef=0.0, router_replay=False)
        self._policy = Policy(model, own)
        self._policy.shard()
        for finding in self._policy.check():
            log.warning("teacher: %s", finding)
        model.requires_grad_(requires_grad=False)

    def score(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return the log-probabilities of each row's trained tokens under the teacher.

        Raises:
            UsageError: A row does not fit the teacher.
        """
        size, longest = self._policy.vocab_size, self._policy.max_length
        for row in rows:
            if max(row.token_ids) >= size:
                raise UsageError(
                    f"token id {max(row.token_ids)} is outside the teacher's vocabulary of {size}",
                    remedy="name a teacher with the tokenizer of the policy",
                )
            if longest is not None and len(row.token_ids) > longest:
                raise UsageError(
                    f"a row of {len(row.token_ids)} tokens is longer than the {longest} of the teacher",
                    remedy="set limits.max_context_tokens to the context of the teacher",
                )
        return score_rows(self._policy, rows)


def _refuse_trained_base(model: AdaptedModel) -> None:
    """Refuse to train weights of the base beside the adapter, because the reference would follow them."""
    own = f".{model.active_adapter}"
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if (other := next((name for name in trained if own not in name), None)) is not None:
        raise UsageError(
            f"beta > 0 needs a reference that stays as it is, but {other} of the base model is trained, too",
            remedy="train the adapter alone (bias='none'), or set beta=0",
        )


def _is_new(model: AdaptedModel) -> bool:
    """Return whether the active adapter has no effect yet.

    Its B matrices are zero then, and copies of modules that it trains whole are those of the base.
    """
    parameters = dict(model.named_parameters())
    copies = f"modules_to_save.{model.active_adapter}."
    for name, parameter in parameters.items():
        if not parameter.requires_grad or "lora_A" in name or "embedding_A" in name or "magnitude" in name:
            continue
        if "lora_B" in name or "embedding_B" in name:
            if parameter.detach().any():
                return False
        elif copies not in name or not parameter.equal(parameters[name.replace(copies, "original_module.")]):
            return False
    # Magnitudes (DoRA) have no value of their own that does nothing.
    with model.disable_adapter():
        base = probe(model)
    return torch.allclose(probe(model), base, rtol=0, atol=1e-6)


def _copy_adapter(model: AdaptedModel, source: str, target: str) -> None:
    config = copy(model.peft_config[source])
    config.init_lora_weights = True  # the others compute on the base model, and some change it
    config.bias = "none"  # the base has no trained biases, and only one adapter may name any
    before = probe(model)
    model.add_adapter(target, config)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parts = name.split(".")  # an adapter's name stands at the end where its weight has no module
        if target in parts:
            original = ".".join(source if part == target else part for part in parts)
            parameter.data.copy_(parameters[original].data)
            parameter.requires_grad_(requires_grad=False)
    model.set_adapter(target)
    copied = probe(model)
    model.set_adapter(source)
    difference = float(torch.stack([copied, probe(model)]).sub(before).abs().max())
    if not difference <= SAME_NATS:
        raise UsageError(
            f"the adapter's copy for the reference has changed the policy by {difference:.2g} nats a token",
            remedy="merge the adapter into the model (peft's merge_and_unload), and train a new one",
        )
