"""Objects with `reset` and `step` that are no Gymnasium environment, such as GEM's and those of old Gym.

1. `reset` returns an observation, or `(observation, info)`. It gets the seed if it takes one; else the
   object's method `seed` does.
2. `step` returns `(observation, reward, done, info)`, with or without the info, or Gymnasium's five values.
   Its action is the model's text, or the number of an action where the object has a discrete action space.
3. Methods may be asynchronous. Text is shown as it is, any other observation as JSON.
"""

from __future__ import annotations

import re
from typing import Any, cast

from agentenv.core.errors import EnvironmentMisuse
from agentenv.core.fields import wanted_by
from agentenv.envs.env import Env, ResetReturn, StepReturn
from agentenv.envs.spaces import Text
from agentenv.tools.content import to_content

__all__ = ["SteppedObject", "shown"]


class SteppedObject(Env):
    """Plays an object with `reset` and `step`; the module's docstring has the rules."""

    observation_space = Text()
    action_space = Text()

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._actions = getattr(getattr(inner, "action_space", None), "n", None)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetReturn:
        """Start an episode; the task's field `seed` is the object's seed."""
        number = int(str(self.task.get("seed", seed))) % 2**31
        seeded = "seed" in (wanted := wanted_by(self.inner.reset)).names or wanted.takes_rest
        if not seeded and callable(getattr(self.inner, "seed", None)):
            await self._call(self.inner.seed, number)
        value = await self._call(self.inner.reset, **({"seed": number} if seeded else {}))
        is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict)  # pyright: ignore[reportUnknownArgumentType]
        told = shown(cast("Any", value)[0] if is_pair else value)
        if self._actions is not None:
            told += f"\n\nAnswer with the number of an action, from 0 to {self._actions - 1}."
        return told, {}

    async def step(self, action: str) -> StepReturn:
        """Play the text, or the last number that it names."""
        chosen: Any = action
        if self._actions is not None:
            named = [int(digits) for digits in re.findall(r"\d{1,9}", action)]
            if not named or named[-1] >= self._actions:
                told = f"No action understood. Answer with a number from 0 to {self._actions - 1}."
                return told, 0.0, False, False, {"unread_action": True}
            chosen = named[-1]
        value: Any = await self._call(self.inner.step, chosen)
        if not isinstance(value, tuple) or not 3 <= len(cast("tuple[Any, ...]", value)) <= 5:
            raise EnvironmentMisuse(
                f"{type(self.inner).__name__}.step() returned {value!r:.200}",
                remedy="return (observation, reward, terminated, truncated, info), or old Gym's four values",
            )
        observation, reward, done, *rest = cast("tuple[Any, ...]", value)
        info = rest[-1] if rest and isinstance(rest[-1], dict) else {}
        truncated = bool(rest[0]) if len(rest) == 2 else bool(info.get("TimeLimit.truncated"))
        return shown(observation), float(reward), bool(done) and not truncated, truncated, {}

    async def close(self) -> None:
        """Call the object's `close`, if it has one."""
        if callable(close := getattr(self.inner, "close", None)):
            await self._call(close)


def shown(observation: Any) -> str:
    """Return an observation as text: text as it is, anything else as JSON."""
    return observation if isinstance(observation, str) else str(to_content(observation))
