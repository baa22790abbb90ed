"""Each plug-in can be missing, as if it was not installed, and the rest works or says what it lacks."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PLUGINS = sorted(path.parent.name for path in Path(__file__).parents[2].glob("plugins/*/__init__.py"))
HIDE = """
import importlib.metadata, sys

HIDDEN = sys.argv.pop()

class Hide:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def entry_points(*, every=importlib.metadata.entry_points, **of):
    return importlib.metadata.EntryPoints(
        point for point in every(**of) if point.module.partition(".")[0] != HIDDEN
    )

sys.meta_path.insert(0, Hide)
importlib.metadata.entry_points = entry_points
"""
SMOKE = """
import asyncio
from dataclasses import replace

import agentenv as ae
from agentenv.cli import main

async def execute():
    async with ae.sandbox.create("none") as box:
        return (await box.run_code("print(6 * 7)")).stdout

def solve():
    spec = replace(ae.spec("agentenv/PythonMath-v0"), sandbox="auto")
    ((episode,),) = ae.evaluate(spec, "oracle", num_tasks=1).groups
    return episode.reward

try:
    main(["list"])
except SystemExit as left:
    assert not left.code
print("played", ae.evaluate("agentenv/Calculator-v0", "mock", num_tasks=2).report.num_episodes)
for backend, work in (("auto", solve), ("none", lambda: asyncio.run(execute()))):
    try:
        print(backend, "said:", work())
    except ae.AgentEnvError as error:
        print(backend, "said:", error)
"""
"""Lists, evaluates, and runs code in two sandboxes: in one as a tool of an environment."""
MISSED = {
    "auto": ("agentenv_jail", "the package of the local sandbox is not installed; use one of: docker"),
    "none": ("agentenv_unsafe", "unknown sandbox backend 'none'; use one of: auto, docker"),
}
"""The plug-in of each sandbox, and what is said without it."""


@pytest.fixture(scope="module", params=PLUGINS)
def without(request, tmp_path_factory) -> tuple[str, str]:
    """A plug-in, and what the smoke test of the rest prints while it is hidden."""
    done = subprocess.run(
        [sys.executable, "-c", HIDE + SMOKE, request.param],
        cwd=tmp_path_factory.mktemp("without"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return request.param, done.stdout


def test_every_plug_in_is_built_and_its_imports_are_held():
    tool = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]

    assert {f"plugins/{name}" for name in PLUGINS} <= {
        *tool["hatch"]["build"]["targets"]["wheel"]["packages"]
    }
    assert {*PLUGINS} <= {*tool["importlinter"]["root_packages"]}


def test_the_rest_is_listed_and_plays_without_a_plugin(without):
    _, said = without

    assert "agentenv/Calculator-v0" in said
    assert "played 2" in said


@pytest.mark.sandbox
def test_a_sandbox_that_is_there_runs_code_and_another_is_missed_in_words(without):
    hidden, told = without

    for backend, (plugin, words) in MISSED.items():
        said = told.partition(f"{backend} said: ")[2].partition("\n")[0]
        if hidden == plugin:
            assert said.startswith(words)
        else:
            assert said in {"1.0", "42"} or said.startswith("no isolation on this machine")


def test_tests_of_a_plugin_that_is_missing_are_skipped_with_the_reason(tmp_path):
    folder = tmp_path / "agentenv_nowhere"
    folder.mkdir()
    (folder / "test_it.py").write_text("import agentenv_nowhere\n")
    (tmp_path / "conftest.py").symlink_to(Path(__file__).parent / "conftest.py")

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert "the plug-in agentenv_nowhere is not installed" in done.stdout
