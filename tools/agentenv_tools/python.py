"""Python as a tool: code that the model writes runs in the episode's sandbox.

`python` starts afresh at every call. `python_session`, which the model also knows as `python`, keeps
names and files for the episode. Both answer with what the code printed, the value of a last
expression, and the traceback if there is one.
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
        SandboxUnavailable: The episode has none.
    """
    if context.sandbox is None:
        raise SandboxUnavailable(
            "this tool runs model-written code and the episode has no sandbox: register the environment "
            'with sandbox="auto", or put agentenv.sandbox.create() into the Context'
        )
    return context.sandbox


def session_of(context: Context) -> SessionProtocol:
    """Return the episode's session; a new one at the first call, and after one has ended.

    Raises:
        SandboxUnavailable: The episode has no sandbox.
    """
    known = cast("SessionProtocol | None", context.state.get(_SESSION))
    if known is None or known.ended:
        known = sandbox_of(context).session()
        context.state[_SESSION] = known
    return known


async def close_session(context: Context) -> None:
    """End the episode's session, if it has one; a lease of the sandbox ends it too."""
    known = cast("SessionProtocol | None", context.state.pop(_SESSION, None))
    if known is not None:
        await known.close()


def answer_of(result: ExecResult) -> str:
    """Return what the model reads."""
    return result.text() or "(no output)"


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
