"""Task sets of verifiers.v1, whose episodes are programs: `verifiers:NAME`, where NAME is the task set's.

verifiers runs the program (it calls one a harness), its tools and its rewards, and the program asks our
endpoint in the place of an API, so the tokens are kept as they were sampled. Its rewards and metrics are the
named parts. A program that the package brings is taken; else `null`, a chat with the task set's own tools,
because verifiers' own default runs the model's commands. `-o env.harness=bash -o env.runtime=docker` takes
another one. `verifiers` prepares programs with `uv`.

Refused are task sets whose episodes have several roles.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import count, islice
from typing import Any

from agentenv.core import EnvironmentMisuse, Outcome, UsageError
from agentenv.envs import AgentEnv

__all__ = ["TaskSetEnv", "is_task_set", "task_rows"]

_KEY = "AGENTENV_NO_KEY"
"""A variable that is not set: the endpoint takes any key, and the user's own must not reach it."""


class TaskSetEnv(AgentEnv):
    """Plays a task set of verifiers.v1.

    Args:
        source: name of the task set.
        harness: name of the program that asks the model; the package's own, if empty.
        runtime: where the program runs, as verifiers names it: `subprocess`, `docker`, ...
        options: settings of the task set.

    Raises:
        UsageError: The task set cannot be played with these arguments.
    """

    def __init__(self, source: str, harness: str = "", runtime: str = "subprocess", **options: Any) -> None:
        super().__init__()
        self._source, self._config = source, _config_of(source, harness, runtime, options)
        self._options = json.dumps(options, sort_keys=True)
        self._trace: Any = None

    async def agent(self, url: str, task: Mapping[str, Any]) -> object:
        """Let verifiers play the episode; its program asks the model at `url`."""
        clients = importlib.import_module("verifiers.v1.clients")
        client = clients.EvalClientConfig(base_url=f"{url}/v1", api_key_var=_KEY)
        self._trace = None
        inner = _loaders().load_environment(
            self._config
        )  # of its own, because it holds what serves an episode
        async with inner.serving():
            episode = await inner.run_episode(
                _task_at(self._source, self._options, int(task["index"])),
                clients.ModelContext("agentenv", client),
            )
        for told in (*episode.errors, *(error for trace in episode.traces for error in trace.errors)):
            raise EnvironmentMisuse(f"{self.env_id}: {told.type}: {told.message}")
        (self._trace,) = episode.traces
        return self._trace.last_reply

    async def finish(self, stop_reason: str) -> Outcome:
        """Return verifiers' own reward, with its rewards and metrics as named parts."""
        if self._trace is None:
            return Outcome(None)
        rewards = {name: value.value for name, value in self._trace.rewards.items() if value is not None}
        return Outcome(float(self._trace.reward), {**self._trace.metrics, **rewards})


def is_task_set(name: str) -> bool:
    """Return whether verifiers knows a task set of its first version by this name."""
    try:
        _loaders().taskset_class(name)
    except Exception:  # noqa: BLE001 - the package's own code is imported, which may raise anything
        return False
    return True


def task_rows(name: str) -> Iterator[dict[str, object]]:
    """Yield a task for each one of the task set, which may have no end."""
    for index in count():
        try:
            _task_at(name, "{}", index)
        except IndexError:
            return
        yield {"id": str(index), "index": index}


def _task_at(name: str, options: str, index: int) -> Any:
    read, rest = _tasks(name, options)
    read.extend(islice(rest, max(0, index + 1 - len(read))))
    return read[index]


@lru_cache(maxsize=16)
def _tasks(name: str, options: str) -> tuple[list[Any], Iterator[Any]]:
    """Return the tasks that were read so far, and the others."""
    config = _config_of(name, "", "subprocess", json.loads(options))
    return [], iter(_loaders().load_taskset(config.taskset))


def _config_of(name: str, harness: str, runtime: str, options: Mapping[str, Any]) -> Any:
    """Return the configuration of verifiers' environment.

    Raises:
        UsageError: It has several roles, or refuses a setting.
    """
    loaders = _loaders()
    own = loaders.default_harness_id(name)
    agent = {"harness": {"id": harness or ("null" if own == "bash" else own)}, "runtime": {"type": runtime}}
    if not issubclass(loaders.environment_class(name), loaders.SingleAgentEnv):
        raise UsageError(
            f"the episodes of {name} have several roles",
            remedy="play it with verifiers' own `eval`, then `agentenv import traces.jsonl`",
        )
    try:
        return loaders.resolve_env_config({"taskset": {"id": name, **options}, "agent": agent})
    except ValueError as error:
        told = " ".join(str(error).split()[:30])
        raise UsageError(f"verifiers:{name} cannot be made: {told}") from error


def _loaders() -> Any:
    return importlib.import_module("verifiers.v1.utils.loaders")
