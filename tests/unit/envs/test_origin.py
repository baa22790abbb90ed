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


def of_a_class_that_is_not_registered() -> EnvSpec:
    shop = spec("shop.py").load()
    return EnvSpec.of("origin/Other-v0", shop, tasks=sys.modules[shop.__module__].rows, kwargs={"size": 2})


FOUND = {
    "registered in a file": (
        *(lambda: spec("shop.py").with_kwargs({"size": 3}), "origin/Shop-v0 2 {'size': 3} 3"),
    ),
    "of a class whose tasks have no name": (
        *(lambda: spec("shop.py:Stall").with_kwargs({"size": 4}), "local/Stall-v0 2 {'size': 4} 4"),
    ),
    "of a class that is not registered": (
        *(of_a_class_that_is_not_registered, "origin/Other-v0 2 {'size': 2} 2"),
    ),
}


@pytest.mark.parametrize(("make", "found"), FOUND.values(), ids=FOUND)
def test_an_environment_of_a_file_is_found_in_a_fresh_process_in_another_directory(tmp_path, make, found):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "shop.py").write_text(FILE)
    (elsewhere / "spec.json").write_text(origin_of(make()))
    words = [sys.executable, "-c", READ, "spec.json"]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=elsewhere)

    assert done.stdout.strip() == found


def test_a_registered_specification_is_found_in_this_process_and_a_changed_one_by_its_record():
    entry = register("origin/Deadly-v0", Deadly, tasks=lambda: [{"x": 1}])
    assert find_again(origin_of(entry)) is entry
    assert copy.copy(entry) is copy.deepcopy(entry) is entry

    registry.remove("origin/Deadly-v0")
    entry = register("origin/Deadly-v0", Deadly, tasks=[{"x": 1}])
    changed = replace(entry, description="another one")
    assert find_again(origin_of(changed)) == changed != entry


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
