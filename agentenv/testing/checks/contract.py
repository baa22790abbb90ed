"""Checks of what an environment promises in its form: recipe, tools, Gymnasium"s rules, one end."""

from __future__ import annotations

import asyncio
import json
import re
import warnings

from agentenv.core.context import Context
from agentenv.core.episode_env import Action
from agentenv.core.errors import EnvironmentMisuse, ToolDefinitionError, UsageError
from agentenv.envs.env import Env
from agentenv.envs.spec import EnvSpec
from agentenv.envs.tool_env import ToolEnv
from agentenv.testing.checks.subject import Problem, Subject, function_of

__all__ = ["check_ends", "check_gym", "check_recipe", "check_schema"]

_NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")


async def check_recipe(subject: Subject) -> str:
    """The specification is one that can be written down, and its tasks have unique ids."""
    tasks = subject.some_tasks()
    ids = [task.id for task in tasks]
    if len(set(ids)) < len(ids):
        raise Problem("two tasks have the same id")
    text = f"{len(tasks)} tasks tried"
    try:
        again = EnvSpec.from_json(subject.entry.to_json())
    except UsageError as error:
        return f"{text}; works here only: {error}"
    if again.to_json() != subject.entry.to_json():
        raise Problem("the specification changes when it is written as JSON and read back")
    return f"{text}; the specification survives JSON"


async def check_schema(subject: Subject) -> str:
    """Tools have names that providers take, descriptions, and schemas that are always the same."""
    first, second = subject.entry.make(), subject.entry.make()
    task = subject.some_tasks()[0]
    try:
        for env in (first, second):
            await env.begin(task.data, seed=0, context=Context())
        schemas = list(first.tool_schemas)
        if json.dumps(schemas) != json.dumps(list(second.tool_schemas)):
            raise Problem("two instances show different tools for the same task")
        names = [str(function_of(schema)["name"]) for schema in schemas]
        for name in names:
            if not _NAME.match(name):
                raise Problem(
                    f"providers refuse the tool name {name!r}: letters, digits, _ and -, at most 64"
                )
        if len(set(names)) < len(names):
            raise Problem(f"two tools have one name: {', '.join(sorted(names))}")
        silent = [str(function_of(one)["name"]) for one in schemas if not function_of(one).get("description")]
        if silent:
            raise Problem(f"the model is told nothing about {', '.join(silent)}: write a docstring")
        if not schemas:
            return "no tools: the model acts in text"
        return f"{len(schemas)} tool{'s' if len(schemas) > 1 else ''}{_strict_note(first)}"
    finally:
        await first.shutdown()
        await second.shutdown()


async def check_gym(subject: Subject) -> str:
    """Gymnasium's own checker passes, and the rules that it does not ask for hold."""
    from gymnasium.utils.env_checker import check_env

    def run() -> list[str]:
        env = subject.entry.make()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check_env(env, skip_render_check=True)
        env.close()
        env.close()
        return [str(one.message) for one in caught]

    try:
        warned = await asyncio.to_thread(run)
    except AssertionError as error:
        raise Problem(f"Gymnasium's checker: {str(error).splitlines()[0]}") from error
    if warned:
        raise Problem(f"Gymnasium's checker warns: {warned[0].splitlines()[0]}")
    return "Gymnasium's checker passes; closing twice is fine"


async def check_ends(subject: Subject) -> str:
    """An episode ends once, in one way, and takes no step after that."""
    task = subject.some_tasks()[0]
    env = subject.entry.make()
    try:
        await env.begin(task.data, seed=0, context=Context())
        outcomes = [await env.end("max_turns"), await env.end("max_turns")]
        if outcomes[0] != outcomes[1]:
            raise Problem("ending an episode twice gives two different rewards")
        try:
            await env.advance(Action.of("?"))
        except EnvironmentMisuse:
            pass
        else:
            raise Problem("step after the end of an episode does not raise")
        await env.begin(task.data, seed=0, context=Context())
    finally:
        await env.shutdown()
    return "one verdict however often asked; a step after the end raises; reset starts anew"


def _strict_note(env: Env) -> str:
    if not isinstance(env, ToolEnv):
        return ""
    try:
        env.toolbox.schemas("strict")
    except ToolDefinitionError as error:
        return f"; not in strict mode: {error}"
    return ", strict mode too"
