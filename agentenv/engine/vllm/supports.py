"""The supports of tokens that vLLM sampled from a cut distribution, read from its likeliest tokens.

1. A request for N log-probabilities is answered, for each token, with those of the N likeliest tokens of the
   distribution after top-k, top-p and min-p (`--logprobs-mode processed_logprobs`). Tokens that were cut have
   minus infinity, which JSON writes as -9999.
2. So a support is complete if a token outside it is among the answers, or if its probabilities sum to 1. What
   is not complete is not returned.
3. With top-k a little more than k tokens are asked for, because all tokens stay whose logits equal the last
   one's. Without it nothing bounds a support, and `WITHOUT_TOP_K` tokens are asked for.
4. A server refuses to tell more than its `--max-logprobs`, and names the number; it is asked for that then.

vLLM's own `--return-sampling-mask` (0.32) would send less, but such a server refuses every request at
temperature 0 or without top-k, and has it on GPUs only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp

from agentenv.core.supports import MOST_TOKENS, Supports
from agentenv.engine.exact import LOWEST_LOGPROB
from agentenv.engine.interface import Completion, Sampling

__all__ = ["MOST_LOGPROBS", "allowed_logprobs", "num_logprobs", "with_supports"]

WITHOUT_TOP_K = 256
"""Number of tokens that are asked for if top-k does not bound a support. Each costs about 60 bytes of the
answer for each sampled token."""
MOST_LOGPROBS = MOST_TOKENS + MOST_TOKENS // 4
"""The `--max-logprobs` of the servers that we start. It only limits what a request may ask for."""
ROUNDING = 1e-5
"""Probability that may be missing from a complete support: what the rounding of its log-probabilities
explains in float32. It changes no log-probability by more."""
_REFUSAL = re.compile(r"logprobs of \d+, which is greater than max allowed: (\d+)")


def num_logprobs(sampling: Sampling, most: int, vocab_size: int | None) -> int:
    """Return how many likeliest tokens to ask for with each sampled token.

    Args:
        sampling: settings of the request.
        most: most that the server tells; below 0 if it has no limit.
        vocab_size: size of the model's vocabulary; None if it is not known.
    """
    if not sampling.wants_support:
        return 0
    wanted = sampling.top_k + max(8, sampling.top_k // 4) if sampling.top_k else WITHOUT_TOP_K
    limits = [limit for limit in (most, vocab_size) if limit is not None and limit >= 0]
    return min([wanted, *limits])


def allowed_logprobs(refusal: str) -> int | None:
    """Return how many log-probabilities a server allows, from its refusal; None if it does not say."""
    found = _REFUSAL.search(refusal)
    return None if found is None else int(found[1])


def with_supports(
    done: Completion, told: Sequence[Iterable[tuple[int, float]]], asked: int, sampling: Sampling
) -> Completion:
    """Return a completion with the supports of its tokens, or with the reason why it has none.

    Args:
        done: the completion.
        told: for each token the ids and log-probabilities of the likeliest tokens.
        asked: number of likeliest tokens that were asked for.
        sampling: settings of the request.
    """
    supports: list[list[int]] = []
    for index, (token, likeliest) in enumerate(zip(done.token_ids, told, strict=True)):
        values = dict(likeliest)
        values.setdefault(token, done.logprobs[index])
        left = [one for one, logprob in values.items() if logprob > LOWEST_LOGPROB]
        # Nothing was cut among the told tokens, so only their sum can say that there are no others.
        if len(left) == len(values) and 1 - sum(map(exp, values.values())) > ROUNDING:
            return replace(done, no_supports=_incomplete(index, asked, sampling))
        if len(left) > MOST_TOKENS:
            return replace(done, no_supports=_incomplete(index, MOST_TOKENS, sampling))
        supports.append(left)
    return replace(done, supports=Supports.of(supports))


def _incomplete(index: int, asked: int, sampling: Sampling) -> str:
    """Return why a completion has no supports, and what to change."""
    what = (
        f"sampled from a cut distribution that left more than the {asked} tokens that the server tells for "
        f"token {index} of a completion"
    )
    wanted = num_logprobs(sampling, MOST_TOKENS, None)
    if asked < wanted:
        return f"{what}: start it with --max-logprobs {MOST_LOGPROBS}"
    return f"{what}: set top_k, for example to 100" if not sampling.top_k else f"{what}: set a smaller top_k"
