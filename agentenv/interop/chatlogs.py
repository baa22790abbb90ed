"""Episodes as chat messages: OpenAI-style rows out and in, and rows for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from json import dumps
from typing import Any, cast

from agentenv.core.errors import UsageError
from agentenv.core.messages import JsonValue, Message, ToolCall, ToolResult, text_of
from agentenv.core.trajectory import StopReason, Trajectory, Turn

__all__ = ["from_openai", "to_openai", "to_sft"]

NO_TOKENS = "imported from a chat log: it has no sampled tokens and logprobs"
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def to_openai(trajectories: Iterable[Trajectory]) -> Iterator[dict[str, Any]]:
    """Yield one row for each episode: `messages`, `tools`, and what became of it in `metadata`."""
    for one in trajectories:
        yield {
            "messages": list(one.messages),
            "tools": list(one.tools),
            "metadata": {
                "env_id": one.env_id,
                "task_id": one.task_id,
                "group_id": one.group_id,
                "member": one.member,
                "seed": one.seed,
                "reward": one.reward,
                "rewards": dict(one.rewards),
                "stop_reason": one.stop_reason.value,
                "task": dict(one.task),
            },
        }


def to_sft(
    trajectories: Iterable[Trajectory], *, min_reward: float = 1.0, hint: str = ""
) -> Iterator[dict[str, Any]]:
    """Yield `messages` and `tools` of the episodes worth imitating: finished, and of enough reward.

    A condensed episode gives a row for each conversation that the model was shown; what one carries
    over of the model's own turns has `weight` 0 there, so that each turn is learned once.

    Args:
        trajectories: the episodes; their reward says whether an oracle accepts them.
        min_reward: least reward of an episode that is accepted.
        hint: a text that only the teacher was shown; it is taken out of system and user messages.
    """
    for one in trajectories:
        if one.terminated and one.reward is not None and one.reward >= min_reward:
            for messages in _shown(one):
                yield {
                    "messages": [_without(hint, message) for message in messages],
                    "tools": list(one.tools),
                }


def _shown(one: Trajectory) -> Iterator[list[Any]]:
    """Yield the conversations that the model was shown, from one condensation to the next."""
    if not one.rewrites:
        yield list(one.messages)
        return
    said = [place for place, message in enumerate(one.messages) if message["role"] == "assistant"]
    # A first observation may hold assistant messages as examples: those are no turns.
    said = [*said[len(said) - len(one.turns) :], len(one.messages)]
    ends = [said[rewrite.turn] for rewrite in one.rewrites]
    shown = ((), *(rewrite.messages for rewrite in one.rewrites))
    for carried, start, end in zip(shown, [0, *ends], [*ends, len(one.messages)], strict=True):
        if start == end:
            continue
        # What was observed last before a condensation is shown in the condensed conversation.
        last = next(place for place in reversed(said) if place < end)
        old = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in carried]
        yield [*old, *one.messages[start : last + 1]]


def _without(hint: str, message: Any) -> Any:
    content = message.get("content")
    if not hint or message["role"] == "assistant" or not isinstance(content, str) or hint not in content:
        return message
    return {**message, "content": content.replace(hint, "").strip()}


def from_openai(rows: Iterable[Mapping[str, Any]], *, env_id: str = "import/Chat-v0") -> Iterator[Trajectory]:
    """Yield an episode for each row with `messages`; a reward is taken from `metadata` or the row.

    Raises:
        UsageError: A row has no messages, or a message has no known role; the row is named.
    """
    for number, row in enumerate(rows):
        yield _episode(row, number, env_id)


def _episode(row: Mapping[str, Any], number: int, env_id: str) -> Trajectory:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"row {number} has no list `messages`; its keys are {sorted(map(str, row))}")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UsageError(f"row {number}, message {place} has no known role: {message!r:.120}")
    given = row.get("metadata")
    facts: Mapping[str, Any] = given if isinstance(given, dict) else row
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
                    ToolResult(call.id, call.name, text_of(found)) for call, found in answered
                ),
                reward=(reward or 0.0) if index == len(said) - 1 else 0.0,
            )
        )
    return tuple(turns)
