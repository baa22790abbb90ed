"""The filter of system calls: a BPF program written by hand for x86-64 and aarch64.

It is a list of permissions. The rules are, in this order:

1. A call of another architecture, or with an x32 number, kills the process.
2. Some calls are decided by their arguments (`_special` and `_without_processes`).
3. A call in `ALLOWED` is made, one in `PRETENDED` returns 0, and one in `REFUSED` fails with EPERM.
4. Every other number fails with ENOSYS, as on a kernel that does not have the call. Programs then use an
   older call instead.

The program is a binary search over the call number, so that each call runs few instructions, and the kernel
fills its cache of the results quickly.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Callable

from .calls import ALLOWED, NUMBERS, PRETENDED, REFUSED, names
from .kernel import MACHINE, prctl, syscall

__all__ = ["build", "install", "run"]

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_LOAD, _JA, _JEQ, _JGE, _AND, _RET = 0x20, 0x05, 0x15, 0x35, 0x54, 0x06

_NEW_NAMESPACES = 0x7E020000
_PTHREAD_FLAGS = (0x3D0F00, 0x7D0F00)
"""Flags with which the C libraries glibc and musl start a thread; it shares memory and open files."""
_AF_UNIX, _SOCK_STREAM, _SOL_SOCKET = 1, 1, 1
_SOCKET_PROGRAMS = (26, 50, 51, 52)
"""Socket options that attach a filter program."""
_IOCTLS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)
"""TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX and FICLONE. Others could for example
read the machine's network addresses through any socket, or send signals to other processes."""
_F_SETFL, _O_ASYNC = 4, 0x2000
_FCNTLS = (0, 1, 2, 3, 5, 6, 7, 9, 36, 37, 38, 1025, 1030, 1032, 1033, 1034)
"""Duplicates, flags, record locks, pipe size and seals; not leases, directory notices, signals to an owner,
or larger pipes."""
_PRCTLS = (2, 3, 4, 15, 16, 21, 23, 27, 29, 30, 36, 37, 38, 39, 42)
"""Names, the dumpable flag, timer slack, reaping of orphans, no_new_privs, and questions. The child must end
when its init ends, so PR_SET_PDEATHSIG is not among them."""
_PR_SET_DUMPABLE = 4
_MADVISE_REFUSED = (12, 20, 21, 25, 100, 101)
"""MERGEABLE, COLD, PAGEOUT, COLLAPSE, HWPOISON and SOFT_OFFLINE: they work on memory of others."""
_CLOSE_RANGE_UNSHARE = 2
_O_ACCMODE_AND_TRUNC = 0o1003
_TRUNC_WITHOUT_WRITING = (0o1000, 0o1003)
"""Flags that cut a file opened for reading, or for neither reading nor writing."""

_SILENT = names(
    "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes futimesat utimensat"
)
_UNSUPPORTED = names("""
setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr
lremovexattr fremovexattr fallocate
""")
_NO_PROCESSES = names("""
fork vfork tkill pidfd_open pidfd_send_signal rt_tgsigqueueinfo socket connect bind listen accept accept4
sendmsg sendmmsg
""")
_OWN_PID = 0x3EA51DE5
"""Placeholder for the process id in the program; `install` replaces it, so all children share one program."""

_Code = list[tuple[int, int, int, int]]
_Step = tuple[int, int, int, int]


def _fails(number: int) -> _Step:
    return (_RET, 0, 0, _ERRNO | number)


_EPERM, _UNKNOWN, _DONE = _fails(errno.EPERM), _fails(errno.ENOSYS), _fails(0)
_PERMIT: _Step = (_RET, 0, 0, _ALLOW)

# The kernel uses only 32 bits of all arguments that are tested here, so the program loads their low halves.
# The distance of a jump counts from the next instruction.


def _test(index: int, mask: int | None) -> _Code:
    load = (_LOAD, 0, 0, 16 + 8 * index)
    return [load] if mask is None else [load, (_AND, 0, 0, mask)]


def _when(index: int, values: tuple[int, ...], action: _Step, *, mask: int | None = None) -> _Code:
    """Take the action if an argument is one of the values, else go on."""
    jumps = [(_JEQ, len(values) - n, 0, value) for n, value in enumerate(values)]
    return [*_test(index, mask), *jumps, (_JA, 0, 0, 1), action]


def _unless(index: int, values: tuple[int, ...], action: _Step, *, mask: int | None = None) -> _Code:
    """Take the action if an argument is none of the values, else go on."""
    jumps = [(_JEQ, len(values) - n, 0, value) for n, value in enumerate(values)]
    return [*_test(index, mask), *jumps, action]


def _special() -> dict[str, _Code]:
    """Return the rules for calls that depend on their arguments, in every tier."""
    return {
        "clone": [*_unless(0, (0,), _EPERM, mask=_NEW_NAMESPACES), _PERMIT],
        "socket": [*_unless(0, (_AF_UNIX,), _EPERM), _PERMIT],
        "socketpair": [*_unless(0, (_AF_UNIX,), _EPERM), _PERMIT],
        "setsockopt": [
            *_unless(1, (_SOL_SOCKET,), _fails(errno.ENOPROTOOPT)),
            *_when(2, _SOCKET_PROGRAMS, _EPERM),
            _PERMIT,
        ],
        "ioctl": [*_unless(1, _IOCTLS, _fails(errno.ENOTTY)), _PERMIT],
        "fcntl": [
            *_unless(1, (_F_SETFL, *_FCNTLS), _EPERM),
            *_when(1, _FCNTLS, _PERMIT),
            *_unless(2, (0,), _EPERM, mask=_O_ASYNC),
            _PERMIT,
        ],
        "prctl": [*_unless(0, _PRCTLS, _EPERM), _PERMIT],
        "madvise": [*_when(2, _MADVISE_REFUSED, _EPERM), _PERMIT],
    }


def _without_processes(version: int) -> dict[str, _Code]:
    """Return the further rules for the Landlock tier, whose code shares the machine's files and processes.

    Args:
        version: Version of the kernel's Landlock. Before version 3 it does not know that a file is cut.
    """
    own = [*_unless(0, (0, _OWN_PID), _EPERM), _PERMIT]  # 0: the caller or its group, which is the job's
    rules: dict[str, _Code] = {name: [_EPERM] for name in _NO_PROCESSES}
    # Landlock does not restrict who changes the mode, owner, times and attributes of a file, and the files of
    # the machine may belong to the same user. Copying a file must still work, so most calls do nothing.
    rules |= {name: [_DONE] for name in _SILENT}
    # Reserving space would be faster than the init can count it; the C library then writes blocks instead.
    rules |= {name: [_fails(errno.EOPNOTSUPP)] for name in _UNSUPPORTED}
    rules |= {
        # Threads are needed, for example by numpy. A new process could go on after the end of the job, and a
        # thread with open files of its own could hide files from the init.
        "clone": [*_unless(0, _PTHREAD_FLAGS, _EPERM), _PERMIT],
        "close_range": [*_when(2, (_CLOSE_RANGE_UNSHARE,), _EPERM, mask=_CLOSE_RANGE_UNSHARE), _PERMIT],
        # Landlock does not restrict sockets in the file system, so the code has only pairs. The ends of a
        # stream pair are fixed, but a datagram socket could send to another address.
        "socketpair": [
            *_unless(0, (_AF_UNIX,), _EPERM),
            *_unless(1, (_SOCK_STREAM,), _EPERM, mask=0xF),
            _PERMIT,
        ],
        # The init must be able to see the open files of the child.
        "prctl": [*_when(0, (_PR_SET_DUMPABLE,), _EPERM), *_unless(0, _PRCTLS, _EPERM), _PERMIT],
        # The flags of openat2 are in memory, which a filter cannot read; programs then use openat.
        "openat2": [_UNKNOWN],
        **dict.fromkeys(("kill", "tgkill", "rt_sigqueueinfo", "prlimit64", "sched_setaffinity"), own),
    }
    if version < 3:
        rules["truncate"] = [_EPERM]
        for name, index in (("open", 1), ("openat", 2)):
            rules[name] = [*_when(index, _TRUNC_WITHOUT_WRITING, _EPERM, mask=_O_ACCMODE_AND_TRUNC), _PERMIT]
    return rules


def build(machine: str = MACHINE, *, fork: bool = True, landlock: int = 1 << 16) -> bytes:
    """Return the filter in the kernel's format, with 8 bytes for each instruction.

    Args:
        machine: "x86_64" or "aarch64".
        fork: False refuses new processes, but not threads, and what could reach other processes or files.
        landlock: Version of the kernel's Landlock, which decides what else must be refused without `fork`.

    Raises:
        OSError: There is no table for this machine.
    """
    if machine not in NUMBERS:
        raise OSError(errno.ENOSYS, f"no system-call table for {machine}")
    rules: dict[str, _Code] = {name: [_PERMIT] for name in ALLOWED}
    rules |= {name: [_DONE] for name in PRETENDED} | {name: [_EPERM] for name in REFUSED}
    rules |= _special() if fork else _special() | _without_processes(landlock)
    leaves = {number: rules[name] for name, number in NUMBERS[machine].items() if name in rules}
    # Invariant: spans are sorted by their first number, and each span ends where the next one begins.
    spans: list[tuple[int, _Code]] = [(0, leaves.get(0, [_UNKNOWN]))]
    for number in range(1, max(leaves) + 2):
        code = leaves.get(number, [_UNKNOWN])
        if spans[-1][1] != code:
            spans.append((number, code))
    # A number means another call on another architecture, so the architecture is tested first; it is at
    # offset 4 of seccomp_data.
    head: _Code = [
        (_LOAD, 0, 0, 4),
        (_JEQ, 1, 0, _ARCHES[machine]),
        (_RET, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        head += [(_JGE, 0, 1, _X32), (_RET, 0, 0, _KILL)]
    return b"".join(struct.pack("=HBBI", *step) for step in head + _search(spans))


def _search(spans: list[tuple[int, _Code]]) -> _Code:
    """Return the instructions of a binary search over spans of call numbers."""
    if len(spans) == 1:
        return spans[0][1]
    middle = len(spans) // 2
    below, above = _search(spans[:middle]), _search(spans[middle:])
    # The distance of a conditional jump has 8 bits. A longer one needs an unconditional jump, which has 32.
    if len(below) > 255:
        return [(_JGE, 0, 1, spans[middle][0]), (_JA, 0, 0, len(below)), *below, *above]
    return [(_JGE, len(below), 0, spans[middle][0]), *below, *above]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(program: bytes, *, own_pid: int) -> None:
    """Install the filter for this process and all its threads; no_new_privs must be set."""
    program = program.replace(struct.pack("=I", _OWN_PID), struct.pack("=I", own_pid))
    code = ctypes.create_string_buffer(program, len(program))
    header = _Program(len(program) // 8, ctypes.addressof(code))
    try:
        syscall("seccomp", 1, 1, ctypes.addressof(header))  # SET_MODE_FILTER, TSYNC
    except OSError:
        prctl(22, 2, ctypes.addressof(header))  # without TSYNC; the process has only one thread


def run(program: bytes, number: int, arguments: tuple[int, ...] = (), machine: str = MACHINE) -> int:
    """Interpret a filter as the kernel does and return the action; tests use this."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=iIQ6Q", number, _ARCHES[machine], 0, *(a & (2**64 - 1) for a in padded))
    steps = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    tests: dict[int, Callable[[int, int], bool]] = {
        _JEQ: lambda a, k: a == k,
        _JGE: lambda a, k: a >= k,
    }
    at, accumulator = 0, 0
    while True:
        code, yes, no, k = steps[at]
        at += 1
        if code == _RET:
            return k
        if code == _LOAD:
            accumulator = struct.unpack_from("=I", data, k)[0]
        elif code == _AND:
            accumulator &= k
        elif code in tests:
            at += yes if tests[code](accumulator, k) else no
        else:
            at += k
