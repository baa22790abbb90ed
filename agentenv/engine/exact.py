"""What every engine checks before it hands tokens out: exact, finite, stopped where asked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from math import isfinite
from typing import cast

from agentenv.core.errors import ContextTooLong, EngineError, UsageError
from agentenv.engine.base import Completion, FinishReason

__all__ = ["VERSION_LABEL", "exact_completion", "room_for", "version_ranges"]

LOWEST_LOGPROB = -9000.0
"""vLLM writes -9999 for minus infinity, because JSON has no infinity."""
VERSION_LABEL = "agentenv-"
"""How our weights versions are named on a server."""


def room_for(name: str, prompt: Sequence[int], max_tokens: int, limit: int | None) -> int:
    """Return how many tokens may be sampled.

    Raises:
        UsageError: The prompt is empty.
        ContextTooLong: The prompt leaves no room for one token.
    """
    if not prompt:
        raise UsageError("the prompt is empty; an engine needs at least one token")
    if limit is None:
        return max_tokens
    if len(prompt) >= limit:
        raise ContextTooLong(
            f"the prompt has {len(prompt)} tokens and {name} takes {limit} with the completion"
        )
    return min(max_tokens, limit - len(prompt))


def exact_completion(
    name: str,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    reason: str | None,
    *,
    stop: Collection[int],
    ranges: tuple[tuple[int, int, int], ...],
    queue_s: float = 0.0,
) -> Completion:
    """Return a completion, or say why what an engine gave is none.

    Raises:
        EngineError: Tokens and log-probabilities do not fit together, are not finite, or the
            completion did not end as it may.
    """
    if len(logprobs) != len(tokens):
        raise EngineError(f"{name} gave {len(tokens)} tokens, but {len(logprobs)} log-probabilities")
    if not all(isfinite(value) and value > LOWEST_LOGPROB for value in logprobs):
        raise EngineError(f"{name} gave a log-probability that is not finite")
    if reason not in {"stop", "length", "abort"} or (not tokens and reason != "abort"):
        raise EngineError(f"{name} ended with {reason!r} after {len(tokens)} tokens")
    if reason == "stop" and tokens[-1] not in stop:
        raise EngineError(f"{name} stopped at token {tokens[-1]}, which is no stop token of the request")
    return Completion(tuple(tokens), tuple(logprobs), cast("FinishReason", reason), ranges, queue_s=queue_s)


def version_ranges(
    spans: Iterable[tuple[str, int, int]], length: int, version: int
) -> tuple[tuple[int, int, int], ...]:
    """Return the versions that an engine names, where they are ours and cover the tokens.

    Args:
        spans: `(label, start, end)` as the engine names them; may be empty.
        length: number of tokens.
        version: the version at the time of the request, which holds otherwise.
    """
    if not length:
        return ()
    named = [
        (int(label.removeprefix(VERSION_LABEL)), start, end)
        for label, start, end in spans
        if label.startswith(VERSION_LABEL)
    ]
    covered = bool(named) and named[0][1] == 0 and named[-1][2] == length
    joined = all(left[2] == right[1] for left, right in pairwise(named))
    return tuple(named) if covered and joined else ((version, 0, length),)
