"""The system-call filter, run by an interpreter of its instructions, for both machines."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from agentenv_jail.jail import calls, kernel, seccomp

KILL, ALLOW, EPERM, ENOSYS = 0x80000000, 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
MACHINES = ["x86_64", "aarch64"]
NONE, NOTTY, NOPROTO, UNSUPPORTED = (
    0x50000 | number for number in (0, errno.ENOTTY, errno.ENOPROTOOPT, errno.EOPNOTSUPP)
)


@pytest.mark.parametrize("machine", MACHINES)
def test_only_reviewed_calls_are_made(machine):
    program = seccomp.build(machine)
    names = {number: name for name, number in calls.NUMBERS[machine].items()}

    for number in [*range(600), 1000, 0x3FFFFFFF]:
        name = names.get(number, "")
        action = seccomp.run(program, number, (), machine)
        if name in calls.REFUSED:
            assert action == EPERM, name
        elif name in calls.PRETENDED:
            assert action == NONE, name
        elif name in calls.ALLOWED:
            assert action == ALLOW, name
        elif name not in seccomp._special():
            assert action == ENOSYS, (number, name)


def test_no_call_is_in_two_lists():
    lists = [calls.ALLOWED, calls.PRETENDED, calls.REFUSED, frozenset(seccomp._special())]
    known = set(calls.NUMBERS["x86_64"]) | set(calls.NUMBERS["aarch64"])

    assert sum(map(len, lists)) == len(frozenset().union(*lists))
    assert frozenset().union(*lists) <= known


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide_where_they_should(machine):
    program, numbers = seccomp.build(machine), calls.NUMBERS[machine]

    def ask(name: str, *arguments: int) -> int:
        return seccomp.run(program, numbers[name], arguments, machine)

    assert ask("socket", 1) == ALLOW
    assert all(ask("socket", family) == EPERM for family in (0, 2, 10, 16, 17, 38, 40))
    assert ask("socket", 1 << 32 | 2) == EPERM
    assert ask("clone", 0x11) == ALLOW
    assert all(ask("clone", 0x11 | 1 << bit) == EPERM for bit in (17, 25, 26, 27, 28, 29, 30))
    assert ask("clone3") == ENOSYS
    assert ask("ioctl", 1, 0x5401) == ALLOW
    assert all(
        ask("ioctl", 1, number) == NOTTY for number in (0x5412, 1 << 32 | 0x5412, 0x8912, 0x8901, 0x5452)
    )
    assert ask("prctl", 15) == ask("prctl", 4) == ALLOW
    assert all(ask("prctl", option) == EPERM for option in (1, 22, 35, 59, 62))
    assert ask("fcntl", 3, 6) == ask("fcntl", 3, 4, 0x800) == ALLOW
    assert ask("fcntl", 3, 4, 0x2000) == ask("fcntl", 3, 4, 0x2800) == EPERM
    assert all(ask("fcntl", 3, command) == EPERM for command in (8, 10, 15, 1024, 1026, 1031))
    assert ask("madvise", 0, 4096, 4) == ask("madvise", 0, 4096, 14) == ALLOW
    assert ask("madvise", 0, 4096, 21) == EPERM
    assert ask("setsockopt", 3, 1, 2) == ALLOW
    assert ask("setsockopt", 3, 1, 26) == EPERM
    assert ask("setsockopt", 3, 0, 2) == NOPROTO


@pytest.mark.parametrize("machine", MACHINES)
def test_without_a_pid_namespace_only_threads_and_own_signals_are_left(machine):
    program, numbers = seccomp.build(machine, fork=False), calls.NUMBERS[machine]

    def ask(name: str, *arguments: int) -> int:
        return seccomp.run(program, numbers[name], arguments, machine)

    assert ask("clone", 0x11) == EPERM
    assert ask("clone", 0x3D0F00) == ALLOW
    assert ask("clone", 0x3D0F00 | 0x20000) == EPERM
    assert ask("kill", 1, 9) == EPERM
    assert ask("kill", 0xFFFFFFFF, 9) == EPERM
    assert ask("kill", 0, 15) == ALLOW
    assert ask("socket", 1) == EPERM
    assert ask("socketpair", 1, 1) == ALLOW
    assert ask("socketpair", 1, 1 | 0o2000000) == ALLOW
    assert ask("socketpair", 1, 2) == EPERM
    assert ask("socketpair", 2, 1) == EPERM
    assert ask("pidfd_open", 1) == ask("sendmsg", 3) == ask("bind", 3) == EPERM
    assert ask("clone", 0x10900) == EPERM  # a thread with open files of its own
    assert ask("close_range", 9, 9, 0) == ask("close_range", 9, 9, 4) == ALLOW
    assert ask("close_range", 9, 9, 2) == ask("close_range", 9, 9, 6) == EPERM
    assert ask("fchmod", 3) == ask("fchownat", 3) == ask("utimensat", 3) == NONE
    assert ask("setxattr", 3) == ask("fgetxattr", 3) == ask("fallocate", 3) == UNSUPPORTED
    assert ask("prctl", 4) == ask("prctl", 1) == EPERM
    assert ask("openat2", 3) == ENOSYS
    if machine == "x86_64":
        assert ask("fork") == ask("vfork") == EPERM


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("version", "action"), [(1, EPERM), (2, EPERM), (3, ALLOW), (7, ALLOW)])
def test_a_kernel_whose_landlock_does_not_know_that_a_file_is_cut_must_not_cut_one(machine, version, action):
    program, numbers = seccomp.build(machine, fork=False, landlock=version), calls.NUMBERS[machine]

    def opened(flags: int) -> int:
        return seccomp.run(program, numbers["openat"], (0, 0, flags), machine)

    assert seccomp.run(program, numbers["truncate"], (), machine) == action
    assert opened(0o1000) == opened(0o1003) == opened(0o2001000) == action
    assert opened(0) == opened(0o1001) == opened(0o1102) == ALLOW


def test_x32_numbers_and_foreign_machines_kill():
    program = seccomp.build("x86_64")

    assert seccomp.run(program, 0x40000000 + 39, (), "x86_64") == KILL
    assert seccomp.run(program, 39, (), "aarch64") == KILL
    assert seccomp.run(seccomp.build("aarch64"), 172, (), "x86_64") == KILL
    with pytest.raises(OSError, match="riscv64"):
        seccomp.build("riscv64")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("arch", [0x40000003, 0x40000028, 0x800000B7], ids=["i386", "arm", "aarch64_be"])
def test_programs_for_other_machines_are_killed_whatever_they_call(machine, arch, monkeypatch):
    program = seccomp.build(machine)
    monkeypatch.setitem(seccomp._ARCHES, "foreign", arch)

    assert {seccomp.run(program, number, (), "foreign") for number in range(460)} == {KILL}


def test_a_32_bit_interpreter_has_no_table_on_any_kernel(monkeypatch):
    assert kernel._machine("aarch64", 64) == "aarch64"
    for name in ("aarch64", "x86_64"):
        monkeypatch.setattr(kernel, "MACHINE", kernel._machine(name, 32))

        with pytest.raises(OSError, match="32-bit"):
            seccomp.build(kernel.MACHINE)
        with pytest.raises(OSError, match=r"capset: no number for .*32-bit"):
            kernel.syscall("capset", 0, 0)


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_the_numbers_are_those_of_the_kernel_headers(machine, header):
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    text = Path(header).read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}

    ours = calls.NUMBERS[machine]
    real = {
        number for name, number in known.items() if not name.endswith(("time64", "arch_specific_syscall"))
    } - {451}  # on aarch64 the header has the number of calls there

    assert {name: known.get(name, number) for name, number in ours.items()} == ours
    assert real <= set(ours.values())
