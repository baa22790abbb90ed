"""Where a task is played: what every box does, and the container of podman or docker."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from agentenv.sandbox import ExecResult, SandboxLimits
from agentenv_containers import (
    DOCKER,
    PODMAN,
    ROOT,
    Container,
    ContainerBackend,
    ContainerSettings,
    KnownAgent,
    Shell,
    agent_image,
)
from agentenv_worlds.harbor.format import EnvironmentPart, HarborTask, Step

__all__ = ["LIMITS", "Box", "ContainerBox", "Place", "backend_of"]

LIMITS = SandboxLimits(timeout_s=600.0, output_bytes=64 << 10, max_output_bytes=64 << 20)
"""Limits of the output of one command."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """What a box is made of."""

    task: HarborTask
    part: EnvironmentPart
    build: Path
    """Folder with the Dockerfile, unless the part names an image."""
    env: Mapping[str, str]
    """Environment variables, filled in."""
    network: str
    """`none` or `open`."""
    agent: KnownAgent | None = None
    """An agent to be installed in the image."""

    @classmethod
    def of_verifier(cls, task: HarborTask, step: Step, env: Mapping[str, str]) -> tuple[Place, bool]:
        """Return where a step is verified apart from the agent, and whether its image has the tests."""
        part = step.verifier.environment or task.settings.environment
        mode = step.verifier.network_mode or part.network_mode
        network = "none" if mode == "no-network" else "open"
        own = next((path for path in reversed(step.tests) if (path / "Dockerfile").is_file()), None)
        given, of_task = step.verifier.environment, task.settings.verifier.environment
        # A step's Dockerfile comes before an image that only its task names, as in Harbor.
        first = given is of_task and own is not None and own != task.folder / "tests"
        if given is not None and given.docker_image and not first:
            return cls(task, part, step.tests[-1], env, network), True
        if own is not None:
            return cls(task, part.model_copy(update={"docker_image": None}), own, env, network), True
        image = task.settings.environment.docker_image
        return cls(
            task, part.model_copy(update={"docker_image": image}), task.folder / "environment", env, network
        ), False


class Box(Protocol):
    """Where a task is played. Its failures are `SandboxCrashed`, and never the result of a command."""

    async def start(self) -> None:
        """Build or find the image, and start the box."""
        ...

    async def stop(self) -> None:
        """Remove the box; may be called twice."""
        ...

    async def sh(
        self,
        line: str,
        *,
        timeout_s: float,
        user: str | int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run a line of a shell in the working directory."""
        ...

    async def bash(self, line: str, *, timeout_s: float, user: str | int | None = None) -> ExecResult:
        """Run a line in a bash that keeps its directory and variables; a time-out ends what it runs."""
        ...

    async def end_processes(self) -> None:
        """End all that the agent has left running."""
        ...

    async def put(self, folder: Path | Mapping[str, bytes], target: str) -> None:
        """Write a folder, or files by relative path, into a directory of the box."""
        ...

    async def get(self, path: str, *, user: str | int | None = ROOT) -> bytes | None:
        """Return the content of a file; None if there is none, or one larger than 64 MiB."""
        ...

    async def get_folder(self, path: str, target: Path, *, exclude: Sequence[str] = ()) -> bool:
        """Copy a file or folder of the box into an empty folder of ours; False if there is none."""
        ...


class ContainerBox:
    """A container of podman or docker.

    Args:
        runtime: `podman` or `docker`.
        place: what it is made of.
    """

    def __init__(self, runtime: str, place: Place) -> None:
        self.runtime, self.place = backend_of(runtime).runtime, place
        self.shell: Shell | None = None
        self._container: Container | None = None

    async def start(self) -> None:
        """Build or find the image, and start the container."""
        part = self.place.part
        image = await self._image(part)
        if self.place.agent is not None:
            image = await agent_image(self.runtime, image, self.place.agent)
        settings = ContainerSettings(
            image=image,
            network=self.place.network,
            env=self.place.env,
            workdir=part.workdir or "",
            cpus=part.cpus,
            memory_bytes=None if part.memory_mb is None else part.memory_mb << 20,
            keeps_entrypoint=True,
        )
        self._container = Container(self.runtime, settings)
        await self._container.start()

    async def _image(self, part: EnvironmentPart) -> str:
        if not part.docker_image:
            return await self.runtime.build(self.place.build, timeout_s=part.build_timeout_sec)
        if not await self.runtime.has_image(part.docker_image):
            await self.runtime.check("pull", "-q", part.docker_image, timeout_s=part.build_timeout_sec)
        return part.docker_image

    @property
    def container(self) -> Container:
        """The container, once it was started."""
        assert self._container is not None, "the task's container was not started"
        return self._container

    async def stop(self) -> None:
        """Kill and remove the container."""
        if self.shell is not None:
            await self.shell.close()
        if self._container is not None:
            await self._container.stop()

    async def sh(
        self,
        line: str,
        *,
        timeout_s: float,
        user: str | int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run a line of a shell in the working directory; a time-out removes the container."""
        return await self.container.exec(
            ("sh", "-c", line), timeout_s=timeout_s, limits=LIMITS, user=_text(user), env=env
        )

    async def bash(self, line: str, *, timeout_s: float, user: str | int | None = None) -> ExecResult:
        """Run a line in a bash that keeps its state; a time-out ends that bash."""
        if self.shell is None or self.shell.user != _text(user):
            self.shell = Shell(self.container, LIMITS, user=_text(user))
        return await self.shell.command(line, timeout_s)

    async def end_processes(self) -> None:
        """End all that the agent has left running."""
        await self.container.end_processes()

    async def put(self, folder: Path | Mapping[str, bytes], target: str) -> None:
        """Write a folder, or files by relative path, into a directory of the container."""
        await self.container.put(folder, target)

    async def get(self, path: str, *, user: str | int | None = ROOT) -> bytes | None:
        """Return the content of a file; None if there is none, or one larger than 64 MiB."""
        return await self.container.get(path, user=user)

    async def get_folder(self, path: str, target: Path, *, exclude: Sequence[str] = ()) -> bool:
        """Copy a file or folder of the container into an empty folder of ours; False if there is none."""
        return await self.container.get_folder(path, target, exclude=exclude)


def backend_of(runtime: str) -> ContainerBackend:
    """Return the backend of `podman` or `docker`."""
    return PODMAN if runtime == "podman" else DOCKER


def _text(user: str | int | None) -> str:
    return "" if user is None else str(user)
