"""Export trajectories in the sample format of verl's agent loop (`AgentLoopOutput`), with its length rules.

The format is defined in volcengine/verl, verl/experimental/agent_loop. A sample is a prompt and one response,
and the response contains everything after the first prompt. `response_mask` is 1 for tokens of the model and
0 for tool output. Mask and logprobs are as long as the response. `num_turns` counts user, assistant and tool
messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from agentenv.core.errors import UsageError
from agentenv.core.messages import JsonValue
from agentenv.core.trajectory import Trajectory
from agentenv.interop.split import split_sequence

__all__ = ["verl_samples"]


def verl_samples(
    trajectories: Iterable[Trajectory],
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> Iterator[dict[str, JsonValue]]:
    """Yield one sample for each sequence of each trainable, scored trajectory.

    If an episode's history was rewritten, each of its sequences has the episode's reward, and verl's
    normalisation counts the episode once for each sequence.

    Args:
        trajectories: the episodes; those that cannot be trained or have no reward are skipped.
        prompt_length: verl's `data.max_prompt_length`.
        response_length: verl's `data.max_response_length`.

    Raises:
        UsageError: A sample is longer than a limit; verl would cut it silently.
    """
    for trajectory in trajectories:
        if not trajectory.trainable or trajectory.reward is None:
            continue
        for number, sequence in enumerate(trajectory.sequences):
            part = split_sequence(sequence)
            _check("prompt", len(part.prompt_ids), prompt_length, trajectory)
            _check("response", len(part.response_ids), response_length, trajectory)
            yield {
                "prompt_ids": part.prompt_ids,
                "response_ids": part.response_ids,
                "response_mask": [int(trained) for trained in part.loss_mask],
                "response_logprobs": part.logprobs,
                "reward_score": trajectory.reward,
                "num_turns": sum(message["role"] != "system" for message in trajectory.messages),
                "metrics": {
                    "generate_sequences": trajectory.timings.get("generate_s", 0.0),
                    "tool_calls": trajectory.timings.get("tools_s", 0.0),
                },
                "extra_fields": {
                    "uid": trajectory.group_id,
                    "env_id": trajectory.env_id,
                    "task_id": trajectory.task_id,
                    "sequence": number,
                    "stop_reason": trajectory.stop_reason.value,
                },
            }


def _check(what: str, length: int, limit: int | None, trajectory: Trajectory) -> None:
    if limit is not None and length > limit:
        raise UsageError(
            f"the {what} of {trajectory.group_id}, member {trajectory.member}, has {length} tokens, "
            f"and verl's limit is {limit}",
            remedy="raise that limit, or lower max_context_tokens",
        )
