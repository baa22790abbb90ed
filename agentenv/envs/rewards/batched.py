"""What TRL passes to a reward function: lists, here of one episode.

1. Each field of the task is a list by its own name, also one named `answer` or `state`.
2. `completions` are messages as TRL's trainer has them: the arguments of a call are an object, and a result
   has the name of its tool. If the episode has no tools, thinking stands in the text, as TRL decodes it.
3. Numbers for `log_metric` and `log_extra` become parts of the reward that do not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from agentenv.core.errors import UsageError
from agentenv.core.fields import wanted_by
from agentenv.core.messages import Message
from agentenv.core.trajectory import Trajectory

__all__ = ["Batch", "takes_lists"]

_LISTS = frozenset(
    {"environments", "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
)


def takes_lists(function: Callable[..., object]) -> bool:
    """Return whether the parameters of a reward function are those of TRL's."""
    return bool(_LISTS & wanted_by(function).names)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of one episode, for one reward function."""

    fields: Mapping[str, object]
    """Fields of the task, which are the columns of TRL's dataset."""
    offered: Mapping[str, object]
    """Values that a reward of one episode may name."""
    logged: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    """Numbers that the function has logged."""

    def arguments(self) -> dict[str, object]:
        """Return what TRL passes, by name; `completion_ids` is missing where the engine gives no tokens."""
        messages = cast("Sequence[Message]", self.offered["messages"])
        environment, record = self.offered.get("env"), self.offered.get("trajectory")
        start = next((at for at, each in enumerate(messages) if each["role"] == "assistant"), len(messages))
        hidden = ("prompt", "completion", "completion_ids")
        lists: dict[str, object] = {
            **{name: [value] for name, value in self.fields.items() if name not in hidden},
            "environments": [getattr(environment, "inner", environment)],
            "prompts": [list(messages[:start])],
            "completions": [_completion(messages[start:], environment)],
            "trainer_state": SimpleNamespace(global_step=0),
            "log_extra": self._log_extra,
            "log_metric": self._log,
        }
        if isinstance(record, Trajectory) and record.turns:
            first = record.turns[0]
            lists["trainer_state"] = SimpleNamespace(global_step=max(record.weights_versions, default=0))
            if record.sequences:
                ids = record.sequences[first.sequence].token_ids
                lists["completion_ids"] = [list(ids[first.start :])]
        return lists

    def only(self, values: object, *, where: str) -> object:
        """Return the only entry of the list that the function returned.

        Raises:
            UsageError: The value is not a list with one entry.
        """
        plain = isinstance(values, str | Mapping) or not isinstance(values, Iterable)
        entries = [] if plain else list(cast("Iterable[object]", values))
        if len(entries) != 1:
            raise UsageError(
                f"{where} returned {values!r:.200} for lists of one episode",
                remedy="return a list with one number for each episode",
            )
        return entries[0]

    def _log(self, name: str, value: float) -> None:
        self.logged[name] = float(value)

    def _log_extra(self, column: str, values: Sequence[object]) -> None:
        """Keep a column of numbers; a reward has no room for the texts that TRL shows in its tables."""
        for value in values:
            if isinstance(value, int | float):
                self._log(column, value)


def _completion(messages: Sequence[Message], environment: object) -> list[dict[str, Any]]:
    tools = bool(getattr(environment, "tool_schemas", ())) or any(one["role"] == "tool" for one in messages)
    raw: Mapping[object, object] = getattr(environment, "raw_results", {})
    names: dict[str, str] = {}
    shown: list[dict[str, Any]] = []
    for message in messages:
        content: Any = message.get("content") or ""
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id", ""), "unknown")
            content = raw.get(content, content) if isinstance(content, str) else content
            shown.append({"role": "tool", "name": name, "content": content})
            continue
        turn: dict[str, Any] = {"role": message["role"], "content": content}
        if thinking := message.get("reasoning_content"):
            if tools:
                turn["reasoning_content"] = thinking
            else:
                turn["content"] = f"<think>\n{thinking}\n</think>\n\n{content}"
        if calls := message.get("tool_calls"):
            names.update((call["id"], call["function"]["name"]) for call in calls)
            turn["tool_calls"] = [
                {"type": "function", "function": {**call["function"], "arguments": _object(call)}}
                for call in calls
            ]
        shown.append(turn)
    return shown


def _object(call: Any) -> object:
    """Return the arguments of a call as an object; as they were written if they are no JSON."""
    written: str = call["function"]["arguments"]
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written
