"""Which sequences of an episode are written for trainers, and which episodes they cannot take."""

from __future__ import annotations

from collections.abc import Sequence

from agentenv.core import TokenSequence, Trajectory, UsageError

__all__ = ["refuse_images", "refuse_supports", "trained_sequences"]


def refuse_images(trajectory: Trajectory, whose: str) -> None:
    """Refuse an episode with images among its tokens, for a format of token ids alone.

    Raises:
        UsageError: The episode has images, whose pixels a trainer of these ids would never see.
    """
    if any(sequence.images for sequence in trajectory.sequences):
        raise UsageError(
            f"{trajectory.group_id}, member {trajectory.member}, has images among its tokens. A format of "
            f"{whose} has token ids without pixels, so that its trainer would train on other contexts",
            remedy="export as openai, sft or parquet, which keep the images, or train with agentenv",
        )


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
