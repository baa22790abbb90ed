"""A provider of Harbor that plays in podman of this machine, and one that fails, in place of those in a cloud."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities


async def podman(*words: object) -> ExecResult:
    """Run a command of podman."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("podman", *map(str, words), stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    code = process.returncode or 0
    return ExecResult(stdout=out.decode(errors="replace"), stderr=err.decode(), return_code=code)


class Local(BaseEnvironment):
    """A container of podman, with a process of the provider's own in it."""

    @staticmethod
    def type() -> str:
        return "local"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        """Take every folder."""

    async def start(self, force_build: bool) -> None:
        image = self.task_env_config.docker_image
        if not image:
            image = (await self._podman("build", "-q", self.environment_dir)).stdout.strip()
        network = "none" if self._network_disabled else "host"
        options = ["--name", self.session_id, f"--network={network}"]
        await self._podman("run", "-d", *options, "--entrypoint", "sleep", image, "infinity")
        await self._podman("exec", "-d", self.session_id, "sleep", "987654")

    async def stop(self, delete: bool) -> None:
        await self._podman("rm", "-f", "-t", "0", self.session_id)

    async def exec(
        self, command: str, cwd: Any = None, env: Any = None, timeout_sec: Any = None, user: Any = None
    ) -> ExecResult:
        words = [f"--env={name}={value}" for name, value in (self._merge_env(env) or {}).items()]
        words += [f"--user={user}"] if user is not None else []
        words += [f"--workdir={self.task_env_config.workdir}"] if self.task_env_config.workdir else []
        return await podman("exec", *words, self.session_id, "bash", "-c", command)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._podman("cp", source_path, f"{self.session_id}:{target_path}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._podman("cp", f"{self.session_id}:{source_path}", target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        raise NotImplementedError

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        raise NotImplementedError

    async def _podman(self, *words: object) -> ExecResult:
        done = await podman(*words)
        if done.return_code:
            raise RuntimeError(f"podman {words[0]}: {done.stderr}")
        return done


class NeverStarts(Local):
    """A provider that has no container to give."""

    async def start(self, force_build: bool) -> None:
        raise ConnectionError("quota exceeded")


class ForgetsCommands(Local):
    """A provider whose connection breaks at the model's command."""

    async def exec(self, command: str, *args: Any, **kwargs: Any) -> ExecResult:
        if "touch /root/now" in command:
            raise OSError("stream reset")
        return await super().exec(command, *args, **kwargs)


class LosesContainers(Local):
    """A provider that answers with an exit code of its own when the container has gone."""

    async def exec(self, command: str, *args: Any, **kwargs: Any) -> ExecResult:
        if "touch /root/now" in command:
            await self._podman("rm", "-f", "-t", "0", self.session_id)
        return await super().exec(command, *args, **kwargs)
