"""The optimiser: AdamW or another one on float32 masters, with gradient clipping and a schedule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from agentenv.core.errors import UsageError
from agentenv.core.imports import import_object
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.torch.shards import like, local, stand_in
from agentenv.training.metrics import applies

__all__ = ["MasterOptimizer"]


OWN_ENTRIES = ("betas", "eps", "weight_decay", "foreach", "fused")
"""Entries of an optimiser's groups that a checkpoint does not set."""
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)", re.IGNORECASE)
"""Names of parameters without weight decay, as in `Trainer.get_decay_parameter_names` of transformers."""


def decays(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: not to norms, biases and other vectors."""
    return parameter.dim() > 1 and _NOT_DECAYED.search(name) is None


class MasterOptimizer:
    """Optimises parameters of any dtype through float32 (or float64) masters.

    A bfloat16 parameter has 8 bits of mantissa, so an update of 1e-5 of its size would be lost. A backward
    pass adds each gradient to that of the master at once. Micro-batches are therefore summed in float32, and
    the low-precision gradient is freed.

    With `optimizer_offload` the masters and the optimiser's state are in main memory, also masters of wide
    parameters, and the step is computed there. Gradients are still summed and clipped where the model is, so
    they are the same; they are then moved, and the new weights are copied back in the model's format.

    Args:
        parameters: the parameters, or pairs of their names and themselves, as the optimisers of torch take
            them. Names tell norms and biases that are no vectors.
        config: the run's options.
        earlier: the masters of parameters that an earlier optimiser had, which are used on. Masters made from
            rounded weights lie in the middle between two roundings, so that hardly a weight would change
            before many small updates have added up.

    Raises:
        UsageError: No parameter requires a gradient, or the optimiser is unknown.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]],
        config: GRPOConfig,
        earlier: Mapping[Tensor, Tensor] = MappingProxyType({}),
    ) -> None:
        pairs = [("", given) if isinstance(given, Tensor) else given for given in parameters]
        trained = [(decays(*pair), pair[1]) for pair in pairs if pair[1].requires_grad]
        # Invariant: parameters with weight decay come first, so that `parameters` has the order in which the
        # optimiser numbers its groups' tensors. `masters` and `sums` have the same order. Without offload a
        # wide parameter is its own master.
        self.parameters = [one for decayed, one in trained if decayed]
        num_decayed = len(self.parameters)
        self.parameters += [one for decayed, one in trained if not decayed]
        if not self.parameters:
            raise UsageError(
                "the model has no parameter that requires a gradient, so there is nothing to train"
            )
        where = torch.device("cpu") if config.optimizer.optimizer_offload else None
        self.masters = [_master(one, earlier.get(one), where) for one in self.parameters]
        self.sums = self.masters
        """Tensors on the model's device whose `grad` is the sum of the gradients of all micro-batches."""
        if config.optimizer.optimizer_offload:
            self.sums = [one if _is_wide(one) else stand_in(one, torch.float32) for one in self.parameters]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_collector(total))
            for parameter, total in zip(self.parameters, self.sums, strict=True)
            if parameter is not total
        ]
        self.torn = False
        """Whether a step was broken off while it wrote: some weights are new and others are not."""
        self.config = config
        self.inner = _make(config, self.masters[:num_decayed], self.masters[num_decayed:])

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for tensor in (*self.masters, *self.sums, *self.parameters):
            tensor.grad = None

    def gradients(self) -> list[Tensor]:
        """Return the existing gradients, in the masters' order."""
        return [total.grad for total in self.sums if total.grad is not None]

    def step(self, rate: float) -> float:
        """Clip and apply the gradients; return their norm before clipping.

        If the norm is not finite, the weights do not change, and the caller counts it. They do not change
        either if the norm is exactly 0, when momentum and weight decay alone would move them. Gradients are
        cleared in all cases.
        """
        norms: Any = torch.nn.utils.clip_grad_norm_(self.sums, self.config.optimizer.max_grad_norm)
        norm = float(norms.full_tensor() if hasattr(norms, "full_tensor") else norms)
        if applies(norm):
            for group in self.inner.param_groups:
                if isinstance(group["lr"], Tensor):  # some optimisers keep the rate in a tensor
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            self._move_gradients()
            self.torn = True
            self.inner.step()
            self.write_back()
            self.torn = False
        self.zero_grad()
        return norm

    def _move_gradients(self) -> None:
        """Bring the gradients to the masters, one after the other, so that a device frees each."""
        for master, total in zip(self.masters, self.sums, strict=True):
            if total.grad is not None:
                grad = _laid_out(total.grad.to(master.device), master)
                total.grad = None
                master.grad = grad

    @torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
    def write_back(self) -> None:
        """Copy the masters into the model's parameters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master:
                local(parameter).copy_(local(master))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a bit-equal resume."""
        masters = [
            None if _is_wide(parameter) else master.detach()
            for parameter, master in zip(self.parameters, self.masters, strict=True)
        ]
        return {"inner": self.inner.state_dict(), "masters": masters}

    @torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; the model must have the saved weights already.

        Raises:
            UsageError: The state was saved for another model.
        """
        self.refuse_other(state)
        saved: list[Tensor | None] = state["masters"]
        for parameter, master, held in zip(self.parameters, self.masters, saved, strict=True):
            if held is not None:
                master.copy_(like(held, master))
            elif master is not parameter:  # the saved model was wide and had no masters
                local(master).copy_(local(parameter))
        inner = state["inner"]
        self.inner.load_state_dict(
            {"state": self._spread(inner["state"]), "param_groups": self._groups(inner["param_groups"])}
        )
        self.write_back()

    def refuse_other(self, state: dict[str, Any]) -> None:
        """Raise UsageError if a state was saved for another model; its tensors need not be there yet."""
        theirs, ours = (
            [len(group["params"]) for group in inner["param_groups"]]
            for inner in (state["inner"], self.inner.state_dict())
        )
        if theirs != ours:
            raise UsageError(
                f"the optimiser state has groups of {theirs} parameters (with and without weight decay), but "
                f"those of the model have {ours}",
                remedy="load a checkpoint of the same model, written by the same version of agentenv",
            )

    def _spread(self, state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return the optimiser's state of each parameter, sharded over the ranks like its master."""

        def spread(one: Any, master: Tensor) -> Any:
            return _laid_out(like(one, master), master) if isinstance(one, Tensor) else one

        return {
            index: {name: spread(one, self.masters[index]) for name, one in held.items()}
            for index, held in state.items()
        }

    def _groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return saved groups with the options of this run, and the kernels for where its masters are.

        Other entries are kept, because some optimisers count in them.
        """
        own = self.inner.param_groups
        return [
            held | {name: group[name] for name in OWN_ENTRIES if name in group}
            for held, group in zip(saved, own, strict=True)
        ]

    def close(self) -> None:
        """Remove the hooks from the model's parameters."""
        for hook in self._hooks:
            hook.remove()


def _laid_out(tensor: Tensor, master: Tensor) -> Tensor:
    """Return a tensor whose matrix lies in memory as its master's does: the fused kernel goes through both.

    Weights may be stored input-major, and their gradients or saved states the other way.
    """
    if tensor.shape != master.shape or tensor.stride() == master.stride():
        return tensor
    moved = torch.empty_like(master, dtype=tensor.dtype, requires_grad=False)
    local(moved).copy_(local(tensor))
    return moved


def _is_wide(parameter: Tensor) -> bool:
    return parameter.dtype in (torch.float32, torch.float64)


def _master(parameter: Tensor, earlier: Tensor | None, where: torch.device | None) -> Tensor:
    """Return the master of a parameter, on a device if one is named, else on the parameter's own."""
    if _is_wide(parameter) and where is None:
        return parameter
    if earlier is None:
        dtype = parameter.dtype if _is_wide(parameter) else torch.float32
        master = parameter.detach().to(where or parameter.device, dtype, copy=True)
        return (master if where is None else master.contiguous()).requires_grad_()
    # The same memory: two masters of each weight at once might not fit. A weight that was changed since, such
    # as by a checkpoint, is no longer what its master rounds to, and begins anew.
    kept = earlier.detach()
    weight = parameter.detach().to(kept.device)
    kept.copy_(torch.where(kept.to(weight.dtype) == weight, kept, weight))
    return kept.requires_grad_()


def _collector(total: Tensor) -> Callable[[Tensor], None]:
    def collect(parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if total.grad is None:
            total.grad = parameter.grad.to(total.dtype)
        else:
            total.grad.add_(parameter.grad)
        parameter.grad = None

    return collect


def _make(config: GRPOConfig, decayed: list[Tensor], others: list[Tensor]) -> torch.optim.Optimizer:
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    masters = [group for group in groups if group["params"]]
    chosen = config.optimizer
    options: dict[str, Any] = {
        "lr": config.base_rate,
        "betas": (chosen.adam_beta1, chosen.adam_beta2),
        "eps": chosen.adam_epsilon,
        "weight_decay": chosen.weight_decay,
    }
    if chosen.optim == "adamw":
        # The fused kernel reads and writes each number once, which in main memory takes a sixth of the time:
        # 0.5 ns a weight, measured on one core. The other makes several passes and copies second moments.
        kernel = kernel_of({one.device.type for one in (*decayed, *others)})
        return torch.optim.AdamW(masters, **{kernel: True}, **options)
    if ":" not in chosen.optim:
        raise UsageError(f"optim must be 'adamw' or an import string 'module:Class', not {chosen.optim!r}")
    return import_object(chosen.optim, where="optim")(masters, **options)


def kernel_of(devices: set[str]) -> str:
    """Return the name of AdamW's kernel for masters on devices of these types."""
    return "fused" if devices in ({"cpu"}, {"cuda"}) else "foreach"
