"""Use an environment in every way that a run does, and report in words what is wrong.

Each check is one row of the report, which says what was tried and what happened. If a check crashes or
takes too long, that is reported as a problem of the environment and does not raise.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from agentenv.core.errors import AgentEnvError, TaskError, UsageError, did_you_mean
from agentenv.core.limits import RunLimits
from agentenv.core.settings import options_of
from agentenv.core.visible import one_line, visible
from agentenv.envs.advice import tell_if_alike
from agentenv.envs.registry import spec
from agentenv.envs.spec import EnvSpec
from agentenv.runner.options import RunnerOptions
from agentenv.sandbox.sandbox import create
from agentenv.testing.checks.cheats import check_cheats
from agentenv.testing.checks.contract import check_ends, check_gym, check_recipe, check_schema
from agentenv.testing.checks.inputs import check_fuzz, check_overflow
from agentenv.testing.checks.runs import (
    check_determinism,
    check_isolation,
    check_parallel,
    check_play,
    check_reuse,
    check_runner,
    check_speed,
)
from agentenv.testing.checks.scores import check_leak, check_oracle, check_trivial
from agentenv.testing.checks.subject import CHECK_LIMITS, Problem, Skipped, Subject, thread_hint

__all__ = ["CheckReport", "Finding", "check_env"]

Status: TypeAlias = Literal["ok", "problem", "skipped"]

CHECKS: Mapping[str, Callable[[Subject], Awaitable[str]]] = {
    "recipe": check_recipe,
    "play": check_play,
    "schema": check_schema,
    "determinism": check_determinism,
    "oracle": check_oracle,
    "trivial": check_trivial,
    "cheats": check_cheats,
    "gym": check_gym,
    "ends": check_ends,
    "fuzz": check_fuzz,
    "reuse": check_reuse,
    "isolation": check_isolation,
    "parallel": check_parallel,
    "overflow": check_overflow,
    "leak": check_leak,
    "runner": check_runner,
    "speed": check_speed,
}
"""Checks by name; the docstring of each check says what it checks."""
_STEPLESS = frozenset({"recipe", "schema", "ends", "leak", "runner"})
"""Checks that step no environment, as one whose agent asks the model itself allows."""
_TASK = re.compile(r"(the runner's episode of )?task \S+( failed: \w+: \w+)?: ")
_DIGITS = re.compile(r"\d+")
_MARKS = {"ok": "✓", "problem": "✗", "skipped": "-"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of a report."""

    name: str
    status: Status
    text: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return visible(f" {_MARKS[self.status]} {self.name:<12} {self.text}")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The results of all checks of an environment."""

    env_id: str
    findings: tuple[Finding, ...]

    def __repr__(self) -> str:
        problems = ", ".join(finding.name for finding in self.problems)
        return one_line(self, self.env_id, f"{len(self.findings)} checks", f"problems: {problems or 'none'}")

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Rows of the checks that found a problem."""
        return tuple(finding for finding in self.findings if finding.status == "problem")

    @property
    def ok(self) -> bool:
        """True if no check found a problem."""
        return not self.problems

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 if no check found a problem, else 1."""
        return 0 if self.ok else 1

    @property
    def summary(self) -> str:
        """The numbers of checks by their outcome, such as `16 ok, 0 problems`; a badge shows it."""
        passed = sum(finding.status == "ok" for finding in self.findings)
        skipped = sum(finding.status == "skipped" for finding in self.findings)
        more = f", {skipped} skipped" if skipped else ""
        wrong = len(self.problems)
        return f"{passed} ok, {wrong} problem{'' if wrong == 1 else 's'}{more}"

    def __str__(self) -> str:
        return "\n".join([self.env_id, *map(str, self.findings), self.summary])

    def to_json(self) -> str:
        """Return the report as JSON text."""
        head = {"env_id": self.env_id, "ok": self.ok, "summary": self.summary}
        findings = [asdict(finding) for finding in self.findings]
        return json.dumps({**head, "findings": findings})


async def check_env(
    entry: str | EnvSpec,
    *,
    tasks: int | None = 20,
    fuzz_calls: int = 300,
    seed: int = 0,
    trivial_limit: float | None = None,
    timeout_s: float = 120.0,
    only: tuple[str, ...] = (),
    env: Mapping[str, Any] | None = None,
    runner: RunnerOptions | Mapping[str, Any] | None = None,
    limits: RunLimits | Mapping[str, Any] | None = None,
    told: Callable[[str | Finding], None] | None = None,
) -> CheckReport:
    """Check an environment.

    Args:
        entry: id, file or specification of the environment.
        tasks: limit of the number of tasks of each split that are played; None means all.
        fuzz_calls: number of random tool calls.
        seed: seed of all random choices.
        trivial_limit: share of the full marks above which a trivial policy scores too high; None means the
            environment's own `trivial_limit`.
        timeout_s: time limit of one check. Checks that play many slow episodes play fewer of them instead.
        only: names of the checks to run; empty means all.
        env: keyword arguments of the environment.
        runner: runner options for the episodes that the runner plays.
        limits: limits of these episodes; None means the checker's own limits.
        told: is called with the name of each check that begins, and with its row when it has ended.

    Raises:
        UnknownEnvironment: There is no such environment.
        UsageError: A name in `only`, `env`, `runner` or `limits` is unknown, or a value is invalid.
    """
    checks = _chosen(only)
    entry = spec(entry).with_kwargs(env or {})
    entry.check_kwargs()
    async with entry.prepare(), AsyncExitStack() as stack:
        with suppress(TaskError):  # which the check of the tasks finds
            tell_if_alike(entry.id, entry.task_set())
        subject = Subject(
            entry,
            tasks=tasks,
            fuzz_calls=fuzz_calls,
            seed=seed,
            trivial_limit=trivial_limit,
            runner=options_of(RunnerOptions, runner),
            limits=options_of(RunLimits, limits, CHECK_LIMITS),
            sandbox=create(entry.sandbox) if entry.sandbox else None,
            check_s=timeout_s,
        )
        if subject.sandbox is not None:
            stack.push_async_callback(subject.sandbox.close)
        return CheckReport(entry.id, tuple(await _findings(checks, subject, told or (lambda _: None))))


async def _findings(
    checks: Mapping[str, Callable[[Subject], Awaitable[str]]],
    subject: Subject,
    told: Callable[[str | Finding], None],
) -> list[Finding]:
    findings: list[Finding] = []
    causes: dict[str, str] = {}
    is_agent = subject.is_agent
    for name, check in checks.items():
        if is_agent and name not in _STEPLESS:
            findings.append(Finding(name, "skipped", "its agent asks the model itself; see runner"))
            continue
        told(name)
        began, subject.began = time.perf_counter(), time.monotonic()
        status, text = await _run(check, subject, subject.check_s)
        if status == "problem":
            # A broken method fails many checks. It is told in the first one, which names it.
            first = causes.setdefault(_DIGITS.sub("#", _TASK.sub("", text)), name)
            if first != name:
                status, text = "skipped", f"the same problem as in {first}"
        findings.append(Finding(name, status, text, round(time.perf_counter() - began, 3)))
        told(findings[-1])
    return findings


def _chosen(only: tuple[str, ...]) -> Mapping[str, Callable[[Subject], Awaitable[str]]]:
    for name in only:
        if name not in CHECKS:
            meant = did_you_mean(name, CHECKS)
            known = f"the checks are {', '.join(CHECKS)}"
            raise UsageError(f"there is no check {name!r}", remedy=f"{meant} {known}".lstrip())
    return {name: check for name, check in CHECKS.items() if not only or name in only}


async def _run(
    check: Callable[[Subject], Awaitable[str]], subject: Subject, timeout_s: float
) -> tuple[Status, str]:
    """Run one check, and return its status and what there is to say."""
    try:
        async with asyncio.timeout(timeout_s):
            return "ok", await check(subject)
    except Problem as problem:
        return "problem", str(problem)
    except Skipped as reason:
        return "skipped", str(reason)
    except TimeoutError:
        return "problem", f"not done within {timeout_s:g} s"
    except Exception as error:  # noqa: BLE001 - the report names whatever the environment raises
        return "problem", _told(error)


def _told(error: Exception) -> str:
    """Return an exception as one line, with the file and line of the author's code that raised it."""
    text = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, AgentEnvError):
        return text
    package = str(Path(__file__).parent.parent)
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if not frame.filename.startswith(package)]
    origin = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{origin}{thread_hint(text)}"
