"""Tests of a package stand in a folder with its name, and are skipped where the package is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest


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
