"""The Berkeley Function-Calling Leaderboard: `bfcl:multi_turn_base` and its other categories.

1. A multi-turn task has scripted user messages. The model calls functions until it writes a message without
   calls; then the user says the next message. The leaderboard's own classes run the functions, and its own
   `multi_turn_checker` compares states and results with those of the ground truth. The reward is 1 or 0.
2. More than 20 steps in one user turn end the episode, as in the leaderboard: with reward 0, unless it is the
   last user turn, which is then scored.
3. In `multi_turn_miss_func` a function is described in mid-conversation. A chat whose tokens are only
   appended cannot change its list of tools, so the model calls such a function through the tool
   `call_added_function`.
4. A single-turn task is one message of the model. Its calls are not run: the leaderboard's `ast_checker`
   compares them with the possible answers. For `irrelevance` the right answer has no call. A message with a
   call that cannot be read counts as one without calls, as in the leaderboard.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentenv.core import JsonValue, Message, StopReason
from agentenv.envs import Env, spaces
from agentenv_worlds.bfcl.answers import answer_calls, ground_truth_calls
from agentenv_worlds.bfcl.data import (
    ast_checker,
    entry_of,
    language_of,
    new_module,
    schema_of,
)
from agentenv_worlds.calls import message_with_calls, read_arguments

__all__ = ["MAX_TURNS", "BfclMultiTurn", "BfclSingleTurn"]

MAX_TURNS = 200
"""Turns of an episode; the leaderboard limits only the steps after each message of the user."""

MAX_STEPS = 20
"""Steps with calls in one user turn; one more ends the episode, as the leaderboard's MAXIMUM_STEP_LIMIT."""

MAX_SHOWN = 50_000
"""Characters of one result that the model sees; the longest result of a ground truth has far fewer."""

ADDED = "I have updated some more functions you can choose from. What about now?"
"""The leaderboard's words for functions that are added."""

CALL_ADDED = "call_added_function"

_CALL_ADDED_SCHEMA: dict[str, JsonValue] = {
    "type": "function",
    "function": {
        "name": CALL_ADDED,
        "description": "Call a function that the user described during the conversation.",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "Name of the function."},
                "arguments": {"type": "object", "description": "Arguments of the function, by name."},
            },
            "required": ["name", "arguments"],
        },
    },
}


class _Bench:
    """Runs the functions of one multi-turn task, and keeps the calls for the checker."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self._entry = entry
        self._utils = new_module("multi_turn_utils")
        self.turns: list[list[list[str]]] = [[]]
        """Calls by user turn and step, as the leaderboard writes them."""

    def run(self, calls: list[str]) -> list[str]:
        """Run the calls of one step and return their results."""
        self.turns[-1].append(calls)
        results, _ = self._utils.execute_multi_turn_func_call(
            calls,
            self._entry["initial_config"],  # of which each object takes a copy
            self._entry["involved_classes"],
            "agentenv",
            self._entry["id"],
            long_context="long_context" in self._entry["id"],
        )
        return cast("list[str]", results)

    def check(self) -> dict[str, Any]:
        """Return the verdict of the leaderboard's checker, which runs all calls again."""
        checker = new_module("multi_turn_checker")
        checker.execute_multi_turn_func_call = new_module("multi_turn_utils").execute_multi_turn_func_call
        category = str(self._entry["id"]).rpartition("_")[0]
        return checker.multi_turn_checker(
            self.turns, self._entry["ground_truth"], dict(self._entry), category, "agentenv"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Bench:
        # The module that runs the calls cannot be copied, but its state follows from the calls.
        other = _Bench(self._entry)
        for number, turn in enumerate(self.turns):
            if number:
                other.turns.append([])
            for calls in turn:
                other.run(list(calls))
        return other


class BfclMultiTurn(Env):
    """A multi-turn task of the Berkeley Function-Calling Leaderboard."""

    observation_space = spaces.Chat()
    action_space = spaces.Action()

    verdict: Mapping[str, Any]
    """What the leaderboard's checker said of the last episode; empty if it was not asked."""

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, JsonValue]]:
        """Schemas of the task's functions."""
        if not self.task:
            return ()
        entry, category = self._entry, str(self.task["category"])
        schemas = [schema_of(function, category) for function in entry["function"]]
        return [*schemas, _CALL_ADDED_SCHEMA] if entry["missed_function"] else schemas

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Set up the task's objects and return the first user message."""
        self._entry = entry_of(str(self.task["category"]), str(self.task["id"]))
        self._bench = _Bench(self._entry)
        late = [function for added in self._entry["missed_function"].values() for function in added]
        # The leaderboard runs a function that was held back, too: the ground truth of one task needs that.
        self._known = {function["name"] for function in [*self._entry["function"], *late]}
        self._forced = False
        self.verdict = {}
        return self._question(0), {}

    def step(self, action: Message) -> Any:
        """Run the message's calls; a message without calls ends the user's turn."""
        calls = action.get("tool_calls") or []
        if not calls:
            return self._next_turn()
        written = [self._written(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        results = iter(self._bench.run([text for text, error in written if not error]))
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": _shown(error or next(results))}
            for call, (_, error) in zip(calls, written, strict=True)
        ]
        self._forced = len(self._bench.turns[-1]) > MAX_STEPS
        return answers, 0.0, self._forced, False, {}

    def finish(self, stop_reason: str) -> float:
        """Return 1 if the leaderboard's checker accepts the calls of all turns, else 0."""
        missing = len(self._entry["question"]) - len(self._bench.turns)
        if missing > 0 or not (self._forced or missing < 0):
            return 0.0
        if not self._forced:
            self._bench.turns.pop()
        self.verdict = self._bench.check()
        return float(self.verdict["valid"])

    def _next_turn(self) -> Any:
        self._bench.turns.append([])
        number = len(self._bench.turns) - 1
        if number == len(self._entry["question"]):
            return [], 0.0, True, False, {}
        return self._question(number), 0.0, False, False, {}

    def _question(self, number: int) -> list[Message]:
        """Return the user's messages of a turn, with the functions that are added in it."""
        added = self._entry["missed_function"].get(str(number))
        if not added:
            return cast("list[Message]", copy.deepcopy(self._entry["question"][number]))
        shown = [schema_of(function, str(self.task["category"]))["function"] for function in added]
        text = f"{json.dumps(shown)}\n{ADDED} (Call them with the tool {CALL_ADDED}.)"
        return [{"role": "user", "content": text}]

    def _written(self, name: str, arguments: object) -> tuple[str, str]:
        """Return a call as the leaderboard writes it, or the error if it cannot be run.

        The leaderboard evaluates this text as Python, so names that are no function or no identifier never
        get into it; the values are literals.
        """
        try:
            values = read_arguments(arguments)
            if name == CALL_ADDED:
                name, values = values["name"], values["arguments"]
            if name not in self._known:
                return "", f"Error during execution: there is no function {name!r}"
            if not all(str(key).isidentifier() for key in values):
                return "", f"Error during execution: {name} has no such parameter"
            parts = ",".join(f"{key}={value!r}" for key, value in values.items())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return "", f"Error during execution: the arguments cannot be read: {error}"
        return f"{name}({parts})", ""

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
        """Make the calls of the ground truth, those of a user turn in one message."""
        entry = entry_of(str(task["category"]), str(task["id"]))
        turn = sum(message["role"] == "assistant" and not message.get("tool_calls") for message in messages)
        truth = entry["ground_truth"]
        if messages[-1]["role"] == "tool" or turn >= len(truth) or not truth[turn]:
            return {"role": "assistant", "content": "I have done what I can with these functions."}
        added = {function["name"] for late in entry["missed_function"].values() for function in late}
        calls = [
            (CALL_ADDED, {"name": name, "arguments": values}) if name in added else (name, values)
            for name, values in ground_truth_calls(entry, turn)
        ]
        return message_with_calls(calls)


class BfclSingleTurn(Env):
    """A single-turn task of the Berkeley Function-Calling Leaderboard: one message with the right calls."""

    observation_space = spaces.Chat()
    action_space = spaces.Action()

    verdict: Mapping[str, Any]
    """What the leaderboard's checker said of the last episode; empty if it was not asked."""

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, JsonValue]]:
        """Schemas of the task's functions."""
        if not self.task:
            return ()
        return [schema_of(function, str(self.task["category"])) for function in self._entry["function"]]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Return the task's messages."""
        self._entry = entry_of(str(self.task["category"]), str(self.task["id"]))
        self._calls: list[dict[str, Any]] | None = None
        self.verdict = {}
        return copy.deepcopy(self._entry["question"][0]), {}

    def step(self, action: Message) -> Any:
        """Take the calls of the only message; they are recorded and not run."""
        calls = action.get("tool_calls") or []
        read = [(call["function"]["name"], _read(call["function"]["arguments"])) for call in calls]
        whole = all(arguments is not None for _, arguments in read)
        self._calls = [{name: arguments} for name, arguments in read] if whole else []
        recorded = [{"role": "tool", "tool_call_id": call["id"], "content": "recorded"} for call in calls]
        return recorded, 0.0, True, False, {}

    def finish(self, stop_reason: str) -> float:
        """Return 1 if the leaderboard accepts the calls, else 0."""
        category = str(self.task["category"])
        if stop_reason == StopReason.MAX_PARSE_ERRORS:
            self._calls = []
        if self._calls is None:
            return 0.0
        if "relevance" in category:
            return float(bool(self._calls) != ("irrelevance" in category))
        checker = ast_checker()
        self.verdict = checker.ast_checker(
            self._entry["function"],
            self._calls,
            self._entry["ground_truth"],
            checker.Language[language_of(category).upper()],
            category,
            "agentenv",
        )
        return float(self.verdict["valid"])

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
        """Make the calls of a possible answer; call nothing where that is right."""
        category = str(task["category"])
        entry = entry_of(category, str(task["id"]))
        if "irrelevance" in category:
            return {"role": "assistant", "content": "None of these functions can do that."}
        if category == "live_relevance":
            return message_with_calls([(str(entry["function"][0]["name"]).replace(".", "_"), {})])
        return message_with_calls(answer_calls(entry, language_of(category)))


def _read(arguments: object) -> Mapping[str, object] | None:
    """Return the arguments of a call; None if they are no JSON object."""
    try:
        read = read_arguments(arguments)
    except ValueError:
        return None
    return cast("Mapping[str, object]", read) if isinstance(read, Mapping) else None


def _shown(result: str) -> str:
    """Return a result as the model sees it; a function may return what it was given, which may be long."""
    if len(result) <= MAX_SHOWN:
        return result
    return f"{result[:MAX_SHOWN]}... ({len(result) - MAX_SHOWN} more characters)"
