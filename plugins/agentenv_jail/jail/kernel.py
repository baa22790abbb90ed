"""System calls that Python's standard library does not offer, made through ctypes."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

__all__ = [
    "CLONE_NEWCGROUP",
    "CLONE_NEWIPC",
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "LAST",
    "MACHINE",
    "close_range",
    "core_limit",
    "drop_capabilities",
    "fork",
    "mount",
    "prctl",
    "setns",
    "syscall",
    "umount",
    "unshare",
    "write",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000


def _machine(kernel: str, bits: int) -> str:
    """Return the machine whose call numbers this process uses; a 32-bit process uses other numbers."""
    name = {"AMD64": "x86_64", "arm64": "aarch64"}.get(kernel, kernel)
    return name if bits == 64 else f"{name} ({bits}-bit programs)"


MACHINE = _machine(platform.machine(), 8 * ctypes.sizeof(ctypes.c_void_p))

_NUMBERS = {
    "x86_64": {"capset": 126, "pivot_root": 155, "seccomp": 317},
    "aarch64": {"capset": 91, "pivot_root": 41, "seccomp": 277},
}
# System calls from 424 on have the same number on both machines.
_COMMON = {
    "open_tree": 428,
    "move_mount": 429,
    "close_range": 436,
    "mount_setattr": 442,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}

# `use_errno` saves errno at the call; otherwise the interpreter may change it before it is read.
_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long] * 7
_mount = _libc.mount
_mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
# PyDLL keeps the interpreter lock during the call, so that the child begins as its owner.
_raw_fork = ctypes.PyDLL(None).fork
_prctl = _libc.prctl
_prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


def _fail(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def syscall(name: str, *arguments: int) -> int:
    """Make a system call by its name; pointers are passed as addresses.

    Raises:
        OSError: The kernel refused the call, or its number here is not known; the message names the call.
    """
    number = _COMMON.get(name) or _NUMBERS.get(MACHINE, {}).get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name}: no number for {MACHINE}")
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    result = _syscall(number, *padded)
    if result < 0:
        raise _fail(name)
    return result


def prctl(option: int, *arguments: int) -> None:
    """Set a property of this process."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    if _prctl(option, *padded) != 0:
        raise _fail(f"prctl({option})")


def unshare(flags: int) -> None:
    """Enter new namespaces of the kinds in `flags`."""
    if _libc.unshare(flags) != 0:
        raise _fail(f"unshare({flags:#x})")


def setns(fd: int, flags: int) -> None:
    """Enter the namespace of a descriptor."""
    if _libc.setns(fd, flags) != 0:
        raise _fail("setns")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """Mount a file system."""
    arguments = (source.encode(), os.fsencode(target), kind.encode() or None, flags, data.encode() or None)
    if _mount(*arguments) != 0:
        raise _fail(f"mount {kind or source} on {target}")


def umount(target: str, flags: int = 2) -> None:
    """Unmount a file system; by default lazily (MNT_DETACH)."""
    if _libc.umount2(os.fsencode(target), flags) != 0:
        raise _fail(f"umount {target}")


def write(path: str, data: bytes, folder: int | None = None) -> None:
    """Write to a file in /proc with a single call, as the kernel requires.

    Args:
        path: The file, relative to `folder` if there is one.
        data: What to write.
        folder: Descriptor of a directory.
    """
    # The kernel takes the maps of a user namespace from one write; a buffered file might split it.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def core_limit(setting: str = "/proc/sys/kernel/core_pattern") -> int:
    """Return the limit of a core file that keeps the machine from writing one.

    The limit 0 does not hold on a machine that hands cores to a program or a socket; 1 stands for none there.
    """
    try:
        with open(setting, encoding="utf-8", errors="replace") as file:
            # These two begin a pattern that names a program or a socket; anything else is a file name.
            return 1 if file.read(1) in ("|", "@") else 0
    except OSError:
        return 1


LAST = 0x7FFFFFFF
"""Highest possible number of a descriptor."""


def close_range(first: int, last: int) -> None:
    """Close every descriptor from `first` to `last`."""
    syscall("close_range", first, last, 0)


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


_PR_CAPBSET_READ, _PR_CAPBSET_DROP = 23, 24
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4


def _count_capabilities() -> int:
    # Asked of the kernel, because newer kernels have more capabilities than any list written here.
    capability = 0
    while _prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        capability += 1
    return capability


_CAPABILITIES = _count_capabilities()


def fork() -> int:
    """Fork without running Python's fork handlers, for inits and helper processes.

    The calling process must have no other threads. The child does not use what the handlers renew (locks,
    the generator of `random`), and the kernel would have to copy each page of memory that they touch.

    Raises:
        OSError: The limit of processes is reached.
    """
    pid = _raw_fork()
    if pid < 0:
        raise BlockingIOError(11, "fork: no more processes")
    return pid


def drop_capabilities(*, bounding: bool) -> None:
    """Give up all capabilities permanently.

    Args:
        bounding: Empty the bounding set too. This needs CAP_SETPCAP, which a process has in a new user
            namespace.
    """
    if bounding:
        for capability in range(_CAPABILITIES):
            if _prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                raise _fail("prctl(PR_CAPBSET_DROP)")
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    # Version 3 of the structure: two words each for effective, permitted and inheritable.
    header = _CapHeader(0x20080522, 0)
    empty = (ctypes.c_uint32 * 6)()
    syscall("capset", ctypes.addressof(header), ctypes.addressof(empty))
