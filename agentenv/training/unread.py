"""Make a model for several processes without reading its weights, so that each can read its own shards.

What is exactly as the files say can be read in parts. So can experts that the files hold one by one: they
are merged as transformers does. Other models are loaded whole in each process before they are sharded, and
a sentence in the log says why.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from agentenv.core.errors import DependencyMissing
from agentenv.core.faults import first_line_of
from agentenv.core.transformers_internals import ignored_weights, keeps_float32
from agentenv.engine.hf.load import ModelFiles, adapter_on, pick_device, pick_dtype
from agentenv.training.config import GRPOConfig
from agentenv.training.learners.torch.blank import Merged, Unread, hollow
from agentenv.training.learners.torch.files import read_into, stored

__all__ = ["Refused", "unread_model", "whole_reason"]


NOT_SAFETENSORS = "its weights are not in safetensors files"
Sizes = Mapping[str, torch.Size]
"""Shapes of the tensors in the files, by their names."""
Sources = Mapping[str, str | Merged]
"""Where in the files each weight is, by its name in the model, or in the files if the model has none such."""


class Refused(Exception):
    """The model cannot be read in parts; the message says why."""


def unread_model(files: ModelFiles, config: GRPOConfig) -> tuple[Any, Unread]:
    """Return a model with hollow parameters, and the files that its weights are read from later.

    A LoRA adapter is loaded, because it is small.

    Raises:
        Refused: The files do not hold the weights as the model needs them.
        ModelNotFound: The adapter does not fit its base model.
    """
    base = files.base or files
    directory = Path(base.path)
    if base.gguf_file:
        raise Refused(NOT_SAFETENSORS)
    try:
        sizes = {name: one.size for name, one in stored(directory).items()}
    except DependencyMissing as error:
        raise Refused(str(error)) from error
    except Exception as error:  # reading it whole then says what is wrong with the files
        raise Refused(f"a file of it is no safetensors file ({first_line_of(error)})") from error
    if not sizes:
        raise Refused(NOT_SAFETENSORS)
    device = torch.device(pick_device(config.device))
    wide = config.dtype == "float64"
    dtype = pick_dtype("float32" if wide else config.dtype, str(device))
    model = _build(directory, dtype)
    found = _sources(model, sizes)
    names = hollow(model, torch.float64 if wide else dtype)
    sources = {one: _source(one, aliases, found, sizes) for one, aliases in names.items()}
    _read_buffers(model, directory, found)
    if wide:
        for module in model.modules():
            for name, one in list(module.named_buffers(recurse=False)):
                setattr(module, name, one.double() if one.is_floating_point() else one)
    unread = Unread(directory, sources, device)
    return (model if files.base is None else adapter_on(model, files.path, base)), unread


def _build(directory: Path, dtype: torch.dtype) -> Any:
    """Return the model of a directory, with parameters on the meta device and real buffers."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        # Buffers that no file holds, such as the frequencies of rotary positions, are computed here.
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.tie_weights()  # the empty parameters were made one by one
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory)
    except Exception as error:  # reading it whole then says what is wrong with the files
        raise Refused(f"it cannot be made without its weights ({first_line_of(error)})") from error
    if reason := whole_reason(model, dtype):
        raise Refused(reason)
    return model.eval()


def whole_reason(model: Any, dtype: torch.dtype) -> str:
    """Return why each process loads a model whole, as far as its config says; empty if it reads parts.

    Args:
        model: the model, perhaps without weights.
        dtype: number format of the training.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantised"
    if dtype.itemsize < torch.float32.itemsize and keeps_float32(model) is not False:
        return "some of its weights may stay in float32"
    return ""


def _sources(model: Any, sizes: Sizes) -> Sources:
    """Return where in the files the weights of a model are, with the experts of a layer merged.

    transformers says what it renames and computes while it loads a model. Other conversions than the merging
    of experts are refused.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        mapping = get_model_conversion_mapping(model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        read_as = {name: rename_source_key(name, renamings, converters) for name in sizes}
        dims = {tuple(one.source_patterns): _joined_at(one) for one in converters}
    except (ImportError, TypeError, AttributeError):  # the functions are no public interface
        raise Refused("this version of transformers does not say which weights it converts") from None
    own: Mapping[str, Any] = model.state_dict()
    sources: dict[str, str | Merged] = {}
    pieces: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, (renamed, pattern) in read_as.items():
        if pattern is None:
            sources[renamed if renamed in own else name] = name
        else:
            pieces[renamed][pattern].append(name)
    for name, stacks in pieces.items():
        patterns = next(one for one in dims if next(iter(stacks)) in one)
        ordered = tuple(tuple(sorted(stacks[one], key=_numbers)) for one in patterns)
        shapes = [{sizes[piece] for piece in stack} for stack in ordered]
        dim = dims[patterns]
        if dim is None or any(len(one) != 1 for one in shapes) or len(set(map(len, ordered))) != 1:
            raise Refused(f"its weights are converted while they are loaded ({name})")
        sources[name] = Merged(ordered, dim)
    return sources


def _joined_at(converter: Any) -> int | None:
    """Return the dimension along which a converter joins what it stacked; None if it does anything else."""
    kinds = [type(one).__name__ for one in converter.operations]
    if kinds[:1] != ["MergeModulelist"] or converter.operations[0].dim or len(converter.target_patterns) != 1:
        return None
    if len(kinds) == len(converter.source_patterns) == 1:
        return 1
    return (converter.operations[1].dim or None) if kinds[1:] == ["Concatenate"] else None


def _numbers(name: str) -> list[int]:
    """Return the numbers in a name, by which the experts of a layer are ordered."""
    return [int(one) for one in re.findall(r"\d+", name)]


def _source(one: nn.Parameter, aliases: list[str], found: Sources, sizes: Sizes) -> str | Merged:
    """Return where in the files a parameter is, which may have several names in the model."""
    name = next((name for name in aliases if name in found), None)
    if name is None:
        raise Refused(f"its files have no weight {aliases[0]!r}")
    if _shape(found[name], sizes) != tuple(one.shape):
        raise Refused(f"the weight {name!r} has another shape in its files")
    return found[name]


def _shape(source: str | Merged, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape that a weight gets from the files."""
    if isinstance(source, str):
        return tuple(sizes[source])
    shape = [len(source.stacks[0]), *sizes[source.stacks[0][0]]]
    shape[source.dim] = sum(sizes[stack[0]][source.dim - 1] for stack in source.stacks)
    return tuple(shape)


def _read_buffers(model: Any, directory: Path, found: Sources) -> None:
    """Read the buffers that the files hold, and refuse what else they hold that the model does not have."""
    state: Mapping[str, torch.Tensor] = model.state_dict()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ignored = [re.compile(one) for one in ignored_weights(model)]
    for name in found.keys() - state.keys():
        if not any(one.search(name) for one in ignored):
            raise Refused(f"its files hold a weight {name!r} that the model does not have")
    buffers = {
        source: state[name] for name, source in found.items() if name in state and name not in parameters
    }
    read_into(directory, {str(source): buffer for source, buffer in buffers.items()})
