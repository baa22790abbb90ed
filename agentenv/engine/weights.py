"""Bring a trainer's weights to the engine that samples, and check that they arrived.

The in-process transformers engine shares the model: only its caches are dropped. vLLM reads a
directory that both can see: a LoRA in place, or full weights with the prefix cache dropped. The
check scores a few completions with the trainer's weights: right weights differ by the noise of the
number format, wrong weights, temperature or template by a thousand times as much.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import exp, isfinite
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agentenv.core.errors import EngineError, UsageError
from agentenv.engine.base import Engine, Sampling

__all__ = ["HoldsModel", "SyncReport", "WeightReader", "check_sync", "compare_logprobs", "push_weights"]

MOST_K3 = 0.05
MOST_OUTSIDE = 0.3
RATIO_EDGE = 0.2
LARGEST_EXPONENT = 60.0

Scorer = Callable[[Sequence[int], Sequence[int]], "Sequence[float] | Awaitable[Sequence[float]]"]
"""From prompt ids and completion ids to the trainer's log-probabilities of the completion."""


@runtime_checkable
class HoldsModel(Protocol):
    """An engine that samples from a torch model in this process, which a trainer may share."""

    name: str
    model: Any

    def updating(self, version: int | Callable[[], int] | None = None) -> AbstractContextManager[None]:
        """Hold the engine still while weights change; the version is that of the new ones."""
        ...

    def weights_updated(self, version: int | None = None) -> int:
        """Take note that the weights have changed, and forget what was computed with the old ones."""
        ...


@runtime_checkable
class WeightReader(Protocol):
    """An engine that reads new weights from a directory; both return the version that samples now."""

    async def load_weights(self, path: str | Path, *, version: int | None = None) -> int:
        """Replace the full weights."""
        ...

    async def load_adapter(self, name: str, path: str | Path, *, version: int | None = None) -> int:
        """Load a LoRA, in place of one of its name."""
        ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """How far the engine's log-probabilities are from the trainer's, on sampled tokens."""

    tokens: int
    k3: float
    """Mean of r - 1 - log r, with r the ratio trainer / engine: an estimate of the divergence
    (Schulman, "Approximating KL Divergence", 2020)."""
    outside: float
    """Share of tokens whose ratio is outside 1 ± 0.2."""
    abs_mean: float
    worst: float
    """Largest absolute difference."""

    @property
    def problem(self) -> str:
        """What is wrong; empty if the weights agree."""
        if self.k3 <= MOST_K3 and self.outside <= MOST_OUTSIDE:
            return ""
        return (
            f"engine and trainer disagree on {self.tokens} sampled tokens: k3 {self.k3:.3g} (limit "
            f"{MOST_K3}), {self.outside:.0%} of the ratios outside 1 ± {RATIO_EDGE} (limit "
            f"{MOST_OUTSIDE:.0%}). Either the weights did not arrive (other path, prefix cache kept), "
            "or temperature, chat template or the server's --logprobs-mode differ; `agentenv doctor -m "
            "MODEL` tells which"
        )

    def require(self) -> None:
        """Raise EngineError if the weights do not agree."""
        if self.problem:
            raise EngineError(self.problem)


def compare_logprobs(engine: Sequence[float], trainer: Sequence[float]) -> SyncReport:
    """Compare log-probabilities of the same tokens.

    Raises:
        UsageError: There are none, or not equally many.
    """
    if len(engine) != len(trainer) or not engine:
        raise UsageError(
            f"log-probabilities to compare: {len(engine)} of the engine, {len(trainer)} of the trainer"
        )
    differences = [theirs - ours for ours, theirs in zip(engine, trainer, strict=True)]
    if not all(map(isfinite, differences)):
        raise UsageError("log-probabilities to compare must be finite")
    ratios = [exp(min(difference, LARGEST_EXPONENT)) for difference in differences]
    terms = [ratio - 1 - difference for ratio, difference in zip(ratios, differences, strict=True)]
    size = len(differences)
    return SyncReport(
        tokens=size,
        k3=sum(terms) / size,
        outside=sum(abs(ratio - 1) > RATIO_EDGE for ratio in ratios) / size,
        abs_mean=sum(map(abs, differences)) / size,
        worst=max(map(abs, differences)),
    )


async def check_sync(
    engine: Engine,
    score: Scorer,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling | None = None,
    stop_token_ids: Sequence[int] = (),
) -> SyncReport:
    """Sample a few completions and compare the engine's log-probabilities with the trainer's.

    Args:
        engine: what samples.
        score: the trainer's log-probabilities, at the sampling temperature.
        prompts: a few prompts.
        sampling: how to draw; 32 tokens at T = 1 if None.
        stop_token_ids: ids that end a completion.
    """
    drawn = sampling or Sampling(max_tokens=32, seed=0)
    asked = (engine.generate(prompt, drawn, stop_token_ids=stop_token_ids) for prompt in prompts)
    ours: list[float] = []
    theirs: list[float] = []
    for prompt, done in zip(prompts, await asyncio.gather(*asked), strict=True):
        scored = score(prompt, done.token_ids)
        theirs += await scored if isinstance(scored, Awaitable) else scored
        ours += done.logprobs
    return compare_logprobs(ours, theirs)


async def push_weights(
    engine: Engine,
    model: Any,
    *,
    version: int,
    directory: str | Path,
    adapter: str | None = None,
    state_dict: dict[str, Any] | None = None,
) -> int:
    """Bring a model's weights to an engine, by the way the engine has.

    Args:
        engine: a transformers engine (shared or not), or one on vLLM.
        model: the trainer's model.
        version: of the weights.
        directory: where weights are written for vLLM; it must be able to read it. The last two
            versions are kept.
        adapter: name of the LoRA to push; the full weights if None.
        state_dict: the weights, where they were gathered from several processes; the model's own if None.

    Returns:
        The version that samples now.

    Raises:
        EngineError: The engine refused.
        UsageError: The engine has no way to take weights.
    """
    if isinstance(engine, HoldsModel) and engine.model is model:
        return engine.weights_updated(version)
    if not isinstance(engine, WeightReader):
        raise UsageError(f"{engine.name} has no way to take new weights")
    target = await asyncio.to_thread(save, model, Path(directory), version, adapter, state_dict)
    if adapter is None:
        done = await engine.load_weights(target, version=version)
    else:
        done = await engine.load_adapter(adapter, target, version=version)
    await asyncio.to_thread(drop_old, target.parent, version, keep=2)
    return done


def save(
    model: Any, directory: Path, version: int, adapter: str | None, state_dict: dict[str, Any] | None = None
) -> Path:
    """Write weights, or one adapter, as vLLM reads them; return where."""
    target = directory.resolve() / f"weights-{version}"
    gathered = {} if state_dict is None else {"state_dict": state_dict}
    if adapter is None:
        model.save_pretrained(target, **gathered)
        return target
    model.save_pretrained(target, selected_adapters=[adapter], **gathered)
    nested = target / adapter
    if nested.is_dir():  # peft puts every adapter but "default" into a folder of its name
        for file in nested.iterdir():
            file.rename(target / file.name)
        nested.rmdir()
    return target


def drop_old(directory: Path, version: int, *, keep: int) -> None:
    """Delete all weights in a directory but the newest ones up to a version.

    Higher versions were left there by another run: they must not push out those in use.
    """
    found = {int(path.name.removeprefix("weights-")): path for path in directory.glob("weights-*")}
    kept = sorted(number for number in found if number <= version)[-keep:]
    for number, path in found.items():
        if number not in kept:
            shutil.rmtree(path, ignore_errors=True)
