"""Split a token sequence into one prompt and one response with a mask, as most trainers expect it."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.core import TokenSequence

__all__ = ["PromptResponse", "split_sequence"]


@dataclass(frozen=True, slots=True)
class PromptResponse:
    """A sequence split before the first token that the policy sampled."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[bool]
    """True for each response token that the policy sampled; as long as the response."""
    logprobs: list[float]
    """Logprob of each response token, 0.0 outside the mask; as long as the response."""
    turn_index: list[int]
    """Turn of each response token; as long as the response."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def split_sequence(sequence: TokenSequence) -> PromptResponse:
    """Split a sequence into prompt and response; without sampled tokens, everything is prompt.

    Tokens after the last sampled token are left out: they are an observation that was never answered.
    """
    ids, mask = sequence.token_ids, sequence.loss_mask
    if True not in mask:
        return PromptResponse(ids, [], [], [], [])
    start = mask.index(True)
    end = len(mask) - mask[::-1].index(True)
    response = slice(start, end)
    logprobs, turns = sequence.logprobs[response], sequence.turn_index[response]
    return PromptResponse(ids[:start], ids[response], mask[response], logprobs, turns)
