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
    """The summary; the offset of the line is 0 as long as it is not known."""


def encode(trajectory: Trajectory, *, offset: int = 0) -> Encoded:
    """Return what a run stores of an episode.

    Args:
        trajectory: the episode.
        offset: offset of its line in the file, if it is known.
    """
    line = encode_line(trajectory)
    return Encoded(line, summarize(trajectory, offset=offset, size=len(line)))
