"""The formats that `agentenv export` writes and `agentenv import` reads.

Packages add formats in the entry-point group `agentenv.formats`, each under its name, and its object is a
`Format`. Ours are in the package `agentenv_bridges`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from agentenv.core.registry import Registry, of_kind
from agentenv.core.trajectory import Trajectory
from agentenv.render.tokenizer import ChatTokenizer
from agentenv.runs.store.reader import Run

__all__ = ["Export", "Format", "format_registry"]

Decode: TypeAlias = "Callable[[list[int]], str]"


@dataclass(frozen=True, slots=True)
class Export:
    """What is to be written."""

    run: Run
    left_out: frozenset[str]
    """Roles of episodes that are not written."""
    decode: Callable[[], Decode]
    """Returns a function that decodes the run's tokens."""
    min_reward: float = 1.0
    """Least reward of an episode, for formats of demonstrations."""
    hint: str = ""
    """Text that only a teacher was shown, for formats of demonstrations."""
    tokenizer: Callable[[], ChatTokenizer | None] = lambda: None
    """Returns the run's tokenizer, with whose template rows are compared; None if it is not known."""

    def episodes(self) -> Iterator[Trajectory]:
        """Yield the episodes to write."""
        return (episode for episode in self.run if self.run.role(episode) not in self.left_out)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of another library. It is written in one of three ways, and read with `read`, if at all."""

    rows: Callable[[Export], Iterable[Mapping[str, Any]]] | None = None
    """Makes the rows of a file of JSON lines."""
    files: Callable[[Export], Iterable[tuple[str, Mapping[str, Any]]]] | None = None
    """Makes the names and contents of JSON files in a directory."""
    table: Callable[[Export, Path], int] | None = None
    """Writes a file that is no JSON, and returns the number of episodes in it."""
    read: Callable[[Iterable[Mapping[str, Any]], str, Decode | None], Iterable[Trajectory]] | None = None
    """Reads rows or documents, given the environment's id for those that name none and, if the caller has a
    tokenizer, a function that decodes tokens."""
    keys: frozenset[str] = field(default_factory=frozenset[str])
    """Keys that the first row of the format has, by which `agentenv import` recognises it."""
    left_out: frozenset[str] = field(default_factory=frozenset[str])
    """Roles of a training's episodes that must not be written: `held-out` ones where the rows are trained on,
    and `demonstration` ones where they count as samples of the policy."""
    unit: str = "episodes"
    """What is counted when it is written."""


format_registry = Registry("agentenv.formats", "format", of_kind(Format))
"""The formats of the installed packages, by name."""
