"""Write groups in slime's `Sample` format, with its length rules, and read samples back.

The format is defined in THUDM/slime, slime/utils/types.py: `tokens` is prompt and response together,
`loss_mask` and `rollout_log_probs` have exactly `response_length` entries, and `response` is the text of
these response tokens. slime asserts that a group has `n_samples_per_prompt` entries; an entry is a sample, or
a list of samples if one episode has several sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from agentenv.core import JsonValue, Message, TokenSequence, Trajectory, TrajectoryGroup
from agentenv_bridges.formats.facts import facts_of
from agentenv_bridges.formats.split import refuse_images, refuse_supports, trained_sequences
from agentenv_bridges.formats.tokens import Decode, TokenRow, episodes_of, spans_of
from agentenv_bridges.split import split_sequence

__all__ = ["from_slime", "slime_samples"]

STOP_REASONS = {"completed": "final_answer", "truncated": "generation_length"}
"""Stop reasons for a sample's status, where its metadata has none; other samples are `aborted`."""


def slime_samples(
    groups: Iterable[TrajectoryGroup], decode: Decode
) -> Iterator[list[dict[str, JsonValue] | list[dict[str, JsonValue]]]]:
    """Yield each group as a list with one entry for each member, so that the group keeps its size.

    An entry is a sample. If an episode's history was rewritten, it is a list of samples, which share a
    `rollout_id`, so that slime counts the episode once. Members that cannot be trained are kept with the
    status `aborted` and a mask of zeros; those that failed before anything was sampled have no response.
    Without a reward they have 0.0, as in a live training, because slime makes one tensor of all rewards;
    `metadata` has the recorded one.
    `index` is unique over all groups.

    Args:
        groups: groups of episodes.
        decode: function that returns the text of token ids, special tokens included.

    Raises:
        UsageError: An episode was sampled with top_p, top_k or min_p, which samples cannot say.
    """
    index = rollout_id = 0
    for group_index, group in enumerate(groups):
        entries: list[dict[str, JsonValue] | list[dict[str, JsonValue]]] = []
        for trajectory in group:
            refuse_supports(trajectory, "slime")
            refuse_images(trajectory, "slime")
            samples = [
                {
                    "group_index": group_index,
                    "index": index + number,
                    "rollout_id": rollout_id,
                    **_sample(trajectory, sequence, number, decode),
                }
                for number, sequence in enumerate(trained_sequences(trajectory) or (TokenSequence(()),))
            ]
            entries.append(samples[0] if len(samples) == 1 else samples)
            index += len(samples)
            rollout_id += 1
        yield entries


def _sample(
    trajectory: Trajectory, sequence: TokenSequence, number: int, decode: Decode
) -> dict[str, JsonValue]:
    part = split_sequence(sequence)
    trained = trajectory.trainable and trajectory.reward is not None
    facts = facts_of(trajectory)
    return {
        "prompt": cast("JsonValue", _prompt(trajectory)),
        "tokens": [*part.prompt_ids, *part.response_ids],
        "response": decode(part.response_ids) if part.response_ids else "",
        "response_length": len(part.response_ids),
        "reward": 0.0 if trajectory.reward is None else trajectory.reward,
        "loss_mask": [int(value and trained) for value in part.loss_mask],
        "rollout_log_probs": part.logprobs,
        "weight_versions": [str(version) for version in trajectory.weights_versions],
        "status": _status(trajectory),
        "remove_sample": not trained,
        "metadata": {**facts, "sequence": number, "spans": spans_of(sequence, len(part))},
    }


def _prompt(trajectory: Trajectory) -> list[Message]:
    """Return the messages before the first turn."""
    first = trajectory.turns[0].message if trajectory.turns else None
    messages = list(trajectory.messages)
    if first is None:
        return messages
    # The first observation may contain assistant messages as examples; those are not turns.
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    turns = said[len(said) - len(trajectory.turns) :]
    return messages[: turns[0]] if turns else messages


def _status(trajectory: Trajectory) -> str:
    if trajectory.stop_reason.failed or not trajectory.trainable:
        return "aborted"
    return "truncated" if trajectory.truncated else "completed"


def from_slime(
    samples: Iterable[Mapping[str, Any]], *, env_id: str = "import/Slime-v0", decode: Decode | None = None
) -> Iterator[Trajectory]:
    """Yield the episodes of slime's samples (`Sample.to_dict`), with tokens, status and reward.

    Args:
        samples: the samples; those of one episode follow each other.
        env_id: environment id for samples that name none.
        decode: function that returns the text of token ids. Without it, turns have tokens and no text.

    Raises:
        UsageError: The lists of a sample have different lengths; the error names the row.
    """
    yield from episodes_of(samples, _token_row, env_id=env_id, decode=decode)


def _token_row(sample: Mapping[str, Any]) -> TokenRow:
    size = sample["response_length"]
    tokens = list(sample["tokens"])
    start = len(tokens) - size
    prompt = sample.get("prompt")
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt or "")}]
    facts: dict[str, Any] = {
        "stop_reason": STOP_REASONS.get(str(sample.get("status")), "aborted"),
        "group_id": f"group-{sample.get('group_index') or 0}",
        "member": sample.get("index") or 0,
        "reward": sample.get("reward"),
        **(sample.get("metadata") or {}),
    }
    mask = sample.get("loss_mask")
    return TokenRow(
        tokens[:start],
        tokens[start:],
        [1] * size if mask is None else mask,
        sample.get("rollout_log_probs"),
        facts,
        cast("list[Message]", messages),
    )
