"""Grid worlds of MiniGrid and BabyAI in words: `minigrid:BabyAI-GoToLocal-v0`.

1. The player sees what MiniGrid shows an agent: the cells of its partial view that it can see, told by their
   kind, colour and place, and what it carries.
2. Rewards are MiniGrid's: 1 - 0.9 x steps / limit in the step that fulfils the mission, else 0. The part
   `solved` is 1 if the mission was fulfilled.
3. The oracle of BabyAI's levels is BabyAI's own bot. It cannot play those in `WITHOUT_BOT`.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import gymnasium

from agentenv.core import Message, Outcome
from agentenv.envs.adapters import GymnasiumText, GymnasiumView
from agentenv_worlds.turns import turn_of

__all__ = ["MiniGrid", "kind_of", "known", "max_steps", "tasks"]

ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done")
"""Names of MiniGrid's actions, in the order of their numbers."""

WITHOUT_BOT = re.compile(r"Carrying|KeyInBox|OpenDoorsOrderN\dDebug")
"""Levels that BabyAI's bot cannot play: it fails, or opens doors out of order, where that ends the level."""


class MiniGridView(GymnasiumView):
    """Tells what the player sees."""

    title = "You are in a world of rooms. Fulfil your mission with as few actions as you can."
    names: Mapping[str, Any] = MappingProxyType({name: number for number, name in enumerate(ACTIONS)})

    @property
    def rules(self) -> str:
        """Text that explains the world and its actions."""
        return f"{super().rules} `pick up`, `drop` and `toggle` (open, unlock) act on the cell ahead of you."

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the mission, what is seen, and what is carried."""
        carried: Any = getattr(self.env, "carrying", None)
        has = f"You carry a {carried.color} {carried.type}." if carried else "You carry nothing."
        seen = "\n".join(_things(observation["image"])) or "You see nothing but floor."
        return f"Your mission: {observation['mission']}.\n{seen}\n{has}"

    def tell(self, observation: Any, info: Mapping[str, Any], terminated: bool) -> str:
        """Return what is seen, or that the world has ended."""
        return "The world has ended." if terminated else self.describe(observation, info)


def _things(image: Any) -> Iterator[str]:
    """Yield a line for each thing in the view, the nearest ones first."""
    constants: Any = importlib.import_module("minigrid.core.constants")
    width, height, _ = image.shape
    ahead = width // 2  # the column along which the player looks, from its last row
    lines: list[tuple[int, int, str]] = []
    for column in range(width):
        for row in range(height):
            kind, colour, state = (int(part) for part in image[column, row])
            name = constants.IDX_TO_OBJECT[kind]
            side, forward = column - ahead, height - 1 - row
            if name in {"unseen", "empty", "floor", "agent"} or (side, forward) == (0, 0):
                continue
            if name == "wall" and side and forward:
                continue  # walls are told where they are straight ahead or beside the player
            about = ("open ", "closed ", "locked ")[state] if name == "door" else ""
            tint = "" if name == "wall" else f"{constants.IDX_TO_COLOR[colour]} "
            lines.append(
                (abs(side) + forward, side, f"You see a {about}{tint}{name} {_place(side, forward)}.")
            )
    walls = set[str]()
    for _, _, line in sorted(lines):
        direction = re.sub(r"\d+ steps? ", "", line)
        if "see a wall" not in line or direction not in walls:
            yield line
        walls.add(direction)


def _place(side: int, forward: int) -> str:
    parts = [(forward, "ahead"), (-side, "to the left"), (side, "to the right")]
    return " and ".join(f"{n} step{'s' if n > 1 else ''} {where}" for n, where in parts if n > 0)


class MiniGrid(GymnasiumText):
    """A world of MiniGrid."""

    view_type = MiniGridView

    def __init__(self, env: str) -> None:
        known()
        super().__init__(env)
        self._solved = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Start the world of the task's seed."""
        self._solved = False
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the action that the text names."""
        result = super().step(action)
        self._solved = self._solved or result[1] > 0
        return result

    def finish(self, stop_reason: str) -> Outcome:
        """Return whether the mission was fulfilled, beside the rewards of the steps."""
        return Outcome(0.0, {"solved": float(self._solved)})


class WithBot(MiniGrid):
    """A level that BabyAI's bot can play."""

    @staticmethod
    def oracle(messages: Sequence[Message], task: Mapping[str, object], rng: random.Random) -> str:
        """Play what BabyAI's bot plays."""
        plan = _plan(str(task["env"]), int(str(task["seed"])))
        turn = turn_of(messages)
        return plan[turn] if turn < len(plan) else "done"


def kind_of(id: str) -> type[MiniGrid]:
    """Return the environment of an id, which has an oracle if BabyAI's bot can play it."""
    return WithBot if id.startswith("BabyAI") and not WITHOUT_BOT.search(id) else MiniGrid


@lru_cache(maxsize=1)
def known() -> tuple[str, ...]:
    """Return the ids of MiniGrid and BabyAI, which its import registers in Gymnasium."""
    importlib.import_module("minigrid")
    level: Any = importlib.import_module("minigrid.envs.babyai.core.roomgrid_level")
    level.print = _silent  # it would print each mission that it rejects
    return tuple(id for id in gymnasium.registry if id.startswith(("BabyAI-", "MiniGrid-")))


def _silent(*words: object) -> None:
    """Print nothing."""


@lru_cache(maxsize=256)
def max_steps(id: str) -> int:
    """Return after how many actions MiniGrid ends a world; in some levels that depends on the mission."""
    inner: Any = gymnasium.make(id, disable_env_checker=True).unwrapped
    inner.reset(seed=0)
    return max(int(inner.max_steps), 1)


def tasks(id: str, odd: int, number: int) -> dict[str, object]:
    """Return a task of an id; training tasks have even seeds, held-out ones odd seeds."""
    return {"env": id, "seed": 2 * number + odd}


@lru_cache(maxsize=256)
def _plan(id: str, seed: int) -> tuple[str, ...]:
    """Return the actions of BabyAI's bot, which knows the whole world."""
    bots: Any = importlib.import_module("minigrid.utils.baby_ai_bot")
    world = gymnasium.make(id, disable_env_checker=True)
    world.reset(seed=seed % 2**31)
    bot, action, plan, over = bots.BabyAIBot(world.unwrapped), None, list[str](), False
    while not over:
        action = bot.replan(action)
        plan.append(ACTIONS[int(action)])
        _, _, terminated, truncated, _ = world.step(action)
        over = bool(terminated or truncated)
    return tuple(plan)
