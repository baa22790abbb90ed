"""The command line that podman and docker share: run it, build images, and sweep what dead runs left.

Every container of ours has the label `agentenv=OWNER` and a name that begins with the owner: the machine, the
process id and the start time of the process that made it. So a later process can tell whose owner has died.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import hashlib
import os
import shlex
import socket
import subprocess
import tempfile
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from agentenv.core import SandboxCrashed, SandboxUnavailable, cache_directory, logger

__all__ = ["LABEL", "AnswerTooLong", "Runtime", "Said", "digest_of", "owner"]

LABEL = "agentenv"
"""Key of the label of every container of ours."""
MAX_STARTS = 4
"""Containers of one process that start at the same time; more only make each start slower."""
_GENTLE_S = 120.0
"""Time limit of a command of the runtime that should take a second."""


_log = logger(__name__)

_STEP_CHARS = 1_500
"""Characters of a failed build's output that are shown."""

MAX_SAID = 64 << 20
"""Most bytes of an answer of the runtime, unless more is asked for."""


class AnswerTooLong(SandboxCrashed):
    """The runtime answered with more bytes than were asked for."""


class Said(NamedTuple):
    """What a command of the runtime answered."""

    code: int
    out: bytes
    err: bytes

    @property
    def problem(self) -> str:
        """The end of the error, for a message."""
        return self.err.decode(errors="replace").strip()[-600:]


def owner(pid: int | None = None) -> str:
    """Return the name of a process that no other process of this machine ever has; empty if it has ended."""
    pid = os.getpid() if pid is None else pid
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
    return f"{_machine()}-{pid}-{started}"


def _machine() -> str:
    """Return a short name of this machine's processes; another machine may use the same runtime."""
    inode = Path("/proc/self/ns/pid").stat().st_ino
    return hashlib.blake2b(f"{socket.gethostname()} {inode}".encode(), digest_size=4).hexdigest()


class Runtime:
    """One of the programs `podman` and `docker`.

    Args:
        program: its name.
    """

    def __init__(self, program: str) -> None:
        self.program = program
        self._starts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._swept = False
        self.living: set[str] = set()
        """Names of the containers of this process that were not removed."""
        self.networks: set[str] = set()
        """Names of its networks that were not removed."""
        atexit.register(self._remove_rest)

    @property
    def is_podman(self) -> bool:
        """True for podman, which has some options that docker lacks."""
        return self.program == "podman"

    async def run(
        self, *arguments: str, stdin: bytes | None = None, timeout_s: float = _GENTLE_S, most: int = MAX_SAID
    ) -> Said:
        """Run a command of the runtime and return its answer of at most `most` bytes, whatever its exit code.

        Raises:
            SandboxUnavailable: The program is not installed.
            SandboxCrashed: It did not answer in time, or without an end.
        """
        process = await self.spawn(*arguments, stdin=stdin is not None)
        try:
            async with asyncio.timeout(timeout_s):
                out, err, _ = await asyncio.gather(
                    self._answer(process.stdout, most),
                    self._answer(process.stderr, most),
                    _tell(process.stdin, stdin),
                )
                await process.wait()
        except TimeoutError as error:
            raise SandboxCrashed(
                f"{self.program} {arguments[0]} did not end within {timeout_s:g} s"
            ) from error
        finally:
            await end(process)
        return Said(process.returncode or 0, out, err)

    async def _answer(self, stream: asyncio.StreamReader | None, most: int) -> bytes:
        """Return what a command says.

        Raises:
            AnswerTooLong: It has more than `most` bytes.
        """
        said = bytearray()
        while stream is not None and (block := await stream.read(1 << 16)):
            said += block
            if len(said) > most:
                raise AnswerTooLong(f"{self.program} answered with more than {most:,} bytes")
        return bytes(said)

    async def spawn(self, *arguments: str, stdin: bool = False) -> asyncio.subprocess.Process:
        """Start a command of the runtime with pipes; `end` must be called with it.

        Raises:
            SandboxUnavailable: The program is not installed.
        """
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            # A session of its own: Ctrl-C must reach us first, because we remove the containers.
            return await asyncio.create_subprocess_exec(
                *(self.program, *arguments),
                stdin=pipe if stdin else none,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                cwd=tempfile.gettempdir(),  # podman leaves a file named `oom` where it works
            )
        except OSError as error:
            raise SandboxUnavailable(
                f"{self.program} cannot be started: {error.strerror or error}",
                remedy=f"install {self.program}; `agentenv sandbox` shows what works here",
            ) from error

    async def check(self, *arguments: str, stdin: bytes | None = None, timeout_s: float = _GENTLE_S) -> bytes:
        """Run a command of the runtime and return its output.

        Raises:
            SandboxCrashed: It failed.
        """
        said = await self.run(*arguments, stdin=stdin, timeout_s=timeout_s)
        if said.code:
            raise SandboxCrashed(f"{self.program} {arguments[0]} ended with {said.code}: {said.problem}")
        return said.out

    @asynccontextmanager
    async def starting(self) -> AsyncGenerator[None]:
        """Wait until one more container may start; the first one sweeps what dead runs left."""
        gate = self._starts.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_STARTS))
        async with gate:
            if not self._swept:
                self._swept = True
                await self.sweep()
            yield

    async def has_image(self, image: str) -> bool:
        """Return whether an image is on this machine."""
        return (await self.run("image", "inspect", image)).code == 0

    async def build(
        self, folder: Path, *, dockerfile: str = "", timeout_s: float = 600.0, what: str = ""
    ) -> str:
        """Return the image of a folder with a Dockerfile; it is built once for each content.

        Other processes that want the same image wait for it. The environment variable
        `AGENTENV_BUILD_OPTIONS` holds further options of `build`, such as `--network=host`.

        Args:
            folder: the context of the build.
            dockerfile: text in place of the folder's Dockerfile.
            timeout_s: time limit of the build in seconds.
            what: what is told to be done, if it has to be.

        Raises:
            SandboxCrashed: The build failed.
        """
        tag = f"localhost/agentenv-{await asyncio.to_thread(digest_of, folder, dockerfile)}"
        if await self.has_image(tag):
            return tag
        async with _lock(tag):
            if await self.has_image(tag):
                return tag
            with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
                file.write(dockerfile)
                file.flush()
                which = ("-f", file.name) if dockerfile else ()
                more = shlex.split(os.environ.get("AGENTENV_BUILD_OPTIONS", ""))
                context = str(await asyncio.to_thread(folder.absolute))
                if what:
                    _log.warning("%s: this may take minutes", what)
                said = await self.run("build", "-t", tag, *which, *more, context, timeout_s=timeout_s)
                if said.code:
                    # What the step has printed says more than the runtime, which names the step.
                    printed = said.out.decode(errors="replace").strip()[-_STEP_CHARS:]
                    raise SandboxCrashed(f"{self.program} build ended: {said.problem}\n{printed}")
        return tag

    async def sweep(self, *, everything: bool = False) -> list[str]:
        """Remove the containers and networks whose owner has died, or all of ours; return the containers."""
        dead = await self._ours("ps", "-a", "--format", "{{.Names}}", everything=everything)
        if dead:
            await self.remove(*dead)
        if networks := await self._ours("network", "ls", "--format", "{{.Name}}", everything=everything):
            await self.remove_networks(*networks)
        return dead

    async def _ours(self, *listing: str, everything: bool) -> list[str]:
        """Return which of ours a listing names: those whose owner has died, or all."""
        said = await self.run(*listing, "--filter", f"label={LABEL}")
        names = said.out.decode().split() if said.code == 0 else []
        return [name for name in names if everything or _has_died(name)]

    @property
    def _removal(self) -> tuple[str, ...]:
        """The command that kills and removes containers, without a time to end by themselves."""
        return ("rm", "-f", *(("-t", "0") if self.is_podman else ()))

    async def remove(self, *names: str) -> Said:
        """Kill and remove containers at once."""
        command = (*self._removal, *names)
        for pause_s in (0.2, 1.0, 5.0, 0.0):
            said = await self.run(*command)
            if b"did not die within" not in said.err:
                break
            # podman did not wait for the kernel, which ends many processes slowly.
            await asyncio.sleep(pause_s)
        self.living.difference_update(names)
        return said

    async def remove_networks(self, *names: str) -> None:
        """Remove networks, whose containers are gone."""
        await self.run("network", "rm", *names)
        self.networks.difference_update(names)

    def _remove_rest(self) -> None:
        """Remove what is left at the end of the process, such as after a signal that cut a removal short."""
        removals = [(self._removal, self.living), (("network", "rm"), self.networks)]
        for command, names in removals:
            if not names:
                continue
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(  # noqa: S603
                    (self.program, *command, *names),
                    capture_output=True,
                    check=False,
                    timeout=_GENTLE_S,
                    cwd=tempfile.gettempdir(),
                )


def _has_died(name: str) -> bool:
    """Return whether the process of this machine that made a container has ended."""
    parts = name.split("-")
    if len(parts) != 5 or parts[0] != LABEL or parts[1] != _machine() or not parts[2].isdecimal():
        return False
    return owner(int(parts[2])) != "-".join(parts[1:4])


def digest_of(folder: Path, dockerfile: str = "") -> str:
    """Return a digest of a folder's files and links, and of the text of a Dockerfile."""
    digest = hashlib.blake2b(dockerfile.encode(), digest_size=12)
    for path in sorted(folder.rglob("*")):
        kind = b"l" if path.is_symlink() else b"d" if path.is_dir() else b"f"
        digest.update(
            b"\0".join((kind, str(path.relative_to(folder)).encode(), b"%o" % path.lstat().st_mode))
        )
        data = str(path.readlink()).encode() if kind == b"l" else path.read_bytes() if path.is_file() else b""
        digest.update(b"%d\0" % len(data) + data)
    return digest.hexdigest()


@asynccontextmanager
async def _lock(name: str) -> AsyncGenerator[None]:
    """Hold a lock among the processes of this user, in a folder into which nobody else can write."""
    digest = hashlib.blake2b(name.encode(), digest_size=12).hexdigest()
    folder = cache_directory() / "locks"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / f"{digest}.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        told = False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if not told:
                _log.warning("%s is being built already: waiting for it", name)
                told = True
            await asyncio.sleep(0.2)
        yield
    finally:
        os.close(fd)


async def _tell(stream: asyncio.StreamWriter | None, data: bytes | None) -> None:
    """Write the input of a command, which may have ended before it has read it."""
    if stream is not None:
        with contextlib.suppress(ConnectionError):
            stream.write(data or b"")
            await stream.drain()
        stream.close()


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a command of the runtime if it still runs; what it started in a container goes on."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    # asyncio waits for the end of pipes too, which never comes for one that is full or held by others. If we
    # closed its whole transport, we could take the exit code from its own watcher, which then complains.
    for pipe in map(process._transport.get_pipe_transport, range(3)):  # type: ignore[attr-defined]  # noqa: SLF001
        if pipe is not None:
            pipe.close()
    await process.wait()
