"""One step ahead: the next batch is played while this one trains, and never the one after it."""

from __future__ import annotations

import asyncio
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

import agentenv as ae
from agentenv.core import EngineError, UsageError
from agentenv.engine import TransformersEngine
from agentenv.training import GRPOTrainer, LoraOptions
from agentenv.training import trainer as trainer_module
from agentenv.training.loop.sync import CHECK_TOKENS, WeightSync
from scenes import Lengths, language_model, numbered
from scenes import trainer as made

GROUPS, MEMBERS = 2, 4
PATIENCE_S = 120


class Parrot(Lengths):
    """Notes its tasks, and that it was closed."""

    begun: ClassVar[list[int]] = []
    closed: ClassVar[list[int]] = []

    def start(self, n: int) -> str:
        self.begun.append(n)
        return super().start(n)

    def close(self) -> None:
        self.closed.append(1)


def tiny():
    return language_model(vocab_size=300, hidden_size=32, intermediate_size=48)


class Timeline:
    """In which order batches were played and steps made; lets both wait for each other."""

    def __init__(self, steps: int) -> None:
        self.played: list[list[tuple[int, int]]] = [[] for _ in range(steps)]
        self.trained: list[tuple[int, int]] = []
        self.answered = [threading.Event() for _ in range(steps)]
        self.stepping = [threading.Event() for _ in range(steps)]
        self.count = 0
        self.moments = count()

    def span(self, batch: int) -> tuple[int, int]:
        return min(start for start, _ in self.played[batch]), max(end for _, end in self.played[batch])


class HeldEngine(TransformersEngine):
    """Gives the answers of a batch, from the second on, only when the step before it lets it go."""

    timeline: Timeline
    waits = True

    async def wait(self, step: int) -> None:
        """Wait until a step, from 0, was told."""
        with ThreadPoolExecutor(1) as own:  # the loop's own threads are for others
            stepping = self.timeline.stepping[step]
            assert await asyncio.get_running_loop().run_in_executor(own, stepping.wait, PATIENCE_S)

    async def generate(self, prompt_ids, sampling, **options):
        if not sampling.temperature or sampling.max_tokens == CHECK_TOKENS:
            return await super().generate(prompt_ids, sampling, **options)
        began = next(self.timeline.moments)
        batch = self.timeline.count // (GROUPS * MEMBERS)
        self.timeline.count += 1
        if self.waits and batch:
            await self.wait(batch - 1)
        done = await super().generate(prompt_ids, sampling, **options)
        self.timeline.played[batch].append((began, next(self.timeline.moments)))
        self.timeline.answered[batch].set()
        return done


class SlowTrainer(GRPOTrainer):
    """Changes the weights only when the batch after it is being played."""

    timeline: Timeline
    waits = True

    def step(self, groups, **options):
        began = next(self.timeline.moments)
        number = self.steps_done
        self.timeline.stepping[number].set()
        if self.waits and number + 1 < self.config.max_steps:
            assert self.timeline.answered[number + 1].wait(PATIENCE_S), "nothing was played during the step"
        metrics = super().step(groups, **options)
        self.timeline.trained.append((began, next(self.timeline.moments)))
        return metrics


def make(tmp_path, kind=GRPOTrainer, *, model=None, **settings) -> GRPOTrainer:
    Parrot.begun, Parrot.closed = [], []
    options = {"num_generations": MEMBERS, "max_ahead": 1, "envs": numbered(Parrot), **settings}
    limits = ae.RunLimits(max_turns=1, max_tokens_per_turn=6)
    return made(tmp_path, kind=kind, model=model or tiny(), limits=limits, **options)


def timed(tmp_path, *, asynchronous: bool, steps: int = 4) -> tuple[Timeline, list[dict[str, float]]]:
    timeline = Timeline(steps)
    engine = HeldEngine(tiny())
    trainer = make(tmp_path, SlowTrainer, engine=engine, max_steps=steps, max_ahead=int(asynchronous))
    engine.timeline = trainer.timeline = timeline
    engine.waits = trainer.waits = asynchronous
    return timeline, trainer.train()


def test_a_batch_is_played_while_the_one_before_it_trains_only_with_the_option(tmp_path):
    timeline, history = timed(tmp_path / "ahead", asynchronous=True)
    in_turn, without = timed(tmp_path / "in turn", asynchronous=False)

    for step in range(3):
        began, ended = timeline.span(step + 1)
        assert began < timeline.trained[step][1], "the next batch begins before the step ends"
        assert ended > timeline.trained[step][0], "and goes on while the step runs"
        assert in_turn.span(step + 1)[0] > in_turn.trained[step][1]
    for step in range(2):
        assert timeline.span(step + 2)[0] > timeline.trained[step][1], "never two batches ahead"
    assert [one["staleness/max"] for one in history] == [0, 1, 1, 1]
    assert [one["staleness/max"] for one in without] == [0, 0, 0, 0]
    assert all(one["updates"] == 1 for one in history)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_thread_that_trained_lets_its_openmp_team_go(tmp_path, monkeypatch, asynchronous):
    engine = TransformersEngine(copy.deepcopy(tiny())) if asynchronous else None
    trainer = make(tmp_path, engine=engine, max_ahead=int(asynchronous), max_steps=2)
    done: list[tuple[str, int]] = []
    step = trainer.step

    def stepped(groups):
        done.append(("step", threading.get_ident()))
        return step(groups)

    trainer.step = stepped
    monkeypatch.setattr(
        trainer_module, "dismiss_team", lambda: done.append(("dismissed", threading.get_ident()))
    )
    trainer.train()

    assert [what for what, _ in done] == ["step", "dismissed"] * 2
    assert [thread for _, thread in done[::2]] == [thread for _, thread in done[1::2]]


def held(tmp_path, kind=HeldEngine, *, steps: int = 3, **options) -> tuple[GRPOTrainer, Timeline]:
    """Return a trainer whose batch ahead is played when the step before it has been told."""
    engine, timeline = kind(tiny()), Timeline(steps)
    engine.timeline = timeline
    options = {"on_metrics": lambda step, _: timeline.stepping[step - 1].set(), **options}
    return make(tmp_path, engine=engine, max_steps=steps, **options), timeline


def test_a_checkpoint_is_written_while_episodes_are_played(tmp_path):
    trainer, timeline = held(tmp_path, save_steps=1, on_metrics=None)
    save, saved = trainer.save_step, []

    def save_and_let_go():
        step = trainer.steps_done
        timeline.stepping[step - 1].set()
        if step < 3:  # would wait for ever if the loop stood still
            assert timeline.answered[step].wait(PATIENCE_S), "no episode was answered during the checkpoint"
        saved.append(step)
        return save()

    trainer.save_step = save_and_let_go
    trainer.train()

    assert saved == [1, 2, 3]
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 3


def test_no_process_waits_for_others_on_the_loop_while_episodes_are_played(tmp_path):
    trainer, _ = held(tmp_path, eval_steps=1, eval_tasks=[{"n": 7}])
    gather, loops, beside = trainer.world.gather, set(), []

    def watched(values):
        playing = len(Parrot.begun) > len(Parrot.closed)
        on_loop = threading.get_ident() in loops
        assert not (playing and on_loop), "a gather stops the loop"
        beside.append(playing)
        return gather(values)

    begin = trainer.rollouts.begin

    def begins(*args):
        loops.add(threading.get_ident())
        return begin(*args)

    trainer.rollouts.begin, trainer.world.gather = begins, watched

    history = trainer.train()

    assert any(beside)
    assert all(step["eval/tasks"] == 1 for step in history)


class ReadingEngine(HeldEngine):
    """Takes its weights from a directory and is checked; the check is answered when a step was told."""

    async def load_weights(self, path, *, version=None):
        self.model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
        self.weights_updated(version)
        return version

    async def load_adapter(self, name, path, *, version=None):
        raise NotImplementedError

    async def generate(self, prompt_ids, sampling, **options):
        version = self.weights_version
        if sampling.max_tokens == CHECK_TOKENS and 0 < version < 3:
            await self.wait(version - 1)
        return await super().generate(prompt_ids, sampling, **options)


def test_the_check_of_new_weights_may_queue_behind_episodes(tmp_path):
    trainer, _ = held(tmp_path, ReadingEngine)

    history = trainer.train()

    # Of each update the check is in the metrics of the step that first needs it.
    assert all(step["sync/k3"] < 1e-6 for step in history)
    assert trainer.engine.weights_version == 3


def test_wrong_weights_end_the_run_before_the_next_update(tmp_path):
    class Deaf(ReadingEngine):
        async def load_weights(self, path, *, version=None):
            self.weights_updated(version)
            for told in self.timeline.stepping:  # a run that ends here never tells its first step
                told.set()
            return version

    trainer, _ = held(tmp_path, Deaf, learning_rate=0.5)

    with pytest.raises(EngineError, match="engine and trainer disagree"):
        trainer.train()

    assert trainer.weights_version == trainer.steps_done == 1
    assert len(Parrot.closed) == len(Parrot.begun)


@pytest.mark.parametrize("lora", [None, LoraOptions(r=4)])
def test_the_engine_samples_from_a_copy_that_follows_the_trainer(tmp_path, lora):
    trainer = make(tmp_path, lora=lora)

    history = trainer.train()

    assert trainer.engine.model is not trainer.model
    assert trainer.engine.weights_version == trainer.weights_version == 3
    ours = dict(trainer.model.named_parameters())
    assert all(torch.equal(one, ours[name]) for name, one in trainer.engine.model.named_parameters())
    assert history[0]["mismatch/k3"] < 1e-6
    assert history[-1]["updates"] == 1


@pytest.mark.parametrize(
    ("shared", "ahead", "told"),
    [
        (True, 1, "samples from the very model in training"),
        (True, 2, "samples from the very model in training"),
        (False, 1, "holds another model than the trainer"),
    ],
)
def test_an_engine_that_shares_the_model_or_holds_another_is_refused(tmp_path, shared, ahead, told):
    model = tiny()
    engine = TransformersEngine(model if shared else tiny())
    lora = None if shared else LoraOptions(r=4)

    with pytest.raises(UsageError, match=told):
        make(tmp_path, model=model, engine=engine, lora=lora, max_ahead=ahead).train()


def test_a_step_that_fails_closes_what_is_played_ahead_and_counts_none_of_it(tmp_path):
    trainer = make(tmp_path, max_steps=4)
    step = trainer.step

    def fail_at_the_third(groups, **options):
        if trainer.steps_done == 2:
            raise ZeroDivisionError
        return step(groups, **options)

    trainer.step = fail_at_the_third

    with pytest.raises(ZeroDivisionError):
        trainer.train()

    assert len(Parrot.closed) == len(Parrot.begun) >= 3 * GROUPS * MEMBERS
    dealt = trainer.cursors["test/Parrot-v0"]
    assert dealt - len(trainer.position.untrained) == 2 * GROUPS


def test_a_resumed_run_deals_again_what_was_only_played_ahead(tmp_path):
    first = make(tmp_path, max_steps=4, save_steps=1, on_metrics=lambda step, metrics: step == 2 and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.train()
    seen = set(Parrot.begun)
    again = make(tmp_path, max_steps=3)
    again.resume(tmp_path / "checkpoints" / "step-1")

    again.train()

    assert again.cursors == {"test/Parrot-v0": 3 * GROUPS}
    assert seen <= set(range(6))
    assert len(set(Parrot.begun)) == 2 * GROUPS  # the round goes on: no task of step 1 is met again


def test_an_update_in_mid_completion_gives_one_completion_two_versions(tmp_path):
    model = tiny()
    engine = TransformersEngine(copy.deepcopy(model))
    trainer = make(tmp_path, engine=engine)
    trainer.learner.weights_version = 1

    async def play() -> tuple[tuple[int, int, int], ...]:
        task = asyncio.create_task(
            engine.generate([1, 2], ae.Sampling(max_tokens=400, seed=0), stop_token_ids=())
        )
        while not engine.stats()["decodes"]:  # noqa: ASYNC110 - the worker is a thread
            await asyncio.sleep(0)
        await WeightSync(trainer.learner, engine, trainer.renderer).follow()
        return (await task).version_ranges

    ranges = asyncio.run(play())

    assert [version for version, _, _ in ranges] == [0, 1]
    assert ranges[0][2] == ranges[1][1]
    assert ranges[1][2] == 400
