"""Where code that a model wrote runs.

`create` returns a sandbox; the default needs no account, no daemon and no privileges. The isolation
is that of a container, not of a virtual machine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentenv.sandbox.base import ExecResult, Sandbox, SandboxLimits, Session, create
    from agentenv.sandbox.doctor import doctor

_HOME = {
    "ExecResult": "base",
    "Sandbox": "base",
    "SandboxLimits": "base",
    "Session": "base",
    "create": "base",
    "doctor": "doctor",
}

__all__ = ["ExecResult", "Sandbox", "SandboxLimits", "Session", "create", "doctor"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'agentenv.sandbox' has no attribute {name!r}")
    value = getattr(import_module(f"agentenv.sandbox.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
