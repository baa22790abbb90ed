"""While episodes are played, the cycle collector runs less often; afterwards everything is as before."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from agentenv.core import collector
from agentenv.core.collector import THRESHOLDS, collect_rarely, fewer_collections
from scenes import Go, groups_of, runner

OURS = (700, 10, 10)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    enabled, before = gc.isenabled(), gc.get_threshold()
    # A test that ran the command line in this process has left objects frozen for good, and one that left a run
    # before its end has a block that is still open.
    for name, value in {"_for_good": False, "_frozen": False, "_users": 0, "_before": None}.items():
        monkeypatch.setattr(collector, name, value)
    gc.unfreeze()
    gc.set_threshold(*OURS)
    gc.enable()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
    if not enabled:
        gc.disable()


def state() -> tuple[bool, tuple[int, int, int], bool]:
    """Return whether the collector runs, its thresholds, and whether objects are frozen."""
    return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0


class Node:
    own: Node


@pytest.mark.parametrize("error", [None, KeyError])
def test_a_block_changes_the_collector_and_restores_it(error: type[Exception] | None) -> None:
    with suppress(KeyError), fewer_collections():
        assert state() == (True, THRESHOLDS, True)
        node = Node()
        node.own = node
        gone = weakref.ref(node)
        del node
        gc.collect()
        assert gone() is None
        if error is not None:
            raise error
    assert state() == (True, OURS, False)

    first, second = ExitStack(), ExitStack()  # blocks may overlap in any order
    first.enter_context(fewer_collections())
    second.enter_context(fewer_collections())
    first.close()
    assert state() == (True, THRESHOLDS, True)
    second.close()
    assert state() == (True, OURS, False)


def test_what_the_caller_set_is_kept() -> None:
    gc.disable()
    with fewer_collections():
        assert state() == (False, OURS, False)
    gc.enable()
    gc.set_threshold(50_000, 5, 5)
    gc.freeze()
    with fewer_collections():
        assert state() == (True, (50_000, 5, 5), True)
    assert state() == (True, (50_000, 5, 5), True)
    gc.unfreeze()
    gc.set_threshold(*OURS)
    with fewer_collections():
        gc.set_threshold(123, 4, 5)

    assert gc.get_threshold() == (123, 4, 5)


class Looks(Go):
    """Looks at the collector while it is played."""

    def start(self) -> str:
        Looks.seen = state()
        return "hi"


async def test_a_run_plays_its_episodes_in_such_a_block() -> None:
    ((played,),) = await groups_of(runner("hello"), Looks)

    assert played.reward == 1.0
    assert Looks.seen == (True, THRESHOLDS, True)
    assert state() == (True, OURS, False)


@pytest.mark.parametrize("one_run", [True, False])
def test_a_program_with_one_run_leaves_out_what_was_loaded_and_others_only_collect_rarely(
    one_run: bool,
) -> None:
    collect_rarely(one_run=one_run)
    with fewer_collections():
        pass

    assert state() == (True, THRESHOLDS, one_run)


RENTED = """
import agentenv as ae
from pathlib import Path

class Rented(ae.ToolEnv):
    def start(self, number: int) -> str:
        self.me = self  # a cycle, which only the collector finds
        self.number, self.given_back = number, Path.cwd()
        return "Say something."

    def reward(self, answer: str) -> float:
        return 1.0

    def __del__(self) -> None:
        if hasattr(self, "number"):
            (self.given_back / f"{self.number}.back").touch()

ae.register("collector/Rented-v0", Rented, tasks=[{"number": number} for number in range(3)])
"""


def test_environments_are_finalised_when_the_command_ends(tmp_path) -> None:
    (tmp_path / "rented.py").write_text(RENTED)
    words = ["eval", "rented.py", "-m", "scripted:Hello.", "-n", "3"]
    subprocess.run([sys.executable, "-m", "agentenv", *words], check=True, capture_output=True, cwd=tmp_path)

    assert sorted(path.name for path in tmp_path.glob("*.back")) == ["0.back", "1.back", "2.back"]
