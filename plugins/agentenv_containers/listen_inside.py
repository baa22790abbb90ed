"""Listen in the network of another process, and hand the socket on: PID ADDRESS PORT DESCRIPTOR."""

from __future__ import annotations

import ctypes
import os
import socket
import sys

_NEWUSER, _NEWNET = 0x10000000, 0x40000000


def main(pid: int, address: str, port: int, fd: int) -> None:
    """Enter the network of a process, listen at an address, and send the socket over a Unix socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), kind) for name, kind in _kinds(pid)]
    for space, kind in spaces:
        if libc.setns(space, kind):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with (
        socket.socket(fileno=fd) as channel,
        socket.create_server((address, port), backlog=256) as server,
    ):
        socket.send_fds(channel, [b"s"], [server.fileno()])


def _kinds(pid: int) -> list[tuple[str, int]]:
    """Return the namespaces to enter: without root the user's comes first, which is where we are root."""
    same = os.stat(f"/proc/{pid}/ns/user").st_ino == os.stat("/proc/self/ns/user").st_ino  # noqa: PTH116
    return [*([] if same else [("user", _NEWUSER)]), ("net", _NEWNET)]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
