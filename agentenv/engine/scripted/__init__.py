"""Engines without a model: scripted turns for tests, recorded turns, policies, and `mock`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.engine.scripted.mock import MockEngine as MockEngine
    from agentenv.engine.scripted.policy import PolicyEngine as PolicyEngine
    from agentenv.engine.scripted.replayed import ChatReplayEngine as ChatReplayEngine
    from agentenv.engine.scripted.replayed import ReplayEngine as ReplayEngine
    from agentenv.engine.scripted.scripted import ScriptedEngine as ScriptedEngine
    from agentenv.engine.scripted.scripted import ScriptedPolicy as ScriptedPolicy
    from agentenv.engine.scripted.scripted import ScriptedRequest as ScriptedRequest
    from agentenv.engine.scripted.scripted import ScriptedTurn as ScriptedTurn

__all__ = door(__name__)
