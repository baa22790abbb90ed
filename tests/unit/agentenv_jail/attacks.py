"""Runs the attack suite, which is attacks.txt: what model-written code might try, and what must come of it.

Runs under pytest (test_attacks.py), and by itself as any user, with nothing but agentenv:

    python tests/unit/agentenv_jail/attacks.py --tier namespace [--quick] [--python /usr/bin/python3]

A tier is namespace, landlock, podman:IMAGE, or e2b, which is E2B's SDK against our server of its protocol.
In the last two an execution takes long, so what can be tried beside others is tried in one; what is not held
then is played again alone, and only that counts.

An attack is a line `== CATEGORY: NAME | OPTIONS` and its code. Options are those of `Case`, as in TOML. Code
prints BREACH where it got what it must not get. Around each case a small world is watched: secrets in a file
and in the environment, listeners on TCP, UDP and an abstract socket, a directory that anyone may write, a
process beside us, and marked processes left behind. After each case an honest execution must work.
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
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agentenv.core import SandboxUnavailable
from agentenv.sandbox import Sandbox, SandboxLimits, create
from agentenv_jail.backend import LocalSandbox
from agentenv_jail.jail import landlock

LIMITS = SandboxLimits(
    timeout_s=20.0, memory_bytes=192 << 20, address_space_bytes=256 << 20, max_processes=16, work_bytes=8 << 20,
    shm_bytes=4 << 20, max_file_bytes=8 << 20, max_output_bytes=2 << 20,
)  # fmt: skip
MOST_DISK_BYTES = 512 << 20
"""The limit is 16 MiB; what is beyond it is written between two looks, and by others on the machine."""
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
    tier: str = ""
    """The one of our tiers that the case is for."""
    timeout_s: float | None = None
    """Short where the limit must end it; else so long that no busy machine reaches it."""
    machine: str = ""
    """Machine that the case is for."""
    further_in: tuple[str, ...] = ()
    """Those of podman and e2b in which the code gets further. It must do no harm there either."""

    @property
    def key(self) -> str:
        """Category and name."""
        return f"{self.category}: {self.name}"

    @property
    def fits_beside_others(self) -> bool:
        """Whether it can be tried in a process of an execution that tries others, before and after it."""
        plain = self.exit_code is None and not (self.err or self.timeout_s or self.further_in)
        return plain and self.status == "ok" and self.category in BESIDE_OTHERS


BESIDE_OTHERS = ("read", "priv", "net", "write", "kernel", "meta", "useful")
BESIDE = """
import json, subprocess, sys
for code in json.loads(CODES):
    done = subprocess.run([sys.executable, "-B", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    out = done.stdout.decode(errors="replace")
    print(json.dumps([done.returncode, "BREACH" in out, out if len(out) < 300 else out[-300:]]), flush=True)
"""


def read_cases() -> list[Case]:
    """Return the attacks of the file."""
    cases: list[Case] = []
    for part in Path(__file__).with_suffix(".txt").read_text("utf-8").removeprefix("== ").split("\n== "):
        head, _, code = part.partition("\n")
        key, _, options = head.partition(" | ")
        category, _, name = key.partition(": ")
        cases.append(Case(category, name, code, **tomllib.loads(f"o = {{{options}}}")["o"]))
    return cases


class World:
    """What the host has, and how we see whether it was touched."""

    def __init__(self) -> None:
        self.secret = "s3cret-" + os.urandom(8).hex()
        self.mark = "mark-" + os.urandom(8).hex()
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="attack-world-")))
        self.folder.chmod(0o755)
        self.file, self.mine, self.open_dir = (self.folder / name for name in ("secret.txt", "mine", "open"))
        self.file.write_text(self.secret)
        self.mine.write_text("mine")
        self.mine.chmod(0o666)
        self.open_dir.mkdir()
        self.open_dir.chmod(0o777)
        os.environ["ATTACK_SECRET"] = self.secret
        self.listeners: list[socket.socket] = []
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        self._listen(socket.AF_INET, stream, ("127.0.0.1", 0))
        self._listen(socket.AF_INET, datagram, ("127.0.0.1", 0))
        self._listen(socket.AF_UNIX, stream, "\0" + self.mark)
        for name, kind in (("sock", stream), ("dgram", datagram)):
            self._listen(socket.AF_UNIX, kind, str(self.folder / name))
            (self.folder / name).chmod(0o777)
        self.bystander = subprocess.Popen(["/bin/sleep", "infinity"])

    def _listen(self, family: int, kind: int, place: str | tuple[str, int]) -> None:
        listener = self._stack.enter_context(socket.socket(family, kind))
        listener.bind(place)
        listener.setblocking(False)
        if kind == socket.SOCK_STREAM:
            listener.listen()
        self.listeners.append(listener)

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
        own = [self.folder, self.file, self.mine, self.open_dir]
        seen: list[object] = [self.mine.read_text(), Path("/proc/sys/fs/aio-nr").read_text()]
        for path in [*own, library, library.parent, Path(sys.executable)]:
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


async def play(sandbox: Sandbox, code: str, one: Case, mark: str):
    """Run the code of a case. A session then has to read a file and run a step."""
    if one.category != "session":
        return await sandbox.run_code(code, timeout_s=one.timeout_s, env={"MARK": mark})
    async with sandbox.session() as session:
        result = await session.run_code(code, timeout_s=one.timeout_s)
        file = b""
        with contextlib.suppress(FileNotFoundError):
            file = await session.read_file("f")
        await session.run_code("print('next')", timeout_s=2)
    return replace(result, files={"f": file})


def from_afar(one: Case, tier: str) -> Case:
    """Return the case with what a container or a server makes of it.

    A shell there tells of a signal by an exit code. A session has no socket to which code could write, and its
    first step waits for the start of its Python. E2B's protocol knows only that code ended, and how.
    """
    kind = tier.partition(":")[0]
    one = replace(one, further_in=(kind,) if kind in one.further_in else ())
    if one.category == "session" or kind == "e2b":
        return replace(one, status="*", exit_code=None, out="", err="", timeout_s=one.timeout_s and 5.0)
    code = one.exit_code
    code = 128 - code if code is not None and code < 0 else code
    return replace(one, status=one.status.replace("killed", "killed|error"), exit_code=code)


async def held_beside_others(pool: Sandbox, world: World, cases: list[Case]) -> list[Case]:
    """Try cases in one execution and return those that were held, if nothing of ours was touched."""
    codes = json.dumps([PRELUDE + world.names() + one.code for one in cases])
    together = Case("", "", f"CODES = {codes!r}{BESIDE}", timeout_s=600.0, further_in=("all",))
    problem, out = await attempt(pool, world, together)
    if problem:
        print(f"{len(cases)} beside each other: {problem}")
        return []
    told = [json.loads(line) for line in out.splitlines()]
    return [
        one
        for one, (code, breach, text) in zip(cases, told, strict=True)
        if not (code or breach) and re.search(one.out, text.rstrip("\n"))
    ]


async def attempt(pool: Sandbox, world: World, one: Case) -> tuple[str, str]:
    """Run one case; return what went wrong, if anything, and the standard output."""
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
    status = one.status.replace("*", ".*")
    got = [
        ("BREACH", "BREACH" in result.stdout),
        (f"status {result.status}, not {one.status}", not re.fullmatch(status, result.status)),
        (f"exit code {result.exit_code}", one.exit_code is not None and result.exit_code != one.exit_code),
        (f"stdout does not match {one.out!r}", not re.search(one.out, result.stdout.rstrip("\n"))),
        (f"stderr does not match {one.err!r}", not re.search(one.err, result.stderr)),
    ]
    harmed = [
        ("the secret came out", world.secret in result.stdout + result.stderr + files),
        ("the next execution failed", probe.stdout != "alive\n"),
        (harm := world.harm(), bool(harm)),
        (f"{descriptors() - before} descriptors were left open", descriptors() > before + 16),
    ]
    judged = () if one.further_in and not isinstance(pool, LocalSandbox) else got
    wrong = [text for text, is_wrong in (*judged, *harmed) if is_wrong]
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
    here = [one for one in read_cases() if one.machine in ("", os.uname().machine)]
    if tier not in ("namespace", "landlock"):
        far = [one for one in here if one.tier != "landlock" and (one.fits_beside_others or not quick)]
        return [from_afar(one, tier) for one in far]
    return [one for one in here if one.tier in ("", tier) and (one.quick or not quick)]


@asynccontextmanager
async def opened(tier: str, python: str | None) -> AsyncIterator[Sandbox]:
    """Open the sandbox of a tier, and E2B's server before it."""
    async with contextlib.AsyncExitStack() as stack:
        if tier == "e2b":
            from agentenv_e2b import serve

            server = await stack.enter_async_context(serve(size=2, limits=LIMITS))
            os.environ |= {"E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url}
            os.environ |= {"E2B_API_KEY": server.token, "E2B_HTTP_VERSION": "1.1"}
        # Not `create`: as nobody the suite runs in an interpreter in which agentenv is not installed.
        ours = {"namespace", "landlock"} & {tier}
        yield await stack.enter_async_context(
            LocalSandbox(tier=tier, python=python, size=2, limits=LIMITS)
            if ours
            else create(tier, limits=LIMITS)
        )


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tier", default="namespace", help="namespace, landlock, podman:IMAGE or e2b")
    parser.add_argument("--python")
    parser.add_argument("--abi", type=int, help="use no more of Landlock than this version of it offers")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if options.abi is not None:
        landlock.abi = lambda: options.abi
    world, failures = World(), 0
    cases = [one for one in chosen(options.tier, quick=options.quick) if options.only in one.key]
    try:
        async with opened(options.tier, options.python) as pool:
            is_far = not isinstance(pool, LocalSandbox)
            beside = [one for one in cases if is_far and one.fits_beside_others]
            held = await held_beside_others(pool, world, beside) if beside else []
            for one in cases:
                if one in held:
                    continue
                for tries in range(TRIES):
                    if tries:
                        await calm_disk()
                    problem, _ = await attempt(pool, world, one)
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
