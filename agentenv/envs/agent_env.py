"""`AgentEnv`, an environment whose model is asked by an agent with a loop of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentenv.core.errors import EnvironmentMisuse, UsageError
from agentenv.core.execution import AgentHost
from agentenv.core.fields import arguments_for, wanted_by
from agentenv.core.trees import remove_tree
from agentenv.envs import spaces
from agentenv.envs.advice import tell_once
from agentenv.envs.agent_process import agent_variables, answer_of_agent, run_agent_process
from agentenv.envs.env import Env, ResetReturn, StepReturn

__all__ = ["AgentEnv"]


class AgentEnv(Env):
    """An environment in which an agent of any SDK works on the task.

    - `agent(url, task)` runs the agent and returns its answer. The SDK gets `url + "/v1"` as the base URL of
      OpenAI's API, or `url` as that of Anthropic's; any key will do, and any name of a model. In place of
      `task`, or beside it, its parameters may be the task's fields, by name.
    - `command(...)`, in place of `agent`, returns the command line of an agent that is a program. It runs in
      `self.workspace`, with a fresh home and the variables that its SDK reads; what it prints is its answer.
      Its parameters are the task's fields, by name. With a sandbox that can run agents, such as
      `podman:IMAGE`, it runs there and reaches nothing but the model.
    - `start(...)` is optional and prepares the task, such as files in `self.workspace`.
    - `reward(...)` scores the finished episode; its arguments are filled by name, `answer` among them.

    Each may be asynchronous or not. The episode ends when the agent ends.
    """

    observation_space = spaces.Chat()
    action_space = spaces.Action()
    trained_sequences: Any = "main"
    """Which sequences of tokens are trained: `main` (those that have tools or were continued), `all`, or a
    function of an `agentenv.endpoint.OpenSequence`."""
    variables: Mapping[str, str] = {}
    """Further environment variables of `command`."""

    _hooks: ClassVar[tuple[str, ...]] = (*Env._hooks, "start", "reward", "agent", "command")  # noqa: SLF001
    _workspace: Path | None = None
    _answer: object = None

    # To a type checker `*args: Any, **kwargs: Any` means that a subclass may choose its own parameters.

    def start(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a task; does nothing unless a subclass overrides it."""

    async def agent(self, url: str, task: Mapping[str, Any]) -> object:
        """Run the agent on a task, and return its answer; by default it is the program of `command`.

        Args:
            url: address of the model.
            task: fields of the task.

        Raises:
            AgentFailed: The program ended with an error.
        """
        offered = {"task": task, "url": url}
        command = await self._call(self.command, **arguments_for(self.command, offered, task))
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        variables = {**agent_variables(url, home, task), **self.variables}
        if (host := self.host) is not None:
            places = {"work": self.workspace, "home": home}
            result = await host.run_agent_program(command, url=url, variables=variables, **places)
            return answer_of_agent(command[0], result)
        return await run_agent_process(command, variables, self.workspace, self._folder)

    def command(self, *args: Any, **kwargs: Any) -> Sequence[str]:
        """Return the command line of an agent that is a program."""
        raise UsageError(
            f"{type(self).__name__} has no agent",
            remedy="write async def agent(self, url, task), or def command(self, ...)",
        )

    def reward(self, *args: Any, **kwargs: Any) -> Any:
        """Score the finished episode; the reward is 0 unless a subclass overrides this method."""
        return 0.0

    @property
    def host(self) -> AgentHost | None:
        """The sandbox in which the program of `command` runs; None if it runs as a process of ours."""
        sandbox = self.context.sandbox
        return sandbox if isinstance(sandbox, AgentHost) else None

    @property
    def workspace(self) -> Path:
        """Directory of this episode, which is empty at its beginning and removed at its end."""
        workspace = self._folder / "workspace"
        workspace.mkdir(exist_ok=True)
        return workspace

    @property
    def answer(self) -> object:
        """What the agent returned; None before it ended."""
        return self._answer

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetReturn:
        """Prepare the task that the core has set."""
        self._remove_folder()
        self._answer = None
        context = self.context
        offered = {"context": context, "sandbox": context.sandbox, "seed": context.seed, "task": self.task}
        await self._call(self.start, **arguments_for(self.start, offered, self.task))
        return "", {}

    async def step(self, action: Any) -> StepReturn:
        """Refuse an action: the agent asks the model itself."""
        raise EnvironmentMisuse(
            f"{type(self).__name__} has no step: its agent asks the model itself",
            remedy="play it with ae.evaluate or with a Runner",
        )

    async def run_agent(self, url: str) -> None:
        """Run the agent to its end; see `agentenv.core.episode_env.AgentDriven`."""
        offered = {"task": self.task, "url": url}
        self._answer = await self._call(self.agent, **arguments_for(self.agent, offered, self.task))
        if self._answer is None and "answer" in wanted_by(self.reward).names:
            tell_once(
                type(self),
                "%s.agent() returned nothing, so `answer` is the model's last text: return the agent's",
                type(self).__name__,
            )

    async def finish(self, stop_reason: str) -> Any:
        """Call `reward` with the arguments it names."""
        reward = self._hook("reward")
        return await self._call(reward, **arguments_for(reward, self._offered(stop_reason), self.task))

    async def shutdown(self) -> None:
        """Remove the workspace; see `agentenv.core.episode_env.EpisodeEnv`."""
        try:
            await super().shutdown()
        finally:
            self._remove_folder()

    def _offered(self, stop_reason: str) -> dict[str, object]:
        """Return the values that a reward's arguments may name: the answer is what the agent returned."""
        offered = super()._offered(stop_reason)
        said = offered["answer"] if self._answer is None else self._answer
        return {**offered, "answer": said, "workspace": self.workspace}

    @property
    def _task_readers(self) -> Sequence[Callable[..., object]]:
        plays = self.command if type(self).agent is AgentEnv.agent else self.agent
        return (self.start, plays, self.reward)

    @property
    def _folder(self) -> Path:
        if self._workspace is None:
            self._workspace = Path(tempfile.mkdtemp(prefix="agentenv-agent-"))
        return self._workspace

    def _remove_folder(self) -> None:
        if self._workspace is not None:
            remove_tree(self._workspace)
            self._workspace = None
