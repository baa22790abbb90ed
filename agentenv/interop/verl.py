"""Trajectories in the sample format of verl's agent loop (`AgentLoopOutput`), with its length rules.

Read in volcengine/verl, verl/experimental/agent_loop: a sample is a prompt and one response; the
response holds everything after the first prompt, `response_mask` is 1 on what the model wrote and 0 on
tool output, mask and logprobs are as long as the response, and user, assistant and tool turns count.
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

    The reward stands on every sequence of an episode whose history was rewritten; verl's own
    normalisation then counts the episode once for each of them.

    Args:
        trajectories: of any episodes; the others are passed over.
        prompt_length: verl's `data.max_prompt_length`.
        response_length: verl's `data.max_response_length`.

    Raises:
        UsageError: A sample is longer than a limit, which verl would cut without a word.
    """
    for one in trajectories:
        if not one.trainable or one.reward is None:
            continue
        for number, sequence in enumerate(one.sequences):
            part = split_sequence(sequence)
            _check("prompt", len(part.prompt_ids), prompt_length, one)
            _check("response", len(part.response_ids), response_length, one)
            yield {
                "prompt_ids": part.prompt_ids,
                "response_ids": part.response_ids,
                "response_mask": [int(trained) for trained in part.loss_mask],
                "response_logprobs": part.logprobs,
                "reward_score": one.reward,
                "num_turns": sum(message["role"] != "system" for message in one.messages),
                "metrics": {
                    "generate_sequences": one.timings.get("generate_s", 0.0),
                    "tool_calls": one.timings.get("tools_s", 0.0),
                },
                "extra_fields": {
                    "uid": one.group_id,
                    "env_id": one.env_id,
                    "task_id": one.task_id,
                    "sequence": number,
                    "stop_reason": one.stop_reason.value,
                },
            }


def _check(what: str, length: int, limit: int | None, one: Trajectory) -> None:
    if limit is not None and length > limit:
        raise UsageError(
            f"the {what} of {one.group_id}, member {one.member}, has {length} tokens, "
            f"and verl's limit is {limit}: raise that limit, or lower max_context_tokens"
        )
