"""textarena's games score the same moves here and there."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from agentenv.envs import make
from agentenv_worlds.textarena.env import players_of

pytestmark = pytest.mark.slow
arena: Any = pytest.importorskip("textarena", reason="UNTESTED: textarena is not installed")

GAMES = tuple(
    f"{name}-v0"
    for name in [
        "2048",
        "Bandit",
        "Blackjack",
        "Countdown",
        "Crosswords",
        "Cryptarithm",
        "FifteenPuzzle",
        "FrozenLake",
        "GuessTheNumber",
        "LightsOut",
        "LogicPuzzle",
        "Mastermind",
        "Minesweeper",
        "PegJump",
        "RushHour",
        "Secretary",
        "Set",
        "Slitherlink",
        "Sokoban",
        "Sudoku",
        "ThreeCardMonte",
        "TowerOfHanoi",
    ]
)
"""The games for one player that need no data of others."""
JUNK = ("", "I do not know", "[", "]", "[[1]]", "[-1]", "[1e9]", "\n", "[right] [left]", "ü[up]", "[0 0 0 0]")


def moves(game: str, shown: str, rng: random.Random) -> str:
    """Return a move: one that the game names, with or without its brackets, or junk."""
    named = re.findall(r"\[([^\[\]\n]{1,20})\]", shown) or ["1"]
    words = ["up", "down", "left", "right", "1", "10", "0 1 +", "A C", "crane", str(rng.randrange(1, 21))]
    move = rng.choice([*named, *words])
    return rng.choice([f"[{move}]", f"[{move}]", move, f"I play [{move}].", rng.choice(JUNK)])


def official(game: str, seed: int, played: list[str]) -> float:
    """Return the reward as textarena's own loop gives it."""
    outer = random.getstate()
    random.setstate(random.Random(seed).getstate())
    try:
        inner = arena.make(game)
        inner.reset(num_players=1, seed=seed)
        done = False
        for text in played:
            inner.get_observation()
            done, _ = inner.step(action=text)
            if done:
                break
        rewards, _ = inner.close()
        reward = (rewards or {}).get(0, 0.0)
        return float(reward) if done and not isinstance(reward, str) else 0.0
    finally:
        random.setstate(outer)


def play(game: str, seed: int, rng: random.Random) -> tuple[list[str], float, bool]:
    """Play chance moves here; return them, the reward, and whether the game has ended."""
    env = make(f"textarena:{game}")
    shown, _ = env.reset(seed=seed, options={"task": {"seed": seed}})
    played: list[str] = []
    total, over = 0.0, False
    while not over and len(played) < 60:
        played.append(moves(game, str(shown), rng))
        shown, reward, over, _, _ = env.step(played[-1])
        total += float(reward)
    return played, total, over


def agreement(number: int) -> tuple[int, set[str]]:
    """Return how many games that chance moves ended were compared, and which differ."""
    differ, compared = set(), 0
    for game in GAMES:
        for seed in range(number):
            played, ours, over = play(game, seed, random.Random(seed))
            compared += over
            if over and ours != pytest.approx(official(game, seed, played)):
                differ.add(f"{game} with seed {seed}: {ours} and not {official(game, seed, played)}")
    return compared, differ


def test_chance_moves_score_as_in_textarena_itself():
    compared, differ = agreement(2)

    assert compared > len(GAMES)
    assert not differ


@pytest.mark.exhaustive
def test_hundreds_of_games_score_as_in_textarena_itself():
    compared, differ = agreement(40)

    assert compared >= 500
    assert not differ


@pytest.mark.parametrize(("game", "move"), [("FrozenLake-v0", "right"), ("GuessTheNumber-v0", "1")])
def test_a_move_without_brackets_is_read_as_textarena_reads_it(game, move):
    env = make(f"textarena:{game}")
    rewards = []
    for seed in range(30):
        env.reset(seed=seed, options={"task": {"seed": seed}})
        over, last = False, 0.0
        for _ in range(30):
            if over:
                break
            _, last, over, _, _ = env.step(move)
        rewards.append((float(last), official(game, seed, [move] * 30)))

    assert [ours for ours, _ in rewards] == [theirs for _, theirs in rewards]
    assert any(ours for ours, _ in rewards)


def test_a_number_that_python_does_not_read_is_a_wrong_move():
    env = make("textarena:FrozenLake-v0")
    for text in ("9" * 1_000_000, f"[{'9' * 5_000}]"):
        env.reset(seed=1, options={"task": {"seed": 1}})

        assert isinstance(env.step(text)[0], str)


def test_messages_that_are_no_text_are_shown():
    assert players_of("Countdown-v0") == 1
    env = make("textarena:Countdown-v0")
    env.reset(seed=1, options={"task": {"seed": 1}})

    assert isinstance(env.step("[0 1 +]")[0], str)
