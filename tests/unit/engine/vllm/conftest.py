"""Servers that are looked after often, so that no test waits for them."""

from __future__ import annotations

import pytest

from agentenv.engine.vllm import pool as pools


@pytest.fixture
def frequent_checks(monkeypatch):
    monkeypatch.setattr(pools, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(pools, "LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr(pools, "LIST_EVERY_S", 0.05)
    # The servers of these tests restart at once.
    monkeypatch.setattr(pools, "RESTART_S", 0.0)
