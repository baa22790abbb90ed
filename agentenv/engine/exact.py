"""Checks that every engine makes before it returns a completion."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from math import isfinite
from typing import Protocol, cast

from agentenv.core.errors import ContextTooLong, EngineError, EngineUnavailable, UsageError
from agentenv.core.routed_experts import RoutedExperts
from agentenv.engine.interface import Completion, FinishReason, Sampling
from agentenv.engine.stops import faulty_stop

__all__ = [
    "checked",
    "exact_completion",
    "faulty_end",
    "faulty_ids",
    "padded",
    "room_for",
    "version_ranges",
]

LOWEST_LOGPROB = -9000.0
"""Lower log-probabilities count as minus infinity, which vLLM writes as -9999 because JSON has none."""
VOCAB_PADDING = 0.02
"""Share by which a model's vocabulary may exceed its tokenizer's. Models pad it; Phi-2 pads it by 1.8 %."""


def room_for(name: str, prompt: Sequence[int], max_tokens: int, limit: int | None) -> int:
    """Return how many tokens may be sampled after a prompt.

    Raises:
        UsageError: The prompt is empty.
        ContextTooLong: The prompt leaves no room for a single token.
    """
    if not prompt:
        raise UsageError("the prompt is empty", remedy="pass at least one token")
    if limit is None:
        return max_tokens
    if len(prompt) >= limit:
        raise ContextTooLong(
            f"the prompt has {len(prompt)} tokens, and {name} takes {limit} together with the completion"
        )
    return min(max_tokens, limit - len(prompt))


def exact_completion(
    name: str,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    reason: str | None,
    *,
    stop: Collection[int],
    max_tokens: int,
    stop_strings: Sequence[str] = (),
    ranges: tuple[tuple[int, int, int], ...],
    vocab_size: int | None = None,
    queue_s: float = 0.0,
    routed_experts: RoutedExperts | None = None,
) -> Completion:
    """Check the output of an engine and return it as a completion.

    Whether the text has one of the `stop_strings` is checked by the runner, which has the tokenizer.

    Raises:
        EngineError: Tokens and log-probabilities differ in number, a log-probability is not finite, a
            token is not an id, there are more tokens than were asked for, or the completion did not
            end in a valid way.
    """
    if len(logprobs) != len(tokens):
        raise EngineError(f"{name} returned {len(tokens)} tokens, but {len(logprobs)} log-probabilities")
    if not all(map(isfinite, logprobs)) or min(logprobs, default=0.0) <= LOWEST_LOGPROB:
        raise EngineError(f"{name} returned a log-probability that is not finite")
    if reason not in {"stop", "length", "abort"} or (not tokens and reason != "abort"):
        raise EngineError(
            f"{name} returned {len(tokens)} tokens with the finish reason {reason!r}, which is not valid"
        )
    if fault := faulty_ids(tokens, vocab_size) or faulty_end(
        tokens, reason, stop=stop, max_tokens=max_tokens, stop_strings=stop_strings
    ):
        raise EngineError(f"{name} returned {fault}")
    return Completion(
        tuple(tokens),
        tuple(logprobs),
        cast("FinishReason", reason),
        ranges,
        queue_s=queue_s,
        vocab_size=vocab_size,
        routed_experts=routed_experts,
    )


def faulty_ids(tokens: Sequence[object], limit: int | None) -> str:
    """Return which token is not an id below the limit; empty if all are.

    Args:
        tokens: the sampled tokens as an engine returned them.
        limit: size of the model's vocabulary; None if it is not known.
    """
    if not tokens:
        return ""
    # Completions are nearly always right, so only a wrong one is looked at token by token.
    if set(map(type, tokens)) == {int}:
        ids = cast("Sequence[int]", tokens)
        if min(ids) >= 0 and (limit is None or max(ids) < limit):
            return ""
    for index, token in enumerate(tokens):
        # A boolean is an `int` to isinstance, and would be trained on as the token 0 or 1.
        if type(token) is not int:
            return f"token {index} as {token!r}, a {type(token).__name__} and not an integer"
        if token < 0 or (limit is not None and token >= limit):
            size = "" if limit is None else f" of {limit}"
            return f"token id {token}, which is outside the vocabulary{size}"
    return ""


def padded(vocab_size: int) -> int:
    """Return the largest vocabulary that a model whose tokenizer has this size is taken to have."""
    return vocab_size + int(vocab_size * VOCAB_PADDING)


def faulty_end(
    tokens: Sequence[int],
    reason: str,
    *,
    stop: Collection[int],
    max_tokens: int,
    stop_strings: Sequence[str] = (),
) -> str:
    """Return what is wrong with the length or the end of a completion; empty if nothing is.

    With stop strings the completion may end with any token; `stops.faulty_stop` checks its text.
    """
    if len(tokens) > max_tokens:
        return f"{len(tokens)} tokens, but at most {max_tokens} were asked for"
    if not set(stop).isdisjoint(tokens[:-1]):
        early = next(index for index, token in enumerate(tokens) if token in stop)
        return f"{len(tokens) - early - 1} tokens after the stop token {tokens[early]}"
    if reason == "stop" and tokens[-1] not in stop and not stop_strings:
        return f"the finish reason 'stop' after token {tokens[-1]}, which is not a stop token of the request"
    return ""


def version_ranges(
    spans: Iterable[tuple[str, int, int]],
    length: int,
    version: int,
    label: str | None = None,
    run: str = "",
) -> tuple[tuple[int, int, int], ...]:
    """Return the weights version of each token, as ranges.

    If the reported versions do not cover all tokens, all get the oldest of them, so none passes for newer
    than it is.

    Args:
        spans: `(label, start, end)` as the engine reports them; may be empty.
        length: number of tokens.
        version: the version at the time of the request; used if the engine reports none.
        label: the label for that version.
        run: the training whose labels count beside it; those of every training if empty.

    Raises:
        EngineUnavailable: A label is neither ours nor the expected one, so the weights are not known.
    """
    if not length:
        return ()
    from agentenv.engine.labels import Label  # loaded here, because models in this process have no labels

    reported: list[tuple[int, int, int]] = []
    for said, start, end in spans:
        named = Label.read(said)
        if said == label:
            number = version
        elif named is not None and (not run or named.run == run):
            number = named.version
        else:
            raise EngineUnavailable(
                f"tokens {start} to {end} were sampled with weights of the label {said!r}, "
                f"but version {version} was expected"
            )
        reported.append((number, start, end))
    covered = bool(reported) and reported[0][1] == 0 and reported[-1][2] == length
    if covered and all(left[2] == right[1] for left, right in pairwise(reported)):
        return tuple(reported)
    return ((min([version, *(number for number, _, _ in reported)]), 0, length),)


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
    fault = faulty_end(ids, reason, stop=ends, max_tokens=asked.token_limit, stop_strings=asked.stop)
    if fault or not asked.stop:
        return fault
    return faulty_stop(ids, reason, ends=ends, stop=asked.stop, decode=renderer.decode)
