"""Tasks of Inspect: `inspect:MODULE@task`, where `task` is a function with Inspect's decorator `@task`.

The samples are the tasks. The task's own solvers run, up to each place where they ask the model (`generate`):
what stands in the state there is the observation, and the runner's model answers. Inspect's code runs the
tools, as in its own loop. The scorer sees the state; its value, as Inspect's metrics read it, is the reward.

Refused are tasks with a sandbox, which only Inspect starts, and solvers that ask the model by themselves, as
agents such as `react` do. A scorer that asks a model needs the keys of that model.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from math import isnan
from types import ModuleType
from typing import Any, cast

from agentenv.core import (
    DependencyMissing,
    EnvironmentMisuse,
    Message,
    Outcome,
    TaskError,
    UnknownEnvironment,
    UsageError,
    did_you_mean,
    load_file,
    text_of,
)
from agentenv.envs import Env, spaces

__all__ = ["Inspect", "rows", "task_of"]


_OTHERS = "a solver asks through `generate`; an agent that asks by itself is an ae.AgentEnv here"


class Inspect(Env):
    """Plays a task of Inspect.

    Args:
        source: name of the task, or a `Task` object.
        arguments: arguments of the task's function, if `source` is a name.

    Raises:
        UnknownEnvironment: There is no such task.
        UsageError: The task cannot be played here.
    """

    observation_space = spaces.Chat()
    action_space = spaces.Action()

    def __init__(self, source: Any, **arguments: Any) -> None:
        named = isinstance(source, str)
        self._inner = task_of(source, json.dumps(arguments, sort_keys=True)) if named else _checked(source)
        self._state: Any = None
        self._play: asyncio.Task[None] | None = None
        self._asked: asyncio.Queue[bool] = asyncio.Queue()
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self._shown: list[Message] = []
        self._own = contextvars.Context()

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of the tools that the solver has given to the model so far."""
        if self._state is None:
            return []
        define = importlib.import_module("inspect_ai.tool").ToolDef
        return [_schema(define(tool)) for tool in self._state.tools]

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Run the solvers of a sample until they ask the model, and return the conversation."""
        await self.close()
        number = int(cast("int", self.task["index"]))
        sample = self._inner.dataset[number]
        self._own = contextvars.copy_context()
        self._asked, self._said, self._shown = asyncio.Queue(), asyncio.Queue(), []
        self._state = self._own.run(_state_of, sample, number + 1)
        self._play = asyncio.get_running_loop().create_task(self._solved(), context=self._own)
        try:
            over = await self._until_asked()
        except Exception as error:  # the boundary of the task's code, which may need what only Inspect has
            raise EnvironmentMisuse(f"{self.env_id}: the solver fails: {error}", remedy=_OTHERS) from error
        if over:
            raise EnvironmentMisuse(f"{self.env_id}: the solver never asks the model", remedy=_OTHERS)
        return self._new(), {}

    async def step(self, action: Message) -> Any:
        """Give the model's message to the solver, and return what it adds until it asks again."""
        await self._said.put(action)
        over = await self._until_asked()
        return ([] if over else self._new()), 0.0, over, False, {}

    async def finish(self, stop_reason: str) -> Outcome:
        """Score the state with the task's scorers; the first one gives the reward."""
        await self._stop()
        scores: dict[str, Any] = {}
        for scorer in _listed(self._inner.scorer):
            score = scorer(self._state, self._state.target)
            name = importlib.import_module("inspect_ai._util.registry").registry_unqualified_name(scorer)
            scores[name] = await asyncio.get_running_loop().create_task(score, context=self._own)
        return _outcome(scores)

    async def close(self) -> None:
        """End the solver of an unfinished episode, and the task's own cleanup."""
        await self._stop()
        state, self._state = self._state, None
        if state is not None and self._inner.cleanup is not None:
            await self._inner.cleanup(state)

    async def _solved(self) -> None:
        for solver in [*_listed(self._inner.setup), *_listed(self._inner.solver)]:
            self._state = await solver(self._state, self._generate)
            if self._state.completed:
                return

    async def _generate(self, state: Any, tool_calls: str = "loop", **_: Any) -> Any:
        """Do what Inspect's own generation does, with the runner's model."""
        run: Any = importlib.import_module("inspect_ai.model").execute_tools
        while True:
            self._state = state
            await self._asked.put(True)
            state.output = _output(await self._said.get())
            state.messages.append(state.output.message)
            if state.completed or tool_calls == "none" or not state.output.message.tool_calls:
                return state
            messages, output = await run(state.messages, state.tools)
            state.messages.extend(messages)
            state.output = output or state.output
            if state.completed or tool_calls == "single":
                return state

    async def _until_asked(self) -> bool:
        """Wait until the solver asks the model, and return whether it has ended instead."""
        assert self._play is not None
        asked = asyncio.ensure_future(self._asked.get())
        try:
            await asyncio.wait({asked, self._play}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return False
        finally:
            asked.cancel()
        self._play.result()  # which raises what the solver raised
        return True

    async def _stop(self) -> None:
        play, self._play = self._play, None
        if play is not None and not play.done():
            play.cancel()
            with suppress(asyncio.CancelledError):
                await play

    def _new(self) -> list[Message]:
        """Return the messages that the model has not seen; its own are not repeated."""
        messages = [_ours(one) for one in self._state.messages]
        old, self._shown = self._shown, messages
        if messages[: len(old)] != old:
            raise EnvironmentMisuse(
                f"{self.env_id} rewrites messages that the model was already shown, so it cannot be played "
                "turn by turn"
            )
        return [one for one in messages[len(old) :] if not old or one["role"] != "assistant"]


def rows(name: str) -> list[dict[str, object]]:
    """Return a task for each sample.

    Raises:
        TaskError: There are none.
    """
    samples = task_of(name, "{}").dataset
    found: list[dict[str, object]] = [
        {"id": str(index + 1 if sample.id is None else sample.id), "index": index}
        for index, sample in enumerate(samples)
    ]
    if not found:
        raise TaskError(f"inspect:{name} has no samples")
    return found


@lru_cache(maxsize=16)
def task_of(name: str, arguments: str = "{}") -> Any:
    """Return the task of a name, made with arguments that are given as JSON.

    Raises:
        UnknownEnvironment: There is no such task.
        UsageError: The task cannot be made, or not be played here.
        DependencyMissing: A module is not installed.
    """
    place, _, wanted = name.partition("@")
    registry: Any = importlib.import_module("inspect_ai._util.registry")
    try:
        if place.endswith(".py"):
            place = load_file(place, UnknownEnvironment)
        module: ModuleType = importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = f"inspect:{name} needs the module {error.name}, which is not installed"
        package = (error.name or place).partition(".")[0]
        raise DependencyMissing(missing, remedy=f"pip install {package}") from error
    tasks = {
        key: value
        for key, value in vars(module).items()
        if registry.is_registry_object(value) and registry.registry_info(value).type == "task"
    }
    if not wanted and len(tasks) == 1:
        wanted = next(iter(tasks))
    if wanted not in tasks:
        known = ", ".join(f"inspect:{place}@{one}" for one in tasks) or "none"
        told = f"{place} has no task {wanted!r}" if wanted else f"inspect:{name} names no task"
        raise UnknownEnvironment(told, remedy=f"{did_you_mean(wanted, tasks)} there are: {known}".lstrip())
    try:
        return _checked(tasks[wanted](**json.loads(arguments)))
    except UsageError:
        raise
    except Exception as error:  # the task's own code, which often downloads its data
        raise UsageError(
            f"inspect:{name} cannot be loaded: {type(error).__name__}: {error}",
            remedy="give what the error names, such as a package, a file or the network",
        ) from error


def _checked(inner: Any) -> Any:
    if inner.sandbox is not None or any(sample.sandbox is not None for sample in inner.dataset):
        raise UsageError(
            f"{inner.name} needs a sandbox of Inspect",
            remedy="play it with `inspect eval`; harbor:FOLDER plays tasks in containers here",
        )
    if not inner.scorer:
        raise UsageError(f"{inner.name} has no scorer", remedy="give its Task a scorer")
    return inner


def _listed(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def _state_of(sample: Any, number: int) -> Any:
    """Make the state of a sample, and what Inspect's code finds in the context of an episode."""
    model, scorer = (importlib.import_module(f"inspect_ai.{name}") for name in ("model", "scorer"))
    module = importlib.import_module("inspect_ai.solver._task_state")
    given = sample.input
    messages = [model.ChatMessageUser(content=given)] if isinstance(given, str) else list(given)
    state = module.TaskState(
        model=model.ModelName("agentenv/agentenv"),
        sample_id=sample.id or number,
        epoch=1,
        input=given,
        messages=messages,
        target=scorer.Target(sample.target),
        choices=sample.choices,
        metadata=dict(sample.metadata or {}),
    )
    module.set_sample_state(state)
    transcripts: Any = importlib.import_module("inspect_ai.log._transcript")
    transcripts.init_transcript(transcripts.Transcript())
    cast("Any", importlib.import_module("inspect_ai.util._store")).init_subtask_store(state.store)
    return state


def _output(action: Message) -> Any:
    """Return the model's message as an output of Inspect."""
    model, tools = importlib.import_module("inspect_ai.model"), importlib.import_module("inspect_ai.tool")
    calls: list[Any] = []
    for call in action.get("tool_calls", []):
        function = call["function"]
        try:
            arguments, problem = json.loads(function["arguments"]), None
        except (ValueError, RecursionError) as error:
            arguments, problem = {}, str(error)
        calls.append(
            tools.ToolCall(id=call["id"], function=function["name"], arguments=arguments, parse_error=problem)
        )
    content: Any = text_of(action)
    if thinking := action.get("reasoning_content"):
        content = [model.ContentReasoning(reasoning=thinking), model.ContentText(text=content)]
    message = model.ChatMessageAssistant(content=content, tool_calls=calls or None)
    choice = model.ChatCompletionChoice(message=message, stop_reason="tool_calls" if calls else "stop")
    return model.ModelOutput(model="agentenv", choices=[choice])


def _ours(message: Any) -> Message:
    """Return a message of Inspect as a chat message."""
    content: Any = message.content
    if not isinstance(content, str):
        content = [_part(part) for part in content if part.type in {"text", "image"}]
    converted: dict[str, Any] = {"role": message.role, "content": content}
    if message.role == "tool":
        error = "" if message.error is None else str(message.error.message)
        converted |= {"tool_call_id": message.tool_call_id, "content": error or content}
    if message.role == "assistant" and message.tool_calls:
        converted["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function, "arguments": json.dumps(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return cast("Message", converted)


def _part(part: Any) -> dict[str, Any]:
    if part.type == "text":
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.image}}


def _schema(tool: Any) -> dict[str, Any]:
    parameters = tool.parameters.model_dump(exclude_none=True)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _outcome(scores: Mapping[str, Any]) -> Outcome:
    """Return the first scorer's value as the reward, and the values of all as named parts."""
    to_float: Any = importlib.import_module("inspect_ai.scorer").value_to_float()
    parts: dict[str, float | None] = {}
    rewards: list[float | None] = []
    for name, score in scores.items():
        value = None if score is None else score.value
        if isinstance(value, Mapping):
            named = {f"{name}/{key}": float(to_float(part)) for key, part in cast("Any", value).items()}
            parts |= named
            rewards.append(sum(named.values()) / len(named) if named else None)
        else:
            number = None if value is None else float(to_float(value))
            rewards.append(None if number is None or isnan(number) else number)
            parts[name] = rewards[-1]
    return Outcome(rewards[0] if rewards else None, parts)
