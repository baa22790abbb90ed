"""Environments of OpenEnv, played as ours: from its own server, and as objects of this process."""

import asyncio

import pytest

from agentenv.core import Action, Context, EnvironmentMisuse, UsageError
from agentenv.envs import EnvSpec, ToolEnv, spec
from agentenv.testing import tool_call_message
from agentenv.tools import tool
from agentenv_openenv.adapter import OpenEnv
from agentenv_openenv.server import serve
from helpers.waiting import until

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


async def test_a_served_environment_is_played_over_the_wire(monkeypatch):
    async with serve(DOOR) as server:
        monkeypatch.setenv("OPENENV_TOKEN", server.token)
        env = spec(f"openenv:{server.url}").make()
        first = await env.begin({"seed": 1}, seed=0, context=Context())
        wrong = await env.advance(Action.of(tool_call_message("press", number=3)))
        bad = await env.advance(Action.of(tool_call_message("press", number="x")))
        right = await env.advance(Action.of(tool_call_message("press", number=4)))
        done = await env.is_finished()
        await env.shutdown()

    assert first.messages[-1]["content"] == "Open the door."
    assert (wrong.tool_results[0].text, wrong.reward) == ("shut", 0.0)
    assert bad.tool_results[0].is_error
    assert (right.tool_results[0].text, right.reward, done) == ("open", 1.0, True)


async def test_a_server_that_wants_another_token_is_named(monkeypatch):
    monkeypatch.setenv("OPENENV_TOKEN", "that of another server")
    async with serve(DOOR) as server:
        env = spec(f"openenv:{server.url}").make()
        with pytest.raises(EnvironmentMisuse, match="status 401; set OPENENV_TOKEN"):
            await env.begin({"seed": 1}, seed=0, context=Context())
        await env.shutdown()


async def test_a_server_that_is_not_there_is_named():
    env = spec("openenv:http://127.0.0.1:9").make()

    with pytest.raises(EnvironmentMisuse, match=r"http://127.0.0.1:9 does not answer"):
        await env.begin({"seed": 1}, seed=0, context=Context())
    await env.shutdown()


def test_an_id_names_a_server():
    assert spec("openenv:http://127.0.0.1:8000").id == "openenv/127-0-0-1-8000-v0"
    with pytest.raises(UsageError, match="has no server URL"):
        spec("openenv:echo")


def test_a_thing_that_is_no_environment_is_refused():
    with pytest.raises(UsageError, match="a URL or an object with reset and step"):
        OpenEnv(3)


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
    uvicorn = pytest.importorskip("uvicorn", reason=REASON)
    from openenv.core.env_server.http_server import create_fastapi_app

    server = uvicorn.Server(uvicorn.Config(create_fastapi_app(*guessing), port=0, log_level="error"))
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        await assert_guessing_is_played(spec(f"openenv:http://127.0.0.1:{port}").make())
    finally:
        server.should_exit = True
        await serving


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
