"""Nothing that a model writes raises from a world: it is answered or scored, and an odd answer earns nothing."""

import json
import math
import warnings

import pytest

from agentenv.testing import play
from helpers.worlds import world

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::Warning")]

NESTED = 2_000
TEXTS = (
    "",
    "nan",
    "inf",
    "-1e999",
    "9" * 10_000,
    "1" * 30 + "/0",
    "٣ ٤ ⑤ ²",
    "[٣ ²]",
    "[1e5 nan]",
    "½",
    "{" * NESTED,
    "[" * NESTED + "]" * NESTED,
    "\\boxed{" * 200,
    "<answer>" + "(" * NESTED + "</answer>",
    "<answer>null</answer>",
    '<answer>{"a": [null, {}]}</answer>',
    "<answer>[[1, 2], [3]]</answer>",
    "\x00\x1b[2J\r\n\u2028",
    "a\n" * 5_000,
    None,
    [{"type": "text", "text": "7"}, {"type": "text", "text": "²"}],
    [],
)
ARGUMENTS = (
    *(
        "",
        "null",
        "[]",
        "7",
        '"text"',
        "{",
        "{}",
        "[" * NESTED,
        '{"a": ' * NESTED,
        '{"a":' * 300 + "1" + "}" * 300,
        '{"x": NaN}',
        "\x00",
    ),
    *({}, None, [], [[1], {"a": None}], math.nan, math.inf, 10**400, True, "٣", "9" * 5_000, "x" * 30_000),
)
"""Texts of arguments, and values that every parameter of a tool gets."""
WORLDS = (
    *("bfcl:simple_python", "bfcl:multi_turn_base", "agentdojo:banking", "arc:arcagi"),
    *("tau2:retail", "tau2:telecom", "tau2:banking_knowledge", "pettingzoo:leduc_holdem_v4"),
    *("textarena:GuessTheNumber-v0", "textarena:Mastermind-v0", "textarena:Sudoku-v0"),
    *("textarena:Minesweeper-v0", "textarena:TicTacToe-v0", "reasoning_gym:prime_factorization"),
    *("reasoning_gym:countdown", "reasoning_gym:sudoku", "minigrid:BabyAI-GoToLocal-v0"),
    *("nethack:NetHackScore-v0", "textworld_express:coin"),
)
SLOW = ("crafter:CrafterReward-v1", "scienceworld:boil", "textworld:simple")


def call_of(schema, value):
    """Return the arguments that give every parameter of a tool this value, or this text itself."""
    names = schema["function"]["parameters"].get("properties", {}) or {"x": {}}
    return value if isinstance(value, str) else json.dumps(dict.fromkeys(names, value))


def messages(schemas):
    """Yield odd messages: texts, calls of every tool, and calls of what is no tool."""
    yield from ({"role": "assistant", "content": text} for text in TEXTS)
    for number, value in enumerate(ARGUMENTS):
        calls = [
            (schema["function"]["name"], call_of(schema, value))
            for schema in schemas[number % 3 :: 3] or schemas
        ]
        for name, arguments in [*calls, ("", "{}"), ("__class__", "{}"), ("⑤", "{}")] if schemas else []:
            function = {"name": name, "arguments": arguments}
            yield {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": function}],
            }


@pytest.mark.parametrize(
    "name", [*WORLDS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SLOW)]
)
async def test_odd_answers_are_answered_or_count_nothing(name):
    entry = world(name)
    with warnings.catch_warnings(action="ignore"):
        tasks = entry.task_set().take(2)
        env = entry.make()
        await play(entry, lambda *_: "x", tasks[0], env=env)  # so that there are tools
        left = list(messages(list(env.tool_schemas)))
        while left:

            def policy(*_, left=left):
                return left.pop(0) if left else {"role": "assistant", "content": "x"}

            played = await play(entry, policy, tasks[len(left) % len(tasks)])
            assert played.reward is not None
            assert math.isfinite(played.reward)
            assert played.reward < 1
