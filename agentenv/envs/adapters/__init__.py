"""Adapters that play environments of other libraries without rewriting them.

| module | what it adapts |
|---|---|
| `gym` | Gymnasium environments that use text, or have few actions and a readable state |
| `trl` | classes with `reset` and tool methods, as TRL's `environment_factory` takes them |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.envs.adapters.adapt import adapt as adapt
    from agentenv.envs.adapters.gym import GymnasiumText as GymnasiumText
    from agentenv.envs.adapters.gym import GymnasiumView as GymnasiumView
    from agentenv.envs.adapters.trl import ToolMethods as ToolMethods
    from agentenv.envs.adapters.trl import tool_env as tool_env

__all__ = door(__name__)
