"""What unit tests share: a command line in this process, and folders of packages that may not be installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agentenv.cli import main


class _Missing(pytest.Module):
    """A module of tests whose package is not installed."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"the plug-in {self.path.parent.name} is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    package = module_path.parent.name
    if not package.startswith("agentenv_"):
        return None
    found = find_spec(package)
    # The folder of tests itself may be found, as a namespace, which has no file.
    is_there = found is not None and found.origin is not None
    return None if is_there else _Missing.from_parent(parent, path=module_path)


class Said(NamedTuple):
    """What a command line answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Run `agentenv` with these words in this process."""

    def call(*words: str) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(list(words))
        return Said(int(left.value.code or 0), *capsys.readouterr())

    return call
