"""Models without weights in memory, which are sharded first and then filled part by part.

A model in three states: `hollow` parameters have a shape, and one number that stands for all others, so
that adapters can be put beside them on the CPU. Before the model is sharded they move to the meta device,
where tensors have no numbers at all. After that each process fills its own parts, from files or from a model
that is sharded in the same way. No process ever holds the whole model.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentenv.training.learners.torch.files import WeightFiles
from agentenv.training.learners.torch.shards import checksum, local

__all__ = ["Unread", "blank_copy", "copy_parts", "fill", "hollow"]


@dataclass(frozen=True)
class Unread:
    """Weights of a model that are still in their files."""

    files: WeightFiles
    names: Mapping[nn.Parameter, str]
    """The hollow parameters, with the names that their weights have in the files."""
    device: torch.device
    """Device of the model in training."""
    through: torch.dtype | None = None
    """Number format that the weights pass through, as in a model that is loaded whole; None for their own."""

    def digest(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Return names, shapes and, of vectors, checksums, which tell two models apart."""
        shapes = {name: self.files.shape(name) for name in sorted(self.names.values())}
        return [
            (name, shape, checksum(self.files.read(name)) if len(shape) == 1 else 0)
            for name, shape in shapes.items()
        ]

    def release(self, model: nn.Module) -> dict[str, str]:
        """Move the hollow parameters to the meta device; return their names in the model and in the files."""
        names = {name: self.names[one] for name, one in model.named_parameters() if one in self.names}
        empty = {one: _on_meta(one) for one in self.names}
        for module in model.modules():
            for name, one in list(module.named_parameters(recurse=False)):
                if one in empty:
                    setattr(module, name, empty[one])
        return names

    def fill(self, model: nn.Module, names: Mapping[str, str]) -> None:
        """Read this process's parts of the parameters, once the model is sharded."""

        def read(name: str, spread: Tensor) -> Tensor:
            part = self.files.part(names[name], spread)
            return part if self.through is None else part.to(self.through)

        fill(model, read)


def hollow(model: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, list[str]]:
    """Give a model on the meta device hollow parameters; return these with all their names."""
    made: dict[int, nn.Parameter] = {}
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for path, module in model.named_modules():
        for name, one in list(module.named_parameters(recurse=False)):
            if id(one) not in made:
                number = torch.zeros((), dtype=dtype).expand(one.shape)
                made[id(one)] = nn.Parameter(number, one.requires_grad)
                names[made[id(one)]] = []
            setattr(module, name, made[id(one)])
            names[made[id(one)]].append(f"{path}.{name}" if path else name)
    return names


def blank_copy(model: nn.Module) -> Any:
    """Return a copy of a model whose parameters are on the meta device. Its buffers are real."""
    memo: dict[int, Any] = {id(one): _on_meta(one) for one in model.parameters()}
    # The buffers of a dry run have no memory either, whose address `deepcopy` would ask for.
    memo |= {id(one): one.clone() for one in model.buffers()}
    return copy.deepcopy(model, memo)


def fill(model: nn.Module, part: Callable[[str, Tensor], Tensor]) -> None:
    """Give each parameter on the meta device this process's part of its weights.

    Args:
        model: the model, which is sharded already.
        part: returns the part for the name of a parameter and the parameter.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, one in module.named_parameters(recurse=False):
            owners[id(one)].append((module, name))
    for name, one in list(model.named_parameters()):
        if one.device.type != "meta":
            continue
        made = nn.Parameter(_spread(part(name, one), one), one.requires_grad)
        for module, own in owners[id(one)]:
            setattr(module, own, made)


def copy_parts(source: nn.Module) -> Callable[[str, Tensor], Tensor]:
    """Return a `part` for `fill` that copies from a model of the same parameters, sharded in the same way."""
    parameters = dict(source.named_parameters())

    def part(name: str, _: Tensor) -> Tensor:
        return local(parameters[name].detach())

    return part


def _on_meta(one: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), one.requires_grad)


def _spread(part: Tensor, spread: Tensor) -> Tensor:
    """Return a part as a tensor that is sharded like another one, on the device of its mesh."""
    assert isinstance(spread, DTensor)
    mesh = spread.device_mesh
    # A copy in any case, because a slice of a file would keep the whole file mapped.
    own = torch.empty(part.shape, dtype=spread.dtype, device=mesh.device_type)
    return DTensor.from_local(
        own.copy_(part),
        mesh,
        spread.placements,
        run_check=False,
        shape=spread.shape,
        stride=spread.stride(),
    )
