"""One container: start, run commands with limits, move files in and out, keep it as an image, stop."""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from agentenv.core import SandboxCrashed, SandboxUnavailable, UsageError
from agentenv.sandbox import ExecResult, ExecVerdict, Output, SandboxLimits, settle
from agentenv_containers.endpoint import forward
from agentenv_containers.processes import COUNT_SERVERS, END_OTHERS, WAIT_FOR_FIRST
from agentenv_containers.runtime import LABEL, AnswerTooLong, Runtime, Said, end, owner
from agentenv_containers.runtime_check import mend_of
from agentenv_containers.seccomp import profile_file

__all__ = [
    "MAX_FOLDER_BYTES",
    "ROOT",
    "Container",
    "ContainerSettings",
    "Flood",
    "NotStarted",
    "tar_of",
    "untar",
]

_MIB = 1 << 20
_FIRST = (
    "env --ignore-signal=CHLD true 2>/dev/null && exec env --ignore-signal=CHLD sleep infinity; "
    "exec sleep infinity"
)
"""Process 1. Where the image's `env` can, it ignores SIGCHLD: then the kernel reaps orphans, which would
otherwise count as processes. It has no child, which `kill -9 -1` would end."""
ROOT = "0:0"
"""Root by number: an agent may have written over /etc/passwd."""
_STARTED = "AGENTENV_STARTED_"
_START_WITHIN_S = 120.0
"""Seconds in which a command must start; a machine under load takes several."""
MAX_FOLDER_BYTES = 1 << 30
"""Largest folder that is read out of a container."""
MAX_FILE_BYTES = 64 * _MIB
"""Largest file that is read out of a container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """What a container is made of, and its limits."""

    image: str
    network: str = "none"
    """`none`, or `open`: the runtime's own network, from which the internet can be reached."""
    options: tuple[str, ...] = ()
    """Further options of `run`; a `--network` among them stands in the place of `network`."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str = ""
    """Directory of commands; empty means the image's. podman makes that one at the start, no other."""
    cpus: float | None = None
    memory_bytes: int | None = None
    max_processes: int | None = 4096
    keeps_entrypoint: bool = False
    """Run the image's own entrypoint, whose command our first process is. Otherwise none of it runs."""
    command: tuple[str, ...] | None = None
    """What runs in the place of our first process; nothing stands for the image's own command."""
    confined: SandboxLimits | None = None
    """Limits of the sandbox, for a container that runs bare code: nothing can be written but /work, /tmp and
    /dev/shm, which are in memory, and no process has a capability."""

    def __post_init__(self) -> None:
        if self.network not in ("none", "open"):
            raise UsageError(f"network must be none or open, not {self.network!r}")
        # Tasks of strangers name images, and this would be an option of podman.
        if self.image.startswith("-"):
            raise UsageError(f"{self.image!r} is no name of an image")

    def words(self, runtime: Runtime) -> list[str]:
        """Return the options of `run`, the image and the command."""
        first = ("sh", "-c", _FIRST) if self.keeps_entrypoint else ("-c", _FIRST)
        command = first if self.command is None else self.command
        return [*self._options(runtime), *self.options, self.image, *command]

    def _options(self, runtime: Runtime) -> list[str]:
        joins = any(option.startswith("--network=") for option in self.options)
        options = [] if joins else [f"--network={'none' if self.network == 'none' else 'bridge'}"]
        options += [f"--env={name}={value}" for name, value in self.env.items()]
        for name, value in (
            ("cpus", self.cpus),
            ("memory", self.memory_bytes),
            ("memory-swap", self.memory_bytes),
            ("pids-limit", self.max_processes),
        ):
            options += [f"--{name}={value}"] if value else []
        options += [] if self.keeps_entrypoint else ["--entrypoint=sh"]
        return options + (_confined(self.confined, runtime) if self.confined is not None else [])


def _confined(limits: SandboxLimits, runtime: Runtime) -> list[str]:
    room = "rw,exec,nosuid,nodev,mode=1777"
    options = [
        "--read-only",
        "--cap-drop=all",
        "--security-opt=no-new-privileges",
        "--user=65534:65534",
        "--workdir=/work",
        f"--tmpfs=/work:{room},size={limits.work_bytes}",
        f"--tmpfs=/tmp:{room},size={limits.work_bytes}",
        f"--shm-size={limits.shm_bytes}",
        f"--ulimit=nofile={limits.max_open_files}:{limits.max_open_files}",
        f"--ulimit=fsize={limits.max_file_bytes}:{limits.max_file_bytes}",
        "--ulimit=core=0:0",
        "--ulimit=nproc=4096:4096",  # counts all processes of the user; pids-limit is the container's own
        "--ulimit=memlock=65536:65536",
        "--ulimit=sigpending=128:128",
        # Objects of System V and of POSIX queues would outlive an execution.
        *("--sysctl=kernel.shmmni=0", "--sysctl=kernel.msgmni=0", "--sysctl=kernel.sem=1 1 1 0"),
        "--sysctl=fs.mqueue.queues_max=0",
    ]
    if runtime.is_podman:
        options.append("--read-only-tmpfs=false")
        if profile := profile_file():
            options.append(f"--security-opt=seccomp={profile}")
    return options


class NotStarted(SandboxCrashed):
    """The command did not start, so it can be run again in another container."""


class Container:
    """One container. Its failures are `SandboxCrashed`, which aborts an episode, and never a result.

    Args:
        runtime: the runtime.
        settings: what it is made of.
    """

    def __init__(self, runtime: Runtime, settings: ContainerSettings) -> None:
        self.runtime = runtime
        self.settings = settings
        self.name = f"{LABEL}-{owner()}-{secrets.token_hex(4)}"
        self._forwards: dict[tuple[str, int], asyncio.Server] = {}
        self._first = ""
        """The processes that the image's entrypoint had started, as `processes.LIST` names them."""
        self.gone = False

    async def start(self) -> None:
        """Start the container.

        Raises:
            SandboxCrashed: It could not be started.
            SandboxUnavailable: There is no such program or image.
        """
        try:
            async with self.runtime.starting():
                label = f"--label={LABEL}={owner()}"
                words = self.settings.words(self.runtime)
                self.runtime.living.add(self.name)
                await self.runtime.check("run", "-d", "--name", self.name, label, "--pull=never", *words)
                if self.settings.keeps_entrypoint and self.settings.command is None:
                    await self._wait_for_first()
        except SandboxCrashed as error:
            await asyncio.shield(self.stop())
            if mend := mend_of(error.message):
                raise SandboxUnavailable(error.message, remedy=mend) from error
            raise
        except BaseException:
            # A start that was cancelled or timed out may have made the container all the same.
            await asyncio.shield(self.stop())
            raise

    async def _wait_for_first(self) -> None:
        """Wait until the image's entrypoint has started what it starts."""
        try:
            self._first = " ".join((await self.run(WAIT_FOR_FIRST)).decode().split())
        except SandboxCrashed as error:
            said = await self.runtime.run("logs", "--tail", "20", self.name)
            told = (said.out + said.err).decode(errors="replace").strip()[-600:]
            if await self.is_running() or said.code:
                raise
            raise SandboxCrashed(f"the entrypoint of {self.settings.image} ended: {told}") from error

    async def end_processes(self) -> bool:
        """End all processes but those that the image's entrypoint had started; return whether one served.

        Raises:
            SandboxCrashed: Some go on.
        """
        # One call ends all but process 1 at once, so that none can fork.
        ends = "kill -9 -1 2>/dev/null; true" if " " not in self._first else END_OTHERS
        kept = f"KEPT= {self._first} "
        before = _number(await self.run(("env", kept, "sh", "-c", f"{COUNT_SERVERS}; {ends}")))
        return before > len(self._forwards) and _number(await self.run(COUNT_SERVERS)) < before

    async def stop(self) -> None:
        """Kill and remove the container; may be called twice."""
        self.gone = True
        for server in self._forwards.values():
            server.close()
        self._forwards.clear()
        said = await self.runtime.remove(self.name)
        gone = (b"no such container", b"no container")
        if said.code and not any(text in said.err.lower() for text in gone):
            raise SandboxCrashed(f"container {self.name} cannot be removed: {said.problem}")

    async def exec(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        limits: SandboxLimits,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        workdir: str = "",
        stdin: bytes | None = None,
        capped: bool = False,
        ends_others: bool = False,
    ) -> ExecResult:
        """Run a command. The time limit starts with the command, not with the runtime's work before it.

        A command that reaches a limit is killed with the whole container, which is then `gone`.

        Args:
            command: the program and its arguments.
            timeout_s: time limit in seconds.
            limits: limits of the output, and with `capped` of each process.
            env: further environment variables.
            user: user in the container; None or nothing means the image's.
            workdir: directory in the container; empty means that of the settings.
            stdin: standard input; None means empty.
            capped: limit address space and processor time of each process.
            ends_others: end all other processes of the user once the command has ended.

        Raises:
            SandboxCrashed: The container or its runtime failed.
        """
        mark = _STARTED + secrets.token_hex(8)
        script = _script(mark, limits, capped=capped, ends_others=ends_others, drains=bool(stdin))
        options = ["-i"] if stdin else []
        options += [f"--env={name}={value}" for name, value in (env or {}).items()]
        options += self.exec_options(user, workdir)
        process = await self.runtime.spawn(
            "exec", *options, self.name, "sh", "-c", script, "sh", *command, stdin=bool(stdin)
        )
        running = _Running(process, mark.encode() + b"\n", limits)
        try:
            verdict = await running.finish(stdin or b"", timeout_s)
        finally:
            await end(process)
        if not running.started and not verdict.reason:
            told = (running.err.text() or running.out.text()).strip()[-600:]
            raise NotStarted(
                f"container {self.name} cannot run a command (exit code {process.returncode}): {told}"
            )
        may_lack = capped and (verdict.reason == "timeout" or verdict.exit == 137)
        if may_lack and await self._ran_out_of_memory():
            verdict.reason = "memory"
        if verdict.reason:
            await self.stop()
        return settle(verdict, running.out, running.err, timeout_s, limits)

    def exec_options(self, user: str | int | None, workdir: str = "") -> list[str]:
        """Return options of the runtime's `exec` for a user and a directory, or for those of the image."""
        as_user = [] if user in (None, "") else [f"--user={user}"]
        where = workdir or self.settings.workdir
        return [*as_user, *([f"--workdir={where}"] if where else [])]

    async def run(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes | None = None,
        timeout_s: float = 120.0,
        user: str = ROOT,
    ) -> bytes:
        """Run a command of our own and return its output.

        Raises:
            SandboxCrashed: It failed.
        """
        line = ("sh", "-c", "--", command) if isinstance(command, str) else tuple(command)
        as_user = (f"--user={user}",) if user else ()
        more = ("-i",) if stdin else ()
        return await self.runtime.check(
            "exec", *more, *as_user, self.name, *line, stdin=stdin or None, timeout_s=timeout_s
        )

    async def is_running(self) -> bool:
        """Return whether the container is there and runs."""
        said = await self.runtime.run("inspect", "-f", "{{.State.Running}}", self.name)
        return said.code == 0 and said.out.strip() == b"true"

    async def put(self, folder: Path | Mapping[str, bytes], target: str, *, user: str = ROOT) -> None:
        """Write a folder, or files by relative path, into a directory of the container.

        For root the runtime writes them, and no program of the container, which an agent may have replaced.
        """
        data = await asyncio.to_thread(tar_of, folder, target if user == ROOT else "")
        if user == ROOT:
            await self.runtime.check("cp", "-", f"{self.name}:/", stdin=data)
            return
        line = 'mkdir -p "$0" && tar -xmf - --no-same-owner -C "$0"; code=$?; cat >/dev/null; exit $code'
        await self.run(("sh", "-c", line, target), stdin=data, user=user)

    async def get(self, path: str, *, user: str | int | None = ROOT) -> bytes | None:
        """Return the content of a file; None if there is none, or one larger than 64 MiB.

        For root the runtime reads it, and no program of the container, which an agent may have replaced.
        """
        if user == ROOT:
            try:
                data = await self._copy_of(path, MAX_FILE_BYTES + _MIB)
            except AnswerTooLong:
                return None
            return None if data is None else _only_file(data)
        line = f'[ -f "$0" ] && [ "$(wc -c < "$0")" -le {MAX_FILE_BYTES} ] && cat "$0"'
        as_user = () if user is None else (f"--user={user}",)
        said = await self.runtime.run("exec", *as_user, self.name, "sh", "-c", line, path)
        return said.out if await self._answered(said) else None

    async def get_folder(self, path: str, target: Path, *, exclude: Sequence[str] = ()) -> bool:
        """Copy a file or folder of the container into an empty folder of ours; False if there is none.

        The runtime reads it, and no program of the container.

        Raises:
            SandboxCrashed: It is too large, or the container is gone.
        """
        data = await self._copy_of(path, MAX_FOLDER_BYTES)
        if data is not None:
            await asyncio.to_thread(untar, data, target, top=PurePosixPath(path).name, exclude=exclude)
        return data is not None

    async def _copy_of(self, path: str, most: int) -> bytes | None:
        """Return an archive of a file or folder; None if there is none."""
        said = await self.runtime.run("cp", f"{self.name}:{path}", "-", most=most)
        return said.out if await self._answered(said) else None

    async def _answered(self, said: Said) -> bool:
        """Return whether a command of the runtime succeeded in a container that runs.

        Raises:
            SandboxCrashed: The container is gone.
        """
        if said.code and not await self.is_running():
            raise SandboxCrashed(f"container {self.name} is gone: {said.problem}")
        return said.code == 0

    async def commit(self, image: str) -> None:
        """Keep the container's files as an image, for branches; its processes are not kept."""
        await self.runtime.check("commit", "-q", self.name, image, timeout_s=600.0)

    async def reach(self, host: str, port: int, *, at: str = "127.0.0.1") -> None:
        """Let processes in the container reach one server, at an address of its own and the same port.

        Args:
            host: 127.0.0.1, which is this machine's, or the name of a host of the internet.
            port: the port, there and inside.
            at: the address inside.
        """
        if (at, port) not in self._forwards:
            pid = int(await self.runtime.check("inspect", "-f", "{{.State.Pid}}", self.name))
            self._forwards[at, port] = await forward(pid, host, port, at)

    async def _ran_out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process of the container for its memory."""
        said = await self.runtime.run(
            *("exec", self.name, "sh", "-c"),
            "cat /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events 2>/dev/null",
        )
        fields = [line.split() for line in said.out.decode(errors="replace").splitlines()]
        return any(len(parts) == 2 and parts[0] == "oom_kill" and parts[1] != "0" for parts in fields)


def _number(said: bytes) -> int:
    """Return the number that a command said; 0 for anything else that an agent lets it say."""
    return int(said) if said.strip().isdigit() else 0


def _script(mark: str, limits: SandboxLimits, *, capped: bool, ends_others: bool, drains: bool) -> str:
    """Return the line of `sh` that runs a command: it says that it has started, and sets limits.

    podman loses output if a command ends without having read its input, so the rest of it is read.
    """
    lines = [f"printf '{mark}\\n' >&2"]
    if capped:
        lines.append(f"ulimit -v {limits.address_space_bytes >> 10}; ulimit -t {limits.cpu_s}")
    if not (ends_others or drains):
        return "; ".join([*lines, 'exec "$@"'])
    # `kill -9 -1` spares this shell itself, which then passes the exit code on.
    lines += ['"$@"', "code=$?", *(["kill -9 -1 2>/dev/null"] if ends_others else [])]
    return "; ".join([*lines, *(["cat >/dev/null 2>&1"] if drains else []), "exit $code"])


class Flood(Exception):
    """The command wrote more output than allowed."""


async def _read_into(stream: asyncio.StreamReader | None, output: Output, limits: SandboxLimits) -> None:
    """Read a stream to its end.

    Raises:
        Flood: It has more than the allowed output.
    """
    assert stream is not None
    while data := await stream.read(1 << 16):
        output.add(data)
        if output.total > limits.max_output_bytes:
            raise Flood


class _Running:
    """A command that runs in a container."""

    def __init__(self, process: asyncio.subprocess.Process, mark: bytes, limits: SandboxLimits) -> None:
        self.process, self.mark, self.limits = process, mark, limits
        self.out, self.err = Output(limits.output_bytes), Output(limits.output_bytes)
        self.started = False

    async def finish(self, stdin: bytes, timeout_s: float) -> ExecVerdict:
        """Wait for the end of the command, or for a limit, which is then the verdict's reason."""
        loop = asyncio.get_running_loop()
        began, reason = loop.time(), ""
        feeding = asyncio.create_task(self._feed(stdin))
        try:
            async with asyncio.timeout(_START_WITHIN_S):
                await self._wait_for_start()
            began = loop.time()
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                group.create_task(_read_into(self.process.stdout, self.out, self.limits))
                group.create_task(_read_into(self.process.stderr, self.err, self.limits))
                group.create_task(self.process.wait())
        except TimeoutError:
            if not self.started:
                raise NotStarted(f"a command did not start within {_START_WITHIN_S:g} s") from None
            reason = "timeout"
        except ExceptionGroup as several:
            if several.split(Flood)[1] is not None:
                raise
            reason = "output_limit"
        finally:
            feeding.cancel()
        code = self.process.returncode
        return ExecVerdict(exit=-9 if code is None else code, reason=reason, duration_s=loop.time() - began)

    async def _wait_for_start(self) -> None:
        """Read the runtime's messages until the command says that it has started."""
        assert self.process.stderr is not None
        seen = b""
        while self.mark not in seen:
            data = await self.process.stderr.read(1 << 16)
            seen += data
            if not data:
                self.err.add(seen)
                return
        before, _, after = seen.partition(self.mark)
        self.started = True
        self.err.add(before + after)

    async def _feed(self, data: bytes) -> None:
        stream = self.process.stdin
        if stream is None:
            return
        with contextlib.suppress(ConnectionError):
            stream.write(data)
            await stream.drain()
        stream.close()


def tar_of(folder: Path | Mapping[str, bytes], top: str = "") -> bytes:
    """Return a folder, or files by relative path, as a tar archive owned by root, below a directory `top`."""
    data, top = io.BytesIO(), top.strip("/") or "."
    with tarfile.open(fileobj=data, mode="w") as tar:
        if isinstance(folder, Path):
            tar.add(folder, arcname=top, filter=_as_root)
        else:
            for name, content in folder.items():
                entry = tarfile.TarInfo(f"{top}/{name}" if top != "." else name)
                entry.size, entry.mode, entry.mtime = len(content), 0o644, int(time.time())
                tar.addfile(entry, io.BytesIO(content))
    return data.getvalue()


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _only_file(data: bytes) -> bytes | None:
    """Return the content of an archive's first entry; None if that is no file."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        entry = tar.next()
        file = tar.extractfile(entry) if entry is not None and entry.isfile() else None
        return None if file is None else file.read()


def untar(data: bytes, target: Path, *, top: str = "", exclude: Sequence[str] = ()) -> None:
    """Unpack an archive of a container into a folder; nothing lands outside of it, and no device is made.

    Args:
        data: the archive.
        target: the folder.
        top: name of what was archived, in place of the archive's own for it; empty keeps that.
        exclude: patterns of what to leave out, as `tar --exclude` reads them.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for entry in tar:
                if top:
                    entry.name = "/".join((top, *PurePosixPath(entry.name).parts[1:]))
                if _is_excluded(entry.name, exclude):
                    continue
                # Links out of the folder, devices and the like are left out, as the files of an enemy.
                with contextlib.suppress(tarfile.FilterError, OSError, KeyError):
                    tar.extract(entry, target, filter="data")
    except tarfile.TarError as error:
        raise SandboxCrashed(f"files of a container cannot be read: {error}") from error


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern fits any run of a path's parts, which leaves out what lies below as well."""
    parts = name.split("/")
    runs = ["/".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
    return any(fnmatchcase(run, pattern) for pattern in patterns for run in runs)
