"""A finished episode as the bytes and the summary that a run stores; workers encode their own episodes."""

from __future__ import annotations

from dataclasses import dataclass

from agentenv.core.trajectory import Trajectory
from agentenv.runs.store.codec import encode_line
from agentenv.runs.store.summary import EpisodeSummary, summarize

__all__ = ["ENCODE", "Encoded", "encode"]

ENCODE = f"{__name__}:encode"
"""Name of `encode`, with which workers find it."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A finished episode, ready to be written."""

    line: bytes
    """The line of the episode, with its line break."""
    summary: EpisodeSummary
    """The summary, without the place of the line."""


def encode(trajectory: Trajectory) -> Encoded:
    """Return what a run stores of an episode."""
    line = encode_line(trajectory)
    return Encoded(line, summarize(trajectory, size=len(line)))
