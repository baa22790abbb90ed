"""Models behind the Tinker API: Thinking Machines' service, SkyRL, and other servers that speak it.

`TINKER` stands in the entry-point group `agentenv.engines` under the name `tinker`: an engine, and a learner
whose weights and optimiser are at the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core import door

if TYPE_CHECKING:
    from agentenv_tinker.engine import TINKER as TINKER
    from agentenv_tinker.engine import TinkerEngine as TinkerEngine
    from agentenv_tinker.learner import TinkerLearner as TinkerLearner
    from agentenv_tinker.probe import Traits as Traits
    from agentenv_tinker.probe import probe as probe
    from agentenv_tinker.service import Service as Service
    from agentenv_tinker.service import Spent as Spent

__all__ = door(__name__)
