"""`agentenv check`: check that an environment works as a run needs it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import typer

from agentenv.cli.answer import print_json
from agentenv.cli.options import ConfigOption, JsonOption, SeedOption, SettingsOption
from agentenv.core.errors import UsageError
from agentenv.core.loops import run_blocking
from agentenv.core.settings import parse_pairs, read_settings, read_toml

if TYPE_CHECKING:
    from agentenv.testing.checker import CheckReport, Finding
    from agentenv.tools.tool import Tool

__all__ = ["run"]


def run(
    env: str = typer.Argument(
        ...,
        metavar="ENV",
        help="Id, path/to/file.py, file.py:Class or module:Class; or a tool: its name, or file.py:function.",
    ),
    tasks: int = typer.Option(20, "-n", "--tasks", help="Number of tasks of each split to play; 0 for all."),
    fuzz: int = typer.Option(300, "--fuzz", help="Number of random tool calls from the schemas."),
    only: list[str] = typer.Option([], "--only", help="Run only this check; may be repeated."),
    seed: int = SeedOption,
    settings: list[str] = SettingsOption,
    config: str = ConfigOption,
    as_json: bool = JsonOption,
) -> None:
    """Check an environment (schema, determinism, oracle, trivial answers, isolation, ...), or a tool.

    Settings for -o: env.NAME for the environment; limits.max_turns=4 and runner.concurrency=8 for the
    episodes that the runner plays. The section name may be left out for limits and runner (max_turns=4).
    """
    from agentenv.envs.registry import spec
    from agentenv.runs.sections import PLAY_SECTIONS
    from agentenv.testing.checker import check_env
    from agentenv.testing.tool_checker import check_tool

    tool = _tool(env)
    if tool is not None:
        if only or settings or config:
            raise UsageError(
                f"{env} is a tool, which has no settings and is checked as a whole",
                remedy="use only --fuzz, --seed and --json",
            )
        _report(run_blocking(check_tool(tool, fuzz_calls=fuzz, seed=seed)), as_json=as_json)
    sections = {name: PLAY_SECTIONS[name] for name in ("env", "runner", "limits")}
    values = read_settings([read_toml(config) if config else {}, parse_pairs(settings or [])], sections)
    entry = spec(env)
    with _Told("" if as_json else entry.id) as told:
        report = run_blocking(
            check_env(
                entry,
                tasks=tasks or None,
                fuzz_calls=fuzz,
                seed=seed,
                only=tuple(only),
                env=values["env"],
                runner=values["runner"],
                limits=values["limits"],
                told=told,
            )
        )
    _report(report, as_json=as_json, told=True)


class _Told:
    """Prints a heading and each row as its check ends, unless there is none; a terminal shows what runs."""

    def __init__(self, heading: str) -> None:
        from rich.console import Console

        self._heading, self._prints = heading, bool(heading)
        self._status = Console(stderr=True).status("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, what: str | Finding) -> None:
        self._status.stop()
        if self._heading:
            print(self._heading, flush=True)
            self._heading = ""
        if isinstance(what, str):
            self._status.update(f"{what} ...")
            self._status.start()
        elif self._prints:
            print(what, flush=True)


def _tool(name: str) -> str | Tool[..., Any] | None:
    """Return the tool that a name or `file.py:function` means; None if it is not a tool."""
    from agentenv.core.imports import import_object
    from agentenv.tools.registry import tool_registry
    from agentenv.tools.tool import Tool

    if name in tool_registry:
        return name
    file, _, attribute = name.partition(":")
    if not file.endswith(".py") or not attribute.isidentifier():
        return None
    named = import_object(name)
    return cast("Tool[..., Any]", named) if isinstance(named, Tool) else None


def _report(report: CheckReport, *, as_json: bool, told: bool = False) -> NoReturn:
    """Print a report, without the rows that were told before, and leave with its exit code."""
    if as_json:
        print_json(json.loads(report.to_json()))
    else:
        print(report.summary if told else report)
    raise typer.Exit(report.exit_code)
