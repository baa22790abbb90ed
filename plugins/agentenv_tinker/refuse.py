"""Options of a training that a server of the Tinker API cannot hold, refused before the first step."""

from __future__ import annotations

from agentenv.core import UsageError
from agentenv.training import GRPOConfig, LoraOptions
from agentenv.training.learners.torch import num_processes
from agentenv_tinker.probe import Traits

__all__ = ["refuse_unable"]

UNCLIPPED = 1e6
"""With a larger `max_grad_norm` nothing is clipped."""
HERE = "fsdp packing tokens_per_micro_batch gradient_checkpointing dtype device"
"""Options of the computation on this machine."""
REMEDIES = {
    "teacher": "name a vLLM server with it, http://HOST:PORT/v1",
    "max_grad_norm": "set max_grad_norm=1e9, which trains without a clip",
}
"""Other remedies than to leave an option out."""


def refuse_unable(config: GRPOConfig, traits: Traits, name: str) -> int:
    """Return the rank of the adapters to train.

    Raises:
        UsageError: An option asks for what the server cannot do, or for what it would ignore.
    """
    default = GRPOConfig()
    scored = "the server scores tokens at temperature 1 among its whole vocabulary"
    hidden = "the server returns log-probabilities of the sampled tokens and no distribution"
    computed = {
        one: (getattr(config, one) != getattr(default, one), "the server computes") for one in HERE.split()
    }
    unable = computed | {
        "optimizer_offload": (config.optimizer.optimizer_offload, "the server computes"),
        "temperature": (config.sampling.temperature != 1, scored),
        "top_p, top_k and min_p": (config.sampling.is_cut, scored),
        "entropy_coef": (bool(config.loss.entropy_coef), hidden),
        "router_replay": (config.stream.router_replay, "the server tells no experts"),
        "router_aux_loss_coef": (config.loss.router_aux_loss_coef > 0, hidden),
        "optim": (config.optimizer.optim != "adamw", "the server's optimiser is AdamW"),
        "workers": (bool(config.workers), "only this process has the server's newest weights"),
        "teacher": (
            bool(config.loss.teacher) and not config.loss.teacher_is_served,
            "the weights are not on this machine, and so no teacher is",
        ),
        "max_ahead": (
            config.plays_ahead and not traits.keeps_samplers,
            "episodes that are being played would get the new weights in mid-sentence, unmarked",
        ),
        "max_grad_norm": (
            config.optimizer.max_grad_norm < UNCLIPPED and not traits.clips,
            "the server ignores grad_clip_norm, and this machine never sees the gradient",
        ),
    }
    for option, (wrong, why) in unable.items():
        if wrong:
            raise UsageError(
                f"{name} cannot train with the given {option}: {why}",
                remedy=REMEDIES.get(option, "leave it out"),
            )
    if num_processes() > 1:
        raise UsageError(
            f"{name} is trained from one process, not {num_processes()}", remedy="leave out torchrun"
        )
    return _rank(config.lora, name)


def _rank(lora: LoraOptions | None, name: str) -> int:
    if lora is None:
        raise UsageError(
            f"{name} trains adapters and not all weights", remedy="set lora.r, as in -o lora.r=32"
        )
    default = LoraOptions()
    for option in ("alpha", "dropout", "target_modules"):
        if getattr(lora, option) != getattr(default, option):
            raise UsageError(
                f"lora.{option}={getattr(lora, option)!r} cannot be set: {name} decides it",
                remedy="leave it out; only lora.r can be set",
            )
    return lora.r
