"""Run an agent as a process, with a fresh home and the variables that tell it where the model is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentenv.core.errors import AgentEnvError, UsageError

__all__ = ["AgentFailed", "agent_variables", "run_agent_process"]

KEPT = ("LANG", "LC_ALL", "LC_CTYPE", "PATH", "SSL_CERT_DIR", "SSL_CERT_FILE", "SYSTEMROOT", "TZ")
"""Variables of our own environment that the agent gets; keys and settings of the user are not among them."""
KEY = "agentenv"
"""API key that SDKs need to start; the endpoint does not read it."""
MAX_OUTPUT_BYTES = 16 << 20
"""Output beyond this is read and dropped."""
_TOLD_CHARS = 2000
_KILL_AFTER_S = 3.0
"""Time between telling an agent to end and killing it."""
_CODEX = """\
model = "agentenv"
model_provider = "agentenv"

[model_providers.agentenv]
name = "agentenv"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""


class AgentFailed(AgentEnvError):
    """An agent's process ended with an error."""


def agent_variables(url: str, home: Path, task: Mapping[str, object]) -> dict[str, str]:
    """Return the environment variables of an agent, and write the files in its home that they name.

    Args:
        url: address of the session.
        home: the agent's home, an empty directory.
        task: the task, which the agent gets as JSON in `AGENTENV_TASK`.
    """
    codex = home / ".codex"
    codex.mkdir(exist_ok=True)
    (codex / "config.toml").write_text(_CODEX.format(url=url))
    return {
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        "HOME": str(home),
        "AGENTENV_URL": url,
        "AGENTENV_TASK": json.dumps(task, default=str),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": KEY,
        "CODEX_HOME": str(codex),
        "CLAUDE_CONFIG_DIR": str(home / ".claude"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


async def run_agent_process(command: Sequence[str], variables: Mapping[str, str], workspace: Path) -> str:
    """Run an agent in its workspace, and return what it wrote to standard output.

    If the wait is cancelled, the agent and all processes that it started are ended.

    Raises:
        AgentFailed: The agent ended with an exit code other than 0.
        UsageError: There is no such command.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            cwd=workspace,
            env=dict(variables),
            start_new_session=True,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise UsageError(f"the agent cannot be started: {error}", remedy="check its command") from error
    try:
        out, err = await asyncio.gather(_read(process.stdout), _read(process.stderr))
        code = await process.wait()
    finally:
        await _end(process)
    if code:
        told = err.decode(errors="replace").strip() or out.decode(errors="replace").strip()
        raise AgentFailed(f"{command[0]} ended with exit code {code}: {told[-_TOLD_CHARS:]}")
    return out.decode(errors="replace")


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """Read a stream to its end, and keep its beginning."""
    kept = bytearray()
    while stream is not None and (part := await stream.read(1 << 16)):
        kept += part[: MAX_OUTPUT_BYTES - len(kept)]
    return bytes(kept)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process group: politely, then not."""
    _tell(process, signal.SIGTERM)
    if process.returncode is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_AFTER_S):
                await process.wait()
    _tell(process, signal.SIGKILL)
    await process.wait()


def _tell(process: asyncio.subprocess.Process, sign: int) -> None:
    # The group outlives its first process if that one has left others behind.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, sign)
