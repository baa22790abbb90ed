"""Let the trainers of others use our environments, and write and read episodes in the formats of others.

`trainers` has one module for each trainer that plays our episodes live: TRL, verl, SkyRL, slime and
tinker-cookbook. `formats` has those of TRL, verl, slime, prime-rl, OpenAI, ATIF and, only written, Inspect
and parquet. Each stands in the entry-point group `agentenv.formats`, so that `agentenv export --as` and
`agentenv import` know it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core import door

if TYPE_CHECKING:
    from agentenv_bridges.formats.atif import from_atif as from_atif
    from agentenv_bridges.formats.atif import to_atif as to_atif
    from agentenv_bridges.formats.chatlogs import from_openai as from_openai
    from agentenv_bridges.formats.chatlogs import to_openai as to_openai
    from agentenv_bridges.formats.chatlogs import to_sft as to_sft
    from agentenv_bridges.formats.inspect_log import to_inspect as to_inspect
    from agentenv_bridges.formats.parquet import write_parquet as write_parquet
    from agentenv_bridges.formats.prime_rl import from_prime_rl as from_prime_rl
    from agentenv_bridges.formats.prime_rl import to_prime_rl as to_prime_rl
    from agentenv_bridges.formats.slime import from_slime as from_slime
    from agentenv_bridges.formats.slime import slime_samples as slime_samples
    from agentenv_bridges.formats.trl import from_trl as from_trl
    from agentenv_bridges.formats.trl import trl_samples as trl_samples
    from agentenv_bridges.formats.verl import from_verl as from_verl
    from agentenv_bridges.formats.verl import verl_samples as verl_samples
    from agentenv_bridges.split import PromptResponse as PromptResponse
    from agentenv_bridges.split import split_sequence as split_sequence
    from agentenv_bridges.trainers.skyrl import SkyRLGenerator as SkyRLGenerator
    from agentenv_bridges.trainers.slime import generate_function as generate_function
    from agentenv_bridges.trainers.tinker_cookbook import group_builder as group_builder
    from agentenv_bridges.trainers.trl import environment_factory as environment_factory
    from agentenv_bridges.trainers.trl import environment_reward as environment_reward
    from agentenv_bridges.trainers.trl import environment_rows as environment_rows
    from agentenv_bridges.trainers.trl import rollout_func as rollout_func
    from agentenv_bridges.trainers.trl import task_rows as task_rows
    from agentenv_bridges.trainers.verl import agent_loop as agent_loop

__all__ = door(__name__)
