"""What is broken off in the middle leaves nothing behind that the next step would stumble over."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from functools import partial

import pytest

from agentenv.core.loops import run_blocking
from agentenv.core.threads import LARGE_CHARS, beside_loop
from agentenv.training.loop.event_loop import beside_the_loop
from agentenv.training.objective.loss import SURROGATES
from helpers import prompts
from helpers.training import episode, group, tiny, trainer_of


class Interrupted(Exception):
    """Stands for whatever ends the work."""


def test_a_step_after_a_broken_warm_up_gets_its_gradients():
    trainer = trainer_of(tiny().bfloat16(), learning_rate=0.05)

    def interrupt(*_):
        raise Interrupted

    with pytest.raises(Interrupted):
        trainer.warmup([episode("d", 0, 1.0, tokens=7)], steps=3, on_metrics=interrupt)

    assert trainer.step([group("a", [0.0, 1.0, 0.3])])["grad_norm"] > 0


@pytest.mark.parametrize("saved", ["never", "before", "meanwhile"])
def test_a_warm_up_after_a_step_or_a_resume_trains_and_is_kept(tmp_path, saved):
    trainer = trainer_of(tiny().bfloat16(), learning_rate=1e-5)
    trainer.step([group("a", [0.0, 1.0, 0.3])])
    if saved == "before":
        path = trainer.save(tmp_path / "half")
        trainer = trainer_of(tiny().bfloat16(), learning_rate=1e-5)
        trainer.resume(path)
    before = [one.clone() for one in trainer.model.parameters()]

    def save(step, metrics):
        if step == 1 and saved == "meanwhile":
            trainer.save(tmp_path / "warm")

    shown = [episode("d", 0, 1.0, tokens=7)]
    history = trainer.warmup(shown, steps=4, learning_rate=0.01, on_metrics=save)
    warm = [one.clone() for one in trainer.model.parameters()]
    trainer.step([group("b", [0.0, 1.0, 0.7])])

    assert all(metrics["grad_norm"] > 0 for metrics in history)
    assert history[-1]["sft/nll"] < history[0]["sft/nll"]
    assert distance(trainer.model.parameters(), warm) < 0.2 * distance(before, warm)  # one rounding is 0.15


def distance(some, others) -> float:
    """Return the largest difference between two lists of parameters."""
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def test_a_step_after_a_broken_one_has_its_own_gradient_only():
    options = {"tokens_per_micro_batch": 1, "packing": "padded", "loss_type": "gpg"}
    broken, whole = trainer_of(**options), trainer_of(**options)
    micro_batches = iter(range(9))

    def second_fails(x):
        if next(micro_batches) == 1:
            raise Interrupted
        return SURROGATES["gpg"](x)

    broken.grpo.loss_fn = second_fails
    with pytest.raises(Interrupted):
        broken.step([group("a", [0.0, 1.0, 0.3])])
    broken.grpo.loss_fn = None

    batch = [group("b", [0.0, 1.0, 0.7])]
    assert broken.step(batch)["grad_norm"] == whole.step(batch)["grad_norm"]


def test_an_interrupt_ends_the_work_of_a_notebook_cell():
    began, cancelled = threading.Event(), threading.Event()

    async def work():
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def interrupt():
        began.wait()
        os.kill(os.getpid(), signal.SIGINT)

    async def cell():
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            run_blocking(work())

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(cell())
    finally:
        loop.close()
        signal.signal(signal.SIGINT, before)

    assert cancelled.wait(60)


def test_a_run_whose_other_processes_were_interrupted_first_is_interrupted_too(tmp_path):
    def others_are_gone(step, metrics):
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("connection closed by peer")

    trainer = prompts.trainer_of(tmp_path, on_metrics=others_are_gone)
    # A shell that starts the tests in the background lets them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("beside", [beside_the_loop, partial(beside_loop, LARGE_CHARS)])
async def test_work_beside_the_loop_is_waited_for_however_often_its_caller_is_cancelled(beside):
    may_end, ended = threading.Event(), []
    task = asyncio.create_task(beside(lambda: ended.append(may_end.wait(60))))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()

    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert ended == [True]
