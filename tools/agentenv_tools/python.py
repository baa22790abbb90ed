"""Python tools: code that the model writes runs in the episode's sandbox.

`python` starts a new interpreter for every call. `python_session`, which the model also knows as `python`,
keeps names and files for the whole episode. Both return what the code printed, the value of its last
expression, and the traceback if it raised an error.
"""

from __future__ import annotations

from typing import cast

from agentenv.core import Context, ExecResult, SandboxProtocol, SandboxUnavailable, SessionProtocol
from agentenv.tools import tool

__all__ = ["answer_of", "close_session", "python", "python_session", "sandbox_of", "session_of"]

_SESSION = "agentenv_tools.session"


def sandbox_of(context: Context) -> SandboxProtocol:
    """Return the episode's sandbox.

    Raises:
        SandboxUnavailable: The episode has no sandbox.
    """
    if context.sandbox is None:
        raise SandboxUnavailable(
            "this tool runs model-written code, but the episode has no sandbox",
            remedy='register the environment with sandbox="auto",'
            " or put agentenv.sandbox.create() into the Context",
        )
    return context.sandbox


def session_of(context: Context) -> SessionProtocol:
    """Return the episode's session; the first call makes it, and so does a call after it has ended.

    Raises:
        SandboxUnavailable: The episode has no sandbox.
    """
    session = cast("SessionProtocol | None", context.state.get(_SESSION))
    if session is None or session.ended:
        session = sandbox_of(context).session()
        context.state[_SESSION] = session
    return session


async def close_session(context: Context) -> None:
    """End the episode's session if it has one; the session also ends when the sandbox is given back."""
    session = cast("SessionProtocol | None", context.state.pop(_SESSION, None))
    if session is not None:
        await session.close()


def answer_of(result: ExecResult) -> str:
    """Return the text of a result, as the model reads it.

    The exit code is added unless the traceback of an exception says how the code ended.
    """
    text = result.text() or "(no output)"
    if result.status == "error" and (result.exit_code != 1 or not result.stderr.strip()):
        return f"{text}\n[exit code {result.exit_code}]"
    return text


@tool
async def python(code: str, context: Context) -> str:  # noqa: D417 - the model reads this
    """Run Python code and return what it prints.

    Each call starts afresh: nothing is kept from earlier calls.

    Args:
        code: Python source text; the value of a last expression is printed too.
    """
    return answer_of(await sandbox_of(context).run_code(code, echo=True))


@tool(name="python")
async def python_session(code: str, context: Context) -> str:  # noqa: D417 - the model reads this
    """Run Python code and return what it prints.

    Names, imports and files are kept for later calls.

    Args:
        code: Python source text; the value of a last expression is printed too.
    """
    return answer_of(await session_of(context).run_code(code, echo=True))
