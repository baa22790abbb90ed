"""Check 16: after a sync the sampler's logprobs are those of the new weights, and not of the old ones."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import replace
from itertools import count, groupby
from types import SimpleNamespace

import pytest
import torch

import agentenv as ae
from agentenv.core import TrainingFailed
from agentenv.core.loops import run_blocking
from agentenv.core.trajectory import EpisodeError, StopReason, TrajectoryGroup
from agentenv.engine import Features, TransformersEngine
from agentenv.envs import ToolEnv
from agentenv.training import GRPOTrainer, LoraOptions
from agentenv.training.learners.torch.world import World
from agentenv.training.loop.held_out import scores_of
from agentenv.training.loop.rollouts import EpisodeBatch
from agentenv.training.loop.sync import WeightSync, push, sync_engine
from agentenv.training.loop.usable import FAILING_TASKS, UsableEpisodes
from helpers.training import episode
from scenes import language_model, numbered, spec_of
from scenes import trainer as made


def make_trainer(*, own_model: bool, **settings) -> GRPOTrainer:
    model = language_model(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    engine = TransformersEngine(copy.deepcopy(model)) if own_model else None
    limits = ae.RunLimits(max_turns=1, max_tokens_per_turn=12)
    options = {"num_generations": 4, "learning_rate": 0.05, "limits": limits, **settings}
    return made(model=model, engine=engine, **options)


def named(name: str, count: int = 5):
    """The environment of the others under a name of its own."""
    return replace(numbered(count=count), id=f"test/{name}-v0")


def play_and_train(trainer: GRPOTrainer) -> dict[str, float]:
    return trainer.step(play(trainer, trainer.steps_done).groups)


def play(trainer: GRPOTrainer, step: int = 0) -> EpisodeBatch:
    async def played() -> EpisodeBatch:
        batch = trainer.rollouts.begin(step, trainer.cursors)
        await batch
        while trainer.rollouts.refill(batch):
            await batch
        return batch

    return run_blocking(played())


@pytest.mark.parametrize("options", [{}, {"lora": LoraOptions(r=8)}])
def test_the_shared_model_needs_no_sync(options):
    trainer = make_trainer(own_model=False, **options)

    metrics = [play_and_train(trainer) for _ in range(3)]

    assert all(one["updates"] == 1 for one in metrics)
    assert max(one["mismatch/abs_max"] for one in metrics) < 1e-4
    assert trainer.engine.weights_version == trainer.weights_version == 3


def test_the_ratio_to_the_sampler_is_one_and_wrong_weights_break_it():
    options = {"old_logprobs": "sampler", "epsilon": 1e-4, "epsilon_high": 1e-4}
    trainer = make_trainer(own_model=True, **options, beta=0.1)
    right = play_and_train(trainer)

    wrong = make_trainer(own_model=True, **options)
    with torch.no_grad():
        wrong.engine.model.model.layers[0].mlp.up_proj.weight.mul_(1.05)
    control = play_and_train(wrong)

    assert trainer.engine.stats()["decoded"] > 0
    assert right["updates"] == control["updates"] == 1
    assert right["mismatch/abs_max"] < 1e-4
    assert abs(right["ratio/mean"] - 1.0) < 1e-4
    assert right["clip_ratio/region_mean"] == 0.0
    assert abs(right["kl"]) < 1e-9
    assert control["mismatch/abs_max"] > 1e-3
    assert control["clip_ratio/region_mean"] > 0.0


def test_without_a_sync_the_mismatch_shows_and_a_sync_ends_it():
    trainer = make_trainer(own_model=True)

    first = play_and_train(trainer)
    stale = play_and_train(trainer)
    sync_engine(trainer.engine, trainer.learner)
    synced = play_and_train(trainer)

    assert first["mismatch/k3"] < 1e-6
    assert stale["mismatch/k3"] > 0.05
    assert synced["mismatch/k3"] < 1e-6
    assert trainer.engine.weights_version == 2


def test_a_checkpoint_takes_the_loop_up_where_it_was(tmp_path):
    def make(name: str, **options) -> GRPOTrainer:
        settings = {"old_logprobs": "recompute", "output_dir": str(tmp_path / name), **options}
        return make_trainer(own_model=False, **settings)

    whole = make("a", max_steps=4)
    whole.train()
    make("b", max_steps=2, save_steps=2).train()
    again = make("b", max_steps=4)
    again.resume(tmp_path / "b" / "checkpoints" / "step-2")
    history = again.train()

    assert len(history) == 2
    assert again.cursors == whole.cursors
    assert again.weights_version == whole.weights_version
    assert all(map(torch.equal, again.model.parameters(), whole.model.parameters()))
    assert len((tmp_path / "b" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_mixture_deals_tasks_by_its_weights():
    trainer = make_trainer(
        own_model=False,
        groups_per_step=40,
        num_generations=1,
        envs=[(named("Often", 1), 9.0), (named("Seldom", 1), 1.0)],
        limits=ae.RunLimits(max_turns=1, max_tokens_per_turn=1),
    )

    cursors = play(trainer).cursors

    assert sum(cursors.values()) == 40
    assert cursors["test/Often-v0"] >= 30  # 36 are expected; 20 if the weights were equal


@pytest.mark.parametrize(("every", "steps"), [(0, [5]), (2, [2, 4, 5])])
def test_held_out_tasks_are_played_every_so_many_steps_and_at_the_end(tmp_path, every, steps):
    steps_of = {"max_steps": 5, "eval_steps": every, "output_dir": str(tmp_path)}
    small = {"groups_per_step": 1, "num_generations": 2, "eval_tasks": [{"n": 7}]}
    trainer = make_trainer(own_model=False, **steps_of, **small)

    history = trainer.train()

    assert [step for step, metrics in enumerate(history, 1) if "eval/success" in metrics] == steps


def test_held_out_tasks_can_be_sampled_several_times(tmp_path):
    kept = []
    trainer = make_trainer(
        own_model=False,
        output_dir=str(tmp_path),
        eval_tasks=[{"n": n} for n in (7, 8, 9)],
        eval_temperature=0.8,
        num_generations_eval=4,
        on_held_out=kept.append,
    )

    scores = trainer.evaluate()

    by_task = {n: [one.reward >= 1 for one in kept if one.task == {"n": n}] for n in (7, 8, 9)}
    passed = [sum(episodes) / 4 for episodes in by_task.values()]
    assert [len(episodes) for episodes in by_task.values()] == [4, 4, 4]
    assert {turn.sampling["temperature"] for one in kept for turn in one.turns} == {0.8}
    assert len({tuple(one.sequences[0].token_ids) for one in kept if one.task == {"n": 7}}) > 1
    assert scores["eval/avg@4"] == scores["eval/success"] == pytest.approx(sum(passed) / 3)
    assert scores["eval/pass@4"] == pytest.approx(sum(any(episodes) for episodes in by_task.values()) / 3)
    assert scores["eval/tasks"] == 3


def test_scores_leave_tasks_without_all_rewards_out_of_pass_at_k():
    rewards = [[1.0, 0.0], [0.0, 0.0], [None, 1.0], [None, None]]

    scores = scores_of(rewards, 2)

    assert (scores["avg@2"], scores["pass@2"], scores["unscored"], scores["tasks"]) == (0.4, 0.5, 3, 4)
    assert "pass@1" not in scores_of([[1.0], [0.0]], 1)


def test_the_tasks_of_a_mixture_are_dealt_evenly_over_the_processes():
    def dealt(rank: int, size: int) -> tuple[list[tuple[str, str]], Mapping[str, int]]:
        envs = [named(name) for name in ("One", "Two", "Three")]
        trainer = make_trainer(own_model=False, groups_per_step=6, envs=envs)
        trainer.world.rank, trainer.world.size = rank, size  # playing needs nothing of the others
        played = play(trainer)
        return [(group.trajectories[0].env_id, group.group_id) for group in played.groups], played.cursors

    whole, cursors = dealt(0, 1)
    first, second = dealt(0, 2), dealt(1, 2)

    assert sum(number % 2 for number in cursors.values()) > 1
    assert len(first[0]) == len(second[0]) == 3
    assert sorted(first[0] + second[0]) == sorted(whole)
    assert first[1] == second[1] == cursors


class Dull(ToolEnv):
    """Two tasks of six tell their episodes apart."""

    turn = count()

    def start(self, n: int) -> str:
        self.n = n
        return f"say {n}"

    def reward(self) -> float:
        return float(next(self.turn) % 2) if self.n in (2, 5) else 0.0


def test_refills_play_further_tasks_until_enough_groups_have_a_gradient():
    trainer = make_trainer(own_model=False, refill_rounds=5, envs=numbered(Dull))

    played = play(trainer)

    groups = played.groups
    assert trainer.grpo.count_mixed(groups) == 2
    assert len({group.trajectories[0].task_id for group in groups}) == len(groups) <= 6
    assert played.cursors == {"test/Dull-v0": len(groups)}
    assert trainer.cursors == {}  # until they are trained on


def test_refills_end_where_nothing_has_a_gradient():
    dull = spec_of(Dull, [{"n": n} for n in (0, 1, 3, 4)])
    trainer = make_trainer(own_model=False, refill_rounds=2, envs=dull)

    groups = play(trainer).groups

    assert len(groups) == 6
    assert trainer.step(groups)["updates"] == 0


async def test_any_failure_of_a_push_is_told_to_the_other_processes(monkeypatch):
    async def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr("agentenv.training.loop.sync.push_weights", full)
    told = []
    learner = SimpleNamespace(
        world=SimpleNamespace(sharded=False, rank=0, settle=told.append),
        config=SimpleNamespace(output_dir="."),
        model=None,
        weights_version=1,
    )

    await push(learner, None, None)

    (failure,) = told
    assert str(failure) == "the weights could not be pushed: OSError: no space left on device"


@pytest.mark.parametrize(("servers", "requests"), [(1, 3), (8, 8)])
def test_the_check_of_the_weights_asks_as_often_as_there_are_servers(servers, requests):
    learner = SimpleNamespace(policy=SimpleNamespace(max_length=None))
    engine = SimpleNamespace(features=Features(servers=lambda: [{}] * servers), max_context_tokens=None)
    sync = WeightSync(learner, engine, SimpleNamespace(start=lambda messages: [1, 2, 3]))

    assert len(sync._check_prompts(engine)) == requests


class Rested(TransformersEngine):
    """Notes when it rests and wakes, and with which weights of the trainer."""

    def note(self, what):
        self.noted.append((what, self.trainer.grpo.updates_done))

    @property
    def features(self):
        return replace(super().features, rest=self.rest, wake=self.wake)

    async def rest(self):
        self.note("rests")

    async def wake(self, renewed):
        self.note("wakes")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_engine_rests_while_the_weights_are_updated_unless_it_plays_meanwhile(asynchronous):
    trainer = make_trainer(own_model=True, max_ahead=int(asynchronous), max_steps=2)
    trainer.engine = engine = Rested(trainer.engine.model)
    engine.noted, engine.trainer = [], trainer

    trainer.train()

    rests = [] if asynchronous else [("rests", 0), ("rests", 1)]
    events = [event for event, _ in groupby(engine.noted)]
    assert [event for event in events if event[0] == "rests"] == rests
    assert [event for event in events if event[0] == "wakes"] == [("wakes", 0), ("wakes", 1), ("wakes", 2)]


# A run that cannot train ends as soon as that is more than chance -------------------------


def batch(*tasks: str, boundary: str | None = "reward") -> list[TrajectoryGroup]:
    """Return a batch whose tasks all failed; without a boundary, they worked."""
    fields: dict = {}
    if boundary is not None:
        error = EpisodeError(boundary, "Gone", "it is gone", "", retryable=False)
        fields = {"stop": StopReason.ABORTED, "error": error, "untrainable_reason": "failed"}
    return [TrajectoryGroup((episode(task, 0, None if fields else 1.0, **fields),)) for task in tasks]


def checked(*batches: list[TrajectoryGroup]) -> int:
    """Return how many batches were played."""

    async def check() -> int:
        usable = UsableEpisodes(World(torch.device("cpu")))
        for step, groups in enumerate(batches, 1):
            try:
                await usable.check(step, groups)
            except TrainingFailed:
                return step
        return len(batches)

    return asyncio.run(check())


@pytest.mark.parametrize(
    ("batches", "played"),
    [
        ([batch("0", "1", boundary="engine")] * 3, 1),
        ([[], [], batch("0", boundary="engine"), []], 3),
        ([batch(*map(str, range(FAILING_TASKS)))] * 2, 1),
        ([batch("0", "1"), batch("2", "3"), batch("4", "5"), []], 3),
        ([batch("0", "1"), batch("1", "0"), []], 2),
        ([batch("0", "1"), batch("2", "3", boundary=None), [], []], 4),
    ],
)
def test_a_run_that_never_worked_ends_when_that_is_no_chance(batches, played):
    assert checked(*batches) == played
