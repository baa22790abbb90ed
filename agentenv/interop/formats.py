"""The formats that `agentenv export` writes and `agentenv import` reads.

Packages add formats in the entry-point group `agentenv.formats`, each under its name, and its object is a
`Format`. Ours stand there, too. Whatever a format needs is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from agentenv.core.errors import UsageError
from agentenv.core.registry import Registry
from agentenv.core.trajectory import Trajectory

if TYPE_CHECKING:
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

    def episodes(self) -> Iterator[Trajectory]:
        """Yield the episodes to write."""
        return (episode for episode in self.run if self.run.role(episode) not in self.left_out)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of another library. It is written as `rows` or as `files`, and read with `read`, if at all."""

    rows: Callable[[Export], Iterable[Mapping[str, Any]]] | None = None
    """Makes the rows of a file of JSON lines."""
    files: Callable[[Export], Iterable[tuple[str, Mapping[str, Any]]]] | None = None
    """Makes the names and contents of JSON files in a directory."""
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


def _as_format(loaded: object, name: str, value: str) -> Format:
    if not isinstance(loaded, Format):
        raise UsageError(f"{value} is {loaded!r:.200}, which is no agentenv.interop.Format")
    return loaded


format_registry: Registry[Format] = Registry("agentenv.formats", "format", _as_format)
"""The formats of the installed packages, by name."""


def _openai(export: Export) -> Iterable[Mapping[str, Any]]:
    from agentenv.interop.chatlogs import to_openai

    return to_openai(export.episodes())


def _read_openai(rows: Iterable[Mapping[str, Any]], env_id: str, _: Decode | None) -> Iterable[Trajectory]:
    from agentenv.interop.chatlogs import from_openai

    return from_openai(rows, env_id=env_id)


def _sft(export: Export) -> Iterable[Mapping[str, Any]]:
    from agentenv.interop.chatlogs import to_sft

    return to_sft(export.episodes(), min_reward=export.min_reward, hint=export.hint)


def _trl(export: Export) -> Iterable[Mapping[str, Any]]:
    from agentenv.interop.trl import trl_samples

    return trl_samples(export.episodes())


def _read_trl(rows: Iterable[Mapping[str, Any]], env_id: str, decode: Decode | None) -> Iterable[Trajectory]:
    from agentenv.interop.trl import from_trl

    return from_trl(rows, env_id=env_id, decode=decode)


def _verl(export: Export) -> Iterable[Mapping[str, Any]]:
    from agentenv.interop.verl import verl_samples

    return verl_samples(export.episodes())


def _read_verl(rows: Iterable[Mapping[str, Any]], env_id: str, decode: Decode | None) -> Iterable[Trajectory]:
    from agentenv.interop.verl import from_verl

    return from_verl(rows, env_id=env_id, decode=decode)


def _slime(export: Export) -> Iterable[Mapping[str, Any]]:
    from agentenv.interop.slime import slime_samples

    groups = (group for group in export.run.groups() if export.run.role(group[0]) not in export.left_out)
    for group in slime_samples(groups, export.decode()):
        for entry in group:
            yield from entry if isinstance(entry, list) else [entry]


def _read_slime(
    rows: Iterable[Mapping[str, Any]], env_id: str, decode: Decode | None
) -> Iterable[Trajectory]:
    from agentenv.interop.slime import from_slime

    return from_slime(rows, env_id=env_id, decode=decode)


def _prime_rl(export: Export) -> Iterable[Mapping[str, Any]]:
    from agentenv.interop.prime_rl import to_prime_rl

    return to_prime_rl(export.episodes(), model=export.run.info.model)


def _read_prime_rl(rows: Iterable[Mapping[str, Any]], env_id: str, _: Decode | None) -> Iterable[Trajectory]:
    from agentenv.interop.prime_rl import from_prime_rl

    return from_prime_rl(rows, env_id=env_id)


def _inspect(export: Export) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from agentenv.interop.inspect_log import to_inspect

    # The list of Inspect's viewer takes only files whose names begin with a time.
    made = export.run.info.created[:19].replace(":", "-") or "1970-01-01T00-00-00"
    for env_id, log in to_inspect(export.run, export.run.info).items():
        yield f"{made}+00-00_{env_id.replace('/', '-')}_{export.run.id}.json", log


def _refuse_inspect(
    rows: Iterable[Mapping[str, Any]], env_id: str, decode: Decode | None
) -> Iterable[Trajectory]:
    raise UsageError("logs of Inspect are not read", remedy="import another export of the run, as openai")


def _atif(export: Export) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from agentenv.interop.atif import to_atif

    for index, trajectory in enumerate(export.run):
        yield f"{index:05}.json", to_atif(trajectory, model=export.run.info.model)


def _read_atif(rows: Iterable[Mapping[str, Any]], env_id: str, _: Decode | None) -> Iterable[Trajectory]:
    from agentenv.interop.atif import from_atif

    return from_atif(rows, env_id=env_id)


_NOT_SAMPLED = frozenset({"demonstration", "held-out"})

ATIF = Format(files=_atif, read=_read_atif, keys=frozenset({"schema_version"}))
INSPECT = Format(files=_inspect, read=_refuse_inspect, keys=frozenset({"eval", "samples"}), unit="logs")
OPENAI = Format(_openai, read=_read_openai, keys=frozenset({"messages"}))
PRIME_RL = Format(_prime_rl, read=_read_prime_rl, keys=frozenset({"traces"}), left_out=_NOT_SAMPLED)
SFT = Format(_sft, left_out=frozenset({"held-out"}))
SLIME = Format(
    _slime,
    read=_read_slime,
    keys=frozenset({"tokens", "response_length"}),
    left_out=_NOT_SAMPLED,
    unit="rows",
)
TRL = Format(
    _trl,
    read=_read_trl,
    keys=frozenset({"prompt_ids", "completion_ids"}),
    left_out=_NOT_SAMPLED,
    unit="rows",
)
VERL = Format(
    _verl,
    read=_read_verl,
    keys=frozenset({"response_ids", "response_mask"}),
    left_out=_NOT_SAMPLED,
    unit="rows",
)
