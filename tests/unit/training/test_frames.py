"""Between `ae.train` and the engine stand few functions, and what they are is written down here."""

from __future__ import annotations

import signal

import pytest

import agentenv as ae
from agentenv.engine import TransformersEngine
from helpers.frames import frames_of_ours
from scenes import Lengths, saved_model, spec_of


@pytest.mark.parametrize("max_ahead", [0, 1])
def test_few_frames_stand_between_train_and_the_engine(tmp_path, monkeypatch, request, max_ahead):
    seen: list[list[str]] = []
    generate = TransformersEngine.generate

    async def watched(self, *args, **options):
        seen.append(frames_of_ours())
        return await generate(self, *args, **options)

    monkeypatch.setattr(TransformersEngine, "generate", watched)
    # Where Ctrl-C is ignored, as in a job in the background, there is one function more.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    ae.train(
        spec_of(Lengths, {"train": [{"n": 1}], "test": [{"n": 2}]}),
        saved_model(tmp_path / "tiny"),
        steps=1,
        group_size=2,
        runs_dir=tmp_path / "runs",
        train={"groups_per_step": 1, "refill_rounds": 2, "max_ahead": max_ahead},
        limits={"max_turns": 1, "max_tokens_per_turn": 4},
        runner={"concurrency": 1},
    )

    assert len(seen) >= 3  # two episodes to train on, at least, and one to evaluate
    for frames in seen:
        above = frames[: next(place for place, name in enumerate(frames) if ".runner." in name)]
        assert above[0] == "agentenv.training.run.train"
        assert len(above) <= 3, frames
        # And the engine's own `generate`; the groups of a stream are played by a task with a frame of its own.
        assert len(frames) + 1 <= 8 + max_ahead, frames
