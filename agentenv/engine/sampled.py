"""Check that a completion can be what the policy sampled for a request, before it is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentenv.core.errors import EngineError, EngineUnavailable
from agentenv.engine.base import Completion, Sampling
from agentenv.engine.exact import faulty_end, faulty_ids, padded
from agentenv.engine.stops import faulty_stop

__all__ = ["checked"]


class _Vocabulary(Protocol):
    """The part of a renderer that knows the tokens."""

    stop_token_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def checked(sampled: object, asked: Sampling, renderer: _Vocabulary, *, turn: int) -> Completion:
    """Return the completion if its tokens can be what the policy sampled for this request.

    Raises:
        EngineError: They cannot.
        EngineUnavailable: There is no token at all.
    """
    if not isinstance(sampled, Completion):
        raise EngineError(f"turn {turn}: the engine returned a {type(sampled).__name__}, not a Completion")
    ids, reason = sampled.token_ids, sampled.finish_reason
    if not ids:
        raise EngineUnavailable(f"turn {turn}: the engine returned no token, not even a stop token")
    if reason not in {"stop", "length"}:
        raise EngineError(f"turn {turn}: the engine returned the unknown finish reason {reason!r}")
    # Models pad the vocabulary of their tokenizer, so its size is only a guess at that of the model.
    limit = sampled.vocab_size or padded(renderer.vocab_size)
    fault = faulty_ids(ids, None if sampled.replayed else limit)
    if not fault and sampled.supports is not None and not sampled.replayed:
        fault = faulty_ids((sampled.supports.highest,), limit)
    if not fault and sampled.sampled_by_policy and not sampled.replayed:
        fault = _faulty_end(ids, reason, asked, renderer)
    if fault:
        raise EngineError(f"turn {turn}: the engine returned {fault}")
    return sampled


def _faulty_end(ids: Sequence[int], reason: str, asked: Sampling, renderer: _Vocabulary) -> str:
    ends = renderer.stop_token_ids
    fault = faulty_end(ids, reason, stop=ends, max_tokens=asked.max_tokens, stop_strings=asked.stop)
    if fault or not asked.stop:
        return fault
    return faulty_stop(ids, reason, ends=ends, stop=asked.stop, decode=renderer.decode)
