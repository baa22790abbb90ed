"""`agentenv/MiniSWE-v0` with a small library that this file writes; the published ones have a file of their own."""

import json
import os
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

from agentenv.core import (
    Action,
    Context,
    DependencyMissing,
    SandboxUnavailable,
    TaskError,
    ToolError,
    install_line,
)
from agentenv.envs import EnvSpec
from agentenv.sandbox import create
from agentenv.testing import oracle_of
from agentenv_envs.mini_swe import MiniSWE, RepairAgent, repair, tasks
from agentenv_envs.mini_swe.changes import Change, candidates, changed
from agentenv_envs.mini_swe.examples import sessions_of
from agentenv_envs.mini_swe.libraries import INDEXES, Library, libraries
from agentenv_envs.mini_swe.repair import Repair, rows

pytestmark = pytest.mark.sandbox

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CORE = '''"""Sums and limits."""

import random

LIMIT = 1 + 1


def total(values: list[int], start: int = 0) -> int:
    """Add values from a position on.

    >>> total([1, 2, 3])
    6
    >>> total([1, 2, 3], 1)
    5
    """
    result = 0
    for place in range(start, len(values)):
        result += values[place]
    return result


def clip(value, low, high):
    """Keep a value within limits.

    >>> clip(5, 0, 3)
    3
    >>> print(clip(-1, 0, 3))
    0
    """
    if value < low:
        return low
    return high if value > high else value


def chance(top):
    """Draw a number.

    >>> 0 < random.random() < chance(2)
    True
    """
    return top + random.random()


def letters(text):
    """Tell the letters.

    >>> letters("aab")
    {'a', 'b'}
    >>> len(letters("aab"))
    2
    """
    return set(text) if len(text) > 0 else None


def unseen(value):
    """Has no example."""
    return value + 1
'''
FILES = {
    "tinytally/__init__.py": "from tinytally.core import clip, total\n",
    "tinytally/core.py": CORE,
    "tinytally/tests/test_core.py": "def test_total(): ...\n",
}


@pytest.fixture(scope="module")
def indexes(tmp_path_factory):
    """Install the small library, and make its index; the folder of the index is returned."""
    site = tmp_path_factory.mktemp("site")
    install(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        made = site / "indexes"
        script("build", "tinytally", "--licence", "MIT", "--into", made)
        yield str(made)


def script(name, *arguments):
    """Run a script of the environment in a process of its own, because it forks."""
    done = subprocess.run(
        [sys.executable, "-m", f"agentenv_envs.mini_swe.{name}", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def install(site):
    info = site / "tinytally-1.2.dist-info"
    for path, text in FILES.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tinytally\nVersion: 1.2\n")
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in FILES))


def entry_of(indexes):
    tasks_of = {"train": partial(tasks, "train", indexes)}
    return EnvSpec.of("tiny/Repairs-v0", MiniSWE, tasks=tasks_of, max_turns=20, sandbox="auto")


def task_at(indexes, kind, text):
    """Return the task whose change of this kind is in the line with a text."""
    numbers = [number for number, line in enumerate(CORE.split("\n"), start=1) if text in line]
    [task] = [row for row in rows("train", indexes) if row["kind"] == kind and row["line"] in numbers]
    return task


async def begun(env, task, sandbox):
    first = await env.begin(task, seed=0, context=Context(task=task, sandbox=sandbox))
    return first.messages[-1]["content"] if first.messages else ""


async def score_of(env):
    outcome = await env.end("final_answer")
    await env.shutdown()
    return outcome.reward


@pytest.fixture
async def sandbox():
    try:
        async with create("auto", size=1) as opened:
            yield opened
    except SandboxUnavailable as error:
        pytest.skip(f"UNTESTED: no sandbox on this machine: {error}")


def test_the_index_has_changes_that_examples_show_and_no_text_of_the_library(indexes):
    text = (Path(indexes) / "tinytally.json").read_text()
    found = {(CORE.split("\n")[row["line"] - 1].strip(), row["kind"]) for row in rows("train", indexes)}

    assert ("result += values[place]", "iadd-isub") in found
    assert ("if value < low:", "if-ifnot") in found
    assert ("if value < low:", "lt-le") not in found, "at the limit itself both ways give the same"
    unseen = {"LIMIT = 1 + 1", "return value + 1", "return top + random.random()"}
    assert not unseen & {line for line, _ in found}
    assert "values" not in text

    changing = libraries(indexes)["tinytally"].parts["tinytally/core.py"].left_out
    assert {name for name in changing if name.startswith("2.")} == {"2.0", "2.1"}
    assert "3.0.0" in changing, "the order of a set of texts depends on the hash seed"
    assert "3.0" not in changing


def test_mistakes_that_make_no_difference_with_this_python_are_dropped(indexes, tmp_path):
    text = (Path(indexes) / "tinytally.json").read_text()
    content, file = json.loads(text), tmp_path / "tinytally.json"
    line = CORE.split("\n").index("    if value < low:") + 1
    content["files"]["tinytally/core.py"]["faults"].append([line, 13, "lt-le", "1.0", 0])
    file.write_text(json.dumps(content))

    said = script("recheck", file)

    assert said == "tinytally: 1 dropped\n"
    assert file.read_text() == text


async def test_the_oracle_repairs_tasks_and_nothing_done_repairs_none(indexes, sandbox):
    entry = entry_of(indexes)
    oracle = oracle_of(entry)

    for task in list(entry.task_set("train"))[::2]:
        scores = []
        for repaired in (True, False):
            env = entry.make()
            await begun(env, task.data, sandbox)
            if repaired:
                await env.advance(Action.of(oracle([], task.data, None)))
            scores.append(await score_of(env))
        assert (task.id, scores) == (task.id, [1.0, 0.0])


async def test_an_episode_is_reported_read_repaired_and_scored(indexes, sandbox):
    task = task_at(indexes, "iadd-isub", "result +=")
    env = entry_of(indexes).make()

    report = await begun(env, task, sandbox)

    assert ">>> total([1, 2, 3])\n" in report
    assert "should at last show\n\n6\n\nbut they show\n\n-6\n" in report
    assert env.list_files() == "tinytally/__init__.py (1 lines)\ntinytally/core.py (57 lines)"
    assert env.search("result -=") == "tinytally/core.py:18: result -= values[place]"
    assert env.search("nowhere at all") == "no line contains this text"
    assert env.read_file("tinytally/core.py", 17, 2).split("\n")[1] == "18         result -= values[place]"
    assert await env.run("from tinytally import total; total([4])") == "-4"
    assert env.replace("tinytally/core.py", "result -=", "result  +=") == "tinytally/core.py changed"
    assert await env.run("from tinytally import total; total([4])") == "4"
    assert await score_of(env) == 1.0


async def test_tools_say_what_is_wrong(indexes, sandbox):
    env = entry_of(indexes).make()
    await begun(env, rows("train", indexes)[0], sandbox)

    for call, words in (
        (lambda: env.read_file("other.py"), "list_files shows all 2"),
        (lambda: env.read_file("tinytally/core.py", 1000), "has 57 lines"),
        (lambda: env.search(" "), "empty"),
        (lambda: env.replace("tinytally/core.py", "return", ""), "occurs 6 times"),
        (lambda: env.replace("tinytally/core.py", "", "x"), "occurs 0 times"),
    ):
        with pytest.raises(ToolError, match=words):
            call()
    await env.shutdown()


@pytest.mark.parametrize(
    "trick",
    [
        "    if values == [1, 2, 3]:\n        return 6 if start == 0 else 5\n",
        "    import os; os._exit(0)\n",
        "    open('agentenv_outputs.json', 'w').write('[]'); import os; os._exit(0)\n",
        "    while True: pass\n",
        "    raise SystemExit\n",
        "    )\n",
    ],
)
async def test_what_repairs_no_more_than_the_reported_example_gets_nothing(
    indexes, sandbox, monkeypatch, trick
):
    env = entry_of(indexes).make()
    await begun(env, task_at(indexes, "iadd-isub", "result +="), sandbox)
    if "while" in trick:
        monkeypatch.setattr(repair, "TIMEOUT_S", 0.5)

    env.replace("tinytally/core.py", "    result = 0\n", f"{trick}    result = 0\n")

    assert await score_of(env) == 0.0


async def test_an_agent_of_its_own_works_in_the_workspace_and_in_the_sandbox(indexes, sandbox):
    class Sed(RepairAgent):
        async def agent(self, url, task):
            assert "should at last show" in self.issue
            assert "result -=" in (self.workspace / "tinytally" / "core.py").read_text()
            await self.shell("sed -i 's/result -=/result +=/' tinytally/core.py")
            await self.shell("echo > notes.txt")
            return await self.shell("python3 -c 'import tinytally as t; print(t.total([2, 3]))' || true")

    env = EnvSpec.of("tiny/Sed-v0", Sed, sandbox="auto").make()
    await begun(env, task_at(indexes, "iadd-isub", "result +="), sandbox)
    await env.run_agent("http://127.0.0.1:1")
    (env.workspace / "away.py").symlink_to("/etc/passwd")

    assert (env.workspace / "notes.txt").exists()
    assert await score_of(env) == 1.0

    alone = EnvSpec.of("tiny/Agent-v0", RepairAgent).make()
    with pytest.raises(SandboxUnavailable, match="register it with sandbox"):
        await begun(alone, rows("train", indexes)[0], None)
    await alone.shutdown()


def test_another_version_or_none_is_told_in_words(indexes, tmp_path, monkeypatch):
    content = json.loads((Path(indexes) / "tinytally.json").read_text())
    for name, change in (("tinytally", {"version": "1.3"}), ("tinyother", {"name": "tinyother"})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content | change))

    with pytest.raises(DependencyMissing) as caught:
        tasks("train", str(tmp_path))
    assert "tinytally is 1.2 instead of 1.3" in str(caught.value)
    assert "tinyother 1.2 is not installed" in str(caught.value)
    assert caught.value.remedy == "pip install 'tinyother==1.2' 'tinytally==1.3'"
    with pytest.raises(DependencyMissing, match="made from tinytally"):
        _ = Library.read(tmp_path / "tinytally.json").sources

    content["files"]["tinytally/core.py"]["checksum"] = "0"
    (tmp_path / "tinytally.json").write_text(json.dumps(content))
    with pytest.raises(TaskError, match="not the published file; pip install --force-reinstall"):
        _ = Library.read(tmp_path / "tinytally.json").sources

    monkeypatch.setattr(Library, "missing", property(lambda library: f"{library.name} is not installed"))
    with pytest.raises(DependencyMissing, match="boltons is not installed, humanize is") as bundled:
        tasks("test")
    assert bundled.value.remedy == install_line("miniswe")


def test_a_task_of_another_index_is_refused(indexes):
    task = rows("train", indexes)[0]

    for change in ({"library": "none"}, {"path": "none.py"}, {"version": "0"}):
        with pytest.raises(TaskError, match="no index has"):
            Repair.of({**task, **change})


@pytest.mark.parametrize(
    ("line", "column", "kind", "after"),
    [
        ("if a < b:", 5, "lt-le", "if a <= b:"),
        ("x = [-1]", 6, "plus-one", "x = [-2]"),
        ("return not a", 7, "not", "return a"),
        ("x.append(y)", 1, "append-insert", "x.insert(0, y)"),
    ],
)
def test_a_change_replaces_what_stands_at_its_place(line, column, kind, after):
    assert changed(f"1\n{line}\n3", Change(2, column, kind)) == f"1\n{after}\n3"
    with pytest.raises(TaskError, match="nothing at column 0"):
        changed(f"1\n{line}\n3", Change(2, 0, kind))
    with pytest.raises(TaskError, match="line 9"):
        changed(line, Change(9, 0, kind))


def test_changes_are_looked_for_in_code_alone():
    source = (
        'def f(a: int | 1, b=2) -> "1":\n    """1 < 2."""\n    # 1\n    if a is not None and a not in b:\n'
        "        return [-a for a in b[1:]]\n    x: 1 = a.strip() + 'in' - 1\n"
    )

    found = {(change.line, change.kind) for change in candidates(source)}

    assert found == {
        *((4, kind) for kind in ("if-ifnot", "isnot-is", "and-or", "notin-in")),
        *((5, kind) for kind in ("in-notin", "plus-one", "minus-one")),
        *((6, kind) for kind in ("strip", "add-sub", "sub-add", "plus-one", "minus-one")),
    }
    for change in candidates(source):
        assert changed(source, change) != source


def test_examples_are_varied():
    source = 'def f():\n    """F.\n\n    >>> a, [b] = (1, [2, 3])\n    >>> f("xy")\n    """\n'

    sessions = {session.name: [text.strip() for text in session.examples] for session in sessions_of(source)}

    assert sessions == {
        "0.0": ["a, [b] = (1, [2, 3])", 'f("xy")'],
        "0.1": ["a, [b] = (2, [3, 4])", "f('xy')"],
        "0.2": ["a, [b] = (1,)", "f('x')"],
        "0.3": ["a, [b] = ([3, 2], 1)", "f('yx')"],
    }


def test_the_bundled_indexes_have_thousands_of_tasks_and_libraries_held_out():
    train, test = rows("train"), rows("test")

    assert len(train) >= 2000
    assert len(test) >= 400
    assert len({row["id"] for row in train + test}) == len(train + test)
    assert not {row["library"] for row in train} & {row["library"] for row in test}


def test_the_page_names_every_library_with_its_version_and_licence_and_the_extra_installs_them():
    page = (ROOT / "docs" / "worlds" / "mini-swe.md").read_text()
    known = libraries(INDEXES).values()

    for library in known:
        number = sum(len(part.faults) for part in library.parts.values())
        row = (f"{library.name} {library.version}", library.licence, library.split, f"{number:,}")
        assert f"| {' | '.join(row)} |" in page
    pins = {f"{library.name}=={library.version}" for library in known}
    assert set(PROJECT["project"]["optional-dependencies"]["miniswe"]) == pins
