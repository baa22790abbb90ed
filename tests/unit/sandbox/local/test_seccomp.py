"""The system-call filter, run by an interpreter of its instructions, for both machines."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from agentenv.sandbox.local.jail import kernel, seccomp

KILL, ALLOW, EPERM, ENOSYS = 0x80000000, 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
MACHINES = ["x86_64", "aarch64"]
SPECIAL = {
    "clone", "clone3", "socket", "socketpair", "ioctl", "prctl", "kill", "tgkill", "rt_sigqueueinfo", "prlimit64",
    "sched_setaffinity", "fork", "vfork", "tkill", "pidfd_open", "pidfd_send_signal", "rt_tgsigqueueinfo",
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("fork", [True, False])
def test_every_number_gets_the_answer_that_the_table_gives(machine, fork):
    program = seccomp.build(machine, fork=fork)
    names = {number: name for name, number in seccomp.NUMBERS[machine].items()}

    for number in range(seccomp.FIRST_UNKNOWN):
        name = names.get(number, "")
        action = seccomp.run(program, number, (), machine)
        if name in seccomp.REFUSED:
            assert action == EPERM, name
        elif any(number in gap for gap in seccomp.GAPS[machine]):
            assert action == ENOSYS, number
        elif name not in SPECIAL:
            assert action == ALLOW, (number, name)
    for number in (seccomp.FIRST_UNKNOWN, seccomp.FIRST_UNKNOWN + 1, 500, 1000, 0x3FFFFFFF):
        assert seccomp.run(program, number, (), machine) == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide_where_they_should(machine):
    program, numbers = seccomp.build(machine), seccomp.NUMBERS[machine]

    def ask(name: str, *arguments: int) -> int:
        return seccomp.run(program, numbers[name], arguments, machine)

    assert ask("socket", 1) == ALLOW
    assert all(ask("socket", family) == EPERM for family in (0, 2, 10, 16, 17, 38, 40))
    assert ask("socket", 1 << 32 | 2) == EPERM
    assert ask("clone", 0x11) == ALLOW
    assert all(ask("clone", 0x11 | 1 << bit) == EPERM for bit in (17, 25, 26, 27, 28, 29, 30))
    assert ask("clone3") == ENOSYS
    assert ask("ioctl", 1, 0x5401) == ALLOW
    assert ask("ioctl", 1, 0x5412) == EPERM
    assert ask("ioctl", 1, 1 << 32 | 0x5412) == EPERM
    assert ask("prctl", 1) == EPERM
    assert ask("prctl", 15) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_without_a_pid_namespace_only_threads_and_own_signals_are_left(machine):
    program, numbers = seccomp.build(machine, fork=False), seccomp.NUMBERS[machine]

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
    assert ask("pidfd_open", 1) == EPERM
    if machine == "x86_64":
        assert ask("fork") == ask("vfork") == EPERM


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

    ours = seccomp.NUMBERS[machine]

    assert {name: known.get(name, number) for name, number in ours.items()} == ours
    assert not [name for name in seccomp.REFUSED if name in known and name not in ours]
    real = {
        number for name, number in known.items() if not name.endswith(("time64", "arch_specific_syscall"))
    }
    gaps = {number for gap in seccomp.GAPS[machine] for number in gap}
    assert not real & gaps
    assert set(range(max(real))) - real <= gaps | {335, 336}
