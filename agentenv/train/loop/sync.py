"""Weights from the trainer to what samples.

The in-process engine shares the model: nothing is copied, its caches are dropped. An engine with a
model of its own, which an asynchronous run gives it, gets the parameters copied between two of its
passes: completions under way go on with the new weights, and each token carries its version. vLLM reads
them from a directory, and is then checked: on a few completions its log-probabilities must be those of
the trainer.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from agentenv.core.errors import AgentEnvError, UsageError
from agentenv.engine.base import Connected, Sampling
from agentenv.engine.router import RouterEngine
from agentenv.engine.weights import WeightReader, check_sync, push_weights
from agentenv.train.model.shards import whole, whole_weights

if TYPE_CHECKING:
    from agentenv.engine.base import Engine
    from agentenv.train.trainer import GRPOTrainer

__all__ = ["follow_trainer", "held_still", "on_this_loop", "sampling_engine", "shares_model", "sync_engine"]

T = TypeVar("T")

CHECK_TOKENS = 16
CHECK_QUESTIONS = (
    "Say hello.",
    "What is 2 + 3?",
    # Longer than the blocks in which prefixes are cached, so that a cache of old weights shows.
    "Which number is missing? " + " ".join(str(number) for number in range(100, 220) if number != 171),
)


def sampling_engine(trainer: GRPOTrainer) -> Engine:
    """Return the engine that plays; made on the trainer's own weights if none was given.

    Raises:
        UsageError: The engine that is named gives no tokens and log-probabilities to train on.
    """
    if trainer.world.sharded and (shares_model(trainer) or not (trainer.engine or trainer.config.engine)):
        raise UsageError(
            "a sharded (fsdp=True) model cannot sample in its own process: pass engine= with a copy of the "
            "model in each process, or name a server (engine='http://...')"
        )
    if trainer.engine is None:
        trainer.engine = _named_engine(trainer) if trainer.config.engine else _own_engine(trainer)
    elif trainer.config.asynchronous and shares_model(trainer):
        raise UsageError(
            f"asynchronous training cannot play on {trainer.engine.name}: it samples from the very model in "
            "training; pass no engine, or one with weights of its own"
        )
    return trainer.engine


def _own_engine(trainer: GRPOTrainer) -> Engine:
    from agentenv.engine.hf.engine import TransformersEngine

    # A pass of the trainer switches adapters, masks and modes of the model: none may run beside a decode.
    model = copy.deepcopy(trainer.model) if trainer.config.asynchronous else trainer.model
    engine = TransformersEngine(model, name=f"hf:{trainer.model_name}", seed=trainer.config.seed)
    engine.weights_updated(trainer.weights_version)
    return engine


def _named_engine(trainer: GRPOTrainer) -> Engine:
    name = trainer.config.engine
    if name.startswith(("http://", "https://")):
        connect = importlib.import_module("agentenv.engine.vllm.server").connect
        engine, tokenizer = connect(name, tokenizer=trainer.model_name)
        reason = "it gives no token ids" if tokenizer is None else engine.untrainable_reason
        if reason:
            raise UsageError(f"{name} can be evaluated but not trained on: {reason}")
        return engine
    if not name.startswith("vllm:"):
        raise UsageError(
            f"engine {name!r} takes no weights from a trainer; it may be http://... or vllm:PATH"
        )
    if trainer.world.size > 1:
        raise UsageError(f"engine {name!r}: several training processes need servers, http://.../v1")
    from agentenv.engine.factory import load_engine

    adapters: dict[str, Any] = getattr(trainer.model, "peft_config", {})
    ranks = [one.r for one in adapters.values()]
    options: dict[str, Any] = {"lora": True, "max_lora_rank": max(16, *ranks)} if ranks else {}
    loaded: Any = load_engine(name, **options).engine
    return loaded


async def on_this_loop(trainer: GRPOTrainer, work: Coroutine[Any, Any, T]) -> T:
    """Do the work of one event loop, and close what the engine holds open on it, however it ends."""
    try:
        return await work
    finally:
        if isinstance(trainer.engine, Connected):
            await trainer.engine.disconnect()


def policy_engine(trainer: GRPOTrainer) -> Any:
    """Return the engine whose weights follow the trainer's: not a helper beside it; None if there is none."""
    return trainer.engine.policy if isinstance(trainer.engine, RouterEngine) else trainer.engine


def shares_model(trainer: GRPOTrainer) -> bool:
    """Return whether the engine samples from the very model in training."""
    return getattr(policy_engine(trainer), "model", None) is trainer.model


@contextmanager
def held_still(trainer: GRPOTrainer) -> Generator[None]:
    """Let no request run through weights that are half old and half new."""
    if not shares_model(trainer):
        yield
        return
    with policy_engine(trainer).updating(lambda: trainer.weights_version):
        yield


@torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
def sync_engine(trainer: GRPOTrainer) -> None:
    """Bring the new weights to an engine in this process that has a model of its own."""
    engine = policy_engine(trainer)
    if engine is None or shares_model(trainer):
        return
    if not isinstance(getattr(engine, "model", None), torch.nn.Module):
        raise UsageError(f"{engine.name} has no way to take new weights, so nothing can be trained on it")
    held = dict(engine.model.named_parameters())
    trained = {name: one for name, one in trainer.model.named_parameters() if one.requires_grad}
    strange = [name for name, one in trained.items() if name not in held or held[name].shape != one.shape]
    if strange:
        raise UsageError(
            f"{engine.name} holds another model than the trainer: it has no {strange[0]!r} like it"
        )
    with engine.updating(trainer.weights_version):
        for name, value in trained.items():
            held[name].copy_(whole(value))


async def follow_trainer(trainer: GRPOTrainer) -> dict[str, float]:
    """Bring the weights to what samples, and check that they arrived where they were read from a directory.

    Returns:
        Metrics of the check; empty where there was none.

    Raises:
        EngineError: The engine refused the weights, or samples from others than the trainer's.
        AgentEnvError: The process that brings the weights to a server failed.
    """
    engine = policy_engine(trainer)
    if isinstance(engine, WeightReader):
        return await _push_and_check(trainer, engine)
    await asyncio.to_thread(sync_engine, trainer)
    return {}


async def _push_and_check(trainer: GRPOTrainer, engine: Any) -> dict[str, float]:
    began = time.perf_counter()
    version = trainer.weights_version
    adapter = trainer.model.active_adapter if hasattr(trainer.model, "peft_config") else None
    await _push(trainer, engine, adapter)
    engine.weights_version = version
    report = await check_sync(
        engine,
        _scorer(trainer),
        _check_prompts(trainer, engine),
        sampling=Sampling(
            temperature=trainer.config.temperature, max_tokens=CHECK_TOKENS, seed=version, adapter=adapter
        ),
        stop_token_ids=trainer.renderer.stop_token_ids,
    )
    report.require()
    return {
        "sync/k3": report.k3,
        "sync/frac_outside": report.outside,
        "time/sync": time.perf_counter() - began,
    }


async def _push(trainer: GRPOTrainer, engine: Any, adapter: str | None) -> None:
    """Let the first process push the weights; the others wait for it, and fail if it does."""
    world, weights = trainer.world, None
    if world.sharded:
        weights = await asyncio.to_thread(whole_weights, trainer.model, keep=world.rank == 0)
    failure: AgentEnvError | None = None
    if world.rank == 0:
        try:
            await push_weights(
                engine,
                trainer.model,
                version=trainer.weights_version,
                directory=Path(trainer.config.output_dir) / "weights",
                adapter=adapter,
                state_dict=weights,
            )
        except AgentEnvError as error:
            failure = error
    world.settle(failure)


def _check_prompts(trainer: GRPOTrainer, engine: Engine) -> list[list[int]]:
    limits = [limit for limit in (trainer.policy.max_length, engine.max_context_tokens) if limit]
    room = max(1, min(limits, default=1 << 20) - CHECK_TOKENS)
    asked = [trainer.renderer.start([{"role": "user", "content": text}]) for text in CHECK_QUESTIONS]
    return [prompt[-room:] for prompt in asked]


def _scorer(trainer: GRPOTrainer) -> Callable[[Sequence[int], Sequence[int]], list[float]]:
    """Score as plainly as can be: no cache, no packing, none of the code that trains."""

    def score(prompt: Sequence[int], completion: Sequence[int]) -> list[float]:
        ids_1T = torch.tensor([[*prompt, *completion]], device=trainer.policy.device)
        with torch.no_grad():
            logits_NV = trainer.model(input_ids=ids_1T, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs_NV = (logits_NV.float() / trainer.config.temperature).log_softmax(-1)
        return logprobs_NV.gather(1, ids_1T[0, len(prompt) :, None])[:, 0].tolist()

    return score
