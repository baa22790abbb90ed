"""Condensers, users, scores and policies that settings name: the same by command, TOML file and Python."""

from __future__ import annotations

import json
import sys

import pytest

from agentenv.cli import main
from agentenv.core import UsageError
from agentenv.envs import registry
from agentenv.runner import DropToolOutputs, GroupPolicy, Runner, RunnerOptions, ScriptedUser, Summarise
from agentenv.runs import evaluate, find_run
from agentenv.runs.store import RunWriter
from agentenv.testing import tool_call
from scenes import RENDERER, Tools, groups_of, runner

PAGES = [*(tool_call("page", number=number) for number in range(1, 4)), "It is ocelot."]

ENV = """
import agentenv as ae
from agentenv.runner import DropToolOutputs, ScriptedUser


class Library(ae.ToolEnv):
    "Read pages until the word is found."

    def start(self):
        return "Which word stands on page 1?"

    @ae.tool
    def page(self, number: int) -> str:
        "Read a page."
        return f"Page {number}: " + "lorem ipsum " * 40

    def reward(self, answer: str) -> float:
        return float("ocelot" in answer)


ae.register("parts/Library-v0", Library, tasks=[{"id": "a"}, {"id": "b"}], override=True)


class Mine(DropToolOutputs):
    "A condenser of one's own."


def concise(trajectory):
    return -0.1 * len(trajectory.turns)


async def split(env, task):
    return 0.5, {"half": 0.5}


def customer(task):
    return ScriptedUser([f"I am {task['id']}."])


def answers(messages):
    return None if len(messages) > 4 else "Go on."


not_a_user = 7
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "library.py").write_text(ENV)
    (tmp_path / "script.json").write_text(json.dumps(PAGES))


def main_of(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code or 0


def play(model="scripted:script.json", **settings):
    limits = {"max_context_tokens": 2000}
    return evaluate("library.py", model, num_tasks=1, limits=limits, **settings)


def only(result):
    (group,) = result.groups
    (trajectory,) = group.trajectories
    return trajectory


@pytest.mark.parametrize(
    "condenser",
    [
        "drop_tool_outputs",
        {"name": "drop_tool_outputs", "at": 0.5},
        "library.py:Mine",
        {"name": "library.py:Mine", "keep_last": 0},
        "agentenv.runner:DropToolOutputs",
        DropToolOutputs(at=0.5),
        DropToolOutputs,
    ],
)
def test_a_condenser_is_named(condenser):
    record = only(play(runner={"condenser": condenser}))
    assert record.metrics["forks_tool_outputs"] >= 1
    assert "recall_block" in {schema["function"]["name"] for schema in record.tools}


def test_the_policy_writes_its_own_summaries_or_another_model_does():
    condenser = {"name": "summarise", "keep_last": 1, "sampling": {"max_tokens": 32}}
    options = RunnerOptions(condenser=condenser)
    assert isinstance(Runner(runner().engine, RENDERER, options=options).condenser, Summarise)

    other = {"name": "summarise", "keep_last": 1, "model": "scripted:all pages were read"}
    record = only(play(runner={"condenser": other}))
    assert record.metrics["forks_summary"] >= 1
    assert any("all pages were read" in str(message) for message in record.rewrites[0].messages)


def test_a_score_adds_to_the_reward_of_the_environment():
    record = only(play(runner={"score": "library.py:concise"}))
    assert record.reward == pytest.approx(0.6)
    assert record.rewards["concise"] == pytest.approx(-0.4)
    record = only(play(runner={"score": "library.py:split"}))
    assert (record.reward, record.rewards["half"]) == (1.5, 0.5)


@pytest.mark.parametrize(
    ("user", "said"),
    [
        ("library.py:customer", "I am a."),
        ("library.py:answers", "Go on."),
        ({"name": "scripted", "lines": ["Really?"]}, "Really?"),
        ({"name": "model", "model": "scripted:Are you sure?", "prompt": "You doubt {id}."}, "Are you sure?"),
        (ScriptedUser(["Yes?"]), "Yes?"),
    ],
)
def test_a_user_is_named(user, said):
    record = only(play("scripted:ocelot", runner={"user": user}))
    assert {"role": "user", "content": said} in record.messages


async def test_policies_of_the_options_hold_unless_an_argument_replaces_them():
    class Done(Tools):
        def is_done(self):
            return True

    options = RunnerOptions(done_policy="explain", group_policy=GroupPolicy(min_usable=3))
    playing = Runner(runner([tool_call("double", number=1), "because"]).engine, RENDERER, options=options)
    with pytest.raises(UsageError, match="a group has only 2 members"):
        await groups_of(playing, Done, group_size=2)
    ((told,),) = await groups_of(playing, Done, policy=GroupPolicy())
    ((short,),) = await groups_of(playing, Done, policy=GroupPolicy(), done_policy="stop")
    assert (len(told.turns), len(short.turns)) == (2, 1)


@pytest.mark.parametrize(
    ("options", "message", "remedy"),
    [
        ({"condenser": "sumarise"}, "unknown condenser 'sumarise'", "did you mean 'summarise'?"),
        ({"user": "modell"}, "unknown user 'modell'", "did you mean 'model'?"),
        ({"score": "concise"}, "unknown score 'concise'", "known: file.py:name"),
        ({"condenser": {"at": 0.5}}, "has no name", "runner.condenser.name=NAME"),
        ({"condenser": {"name": "summarise", "keep": 1}}, "no argument 'keep'", "keep_last"),
        ({"condenser": {"name": "summarise", "engine": 1}}, "no argument 'engine'", "model"),
        ({"condenser": {"name": "drop_tool_outputs", "at": 2}}, "at must be in", ""),
        ({"condenser": "library.py:concise"}, "cannot be made with", ""),
        ({"condenser": "library.py:customer"}, "cannot be made with", ""),
        ({"condenser": "library.py:not_a_user"}, "7 is not a condenser", "Condenser"),
        ({"condenser": "library.py:Min"}, "library.py has no 'Min'", "did you mean 'Mine'?"),
        ({"condenser": "lib.py:Mine"}, "there is no file 'lib.py'", ""),
        ({"user": "library.py:not_a_user"}, "is not a user", "User"),
        ({"user": {"name": "model"}}, "cannot be made with", ""),
        ({"score": "library.py:answers"}, "'messages'", "trajectory"),
        ({"group_policy": {"on_faild": "refill"}}, "unknown setting 'on_faild'", "'on_failed'"),
        ({"group_policy": {"on_failed": "again"}}, "unknown on_failed 'again'", "refill"),
        ({"done_policy": "explan"}, "unknown done_policy 'explan'", "did you mean 'explain'?"),
    ],
)
def test_wrong_names_and_arguments_are_refused_before_an_episode_is_played(options, message, remedy):
    with pytest.raises(UsageError) as refused:
        play(runner=options)
    assert message in str(refused.value)
    assert remedy in str(refused.value)


def test_the_command_and_a_file_of_settings_name_parts_and_the_run_resumes_with_them(tmp_path, capsys):
    (tmp_path / "settings.toml").write_text(
        '[runner]\nscore = "library.py:concise"\n[runner.condenser]\nname = "drop_tool_outputs"\nat = 0.5\n'
    )
    command = ["eval", "library.py", "-m", "scripted:script.json", "-n", "2", "--config", "settings.toml"]
    options = ["-o", "runner.condenser.keep_last=0", "-o", "max_context_tokens=2000", "-o", "concurrency=1"]
    assert main_of([*command, *options]) == 0
    run = find_run("last", "runs")
    assert run.info.config["runner"]["condenser"] == {"name": "drop_tool_outputs", "at": 0.5, "keep_last": 0}
    assert [record.rewards["concise"] for record in run] == pytest.approx([-0.4, -0.4])

    info = run.info
    made = {"env_ids": info.env_ids, "model": info.model, "seed": info.seed, "config": info.config}
    with RunWriter.create("stopped", runs_dir="runs", **made) as stopped:
        pass
    capsys.readouterr()
    assert main_of(["eval", "--resume", stopped.id]) == 0
    assert f"executes {tmp_path / 'library.py'}\n" in capsys.readouterr().err
    assert [record.reward for record in find_run(stopped.id, "runs")] == pytest.approx([0.6, 0.6])


def test_a_part_without_a_name_is_recorded_as_such_and_refused_when_the_run_is_resumed(tmp_path, capsys):
    play(runner={"condenser": DropToolOutputs(), "score": lambda: 0.0}, runs_dir="runs")
    run = find_run("last", "runs")
    assert run.info.config["runner"]["condenser"] == {"object": "agentenv.runner.condense.DropToolOutputs"}
    assert main_of(["eval", "--resume", run.id]) == 2
    assert "which has no name" in capsys.readouterr().err

    module = sys.modules[registry["parts/Library-v0"].module]
    play(runner={"score": module.concise, "condenser": DropToolOutputs}, runs_dir="runs")
    recorded = find_run("last", "runs").info.config["runner"]
    assert recorded["score"] == f"{tmp_path / 'library.py'}:concise"
    assert recorded["condenser"] == "agentenv.runner.condense:DropToolOutputs"


def test_condensed_rows_without_the_hint_come_from_commands(tmp_path):
    options = ["-o", "runner.condenser=drop_tool_outputs", "-o", "max_context_tokens=2000"]
    assert main_of(["eval", "library.py", "-m", "scripted:script.json", "-n", "1", *options]) == 0
    assert main_of(["export", "last", "--as", "sft", "--output", "rows.jsonl", "--hint", " on page 1"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert {row["messages"][0]["content"] for row in rows} == {"Which word stands?"}
