"""Worlds of other packages: found or skipped, begun, and spoken to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from agentenv.core import Action, Context, DependencyMissing
from agentenv.envs import EnvSpec, spec, world_registry

__all__ = ["begun", "needs", "told", "world"]


def needs(*modules: str) -> None:
    """Skip the test where a module is not installed."""
    for module in modules:
        pytest.importorskip(module, reason=f"UNTESTED: {module} is not installed", exc_type=ImportError)


def world(name: str) -> EnvSpec:
    """Return the specification of a world's name; skip the test where it cannot be played here."""
    needs(*world_registry[name.partition(":")[0]].modules)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return spec(name)
    except DependencyMissing as error:
        pytest.skip(f"UNTESTED: {error}")


async def begun(entry: EnvSpec, task: Mapping[str, Any], **settings: Any) -> tuple[Any, str]:
    """Begin an episode; return the environment and the text of its last message."""
    env: Any = entry.make(**settings)
    first = await env.begin(dict(task), seed=0, context=Context())
    return env, first.messages[-1]["content"]


async def told(env: Any, said: Any) -> str:
    """Say something; return what the environment or its tool answers."""
    step = await env.advance(Action.of(said))
    return str(step.tool_results[0].content if step.tool_results else step.messages[-1]["content"])
