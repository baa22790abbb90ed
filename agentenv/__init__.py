"""Tools, environments and aligned rollouts for language-model agents.

What the model sampled is exactly what the trainer sees. Names are loaded when first used, so that
`import agentenv` costs next to nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from agentenv import gym_hook

if TYPE_CHECKING:
    from agentenv.context import Context as Context
    from agentenv.engine.base import Sampling as Sampling
    from agentenv.engine.factory import load_engine as load_engine
    from agentenv.env import Env as Env
    from agentenv.envspec import EnvSpec as EnvSpec
    from agentenv.errors import AgentEnvError as AgentEnvError
    from agentenv.errors import ToolError as ToolError
    from agentenv.evaluation import evaluate as evaluate
    from agentenv.evaluation import rollout as rollout
    from agentenv.groups import GroupPolicy as GroupPolicy
    from agentenv.judge import Judge as Judge
    from agentenv.limits import RunLimits as RunLimits
    from agentenv.messages import Message as Message
    from agentenv.messages import ToolCall as ToolCall
    from agentenv.messages import ToolResult as ToolResult
    from agentenv.registry import make as make
    from agentenv.registry import register as register
    from agentenv.registry import registry as registry
    from agentenv.registry import spec as spec
    from agentenv.render import Renderer as Renderer
    from agentenv.replay import replay_episode as replay_episode
    from agentenv.rewards import Reward as Reward
    from agentenv.runner import Runner as Runner
    from agentenv.scoring import GroupReward as GroupReward
    from agentenv.store import find_run as find_run
    from agentenv.tasks import Task as Task
    from agentenv.tasks import TaskSet as TaskSet
    from agentenv.tool import Tool as Tool
    from agentenv.tool import Toolbox as Toolbox
    from agentenv.tool import tool as tool
    from agentenv.toolenv import ToolEnv as ToolEnv
    from agentenv.trajectory import SequenceBuilder as SequenceBuilder
    from agentenv.trajectory import StopReason as StopReason
    from agentenv.trajectory import TokenSequence as TokenSequence
    from agentenv.trajectory import TokenSpan as TokenSpan
    from agentenv.trajectory import Trajectory as Trajectory
    from agentenv.trajectory import TrajectoryGroup as TrajectoryGroup
    from agentenv.trajectory import Turn as Turn
    from agentenv.users import ModelUser as ModelUser
    from agentenv.users import ScriptedUser as ScriptedUser
    from agentenv.users import User as User
    from agentenv.users import UserTurn as UserTurn

__version__ = "0.1.0"

_HOME = {
    "AgentEnvError": "errors",
    "Context": "context",
    "Env": "env",
    "EnvSpec": "envspec",
    "GroupPolicy": "groups",
    "GroupReward": "scoring",
    "Judge": "judge",
    "Message": "messages",
    "ModelUser": "users",
    "Renderer": "render",
    "Reward": "rewards",
    "RunLimits": "limits",
    "Runner": "runner",
    "Sampling": "engine.base",
    "ScriptedUser": "users",
    "SequenceBuilder": "trajectory",
    "StopReason": "trajectory",
    "Task": "tasks",
    "TaskSet": "tasks",
    "TokenSequence": "trajectory",
    "TokenSpan": "trajectory",
    "Tool": "tool",
    "ToolCall": "messages",
    "ToolEnv": "toolenv",
    "ToolError": "errors",
    "ToolResult": "messages",
    "Toolbox": "tool",
    "Trajectory": "trajectory",
    "TrajectoryGroup": "trajectory",
    "Turn": "trajectory",
    "User": "users",
    "UserTurn": "users",
    "evaluate": "evaluation",
    "find_run": "store",
    "load_engine": "engine.factory",
    "make": "registry",
    "register": "registry",
    "registry": "registry",
    "replay_episode": "replay",
    "rollout": "evaluation",
    "spec": "registry",
    "tool": "tool",
}

__all__ = sorted([*_HOME, "__version__"])  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]


class _Package(ModuleType):
    """Keeps `agentenv.tool` the decorator, also after the submodule of that name was imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'agentenv' has no attribute {name!r}")
    value = getattr(import_module(f"agentenv.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


gym_hook.install()
