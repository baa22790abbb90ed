"""Text adventures: the same commands through the package's own Python environment, and through ours."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentenv.envs import spec
from agentenv.testing import play
from agentenv_worlds.java import java
from agentenv_worlds.scienceworld.simulator import JAVA_OPTIONS
from agreement import Agreement

JUNK = (
    "look around",
    "inventory",
    "xyzzy",
    "take everything",
    "focus on door",
    "open door",
    "go north",
    "wait1",
)


async def compare(world: str, answers: int, seed: int) -> Agreement:
    """Compare random commands: the package's own solution, some of it left out or replaced."""
    kinds = {"textworld": _textworld, "scienceworld": _science, "textworld_express": _express}
    return await kinds[world](Agreement(world), answers, random.Random(seed))


def _changed(gold: list[str], rng: random.Random) -> list[str]:
    kind = rng.randrange(5)
    if kind == 0:
        return gold
    if kind == 1:
        return gold[: 1 + rng.randrange(len(gold))]
    if kind == 2:
        return [command for command in gold if rng.random() < 0.8] or ["inventory"]
    if kind == 3:
        return [rng.choice(JUNK) if rng.random() < 0.2 else command for command in gold]
    return [rng.choice([*gold, *JUNK]) for _ in range(20)]


async def _played(entry: Any, task: Any, commands: list[str], rng: random.Random) -> Any:
    """Say the commands; the episode is cut after the last one."""
    left = iter(commands)
    cut = replace(entry, limits=replace(entry.limits, max_turns=len(commands)))
    return await play(cut, lambda *_: rng.choice(["", "I go on.\n"]) + next(left), task)


@contextlib.contextmanager
def authors_own(package: str, name: str, **settings: Any) -> Generator[Any]:
    """Yield a package's own environment in Java; close it, and what it leaves open itself."""
    os.environ["PATH"] = f"{Path(str(java())).parent}:{os.environ['PATH']}"
    os.environ["JAVA_TOOL_OPTIONS"] = " ".join(JAVA_OPTIONS)  # constant hash codes, which decide colours
    official: Any = getattr(importlib.import_module(package), name)(envStepLimit=1_000, **settings)
    try:
        yield official
    finally:
        official.close()
        process = official._gateway.java_process
        process.stdin.close()
        process.wait(60)
        if package == "scienceworld":
            official._obj_tree_tempdir.cleanup()


async def _textworld(result: Agreement, answers: int, rng: random.Random) -> Agreement:
    import textworld

    games: Any = importlib.import_module("agentenv_worlds.textworld.games")
    names = ("simple", "coin_collector-level3", "treasure_hunter-level3", "cooking-recipe1+take1+go1")
    for number in range(answers):
        name = names[number % len(names)]
        entry = spec(f"textworld:{name}")
        task = entry.task_set("test").take(20)[rng.randrange(5)]
        game = games.game_of(name, "test", int(str(task.data["seed"])))
        commands = _changed(list(game.walkthrough), rng)[:50]
        played = await _played(entry, task, commands, rng)
        infos = textworld.EnvInfos(score=True, max_score=True, won=True, lost=True)
        env: Any = textworld.start(game.file, infos)
        state = env.reset()
        for command in commands:
            state, _, done = env.step(command)
            if done:
                break
        env.close()
        result.add(int(state["score"]) / int(state["max_score"]), played.reward, (task.id, commands))
    return result


async def _science(result: Agreement, answers: int, rng: random.Random) -> Agreement:
    simulator: Any = importlib.import_module("agentenv_worlds.scienceworld.simulator")
    names = (
        "find-animal",
        "find-plant+easy",
        "boil+easy",
        "power-component",
        "lifespan-longest-lived",
        "chemistry-mix",
    )
    with authors_own("scienceworld", "ScienceWorldEnv") as official:
        # The list of all valid actions takes most of a step's time, and no part in the score.
        official.get_valid_action_object_combinations = list
        for number in range(answers):
            name = names[number % len(names)]
            entry = spec(f"scienceworld:{name}")
            task = rng.choice(list(entry.task_set("test"))[:10])
            variation = int(str(task.data["variation"]))
            gold = list(simulator.gold_of(name, variation))
            commands = _changed(gold, rng)[:200]
            played = await _played(entry, task, commands, rng)
            base, *simple = name.split("+")
            official.load(base, variation, ",".join(simple))
            official.reset()
            score, done = 0.0, False
            for command in commands:
                if done:
                    break
                _, _, done, info = official.step(command)
                score = info["score"]
            result.add(max(score, 0) / 100, played.reward, (task.id, commands))
    return result


async def _express(result: Agreement, answers: int, rng: random.Random) -> Agreement:
    ours: Any = importlib.import_module("agentenv_worlds.textworld_express.env")
    with authors_own("textworld_express", "TextWorldExpressEnv") as official:
        for number in range(answers):
            name = ours.GAMES[number % len(ours.GAMES)]
            fold = rng.choice(list(ours.FOLDS))
            entry = spec(f"textworld_express:{name}")
            task = rng.choice(list(entry.task_set(fold)))
            seed = int(str(task.data["seed"]))
            commands = _changed(list(ours._gold(name, fold, seed)), rng)[:100]
            played = await _played(entry, task, commands, rng)
            _, info = official.reset(seed=seed, gameFold=fold, gameName=name, gameParams="")
            done = False
            for command in commands:
                if done:
                    break
                _, _, done, info = official.step(command)
            result.add(max(float(info["score"]), 0.0), played.reward, (task.id, commands))
    return result
