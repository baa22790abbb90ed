"""The command line: `agentenv VERB`. Each verb is a module that is imported only when the verb is called.

An error is printed in three lines (what is wrong, where, and how to fix it) with an exit code other than 0;
its traceback is printed only with `--debug`. `agentenv --help` imports no verb.
"""

from __future__ import annotations

import logging
import signal
import sys
import traceback
import warnings
from contextlib import nullcontext
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from agentenv.cli.answer import json_alone
from agentenv.cli.errors import report_error
from agentenv.cli.options import AllowHostOption, NoTokenOption, TokenOption, chosen_token, say
from agentenv.cli.verbs import command_of, verb_registry, verbs_below
from agentenv.core.collector import collect_rarely
from agentenv.core.errors import UsageError, did_you_mean
from agentenv.core.visible import show_only

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter

__all__ = [
    "AllowHostOption",
    "NoTokenOption",
    "TokenOption",
    "app",
    "chosen_token",
    "main",
    "say",
    "verb_registry",
]

VERBS = {
    "list": "list the environments and tools that are installed",
    "new": "make an installable environment package",
    "check": "check that an environment works as a run needs it",
    "eval": "play tasks with a model and report the results",
    "train": "train a model with GRPO on an environment",
    "plan": "compute what a training would need on GPUs",
    "runs": "list the runs, newest first",
    "view": "look at runs in a browser, token by token",
    "replay": "play a stored episode again in its environment",
    "diff": "compare two runs, paired by task",
    "rescore": "score stored episodes with other rewards",
    "export": "write episodes as OpenAI messages, SFT rows, ATIF, parquet",
    "import": "read chat logs or ATIF into a run",
    "serve": "serve a model with vLLM or to agents, or an environment",
    "sandbox": "show which isolation for untrusted code works here",
    "doctor": "show what is installed, and what a model can do here",
}
"""Help line of each verb.

Its module is `agentenv.cli.<verb>`, with a `_` at the end of names that Python uses itself. The command is
the function `run` of the module, or its `app` if the verb has verbs of its own.
"""


class _LazyGroup(TyperGroup):
    """Lists the names and help lines of all verbs without importing any of their modules."""

    def list_commands(self, ctx: Context) -> list[str]:
        return [*VERBS, *verbs_below("")]

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name not in VERBS:
            if cmd_name in verb_registry:
                return command_of(cmd_name, verb_registry[cmd_name])
            meant = did_you_mean(cmd_name, [*VERBS, *verbs_below("")])
            raise UsageError(f"there is no command {cmd_name!r}", remedy=meant or "see agentenv --help")
        verb = import_module(
            f"agentenv.cli.{cmd_name}" + ("_" if cmd_name in ("list", "eval", "import") else "")
        )
        group: typer.Typer | None = getattr(verb, "app", None)
        if group is None:
            return command_of(cmd_name, verb.run)
        command: Any = typer.main.get_command(group)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))
        # Their packages are not imported for this, and so say nothing of themselves.
        if added := [(row.name, row.origin) for row in verb_registry.listing() if "." not in row.name]:
            with formatter.section("Commands of installed packages"):
                formatter.write_dl(added)


app = typer.Typer(
    name="agentenv",
    cls=_LazyGroup,
    help="Tools, environments and aligned rollouts for language-model agents.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from agentenv import __version__

        typer.echo(f"agentenv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks; allowed anywhere on the line."),
) -> None:
    """Tools, environments and aligned rollouts for language-model agents."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; this is the entry point of the `agentenv` script.

    Args:
        arguments: the words after `agentenv`; None takes those of the process, which then is all ours.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    log = logging.getLogger("agentenv")
    level = log.level
    if debug:
        log.setLevel(logging.DEBUG)  # so that recorded tracebacks are whole too
    told_to_end: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        told_to_end.append(number)
        import_module("agentenv.core.interrupts").ctrl_c()(signal.SIGINT, frame)

    if arguments is None:
        collect_rarely(one_run=words[:1] == ["eval"])
        # What ends a service or a job in a queue ends it as Ctrl-C does, so that nothing stays behind.
        signal.signal(signal.SIGTERM, end)
    if not debug:
        warnings.filterwarnings("ignore", module=r"peft\.")  # what it says is for authors of adapters
    streams = show_only()
    alone = "--json" in words and words[0] in VERBS and words[0] not in ("sandbox", "serve")
    try:
        with json_alone() if alone else nullcontext():
            code = app(words or ["--help"], standalone_mode=False)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:  # noqa: BLE001 - whatever a verb raises becomes three lines and a code
        if debug:
            traceback.print_exc()
        sys.exit(report_error(error, words))
    finally:
        log.setLevel(level)
        sys.stdout, sys.stderr = streams
    # A server that its manager ends has not failed.
    if told_to_end and (words[:1] == ["serve"] or words[:2] == ["sandbox", "serve"]):
        code = 0
    sys.exit(code or 0)
