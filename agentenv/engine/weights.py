"""Bring the weights of a trainer to the engine that samples, and check that they arrived.

The in-process transformers engine shares the model with the trainer, so only its caches are dropped.
vLLM reads the weights from a directory that both can access: either a LoRA adapter, or full weights,
after which the prefix cache is dropped. The check scores a few completions with the weights of the
trainer. If all is right, the log-probabilities differ by rounding only; with wrong weights, temperature
or template the difference is a thousand times as large.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import exp, isfinite
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from agentenv.core.errors import EngineError, UsageError
from agentenv.engine.interface import Engine, Sampling

__all__ = [
    "HoldsModel",
    "SharesServers",
    "SyncReport",
    "WeightReader",
    "check_sync",
    "compare_logprobs",
    "push_weights",
]

MOST_K3 = 0.05
MOST_OUTSIDE = 0.3
RATIO_EDGE = 0.2
LARGEST_EXPONENT = 60.0

Scorer = Callable[[Sequence[int], Sequence[int]], "Sequence[float] | Awaitable[Sequence[float]]"]
"""Function of prompt ids and completion ids that returns the trainer's logprobs of the completion."""


@runtime_checkable
class HoldsModel(Protocol):
    """An engine that samples from a torch model in this process; a trainer may share the model."""

    name: str
    model: Any
    trained_by: object | None
    """The training that uses the engine now, which one at a time does; None if it is free."""

    def updating(self, version: int | Callable[[], int] | None = None) -> AbstractContextManager[None]:
        """Pause the engine while weights change; `version` is that of the new weights."""
        ...

    def weights_updated(self, version: int | None = None) -> int:
        """Tell the engine that the weights changed, so that it drops what the old ones computed."""
        ...


@runtime_checkable
class WeightReader(Protocol):
    """An engine that reads new weights from a directory; both methods return the new weights version."""

    async def load_weights(self, path: str | Path, *, version: int | None = None) -> int:
        """Replace the full weights by those in a directory."""
        ...

    async def load_adapter(self, name: str, path: str | Path, *, version: int | None = None) -> int:
        """Load a LoRA adapter, which replaces an adapter of the same name."""
        ...


@runtime_checkable
class SharesServers(Protocol):
    """An engine on servers to which other trainings may push too, so that each names its weights."""

    @property
    def weights_directory(self) -> Path | None:
        """Directory of this machine in which weights wait to be sent; None if the servers must read them."""
        ...

    async def claim(self, run: str) -> None:
        """Push weights under the name of a training from now on.

        Raises:
            EngineError: Another training has pushed its weights to a server.
        """
        ...

    def follow(self, run: str, version: int) -> None:
        """Expect weights of this version, which another process of the training pushed."""
        ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """How far the log-probabilities of engine and trainer differ on the same sampled tokens."""

    tokens: int
    """Number of tokens compared."""
    k3: float
    """Mean of r - 1 - log r, with r the ratio trainer / engine: an estimate of the divergence
    (Schulman, "Approximating KL Divergence", 2020)."""
    outside: float
    """Share of tokens whose ratio is outside 1 ± 0.2."""
    abs_mean: float
    """Mean absolute difference of the log-probabilities."""
    worst: float
    """Largest absolute difference of the log-probabilities."""

    @property
    def problem(self) -> str:
        """Description of the disagreement; empty if the weights agree."""
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
        UsageError: The lists are empty, differ in length, or hold values that are not finite.
    """
    if len(engine) != len(trainer) or not engine:
        raise UsageError(
            f"cannot compare {len(engine)} log-probabilities of the engine with {len(trainer)} of the trainer"
        )
    differences = [theirs - ours for ours, theirs in zip(engine, trainer, strict=True)]
    if not all(map(isfinite, differences)):
        raise UsageError("a log-probability of the engine or of the trainer is not finite")
    # exp overflows above 709; a capped ratio is far beyond the limit anyway.
    ratios = [exp(min(difference, LARGEST_EXPONENT)) for difference in differences]
    # k3 is never negative, so opposite errors do not cancel as they would in the mean of the differences.
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
        engine: the engine to check.
        score: function that returns the trainer's log-probabilities at the sampling temperature.
        prompts: token ids of a few prompts.
        sampling: the sampling settings; 32 tokens at T = 1 if None.
        stop_token_ids: ids that end a completion.
    """
    # At temperature 1, because at 0 the logprobs are not those of the distribution that was sampled from.
    drawn = sampling or Sampling(max_tokens=32, seed=0)
    requests = (engine.generate(prompt, drawn, stop_token_ids=stop_token_ids) for prompt in prompts)
    ours: list[float] = []
    theirs: list[float] = []
    for prompt, done in zip(prompts, await asyncio.gather(*requests), strict=True):
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
    """Bring the weights of a model to an engine, in the way that the engine supports.

    Args:
        engine: the transformers engine that shares the model, or a vLLM engine.
        model: the model of the trainer.
        version: version of the weights.
        directory: directory into which weights are written for vLLM, which must be able to read it;
            the last two versions are kept. Full weights that the engine sends go to a directory of its own,
            if they fit there.
        adapter: name of the LoRA adapter to push; None means the full weights.
        state_dict: weights that were gathered from several processes; those of the model if None.

    Returns:
        The weights version of the engine.

    Raises:
        EngineError: The engine refused the weights.
        UsageError: The engine cannot take new weights.
    """
    # The same tensors were trained in place: there is nothing to bring, only old keys and values to drop.
    if isinstance(engine, HoldsModel) and engine.model is model:
        return engine.weights_updated(version)
    if not isinstance(engine, WeightReader):
        raise UsageError(
            f"{engine.name} cannot take new weights",
            remedy="use a vLLM engine, or a transformers engine that shares the model of the trainer",
        )
    places = [Path(directory)]
    staged = engine.weights_directory if adapter is None and isinstance(engine, SharesServers) else None
    if staged is not None:
        first = _fits(staged, state_dict or model.state_dict())
        places = [staged, *places] if first else [*places, staged]
    # In a thread: writing takes seconds to minutes, while episodes of the old version still go on.
    target = await asyncio.to_thread(save, model, places[0], version, adapter, state_dict)
    if adapter is None:
        done = await engine.load_weights(target, version=version)
    else:
        done = await engine.load_adapter(adapter, target, version=version)
    # Two are kept, because a slow server may still be reading the version before.
    await asyncio.to_thread(drop_old, places, version, keep=2)
    return done


def _fits(directory: Path, weights: Mapping[str, Any]) -> bool:
    """Return whether a directory has room for weights, with a tenth for what else is written there.

    The memory of a container that is meant for files is often 64 MB.
    """
    return shutil.disk_usage(directory).free >= 1.1 * sum(value.nbytes for value in weights.values())


def save(
    model: Any, directory: Path, version: int, adapter: str | None, state_dict: dict[str, Any] | None = None
) -> Path:
    """Write the weights, or one adapter, in the form that vLLM reads; return the directory."""
    # Absolute, because the server has a working directory of its own.
    target = directory.resolve() / f"weights-{version}"
    gathered = {} if state_dict is None else {"state_dict": state_dict}
    if adapter is None:
        model.save_pretrained(target, **gathered)
        return target
    model.save_pretrained(target, selected_adapters=[adapter], **gathered)
    nested = target / adapter
    if nested.is_dir():  # peft puts every adapter except "default" into a folder with its name
        for file in nested.iterdir():
            file.rename(target / file.name)
        nested.rmdir()
    return target


def drop_old(directories: Iterable[Path], version: int, *, keep: int) -> None:
    """Delete all weights in some directories except the newest `keep` versions up to `version`.

    Higher versions are left over from another run, and must not displace those in use.
    """
    paths = [path for directory in directories for path in directory.glob("weights-*")]
    names = ((path.name.removeprefix("weights-"), path) for path in paths)
    numbered = [(int(number), path) for number, path in names if number.isdecimal()]
    kept = sorted({number for number, _ in numbered if number <= version})[-keep:]
    for number, path in numbered:
        # Another process may delete the same directories, so what is gone already is no error.
        if number not in kept:
            shutil.rmtree(path, ignore_errors=True)
