"""Games and grid worlds: the same moves in the package's own environment, and in ours."""

from __future__ import annotations

import importlib
import random
import re
import warnings
from dataclasses import replace
from typing import Any

import gymnasium

from agentenv.envs import spec
from agentenv.testing import play
from agreement import Agreement

ARENA = (
    *("Bandit-v0", "Blackjack-v0", "FrozenLake-v0", "GuessTheNumber-v0", "LightsOut-v0", "Minesweeper-v0"),
    *("Mastermind-v0", "TowerOfHanoi-v0", "PegJump-v0", "FifteenPuzzle-v0", "Sudoku-v0", "2048-v0"),
    *("Countdown-v0", "Crosswords-v0", "Cryptarithm-v0", "LogicPuzzle-v0", "RushHour-v0", "Secretary-v0"),
    *("Set-v0", "Slitherlink-v0", "Sokoban-v0", "ThreeCardMonte-v0"),
)
SMALL = "GoTo(Local|Obj-|RedBall)|PickupLoc|PickupDist|PutNextLocal|OpenDoor|UnlockLocal|Empty|DoorKey-[56]|LavaGap|Fetch-5"
"""Worlds of MiniGrid that end after a few hundred actions at most."""
WORDS = (
    "up",
    "down",
    "left",
    "right",
    "1",
    "10",
    "0 1",
    "A C",
    "hit",
    "stand",
    "red",
    "",
    "[",
    "ü",
    "no idea",
)


async def compare(world: str, answers: int, seed: int) -> Agreement:
    """Compare random games."""
    games = {
        "textarena": _arena,
        "pettingzoo": _zoo,
        "minigrid": _minigrid,
        "crafter": _crafter,
        "nethack": _nethack,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return await games[world](Agreement(world), answers, random.Random(seed))


async def _arena(result: Agreement, answers: int, rng: random.Random) -> Agreement:
    """Games for one player that chance moves end; one that the game's code breaks off has no official score."""
    arena: Any = importlib.import_module("textarena")
    known = importlib.import_module("agentenv_worlds.textarena.env").games()
    games = [game for game in ARENA if game in known]
    for number in range(answers):
        game, seed = games[number % len(games)], rng.randrange(1_000)
        entry = spec(f"textarena:{game}")
        said: list[str] = []

        def policy(messages: Any, task: Any, _: Any, said: list[str] = said) -> str:
            named = re.findall(r"\[([^\[\]\n]{1,20})\]", str(messages[-1]["content"])) or ["1"]
            move = rng.choice([*named, *WORDS])
            said.append(rng.choice([f"[{move}]", f"[{move}]", move, f"I play [{move}]."]))
            return said[-1]

        played = await play(entry, policy, {"seed": seed})
        if played.stop_reason != "env_terminated":
            continue
        outer = random.getstate()
        random.setstate(random.Random(seed).getstate())
        try:
            inner = arena.make(game)
            inner.reset(num_players=1, seed=seed)
            for text in said:
                inner.get_observation()
                if inner.step(action=text)[0]:
                    break
            rewards, _ = inner.close()
        finally:
            random.setstate(outer)
        there = (rewards or {}).get(0, 0.0)
        result.add(0.0 if isinstance(there, str) else float(there), played.reward, (game, seed, said[-3:]))
    return result


async def _zoo(result: Agreement, answers: int, rng: random.Random) -> Agreement:
    """Both seats play legal moves of chance. Illegal ones, for which ours takes the stake, are left out."""
    ours: Any = importlib.import_module("agentenv_worlds.pettingzoo.env")
    for number in range(answers):
        game = list(ours.GAMES)[number % len(ours.GAMES)]
        env: Any = ours.PettingZoo(game)
        seed = rng.randrange(10_000)
        env.start({}, seed)
        inner = ours._module(game).env()
        inner.reset(seed=seed)
        total = dict.fromkeys(env.seats, 0.0)
        while (seat := env.turn()) is not None:
            choice = rng.choice(list(env.choices(seat)))
            env.act(seat, f"I play {choice}.")
            seen = inner.observe(inner.agent_selection)
            names = ours.GAMES[game].actions
            action = names.index(choice)
            assert not isinstance(seen, dict) or seen["action_mask"][action]
            inner.step(action)
            for agent, reward in inner.rewards.items():
                total[agent] += float(reward)
        for seat in env.seats:
            result.add(total[seat], env.rewards()[seat], (game, seed, seat))
    return result


async def _same(
    result: Agreement, name: str, seed: int, official: Any, names: list[str], rng: random.Random, turns: int
) -> None:
    """Play chance actions here and there, for some turns at most, and compare the sums of the rewards."""
    said: list[str] = []
    entry = spec(name)
    entry = replace(entry, limits=replace(entry.limits, max_turns=turns))

    def policy(*_: Any) -> str:
        said.append(rng.choice(names) if rng.random() < 0.95 else "no action at all")
        return said[-1] if len(said) > 1 else f"I will {said[-1]}"

    played = await play(entry, policy, {"seed": seed})
    official.reset(seed)
    there, over = 0.0, False
    for text in said:
        action = names.index(text) if text in names else None
        if action is None or over:
            continue
        reward, over = official.step(action)
        there += reward
    result.add(there, played.reward, (name, seed, len(said)))


class _Gymnasium:
    def __init__(self, env: Any, prepare: Any = lambda env, seed: None) -> None:
        self.env, self.prepare = env, prepare

    def reset(self, seed: int) -> None:
        self.prepare(self.env, seed)
        self.env.reset(seed=seed)

    def step(self, action: int) -> tuple[float, bool]:
        _, reward, terminated, truncated, _ = self.env.step(action)
        return float(reward), bool(terminated or truncated)


async def _minigrid(result: Agreement, answers: int, rng: random.Random) -> Agreement:
    """Half of the worlds are played by BabyAI's bot with some chance actions, half by chance."""
    ours: Any = importlib.import_module("agentenv_worlds.minigrid.env")
    ids = [id for id in ours.known() if re.search(SMALL, id)]
    for _ in range(answers):
        id, seed = rng.choice(ids), rng.randrange(10_000)
        entry = spec(f"gymnasium:{id}")
        plan = list(ours._plan(id, seed)) if ours.kind_of(id) is ours.WithBot and rng.random() < 0.7 else []
        if plan and rng.random() < 0.3:
            plan[rng.randrange(len(plan))] = rng.choice(ours.ACTIONS)
        said: list[str] = []

        def policy(*_: Any, plan: list[str] = plan, said: list[str] = said) -> str:
            said.append(plan[len(said)] if len(said) < len(plan) else rng.choice([*ours.ACTIONS, "what?"]))
            return said[-1]

        played = await play(entry, policy, {"seed": seed, "env": id})
        inner = gymnasium.make(id, disable_env_checker=True)
        inner.reset(seed=seed)
        there = 0.0
        for text in said:
            if text in ours.ACTIONS:
                _, reward, terminated, truncated, _ = inner.step(ours.ACTIONS.index(text))
                there += float(reward)
                if terminated or truncated:
                    break
        result.add(there, played.reward, (id, seed, len(said)))
    return result


async def _crafter(result: Agreement, answers: int, rng: random.Random) -> Agreement:
    """Chance actions, up to death in the long games. The order of Crafter's own sets is by chance, so ours plays first, in its world."""
    crafter: Any = importlib.import_module("crafter")
    names = [name.replace("_", " ") for name in crafter.constants.actions]
    from agentenv_worlds.crafter.env import _ordered

    for _ in range(answers):
        seed = rng.randrange(10_000)

        class Official:
            def reset(self, seed: int) -> None:
                self.env = crafter.Env(length=10_000, seed=seed)
                self.env._world.__class__ = _ordered(crafter.engine.World)
                self.env.reset()

            def step(self, action: int) -> tuple[float, bool]:
                _, reward, over, _ = self.env.step(action)
                return float(reward), bool(over)

        await _same(
            result, "crafter:CrafterReward-v1", seed, Official(), names, rng, rng.choice([50, 100, 400])
        )
    return result


async def _nethack(result: Agreement, answers: int, rng: random.Random) -> Agreement:
    """Chance actions until death or NLE's limit of steps."""
    ours: Any = importlib.import_module("agentenv_worlds.nethack.env")
    importlib.import_module("nle")
    for number in range(answers):
        id = ours.IDS[number % len(ours.IDS)]
        inner = gymnasium.make(id, disable_env_checker=True, fix_moon_phase=True)
        names = [ours._name(action) for action in inner.unwrapped.actions]

        def prepare(env: Any, seed: int) -> None:
            env.unwrapped.seed(core=seed, disp=seed, reseed=False)

        official = _Gymnasium(inner, prepare)
        await _same(result, f"nethack:{id}", rng.randrange(10_000), official, names, rng, ours.MAX_STEPS)
        inner.close()
    return result
