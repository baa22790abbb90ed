"""The routers of a mixture of experts: what they compute in a pass, their load balancing loss, and replay.

A router returns, for each token of its layer, logits for all experts and the few experts that it chooses. It
is watched by hooks that exist only during the pass, so the body of the model is called as always, with packs,
padding and checkpoints. The logits that a hook sees belong to the graph of the pass. A checkpointed layer
that is computed again in the backward pass finds no hooks any more.

Replay (rollout routing replay, R3: Ma et al., arXiv 2510.11370) sends each token to the experts that the
engine chose when it sampled. Engine and trainer compute with different kernels and formats, and where two
experts are nearly equal they would choose differently, so that a token gets other numbers altogether. The
router still computes logits from the trainer's weights, and its weights of the experts from those logits at
the given experts (equation 7 there), so gradients reach the router. Only what `torch.topk` returns inside the
router's forward pass is replaced. It therefore works for all routers that choose by it: by a softmax, by
sigmoids with a bias, or among the experts of some groups. Each token has the choices of the first request of
the engine that saw it, which are those that its keys and values in the engine's cache were computed with.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentenv.core.errors import UsageError
from agentenv.core.transformers_internals import router_modules
from agentenv.training.config import GRPOConfig
from agentenv.training.rows import to_device

__all__ = ["RouterPass", "Routers", "routers_for"]


class RouterPass:
    """What the routers computed in one pass; entry i is of the i-th layer that has one."""

    def __init__(self, layers: int) -> None:
        self.logits: list[Tensor | None] = [None] * layers
        """`[T, E]` for the T tokens of the pass, padding included, and E experts."""
        self.choices: list[Tensor | None] = [None] * layers
        """`[T, K]`: ids of the experts that each token was sent to."""

    def counts_LE(self, real_T: Tensor) -> Tensor:
        """Return how often each expert of each layer was chosen.

        Args:
            real_T: which tokens count, because they are no padding.
        """
        rows: list[Tensor] = []
        for logits_TE, choices_TK in self._layers():
            chosen_E = torch.zeros(logits_TE.shape[-1], dtype=torch.long, device=logits_TE.device)
            each_TK = real_T.to(logits_TE.device).long()[:, None].expand_as(choices_TK)
            rows.append(chosen_E.scatter_add_(0, choices_TK.reshape(-1), each_TK.reshape(-1)))
        return torch.stack(rows)

    def balance_loss(self, real_T: Tensor) -> Tensor:
        """Return the load balancing loss over the real tokens of this pass.

        It is `E * sum_e f_e P_e`: `f_e` is the mean number of choices of expert e by a token, and `P_e` its
        mean probability (Switch Transformers, arXiv 2101.03961, equations 4 to 6; with K choices its least
        value is K). As in transformers, both means go over the tokens of all layers together.

        There are two differences. `f_e` counts the experts that the tokens were really sent to, which are
        others than the K likeliest if choices are replayed. And the softmax is computed in float32 at least.

        Args:
            real_T: which tokens count, because they are no padding.
        """
        sums_E = torch.zeros((), device=real_T.device)
        rows = 0
        for logits_TE, _ in self._layers():
            wide = torch.promote_types(logits_TE.dtype, torch.float32)
            probs_TE = logits_TE.softmax(-1, dtype=wide)
            sums_E = sums_E.to(probs_TE.device) + real_T.to(probs_TE) @ probs_TE
            rows += 1
        tokens = (real_T.sum() * rows).to(sums_E)
        share_E = self.counts_LE(real_T).sum(0).to(sums_E) / tokens
        return len(share_E) * (share_E * sums_E / tokens).sum()

    def _layers(self) -> Generator[tuple[Tensor, Tensor]]:
        for logits_TE, choices_TK in zip(self.logits, self.choices, strict=True):
            # A layer may be left out of a pass, as in models that skip some of them.
            if logits_TE is not None and choices_TK is not None:
                yield logits_TE, choices_TK


class Routers:
    """The routers of a model, in the order of its layers.

    Args:
        modules: the routers, by their names.
        probe: what a router returned for a few tokens.
        logits_at: index of the logits in that.
        choices_at: index of the chosen experts in that.
        config: the configuration of the model.
    """

    def __init__(
        self, modules: dict[str, nn.Module], probe: Any, logits_at: int, choices_at: int, config: Any
    ) -> None:
        self._names, self._modules = list(modules), list(modules.values())
        self._logits_at, self._choices_at = logits_at, choices_at
        self._num_layers: int = config.num_hidden_layers
        self.num_experts: int = probe[logits_at].shape[-1]
        self.num_choices: int = probe[choices_at].shape[-1]
        self._hidden_size: int = config.hidden_size

    @classmethod
    def of(cls, decoder: Any) -> Routers | None:
        """Return the routers of a model's body; None if it has none, or only some that cannot be read."""
        found = router_modules(decoder)
        if found is None:
            return None
        modules = found.modules
        # Layers with different numbers of experts would need a number of experts for each.
        if len({next(one.parameters()).shape for one in modules.values()}) != 1:
            return None
        config = decoder.config.get_text_config()
        router = next(iter(modules.values()))
        probe = _returned(router, next(router.parameters()).new_zeros(2, config.hidden_size))
        whole = [at for at, one in enumerate(probe) if not one.is_floating_point()]
        if len(whole) != 1:
            return None
        return cls(modules, probe, found.logits_at, whole[0], config)

    @contextmanager
    def watched(self) -> Generator[RouterPass]:
        """Yield what the routers compute in a pass inside this context."""
        passed = RouterPass(len(self._modules))
        hooks = [
            module.register_forward_hook(partial(self._keep, passed, layer))
            for layer, module in enumerate(self._modules)
        ]
        try:
            yield passed
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def replayed(self, routed_TLK: Tensor, device: torch.device) -> Generator[None]:
        """Send the tokens of the passes inside this context to given experts.

        A backward pass belongs into the context, too, because checkpointed layers are computed again in it.

        Args:
            routed_TLK: ids of the experts, for each layer that has a router or for all layers; -1 where the
                router chooses.
            device: device of the passes. The ids are checked before they go there, which needs no wait.

        Raises:
            UsageError: The ids are those of another model.
        """
        routed_TLK = to_device(self._fitting(routed_TLK), device)
        before = [module.__dict__.get("forward") for module in self._modules]
        for layer, module in enumerate(self._modules):
            setattr(module, "forward", _Replay(module.forward, routed_TLK[:, layer].long(), self.num_experts))  # noqa: B010 - a type checker refuses the assignment
        try:
            yield
        finally:
            for module, own in zip(self._modules, before, strict=True):
                if own is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = own

    def _fitting(self, routed_TLK: Tensor) -> Tensor:
        """Return the experts of the layers that have a router."""
        _, layers, choices = routed_TLK.shape
        if layers == self._num_layers != len(self._modules):
            # vLLM tells a row for every layer, whether it has a router or not.
            numbers = [[int(part) for part in name.split(".") if part.isdigit()] for name in self._names]
            routed_TLK = routed_TLK[:, [found[0] for found in numbers]]
            layers = len(self._modules)
        top = int(routed_TLK.max()) if routed_TLK.numel() else 0
        if (layers, choices) != (len(self._modules), self.num_choices) or top >= self.num_experts:
            raise UsageError(
                f"the engine sent tokens to {choices} of at least {top + 1} experts in {layers} layers, and "
                f"the trained model to {self.num_choices} of {self.num_experts} in {len(self._modules)}",
                remedy="sample with the model that is trained, or set router_replay=False",
            )
        return routed_TLK

    def can_replay(self) -> bool:
        """Return whether the routers choose in a way that can be replaced, tried on a few tokens."""
        router = self._modules[0]
        weight = next(router.parameters())
        if weight.device.type == "meta":
            return True  # a model without numbers, of which another copy was tried
        experts = torch.arange(self.num_experts, device=weight.device)
        step = max(1, self.num_experts // self.num_choices)  # experts of different groups, if there are any
        given_TK = torch.stack([experts.roll(-step * one) for one in range(self.num_choices)], -1)
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(self.num_experts, self._hidden_size, generator=draw).to(weight)
        with _Chosen(given_TK, self.num_experts):
            output = _returned(router, hidden)
        if not output or not torch.equal(output[self._choices_at], given_TK):
            return False
        # A router that drops whole groups would give experts of other groups no weight.
        weights = [one for one in output if one.is_floating_point() and one.shape == given_TK.shape]
        return all(bool((one.isfinite() & (one != 0)).all()) for one in weights)

    def _keep(self, passed: RouterPass, layer: int, _: nn.Module, __: Any, output: Any) -> None:
        passed.logits[layer] = output[self._logits_at]
        passed.choices[layer] = output[self._choices_at]


class _Chosen(TorchFunctionMode):
    """Replaces the choice of a router: the `topk` over all experts."""

    def __init__(self, given_TK: Tensor, num_experts: int) -> None:
        super().__init__()
        self._given_TK, self._num_experts = given_TK, num_experts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not Tensor.topk:
            return output
        scores_TE = args[0] if args else (kwargs or {})["input"]
        # Some routers first choose groups of experts by another `topk`, over fewer values.
        if scores_TE.shape[-1] != self._num_experts or output.indices.shape != self._given_TK.shape:
            return output
        chosen_TK = torch.where(self._given_TK < 0, output.indices, self._given_TK)
        return torch.return_types.topk((scores_TE.gather(-1, chosen_TK), chosen_TK))


class _Replay:
    """The forward pass of a router whose tokens are sent to given experts."""

    def __init__(self, forward: Any, given_TK: Tensor, num_experts: int) -> None:
        self._forward = forward
        self._given_TK, self._num_experts = given_TK, num_experts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _Chosen(self._given_TK, self._num_experts):
            return self._forward(*args, **kwargs)


def routers_for(base: Any, decoder: Any, config: GRPOConfig) -> Routers | None:
    """Return the routers of a model's body; None if it has none that can be read.

    Raises:
        UsageError: An option needs routers that the model does not have.
    """
    routers = Routers.of(decoder)
    if config.loss.router_aux_loss_coef:
        _refuse_unbalanced(base, routers)
    if config.stream.router_replay:
        _refuse_replay(base, routers)
    return routers


def _refuse_replay(base: Any, routers: Routers | None) -> None:
    """Refuse a model whose routers cannot be replayed.

    Raises:
        UsageError: It has none, or they choose in a way that cannot be replaced.
    """
    if routers is not None and routers.can_replay():
        return
    why = "has no routers that can be read" if routers is None else "has routers that choose in another way"
    raise UsageError(
        f"router_replay is set, but {type(base).__name__} {why}", remedy="set router_replay=False"
    )


def _refuse_unbalanced(base: Any, routers: Routers | None) -> None:
    """Refuse a model for which there is no load balancing loss.

    Raises:
        UsageError: transformers has none for it.
    """
    if routers is not None and _has_balance_loss(base):
        return
    why = "has no routers whose logits can be read"
    if routers is not None:
        why = "has routers for which transformers has no load balancing loss"
    raise UsageError(
        f"router_aux_loss_coef is set, but {type(base).__name__} {why}",
        remedy="set router_aux_loss_coef to 0",
    )


def _has_balance_loss(base: Any) -> bool:
    """Return whether transformers has a load balancing loss for this model.

    Other mixtures of experts balance their experts in another way, such as by a bias of the router.
    """
    return hasattr(sys.modules[type(base).__module__], "load_balancing_loss_func")


@torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
def _returned(router: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    """Return what a router returns for hidden states; nothing if that is no tuple of matrices."""
    try:
        output = router(hidden)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return ()
    matrices = isinstance(output, tuple) and all(isinstance(one, Tensor) and one.dim() == 2 for one in output)
    return output if matrices else ()
