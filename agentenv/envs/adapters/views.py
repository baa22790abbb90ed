"""How a Gymnasium environment looks in words, and how words become its actions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import gymnasium

from agentenv.core.errors import UsageError

__all__ = ["GymnasiumView", "view_of"]


class GymnasiumView:
    """Words for an environment with a few named actions; the base shows numbers.

    Raises:
        UsageError: The environment's actions cannot be named.
    """

    title = "You play a game."
    names: Mapping[str, Any] = MappingProxyType({})
    """Action by its word, in lower case."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env.unwrapped
        if not self.names:
            space = env.action_space
            if not isinstance(space, gymnasium.spaces.Discrete):
                raise UsageError(
                    f"{env.spec.id if env.spec else env} has the actions {space}; "
                    "only text and a small number of discrete actions can be played in text"
                )
            first = int(space.start)
            self.names = {str(first + number): first + number for number in range(int(space.n))}
        words = "|".join(sorted(map(re.escape, self.names), key=len, reverse=True))
        self._pattern = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE)

    @property
    def rules(self) -> str:
        """What the game is and which actions there are."""
        return f"{self.title} Answer with one of: {', '.join(self.names)}."

    def begin(self, env: gymnasium.Env[Any, Any]) -> None:
        """Look at the environment after a reset."""
        self.env = env.unwrapped

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the state in words."""
        return f"State: {observation}"

    def tell(self, observation: Any, info: Mapping[str, Any], terminated: bool) -> str:
        """Return what a step led to."""
        return self.describe(observation, info)

    def read(self, text: str) -> Any | None:
        """Return the last action that a text names; None if it names none."""
        found = self._pattern.findall(text)
        return self.names[found[-1].lower()] if found else None

    def unread(self) -> str:
        """Return what a message without an action is answered."""
        return f"No action understood. Answer with one of: {', '.join(self.names)}."


class TextView(GymnasiumView):
    """An environment whose actions and observations are text already."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env.unwrapped

    @property
    def rules(self) -> str:
        """Nothing: the environment speaks for itself."""
        return ""

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the observation as it is."""
        return str(observation)

    def read(self, text: str) -> str:
        """Return the text as it is."""
        return text


class FrozenLakeView(GymnasiumView):
    """The lake as a grid of letters."""

    title = (
        "Walk over a frozen lake from S to G without falling into a hole. "
        "P is you, F is ice, H is a hole, G is the goal."
    )
    names: Mapping[str, Any] = MappingProxyType({"left": 0, "down": 1, "right": 2, "up": 3})

    def begin(self, env: gymnasium.Env[Any, Any]) -> None:
        """Say whether the ice is slippery, which the transition table tells."""
        super().begin(env)
        lake = cast("Any", self.env)
        outcomes = lake.P[int(lake.s)][2]
        self._slippery = len({(state, reward) for _, state, reward, _ in outcomes}) > 1

    @property
    def rules(self) -> str:
        """The game, its actions, and what the ice does."""
        slips = " The ice is slippery: you may slide sideways." if self._slippery else ""
        return super().rules + slips

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the grid with the player in it."""
        lake = cast("Any", self.env)
        rows = [[tile.decode() for tile in row] for row in lake.desc]
        row, column = divmod(int(observation), int(lake.ncol))
        rows[row][column] = "P"
        return "\n".join(" ".join(tiles) for tiles in rows)

    def tell(self, observation: Any, info: Mapping[str, Any], terminated: bool) -> str:
        """Return the grid, or how the walk ended."""
        if not terminated:
            return self.describe(observation, info)
        lake = cast("Any", self.env)
        row, column = divmod(int(observation), int(lake.ncol))
        return "You reached the goal." if lake.desc[row][column] == b"G" else "You fell into a hole."


class CliffView(GymnasiumView):
    """The cliff as a grid of letters."""

    title = (
        "Walk along a cliff from the lower left corner to G in the lower right one. "
        "P is you, C is the cliff: stepping there costs 100 and puts you back. Each step costs 1."
    )
    names: Mapping[str, Any] = MappingProxyType({"up": 0, "right": 1, "down": 2, "left": 3})

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the grid with the player in it."""
        cliff = cast("Any", self.env)
        height, width = cliff.shape
        rows = [["."] * width for _ in range(height)]
        rows[-1][1 : width - 1] = ["C"] * (width - 2)
        rows[-1][-1] = "G"
        row, column = divmod(int(observation), width)
        rows[row][column] = "P"
        return "\n".join(" ".join(tiles) for tiles in rows)

    def tell(self, observation: Any, info: Mapping[str, Any], terminated: bool) -> str:
        """Return the grid, or that the goal is reached."""
        return "You reached the goal." if terminated else self.describe(observation, info)


class TaxiView(GymnasiumView):
    """The town as Gymnasium draws it, and where everybody is."""

    title = (
        "Drive a taxi to the passenger, pick them up, drive to the destination and drop them off. "
        "Rows count from the top and columns from the left, from 0; | is a wall."
    )
    names: Mapping[str, Any] = MappingProxyType(
        {"south": 0, "north": 1, "east": 2, "west": 3, "pickup": 4, "dropoff": 5}
    )

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the town map and the three places."""
        taxi = cast("Any", self.env)
        row, column, passenger, destination = taxi.decode(int(observation))
        places = {index: f"{name} {taxi.locs[index]}" for index, name in enumerate("RGYB")}
        town = "\n".join("".join(tile.decode() for tile in line) for line in taxi.desc)
        return (
            f"{town}\nTaxi: row {row}, column {column}. "
            f"Passenger: {places.get(int(passenger), 'in the taxi')}. "
            f"Destination: {places[int(destination)]}."
        )

    def tell(self, observation: Any, info: Mapping[str, Any], terminated: bool) -> str:
        """Return where everybody is, or that the ride is over."""
        if terminated:
            return "The passenger has arrived."
        return self.describe(observation, info).rpartition("\n")[2]


class BlackjackView(GymnasiumView):
    """The cards on the table."""

    title = "Play blackjack: come closer to 21 than the dealer, without going over. An ace is 1 or 11."
    names: Mapping[str, Any] = MappingProxyType({"stick": 0, "hit": 1})

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the player's sum and the dealer's card."""
        total, dealer, ace = observation
        with_ace = ", counting an ace as 11" if ace else ""
        card = "an ace" if int(dealer) == 1 else str(int(dealer))
        return f"Your sum is {int(total)}{with_ace}. The dealer shows {card}."

    def tell(self, observation: Any, info: Mapping[str, Any], terminated: bool) -> str:
        """Return the cards, or that the game is over."""
        if not terminated:
            return self.describe(observation, info)
        return f"Your sum is {int(observation[0])}. The game is over."


_VIEWS: Mapping[str, type[GymnasiumView]] = {
    "FrozenLake": FrozenLakeView,
    "FrozenLake8x8": FrozenLakeView,
    "CliffWalking": CliffView,
    "CliffWalkingSlippery": CliffView,
    "Taxi": TaxiView,
    "Blackjack": BlackjackView,
}


def view_of(env: gymnasium.Env[Any, Any]) -> GymnasiumView:
    """Return the words for an environment.

    Raises:
        UsageError: It cannot be played in text.
    """
    from agentenv.envs.spaces import Text

    text = (gymnasium.spaces.Text, Text)
    if isinstance(env.action_space, text) and isinstance(env.observation_space, text):
        return TextView(env)
    name = env.spec.name if env.spec is not None else ""
    return _VIEWS.get(name, GymnasiumView)(env)
