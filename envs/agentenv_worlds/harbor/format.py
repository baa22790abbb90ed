"""Tasks in Harbor's format (schema 1.4): read a folder, and refuse by name what cannot be run.

Source: `harbor/models/task/config.py` and `paths.py` of harbor 0.25.0 (Apache-2.0).
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator, model_validator

from agentenv.core import TaskError, UsageError
from agentenv_containers import digest_of
from agentenv_worlds.harbor.services import FILE, Healthcheck, Part, faults_of, services_of

__all__ = ["ARTIFACTS", "HarborTask", "Settings", "Step", "read_task", "resolved", "task_folders"]

ARTIFACTS = "/logs/artifacts"
"""Folder of the agent that a verifier gets even if no task lists it."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


Positive: TypeAlias = Annotated[float, Field(gt=0)]
_LABEL = re.compile("[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def _host(name: str) -> str:
    """Return the name of a host as Harbor compares it; patterns, addresses and networks are refused."""
    name = name.strip().lower().rstrip(".")
    if not all(map(_LABEL.fullmatch, name.split("."))) or name.replace(".", "").isdigit():
        raise ValueError(f"{name!r} is not the name of one host")
    return name


Host: TypeAlias = Annotated[str, AfterValidator(_host)]


class _Network(Part):
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: list[Host] | None = None

    @property
    def reached(self) -> tuple[str, tuple[str, ...]]:
        """The container's network, `none` or `open`, and the hosts that it reaches all the same."""
        hosts = {*(self.allowed_hosts or ())} - {"localhost"}
        return "open" if self.network_mode in (None, "public") else "none", tuple(sorted(hosts))

    @model_validator(mode="after")
    def _lists_hosts_where_they_count(self) -> Self:
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError('allowed_hosts is for network_mode = "allowlist"')
        return self


_P = TypeVar("_P", bound=Part)


class AgentPart(_Network):
    """`[agent]`."""

    timeout_sec: Positive | None = None
    user: str | int | None = None


class McpServer(Part):
    """`[[environment.mcp_servers]]`."""

    name: str
    transport: Literal["sse", "streamable-http", "http", "stdio"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = Field(default_factory=list[str])

    @property
    def line(self) -> str:
        """What the model is told of it, in the words of Harbor's own agent."""
        if self.transport == "stdio":
            return f"- {self.name}: stdio transport, command: {self.command} {shlex.join(self.args)}".rstrip()
        transport = "streamable-http" if self.transport == "http" else self.transport
        return f"- {self.name}: {transport} transport, url: {self.url}"

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not (self.command if self.transport == "stdio" else self.url):
            raise ValueError(f"{self.name} has no {'command' if self.transport == 'stdio' else 'url'}")
        return self


class EnvironmentPart(_Network):
    """`[environment]`."""

    build_timeout_sec: Positive = 600.0
    docker_image: str | None = None
    os: Annotated[Literal["linux"], BeforeValidator(lambda name: str(name).lower())] = "linux"
    cpus: float | None = Field(default=None, ge=0.01, le=1e6)
    memory_mb: int | None = Field(default=None, gt=0, lt=1 << 43)
    storage_mb: int | None = None
    env: dict[str, str] = Field(default_factory=dict[str, str])
    workdir: str | None = None
    healthcheck: Healthcheck | None = None
    mcp_servers: list[McpServer] = Field(default_factory=list[McpServer])
    skills_dir: str | None = None
    allow_internet: bool | None = None
    """The old key for `network_mode`."""

    @model_validator(mode="before")
    @classmethod
    def _has_old_keys(cls, data: Any) -> Any:
        """Rename the old keys of sizes."""
        given = dict(data) if isinstance(data, dict) else {}
        for old in ("memory", "storage"):
            if old in given:
                size = _megabytes(given.pop(old))
                if given.setdefault(f"{old}_mb", size) != size:
                    raise ValueError(f"{old} and {old}_mb disagree")
        return given or data

    @model_validator(mode="after")
    def _has_an_old_network(self) -> Self:
        if self.allow_internet is not None and self.network_mode is None and self.allowed_hosts is None:
            self.network_mode = "public" if self.allow_internet else "no-network"
        return self

    @property
    def told(self) -> str:
        """What stands behind an instruction: the servers and skills that the task's machine has."""
        text = ""
        if self.mcp_servers:
            lines = "\n".join(server.line for server in self.mcp_servers)
            text += f"\n\nMCP Servers:\nThe following MCP servers are available for this task.\n{lines}"
        if self.skills_dir:
            text += (
                f"\n\nSkills:\nEach folder in {self.skills_dir} has a SKILL.md; read those that fit the task."
            )
        return text


class VerifierPart(_Network):
    """`[verifier]`."""

    timeout_sec: Positive = 600.0
    env: dict[str, str] = Field(default_factory=dict[str, str])
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentPart | None = None

    @property
    def is_separate(self) -> bool:
        """True if the verifier has a container of its own."""
        mode = self.environment_mode or ("separate" if self.environment is not None else "shared")
        return mode == "separate"


class Artifact(Part):
    """A file or folder that the verifier gets, in the same place, where it has a container of its own."""

    source: str
    destination: str | None = None
    """Where Harbor keeps it on its own machine; we keep none."""
    exclude: list[str] = Field(default_factory=list[str])

    @field_validator("source")
    @classmethod
    def _leads_down(cls, source: str) -> str:
        if ".." in PurePosixPath(source).parts:
            raise ValueError(f"{source!r} leads out of its folder")
        return source

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_path(cls, data: Any) -> Any:
        return {"source": data} if isinstance(data, str) else data


class SolutionPart(Part):
    """`[solution]`."""

    env: dict[str, str] = Field(default_factory=dict[str, str])


class StepPart(Part):
    """`[[steps]]`."""

    name: str
    agent: AgentPart = Field(default_factory=AgentPart)
    verifier: VerifierPart = Field(default_factory=VerifierPart)
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[Artifact] = Field(default_factory=list[Artifact])


class Settings(Part):
    """`task.toml`."""

    schema_version: str = ""
    version: str = ""
    """The old key for it."""
    source: str | None = None
    task: dict[str, Any] = Field(default_factory=dict[str, Any])
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    tags: Any = None
    """More metadata, which some tasks have here."""
    artifacts: list[Artifact] = Field(default_factory=list[Artifact])
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"
    agent: AgentPart = Field(default_factory=AgentPart)
    verifier: VerifierPart = Field(default_factory=VerifierPart)
    environment: EnvironmentPart = Field(default_factory=EnvironmentPart)
    solution: SolutionPart = Field(default_factory=SolutionPart)
    steps: list[StepPart] = Field(default_factory=list[StepPart])


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a task, and how it is verified. A task without steps has one."""

    name: str
    instruction: str
    agent: AgentPart
    verifier: VerifierPart
    tests: tuple[Path, ...]
    """Folders that are copied to /tests, one over the other."""
    solution: Path
    workdir: Path | None
    """Folder that is copied into the working directory before the step."""
    min_reward: Mapping[str, float]
    """Rewards below which the task ends with this step."""
    artifacts: tuple[Artifact, ...]
    healthcheck: Healthcheck | None = None
    """Check that must pass before the agent begins the step."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task that was read."""

    folder: Path
    settings: Settings
    steps: tuple[Step, ...]

    @property
    def digest(self) -> str:
        """Digest of every file of the task."""
        return digest_of(self.folder)


def task_folders(folder: Path) -> list[Path]:
    """Return the folders of tasks: this one, or those in it.

    Raises:
        UsageError: There are none.
    """
    if (folder / "task.toml").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/task.toml"))
    if not found:
        raise UsageError(
            f"{folder} holds no task of Harbor's format", remedy="a task is a folder with task.toml"
        )
    return found


def read_task(folder: Path) -> HarborTask:
    """Read a task.

    Raises:
        TaskError: It is broken, or needs what cannot be run here; the message names it.
    """
    _check_links(folder)
    try:
        data = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        settings = Settings.model_validate(data)
    except ValidationError as error:
        raise TaskError(f"{folder}: {faults_of(error)}", remedy="see docs/worlds/harbor.md") from error
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise TaskError(f"{folder}: task.toml cannot be read: {error}") from error
    for place in ("environment/singularity-compose.yaml", f"tests/{FILE}", "tests/singularity-compose.yaml"):
        if (folder / place).exists():
            raise TaskError(f"{folder}: {place} is not played")
    services_of(folder / "environment", {})
    if not settings.environment.docker_image and not (folder / "environment" / "Dockerfile").is_file():
        raise TaskError(f"{folder}: there is neither environment/Dockerfile nor environment.docker_image")
    task = HarborTask(folder, settings, tuple(_steps(folder, settings)))
    _check_networks(task)
    return task


def _check_links(folder: Path) -> None:
    """Refuse links out of a task that somebody else wrote: what they name would be read into a container.

    Links in `environment` are left to the runtime, which follows none.
    """
    root = folder.resolve()
    for path in folder.rglob("*"):
        inside = path.relative_to(folder).parts
        if path.is_symlink() and (inside[0] != "environment" or len(inside) == 1):
            target = Path(os.path.realpath(path))
            if not target.is_relative_to(root):
                raise TaskError(f"{path} is a link out of the task, to {target}")


def _check_networks(task: HarborTask) -> None:
    """Refuse a part that wants another network than the container that it runs in has."""
    environment = task.settings.environment
    own = environment.network_mode or "public"
    for step in task.steps:
        parts: list[tuple[str, _Network]] = [("agent", step.agent)]
        parts += [] if step.verifier.is_separate else [("verifier", step.verifier)]
        for name, part in parts:
            if part.network_mode and part.reached != environment.reached:
                raise TaskError(
                    f"{task.folder}: {name}.network_mode is {part.network_mode!r} in a container with "
                    f"{own!r}, or with other hosts: a container has one network as long as it runs",
                    remedy="set environment.network_mode, or give the verifier a container of its own",
                )


def _steps(folder: Path, settings: Settings) -> Iterator[Step]:
    for part in settings.steps or [None]:
        where = folder if part is None else folder / "steps" / part.name
        if part is not None and (where.parent != folder / "steps" or part.name in ("", ".", "..")):
            raise TaskError(f"{folder}: step {part.name!r} is no name of a folder")
        own = where / "solution"
        tests = tuple(path for path in dict.fromkeys((folder / "tests", where / "tests")) if path.is_dir())
        if not any((path / "test.sh").is_file() for path in tests):
            raise TaskError(f"{where}: there is no tests/test.sh")
        try:
            instruction = (where / "instruction.md").read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise TaskError(f"{where}: instruction.md cannot be read: {error}") from error
        if (where / "trajectory.json").exists():
            raise TaskError(f"{where}: trajectory.json: a conversation to go on from is not played")
        least = None if part is None else part.min_reward
        artifacts = [*settings.artifacts, *(part.artifacts if part is not None else ())]
        if not any(artifact.source.rstrip("/") == ARTIFACTS for artifact in artifacts):
            artifacts.insert(0, Artifact(source=ARTIFACTS))
        yield Step(
            name="" if part is None else part.name,
            instruction=instruction + settings.environment.told,
            agent=settings.agent if part is None else _over(settings.agent, part.agent),
            verifier=settings.verifier if part is None else _verifier_of(part, settings),
            tests=tests,
            solution=own if own.is_dir() else folder / "solution",
            workdir=where / "workdir" if part is not None and (where / "workdir").is_dir() else None,
            min_reward={}
            if least is None
            else {"reward": least}
            if isinstance(least, int | float)
            else least,
            artifacts=tuple(artifacts),
            healthcheck=None if part is None else part.healthcheck,
        )


def _over(task: _P, step: _P) -> _P:
    """Return a part of a step, in which the task's part stands for what the step does not say."""
    return task.model_copy(update={name: value for name, value in step if value is not None})


def _verifier_of(part: StepPart, settings: Settings) -> VerifierPart:
    """Return the verifier of a step.

    As in Harbor, a step that gives no `timeout_sec` has 600 s, whatever the task's verifier has.
    """
    task, step = settings.verifier, part.verifier
    own = {"environment_mode": "separate"} if step.is_separate else {}
    return _over(task, step).model_copy(update={"env": {**task.env, **step.env}, **own})


def _megabytes(size: object) -> int:
    """Return a size such as `2G` in megabytes."""
    factors = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    text = str(size).strip().upper()
    if text[-1:] not in factors:
        raise ValueError(f"{size!r} is no size such as 2G or 512M")
    return int(float(text[:-1]) * factors[text[-1]])


def resolved(values: Mapping[str, str], allowed: frozenset[str], *, where: str) -> dict[str, str]:
    """Return environment variables with `${NAME}` and `${NAME:-default}` filled in.

    Variables of this machine are secrets until somebody names them, because a container's code could send
    them anywhere.

    Raises:
        TaskError: A variable has no default, and was not allowed or is not set.
    """

    def value_of(match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        if name in allowed and name in os.environ:
            return os.environ[name]
        if default is None:
            raise TaskError(
                f"{where} wants the variable {name} of this machine",
                remedy=f"set it, and allow it with -o env.variables={name}",
            )
        return default

    return {name: _VARIABLE.sub(value_of, value) for name, value in values.items()}
