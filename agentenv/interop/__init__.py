"""Our trajectories and environments made into things of others: TRL, verl, slime."""

from __future__ import annotations

__all__: list[str] = []
