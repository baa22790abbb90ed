"""Trajectories in slime's `Sample` format, with its length rules.

Read in THUDM/slime, slime/utils/types.py: `tokens` is prompt and response together, and `loss_mask` and
`rollout_log_probs` are exactly `response_length` long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from agentenv.core.messages import JsonValue, Message
from agentenv.core.trajectory import Trajectory, TrajectoryGroup
from agentenv.interop.split import split_sequence

__all__ = ["slime_samples"]


def slime_samples(groups: Iterable[TrajectoryGroup]) -> Iterator[list[dict[str, JsonValue]]]:
    """Yield the samples of each group, one for each sequence; `index` is unique over all groups.

    The samples of an episode whose history was rewritten share their `rollout_id`, so that slime counts the
    episode once. Failed members are kept with status `aborted` and an empty mask, as slime expects whole
    groups.
    """
    index = episodes = 0
    for group_index, group in enumerate(groups):
        samples: list[dict[str, JsonValue]] = []
        for one in group:
            for sequence in one.sequences:
                part = split_sequence(sequence)
                trained = one.trainable and one.reward is not None
                samples.append(
                    {
                        "group_index": group_index,
                        "index": index,
                        "rollout_id": episodes,
                        "prompt": cast("JsonValue", _prompt(one)),
                        "tokens": [*part.prompt_ids, *part.response_ids],
                        "response": one.answer,
                        "response_length": len(part.response_ids),
                        "reward": one.reward,
                        "loss_mask": [int(value and trained) for value in part.loss_mask],
                        "rollout_log_probs": part.logprobs,
                        "weight_versions": [str(version) for version in one.weights_versions],
                        "status": _status(one),
                        "metadata": {
                            "env_id": one.env_id,
                            "task_id": one.task_id,
                            "stop_reason": one.stop_reason.value,
                        },
                    }
                )
                index += 1
            episodes += 1
        yield samples


def _prompt(one: Trajectory) -> list[Message]:
    """Return the messages before the model's first."""
    first: list[Message] = []
    for message in one.messages:
        if message["role"] == "assistant":
            break
        first.append(message)
    return first


def _status(one: Trajectory) -> str:
    if one.stop_reason.failed or not one.trainable:
        return "aborted"
    return "truncated" if one.truncated else "completed"
