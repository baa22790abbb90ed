"""What an interpreter's vLLM is built for, and the share of the memory that a new engine can take.

vLLM reserves a share of the whole memory when it starts, and ends if that much is not free. Its own default
is 0.92, which is not free on a machine where anything else runs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import floor

from agentenv.core.errors import DependencyMissing

__all__ = ["Build", "find_build", "sets_memory"]

DEFAULT_SHARE = 0.92
"""Share that vLLM reserves by default."""
CONTEXT_SHARE = 0.03
"""Share that starting the engine itself takes on a GPU, before vLLM looks how much is free."""
LEAST_SHARE = 0.02
"""With less memory than this free, vLLM is left to say itself that it does not suffice."""
MEASURE_S = 120.0
PROGRAM = """
import importlib.metadata, importlib.util, json, sys
if importlib.util.find_spec("vllm") is None:
    raise SystemExit(1)
builds = importlib.metadata.distributions()
cpu = any("cpu" in build.name + build.version for build in builds if (build.name or "").startswith("vllm"))
free = None
try:
    if cpu:
        from vllm.utils.cpu_resource_utils import get_memory_node_info
        node = get_memory_node_info(0)
        free = node.available_memory / node.total_memory
    else:
        import torch
        used = range(min(torch.cuda.device_count(), int(sys.argv[1])))
        devices = [torch.cuda.mem_get_info(device) for device in used]
        free = min(now / total for now, total in devices)
except Exception:
    pass
print(json.dumps({"cpu": cpu, "free": free}))
"""
"""Program that looks for vLLM (the builds are called `vllm0.32.0+cpu` or `vllm-cpu0.32.0`, say), and measures
the memory as vLLM does, which counts the file cache of a container as used."""
FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory")
"""Arguments that set how much memory vLLM takes."""


@dataclass(frozen=True, slots=True)
class Build:
    """The vLLM of an interpreter."""

    cpu: bool
    """Whether it is a build for CPUs."""
    free: float | None
    """Share of the memory that is free, on the fullest of its GPUs; None if that is not known."""

    def fitting_share(self, *, alone: bool = True) -> float | None:
        """Return the share that vLLM should reserve; None if its default fits or nothing is known.

        Args:
            alone: whether no model of this process needs memory too. On a CPU one always may.
        """
        if self.free is None:
            return None
        share = self.free / 2 if self.cpu or not alone else self.free - CONTEXT_SHARE
        share = floor(100 * share) / 100
        return None if share < LEAST_SHARE or share >= DEFAULT_SHARE else share


def find_build(python: str, gpus: int = 1, environment: Mapping[str, str] | None = None) -> Build:
    """Look for the vLLM of an interpreter.

    Args:
        python: the interpreter.
        gpus: number of GPUs that a server uses, the first of those that it sees.
        environment: environment variables of the server, which may hide GPUs from it.

    Raises:
        DependencyMissing: vLLM is not installed for the interpreter.
    """
    try:
        result = subprocess.run(  # noqa: S603 - the user's own interpreter
            [python, "-c", PROGRAM, str(gpus)],
            check=False,
            capture_output=True,
            text=True,
            timeout=MEASURE_S,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        return Build(cpu=False, free=None)
    lines = result.stdout.rstrip().split("\n")
    if result.returncode or not lines[-1]:
        raise DependencyMissing.of(f"vllm (not in {python})", "vllm", purpose="a vLLM server")
    found = json.loads(lines[-1])
    return Build(found["cpu"], found["free"])


def sets_memory(arguments: Collection[str]) -> bool:
    """Return whether command-line arguments or the environment say how much memory vLLM takes."""
    words = [argument.replace("_", "-") for argument in arguments]
    return bool(os.environ.get("VLLM_CPU_KVCACHE_SPACE")) or any(word.startswith(FLAGS) for word in words)
