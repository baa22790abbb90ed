"""The containers beside a task's own: the services of its `docker-compose.yaml`.

podman-compose reads the file, as it does for Harbor on podman. What it read is refused by name if it is not
listed here, because the file is a stranger's: it could mount folders of this machine, or ask for its rights.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from agentenv.core import TaskError, install_line

__all__ = ["FILE", "MAIN", "Healthcheck", "Part", "Service", "faults_of", "services_of"]

FILE = "docker-compose.yaml"
MAIN = "main"
"""The service that is the task's own container; Harbor makes it from the task, and so do we."""
_READ_S = 120
"""Seconds that reading the file may take."""
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_IDLES = ("sleep infinity", "tail -f /dev/null")
"""Commands of `main` that do nothing, as ours."""
_NO_EFFECT = ("container_name", "expose", "labels", "ports", "pull_policy", "restart", "stop_grace_period")
"""Keys that change nothing for containers which reach each other anyway and live as long as an episode."""


def _seconds(value: object) -> object:
    parts = re.findall(r"([\d.]+)(us|ms|s|m|h)", value) if isinstance(value, str) else []
    return sum(float(number) * _SECONDS[unit] for number, unit in parts) if parts else value


Duration: TypeAlias = Annotated[float, BeforeValidator(_seconds)]


class Part(BaseModel):
    """A table or mapping in which every key is known that says something."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _says_something(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value or key in cls.model_fields}


class Healthcheck(Part):
    """A check that must pass: `[environment.healthcheck]`, and a service's `healthcheck`."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: Annotated[float, Field(gt=0)] = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class _Check(Part):
    test: str | list[str]
    interval: Duration = 30.0
    timeout: Duration = 30.0
    start_period: Duration = 0.0
    start_interval: Duration = 5.0
    retries: int = 3


class _Build(Part):
    context: Path
    dockerfile: str = "Dockerfile"


class _Dependency(Part):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]
    required: bool = True
    restart: bool = False


class Service(Part):
    """One container of the file."""

    image: Annotated[str, Field(pattern="^[A-Za-z0-9]")] | None = None
    build: _Build | None = None
    environment: dict[str, str | int | float | bool | None] = Field(default_factory=dict[str, Any])
    command: list[str] = Field(default_factory=list[str])
    entrypoint: list[str] | None = None
    working_dir: str = ""
    user: str = ""
    hostname: str = ""
    depends_on: dict[str, _Dependency] = Field(default_factory=dict[str, _Dependency])
    healthcheck: _Check | None = None

    @property
    def check(self) -> Healthcheck | None:
        """The check of its health; None if it has none."""
        own = self.healthcheck
        if own is None or own.test == ["NONE"]:
            return None
        kind, *words = ["CMD-SHELL", own.test] if isinstance(own.test, str) else own.test
        return Healthcheck(
            command=shlex.join(words) if kind == "CMD" else " ".join(words),
            interval_sec=own.interval,
            timeout_sec=own.timeout,
            start_period_sec=own.start_period,
            start_interval_sec=own.start_interval,
            retries=own.retries,
        )

    @property
    def options(self) -> tuple[str, ...]:
        """Options of podman's `run`."""
        entrypoint = None if self.entrypoint is None else json.dumps(self.entrypoint)
        named = (
            ("entrypoint", entrypoint),
            ("user", self.user),
            ("hostname", self.hostname),
            ("workdir", self.working_dir),
        )
        return tuple(f"--{name}={value}" for name, value in named if value)

    def env(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return its environment; a name without a value is one of the variables, as in compose."""
        own = {
            name: variables.get(name) if value is None else str(value)
            for name, value in self.environment.items()
        }
        return {name: value for name, value in own.items() if value is not None}


def services_of(folder: Path, variables: Mapping[str, str]) -> dict[str, Service]:
    """Return the services of a folder's file, each behind those that it waits for; nothing without a file.

    Args:
        folder: the folder with the file.
        variables: what `${NAME}` in the file stands for; other names stand for nothing, as in compose.

    Raises:
        TaskError: A service needs what cannot be given here, or podman-compose is not installed.
    """
    path = folder / FILE
    if not os.path.lexists(path):
        return {}
    if path.is_symlink() or (folder / ".env").is_symlink():
        raise TaskError(f"{path}: a link in its place is not read")
    return _read(path, path.read_text(encoding="utf-8"), tuple(sorted(variables.items())))


@lru_cache(maxsize=4096)
def _read(path: Path, text: str, variables: tuple[tuple[str, str], ...]) -> dict[str, Service]:
    if find_spec("podman_compose") is None:
        raise TaskError(
            f"{path}: tasks of several containers need podman-compose, which is not installed",
            remedy=install_line("compose"),
        )
    read = _by_compose(path, text, dict(variables))
    try:
        services = TypeAdapter(dict[str, Service]).validate_python(read)
    except ValidationError as error:
        raise TaskError(f"{path}: services.{faults_of(error)}") from error
    services.setdefault(MAIN, Service())
    for name, service in services.items():
        if fault := _fault(name, service, services, path.parent.resolve()):
            raise TaskError(f"{path}: services.{name}.{fault}")
    return {name: services[name] for name in dict.fromkeys(_in_order(path, services))}


def faults_of(error: ValidationError) -> str:
    """Return the first faults of what was read, each with the key that it is about."""
    told = list[str]()
    for fault in error.errors()[:3]:
        key, why = ".".join(map(str, fault["loc"])), fault["msg"].removeprefix("Value error, ")
        told.append(f"{key} cannot be given here" if fault["type"] == "extra_forbidden" else f"{key}: {why}")
    return "; ".join(told)


def _by_compose(path: Path, text: str, variables: dict[str, str]) -> dict[str, Any]:
    """Return the services as podman-compose reads them: variables filled in, and one form for each key."""
    import yaml  # podman-compose brings it

    try:
        raw = yaml.safe_load(text)
        services = raw["services"]
        beyond = [
            key for key in raw if key not in ("services", "version", "name") and not key.startswith("x-")
        ]
        beyond += [f"services.{name}.extends" for name, each in services.items() if "extends" in (each or ())]
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise TaskError(f"{path} cannot be read: {error}") from error
    if beyond:
        raise TaskError(f"{path}: {beyond[0]} cannot be given here")
    done = _config(path, variables)
    if done.returncode:
        raise TaskError(f"{path}: podman-compose cannot read it: {done.stderr.strip()[-300:]}")
    read: dict[str, dict[str, Any] | None] = yaml.safe_load(done.stdout)["services"]
    return {
        name: {key: value for key, value in (each or {}).items() if key not in _NO_EFFECT}
        for name, each in read.items()
    }


def _config(path: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run podman-compose, which must import nothing from the task and have none of its variables itself."""
    given = path.with_name(".env")
    text = given.read_text(encoding="utf-8", errors="replace") if given.is_file() else ""
    quoted = (value.replace("\\", "\\\\").replace("'", "\\'") for value in variables.values())
    lines = (f"{name}='{value}'" for name, value in zip(variables, quoted, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "variables")
        file.write_text("\n".join((text, *lines, "")), encoding="utf-8")
        where = ("--env-file", str(file), "-f", str(path.absolute()))
        command = (sys.executable, "-P", "-m", "podman_compose", *where, "config")
        env = {"HOME": folder, "PATH": os.environ.get("PATH", "")}
        try:
            return subprocess.run(  # noqa: S603
                command, cwd=folder, env=env, capture_output=True, text=True, timeout=_READ_S, check=False
            )
        except subprocess.TimeoutExpired as error:  # names that stand for names can make it endless
            raise TaskError(f"{path}: podman-compose did not read it in {_READ_S} s") from error


def _fault(name: str, service: Service, services: Mapping[str, Service], folder: Path) -> str:
    """Return what is wrong with a service; empty if it can be started."""
    for other, wanted in service.depends_on.items():
        if other not in services or other == MAIN:
            return f"depends_on: it cannot wait for {other!r}"
        if wanted.condition == "service_healthy" and services[other].check is None:
            return f"depends_on: {other} has no healthcheck in the file"
    build = service.build
    for read in () if build is None else (build.context, build.context / build.dockerfile):
        if not read.resolve().is_relative_to(folder):
            return f"build: {read} is not in the task"
    if name != MAIN:
        return "" if build or service.image else "image: there is neither that nor build"
    if build is not None and (build.context.resolve(), build.dockerfile) != (folder, "Dockerfile"):
        return "build: the task's own container is built from environment/Dockerfile"
    if service.command and not " ".join(service.command).endswith(_IDLES):
        return f"command: {service.command} cannot stand in the place of Harbor's, which waits"
    given = service.model_fields_set & {"image", "entrypoint", "working_dir", "user"}
    return f"{min(given)}: it cannot be set here for the task's own container" if given else ""


def _in_order(path: Path, services: Mapping[str, Service], within: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the services, each after all that it waits for."""
    for name in services[within[-1]].depends_on if within else services:
        if name in within:
            raise TaskError(f"{path}: services wait for each other: {' -> '.join((*within, name))}")
        yield from _in_order(path, services, (*within, name))
        yield name
