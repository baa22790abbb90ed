"""A stream of groups: what may begin, what a step takes, and that nothing is lost or trained twice."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random
from types import SimpleNamespace

import pytest

from agentenv.core import TrajectoryGroup, UsageError
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.runner.groups import NoJobYet
from agentenv.training import GRPOConfig
from agentenv.training.loop import Mixture
from agentenv.training.loop.mixture import TaskPosition
from agentenv.training.loop.rollouts import PlayOptions
from agentenv.training.loop.stream import GroupStream
from helpers.training import episode


class Still(ToolEnv):
    def start(self, n: int) -> str:
        return f"{n}"

    def reward(self) -> float:
        return 0.0


def mixture_of(entries: int = 1) -> Mixture:
    specs = [
        EnvSpec.of(f"test/Still{index}-v0", Still, tasks=[{"n": 10 * index + n} for n in range(7)])
        for index in range(entries)
    ]
    return Mixture(specs)


class Player:
    """Plays jobs in turns of the event loop; a tenth of them takes twenty times as long as the others."""

    def __init__(self, random: Random, room: int) -> None:
        self.random, self.room = random, room
        self.at_once = SimpleNamespace(number=room)

    async def run_groups(self, spec, feed, size, *, on_trajectory=None):
        running: list[list] = []
        while True:
            while len(running) < self.room:
                try:
                    job = next(feed)
                except NoJobYet:
                    break
                running.append([job, self.random.choice([1] * 9 + [20]) * self.random.randint(1, 4)])
            for one in list(running):
                one[1] -= 1
                if one[1] <= 0:
                    running.remove(one)
                    yield TrajectoryGroup((replace(episode("t", 0, 1.0), group_id=one[0].group_id),))
            await asyncio.sleep(0)


@dataclass
class Run:
    """A training without a model, of one or several processes that take each step together."""

    config: GRPOConfig
    random: Random
    mixture: Mixture
    ranks: int = 1
    room: int = 1000
    mixed: int = 1000
    """Number of groups with a gradient that a batch has at most before its refill."""
    steps_done: int = 0
    position: TaskPosition = field(default_factory=TaskPosition)
    born: dict[str, int] = field(default_factory=dict)
    trained: list[list[str]] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    metrics: list[dict] = field(default_factory=list)

    def stream(self, rank: int) -> GroupStream:
        grpo = SimpleNamespace(
            steps_done=self.steps_done,
            count_mixed=lambda groups: self.mixed if self.mixed < len(groups) <= 2 else len(groups),
        )
        rollouts = SimpleNamespace(
            config=self.config,
            grpo=grpo,
            learner=SimpleNamespace(world=SimpleNamespace(rank=rank, size=self.ranks)),
            mixture=self.mixture,
            runner=Player(self.random, self.room),
            options=PlayOptions(),
            stop_at_the_end=lambda stream: None,
        )
        return GroupStream(rollouts, self.position)

    async def play(self, steps: int) -> None:
        """Play until so many steps are done, then end as a killed process does."""
        streams = [self.stream(rank) for rank in range(self.ranks)]
        begun = [self.watch(stream) for stream in streams]
        try:
            while self.steps_done < steps:
                batches = [stream.begin(self.steps_done) for stream in streams]
                for batch in batches:
                    await batch
                for _ in range(self.random.randint(0, 30)):
                    await asyncio.sleep(0)  # the batch trains
                self.metrics.append(batches[0].metrics)
                self.take([group.group_id for batch in batches for group in batch.groups])
                self.steps_done += 1
                taken = [group.number for batch in batches for group in batch._taken]
                places = [batch.trained(gathered(taken)) for batch in batches]
                for stream in streams:
                    stream._grpo.steps_done = self.steps_done
                if self.random.random() < 0.5:
                    places = [stream.stepped() for stream in streams]
                else:
                    [stream.stepped() for stream in streams]  # the process was killed before the checkpoint
                assert len({json.dumps(place.record()) for place in places}) == 1
                self.position = TaskPosition.restore(json.loads(json.dumps(places[0].record())))
                self.most.append(sum(map(len, begun)))
        finally:
            for stream in streams:
                await stream.stop()

    def watch(self, stream: GroupStream) -> set[str]:
        begun: set[str] = set()
        start = stream._begun

        def note(job):
            start(job)
            begun.add(job.group_id)
            self.born[job.group_id] = stream._steps

        for feed in stream._feeds:
            feed._on_start = note
        return begun

    def take(self, group_ids: list[str]) -> None:
        self.trained.append(group_ids)

    def expected(self, count: int) -> list[str]:
        """Return the ids of the first groups that are dealt, in blocks of one step each."""
        ids, cursors, rounds = [], {}, 0
        while len(ids) < count:
            rounds += 1
            dealt, cursors = self.mixture.deal(
                self.config.sampling.groups_per_step,
                seed=self.config.seed,
                round_index=rounds,
                cursors=cursors,
            )
            for one in dealt:
                again = f"~{one.repeat}" if one.repeat else ""
                ids.append(f"{self.mixture.specs[one.owner].id}:{one.task.id}@{rounds}{again}")
        return ids


def gathered(*values):
    """Return a stand-in for a gather, which returns these values one after the other."""
    left = [list(value) for value in values]

    def gather(own):
        assert set(own) <= set(left[0])
        return left.pop(0)

    return gather


def run_of(seed: int, *, ahead: int, groups: int = 4, steps: int = 8, entries: int = 1, **options) -> Run:
    settings = {name: options.pop(name) for name in ("refill_rounds", "max_steps") if name in options}
    config = GRPOConfig(**{"groups_per_step": groups, "max_ahead": ahead, "max_steps": steps, **settings})
    return Run(config, Random(seed), mixture_of(entries), **options)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("ahead", "groups", "ranks", "room"), [
    (1, 4, 1, 1000), (2, 3, 1, 1000), (4, 2, 1, 1000), (3, 4, 1, 5), (2, 5, 2, 1000), (2, 1, 3, 1000),
])  # fmt: skip
async def test_no_group_is_trained_later_than_allowed_and_none_is_left_out(seed, ahead, groups, ranks, room):
    run = run_of(seed, ahead=ahead, groups=groups, ranks=ranks, room=room, entries=2)

    await run.play(8)

    trained = list(chain(*run.trained))
    ages = [step - run.born[one] for step, ids in enumerate(run.trained) for one in ids]
    assert max(ages) <= ahead
    assert sorted(trained) == sorted(run.expected(8 * groups))
    assert all(len(ids) == groups for ids in run.trained)
    assert all(begun <= (step + 2 + ahead) * groups for step, begun in enumerate(run.most))
    assert not run.position.untrained


async def test_long_groups_are_overtaken_and_trained_by_their_last_step():
    run = run_of(1, ahead=3, groups=4, steps=12)

    await run.play(12)

    order = run.expected(48)
    overtaken = [step * 4 > order.index(one) // 4 * 4 for step, ids in enumerate(run.trained) for one in ids]
    assert any(overtaken), "a batch is no barrier"
    assert sum(one["time/wait/staleness"] > 0 for one in run.metrics) >= 1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(6))
async def test_a_run_that_is_killed_anywhere_trains_each_group_once(seed, ranks):
    run = run_of(seed, ahead=3, groups=3, steps=12, ranks=ranks, entries=2)
    kills = sorted(Random(seed).sample(range(1, 12), 4))

    for stop in [*kills, 12]:
        before = {dealt.group_id for dealt in run.position.untrained}
        first_new = len(run.trained)
        await run.play(stop)
        left = {dealt.group_id for dealt in run.position.untrained}
        assert before <= left | set(chain(*run.trained[first_new:])), "a group is lost"

    counts = Counter(chain(*run.trained))
    assert set(counts.values()) == {1}
    assert sorted(counts) == sorted(run.expected(36))


@pytest.mark.parametrize("seed", range(4))
async def test_fewer_groups_ahead_after_a_resume_hold_the_others_back(seed):
    run = run_of(seed, ahead=4, groups=2, steps=9)
    await run.play(3)
    run.config = replace(run.config, max_ahead=1)

    await run.play(9)

    late = [run.born[one] for step, ids in enumerate(run.trained) for one in ids if step >= 3]
    ages = [step - run.born[one] for step, ids in enumerate(run.trained) for one in ids if step >= 3]
    assert min(late) >= 3, "what was dealt before is played again"
    assert max(ages) <= 1
    assert sorted(chain(*run.trained)) == sorted(run.expected(18))


async def test_a_refill_takes_further_groups_and_deals_as_many_again():
    run = run_of(0, ahead=2, groups=2, steps=6, refill_rounds=2, mixed=1)

    await run.play(6)

    # Of two groups one has a gradient, so a third is taken; of three all have one.
    assert [len(ids) for ids in run.trained] == [3] * 6
    assert set(Counter(chain(*run.trained)).values()) == {1}
    assert max(step - run.born[one] for step, ids in enumerate(run.trained) for one in ids) <= 2


async def test_a_checkpoint_of_other_tasks_is_refused():
    run = run_of(0, ahead=1, groups=2)
    await run.play(2)
    run.mixture = Mixture(EnvSpec.of("test/Still0-v0", Still, tasks=[{"n": 100 + n} for n in range(7)]))

    with pytest.raises(UsageError, match=r"the group test/Still0-v0:.* but its task is now"):
        run.stream(0)

    run.mixture = Mixture(EnvSpec.of("test/Other-v0", Still, tasks=[{"n": 1}]))
    with pytest.raises(UsageError, match="groups of test/Still0-v0 to train on, which is not among"):
        run.stream(0)
