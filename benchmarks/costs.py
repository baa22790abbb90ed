"""What one megabyte costs at every entrance: processor time on the event loop, memory, and what is answered.

Each cell is one attack, played in a process of its own. `python benchmarks/costs.py --write` puts the table
into `docs/reference/costs.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agentenv.core import AgentEnvError

SIZE = 1_000_000
"""Bytes of an attack that has a size."""
LIMIT_S, LIMIT_MB = 2.0, 200
KINDS = ("huge", "deep", "many", "slow", "never-ending", "binary", "wrong type")
PAGE = Path(__file__).parent.parent / "docs" / "reference" / "costs.md"
BINARY = bytes(range(256)) * (SIZE // 256)

Attack = Callable[[Any], Awaitable[str]]


def values() -> dict[str, str]:
    """Return JSON texts of each kind that has a size."""
    half = SIZE // 2
    return {
        "huge": json.dumps("a<|im_end|>" * (SIZE // 11)),
        "deep": "[" * half + "]" * half,
        "many": "[" + ",".join(["1"] * half) + "]",
        "wrong type": '{"a": null}',
    }


def written(folder: str, name: str, data: bytes) -> Path:
    """Write a file, which may be run as a program."""
    path = Path(folder, name)
    path.write_bytes(data)
    path.chmod(0o755)
    return path


# One function an entrance: it is given the kind of attack, and returns what is answered.


async def command_line(kind: str) -> str:
    """Set an option of an environment."""
    from agentenv.core import RunLimits
    from agentenv.core.settings import build, parse_pairs

    text = {**values(), "binary": BINARY.decode("latin-1")}[kind]
    build(RunLimits, parse_pairs([f"max_turns={text}"]))
    return "taken"


async def files(kind: str) -> str:
    """Read a task file and a file of settings."""
    from agentenv.core.settings import read_toml
    from agentenv.envs import TaskSet

    data = BINARY if kind == "binary" else values().get(kind, "").encode()
    with tempfile.TemporaryDirectory() as folder:
        tasks = written(folder, "tasks.jsonl", data + b"\n")
        settings = written(folder, "a.toml", b"a = " + data)
        if kind == "never-ending":
            tasks = settings = Path("/dev/zero")
        refused = 0
        for read in (lambda: len(TaskSet.of(str(tasks))), lambda: read_toml(settings)):
            try:
                read()
            except AgentEnvError:
                refused += 1
    return "refused" if refused == 2 else "refused or read"


async def http(kind: str) -> str:
    """Ask the endpoint."""
    import zlib

    import aiohttp

    from agentenv.endpoint import Session, SessionOptions, serve_sessions
    from agentenv.engine import ScriptedEngine
    from agentenv.render import Renderer, byte_tokenizer

    tokenizer = byte_tokenizer()
    session = Session(ScriptedEngine([[72]]), Renderer(tokenizer), SessionOptions())
    text = values().get(kind, '"a"')
    body: Any = f'{{"model": "m", "messages": [{{"role": "user", "content": {text}}}]}}'.encode()
    headers = {"Content-Type": "application/json"}
    if kind == "many":
        message = '{"role": "user", "content": "a"}'
        body = f'{{"model": "m", "messages": [{",".join([message] * (SIZE // len(message)))}]}}'.encode()
    elif kind == "never-ending":
        packer = zlib.compressobj(wbits=31)
        body = b"".join([packer.compress(b" " * SIZE) for _ in range(100)]) + packer.flush()
        headers["Content-Encoding"] = "gzip"
    elif kind == "binary":
        body = BINARY
    async with serve_sessions() as endpoint, aiohttp.ClientSession() as client:
        url = endpoint.url_of(endpoint.open(session)) + "/v1/chat/completions"
        async with client.post(url, data=body, headers=headers) as answer:
            return "answered" if answer.status == 200 else f"refused: {answer.status}"


async def mcp(kind: str) -> str:
    """Call a tool of an MCP server that answers so."""
    import mcp  # noqa: F401 - without it every call would fail, whatever the server answers

    from agentenv.core import ToolCall
    from agentenv.tools import Toolbox
    from agentenv_mcp.tools import _tool

    part = SimpleNamespace(type="text", text=values().get(kind, "a"))
    content: Any = [part]
    if kind == "many":
        content = [SimpleNamespace(type="text", text="a")] * (SIZE // 2)
    elif kind == "binary":
        content = [SimpleNamespace(type="text", text=BINARY.decode("latin-1"))]
    elif kind == "wrong type":
        content = [SimpleNamespace(type="text", text=None), SimpleNamespace(type=None)]

    async def call_tool(name: str, arguments: object) -> Any:
        if kind in {"slow", "never-ending"}:
            await asyncio.Event().wait()
        return SimpleNamespace(content=content, structured_content=None, is_error=False)

    offered = SimpleNamespace(name="a", description="", input_schema={"type": "object"})
    connection = SimpleNamespace(ask=lambda call: call(SimpleNamespace(call_tool=call_tool)))
    tool = _tool(connection, offered, "a", 0.2)
    (result,) = await Toolbox([tool]).run([ToolCall(id="1", name="a", arguments={})])
    return result.error_kind or ("shown" if len(str(result.content)) < 2 * SIZE else "too long")


async def containers(kind: str) -> str:
    """Ask a runtime for its containers, which answers so."""
    from agentenv_containers import Runtime

    answers = {
        "huge": f"head -c {SIZE} /dev/zero | tr '\\0' a",
        "deep": f"head -c {SIZE} /dev/zero | tr '\\0' '['",
        "many": f"yes agentenv-0-1-1-a | head -c {SIZE}",
        "slow": "sleep 60",
        "never-ending": "cat /dev/zero",
        "binary": f"head -c {SIZE} /dev/urandom",
        "wrong type": "exit 3",
    }
    with tempfile.TemporaryDirectory() as folder:
        program = written(folder, "podman", f"#!/bin/sh\n{answers[kind]}\n".encode())
        said = await Runtime(str(program)).run("ps", timeout_s=1.0 if kind == "slow" else 30.0)
        return "failed" if said.code else "read"


async def model_output(kind: str) -> str:
    """Read what a model wrote, as tokens and from a chat API."""
    from agentenv.render import Renderer, byte_tokenizer
    from agentenv_providers.openai.reply import whole_reply

    call = '<tool_call>\n{"name": "a", "arguments": %s}\n</tool_call>'
    text = {
        "huge": "a</think>" * (SIZE // 9),
        "many": (call % "{}") * (SIZE // 60),
        "binary": BINARY.decode("latin-1"),
    }.get(kind, call % values().get(kind, "1"))
    tokenizer = byte_tokenizer()
    pieces = (text[start : start + 4096] for start in range(0, len(text), 4096))
    ids = [token_id for piece in pieces for token_id in tokenizer.encode(piece)]
    parsed = Renderer(tokenizer).parse(ids)
    function = {"name": "a", "arguments": values().get(kind, "1")}
    calls = [{"id": "", "type": "function", "function": function}] * (SIZE // 60 if kind == "many" else 1)
    message = {"role": "assistant", "content": text, "tool_calls": calls}
    reply = whole_reply({"message": message, "finish_reason": "stop"}, "api")
    wrong = len(parsed.errors) + reply.malformed
    return "malformed" if wrong else "text"


async def templates(kind: str) -> str:
    """Load a model whose chat template does so."""
    from agentenv.render import ChatTokenizer, Renderer, byte_tokenizer

    template = {
        "huge": "{{ 'a' * 10 ** 9 }}",
        "deep": "{% macro a(n) %}{{ a(n + 1) }}{% endmacro %}{{ a(0) }}",
        "many": "{% for a in range(10 ** 9) %}{{ a }}{% endfor %}",
        "slow": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "never-ending": "{% set n = namespace(l=[1]) %}{% for a in n.l %}{{ n.l.append(1) }}{% endfor %}",
        "binary": BINARY.decode("latin-1"),
        "wrong type": "{{ messages + 1 }}",
    }[kind]
    own = byte_tokenizer()
    chat = ChatTokenizer(own.backend, chat_template=template, special_tokens=own.special_tokens)
    return str(Renderer(chat).report.verdict).replace("_", " ")


async def tokenizers(kind: str) -> str:
    """Load the tokenizer of a model directory."""
    from agentenv.render import ChatTokenizer

    data = BINARY if kind == "binary" else values()[kind].encode()
    with tempfile.TemporaryDirectory() as folder:
        written(folder, "tokenizer.json", data)
        ChatTokenizer.load(folder)
    return "taken"


async def viewer(kind: str) -> str:
    """Show a run whose files somebody else wrote."""
    import aiohttp

    from agentenv.runs.store import RunWriter
    from agentenv.runs.view import LiveServer

    data = BINARY if kind == "binary" else values().get(kind, "").encode()
    data = b"1\n" * (SIZE // 2) if kind == "many" else data + b"\n"
    with tempfile.TemporaryDirectory() as folder:
        with RunWriter.create("a", runs_dir=folder) as writer:
            run = writer.path
        for name in ("trajectories", "index", "metrics", "annotations", "workers", "servers"):
            file = run / f"{name}.jsonl"
            file.unlink(missing_ok=True)
            if kind == "slow":
                os.mkfifo(file)
            elif kind == "never-ending":
                file.symlink_to("/dev/zero")
            else:
                file.write_bytes(data)
        server = LiveServer([run], Path(folder))
        async with server.listening(), aiohttp.ClientSession() as client, client.get(server.url) as answer:
            await answer.read()
            return "shown" if answer.status == 200 else f"refused: {answer.status}"


WHOLE = "comes whole"
CODE = "runs as you"
ENTRANCES: dict[str, tuple[Attack, dict[str, str]]] = {
    "command line": (command_line, dict.fromkeys(("slow", "never-ending"), WHOLE)),
    "files": (files, {"slow": "waited for"}),
    "HTTP": (http, {"slow": "408 after 30 s"}),
    "MCP": (mcp, {}),
    "containers": (containers, {}),
    "model output": (model_output, {"slow": "`turn_timeout_s`", "never-ending": "`max_tokens_per_turn`"}),
    "templates": (templates, {}),
    "viewer": (viewer, {}),
    "tokenizers": (tokenizers, dict.fromkeys(("slow", "never-ending"), "as files")),
    "plug-ins": (command_line, dict.fromkeys(KINDS, CODE)),
}


async def watched(attack: Attack, kind: str) -> tuple[str, float]:
    """Play an attack; return its answer and the longest time that the loop computed at a stretch."""
    gaps = [0.0]

    async def tick() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    try:
        answer = await asyncio.wait_for(attack(kind), 120.0)
    except AgentEnvError:
        answer = "refused"
    await asyncio.sleep(0)
    ticking.cancel()
    return answer, max(gaps)


def play(entrance: str, kind: str, told: Any) -> None:
    """Play one cell in this process, and tell its answer, seconds and megabytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attack = ENTRANCES[entrance][0]
    try:
        with suppress(AgentEnvError):
            asyncio.run(attack("wrong type"))  # what is imported once is no part of an attack
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer, seconds = asyncio.run(watched(attack, kind))
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    except BaseException as error:
        answer, seconds, peak = f"ERROR {error!r:.200}", 0.0, 0.0
    told.send((answer, seconds, peak))
    told.close()
    os._exit(0)


def cell(entrance: str, kind: str) -> tuple[str, float, float]:
    """Return what an attack is answered, for how many seconds it holds the loop up, and its megabytes."""
    if (reason := ENTRANCES[entrance][1].get(kind)) is not None:
        return reason, 0.0, 0.0
    context = multiprocessing.get_context("spawn")
    heard, told = context.Pipe(duplex=False)
    process = context.Process(target=play, args=(entrance, kind, told))
    process.start()
    told.close()
    try:
        return heard.recv()
    except EOFError:
        return "ERROR: the process died", 0.0, 0.0
    finally:
        process.join()


def table(cells: dict[tuple[str, str], tuple[str, float, float]]) -> str:
    """Return the table in Markdown."""
    lines = [f"| | {' | '.join(KINDS)} |", f"| --- |{' --- |' * len(KINDS)}"]
    for entrance in ENTRANCES:
        row = []
        for kind in KINDS:
            answer, seconds, peak = cells[entrance, kind]
            cost = f" ({seconds:.1f} s, {peak:.0f} MB)" if seconds or peak else ""
            row.append(answer.replace("|", "/") + cost)
        lines.append(f"| {entrance} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Play the attacks that are asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="one entrance")
    parser.add_argument("--write", action="store_true", help="replace the table of the page")
    asked = parser.parse_args()
    cells = {}
    for entrance in ENTRANCES:
        for kind in KINDS:
            if asked.only in {"", entrance}:
                cells[entrance, kind] = cell(entrance, kind)
                print(entrance, kind, *cells[entrance, kind], sep=" · ", flush=True)
    if asked.write:
        page = PAGE.read_text().partition("\n| |")[0]
        PAGE.write_text(f"{page}\n{table(cells)}")


if __name__ == "__main__":
    main()
