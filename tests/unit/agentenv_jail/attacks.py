"""The attack suite: what model-written code might try, and what must come of it.

Runs under pytest (test_attacks.py), and by itself as any user, with nothing but agentenv:

    python tests/unit/agentenv_jail/attacks.py --tier namespace [--quick] [--python /usr/bin/python3]

With `--tier podman:IMAGE` it plays them in a container. An execution takes a second there, so what can be
tried beside others is tried in one; what is not held then is played again alone, and only that counts.

Code prints BREACH where it got what it must not get. Around each case a small world is watched:
secrets in a file and in the environment, listeners on TCP, UDP and an abstract socket, a directory
that anyone may write, a process beside us, and marked processes left behind. After each case an
honest execution must work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from more_attacks import MORE
from new_attacks import NEW

from agentenv.core import SandboxUnavailable
from agentenv.sandbox import SandboxLimits, create
from agentenv_jail.backend import LocalSandbox
from agentenv_jail.jail import landlock

LIMITS = SandboxLimits(
    timeout_s=20.0, memory_bytes=192 << 20, address_space_bytes=256 << 20, max_processes=16, work_bytes=8 << 20,
    shm_bytes=4 << 20, max_file_bytes=8 << 20, max_output_bytes=2 << 20,
)  # fmt: skip
MOST_DISK_BYTES = 512 << 20
"""The limit is 16 MiB; what is beyond it is written between two looks, and by others on the machine."""
OTHERWISE_IN_CONTAINERS = {
    *("dos: memory files", "dos: inodes", "dos: directories that nobody may enter"),
    *("kill: host and init", "kill: stop the init", "kill: signals by every door"),
    *("state: files", "state: neighbours", "state: marks on the directories"),
    *("read: home directories", "read: environment of others", "read: kernel messages and symbols"),
    *("read: a device", "write: system files", "meta: links of other processes"),
    *("priv: outlive the init", "priv: personalities", "net: loopback UDP", "net: listen"),
    *("net: raw, packet, netlink, vsock, alg", "kernel: a lease on a file of one's own"),
    *("kernel: a lock on the interpreter", "kernel: directory notices", "kernel: pipes of a megabyte"),
    *("kernel: signals of a pipe to another process", "kernel: signals of a socket to another process"),
    "kernel: addresses of the machine's network through any socket",
    "kernel: filters, core scheduling and other settings",
    *("kernel: advice on memory of others", "kernel: barriers on all processors"),
    "kernel: gifts between pipes, keys of memory, shadow stacks",
    *("kernel: lists of locks of others", "kernel: processors and priorities of others"),
}
"""Cases that get further in a container. They must do no harm there either."""
DISK_TAKEN = "MiB of the disk were taken"
NO_THREAD = "_start_new_thread("
"""Stands in an error of a case for which the threads of the user's earlier cases had not ended yet."""
TRIES = 4
"""Attempts at a case that failed for what others do: what a case does itself, it does each time."""
HANGS_S = 90
"""Several times the limit: nothing but a limit that is not kept takes so long, on a busy machine too."""

PRELUDE = """
import ctypes, errno, gc, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
def refused(what, f, *a, **k):
    try:
        got = f(*a, **k)
    except (OSError, ValueError, AttributeError, ImportError, PermissionError) as e:
        print("refused", what, type(e).__name__)
    else:
        print("BREACH", what, repr(got)[:80])
def sc(n, *a):
    r = libc.syscall(*[ctypes.c_long(x) for x in (n, *a)])
    if r == -1:
        e = ctypes.get_errno()
        raise OSError(e, os.strerror(e))
    return r
"""


@dataclass(frozen=True)
class Case:
    """One attempt, and what must come of it."""

    category: str
    name: str
    code: str
    status: str = "ok"
    """Regular expression over the status."""
    out: str = ""
    """Regular expression that the standard output must match."""
    err: str = ""
    exit_code: int | None = None
    quick: bool = False
    tiers: tuple[str, ...] = ("namespace", "landlock")
    timeout_s: float | None = None
    """Short where the limit must end it; else so long that no busy machine reaches it."""
    only: str = ""
    """Machine that the case is for."""
    session: bool = False
    """True runs the code as the first step of a session, which then has to read a file and run a step."""

    @property
    def key(self) -> str:
        """Category and name."""
        return f"{self.category}: {self.name}"

    @property
    def fits_beside_others(self) -> bool:
        """Whether it can be tried in a process of an execution that tries others, before and after it."""
        plain = self.exit_code is None and not (self.session or self.err or self.timeout_s)
        return plain and self.status == "ok" and self.category in BESIDE_OTHERS


BESIDE_OTHERS = ("read", "priv", "net", "write", "kernel", "meta", "useful")
BESIDE = """
import json, subprocess, sys
for code in json.loads(CODES):
    done = subprocess.run([sys.executable, "-B", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    out = done.stdout.decode(errors="replace")
    print(json.dumps([done.returncode, "BREACH" in out, out if len(out) < 300 else out[-300:]]), flush=True)
"""
CASES: list[Case] = []


def case(category: str, name: str, code: str, **options: object) -> None:
    CASES.append(Case(category, name, code, **options))  # pyright: ignore[reportArgumentType]


NS = ("namespace",)
ANY = "ok|error|killed|memory|timeout|output_limit"

# dos: exhaust something
case("dos", "busy loop", "while True: pass", status="timeout", quick=True, timeout_s=0.5)
case("dos", "sleep", "time.sleep(60)", status="timeout", timeout_s=0.3)
case(
    "dos",
    "signals ignored",
    "for n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n except (OSError, ValueError): pass\nwhile True: pass",
    status="timeout",
    timeout_s=0.5,
)
case(
    "dos",
    "fork bomb",
    "while True:\n try: os.fork()\n except OSError: time.sleep(0.01)",
    status="timeout",
    timeout_s=1.0,
    quick=True,
)
case(
    "dos",
    "processes are counted",
    "n = 0\ntry:\n while n < 100:\n  if os.fork() == 0: time.sleep(60)\n  n += 1\nexcept OSError: pass\nprint('BREACH' if n > 16 else 'few')",
    out="few",
)
case(
    "dos",
    "thread bomb",
    "n = 0\ntry:\n while n < 500:\n  threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\nexcept RuntimeError: pass\nprint('BREACH' if n > 100 else 'few'); os._exit(0)",
    out="few",
)
case(
    "dos",
    "memory in a list",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    status="memory",
    quick=True,
)
case(
    "dos",
    "memory error swallowed",
    "x = []\nwhile True:\n try: x.append(bytearray(1 << 20))\n except MemoryError: pass",
    status="timeout|memory",
    timeout_s=1.0,
)
case("dos", "one huge block", "b'x' * (1 << 40)", status="error", err="MemoryError")
case(
    "dos",
    "memory over processes",
    "for _ in range(8):\n if os.fork() == 0:\n  x = bytearray(60 << 20)\n  for i in range(0, len(x), 4096): x[i] = 1\n  time.sleep(60)\ntime.sleep(60)",
    status="memory",
    tiers=NS,
)
case(
    "dos",
    "shared memory over processes",
    "import mmap\nfor _ in range(8):\n if os.fork() == 0:\n  x = mmap.mmap(-1, 60 << 20)\n  for i in range(0, len(x), 4096): x[i] = 1\n  time.sleep(60)\ntime.sleep(60)",
    status="memory",
    tiers=NS,
)
case("dos", "memory files", "refused('memfd', os.memfd_create, 'x')", quick=True)
case("dos", "System V memory", "refused('shmget', sc, 29 if X86 else 194, 0, 1 << 26, 0o1600)")
case("dos", "message queues", "refused('mq_open', sc, 240 if X86 else 180, 0, 0, 0, 0)")
case(
    "dos",
    "fill the working directory",
    "try:\n for n in range(100): open(f'f{n}', 'wb').write(b'x' * (1 << 20))\nexcept OSError as e: print(e.errno == errno.ENOSPC)\nprint('BREACH' if n > 60 else 'full')",
    out="full",
    status="ok|killed",
    tiers=NS,
)
case(
    "dos",
    "fill the disk without mounts",
    "n = 0\nwhile True:\n open(f'f{n}', 'wb').write(b'x' * (1 << 20)); n += 1\n if n > 2000: print('BREACH'); break",
    status="killed",
    tiers=("landlock",),
)
case(
    "dos",
    "fill /tmp and /dev/shm",
    "for d, most in (('/tmp', 9), ('/dev/shm', 5)):\n n = 0\n try:\n  while n < 100:\n   open(f'{d}/f{n}', 'wb').write(b'x' * (1 << 20)); n += 1\n except OSError: pass\n print('BREACH' if n > most else 'full')",
    out="full",
    tiers=NS,
)
case(
    "dos",
    "one file too large",
    "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nf = open('big', 'wb')\nrefused('truncate', f.truncate, 1 << 30)",
)
case(
    "dos",
    "inodes",
    "n = 0\ntry:\n while n < 20000: open(f'{n}', 'w').close(); n += 1\nexcept OSError: pass\nprint('BREACH' if n > 8192 else 'few')",
    out="few",
    tiers=NS,
)
case(
    "dos",
    "inodes without mounts",
    "n = 0\nwhile True: open(f'{n}', 'w').close(); n += 1",
    status="killed|timeout",
    tiers=("landlock",),
    timeout_s=2.0,
)
case(
    "dos",
    "deep directories",
    "try:\n for n in range(2000): os.mkdir('d'); os.chdir('d')\nexcept OSError: pass\nprint('deep')",
    status="ok|timeout|killed",
    timeout_s=4.0,
)
case(
    "dos",
    "descriptors",
    "n = 0\ntry:\n while n < 5000: os.open('/dev/null', 0); n += 1\nexcept OSError: pass\nprint('BREACH' if n > 128 else 'few')",
    out="few",
)
case("dos", "flood standard output", "while True: print('x' * 100000)", status="output_limit", quick=True)
case("dos", "flood standard error", "while True: os.write(2, b'x' * 100000)", status="output_limit")
case("dos", "one huge write", "print('x' * 50_000_000)", status="output_limit")
case(
    "dos",
    "flood of empty lines from threads",
    "def f():\n while True: os.write(1, b'\\n' * 4096)\nfor _ in range(4): threading.Thread(target=f).start()",
    status="output_limit",
)
case(
    "dos",
    "recursion",
    "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    status="error|killed|memory|timeout",
    timeout_s=3.0,
)
case("dos", "crash by a null pointer", "ctypes.string_at(0)", status="killed", exit_code=-11, quick=True)
case("dos", "stop oneself", "os.kill(os.getpid(), signal.SIGSTOP)", status="timeout", timeout_s=0.5)
case(
    "dos",
    "catastrophic pattern",
    "import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')",
    status="timeout",
    timeout_s=0.5,
)
case(
    "dos",
    "a number too long",
    "x = 10 ** (10 ** 8)\nprint(x.bit_length())",
    status="timeout|ok|memory",
    timeout_s=0.5,
)
case(
    "dos",
    "zombies",
    "n = 0\ntry:\n while n < 200:\n  if os.fork() == 0: os._exit(0)\n  n += 1\nexcept OSError: pass\nprint('BREACH' if n > 16 else 'few')",
    out="few",
)
case(
    "dos",
    "pipes full of data",
    "n = 0\ntry:\n while True:\n  r, w = os.pipe(); os.set_blocking(w, False); n += os.write(w, b'x' * (1 << 20))\nexcept OSError: pass\nprint('BREACH' if n > 1 << 27 else 'bounded')",
    out="bounded",
)

# read: secrets of the host
case("read", "a file by its name", "refused('open', open, SECRET_FILE)", quick=True)
case(
    "read",
    "a file by a link",
    "os.symlink(SECRET_FILE, 'link')\nrefused('link', open, 'link')\nprint('done')",
    out="done",
    quick=True,
)
case("read", "a file by a hard link", "refused('link', os.link, SECRET_FILE, 'hard')")
case(
    "read",
    "shadow and ssh keys",
    "for p in ('/etc/shadow', '/etc/sudoers', '/root/.ssh/id_rsa', '/root/.bashrc'): refused(p, open, p)",
)
case(
    "read",
    "home directories",
    "for p in ('/home', '/var', '/opt', '/mnt', '/srv', '/boot'): refused(p, os.listdir, p)",
    quick=True,
)
case(
    "read",
    "environment",
    "print(os.environ)\nprint('BREACH' if any('SECRET' in k for k in os.environ) else 'clean')",
    out="clean",
    quick=True,
)
case(
    "read",
    "environment of others",
    "for p in ('1', str(os.getppid()), str(HOST_PID), '2'):\n if p == str(os.getpid()): continue\n for f in ('environ', 'maps', 'mem', 'fd', 'cwd/x', 'root/etc/shadow', 'cmdline'):\n  try:\n   path = f'/proc/{p}/{f}'\n   data = os.listdir(path) if f == 'fd' else open(path, 'rb').read(99)\n   if data: print('BREACH', path, data[:40])\n  except OSError as e: pass\nprint('done')",
    out="done",
)
case(
    "read",
    "memory of the init",
    "refused('vm', sc, 310 if X86 else 270, os.getppid() or 1, 0, 0, 0, 0, 0)\nrefused('ptrace', sc, 101 if X86 else 117, 16, os.getppid() or 1, 0, 0)",
)
case(
    "read",
    "descriptors left open",
    "for n in range(3, 1024):\n try: os.fstat(n); print('BREACH', n)\n except OSError: pass\nprint('done')",
    out="done",
    quick=True,
)
case(
    "read",
    "descriptors of others",
    "fd = -1\ntry: fd = sc(434, os.getppid() or 1, 0)\nexcept OSError: pass\nrefused('getfd', sc, 438, fd, 3, 0)",
)
case(
    "read",
    "objects of the launcher",
    "words = ('agentenv-sandbox', 'ATTACK_SECRET')\nfor o in gc.get_objects():\n try:\n  if isinstance(o, dict) and any(isinstance(v, socket.socket) and v.fileno() != -1 for v in o.values()): print('BREACH socket')\n except Exception: pass\nprint('done')",
    out="done",
)
case(
    "read",
    "packages of the host",
    "import glob\nfound = glob.glob('/usr/lib/python3*/dist-packages/*') + glob.glob(sys.prefix + '/lib/python3*/site-packages/*') + glob.glob('/usr/local/lib/python3*/*-packages/*')\nprint('BREACH' if found else 'hidden', found[:3])",
    out="hidden",
    quick=True,
)
case(
    "read",
    "wheels that come with Python",
    "found = [n for top in ('/usr', sys.prefix) for _, _, names in os.walk(top) for n in names if n.endswith('.whl')]\nprint('BREACH' if found else 'hidden', found[:3])",
    out="hidden",
)
case(
    "read",
    "paths of the host",
    "for f in ('cmdline', 'mountinfo', 'mounts', 'mountstats'):\n try: t = open('/proc/self/' + f).read()\n except OSError: continue\n if HOST_PREFIX + '/lib' in t: print('BREACH', f)\nprint('done')",
    out="done",
    quick=True,
)
case("read", "handles", "refused('handle', sc, 304 if X86 else 265, -100, 0, 0)")
case(
    "read",
    "kernel messages and symbols",
    "refused('syslog', sc, 103 if X86 else 116, 3, 0, 100)\nfor p in ('/proc/kallsyms', '/proc/kcore', '/proc/kmsg', '/sys/kernel', '/dev/mem', '/dev/kmsg'): refused(p, lambda: open(p, 'rb').read(10) or 1)",
)
case(
    "read",
    "a device",
    "for p in ('/dev/vda', '/dev/sda', '/dev/nvme0n1', '/dev/kvm', '/dev/fuse', '/dev/tty', '/dev/ptmx'): refused(p, open, p, 'rb')",
)

# priv: gain privileges or kernel surface
case(
    "priv",
    "become root",
    "for f, a in ((os.setuid, (0,)), (os.setgid, (0,)), (os.setgroups, ([0],)), (os.setresuid, (0, 0, 0))): refused(f.__name__, f, *a)\nprint(os.getuid(), os.geteuid())",
    out="refused",
    quick=True,
)
case(
    "priv",
    "new namespaces",
    "for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000): refused(hex(flag), sc, 272 if X86 else 97, flag)",
    quick=True,
)
case(
    "priv",
    "new namespaces by clone",
    "for flag in (0x10000000, 0x20000, 0x20000000):\n refused('clone', sc, 56 if X86 else 220, flag | 17, 0, 0, 0, 0)\nrefused('clone3', sc, 435, 0, 0)",
    quick=True,
)
case(
    "priv",
    "mounts and roots",
    "for n, a in ((165 if X86 else 40, (0, 0, 0, 0, 0)), (166 if X86 else 39, (0, 2)), (155 if X86 else 41, (0, 0)), (428, (-100, 0, 1)), (429, (0, 0, 0, 0, 0)), (430, (0, 0)), (442, (0, 0, 0, 0, 0))): refused(n, sc, n, *a)\nrefused('chroot', os.chroot, '.')",
    quick=True,
)
case(
    "priv",
    "tracing and kernel machinery",
    "for n in ((321, 298, 323, 425, 426, 427, 246, 175, 313, 176, 317) if X86 else (280, 241, 282, 425, 426, 427, 104, 105, 273, 106, 277)): refused(n, sc, n, 0, 0, 0, 0, 0)",
    quick=True,
)
case(
    "priv",
    "keyrings",
    "for n in ((248, 249, 250) if X86 else (217, 218, 219)): refused(n, sc, n, 0, 0, 0, 0, 0)",
)
case(
    "priv",
    "clocks and machine state",
    "for n in ((227, 164, 169, 170, 163, 167) if X86 else (112, 170, 142, 161, 89, 224)): refused(n, sc, n, 0, 0, 0, 0)\nrefused('settime', time.clock_settime, 0, 0)",
)
case(
    "priv",
    "newer calls than the table",
    "for n in (457, 458, 459, 462, 470, 500, 600): refused(n, sc, n, 0, 0, 0, 0, 0)",
)
case(
    "priv",
    "foreign numbers (x32)",
    "sc(0x40000000 + 39)\nprint('BREACH')",
    status="killed",
    exit_code=-31,
    only="x86_64",
    quick=True,
)
case(
    "priv",
    "foreign numbers (int 0x80)",
    "import mmap\ncode = b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3'\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(code)\nf = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\nprint('BREACH', f())",
    status="killed",
    exit_code=-31,
    only="x86_64",
)
case(
    "priv",
    "a program of 32 bits",
    "import struct\nwords = (0xE3A07014, 0xEF000000, 0xE3A07001, 0xE3A0002A, 0xEF000000)  # getpid(); exit(42)\n"
    "elf = b'\\x7fELF\\1\\1\\1' + bytes(9) + struct.pack('<HHIIIIIHHHHHH', 2, 40, 1, 0x10054, 52, 0, 0x5000200, 52, 32, 1, 0, 0, 0)\n"
    "elf += struct.pack('<8I', 1, 0, 0x10000, 0x10000, 104, 104, 5, 0x10000) + struct.pack('<5I', *words)\n"
    "open('small', 'wb').write(elf); os.chmod('small', 0o755)\n"
    "try: os.execv('./small', ['small'])\nexcept OSError as e: print('no such programs here', e.errno)",
    status="killed|ok",
    only="aarch64",
    quick=True,
)
case(
    "priv",
    "devices",
    "refused('mknod', os.mknod, 'sda', 0o60666, os.makedev(8, 0))\nrefused('mknod', os.mknod, 'mem', 0o20666, os.makedev(1, 1))",
)
case(
    "priv",
    "a setuid program",
    "open('s', 'w').write('x'); os.chmod('s', 0o4755)\ndef su(): return subprocess.run(['/bin/su', '-c', 'id'], capture_output=True, timeout=2, check=True)\ntry: su(); print('BREACH')\nexcept Exception as e: print('refused', type(e).__name__)",
    out="refused",
)
case("priv", "outlive the init", "refused('pdeathsig', sc, 157 if X86 else 167, 1, 0, 0, 0, 0)", quick=True)
case(
    "priv",
    "capabilities",
    "try: t = open('/proc/self/status').read()\nexcept OSError: t = ''\nbad = [l for l in t.splitlines() if l.startswith(('CapEff', 'CapPrm', 'CapInh', 'CapAmb')) and int(l.split()[1], 16)]\nprint('BREACH' if bad else 'none', bad)",
    out="none",
    tiers=NS,
)
case(
    "priv",
    "raise limits",
    "import resource\nfor r in (resource.RLIMIT_AS, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_CORE):\n refused(r, resource.setrlimit, r, (1 << 40, 1 << 40))",
    quick=True,
)
case("priv", "type into a terminal", "import fcntl\nrefused('TIOCSTI', fcntl.ioctl, 1, 0x5412, b'x')")
case(
    "priv",
    "execute from shared memory",
    "open('run', 'w').write('#!/bin/sh\\nid\\n'); os.chmod('run', 0o755)\nprint('done')",
    out="done",
)

# net
case(
    "net", "loopback TCP", "refused('tcp', socket.create_connection, ('127.0.0.1', TCP_PORT), 1)", quick=True
)
case(
    "net",
    "loopback UDP",
    "def f(): s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', UDP_PORT))\nrefused('udp', f)",
    quick=True,
)
case("net", "the internet", "refused('tcp', socket.create_connection, ('1.1.1.1', 80), 1)")
case("net", "names", "refused('dns', socket.getaddrinfo, 'example.com', 80)")
case(
    "net",
    "an abstract socket",
    "def f(): s = socket.socket(socket.AF_UNIX); s.connect('\\0' + ABSTRACT)\nrefused('abstract', f)",
    quick=True,
)
case(
    "net",
    "a socket in the file system",
    "def f(): s = socket.socket(socket.AF_UNIX); s.connect(UNIX_PATH)\nrefused('unix', f)",
)
case(
    "net",
    "raw, packet, netlink, vsock, alg",
    "for family, kind in ((2, 3), (17, 3), (16, 3), (40, 1), (38, 5), (10, 1), (29, 3), (44, 3)): refused(family, socket.socket, family, kind)",
    quick=True,
)
case(
    "net",
    "a datagram to a socket in the file system",
    "def f(): a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', DGRAM_PATH)\nrefused('unix', f)",
    quick=True,
)
case(
    "net", "listen", "def f(): s = socket.socket(); s.bind(('0.0.0.0', 0)); s.listen()\nrefused('listen', f)"
)

# kill: hurt or outlive
case(
    "kill",
    "everyone",
    "try: os.kill(-1, 9)\nexcept OSError as e: print('refused')",
    status="ok|killed",
    quick=True,
)
case(
    "kill",
    "host and init",
    "for p in (HOST_PID, BYSTANDER, os.getppid() or 1, 1):\n try: os.kill(p, 9)\n except OSError: pass\nprint('done')",
    out="done",
    quick=True,
)
case(
    "kill",
    "stop the init",
    "for s in (signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGUSR1):\n try: os.kill(os.getppid() or 1, s)\n except OSError: pass\nprint('done')",
    out="done",
)
case("kill", "own process group", "os.killpg(0, 9)", status="ok|killed|error")
case(
    "kill",
    "a daemon",
    "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  time.sleep(60)\n os._exit(0)\nprint('left')",
    out="left",
    tiers=NS,
    quick=True,
)
case(
    "kill",
    "a daemon that holds the pipes and ignores signals",
    "if os.fork() == 0:\n os.setsid()\n for n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n while True: time.sleep(1)\nprint('left')",
    out="left",
    tiers=NS,
)
case(
    "kill",
    "forking is refused without a pid namespace",
    "refused('fork', os.fork)\nrefused('spawn', subprocess.run, ['/bin/true'])",
    tiers=("landlock",),
    quick=True,
)
case(
    "kill",
    "close the pipes and go on",
    "os.close(1); os.close(2); os.close(0)\nwhile True: pass",
    status="timeout",
    timeout_s=0.5,
)
case(
    "kill",
    "priorities of others",
    "import resource\nrefused('nice', os.setpriority, os.PRIO_PROCESS, 0, 5)\nrefused('prlimit', resource.prlimit, HOST_PID, resource.RLIMIT_CPU, (1, 1))",
)

# rc: exit codes and shutdown
case("rc", "a code", "sys.exit(3)", status="error", exit_code=3)
case("rc", "a large code", "sys.exit(257)", exit_code=1, status="error")
case("rc", "a text", "sys.exit('why')", status="error", exit_code=1, err="^why\n$")
case("rc", "at once", "print('lost', end=''); os._exit(5)", status="error", exit_code=5)
case("rc", "a signal", "os.kill(os.getpid(), signal.SIGKILL)", status="killed", exit_code=-9)
case("rc", "an abort", "os.abort()", status="killed", exit_code=-6)
case(
    "rc",
    "threads are waited for",
    "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    out="late",
)
case(
    "rc",
    "daemon threads are not",
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('end')",
    out="end",
)
case("rc", "exit handlers", "import atexit\natexit.register(print, 'bye')", out="bye")
case(
    "rc",
    "an exit handler that hangs",
    "import atexit\natexit.register(time.sleep, 60)",
    status="timeout",
    timeout_s=0.4,
)
case(
    "rc",
    "an own hook",
    "sys.excepthook = lambda *a: print('hooked', a[0].__name__)\n1/0",
    status="error",
    out="hooked ZeroDivisionError",
)

# out: output fidelity
case("out", "unicode", "print('é ∑ 🙂 \\u202e')", out="é ∑ 🙂")
case("out", "bytes", "sys.stdout.buffer.write(b'\\xff\\x00A')", out="A")
case("out", "lone surrogates", "print('\\ud800')", out=re.escape("\\ud800"))
case("out", "no newline", "print('end', end='')", out="^end$")
case("out", "standard input is empty", "print(repr(sys.stdin.read()))", out="^''$")
case("out", "a replaced stream", "import io\nsys.stdout = io.StringIO()\nprint('hidden')", out="^$")
case("out", "streams closed", "sys.stdout.close()", status="ok|error")
case("out", "streams removed", "sys.stdout = sys.stderr = None\n1/0", status="error", exit_code=1)
case("out", "terminal escapes", "print('\\x1b[2J\\x1b]0;x\\x07')", out="\x1b")

# state: leaks between executions; each first writes, then looks for what another left
STATE = "import math\nprint('BREACH' if {look} else 'clean')\n{leave}"
case(
    "state",
    "modules",
    STATE.format(
        look="hasattr(math, 'mine') or 'spy' in sys.modules", leave="math.mine = 1; sys.modules['spy'] = math"
    ),
    out="clean",
    quick=True,
)
case(
    "state",
    "files",
    "for d in ('.', os.environ['TMPDIR']): print('BREACH' if os.listdir(d) else 'clean'); open(d + '/left', 'w').write('x')",
    out="clean",
    quick=True,
)
case(
    "state",
    "shared memory",
    "print('BREACH' if os.listdir('/dev/shm') else 'clean'); open('/dev/shm/left', 'w').write('x')",
    out="clean",
    tiers=NS,
)
case(
    "state",
    "environment",
    STATE.format(look="'LEFT' in os.environ", leave="os.environ['LEFT'] = '1'"),
    out="clean",
)
case(
    "state",
    "neighbours",
    "try: seen = os.listdir('/proc')\nexcept PermissionError: seen = []\nn = [p for p in seen if p.isdigit() and int(p) not in (1, os.getpid())]\nprint('BREACH' if n else 'alone', n)",
    out="alone",
    quick=True,
)
case("state", "random numbers differ", "import random\nprint(random.random())", out=r"0\.\d+")
case("state", "hashes agree", "print(hash('agentenv'))", out=r"-?\d+")
case(
    "state",
    "interpreter files",
    "import json\nrefused('json', open, json.__file__, 'a')\nrefused('mkdir', os.mkdir, os.path.dirname(json.__file__) + '/spy')",
    quick=True,
)

# useful: honest programs
case(
    "useful",
    "asyncio",
    "import asyncio\nasync def f(n): await asyncio.sleep(0.01); return n\nasync def main(): print(sum(await asyncio.gather(*map(f, range(10)))))\nasyncio.run(main())",
    out="^45$",
    quick=True,
)
case(
    "useful",
    "threads",
    "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as p: print(sum(p.map(lambda n: n * n, range(10))))",
    out="^285$",
    quick=True,
)
case(
    "useful",
    "subprocess",
    "print(subprocess.run([sys.executable, '-c', 'print(6*7)'], capture_output=True, text=True, check=True).stdout)\nprint(subprocess.check_output('echo $((1+1)) | cat', shell=True, text=True))",
    out="42\n\n2",
    tiers=NS,
    quick=True,
)
case(
    "useful",
    "multiprocessing",
    "from multiprocessing import get_context\ndef f(n): return n * n\nif __name__ == '__main__':\n with get_context('fork').Pool(2) as p: print(sum(p.map(f, range(10))))",
    out="^285$",
    tiers=NS,
)
case(
    "useful",
    "tempfile",
    "import tempfile\nwith tempfile.TemporaryDirectory() as d, tempfile.NamedTemporaryFile('w+') as f:\n f.write('x'); f.seek(0); print(f.read(), os.path.isdir(d))",
    out="^x True$",
    quick=True,
)
case(
    "useful",
    "traceback",
    "def f():\n    raise KeyError('k')\nf()",
    status="error",
    err=r"raise KeyError\('k'\)\nKeyError: 'k'",
)
case(
    "useful",
    "standard library",
    "import csv, decimal, fractions, hashlib, heapq, inspect, itertools, json, pickle, sqlite3, statistics, textwrap, uuid, zlib, zipfile, datetime, urllib.parse, unittest, logging\nc = sqlite3.connect(':memory:'); print(c.execute('select 1 + 1').fetchone(), pickle.loads(pickle.dumps({1})), hashlib.sha256(b'').hexdigest()[:4], datetime.date(2026, 1, 1).isoformat())",
    out=r"\(2,\) \{1\} e3b0 2026",
    quick=True,
)
case(
    "useful",
    "a pipe and a socket pair",
    "a, b = socket.socketpair()\na.send(b'x'); r, w = os.pipe(); os.write(w, b.recv(1)); print(os.read(r, 1))",
    out="b'x'",
)
case(
    "useful",
    "signals and timers",
    "signal.signal(signal.SIGALRM, lambda *a: print('rang'))\nsignal.setitimer(signal.ITIMER_REAL, 0.05); signal.pause()",
    out="rang",
)
case(
    "useful",
    "classes and pickles of main",
    "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: int = 1\nprint(pickle.loads(pickle.dumps(P(3))), __name__)",
    out=r"P\(x=3\) __main__",
    quick=True,
)

# write: outside of the working directory
case(
    "write",
    "system files",
    "for p in ('/etc/passwd', '/etc/hosts', '/usr/bin/x', '/x', '/root/x', '/proc/sys/kernel/hostname', '/proc/self/oom_score_adj', '/dev/x', sys.executable): refused(p, open, p, 'a')",
    quick=True,
)
case(
    "write",
    "a directory open to all",
    "refused('w', open, OPEN_DIR + '/x', 'w')\nrefused('mkdir', os.mkdir, OPEN_DIR + '/y')",
    quick=True,
)
case(
    "write",
    "a name that climbs",
    "refused('w', open, '../../../../../../x', 'w')\nrefused('mv', os.rename, '/etc', '/work/etc')",
)

# forge: a verdict
case(
    "forge",
    "on every descriptor",
    "import json\nfake = json.dumps({'exit': 0, 'reason': '', 'duration_s': 0, 'started': True, 'cpu_s': 0, 'max_rss_bytes': 0}).encode() + b'\\n'\nfor n in range(3, 1024):\n try: os.write(n, fake); print('BREACH', n)\n except OSError: pass\nsys.exit(9)",
    status="error",
    exit_code=9,
    quick=True,
)
case(
    "forge",
    "by the launcher's functions",
    "f = sys._getframe()\nwhile f:\n for k, v in list(f.f_globals.items()):\n  if k in ('_begin', '_leave', '_run'):\n   f.f_globals[k] = lambda *a, **k: os._exit(0)\n f = f.f_back\n1/0",
    status="error|ok",
    quick=True,
)
case(
    "forge",
    "by a crash after success",
    "print('all tests passed'); os.kill(os.getpid(), 11)",
    status="killed",
    exit_code=-11,
)


for category, name, code, options in [*MORE, *NEW]:
    case(category, name, code, **options)


class World:
    """What the host has, and how we see whether it was touched."""

    def __init__(self) -> None:
        self.secret = "s3cret-" + os.urandom(8).hex()
        self.mark = "mark-" + os.urandom(8).hex()
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="attack-world-")))
        self.folder.chmod(0o755)
        self.file = self.folder / "secret.txt"
        self.file.write_text(self.secret)
        self.open_dir = self.folder / "open"
        self.open_dir.mkdir()
        self.open_dir.chmod(0o777)
        os.environ["ATTACK_SECRET"] = self.secret
        self.listeners = [
            socket.socket(),
            socket.socket(type=socket.SOCK_DGRAM),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        ]
        places: list[object] = [
            ("127.0.0.1", 0),
            ("127.0.0.1", 0),
            "\0" + self.mark,
            str(self.folder / "sock"),
            str(self.folder / "dgram"),
        ]
        for listener, place in zip(self.listeners, places, strict=True):
            self._stack.enter_context(listener)
            listener.bind(place)  # pyright: ignore[reportArgumentType]
            listener.setblocking(False)
            if listener.type == socket.SOCK_STREAM:
                listener.listen()
        (self.folder / "sock").chmod(0o777)
        (self.folder / "dgram").chmod(0o777)
        self.mine = self.folder / "mine.txt"
        self.mine.write_text("mine")
        self.mine.chmod(0o666)
        self.bystander = subprocess.Popen(["/bin/sleep", "infinity"])

    def names(self) -> str:
        """Python text that tells the code where everything is: the attacker knows the machine."""
        return (
            f"SECRET_FILE = {str(self.file)!r}; MINE = {str(self.mine)!r}; "
            f"OPEN_DIR = {str(self.open_dir)!r}; HOST_PID = {os.getpid()}; "
            f"HOST_PREFIX = {sys.base_prefix if landlock.abi() else 'nothing is sealed'!r}; "
            f"BYSTANDER = {self.bystander.pid}; TCP_PORT = {self.listeners[0].getsockname()[1]}; "
            f"UDP_PORT = {self.listeners[1].getsockname()[1]}; ABSTRACT = {self.mark!r}; "
            f"UNIX_PATH = {str(self.folder / 'sock')!r}; DGRAM_PATH = {str(self.folder / 'dgram')!r}\n"
        )

    def watch(self) -> None:
        """Note what must stay as it is during a case."""
        self.known = self.look()
        self.faults: list[str] = []
        self.disk_taken = 0
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: self.faults.append(str(fault)))
        logging.getLogger("agentenv").handlers = [_Count(self.faults)]

    def look(self) -> list[object]:
        """Return the state of files and of the kernel that no case may change."""
        library = Path(json.__file__)
        paths = [
            self.folder,
            self.file,
            self.mine,
            self.open_dir,
            library,
            library.parent,
            Path(sys.executable),
        ]
        seen: list[object] = [self.mine.read_text(), Path("/proc/sys/fs/aio-nr").read_text()]
        for path in paths:
            known = path.stat()
            seen += [known.st_mode, known.st_uid, known.st_mtime_ns, known.st_size, os.listxattr(path)]
        return seen

    async def weigh(self) -> None:
        """Measure how much of the disk is taken at most, until this is cancelled.

        What other programs write meanwhile counts too, because removed files of the code show up nowhere else.
        """
        free = os.statvfs(tempfile.gettempdir())
        while True:
            now = os.statvfs(tempfile.gettempdir())
            self.disk_taken = max(self.disk_taken, (free.f_bavail - now.f_bavail) * now.f_frsize)
            await asyncio.sleep(0.005)

    def harm(self) -> str:
        """Say what was touched; empty if nothing."""
        if self.look() != self.known:
            return f"files or the kernel were changed: {self.known} -> {self.look()}"
        if self.faults:
            return f"the host complained {len(self.faults)} times: {self.faults[0][:200]}"
        if self.disk_taken > MOST_DISK_BYTES:
            return f"{self.disk_taken >> 20} {DISK_TAKEN}"
        for listener in self.listeners:
            with contextlib.suppress(BlockingIOError):
                listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(10)
                return "a listener was reached"
        if made := list(self.open_dir.iterdir()):
            return f"the open directory has {made}"
        if self.bystander.poll() is not None:
            return "the bystander was killed"
        for _ in range(HANGS_S * 50):
            if not (left := self._marked()):
                return ""
            time.sleep(0.02)
        return f"left behind: {left}"

    def _marked(self) -> list[str]:
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (process / "environ").read_bytes():
                        found.append(process.name)
        return found

    def close(self) -> None:
        self.bystander.kill()
        self.bystander.wait()
        os.environ.pop("ATTACK_SECRET", None)
        self._stack.close()


class _Count(logging.Handler):
    """Keeps what is logged, since code must not flood the log of the host."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def play(sandbox, code: str, one: Case, mark: str):
    """Run the code of a case, in a session if it wants one."""
    if not one.session:
        return await sandbox.run_code(code, timeout_s=one.timeout_s, env={"MARK": mark})
    async with sandbox.session() as session:
        result = await session.run_code(code, timeout_s=one.timeout_s)
        file = b""
        with contextlib.suppress(FileNotFoundError):
            file = await session.read_file("f")
        await session.run_code("print('next')", timeout_s=2)
    return replace(result, files={"f": file})


def in_container(one: Case) -> Case:
    """Return the case with what a container makes of it.

    A shell there tells of a signal by an exit code. A session has no socket to which code could write, and its
    first step waits for the start of its Python.
    """
    if one.session:
        return replace(one, status=ANY, timeout_s=None)
    code = one.exit_code
    code = 128 - code if code is not None and code < 0 else code
    return replace(one, status=one.status.replace("killed", "killed|error"), exit_code=code)


async def held_beside_others(pool, world: World, cases: list[Case]) -> list[Case]:
    """Try cases in one execution and return those that were held, if nothing of ours was touched."""
    codes = json.dumps([PRELUDE + world.names() + one.code for one in cases])
    together = Case("", "", f"CODES = {codes!r}{BESIDE}", timeout_s=600.0)
    problem, out = await attempt(pool, world, together, judged=False)
    if problem:
        print(f"{len(cases)} beside each other: {problem}")
        return []
    told = [json.loads(line) for line in out.splitlines()]
    return [
        one
        for one, (code, breach, text) in zip(cases, told, strict=True)
        if not (code or breach) and re.search(one.out, text.rstrip("\n"))
    ]


async def attempt(pool, world: World, one: Case, *, judged: bool = True) -> tuple[str, str]:
    """Run one case; return what went wrong, if anything, and the standard output.

    Args:
        pool: the sandbox.
        world: what the host has.
        one: the case.
        judged: False if only harm to the host counts, and not what the code has got.
    """
    async with pool.lease() as sandbox:
        world.watch()
        before, scale = descriptors(), asyncio.ensure_future(world.weigh())
        hangs_s = max(HANGS_S, one.timeout_s or 0.0)
        try:
            async with asyncio.timeout(hangs_s):
                result = await play(sandbox, PRELUDE + world.names() + one.code, one, world.mark)
        except TimeoutError:
            return f"still runs after {hangs_s:g} s", ""
        finally:
            scale.cancel()
        files = "".join(data.decode(errors="replace") for data in (result.files or {}).values())
        probe = await sandbox.run_code("print('alive')", timeout_s=10)
    everything = result.stdout + result.stderr + files
    got = [
        ("BREACH", "BREACH" in result.stdout),
        (f"status {result.status}, not {one.status}", not re.fullmatch(one.status, result.status)),
        (f"exit code {result.exit_code}", one.exit_code is not None and result.exit_code != one.exit_code),
        (f"stdout does not match {one.out!r}", not re.search(one.out, result.stdout.rstrip("\n"))),
        (f"stderr does not match {one.err!r}", not re.search(one.err, result.stderr)),
    ]
    harmed = [
        ("the secret came out", world.secret in everything),
        ("the next execution failed", probe.stdout != "alive\n"),
        (harm := world.harm(), bool(harm)),
        (f"{descriptors() - before} descriptors were left open", descriptors() > before + 16),
    ]
    wrong = [text for text, is_wrong in (*(got if judged else ()), *harmed) if is_wrong]
    told = f"\n    {result.status} {result.exit_code} {result.stdout[:300]!r} {result.stderr[-400:]!r}"
    return "; ".join(wrong) + told if wrong else "", result.stdout


async def calm_disk() -> None:
    """Wait until others on this machine write little to the disk, such as packages; two minutes at most."""
    for _ in range(40):
        before = os.statvfs(tempfile.gettempdir()).f_bavail
        await asyncio.sleep(3.0)
        now = os.statvfs(tempfile.gettempdir())
        if abs(before - now.f_bavail) * now.f_frsize < MOST_DISK_BYTES // 16:
            return


def chosen(tier: str, *, quick: bool) -> list[Case]:
    """Return the cases for a tier on this machine."""
    here = [one for one in CASES if one.only in ("", os.uname().machine)]
    if ":" in tier:
        fast = {one.key for one in here if one.fits_beside_others} - OTHERWISE_IN_CONTAINERS
        there = [in_container(one) for one in here if "namespace" in one.tiers]
        return [one for one in there if one.key in fast or not quick]
    return [one for one in here if tier in one.tiers and (one.quick or not quick)]


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tier", default="namespace", help="namespace, landlock, or podman:IMAGE")
    parser.add_argument("--python")
    parser.add_argument("--abi", type=int, help="use no more of Landlock than this version of it offers")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if options.abi is not None:
        landlock.abi = lambda: options.abi
    world = World()
    failures = 0
    try:
        # Not `create`: as nobody the suite runs in an interpreter in which agentenv is not installed.
        tier = {"tier": options.tier, "python": options.python}
        container = ":" in options.tier
        async with (
            create(options.tier, limits=LIMITS)
            if container
            else LocalSandbox(**tier, size=2, limits=LIMITS) as pool
        ):
            cases = [one for one in chosen(options.tier, quick=options.quick) if options.only in one.key]
            beside = [
                one
                for one in cases
                if container and one.fits_beside_others and one.key not in OTHERWISE_IN_CONTAINERS
            ]
            held = await held_beside_others(pool, world, beside) if beside else []
            for one in cases:
                if one in held:
                    continue
                judged = not (container and one.key in OTHERWISE_IN_CONTAINERS)
                for tries in range(TRIES):
                    if tries:
                        await calm_disk()
                    problem, _ = await attempt(pool, world, one, judged=judged)
                    if not any(passing in problem for passing in (DISK_TAKEN, NO_THREAD)):
                        break
                failures += bool(problem)
                if problem:
                    print(f"FAILED {one.key}: {problem}", flush=True)
            print(
                f"{len(cases) - failures} of {len(cases)} cases held: tier {options.tier}, uid {os.getuid()}, "
                f"Landlock {landlock.abi()}"
            )
    except SandboxUnavailable as error:
        print(f"UNTESTED tier {options.tier}: {error}")
        return 3
    finally:
        world.close()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
