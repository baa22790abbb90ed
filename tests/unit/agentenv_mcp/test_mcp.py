"""Tools of MCP servers: of the SDK's own in Python, of the two that MCP publishes on npm, and of broken ones."""

import asyncio
import json
import shutil
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentenv.core import ServerUnavailable, StopReason, ToolCall, UsageError
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.runs import evaluate
from agentenv.tools import Toolbox
from agentenv_mcp import mcp_tools
from helpers.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine
pytest.importorskip("mcp.server.mcpserver", reason="UNTESTED: mcp 2 is not installed")

SERVER = """
import base64, os, sys
from mcp.server.mcpserver import MCPServer
from mcp.types import (AudioContent, BlobResourceContents, CallToolResult, EmbeddedResource, ImageContent,
                       ResourceLink, TextContent, TextResourceContents)
from pydantic import BaseModel

server = MCPServer("sums")
PIXEL = ("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")

class Weather(BaseModel):
    city: str
    degrees: float

@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers; with a file of lives, each call costs one, and the last ends the server."
    if len(sys.argv) > 2:
        with open(sys.argv[2], "r+") as file:
            left = int(file.read() or 0) - 1
            file.seek(0)
            file.write(f"{left:03d}")
        if left < 0:
            print("out of lives", file=sys.stderr, flush=True)
            os._exit(3)
    return a + b

@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("broken")

@server.tool()
def weather() -> Weather:
    "Structured."
    return Weather(city="Rome", degrees=21.5)

@server.tool()
def primes() -> list[int]:
    "A list."
    return [2, 3, 5]

@server.tool()
def only_structured() -> CallToolResult:
    "No content."
    return CallToolResult(content=[], structured_content={"city": "Rome"})

@server.tool()
def everything() -> CallToolResult:
    "Every kind of content."
    text = TextResourceContents(uri="file:///notes.txt", text="remember the milk")
    blob = BlobResourceContents(uri="file:///b.bin", blob="AAAA", mime_type="application/zip")
    return CallToolResult(content=[
        TextContent(type="text", text="Here."),
        EmbeddedResource(type="resource", resource=text),
        EmbeddedResource(type="resource", resource=blob),
        ResourceLink(type="resource_link", name="page", uri="https://example.org/page", description="A page."),
        AudioContent(type="audio", data="AAAA", mime_type="audio/wav"),
    ])

@server.tool()
def failed_picture() -> CallToolResult:
    "An error that shows a picture."
    picture = ImageContent(type="image", data=PIXEL, mime_type="image/png")
    return CallToolResult(content=[TextContent(type="text", text="blurred"), picture], is_error=True)

@server.tool(name="fs.read/file")
def dotted() -> str:
    "Dots."
    return "dotted"

@server.tool(name="fs_read_file")
def plain() -> str:
    "Underscores."
    return "plain"

@server.tool(name="x" * 90)
def long() -> str:
    "A long name."
    return "long"

@server.tool()
def place() -> list[str]:
    "Where the server runs."
    return [os.getcwd(), os.environ.get("LIBRARY_KEY", "no key")]

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] != "stdio":
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
"""


@pytest.fixture
def script(tmp_path):
    """The server's program, as the words of a command."""
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return [sys.executable, str(path)]


async def answer(tools, name, **arguments):
    """Return the result of one call."""
    return (await Toolbox(tools).run([ToolCall("1", name, json.dumps(arguments))]))[0]


async def test_tools_of_an_mcp_server_are_tools(script):
    async with mcp_tools(script, only=["add", "fail"]) as tools:
        add, fail = tools
        good = await add.call('{"a": 1, "b": 2}')
        bad = await add.call('{"a": "x"}')
        broken = await fail.call("{}")

    assert add.schema()["function"]["description"].startswith("Add two numbers")
    assert (good.content, good.is_error) == ("3", False)
    assert bad.is_error
    assert (broken.error_kind, broken.text) == ("tool_error", "Error executing tool fail")
    with pytest.raises(UsageError, match=r"no tool 'nope'.*add"):
        async with mcp_tools(script, only=["nope"]):
            pass


async def test_results_are_whole(script):
    async with mcp_tools(script) as tools:
        told = {
            name: (await answer(tools, name)).content
            for name in ("weather", "primes", "only_structured", "everything")
        }
        failed = await answer(tools, "failed_picture")

    assert json.loads(told["weather"]) == {"city": "Rome", "degrees": 21.5}
    assert told["primes"] == "2\n3\n5"
    assert json.loads(told["only_structured"]) == {"city": "Rome"}
    assert told["everything"].split("\n") == [
        "Here.",
        "[file:///notes.txt]",
        "remember the milk",
        "[file:///b.bin is not shown: a chat message holds no application/zip]",
        "[page](https://example.org/page): A page.",
        "[audio is not shown: a chat message holds no audio/wav]",
    ]
    assert (failed.is_error, [part["type"] for part in failed.content]) == (True, ["text", "image_url"])


async def test_a_name_that_providers_refuse_is_changed_and_the_servers_own_is_told(script):
    async with mcp_tools(script) as tools:
        odd = [tool for tool in tools if tool.name[:2] in {"fs", "xx"}]
        names = {(await tool.call("{}")).content: tool for tool in odd}
    async with mcp_tools(script, only=["fs.read/file", "add"], prefix="sums-") as tools:
        prefixed = {
            tool.name: (
                await answer(tools, tool.name, **({"a": 1, "b": 1} if tool.name == "sums-add" else {}))
            ).text
            for tool in tools
        }

    assert names["plain"].name == "fs_read_file"
    assert names["dotted"].name.startswith("fs_read_file_")
    assert len(names["long"].name) == 64
    assert names["dotted"].description.endswith("own name of this tool is 'fs.read/file'.")
    assert names["plain"].description == "Underscores."
    assert prefixed == {"sums-add": "2", f"sums-{names['dotted'].name}": "dotted"}


async def test_a_command_gets_its_environment_and_its_directory(script, tmp_path):
    async with mcp_tools(script, env={"LIBRARY_KEY": "k1"}, cwd=tmp_path) as tools:
        told = await answer(tools, "place")

    assert told.content == f"{tmp_path}\nk1"
    with pytest.raises(UsageError, match="need a command"):
        async with mcp_tools("http://127.0.0.1:9/mcp", env={"a": "b"}):
            pass
    with pytest.raises(UsageError, match="headers= needs a URL"):
        async with mcp_tools(script, headers={"a": "b"}):
            pass
    with pytest.raises(UsageError, match="a command as a list of words"):
        async with mcp_tools("npx -y server"):
            pass


class Sums(ToolEnv):
    """Add one."""

    tasks = tuple({"x": x} for x in range(6))
    server: Any = ""
    opened = 0

    @classmethod
    @asynccontextmanager
    async def prepare(cls):
        async with mcp_tools(cls.server, only=["add"], timeout_s=PATIENCE_S) as cls.tools:
            cls.opened += 1
            yield
            cls.opened -= 1

    def start(self, x: int) -> str:
        self.want = x + 1
        return f"What is {x} + 1?"

    def reward(self, messages) -> float:
        return float(any(said["role"] == "tool" and said["content"] == str(self.want) for said in messages))

    @staticmethod
    def oracle(messages, task, rng):
        if messages[-1]["role"] == "tool":
            return "done"
        function = {"name": "add", "arguments": json.dumps({"a": task["x"], "b": 1})}
        call = {"id": "c", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


def played(env, **runner):
    """Return the stop reason and the reward of each episode, one after the other."""
    runner = {"concurrency": 1, "retries": 0, **runner}
    result = evaluate(EnvSpec.of("test/Sums-v0", env), "oracle", runner=runner, stop_after_failures=0)
    return [(episode.stop_reason, episode.reward) for group in result.groups for episode in group]


SOLVED, ABORTED = (StopReason.FINAL_ANSWER, 1.0), (StopReason.ABORTED, None)


def test_a_server_that_dies_is_started_again_once_and_its_call_repeated(script, tmp_path):
    (tmp_path / "lives").write_text("002")

    class Dying(Sums):
        server = (*script, "stdio", str(tmp_path / "lives"))

        def start(self, x: int) -> str:
            if x == 3:
                (tmp_path / "lives").write_text("900")
            return super().start(x)

    assert played(Dying) == [SOLVED, SOLVED, ABORTED, SOLVED, SOLVED, SOLVED]


def test_the_last_words_of_a_server_that_dies_are_told(script, tmp_path):
    (tmp_path / "lives").write_text("000")

    async def fails():
        async with mcp_tools([*script, "stdio", str(tmp_path / "lives")], reconnect=False) as tools:
            await answer(tools, "add", a=1, b=1)

    with pytest.raises(ServerUnavailable, match=r"broke off: .*\(its last words: .*out of lives"):
        asyncio.run(fails())


@asynccontextmanager
async def on_a_port(script, port, *more):
    """Run the server over HTTP; yield its process."""
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*script, str(port), *more, stdout=quiet, stderr=quiet)

    def answers():
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    try:
        await until(answers)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_an_http_server_that_dies_aborts_its_episodes_and_ends_no_run(script, unused_tcp_port):
    """The run goes on, and plays again once the server is back."""
    again = asyncio.Event()

    class Web(Sums):
        server = f"http://127.0.0.1:{unused_tcp_port}/mcp"

        async def start(self, x: int) -> str:
            loop = asyncio.get_running_loop()
            if x in {2, 4}:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(events[x](), outer))
            assert loop.is_running()
            return super().start(x)

    outer = asyncio.get_running_loop()
    async with on_a_port(script, unused_tcp_port) as process:

        async def kill():
            process.kill()
            await process.wait()

        async def revive():
            second = asyncio.create_task(hold())
            holders.append(second)
            await again.wait()

        async def hold():
            async with on_a_port(script, unused_tcp_port):
                again.set()
                await done.wait()

        done, holders, events = asyncio.Event(), [], {2: kill, 4: revive}
        try:
            told = await asyncio.to_thread(played, Web)
        finally:
            done.set()
            await asyncio.gather(*holders)

    assert told == [SOLVED, SOLVED, ABORTED, ABORTED, SOLVED, SOLVED]


def test_a_server_of_the_run_is_opened_once_and_closed(script):
    class Shared(Sums):
        server = script

    assert played(Shared, concurrency=4) == [SOLVED] * 6
    assert Shared.opened == 0


async def test_a_server_of_an_episode_is_opened_in_it_and_closed_from_another_task(script):
    opened = mcp_tools(script, only=["add"], reconnect=False)
    tools = await asyncio.create_task(opened.__aenter__())
    told = [(await answer(tools, "add", a=number, b=1)).content for number in range(2)]
    await asyncio.create_task(opened.__aexit__(None, None, None))

    assert told == ["1", "2"]
    with pytest.raises(ServerUnavailable):
        await answer(tools, "add", a=1, b=1)


LIAR = """
import json, sys
for line in sys.stdin:
    if sys.argv[1] == "silent":
        continue
    asked = json.loads(line)
    tool = {"name": "a", "inputSchema": 5 if sys.argv[1] == "schema" else {"type": "object"}}
    answers = {
        "initialize": lambda: {"protocolVersion": asked["params"]["protocolVersion"],
                               "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}},
        "tools/list": lambda: {"tools": [tool]} | ({"nextCursor": "again"} if sys.argv[1] == "endless" else {}),
        "tools/call": lambda: {"content": [{"type": "strange"}]},
    }
    if sys.argv[1] == "refusing":
        del answers["tools/call"]
    if (answer := answers.get(asked.get("method"))) is not None:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answer()}), flush=True)
    elif "id" in asked:
        error = {"code": -32601, "message": "Method not found"}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": error}), flush=True)
"""


async def test_what_an_mcp_server_lies_about_is_told_in_words(tmp_path):
    path = tmp_path / "liar.py"
    path.write_text(LIAR)
    with pytest.raises(UsageError, match=r"cannot be reached: .*no-such-program"):
        async with mcp_tools(["no-such-program"], timeout_s=30.0):
            pass
    with pytest.raises(ServerUnavailable, match="did not answer within 1 s"):
        async with mcp_tools([sys.executable, str(path), "silent"], timeout_s=1.0):
            pass
    with pytest.raises(UsageError, match="one page again and again"):
        async with mcp_tools([sys.executable, str(path), "endless"], timeout_s=30.0):
            pass
    with pytest.raises(UsageError, match="list of tools cannot be read"):
        async with mcp_tools([sys.executable, str(path), "schema"], timeout_s=30.0):
            pass
    async with mcp_tools([sys.executable, str(path), "content"], timeout_s=30.0) as tools:
        told = await tools[0].call("{}")
    async with mcp_tools([sys.executable, str(path), "refusing"], timeout_s=30.0) as tools:
        refused = await tools[0].call("{}")

    assert told.is_error
    assert (refused.error_kind, refused.text) == ("tool_error", "Method not found")


def published(name):
    """Return the command of a server that MCP publishes on npm."""
    if shutil.which("npm") is None:
        pytest.skip("UNTESTED: npm is not installed")
    path = Path(sys.prefix, "mcp", "node_modules", ".bin", name)
    if not path.exists():
        pytest.skip("UNTESTED: MCP's servers are not installed: .ci/install-mcp .venv/mcp")
    return str(path)


async def test_mcps_everything_server_is_played_whole(tmp_path):
    command = [published("mcp-server-everything")]
    async with mcp_tools(command, env={"LIBRARY_KEY": "k1"}, roots=[tmp_path], timeout_s=PATIENCE_S) as tools:
        echo = await answer(tools, "echo", message="hi")
        picture = await answer(tools, "get-tiny-image")
        weather = await answer(tools, "get-structured-content", location="New York")
        links = await answer(tools, "get-resource-links", count=2)
        inner = await answer(tools, "get-resource-reference", resourceType="Text", resourceId=1)
        variables = await answer(tools, "get-env")
        until_roots = await answer(tools, "get-roots-list")

    assert echo.content == "Echo: hi"
    assert "image_url" in [part["type"] for part in picture.content]
    assert "temperature" in json.loads(weather.content)
    assert "(demo://resource/dynamic/text/2)" in links.content
    assert "Resource 1: This is a plaintext resource" in inner.content
    assert json.loads(variables.content)["LIBRARY_KEY"] == "k1"
    assert tmp_path.as_uri() in until_roots.content


async def test_mcps_filesystem_server_stays_in_its_roots(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for place in (inside, outside):
        place.mkdir()
        (place / "a.txt").write_text(place.name)
    command = [published("mcp-server-filesystem"), str(outside)]
    async with mcp_tools(command, roots=[inside], timeout_s=PATIENCE_S) as tools:
        listed = await answer(tools, "list_allowed_directories")
        read = await answer(tools, "read_text_file", path=str(inside / "a.txt"))
        refused = await answer(tools, "read_text_file", path=str(outside / "a.txt"))

    assert str(outside) not in listed.content
    assert read.content == "inside"
    assert refused.is_error
    assert "Access denied" in refused.text
