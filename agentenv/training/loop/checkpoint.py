"""Checkpoints: plain Hugging Face directories that also hold the trainer's state.

`model.safetensors`, `config.json` and the tokenizer's files load anywhere; `trainer_state.json` and
`trainer_state.pt` hold the state for a bit-equal resume, and the log-probabilities of a few rows, by which it
shows whether what was loaded is the policy that was saved. Of a sharded model the optimiser's tensors are in
the folder `optimizer`, to which each process writes its own parts. Any number of processes reads either kind
of checkpoint, and none of them reads more of the optimiser than it keeps. A directory gets its final name
only when it is complete and on the disk; see `directories`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentenv.core.errors import AgentEnvError, StoreError, UsageError
from agentenv.core.faults import first_line_of
from agentenv.core.files import read_regular
from agentenv.core.processor import usable_cores
from agentenv.core.visible import logger
from agentenv.engine.hf.load import no_progress_bar
from agentenv.render.tokenizer import ChatTokenizer
from agentenv.training.learners.learner import KeepsFiles
from agentenv.training.learners.torch.adapters import SAME_NATS, adapter_of, probe
from agentenv.training.learners.torch.files import read_into, stored
from agentenv.training.learners.torch.parts import fill_in, index_of, read_parts, take_out, write_parts
from agentenv.training.learners.torch.shards import whole_weights
from agentenv.training.learners.torch.world import World
from agentenv.training.loop.directories import STATE, find_whole, partial_of, replace_whole
from agentenv.training.step import GRPO
from agentenv.training.stop import stop

__all__ = [
    "load_checkpoint",
    "save_checkpoint",
    "save_tokenizer",
]

log = logger(__name__)

PARTS = "optimizer"
KEPT = "kept"
"""Key of what a learner elsewhere keeps."""


def save_checkpoint(
    grpo: GRPO[Any],
    path: Path,
    *,
    tokenizer: ChatTokenizer | None,
    replica: bool = False,
    **loop: Mapping[str, Any],
) -> Path:
    """Write a checkpoint, which replaces an older one of the same name.

    Only the first process writes, unless `replica` lets this one, which has all weights too. All processes
    gather a sharded model, and return when it is written.

    Args:
        grpo: the algorithm and its learner, which are saved.
        path: directory of the checkpoint.
        tokenizer: tokenizer of the model, which is saved too; None saves none.
        replica: write in this process, because the first one has gone.
        loop: further state of the loop as JSON values, which `load_checkpoint` returns.

    Raises:
        StoreError: The directory cannot be written.
    """
    learner, world = grpo.learner, grpo.learner.world
    state = {**grpo.counters(), **loop}
    if isinstance(learner, KeepsFiles):
        _write(path, partial(_fill_elsewhere, learner, state, tokenizer))
        return path
    if not world.sharded:
        if world.rank == 0 or replica:  # replicas are equal
            probed = None if stop.due else probe(learner.model).cpu()  # the end of a run waits for no pass
            held = {"optimizer": learner.optimizer.state_dict(), "probe": probed}
            _write(path, partial(_fill, learner.model, None, held, state, tokenizer))
        return path
    probed = None if world.most(int(stop.due)) else probe(learner.model).cpu()
    weights = whole_weights(learner.model, keep=world.rank == 0)
    rest, parts = take_out(learner.optimizer.state_dict())
    write = partial(_fill, learner.model, weights, {"optimizer": rest, "probe": probed}, state, tokenizer)
    _write_together(path, write, parts, world)
    return path


def _compare(model: Any, saved: torch.Tensor | None, path: Path) -> None:
    """Warn if a loaded model is another policy than was saved, such as an adapter on other weights."""
    if saved is None:
        return
    difference = float((probe(model).cpu() - saved).abs().mean())
    # Other kernels round otherwise, in a low precision by a few of its steps.
    if not difference <= max(SAME_NATS, 4 * torch.finfo(next(model.parameters()).dtype).eps):
        log.warning(
            "the policy loaded from %s differs from the one that was saved by %.2g nats a token; the files "
            "of its base model or the packages may have changed since, so look before you train on",
            path,
            difference,
        )


def _write_together(
    path: Path, write: Callable[[Path], None], parts: Mapping[str, Any], world: World
) -> None:
    """Write a checkpoint to which all processes add their parts, between the first and the last file."""
    begun = False

    def begin(directory: Path) -> None:
        nonlocal begun
        (directory / PARTS).mkdir()
        begun = True
        world.settle(None)
        write_parts(directory / PARTS, parts, world)
        write(directory)

    failure: AgentEnvError | None = None
    try:
        if world.rank == 0:
            _write(path, begin)
        else:
            world.settle(None)
            begun = True
            write_parts(partial_of(path) / PARTS, parts, world)
    except StoreError as error:
        failure = error
    if not begun:
        world.settle(failure)  # the others wait for the directory
    world.settle(failure)


def _fill(  # noqa: PLR0917 - the parts of a checkpoint
    model: Any,
    weights: Any,
    held: dict[str, Any],
    counters: Mapping[str, Any],
    tokenizer: ChatTokenizer | None,
    directory: Path,
) -> None:
    """Write the files of a checkpoint with these weights; None means the model's own."""
    with no_progress_bar():
        model.save_pretrained(str(directory), state_dict=weights, safe_serialization=True)
    if tokenizer is not None:
        save_tokenizer(tokenizer, directory)
    try:
        # Sums of floats depend on how many threads share them.
        state = {"rng": torch.get_rng_state(), "threads": torch.get_num_threads()}
        torch.save(held | state, directory / "trainer_state.pt")
    except RuntimeError as error:  # torch's own writer failed, as on a full disk
        raise OSError(str(error)) from error
    (directory / STATE).write_text(json.dumps(counters, indent=2), encoding="utf-8")


def _fill_elsewhere(
    learner: KeepsFiles, state: Mapping[str, Any], tokenizer: ChatTokenizer | None, directory: Path
) -> None:
    """Write the files of a checkpoint whose weights a server keeps."""
    kept = learner.save_files(directory)
    if tokenizer is not None:
        save_tokenizer(tokenizer, directory)
    (directory / STATE).write_text(json.dumps({**state, KEPT: kept}, indent=2), encoding="utf-8")


def _write(path: Path, fill: Callable[[Path], None]) -> None:
    from safetensors import SafetensorError

    try:
        replace_whole(path, fill)
    except StoreError:
        raise
    except (OSError, SafetensorError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise StoreError(f"cannot write the checkpoint {path}: {why}") from error


def load_checkpoint(grpo: GRPO[Any], path: Path) -> dict[str, Any]:
    """Load weights, optimiser, random state and counters; return these and the state of the loop.

    Raises:
        UsageError: The checkpoint does not exist, or it was made from another model.
    """
    path = find_whole(path)
    if not (path / STATE).is_file():
        raise UsageError(f"{path} is not a checkpoint of a trainer: it has no {STATE}")
    learner = grpo.learner
    if isinstance(learner, KeepsFiles):
        counters = _counters(path)
        learner.load_files(counters.get(KEPT, {}))
        grpo.restore(counters)
        return counters
    # The optimiser is made before the load, because its package declares the tensor types in its state.
    optimizer, sharded = learner.optimizer, learner.world.sharded
    # Of whole tensors in the file, a process that keeps a part of them reads no more than that.
    where = optimizer.masters[0].device if not sharded else torch.device("cpu")
    try:
        counters = _counters(path)
        state = torch.load(path / "trainer_state.pt", map_location=where, mmap=sharded, weights_only=True)
    except UsageError:
        raise
    except Exception as error:  # a file that is broken, or that somebody changed, can lead to any exception
        raise _unreadable(path, error) from error
    _load_weights(learner.model, path)
    optimizer.refuse_other(state["optimizer"])
    held = state["optimizer"]
    if (path / PARTS).is_dir():
        held = fill_in(held, read_parts(path / PARTS, lambda name: optimizer.masters[index_of(name)]))
    optimizer.load_state_dict(held)
    torch.set_rng_state(state["rng"].cpu())
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(state.get("threads", torch.get_num_threads()), usable_cores()))
    _compare(learner.model, state.get("probe"), path)
    grpo.restore(counters)
    return counters


def _counters(path: Path) -> dict[str, Any]:
    try:
        counters: dict[str, Any] = json.loads(read_regular(path / STATE))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    return counters


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(
        f"the checkpoint {path} cannot be read: {type(error).__name__}: {first_line_of(error)}",
        remedy="remove it, to go on from the one before it",
    )


def _load_weights(model: Any, path: Path) -> None:
    from safetensors.torch import load_file

    adapter = adapter_of(model)
    # peft saves every adapter except "default" in a folder with the adapter's name.
    folder = path if adapter is None or not (path / adapter).is_dir() else path / adapter
    if adapter is None and _load_parts(model, path):
        return
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(str(file))
    if adapter is not None:
        if not any("lora_" in name for name in weights):
            raise UsageError(f"{path} holds no weights of the adapter {adapter!r}")
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, weights, adapter_name=adapter)
        return
    if weights.keys() - model.state_dict().keys() and (converted := _converted(model, path)) is not None:
        weights = converted
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # shapes differ
        why = str(error).splitlines()[-1].strip()
        raise UsageError(f"{path} holds another model's weights: {why}") from error
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        wrong = (list(unexpected) + sorted(set(missing) - tied))[:3]
        raise UsageError(f"{path} holds another model's weights: the parameters {wrong} do not match")


def _converted(model: Any, path: Path) -> dict[str, torch.Tensor] | None:
    """Return weights whose names transformers changes as it reads them, such as those of merged experts.

    None if they are not those of this model.
    """
    # FSDP gives a model a class of its own, which cannot be made from files.
    kind: Any = next(one for one in type(model).__mro__ if not one.__name__.startswith("FSDP"))
    if not hasattr(kind, "from_pretrained"):
        return None
    dtype = next(model.parameters()).dtype
    try:
        with no_progress_bar():
            read, info = kind.from_pretrained(
                path, config=model.config, dtype=dtype, output_loading_info=True
            )
    except (OSError, RuntimeError, ValueError):  # such as weights of other shapes
        return None
    if any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        return None
    return read.state_dict()


def _load_parts(model: Any, path: Path) -> bool:
    """Read this process's parts of the weights; False if the files hold other names or shapes."""
    state: Mapping[str, torch.Tensor] = model.state_dict()
    found = stored(path)
    if any(name not in state or state[name].shape != one.size for name, one in found.items()):
        return False
    # Of tied weights the files hold one.
    read = {state[name].data_ptr() for name in found}
    if any(tensor.data_ptr() not in read for tensor in state.values()):
        return False
    read_into(path, {name: state[name] for name in found})
    return True


def save_tokenizer(tokenizer: ChatTokenizer, path: Path) -> None:
    """Write a tokenizer in files that transformers and `ChatTokenizer.load` can read."""
    tokenizer.backend.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
        (path / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if tokenizer.images is not None and tokenizer.images.settings:
        settings = json.dumps(tokenizer.images.settings, indent=2)
        (path / "preprocessor_config.json").write_text(settings, encoding="utf-8")
