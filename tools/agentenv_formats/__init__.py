"""Write trajectories in the formats of other libraries, and read them back.

The formats are those of TRL, verl, slime, prime-rl, OpenAI, ATIF and, only written, Inspect. Each stands in
the entry-point group `agentenv.formats`, so that `agentenv export --as` and `agentenv import` know it.
"""

from agentenv_formats.atif import from_atif, to_atif
from agentenv_formats.chatlogs import from_openai, to_openai, to_sft
from agentenv_formats.inspect_log import to_inspect
from agentenv_formats.prime_rl import from_prime_rl, to_prime_rl
from agentenv_formats.slime import from_slime, slime_samples
from agentenv_formats.trl import from_trl, trl_samples
from agentenv_formats.verl import from_verl, verl_samples

__all__ = [
    "from_atif",
    "from_openai",
    "from_prime_rl",
    "from_slime",
    "from_trl",
    "from_verl",
    "slime_samples",
    "to_atif",
    "to_inspect",
    "to_openai",
    "to_prime_rl",
    "to_sft",
    "trl_samples",
    "verl_samples",
]
