"""A network of several containers, which know each other by name.

The names stand in each container's /etc/hosts, because podman has a server of names only where one is
installed, and for networks that reach the internet.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from ipaddress import ip_network

from agentenv_containers.runtime import LABEL, Runtime, owner

__all__ = ["Network"]

_FIRST = 10
"""Number of the first container's address in the network; the gateway has the lowest."""


class Network:
    """A network of podman.

    Args:
        runtime: podman.
        names: the containers that will join.
        is_internal: True if the internet cannot be reached from it.
    """

    def __init__(self, runtime: Runtime, names: Sequence[str], *, is_internal: bool) -> None:
        self.runtime, self._names, self._is_internal = runtime, names, is_internal
        self.name = f"{LABEL}-{owner()}-{secrets.token_hex(4)}"
        self._addresses: dict[str, str] = {}

    async def start(self) -> None:
        """Make the network.

        Raises:
            SandboxCrashed: It cannot be made.
        """
        self.runtime.networks.add(self.name)
        more = ["--internal"] if self._is_internal else []
        await self.runtime.check("network", "create", f"--label={LABEL}={owner()}", *more, self.name)
        which = "{{(index .Subnets 0).Subnet}}"
        said = await self.runtime.check("network", "inspect", "-f", which, self.name)
        subnet = ip_network(said.decode().strip())
        self._addresses = {name: str(subnet[_FIRST + index]) for index, name in enumerate(self._names)}

    def options(self, name: str) -> tuple[str, ...]:
        """Return the options of `run` with which a container joins under its name."""
        hosts = (f"--add-host={other}:{address}" for other, address in self._addresses.items())
        return (f"--network={self.name}", f"--ip={self._addresses[name]}", *hosts)

    async def stop(self) -> None:
        """Remove the network; may be called twice."""
        await self.runtime.remove_networks(self.name)
