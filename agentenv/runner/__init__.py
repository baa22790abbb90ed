"""The runner plays many episodes at once: turns, limits, stop reasons, simulated users and failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.runner.condense import Condenser as Condenser
    from agentenv.runner.condense import DropToolOutputs as DropToolOutputs
    from agentenv.runner.condense import Summarise as Summarise
    from agentenv.runner.condense import View as View
    from agentenv.runner.episode import Episode as Episode
    from agentenv.runner.groups import JobFeed as JobFeed
    from agentenv.runner.options import GroupPolicy as GroupPolicy
    from agentenv.runner.options import RunnerOptions as RunnerOptions
    from agentenv.runner.plan import Job as Job
    from agentenv.runner.runner import Runner as Runner
    from agentenv.runner.stage import Stage as Stage
    from agentenv.runner.users import FunctionUser as FunctionUser
    from agentenv.runner.users import ModelUser as ModelUser
    from agentenv.runner.users import ScriptedUser as ScriptedUser
    from agentenv.runner.users import User as User
    from agentenv.runner.users import UserTurn as UserTurn
    from agentenv.runner.watchdog import Ledger as Ledger
    from agentenv.runner.watchdog import Waiting as Waiting
    from agentenv.runner.watchdog import Watchdog as Watchdog

__all__ = door(__name__)
