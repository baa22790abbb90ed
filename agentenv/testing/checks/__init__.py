"""The checks of an environment, in the order of the report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from agentenv.testing.checks.contract import check_ends, check_gym, check_recipe, check_schema
from agentenv.testing.checks.inputs import check_fuzz, check_overflow
from agentenv.testing.checks.runs import (
    check_determinism,
    check_isolation,
    check_parallel,
    check_runner,
    check_speed,
)
from agentenv.testing.checks.scores import check_leak, check_oracle, check_trivial
from agentenv.testing.checks.subject import Problem, Skipped, Subject

__all__ = ["CHECKS", "Problem", "Skipped", "Subject"]

CHECKS: Mapping[str, Callable[[Subject], Awaitable[str]]] = {
    "recipe": check_recipe,
    "schema": check_schema,
    "determinism": check_determinism,
    "oracle": check_oracle,
    "trivial": check_trivial,
    "gym": check_gym,
    "ends": check_ends,
    "fuzz": check_fuzz,
    "isolation": check_isolation,
    "parallel": check_parallel,
    "overflow": check_overflow,
    "leak": check_leak,
    "runner": check_runner,
    "speed": check_speed,
}
"""Check by name; the first line of a check's text says what it holds."""
