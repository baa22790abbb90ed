"""Models without weights in memory, which are sharded first and then filled part by part.

A model in three states: `hollow` parameters have a shape, and one number that stands for all others, so
that adapters can be put beside them on the CPU. Before the model is sharded they move to the meta device,
where tensors have no numbers at all. After that each process fills its own parts, from files or from a model
that is sharded in the same way. No process ever holds the whole model.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from agentenv.core.torch_internals import first_row
from agentenv.training.learners.torch.files import read_into, stored
from agentenv.training.learners.torch.shards import checksum, local

__all__ = ["Merged", "Unread", "blank_copy", "hollow", "make_real"]


class Merged(NamedTuple):
    """A weight that the files hold in pieces, such as those of the experts of a layer.

    Pieces are stacked along a new first dimension, and stacks are then joined.
    """

    stacks: tuple[tuple[str, ...], ...]
    """For each stack, the names of its pieces in the files."""
    dim: int
    """Dimension of the stacks along which they are joined; not the first one."""

    def places(self, whole: Tensor, sizes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return where the pieces that this process holds lie in its part of the weight, by their names."""
        first, part, places = first_row(whole), local(whole), dict[str, Tensor]()
        for row, own in enumerate(part):
            start = 0
            for stack in self.stacks:
                size = sizes[stack[0]][self.dim - 1]
                places[stack[first + row]] = own.narrow(self.dim - 1, start, size)
                start += size
        return places


@dataclass(frozen=True)
class Unread:
    """Weights of a model that are still in their files."""

    directory: Path
    sources: Mapping[nn.Parameter, str | Merged]
    """Where in the files the numbers of each hollow parameter are."""
    device: torch.device
    """Device of the model in training."""

    def digest(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Return names, shapes and, of vectors, checksums, which tell two models apart."""
        found = stored(self.directory)
        vectors = {
            name: torch.empty(one.size, dtype=one.properties.dtype)
            for name, one in found.items()
            if len(one.size) == 1
        }
        read_into(self.directory, vectors)
        return [
            (name, tuple(one.size), checksum(vectors[name]) if name in vectors else 0)
            for name, one in sorted(found.items())
        ]

    def release(self, model: nn.Module) -> dict[str, str | Merged]:
        """Move the hollow parameters to the meta device; return where each is, by its name in the model."""
        sources = {name: self.sources[one] for name, one in model.named_parameters() if one in self.sources}
        _replace(model, _on_meta, self.sources)
        return sources

    def fill(self, model: nn.Module, sources: Mapping[str, str | Merged]) -> None:
        """Read this process's parts of the parameters, once the model is sharded."""
        make_real(model, self.device)
        sizes = {name: one.size for name, one in stored(self.directory).items()}
        tensors: dict[str, Tensor] = {}
        for name, one in model.named_parameters():
            source = sources.get(name)
            if isinstance(source, Merged):
                tensors |= source.places(one.detach(), sizes)
            elif source is not None:
                tensors[source] = one.detach()
        read_into(self.directory, tensors)


def hollow(model: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, list[str]]:
    """Give a model on the meta device hollow parameters; return these with all their names."""
    _replace(
        model, lambda one: nn.Parameter(torch.zeros((), dtype=dtype).expand(one.shape), one.requires_grad)
    )
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, one in model.named_parameters(remove_duplicate=False):
        names[one].append(name)
    return names


def blank_copy(model: nn.Module) -> Any:
    """Return a copy of a model whose parameters are on the meta device. Its buffers are real."""
    memo: dict[int, Any] = {id(one): _on_meta(one) for one in model.parameters()}
    return copy.deepcopy(model, memo)


def make_real(model: nn.Module, device: torch.device) -> None:
    """Give each parameter on the meta device memory for this process's part of it."""
    meta = {one for one in model.parameters() if one.is_meta}
    _replace(model, lambda one: nn.Parameter(torch.empty_like(one, device=device), one.requires_grad), meta)


def _replace(
    model: nn.Module,
    make: Callable[[nn.Parameter], nn.Parameter],
    which: Container[nn.Parameter] | None = None,
) -> None:
    """Replace parameters, each of them wherever the model has it; None replaces all."""
    made = {one: make(one) for one in model.parameters() if which is None or one in which}
    named = model.named_parameters(remove_duplicate=False)
    model.load_state_dict({name: made[one] for name, one in named if one in made}, strict=False, assign=True)


def _on_meta(one: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), one.requires_grad)
