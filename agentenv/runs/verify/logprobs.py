"""The check of a stored episode that needs a model: its log-probabilities are computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from agentenv.core.errors import AgentEnvError
from agentenv.core.sequence import TokenSequence
from agentenv.core.trajectory import Trajectory, Turn
from agentenv.runs.verify.findings import Verification

__all__ = ["Score", "check_logprobs"]

Score: TypeAlias = Callable[[TokenSequence, Sequence[Turn]], Sequence[Sequence[float]]]
"""Computes the log-probabilities of the sampled tokens of some turns, given their sequence."""


def check_logprobs(
    record: Trajectory, score: Score, versions: Sequence[int] | None, tolerance: float, found: Verification
) -> None:
    """Compare the recorded log-probabilities with those that `score` computes; see `verify_episode`."""
    for number, sequence in enumerate(record.sequences):
        turns = [
            turn
            for turn in record.turns
            if turn.sequence == number and _may_be_scored(turn, sequence, versions)
        ]
        if not turns:
            continue
        try:
            scored = score(sequence, turns)
        except AgentEnvError as error:
            found.add("logprobs", None, f"sequence {number} cannot be scored: {error}")
            continue
        recorded = sequence.logprobs
        for turn, values in zip(turns, scored, strict=True):
            _compare(turn, recorded[turn.start : turn.end], values, tolerance, found)


def _compare(
    turn: Turn, recorded: Sequence[float], scored: Sequence[float], tolerance: float, found: Verification
) -> None:
    differences = [abs(old - new) for old, new in zip(recorded, scored, strict=True)]
    found.checked["logprobs"] += len(differences)
    found.difference += sum(differences)
    found.largest_difference = max(found.largest_difference, *differences)
    mean = sum(differences) / len(differences)
    if not mean <= tolerance:  # also true for nan
        worst = max(range(len(differences)), key=differences.__getitem__)
        found.add(
            "logprobs",
            turn.index,
            f"they differ by {mean:.3g} on average over {len(differences)} tokens; most at token "
            f"{turn.start + worst}: recorded {recorded[worst]:.4f}, recomputed {scored[worst]:.4f}",
        )


def _may_be_scored(turn: Turn, sequence: TokenSequence, versions: Sequence[int] | None) -> bool:
    """Return whether the policy sampled the turn, with weights of these versions and known settings.

    What a grammar left is known only from the supports.
    """
    spans = [span for span in sequence.spans if span.turn == turn.index and span.source in {"model", "other"}]
    fits = versions is None or all(span.weights_version in versions for span in spans)
    known = bool(turn.sampling) and (
        not turn.sampling.get("grammar") or sequence.supports_of(turn.start, turn.end) is not None
    )
    return bool(turn.num_tokens) and fits and all(span.trained for span in spans) and known
