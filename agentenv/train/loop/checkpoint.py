"""Checkpoints: a plain Hugging Face directory, with the trainer's state beside the weights.

`model.safetensors`, `config.json` and the tokenizer's files load anywhere; `trainer_state.json` and
`trainer_state.pt` hold what a bit-equal resume needs. A directory appears under its name only when it
is complete.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agentenv.core.errors import StoreError, UsageError
from agentenv.engine.hf.load import no_progress_bar
from agentenv.train.model.shards import whole_tree, whole_weights

if TYPE_CHECKING:
    from agentenv.render.tokenizer import ChatTokenizer
    from agentenv.train.trainer import GRPOTrainer

__all__ = ["load_checkpoint", "prune_checkpoints", "save_checkpoint", "save_numbered", "save_tokenizer"]


def save_checkpoint(trainer: GRPOTrainer, path: Path) -> Path:
    """Write a checkpoint; an older one of the same name is replaced.

    The first process writes. A sharded model is gathered by all of them, who return when it is written.

    Raises:
        StoreError: The directory cannot be written.
    """
    world = trainer.world
    if not world.sharded:
        if world.rank == 0:  # replicas are equal
            _write(trainer, path, None, trainer.optimizer.state_dict())
        return path
    weights = whole_weights(trainer.model, keep=world.rank == 0)
    optimizer = whole_tree(trainer.optimizer.state_dict(), keep=world.rank == 0)
    failure: StoreError | None = None
    if world.rank == 0:
        try:
            _write(trainer, path, weights, optimizer)
        except StoreError as error:
            failure = error
    world.settle(failure)
    return path


def _write(trainer: GRPOTrainer, path: Path, weights: Any, optimizer: dict[str, Any]) -> None:
    """Write a checkpoint of these weights, the model's own if None."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with no_progress_bar():
            trainer.model.save_pretrained(str(partial), state_dict=weights, safe_serialization=True)
        if trainer.tokenizer is not None:
            save_tokenizer(trainer.tokenizer, partial)
        torch.save(
            {"optimizer": optimizer, "rng": torch.get_rng_state()},
            partial / "trainer_state.pt",
        )
        (partial / "trainer_state.json").write_text(
            json.dumps(_counters(trainer), indent=2), encoding="utf-8"
        )
        shutil.rmtree(path, ignore_errors=True)
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write the checkpoint {path}: {error.strerror or error}") from error


def _counters(trainer: GRPOTrainer) -> dict[str, Any]:
    return {
        "steps_done": trainer.steps_done,
        "updates_done": trainer.updates_done,
        "tokens_seen": trainer.tokens_seen,
        "weights_version": trainer.weights_version,
        "cursors": trainer.cursors,
    }


def load_checkpoint(trainer: GRPOTrainer, path: Path) -> None:
    """Take over a checkpoint: weights, optimiser, random numbers and the place in the tasks.

    Raises:
        UsageError: There is no such checkpoint, or it is of another model.
    """
    if not (path / "trainer_state.json").is_file():
        raise UsageError(f"{path} is no checkpoint of a trainer: it has no trainer_state.json")
    counters = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
    optimizer = trainer.optimizer  # made first: its package declares the tensors that its state holds
    state = torch.load(path / "trainer_state.pt", map_location=trainer.policy.device, weights_only=True)
    _load_weights(trainer, path)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"].cpu())
    trainer.steps_done = counters["steps_done"]
    trainer.updates_done = counters["updates_done"]
    trainer.tokens_seen = counters["tokens_seen"]
    trainer.weights_version = counters["weights_version"]
    trainer.cursors = dict(counters["cursors"])


def _load_weights(trainer: GRPOTrainer, path: Path) -> None:
    from safetensors.torch import load_file

    adapter: str | None = trainer.model.active_adapter if hasattr(trainer.model, "peft_config") else None
    # peft puts every adapter but "default" into a folder of its name
    place = path if adapter is None or not (path / adapter).is_dir() else path / adapter
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(place.glob("*.safetensors")):
        weights |= load_file(str(file))
    if adapter is not None:
        if not any("lora_" in name for name in weights):
            raise UsageError(f"{path} holds no weights of the adapter {adapter!r}")
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(trainer.model, weights, adapter_name=adapter)
        return
    missing, unexpected = trainer.model.load_state_dict(weights, strict=False)
    tied = set(getattr(trainer.model, "all_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        wrong = (list(unexpected) + sorted(set(missing) - tied))[:3]
        raise UsageError(f"{path} holds another model's weights: {wrong} do not match")


def save_tokenizer(tokenizer: ChatTokenizer, path: Path) -> None:
    """Write a tokenizer so that transformers and `ChatTokenizer.load` read it back."""
    tokenizer.backend.save(str(path / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
        (path / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def save_numbered(trainer: GRPOTrainer) -> Path:
    """Write `checkpoints/step-N` under the run's directory and delete what is over the limit."""
    directory = Path(trainer.config.output_dir) / "checkpoints"
    path = save_checkpoint(trainer, directory / f"step-{trainer.steps_done}")
    prune_checkpoints(directory, trainer.config.save_total_limit)
    return path


def prune_checkpoints(directory: Path, keep: int | None) -> None:
    """Delete the oldest `step-N` directories, so that `keep` are left; None keeps all."""
    if keep is None:
        return
    found = [one for one in directory.glob("step-*") if one.name.removeprefix("step-").isdigit()]
    found.sort(key=lambda one: int(one.name.removeprefix("step-")))
    for old in found[: max(0, len(found) - max(1, keep))]:
        shutil.rmtree(old, ignore_errors=True)
