"""Landlock rules, which restrict a process's use of files, TCP, abstract sockets and signals."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

from .kernel import syscall

__all__ = ["LIST", "READ", "SCOPED", "WRITE", "abi", "new_ruleset", "open_path", "restrict"]

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

LIST = _READ_DIR
"""Right to list directories."""
READ = _EXECUTE | _READ_FILE | _READ_DIR
"""Rights to read and execute files and to list directories."""
WRITE = (1 << 15) - 1
"""All rights except device ioctls. The kernel lets only privileged processes create devices anyway."""

SCOPED = 6
"""First version that restricts abstract Unix sockets and signals to the sandbox's own."""

_PATH_BENEATH = 1


def abi() -> int:
    """Return the version of the kernel's Landlock; 0 if the kernel has none."""
    try:
        return syscall("landlock_create_ruleset", 0, 0, 1)
    except OSError:
        return 0


def _handled(version: int) -> int:
    rights = (1 << 13) - 1
    # A right that is not handled is allowed. Each version handles more, and asking for unknown ones fails.
    for least, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        if version >= least:
            rights |= right
    return rights


def new_ruleset(rules: list[tuple[int, int]], version: int) -> int:
    """Return a ruleset that allows only `rules`, which are pairs of an O_PATH descriptor and rights.

    The ruleset refuses everything else that this version of Landlock knows: TCP from version 4 on, abstract
    Unix sockets and signals to processes outside from version 6 on.
    """
    handled = _handled(version)
    # The kernel refuses a structure with fields that it does not know, so it gets only those of its version.
    attributes = struct.pack("=QQQ", handled, 3, 3)[: 8 if version < 4 else 16 if version < SCOPED else 24]
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = syscall("landlock_create_ruleset", ctypes.addressof(buffer), len(attributes), 0)
    for fd, rights in rules:
        allowed = rights & handled
        # Rights of directories on a file are an error (EINVAL), not ignored.
        if not _is_directory(fd):
            allowed &= _FILE_RIGHTS
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, fd), 12)
        syscall("landlock_add_rule", ruleset, _PATH_BENEATH, ctypes.addressof(rule), 0)
    return ruleset


def _is_directory(fd: int) -> bool:
    return (os.fstat(fd).st_mode & 0o170000) == 0o040000


def open_path(path: str) -> int:
    """Open a path for use in a rule; the descriptor is 64 or higher, so that children's numbers stay free."""
    low = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 64)
    finally:
        os.close(low)


def restrict(ruleset: int) -> None:
    """Restrict this thread and everything that it starts; no_new_privs must be set."""
    syscall("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)
