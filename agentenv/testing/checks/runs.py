"""Checks of how episodes run: the same again, beside others, under the runner, and how fast."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from statistics import fmean

from agentenv.testing.checks.subject import Problem, Subject
from agentenv.testing.episodes import Played, play_by_turns

__all__ = ["check_determinism", "check_isolation", "check_parallel", "check_runner", "check_speed"]


async def check_determinism(subject: Subject) -> str:
    """The same seed and task give the same episode."""
    policy, tasks = subject.policy(), subject.some_tasks()
    for task in tasks:
        one, two = await subject.play(policy, task), await subject.play(policy, task)
        if one.messages[:1] != two.messages[:1] or one.story != two.story:
            place = next(
                (n for n, (a, b) in enumerate(zip(one.messages, two.messages, strict=False)) if a != b), -1
            )
            raise Problem(
                f"task {task.id} played twice with one seed differs at message {place}: draw from "
                "self.np_random, never from random, time or hash order"
            )
    return f"{len(tasks)} tasks played twice with one seed: the same episodes"


async def check_isolation(subject: Subject) -> str:
    """Episodes played in turns do not touch each other."""
    policy, tasks = subject.policy(), subject.some_tasks()
    pair = (tasks[0], tasks[len(tasks) // 2])
    alone = [(await subject.play(policy, task)).story for task in pair]
    together: list[Played] = []
    async with (
        aclosing(play_by_turns(subject.entry, policy, pair[0], seed=subject.seed_of(pair[0]))) as one,
        aclosing(play_by_turns(subject.entry, policy, pair[1], seed=subject.seed_of(pair[1]))) as two,
    ):
        running, last = [one, two], dict[int, Played]()
        while running:
            for turns in list(running):
                played = await anext(turns, None)
                if played is None:
                    running.remove(turns)
                else:
                    last[id(turns)] = played
        together = [last[id(one)], last[id(two)]]
    if [played.story for played in together] != alone:
        raise Problem(
            "two instances played in turns differ from each alone: state is shared between instances"
        )
    return "two instances played in turns give the same as each alone"


async def check_parallel(subject: Subject) -> str:
    """Many episodes at once give what they give one after another."""
    policy, tasks = subject.policy(), subject.some_tasks()[:8]
    jobs = [task for task in tasks for _ in range(4)]
    in_turn = {task.id: (await subject.play(policy, task)).story for task in tasks}
    at_once = await asyncio.gather(*(subject.play(policy, task) for task in jobs))
    wrong = [played.task_id for played in at_once if played.story != in_turn[played.task_id]]
    if wrong:
        raise Problem(f"{len(jobs)} episodes at once differ from one after another, on task {wrong[0]}")
    return f"{len(jobs)} episodes at once give the same as one after another"


async def check_runner(subject: Subject) -> str:
    """The runner plays it with a model that knows nothing, and every token is accounted for."""
    from agentenv.engine.factory import load_engine
    from agentenv.render.renderer import Renderer
    from agentenv.runner.runner import Runner

    loaded = load_engine("mock")
    assert loaded.tokenizer is not None
    runner = Runner(loaded.engine, Renderer(loaded.tokenizer), subject.limits, options=subject.runner)
    stops: dict[str, int] = {}
    tokens = 0
    async with aclosing(runner.run_groups(subject.entry, subject.some_tasks()[:4], 2)) as groups:
        async for group in groups:
            for one in group:
                if one.error is not None:
                    told = f"{one.error.boundary}: {one.error.type}: {one.error.message}"
                    raise Problem(f"task {one.task_id} under the runner: {told:.300}")
                stops[one.stop_reason.value] = stops.get(one.stop_reason.value, 0) + 1
                tokens += sum(map(len, one.sequences))
    told = ", ".join(f"{name} {count}" for name, count in sorted(stops.items()))
    return f"{sum(stops.values())} episodes of a mock model, {tokens} tokens: {told}"


async def check_speed(subject: Subject) -> str:
    """Say what a reset and a step cost."""
    if not subject.plays:
        await subject.play(subject.policy(), subject.some_tasks()[0])
    resets = [one.reset_s for one in subject.plays]
    steps = [took for one in subject.plays for took in one.step_s] or [0.0]
    return f"{1000 * fmean(steps):.2f} ms a step, {1000 * fmean(resets):.2f} ms a reset"
