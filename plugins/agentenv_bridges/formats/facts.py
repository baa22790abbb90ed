"""What an exported row says about its episode, under the same names in every format, and how it is read.

Every format has a place for such facts: `metadata`, `extra`, `extra_fields`, `info`, or columns of its own.
Fields of the record without a fact of their own stand together in the fact `record`, so that a new field is
written and read without a change here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache
from math import isfinite
from typing import Any, Literal, cast, get_type_hints

from pydantic import JsonValue as Json
from pydantic import TypeAdapter, ValidationError

from agentenv.core import EpisodeError, JsonValue, Message, StopReason, TokenSequence, Trajectory, Turn

__all__ = ["episode_of", "facts_of", "turn_facts"]

_OWN = frozenset(
    {
        *("env_id", "task_id", "group_id", "member", "seed", "reward", "rewards", "stop_reason", "task"),
        *("untrainable_reason", "error"),
    }
)
"""Fields of the record that are facts themselves."""
_IN_THE_FORMAT = frozenset({"turns", "sequences", "messages", "tools", "rewrites"})
"""Fields that each format writes in its own way."""
_NOWHERE = frozenset({"digest", "other_seats"})
"""Fields that no format has: the one follows from the others, and the other holds records of their own."""

CUT_WORDS = frozenset({"length", "max_tokens", "max_output_tokens", "max_total_tokens", "truncated"})
"""Words of other formats for an episode that a limit of tokens ended."""


def facts_of(trajectory: Trajectory) -> dict[str, JsonValue]:
    """Return the facts of an episode that no format of a trainer or a chat log has fields for."""
    facts: dict[str, JsonValue] = {
        "env_id": trajectory.env_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "member": trajectory.member,
        "seed": trajectory.seed,
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "turn_rewards": list(trajectory.turn_rewards),
        "finish_reasons": [turn.finish_reason for turn in trajectory.turns],
        "stop_reason": trajectory.stop_reason.value,
        "truncated": trajectory.truncated,
        "task": dict(trajectory.task),
        "record": {name: getattr(trajectory, name) for name in _others()},
    }
    if trajectory.untrainable_reason:
        facts["untrainable_reason"] = trajectory.untrainable_reason
    if trajectory.error is not None:
        error = trajectory.error
        facts["error"] = {"boundary": error.boundary, "type": error.type, "message": error.message}
    return facts


@cache
def _others() -> dict[str, TypeAdapter[Any]]:
    """Return the fields of the record that the fact `record` holds, with what checks their values."""
    hints = get_type_hints(Trajectory, localns={"JsonValue": Json})
    names = {field.name for field in fields(Trajectory)} - _OWN - _IN_THE_FORMAT - _NOWHERE
    return {name: TypeAdapter(hints[name]) for name in sorted(names)}


def _recorded(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields in the fact `record`; what does not fit its field is left out."""
    said = facts.get("record")
    values: dict[str, Any] = {}
    for name, value in cast("dict[str, Any]", said).items() if isinstance(said, dict) else ():
        with suppress(KeyError, ValidationError):
            values[name] = _others()[name].validate_python(value)
    return values


def turn_facts(
    facts: Mapping[str, Any], count: int
) -> list[tuple[float, Literal["stop", "length", "abort"]]]:
    """Return reward and finish reason of each turn; without turn rewards, the last turn has the reward."""
    rewards, reasons = facts.get("turn_rewards"), facts.get("finish_reasons")
    if count == 0:
        return []
    if not isinstance(rewards, list) or len(cast("list[object]", rewards)) != count:
        rewards = [0.0] * (count - 1) + [_number(facts.get("reward")) or 0.0]
    if not isinstance(reasons, list) or len(cast("list[object]", reasons)) != count:
        cut = _stop_reason(facts, answered=True) is StopReason.GENERATION_LENGTH
        reasons = ["stop"] * (count - 1) + ["length" if cut else "stop"]
    return [
        (_number(reward) or 0.0, reason if reason in {"length", "abort"} else "stop")
        for reward, reason in zip(cast("list[Any]", rewards), cast("list[Any]", reasons), strict=True)
    ]


def episode_of(
    facts: Mapping[str, Any],
    *,
    env_id: str,
    task_id: str,
    turns: Sequence[Turn],
    messages: Sequence[Message] = (),
    sequences: Sequence[TokenSequence] = (),
    tools: Sequence[Mapping[str, JsonValue]] = (),
    untrainable_reason: str = "",
    answered: bool = True,
) -> Trajectory:
    """Build an episode from the facts of a row.

    Args:
        facts: what the row says about the episode; every fact may be missing.
        env_id: environment id, if the facts have none.
        task_id: task id, if the facts have none.
        turns: turns of the episode.
        messages: the conversation.
        sequences: the tokens.
        tools: schemas of the tools.
        untrainable_reason: why the episode must not be trained on, if the facts have no reason.
        answered: whether the episode ends with a text of the model. Without a stop reason, an episode
            that does not was cut.
    """
    env_id, task_id = str(facts.get("env_id") or env_id), str(facts.get("task_id") or task_id)
    reason = _stop_reason(facts, answered=answered)
    rewards, task = facts.get("rewards"), facts.get("task")
    why = untrainable_reason or str(facts.get("untrainable_reason") or "")
    return Trajectory(
        env_id=env_id,
        task_id=task_id,
        seed=_integer(facts.get("seed")),
        group_id=str(facts.get("group_id") or f"{env_id}:{task_id}"),
        member=_integer(facts.get("member")),
        stop_reason=reason,
        turns=tuple(turns),
        sequences=tuple(sequences),
        messages=tuple(messages),
        reward=_number(facts.get("reward")),
        rewards=_rewards(cast("Mapping[str, Any]", rewards)) if isinstance(rewards, dict) else {},
        error=_error(facts, reason),
        untrainable_reason=why or ("the row says that the episode failed" if reason.failed else ""),
        task=cast("Mapping[str, JsonValue]", task) if isinstance(task, dict) else {},
        tools=tuple(tools),
        **_recorded(facts),
    )


def _stop_reason(facts: Mapping[str, Any], *, answered: bool) -> StopReason:
    word = str(facts.get("stop_reason") or facts.get("finish_reason") or "")
    cut = bool(facts.get("truncated")) or word in CUT_WORDS
    reason = next((reason for reason in StopReason if reason.value == word), None)
    if reason is not None and not (cut and reason.terminated):
        return reason
    if cut:
        return StopReason.GENERATION_LENGTH
    return StopReason.FINAL_ANSWER if answered else StopReason.MAX_TURNS


def _error(facts: Mapping[str, Any], reason: StopReason) -> EpisodeError | None:
    if not reason.failed:
        return None
    said = facts.get("error")
    error = cast("Mapping[str, Any]", said) if isinstance(said, dict) else {"message": said}
    boundary = error.get("boundary") or ("engine" if reason is StopReason.ABORTED else "env")
    message = str(error.get("message") or "the row does not say what failed")
    return EpisodeError(boundary, str(error.get("type") or "Exception"), message)


def _rewards(values: Mapping[str, Any]) -> dict[str, float | None]:
    return {str(name): _number(value) for name, value in values.items()}


def _integer(value: object) -> int:
    """Return a whole number, or 0 for what is none; logs of others may use the names for other things."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(value: object) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value):
        return None
    return float(value)
