"""Checks of an environment's interface: specification, tools, Gymnasium's rules, the end of an episode."""

from __future__ import annotations

import asyncio
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from agentenv.core.episode_env import Action, Task, digest
from agentenv.core.errors import EnvironmentMisuse, ToolDefinitionError, UsageError
from agentenv.core.faults import first_line_of
from agentenv.envs.env import Env
from agentenv.envs.spec import EnvSpec
from agentenv.envs.tool_env import ToolEnv
from agentenv.testing.checks.subject import Problem, Subject, function_of

__all__ = ["check_ends", "check_gym", "check_recipe", "check_schema"]

COMPARED_TASKS = 10_000
"""Number of tasks of each split that are compared with those of the other splits."""
_NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")


async def check_recipe(subject: Subject) -> str:
    """The tasks have unique ids, no splits overlap, and the specification survives JSON."""
    if not subject.some_tasks():
        raise Problem("the environment has no tasks")
    text = "; ".join(_tried(subject, split) for split in subject.entry.task_set().splits)
    _check_overlap(subject.entry)
    if subject.entry.module.startswith("agentenv_file_"):
        return f"{text}; the specification names a file, so other machines need the file, too"
    try:
        again = EnvSpec.from_json(subject.entry.to_json())
    except UsageError as error:
        return f"{text}; the specification cannot be written as JSON: {error}"
    if again.to_json() != subject.entry.to_json():
        raise Problem("the specification changes when it is written as JSON and read back")
    return f"{text}; the specification survives JSON"


def _tried(subject: Subject, split: str) -> str:
    """Say how many tasks of a split are tried, and how many are not; check their ids.

    Raises:
        Problem: The split has no tasks, or two with the same id.
    """
    tasks = subject.tasks_of(split)
    if not tasks:
        raise Problem(f"the split {split} has no tasks")
    if len({task.id for task in tasks}) < len(tasks):
        raise Problem(f"two tasks of the split {split} have the same id")
    number = subject.entry.task_set(split).num_tasks
    if number == len(tasks):
        return f"all {number} tasks of {split} tried"
    left = "without end" if number is None else f"{number - len(tasks)} not tried"
    return f"{len(tasks)} tasks of {split} tried, {left}"


def _check_overlap(entry: EnvSpec) -> None:
    """Check that splits have no tasks in common, among the first tasks of each.

    Raises:
        Problem: A task is in two splits.
    """
    seen: dict[str, str] = {}
    for split in entry.task_set().splits:
        tasks = entry.task_set(split).take(COMPARED_TASKS)
        own = {
            digest({name: value for name, value in task.data.items() if name != "id"}, number): task.id
            for number, task in enumerate(tasks)
        }
        own = {key: id for key, id in own.items() if not key.startswith("row-")}
        if shared := [key for key in own if key in seen]:
            raise Problem(
                f"the splits {seen[shared[0]]} and {split} share {len(shared)} tasks, such as "
                f"{own[shared[0]]}; scores on held-out tasks mean nothing if they were trained on"
            )
        seen |= dict.fromkeys(own, split)


async def check_schema(subject: Subject) -> str:
    """Tools have names that providers accept, descriptions, and schemas that do not change."""
    env, task = subject.entry.make(), subject.some_tasks()[0]
    try:
        async with subject.context() as context:
            await env.begin(task.data, seed=0, context=context)
        schemas = list(env.tool_schemas)
        if json.dumps(schemas) != json.dumps(await _schemas_of_another(subject, task)):
            raise Problem("two instances show different tools for the same task")
        names = [str(function_of(schema)["name"]) for schema in schemas]
        for name in names:
            if not _NAME.match(name):
                raise Problem(
                    f"providers refuse the tool name {name!r}; use at most 64 letters, digits, _ and -"
                )
        if len(set(names)) < len(names):
            raise Problem(f"two tools have the same name: {', '.join(sorted(names))}")
        functions = map(function_of, schemas)
        silent = [str(function["name"]) for function in functions if not function.get("description")]
        if silent:
            raise Problem(f"these tools have no description: {', '.join(silent)}; write docstrings")
        if not schemas:
            return "no tools: the model acts in text"
        return f"{len(schemas)} tool{'s' if len(schemas) > 1 else ''}{_strict_note(env)}"
    finally:
        await env.shutdown()


async def _schemas_of_another(subject: Subject, task: Task) -> list[Mapping[str, Any]]:
    """Return the tools of another instance: of a slow environment, of one that has played the task."""
    if subject.is_slow:
        for (_, played), first in subject.firsts.items():
            if played == task.id:
                return first.tools
    env = subject.entry.make()
    try:
        async with subject.context() as context:
            await env.begin(task.data, seed=0, context=context)
        return list(env.tool_schemas)
    finally:
        await env.shutdown()


async def check_gym(subject: Subject) -> str:
    """Gymnasium's own checker passes without warnings, and closing twice is allowed."""
    from gymnasium.utils.env_checker import check_env

    from agentenv.envs.front import Front

    def run() -> list[str]:
        env = Front(subject.entry.make())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", ".*different from the unwrapped version")
            check_env(env, skip_render_check=True)
        env.close()
        env.close()
        return [str(warning.message) for warning in caught]

    try:
        warned = await asyncio.to_thread(run)
    except AssertionError as error:
        raise Problem(f"Gymnasium's checker: {first_line_of(error)}") from error
    if warned:
        raise Problem(f"Gymnasium's checker warns: {warned[0].splitlines()[0]}")
    return "Gymnasium's checker passes; closing twice is allowed"


async def check_ends(subject: Subject) -> str:
    """An episode is scored once, and a step after its end raises."""
    task = subject.some_tasks()[0]
    env = subject.entry.make()
    try:
        async with subject.context() as context:
            await env.begin(task.data, seed=0, context=context)
            outcomes = [await env.end("max_turns"), await env.end("max_turns")]
        if outcomes[0] != outcomes[1]:
            raise Problem("ending an episode twice gives two different rewards")
        try:
            await env.advance(Action.of("?"))
        except EnvironmentMisuse:
            pass
        else:
            raise Problem("step after the end of an episode does not raise")
        async with subject.context() as context:
            await env.begin(task.data, seed=0, context=context)
    finally:
        await env.shutdown()
    return "ending twice gives the same reward; a step after the end raises; a new episode can begin"


def _strict_note(env: Env) -> str:
    if not isinstance(env, ToolEnv):
        return ""
    try:
        env.toolbox.schemas("strict")
    except ToolDefinitionError as error:
        return f"; not in strict mode: {error}"
    return ", strict mode too"
