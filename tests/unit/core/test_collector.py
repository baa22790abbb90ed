"""While episodes are played, the cycle collector runs less often; afterwards everything is as before."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import agentenv as ae
from agentenv.core import collector
from agentenv.core.collector import THRESHOLDS, collect_rarely, fewer_collections
from agentenv.engine import load_engine
from agentenv.envs import EnvSpec
from agentenv.render import Renderer
from agentenv.runner import Runner

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


def test_a_block_changes_the_collector_and_restores_it() -> None:
    with fewer_collections():
        assert state() == (True, THRESHOLDS, True)

    assert state() == (True, OURS, False)


def test_blocks_may_overlap_in_any_order() -> None:
    first, second = ExitStack(), ExitStack()
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


def test_thresholds_set_within_a_block_stay() -> None:
    with fewer_collections():
        gc.set_threshold(123, 4, 5)

    assert gc.get_threshold() == (123, 4, 5)


def test_an_error_restores_the_collector() -> None:
    with pytest.raises(KeyError), fewer_collections():
        raise KeyError

    assert state() == (True, OURS, False)


def test_cycles_made_within_a_block_are_still_collected() -> None:
    class Node:
        own: Node

    with fewer_collections():
        node = Node()
        node.own = node
        gone = weakref.ref(node)
        del node
        gc.collect()
        assert gone() is None


class Hello(ae.ToolEnv):
    """Looks at the collector while it is played."""

    seen: tuple[object, ...] = ()

    def start(self) -> str:
        Hello.seen = state()
        return "hi"

    def reward(self, answer: str) -> float:
        return 1.0


async def test_a_run_plays_its_episodes_in_such_a_block() -> None:
    loaded = load_engine("scripted:hello")
    runner = Runner(loaded.engine, Renderer(loaded.tokenizer))
    groups = [group async for group in runner.run_groups(EnvSpec.of("demo/Hello-v0", Hello), [{}])]

    assert groups[0][0].reward == 1.0
    assert Hello.seen == (True, THRESHOLDS, True)
    assert state() == (True, OURS, False)


def test_a_program_with_one_run_leaves_out_what_was_loaded_until_it_exits() -> None:
    collect_rarely(one_run=True)
    with fewer_collections():
        pass

    assert state() == (True, THRESHOLDS, True)


def test_other_programs_only_collect_rarely() -> None:
    collect_rarely()
    with fewer_collections():
        pass

    assert state() == (True, THRESHOLDS, False)


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
