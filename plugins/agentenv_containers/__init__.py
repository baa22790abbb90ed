"""Containers of podman and docker: sandboxes for code, tasks and agents.

`podman:IMAGE` and `docker:IMAGE` stand in the entry-point group `agentenv.sandboxes`.
"""

from agentenv_containers.agents import (
    AGENT_LIMITS,
    AGENTS,
    KnownAgent,
    agent_image,
    known_agent,
    reach_model,
    run_in,
)
from agentenv_containers.backend import DOCKER, PODMAN, ContainerBackend, ContainerSandbox
from agentenv_containers.container import (
    MAX_FOLDER_BYTES,
    ROOT,
    Container,
    ContainerSettings,
    tar_of,
    untar,
)
from agentenv_containers.network import Network
from agentenv_containers.processes import END_OTHERS, LIST
from agentenv_containers.runtime import Runtime, digest_of
from agentenv_containers.shell import Shell

__all__ = [
    "AGENTS",
    "AGENT_LIMITS",
    "DOCKER",
    "END_OTHERS",
    "LIST",
    "MAX_FOLDER_BYTES",
    "PODMAN",
    "ROOT",
    "Container",
    "ContainerBackend",
    "ContainerSandbox",
    "ContainerSettings",
    "KnownAgent",
    "Network",
    "Runtime",
    "Shell",
    "agent_image",
    "digest_of",
    "known_agent",
    "reach_model",
    "run_in",
    "tar_of",
    "untar",
]
