"""A training on a stream of groups, with a real model, engine and checkpoints."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import chain
from random import Random
from zlib import crc32

import pytest
import torch

from agentenv.core import RunLimits, UsageError
from agentenv.envs import MultiEnv, ToolEnv
from agentenv.training import GRPOTrainer
from agentenv.training.loop import Mixture, last_checkpoint
from scenes import numbered, spec_of, trainer

GROUPS = 2


class Parrot(ToolEnv):
    """Rewards answers so that hardly two are worth the same."""

    alive = 0

    async def start(self, n: int) -> str:
        type(self).alive += 1
        return f"say {n}"

    def reward(self, answer: str) -> float:
        return crc32(answer.encode()) / 2**32

    def close(self) -> None:
        type(self).alive -= 1


SPEC = numbered(Parrot)


@pytest.fixture(autouse=True)
def _anew():
    Parrot.alive = 0


def make(tmp_path, **settings) -> GRPOTrainer:
    return trainer(tmp_path, **{"envs": SPEC, "max_steps": 5, "max_ahead": 2, **settings})


def dealt(count: int) -> list[str]:
    """Return the ids of the first groups of a run, in the order of dealing."""
    mixture, ids, cursors = Mixture(SPEC), [], {}
    for round_index in range(1, count // GROUPS + 1):
        tasks, cursors = mixture.deal(GROUPS, seed=0, round_index=round_index, cursors=cursors)
        ids += [f"test/Parrot-v0:{one.task.id}@{round_index}" for one in tasks]
    return ids


def watch(trainer: GRPOTrainer, trained: dict[int, list[str]]) -> None:
    """Note the groups that each step trains on."""
    step = trainer.step

    def noted(groups, **options):
        trained[trainer.steps_done] = [group.group_id for group in groups]
        return step(groups, **options)

    trainer.step = noted


def test_every_group_is_trained_once_and_at_most_so_many_steps_after_it_began(tmp_path):
    trained: dict[int, list[str]] = {}
    training = make(tmp_path)
    watch(training, trained)

    history = training.train()

    assert Counter(chain(*trained.values())) == Counter(dealt(10))
    assert [one["updates"] for one in history] == [1] * 5
    assert all(one["staleness/max"] <= 2 for one in history)
    assert all(
        one["time/wait"] == pytest.approx(one["time/wait/groups"] + one["time/wait/staleness"])
        for one in history
    )
    assert {"stream/playing", "stream/queued", "stream/finished", "time/ready"} <= history[0].keys()
    assert training.engine.model is not training.model
    assert training.engine.weights_version == 5
    ours = dict(training.model.named_parameters())
    assert all(torch.equal(one, ours[name]) for name, one in training.engine.model.named_parameters())
    assert Parrot.alive == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_broken_off_anywhere_loses_no_group_and_trains_none_twice(tmp_path, seed):
    trained: dict[int, list[str]] = {}
    random = Random(seed)

    def broken_off_after(events: int | None) -> bool:
        training = make(tmp_path, save_steps=1)
        checkpoint = last_checkpoint(tmp_path)
        if checkpoint is not None:
            training.resume(checkpoint)
        watch(training, trained)
        left = [events]

        async def run():
            task = asyncio.create_task(training.run())
            loop = asyncio.get_running_loop()

            def count(work):
                def counted(*args, **options):
                    if left[0] is not None:
                        left[0] -= 1
                        if left[0] == 0:
                            loop.call_soon_threadsafe(task.cancel)
                    return work(*args, **options)

                return counted

            for owner, name in (
                (training, "step"),
                (training, "save_step"),
                (training.rollouts.sync, "bring"),
                (training.engine, "generate"),
            ):
                setattr(owner, name, count(getattr(owner, name)))
            await task

        try:
            asyncio.run(run())
        except asyncio.CancelledError:
            return False
        return True

    for _ in range(4):
        broken_off_after(random.randint(1, 16))
        assert Parrot.alive == 0
    assert broken_off_after(None)

    assert sorted(trained) == list(range(5))
    assert Counter(chain(*trained.values())) == Counter(dealt(10))


def test_a_stream_goes_on_where_batches_were_trained_and_batches_not_where_it_has_dealt_groups(tmp_path):
    trained: dict[int, list[str]] = {}
    batches = make(tmp_path, save_steps=2, max_steps=2, max_ahead=0)
    watch(batches, trained)
    batches.train()
    stream = make(tmp_path, save_steps=1, on_metrics=lambda step, _: step == 4 and 1 / 0)
    stream.resume(tmp_path / "checkpoints" / "step-2")
    watch(stream, trained)
    with pytest.raises(ZeroDivisionError):
        stream.train()
    again = make(tmp_path)
    again.resume(tmp_path / "checkpoints" / "step-3")
    watch(again, trained)
    refused = make(tmp_path, max_ahead=0)
    refused.resume(tmp_path / "checkpoints" / "step-3")

    again.train()

    with pytest.raises(UsageError, match="groups that a stream dealt and did not train"):
        refused.train()
    assert Counter(chain(*trained.values())) == Counter(dealt(10))


class Longest(MultiEnv):
    """Two players say something; the longer text wins."""

    seats = ("a", "b")
    system_prompt = "Say."

    def start(self, task, seed):
        self.said = []

    def turn(self):
        return None if len(self.said) == 2 else self.seats[len(self.said)]

    def observe(self, seat):
        return seat

    def act(self, seat, text):
        self.said.append(text)

    def rewards(self):
        first, second = map(len, self.said)
        return {"a": 1.0 if first > second else -1.0, "b": -1.0 if first > second else 1.0}


def trained(tmp_path, **options):
    played, tasks = [], [{"id": str(n), "seat": "ab"[n % 2]} for n in range(4)]
    training = trainer(
        tmp_path,
        envs=spec_of(Longest, tasks, kwargs={"opponents": "self"}),
        limits=RunLimits(max_turns=2, max_tokens_per_turn=60),
        on_trajectory=played.append,
        learning_rate=0.01,
        stop=tuple(
            map(chr, range(32, 127))
        ),  # the weights are drawn, so a turn ends with any printable character
        **options,
    )
    return training.train(), played


@pytest.mark.parametrize("options", [{}, {"max_ahead": 2}])
def test_every_seat_is_a_group_of_the_batch(tmp_path, options):
    history, played = trained(tmp_path, **options)

    assert len(history) == 3
    groups = {}
    for one in played:
        groups.setdefault(one.group_id, []).append(one)
    seats = [{one.task["seat"] for one in members} for members in groups.values()]
    assert all(len(own) == 1 for own in seats)
    assert sum(own == {"a"} for own in seats) >= 6
    assert sum(own == {"b"} for own in seats) >= 6
    # Two tasks a step, each a group of two for each of two seats.
    assert {metrics["episodes"] for metrics in history} == {8.0}, sorted(history[0])
