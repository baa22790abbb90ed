"""Commands that installed packages add, in the entry-point group `agentenv.verbs`.

1. An entry has the name of its command: `greet`, or `sandbox.serve`, which stands below `sandbox`.
2. Its object is a function whose parameters are the options, as typer takes them.
3. `serve.env` is what `agentenv serve --env ENV` calls, with `env`, `host`, `port`, `said`, `max_sessions`,
   `token` and `allowed_hosts`. It returns a coroutine that serves until it is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from agentenv.core.errors import UsageError
from agentenv.core.registry import Registry

if TYPE_CHECKING:
    from typer._click import Command, Context

__all__ = ["PackagedGroup", "command_of", "verb_registry", "verbs_below"]


def _function(loaded: Any, _: str, value: str) -> Callable[..., Any]:
    if not callable(loaded):
        raise UsageError(f"{value} is {loaded!r:.200}, which is no function")
    return loaded


verb_registry: Registry[Callable[..., Any]] = Registry("agentenv.verbs", "command", _function)
"""The commands of the installed packages, by name."""


def verbs_below(verb: str) -> list[str]:
    """Return the commands that packages add below a verb of ours; without a verb, beside ours."""
    split = [name.rpartition(".") for name in verb_registry]
    return [name for above, _, name in split if above == verb]


def command_of(name: str, run: Callable[..., Any]) -> Command:
    """Return the command that runs a function."""
    group = typer.Typer(rich_markup_mode=None, add_completion=False)
    group.command()(run)
    command: Any = typer.main.get_command(group)
    command.name = name
    return command


class PackagedGroup(TyperGroup):
    """A verb below which packages add their own."""

    def list_commands(self, ctx: Context) -> list[str]:
        """Return the names of ours and of theirs."""
        return sorted({*super().list_commands(ctx), *verbs_below(self.name or "")})

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        """Return a command; the package of one of theirs is imported for it."""
        name = f"{self.name}.{cmd_name}"
        if name in verb_registry:
            return command_of(cmd_name, verb_registry[name])
        return super().get_command(ctx, cmd_name)
