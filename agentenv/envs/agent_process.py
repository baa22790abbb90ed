"""Run an agent as a process, with a fresh home and the variables that tell it where the model is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentenv.core.errors import AgentEnvError, UsageError
from agentenv.core.execution import ExecResult
from agentenv.envs.agent_keeper import END_WITHIN_S

__all__ = ["AgentFailed", "agent_variables", "answer_of_agent", "run_agent_process"]

KEPT = ("LANG", "LC_ALL", "LC_CTYPE", "PATH", "SSL_CERT_DIR", "SSL_CERT_FILE", "SYSTEMROOT", "TZ")
"""Variables of our own environment that the agent gets; keys and settings of the user are not among them."""
KEY = "agentenv"
"""API key that SDKs need to start; the endpoint does not read it."""
MAX_OUTPUT_BYTES = 16 << 20
"""Output beyond this is read and dropped."""
_TOLD_CHARS = 2000
_KEEPER = Path(__file__).with_name("agent_keeper.py")
_KILL_AFTER_S = END_WITHIN_S + 1.5
"""Time that the keeper has to end the agent before it is killed itself."""
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


async def run_agent_process(
    command: Sequence[str], variables: Mapping[str, str], workspace: Path, folder: Path
) -> str:
    """Run an agent in its workspace, and return what it wrote to standard output.

    Its exit ends the run, and with it all processes that it started; so does a wait that is cancelled.

    Args:
        command: the program and its arguments.
        variables: the environment variables of the program.
        workspace: directory in which it runs.
        folder: folder of the episode, which is removed if our own process dies meanwhile.

    Raises:
        AgentFailed: The agent ended with an exit code other than 0.
        UsageError: There is no such command.
    """
    path = os.pathsep.join(str(workspace / part) for part in variables.get("PATH", "").split(os.pathsep))
    if shutil.which(str(workspace / command[0]) if os.sep in command[0] else command[0], path=path) is None:
        raise UsageError(
            f"the agent cannot be started: {command[0]!r} is no program", remedy="check its command"
        )
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(_KEEPER), str(os.getpid()), str(folder), *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        cwd=workspace,
        env=dict(variables),
        start_new_session=True,
    )
    try:
        out, err = await asyncio.gather(_read(process.stdout), _read(process.stderr))
        code = await process.wait()
    finally:
        await _end(process)
    if code:
        told = err.decode(errors="replace").strip() or out.decode(errors="replace").strip()
        raise AgentFailed(f"{command[0]} ended with exit code {code}: {told[-_TOLD_CHARS:]}")
    return out.decode(errors="replace")


def answer_of_agent(program: str, result: ExecResult) -> str:
    """Return what an agent that ran in a sandbox wrote to standard output.

    Raises:
        AgentFailed: It ended with an error.
    """
    if not result.ok:
        told = (result.stderr.strip() or result.stdout.strip())[-_TOLD_CHARS:]
        raise AgentFailed(f"{program} ended with {result.note or result.status} in the sandbox: {told}")
    return result.stdout


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """Read a stream to its end, and keep its beginning."""
    kept = bytearray()
    while stream is not None and (part := await stream.read(1 << 16)):
        kept += part[: MAX_OUTPUT_BYTES - len(kept)]
    return bytes(kept)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the keeper of an agent, which ends the agent and all that it started."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_KILL_AFTER_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
