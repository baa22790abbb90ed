"""Tools, environments and aligned rollouts for language-model agents.

What the model sampled is exactly what the trainer sees. Names are loaded when first used, so that
`import agentenv` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "AgentEnvError": "errors",
    "Context": "context",
    "Message": "messages",
    "RunLimits": "limits",
    "SequenceBuilder": "trajectory",
    "StopReason": "trajectory",
    "TokenSequence": "trajectory",
    "TokenSpan": "trajectory",
    "ToolCall": "messages",
    "ToolError": "errors",
    "ToolResult": "messages",
    "Trajectory": "trajectory",
    "TrajectoryGroup": "trajectory",
    "Turn": "trajectory",
}

__all__ = sorted([*_HOME, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'agentenv' has no attribute {name!r}")
    value = getattr(import_module(f"agentenv.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
