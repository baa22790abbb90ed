"""Environments of OpenEnv, played as ours: from its own server, and as objects of this process."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.core import (
    Action,
    Context,
    EnvironmentMisuse,
    RunLimits,
    ServerUnavailable,
    TaskError,
    UsageError,
)
from agentenv.envs import EnvSpec, ToolEnv, spec
from agentenv.runs import evaluate
from agentenv.testing import tool_call_message
from agentenv.tools import tool
from agentenv_openenv.adapter import OpenEnv
from agentenv_openenv.server import serve
from helpers.waiting import until
from helpers.worlds import begun

REASON = "UNTESTED: openenv is not installed"


class Door(ToolEnv):
    """Opens with a number."""

    def start(self, code: int) -> str:
        self.code, self.open = code, False
        return "Open the door."

    @tool
    def press(self, number: int) -> str:
        """Press a number."""
        self.open = number == self.code
        return "open" if self.open else "shut"

    def is_done(self) -> bool:
        return self.open

    def reward(self) -> float:
        return float(self.open)


DOOR = EnvSpec.of("test/Door-v0", Door, tasks=[{"code": 4}])


@pytest.fixture
async def door(monkeypatch):
    """A server of the door, whose token is known."""
    async with serve(DOOR) as server:
        monkeypatch.setenv("OPENENV_TOKEN", server.token)
        yield server


async def test_a_served_environment_is_played_over_the_wire(door):
    env, first = await begun(spec(f"openenv:{door.url}"), {"seed": 1})
    wrong, bad, right = [
        await env.advance(Action.of(tool_call_message("press", number=number))) for number in (3, "x", 4)
    ]
    done = await env.is_finished()
    await env.shutdown()

    assert first == "Open the door."
    assert (wrong.tool_results[0].text, wrong.reward) == ("shut", 0.0)
    assert bad.tool_results[0].is_error
    assert (right.tool_results[0].text, right.reward, done) == ("open", 1.0, True)


async def test_a_server_that_wants_another_token_or_is_not_there_is_named(door, monkeypatch):
    monkeypatch.setenv("OPENENV_TOKEN", "that of another server")

    for url, error, told in (
        (door.url, EnvironmentMisuse, "status 401; set OPENENV_TOKEN"),
        ("http://127.0.0.1:9", ServerUnavailable, "http://127.0.0.1:9 does not answer"),
    ):
        env = spec(f"openenv:{url}").make()
        with pytest.raises(error, match=told):
            await env.begin({"seed": 1}, seed=0, context=Context())
        await env.shutdown()


def test_an_id_names_a_server():
    assert spec("openenv:http://127.0.0.1:8000").id == "openenv/127-0-0-1-8000-v0"
    with pytest.raises(UsageError, match="has no server URL"):
        spec("openenv:echo")


def test_a_thing_that_is_no_environment_is_refused():
    with pytest.raises(UsageError, match="a URL or an object with reset and step"):
        OpenEnv(3)


def pressing(messages, task, rng):
    """Press 4 until the door has answered."""
    if any(message["role"] == "tool" for message in messages):
        return "done"
    return tool_call_message("press", number=4)


async def played(url, env, **runner):
    """Play three tasks of a server, one after the other, and return how each ended."""
    env.oracle = staticmethod(pressing)
    entry = EnvSpec.of("test/Remote-v0", env, kwargs={"source": url}, tasks=[{"seed": s} for s in range(3)])
    options = {"concurrency": 1, "retries": 0, **runner}
    result = await asyncio.to_thread(
        evaluate, entry, "oracle", num_tasks=3, runner=options, stop_after_failures=0
    )
    return [episode for group in result.groups for episode in group]


async def test_a_server_that_dies_aborts_its_episodes_and_scores_none(monkeypatch):
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(DOOR))
        monkeypatch.setenv("OPENENV_TOKEN", server.token)
        outer = asyncio.get_running_loop()

        class Dies(OpenEnv):
            async def start(self, seed: int, **options) -> str:
                first = await super().start(seed, **options)
                if seed == 1:
                    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(stack.aclose(), outer))
                return first

        episodes = await played(server.url, Dies)

    assert [episode.stop_reason for episode in episodes] == ["env_done", "aborted", "aborted"]
    assert [episode.reward for episode in episodes] == [1.0, None, None]
    assert "does not answer" in episodes[2].error.message


async def test_an_environment_without_a_call_says_nothing_of_a_missing_reward(door, caplog):
    entry = EnvSpec.of("test/Remote-v0", OpenEnv, kwargs={"source": door.url}, tasks=[{"seed": 1}])
    result = await asyncio.to_thread(evaluate, entry, "scripted:I give up.", num_tasks=1)

    assert result.groups[0][0].reward == 0.0
    assert "has no reward" not in caplog.text


async def test_a_server_whose_sessions_are_all_in_use_is_waited_for(monkeypatch):
    async with serve(DOOR, max_sessions=1) as server:
        monkeypatch.setenv("OPENENV_TOKEN", server.token)
        episodes = await played(server.url, type("Waits", (OpenEnv,), {}), concurrency=3)

    assert [(episode.stop_reason, episode.reward) for episode in episodes] == [("env_done", 1.0)] * 3


async def test_a_server_that_stays_full_names_the_concurrency(monkeypatch):
    async with serve(DOOR, max_sessions=1) as server:
        monkeypatch.setenv("OPENENV_TOKEN", server.token)
        first, second = (spec(f"openenv:{server.url}").make() for _ in range(2))
        await first.begin({"seed": 1}, seed=0, context=Context())
        limits = RunLimits(env_timeout_s=1.0)
        with pytest.raises(ServerUnavailable, match=r"no free session for 0.8 s.*runner.concurrency=1"):
            await second.begin({"seed": 1}, seed=0, context=Context(limits=limits))
        await first.shutdown()
        await second.shutdown()


class Bare:
    """An environment object whose reset takes no seed, as that of OpenEnv's chess does."""

    def __init__(self):
        self.asked = None

    def reset(self, level: int = 0):
        self.asked = level
        return Seen()

    def step(self, action):
        raise AssertionError

    def close(self):
        pass


class Seen:
    """An observation of OpenEnv."""

    reward, done = None, False

    def model_dump(self, **options):
        return {"told": "go"}


class Move:
    """An action of OpenEnv."""

    @staticmethod
    def model_json_schema():
        return {"properties": {"number": {"type": "integer"}}, "required": ["number"]}


async def test_reset_gets_what_its_signature_takes():
    inner = Bare()
    env = OpenEnv(inner, Move)
    await env.begin({"seed": 5, "level": 3, "id": "x"}, seed=0, context=Context())
    with pytest.raises(TaskError, match="field 'split', which reset"):
        await env.begin({"seed": 5, "split": "test"}, seed=0, context=Context())

    assert inner.asked == 3


async def test_a_server_without_tasks_of_its_own_is_played_on_seeds(door):
    tasks = await asyncio.to_thread(spec(f"openenv:{door.url}").task_set("test").take, 2)

    assert [task.data for task in tasks] == [{"id": "seed-0", "seed": 1}, {"id": "seed-1", "seed": 3}]


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (503, {}, "does not tell its tasks: HTTP Error 503"),
        (200, {"num_tasks": 10**12}, "says that it has 1,000,000,000,000 tasks"),
        (200, "[" * 100_000, "does not tell its tasks"),
    ],
)
async def test_a_server_that_fails_or_lies_about_its_tasks_is_told(status, said, words):
    async def answer(request):
        if request.path == "/list_environments":
            return web.json_response(["door"], status=status)
        if request.path.endswith("/splits"):
            return web.json_response([{"name": "all", "type": "test"}])
        return web.Response(text=said if isinstance(said, str) else json.dumps(said))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        tasks = spec(f"openenv:{server.make_url('')}").task_set("test")
        with pytest.raises((ServerUnavailable, TaskError), match=words):
            await asyncio.to_thread(tasks.take, 1)


@pytest.fixture
def guessing():
    """An environment of OpenEnv's own classes, with its action and its observation."""
    pytest.importorskip("openenv.core", reason=REASON)
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        number: int

    class Heard(Observation):
        told: str

    class Guess(Environment):
        def reset(self, seed=None, episode_id=None, **kwargs):
            self.number = seed % 10
            return Heard(told="guess")

        def step(self, action, timeout_s=None, **kwargs):
            hit = action.number == self.number
            return Heard(told="yes" if hit else "no", reward=float(hit), done=hit)

        @property
        def state(self):
            return State()

    return Guess, Say, Heard


@asynccontextmanager
async def on_openenvs_server(environment, action, observation):
    """Serve an environment with OpenEnv's own server; yield its address."""
    uvicorn = pytest.importorskip("uvicorn", reason=REASON)
    from openenv.core.env_server.http_server import create_fastapi_app

    app = create_fastapi_app(environment, action, observation)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def assert_guessing_is_played(env):
    """Play seed 17, once wrong, once right, and check what came of it."""
    first = await env.begin({"seed": 17}, seed=0, context=Context())
    schema = env.tool_schemas[0]["function"]
    missed = await env.advance(Action.of(tool_call_message("act", number=3)))
    hit = await env.advance(Action.of(tool_call_message("act", number=7)))
    done = await env.is_finished()
    await env.shutdown()
    assert first.messages[-1]["content"] == '{"told": "guess"}'
    assert (schema["name"], list(schema["parameters"]["properties"])) == ("act", ["number"])
    assert (missed.reward, hit.reward, done) == (0.0, 1.0, True)


@pytest.mark.engine
async def test_an_openenv_object_with_an_action_class_gets_one_tool(guessing):
    environment, action, _ = guessing

    await assert_guessing_is_played(OpenEnv(environment(), action))


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_server_of_openenv_is_played_over_the_wire(guessing):
    async with on_openenvs_server(*guessing) as url:
        await assert_guessing_is_played(spec(f"openenv:{url}").make())


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_the_tasks_of_a_server_of_openenv_are_played(guessing):
    environment, action, observation = guessing

    class Tasked(environment):
        def list_splits(self):
            return ["train", {"name": "hard", "type": "test"}]

        def num_tasks(self, split):
            return 2 if split == "hard" else 5

        def reset(self, seed=None, episode_id=None, split="", index=0, **kwargs):
            first = super().reset(seed=index + 7)
            return first.model_copy(update={"told": f"{split} {index}"})

    async with on_openenvs_server(Tasked, action, observation) as url:
        entry = spec(f"openenv:{url}")
        tasks = await asyncio.to_thread(lambda: list(entry.task_set("test")))
        env = entry.make()
        first = await env.begin(tasks[1].data, seed=0, context=Context())
        await env.shutdown()

    assert [task.id for task in tasks] == ["hard-0", "hard-1"]
    assert first.messages[-1]["content"] == '{"told": "hard 1"}'


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_openenvs_own_server_with_one_session_is_waited_for_and_its_errors_abort(guessing):
    environment, action, observation = guessing

    class Raises(environment):
        def step(self, action, timeout_s=None, **kwargs):
            if action.number == 13:
                raise RuntimeError("the simulator is gone")
            return super().step(action)

    async with on_openenvs_server(Raises, action, observation) as url:
        first, second = (spec(f"openenv:{url}").make() for _ in range(2))
        await first.begin({"seed": 17}, seed=0, context=Context())
        waiting = asyncio.create_task(second.begin({"seed": 17}, seed=0, context=Context()))
        refused = await first.advance(Action.of(tool_call_message("act", number=3)))
        with pytest.raises(ServerUnavailable, match="the simulator is gone"):
            await first.advance(Action.of(tool_call_message("act", number=13)))
        await first.shutdown()
        begun = await waiting
        await second.shutdown()

    assert refused.reward == 0.0
    assert begun.messages[-1]["content"] == '{"told": "guess"}'


@pytest.mark.engine
async def test_an_openenv_mcp_environment_brings_its_tools():
    pytest.importorskip("openenv.core", reason=REASON)
    fastmcp = pytest.importorskip("fastmcp", reason="UNTESTED: fastmcp is not installed")
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.types import Observation, State

    server = fastmcp.FastMCP("sums")

    @server.tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    class Sums(MCPEnvironment):
        def reset(self, seed=None, episode_id=None, **kwargs):
            return Observation(metadata={"seed": seed})

        def _step_impl(self, action, timeout_s=None, **kwargs):
            return Observation()

        @property
        def state(self):
            return State()

    env = OpenEnv(Sums(server))
    await env.begin({"seed": 1}, seed=0, context=Context())
    result = await env.advance(Action.of(tool_call_message("add", a=2, b=3)))
    await env.shutdown()

    assert env.tool_schemas[0]["function"]["name"] == "add"
    assert "5" in result.tool_results[0].text
