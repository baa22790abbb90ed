"""Gymnasium's toy texts in words: what the player is told of the lake, the cliff, the town and the cards."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, cast

import gymnasium

from agentenv.envs.adapters import GymnasiumText, GymnasiumView

__all__ = ["BlackjackView", "CliffView", "FrozenLakeView", "GymnasiumGame", "TaxiView"]


class FrozenLakeView(GymnasiumView):
    """Shows the lake as a grid of letters."""

    title = (
        "Walk over a frozen lake from S to G without falling into a hole. "
        "P is you, F is ice, H is a hole, G is the goal."
    )
    names: Mapping[str, Any] = MappingProxyType({"left": 0, "down": 1, "right": 2, "up": 3})

    def begin(self, env: gymnasium.Env[Any, Any]) -> None:
        """Read from the transition table whether the ice is slippery."""
        super().begin(env)
        lake = cast("Any", self.env)
        outcomes = lake.P[int(lake.s)][2]
        self._slippery = len({(state, reward) for _, state, reward, _ in outcomes}) > 1

    @property
    def rules(self) -> str:
        """Text that explains the game, its actions, and whether the ice is slippery."""
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
    """Shows the cliff as a grid of letters."""

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
        """Return the grid, or say that the goal is reached."""
        return "You reached the goal." if terminated else self.describe(observation, info)


class TaxiView(GymnasiumView):
    """Shows the town map of Gymnasium, and the positions of taxi, passenger and destination."""

    title = (
        "Drive a taxi to the passenger, pick them up, drive to the destination and drop them off. "
        "Rows count from the top and columns from the left, from 0; | is a wall."
    )
    names: Mapping[str, Any] = MappingProxyType(
        {"south": 0, "north": 1, "east": 2, "west": 3, "pickup": 4, "dropoff": 5}
    )

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the town map and the three positions."""
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
        """Return the three positions, or say that the ride is over."""
        if terminated:
            return "The passenger has arrived."
        return self.describe(observation, info).rpartition("\n")[2]


class BlackjackView(GymnasiumView):
    """Shows the player's sum and the dealer's card."""

    title = "Play blackjack: come closer to 21 than the dealer, without going over. An ace is 1 or 11."
    names: Mapping[str, Any] = MappingProxyType({"stick": 0, "hit": 1})

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return the player's sum and the dealer's card."""
        total, dealer, ace = observation
        with_ace = ", counting an ace as 11" if ace else ""
        card = "an ace" if int(dealer) == 1 else str(int(dealer))
        return f"Your sum is {int(total)}{with_ace}. The dealer shows {card}."

    def tell(self, observation: Any, info: Mapping[str, Any], terminated: bool) -> str:
        """Return the cards, or say that the game is over."""
        if not terminated:
            return self.describe(observation, info)
        return f"Your sum is {int(observation[0])}. The game is over."


class GymnasiumGame(GymnasiumText):
    """A Gymnasium environment; the toy texts are described in words."""

    games: ClassVar[Mapping[str, type[GymnasiumView]]] = MappingProxyType(
        {
            "FrozenLake": FrozenLakeView,
            "FrozenLake8x8": FrozenLakeView,
            "CliffWalking": CliffView,
            "CliffWalkingSlippery": CliffView,
            "Taxi": TaxiView,
            "Blackjack": BlackjackView,
        }
    )
