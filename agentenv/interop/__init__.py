"""Write and read trajectories in the formats of others, and let their trainers use our environments.

The formats are those of TRL, verl, slime, prime-rl, OpenAI, ATIF and, only written, Inspect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.interop.atif import from_atif as from_atif
    from agentenv.interop.atif import to_atif as to_atif
    from agentenv.interop.chatlogs import from_openai as from_openai
    from agentenv.interop.chatlogs import to_openai as to_openai
    from agentenv.interop.chatlogs import to_sft as to_sft
    from agentenv.interop.formats import Export as Export
    from agentenv.interop.formats import Format as Format
    from agentenv.interop.formats import format_registry as format_registry
    from agentenv.interop.inspect_log import to_inspect as to_inspect
    from agentenv.interop.openenv import OpenEnvServer as OpenEnvServer
    from agentenv.interop.openenv import serve as serve
    from agentenv.interop.prime_rl import from_prime_rl as from_prime_rl
    from agentenv.interop.prime_rl import to_prime_rl as to_prime_rl
    from agentenv.interop.slime import from_slime as from_slime
    from agentenv.interop.slime import slime_samples as slime_samples
    from agentenv.interop.trl import environment_factory as environment_factory
    from agentenv.interop.trl import environment_reward as environment_reward
    from agentenv.interop.trl import environment_rows as environment_rows
    from agentenv.interop.trl import from_trl as from_trl
    from agentenv.interop.trl import rollout_func as rollout_func
    from agentenv.interop.trl import task_rows as task_rows
    from agentenv.interop.trl import trl_samples as trl_samples
    from agentenv.interop.verl import from_verl as from_verl
    from agentenv.interop.verl import verl_samples as verl_samples

__all__ = door(__name__)
