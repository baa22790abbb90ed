"""Games of TextWorld by name, made by its own generators and compiled by its own compiler.

A name is one of TextWorld's challenges with its settings, in the words of the First TextWorld Problems, such
as `cooking-recipe2+take2+cook+go6`. A game is made once in a process. Its files lie in a temporary folder
until no episode plays it and newer games have taken its place.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from agentenv.core import DependencyMissing, UsageError, install_line
from agentenv_worlds.names import check_known

__all__ = ["DEFAULTS", "INSTALL", "PACKAGES", "Game", "game_of", "settings_of", "started"]

INSTALL = install_line("textworld", more="jericho textworld")
PACKAGES = ("textworld", "jericho")

DEFAULTS: Mapping[str, str] = {
    "simple": "dense+detailed",
    "coin_collector": "level5",
    "treasure_hunter": "level5",
    "cooking": "recipe1+take1+go6",
}
"""TextWorld's challenges, and the settings of a name without any."""

MOST_ROOMS = 100
"""Rooms that fit into a game of the format z8, which is the only one of TextWorld 1.7."""

KEPT = 64
"""Games whose files a process keeps; each has about 1 MB."""

_one_at_a_time = threading.Lock()
"""TextWorld's generators share a global random generator."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Game:
    """A compiled game."""

    file: str
    walkthrough: Sequence[str]
    """Commands that win the game."""


def settings_of(name: str) -> tuple[str, dict[str, object]]:
    """Return the challenge and the settings that a name stands for.

    Raises:
        UnknownEnvironment: TextWorld has no such challenge.
        UsageError: The challenge has no such setting.
        DependencyMissing: TextWorld is not installed.
    """
    challenge, _, words = name.partition("-")
    check_known("TextWorld has no challenge", challenge, DEFAULTS)
    settings = _read(challenge, words or DEFAULTS[challenge])
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise DependencyMissing(f"textworld:{name} needs {' and '.join(missing)}", remedy=INSTALL)
    return challenge, settings


def _read(challenge: str, words: str) -> dict[str, object]:
    """Return the settings that words such as `recipe2+cook` stand for."""
    settings = dict(_UPSTREAM[challenge])
    named: set[str] = set()
    for word in words.split("+"):
        check_known(f"TextWorld's {challenge} has no setting", word, _WORDS[challenge], UsageError)
        setting, value = _WORDS[challenge][word]
        if setting in named:
            raise UsageError(f"{words!r} names the setting {setting!r} twice", remedy="name it once")
        named.add(setting)
        settings[setting] = value
    if int(str(settings.get("take", 0))) > int(str(settings.get("recipe", 0))):
        raise UsageError(
            f"{words!r} hides more ingredients than the recipe has",
            remedy="choose a `take` that is not larger than `recipe`",
        )
    return settings


def game_of(name: str, split: str, seed: int) -> Game:
    """Return a game, which is made unless the process has it; games are made one at a time."""
    with _one_at_a_time:
        return _made(name, split, seed)


def started(game: Game) -> Any:
    """Return TextWorld's own environment of a game, before its reset."""
    textworld = _textworld()
    infos = textworld.EnvInfos(
        admissible_commands=True, score=True, max_score=True, won=True, lost=True, feedback=True
    )
    play = textworld.start(game.file, infos)
    play.seed(1)  # of the interpreter; without one it would be the time
    return play


@lru_cache(maxsize=KEPT)
def _made(name: str, split: str, seed: int) -> Game:
    folder = tempfile.mkdtemp(prefix="agentenv-textworld-")
    try:
        return _with_files(folder, *_compiled(folder, name, split, seed))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _with_files(folder: str, file: str, walkthrough: Sequence[str]) -> Game:
    """Return a game with which its folder goes."""
    # `_made` must have no variable with the game, because TextWorld keeps frames of its callers alive.
    game = Game(file, tuple(walkthrough))
    weakref.finalize(game, shutil.rmtree, folder, ignore_errors=True)
    return game


def _compiled(folder: str, name: str, split: str, seed: int) -> tuple[str, Sequence[str]]:
    """Make and compile a game, and return its file and its walkthrough."""
    challenge, settings = settings_of(name)
    seed %= 2**31
    textworld = _textworld()
    options = textworld.GameOptions()
    options.seeds = seed
    options.path = f"{folder}/game.z8"
    textworld.g_rng.set_seed(seed)
    if challenge == "simple":
        settings["test"] = split == "test"
    if challenge == "cooking":
        settings |= {"split": split, "recipe_seed": seed}
    world = textworld.challenges.CHALLENGES[f"tw-{challenge}"][1](settings, options)
    return str(textworld.generator.compile_game(world, options)), world.walkthrough


@lru_cache(maxsize=1)
def _textworld() -> Any:
    importlib.import_module("textworld.challenges")
    # It warns about each game that is none of the classics whose memory it can read.
    interpreter: Any = importlib.import_module("jericho.jericho")
    interpreter.warnings = SimpleNamespace(warn=_say_nothing)
    return importlib.import_module("textworld")


def _say_nothing(*_: object) -> None:
    pass


def _words(setting: str, numbers: Sequence[int]) -> dict[str, tuple[str, object]]:
    return {f"{setting}{number}": (setting, number) for number in numbers}


def _rooms(level: int) -> int:
    """Return how many rooms a level of the coin collector has."""
    return ((level - 1) // 100 + 1) * ((level - 1) % 100 + 1)


_WORDS: Mapping[str, Mapping[str, tuple[str, object]]] = {
    "simple": {
        **{word: ("rewards", word) for word in ("dense", "balanced", "sparse")},
        **{word: ("goal", word) for word in ("detailed", "brief", "none")},
    },
    "coin_collector": _words("level", [level for level in range(1, 301) if _rooms(level) <= MOST_ROOMS]),
    "treasure_hunter": _words("level", range(1, 31)),
    "cooking": {
        **_words("recipe", range(1, 6)),
        **_words("take", range(6)),
        **_words("go", (1, 6, 9, 12)),
        **{word: (word, True) for word in ("open", "cook", "cut", "drop")},
    },
}
"""What each word of a name sets, by challenge."""

_UPSTREAM: Mapping[str, Mapping[str, object]] = {
    "simple": {"rewards": "dense", "goal": "detailed"},
    "coin_collector": {},
    "treasure_hunter": {},
    "cooking": {
        "recipe": 1, "take": 0, "go": 1, "open": False, "cook": False, "cut": False, "drop": False,
    },
}  # fmt: skip
"""Settings that a name leaves out, which are TextWorld's own."""
