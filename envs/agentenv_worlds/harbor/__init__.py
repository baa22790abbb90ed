"""Tasks in Harbor's format, such as Terminal-Bench, in containers: `harbor:FOLDER`."""

from __future__ import annotations

from pathlib import Path

from agentenv.envs import EnvSpec, World

__all__ = ["WORLD", "spec_of"]


def spec_of(folder: str) -> EnvSpec:
    """Return the specification of a folder of tasks."""
    from agentenv_worlds.harbor.env import MAX_TURNS, make, splits

    path = Path(folder).expanduser()
    name = "".join(char if char.isalnum() else "-" for char in path.resolve().name).strip("-")
    return EnvSpec.of(
        f"harbor/{name or 'tasks'}-v0",
        make,
        tasks=splits(path),
        kwargs={"folder": str(path.resolve())},
        max_turns=MAX_TURNS,
        description=f"tasks in Harbor's format of {path.name}, each in its container",
    )


WORLD = World(
    spec_of, "FOLDER", description="tasks in Harbor's format, such as Terminal-Bench, in containers"
)
