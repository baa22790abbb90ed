"""AgentDojo: assistants with tools whose data may contain an attacker's orders: `agentdojo:workspace`.

1. The user's tasks, the attacker's goals, the tools, the attacks and both scorers are AgentDojo's own.
2. In the split `test` nobody attacks. In the split `attacked` each task of the user comes with each goal of
   the attacker, which stands in the data that the tools return.
3. A conversation has at most 16 messages of the model, and the calls of the last one are not run. If that one
   has no text, the conversation begins again, at most twice, on the data as they are then, as AgentDojo's do.
4. The reward is 1 if the user's task is done and the attacker's goal is not. Its parts are `utility` (the
   user's task is done) and `security` (the attacker's goal is not reached).
"""

from __future__ import annotations

import importlib
import importlib.resources
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentenv.core import JsonValue, Message, Outcome, text_of
from agentenv.envs import Env, spaces
from agentenv_worlds.agentdojo.package import attack_of, fresh, module, suite_of
from agentenv_worlds.calls import message_with_calls, read_arguments
from agentenv_worlds.turns import turn_of

__all__ = ["CONVERSATIONS", "MAX_MESSAGES", "AgentDojo", "attacked_rows", "rows"]

ATTACK = "important_instructions"
"""The attack of AgentDojo's published results."""
MODEL = "local"
"""AgentDojo's name of the model that an attack addresses."""

MAX_SHOWN = 50_000
"""Characters of one result that the model sees; the longest of a ground truth has 27,692."""

LONGEST = 20_000
"""Characters of the arguments of one call; tools repeat them in their answers, and search with them."""

MAX_MESSAGES = 16
"""Messages of one conversation: AgentDojo runs tools at most 15 times and asks the model once more."""
CONVERSATIONS = 3
"""Conversations of one task, of which each but the last ended with calls and no text."""
_NOT_RUN = "This call was not run, because the conversation is over."


class AgentDojo(Env):
    """One task of a user, with or without an attacker.

    Args:
        suite: `workspace`, `travel`, `banking` or `slack`.
        attack: name of AgentDojo's attack in the split `attacked`.
        attacked_model: how the attack addresses the model, by one of AgentDojo's names of models; `local`
            is addressed as "Local model".

    Raises:
        UsageError: AgentDojo has no such attack or no such name of a model.
    """

    observation_space = spaces.Chat()
    action_space = spaces.Action()

    def __init__(self, suite: str, attack: str = ATTACK, attacked_model: str = MODEL) -> None:
        attack_of(suite, attack, attacked_model)
        self._suite = suite
        self._attack, self._model = attack, attacked_model

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, JsonValue]]:
        """Schemas of the suite's tools."""
        return _schemas(self._suite)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Load the suite's data as the task has it, and return the user's message."""
        suite, user_task = suite_of(self._suite), str(self.task["user_task"])
        injection_task = str(self.task["injection_task"])
        self._user_task = suite.user_tasks[user_task]
        self._goal = suite.injection_tasks[injection_task] if injection_task else None
        data = fresh(self._suite, user_task, injection_task, self._attack, self._model)
        self._data = self._user_task.init_environment(data)
        self._before = self._data.model_copy(deep=True)
        self._said, self._messages = "", 0
        self._conversation, self._first_turn = 1, 0
        self._calls: list[Any] = []
        return self._prompt(), {}

    def step(self, action: Message) -> Any:
        """Run the message's calls; one without calls, or the last one allowed, ends the conversation."""
        self._said = text_of(action)
        calls = action.get("tool_calls") or []
        # A message of which the runner refused every call is counted too.
        self._messages = max(self._messages, self.context.turn - self._first_turn) + 1
        if calls and self._messages < MAX_MESSAGES:
            return [_answer(call, self._run(call["function"])) for call in calls], 0.0, False, False, {}
        if not calls or self._said or self._conversation == CONVERSATIONS:
            self._calls += [asked for call in calls if not isinstance(asked := _asked(call["function"]), str)]
            return [], 0.0, not calls, bool(calls), {}
        self._messages, self._first_turn = 0, self.context.turn + 1
        self._conversation += 1
        self._calls.clear()  # AgentDojo's scorers see those of the last conversation
        self.context.begins_anew = True
        return [*(_answer(call, _NOT_RUN) for call in calls), *self._prompt()], 0.0, False, False, {}

    def _prompt(self) -> list[Message]:
        return [
            {"role": "system", "content": _system_message()},
            {"role": "user", "content": self._user_task.PROMPT},
        ]

    def finish(self, stop_reason: str) -> Outcome:
        """Return AgentDojo's two verdicts as parts; the reward is their product."""
        utility = self._verdict(self._user_task)
        reached = self._goal is not None and self._verdict(self._goal)
        parts = {"utility": float(utility), "security": float(not reached)}
        return Outcome(parts["utility"] * parts["security"], parts)

    def _run(self, function: Mapping[str, Any]) -> str:
        """Run one call as AgentDojo's own executor does, and return what the model reads."""
        if isinstance(asked := _asked(function), str):
            return asked
        self._calls.append(asked)
        said = {"role": "assistant", "content": None, "tool_calls": [asked]}
        executor = module("agent_pipeline.tool_execution").ToolsExecutor()
        runtime = module("functions_runtime").FunctionsRuntime(suite_of(self._suite).tools)
        try:
            *_, messages, _ = executor.query("", runtime, self._data, [said])
        except (TypeError, RecursionError, MemoryError) as error:
            # Of results that the executor cannot write down, and of arguments that are nested too deep.
            return f"{type(error).__name__}: {error}"
        shown = str(messages[-1]["error"] or messages[-1]["content"][0]["content"])
        return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}... (cut, {len(shown)} characters)"

    def _verdict(self, task: Any) -> bool:
        """Return whether a task of the user or a goal of the attacker is reached, as AgentDojo decides."""
        block = module("types").text_content_block_from_string
        check = suite_of(self._suite)._check_task_result  # noqa: SLF001 - it has no public name
        return bool(check(task, [block(self._said)], self._before, self._data, self._calls))

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> Message:
        """Make the calls of the user's ground truth, one in a turn if there is time, and give its answer."""
        names = (str(task[name]) for name in ("suite", "user_task", "injection_task"))
        calls, answer = _ground_truth(*names)
        turn = turn_of(messages)
        size = -(-len(calls) // (MAX_MESSAGES - 1))
        if turn * size < len(calls):
            return message_with_calls(calls[turn * size : (turn + 1) * size])
        return {"role": "assistant", "content": answer}


def _asked(function: Mapping[str, Any]) -> Any:
    """Return a call as AgentDojo's, or a text that says why it cannot be read."""
    if len(function["arguments"]) > LONGEST:
        return f"ValidationError: the arguments are longer than {LONGEST} characters"
    try:
        arguments = read_arguments(function["arguments"] or "{}")
        return module("functions_runtime").FunctionCall(function=function["name"], args=arguments)
    except ValueError as error:
        return f"ValidationError: the arguments cannot be read: {error}"


def _answer(call: Mapping[str, Any], content: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def rows(suite: str) -> list[dict[str, object]]:
    """Return the user's tasks, without an attacker."""
    return [
        {"id": name, "suite": suite, "user_task": name, "injection_task": ""}
        for name in suite_of(suite).user_tasks
    ]


def attacked_rows(suite: str) -> list[dict[str, object]]:
    """Return each task of the user with each goal of the attacker; neighbours have different tasks."""
    goals = list(suite_of(suite).injection_tasks)
    return [
        {"id": f"{name}:{goal}", "suite": suite, "user_task": name, "injection_task": goal}
        for shift in range(len(goals))
        for number, name in enumerate(suite_of(suite).user_tasks)
        for goal in [goals[(number + shift) % len(goals)]]
    ]


@lru_cache(maxsize=8)
def _schemas(suite: str) -> Sequence[Mapping[str, JsonValue]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters.model_json_schema(),
            },
        }
        for tool in suite_of(suite).tools
    ]


@lru_cache(maxsize=1024)
def _ground_truth(
    suite: str, user_task: str, injection_task: str
) -> tuple[Sequence[tuple[str, Mapping[str, Any]]], str]:
    solved = suite_of(suite).user_tasks[user_task]
    data = solved.init_environment(fresh(suite, user_task, injection_task, ATTACK, MODEL))
    calls = [(call.function, dict(call.args)) for call in solved.ground_truth(data)]
    return calls, str(solved.GROUND_TRUTH_OUTPUT)


@lru_cache(maxsize=1)
def _system_message() -> str:
    """Return AgentDojo's usual system message."""
    yaml: Any = importlib.import_module("yaml")
    file = importlib.resources.files("agentdojo") / "data" / "system_messages.yaml"
    return str(yaml.safe_load(file.read_text(encoding="utf-8"))["default"])
