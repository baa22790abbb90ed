"""Tasks in Harbor's format as environments: with tools of ours, or with an agent in the container."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any

import agentenv as ae
from agentenv.core import (
    Outcome,
    RenderError,
    RunLimits,
    TaskError,
    ToolError,
    UsageError,
    image_size,
    suffix_of,
    text_of,
)
from agentenv.envs import AgentFailed
from agentenv.sandbox import ExecResult
from agentenv.tools import Image
from agentenv_containers import KnownAgent, known_agent, reach_model, run_in
from agentenv_worlds.harbor.boxes import ContainerBox
from agentenv_worlds.harbor.format import HarborTask, read_task, task_folders
from agentenv_worlds.harbor.provider import check_name, check_runtime
from agentenv_worlds.harbor.trial import UNLIMITED_S, Trial, TrialOptions, VerifierFailed

__all__ = ["MAX_TURNS", "HarborAgent", "HarborSeeing", "HarborTools", "make", "oracle", "rows", "splits"]

MAX_TURNS = 60
_COMMAND_S = 120.0
"""Time limit of a command of the model that asks for none."""
_DEFAULTS = RunLimits()
_PLAYED: ContextVar[tuple[Trial, ...]] = ContextVar("agentenv_harbor_trials", default=())
"""The trials of the episodes that this asyncio task plays, for the oracle."""


def splits(folder: Path) -> dict[str, Callable[[], Iterator[object]]]:
    """Return the splits of a folder: its folders of tasks, or `train` for the tasks in it.

    Raises:
        UsageError: There are no tasks.
    """
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder {folder}",
            remedy="download a dataset with `harbor datasets download NAME@VERSION`, and name its folder",
        )
    parts = {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_dir() and any(path.glob("*/task.toml"))
    }
    direct = (folder / "task.toml").is_file() or any(folder.glob("*/task.toml"))
    chosen = {"train": folder} if direct or not parts else parts
    if "train" in chosen:
        chosen = {"train": chosen["train"], **chosen}
    if not parts:
        task_folders(folder)
    return {name: partial(rows, str(path.resolve())) for name, path in chosen.items()}


def rows(folder: str) -> Iterator[object]:
    """Yield the tasks of a folder, and the error of each that cannot be played, as they are asked for.

    Their digests tell a resumed run that a task has changed.

    Raises:
        TaskError: None can be played.
    """
    refused, is_played = list[TaskError](), False
    for path in task_folders(Path(folder)):
        try:
            task = _read(str(path.resolve()))
        except TaskError as error:
            refused.append(error)
            continue
        yield from refused
        refused.clear()
        is_played = True
        yield {"id": task.folder.name, "path": str(task.folder), "digest": task.digest}
    if not is_played:
        few = "" if len(refused) == 1 else f"none of the {len(refused)} tasks can be played, the first: "
        raise TaskError(f"{few}{refused[0].message}", remedy=refused[0].remedy)
    yield from refused


@lru_cache(maxsize=4096)
def _read(path: str) -> HarborTask:
    return read_task(Path(path))


class _Harbor(ae.Env):
    """What both ways to play a task share: its container, its reward and its end."""

    options: TrialOptions
    known: KnownAgent | None = None
    """An agent that plays in the container."""
    trial: Trial | None = None

    async def open_sandbox(self, task: Mapping[str, Any]) -> Mapping[str, float]:
        """Start the task's container; see `agentenv.core.episode_env.OpensSandbox`."""
        await self._close()
        self.trial = Trial(_read(str(task["path"])), self.options, self.known)
        await self.trial.open()
        _PLAYED.set((*(trial for trial in _PLAYED.get() if trial.box is not None), self.trial))
        return self.trial.times()

    def _chosen_s(self, limit: str) -> float | None:
        """Return a time limit that the run sets; None where the task's own or the default holds."""
        value, own = getattr(self.context.limits, limit), self._trial.times()[limit]
        return None if value in (own, getattr(_DEFAULTS, limit)) else value

    async def start(self, path: str, digest: str) -> str:
        """Start the container if the runner has not, and return the first instruction."""
        if self.trial is None or self.trial.rewards or self.trial.box is None:
            await self.open_sandbox({"path": path})
        return self._trial.step.instruction

    @property
    def _trial(self) -> Trial:
        assert self.trial is not None, "the task was not started"
        return self.trial

    async def reward(self) -> Outcome:
        """Verify the last step, and return the task's reward with the verifier's other figures beside it."""
        trial, wanted = self._trial, self.options.reward
        trial.verifier_s = self._chosen_s("reward_timeout_s")
        try:
            while await trial.advance() is not None:
                # The model ran out of turns before the last step: the rest is verified as it stands.
                continue
        finally:
            await self._close()
        rewards = trial.total()
        if wanted not in rewards:
            raise VerifierFailed(
                f"the verifier's rewards are {', '.join(rewards) or 'none'}, and none is {wanted!r}: "
                "choose one with -o env.reward=NAME"
            )
        return Outcome(rewards[wanted], rewards)

    async def shutdown(self) -> None:
        """Remove the container; see `agentenv.core.episode_env.EpisodeEnv`."""
        try:
            await super().shutdown()
        finally:
            await self._close()

    async def _close(self) -> None:
        if self.trial is not None:
            await asyncio.shield(self.trial.close())


class HarborTools(_Harbor, ae.ToolEnv):
    """A task in Harbor's format, played with a shell in the task's container.

    Args:
        options: how tasks are played.
    """

    def __init__(self, options: TrialOptions) -> None:
        self.options = options
        self._command_s: float | None = None

    async def start(self, path: str, digest: str) -> str:
        """Return the first instruction."""
        instruction = await super().start(path, digest)
        self._command_s = self._chosen_s("tool_timeout_s")
        # The tools end their commands themselves, which a limit from outside would do without an answer.
        self.context.limits = replace(self.context.limits, tool_timeout_s=None)
        # A task of several steps goes on after the model's answer to a step.
        self.ends_on_text = len(self._trial.task.steps) == 1
        return instruction

    @ae.tool(parallel=False)
    async def bash(self, command: str, timeout_s: float = _COMMAND_S) -> str:
        """Run a command in a bash of the task's machine. Directory and variables are kept between calls.

        Args:
            command: One or more lines of bash.
            timeout_s: Seconds after which the command is ended, at most the time that the task leaves.
        """
        own, chosen = self._trial.step.agent.timeout_sec or UNLIMITED_S, self._command_s
        # What a command gets without asking it may always take: the time of the task ends the episode.
        limit_s = min(timeout_s, max(self._trial.left_s, min(_COMMAND_S, own)), chosen or UNLIMITED_S)
        result = await self._trial.here.bash(
            command, timeout_s=max(limit_s, 0.1), user=self._trial.step.agent.user
        )
        text, note = result.stdout.rstrip("\n") or "(no output)", result.note
        if result.status == "timeout" and limit_s == chosen:
            note += "; limits.tool_timeout_s sets that limit"
        return f"{text}\n[{note}]" if note else text

    @ae.tool(parallel=False)
    async def write_file(self, path: str, content: str) -> str:
        """Write a file of the task's machine, with its folders.

        Args:
            path: Path of the file.
            content: Its whole content.
        """
        data = base64.b64encode(content.encode("utf-8", errors="replace")).decode()
        name = shlex.quote(path)
        line = f"mkdir -p \"$(dirname {name})\" && base64 -d > {name} <<'AGENTENV_END'\n{data}\nAGENTENV_END"
        result = await self._trial.here.bash(line, timeout_s=_COMMAND_S, user=self._trial.step.agent.user)
        if not result.ok:
            raise ToolError(result.text() or f"{path} cannot be written")
        return f"{path} was written"

    async def step(self, action: Any) -> Any:
        """Run calls of tools; a message without calls ends a step of the task."""
        if action.get("tool_calls"):
            return await super().step(action)
        instruction = await self._trial.advance() if len(self._trial.task.steps) > 1 else None
        return instruction or "", 0.0, instruction is None, False, {}

    def is_done(self) -> bool:
        """Return whether the time that the task gives is over."""
        return self.trial is not None and self.trial.is_late


class HarborSeeing(HarborTools):
    """The same for a model that sees, which can look at images of the task's machine."""

    sends_images = True

    @ae.tool(parallel=False)
    async def view_image(self, path: str) -> Image:
        """Look at an image of the task's machine.

        Args:
            path: Path of a PNG, JPEG, WebP or GIF file.
        """
        here, user = self._trial.here, self._trial.step.agent.user
        found = await here.bash(f"realpath -- {shlex.quote(path)}", timeout_s=_COMMAND_S, user=user)
        data = await here.get(found.stdout.strip(), user=user) if found.ok else None
        if data is None:
            raise ToolError(f"there is no file {path} of at most 64 MiB that can be read")
        try:
            image_size(data)
            with suppress(ImportError):
                _decode(data)
        except (RenderError, OSError, ValueError, SyntaxError) as error:
            raise ToolError(f"{path} cannot be shown: {error}") from None
        return Image(data, f"image/{suffix_of(data).replace('jpg', 'jpeg')}")


def _decode(data: bytes) -> None:
    """Decode an image, as a model of this process will: its head may be whole and its body broken."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(data)) as opened:
        opened.load()


class HarborAgent(_Harbor, ae.AgentEnv):
    """A task in Harbor's format, played by an agent inside the task's container.

    Args:
        options: how tasks are played.
        agent: the agent.
    """

    def __init__(self, options: TrialOptions, agent: KnownAgent) -> None:
        self.options, self.known = options, agent

    async def agent(self, url: str, task: Mapping[str, Any]) -> str:
        """Run the agent on each step of the task; what it prints last is the answer."""
        while True:
            said = await self._play(url, task)
            if self._trial.index + 1 == len(self._trial.task.steps) or await self._trial.advance() is None:
                return said

    def command(self) -> Sequence[str]:
        """Return the agent's command line."""
        assert self.known is not None
        instruction = self._trial.step.instruction
        return [part.replace("{instruction}", instruction) for part in self.known.command]

    @property
    def host(self) -> HarborAgent:
        """The container in which the program of `command` runs is the task's."""
        return self

    async def _play(self, url: str, task: Mapping[str, Any]) -> str:
        try:
            return str(await super().agent(url, task))
        except AgentFailed as error:  # Harbor grades what such an agent has done, too
            return str(error)

    async def run_agent_program(
        self, command: Sequence[str], *, url: str, variables: Mapping[str, str], work: Path, home: Path
    ) -> ExecResult:
        """Run the agent in the task's container; see `agentenv.core.execution.AgentHost`."""
        trial = self._trial
        assert isinstance(trial.here, ContainerBox), "`make` refuses an agent elsewhere"
        await reach_model(trial.here, url)
        env = {**variables, "AGENTENV_INSTRUCTION": trial.step.instruction}
        running = run_in(trial.here, command, env, home, user=trial.step.agent.user)
        try:
            async with asyncio.timeout(trial.step.agent.timeout_sec):
                return await running
        except TimeoutError:  # the agent's time is over, and what it has done is verified
            await trial.here.end_processes()
            note = f"the agent did not end within {trial.step.agent.timeout_sec:g} s"
            return ExecResult(status="timeout", stdout=note, note=note)


def make(
    *,
    runtime: str = "podman",
    network: str = "",
    agent: str = "",
    variables: str = "",
    reward: str = "reward",
    keep_processes: bool = False,
    images: bool = False,
    skip: str = "name",
    folder: str = "",
) -> HarborTools | HarborAgent:
    """Make the environment of tasks in Harbor's format.

    Args:
        runtime: `podman`, `docker`, or the name of one of Harbor's providers, such as `modal`.
        network: `task` for what the task says, which agents get only if asked; `none` for no network.
        agent: name of a known agent, or a command with `{instruction}` in it, to be run in the container;
            empty means tools of ours.
        variables: variables of this machine that tasks may read, separated by commas.
        reward: which of the verifier's rewards counts.
        keep_processes: leave the agent's processes running for the verifier.
        images: give our tools one with which a model that sees looks at images.
        skip: what happens to tasks that cannot be played: `name` leaves them out and names them, `refuse`
            plays none of the folder.
        folder: the folder of the tasks, which `prepare` reads where one refused task refuses all.

    Raises:
        UsageError: A setting has no such value, or tools are asked for beside an agent.
    """
    network = network or ("none" if agent else "task")
    if network not in ("task", "none"):
        raise UsageError(f"network must be task or none, not {network!r}")
    if skip not in ("name", "refuse"):
        raise UsageError(f"skip must be name or refuse, not {skip!r}")
    check_name(runtime, agent)
    if agent and images:
        raise UsageError(
            "env.images is a tool of ours, and env.agent has its own", remedy="leave one of them out"
        )
    names = frozenset(name.strip() for name in variables.split(",") if name.strip())
    options = TrialOptions(runtime, network, names, reward, keep_processes)
    if agent:
        return HarborAgent(options, known_agent(agent))
    return HarborSeeing(options) if images else HarborTools(options)


async def prepare(
    *, runtime: str = "podman", agent: str = "", skip: str = "name", folder: str = "", **settings: str | bool
) -> None:
    """Check before the first episode that the runtime can run a container.

    Raises:
        TaskError: A task cannot be played, and `skip` is `refuse`.
    """
    check_name(runtime, agent)
    for source in splits(Path(folder)).values() if skip == "refuse" else ():
        for row in await asyncio.to_thread(list, source()):
            if isinstance(row, TaskError):
                raise row
    await check_runtime(runtime)


make.prepare = prepare  # type: ignore[attr-defined]


async def oracle(messages: Sequence[ae.Message], task: Mapping[str, Any], rng: Random) -> Any:
    """Play a task's own solution: upload it to /solution, run it as the task's user, and end the step."""
    if messages[-1]["role"] != "user":
        return "Done."
    # Episodes whose turns alternate in one asyncio task show the oracle the same instruction.
    played = [trial for trial in _PLAYED.get() if trial.box]
    shown = [trial for trial in played if trial.step.instruction == text_of(messages[-1])]
    *_, (trial, line) = [(trial, await trial.bring_solution()) for trial in shown or played]
    arguments = {"command": line, "timeout_s": trial.step.agent.timeout_sec or UNLIMITED_S}
    call = {"name": "bash", "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"solve-{trial.index}", "type": "function", "function": call}],
    }
