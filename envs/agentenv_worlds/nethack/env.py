"""Tasks of the NetHack Learning Environment on NetHack's own screen of text: `nethack:NetHackScore-v0`.

1. The observation is the terminal, 24 lines of 80 characters, without blank lines at its ends.
2. Actions are NLE's, named in words: `north`, `far east`, `eat`, `search`, `more`.
3. Rewards are NLE's, in each step. The seed decides the game, the moon included.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium

from agentenv.envs.adapters import GymnasiumText, GymnasiumView

__all__ = ["IDS", "MAX_STEPS", "NetHack"]

IDS = tuple(
    f"NetHack{task}-v0" for task in ("Score", "Staircase", "StaircasePet", "Oracle", "Gold", "Eat", "Scout")
)
"""NLE's tasks. `NetHackChallenge-v0` is left out, because its rules forbid seeds."""

MAX_STEPS = 5_000
"""Steps after which NLE ends a task."""

_WORDS: Mapping[str, str] = {
    "N": "north",
    "E": "east",
    "S": "south",
    "W": "west",
    "NE": "northeast",
    "SE": "southeast",
    "SW": "southwest",
    "NW": "northwest",
}


class NetHackView(GymnasiumView):
    """Shows the screen."""

    title = "You play NetHack. @ is you. Below the map are your attributes, the level, gold and hit points."

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        bare: Any = env.unwrapped
        self.names = {_name(action): number for number, action in enumerate(bare.actions)}
        super().__init__(env)

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the screen."""
        lines = [bytes(line).decode("latin-1").rstrip() for line in observation["tty_chars"]]
        return "\n".join(lines).strip("\n") or "(The screen is empty.)"


def _name(action: Any) -> str:
    word = _WORDS.get(action.name, action.name.lower())
    return f"far {word}" if type(action).__name__ == "CompassDirectionLonger" else word


class NetHack(GymnasiumText):
    """One game of NetHack."""

    view_type = NetHackView

    def __init__(self, env: str) -> None:
        importlib.import_module("nle")  # registers the ids in Gymnasium
        # All that NLE observes by default: describing the screen draws from NetHack's generator, so that a
        # game observed by less would be another one.
        super().__init__(env, fix_moon_phase=True)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Any]:
        """Start the game of the task's seed."""
        number = int(str(self.task.get("seed", seed))) % 2**31
        bare: Any = self.inner.unwrapped
        bare.seed(core=number, disp=number, reseed=False)
        return super().reset(seed=number, options=options)
