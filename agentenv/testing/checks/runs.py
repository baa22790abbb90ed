"""Checks of how episodes run: repeated, side by side, under the runner, and how fast."""

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
        first, second = await subject.play(policy, task), await subject.play(policy, task)
        if first.messages[:1] != second.messages[:1] or first.story != second.story:
            pairs = enumerate(zip(first.messages, second.messages, strict=False))
            index = next((index for index, (a, b) in pairs if a != b), -1)
            raise Problem(
                f"two episodes of task {task.id} with the same seed differ at message {index}; draw from "
                "self.np_random, never from random, time or hash order"
            )
    return f"{len(tasks)} tasks played twice with the same seed give the same episodes"


async def check_isolation(subject: Subject) -> str:
    """Episodes whose turns alternate do not affect each other."""
    policy, tasks = subject.policy(), subject.some_tasks()
    pair = (tasks[0], tasks[len(tasks) // 2])
    alone = [(await subject.play(policy, task)).story for task in pair]
    together: list[Played] = []
    async with (
        aclosing(play_by_turns(subject.entry, policy, pair[0], seed=subject.seed_of(pair[0]))) as first,
        aclosing(play_by_turns(subject.entry, policy, pair[1], seed=subject.seed_of(pair[1]))) as second,
    ):
        running, last = [first, second], dict[int, Played]()
        while running:
            for turns in list(running):
                played = await anext(turns, None)
                if played is None:
                    running.remove(turns)
                else:
                    last[id(turns)] = played
        together = [last[id(first)], last[id(second)]]
    if [played.story for played in together] != alone:
        raise Problem(
            "two episodes whose turns alternate differ from the same episodes played alone; "
            "do not share state between instances"
        )
    return "two episodes whose turns alternate are the same as played alone"


async def check_parallel(subject: Subject) -> str:
    """Many episodes at once are the same as one after another."""
    policy, tasks = subject.policy(), subject.some_tasks()[:8]
    jobs = [task for task in tasks for _ in range(4)]
    in_turn = {task.id: (await subject.play(policy, task)).story for task in tasks}
    at_once = await asyncio.gather(*(subject.play(policy, task) for task in jobs))
    wrong = [played.task_id for played in at_once if played.story != in_turn[played.task_id]]
    if wrong:
        raise Problem(f"{len(jobs)} episodes at once differ from those played one by one, on task {wrong[0]}")
    return f"{len(jobs)} episodes at once are the same as one after another"


async def check_runner(subject: Subject) -> str:
    """The runner plays episodes with a mock model, and none of them fails."""
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
        await subject.play(subject.policy(), subject.some_tasks()[0])
    resets = [played.reset_s for played in subject.plays]
    steps = [seconds for played in subject.plays for seconds in played.step_s] or [0.0]
    return f"{1000 * fmean(steps):.2f} ms a step, {1000 * fmean(resets):.2f} ms a reset"
