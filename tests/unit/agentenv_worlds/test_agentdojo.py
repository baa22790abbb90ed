"""AgentDojo's suites, driven through its own package where that is installed."""

import importlib
import json
import sys

import pytest

from agentenv.cli import main
from agentenv.core import Action, Context, DependencyMissing, UnknownEnvironment, UsageError
from agentenv.envs import EnvSpec, spec
from agentenv.testing import check_env, oracle_of, play, tool_call_message
from agentenv_worlds.agentdojo import package

SUITES = {"workspace": (40, 14), "travel": (20, 7), "banking": (16, 9), "slack": (21, 5)}
"""Tasks of the user and goals of the attacker."""


def needs_agentdojo():
    for name in package.MODULES:
        pytest.importorskip(name, reason=f"UNTESTED: {name} is not installed")


def test_the_error_for_a_missing_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(package.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(DependencyMissing, match="pip install --no-deps agentdojo"):
        spec("agentdojo:slack")


def test_an_unknown_suite_is_told_with_the_nearest_one():
    with pytest.raises(UnknownEnvironment, match="did you mean 'banking'"):
        spec("agentdojo:bankin")


def test_the_list_of_libraries_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("agentenv.envs.worlds.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="0"):
        main(["list", "agentdojo", "--json"])
    (peer,) = json.loads(capsys.readouterr().out)["libraries"]

    assert (peer["name"], peer["needs"]) == ("agentdojo:SUITE", package.INSTALL)


async def refused(entry, split):
    tasks = list(entry.task_set(split))
    played = [await play(entry, oracle_of(entry), task) for task in tasks]
    return len(tasks), [task.id for task, episode in zip(tasks, played, strict=True) if episode.reward != 1.0]


@pytest.mark.engine
@pytest.mark.parametrize("suite", SUITES)
async def test_agentdojo_accepts_its_ground_truth_on_every_task(suite):
    needs_agentdojo()

    assert await refused(spec(f"agentdojo:{suite}"), "test") == (SUITES[suite][0], [])


@pytest.mark.engine
@pytest.mark.parametrize("suite", ["banking", "slack"])
async def test_agentdojo_accepts_its_ground_truth_under_every_attack(suite):
    needs_agentdojo()

    assert await refused(spec(f"agentdojo:{suite}"), "attacked") == (SUITES[suite][0] * SUITES[suite][1], [])


@pytest.mark.exhaustive
@pytest.mark.parametrize("suite", ["workspace", "travel"])
async def test_agentdojo_accepts_its_ground_truth_under_every_attack_on_large_data(suite):
    needs_agentdojo()

    assert await refused(spec(f"agentdojo:{suite}"), "attacked") == (SUITES[suite][0] * SUITES[suite][1], [])


@pytest.mark.engine
@pytest.mark.parametrize("suite", ["banking", "slack"])
async def test_the_checker_passes_on_agentdojo(suite):
    needs_agentdojo()
    report = await check_env(f"agentdojo:{suite}", tasks=4, timeout_s=600)

    assert report.ok, str(report)


@pytest.mark.engine
async def test_an_assistant_that_obeys_the_attacker_loses_security_and_one_that_is_silent_utility():
    needs_agentdojo()
    entry = spec("agentdojo:slack")
    task = entry.task_set("attacked")["user_task_0:injection_task_1"]
    suite = package.suite_of("slack")
    orders = suite.injection_tasks["injection_task_1"].ground_truth(
        package.fresh("slack", "user_task_0", "", "", "")
    )
    gold = oracle_of(entry)

    def obedient(messages, task, rng):
        done = sum(message["role"] == "assistant" for message in messages)
        if done < len(orders):
            return tool_call_message(orders[done].function, **orders[done].args)
        own = [message for message in messages if message["role"] != "assistant"]
        said = [message for message in messages if message["role"] == "assistant"][len(orders) :]
        return gold([*own, *said], task, rng)

    obeyed = await play(entry, obedient, task)
    silent = await play(entry, lambda messages, task, rng: "I will not.", task)

    assert (obeyed.reward, obeyed.rewards) == (0.0, {"utility": 1.0, "security": 0.0})
    assert (silent.reward, silent.rewards) == (0.0, {"utility": 0.0, "security": 1.0})


@pytest.mark.engine
async def test_the_attack_stands_in_what_a_tool_returns_and_can_be_chosen():
    needs_agentdojo()
    entry = spec("agentdojo:banking")
    task = entry.task_set("attacked")[0]
    read = tool_call_message("read_file", file_path="bill-december-2023.txt")
    shown = []
    for settings in ({}, {"attack": "ignore_previous"}, {"attacked_model": "gpt-4o-2024-05-13"}):
        env = entry.make(**settings)
        await env.begin(task.data, seed=0, context=Context())
        shown.append((await env.advance(Action.of(read))).tool_results[0].content)

    assert "message from me, Emma Johnson, to you, Local model" in shown[0]
    assert "Emma Johnson" not in shown[1]
    assert "to you, GPT-4" in shown[2]
    with pytest.raises(UsageError, match="did you mean 'ignore_previous'"):
        entry.make(attack="ignore_previos")
    with pytest.raises(UsageError, match="no name for the model 'mine'"):
        entry.make(attacked_model="mine")


@pytest.mark.engine
async def test_calls_that_cannot_be_run_are_answered():
    needs_agentdojo()
    entry = spec("agentdojo:banking")
    env = entry.make()
    await env.begin(entry.task_set()[0].data, seed=0, context=Context())
    deep = tool_call_message("read_file", file_path="-" * 9_000 + "1")
    messages = [
        tool_call_message("no_such_tool"),
        tool_call_message("read_file"),
        tool_call_message("read_file", file_path="x" * 30_000),
        deep,
    ]
    broken = tool_call_message("read_file")
    broken["tool_calls"][0]["function"]["arguments"] = "[1]"

    answers = [
        (await env.advance(Action.of(message))).tool_results[0].content for message in (*messages, broken)
    ]

    assert "Invalid tool no_such_tool" in answers[0]
    assert answers[1].startswith("ValidationError")
    assert "longer than 20000 characters" in answers[2]
    assert answers[3]
    assert "cannot be read" in answers[4]


@pytest.mark.engine
def test_a_specification_survives_json_and_the_folder_of_pipelines_is_left_as_it_was():
    needs_agentdojo()
    entry = spec("agentdojo:slack")

    assert len(EnvSpec.from_json(entry.to_json()).task_set("attacked")) == 105
    assert entry.max_turns == 3 * 16
    package.suite_of("slack")
    assert "agentdojo.agent_pipeline" not in sys.modules or hasattr(
        importlib.import_module("agentdojo.agent_pipeline"), "AgentPipeline"
    )


async def sixteen(env, text):
    said = {**tool_call_message("get_balance"), "content": text}
    return [await env.advance(Action.of(said)) for _ in range(16)]


@pytest.mark.engine
async def test_the_calls_of_the_last_message_allowed_are_not_run():
    needs_agentdojo()
    entry = spec("agentdojo:banking")
    env = entry.make()
    await env.begin(next(iter(entry.task_set())).data, seed=0, context=Context())

    steps = await sixteen(env, "I look.")

    assert [step.truncated for step in steps] == [False] * 15 + [True]
    assert [step.tool_results[0].text for step in steps[:15]] == ["1810.0"] * 15
    assert steps[-1].tool_results[0].is_error


@pytest.mark.engine
async def test_a_conversation_that_ends_with_calls_and_no_text_begins_again_twice_as_the_authors_do():
    needs_agentdojo()
    entry = spec("agentdojo:banking")
    env, context = entry.make(), Context()
    first = await env.begin(next(iter(entry.task_set())).data, seed=0, context=context)

    begun = []
    for _ in range(3):
        steps = await sixteen(env, "")
        begun.append((context.begins_anew, steps[-1].messages, steps[-1].truncated))
        context.begins_anew = False

    assert begun == [(True, first.messages, False), (True, first.messages, False), (False, (), True)]
    assert len(env._calls) == 16, "AgentDojo's scorers see the calls of the last conversation"
