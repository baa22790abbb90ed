"""Ten thousand episodes, one in ten broken on purpose: the books balance and nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections import Counter
from pathlib import Path

import pytest

from agentenv.engine.base import Completion
from agentenv.env import Env
from agentenv.errors import ContextTooLong, EngineUnavailable, SandboxCrashed
from agentenv.limits import RunLimits
from agentenv.registry import EnvSpec
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv.seeding import derive_seed
from agentenv.trajectory import StopReason

TOKENIZER = byte_tokenizer()
RENDERER = Renderer(TOKENIZER)
STOP = RENDERER.stop_token_ids[0]
CALL = (*TOKENIZER.encode('<tool_call>{"name": "f", "arguments": {}}</tool_call>'), STOP)
FAULTS = [
    "reset raises",
    "step raises",
    "step exits",
    "step cancels",
    "step hangs",
    "step answers too little",
    "reward raises",
    "reward is nan",
    "close raises",
    "sandbox crashes",
    "engine raises",
    "engine is away",
    "engine aborts",
    "engine lacks logprobs",
    "engine is cut",
    "prompt too long",
    "malformed calls",
]
EXPECTED = {
    "close raises": {StopReason.FINAL_ANSWER},
    "malformed calls": {StopReason.MAX_PARSE_ERRORS},
    "prompt too long": {StopReason.CONTEXT_LENGTH},
    "engine is cut": {StopReason.GENERATION_LENGTH},
    "sandbox crashes": {StopReason.ABORTED},
    **{
        fault: {StopReason.ABORTED}
        for fault in FAULTS
        if fault in {"engine raises", "engine is away", "engine aborts", "engine lacks logprobs"}
    },
}
SCHEMA = {
    "type": "function",
    "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}},
}
closed: Counter[int] = Counter()


class World(Env):
    ends_on_text = True
    live = 0

    @property
    def tool_schemas(self):
        return [SCHEMA]

    async def reset(self, *, seed=None, options=None):
        self.number, self.fault = self.task["number"], self.task["fault"]
        if self.fault == "reset raises":
            raise RuntimeError("reset")
        return f"{self.number}:{self.fault}:", {}

    async def step(self, action):
        await asyncio.sleep(0)
        calls = action.get("tool_calls", [])
        if self.fault == "step raises":
            raise RuntimeError("step")
        if self.fault == "step exits":
            raise SystemExit(1)
        if self.fault == "step cancels":
            raise asyncio.CancelledError
        if self.fault == "step hangs":
            await asyncio.Event().wait()
        if self.fault == "sandbox crashes":
            raise SandboxCrashed("gone")
        if self.fault == "step answers too little" and calls:
            return [{"role": "tool", "tool_call_id": "nobody", "content": ""}], 0.0, False, False, {}
        said = [{"role": "tool", "tool_call_id": call["id"], "content": f"r{self.number}"} for call in calls]
        return said, 0.25, False, False, {}

    async def finish(self, stop_reason):
        if self.fault == "reward raises":
            raise RuntimeError("reward")
        return float("nan") if self.fault == "reward is nan" else 1.0

    async def close(self):
        closed[self.task.get("number", -1)] += 1
        if self.fault == "close raises":
            raise RuntimeError("close")


class Engine:
    name, weights_version, max_context_tokens = "faulty", 0, None

    def __init__(self) -> None:
        self.sessions: Counter[str] = Counter()
        self.released = 0

    async def generate(self, prompt_ids, sampling, *, stop_token_ids, session_id=None, deadline_s=None):
        await asyncio.sleep(0)
        number, fault = TOKENIZER.decode(prompt_ids[:400]).partition("<|im_start|>user\n")[2].split(":")[:2]
        turn = self.sessions[session_id]
        self.sessions[session_id] += 1
        if fault == "engine raises":
            raise RuntimeError("engine")
        if fault == "engine is away":
            raise EngineUnavailable("away")
        if fault == "prompt too long":
            raise ContextTooLong("long")
        draw = random.Random(sampling.seed)
        logprobs = tuple(-draw.random() for _ in range(200))
        ids = CALL if turn < int(number) % 4 else (*TOKENIZER.encode(f"done {draw.randrange(100)}"), STOP)
        if fault == "engine aborts":
            return Completion((), (), "abort")
        if fault == "engine lacks logprobs":
            return Completion(ids, (), "stop")
        if fault == "engine is cut":
            return Completion(ids[:5], logprobs[:5], "length")
        if fault == "malformed calls":
            ids = (*TOKENIZER.encode("<tool_call>[1]</tool_call>"), STOP)
        return Completion(ids, logprobs[: len(ids)], "stop", ((0, 0, len(ids)),))

    async def release(self, session_id):
        self.sessions.pop(session_id, None)
        self.released += 1

    async def close(self):
        pass


def fault_of(number: int) -> str:
    draw = random.Random(derive_seed("fault", number))
    return draw.choice(FAULTS) if draw.random() < 0.1 else ""


async def play(count: int, *, with_faults: bool):
    closed.clear()
    engine = Engine()
    limits = RunLimits(concurrency=1000, env_timeout_s=0.5, max_parse_errors=2, max_turns=8)
    runner = Runner(engine, RENDERER, limits, retries=1, retry_wait_s=0.01, run_seed=11)
    rows = (
        {"id": str(number), "number": number, "fault": fault_of(number) if with_faults else ""}
        for number in range(count)
    )
    spec = EnvSpec.of("test/World-v0", World, tasks=[{}])
    records = {}
    async for group in runner.run_groups(spec, rows):
        (record,) = group
        records[record.task["number"]] = record
    return runner, engine, records


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
def test_ten_thousand_episodes_with_every_fault_end_with_exact_books_and_no_leak():
    count = int(os.environ.get("FAULT_EPISODES", "10000"))
    asyncio.run(play(50, with_faults=True))
    gc.collect()
    files, threads = open_files(), threading.active_count()

    async def both():
        faulty = await play(count, with_faults=True)
        tasks = len(asyncio.all_tasks())
        shut = Counter(closed)
        healthy = await play(count, with_faults=False)
        return faulty, healthy, tasks, shut

    (runner, engine, records), (_, _, healthy), tasks, shut = asyncio.run(both())
    gc.collect()

    assert len(records) == count == runner.ledger.submitted == sum(runner.ledger.outcomes.values())
    assert runner.ledger.balanced
    assert runner.ledger.cancelled == runner.ledger.in_flight == runner.watchdog.abandoned == 0
    assert engine.sessions == {}
    assert tasks == 1
    assert sum(shut.values()) == count + runner.ledger.retried
    broken = 0
    for number, record in records.items():
        fault = fault_of(number)
        if not fault:
            assert record.stop_reason is StopReason.FINAL_ANSWER
            again = healthy[number]
            assert (record.sequences, record.messages, record.reward) == (
                again.sequences,
                again.messages,
                again.reward,
            )
            continue
        broken += 1
        wanted = EXPECTED.get(fault, {StopReason.ERROR})
        assert record.stop_reason in wanted or (number % 4 == 0 and fault == "step answers too little"), fault
        assert record.stop_reason.failed == (record.error is not None)
    assert 0.08 * count < broken < 0.12 * count
    assert open_files() <= files
    assert threading.active_count() <= threads + 1
