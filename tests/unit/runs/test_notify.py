"""One notice for each cause, whoever meets it, and never in the way of what was raised."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from types import ModuleType

import pytest

from agentenv.core import DependencyMissing
from agentenv.engine import ScriptedEngine
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.render import Renderer, byte_tokenizer
from agentenv.runner import Runner
from agentenv.runs import Notice, Notifier, evaluate

TOKENIZER = byte_tokenizer()


class Broken(ToolEnv):
    def start(self, number: int) -> str:
        if number % 2:
            raise RuntimeError(f"no world {number}")
        return "go"


def fail(rank: int) -> None:
    raise ValueError(f"the same cause on rank {rank}")


def rank_fails(rank: int, folder, tell) -> None:
    notifier = Notifier(lambda notice: (folder / f"sent-{rank}").write_text(notice.message), directory=tell)
    try:
        with notifier.watching("training"):
            fail(rank)
    except ValueError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        (folder / f"raised-{rank}").write_text(f"{last.name}: {error}")


def test_four_ranks_that_meet_one_cause_send_one_notice_and_raise_it_on(tmp_path):
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_fails, args=(n, tmp_path, tmp_path / "told")) for n in range(4)]

    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()

    assert len(list(tmp_path.glob("sent-*"))) == 1
    for number in range(4):
        assert (tmp_path / f"raised-{number}").read_text() == f"fail: the same cause on rank {number}"


def test_a_broken_notifier_does_not_hide_what_was_raised(tmp_path, caplog):

    def send(notice):
        raise ConnectionError("nobody listens")

    (tmp_path / "file").write_text("no directory")
    notifier = Notifier(send, directory=tmp_path / "file")

    with pytest.raises(ValueError, match="rank 0") as raised, notifier.watching("training"):
        fail(0)

    assert raised.traceback[-1].name == "fail"
    assert raised.value.__cause__ is raised.value.__context__ is None
    assert "nobody listens" in caplog.text


async def test_episodes_that_fail_for_one_cause_are_told_of_once():
    told: list[Notice] = []
    notifier = Notifier(told.append)
    engine = ScriptedEngine(["done"], tokenizer=TOKENIZER, repeat_last=True)
    spec = EnvSpec.of("test/Broken-v0", Broken, tasks=[{"number": n} for n in range(8)])

    groups = Runner(engine, Renderer(TOKENIZER)).run_groups(spec, spec.tasks, on_trajectory=notifier.episode)
    failed = [one.error is not None async for group in groups for one in group]
    notifier.wait()

    assert sum(failed) == 4
    (notice,) = told
    assert (notice.where, notice.type) == ("test/Broken-v0, env", "RuntimeError")
    assert "no world" in notice.message


def test_other_causes_are_told_of_apart():
    told: list[Notice] = []
    notifier = Notifier(told.append)

    for where in ("training", "evaluation", "training"):
        with pytest.raises(ValueError, match="rank"), notifier.watching(where):
            fail(1)
    with pytest.raises(ZeroDivisionError), notifier.watching("training"):
        _ = 1 / 0

    assert [notice.where for notice in told] == ["training", "evaluation", "training"]
    assert [notice.type for notice in told] == ["ValueError", "ValueError", "ZeroDivisionError"]


def test_what_is_told_once_for_a_launch_is_told_once_whatever_the_cause(tmp_path):
    told: list[Notice] = []

    for rank, launch in enumerate(("first", "first", "second")):
        notifier = Notifier(told.append, directory=tmp_path / "told")
        notifier.tell(Notice.of("training", ValueError(f"rank {rank}")), once_for=launch)
        notifier.wait()

    assert [notice.message for notice in told] == ["rank 0", "rank 2"]


def test_a_process_that_gets_no_more_threads_still_tells(monkeypatch):
    told: list[Notice] = []
    notifier = Notifier(told.append)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)

    assert notifier.tell(Notice.of("training", MemoryError()))
    notifier.wait()
    assert [notice.type for notice in told] == ["MemoryError"]


def test_an_evaluation_sends_one_notice_for_a_cause_and_does_not_record_the_address(tmp_path, monkeypatch):
    told = []

    class Apprise:
        def add(self, address):
            return address == "test://secret"

        def notify(self, *, title, body):
            told.append((title, body))
            return True

    class Pages(ToolEnv):
        def start(self, n: int):
            raise ValueError("no such page")

    fake = ModuleType("apprise")
    fake.Apprise = Apprise
    monkeypatch.setitem(sys.modules, "apprise", fake)
    broken = EnvSpec.of("notify/Broken-v0", Pages, tasks=[{"n": n} for n in range(3)])
    result = evaluate(
        broken, notify=["test://secret"], stop_after_failures=0, runs_dir=tmp_path, runner={"retries": 0}
    )
    assert told == [("failed: notify/Broken-v0, env", "ValueError: no such page")]
    assert "secret" not in (result.run.path / "run.json").read_text()

    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(DependencyMissing):
        evaluate(broken, notify=["test://secret"], runs_dir=tmp_path / "none")
    assert not (tmp_path / "none").exists()
