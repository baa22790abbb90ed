"""What a job cannot learn of the jobs before it and beside it, though they share a worker or a jail."""

from __future__ import annotations

import os

import pytest

from agentenv.core import SandboxUnavailable
from agentenv.sandbox import SandboxLimits, create
from agentenv_jail.jail import landlock

pytestmark = pytest.mark.sandbox

LEAVE = """
import os
word = '-'.join(['left', 'over', os.environ['WORD']])
{how}
"""
SEARCH = """
import os
word = '-'.join(['left', 'over', os.environ['WORD']]).encode()
found = 0
for line in open('/proc/self/maps') if os.path.exists('/proc/self/maps') else []:
    low, high = (int(end, 16) for end in line.split()[0].split('-'))
    if 'rw' in line.split()[1]:
        with open('/proc/self/mem', 'rb', 0) as memory:
            memory.seek(low)
            data = memory.read(high - low)
        found += data.replace(word, b'', 1).count(word) if word in data else 0
print(found, os.getpid())
"""
LISTEN = """
import socket
listener = socket.socket(socket.AF_UNIX)
listener.bind('\\0between-jobs')
listener.listen()
"""
CONNECT = """
import socket
s = socket.socket(socket.AF_UNIX)
try:
    s.connect('\\0between-jobs')
except OSError as error:
    print('refused', error.errno)
"""


def sandbox_of(tier: str, **options: object):
    python = "/usr/bin/python3" if tier == "landlock" and os.geteuid() == 0 else None
    return create(tier, limits=SandboxLimits(timeout_s=20), python=python, **options)


@pytest.mark.parametrize(
    "how",
    [
        "kept = [word * 50]",
        "print(word * 50)",
        "open('x', 'w').write(word * 50)",
        "open(word * 10, 'w').close(); os.unlink(word * 10)",
        "raise ValueError(word * 50)",
    ],
)
async def test_memory_holds_nothing_of_the_job_before(how, monkeypatch):
    # With Landlock the searcher could not read its own memory.
    monkeypatch.setattr(landlock, "abi", lambda: 0)
    try:
        async with sandbox_of("namespace", size=1, concurrency=1) as sandbox:
            await sandbox.run_code(LEAVE.format(how=how), env={"WORD": "a1"})
            after = await sandbox.run_code(SEARCH, env={"WORD": "a1"})
            control = await sandbox.run_code(
                LEAVE.format(how="kept = word * 50") + SEARCH, env={"WORD": "a1"}
            )
    except SandboxUnavailable as error:
        pytest.skip(f"UNTESTED tier namespace: {error}")

    assert after.status == "ok", after.stderr
    assert int(after.stdout.split()[0]) <= 1  # the searcher's own word, in one more place at most
    assert int(control.stdout.split()[0]) >= 49


@pytest.mark.parametrize("tier", ["namespace", "landlock"])
async def test_a_worker_is_used_again_only_where_nothing_was_left(tier):
    try:
        async with sandbox_of(tier, size=1, concurrency=1) as sandbox:
            inits = []
            for code in ("print(1)", "print(2)", "open('x', 'w')", "print(3)"):
                inits.append(set(sandbox._pool._workers))
                assert (await sandbox.run_code(code)).status == "ok"
            inits.append(set(sandbox._pool._workers))
    except SandboxUnavailable as error:
        pytest.skip(f"UNTESTED tier {tier}: {error}")

    assert inits[0] == inits[1] == inits[2]
    assert inits[2].isdisjoint(inits[4])


async def test_jobs_side_by_side_cannot_talk_through_abstract_sockets():
    try:
        async with sandbox_of("namespace", size=2, concurrency=2) as sandbox, sandbox.session() as listener:
            assert (await listener.run_code(LISTEN)).status == "ok"
            beside = await sandbox.run_code(CONNECT)
            itself = await listener.run_code(CONNECT)
    except SandboxUnavailable as error:
        pytest.skip(f"UNTESTED tier namespace: {error}")

    assert beside.stdout.split()[:1] == ["refused"]
    assert (itself.status, itself.stdout) == ("ok", "")
