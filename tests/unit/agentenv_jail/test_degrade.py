"""Where the kernel refuses namespaces, as in Docker's default profile, and where it has no Landlock either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sandbox

SYSTEM = "/usr/bin/python3"
REFUSED = "unshare(0x10000000): Operation not permitted"
BLOCKED = """
import asyncio, errno, os, struct, sys
from agentenv.core import Context, SandboxUnavailable
from agentenv.sandbox import create, doctor
from agentenv_jail.jail import kernel, seccomp

UNSHARE, LANDLOCK = seccomp.NUMBERS[kernel.MACHINE]["unshare"], 444
steps = [(0x20, 0, 0, 0)]
for number, error in ((UNSHARE, errno.EPERM), (LANDLOCK, errno.ENOSYS)):
    if sys.argv[1] == "all" or number == UNSHARE:
        steps += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | error)]
steps.append((0x06, 0, 0, 0x7FFF0000))
kernel.prctl(38, 1)
seccomp.install(b"".join(struct.pack("=HBBI", *step) for step in steps), own_pid=0)

async def main():
    async with create("auto", size=1, python=sys.argv[2] or None) as sandbox:
        print(sandbox.description, (await sandbox.run_code("print(6 * 7)")).stdout)

try:
    asyncio.run(main())
except SandboxUnavailable as error:
    print(error)
print(doctor().text())
if sys.argv[1] == "all":
    from agentenv.envs import spec
    env = spec("agentenv/PythonMath-v0").make()
    task = next(iter(spec("agentenv/PythonMath-v0").task_set("test")))
    try:
        asyncio.run(env.begin(task.data, seed=0, context=Context(task=task.data)))
    except SandboxUnavailable:
        print("the environment refuses")
"""


def blocked(what: str) -> str:
    python = SYSTEM if os.geteuid() == 0 and Path(SYSTEM).exists() else ""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, what, python],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_namespaces_landlock_runs_and_the_doctor_says_why():
    said = blocked("namespaces")
    if "landlock: landlock_create_ruleset" in said or "the kernel has no Landlock" in said:
        pytest.skip(f"UNTESTED tier landlock: {said}")

    assert said.startswith("local (landlock) 42\n")
    assert REFUSED in said.partition("no  namespace: ")[2].partition("\n")[0]
    assert "fix: docker run --security-opt seccomp=unconfined" in said


def test_without_both_everything_that_needs_isolation_refuses_and_says_what_to_do():
    said = blocked("all")

    assert said.startswith("no isolation on this machine. namespace: ")
    assert REFUSED in said.partition("; landlock: ")[0]
    assert "landlock: OSError: [Errno 38] the kernel has no Landlock" in said
    assert 'backend "none", which runs model code with NO isolation' in said
    assert "sandbox: NO ISOLATION" in said
    assert said.endswith("the environment refuses\n")
