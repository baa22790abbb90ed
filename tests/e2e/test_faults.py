"""Ten thousand episodes, one in ten broken on purpose: the books balance and nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from agentenv.core import (
    ContextTooLong,
    EngineUnavailable,
    RunLimits,
    SandboxCrashed,
    StopReason,
    Trajectory,
    derive_seed,
)
from agentenv.engine import Completion
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner, RunnerOptions, User
from agentenv.testing import tool_call
from agentenv.tools import Tool, abandoned_threads, close_idle_workers, tool

TOKENIZER = byte_tokenizer()
STOP = Renderer(TOKENIZER).stop_token_ids[0]
ERRORS = {
    "reset raises": "env",
    "step raises": "env",
    "step exits": "env",
    "step cancels": "env",
    "step hangs": "env",
    "step answers too little": "env",
    "reward raises": "reward",
    "reward is nan": "reward",
    "parser raises": "parser",
    "user raises": "user",
    "sandbox crashes": "sandbox",
    "engine raises": "engine",
    "engine is away": "engine",
    "engine aborts": "engine",
    "engine lacks logprobs": "engine",
}
"""Faults that fail their episode, and the boundary that the record must name."""
STOPS = {
    "close raises": StopReason.FINAL_ANSWER,
    "malformed calls": StopReason.MAX_PARSE_ERRORS,
    "prompt too long": StopReason.CONTEXT_LENGTH,
    "engine is cut": StopReason.GENERATION_LENGTH,
    "tool raises": StopReason.FINAL_ANSWER,
    "tool exits": StopReason.FINAL_ANSWER,
    "tool hangs": StopReason.FINAL_ANSWER,
    "tool's process dies": StopReason.FINAL_ANSWER,
}
"""Faults that are a stop, or that the episode survives."""
NEEDS_A_CALL = {"step answers too little", "tool raises", "tool exits", "tool hangs", "tool's process dies"}
COMMON = [fault for fault in (*ERRORS, *STOPS) if fault != "tool's process dies"]
FIRST_TOOL = {"tool hangs": "hang", "tool's process dies": "die"}
closed: Counter[int] = Counter()
release = threading.Event()


def call_ids(name: str) -> tuple[int, ...]:
    return (*TOKENIZER.encode(tool_call(name)), STOP)


def fault_of(number: int) -> str:
    if number % 1000 == 77:
        return "tool's process dies"
    draw = random.Random(derive_seed("fault", number))
    return draw.choice(COMMON) if draw.random() < 0.1 else ""


def calls_of(number: int) -> int:
    return number % 4


class World(ToolEnv):
    """Breaks where its task says."""

    def __init__(self, die: Tool) -> None:
        self.tools = (die,)

    async def start(self, number: int, fault: str) -> str:
        # The user of one task is no reason for the others to go on after a text.
        self.ends_on_text = True
        self.number, self.fault = number, fault
        if fault == "reset raises":
            raise RuntimeError("reset")
        return f"{number}:{fault}:"

    async def step(self, action):
        await asyncio.sleep(0)
        match self.fault:
            case "step raises":
                raise RuntimeError("step")
            case "step exits":
                raise SystemExit(1)
            case "step cancels":
                raise asyncio.CancelledError
            case "step hangs":
                await asyncio.Event().wait()
            case "sandbox crashes":
                raise SandboxCrashed("gone")
            case "step answers too little" if action.get("tool_calls"):
                return [{"role": "tool", "tool_call_id": "nobody", "content": ""}], 0.0, False, False, {}
            case _:
                pass
        self.add_turn_reward(0.25)
        return await super().step(action)

    @tool
    async def f(self) -> str:
        "Do what the task says."
        if self.fault == "tool raises":
            raise RuntimeError("tool")
        if self.fault == "tool exits":
            raise SystemExit(1)
        return f"r{self.number}"

    @tool(timeout_s=0.2)
    def hang(self) -> None:
        "Never return, whoever asks."
        release.wait()

    async def reward(self) -> float:
        if self.fault == "reward raises":
            raise RuntimeError("reward")
        return float("nan") if self.fault == "reward is nan" else 1.0

    async def close(self):
        closed[self.task.get("number", -1)] += 1
        if self.fault == "close raises":
            raise RuntimeError("close")


class Rude(User):
    async def start(self, task, *, seed):
        raise RuntimeError("user")


class Fragile(Renderer):
    def parse(self, token_ids):
        if tuple(token_ids[:4]) == tuple(TOKENIZER.encode("ouch")):
            raise RuntimeError("parser")
        return super().parse(token_ids)


class Engine:
    name, weights_version, max_context_tokens = "faulty", 0, None

    def __init__(self) -> None:
        self.sessions: Counter[str] = Counter()
        self.released = 0

    async def generate(self, prompt_ids, sampling, *, stop_token_ids, session_id=None, deadline_s=None):
        await asyncio.sleep(0)
        number, fault = TOKENIZER.decode(prompt_ids[:800]).partition("<|im_start|>user\n")[2].split(":")[:2]
        turn = self.sessions[session_id]
        self.sessions[session_id] += 1
        draw = random.Random(sampling.seed)
        logprobs = tuple(-draw.random() for _ in range(200))
        ids = (*TOKENIZER.encode(f"done {draw.randrange(100)}"), STOP)
        if turn < calls_of(int(number)):
            ids = call_ids(FIRST_TOOL.get(fault, "f") if turn == 0 else "f")
        match fault:
            case "engine raises":
                raise RuntimeError("engine")
            case "engine is away":
                raise EngineUnavailable("away")
            case "prompt too long":
                raise ContextTooLong("long")
            case "engine aborts":
                return Completion((), (), "abort")
            case "engine lacks logprobs":
                return Completion(ids, (), "stop")
            case "engine is cut":
                return Completion(ids[:5], logprobs[:5], "length")
            case "malformed calls":
                ids = (*TOKENIZER.encode("<tool_call>[1]</tool_call>"), STOP)
            case "parser raises":
                ids = (*TOKENIZER.encode("ouch"), STOP)
            case _:
                pass
        return Completion(ids, logprobs[: len(ids)], "stop", ((0, 0, len(ids)),))

    async def release(self, session_id):
        self.sessions.pop(session_id, None)
        self.released += 1

    async def close(self):
        pass


def die_in(folder: Path) -> Tool:
    """Return a tool that takes its process down; its module is small, because processes import it."""
    file = folder / "dies.py"
    file.write_text("import os\n\n\ndef die() -> str:\n    'Die.'\n    os._exit(3)\n")
    spec = importlib.util.spec_from_file_location("dies", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Tool.from_function(module.die, isolated=True)


async def play(count: int, die: Tool, *, with_faults: bool):
    closed.clear()
    engine = Engine()
    # Long enough for a busy machine: nothing but the steps that hang may reach it.
    limits = RunLimits(env_timeout_s=60, max_parse_errors=2, max_turns=8)
    runner = Runner(
        engine,
        Fragile(TOKENIZER),
        limits,
        options=RunnerOptions(concurrency=1000, retries=1, retry_wait_s=0.01),
        run_seed=11,
    )
    rows = (
        {"id": str(number), "number": number, "fault": fault_of(number) if with_faults else ""}
        for number in range(count)
    )
    spec = EnvSpec.of(
        "test/World-v0",
        lambda: World(die),
        tasks=[{}],
        user=lambda task: Rude() if task["fault"] == "user raises" else None,
    )
    records = {}
    async for group in runner.run_groups(spec, rows):
        (record,) = group
        records[record.task["number"]] = record
    return runner, engine, records


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[str]:
    return set(" ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split())


def check_books(
    count: int, runner: Runner, engine: Engine, records: dict[int, Trajectory], shut: int
) -> None:
    ledger = runner.ledger
    assert len(records) == count == ledger.submitted == sum(ledger.outcomes.values())
    assert ledger.balanced
    assert ledger.cancelled == ledger.in_flight == runner.watchdog.abandoned == 0
    assert engine.sessions == {}
    assert shut == engine.released == count + ledger.retried


def check_broken(number: int, fault: str, record: Trajectory) -> None:
    if fault in NEEDS_A_CALL and not calls_of(number):
        assert record.stop_reason is StopReason.FINAL_ANSWER
    elif fault in STOPS:
        assert (record.stop_reason, record.error) == (STOPS[fault], None), (fault, record.error)
        if fault in NEEDS_A_CALL:
            assert record.turns[0].tool_results[0].is_error, fault
    else:
        boundary = ERRORS[fault]
        failed = StopReason.ABORTED if boundary in {"sandbox", "engine"} else StopReason.ERROR
        assert (record.stop_reason, record.error.boundary) == (failed, boundary), fault
        assert not record.trainable


def check_leaks(files: int, before: set[threading.Thread], processes: set[str], made_to_hang: int) -> None:
    assert len(abandoned_threads()) == made_to_hang
    release.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=30)
    close_idle_workers()
    gc.collect()
    assert set(threading.enumerate()) <= before
    assert abandoned_threads() == []
    assert children() <= processes
    assert open_files() <= files


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_episodes_with_every_fault_end_with_exact_books_and_no_leak(tmp_path, monkeypatch, count):
    monkeypatch.setattr("agentenv.core.threads.IDLE_S", 0.2)
    release.clear()
    die = die_in(tmp_path)
    asyncio.run(play(50, die, with_faults=False))
    gc.collect()
    files, before, processes = open_files(), set(threading.enumerate()), children()

    async def both():
        faulty = await play(count, die, with_faults=True)
        tasks, shut = len(asyncio.all_tasks()), closed.total()
        healthy = await play(count, die, with_faults=False)
        return faulty, healthy, tasks, shut

    (runner, engine, records), (_, _, healthy), tasks, shut = asyncio.run(both())

    check_books(count, runner, engine, records, shut)
    assert tasks == 1
    faults = {number: fault for number in records if (fault := fault_of(number))}
    assert 0.08 * count < len(faults) < 0.12 * count
    assert count < 10_000 or set(faults.values()) == {*ERRORS, *STOPS}
    for number, record in records.items():
        if number in faults:
            check_broken(number, faults[number], record)
            continue
        again = healthy[number]
        assert record.stop_reason is again.stop_reason is StopReason.FINAL_ANSWER
        assert record.sequences == again.sequences
        assert (record.messages, record.reward) == (again.messages, again.reward)
    hung = sum(fault == "tool hangs" and calls_of(n) > 0 for n, fault in faults.items())
    check_leaks(files, before, processes, hung)
