"""The free memory is that of the system, or of the control group where that has less."""

from __future__ import annotations

import sys

import pytest

from agentenv.engine.hf import products as memory

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads Linux's files")


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("max", "5", 2048 * 1024), ("3000", "1000", 2000), ("3000", "4000", 0), (None, None, 2048 * 1024)],
)
def test_the_smaller_of_system_and_control_group_counts(limit, used, free, tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    2048 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text(used + "\n")
    monkeypatch.setattr(memory, "SYSTEM", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "GROUP", tmp_path)

    assert memory.free_memory() == free


def test_an_unknown_amount_counts_as_none(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SYSTEM", tmp_path / "missing")
    monkeypatch.setattr(memory, "GROUP", tmp_path)

    assert memory.free_memory() == 0
