"""Engines that are closed with their test."""

from __future__ import annotations

import pytest

from agentenv.engine import TransformersEngine


@pytest.fixture
async def make():
    """Makes engines, which are closed after the test."""
    made = []
    yield lambda *given, **options: made.append(TransformersEngine(*given, **options)) or made[-1]
    for engine in made:
        await engine.close()
