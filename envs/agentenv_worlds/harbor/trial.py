"""One trial of a task: its container, the steps, and the verifier, as Harbor's format says.

Where the verifier shares the agent's container, all that the agent left running is ended first, and what
it put in the place of the tests or of the reward is removed. Harbor removes only the reward's files.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from agentenv.core import SandboxCrashed, TaskError, logger
from agentenv.sandbox import ExecResult
from agentenv_containers import ROOT, KnownAgent
from agentenv_worlds.harbor.boxes import Box, Place, why_unhealthy
from agentenv_worlds.harbor.format import ARTIFACTS, HarborTask, Step, resolved
from agentenv_worlds.harbor.provider import box_of

__all__ = ["UNLIMITED_S", "Trial", "TrialOptions", "VerifierFailed", "rewards_of"]

_log = logger(__name__)
_OURS_S = 120.0
"""Time limit of our own commands in a container."""
_LOGS = f"/logs/agent {ARTIFACTS} /logs/verifier"
_MAKE_LOGS = f"mkdir -p {_LOGS} && chmod 777 /logs/agent {ARTIFACTS}"
UNLIMITED_S = 86_400.0
"""Seconds of an agent to which the task gives no limit."""


class VerifierFailed(Exception):
    """The verifier gave no score, so the episode is an error, and is neither trained nor counted 0."""


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """How tasks are played."""

    runtime: str = "podman"
    network: str = "task"
    """`task`: what the task says; `none`: no network."""
    variables: frozenset[str] = frozenset()
    """Variables of this machine that tasks may read."""
    reward: str = "reward"
    """Key of the verifier's rewards that is the reward."""
    keep_processes: bool = False
    """Leave the agent's processes running for the verifier, which lets them forge the reward."""


class Trial:
    """One attempt at a task.

    Args:
        task: the task.
        options: how it is played.
        agent: an agent that is installed into the image.
    """

    def __init__(self, task: HarborTask, options: TrialOptions, agent: KnownAgent | None = None) -> None:
        self.task, self.options, self._agent = task, options, agent
        self.index = 0
        self.rewards: list[dict[str, float]] = []
        """Rewards of the steps so far."""
        self.box: Box | None = None
        self.began = 0.0
        """`time.monotonic()` at the beginning of the step."""
        self.verifier_s: float | None = None
        """Time limit of the verifier that the run sets in the place of the task's."""

    @property
    def step(self) -> Step:
        """The step that is played."""
        return self.task.steps[self.index]

    @property
    def here(self) -> Box:
        """The box that the task is played in.

        Raises:
            SandboxCrashed: It was removed.
        """
        if self.box is None:
            raise SandboxCrashed("the task's container is gone")
        return self.box

    async def open(self) -> None:
        """Start the container and prepare the first step.

        Raises:
            TaskError: The model could read the tests or the solution in the image.
            SandboxError: There is no container to be had.
        """
        part = self.task.settings.environment
        network, hosts = part.reached if self.options.network == "task" else ("none", ())
        env = resolved(part.env, self.options.variables, where=f"{self.task.folder.name}: environment.env")
        place = Place(self.task, part, self.task.folder / "environment", env, network, hosts, self._agent)
        self.box = box_of(self.options.runtime, place, self.options.variables)
        await self.box.start()
        line = 'for p in /tests /solution; do [ -z "$(ls -A $p 2>/dev/null)" ] || echo $p; done'
        made = await self._ours(f"{_MAKE_LOGS} && {line}")
        if made.stdout.strip():
            raise TaskError(
                f"{self.task.folder.name}: the image already has files in "
                f"{' and '.join(made.stdout.split())}, so the model can read how it is judged",
                remedy="remove them from the image",
            )
        await self._put_loose_files(self.box)
        if (
            part.healthcheck is not None
            and (told := await why_unhealthy(self.here, part.healthcheck)) is not None
        ):
            raise SandboxCrashed(f"{self.task.folder.name} is not healthy: {told}")
        await self._prepare()

    async def _prepare(self) -> None:
        """Prepare the container for the present step."""
        workdir = self.step.workdir
        if workdir is not None:
            where = await self._workdir(self.here)
            await self.here.put(workdir, where)
            if (workdir / "setup.sh").is_file():
                line = f"bash {where.rstrip('/')}/setup.sh"
                done = await self.here.sh(line, timeout_s=_OURS_S * 5, user=self.step.agent.user)
                if not done.ok:
                    raise VerifierFailed(f"setup.sh of step {self.step.name} failed: {done.text()[-500:]}")
        if self.step.healthcheck is not None:
            told = await why_unhealthy(self.here, self.step.healthcheck, self.step.agent.user)
            if told is not None:
                raise VerifierFailed(f"step {self.step.name} is not healthy: {told}")
        self.began = time.monotonic()

    async def _put_loose_files(self, box: Box) -> None:
        """Copy `environment` into the working directory of a task that names an image, as Harbor does."""
        folder = self.task.folder / "environment"
        has_files = folder.is_dir() and any(folder.iterdir()) and not (folder / "Dockerfile").exists()
        if self.task.settings.environment.docker_image and has_files:
            await box.put(folder, await self._workdir(box))

    async def _workdir(self, box: Box) -> str:
        return (await box.sh("pwd", timeout_s=_OURS_S)).stdout.strip() or "/"

    @property
    def is_late(self) -> bool:
        """True if the step's time for the agent is over."""
        return self.left_s < 0

    @property
    def left_s(self) -> float:
        """Seconds of the agent's time for the step that are left."""
        limit = self.step.agent.timeout_sec
        return math.inf if limit is None else self.began + limit - time.monotonic()

    def times(self) -> dict[str, float]:
        """Return the limits of an episode that the task gives, with room for our own commands beside them."""
        agent = max(step.agent.timeout_sec or UNLIMITED_S for step in self.task.steps)
        verifiers = [step.verifier.timeout_sec + self._room_s(step) for step in self.task.steps]
        return {
            "tool_timeout_s": agent,
            "env_timeout_s": max(agent, *verifiers) + _OURS_S,
            "reward_timeout_s": sum(verifiers),
        }

    def _room_s(self, step: Step) -> float:
        """Return the seconds that a verifier may need besides its own."""
        part = step.verifier.environment or self.task.settings.environment
        return 2 * _OURS_S + (part.build_timeout_sec if step.verifier.is_separate else 0)

    async def bring_solution(self) -> str:
        """Upload the step's solution as root, as Harbor does, and return the line that runs it.

        Raises:
            TaskError: There is none.
        """
        if not (self.step.solution / "solve.sh").is_file():
            raise TaskError(
                f"{self.task.folder.name}: there is no solution/solve.sh, so the oracle cannot play"
            )
        where = f"{self.task.folder.name}: solution.env"
        env = resolved(self.task.settings.solution.env, self.options.variables, where=where)
        await self._ours("rm -rf /solution")
        await self.here.put(self.step.solution, "/solution")
        await self._ours("chmod +x /solution/solve.sh")
        sets = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        return f"env DEBIAN_FRONTEND=noninteractive {sets} /solution/solve.sh".replace("  ", " ")

    async def advance(self) -> str | None:
        """Verify the present step, and return the next instruction; None after the last one.

        Raises:
            VerifierFailed: There is no score.
            SandboxCrashed: The container failed.
        """
        if len(self.rewards) == len(self.task.steps):
            return None
        rewards = await self._verify()
        self.rewards.append(rewards)
        failed = any(rewards.get(key, -math.inf) < least for key, least in self.step.min_reward.items())
        if failed or self.index + 1 == len(self.task.steps):
            return None
        self.index += 1
        await self._ours(f"rm -rf /tests /solution {_LOGS} && {_MAKE_LOGS}")
        await self._prepare()
        return self.step.instruction

    def total(self) -> dict[str, float]:
        """Return the task's rewards: of one step, or of several as the task says.

        As in Harbor, steps that were not reached are left out of the mean.
        """
        if len(self.task.steps) == 1 or self.task.settings.multi_step_reward_strategy == "final":
            return dict(self.rewards[-1])
        keys = dict.fromkeys(key for rewards in self.rewards for key in rewards)
        return {key: sum(r.get(key, 0.0) for r in self.rewards) / len(self.rewards) for key in keys}

    async def _verify(self) -> dict[str, float]:
        verifier, step = self.step.verifier, self.step
        env = resolved(verifier.env, self.options.variables, where=f"{self.task.folder.name}: verifier.env")
        if not verifier.is_separate:
            if not self.options.keep_processes and await self.here.end_processes():
                _tell_of_a_server(self.task.folder.name)
            return await self._judge(self.here, step, env, has_tests=False)
        part = verifier.environment or self.task.settings.environment
        own = resolved(
            part.env, self.options.variables, where=f"{self.task.folder.name}: verifier.environment"
        )
        place, has_tests = Place.of_verifier(self.task, step, own)
        with tempfile.TemporaryDirectory() as folder:
            await self._collect(step, Path(folder))
            if self.index + 1 == len(self.task.steps):
                await self.close()
            box = box_of(self.options.runtime, place, self.options.variables)
            try:
                await box.start()
                if not has_tests:
                    await self._put_loose_files(box)
                await self._hand_over(step, Path(folder), box)
                return await self._judge(box, step, env, has_tests=has_tests)
            finally:
                await asyncio.shield(box.stop())

    async def _collect(self, step: Step, folder: Path) -> None:
        """Copy the artifacts out of the agent's container, whose processes have ended."""
        await self.here.end_processes()
        for number, artifact in enumerate(step.artifacts):
            (folder / str(number)).mkdir()
            target = folder / str(number)
            await self.here.get_folder(artifact.source, target, exclude=artifact.exclude)

    async def _hand_over(self, step: Step, folder: Path, box: Box) -> None:
        """Copy the artifacts to where they were, in the place of a folder that the verifier's image has."""
        for number, artifact in enumerate(step.artifacts):
            target, source = PurePosixPath(artifact.source), folder / str(number)
            found = source / target.name
            if found.is_dir():
                await self._ours(f"rm -rf {shlex.quote(str(target))}", box)
                source = found
            elif found.exists():
                target = target.parent
            else:
                continue
            source.chmod(0o777)  # as Harbor, whose verifiers may be users who write beside it
            await box.put(source, str(target))

    async def _judge(
        self, box: Box, step: Step, env: Mapping[str, str], *, has_tests: bool
    ) -> dict[str, float]:
        """Copy the tests into a container, run them, and read the rewards."""
        await self._remove(box, "/logs/verifier", *(() if has_tests else ("/tests",)))
        with tempfile.TemporaryDirectory() as name:
            empty = Path(name)
            empty.chmod(0o777)  # noqa: ASYNC240 - it takes no time
            await box.put(empty, "/logs/verifier")
        if not has_tests:
            for folder in step.tests:
                await box.put(folder, "/tests")
        await self._ours("chmod +x /tests/test.sh", box)
        limit = self.verifier_s or step.verifier.timeout_sec
        line = "/tests/test.sh > /logs/verifier/test-stdout.txt 2>&1"
        ran = await box.sh(line, timeout_s=limit, user=step.verifier.user, env=env)
        if ran.status == "timeout":
            by = "limits.reward_timeout_s" if self.verifier_s else "verifier.timeout_sec of task.toml"
            raise VerifierFailed(f"the verifier did not end within {limit:g} s ({by})")
        data = await box.get("/logs/verifier/reward.json")
        text = await box.get("/logs/verifier/reward.txt") if data is None else None
        try:
            return rewards_of(data, text)
        except ValueError as error:
            told = await box.get("/logs/verifier/test-stdout.txt") or b""
            raise VerifierFailed(
                f"{error}; it printed: {told.decode(errors='replace')[-600:].strip()}"
            ) from error

    async def _remove(self, box: Box, *paths: str) -> None:
        """Remove files and folders, and look from outside whether they are gone.

        Raises:
            VerifierFailed: They are not, because the agent has replaced programs of the container.
        """
        await self._ours(f"rm -rf {' '.join(paths)}", box)
        for path in paths:
            with tempfile.TemporaryDirectory() as folder:
                if await box.get_folder(path, Path(folder)):
                    raise VerifierFailed(f"{path} stays: the agent has replaced programs that remove it")

    async def _ours(self, line: str, box: Box | None = None) -> ExecResult:
        """Run a line of ours as root.

        Raises:
            SandboxCrashed: It failed.
        """
        done = await (box or self.here).sh(line, timeout_s=_OURS_S, user=ROOT)
        if not done.ok:
            raise SandboxCrashed(
                f"{line.split(maxsplit=1)[0]} failed in the task's container: {done.text()[-300:]}"
            )
        return done

    async def close(self) -> None:
        """Remove the container."""
        box, self.box = self.box, None
        if box is not None:
            await box.stop()


@cache
def _tell_of_a_server(task: str) -> None:
    _log.warning(
        "%s: a server that the agent had left running was ended before the verifier; "
        "if the tests ask it, they need -o env.keep_processes=true",
        task,
    )


def rewards_of(data: bytes | None, text: bytes | None) -> dict[str, float]:
    """Return the rewards of `reward.json`, or else of `reward.txt`, as Harbor reads them.

    Raises:
        ValueError: There is neither file, or it does not hold finite numbers.
    """
    if data is None and text is None:
        raise ValueError("the verifier wrote neither reward.json nor reward.txt")
    try:
        values: Any = json.loads(data) if data is not None else {"reward": float((text or b"").decode())}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the verifier's reward cannot be read: {error}") from error
    values = values if isinstance(values, dict) else {"reward": values}
    for name, value in values.items():
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"the verifier's reward {name!r} is no finite number: {value!r}")
    return {str(name): float(value) for name, value in values.items()}
