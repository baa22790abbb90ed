"""Where a task is played elsewhere: a container of one of Harbor's providers, such as Modal or Daytona.

Harbor starts it, runs single commands in it and copies single files; all else is made of these here:

1. A command's output goes to a file in the container, so that processes that it leaves running do not keep
   the call waiting. The file is printed at the end, with a mark and the exit code behind it. Where the mark
   is missing, the provider has failed, whatever its exit code says.
2. There is no open standard input, so a bash writes its state to a file before it ends, and reads it when it
   begins.
3. The provider's own processes may run in the container, so not all are ended before the verifier, but those
   that were not there at the start.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import re
import secrets
import shlex
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from agentenv.core import (
    DependencyMissing,
    SandboxCrashed,
    SandboxUnavailable,
    TaskError,
    UsageError,
    install_line,
)
from agentenv.sandbox import ExecResult
from agentenv_containers import END_OTHERS, LIST, MAX_FOLDER_BYTES, ROOT, tar_of, untar
from agentenv_worlds.harbor.boxes import LIMITS, Box, ComposedBox, ContainerBox, Place, backend_of
from agentenv_worlds.harbor.format import HarborTask, Settings
from agentenv_worlds.harbor.services import services_of

__all__ = ["LOCAL", "ProviderBox", "box_of", "check_name", "check_runtime"]

LOCAL = ("podman", "docker")
_SLOW_S = 120.0
"""Seconds that a provider may need beside a command's own time, and for commands of ours."""
_STOP_S = 300.0
_SCRATCH = "/tmp/.agentenv-"  # noqa: S108 - in the container
_LONG = 60_000
"""Characters of a script, quoted twice, above which it is sent as a file: Linux takes 128 KiB an argument."""

_RUN = """out=$(mktemp /tmp/.agentenv.XXXXXX) || exit 1
timeout -k 5 {seconds} {command} > "$out" 2>&1 < /dev/null
code=$?
size=$(wc -c < "$out")
if [ "$size" -le {keep} ]; then cat "$out"; else head -c {half} "$out"
printf '\\n[... %s bytes left out ...]\\n' $((size - {keep})); tail -c {half} "$out"; fi
rm -f "$out"
printf '%s %s\\n' {mark} $code"""
_BASH = """agentenv_state={scratch}$UID
agentenv_keep() {{
    unset BASH_EXECUTION_STRING
    {{ printf 'cd -- %q\\n' "$PWD"; declare -p; declare -f; }} > "$agentenv_state" 2>/dev/null
}}
trap agentenv_keep EXIT
[ -f "$agentenv_state" ] && . "$agentenv_state" 2>/dev/null
eval {line}
agentenv_code=$?
agentenv_keep
exit $agentenv_code"""


class ProviderBox:
    """A container of one of Harbor's providers.

    Args:
        runtime: name of the provider, or `module:Class` of an environment of Harbor.
        place: what it is made of.
    """

    def __init__(self, runtime: str, place: Place) -> None:
        self.runtime, self.place = runtime, place
        self._environment: Any = None
        self._kept = ""
        self._root: str | None = "root"
        self._here = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

    async def start(self) -> None:
        """Build or find the image, and start the container."""
        try:
            await self._begin()
        except BaseException:
            # A start that failed or was cancelled may have made the container all the same.
            with suppress(SandboxCrashed):
                await asyncio.shield(self.stop())
            raise

    async def _begin(self) -> None:
        self._environment = _made(self.runtime, self.place, Path(self._here.name))
        async with self._failing("start a container", self.place.part.build_timeout_sec):
            await self._environment.start(force_build=False)
        # Where the image's user is root, no `su` is needed, which an agent may have replaced.
        if (await self.sh("id -u", timeout_s=_SLOW_S)).stdout.strip() == "0":
            self._root = None
        first, second = [(await self._ours(LIST)).stdout.split() for _ in range(2)]
        self._kept = f" {' '.join(each for each in first if each in second)} "

    async def stop(self) -> None:
        """Remove the container; may be called twice."""
        environment, self._environment = self._environment, None
        try:
            if environment is not None:
                async with self._failing("remove a container", _STOP_S):
                    await environment.stop(delete=True)
        finally:
            self._here.cleanup()

    async def sh(
        self,
        line: str,
        *,
        timeout_s: float,
        user: str | int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run a line of a shell in the working directory; a time-out ends its process group."""
        return await self._run("sh", line, timeout_s, user, env)

    async def bash(self, line: str, *, timeout_s: float, user: str | int | None = None) -> ExecResult:
        """Run a line in a bash that goes on where the last one ended."""
        script = _BASH.format(scratch=f"{_SCRATCH}state-", line=shlex.quote(line))
        try:
            return await self._run("bash", script, timeout_s, user, None)
        except _Unfinished:
            # The line may have killed all processes, as `kill -9 -1` does: then the container still answers.
            await self.sh("true", timeout_s=_SLOW_S)
            return ExecResult(status="killed", exit_code=-9, note="the shell was killed")

    async def end_processes(self) -> bool:
        """End all that was not there at the start, and remove the files of bashes."""
        await self._ours(f"{END_OTHERS} && rm -rf {_SCRATCH}*", {"KEPT": self._kept})
        return False

    async def put(self, folder: Path | Mapping[str, bytes], target: str) -> None:
        """Write a folder, or files by relative path, into a directory of the container."""
        data, there, name = await asyncio.to_thread(tar_of, folder), _scratch(), shlex.quote(target)
        await self._upload(data, there)
        unpack = f"mkdir -p {name} && tar -xmf {there} --no-same-owner -C {name}"
        await self._ours(f"{unpack}; code=$?; rm -f {there}; exit $code")

    async def get(self, path: str, *, user: str | int | None = ROOT) -> bytes | None:
        """Return the content of a file; None if there is none, or one larger than 64 MiB."""
        there, name = _scratch(), shlex.quote(path)
        line = f'[ -f {name} ] && [ "$(wc -c < {name})" -le {64 << 20} ] && cat {name} > {there}'
        done = await self.sh(line, timeout_s=_SLOW_S, user=user)
        return await self._download(there) if done.ok else None

    async def get_folder(self, path: str, target: Path, *, exclude: Sequence[str] = ()) -> bool:
        """Copy a file or folder of the container into an empty folder of ours; False if there is none.

        Raises:
            SandboxCrashed: It is too large, or the container is gone.
        """
        there, where = _scratch(), PurePosixPath(path)
        words = [*(f"--exclude={pattern}" for pattern in exclude), "-C", str(where.parent), where.name or "."]
        line = (
            f"[ -e {shlex.quote(path)} ] || exit 9; "
            f"tar -cf - {shlex.join(words)} | head -c {MAX_FOLDER_BYTES} > {there}"
        )
        done = await self.sh(line, timeout_s=_SLOW_S, user=ROOT)
        if done.exit_code == 9:
            return False
        data = await self._download(there) if done.ok else b""
        if not done.ok or len(data) >= MAX_FOLDER_BYTES:
            raise SandboxCrashed(f"{path} cannot be copied: {done.text()[-300:] or 'too large'}")
        await asyncio.to_thread(untar, data, target)
        return True

    async def _run(
        self, shell: str, script: str, timeout_s: float, user: str | int | None, env: Mapping[str, str] | None
    ) -> ExecResult:
        if len(shlex.quote(shlex.quote(script))) > _LONG:
            there = _scratch()
            await self._upload(script.encode(errors="replace"), there)
            command = f"{shell} {there}"
        else:
            command = f"{shell} -c -- {shlex.quote(script)}"
        mark, seconds, keep = f"AGENTENV_{secrets.token_hex(8)}", math.ceil(timeout_s), LIMITS.output_bytes
        line = _RUN.format(seconds=seconds, command=command, keep=keep, half=keep // 2, mark=mark)
        began, limit = time.monotonic(), seconds + _SLOW_S
        async with self._failing("run a command", limit):
            said = await self._there.exec(
                line, env=dict(env or {}) or None, timeout_sec=int(limit), user=self._user(user)
            )
        ended = re.fullmatch(rf"(.*){mark} (\d+)\s*", said.stdout or "", re.DOTALL)
        if ended is None:
            raise _Unfinished(f"{self.runtime} did not run a command to its end: {_told(said)}")
        return _result(ended[1], int(ended[2]), time.monotonic() - began, seconds)

    def _user(self, user: str | int | None) -> str | int | None:
        return self._root if user == ROOT else user

    async def _ours(self, line: str, env: Mapping[str, str] | None = None) -> ExecResult:
        """Run a line of ours as root.

        Raises:
            SandboxCrashed: It failed.
        """
        done = await self.sh(line, timeout_s=_SLOW_S, user=ROOT, env=env)
        if not done.ok:
            raise SandboxCrashed(
                f"{line.split(maxsplit=1)[0]} failed at {self.runtime}: {done.text()[-300:]}"
            )
        return done

    async def _upload(self, data: bytes, there: str) -> None:
        here = Path(self._here.name, PurePosixPath(there).name)
        await asyncio.to_thread(here.write_bytes, data)
        async with self._failing("take a file", _STOP_S):
            await self._there.upload_file(here, there)
        await asyncio.to_thread(here.unlink)

    async def _download(self, there: str) -> bytes:
        here = Path(self._here.name, PurePosixPath(there).name)
        async with self._failing("give a file", _STOP_S):
            await self._there.download_file(there, here)
        await self._ours(f"rm -f {there}")
        return await asyncio.to_thread(here.read_bytes)

    @property
    def _there(self) -> Any:
        """Harbor's environment; a container that was removed has none."""
        if self._environment is None:
            raise SandboxCrashed("the container is gone")
        return self._environment

    @asynccontextmanager
    async def _failing(self, what: str, limit_s: float) -> AsyncGenerator[None]:
        """Limit the time of a provider, and turn what it raises into `SandboxCrashed`."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except Exception as error:  # the SDK of each provider has its own
            is_late = isinstance(error, TimeoutError)
            told = str(error) or (f"not within {limit_s:g} s" if is_late else type(error).__name__)
            raise SandboxCrashed(f"{self.runtime} did not {what}: {told[-600:]}") from error


class _Unfinished(SandboxCrashed):
    """The provider answered, and the command was not run to its end."""


def box_of(runtime: str, place: Place, variables: frozenset[str]) -> Box:
    """Return the box of a runtime, which is not started yet.

    Raises:
        TaskError: The task has services, which are played with podman and at Harbor's providers only.
    """
    if runtime not in LOCAL:
        return ProviderBox(runtime, place)
    known = {**place.env, **{name: os.environ[name] for name in variables if name in os.environ}}
    services = services_of(place.build, known)
    if services and runtime != "podman":
        raise TaskError(f"{place.task.folder.name}: tasks of several containers are played with podman only")
    return ComposedBox(runtime, place, services, known) if services else ContainerBox(runtime, place)


def check_name(runtime: str, agent: str) -> None:
    """Check that there is such a runtime, for an agent too, and that Harbor is there if it is Harbor's.

    Raises:
        UsageError: One of these is not so.
    """
    if runtime in LOCAL:
        return
    if agent:
        raise UsageError(
            f"env.agent cannot be played with env.runtime={runtime}: "
            "an agent in a container elsewhere does not reach the model of this run",
            remedy="use podman or docker, or leave env.agent out: then our tools play there",
        )
    if find_spec("harbor") is None:
        raise DependencyMissing(
            f"env.runtime={runtime} is neither podman nor docker; others need Harbor, which is not installed",
            remedy=f"{install_line('harbor')}, with Python 3.12 or newer",
        )
    names = [each.value for each in _harbor("models.environment_type").EnvironmentType]
    if runtime not in names and ":" not in runtime:
        raise UsageError(f"unknown runtime {runtime!r}", remedy=f"use one of {', '.join(names)}")


async def check_runtime(runtime: str) -> None:
    """Check before the first episode that a runtime can be used.

    Raises:
        SandboxUnavailable: It cannot; the message says why.
        DependencyMissing: Its package is not installed.
    """
    if runtime in LOCAL:
        return await backend_of(runtime).check()
    return await asyncio.to_thread(_preflight, runtime)


def _preflight(runtime: str) -> None:
    own = runtime if ":" in runtime else None
    kind = None if own else _harbor("models.environment_type").EnvironmentType(runtime)
    try:
        _harbor("environments.factory").EnvironmentFactory.run_preflight(kind, own)
        with tempfile.TemporaryDirectory() as name:  # most providers ask for their package only here
            folder = Path(name)
            Path(folder, "Dockerfile").write_text("FROM debian\n")
            task = HarborTask(folder, Settings(), ())
            _made(runtime, Place(task, task.settings.environment, folder, {}, "open"), folder)
    except UsageError:
        raise
    except ImportError as error:
        raise DependencyMissing(f"{runtime} cannot be used: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"env.runtime={runtime} is no environment of Harbor: {error}") from error
    except SystemExit as error:  # so Harbor tells that a key is missing
        remedy = "set up the provider as Harbor wants it, or use podman or docker"
        raise SandboxUnavailable(f"{runtime} cannot be used: {error}", remedy=remedy) from error


def _made(runtime: str, place: Place, folder: Path) -> Any:
    """Return Harbor's environment, which is not started yet.

    Raises:
        TaskError: The provider cannot do what the task wants, such as no network.
    """
    config = _harbor("models.task.config")
    factory = _harbor("environments.factory").EnvironmentFactory
    trial = importlib.import_module("harbor.models.trial.config").EnvironmentConfig
    paths = _harbor("models.trial.paths").TrialPaths(folder / "trial")
    paths.mkdir()
    part = place.part
    wanted = part.model_dump(
        include={"build_timeout_sec", "docker_image", "cpus", "memory_mb", "storage_mb", "workdir"},
        exclude_none=True,
    )
    mode = "public" if place.network == "open" else "allowlist" if place.hosts else "no-network"
    chosen = {"import_path": runtime} if ":" in runtime else {"type": runtime}
    try:
        return factory.create_environment_from_config(
            trial(**chosen, env=dict(place.env)),
            environment_dir=place.build,
            environment_name=place.task.folder.name,
            session_id=f"agentenv-{secrets.token_hex(6)}",
            trial_paths=paths,
            task_env_config=config.EnvironmentConfig(**wanted),
            network_policy=config.NetworkPolicy(network_mode=mode, allowed_hosts=list(place.hosts)),
            enable_environment_dir_upload=False,
        )
    except ImportError as error:
        raise DependencyMissing(f"{runtime} cannot be used: {error}") from error
    except Exception as error:  # each provider has its own
        raise TaskError(f"{place.task.folder.name} cannot be played with {runtime}: {error}") from error


def _harbor(name: str) -> Any:
    return importlib.import_module(f"harbor.{name}")


def _scratch() -> str:
    return f"{_SCRATCH}{secrets.token_hex(8)}"


def _told(said: Any) -> str:
    return f"exit code {said.return_code}: {(said.stderr or said.stdout or '').strip()[-600:]}"


def _result(text: str, code: int, took_s: float, limit_s: float) -> ExecResult:
    status, note = ("ok", "") if code == 0 else ("error", f"exit code {code}")
    # 124 and 137 are also what a command itself may end with.
    if code in (124, 137) and took_s >= limit_s:
        status, note = "timeout", f"time limit of {limit_s:g} s reached; the command was ended"
    return ExecResult(status=status, stdout=text, exit_code=code, duration_s=took_s, note=note)
