"""Between `ae.train` and the engine stand few functions of the library.

Tasks are counted as if they were calls: with one episode in flight, whatever waits, waits for it. The
frames are those of the thread (the synchronous caller, then the running task) and of all waiting tasks.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import agentenv as ae
from agentenv.engine import TransformersEngine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import byte_tokenizer
from agentenv.train.loop import save_tokenizer

LIBRARY = Path(ae.__file__).parent


def frames_of_ours() -> list[str]:
    """Return the library's functions that wait for this call, as `module.function`, outermost first.

    Frames of comprehensions are left out, and so is the caller's own where it is not in the library.
    """
    stack = list(_frames_below(sys._getframe(1)))
    outer = [frame for frame in stack if not frame.f_code.co_flags & 0x80]  # no coroutine
    inner = [frame for frame in stack if frame.f_code.co_flags & 0x80]
    waiting = sorted(asyncio.all_tasks() - {asyncio.current_task()}, key=_number)
    between = [frame for task in waiting for frame in _suspended(task.get_coro())]
    return [_name(frame) for frame in (*reversed(outer), *between, *reversed(inner)) if _is_ours(frame)]


def _frames_below(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _suspended(awaited: Any) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine or generator, and of what it awaits, outermost first."""
    while awaited is not None:
        if isinstance(awaited, CoroutineType):
            frame, inner = awaited.cr_frame, awaited.cr_await
        elif isinstance(awaited, AsyncGenerator):
            frame, inner = awaited.ag_frame, awaited.ag_await
        else:
            # `anext` of an asynchronous generator: only the garbage collector knows of which.
            inner = next((one for one in gc.get_referents(awaited) if isinstance(one, AsyncGenerator)), None)
            frame = None
        if frame is not None:
            yield frame
        awaited = inner


def _number(task: asyncio.Task[Any]) -> int:
    """Return a task's number: tasks are named in the order in which they are made."""
    digits = task.get_name().rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def _is_ours(frame: FrameType) -> bool:
    path = Path(frame.f_code.co_filename)
    return LIBRARY in path.parents and not frame.f_code.co_name.endswith("comp>")


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}"


class Echo(ToolEnv):
    def start(self, n: int) -> str:
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return len(answer) / 10


@pytest.fixture
def model(tmp_path) -> str:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = byte_tokenizer()
    LlamaForCausalLM(LlamaConfig(vocab_size=tokenizer.vocab_size, **sizes)).save_pretrained(tmp_path / "tiny")
    save_tokenizer(tokenizer, tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_few_frames_stand_between_train_and_the_engine(model, tmp_path, monkeypatch, asynchronous):
    seen: list[list[str]] = []
    generate = TransformersEngine.generate

    async def watched(self, *args, **options):
        seen.append(frames_of_ours())
        return await generate(self, *args, **options)

    monkeypatch.setattr(TransformersEngine, "generate", watched)
    ae.train(
        EnvSpec.of("test/Echo-v0", Echo, tasks={"train": [{"n": 1}], "test": [{"n": 2}]}),
        model,
        steps=1,
        group_size=2,
        runs_dir=tmp_path / "runs",
        train={"groups_per_step": 1, "refill_rounds": 2, "asynchronous": asynchronous},
        limits={"max_turns": 1, "max_tokens_per_turn": 4},
        runner={"concurrency": 1},
    )

    assert len(seen) >= 3  # two episodes to train on, at least, and one to evaluate
    for frames in seen:
        above = frames[: next(place for place, name in enumerate(frames) if ".runner." in name)]
        assert above[0] == "agentenv.train.run.train"
        assert len(above) <= 3, frames
