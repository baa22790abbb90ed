"""Write and read episodes as rows for TRL's trainers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agentenv.core import Trajectory
from agentenv_bridges.formats.facts import facts_of
from agentenv_bridges.formats.split import refuse_images, refuse_supports, trained_sequences
from agentenv_bridges.formats.tokens import Decode, TokenRow, episodes_of, spans_of
from agentenv_bridges.split import split_sequence

__all__ = ["from_trl", "trl_samples"]

IGNORED = -100
"""Label of a token that does not count in the loss."""


def trl_samples(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    """Yield one row for each sequence of each trainable, scored trajectory.

    A row has the columns of a `rollout_func` (`prompt_ids`, `completion_ids`, `logprobs`, `env_mask`,
    `env_reward`, `stop_reason`, `truncated`, `turn_rewards`) and, for `SFTTrainer` on the exact tokens,
    `input_ids` with `labels`. The others are what `from_trl` needs to read the episode back; task, named
    rewards and other fields of the record are JSON texts, so that every column has one type.

    Raises:
        UsageError: An episode was sampled with top_p, top_k or min_p, which the rows cannot say.
    """
    for trajectory in trajectories:
        if not trajectory.trainable or trajectory.reward is None:
            continue
        refuse_supports(trajectory, "TRL")
        refuse_images(trajectory, "TRL")
        facts = facts_of(trajectory)
        facts = {**facts, "task": _json(facts["task"]), "rewards": _json(facts["rewards"])}
        facts["record"] = _json(facts["record"])
        del facts["reward"]
        for number, sequence in enumerate(trained_sequences(trajectory)):
            part = split_sequence(sequence)
            response = [
                token if trained else IGNORED
                for token, trained in zip(part.response_ids, part.loss_mask, strict=True)
            ]
            yield {
                "prompt_ids": part.prompt_ids,
                "completion_ids": part.response_ids,
                "logprobs": part.logprobs,
                "env_mask": [int(trained) for trained in part.loss_mask],
                "env_reward": trajectory.reward,
                "input_ids": [*part.prompt_ids, *part.response_ids],
                "labels": [IGNORED] * len(part.prompt_ids) + response,
                **facts,
                "sequence": number,
                "spans": spans_of(sequence, len(part)),
            }


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def from_trl(
    rows: Iterable[Mapping[str, Any]], *, env_id: str = "import/TRL-v0", decode: Decode | None = None
) -> Iterator[Trajectory]:
    """Yield the episodes of rows that `trl_samples` or a `rollout_func` made, with tokens and rewards.

    Args:
        rows: the rows; those of one episode follow each other.
        env_id: environment id for rows that name none.
        decode: function that returns the text of token ids. Without it, turns have tokens and no text.

    Raises:
        UsageError: The lists of a row have different lengths; the error names the row.
    """
    yield from episodes_of(rows, _token_row, env_id=env_id, decode=decode)


def _token_row(row: Mapping[str, Any]) -> TokenRow:
    response = row["completion_ids"]
    facts = {**row, "reward": row.get("env_reward")}
    for name in ("task", "rewards", "record"):
        if isinstance(row.get(name), str):
            facts[name] = json.loads(row[name])
    mask = row.get("env_mask")
    return TokenRow(
        row["prompt_ids"],
        response,
        [1] * len(response) if mask is None else mask,
        row.get("logprobs"),
        facts,
    )
