"""What is told of exceptions that code from outside raises."""

from __future__ import annotations

import logging
import re
import traceback
from pathlib import Path

import pytest

import agentenv as ae
from agentenv.core.errors import UnknownEnvironment
from agentenv.core.faults import OUR_FRAMES, first_line_of, traceback_of


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("nothing to say")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  \nthree"), "three"),
        (ValueError(""), "ValueError"),
        (AssertionError(), "AssertionError"),
        (KeyError("\n"), "'\\n'"),
        (Unspeakable(), "<str() of this Unspeakable failed>"),
    ],
)
def test_the_first_line_of_any_exception_can_be_told(error, line):
    assert first_line_of(error) == line


class Failing(ae.ToolEnv):
    """An environment whose reward and tool raise."""

    tasks = ({},)

    def start(self) -> str:
        return "go"

    @ae.tool
    def fail(self) -> str:
        "Fail."
        raise LookupError("broken tool")

    def reward(self, answer: str) -> float:
        raise ZeroDivisionError("broken reward")


def files(text: str) -> list[str]:
    return re.findall(r'^  File "([^"]+)"', text, re.M)


@pytest.fixture
def failing():
    ae.register("faults/Failing-v0", Failing)
    yield "faults/Failing-v0"
    ae.registry.remove("faults/Failing-v0")


def test_a_recorded_traceback_begins_with_the_users_frame(failing, monkeypatch):
    [group] = ae.rollout(failing, "mock")
    assert files(group[0].error.traceback) == [__file__]
    assert group[0].error.where.startswith(__file__)

    monkeypatch.setattr(logging.getLogger("agentenv"), "level", logging.DEBUG)  # the whole of it
    logging.getLogger("agentenv").manager._clear_cache()
    [group] = ae.rollout(failing, "mock")
    logging.getLogger("agentenv").manager._clear_cache()
    assert len(files(group[0].error.traceback)) > OUR_FRAMES + 1
    assert files(group[0].error.traceback)[-1] == __file__


def test_at_most_three_frames_of_ours_are_shown_below_the_users():
    with pytest.raises(UnknownEnvironment) as unknown:
        ae.make("nothing/LikeIt-v0")
    shown = files(traceback_of(unknown.value))
    assert shown[0] == __file__
    assert 0 < len(shown) - 1 <= OUR_FRAMES

    env = ae.make(Failing)
    env.reset(seed=0)
    with pytest.raises(ZeroDivisionError) as raised:  # as a user of Gymnasium sees it
        env.step("done")
    shown = [Path(frame.filename).name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert shown[-1] == Path(__file__).name
    assert len(shown) <= 1 + OUR_FRAMES + 1
