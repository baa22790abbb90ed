"""Games of TextWorld, made by its own package where that is installed."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.core import ToolError, UsageError
from agentenv.testing import oracle_of, play
from agentenv_worlds.commands import command_of
from agentenv_worlds.textworld import games
from helpers.worlds import begun, told, world


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cooking-recipe9", "no setting 'recipe9'"),
        ("cooking-recipe1+cok", "did you mean 'cook'"),
        ("cooking-recipe1+recipe2", "names the setting 'recipe' twice"),
        ("cooking-recipe1+take2", "hides more ingredients than the recipe has"),
        ("coin_collector-level180", "no setting 'level180'"),  # it would have 160 rooms
        ("simple-sparse+dense", "names the setting 'rewards' twice"),
    ],
)
def test_wrong_settings_in_a_name_are_refused(monkeypatch, name, said):
    monkeypatch.setattr(games.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UsageError, match=said):
        games.settings_of(name)


def test_a_setting_that_is_not_named_has_textworlds_own_value(monkeypatch):
    monkeypatch.setattr(games.importlib.util, "find_spec", lambda name: object())
    assert games.settings_of("treasure_hunter") == ("treasure_hunter", {"level": 5})
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
        *((text, None) for text in ("", " \n>\n", "look " * 100, "take café", "look\x07")),
    ],
)
def test_the_last_line_of_an_answer_is_its_command_or_it_is_told_that_there_is_none(text, command):
    if command is not None:
        assert command_of(text) == command
        return
    with pytest.raises(ToolError, match="That is no command"):
        command_of(text)


@pytest.mark.engine
async def test_commands_for_the_interpreter_are_refused_and_write_nothing(tmp_path, monkeypatch):
    entry = world("textworld:simple")
    monkeypatch.chdir(tmp_path)
    env, _ = await begun(entry, entry.task_set("train")[0].data)

    for text in ("save", "Take the bed. SAVE", "script", "transcript", "quit", "restart", "restore"):
        assert (await told(env, text)).startswith("That is no command of the game")
    assert list(tmp_path.iterdir()) == []
    assert "You open the" in await told(env, "open chest drawer")
    assert (await env.end("max_turns")).reward == pytest.approx(0.1, abs=0.1)
    await env.shutdown()


@pytest.mark.engine
async def test_commands_are_listed_unless_told_not_to():
    entry = world("textworld:simple")
    env, first = await begun(entry, entry.task_set("train")[0].data)
    later = await told(env, "inventory")
    await env.shutdown()
    bare, shown = await begun(entry, entry.task_set("train")[0].data, commands=False)
    await bare.shutdown()

    assert first.startswith("You are now playing")
    assert "Commands: " in first
    assert "open antique trunk" in later
    assert "Commands: " not in shown


@pytest.mark.engine
async def test_a_part_of_the_score_is_kept_when_the_turns_run_out():
    entry = world("textworld:simple")
    gold, turns = oracle_of(entry), []

    def half(messages, task, rng):
        turns.append(1)
        return gold(messages, task, rng) if len(turns) <= 3 else "look"

    played = await play(entry, half, entry.task_set("train")[0])

    assert played.stop_reason == "max_turns"
    assert 0.0 < played.reward < 1.0
    assert played.rewards["won"] == 0.0


@pytest.mark.engine
def test_a_seed_makes_the_same_game_in_another_process():
    world("textworld:simple")
    code = (
        "from agentenv_worlds.textworld.games import game_of, started\n"
        "game = game_of('cooking-recipe2+take2+go6+cook', 'test', 7)\n"
        "print(game.walkthrough, started(game).reset()['feedback'])"
    )
    command, texts = [sys.executable, "-W", "ignore", "-c", code], set()
    for seed in ("1", "2"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        texts.add(subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout)

    assert len(texts) == 1


@pytest.mark.engine
def test_files_of_a_game_are_removed_when_no_episode_needs_it():
    world("textworld:simple")
    games._made.cache_clear()
    folder, again = (Path(games.game_of("coin_collector-level1", "train", 0).file).parent for _ in range(2))
    assert folder == again
    assert folder.exists()

    games._made.cache_clear()
    gc.collect()

    assert not folder.exists()
