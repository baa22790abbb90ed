"""Games of TextWorld, made by its own package where that is installed."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.cli import main
from agentenv.core import Action, Context, DependencyMissing, ToolError, UnknownEnvironment, UsageError
from agentenv.envs import EnvSpec, spec
from agentenv.testing import check_env, oracle_of, play
from agentenv_worlds.commands import command_of
from agentenv_worlds.textworld import games


def needs_textworld():
    for name in (*games.PACKAGES, "tatsu"):
        pytest.importorskip(name, reason=f"UNTESTED: {name} is not installed", exc_type=ImportError)


@pytest.fixture
def without_package(monkeypatch):
    monkeypatch.setattr(games.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def with_package(monkeypatch):
    monkeypatch.setattr(games.importlib.util, "find_spec", lambda name: object())


def test_a_missing_package_is_told_with_the_command_that_installs_it(without_package):
    with pytest.raises(DependencyMissing, match="pip install --no-deps jericho textworld"):
        spec("textworld:simple")


def test_the_list_of_libraries_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("agentenv.envs.worlds.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="0"):
        main(["list", "textworld:GAME", "--json"])
    (peer,) = json.loads(capsys.readouterr().out)["libraries"]

    assert (peer["name"], peer["needs"]) == ("textworld:GAME", games.INSTALL)


def test_an_unknown_challenge_is_told_with_the_nearest_one():
    with pytest.raises(UnknownEnvironment, match="did you mean 'cooking'"):
        spec("textworld:coking")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cooking-recipe9", "no setting 'recipe9'"),
        ("cooking-recipe1+cok", "did you mean 'cook'"),
        ("cooking-recipe1+recipe2", "names the setting 'recipe' twice"),
        ("cooking-recipe1+take2", "hides more ingredients than the recipe has"),
        ("coin_collector-level180", "no setting 'level180'"),  # it would have 160 rooms
        ("simple-sparse+dense", "names the setting 'rewards' twice"),
        ("treasure_hunter", None),
    ],
)
def test_settings_are_read_from_the_name(with_package, name, said):
    if said is None:
        assert games.settings_of(name) == ("treasure_hunter", {"level": 5})
        return
    with pytest.raises(UsageError, match=said):
        games.settings_of(name)


def test_a_setting_that_is_not_named_has_textworlds_own_value(with_package):
    assert games.settings_of("cooking-recipe2+cook") == (
        "cooking",
        {"recipe": 2, "take": 0, "go": 1, "open": False, "cook": True, "cut": False, "drop": False},
    )


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("go east", "go east"),
        ("I need the key first.\n\n> take old key ", "take old key"),
        ("`open  chest drawer`\n", "open chest drawer"),
    ],
)
def test_the_last_line_of_an_answer_is_its_command(text, command):
    assert command_of(text) == command


@pytest.mark.parametrize("text", ["", " \n>\n", "look " * 100, "take café", "look\x07"])
def test_an_answer_without_a_command_is_told_so(text):
    with pytest.raises(ToolError, match="That is no command"):
        command_of(text)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("game", "split"),
    [*((game, "test") for game in games.DEFAULTS), ("cooking-recipe3+take3+go6+cook+cut+open+drop", "train")],
)
async def test_the_walkthrough_wins_every_kind_of_game(game, split):
    needs_textworld()
    entry = spec(f"textworld:{game}")

    played = await play(entry, oracle_of(entry), entry.task_set(split)[0])

    assert (played.reward, played.rewards) == (1.0, {"score": 1.0, "won": 1.0})


@pytest.mark.exhaustive
@pytest.mark.parametrize("game", games.DEFAULTS)
async def test_the_checker_passes_on_every_challenge(game):
    needs_textworld()
    report = await check_env(f"textworld:{game}", tasks=8, timeout_s=1200)

    assert report.ok, str(report)


async def begun(game="simple", number=0, **settings):
    entry = spec(f"textworld:{game}")
    env = entry.make(**settings)
    first = await env.begin(entry.task_set("train")[number].data, seed=0, context=Context())
    return env, first.messages[-1]["content"]


async def told(env, text):
    step = await env.advance(Action.of({"role": "assistant", "content": text}))
    return step.messages[-1]["content"]


@pytest.mark.engine
async def test_commands_for_the_interpreter_are_refused_and_write_nothing(tmp_path, monkeypatch):
    needs_textworld()
    monkeypatch.chdir(tmp_path)
    env, _ = await begun()

    answers = [
        await told(env, text)
        for text in ("save", "Take the bed. SAVE", "script", "transcript", "quit", "restart", "restore")
    ]

    assert all(answer.startswith("That is no command of the game") for answer in answers)
    assert list(tmp_path.iterdir()) == []
    assert "You open the" in await told(env, "open chest drawer")
    assert (await env.end("max_turns")).reward == pytest.approx(0.1, abs=0.1)
    await env.shutdown()


@pytest.mark.engine
async def test_observations_have_neither_banner_nor_status_line_and_list_commands_unless_told_not_to():
    needs_textworld()
    env, first = await begun()
    later = await told(env, "inventory")
    await env.shutdown()
    bare, shown = await begun(commands=False)
    await bare.shutdown()

    assert first.startswith("You are now playing")
    assert "$$" not in first
    assert "-=" not in later
    assert first.endswith(".")
    assert "Commands: " in first
    assert "open antique trunk" in later
    assert "Commands: " not in shown


@pytest.mark.engine
async def test_a_part_of_the_score_is_kept_when_the_turns_run_out():
    needs_textworld()
    entry = spec("textworld:simple")
    task = entry.task_set("train")[0]
    gold = oracle_of(entry)
    turns = []

    def half(messages, task, rng):
        turns.append(1)
        return gold(messages, task, rng) if len(turns) <= 3 else "look"

    played = await play(entry, half, task)

    assert played.stop_reason == "max_turns"
    assert 0.0 < played.reward < 1.0
    assert played.rewards["won"] == 0.0


@pytest.mark.engine
def test_a_seed_makes_the_same_game_in_another_process():
    needs_textworld()
    name = "cooking-recipe2+take2+go6+cook"
    code = (
        "from agentenv_worlds.textworld.games import game_of, started\n"
        f"game = game_of({name!r}, 'test', 7)\n"
        "print(game.walkthrough, started(game).reset()['feedback'])"
    )

    texts = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }

    assert len(texts) == 1


@pytest.mark.engine
def test_files_of_a_game_are_removed_when_no_episode_needs_it():
    needs_textworld()
    games._made.cache_clear()
    folder, again = (Path(games.game_of("coin_collector-level1", "train", 0).file).parent for _ in range(2))
    assert folder == again
    assert folder.exists()

    games._made.cache_clear()
    gc.collect()

    assert not folder.exists()


@pytest.mark.engine
def test_a_specification_survives_json():
    needs_textworld()
    entry = spec("textworld:cooking-recipe2+take2+go6")

    again = EnvSpec.from_json(entry.to_json())

    assert again.id == "textworld/cooking-recipe2.take2.go6-v0"
    assert again.task_set("test")[3].data == entry.task_set("test")[3].data
    assert again.max_turns == 50
