"""Text adventures: one command is read out of a model's answer, and what happens is the observation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from agentenv.core import ToolError
from agentenv.envs import Env, Text

__all__ = ["Adventure", "command_of"]

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


class Adventure(Env):
    """A world that is played by commands, and scored by `finish`."""

    observation_space = Text()
    action_space = Text()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Give the world the command in the text."""
        try:
            told, over = self.obey(command_of(action))
        except ToolError as error:
            told, over = str(error), False
        return told, 0.0, over, False, {}

    @abstractmethod
    def obey(self, command: str) -> tuple[str, bool]:
        """Return what happens, and whether the adventure is over.

        Raises:
            ToolError: It is no command of this world; the model is told, and no move is made.
        """
