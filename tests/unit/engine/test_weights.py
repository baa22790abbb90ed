"""The sync check against its definition, and pushing weights by the way each engine has."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.core import EngineError, UsageError
from agentenv.engine import Sampling, ScriptedEngine, check_sync, push_weights
from agentenv.engine.weights import compare_logprobs, drop_old

values = st.lists(st.floats(-8, 0), min_size=1, max_size=20)


@given(values, st.data())
def test_the_report_is_its_definition(engine, data):
    trainer = data.draw(st.lists(st.floats(-8, 0), min_size=len(engine), max_size=len(engine)))

    report = compare_logprobs(engine, trainer)

    ratios = [math.exp(theirs - ours) for ours, theirs in zip(engine, trainer, strict=True)]
    assert report.k3 == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / len(ratios), abs=1e-9)
    assert report.k3 >= -1e-12
    assert report.outside == sum(not 0.8 <= r <= 1.2 for r in ratios) / len(ratios)


@pytest.mark.parametrize(("shift", "wrong"), [(0.0, False), (0.04, False), (5.0, True), (-5.0, True)])
def test_noise_passes_and_wrong_weights_are_told(shift, wrong):
    ours = [-1.0, -2.0, -0.5]
    report = compare_logprobs(ours, [value + shift for value in ours])

    assert bool(report.problem) is wrong
    if wrong:
        with pytest.raises(EngineError, match="weights did not arrive"):
            report.require()


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([-1.0], []), ([math.nan], [-1.0])])
def test_nothing_to_compare_is_refused(ours, theirs):
    with pytest.raises(UsageError):
        compare_logprobs(ours, theirs)


async def test_the_check_scores_what_the_engine_sampled():
    engine = ScriptedEngine([[5, 6]], repeat_last=True, logprob=-0.7)
    asked = []

    async def score(prompt, tokens):
        asked.append((tuple(prompt), tuple(tokens)))
        return [-0.7] * len(tokens)

    report = await check_sync(engine, score, [[1], [2]], sampling=Sampling(max_tokens=2))

    assert asked == [((1,), (5, 6)), ((2,), (5, 6))]
    assert (report.tokens, report.k3, report.problem) == (4, 0.0, "")


class Reader:
    """An engine that reads weights from a directory."""

    name = "reader"
    model = None

    def __init__(self):
        self.read = []

    async def load_weights(self, path, *, version):
        self.read.append((None, Path(path).joinpath("w").read_text(), version))
        return version

    async def load_adapter(self, name, path, *, version):
        self.read.append((name, Path(path).joinpath("w").read_text(), version))
        return version


class Writer:
    """A model that writes weights as transformers and peft do."""

    def save_pretrained(self, target, selected_adapters=()):
        for folder in (Path(target, name) for name in selected_adapters or [""]):
            folder.mkdir(parents=True)
            folder.joinpath("w").write_text("weights")


async def test_pushed_weights_are_read_from_a_directory_and_two_versions_are_kept(tmp_path):
    (tmp_path / "weights-mine").mkdir()
    engine = Reader()

    for version in (8, 9, 10):
        assert await push_weights(engine, Writer(), version=version, directory=tmp_path) == version
    await push_weights(engine, Writer(), version=11, directory=tmp_path, adapter="policy")

    assert engine.read == [
        (None, "weights", 8),
        (None, "weights", 9),
        (None, "weights", 10),
        ("policy", "weights", 11),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights-10", "weights-11", "weights-mine"]


async def test_an_engine_that_takes_no_weights_is_said(tmp_path):
    with pytest.raises(UsageError, match="cannot take new weights"):
        await push_weights(ScriptedEngine([[1]]), Writer(), version=1, directory=tmp_path)


def test_weights_that_another_run_left_do_not_push_out_those_in_use(tmp_path):
    for number in (1, 2, 8, 9):
        (tmp_path / f"weights-{number}").mkdir()

    drop_old([tmp_path], 2, keep=2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights-1", "weights-2"]
