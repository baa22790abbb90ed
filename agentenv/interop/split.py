"""A token sequence as most trainers want it: one prompt, one response with a mask."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.core.trajectory import TokenSequence

__all__ = ["PromptResponse", "split_sequence"]


@dataclass(frozen=True, slots=True)
class PromptResponse:
    """A sequence cut before the first token that the policy sampled."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[bool]
    """As long as the response: true on what the policy sampled."""
    logprobs: list[float]
    """As long as the response: 0.0 outside the mask."""


def split_sequence(sequence: TokenSequence) -> PromptResponse:
    """Cut a sequence into prompt and response; without sampled tokens all of it is prompt.

    What follows the last sampled token (an observation that was never answered) is left out.
    """
    ids, mask, logprobs = sequence.token_ids, sequence.loss_mask, sequence.logprobs
    if True not in mask:
        return PromptResponse(ids, [], [], [])
    start = mask.index(True)
    end = len(mask) - mask[::-1].index(True)
    return PromptResponse(ids[:start], ids[start:end], mask[start:end], logprobs[start:end])
