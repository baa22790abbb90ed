"""Environments: base classes for authors, the registry, task sets, rewards and adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.envs import spaces as spaces
    from agentenv.envs.agent_env import AgentEnv as AgentEnv
    from agentenv.envs.agent_process import AgentFailed as AgentFailed
    from agentenv.envs.env import Env as Env
    from agentenv.envs.front import Front as Front
    from agentenv.envs.multi_env import MultiEnv as MultiEnv
    from agentenv.envs.multi_env import for_each_seat as for_each_seat
    from agentenv.envs.opponents import Move as Move
    from agentenv.envs.opponents import OpponentLike as OpponentLike
    from agentenv.envs.registry import EnvRegistry as EnvRegistry
    from agentenv.envs.registry import make as make
    from agentenv.envs.registry import register as register
    from agentenv.envs.registry import registry as registry
    from agentenv.envs.registry import spec as spec
    from agentenv.envs.snapshots import Snapshot as Snapshot
    from agentenv.envs.spaces import Action as Action
    from agentenv.envs.spaces import Chat as Chat
    from agentenv.envs.spaces import Text as Text
    from agentenv.envs.spec import EnvSpec as EnvSpec
    from agentenv.envs.tasks import TaskSet as TaskSet
    from agentenv.envs.tasks import held_out_seeds as held_out_seeds
    from agentenv.envs.tasks import train_seeds as train_seeds
    from agentenv.envs.tool_env import ToolEnv as ToolEnv
    from agentenv.envs.worlds import World as World
    from agentenv.envs.worlds import WorldFacts as WorldFacts
    from agentenv.envs.worlds import world_registry as world_registry

__all__ = door(__name__)
