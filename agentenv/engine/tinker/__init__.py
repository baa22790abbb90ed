"""Models behind the Tinker API: Thinking Machines' service, SkyRL, and other servers that speak it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.engine.tinker.engine import TinkerEngine as TinkerEngine
    from agentenv.engine.tinker.service import Service as Service
    from agentenv.engine.tinker.service import Spent as Spent

__all__ = door(__name__)
