"""The leaderboard's own inference loop and evaluation, beside our episodes."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib
import io
import json
import os
import random
import sys
import tempfile
from types import ModuleType, SimpleNamespace
from typing import Any

from agentenv.core import Message
from agentenv.envs import spec
from agentenv.testing import play
from agentenv_worlds.bfcl import data
from agentenv_worlds.bfcl.answers import answer_calls, ground_truth_calls
from agentenv_worlds.bfcl.env import CALL_ADDED
from agreement import Agreement
from agreement.change import changed_calls

MODEL = "agentenv"


class _Anything(ModuleType):
    """Stands in for a package of which only decorators are used while the leaderboard is imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: args[0] if args and callable(args[0]) else (lambda function: function)


_REPLACED = (
    *("overrides", "tenacity", "tenacity.stop", "tenacity.wait", "tree_sitter", "tree_sitter_java"),
    *("bfcl_eval.model_handler.parser.java_parser", "bfcl_eval.model_handler.parser.js_parser"),
)
"""Packages of decorators, and parsers of answers that are written as text, which models with tools do not need."""


@functools.lru_cache(maxsize=1)
def _leaderboard() -> Any:
    """Return the leaderboard's evaluation and its handler of models with OpenAI's interface."""
    table: Any = ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = collections.defaultdict(lambda: SimpleNamespace(underscore_to_dot=True))
    stand_ins = {name: _Anything(name) for name in _REPLACED if name not in sys.modules}
    stand_ins[table.__name__] = table
    before = {name: sys.modules.get(name) for name in stand_ins}
    os.environ.setdefault("BFCL_PROJECT_ROOT", tempfile.mkdtemp(prefix="agreement-"))
    sys.modules.update(stand_ins)
    try:
        runner: Any = importlib.import_module("bfcl_eval.eval_checker.eval_runner")
        handler: Any = importlib.import_module("bfcl_eval.model_handler.api_inference.openai_completion")
    finally:
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})

    class Handler(handler.OpenAICompletionsHandler):
        """A model with tools that says its lines."""

        def __init__(self, lines: Any) -> None:
            handler.BaseHandler.__init__(self, MODEL, 0.0, MODEL, is_fc_model=True)
            self.model_style = handler.ModelStyle.OPENAI_COMPLETIONS
            self.lines = iter(lines)
            self.asked: list[dict[str, Any]] = []

        def generate_with_backoff(self, **kwargs: Any) -> Any:
            self.asked.append(copy.deepcopy(kwargs))
            calls = next(self.lines, [])
            made = [
                SimpleNamespace(
                    id=f"call_{n}", type="function", function=SimpleNamespace(name=name, arguments=arguments)
                )
                for n, (name, arguments) in enumerate(calls)
            ]
            message = SimpleNamespace(content=None if made else "Done.", tool_calls=made or None)
            usage = SimpleNamespace(prompt_tokens=0, completion_tokens=0)
            return SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=usage), 0.0

    return SimpleNamespace(runner=runner, Handler=Handler)


def said(calls: list[tuple[str, str]]) -> Message:
    """Return the message that makes these calls."""
    if not calls:
        return {"role": "assistant", "content": "Done."}
    written = [
        {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": written}  # type: ignore[typeddict-item]


async def compare(world: str, answers: int, seed: int) -> Agreement:
    """Compare random answers of all categories."""
    board = _leaderboard()
    result, rng = Agreement(world), random.Random(seed)
    multi = world.endswith("multi-turn")
    categories = data.MULTI_TURN if multi else data.SINGLE_TURN
    for number in range(answers):
        category = categories[number % len(categories)]
        entry = spec(f"bfcl:{category}")
        task = rng.choice(list(entry.task_set("test")))
        with contextlib.redirect_stdout(io.StringIO()):
            await (_multi if multi else _single)(board, category, entry, task, rng, result)
    return result


async def _single(
    board: Any, category: str, entry: Any, task: Any, rng: random.Random, result: Agreement
) -> None:
    row = data.entry_of(category, task.id)
    known = "relevance" not in category
    right = (
        answer_calls(row, data.language_of(category))
        if known
        else [(str(row["function"][0]["name"]).replace(".", "_"), {})] * rng.randrange(2)
        if row["function"]
        else []
    )
    kind, calls = changed_calls(right, rng)
    handler = board.Handler([calls])
    test = {
        "id": task.id,
        "question": copy.deepcopy(row["question"]),
        "function": copy.deepcopy(row["function"]),
    }
    responses, _ = handler.inference_single_turn_FC(test, include_input_log=False)
    if known:
        language = board.runner.Language[data.language_of(category).upper()]
        form = board.runner.ReturnFormat[data.language_of(category).upper()]
        verdict = board.runner._evaluate_single_ast_entry(
            handler, task.id, responses, row["ground_truth"], dict(row), MODEL, category, language, form
        )
    else:
        verdict = board.runner._evaluate_single_relevance_entry(
            handler, task.id, responses, row, MODEL, category
        )
    played = await play(entry, lambda *_: said(calls), task)
    result.add(float(verdict["valid"]), played.reward, (task.id, kind, calls))


async def _multi(
    board: Any, category: str, entry: Any, task: Any, rng: random.Random, result: Agreement
) -> None:
    """Play the ground truth with a change in one turn, one message a turn or one call a message.

    Malformed calls are left out: the leaderboard ends the turn at one, and ours answers it.
    """
    row = data.entry_of(category, task.id)
    turns = len(row["question"])
    lines: list[list[tuple[str, str]]] = []
    changed = rng.randrange(turns)
    kinds = []
    for turn in range(turns):
        right = ground_truth_calls(row, turn)
        calls = [(name, json.dumps(values)) for name, values in right]
        if turn == changed:
            kind, calls = changed_calls(right, rng)
            kinds.append(kind)
            if kind == "broken":
                calls = [(name, "{}") for name, _ in calls]
        if calls:
            lines.extend([[call] for call in calls] if rng.random() < 0.5 else [calls])
        lines.append([])
    if rng.random() < 0.05:
        last = rng.choice([line for line in lines if line] or [[]])
        lines[-1:] = [last] * 21
        kinds.append("21 steps")
    handler = board.Handler(lines)
    test = copy.deepcopy({name: row[name] for name in row if name != "ground_truth"})
    responses, _ = handler.inference_multi_turn_FC(test, include_input_log=False, exclude_state_log=True)
    verdict = board.runner._evaluate_single_multi_turn_entry(
        handler,
        task.id,
        responses,
        row["ground_truth"],
        copy.deepcopy(dict(row)),
        f"{MODEL}{id(test)}",
        category,
    )
    added = {function["name"] for late in row["missed_function"].values() for function in late}
    ours = iter([[_through(call, added) for call in line] for line in lines])
    played = await play(entry, lambda *_: said(next(ours, [])), task)
    result.add(float(verdict["valid"]), played.reward, (task.id, kinds, lines))


def _through(call: tuple[str, str], added: set[str]) -> tuple[str, str]:
    name, arguments = call
    if name not in added:
        return call
    return CALL_ADDED, json.dumps({"name": name, "arguments": json.loads(arguments)})
