"""Text adventures: the same commands through the package's own Python environment, and through ours."""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path
from typing import Any

from agentenv.envs import spec
from agentenv.testing import play
from agentenv_worlds.java import java
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
        return gold[: rng.randrange(len(gold) + 1)]
    if kind == 2:
        return [command for command in gold if rng.random() < 0.8]
    if kind == 3:
        return [rng.choice(JUNK) if rng.random() < 0.2 else command for command in gold]
    return [rng.choice([*gold, *JUNK]) for _ in range(20)]


async def _played(entry: Any, task: Any, commands: list[str], rng: random.Random) -> Any:
    """Say the commands, then stop by a command that changes nothing until the turns are over."""
    left = iter(commands)
    return await play(entry, lambda *_: rng.choice(["", "I go on.\n"]) + next(left, "inventory"), task)


def _end(official: Any) -> None:
    """Close a package's environment, and the pipe to its Java process, which it leaves open."""
    official.close()
    process = official._gateway.java_process
    process.stdin.close()
    process.wait(60)


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
        for command in [*commands, *["inventory"] * 50][:50]:
            state, _, done = env.step(command)
            if done:
                break
        env.close()
        result.add(int(state["score"]) / int(state["max_score"]), played.reward, (task.id, commands))
    return result


async def _science(result: Agreement, answers: int, rng: random.Random) -> Agreement:
    scienceworld: Any = importlib.import_module("scienceworld")
    simulator: Any = importlib.import_module("agentenv_worlds.scienceworld.simulator")
    os.environ["PATH"] = f"{Path(str(java())).parent}:{os.environ['PATH']}"
    official = scienceworld.ScienceWorldEnv("", envStepLimit=1_000)
    names = (
        "find-animal",
        "find-plant+easy",
        "boil+easy",
        "power-component",
        "lifespan-longest-lived",
        "chemistry-mix",
    )
    try:
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
            for command in [*commands, *["inventory"] * 200][:200]:
                if done:
                    break
                _, _, done, info = official.step(command)
                score = info["score"]
            result.add(max(score, 0) / 100, played.reward, (task.id, commands))
    finally:
        _end(official)
    return result


async def _express(result: Agreement, answers: int, rng: random.Random) -> Agreement:
    package: Any = importlib.import_module("textworld_express")
    ours: Any = importlib.import_module("agentenv_worlds.textworld_express.env")
    os.environ["PATH"] = f"{Path(str(java())).parent}:{os.environ['PATH']}"
    official = package.TextWorldExpressEnv(envStepLimit=1_000)
    try:
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
            for command in [*commands, *["inventory"] * 100][:100]:
                if done:
                    break
                _, _, done, info = official.step(command)
            result.add(max(float(info["score"]), 0.0), played.reward, (task.id, commands))
    finally:
        _end(official)
    return result
