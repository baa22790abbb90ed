"""`prepare` of an entry point: what it gets, when it is awaited, and what becomes of its error."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from agentenv.core import SandboxUnavailable
from agentenv.envs import EnvSpec, ToolEnv
from agentenv.runs import evaluate, find_run
from agentenv.testing import check_env
from agentenv.tools import tool

PREPARED = '''
import json, os
from agentenv.core import SandboxUnavailable
from agentenv.envs import ToolEnv, register

def tell(*what):
    with open("told", "a") as file:
        file.write(json.dumps([os.getpid(), *what]) + "\\n")

class Prepared(ToolEnv):
    """Go."""

    def __init__(self, word: str = "", size: int = 1) -> None:
        super().__init__()

    @classmethod
    async def prepare(cls, word="", **more):
        tell("prepare", word, more)
        if word == "full":
            raise SandboxUnavailable("there is no room", remedy="make some")
        if word == "broken":
            raise ValueError("no table")

    def start(self, x: int) -> str:
        tell("start")
        return "Go."

    def reward(self, answer: str) -> float:
        return 1.0

register("test/Prepared-v0", Prepared, tasks=[{"x": x} for x in range(4)], kwargs={"size": 2}, override=True)
'''


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prepared.py").write_text(PREPARED)


def told() -> list[list[object]]:
    """What the environment told: the process, and what was called with what."""
    return [json.loads(line) for line in Path("told").read_text().splitlines()]


def test_it_is_awaited_once_before_the_first_episode_with_the_arguments_of_the_environment():
    evaluate("prepared.py", "scripted:Done.", env={"word": "a", "tools": "calculator"})

    first, *rest = [what for _, *what in told()]
    assert first == ["prepare", "a", {"size": 2}]
    assert rest == [["start"]] * 4


@pytest.mark.slow
def test_each_worker_awaits_it_once():
    evaluate("prepared.py", "scripted:Done.", env={"word": "b"}, workers=2, runs_dir="runs")

    by_process: dict[object, list[object]] = {}
    for process, *what in told():
        by_process.setdefault(process, []).append(what[0])
    assert os.getpid() not in by_process
    assert set(by_process) <= {row["pid"] for row in find_run("last", "runs").workers()}
    assert all(calls[0] == "prepare" and "prepare" not in calls[1:] for calls in by_process.values())


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_its_error_is_told_as_it_is_before_any_episode(workers):
    with pytest.raises(SandboxUnavailable, match="there is no room; make some"):
        evaluate("prepared.py", "scripted:Done.", env={"word": "full"}, workers=workers)
    assert {what[0] for _, *what in told()} == {"prepare"}

    Path("prepared.py").write_text(PREPARED.replace("kwargs=", "sandbox='nowhere', kwargs="))
    with pytest.raises(SandboxUnavailable, match="there is no room"):  # before a sandbox is looked for
        evaluate("prepared.py", "scripted:Done.", env={"word": "full"}, workers=workers)
    with pytest.raises(SandboxUnavailable, match="there is no room"):
        asyncio.run(check_env("prepared.py", env={"word": "full"}))


@pytest.mark.parametrize(
    ("word", "lines"),
    [
        ("full", ["error: there is no room", "where: agentenv eval", "  fix: make some"]),
        (
            "broken",
            ["error: ValueError: no table", "where: prepared.py:", "  fix: run it again with --debug"],
        ),
    ],
)
def test_the_command_line_tells_its_error_in_three_lines(word, lines, command):
    said = command("eval", "prepared.py", "-m", "scripted:Done.", "-o", f"env.word={word}")
    told = said.err.splitlines()[-3:]

    assert said.code == 1
    assert [line[: len(begins)] for line, begins in zip(told, lines, strict=True)] == lines


class Cook:
    """An environment whose tool has that name."""

    def reset(self) -> str:
        return "Cook."

    def prepare(self, dish: str) -> str:
        """Prepare a dish.

        Args:
            dish: Its name.
        """
        return f"{dish} is ready"

    def get_reward(self) -> float:
        return 1.0


class Cooking(ToolEnv):
    """One of ours whose tool has that name."""

    def start(self) -> str:
        return "Cook."

    @tool
    def prepare(self, dish: str) -> str:
        """Prepare a dish."""
        return f"{dish} is ready"


@pytest.mark.parametrize("kind", [Cook, Cooking])
async def test_a_method_of_instances_with_that_name_is_the_authors_own(kind):
    spec = EnvSpec.of("test/Cook-v0", kind)
    async with spec.prepare():
        pass

    assert [schema["function"]["name"] for schema in spec.make().tool_schemas] == ["prepare"]


class Held(ToolEnv):
    tasks = tuple({"x": x} for x in range(3))
    told: ClassVar[list[str]] = []

    @classmethod
    @asynccontextmanager
    async def prepare(cls):
        cls.told.append("opened")
        yield
        cls.told.append("closed")

    def start(self, x: int) -> str:
        self.told.append("start")
        return "Go."

    def reward(self) -> float:
        return 1.0


async def test_a_context_manager_is_left_after_the_last_episode_of_all_stages():
    Held.told.clear()
    entry = EnvSpec.of("test/Held-v0", Held)
    async with entry.prepare():
        await asyncio.to_thread(evaluate, entry, "scripted:Done.")
        async with entry.prepare():
            assert Held.told.count("opened") == 2  # this event loop's, and that of the evaluation
        assert Held.told.count("closed") == 1

    assert Held.told == ["opened", "opened", *["start"] * 3, "closed", "closed"]
