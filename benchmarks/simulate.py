"""Tell what more servers, workers, concurrency or staleness would bring for your environment.

A model of discrete events plays the episodes of a recorded training again: the times of their generations,
tools, environments and users, and the trainer's times, come from the run. Everything else is the schedule
that is asked about. The first row is the schedule of the run itself, beside what the run measured: trust the
other rows as far as that one agrees.

    python benchmarks/simulate.py [RUN] [--servers 1] [--half-load 96] [--cpu-share 0.5] [--json out.json]

What it leaves out: a server decodes each of n requests at 1 / (1 + n / half_load) of its full speed, whatever
their lengths; prefills cost nothing; and playing takes no processor time from the trainer. `--cpu-share` says
which part of the time in tools and environments computes in Python, which each worker does one call at a
time.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from agentenv.core import Trajectory
from agentenv.runs import find_run

OUTSIDE = ("env_s", "tools_s", "user_s", "render_s")
FULL_LOAD = 96.0


@dataclass(frozen=True, slots=True)
class Played:
    """One recorded episode: seconds before the first turn, the turns, and seconds after the last one."""

    before_s: float
    turns: tuple[tuple[float, float], ...]
    """For each turn the seconds of its generation on an idle server, and the seconds outside the engine."""
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a run tells about its episodes and its trainer."""

    groups: tuple[tuple[Played, ...], ...]
    train_s: float
    """Seconds of a step in which the trainer works: scoring, update, weights, notes and checkpoints."""
    step_s: float
    """Seconds of a step as measured."""
    groups_per_step: int
    concurrency: int
    max_ahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The schedule to simulate."""

    groups_per_step: int
    concurrency: int
    train_s: float
    max_ahead: int = 0
    servers: int = 1
    workers: int = 1
    half_load: float = FULL_LOAD
    cpu_share: float = 0.0


@dataclass(slots=True)
class Result:
    """What a simulated training did, the first quarter of its steps left out."""

    step_s: float
    trainer_idle: float
    """Share of the time in which the trainer waited."""
    live: float
    """Mean number of running episodes."""
    staleness: float
    """Mean number of steps between a group's begin and its training."""
    most_stale: int


def read(directory: str | Path, *, servers: int = 1, half_load: float = FULL_LOAD) -> Recorded:
    """Return what a run of `agentenv train` recorded."""
    run = find_run(directory)
    train: Mapping[str, object] = run.info.config["train"]
    # A run does not record the number that it takes from its servers; then the default is simulated.
    concurrency = int(run.info.config["runner"]["concurrency"] or 32)
    lines = (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    history = [json.loads(line) for line in lines]
    chosen = [one for one in run.summaries if not one.group_id.startswith("held-out")]
    return recorded(
        (run.load(one) for one in chosen),
        history,
        groups_per_step=int(str(train["groups_per_step"])),
        concurrency=concurrency,
        max_ahead=int(str(train.get("max_ahead", 0))),
        servers=servers,
        half_load=half_load,
    )


def recorded(
    episodes: Iterable[Trajectory],
    history: Sequence[Mapping[str, float]],
    *,
    servers: int = 1,
    half_load: float = FULL_LOAD,
    **schedule: int | bool | str,
) -> Recorded:
    """Return what the episodes and the metrics of a training tell.

    Generation times are those of an idle server: the recorded ones are divided by what the mean load of the
    run made of them.
    """
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for one in episodes:
        if not one.stop_reason.failed:
            groups[one.group_id].append(one)
    steps = history[1:] if len(history) > 1 else history
    wall = sum(one["step_time"] for one in history)
    busy = sum(one.timings.get("generate_s", 0.0) for members in groups.values() for one in members)
    slowed = 1 + busy / wall / servers / half_load
    waited = [one["time/wait"] for one in steps]
    return Recorded(
        groups=tuple(tuple(_played(one, slowed) for one in members) for members in groups.values()),
        train_s=fmean(one["step_time"] for one in steps) - fmean(waited),
        step_s=fmean(one["step_time"] for one in steps),
        **schedule,  # pyright: ignore[reportArgumentType]
    )


def made_up(random: Random) -> Recorded:
    """Return episodes of many turns whose times have a long tail, for a table without a run."""

    def played() -> Played:
        turns = max(1, min(80, int(random.lognormvariate(2.2, 0.65))))
        return Played(
            0.0,
            tuple(
                (random.lognormvariate(5.8, 0.8) / 70, random.lognormvariate(0.3, 1.0)) for _ in range(turns)
            ),
            0.0,
        )

    groups = tuple(tuple(played() for _ in range(8)) for _ in range(200))
    return Recorded(groups=groups, train_s=60.0, step_s=0.0, groups_per_step=16, concurrency=4096)


def _played(one: Trajectory, slowed: float) -> Played:
    turns = tuple(
        (turn.timings["generate_s"] / slowed, sum(turn.timings.get(name, 0.0) for name in OUTSIDE))
        for turn in one.turns
    )
    outside = sum(one.timings.get(name, 0.0) for name in OUTSIDE)
    before = max(0.0, outside - sum(seconds for _, seconds in turns))
    return Played(before, turns, one.timings.get("reward_s", 0.0))


@dataclass(slots=True)
class Group:
    """A group that was dealt."""

    number: int
    members: Sequence[Played]
    born: int = -1
    missing: int = 0
    done: bool = False


@dataclass(slots=True)
class Training:
    """Simulates one training."""

    schedule: Schedule
    recorded: Sequence[Sequence[Played]]
    steps: int
    random: Random
    now: float = 0.0
    steps_done: int = 0
    training: bool = False
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    pushed: int = 0
    """Number of events so far, which orders events of the same time."""
    dealt: int = 0
    released: int = 0
    """Number of batches whose training has begun."""
    open: list[Group] = field(default_factory=list[Group])
    queue: deque[tuple[Group, Played]] = field(default_factory=deque)
    live: int = 0
    loads: list[int] = field(default_factory=list[int])
    lines: list[float] = field(default_factory=list[float])
    """For each worker, the time until which its Python code computes."""
    ends: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    ages: list[int] = field(default_factory=list[int])
    area: float = 0.0
    idle: float = 0.0
    waits_since: float = 0.0

    def run(self) -> Result:
        """Simulate all steps."""
        self.loads, self.lines = [0] * self.schedule.servers, [0.0] * self.schedule.workers
        self._deal()
        self._train()
        while self.events and self.steps_done < self.steps:
            at, _, then = heapq.heappop(self.events)
            self.area += self.live * (at - self.now)
            self.now = at
            then()
        first = self.steps // 4
        (start, area, idle), (end, last_area, last_idle) = self.ends[first - 1], self.ends[-1]
        return Result(
            step_s=(end - start) / (len(self.ends) - first),
            trainer_idle=(last_idle - idle) / (end - start),
            live=(last_area - area) / (end - start),
            staleness=fmean(self.ages),
            most_stale=max(self.ages),
        )

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        self.pushed += 1
        heapq.heappush(self.events, (self.now + seconds, self.pushed, then))

    # Dealing and training -----------------------------------------------------------------

    def _may_begin(self) -> int:
        """Return how many groups may have begun by now."""
        plan = self.schedule
        batches = self.steps_done + plan.max_ahead + 1
        return min(batches, self.steps) * plan.groups_per_step

    def _deal(self) -> None:
        while self.dealt < self._may_begin():
            members = self.random.choice(self.recorded)
            group = Group(self.dealt, members, missing=len(members))
            self.dealt += 1
            self.open.append(group)
            self.queue.extend((group, member) for member in members)
        self._fill()

    def _train(self) -> None:
        """Begin a step if its groups are there."""
        if self.training:
            return
        plan = self.schedule
        size = plan.groups_per_step
        ready = sorted((one for one in self.open if one.done), key=lambda one: (one.born, one.number))
        if not plan.max_ahead:
            ready = [one for one in ready if one.number // size == self.steps_done]
        batch, left = ready[:size], ready[size:]
        if len(batch) < size or (plan.max_ahead and self._too_late(left)):
            return
        self.training = True
        self.idle += self.now - self.waits_since
        self.ages += [self.steps_done - one.born for one in batch]
        for one in batch:
            self.open.remove(one)
        self.released += 1
        self._deal()
        self._later(plan.train_s, self._trained)

    def _too_late(self, ready: Sequence[Group]) -> bool:
        """Return whether an unfinished group would be trained more than `max_ahead` steps after its begin."""
        begun = [one for one in self.open if not one.done and one.born >= 0]
        waits = False
        for place, one in enumerate(sorted([*begun, *ready], key=lambda one: (one.born, one.number))):
            waits |= not one.done
            trained_at = self.steps_done + 1 + place // self.schedule.groups_per_step
            if waits and trained_at > one.born + self.schedule.max_ahead:
                return True
        return False

    def _trained(self) -> None:
        self.training = False
        self.steps_done += 1
        self.waits_since = self.now
        self.ends.append((self.now, self.area, self.idle))
        self._deal()
        self._train()

    # Playing ------------------------------------------------------------------------------

    def _fill(self) -> None:
        while self.queue and self.live < self.schedule.concurrency:
            group, member = self.queue.popleft()
            if group.born < 0:
                group.born = self.steps_done
            self.live += 1
            self._outside(member.before_s, lambda group=group, member=member: self._turn(group, member, 0))

    def _outside(self, seconds: float, then: Callable[[], None]) -> None:
        """Spend time in tools and environment: one call of a worker computes at a time, the others wait."""
        computes = seconds * self.schedule.cpu_share
        worker = min(range(len(self.lines)), key=self.lines.__getitem__)
        if computes:
            self.lines[worker] = max(self.now, self.lines[worker]) + computes
            seconds = self.lines[worker] - self.now + seconds - computes
        self._later(seconds, then)

    def _turn(self, group: Group, member: Played, number: int) -> None:
        if number == len(member.turns):
            self._outside(member.after_s, lambda: self._end(group))
            return
        generate_s, outside_s = member.turns[number]
        server = min(range(len(self.loads)), key=self.loads.__getitem__)
        self.loads[server] += 1

        def answered() -> None:
            self.loads[server] -= 1
            self._outside(outside_s, lambda: self._turn(group, member, number + 1))

        self._later(generate_s * (1 + self.loads[server] / self.schedule.half_load), answered)

    def _end(self, group: Group) -> None:
        self.live -= 1
        group.missing -= 1
        group.done = not group.missing
        self._fill()
        self._train()


def simulate(
    what: Recorded, *, steps: int = 40, repeats: int = 3, seed: int = 0, **schedule: float | bool | str
) -> Result:
    """Return the mean of several simulated trainings, with the run's own schedule but for what is given."""
    own = {name: getattr(what, name) for name in ("groups_per_step", "concurrency", "train_s", "max_ahead")}
    plan = Schedule(**{**own, **schedule})  # pyright: ignore[reportArgumentType]
    results = [Training(plan, what.groups, steps, Random(seed + one)).run() for one in range(repeats)]
    means = {name: fmean(getattr(one, name) for one in results) for name in Result.__slots__}
    return replace(Result(**means), most_stale=max(one.most_stale for one in results))


def schedules(what: Recorded, servers: int, workers: int, *, computes: bool) -> dict[str, dict[str, object]]:
    """Return the schedules of the table, by what is different in them."""
    stream: dict[str, object] = {"max_ahead": max(4, what.max_ahead)}
    return {
        "the run's own": {},
        "synchronous": {"max_ahead": 0},
        **{f"max_ahead={k}": {"max_ahead": k} for k in (1, 2, 4, 8)},
        f"max_ahead={stream['max_ahead']}, twice the concurrency": {
            **stream,
            "concurrency": 2 * what.concurrency,
        },
        f"max_ahead={stream['max_ahead']}, {2 * servers} servers": {**stream, "servers": 2 * servers},
        **(
            {f"max_ahead={stream['max_ahead']}, {k * workers} workers": {**stream, "workers": k * workers}
             for k in (2, 4)}
            if computes
            else {}
        ),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "run", nargs="?", help="id or directory of a run of `agentenv train`; made-up episodes without one"
    )
    parser.add_argument("--servers", type=int, default=1, help="servers of the recorded run")
    parser.add_argument("--half-load", type=float, default=FULL_LOAD, help="requests that halve the speed")
    parser.add_argument("--workers", type=int, default=1, help="worker processes of the recorded run")
    parser.add_argument("--cpu-share", type=float, default=0.0, help="part of tool time that computes")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="few steps")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    what = (
        read(given.run, servers=given.servers, half_load=given.half_load) if given.run else made_up(Random(0))
    )
    steps = 12 if given.quick else given.steps
    fixed = {
        "servers": given.servers,
        "half_load": given.half_load,
        "workers": given.workers,
        "cpu_share": given.cpu_share,
    }
    took = f"a step took {what.step_s:.2f} s, " if given.run else "made-up episodes, "
    print(f"{len(what.groups)} groups; {took}the trainer's part of a step is {what.train_s:.2f} s\n")
    print(f"{'schedule':42s} {'step':>9s} {'idle':>6s} {'live':>7s} {'stale':>11s}")
    rows: dict[str, object] = {}
    names = schedules(what, given.servers, given.workers, computes=given.cpu_share > 0)
    for name, changes in names.items():
        changed: dict[str, Any] = {**fixed, **changes}
        one = simulate(what, steps=steps, **changed)
        rows[name] = {part: getattr(one, part) for part in Result.__slots__}
        print(
            f"{name:42s} {one.step_s:7.2f} s {one.trainer_idle:6.0%} {one.live:7.1f}"
            f" {one.staleness:5.2f}, {one.most_stale:.0f} max"
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
