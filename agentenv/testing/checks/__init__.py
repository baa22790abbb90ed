"""The checks of an environment, with one module for each topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.testing.checks.cheats import check_cheats as check_cheats
    from agentenv.testing.checks.contract import check_ends as check_ends
    from agentenv.testing.checks.contract import check_gym as check_gym
    from agentenv.testing.checks.contract import check_recipe as check_recipe
    from agentenv.testing.checks.contract import check_schema as check_schema
    from agentenv.testing.checks.inputs import check_fuzz as check_fuzz
    from agentenv.testing.checks.inputs import check_overflow as check_overflow
    from agentenv.testing.checks.runs import check_determinism as check_determinism
    from agentenv.testing.checks.runs import check_isolation as check_isolation
    from agentenv.testing.checks.runs import check_parallel as check_parallel
    from agentenv.testing.checks.runs import check_play as check_play
    from agentenv.testing.checks.runs import check_reuse as check_reuse
    from agentenv.testing.checks.runs import check_runner as check_runner
    from agentenv.testing.checks.runs import check_speed as check_speed
    from agentenv.testing.checks.scores import check_leak as check_leak
    from agentenv.testing.checks.scores import check_oracle as check_oracle
    from agentenv.testing.checks.scores import check_trivial as check_trivial
    from agentenv.testing.checks.subject import Problem as Problem
    from agentenv.testing.checks.subject import Skipped as Skipped
    from agentenv.testing.checks.subject import Subject as Subject

__all__ = door(__name__)
