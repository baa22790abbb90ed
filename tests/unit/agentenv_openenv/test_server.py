"""OpenEnv's protocol: spoken as text, and by OpenEnv's own client where it is installed."""

import json

import aiohttp
import pytest
import pytest_asyncio

from agentenv.core import ToolError, UsageError
from agentenv.core.serving import Guard
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.tools import tool
from agentenv_openenv.server import OpenEnvServer, serve
from agentenv_openenv.sessions import Sessions
from helpers.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Adder(ToolEnv):
    """Adds two numbers."""

    def start(self, x: int, y: int) -> str:
        self.want = x + y
        return f"What is {x} + {y}?"

    @tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        if a == 13:
            raise ToolError("13 is not lucky")
        if a == 666:
            raise RuntimeError("a bug")
        return a + b

    def reward(self, answer: str) -> float:
        if answer == "crash":
            raise RuntimeError("the reward is broken")
        return float(answer == str(self.want))


TASKS = [{"id": f"t{n}", "x": n, "y": 2} for n in range(5)]
ADDER = EnvSpec.of("test/Adder-v0", Adder, tasks=TASKS, max_turns=3)


def client(server, **headers):
    """Return a client of a server, which sends the token."""
    return aiohttp.ClientSession(server.url, headers={**server.headers, **headers})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http():
    """A client of one server for the tests that need no other."""
    async with serve(ADDER) as server, client(server) as session:
        yield session


@pytest_asyncio.fixture(loop_scope="module")
async def socket(http):
    async with http.ws_connect("/ws") as opened:
        yield opened


async def ask(socket, kind, **data):
    await socket.send_json({"type": kind, "data": data} if kind in {"reset", "step"} else {"type": kind})
    return await socket.receive_json(timeout=60)


async def test_an_episode_over_a_websocket(socket):
    first = (await ask(socket, "reset", seed=4, task_id="t3"))["data"]
    step = (await ask(socket, "step", type="call_tool", tool_name="add", arguments={"a": 3, "b": 2}))["data"]
    last = (await ask(socket, "step", content="5"))["data"]
    state = (await ask(socket, "state"))["data"]

    assert first["observation"]["messages"] == [{"role": "user", "content": "What is 3 + 2?"}]
    assert first["observation"]["tools"][0]["function"]["name"] == "add"
    assert (step["observation"]["result"], step["observation"]["error"], step["done"]) == ("5", None, False)
    assert (last["reward"], last["done"], last["metadata"]["stop_reason"]) == (1.0, True, "final_answer")
    assert (state["step_count"], state["task_id"], state["done"]) == (2, "t3", True)


async def test_an_action_may_be_the_models_message_with_its_calls(socket):
    function = {"name": "add", "arguments": '{"a": 1, "b": 1}'}
    call = {"id": "mine", "type": "function", "function": function}
    await ask(socket, "reset", task={"x": 1, "y": 1})
    step = (await ask(socket, "step", content="", tool_calls=[call]))["data"]

    (message,) = step["observation"]["messages"]
    assert (message["role"], message["tool_call_id"], message["content"]) == ("tool", "mine", "2")


async def test_a_seed_without_a_task_draws_the_same_task_again(socket):
    drawn = [
        (await ask(socket, "reset", seed=seed))["data"]["metadata"]["task_id"] for seed in (7, 7, 1, 2, 3)
    ]

    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


async def test_the_turn_limit_ends_an_episode(socket):
    await ask(socket, "reset", task_id="t1")
    spoken = {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1, "b": 1}}
    steps = [
        await socket.send_json({"type": "step", "data": spoken}) or await socket.receive_json()
        for _ in range(3)
    ]

    assert [one["data"]["done"] for one in steps] == [False, False, True]
    assert steps[-1]["data"]["metadata"]["stop_reason"] == "max_turns"


async def test_sessions_do_not_touch_each_other(http):
    one, two = await http.ws_connect("/ws"), await http.ws_connect("/ws")
    await ask(one, "reset", task_id="t0")
    await ask(two, "reset", task_id="t4")
    rewards = [(await ask(socket, "step", content="6"))["data"]["reward"] for socket in (one, two)]
    await one.close()
    await two.close()

    assert rewards == [0.0, 1.0]


WRONG_MESSAGES = [
    ("no json", "INVALID_JSON"),
    ("[1]", "UNKNOWN_TYPE"),
    ('{"type": "dance"}', "UNKNOWN_TYPE"),
    ('{"type": "reset", "data": 3}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"task_id": "t99"}}', "VALIDATION_ERROR"),
    ('{"type": "step", "data": {"content": "no episode"}}', "VALIDATION_ERROR"),
]


async def test_a_wrong_message_is_answered_with_its_code_and_the_session_goes_on(socket):
    for sent, code in WRONG_MESSAGES:
        await socket.send_str(sent)
        told = await socket.receive_json(timeout=60)

        assert (sent, told["type"], told["data"]["code"]) == (sent, "error", code)
    assert (await ask(socket, "reset", task_id="t1"))["type"] == "observation"


async def test_tools_and_rewards_that_fail_are_told_and_end_nothing_else(socket):
    await ask(socket, "reset", task_id="t1")
    unlucky = await ask(socket, "step", type="call_tool", tool_name="add", arguments={"a": 13, "b": 1})
    unknown = await ask(socket, "step", type="call_tool", tool_name="sub", arguments={})
    broken = await ask(socket, "step", content="crash")
    after = await ask(socket, "reset", task_id="t1")

    assert "13 is not lucky" in unlucky["data"]["observation"]["error"]["message"]
    assert "sub" in unknown["data"]["observation"]["error"]["message"]
    assert broken["data"]["code"] == "EXECUTION_ERROR"
    assert after["type"] == "observation"


async def test_a_server_that_is_full_says_so():
    async with (
        serve(ADDER, max_sessions=1) as server,
        client(server) as http,
        http.ws_connect("/ws"),
        http.ws_connect("/ws") as refused,
    ):
        told = await refused.receive_json(timeout=60)

    assert told["data"]["code"] == "CAPACITY_REACHED"


async def test_plain_http_plays_one_shared_session():
    async with serve(ADDER) as server, client(server) as http:
        health = await (await http.get("/health")).json()
        schema = await (await http.get("/schema")).json()
        named = await (await http.get("/metadata")).json()
        early = await http.post("/step", json={"action": {"content": "5"}})
        first = await (await http.post("/reset", json={"task_id": "t3"})).json()
        last = await (await http.post("/step", json={"action": {"content": "5"}})).json()
        broken = await http.post("/step", data="no json", headers={"Content-Type": "application/json"})

    assert health == {"status": "healthy"}
    assert set(schema) == {"action", "observation", "state"}
    assert (named["name"], named["description"]) == ("test/Adder-v0", "Adds two numbers.")
    assert (early.status, broken.status) == (422, 422)
    assert first["observation"]["messages"][0]["content"] == "What is 3 + 2?"
    assert (last["reward"], last["done"]) == (1.0, True)


async def test_an_environment_with_a_simulated_user_is_refused():
    entry = EnvSpec.of("test/Talk-v0", Adder, tasks=TASKS, user=lambda task: None)

    with pytest.raises(UsageError, match="simulated user"):
        OpenEnvServer(entry)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": ""}, 401),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
async def test_what_a_web_page_can_send_plays_nothing_and_calls_no_tool(headers, status):
    body = json.dumps({"task_id": "t1"})
    called = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add"}})
    async with serve(ADDER) as server, client(server) as http:
        sent = {"Content-Type": "application/json", **headers}
        answers = [
            await http.post("/reset", data=body, headers=sent),
            await http.post("/step", data=body, headers=sent),
            await http.post("/mcp", data=called, headers=sent),
        ]
        told = [(await answer.json())["detail"] for answer in answers]
        if status != 415:
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await http.ws_connect("/ws", headers=headers)
            assert refused.value.status == status
        state = await (await http.get("/state")).json()

    assert [answer.status for answer in answers] == [status] * 3
    assert all(told)
    assert state["episode_id"] is None


async def test_a_page_of_the_server_itself_and_a_known_name_are_answered():
    async with serve(ADDER, allowed_hosts=["sandbox.internal"]) as server, client(server) as http:
        own = await http.post("/reset", json={"task_id": "t1"}, headers={"Origin": server.url})
        named = await http.get("/state", headers={"Host": "sandbox.internal:8000"})

    assert (own.status, named.status) == (200, 200)


async def test_other_machines_need_a_token():
    with pytest.raises(UsageError, match="it has no token"):
        Guard.of("0.0.0.0", "")


async def test_sockets_without_an_episode_make_room_and_those_that_play_do_not():
    clock = [0.0]
    sessions = Sessions(ADDER, 3, 60.0, lambda: clock[0])
    hung_up = []

    async def attached():
        id = await sessions.open()

        async def hang_up():
            hung_up.append(id)

        return id, sessions.attach(id, hang_up)

    idle, _ = await attached()
    playing, player = await attached()
    fresh, _ = await attached()
    await player.reset({"task_id": "t1"})
    with pytest.raises(UsageError, match="all 3 sessions are in use"):
        await sessions.open()
    clock[0] = 30.0
    sessions[fresh]
    newest = await sessions.open()
    await until(lambda: hung_up == [idle])

    assert [sessions[id] for id in (playing, fresh, newest)]
    with pytest.raises(UsageError, match="no session"):
        sessions[idle]
    sessions.detach(playing)
    sessions.detach(fresh)
    await sessions.close_all()


async def test_a_socket_that_says_nothing_is_closed():
    async with serve(ADDER, idle_s=0.05) as server, client(server) as http, http.ws_connect("/ws") as socket:
        told = await socket.receive_json(timeout=60)
        ended = await socket.receive(timeout=60)

    assert "no message came for 0.05 s" in told["data"]["message"]
    assert ended.type is aiohttp.WSMsgType.CLOSE


DEEP = "[" * 100_000


WRONG_RESETS = [
    DEEP,
    '{"seed": ' + DEEP,
    '{"seed": NaN}',
    '{"seed": 1e400}',
    '{"seed": -1}',
    '{"seed": 123456789012345678901234567890}',
    '{"seed": true}',
    '{"episode_id": {"a": 1}}',
    '{"episode_id": "\\ud800"}',
    '{"task_id": ["t1"]}',
    '{"split": {"a": []}}',
    '{"task": 3}',
    '{"task": {"x": "a"}}',
    '{"task": {"x": 1, "y": 2, "z": 3, "more": null}}',
    '["reset"]',
    "",
    "\x00",
]


async def test_a_wrong_reset_is_refused_in_words(http):
    for sent in WRONG_RESETS:
        headers = {"Content-Type": "application/json"}
        answer = await http.post("/reset", data=sent.encode() or b" ", headers=headers)

        assert (sent[:80], answer.status) == (sent[:80], 422)
        assert (await answer.json())["detail"]
    assert (await http.post("/reset", json={"task_id": "t1"})).status == 200


WRONG_ACTIONS = [
    {"content": 3},
    {"content": "x", "tool_calls": "add"},
    {"content": "x", "tool_calls": [3]},
    {"content": "x", "tool_calls": [{"id": "a", "function": {"name": "add"}}]},
    {"content": "x", "tool_calls": [{"id": 1, "function": {"name": "add", "arguments": "{}"}}]},
    {"type": "dance"},
    {},
]


async def test_a_wrong_action_is_refused_in_words_and_the_episode_goes_on(http):
    await http.post("/reset", json={"task_id": "t1"})
    for action in WRONG_ACTIONS:
        answer = await http.post("/step", json={"action": action})

        assert (action, answer.status) == (action, 422)
        assert (await answer.json())["detail"]
    last = await (await http.post("/step", json={"action": {"content": "3"}})).json()
    assert last["reward"] == 1.0


async def rpc(http, method, **params):
    asked = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    told = await (await http.post("/mcp", json=asked)).json()
    assert told["id"] == 7
    return told.get("result", told.get("error"))


async def test_tools_are_listed_and_called_in_mcps_words_within_the_episode_of_a_socket(http):
    id = (await rpc(http, "openenv/session/create"))["session_id"]
    listed = await rpc(http, "tools/list", session_id=id)
    async with http.ws_connect(f"/ws?session_id={id}") as socket:
        await ask(socket, "reset", task_id="t3")
        called = await rpc(http, "tools/call", session_id=id, name="add", arguments={"a": 3, "b": 2})
        busy = await rpc(http, "openenv/session/close", session_id=id)
        last = (await ask(socket, "step", content="5"))["data"]
    closed = await rpc(http, "openenv/session/close", session_id=id)
    gone = await rpc(http, "tools/list", session_id=id)

    assert [(one["name"], list(one["inputSchema"]["properties"])) for one in listed["tools"]] == [
        ("add", ["a", "b"])
    ]
    assert (called["content"], called["data"], called["done"]) == (
        [{"type": "text", "text": "5"}],
        "5",
        False,
    )
    assert last["reward"] == 1.0
    assert "in use by a socket" in busy["message"]
    assert closed["closed"] is True
    assert "no session" in gone["message"]


async def test_what_mcp_cannot_do_is_answered_with_an_error_of_json_rpc():
    async with serve(ADDER, max_sessions=1) as server, client(server) as http:
        await http.post("/reset", json={"task_id": "t1"})
        asked = [
            await rpc(http, "tools/call", name="add", arguments={"a": 13, "b": 1}),
            await rpc(http, "tools/call", name="add", arguments=[1]),
            await rpc(http, "dance"),
        ]
        odd = await (await http.post("/mcp", json={"method": "tools/list"})).json()
        async with http.ws_connect("/ws") as socket:
            full = await rpc(http, "openenv/session/create")
            await socket.send_json(
                {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}}
            )
            over_socket = await socket.receive_json(timeout=60)
        first = await rpc(http, "openenv/session/create")
        second = await rpc(http, "openenv/session/create")
        pushed_out = await rpc(http, "tools/list", session_id=first["session_id"])

    assert [one["code"] for one in asked] == [-32602, -32602, -32601]
    assert "13 is not lucky" in asked[0]["message"]
    assert odd["error"]["code"] == -32600
    assert "sessions are in use" in full["message"]
    assert over_socket["data"]["result"]["tools"][0]["name"] == "add"
    assert "session_id" in second
    assert "no session" in pushed_out["message"]


@pytest.mark.engine
async def test_openenvs_mcp_client_lists_and_calls_the_tools():
    openenv = pytest.importorskip("openenv.core.mcp_client", reason="UNTESTED: openenv is not installed")
    async with (
        serve(ADDER) as server,
        openenv.MCPToolClient(base_url=server.url, headers=server.headers) as env,
    ):
        await env.reset(task_id="t3")
        tools = await env.list_tools()
        sum_ = await env.call_tool("add", a=3, b=2)
        with pytest.raises(RuntimeError, match="13 is not lucky"):
            await env.call_tool("add", a=13, b=0)
        state = await env.state()

    assert [(one.name, one.description) for one in tools] == [("add", "Add two numbers.")]
    assert (sum_, state.step_count) == ("5", 2)


@pytest.mark.engine
async def test_openenvs_own_client_plays_an_episode():
    core = pytest.importorskip("openenv.core", reason="UNTESTED: openenv is not installed")
    types = pytest.importorskip("openenv.core.env_server.types")
    async with serve(ADDER) as server:
        async with core.GenericEnvClient(base_url=server.url, headers=server.headers) as env:
            first = await env.reset(seed=3, task_id="t3")
            listed = await env.step({"type": "list_tools"})
            step = await env.step({"type": "call_tool", "tool_name": "add", "arguments": {"a": 3, "b": 2}})
            last = await env.step({"content": "5"})
            state = await env.state()
            with pytest.raises(RuntimeError, match="send reset first"):
                await env.step({"content": "5"})
        async with client(server) as http:
            types.SchemaResponse.model_validate(await (await http.get("/schema")).json())
            types.EnvironmentMetadata.model_validate(await (await http.get("/metadata")).json())
            types.ResetResponse.model_validate(await (await http.post("/reset", json={})).json())

    assert first.observation["messages"][0]["content"] == "What is 3 + 2?"
    assert [one["name"] for one in listed.observation["tools"]] == ["add"]
    assert (step.observation["result"], step.done) == ("5", False)
    assert (last.reward, last.done) == (1.0, True)
    assert state["step_count"] == 2
