"""Write and read episodes as rows of OpenAI's chat format, and write rows for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from json import dumps
from typing import Any, cast

from agentenv.core.errors import UsageError
from agentenv.core.messages import JsonValue, Message, ToolCall, ToolResult, orphans_as_user, text_of
from agentenv.core.trajectory import StopReason, Trajectory, Turn

__all__ = ["from_openai", "to_openai", "to_sft"]

NO_TOKENS = "imported from a chat log: it has no sampled tokens and logprobs"
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def to_openai(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    """Yield one row for each episode, with `messages`, `tools`, and its reward and ids in `metadata`."""
    for trajectory in trajectories:
        yield {
            "messages": list(trajectory.messages),
            "tools": list(trajectory.tools),
            "metadata": {
                "env_id": trajectory.env_id,
                "task_id": trajectory.task_id,
                "group_id": trajectory.group_id,
                "member": trajectory.member,
                "seed": trajectory.seed,
                "reward": trajectory.reward,
                "rewards": dict(trajectory.rewards),
                "stop_reason": trajectory.stop_reason.value,
                "task": dict(trajectory.task),
            },
        }


def to_sft(
    trajectories: Iterable[Trajectory], *, min_reward: float = 1.0, hint: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield `messages` and `tools` of each episode that terminated with at least `min_reward`.

    A condensed episode gives one row for each conversation that the model was shown. Turns that a row
    repeats from an earlier one have `weight` 0, so that each turn is learned once.

    Args:
        trajectories: the episodes.
        min_reward: lowest reward with which an episode is accepted.
        hint: text that only the teacher was shown; it is removed from system and user messages.
    """
    for trajectory in trajectories:
        reward = trajectory.reward
        if trajectory.terminated and reward is not None and reward >= min_reward:
            for messages in _shown(trajectory):
                yield {
                    "messages": [_without(hint, message) for message in orphans_as_user(messages)],
                    "tools": list(trajectory.tools),
                }


def _shown(trajectory: Trajectory) -> Iterator[list[Any]]:
    """Yield the conversations that the model was shown, from one condensation to the next."""
    whole = trajectory.messages
    if not trajectory.rewrites:
        yield list(whole)
        return
    said = [index for index, message in enumerate(whole) if message["role"] == "assistant"]
    # The first observation may contain assistant messages as examples; those are not turns.
    said = [*said[len(said) - len(trajectory.turns) :], len(whole)]
    ends = [said[rewrite.turn] for rewrite in trajectory.rewrites]
    shown = ((), *(rewrite.messages for rewrite in trajectory.rewrites))
    for carried, start, end in zip(shown, [0, *ends], [*ends, len(whole)], strict=True):
        if not any(start <= index < end for index in said):
            continue  # the first messages were condensed, or nothing was said between two condensations
        # The last observation before a condensation is part of the condensed conversation, so this row ends
        # with the assistant message before it.
        last = next(index for index in reversed(said) if index < end)
        old = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in carried]
        yield [*old, *whole[start : last + 1]]


def _without(hint: str, message: Any) -> Any:
    content = message.get("content")
    if not hint or message["role"] == "assistant" or not isinstance(content, str) or hint not in content:
        return message
    return {**message, "content": content.replace(hint, "").strip()}


def from_openai(rows: Iterable[Mapping[str, Any]], *, env_id: str = "import/Chat-v0") -> Iterator[Trajectory]:
    """Yield an episode for each row with `messages`; the reward is read from `metadata` or from the row.

    Raises:
        UsageError: A row has no messages, or a message has an unknown role; the error names the row.
    """
    for number, row in enumerate(rows):
        yield _episode(row, number, env_id)


def _episode(row: Mapping[str, Any], number: int, env_id: str) -> Trajectory:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"row {number} has no list `messages`; its keys are {sorted(map(str, row))}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UsageError(f"row {number}, message {index} has no known role: {message!r:.120}")
    metadata = row.get("metadata")
    facts: Mapping[str, Any] = metadata if isinstance(metadata, dict) else row
    text = dumps(messages, sort_keys=True, default=str)
    task_id = str(facts.get("task_id") or blake2b(text.encode(), digest_size=6).hexdigest())
    reward = facts.get("reward")
    value = float(reward) if isinstance(reward, (int, float)) and not isinstance(reward, bool) else None
    turns = _turns(messages, value)
    task = facts.get("task")
    return Trajectory(
        env_id=str(facts.get("env_id") or env_id),
        task_id=task_id,
        seed=int(facts.get("seed") or 0),
        group_id=str(facts.get("group_id") or f"{env_id}:{task_id}"),
        member=int(facts.get("member") or 0),
        stop_reason=StopReason.FINAL_ANSWER,
        turns=turns,
        messages=tuple(cast("list[Message]", messages)),
        reward=value,
        untrainable_reason=NO_TOKENS,
        task=cast("Mapping[str, JsonValue]", task) if isinstance(task, dict) else {},
        tools=tuple(row.get("tools") or ()),
    )


def _turns(messages: list[Any], reward: float | None) -> tuple[Turn, ...]:
    results = {str(message.get("tool_call_id")): message for message in messages if message["role"] == "tool"}
    said = [message for message in messages if message["role"] == "assistant"]
    turns: list[Turn] = []
    for index, message in enumerate(said):
        calls = tuple(map(ToolCall.from_message, message.get("tool_calls") or ()))
        answered = [(call, results[call.id]) for call in calls if call.id in results]
        turns.append(
            Turn(
                index,
                message,
                "stop",
                0,
                tool_calls=calls,
                tool_results=tuple(
                    ToolResult(call.id, call.name, text_of(answer)) for call, answer in answered
                ),
                reward=(reward or 0.0) if index == len(said) - 1 else 0.0,
            )
        )
    return tuple(turns)
