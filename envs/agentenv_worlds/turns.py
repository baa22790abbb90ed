"""Tasks of games for several players: each game once for each seat or agent."""

from __future__ import annotations

from agentenv.envs import held_out_seeds, train_seeds

__all__ = ["held_out_agents", "held_out_seats", "train_agents", "train_seats"]


def train_seats(players: int, seed: int) -> dict[str, object]:
    """Return the training task of a seed in a game for several players, each game once for each seat."""
    return {**train_seeds(seed // players), "seat": f"player-{seed % players}"}


def held_out_seats(players: int, seed: int) -> dict[str, object]:
    """Return the held-out task of a seed in a game for several players."""
    return {**held_out_seeds(seed // players), "seat": f"player-{seed % players}"}


def train_agents(agents: tuple[str, ...], seed: int) -> dict[str, object]:
    """Return the training task of a seed in a game for named agents, each game once for each of them."""
    return {**train_seeds(seed // len(agents)), "seat": agents[seed % len(agents)]}


def held_out_agents(agents: tuple[str, ...], seed: int) -> dict[str, object]:
    """Return the held-out task of a seed in a game for named agents."""
    return {**held_out_seeds(seed // len(agents)), "seat": agents[seed % len(agents)]}
