"""Engines: tokens in, exactly the sampled tokens and their log-probabilities out."""

from __future__ import annotations

from agentenv.engine.base import (
    ChatCompletion,
    ChatEngine,
    Completion,
    Engine,
    FinishReason,
    Sampling,
    Usage,
)
from agentenv.engine.factory import LoadedModel, load_engine
from agentenv.engine.mock import MockEngine
from agentenv.engine.scripted import ScriptedEngine, ScriptedRequest, ScriptedTurn

__all__ = [
    "ChatCompletion",
    "ChatEngine",
    "Completion",
    "Engine",
    "FinishReason",
    "LoadedModel",
    "MockEngine",
    "Sampling",
    "ScriptedEngine",
    "ScriptedRequest",
    "ScriptedTurn",
    "Usage",
    "load_engine",
]
