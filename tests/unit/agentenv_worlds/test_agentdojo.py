"""AgentDojo's suites, driven through its own package where that is installed."""

import importlib
import sys

import pytest

from agentenv.core import Action, Context, UsageError
from agentenv.testing import oracle_of, play, tool_call_message
from agentenv_worlds.agentdojo import package
from helpers.worlds import begun, told, world

pytestmark = pytest.mark.engine
SUITES = {"workspace": (40, 14), "travel": (20, 7), "banking": (16, 9), "slack": (21, 5)}
"""Tasks of the user and goals of the attacker."""


@pytest.mark.parametrize(
    ("suite", "split"),
    [
        *((suite, "test") for suite in SUITES),
        ("banking", "attacked"),
        ("slack", "attacked"),
        *(pytest.param(suite, "attacked", marks=pytest.mark.exhaustive) for suite in ("workspace", "travel")),
    ],
)
async def test_agentdojo_accepts_its_ground_truth_on_every_task_and_under_every_attack(suite, split):
    entry = world(f"agentdojo:{suite}")
    tasks = list(entry.task_set(split))
    refused = [task.id for task in tasks if (await play(entry, oracle_of(entry), task)).reward != 1.0]

    of_user, goals = SUITES[suite]
    assert (len(tasks), refused) == (of_user * (goals if split == "attacked" else 1), [])


async def test_an_assistant_that_obeys_the_attacker_loses_security_and_one_that_is_silent_utility():
    entry = world("agentdojo:slack")
    task = entry.task_set("attacked")["user_task_0:injection_task_1"]
    goal = package.suite_of("slack").injection_tasks["injection_task_1"]
    orders = goal.ground_truth(package.fresh("slack", "user_task_0", "", "", ""))
    gold = oracle_of(entry)

    def obedient(messages, task, rng):
        said = [message for message in messages if message["role"] == "assistant"]
        if len(said) < len(orders):
            return tool_call_message(orders[len(said)].function, **orders[len(said)].args)
        own = [message for message in messages if message["role"] != "assistant"]
        return gold([*own, *said[len(orders) :]], task, rng)

    obeyed = await play(entry, obedient, task)
    silent = await play(entry, lambda *_: "I will not.", task)

    assert (obeyed.reward, obeyed.rewards) == (0.0, {"utility": 1.0, "security": 0.0})
    assert (silent.reward, silent.rewards) == (0.0, {"utility": 0.0, "security": 1.0})


async def test_the_attack_stands_in_what_a_tool_returns_and_can_be_chosen():
    entry = world("agentdojo:banking")
    task = entry.task_set("attacked")[0]
    read = tool_call_message("read_file", file_path="bill-december-2023.txt")
    shown = []
    for settings in ({}, {"attack": "ignore_previous"}, {"attacked_model": "gpt-4o-2024-05-13"}):
        env, _ = await begun(entry, task.data, **settings)
        shown.append(await told(env, read))

    assert "message from me, Emma Johnson, to you, Local model" in shown[0]
    assert "Emma Johnson" not in shown[1]
    assert "to you, GPT-4" in shown[2]
    with pytest.raises(UsageError, match="did you mean 'ignore_previous'"):
        entry.make(attack="ignore_previos")
    with pytest.raises(UsageError, match="no name for the model 'mine'"):
        entry.make(attacked_model="mine")


async def test_calls_that_cannot_be_run_are_answered():
    entry = world("agentdojo:banking")
    env, _ = await begun(entry, entry.task_set()[0].data)
    broken = tool_call_message("read_file")
    broken["tool_calls"][0]["function"]["arguments"] = "[1]"

    assert "Invalid tool no_such_tool" in await told(env, tool_call_message("no_such_tool"))
    assert (await told(env, tool_call_message("read_file"))).startswith("ValidationError")
    long = tool_call_message("read_file", file_path="x" * 30_000)
    assert "longer than 20000 characters" in await told(env, long)
    assert await told(env, tool_call_message("read_file", file_path="-" * 9_000 + "1"))
    assert "cannot be read" in await told(env, broken)


def test_the_folder_of_pipelines_is_left_as_it_was():
    assert world("agentdojo:slack").max_turns == 3 * 16
    package.suite_of("slack")
    assert "agentdojo.agent_pipeline" not in sys.modules or hasattr(
        importlib.import_module("agentdojo.agent_pipeline"), "AgentPipeline"
    )


async def sixteen(env, text):
    said = {**tool_call_message("get_balance"), "content": text}
    return [await env.advance(Action.of(said)) for _ in range(16)]


async def test_the_calls_of_the_last_message_allowed_are_not_run():
    entry = world("agentdojo:banking")
    env, _ = await begun(entry, next(iter(entry.task_set())).data)

    steps = await sixteen(env, "I look.")

    assert [step.truncated for step in steps] == [False] * 15 + [True]
    assert [step.tool_results[0].text for step in steps[:15]] == ["1810.0"] * 15
    assert steps[-1].tool_results[0].is_error


async def test_a_conversation_that_ends_with_calls_and_no_text_begins_again_twice_as_the_authors_do():
    entry = world("agentdojo:banking")
    env, context = entry.make(), Context()
    first = await env.begin(next(iter(entry.task_set())).data, seed=0, context=context)

    begins = []
    for _ in range(3):
        steps = await sixteen(env, "")
        begins.append((context.begins_anew, steps[-1].messages, steps[-1].truncated))
        context.begins_anew = False

    assert begins == [(True, first.messages, False), (True, first.messages, False), (False, (), True)]
    assert len(env._calls) == 16, "AgentDojo's scorers see the calls of the last conversation"
