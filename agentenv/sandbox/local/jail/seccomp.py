"""The system-call filter: a BPF program written by hand for x86-64 and aarch64.

Rules, in order: a foreign architecture kills; x32 numbers kill; numbers that this table does not
know, newer ones and those in its gaps, are unknown (ENOSYS); calls in `REFUSED` fail (EPERM); a few
calls are allowed by their arguments. The rest is allowed. The program is a binary search over the
call number, so that it stays short to run and the kernel's own cache of it is cheap to fill.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Callable

from .kernel import MACHINE, prctl, syscall

__all__ = ["FIRST_UNKNOWN", "GAPS", "NUMBERS", "REFUSED", "build", "install", "run"]

FIRST_UNKNOWN = 457
"""statmount; nothing from here on has been reviewed."""

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_LOAD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06

# Numbers that both machines share: since 424 the kernel gives new calls one number for all.
_SAME = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
    "quotactl_fd": 443, "memfd_secret": 447, "process_mrelease": 448, "set_mempolicy_home_node": 450,
}  # fmt: skip

NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        **_SAME,
        "ioctl": 16, "shmget": 29, "shmat": 30, "shmctl": 31, "socket": 41, "socketpair": 53, "clone": 56,
        "fork": 57, "vfork": 58, "kill": 62, "semget": 64, "semop": 65, "semctl": 66, "shmdt": 67,
        "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "ptrace": 101, "syslog": 103, "uselib": 134,
        "personality": 135, "ustat": 136, "sysfs": 139, "setpriority": 141, "sched_setparam": 142,
        "sched_setscheduler": 144, "vhangup": 153, "modify_ldt": 154, "pivot_root": 155, "_sysctl": 156,
        "prctl": 157, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165,
        "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
        "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174, "init_module": 175,
        "delete_module": 176, "get_kernel_syms": 177, "query_module": 178, "quotactl": 179,
        "nfsservctl": 180, "tkill": 200, "sched_setaffinity": 203, "lookup_dcookie": 212,
        "remap_file_pages": 216, "semtimedop": 220, "clock_settime": 227, "tgkill": 234, "mbind": 237,
        "set_mempolicy": 238, "get_mempolicy": 239, "mq_open": 240, "mq_unlink": 241, "mq_timedsend": 242,
        "mq_timedreceive": 243, "mq_notify": 244, "mq_getsetattr": 245, "kexec_load": 246, "add_key": 248,
        "request_key": 249, "keyctl": 250, "ioprio_set": 251, "migrate_pages": 256, "unshare": 272,
        "vmsplice": 278, "move_pages": 279, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
        "perf_event_open": 298, "fanotify_init": 300, "fanotify_mark": 301, "prlimit64": 302,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
        "sched_setattr": 314, "seccomp": 317, "memfd_create": 319, "kexec_file_load": 320, "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": {
        **_SAME,
        "lookup_dcookie": 18, "ioctl": 29, "ioprio_set": 30, "umount2": 39, "mount": 40, "pivot_root": 41,
        "nfsservctl": 42, "chroot": 51, "vhangup": 58, "quotactl": 60, "vmsplice": 75, "acct": 89,
        "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
        "clock_settime": 112, "syslog": 116, "ptrace": 117, "sched_setparam": 118,
        "sched_setscheduler": 119, "sched_setaffinity": 122, "kill": 129, "tkill": 130, "tgkill": 131,
        "rt_sigqueueinfo": 138, "setpriority": 140, "reboot": 142, "sethostname": 161,
        "setdomainname": 162, "prctl": 167, "settimeofday": 170, "adjtimex": 171, "mq_open": 180,
        "mq_unlink": 181, "mq_timedsend": 182, "mq_timedreceive": 183, "mq_notify": 184,
        "mq_getsetattr": 185, "msgget": 186, "msgctl": 187, "msgrcv": 188, "msgsnd": 189, "semget": 190,
        "semctl": 191, "semtimedop": 192, "semop": 193, "shmget": 194, "shmctl": 195, "shmat": 196,
        "shmdt": 197, "socket": 198, "socketpair": 199, "add_key": 217, "request_key": 218, "keyctl": 219,
        "clone": 220, "swapon": 224, "swapoff": 225, "remap_file_pages": 234, "mbind": 235,
        "get_mempolicy": 236, "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239,
        "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "prlimit64": 261, "fanotify_init": 262,
        "fanotify_mark": 263, "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
        "sched_setattr": 274, "seccomp": 277, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
        "kexec_file_load": 294,
    },
}  # fmt: skip

GAPS = {"x86_64": [range(337, 424)], "aarch64": [range(244, 260), range(295, 424)]}
"""Numbers below `FIRST_UNKNOWN` that no reviewed call has; kernels still put new ones there.

The last were uretprobe and uprobe (335, 336), which do nothing but for the kernel's own trampolines.
"""

_REFUSED_NAMES = """
# other processes' memory, and tracing
ptrace process_vm_readv process_vm_writev kcmp process_madvise process_mrelease pidfd_getfd
# mounts and roots
mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr
# kernel code and machinery
init_module finit_module delete_module create_module query_module get_kernel_syms kexec_load
kexec_file_load bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register
seccomp personality modify_ldt iopl ioperm lookup_dcookie uselib ustat sysfs _sysctl nfsservctl
remap_file_pages fanotify_init fanotify_mark
# keyrings, namespaces, clocks, handles, quotas, machine state
add_key request_key keyctl unshare setns settimeofday clock_settime adjtimex clock_adjtime
name_to_handle_at open_by_handle_at quotactl quotactl_fd swapon swapoff reboot acct syslog
sethostname setdomainname vhangup
# NUMA and priorities
mbind set_mempolicy get_mempolicy migrate_pages move_pages set_mempolicy_home_node setpriority
ioprio_set sched_setscheduler sched_setparam sched_setattr
# memory that no limit counts: System V and POSIX IPC, memory files, gifts to pipes
shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open
mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr memfd_create memfd_secret vmsplice
"""
REFUSED = frozenset(name for line in _REFUSED_NAMES.splitlines() if line[:1] != "#" for name in line.split())
"""Refused with EPERM in every tier."""

_NO_FORK = frozenset({"fork", "vfork", "tkill", "pidfd_open", "pidfd_send_signal", "rt_tgsigqueueinfo"})
"""Refused as well where no pid namespace can collect what is left running."""

_NEW_NAMESPACES, _THREAD = 0x7E020000, 0x00010000
_AF_UNIX, _SOCK_STREAM = 1, 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_PR_SET_PDEATHSIG = 1
_OWN_PID = 0x3EA51DE5
"""Stands for the process's own id until the filter is installed: one program serves all children."""

_Code = list[tuple[int, int, int, int]]
_EPERM = (_RET, 0, 0, _ERRNO | errno.EPERM)
_PERMIT = (_RET, 0, 0, _ALLOW)
_UNKNOWN = (_RET, 0, 0, _ERRNO | errno.ENOSYS)


def _argument(index: int) -> tuple[int, int, int, int]:
    """Load the low half of an argument; every one looked at here is 32 bits wide in the kernel."""
    return (_LOAD, 0, 0, 16 + 8 * index)


# Jumps count instructions from the next one. Of the two returns behind a row of tests, a match jumps over the
# first to the second.


def _allow_if(index: int, values: tuple[int, ...]) -> _Code:
    jumps = [(_JEQ, len(values) - n, 0, value) for n, value in enumerate(values)]
    return [_argument(index), *jumps, _EPERM, _PERMIT]


def _refuse_if(index: int, values: tuple[int, ...]) -> _Code:
    jumps = [(_JEQ, len(values) - n, 0, value) for n, value in enumerate(values)]
    return [_argument(index), *jumps, _PERMIT, _EPERM]


def _special(*, fork: bool) -> dict[str, _Code]:
    rules: dict[str, _Code] = {
        # glibc falls back to clone, whose flags a filter can read
        "clone3": [_UNKNOWN],
        "clone": [_argument(0), (_JSET, 0, 1, _NEW_NAMESPACES), _EPERM, _PERMIT],
        "socket": _allow_if(0, (_AF_UNIX,)),
        "socketpair": _allow_if(0, (_AF_UNIX,)),
        "ioctl": _refuse_if(1, (_TIOCSTI, _TIOCLINUX)),
        # a worker must not outlive the process that answers for it
        "prctl": _refuse_if(0, (_PR_SET_PDEATHSIG,)),
    }
    if not fork:
        # threads are needed (numpy starts some); a process would be left running when the job is over
        rules["clone"] = [
            _argument(0),
            (_JSET, 1, 0, _NEW_NAMESPACES),
            (_JSET, 1, 0, _THREAD),
            _EPERM,
            _PERMIT,
        ]
        # Landlock does not look at sockets in the file system: nothing that could reach one may exist
        rules["socket"] = [_EPERM]
        # a stream has two fixed ends; a datagram socket could be connected to another address
        rules["socketpair"] = [
            _argument(0),
            (_JEQ, 0, 4, _AF_UNIX),
            _argument(1),
            (_AND, 0, 0, 0xF),
            (_JEQ, 0, 1, _SOCK_STREAM),
            _PERMIT,
            _EPERM,
        ]
        # 0 means the caller, or its process group, which is the job's own
        for name in ("kill", "tgkill", "rt_sigqueueinfo", "prlimit64", "sched_setaffinity"):
            rules[name] = _allow_if(0, (0, _OWN_PID))
    return rules


def build(machine: str = MACHINE, *, fork: bool = True) -> bytes:
    """Return the filter as the kernel reads it: 8 bytes an instruction.

    Args:
        machine: "x86_64" or "aarch64".
        fork: False refuses new processes (threads stay), and signals to any process but the own.

    Raises:
        OSError: There is no table for this machine.
    """
    if machine not in NUMBERS:
        raise OSError(errno.ENOSYS, f"no system-call table for {machine}")
    numbers = NUMBERS[machine]
    leaves: dict[int, _Code] = {number: [_UNKNOWN] for gap in GAPS[machine] for number in gap}
    for name in REFUSED if fork else REFUSED | _NO_FORK:
        if name in numbers:
            leaves[numbers[name]] = [_EPERM]
    for name, code in _special(fork=fork).items():
        leaves[numbers[name]] = code
    # Invariant: spans are sorted by their first number, and each reaches to the next one's.
    spans: list[tuple[int, _Code]] = [(0, [_PERMIT])]
    for number in sorted(leaves):
        if spans[-1][0] == number:
            spans[-1] = (number, leaves[number])
        elif spans[-1][1] != leaves[number]:
            spans.append((number, leaves[number]))
        if number + 1 not in leaves:
            spans.append((number + 1, [_PERMIT]))
    spans.append((FIRST_UNKNOWN, [_UNKNOWN]))
    # Numbers mean other calls on another architecture, so that is looked at first (offset 4 of seccomp_data).
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
    """Return a binary search over spans of call numbers."""
    if len(spans) == 1:
        return spans[0][1]
    middle = len(spans) // 2
    below, above = _search(spans[:middle]), _search(spans[middle:])
    # A conditional jump has eight bits; a longer way takes an unconditional one, which has 32.
    if len(below) > 255:
        return [(_JGE, 0, 1, spans[middle][0]), (0x05, 0, 0, len(below)), *below, *above]
    return [(_JGE, len(below), 0, spans[middle][0]), *below, *above]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(program: bytes, *, own_pid: int) -> None:
    """Confine this process and all its threads; needs no_new_privs."""
    program = program.replace(struct.pack("=I", _OWN_PID), struct.pack("=I", own_pid))
    code = ctypes.create_string_buffer(program, len(program))
    header = _Program(len(program) // 8, ctypes.addressof(code))
    try:
        syscall("seccomp", 1, 1, ctypes.addressof(header))  # SET_MODE_FILTER, TSYNC
    except OSError:
        prctl(22, 2, ctypes.addressof(header))  # a single thread is all there is


def run(program: bytes, number: int, arguments: tuple[int, ...] = (), machine: str = MACHINE) -> int:
    """Interpret a filter as the kernel would; for tests and the doctor. Returns the action."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=iIQ6Q", number, _ARCHES[machine], 0, *(a & (2**64 - 1) for a in padded))
    steps = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    tests: dict[int, Callable[[int, int], bool]] = {
        _JEQ: lambda a, k: a == k,
        _JGE: lambda a, k: a >= k,
        _JSET: lambda a, k: bool(a & k),
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
