"""Split a token sequence into one prompt and one response with a mask, as most trainers expect it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentenv.core.errors import UsageError
from agentenv.core.trajectory import TokenSequence, Trajectory

__all__ = ["PromptResponse", "refuse_supports", "split_sequence", "trained_sequences"]


@dataclass(frozen=True, slots=True)
class PromptResponse:
    """A sequence split before the first token that the policy sampled."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[bool]
    """True for each response token that the policy sampled; as long as the response."""
    logprobs: list[float]
    """Logprob of each response token, 0.0 outside the mask; as long as the response."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def split_sequence(sequence: TokenSequence) -> PromptResponse:
    """Split a sequence into prompt and response; without sampled tokens, everything is prompt.

    Tokens after the last sampled token are left out: they are an observation that was never answered.
    """
    ids, mask, logprobs = sequence.token_ids, sequence.loss_mask, sequence.logprobs
    if True not in mask:
        return PromptResponse(ids, [], [], [])
    start = mask.index(True)
    end = len(mask) - mask[::-1].index(True)
    return PromptResponse(ids[:start], ids[start:end], mask[start:end], logprobs[start:end])


def refuse_supports(trajectory: Trajectory, whose: str) -> None:
    """Refuse an episode whose tokens were sampled from a cut distribution, for a format without supports.

    Args:
        trajectory: the episode.
        whose: whose format it is.

    Raises:
        UsageError: The episode would be trained, and its tokens have supports.
    """
    spans = (span for sequence in trajectory.sequences for span in sequence.spans)
    if trajectory.trainable and any(span.supports is not None for span in spans):
        raise UsageError(
            f"{trajectory.group_id}, member {trajectory.member}, was sampled with top_p, top_k or min_p. A "
            f"format of {whose} does not say which tokens these left, so that its trainer would compare "
            "probabilities of the cut distribution with those of the whole one",
            remedy="sample without top_p, top_k and min_p, or export as atif or parquet",
        )


def trained_sequences(trajectory: Trajectory) -> Sequence[TokenSequence]:
    """Return the sequences without those in which nothing is trained; all if nothing is trained in any.

    An agent with a loop of its own may lead auxiliary conversations, which are recorded and never trained.
    """
    return [one for one in trajectory.sequences if one.num_trained_tokens] or trajectory.sequences
