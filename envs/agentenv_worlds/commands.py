"""Reading one command of a text adventure out of a model's answer."""

from __future__ import annotations

from agentenv.core import ToolError

__all__ = ["command_of"]

LONGEST = 160
"""Characters of a command; the longest that the worlds themselves propose have about 80."""

_AROUND = " \t`'\"*>."


def command_of(text: str) -> str:
    """Return the last line of a text that is not empty, without quotes and prompts around it.

    Raises:
        ToolError: There is no command in it, or one that the worlds cannot read.
    """
    lines = [line for line in (line.strip(_AROUND) for line in text.splitlines()) if line]
    if not lines:
        raise ToolError("That is no command. Answer with one command on a line of its own.")
    command = " ".join(lines[-1].split())
    if len(command) > LONGEST:
        raise ToolError(f"That is no command: it has more than {LONGEST} characters.")
    if not (command.isascii() and command.isprintable()):
        raise ToolError("That is no command: it has characters other than those of English.")
    return command
