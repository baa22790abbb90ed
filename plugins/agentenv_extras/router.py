"""An engine of two models: a stronger helper answers when the policy is unsure.

The tokens of the helper are marked as not sampled by the policy: they are recorded and never trained
on. The idea comes from twinkle's RouterSampler; here the completion of the policy decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from agentenv.core import UsageError
from agentenv.engine import Completion, Engine, Features, Sampling, features_of, policy_of

__all__ = ["LessSureThan", "RouterEngine"]

SPARE_S = 0.05
"""Time before the deadline that the helper does not get, so that the policy's answer is returned in time."""


@dataclass(frozen=True, slots=True)
class LessSureThan:
    """Returns True for completions whose mean log-probability is below a limit."""

    mean_logprob: float = -1.0
    """The limit."""

    def __call__(self, completion: Completion) -> bool:
        """Return True if the policy was unsure of this completion."""
        size = len(completion.logprobs)
        return size > 0 and sum(completion.logprobs) / size < self.mean_logprob


class RouterEngine:
    """Sample from the policy, and from a helper when the policy is unsure.

    Both must have the same tokenizer, because the helper gets the token ids of the policy. If the helper does
    not answer before the deadline, the completion of the policy stands.

    Args:
        policy: engine of the model that is trained.
        helper: engine of the model that answers in place of the policy.
        unsure: function that takes a completion of the policy and returns True if the helper should
            answer; `LessSureThan()` if None.
        helper_sampling: sampling settings of the helper, except the token limit, the seed and the grammar,
            which are those of the request; all settings of the request but its adapter if None.
    """

    def __init__(
        self,
        policy: Engine,
        helper: Engine,
        *,
        unsure: Callable[[Completion], bool] | None = None,
        helper_sampling: Sampling | None = None,
    ) -> None:
        if policy is helper:
            raise UsageError("policy and helper are the same engine", remedy="pass two different engines")
        self.name = f"{policy.name} with {helper.name}"
        self.routed = 0
        """Number of completions that the helper wrote."""
        self._policy = policy
        self._helper = helper
        self._unsure = unsure or LessSureThan()
        self._helper_sampling = helper_sampling

    @property
    def features(self) -> Features:
        """Those of the policy, except for what the helper has to do too."""
        own, helped = features_of(self._policy), features_of(self._helper)
        return replace(
            own,
            images=False,
            grammars=own.grammars and helped.grammars,
            stream=None,
            policy=policy_of(self._policy),
            disconnect=self._disconnect,
        )

    @property
    def weights_version(self) -> int:
        """Weights version of the policy."""
        return self._policy.weights_version

    @weights_version.setter
    def weights_version(self, version: int) -> None:
        self._policy.weights_version = version

    @property
    def max_context_tokens(self) -> int | None:
        """The smaller of the two context limits."""
        limits = [engine.max_context_tokens for engine in (self._policy, self._helper)]
        return min((limit for limit in limits if limit is not None), default=None)

    @max_context_tokens.setter
    def max_context_tokens(self, limit: int | None) -> None:
        self._policy.max_context_tokens = self._helper.max_context_tokens = limit

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_token_ids: Sequence[int],
        session_id: str | None = None,
        deadline_s: float | None = None,
    ) -> Completion:
        """Sample one completion; see `agentenv.engine.Engine`."""
        began = monotonic()
        first = await self._policy.generate(
            prompt_ids, sampling, stop_token_ids=stop_token_ids, session_id=session_id, deadline_s=deadline_s
        )
        if first.finish_reason == "abort" or not self._unsure(first):
            return first
        # The request names an adapter of the policy, which the helper does not have. With an empty name the
        # helper takes its own.
        drawn = self._helper_sampling or replace(sampling, adapter="")
        left = None if deadline_s is None else deadline_s - (monotonic() - began) - SPARE_S
        if left is not None and left <= 0:
            return first
        second = await self._helper.generate(
            prompt_ids,
            replace(drawn, max_tokens=sampling.max_tokens, seed=sampling.seed, grammar=sampling.grammar),
            stop_token_ids=stop_token_ids,
            session_id=session_id,
            deadline_s=left,
        )
        if second.finish_reason == "abort":
            return first  # the policy's answer is complete, so it is not lost because the helper ran late
        self.routed += 1
        return replace(second, sampled_by_policy=False)

    async def release(self, session_id: str) -> None:
        """Forget everything that both engines cache for an episode."""
        await asyncio.gather(self._policy.release(session_id), self._helper.release(session_id))

    async def _disconnect(self) -> None:
        for engine in (self._policy, self._helper):
            await features_of(engine).disconnect()

    async def close(self) -> None:
        """Close both engines."""
        await asyncio.gather(self._policy.close(), self._helper.close())
