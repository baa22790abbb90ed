"""Let the trainers of others use our environments, and let packages add formats of trajectories.

The formats that ship with agentenv are in the package `agentenv_formats`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.interop.formats import Export as Export
    from agentenv.interop.formats import Format as Format
    from agentenv.interop.formats import format_registry as format_registry
    from agentenv.interop.skyrl import SkyRLGenerator as SkyRLGenerator
    from agentenv.interop.slime import generate_function as generate_function
    from agentenv.interop.split import PromptResponse as PromptResponse
    from agentenv.interop.split import split_sequence as split_sequence
    from agentenv.interop.tinker_cookbook import group_builder as group_builder
    from agentenv.interop.trl import environment_factory as environment_factory
    from agentenv.interop.trl import environment_reward as environment_reward
    from agentenv.interop.trl import environment_rows as environment_rows
    from agentenv.interop.trl import rollout_func as rollout_func
    from agentenv.interop.trl import task_rows as task_rows
    from agentenv.interop.verl import agent_loop as agent_loop

__all__ = door(__name__)
