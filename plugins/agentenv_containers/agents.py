"""Run an agent with a loop of its own in a container that reaches nothing but the model.

The container has no network. A socket in it, at the address that the model has outside, leads to the endpoint
(`agentenv_containers.endpoint`). With the sandbox's `network=open` the agent reaches the internet as well.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agentenv.core import UsageError
from agentenv.sandbox import ExecResult, SandboxLimits
from agentenv_containers.container import Container, ContainerSettings
from agentenv_containers.runtime import Runtime

__all__ = [
    "AGENTS",
    "AGENT_LIMITS",
    "KnownAgent",
    "agent_image",
    "known_agent",
    "play_agent",
    "reach_model",
    "run_in",
]

HOME, WORK = "/agentenv/home", "/agentenv/work"
AGENT_LIMITS = SandboxLimits(timeout_s=7 * 86_400.0, output_bytes=1 << 20, max_output_bytes=1 << 30)
"""Limits of an agent's output. Its time is limited by the episode's deadline, which cancels it."""
_MEMORY_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class KnownAgent:
    """An agent that is installed into an image and started by a command."""

    install: str
    """Lines of a Dockerfile."""
    command: tuple[str, ...]
    """Its command line; `{instruction}` stands for the task."""


_NPM = (
    "RUN command -v npm >/dev/null || (apt-get update && "
    "apt-get install -y --no-install-recommends nodejs npm ca-certificates)\n"
    "RUN npm install -g --no-audit --no-fund {package}"
)
AGENTS: Mapping[str, KnownAgent] = {
    "claude-code": KnownAgent(
        _NPM.format(package="@anthropic-ai/claude-code"),
        ("env", "IS_SANDBOX=1", "claude", "--dangerously-skip-permissions", "--print", "{instruction}"),
    ),
    "codex": KnownAgent(
        _NPM.format(package="@openai/codex"),
        (
            *("codex", "exec", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", "{instruction}"),
        ),
    ),
    "mini-swe-agent": KnownAgent(
        "RUN apt-get update && apt-get install -y --no-install-recommends python3-venv\n"
        "RUN python3 -m venv /opt/mini && /opt/mini/bin/pip install --no-cache-dir mini-swe-agent "
        "&& ln -s /opt/mini/bin/mini /usr/local/bin/mini",
        (
            *("env", "MSWEA_CONFIGURED=true", "MSWEA_COST_TRACKING=ignore_errors", "MSWEA_SILENT_STARTUP=1"),
            *("LITELLM_LOCAL_MODEL_COST_MAP=True", "mini", "--yolo", "--exit-immediately"),
            *("-m", "openai/agentenv", "-t", "{instruction}"),
        ),
    ),
}
"""Agents that are known by name."""


def known_agent(agent: str | Sequence[str]) -> KnownAgent:
    """Return the agent of a name, or of a command line in which `{instruction}` stands for the task.

    Raises:
        UsageError: It is neither.
    """
    if isinstance(agent, str) and agent in AGENTS:
        return AGENTS[agent]
    command = tuple(shlex.split(agent) if isinstance(agent, str) else agent)
    if not any("{instruction}" in part for part in command):
        raise UsageError(
            f"agent {agent!r} is no agent that is known, and no command with {{instruction}} in it",
            remedy=f"use one of {', '.join(AGENTS)}, or a command such as 'my-agent --task {{instruction}}'",
        )
    return KnownAgent("", command)


async def agent_image(runtime: Runtime, image: str, agent: KnownAgent, *, timeout_s: float = 1800.0) -> str:
    """Return the image with the agent installed, which is built once for each image and agent."""
    if not agent.install:
        return image
    identity = (await runtime.check("image", "inspect", "-f", "{{.Id}}", image)).decode().strip()
    with tempfile.TemporaryDirectory() as empty:
        lines = f"FROM {image}\nUSER root\n{agent.install}\n# {identity}\n"
        what = f"installing the agent into {image} ({agent.command[0]})"
        return await runtime.build(Path(empty), dockerfile=lines, timeout_s=timeout_s, what=what)


async def reach_model(container: Container, url: str) -> None:
    """Let the agent in a container reach the model at `url`, which is the same address inside.

    Raises:
        UsageError: The model is not served at 127.0.0.1.
    """
    parts = urlsplit(url)
    if parts.hostname != "127.0.0.1" or parts.port is None:
        raise UsageError(f"an agent in a container reaches only a model at 127.0.0.1, not {url}")
    await container.reach(parts.hostname, parts.port)


async def play_agent(
    runtime: Runtime,
    settings: ContainerSettings,
    command: Sequence[str],
    *,
    url: str,
    variables: Mapping[str, str],
    work: Path,
    home: Path,
) -> ExecResult:
    """Run an agent in a container of its own, and copy its workspace back when it has ended.

    Args:
        runtime: the runtime.
        settings: image and network of the container.
        command: the program and its arguments.
        url: address of the model.
        variables: environment variables; the paths of `work` and `home` in them are replaced.
        work: the workspace, a directory of ours.
        home: the agent's home, a directory of ours.

    Raises:
        SandboxCrashed: The container or its runtime failed.
    """
    image, network, cpus = settings.image, settings.network, settings.cpus
    own = ContainerSettings(image=image, network=network, cpus=cpus, memory_bytes=_MEMORY_BYTES)
    container = Container(runtime, own)
    await container.start()
    try:
        await reach_model(container, url)
        await container.put(work, WORK)
        inside = {name: value.replace(str(work), WORK) for name, value in variables.items()}
        words = [part.replace(str(work), WORK) for part in command]
        result = await run_in(container, words, inside, home, workdir=WORK)
        await container.end_processes()
        await _copy_back(container, work)
    finally:
        await asyncio.shield(container.stop())
    return result


async def _copy_back(container: Container, work: Path) -> None:
    """Replace the content of our workspace by the agent's."""
    with tempfile.TemporaryDirectory(dir=work.parent) as folder:
        if await container.get_folder(WORK, Path(folder)):
            await asyncio.to_thread(_replace, work, Path(folder, Path(WORK).name))


def _replace(old: Path, new: Path) -> None:
    shutil.rmtree(old, ignore_errors=True)
    new.rename(old)


async def run_in(
    container: Container,
    command: Sequence[str],
    variables: Mapping[str, str],
    home: Path,
    *,
    user: str | int | None = None,
    workdir: str = "",
) -> ExecResult:
    """Run an agent in a container that runs already.

    Args:
        container: the container.
        command: the program and its arguments.
        variables: environment variables; the image's `PATH` stays.
        home: the agent's home, a directory of ours, which is copied.
        user: user in the container; None means the image's.
        workdir: directory in the container; empty means the image's.
    """
    await container.put(home, HOME)
    await container.run(f"chmod -R a+rwX {HOME}")
    kept = {name: value.replace(str(home), HOME) for name, value in variables.items() if name != "PATH"}
    return await container.exec(
        [part.replace(str(home), HOME) for part in command],
        timeout_s=AGENT_LIMITS.timeout_s,
        limits=AGENT_LIMITS,
        env=kept,
        user=user,
        workdir=workdir,
    )
