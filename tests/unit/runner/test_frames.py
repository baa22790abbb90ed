"""How few functions of ours lie between an entry and the engine."""

from __future__ import annotations

import asyncio
from importlib import import_module

import agentenv as ae
from agentenv.core.loops import run_sync
from agentenv.engine import ScriptedEngine
from agentenv.engine.factory import LoadedModel
from helpers.frames import frames_of_ours
from scenes import TOKENIZER, Go, groups_of, play, runner, spec_of


class Watching(ScriptedEngine):
    """Notes which functions are live when it is asked."""

    def __init__(self, others=()) -> None:
        super().__init__(["done"], tokenizer=TOKENIZER, repeat_last=True)
        self.others = others
        self.live: list[str] = []

    async def generate(self, *args, **kwargs):
        self.live = frames_of_ours(self.others)
        return await super().generate(*args, **kwargs)


async def test_three_functions_lie_between_the_consumer_of_groups_and_the_engine():
    engine = Watching()

    await groups_of(runner(engine), Go)

    assert len(engine.live) == 3, engine.live  # play_groups, Stage.play, Episode.play


async def test_three_functions_lie_between_a_caller_of_one_episode_and_the_engine():
    engine = Watching()

    await play(Go(), engine)

    assert len(engine.live) == 3, engine.live  # Runner.run_episode, Stage.play, Episode.play


def test_an_evaluation_reaches_the_engine_in_less_than_eight_frames(monkeypatch):
    async def others():
        return asyncio.all_tasks()

    engine = Watching(run_sync(others()))
    module = import_module("agentenv.runs.evaluation")
    monkeypatch.setattr(module, "load_engine", lambda *_, **options: LoadedModel(engine, TOKENIZER))

    ae.evaluate(spec_of(Go), num_tasks=1)

    # evaluate, run_sync, Evaluation.play, play_groups, Stage.play, Episode.play; then the engine's generate.
    assert len(engine.live) == 6, engine.live
