"""Where a task is played: what every box does, and the container of podman or docker."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from itertools import product
from pathlib import Path
from typing import Protocol

from agentenv.core import SandboxCrashed
from agentenv.sandbox import ExecResult, SandboxLimits
from agentenv_containers import (
    DOCKER,
    PODMAN,
    ROOT,
    Container,
    ContainerBackend,
    ContainerSettings,
    KnownAgent,
    Network,
    Shell,
    agent_image,
)
from agentenv_worlds.harbor.format import EnvironmentPart, HarborTask, Step
from agentenv_worlds.harbor.services import MAIN, Healthcheck, Service

__all__ = ["LIMITS", "Box", "ComposedBox", "ContainerBox", "Place", "backend_of", "why_unhealthy"]

_WEB = (80, 443)
"""Ports at which allowed hosts are reached."""
_FIRST_HOST = ip_address("127.1.0.1")
_HEALTHY_WITHIN_S = 3600.0
"""Seconds that a check has to pass, whatever its task says."""
_SLOW_S = 120.0
"""Seconds that the runtime may take beside a check's own."""
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
    hosts: tuple[str, ...] = ()
    """Hosts of the internet that are reached by HTTP and HTTPS without a network."""
    agent: KnownAgent | None = None
    """An agent to be installed in the image."""
    command: tuple[str, ...] | None = None
    """What runs in the container; nothing stands for the image's own command. None: it waits for ours."""
    options: tuple[str, ...] = ()
    """Further options of podman's `run`."""
    dockerfile: str = ""
    """Name of the file in `build` that stands in the place of its Dockerfile."""

    @classmethod
    def of_verifier(cls, task: HarborTask, step: Step, env: Mapping[str, str]) -> tuple[Place, bool]:
        """Return where a step is verified apart from the agent, and whether its image has the tests."""
        part = step.verifier.environment or task.settings.environment
        network, hosts = (step.verifier if step.verifier.network_mode else part).reached
        own = next((path for path in reversed(step.tests) if (path / "Dockerfile").is_file()), None)
        given, of_task = step.verifier.environment, task.settings.verifier.environment
        # A step's Dockerfile comes before an image that only its task names, as in Harbor.
        first = given is of_task and own is not None and own != task.folder / "tests"
        if given is not None and given.docker_image and not first:
            return cls(task, part, step.tests[-1], env, network, hosts), True
        if own is not None:
            part = part.model_copy(update={"docker_image": None})
            return cls(task, part, own, env, network, hosts), True
        part = part.model_copy(update={"docker_image": task.settings.environment.docker_image})
        return cls(task, part, task.folder / "environment", env, network, hosts), False


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

    async def end_processes(self) -> bool:
        """End all that the agent has left running; return whether a server is known to be among it."""
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


class ContainerBox(Container):
    """A container of podman or docker in which a task is played.

    Args:
        runtime: `podman` or `docker`.
        place: what it is made of.
    """

    def __init__(self, runtime: str, place: Place) -> None:
        super().__init__(backend_of(runtime).runtime, ContainerSettings(image=""))
        self.place = place
        self.shell: Shell | None = None

    async def start(self) -> None:
        """Build or find the image, and start the container."""
        part = self.place.part
        image = await self._image(part)
        if self.place.agent is not None:
            image = await agent_image(self.runtime, image, self.place.agent)
        self.settings = ContainerSettings(
            image=image,
            network=self.place.network,
            env=self.place.env,
            workdir=part.workdir or "",
            cpus=part.cpus,
            memory_bytes=None if part.memory_mb is None else part.memory_mb << 20,
            keeps_entrypoint=True,
            options=(*self.place.options, *(f"--add-host={host}:{at}" for host, at in self._hosts())),
            command=self.place.command,
        )
        await super().start()
        for (host, at), port in product(self._hosts(), _WEB):
            await self.reach(host, port, at=at)

    def _hosts(self) -> list[tuple[str, str]]:
        """Return the allowed hosts, each with its own address inside the container."""
        return [(host, str(_FIRST_HOST + index)) for index, host in enumerate(self.place.hosts)]

    async def _image(self, part: EnvironmentPart) -> str:
        if not part.docker_image:
            named = self.place.dockerfile and (self.place.build / self.place.dockerfile).read_text()
            return await self.runtime.build(
                self.place.build, dockerfile=named, timeout_s=part.build_timeout_sec
            )
        if not await self.runtime.has_image(part.docker_image):
            await self.runtime.check("pull", "-q", part.docker_image, timeout_s=part.build_timeout_sec)
        return part.docker_image

    async def stop(self) -> None:
        """Kill and remove the container."""
        if self.shell is not None:
            await self.shell.close()
        await super().stop()

    async def sh(
        self,
        line: str,
        *,
        timeout_s: float,
        user: str | int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ExecResult:
        """Run a line of a shell in the working directory; a time-out removes the container."""
        return await self.exec(("sh", "-c", line), timeout_s=timeout_s, limits=LIMITS, user=user, env=env)

    async def bash(self, line: str, *, timeout_s: float, user: str | int | None = None) -> ExecResult:
        """Run a line in a bash that keeps its state; a time-out ends that bash."""
        if self.shell is None or self.shell.user != user:
            self.shell = Shell(self, LIMITS, user=user)
        return await self.shell.command(line, timeout_s)


class ComposedBox(ContainerBox):
    """A container with the services of its task beside it, on a network of their own.

    Args:
        runtime: `podman`.
        place: what the task's own container is made of.
        services: the containers beside it and itself, each behind those that it waits for.
        variables: what a name without a value stands for in their environments.
    """

    def __init__(
        self, runtime: str, place: Place, services: Mapping[str, Service], variables: Mapping[str, str]
    ) -> None:
        super().__init__(runtime, place)
        self._network = Network(self.runtime, tuple(services), is_internal=place.network == "none")
        self._services, self._variables = services, variables
        self._beside: dict[str, ContainerBox] = {}

    async def start(self) -> None:
        """Start the network and the services in their order, and then the task's own container."""
        await self._network.start()
        for name, service in self._services.items():
            if name != MAIN:
                await self._wait_for_others(service)
                self._beside[name] = ContainerBox(self.runtime.program, self._place_of(name, service))
                await self._beside[name].start()
        main = self._services[MAIN]
        await self._wait_for_others(main)
        env = {**main.env(self._variables), **self.place.env}
        options = (*self._network.options(MAIN), *main.options)
        hosts = tuple(host for host in self.place.hosts if host not in self._services)
        self.place = dataclasses.replace(self.place, env=env, options=options, hosts=hosts)
        await super().start()

    def _place_of(self, name: str, service: Service) -> Place:
        build, part = service.build, self.place.part
        own = EnvironmentPart(
            docker_image=None if build else service.image,
            build_timeout_sec=part.build_timeout_sec,
        )
        return Place(
            self.place.task,
            own,
            build.context if build else self.place.build,
            service.env(self._variables),
            self.place.network,
            command=tuple(service.command),
            options=(*self._network.options(name), *service.options),
            dockerfile=build.dockerfile if build else "",
        )

    async def _wait_for_others(self, service: Service) -> None:
        """Wait until what a service depends on is as it wants it.

        Raises:
            SandboxCrashed: It does not become so.
        """
        for name, wanted in service.depends_on.items():
            box, check = self._beside[name], self._services[name].check
            told: str | None = None
            if wanted.condition == "service_healthy" and check is not None:
                told = await why_unhealthy(box, check)
            elif wanted.condition == "service_completed_successfully":
                code = (await self.runtime.check("wait", box.name, timeout_s=600.0)).decode().strip()
                told = None if code == "0" else f"it ended with {code}"
            if told is not None:
                logs = await self.runtime.run("logs", "--tail", "20", box.name)
                said = (logs.out + logs.err).decode(errors="replace").strip()
                raise SandboxCrashed(f"service {name} is not as it must be: {told} {said}"[:1000])

    async def stop(self) -> None:
        """Remove the containers and the network."""
        try:
            await super().stop()
        finally:
            for box in self._beside.values():
                await box.stop()
            await self._network.stop()


async def why_unhealthy(box: Box, check: Healthcheck, user: str | int | None = None) -> str | None:
    """Wait until a check passes in a box; return what it said if it failed too often."""
    began, failures, limit_s = time.monotonic(), 0, min(check.timeout_sec, _HEALTHY_WITHIN_S)
    while not (
        done := await box.sh(
            f'timeout {limit_s:g} sh -c -- "$CHECK"',
            timeout_s=limit_s + _SLOW_S,
            user=user,
            env={"CHECK": check.command},
        )
    ).ok:
        waited_s = time.monotonic() - began
        early = waited_s < check.start_period_sec
        failures += not early
        if failures >= check.retries or waited_s > _HEALTHY_WITHIN_S:
            return done.text()[-300:]
        await asyncio.sleep(check.start_interval_sec if early else check.interval_sec)
    return None


def backend_of(runtime: str) -> ContainerBackend:
    """Return the backend of `podman` or `docker`."""
    return PODMAN if runtime == "podman" else DOCKER
