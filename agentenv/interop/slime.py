"""Export trajectories in slime's `Sample` format, with its length rules.

The format is defined in THUDM/slime, slime/utils/types.py: `tokens` is prompt and response together, and
`loss_mask` and `rollout_log_probs` have exactly `response_length` entries.
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

    If an episode's history was rewritten, its samples share a `rollout_id`, so that slime counts the episode
    once. Failed members are kept with status `aborted` and a mask of zeros, because slime expects whole
    groups.
    """
    index = episodes = 0
    for group_index, group in enumerate(groups):
        samples: list[dict[str, JsonValue]] = []
        for trajectory in group:
            for sequence in trajectory.sequences:
                part = split_sequence(sequence)
                trained = trajectory.trainable and trajectory.reward is not None
                samples.append(
                    {
                        "group_index": group_index,
                        "index": index,
                        "rollout_id": episodes,
                        "prompt": cast("JsonValue", _prompt(trajectory)),
                        "tokens": [*part.prompt_ids, *part.response_ids],
                        "response": trajectory.answer,
                        "response_length": len(part.response_ids),
                        "reward": trajectory.reward,
                        "loss_mask": [int(value and trained) for value in part.loss_mask],
                        "rollout_log_probs": part.logprobs,
                        "weight_versions": [str(version) for version in trajectory.weights_versions],
                        "status": _status(trajectory),
                        "metadata": {
                            "env_id": trajectory.env_id,
                            "task_id": trajectory.task_id,
                            "stop_reason": trajectory.stop_reason.value,
                        },
                    }
                )
                index += 1
            episodes += 1
        yield samples


def _prompt(trajectory: Trajectory) -> list[Message]:
    """Return the messages before the first assistant message."""
    prompt: list[Message] = []
    for message in trajectory.messages:
        if message["role"] == "assistant":
            break
        prompt.append(message)
    return prompt


def _status(trajectory: Trajectory) -> str:
    if trajectory.stop_reason.failed or not trajectory.trainable:
        return "aborted"
    return "truncated" if trajectory.truncated else "completed"
