"""Specifications that another process finds again."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.core import UnknownEnvironment, UsageError
from agentenv.envs import EnvSpec, register, registry, spec
from agentenv.envs.origin import find_again, origin_of
from helpers.deadly import Deadly

FILE = """
from agentenv.envs import ToolEnv, register

class Shop(ToolEnv):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.size = size

    def start(self, x: int) -> str:
        return f"{x} of {self.size}"

class Stall(Shop):
    tasks = staticmethod(lambda: rows())

def rows():
    return [{"x": 1}, {"x": 2}]

register("origin/Shop-v0", Shop, tasks=lambda: rows(), rewards=[lambda answer: 1.0])
"""
READ = (
    "import sys; from agentenv.envs.origin import find_again; s = find_again(open(sys.argv[1]).read()); "
    "print(s.id, len(s.task_set()), dict(s.kwargs), s.make().size)"
)


@pytest.fixture(autouse=True)
def _shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("shop.py").write_text(FILE)
    yield
    for name in ("origin/Shop-v0", "origin/Deadly-v0"):
        registry.remove(name)


def read_in_a_fresh_process(entry: EnvSpec, directory: Path) -> str:
    """Return what another process, which runs in a copy of this directory, finds of a specification."""
    elsewhere = directory / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "shop.py").write_text(FILE)
    (elsewhere / "spec.json").write_text(origin_of(entry))
    words = [sys.executable, "-c", READ, "spec.json"]
    return subprocess.run(words, check=True, capture_output=True, text=True, cwd=elsewhere).stdout.strip()


def test_a_files_environment_is_found_in_a_fresh_process_in_another_directory(tmp_path: Path):
    entry = spec("shop.py").with_kwargs({"size": 3})

    assert read_in_a_fresh_process(entry, tmp_path) == "origin/Shop-v0 2 {'size': 3} 3"


def test_a_class_of_a_file_is_found_with_tasks_that_have_no_name(tmp_path: Path):
    entry = spec("shop.py:Stall").with_kwargs({"size": 4})

    assert read_in_a_fresh_process(entry, tmp_path) == "local/Stall-v0 2 {'size': 4} 4"


def test_an_unregistered_class_of_a_file_is_found_in_a_fresh_process(tmp_path: Path):
    shop = spec("shop.py").load()
    entry = EnvSpec.of("origin/Other-v0", shop, tasks=sys.modules[shop.__module__].rows, kwargs={"size": 2})

    assert read_in_a_fresh_process(entry, tmp_path) == "origin/Other-v0 2 {'size': 2} 2"


def test_a_registered_specification_is_found_in_this_process():
    entry = register("origin/Deadly-v0", Deadly, tasks=lambda: [{"x": 1}])

    assert find_again(origin_of(entry)) is entry


def test_a_changed_specification_travels_as_its_record():
    entry = register("origin/Deadly-v0", Deadly, tasks=[{"x": 1}])
    changed = replace(entry, description="another one")

    again = find_again(origin_of(changed))

    assert again == changed != entry


def test_a_part_without_a_name_is_refused_with_its_name():
    entry = EnvSpec.of("origin/Nameless-v0", Deadly, tasks=lambda: [{"x": 1}])

    with pytest.raises(UsageError, match="cannot be imported by name"):
        origin_of(entry)


def test_a_module_that_is_not_there_is_named():
    entry = register("origin/Deadly-v0", Deadly, tasks=[{"x": 1}])
    text = origin_of(entry).replace("tests", "nests").replace("origin/Deadly-v0", "origin/Hidden-v0")
    registry.remove("origin/Deadly-v0")

    with pytest.raises(UnknownEnvironment):
        find_again(text)


def test_a_copy_of_a_specification_is_the_specification():
    entry = EnvSpec.of("origin/Nameless-v0", Deadly, tasks=lambda: [{"x": 1}])

    assert copy.copy(entry) is copy.deepcopy(entry) is entry
