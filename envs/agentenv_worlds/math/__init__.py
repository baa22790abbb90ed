"""Questions of mathematics in a file of JSON lines: `math:FILE`."""

from __future__ import annotations

from pathlib import Path

from agentenv.core import DependencyMissing, install_line
from agentenv.envs import EnvSpec, World, WorldFacts

__all__ = ["WORLD", "spec_of"]


def spec_of(file: str) -> EnvSpec:
    """Return the specification of a name after the colon."""
    from agentenv_worlds.math.env import MathQuestions, rows

    DependencyMissing.require("math_verify", extra="math", purpose=f"math:{file}")
    tasks = rows(file)
    name = "".join(char if char.isalnum() else "-" for char in Path(file).stem).strip("-")
    return EnvSpec.of(
        f"math/{name or 'file'}-v0",
        MathQuestions,
        tasks=tasks,
        description=f"questions of mathematics in {Path(file).name}",
    )


WORLD = World(
    spec_of,
    "FILE",
    ("math_verify",),
    install_line("math"),
    "questions of mathematics in a file of JSON lines, scored by math-verify",
    facts=WorldFacts(
        licence="Apache-2.0",
        tasks="those of the file",
        oracle="every task",
        episode="one comparison by math-verify",
    ),
)
