"""The messages of a confined child (a job has begun, a reply to a step of a session), and orders to its init.

Code in a session can send anything in place of a reply. A reply therefore has a fixed form that needs no
parser, carries no descriptors, and is read by `agentenv_jail.session`.
"""

from __future__ import annotations

import errno
import socket
import struct
import time

__all__ = [
    "BEGUN",
    "GO_ON",
    "MAX_DATA_BYTES",
    "REPLY",
    "REPLY_FAILED",
    "REPLY_TIMED_OUT",
    "STOP",
    "send_descriptors",
]

BEGUN = struct.Struct("=c7d")
"""Message to the init: b"b", start time, and the limits of time, memory, disk, processor time, processes and
size of a file. The child sends it while it is still trusted."""

REPLY = struct.Struct("=QiBddQ")
"""Head of a reply to the host: number of the step, exit code, flags, duration and processor time in seconds,
and peak memory in bytes. Data of a file follows, or the reason of a failure."""

REPLY_TIMED_OUT, REPLY_FAILED = 1, 2
"""Flags of a reply: a command reached its time limit; the data is the reason why the step failed."""

MAX_DATA_BYTES = 60_000
"""Largest data of one reply. A larger file is read in several steps."""

_ROOM_S = 30.0

STOP, GO_ON = b"s", b"g"
"""Orders of the host to the init of a session: stop all its processes, and let them go on."""


def send_descriptors(way: socket.socket, message: bytes, descriptors: list[int]) -> None:
    """Send a message with descriptors as soon as the kernel has room for them.

    Of one user, in all processes together, no more may be under way than the sender may open itself. Jails of
    several programs have the same user, so there may be no room for a moment.
    """
    until = time.monotonic() + _ROOM_S
    while True:
        try:
            socket.send_fds(way, [message], descriptors)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > until:
                raise
            time.sleep(0.001)
        else:
            return
