"""Checks of how episodes run: repeated, side by side, under the runner, and how fast."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from itertools import zip_longest
from statistics import fmean

from agentenv.core.episode_env import Task
from agentenv.core.playing import MessagePolicy
from agentenv.testing.checks.subject import Problem, Subject, too_long
from agentenv.testing.episodes import Played, play_by_turns

__all__ = [
    "check_determinism",
    "check_isolation",
    "check_parallel",
    "check_play",
    "check_reuse",
    "check_runner",
    "check_speed",
]


async def check_play(subject: Subject) -> str:
    """An episode of each split can be played from the reset to the reward."""
    played = 0
    for split in subject.entry.task_set().splits:
        for task in subject.tasks_of(split)[:1]:
            for name, policy in subject.policies().items():
                if played and name not in subject.policies():
                    continue  # the environment turned out to be slow
                messages = (await subject.play_first(name, policy, task)).messages
                if messages and messages[0]["role"] == "assistant":
                    raise Problem(
                        f"the model is shown nothing before its first turn of task {task.id}; return the "
                        "first observation from start(), or from reset()"
                    )
                played += 1
    user = ", with the simulated user" if subject.entry.user is not None else ""
    return f"{played} episodes played to their end{user}{_by(subject.policies())}"


async def check_determinism(subject: Subject) -> str:
    """The same seed and task give the same episode, whether the oracle plays or a random policy."""
    policies, tasks = subject.policies(), subject.few_tasks()
    played: list[Task] = []
    for task in subject.in_time(tasks):
        played.append(task)
        for name, policy in policies.items():
            first = await subject.play_first(name, policy, task)
            second = await subject.play(policy, task)
            if first.story != second.story:
                raise Problem(
                    f"two episodes of task {task.id} with the same seed differ {_where(first, second)} "
                    f"(played by the {name} policy); draw from self.np_random, never from random, time or "
                    "hash order, and keep nothing on the class or in the module"
                )
    same = f"{len(played)} tasks played twice with the same seed give the same episodes"
    return f"{same}{too_long(tasks, played)}{_by(policies)}"


async def check_reuse(subject: Subject) -> str:
    """One instance that plays several episodes plays them as new instances do."""
    policies, tasks = subject.policies(), subject.few_tasks(4)
    for name, policy in policies.items():
        env = subject.entry.make()
        try:
            for task in tasks:
                fresh = await subject.play_first(name, policy, task)
                used = await subject.play(policy, task, env=env)
                if fresh.story != used.story:
                    raise Problem(
                        f"task {task.id} differs {_where(fresh, used)} in an instance that has played other "
                        f"episodes before (played by the {name} policy); set all state of an episode anew "
                        "when it starts"
                    )
        finally:
            await env.shutdown()
    return f"one instance plays {len(tasks)} episodes as new instances do{_by(policies)}"


async def check_isolation(subject: Subject) -> str:
    """Episodes whose turns alternate do not affect each other."""
    policies, tasks = subject.policies(), subject.some_tasks()
    pair = (tasks[0], tasks[len(tasks) // 2])
    for name, policy in policies.items():
        alone = [await subject.play_first(name, policy, task) for task in pair]
        together = await _alternating(subject, policy, pair)
        for one, other in zip(alone, together, strict=True):
            if one.story != other.story:
                raise Problem(
                    f"two episodes whose turns alternate differ from the same episodes played alone "
                    f"{_where(one, other)} (played by the {name} policy); do not share state between "
                    "instances"
                )
    return f"two episodes whose turns alternate are the same as played alone{_by(policies)}"


async def _alternating(subject: Subject, policy: MessagePolicy, pair: tuple[Task, Task]) -> list[Played]:
    """Play two tasks in turn, one turn of each at a time."""
    seeds = [subject.seed_of(task) for task in pair]
    async with (
        subject.context(seeds[0]) as one,
        subject.context(seeds[1]) as other,
        aclosing(play_by_turns(subject.entry, policy, pair[0], seed=seeds[0], context=one)) as first,
        aclosing(play_by_turns(subject.entry, policy, pair[1], seed=seeds[1], context=other)) as second,
    ):
        running, last = [first, second], dict[int, Played]()
        while running:
            for turns in list(running):
                played = await anext(turns, None)
                if played is None:
                    running.remove(turns)
                else:
                    last[id(turns)] = played
        return [last[id(first)], last[id(second)]]


async def check_parallel(subject: Subject) -> str:
    """Many episodes at once are the same as one after another."""
    policies, tasks = subject.policies(), subject.few_tasks(8)
    jobs: list[Task] = []
    copies = 2 if subject.is_slow else 4
    for number, (name, policy) in enumerate(policies.items()):
        # The episodes at once take about as long as those one after another, or twice as long on a machine
        # that has become busy.
        in_time = list[Task]()
        in_turn = list[Played]()
        for task in subject.in_time(tasks, (number + 1 / 3) / len(policies)):
            in_time.append(task)
            in_turn += [await subject.play_first(name, policy, task) for _ in range(copies)]
        jobs = [task for task in in_time for _ in range(copies)]
        at_once = await asyncio.gather(*(subject.play(policy, task) for task in jobs))
        for one, other in zip(in_turn, at_once, strict=True):
            if one.story != other.story:
                raise Problem(
                    f"{len(jobs)} episodes at once differ from those played one by one, on task "
                    f"{one.task_id} {_where(one, other)} (played by the {name} policy)"
                )
    return f"{len(jobs)} episodes at once are the same as one after another{_by(policies)}"


def _where(first: Played, second: Played) -> str:
    """Say where two episodes differ first."""
    pairs = enumerate(zip_longest(first.messages, second.messages))
    index = next((index for index, (a, b) in pairs if a != b), None)
    if index is not None:
        return f"at message {index}"
    if first.stop_reason != second.stop_reason:
        return f"in how they end ({first.stop_reason} and {second.stop_reason})"
    return f"in their reward ({first.reward} and {second.reward})"


def _by(policies: Mapping[str, MessagePolicy]) -> str:
    return f" (played by: {', '.join(policies)})"


async def check_runner(subject: Subject) -> str:
    """The runner plays episodes with a mock model, and none of them fails."""
    from agentenv.engine.factory import load_engine
    from agentenv.render.renderer import Renderer
    from agentenv.runner.runner import Runner

    loaded = load_engine("mock")
    assert loaded.tokenizer is not None
    renderer = Renderer(loaded.tokenizer)
    runner = Runner(loaded.engine, renderer, subject.limits, options=subject.runner, sandbox=subject.sandbox)
    stops: dict[str, int] = {}
    tokens = 0
    size = 1 if subject.is_slow else 2
    async with aclosing(runner.run_groups(subject.entry, subject.few_tasks(4), size)) as groups:
        async for group in groups:
            for trajectory in group:
                if (error := trajectory.error) is not None:
                    text = f"{error.boundary}: {error.type}: {error.message}"
                    raise Problem(f"the runner's episode of task {trajectory.task_id} failed: {text:.300}")
                reason = trajectory.stop_reason.value
                stops[reason] = stops.get(reason, 0) + 1
                tokens += sum(map(len, trajectory.sequences))
    counts = ", ".join(f"{name} {count}" for name, count in sorted(stops.items()))
    return f"{sum(stops.values())} episodes of a mock model, {tokens} tokens: {counts}"


async def check_speed(subject: Subject) -> str:
    """Report the time of a reset and of a step."""
    if not subject.plays:
        for policy in subject.policies().values():
            await subject.play(policy, subject.some_tasks()[0])
    resets = [played.reset_s for played in subject.plays]
    episodes = fmean(played.seconds for played in subject.plays)
    steps = [seconds for played in subject.plays for seconds in played.step_s] or [0.0]
    times = f"{1000 * fmean(steps):.2f} ms a step, {1000 * fmean(resets):.2f} ms a reset"
    return f"{times}, {episodes:.1f} s an episode" if subject.is_slow else times
