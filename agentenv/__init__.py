"""Tools, environments and aligned rollouts for language-model agents.

The trainer sees exactly the tokens that the model sampled. Names are loaded when they are first used, so
that `import agentenv` takes almost no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door
from agentenv.core.version import __version__ as __version__
from agentenv.envs import gym_hook

if TYPE_CHECKING:
    from agentenv import core as core
    from agentenv import endpoint as endpoint
    from agentenv import engine as engine
    from agentenv import envs as envs
    from agentenv import placement as placement
    from agentenv import render as render
    from agentenv import runner as runner
    from agentenv import runs as runs
    from agentenv import sandbox as sandbox
    from agentenv import testing as testing
    from agentenv import tools as tools
    from agentenv import training as training
    from agentenv import workers as workers
    from agentenv.core.episode_env import Context as Context
    from agentenv.core.episode_env import Task as Task
    from agentenv.core.errors import AgentEnvError as AgentEnvError
    from agentenv.core.errors import ToolError as ToolError
    from agentenv.core.limits import RunLimits as RunLimits
    from agentenv.core.messages import Message as Message
    from agentenv.core.messages import ToolCall as ToolCall
    from agentenv.core.messages import ToolResult as ToolResult
    from agentenv.core.sequence import SequenceBuilder as SequenceBuilder
    from agentenv.core.sequence import TokenSequence as TokenSequence
    from agentenv.core.sequence import TokenSpan as TokenSpan
    from agentenv.core.trajectory import StopReason as StopReason
    from agentenv.core.trajectory import Trajectory as Trajectory
    from agentenv.core.trajectory import TrajectoryGroup as TrajectoryGroup
    from agentenv.core.trajectory import Turn as Turn
    from agentenv.engine.factory import load_engine as load_engine
    from agentenv.engine.interface import Sampling as Sampling
    from agentenv.envs.agent_env import AgentEnv as AgentEnv
    from agentenv.envs.env import Env as Env
    from agentenv.envs.multi_env import MultiEnv as MultiEnv
    from agentenv.envs.registry import make as make
    from agentenv.envs.registry import register as register
    from agentenv.envs.registry import registry as registry
    from agentenv.envs.registry import spec as spec
    from agentenv.envs.rewards.group import GroupReward as GroupReward
    from agentenv.envs.rewards.judge import Judge as Judge
    from agentenv.envs.rewards.reward import Reward as Reward
    from agentenv.envs.spec import EnvSpec as EnvSpec
    from agentenv.envs.tasks import TaskSet as TaskSet
    from agentenv.envs.tool_env import ToolEnv as ToolEnv
    from agentenv.render.renderer import Renderer as Renderer
    from agentenv.runner.groups import GroupPolicy as GroupPolicy
    from agentenv.runner.options import RunnerOptions as RunnerOptions
    from agentenv.runner.runner import Runner as Runner
    from agentenv.runner.users import FunctionUser as FunctionUser
    from agentenv.runner.users import ModelUser as ModelUser
    from agentenv.runner.users import ScriptedUser as ScriptedUser
    from agentenv.runner.users import User as User
    from agentenv.runner.users import UserTurn as UserTurn
    from agentenv.runs.evaluate import evaluate as evaluate
    from agentenv.runs.evaluate import rollout as rollout
    from agentenv.runs.replay import replay_episode as replay_episode
    from agentenv.runs.store.reader import find_run as find_run
    from agentenv.tools.registry import make_tool as make_tool
    from agentenv.tools.registry import register_tool as register_tool
    from agentenv.tools.tool import Tool as Tool
    from agentenv.tools.tool import tool as tool
    from agentenv.tools.toolbox import Toolbox as Toolbox
    from agentenv.training import train as train

__all__ = sorted(["__version__", *door(__name__)])

gym_hook.install()
