"""Crafter in words: `crafter:CrafterReward-v1`.

1. The player sees what Crafter's picture shows: the 9 by 7 cells around it and its inventory, told in words.
2. Rewards are Crafter's: 1 for an achievement that is unlocked for the first time, and a tenth of each change
   of health.
3. The part `achievements` is the share of the 22 achievements that were unlocked, and there is a part for
   each of them. Crafter's published score is the geometric mean of the success rates of the achievements.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import gymnasium

from agentenv.core import Outcome
from agentenv.envs.adapters import GymnasiumText, GymnasiumView

__all__ = ["ID", "LENGTH", "Crafter"]

ID = "CrafterReward-v1"
"""Crafter's own name of the environment with rewards."""

LENGTH = 10_000
"""Steps after which Crafter ends an episode."""

_FACING = {(0, 1): "south", (0, -1): "north", (1, 0): "east", (-1, 0): "west"}


class _CrafterGym(gymnasium.Env[Any, Any]):
    """Crafter's environment in Gymnasium's form; it was written for Gym."""

    def __init__(self) -> None:
        self._package: Any = importlib.import_module("crafter")
        self.action_space = gymnasium.spaces.Discrete(len(self._package.constants.actions))
        self.inner: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Make the world of a seed."""
        self.inner = self._package.Env(length=LENGTH, seed=seed)
        self.inner._world.__class__ = _ordered(self._package.engine.World)  # noqa: SLF001
        return self.inner.reset(), {}

    def step(self, action: Any) -> Any:
        """Play an action."""
        seen, reward, over, info = self.inner.step(action)
        dead = over and info["discount"] == 0.0
        return seen, float(reward), dead, over and not dead, info


def _ordered(world: type[Any]) -> type[Any]:
    """Return a world whose chunks list their objects in a fixed order.

    Crafter keeps them in sets, which are ordered by addresses in memory, and draws from them by number, so
    that an episode could not be played again.
    """

    class OrderedWorld(world):
        @property
        def chunks(self) -> Any:
            places = {id(thing): number for number, thing in enumerate(self._objects)}
            return {
                key: sorted(things, key=lambda thing: places[id(thing)])
                for key, things in self._chunks.items()
            }

    return OrderedWorld


class CrafterView(GymnasiumView):
    """Tells what the picture shows."""

    title = (
        "You survive in a world of grass, trees, stone, water and monsters. Collect, build and fight to "
        "unlock achievements; eat, drink and sleep to stay alive. `do` acts on what you face."
    )

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        actions = importlib.import_module("crafter").constants.actions
        self.names: Mapping[str, Any] = MappingProxyType(
            {name.replace("_", " "): number for number, name in enumerate(actions)}
        )
        super().__init__(env)

    @property
    def rules(self) -> str:
        """Text that explains the world, what things need, and the actions."""
        data: Any = importlib.import_module("crafter").constants
        needs = [
            f"{kind.replace('_', ' ')}: {_needs(entry)}"
            for group in (data.make, data.place)
            for kind, entry in group.items()
        ]
        return f"{super().rules}\nWhat things need: {'; '.join(needs)}."

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return what is around the player, and its inventory."""
        crafter: Any = getattr(self.env, "inner", None)
        player = crafter._player  # noqa: SLF001 - what the picture is drawn from has no public name
        near = dict[str, tuple[int, str]]()
        columns, rows = (int(size) // 2 for size in crafter._local_view._grid)  # noqa: SLF001
        for right in range(-columns, columns + 1):
            for down in range(-rows, rows + 1):
                material, thing = crafter._world[player.pos[0] + right, player.pos[1] + down]  # noqa: SLF001
                name = type(thing).__name__.lower() if thing is not None else material
                distance = abs(right) + abs(down)
                if name and distance and distance < near.get(name, (99, ""))[0]:
                    near[name] = distance, _where(right, down)
        material, thing = crafter._world[player.pos + player.facing]  # noqa: SLF001
        ahead = type(thing).__name__.lower() if thing is not None else material or "the end of the world"
        seen = "; ".join(f"{name} {where}" for name, (_, where) in sorted(near.items(), key=lambda n: n[1]))
        held = ", ".join(f"{name} {count}" for name, count in player.inventory.items() if count)
        asleep = " You are asleep." if player.sleeping else ""
        facing = _FACING[int(player.facing[0]), int(player.facing[1])]
        return f"You face {ahead} to the {facing}.{asleep}\nNearest: {seen}.\nYou have: {held}."


def _needs(entry: Mapping[str, Any]) -> str:
    uses = [f"{count} {name}" for name, count in entry["uses"].items()]
    near = [f"a {name} nearby" for name in entry.get("nearby", ())]
    return " and ".join([*uses, *near])


def _where(right: int, down: int) -> str:
    parts = [(-down, "north"), (down, "south"), (-right, "west"), (right, "east")]
    return " and ".join(f"{steps} {way}" for steps, way in parts if steps > 0)


class Crafter(GymnasiumText):
    """One life in Crafter."""

    view_type = CrafterView

    def __init__(self) -> None:
        super().__init__(_CrafterGym())

    def finish(self, stop_reason: str) -> Outcome:
        """Return which achievements were unlocked, beside the rewards of the steps."""
        bare: Any = self.inner.unwrapped
        unlocked: Mapping[str, int] = bare.inner._player.achievements  # noqa: SLF001
        parts = {name: float(count > 0) for name, count in sorted(unlocked.items())}
        return Outcome(0.0, {"achievements": sum(parts.values()) / len(parts), **parts})
