"""The formats as entry points name them: how each is written and read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from agentenv.core import Trajectory, UsageError
from agentenv.runs import Export, Format
from agentenv_bridges.formats.atif import from_atif, to_atif
from agentenv_bridges.formats.chatlogs import from_openai, to_openai, to_sft
from agentenv_bridges.formats.inspect_log import to_inspect
from agentenv_bridges.formats.parquet import write_parquet
from agentenv_bridges.formats.prime_rl import from_prime_rl, to_prime_rl
from agentenv_bridges.formats.slime import from_slime, slime_samples
from agentenv_bridges.formats.tokens import Decode
from agentenv_bridges.formats.trl import from_trl, trl_samples
from agentenv_bridges.formats.verl import from_verl, verl_samples

__all__ = ["ATIF", "INSPECT", "OPENAI", "PARQUET", "PRIME_RL", "SFT", "SLIME", "TRL", "VERL"]

_Rows = Iterable[Mapping[str, Any]]
_Read = Callable[[_Rows, str, Decode | None], Iterable[Trajectory]]


def _tokens(read: Callable[..., Iterable[Trajectory]]) -> _Read:
    """Return the reader of a format whose rows have tokens, which may be decoded."""
    return lambda rows, env_id, decode: read(rows, env_id=env_id, decode=decode)


def _texts(read: Callable[..., Iterable[Trajectory]]) -> _Read:
    """Return the reader of a format whose rows have the texts."""
    return lambda rows, env_id, _: read(rows, env_id=env_id)


def _slime(export: Export) -> _Rows:
    groups = (group for group in export.run.groups() if export.run.role(group[0]) not in export.left_out)
    for group in slime_samples(groups, export.decode()):
        for entry in group:
            yield from entry if isinstance(entry, list) else [entry]


def _inspect(export: Export) -> Iterator[tuple[str, Mapping[str, Any]]]:
    # The list of Inspect's viewer takes only files whose names begin with a time.
    made = export.run.info.created[:19].replace(":", "-") or "1970-01-01T00-00-00"
    for env_id, log in to_inspect(export.run, export.run.info).items():
        yield f"{made}+00-00_{env_id.replace('/', '-')}_{export.run.id}.json", log


def _refuse_inspect(rows: _Rows, env_id: str, decode: Decode | None) -> Iterable[Trajectory]:
    raise UsageError("logs of Inspect are not read", remedy="import another export of the run, as openai")


def _atif(export: Export) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for index, trajectory in enumerate(export.run):
        yield f"{index:05}.json", to_atif(trajectory, model=export.run.info.model)


_NOT_SAMPLED = frozenset({"demonstration", "held-out"})

ATIF = Format(files=_atif, read=_texts(from_atif), keys=frozenset({"schema_version"}))
INSPECT = Format(files=_inspect, read=_refuse_inspect, keys=frozenset({"eval", "samples"}), unit="logs")
OPENAI = Format(
    lambda export: to_openai(export.episodes()), read=_texts(from_openai), keys=frozenset({"messages"})
)
PARQUET = Format(table=lambda export, path: write_parquet(export.run, path))
PRIME_RL = Format(
    lambda export: to_prime_rl(export.episodes(), model=export.run.info.model),
    read=_texts(from_prime_rl),
    keys=frozenset({"traces"}),
    left_out=_NOT_SAMPLED,
)
SFT = Format(
    lambda export: to_sft(
        export.episodes(), min_reward=export.min_reward, hint=export.hint, tokenizer=export.tokenizer()
    ),
    left_out=frozenset({"held-out"}),
)
SLIME = Format(
    _slime,
    read=_tokens(from_slime),
    keys=frozenset({"tokens", "response_length"}),
    left_out=_NOT_SAMPLED,
    unit="rows",
)
TRL = Format(
    lambda export: trl_samples(export.episodes()),
    read=_tokens(from_trl),
    keys=frozenset({"prompt_ids", "completion_ids"}),
    left_out=_NOT_SAMPLED,
    unit="rows",
)
VERL = Format(
    lambda export: verl_samples(export.episodes()),
    read=_tokens(from_verl),
    keys=frozenset({"response_ids", "response_mask"}),
    left_out=_NOT_SAMPLED,
    unit="rows",
)
