"""Let a container without a network reach one server, and nothing else.

A socket belongs to the network in which it was created, whoever holds it. So a helper process enters the
container's network, listens there at 127.0.0.1, and hands the socket to this process, which passes each
connection on. Nothing needs to be installed in the container.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from ipaddress import ip_address
from pathlib import Path

from agentenv.core import SandboxUnavailable

__all__ = ["forward", "public_address"]

_HELPER = Path(__file__).with_name("listen_inside.py")


async def forward(pid: int, host: str, port: int, at: str = "127.0.0.1") -> asyncio.Server:
    """Listen at `at` and `port` in the network of a process, and pass connections on to `host`.

    Args:
        pid: the process.
        host: 127.0.0.1, which is this machine's, or the name of a host of the internet.
        port: the port, there and inside.
        at: the address inside.

    Raises:
        SandboxUnavailable: This user may not enter that network.
    """

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            address = host if host == "127.0.0.1" else await public_address(host, port)
            there, back = await asyncio.open_connection(address, port)
            with contextlib.closing(back):
                await asyncio.gather(_copy(reader, back), _copy(there, writer))

    return await asyncio.start_server(passed_on, sock=await _listening(pid, at, port))


async def public_address(host: str, port: int) -> str:
    """Return an address of a host in the internet; who owns its name must not choose one of this network.

    Raises:
        OSError: It has none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found if ip_address(each[4][0]).is_global]
    if not addresses:
        raise OSError(f"{host} has no address in the internet")
    return addresses[0]


async def _listening(pid: int, at: str, port: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        helper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_HELPER), str(pid), at, str(port), str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        theirs.close()
        _, err = await helper.communicate()
        if helper.returncode:
            told = err.decode(errors="replace").strip().rpartition("\n")[2]
            raise SandboxUnavailable(
                f"the container's network cannot be entered, so its agent cannot reach the model: {told}",
                remedy="run as root, or use podman as the user who owns the container",
            )
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    return socket.socket(fileno=fds[0])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except (OSError, RuntimeError):
        writer.close()
