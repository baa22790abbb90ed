"""What the tests of pages, examples and notebooks share: an empty folder, the registry as it was, a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.envs import registry
from scenes import saved_model


@pytest.fixture(autouse=True)
def _own_folder_and_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    """The directory of a model that is small enough for any test and says nothing of use."""
    return saved_model(tmp_path / "tiny")
