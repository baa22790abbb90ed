"""The pytest plugin, which pytest loads automatically wherever agentenv is installed.

The plugin imports nothing of agentenv until a fixture is used, so it does not slow down other test suites.
It runs asynchronous tests that use its fixtures, if no other plugin, such as pytest-asyncio, runs them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from agentenv.engine.scripted.scripted import ScriptedEngine, ScriptedPolicy, TurnLike
    from agentenv.envs.spec import EnvSpec
    from agentenv.runner.runner import Runner
    from agentenv.testing.episodes import Played

__all__ = ["assert_env_ok", "play_episode", "scripted_engine", "scripted_runner"]

PlayEpisode: TypeAlias = "Callable[..., Awaitable[Played]]"
MakeEngine: TypeAlias = "Callable[[Sequence[TurnLike] | ScriptedPolicy], ScriptedEngine]"
MakeRunner: TypeAlias = "Callable[..., Runner]"
AssertEnvOk: TypeAlias = "Callable[..., Awaitable[None]]"

_FIXTURES = frozenset({"assert_env_ok", "play_episode", "scripted_engine", "scripted_runner"})


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an asynchronous test that uses one of these fixtures, which pytest by itself refuses to run."""
    # pytest-asyncio puts a synchronous function in the place of the tests that it runs.
    test = pyfuncitem.obj
    ours = _FIXTURES.intersection(pyfuncitem.fixturenames)
    if not (ours and inspect.iscoroutinefunction(test)) or pyfuncitem.get_closest_marker("anyio"):
        return None
    names = inspect.signature(test).parameters
    asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def play_episode() -> PlayEpisode:
    """Return a function that plays an episode without a model.

    `await play_episode(entry, said, task, seed=0)` returns the `Played` episode.

    `entry` is an id, a file, a specification or an environment. `said` is a policy, or a list of the model's
    messages in order.
    """
    from agentenv.envs.env import Env
    from agentenv.envs.registry import spec
    from agentenv.testing.episodes import play

    async def played(entry: Any, said: Any, task: Mapping[str, object], *, seed: int = 0) -> Played:
        policy: Any = said if callable(said) else _in_order(said)
        return await play(entry if isinstance(entry, Env) else spec(entry), policy, task, seed=seed)

    return played


@pytest.fixture
def scripted_engine() -> MakeEngine:
    """Return a function that makes an engine for a script, in byte tokens: `scripted_engine(script)`."""
    from agentenv.engine.scripted.scripted import ScriptedEngine
    from agentenv.render.tokenizer import byte_tokenizer

    def make(script: Sequence[TurnLike] | ScriptedPolicy) -> ScriptedEngine:
        codec: Any = byte_tokenizer()
        return ScriptedEngine(script, tokenizer=codec)

    return make


@pytest.fixture
def scripted_runner(scripted_engine: MakeEngine) -> MakeRunner:
    """Return a function that makes a runner for a script: `scripted_runner(script, **limits)`."""
    from agentenv.core.limits import RunLimits
    from agentenv.render.renderer import Renderer
    from agentenv.render.tokenizer import byte_tokenizer
    from agentenv.runner.runner import Runner

    def make(script: Sequence[TurnLike] | ScriptedPolicy, **limits: Any) -> Runner:
        return Runner(scripted_engine(script), Renderer(byte_tokenizer()), RunLimits(**limits))

    return make


@pytest.fixture
def assert_env_ok() -> AssertEnvOk:
    """Return a function that fails the test with the checker's report if a check finds a problem.

    `await assert_env_ok(entry, **options)` takes the arguments of `check_env`.
    """
    from agentenv.testing.checker import check_env

    async def check(entry: str | EnvSpec, **options: Any) -> None:
        report = await check_env(entry, **options)
        if not report.ok:
            pytest.fail(str(report), pytrace=False)

    return check


def _in_order(said: Sequence[Any]) -> Callable[..., Any]:
    def policy(messages: Sequence[Mapping[str, Any]], task: object, rng: object) -> Any:
        turn = sum(message["role"] == "assistant" for message in messages)
        return said[min(turn, len(said) - 1)]

    return policy
