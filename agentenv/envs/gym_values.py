"""Check what an author's `reset`, `step` and `finish` return, and turn it into the runner's types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, TypeAlias, cast

from agentenv.core.episode_env import Outcome, StepResult
from agentenv.core.errors import EnvironmentMisuse, UsageError
from agentenv.core.messages import Message, ToolCall, ToolResult, text_of
from agentenv.core.refusals import Refusal

__all__ = [
    "answered",
    "last_answer",
    "messages_of",
    "outcome_of",
    "read_reset",
    "read_step",
    "takes_text",
    "total_of",
]


def takes_text(step: Callable[..., object]) -> bool:
    """Return whether a `step` annotates its action as `str`."""
    parameters = list(inspect.signature(step).parameters.values())[1:]
    return bool(parameters) and parameters[0].annotation in {str, "str"}


def last_answer(messages: Sequence[Message]) -> str:
    """Return the text of the last assistant message; empty if there is none."""
    for message in reversed(messages):
        if message["role"] == "assistant":
            return text_of(message)
    return ""


def messages_of(observation: object, *, where: str) -> tuple[Message, ...]:
    """Return an observation as chat messages; empty text gives no message.

    Raises:
        EnvironmentMisuse: The observation is neither text nor chat messages.
    """
    if observation is None or observation == "":
        return ()
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},)
    if isinstance(observation, Mapping):
        observation = [observation]
    if not isinstance(observation, Sequence):
        raise EnvironmentMisuse(
            f"{where} returned {observation!r:.200}", remedy="an observation is text or chat messages"
        )
    messages: list[Message] = []
    for message in cast("Sequence[object]", observation):
        role = cast("Mapping[str, object]", message).get("role") if isinstance(message, Mapping) else None
        if role not in {"system", "developer", "user", "tool", "assistant"}:
            raise EnvironmentMisuse(
                f"{where} returned {message!r:.200}, which is not a chat message with a role"
            )
        messages.append(cast("Message", {**cast("Message", message)}))
    return tuple(messages)


def read_reset(value: object, *, where: str) -> tuple[object, dict[str, object]]:
    """Check the return value of `reset`.

    Raises:
        EnvironmentMisuse: The value is not `(observation, info)`.
    """
    if not isinstance(value, tuple) or len(cast("tuple[object, ...]", value)) != 2:
        raise EnvironmentMisuse(
            f"{where} returned {value!r:.200}", remedy="reset returns (observation, info)"
        )
    observation, info = cast("tuple[object, object]", value)
    if not isinstance(info, Mapping):
        raise EnvironmentMisuse(f"{where} returned the info {info!r:.200}", remedy="info is a dictionary")
    return observation, dict(cast("Mapping[str, object]", info))


RawStep: TypeAlias = "tuple[object, float, bool, bool, dict[str, object]]"


def read_step(value: object, *, where: str) -> RawStep:
    """Check the return value of `step` and turn its numbers into plain Python numbers.

    Raises:
        EnvironmentMisuse: The value is not `(observation, reward, terminated, truncated, info)`, or the
            reward is not a finite number.
    """
    if not isinstance(value, tuple) or len(cast("tuple[object, ...]", value)) != 5:
        raise EnvironmentMisuse(
            f"{where} returned {value!r:.200}",
            remedy="step returns (observation, reward, terminated, truncated, info)",
        )
    observation, reward, terminated, truncated, info = cast("tuple[object, ...]", value)
    try:
        number = float(cast("float", reward))
    except (TypeError, ValueError) as error:
        raise EnvironmentMisuse(
            f"{where} returned the reward {reward!r:.200}", remedy="a reward is a number"
        ) from error
    if not isfinite(number):
        raise EnvironmentMisuse(f"{where} returned the reward {number}", remedy="a reward must be finite")
    if not isinstance(info, Mapping):
        raise EnvironmentMisuse(f"{where} returned the info {info!r:.200}", remedy="info is a dictionary")
    return observation, number, bool(terminated), bool(truncated), dict(cast("Mapping[str, object]", info))


def answered(
    raw: RawStep, calls: Sequence[ToolCall], known: Mapping[str, ToolResult], where: str
) -> StepResult:
    """Turn a step's observation into new messages and one result for each call, in call order.

    Args:
        raw: result of `read_step`.
        calls: the action's tool calls.
        known: results that a toolbox made for an author's own step, by call id.
        where: name of the method in error messages.

    Raises:
        EnvironmentMisuse: The environment returned an assistant message, answered a call twice, or answered
            a call that the model did not make.
    """
    observation, reward, terminated, truncated, info = raw
    if isinstance(observation, str) and observation and len(calls) == 1 and not known:
        # An environment that runs a single call itself may answer it in plain text.
        observation = [{"role": "tool", "tool_call_id": calls[0].id, "content": observation}]
    messages: list[Message] = []
    results = dict[str, ToolResult]()
    names = {call.id: call.name for call in calls}
    for message in messages_of(observation, where=where):
        if message["role"] == "assistant":
            raise EnvironmentMisuse(
                f"{where} returned an assistant message", remedy="only the model writes those"
            )
        if message["role"] != "tool":
            messages.append(message)
            continue
        call_id = message.get("tool_call_id", "")
        if call_id in results or call_id not in names:
            problem = "twice" if call_id in results else "which the model did not make"
            raise EnvironmentMisuse(f"{where} answered the tool call {call_id!r}, {problem}")
        content = message.get("content") or ""
        result = known.get(call_id, ToolResult(call_id, names[call_id], content))
        results[call_id] = result if result.content == content else replace(result, content=content)
    ordered = tuple(
        results.get(call.id) or known.get(call.id) or Refusal.NO_SUCH_TOOL.answer(call) for call in calls
    )
    return StepResult(tuple(messages), ordered, reward, terminated, truncated, info, raw[0])


def outcome_of(value: object, *, where: str) -> Outcome:
    """Turn the return value of `finish` or of a reward function into an `Outcome`.

    Raises:
        UsageError: The value is not a finite number, None or a mapping of these.
    """
    if isinstance(value, Outcome):
        parts = {str(name): _number(part, f"{where}, part {name!r}") for name, part in value.rewards.items()}
        return Outcome(_number(value.reward, where), parts)
    if isinstance(value, Mapping):
        parts = {str(name): _number(part, f"{where}, part {name!r}") for name, part in value.items()}
        return Outcome(total_of(list(parts.values())), parts)
    return Outcome(_number(value, where))


def total_of(parts: Sequence[float | None]) -> float | None:
    """Return the sum of the parts of a reward; None if any of them has no score."""
    if any(part is None for part in parts):
        return None
    return sum(cast("Sequence[float]", parts), 0.0)


def _number(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)):
        raise UsageError(f"{where} returned {value!r}", remedy="a reward must be a number or None")
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} returned {value!r}", remedy="a reward must be a number or None") from error
    if not isfinite(number):
        raise UsageError(
            f"{where} returned {number}",
            remedy="a reward must be finite, or None if the episode cannot be scored",
        )
    return number
