"""Print an error on the command line: what is wrong, where, and how to fix it."""

from __future__ import annotations

import re
import sys
import traceback
from inspect import signature
from pathlib import Path
from typing import cast

import typer

from agentenv.core.errors import (
    AgentEnvError,
    DependencyMissing,
    EngineError,
    ModelNotFound,
    SandboxError,
    StoreError,
    TaskError,
    ToolDefinitionError,
    UnknownEnvironment,
    UsageError,
    did_you_mean,
    nearest,
)
from agentenv.core.fields import SECRET
from agentenv.core.visible import visible

__all__ = ["report_error"]

_FIXES: tuple[tuple[type[BaseException], str], ...] = (
    (UnknownEnvironment, "run `agentenv list` to see what is installed, or name a file: path/to/file.py"),
    (DependencyMissing, "install what is named above, then run the same command again"),
    (ModelNotFound, "name a directory with config.json and weights, a .gguf file, a URL, or `mock`"),
    (TaskError, "correct the row or the field named above"),
    (StoreError, "choose another directory with --runs-dir, or free some space"),
    (EngineError, "check that the model answers; `agentenv doctor -m MODEL` examines it"),
    (SandboxError, "run `agentenv sandbox` to see which isolation works here"),
    (ToolDefinitionError, "correct the tool that is named above"),
    (UsageError, "see --help for this command"),
    (SyntaxError, "correct that line"),
    (ModuleNotFoundError, "correct the name, or install that package for the Python that runs agentenv"),
    (BaseException, "run it again with --debug for the traceback"),
)

_PASSWORD = re.compile(r"(?<=://)[^\s/@]+(?=@)")
"""Name and password in an address."""
_QUERY = re.compile(r"(://[^\s?]+\?)[^\s'\"]+")
"""The query of an address, which may hold a key."""
_UNEXPECTED = re.compile(r"(?:\w+\.)*(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_NOT_THE_USERS = ("site-packages", f"{Path(__file__).parents[1]}/")
_SECRET = re.compile(rf"\b((?:{'|'.join(SECRET)})[\w.-]*=).*", re.DOTALL)
"""A setting of the command line whose value is not repeated."""

_Wrong = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""Typer's base class of errors in the command line's words; typer does not export its name."""


def report_error(error: BaseException, words: list[str]) -> int:
    """Print an error in three lines on stderr and return the exit code."""
    # A group comes from tasks that failed together; the first of its errors is the cause.
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    command = "agentenv " + " ".join(_SECRET.sub(r"\1***", word) for word in words)
    notes, fix = list(getattr(error, "__notes__", ())), ""
    if isinstance(error, _Wrong):
        what, where, code = error.format_message(), command, 2
        verb = "".join(word for word in words[:1] if not word.startswith("-"))
        fix = _option_meant(what, verb) or " ".join(filter(None, ["see agentenv", verb, "--help"]))
        if error.ctx is not None and what.startswith("Missing argument"):
            usage = error.ctx.get_usage().partition(f" {verb} ")[2].translate({ord("{"): "", ord("}"): ""})
            fix = f"agentenv {verb} {usage}; {fix}"
    elif isinstance(error, AgentEnvError):
        what, where, fix = error.message, "; ".join(notes) or command, error.remedy
        if type(error) is UsageError and re.search(r"\.py:\d+$", where):
            fix = fix or "correct that line"
        code = 2 if isinstance(error, UsageError) else 1
    else:
        what = f"{type(error).__name__}: {error}"
        where = "; ".join([*notes, _location(error)])
        fix = _parameter_meant(str(error)) if isinstance(error, TypeError) else ""
        code = 2 if isinstance(error, SyntaxError) else 1
    fix = fix or next(text for kind, text in _FIXES if isinstance(error, kind))
    for label, text in (("error", what), ("where", where), ("  fix", fix)):
        shown = visible(_QUERY.sub(r"\1***", _PASSWORD.sub("***", " ".join(text.split()))))
        sys.stderr.write(f"{label}: {shown}\n")
    return code


def _option_meant(what: str, verb: str) -> str:
    """Return how to give what was written as an option, such as --max-turns; empty for other words."""
    if "'--tasks'" in what:
        return "give a number of tasks; a file of tasks is named in the environment: ae.register(tasks=FILE)"
    if not what.startswith("No such option") or verb not in {"eval", "train"}:
        return ""
    if verb == "eval":
        from agentenv.runs.sections import EVAL_SECTIONS as SECTIONS
    else:
        from agentenv.training.sections import TRAIN_SECTIONS as SECTIONS
    option = what.partition("--")[2].partition(" ")[0].rstrip(".").replace("-", "_")
    known = {name: section for section, kind in SECTIONS.items() for name in kind.names}
    _, _, options = what.partition("(Possible options: ")
    if nearest(option.replace("_", "-"), [name.strip(" -.)") for name in options.split(",")], cutoff=0.8):
        return ""  # an option of the command is closer, and stands in the message
    near = nearest({"lr": "learning_rate"}.get(option, option), known, cutoff=0.8)
    return f"it is a setting: -o {known[near[0]]}.{near[0]}=VALUE" if near else ""


def _parameter_meant(what: str) -> str:
    """Return which parameter of a function of ours was meant; empty for other words and functions."""
    import agentenv

    if (found := _UNEXPECTED.match(what)) is None or (function := getattr(agentenv, found[1], None)) is None:
        return ""
    known = list(signature(function).parameters)
    return did_you_mean(found[2], known) or f"ae.{found[1]} takes {', '.join(known)}"


def _location(error: BaseException) -> str:
    """Return the file and line of the innermost frame outside installed packages and this one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = list(traceback.extract_tb(error.__traceback__))
    others = [frame for frame in frames if not any(part in frame.filename for part in _NOT_THE_USERS)]
    last = (others or frames)[-1:]
    return "".join(f"{Path(spot.filename).name}:{spot.lineno} in {spot.name}" for spot in last) or "unknown"
