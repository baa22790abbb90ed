"""The loop around the trainer: play, step, sync, evaluate, save, until the steps are done.

Every episode goes through the runner, with the seeds that it would have in an evaluation. Synchronous,
each batch is played by the weights that it will change. With `asynchronous`, the next batch is played
while this one trains, one step ahead and never more: the engine samples from weights of its own, which
follow the trainer's after every step, also in the middle of a completion.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from agentenv.engine.hf.threads import dismiss_team
from agentenv.train.config import refuse_groups_of_one
from agentenv.train.loop.journal import Journal
from agentenv.train.loop.rollouts import Played, Rollouts
from agentenv.train.watch.warn import TaskLedger

if TYPE_CHECKING:
    from agentenv.train.trainer import GRPOTrainer

__all__ = ["run_blocking", "train"]

T = TypeVar("T")


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from synchronous code, also inside a running loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None
        begun.append((asyncio.get_running_loop(), task))
        return await coroutine

    with ThreadPoolExecutor(1) as pool:
        try:
            future = pool.submit(asyncio.run, run())
            # An interrupt that comes just before a wait begins is noticed only when the wait ends.
            while not wait([future], timeout=1).done:
                pass
            return future.result()
        except KeyboardInterrupt:
            # The thread knows of no interrupt, and leaving the block waits for it.
            for loop, task in begun:
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(task.cancel)
            raise


async def train(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """Run the whole loop; see `GRPOTrainer.train`."""
    if trainer.advantage_fn is None:
        refuse_groups_of_one(trainer.config)
    history: list[dict[str, float]] = []
    with Journal(trainer) as journal, _interrupted_together():
        await trainer.rollouts.sync()
        start = await trainer.rollouts.leave_out_long_prompts()
        ledger = TaskLedger()
        async with _Player(trainer.rollouts) as player:
            while trainer.steps_done < trainer.config.max_steps:
                metrics = await _one_step(trainer, player, ledger)
                history.append(start | metrics)
                start = {}
                journal.write(history)
                if trainer.on_metrics is not None:
                    trainer.on_metrics(trainer.steps_done, history[-1])
                if _due(trainer, trainer.config.save_steps):
                    trainer.save_step()
    return history


@contextmanager
def _interrupted_together() -> Generator[None]:
    """Be interrupted, not failed, where a process that was interrupted too has gone away first."""
    try:
        yield
    except RuntimeError as error:
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            raise
        raise asyncio.CancelledError from error


class _Player:
    """Gives each step its batch; at most one is being played ahead of it."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts
        self._ahead: asyncio.Task[Played] | None = None

    def start(self, step: int, cursors: Mapping[str, int]) -> None:
        """Begin to play the batch of a step."""
        self._ahead = asyncio.create_task(self._rollouts.play(step, cursors))

    async def take(self, step: int, cursors: Mapping[str, int]) -> Played:
        """Return the batch of a step: the one being played, else it is played now."""
        if self._ahead is None:
            self.start(step, cursors)
        assert self._ahead is not None
        ahead, self._ahead = self._ahead, None
        return await self._rollouts.refill(step, await ahead)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)


async def _one_step(trainer: GRPOTrainer, player: _Player, ledger: TaskLedger) -> dict[str, float]:
    """Take a batch, train, sync, and evaluate if it is time."""
    started = time.perf_counter()
    step = trainer.steps_done
    played = await player.take(step, trainer.cursors)
    waited = time.perf_counter() - started
    ahead = trainer.config.asynchronous and step + 1 < trainer.config.max_steps
    if ahead:
        player.start(step + 1, played.cursors)

    def update() -> dict[str, float]:
        metrics = trainer.step(played.groups)
        dismiss_team()  # from here the engine's computes
        trainer.cursors = dict(played.cursors)
        return metrics

    metrics = await _beside_the_loop(update) if ahead else update()
    metrics |= ledger.add(trainer.world, played.groups)
    began = time.perf_counter()
    metrics |= await trainer.rollouts.sync()
    done = time.perf_counter()
    metrics |= {
        "time/rollout": played.seconds,
        "time/wait": waited,
        "time/sync": done - began,
        "step_time": done - started,
    }
    if trainer.steps_done == trainer.config.max_steps or _due(trainer, trainer.config.eval_steps):
        metrics |= await trainer.rollouts.evaluate()
    return metrics


async def _beside_the_loop(work: Callable[[], T]) -> T:
    """Run an update in a thread, so that episodes go on meanwhile."""
    threads = torch.get_num_threads()

    def run() -> T:
        torch.set_num_threads(threads)  # OpenMP keeps this number for each thread
        return work()

    return await asyncio.to_thread(run)


def _due(trainer: GRPOTrainer, every: int) -> bool:
    """Return whether something done every so many steps, and at the last, is due; never if 0."""
    done = trainer.steps_done
    return bool(every) and (done % every == 0 or done == trainer.config.max_steps)
