"""Types that all other packages share: errors, messages, limits, tasks, token sequences and trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.core.cache import cache_directory as cache_directory
    from agentenv.core.door import door as door
    from agentenv.core.episode_env import Action as Action
    from agentenv.core.episode_env import Context as Context
    from agentenv.core.episode_env import EpisodeEnv as EpisodeEnv
    from agentenv.core.episode_env import Outcome as Outcome
    from agentenv.core.episode_env import ResetResult as ResetResult
    from agentenv.core.episode_env import StepResult as StepResult
    from agentenv.core.episode_env import Task as Task
    from agentenv.core.episode_env import derive_seed as derive_seed
    from agentenv.core.errors import AgentEnvError as AgentEnvError
    from agentenv.core.errors import AlignmentError as AlignmentError
    from agentenv.core.errors import ContextTooLong as ContextTooLong
    from agentenv.core.errors import DependencyMissing as DependencyMissing
    from agentenv.core.errors import EngineError as EngineError
    from agentenv.core.errors import EngineUnavailable as EngineUnavailable
    from agentenv.core.errors import EnvironmentMisuse as EnvironmentMisuse
    from agentenv.core.errors import InfrastructureError as InfrastructureError
    from agentenv.core.errors import ModelNotFound as ModelNotFound
    from agentenv.core.errors import RenderError as RenderError
    from agentenv.core.errors import RunNotFound as RunNotFound
    from agentenv.core.errors import SandboxCrashed as SandboxCrashed
    from agentenv.core.errors import SandboxError as SandboxError
    from agentenv.core.errors import SandboxUnavailable as SandboxUnavailable
    from agentenv.core.errors import ServerUnavailable as ServerUnavailable
    from agentenv.core.errors import StoreError as StoreError
    from agentenv.core.errors import TaskError as TaskError
    from agentenv.core.errors import ToolDefinitionError as ToolDefinitionError
    from agentenv.core.errors import ToolError as ToolError
    from agentenv.core.errors import TrainingFailed as TrainingFailed
    from agentenv.core.errors import UnknownEnvironment as UnknownEnvironment
    from agentenv.core.errors import UnknownTool as UnknownTool
    from agentenv.core.errors import UsageError as UsageError
    from agentenv.core.errors import did_you_mean as did_you_mean
    from agentenv.core.execution import ExecResult as ExecResult
    from agentenv.core.execution import ExecStatus as ExecStatus
    from agentenv.core.execution import SandboxProtocol as SandboxProtocol
    from agentenv.core.execution import SessionProtocol as SessionProtocol
    from agentenv.core.execution import WorkspaceProtocol as WorkspaceProtocol
    from agentenv.core.files import json_lines as json_lines
    from agentenv.core.images import ImageTokens as ImageTokens
    from agentenv.core.images import image_size as image_size
    from agentenv.core.images import suffix_of as suffix_of
    from agentenv.core.imports import load_file as load_file
    from agentenv.core.installed import install_line as install_line
    from agentenv.core.limits import DonePolicy as DonePolicy
    from agentenv.core.limits import RunLimits as RunLimits
    from agentenv.core.loops import run_blocking as run_blocking
    from agentenv.core.loops import run_sync as run_sync
    from agentenv.core.messages import PROVIDER_FIELDS as PROVIDER_FIELDS
    from agentenv.core.messages import CallStatus as CallStatus
    from agentenv.core.messages import ContentPart as ContentPart
    from agentenv.core.messages import FunctionCall as FunctionCall
    from agentenv.core.messages import JsonValue as JsonValue
    from agentenv.core.messages import Message as Message
    from agentenv.core.messages import ToolCall as ToolCall
    from agentenv.core.messages import ToolCallMessage as ToolCallMessage
    from agentenv.core.messages import ToolErrorKind as ToolErrorKind
    from agentenv.core.messages import ToolResult as ToolResult
    from agentenv.core.messages import distinct_calls as distinct_calls
    from agentenv.core.messages import orphans_as_user as orphans_as_user
    from agentenv.core.messages import text_of as text_of
    from agentenv.core.messages import without_hints as without_hints
    from agentenv.core.messages import without_provider_fields as without_provider_fields
    from agentenv.core.registry import Listing as Listing
    from agentenv.core.registry import Registry as Registry
    from agentenv.core.routed_experts import RoutedExperts as RoutedExperts
    from agentenv.core.sequence import SequenceBuilder as SequenceBuilder
    from agentenv.core.sequence import Source as Source
    from agentenv.core.sequence import TokenSequence as TokenSequence
    from agentenv.core.sequence import TokenSpan as TokenSpan
    from agentenv.core.supports import Supports as Supports
    from agentenv.core.threads import off_loop as off_loop
    from agentenv.core.threads import open_files_left as open_files_left
    from agentenv.core.trajectory import EpisodeError as EpisodeError
    from agentenv.core.trajectory import Rewrite as Rewrite
    from agentenv.core.trajectory import StopReason as StopReason
    from agentenv.core.trajectory import Trajectory as Trajectory
    from agentenv.core.trajectory import TrajectoryGroup as TrajectoryGroup
    from agentenv.core.trajectory import Turn as Turn
    from agentenv.core.visible import logger as logger

__all__ = door(__name__)
