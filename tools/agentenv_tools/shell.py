"""A shell tool: commands run in the episode's sandbox, all in the same working directory."""

from __future__ import annotations

from agentenv.core import Context
from agentenv.tools import tool
from agentenv_tools.python import session_of

__all__ = ["shell"]


@tool
async def shell(command: str, context: Context) -> str:  # noqa: D417 - the model reads this
    """Run a shell command and return what it prints.

    The working directory and its files are kept for later commands; variables are not.

    Args:
        command: A line for /bin/sh.
    """
    result = await session_of(context).exec(command)
    text = result.text() or "(no output)"
    return text if result.ok else f"{text}\n[exit code {result.exit_code}]"
